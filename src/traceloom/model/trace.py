"""Trace: one process's part of a run, in columns."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from traceloom.errors import broken
from traceloom.model.category import GPU_WORK
from traceloom.model.deferred import Deferred
from traceloom.model.notice import Notice
from traceloom.model.schema import SCHEMAS

_SLICE = 1 << 20  # rows added up at once, since a sum as long as a very large trace would lie in memory


@dataclass(frozen=True)
class Meta:
    """What the file says about the process and the recording. Unknown is None, with the reason in the notices."""

    path: str
    kind: str = "kineto"
    rank: int | None = None
    rank_evidence: str | None = None  # capture, distributedInfo, arguments, file name
    world_size: int | None = None
    host: str | None = None
    process: int | None = None  # the process id with most host events
    backend: str | None = None
    base_ns: int = 0  # what was added to every time of the file
    clock: str = "unix"  # unix or unknown (time since boot of a host)
    unit_ns: int = 1  # resolution of the file's times: 1, or 1000 for whole microseconds
    event_count: int = 0  # entries of traceEvents, all phases
    file_bytes: int = 0  # decompressed
    schema_version: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, bool] = field(default_factory=dict)  # record_shapes, with_stack, profile_memory, ...
    job: dict[str, str] = field(default_factory=dict)  # job ids, trace id, trace name
    capture: dict[str, Any] | None = None  # this rank's part of capture.json


@dataclass(frozen=True)
class Trace:
    """One process's part of a run: fixed columns (see `traceloom.model.schema`), small tables, notices.

    A frame may be given as `Deferred`: it is made when it is first asked for, and kept then.
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

    def __post_init__(self) -> None:
        """Set the frames apart that are made later."""
        own = self.__dict__
        own["_waiting"] = {name: own.pop(name) for name in list(own) if isinstance(own[name], Deferred)}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A frame that was not asked for before; nothing else is missing."""
            waiting = self.__dict__.get("_waiting", {})
            deferred = waiting.get(name)
            if deferred is None:
                raise AttributeError(f"a trace has no `{name}`")
            frame = self.__dict__[name] = deferred.frame()
            waiting.pop(name, None)
            return frame

    def with_deferred(self, name: str, frame: Deferred) -> Trace:
        """The same trace with another frame, which is made when it is first asked for."""
        other = object.__new__(Trace)
        other.__dict__.update(self.__dict__)
        other.__dict__.pop(name, None)
        other.__dict__["_waiting"] = {**self.__dict__["_waiting"], name: frame}
        return other

    def __getstate__(self) -> dict[str, Any]:
        """All frames made, since what makes them cannot leave the process."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def rank(self) -> int | None:
        """The rank, where known."""
        return self.meta.rank

    @property
    def start_ns(self) -> int:
        """Start of the earliest event; 0 for a trace without events."""
        return int(self.events["start_ns"][0]) if self.events.height else 0

    @cached_property
    def end_ns(self) -> int:
        """End of the latest event; 0 for a trace without events."""
        if not self.events.height:
            return 0
        spans = self.events.select("start_ns", "duration_ns")
        ends = (
            (part["start_ns"] + part["duration_ns"].clip(lower_bound=0)).max() for part in spans.iter_slices(_SLICE)
        )
        return max(int(end) for end in ends)  # type: ignore[arg-type]

    def frames(self) -> dict[str, pl.DataFrame]:
        """All frames by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in SCHEMAS}

    def gpu_work(self) -> pl.DataFrame:
        """The rows of kernels, copies and fills."""
        return self.events.filter(pl.col("category").is_in(GPU_WORK))

    def __repr__(self) -> str:
        rank = "?" if self.rank is None else self.rank
        return f"<Trace rank {rank}: {self.events.height:,} events, {self.steps.height} steps, {self.meta.path}>"

    def check(self) -> None:
        """Raise InvariantError where the trace breaks its own laws.

        Columns are as declared; ids are row numbers; rows are sorted by start; parents stand on the same lane and
        enclose their children up to `nested_end_ns`; self times are >= 0 and add up to the lane's busy time; `op` and
        `launch` point to events of the right kind.
        """
        for name, frame in self.frames().items():
            if frame.schema != SCHEMAS[name]:
                raise broken("columns", f"frame {name} has {frame.schema}, expected {SCHEMAS[name]}")
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
        outside = (start[child] < start[parent]) | (end[child] > end[parent]) | (lane[child] != lane[parent])
        if outside.any():
            raise broken("nesting", f"{int(outside.sum())} events lie outside their parents")
        if (depth[child] != depth[parent] + 1).any() or depth[~has_parent].any():
            raise broken("nesting", "depths do not follow the parents")
        self_ns = end - start
        np.subtract.at(self_ns, parent, end[child] - start[child])
        if (self_ns < 0).any():
            raise broken("self-time", f"{int((self_ns < 0).sum())} events have negative self time")
        kinds = self.lanes.select("lane", "kind", "busy_ns")
        by_lane = (
            pl.DataFrame({"lane": events["lane"], "self_ns": self_ns})
            .group_by("lane")
            .agg(pl.col("self_ns").sum())
            .join(kinds, on="lane")
            .filter(pl.col("kind").is_in(["host", "other"]))
        )
        wrong = by_lane.filter(pl.col("self_ns") != pl.col("busy_ns"))
        if wrong.height:
            raise broken("self-time", f"self times of {wrong.height} lanes do not add up to their busy time")
        for column, allowed in (("op", ["op"]), ("launch", ["runtime", "driver"])):
            target = events[column].drop_nulls()
            if target.len() and not events["category"].gather(target).is_in(allowed).all():
                raise broken("references", f"`{column}` points to events that are no {' or '.join(allowed)}")
        for name, frame in self.frames().items():
            if name != "events" and "event" in frame.columns and frame.height:
                highest = frame["event"].max()
                if isinstance(highest, int) and highest >= events.height:
                    raise broken("references", f"frame {name} points past the last event")
