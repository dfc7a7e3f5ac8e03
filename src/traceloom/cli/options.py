"""Options that several verbs have in common."""

from __future__ import annotations

import argparse


def add_reading(more: argparse._ActionsContainer) -> None:
    """The options of whatever reads traces."""
    more.add_argument("--no-cache", action="store_true", help="read the files anew, and keep nothing")
    more.add_argument("--quiet", action="store_true", help="no progress, no closing line")
    more.add_argument("--debug", action="store_true", help="show a traceback when something fails")


def ranks(text: str) -> tuple[int, ...]:
    """`0,3` as ranks.

    Raises:
        argparse.ArgumentTypeError: It is no list of numbers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a rank, as 3 or 0,3") from None
