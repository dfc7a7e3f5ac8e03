"""What to fix first: findings with what fixing them saves."""

from __future__ import annotations

from traceloom.findings import (
    communication,
    host_bound,
    host_waits,
    interruptions,
    kernels,
    stragglers,
    transfers,
)
from traceloom.findings.context import Context
from traceloom.findings.ranking import Ranked, rank
from traceloom.findings.rule import FindingRule
from traceloom.trace.session import Session

RULES: tuple[FindingRule, ...] = (
    *host_waits.DATA_RULES,
    *interruptions.RULES,
    *kernels.CAUSE_RULES,
    *stragglers.RULES,
    *host_waits.RULES,
    *transfers.RULES,
    *host_waits.SYNCHRONISATION_RULES,
    *stragglers.PIPELINE_RULES,
    *communication.RULES,
    *communication.COMMUNICATION_RULES,
    *host_bound.HOST_OPERATORS_RULES,
    *host_bound.RULES,
    *kernels.RULES,
    *transfers.MEMORY_RULES,
)
"""All rules.

Of two fixes with the same saving, the one whose rule comes first is reported: causes come before
symptoms.
"""


def findings(session: Session) -> Ranked:
    """Returns what to fix first in a run: findings about time, ranked and disjoint, findings about
    memory, and abstentions.

    Example:
        >>> for finding in findings(traceloom.load("run")).time:  # doctest: +SKIP
        ...     print(finding.saving_fraction, finding.title)
    """
    return rank(Context.of(session), RULES)


__all__ = ["RULES", "Context", "FindingRule", "Ranked", "findings", "rank"]
