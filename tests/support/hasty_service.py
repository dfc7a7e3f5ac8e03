"""`traceloom serve` that waits for hosts for seconds where the real one waits for minutes: `SERVE...`."""

from __future__ import annotations

import sys

from traceloom.cli import main
from traceloom.collect import plan

if __name__ == "__main__":
    plan._READY_NS = plan._DRAIN_NS = 20 * plan._S
    sys.exit(main(["serve", *sys.argv[1:]]))
