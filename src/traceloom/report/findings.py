"""Findings in the report document: what to fix first, and what that is judged by."""

from __future__ import annotations

from typing import Any

from traceloom.errors import InputError, UsageError
from traceloom.model import Session
from traceloom.model.units import duration
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections import FINDINGS, NOT_ASKED

MOST_EVENTS = 3_000_000  # a graph takes about 1 kB of memory for each

Row = dict[str, Any]


def told(session: Session, options: ReportOptions, absent: Absent) -> tuple[list[Row], Row | None]:
    """`findings` and `findings_ground` of the document; nothing where `--only` leaves them out."""
    if options.only is not None and FINDINGS not in options.only:
        return _nothing(NOT_ASKED, absent)
    events = sum(trace.events.height for trace in session.traces)
    if not events:
        return _nothing("the traces hold no events", absent)
    from traceloom.findings import RULES, Context, rank  # loaded where it is asked for

    context = Context.of(session)
    steps = max((trace.steps.height for trace in session.traces), default=0) or 1
    if events // steps > MOST_EVENTS:
        return _nothing(
            f"about {events // steps:,} events would have to be linked, more than {MOST_EVENTS:,}; choose ranks with "
            "--rank", absent
        )  # fmt: skip
    try:
        ranked = rank(context, RULES)
    except (InputError, UsageError) as error:  # traces that cannot be one graph: two windows of a rank, ranks unknown
        return _nothing(f"the traces cannot be linked: {error}", absent)
    times = [finding.to_dict() | {"list": "time"} for finding in ranked.time]
    rows = times + [finding.to_dict() | {"list": "memory"} for finding in ranked.memory]
    for row in rows:
        for key in (
            "saving_ns", "saving_fraction", "alone_ns", "saving_low_ns", "saving_high_ns", "saving_bytes", "risk",
        ):  # fmt: skip
            absent.value(row[key], f"findings[*].{key}")
        for evidence in row["evidence"]:
            if evidence["start_ns"] is not None:
                evidence["start_ns"] -= absent.epoch_ns
            for key in ("rank", "start_ns", "duration_ns", "lane", "total_ns"):
                absent.value(evidence[key], f"findings[*].evidence[*].{key}")
    if not rows:
        absent.say("findings")
    # what the savings refer to, in words
    law = context.law
    length = duration(context.step_ns)
    counted = max((finding.step_count for finding in ranked.time), default=1)
    if counted > 1:
        basis = f"per {context.unit} of {length}, the middle one of {counted}"
    elif context.step is None:
        basis = f"of the window of {length}"
    else:
        start = "its first start on any rank" if context.rank_count > 1 else "its start"
        basis = f"of {context.unit} {context.step}, {length} from {start} to the end of its last work"
    return rows, {
        "step": absent.value(context.step, "findings_ground.step"),
        "unit": context.unit,
        "basis": basis,
        "whole_ns": context.whole_ns,
        "law": law.sentence,
        "holds": law.holds,
        "exact_error_ns": law.exact_error_ns,
        "honest_error": law.honest_error,
        "point_error": law.point_error,
        "residual_share": law.residual_share,
        "limit": absent.value(ranked.limit or None, "findings_ground.limit"),
        "host_ratio": absent.value(context.host_ratio, "findings_ground.host_ratio"),
        "abstentions": [{"slug": abstention.slug, "reason": abstention.reason} for abstention in ranked.abstentions],
    }


def _nothing(reason: str, absent: Absent) -> tuple[list[Row], None]:
    absent.say("findings", reason)
    absent.say("findings_ground", reason)
    return [], None
