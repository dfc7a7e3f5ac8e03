"""Sections about kernels, operators, their shapes, and kinds of kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.graph_launches import select_rank_trace
from traceloom.analyze.kernel_efficiency import (
    BOUND_SCHEMA,
    DEVICE_SCHEMA as FILL_SCHEMA,
    KERNEL_SCHEMA,
    MATRIX_SCHEMA,
)
from traceloom.analyze.kernel_kinds import KINDS_SCHEMA, RULES_SCHEMA
from traceloom.analyze.kernel_rules import WorkKindType
from traceloom.analyze.kernels import SHAPES_SCHEMA
from traceloom.report.document import Cells, Col, ListSchema, ReportOptions, Table, UnknownValues
from traceloom.report.labels import fit_name
from traceloom.report.sections.launches import read_graph_capture
from traceloom.report.sections.section import (
    CoreSection,
    Frames,
    Measurements,
    RankMeasurements,
    Section,
    add_shares,
    build_table,
    format_rank_suffix,
    format_sum,
    select_rank_column,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import KernelRow, OperatorRow
    from traceloom.report.documents.sections import KernelShapesValue, KindsValue


class KernelsSection(CoreSection):
    key, title = "kernels", "Kernels"
    note = "GPU work by name, summed over ranks."
    in_markdown = True

    def build(
        self, measurements: Measurements[RankMeasurements], unknowns: UnknownValues
    ) -> list[KernelRow]:
        """Returns GPU work by name, the longest first; `ranks` is the number of ranks
        that ran it.
        """
        summed = (
            pl.concat([rank.kernels.kernels for rank in measurements.results])
            .group_by("name", "category", "rule", "kind", maintain_order=True)
            .agg(
                pl.col("count", "total_ns").sum(),
                pl.col("min_ns").min(),
                pl.col("max_ns").max(),
                ranks=pl.len(),
            )
        )
        return unknowns.convert_list(add_shares(summed, "total_ns"), "kernels")

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        columns = [
            Col("name", "Name", "name"),
            Col(
                "category",
                "Category",
                "text",
                "communication by a table of rules, memory: copies and fills",
            ),
            Col("total_ns", "Total", "time", "sum of the durations over all ranks"),
            Col(
                "fraction",
                "Share",
                "share",
                "of the sum of all GPU work; what overlaps counts twice",
            ),
            Col("count", "Count", "count"),
            Col("mean_ns", "Mean", "time", scale="one"),
            Col("min_ns", "Shortest", "time", narrow=False, scale="one"),
            Col("max_ns", "Longest", "time", narrow=False, scale="one"),
            *select_rank_column(
                document, Col("ranks", "Ranks", "count", "ranks that ran it", narrow=False)
            ),
        ]
        rows = document.get("kernels") or []
        if rows:
            note = format_sum(rows, "total_ns", "of kernels, copies and fills")
            yield Table("kernel-table", "GPU work", columns, rows, "kernels", note)


KERNELS_SECTION = KernelsSection()

_OPERATOR_DEVICE_COLUMNS = (
    Col(
        "self_device_ns",
        "GPU, self",
        "time",
        "GPU work launched directly by the operator",
        narrow=False,
        scale="gpu",
    ),
    Col(
        "device_ns",
        "GPU",
        "time",
        "GPU work launched in the operator or in those it calls",
        scale="gpu",
    ),
    Col(
        "kernel_count",
        "Kernels",
        "count",
        "launched in the operator or in those it calls",
        narrow=False,
    ),
)


class OperatorsSection(CoreSection):
    key, title = "operators", "Operators"
    note = "Framework operators by host time."
    in_markdown = True

    def build(
        self, measurements: Measurements[RankMeasurements], unknowns: UnknownValues
    ) -> list[OperatorRow]:
        """Returns operators by name (and shapes), the longest self time first."""
        frames = pl.concat([rank.operators.operators for rank in measurements.results])
        device_columns = pl.col("device_ns", "self_device_ns", "kernel_count")
        summed = frames.group_by("name", "shapes", maintain_order=True).agg(
            pl.col("count", "self_ns", "total_ns").sum(),
            pl.when(device_columns.is_not_null().any()).then(device_columns.sum()),
            ranks=pl.len(),
        )
        return unknowns.convert_list(add_shares(summed, "self_ns"), "operators")

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """Yields a table of all names; with input shapes where operators are counted by shape, with
        GPU time where there is a GPU.
        """
        rows = document.get("operators") or []
        if not rows:
            return
        has_device_times = any(row.get("device_ns") is not None for row in rows)
        has_shapes = any(row.get("shapes") is not None for row in rows)
        self_time_hint = "host time inside the operator but outside the operators it calls"
        total_time_hint = "host time with the operators it calls; recursion counts more than once"
        columns = [
            Col("name", "Name", "name"),
            *((Col("shapes", "Shapes of inputs", "name"),) if has_shapes else ()),
            Col("self_ns", "Self", "time", self_time_hint, scale="host"),
            Col("fraction", "Share", "share", "of the self time of all operators"),
            Col("total_ns", "Total", "time", total_time_hint, scale="host"),
            Col("count", "Count", "count"),
            Col("mean_ns", "Mean", "time", "total by count", narrow=False),
            *(_OPERATOR_DEVICE_COLUMNS if has_device_times else ()),
            *select_rank_column(
                document, Col("ranks", "Ranks", "count", "ranks that ran it", narrow=False)
            ),
        ]
        note = format_sum(rows, "self_ns", "of host time")
        yield Table("operator-table", "Operators", columns, rows, "operators", note)


OPERATORS_SECTION = OperatorsSection()

_MAX_ROWS_PER_RANK = 100  # of each rank; fewer where there are many
_MAX_ROWS = 800
_REMAINDER_SCHEMA = build_schema("row_count rest_count rest_ns total_ns")
_PER_STEP_COLUMNS = ("mean_total_ns", "min_total_ns", "max_total_ns", "step_count")
_MAX_NAME_WIDTH = 60
_NO_WORK_REASON = "no GPU work was recorded"
_NO_SHAPES_REASON = "shapes were not recorded, or the operator has none"


class KernelShapesSection(Section[Frames, "KernelShapesValue"]):
    key, title = "kernel_shapes", "Kernels by shapes"
    note = "GPU work by the operator that launched it and the shapes of its inputs."
    what = "GPU work by the operator that launched it and the shapes of its inputs"
    parts = {
        "rows": ListSchema(
            SHAPES_SCHEMA,
            f"GPU work by operator, input shapes and kernel; the {_MAX_ROWS_PER_RANK} largest of each rank, or fewer",
            {
                "shapes": _NO_SHAPES_REASON,
                "types": _NO_SHAPES_REASON,
                **dict.fromkeys(_PER_STEP_COLUMNS, "it occurs in no whole step"),
            },
            ("op",),
            _NO_WORK_REASON,
        ),
        "ranks": ListSchema(
            _REMAINDER_SCHEMA,
            "how many rows stand above and how many are left out, with their time",
            empty=_NO_WORK_REASON,
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        shapes = analyze.kernel_shapes(trace)
        retained = shapes.rows.head(_MAX_ROWS_PER_RANK)
        remaining_ns = shapes.total_ns - int(retained["total_ns"].sum())
        remainder_rows = (
            [(retained.height, shapes.rows.height - retained.height, remaining_ns, shapes.total_ns)]
            if retained.height
            else []
        )
        return {
            "rows": retained,
            "ranks": pl.DataFrame(remainder_rows, schema=_REMAINDER_SCHEMA, orient="row"),
        }

    def build(
        self, measurements: Measurements[Frames], unknowns: UnknownValues
    ) -> KernelShapesValue:
        max_rows = max(min(_MAX_ROWS_PER_RANK, _MAX_ROWS // max(len(measurements.results), 1)), 10)

        def rest(frames: Frames) -> pl.DataFrame:
            cut = frames["rows"].slice(max_rows)
            return frames["ranks"].with_columns(
                row_count=pl.col("row_count") - cut.height,
                rest_count=pl.col("rest_count") + cut.height,
                rest_ns=pl.col("rest_ns") + cut["total_ns"].sum(),
            )

        return self.lists(
            {
                "rows": measurements.concat(lambda of: of["rows"].head(max_rows)),
                "ranks": measurements.concat(rest),
            },
            unknowns,
        )

    def tables(self, value: KernelShapesValue) -> Iterator[Table]:
        if not value["rows"]:
            return
        remaining_ns = sum(row["rest_ns"] for row in value["ranks"])
        remaining_count = sum(row["rest_count"] for row in value["ranks"])
        note = (
            f"{remaining_count} more rows take {units.format_duration(remaining_ns)}."
            if remaining_ns
            else ""
        )
        columns = [
            "?rank",
            "total_ns",
            "fraction",
            "count",
            "mean_ns",
            "+min_ns",
            "+max_ns",
            "+mean_total_ns",
            "+min_total_ns",
            "+max_total_ns",
            "op",
            "+shapes",
            "kernel",
        ]
        yield build_table(
            "kernel_shapes.rows", "Kernels by operator and shapes", columns, value["rows"], note
        )

    def summary(self, value: KernelShapesValue) -> str | None:
        if not value["rows"]:
            return None
        top = max(value["rows"], key=lambda row: int(row["total_ns"]))
        shapes = f" {fit_name(top['shapes'], _MAX_NAME_WIDTH)}" if top["shapes"] else ""
        share_text = (
            units.format_share(top["total_ns"], round(top["total_ns"] / top["fraction"]))
            if top["fraction"]
            else "no time"
        )
        rank_suffix = format_rank_suffix(top, value["rows"])
        return f"the largest is {fit_name(top['op'] or top['kernel'], _MAX_NAME_WIDTH)}{shapes}: {share_text} of the GPU work{rank_suffix}"


KERNEL_SHAPES_SECTION = KernelShapesSection()

_MAX_KERNELS_PER_RANK = 50  # of each rank; fewer where there are many
_MAX_KERNELS = 400
_COLOUR_BY_KIND = {
    "gemm": "compute",
    "convolution": "forward",
    "attention": "backward",
    "embedding": "loading",
    "normalisation": "annotation",
    "optimizer": "optimizer",
    "reduction": "sync",
    "elementwise": "python",
    "other": "other",
    "communication": "communication",
    "copy": "memory",
    "idle": "idle",
}
_OCCUPANCY_COLUMNS = ("sm_efficiency", "sm_fill", "occupancy")
_DEVICE_SCHEMA = build_schema(
    "device window_ns busy_ns idle_ns",
    *(name for name in FILL_SCHEMA if name not in {"device", "window_ns"}),
)
_JOB_SCHEMA = build_schema(
    "kind rank_count sum_ns mean_exclusive_ns min_exclusive_ns max_exclusive_ns max_rank",
    {"kind": WorkKindType},
)
_PER_STEP_SCHEMA = build_schema(
    "device kind mean_exclusive_ns min_exclusive_ns max_exclusive_ns step_count",
    {"kind": WorkKindType},
)
_NO_OCCUPANCY_REASON = "the profiler of this vendor does not record it"
_NO_DURATION_REASONS = {"fraction": "no GPU work of this device has a duration"}


class KernelKindsSection(Section[Frames, "KindsValue"]):
    key, title = "kinds", "Kinds of GPU work"
    note = "What kind of work takes the GPU's time, what bounds it, and how full it keeps the GPU."
    what = "GPU time by kind of work and by what bounds it; how full kernels keep the GPU"
    parts = {
        "devices": ListSchema(
            _DEVICE_SCHEMA,
            "time of each GPU, and how full kernels keep it",
            dict.fromkeys(_OCCUPANCY_COLUMNS, _NO_OCCUPANCY_REASON),
            ("device", "kernel_count", "kernel_ns", "measured_ns", "estimated_ns"),
            _NO_WORK_REASON,
        ),
        "job": ListSchema(
            _JOB_SCHEMA,
            "GPU time by kind over all ranks",
            {},
            ("max_rank",),
            _NO_WORK_REASON,
            ranked=False,
        ),
        "kinds": ListSchema(
            KINDS_SCHEMA,
            "GPU time by kind; kinds that occur",
            _NO_DURATION_REASONS,
            ("device",),
            _NO_WORK_REASON,
        ),
        "rules": ListSchema(
            RULES_SCHEMA,
            "GPU time by the rule that decided",
            _NO_DURATION_REASONS,
            (),
            _NO_WORK_REASON,
        ),
        "per_step": ListSchema(
            _PER_STEP_SCHEMA,
            "exclusive time by kind of a usual step",
            nullable=("device",),
            empty="the trace holds no whole step with GPU work",
        ),
        "bounds": ListSchema(
            BOUND_SCHEMA,
            "GPU time by what bounds it",
            _NO_DURATION_REASONS,
            ("device",),
            _NO_WORK_REASON,
        ),
        "matrix": ListSchema(
            MATRIX_SCHEMA, "kernel time by use of matrix units", empty=_NO_WORK_REASON
        ),
        "kernels": ListSchema(
            KERNEL_SCHEMA,
            f"the kernels that take longest on each rank: {_MAX_KERNELS_PER_RANK}, or fewer where there are many ranks",
            dict.fromkeys(("blocks_per_sm", "sm_fill", "occupancy"), _NO_OCCUPANCY_REASON),
            (),
            _NO_WORK_REASON,
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        kinds = analyze.kernel_kinds(trace, options.kind_rules)
        efficiency = analyze.kernel_efficiency(trace)
        return {
            "devices": kinds.devices[["device", "window_ns", "busy_ns", "idle_ns"]].join(
                efficiency.devices.drop("window_ns"),
                on="device",
                how="left",
                nulls_equal=True,
                maintain_order="left",
            )[list(_DEVICE_SCHEMA)],
            "kinds": kinds.kinds.filter(pl.col("count") > 0).sort(
                "device", "sum_ns", descending=[False, True]
            ),
            "rules": kinds.rules,
            "per_step": kinds.per_step.pipe(cast_to_schema, _PER_STEP_SCHEMA),
            "bounds": analyze.kernel_bounds(
                trace, options.peak, select_rank_trace(read_graph_capture(options), trace)
            ).bounds,
            "matrix": efficiency.matrix,
            "kernels": efficiency.kernels.head(_MAX_KERNELS_PER_RANK),
        }

    def build(self, measurements: Measurements[Frames], unknowns: UnknownValues) -> KindsValue:
        rank_count = len(measurements.results)
        max_kernels = max(min(_MAX_KERNELS_PER_RANK, _MAX_KERNELS // max(rank_count, 1)), 5)
        frames = measurements.frames(name for name in self.parts if name != "job")
        frames["kernels"] = measurements.concat(lambda of: of["kernels"].head(max_kernels))
        # over all ranks; a rank without such work counts as 0
        job = (
            frames["kinds"]
            .group_by("rank", "kind")
            .agg(pl.col("sum_ns", "exclusive_ns").sum())
            .sort("exclusive_ns", "rank", descending=[True, False])
            .group_by("kind", maintain_order=True)
            .agg(
                rank_count=pl.len(),
                sum_ns=pl.col("sum_ns").sum(),
                mean_exclusive_ns=pl.col("exclusive_ns").sum() / rank_count,
                min_exclusive_ns=pl.when(pl.len() == rank_count)
                .then(pl.col("exclusive_ns").min())
                .otherwise(0),
                max_exclusive_ns=pl.col("exclusive_ns").max(),
                max_rank=pl.col("rank").first(),
            )
            .sort("sum_ns", "kind", descending=[True, False])
        )
        return self.lists({"job": job.pipe(cast_to_schema, _JOB_SCHEMA), **frames}, unknowns)

    def tables(self, value: KindsValue) -> Iterator[Table]:
        kinds = value["kinds"]
        if not kinds:
            return
        if len({row["rank"] for row in kinds}) > 1:
            columns = [
                "kind",
                "sum_ns",
                "mean_exclusive_ns",
                "min_exclusive_ns",
                "max_exclusive_ns",
                "max_rank",
                "rank_count",
            ]
            yield build_table("kinds.job", "Kinds over all ranks", columns, value["job"])
        step_row_by_key = {
            (row["rank"], row["device"], row["kind"]): row for row in value["per_step"]
        }
        kind_rows = [
            {**step_row_by_key.get((row["rank"], row["device"], row["kind"]), {}), **row}
            for row in kinds
        ]
        columns = ["?rank", "?device", "kind", "sum_ns", "fraction", "exclusive_ns", "count"]
        step_columns = (
            ["+mean_exclusive_ns", "+min_exclusive_ns", "+max_exclusive_ns"]
            if step_row_by_key
            else []
        )
        yield build_table(
            "kinds.kinds",
            "GPU time by kind",
            [*columns, *step_columns],
            kind_rows,
            "Exclusive times and idle time add up to the window of the GPU.",
        )
        columns = ["?rank", "?device", "bound", "sum_ns", "fraction", "exclusive_ns", "count"]
        yield build_table(
            "kinds.bounds",
            "GPU time by what bounds it",
            columns,
            [row for row in value["bounds"] if row["count"]],
            "Unknown: no model of the operator, no shapes, or a GPU without known peaks.",
            among=value["bounds"],
        )
        devices: Sequence[Cells] = value["devices"]
        matrix = value["matrix"]
        if any(row[name] is not None for row in devices for name in _OCCUPANCY_COLUMNS):
            yield build_table(
                "kinds.devices",
                "How full the GPU is",
                ["?rank", "?device", *_OCCUPANCY_COLUMNS, "kernel_ns"],
                devices,
            )
        yield build_table(
            "kinds.matrix",
            "Matrix units",
            ["?rank", "matrix_units", "total_ns", "count"],
            matrix,
            "Tensor cores or MFMA, recognised by kernel names.",
        )
        columns = [
            "?rank",
            "total_ns",
            "+count",
            "kind",
            "+matrix_units",
            "+blocks_per_sm",
            "+sm_fill",
            "+occupancy",
            "name",
        ]
        yield build_table(
            "kinds.kernels",
            "Kernels by kind",
            columns,
            value["kernels"],
            "The longest of each rank.",
            among=matrix,
        )
        columns = ["?rank", "kind", "rule", "sum_ns", "count"]
        yield build_table(
            "kinds.rules", "Which rules decided", columns, value["rules"], among=matrix
        )

    def summary(self, value: KindsValue) -> str | None:
        totals: dict[str, int] = {}
        for row in value["kinds"]:
            totals[row["kind"]] = totals.get(row["kind"], 0) + row["sum_ns"]
        total_ns = sum(totals.values())
        if not total_ns:
            return None
        top = sorted(totals.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{kind} {units.format_share(ns, total_ns)}" for kind, ns in top)
        matrix_ns = {
            state: sum(row["total_ns"] for row in value["matrix"] if row["matrix_units"] == state)
            for state in ("used", "unused")
        }
        matrix_product_ns = sum(matrix_ns.values())
        return f"{shares} of the GPU work, added up" + (
            f"; matrix units used in {units.format_share(matrix_ns['used'], matrix_product_ns)} of matrix products"
            if matrix_product_ns
            else ""
        )

    def picture(self, value: KindsValue) -> str:
        """Draws a bar per GPU: exclusive time by kind, and idle time."""
        bars = []
        for device in value["devices"][:16]:
            key = (device["rank"], device["device"])
            parts = [
                (row["kind"], row["exclusive_ns"])
                for row in value["kinds"]
                if (row["rank"], row["device"]) == key
            ]
            rank = "" if device["rank"] is None else f"rank {device['rank']} "
            bars.append((f"{rank}GPU {device['device']}", [*parts, ("idle", device["idle_ns"])]))
        return draw_stacked_bars(bars, _COLOUR_BY_KIND)


_SVG_WIDTH, _LABEL_WIDTH, _BAR_HEIGHT, _BAR_GAP = 1256, 130, 18, 9


def draw_stacked_bars(
    bars: Sequence[tuple[str, Sequence[tuple[str, int]]]], colours: Mapping[str, str]
) -> str:
    """Draws one bar per entry; all on one scale, each part with its values on hover. Empty without
    time.

    Args:
        bars: Label and parts of each: (name, time in ns).
        colours: Colour group of the page by name of a part, in the order of the bar; other parts
            follow, as `other`.
    """
    longest = max((sum(ns for _, ns in parts) for _, parts in bars), default=0)
    if not longest:
        return ""
    order = {name: number for number, name in enumerate(colours)}
    nonzero_names = {name for _, parts in bars for name, ns in parts if ns}
    names = dict.fromkeys([*order, *(name for _, parts in bars for name, _ in parts)])
    height = len(bars) * (_BAR_HEIGHT + _BAR_GAP) - _BAR_GAP
    out = [
        f'<figure class="picture"><svg viewBox="0 0 {_SVG_WIDTH} {height}" role="img" aria-label="GPU time by part">'
    ]
    for row, (label, parts) in enumerate(bars):
        top = row * (_BAR_HEIGHT + _BAR_GAP)
        out.append(f'<text x="0" y="{top + 13}">{escape(sanitize(label))}</text>')
        offset_ns = 0
        bar_ns = sum(ns for _, ns in parts)
        for name, ns in sorted(parts, key=lambda part: order.get(part[0], len(order))):
            if not ns:
                continue
            left_x, right = (
                _LABEL_WIDTH + (_SVG_WIDTH - _LABEL_WIDTH) * end / longest
                for end in (offset_ns, offset_ns + ns)
            )
            hover_text = escape(
                sanitize(f"{name}: {units.format_duration(ns)}, {units.format_share(ns, bar_ns)}")
            )
            out.append(
                f'<rect class="f-{colours.get(name, "other")}" x="{left_x:.1f}" y="{top}" '
                f'width="{max(right - left_x, 0.3):.1f}" height="{_BAR_HEIGHT}"><title>{hover_text}</title></rect>'
            )
            offset_ns += ns
    legend = "".join(
        f'<li><i class="swatch b-{colours.get(name, "other")}"></i>{escape(sanitize(name))}</li>'
        for name in names
        if name in nonzero_names
    )
    return "".join([*out, f'</svg><ul class="legend">{legend}</ul></figure>'])


KERNEL_KINDS_SECTION = KernelKindsSection()
