"""GPU time by kind of work and by what bounds it, and how well kernels fill the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from traceloom import analyze
from traceloom.analyze.graph_capture import of_rank
from traceloom.analyze.kernel_bound import BOUND_SCHEMA, BOUNDS
from traceloom.analyze.kernel_efficiency import DEVICE_SCHEMA as FILL_SCHEMA
from traceloom.analyze.kernel_efficiency import KERNEL_SCHEMA, MATRIX_SCHEMA
from traceloom.analyze.kernel_kinds import KINDS_SCHEMA, PRIORITY, RULES_SCHEMA
from traceloom.analyze.kind_rules import KindOfWork
from traceloom.model import Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.sections.capture_of_graphs import capture_of_graphs
from traceloom.report.sections.section import Row, Section, Study
from traceloom.report.sections.shapes import ranked, record, rows
from traceloom.report.sections.stacked import Part, stacked
from traceloom.report.table import Col, Table

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
USUAL = pl.Schema(
    {
        "device": pl.Int32(),
        "kind": KindOfWork,
        "mean_exclusive_ns": pl.Float64(),
        "min_exclusive_ns": pl.Int64(),
        "max_exclusive_ns": pl.Int64(),
        "step_count": pl.Int64(),
    }
)
JOB = pl.Schema(
    {
        "kind": KindOfWork,
        "rank_count": pl.Int64(),
        "sum_ns": pl.Int64(),
        "mean_exclusive_ns": pl.Float64(),
        "min_exclusive_ns": pl.Int64(),
        "max_exclusive_ns": pl.Int64(),
        "max_rank": pl.Int32(),
    }
)
_NO_WORK = "no GPU work was recorded"
_NO_FILL = "the profiler of this vendor does not record it"


@dataclass(frozen=True)
class Measured:
    """What is kept of one rank."""

    devices: pl.DataFrame
    kinds: pl.DataFrame
    rules: pl.DataFrame
    usual: pl.DataFrame
    bounds: pl.DataFrame
    matrix: pl.DataFrame
    kernels: pl.DataFrame


def _measure(trace: Trace, options: ReportOptions) -> Measured:
    kinds = analyze.kernel_kinds(trace, options.kind_rules)
    bounds = analyze.kernel_bounds(trace, options.peak, of_rank(capture_of_graphs(options), trace))
    fill = analyze.kernel_efficiency(trace)
    devices = kinds.devices.select("device", "window_ns", "busy_ns", "idle_ns").join(
        fill.devices.drop("window_ns"), on="device", how="left", nulls_equal=True, maintain_order="left"
    )
    present = kinds.kinds.filter(pl.col("count") > 0).sort("device", "sum_ns", descending=[False, True])
    usual = kinds.per_step.select(list(USUAL)).cast(USUAL)
    return Measured(devices, present, kinds.rules, usual, bounds.bounds, fill.matrix, fill.kernels.head(_KERNELS))


_DEVICES = {
    "device": pl.Int32(),
    "window_ns": pl.Int64(),
    "busy_ns": pl.Int64(),
    "idle_ns": pl.Int64(),
    **{name: kind for name, kind in FILL_SCHEMA.items() if name not in {"device", "window_ns"}},
}


def _job(kinds: pl.DataFrame, ranks: int) -> pl.DataFrame:
    """Kinds over all ranks; a rank without such work counts as 0."""
    of_rank = kinds.group_by("rank", "kind").agg(pl.col("sum_ns", "exclusive_ns").sum())
    everywhere = pl.len() == ranks
    return (
        of_rank.sort("exclusive_ns", "rank", descending=[True, False])
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
        .select(list(JOB))
        .cast(JOB)
    )


def _build(study: Study[Measured], absent: Absent) -> Row:
    ranks = len(study.results)
    most = max(min(_KERNELS, _ALL_KERNELS // max(ranks, 1)), 5)
    frames = {
        "job": _job(study.concat(lambda measured: measured.kinds), ranks),
        "devices": study.concat(lambda measured: measured.devices.select(list(_DEVICES))),
        "kinds": study.concat(lambda measured: measured.kinds),
        "rules": study.concat(lambda measured: measured.rules),
        "per_step": study.concat(lambda measured: measured.usual),
        "bounds": study.concat(lambda measured: measured.bounds),
        "matrix": study.concat(lambda measured: measured.matrix),
        "kernels": study.concat(lambda measured: measured.kernels.head(most)),
    }
    out = {name: absent.rows(frame, f"kinds.{name}") for name, frame in frames.items()}
    for name, table in out.items():
        if not table:
            absent.say(f"kinds.{name}")
    return out


def _several(table: list[Row], key: str) -> bool:
    return len({row[key] for row in table}) > 1


def _keys(table: list[Row]) -> list[Col]:
    """Columns of rank and device, where there are several."""
    ranks = [Col("rank", "Rank", "count")] if _several(table, "rank") else []
    return ranks + ([Col("device", "GPU", "count")] if _several(table, "device") else [])


def _tables(value: Row) -> Iterator[Table]:
    kinds = value["kinds"]
    if not kinds:
        return
    if _several(kinds, "rank"):
        yield _job_table(value)
    usual = {(row["rank"], row["device"], row["kind"]): row for row in value["per_step"]}
    of_each = [{**usual.get((row["rank"], row["device"], row["kind"]), {}), **row} for row in kinds]
    spread = [
        Col("mean_exclusive_ns", "Per step", "time", "exclusive time, mean over the whole steps", narrow=False),
        Col("min_exclusive_ns", "Least", "time", narrow=False),
        Col("max_exclusive_ns", "Most", "time", narrow=False),
    ]
    yield Table(
        "kinds-kinds",
        "GPU time by kind",
        [
            *_keys(kinds),
            Col("kind", "Kind"),
            Col("sum_ns", "Sum", "time", "summed durations; what runs at once counts several times"),
            Col("fraction", "Share", "share", "of all summed durations"),
            Col("exclusive_ns", "Exclusive", "time", "each busy nanosecond given to one kind: " + ", ".join(PRIORITY)),
            Col("count", "Count", "count"),
            *(spread if value["per_step"] else []),
        ],
        of_each,
        "kinds.kinds",
        "Exclusive times and idle time add up to the window of the GPU.",
    )
    yield Table(
        "kinds-bounds",
        "GPU time by what bounds it",
        [
            *_keys(value["bounds"]),
            Col("bound", "Bound by"),
            Col("sum_ns", "Sum", "time"),
            Col("fraction", "Share", "share"),
            Col("exclusive_ns", "Exclusive", "time", "in the order " + ", ".join(BOUNDS)),
            Col("count", "Count", "count"),
        ],
        [row for row in value["bounds"] if row["count"]],
        "kinds.bounds",
        "Unknown: no model of the operator, no shapes, or a GPU without known peaks.",
    )
    yield from _fill_tables(value)


def _job_table(value: Row) -> Table:
    return Table(
        "kinds-job",
        "Kinds over all ranks",
        [
            Col("kind", "Kind"),
            Col("sum_ns", "Sum", "time", "summed durations of all ranks"),
            Col("mean_exclusive_ns", "Exclusive", "time", "mean over the ranks"),
            Col("min_exclusive_ns", "Least", "time", "of the rank with the least"),
            Col("max_exclusive_ns", "Most", "time", "of the rank with the most"),
            Col("max_rank", "By rank", "count", "the rank with the most"),
            Col("rank_count", "Ranks", "count", "ranks with such work"),
        ],
        value["job"],
        "kinds.job",
    )


def _fill_tables(value: Row) -> Iterator[Table]:
    fill = [
        Col("sm_fill", "SMs filled", "share", "time-weighted mean of blocks per SM, each at most 1"),
        Col("occupancy", "Occupancy", "share", "time-weighted mean of the estimated achieved occupancy"),
    ]
    if any(row[name] is not None for row in value["devices"] for name in _FILL):
        efficiency = Col("sm_efficiency", "SM efficiency", "share", "share of the window's SM time that has a block")
        columns = [*_keys(value["devices"]), efficiency, *fill, Col("kernel_ns", "Kernel time", "time")]
        yield Table("kinds-devices", "How full the GPU is", columns, value["devices"], "kinds.devices")
    ranks = [Col("rank", "Rank", "count")] if _several(value["matrix"], "rank") else []
    yield Table(
        "kinds-matrix",
        "Matrix units",
        [
            *ranks,
            Col(
                "matrix_units", "Matrix units", hint="unused: a matrix product on scalar units; none: no matrix product"
            ),
            Col("total_ns", "Kernel time", "time"),
            Col("count", "Count", "count"),
        ],
        value["matrix"],
        "kinds.matrix",
        "Tensor cores or MFMA, told by the names of kernels.",
    )
    yield Table(
        "kinds-kernels",
        "Kernels by kind",
        [
            *ranks,
            Col("total_ns", "Total", "time"),
            Col("count", "Count", "count", narrow=False),
            Col("kind", "Kind"),
            Col("matrix_units", "Matrix units", narrow=False),
            Col("blocks_per_sm", "Blocks/SM", "number", "time-weighted mean", narrow=False),
            *(Col(col.key, col.title, col.kind, col.hint, narrow=False) for col in fill),
            Col("name", "Kernel", "name"),
        ],
        value["kernels"],
        "kinds.kernels",
        "Those with the most time of each rank.",
    )
    yield Table(
        "kinds-rules",
        "Which rules decided",
        [
            *ranks,
            Col("kind", "Kind"),
            Col("rule", "Rule", hint="see the table of rules in the documentation; none: no rule knows the name"),
            Col("sum_ns", "Sum", "time"),
            Col("count", "Count", "count"),
        ],
        value["rules"],
        "kinds.rules",
    )


def _summary(value: Row) -> str | None:
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
    return shares + (
        f"; matrix units used in {units.share(matrix_ns['used'], products)} of matrix products" if products else ""
    )


def _picture(value: Row) -> str:
    """A bar per GPU: exclusive time by kind, and idle time."""
    bars = []
    for device in value["devices"][:16]:
        key = (device["rank"], device["device"])
        parts = [
            Part(row["kind"], row["exclusive_ns"]) for row in value["kinds"] if (row["rank"], row["device"]) == key
        ]
        rank = "" if device["rank"] is None else f"rank {device['rank']} "
        bars.append((f"{rank}GPU {device['device']}", [*parts, Part("idle", device["idle_ns"])]))
    return stacked(bars, _COLOURS)


SECTION = Section(
    key="kinds",
    title="Kinds of GPU work",
    note="What kind of work takes the GPU's time, what bounds it, and how full it keeps the GPU.",
    measure=_measure,
    build=_build,
    tables=_tables,
    summary=_summary,
    picture=_picture,
    schema=record(
        {
            "devices": ranked(
                _DEVICES,
                nullable={"device", "kernel_count", "kernel_ns", "measured_ns", "estimated_ns", *_FILL},
                what="time of each GPU, and how full kernels keep it",
            ),
            "job": rows(JOB, nullable={"max_rank"}, what="GPU time by kind over all ranks"),
            "kinds": ranked(KINDS_SCHEMA, nullable={"device", "fraction"}, what="GPU time by kind; kinds that occur"),
            "rules": ranked(RULES_SCHEMA, nullable={"fraction"}, what="GPU time by the rule that decided"),
            "per_step": ranked(USUAL, nullable={"device"}, what="exclusive time by kind of a usual step"),
            "bounds": ranked(BOUND_SCHEMA, nullable={"device", "fraction"}, what="GPU time by what bounds it"),
            "matrix": ranked(MATRIX_SCHEMA, what="kernel time by use of matrix units"),
            "kernels": ranked(
                KERNEL_SCHEMA,
                nullable={"blocks_per_sm", "sm_fill", "occupancy"},
                what=f"the kernels with the most time of each rank: {_KERNELS}, or fewer where there are many ranks",
            ),
        },
        what="GPU time by kind of work and by what bounds it; how full kernels keep the GPU",
    ),
    reasons={
        **{f"kinds.{name}": _NO_WORK for name in ("devices", "job", "kinds", "rules", "bounds", "matrix", "kernels")},
        "kinds.job[*].max_rank": "the file does not say its rank",
        "kinds.per_step": "the trace holds no whole step with GPU work",
        **{f"kinds.devices[*].{name}": _NO_FILL for name in _FILL},
        **{f"kinds.kernels[*].{name}": _NO_FILL for name in ("blocks_per_sm", "sm_fill", "occupancy")},
        **{f"kinds.{name}[*].device": "the file does not number the device" for name in ("devices", "kinds", "bounds")},
        **{
            f"kinds.{name}[*].fraction": "no GPU work of this device has a duration"
            for name in ("kinds", "bounds", "rules")
        },
        **{
            f"kinds.{name}[*].rank": "the file does not say its rank"
            for name in ("devices", "kinds", "rules", "per_step", "bounds", "matrix", "kernels")
        },
    },
)
