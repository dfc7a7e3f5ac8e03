"""Columns of GPU work and of several ranks."""

from traceloom.trace.columns.declare import (
    NO_KIND,
    NO_RANK,
    NO_SIZE,
    Column,
    declare_per_step,
    declare_times,
)

GPU_WORK_COLUMNS: dict[str, Column] = {
    "per_step.kernels.name": Column("name", "Name", "name of the kernel, copy or fill"),
    "per_step.operators.name": Column("name", "Name", "name of the operator"),
    **declare_per_step(
        "per_step.total_ns", "time", "summed duration of such GPU work launched in a step"
    ),
    **declare_per_step("per_step.self_ns", "time", "host time in the operator itself"),
    "kinds.kind": Column("text", "Kind", "kind of work: gemm, attention, elementwise, copy, ..."),
    "kinds.fraction": Column("share", "Share", "of all summed durations"),
    "kinds.exclusive_ns": Column(
        "time", "Exclusive", "each busy nanosecond given to one kind, in their order of priority"
    ),
    "kinds.rule": Column(
        "text", "Rule", "see the table of rules in the documentation; none: no rule knows the name"
    ),
    "kinds.count": Column("count", "Count", "pieces of GPU work"),
    "kinds.kernels.name": Column("name", "Kernel", "name of the kernel"),
    "kinds.kernels.total_ns": Column("time", "Total", "summed durations of the kernels"),
    "kinds.devices.window_ns": Column("time", "Window", "from the first to the last GPU work"),
    "kinds.devices.kernel_count": Column("count", "Kernels", "kernels that ran"),
    "kinds.devices.measured_ns": Column(
        "time", "Measured", "summed durations of kernels whose blocks per SM are recorded"
    ),
    "kinds.devices.estimated_ns": Column(
        "time", "Estimated", "summed durations of kernels whose occupancy is recorded"
    ),
    "sm_efficiency": Column(
        "share", "SM efficiency", "share of the window's SM time that has a block"
    ),
    "sm_fill": Column("share", "SMs filled", "time-weighted mean of blocks per SM, each at most 1"),
    "occupancy": Column(
        "share", "Occupancy", "time-weighted mean of the estimated achieved occupancy"
    ),
    "blocks_per_sm": Column("number", "Blocks/SM", "time-weighted mean"),
    "matrix_units": Column(
        "text", "Matrix units", "unused: a matrix product on scalar units; none: no matrix product"
    ),
    "kinds.matrix.total_ns": Column("time", "Kernel time", "summed durations of the kernels"),
    "kinds.job.sum_ns": Column("time", "Sum", "summed durations of all ranks"),
    "kinds.job.mean_exclusive_ns": Column(
        "time", "Exclusive", "exclusive time, mean over the ranks"
    ),
    "kinds.job.min_exclusive_ns": Column("time", "Min", "minimum exclusive time over the ranks"),
    "kinds.job.max_exclusive_ns": Column("time", "Max", "maximum exclusive time over the ranks"),
    "kinds.job.max_rank": Column("count", "By rank", "rank with the most", NO_RANK),
    "kinds.job.rank_count": Column("count", "Ranks", "ranks with such work"),
    "bound": Column("text", "Bound by", "what limits it: compute, memory, latency or unknown"),
    "kinds.bounds.exclusive_ns": Column(
        "time", "Exclusive", "each busy nanosecond given to one bound, in their order"
    ),
    "kernel_shapes.count": Column("count", "Count", "pieces of GPU work"),
    "kernel_shapes.kind": Column(
        "text", "Kind", "kind of work: gemm, attention, elementwise, copy, ..."
    ),
    "kernel_shapes.shapes": Column(
        "name", "Input shapes", "input shapes of the operator, as JSON text"
    ),
    "kernel_shapes.fraction": Column("share", "Share", "of all GPU work of the rank"),
    "kernel_shapes.mean_ns": Column("time", "Mean", "of one piece of work"),
    "kernel_shapes.min_ns": Column("time", "Min", "shortest piece of work"),
    "kernel_shapes.max_ns": Column("time", "Max", "longest piece of work"),
    **declare_per_step("kernel_shapes.total_ns", "time", "summed durations"),
    "row_count": Column("count", "Rows", "rows that stand in the table"),
    "rest_count": Column("count", "More rows", "rows that are left out"),
    "rest_ns": Column("time", "Left out", "time of the rows that are left out"),
    "kernel_shapes.ranks.total_ns": Column(
        "time", "Total", "summed durations of all GPU work of the rank"
    ),
    "copies.kind": Column("text", "Direction", "HtoD, DtoH, DtoD, PtoP, HtoH, fill or unknown"),
    "source_memory": Column(
        "text", "From", "kind of memory that is read: pageable, pinned, device, ..."
    ),
    "target_memory": Column(
        "text", "To", "kind of memory that is written: pageable, pinned, device, ..."
    ),
    "by_kernel": Column("text", "By kernel", "whether a kernel copies; its bytes are not recorded"),
    "pageable": Column(
        "text", "Pageable", "whether pageable memory of the host takes part: such copies are staged"
    ),
    "copies.op": Column(
        "name", "Operator", "operator that launched it", "no operator is recorded around the launch"
    ),
    "copies.bytes": Column("bytes", "Bytes", "bytes of those whose size is recorded"),
    "copies.count": Column("count", "Count", "copies or fills"),
    "unsized_count": Column("count", "Without size", "copies whose size is not recorded"),
    "copies.total_ns": Column("time", "Time", "summed durations"),
    "instant_count": Column("count", "Too short", "copies of duration 0, in no bandwidth"),
    "instant_bytes": Column("bytes", "Of the short", "bytes of copies of duration 0"),
    "bytes_per_s": Column(
        "byte_rate", "Bandwidth", "bytes over summed time of the timed copies; 1 GB is 10^9 bytes"
    ),
    "min_bytes_per_s": Column("byte_rate", "Slowest", "bandwidth of the slowest copy"),
    "max_bytes_per_s": Column("byte_rate", "Fastest", "bandwidth of the fastest copy"),
    **declare_per_step("copies.call_count", "count", "copies", "Copies"),
    **declare_per_step("copies.copied_bytes", "bytes", "bytes", "Bytes"),
    **declare_per_step("copies.total_ns", "time", "summed durations", "Time"),
    "counters.series.source": Column("text", "Of", "process or device that the counter is of"),
    "counter": Column("name", "Counter", "name of the counter"),
    "samples": Column("count", "Samples", "values recorded"),
    "first_ns": Column("time", "First", "instant of the first sample, after `epoch_ns`"),
    "last_ns": Column("time", "Last", "instant of the last sample, after `epoch_ns`"),
    "counters.mean": Column("number", "Mean", "mean of the samples"),
    "counters.min": Column("number", "Min", "least sample"),
    "counters.max": Column("number", "Max", "largest sample"),
    "counters.operators.ranges": Column("count", "Kernels", "kernels with counters"),
    "value": Column("number", "Sum", "sum over the kernels"),
    "range_count": Column("count", "Kernels", "kernels with counters"),
    "counters.ranges.launch_count": Column("count", "Launches", "kernel launches recorded"),
    "unpaired": Column("text", "Not joined", "why kernels with counters have no launch"),
    "counters.ranges.absent": Column("text", "Not read", "why the counters could not be read"),
}

CRITICAL_PATH_COLUMNS: dict[str, Column] = {
    "critical_path.step": Column("count", "Step", "number of the step whose path it is"),
    "critical_path.start_ns": Column("time", "From", "start of the step, after `epoch_ns`"),
    "critical_path.window_ns": Column(
        "time", "Length", "duration of the step; what the path adds up to"
    ),
    "critical_path.near_slack_ns": Column(
        "time", "Near", "slack up to which work counts as nearly critical"
    ),
    "critical_path.class": Column(
        "text", "Class", "class of the time, such as compute, launch or communication"
    ),
    "critical_path.duration_ns": Column("time", "Time", "time of the path; adds up to the step"),
    "critical_path.fraction": Column("share", "Share", "of the step"),
    "critical_path.piece_count": Column("count", "Pieces", "pieces of the path"),
    "critical_path.ranks.duration_ns": Column("time", "Time", "time of the path on this rank"),
    "critical_path.names.count": Column(
        "count", "Count", "pieces of work of this name in the step"
    ),
    "critical_path.names.duration_ns": Column(
        "time", "In all", "all of it in the step, on the path or beside it"
    ),
    "path_ns": Column("time", "On the path", "its own time on the path"),
    "path_fraction": Column("share", "Share", "of the step"),
    "least_slack_ns": Column(
        "time", "Least slack", "how much later it could end without the step ending later"
    ),
    "near_count": Column(
        "count", "Count", "pieces of work beside the path whose slack is at most 1 % of the step"
    ),
    "near_ns": Column(
        "time", "Time", "work beside the path whose slack is at most 1 % of the step"
    ),
    "critical_path.stretches.start_ns": Column("time", "From", "start, after `epoch_ns`"),
    "critical_path.stretches.duration_ns": Column("time", "Time", "from its start to its end"),
    "critical_path.stretches.where": Column(
        "text", "Where", "thread or stream that the path runs on"
    ),
    "critical_path.stretches.kind": Column(
        "text", "Kind", "whether it is a thread of the host or a stream of a device"
    ),
    "critical_path.stretches.class": Column("text", "Mostly", "class that takes most of its time"),
    "class_ns": Column("time", "Of it", "time of that class"),
    "critical_path.stretches.name": Column(
        "name", "Longest in it", "name of the work with the most of its time"
    ),
    "name_ns": Column("time", "Of the name", "time of the work of that name"),
    "first_event": Column("count", "First", "row of its first event in the events of the trace"),
    "last_event": Column("count", "Last", "row of its last event in the events of the trace"),
    "edge": Column("text", "Came by", "edge of the graph over which the path came to this lane"),
    "critical_path.stretches.evidence": Column("text", "Known", "how that edge is known"),
    "omitted_stretch_count": Column("count", "Left out", "shortest stretches that are left out"),
    "critical_path.law.exact_error_ns": Column(
        "time", "Exact error", "error of the step re-timed from recorded delays"
    ),
    "critical_path.law.honest_error_ns": Column(
        "time", "Honest error", "error of the step re-timed from usual delays"
    ),
    "critical_path.law.honest_error": Column(
        "share", "Honest error", "the same as a share of the step"
    ),
    "critical_path.law.holds": Column(
        "text", "Holds", "whether re-timing from recorded delays gives the step back exactly"
    ),
    "critical_path.law.residual_ns": Column(
        "time", "Residual", "time that no known cause explains"
    ),
    "critical_path.law.assumed_ns": Column("time", "Assumed", "time that rests on assumed causes"),
    "gap": Column("count", "Gap", "number of the gap"),
    "idle_gaps.duration_ns": Column(
        "time", "Gap", "from the end of the work before to the start of the work after"
    ),
    "idle_gaps.start_ns": Column("time", "At", "start of the gap, after `epoch_ns`"),
    "idle_gaps.cause": Column("text", "Cause", "cause of most of the gap"),
    "idle_gaps.cause_ns": Column("time", "Of it", "the cause's time in the gap"),
    "before": Column(
        "count", "Before", "row of the GPU work before the gap in the events of the trace"
    ),
    "before_name": Column("name", "Work before", "name of the GPU work before the gap"),
    "after": Column(
        "count", "After", "row of the GPU work after the gap in the events of the trace"
    ),
    "after_name": Column("name", "Work after", "name of the GPU work after the gap"),
    "launch": Column("count", "Launch", "row of the launch call in the events of the trace"),
    "launch_name": Column("text", "Call", "name of the launch call"),
    "host_event": Column(
        "count", "Host event", "row of the longest thing that the host did in the cause's time"
    ),
    "host_activity": Column(
        "text", "Host activity", "name of the longest thing that the host did in the cause's time"
    ),
    "producer": Column("count", "Producer", "row of the GPU work that a dependency waited for"),
    "producer_name": Column(
        "text", "Producer", "name of the GPU work that a dependency waited for"
    ),
    "wait": Column("count", "Wait", "row of the wait, or of the call that asked for it"),
    "wait_name": Column("text", "Wait", "name of the wait, or of the call that asked for it"),
}

LAUNCH_COLUMNS: dict[str, Column] = {
    **declare_times("delay", "Delay", "from the end of the launch call to the start of its work"),
    **declare_times("span", "Span", "from the start of the launch call to the start of its work"),
    **declare_times(
        "latency",
        "Latency",
        "start of the work after its call and all earlier work of the stream have ended",
    ),
    "unknown_count": Column("count", "Unknown", "work whose launch is not recorded"),
    "early_count": Column(
        "count", "Early", "work that seems to start before its launch call returned"
    ),
    "late_count": Column("count", "Late", "latency of 100 µs and more"),
    "launches.work_count": Column("count", "Work", "pieces of GPU work"),
    "launches.graph_work_count": Column(
        "count", "In graphs", "pieces of GPU work after the first of their launch"
    ),
    "launches.names.name": Column("name", "Name", "name of the GPU work"),
    "launches.operators.name": Column(
        "name", "Operator", "innermost operator around the launch call"
    ),
    "launches.calls.name": Column("name", "Call", "name of the launch call"),
    "launches.calls.total_ns": Column("time", "Total", "summed durations of the calls"),
    "long_count": Column("count", "Long", "50 µs and more"),
    "long_ns": Column("time", "In long ones", "summed durations of calls of 50 µs and more"),
    "launches.outliers.kind": Column(
        "text", "Kind", "late work, waiting work, long call or full queue"
    ),
    "launches.outliers.duration_ns": Column(
        "time", "Time", "latency of the work, or duration of the call"
    ),
    "work": Column("count", "Work", "row of the GPU work in the events of the trace"),
    "work_name": Column("name", "Work", "name of the GPU work"),
    "launches.stream": Column(
        "count",
        "Stream",
        "without one: all streams of the device",
        "the file does not number the stream",
    ),
    "max_launches": Column("count", "Most pending", "most launches pending at any instant"),
    "mean_launches": Column("number", "Mean", "launches pending, mean over the window"),
    "max_works": Column("count", "Most work pending", "most pieces of work pending at any instant"),
    "mean_works": Column("number", "Mean work", "pieces of work pending, mean over the window"),
    "launches.window_ns": Column(
        "time", "Window", "from the first call or work to the end of the last work"
    ),
    "empty_ns": Column("time", "Empty", "nothing was pending"),
    "deep_ns": Column("time", "Deep", "time with 900 launches or more pending"),
    "held_count": Column("count", "Held up", "launch calls that waited for room"),
    "held_ns": Column("time", "For", "beyond the usual duration of such a call"),
    "capacity": Column(
        "count", "Full at", "launches pending when calls were held up", "no launch call was held up"
    ),
    "launches": Column("count", "Launches", "launches pending from this instant on"),
    "works": Column("count", "Work", "pieces of work pending from this instant on"),
    "launches.bins.kernel_count": Column("count", "Kernels", "kernels with such a duration"),
    "launches.bins.total_ns": Column("time", "Time", "summed durations of these kernels"),
    "launches.bins.short_count": Column("count", "Short", "shorter than their launch call"),
    "launches.short.name": Column("name", "Name", "name of the kernel"),
    "launches.short.kernel_count": Column("count", "Of", "kernels of this name"),
    "short_ns": Column("time", "Kernels", "summed durations of the short kernels"),
    "launches.short.call_ns": Column("time", "Calls", "the calls that launched them"),
    "launches.short.kernel_ns": Column(
        "time", "All kernels", "summed durations of all kernels of this name"
    ),
    **declare_per_step("launches.launch_count", "count", "launches", "Launches"),
    **declare_per_step("launches.work_count", "count", "pieces of GPU work", "Work"),
    **declare_per_step("launches.call_ns", "time", "host time in launch calls", "In calls"),
    **declare_per_step(
        "launches.short_count", "count", "kernels shorter than their launch call", "Short kernels"
    ),
    **declare_per_step(
        "launches.held_ns", "time", "time that full queues held launch calls up", "Held up"
    ),
    "launches.steps.step_count": Column("count", "Steps", "whole steps"),
    "graph": Column("count", "Graph", "number of the graph"),
    "graph_id": Column(
        "count", "Id", "the recorder's id of the graph", "the recorder does not write graph ids"
    ),
    "graph_launches.evidence": Column(
        "text", "Evidence", "correlated: by graph id; inferred: by the sequence of names"
    ),
    "graph_launches.launch_name": Column("text", "Call", "name of the launch call"),
    "graph_launches.graphs.node_count": Column("count", "Nodes", "nodes of most replays"),
    "stream_count": Column("count", "Streams", "streams that it runs on"),
    "graph_launches.graphs.span_median_ns": Column(
        "time", "Replay", "first start to last end, median"
    ),
    "span_min_ns": Column("time", "Min", "first start to last end, shortest replay"),
    "graph_launches.graphs.span_max_ns": Column(
        "time", "Max", "first start to last end, longest replay"
    ),
    "work_median_ns": Column("time", "Work", "summed durations of the work of a replay, median"),
    "idle_median_ns": Column("time", "Idle", "inside the span, median"),
    "call_median_ns": Column("time", "Call", "of the launch, median"),
    "graph_launches.graphs.total_ns": Column("time", "Work", "summed over all replays"),
    "deviating_count": Column("count", "Deviate", "replays that deviate"),
    "like": Column(
        "count",
        "Like",
        "a graph with nearly the same nodes",
        "no other graph has nearly the same nodes",
    ),
    "replay": Column("count", "Replay", "number of the replay of its graph"),
    "graph_launches.start_ns": Column("time", "At", "start of its first work, after `epoch_ns`"),
    "span_ns": Column("time", "Span", "from the first start to the last end"),
    "work_ns": Column("time", "Work", "summed durations of its work"),
    "graph_launches.idle_ns": Column(
        "time", "Idle", "time of the span in which nothing of the replay runs"
    ),
    "graph_launches.call_ns": Column("time", "Call", "duration of the launch call"),
    "graph_launches.replays.node_count": Column("count", "Nodes", "pieces of work of the replay"),
    "deviation": Column(
        "name", "How", "how it differs from the other replays", "null is a replay like the others"
    ),
    "worst_node": Column("count", "Worst node", "node that is most above its median"),
    "worst_excess_ns": Column("time", "By", "above its median"),
    "graph_launches.nodes.node": Column("count", "Node", "position of the node in the graph"),
    "node_id": Column(
        "count", "Id", "the recorder's id of the node", "the recorder does not write graph node ids"
    ),
    "graph_launches.nodes.name": Column("name", "Name", "name of its work"),
    "gap_mean_ns": Column("time", "Gap before", "nothing of the replay ran, mean"),
    "pattern": Column("text", "Pattern", "name of the known pattern"),
    "patterns.kind": Column(
        "text", "Kind", "sequence: of any work; elementwise: of elementwise kernels"
    ),
    "patterns.count": Column("count", "Times", "occurrences without overlap"),
    "length": Column("count", "Kernels", "pieces of GPU work in each"),
    "patterns.launch_count": Column("count", "Launches", "calls that launched them"),
    "patterns.kernel_ns": Column("time", "GPU time", "summed durations of its occurrences"),
    "patterns.span_ns": Column(
        "time", "Span", "from first start to last end, summed over the occurrences"
    ),
    "patterns.fraction": Column("share", "Of all", "of the summed durations of all GPU work"),
    "elementwise": Column("text", "Elementwise", "whether all of its kernels are elementwise"),
    "patterns.rank_count": Column("count", "Ranks", "ranks in which it occurs"),
    "names": Column("name", "Kernels in order", "names of its pieces of work, in order"),
    "fusible_count": Column(
        "count", "Fusible", "kernels fewer, if each elementwise sequence were one kernel"
    ),
    "patterns.ranks.sequence": Column("count", "Sequence", "number of the sequence"),
    **declare_per_step(
        "patterns.call_count", "count", "times", unknown="it does not occur inside a whole step"
    ),
    "patterns.mean_call_count": Column(
        "number", "Per step", "times per whole step", "it does not occur inside a whole step"
    ),
    **declare_per_step(
        "patterns.span_ns",
        "time",
        "first start to last end",
        unknown="it does not occur inside a whole step",
    ),
    "patterns.step_count": Column(
        "count", "Steps", "whole steps with it", "it does not occur inside a whole step"
    ),
}

ROOFLINE_COLUMNS: dict[str, Column] = {
    "roofline.operators.name": Column("name", "Operator", "name of the operator"),
    "roofline.operators.count": Column("count", "Calls", "how often it was called"),
    "roofline.operators.total_ns": Column(
        "time", "GPU time", "summed GPU work of the calls; else host time (`timed_on`)"
    ),
    "roofline.operators.fraction": Column("share", "Share", "of all GPU work"),
    "roofline.operators.flops": Column("flops", "FLOPs", "floating point operations of all calls"),
    "roofline.operators.bytes": Column("bytes", "Bytes", "minimum traffic: every operand once"),
    "intensity": Column(
        "number", "FLOP/B", "FLOPs per byte of the minimum traffic", "no bytes are moved"
    ),
    "arithmetic": Column("text", "Type", "element type whose peak is used"),
    "roofline.operators.evidence": Column(
        "text", "Evidence", "how the element type is known; assumed where nothing tells"
    ),
    "matrix": Column("text", "Matrix", "whether matrix units can do it"),
    "peak_flop_rate": Column("flop_rate", "Peak", "peak of the device for this element type"),
    "peak_byte_rate": Column("byte_rate", "Peak memory", "peak bandwidth of the device's memory"),
    "roofline_fraction": Column(
        "share", "Of roofline", "time at the peaks, with unmodelled work as measured, over the step"
    ),
    "roofline.operators.roofline_fraction": Column(
        "share", "Of roofline", "time at the peaks over measured time"
    ),
    "roofline.step": Column("count", "Step", "number of the step"),
    "roofline.duration_ns": Column("time", "Time", "duration of the step"),
    "complete": Column("text", "Complete", "whether the recording holds all of it"),
    "roofline.gpu_ns": Column("time", "GPU time", "summed durations of the GPU work"),
    "modelled_ns": Column(
        "time", "Modelled", "summed durations of the GPU work with a model of its operator"
    ),
    "modelled_fraction": Column(
        "share", "Modelled", "share of the GPU work with a model of its operator"
    ),
    "roofline.flops": Column("flops", "FLOPs", "of all modelled work"),
    "roofline.bytes": Column("bytes", "Bytes", "minimum memory traffic of all modelled work"),
    "hardware_flops": Column(
        "flops", "Hardware FLOPs", "matrix FLOPs of the modelled work, with repeated ones"
    ),
    "model_flops": Column(
        "flops", "Model FLOPs", "matrix FLOPs of the modelled work, without repeated forward work"
    ),
    "roofline.rest_ns": Column("time", "Rest", "time in which only GPU work off the roofline runs"),
    "placed_fraction": Column("share", "Placed", "share of the GPU work that lies on the roofline"),
    "mfu": Column(
        "share",
        "MFU",
        "matrix FLOPs of the model, without repeated ones, at their peaks, over the step",
    ),
    "hfu": Column("share", "HFU", "matrix FLOPs with repeated ones, at their peaks, over the step"),
    "roofline.reason": Column("text", "Reason", "why a value is unknown", "nothing is missing"),
    "quantity": Column("text", "Quantity", "which quantity of a step it is"),
    "roofline.spread.mean": Column("number", "Mean", "mean over the whole steps"),
    "roofline.spread.min": Column("number", "Min", "in the lowest step"),
    "roofline.spread.max": Column("number", "Max", "in the highest step"),
    "roofline.spread.step_count": Column("count", "Steps", "whole steps"),
    "roofline.unmodelled.name": Column(
        "name", "Operator or kernel", "name of the operator, or of the kernel without one"
    ),
    "roofline.unmodelled.reason": Column("text", "Why", "why there is no model"),
    "roofline.unmodelled.count": Column(
        "count", "Count", "pieces of GPU work; in a trace without any, operators"
    ),
    "roofline.unmodelled.total_ns": Column(
        "time",
        "Time",
        "of the GPU work; in a trace without any, the operators' own time on the host",
    ),
    "roofline.unmodelled.fraction": Column(
        "share",
        "Share",
        "share of the GPU work; in a trace without any, of the time of all operators",
    ),
    "roofline.devices.name": Column(
        "name", "Name", "model of the GPU", "the file does not name the device"
    ),
    "peak": Column("text", "Peaks of", "device whose peaks are used"),
    "roofline.devices.reason": Column(
        "text", "Reason", "why there are no peaks", "the peaks are known"
    ),
    "timed_on": Column("text", "Timed on", "what times are of: gpu, host, or nothing"),
}

COLLECTIVE_COLUMNS: dict[str, Column] = {
    "collectives.kind": Column("text", "Kind", "all_reduce, all_gather, ...", NO_KIND),
    "collectives.call_count": Column("count", "Calls", "calls of all recorded ranks"),
    "collectives.total_ns": Column(
        "time", "Total", "over all recorded ranks, waiting for others included"
    ),
    "group_count": Column("count", "Groups", "different groups"),
    "collectives.summary.group_size": Column("count", "Ranks", "of the group", NO_SIZE),
    "collectives.summary.rank_count": Column("count", "Ranks", "recorded ranks that call it"),
    "blocking_ns": Column("time", "Blocking", "the next compute was submitted and waited for it"),
    "algorithm_byte_rate": Column(
        "byte_rate", "Algorithm bandwidth", "message size over duration, median"
    ),
    "bus_byte_rate": Column(
        "byte_rate", "Bus bandwidth", "median; 1 GB = 10⁹ bytes; waiting included"
    ),
    "best_bus_byte_rate": Column("byte_rate", "Best", "bus bandwidth of the fastest call"),
    "bus_gb_per_s": Column(
        "number", "Bus GB/s", "bus bandwidth over the whole duration, in 10^9 bytes per second"
    ),
    "link": Column("text", "Link", "link that the group communicates over"),
    "link_fraction": Column("share", "Of link", "of the link's peak in one direction"),
    **declare_per_step(
        "step_ns", "time", "of one rank in one whole step", unknown="it occurs in no whole step"
    ),
    "collectives.calls.device": Column(
        "count", "GPU", "number of the GPU in its process", "it runs on the host"
    ),
    "collectives.calls.stream": Column(
        "count", "Stream", "number of the stream", "it runs on the host"
    ),
    "collectives.calls.duration_ns": Column(
        "time", "Duration", "of the call, waiting for others included"
    ),
    "collectives.calls.name": Column("name", "Name", "name of the kernel or call"),
    "peer": Column("count", "Peer", "other rank of a message, or root"),
    "in_bytes": Column(
        "bytes", "In", "bytes that go in", "the recording does not say how much goes in"
    ),
    "out_bytes": Column(
        "bytes", "Out", "bytes that come out", "the recording does not say how much comes out"
    ),
    "algorithm": Column(
        "text", "Algorithm", "by the kernel's name", "the name of the kernel does not say"
    ),
    "protocol": Column(
        "text",
        "Protocol",
        "by the kernel's name; NCCL's kernels serve others too",
        "the name of the kernel does not say",
    ),
    "name_certain": Column("text", "Certain", "whether kernels of that name do nothing else"),
    "channels": Column("count", "Channels", "thread blocks of the kernel"),
    "groups.description": Column(
        "text", "Description", "description of the group", "the group has no description"
    ),
    "members": Column("text", "Members", "ranks of the group"),
    "stride": Column("count", "Stride", "distance of neighbouring members"),
    "recorded_ranks": Column("count", "Recorded", "ranks at hand that call it"),
    "kinds": Column("text", "Kinds", "collectives called in it, the most frequent first"),
    "groups.count": Column("count", "Calls", "of all recorded ranks"),
    "groups.total_ns": Column("time", "Total", "of all recorded ranks, waiting included"),
    "groups.bytes": Column("bytes", "Bytes", "messages of all recorded ranks"),
    "role": Column("text", "Role", "what it is for"),
    "rank_matrix.source": Column("count", "From", "rank that sends"),
    "rank_matrix.target": Column("count", "To", "rank that receives"),
    "rank_matrix.bytes": Column("bytes", "Bytes", "bytes sent"),
    "exact_bytes": Column(
        "bytes", "Recorded", "the part that messages and all-to-all splits say exactly"
    ),
    "rank_matrix.duration_ns": Column(
        "time", "Time", "of calls of the sender, shared like bytes; waiting included"
    ),
    "rank_matrix.count": Column("count", "Calls", "calls between them"),
    "rank_matrix.exchanges.count": Column("count", "Calls", "all-to-alls of the rank in the group"),
    "sent_bytes": Column(
        "bytes", "Sent", "bytes sent", "the recording does not say how much goes in"
    ),
    "received_bytes": Column(
        "bytes", "Received", "bytes received", "the recording does not say how much comes out"
    ),
    "peer_max_over_mean": Column(
        "number",
        "Max ÷ mean",
        "of the bytes to each peer; 1 is even",
        "the recording has no split sizes",
    ),
    "split_count": Column("count", "With splits", "all-to-alls with recorded split sizes"),
    "omitted_cell_count": Column(
        "count", "Left out", "pairs of ranks with the least bytes that are left out"
    ),
}

ACROSS_RANKS_COLUMNS: dict[str, Column] = {
    "across_ranks.collective_count": Column(
        "count", "Collectives", "collectives joined over ranks"
    ),
    "collective_ns": Column(
        "time", "Collectives", "summed time of all ranks in joined collectives"
    ),
    "across_ranks.wait_ns": Column("time", "Waits", "of all ranks"),
    "across_ranks.heat.wait_ns": Column(
        "time", "Own waits", "how long the rank waited for others in the step"
    ),
    "across_ranks.ranks.wait_ns": Column("time", "Own waits", "how long it waited for others"),
    "across_ranks.hosts.wait_ns": Column(
        "time", "Own waits", "how long its ranks waited for others"
    ),
    "across_ranks.ranks.collective_count": Column(
        "count", "Of", "joined collectives that it takes part in"
    ),
    "across_ranks.hosts.collective_count": Column(
        "count", "Of", "joined collectives that it takes part in"
    ),
    "last_count": Column("count", "Last", "collectives at which it came last"),
    "blame_ns": Column("time", "Waited for it", "by others, where it came last"),
    "root_ns": Column("time", "Wait caused", "by others, followed back to where the delay began"),
    "across_ranks.alone_ns": Column(
        "time", "Alone late", "how much later than the last but one, summed"
    ),
    "across_ranks.reasons.rank": Column("count", "Rank", "where the chain of causes ends"),
    "across_ranks.cause": Column("text", "Cause", "what took longer on the last rank"),
    "across_ranks.reasons.collective_count": Column(
        "count", "Collectives", "collectives that it delayed"
    ),
    "waited_ns": Column("time", "Waited", "by the others, for this"),
    "across_ranks.reasons.late_ns": Column("time", "Late", "how late it made the rank, summed"),
    "max_late_ns": Column("time", "Max delay", "how late it made the rank, at most"),
    "instance": Column("count", "Collective", "number of the collective"),
    "across_ranks.kind": Column("text", "Kind", "all_reduce, all_gather, ...", NO_KIND),
    "recorded": Column("count", "Ranks", "recorded ranks of the group"),
    "whole": Column("text", "Whole", "whether all ranks of the group are recorded", NO_SIZE),
    "across_ranks.evidence": Column(
        "text", "Evidence", "how its calls were joined", "it is not known how they were joined"
    ),
    "across_ranks.collectives.start_ns": Column("time", "At", "first arrival, after `epoch_ns`"),
    "start_skew_ns": Column("time", "Skew", "from the first to the last arrival"),
    "end_skew_ns": Column("time", "End skew", "from the first to the last end"),
    "first_rank": Column("count", "First", "rank that arrived first"),
    "last_rank": Column("count", "Last", "rank that arrived last"),
    "across_ranks.collectives.alone_ns": Column(
        "time", "Alone late", "how much later the last came than the last but one"
    ),
    "launch_skew_ns": Column("time", "Not launched", "waits while the last had not launched it"),
    "arrival_wait_ns": Column("time", "Not arrived", "waits while it was launched and not begun"),
    "transfer_ns": Column(
        "time", "Transfer", "median over ranks, from the last arrival to the end"
    ),
    "transfer_gb_per_s": Column(
        "number", "GB/s", "bus bandwidth of the transfer alone", "size or group is not known"
    ),
    "across_ranks.collectives.late_ns": Column(
        "time", "Late by", "against the interquartile range of the others"
    ),
    "across_ranks.collectives.cause": Column(
        "text", "Cause", "main cause of the lateness of the last rank"
    ),
    "across_ranks.collectives.cause_ns": Column("time", "Of it", "lateness by the main cause"),
    "explained_ns": Column("time", "Explained", "lateness that has a cause"),
    "unexplained_ns": Column("time", "Unexplained", "lateness without a cause"),
    "schedule_ns": Column("time", "By schedule", "wait that the order of a pipeline asks for"),
    "root_instance": Column(
        "count", "Root collective", "collective where the chain of causes ends"
    ),
    "root_rank": Column("count", "Root rank", "rank where the chain of causes ends"),
    "root_cause": Column("text", "Cause", "cause where the chain ends"),
    "chain": Column("count", "Collective", "number of the collective that the chain explains"),
    "across_ranks.chains.link": Column(
        "count", "Link", "0 is the last rank there; the next the one it waited for"
    ),
    "across_ranks.chains.instance": Column(
        "count", "At", "number of the collective that the link is about"
    ),
    "across_ranks.chains.late_ns": Column("time", "Late", "how late the rank was there"),
    "across_ranks.chains.cause": Column(
        "text", "Cause", "what took longer on the rank", "small parts together"
    ),
    "across_ranks.chains.ns": Column("time", "Part", "part of the lateness that this cause made"),
    "across_ranks.chains.detail": Column(
        "text", "Detail", "names of what took longer there than elsewhere"
    ),
    "follows": Column(
        "count",
        "Follows",
        "earlier collective that it waited in",
        "the chain does not go on from here",
    ),
    "across_ranks.clocks.ranks": Column("count", "Ranks", "ranks of the host"),
    "offset_ns": Column("time", "Corrected by", "added to the times of the host"),
    "drift": Column("number", "Drift", "ns per ns"),
    "across_ranks.clocks.residual_ns": Column(
        "time",
        "Residual",
        "differences of ends that remain, 95th percentile",
        "the host shares no collective with another",
    ),
    "meetings": Column("count", "Collectives", "that the fit stands on"),
    "across_ranks.unmatched.count": Column("count", "Calls", "calls without a partner"),
    "slow_steps.steps.duration_ns": Column("time", "Duration", "of the rank that took longest"),
    "slow_steps.steps.rank": Column("count", "Rank", "rank that took longest"),
    "slow_steps.steps.rank_count": Column("count", "Ranks", "ranks that hold the step"),
    "slow_steps.steps.median_ns": Column(
        "time", "Median", "median over the steps", "there are no whole steps"
    ),
    "limit_ns": Column("time", "Usual up to", "duration up to which a step is usual"),
    "slow": Column("text", "Slow", "whether it is longer than the others can explain"),
    "over_ns": Column(
        "time", "Over the median", "how much longer than the median", "there are no whole steps"
    ),
    "slow_steps.differences.class": Column("name", "Class", "class of the time of the step"),
    "slow_steps.differences.ns": Column("time", "In this step", "time of the class in this step"),
    "usual_ns": Column("time", "Usual", "median over the steps that are not slow"),
    "more_ns": Column("time", "More", "than usual; the account of a step adds up to its length"),
    "measure": Column("text", "Measure", "quantity whose balance it is"),
    "imbalance.measures.step_count": Column(
        "count", "Steps", "steps that all ranks hold completely"
    ),
    "imbalance.measures.rank_count": Column("count", "Ranks", "ranks where it is known"),
    "imbalance.measures.mean": Column("number", "Mean", "per rank and step"),
    "imbalance.measures.max": Column("number", "Max", "largest mean per step over the ranks"),
    "imbalance.measures.max_rank": Column("count", "on rank", "rank with the most"),
    "imbalance.measures.min": Column("number", "Min", "smallest mean per step over the ranks"),
    "min_rank": Column("count", "on rank", "rank with the least"),
    "max_over_mean": Column("number", "Max ÷ mean", "1 is even"),
    "worst_step": Column("count", "is", "step that is least even", "the traces mark no steps"),
    "worst_max_over_mean": Column("number", "Worst step", "max ÷ mean there"),
    "worst_rank": Column("count", "on rank", "rank with the most in the least even step"),
    "imbalance.ranks.compute_ns": Column(
        "time", "Compute", "time of compute kernels per step", "no GPU work was recorded"
    ),
    "embedding_ns": Column(
        "time",
        "Embedding tables",
        "kernels of embedding tables, per step",
        "no kernels of embedding tables ran",
    ),
    "exchanged_bytes": Column(
        "bytes",
        "Bytes sent in all-to-alls",
        "bytes that go into all-to-alls, per step",
        "no all-to-all was recorded, or not how much was sent",
    ),
    "tokens": Column(
        "number",
        "Tokens",
        "indices looked up in the largest embedding table, per step",
        "shapes were not recorded, or no `aten::embedding` was called",
    ),
    "memory_bytes": Column(
        "bytes", "Memory", "peak of the memory of the device", "allocations were not recorded"
    ),
    "pipeline": Column("count", "Pipeline", "number of the pipeline"),
    "stage": Column("count", "Stage", "stage of the rank in its pipeline, from 0"),
    "stage_count": Column("count", "Stages", "stages of the pipeline"),
    "pipeline.stages.step_count": Column("count", "Steps", "steps that are looked at"),
    "mean_window_ns": Column("time", "Step", "from the first to the last compute of the pipeline"),
    "mean_compute_ns": Column("time", "Compute", "per step"),
    **declare_per_step("bubble_ns", "time", "time with nothing to compute", "Bubble per step"),
    "bubble_fraction": Column("share", "Bubble", "of the step of its pipeline"),
    "pipeline.window_ns": Column(
        "time", "Step", "from the first to the last compute of the pipeline"
    ),
    "pipeline.step": Column("count", "Step", "number of the step", "the traces mark no steps"),
    "pipeline.compute_ns": Column("time", "Compute", "time in which the rank computes"),
    "other_ns": Column("time", "Other communication", "other communication between its computes"),
    "warm_up_ns": Column("time", "Warm-up", "before its first compute"),
    "steady_ns": Column("time", "Between", "neither computing nor in other communication"),
    "drain_ns": Column("time", "Drain", "after its last compute"),
    "bubble_ns": Column("time", "Bubble", "warm-up, between and drain: nothing to compute"),
    "in_pairs_ns": Column("time", "In messages", "the part that it stood in sends and receives"),
}
