"""Files of a made job: host traces, and a directory as `traceloom record` leaves it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.jobs import program as do
from support.jobs.simulation import Span
from support.jobs.traces import communication, record_ids, shown_ns
from traceloom.testing.host_trace_builder import HostTraceBuilder

if TYPE_CHECKING:
    from support.jobs import Run

_TYPES = {
    "c10::BFloat16": "Tensor(c10::BFloat16)",
    "float": "Tensor(float)",
    "long int": "Tensor(long)",
}
# How host traces spell the arguments of a communication.
_ATTRIBUTES = {
    "Collective name": "collective_name",
    "dtype": "dtype",
    "In msg nelems": "in_msg_nelems",
    "Out msg nelems": "out_msg_nelems",
    "In split size": "in_split_size",
    "Out split size": "out_split_size",
    "Process Group Name": "pg_name",
    "Process Group Description": "pg_desc",
    "Group size": "pg_size",
}


def host_trace_of(
    rank: do.Rank, spans: Sequence[Span], world_size: int, steps: tuple[int, ...]
) -> HostTraceBuilder:
    """The host trace of a rank, joined to its device trace by record function ids.

    Args:
        rank: The rank.
        spans: What happened on it, by start, longer ones first.
        world_size: Ranks of the job.
        steps: Only the ops of these steps; all where empty.
    """
    builder = HostTraceBuilder(process=4000 + rank.rank)
    records = record_ids(spans)
    marks = [
        (span.start, span.end)
        for span in spans
        if span.kind == "annotation" and _number(span) in steps
    ]
    around: dict[int, list[tuple[Span, int]]] = {}
    for span in spans:
        if id(span) not in records or (
            steps and not any(start <= span.start < end for start, end in marks)
        ):
            continue
        assert span.thread is not None
        above = around.setdefault(span.thread, [])
        while above and above[-1][0].end < span.end:
            above.pop()
        number = builder.op(
            span.name,
            thread=span.thread + 1,
            parent=above[-1][1] if above else None,
            record_id=records[id(span)],
            scope=7 if span.kind == "annotation" else 0,
            **_about(span, rank.rank, world_size),
        )
        above.append((span, number))
    return builder


def _number(span: Span) -> int | None:
    """Of a step's annotation."""
    return int(span.name.rpartition("#")[2]) if span.name.startswith("ProfilerStep#") else None


def _about(span: Span, rank: int, world_size: int) -> dict[str, Any]:
    meeting = span.args.get("meeting")
    if meeting is not None:
        described = communication(meeting, rank, world_size)
        return {"attributes": [(name, described[key]) for key, name in _ATTRIBUTES.items()]}
    shapes, types = span.args.get("shapes", []), span.args.get("types", [])
    inputs = [
        ([number, number, 0, math.prod(shape), 2, "cuda:0"], shape, _TYPES[kind])
        if kind in _TYPES
        else (0, [], "Int")
        for number, (shape, kind) in enumerate(zip(shapes, types, strict=True))
    ]
    return {"inputs": inputs, "sequence": span.args.get("sequence", -1)}


def write_run(run: Run, folder: Path, *, host: bool, ending: str, sync_records: bool) -> Path:
    """See `Run.write`."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for rank in run.ranks:
        name = f"rank{rank.rank}"
        builder = run.trace(rank.rank, sync_records=sync_records)
        builder.write(folder / f"{name}.kineto{ending}")
        if host:
            run.host_trace(rank.rank).write(folder / f"{name}.host{ending}")
        entries.append(_entry(run, rank, name, ending, host=host))
    document = {
        "format": "traceloom-capture",
        "version": 1,
        "traceloom": "made",
        "stage": "profiled",
        "run": {"command": ["made job"], "exit_code": 0},
        "ranks": entries,
    }
    (folder / "capture.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return folder


def _entry(run: Run, rank: do.Rank, name: str, ending: str, *, host: bool) -> dict[str, Any]:
    spans = run.of_rank(rank.rank)
    steps = sum(span.kind == "annotation" and _number(span) is not None for span in spans)
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    file = f"{name}.kineto{ending}"
    return {
        "rank": rank.rank,
        "world_size": len(run.ranks),
        "job": "made" if len(run.ranks) > 1 else None,
        "name": name,
        "host": rank.clock.host,
        "process": 4000 + rank.rank,
        "groups": [
            {
                "name": group.name,
                "description": group.description,
                "backend": "nccl",
                "ranks": list(group.ranks),
            }
            for group in run.job.groups
            if rank.rank in group.ranks
        ],
        "window": {
            "file": file,
            "kind": "steps",
            "first_step": 0,
            "step_count": steps,
            "start_ns": shown_ns(rank.clock, first),
            "end_ns": shown_ns(rank.clock, last),
        },
        "graph_step": {"step": 0, "file": file, "host_file": f"{name}.host{ending}"}
        if host
        else None,
        "step_source": "profiler",
        "steps": None,
        "collectives": None,
        "notices": [],
    }
