"""Types of the report's sections. Written by `scripts/report_schema.py` from report.schema.json."""

# fmt: off
# ruff: noqa: UP013 (a line for each key would make it four times as long)
from typing import TypedDict

MemoryOwnersMemoriesTreeRow = TypedDict("MemoryOwnersMemoriesTreeRow", {
    "node": int, "parent": int | None, "depth": int, "name": str, "path": str, "bytes": int, "self_bytes": int,
    "block_count": int, "fraction": float,
})
MemoryOwnersMemoriesModulesRow = TypedDict("MemoryOwnersMemoriesModulesRow", {
    "name": str, "bytes": int, "block_count": int, "fraction": float,
})
MemoryOwnersMemoriesCategoriesRow = TypedDict("MemoryOwnersMemoriesCategoriesRow", {
    "category": str, "evidence": str, "bytes": int, "block_count": int, "fraction": float,
})
MemoryOwnersMemoriesGrowthRow = TypedDict("MemoryOwnersMemoriesGrowthRow", {
    "site": str, "step_count": int, "period": int, "bytes": int, "bytes_per_step": float, "block_count": int,
    "first_step": int, "last_step": int,
})
MemoryOwnersMemoriesStepsRow = TypedDict("MemoryOwnersMemoriesStepsRow", {
    "step": int, "start_ns": int, "end_ns": int,
})
MemoryOwnersMemoriesCurveCategoriesRow = TypedDict("MemoryOwnersMemoriesCurveCategoriesRow", {
    "name": str, "bytes": list[int],
})
MemoryOwnersMemoriesCurveScopesRow = TypedDict("MemoryOwnersMemoriesCurveScopesRow", {
    "name": str, "bytes": list[int],
})
MemoryOwnersMemoriesCurveStacksRow = TypedDict("MemoryOwnersMemoriesCurveStacksRow", {
    "name": str, "bytes": list[int],
})
MemoryOwnersMemoriesCurveValue = TypedDict("MemoryOwnersMemoriesCurveValue", {
    "time_ns": list[int], "categories": list[MemoryOwnersMemoriesCurveCategoriesRow],
    "scopes": list[MemoryOwnersMemoriesCurveScopesRow], "stacks": list[MemoryOwnersMemoriesCurveStacksRow] | None,
})
MemoryOwnersMemoriesRow = TypedDict("MemoryOwnersMemoriesRow", {
    "rank": int | None, "device_type": str, "device": int, "peak_bytes": int, "peak_time_ns": int,
    "peak_step": int | None, "end_bytes": int, "unseen_bytes": int, "tree": list[MemoryOwnersMemoriesTreeRow],
    "modules": list[MemoryOwnersMemoriesModulesRow], "categories": list[MemoryOwnersMemoriesCategoriesRow],
    "growth": list[MemoryOwnersMemoriesGrowthRow], "steps": list[MemoryOwnersMemoriesStepsRow],
    "curve": MemoryOwnersMemoriesCurveValue | None,
})
MemoryOwnersValue = TypedDict("MemoryOwnersValue", {
    "memories": list[MemoryOwnersMemoriesRow],
})
PerStepKernelsRow = TypedDict("PerStepKernelsRow", {
    "rank": int | None, "name": str, "mean_total_ns": float, "min_total_ns": int, "max_total_ns": int,
    "mean_call_count": float, "min_call_count": int, "max_call_count": int, "step_count": int,
})
PerStepOperatorsRow = TypedDict("PerStepOperatorsRow", {
    "rank": int | None, "name": str, "mean_self_ns": float, "min_self_ns": int, "max_self_ns": int,
    "mean_call_count": float, "min_call_count": int, "max_call_count": int, "step_count": int,
})
PerStepValue = TypedDict("PerStepValue", {
    "kernels": list[PerStepKernelsRow], "operators": list[PerStepOperatorsRow],
})
KindsDevicesRow = TypedDict("KindsDevicesRow", {
    "rank": int | None, "device": int | None, "window_ns": int, "busy_ns": int, "idle_ns": int,
    "kernel_count": int | None, "kernel_ns": int | None, "measured_ns": int | None, "estimated_ns": int | None,
    "sm_efficiency": float | None, "sm_fill": float | None, "occupancy": float | None,
})
KindsJobRow = TypedDict("KindsJobRow", {
    "kind": str, "rank_count": int, "sum_ns": int, "mean_exclusive_ns": float, "min_exclusive_ns": int,
    "max_exclusive_ns": int, "max_rank": int | None,
})
KindsKindsRow = TypedDict("KindsKindsRow", {
    "rank": int | None, "device": int | None, "kind": str, "count": int, "sum_ns": int, "exclusive_ns": int,
    "fraction": float | None,
})
KindsRulesRow = TypedDict("KindsRulesRow", {
    "rank": int | None, "kind": str, "rule": str, "count": int, "sum_ns": int, "fraction": float | None,
})
KindsPerStepRow = TypedDict("KindsPerStepRow", {
    "rank": int | None, "device": int | None, "kind": str, "mean_exclusive_ns": float, "min_exclusive_ns": int,
    "max_exclusive_ns": int, "step_count": int,
})
KindsBoundsRow = TypedDict("KindsBoundsRow", {
    "rank": int | None, "device": int | None, "bound": str, "count": int, "sum_ns": int, "exclusive_ns": int,
    "fraction": float | None,
})
KindsMatrixRow = TypedDict("KindsMatrixRow", {
    "rank": int | None, "matrix_units": str, "count": int, "total_ns": int,
})
KindsKernelsRow = TypedDict("KindsKernelsRow", {
    "rank": int | None, "name": str, "kind": str, "matrix_units": str, "count": int, "total_ns": int,
    "blocks_per_sm": float | None, "sm_fill": float | None, "occupancy": float | None,
})
KindsValue = TypedDict("KindsValue", {
    "devices": list[KindsDevicesRow], "job": list[KindsJobRow], "kinds": list[KindsKindsRow],
    "rules": list[KindsRulesRow], "per_step": list[KindsPerStepRow], "bounds": list[KindsBoundsRow],
    "matrix": list[KindsMatrixRow], "kernels": list[KindsKernelsRow],
})
KernelShapesRowsRow = TypedDict("KernelShapesRowsRow", {
    "rank": int | None, "op": str | None, "shapes": str | None, "types": str | None, "kernel": str, "kind": str,
    "count": int, "total_ns": int, "mean_ns": int, "min_ns": int, "max_ns": int, "fraction": float,
    "mean_total_ns": float | None, "min_total_ns": int | None, "max_total_ns": int | None, "step_count": int | None,
})
KernelShapesRanksRow = TypedDict("KernelShapesRanksRow", {
    "rank": int | None, "row_count": int, "rest_count": int, "rest_ns": int, "total_ns": int,
})
KernelShapesValue = TypedDict("KernelShapesValue", {
    "rows": list[KernelShapesRowsRow], "ranks": list[KernelShapesRanksRow],
})
CopiesKindsRow = TypedDict("CopiesKindsRow", {
    "rank": int | None, "device": int | None, "kind": str, "source_memory": str | None, "target_memory": str | None,
    "by_kernel": bool, "pageable": bool | None, "count": int, "bytes": int | None, "unsized_count": int,
    "total_ns": int, "union_ns": int, "instant_count": int, "instant_bytes": int, "bytes_per_s": float | None,
    "min_bytes_per_s": float | None, "max_bytes_per_s": float | None,
})
CopiesOperatorsRow = TypedDict("CopiesOperatorsRow", {
    "rank": int | None, "op": str | None, "kind": str, "pageable": bool | None, "count": int, "bytes": int | None,
    "total_ns": int,
})
CopiesPerStepRow = TypedDict("CopiesPerStepRow", {
    "rank": int | None, "device": int | None, "kind": str, "mean_call_count": float, "min_call_count": int,
    "max_call_count": int, "mean_copied_bytes": float | None, "min_copied_bytes": int | None,
    "max_copied_bytes": int | None, "mean_total_ns": float, "min_total_ns": int, "max_total_ns": int, "step_count": int,
})
CopiesValue = TypedDict("CopiesValue", {
    "kinds": list[CopiesKindsRow], "operators": list[CopiesOperatorsRow], "per_step": list[CopiesPerStepRow],
})
CountersSeriesRow = TypedDict("CountersSeriesRow", {
    "rank": int | None, "source": str | None, "counter": str, "samples": int, "first_ns": int, "last_ns": int,
    "min": float, "mean": float, "max": float,
})
CountersOperatorsRow = TypedDict("CountersOperatorsRow", {
    "rank": int | None, "op": str | None, "counter": str, "ranges": int, "value": float,
})
CountersRangesRow = TypedDict("CountersRangesRow", {
    "rank": int | None, "range_count": int, "launch_count": int, "unpaired": str | None, "absent": str | None,
})
CountersValue = TypedDict("CountersValue", {
    "series": list[CountersSeriesRow], "operators": list[CountersOperatorsRow], "ranges": list[CountersRangesRow],
})
CriticalPathClassesRow = TypedDict("CriticalPathClassesRow", {
    "class": str, "duration_ns": int, "fraction": float, "piece_count": int,
})
CriticalPathRanksRow = TypedDict("CriticalPathRanksRow", {
    "rank": int | None, "class": str, "duration_ns": int, "fraction": float,
})
CriticalPathNamesRow = TypedDict("CriticalPathNamesRow", {
    "class": str, "name": str, "count": int, "duration_ns": int, "path_ns": int, "path_fraction": float,
    "least_slack_ns": int | None, "near_count": int, "near_ns": int,
})
CriticalPathStretchesRow = TypedDict("CriticalPathStretchesRow", {
    "start_ns": int, "duration_ns": int, "rank": int | None, "where": str | None, "kind": str | None,
    "process": str | None, "thread": str | None, "device": int | None, "stream": int | None, "class": str,
    "class_ns": int, "name": str | None, "name_ns": int | None, "piece_count": int, "first_event": int | None,
    "last_event": int | None, "edge": str | None, "evidence": str | None,
})
CriticalPathLawValue = TypedDict("CriticalPathLawValue", {
    "exact_error_ns": int, "honest_error_ns": int, "honest_error": float, "holds": bool, "residual_ns": int,
    "assumed_ns": int,
})
CriticalPathValue = TypedDict("CriticalPathValue", {
    "classes": list[CriticalPathClassesRow], "ranks": list[CriticalPathRanksRow], "names": list[CriticalPathNamesRow],
    "stretches": list[CriticalPathStretchesRow], "sentence": str, "step": int | None, "start_ns": int, "window_ns": int,
    "near_slack_ns": int, "omitted_stretch_count": int, "law": CriticalPathLawValue,
})
IdleGapsRow = TypedDict("IdleGapsRow", {
    "rank": int | None, "gap": int, "device": int | None, "step": int | None, "start_ns": int, "duration_ns": int,
    "cause": str, "cause_ns": int, "evidence": str | None, "before": int, "before_name": str, "after": int,
    "after_name": str, "launch": int | None, "launch_name": str | None, "host_event": int | None,
    "host_activity": str | None, "stack": list[str] | None, "producer": int | None, "producer_name": str | None,
    "wait": int | None, "wait_name": str | None,
})
LaunchesTotalsRow = TypedDict("LaunchesTotalsRow", {
    "rank": int | None, "device": int | None, "work_count": int, "launch_count": int, "graph_work_count": int,
    "unknown_count": int, "early_count": int, "delay_median_ns": int | None, "delay_p95_ns": int | None,
    "delay_max_ns": int | None, "span_median_ns": int | None, "span_p95_ns": int | None, "span_max_ns": int | None,
    "latency_median_ns": int | None, "latency_p95_ns": int | None, "latency_max_ns": int | None, "late_count": int,
})
LaunchesNamesRow = TypedDict("LaunchesNamesRow", {
    "rank": int | None, "name": str, "launch_count": int, "delay_median_ns": int, "delay_p95_ns": int,
    "delay_max_ns": int, "span_median_ns": int, "span_p95_ns": int, "span_max_ns": int, "latency_median_ns": int,
    "latency_p95_ns": int, "latency_max_ns": int, "late_count": int,
})
LaunchesOperatorsRow = TypedDict("LaunchesOperatorsRow", {
    "rank": int | None, "name": str | None, "launch_count": int, "delay_median_ns": int, "delay_p95_ns": int,
    "delay_max_ns": int, "span_median_ns": int, "span_p95_ns": int, "span_max_ns": int, "latency_median_ns": int,
    "latency_p95_ns": int, "latency_max_ns": int, "late_count": int,
})
LaunchesCallsRow = TypedDict("LaunchesCallsRow", {
    "rank": int | None, "name": str, "call_count": int, "total_ns": int, "median_ns": int, "p95_ns": int, "max_ns": int,
    "long_count": int, "long_ns": int,
})
LaunchesOutliersRow = TypedDict("LaunchesOutliersRow", {
    "rank": int | None, "kind": str, "duration_ns": int, "start_ns": int, "device": int | None, "stream": int | None,
    "step": int | None, "work": int, "work_name": str, "launch": int, "launch_name": str,
})
LaunchesQueuesRow = TypedDict("LaunchesQueuesRow", {
    "rank": int | None, "device": int | None, "stream": int | None, "launch_count": int, "work_count": int,
    "unknown_count": int, "max_launches": int, "mean_launches": float, "max_works": int, "mean_works": float,
    "window_ns": int, "empty_ns": int, "deep_ns": int, "held_count": int, "held_ns": int, "capacity": int | None,
})
LaunchesCurveRow = TypedDict("LaunchesCurveRow", {
    "rank": int | None, "device": int | None, "stream": int | None, "time_ns": int, "launches": int, "works": int,
})
LaunchesDeviceQueuesRow = TypedDict("LaunchesDeviceQueuesRow", {
    "rank": int | None, "device": int | None, "stream": int | None, "launch_count": int, "work_count": int,
    "unknown_count": int, "max_launches": int, "mean_launches": float, "max_works": int, "mean_works": float,
    "window_ns": int, "empty_ns": int, "deep_ns": int, "held_count": int, "held_ns": int, "capacity": int | None,
})
LaunchesDeviceCurveRow = TypedDict("LaunchesDeviceCurveRow", {
    "rank": int | None, "device": int | None, "stream": int | None, "time_ns": int, "launches": int, "works": int,
})
LaunchesBinsRow = TypedDict("LaunchesBinsRow", {
    "rank": int | None, "low_ns": int, "high_ns": int | None, "kernel_count": int, "total_ns": int, "short_count": int,
})
LaunchesShortRow = TypedDict("LaunchesShortRow", {
    "rank": int | None, "name": str, "short_count": int, "kernel_count": int, "short_ns": int, "call_ns": int,
    "kernel_ns": int,
})
LaunchesStepsRow = TypedDict("LaunchesStepsRow", {
    "rank": int | None, "device": int | None, "mean_launch_count": float, "min_launch_count": int,
    "max_launch_count": int, "mean_work_count": float, "min_work_count": int, "max_work_count": int,
    "mean_call_ns": float, "min_call_ns": int, "max_call_ns": int, "mean_short_count": float, "min_short_count": int,
    "max_short_count": int, "mean_held_ns": float, "min_held_ns": int, "max_held_ns": int, "step_count": int,
})
LaunchesValue = TypedDict("LaunchesValue", {
    "totals": list[LaunchesTotalsRow], "names": list[LaunchesNamesRow], "operators": list[LaunchesOperatorsRow],
    "calls": list[LaunchesCallsRow], "outliers": list[LaunchesOutliersRow], "queues": list[LaunchesQueuesRow],
    "curve": list[LaunchesCurveRow], "device_queues": list[LaunchesDeviceQueuesRow],
    "device_curve": list[LaunchesDeviceCurveRow], "bins": list[LaunchesBinsRow], "short": list[LaunchesShortRow],
    "steps": list[LaunchesStepsRow],
})
GraphLaunchesGraphsRow = TypedDict("GraphLaunchesGraphsRow", {
    "rank": int | None, "graph": int, "graph_id": int | None, "evidence": str, "launch_name": str, "replay_count": int,
    "node_count": int, "stream_count": int, "span_median_ns": int, "span_min_ns": int, "span_max_ns": int,
    "work_median_ns": int, "idle_median_ns": int, "call_median_ns": int, "total_ns": int, "deviating_count": int,
    "like": int | None,
})
GraphLaunchesReplaysRow = TypedDict("GraphLaunchesReplaysRow", {
    "rank": int | None, "graph": int, "replay": int, "launch": int, "step": int | None, "start_ns": int, "span_ns": int,
    "work_ns": int, "idle_ns": int, "call_ns": int, "delay_ns": int, "node_count": int, "deviation": str | None,
    "worst_node": int | None, "worst_excess_ns": int | None,
})
GraphLaunchesNodesRow = TypedDict("GraphLaunchesNodesRow", {
    "rank": int | None, "graph": int, "node": int, "node_id": int | None, "name": str, "replay_count": int,
    "mean_ns": int, "min_ns": int, "max_ns": int, "total_ns": int, "gap_mean_ns": int, "example": int,
})
GraphLaunchesValue = TypedDict("GraphLaunchesValue", {
    "graphs": list[GraphLaunchesGraphsRow], "replays": list[GraphLaunchesReplaysRow],
    "nodes": list[GraphLaunchesNodesRow],
})
PatternsJobRow = TypedDict("PatternsJobRow", {
    "kind": str, "rank_count": int, "count": int, "length": int, "launch_count": int, "kernel_ns": int, "gap_ns": int,
    "span_ns": int, "fraction": float, "elementwise": bool, "mean_call_count": float | None, "names": list[str],
})
PatternsRanksRow = TypedDict("PatternsRanksRow", {
    "rank": int | None, "sequence": int, "kind": str, "count": int, "length": int, "launch_count": int,
    "kernel_ns": int, "gap_ns": int, "span_ns": int, "fraction": float, "elementwise": bool, "example": int,
    "names": list[str], "mean_call_count": float | None, "min_call_count": int | None, "max_call_count": int | None,
    "mean_span_ns": float | None, "min_span_ns": int | None, "max_span_ns": int | None, "step_count": int | None,
})
PatternsValue = TypedDict("PatternsValue", {
    "job": list[PatternsJobRow], "ranks": list[PatternsRanksRow], "fusible_count": int,
})
RooflineOperatorsRow = TypedDict("RooflineOperatorsRow", {
    "rank": int | None, "name": str, "shapes": str, "types": str, "count": int, "total_ns": int | None,
    "fraction": float | None, "flops": int, "bytes": int, "intensity": float | None, "flop_rate": float | None,
    "byte_rate": float | None, "arithmetic": str, "evidence": str, "matrix": bool, "peak_flop_rate": float | None,
    "peak_byte_rate": float | None, "roofline_ns": int | None, "roofline_fraction": float | None, "bound": str | None,
})
RooflineStepsRow = TypedDict("RooflineStepsRow", {
    "rank": int | None, "step": int, "duration_ns": int, "complete": bool, "gpu_ns": int, "modelled_ns": int,
    "modelled_fraction": float | None, "flops": int | None, "bytes": int | None, "hardware_flops": int | None,
    "model_flops": int | None, "roofline_ns": int | None, "rest_ns": int | None, "roofline_fraction": float | None,
    "placed_fraction": float | None, "mfu": float | None, "hfu": float | None, "reason": str | None,
})
RooflineWholeRow = TypedDict("RooflineWholeRow", {
    "rank": int | None, "step": int | None, "duration_ns": int, "complete": bool, "gpu_ns": int, "modelled_ns": int,
    "modelled_fraction": float | None, "flops": int | None, "bytes": int | None, "hardware_flops": int | None,
    "model_flops": int | None, "roofline_ns": int | None, "rest_ns": int | None, "roofline_fraction": float | None,
    "placed_fraction": float | None, "mfu": float | None, "hfu": float | None, "reason": str | None,
})
RooflineSpreadRow = TypedDict("RooflineSpreadRow", {
    "rank": int | None, "quantity": str, "mean": float, "min": float, "max": float, "step_count": int,
})
RooflineUnmodelledRow = TypedDict("RooflineUnmodelledRow", {
    "rank": int | None, "name": str, "reason": str, "count": int, "total_ns": int, "fraction": float,
})
RooflineDevicesRow = TypedDict("RooflineDevicesRow", {
    "rank": int | None, "device": int, "name": str | None, "peak": str | None, "reason": str | None,
})
RooflineValue = TypedDict("RooflineValue", {
    "operators": list[RooflineOperatorsRow], "steps": list[RooflineStepsRow], "whole": list[RooflineWholeRow],
    "spread": list[RooflineSpreadRow], "unmodelled": list[RooflineUnmodelledRow], "devices": list[RooflineDevicesRow],
    "timed_on": str,
})
FlameFunctionsRow = TypedDict("FlameFunctionsRow", {
    "rank": int | None, "kind": str, "name": str, "file": str | None, "line": int | None, "calls": int, "self_ns": int,
    "total_ns": int, "self_device_ns": int, "device_ns": int, "mean_self_ns": float | None, "min_self_ns": int | None,
    "max_self_ns": int | None, "step_count": int | None, "main_self_ns": int,
})
FlameTreeRow = TypedDict("FlameTreeRow", {
    "node": int, "parent": int | None, "depth": int, "lane": int, "kind": str, "name": str, "file": str | None,
    "line": int | None, "calls": int, "self_ns": int, "total_ns": int, "self_device_ns": int, "device_ns": int,
})
FlameValue = TypedDict("FlameValue", {
    "functions": list[FlameFunctionsRow], "tree": list[FlameTreeRow], "busy_ns": int, "gpu_work_ns": int,
    "tree_rank": int | None, "tree_frame_count": int,
})
BlockingCallsByKindRow = TypedDict("BlockingCallsByKindRow", {
    "rank": int | None, "kind": str, "count": int, "blocked_ns": int, "idle_after_ns": int | None,
})
BlockingCallsSitesRow = TypedDict("BlockingCallsSitesRow", {
    "rank": int | None, "kind": str, "call": str, "op": str | None, "frame": str | None, "stack": str | None,
    "lane": int, "count": int, "pageable_count": int, "blocked_ns": int, "max_ns": int, "gpu_busy_ns": int | None,
    "gpu_idle_ns": int | None, "idle_after_ns": int | None, "mean_blocked_ns": float | None,
    "min_blocked_ns": int | None, "max_blocked_ns": int | None, "step_count": int | None,
})
BlockingCallsValue = TypedDict("BlockingCallsValue", {
    "by_kind": list[BlockingCallsByKindRow], "sites": list[BlockingCallsSitesRow], "blocked_ns": int,
})
ThreadsThreadsRow = TypedDict("ThreadsThreadsRow", {
    "rank": int | None, "lane": int, "process": str, "thread": str, "name": str, "role": str | None, "says": str | None,
    "event_count": int, "window_ns": int, "busy_ns": int, "active_ns": int, "op_ns": int, "launch_ns": int,
    "blocking_call_ns": int, "python_ns": int, "unobserved_ns": int, "launch_count": int,
})
ThreadsConcurrencyRow = TypedDict("ThreadsConcurrencyRow", {
    "rank": int | None, "threads": int, "ns": int,
})
ThreadsCurveRow = TypedDict("ThreadsCurveRow", {
    "rank": int | None, "start_ns": int, "active": float,
})
ThreadsValue = TypedDict("ThreadsValue", {
    "threads": list[ThreadsThreadsRow], "concurrency": list[ThreadsConcurrencyRow], "curve": list[ThreadsCurveRow],
})
CompileCountsRow = TypedDict("CompileCountsRow", {
    "rank": int | None, "lookup_count": int, "lookup_ns": int, "miss_count": int, "recompile_count": int | None,
    "compile_ns": int, "compilation_count": int, "break_count": int,
})
CompileTimeRow = TypedDict("CompileTimeRow", {
    "rank": int | None, "part": str, "host_ns": int, "device_ns": int, "kernel_count": int,
})
CompileRegionsRow = TypedDict("CompileRegionsRow", {
    "rank": int | None, "region": str, "frame": int, "number": int, "function": str | None, "count": int,
    "host_ns": int, "graph_ns": int, "wrapper_ns": int, "break_ns": int, "graph_break_count": int, "device_ns": int,
    "backward_host_ns": int | None, "backward_device_ns": int | None, "mean_host_ns": float | None,
    "min_host_ns": int | None, "max_host_ns": int | None, "step_count": int | None,
})
CompileGraphsRow = TypedDict("CompileGraphsRow", {
    "rank": int | None, "name": str, "region": str | None, "count": int, "host_ns": int, "device_ns": int,
})
CompileBreaksRow = TypedDict("CompileBreaksRow", {
    "rank": int | None, "region": str, "resumed": str, "place": str | None, "count": int, "between_ns": int,
    "lookup_ns": int, "uncompiled_device_ns": int,
})
CompileCompilationsRow = TypedDict("CompileCompilationsRow", {
    "rank": int | None, "region": str | None, "number": int | None, "recompile": bool | None, "direction": str,
    "step": int | None, "lane": int, "start_ns": int, "duration_ns": int, "dynamo_ns": int, "guards_ns": int,
    "autograd_ns": int, "inductor_ns": int, "code_ns": int,
})
CompileUncompiledRow = TypedDict("CompileUncompiledRow", {
    "rank": int | None, "part": str, "name": str, "count": int, "host_ns": int, "device_ns": int,
})
CompileValue = TypedDict("CompileValue", {
    "counts": list[CompileCountsRow], "time": list[CompileTimeRow], "regions": list[CompileRegionsRow],
    "graphs": list[CompileGraphsRow], "breaks": list[CompileBreaksRow], "compilations": list[CompileCompilationsRow],
    "uncompiled": list[CompileUncompiledRow],
})
CollectivesSummaryRow = TypedDict("CollectivesSummaryRow", {
    "where": str, "kind": str | None, "backend": str | None, "group_size": int | None, "size_bytes": int | None,
    "rank_count": int, "group_count": int, "count": int, "total_ns": int, "min_ns": int, "median_ns": int,
    "max_ns": int, "exposed_ns": int | None, "blocking_ns": int | None, "algorithm_byte_rate": float | None,
    "bus_byte_rate": float | None, "best_bus_byte_rate": float | None, "link": str | None,
    "link_fraction": float | None, "mean_step_ns": float | None, "min_step_ns": int | None, "max_step_ns": int | None,
})
CollectivesCallsRow = TypedDict("CollectivesCallsRow", {
    "rank": int | None, "where": str, "device": int | None, "stream": int | None, "step": int | None,
    "phase": str | None, "start_ns": int, "duration_ns": int, "kind": str | None, "backend": str | None, "name": str,
    "group": str | None, "group_size": int | None, "sequence": int | None, "peer": int | None,
    "element_type": str | None, "in_bytes": int | None, "out_bytes": int | None, "size_bytes": int | None,
    "bus_gb_per_s": float | None, "link": str | None, "link_fraction": float | None, "algorithm": str | None,
    "protocol": str | None, "name_certain": bool | None, "channels": int | None, "exposed_ns": int | None,
    "blocking_ns": int | None,
})
CollectivesValue = TypedDict("CollectivesValue", {
    "summary": list[CollectivesSummaryRow], "calls": list[CollectivesCallsRow], "call_count": int,
})
GroupsRow = TypedDict("GroupsRow", {
    "group": str | None, "description": str | None, "backend": str | None, "group_size": int | None,
    "members": list[int] | None, "stride": int | None, "recorded_ranks": int, "kinds": str | None, "count": int,
    "bytes": int | None, "total_ns": int | None, "exposed_ns": int | None, "role": str, "evidence": str,
})
RankMatrixCellsRow = TypedDict("RankMatrixCellsRow", {
    "source": int, "target": int, "bytes": int, "exact_bytes": int, "duration_ns": int, "count": int,
})
RankMatrixExchangesRow = TypedDict("RankMatrixExchangesRow", {
    "group": str | None, "rank": int | None, "count": int, "sent_bytes": int | None, "received_bytes": int | None,
    "peer_max_over_mean": float | None, "split_count": int,
})
RankMatrixValue = TypedDict("RankMatrixValue", {
    "cells": list[RankMatrixCellsRow], "exchanges": list[RankMatrixExchangesRow], "omitted_cell_count": int,
})
AcrossRanksRanksRow = TypedDict("AcrossRanksRanksRow", {
    "rank": int, "host": str, "collective_count": int, "last_count": int, "wait_ns": int, "blame_ns": int,
    "root_ns": int, "alone_ns": int,
})
AcrossRanksHostsRow = TypedDict("AcrossRanksHostsRow", {
    "host": str, "collective_count": int, "last_count": int, "wait_ns": int, "blame_ns": int, "root_ns": int,
    "alone_ns": int,
})
AcrossRanksReasonsRow = TypedDict("AcrossRanksReasonsRow", {
    "rank": int, "cause": str, "collective_count": int, "waited_ns": int, "late_ns": int, "max_late_ns": int,
})
AcrossRanksCollectivesRow = TypedDict("AcrossRanksCollectivesRow", {
    "instance": int, "step": int | None, "kind": str | None, "group": str | None, "group_size": int | None,
    "sequence": int | None, "size_bytes": int | None, "recorded": int, "whole": bool | None, "evidence": str | None,
    "start_ns": int, "start_skew_ns": int, "end_skew_ns": int, "first_rank": int, "last_rank": int, "alone_ns": int,
    "wait_ns": int, "launch_skew_ns": int | None, "arrival_wait_ns": int | None, "transfer_ns": int,
    "transfer_gb_per_s": float | None, "late_ns": int, "cause": str, "cause_ns": int, "explained_ns": int,
    "unexplained_ns": int, "schedule_ns": int, "root_instance": int, "root_rank": int, "root_cause": str,
})
AcrossRanksChainsRow = TypedDict("AcrossRanksChainsRow", {
    "chain": int, "link": int, "instance": int, "rank": int, "late_ns": int, "cause": str | None, "ns": int,
    "detail": str | None, "follows": int | None,
})
AcrossRanksHeatRow = TypedDict("AcrossRanksHeatRow", {
    "step": int | None, "rank": int, "wait_ns": int, "blame_ns": int, "root_ns": int,
})
AcrossRanksClocksRow = TypedDict("AcrossRanksClocksRow", {
    "host": str, "ranks": int, "offset_ns": int, "drift": float, "residual_ns": int | None, "meetings": int,
})
AcrossRanksUnmatchedRow = TypedDict("AcrossRanksUnmatchedRow", {
    "rank": int, "kind": str | None, "group": str | None, "count": int,
})
AcrossRanksNoticesRow = TypedDict("AcrossRanksNoticesRow", {
    "slug": str, "severity": str, "count": int, "message": str, "rank": int | None, "where": str,
})
AcrossRanksValue = TypedDict("AcrossRanksValue", {
    "ranks": list[AcrossRanksRanksRow], "hosts": list[AcrossRanksHostsRow], "reasons": list[AcrossRanksReasonsRow],
    "collectives": list[AcrossRanksCollectivesRow], "chains": list[AcrossRanksChainsRow],
    "heat": list[AcrossRanksHeatRow], "clocks": list[AcrossRanksClocksRow], "unmatched": list[AcrossRanksUnmatchedRow],
    "sentence": str, "collective_count": int, "collective_ns": int, "wait_ns": int,
    "notices": list[AcrossRanksNoticesRow],
})
SlowStepsStepsRow = TypedDict("SlowStepsStepsRow", {
    "step": int, "duration_ns": int, "rank": int, "rank_count": int, "median_ns": int | None, "limit_ns": int | None,
    "slow": bool, "over_ns": int | None,
})
SlowStepsDifferencesRow = TypedDict("SlowStepsDifferencesRow", {
    "step": int, "rank": int, "class": str, "ns": int, "usual_ns": int, "more_ns": int,
})
SlowStepsValue = TypedDict("SlowStepsValue", {
    "steps": list[SlowStepsStepsRow], "differences": list[SlowStepsDifferencesRow],
})
ImbalanceMeasuresRow = TypedDict("ImbalanceMeasuresRow", {
    "measure": str, "step_count": int, "rank_count": int, "mean": float, "max": float, "max_rank": int, "min": float,
    "min_rank": int, "max_over_mean": float, "worst_step": int | None, "worst_max_over_mean": float, "worst_rank": int,
})
ImbalanceRanksRow = TypedDict("ImbalanceRanksRow", {
    "rank": int, "host": str | None, "compute_ns": float | None, "embedding_ns": float | None,
    "exchanged_bytes": float | None, "tokens": float | None, "memory_bytes": float | None,
})
ImbalanceValue = TypedDict("ImbalanceValue", {
    "measures": list[ImbalanceMeasuresRow], "ranks": list[ImbalanceRanksRow],
})
PipelineStagesRow = TypedDict("PipelineStagesRow", {
    "rank": int, "pipeline": int, "stage": int, "stage_count": int, "step_count": int, "mean_window_ns": float,
    "mean_compute_ns": float, "mean_bubble_ns": float, "min_bubble_ns": int, "max_bubble_ns": int,
    "bubble_fraction": float,
})
PipelineStepsRow = TypedDict("PipelineStepsRow", {
    "step": int | None, "rank": int, "pipeline": int, "stage": int, "window_ns": int, "compute_ns": int,
    "other_ns": int, "warm_up_ns": int, "steady_ns": int, "drain_ns": int, "bubble_ns": int, "in_pairs_ns": int,
})
PipelineValue = TypedDict("PipelineValue", {
    "stages": list[PipelineStagesRow], "steps": list[PipelineStepsRow],
})
AntiPatternsJobRow = TypedDict("AntiPatternsJobRow", {
    "pattern": str, "checked": bool, "rank_count": int, "match_count": int | None, "host_ns": int | None,
    "gpu_ns": int | None, "evidence": str | None, "reason": str | None, "advice": str,
})
AntiPatternsPatternsRow = TypedDict("AntiPatternsPatternsRow", {
    "rank": int | None, "pattern": str, "checked": bool, "match_count": int | None, "host_ns": int | None,
    "gpu_ns": int | None, "evidence": str | None, "reason": str | None, "advice": str,
})
AntiPatternsMatchesRow = TypedDict("AntiPatternsMatchesRow", {
    "rank": int | None, "pattern": str, "event": int, "name": str, "start_ns": int, "duration_ns": int, "gpu_ns": int,
    "step": int | None, "thread": int | None, "evidence": str, "detail": str,
})
AntiPatternsValue = TypedDict("AntiPatternsValue", {
    "job": list[AntiPatternsJobRow], "patterns": list[AntiPatternsPatternsRow], "matches": list[AntiPatternsMatchesRow],
})
InferenceStepsRow = TypedDict("InferenceStepsRow", {
    "rank": int | None, "number": int, "framework": str, "kind": str, "event": int, "name": str, "start_ns": int,
    "duration_ns": int, "requests": int | None, "context_requests": int | None, "context_tokens": int | None,
    "context_kv_tokens": int | None, "generation_requests": int | None, "generation_tokens": int | None,
    "generation_kv_tokens": int | None, "gpu_ns": int, "gpu_span_ns": int | None, "work_count": int,
    "graph_work_count": int, "lag_ns": int | None, "between_ns": int | None,
})
InferenceMixRow = TypedDict("InferenceMixRow", {
    "rank": int | None, "kind": str, "step_count": int, "mean_duration_ns": int, "min_duration_ns": int,
    "max_duration_ns": int, "mean_gpu_ns": int, "min_gpu_ns": int, "max_gpu_ns": int, "total_gpu_ns": int,
    "gpu_fraction": float, "mean_requests": float | None, "context_tokens": int | None, "generation_tokens": int | None,
    "between_median_ns": int | None, "between_p95_ns": int | None, "between_max_ns": int | None,
})
InferenceRatesRow = TypedDict("InferenceRatesRow", {
    "rank": int | None, "what": str, "count": int, "window_ns": int, "per_second": float, "evidence": str,
})
InferenceOperatorsRow = TypedDict("InferenceOperatorsRow", {
    "rank": int | None, "op_name": str | None, "module": str | None, "kernel_count": int, "gpu_ns": int,
})
InferenceNodesRow = TypedDict("InferenceNodesRow", {
    "rank": int | None, "graph": int, "node": int, "name": str, "replay_count": int, "total_ns": int, "op": int | None,
    "op_name": str | None, "module": str | None, "evidence": str | None, "reason": str | None,
})
InferenceValue = TypedDict("InferenceValue", {
    "steps": list[InferenceStepsRow], "mix": list[InferenceMixRow], "rates": list[InferenceRatesRow],
    "operators": list[InferenceOperatorsRow], "nodes": list[InferenceNodesRow], "mapped_fraction": float | None,
})
