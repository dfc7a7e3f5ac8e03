"""The traces that a profiler would have written of a made job."""

from __future__ import annotations

import json
from typing import Any

from traceloom.testing.builder import TraceBuilder
from traceloom.testing.jobs import program as do
from traceloom.testing.jobs.simulation import Span

_BEGAN_US = 1_000_000  # so that a clock that is late shows no negative times
_SYNC_KINDS = {do.DEVICE: "Context Sync", do.STREAM: "Stream Sync", do.EVENT: "Event Sync"}


def trace_of(rank: do.Rank, spans: list[Span], world_size: int, *, sync_records: bool) -> TraceBuilder:
    """The trace of one rank.

    Args:
        rank: The rank.
        spans: What happened on it.
        world_size: Ranks of the job.
        sync_records: Whether to write `cudaEvent` synchronisation records, as newer profilers do when asked to.
    """
    process = 4000 + rank.rank
    builder = TraceBuilder(
        rank.rank, world_size, generation="2026", host=rank.clock.host, process=process, base_ns=1_700_000_000 * 10**9
    )
    for span in spans:
        start, end = rank.clock.shows(span.start), rank.clock.shows(span.end)
        at, took = _BEGAN_US + start / 1000, (end - start) / 1000
        if span.thread is not None:
            _host(builder, span, process + span.thread, at, took)
            if sync_records and span.args:
                _sync(builder, span, at, took)
        else:
            _device(builder, span, at, took, world_size)
    for number in range(len(rank.threads)):
        builder.thread_name(process + number, f"thread {number}" if number else "python")
    return builder


def _host(builder: TraceBuilder, span: Span, thread: int, at: float, took: float) -> None:
    if span.kind == "op":
        builder.op(span.name, at, took, thread=thread, **span.args)
    elif span.kind == "annotation":
        builder.annotation(span.name, at, took, thread=thread)
    else:
        assert span.correlation is not None
        submits = span.name in ("cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
        builder.launch(span.name, at, took, correlation=span.correlation, thread=thread, flow=submits)


def _device(builder: TraceBuilder, span: Span, at: float, took: float, world_size: int) -> None:
    assert span.stream is not None
    if span.kind == "copy":
        builder.copy(
            span.name, at, took, bytes=span.args["bytes"], stream=span.stream, correlation=span.correlation
        )  # fmt: skip
    elif span.kind == "fill":
        builder.fill(at, took, bytes=span.args["bytes"], stream=span.stream, correlation=span.correlation)
    else:
        meeting = span.args.get("meeting")
        args: dict[str, Any] = {} if meeting is None else _communication(meeting, span.rank, world_size)
        builder.kernel(span.name, at, took, stream=span.stream, correlation=span.correlation, **args)


def _communication(meeting: do.Meeting, rank: int, world_size: int) -> dict[str, Any]:
    size = len(meeting.members)
    args = TraceBuilder.collective_args(meeting.kind, meeting.group, size, meeting.elements, "Float")
    args |= {"Process Group Ranks": json.dumps(list(meeting.members)), "Seq": meeting.sequence, "Rank": rank}
    if meeting.kind in ("send", "recv"):
        source, target = meeting.members
        args |= {"Src Rank": source, "Dst Rank": target, "Group size": world_size}
        args |= {"Process Group Ranks": json.dumps(list(range(world_size)))}
    return args


def _sync(builder: TraceBuilder, span: Span, at: float, took: float) -> None:
    about = span.args
    kind = _SYNC_KINDS.get(about.get("sync", ""), "Stream Wait Event")
    stream = about.get("waits", about.get("awaited", 0))
    more = {}
    if "recorded" in about:
        more = {"wait_on_stream": about["awaited"], "wait_on_cuda_event_record_corr_id": about["recorded"]}
    waiting = 0.0 if kind == "Stream Wait Event" else took
    builder.sync(kind, at, waiting, stream=stream, correlation=span.correlation, **more)
