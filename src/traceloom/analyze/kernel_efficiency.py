"""Efficiency of kernels: how full they make the device, what bounds them, and recorded hardware
counters.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.gpu_time import SHARES, compute_shares
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.kernel_rules import (
    MATRIX_UNIT_STATES,
    MatrixUnitStateType,
    WorkKindType,
    classify_matrix_units,
    select_gpu_work_with_steps,
)
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.roofline import PeakSpec, select_modelled_work
from traceloom.analyze.steps import build_device_tiles, select_whole_steps, summarize_per_step
from traceloom.formats.arguments import can_reread_events, read_all_arguments
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Floats, Ints
from traceloom.trace.arrays import get_event_column
from traceloom.trace.batch import TRACE_COLUMN, concatenate_by_trace, run_in_batches, split_by_trace
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

DEVICE_SCHEMA = build_schema(
    "device window_ns kernel_count kernel_ns measured_ns estimated_ns sm_efficiency sm_fill occupancy",
)
STEP_SCHEMA = build_schema("device step duration_ns sm_efficiency")
KERNEL_SCHEMA = build_schema(
    "name kind matrix_units count total_ns blocks_per_sm sm_fill occupancy",
    {"kind": WorkKindType, "matrix_units": MatrixUnitStateType},
)
MATRIX_SCHEMA = build_schema("matrix_units count total_ns", {"matrix_units": MatrixUnitStateType})


@dataclass(frozen=True)
class KernelEfficiency(Result):
    """How kernels fill the GPU. Definitions: docs/concepts/kernel-efficiency.md.

    Attributes:
        devices: device, window_ns (first start to last end of its GPU work), kernel_count,
            kernel_ns (sum), measured_ns (sum over kernels whose blocks per SM are recorded),
            estimated_ns (sum over kernels whose occupancy is known), sm_efficiency (share of the
            window's SM time that has a block: at every instant the blocks per SM of all running
            kernels, at most 1), sm_fill (the same over the time of the measured kernels, each by
            itself), occupancy (mean of the estimated achieved occupancy, 0 to 1, weighted by time).
            The last three are null where the writer does not record them.
        steps: device, step, duration_ns, sm_efficiency of each whole step; null as above.
        kernels: Per name and kind, the largest total first: name, kind, matrix_units (used, unused,
            unknown, none), count, total_ns, blocks_per_sm, sm_fill and occupancy (means weighted by
            time; null where not recorded).
        matrix: All kernels by use of matrix units: matrix_units, count, total_ns. They add up to
            all `kernel_ns`.
        matrix_share: used / (used + unused) of the time; None where no product's name shows it.
        absent: Why blocks per SM and occupancy are unknown: `not-recorded`; None where they are
            known.
    """

    devices: pl.DataFrame
    steps: pl.DataFrame
    kernels: pl.DataFrame
    matrix: pl.DataFrame
    matrix_share: float | None
    absent: str | None


def kernel_efficiency(trace: Trace) -> KernelEfficiency:
    """Measures how kernels fill the GPU."""
    return _measure_efficiency(trace)


@run_in_batches
def _measure_efficiency(traces: Sequence[Trace]) -> Iterable[KernelEfficiency]:
    work = select_gpu_work_with_steps(traces).with_columns(
        told=concatenate_by_trace(map(classify_kinds, traces))["kind"]
    )
    runs = work.filter(pl.col("kind") == "kernel")
    filled = concatenate_by_trace(trace.kernels for trace in traces)
    runs = runs.join(
        filled, on=[TRACE_COLUMN, "event"], how="left", maintain_order="left"
    ).with_columns(
        pl.when(~_OCCUPANCY_FAILED).then(pl.col("occupancy_percent") / 100).alias("occupancy")
    )
    table = runs.group_by(TRACE_COLUMN, "name", kind="told").agg(
        pl.len().alias("count"),
        pl.col("ns").sum().alias("total_ns"),
        _compute_weighted_mean(pl.col("blocks_per_sm"), "blocks_per_sm"),
        _compute_weighted_mean(_SM_FILL, "sm_fill"),
        _compute_weighted_mean(pl.col("occupancy"), "occupancy"),
    )
    names = table[["name", "kind"]].unique()
    table = table.join(
        names.hstack([classify_matrix_units(names)]), on=["name", "kind"], how="left"
    ).sort(TRACE_COLUMN, "total_ns", "name", "kind", descending=[False, True, False, False])
    devices, steps = _summarize_devices(traces, work, runs)
    for run_table, kernels, device_table, step_table in zip(
        split_by_trace(runs, traces),
        split_by_trace(table, traces, KERNEL_SCHEMA),
        split_by_trace(devices, traces, DEVICE_SCHEMA),
        split_by_trace(steps, traces),
        strict=True,
    ):
        absent = run_table.height and run_table["blocks_per_sm"].null_count() == run_table.height
        state = kernels["matrix_units"].to_physical().to_numpy()
        added = np.zeros((len(MATRIX_UNIT_STATES), 2), dtype=np.int64)
        np.add.at(added, state, kernels[["count", "total_ns"]].to_numpy())
        matrix = pl.DataFrame(
            {"matrix_units": MATRIX_UNIT_STATES, "count": added[:, 0], "total_ns": added[:, 1]},
            MATRIX_SCHEMA,
        )
        sums = dict(zip(MATRIX_UNIT_STATES, added[:, 1].tolist(), strict=True))
        decided_ns = sums["used"] + sums["unused"]
        yield KernelEfficiency(
            device_table,
            step_table,
            kernels,
            matrix,
            sums["used"] / decided_ns if decided_ns else None,
            "not-recorded" if absent else None,
        )


def _compute_weighted_mean(value: pl.Expr, name: str) -> pl.Expr:
    """Returns a mean weighted by time, over the known values."""
    weight = pl.col("ns").filter(value.is_not_null())
    return ((value * pl.col("ns")).sum() / weight.sum()).fill_nan(None).alias(name)


_SM_FILL = pl.col("blocks_per_sm").clip(0, 1)
# A warp on every SM is 1 to 2 % of what an SM can hold: an estimate of 0 % then is one that failed
# (it does for kernels that ask for more shared memory than a block has by default).
_OCCUPANCY_FAILED = ((pl.col("occupancy_percent") == 0) & (pl.col("warps_per_sm") >= 1)).fill_null(
    value=False
)


def _summarize_devices(
    traces: Sequence[Trace], work: pl.DataFrame, runs: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    has_blocks = pl.col("blocks_per_sm").is_not_null()
    keys = [TRACE_COLUMN, "device"]
    windows = work.group_by(keys).agg(low=pl.col("start_ns").min(), high=pl.col("end_ns").max())
    devices = (
        windows.join(
            runs.group_by(keys).agg(
                pl.len().alias("kernel_count"),
                pl.col("ns").sum().alias("kernel_ns"),
                pl.col("ns").filter(has_blocks).sum().alias("measured_ns"),
                pl.col("ns").filter(pl.col("occupancy").is_not_null()).sum().alias("estimated_ns"),
                _compute_weighted_mean(_SM_FILL, "sm_fill"),
                _compute_weighted_mean(pl.col("occupancy"), "occupancy"),
            ),
            on=keys,
            how="left",
            nulls_equal=True,
        )
        .with_columns(
            pl.col("kernel_count", "kernel_ns", "measured_ns", "estimated_ns").fill_null(0),
            window_ns=pl.col("high") - pl.col("low"),
        )
        .sort(keys)
    )
    filled = runs.filter(has_blocks).partition_by(keys, as_dict=True)
    efficiency: list[float | None] = []
    steps = []
    for row in devices.rows(named=True):
        device_runs = filled.get((row[TRACE_COLUMN], row["device"]))
        if device_runs is None:
            efficiency.append(None)
            continue
        trace = traces[row[TRACE_COLUMN]]
        plan = build_device_tiles(trace)
        in_step = plan.row >= 0
        low, high = plan.spans.start[in_step], plan.spans.end[in_step]
        tile_steps = trace.steps[["step", "complete"]][plan.row[in_step]].with_columns(
            length=pl.Series(high - low)
        )
        filled_ns = _compute_sm_time(
            device_runs, np.append(low, row["low"]), np.append(high, row["high"])
        )
        efficiency.append(float(filled_ns[-1] / row["window_ns"]) if row["window_ns"] else None)
        per_step = (filled_ns[:-1] / np.maximum(high - low, 1)).tolist()
        steps += [
            (row[TRACE_COLUMN], row["device"], step, length, filled_part)
            for (step, complete, length), filled_part in zip(
                tile_steps.rows(), per_step, strict=True
            )
            if complete
        ]
    return (
        devices.hstack([pl.Series("sm_efficiency", efficiency, dtype=pl.Float64)]),
        pl.DataFrame(steps, schema={TRACE_COLUMN: pl.UInt32(), **STEP_SCHEMA}, orient="row"),
    )


def _compute_sm_time(runs: pl.DataFrame, low: Ints, high: Ints) -> Floats:
    """Returns SM time with a block in each [low, high), in ns of the whole device: the area below
    blocks per SM, up to 1.
    """
    start, end = runs["start_ns"].to_numpy(), runs["end_ns"].to_numpy()
    blocks = runs["blocks_per_sm"].to_numpy()
    time = np.concatenate([start, end])
    change = np.concatenate([blocks, -blocks])
    order = np.argsort(time, kind="stable")
    time = time[order]
    # A remainder of a sum of floats after all has ended is not a block.
    level = np.where(
        np.cumsum(np.concatenate([np.ones(start.size), -np.ones(end.size)])[order]) > 0.5, 1.0, 0.0
    )
    level *= np.clip(np.cumsum(change[order]), 0, 1)
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(time))])

    def until(instants: Ints) -> Floats:
        index = np.searchsorted(time, instants, side="right") - 1
        clipped = np.maximum(index, 0)
        beyond = np.where(index >= 0, level[clipped] * (instants - time[clipped]), 0.0)
        return np.where(index >= 0, area[clipped] + beyond, 0.0)

    return until(high) - until(low)


BOUNDS = ("compute", "memory", "latency", "unknown")
BoundType = pl.Enum(BOUNDS)

MAX_SHORT_NS = 10_000
"""Work shorter than this can be bound by latency: starting and ending a kernel takes some
microseconds by itself.
"""

SHORT_LATENCY_SHARE = 0.25
"""... where it would need less than this share of its time at the nearer of the two ceilings."""

LATENCY_SHARE = 0.05
"""Work of any length that would need less than this is bound by neither: too little runs at once,
or it runs serially.
"""

BOUND_SCHEMA = build_schema("device bound count sum_ns exclusive_ns fraction", {"bound": BoundType})
KIND_SCHEMA = build_schema(
    "kind bound count sum_ns roofline_ns", {"kind": WorkKindType, "bound": BoundType}
)


@dataclass(frozen=True)
class KernelBounds(Result):
    """GPU time by bound. Definitions: docs/concepts/kernel-kinds.md.

    Attributes:
        bounds: One row per device and bound, also where it is 0: device, bound (compute, memory,
            latency, unknown), count, sum_ns, exclusive_ns, fraction (of the sum; null without any).
            Sums add up to all GPU work, exclusive times to the device's busy time.
        kinds: The same sums per kind, all devices together: kind, bound, count, sum_ns, roofline_ns
            (time at the nearer ceiling; null where unknown).
        per_step: Per device and bound the mean, min and max over whole steps of count, sum_ns and
            exclusive_ns.
        known_fraction: Share of the summed time whose bound is known; None without GPU work.
    """

    bounds: pl.DataFrame
    kinds: pl.DataFrame
    per_step: pl.DataFrame
    known_fraction: float | None


def kernel_bounds(
    trace: Trace, peak: PeakSpec = None, capture: Trace | None = None
) -> KernelBounds:
    """Accounts for the time of each GPU by what bounds it.

    Args:
        trace: The trace.
        peak: The device's peak where the trace does not name a known device, as for `roofline`.
        capture: The recording of the capture of its graphs, as for `roofline`.
    """
    return _summarize_bounds(trace, peak, capture)


@run_in_batches
def _summarize_bounds(
    traces: Sequence[Trace], peak: PeakSpec, capture: Trace | None
) -> Iterable[KernelBounds]:
    work = _classify_bounds(traces, peak, capture)
    bound_shares = compute_shares(traces, work, "bound", BOUNDS)
    kind_bounds = (
        work.group_by(TRACE_COLUMN, "kind", "bound")
        .agg(
            pl.len().alias("count"),
            pl.col("ns").sum().alias("sum_ns"),
            pl.when(pl.col("roofline_ns").is_not_null().all())
            .then(pl.col("roofline_ns").sum())
            .alias("roofline_ns"),
        )
        .sort(TRACE_COLUMN, "kind", "bound")
    )
    steps = concatenate_by_trace(map(select_whole_steps, traces))
    spread = summarize_per_step(
        bound_shares.steps, [TRACE_COLUMN, "device", "bound"], list(SHARES), steps
    )
    for parts, kind_table, per_step in zip(
        split_by_trace(bound_shares.parts, traces, BOUND_SCHEMA),
        split_by_trace(kind_bounds, traces, KIND_SCHEMA),
        split_by_trace(spread, traces),
        strict=True,
    ):
        total_ns = int(kind_table["sum_ns"].sum())
        known_ns = int(kind_table.filter(pl.col("bound") != "unknown")["sum_ns"].sum())
        yield KernelBounds(parts, kind_table, per_step, known_ns / total_ns if total_ns else None)


def classify_bounds(
    trace: Trace, peak: PeakSpec = None, capture: Trace | None = None
) -> pl.DataFrame:
    """Returns the bound of every piece of GPU work: event, device, start_ns, end_ns, ns, kind,
    roofline_ns, bound.
    """
    return _classify_bounds([trace], peak, capture).drop(TRACE_COLUMN)


def _classify_bounds(
    traces: Sequence[Trace], peak: PeakSpec, capture: Trace | None
) -> pl.DataFrame:
    columns = (TRACE_COLUMN, "event", "device", "start_ns", "end_ns", "ns")
    work = select_gpu_work_with_steps(traces)[columns].hstack(
        [concatenate_by_trace(map(classify_kinds, traces))["kind"]]
    )
    models = concatenate_by_trace(select_modelled_work(trace, peak, capture) for trace in traces)
    model = models.select(
        TRACE_COLUMN, "event", "roofline_ns", modelled=pl.col("bound").cast(pl.String)
    )
    ceiling = pl.col("roofline_ns")
    ns = pl.col("ns")
    latency = ((ns < MAX_SHORT_NS) & (ceiling < SHORT_LATENCY_SHARE * ns)) | (
        ceiling < LATENCY_SHARE * ns
    )
    bound = pl.when(ceiling.is_null() | pl.col("modelled").is_null()).then(pl.lit("unknown"))
    return (
        work.join(model, on=[TRACE_COLUMN, "event"], how="left", maintain_order="left")
        .with_columns(
            bound.when(latency)
            .then(pl.lit("latency"))
            .otherwise("modelled")
            .cast(BoundType)
            .alias("bound")
        )
        .drop("modelled")
    )


KERNEL_LAUNCH = r"LaunchKernel|LaunchCooperativeKernel|ModuleLaunch"
SERIES_SCHEMA = build_schema(
    "source counter samples first_ns last_ns min mean max", {"source": pl.String}
)
RANGE_SCHEMA = build_schema("range kernel launch op counter value")
OP_SCHEMA = build_schema("op counter ranges value")


@dataclass(frozen=True)
class Counters(Result):
    """Recorded counters. Definitions: docs/concepts/counters.md.

    Attributes:
        series: Counters sampled over time (`hardware_counters` and others): source (their process),
            counter, samples, first_ns, last_ns, min, mean (of the samples), max.
        ranges: Counters of single kernels, as CUPTI's range profiler writes them
            (`cuda_profiler_range`): range (its number, in order), kernel (null where the writer
            could not name it), launch (row of the call that launched it), op (the operator around
            the launch), counter, value. The times of such ranges are equal parts of the recording,
            no measurement, so the k-th range belongs to the k-th launch.
        operators: Sums over the ranges of each operator: op, counter, ranges, value.
        unpaired: Why ranges have no launch: `counts-differ` (as many ranges as kernel launches are
            needed); None where they have one, or where there are no ranges.
        range_count: Ranges in the trace.
        launch_count: Calls in the trace that launch one kernel.
        absent: Why the values of ranges are unknown: `file-gone`; None where they are known.
    """

    series: pl.DataFrame
    ranges: pl.DataFrame
    operators: pl.DataFrame
    unpaired: str | None
    range_count: int
    launch_count: int
    absent: str | None


def counters(trace: Trace) -> Counters:
    """Collects counters, and pairs those of kernels with their launches."""
    rows = np.flatnonzero(
        get_event_column(trace, "category") == vocab.CATEGORIES.index(vocab.COUNTER_RANGE)
    )
    if not trace.counters.height and not rows.size:
        series, ranges, op_table = (
            columns.to_frame() for columns in (SERIES_SCHEMA, RANGE_SCHEMA, OP_SCHEMA)
        )
        return Counters(
            series, ranges, op_table, unpaired=None, range_count=0, launch_count=0, absent=None
        )
    value = pl.col("value")
    series = (
        trace.counters.drop_nulls("value")
        .with_columns(counter=pl.concat_str(["name", "key"], separator=" ").str.strip_chars())
        .group_by("counter", source="process", maintain_order=True)
        .agg(
            pl.len().alias("samples"),
            pl.col("time_ns").min().alias("first_ns"),
            pl.col("time_ns").max().alias("last_ns"),
            value.min().alias("min"),
            value.mean().alias("mean"),
            value.max().alias("max"),
        )
        .sort("source", "counter", nulls_last=True)
        .pipe(cast_to_schema, SERIES_SCHEMA)
    )
    launches = find_launch_calls(trace) if rows.size else rows
    paired = rows.size == launches.size
    readable_ = can_reread_events(trace)
    records = []
    if readable_ and rows.size:
        names, ops = trace.events["name"], trace.events["op"]
        missing: list[Any] = [None] * rows.size
        kernels = [None if name == "__missing__" else name for name in names.gather(rows).to_list()]
        launch_of = launches.tolist() if paired else missing
        op_of = names.gather(ops.gather(launches)).to_list() if paired else missing
        records = [  # one per range and counter
            (number, kernel, launch, op, key, float(amount))
            for number, (args, kernel, launch, op) in enumerate(
                zip(read_all_arguments(trace, rows), kernels, launch_of, op_of, strict=True)
            )
            for key, amount in args.items()
            if isinstance(amount, (int, float))
            and not isinstance(amount, bool)
            and np.isfinite(amount)
        ]
    ranges = pl.DataFrame(records, schema=RANGE_SCHEMA, orient="row")
    op_table = (
        ranges.filter(pl.col("launch").is_not_null())
        .group_by("op", "counter", maintain_order=True)
        .agg(pl.len().alias("ranges"), value.sum())
        .sort("value", "op", "counter", descending=[True, False, False], nulls_last=True)
        .pipe(cast_to_schema, OP_SCHEMA)
    )
    return Counters(
        series,
        ranges,
        op_table,
        unpaired=None if paired else "counts-differ",
        range_count=int(rows.size),
        launch_count=int(launches.size),
        absent="file-gone" if rows.size and not readable_ else None,
    )


def find_launch_calls(trace: Trace) -> Ints:
    """Returns rows of the calls that launch one kernel, by time; a driver call inside a runtime
    call is the same launch.
    """
    is_call = np.isin(
        get_event_column(trace, "category"),
        [vocab.CATEGORIES.index(name) for name in vocab.LAUNCHES],
    )
    rows = np.flatnonzero(is_call & build_vocabulary(trace).events(KERNEL_LAUNCH))
    return rows[~np.isin(get_event_column(trace, "parent", -1)[rows], rows)]
