"""Every modelled call on the roofline of its device: how long it would take at the device's peaks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.modelled_calls import ModelledCalls, float_evidence, modelled_calls, with_replays
from traceloom.analyze.peaks import Peak, peaks
from traceloom.analyze.remembered import per_trace
from traceloom.model import Trace
from traceloom.model import category as cat

BoundType = pl.Enum(["compute", "memory"])


@dataclass(frozen=True, slots=True)
class PlacedCalls:
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
    kept = _kept(trace)
    if not kept or kept[0][0] is not modelled:
        kept[:] = [(modelled, _placed(trace, modelled, None))]
    return kept[0][1]


@per_trace
def _kept(_trace: Trace) -> list[tuple[ModelledCalls, PlacedCalls]]:
    """Holds the last result; registering a model changes the calls, and so the result."""
    return []


def _placed(trace: Trace, modelled: ModelledCalls, peak: Peak | None) -> PlacedCalls:
    work = trace.events.lazy().filter(pl.col("category").is_in(cat.GPU_WORK)).select(
        "event", "name", "device", "step", ns=pl.col("duration_ns").clip(lower_bound=0)
    ).collect()  # fmt: skip
    work = work.with_columns(pl.Series("position", modelled.work_owner)).filter(pl.col("position") >= 0)
    if modelled.link.size:
        # What the kernels' names reveal about fp32 matrix work: tf32 where any kernel's name shows it.
        of_groups = modelled.groups.select((pl.col("dtype") == "fp32") & pl.col("matrix")).to_series()
        is_fp32 = np.append(of_groups.fill_null(value=False).to_numpy(), np.False_)
        is_fp32 = is_fp32[modelled.group[work["position"].to_numpy()]]
        fp32_work = work.filter(pl.Series(is_fp32, dtype=pl.Boolean)).select("position", "name")
        names = fp32_work["name"].unique()
        fp32_work = fp32_work.join(pl.DataFrame({"name": names, "shown": float_evidence(names)}), on="name")
        shown = fp32_work.group_by("position").agg(pl.col("shown").max())  # "tf32" > "fp32" > null
        calls = work.group_by("position", maintain_order=True).agg(
            pl.col("device").first(), pl.col("step").first(), gpu_ns=pl.col("ns").sum(), kernels=pl.len()
        )
        calls = calls.join(shown, on="position", how="left", maintain_order="left").with_columns(time_ns="gpu_ns")
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
            shown=pl.lit(None, pl.String),
        )  # fmt: skip
    group = pl.Series("group", modelled.group[calls["position"].to_numpy()]).cast(pl.UInt32)
    calls = calls.with_columns(group).join(
        modelled.groups.drop("name", "shapes", "types", "reason"), on="group", how="left", maintain_order="left"
    )
    device_peaks = peaks(trace, peak)
    has_peaks = peak is not None or any(isinstance(entry, Peak) for entry in device_peaks.values())
    single = (pl.col("dtype") == "fp32") & pl.col("matrix")
    calls = calls.with_columns(
        arithmetic=pl.when(single & (pl.col("shown") == "tf32")).then(pl.lit("tf32")).otherwise("dtype"),
        evidence=pl.when(~single)
        .then(pl.lit("recorded type"))
        .when(pl.col("shown").is_not_null())
        .then(pl.lit("kernel name"))
        .otherwise(pl.lit("assumed")),
    )
    keys = ["device", "arithmetic", "matrix"]
    kinds = calls.select(keys).unique()
    rates: list[tuple[float | None, float | None]] = []
    for device, arithmetic, matrix in kinds.rows():
        highest = peak if device is None else device_peaks.get(device)
        rates.append(
            (highest.rate(arithmetic, matrix=matrix), highest.memory) if isinstance(highest, Peak) else (None, None)
        )
    table = kinds.with_columns(
        pl.Series("rate", [rate for rate, _ in rates], dtype=pl.Float64),
        pl.Series("memory_rate", [memory for _, memory in rates], dtype=pl.Float64),
    )
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
