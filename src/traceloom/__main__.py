"""`python -m traceloom`: the same as the command `traceloom`."""

from __future__ import annotations

import sys

from traceloom.cli import main

if __name__ == "__main__":
    sys.exit(main())
