"""Allocations that the agent's probes recorded (`rankN.allocations.json.gz`), as snapshots: history without blocks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl

from traceloom.errors import InputError, other_version
from traceloom.model.notice import Notice
from traceloom.model.snapshot import BLOCKS, ENTRIES, SEGMENTS, Frame, Snapshot
from traceloom.packed import UnpackedFile, open_file

FORMAT = "traceloom-allocations"
_VERSION = 1
_MOST_BYTES = 1 << 30  # of text
_LARGEST = 1 << 62
_MOST_FRAMES = 512
_MOST_NAME = 1000


class _Document(msgspec.Struct):
    """The file. Of an event: time in ns, thread, address, signed bytes, device, stack (-1: none), and two totals.

    Of a frame: function, file, line; line 0 is a native function, whose file is its library.
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


class _AllocationsFile(UnpackedFile):
    """The unpacked bytes of a file of allocations."""

    MOST_EXPANSION = 200
    BOMB_BYTES = 1 << 24


def read_allocations(path: str | Path) -> tuple[int | None, list[Snapshot]]:
    """Read a file of allocations.

    Returns:
        The rank, and one snapshot for each type of device. Memory that the process got from a device's driver stands as
        segments where the allocator's blocks in it are known, else as blocks of device 0.

    Raises:
        InputError: `unreadable`, `gzip-bomb`, `other-version`; `damaged-allocations`: cut, or not as it should be.
    """
    document = _document(path)
    frames: list[Frame] = [
        (file[:_MOST_NAME] if line else "", line, name[:_MOST_NAME] or "?") for name, file, line in document.frames
    ]
    stacks = ((), *(tuple(frames[row] for row in stack) for stack in document.stacks))
    allocator = {device.partition(":")[0] for _, _, _, _, device, *_ in document.events if ":" in device}
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
        text = f"stacks have no lines of Python: {document.without_python[:_MOST_NAME]}"
        notices.append(Notice("no-python-lines", "info", text))
    return document.rank, [
        Snapshot(
            str(path), pl.DataFrame(rows, schema=ENTRIES, orient="row"), pl.DataFrame(schema=SEGMENTS),
            pl.DataFrame(schema=BLOCKS), stacks, tuple(notices), kind,
        )
        for kind, rows in columns.items()
    ]  # fmt: skip


def _document(path: str | Path) -> _Document:
    with open_file(path) as stream:
        file = _AllocationsFile(stream)
        text = file.whole(_MOST_BYTES, "file", path)
    if file.damage:
        raise _damaged(path, "its gzip is cut or damaged")
    try:
        document = msgspec.json.decode(text, type=_Document)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)[:200]) from error
    if document.format != FORMAT:
        raise _damaged(path, f"its format is not `{FORMAT}`")
    if document.version != _VERSION:
        raise other_version("file of allocations", document.version, _VERSION, path)
    frames, stacks = range(len(document.frames)), range(-1, len(document.stacks))
    if any(not 0 <= line < 1 << 31 for _, _, line in document.frames):
        raise _damaged(path, "a frame has a line that is none")
    if any(len(stack) > _MOST_FRAMES or any(frame not in frames for frame in stack) for stack in document.stacks):
        raise _damaged(path, "a stack has frames that are not there")
    total = 0
    for time_ns, _, address, size, device, stack, _, _ in document.events:
        total += abs(size)
        number = device.partition(":")[2]
        right = 0 <= time_ns < _LARGEST and 0 <= address < _LARGEST and size != 0 and stack in stacks
        if not right or total >= _LARGEST or not (number == "" or (number.isascii() and number.isdigit())):
            raise _damaged(path, "an event is none")
        if len(device) > 40 or int(number or 0) >= 1 << 31:
            raise _damaged(path, "a device is none")
    return document


def _damaged(path: str | Path, why: str) -> InputError:
    return InputError(f"the allocations cannot be read: {why}", slug="damaged-allocations", where=str(path))
