"""Reads files about memory: timelines, recorded allocations, out-of-memory reports.

Two kinds are written by `torch.profiler.profile.export_memory_timeline`: `*.raw.json.gz`, a row
`[time, action, bytes, category]` per event, where the time in ns is -1 for memory allocated before;
and `*.json`, a pair of times (microseconds) and levels by category.
"""

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
from traceloom.formats.inputs import read_first_bytes
from traceloom.system.files import read_small
from traceloom.system.gzip_stream import GzipStream, open_file
from traceloom.trace.array_types import Ints
from traceloom.trace.notice import Notice
from traceloom.trace.session import (
    SNAPSHOT_BLOCKS_SCHEMA,
    SNAPSHOT_ENTRIES_SCHEMA,
    SNAPSHOT_SEGMENTS_SCHEMA,
    MemorySnapshot,
    StackFrame,
)
from traceloom.trace.trace import Trace

FORMAT = "traceloom-allocations"
_VERSION = 1
_MAX_ALLOCATIONS_BYTES = 1 << 30  # of text
_MAX_INTEGER = 1 << 62
_MAX_FRAMES = 512
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
