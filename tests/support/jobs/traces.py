"""The traces that a profiler would have written of a made job."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from support.jobs import program as do
from support.jobs.layout import Group
from support.jobs.simulation import CALLS, Span
from traceloom.testing.trace_builder import TraceBuilder

BEGAN_US = 1_000_000  # so that a clock that is late shows no negative times
BASE_NS = 1_700_000_000 * 10**9
_SYNC_KINDS = {do.DEVICE: "Context Sync", do.STREAM: "Stream Sync", do.EVENT: "Event Sync"}
_SUBMITS = {*CALLS.values(), "cudaLaunchKernelExC"}


def shown_ns(clock: do.Clock, time: int) -> int:
    """What a trace shows of a time of the job: nanoseconds since the epoch."""
    return BASE_NS + BEGAN_US * 1000 + clock.shows(time)


def record_ids(spans: Iterable[Span]) -> dict[int, int]:
    """Record function id of each op and annotation: by `id()` of its span, in the order in which they began."""
    named = (span for span in spans if span.kind in ("op", "annotation"))
    return {id(span): number for number, span in enumerate(named, 1)}


def trace_of(
    rank: do.Rank,
    spans: list[Span],
    world_size: int,
    *,
    sync_records: bool,
    groups: Iterable[Group] = (),
) -> TraceBuilder:
    """The trace of one rank.

    Args:
        rank: The rank.
        spans: What happened on it, by start, longer ones first.
        world_size: Ranks of the job.
        sync_records: Whether to write `cudaEvent` synchronisation records, as newer profilers do when asked to.
        groups: The process groups of the job; the trace lists those of its rank.
    """
    process = 4000 + rank.rank
    builder = TraceBuilder(
        rank.rank,
        world_size,
        generation="2026",
        host=rank.clock.host,
        process=process,
        base_ns=BASE_NS,
    )
    for group in groups:
        if rank.rank in group.ranks:
            builder.group(group.name, list(group.ranks), description=group.description)
    writing = _Writing(builder, rank, world_size, record_ids(spans), {}, {}, {})
    for span in spans:
        start, end = rank.clock.shows(span.start), rank.clock.shows(span.end)
        at, took = BEGAN_US + start / 1000, (end - start) / 1000
        if span.thread is not None:
            writing.host(span, at, took)
            if sync_records and ("sync" in span.args or "waits" in span.args):
                _sync(builder, span, at, took)
        else:
            writing.device(span, at, took)
    for number in range(len(rank.threads)):
        builder.thread_name(process + number, f"thread {number}" if number else "python")
    return builder


@dataclass(slots=True)
class _Writing:
    """What is known of a rank while its trace is written."""

    builder: TraceBuilder
    rank: do.Rank
    world_size: int
    records: dict[int, int]
    open: dict[int, list[Span]]  # by thread: what has begun and not ended
    external: dict[int, int]  # by correlation: the innermost op at its launch
    frames: dict[int, int]  # by `id()` of a frame's span: its number

    def host(self, span: Span, at: float, took: float) -> None:
        """Write an op, annotation, frame or runtime call."""
        assert span.thread is not None
        number = 4000 + self.rank.rank + span.thread
        around = self.open.setdefault(span.thread, [])
        while around and around[-1].end < span.end:
            around.pop()
        if span.kind == "python":
            outer = next((id(frame) for frame in reversed(around) if frame.kind == "python"), None)
            self._frame(span, at, took, number, outer)
        elif span.kind in ("op", "annotation"):
            self._named(span, at, took, number)
        else:
            self._call(span, at, took, number, around)
            return
        around.append(span)

    def _frame(self, span: Span, at: float, took: float, thread: int, outer: int | None) -> None:
        own = self.frames[id(span)] = len(self.frames) + 1
        self.builder.python(
            span.name,
            at,
            took,
            thread=thread,
            python_id=own,
            parent_id=None if outer is None else self.frames[outer],
            module_id=own if span.name.startswith("nn.Module") else None,
        )

    def _named(self, span: Span, at: float, took: float, thread: int) -> None:
        number = self.records[id(span)]
        args: dict[str, Any] = {"external_id": number, "Record function id": number}
        if span.kind == "annotation":
            if "meeting" in span.args:
                args |= communication(span.args["meeting"], self.rank.rank, self.world_size)
            self.builder.annotation(span.name, at, took, thread=thread, **args)
            return
        about = dict(span.args)
        meeting = about.pop("meeting", None)
        if meeting is not None:
            about |= communication(meeting, self.rank.rank, self.world_size)
        self.builder.op(span.name, at, took, thread=thread, **about, **args)

    def _call(self, span: Span, at: float, took: float, thread: int, around: list[Span]) -> None:
        assert span.correlation is not None
        inner = next((op for op in reversed(around) if op.kind == "op"), None)
        args: dict[str, Any] = {}
        if inner is not None:
            args["External id"] = self.external[span.correlation] = self.records[id(inner)]
        self.builder.launch(
            span.name,
            at,
            took,
            correlation=span.correlation,
            thread=thread,
            flow=span.name in _SUBMITS,
            **args,
        )

    def device(self, span: Span, at: float, took: float) -> None:
        """Write a kernel, copy or fill."""
        assert span.stream is not None
        assert span.correlation is not None
        where: dict[str, Any] = {"stream": span.stream, "correlation": span.correlation}
        if span.kind == "copy":
            self.builder.copy(span.name, at, took, bytes=span.args["bytes"], **where)
        elif span.kind == "fill":
            self.builder.fill(at, took, bytes=span.args["bytes"], **where)
        else:
            args = {key: value for key, value in span.args.items() if key not in ("meeting", "met")}
            if span.correlation in self.external:
                args["External id"] = self.external[span.correlation]
            if "meeting" in span.args:
                args |= communication(span.args["meeting"], self.rank.rank, self.world_size)
            self.builder.kernel(span.name, at, took, **where, **args)


def communication(meeting: do.Meeting, rank: int, world_size: int) -> dict[str, Any]:
    """The arguments by which PyTorch describes a communication, on its op and on its kernel."""
    message = meeting.kind in ("send", "recv")
    ranks = meeting.ranks or (tuple(range(world_size)) if message else meeting.members)
    args = TraceBuilder.collective_args(
        meeting.kind, meeting.group, len(ranks), meeting.elements, meeting.element_type
    )
    number = meeting.sequence if meeting.written_sequence is None else meeting.written_sequence
    args |= {
        "Out msg nelems": meeting.elements
        if meeting.out_elements is None
        else meeting.out_elements,
        "Process Group Ranks": json.dumps(list(ranks)),
        "Seq": number,
        "Rank": ranks.index(rank),
        "In split size": json.dumps(list(meeting.in_splits)),
        "Out split size": json.dumps(list(meeting.out_splits)),
    }
    if meeting.description:
        args["Process Group Description"] = meeting.description
    if message:
        # PyTorch shows the peer: its place in the group, and its rank.
        source, target = meeting.members
        key, peer = ("Dst Rank", target) if meeting.kind == "send" else ("Src Rank", source)
        args |= {key: peer, "Rank": ranks.index(peer)}
    return args


def _sync(builder: TraceBuilder, span: Span, at: float, took: float) -> None:
    about = span.args
    kind = _SYNC_KINDS.get(about.get("sync", ""), "Stream Wait Event")
    stream = about.get("waits", about.get("awaited", 0))
    more = {}
    if "recorded" in about:
        more = {
            "wait_on_stream": about["awaited"],
            "wait_on_cuda_event_record_corr_id": about["recorded"],
        }
    waiting = 0.0 if kind == "Stream Wait Event" else took
    builder.sync(kind, at, waiting, stream=stream, correlation=span.correlation, **more)
