"""`traceloom serve` whose pages wait so many seconds for answers to questions: `SECONDS COMMIT_SECONDS SERVE...`.

Of tests that look at pages nobody knows how long a loaded machine takes; one has pages wait for nothing. Rows wait
`COMMIT_SECONDS` for others, and those of minutes and jobs twelve times as long.
"""

from __future__ import annotations

import sys

from traceloom.cli import main
from traceloom.fleet.portal import app
from traceloom.fleet.service import pipeline


def patient(seconds: float, commit_s: float = pipeline.COMMIT_INTERVAL_S) -> list[str]:
    """The command, but for its arguments."""
    return [sys.executable, "-m", "support.patient_service", str(seconds), str(commit_s)]


if __name__ == "__main__":
    app.PAGE_WAIT_S = float(sys.argv[1])
    pipeline.COMMIT_INTERVAL_S = float(sys.argv[2])
    sys.exit(main(["serve", *sys.argv[3:]]))
