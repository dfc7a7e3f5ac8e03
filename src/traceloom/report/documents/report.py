"""Types of the report document. Written by `scripts/report_schema.py` from report.schema.json."""

# fmt: off
# ruff: noqa: UP013 (a line for each key would make it four times as long)
from typing import Any, TypedDict

from traceloom.report.documents.sections import (
    AcrossRanksValue,
    AntiPatternsValue,
    BlockingCallsValue,
    CollectivesValue,
    CompileValue,
    CopiesValue,
    CountersValue,
    CriticalPathValue,
    FlameValue,
    GraphLaunchesValue,
    GroupsRow,
    IdleGapsRow,
    ImbalanceValue,
    InferenceValue,
    KernelShapesValue,
    KindsValue,
    LaunchesValue,
    MemoryOwnersValue,
    PatternsValue,
    PerStepValue,
    PipelineValue,
    RankMatrixValue,
    RooflineValue,
    SlowStepsValue,
    ThreadsValue,
)

PartRow = TypedDict("PartRow", {
    "label": str, "kind": str, "ns": int, "fraction": float,
})
AnswerValue = TypedDict("AnswerValue", {
    "sentence": str, "step_ns": int | None, "whole_ns": int, "parts": list[PartRow],
})
InputRow = TypedDict("InputRow", {
    "path": str, "kind": str, "rank": int | None, "world_size": int | None, "host": str | None, "events": int,
    "versions": dict[str, str], "settings": dict[str, bool],
})
NoticeAffectsRow = TypedDict("NoticeAffectsRow", {
    "part": str, "how": str,
})
NoticeRow = TypedDict("NoticeRow", {
    "slug": str, "severity": str, "count": int, "message": str, "rank": int | None, "where": str,
    "affects": list[NoticeAffectsRow],
})
DeviceRow = TypedDict("DeviceRow", {
    "device": int, "name": str | None, "start_ns": int, "window_ns": int, "busy_ns": int, "idle_ns": int,
    "compute_ns": int, "communication_ns": int, "memory_ns": int, "exposed_communication_ns": int,
    "exposed_memory_ns": int, "gpu_work_count": int, "kernel_count": int, "kernel_ns": int, "edge_idle_before_ns": int,
    "edge_idle_after_ns": int, "idle_causes": dict[str, int],
})
DeviceTimeRow = TypedDict("DeviceTimeRow", {
    "device": int, "name": str | None, "window_ns": int, "busy_ns": int, "idle_ns": int, "compute_ns": int,
    "communication_ns": int, "memory_ns": int, "exposed_communication_ns": int, "exposed_memory_ns": int,
    "gpu_work_count": int, "kernel_count": int, "kernel_ns": int, "edge_idle_before_ns": int, "edge_idle_after_ns": int,
    "idle_causes": dict[str, int],
})
StepRow = TypedDict("StepRow", {
    "step": int, "name": str, "start_ns": int, "duration_ns": int, "device_period_ns": int | None, "complete": bool,
    "lag_ns": int | None, "launch_count": int, "devices": list[DeviceTimeRow],
})
GpuAccountDevicesRow = TypedDict("GpuAccountDevicesRow", {
    "device": int, "name": str | None, "window_ns": int, "compute_ns": int, "exposed_communication_ns": int,
    "exposed_memory_ns": int, "idle_ns": int, "communication_ns": int, "edge_idle_ns": int,
})
IdleRow = TypedDict("IdleRow", {
    "device": int, "cause": str, "idle_ns": int, "gap_count": int,
})
GpuAccountRow = TypedDict("GpuAccountRow", {
    "window": str, "devices": list[GpuAccountDevicesRow], "idle": list[IdleRow],
})
ThreadRow = TypedDict("ThreadRow", {
    "lane": int, "process": str | None, "thread": str | None, "name": str, "window_ns": int, "busy_ns": int,
    "event_count": int, "main": bool,
})
AccountRow = TypedDict("AccountRow", {
    "lane": int, "step": int | None, "phase": str, "activity": str, "ns": int,
})
RankHostValue = TypedDict("RankHostValue", {
    "threads": list[ThreadRow], "account": list[AccountRow],
})
StepTimesRow = TypedDict("StepTimesRow", {
    "clock": str, "count": int, "median_ns": int, "min_ns": int, "max_ns": int, "spread_fraction": float | None,
    "evidence": str,
})
RankRow = TypedDict("RankRow", {
    "rank": int | None, "process_number": int, "host_name": str | None, "world_size": int | None, "path": str,
    "start_ns": int, "window_ns": int, "event_count": int, "devices": list[DeviceRow], "steps": list[StepRow],
    "outside": list[DeviceTimeRow], "gpu_account": GpuAccountRow | None, "idle": list[IdleRow], "host": RankHostValue,
    "step_times": StepTimesRow | None,
})
KernelRow = TypedDict("KernelRow", {
    "name": str, "category": str, "rule": str | None, "kind": str, "count": int, "total_ns": int, "mean_ns": int,
    "min_ns": int, "max_ns": int, "fraction": float, "ranks": int,
})
OperatorRow = TypedDict("OperatorRow", {
    "name": str, "shapes": str | None, "count": int, "self_ns": int, "total_ns": int, "mean_ns": int,
    "device_ns": int | None, "self_device_ns": int | None, "kernel_count": int | None, "fraction": float, "ranks": int,
})
ModuleRow = TypedDict("ModuleRow", {
    "rank": int | None, "node": int, "parent": int | None, "depth": int, "path": str, "name": str, "kind": str,
    "count": int, "host_ns": int, "self_host_ns": int, "device_ns": int | None, "self_device_ns": int | None,
    "kernel_count": int | None, "backward_host_ns": int | None, "backward_device_ns": int | None,
    "backward_self_host_ns": int | None, "backward_self_device_ns": int | None, "backward_kernel_count": int | None,
    "recompute_host_ns": int | None, "recompute_self_host_ns": int | None, "recompute_device_ns": int | None,
    "recompute_self_device_ns": int | None, "recompute_kernel_count": int | None, "recompute_count": int | None,
    "mean_all_host_ns": float | None, "min_all_host_ns": int | None, "max_all_host_ns": int | None,
    "mean_all_device_ns": float | None, "min_all_device_ns": int | None, "max_all_device_ns": int | None,
    "step_count": int | None,
})
CollectiveRow = TypedDict("CollectiveRow", {
    "kind": str | None, "group": str | None, "group_description": str | None, "group_size": int | None,
    "element_type": str | None, "where": str, "count": int, "bytes": int | None, "total_ns": int, "mean_ns": int,
    "min_ns": int, "max_ns": int, "exposed_ns": int | None, "ranks": int,
})
CommunicationDeviceRow = TypedDict("CommunicationDeviceRow", {
    "device": int, "count": int, "total_ns": int, "union_ns": int, "exposed_ns": int,
})
CommunicationRanksRow = TypedDict("CommunicationRanksRow", {
    "rank": int | None, "devices": list[CommunicationDeviceRow],
})
CommunicationValue = TypedDict("CommunicationValue", {
    "collectives": list[CollectiveRow], "ranks": list[CommunicationRanksRow],
})
MemoryOfDeviceRow = TypedDict("MemoryOfDeviceRow", {
    "rank": int | None, "device_type": str, "device": int | None, "peak_bytes": int | None, "peak_time_ns": int,
    "start_bytes": int | None, "end_bytes": int | None, "allocation_count": int, "free_count": int, "evidence": str,
})
CurveRow = TypedDict("CurveRow", {
    "rank": int | None, "device_type": str, "device": int | None, "time_ns": list[int], "allocated_bytes": list[int],
    "reserved_bytes": list[int | None],
})
MemoryValue = TypedDict("MemoryValue", {
    "devices": list[MemoryOfDeviceRow], "curve": list[CurveRow],
})
WaitRow = TypedDict("WaitRow", {
    "rank": int | None, "name": str, "start_ns": int, "duration_ns": int, "step": int | None, "thread": int | None,
    "maker": str | None, "gpu_idle_ns": int | None,
})
WaitStepRow = TypedDict("WaitStepRow", {
    "rank": int | None, "step": int | None, "wait_ns": int | None, "fraction": float | None, "gpu_idle_ns": int | None,
    "bottleneck": bool | None,
})
DataLoadingSpentRow = TypedDict("DataLoadingSpentRow", {
    "rank": int | None, "step": int | None, "part": str, "ns": int,
})
DataLoadingValue = TypedDict("DataLoadingValue", {
    "total_ns": int, "waits": list[WaitRow], "steps": list[WaitStepRow], "spent": list[DataLoadingSpentRow],
})
FindingEvidenceRow = TypedDict("FindingEvidenceRow", {
    "what": str, "rank": int | None, "start_ns": int | None, "duration_ns": int | None, "lane": int | None,
    "count": int, "total_ns": int | None,
})
FindingAlternativesRow = TypedDict("FindingAlternativesRow", {
    "slug": str, "title": str, "alone_ns": int,
})
FindingFramesRow = TypedDict("FindingFramesRow", {
    "name": str, "file": str | None, "line": int | None, "time_ns": int, "share": float, "inside": str | None,
    "inside_ns": int | None, "rank": int | None, "rank_count": int,
})
FindingRow = TypedDict("FindingRow", {
    "slug": str, "title": str, "severity": str, "saving_ns": int | None, "saving_fraction": float | None,
    "saving_bytes": int | None, "risk": str | None, "confidence": float, "evidence": list[FindingEvidenceRow],
    "advice": str, "list": str, "alone_ns": int | None, "learn_more": str, "change": str, "saving_low_ns": int | None,
    "saving_high_ns": int | None, "step_count": int, "lower_bound": bool, "alternatives": list[FindingAlternativesRow],
    "host_ns": int | None, "frames": list[FindingFramesRow],
})
RunRow = TypedDict("RunRow", {
    "name": str, "ranks": int, "world_size": int | None, "window_ns": int | None, "steps": int, "events": int,
    "sentence": str, "command": str,
})
AbsentRow = TypedDict("AbsentRow", {
    "path": str, "reason": str,
})
FindingsGroundAbstentionsRow = TypedDict("FindingsGroundAbstentionsRow", {
    "slug": str, "reason": str,
})
FindingsGroundValue = TypedDict("FindingsGroundValue", {
    "step": int | None, "whole_ns": int, "law": str, "holds": bool, "exact_error_ns": int, "honest_error": float,
    "residual_share": float, "host_ratio": float | None, "stacks": bool,
    "abstentions": list[FindingsGroundAbstentionsRow], "basis": str, "unit": str, "point_error": float | None,
    "limit": str | None,
})
ReportDocument = TypedDict("ReportDocument", {
    "format": str, "version": int, "traceloom": str, "name": str, "epoch_ns": str, "answer": AnswerValue,
    "inputs": list[InputRow], "notices": list[NoticeRow], "capture": dict[str, Any] | None, "ranks": list[RankRow],
    "kernels": list[KernelRow], "operators": list[OperatorRow], "modules": list[ModuleRow],
    "communication": CommunicationValue, "memory": MemoryValue, "data_loading": DataLoadingValue | None,
    "findings": list[FindingRow], "runs": list[RunRow], "absent": list[AbsentRow],
    "findings_ground": FindingsGroundValue | None, "memory_owners": MemoryOwnersValue | None,
    "per_step": PerStepValue | None, "kinds": KindsValue | None, "kernel_shapes": KernelShapesValue | None,
    "copies": CopiesValue | None, "counters": CountersValue | None, "critical_path": CriticalPathValue | None,
    "idle_gaps": list[IdleGapsRow] | None, "launches": LaunchesValue | None,
    "graph_launches": GraphLaunchesValue | None, "patterns": PatternsValue | None, "roofline": RooflineValue | None,
    "flame": FlameValue | None, "blocking_calls": BlockingCallsValue | None, "threads": ThreadsValue | None,
    "compile": CompileValue | None, "collectives": CollectivesValue | None, "groups": list[GroupsRow] | None,
    "rank_matrix": RankMatrixValue | None, "across_ranks": AcrossRanksValue | None, "slow_steps": SlowStepsValue | None,
    "imbalance": ImbalanceValue | None, "pipeline": PipelineValue | None, "anti_patterns": AntiPatternsValue | None,
    "inference": InferenceValue | None,
})
