"""Assigns events to lanes (rows of the timeline) and names the lanes."""

import re
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.formats.kineto_columns import parse_integer
from traceloom.formats.kineto_fields import NULL
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Array, Ints
from traceloom.trace.arrays import compute_stable_order, gather_rows
from traceloom.trace.trace import SCHEMAS

KINDS = ("host", "device", "device_annotation", "device_sync", "other")
_KIND = dict.fromkeys(vocab.HOST_WORK, "host") | {
    vocab.KERNEL: "device",
    vocab.COPY: "device",
    vocab.FILL: "device",
    vocab.COMMAND: "device",
    vocab.GPU_ANNOTATION: "device_annotation",
    vocab.SYNC: "device_sync",
    vocab.GPU_EVENT: "device_sync",
}
KIND_OF_CODE = np.array(
    [KINDS.index(_KIND.get(name, "other")) for name in vocab.CATEGORIES], dtype=np.int64
)
ON_DEVICE = np.array([kind.startswith("device") for kind in KINDS])
_IN_BRACKETS = re.compile(r"^thread -?\d+ \((.*)\)$")
_GENERIC_NAME = re.compile(r"^(python[\d.]*|pt_main_thread|thread -?\d+|)$")


class Lanes(Struct, frozen=True):
    """The lane of each event, and the lanes.

    Attributes:
        lane: Row of `rows` for each event.
        nests: Whether events of that lane nest (host lanes do, device lanes do not).
        rows: One dict per lane with the columns of the `lanes` frame that do not depend on times.
    """

    lane: Ints
    nests: NDArray[np.bool_]
    rows: list[dict[str, Any]]


class ThreadIndex(Struct, frozen=True):
    """The (pid, tid) pairs of a file, by number."""

    pairs: list[tuple[Any, Any]]
    thread_names: dict[tuple[Any, Any], str]

    def numbers(self, which: int) -> Ints:
        """Returns the process id (0) or thread id (1) of each pair as a number, NULL where it is
        text.
        """
        return np.array([parse_integer(pair[which]) for pair in self.pairs], dtype=np.int64)


def find_lanes(
    category: Array, thread: Array, device: Ints, stream: Ints, thread_index: ThreadIndex
) -> Lanes:
    """Groups events into lanes: by thread on the host, by (device, stream) on devices.

    Args:
        category: Code of each event's category.
        thread: Number of its (pid, tid).
        device: Device index, NULL on the host.
        stream: Stream, NULL on the host.
        thread_index: The (pid, tid) of each number.
    """
    kind = gather_rows(KIND_OF_CODE, category)
    on_device = gather_rows(ON_DEVICE, kind)
    key = thread.astype(np.int64)
    rows = np.flatnonzero(on_device)
    if rows.size:
        _, device_number = np.unique(device[rows], return_inverse=True)
        streams, stream_rank = np.unique(stream[rows], return_inverse=True)
        key[rows] = device_number * len(streams) + stream_rank
    key = key * len(KINDS) + kind
    _, first, lane = np.unique(key, return_index=True, return_inverse=True)
    described: list[dict[str, Any]] = []
    for row in first.tolist():
        pid, tid = thread_index.pairs[int(thread[row])]
        row_kind, is_device = KINDS[int(kind[row])], bool(on_device[row])
        stream_number = int(stream[row]) if is_device and stream[row] != NULL else None
        if is_device:
            suffix = {"device": "", "device_annotation": " annotations", "device_sync": " syncs"}[
                row_kind
            ]
            name = (
                "all streams" if stream_number in (None, -1) else f"stream {stream_number}"
            ) + suffix
        elif row_kind == "other":
            name = str(tid) if isinstance(tid, str) and tid else "profiler"
        elif str(pid) == str(tid):
            name = "main thread"
        else:
            name = thread_index.thread_names.get((pid, tid), "")
            bracketed = _IN_BRACKETS.match(name)
            name = bracketed.group(1) if bracketed else name
            if "autograd" in name:
                name = f"autograd {tid}"
            elif _GENERIC_NAME.match(name):
                name = f"thread {tid}"
            name = name if str(tid) in name else f"{name} {tid}"
        described.append(
            {
                "kind": row_kind,
                "process": str(pid),
                "thread": str(tid),
                "device": int(device[row]) if is_device and device[row] != NULL else None,
                "stream": stream_number,
                "name": name,
            }
        )
    order = sorted(range(len(described)), key=lambda at: _get_sort_key(described[at]))
    renumbered = np.empty(len(order), dtype=np.int64)
    renumbered[order] = np.arange(len(order))
    lane = gather_rows(renumbered, lane) if order else lane.astype(np.int64)
    return Lanes(lane, ~on_device, [described[index] for index in order])


def _get_sort_key(lane: dict[str, Any]) -> tuple[Any, ...]:
    """Sorts host threads first (main thread on top), then devices by stream, then the rest."""
    if lane["kind"] == "host":
        return (
            0,
            _get_natural_sort_key(lane["process"]),
            lane["name"] != "main thread",
            _get_natural_sort_key(lane["thread"]),
        )
    if lane["kind"] == "other":
        return (2, lane["process"], lane["thread"])
    device = -1 if lane["device"] is None else lane["device"]
    stream = -1 if lane["stream"] is None else lane["stream"]
    return (1, device, stream, KINDS.index(lane["kind"]))


def _get_natural_sort_key(text: str) -> tuple[int, str]:
    try:
        return int(text), text
    except ValueError:
        return 2**63, text


def build_lane_frame(lanes: Lanes, start: Ints, nested_end: Ints, autograd: Array) -> pl.DataFrame:
    """Builds the `lanes` frame: event counts and busy times; threads that run the backward pass are
    named so.

    Args:
        lanes: From `find_lanes`.
        start: Starts in time order.
        nested_end: Ends, clipped to parents.
        autograd: Whether an event is an evaluation of the autograd engine.
    """
    count = len(lanes.rows)
    order = compute_stable_order(lanes.lane)
    bounds = np.cumsum(np.concatenate([[0], np.bincount(lanes.lane, minlength=count)]))
    rows = []
    for lane, described in enumerate(lanes.rows):
        members = order[bounds[lane] : bounds[lane + 1]]
        busy_ns = 0  # covered by spans, which are sorted by start
        if len(members):
            span_start, end = start[members], nested_end[members]
            span_start[1:] = np.maximum(span_start[1:], np.maximum.accumulate(end)[:-1])
            busy_ns = int(np.maximum(end - span_start, 0).sum())
        row = {"lane": lane, **described, "events": len(members), "busy_ns": busy_ns}
        if (
            described["kind"] == "host"
            and described["name"].startswith("thread ")
            and autograd[members].any()
        ):
            row["name"] = f"autograd {described['thread']}"
        rows.append(row)
    return pl.DataFrame(rows, schema=SCHEMAS["lanes"])
