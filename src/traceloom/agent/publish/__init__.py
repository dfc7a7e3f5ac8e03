"""What is published: OpenMetrics over HTTP, OTLP, JSON lines, Parquet; each renders the board."""

from __future__ import annotations

from typing import Protocol

from traceloom.agent.board import Board
from traceloom.agent.config import Config


class Publisher(Protocol):
    """Takes a copy of the board every `period_s` seconds and passes it on. Blocks; called from a thread.

    What goes wrong outside is counted and never raised: `failures`, and in `trouble` why the last delivery failed, or
    "" where it did not.
    """

    name: str
    period_s: float
    failures: int
    trouble: str

    def start(self) -> None:
        """Make ready.

        Raises:
            InputError: `no-extra`: what it needs is not installed.
        """

    def put(self, board: Board) -> None:
        """Pass it on."""

    def close(self) -> None:
        """Finish what is begun; from another thread than `put`, which may be waiting for a receiver."""


def publishers(config: Config) -> list[Publisher]:
    """Those that the configuration wants."""
    out: list[Publisher] = []
    if config.otlp.endpoint:
        from traceloom.agent.publish.otlp import OtlpPublisher

        out.append(OtlpPublisher(config))
    if config.files.json_lines:
        from traceloom.agent.publish.json_lines import JsonLines

        out.append(JsonLines(config))
    if config.files.parquet:
        from traceloom.agent.publish.parquet import ParquetFiles

        out.append(ParquetFiles(config))
    return out
