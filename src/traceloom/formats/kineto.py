"""Builds a Trace from one Kineto file.

Orders its columns and adds lanes, nesting, joins, side frames and notices.
"""

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct, structs
from numpy.typing import NDArray

from traceloom.errors import InputError
from traceloom.formats import ahead, kineto_metadata as md
from traceloom.formats.ahead import decode_with, start_helpers
from traceloom.formats.detect import refuse_categories
from traceloom.formats.kineto_columns import (
    ALLOCATION,
    COLLECTIVE_NUMBERS,
    COLLECTIVE_RAWS,
    COLLECTIVE_TEXTS,
    LISTS,
    OCCUPANCY_COLUMNS,
    Columns,
    Decoded,
    decode,
    parse_integer,
)
from traceloom.formats.kineto_fields import NULL
from traceloom.formats.links import (
    add_capture_details,
    build_collective_frame,
    build_flow_frame,
    build_source_frame,
    external_ids_repeat_correlations,
    find_launches,
    find_ops,
    find_uncorrelated_launches,
)
from traceloom.formats.resync import DamageLog
from traceloom.formats.steps import NO_STEP, assign_steps, find_steps, locate_steps
from traceloom.system.units import format_duration
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Array, Ints
from traceloom.trace.arrays import (
    NO_ROW,
    Nesting,
    NumberedTexts,
    build_event_column,
    build_nesting,
    compute_stable_order,
    compute_time_order,
    extract_column,
    find_nearest_ancestor,
    gather_rows,
    sort_unique,
    take_texts,
    to_nullable_series,
    to_series,
)
from traceloom.trace.mapped_arrays import MappedArray
from traceloom.trace.notice import Notice
from traceloom.trace.trace import SCHEMAS, CategoryType, DeferredFrame, Meta, Trace
from traceloom.trace.vocabulary import copy_kind, parse_memory_kinds

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
_IN_BRACKETS = re.compile(r"^thread -?\d+ \((.*)\)$")
_GENERIC_NAME = re.compile(r"^(python[\d.]*|pt_main_thread|thread -?\d+|)$")
_LABEL = re.compile(r"(?<![a-z])(rank|tp|dp|ep|pp)[ _-]?(\d{1,7})(?![\da-z])", re.IGNORECASE)

Label = tuple[tuple[str, int], ...]
"""Such as (("tp", 1), ("dp", 0)); empty where a text has none."""

# torch's DeviceType numbers (c10/core/DeviceType.h).
DEVICE_TYPES = {
    0: "cpu",
    1: "cuda",
    2: "mkldnn",
    3: "opengl",
    4: "opencl",
    5: "ideep",
    6: "hip",
    7: "fpga",
    8: "maia",
    9: "xla",
    10: "vulkan",
    11: "metal",
    12: "xpu",
    13: "mps",
    14: "meta",
    15: "hpu",
    16: "ve",
    17: "lazy",
    18: "ipu",
    19: "mtia",
    20: "privateuseone",
}

_ON_HOST = np.array([KINDS[kind] == "host" for kind in KIND_OF_CODE])
_IS_OP = np.array([name == vocab.OP for name in vocab.CATEGORIES])


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


def build_allocation_frame(
    columns: dict[str, Array],
    base_ns: int,
    thread_index: ThreadIndex,
    on_host: tuple[pl.DataFrame, Array],
    steps: pl.DataFrame,
) -> pl.DataFrame:
    """Builds the `allocations` frame, by time; `op` is the innermost op on that thread at that
    time.

    Args:
        columns: The raw columns of `[memory]` events.
        base_ns: Added to their times.
        thread_index: (pid, tid) pairs.
        on_host: The `events` frame and the place of each event.
        steps: The `steps` frame.
    """
    if not len(columns["start"]):
        return pl.DataFrame(schema=SCHEMAS["allocations"])
    order = np.argsort(columns["start"], kind="stable")
    ordered = {name: values[order] for name, values in columns.items()}
    time, pair_number = ordered["start"] + base_ns, ordered["place"]
    # Find the innermost event that is open at each time on each (pid, tid) pair, then the op around
    # it.
    events, event_pair = on_host
    column = partial(extract_column, events, large=isinstance(event_pair, MappedArray))
    category, start, end = column("category"), column("start_ns"), column("nested_end_ns")
    parent, is_op = column("parent", NO_ROW), gather_rows(_IS_OP, category)
    spot = np.where(gather_rows(_ON_HOST, category), event_pair, -1)
    rows = np.flatnonzero(spot >= 0)
    rows_by_pair = rows[np.argsort(spot[rows], kind="stable")]
    lows = np.searchsorted(spot[rows_by_pair], pair_number, side="left")
    highs = np.searchsorted(spot[rows_by_pair], pair_number, side="right")
    innermost = np.full(len(time), NO_ROW, dtype=np.int64, like=time)
    for number in sort_unique(pair_number):
        pair_rows = np.flatnonzero(pair_number == number)
        members = rows_by_pair[lows[pair_rows[0]] : highs[pair_rows[0]]]
        if members.size:
            index = np.searchsorted(start[members], time[pair_rows], side="right") - 1
            innermost[pair_rows] = np.where(index >= 0, members[np.maximum(index, 0)], NO_ROW)
    rows = np.flatnonzero(innermost >= 0)
    while rows.size:
        rows = rows[end[innermost[rows]] <= time[rows]]
        innermost[rows] = parent[innermost[rows]]
        rows = rows[innermost[rows] >= 0]
    has_event = innermost >= 0
    nearest_op = find_nearest_ancestor(parent, is_op)
    innermost[has_event] = np.where(
        is_op[innermost[has_event]], innermost[has_event], nearest_op[innermost[has_event]]
    )
    step = locate_steps(steps, time)
    process, thread = (
        gather_rows(thread_index.numbers(0), pair_number),
        gather_rows(thread_index.numbers(1), pair_number),
    )
    kind, device = ordered["device_type"], ordered["device_id"]
    kind = np.where((kind >= 0) & (kind < len(DEVICE_TYPES)), kind, len(DEVICE_TYPES))
    device[(device < -(2**31)) | (device >= 2**31)] = NULL
    return pl.DataFrame(
        {
            "time_ns": to_series(time, pl.Int64),
            "address": to_series(ordered["address"], pl.UInt64),
            "bytes": to_series(
                np.where(ordered["allocation_bytes"] == NULL, 0, ordered["allocation_bytes"]),
                pl.Int64,
            ),
            "device_type": NumberedTexts([*DEVICE_TYPES.values(), "other"]).column(kind),
            "device": to_nullable_series(device, pl.Int32),
            "allocated_bytes": to_nullable_series(ordered["total_allocated"]),
            "reserved_bytes": to_nullable_series(ordered["total_reserved"]),
            "process": to_nullable_series(process),
            "thread": to_nullable_series(thread),
            "op": build_event_column(innermost),
            "step": to_nullable_series(step, pl.Int32, NO_STEP),
        },
        schema=SCHEMAS["allocations"],
    )


def count_unknown_devices(columns: dict[str, Array]) -> int:
    """Returns the number of allocations on devices of an unknown type."""
    kind = columns["device_type"]
    return int(((kind < 0) | (kind >= len(DEVICE_TYPES))).sum())


def build_mark_frame(
    columns: dict[str, Array], base_ns: int, thread_index: ThreadIndex, texts: NumberedTexts
) -> pl.DataFrame:
    """Builds the `marks` frame: instants other than allocations."""
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
            "process": _format_ids(thread_index, 0).column(pair_number),
            "thread": _format_ids(thread_index, 1).column(pair_number),
            "bytes": to_nullable_series(columns["bytes"][order]),
        },
        schema=SCHEMAS["marks"],
    )


def build_counter_frame(
    columns: dict[str, Array], base_ns: int, thread_index: ThreadIndex, texts: NumberedTexts
) -> pl.DataFrame:
    if not len(columns["start"]):
        return pl.DataFrame(schema=SCHEMAS["counters"])
    order = np.argsort(columns["start"], kind="stable")
    return pl.DataFrame(
        {
            "time_ns": to_series(columns["start"][order] + base_ns, pl.Int64),
            "process": _format_ids(thread_index, 0).column(columns["place"][order]),
            "name": texts.column(columns["name"][order]),
            "key": texts.column(columns["key"][order]),
            "value": to_series(columns["value"][order], pl.Float64),
        },
        schema=SCHEMAS["counters"],
    )


def _format_ids(thread_index: ThreadIndex, which: int) -> NumberedTexts:
    """Returns the process ids (0) or thread ids (1) of all places, as texts."""
    return NumberedTexts([str(pair[which]) for pair in thread_index.pairs])


def build_copy_frame(
    columns: dict[str, Array], texts: NumberedTexts, events: pl.DataFrame
) -> pl.DataFrame:
    """Builds the `copies` frame: copies and fills in time order."""
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
            rows.append(("fill", None, parse_memory_kinds(name, None, target)[1] or filled))
            continue
        kind = copy_kind(name, argument)
        if kind == "unknown" and rocm:
            kind = copy_kind(rocm)
        rows.append((kind, *parse_memory_kinds(name, source, target)))
    described = different.with_columns(
        pl.DataFrame(rows, schema=["copied", "source_memory", "target_memory"], orient="row").cast(
            pl.String
        )
    )
    joined = keys.join(
        described, on=keys.columns, how="left", nulls_equal=True, maintain_order="left"
    )
    return frame.select(
        "event",
        joined["copied"].alias("kind"),
        "bytes",
        joined["source_memory"],
        joined["target_memory"],
    ).cast(SCHEMAS["copies"])


def _to_figures(values: Array) -> pl.Series:
    return to_series(values, pl.Float64).fill_nan(None)


def build_event_frame(
    columns: dict[str, Array], name: str, convert: Callable[[Array], pl.Series]
) -> pl.DataFrame:
    """Builds a frame that says more about some events (`kernels`, `tensors`, `python`), in time
    order.
    """
    order = np.argsort(columns["event"], kind="stable")
    values = {
        column: convert(columns[column][order])
        for column in SCHEMAS[name]
        if column in columns and column != "event"
    }
    return pl.DataFrame(
        {"event": to_series(columns["event"][order], pl.UInt32), **values}, schema=SCHEMAS[name]
    )


def build_sync_frame(
    columns: dict[str, Array], texts: NumberedTexts, events: pl.DataFrame
) -> pl.DataFrame:
    """Builds the `syncs` frame: what was waited for (or recorded), in time order."""
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
    event_details = events[["name", "stream"]][frame["event"]]
    return frame.select(
        "event",
        pl.col("kind").fill_null(event_details["name"]),
        event_details["stream"],
        # 2^32 - 1 means "none" in CUPTI; -1 does in Cuspy.
        *(
            pl.when((pl.col(name) >= 0) & (pl.col(name) != 2**32 - 1))
            .then(pl.col(name))
            .alias(name)
            for name in ("awaited_stream", "record_correlation", "event_id")
        ),
    ).cast(SCHEMAS["syncs"])


_CODES = {name: code for code, name in enumerate(vocab.CATEGORIES)}
_CATEGORY_NAMES = pl.Series(list(vocab.CATEGORIES), dtype=CategoryType)
_OP, _ANNOTATION, _PYTHON, _OTHER = (
    _CODES[name] for name in (vocab.OP, vocab.ANNOTATION, vocab.PYTHON, vocab.OTHER)
)
_RECORDER_THREAD = re.compile(
    r"(^|/)traceloom/capture/(moments|endings|processor_time)\.py\(\d+\): (_watch|_listen)$"
)
_MIN_OVERRUN = 3  # pieces of work that no stream can have run while an earlier one went on
_WAITS_FOR_DEVICE = re.compile(r"^(cuda|hip)DeviceSynchronize$")
_SUBMITTING = re.compile(r"(?i)launch|memcpy|memset|copy|fill")  # calls that submit GPU work
_ABSURD_NS = 86_400 * 10**9  # a day: no event of a recording lasts that long

_IS_WORK, _IS_LAUNCH = (
    np.array([name in names for name in vocab.CATEGORIES])
    for names in (vocab.GPU_WORK, vocab.LAUNCHES)
)
_ON_DEVICE = np.array([KINDS[kind].startswith("device") for kind in KIND_OF_CODE])
_TIMED_TABLES = ("flows", "marks", "counters", "allocations")  # tables with times of their own
_SIDE_TABLES: dict[str, dict[str, Any]] = {
    "copies": dict.fromkeys(("bytes", "kind", "copy_kind", "source_kind", "target_kind"), np.int64),
    "kernels": dict.fromkeys(OCCUPANCY_COLUMNS, np.float64),
    "syncs": dict.fromkeys(("kind", "awaited_stream", "record_correlation", "event_id"), np.int64),
    "collectives": dict.fromkeys(
        (*COLLECTIVE_TEXTS, *COLLECTIVE_RAWS, *COLLECTIVE_NUMBERS), np.int64
    ),
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
    """Reads one Kineto trace: plain or gzip, whole or damaged.

    Args:
        path: The file; `-` is standard input.
        capture: This rank's part of capture.json, where there is one.
        step: Called repeatedly with (bytes read from the file, bytes of text).
        processes: Max number of processes that decode it; all cores if None, where worthwhile.

    Returns:
        The trace; its notices list what was repaired or lost. Of a file in which several ranks were
        merged that of the first, with the others as its `siblings`.

    Raises:
        InputError: The file cannot be read or is not a Kineto trace.
    """
    helping = ahead.take_helpers(path)
    if helping is None and processes != 1 and Path(path).is_file():
        with contextlib.suppress(OSError):  # `decode` reports why it cannot be read
            helping = start_helpers(Path(path), processes)
    decoded = decode(path, step) if helping is None else decode_with(helping, path, step)
    try:
        unknown = decoded.columns.unknown_categories
        if decoded.columns.rows and sum(unknown.values()) == decoded.columns.rows:
            refuse_categories(unknown, str(path))
        parts = split_ranks(decoded, str(path))
        traces = [_assemble(part, str(path), capture) for part, _ in parts]
        return traces[0] if len(traces) == 1 else _join(traces, [rank for _, rank in parts])
    finally:
        decoded.columns.close()


def _join(traces: list[Trace], ranks: list[int | None]) -> Trace:
    """Returns the trace of the first rank of a file, with the others as its siblings."""
    named = [
        replace(
            trace,
            meta=replace(trace.meta, rank=rank, rank_evidence=None if rank is None else "label"),
        )
        for trace, rank in zip(traces, ranks, strict=True)
    ]
    text = f"the file holds the recordings of {len(traces)} processes; each is read by itself"
    notice = Notice("merged-ranks", "info", text, len(traces))
    return replace(named[0], notices=(*named[0].notices, notice), siblings=tuple(named[1:]))


class _FileEvents:
    """The events of a file in time order; columns of the file are released as they are used.

    Attributes:
        rows: `column[rows]` is in time order.
        event: Event number of each row of the file.
    """

    def __init__(self, columns: Columns, base_ns: int) -> None:
        self.columns = columns
        self.base_ns = base_ns
        self.texts = NumberedTexts(columns.texts)
        self.places = ThreadIndex(list(columns.places), columns.thread_names)
        raw_start = columns.take("spans", "start", np.int64)
        raw_duration = columns.take("spans", "duration", np.int64)
        if "halves" in columns.tables:
            raw_duration = raw_duration.copy()
            columns.pair_halves(raw_duration)
        self.rows = compute_time_order(raw_start, raw_duration)
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
        # In files of 2021, annotations have the category of operators too.
        annotations = [
            number
            for number, text in enumerate(names)
            if text.startswith(("ProfilerStep#", "Optimizer."))
        ]
        if annotations:
            self.category[np.isin(self.name, annotations) & (self.category == _OP)] = _ANNOTATION
        self.place = columns.take("spans", "place", np.int32)[self.rows]
        # Python frames of the recorder's own threads are not host work; they appear in stacks too.
        recorder_names = [
            number for number, text in enumerate(names) if _RECORDER_THREAD.search(text)
        ]
        if recorder_names:
            python = self.category == _PYTHON
            recorder_threads = np.unique(self.place[python & np.isin(self.name, recorder_names)])
            self.category[python & np.isin(self.place, recorder_threads)] = _OTHER
        self._events_of: dict[str, Ints] = {}
        self.correlation = self.spread("correlation", "calls", "device")
        self.external = self.spread("external", "ops", "calls", "device")
        if external_ids_repeat_correlations(
            self.external, self.correlation, gather_rows(_IS_WORK, self.category)
        ):
            self.external[gather_rows(_IS_WORK, self.category)] = NULL

    def events_of(self, table: str) -> Ints:
        if table not in self._events_of:
            self._events_of[table] = self.event[self.columns.take(table, "row", np.uint32)]
        return self._events_of[table]

    def spread(self, name: str, *tables: str) -> Ints:
        """Returns a column of side tables as one value per event, NULL elsewhere."""
        out = np.full(len(self.start), NULL, dtype=np.int64, like=self.start)
        for table in tables:
            out[self.events_of(table)] = self.columns.take(table, name, np.int64)
        return out

    def side(self, table: str) -> dict[str, Array]:
        """Returns all columns of a side table, including empty ones; `event` where its rows belong
        to events.
        """
        columns = {
            name: self.columns.take(table, name, dtype)
            for name, dtype in _SIDE_TABLES[table].items()
        }
        return columns if table in _TIMED_TABLES else {"event": self.events_of(table), **columns}


def _assemble(decoded: Decoded, path: str, capture: dict[str, Any] | None) -> Trace:
    """Builds the trace of a decoded file; `capture` is this rank's part of capture.json."""
    columns = decoded.columns
    file_events = _FileEvents(columns, md.compute_time_offset_ns(decoded.metadata, capture))
    file_notices = decoded.damage.notices()
    # For device-side events from the arguments, else from pid and tid; NULL on the host.
    device, stream = file_events.spread("device", "device"), file_events.spread("stream", "device")
    on_device = gather_rows(_ON_DEVICE, file_events.category)
    for values, which in ((device, 0), (stream, 1)):
        missing = np.flatnonzero(on_device & (values == NULL))
        values[missing] = file_events.places.numbers(which)[file_events.place[missing]]
    device[(device < 0) | (device >= 2**31)] = NULL
    lanes = find_lanes(file_events.category, file_events.place, device, stream, file_events.places)
    overruns = _bound_durations(file_events, lanes.lane, device)
    nesting = build_nesting(
        lanes.lane,
        file_events.start,
        file_events.start + np.maximum(file_events.duration, 0),
        lanes.nests,
    )
    events = _build_events(file_events, device, stream, lanes.lane, nesting)
    engine = [
        number
        for number, text in enumerate(file_events.texts.names)
        if text.startswith("autograd::engine::")
    ]
    autograd = (
        np.isin(file_events.name, engine)
        if engine
        else np.zeros(len(file_events.start), dtype=np.bool_, like=file_events.start)
    )
    lane_table = build_lane_frame(lanes, file_events.start, nesting.nested_end_ns, autograd)
    used = {
        int(number)
        for number in sort_unique(device[gather_rows(_IS_WORK, file_events.category)])
        if number != NULL
    }
    steps, step_notices = find_steps(events, lane_table, file_events.texts.names, capture, path)
    # Frames that many callers do not need are deferred; each retains only its own inputs.
    texts, thread_index, base_ns = file_events.texts, file_events.places, file_events.base_ns
    flows = file_events.side("flows")
    flows["start"] = np.where(flows["start"] == NULL, NULL, flows["start"] + base_ns)
    arrows = DeferredFrame(build_flow_frame, flows, texts, events, file_events.place)
    events = _link_events(file_events, events, nesting, steps, arrows)
    del device, stream, lanes, on_device, values, missing
    tensors = DeferredFrame(build_event_frame, file_events.side("tensors"), "tensors", texts.column)
    described = file_events.side("collectives")
    ranks = described["rank"]
    collectives = build_collective_frame(described, texts, events, tensors)
    collectives, capture_notices = add_capture_details(collectives, events, capture)
    allocations = file_events.side("allocations")
    offset, length = (
        columns.take("spans", "offset", np.int64),
        columns.take("spans", "length", np.int32),
    )
    sides: dict[str, Any] = {
        "lanes": lane_table,
        "devices": md.build_device_frame(decoded.metadata, used),
        "groups": md.build_group_frame(decoded.metadata, capture),
        "steps": steps,
        "collectives": collectives,
        "copies": DeferredFrame(build_copy_frame, file_events.side("copies"), texts, events),
        "kernels": DeferredFrame(
            build_event_frame, file_events.side("kernels"), "kernels", _to_figures
        ),
        "syncs": DeferredFrame(build_sync_frame, file_events.side("syncs"), texts, events),
        "flows": arrows,
        "python": DeferredFrame(
            build_event_frame, file_events.side("frames"), "python", to_nullable_series
        ),
        "allocations": DeferredFrame(
            build_allocation_frame,
            allocations,
            base_ns,
            thread_index,
            (events, file_events.place),
            steps,
        ),
        "counters": DeferredFrame(
            build_counter_frame, file_events.side("counters"), base_ns, thread_index, texts
        ),
        "marks": DeferredFrame(
            build_mark_frame, file_events.side("marks"), base_ns, thread_index, texts
        ),
        "sources": DeferredFrame(build_source_frame, offset, length, file_events.rows),
        "tensors": tensors,
    }
    meta, rank_notices = _build_meta(file_events, decoded, path, capture, ranks)
    data_notices = _collect_notices(
        events, nesting, columns.unknown_categories, count_unknown_devices(allocations)
    )
    notices = (
        *file_notices,
        *rank_notices,
        *step_notices,
        *capture_notices,
        *overruns,
        *data_notices,
    )
    return Trace(meta=meta, events=events, notices=notices, **sides)


def _bound_durations(file_events: _FileEvents, lane: Ints, device: Ints) -> list[Notice]:
    """Lets events that cannot have lasted as the file says count as long as most of their name in
    their lane do, and returns a notice of it.

    Such are GPU work and steps of the optimizer during which much later ones of their own stream or
    thread began and ended: they count until the next began at most. And GPU work that lasts more
    than twice as long as from its launch until a later wait for the only device returned.
    """
    start, duration, name = file_events.start, file_events.duration, file_events.name
    correlation, texts = file_events.correlation, list(enumerate(file_events.texts.names))
    calls = np.flatnonzero(gather_rows(_IS_LAUNCH, file_events.category))
    work = np.flatnonzero(gather_rows(_IS_WORK, file_events.category))
    number, index = np.unique(correlation[work], return_inverse=True)
    launched, first = np.unique(correlation[calls], return_index=True)
    # The kernels of one graph launch may run at once on what is told as one stream.
    single = (np.bincount(index) == 1) & np.isin(number, launched) & (number != NULL)
    is_long = single[index] & (duration[work] > 0)
    optimizer = [code for code, text in texts if text.startswith("Optimizer.step#")]
    rows = np.sort(np.append(work[is_long], np.flatnonzero(np.isin(name, optimizer))))
    longest = np.full(rows.size, np.iinfo(np.int64).max)
    waiting = [code for code, text in texts if _WAITS_FOR_DEVICE.match(text)]
    waits = calls[np.isin(name[calls], waiting)]
    if waits.size and np.unique(device[work]).size == 1:
        place = np.searchsorted(launched, correlation[rows]).clip(max=launched.size - 1)
        called = start[calls[first[place]]]
        returned = np.append(start[waits] + duration[waits], 2**61)
        waited = 2 * (returned[np.searchsorted(start[waits], called)] - called)
        longest = np.where(np.isin(rows, work), waited, longest)
    count, longest_ns = 0, 0
    for one in np.unique(lane[rows]).tolist():
        at = np.flatnonzero(lane[rows] == one)
        own, most = rows[at], longest[at]
        end, place = start[own] + duration[own], np.arange(own.size)
        later = np.searchsorted(start[own], end) - place - 1
        ended = np.searchsorted(np.sort(end), end) - place
        overrun = np.flatnonzero((later >= _MIN_OVERRUN) & (ended >= _MIN_OVERRUN))
        most[overrun] = start[own[overrun + 1]] - start[own[overrun]]
        right = duration[own] <= most
        for wrong in np.flatnonzero(~right).tolist():
            count, longest_ns = count + 1, max(longest_ns, int(duration[own[wrong]]))
            alike = own[right & (name[own] == name[own[wrong]])]
            usual_ns = int(np.median(duration[alike])) if alike.size else most[wrong]
            duration[own[wrong]] = min(usual_ns, most[wrong])
    text = (
        f"{count:,} {'event' if count == 1 else 'events'} cannot have taken as long as the file says (up to "
        f"{format_duration(longest_ns)}): later ones of the same stream or thread began and ended meanwhile, or a "
        "wait for the device returned; they count as long as most of their name"
    )
    return [Notice("impossible-duration", "warning", text, count)] if count else []


def _build_events(
    file_events: _FileEvents, device: Ints, stream: Ints, lane: Ints, nesting: Nesting
) -> pl.DataFrame:
    """Builds the `events` frame without the columns that joins add."""
    on_device = gather_rows(_ON_DEVICE, file_events.category)
    process, thread = (
        np.where(
            on_device,
            NULL,
            gather_rows(numbers, file_events.place)
            if len(numbers)
            else np.zeros(0, dtype=np.int64),
        )
        for numbers in (file_events.places.numbers(0), file_events.places.numbers(1))
    )
    record = file_events.spread("record_function", "ops")
    record[record == 0] = NULL
    return pl.DataFrame(
        {
            "event": to_series(
                np.arange(len(file_events.start), dtype=np.uint32, like=file_events.start),
                pl.UInt32,
            ),
            "name": file_events.texts.column(file_events.name),
            "category": take_texts(_CATEGORY_NAMES, file_events.category),
            "start_ns": to_series(file_events.start, pl.Int64),
            "duration_ns": to_series(file_events.duration, pl.Int64),
            "nested_end_ns": to_series(nesting.nested_end_ns, pl.Int64),
            "lane": to_series(lane, pl.UInt32),
            "process": to_nullable_series(process),
            "thread": to_nullable_series(thread),
            "device": to_nullable_series(device, pl.Int32),
            "stream": to_nullable_series(stream),
            "correlation": to_nullable_series(file_events.correlation),
            "external_id": to_nullable_series(file_events.external),
            "record_function_id": to_nullable_series(record),
            "sequence": to_nullable_series(file_events.spread("sequence", "ops")),
            "forward_thread": to_nullable_series(file_events.spread("forward_thread", "ops")),
            "parent": build_event_column(nesting.parent),
            "depth": to_series(np.minimum(nesting.depth, 2**16 - 1), pl.UInt16),
        }
    )


def _link_events(
    file_events: _FileEvents,
    events: pl.DataFrame,
    nesting: Nesting,
    steps: pl.DataFrame,
    flows: DeferredFrame,
) -> pl.DataFrame:
    """Returns the `events` frame with `op`, `launch` and `step`."""
    is_launch, is_work = (
        gather_rows(_IS_LAUNCH, file_events.category),
        gather_rows(_IS_WORK, file_events.category),
    )
    is_op = file_events.category == _OP
    launch = find_launches(file_events.correlation, is_launch, is_work)
    unlinked = np.flatnonzero(is_work & (launch < 0) & (file_events.correlation == NULL))
    if unlinked.size:
        names = file_events.texts.names
        submits = np.array([_SUBMITTING.search(name) is not None for name in names])
        launch[unlinked] = find_uncorrelated_launches(
            unlinked,
            file_events.external,
            is_launch,
            gather_rows(submits, file_events.name),
            flows.frame(),
        )
    op = find_ops(
        find_nearest_ancestor(nesting.parent, is_op),
        launch,
        is_launch,
        is_op,
        is_work,
        file_events.external,
    )
    step = assign_steps(steps, file_events.start, launch, is_work)
    linked = events.with_columns(
        build_event_column(op).alias("op"),
        build_event_column(launch).alias("launch"),
        to_nullable_series(step, pl.Int32, NO_STEP).alias("step"),
    )
    return linked.select(list(SCHEMAS["events"]))


def _build_meta(
    file_events: _FileEvents,
    decoded: Decoded,
    path: str,
    capture: dict[str, Any] | None,
    ranks: Ints,
) -> tuple[Meta, list[Notice]]:
    """Collects the facts about the whole trace; `ranks` are those in the arguments of
    collectives.
    """
    metadata, entry = decoded.metadata, capture or {}
    collective_ranks = sort_unique(ranks[(ranks != NULL) & (ranks >= 0)])
    rank, evidence, notices = md.find_rank(
        metadata, int(collective_ranks[0]) if len(collective_ranks) == 1 else None, path, capture
    )
    info = md.get_distributed_info(metadata)
    host = metadata.get("host_name")
    latest = int(file_events.start[-1]) if len(file_events.start) else 0
    # Choose the process with most events on the host; ids of 0 and below are not processes.
    on_host = file_events.place[~gather_rows(_ON_DEVICE, file_events.category)]
    counts: dict[int, int] = {}
    events = np.bincount(on_host, minlength=len(file_events.places.pairs)).tolist()
    for process, count in zip(file_events.places.numbers(0).tolist(), events, strict=True):
        if process > 0 and count:
            counts[process] = counts.get(process, 0) + count
    meta = Meta(
        path=path,
        rank=rank,
        rank_evidence=evidence,
        world_size=md.parse_whole_number(entry.get("world_size"))
        or md.parse_whole_number(info.get("world_size")),
        # A capture of several hosts uses the host names of the fleet; all containers may report the
        # same name of their own.
        host=entry.get("host") or (host if isinstance(host, str) and host else None),
        process=max(counts, key=lambda process: counts[process], default=None),
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        base_ns=file_events.base_ns,
        clock="unix" if file_events.base_ns or latest > 10**18 else "unknown",
        unit_ns=1000
        if file_events.whole_us and bool((file_events.duration % 1000 == 0).all())
        else 1,
        event_count=file_events.columns.entries,
        file_bytes=decoded.size,
        schema_version=None
        if metadata.get("schemaVersion") is None
        else str(metadata["schemaVersion"]),
        versions=md.collect_versions(metadata),
        settings=md.collect_settings(metadata),
        job=md.collect_job_labels(metadata),
        capture=capture,
    )
    return meta, notices


def _collect_notices(
    events: pl.DataFrame, nesting: Nesting, unknown_categories: dict[str, int], unknown_devices: int
) -> list[Notice]:
    """Returns notices about problems other than damaged text: crossing spans, orphans, absurd
    durations, unknown categories.
    """
    out: list[Notice] = []

    def counted(count: int) -> str:
        return f"{count:,} {'event' if count == 1 else 'events'}"

    negative, absurd, orphans, work = (
        events.lazy()
        .select(
            (pl.col("duration_ns") < 0).sum().alias("negative"),
            (pl.col("duration_ns") >= _ABSURD_NS).sum().alias("absurd"),
            (pl.col("category").is_in(vocab.GPU_WORK) & pl.col("launch").is_null())
            .sum()
            .alias("orphans"),
            pl.col("category").is_in(vocab.GPU_WORK).sum().alias("work"),
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
        text = (
            f"of a category this version does not know ({names}), kept as `other`: {counted(count)}"
        )
        out.append(Notice("unknown-category", "info", text, count))
    if unknown_devices:
        text = f"{unknown_devices:,} memory events are of a device type this version does not know"
        out.append(Notice("unknown-device-type", "info", text, unknown_devices))
    return out


# -- lanes ---------------------------------------------------------------------------------


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
    on_device = gather_rows(_ON_DEVICE, category)
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
    order = compute_stable_order(lanes.lane)
    bounds = np.cumsum(np.append(0, np.bincount(lanes.lane, minlength=len(lanes.rows))))
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


# -- files in which somebody merged the recordings of several ranks -------------------------


def split_ranks(decoded: Decoded, path: str) -> list[tuple[Decoded, int | None]]:
    """Returns the content and the number of each rank of a file in which somebody merged the
    recordings of several; of nearly every file that is the file itself.

    Mergers put a label before each process id (`[TP01] 4711`), name the processes after their rank,
    or only join the lists of events. Nothing in such a file may be joined before its ranks are
    separated: the correlations, external ids and arrows of different ranks have the same numbers.

    Raises:
        InputError: `merged-ranks`: nothing says whose work that of the GPUs is.
    """
    columns = decoded.columns
    pairs = list(columns.places)
    owner_of: dict[Any, Any] = {pid: _find_label(pid, columns) for pid, _ in pairs}
    owners = sorted({label for label in owner_of.values() if label})
    ranks = _number_ranks(owners)
    if len(owners) < 2:  # no labels: by the processes that the profiler itself called the CPU's
        owners = [pid for pid in owner_of if "CPU" in columns.process_texts.get(pid, ())]
        owner_of = dict(zip(owners, owners, strict=True))
        ranks = owners if set(owners) == set(range(len(owners))) else [None] * len(owners)
    if len(owners) < 2 or not columns.rows:
        return [(decoded, None)]
    owner_of_place = np.array(
        [owners.index(owner_of[pid]) if owner_of.get(pid) in owners else -1 for pid, _ in pairs]
    )
    tables = {
        table: {name: columns.take(table, name, None) for name in list(parts)}
        for table, parts in columns.tables.items()
        if table != "halves"
    }
    spans = tables["spans"]
    spans["duration"] = spans["duration"].copy()
    columns.pair_halves(spans["duration"])
    owner = gather_rows(owner_of_place, spans["place"])
    _assign_by_position(owner, spans["category"], len(owners), path)
    found: list[tuple[Decoded, int | None]] = []
    for number, rank in enumerate(ranks):
        damage = DamageLog() if found else decoded.damage
        part = Columns(damage)
        part.texts = columns.texts
        part.unknown_categories = {} if found else columns.unknown_categories
        own = [
            tuple(map(_remove_label, pair)) if owner_of_place[at] == number else pair
            for at, pair in enumerate(pairs)
        ]
        new_place = np.array([part.places[pair] for pair in own], dtype=np.int32)
        part.thread_names = {
            pair: columns.thread_names[pairs[at]]
            for at, pair in enumerate(own)
            if pairs[at] in columns.thread_names and owner_of_place[at] in {number, -1}
        }
        new_row = np.cumsum(owner == number, dtype=np.uint32) - 1
        for table, values in tables.items():
            if "row" in values or table == "spans":
                mine = (owner[values["row"]] if "row" in values else owner) == number
            else:  # what is of no process, such as an instant of the file, goes to the first rank
                at_place = gather_rows(owner_of_place, values["place"])
                mine = (at_place if table == "flows" else np.maximum(at_place, 0)) == number
            new = {"place": new_place, "row": new_row}
            part.tables[table] = {
                name: [new[name][column[mine]] if name in new else column[mine]]
                for name, column in values.items()
            }
            part.entries += 0 if "row" in values else int(mine.sum())
        part.rows = int((owner == number).sum())
        info = {"distributedInfo": {**md.get_distributed_info(decoded.metadata), "rank": rank}}
        content = structs.replace(
            decoded,
            columns=part,
            damage=damage,
            metadata={**decoded.metadata, **info},
            size=decoded.size * part.rows // max(len(owner), 1),
        )
        found.append((content, rank))
    return found


def _find_label(pid: Any, columns: Columns) -> Label:
    """Returns the label of a process: of its id, else the only one among its names."""
    if label := _read_label(str(pid)):
        return label
    labels = {_read_label(text) for text in columns.process_texts.get(pid, ())} - {()}
    return labels.pop() if len(labels) == 1 else ()


def _read_label(text: str) -> Label:
    return tuple((kind.lower(), int(number)) for kind, number in _LABEL.findall(text))


def _remove_label(part: Any) -> Any:
    """Returns a process or thread id as it was before it was labelled."""
    is_labelled = isinstance(part, str) and _LABEL.search(part)
    return _LABEL.sub("", part).strip(" []()_-:/|,.") if is_labelled else part


def _number_ranks(labels: list[Label]) -> list[int | None]:
    """Returns the rank that each label stands for: the first of its numbers that no two share; else
    its place in the usual order of groups, in which tensor-parallel ranks are neighbours.
    """
    numbers = [dict(label) for label in labels]
    for kind in ("rank", "tp", "dp", "ep", "pp"):
        values = [number.get(kind) for number in numbers]
        if None not in values and len(set(values)) == len(values):
            return values
    keys = [[number.get(kind, 0) for kind in ("pp", "dp", "ep", "tp")] for number in numbers]
    return [sorted(keys).index(key) for key in keys]


def _assign_by_position(owner: Ints, category: Array, count: int, path: str) -> None:
    """Gives the spans of no process, such as those of GPUs, to the rank whose part of the file they
    are in.

    Raises:
        InputError: `merged-ranks`: the file has no such parts.
    """
    unknown = np.flatnonzero(owner < 0)
    known = np.flatnonzero(owner >= 0)
    if not unknown.size or not known.size:
        return
    in_parts = np.count_nonzero(np.diff(owner[known])) < count
    is_work = gather_rows(_IS_WORK, category[unknown])
    if is_work.any() and not in_parts:
        raise InputError(
            f"the file holds the recordings of {count} processes, and nothing says which of them "
            "launched the work of its GPUs",
            slug="merged-ranks",
            where=path,
            hint="give the files that it was merged from",
        )
    # Work stands behind the host's events, or before them.
    before = is_work.any() and unknown[is_work][0] < known[0]
    spot = np.searchsorted(known, unknown) - (0 if before else 1)
    owner[unknown] = owner[known[np.clip(spot, 0, known.size - 1)]]
