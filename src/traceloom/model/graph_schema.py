"""The columns of a graph's frames: fixed, present even when empty, never dependent on the data.

Times are int64 nanoseconds since the graph's `epoch_ns` on the clock of the job (a rank's clock plus its offset), byte
counts int64. `node`, `source`, `target` are row numbers of `nodes`; `event` and `op` are rows of the rank's trace.
"""

from __future__ import annotations

from functools import cache

import polars as pl

from traceloom.model.frames import schema
from traceloom.model.schema import CategoryType

Node = pl.UInt32

# What a node is, and with that what makes its end move.
ORIGIN = "origin"  # the start of a rank's window; zero length, no predecessors
HOST = "host"  # self time of an op, annotation or runtime call on a host thread, before, between or after its children
THINK = "think"  # a host thread outside every recorded event, at work that nothing names
WAIT = "wait"  # a host thread that waits for another thread, process or peer: ends when that comes
LAUNCH = "launch"  # a runtime or driver call that submits GPU work
BLOCK = "block"  # a call that returns only when GPU work is done: synchronisations, blocking copies
KERNEL = "kernel"
COPY = "copy"
FILL = "fill"
COLLECTIVE = "collective"  # one rank's part of a collective, on the device or (gloo) on the host
SEND = "send"
RECEIVE = "receive"
RENDEZVOUS = "rendezvous"  # where the ranks of a collective meet; zero length
ARRIVAL = "arrival"  # the assumed arrival of peers that were not recorded; zero length
NODE_KINDS = (
    ORIGIN,
    HOST,
    THINK,
    WAIT,
    LAUNCH,
    BLOCK,
    KERNEL,
    COPY,
    FILL,
    COLLECTIVE,
    SEND,
    RECEIVE,
    RENDEZVOUS,
    ARRIVAL,
)
COMMUNICATION = (COLLECTIVE, SEND, RECEIVE)

# Why one node waits for another.
EDGE_KINDS = (
    "origin",  # first node of a lane that nothing else explains
    "call",  # into a call or out of it, on one thread
    "thread",  # the next thing on the same thread
    "launch",  # from the call that submitted GPU work to that work
    "stream",  # stream order
    "wait",  # a stream that waits for an event of another stream
    "synchronize",  # a host call that waits for GPU work
    "queue",  # a launch that found the queue full, freed by an earlier kernel
    "occupancy",  # GPU work that found the device full, freed by work of another stream
    "forward-backward",  # an op and its backward op
    "cross-thread",  # another thread handed over work or woke us
    "data",  # a tensor's storage: written by one, read by the other
    "rendezvous",  # into and out of the meeting of a collective's ranks; a send and its receive
    "simulation",  # order added only for a target
)
# How an edge is known: the file says so by id or arrow; two records share an id; a rule found it; a convention.
EVIDENCE = ("measured", "correlated", "inferred", "assumed")

NodeKind = pl.Enum(list(NODE_KINDS))
EdgeKind = pl.Enum(list(EDGE_KINDS))
Evidence = pl.Enum(list(EVIDENCE))


GRAPH_SCHEMAS: dict[str, pl.Schema] = {
    # `node` is the row number. The category is that of the event it is from; null for think, wait, origin, rendezvous
    # and arrival. The rank of a rendezvous or an arrival is one of those that meet there; its lane (a row of `lanes`)
    # is null, as that of an origin. The duration is as measured, >= 0; of it `work_ns` is what it takes when nothing is
    # awaited, and `residual_ns` what neither the work nor an awaited node explains. `event` and `op` (the innermost
    # framework op) are rows of the rank's trace, `host_op` the id in the host trace, where linked. The bytes are of
    # copies, fills and communication (what this rank puts in).
    "nodes": schema(
        "node kind name category rank lane start_ns duration_ns work_ns residual_ns event op host_op step correlation",
        "bytes",
        {"kind": NodeKind, "category": CategoryType, "op": pl.UInt32, "host_op": pl.Int64},
    ),
    # `from_end`: it holds from the end of the source, else from its start; `to_end`: it holds back the end of the
    # target, else its start. The delay is the calibrated one of the edge's class, at most the observed slack, and may
    # be negative; the residual is more than 0 only on the last satisfied edge into a point.
    "edges": schema(
        "source target kind evidence from_end to_end delay_ns residual_ns",
        {"source": Node, "target": Node, "kind": EdgeKind, "evidence": Evidence},
    ),
    "lanes": schema("lane rank kind process thread device stream name", {"kind": pl.Enum(["host", "device"])}),
    # `instance` is equal for the parts of one operation on all ranks, null where not joined; kind: all_reduce,
    # all_gather, reduce_scatter, all_to_all, broadcast, send, receive, ...; ranks are the members, ascending, null
    # where unknown; `peer` is the global rank of the root, source or destination.
    "communication": schema(
        "node instance kind group group_size ranks sequence element_type in_bytes out_bytes peer tag in_splits",
        "out_splits",
        {"ranks": pl.List(pl.Int32), "in_splits": pl.List(pl.Int64), "out_splits": pl.List(pl.Int64)},
    ),
    # kind: HtoD, DtoH, DtoD, PtoP, HtoH, fill, unknown
    "transfers": schema("node kind source_memory target_memory"),
    # `id` is that in the host trace; record function 0 and autograd sequence -1 in the file are null here. Threads have
    # PyTorch's own numbers: 1, 2, 3. Inputs and outputs are lists as JSON text, `attributes` every other attribute of
    # the node, as a JSON object.
    "host_ops": schema(
        "rank id name parent forward_parent record_function_id sequence scope thread forward_thread schema inputs",
        "input_shapes input_types outputs output_shapes output_types attributes",
        dict.fromkeys(("parent", "forward_parent", "thread", "forward_thread"), pl.Int64),
    ),
    # Traces are paths. The offset is added to this rank's times, 0 where nothing was fitted; the drift is in ns per ns;
    # the residual is what the fit leaves, null where nothing was fitted.
    "ranks": schema(
        "rank host process device_trace host_trace window_start_ns window_end_ns clock_offset_ns clock_drift",
        "clock_residual_ns",
        {"process": pl.Int64},
    ),
    # `place` is what the class is told apart by: device, vendor, call name.
    "delays": schema("kind place count median_ns", {"kind": EdgeKind, "place": pl.String}),
    # subject: host-ops, gpu-work, collectives, time, ...; outcome: matched, attached, orphan: launch before the window,
    # ...; the time is null where it has no meaning for the subject.
    "coverage": schema("rank subject outcome count time_ns"),
}


@cache
def empty_frame(name: str) -> pl.DataFrame:
    """The graph frame `name` without rows."""
    return pl.DataFrame(schema=GRAPH_SCHEMAS[name])
