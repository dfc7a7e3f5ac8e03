"""Every modelled call on the roofline of its device: how long it would take at the device's peaks."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import forest
from traceloom.analyze.classify import gpu_work
from traceloom.analyze.modelled_calls import PLAIN_FLOAT, TENSOR_FLOAT, ModelledCalls, modelled_calls, with_replays
from traceloom.analyze.peaks import Peak, peaks
from traceloom.analyze.remembered import made_from
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat

BoundType = pl.Enum(["compute", "memory"])


class PlacedCalls(Struct, frozen=True):
    """The modelled calls of a trace on the roofline of their device.

    Attributes:
        calls: One row per modelled call: position (in the forest), group, device, step (of its first launch), gpu_ns
            (sum of its GPU work), time_ns (the same; host time in a trace without
            a device, null where the device's work is not recorded), arithmetic (its element
            type, tf32 told from fp32), evidence (recorded type, kernel name, assumed), flops, recomputed, bytes,
            matrix, rate (FLOP/s at peak), memory_rate (bytes/s), compute_ns, memory_ns, roofline_ns (floats, null
            where unknown), bound.
        work: One row per piece of GPU work that belongs to one: event, name, device, step, ns, position.
        devices: The peaks of each device, or why they are unknown.
        known: Whether there are peaks for any of the work.
        modelled: The calls that were placed.
    """

    calls: pl.DataFrame
    work: pl.DataFrame
    devices: dict[int, Peak | str]
    known: bool
    modelled: ModelledCalls


def placed(trace: Trace, peak: Peak | None = None, capture: Trace | None = None) -> PlacedCalls:
    """Place every modelled call on the roofline; without a given peak or capture remembered for the last trace.

    With the recording of the `capture` of its graphs also the calls that their replays make.
    """
    if capture is not None:
        return _placed(trace, with_replays(trace, capture), peak)
    modelled = modelled_calls(trace)
    if peak is not None:
        return _placed(trace, modelled, peak)
    return _placed_by_names(trace, modelled)


@made_from
def _placed_by_names(trace: Trace, modelled: ModelledCalls) -> PlacedCalls:
    """With the peaks that the devices' names tell; registering a model changes the calls, and so the result."""
    return _placed(trace, modelled, None)


def _placed(trace: Trace, modelled: ModelledCalls, peak: Peak | None) -> PlacedCalls:
    owned = np.flatnonzero(modelled.work_owner >= 0)
    work = gpu_work(trace)[owned]
    work = work.select(
        "event",
        "name",
        "device",
        trace.events["step"].gather(work["event"]),
        ns=pl.col("end_ns") - pl.col("start_ns"),
        position=pl.Series(modelled.work_owner[owned]),
    )
    if modelled.link.size:
        words = vocabulary(trace)
        code = words.code[work["event"].to_numpy()]
        calls = (
            work.with_columns(
                tensor_float=pl.Series(words.matching(TENSOR_FLOAT)[code]),
                plain_float=pl.Series(words.matching(PLAIN_FLOAT)[code]),
            )
            .group_by("position", maintain_order=True)
            .agg(
                pl.col("device", "step").first(),
                pl.col("tensor_float", "plain_float").any(),
                gpu_ns=pl.col("ns").sum(),
                time_ns=pl.col("ns").sum(),
                kernels=pl.len(),
            )
        )
    else:
        own = np.flatnonzero(modelled.owner == np.arange(modelled.owner.size)).astype(np.int64)
        tree = forest(trace)
        steps = trace.events["step"].gather(tree.row[own])
        calls = pl.DataFrame({"position": own, "step": steps, "time_ns": tree.span_ns()[own]})
        # host times are not those of work that went to a device on which nothing is recorded
        if trace.events["category"].is_in([*cat.LAUNCHES, cat.COMMAND, cat.GPU_EVENT]).any():
            calls = calls.with_columns(time_ns=pl.lit(None, pl.Int64))
        calls = calls.with_columns(
            device=pl.lit(None, pl.Int32), gpu_ns=pl.lit(None, pl.Int64), kernels=pl.lit(0, pl.UInt32),
            tensor_float=pl.lit(value=False), plain_float=pl.lit(value=False),
        )  # fmt: skip
    group = pl.Series("group", modelled.group[calls["position"].to_numpy()])
    of_group = modelled.groups.drop("group", "name", "shapes", "types", "reason")[group]
    device_peaks = peaks(trace, peak)
    has_peaks = peak is not None or any(isinstance(entry, Peak) for entry in device_peaks.values())
    # What the kernels' names reveal about fp32 matrix work: tf32 where any kernel's name shows it.
    single = (pl.col("dtype") == "fp32") & pl.col("matrix")
    calls = calls.hstack([group.cast(pl.UInt32), *of_group]).with_columns(
        arithmetic=pl.when(single & pl.col("tensor_float")).then(pl.lit("tf32")).otherwise("dtype"),
        evidence=pl.when(~single)
        .then(pl.lit("recorded type"))
        .when(pl.col("tensor_float") | pl.col("plain_float"))
        .then(pl.lit("kernel name"))
        .otherwise(pl.lit("assumed")),
    )
    keys = ["device", "arithmetic", "matrix"]
    kinds = calls[keys].unique()
    rates: list[tuple[float | None, float | None]] = []
    for device, arithmetic, matrix in kinds.rows():
        highest = peak if device is None else device_peaks.get(device)
        rates.append(
            (highest.rate(arithmetic, matrix=matrix), highest.memory) if isinstance(highest, Peak) else (None, None)
        )
    table = kinds.hstack(pl.DataFrame(rates, schema={"rate": pl.Float64, "memory_rate": pl.Float64}, orient="row"))
    calls = calls.join(table, on=keys, how="left", nulls_equal=True, maintain_order="left")
    compute = pl.when(pl.col("flops") == 0).then(0.0).otherwise(pl.col("flops") / pl.col("rate") * 1e9)
    calls = calls.with_columns(compute_ns=compute, memory_ns=pl.col("bytes") / pl.col("memory_rate") * 1e9)
    # A vector unit of unknown rate does not hide the bound that memory sets; a matrix unit of unknown rate does.
    has_bound = pl.col("memory_ns").is_not_null() & (pl.col("compute_ns").is_not_null() | ~pl.col("matrix"))
    on_roofline = calls.with_columns(
        roofline_ns=pl.when(has_bound).then(pl.max_horizontal("compute_ns", "memory_ns")),
        bound=pl.when(has_bound)
        .then(pl.when(pl.col("compute_ns") > pl.col("memory_ns")).then(pl.lit("compute")).otherwise(pl.lit("memory")))
        .cast(BoundType),
    )
    return PlacedCalls(on_roofline, work, device_peaks, has_peaks, modelled)
