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
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import or_null, ranked, record, rows
from traceloom.report.table import Col, Table

_SHAPE = pl.Schema({**SEQUENCES, **{name: kind for name, kind in STEPS.items() if name != "sequence"}})
_PER_STEP = [name for name in STEPS if name != "sequence"]
_JOB = pl.Schema(
    {
        "kind": SEQUENCES["kind"],
        "rank_count": pl.Int64(),
        "count": pl.Int64(),
        "length": pl.Int64(),
        "launch_count": pl.Int64(),
        "kernel_ns": pl.Int64(),
        "gap_ns": pl.Int64(),
        "span_ns": pl.Int64(),
        "fraction": pl.Float64(),
        "elementwise": pl.Boolean(),
        "mean_call_count": pl.Float64(),
        "names": pl.List(pl.String()),
    }
)
_KERNELS = 4  # names shown of a sequence
_NAME = 28


def _measure(trace: Trace, _options: ReportOptions) -> Patterns:
    return analyze.patterns(trace)


def _build(study: Study[Patterns], absent: Absent) -> Row | None:
    sequences = study.concat(
        lambda measured: measured.sequences.join(measured.steps, on="sequence", how="left", maintain_order="left")
    )
    if not sequences.height:
        absent.say("patterns")
        return None
    whole = sum(measured.work_ns for measured in study.results)
    return {
        "job": absent.rows(_job(sequences, whole), "patterns.job"),
        "ranks": absent.rows(sequences, "patterns.ranks"),
    }


def _job(sequences: pl.DataFrame, whole_ns: int) -> pl.DataFrame:
    """The same sequence of several ranks added up."""
    sums = ("count", "launch_count", "kernel_ns", "gap_ns", "span_ns")
    return (
        sequences.with_columns(pl.col("names").list.join("\x00").alias("key"))
        .group_by("kind", "key", maintain_order=True)
        .agg(
            pl.len().alias("rank_count"),
            pl.col("length", "elementwise", "names").first(),
            pl.col(sums).sum(),
            pl.col("mean_call_count").mean(),
        )
        .with_columns((pl.col("kernel_ns") / max(whole_ns, 1)).alias("fraction"))
        .sort("kind", "kernel_ns", descending=[False, True], maintain_order=True)
        .select(list(_JOB))
        .cast(_JOB)
    )


def _tables(value: Row) -> Iterator[Table]:
    several = len({row["rank"] for row in value["ranks"]}) > 1
    columns = [
        *([Col("rank_count", "Ranks", "count")] if several else []),
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
        shown = [{**row, "shown": _shown(row)} for row in value["job"] if row["kind"] == kind]
        if shown:
            yield Table(f"patterns-{kind}", title, columns, shown, "patterns.job")


def _shown(row: Row) -> str:
    names = [short(name, _NAME) for name in row["names"][:_KERNELS]]
    more = len(row["names"]) - len(names)
    return " | ".join(names) + (f" | … and {more} more" if more else "")


def _summary(value: Row | None) -> str | None:
    first = next((row for row in value["job"] if row["kind"] == "sequence"), None) if value else None
    if first is None:
        return None
    words = (
        f"a sequence of {first['length']} kernels occurs {units.count(first['count'])} times and holds "
        f"{units.share(first['fraction'], 1.0)} of the GPU's work"
    )
    fused = [row for row in value["job"] if row["kind"] == "elementwise"] if value else []
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
    schema=or_null(
        record(
            {
                "job": rows(_JOB, nullable=("mean_call_count",), what="sequences of all ranks, equal ones added up"),
                "ranks": ranked(
                    _SHAPE, nullable=_PER_STEP, what="frequent sequences of GPU work, of each rank by gain"
                ),
            }
        )
    ),
    reasons={
        "patterns": "no sequence of GPU work occurs three times",
        "patterns.ranks[*].rank": "the file does not say its rank",
        **{f"patterns.ranks[*].{name}": "it does not occur inside a whole step" for name in _PER_STEP},
        "patterns.job[*].mean_call_count": "it does not occur inside a whole step",
    },
)
