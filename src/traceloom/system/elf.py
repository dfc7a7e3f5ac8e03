"""ELF symbols, and memory maps of a process.

All files are untrusted, so reading is bounded. They are read, not mapped: a file that is truncated
meanwhile must not end who reads it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_MAPS_BYTES = 16 << 20
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS, _DYNAMIC_SYMBOLS, _TEXTS = 2, 11, 3
_OBJECT, _FUNCTION = 1, 2
_LOADED, _UNWIND_INDEX = 1, 0x6474E550
_MOST_SECTIONS, _MOST_SEGMENTS = 4096, 256
_MAX_TABLE_BYTES = 1 << 29  # bytes
_MAX_NAME_BYTES = 4096
_CHUNK_BYTES = _SYMBOL.size * 43690  # about 1 MiB


class Segment(NamedTuple):
    """Bytes of the file that are loaded at an address."""

    address: int
    offset: int
    size: int


class SymbolTable(NamedTuple):
    """Location of symbols and their names in the file."""

    offset: int
    size: int
    names_offset: int
    names_size: int


class Function(NamedTuple):
    """A function: its symbol, its address when loaded, its offset in the file."""

    name: str
    address: int
    offset: int


class Elf:
    """A 64-bit little-endian ELF file.

    Args:
        descriptor: The open file, which the caller closes.

    Raises:
        OSError: It cannot be read, or is not such a file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        header = self._read(0, _HEADER.size)
        if header[:6] != b"\x7fELF\x02\x01" or len(header) < _HEADER.size:
            raise OSError(errno.ENOEXEC, "it is no ELF file of 64 bits")
        (
            _,
            _,
            _,
            self.entry,
            segments,
            sections,
            _,
            _,
            segment_size,
            segment_number,
            section_size,
            number,
            _,
        ) = _HEADER.unpack(header)
        if segment_size != _SEGMENT.size or (number and section_size != _SECTION.size):
            raise OSError(errno.ENOEXEC, "its headers have another size than ELF's")
        parts = [
            (kind, Segment(address, offset, size))
            for kind, _, offset, address, _, size, _, _ in _SEGMENT.iter_unpack(
                self._whole(segments, min(segment_number, _MOST_SEGMENTS) * _SEGMENT.size)
            )
        ]
        self.segments = [segment for kind, segment in parts if kind == _LOADED]
        self.unwind_index = next(
            (segment for kind, segment in parts if kind == _UNWIND_INDEX), None
        )
        rows = list(
            _SECTION.iter_unpack(self._whole(sections, min(number, _MOST_SECTIONS) * _SECTION.size))
        )
        self.tables: list[SymbolTable] = []  # the one of exported functions first
        for kind in (_DYNAMIC_SYMBOLS, _SYMBOLS):
            for _, section_kind, _, _, offset, size, link, _, _, entry_size in rows:
                if (
                    section_kind != kind
                    or entry_size != _SYMBOL.size
                    or link >= len(rows)
                    or rows[link][1] != _TEXTS
                ):
                    continue
                table = SymbolTable(offset, size, rows[link][4], rows[link][5])
                if max(table) <= _MAX_TABLE_BYTES + self._size and offset + size <= self._size:
                    self.tables.append(table)

    def find(self, beginning: str, kind: int = _FUNCTION) -> Function | None:
        """Returns the first function whose name has the prefix; exported ones come first."""
        word = beginning.encode()
        for table in self.tables:
            for name in self._occurrences(
                table.names_offset, min(table.names_size, _MAX_TABLE_BYTES), word
            ):
                for position in self._occurrences(
                    table.offset, min(table.size, _MAX_TABLE_BYTES), struct.pack("<I", name)
                ):
                    if position % _SYMBOL.size:
                        continue
                    row = self._read(table.offset + position, _SYMBOL.size)
                    _, info, _, section, address, _ = _SYMBOL.unpack(row)
                    offset = self.offset_of(address)
                    if info & 0xF == kind and section and offset is not None:
                        return Function(self.name(table, name), address, offset)
        return None

    def find_data(self, name: str) -> int | None:
        data = self.find(f"{name}\0", _OBJECT)
        return None if data is None else data.address

    def name(self, table: SymbolTable, position: int) -> str:
        length = max(min(_MAX_NAME_BYTES, table.names_size - position), 0)
        return (
            self._read(table.names_offset + position, length)
            .partition(b"\0")[0]
            .decode(errors="replace")
        )

    def offset_of(self, address: int) -> int | None:
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        return None

    def address_of(self, offset: int) -> int | None:
        for segment in self.segments:
            if segment.offset <= offset < segment.offset + segment.size:
                return offset - segment.offset + segment.address
        return None

    def at(self, address: int, size: int) -> bytes:
        """Returns the bytes that are loaded at an address; fewer, or none, at the end of the
        file.
        """
        offset = self.offset_of(address)
        return b"" if offset is None else self._read(offset, size)

    def bytes_of(self, table: SymbolTable) -> bytes:
        return self._read(table.offset, min(table.size, _MAX_TABLE_BYTES))

    def _occurrences(self, offset: int, size: int, word: bytes) -> Iterator[int]:
        """Yields the positions of a word in a part of the file, relative to the part's start."""
        start, tail = 0, b""
        while start < size:
            chunk = self._read(offset + start, min(_CHUNK_BYTES, size - start))
            if not chunk:
                return
            text = tail + chunk
            position = text.find(word)
            while position >= 0:
                yield start - len(tail) + position
                position = text.find(word, position + 1)
            start += len(chunk)
            tail = text[max(len(text) - len(word) + 1, 0) :]

    def _whole(self, offset: int, size: int) -> bytes:
        content = self._read(offset, size)
        if len(content) < size:
            raise OSError(errno.ENOEXEC, "its headers lie beyond its end")
        return content

    def _read(self, offset: int, size: int) -> bytes:
        if offset > self._size:
            return b""
        parts = []
        while size > 0 and (part := os.pread(self._descriptor, min(size, 1 << 24), offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)


_LINE = re.compile(
    rb"^([0-9a-f]{1,16})-([0-9a-f]{1,16}) ..(.). ([0-9a-f]{1,16}) [0-9a-f]+:[0-9a-f]+ (\d{1,20}) +(/[^\n]*)$",
    re.MULTILINE,
)


class Mapping(NamedTuple):
    """A part of a file that is mapped into a process's memory."""

    start: int
    end: int
    executable: bool
    offset: int
    inode: int
    path: str


def read_mappings(process: int, proc: Path = Path("/proc")) -> list[Mapping]:
    """Returns the files that a process has mapped, by address.

    Raises:
        OSError: It has ended, or access is denied.
    """
    with (proc / str(process) / "maps").open("rb") as file:
        lines = file.read(MAX_MAPS_BYTES)
    return [
        Mapping(
            int(start, 16),
            int(end, 16),
            executable == b"x",
            int(offset, 16),
            int(inode),
            os.fsdecode(path),
        )
        for start, end, executable, offset, inode, path in _LINE.findall(lines)
    ]


def open_mapped(process: int, mapping: Mapping, proc: Path = Path("/proc")) -> int:
    """Open the file of a mapping, if permitted even one that was replaced or removed since; returns
    its descriptor.

    Raises:
        OSError: It is gone, cannot be read, or another file is at its path now.
    """
    # A process may put a pipe or a device there, whose opening would block or do something, or a
    # link to a file that it may not read itself: it is opened once it is known to be the file.
    flags = os.O_PATH | os.O_CLOEXEC
    try:
        return _open_same_file(
            os.open(f"{proc}/{process}/root{mapping.path}", flags | os.O_NOFOLLOW), mapping
        )
    except OSError:
        mapped = f"{proc}/{process}/map_files/{mapping.start:x}-{mapping.end:x}"
        try:  # map_files leads to the mapped file itself, whatever is at its path now
            return _open_same_file(os.open(mapped, flags), mapping)
        except OSError:
            pass
        raise


def _open_same_file(found: int, mapping: Mapping) -> int:
    """Open for reading what was found by O_PATH, unless it is another file; closes `found`."""
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode) or status.st_ino != mapping.inode:
            raise OSError(errno.ESTALE, f"{mapping.path} is another file by now")
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)
