"""Columns of simulation.json."""

from __future__ import annotations

from traceloom.model.columns.declared import Column

_UNMEASURED = "the workload holds no measured times"
_KEPT = "the device is the recorded one"

SIMULATION: dict[str, Column] = {
    f"simulation_json.{key}": declared
    for key, declared in {
        "mode": Column("text", "Mode", "native, or astra-sim: as ASTRA-sim computes"),
        "name": Column("name", "Workload", "name of the workload"),
        "machine": Column("text", "Machine", "what it is simulated on; empty for the recorded machine"),
        "step": Column("count", "Step", "number of the step", "all that was recorded is simulated"),
        "identity": Column("text", "Identity", "what simulating the recorded machine gives, in words"),
        "measured_ns": Column("time", "Measured", "how long it took", _UNMEASURED),
        "identity_ns": Column(
            "time", "Identity", "simulated on the recorded machine, no start kept as measured", _UNMEASURED
        ),
        "identity_error": Column("change", "Error", "of that against the measurement", _UNMEASURED),
        "trusted": Column("text", "Trusted", "whether the graph explains the measurement within 2 %", _UNMEASURED),
        "before_ns": Column("time", "Before", "on the recorded machine", "the mode simulates no other machine"),
        "after_ns": Column("time", "After", "on the machine"),
        "low_ns": Column("time", "At least", "with work as short as the rules for another device allow", _KEPT),
        "high_ns": Column("time", "At most", "with work as long as they allow", _KEPT),
        "ranks.rank": Column("count", "Rank", "number of the rank"),
        "ranks.before_ns": Column(
            "time", "Before", "end of its last node on the recorded machine", "the mode simulates no other machine"
        ),
        "ranks.end_ns": Column("time", "After", "end of its last node"),
        "ranks.compute_ns": Column("time", "Compute", "while kernels compute"),
        "ranks.communication_ns": Column("time", "Communication", "while it communicates, whatever else goes on"),
        "ranks.exposed_communication_ns": Column("time", "Exposed", "while it communicates and computes nothing"),
        "ranks.memory_ns": Column("time", "Copies", "while it copies or fills memory, and neither of these"),
        "ranks.host_ns": Column("time", "Host", "while the host works, and nothing of this"),
        "ranks.other_ns": Column("time", "Other", "while nothing of this goes on"),
        "collectives.instance": Column("count", "Number", "number of the operation", "its parts are not joined"),
        "collectives.kind": Column("text", "Kind", "what it does; send for messages", "nobody says"),
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
            "time", "Before", "transfer on the recorded machine", "the mode simulates no other machine"
        ),
        "collectives.card_ns": Column(
            "time", "Cards", "what its bytes take over network cards at least", "the mode knows no network cards"
        ),
        "links.link": Column("count", "Link", "number of the link"),
        "links.name": Column("name", "Link", "name of the link"),
        "links.source": Column("text", "From", "rank or switch where it begins"),
        "links.target": Column("text", "To", "where it ends"),
        "links.bytes": Column("bytes", "Bytes", "what it carried"),
        "links.busy_ns": Column("time", "Busy", "while it carried something"),
        "links.waiting_ns": Column("time", "Waiting", "by which transfers took longer because it was full"),
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
