"""Symbols of programs and libraries, and the tables by which their stacks are unwound.

Libraries are built without frame pointers, so stacks are unwound by `.eh_frame` (DWARF 5, section
6.4, and the Linux Standard Base). It is untrusted: all reading is bounded, and damaged or
unsupported data ends a stack.

Runs in a worker, as it reads whole symbol tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import struct
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from traceloom.agent.probes.ebpf import get_architecture
from traceloom.system.elf import Elf, Mapping, SymbolTable, open_mapped, read_mappings


class FrameOrigin(enum.IntEnum):
    """What the caller's frame is computed from. `END`: the stack ends."""

    END, STACK, FRAME, BEHIND_FRAME = range(4)


class UnwindRule(NamedTuple):
    """How to find the caller's frame from one place in a function.

    Attributes:
        base: The register that `offset` is relative to; `BEHIND_FRAME`: the end of the frame is
            read from memory there, and the caller's frame register is stored where the frame
            register points to (functions that align their frame).
        offset: To the end of the frame, the canonical frame address.
        frame: Location of the caller's frame register, relative to that end; 0: it is unchanged.
        returns_to: Location of the return address, relative to that end.
    """

    base: FrameOrigin
    offset: int = 0
    frame: int = 0
    returns_to: int = 0


END_RULE = UnwindRule(FrameOrigin.END)

_MAX_ENTRY_BYTES = 1 << 16  # of a function's (FDE) or a common entry (CIE)
_MAX_OFFSET = 1 << 20
_MAX_STEPS = 10_000
_SEARCH_TABLE_ENCODING = 0x3B  # of the index: pairs of signed 4-byte offsets from the index's start
_FDE = struct.Struct("<ii")
_POINTER_FORMATS = {0: "<Q", 2: "<H", 3: "<I", 4: "<Q", 9: "", 10: "<h", 11: "<i", 12: "<q"}
_DEREFERENCE, _BASED = 0x06, 0x70


class _DamagedTableError(Exception):
    """The table is damaged or not supported."""


class _TableReader:
    """Reads values of a table one after the other."""

    def __init__(self, content: bytes, address: int) -> None:
        self.content, self.address, self.at = content, address, 0

    def number(self, struct_format: str) -> int:
        try:
            (value,) = struct.unpack_from(struct_format, self.content, self.at)
        except struct.error:
            raise _DamagedTableError from None
        self.at += struct.calcsize(struct_format)
        return int(value)

    def leb(self, *, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.number("<B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value
            if shift > 63:
                raise _DamagedTableError

    def pointer(self, encoding: int) -> int:
        """Returns an address in a DW_EH_PE encoding; relative to its own position, or absolute."""
        start = self.address + self.at
        struct_format = _POINTER_FORMATS.get(encoding & 0x0F)
        if struct_format is None or encoding & 0x70 not in {0, 0x10}:
            raise _DamagedTableError
        value = self.number(struct_format) if struct_format else self.leb(signed=True)
        return (value + start if encoding & 0x70 else value) % 2**64

    def block(self) -> bytes:
        size = self.leb()
        if self.at + size > len(self.content):
            raise _DamagedTableError
        self.at += size
        return self.content[self.at - size : self.at]


class _CommonEntry(NamedTuple):
    """The common part of functions' entries (CIE)."""

    code: int
    data: int
    returns: int
    encoding: int
    augmented: bool
    program: bytes


def find_unwind_rule(elf: Elf, address: int) -> UnwindRule:
    try:
        return _compute_unwind_rule(elf, address)
    except _DamagedTableError:
        return END_RULE


def _compute_unwind_rule(elf: Elf, address: int) -> UnwindRule:
    position = _find_entry(elf, address)
    if position is None:
        return END_RULE
    entry = _read_entry(elf, position)
    start = entry.address + entry.at
    common = _parse_common_entry(_read_entry(elf, start - entry.number("<I")))
    first = entry.pointer(common.encoding)
    size = entry.pointer(common.encoding & 0x0F)
    if not first <= address < first + size:
        return END_RULE
    if common.augmented:
        entry.block()
    rows = _UnwindRows(common)
    rows.run(_TableReader(common.program, 0), None)
    rows.first = dict(rows.registers)
    rows.run(_TableReader(entry.content[entry.at :], 0), address - first)
    return rows.rule()


def _find_entry(elf: Elf, address: int) -> int | None:
    """Returns the address of the entry of the function at this address, from the sorted index."""
    if elf.unwind_index is None:
        return None
    start, size = elf.unwind_index.address, elf.unwind_index.size
    index = _TableReader(elf.at(start, min(size, 32)), start)
    _, pointer, count, table = (index.number("<B") for _ in range(4))
    if table != _SEARCH_TABLE_ENCODING:
        return None
    index.pointer(pointer)
    entries = min(index.pointer(count), (size - index.at) // _FDE.size)
    rows = start + index.at
    low, high = 0, entries
    while low < high:
        middle = (low + high) // 2
        if _read_index_row(elf, rows, middle)[0] + start <= address:
            low = middle + 1
        else:
            high = middle
    return _read_index_row(elf, rows, low - 1)[1] + start if low else None


def _read_index_row(elf: Elf, rows: int, number: int) -> tuple[int, int]:
    content = elf.at(rows + number * _FDE.size, _FDE.size)
    if len(content) < _FDE.size:
        raise _DamagedTableError
    first, entry = _FDE.unpack(content)
    return first, entry


def _read_entry(elf: Elf, address: int) -> _TableReader:
    """Returns the entry at an address, without its length."""
    head = elf.at(address, 4)
    if len(head) < 4 or not 4 <= (size := int.from_bytes(head, "little")) <= _MAX_ENTRY_BYTES:
        raise _DamagedTableError
    content = elf.at(address + 4, size)
    if len(content) < size:
        raise _DamagedTableError
    return _TableReader(content, address + 4)


def _parse_common_entry(entry: _TableReader) -> _CommonEntry:
    if entry.number("<I") != 0:
        raise _DamagedTableError
    version = entry.number("<B")
    end = entry.content.find(b"\0", entry.at)
    if version not in {1, 3} or end < 0:
        raise _DamagedTableError
    augmentation, entry.at = entry.content[entry.at : end], end + 1
    code, data = entry.leb(), entry.leb(signed=True)
    returns = entry.leb() if version == 3 else entry.number("<B")
    encoding = 0
    if augmentation[:1] == b"z":
        size = entry.leb()
        after = entry.at + size
        for letter in augmentation[1:]:
            if letter == ord("R"):
                encoding = entry.number("<B")
            elif letter == ord("P"):
                entry.pointer(entry.number("<B") & 0x7F)
            elif letter == ord("L"):
                entry.number("<B")
            elif letter not in b"SB":
                raise _DamagedTableError
        entry.at = after
    elif augmentation:
        raise _DamagedTableError
    return _CommonEntry(
        code, data, returns, encoding, augmentation[:1] == b"z", entry.content[entry.at :]
    )


class _UnwindRows:
    """The rows of a function's table, generated one after the other by its instructions."""

    def __init__(self, common: _CommonEntry) -> None:
        self.common = common
        self.base: int | None = None  # register; None: computed by `expression`
        self.offset = 0
        self.expression = b""
        # register -> its offset, or an expression for it; None: unknown.
        self.registers: dict[int, int | bytes | None] = {}
        self.first: dict[int, int | bytes | None] = {}
        self._kept: list[tuple[int | None, int, bytes, dict[int, int | bytes | None]]] = []

    def run(self, program: _TableReader, until: int | None) -> None:
        """Execute instructions, up to the row of an offset in the function."""
        position, data = 0, self.common.data
        for _ in range(_MAX_STEPS):
            if program.at >= len(program.content):
                return
            code = program.number("<B")
            low = code & 0x3F
            if code >> 6 == 1 or code in {0x02, 0x03, 0x04}:
                ahead = low if code >> 6 else program.number({2: "<B", 3: "<H", 4: "<I"}[code])
                position += ahead * self.common.code
                if until is not None and position > until:
                    return
            elif code >> 6 == 2:
                self.registers[low] = program.leb() * data
            elif code >> 6 == 3:
                self._restore(low)
            elif code in {0x05, 0x11, 0x2F}:
                register = program.leb()
                sign = -1 if code == 0x2F else 1
                self.registers[register] = sign * program.leb(signed=code == 0x11) * data
            elif code == 0x06:
                self._restore(program.leb())
            elif code == 0x08:
                self.registers.pop(program.leb(), None)
            elif code == 0x10:
                register = program.leb()
                self.registers[register] = program.block()
            elif code in {0x07, 0x09, 0x14, 0x15, 0x16}:
                self.registers[program.leb()] = None
                if code == 0x16:
                    program.block()
                elif code != 0x07:
                    program.leb()
            elif code == 0x0A:
                self._kept.append((self.base, self.offset, self.expression, dict(self.registers)))
            elif code == 0x0B:
                if not self._kept:
                    raise _DamagedTableError
                self.base, self.offset, self.expression, self.registers = self._kept.pop()
            elif code in {0x0C, 0x12}:
                self.base = program.leb()
                self.offset = program.leb(signed=code == 0x12) * (data if code == 0x12 else 1)
            elif code == 0x0D:
                self.base = program.leb()
            elif code in {0x0E, 0x13}:
                self.offset = program.leb(signed=code == 0x13) * (data if code == 0x13 else 1)
            elif code == 0x0F:
                self.base, self.expression = None, program.block()
            elif code == 0x2E:
                program.leb()
            elif code not in {0x00, 0x2D}:
                raise _DamagedTableError

    def rule(self) -> UnwindRule:
        stack, frame = get_architecture().unwound
        returns = self.registers.get(self.common.returns)
        saved_frame = self.registers.get(frame, 0)
        offset, at_frame = self.offset, _BASED + frame
        if self.base in {stack, frame}:
            base = FrameOrigin.STACK if self.base == stack else FrameOrigin.FRAME
        elif (
            self.base is None
            and self.expression[:1] == bytes([at_frame])
            and saved_frame == bytes([at_frame, 0])
        ):
            expression = _TableReader(self.expression, 0)
            expression.at = 1
            offset, saved_frame = expression.leb(signed=True), 0
            if self.expression[expression.at :] != bytes([_DEREFERENCE]):
                return END_RULE
            base = FrameOrigin.BEHIND_FRAME
        else:
            return END_RULE
        # The first function of a thread has no caller.
        if not isinstance(returns, int) or not isinstance(saved_frame, int):
            return END_RULE
        if max(abs(offset), abs(saved_frame), abs(returns)) > _MAX_OFFSET:
            return END_RULE
        return UnwindRule(base, offset, saved_frame, returns)

    def _restore(self, register: int) -> None:
        if register in self.first:
            self.registers[register] = self.first[register]
        else:
            self.registers.pop(register, None)


_MAX_FILES = 1024
_MAX_NAME_CHARS = 1000  # names of templates may be much longer
_FUNCTION_SYMBOL = 2


class _Functions(NamedTuple):
    """Functions of a file by address; arrays of shape (functions,)."""

    addresses: Any
    ends: Any
    names: Any
    table: SymbolTable


class _MappedFile:
    """A file that a process has mapped, kept open: it may be deleted before its names are
    needed.
    """

    def __init__(self, descriptor: int) -> None:
        self.elf = Elf(descriptor)
        self._tables: list[_Functions] | None = None

    def name(self, offset: int) -> str:
        """Returns the function at an offset of the file; "" if unknown."""
        address = self.elf.address_of(offset)
        if address is None:
            return ""
        if self._tables is None:
            # The full symbol table has more functions than that of the exported ones.
            self._tables = [_read_functions(self.elf, table) for table in reversed(self.elf.tables)]
        for functions in self._tables:
            index = int(functions.addresses.searchsorted(address, "right")) - 1
            if index >= 0 and address < functions.ends[index]:
                return self.elf.name(functions.table, int(functions.names[index]))
        return ""


class Symbols:
    """Names of addresses of one process, also after it has ended.

    Args:
        process: Its pid.
        proc: Mount point of /proc.
    """

    def __init__(self, process: int, proc: Path = Path("/proc")) -> None:
        self._process, self._proc = process, proc
        self._mappings: list[Mapping] = []
        self._files: dict[tuple[int, str], _MappedFile | None] = {}
        self._names: dict[int, tuple[str, str]] = {}
        self._demangle = _load_demangler()

    def refresh(self) -> None:
        """Update the mappings of the process.

        Raises:
            OSError: It has ended; earlier mappings are kept.
        """
        self._mappings = [
            mapping for mapping in read_mappings(self._process, self._proc) if mapping.executable
        ] or self._mappings  # a process that has just ended has no mappings
        for mapping in self._mappings:
            key = (mapping.inode, mapping.path)
            if key in self._files or len(self._files) >= _MAX_FILES:
                continue
            self._files[key] = None
            # Deleted, or not an ELF file: its functions stay unnamed.
            with contextlib.suppress(OSError):
                descriptor = open_mapped(self._process, mapping, self._proc)
                try:
                    self._files[key] = _MappedFile(descriptor)
                except OSError:
                    os.close(descriptor)

    def name(self, address: int) -> tuple[str, str]:
        """Returns the function at an address and the name of its library; an unnamed one is
        `library+0x12`.
        """
        if address not in self._names:
            mapping = self._mapping_of(address)
            self._names[address] = (hex(address), "")
            if mapping is not None:
                file, offset = self._file_of(address)
                library = mapping.path.rpartition("/")[2]
                name = file.name(offset) if file is not None else ""
                self._names[address] = (
                    (self.plain(name) if name else f"{library}+{offset:#x}"),
                    library,
                )
        return self._names[address]

    def rule(self, address: int) -> UnwindRule:
        file, offset = self._file_of(address)
        file_address = file.elf.address_of(offset) if file is not None else None
        return (
            END_RULE
            if file is None or file_address is None
            else find_unwind_rule(file.elf, file_address)
        )

    def lies_in(self, address: int, other: Mapping) -> bool:
        mapping = self._mapping_of(address)
        return mapping is not None and (mapping.inode, mapping.path) == (other.inode, other.path)

    def plain(self, name: str) -> str:
        """Returns a C++ name as it is written in source."""
        return self._demangle(name)[:_MAX_NAME_CHARS]

    def _mapping_of(self, address: int) -> Mapping | None:
        index = bisect_right(self._mappings, address, key=lambda mapping: mapping.start) - 1
        return self._mappings[index] if index >= 0 and address < self._mappings[index].end else None

    def _file_of(self, address: int) -> tuple[_MappedFile | None, int]:
        """Returns the file at an address, and the offset in it."""
        mapping = self._mapping_of(address)
        if mapping is None:
            return None, 0
        return self._files.get(
            (mapping.inode, mapping.path)
        ), address - mapping.start + mapping.offset


def _read_functions(elf: Elf, table: SymbolTable) -> _Functions:
    import numpy as np

    row = np.dtype(
        [
            ("name", "<u4"),
            ("info", "u1"),
            ("_", "u1"),
            ("section", "<u2"),
            ("at", "<u8"),
            ("size", "<u8"),
        ]
    )
    content = elf.bytes_of(table)
    rows = np.frombuffer(content, row, len(content) // row.itemsize)
    rows = rows[
        (rows["info"] & 0xF == _FUNCTION_SYMBOL) & (rows["section"] != 0) & (rows["at"] < 1 << 62)
    ]
    rows = rows[np.argsort(rows["at"], kind="stable")]
    following = np.append(rows["at"][1:], rows["at"][-1:] + np.uint64(1))
    # Functions written in assembler may have no size: they extend to the next one.
    end_addresses = np.where(
        rows["size"] == 0, following, rows["at"] + np.minimum(rows["size"], 1 << 32)
    )
    return _Functions(rows["at"], end_addresses, rows["name"], table)


def _load_demangler() -> Callable[[str], str]:
    """Returns the demangler of libstdc++, which every process with PyTorch has; without it names
    stay mangled.
    """
    try:
        library, c = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        demangle, free = library["__cxa_demangle"], c["free"]
    except (OSError, AttributeError):
        return str
    demangle.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def plain(name: str) -> str:
        if not name.startswith("_Z"):
            return name
        address = demangle(name.encode(), None, None, ctypes.byref(ctypes.c_int()))
        if not address:
            return name
        try:
            return ctypes.string_at(address).decode(errors="replace")
        finally:
            free(address)

    return plain
