"""Columns of runs, ranks, host, findings."""

from traceloom.trace.columns.declare import (
    NO_KIND,
    NO_MESSAGE,
    NO_RANK,
    Column,
    declare_per_step,
    declare_times,
)

_NO_BACKWARD_REASON = (
    "no backward pass was recorded, or its operators are not linked to their forward"
)
_NO_STEPS_REASON = "the trace holds no whole step, or the region is in none"
_NOTICE_COLUMNS = {
    "count": Column("count", "Count", "how often it occurs"),
    "rank": Column(
        "count", "Rank", "rank that the notice is about", "the notice is about the whole run"
    ),
    "where": Column("text", "Where", "file, line or event that it is about"),
}
_NOTICE_PATH_PREFIXES = ("", "across_ranks.", "memory_json.", "simulation_json.", "replay_json.")

HEADER_COLUMNS: dict[str, Column] = {
    "format": Column("text", "Format", "name of the document format"),
    "version": Column("count", "Version", "version of the document format"),
    "traceloom": Column("text", "Traceloom", "version of the program that wrote the document"),
    "name": Column("name", "Name", "its name, as recorded"),
    "epoch_ns": Column(
        "text",
        "Epoch",
        "zero of all start and end times, as text; Unix time where the file's clock is",
    ),
    "sentence": Column("text", "Answer", "the answer in a sentence"),
    "answer.step_ns": Column("time", "Step", "median duration of the whole steps of all ranks"),
    "answer.whole_ns": Column(
        "time",
        "Whole",
        "time of all devices, or of all main threads, in all whole steps; parts add up",
    ),
    "answer.parts.label": Column("text", "Part", "what the time was spent on, in words"),
    "answer.parts.kind": Column("text", "Kind", "what the time was spent on, as a stable name"),
    "answer.parts.fraction": Column("share", "Share", "of the whole"),
    "ns": Column("time", "Time", "time of this part"),
    "inputs.path": Column("name", "File", "path of the file"),
    "inputs.kind": Column("text", "Kind", "format of the file"),
    "inputs.host": Column("text", "Host", "name of the machine", "the file does not name its host"),
    "world_size": Column(
        "count",
        "World size",
        "ranks in the job",
        "the file does not say how many ranks the job has",
    ),
    "inputs.events": Column("count", "Events", "complete events kept"),
    "slug": Column("text", "Notice", "stable name, an anchor in the reference of messages"),
    "severity": Column("text", "Severity", "how grave it is"),
    "message": Column("name", "Says", "what is the matter, in a sentence"),
    **{
        f"{above}notices.{key}": declared
        for above in _NOTICE_PATH_PREFIXES
        for key, declared in _NOTICE_COLUMNS.items()
    },
    "notices.affects.part": Column("text", "Part", "key, or path, in this document"),
    "notices.affects.how": Column("text", "How", "in which way this part is weaker"),
    "absent.path": Column("text", "Path", "JSON path of what is null or empty; [*] is any entry"),
    "absent.reason": Column("text", "Reason", "why it is unknown"),
    "runs.name": Column("name", "Run", "name of the run: its folder or file"),
    "runs.ranks": Column("count", "Ranks", "recorded ranks"),
    "runs.window_ns": Column(
        "time", "Window", "from the first to the last event of the run", "the run has no events"
    ),
    "runs.steps": Column("count", "Steps", "recorded steps"),
    "runs.events": Column("count", "Events", "complete events of all ranks"),
    "command": Column("text", "Command", "command line that reports this run alone"),
}

RANK_COLUMNS: dict[str, Column] = {
    "ranks.rank": Column("count", "Rank", "rank of the process in the job", NO_RANK),
    "ranks.path": Column("name", "File", "path of the file"),
    "ranks.start_ns": Column("time", "At", "start of the first event, after `epoch_ns`"),
    "ranks.event_count": Column("count", "Events", "complete events of the process"),
    "ranks.device": Column("count", "GPU", "number of the GPU in its process"),
    "ranks.devices.name": Column(
        "text", "Name", "model of the GPU", "the file does not name the device"
    ),
    "ranks.devices.start_ns": Column("time", "At", "start of the first GPU work, after `epoch_ns`"),
    "ranks.devices.window_ns": Column("time", "Window", "from the first to the last GPU work"),
    "ranks.devices.kernel_count": Column("count", "Kernels", "kernels that start in this time"),
    "ranks.steps.step": Column("count", "Step", "number of the step"),
    "ranks.steps.start_ns": Column("time", "At", "start of the step, after `epoch_ns`"),
    "ranks.steps.duration_ns": Column(
        "time", "Time", "from its start to the start of the next step"
    ),
    "ranks.steps.complete": Column("text", "Complete", "whether the recording holds all of it"),
    "ranks.steps.devices.name": Column(
        "text", "Name", "model of the GPU", "the file does not name the device"
    ),
    "ranks.steps.devices.window_ns": Column(
        "time", "Window", "part of the step from its first to its last GPU work"
    ),
    "ranks.steps.devices.kernel_count": Column(
        "count", "Kernels", "kernels that start in the step"
    ),
    "ranks.host.threads.name": Column("name", "Thread", "name of the thread"),
    "ranks.host.threads.busy_ns": Column(
        "time", "Busy", "time in which anything recorded runs on the thread"
    ),
    "ranks.host.threads.event_count": Column("count", "Events", "events of the thread"),
    "ranks.host.threads.window_ns": Column(
        "time", "Window", "from the first to the last event of any thread"
    ),
    "ranks.host.threads.main": Column(
        "text", "Main", "whether it is the thread that runs the steps"
    ),
    "ranks.host.account.ns": Column(
        "time", "Time", "time of the thread in this step, phase and activity"
    ),
    "ranks.process_number": Column(
        "count", "Process", "number of the process, from 0; windows of one process share it"
    ),
    "ranks.step_times.clock": Column(
        "text",
        "Clock",
        "whose time the steps are: device (`device_period_ns`) where the host runs ahead, else host",
    ),
    "ranks.step_times.count": Column("count", "Steps", "complete steps"),
    "ranks.step_times.median_ns": Column("time", "Median", "median duration of the complete steps"),
    "ranks.step_times.min_ns": Column("time", "Min", "duration of the shortest complete step"),
    "ranks.step_times.max_ns": Column("time", "Max", "duration of the longest complete step"),
    "ranks.step_times.spread_fraction": Column(
        "share", "Spread", "distance of the quartiles over the median"
    ),
    "ranks.step_times.evidence": Column("text", "Evidence", "how steps were recognised"),
    "ranks.gpu_account.window": Column(
        "text", "Of", "steps: all steps; gpu_work: first to last GPU work of each device"
    ),
    "ranks.gpu_account.devices.name": Column(
        "text", "Name", "model of the GPU", "the file does not name the device"
    ),
    "ranks.gpu_account.devices.window_ns": Column(
        "time", "Window", "what the parts of the account add up to"
    ),
}

SECTION_COLUMNS: dict[str, Column] = {
    "kernels.name": Column("name", "Name", "name of the kernel, copy or fill"),
    "kernels.kind": Column("text", "Kind", "kernel, copy or fill"),
    "kernels.count": Column("count", "Count", "how often it ran"),
    "kernels.fraction": Column("share", "Share", "of the summed durations of all GPU work"),
    "kernels.ranks": Column("count", "Ranks", "ranks that ran it"),
    "operators.name": Column("name", "Operator", "name of the operator"),
    "operators.count": Column("count", "Calls", "how often it was called"),
    "operators.self_ns": Column(
        "time", "Self", "host time in the operator but outside the operators it calls"
    ),
    "operators.total_ns": Column("time", "Total", "host time in the operator and in what it calls"),
    "operators.mean_ns": Column("time", "Mean", "mean duration of a call, rounded down"),
    "operators.fraction": Column("share", "Share", "of the self time of all operators"),
    "operators.ranks": Column("count", "Ranks", "ranks that called it"),
    "operators.kernel_count": Column(
        "count", "Kernels", "kernels launched in it or in what it calls"
    ),
    "modules.name": Column("name", "Module", "name of the module or annotation"),
    "modules.kind": Column("text", "Kind", "kind of the region: module, annotation or scope"),
    "modules.count": Column("count", "Calls", "how often it ran in the forward pass"),
    "modules.host_ns": Column("time", "Host", "host time of the forward pass in it"),
    "modules.self_host_ns": Column(
        "time", "Self host", "host time of the forward pass in it, outside the rows below it"
    ),
    "modules.device_ns": Column("time", "GPU", "GPU work launched in its forward pass"),
    "modules.self_device_ns": Column(
        "time", "Self GPU", "GPU work launched in its forward pass, outside the rows below it"
    ),
    "modules.kernel_count": Column("count", "Kernels", "kernels of its forward pass"),
    **{
        f"modules.{part}_{name}": Column(unit, title, f"{what} {of}", _NO_BACKWARD_REASON)
        for part, of in (
            ("backward", "of the backward pass of its operators"),
            ("recompute", "of forward work that activation checkpointing repeats"),
        )
        for name, unit, title, what in (
            ("host_ns", "time", "Host", "host time"),
            ("self_host_ns", "time", "Self host", "host time, outside the rows below it,"),
            ("device_ns", "time", "GPU", "GPU work"),
            ("self_device_ns", "time", "Self GPU", "GPU work, outside the rows below it,"),
            ("kernel_count", "count", "Kernels", "kernels"),
        )
    },
    "modules.recompute_count": Column(
        "count", "Repeated", "calls that activation checkpointing repeats", _NO_BACKWARD_REASON
    ),
    **declare_per_step(
        "modules.all_host_ns",
        "time",
        "host time of forward, backward and repeated work",
        unknown=_NO_STEPS_REASON,
    ),
    **declare_per_step(
        "modules.all_device_ns",
        "time",
        "GPU work of forward, backward and repeated work",
        unknown=_NO_STEPS_REASON,
    ),
    "modules.step_count": Column(
        "count", "Steps", "whole steps in which the region occurs", _NO_STEPS_REASON
    ),
    "communication.collectives.kind": Column(
        "text", "Kind", "all_reduce, all_gather, ...", NO_KIND
    ),
    "communication.collectives.group_description": Column(
        "text", "For", "description of the group", "it has none"
    ),
    "communication.collectives.bytes": Column(
        "bytes", "Bytes", "sum of the sizes of the messages", NO_MESSAGE
    ),
    "communication.collectives.exposed_ns": Column(
        "time", "Exposed", "time that no compute hides, over all devices"
    ),
    "communication.collectives.ranks": Column("count", "Ranks", "ranks that called it"),
    "communication.collectives.count": Column("count", "Count", "kernels, or calls on the host"),
    "communication.ranks.devices.device": Column(
        "count", "GPU", "number of the GPU in its process"
    ),
    "communication.ranks.devices.count": Column("count", "Count", "communication kernels"),
    "communication.ranks.devices.total_ns": Column(
        "time", "Total", "summed durations of communication kernels"
    ),
    "communication.ranks.devices.union_ns": Column(
        "time", "Union", "time in which a communication kernel runs"
    ),
    "communication.ranks.devices.exposed_ns": Column(
        "time", "Exposed", "of it, time in which no compute runs"
    ),
    "memory.device": Column("count", "GPU", "number of the device; null for the host"),
    "memory.evidence": Column(
        "text", "Evidence", "totals of the allocator, or sums of allocations and frees"
    ),
    "memory.curve.time_ns": Column("time", "Time", "instants, after `epoch_ns`"),
    "memory.curve.allocated_bytes": Column("bytes", "Allocated", "bytes given out at each instant"),
    "memory.curve.reserved_bytes": Column(
        "bytes", "Reserved", "bytes that the allocator has from the device at each"
    ),
    "data_loading.total_ns": Column(
        "time", "Waits", "time in which the program waits for the data loader"
    ),
    "data_loading.waits.name": Column("name", "Call", "call that waits for the next batch"),
    "data_loading.waits.thread": Column(
        "count", "Thread", "thread id, as recorded", "the file does not number this thread"
    ),
    "data_loading.waits.maker": Column(
        "text", "Made by", "who makes the batch: the thread itself, or worker processes"
    ),
    "data_loading.gpu_idle_ns": Column(
        "time", "GPU idle", "part of the wait in which no device had any work"
    ),
    "data_loading.steps.wait_ns": Column(
        "time", "Wait", "time of the step spent waiting for the data loader"
    ),
    "data_loading.steps.fraction": Column(
        "share", "Share", "of the step", "no loader was recorded in this step"
    ),
    "data_loading.steps.bottleneck": Column(
        "text",
        "Bottleneck",
        "whether the wait is at least 5 % of the step, and the GPU was idle in half of it or more",
    ),
    "data_loading.spent.part": Column("text", "On", "what the waiting thread did"),
    "data_loading.spent.ns": Column("time", "Time", "time of the wait spent on it"),
}

FINDING_COLUMNS: dict[str, Column] = {
    "findings.slug": Column("text", "Finding", "stable name of the rule"),
    "findings.title": Column("text", "Finding", "what is the matter"),
    "findings.severity": Column("text", "Severity", "high, medium or low"),
    "findings.saving_ns": Column(
        "time", "Saves", "time that would be saved of a step", "it is about memory, not time"
    ),
    "findings.saving_fraction": Column(
        "share", "Saves", "of the step", "it is about memory, not time"
    ),
    "findings.saving_bytes": Column(
        "bytes", "Saves", "memory that would be free", "it is about time, or only a risk"
    ),
    "findings.saving_low_ns": Column(
        "time", "At least", "time that would be saved of the step where it saves least"
    ),
    "findings.saving_high_ns": Column(
        "time", "At most", "time that would be saved of the step where it saves most"
    ),
    "findings.step_count": Column(
        "count", "Steps", "steps in which it was evaluated; the saving is of the middle one"
    ),
    "findings.lower_bound": Column(
        "text", "Lower bound", "whether it may save more, as threads wait for what is not recorded"
    ),
    "findings.alternatives.slug": Column("text", "Finding", "stable name of its rule"),
    "findings.alternatives.alone_ns": Column(
        "time", "Alone", "time saved where the other is not fixed"
    ),
    "findings.alone_ns": Column(
        "time", "Alone", "time saved if only this were done", "it is about memory, not time"
    ),
    "findings.risk": Column(
        "text", "Risk", "what may fail because of it", "nothing fails because of it"
    ),
    "findings.confidence": Column("number", "Confidence", "how sure the rule is, from 0 to 1"),
    "findings.list": Column(
        "text", "List", "time (ordered by saving) or memory (by risk and bytes)"
    ),
    "findings.learn_more": Column("text", "Learn more", "address of the page about it"),
    "findings.change": Column(
        "text", "Change", "change that was evaluated, for `traceloom whatif`"
    ),
    "findings.evidence.what": Column("text", "What", "what the evidence is"),
    "findings.evidence.start_ns": Column(
        "time", "At", "start, after `epoch_ns`", "it is no single moment"
    ),
    "findings.evidence.duration_ns": Column(
        "time", "Time", "how long it lasts", "it is no single moment"
    ),
    "findings.evidence.lane": Column(
        "count", "Lane", "row of the timeline", "it is on no lane of its own"
    ),
    "findings.evidence.count": Column("count", "Count", "how many such things there are"),
    "findings.evidence.total_ns": Column(
        "time", "Total", "summed durations of all of them", "it is a single thing"
    ),
    "findings.host_ns": Column(
        "time",
        "Host",
        "time in which the host is busy with it, over all ranks",
        "it is not about what the host does",
    ),
    "findings.frames.name": Column("name", "Frame", "function that holds host time of the finding"),
    "findings.frames.file": Column(
        "name", "File", "file of the function, as recorded", "built-in functions have none"
    ),
    "findings.frames.line": Column(
        "count", "Line", "line where the function begins", "built-in functions have none"
    ),
    "findings.frames.time_ns": Column(
        "time", "Time", "host time of the finding that the function holds"
    ),
    "findings.frames.share": Column("share", "Share", "of the host time of the finding"),
    "findings.frames.inside": Column(
        "name", "Mostly", "what it calls that takes at least half of that", "nothing does"
    ),
    "findings.frames.inside_ns": Column(
        "time", "Of it", "time of what it calls that takes most", "nothing does"
    ),
    "findings.frames.rank": Column(
        "count", "Rank", "rank on which it holds longest", "only one rank was recorded"
    ),
    "findings.frames.rank_count": Column("count", "Ranks", "ranks on which it holds any of it"),
    "findings_ground.stacks": Column("text", "Stacks", "whether Python frames were recorded"),
    "findings_ground.step": Column("count", "Step", "step that was looked at"),
    "findings_ground.whole_ns": Column(
        "time", "Of", "duration that savings are fractions of, without what recording cost"
    ),
    "findings_ground.basis": Column("text", "Of", "what the savings are of, in words"),
    "findings_ground.law": Column(
        "text", "Law", "how the linked graph gives the measured times back, in words"
    ),
    "findings_ground.holds": Column(
        "text", "Holds", "whether re-timing from recorded delays gives the step back exactly"
    ),
    "findings_ground.exact_error_ns": Column(
        "time", "Exact error", "error of the step re-timed from recorded delays"
    ),
    "findings_ground.honest_error": Column(
        "share", "Honest error", "error of the step re-timed from usual delays"
    ),
    "findings_ground.unit": Column("text", "Unit", "what was looked at, such as a step, in words"),
    "findings_ground.point_error": Column(
        "share", "Point error", "95 % of all instants are off by at most this share of it"
    ),
    "findings_ground.limit": Column("text", "Limit", "what savings leave out, in words"),
    "findings_ground.residual_share": Column(
        "share", "Residual", "time that the graph does not explain, of the step"
    ),
    "findings_ground.host_ratio": Column(
        "number", "Recording", "length of a recorded step over that of an unrecorded one"
    ),
    "findings_ground.abstentions.slug": Column(
        "text", "Rule", "stable name of a rule that was skipped"
    ),
}

HOST_COLUMNS: dict[str, Column] = {
    "flame.busy_ns": Column(
        "time", "Busy", "time in which anything is recorded on the host threads"
    ),
    "gpu_work_ns": Column("time", "GPU work", "summed duration of the GPU work"),
    "tree_rank": Column("count", "Rank", "rank whose call stacks `tree` shows", NO_RANK),
    "tree_frame_count": Column("count", "Paths", "paths of that rank, those left out included"),
    "flame.kind": Column("text", "Kind", "thread, Python frame, module, operator, launch, ..."),
    "flame.name": Column("name", "Frame", "name of the frame: function, module, operator or call"),
    "flame.self_ns": Column("time", "Self", "time in which the frame is innermost"),
    "flame.total_ns": Column("time", "Total", "with what it calls; calls of itself count once"),
    "flame.device_ns": Column("time", "GPU", "GPU work launched in it or in what it calls"),
    "main_self_ns": Column("time", "On main", "time in which it is innermost on the main thread"),
    **declare_per_step("flame.self_ns", "time", "time in which it is innermost", "Self per step"),
    "blocked_ns": Column("time", "Blocked", "host time in the calls"),
    "blocking_calls.kind": Column(
        "text", "Kind", "what the call waits for: item, copy_to_host, synchronize, ..."
    ),
    "call": Column("text", "Call", "name of the call"),
    "blocking_calls.op": Column("text", "Operators", "operators around the call, outermost first"),
    "frame": Column("text", "Frame", "innermost Python frame of the program"),
    "blocking_calls.count": Column("count", "Calls", "calls that wait"),
    "pageable_count": Column("count", "Pageable", "calls that copy from or to pageable memory"),
    "blocking_calls.max_ns": Column("time", "Longest", "longest call"),
    "gpu_busy_ns": Column(
        "time", "GPU busy", "part of the wait in which GPU work ran", "no GPU work was recorded"
    ),
    "gpu_idle_ns": Column(
        "time", "GPU idle", "part of the wait in which no GPU work ran", "no GPU work was recorded"
    ),
    "idle_after_ns": Column(
        "time",
        "Idle after",
        "time without GPU work from the return to the next work or wait",
        "no GPU work was recorded",
    ),
    **declare_per_step("blocked_ns", "time", "host time in the calls"),
    "threads.threads.name": Column("text", "Thread", "name of the thread"),
    "threads.threads.role": Column(
        "name", "What for", "what the thread is for", "no recorded event says it"
    ),
    "says": Column(
        "text", "Told by", "name on the thread that tells its role", "no single name says it"
    ),
    "threads.threads.busy_ns": Column("time", "Busy", "time in which any event is open"),
    "active_ns": Column("time", "Active", "something is recorded, and it does not wait"),
    "op_ns": Column("time", "Operators", "in operators"),
    "launch_ns": Column("time", "Runtime", "calls of the GPU's runtime that do not wait"),
    "blocking_call_ns": Column("time", "Waiting", "in calls that wait"),
    "python_ns": Column("time", "Python", "in Python, outside operators and calls of the runtime"),
    "unobserved_ns": Column("time", "Nothing", "nothing is recorded"),
    "threads": Column("count", "Threads", "number of threads that are active at once"),
    "threads.concurrency.ns": Column(
        "time", "Time", "how long exactly so many threads were active"
    ),
    "active": Column("number", "Active", "mean number of active threads"),
    "lookup_count": Column("count", "Lookups", "lookups of compiled code"),
    "miss_count": Column("count", "Misses", "lookups that a compilation followed"),
    "recompile_count": Column(
        "count", "Recompilations", "compilations of a frame that had been compiled before"
    ),
    "compile_ns": Column("time", "Compiling", "summed durations of compilations"),
    "compile.part": Column(
        "text", "Part", "compile, lookup, graph, wrapper, break, outside or unobserved"
    ),
    "compile.device_ns": Column("time", "GPU", "GPU work launched there"),
    "compilation_count": Column("count", "Compilations", "compilations in the window"),
    "compile.counts.break_count": Column("count", "Breaks", "how often a graph broke"),
    "compile.count": Column("count", "Calls", "how often it was called"),
    "compile.kernel_count": Column("count", "Kernels", "kernels launched there"),
    "compile.regions.host_ns": Column(
        "time", "Host", "without compilations, lookups and regions inside it"
    ),
    "region": Column(
        "text", "Region", "frame/compilation: a second number above 0 is a recompilation"
    ),
    "compile.regions.frame": Column("count", "Frame", "number of the compiled frame"),
    "number": Column(
        "count", "Number", "number of the compilation of the frame; above 0 it is a recompilation"
    ),
    "function": Column(
        "name", "Function", "Python function that it runs", "Python stacks were not recorded"
    ),
    "graph_ns": Column("time", "In graphs", "host time in its compiled graphs"),
    "wrapper_ns": Column("time", "Around", "bytecode, prologues and Python around its graphs"),
    "break_ns": Column("time", "Uncompiled", "operators at graph breaks"),
    "graph_break_count": Column("count", "Breaks", "continuations that ran inside it"),
    "backward_host_ns": Column(
        "time", "Backward", "of its graphs", "no backward operator is linked to its forward"
    ),
    "backward_device_ns": Column(
        "time", "Backward GPU", "of its graphs", "no backward operator is linked to its forward"
    ),
    **declare_per_step("host_ns", "time", "host time in it"),
    "compile.graphs.name": Column("name", "Graph", "name of the compiled graph"),
    "compile.breaks.region": Column("text", "In", "region whose graph breaks"),
    "compile.breaks.count": Column("count", "Count", "how often it broke there"),
    "resumed": Column("text", "Resumed by", "continuation that ran after the break"),
    "place": Column(
        "name", "Resumes at", "line at which it resumes", "Python stacks were not recorded"
    ),
    "between_ns": Column(
        "time", "Between", "host time from the end of the graph to the continuation"
    ),
    "compile.breaks.lookup_ns": Column(
        "time", "Lookup", "the part of it that looked the continuation up"
    ),
    "uncompiled_device_ns": Column(
        "time", "GPU", "GPU work launched between graph and continuation"
    ),
    "recompile": Column("text", "Again", "the frame had been compiled before: a guard failed"),
    "direction": Column("text", "Graph", "whether the forward or the backward graph is compiled"),
    "compile.compilations.duration_ns": Column(
        "time", "Time", "duration of the compilation; its stages add up to it"
    ),
    "dynamo_ns": Column("time", "Dynamo", "reading the bytecode, and what is not told apart"),
    "guards_ns": Column("time", "Guards", "building guards"),
    "autograd_ns": Column(
        "time", "Autograd", "back end before Inductor: tracing forward and backward"
    ),
    "inductor_ns": Column("time", "Inductor", "lowering and scheduling"),
    "code_ns": Column("time", "Code", "writing, compiling and loading code"),
    "compile.uncompiled.part": Column("text", "Where", "part that the operator runs in"),
    "compile.uncompiled.name": Column("name", "Operator", "name of the operator"),
}

INFERENCE_COLUMNS: dict[str, Column] = {
    "checked": Column("text", "Checked", "whether the recording can tell"),
    "anti_patterns.job.rank_count": Column("count", "Ranks", "in which it was found"),
    "match_count": Column("count", "Matches", "how often it was found"),
    "anti_patterns.host_ns": Column("time", "Host", "time of the matches"),
    "anti_patterns.gpu_ns": Column("time", "GPU", "GPU work launched in them"),
    "anti_patterns.evidence": Column(
        "text", "Evidence", "correlated: recorded so; inferred: from the order of operators"
    ),
    "anti_patterns.reason": Column(
        "text", "Why", "why it was not checked", "null is a pattern that was checked"
    ),
    "anti_patterns.matches.thread": Column(
        "count", "Thread", "thread id", "the file does not number this thread"
    ),
    "anti_patterns.matches.name": Column("name", "Name", "name of the event"),
    "anti_patterns.matches.duration_ns": Column("time", "Host", "time of the match"),
    "inference.steps.number": Column("count", "Step", "number of the server's step"),
    "framework": Column("text", "Framework", "server that marks the step"),
    "inference.kind": Column("text", "Kind", "what the step does: context, generation or both"),
    "inference.steps.name": Column("name", "Name", "name of the step's annotation"),
    "inference.steps.event": Column(
        "count", "Event", "row of its annotation in the events of the trace"
    ),
    "inference.duration_ns": Column("time", "Host", "duration of the annotation"),
    "requests": Column("count", "Requests", "requests in the batch", "the annotation does not say"),
    "context_requests": Column(
        "count", "Context requests", "requests in their prefill", "the annotation does not say"
    ),
    "context_tokens": Column("count", "Context", "tokens computed", "the annotation does not say"),
    "context_kv_tokens": Column(
        "count", "Context KV", "tokens attended to in prefill", "the annotation does not say"
    ),
    "generation_requests": Column(
        "count", "Generating", "requests that generate", "the annotation does not say"
    ),
    "generation_tokens": Column(
        "count", "Generated", "tokens generated", "the annotation does not say"
    ),
    "generation_kv_tokens": Column(
        "count", "Generation KV", "tokens attended to", "the annotation does not say"
    ),
    "inference.steps.gpu_ns": Column(
        "time", "GPU", "time in which at least one piece of its GPU work runs"
    ),
    "gpu_span_ns": Column(
        "time",
        "GPU span",
        "first start to last end of its GPU work",
        "the step launched no GPU work",
    ),
    "inference.lag_ns": Column(
        "time",
        "Lag",
        "from the end of the annotation to that of its GPU work",
        "the step launched no GPU work",
    ),
    "inference.between_ns": Column(
        "time", "Between tokens", "from the end of the last generating step's work to its own"
    ),
    "inference.mix.step_count": Column("count", "Steps", "steps of this kind"),
    "mean_duration_ns": Column("time", "Mean", "of the host"),
    "min_duration_ns": Column("time", "Min", "of the host, shortest step"),
    "max_duration_ns": Column("time", "Longest", "of the host, longest step"),
    "mean_gpu_ns": Column("time", "GPU", "GPU time of a step, mean"),
    "min_gpu_ns": Column("time", "Min", "GPU time of the step with the least"),
    "max_gpu_ns": Column("time", "Max", "GPU time of the step with the most"),
    "total_gpu_ns": Column("time", "GPU in all", "GPU time of all these steps"),
    "gpu_fraction": Column("share", "Of GPU time", "of the GPU time of all steps"),
    "mean_requests": Column("number", "Requests", "mean number of requests in a step"),
    **declare_times(
        "between", "Between tokens", "from the end of one generating step's work to the next one's"
    ),
    "inference.rates.what": Column("text", "What", "what is counted: tokens or samples"),
    "inference.rates.count": Column("count", "Count", "how many in the window"),
    "inference.rates.window_ns": Column(
        "time", "In", "from the first start to the last end of steps and their work"
    ),
    "per_second": Column("number", "Per second", "count over the window"),
    "inference.rates.evidence": Column(
        "text", "Evidence", "annotation: counted from names; declared: by the user"
    ),
    "op_name": Column("name", "Operator", "operator of the capture that launched it"),
    "inference.module": Column(
        "text", "Module", "module around it", "no module stands around it in the capture"
    ),
    "inference.operators.kernel_count": Column(
        "count", "Kernels", "pieces of GPU work of graph replays"
    ),
    "inference.operators.gpu_ns": Column("time", "GPU time", "summed durations of this work"),
    "inference.nodes.node": Column("count", "Node", "position of the node in the graph"),
    "inference.nodes.name": Column("name", "Kernel", "name of its work"),
    "inference.nodes.op": Column(
        "count", "Operator", "row of the operator in the events of the capture"
    ),
    "inference.nodes.op_name": Column(
        "text", "Operator", "operator of the capture that launched it"
    ),
    "inference.nodes.evidence": Column("text", "Evidence", "how the operator was matched"),
    "inference.nodes.reason": Column(
        "text", "Reason", "why it has no operator", "null is a node that was mapped"
    ),
    "mapped_fraction": Column(
        "share", "Mapped", "share of the time of graph replays that has an operator"
    ),
}

MEMORY_COLUMNS: dict[str, Column] = {
    "memory_owners.device": Column(
        "count", "GPU", "number of the device; negative where there is one only"
    ),
    "memory_owners.end_bytes": Column("bytes", "End", "bytes held at the end of the recording"),
    "memory_owners.name": Column("name", "Module", "name of the module"),
    "memory_owners.memories.tree.name": Column(
        "name", "Scope and operator", "name of the scope or operator"
    ),
    "memory_owners.memories.tree.path": Column("name", "Path", "names from the root to it"),
    "memory_owners.bytes": Column("bytes", "Bytes", "bytes held at the peak"),
    "memory_owners.fraction": Column("share", "Share", "of the peak"),
    "memory_owners.block_count": Column("count", "Blocks", "blocks alive at the peak"),
    "memory_owners.category": Column(
        "text", "Category", "what the memory is for: parameter, gradient, activation, ..."
    ),
    "memory_owners.evidence": Column(
        "text",
        "Evidence",
        "census: the owner was asked; inferred: from where it was made and freed",
    ),
    "site": Column(
        "name",
        "Allocated by",
        "place that allocates, the counter of its name restarting in every step",
    ),
    "memory_owners.memories.growth.step_count": Column(
        "count", "Steps", "steps that left something"
    ),
    "period": Column("count", "Every", "distance of the steps that leave something"),
    "memory_owners.memories.growth.bytes": Column("bytes", "So far", "bytes left in all"),
    "bytes_per_step": Column("bytes", "Per step", "bytes left by a step, mean"),
    "memory_owners.memories.growth.block_count": Column("count", "Blocks", "blocks left in all"),
    "first_step": Column("count", "First step", "first step that left something"),
    "last_step": Column("count", "Last step", "last step that left something"),
    "memory_owners.memories.curve.time_ns": Column("time", "Time", "instants, after `epoch_ns`"),
    "memory_owners.memories.curve.name": Column("name", "Name", "name of the part"),
    "memory_owners.memories.curve.bytes": Column("bytes", "Bytes", "bytes held at each instant"),
    "memory_json.name": Column("name", "Name", "name of what it is about"),
    "memory_json.by": Column("text", "By", "how memory is divided"),
    "memory_json.at": Column("text", "At", "which instant is looked at"),
    "memory_json.bytes": Column("bytes", "Bytes", "bytes held at the instant"),
    "memory_json.fraction": Column("share", "Share", "of the bytes held at the instant"),
    "memory_json.block_count": Column("count", "Blocks", "blocks of memory"),
    "memory_json.category": Column(
        "text", "Category", "what the memory is for: parameter, gradient, activation, ..."
    ),
    "memory_json.evidence": Column(
        "text",
        "Evidence",
        "census: an owner was counted; inferred: from who made and freed it; recorded: a timeline says so",
    ),
    "memory_json.path": Column("name", "File", "path of the file"),
    "memory_json.ranks.memories.tree.path": Column("name", "Path", "names from the root to it"),
    "memory_json.device": Column("count", "GPU", "number of the device"),
    "memory_json.stack": Column("name", "Stack", "Python frames that allocate"),
    "memory_json.ranks.memories.start_bytes": Column(
        "bytes", "Start", "the allocator's total before the recording"
    ),
    "memory_json.ranks.memories.end_bytes": Column(
        "bytes", "End", "bytes held at the end of the recording"
    ),
    "reserved_at_peak_bytes": Column(
        "bytes", "Reserved", "bytes that the allocator had from the device at the peak"
    ),
    "sizes": Column(
        "text", "Sizes", "what bytes are of: `allocated` blocks, or what was `requested`"
    ),
    "peak_recorded": Column(
        "text", "Peak recorded", "false of a snapshot without a history: it shows one moment"
    ),
    "capacity_bytes": Column("bytes", "Capacity", "bytes that the device has in all"),
    "memory_json.ranks.memories.largest.name": Column(
        "name", "Block", "name of the block: who allocated it"
    ),
    "owner": Column("name", "Owner", "tensor that holds the block, as the census names it"),
    "memory_json.ranks.memories.largest.bytes": Column("bytes", "Bytes", "size of the block"),
    "backward": Column("text", "Backward", "whether it is kept for the backward pass"),
    "memory_json.ranks.memories.largest.time_ns": Column(
        "time", "Made at", "when it was allocated, after `epoch_ns`"
    ),
    "memory_json.ranks.memories.largest.end_ns": Column(
        "time", "Freed at", "when it was freed, after `epoch_ns`"
    ),
    "memory_json.ranks.memories.growth.step_count": Column(
        "count", "Steps", "steps that left something"
    ),
    "memory_json.ranks.memories.growth.bytes": Column("bytes", "So far", "bytes left in all"),
    "full_at_step": Column(
        "count", "Full at", "step in which the device is full if it goes on at this rate"
    ),
    "memory_json.ranks.memories.activations.bytes": Column(
        "bytes", "Bytes", "bytes kept for the backward pass, made inside"
    ),
    "saved_bytes": Column(
        "bytes",
        "Saves",
        "what checkpointing the module would free: all but the last block of each call",
    ),
    "memory_json.ranks.memories.activations.host_ns": Column(
        "time", "Host", "host time that computing it again costs"
    ),
    "memory_json.ranks.memories.activations.device_ns": Column(
        "time", "GPU", "GPU time that computing it again costs"
    ),
    "requested_bytes": Column("bytes", "Requested", "bytes that were asked for, before rounding"),
    "pending_bytes": Column("bytes", "Pending", "given back, but still in use by a stream"),
    "free_bytes": Column("bytes", "Free", "reserved bytes that nothing uses"),
    "largest_free_bytes": Column("bytes", "Largest free", "largest free piece"),
    "split_bytes": Column("bytes", "Split", "free bytes in segments that also hold others"),
    "segment_count": Column("count", "Segments", "segments that the allocator has from the device"),
    "retries": Column("count", "Retries", "allocations that worked only after freeing the cache"),
    "outside_bytes": Column("bytes", "Outside", "in use on the device beyond this allocator"),
    "fragmentation": Column("share", "Fragmentation", "1 - largest free piece over all free bytes"),
    "total_bytes": Column("bytes", "Capacity", "bytes that the device has in all"),
    "memory_json.ranks.memories.curve.bytes": Column(
        "bytes", "Bytes", "bytes held at each instant"
    ),
    "memory_json.ranks.lifetimes.bytes": Column(
        "bytes", "Bytes", "bytes of the blocks that lived so long"
    ),
    "from_ns": Column("time", "From", "least lifetime"),
    "to_ns": Column("time", "To", "lifetimes are below it"),
    "action": Column("text", "Action", "stable name of what to try"),
    "text": Column("text", "What to try", "what to try, in words"),
    "memory_json.out_of_memory.advice.bytes": Column(
        "bytes", "Frees", "bytes that would be free at most"
    ),
    "why": Column("text", "Why", "figures that speak for it"),
    "memory_json.out_of_memory.devices.free_bytes": Column(
        "bytes", "Free", "bytes of the device that nobody uses"
    ),
    "memory_json.out_of_memory.time_ns": Column(
        "time", "At", "when memory ran out, after `epoch_ns`"
    ),
    "memory_json.out_of_memory.evidence": Column("text", "Evidence", "census, trace or snapshot"),
    "asked_bytes": Column("bytes", "Asked for", "bytes that were asked for"),
    "memory_json.out_of_memory.where": Column(
        "text", "Where", "innermost frame of the program's own code"
    ),
    "memory_json.out_of_memory.stack": Column("name", "Stack", "Python frames, outermost first"),
    "memory_json.out_of_memory.bytes": Column("bytes", "Alive", "bytes alive when memory ran out"),
    "sum_of_peaks_bytes": Column("bytes", "Sum", "sum of the peaks of all ranks"),
    "largest_peak_bytes": Column("bytes", "Largest", "largest peak over the ranks"),
    "smallest_peak_bytes": Column("bytes", "Smallest", "smallest peak over the ranks"),
    "memory_json.job.count": Column("count", "Count", "memories of this kind"),
    "imbalance": Column(
        "number", "Largest / mean", "largest peak over the mean of the peaks; 1 is even"
    ),
}
