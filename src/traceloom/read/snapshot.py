"""Memory snapshots of PyTorch's caching allocators (`torch.cuda.memory._dump_snapshot`), as columns.

A snapshot holds the segments that the allocator has from the device, with their blocks, as they were when it was taken;
and the history of allocations up to then, where it was recorded (`_record_memory_history`). The layout has changed with
PyTorch's versions: a list of segments alone; blocks with a `history` or with `frames`; entries with or without a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from traceloom.errors import InputError
from traceloom.model.notice import Notice
from traceloom.model.snapshot import ACTIONS, BLOCKS, ENTRIES, SEGMENTS, Frame, Snapshot
from traceloom.read.pickled import load

_MOST_FRAMES = 512
_LEAST_PER_ROW = 16  # bytes of file; an entry has five values or more, and their keys
_FRAMES_PER_ROW = 8  # a frame that is known takes two bytes
_FEW_ROWS = 100_000
_LARGEST = 1 << 62
_LATEST_US = _LARGEST // 1000


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a snapshot; nothing in the file is run.

    Raises:
        InputError: as `traceloom.read.pickled.load`; `not-a-snapshot`, where the pickle holds something else.
    """
    document, replaced = load(path)
    return snapshot_of(document, str(path), replaced, Path(path).stat().st_size)


def snapshot_of(document: Any, path: str, replaced: int = 0, size: int | None = None) -> Snapshot:
    """The snapshot in the data of a pickle; see `read_snapshot`.

    Args:
        document: The data.
        path: The file.
        replaced: How many texts of it were replaced.
        size: Bytes of the file. Objects in a pickle may be shared without end; what is made of them is limited by this.
    """
    whole = {"segments": document} if isinstance(document, list) else document
    traces = whole.get("device_traces", []) if isinstance(whole, dict) else None
    segments = whole.get("segments", []) if isinstance(whole, dict) else None
    if not isinstance(traces, list) or not isinstance(segments, list) or not (traces or segments):
        raise InputError(
            "the pickle holds no memory snapshot (no `segments` or `device_traces`)",
            slug="not-a-snapshot",
            where=path,
            hint="make one with torch.cuda.memory._dump_snapshot(), or with traceloom record --memory",
        )
    reader = _Reader(path, None if size is None else size // _LEAST_PER_ROW + _FEW_ROWS)
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
    return Snapshot(
        path,
        pl.DataFrame(reader.entries, schema=ENTRIES, orient="col"),
        pl.DataFrame(reader.segments, schema=SEGMENTS, orient="row"),
        pl.DataFrame(reader.blocks, schema=BLOCKS, orient="row"),
        tuple(reader.stacks),
        notices,
    )


class _Reader:
    """Turns objects into columns; what does not fit is counted."""

    def __init__(self, path: str, most: int | None) -> None:
        self._path, self._most, self._rows = path, most, 0
        self._by_list: dict[int, int] = {}  # lists of frames are shared, too
        self.odd = 0
        self._total = 0
        self.entries: list[list[Any]] = [[] for _ in ENTRIES]
        self.segments: list[tuple[Any, ...]] = []
        self.blocks: list[tuple[Any, ...]] = []
        self.stacks: list[tuple[Frame, ...]] = [()]
        self._frames: list[Frame] = []
        self._frame_numbers: dict[Frame, int] = {}
        self._seen: dict[int, int] = {}  # frames are shared: by identity
        self._stack: dict[tuple[int, ...], int] = {(): 0}

    def history(self, device: int, trace: Any) -> None:
        """The entries of one device."""
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
            timed = time is None or (_is_size(time) and time < _LATEST_US)
            if not (known_action and timed and _is_size(address) and self.credible(size)):
                self.odd += 1
                continue
            devices.append(device)
            actions.append(action)
            addresses.append(address)
            sizes.append(size)
            times.append(time)
            stacks.append(self.stack_of(entry.get("frames")))

    def segment(self, segment: Any) -> None:
        """A segment with its blocks; older versions give no addresses of blocks, which follow one another."""
        if not isinstance(segment, dict):
            self.odd += 1
            return
        address: Any
        device, address, size = segment.get("device", 0), segment.get("address"), segment.get("total_size")
        blocks = segment.get("blocks")
        good = _is_size(address) and self.credible(size) and _is_size(device) and device < 1 << 31
        if not good or not isinstance(blocks, list):
            self.odd += 1
            return
        number, at = len(self.segments), address
        stream = segment.get("stream", 0)
        self.segments.append((device, address, size, stream if _is_size(stream) else 0))
        self.count(len(blocks))
        for block in blocks:
            block_size: Any = block.get("size") if isinstance(block, dict) else None
            state = block.get("state") if isinstance(block, dict) else None
            if not self.credible(block_size) or not isinstance(state, str):
                self.odd += 1
                continue
            block_address = block.get("address", at)
            requested = block.get("requested_size", block_size)
            history = block.get("history")
            last = history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else block
            requested = last.get("real_size", requested) if last is not block else requested
            self.blocks.append(
                (
                    device, number, block_address if _is_size(block_address) else at, block_size,
                    requested if _is_size(requested) else block_size, state, self.stack_of(last.get("frames")),
                )
            )  # fmt: skip
            at += block_size

    def credible(self, size: Any) -> bool:
        """Whether it is a size, and all sizes together are one."""
        if not _is_size(size) or self._total + size >= _LARGEST:
            return False
        self._total += size
        return True

    def stack_of(self, frames: Any) -> int:
        """The number of a stack."""
        if not frames or not isinstance(frames, list):
            return 0
        cached = self._by_list.get(id(frames))
        if cached is not None:
            return cached
        seen, kept = self._seen, frames[:_MOST_FRAMES]
        try:
            key = tuple([seen[id(frame)] for frame in kept])
        except KeyError:
            for frame in kept:  # the document keeps its object alive as long as the reader
                if id(frame) in seen:
                    continue
                location: Frame = ("", 0, "?")
                if isinstance(frame, dict):
                    # What is no text is not spelled out, since it may be huge.
                    file, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
                    location = (
                        file[:1000] if isinstance(file, str) else "",
                        line if isinstance(line, int) and _is_size(line) else 0,
                        (name[:1000] if isinstance(name, str) else "") or "?",
                    )
                seen[id(frame)] = self._frame_numbers.setdefault(location, len(self._frames))
                if seen[id(frame)] == len(self._frames):
                    self._frames.append(location)
            key = tuple([seen[id(frame)] for frame in kept])
        number = self._stack.get(key)
        if number is None:
            number = self._stack[key] = len(self.stacks)
            self.count(len(key) // _FRAMES_PER_ROW)
            self.stacks.append(tuple(self._frames[k] for k in key))
        self._by_list[id(frames)] = number
        return number

    def count(self, rows: int) -> None:
        """Count what is made of the file.

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


_KNOWN = frozenset(ACTIONS)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST
