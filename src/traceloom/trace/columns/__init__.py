"""The catalogue of columns, looked up by name and table.

Tables take their headings and units from here, pages their tooltips, and the published schemas and
docs/reference/report-columns.md their descriptions. A key is the name of a column; where the column
has another meaning in one table, the key is the path of the table's rows in the document followed
by the name (`copies.kinds.bytes_per_s`).
"""

from traceloom.trace.columns import device, run, workload
from traceloom.trace.columns.declare import (
    NO_DEVICE,
    NO_GROUP,
    NO_MESSAGE,
    NO_RANK,
    NO_SIZE,
    NO_STEP,
    UNITS as UNITS,
    Column as Column,
    declare_per_step,
)

IDENTITY: dict[str, Column] = {
    "rank": Column("count", "Rank", "rank of the process in the job", NO_RANK),
    "device": Column("count", "GPU", "number of the GPU in its process", NO_DEVICE),
    "device_type": Column(
        "text", "Memory", "kind of memory: cpu, cuda, ...; cpu-shared is memory of loader workers"
    ),
    "stream": Column(
        "count", "Stream", "number of the stream", "the file does not number the stream"
    ),
    "process": Column(
        "text", "Process", "process id, as recorded", "the file does not number this process"
    ),
    "thread": Column(
        "text", "Thread", "thread id, as recorded", "the file does not number this thread"
    ),
    "lane": Column("count", "Lane", "row of the timeline that it is on"),
    "host": Column("text", "Host", "name of the machine", "the file does not name its host"),
    "host_name": Column("text", "Host", "name of the machine", "the file does not name its host"),
    "step": Column("count", "Step", "number of the step", NO_STEP),
    "phase": Column(
        "text",
        "Phase",
        "part of the step: loading, forward, backward, optimizer, communication, other",
    ),
    "activity": Column(
        "text", "Activity", "what the thread does: op, launch, blocking_call, python, unobserved"
    ),
    "category": Column(
        "text", "Category", "category of the work: compute, communication or memory"
    ),
    "rule": Column(
        "text", "Rule", "rule that decided the category", "no rule is needed to tell what it is"
    ),
    "cause": Column("text", "Cause", "cause of the time"),
    "op": Column(
        "text",
        "Operator",
        "innermost operator around the launch",
        "no operator is recorded around the launch",
    ),
    "kernel": Column("name", "Kernel", "name of the kernel"),
    "shapes": Column("name", "Shapes", "shapes of its inputs, as JSON text"),
    "types": Column("text", "Types", "element types of its inputs, as JSON text"),
    "module": Column("text", "Module", "module around it"),
    "file": Column(
        "text", "File", "file of a Python frame", "only Python frames have a place in a file"
    ),
    "line": Column(
        "count", "Line", "line in the file", "only Python frames have a place in a file"
    ),
    "path": Column("name", "Path", "names from the root to it"),
    "node": Column("count", "Node", "number of the row"),
    "parent": Column("count", "Parent", "number of the row above it", "null is the root"),
    "depth": Column("count", "Depth", "rows above it; 0 at the root"),
    "event": Column("count", "Event", "its row in the events of the trace"),
    "example": Column("count", "Example", "row in the events of the trace that shows it"),
    "where": Column("text", "Where", "device: kernels; host: calls that run on the host"),
    "evidence": Column("text", "Evidence", "how it is known"),
    "reason": Column("text", "Why", "why it is not known"),
    "advice": Column("text", "Advice", "what to do about it"),
    "detail": Column("name", "What was seen", "what was seen, in words"),
    "stack": Column("name", "Stack", "Python frames around it, outermost first"),
    "group": Column("text", "Group", "name of the process group", NO_GROUP),
    "group_size": Column("count", "Ranks", "ranks of the group", NO_SIZE),
    "sequence": Column(
        "count",
        "Sequence",
        "number within the group",
        "the recording does not number its collectives",
    ),
    "backend": Column("text", "Back end", "library that communicates", "the name does not say"),
    "element_type": Column(
        "text", "Type", "element type", "the recording does not say the element type"
    ),
}

TIMES: dict[str, Column] = {
    "start_ns": Column("time", "At", "start, after `epoch_ns`"),
    "end_ns": Column("time", "End", "end, after `epoch_ns`"),
    "time_ns": Column("time", "Time", "instant, after `epoch_ns`"),
    "duration_ns": Column("time", "Time", "from its start to its end"),
    "total_ns": Column("time", "Total", "summed durations"),
    "sum_ns": Column("time", "Sum", "summed durations; what runs at once counts several times"),
    "union_ns": Column("time", "Union", "time in which at least one of them runs"),
    "mean_ns": Column("time", "Mean", "mean duration of one, rounded down"),
    "median_ns": Column("time", "Median", "median duration of one"),
    "min_ns": Column("time", "Min", "shortest duration of one"),
    "max_ns": Column("time", "Max", "longest duration of one"),
    "p95_ns": Column("time", "95 %", "95th percentile of the durations"),
    "host_ns": Column("time", "Host", "host time in it"),
    "device_ns": Column(
        "time", "GPU", "summed durations of the GPU work launched in it or in what it calls"
    ),
    "self_device_ns": Column(
        "time", "GPU self", "summed durations of the GPU work launched in it, not in what it calls"
    ),
    "kernel_ns": Column("time", "Kernel time", "summed durations of kernels"),
    "window_ns": Column("time", "Window", "from the first to the last event"),
    "busy_ns": Column("time", "Busy", "time in which at least one kernel, copy or fill runs"),
    "idle_ns": Column("time", "Idle", "time of the window in which no GPU work runs"),
    "compute_ns": Column("time", "Compute", "time in which a compute kernel runs"),
    "communication_ns": Column(
        "time", "Communication", "time in which a communication kernel runs, hidden or not"
    ),
    "memory_ns": Column("time", "Memory", "time in which a copy or fill runs"),
    "exposed_communication_ns": Column(
        "time", "Exposed communication", "communication while no compute runs"
    ),
    "exposed_memory_ns": Column(
        "time", "Exposed memory", "copies and fills while neither compute nor communication runs"
    ),
    "edge_idle_ns": Column(
        "time", "At the edges", "idle time before the first and after the last GPU work"
    ),
    "edge_idle_before_ns": Column(
        "time", "Before", "time before the first GPU work, not part of the window"
    ),
    "edge_idle_after_ns": Column(
        "time", "After", "time after the last GPU work, not part of the window"
    ),
    "exposed_ns": Column("time", "Exposed", "no compute runs beside it"),
    "lag_ns": Column("time", "Lag", "from the end of the step to the end of its last GPU work"),
    "device_period_ns": Column(
        "time",
        "GPU period",
        "from the end of the last GPU work of the step before to that of this one",
        "the step launched no GPU work",
    ),
    "gap_ns": Column(
        "time", "Gaps inside", "time between its pieces of work in which nothing runs"
    ),
    "delay_ns": Column(
        "time", "Delay", "from the end of the launch call to the start of the work, at least 0"
    ),
    "lookup_ns": Column("time", "Lookup", "host time in lookups of compiled code"),
    "low_ns": Column("time", "From", "least duration in the bin"),
    "high_ns": Column(
        "time", "Below", "durations in the bin are below it", "the last bin has no upper bound"
    ),
    "roofline_ns": Column(
        "time", "At the peaks", "time that its FLOPs or bytes need at the peaks of the device"
    ),
    **declare_per_step("exclusive_ns", "time", "exclusive time"),
}

COUNTS: dict[str, Column] = {
    "count": Column("count", "Count", "how many of them"),
    "calls": Column("count", "Calls", "how often it was called"),
    "call_count": Column("count", "Calls", "how many calls"),
    "event_count": Column("count", "Events", "events recorded"),
    "gpu_work_count": Column(
        "count", "GPU work", "kernels, copies and fills that start in this time"
    ),
    "launch_count": Column("count", "Launches", "launch calls whose GPU work is recorded"),
    "work_count": Column("count", "Work", "pieces of GPU work"),
    "step_count": Column("count", "Steps", "whole steps in which it occurs"),
    "replay_count": Column("count", "Replays", "replays of the graph"),
    "gap_count": Column("count", "Gaps", "gaps between GPU work"),
    "allocation_count": Column("count", "Allocations", "blocks allocated in the recording"),
    "free_count": Column("count", "Frees", "blocks freed in the recording"),
    "short_count": Column("count", "Short", "kernels shorter than their launch call"),
    "graph_work_count": Column("count", "In graphs", "pieces of GPU work of graph launches"),
    **declare_per_step("call_count", "count", "calls", "Calls"),
}

AMOUNTS: dict[str, Column] = {
    "size_bytes": Column(
        "bytes", "Message", "size of the message that bandwidth is defined on", NO_MESSAGE
    ),
    "peak_bytes": Column("bytes", "Peak", "most bytes held at any instant"),
    "start_bytes": Column(
        "bytes", "Start", "bytes held at the start", "the allocator's own total was not recorded"
    ),
    "end_bytes": Column("bytes", "End", "bytes held at the end"),
    "unseen_bytes": Column(
        "bytes", "Unseen", "bytes held before the recording whose allocation nobody saw"
    ),
    "self_bytes": Column("bytes", "Its own", "held by no row below it"),
    "allocated_bytes": Column(
        "bytes", "Allocated", "bytes that the allocator has given out, as it rounds them"
    ),
    "reserved_bytes": Column("bytes", "Reserved", "bytes that the allocator has from the device"),
    "peak_time_ns": Column("time", "Peak at", "instant of the peak, after `epoch_ns`"),
    "peak_step": Column(
        "count", "Peak in step", "step of the peak", "the peak is outside all steps"
    ),
    "flop_rate": Column("flop_rate", "FLOP/s", "FLOPs achieved per second"),
    "byte_rate": Column("byte_rate", "B/s", "bytes of the minimum traffic moved per second"),
}

COLUMNS: dict[str, Column] = {
    **IDENTITY,
    **TIMES,
    **COUNTS,
    **AMOUNTS,
    **run.HEADER_COLUMNS,
    **run.RANK_COLUMNS,
    **run.SECTION_COLUMNS,
    **run.FINDING_COLUMNS,
    **device.GPU_WORK_COLUMNS,
    **device.CRITICAL_PATH_COLUMNS,
    **device.LAUNCH_COLUMNS,
    **device.ROOFLINE_COLUMNS,
    **run.HOST_COLUMNS,
    **run.INFERENCE_COLUMNS,
    **device.COLLECTIVE_COLUMNS,
    **device.ACROSS_RANKS_COLUMNS,
    **run.MEMORY_COLUMNS,
    **workload.REPLAY,
    **workload.SIMULATION,
}


def find_column(name: str, path: str = "") -> Column:
    """Returns the declaration of a column: the most specific one for the rows at `path` or at an
    enclosing path, else the general one.

    Raises:
        KeyError: There is none.
    """
    prefix = path
    while prefix and f"{prefix}.{name}" not in COLUMNS:
        prefix = prefix.rpartition(".")[0]
    declared = COLUMNS.get(f"{prefix}.{name}" if prefix else name)
    if declared is None:
        raise KeyError(f"no column `{name}` of `{path}` is declared in traceloom.trace.columns")
    return declared
