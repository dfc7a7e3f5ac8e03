"""From the columns of a file to a Trace: order, lanes, nesting, joins, side frames, notices."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.model import Meta, Notice, Trace
from traceloom.model import category as cat
from traceloom.model.arrays import Texts, chosen, distinct, lookup, nearest, nullable, plain, row_numbers
from traceloom.model.deferred import Deferred
from traceloom.model.schema import SCHEMAS, CategoryType
from traceloom.read import metadata as md
from traceloom.read.captured import with_captured
from traceloom.read.collectives import collective_frame
from traceloom.read.columns import COLLECTIVE_NUMBERS, COLLECTIVE_RAWS, COLLECTIVE_TEXTS, FILLING, Columns
from traceloom.read.fields import NULL
from traceloom.read.lanes import KIND_OF_CODE, ON_DEVICE, ThreadPairs, find_lanes, lane_frame
from traceloom.read.links import flow_frame, launches, ops, repeats_correlation, source_frame
from traceloom.read.memory import allocation_frame, counter_frame, mark_frame, unknown_devices
from traceloom.read.nesting import Nesting, nest
from traceloom.read.order import Order, time_order
from traceloom.read.remarks import remarks
from traceloom.read.steps import NO_STEP, event_steps, find_steps
from traceloom.read.transfers import copy_frame, kernel_frame, sync_frame

Array = NDArray[Any]
Ints = NDArray[np.int64]
_CODES = {name: code for code, name in enumerate(cat.CATEGORIES)}
_CATEGORY_NAMES = pl.Series(list(cat.CATEGORIES), dtype=CategoryType)
_OP, _ANNOTATION, _PYTHON, _OTHER = (_CODES[name] for name in (cat.OP, cat.ANNOTATION, cat.PYTHON, cat.OTHER))
_OUR_THREAD = re.compile(r"(^|/)traceloom/capture/(moments|endings|processor_time)\.py\(\d+\): (_watch|_listen)$")


_IS_WORK, _IS_LAUNCH = (np.array([name in names for name in cat.CATEGORIES]) for names in (cat.GPU_WORK, cat.LAUNCHES))
_ON_DEVICE = ON_DEVICE[KIND_OF_CODE]
_TIMED = ("flows", "marks", "counters", "allocations")  # tables with times of their own
_SIDE: dict[str, dict[str, Any]] = {
    "copies": dict.fromkeys(("bytes", "kind", "copy_kind", "source_kind", "target_kind"), np.int64),
    "kernels": dict.fromkeys(FILLING, np.float64),
    "syncs": dict.fromkeys(("kind", "awaited_stream", "record_correlation", "event_id"), np.int64),
    "collectives": dict.fromkeys((*COLLECTIVE_TEXTS, *COLLECTIVE_RAWS, *COLLECTIVE_NUMBERS), np.int64),
    "tensors": dict.fromkeys(("shapes", "types", "strides", "concrete"), np.int32),
    "frames": dict.fromkeys(("python_id", "python_parent", "module_id"), np.int64),
    "flows": {"phase": np.bool_, **dict.fromkeys(("flow", "kind", "place", "start"), np.int64)},
    "marks": dict.fromkeys(("start", "name", "place", "bytes"), np.int64),
    "counters": {**dict.fromkeys(("start", "name", "key", "place"), np.int64), "value": np.float64},
    "allocations": dict.fromkeys(
        (
            "start",
            "place",
            "address",
            "allocation_bytes",
            "total_allocated",
            "total_reserved",
            "device_type",
            "device_id",
        ),
        np.int64,
    ),
}


class File(Struct, frozen=True):
    """What is known of a file beside its events."""

    path: str
    metadata: dict[str, Any]
    size: int  # bytes of text
    notices: tuple[Notice, ...]
    capture: dict[str, Any] | None  # this rank's part of capture.json


class _Builder:
    """The steps from columns to frames, with what they share; columns of the file are given up as they are used."""

    def __init__(self, columns: Columns, file: File) -> None:
        self.columns = columns
        self.file = file
        self.texts = Texts(columns.texts)
        self.places = ThreadPairs(list(columns.places), columns.thread_names)
        raw_start = columns.take("spans", "start", np.int64)
        raw_duration = columns.take("spans", "duration", np.int64)
        self.order: Order = time_order(raw_start, raw_duration)
        self.base_ns = md.base_ns(file.metadata)
        self.whole_us = bool((raw_start % 1000 == 0).all())
        self.start = raw_start[self.order.rows] + self.base_ns
        del raw_start
        self.duration = raw_duration[self.order.rows]
        del raw_duration
        self.name = self._span("name", np.int32)
        self.category = self._span("category", np.uint8)
        # In files of 2021 annotations are called operators too.
        annotations = [
            number for number, text in enumerate(self.texts.names) if text.startswith(("ProfilerStep#", "Optimizer."))
        ]
        if annotations:
            self.category[np.isin(self.name, annotations) & (self.category == _OP)] = _ANNOTATION
        self.place = self._span("place", np.int32)
        self._leave_out_our_threads()
        self._rows: dict[str, Ints] = {}
        self.correlation = self.spread("correlation", "calls", "device")
        self.external = self.spread("external", "ops", "calls", "device")
        if repeats_correlation(self.external, self.correlation, lookup(_IS_WORK, self.category)):
            self.external[lookup(_IS_WORK, self.category)] = NULL

    def _span(self, name: str, dtype: Any) -> Array:
        return self.columns.take("spans", name, dtype)[self.order.rows]

    def _leave_out_our_threads(self) -> None:
        """Python frames of threads that the recorder itself runs are no host work: stacks show them, too."""
        name_codes = [number for number, text in enumerate(self.texts.names) if _OUR_THREAD.search(text)]
        if name_codes:
            python = self.category == _PYTHON
            places = np.unique(self.place[python & np.isin(self.name, name_codes)])
            self.category[python & np.isin(self.place, places)] = _OTHER

    def rows(self, table: str) -> Ints:
        """The event of each row of a side table."""
        if table not in self._rows:
            self._rows[table] = self.order.event[self.columns.take(table, "row", np.uint32)]
        return self._rows[table]

    def spread(self, name: str, *tables: str) -> Ints:
        """A column of side tables as one value per event, NULL elsewhere."""
        out = np.full(len(self.start), NULL, dtype=np.int64, like=self.start)
        for table in tables:
            out[self.rows(table)] = self.columns.take(table, name, np.int64)
        return out

    def side(self, table: str) -> dict[str, Array]:
        """All columns of a side table, empty ones too; `event` where its rows are about events."""
        columns = {name: self.columns.take(table, name, dtype) for name, dtype in _SIDE[table].items()}
        return columns if table in _TIMED else {"event": self.rows(table), **columns}

    def device_and_stream(self) -> tuple[Ints, Ints]:
        """Of device-side events: the arguments, else pid and tid; NULL on the host."""
        device, stream = self.spread("device", "device"), self.spread("stream", "device")
        on_device = lookup(_ON_DEVICE, self.category)
        for values, which in ((device, 0), (stream, 1)):
            missing = np.flatnonzero(on_device & (values == NULL))
            values[missing] = self.places.numbers(which)[self.place[missing]]
        device[(device < -1) | (device >= 2**31)] = NULL
        return device, stream


def assemble(columns: Columns, file: File) -> Trace:
    """Build the trace of a file.

    Args:
        columns: All its entries.
        file: The rest.
    """
    made = _Builder(columns, file)
    device, stream = made.device_and_stream()
    lanes = find_lanes(made.category, made.place, device, stream, made.places)
    nesting = nest(lanes.lane, made.start, made.start + np.maximum(made.duration, 0), lanes.nests)
    events = _events(made, device, stream, lanes.lane, nesting)
    engine = [number for number, text in enumerate(made.texts.names) if text.startswith("autograd::engine::")]
    autograd = np.isin(made.name, engine) if engine else np.zeros(len(made.start), dtype=np.bool_, like=made.start)
    lane_table = lane_frame(lanes, made.start, nesting.nested_end_ns, autograd)
    used = {int(number) for number in distinct(device[lookup(_IS_WORK, made.category)]) if number != NULL}
    events, steps, step_notices = _linked(made, events, nesting, lane_table)
    del device, stream, lanes
    tensors = Deferred(_tensors, made.side("tensors"), made.texts)
    described = made.side("collectives")
    ranks = described["rank"]
    collectives = collective_frame(described, made.texts, events, tensors)
    collectives, capture_notices = with_captured(collectives, events, file.capture)
    allocations = made.side("allocations")
    sides: dict[str, Any] = {
        "lanes": lane_table,
        "devices": md.device_frame(file.metadata, used),
        "groups": md.group_frame(file.metadata, file.capture),
        "steps": steps,
        "collectives": collectives,
        **_deferred(made, events, steps, allocations),
        "tensors": tensors,
    }
    meta, rank_notices = _meta(made, ranks)
    notices = (
        *file.notices,
        *rank_notices,
        *step_notices,
        *capture_notices,
        *remarks(events, nesting, columns.unknown_categories, unknown_devices(allocations)),
    )
    return Trace(meta=meta, events=events, notices=notices, **sides)


def _events(made: _Builder, device: Ints, stream: Ints, lane: Ints, nesting: Nesting) -> pl.DataFrame:
    """The `events` frame without what joins add."""
    on_device = lookup(_ON_DEVICE, made.category)
    process = np.where(on_device, NULL, _of_places(made, 0))
    thread = np.where(on_device, NULL, _of_places(made, 1))
    record = made.spread("record_function", "ops")
    record[record == 0] = NULL
    return pl.DataFrame(
        {
            "event": plain(np.arange(len(made.start), dtype=np.uint32, like=made.start), pl.UInt32),
            "name": made.texts.column(made.name),
            "category": chosen(_CATEGORY_NAMES, made.category),
            "start_ns": plain(made.start, pl.Int64),
            "duration_ns": plain(made.duration, pl.Int64),
            "nested_end_ns": plain(nesting.nested_end_ns, pl.Int64),
            "lane": plain(lane, pl.UInt32),
            "process": nullable(process),
            "thread": nullable(thread),
            "device": nullable(device, pl.Int32),
            "stream": nullable(stream),
            "correlation": nullable(made.correlation),
            "external_id": nullable(made.external),
            "record_function_id": nullable(record),
            "sequence": nullable(made.spread("sequence", "ops")),
            "forward_thread": nullable(made.spread("forward_thread", "ops")),
            "parent": row_numbers(nesting.parent),
            "depth": plain(np.minimum(nesting.depth, 2**16 - 1), pl.UInt16),
        }
    )


def _of_places(made: _Builder, which: int) -> Ints:
    numbers = made.places.numbers(which)
    return lookup(numbers, made.place) if len(numbers) else np.zeros(0, dtype=np.int64)


def _linked(
    made: _Builder, events: pl.DataFrame, nesting: Nesting, lanes: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame, list[Notice]]:
    """Add `op`, `launch` and `step`."""
    is_launch, is_work = lookup(_IS_LAUNCH, made.category), lookup(_IS_WORK, made.category)
    is_op = made.category == _OP
    launch = launches(made.correlation, is_launch, is_work)
    op = ops(nearest(nesting.parent, is_op), launch, is_launch, is_op, is_work, made.external)
    steps, notices = find_steps(events, lanes, made.texts.names, made.file.capture, made.file.path)
    step = event_steps(steps, made.start, launch, is_work)
    linked = events.with_columns(
        row_numbers(op).alias("op"),
        row_numbers(launch).alias("launch"),
        nullable(step, pl.Int32, NO_STEP).alias("step"),
    )
    return linked.select(list(SCHEMAS["events"])), steps, notices


def _tensors(columns: dict[str, Array], texts: Texts) -> pl.DataFrame:
    order = np.argsort(columns["event"], kind="stable")
    codes = {name: values[order] for name, values in columns.items()}
    event = plain(codes.pop("event"), pl.UInt32)
    listed = {name: texts.column(values) for name, values in codes.items()}
    return pl.DataFrame({"event": event, **listed}, schema=SCHEMAS["tensors"])


def _python(columns: dict[str, Array]) -> pl.DataFrame:
    order = np.argsort(columns["event"], kind="stable")
    values = {name: nullable(column[order]) for name, column in columns.items() if name != "event"}
    return pl.DataFrame({"event": plain(columns["event"][order], pl.UInt32), **values}, schema=SCHEMAS["python"])


def _deferred(
    made: _Builder, events: pl.DataFrame, steps: pl.DataFrame, allocations: dict[str, Array]
) -> dict[str, Deferred]:
    """The frames that not everybody asks for; each keeps only what it is made of."""
    texts, places, base_ns, columns = made.texts, made.places, made.base_ns, made.columns
    spans = {name: columns.take("spans", name, dtype) for name, dtype in (("offset", np.int64), ("length", np.int32))}
    flows = made.side("flows")
    flows["start"] = np.where(flows["start"] == NULL, NULL, flows["start"] + base_ns)
    return {
        "copies": Deferred(copy_frame, made.side("copies"), texts, events),
        "kernels": Deferred(kernel_frame, made.side("kernels")),
        "syncs": Deferred(sync_frame, made.side("syncs"), texts, events),
        "flows": Deferred(flow_frame, flows, texts, events, made.place),
        "python": Deferred(_python, made.side("frames")),
        "allocations": Deferred(allocation_frame, allocations, base_ns, places, (events, made.place), steps),
        "counters": Deferred(counter_frame, made.side("counters"), base_ns, places, texts),
        "marks": Deferred(mark_frame, made.side("marks"), base_ns, places, texts),
        "sources": Deferred(source_frame, spans["offset"], spans["length"], made.order.rows),
    }


def _meta(made: _Builder, ranks: Ints) -> tuple[Meta, list[Notice]]:
    metadata, file = made.file.metadata, made.file
    named = distinct(ranks[(ranks != NULL) & (ranks >= 0)])
    rank, evidence, notices = md.find_rank(
        metadata, int(named[0]) if len(named) == 1 else None, file.path, file.capture
    )
    info = md.distributed(metadata)
    capture = file.capture or {}
    host = metadata.get("host_name")
    latest = int(made.start[-1]) if len(made.start) else 0
    meta = Meta(
        path=file.path,
        rank=rank,
        rank_evidence=evidence,
        world_size=md.whole(capture.get("world_size")) or md.whole(info.get("world_size")),
        host=host if isinstance(host, str) and host else capture.get("host"),
        process=_busiest_process(made),
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        base_ns=made.base_ns,
        clock="unix" if made.base_ns or latest > 10**18 else "unknown",
        unit_ns=1000 if made.whole_us and bool((made.duration % 1000 == 0).all()) else 1,
        event_count=made.columns.entries,
        file_bytes=file.size,
        schema_version=None if metadata.get("schemaVersion") is None else str(metadata["schemaVersion"]),
        versions=md.versions(metadata),
        settings=md.settings(metadata),
        job=md.job(metadata),
        capture=file.capture,
    )
    return meta, notices


def _busiest_process(made: _Builder) -> int | None:
    """The process with most events on the host; 0 and below are no processes."""
    on_host = made.place[~lookup(_ON_DEVICE, made.category)]
    counts: dict[int, int] = {}
    events = np.bincount(on_host, minlength=len(made.places.pairs)).tolist()
    for process, count in zip(made.places.numbers(0).tolist(), events, strict=True):
        if process > 0 and count:
            counts[process] = counts.get(process, 0) + count
    return max(counts, key=lambda process: counts[process], default=None)
