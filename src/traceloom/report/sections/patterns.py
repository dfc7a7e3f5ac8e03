"""Frequent sequences of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom import analyze
from traceloom.analyze.patterns import SEQUENCES, STEPS, Patterns
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Col, Row, Section, Study, Table
from traceloom.report.sections.shapes import ranked

_SHAPE = pl.Schema({**SEQUENCES, **{name: kind for name, kind in STEPS.items() if name != "sequence"}})
_PER_STEP = [name for name in STEPS if name != "sequence"]
_KERNELS = 4  # names shown of a sequence
_NAME = 28


def _measure(trace: Trace, _options: ReportOptions) -> Patterns:
    return analyze.patterns(trace)


def _build(study: Study[Patterns], absent: Absent) -> list[Row]:
    rows = study.concat(
        lambda found: found.sequences.join(found.steps, on="sequence", how="left", maintain_order="left")
    )
    if not rows.height:
        absent.say("patterns")
    return absent.rows(rows, "patterns")


def _tables(value: list[Row]) -> Iterator[Table]:
    rank = [Col("rank", "Rank", "count")] if len({row["rank"] for row in value}) > 1 else []
    columns = [
        *rank,
        Col("count", "Times", "count", "occurrences without overlap"),
        Col("length", "Kernels", "count", "pieces of GPU work in each"),
        Col("kernel_ns", "GPU time", "time"),
        Col("fraction", "Of all", "share", "of the summed durations of all GPU work"),
        Col("gap_ns", "Gaps inside", "time"),
        Col("launch_count", "Launches", "count", "calls that launched them", narrow=False),
        Col("mean_call_count", "Per step", "number", "times per whole step", narrow=False),
        Col("shown", "Kernels in order", "name"),
    ]
    for kind, title in (("sequence", "Frequent sequences"), ("elementwise", "Runs of elementwise kernels")):
        rows = [{**row, "shown": _shown(row)} for row in value if row["kind"] == kind]
        if rows:
            yield Table(f"patterns-{kind}", title, columns, rows, "patterns")


def _shown(row: Row) -> str:
    names = [short(name, _NAME) for name in row["names"][:_KERNELS]]
    more = len(row["names"]) - len(names)
    return " | ".join(names) + (f" | … and {more} more" if more else "")


def _summary(value: list[Row]) -> str | None:
    first = next((row for row in value if row["kind"] == "sequence"), None)
    if first is None:
        return None
    words = (
        f"a sequence of {first['length']} kernels occurs {units.count(first['count'])} times and holds "
        f"{units.share(first['fraction'], 1.0)} of the GPU's work"
    )
    fused = [row for row in value if row["kind"] == "elementwise"]
    if fused:
        saved = sum(row["count"] * (row["length"] - 1) for row in fused)
        words += f"; fusing runs of elementwise kernels would save {units.count(saved)} of them"
    return words


SECTION = Section(
    key="patterns",
    title="Patterns",
    note="Sequences of kernels that occur again and again: what could be fused, or put into a graph.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=ranked(_SHAPE, nullable=_PER_STEP, what="frequent sequences of GPU work, of each rank by gain"),
    reasons={
        "patterns": "no sequence of GPU work occurs three times",
        "patterns[*].rank": "the file does not say its rank",
        **{f"patterns[*].{name}": "it does not occur inside a whole step" for name in _PER_STEP},
    },
)
