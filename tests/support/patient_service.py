"""`traceloom serve` whose pages wait so many seconds for answers to questions: `SECONDS SERVE...`.

Of tests that look at pages nobody knows how long a loaded machine takes; one has pages wait for nothing.
"""

from __future__ import annotations

import sys

from traceloom.cli import main
from traceloom.fleet.portal import app


def patient(seconds: float) -> list[str]:
    """The command, but for its arguments."""
    return [sys.executable, "-m", "support.patient_service", str(seconds)]


if __name__ == "__main__":
    app.PAGE_WAIT_S = float(sys.argv[1])
    sys.exit(main(["serve", *sys.argv[2:]]))
