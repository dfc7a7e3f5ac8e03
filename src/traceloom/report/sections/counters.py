"""Hardware counters that the recording holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from traceloom import analyze
from traceloom.analyze.counters import OP_SCHEMA, SERIES_SCHEMA
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import ranked, record
from traceloom.report.table import Col, Table

_SERIES, _OPS = 200, 200  # of each rank
_RANGES = pl.Schema(
    {"range_count": pl.Int64(), "launch_count": pl.Int64(), "unpaired": pl.String(), "absent": pl.String()}
)


@dataclass(frozen=True)
class Measured:
    """What is kept of one rank."""

    series: pl.DataFrame
    operators: pl.DataFrame
    ranges: pl.DataFrame


def _measure(trace: Trace, _options: ReportOptions) -> Measured:
    counters = analyze.counters(trace)
    row = (
        [(counters.range_count, counters.launch_count, counters.unpaired, counters.absent)]
        if counters.range_count
        else []
    )
    ranges = pl.DataFrame(row, schema=_RANGES, orient="row")
    return Measured(counters.series.head(_SERIES), counters.operators.head(_OPS), ranges)


def _build(study: Study[Measured], absent: Absent) -> Row:
    frames = {
        "series": study.concat(lambda measured: measured.series),
        "operators": study.concat(lambda measured: measured.operators),
        "ranges": study.concat(lambda measured: measured.ranges),
    }
    out = {name: absent.rows(frame, f"counters.{name}") for name, frame in frames.items()}
    for name, rows in out.items():
        if not rows:
            absent.say(f"counters.{name}")
    return out


def _ranks(rows: list[Row]) -> list[Col]:
    return [Col("rank", "Rank", "count")] if len({row["rank"] for row in rows}) > 1 else []


def _tables(value: Row) -> Iterator[Table]:
    if value["series"]:
        yield Table(
            "counters-series",
            "Counters over time",
            [
                *_ranks(value["series"]),
                Col("source", "Of", narrow=False),
                Col("samples", "Samples", "count"),
                Col("min", "Least", "number"),
                Col("mean", "Mean", "number"),
                Col("max", "Most", "number"),
                Col("counter", "Counter", "name"),
            ],
            value["series"],
            "counters.series",
        )
    if value["operators"]:
        yield Table(
            "counters-operators",
            "Counters of kernels, by operator",
            [
                *_ranks(value["operators"]),
                Col("op", "Operator"),
                Col("ranges", "Kernels", "count"),
                Col("value", "Sum", "number"),
                Col("counter", "Counter", "name"),
            ],
            value["operators"],
            "counters.operators",
            "The k-th measured kernel belongs to the k-th launch.",
        )


def _summary(value: Row) -> str | None:
    clauses = []
    if value["series"]:
        clauses.append(f"{units.count(len(value['series']))} recorded over time")
    ranges = sum(row["range_count"] for row in value["ranges"])
    if ranges:
        clauses.append(f"counters of {units.count(ranges)} kernels")
    if any(row["unpaired"] for row in value["ranges"]):
        clauses.append("not as many as launches, so that their operators are unknown")
    return ", ".join(clauses) or None


SECTION = Section(
    key="counters",
    title="Counters",
    note="Hardware counters in the recording: over time, and of single kernels with their operators.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=record(
        {
            "series": ranked(SERIES_SCHEMA, nullable={"source"}, what="counters sampled over time"),
            "operators": ranked(OP_SCHEMA, nullable={"op"}, what="counters of single kernels, added up by operator"),
            "ranges": ranked(
                _RANGES,
                nullable={"unpaired", "absent"},
                what="how many kernels have counters, and whether they have launches",
            ),
        },
        what="hardware counters that the recording holds",
    ),
    reasons={
        "counters.series": "no counters over time were recorded",
        "counters.operators": "no counters of kernels were recorded, or they cannot be joined to launches",
        "counters.ranges": "no counters of kernels were recorded",
        "counters.series[*].source": "the file does not say whose counter it is",
        "counters.operators[*].op": "no operator is recorded around the launch",
        "counters.ranges[*].unpaired": "null where every kernel with counters has its launch",
        "counters.ranges[*].absent": "null where the counters could be read",
        **{f"counters.{name}[*].rank": "the file does not say its rank" for name in ("series", "operators", "ranges")},
    },
)
