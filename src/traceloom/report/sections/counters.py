"""Hardware counters that the recording holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.counters import OP_SCHEMA, SERIES_SCHEMA
from traceloom.model import Trace, units
from traceloom.model.frames import schema
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Frames, Section, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CountersValue

_MOST = 200  # series, and operators, of each rank
_RANGES = schema("range_count launch_count unpaired absent")


class CountersSection(Section[Frames, "CountersValue"]):
    """Hardware counters, over time and by operator."""

    key, title = "counters", "Counters"
    note = "Hardware counters in the recording: over time, and of single kernels with their operators."
    what = "hardware counters that the recording holds"
    parts = {
        "series": Part(
            SERIES_SCHEMA,
            "counters sampled over time",
            {"source": "the file does not say whose counter it is"},
            empty="no counters over time were recorded",
        ),
        "operators": Part(
            OP_SCHEMA,
            "counters of single kernels, added up by operator",
            nullable=("op",),
            empty="no counters of kernels were recorded, or they cannot be joined to launches",
        ),
        "ranges": Part(
            _RANGES,
            "how many kernels have counters, and whether they have launches",
            {
                "unpaired": "null where every kernel with counters has its launch",
                "absent": "null where the counters could be read",
            },
            empty="no counters of kernels were recorded",
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        counters = analyze.counters(trace)
        row = (counters.range_count, counters.launch_count, counters.unpaired, counters.absent)
        return {
            "series": counters.series.head(_MOST),
            "operators": counters.operators.head(_MOST),
            "ranges": pl.DataFrame([row] if counters.range_count else [], schema=_RANGES, orient="row"),
        }

    def build(self, study: Study[Frames], absent: Absent) -> CountersValue:
        return self.lists(study.frames(self.parts), absent)

    def tables(self, value: CountersValue) -> Iterator[Table]:
        if value["series"]:
            columns = ["?rank", "+source", "samples", "min", "mean", "max", "counter"]
            yield table("counters.series", "Counters over time", columns, value["series"])
        if value["operators"]:
            columns = ["?rank", "op", "ranges", "value", "counter"]
            yield table(
                "counters.operators",
                "Counters of kernels, by operator",
                columns,
                value["operators"],
                "The k-th measured kernel belongs to the k-th launch.",
            )

    def summary(self, value: CountersValue) -> str | None:
        clauses = []
        if value["series"]:
            clauses.append(f"{units.count(len(value['series']))} recorded over time")
        ranges = sum(row["range_count"] for row in value["ranges"])
        if ranges:
            clauses.append(f"counters of {units.counted(ranges, 'kernel')}")
        if any(row["unpaired"] for row in value["ranges"]):
            clauses.append("not as many as launches, so that their operators are unknown")
        return ", ".join(clauses) or None


SECTION = CountersSection()
