"""Reads memory snapshots, which are pickles, without running anything in them.

A pickle may name and call anything, and a few bytes of one may request gigabytes. So the file is
checked before Python's unpickler gets it: only instructions that build plain data pass, with sizes
within the file and memo numbers below its size. The result then grows only with the size of the
file. Tuples may hold small integers only (PyTorch's hold two): deeply nested tuples would take
forever to hash as a key.

A snapshot holds the segments that the allocator has from the device, with their blocks, at the time
it was taken; and the history of allocations up to then, where it was recorded
(`_record_memory_history`). The layout has changed with PyTorch's versions: only a list of segments;
blocks with a `history` or with `frames`; entries with or without a time.
"""

import io
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

import polars as pl

from traceloom.errors import InputError, unreadable
from traceloom.system.files import read_small
from traceloom.system.process import pause_gc
from traceloom.trace.notice import Notice
from traceloom.trace.session import (
    SNAPSHOT_ACTIONS,
    SNAPSHOT_BLOCKS_SCHEMA,
    SNAPSHOT_ENTRIES_SCHEMA,
    SNAPSHOT_SEGMENTS_SCHEMA,
    MemorySnapshot,
    StackFrame,
)

MAX_BYTES = 1 << 30
# Bytes of file; with fewer bytes per object, a pickle would create objects out of nothing.
_MIN_BYTES_PER_OBJECT = 8
_EXTRA_OBJECTS = 10_000
_MAX_INTEGER_BYTES = 16  # bytes of an integer
_INTEGER = rb"(?:K.|M..|J.{4})"
_LONG_INTEGERS = b"|".join(
    re.escape(bytes([size])) + rb".{%d}" % size for size in range(_MAX_INTEGER_BYTES + 1)
)
# Instructions of a known length that build little: marks, appending, setting, constants, numbers,
# the memo up to 255, frames, versions; and tuples. Runs are limited because `re` stores positions
# for backtracking. Compiling the expression takes longer than loading this module, and most traces
# have no pickle beside them.
_SAFE_OPCODES = (
    rb"(?:[(aesuN)0\x88\x89]|[hq].|j.{4}|[G\x95].{8}|\x80[\x02-\x05]|\x8a(?:%b)"
    rb"|%b(?:\x85\x94?|%b(?:[\x85\x86]\x94?|%b{1,1000}(?:[\x85-\x87]\x94?)?)?)?){0,1000}"
) % (_LONG_INTEGERS, _INTEGER, _INTEGER, _INTEGER)
_SIZE_BYTES = {
    0x8C: 1,
    ord("X"): 4,
    0x8D: 8,
    ord("C"): 1,
    ord("B"): 4,
}  # bytes of the length field of texts and bytes
_TEXTS = (0x8C, ord("X"), 0x8D)
_LONE_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
# Instructions that name, create or call objects of classes.
_CODE_OPCODES = {
    ord("c"): "GLOBAL",
    0x93: "STACK_GLOBAL",
    ord("R"): "REDUCE",
    ord("b"): "BUILD",
    ord("i"): "INST",
    ord("o"): "OBJ",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
}


class _Unpickler(pickle.Unpickler):
    """Refuses every class and function, whatever the check let through."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


def load(path: str | Path) -> tuple[Any, int]:
    """Returns the data of a pickle file, and how many invalid texts (halves of surrogate pairs)
    were replaced in it.

    Raises:
        InputError: `unreadable`; `pickle-too-large`; `pickle-with-code`: it requests a class or a
            function; `pickle-damaged`: it is cut, not a pickle, or holds instructions that plain
            data does not need.
    """
    file_path = Path(path)
    try:
        size = file_path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(
                f"the pickle has {size / 1e9:.1f} GB; up to {MAX_BYTES / 1e9:.1f} GB are read",
                slug="pickle-too-large",
                where=str(path),
                hint="record a shorter history (max_entries of torch.cuda.memory._record_memory_history)",
            )
        data = read_small(file_path, MAX_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    return load_bytes(data, str(path))


def load_bytes(data: bytes, location: str = "") -> tuple[Any, int]:
    """Returns the data of a pickle; see `load`."""
    data, replaced = _validate_pickle(data, location)
    try:
        with pause_gc():
            return _Unpickler(io.BytesIO(data)).load(), replaced
    except Exception as error:  # inconsistent instructions fail in many ways
        raise _make_damage_error("its instructions do not fit together", location) from error


def _validate_pickle(data: bytes, location: str) -> tuple[bytes, int]:
    """Returns the pickle with valid texts, and how many of them were replaced.

    Raises:
        InputError: `pickle-with-code`, `pickle-damaged`.
    """
    if data[:1] != b"\x80":
        raise _make_damage_error("it does not begin as one", location)
    max_objects, object_count, position = len(data) // _MIN_BYTES_PER_OBJECT + _EXTRA_OBJECTS, 0, 0
    replaced: dict[int, bytes] = {}
    names, safe_opcodes = [b"", b""], re.compile(_SAFE_OPCODES, re.DOTALL)
    while True:
        start = position
        position = safe_opcodes.match(data, position).end()  # type: ignore[union-attr]  # matches ""
        if position == len(data):
            raise _make_damage_error("it is cut", location, position)
        code = data[position]
        if code == ord("."):
            break
        if code in (ord("}"), ord("]")):
            position += 1
        elif code in _SIZE_BYTES:
            low = position + 1 + _SIZE_BYTES[code]
            position = low + int.from_bytes(data[position + 1 : low], "little")
            if position > len(data):
                raise _make_damage_error("it is cut", location, len(data))
            if code in _TEXTS:
                names = [names[1], data[low : min(position, low + 80)]]
                valid, count = _LONE_SURROGATE.subn(
                    b"\xef\xbf\xbd", data[low:position]
                )  # U+FFFD, which has the same length
                if count:
                    replaced[low] = valid
        elif code == ord("r") and int.from_bytes(data[position + 1 : position + 5], "little") < len(
            data
        ):
            position += 5
            continue
        elif code in _CODE_OPCODES:
            # Report the requested name as far as it can be printed safely.
            name = _CODE_OPCODES[code].encode()
            if code == ord("c"):
                name = b".".join(data[position + 1 : position + 200].split(b"\n")[:2])
            elif code == 0x93:
                name = b".".join(names)
            printable_name = "".join(
                letter if letter.isprintable() else "?"
                for letter in name.decode("utf-8", "replace")[:80]
            )
            raise InputError(
                f"the pickle asks for code{f' ({printable_name})' if printable_name else ''}, which no snapshot needs; "
                "nothing of it was run",
                slug="pickle-with-code",
                where=location,
                hint="do not open this file with anything else, unless you trust who made it",
            )
        elif position == start:
            raise _make_damage_error(
                f"instruction {code} belongs to no plain data", location, position
            )
        else:
            continue
        object_count += 1
        if object_count > max_objects:
            raise _make_damage_error(
                "it makes more objects than its size allows", location, position
            )
        # The new object gets the next memo number.
        position += data[position : position + 1] == b"\x94"
    if replaced:
        patched = bytearray(data)
        for low, valid in replaced.items():
            patched[low : low + len(valid)] = valid
        data = bytes(patched)
    return data, len(replaced)


def _make_damage_error(reason: str, location: str, offset: int | None = None) -> InputError:
    return InputError(
        f"the pickle cannot be read: {reason}{'' if offset is None else f' (byte {offset})'}",
        slug="pickle-damaged",
        where=location,
        hint="write the snapshot again",
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
        InputError: As for `traceloom.formats.memory_snapshot.load`; `not-a-snapshot`, where the
            pickle holds something else.
    """
    document, replaced = load(path)
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
