"""The last lines of a verb: what was written, and what to try next."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def tell(args: argparse.Namespace, written: list[tuple[Path, int]], following: str | None) -> None:
    """Print them; nothing with `--quiet`, beside standard output where that is JSON.

    Args:
        args: With `quiet` and `json`.
        written: Files with their sizes, bytes.
        following: The next useful command, for who has written nothing; None where there is none.
    """
    from traceloom.model import units

    if args.quiet:
        return
    stream = sys.stderr if args.json else sys.stdout
    for path, size in written:
        print(f"Wrote {path} ({units.size(size)}).", file=stream)
    if following is not None and not written and not args.json:
        print(f"\nNext: {following}", file=stream)
