"""Kernels by the operator that launched them and the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.kernel_shapes import SHAPES_SCHEMA
from traceloom.model import Trace, units
from traceloom.model.frames import schema
from traceloom.report.absent import Absent
from traceloom.report.names import short
from traceloom.report.options import ReportOptions
from traceloom.report.sections.section import Frames, Section, Study, on_rank, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import KernelShapesValue

_ROWS = 100  # of each rank; fewer where there are many
_ALL_ROWS = 800
_REST = schema("row_count rest_count rest_ns total_ns")
_USUAL = ("mean_total_ns", "min_total_ns", "max_total_ns", "step_count")
_SHOWN = 60
_NO_WORK = "no GPU work was recorded"
_NO_SHAPES = "shapes were not recorded, or the operator has none"


class KernelShapesSection(Section[Frames, "KernelShapesValue"]):
    """GPU work by operator and shapes."""

    key, title = "kernel_shapes", "Kernels by shapes"
    note = "GPU work by the operator that launched it and the shapes of its inputs."
    what = "GPU work by the operator that launched it and the shapes of its inputs"
    parts = {
        "rows": Part(
            SHAPES_SCHEMA,
            f"GPU work by operator, input shapes and kernel; the {_ROWS} largest of each rank, or fewer",
            {"shapes": _NO_SHAPES, "types": _NO_SHAPES, **dict.fromkeys(_USUAL, "it occurs in no whole step")},
            ("op",),
            _NO_WORK,
        ),
        "ranks": Part(_REST, "how many rows stand above and how many are left out, with their time", empty=_NO_WORK),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        shapes = analyze.kernel_shapes(trace)
        kept = shapes.rows.head(_ROWS)
        left = shapes.total_ns - int(kept["total_ns"].sum())
        rest = [(kept.height, shapes.rows.height - kept.height, left, shapes.total_ns)] if kept.height else []
        return {"rows": kept, "ranks": pl.DataFrame(rest, schema=_REST, orient="row")}

    def build(self, study: Study[Frames], absent: Absent) -> KernelShapesValue:
        most = max(min(_ROWS, _ALL_ROWS // max(len(study.results), 1)), 10)

        def rest(of: Frames) -> pl.DataFrame:
            cut = of["rows"].slice(most)
            return of["ranks"].with_columns(
                row_count=pl.col("row_count") - cut.height,
                rest_count=pl.col("rest_count") + cut.height,
                rest_ns=pl.col("rest_ns") + cut["total_ns"].sum(),
            )

        return self.lists({"rows": study.concat(lambda of: of["rows"].head(most)), "ranks": study.concat(rest)}, absent)

    def tables(self, value: KernelShapesValue) -> Iterator[Table]:
        if not value["rows"]:
            return
        left = sum(row["rest_ns"] for row in value["ranks"])
        more = sum(row["rest_count"] for row in value["ranks"])
        note = f"{more} more rows take {units.duration(left)}." if left else ""
        columns = ["?rank", "total_ns", "fraction", "count", "mean_ns", "+min_ns", "+max_ns", "+mean_total_ns",
                   "+min_total_ns", "+max_total_ns", "op", "+shapes", "kernel"]  # fmt: skip
        yield table("kernel_shapes.rows", "Kernels by operator and shapes", columns, value["rows"], note)

    def summary(self, value: KernelShapesValue) -> str | None:
        if not value["rows"]:
            return None
        top = max(value["rows"], key=lambda row: int(row["total_ns"]))
        shapes = f" {short(top['shapes'], _SHOWN)}" if top["shapes"] else ""
        whole = units.share(top["total_ns"], round(top["total_ns"] / top["fraction"])) if top["fraction"] else "no time"
        of = on_rank(top, value["rows"])
        return f"the largest is {short(top['op'] or top['kernel'], _SHOWN)}{shapes}: {whole} of the GPU work{of}"


SECTION = KernelShapesSection()
