"""Which time of the devices a report speaks of: one window for its sentence, its tiles, its bars and idle causes."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.analyze.breakdown import GpuTime
from traceloom.analyze.idle import Idle
from traceloom.model import Trace
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

PARTS = ("compute_ns", "exposed_communication_ns", "exposed_memory_ns", "idle_ns")
"""The parts of a device's time, which add up to `window_ns`."""

DEVICE_SCHEMA = schema("device name window_ns", *PARTS, "communication_ns edge_idle_ns")


@dataclass(frozen=True)
class DeviceAccount(Result):
    """The time of a trace's devices: in its steps, or without steps from the first to the last GPU work of each.

    Attributes:
        window: `steps` or `gpu_work`: what the times are of.
        devices: One row per device with GPU work: device, name, window_ns (in steps: the duration of all of them),
            compute_ns, exposed_communication_ns, exposed_memory_ns, idle_ns (which add up to it), communication_ns
            (hidden or not), edge_idle_ns (of idle_ns: before the first and after the last GPU work of the trace).
        idle: device, cause, idle_ns, gap_count; the largest first. With edge_idle_ns it adds up to idle_ns.
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


def device_account(trace: Trace, gpu: GpuTime, idle: Idle) -> DeviceAccount:
    """The time of the devices in the steps of a trace; of all their GPU work where no step holds any time."""
    if not has_step_time(trace):
        devices = gpu.devices.with_columns(edge_idle_ns=0)
        return DeviceAccount("gpu_work", devices.pipe(as_declared, DEVICE_SCHEMA), idle.totals)
    in_steps = pl.col("step").is_not_null()
    edges = pl.col("edge_idle_before_ns") + pl.col("edge_idle_after_ns")
    devices = (
        gpu.steps.filter(in_steps)
        .with_columns(edges.alias("edge_idle_ns"), pl.col("window_ns") + edges, pl.col("idle_ns") + edges)
        .group_by("device", maintain_order=True)
        .agg(pl.col("name").first(), pl.col(list(DEVICE_SCHEMA)[2:]).sum())
    )
    causes = (
        idle.gaps.lazy()
        .filter(in_steps)
        .group_by("device", "cause")
        .agg(idle_ns=pl.col("duration_ns").sum(), gap_count=pl.col("gap").n_unique().cast(pl.Int64))
        .sort("device", "idle_ns", "cause", descending=[False, True, False])
        .collect()
    )
    return DeviceAccount("steps", devices.pipe(as_declared, DEVICE_SCHEMA), causes)
