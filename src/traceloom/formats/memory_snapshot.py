"""Reads memory snapshots of PyTorch, which are pickles.

A snapshot holds the segments that the allocator has from the device, with their blocks, at the time
it was taken; and the history of allocations up to then, where it was recorded
(`_record_memory_history`). The layout has changed with PyTorch's versions: only a list of segments;
blocks with a `history` or with `frames`; entries with or without a time.
"""

from pathlib import Path
from typing import Any

import polars as pl

from traceloom.errors import InputError
from traceloom.formats import pickles
from traceloom.trace.notice import Notice
from traceloom.trace.session import (
    SNAPSHOT_ACTIONS,
    SNAPSHOT_BLOCKS_SCHEMA,
    SNAPSHOT_ENTRIES_SCHEMA,
    SNAPSHOT_SEGMENTS_SCHEMA,
    MemorySnapshot,
    StackFrame,
)

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
