"""Curves of a trace over time: how busy each GPU is, how many launches wait, bandwidth of copies, memory, counters."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom import analyze
from traceloom.array_types import Ints
from traceloom.harmless import harmless
from traceloom.model import Trace

SCHEMA = {"name": pl.String, "time_ns": pl.Int64, "value": pl.Float64}
_BUCKETS = 500


def counters(trace: Trace) -> pl.DataFrame:
    """All curves of a trace: name, time_ns, value; ordered by curve and time."""
    curves = []
    for (kind, device), curve in analyze.memory(trace).curve.group_by("device_type", "device", maintain_order=True):
        device_name = f"{kind} {device}" if isinstance(device, int) and device >= 0 else str(kind)
        for column, label in (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved")):
            samples = curve.drop_nulls(column)
            value = (samples[column] / 1e6).to_numpy()
            curves.append(_curve(f"{harmless(device_name)} memory {label} MB", samples["time_ns"].to_numpy(), value))
    return pl.concat([beside_memory(trace), *curves])


def beside_memory(trace: Trace) -> pl.DataFrame:
    """The same without the curves of memory, which the page has from the report."""
    curves = [pl.DataFrame(schema=SCHEMA)]
    for (device,), work in trace.gpu_work().group_by("device", maintain_order=True):
        start = work["start_ns"].to_numpy()
        curves.append(_curve(f"GPU {device} busy %", *busy(start, start + work["duration_ns"].clip(0).to_numpy())))
        curves.append(_queue(trace, work, f"GPU {device} launches waiting"))
    bandwidth = analyze.copies(trace).curve.select(
        name=pl.format("GPU {} {} GB/s", pl.col("device").fill_null(-1), "kind"),
        time_ns="time_ns",
        value=pl.col("bytes_per_s") / 1e9,
    )
    recorded = trace.counters.drop_nulls("value").select(
        name=pl.concat_str("name", "key", separator=" "), time_ns="time_ns", value="value"
    )
    return pl.concat([*curves, bandwidth, recorded])


def _curve(name: str, time_ns: Ints, value: NDArray[np.float64]) -> pl.DataFrame:
    return pl.DataFrame({"name": [name] * time_ns.size, "time_ns": time_ns, "value": value}, schema=SCHEMA)


def busy(start: Ints, end: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """Per cent of each of 500 equal parts of the window in which at least one span runs; ends with 0.

    Args:
        start: Starts of the spans, sorted.
        end: Their ends.
    """
    reach = np.maximum.accumulate(end)
    fresh = np.append(True, start[1:] > reach[:-1])
    low = start[fresh]
    high = reach[np.append(np.flatnonzero(fresh)[1:] - 1, start.size - 1)]
    # From the first start on: nanoseconds since 1970 are beyond what a float holds exactly.
    edges = np.unique(low[0] + np.linspace(0, int(high[-1] - low[0]), _BUCKETS + 1).astype(np.int64))
    if edges.size < 2:
        return edges, np.zeros(edges.size)
    before = np.append(0, np.cumsum(high - low))
    open_ = np.searchsorted(low, edges, side="right") - 1
    passed = before[open_] + np.minimum(edges, high[open_]) - low[open_]
    share = np.diff(passed) * 100.0 / np.diff(edges)
    return edges, np.append(np.round(share, 1), 0.0)


def _queue(trace: Trace, work: pl.DataFrame, name: str) -> pl.DataFrame:
    """Launched and not yet begun: up at each launch, down at each start on the device."""
    launched = work.drop_nulls("launch")
    if not launched.height:
        return pl.DataFrame(schema=SCHEMA)
    begun = trace.events["start_ns"].gather(launched["launch"])
    steps = pl.concat(
        [
            pl.DataFrame({"time_ns": begun, "change": 1}),
            # A kernel that seems to start before its launch (clocks) never waited.
            pl.DataFrame(
                {"time_ns": pl.select(pl.max_horizontal(begun, launched["start_ns"])).to_series(), "change": -1}
            ),
        ]
    )
    return (
        steps.group_by("time_ns").agg(pl.col("change").sum()).sort("time_ns")
        .select(name=pl.lit(name), time_ns="time_ns", value=pl.col("change").cum_sum().cast(pl.Float64))
    )  # fmt: skip
