"""Events without a duration: allocations, marks, counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model.schema import SCHEMAS
from traceloom.read.fields import NULL
from traceloom.read.lanes import Places
from traceloom.read.order import NO_ROW, Texts, distinct, nearest, nullable, row_numbers
from traceloom.read.steps import NO_STEP, step_of

Array = NDArray[Any]
Ints = NDArray[np.int64]

# torch's DeviceType numbers (c10/core/DeviceType.h).
DEVICE_TYPES = {
    0: "cpu", 1: "cuda", 2: "mkldnn", 3: "opengl", 4: "opencl", 5: "ideep", 6: "hip", 7: "fpga", 8: "maia", 9: "xla",
    10: "vulkan", 11: "metal", 12: "xpu", 13: "mps", 14: "meta", 15: "hpu", 16: "ve", 17: "lazy", 18: "ipu",
    19: "mtia", 20: "privateuseone",
}  # fmt: skip


def allocation_frame(  # noqa: PLR0917  (columns of events)
    columns: dict[str, Array], base_ns: int, places: Places, events: pl.DataFrame, spot: Array, steps: pl.DataFrame
) -> pl.DataFrame:
    """The `allocations` frame, by time; `op` is the innermost op on that thread then.

    Args:
        columns: The raw columns of `[memory]` events.
        base_ns: Added to their times.
        places: (pid, tid) pairs.
        events: The events in time order.
        spot: Place of each of them; -1 for those that are not on a host lane.
        steps: The `steps` frame.
    """
    if not len(columns["start"]):
        return pl.DataFrame(schema=SCHEMAS["allocations"])
    order = np.argsort(columns["start"], kind="stable")
    some = {name: values[order] for name, values in columns.items()}
    time = some["start"] + base_ns
    inside = _innermost_op(time, some["place"], events, spot)
    step = step_of(steps, time)
    kinds = pl.Series(some["device_type"]).replace_strict(DEVICE_TYPES, default="other", return_dtype=pl.String)
    process, thread = places.numbers(0)[some["place"]], places.numbers(1)[some["place"]]
    frame = pl.DataFrame(
        {
            "time_ns": time,
            "address": some["address"],
            "bytes": np.where(some["allocation_bytes"] == NULL, 0, some["allocation_bytes"]),
            "device_type": kinds,
            "device": nullable(some["device_id"]),
            "allocated_bytes": nullable(some["total_allocated"]),
            "reserved_bytes": nullable(some["total_reserved"]),
            "process": nullable(process),
            "thread": nullable(thread),
            "op": row_numbers(inside),
            "step": nullable(step, pl.Int32, NO_STEP),
        }
    )
    return frame.cast(SCHEMAS["allocations"])


def _innermost_op(time: Ints, place: Array, events: pl.DataFrame, spot: Array) -> Ints:
    """The innermost op that is open at each time on each place."""
    host = np.flatnonzero(spot >= 0)
    order = host[np.argsort(spot[host], kind="stable")]
    start, end = events["start_ns"].to_numpy(), events["nested_end_ns"].to_numpy()
    parent = events["parent"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    is_op = (events["category"] == "op").to_numpy()
    lows = np.searchsorted(spot[order], place, side="left")
    highs = np.searchsorted(spot[order], place, side="right")
    out = np.full(len(time), NO_ROW, dtype=np.int64)
    for number in distinct(place):
        mine = np.flatnonzero(place == number)
        members = order[lows[mine[0]] : highs[mine[0]]]
        if not members.size:
            continue
        at = np.searchsorted(start[members], time[mine], side="right") - 1
        out[mine] = np.where(at >= 0, members[np.maximum(at, 0)], NO_ROW)
    rows = np.flatnonzero(out >= 0)
    while rows.size:
        ended = end[out[rows]] <= time[rows]
        rows = rows[ended]
        out[rows] = parent[out[rows]]
        rows = rows[out[rows] >= 0]
    above = nearest(parent, is_op)
    known = out >= 0
    out[known] = np.where(is_op[out[known]], out[known], above[out[known]])
    return out


def mark_frame(columns: dict[str, Array], base_ns: int, places: Places, texts: Texts) -> pl.DataFrame:
    """The `marks` frame: instants other than allocations."""
    known = columns["start"] != NULL if len(columns["start"]) else np.zeros(0, dtype=np.bool_)
    if not known.any():
        return pl.DataFrame(schema=SCHEMAS["marks"])
    place = columns["place"][known]
    pids = pl.Series([str(pid) for pid, _ in places.pairs])
    tids = pl.Series([str(tid) for _, tid in places.pairs])
    index = pl.Series(place.astype(np.uint32))
    frame = pl.DataFrame(
        {
            "time_ns": columns["start"][known] + base_ns,
            "name": texts.column(columns["name"][known]),
            "process": pids[index],
            "thread": tids[index],
            "bytes": nullable(columns["bytes"][known]),
        }
    )
    return frame.cast(SCHEMAS["marks"]).sort("time_ns", maintain_order=True)


def counter_frame(columns: dict[str, Array], base_ns: int, places: Places, texts: Texts) -> pl.DataFrame:
    """The `counters` frame."""
    if not len(columns["start"]):
        return pl.DataFrame(schema=SCHEMAS["counters"])
    pids = pl.Series([str(pid) for pid, _ in places.pairs])
    frame = pl.DataFrame(
        {
            "time_ns": columns["start"] + base_ns,
            "process": pids[pl.Series(columns["place"].astype(np.uint32))],
            "name": texts.column(columns["name"]),
            "key": texts.column(columns["key"]),
            "value": columns["value"],
        }
    )
    return frame.cast(SCHEMAS["counters"]).sort("time_ns", maintain_order=True)
