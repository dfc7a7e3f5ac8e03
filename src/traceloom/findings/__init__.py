"""What to fix first: findings with what fixing them saves."""

from __future__ import annotations

from traceloom.findings import (
    communication,
    copies,
    data,
    efficiency,
    host_bound,
    host_operators,
    interruptions,
    links,
    memory,
    pauses,
    pipeline,
    repeated,
    stragglers,
    synchronisation,
)
from traceloom.findings.context import Context
from traceloom.findings.ranking import Ranked, rank
from traceloom.findings.rule import FindingRule
from traceloom.model import Session

RULES: tuple[FindingRule, ...] = (
    *data.RULES,
    *interruptions.RULES,
    *repeated.RULES,
    *stragglers.RULES,
    *pauses.RULES,
    *copies.RULES,
    *synchronisation.RULES,
    *pipeline.RULES,
    *links.RULES,
    *communication.RULES,
    *host_operators.RULES,
    *host_bound.RULES,
    *efficiency.RULES,
    *memory.RULES,
)
"""All rules. Of two fixes that save the same, the one whose rule comes first is told: causes before symptoms."""


def findings(session: Session) -> Ranked:
    """What to fix first in a run: findings about time, ranked and disjoint, and about memory; and who abstained.

    Example:
        >>> for finding in findings(traceloom.load("run")).time:  # doctest: +SKIP
        ...     print(finding.saving_fraction, finding.title)
    """
    return rank(Context.of(session), RULES)


__all__ = ["RULES", "Context", "Ranked", "Rule", "findings", "rank"]
