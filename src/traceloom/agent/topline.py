"""Device time, energy and FLOPs per job and tick, with bounds from pipe activity and the data sheet.

And facts read from a job's trace.

The peaks are those of `traceloom.analyze`, read as a file: that package imports NumPy, which the
agent's loop does not load.

F = N_SM x f_SM(measured) x sum over pipes(activity x FLOP per clock per SM)

The counter of the matrix pipe does not distinguish TF32 from BF16 or FP8, which differ by a factor
of up to eight: the width of the interval depends on what is known of the element type. Integer
operations are no FLOP and are reported separately.

A device's time is divided among the jobs that hold it: its busy time in proportion to their use,
its idle time equally, as each of them keeps it from others. In whole milliseconds they add up to
the time of the device.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from traceloom.agent.accelerators.backend import Device
from traceloom.agent.metrics import Reading, SeriesKey
from traceloom.agent.ownership.model import Share, split_by_weights
from traceloom.agent.snapshot import Snapshot

PEAKS_FILE = Path(__file__).parents[1] / "analyze" / "peaks.json"
FLOP_PER_CLOCK_FILE = Path(__file__).with_name("flop_per_clock.json")
_COMPARED_TYPES = ("bf16", "fp16", "fp32")  # devices are compared by the first that both have


class DeviceModel(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a data sheet.

    FLOP/s by element type, dense; clocks in Hz; None or "": unknown.
    """

    name: str
    flops: dict[str, float]
    multiprocessors: int | None
    architecture: str
    highest_clock_hz: float | None
    matrix_clock_hz: float | None  # at which the peaks of the matrix units are stated


@cache
def load_flop_per_clock() -> dict[str, dict[str, int]]:
    """Returns architecture -> unit (`fp32`, `bf16_matrix`) -> FLOP per clock of one
    multiprocessor.
    """
    tables: dict[str, dict[str, int]] = json.loads(FLOP_PER_CLOCK_FILE.read_text(encoding="utf-8"))[
        "architectures"
    ]
    return tables


@cache
def _load_models() -> dict[str, DeviceModel]:
    clocks = json.loads(FLOP_PER_CLOCK_FILE.read_text(encoding="utf-8"))["models"]
    models: dict[str, DeviceModel] = {}
    for entry in json.loads(PEAKS_FILE.read_text(encoding="utf-8"))["devices"]:
        clock = clocks.get(entry["name"], {})
        model = DeviceModel(
            name=entry["name"],
            flops=entry["flops"],
            multiprocessors=entry["multiprocessors"],
            architecture=clock.get("architecture", ""),
            highest_clock_hz=clock["vector_mhz"] * 1e6 if clock else None,
            matrix_clock_hz=clock["matrix_mhz"] * 1e6 if clock else None,
        )
        models |= {_normalise_name(name): model for name in (entry["name"], *entry["aliases"])}
    return models


def _normalise_name(name: str) -> str:
    return re.sub(r"\s+", " ", name).strip().lower()


def find_device_model(name: str) -> DeviceModel | None:
    """Returns the data sheet of a device by its whole name; case and spaces are ignored."""
    return _load_models().get(_normalise_name(name))


def compute_relative_peak(model: DeviceModel | None, reference: DeviceModel | None) -> float | None:
    """Returns the ratio of two devices' peaks; None if either is unknown.

    Compares the rate of BF16, else FP16, else FP32: the first that both data sheets have.
    """
    if model is None or reference is None:
        return None
    return next(
        (
            model.flops[kind] / reference.flops[kind]
            for kind in _COMPARED_TYPES
            if {kind} <= model.flops.keys() & reference.flops
        ),
        None,
    )


Method = Literal["declared", "trace", "ratio", "bounds"]
Values = Mapping[tuple[str, tuple[str, ...]], float]  # (metric, labels after the device) -> value
PIPE_METRIC = "gpu_pipe_active_ratio"
VECTOR_TYPES = ("fp64", "fp32", "fp16")
MATRIX_TYPES = ("tf32", "bf16", "fp16", "fp8", "fp4")  # computed by the 16-bit pipe (HMMA)
# Ratio of FP16 to FP32 pipe activity above which the matrices have at most 16 bits.
HALF_TO_SINGLE = 1.0
MIN_ACTIVITY = 1e-3  # of the FP16 pipe, for the ratio to be significant

# Names of element types as jobs and frameworks write them.
TYPE_SPELLINGS = {
    "tf32": "tf32",
    "fp32": "tf32",
    "float32": "tf32",
    "float": "tf32",  # matrix units have no FP32
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp8": "fp8",
    "float8": "fp8",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "mxfp8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "fp4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "float4_e2m1fn_x2": "fp4",
}


class MatrixTypes(msgspec.Struct, frozen=True):
    """Element types in a job's matrix units: type -> share of the FLOPs there, and the source."""

    shares: dict[str, float]
    method: Literal["declared", "trace"]


class FlopRate(NamedTuple):
    """Lower and upper bound of a device's FLOP/s, and how the type in its matrix units is known."""

    low: float
    high: float
    method: Method


def parse_declared_types(text: str) -> MatrixTypes | None:
    """Parses a job's declaration (`TRACELOOM_DTYPE=bf16`); None if it is not a type of matrix
    units.
    """
    kind = TYPE_SPELLINGS.get(text.strip().lower().removeprefix("torch."))
    return None if kind is None else MatrixTypes({kind: 1.0}, "declared")


def _compute_matrix_rates(
    per_clock: Mapping[str, int], values: Values, types: Iterable[MatrixTypes]
) -> FlopRate | None:
    """Returns FLOP per clock of a multiprocessor whose 16-bit matrix pipe is always active; None if
    the architecture has none.

    A mix is by FLOPs, and a pipe spends its time by FLOPs over rate: the rate of the mix is the
    harmonic mean.
    """
    rates = {
        kind: per_clock[f"{kind}_matrix"] for kind in MATRIX_TYPES if f"{kind}_matrix" in per_clock
    }
    if not rates:
        return None
    # With several jobs on one device it is unknown which one is active: the rate is between theirs.
    job_rates = [
        (
            sum(mix.shares.values())
            / sum(share / rates[kind] for kind, share in mix.shares.items()),
            mix.method,
        )
        for mix in types
        if mix.shares and mix.shares.keys() <= rates.keys()
    ]
    if job_rates:
        methods = {method for _, method in job_rates}
        values_of_jobs = [rate for rate, _ in job_rates]
        return FlopRate(
            min(values_of_jobs),
            max(values_of_jobs),
            "declared" if methods == {"declared"} else "trace",
        )
    half, single = values.get((PIPE_METRIC, ("fp16",))), values.get((PIPE_METRIC, ("fp32",)))
    is_half = (
        half is not None
        and single is not None
        and half >= max(HALF_TO_SINGLE * single, MIN_ACTIVITY)
    )
    if is_half and "fp16" in rates:
        return FlopRate(rates["fp16"], max(rates.values()), "ratio")
    # FP32 pipe activity does not help: it has the vector work of TF32 and BF16 jobs, and the sums
    # of FP8 products.
    return FlopRate(min(rates.values()), max(rates.values()), "bounds")


def estimate_flops(
    device: Device, values: Values, types: Iterable[MatrixTypes] = ()
) -> tuple[list[Reading], dict[str, str]]:
    """Returns `gpu_flops`, `gpu_integer_ops` and `gpu_flop_utilization_ratio` of a device, and why
    any of them is missing.

    If only the activity of all matrix units together is known (exporters on A100), all of it counts
    as the 16-bit pipe's. An unknown vector pipe is idle for the lower bound, and as active as the
    multiprocessors for the upper one.

    Args:
        device: Has its multiprocessors and architecture.
        values: Its readings; for a partition, with the clock of its device.
        types: Element types of each job on it.
    """
    per_clock = load_flop_per_clock().get(device.architecture)
    clock = values.get(("gpu_clock_hertz", ("sm",)))
    tensor, hmma = values.get((PIPE_METRIC, ("tensor",))), values.get((PIPE_METRIC, ("hmma",)))
    readings: list[Reading] = []
    missing: dict[str, str] = {}
    name = (device.uuid,)
    if clock is None:
        return [], dict.fromkeys(
            ("gpu_flops", "gpu_flop_utilization_ratio"), "the clock is not known"
        )
    if tensor is not None and device.highest_clock_hz:
        readings.append(
            Reading("gpu_flop_utilization_ratio", name, tensor * clock / device.highest_clock_hz)
        )
    else:
        missing["gpu_flop_utilization_ratio"] = (
            "the activity of the matrix units, or the highest clock, is not known"
        )
    active = tensor if hmma is None else hmma
    rate = None if per_clock is None else _compute_matrix_rates(per_clock, values, types)
    if active is None:
        missing["gpu_flops"] = "the activity of the pipes is not known"
    elif per_clock is None or rate is None or device.multiprocessors is None:
        missing["gpu_flops"] = f"FLOP per clock of {device.model or 'this device'} are not known"
    else:
        cycles = device.multiprocessors * clock
        low = active * rate.low
        high = active * rate.high
        at_most = values.get(
            ("gpu_sm_active_ratio", ()), values.get(("gpu_graphics_active_ratio", ()), 1.0)
        )
        # The split among unknown vector pipes is unknown: all count with the rate of the fastest.
        unknown = [kind for kind in VECTOR_TYPES if (PIPE_METRIC, (kind,)) not in values]
        high += at_most * max((per_clock.get(kind, 0) for kind in unknown), default=0)
        for kind in VECTOR_TYPES:
            vector = values.get((PIPE_METRIC, (kind,)), 0.0) * per_clock.get(kind, 0)
            low, high = low + vector, high + vector
        for pipe in ("dmma", "dfma"):
            double = values.get((PIPE_METRIC, (pipe,)), 0.0) * per_clock.get("fp64_matrix", 0)
            low, high = low + double, high + double
        readings += [
            Reading("gpu_flops", (*name, rate.method, "low"), low * cycles),
            Reading("gpu_flops", (*name, rate.method, "high"), high * cycles),
        ]
        integer = values.get((PIPE_METRIC, ("imma",)))
        if integer is not None and "int8_matrix" in per_clock:
            readings.append(
                Reading("gpu_integer_ops", name, integer * per_clock["int8_matrix"] * cycles)
            )
    return readings, missing


def compute_estimate_error(
    estimated: FlopRate, flops_per_step: float, steps_per_second: float
) -> float | None:
    """Returns the relative error of the estimate against the FLOPs counted in a trace: 0 within the
    bounds, else from the nearer one.

    (estimate - counted) / counted; None if no steps are made.
    """
    counted = flops_per_step * steps_per_second
    if counted <= 0:
        return None
    return (min(max(counted, estimated.low), estimated.high) - counted) / counted


JOB_RETENTION_S = 600.0  # of counters of a job without processes
NO_JOB = ""  # job of processes without one
METHODS_MOST_CERTAIN_FIRST: tuple[Method, ...] = ("declared", "trace", "ratio", "bounds")


class TracedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts from a trace of a job, per process and step. None: not in the trace.

    `dtype_mix`: element type in the matrix units -> FLOPs; `roofline_ratio`: achieved share of the
    roofline.
    """

    flops_per_step: float | None = None
    dtype_mix: dict[str, float] = {}
    roofline_ratio: float | None = None
    copied_bytes_per_step: float | None = None


class JobTick(msgspec.Struct, frozen=True, kw_only=True):
    """A job on this host at one tick.

    `processes`: their keys; `devices`: uuids that it holds, used or not; `steps`: steps of its
    processes here since the last tick, summed; `steps_per_second`: the sum over its processes;
    None: it reports none.
    """

    job: str
    processes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    steps: int | None = None
    steps_per_second: float | None = None
    input_bytes_per_step: float | None = None  # per process, as the job declares
    declared_types: MatrixTypes | None = None
    facts: TracedFacts = TracedFacts()

    @property
    def element_types(self) -> MatrixTypes | None:
        """Returns the known types in its matrix units: declared, else those of its trace."""
        return self.declared_types or (
            MatrixTypes(self.facts.dtype_mix, "trace") if self.facts.dtype_mix else None
        )


@dataclass(slots=True)
class JobTotals:
    """Sums of a job since the agent started.

    Times in ms; a reason explains why a sum has a gap and is not reported.
    """

    seen_s: float = 0.0
    busy_ms: int = 0
    idle_ms: int = 0
    unknown_ms: int = 0
    reference_ms: float = 0.0
    joules: float = 0.0
    input_bytes: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)  # metric -> reason


def collect_matrix_types(jobs: Sequence[JobTick]) -> dict[str, list[MatrixTypes]]:
    """Returns device -> types of each job on it; without devices that have a job of unknown
    types.
    """
    types_by_device: dict[str, list[MatrixTypes | None]] = defaultdict(list)
    for job in jobs:
        for device in job.devices:
            types_by_device[device].append(job.element_types)
    return {
        device: [types for types in job_types if types is not None]
        for device, job_types in types_by_device.items()
        if None not in job_types
    }


class TickMeasurements(NamedTuple):
    """Input of one tick: series -> value, and its length, in whole milliseconds and exact."""

    devices: Mapping[str, Device]
    values: Mapping[SeriesKey, float]
    ms: int
    seconds: float


class JobDeviceTime(NamedTuple):
    """A job's time on a device in one tick; `job` None: the device is free. Those of a device add
    up to the tick.

    Times in ms; `unknown_ms` could not be measured. `joules`, and the bounds of FLOPs: None if
    unknown.
    """

    device: str
    job: str | None
    busy_ms: int
    idle_ms: int
    unknown_ms: int
    joules: float | None
    flops: tuple[float, float] | None  # low, high


class JobAccounting:
    """Sums up jobs over ticks. `device_times` and `input_bytes` are those of the last one.

    Args:
        reference: The device that defines reference-device seconds, by its name in
            analyze/peaks.json.
    """

    def __init__(self, reference: str) -> None:
        self.reference: DeviceModel | None = find_device_model(reference)
        self.totals: dict[str, JobTotals] = {}
        self._elapsed_s = 0.0
        self._elapsed_ms = 0
        self.device_times: list[JobDeviceTime] = []
        # job -> bytes that it read in the last tick, if known.
        self.input_bytes: dict[str, float] = {}
        self._last_joules: dict[str, float] = {}  # device -> its counter at the last tick

    def readings(
        self,
        snapshot: Snapshot,
        interval_s: float,
        shares: Mapping[tuple[str, str], Share],
        jobs: Sequence[JobTick],
    ) -> list[Reading]:
        """Returns the metrics of all jobs.

        Args:
            snapshot: Has the devices and their values.
            interval_s: Since the last call.
            shares: (device, key of a process) -> its share; those of a device add up to 1.
            jobs: The jobs on this host now.
        """
        self._elapsed_s += interval_s
        # Round the sum of intervals, so that rounding errors do not accumulate.
        ms = round(self._elapsed_s * 1000) - self._elapsed_ms
        self._elapsed_ms += ms
        measured = TickMeasurements(
            snapshot.devices,
            {series: value for series, value, _ in snapshot.values()},
            ms,
            interval_s,
        )
        shares_by_device = self._compute_job_shares(snapshot, shares, jobs)
        ticks: dict[str, JobTotals] = {job.job: JobTotals() for job in jobs}
        self.device_times = []
        for device in {**shares_by_device, **snapshot.devices}:
            self._charge_device(measured, device, shares_by_device.get(device, {}), ticks)
        self.input_bytes = {}
        readings: list[Reading] = []
        for job in jobs:
            tick, total = ticks[job.job], self.totals.setdefault(job.job, JobTotals())
            total.seen_s = self._elapsed_s
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
                total.input_bytes[source] = (
                    total.input_bytes.get(source, 0.0) + self.input_bytes[job.job]
                )
            job_shares = {
                device: part[job.job]
                for device, part in shares_by_device.items()
                if job.job in part
            }
            readings += self._build_job_readings(job, tick, job_shares, measured.values)
        self.totals = {
            job: total
            for job, total in self.totals.items()
            if total.seen_s > self._elapsed_s - JOB_RETENTION_S
        }
        return readings

    @staticmethod
    def _compute_job_shares(
        snapshot: Snapshot, shares: Mapping[tuple[str, str], Share], jobs: Sequence[JobTick]
    ) -> dict[str, dict[str, float]]:
        job_by_process = {process: job.job for job in jobs for process in job.processes}
        shares_by_device: dict[str, dict[str, float]] = defaultdict(dict)
        for (device, process), share in shares.items():
            job = job_by_process.get(process, NO_JOB)
            shares_by_device[device][job] = shares_by_device[device].get(job, 0.0) + share.part
        for job_now in jobs:
            for device in job_now.devices:
                if device in snapshot.devices or device in shares_by_device:
                    shares_by_device[device].setdefault(job_now.job, 0.0)
        for device_shares in shares_by_device.values():
            if not any(device_shares.values()):  # it is held, and no process uses it
                device_shares.update(dict.fromkeys(device_shares, 1.0 / len(device_shares)))
        return shares_by_device

    def _charge_device(
        self,
        measured: TickMeasurements,
        uuid: str,
        job_shares: Mapping[str, float],
        ticks: Mapping[str, JobTotals],
    ) -> None:
        device, values, ms = measured.devices.get(uuid), measured.values, measured.ms
        busy = values.get(
            ("gpu_busy_ratio", (uuid,)), values.get(("gpu_graphics_active_ratio", (uuid,)))
        )
        busy_ms = None if busy is None else round(min(max(busy, 0.0), 1.0) * ms)
        jobs: list[str | None] = [*job_shares] or [None]
        weights = list(job_shares.values()) or [1.0]
        equal_weights = [1.0] * len(jobs)
        busy_by_job = split_by_weights(busy_ms or 0, weights)
        idle_by_job = split_by_weights(0 if busy_ms is None else ms - busy_ms, equal_weights)
        unknown_by_job = split_by_weights(ms if busy_ms is None else 0, equal_weights)
        model = None if device is None else find_device_model(device.model)
        relative_peak = compute_relative_peak(model, self.reference)
        if relative_peak is not None and device is not None and device.parent:
            parent_multiprocessors = model.multiprocessors if model else None
            relative_peak = (
                relative_peak * device.multiprocessors / parent_multiprocessors
                if parent_multiprocessors and device.multiprocessors
                else None
            )
        counter = values.get(("gpu_energy_joules_total", (uuid,)))
        previous_counter = self._last_joules.get(uuid)
        power = values.get(("gpu_power_watts", (uuid,)))
        joules = None if power is None else power * measured.seconds
        if counter is not None:
            self._last_joules[uuid] = counter
            if previous_counter is not None and counter >= previous_counter:
                joules = counter - previous_counter
            elif joules is None:  # the first tick, or the driver was reloaded: count from here on
                joules = 0.0
        rate = combine_flop_rates({uuid: 1.0}, values)
        for job, share, busy_part, idle_part, unknown_part in zip(
            jobs, weights, busy_by_job, idle_by_job, unknown_by_job, strict=True
        ):
            flops = (
                None
                if rate is None
                else (rate.low * share * measured.seconds, rate.high * share * measured.seconds)
            )
            job_joules = None if joules is None else joules * share
            self.device_times.append(
                JobDeviceTime(uuid, job, busy_part, idle_part, unknown_part, job_joules, flops)
            )
            if job is None or job not in ticks:
                continue
            tick = ticks[job]
            tick.busy_ms += busy_part
            tick.idle_ms += idle_part
            tick.unknown_ms += unknown_part
            if relative_peak is not None:
                tick.reference_ms += busy_part * relative_peak
            elif busy_part:
                tick.gaps["job_reference_device_seconds_total"] = (
                    f"the peak of {uuid} or of the reference is not known"
                )
            if job_joules is not None:
                tick.joules += job_joules
            elif not unknown_part:
                tick.gaps["job_energy_joules_total"] = f"the energy of {uuid} is not known"

    def _build_job_readings(
        self,
        job: JobTick,
        tick: JobTotals,
        device_shares: Mapping[str, float],
        values: Mapping[SeriesKey, float],
    ) -> list[Reading]:
        total, job_label = self.totals[job.job], (job.job,)
        readings = (
            [Reading("job_devices", job_label, sum(device_shares.values()))]
            if device_shares
            else []
        )
        states = (("busy", total.busy_ms), ("idle", total.idle_ms), ("unknown", total.unknown_ms))
        has_held_devices = any(spent for _, spent in states)  # at any time
        readings += [
            Reading("job_device_seconds_total", (*job_label, state), spent / 1000)
            for state, spent in states
            if has_held_devices
        ]
        for metric, amount in (
            ("job_reference_device_seconds_total", total.reference_ms / 1000),
            ("job_energy_joules_total", total.joules),
        ):
            if has_held_devices and metric not in total.gaps:
                readings.append(Reading(metric, job_label, amount))
        held_ms = tick.busy_ms + tick.idle_ms
        if held_ms:
            readings.append(Reading("job_device_busy_ratio", job_label, tick.busy_ms / held_ms))
        for metric, device_metric in (
            ("job_sm_active_ratio", "gpu_sm_active_ratio"),
            ("job_flop_utilization_ratio", "gpu_flop_utilization_ratio"),
        ):
            ratios = [
                values[device_metric, (device,)]
                for device in device_shares
                if (device_metric, (device,)) in values
            ]
            if ratios and len(ratios) == len(device_shares):
                readings.append(Reading(metric, job_label, sum(ratios) / len(ratios)))
        power = [
            (values.get(("gpu_power_watts", (device,))), part)
            for device, part in device_shares.items()
        ]
        if power and all(watts is not None for watts, _ in power):
            readings.append(
                Reading(
                    "job_power_watts",
                    job_label,
                    sum(watts * part for watts, part in power if watts is not None),
                )
            )
        rate = combine_flop_rates(device_shares, values)
        if rate is not None:
            bounds: tuple[tuple[Literal["low", "high"], float], ...] = (
                ("low", rate.low),
                ("high", rate.high),
            )
            readings += [
                Reading("job_flops", (*job_label, rate.method, bound), flops)
                for bound, flops in bounds
            ]
            if job.facts.flops_per_step is not None and job.steps_per_second is not None:
                error = compute_estimate_error(rate, job.facts.flops_per_step, job.steps_per_second)
                if error is not None:
                    readings.append(Reading("job_flops_error_ratio", job_label, error))
        if job.facts.roofline_ratio is not None:
            readings.append(Reading("job_roofline_ratio", job_label, job.facts.roofline_ratio))
        readings += [
            Reading("job_input_bytes_total", (*job_label, source), amount)
            for source, amount in total.input_bytes.items()
        ]
        return readings


def combine_flop_rates(
    device_shares: Mapping[str, float], values: Mapping[tuple[str, tuple[str, ...]], float]
) -> FlopRate | None:
    """Returns the FLOP/s of a job over its devices, with the least certain method of any; None if
    any is unknown.
    """
    low, high, method = 0.0, 0.0, METHODS_MOST_CERTAIN_FIRST[0]
    for device, part in device_shares.items():
        device_method = next(
            (
                name
                for name in METHODS_MOST_CERTAIN_FIRST
                if ("gpu_flops", (device, name, "low")) in values
            ),
            None,
        )
        if device_method is None:
            return None
        low += part * values["gpu_flops", (device, device_method, "low")]
        high += part * values["gpu_flops", (device, device_method, "high")]
        method = max(method, device_method, key=METHODS_MOST_CERTAIN_FIRST.index)
    return FlopRate(low, high, method) if device_shares else None


# Min share of compute kernel time with counted FLOPs, for these to be a reference.
MIN_MODELLED_SHARE = 0.9


def load_traced_facts(path: str) -> dict[str, Any]:
    """Returns the fields of `TracedFacts` from a capture or a trace: means over its processes and
    their whole steps.

    Raises:
        TraceloomError: It cannot be read.
    """
    import polars as pl

    from traceloom.analyze import copies, roofline
    from traceloom.analyze.kernel_rules import select_gpu_work
    from traceloom.formats import load

    session = load(path)
    roofline_result = roofline(session)
    mean_by_quantity = {
        quantity: mean
        for quantity, mean in roofline_result.spread.group_by("quantity")
        .agg(pl.col("mean").mean())
        .iter_rows()
        if mean is not None
    }
    roofline_fraction = (
        roofline_result.whole["roofline_fraction"].mean() if roofline_result.whole.height else None
    )
    matrix = roofline_result.operators.filter(
        pl.col("matrix") & pl.col("arithmetic").cast(pl.String).is_in(MATRIX_TYPES)
    )
    flops_by_type = (
        matrix.group_by(pl.col("arithmetic").cast(pl.String)).agg(pl.col("flops").sum()).rows()
    )
    copied = []
    compute_ns = 0
    for trace in session.traces:
        compute = select_gpu_work(trace).filter(pl.col("category").cast(pl.String) == "compute")
        compute_ns += int((compute["end_ns"] - compute["start_ns"]).sum())
        to_device = copies(trace).per_step.filter(pl.col("kind").cast(pl.String) == "HtoD")[
            "mean_copied_bytes"
        ]
        if to_device.len() and not to_device.null_count():
            copied.append(float(to_device.sum()))
    is_counted = (
        roofline_result.whole["modelled_ns"].sum() or 0
    ) >= MIN_MODELLED_SHARE * compute_ns  # trivially true without device time
    facts = TracedFacts(
        flops_per_step=mean_by_quantity.get("flops") if is_counted else None,
        dtype_mix={kind: float(flops) for kind, flops in flops_by_type if flops},
        roofline_ratio=mean_by_quantity.get("roofline_fraction", roofline_fraction),
        copied_bytes_per_step=sum(copied) / len(copied)
        if copied and len(copied) == len(session.traces)
        else None,
    )
    fields: dict[str, Any] = msgspec.to_builtins(facts)
    return fields
