"""The longest gaps of the devices, with the evidence of their causes."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom import analyze
from traceloom.analyze.longest_gaps import SCHEMA
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import ranked
from traceloom.report.table import Col, Table

_EACH = 50  # gaps of a rank
_ALL = 1000  # gaps of all ranks
_FRAMES = 8  # innermost frames of a stack that are kept
_NAME = 48
_MAY_LACK = (
    *("device", "step", "evidence", "launch", "launch_name", "host_event", "host_activity", "stack"),
    *("producer", "producer_name", "wait", "wait_name"),
)


def _measure(trace: Trace, _options: ReportOptions) -> pl.DataFrame:
    return analyze.longest_gaps(trace, analyze.idle(trace), _EACH).with_columns(pl.col("stack").list.tail(_FRAMES))


def _build(study: Study[pl.DataFrame], absent: Absent) -> list[Row]:
    rows = study.concat(lambda gaps: gaps).sort("duration_ns", descending=True, maintain_order=True).head(_ALL)
    if not rows.height:
        absent.say("idle_gaps")
    return absent.rows(rows, "idle_gaps")


def _shown(row: Row) -> Row:
    """A row with its cause, and what explains it, in words."""
    call = row["launch_name"] if row["cause"] in ("launch_latency", "unexplained") else None
    origin = row["producer_name"] or call
    stack = " > ".join([*(row["stack"] or [])[-2:], row["host_activity"]]) if row["host_activity"] else None
    return {**row, "cause": row["cause"].replace("_", " "), "because": stack or origin}


def _tables(value: list[Row]) -> Iterator[Table]:
    several = len({row["rank"] for row in value}) > 1
    columns = [
        *([Col("rank", "Rank", "count")] if several else []),
        Col("duration_ns", "Gap", "time"),
        Col("start_ns", "At", "time", "since the start of the run"),
        Col("cause", "Cause", "text", "the cause with most of the gap's time"),
        Col("cause_ns", "Of it", "time", "the cause's time in the gap", narrow=False),
        Col("evidence", "Evidence", "text", narrow=False),
        Col("step", "Step", "count", narrow=False),
        Col("because", "What stands for it", "name", "the host's event and what it stood in, or the awaited work"),
    ]
    more = [Col("before_name", "Work before", "name"), Col("after_name", "Work after", "name")]
    if value:
        rows = [_shown(row) for row in value]
        yield Table("idle-gaps-longest", "Longest gaps", columns, rows, "idle_gaps")
        yield Table("idle-gaps-work", "Work around them", [*columns[: 3 + several], *more], rows, "idle_gaps")


def _summary(value: list[Row]) -> str | None:
    if not value:
        return None
    top = _shown(value[0])
    reason = top["host_activity"] or top["because"]
    where = f": {short(reason, _NAME)}" if reason else ""
    return f"the longest gap is {units.duration(top['duration_ns'])}, {top['cause']}{where}"


SECTION = Section(
    key="idle_gaps",
    title="Longest gaps",
    note="The longest stretches in which a device had nothing to do, each with its cause and what stands for it.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=ranked(
        SCHEMA, nullable=_MAY_LACK, what="the longest gaps of the devices; rows of `trace.events` with names"
    ),
    reasons={
        "idle_gaps": "no device was ever idle between two pieces of work",
        "idle_gaps[*].rank": "the file does not say its rank",
        "idle_gaps[*].device": "the file does not number the device",
        "idle_gaps[*].step": "null is the time outside all steps",
        "idle_gaps[*].evidence": "the launch is not recorded, so there is nothing to go by",
        "idle_gaps[*].launch": "the launch happened before the recording, or was lost",
        "idle_gaps[*].launch_name": "the launch happened before the recording, or was lost",
        **dict.fromkeys(
            (f"idle_gaps[*].{name}" for name in ("host_event", "host_activity", "stack")),
            "the cause is not the host's, or nothing is recorded of what it did",
        ),
        **dict.fromkeys(
            (f"idle_gaps[*].{name}" for name in ("producer", "producer_name", "wait", "wait_name")),
            "only a dependency has one",
        ),
    },
)
