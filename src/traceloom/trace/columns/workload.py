"""Columns of simulation.json and replay.json."""

from traceloom.trace.columns.declare import Column

_UNMEASURED = "the workload holds no measured times"
_RECORDED_DEVICE = "the device is the recorded one"

SIMULATION: dict[str, Column] = {
    f"simulation_json.{key}": declared
    for key, declared in {
        "mode": Column("text", "Mode", "native, or astra-sim: as ASTRA-sim computes"),
        "name": Column("name", "Workload", "name of the workload"),
        "machine": Column(
            "text", "Machine", "what it is simulated on; empty for the recorded machine"
        ),
        "step": Column("count", "Step", "number of the step", "all that was recorded is simulated"),
        "identity": Column(
            "text", "Identity", "what simulating the recorded machine gives, in words"
        ),
        "measured_ns": Column("time", "Measured", "how long it took", _UNMEASURED),
        "identity_ns": Column(
            "time",
            "Identity",
            "simulated on the recorded machine, no start kept as measured",
            _UNMEASURED,
        ),
        "identity_error": Column("change", "Error", "of that against the measurement", _UNMEASURED),
        "trusted": Column(
            "text", "Trusted", "whether the graph explains the measurement within 2 %", _UNMEASURED
        ),
        "before_ns": Column(
            "time", "Before", "on the recorded machine", "the mode simulates no other machine"
        ),
        "after_ns": Column("time", "After", "on the machine"),
        "low_ns": Column(
            "time",
            "At least",
            "with work as short as the rules for another device allow",
            _RECORDED_DEVICE,
        ),
        "high_ns": Column("time", "At most", "with work as long as they allow", _RECORDED_DEVICE),
        "ranks.rank": Column("count", "Rank", "number of the rank"),
        "ranks.before_ns": Column(
            "time",
            "Before",
            "end of its last node on the recorded machine",
            "the mode simulates no other machine",
        ),
        "ranks.end_ns": Column("time", "After", "end of its last node"),
        "ranks.compute_ns": Column("time", "Compute", "while kernels compute"),
        "ranks.communication_ns": Column(
            "time", "Communication", "while it communicates, whatever else goes on"
        ),
        "ranks.exposed_communication_ns": Column(
            "time", "Exposed", "while it communicates and computes nothing"
        ),
        "ranks.memory_ns": Column(
            "time", "Copies", "while it copies or fills memory, and neither of these"
        ),
        "ranks.host_ns": Column("time", "Host", "while the host works, and nothing of this"),
        "ranks.other_ns": Column("time", "Other", "while nothing of this goes on"),
        "collectives.instance": Column(
            "count", "Number", "number of the operation", "its parts are not joined"
        ),
        "collectives.kind": Column(
            "text", "Kind", "what it does; send for messages", "nobody says"
        ),
        "collectives.group": Column("text", "Group", "name of the group", "it has none"),
        "collectives.ranks": Column("count", "Ranks", "how many take part", "nobody says"),
        "collectives.bytes": Column("bytes", "Bytes", "the whole buffer of a rank", "nobody says"),
        "collectives.start_ns": Column("time", "Start", "first arrival"),
        "collectives.end_ns": Column("time", "End", "last end"),
        "collectives.transfer_ns": Column("time", "Transfer", "from the last arrival to the end"),
        "collectives.waiting_ns": Column("time", "Waiting", "from the first arrival to the last"),
        "collectives.bandwidth": Column(
            "number",
            "GB/s",
            "bytes on the bus per time of the transfer, 10^9 B/s",
            "its bytes or its time are not known",
        ),
        "collectives.algorithm": Column(
            "text", "Algorithm", "by which schedule", "a measured or the recorded time counts"
        ),
        "collectives.flags": Column("text", "Flags", "what must be known about its time"),
        "collectives.before_ns": Column(
            "time",
            "Before",
            "transfer on the recorded machine",
            "the mode simulates no other machine",
        ),
        "collectives.card_ns": Column(
            "time",
            "Cards",
            "what its bytes take over network cards at least",
            "the mode knows no network cards",
        ),
        "links.link": Column("count", "Link", "number of the link"),
        "links.name": Column("name", "Link", "name of the link"),
        "links.source": Column("text", "From", "rank or switch where it begins"),
        "links.target": Column("text", "To", "where it ends"),
        "links.bytes": Column("bytes", "Bytes", "what it carried"),
        "links.busy_ns": Column("time", "Busy", "while it carried something"),
        "links.waiting_ns": Column(
            "time", "Waiting", "by which transfers took longer because it was full"
        ),
        "path.what": Column("text", "What", "work, delay, residual, or what was before the path"),
        "path.kind": Column("text", "Kind", "kind of node or edge"),
        "path.before_ns": Column("time", "Before", "on the critical path of the recorded machine"),
        "path.after_ns": Column("time", "After", "on the critical path of the machine"),
        "became_critical.what": Column("text", "What", "work or delay"),
        "became_critical.kind": Column("text", "Kind", "kind of node or edge"),
        "became_critical.rank": Column("count", "Rank", "number of the rank", "it is of no rank"),
        "became_critical.name": Column("name", "Name", "of the node that works, or that waited"),
        "became_critical.count": Column("count", "Count", "nodes or edges"),
        "became_critical.time_ns": Column("time", "Time", "of all of them"),
        "device.device": Column("text", "Device", "device there"),
        "device.recorded": Column("text", "Recorded", "devices of the recording"),
        "device.host_factor": Column("number", "Host", "host work takes so many times as long"),
        "device.before_ns": Column("time", "Before", "as measured"),
        "device.after_ns": Column("time", "After", "on the device, with communication as measured"),
        "device.low_ns": Column("time", "At least", "by the rules' intervals"),
        "device.high_ns": Column("time", "At most", "by the rules' intervals"),
        "device.account.rule": Column("text", "Rule", "what its time goes by"),
        "device.account.kind": Column("text", "Kind", "kind of GPU work", "it is work of the host"),
        "device.account.count": Column("count", "Count", "pieces of work"),
        "device.account.here_ns": Column("time", "Here", "as measured"),
        "device.account.there_ns": Column("time", "There", "on the device"),
        "device.account.low_ns": Column("time", "At least", "by the rule's interval"),
        "device.account.high_ns": Column("time", "At most", "by the rule's interval"),
    }.items()
}

_UNTIMED = "no timed step is recorded"
_PARTIAL_REPLAY = "no timed step is recorded, or a part of one is replayed"
_NO_CPU = "the recording does not say, several threads called ops, or a part of a step is replayed"
_NO_GPU = "one of the sides launched no GPU work, or its GPU work was not recorded"
_NO_WORK = "they launched no GPU work, or it was not recorded"
_ASYNCHRONOUS = "it is asynchronous, and ends later than its call"

REPLAY: dict[str, Column] = {
    f"replay_json.{key}": declared
    for key, declared in {
        "source": Column("name", "Workload", "what was replayed, as the user named it"),
        "recorded_torch": Column(
            "text", "Recorded with", "version of PyTorch there", "the recording does not say"
        ),
        "torch": Column(
            "text", "Replayed with", "version of PyTorch here", "the replay does not say"
        ),
        "device": Column("text", "Device", "kind of device that it was replayed on"),
        "pace": Column("text", "Pace", "fast: nothing between ops; recorded: with the host's gaps"),
        "limits": Column("text", "What it cannot show", "what these times do not tell, in words"),
        "long_count": Column("count", "Long ops", "ops that took 50 µs or more when recorded"),
        "long_ratios": Column(
            "number",
            "Ratios",
            "10th, 50th and 90th percentile of their ratios",
            "no op took as long",
        ),
        "machine": Column(
            "name",
            "Machine",
            "name of the machine of the simulation beside it",
            "nobody asked for one",
        ),
        "not_simulated": Column(
            "text", "Not simulated", "why there is no simulation", "there is, or nobody asked"
        ),
        "simulated.rank": Column("count", "Rank", "number of the rank"),
        "simulated.step_count": Column(
            "count", "Steps", "timed steps that were simulated, each on its own"
        ),
        "simulated.replayed_ns": Column("time", "Replayed", "a pass, median"),
        "simulated.simulated_ns": Column(
            "time", "Simulated", "a step on the machine, of the same ops, median"
        ),
        "simulated.difference": Column(
            "change", "Difference", "(simulated - replayed) / replayed", "the pass took no time"
        ),
        "whole.rank": Column("count", "Rank", "number of the rank"),
        "whole.step_count": Column(
            "count", "Steps", "timed steps that the recorded times are medians of"
        ),
        "whole.pass_count": Column(
            "count", "Passes", "passes that the replayed times are medians of"
        ),
        "whole.recorded_ns": Column("time", "Recorded", "a timed step, median", _PARTIAL_REPLAY),
        "whole.replayed_ns": Column("time", "Replayed", "a pass, median"),
        "whole.ratio": Column("number", "Ratio", "replayed over recorded", _PARTIAL_REPLAY),
        "whole.recorded_cpu_ns": Column(
            "time", "CPU recorded", "processor time of the program's thread in a step", _NO_CPU
        ),
        "whole.replayed_cpu_ns": Column(
            "time", "CPU replayed", "processor time of the thread that calls the ops, in a pass"
        ),
        "whole.cpu_ratio": Column(
            "number", "CPU ratio", "replayed over recorded processor time", _NO_CPU
        ),
        "whole.recorded_ops_ns": Column("time", "Ops recorded", "all ops that both sides timed"),
        "whole.replayed_ops_ns": Column("time", "Ops replayed", "the same ops"),
        "whole.ops_ratio": Column(
            "number", "Ops ratio", "replayed over recorded time of these ops", _UNTIMED
        ),
        "whole.recorded_gpu_ns": Column(
            "time", "GPU recorded", "GPU work of ops that launched some on both sides", _NO_GPU
        ),
        "whole.replayed_gpu_ns": Column(
            "time", "GPU replayed", "GPU work of the same ops", _NO_GPU
        ),
        "whole.gpu_ratio": Column(
            "number", "GPU ratio", "replayed over recorded time of GPU work", _NO_GPU
        ),
        "whole.peak_bytes": Column(
            "bytes", "Peak", "most bytes of tensors alive at once in the replay"
        ),
        "coverage.rank": Column("count", "Rank", "number of the rank"),
        "coverage.outcome": Column(
            "text", "Outcome", "run, failed, other-shape (than recorded), stand-in or left-out"
        ),
        "coverage.reason": Column("text", "Why", "why it did not run as it is", "it ran"),
        "coverage.count": Column("count", "Ops", "how many ops"),
        "coverage.recorded_ns": Column("time", "Recorded", "what they took in a timed step"),
        "coverage.count_share": Column("share", "Of ops", "of all ops of the rank"),
        "coverage.time_share": Column(
            "share", "Of time", "of the recorded time of all ops of the rank", _UNTIMED
        ),
        "coverage.recorded_gpu_ns": Column(
            "time", "GPU recorded", "GPU work that they launched in a timed step", _NO_WORK
        ),
        "coverage.gpu_share": Column(
            "share", "Of GPU work", "of the recorded GPU work of all ops of the rank", _NO_WORK
        ),
        "not_run.rank": Column("count", "Rank", "number of the rank"),
        "not_run.outcome": Column(
            "text", "Outcome", "failed, other-shape (than recorded), stand-in or left-out"
        ),
        "not_run.reason": Column("text", "Why", "stable name of the reason"),
        "not_run.name": Column("name", "Op", "name of the op"),
        "not_run.text": Column("name", "In words", "the reason in words, of the first of them"),
        "not_run.count": Column("count", "Ops", "how many"),
        "not_run.recorded_ns": Column("time", "Recorded", "what they took in a timed step"),
        "holes.rank": Column("count", "Rank", "number of the rank"),
        "holes.name": Column("name", "Graph", "name of the compiled graph"),
        "holes.count": Column("count", "Count", "how often it is called in a step"),
        "holes.recorded_ns": Column(
            "time", "Recorded", "time of a step in it, without the ops inside"
        ),
        "ops.name": Column("name", "Op", "name of the op"),
        "ops.shapes": Column("name", "Shapes", "shapes of the tensors that it takes"),
        "ops.calls": Column("count", "Calls", "in a step, over all ranks"),
        "ops.recorded_ns": Column(
            "time", "Recorded", "all calls, each its median over the timed steps"
        ),
        "ops.replayed_ns": Column("time", "Replayed", "all calls, each its median over the passes"),
        "ops.lost_ns": Column(
            "time", "Lost", "how much longer the replay took; less than 0 is won"
        ),
        "ops.ratio": Column(
            "number", "Ratio", "replayed over recorded", "it was recorded with a time of 0"
        ),
        "ops.recorded_gpu_ns": Column(
            "time", "GPU recorded", "GPU work that all calls launched", _NO_GPU
        ),
        "ops.replayed_gpu_ns": Column(
            "time", "GPU replayed", "GPU work that all calls launched", _NO_GPU
        ),
        "ops.gpu_lost_ns": Column(
            "time", "GPU lost", "how much longer the GPU worked; less than 0 is won", _NO_GPU
        ),
        "ops.gpu_ratio": Column(
            "number", "GPU ratio", "replayed over recorded time of GPU work", _NO_GPU
        ),
        "ops.p10_ratio": Column(
            "number", "P10", "10th percentile of the ratios of the calls", "all took no time"
        ),
        "ops.p50_ratio": Column(
            "number", "P50", "50th percentile of the ratios of the calls", "all took no time"
        ),
        "ops.p90_ratio": Column(
            "number", "P90", "90th percentile of the ratios of the calls", "all took no time"
        ),
        "collectives.rank": Column("count", "Rank", "number of the rank"),
        "collectives.kind": Column("text", "Kind", "what it does"),
        "collectives.group": Column("text", "Group", "name of the group"),
        "collectives.group_size": Column("count", "Ranks", "ranks of the group"),
        "collectives.asynchronous": Column(
            "text", "Asynchronous", "whether it goes on after its call"
        ),
        "collectives.size_bytes": Column(
            "bytes",
            "Message",
            "size of the message that bandwidth is defined on",
            "it moves nothing",
        ),
        "collectives.count": Column("count", "Count", "how many"),
        "collectives.on_gpu": Column(
            "text", "On GPU", "whether times are of GPU work, which both sides know then"
        ),
        "collectives.recorded_ns": Column(
            "time", "Recorded", "its GPU work, or the call and the wait for it; median", _UNTIMED
        ),
        "collectives.replayed_ns": Column(
            "time",
            "Replayed",
            "its GPU work, or the call and the wait for it; median",
            "it did not run",
        ),
        "collectives.ratio": Column("number", "Ratio", "replayed over recorded", _ASYNCHRONOUS),
        "collectives.recorded_gb_per_s": Column(
            "number", "GB/s", "on the bus as recorded, 10^9 B/s", _ASYNCHRONOUS
        ),
        "collectives.replayed_gb_per_s": Column(
            "number", "GB/s here", "on the bus here, 10^9 B/s", _ASYNCHRONOUS
        ),
        "contents.rank": Column("count", "Rank", "number of the rank"),
        "contents.content": Column(
            "text",
            "Content",
            "what it was filled with: floats, weights, integers, ...",
            "nothing asks for it",
        ),
        "contents.evidence": Column(
            "text",
            "Known by",
            "data, range, consumer (what an op needs), or a guess",
            "nothing says; it is a guess",
        ),
        "contents.count": Column("count", "Tensors", "storages that come from outside"),
        "contents.bytes": Column("bytes", "Bytes", "of these storages"),
    }.items()
}
