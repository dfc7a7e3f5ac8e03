"""`traceloom serve` that waits for hosts for half a minute where the real one waits for two: `SERVE...`."""

from __future__ import annotations

import sys

from traceloom.cli import main
from traceloom.fleet.service import request_plan

if __name__ == "__main__":
    request_plan._READY_TIMEOUT_NS = request_plan._DRAIN_TIMEOUT_NS = 30 * request_plan._SECOND_NS
    sys.exit(main(["serve", *sys.argv[1:]]))
