"""`--structure collapse` for device traces: what the host does between two launches becomes one operator.

The tree of operators, annotations and Python frames tells how a model is built. What is left is when a thread was in
any operator at all, so that launches, waits and idle time keep their causes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, difference, union
from traceloom.anonymize.names import COMMUNICATION, LOADING, STEP
from traceloom.model import Trace
from traceloom.model import category as cat

FUSED = "host_work"
_PIECE = 4096


@dataclass(frozen=True, slots=True)
class Fused:
    """The fused operators of one thread.

    Attributes:
        process, thread: As the file writes them.
        spans: When they ran.
    """

    process: str
    thread: str
    spans: Spans


def fused(trace: Trace) -> list[Fused]:
    """For each host thread the time inside operators, without launches and communication, which stay events."""
    host = trace.lanes.filter(pl.col("kind") == "host").select("lane", "process", "thread")
    events = trace.events.select("lane", "name", "category", "start_ns", "nested_end_ns")
    steps = pl.col("name").is_in(trace.steps["name"].unique().implode())
    out = []
    for lane, process, thread in host.iter_rows():
        of_lane = events.filter(pl.col("lane") == lane)
        on_host = pl.col("category").is_in([cat.OP, cat.ANNOTATION, cat.COLLECTIVE])
        talking = on_host & pl.col("name").str.contains(f"^(?:{COMMUNICATION.pattern})")
        around = on_host & (pl.col("name").str.contains(f"^(?:{STEP.pattern})$|{LOADING.pattern}") | steps)
        inside, shown = (
            union(events["start_ns"].to_numpy(), events["nested_end_ns"].to_numpy())
            for events in (
                of_lane.filter(pl.col("category").is_in([cat.OP, cat.COLLECTIVE]) & ~around),
                of_lane.filter(pl.col("category").is_in(cat.LAUNCHES) | talking),
            )
        )
        spans = difference(inside, shown)
        borders = of_lane.filter(around)
        if spans.start.size:
            # The same time in more pieces: none of them crosses a border of a step or of loading.
            cuts = np.unique(np.concatenate([borders["start_ns"].to_numpy(), borders["nested_end_ns"].to_numpy()]))
            at = np.searchsorted(spans.start, cuts, side="right") - 1
            cuts = cuts[(at >= 0) & (cuts < spans.end[np.maximum(at, 0)]) & (cuts > spans.start[np.maximum(at, 0)])]
            pieces = (np.sort(np.concatenate([side, cuts])) for side in (spans.start, spans.end))
            out.append(Fused(process, thread, Spans(*pieces)))
    return out


def microseconds(time_ns: int) -> bytes:
    """Nanoseconds as exact decimal microseconds."""
    if time_ns < 0:
        return b"-" + microseconds(-time_ns)
    micros, rest = divmod(time_ns, 1000)
    return b"%d.%03d" % (micros, rest) if rest else b"%d" % micros


def borders(first_ns: int, last_ns: int) -> list[bytes]:
    """Two events without length at the ends of the trace, which may have begun with what is left out."""
    head = b'{"ph":"X","cat":"overhead","name":"Resource","pid":-1,"tid":0,"ts":'
    return [b"".join((head, microseconds(at), b',"dur":0}')) for at in (first_ns, last_ns)]


def fused_events(threads: list[Fused], where: dict[tuple[str, str], bytes], origin_ns: int) -> Iterator[list[bytes]]:
    """The fused operators as events, some thousand at a time.

    Args:
        threads: From `fused`.
        where: (process, thread) -> `"pid":1,"tid":2` of the output.
        origin_ns: Subtracted from the times.
    """
    head = b'{"ph":"X","cat":"cpu_op","name":' + json.dumps(FUSED).encode() + b","
    for thread in threads:
        ids = where[thread.process, thread.thread]
        starts, ends = thread.spans.start - origin_ns, thread.spans.end - origin_ns
        for at in range(0, len(starts), _PIECE):
            pairs = zip(starts[at : at + _PIECE].tolist(), ends[at : at + _PIECE].tolist(), strict=True)
            yield [
                b"".join((head, ids, b',"ts":', microseconds(start), b',"dur":', microseconds(end - start), b"}"))
                for start, end in pairs
            ]
