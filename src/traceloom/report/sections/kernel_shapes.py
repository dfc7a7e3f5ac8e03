"""Kernels by the operator that launched them and the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from traceloom import analyze
from traceloom.analyze.kernel_shapes import SHAPES_SCHEMA
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import ranked, record
from traceloom.report.table import Col, Table

_ROWS = 100  # of each rank; fewer where there are many
_ALL_ROWS = 800
_REST = pl.Schema({"row_count": pl.Int64(), "rest_count": pl.Int64(), "rest_ns": pl.Int64(), "total_ns": pl.Int64()})
_USUAL = ("mean_total_ns", "min_total_ns", "max_total_ns", "step_count")
_SHOWN = 60


@dataclass(frozen=True)
class Measured:
    """What is kept of one rank."""

    rows: pl.DataFrame
    rest: pl.DataFrame


def _measure(trace: Trace, _options: ReportOptions) -> Measured:
    shapes = analyze.kernel_shapes(trace)
    kept = shapes.rows.head(_ROWS)
    left = shapes.total_ns - int(kept["total_ns"].sum())
    rest = [(kept.height, shapes.rows.height - kept.height, left, shapes.total_ns)] if kept.height else []
    return Measured(kept, pl.DataFrame(rest, schema=_REST, orient="row"))


def _trimmed(measured: Measured, most: int) -> Measured:
    """The same with no more than so many rows."""
    cut = measured.rows.slice(most)
    if not cut.height:
        return measured
    fewer = {
        "row_count": pl.col("row_count") - cut.height,
        "rest_count": pl.col("rest_count") + cut.height,
        "rest_ns": pl.col("rest_ns") + cut["total_ns"].sum(),
    }
    return Measured(measured.rows.head(most), measured.rest.with_columns(**fewer))


def _build(study: Study[Measured], absent: Absent) -> Row:
    most = max(min(_ROWS, _ALL_ROWS // max(len(study.results), 1)), 10)
    out = {
        "rows": absent.rows(study.concat(lambda measured: _trimmed(measured, most).rows), "kernel_shapes.rows"),
        "ranks": absent.rows(study.concat(lambda measured: _trimmed(measured, most).rest), "kernel_shapes.ranks"),
    }
    if not out["rows"]:
        absent.say("kernel_shapes.rows")
        absent.say("kernel_shapes.ranks")
    return out


def _tables(value: Row) -> Iterator[Table]:
    rows = value["rows"]
    if not rows:
        return
    several = len({row["rank"] for row in rows}) > 1
    left = sum(row["rest_ns"] for row in value["ranks"])
    note = f"{sum(row['rest_count'] for row in value['ranks'])} more rows take {units.duration(left)}." if left else ""
    yield Table(
        "kernel-shapes-rows",
        "Kernels by operator and shapes",
        [
            *([Col("rank", "Rank", "count")] if several else []),
            Col("total_ns", "Total", "time"),
            Col("fraction", "Share", "share", "of all GPU work of the rank"),
            Col("count", "Count", "count"),
            Col("mean_ns", "Mean", "time", "of one piece of work"),
            Col("min_ns", "Min", "time", narrow=False),
            Col("max_ns", "Max", "time", narrow=False),
            Col("mean_total_ns", "Per step", "time", "mean over the whole steps", narrow=False),
            Col("min_total_ns", "Least", "time", "in the step with the least of it", narrow=False),
            Col("max_total_ns", "Most", "time", "in the step with the most of it", narrow=False),
            Col("op", "Operator"),
            Col("shapes", "Input shapes", "name", narrow=False),
            Col("kernel", "Kernel", "name"),
        ],
        rows,
        "kernel_shapes.rows",
        note,
    )


def _summary(value: Row) -> str | None:
    if not value["rows"]:
        return None
    top = max(value["rows"], key=lambda row: int(row["total_ns"]))
    shapes = f" {short(top['shapes'], _SHOWN)}" if top["shapes"] else ""
    whole = units.share(top["total_ns"], round(top["total_ns"] / top["fraction"])) if top["fraction"] else "no time"
    return f"the largest is {short(top['op'] or top['kernel'], _SHOWN)}{shapes}: {whole} of its rank's GPU work"


SECTION = Section(
    key="kernel_shapes",
    title="Kernels by shapes",
    note="GPU work by the operator that launched it and the shapes of its inputs.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    schema=record(
        {
            "rows": ranked(
                SHAPES_SCHEMA,
                nullable={"op", "shapes", "types", *_USUAL},
                what=f"GPU work by operator, input shapes and kernel; the {_ROWS} largest of each rank, or fewer",
            ),
            "ranks": ranked(_REST, what="how many rows stand above and how many are left out, with their time"),
        },
        what="GPU work by the operator that launched it and the shapes of its inputs",
    ),
    reasons={
        "kernel_shapes.rows": "no GPU work was recorded",
        "kernel_shapes.ranks": "no GPU work was recorded",
        "kernel_shapes.rows[*].op": "no operator is recorded around the launch",
        "kernel_shapes.rows[*].shapes": "shapes were not recorded, or the operator has none",
        "kernel_shapes.rows[*].types": "shapes were not recorded, or the operator has none",
        **{f"kernel_shapes.rows[*].{name}": "it occurs in no whole step" for name in _USUAL},
        **{f"kernel_shapes.{name}[*].rank": "the file does not say its rank" for name in ("rows", "ranks")},
    },
)
