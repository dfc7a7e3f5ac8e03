"""The columns of a graph's frames: fixed, present even when empty, never dependent on the data.

Times are int64 nanoseconds since the graph's `epoch_ns` on the clock of the job (a rank's clock plus its offset), byte
counts int64. `node`, `source`, `target` are row numbers of `nodes`; `event` and `op` are rows of the rank's trace.
"""

from __future__ import annotations

import polars as pl

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


def _schema(columns: dict[str, pl.DataType | type[pl.DataType]]) -> pl.Schema:
    return pl.Schema(columns)


GRAPH_SCHEMAS: dict[str, pl.Schema] = {
    "nodes": _schema(
        {
            "node": Node,  # row number
            "kind": NodeKind,
            "name": pl.String,
            "category": CategoryType,  # of the event it is from; null for think, wait, origin, rendezvous, arrival
            "rank": pl.Int32,  # of a rendezvous or an arrival: one of the ranks that meet there
            "lane": pl.UInt32,  # row of `lanes`; null for origin, rendezvous, arrival
            "start_ns": pl.Int64,
            "duration_ns": pl.Int64,  # as measured, >= 0
            "work_ns": pl.Int64,  # what it takes when nothing is awaited, 0 <= work <= duration
            "residual_ns": pl.Int64,  # part of the duration that neither the work nor an awaited node explains
            "event": pl.UInt32,  # row of the rank's trace
            "op": pl.UInt32,  # innermost framework op: row of the rank's trace
            "host_op": pl.Int64,  # id in the host trace, where linked
            "step": pl.Int32,
            "correlation": pl.Int64,
            "bytes": pl.Int64,  # copies, fills, communication (what this rank puts in)
        }
    ),
    "edges": _schema(
        {
            "source": Node,
            "target": Node,
            "kind": EdgeKind,
            "evidence": Evidence,
            "from_end": pl.Boolean,  # True: holds from the end of the source; False: from its start
            "to_end": pl.Boolean,  # True: holds back the end of the target; False: its start
            "delay_ns": pl.Int64,  # calibrated delay of the edge's class, at most the observed slack; may be negative
            "residual_ns": pl.Int64,  # more than 0 only on the last satisfied edge into a point
        }
    ),
    "lanes": _schema(
        {
            "lane": pl.UInt32,  # row number
            "rank": pl.Int32,
            "kind": pl.Enum(["host", "device"]),
            "process": pl.String,
            "thread": pl.String,
            "device": pl.Int32,
            "stream": pl.Int64,
            "name": pl.String,
        }
    ),
    "communication": _schema(
        {
            "node": Node,
            "instance": pl.Int64,  # equal for the parts of one operation on all ranks; null where not joined
            "kind": pl.String,  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive, ...
            "group": pl.String,
            "group_size": pl.Int32,
            "ranks": pl.List(pl.Int32),  # members, ascending; null where unknown
            "sequence": pl.Int64,
            "element_type": pl.String,
            "in_bytes": pl.Int64,
            "out_bytes": pl.Int64,
            "peer": pl.Int32,  # global rank of the root, source or destination
            "tag": pl.Int64,
            "in_splits": pl.List(pl.Int64),
            "out_splits": pl.List(pl.Int64),
        }
    ),
    "transfers": _schema(
        {
            "node": Node,
            "kind": pl.String,  # HtoD, DtoH, DtoD, PtoP, HtoH, fill, unknown
            "source_memory": pl.String,
            "target_memory": pl.String,
        }
    ),
    "host_ops": _schema(
        {
            "rank": pl.Int32,
            "id": pl.Int64,  # in the host trace
            "name": pl.String,
            "parent": pl.Int64,
            "forward_parent": pl.Int64,
            "record_function_id": pl.Int64,  # 0 in the file is null here
            "sequence": pl.Int64,  # autograd; -1 in the file is null here
            "scope": pl.Int32,
            "thread": pl.Int64,  # PyTorch's own numbering: 1, 2, 3
            "forward_thread": pl.Int64,
            "schema": pl.String,
            "inputs": pl.String,  # the six lists as JSON text
            "input_shapes": pl.String,
            "input_types": pl.String,
            "outputs": pl.String,
            "output_shapes": pl.String,
            "output_types": pl.String,
            "attributes": pl.String,  # every other attribute of the node, as a JSON object
        }
    ),
    "ranks": _schema(
        {
            "rank": pl.Int32,
            "host": pl.String,
            "process": pl.Int64,
            "device_trace": pl.String,  # paths
            "host_trace": pl.String,
            "window_start_ns": pl.Int64,
            "window_end_ns": pl.Int64,
            "clock_offset_ns": pl.Int64,  # added to this rank's times; 0 where nothing was fitted
            "clock_drift": pl.Float64,  # parts per one: ns per ns
            "clock_residual_ns": pl.Int64,  # what the fit leaves; null where nothing was fitted
        }
    ),
    "delays": _schema(
        {
            "kind": EdgeKind,
            "place": pl.String,  # what the class is told apart by: device, vendor, call name
            "count": pl.Int64,
            "median_ns": pl.Int64,
        }
    ),
    "coverage": _schema(
        {
            "rank": pl.Int32,
            "subject": pl.String,  # host-ops, gpu-work, collectives, time, ...
            "outcome": pl.String,  # matched, attached, orphan: launch before the window, ...
            "count": pl.Int64,
            "time_ns": pl.Int64,  # null where time has no meaning for the subject
        }
    ),
}


def empty_frame(name: str) -> pl.DataFrame:
    """The graph frame `name` without rows."""
    return pl.DataFrame(schema=GRAPH_SCHEMAS[name])
