"""Kernels, operators, shapes, kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.graph_launches import of_rank
from traceloom.analyze.kernel_efficiency import BOUND_SCHEMA, KERNEL_SCHEMA, MATRIX_SCHEMA
from traceloom.analyze.kernel_efficiency import DEVICE_SCHEMA as FILL_SCHEMA
from traceloom.analyze.kernel_kinds import KINDS_SCHEMA, RULES_SCHEMA
from traceloom.analyze.kernel_rules import KindOfWork
from traceloom.analyze.kernels import SHAPES_SCHEMA
from traceloom.report.document import Cells, Col, Part, ReportOptions, Table, UnknownValues
from traceloom.report.labels import short
from traceloom.report.sections.launches import capture_of_graphs
from traceloom.report.sections.section import (
    CoreSection,
    Frames,
    Measurements,
    RankMeasurements,
    Section,
    of_rank_suffix,
    rank_column,
    sum_as_text,
    table,
    with_shares,
)
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import cast_to_schema, schema
from traceloom.trace.trace import Trace

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import KernelRow, OperatorRow
    from traceloom.report.documents.sections import KernelShapesValue, KindsValue


class KernelsSection(CoreSection):
    """GPU work by name."""

    key, title = "kernels", "Kernels"
    note = "GPU work by name, summed over ranks."
    in_markdown = True

    def build(self, study: Measurements[RankMeasurements], absent: UnknownValues) -> list[KernelRow]:
        """GPU work by name, the longest first; `ranks` is the number of ranks that ran it."""
        summed = (
            pl.concat([rank.kernels.kernels for rank in study.results])
            .group_by("name", "category", "rule", "kind", maintain_order=True)
            .agg(pl.col("count", "total_ns").sum(), pl.col("min_ns").min(), pl.col("max_ns").max(), ranks=pl.len())
        )
        return absent.listed(with_shares(summed, "total_ns"), "kernels")

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """All names."""
        columns = [
            Col("name", "Name", "name"),
            Col("category", "Category", "text", "communication by a table of rules, memory: copies and fills"),
            Col("total_ns", "Total", "time", "sum of the durations over all ranks"),
            Col("fraction", "Share", "share", "of the sum of all GPU work; what overlaps counts twice"),
            Col("count", "Count", "count"),
            Col("mean_ns", "Mean", "time", scale="one"),
            Col("min_ns", "Shortest", "time", narrow=False, scale="one"),
            Col("max_ns", "Longest", "time", narrow=False, scale="one"),
            *rank_column(document, Col("ranks", "Ranks", "count", "ranks that ran it", narrow=False)),
        ]
        rows = document.get("kernels") or []
        if rows:
            note = sum_as_text(rows, "total_ns", "of kernels, copies and fills")
            yield Table("kernel-table", "GPU work", columns, rows, "kernels", note)


KERNELS_SECTION = KernelsSection()

_ON_DEVICE = (
    Col("self_device_ns", "GPU, self", "time", "GPU work launched directly by the operator", narrow=False, scale="gpu"),
    Col("device_ns", "GPU", "time", "GPU work launched in the operator or in those it calls", scale="gpu"),
    Col("kernel_count", "Kernels", "count", "launched in the operator or in those it calls", narrow=False),
)


class OperatorsSection(CoreSection):
    """Framework operators by host time."""

    key, title = "operators", "Operators"
    note = "Framework operators by host time."
    in_markdown = True

    def build(self, study: Measurements[RankMeasurements], absent: UnknownValues) -> list[OperatorRow]:
        """Operators by name (and shapes), the longest self time first."""
        frames = pl.concat([rank.operators.operators for rank in study.results])
        device = pl.col("device_ns", "self_device_ns", "kernel_count")
        summed = frames.group_by("name", "shapes", maintain_order=True).agg(
            pl.col("count", "self_ns", "total_ns").sum(),
            pl.when(device.is_not_null().any()).then(device.sum()),
            ranks=pl.len(),
        )
        return absent.listed(with_shares(summed, "self_ns"), "operators")

    def tables(self, document: ReportDocument) -> Iterator[Table]:
        """All names; with their input shapes where these are counted apart, with GPU time where there is a GPU."""
        rows = document.get("operators") or []
        if not rows:
            return
        device = any(row.get("device_ns") is not None for row in rows)
        shapes = any(row.get("shapes") is not None for row in rows)
        inside = "host time inside the operator but outside the operators it calls"
        called = "host time with the operators it calls; recursion counts more than once"
        columns = [
            Col("name", "Name", "name"),
            *((Col("shapes", "Shapes of inputs", "name"),) if shapes else ()),
            Col("self_ns", "Self", "time", inside, scale="host"),
            Col("fraction", "Share", "share", "of the self time of all operators"),
            Col("total_ns", "Total", "time", called, scale="host"),
            Col("count", "Count", "count"),
            Col("mean_ns", "Mean", "time", "total by count", narrow=False),
            *(_ON_DEVICE if device else ()),
            *rank_column(document, Col("ranks", "Ranks", "count", "ranks that ran it", narrow=False)),
        ]
        note = sum_as_text(rows, "self_ns", "of host time")
        yield Table("operator-table", "Operators", columns, rows, "operators", note)


OPERATORS_SECTION = OperatorsSection()

_ROWS = 100  # of each rank; fewer where there are many
_ALL_ROWS = 800
_REST = schema("row_count rest_count rest_ns total_ns")
_STEADY_COLUMNS = ("mean_total_ns", "min_total_ns", "max_total_ns", "step_count")
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
            {"shapes": _NO_SHAPES, "types": _NO_SHAPES, **dict.fromkeys(_STEADY_COLUMNS, "it occurs in no whole step")},
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

    def build(self, study: Measurements[Frames], absent: UnknownValues) -> KernelShapesValue:
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
        of = of_rank_suffix(top, value["rows"])
        return f"the largest is {short(top['op'] or top['kernel'], _SHOWN)}{shapes}: {whole} of the GPU work{of}"


KERNEL_SHAPES_SECTION = KernelShapesSection()

_KERNELS = 50  # of each rank; fewer where there are many
_ALL_KERNELS = 400
_COLOURS = {
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
_FILL = ("sm_efficiency", "sm_fill", "occupancy")
_DEVICES = schema(
    "device window_ns busy_ns idle_ns", *(name for name in FILL_SCHEMA if name not in {"device", "window_ns"})
)
_JOB = schema(
    "kind rank_count sum_ns mean_exclusive_ns min_exclusive_ns max_exclusive_ns max_rank", {"kind": KindOfWork}
)
_USUAL = schema("device kind mean_exclusive_ns min_exclusive_ns max_exclusive_ns step_count", {"kind": KindOfWork})
_NO_FILL = "the profiler of this vendor does not record it"
_NO_TIME = {"fraction": "no GPU work of this device has a duration"}


class KindsSection(Section[Frames, "KindsValue"]):
    """GPU time by kind of work."""

    key, title = "kinds", "Kinds of GPU work"
    note = "What kind of work takes the GPU's time, what bounds it, and how full it keeps the GPU."
    what = "GPU time by kind of work and by what bounds it; how full kernels keep the GPU"
    parts = {
        "devices": Part(
            _DEVICES,
            "time of each GPU, and how full kernels keep it",
            dict.fromkeys(_FILL, _NO_FILL),
            ("device", "kernel_count", "kernel_ns", "measured_ns", "estimated_ns"),
            _NO_WORK,
        ),
        "job": Part(_JOB, "GPU time by kind over all ranks", {}, ("max_rank",), _NO_WORK, ranked=False),
        "kinds": Part(KINDS_SCHEMA, "GPU time by kind; kinds that occur", _NO_TIME, ("device",), _NO_WORK),
        "rules": Part(RULES_SCHEMA, "GPU time by the rule that decided", _NO_TIME, (), _NO_WORK),
        "per_step": Part(
            _USUAL,
            "exclusive time by kind of a usual step",
            nullable=("device",),
            empty="the trace holds no whole step with GPU work",
        ),
        "bounds": Part(BOUND_SCHEMA, "GPU time by what bounds it", _NO_TIME, ("device",), _NO_WORK),
        "matrix": Part(MATRIX_SCHEMA, "kernel time by use of matrix units", empty=_NO_WORK),
        "kernels": Part(
            KERNEL_SCHEMA,
            f"the kernels that take longest on each rank: {_KERNELS}, or fewer where there are many ranks",
            dict.fromkeys(("blocks_per_sm", "sm_fill", "occupancy"), _NO_FILL),
            (),
            _NO_WORK,
        ),
    }

    def measure(self, trace: Trace, options: ReportOptions) -> Frames:
        kinds = analyze.kernel_kinds(trace, options.kind_rules)
        fill = analyze.kernel_efficiency(trace)
        devices = kinds.devices[["device", "window_ns", "busy_ns", "idle_ns"]].join(
            fill.devices.drop("window_ns"), on="device", how="left", nulls_equal=True, maintain_order="left"
        )
        return {
            "devices": devices[list(_DEVICES)],
            "kinds": kinds.kinds.filter(pl.col("count") > 0).sort("device", "sum_ns", descending=[False, True]),
            "rules": kinds.rules,
            "per_step": kinds.per_step.pipe(cast_to_schema, _USUAL),
            "bounds": analyze.kernel_bounds(trace, options.peak, of_rank(capture_of_graphs(options), trace)).bounds,
            "matrix": fill.matrix,
            "kernels": fill.kernels.head(_KERNELS),
        }

    def build(self, study: Measurements[Frames], absent: UnknownValues) -> KindsValue:
        ranks = len(study.results)
        most = max(min(_KERNELS, _ALL_KERNELS // max(ranks, 1)), 5)
        frames = study.frames(name for name in self.parts if name != "job")
        frames["kernels"] = study.concat(lambda of: of["kernels"].head(most))
        # over all ranks; a rank without such work counts as 0
        everywhere = pl.len() == ranks
        job = (
            frames["kinds"]
            .group_by("rank", "kind")
            .agg(pl.col("sum_ns", "exclusive_ns").sum())
            .sort("exclusive_ns", "rank", descending=[True, False])
            .group_by("kind", maintain_order=True)
            .agg(
                rank_count=pl.len(),
                sum_ns=pl.col("sum_ns").sum(),
                mean_exclusive_ns=pl.col("exclusive_ns").sum() / ranks,
                min_exclusive_ns=pl.when(everywhere).then(pl.col("exclusive_ns").min()).otherwise(0),
                max_exclusive_ns=pl.col("exclusive_ns").max(),
                max_rank=pl.col("rank").first(),
            )
            .sort("sum_ns", "kind", descending=[True, False])
        )
        return self.lists({"job": job.pipe(cast_to_schema, _JOB), **frames}, absent)

    def tables(self, value: KindsValue) -> Iterator[Table]:
        kinds = value["kinds"]
        if not kinds:
            return
        if len({row["rank"] for row in kinds}) > 1:
            columns = ["kind", "sum_ns", "mean_exclusive_ns", "min_exclusive_ns", "max_exclusive_ns", "max_rank",
                       "rank_count"]  # fmt: skip
            yield table("kinds.job", "Kinds over all ranks", columns, value["job"])
        usual = {(row["rank"], row["device"], row["kind"]): row for row in value["per_step"]}
        of_each = [{**usual.get((row["rank"], row["device"], row["kind"]), {}), **row} for row in kinds]
        columns = ["?rank", "?device", "kind", "sum_ns", "fraction", "exclusive_ns", "count"]
        spread = ["+mean_exclusive_ns", "+min_exclusive_ns", "+max_exclusive_ns"] if usual else []
        yield table(
            "kinds.kinds",
            "GPU time by kind",
            [*columns, *spread],
            of_each,
            "Exclusive times and idle time add up to the window of the GPU.",
        )
        columns = ["?rank", "?device", "bound", "sum_ns", "fraction", "exclusive_ns", "count"]
        bounds = [row for row in value["bounds"] if row["count"]]
        yield table(
            "kinds.bounds",
            "GPU time by what bounds it",
            columns,
            bounds,
            "Unknown: no model of the operator, no shapes, or a GPU without known peaks.",
            among=value["bounds"],
        )
        devices: Sequence[Cells] = value["devices"]
        matrix = value["matrix"]
        if any(row[name] is not None for row in devices for name in _FILL):
            yield table("kinds.devices", "How full the GPU is", ["?rank", "?device", *_FILL, "kernel_ns"], devices)
        yield table(
            "kinds.matrix",
            "Matrix units",
            ["?rank", "matrix_units", "total_ns", "count"],
            matrix,
            "Tensor cores or MFMA, recognised by kernel names.",
        )
        columns = ["?rank", "total_ns", "+count", "kind", "+matrix_units", "+blocks_per_sm", "+sm_fill", "+occupancy",
                   "name"]  # fmt: skip
        yield table(
            "kinds.kernels", "Kernels by kind", columns, value["kernels"], "The longest of each rank.", among=matrix
        )
        columns = ["?rank", "kind", "rule", "sum_ns", "count"]
        yield table("kinds.rules", "Which rules decided", columns, value["rules"], among=matrix)

    def summary(self, value: KindsValue) -> str | None:
        totals: dict[str, int] = {}
        for row in value["kinds"]:
            totals[row["kind"]] = totals.get(row["kind"], 0) + row["sum_ns"]
        whole = sum(totals.values())
        if not whole:
            return None
        top = sorted(totals.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{kind} {units.share(ns, whole)}" for kind, ns in top)
        matrix_ns = {
            state: sum(row["total_ns"] for row in value["matrix"] if row["matrix_units"] == state)
            for state in ("used", "unused")
        }
        products = sum(matrix_ns.values())
        return f"{shares} of the GPU work, added up" + (
            f"; matrix units used in {units.share(matrix_ns['used'], products)} of matrix products" if products else ""
        )

    def picture(self, value: KindsValue) -> str:
        """A bar per GPU: exclusive time by kind, and idle time."""
        bars = []
        for device in value["devices"][:16]:
            key = (device["rank"], device["device"])
            parts = [
                (row["kind"], row["exclusive_ns"]) for row in value["kinds"] if (row["rank"], row["device"]) == key
            ]
            rank = "" if device["rank"] is None else f"rank {device['rank']} "
            bars.append((f"{rank}GPU {device['device']}", [*parts, ("idle", device["idle_ns"])]))
        return stacked(bars, _COLOURS)


_WIDTH, _LEFT, _BAR, _GAP = 1256, 130, 18, 9


def stacked(bars: Sequence[tuple[str, Sequence[tuple[str, int]]]], colours: Mapping[str, str]) -> str:
    """A figure with one bar per entry; all on one scale, each part with its figures on hover. Empty without time.

    Args:
        bars: Label and parts of each: (name, time in ns).
        colours: Colour group of the page by name of a part, in the order of the bar; other parts come last, as `other`.
    """
    longest = max((sum(ns for _, ns in parts) for _, parts in bars), default=0)
    if not longest:
        return ""
    order = {name: number for number, name in enumerate(colours)}
    drawn = {name for _, parts in bars for name, ns in parts if ns}
    names = dict.fromkeys([*order, *(name for _, parts in bars for name, _ in parts)])
    height = len(bars) * (_BAR + _GAP) - _GAP
    out = [f'<figure class="picture"><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="GPU time by part">']
    for row, (label, parts) in enumerate(bars):
        top = row * (_BAR + _GAP)
        out.append(f'<text x="0" y="{top + 13}">{escape(sanitize(label))}</text>')
        at = 0
        whole = sum(ns for _, ns in parts)
        for name, ns in sorted(parts, key=lambda part: order.get(part[0], len(order))):
            if not ns:
                continue
            left, right = (_LEFT + (_WIDTH - _LEFT) * end / longest for end in (at, at + ns))
            hover_text = escape(sanitize(f"{name}: {units.duration(ns)}, {units.share(ns, whole)}"))
            out.append(
                f'<rect class="f-{colours.get(name, "other")}" x="{left:.1f}" y="{top}" '
                f'width="{max(right - left, 0.3):.1f}" height="{_BAR}"><title>{hover_text}</title></rect>'
            )
            at += ns
    legend = "".join(
        f'<li><i class="swatch b-{colours.get(name, "other")}"></i>{escape(sanitize(name))}</li>'
        for name in names
        if name in drawn
    )
    return "".join([*out, f'</svg><ul class="legend">{legend}</ul></figure>'])


SECTION = KindsSection()
