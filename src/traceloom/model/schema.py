"""The columns of a trace's frames: fixed, present even when empty, never dependent on the data.

Times are int64 nanoseconds of the trace's clock (Unix time where the file gives it), byte counts int64. `event`,
`parent`, `op`, `launch`, `source`, `target` are row numbers of `events`.
"""

from __future__ import annotations

from functools import cache

import polars as pl

from traceloom.model.category import CATEGORIES
from traceloom.model.frames import schema

CategoryType = pl.Enum(list(CATEGORIES))
Event = pl.UInt32
REQUEST = "request"  # `evidence` of steps that are requests to a server

SCHEMAS: dict[str, pl.Schema] = {
    # Rows are sorted by start, the longer first, then in the order of the file; `event` is the row number. The duration
    # is as recorded, never changed, and may be negative in damaged files; `nested_end_ns` is the end, shortened where
    # spans of a lane cross, so that they nest, and never before the start. `lane` is a row of `lanes`; process, thread
    # of host events, device and stream of those on the device; a process is null where the file gives no number.
    # `correlation` joins a launch and its GPU work; `external_id` is as recorded, null on GPU work where it only
    # repeats the correlation; `record_function_id` joins the host trace, and 0 in the file is null here; `sequence` is
    # autograd's, which with `forward_thread` joins forward and backward. `parent` is the enclosing event on the same
    # lane, `depth` 0 the outermost there; `op` the innermost op around a launch, of GPU work around its launch;
    # `launch` the runtime or driver call that submitted GPU work. `step` is that of the host time at the start, of GPU
    # work that of its launch.
    "events": schema(
        "event name category start_ns duration_ns nested_end_ns lane process thread device stream correlation",
        "external_id record_function_id sequence forward_thread parent depth op launch step",
        {"category": CategoryType, "process": pl.Int64, "thread": pl.Int64, "forward_thread": pl.Int64, "op": Event},
    ),
    # Process and thread as in the file; the name is what to show: "main thread", "autograd 12", "stream 7". `busy_ns`
    # is the union of the lane's events.
    "lanes": schema(
        "lane kind process thread device stream name events busy_ns",
        {"kind": pl.Enum(["host", "device", "device_annotation", "device_sync", "other"]), "events": pl.UInt32},
    ),
    # A name is null where the file leaves it empty; used devices have GPU work in this trace.
    "devices": schema("device name memory_bytes multiprocessors compute_capability used"),
    # The ranks are null where the file cut the list.
    "groups": schema("group description backend size ranks", {"ranks": pl.List(pl.Int32)}),
    # `step` is the number in the name, unique here and ascending; it ends with the start of the next one, the last with
    # its own span. It is not complete where the recording cuts it off.
    "steps": schema(
        "step name start_ns end_ns evidence complete",
        {"evidence": pl.Enum(["profiler-step", "mark", "annotation", "request"])},
    ),
    # `event` is the op, annotation or kernel it is about; kind: all_reduce, all_gather, reduce_scatter, all_to_all,
    # broadcast, send, ...; ranks as recorded (may be cut); bytes are null where the element type is unknown; `peer` is
    # the root, source or destination.
    "collectives": schema(
        "event kind group group_size ranks element_type in_elements out_elements in_bytes out_bytes sequence peer",
        "in_splits out_splits asynchronous",
        {"ranks": pl.String},
    ),
    # kind: HtoD, DtoH, DtoD, PtoP, HtoH, fill, unknown; memory: pageable, pinned, device, ...
    "copies": schema("event kind bytes source_memory target_memory"),
    # One row per kernel of which the profiler says how it fills the device; its occupancy is estimated.
    "kernels": schema("event blocks_per_sm warps_per_sm occupancy_percent"),
    # kind as recorded: Context Sync, Stream Sync, Event Sync, Stream Wait Event; the correlation is that of the awaited
    # event record.
    "syncs": schema("event kind stream awaited_stream record_correlation event_id"),
    # `flow` is the id in the file; source and target are null where the start or the end of the arrow hits no event.
    "flows": schema(
        "kind flow source target",
        {"kind": pl.Enum(["launch", "forward-backward", "other"]), "source": Event, "target": Event},
    ),
    # `module_id`: of nn.Module calls.
    "python": schema("event python_id python_parent module_id", {"python_parent": pl.Int64}),
    # One row per op that has shapes; the lists as JSON text, one entry per input.
    "tensors": schema("event shapes types strides concrete"),
    # Negative bytes are a free; device_type: cpu, cuda, hip, xpu, mtia, ...; `allocated_bytes` is the allocator's own
    # running total, `op` the innermost op on that thread at that time.
    "allocations": schema(
        "time_ns address bytes device_type device allocated_bytes reserved_bytes process thread op step",
        {"address": pl.UInt64, "process": pl.Int64, "thread": pl.Int64, "op": Event},
    ),
    "counters": schema("time_ns process name key value"),
    "marks": schema("time_ns name process thread bytes"),
    # The range of bytes of the event in the (decompressed) file.
    "sources": schema("event offset length", {"length": pl.Int32}),
}


@cache
def empty(name: str) -> pl.DataFrame:
    """The frame `name` without rows."""
    return pl.DataFrame(schema=SCHEMAS[name])
