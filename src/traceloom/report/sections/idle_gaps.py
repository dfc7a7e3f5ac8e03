"""The longest gaps of the devices, with the evidence of their causes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.longest_gaps import SCHEMA, longest_gaps_of
from traceloom.analyze.remembered import of_each
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Columns, Section, Study, on_rank, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import IdleGapsRow

_EACH = 50  # gaps of a rank
_ALL = 1000  # gaps of all ranks
_FRAMES = 8  # innermost frames of a stack that are kept
_NAME = 48
_NO_LAUNCH = "the launch happened before the recording, or was lost"
_NOT_HOST = "the cause is not the host's, or nothing is recorded of what it did"
_GAPS = Part(
    SCHEMA,
    "the longest gaps of the devices; rows of `trace.events` with names",
    {
        "evidence": "the launch is not recorded, so there is nothing to go by",
        "launch": _NO_LAUNCH,
        "launch_name": _NO_LAUNCH,
        **dict.fromkeys(("host_event", "host_activity", "stack"), _NOT_HOST),
        **dict.fromkeys(("producer", "producer_name", "wait", "wait_name"), "only a dependency has one"),
    },
    ("device", "step"),
    "no device was ever idle between two pieces of work",
)


def _because(row: IdleGapsRow) -> str | None:
    """What explains a gap, in words."""
    call = row["launch_name"] if row["cause"] in ("launch_latency", "unexplained") else None
    stack = " > ".join([*(row["stack"] or [])[-2:], row["host_activity"]]) if row["host_activity"] else None
    return stack or row["producer_name"] or call


class IdleGapsSection(Section[pl.DataFrame, "list[IdleGapsRow]"]):
    """The longest gaps of all devices."""

    key, title = "idle_gaps", "Longest gaps"
    note = "The longest stretches in which a device had nothing to do, each with its cause and what stands for it."
    schema = _GAPS.schema()
    reasons = _GAPS.reasons("idle_gaps")

    def measure(self, trace: Trace, options: ReportOptions) -> pl.DataFrame:
        return _longest(trace).with_columns(pl.col("stack").list.tail(_FRAMES))

    def build(self, study: Study[pl.DataFrame], absent: Absent) -> list[IdleGapsRow]:
        gaps = study.concat(lambda gaps: gaps).sort("duration_ns", descending=True, maintain_order=True).head(_ALL)
        if not gaps.height:
            absent.say("idle_gaps")
        return absent.rows(gaps, "idle_gaps")

    def tables(self, value: list[IdleGapsRow]) -> Iterator[Table]:
        if not value:
            return
        rows = [{**row, "cause": row["cause"].replace("_", " "), "because": _because(row)} for row in value]
        because = Col("because", "Because", "name",
                      "the host's event and what it stood in, or the awaited work")  # fmt: skip
        columns: Columns = ["?rank", "duration_ns", "start_ns", "cause", "+cause_ns", "+evidence", "+step", because]
        yield table("idle_gaps", "Longest gaps", columns, rows, key="idle-gaps-longest")
        columns = ["?rank", "duration_ns", "start_ns", "cause", "before_name", "after_name"]
        yield table("idle_gaps", "Work around them", columns, rows, key="idle-gaps-work")

    def summary(self, value: list[IdleGapsRow]) -> str | None:
        if not value:
            return None
        top = value[0]
        reason = top["host_activity"] or _because(top)
        where = f": {short(reason, _NAME)}" if reason else ""
        length = f"{units.duration(top['duration_ns'])}{on_rank(top, value)}"
        mostly = "" if top["cause_ns"] == top["duration_ns"] else "mostly "
        return f"the longest gap is {length}, {mostly}{top['cause'].replace('_', ' ')}{where}"


@of_each
def _longest(traces: Sequence[Trace]) -> Iterable[pl.DataFrame]:
    return longest_gaps_of(traces, map(analyze.idle, traces), _EACH)


SECTION = IdleGapsSection()
