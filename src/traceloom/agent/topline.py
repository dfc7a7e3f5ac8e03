"""Device time, energy, FLOPs per job and tick; facts learned from a trace.

A device's time goes to the jobs that hold it: what it was busy by what each used, what it was idle in equal parts, as
each of them keeps it from others. In whole milliseconds they add up to the time of the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from traceloom.agent.accelerators.backend import Device
from traceloom.agent.flops import (
    MATRIX_TYPES,
    DeviceModel,
    FlopRate,
    MatrixTypes,
    Method,
    calibration,
    device_model,
    relative_peak,
)
from traceloom.agent.metrics import Reading, Series
from traceloom.agent.ownership.model import Share, split
from traceloom.agent.snapshot import Board

KEPT_S = 600.0  # counters of a job that has no process any more
NOBODY = ""  # job of processes that belong to none
LEAST_KNOWN: tuple[Method, ...] = ("declared", "trace", "ratio", "bounds")


class TracedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace of a job tells, per process and step. None: the trace does not say.

    `dtype_mix`: element type in the matrix units -> FLOPs; `roofline_ratio`: share of the roofline that was reached.
    """

    flops_per_step: float | None = None
    dtype_mix: dict[str, float] = {}
    roofline_ratio: float | None = None
    copied_bytes_per_step: float | None = None


class JobNow(msgspec.Struct, frozen=True, kw_only=True):
    """A job on this host at one tick.

    `processes`: their keys; `devices`: uuids that it holds, used or not; `steps`: those that its processes here ended
    since the last tick, added up; `steps_per_second`: likewise, of all processes together; None: it reports none.
    """

    job: str
    processes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    steps: int | None = None
    steps_per_second: float | None = None
    input_bytes_per_step: float | None = None  # of one process, as the job declares
    declared_types: MatrixTypes | None = None
    facts: TracedFacts = TracedFacts()

    @property
    def element_types(self) -> MatrixTypes | None:
        """What is known of the types in its matrix units: declared, else those of its trace."""
        return self.declared_types or (MatrixTypes(self.facts.dtype_mix, "trace") if self.facts.dtype_mix else None)


@dataclass(slots=True)
class JobTotals:
    """What a job has added up since the agent began. Times in ms; a reason is why a sum has a gap and is not told."""

    seen_s: float = 0.0
    busy_ms: int = 0
    idle_ms: int = 0
    unknown_ms: int = 0
    reference_ms: float = 0.0
    joules: float = 0.0
    input_bytes: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)  # metric -> reason


def element_types(jobs: Sequence[JobNow]) -> dict[str, list[MatrixTypes]]:
    """Device -> what is known of each job on it; of a device with a job of which nothing is known, nothing."""
    by_device: dict[str, list[MatrixTypes | None]] = defaultdict(list)
    for job in jobs:
        for device in job.devices:
            by_device[device].append(job.element_types)
    return {
        device: [types for types in of_jobs if types is not None]
        for device, of_jobs in by_device.items()
        if None not in of_jobs
    }


class TickValues(NamedTuple):
    """What one tick is added up from: series -> value, and how long it was, in whole milliseconds and as it was."""

    devices: Mapping[str, Device]
    values: Mapping[Series, float]
    ms: int
    seconds: float


class JobDeviceTime(NamedTuple):
    """What a job had of a device in one tick; `job` None: nobody holds the device. Of a device they add up to the tick.

    Times in ms; `unknown_ms` is what could not be read. `joules`, and the bounds of FLOPs: None where not known.
    """

    device: str
    job: str | None
    busy_ms: int
    idle_ms: int
    unknown_ms: int
    joules: float | None
    flops: tuple[float, float] | None  # low, high


class Topline:
    """Adds up jobs over ticks. `device_times` and `input_bytes` are of the last one.

    Args:
        reference: The device that reference-device seconds are counted in, as analyze/peaks.json names it.
    """

    def __init__(self, reference: str) -> None:
        self.reference: DeviceModel | None = device_model(reference)
        self.totals: dict[str, JobTotals] = {}
        self._seconds = 0.0
        self._ms = 0
        self.device_times: list[JobDeviceTime] = []
        self.input_bytes: dict[str, float] = {}  # job -> what it read in the last tick, where that is known
        self._joules: dict[str, float] = {}  # device -> its counter at the last tick

    def readings(
        self,
        board: Board,
        interval_s: float,
        shares: Mapping[tuple[str, str], Share],
        jobs: Sequence[JobNow],
    ) -> list[Reading]:
        """The metrics of all jobs.

        Args:
            board: With the devices and what was measured of them.
            interval_s: Since the last call.
            shares: (device, key of a process) -> its part; of a device they add up to 1.
            jobs: Those that are on this host now.
        """
        self._seconds += interval_s
        ms = round(self._seconds * 1000) - self._ms  # of all intervals, so that rounding does not add up
        self._ms += ms
        measured = TickValues(board.devices, {series: value for series, value, _ in board.values()}, ms, interval_s)
        parts = self._parts(board, shares, jobs)
        ticks: dict[str, JobTotals] = {job.job: JobTotals() for job in jobs}
        self.device_times = []
        for device in {**parts, **board.devices}:
            self._account(measured, device, parts.get(device, {}), ticks)
        self.input_bytes = {}
        out: list[Reading] = []
        for job in jobs:
            tick, total = ticks[job.job], self.totals.setdefault(job.job, JobTotals())
            total.seen_s = self._seconds
            total.busy_ms += tick.busy_ms
            total.idle_ms += tick.idle_ms
            total.unknown_ms += tick.unknown_ms
            total.reference_ms += tick.reference_ms
            total.joules += tick.joules
            total.gaps |= tick.gaps
            source, per_step = (
                ("declared", job.input_bytes_per_step)
                if job.input_bytes_per_step is not None
                else ("copies", job.facts.copied_bytes_per_step)
            )
            if per_step is not None and job.steps is not None:
                self.input_bytes[job.job] = per_step * job.steps
                total.input_bytes[source] = total.input_bytes.get(source, 0.0) + self.input_bytes[job.job]
            of_job = {device: part[job.job] for device, part in parts.items() if job.job in part}
            out += self._of_job(job, tick, of_job, measured.values)
        self.totals = {job: total for job, total in self.totals.items() if total.seen_s > self._seconds - KEPT_S}
        return out

    @staticmethod
    def _parts(
        board: Board, shares: Mapping[tuple[str, str], Share], jobs: Sequence[JobNow]
    ) -> dict[str, dict[str, float]]:
        """Device -> job that holds it -> its part of what the device does."""
        job_of = {process: job.job for job in jobs for process in job.processes}
        parts: dict[str, dict[str, float]] = defaultdict(dict)
        for (device, process), share in shares.items():
            job = job_of.get(process, NOBODY)
            parts[device][job] = parts[device].get(job, 0.0) + share.part
        for job_now in jobs:
            for device in job_now.devices:
                if device in board.devices or device in parts:
                    parts[device].setdefault(job_now.job, 0.0)
        for of_device in parts.values():
            if not any(of_device.values()):  # it is held, and nobody is on it
                of_device.update(dict.fromkeys(of_device, 1.0 / len(of_device)))
        return parts

    def _account(
        self, measured: TickValues, uuid: str, parts: Mapping[str, float], ticks: Mapping[str, JobTotals]
    ) -> None:
        """Give a device's time and energy of this tick to its jobs."""
        device, values, ms = measured.devices.get(uuid), measured.values, measured.ms
        busy = values.get(("gpu_busy_ratio", (uuid,)), values.get(("gpu_graphics_active_ratio", (uuid,))))
        busy_ms = None if busy is None else round(min(max(busy, 0.0), 1.0) * ms)
        jobs: list[str | None] = [*parts] or [None]
        of_jobs = list(parts.values()) or [1.0]
        equal = [1.0] * len(jobs)
        by_use = split(busy_ms or 0, of_jobs)
        idle = split(0 if busy_ms is None else ms - busy_ms, equal)
        unknown = split(ms if busy_ms is None else 0, equal)
        model = None if device is None else device_model(device.model)
        weight = relative_peak(model, self.reference)
        if weight is not None and device is not None and device.parent:
            whole = model.multiprocessors if model else None
            weight = weight * device.multiprocessors / whole if whole and device.multiprocessors else None
        counter = values.get(("gpu_energy_joules_total", (uuid,)))
        before = self._joules.get(uuid)
        power = values.get(("gpu_power_watts", (uuid,)))
        joules = None if power is None else power * measured.seconds
        if counter is not None:
            self._joules[uuid] = counter
            if before is not None and counter >= before:
                joules = counter - before
            elif joules is None:  # the first tick, or the driver was loaded anew: it counts from here on
                joules = 0.0
        rate = job_flops({uuid: 1.0}, values)
        for job, part, busy_part, idle_part, unknown_part in zip(jobs, of_jobs, by_use, idle, unknown, strict=True):
            flops = None if rate is None else (rate.low * part * measured.seconds, rate.high * part * measured.seconds)
            spent = None if joules is None else joules * part
            self.device_times.append(JobDeviceTime(uuid, job, busy_part, idle_part, unknown_part, spent, flops))
            if job is None or job not in ticks:
                continue
            tick = ticks[job]
            tick.busy_ms += busy_part
            tick.idle_ms += idle_part
            tick.unknown_ms += unknown_part
            if weight is not None:
                tick.reference_ms += busy_part * weight
            elif busy_part:
                tick.gaps["job_reference_device_seconds_total"] = f"the peak of {uuid} or of the reference is not known"
            if spent is not None:
                tick.joules += spent
            elif not unknown_part:
                tick.gaps["job_energy_joules_total"] = f"the energy of {uuid} is not known"

    def _of_job(
        self, job: JobNow, tick: JobTotals, parts: Mapping[str, float], values: Mapping[Series, float]
    ) -> list[Reading]:
        total, name = self.totals[job.job], (job.job,)
        out = [Reading("job_devices", name, sum(parts.values()))] if parts else []
        states = (("busy", total.busy_ms), ("idle", total.idle_ms), ("unknown", total.unknown_ms))
        ever = any(spent for _, spent in states)  # it held devices at some time
        out += [Reading("job_device_seconds_total", (*name, state), spent / 1000) for state, spent in states if ever]
        for metric, amount in (
            ("job_reference_device_seconds_total", total.reference_ms / 1000),
            ("job_energy_joules_total", total.joules),
        ):
            if ever and metric not in total.gaps:
                out.append(Reading(metric, name, amount))
        held_ms = tick.busy_ms + tick.idle_ms
        if held_ms:
            out.append(Reading("job_device_busy_ratio", name, tick.busy_ms / held_ms))
        for metric, of_device in (
            ("job_sm_active_ratio", "gpu_sm_active_ratio"),
            ("job_flop_utilization_ratio", "gpu_flop_utilization_ratio"),
        ):
            ratios = [values[of_device, (device,)] for device in parts if (of_device, (device,)) in values]
            if ratios and len(ratios) == len(parts):
                out.append(Reading(metric, name, sum(ratios) / len(ratios)))
        power = [(values.get(("gpu_power_watts", (device,))), part) for device, part in parts.items()]
        if power and all(watts is not None for watts, _ in power):
            out.append(
                Reading("job_power_watts", name, sum(watts * part for watts, part in power if watts is not None))
            )
        rate = job_flops(parts, values)
        if rate is not None:
            bounds: tuple[tuple[Literal["low", "high"], float], ...] = (("low", rate.low), ("high", rate.high))
            out += [Reading("job_flops", (*name, rate.method, bound), flops) for bound, flops in bounds]
            if job.facts.flops_per_step is not None and job.steps_per_second is not None:
                error = calibration(rate, job.facts.flops_per_step, job.steps_per_second)
                if error is not None:
                    out.append(Reading("job_flops_error_ratio", name, error))
        if job.facts.roofline_ratio is not None:
            out.append(Reading("job_roofline_ratio", name, job.facts.roofline_ratio))
        out += [
            Reading("job_input_bytes_total", (*name, source), amount) for source, amount in total.input_bytes.items()
        ]
        return out


def job_flops(parts: Mapping[str, float], values: Mapping[tuple[str, tuple[str, ...]], float]) -> FlopRate | None:
    """FLOP/s of a job over its devices, known as well as the least known of them; None where any is not known."""
    low, high, method = 0.0, 0.0, LEAST_KNOWN[0]
    for device, part in parts.items():
        of_device = next((name for name in LEAST_KNOWN if ("gpu_flops", (device, name, "low")) in values), None)
        if of_device is None:
            return None
        low += part * values["gpu_flops", (device, of_device, "low")]
        high += part * values["gpu_flops", (device, of_device, "high")]
        method = max(method, of_device, key=LEAST_KNOWN.index)
    return FlopRate(low, high, method) if parts else None


LEAST_MODELLED = 0.9  # share of the time of compute kernels whose FLOPs are counted, for them to be a reference


def of_capture(path: str) -> dict[str, Any]:
    """The fields of `JobFacts` from a capture or a trace: means over its processes and their whole steps.

    Raises:
        TraceloomError: It cannot be read.
    """
    import polars as pl

    from traceloom.analyze import copies, roofline
    from traceloom.analyze.kernel_rules import gpu_work
    from traceloom.formats import load

    session = load(path)
    work = roofline(session)
    spread = {
        quantity: mean
        for quantity, mean in work.spread.group_by("quantity").agg(pl.col("mean").mean()).iter_rows()
        if mean is not None
    }
    whole = work.whole["roofline_fraction"].mean() if work.whole.height else None
    matrix = work.operators.filter(pl.col("matrix") & pl.col("arithmetic").cast(pl.String).is_in(MATRIX_TYPES))
    mix = matrix.group_by(pl.col("arithmetic").cast(pl.String)).agg(pl.col("flops").sum()).rows()
    copied = []
    compute_ns = 0
    for trace in session.traces:
        compute = gpu_work(trace).filter(pl.col("category").cast(pl.String) == "compute")
        compute_ns += int((compute["end_ns"] - compute["start_ns"]).sum())
        to_device = copies(trace).per_step.filter(pl.col("kind").cast(pl.String) == "HtoD")["mean_copied_bytes"]
        if to_device.len() and not to_device.null_count():
            copied.append(float(to_device.sum()))
    is_counted = (work.whole["modelled_ns"].sum() or 0) >= LEAST_MODELLED * compute_ns  # without a device: all of it
    facts = TracedFacts(
        flops_per_step=spread.get("flops") if is_counted else None,
        dtype_mix={kind: float(flops) for kind, flops in mix if flops},
        roofline_ratio=spread.get("roofline_fraction", whole),
        copied_bytes_per_step=sum(copied) / len(copied) if copied and len(copied) == len(session.traces) else None,
    )
    fields: dict[str, Any] = msgspec.to_builtins(facts)
    return fields
