"""What to fix first: findings with what fixing them saves."""

from __future__ import annotations

from traceloom.findings import (
    communication,
    data,
    efficiency,
    host_bound,
    memory,
    repeated,
    stragglers,
    synchronisation,
)
from traceloom.findings.ground import Ground
from traceloom.findings.ranking import Ranked, rank
from traceloom.findings.rule import Rule
from traceloom.model import Session

RULES: tuple[Rule, ...] = (
    *host_bound.RULES,
    *data.RULES,
    *synchronisation.RULES,
    *communication.RULES,
    *stragglers.RULES,
    *efficiency.RULES,
    *repeated.RULES,
    *memory.RULES,
)
"""All rules; the order says nothing."""


def findings(session: Session) -> Ranked:
    """What to fix first in a run: findings about time, ranked and disjoint, and about memory; and who abstained.

    Example:
        >>> for finding in findings(traceloom.load("run")).time:  # doctest: +SKIP
        ...     print(finding.saving_fraction, finding.title)
    """
    return rank(Ground.of(session), RULES)


__all__ = ["RULES", "Ground", "Ranked", "Rule", "findings", "rank"]
