"""bpf(2) and perf_event_open(2): maps, programs, and probes of functions."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UPROBE_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
# The kernel lends some functions (reading a process's memory, its stack) to programs alone that come under the GPL too.
_LICENSE = b"Dual BSD/GPL"
_CREATE_MAP, _LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _LOAD_PROGRAM = range(6)
_KPROBE_PROGRAM = 2
_SET_PROGRAM = 0x40042408  # PERF_EVENT_IOC_SET_BPF
_CLOSE_ON_EXEC = 8
_ATTRIBUTES = 112  # bytes of perf_event_attr that are used
_LOG_BYTES = 1 << 20


class Architecture(NamedTuple):
    """A processor architecture: numbers of system calls, and where the registers of a process lie in pt_regs."""

    bpf: int
    perf_event_open: int
    arguments: tuple[int, ...]
    result: int
    stack: int
    # Where the address that a function returns to is when it has just been entered: a register, or on the stack.
    returns_to: int | None
    hidden_result: int  # arguments that a function with a large result has before its own
    frame: int  # the register that functions without a fixed frame find theirs by
    unwound: tuple[int, int]  # numbers of `stack` and `frame` in tables for unwinding


MACHINES = {
    "x86_64": Architecture(321, 298, (112, 104, 96, 88, 72, 64), 80, 152, None, 1, 32, (7, 6)),
    "aarch64": Architecture(280, 241, tuple(range(0, 64, 8)), 0, 248, 240, 0, 232, (31, 29)),
}


def machine() -> Architecture:
    """This one.

    Raises:
        OSError: Its registers are not known here.
    """
    name = platform.machine()
    if name not in MACHINES:
        raise OSError(errno.ENOTSUP, f"probes know x86_64 and aarch64, this is {name}")
    return MACHINES[name]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = _libc.syscall(ctypes.c_long(machine().bpf), ctypes.c_long(command), buffer, ctypes.c_long(len(buffer)))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


class MapKind(enum.IntEnum):
    """Kinds of maps: `LRU_HASH` lets go of the oldest entries when it is full."""

    HASH = 1
    ARRAY = 2
    LRU_HASH = 9
    RING = 27


class Map:
    """Data that programs in the kernel and we share.

    Raises:
        OSError: The kernel does not have this kind, or does not let us.
    """

    def __init__(self, kind: MapKind, key_bytes: int, value_bytes: int, entries: int) -> None:
        self.value_bytes, self.entries = value_bytes, entries
        self._key_bytes = key_bytes
        self.descriptor = _bpf(_CREATE_MAP, struct.pack("<5I52x", kind, key_bytes, value_bytes, entries, 0))

    def get(self, key: bytes) -> bytes | None:
        """The value; None where there is none."""
        key_buffer, value = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(self.value_bytes)
        try:
            _bpf(_LOOKUP, self._element(key_buffer, value))
        except FileNotFoundError:
            return None
        return value.raw

    def put(self, key: bytes, value: bytes) -> None:
        """Set a value.

        Raises:
            OSError: The map is full.
        """
        keys, values = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
        _bpf(_UPDATE, self._element(keys, values))

    def remove(self, key: bytes) -> None:
        """Drop an entry, where it is there."""
        buffer = ctypes.create_string_buffer(key, len(key))
        with contextlib.suppress(FileNotFoundError):
            _bpf(_DELETE, self._element(buffer, None))

    def keys(self) -> Iterator[bytes]:
        """All keys. Programs change maps meanwhile: some may be left out, or come twice; it ends nevertheless."""
        key, following = None, ctypes.create_string_buffer(self._key_bytes)
        for _ in range(2 * self.entries):
            try:
                _bpf(_NEXT_KEY, self._element(key, following))
            except FileNotFoundError:
                return
            yield following.raw
            key = ctypes.create_string_buffer(following.raw, self._key_bytes)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)

    def _element(self, key: ctypes.Array[ctypes.c_char] | None, value: ctypes.Array[ctypes.c_char] | None) -> bytes:
        addresses = (0 if buffer is None else ctypes.addressof(buffer) for buffer in (key, value))
        return struct.pack("<I4xQQQ", self.descriptor, *addresses, 0)


def load(instructions: bytes, name: str) -> int:
    """Have the kernel verify a program; its descriptor.

    Raises:
        OSError: The kernel refuses it, and says why, or does not let us.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license_text, log = ctypes.create_string_buffer(_LICENSE), ctypes.create_string_buffer(_LOG_BYTES)

    def attributes(log_level: int) -> bytes:
        return struct.pack(
            "<IIQQIIQII16s64x", _KPROBE_PROGRAM, len(instructions) // 8, ctypes.addressof(code),
            ctypes.addressof(license_text), log_level, len(log) if log_level else 0,
            ctypes.addressof(log) if log_level else 0, 0, 0, name.encode()[:15],
        )  # fmt: skip

    try:
        return _bpf(_LOAD_PROGRAM, attributes(0))
    except OSError as error:
        if error.errno == errno.EPERM:
            raise
        with contextlib.suppress(OSError):  # again, for its reason
            return _bpf(_LOAD_PROGRAM, attributes(1))
        reasons = log.value.decode(errors="replace").strip().splitlines()
        raise OSError(error.errno, f"the kernel refuses the program {name}: {' | '.join(reasons[-3:])}") from error


def attach(program: int | None, path: str, offset: int, *, at_return: bool = False, process: int | None = None) -> int:
    """Run a program whenever the function at `offset` of the file `path` is entered, or left; the probe's descriptor.

    Args:
        program: None: it counts for the kernel alone, which tells whether probes are allowed.
        path: A file that processes map.
        offset: In the file.
        at_return: When the function is left.
        process: Of this process alone; None: of every process that maps the file, now or later.

    Raises:
        OSError: The kernel does not have such probes, or does not let us.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    kind = int(UPROBE_TYPE.read_text(encoding="ascii"))
    attributes = struct.pack(
        "<IIQQQQQIIQQ", kind, _ATTRIBUTES, int(at_return), 0, 0, 0, 0, 0, 0, ctypes.addressof(name), offset
    ).ljust(_ATTRIBUTES, b"\0")
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES)
    # A probe of all processes hangs on one processor; its program runs on every one.
    pid, cpu = (-1, 0) if process is None else (process, -1)
    result = _libc.syscall(
        ctypes.c_long(machine().perf_event_open), buffer, ctypes.c_long(pid), ctypes.c_long(cpu), ctypes.c_long(-1),
        ctypes.c_long(_CLOSE_ON_EXEC),
    )  # fmt: skip
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if program is not None:
        try:
            fcntl.ioctl(result, _SET_PROGRAM, program)
        except OSError:
            os.close(result)
            raise
    return int(result)
