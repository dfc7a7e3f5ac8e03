"""One Kineto file to one Trace.

Its columns get order, lanes, nesting, joins, side frames and notices.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom.formats import ahead
from traceloom.formats import kineto_metadata as md
from traceloom.formats.ahead import decode_with, helpers
from traceloom.formats.kineto_columns import (
    ALLOCATION,
    COLLECTIVE_NUMBERS,
    COLLECTIVE_RAWS,
    COLLECTIVE_TEXTS,
    FILLING,
    LISTS,
    Columns,
    Decoded,
    decode,
)
from traceloom.formats.kineto_fields import NULL
from traceloom.formats.lanes import KIND_OF_CODE, KINDS, ON_DEVICE, ThreadIndex, find_lanes, lane_frame
from traceloom.formats.links import (
    add_capture_details,
    collective_frame,
    flow_frame,
    launches,
    ops,
    repeats_correlation,
    source_frame,
)
from traceloom.formats.steps import NO_STEP, event_steps, find_steps, step_of
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Array, Ints
from traceloom.trace.arrays import (
    NO_ROW,
    Nesting,
    Texts,
    column_of,
    gather_rows,
    nearest,
    nest,
    row_numbers,
    sorted_unique,
    take_texts,
    time_order,
    to_nullable_series,
    to_series,
)
from traceloom.trace.mapped_arrays import OnDisk
from traceloom.trace.notice import Notice
from traceloom.trace.trace import SCHEMAS, CategoryType, DeferredFrame, Meta, Trace
from traceloom.trace.vocabulary import copy_kind, memory_kinds

# torch's DeviceType numbers (c10/core/DeviceType.h).
DEVICE_TYPES = {
    0: "cpu", 1: "cuda", 2: "mkldnn", 3: "opengl", 4: "opencl", 5: "ideep", 6: "hip", 7: "fpga", 8: "maia", 9: "xla",
    10: "vulkan", 11: "metal", 12: "xpu", 13: "mps", 14: "meta", 15: "hpu", 16: "ve", 17: "lazy", 18: "ipu",
    19: "mtia", 20: "privateuseone",
}  # fmt: skip

_ON_HOST = np.array([KINDS[kind] == "host" for kind in KIND_OF_CODE])
_IS_OP = np.array([name == cat.OP for name in cat.CATEGORIES])


def allocation_frame(
    columns: dict[str, Array],
    base_ns: int,
    places: ThreadIndex,
    on_host: tuple[pl.DataFrame, Array],
    steps: pl.DataFrame,
) -> pl.DataFrame:
    """The `allocations` frame, by time; `op` is the innermost op on that thread then.

    Args:
        columns: The raw columns of `[memory]` events.
        base_ns: Added to their times.
        places: (pid, tid) pairs.
        on_host: The `events` frame and the place of each event.
        steps: The `steps` frame.
    """
    if not len(columns["start"]):
        return pl.DataFrame(schema=SCHEMAS["allocations"])
    order = np.argsort(columns["start"], kind="stable")
    ordered = {name: values[order] for name, values in columns.items()}
    time, pair_number = ordered["start"] + base_ns, ordered["place"]
    # The innermost event that is open at each time on each (pid, tid) pair, then the op around it.
    events, event_pair = on_host
    column = partial(column_of, events, large=isinstance(event_pair, OnDisk))
    category, start, end = column("category"), column("start_ns"), column("nested_end_ns")
    parent, is_op = column("parent", NO_ROW), gather_rows(_IS_OP, category)
    spot = np.where(gather_rows(_ON_HOST, category), event_pair, -1)
    rows = np.flatnonzero(spot >= 0)
    by_pair = rows[np.argsort(spot[rows], kind="stable")]
    lows = np.searchsorted(spot[by_pair], pair_number, side="left")
    highs = np.searchsorted(spot[by_pair], pair_number, side="right")
    inside = np.full(len(time), NO_ROW, dtype=np.int64, like=time)
    for number in sorted_unique(pair_number):
        of_pair = np.flatnonzero(pair_number == number)
        members = by_pair[lows[of_pair[0]] : highs[of_pair[0]]]
        if members.size:
            at = np.searchsorted(start[members], time[of_pair], side="right") - 1
            inside[of_pair] = np.where(at >= 0, members[np.maximum(at, 0)], NO_ROW)
    rows = np.flatnonzero(inside >= 0)
    while rows.size:
        rows = rows[end[inside[rows]] <= time[rows]]
        inside[rows] = parent[inside[rows]]
        rows = rows[inside[rows] >= 0]
    has_event = inside >= 0
    above = nearest(parent, is_op)
    inside[has_event] = np.where(is_op[inside[has_event]], inside[has_event], above[inside[has_event]])
    step = step_of(steps, time)
    process, thread = gather_rows(places.numbers(0), pair_number), gather_rows(places.numbers(1), pair_number)
    kind, device = ordered["device_type"], ordered["device_id"]
    kind = np.where((kind >= 0) & (kind < len(DEVICE_TYPES)), kind, len(DEVICE_TYPES))
    device[(device < -(2**31)) | (device >= 2**31)] = NULL
    return pl.DataFrame(
        {
            "time_ns": to_series(time, pl.Int64),
            "address": to_series(ordered["address"], pl.UInt64),
            "bytes": to_series(np.where(ordered["allocation_bytes"] == NULL, 0, ordered["allocation_bytes"]), pl.Int64),
            "device_type": Texts([*DEVICE_TYPES.values(), "other"]).column(kind),
            "device": to_nullable_series(device, pl.Int32),
            "allocated_bytes": to_nullable_series(ordered["total_allocated"]),
            "reserved_bytes": to_nullable_series(ordered["total_reserved"]),
            "process": to_nullable_series(process),
            "thread": to_nullable_series(thread),
            "op": row_numbers(inside),
            "step": to_nullable_series(step, pl.Int32, NO_STEP),
        },
        schema=SCHEMAS["allocations"],
    )


def unknown_devices(columns: dict[str, Array]) -> int:
    """How many allocations are of a type of device that has no name here."""
    kind = columns["device_type"]
    return int(((kind < 0) | (kind >= len(DEVICE_TYPES))).sum())


def mark_frame(columns: dict[str, Array], base_ns: int, places: ThreadIndex, texts: Texts) -> pl.DataFrame:
    """The `marks` frame: instants other than allocations."""
    has_time = columns["start"] != NULL if len(columns["start"]) else np.zeros(0, dtype=np.bool_)
    if not has_time.any():
        return pl.DataFrame(schema=SCHEMAS["marks"])
    columns = {name: values[has_time] for name, values in columns.items()}
    order = np.argsort(columns["start"], kind="stable")
    pair_number = columns["place"][order]
    return pl.DataFrame(
        {
            "time_ns": to_series(columns["start"][order] + base_ns, pl.Int64),
            "name": texts.column(columns["name"][order]),
            "process": _ids(places, 0).column(pair_number),
            "thread": _ids(places, 1).column(pair_number),
            "bytes": to_nullable_series(columns["bytes"][order]),
        },
        schema=SCHEMAS["marks"],
    )


def counter_frame(columns: dict[str, Array], base_ns: int, places: ThreadIndex, texts: Texts) -> pl.DataFrame:
    """The `counters` frame."""
    if not len(columns["start"]):
        return pl.DataFrame(schema=SCHEMAS["counters"])
    order = np.argsort(columns["start"], kind="stable")
    return pl.DataFrame(
        {
            "time_ns": to_series(columns["start"][order] + base_ns, pl.Int64),
            "process": _ids(places, 0).column(columns["place"][order]),
            "name": texts.column(columns["name"][order]),
            "key": texts.column(columns["key"][order]),
            "value": to_series(columns["value"][order], pl.Float64),
        },
        schema=SCHEMAS["counters"],
    )


def _ids(places: ThreadIndex, which: int) -> Texts:
    """The processes (0) or threads (1) of all places, as texts."""
    return Texts([str(pair[which]) for pair in places.pairs])


def copy_frame(columns: dict[str, Array], texts: Texts, events: pl.DataFrame) -> pl.DataFrame:
    """The `copies` frame: copies and fills in time order."""
    if not len(columns["event"]):
        return pl.DataFrame(schema=SCHEMAS["copies"])
    frame = pl.DataFrame(
        {
            "event": to_series(columns["event"], pl.UInt32),
            "bytes": to_nullable_series(columns["bytes"]),
            "copy_kind": texts.column(columns["copy_kind"]),
            "rocm_kind": texts.column(columns["kind"]),
            "source": texts.column(columns["source_kind"]),
            "target": texts.column(columns["target_kind"]),
        }
    ).sort("event")
    called = events[["name", "category"]][frame["event"]]
    keys = frame.select("copy_kind", "rocm_kind", "source", "target").with_columns(
        called["name"], fill=called["category"] == "fill"
    )
    different = keys.unique(maintain_order=True)
    rows: list[tuple[str, str | None, str | None]] = []
    for name, argument, rocm, source, target, fill in different.select(
        "name", "copy_kind", "rocm_kind", "source", "target", "fill"
    ).rows():
        if fill:
            in_brackets = re.search(r"\((\w+)\)", name)
            filled = in_brackets.group(1).lower() if in_brackets else None
            rows.append(("fill", None, memory_kinds(name, None, target)[1] or filled))
            continue
        kind = copy_kind(name, argument)
        if kind == "unknown" and rocm:
            kind = copy_kind(rocm)
        rows.append((kind, *memory_kinds(name, source, target)))
    described = different.with_columns(
        pl.DataFrame(rows, schema=["copied", "source_memory", "target_memory"], orient="row").cast(pl.String)
    )
    joined = keys.join(described, on=keys.columns, how="left", nulls_equal=True, maintain_order="left")
    return frame.select(
        "event", joined["copied"].alias("kind"), "bytes", joined["source_memory"], joined["target_memory"]
    ).cast(SCHEMAS["copies"])


def kernel_frame(columns: dict[str, Array]) -> pl.DataFrame:
    """The `kernels` frame: how each kernel fills the device, in time order."""
    order = np.argsort(columns["event"], kind="stable")
    figures = {name: to_series(columns[name][order], pl.Float64).fill_nan(None) for name in FILLING}
    return pl.DataFrame({"event": to_series(columns["event"][order], pl.UInt32), **figures}, schema=SCHEMAS["kernels"])


def tensor_frame(columns: dict[str, Array], texts: Texts) -> pl.DataFrame:
    """The `tensors` frame: inputs of ops, as lists of JSON text."""
    order = np.argsort(columns["event"], kind="stable")
    lists = {name: texts.column(values[order]) for name, values in columns.items() if name != "event"}
    return pl.DataFrame({"event": to_series(columns["event"][order], pl.UInt32), **lists}, schema=SCHEMAS["tensors"])


def python_frame(columns: dict[str, Array]) -> pl.DataFrame:
    """The `python` frame: ids of Python frames and modules."""
    order = np.argsort(columns["event"], kind="stable")
    values = {name: to_nullable_series(column[order]) for name, column in columns.items() if name != "event"}
    return pl.DataFrame({"event": to_series(columns["event"][order], pl.UInt32), **values}, schema=SCHEMAS["python"])


def sync_frame(columns: dict[str, Array], texts: Texts, events: pl.DataFrame) -> pl.DataFrame:
    """The `syncs` frame: what was waited for (or recorded), in time order."""
    if not len(columns["event"]):
        return pl.DataFrame(schema=SCHEMAS["syncs"])
    frame = pl.DataFrame(
        {
            "event": to_series(columns["event"], pl.UInt32),
            "kind": texts.column(columns["kind"]),
            "awaited_stream": to_nullable_series(columns["awaited_stream"]),
            "record_correlation": to_nullable_series(columns["record_correlation"]),
            "event_id": to_nullable_series(columns["event_id"]),
        }
    ).sort("event")
    about = events[["name", "stream"]][frame["event"]]
    return frame.select(
        "event",
        pl.col("kind").fill_null(about["name"]),
        about["stream"],
        # 2^32 - 1 is CUPTI's way to say "none"; -1 is Cuspy's.
        *(
            pl.when((pl.col(name) >= 0) & (pl.col(name) != 2**32 - 1)).then(pl.col(name)).alias(name)
            for name in ("awaited_stream", "record_correlation", "event_id")
        ),
    ).cast(SCHEMAS["syncs"])


_CODES = {name: code for code, name in enumerate(cat.CATEGORIES)}
_CATEGORY_NAMES = pl.Series(list(cat.CATEGORIES), dtype=CategoryType)
_OP, _ANNOTATION, _PYTHON, _OTHER = (_CODES[name] for name in (cat.OP, cat.ANNOTATION, cat.PYTHON, cat.OTHER))
_OUR_THREAD = re.compile(r"(^|/)traceloom/capture/(moments|endings|processor_time)\.py\(\d+\): (_watch|_listen)$")
_ABSURD_NS = 86_400 * 10**9  # a day: no event of a recording lasts that long

_IS_WORK, _IS_LAUNCH = (np.array([name in names for name in cat.CATEGORIES]) for names in (cat.GPU_WORK, cat.LAUNCHES))
_ON_DEVICE = ON_DEVICE[KIND_OF_CODE]
_TIMED = ("flows", "marks", "counters", "allocations")  # tables with times of their own
_SIDE: dict[str, dict[str, Any]] = {
    "copies": dict.fromkeys(("bytes", "kind", "copy_kind", "source_kind", "target_kind"), np.int64),
    "kernels": dict.fromkeys(FILLING, np.float64),
    "syncs": dict.fromkeys(("kind", "awaited_stream", "record_correlation", "event_id"), np.int64),
    "collectives": dict.fromkeys((*COLLECTIVE_TEXTS, *COLLECTIVE_RAWS, *COLLECTIVE_NUMBERS), np.int64),
    "tensors": dict.fromkeys(LISTS, np.int32),
    "frames": dict.fromkeys(("python_id", "python_parent", "module_id"), np.int64),
    "flows": {"phase": np.bool_, **dict.fromkeys(("flow", "kind", "place", "start"), np.int64)},
    "marks": dict.fromkeys(("start", "name", "place", "bytes"), np.int64),
    "counters": {**dict.fromkeys(("start", "name", "key", "place"), np.int64), "value": np.float64},
    "allocations": dict.fromkeys(("start", "place", *ALLOCATION), np.int64),
}


def read_kineto(
    path: str | Path,
    *,
    capture: dict[str, Any] | None = None,
    step: Callable[[int, int], None] | None = None,
    processes: int | None = None,
) -> Trace:
    """Read one Kineto trace; gzip or not, whole or damaged.

    Args:
        path: The file; `-` is standard input.
        capture: This rank's part of capture.json, where there is one.
        step: Called now and then with (bytes read from the file, bytes of text).
        processes: How many may decode it at once; all cores if None, where it is worth that.

    Returns:
        The trace; what was repaired or lost is in its notices.

    Raises:
        InputError: The file cannot be read or is no Kineto trace at all.
    """
    helping = ahead.taken(path)
    if helping is None and processes != 1 and Path(path).is_file():
        with contextlib.suppress(OSError):  # `decode` says why it cannot be read
            helping = helpers(Path(path), processes)
    decoded = decode(path, step) if helping is None else decode_with(helping, path, step)
    try:
        return _assemble(decoded, str(path), capture)
    finally:
        decoded.columns.close()


class _FileEvents:
    """The events of a file in time order; columns of the file are given up as they are used.

    Attributes:
        rows: `column[rows]` is in time order.
        event: Event number of each row of the file.
    """

    def __init__(self, columns: Columns, base_ns: int) -> None:
        self.columns = columns
        self.base_ns = base_ns
        self.texts = Texts(columns.texts)
        self.places = ThreadIndex(list(columns.places), columns.thread_names)
        raw_start = columns.take("spans", "start", np.int64)
        raw_duration = columns.take("spans", "duration", np.int64)
        self.rows = time_order(raw_start, raw_duration)
        self.event = np.empty(len(self.rows), dtype=np.int64, like=raw_start)
        self.event[self.rows] = np.arange(len(self.rows), like=raw_start)
        self.whole_us = bool((raw_start % 1000 == 0).all())
        self.start = raw_start[self.rows] + base_ns
        del raw_start
        self.duration = raw_duration[self.rows]
        del raw_duration
        self.name = columns.take("spans", "name", np.int32)[self.rows]
        self.category = columns.take("spans", "category", np.uint8)[self.rows]
        names = self.texts.names
        # In files of 2021 annotations are called operators too.
        annotations = [number for number, text in enumerate(names) if text.startswith(("ProfilerStep#", "Optimizer."))]
        if annotations:
            self.category[np.isin(self.name, annotations) & (self.category == _OP)] = _ANNOTATION
        self.place = columns.take("spans", "place", np.int32)[self.rows]
        # Python frames of threads that the recorder itself runs are no host work: stacks show them, too.
        ours = [number for number, text in enumerate(names) if _OUR_THREAD.search(text)]
        if ours:
            python = self.category == _PYTHON
            places = np.unique(self.place[python & np.isin(self.name, ours)])
            self.category[python & np.isin(self.place, places)] = _OTHER
        self._events_of: dict[str, Ints] = {}
        self.correlation = self.spread("correlation", "calls", "device")
        self.external = self.spread("external", "ops", "calls", "device")
        if repeats_correlation(self.external, self.correlation, gather_rows(_IS_WORK, self.category)):
            self.external[gather_rows(_IS_WORK, self.category)] = NULL

    def events_of(self, table: str) -> Ints:
        """The event of each row of a side table."""
        if table not in self._events_of:
            self._events_of[table] = self.event[self.columns.take(table, "row", np.uint32)]
        return self._events_of[table]

    def spread(self, name: str, *tables: str) -> Ints:
        """A column of side tables as one value per event, NULL elsewhere."""
        out = np.full(len(self.start), NULL, dtype=np.int64, like=self.start)
        for table in tables:
            out[self.events_of(table)] = self.columns.take(table, name, np.int64)
        return out

    def side(self, table: str) -> dict[str, Array]:
        """All columns of a side table, empty ones too; `event` where its rows are about events."""
        columns = {name: self.columns.take(table, name, dtype) for name, dtype in _SIDE[table].items()}
        return columns if table in _TIMED else {"event": self.events_of(table), **columns}


def _assemble(decoded: Decoded, path: str, capture: dict[str, Any] | None) -> Trace:
    """The trace of a decoded file; `capture` is this rank's part of capture.json."""
    columns, file_notices = decoded.columns, decoded.damage.notices()
    made = _FileEvents(columns, md.base_ns(decoded.metadata, capture))
    # Of device-side events: the arguments, else pid and tid; NULL on the host.
    device, stream = made.spread("device", "device"), made.spread("stream", "device")
    on_device = gather_rows(_ON_DEVICE, made.category)
    for values, which in ((device, 0), (stream, 1)):
        missing = np.flatnonzero(on_device & (values == NULL))
        values[missing] = made.places.numbers(which)[made.place[missing]]
    device[(device < 0) | (device >= 2**31)] = NULL
    lanes = find_lanes(made.category, made.place, device, stream, made.places)
    nesting = nest(lanes.lane, made.start, made.start + np.maximum(made.duration, 0), lanes.nests)
    events = _events(made, device, stream, lanes.lane, nesting)
    engine = [number for number, text in enumerate(made.texts.names) if text.startswith("autograd::engine::")]
    autograd = np.isin(made.name, engine) if engine else np.zeros(len(made.start), dtype=np.bool_, like=made.start)
    lane_table = lane_frame(lanes, made.start, nesting.nested_end_ns, autograd)
    used = {int(number) for number in sorted_unique(device[gather_rows(_IS_WORK, made.category)]) if number != NULL}
    steps, step_notices = find_steps(events, lane_table, made.texts.names, capture, path)
    events = _linked(made, events, nesting, steps)
    del device, stream, lanes, on_device, values, missing
    # Frames that not everybody asks for are deferred; each keeps only what it is made of.
    texts, places, base_ns = made.texts, made.places, made.base_ns
    tensors = DeferredFrame(tensor_frame, made.side("tensors"), texts)
    described = made.side("collectives")
    ranks = described["rank"]
    collectives = collective_frame(described, texts, events, tensors)
    collectives, capture_notices = add_capture_details(collectives, events, capture)
    allocations = made.side("allocations")
    flows = made.side("flows")
    flows["start"] = np.where(flows["start"] == NULL, NULL, flows["start"] + base_ns)
    offset, length = columns.take("spans", "offset", np.int64), columns.take("spans", "length", np.int32)
    sides: dict[str, Any] = {
        "lanes": lane_table,
        "devices": md.device_frame(decoded.metadata, used),
        "groups": md.group_frame(decoded.metadata, capture),
        "steps": steps,
        "collectives": collectives,
        "copies": DeferredFrame(copy_frame, made.side("copies"), texts, events),
        "kernels": DeferredFrame(kernel_frame, made.side("kernels")),
        "syncs": DeferredFrame(sync_frame, made.side("syncs"), texts, events),
        "flows": DeferredFrame(flow_frame, flows, texts, events, made.place),
        "python": DeferredFrame(python_frame, made.side("frames")),
        "allocations": DeferredFrame(allocation_frame, allocations, base_ns, places, (events, made.place), steps),
        "counters": DeferredFrame(counter_frame, made.side("counters"), base_ns, places, texts),
        "marks": DeferredFrame(mark_frame, made.side("marks"), base_ns, places, texts),
        "sources": DeferredFrame(source_frame, offset, length, made.rows),
        "tensors": tensors,
    }
    meta, rank_notices = _meta(made, decoded, path, capture, ranks)
    data_notices = _notices(events, nesting, columns.unknown_categories, unknown_devices(allocations))
    notices = (*file_notices, *rank_notices, *step_notices, *capture_notices, *data_notices)
    return Trace(meta=meta, events=events, notices=notices, **sides)


def _events(made: _FileEvents, device: Ints, stream: Ints, lane: Ints, nesting: Nesting) -> pl.DataFrame:
    """The `events` frame without what joins add."""
    on_device = gather_rows(_ON_DEVICE, made.category)
    process, thread = (
        np.where(on_device, NULL, gather_rows(numbers, made.place) if len(numbers) else np.zeros(0, dtype=np.int64))
        for numbers in (made.places.numbers(0), made.places.numbers(1))
    )
    record = made.spread("record_function", "ops")
    record[record == 0] = NULL
    return pl.DataFrame(
        {
            "event": to_series(np.arange(len(made.start), dtype=np.uint32, like=made.start), pl.UInt32),
            "name": made.texts.column(made.name),
            "category": take_texts(_CATEGORY_NAMES, made.category),
            "start_ns": to_series(made.start, pl.Int64),
            "duration_ns": to_series(made.duration, pl.Int64),
            "nested_end_ns": to_series(nesting.nested_end_ns, pl.Int64),
            "lane": to_series(lane, pl.UInt32),
            "process": to_nullable_series(process),
            "thread": to_nullable_series(thread),
            "device": to_nullable_series(device, pl.Int32),
            "stream": to_nullable_series(stream),
            "correlation": to_nullable_series(made.correlation),
            "external_id": to_nullable_series(made.external),
            "record_function_id": to_nullable_series(record),
            "sequence": to_nullable_series(made.spread("sequence", "ops")),
            "forward_thread": to_nullable_series(made.spread("forward_thread", "ops")),
            "parent": row_numbers(nesting.parent),
            "depth": to_series(np.minimum(nesting.depth, 2**16 - 1), pl.UInt16),
        }
    )


def _linked(made: _FileEvents, events: pl.DataFrame, nesting: Nesting, steps: pl.DataFrame) -> pl.DataFrame:
    """The `events` frame with `op`, `launch` and `step`."""
    is_launch, is_work = gather_rows(_IS_LAUNCH, made.category), gather_rows(_IS_WORK, made.category)
    is_op = made.category == _OP
    launch = launches(made.correlation, is_launch, is_work)
    op = ops(nearest(nesting.parent, is_op), launch, is_launch, is_op, is_work, made.external)
    step = event_steps(steps, made.start, launch, is_work)
    linked = events.with_columns(
        row_numbers(op).alias("op"),
        row_numbers(launch).alias("launch"),
        to_nullable_series(step, pl.Int32, NO_STEP).alias("step"),
    )
    return linked.select(list(SCHEMAS["events"]))


def _meta(
    made: _FileEvents, decoded: Decoded, path: str, capture: dict[str, Any] | None, ranks: Ints
) -> tuple[Meta, list[Notice]]:
    """The facts of the whole trace; `ranks` are those in the arguments of collectives."""
    metadata, entry = decoded.metadata, capture or {}
    named = sorted_unique(ranks[(ranks != NULL) & (ranks >= 0)])
    rank, evidence, notices = md.find_rank(metadata, int(named[0]) if len(named) == 1 else None, path, capture)
    info = md.distributed(metadata)
    host = metadata.get("host_name")
    latest = int(made.start[-1]) if len(made.start) else 0
    # The process with most events on the host; 0 and below are no processes.
    on_host = made.place[~gather_rows(_ON_DEVICE, made.category)]
    counts: dict[int, int] = {}
    events = np.bincount(on_host, minlength=len(made.places.pairs)).tolist()
    for process, count in zip(made.places.numbers(0).tolist(), events, strict=True):
        if process > 0 and count:
            counts[process] = counts.get(process, 0) + count
    meta = Meta(
        path=path,
        rank=rank,
        rank_evidence=evidence,
        world_size=md.whole(entry.get("world_size")) or md.whole(info.get("world_size")),
        # A capture of several hosts calls them as the fleet does; containers may all have one name of their own.
        host=entry.get("host") or (host if isinstance(host, str) and host else None),
        process=max(counts, key=lambda process: counts[process], default=None),
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        base_ns=made.base_ns,
        clock="unix" if made.base_ns or latest > 10**18 else "unknown",
        unit_ns=1000 if made.whole_us and bool((made.duration % 1000 == 0).all()) else 1,
        event_count=made.columns.entries,
        file_bytes=decoded.size,
        schema_version=None if metadata.get("schemaVersion") is None else str(metadata["schemaVersion"]),
        versions=md.versions(metadata),
        settings=md.settings(metadata),
        job=md.job(metadata),
        capture=capture,
    )
    return meta, notices


def _notices(
    events: pl.DataFrame, nesting: Nesting, unknown_categories: dict[str, int], unknown_devices: int
) -> list[Notice]:
    """Notices about what is no damage of the text: spans that cross, orphans, absurd durations, unknown categories."""
    out: list[Notice] = []

    def counted(count: int) -> str:
        return f"{count:,} {'event' if count == 1 else 'events'}"

    negative, absurd, orphans, work = (
        events.lazy()
        .select(
            (pl.col("duration_ns") < 0).sum().alias("negative"),
            (pl.col("duration_ns") >= _ABSURD_NS).sum().alias("absurd"),
            (pl.col("category").is_in(cat.GPU_WORK) & pl.col("launch").is_null()).sum().alias("orphans"),
            pl.col("category").is_in(cat.GPU_WORK).sum().alias("work"),
        )
        .collect()
        .row(0)
    )
    if not events.height:
        out.append(Notice("no-events", "error", "the trace holds no complete event"))
    if negative:
        text = f"with a negative duration, kept as recorded and counted as 0: {counted(negative)}"
        out.append(Notice("negative-duration", "warning", text, negative))
    if absurd:
        text = f"longer than a day, kept as recorded, so that times that hold them are wrong: {counted(absurd)}"
        out.append(Notice("absurd-duration", "warning", text, absurd))
    if orphans:
        have = "has" if orphans == 1 else "have"
        text = (
            f"{orphans:,} of {work:,} GPU events {have} no launch in the trace "
            "(submitted before the recording began, or the call was not recorded)"
        )
        out.append(Notice("orphan-work", "info", text, orphans))
    clipped = len(nesting.clipped)
    if clipped:
        text = f"crossing another span of their thread, and shortened so that they nest: {counted(clipped)}"
        out.append(Notice("crossing-spans", "info", text, clipped))
    if unknown_categories:
        count = sum(unknown_categories.values())
        names = ", ".join(f"`{name}`" for name in sorted(unknown_categories)[:4])
        text = f"of a category this version does not know ({names}), kept as `other`: {counted(count)}"
        out.append(Notice("unknown-category", "info", text, count))
    if unknown_devices:
        text = f"{unknown_devices:,} memory events are of a device type this version does not know"
        out.append(Notice("unknown-device-type", "info", text, unknown_devices))
    return out
