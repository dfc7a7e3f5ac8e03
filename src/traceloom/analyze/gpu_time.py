"""Compute, communication, copies and idle time per device and step.

The parts of a row add up exactly: compute + exposed communication + exposed memory + idle = window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.idle import Idle
from traceloom.analyze.intervals import (
    EMPTY_SPANS,
    compute_coverage,
    merge_intervals,
    merge_spans,
    sum_clipped_durations,
)
from traceloom.analyze.kernel_rules import Rule, select_gpu_work
from traceloom.analyze.steps import Tiles, build_device_tiles, find_step_spans, list_told_steps
from traceloom.trace.array_types import Ints
from traceloom.trace.batch import TRACE_COLUMN, cache_per_trace
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

FIELDS = (
    "window_ns",
    "busy_ns",
    "idle_ns",
    "compute_ns",
    "communication_ns",
    "memory_ns",
    "exposed_communication_ns",
    "exposed_memory_ns",
    "gpu_work_count",
    "kernel_count",
    "kernel_ns",
    "edge_idle_before_ns",
    "edge_idle_after_ns",
)
"""The additive fields: those of the steps of a device and of the time outside add up to those of
the device.
"""

DEVICE_SCHEMA = build_schema("device name start_ns", *FIELDS)
STEP_SCHEMA = build_schema("device name step start_ns duration_ns", *FIELDS)


@dataclass(frozen=True)
class GpuTime(Result):
    """GPU time of a trace, per device and per step. Definitions: docs/concepts/gpu-time.md.

    Attributes:
        devices: One row per device with GPU work: device, name, start_ns (of its first GPU work),
            window_ns (first start to last end), busy_ns, idle_ns, compute_ns, communication_ns,
            memory_ns (unions), exposed_communication_ns (not covered by compute), exposed_memory_ns
            (covered by neither), gpu_work_count, kernel_count, kernel_ns (sum of durations),
            edge_idle_before_ns and edge_idle_after_ns (trace time before the first and after the
            last GPU work; not part of the window).
        steps: The same fields clipped to each step's time, for every device; the row with step null
            is the time outside all steps, which has no start of its own. GPU work counts where it
            starts. window_ns + edge_idle_before_ns + edge_idle_after_ns = duration_ns.
    """

    devices: pl.DataFrame
    steps: pl.DataFrame


def gpu_time(trace: Trace, rules: Iterable[Rule] = ()) -> GpuTime:
    """Accounts for every nanosecond of every device.

    Args:
        trace: One process's trace.
        rules: The user's kernel rules, before the built-in table.
    """
    rules = tuple(rules)
    return _compute_gpu_time(trace, rules) if rules else _gpu_time_by_default_rules(trace)


def _compute_gpu_time(trace: Trace, rules: tuple[Rule, ...] = ()) -> GpuTime:
    work = select_gpu_work(trace, rules)[["device", "start_ns", "end_ns", "category", "kind"]]
    cut = build_device_tiles(trace)
    names = dict(
        zip(trace.devices["device"].to_list(), trace.devices["name"].to_list(), strict=True)
    )
    # The last is outside
    spans = find_step_spans(trace)
    in_time = np.append(np.argsort(spans["start_ns"].to_numpy(), kind="stable"), -1)
    moments = {name: [*spans[name].to_list(), None] for name in ("step", "start_ns")}
    moments = {name: [values[row] for row in in_time.tolist()] for name, values in moments.items()}
    devices, steps = [DEVICE_SCHEMA.to_frame()], [STEP_SCHEMA.to_frame()]
    for part in work.sort("device", maintain_order=True).partition_by(
        "device", maintain_order=True
    ):
        device = part["device"][0]
        # The additive fields of one device in each tile, with the tile's duration.
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        category = part["category"].to_physical().to_numpy()
        compute, communication, memory = (
            merge_intervals(start[category == c], end[category == c]) for c in range(3)
        )
        visible = merge_spans(compute, communication)
        busy = merge_spans(visible, memory)
        low, high = cut.spans
        first, last = int(start.min()), int(end.max())
        window = np.maximum(np.minimum(high, last) - np.maximum(low, first), 0)
        busy_ns, compute_ns, visible_ns = (
            compute_coverage(spans, low, high) for spans in (busy, compute, visible)
        )
        is_kernel = (part["kind"] == "kernel").to_numpy()
        # A start on the last bound belongs to the last tile
        tile = np.searchsorted(low, start, side="right") - 1
        field_values = {
            "duration_ns": high - low,
            "window_ns": window,
            "busy_ns": busy_ns,
            "idle_ns": window - busy_ns,
            "compute_ns": compute_ns,
            "communication_ns": compute_coverage(communication, low, high),
            "memory_ns": compute_coverage(memory, low, high),
            "exposed_communication_ns": visible_ns - compute_ns,
            "exposed_memory_ns": busy_ns - visible_ns,
            "gpu_work_count": np.bincount(tile, minlength=low.size),
            "kernel_count": np.bincount(tile[is_kernel], minlength=low.size),
            "kernel_ns": sum_clipped_durations(start[is_kernel], end[is_kernel], low, high),
            "edge_idle_before_ns": np.maximum(np.minimum(high, first) - low, 0),
            "edge_idle_after_ns": np.maximum(high - np.maximum(low, last), 0),
        }
        device_row = {"device": device, "name": names.get(device), "start_ns": first}
        device_row |= {name: int(field_values[name].sum()) for name in FIELDS}
        devices.append(pl.DataFrame([device_row], schema=DEVICE_SCHEMA))
        step_sums = np.zeros((in_time.size, len(field_values)), dtype=np.int64)
        np.add.at(step_sums, cut.row, np.column_stack(list(field_values.values())))
        label = {"device": [device] * in_time.size, "name": [names.get(device)] * in_time.size}
        summed = dict(zip(field_values, step_sums[in_time].T, strict=True))
        steps.append(pl.DataFrame({**label, **moments, **summed}, schema=STEP_SCHEMA))
    return GpuTime(pl.concat(devices), pl.concat(steps))


_gpu_time_by_default_rules = cache_per_trace(_compute_gpu_time)

SHARES = ("count", "sum_ns", "exclusive_ns")


class TimeShares(Struct, frozen=True):
    """The time of devices, divided among parts; all frames begin with `trace` (see
    `traceloom.trace.batch`).

    Attributes:
        devices: device, window_ns (first start to last end), busy_ns, idle_ns, sum_ns, count.
        parts: device, the key, count, sum_ns, exclusive_ns, fraction (of the device's sum); one row
            per device and part, also where it is 0. Exclusive times and idle time of a device add
            up to its window.
        steps: device, step (null outside all steps), the key, count, sum_ns, exclusive_ns; rows of
            zeros left out.
    """

    devices: pl.DataFrame
    parts: pl.DataFrame
    steps: pl.DataFrame


def compute_shares(
    traces: Sequence[Trace], work: pl.DataFrame, key: str, priority: Sequence[str]
) -> TimeShares:
    """Divides the time of each device among the values of a key.

    Args:
        traces: The traces, for their steps.
        work: GPU work of all of them with trace, device, start_ns, end_ns and the Enum column
            `key`.
        key: The column that identifies the part.
        priority: All values of the key; a nanosecond in which several run belongs to the first of
            them.
    """
    cuts = [build_device_tiles(trace) for trace in traces]
    label = work.schema[key]
    assert isinstance(label, pl.Enum)
    names = label.categories.to_list()
    order = [names.index(name) for name in priority]
    # The last is that of tiles outside all steps, whose row is -1.
    step_numbers = [[*trace.steps["step"].to_list(), None] for trace in traces]
    fields = dict.fromkeys(SHARES, pl.Int64())
    devices, parts = [], []
    device_key = {TRACE_COLUMN: pl.UInt32(), "device": pl.Int32()}
    steps = [pl.DataFrame(schema={**device_key, "step": pl.Int32(), key: label, **fields})]
    rows = work[[*device_key, "start_ns", "end_ns", key]].sort(
        TRACE_COLUMN, "device", maintain_order=True
    )
    for part in rows.partition_by(TRACE_COLUMN, "device", maintain_order=True):
        number, device = part[TRACE_COLUMN][0], part["device"][0]
        cut, numbers = cuts[number], step_numbers[number]
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        values = _measure(start, end, part[key].to_physical().to_numpy(), cut, order)
        count, total, exclusive = values.sum(axis=2).tolist()
        window, busy, total_ns = int(end.max() - start.min()), sum(exclusive), sum(total)
        devices.append((number, device, window, busy, window - busy, total_ns, part.height))
        for index, name in enumerate(names):
            fraction = total[index] / total_ns if total_ns else None
            parts.append(
                (number, device, name, count[index], total[index], exclusive[index], fraction)
            )
        step_values = np.zeros((len(numbers), len(names), len(SHARES)), dtype=np.int64)
        np.add.at(step_values, cut.row, values.transpose(2, 1, 0))
        step, part_number = np.nonzero(step_values.any(axis=2))
        steps.append(
            pl.DataFrame(
                {
                    TRACE_COLUMN: [number] * step.size,
                    "device": [device] * step.size,
                    "step": [numbers[row] for row in step.tolist()],
                    key: [names[number] for number in part_number.tolist()],
                    **dict(zip(SHARES, step_values[step, part_number].T, strict=True)),
                },
                schema=steps[0].schema,
            )
        )
    device_fields = dict.fromkeys(
        ("window_ns", "busy_ns", "idle_ns", "sum_ns", "count"), pl.Int64()
    )
    part_schema = {**device_key, key: label, **fields, "fraction": pl.Float64()}
    return TimeShares(
        pl.DataFrame(devices, schema={**device_key, **device_fields}, orient="row"),
        pl.DataFrame(parts, schema=part_schema, orient="row"),
        pl.concat(steps),
    )


def _measure(start: Ints, end: Ints, code: Ints, cut: Tiles, order: list[int]) -> Ints:
    """Returns count, sum and exclusive time of each part in each tile; shape (3, parts, tiles)."""
    low, high = cut.spans
    out = np.zeros((len(SHARES), len(order), low.size), dtype=np.int64)
    covered, before = EMPTY_SPANS, np.zeros(low.size, dtype=np.int64)
    for part in order:
        in_part = code == part
        if not in_part.any():
            continue
        first, last = start[in_part], end[in_part]
        covered = merge_spans(covered, merge_intervals(first, last))
        now = compute_coverage(covered, low, high)
        out[0, part] = np.bincount(
            np.searchsorted(low, first, side="right") - 1, minlength=low.size
        )
        out[1, part] = sum_clipped_durations(first, last, low, high)
        out[2, part] = now - before
        before = now
    return out


PARTS = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")
"""The parts of a device's time, which add up to `window_ns`."""

DEVICE_ACCOUNT_SCHEMA = build_schema(
    "device name window_ns", *PARTS, "communication_ns edge_idle_ns"
)


@dataclass(frozen=True)
class DeviceAccount(Result):
    """The time of a trace's devices: in its whole steps, or without steps from the first to the last GPU
    work of each.

    Attributes:
        window: `steps` or `gpu_work`: what the times cover.
        devices: One row per device with GPU work: device, name, window_ns (in steps: the duration
            of all of them), compute_ns, exposed_communication_ns, exposed_memory_ns, idle_ns (which
            add up to it), communication_ns (hidden or not), edge_idle_ns (of idle_ns: before the
            first and after the last GPU work of the trace).
        idle: device, cause, idle_ns, gap_count; the largest first. With edge_idle_ns it adds up to
            idle_ns.
    """

    window: str
    devices: pl.DataFrame
    idle: pl.DataFrame

    def __post_init__(self) -> None:
        if not self.devices.select((pl.sum_horizontal(PARTS) == pl.col("window_ns")).all()).item():
            raise ValueError("the parts of a device's time do not add up to its window")
        causes, edges = int(self.idle["idle_ns"].sum()), int(self.devices["edge_idle_ns"].sum())
        if causes + edges != int(self.devices["idle_ns"].sum()):
            raise ValueError("the causes of idle time do not add up to it")


def has_step_time(trace: Trace) -> bool:
    """Whether the steps hold any time; damaged marks without a duration hold none."""
    return bool((trace.steps["end_ns"] > trace.steps["start_ns"]).any())


def build_device_account(trace: Trace, gpu: GpuTime, idle: Idle) -> DeviceAccount:
    """Returns the time of the devices in the whole steps of a trace; of all their GPU work where no
    step holds any time.
    """
    if not has_step_time(trace):
        devices = gpu.devices.with_columns(edge_idle_ns=0)
        return DeviceAccount(
            "gpu_work", devices.pipe(cast_to_schema, DEVICE_ACCOUNT_SCHEMA), idle.totals
        )
    in_steps = pl.col("step").is_in(list_told_steps(trace).implode())
    edges = pl.col("edge_idle_before_ns") + pl.col("edge_idle_after_ns")
    devices = (
        gpu.steps.filter(in_steps)
        .with_columns(
            edges.alias("edge_idle_ns"), pl.col("window_ns") + edges, pl.col("idle_ns") + edges
        )
        .group_by("device", maintain_order=True)
        .agg(pl.col("name").first(), pl.col(list(DEVICE_ACCOUNT_SCHEMA)[2:]).sum())
    )
    causes = (
        idle.gaps.lazy()
        .filter(in_steps)
        .group_by("device", "cause")
        .agg(idle_ns=pl.col("duration_ns").sum(), gap_count=pl.col("gap").n_unique().cast(pl.Int64))
        .sort("device", "idle_ns", "cause", descending=[False, True, False])
        .collect()
    )
    return DeviceAccount("steps", devices.pipe(cast_to_schema, DEVICE_ACCOUNT_SCHEMA), causes)
