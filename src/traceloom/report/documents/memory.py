"""Types of the memory document. Written by `scripts/report_schema.py` from memory.schema.json."""

# fmt: off
# ruff: noqa: UP013 (a line for each key would make it four times as long)
from typing import TypedDict

MemoryMemoryInstantValue = TypedDict("MemoryMemoryInstantValue", {
    "time_ns": int, "bytes": int,
})
MemoryNodeRow = TypedDict("MemoryNodeRow", {
    "node": int, "parent": int | None, "depth": int, "name": str, "path": str, "bytes": int, "self_bytes": int,
    "block_count": int, "fraction": float,
})
MemoryCategoryRow = TypedDict("MemoryCategoryRow", {
    "category": str, "evidence": str, "bytes": int, "block_count": int | None, "fraction": float,
})
MemoryPartRow = TypedDict("MemoryPartRow", {
    "name": str, "bytes": int, "block_count": int | None, "fraction": float,
})
MemoryLargestRow = TypedDict("MemoryLargestRow", {
    "name": str, "owner": str | None, "bytes": int, "category": str, "backward": bool, "time_ns": int | None,
    "end_ns": int | None, "step": int | None,
})
MemoryGrowthRow = TypedDict("MemoryGrowthRow", {
    "site": str, "step_count": int, "period": int, "bytes": int, "bytes_per_step": float, "block_count": int,
    "first_step": int, "last_step": int, "stack": str | None, "full_at_step": int | None,
})
MemoryActivationRow = TypedDict("MemoryActivationRow", {
    "module": str, "call_count": int, "bytes": int, "block_count": int, "saved_bytes": int, "host_ns": int,
    "device_ns": int,
})
MemoryAllocatorRow = TypedDict("MemoryAllocatorRow", {
    "reserved_bytes": int | None, "allocated_bytes": int | None, "requested_bytes": int | None,
    "pending_bytes": int | None, "free_bytes": int | None, "largest_free_bytes": int | None, "split_bytes": int | None,
    "segment_count": int | None, "retries": int | None, "outside_bytes": int | None, "fragmentation": float | None,
})
MemorySeriesRow = TypedDict("MemorySeriesRow", {
    "name": str, "bytes": list[int],
})
MemoryCurveRow = TypedDict("MemoryCurveRow", {
    "time_ns": list[int], "categories": list[MemorySeriesRow], "scopes": list[MemorySeriesRow],
    "stacks": list[MemorySeriesRow] | None,
})
MemoryMemoryRow = TypedDict("MemoryMemoryRow", {
    "device_type": str, "device": int, "peak_bytes": int, "peak_time_ns": int, "peak_step": int | None,
    "unseen_bytes": int, "start_bytes": int | None, "end_bytes": int, "allocation_count": int, "free_count": int,
    "reserved_at_peak_bytes": int | None, "sizes": str, "peak_recorded": bool, "capacity_bytes": int | None,
    "instant": MemoryMemoryInstantValue, "tree": list[MemoryNodeRow], "categories": list[MemoryCategoryRow],
    "parts": list[MemoryPartRow], "modules": list[MemoryPartRow], "largest": list[MemoryLargestRow],
    "growth": list[MemoryGrowthRow], "activations": list[MemoryActivationRow], "allocator": MemoryAllocatorRow | None,
    "curve": MemoryCurveRow,
})
MemoryRankStepsRow = TypedDict("MemoryRankStepsRow", {
    "step": int, "start_ns": int, "end_ns": int,
})
MemoryRankLifetimesRow = TypedDict("MemoryRankLifetimesRow", {
    "from_ns": int, "to_ns": int, "block_count": int, "bytes": int,
})
MemoryRankRow = TypedDict("MemoryRankRow", {
    "rank": int | None, "path": str, "memories": list[MemoryMemoryRow], "steps": list[MemoryRankStepsRow],
    "lifetimes": list[MemoryRankLifetimesRow],
})
MemoryDeviceRow = TypedDict("MemoryDeviceRow", {
    "device_type": str, "device": int | None, "allocated_bytes": int, "reserved_bytes": int, "free_bytes": int,
    "total_bytes": int, "retries": int, "outside_bytes": int,
})
MemoryEndKindsRow = TypedDict("MemoryEndKindsRow", {
    "name": str, "bytes": int, "fraction": float,
})
MemoryAdviceRow = TypedDict("MemoryAdviceRow", {
    "action": str, "text": str, "bytes": int | None, "why": str,
})
MemoryEndRow = TypedDict("MemoryEndRow", {
    "rank": int | None, "path": str, "evidence": str, "time_ns": int | None, "step": int | None,
    "asked_bytes": int | None, "message": str, "where": str | None, "stack": list[str],
    "devices": list[MemoryDeviceRow], "bytes": int, "kinds": list[MemoryEndKindsRow], "tree": list[MemoryNodeRow],
    "advice": list[MemoryAdviceRow],
})
MemoryJobRow = TypedDict("MemoryJobRow", {
    "device_type": str, "count": int, "sum_of_peaks_bytes": int, "largest_peak_bytes": int, "smallest_peak_bytes": int,
    "imbalance": float,
})
MemoryNoticesRow = TypedDict("MemoryNoticesRow", {
    "slug": str, "severity": str, "count": int, "message": str, "rank": int | None, "where": str,
})
MemoryAbsentRow = TypedDict("MemoryAbsentRow", {
    "path": str, "reason": str,
})
MemoryDocument = TypedDict("MemoryDocument", {
    "format": str, "version": int, "traceloom": str, "name": str, "epoch_ns": str, "sentence": str, "by": str,
    "at": str, "ranks": list[MemoryRankRow], "out_of_memory": list[MemoryEndRow], "job": list[MemoryJobRow],
    "notices": list[MemoryNoticesRow], "absent": list[MemoryAbsentRow],
})
