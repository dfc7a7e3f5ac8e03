"""Findings in the report document: what to fix first, and what that is judged by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traceloom.errors import InputError, UsageError
from traceloom.model import Session
from traceloom.model.finding import Finding
from traceloom.model.units import duration
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections import FINDINGS, NOT_ASKED

if TYPE_CHECKING:
    from traceloom.findings import Ground, Ranked

MOST_EVENTS = 3_000_000  # a graph takes about 1 kB of memory for each

Row = dict[str, Any]


def told(session: Session, options: ReportOptions, absent: Absent) -> tuple[list[Row], Row | None]:
    """`findings` and `findings_ground` of the document; nothing where `--only` leaves them out."""
    if options.only is not None and FINDINGS not in options.only:
        return _nothing(NOT_ASKED, absent)
    events = sum(trace.events.height for trace in session.traces)
    if not events:
        return _nothing("the traces hold no events", absent)
    from traceloom.findings import RULES, Ground, rank  # loaded where it is asked for

    ground = Ground.of(session)
    steps = max((trace.steps.height for trace in session.traces), default=0) or 1
    if events // steps > MOST_EVENTS:
        return _nothing(
            f"about {events // steps:,} events would have to be linked, more than {MOST_EVENTS:,}; choose ranks with "
            "--rank", absent
        )  # fmt: skip
    try:
        found = rank(ground, RULES)
    except (InputError, UsageError) as error:  # traces that cannot be one graph: two windows of a rank, ranks unknown
        return _nothing(f"the traces cannot be linked: {error}", absent)
    rows = [_row(one, kind, absent) for kind, some in (("time", found.time), ("memory", found.memory)) for one in some]
    if not rows:
        absent.say("findings")
    return rows, _ground(ground, found, absent)


def _nothing(reason: str, absent: Absent) -> tuple[list[Row], None]:
    absent.say("findings", reason)
    absent.say("findings_ground", reason)
    return [], None


def _row(finding: Finding, kind: str, absent: Absent) -> Row:
    row = finding.to_dict() | {"list": kind}
    for key in (
        "saving_ns", "saving_fraction", "alone_ns", "saving_low_ns", "saving_high_ns", "saving_bytes", "risk",
    ):  # fmt: skip
        absent.value(row[key], f"findings[*].{key}")
    for one in row["evidence"]:
        if one["start_ns"] is not None:
            one["start_ns"] -= absent.epoch_ns
        for key in ("rank", "start_ns", "duration_ns", "lane", "total_ns"):
            absent.value(one[key], f"findings[*].evidence[*].{key}")
    return row


def _basis(ground: Ground, found: Ranked) -> str:
    """What the savings are of, in words."""
    length = duration(ground.step_ns)
    steps = max((one.step_count for one in found.time), default=1)
    if steps > 1:
        return f"per {ground.unit} of {length}, the middle one of {steps}"
    if ground.step is None:
        return f"of the window of {length}"
    start = "its first start on any rank" if ground.rank_count > 1 else "its start"
    return f"of {ground.unit} {ground.step}, {length} from {start} to the end of its last work"


def _ground(ground: Ground, found: Ranked, absent: Absent) -> Row:
    law = ground.law
    return {
        "step": absent.value(ground.step, "findings_ground.step"),
        "unit": ground.unit,
        "basis": _basis(ground, found),
        "whole_ns": ground.whole_ns,
        "law": law.sentence,
        "holds": law.holds,
        "exact_error_ns": law.exact_error_ns,
        "honest_error": law.honest_error,
        "point_error": law.point_error,
        "residual_share": law.residual_share,
        "limit": absent.value(found.limit or None, "findings_ground.limit"),
        "host_ratio": absent.value(ground.host_ratio, "findings_ground.host_ratio"),
        "abstentions": [{"slug": one.slug, "reason": one.reason} for one in found.abstentions],
    }
