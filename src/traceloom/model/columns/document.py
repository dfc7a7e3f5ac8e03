"""Columns of the core of the report: head, ranks, kernels, operators, modules, findings."""

from __future__ import annotations

from traceloom.model.columns.declared import NO_KIND, NO_MESSAGE, NO_RANK, Column, per_step

_NO_BACKWARD = "no backward pass was recorded, or its operators are not linked to their forward"
_NO_STEPS = "the trace holds no whole step, or the region is in none"
_NOTICE = {
    "count": Column("count", "Count", "how often it occurs"),
    "rank": Column("count", "Rank", "rank that the notice is about", "the notice is about the whole run"),
    "where": Column("text", "Where", "file, line or event that it is about"),
}
_WITH_NOTICES = ("", "across_ranks.", "memory_json.", "simulation_json.", "replay_json.")

HEAD: dict[str, Column] = {
    "format": Column("text", "Format", "name of the document format"),
    "version": Column("count", "Version", "version of the document format"),
    "traceloom": Column("text", "Traceloom", "version of the program that wrote the document"),
    "name": Column("name", "Name", "its name, as recorded"),
    "epoch_ns": Column(
        "text", "Epoch", "zero of all start and end times, as text; Unix time where the file's clock is"
    ),
    "sentence": Column("text", "Answer", "the answer in a sentence"),
    "answer.step_ns": Column("time", "Step", "median duration of the whole steps of all ranks"),
    "answer.whole_ns": Column(
        "time", "Whole", "time of all devices, or of all main threads, in all steps; parts add up"
    ),
    "answer.parts.label": Column("text", "Part", "what the time was spent on, in words"),
    "answer.parts.kind": Column("text", "Kind", "what the time was spent on, as a stable name"),
    "answer.parts.fraction": Column("share", "Share", "of the whole"),
    "ns": Column("time", "Time", "time of this part"),
    "inputs.path": Column("name", "File", "path of the file"),
    "inputs.kind": Column("text", "Kind", "format of the file"),
    "inputs.host": Column("text", "Host", "name of the machine", "the file does not name its host"),
    "world_size": Column("count", "World size", "ranks in the job", "the file does not say how many ranks the job has"),
    "inputs.events": Column("count", "Events", "complete events kept"),
    "slug": Column("text", "Notice", "stable name, an anchor in the reference of messages"),
    "severity": Column("text", "Severity", "how grave it is"),
    "message": Column("name", "Says", "what is the matter, in a sentence"),
    **{f"{above}notices.{key}": declared for above in _WITH_NOTICES for key, declared in _NOTICE.items()},
    "notices.affects.part": Column("text", "Part", "key, or path, in this document"),
    "notices.affects.how": Column("text", "How", "in which way this part is weaker"),
    "absent.path": Column("text", "Path", "JSON path of what is null or empty; [*] is any entry"),
    "absent.reason": Column("text", "Reason", "why it is unknown"),
    "runs.name": Column("name", "Run", "name of the run: its folder or file"),
    "runs.ranks": Column("count", "Ranks", "recorded ranks"),
    "runs.window_ns": Column("time", "Window", "from the first to the last event of the run", "the run has no events"),
    "runs.steps": Column("count", "Steps", "recorded steps"),
    "runs.events": Column("count", "Events", "complete events of all ranks"),
    "command": Column("text", "Command", "command line that reports this run alone"),
}

RANKS: dict[str, Column] = {
    "ranks.rank": Column("count", "Rank", "rank of the process in the job", NO_RANK),
    "ranks.path": Column("name", "File", "path of the file"),
    "ranks.start_ns": Column("time", "At", "start of the first event, after `epoch_ns`"),
    "ranks.event_count": Column("count", "Events", "complete events of the process"),
    "ranks.device": Column("count", "GPU", "number of the GPU in its process"),
    "ranks.devices.name": Column("text", "Name", "model of the GPU", "the file does not name the device"),
    "ranks.devices.start_ns": Column("time", "At", "start of the first GPU work, after `epoch_ns`"),
    "ranks.devices.window_ns": Column("time", "Window", "from the first to the last GPU work"),
    "ranks.devices.kernel_count": Column("count", "Kernels", "kernels that start in this time"),
    "ranks.steps.step": Column("count", "Step", "number of the step"),
    "ranks.steps.start_ns": Column("time", "At", "start of the step, after `epoch_ns`"),
    "ranks.steps.duration_ns": Column("time", "Time", "from its start to the start of the next step"),
    "ranks.steps.complete": Column("text", "Complete", "whether the recording holds all of it"),
    "ranks.steps.devices.name": Column("text", "Name", "model of the GPU", "the file does not name the device"),
    "ranks.steps.devices.window_ns": Column("time", "Window", "part of the step from its first to its last GPU work"),
    "ranks.steps.devices.kernel_count": Column("count", "Kernels", "kernels that start in the step"),
    "ranks.host.threads.name": Column("name", "Thread", "name of the thread"),
    "ranks.host.threads.busy_ns": Column("time", "Busy", "time in which anything recorded runs on the thread"),
    "ranks.host.threads.event_count": Column("count", "Events", "events of the thread"),
    "ranks.host.threads.window_ns": Column("time", "Window", "from the first to the last event of any thread"),
    "ranks.host.threads.main": Column("text", "Main", "whether it is the thread that runs the steps"),
    "ranks.host.account.ns": Column("time", "Time", "time of the thread in this step, phase and activity"),
    "ranks.step_times.count": Column("count", "Steps", "complete steps"),
    "ranks.step_times.median_ns": Column("time", "Median", "median duration of the complete steps"),
    "ranks.step_times.min_ns": Column("time", "Min", "duration of the shortest complete step"),
    "ranks.step_times.max_ns": Column("time", "Max", "duration of the longest complete step"),
    "ranks.step_times.spread_fraction": Column("share", "Spread", "distance of the quartiles over the median"),
    "ranks.step_times.evidence": Column("text", "Evidence", "how steps were recognised"),
    "ranks.gpu_account.window": Column(
        "text", "Of", "steps: all steps; gpu_work: first to last GPU work of each device"
    ),
    "ranks.gpu_account.devices.name": Column("text", "Name", "model of the GPU", "the file does not name the device"),
    "ranks.gpu_account.devices.window_ns": Column("time", "Window", "what the parts of the account add up to"),
}

CORE: dict[str, Column] = {
    "kernels.name": Column("name", "Name", "name of the kernel, copy or fill"),
    "kernels.kind": Column("text", "Kind", "kernel, copy or fill"),
    "kernels.count": Column("count", "Count", "how often it ran"),
    "kernels.fraction": Column("share", "Share", "of the summed durations of all GPU work"),
    "kernels.ranks": Column("count", "Ranks", "ranks that ran it"),
    "operators.name": Column("name", "Operator", "name of the operator"),
    "operators.count": Column("count", "Calls", "how often it was called"),
    "operators.self_ns": Column("time", "Self", "host time in the operator but outside the operators it calls"),
    "operators.total_ns": Column("time", "Total", "host time in the operator and in what it calls"),
    "operators.mean_ns": Column("time", "Mean", "mean duration of a call, rounded down"),
    "operators.fraction": Column("share", "Share", "of the self time of all operators"),
    "operators.ranks": Column("count", "Ranks", "ranks that called it"),
    "operators.kernel_count": Column("count", "Kernels", "kernels launched in it or in what it calls"),
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
        f"modules.{part}_{name}": Column(unit, title, f"{what} {of}", _NO_BACKWARD)
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
    "modules.recompute_count": Column("count", "Repeated", "calls that activation checkpointing repeats", _NO_BACKWARD),
    **per_step("modules.all_host_ns", "time", "host time of forward, backward and repeated work", unknown=_NO_STEPS),
    **per_step("modules.all_device_ns", "time", "GPU work of forward, backward and repeated work", unknown=_NO_STEPS),
    "modules.step_count": Column("count", "Steps", "whole steps in which the region occurs", _NO_STEPS),
    "communication.collectives.kind": Column("text", "Kind", "all_reduce, all_gather, ...", NO_KIND),
    "communication.collectives.group_description": Column("text", "For", "description of the group", "it has none"),
    "communication.collectives.bytes": Column("bytes", "Bytes", "sum of the sizes of the messages", NO_MESSAGE),
    "communication.collectives.exposed_ns": Column("time", "Exposed", "time that no compute hides, over all devices"),
    "communication.collectives.ranks": Column("count", "Ranks", "ranks that called it"),
    "communication.collectives.count": Column("count", "Count", "kernels, or calls on the host"),
    "communication.ranks.devices.device": Column("count", "GPU", "number of the GPU in its process"),
    "communication.ranks.devices.count": Column("count", "Count", "communication kernels"),
    "communication.ranks.devices.total_ns": Column("time", "Total", "summed durations of communication kernels"),
    "communication.ranks.devices.union_ns": Column("time", "Union", "time in which a communication kernel runs"),
    "communication.ranks.devices.exposed_ns": Column("time", "Exposed", "of it, time in which no compute runs"),
    "memory.device": Column("count", "GPU", "number of the device; null for the host"),
    "memory.evidence": Column("text", "Evidence", "totals of the allocator, or sums of allocations and frees"),
    "memory.curve.time_ns": Column("time", "Time", "instants, after `epoch_ns`"),
    "memory.curve.allocated_bytes": Column("bytes", "Allocated", "bytes given out at each instant"),
    "memory.curve.reserved_bytes": Column("bytes", "Reserved", "bytes that the allocator has from the device at each"),
    "data_loading.total_ns": Column("time", "Waits", "time in which the program waits for the data loader"),
    "data_loading.waits.name": Column("name", "Call", "call that waits for the next batch"),
    "data_loading.waits.thread": Column(
        "count", "Thread", "thread id, as recorded", "the file does not number this thread"
    ),
    "data_loading.waits.maker": Column(
        "text", "Made by", "who makes the batch: the thread itself, or worker processes"
    ),
    "data_loading.gpu_idle_ns": Column("time", "GPU idle", "part of the wait in which no device had any work"),
    "data_loading.steps.wait_ns": Column("time", "Wait", "time of the step spent waiting for the data loader"),
    "data_loading.steps.fraction": Column("share", "Share", "of the step", "no loader was recorded in this step"),
    "data_loading.steps.bottleneck": Column(
        "text", "Bottleneck", "whether the wait is at least 5 % of the step, and the GPU was idle in half of it or more"
    ),
    "data_loading.spent.part": Column("text", "On", "what the waiting thread did"),
    "data_loading.spent.ns": Column("time", "Time", "time of the wait spent on it"),
}

FINDINGS: dict[str, Column] = {
    "findings.slug": Column("text", "Finding", "stable name of the rule"),
    "findings.title": Column("text", "Finding", "what is the matter"),
    "findings.severity": Column("text", "Severity", "high, medium or low"),
    "findings.saving_ns": Column("time", "Saves", "time that would be saved of a step", "it is about memory, not time"),
    "findings.saving_fraction": Column("share", "Saves", "of the step", "it is about memory, not time"),
    "findings.saving_bytes": Column("bytes", "Saves", "memory that would be free", "it is about time, or only a risk"),
    "findings.saving_low_ns": Column("time", "At least", "time that would be saved of the step where it saves least"),
    "findings.saving_high_ns": Column("time", "At most", "time that would be saved of the step where it saves most"),
    "findings.step_count": Column("count", "Steps", "steps in which it was evaluated; the saving is of the middle one"),
    "findings.lower_bound": Column(
        "text", "Lower bound", "whether it may save more, as threads wait for what is not recorded"
    ),
    "findings.alternatives.slug": Column("text", "Finding", "stable name of its rule"),
    "findings.alternatives.alone_ns": Column("time", "Alone", "time saved where the other is not fixed"),
    "findings.alone_ns": Column("time", "Alone", "time saved if only this were done", "it is about memory, not time"),
    "findings.risk": Column("text", "Risk", "what may fail because of it", "nothing fails because of it"),
    "findings.confidence": Column("number", "Confidence", "how sure the rule is, from 0 to 1"),
    "findings.list": Column("text", "List", "time (ordered by saving) or memory (by risk and bytes)"),
    "findings.learn_more": Column("text", "Learn more", "address of the page about it"),
    "findings.change": Column("text", "Change", "change that was evaluated, for `traceloom whatif`"),
    "findings.evidence.what": Column("text", "What", "what the evidence is"),
    "findings.evidence.start_ns": Column("time", "At", "start, after `epoch_ns`", "it is no single moment"),
    "findings.evidence.duration_ns": Column("time", "Time", "how long it lasts", "it is no single moment"),
    "findings.evidence.lane": Column("count", "Lane", "row of the timeline", "it is on no lane of its own"),
    "findings.evidence.count": Column("count", "Count", "how many such things there are"),
    "findings.evidence.total_ns": Column("time", "Total", "summed durations of all of them", "it is a single thing"),
    "findings.host_ns": Column(
        "time", "Host", "time in which the host is busy with it, over all ranks", "it is not about what the host does"
    ),
    "findings.frames.name": Column("name", "Frame", "function that holds host time of the finding"),
    "findings.frames.file": Column("name", "File", "file of the function, as recorded", "built-in functions have none"),
    "findings.frames.line": Column("count", "Line", "line where the function begins", "built-in functions have none"),
    "findings.frames.time_ns": Column("time", "Time", "host time of the finding that the function holds"),
    "findings.frames.share": Column("share", "Share", "of the host time of the finding"),
    "findings.frames.inside": Column(
        "name", "Mostly", "what it calls that takes at least half of that", "nothing does"
    ),
    "findings.frames.inside_ns": Column("time", "Of it", "time of what it calls that takes most", "nothing does"),
    "findings.frames.rank": Column("count", "Rank", "rank on which it holds longest", "only one rank was recorded"),
    "findings.frames.rank_count": Column("count", "Ranks", "ranks on which it holds any of it"),
    "findings_ground.stacks": Column("text", "Stacks", "whether Python frames were recorded"),
    "findings_ground.step": Column("count", "Step", "step that was looked at"),
    "findings_ground.whole_ns": Column("time", "Of", "duration that savings are fractions of"),
    "findings_ground.basis": Column("text", "Of", "what the savings are of, in words"),
    "findings_ground.law": Column("text", "Law", "how the linked graph gives the measured times back, in words"),
    "findings_ground.holds": Column(
        "text", "Holds", "whether re-timing from recorded delays gives the step back exactly"
    ),
    "findings_ground.exact_error_ns": Column("time", "Exact error", "error of the step re-timed from recorded delays"),
    "findings_ground.honest_error": Column("share", "Honest error", "error of the step re-timed from usual delays"),
    "findings_ground.unit": Column("text", "Unit", "what was looked at, such as a step, in words"),
    "findings_ground.point_error": Column(
        "share", "Point error", "95 % of all instants are off by at most this share of it"
    ),
    "findings_ground.limit": Column("text", "Limit", "what savings leave out, in words"),
    "findings_ground.residual_share": Column("share", "Residual", "time that the graph does not explain, of the step"),
    "findings_ground.host_ratio": Column("number", "Recording", "host time with recording over host time without"),
    "findings_ground.abstentions.slug": Column("text", "Rule", "stable name of a rule that was skipped"),
}
