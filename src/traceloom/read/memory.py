"""Events without a duration: allocations, marks, counters."""

from __future__ import annotations

from functools import partial

import numpy as np
import polars as pl

from traceloom.array_types import Array
from traceloom.model import category as cat
from traceloom.model.arrays import NO_ROW, Texts, column_of, distinct, lookup, nearest, nullable, plain, row_numbers
from traceloom.model.schema import SCHEMAS
from traceloom.read.fields import NULL
from traceloom.read.lanes import KIND_OF_CODE, KINDS, ThreadPairs
from traceloom.read.steps import NO_STEP, step_of
from traceloom.storage.ondisk import OnDisk

# torch's DeviceType numbers (c10/core/DeviceType.h).
DEVICE_TYPES = {
    0: "cpu", 1: "cuda", 2: "mkldnn", 3: "opengl", 4: "opencl", 5: "ideep", 6: "hip", 7: "fpga", 8: "maia", 9: "xla",
    10: "vulkan", 11: "metal", 12: "xpu", 13: "mps", 14: "meta", 15: "hpu", 16: "ve", 17: "lazy", 18: "ipu",
    19: "mtia", 20: "privateuseone",
}  # fmt: skip


_ON_HOST = np.array([KINDS[kind] == "host" for kind in KIND_OF_CODE])
_IS_OP = np.array([name == cat.OP for name in cat.CATEGORIES])


def allocation_frame(
    columns: dict[str, Array],
    base_ns: int,
    places: ThreadPairs,
    on_host: tuple[pl.DataFrame, Array],
    steps: pl.DataFrame,
) -> pl.DataFrame:
    """The `allocations` frame, by time; `op` is the innermost op on that thread then.

    Args:
        columns: The raw columns of `[memory]` events.
        base_ns: Added to their times.
        places: (pid, tid) pairs.
        on_host: The `events` frame and the place of each event.
        steps: The `steps` frame.
    """
    if not len(columns["start"]):
        return pl.DataFrame(schema=SCHEMAS["allocations"])
    order = np.argsort(columns["start"], kind="stable")
    ordered = {name: values[order] for name, values in columns.items()}
    time, pair_number = ordered["start"] + base_ns, ordered["place"]
    # The innermost event that is open at each time on each (pid, tid) pair, then the op around it.
    events, event_pair = on_host
    column = partial(column_of, events, large=isinstance(event_pair, OnDisk))
    category, start, end = column("category"), column("start_ns"), column("nested_end_ns")
    parent, is_op = column("parent", NO_ROW), lookup(_IS_OP, category)
    spot = np.where(lookup(_ON_HOST, category), event_pair, -1)
    rows = np.flatnonzero(spot >= 0)
    by_pair = rows[np.argsort(spot[rows], kind="stable")]
    lows = np.searchsorted(spot[by_pair], pair_number, side="left")
    highs = np.searchsorted(spot[by_pair], pair_number, side="right")
    inside = np.full(len(time), NO_ROW, dtype=np.int64, like=time)
    for number in distinct(pair_number):
        of_pair = np.flatnonzero(pair_number == number)
        members = by_pair[lows[of_pair[0]] : highs[of_pair[0]]]
        if members.size:
            at = np.searchsorted(start[members], time[of_pair], side="right") - 1
            inside[of_pair] = np.where(at >= 0, members[np.maximum(at, 0)], NO_ROW)
    rows = np.flatnonzero(inside >= 0)
    while rows.size:
        rows = rows[end[inside[rows]] <= time[rows]]
        inside[rows] = parent[inside[rows]]
        rows = rows[inside[rows] >= 0]
    has_event = inside >= 0
    above = nearest(parent, is_op)
    inside[has_event] = np.where(is_op[inside[has_event]], inside[has_event], above[inside[has_event]])
    step = step_of(steps, time)
    process, thread = lookup(places.numbers(0), pair_number), lookup(places.numbers(1), pair_number)
    kind, device = ordered["device_type"], ordered["device_id"]
    kind = np.where((kind >= 0) & (kind < len(DEVICE_TYPES)), kind, len(DEVICE_TYPES))
    device[(device < -(2**31)) | (device >= 2**31)] = NULL
    return pl.DataFrame(
        {
            "time_ns": plain(time, pl.Int64),
            "address": plain(ordered["address"], pl.UInt64),
            "bytes": plain(np.where(ordered["allocation_bytes"] == NULL, 0, ordered["allocation_bytes"]), pl.Int64),
            "device_type": Texts([*DEVICE_TYPES.values(), "other"]).column(kind),
            "device": nullable(device, pl.Int32),
            "allocated_bytes": nullable(ordered["total_allocated"]),
            "reserved_bytes": nullable(ordered["total_reserved"]),
            "process": nullable(process),
            "thread": nullable(thread),
            "op": row_numbers(inside),
            "step": nullable(step, pl.Int32, NO_STEP),
        },
        schema=SCHEMAS["allocations"],
    )


def unknown_devices(columns: dict[str, Array]) -> int:
    """How many allocations are of a type of device that has no name here."""
    kind = columns["device_type"]
    return int(((kind < 0) | (kind >= len(DEVICE_TYPES))).sum())


def mark_frame(columns: dict[str, Array], base_ns: int, places: ThreadPairs, texts: Texts) -> pl.DataFrame:
    """The `marks` frame: instants other than allocations."""
    has_time = columns["start"] != NULL if len(columns["start"]) else np.zeros(0, dtype=np.bool_)
    if not has_time.any():
        return pl.DataFrame(schema=SCHEMAS["marks"])
    columns = {name: values[has_time] for name, values in columns.items()}
    order = np.argsort(columns["start"], kind="stable")
    pair_number = columns["place"][order]
    return pl.DataFrame(
        {
            "time_ns": plain(columns["start"][order] + base_ns, pl.Int64),
            "name": texts.column(columns["name"][order]),
            "process": _ids(places, 0).column(pair_number),
            "thread": _ids(places, 1).column(pair_number),
            "bytes": nullable(columns["bytes"][order]),
        },
        schema=SCHEMAS["marks"],
    )


def counter_frame(columns: dict[str, Array], base_ns: int, places: ThreadPairs, texts: Texts) -> pl.DataFrame:
    """The `counters` frame."""
    if not len(columns["start"]):
        return pl.DataFrame(schema=SCHEMAS["counters"])
    order = np.argsort(columns["start"], kind="stable")
    return pl.DataFrame(
        {
            "time_ns": plain(columns["start"][order] + base_ns, pl.Int64),
            "process": _ids(places, 0).column(columns["place"][order]),
            "name": texts.column(columns["name"][order]),
            "key": texts.column(columns["key"][order]),
            "value": plain(columns["value"][order], pl.Float64),
        },
        schema=SCHEMAS["counters"],
    )


def _ids(places: ThreadPairs, which: int) -> Texts:
    """The processes (0) or threads (1) of all places, as texts."""
    return Texts([str(pair[which]) for pair in places.pairs])
