"""The document's entry for a memory timeline: levels by category, and nothing of single blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from traceloom.analyze.allocations.holders import tree_of
from traceloom.analyze.allocations.over_time import instants
from traceloom.errors import UsageError
from traceloom.read.memory_timeline import CATEGORIES, MemoryTimeline
from traceloom.report.absent import Absent

if TYPE_CHECKING:
    from traceloom.report.documents.memory import (
        MemoryCategoryRow,
        MemoryMemoryRow,
        MemoryPartRow,
        MemoryRankRow,
        MemorySeriesRow,
    )

_NONE = "a memory timeline holds levels by category, not single allocations"
_PATHS = (
    "memories[*].largest", "memories[*].growth", "memories[*].activations", "memories[*].allocator",
    "memories[*].capacity_bytes", "memories[*].peak_step", "memories[*].start_bytes", "memories[*].curve.stacks",
    "memories[*].reserved_at_peak_bytes", "ranks[*].lifetimes", "memories[*].categories[*].block_count",
    "memories[*].curve.scopes", "ranks[*].steps", "memories[*].modules", "ranks[*].rank",
)  # fmt: skip


def entry(timeline: MemoryTimeline, at: str, absent: Absent) -> MemoryRankRow:
    """One entry of `ranks`.

    Raises:
        UsageError: slug `bad-instant`, for an instant that only a run with steps has.
    """
    for path in _PATHS:
        absent.say(path, _NONE)
    total = timeline.levels.sum(axis=0)
    times = timeline.time_ns - absent.epoch_ns
    if not total.size or at == "peak":
        index = int(total.argmax()) if total.size else 0
    elif at in ("start", "end"):
        index = 0 if at == "start" else total.size - 1
    elif at.isascii() and at.isdigit():
        index = max(int(np.searchsorted(times, int(at), side="right")) - 1, 0)
    else:
        raise UsageError(
            f"a memory timeline has no instant `{at}`",
            slug="bad-instant",
            hint="give peak, start, end, or a time as 12.5ms",
        )
    peak = int(total.argmax()) if total.size else 0
    rows = instants(total) + 1  # positions in the levels themselves: there is no start before them
    levels = timeline.levels[:, index] if total.size else np.zeros(len(CATEGORIES), dtype=np.int64)
    held = [(name, int(size)) for name, size in zip(CATEGORIES, levels.tolist(), strict=True) if size]
    held.sort(key=lambda pair: (-pair[1], pair[0]))
    whole = max(sum(size for _, size in held), 1)
    parts: list[MemoryPartRow] = [
        {"name": name, "bytes": size, "block_count": None, "fraction": size / whole} for name, size in held
    ]
    curve: list[MemorySeriesRow] = [
        {"name": name, "bytes": level.tolist()}
        for name, level in zip(CATEGORIES, timeline.levels[:, rows], strict=True)
        if level.any()
    ]
    categories: list[MemoryCategoryRow] = [
        {
            "category": name, "evidence": "none" if name == "unknown" else "recorded", "bytes": size,
            "block_count": None, "fraction": size / whole,
        }
        for name, size in held
    ]  # fmt: skip
    tree: list[Any] = tree_of([((name,), size, 0) for name, size in held]).to_dicts()  # as the document has it
    memory: MemoryMemoryRow = {
        "device_type": "device",
        "device": -1,
        "peak_bytes": int(total[peak]) if total.size else 0,
        "peak_time_ns": int(times[peak]) if total.size else 0,
        "peak_step": None,
        "unseen_bytes": 0,
        "start_bytes": None,
        "end_bytes": int(total[-1]) if total.size else 0,
        "allocation_count": timeline.created,
        "free_count": timeline.destroyed,
        "reserved_at_peak_bytes": None,
        "capacity_bytes": None,
        "instant": {"time_ns": int(times[index]) if total.size else 0, "bytes": sum(size for _, size in held)},
        "tree": tree,
        "categories": categories,
        "parts": parts,
        "largest": [],
        "growth": [],
        "modules": [],
        "activations": [],
        "allocator": None,
        "curve": {"time_ns": times[rows].tolist(), "categories": curve, "scopes": curve, "stacks": None},
    }
    return {"rank": None, "path": timeline.path, "memories": [memory], "steps": [], "lifetimes": []}
