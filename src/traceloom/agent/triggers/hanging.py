"""Rules on jobs that make no steps any more."""

from __future__ import annotations

from collections.abc import Iterator

from traceloom.agent.hang_desk import HangDesk
from traceloom.agent.triggers import Firing


class HangRuleWatch:
    """Gives each hang once it is sure.

    Args:
        hangs: Knows them.
    """

    def __init__(self, hangs: HangDesk) -> None:
        self._hangs = hangs
        self._known: frozenset[str] | None = None  # as of the last look; None before it: what an earlier agent saw

    def look(self, now_ns: int) -> Iterator[Firing]:  # noqa: ARG002  (of the protocol)
        """Hangs that began since the last look and of which it is known whom the others wait for."""
        described = [record for record in self._hangs.records if record.sentence]
        before, self._known = self._known, frozenset(record.id for record in described)
        for record in described:
            if before is not None and record.id not in before and record.state == "hangs":
                yield Firing({"job": record.hang.job}, record.id, record.sentence)

    def trouble(self) -> str:
        """Whether hangs are watched for here."""
        return "" if self._hangs.config.hangs.watch else "hangs are not watched for: `hangs.watch` is off"
