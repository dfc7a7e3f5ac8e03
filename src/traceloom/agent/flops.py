"""Estimates a device's FLOP/s, with bounds, from pipe activity and its data sheet.

The peaks are those of `traceloom.analyze`, read as a file: that package imports NumPy, which the
agent's loop does not load.

F = N_SM x f_SM(measured) x sum over pipes(activity x FLOP per clock per SM)

The counter of the matrix pipe does not distinguish TF32 from BF16 or FP8, which differ by a factor
of up to eight: the width of the interval depends on what is known of the element type. Integer
operations are no FLOP and are reported separately.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from traceloom.agent.accelerators.backend import Device
from traceloom.agent.metrics import Reading

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
