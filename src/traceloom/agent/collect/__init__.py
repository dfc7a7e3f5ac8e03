"""What collects: one module per thing that is looked at; each has a period, a time-out and a metric about itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from traceloom.agent.metrics import Histogram, Reading


class Collector(Protocol):
    """Delivers all its readings each time. Blocks; called from a thread, never twice at once."""

    name: str
    period_s: float
    timeout_s: float

    def collect(self) -> Sequence[Reading | Histogram]:
        """Look.

        Raises:
            OSError: Nothing can be seen now; counted, and said in `agent doctor`.
        """

    def trouble(self) -> list[str]:
        """What of it does not work here: sentences for the doctor, each with what would help."""
