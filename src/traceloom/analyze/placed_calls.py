"""Peaks of devices, and modelled calls placed on the roofline of their device."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.kernel_rules import select_gpu_work_with_steps
from traceloom.analyze.modelled_calls import (
    FP32_KERNEL,
    TF32_KERNEL,
    ModelledCalls,
    add_graph_replays,
    find_modelled_calls,
)
from traceloom.analyze.names import build_vocabulary
from traceloom.errors import UsageError
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Ints
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_last_result,
    concatenate_by_trace,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.trace import Trace

_MATRIX_TYPES = {"fp64": ("fp64_matrix", "fp64"), "fp32": ("fp32_matrix", "fp32")}
PEAK_TYPES = (
    "fp64",
    "fp64_matrix",
    "fp32",
    "fp32_matrix",
    "tf32",
    "bf16",
    "fp16",
    "fp8",
    "int8",
    "fp4",
)
"""The keys that `flops` of a peak may have."""


class Peak(Struct, frozen=True):
    """Dense peaks of one device.

    Attributes:
        name: Display name.
        flops: FLOP/s (integer operations for int8) by element type; `fp32_matrix` and `fp64_matrix`
            where matrix units differ from vector units.
        memory: Bytes/s of the device memory; None where unknown.
    """

    name: str
    flops: Mapping[str, float]
    memory: float | None

    def rate(self, dtype: str, *, matrix: bool) -> float | None:
        """Returns FLOP/s of this element type, or None.

        Vector units compute 16-bit floats, integers and comparisons at the rate of fp32 at best.
        """
        if matrix:
            return next(
                (
                    self.flops[key]
                    for key in _MATRIX_TYPES.get(dtype, (dtype,))
                    if key in self.flops
                ),
                None,
            )
        return self.flops.get("fp64" if dtype in ("fp64", "complex128") else "fp32")


@cache
def _load_peaks() -> dict[str, tuple[Peak, int | None]]:
    """Returns peaks and number of multiprocessors by each name of a device, normalized by
    `_normalize_name`.
    """
    text = resources.files("traceloom.analyze").joinpath("peaks.json").read_text(encoding="utf-8")
    return {
        _normalize_name(name): (
            Peak(entry["name"], entry["flops"], entry["memory"]),
            entry["multiprocessors"],
        )
        for entry in json.loads(text)["devices"]
        for name in (entry["name"], *entry["aliases"])
    }


def _normalize_name(name: str) -> str:
    """Returns the name without differences in case and spaces; everything else distinguishes
    devices.
    """
    return re.sub(r"\s+", " ", name).strip().lower()


def list_known_devices() -> tuple[str, ...]:
    """Returns the devices whose peaks come with Traceloom."""
    return tuple(dict.fromkeys(peak.name for peak, _ in _load_peaks().values()))


def find(name: str | None, multiprocessors: int | None = None) -> Peak | str:
    """Returns the peaks of a device by its name in a trace, or the reason why there are none.

    Only whole names match: a part of a name can be another device. Where the number of
    multiprocessors is given and differs, the device is a part of the known one (MIG, partitions) or
    something else.
    """
    if not name:
        return "the trace does not name the device"
    entry = _load_peaks().get(_normalize_name(name))
    if entry is None:
        return f"the peaks of {name!r} are not known"
    peak, expected = entry
    if multiprocessors and expected and multiprocessors != expected:
        return f"{name} has {expected} multiprocessors, this one {multiprocessors}: it is a part of one, or another"
    return peak


def parse_peak(spec: Peak | str | Mapping[str, float]) -> Peak:
    """Returns the peaks that a user gives: themselves, a device's name, or numbers.

    Args:
        spec: `H100 SXM`, or `bf16=989e12,memory=3.35e12`, or the same as a mapping.

    Raises:
        UsageError: slugs `no-such-device`, `bad-peak`.
    """
    if isinstance(spec, Peak):
        return spec
    if isinstance(spec, str) and "=" not in spec:
        peak = find(spec)
        if isinstance(peak, str):
            hint = f"use one of {', '.join(list_known_devices())}, or give numbers such as bf16=989e12,memory=3.35e12"
            raise UsageError(
                f"there are no peaks for a device called {spec!r}", slug="no-such-device", hint=hint
            )
        return peak
    numbers: dict[str, Any] = {}
    for part in spec.split(",") if isinstance(spec, str) else ():
        key, _, value = part.partition("=")
        try:
            numbers[key.strip()] = float(value)
        except ValueError:
            raise _describe_bad_peak(
                f"`{part.strip()}` is no pair of a name and a number"
            ) from None
    if not isinstance(spec, str):
        numbers = {str(key): spec[key] for key in spec}
    for key, value in numbers.items():
        if key not in (*PEAK_TYPES, "memory"):
            raise _describe_bad_peak(f"`{key}` is none of {', '.join((*PEAK_TYPES, 'memory'))}")
        if not isinstance(value, (int, float)) or not 0 < value < 1e300:
            raise _describe_bad_peak(f"`{key}` is not a number above 0")
    rates = {key: float(value) for key, value in numbers.items() if key != "memory"}
    return Peak("given", rates, float(numbers["memory"]) if "memory" in numbers else None)


def _describe_bad_peak(message: str) -> UsageError:
    return UsageError(
        message, slug="bad-peak", hint="give FLOP/s and bytes/s: bf16=989e12,memory=3.35e12"
    )


def find_peaks(trace: Trace, peak: Peak | None = None) -> dict[int, Peak | str]:
    """Returns the peaks of every device with GPU work, or the reason why they are unknown.

    A device that the file does not describe takes the name that all devices it describes share: a
    process that sees one device of many may number it differently.
    """
    rows = trace.devices[["device", "name", "multiprocessors", "used"]].rows()
    used = [
        (int(device), name, processors) for device, name, processors, is_used in rows if is_used
    ]
    if peak is not None:
        return {device: peak for device, _, _ in used}
    described = {(name, processors) for _, name, processors, _ in rows if name is not None}
    shared: tuple[Any, Any] = described.pop() if len(described) == 1 else (None, None)
    return {
        device: find(name, processors) if name or processors else find(*shared)
        for device, name, processors in used
    }


BoundType = pl.Enum(["compute", "memory"])


class PlacedCalls(Struct, frozen=True):
    """The modelled calls of a trace on the roofline of their device.

    Attributes:
        calls: One row per modelled call: position (in the forest), group, device, step (of its
            first launch), gpu_ns (sum of its GPU work), time_ns (the same; host time in a trace
            without a device, null where the device's work is not recorded), arithmetic (its element
            type, with tf32 distinguished from fp32), evidence (recorded type, kernel name,
            assumed), flops, recomputed, bytes, matrix, rate (FLOP/s at peak), memory_rate
            (bytes/s), compute_ns, memory_ns, roofline_ns (floats, null where unknown), bound.
        work: One row per piece of GPU work that belongs to one: event, name, device, step, ns,
            position.
        devices: The peaks of each device, or the reason why they are unknown.
        known: Whether there are peaks for any of the work.
        modelled: The calls that were placed.
    """

    calls: pl.DataFrame
    work: pl.DataFrame
    devices: dict[int, Peak | str]
    known: bool
    modelled: ModelledCalls


def place_on_roofline(
    trace: Trace, peak: Peak | None = None, capture: Trace | None = None
) -> PlacedCalls:
    """Places every modelled call on the roofline; cached for the last trace, without a given peak
    or capture.

    With the recording of the `capture` of its graphs also the calls that their replays make.
    """
    if capture is not None:
        return _compare_with_peaks([trace], [add_graph_replays(trace, capture)], peak)[0]
    modelled = find_modelled_calls(trace)
    return (
        _compare_by_names(trace, modelled)
        if peak is None
        else _compare_with_peaks([trace], [modelled], peak)[0]
    )


@cache_last_result
def _compare_by_names(trace: Trace, _modelled: ModelledCalls) -> PlacedCalls:
    """Compares with the peaks by the devices' names; registering a model changes the calls, and so
    the result.
    """
    return _compare_all(trace)


@run_in_batches
def _compare_all(traces: Sequence[Trace]) -> list[PlacedCalls]:
    return _compare_with_peaks(traces, [find_modelled_calls(trace) for trace in traces], None)


def _compare_with_peaks(
    traces: Sequence[Trace], modelled: Sequence[ModelledCalls], peak: Peak | None
) -> list[PlacedCalls]:
    owner = pl.Series(
        "position", np.concatenate([calls_of_trace.work_owner for calls_of_trace in modelled])
    )
    columns = [TRACE_COLUMN, "event", "name", "device", "step", "ns"]
    work = (
        select_gpu_work_with_steps(traces)[columns].hstack([owner]).filter(pl.col("position") >= 0)
    )
    arithmetic_flags = [
        _detect_arithmetic(trace, trace_rows["event"].to_numpy())
        for trace, trace_rows in zip(traces, split_by_trace(work, traces), strict=True)
    ]
    call_work = (
        work.hstack(pl.concat(arithmetic_flags))
        .group_by(TRACE_COLUMN, "position", maintain_order=True)
        .agg(
            pl.col("device", "step").first(),
            pl.col("tensor_float", "plain_float").any(),
            gpu_ns=pl.col("ns").sum(),
            time_ns=pl.col("ns").sum(),
            kernels=pl.len(),
        )
    )
    calls = concatenate_by_trace(
        trace_rows
        if trace_calls.link.size
        else _list_host_calls(trace, trace_calls)[trace_rows.columns]
        for trace, trace_calls, trace_rows in zip(
            traces, modelled, split_by_trace(call_work, traces), strict=True
        )
    )
    positions = [trace_rows["position"].to_numpy() for trace_rows in split_by_trace(calls, traces)]
    group = np.concatenate(
        [
            calls_of_trace.group[position]
            for calls_of_trace, position in zip(modelled, positions, strict=True)
        ]
    )
    # Of the groups of each trace among all
    first = np.cumsum([0, *(calls_of_trace.groups.height for calls_of_trace in modelled)])
    all_groups = pl.concat([calls_of_trace.groups for calls_of_trace in modelled]).drop(
        "group", "name", "shapes", "types", "reason"
    )
    group_fields = all_groups[
        group + np.repeat(first[:-1], [position.size for position in positions])
    ]
    device_peaks = [find_peaks(trace, peak) for trace in traces]
    # Kernel names show the arithmetic of fp32 matrix work: tf32 where any kernel's name shows it.
    single = (pl.col("dtype") == "fp32") & pl.col("matrix")
    calls = calls.hstack([pl.Series("group", group, dtype=pl.UInt32), *group_fields]).with_columns(
        arithmetic=pl.when(single & pl.col("tensor_float")).then(pl.lit("tf32")).otherwise("dtype"),
        evidence=pl.when(~single)
        .then(pl.lit("recorded type"))
        .when(pl.col("tensor_float") | pl.col("plain_float"))
        .then(pl.lit("kernel name"))
        .otherwise(pl.lit("assumed")),
    )
    keys = [TRACE_COLUMN, "device", "arithmetic", "matrix"]
    kinds = calls[keys].unique()
    rates: list[tuple[float | None, float | None]] = []
    for number, device, arithmetic, matrix in kinds.rows():
        highest = peak if device is None else device_peaks[number].get(device)
        rates.append(
            (highest.rate(arithmetic, matrix=matrix), highest.memory)
            if isinstance(highest, Peak)
            else (None, None)
        )
    table = kinds.hstack(
        pl.DataFrame(rates, schema={"rate": pl.Float64, "memory_rate": pl.Float64}, orient="row")
    )
    calls = calls.join(table, on=keys, how="left", nulls_equal=True, maintain_order="left")
    compute = (
        pl.when(pl.col("flops") == 0).then(0.0).otherwise(pl.col("flops") / pl.col("rate") * 1e9)
    )
    calls = calls.with_columns(
        compute_ns=compute, memory_ns=pl.col("bytes") / pl.col("memory_rate") * 1e9
    )
    # A vector unit of unknown rate does not hide the bound that memory sets; a matrix unit of
    # unknown rate does.
    has_bound = pl.col("memory_ns").is_not_null() & (
        pl.col("compute_ns").is_not_null() | ~pl.col("matrix")
    )
    on_roofline = calls.with_columns(
        roofline_ns=pl.when(has_bound).then(pl.max_horizontal("compute_ns", "memory_ns")),
        bound=pl.when(has_bound)
        .then(
            pl.when(pl.col("compute_ns") > pl.col("memory_ns"))
            .then(pl.lit("compute"))
            .otherwise(pl.lit("memory"))
        )
        .cast(BoundType),
    )
    return [
        PlacedCalls(
            trace_rows,
            own_work,
            peaks_by_device,
            peak is not None or any(isinstance(entry, Peak) for entry in peaks_by_device.values()),
            trace_calls,
        )
        for trace_rows, own_work, peaks_by_device, trace_calls in zip(
            split_by_trace(on_roofline, traces),
            split_by_trace(work, traces),
            device_peaks,
            modelled,
            strict=True,
        )
    ]


def _detect_arithmetic(trace: Trace, work: Ints) -> pl.DataFrame:
    """Returns whether the name of each piece of GPU work shows its arithmetic: tensor_float (tf32),
    plain_float (fp32).
    """
    patterns = {"tensor_float": TF32_KERNEL, "plain_float": FP32_KERNEL}
    if not work.size:
        return pl.DataFrame(schema=dict.fromkeys(patterns, pl.Boolean))
    vocabulary = build_vocabulary(trace)
    return pl.DataFrame(
        {
            name: vocabulary.matching(pattern)[vocabulary.code[work]]
            for name, pattern in patterns.items()
        }
    )


def _list_host_calls(trace: Trace, modelled: ModelledCalls) -> pl.DataFrame:
    """Returns the modelled calls of a trace without GPU work, with the time that the host spends in
    them.
    """
    call_positions = np.flatnonzero(modelled.owner == np.arange(modelled.owner.size)).astype(
        np.int64
    )
    tree = build_forest(trace)
    # Host times are not those of work that went to a device without recorded work.
    sent = trace.events["category"].is_in([*vocab.LAUNCHES, vocab.COMMAND, vocab.GPU_EVENT]).any()
    return pl.DataFrame(
        {"position": call_positions, "step": trace.events["step"][tree.row[call_positions]]}
    ).with_columns(
        time_ns=pl.lit(None, pl.Int64)
        if sent
        else pl.Series(tree.span_ns()[call_positions], dtype=pl.Int64),
        device=pl.lit(None, pl.Int32),
        gpu_ns=pl.lit(None, pl.Int64),
        kernels=pl.lit(0, pl.UInt32),
        tensor_float=pl.lit(value=False),
        plain_float=pl.lit(value=False),
    )
