"""Where does the time of each GPU go: compute, exposed communication, exposed memory, idle?

The parts of a row add up exactly: compute + exposed communication + exposed memory + idle = window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.classify import Rule, gpu_work
from traceloom.analyze.intervals import coverage, merge, summed_coverage, union
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.steps import tiles
from traceloom.model import Trace
from traceloom.model.frames import schema
from traceloom.model.result import Result

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
"""The additive fields: those of the steps of a device and of the time outside add up to those of the device."""

DEVICE_SCHEMA = schema("device name start_ns", *FIELDS)
STEP_SCHEMA = schema("device name step start_ns duration_ns", *FIELDS)


@dataclass(frozen=True)
class GpuTime(Result):
    """GPU time of a trace, per device and per step. Definitions: docs/concepts/gpu-time.md.

    Attributes:
        devices: One row per device with GPU work: device, name, start_ns (of its first GPU work), window_ns (first
            start to last end), busy_ns, idle_ns, compute_ns, communication_ns, memory_ns (unions),
            exposed_communication_ns (not covered by compute), exposed_memory_ns (covered by neither),
            gpu_work_count, kernel_count, kernel_ns (sum of durations), edge_idle_before_ns and edge_idle_after_ns
            (trace time before the first and after the last GPU work; not part of the window).
        steps: The same fields clipped to each step's time, for every device; the row with step null is the time
            outside all steps, which has no start of its own. GPU work counts where it starts.
            window_ns + edge_idle_before_ns + edge_idle_after_ns = duration_ns.
    """

    devices: pl.DataFrame
    steps: pl.DataFrame


def gpu_time(trace: Trace, rules: Iterable[Rule] = ()) -> GpuTime:
    """Account for every nanosecond of every device.

    Args:
        trace: One process's trace.
        rules: Kernel rules of the user's, before the built-in table.
    """
    rules = tuple(rules)
    return _gpu_time(trace, rules) if rules else _without_rules(trace)


def _gpu_time(trace: Trace, rules: tuple[Rule, ...] = ()) -> GpuTime:
    work = gpu_work(trace, rules)[["device", "start_ns", "end_ns", "category", "kind"]]
    cut = tiles(trace)
    names = dict(zip(trace.devices["device"].to_list(), trace.devices["name"].to_list(), strict=True))
    in_time = np.append(np.argsort(trace.steps["start_ns"].to_numpy(), kind="stable"), -1)  # the last is outside
    moments = {name: [*trace.steps[name].to_list(), None] for name in ("step", "start_ns")}
    moments = {name: [values[row] for row in in_time.tolist()] for name, values in moments.items()}
    devices, steps = [DEVICE_SCHEMA.to_frame()], [STEP_SCHEMA.to_frame()]
    for part in work.sort("device", maintain_order=True).partition_by("device", maintain_order=True):
        device = part["device"][0]
        # The additive fields of one device in each tile, with the tile's duration
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        category = part["category"].to_physical().to_numpy()
        compute, communication, memory = (union(start[category == c], end[category == c]) for c in range(3))
        visible = merge(compute, communication)
        busy = merge(visible, memory)
        low, high = cut.spans
        first, last = int(start.min()), int(end.max())
        window = np.maximum(np.minimum(high, last) - np.maximum(low, first), 0)
        busy_ns, compute_ns, visible_ns = (coverage(spans, low, high) for spans in (busy, compute, visible))
        is_kernel = (part["kind"] == "kernel").to_numpy()
        tile = np.searchsorted(low, start, side="right") - 1  # a start on the last bound belongs to the last tile
        pieces = {
            "duration_ns": high - low,
            "window_ns": window,
            "busy_ns": busy_ns,
            "idle_ns": window - busy_ns,
            "compute_ns": compute_ns,
            "communication_ns": coverage(communication, low, high),
            "memory_ns": coverage(memory, low, high),
            "exposed_communication_ns": visible_ns - compute_ns,
            "exposed_memory_ns": busy_ns - visible_ns,
            "gpu_work_count": np.bincount(tile, minlength=low.size),
            "kernel_count": np.bincount(tile[is_kernel], minlength=low.size),
            "kernel_ns": summed_coverage(start[is_kernel], end[is_kernel], low, high),
            "edge_idle_before_ns": np.maximum(np.minimum(high, first) - low, 0),
            "edge_idle_after_ns": np.maximum(high - np.maximum(low, last), 0),
        }
        whole = {"device": device, "name": names.get(device), "start_ns": first}
        whole |= {name: int(pieces[name].sum()) for name in FIELDS}
        devices.append(pl.DataFrame([whole], schema=DEVICE_SCHEMA))
        by_step = np.zeros((in_time.size, len(pieces)), dtype=np.int64)
        np.add.at(by_step, cut.row, np.column_stack(list(pieces.values())))
        label = {"device": [device] * in_time.size, "name": [names.get(device)] * in_time.size}
        summed = dict(zip(pieces, by_step[in_time].T, strict=True))
        steps.append(pl.DataFrame({**label, **moments, **summed}, schema=STEP_SCHEMA))
    return GpuTime(pl.concat(devices), pl.concat(steps))


_without_rules = per_trace(_gpu_time)
