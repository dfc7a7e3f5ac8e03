"""Writes files for https://www.speedscope.app: every host thread in time order, and GPU time by
launching stack.

The schema is https://www.speedscope.app/file-format-schema.json: frames are shared, a thread is an
`evented` profile (opened and closed frames, in order, nested), GPU time a `sampled` one (stacks
with weights).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.flame import call_tree, flame, list_thread_names
from traceloom.analyze.host_events import parse_frame_places
from traceloom.trace.array_types import Ints
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_AT_ONCE = 1 << 18  # opened and closed frames that are encoded at once
_Frame = tuple[str, str | None, int | None]  # name, file, line
_NO_LAUNCH: _Frame = ("(launch not recorded)", None, None)


@dataclass(slots=True)
class _Frames:
    """Distinct frames, numbered in order of first use."""

    keys: list[_Frame] = field(default_factory=list)
    _number: dict[_Frame, int] = field(default_factory=dict)

    def number(self, frame: _Frame) -> int:
        index = self._number.get(frame)
        if index is None:
            index = self._number[frame] = len(self.keys)
            self.keys.append(frame)
        return index

    def numbers(self, table: pl.DataFrame) -> list[int]:
        """Returns the numbers of rows with the columns name, file, line."""
        return [self.number(frame) for frame in table.select("name", "file", "line").iter_rows()]


def write(session: Session, handle: BinaryIO) -> None:
    """Writes the threads of all ranks as one file; times count from the earliest event of the
    session.
    """
    frames = _Frames()
    epoch = min((trace.start_ns for trace in session.traces if trace.events.height), default=0)
    several = len(session.traces) > 1
    head = {
        "$schema": SCHEMA,
        "name": session.name,
        "exporter": f"traceloom {__version__}",
        "activeProfileIndex": 0,
    }
    handle.write(json.dumps(head)[:-1].encode() + b', "profiles": [')
    between = b"\n"
    for trace in session.traces:
        rank_prefix = (
            "" if not several else "rank ?: " if trace.rank is None else f"rank {trace.rank}: "
        )
        for part in _profiles(trace, epoch, rank_prefix, frames):
            handle.writelines(
                (between if number == 0 else b"") + chunk for number, chunk in enumerate(part)
            )
            between = b",\n"
    if between == b"\n":
        nothing = {"type": "evented", "name": "nothing recorded", "unit": "nanoseconds"}
        handle.write(json.dumps({**nothing, "startValue": 0, "endValue": 0, "events": []}).encode())
    handle.write(b'], "shared": {"frames": [')
    fields = ("name", "file", "line")
    frame_entries = (
        {key: value for key, value in zip(fields, frame, strict=True) if value is not None}
        for frame in frames.keys
    )
    handle.write(b",".join(json.dumps(frame).encode() for frame in frame_entries))
    handle.write(b"]}}\n")


def _profiles(trace: Trace, epoch: int, before: str, frames: _Frames) -> Iterator[Iterator[bytes]]:
    """Yields the text of each profile of a rank, in pieces: the main thread first."""
    tree, folded = build_forest(trace), call_tree(trace)
    number = np.array(frames.numbers(parse_frame_places(folded.names)), dtype=np.int64)
    named_lanes = (
        trace.lanes.select("lane", "kind", name=list_thread_names(trace))
        .filter(pl.col("kind") == "host")
        .sort("lane")
    )
    for lane, name in named_lanes.select("lane", "name").iter_rows():
        low, high = np.searchsorted(tree.lane, [lane, lane + 1]).tolist()
        if high > low:
            yield _thread(
                trace, (low, high), number[folded.name_of[low:high]], epoch, before + name
            )
    flame_graph = flame(trace)
    if flame_graph.gpu_work_ns:
        # GPU time by stack; a thread is the bottom frame of its stacks
        table = flame_graph.frames
        numbers = frames.numbers(table)
        parent = table["parent"].to_list()
        stacks: list[list[int]] = []
        for row, parent_row in enumerate(parent):
            stacks.append([*([] if parent_row is None else stacks[parent_row]), numbers[row]])
        weights = table["self_device_ns"].to_list()
        weighted_rows = [row for row, weight in enumerate(weights) if weight]
        samples, values = (
            [stacks[row] for row in weighted_rows],
            [weights[row] for row in weighted_rows],
        )
        if flame_graph.unattributed_device_ns:
            samples.append([frames.number(_NO_LAUNCH)])
            values.append(flame_graph.unattributed_device_ns)
        profile = {
            "type": "sampled",
            "name": f"{before}GPU time by launching stack",
            "unit": "nanoseconds",
            "startValue": 0,
            "endValue": sum(values),
            "samples": samples,
            "weights": values,
        }
        yield iter([json.dumps(profile).encode()])


def _thread(
    trace: Trace, span: tuple[int, int], frame: Ints, epoch: int, name: str
) -> Iterator[bytes]:
    """Yields the events of one lane, opened and closed in order: ended frames are closed before the
    next one opens.
    """
    tree = build_forest(trace)
    low, high = span
    indices = np.arange(high - low)
    start, end = tree.start_ns[low:high] - epoch, tree.end_ns[low:high] - epoch
    stop = np.minimum(tree.stop[low:high], high) - low
    closing = np.lexsort((-indices, stop))  # of events that end together, the innermost first
    turn_open = indices + np.searchsorted(stop[closing], indices, side="right")
    turn_close = np.arange(indices.size) + stop[closing]
    total = 2 * indices.size
    event_ns, event_frame = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
    opens = np.zeros(total, dtype=np.bool_)
    event_ns[turn_open], event_frame[turn_open], opens[turn_open] = start, frame, True
    event_ns[turn_close], event_frame[turn_close] = end[closing], frame[closing]
    event_ns = np.maximum.accumulate(event_ns)
    header = {
        "type": "evented",
        "name": name,
        "unit": "nanoseconds",
        "startValue": int(event_ns[0]),
        "endValue": int(event_ns[-1]),
    }
    yield json.dumps(header)[:-1].encode() + b', "events": ['
    for first in range(0, total, _AT_ONCE):
        batch = slice(first, first + _AT_ONCE)
        text = pl.DataFrame(
            {"open": opens[batch], "frame": event_frame[batch], "at": event_ns[batch]}
        ).select(
            pl.concat_str(
                pl.when("open")
                .then(pl.lit('{"type":"O","frame":'))
                .otherwise(pl.lit('{"type":"C","frame":')),
                "frame",
                pl.lit(',"at":'),
                "at",
                pl.lit("}"),
            ).str.join(",")
        )
        yield (b"," if first else b"") + str(text.item()).encode()
    yield b"]}"
