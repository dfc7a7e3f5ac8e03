"""Reads files about memory: snapshots, timelines, recorded allocations and reports of memory that ran out.

A snapshot holds the segments that the allocator has from the device, with their blocks, at the time
it was taken; and the history of allocations up to then, where it was recorded
(`_record_memory_history`). The layout has changed with PyTorch's versions: only a list of segments;
blocks with a `history` or with `frames`; entries with or without a time.

Two kinds are written by `torch.profiler.profile.export_memory_timeline`: `*.raw.json.gz`, a row
`[time, action, bytes, category]` per event, where the time in ns is -1 for memory allocated before;
and `*.json`, a pair of times (microseconds) and levels by category.
"""

from __future__ import annotations

import errno
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from traceloom.errors import InputError, other_version, unreadable
from traceloom.formats import pickles
from traceloom.formats.inputs import read_first_bytes
from traceloom.system.files import read_small
from traceloom.system.gzip_stream import GzipStream, open_file
from traceloom.trace.array_types import Ints
from traceloom.trace.notice import Notice
from traceloom.trace.session import (
    SNAPSHOT_ACTIONS,
    SNAPSHOT_BLOCKS_SCHEMA,
    SNAPSHOT_ENTRIES_SCHEMA,
    SNAPSHOT_SEGMENTS_SCHEMA,
    MemorySnapshot,
    StackFrame,
)
from traceloom.trace.trace import Trace

_MAX_FRAMES = 512
_MIN_BYTES_PER_ROW = 16  # bytes of file; an entry has at least five values and their keys
_FRAMES_PER_ROW = 8  # a memoized frame takes two bytes
_FEW_ROWS = 100_000
_MAX_INTEGER = 1 << 62
_MAX_TIME_US = _MAX_INTEGER // 1000


def read_snapshot(path: str | Path) -> MemorySnapshot:
    """Reads a snapshot; nothing in the file is run.

    Raises:
        InputError: As for `traceloom.formats.pickles.load`; `not-a-snapshot`, where the
            pickle holds something else.
    """
    document, replaced = pickles.load(path)
    return parse_snapshot(document, str(path), replaced, Path(path).stat().st_size)


def parse_snapshot(
    document: Any, path: str, replaced: int = 0, size: int | None = None
) -> MemorySnapshot:
    """Builds the snapshot from the data of a pickle; see `read_snapshot`.

    Args:
        document: The data.
        path: The file.
        replaced: Number of replaced texts.
        size: Bytes of the file. Objects in a pickle may be shared any number of times; this limits
            the size of the result.
    """
    snapshot = {"segments": document} if isinstance(document, list) else document
    traces = snapshot.get("device_traces", []) if isinstance(snapshot, dict) else None
    segments = snapshot.get("segments", []) if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not isinstance(segments, list) or not (traces or segments):
        raise InputError(
            "the pickle holds no memory snapshot (no `segments` or `device_traces`)",
            slug="not-a-snapshot",
            where=path,
            hint="make one with torch.cuda.memory._dump_snapshot(), or with traceloom record --memory",
        )
    reader = _Reader(path, None if size is None else size // _MIN_BYTES_PER_ROW + _FEW_ROWS)
    for device, trace in enumerate(traces):
        reader.history(device, trace)
    for segment in segments:
        reader.segment(segment)
    notices: tuple[Notice, ...] = ()
    if reader.odd:
        text = f"{reader.odd} entries of the snapshot are not as they should be, and are left out"
        notices = (Notice("odd-snapshot-entries", "warning", text, count=reader.odd),)
    if replaced:
        text = f"{replaced} texts of the snapshot hold halves of surrogate pairs, which are replaced by U+FFFD"
        notices += (Notice("replaced-text", "warning", text, count=replaced),)
    return MemorySnapshot(
        path,
        pl.DataFrame(reader.entries, schema=SNAPSHOT_ENTRIES_SCHEMA, orient="col"),
        pl.DataFrame(reader.segments, schema=SNAPSHOT_SEGMENTS_SCHEMA, orient="row"),
        pl.DataFrame(reader.blocks, schema=SNAPSHOT_BLOCKS_SCHEMA, orient="row"),
        tuple(reader.stacks),
        notices,
    )


class _Reader:
    """Converts objects to columns; invalid values are counted."""

    def __init__(self, path: str, max_rows: int | None) -> None:
        self._path, self._most, self._rows = path, max_rows, 0
        self._by_list: dict[int, int] = {}  # lists of frames are shared too
        self.odd = 0
        self._total = 0
        self.entries: list[list[Any]] = [[] for _ in SNAPSHOT_ENTRIES_SCHEMA]
        self.segments: list[tuple[Any, ...]] = []
        self.blocks: list[tuple[Any, ...]] = []
        self.stacks: list[tuple[StackFrame, ...]] = [()]
        self._frames: list[StackFrame] = []
        self._frame_numbers: dict[StackFrame, int] = {}
        self._seen: dict[int, int] = {}  # frames are shared: by identity
        self._stack: dict[tuple[int, ...], int] = {(): 0}

    def history(self, device: int, trace: Any) -> None:
        if not isinstance(trace, list):
            self.odd += 1
            return
        devices, actions, addresses, sizes, times, stacks = self.entries
        self.count(len(trace))
        for entry in trace:
            if type(entry) is not dict:
                self.odd += 1
                continue
            action, size, time = entry.get("action"), entry.get("size", 0), entry.get("time_us")
            address = entry.get("device_free" if action == "oom" else "addr", 0)
            known_action = type(action) is str and action in _KNOWN
            valid_time = time is None or (_is_size(time) and time < _MAX_TIME_US)
            if not (known_action and valid_time and _is_size(address) and self.credible(size)):
                self.odd += 1
                continue
            devices.append(device)
            actions.append(action)
            addresses.append(address)
            sizes.append(size)
            times.append(time)
            stacks.append(self.stack_of(entry.get("frames")))

    def segment(self, segment: Any) -> None:
        """Adds a segment with its blocks; older versions give no addresses of blocks, which are
        contiguous.
        """
        if not isinstance(segment, dict):
            self.odd += 1
            return
        address: Any
        device, address, size = (
            segment.get("device", 0),
            segment.get("address"),
            segment.get("total_size"),
        )
        blocks = segment.get("blocks")
        valid = _is_size(address) and self.credible(size) and _is_size(device) and device < 1 << 31
        if not valid or not isinstance(blocks, list):
            self.odd += 1
            return
        number, next_address = len(self.segments), address
        stream = segment.get("stream", 0)
        self.segments.append((device, address, size, stream if _is_size(stream) else 0))
        self.count(len(blocks))
        for block in blocks:
            block_size: Any = block.get("size") if isinstance(block, dict) else None
            state = block.get("state") if isinstance(block, dict) else None
            if not self.credible(block_size) or not isinstance(state, str):
                self.odd += 1
                continue
            block_address = block.get("address", next_address)
            requested = block.get("requested_size", block_size)
            history = block.get("history")
            last = (
                history[0]
                if isinstance(history, list) and history and isinstance(history[0], dict)
                else block
            )
            requested = last.get("real_size", requested) if last is not block else requested
            self.blocks.append(
                (
                    device,
                    number,
                    block_address if _is_size(block_address) else next_address,
                    block_size,
                    requested if _is_size(requested) else block_size,
                    state,
                    self.stack_of(last.get("frames")),
                )
            )
            next_address += block_size

    def credible(self, size: Any) -> bool:
        if not _is_size(size) or self._total + size >= _MAX_INTEGER:
            return False
        self._total += size
        return True

    def stack_of(self, frames: Any) -> int:
        if not frames or not isinstance(frames, list):
            return 0
        cached = self._by_list.get(id(frames))
        if cached is not None:
            return cached
        known_frames, retained = self._seen, frames[:_MAX_FRAMES]
        try:
            key = tuple([known_frames[id(frame)] for frame in retained])
        except KeyError:
            for frame in retained:  # the document keeps its objects alive as long as the reader
                if id(frame) in known_frames:
                    continue
                location: StackFrame = ("", 0, "?")
                if isinstance(frame, dict):
                    # Values that are not text are not converted, since they may be huge.
                    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
                    location = (
                        file[:1000] if isinstance(file, str) else "",
                        line if isinstance(line, int) and _is_size(line) else 0,
                        (name[:1000] if isinstance(name, str) else "") or "?",
                    )
                known_frames[id(frame)] = self._frame_numbers.setdefault(
                    location, len(self._frames)
                )
                if known_frames[id(frame)] == len(self._frames):
                    self._frames.append(location)
            key = tuple([known_frames[id(frame)] for frame in retained])
        number = self._stack.get(key)
        if number is None:
            number = self._stack[key] = len(self.stacks)
            self.count(len(key) // _FRAMES_PER_ROW)
            self.stacks.append(tuple(self._frames[k] for k in key))
        self._by_list[id(frames)] = number
        return number

    def count(self, rows: int) -> None:
        """Counts rows built from the file.

        Raises:
            InputError: slug `pickle-damaged`: more than its size allows.
        """
        self._rows += rows
        if self._most is not None and self._rows > self._most:
            raise InputError(
                "the snapshot holds more entries than its size allows: they are the same ones again and again",
                slug="pickle-damaged",
                where=self._path,
            )


_KNOWN = frozenset(SNAPSHOT_ACTIONS)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_INTEGER


FORMAT = "traceloom-allocations"
_VERSION = 1
_MAX_ALLOCATIONS_BYTES = 1 << 30  # of text
_MAX_NAME_LENGTH = 1000


class _Document(msgspec.Struct):
    """The content of a file of recorded allocations.

    An event has time in ns, thread, address, signed bytes, device, stack (-1: none), and two
    totals. A frame has function, file, line; line 0 is a native function, whose file is its
    library.
    """

    format: str
    version: int
    pid: int
    rank: int | None
    frames: list[tuple[str, str, int]]
    stacks: list[list[int]]
    events: list[tuple[int, int, int, int, str, int, int | None, int | None]]
    lost: int
    without_stack: int
    without_python: str | None


class _AllocationsFile(GzipStream):
    MOST_EXPANSION = 200
    BOMB_BYTES = 1 << 24


def read_allocations(path: str | Path) -> tuple[int | None, list[MemorySnapshot]]:
    """Reads a file of recorded allocations.

    Returns:
        The rank, and one snapshot for each type of device. Memory that the process got from a
        device's driver becomes segments where the allocator's blocks in it are known, else blocks
        of device 0.

    Raises:
        InputError: `unreadable`, `gzip-bomb`, `other-version`; `damaged-allocations`: cut, or
            invalid.
    """
    document = _read_document(path)
    frames: list[StackFrame] = [
        (file[:_MAX_NAME_LENGTH] if line else "", line, name[:_MAX_NAME_LENGTH] or "?")
        for name, file, line in document.frames
    ]
    stacks = ((), *(tuple(frames[row] for row in stack) for stack in document.stacks))
    allocator = {
        device.partition(":")[0] for _, _, _, _, device, *_ in document.events if ":" in device
    }
    columns: dict[str, list[tuple[int, str, int, int, int, int]]] = {}
    for time_ns, _, address, size, device, stack, _, _ in document.events:
        kind, colon, number = device.partition(":")
        action = "alloc" if size > 0 else "free_completed"
        if not colon and kind in allocator:
            action = "segment_alloc" if size > 0 else "segment_free"
        row = (int(number or 0), action, address, abs(size), time_ns // 1000, stack + 1)
        columns.setdefault(kind, []).append(row)
    notices = []
    if document.lost:
        text = f"{document.lost:,} allocations and frees came too quickly to be recorded: blocks may seem to be unfreed"
        notices.append(Notice("lost-allocations", "warning", text, count=document.lost))
    if document.without_stack:
        text = f"{document.without_stack:,} allocations came too quickly for their stacks to be taken: they have none"
        notices.append(Notice("sampled-stacks", "info", text, count=document.without_stack))
    if document.without_python is not None:
        text = f"stacks have no lines of Python: {document.without_python[:_MAX_NAME_LENGTH]}"
        notices.append(Notice("no-python-lines", "info", text))
    return document.rank, [
        MemorySnapshot(
            str(path),
            pl.DataFrame(rows, schema=SNAPSHOT_ENTRIES_SCHEMA, orient="row"),
            pl.DataFrame(schema=SNAPSHOT_SEGMENTS_SCHEMA),
            pl.DataFrame(schema=SNAPSHOT_BLOCKS_SCHEMA),
            stacks,
            tuple(notices),
            kind,
        )
        for kind, rows in columns.items()
    ]


def _read_document(path: str | Path) -> _Document:
    with open_file(path) as stream:
        file = _AllocationsFile(stream)
        text = file.whole(_MAX_ALLOCATIONS_BYTES, "file", path)
    if file.damage:
        raise _make_damage_error(path, "its gzip is cut or damaged")
    try:
        document = msgspec.json.decode(text, type=_Document)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _make_damage_error(path, str(error)[:200]) from error
    if document.format != FORMAT:
        raise _make_damage_error(path, f"its format is not `{FORMAT}`")
    if document.version != _VERSION:
        raise other_version("file of allocations", document.version, _VERSION, path)
    frames, stacks = range(len(document.frames)), range(-1, len(document.stacks))
    if any(not 0 <= line < 1 << 31 for _, _, line in document.frames):
        raise _make_damage_error(path, "a frame has a line that is none")
    if any(
        len(stack) > _MAX_FRAMES or any(frame not in frames for frame in stack)
        for stack in document.stacks
    ):
        raise _make_damage_error(path, "a stack has frames that are not there")
    total = 0
    for time_ns, _, address, size, device, stack, _, _ in document.events:
        total += abs(size)
        number = device.partition(":")[2]
        right = (
            0 <= time_ns < _MAX_INTEGER
            and 0 <= address < _MAX_INTEGER
            and size != 0
            and stack in stacks
        )
        if (
            not right
            or total >= _MAX_INTEGER
            or not (number == "" or (number.isascii() and number.isdigit()))
        ):
            raise _make_damage_error(path, "an event is none")
        if len(device) > 40 or int(number or 0) >= 1 << 31:
            raise _make_damage_error(path, "a device is none")
    return document


def _make_damage_error(path: str | Path, reason: str) -> InputError:
    return InputError(
        f"the allocations cannot be read: {reason}", slug="damaged-allocations", where=str(path)
    )


SNAPSHOT, TIMELINE, OUT_OF_MEMORY, ALLOCATIONS = (
    "snapshot",
    "timeline",
    "out of memory",
    "allocations",
)
OOM_FORMAT = "traceloom-out-of-memory"
MAX_OOM_BYTES = 1 << 26
_ROWS = re.compile(rb"\[\s*\[\s*-?\d+\s*,\s*-?\d+")
_STEM = re.compile(r"(rank\d+(?:-pid\d+)?|pid\d+)")


def detect_kind(path: Path) -> str | None:
    """Returns `SNAPSHOT`, `TIMELINE`, `OUT_OF_MEMORY` or `ALLOCATIONS`; None for anything else (a
    trace, no file).
    """
    head = read_first_bytes(path)
    if head is None:
        return None
    if head.startswith(b"\x80"):
        return SNAPSHOT
    if _ROWS.match(head.lstrip()):
        return TIMELINE
    if head.lstrip().startswith(b"{") and OOM_FORMAT.encode() in head[:200]:
        return OUT_OF_MEMORY
    if head.lstrip().startswith(b"{") and FORMAT.encode() in head[:200]:
        return ALLOCATIONS
    return None


def read_out_of_memory(path: Path) -> dict[str, Any]:
    """Reads the report that a run writes when memory runs out.

    Raises:
        InputError: `unreadable`; `damaged-memory-report`: it is cut, too large, or another kind of
            file; `other-version`.
    """
    try:
        text = read_small(path, MAX_OOM_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _make_report_error(
                path, f"it has more than {MAX_OOM_BYTES // 10**6} MB"
            ) from error
        raise unreadable(path, error) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _make_report_error(path, "it is cut, or no JSON") from error
    if not isinstance(document, dict) or document.get("format") != OOM_FORMAT:
        raise _make_report_error(path, f"its format is not `{OOM_FORMAT}`")
    version = document.get("version")
    if version != 1:
        raise other_version("report on memory", version, 1, path)
    return document


def _make_report_error(path: Path, reason: str) -> InputError:
    return InputError(
        f"the report on memory cannot be read: {reason}",
        slug="damaged-memory-report",
        where=str(path),
    )


def parse_integer(value: Any) -> int | None:
    """Returns an integer that fits a column; None for anything else."""
    return value if type(value) is int and abs(value) < 1 << 62 else None


def parse_rank(path: Path) -> int | None:
    """Returns the rank in a file's name, as written by the recorder."""
    match = re.match(r"rank(\d+)", path.name)
    return int(match[1]) if match else None


def find_sidecar(trace: Trace, ending: str) -> Path | None:
    """Returns the file of the same process with this ending (`.memory.pickle`, `.oom.json`) in the
    trace's capture.
    """
    entry = trace.meta.capture
    if entry is None or trace.meta.path in ("", "-"):
        return None
    trace_path = Path(trace.meta.path)
    name = entry.get("name")
    stem = name if isinstance(name, str) and _STEM.fullmatch(name) else None
    if stem is None:
        match = _STEM.match(trace_path.name)
        stem = match[1] if match else None
    path = trace_path.parent / f"{stem}{ending}" if stem else None
    return path if path is not None and path.is_file() else None


CATEGORIES = (
    "parameter",
    "optimizer_state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd_detail",
    "unknown",
)
ACTIONS = {1: "preexisting", 2: "create", 3: "increment_version", 4: "destroy"}
PREEXISTING, CREATE, INCREMENT_VERSION, DESTROY = ACTIONS
MAX_TIMELINE_BYTES = 1 << 30  # of text


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory in use by category, without the individual blocks.

    Attributes:
        path: The file.
        raw: Whether the file holds single events.
        time_ns: Unix time of each row, never decreasing; shape (rows,). Memory allocated before has
            the time of the first event after it.
        levels: Bytes of each category (`CATEGORIES`) after each row, shape (8, rows).
        created: Number of recorded allocations; 0 where the file holds levels only.
        destroyed: Number of recorded frees.
        before: Number of leading rows about memory allocated before.
    """

    path: str
    raw: bool
    time_ns: Ints
    levels: Ints
    created: int
    destroyed: int
    before: int


class _TimelineFile(GzipStream):
    MOST_EXPANSION = 100  # numbers compress up to tenfold as text
    BOMB_BYTES = 1 << 24


def read_timeline(path: str | Path) -> MemoryTimeline:
    """Reads either kind of timeline, plain or gzip.

    Raises:
        InputError: `unreadable`, `gzip-bomb`; `not-a-memory-timeline`: cut, invalid JSON, or other
            rows.
    """
    with open_file(path) as stream:
        file = _TimelineFile(stream)
        text = file.whole(MAX_TIMELINE_BYTES, "timeline", path)
    if file.damage:
        raise _make_timeline_error(path, "its gzip is cut or damaged")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _make_timeline_error(path, "it is cut, or no JSON") from error
    return parse_timeline(document, str(path))


def parse_timeline(document: Any, path: str) -> MemoryTimeline:
    """Parses the timeline in a JSON document; see `read_timeline`."""
    if not isinstance(document, list) or not document:
        raise _make_timeline_error(path, "it holds no list of rows")
    if (
        len(document) == 2
        and all(isinstance(part, list) and part for part in document)
        and _is_table(document[1], 9)
    ):
        times, sizes = document
        if len(times) != len(sizes) or not _is_table([times], len(times)):
            raise _make_timeline_error(path, "it has other numbers of times and of levels")
        if max(abs(value) for value in times) > _MAX_INTEGER // 1000:
            raise _make_timeline_error(path, "its times are no microseconds")
        time = np.array(times, dtype=np.int64) * 1000
        levels = np.array(sizes, dtype=np.int64).T[1:]
        order = np.argsort(time, kind="stable")
        return MemoryTimeline(path, False, time[order], levels[:, order], 0, 0, 0)
    if not _is_table(document, 4):
        raise _make_timeline_error(path, "expected rows of [time, action, bytes, category]")
    rows = np.array(document, dtype=np.int64)
    time, action, size, category = rows.T
    if (category < 0).any() or (category >= len(CATEGORIES)).any():
        raise _make_timeline_error(
            path, f"categories are numbered 0 to {len(CATEGORIES) - 1}, found {int(category.max())}"
        )
    if not np.isin(action, list(ACTIONS)).all():
        raise _make_timeline_error(path, "actions are numbered 1 to 4")
    if np.abs(size.astype(np.float64)).sum() >= _MAX_INTEGER:
        raise _make_timeline_error(path, "its sizes are larger than any memory")
    change = np.zeros((len(CATEGORIES), rows.shape[0]), dtype=np.int64)
    early = time < 0
    order = np.argsort(np.where(early, -1, time), kind="stable")
    change[category[order], np.arange(order.size)] = size[order]
    first = int(time[~early].min()) if (~early).any() else 0
    return MemoryTimeline(
        path,
        True,
        np.where(early, first, time)[order],
        np.cumsum(change, axis=1),
        int((action == CREATE).sum()),
        int((action == DESTROY).sum()),
        int(early.sum()),
    )


def _is_table(rows: Any, width: int) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and len(row) == width
        and all(type(value) is int and -_MAX_INTEGER < value < _MAX_INTEGER for value in row)
        for row in rows
    )


def _make_timeline_error(path: str | Path, reason: str) -> InputError:
    return InputError(
        f"the memory timeline cannot be read: {reason}",
        slug="not-a-memory-timeline",
        where=str(path),
        hint="write it with profiler.export_memory_timeline(path) as .raw.json.gz or .json",
    )
