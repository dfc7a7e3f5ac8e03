"""What the document knows of one memory beyond its blocks: the device's size, its allocator, what grows into it."""

from __future__ import annotations

import math
from typing import Any

import polars as pl

from traceloom.analyze.allocations import Explained
from traceloom.analyze.allocations.allocator import fragments
from traceloom.analyze.allocations.growth import LEAST_STEPS
from traceloom.analyze.allocations.module_activations import module_activations
from traceloom.model import Trace
from traceloom.read.memory_files import whole
from traceloom.read.snapshot import Snapshot
from traceloom.report.absent import Absent

_TOLD = ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "retries")

Row = dict[str, Any]
MOST_MODULES = 50
_HOST = ("cpu", "cpu-shared")
_FRAGMENTS = (
    "reserved_bytes", "allocated_bytes", "requested_bytes", "pending_bytes", "free_bytes", "largest_free_bytes",
    "split_bytes", "segment_count", "fragmentation",
)  # fmt: skip


def capacity(trace: Trace, facts: Row) -> int | None:
    """How much memory the device of one memory has, by the capture or the trace; None where neither says."""
    if facts["device_type"] in _HOST:
        return None
    number = max(facts["device"], 0)
    listed = (trace.meta.capture or {}).get("devices")
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict) and one.get("device") == number and (size := whole(one.get("memory_bytes"))):
            return size
    known = trace.devices.filter(pl.col("device") == number)["memory_bytes"].drop_nulls()
    return int(known[0]) if known.len() and known[0] > 0 else None


def growing(known: Explained, rows: pl.DataFrame, facts: Row, size: int | None, absent: Absent) -> list[Row]:
    """What grows, with its stack, and the step at which the device is full if all of it goes on."""
    if not rows.height:
        return []
    stacks = known.stack_reader()(rows["example"].cast(pl.Int64).to_numpy())
    per_step = float(rows["bytes_per_step"].sum())
    full = None
    if size is not None and per_step > 0:
        last = facts["peak_step"] if facts["peak_step"] is not None else int(rows["last_step"].to_numpy().max())
        full = last + 1 + max(math.floor((size - facts["peak_bytes"]) / per_step), 0)
    told = rows.drop("pool", "example").with_columns(stacks.alias("stack"), full_at_step=pl.lit(full, pl.Int64))
    return absent.rows(told, "memories[*].growth")


def growth_unknown(entry: Row) -> str | None:
    """Why nobody can say what grows with the steps of one rank; None where it can be said."""
    steps = len(entry["steps"])
    if steps > LEAST_STEPS:
        return None
    had = ("none was", "only one was")[steps] if steps < 2 else f"only {steps} were"
    return f"it takes at least {LEAST_STEPS + 1} steps, and {had} recorded"


def activations(known: Explained, pool: int, row: int) -> list[Row]:
    """Activations by module and what checkpointing each would save; the largest savings."""
    return module_activations(known, pool, row).head(MOST_MODULES).to_dicts()


def allocator(trace: Trace, facts: Row, snapshot: Snapshot | None) -> Row | None:
    """The state of the allocator at the end of the recording; None where neither a snapshot nor the recorder tells.

    `outside_bytes` is what is in use on the device beyond what this allocator has reserved: libraries, communication
    buffers, other processes.
    """
    if facts["device_type"] in _HOST:
        return None
    number = max(facts["device"], 0)
    out: Row = dict.fromkeys((*_FRAGMENTS, "retries", "outside_bytes"))
    found = False
    if snapshot is not None:
        rows = fragments(snapshot).filter(pl.col("device") == number).select(_FRAGMENTS).to_dicts()
        found = bool(rows)
        out |= rows[0] if rows else {}
    listed = (trace.meta.capture or {}).get("allocators_at_end")
    for one in listed if isinstance(listed, list) else []:
        if not isinstance(one, dict) or one.get("device") != number:
            continue
        told = {
            key: whole(one.get(key))
            for key in ("allocated_bytes", "reserved_bytes", "free_bytes", "total_bytes", "retries")
        }
        found = True
        for key in ("reserved_bytes", "allocated_bytes"):
            out[key] = out[key] if out[key] is not None else told[key]
        out["retries"] = told["retries"]
        total, free, reserved = told["total_bytes"], told["free_bytes"], told["reserved_bytes"]
        if total is not None and free is not None and reserved is not None:
            out["outside_bytes"] = max(total - free - reserved, 0)
    return out if found else None
