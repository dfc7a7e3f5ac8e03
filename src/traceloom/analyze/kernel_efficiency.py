"""How well do kernels fill the GPU: SM efficiency, achieved occupancy, use of matrix units?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.classify import stepped_work
from traceloom.analyze.kernel_kinds import kinds
from traceloom.analyze.kind_rules import KindOfWork
from traceloom.analyze.matrix_units import STATES, StateType, matrix_units
from traceloom.analyze.remembered import of_each
from traceloom.analyze.stacked import TRACE, stacked, unstacked
from traceloom.analyze.steps import tiles
from traceloom.array_types import Floats, Ints
from traceloom.model import Trace
from traceloom.model.frames import schema
from traceloom.model.result import Result

DEVICE_SCHEMA = schema(
    "device window_ns kernel_count kernel_ns measured_ns estimated_ns sm_efficiency sm_fill occupancy",
)
STEP_SCHEMA = schema("device step duration_ns sm_efficiency")
KERNEL_SCHEMA = schema(
    "name kind matrix_units count total_ns blocks_per_sm sm_fill occupancy",
    {"kind": KindOfWork, "matrix_units": StateType},
)
MATRIX_SCHEMA = schema("matrix_units count total_ns", {"matrix_units": StateType})


@dataclass(frozen=True)
class KernelEfficiency(Result):
    """How kernels fill the GPU. Definitions: docs/concepts/kernel-efficiency.md.

    Attributes:
        devices: device, window_ns (first start to last end of its GPU work), kernel_count, kernel_ns (sum),
            measured_ns (sum over kernels whose blocks per SM are recorded), estimated_ns (sum over kernels whose
            occupancy is known), sm_efficiency (share of the window's SM
            time that has a block: at every instant the blocks per SM of all running kernels, at most 1), sm_fill (the
            same over the time of the measured kernels, each by itself), occupancy (mean of the estimated achieved
            occupancy, 0 to 1, weighted by time). The last three are null where the writer does not record them.
        steps: device, step, duration_ns, sm_efficiency of each whole step; null as above.
        kernels: Per name and kind, the largest total first: name, kind, matrix_units (used, unused, unknown, none),
            count, total_ns, blocks_per_sm, sm_fill and occupancy (means weighted by time; null where not recorded).
        matrix: All kernels by use of matrix units: matrix_units, count, total_ns. They add up to all `kernel_ns`.
        matrix_share: used / (used + unused) of the time; None where no product's name tells.
        absent: Why blocks per SM and occupancy are unknown: `not-recorded`; None where they are known.
    """

    devices: pl.DataFrame
    steps: pl.DataFrame
    kernels: pl.DataFrame
    matrix: pl.DataFrame
    matrix_share: float | None
    absent: str | None


def kernel_efficiency(trace: Trace) -> KernelEfficiency:
    """Measure how kernels fill the GPU."""
    return _of_each(trace)


@of_each
def _of_each(traces: Sequence[Trace]) -> Iterable[KernelEfficiency]:
    work = stepped_work(traces).with_columns(told=stacked(map(kinds, traces))["kind"])
    runs = work.filter(pl.col("kind") == "kernel")
    filled = stacked(trace.kernels for trace in traces)
    runs = runs.join(filled, on=[TRACE, "event"], how="left", maintain_order="left").with_columns(
        pl.when(~_FAILED).then(pl.col("occupancy_percent") / 100).alias("occupancy")
    )
    table = runs.group_by(TRACE, "name", kind="told").agg(
        pl.len().alias("count"),
        pl.col("ns").sum().alias("total_ns"),
        _mean(pl.col("blocks_per_sm"), "blocks_per_sm"),
        _mean(_FILL, "sm_fill"),
        _mean(pl.col("occupancy"), "occupancy"),
    )
    names = table[["name", "kind"]].unique()
    table = table.join(names.hstack([matrix_units(names)]), on=["name", "kind"], how="left").sort(
        TRACE, "total_ns", "name", "kind", descending=[False, True, False, False]
    )
    devices, steps = _devices(traces, work, runs)
    for of_runs, kernels, of_devices, of_steps in zip(
        unstacked(runs, traces),
        unstacked(table, traces, KERNEL_SCHEMA),
        unstacked(devices, traces, DEVICE_SCHEMA),
        unstacked(steps, traces),
        strict=True,
    ):
        absent = of_runs.height and of_runs["blocks_per_sm"].null_count() == of_runs.height
        state = kernels["matrix_units"].to_physical().to_numpy()
        added = np.zeros((len(STATES), 2), dtype=np.int64)
        np.add.at(added, state, kernels[["count", "total_ns"]].to_numpy())
        matrix = pl.DataFrame({"matrix_units": STATES, "count": added[:, 0], "total_ns": added[:, 1]}, MATRIX_SCHEMA)
        sums = dict(zip(STATES, added[:, 1].tolist(), strict=True))
        decided_ns = sums["used"] + sums["unused"]
        yield KernelEfficiency(
            of_devices,
            of_steps,
            kernels,
            matrix,
            sums["used"] / decided_ns if decided_ns else None,
            "not-recorded" if absent else None,
        )


def _mean(value: pl.Expr, name: str) -> pl.Expr:
    """A mean weighted by time, over what is known."""
    weight = pl.col("ns").filter(value.is_not_null())
    return ((value * pl.col("ns")).sum() / weight.sum()).fill_nan(None).alias(name)


_FILL = pl.col("blocks_per_sm").clip(0, 1)
# A warp on every SM is 1 to 2 % of what an SM can hold: an estimate of 0 % then is one that failed (it does for kernels
# that ask for more shared memory than a block has by default).
_FAILED = ((pl.col("occupancy_percent") == 0) & (pl.col("warps_per_sm") >= 1)).fill_null(value=False)


def _devices(traces: Sequence[Trace], work: pl.DataFrame, runs: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    has_blocks = pl.col("blocks_per_sm").is_not_null()
    keys = [TRACE, "device"]
    windows = work.group_by(keys).agg(low=pl.col("start_ns").min(), high=pl.col("end_ns").max())
    devices = (
        windows.join(
            runs.group_by(keys).agg(
                pl.len().alias("kernel_count"),
                pl.col("ns").sum().alias("kernel_ns"),
                pl.col("ns").filter(has_blocks).sum().alias("measured_ns"),
                pl.col("ns").filter(pl.col("occupancy").is_not_null()).sum().alias("estimated_ns"),
                _mean(_FILL, "sm_fill"),
                _mean(pl.col("occupancy"), "occupancy"),
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
        device_runs = filled.get((row[TRACE], row["device"]))
        if device_runs is None:
            efficiency.append(None)
            continue
        trace = traces[row[TRACE]]
        plan = tiles(trace)
        inside = plan.row >= 0
        low, high = plan.spans.start[inside], plan.spans.end[inside]
        tile_steps = trace.steps[["step", "complete"]][plan.row[inside]].with_columns(length=pl.Series(high - low))
        filled_ns = _filled(device_runs, np.append(low, row["low"]), np.append(high, row["high"]))
        efficiency.append(float(filled_ns[-1] / row["window_ns"]) if row["window_ns"] else None)
        per_step = (filled_ns[:-1] / np.maximum(high - low, 1)).tolist()
        steps += [
            (row[TRACE], row["device"], step, length, filled_part)
            for (step, whole, length), filled_part in zip(tile_steps.rows(), per_step, strict=True)
            if whole
        ]
    return (
        devices.hstack([pl.Series("sm_efficiency", efficiency, dtype=pl.Float64)]),
        pl.DataFrame(steps, schema={TRACE: pl.UInt32(), **STEP_SCHEMA}, orient="row"),
    )


def _filled(runs: pl.DataFrame, low: Ints, high: Ints) -> Floats:
    """SM time with a block in each [low, high), in ns of the whole device: the area below blocks per SM, up to 1."""
    start, end = runs["start_ns"].to_numpy(), runs["end_ns"].to_numpy()
    blocks = runs["blocks_per_sm"].to_numpy()
    time = np.concatenate([start, end])
    change = np.concatenate([blocks, -blocks])
    order = np.argsort(time, kind="stable")
    time = time[order]
    # what is left of a sum of floats after all has ended is not a block
    level = np.where(np.cumsum(np.concatenate([np.ones(start.size), -np.ones(end.size)])[order]) > 0.5, 1.0, 0.0)
    level *= np.clip(np.cumsum(change[order]), 0, 1)
    area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(time))])

    def until(at: Ints) -> Floats:
        index = np.searchsorted(time, at, side="right") - 1
        inside = np.maximum(index, 0)
        beyond = np.where(index >= 0, level[inside] * (at - time[inside]), 0.0)
        return np.where(index >= 0, area[inside] + beyond, 0.0)

    return until(high) - until(low)
