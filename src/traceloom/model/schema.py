"""The columns of a trace's frames: fixed, present even when empty, never dependent on the data.

Times are int64 nanoseconds of the trace's clock (Unix time where the file gives it), byte counts int64. `event`,
`parent`, `op`, `launch`, `source`, `target` are row numbers of `events`.
"""

from __future__ import annotations

import polars as pl

from traceloom.model.category import CATEGORIES

CategoryType = pl.Enum(list(CATEGORIES))
Event = pl.UInt32
REQUEST = "request"  # `evidence` of steps that are requests to a server


def _schema(columns: dict[str, pl.DataType | type[pl.DataType]]) -> pl.Schema:
    return pl.Schema(columns)


SCHEMAS: dict[str, pl.Schema] = {
    "events": _schema(
        {
            "event": Event,  # row number; rows are sorted by (start_ns, longer first, file order)
            "name": pl.String,
            "category": CategoryType,
            "start_ns": pl.Int64,
            "duration_ns": pl.Int64,  # as recorded, never changed; may be negative in damaged files
            "nested_end_ns": pl.Int64,  # end, shortened where spans of a lane cross, so that they nest; never < start
            "lane": pl.UInt32,  # row of `lanes`
            "process": pl.Int64,  # process id of host events; null where the file gives no number
            "thread": pl.Int64,
            "device": pl.Int32,  # device index of device-side events
            "stream": pl.Int64,
            "correlation": pl.Int64,  # joins a launch and its GPU work
            "external_id": pl.Int64,  # as recorded; null on GPU work where it only repeats the correlation
            "record_function_id": pl.Int64,  # joins the host trace; 0 in the file is null here
            "sequence": pl.Int64,  # autograd sequence number; joins forward and backward with forward_thread
            "forward_thread": pl.Int64,
            "parent": Event,  # enclosing event on the same lane
            "depth": pl.UInt16,  # 0 = outermost on its lane
            "op": Event,  # innermost op around a launch; for GPU work, around its launch
            "launch": Event,  # for GPU work: the runtime or driver call that submitted it
            "step": pl.Int32,  # step of the host time at start; for GPU work, of its launch
        }
    ),
    "lanes": _schema(
        {
            "lane": pl.UInt32,
            "kind": pl.Enum(["host", "device", "device_annotation", "device_sync", "other"]),
            "process": pl.String,  # as in the file
            "thread": pl.String,
            "device": pl.Int32,
            "stream": pl.Int64,
            "name": pl.String,  # what to show: "main thread", "autograd 12", "stream 7"
            "events": pl.UInt32,
            "busy_ns": pl.Int64,  # union of the lane's events
        }
    ),
    "devices": _schema(
        {
            "device": pl.Int32,
            "name": pl.String,  # null where the file leaves it empty
            "memory_bytes": pl.Int64,
            "multiprocessors": pl.Int32,
            "compute_capability": pl.String,
            "used": pl.Boolean,  # has GPU work in this trace
        }
    ),
    "groups": _schema(
        {
            "group": pl.String,
            "description": pl.String,
            "backend": pl.String,
            "size": pl.Int32,
            "ranks": pl.List(pl.Int32),  # null where the file cut the list
        }
    ),
    "steps": _schema(
        {
            "step": pl.Int32,  # the number in the name, unique here; ascending
            "name": pl.String,
            "start_ns": pl.Int64,
            "end_ns": pl.Int64,  # start of the next step; for the last one the end of its own span
            "evidence": pl.Enum(["profiler-step", "mark", "annotation", "request"]),
            "complete": pl.Boolean,  # False where the recording cuts it off
        }
    ),
    "collectives": _schema(
        {
            "event": Event,  # the op, annotation or kernel it is about
            "kind": pl.String,  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, ...
            "group": pl.String,
            "group_size": pl.Int32,
            "ranks": pl.String,  # as recorded (may be cut)
            "element_type": pl.String,
            "in_elements": pl.Int64,
            "out_elements": pl.Int64,
            "in_bytes": pl.Int64,  # null where the element type is unknown
            "out_bytes": pl.Int64,
            "sequence": pl.Int64,
            "peer": pl.Int32,  # root, source or destination
            "in_splits": pl.String,
            "out_splits": pl.String,
            "asynchronous": pl.Boolean,
        }
    ),
    "copies": _schema(
        {
            "event": Event,
            "kind": pl.String,  # HtoD, DtoH, DtoD, PtoP, HtoH, fill, unknown
            "bytes": pl.Int64,
            "source_memory": pl.String,  # pageable, pinned, device, ...
            "target_memory": pl.String,
        }
    ),
    "kernels": _schema(
        {
            "event": Event,  # one row per kernel of which the profiler says how it fills the device
            "blocks_per_sm": pl.Float64,
            "warps_per_sm": pl.Float64,
            "occupancy_percent": pl.Float64,  # estimated achieved occupancy
        }
    ),
    "syncs": _schema(
        {
            "event": Event,
            "kind": pl.String,  # as recorded: Context Sync, Stream Sync, Event Sync, Stream Wait Event
            "stream": pl.Int64,
            "awaited_stream": pl.Int64,
            "record_correlation": pl.Int64,  # correlation of the awaited event record
            "event_id": pl.Int64,
        }
    ),
    "flows": _schema(
        {
            "kind": pl.Enum(["launch", "forward-backward", "other"]),
            "flow": pl.Int64,  # the id in the file
            "source": Event,  # null where the start or the end of the arrow hits no event
            "target": Event,
        }
    ),
    "python": _schema(
        {
            "event": Event,
            "python_id": pl.Int64,
            "python_parent": pl.Int64,
            "module_id": pl.Int64,  # of nn.Module calls
        }
    ),
    "tensors": _schema(
        {
            "event": Event,  # one row per op that has shapes; the lists as JSON text, one entry per input
            "shapes": pl.String,
            "types": pl.String,
            "strides": pl.String,
            "concrete": pl.String,
        }
    ),
    "allocations": _schema(
        {
            "time_ns": pl.Int64,
            "address": pl.UInt64,
            "bytes": pl.Int64,  # negative = free
            "device_type": pl.String,  # cpu, cuda, hip, xpu, mtia, ...
            "device": pl.Int32,
            "allocated_bytes": pl.Int64,  # the allocator's own running total
            "reserved_bytes": pl.Int64,
            "process": pl.Int64,
            "thread": pl.Int64,
            "op": Event,  # innermost op on that thread at that time
            "step": pl.Int32,
        }
    ),
    "counters": _schema(
        {"time_ns": pl.Int64, "process": pl.String, "name": pl.String, "key": pl.String, "value": pl.Float64}
    ),
    "marks": _schema(
        {"time_ns": pl.Int64, "name": pl.String, "process": pl.String, "thread": pl.String, "bytes": pl.Int64}
    ),
    "sources": _schema(
        {
            "event": Event,
            "offset": pl.Int64,  # byte range of the event in the (decompressed) file
            "length": pl.Int32,
        }
    ),
}


def empty(name: str) -> pl.DataFrame:
    """The frame `name` without rows."""
    return pl.DataFrame(schema=SCHEMAS[name])
