"""Types of the replay document. Written by `scripts/report_schema.py` from replay.schema.json."""

# fmt: off
# ruff: noqa: UP013 (a line for each key would make it four times as long)
from typing import Any, TypedDict

ReplayWholeRow = TypedDict("ReplayWholeRow", {
    "rank": int, "step_count": int, "pass_count": int, "recorded_ns": int | None, "replayed_ns": int,
    "ratio": float | None, "recorded_cpu_ns": int | None, "replayed_cpu_ns": int, "cpu_ratio": float | None,
    "recorded_ops_ns": int, "replayed_ops_ns": int, "ops_ratio": float | None, "recorded_gpu_ns": int | None,
    "replayed_gpu_ns": int | None, "gpu_ratio": float | None, "peak_bytes": int,
})
ReplaySimulatedRow = TypedDict("ReplaySimulatedRow", {
    "rank": int, "step_count": int, "replayed_ns": int, "simulated_ns": int, "difference": float | None,
})
ReplayCoverageRow = TypedDict("ReplayCoverageRow", {
    "rank": int, "outcome": str, "reason": str | None, "count": int, "recorded_ns": int, "recorded_gpu_ns": int | None,
    "count_share": float, "time_share": float | None, "gpu_share": float | None,
})
ReplayNotRunRow = TypedDict("ReplayNotRunRow", {
    "rank": int, "outcome": str, "reason": str, "name": str, "text": str, "count": int, "recorded_ns": int,
})
ReplayHolesRow = TypedDict("ReplayHolesRow", {
    "rank": int, "name": str, "count": int, "recorded_ns": int,
})
ReplayOpsRow = TypedDict("ReplayOpsRow", {
    "name": str, "shapes": str, "calls": int, "recorded_ns": int, "replayed_ns": int, "lost_ns": int,
    "ratio": float | None, "p10_ratio": float | None, "p50_ratio": float | None, "p90_ratio": float | None,
    "recorded_gpu_ns": int | None, "replayed_gpu_ns": int | None, "gpu_lost_ns": int | None, "gpu_ratio": float | None,
})
ReplayCollectivesRow = TypedDict("ReplayCollectivesRow", {
    "rank": int, "kind": str, "group": str, "group_size": int | None, "asynchronous": bool, "size_bytes": int | None,
    "count": int, "on_gpu": bool, "recorded_ns": int | None, "replayed_ns": int | None, "ratio": float | None,
    "recorded_gb_per_s": float | None, "replayed_gb_per_s": float | None,
})
ReplayContentsRow = TypedDict("ReplayContentsRow", {
    "rank": int, "content": str | None, "evidence": str | None, "count": int, "bytes": int,
})
ReplayNoticesRow = TypedDict("ReplayNoticesRow", {
    "slug": str, "severity": str, "count": int, "message": str, "rank": int | None, "where": str,
})
ReplayDocument = TypedDict("ReplayDocument", {
    "format": str, "version": int, "traceloom": str, "sentence": str, "limits": list[str], "source": str,
    "recorded_torch": str | None, "torch": str | None, "device": str, "pace": str, "whole": list[ReplayWholeRow],
    "machine": str | None, "not_simulated": str | None, "simulated": list[ReplaySimulatedRow],
    "coverage": list[ReplayCoverageRow], "not_run": list[ReplayNotRunRow], "holes": list[ReplayHolesRow],
    "ops": list[ReplayOpsRow], "collectives": list[ReplayCollectivesRow], "contents": list[ReplayContentsRow],
    "long_count": int, "long_ratios": list[float] | None, "environment": dict[str, Any],
    "notices": list[ReplayNoticesRow],
})
