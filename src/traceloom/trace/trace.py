"""The frames of one process: `Trace` and `Meta` with their schemas and self-check, and `HostTrace`.

Times are int64 nanoseconds of the trace's clock (Unix time where the file gives it), byte counts
int64. `event`, `parent`, `op`, `launch`, `source`, `target` are row numbers of `events`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from traceloom.errors import broken
from traceloom.trace.frames import build_schema
from traceloom.trace.notice import Notice
from traceloom.trace.vocabulary import CATEGORIES, GPU_WORK, PROFILER


class DeferredFrame:
    """A frame that is built on first use.

    Args:
        make: Builds the frame; called once.
        arguments: Arguments of `make`, kept until then.
    """

    __slots__ = ("_frame", "_kept", "_make")

    def __init__(self, make: Callable[..., pl.DataFrame], *arguments: Any) -> None:
        self._make = make
        self._kept = arguments
        self._frame: pl.DataFrame | None = None

    def frame(self) -> pl.DataFrame:
        """Returns the frame, built on the first call."""
        if self._frame is None:
            self._frame = self._make(*self._kept)
            self._kept = ()
        return self._frame


CategoryType = pl.Enum(list(CATEGORIES))
Event = pl.UInt32
REQUEST = "request"  # `evidence` of steps that are requests to a server

SCHEMAS: dict[str, pl.Schema] = {
    # Rows are sorted by start, longer ones first, then by file order; `event` is the row number.
    # `duration_ns` is as recorded and may be negative in damaged files. `nested_end_ns` is the end,
    # shortened where spans of a lane cross so that they nest, and never before the start. `lane`
    # is a row of `lanes`. Host events have process and thread, device events device and stream; a
    # process is null where the file gives no number. `correlation` joins a launch and its GPU
    # work. `external_id` is as recorded, null on GPU work where it only repeats the correlation.
    # `record_function_id` joins the host trace; 0 in the file is null here. `sequence` is
    # autograd's sequence number, which with `forward_thread` joins forward and backward. `parent`
    # is the enclosing event on the same lane, `depth` 0 the outermost. `op` is the innermost op
    # around a launch; for GPU work, around its launch. `launch` is the runtime or driver call that
    # submitted GPU work. `step` is the step at the start of a host event; for GPU work, the step of
    # its launch.
    "events": build_schema(
        "event name category start_ns duration_ns nested_end_ns lane process thread device stream correlation",
        "external_id record_function_id sequence forward_thread parent depth op launch step",
        {
            "category": CategoryType,
            "process": pl.Int64,
            "thread": pl.Int64,
            "forward_thread": pl.Int64,
            "op": Event,
        },
    ),
    # Process and thread as in the file; `name` is the label: "main thread", "autograd 12",
    # "stream 7". `busy_ns` is the union of the lane's events.
    "lanes": build_schema(
        "lane kind process thread device stream name events busy_ns",
        {
            "kind": pl.Enum(["host", "device", "device_annotation", "device_sync", "other"]),
            "events": pl.UInt32,
        },
    ),
    # A name is null where the file leaves it empty; `used` devices have GPU work in this trace.
    "devices": build_schema("device name memory_bytes multiprocessors compute_capability used"),
    # The ranks are null where the file truncates the list.
    "groups": build_schema("group description backend size ranks", {"ranks": pl.List(pl.Int32)}),
    # `step` is the number in the name, unique here and ascending. A step ends at the start of the
    # next one, the last at the end of its own span. `complete` is false where the recording cuts
    # the step off.
    "steps": build_schema(
        "step name start_ns end_ns evidence complete",
        {"evidence": pl.Enum(["profiler-step", "mark", "annotation", "request"])},
    ),
    # `event` is the op, annotation or kernel of the call; kind: all_reduce, all_gather,
    # reduce_scatter, all_to_all, broadcast, send, ...; ranks as recorded (may be truncated); bytes
    # are null where the element type is unknown; `peer` is the root, source or destination.
    "collectives": build_schema(
        "event kind group group_size ranks element_type in_elements out_elements in_bytes out_bytes sequence peer",
        "in_splits out_splits asynchronous",
        {"ranks": pl.String},
    ),
    # kind: HtoD, DtoH, DtoD, PtoP, HtoH, fill, unknown; memory: pageable, pinned, device, ...
    "copies": build_schema("event kind bytes source_memory target_memory"),
    # One row per kernel for which the profiler reports how it fills the device; its occupancy is an
    # estimate.
    "kernels": build_schema("event blocks_per_sm warps_per_sm occupancy_percent"),
    # kind as recorded: Context Sync, Stream Sync, Event Sync, Stream Wait Event; the correlation is
    # that of the awaited event record.
    "syncs": build_schema("event kind stream awaited_stream record_correlation event_id"),
    # `flow` is the id in the file; source and target are null where the start or the end of the
    # arrow hits no event. A dependency is between two nodes of a CUDA graph.
    "flows": build_schema(
        "kind flow source target",
        {
            "kind": pl.Enum(["launch", "forward-backward", "dependency", "other"]),
            "source": Event,
            "target": Event,
        },
    ),
    # `module_id`: of nn.Module calls.
    "python": build_schema("event python_id python_parent module_id", {"python_parent": pl.Int64}),
    # One row per op with recorded shapes; lists as JSON text, one entry per input.
    "tensors": build_schema("event shapes types strides concrete"),
    # Negative bytes are frees; device_type: cpu, cuda, hip, xpu, mtia, ...; `allocated_bytes` is
    # the allocator's own running total, `op` the innermost op on that thread at that time.
    "allocations": build_schema(
        "time_ns address bytes device_type device allocated_bytes reserved_bytes process thread op step",
        {"address": pl.UInt64, "process": pl.Int64, "thread": pl.Int64, "op": Event},
    ),
    "counters": build_schema("time_ns process name key value"),
    "marks": build_schema("time_ns name process thread bytes"),
    # The byte range of the event in the (decompressed) file.
    "sources": build_schema("event offset length", {"length": pl.Int32}),
}


@cache
def build_empty_frame(name: str) -> pl.DataFrame:
    """Returns the frame `name` without rows."""
    return pl.DataFrame(schema=SCHEMAS[name])


_SLICE_ROWS = (
    1 << 20
)  # rows summed at once, since the end times of all rows would take too much memory

_END_NS = pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=0)


@dataclass(frozen=True)
class Meta:
    """Metadata of the process and the recording.

    Unknown values are None; the notices give the reason.
    """

    path: str
    kind: str = "kineto"
    rank: int | None = None
    rank_evidence: str | None = None  # capture, distributedInfo, arguments, file name, label
    world_size: int | None = None
    host: str | None = None
    process: int | None = None  # the process id with most host events
    backend: str | None = None
    base_ns: int = 0  # added to every time of the file
    clock: str = "unix"  # unix or unknown (time since boot of a host)
    unit_ns: int = 1  # resolution of the file's times: 1, or 1000 for whole microseconds
    event_count: int = 0  # entries of traceEvents, all phases
    file_bytes: int = 0  # decompressed
    schema_version: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, bool] = field(
        default_factory=dict
    )  # record_shapes, with_stack, profile_memory, ...
    job: dict[str, str] = field(default_factory=dict)  # job ids, trace id, trace name
    capture: dict[str, Any] | None = None  # this rank's part of capture.json


@dataclass(frozen=True)
class Trace:
    """One process's part of a run: frames with fixed columns (`SCHEMAS`), metadata and notices.

    A frame may be given as a `DeferredFrame`, which is built on first use and then kept. `siblings`
    are the traces of the other ranks of a file in which several were merged; a session has all.
    """

    meta: Meta
    events: pl.DataFrame
    lanes: pl.DataFrame
    devices: pl.DataFrame
    groups: pl.DataFrame
    steps: pl.DataFrame
    collectives: pl.DataFrame
    copies: pl.DataFrame
    kernels: pl.DataFrame
    syncs: pl.DataFrame
    flows: pl.DataFrame
    python: pl.DataFrame
    tensors: pl.DataFrame
    allocations: pl.DataFrame
    counters: pl.DataFrame
    marks: pl.DataFrame
    sources: pl.DataFrame
    notices: tuple[Notice, ...] = ()
    siblings: tuple[Trace, ...] = ()

    def __post_init__(self) -> None:
        """Separates the frames that are built later."""
        attributes = self.__dict__
        attributes["_waiting"] = {
            name: attributes.pop(name)
            for name in list(attributes)
            if isinstance(attributes[name], DeferredFrame)
        }

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Builds a deferred frame on first access."""
            waiting = self.__dict__.get("_waiting", {})
            deferred = waiting.get(name)
            if deferred is None:
                raise AttributeError(f"a trace has no `{name}`")
            frame = self.__dict__[name] = deferred.frame()
            waiting.pop(name, None)
            return frame

    def __getstate__(self) -> dict[str, Any]:
        """Builds all frames, since what builds them cannot be pickled."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def rank(self) -> int | None:
        """The rank, where known."""
        return self.meta.rank

    @cached_property
    def _in_window(self) -> pl.Series:
        """Which events make the window: all but the profiler's own, where there are others."""
        others = self.events["category"] != PROFILER
        return others if others.any() else ~others

    @property
    def start_ns(self) -> int:
        """Start of the earliest event but the profiler's own; 0 for a trace without events."""
        first = self._in_window.arg_max()
        return int(self.events["start_ns"][first]) if first is not None else 0

    @cached_property
    def end_ns(self) -> int:
        """End of the latest event but the profiler's own; 0 for a trace without events."""
        spans = self.events.select("start_ns", "duration_ns", self._in_window.alias("counts"))
        slice_ends = (
            part.filter("counts").select(end=_END_NS).max().item()
            for part in spans.iter_slices(_SLICE_ROWS)
        )
        return max((int(end) for end in slice_ends if end is not None), default=0)

    def frames(self) -> dict[str, pl.DataFrame]:
        """All frames by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in SCHEMAS}

    def gpu_work(self) -> pl.DataFrame:
        """Returns the events that are kernels, copies or fills."""
        return self.events.filter(pl.col("category").is_in(GPU_WORK))

    def __repr__(self) -> str:
        rank = "?" if self.rank is None else self.rank
        return f"<Trace rank {rank}: {self.events.height:,} events, {self.steps.height} steps, {self.meta.path}>"

    def check(self) -> None:
        """Raise InvariantError if the trace breaks one of its invariants.

        Columns are as declared; ids are row numbers; rows are sorted by start; parents stand on the
        same lane and enclose their children up to `nested_end_ns`; self times are >= 0 and add up
        to the lane's busy time; `op` and `launch` point to events of the right kind.
        """
        for name, frame in self.frames().items():
            if frame.schema != SCHEMAS[name]:
                raise broken(
                    "columns", f"frame {name} has {frame.schema}, expected {SCHEMAS[name]}"
                )
        events = self.events
        if not (events["event"].to_numpy() == np.arange(events.height)).all():
            raise broken("ids", "event ids are not the row numbers")
        if not events["start_ns"].is_sorted():
            raise broken("order", "events are not sorted by start")
        start = events["start_ns"].to_numpy()
        end = events["nested_end_ns"].to_numpy()
        if (end < start).any():
            raise broken("nesting", f"{int((end < start).sum())} events end before they start")
        has_parent = events["parent"].is_not_null().to_numpy()
        child = np.flatnonzero(has_parent)
        parent = events["parent"].drop_nulls().to_numpy()
        lane = events["lane"].to_numpy()
        depth = events["depth"].to_numpy().astype(np.int64)
        is_outside = (
            (start[child] < start[parent])
            | (end[child] > end[parent])
            | (lane[child] != lane[parent])
        )
        if is_outside.any():
            raise broken("nesting", f"{int(is_outside.sum())} events lie outside their parents")
        if (depth[child] != depth[parent] + 1).any() or depth[~has_parent].any():
            raise broken("nesting", "depths do not follow the parents")
        self_ns = end - start
        np.subtract.at(self_ns, parent, end[child] - start[child])
        if (self_ns < 0).any():
            raise broken("self-time", f"{int((self_ns < 0).sum())} events have negative self time")
        kinds = self.lanes.select("lane", "kind", "busy_ns")
        lane_times = (
            pl.DataFrame({"lane": events["lane"], "self_ns": self_ns})
            .group_by("lane")
            .agg(pl.col("self_ns").sum())
            .join(kinds, on="lane")
            .filter(pl.col("kind").is_in(["host", "other"]))
        )
        wrong = lane_times.filter(pl.col("self_ns") != pl.col("busy_ns"))
        if wrong.height:
            raise broken(
                "self-time", f"self times of {wrong.height} lanes do not add up to their busy time"
            )
        for column, allowed in (("op", ["op"]), ("launch", ["runtime", "driver"])):
            target = events[column].drop_nulls()
            if target.len() and not events["category"].gather(target).is_in(allowed).all():
                raise broken(
                    "references", f"`{column}` points to events that are no {' or '.join(allowed)}"
                )
        for name, frame in self.frames().items():
            if name != "events" and "event" in frame.columns and frame.height:
                highest = frame["event"].max()
                if isinstance(highest, int) and highest >= events.height:
                    raise broken("references", f"frame {name} points past the last event")


# One row per node, ascending by id, which is the order in which the ops began. `id` is as in the
# host trace; record function 0 and autograd sequence -1 in the file are null here. Threads have
# PyTorch's own numbers: 1, 2, 3. Inputs and outputs are lists as JSON text, `attributes` every
# other attribute of the node, as a JSON object.
HOST_OPS = build_schema(
    "id name parent forward_parent record_function_id sequence scope thread forward_thread schema inputs",
    "input_shapes input_types outputs output_shapes output_types attributes",
    dict.fromkeys(("parent", "forward_parent", "thread", "forward_thread"), pl.Int64),
)
# Nodes that stand for a process or a thread; the prefix in brackets is always PyTorch's.
_ROOT_PATTERN = r"^\[pytorch\|profiler\|execution_(?:trace|graph)\|(?:process|thread)\]$"
GROUP_LIST = "## process_group:init ##"


@dataclass(frozen=True)
class HostTrace:
    """The execution trace (host trace) that PyTorch's observer wrote for one process.

    Attributes:
        path: The file.
        ops: One row per node, ascending by id; columns as in `HOST_OPS`. Process and thread nodes
            are included.
        schema: Version of the format as stated in the file; None where it is missing.
        process: Process id.
        rank: The rank, from the capture or the file name.
        recorded_at: Local time of day at which the observer started, as written.
        start_ms: When it started, ms of a monotonic clock, not Unix time.
        finish_ms: When it ended; None where the file is truncated.
        groups: Process groups known at the start; columns as in the trace's `groups`.
        notices: What was repaired or lost.
    """

    path: str
    ops: pl.DataFrame
    schema: str | None = None
    process: int | None = None
    rank: int | None = None
    recorded_at: str | None = None
    start_ms: int | None = None
    finish_ms: int | None = None
    groups: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SCHEMAS["groups"]))
    notices: tuple[Notice, ...] = ()

    def roots(self) -> pl.Series:
        """Returns which nodes stand for a process or a thread rather than an op; Boolean, one per
        row of `ops`.
        """
        return self.ops["name"].str.contains(_ROOT_PATTERN).fill_null(value=False).alias("root")

    def __repr__(self) -> str:
        rank = "?" if self.rank is None else self.rank
        return (
            f"<HostTrace rank {rank}: {self.ops.height:,} nodes, schema {self.schema}, {self.path}>"
        )
