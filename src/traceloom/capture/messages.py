"""What recording says to the user: few lines, on standard error, each with our name in front."""

from __future__ import annotations

import contextlib
import sys

from traceloom.harmless import harmless

_said: set[str] = set()


def say(text: str) -> None:
    """Print one line; a closed or missing standard error must not hurt the user's program."""
    with contextlib.suppress(Exception):
        print(f"traceloom: {harmless(text)}", file=sys.stderr, flush=True)  # noqa: T201


def say_once(slug: str, text: str) -> None:
    """Print a line at most once in this process."""
    if slug not in _said:
        _said.add(slug)
        say(f"{text} [{slug}]")
