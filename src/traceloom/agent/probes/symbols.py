"""Names of the functions at addresses of a process.

Runs in a worker, as it reads whole symbol tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from traceloom.agent.probes.unwinding import END_RULE, UnwindRule, find_unwind_rule
from traceloom.system.elf import Elf, Mapping, SymbolTable, open_mapped, read_mappings

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
