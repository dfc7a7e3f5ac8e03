"""GPU time by kind of work and by what bounds it, and how well kernels fill the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from traceloom import analyze
from traceloom.analyze.graph_capture import of_rank
from traceloom.analyze.kernel_bound import BOUND_SCHEMA
from traceloom.analyze.kernel_efficiency import DEVICE_SCHEMA as FILL_SCHEMA
from traceloom.analyze.kernel_efficiency import KERNEL_SCHEMA, MATRIX_SCHEMA
from traceloom.analyze.kernel_kinds import KINDS_SCHEMA, RULES_SCHEMA
from traceloom.analyze.kind_rules import KindOfWork
from traceloom.harmless import harmless
from traceloom.model import Trace, units
from traceloom.model.frames import as_declared, schema
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.capture_of_graphs import capture_of_graphs
from traceloom.report.sections.section import Frames, Section, Study, table
from traceloom.report.sections.shapes import Part
from traceloom.report.table import Cells, Table

if TYPE_CHECKING:
    from traceloom.report.documents.sections import KindsValue

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
_NO_WORK = "no GPU work was recorded"
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
            "per_step": kinds.per_step.pipe(as_declared, _USUAL),
            "bounds": analyze.kernel_bounds(trace, options.peak, of_rank(capture_of_graphs(options), trace)).bounds,
            "matrix": fill.matrix,
            "kernels": fill.kernels.head(_KERNELS),
        }

    def build(self, study: Study[Frames], absent: Absent) -> KindsValue:
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
        return self.lists({"job": job.pipe(as_declared, _JOB), **frames}, absent)

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
        out.append(f'<text x="0" y="{top + 13}">{escape(harmless(label))}</text>')
        at = 0
        whole = sum(ns for _, ns in parts)
        for name, ns in sorted(parts, key=lambda part: order.get(part[0], len(order))):
            if not ns:
                continue
            left, right = (_LEFT + (_WIDTH - _LEFT) * end / longest for end in (at, at + ns))
            hover_text = escape(harmless(f"{name}: {units.duration(ns)}, {units.share(ns, whole)}"))
            out.append(
                f'<rect class="f-{colours.get(name, "other")}" x="{left:.1f}" y="{top}" '
                f'width="{max(right - left, 0.3):.1f}" height="{_BAR}"><title>{hover_text}</title></rect>'
            )
            at += ns
    legend = "".join(
        f'<li><i class="swatch b-{colours.get(name, "other")}"></i>{escape(harmless(name))}</li>'
        for name in names
        if name in drawn
    )
    return "".join([*out, f'</svg><ul class="legend">{legend}</ul></figure>'])


SECTION = KindsSection()
