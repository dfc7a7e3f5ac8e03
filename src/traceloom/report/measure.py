"""Every analysis run once per rank, cut to the chosen steps where asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from traceloom import analyze
from traceloom.analyze.answer import Facts
from traceloom.analyze.breakdown import FIELDS
from traceloom.model import Notice, Trace
from traceloom.model.frames import as_declared
from traceloom.read.freeing import give_back
from traceloom.report.window import cut

if TYPE_CHECKING:
    from traceloom.analyze.breakdown import GpuTime
    from traceloom.analyze.communication import Communication
    from traceloom.analyze.data_loading import DataLoading
    from traceloom.analyze.host import HostTime
    from traceloom.analyze.idle import Idle
    from traceloom.analyze.kernels import Kernels
    from traceloom.analyze.memory import Memory
    from traceloom.analyze.modules import Modules
    from traceloom.analyze.operators import Operators
    from traceloom.analyze.steps import StepTimes


T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """What the analyses say about one trace (and, with chosen steps, about these alone)."""

    trace: Trace
    gpu: GpuTime
    idle: Idle
    host: HostTime
    step_times: StepTimes
    data_loading: DataLoading
    kernels: Kernels
    operators: Operators
    modules: Modules
    communication: Communication
    memory: Memory
    notices: tuple[Notice, ...]

    @cached_property
    def facts(self) -> Facts:
        """What the answer is drawn from."""
        return Facts(self.trace, self.gpu, self.idle, self.host, self.operators, self.data_loading)


def measure(trace: Trace, steps: tuple[int, int] | None, *, by_shape: bool) -> Measured:
    """Run the analyses of a report on one trace.

    With `steps`, the time of devices and host threads is measured on the whole trace and kept for these steps, so
    that a step has the same figures in every report; everything else is measured on the work these steps launched.
    """
    give_back()  # of what reading freed
    part = trace if steps is None else cut(trace, steps)
    measured = Measured(
        trace=part,
        gpu=analyze.gpu_time(trace),
        idle=_freed(analyze.idle(trace)),
        host=_freed(analyze.host(trace)),
        step_times=analyze.step_times(part),
        data_loading=analyze.data_loading(part),
        kernels=analyze.kernels(part),
        operators=_freed(analyze.operators(part, by_shape=by_shape)),
        modules=_freed(analyze.modules(part)),
        communication=analyze.communication(part),
        memory=analyze.memory(part),
        notices=analyze.quality(trace).notices,
    )
    return measured if steps is None else _of_steps(measured, steps)


def _freed(result: T) -> T:
    """The result; what was freed on the way to it goes back to the system before the next analysis takes more."""
    give_back()
    return result


def _of_steps(measured: Measured, steps: tuple[int, int]) -> Measured:
    """Keep these steps of what is told per step; a device or a thread is the sum of its steps."""
    chosen = pl.col("step").is_between(*steps)
    gpu, idle = measured.gpu, measured.idle
    gpu_steps = gpu.steps.filter(chosen)
    devices: pl.DataFrame = gpu_steps.group_by("device", maintain_order=True).agg(
        pl.col("name").first(), pl.col("start_ns").min(), pl.col(*FIELDS).sum()
    )
    devices = devices.pipe(as_declared, gpu.devices.schema)
    causes = idle.causes.filter(chosen)
    totals = causes.group_by("device", "cause", maintain_order=True).agg(pl.col("idle_ns", "gap_count").sum())
    totals = totals.pipe(as_declared, idle.totals.schema)
    account = measured.host.account.filter(chosen)
    threads = measured.host.threads
    observed = pl.col("ns").filter(pl.col("activity").cast(pl.String) != "unobserved")
    times = account.group_by("lane").agg(window_ns=pl.col("ns").sum(), busy_ns=observed.sum())
    counts = measured.trace.events.group_by("lane").agg(event_count=pl.len())
    of_steps = (
        threads.drop("window_ns", "busy_ns", "event_count")
        .join(times, on="lane", how="inner", maintain_order="left")
        .join(counts, on="lane", how="inner", maintain_order="left")
        .pipe(as_declared, threads.schema)
    )
    return replace(
        measured,
        gpu=replace(gpu, steps=gpu_steps, devices=devices),
        idle=replace(idle, gaps=idle.gaps.filter(chosen), causes=causes, totals=totals),
        host=replace(measured.host, account=account, threads=of_steps),
    )
