"""What to fix first: findings with what fixing them saves."""

from traceloom.analyze.roofline import PeakSpec
from traceloom.errors import InputError, UsageError
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

MAX_STEP_EVENTS = 3_000_000  # a graph takes about 1 kB of memory for each

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


def find_linkable(session: Session, peak: PeakSpec = None) -> tuple[Context, Ranked] | str:
    """Returns what findings are of, and these; or why the run has none: it is too large to be
    linked, or its traces cannot form one graph.
    """
    if not session.event_count:
        return "the traces hold no events"
    steps = max((trace.steps.height for trace in session.traces), default=0) or 1
    step_events = session.event_count // steps
    if step_events > MAX_STEP_EVENTS:
        return (
            f"about {step_events:,} events would have to be linked, more than {MAX_STEP_EVENTS:,}; choose ranks with "
            "--rank"
        )
    context = Context.of(session, peak)
    try:
        return context, rank(context, RULES)
    except (InputError, UsageError) as error:  # two windows of a rank, ranks unknown
        return f"the traces cannot be linked: {error}"


__all__ = ["RULES", "Context", "FindingRule", "Ranked", "find_linkable", "findings", "rank"]
