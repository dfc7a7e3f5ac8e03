"""Sections about copies and hardware counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.copies import KIND_SCHEMA, OP_SCHEMA
from traceloom.analyze.kernel_efficiency import (
    OP_SCHEMA as KERNEL_EFFICIENCY_OP_SCHEMA,
    SERIES_SCHEMA,
)
from traceloom.analyze.steps import build_spread_schema
from traceloom.report.document import ListSchema, ReportOptions, Table, UnknownValues, format_yes_no
from traceloom.report.sections.section import Frames, Measurements, Section, build_table
from traceloom.system import units
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents.sections import CopiesValue, CountersValue


_MAX_OPS = 50  # of each rank
_PER_STEP_SCHEMA = build_schema(
    "device kind", build_spread_schema("call_count", "copied_bytes", "total_ns")
)
_NO_COPIES_REASON = "no copies or fills were recorded"
_NO_BYTES_REASON = "the recording does not say how much is copied"
_NO_RATE_REASON = "no such copy has both a size and a duration"
_NOT_PINNED = {
    "pageable": "the recording does not say whether the host's memory is pinned",
    "bytes": _NO_BYTES_REASON,
}


class CopiesSection(Section[Frames, "CopiesValue"]):
    key, title = "copies", "Copies"
    note = "How much is copied and filled, in which direction, how fast and for whom."
    what = "copies and fills of GPU memory"
    parts = {
        "kinds": ListSchema(
            KIND_SCHEMA,
            "copies and fills by device, direction and kinds of memory",
            {
                "source_memory": "a fill has no source, or the recording does not say which memory it is",
                "target_memory": "the recording does not say which memory it is",
                **_NOT_PINNED,
                **dict.fromkeys(
                    ("bytes_per_s", "min_bytes_per_s", "max_bytes_per_s"), _NO_RATE_REASON
                ),
            },
            ("device",),
            _NO_COPIES_REASON,
        ),
        "operators": ListSchema(
            OP_SCHEMA,
            "copies and fills by the operator that launched them",
            _NOT_PINNED,
            ("op",),
            _NO_COPIES_REASON,
        ),
        "per_step": ListSchema(
            _PER_STEP_SCHEMA,
            "copies and fills of a usual step, by direction",
            {f"{how}_copied_bytes": _NO_BYTES_REASON for how in ("mean", "min", "max")},
            ("device",),
            "the trace holds no whole step with copies",
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        copies = analyze.copies(trace)
        per_step = copies.per_step.pipe(cast_to_schema, _PER_STEP_SCHEMA)
        return {"kinds": copies.kinds, "operators": copies.ops.head(_MAX_OPS), "per_step": per_step}

    def build(self, measurements: Measurements[Frames], unknowns: UnknownValues) -> CopiesValue:
        return self.lists(measurements.frames(self.parts), unknowns)

    def tables(self, value: CopiesValue) -> Iterator[Table]:
        kinds = value["kinds"]
        if not kinds:
            return
        columns = [
            "?rank",
            "?device",
            "kind",
            "+source_memory",
            "+target_memory",
            "+pageable",
            "bytes",
            "count",
            "total_ns",
            "bytes_per_s",
            "+min_bytes_per_s",
            "+max_bytes_per_s",
            "+instant_count",
        ]
        rows = [{**row, "pageable": format_yes_no(row["pageable"])} for row in kinds]
        yield build_table("copies.kinds", "Copies by direction", columns, rows)
        columns = ["?rank", "kind", "bytes", "count", "total_ns", "op"]
        yield build_table(
            "copies.operators", "Copies by operator", columns, value["operators"], among=kinds
        )
        if value["per_step"]:
            columns = [
                "?rank",
                "?device",
                "kind",
                "mean_call_count",
                "mean_copied_bytes",
                "mean_total_ns",
                "min_total_ns",
                "max_total_ns",
            ]
            yield build_table(
                "copies.per_step", "Copies of a usual step", columns, value["per_step"], among=kinds
            )

    def summary(self, value: CopiesValue) -> str | None:
        rows = [row for row in value["kinds"] if row["kind"] != "fill"]
        if not rows:
            return None
        sizes = [size for row in rows if (size := row["bytes"]) is not None]
        amount = f"{units.format_size(sum(sizes))} in " if sizes else ""
        count = sum(row["count"] for row in rows)
        pageable = sum(row["count"] for row in rows if row["pageable"])
        pageable_note = (
            f", {units.format_count(pageable)} of them from or to pageable memory"
            if pageable
            else ""
        )
        time = units.format_duration(sum(row["total_ns"] for row in rows))
        return f"{amount}{units.format_count(count)} {'copy' if count == 1 else 'copies'} took {time}{pageable_note}"


SECTION = CopiesSection()

_MAX_ROWS = 200  # series, and operators, of each rank
_RANGES = build_schema("range_count launch_count unpaired absent")


class CountersSection(Section[Frames, "CountersValue"]):
    key, title = "counters", "Counters"
    note = (
        "Hardware counters in the recording: over time, and of single kernels with their operators."
    )
    what = "hardware counters that the recording holds"
    parts = {
        "series": ListSchema(
            SERIES_SCHEMA,
            "counters sampled over time",
            {"source": "the file does not say whose counter it is"},
            empty="no counters over time were recorded",
        ),
        "operators": ListSchema(
            KERNEL_EFFICIENCY_OP_SCHEMA,
            "counters of single kernels, added up by operator",
            nullable=("op",),
            empty="no counters of kernels were recorded, or they cannot be joined to launches",
        ),
        "ranges": ListSchema(
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
            "series": counters.series.head(_MAX_ROWS),
            "operators": counters.operators.head(_MAX_ROWS),
            "ranges": pl.DataFrame(
                [row] if counters.range_count else [], schema=_RANGES, orient="row"
            ),
        }

    def build(self, measurements: Measurements[Frames], unknowns: UnknownValues) -> CountersValue:
        return self.lists(measurements.frames(self.parts), unknowns)

    def tables(self, value: CountersValue) -> Iterator[Table]:
        if value["series"]:
            columns = ["?rank", "+source", "samples", "min", "mean", "max", "counter"]
            yield build_table("counters.series", "Counters over time", columns, value["series"])
        if value["operators"]:
            columns = ["?rank", "op", "ranges", "value", "counter"]
            yield build_table(
                "counters.operators",
                "Counters of kernels, by operator",
                columns,
                value["operators"],
                "The k-th measured kernel belongs to the k-th launch.",
            )

    def summary(self, value: CountersValue) -> str | None:
        clauses = []
        if value["series"]:
            clauses.append(f"{units.format_count(len(value['series']))} recorded over time")
        ranges = sum(row["range_count"] for row in value["ranges"])
        if ranges:
            clauses.append(f"counters of {units.format_quantity(ranges, 'kernel')}")
        if any(row["unpaired"] for row in value["ranges"]):
            clauses.append("not as many as launches, so that their operators are unknown")
        return ", ".join(clauses) or None


COUNTERS_SECTION = CountersSection()
