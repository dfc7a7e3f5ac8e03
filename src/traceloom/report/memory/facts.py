"""What the document knows of one memory beyond its blocks: the device's size, its allocator, what grows into it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypedDict

import polars as pl

from traceloom.analyze.allocations import Explained
from traceloom.analyze.allocations.allocator import fragments
from traceloom.analyze.allocations.growth import LEAST_STEPS
from traceloom.analyze.allocations.module_activations import module_activations
from traceloom.model import Trace
from traceloom.model.frames import rows
from traceloom.model.snapshot import Snapshot
from traceloom.read.memory_files import whole
from traceloom.report.absent import Absent

if TYPE_CHECKING:
    from traceloom.report.documents.memory import (
        MemoryActivationRow,
        MemoryAllocatorRow,
        MemoryGrowthRow,
        MemoryRankRow,
    )

MOST_MODULES = 50
_HOST = ("cpu", "cpu-shared")
_FRAGMENTS = (
    "reserved_bytes", "allocated_bytes", "requested_bytes", "pending_bytes", "free_bytes", "largest_free_bytes",
    "split_bytes", "segment_count", "fragmentation",
)  # fmt: skip

_NO_STATE: MemoryAllocatorRow = {
    "reserved_bytes": None,
    "allocated_bytes": None,
    "requested_bytes": None,
    "pending_bytes": None,
    "free_bytes": None,
    "largest_free_bytes": None,
    "split_bytes": None,
    "segment_count": None,
    "fragmentation": None,
    "retries": None,
    "outside_bytes": None,
}


class MemoryTotals(TypedDict):
    """One memory as a whole, as the document has it."""

    device_type: str
    device: int
    peak_bytes: int
    peak_time_ns: int
    peak_step: int | None
    unseen_bytes: int
    start_bytes: int | None
    end_bytes: int
    allocation_count: int
    free_count: int
    reserved_at_peak_bytes: int | None


def capacity(trace: Trace, totals: MemoryTotals) -> int | None:
    """How much memory the device of one memory has, by the capture or the trace; None where neither says."""
    if totals["device_type"] in _HOST:
        return None
    number = max(totals["device"], 0)
    listed = (trace.meta.capture or {}).get("devices")
    for device in listed if isinstance(listed, list) else []:
        if isinstance(device, dict) and device.get("device") == number and (size := whole(device.get("memory_bytes"))):
            return size
    sizes = trace.devices.filter(pl.col("device") == number)["memory_bytes"].drop_nulls()
    return int(sizes[0]) if sizes.len() and sizes[0] > 0 else None


def growing(
    explained: Explained, rows: pl.DataFrame, totals: MemoryTotals, size: int | None, absent: Absent
) -> list[MemoryGrowthRow]:
    """What grows, with its stack, and the step at which the device is full if all of it keeps growing."""
    if not rows.height:
        return []
    stacks = explained.stack_reader()(rows["example"].cast(pl.Int64).to_numpy())
    per_step = float(rows["bytes_per_step"].sum())
    full = None
    if size is not None and per_step > 0:
        last = totals["peak_step"] if totals["peak_step"] is not None else int(rows["last_step"].to_numpy().max())
        full = last + 1 + max(math.floor((size - totals["peak_bytes"]) / per_step), 0)
    grown = rows.drop("pool", "example").with_columns(stacks.alias("stack"), full_at_step=pl.lit(full, pl.Int64))
    return absent.rows(grown, "memories[*].growth")


def growth_unknown(entry: MemoryRankRow) -> str | None:
    """Why nobody can say what grows with the steps of one rank; None where it can be said."""
    steps = len(entry["steps"])
    if steps > LEAST_STEPS:
        return None
    had = ("none was", "only one was")[steps] if steps < 2 else f"only {steps} were"
    return f"it takes at least {LEAST_STEPS + 1} steps, and {had} recorded"


def activations(explained: Explained, pool: int, row: int, absent: Absent) -> list[MemoryActivationRow]:
    """Activations by module and what checkpointing each would save; the largest savings."""
    return absent.rows(module_activations(explained, pool, row).head(MOST_MODULES), "memories[*].activations")


def allocator(trace: Trace, totals: MemoryTotals, snapshot: Snapshot | None) -> MemoryAllocatorRow | None:
    """The state of the allocator at the end of the recording; None where neither a snapshot nor the recorder tells.

    `outside_bytes` is what is in use on the device beyond what this allocator has reserved: libraries, communication
    buffers, other processes.
    """
    if totals["device_type"] in _HOST:
        return None
    number = max(totals["device"], 0)
    states: list[MemoryAllocatorRow] = []
    if snapshot is not None:
        in_device = fragments(snapshot).filter(pl.col("device") == number)
        states = rows(in_device.select(*_FRAGMENTS, retries=pl.lit(None), outside_bytes=pl.lit(None)))
    has_state = bool(states)
    state: MemoryAllocatorRow = states[0] if states else {**_NO_STATE}
    listed = (trace.meta.capture or {}).get("allocators_at_end")
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, dict) or entry.get("device") != number:
            continue
        recorded = {
            key: whole(entry.get(key))
            for key in ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "retries")
        }
        has_state = True
        if state["reserved_bytes"] is None:
            state["reserved_bytes"] = recorded["reserved_bytes"]
        if state["allocated_bytes"] is None:
            state["allocated_bytes"] = recorded["allocated_bytes"]
        state["retries"] = recorded["retries"]
        total, free, reserved = recorded["total_bytes"], recorded["free_bytes"], recorded["reserved_bytes"]
        if total is not None and free is not None and reserved is not None:
            state["outside_bytes"] = max(total - free - reserved, 0)
    return state if has_state else None
