"""Files that are made of the code: written, or with `--check` compared with what is there."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(path: Path, text: str) -> int:
    """Write the file; with `--check` on the command line say whether it is stale.

    The exit code of the script.
    """
    if "--check" in sys.argv[1:]:
        fresh = path.exists() and path.read_text(encoding="utf-8") == text
        sys.stdout.write("" if fresh else f"{path} is stale: run {Path(sys.argv[0]).name}\n")
        return 0 if fresh else 1
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"Wrote {path}\n")
    return 0
