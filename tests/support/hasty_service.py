"""`traceloom serve` that waits for hosts for half a minute where the real one waits for two: `SERVE...`."""

from __future__ import annotations

import sys

from traceloom.cli import main
from traceloom.collect import plan

if __name__ == "__main__":
    plan._READY_NS = plan._DRAIN_NS = 30 * plan._S
    sys.exit(main(["serve", *sys.argv[1:]]))
