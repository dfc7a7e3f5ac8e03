"""Assembles and loads eBPF programs: instructions, maps, ring buffer, bpf(2) and
perf_event_open(2).

No compiler or library is needed on the host. Programs are attached to functions found in the symbol
tables of libraries, and their records (calls.py, with stacks: call_stacks.py) are read
from a ring buffer; `calls.explain_unsupported` checks whether this kernel and the agent's
permissions allow it.

Instructions have eight bytes each and use eleven registers. The kernel verifies every program
before it runs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from traceloom.system.elf import Elf, Function


class Register(enum.IntEnum):
    """R0: results; R1 to R5: arguments, overwritten by a call; R6 to R9: preserved; R10: end of the
    stack of 512 bytes.
    """

    R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = range(11)


R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = Register


class Helper(enum.IntEnum):
    """Kernel functions that programs call."""

    MAP_LOOKUP = 1
    MAP_UPDATE = 2
    MAP_DELETE = 3
    TIME_NS = 5  # monotonic clock
    PROCESS_AND_THREAD = 14  # process << 32 | thread
    READ_USER = 112
    READ_USER_TEXT = 114
    RING_OUTPUT = 130
    RING_RESERVE = 131
    RING_SUBMIT = 132


class _Encoded(NamedTuple):
    code: int
    target: int = 0
    source: int = 0
    offset: int = 0
    number: int = 0
    to: str = ""  # label that it jumps to


_SIZES = {1: 0x10, 2: 0x08, 4: 0x00, 8: 0x18}
_LOAD, _STORE_NUMBER, _STORE, _ATOMIC = 0x61, 0x62, 0x63, 0xC3
_ARITHMETIC = {
    "+=": 0x07,
    "-=": 0x17,
    "*=": 0x27,
    "|=": 0x47,
    "&=": 0x57,
    "<<=": 0x67,
    ">>=": 0x77,
    "=": 0xB7,
}
_JUMPS = {"==": 0x15, "!=": 0x55, ">": 0x25, ">=": 0x35, "<": 0xA5, "<=": 0xB5, "signed<": 0xC5}
_BY_REGISTER = 0x08
_ALWAYS, _CALL, _EXIT, _WIDE = 0x05, 0x85, 0x95, 0x18
_PSEUDO_MAP = 1  # source of a wide number that is a map's descriptor
_INT32_RANGE = range(-(2**31), 2**31)


class ProbeProgram:
    """A program under construction, one instruction after the other."""

    def __init__(self) -> None:
        self._encoded: list[_Encoded] = []
        self._labels: dict[str, int] = {}

    def do(self, target: Register, operation: str, value: int | Register) -> None:
        """`target operation value` in 64 bits: =, +=, -=, *=, |=, &=, <<= or >>=."""
        code = _ARITHMETIC[operation]
        if isinstance(value, Register):
            self._encoded.append(_Encoded(code | _BY_REGISTER, target, value))
        elif value in _INT32_RANGE:
            self._encoded.append(_Encoded(code, target, number=value))
        else:
            raise ValueError(f"{value} needs more than 32 bits: put it into a register with `wide`")

    def wide(self, target: Register, value: int) -> None:
        """`target` = a 64-bit constant."""
        self._two_words(target, 0, value)

    def map(self, target: Register, descriptor: int) -> None:
        """`target` = the map with this descriptor."""
        self._two_words(target, _PSEUDO_MAP, descriptor)

    def load(self, target: Register, base: Register, offset: int = 0, size: int = 8) -> None:
        """`target` = the bytes at `base + offset`."""
        self._encoded.append(_Encoded(_LOAD | _SIZES[size], target, base, offset))

    def store(self, base: Register, offset: int, value: int | Register, size: int = 8) -> None:
        """The bytes at `base + offset` = `value`."""
        if isinstance(value, Register):
            self._encoded.append(_Encoded(_STORE | _SIZES[size], base, value, offset))
        else:
            self._encoded.append(_Encoded(_STORE_NUMBER | _SIZES[size], base, 0, offset, value))

    def add_at(self, base: Register, offset: int, value: Register) -> None:
        """Atomically add `value` to the eight bytes at `base + offset`."""
        self._encoded.append(_Encoded(_ATOMIC | _SIZES[8], base, value, offset))

    def call(self, helper: Helper) -> None:
        """`R0` = `helper(R1, ..., R5)`."""
        self._encoded.append(_Encoded(_CALL, number=helper))

    def on_map(self, helper: Helper, descriptor: int, key: int, value: int = 0) -> None:
        """`R0` = a look-up, an update or a removal in a map; `key` and `value` are offsets on the
        stack.
        """
        self.map(R1, descriptor)
        self.address(R2, key)
        if helper is Helper.MAP_UPDATE:
            self.address(R3, value)
            self.do(R4, "=", 0)
        self.call(helper)

    def read_user(self, to: int, size: int, helper: Helper = Helper.READ_USER) -> None:
        """Read from the process's memory at `R3` to the stack; `R0` is negative on failure."""
        self.address(R1, to)
        self.do(R2, "=", size)
        self.call(helper)

    def address(self, target: Register, offset: int) -> None:
        """`target` = the address of an offset on the stack."""
        self.do(target, "=", R10)
        self.do(target, "+=", offset)

    def jump(self, to: str) -> None:
        self._encoded.append(_Encoded(_ALWAYS, to=to))

    def jump_if(self, left: Register, comparison: str, right: int | Register, to: str) -> None:
        """Jump to the label if the comparison holds: ==, !=, >, >=, <, <= unsigned, or signed<."""
        code = _JUMPS[comparison]
        if isinstance(right, Register):
            self._encoded.append(_Encoded(code | _BY_REGISTER, left, right, to=to))
        else:
            self._encoded.append(_Encoded(code, left, number=right, to=to))

    def label(self, name: str) -> None:
        """Label the next instruction; jumps only go forward."""
        assert name not in self._labels, f"the label {name} stands twice"
        self._labels[name] = len(self._encoded)

    def exit(self) -> None:
        """End the program; its result is not used."""
        self.do(R0, "=", 0)
        self._encoded.append(_Encoded(_EXIT))

    def encoded(self) -> bytes:
        """Returns the instructions in the kernel's format."""
        instructions = []
        for position, word in enumerate(self._encoded):
            offset = self._labels[word.to] - position - 1 if word.to else word.offset
            instructions.append(
                struct.pack("<BBhi", word.code, word.source << 4 | word.target, offset, word.number)
            )
        return b"".join(instructions)

    def _two_words(self, target: Register, source: int, value: int) -> None:
        low, high = struct.unpack("<ii", struct.pack("<Q", value % 2**64))
        self._encoded += [_Encoded(_WIDE, target, source, 0, low), _Encoded(0, number=high)]


UPROBE_TYPE = Path("/sys/bus/event_source/devices/uprobe/type")
# Some helpers (reading a process's memory, its stack) require a GPL-compatible license.
_LICENSE = b"Dual BSD/GPL"
_CREATE_MAP, _LOOKUP, _UPDATE, _DELETE, _NEXT_KEY, _LOAD_PROGRAM = range(6)
_KPROBE_PROGRAM = 2
_SET_PROGRAM = 0x40042408  # PERF_EVENT_IOC_SET_BPF
_CLOSE_ON_EXEC = 8
_ATTRIBUTES = 112  # used bytes of perf_event_attr
_LOG_BYTES = 1 << 20


class Architecture(NamedTuple):
    """A CPU architecture: numbers of system calls, and offsets of registers in pt_regs."""

    bpf: int
    perf_event_open: int
    arguments: tuple[int, ...]
    result: int
    stack: int
    # Register with the return address at a function's entry; None: it is on the stack.
    returns_to: int | None
    hidden_result: (
        int  # number of arguments that a function with a large result gets before its own
    )
    frame: int  # the frame register
    unwound: tuple[int, int]  # numbers of `stack` and `frame` in unwind tables


ARCHITECTURES = {
    "x86_64": Architecture(321, 298, (112, 104, 96, 88, 72, 64), 80, 152, None, 1, 32, (7, 6)),
    "aarch64": Architecture(280, 241, tuple(range(0, 64, 8)), 0, 248, 240, 0, 232, (31, 29)),
}


def get_architecture() -> Architecture:
    """Returns the architecture of this machine.

    Raises:
        OSError: It is not supported.
    """
    name = platform.machine()
    if name not in ARCHITECTURES:
        raise OSError(errno.ENOTSUP, f"probes know x86_64 and aarch64, this is {name}")
    return ARCHITECTURES[name]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call_bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = _libc.syscall(
        ctypes.c_long(get_architecture().bpf),
        ctypes.c_long(command),
        buffer,
        ctypes.c_long(len(buffer)),
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


class MapKind(enum.IntEnum):
    """Kinds of maps: `LRU_HASH` drops the oldest entries when it is full."""

    HASH = 1
    ARRAY = 2
    LRU_HASH = 9
    RING = 27


class Map:
    """Data shared with programs in the kernel.

    Raises:
        OSError: The kernel does not support this kind, or does not allow it.
    """

    def __init__(self, kind: MapKind, key_bytes: int, value_bytes: int, entries: int) -> None:
        self.value_bytes, self.entries = value_bytes, entries
        self._key_bytes = key_bytes
        self.descriptor = _call_bpf(
            _CREATE_MAP, struct.pack("<5I52x", kind, key_bytes, value_bytes, entries, 0)
        )

    def get(self, key: bytes) -> bytes | None:
        """Returns the value of a key; None if it is missing."""
        key_buffer, value = (
            ctypes.create_string_buffer(key, len(key)),
            ctypes.create_string_buffer(self.value_bytes),
        )
        try:
            _call_bpf(_LOOKUP, self._element(key_buffer, value))
        except FileNotFoundError:
            return None
        return value.raw

    def put(self, key: bytes, value: bytes) -> None:
        """Set a value.

        Raises:
            OSError: The map is full.
        """
        keys, values = (
            ctypes.create_string_buffer(key, len(key)),
            ctypes.create_string_buffer(value, len(value)),
        )
        _call_bpf(_UPDATE, self._element(keys, values))

    def remove(self, key: bytes) -> None:
        buffer = ctypes.create_string_buffer(key, len(key))
        with contextlib.suppress(FileNotFoundError):
            _call_bpf(_DELETE, self._element(buffer, None))

    def keys(self) -> Iterator[bytes]:
        """Yields all keys.

        Programs change maps concurrently: some keys may be missing or come twice, but the iteration
        ends.
        """
        key, following = None, ctypes.create_string_buffer(self._key_bytes)
        for _ in range(2 * self.entries):
            try:
                _call_bpf(_NEXT_KEY, self._element(key, following))
            except FileNotFoundError:
                return
            yield following.raw
            key = ctypes.create_string_buffer(following.raw, self._key_bytes)

    def close(self) -> None:
        os.close(self.descriptor)

    def _element(
        self, key: ctypes.Array[ctypes.c_char] | None, value: ctypes.Array[ctypes.c_char] | None
    ) -> bytes:
        addresses = (0 if buffer is None else ctypes.addressof(buffer) for buffer in (key, value))
        return struct.pack("<I4xQQQ", self.descriptor, *addresses, 0)


def load_program(instructions: bytes, name: str) -> int:
    """Have the kernel verify and load a program; returns its descriptor.

    Raises:
        OSError: The kernel refuses it, with its reason, or does not allow it.
    """
    code = ctypes.create_string_buffer(instructions, len(instructions))
    license_text, log = (
        ctypes.create_string_buffer(_LICENSE),
        ctypes.create_string_buffer(_LOG_BYTES),
    )

    def attributes(log_level: int) -> bytes:
        return struct.pack(
            "<IIQQIIQII16s64x",
            _KPROBE_PROGRAM,
            len(instructions) // 8,
            ctypes.addressof(code),
            ctypes.addressof(license_text),
            log_level,
            len(log) if log_level else 0,
            ctypes.addressof(log) if log_level else 0,
            0,
            0,
            name.encode()[:15],
        )

    try:
        return _call_bpf(_LOAD_PROGRAM, attributes(0))
    except OSError as error:
        if error.errno == errno.EPERM:
            raise
        with contextlib.suppress(OSError):  # repeated with a log, for the reason
            return _call_bpf(_LOAD_PROGRAM, attributes(1))
        reasons = log.value.decode(errors="replace").strip().splitlines()
        raise OSError(
            error.errno, f"the kernel refuses the program {name}: {' | '.join(reasons[-3:])}"
        ) from error


def attach_program(
    program: int | None,
    path: str,
    offset: int,
    *,
    at_return: bool = False,
    process: int | None = None,
) -> int:
    """Run a program at each entry, or return, of the function at `offset` of the file `path`;
    returns the probe's descriptor.

    Args:
        program: None: the kernel only counts, which checks whether probes are allowed.
        path: A file that processes map.
        offset: In the file.
        at_return: At its return instead of its entry.
        process: Of this process only; None: of every process that maps the file, now or later.

    Raises:
        OSError: The kernel does not support such probes, or does not allow it.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    attributes = struct.pack(
        "<IIQQQQQIIQQ",
        int(UPROBE_TYPE.read_text(encoding="ascii")),
        _ATTRIBUTES,
        int(at_return),
        0,
        0,
        0,
        0,
        0,
        0,
        ctypes.addressof(name),
        offset,
    ).ljust(_ATTRIBUTES, b"\0")
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES)
    # A probe of all processes is bound to one CPU, but its program runs on every CPU.
    pid, cpu = (-1, 0) if process is None else (process, -1)
    result = _libc.syscall(
        ctypes.c_long(get_architecture().perf_event_open),
        buffer,
        ctypes.c_long(pid),
        ctypes.c_long(cpu),
        ctypes.c_long(-1),
        ctypes.c_long(_CLOSE_ON_EXEC),
    )
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


_BUSY_FLAG = 1 << 31
_HEADER_BYTES = 8
_POSITION = struct.Struct("<Q")


class Ring:
    """A ring buffer of records of equal size; a record that finds it full is lost, which its
    program counts.

    Args:
        record_bytes: Size of a record, a multiple of eight.
        size: Bytes of the ring, a power of two and of whole pages.

    Raises:
        OSError: The kernel does not support ring buffers (before 5.8), or does not allow it.
    """

    def __init__(self, record_bytes: int, size: int) -> None:
        self._stride = _HEADER_BYTES + record_bytes
        self._size = size
        self.map = Map(MapKind.RING, 0, 0, size)
        page = mmap.PAGESIZE
        # One page with our read position, one with the kernel's write position, and the data mapped
        # twice in a row, so that no record is split at the end.
        self._read_to = mmap.mmap(self.map.descriptor, page, mmap.MAP_SHARED)
        self._written = mmap.mmap(
            self.map.descriptor, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page
        )
        self._position = 0

    def take(self) -> bytes:
        """Returns the complete records, concatenated, without the ring's headers."""
        (written,) = _POSITION.unpack_from(self._written, 0)
        # The kernel marks a record as unfinished before it advances `written`. Thousands of
        # interpreter instructions separate the two reads here, more than any CPU reorders: no
        # barrier is needed.
        number = (written - self._position) // self._stride
        start = mmap.PAGESIZE + self._position % self._size
        view = memoryview(self._written)[start : start + number * self._stride]
        headers = view.cast("I")[:: self._stride // 4]
        done = next(
            (position for position, header in enumerate(headers) if header & _BUSY_FLAG), number
        )
        content = bytes(view[: done * self._stride])
        headers.release()
        view.release()
        self._position += len(content)
        _POSITION.pack_into(self._read_to, 0, self._position)
        return b"".join(
            content[position + _HEADER_BYTES : position + self._stride]
            for position in range(0, len(content), self._stride)
        )

    def close(self) -> None:
        self._read_to.close()
        self._written.close()
        self.map.close()


class Uprobes:
    """Probes of a file that processes map; each program runs in every process that maps it, or in
    one.

    Args:
        descriptor: The open file; it is closed with the probes.
        process: In this process only.

    Raises:
        OSError: The file is not a library.
    """

    def __init__(self, descriptor: int, process: int | None = None) -> None:
        self._descriptor = descriptor
        self._process = process
        self._probes: list[int] = []
        try:
            self.elf = Elf(descriptor)
        except OSError:
            os.close(descriptor)
            raise

    def find(self, beginning: str) -> Function:
        """Returns the function whose name has the prefix.

        Raises:
            OSError: There is none.
        """
        function = self.elf.find(beginning)
        if function is None:
            raise OSError(errno.ENOENT, f"it has no function {beginning}")
        return function

    def attach(self, function: Function, program: int, *, at_return: bool = False) -> None:
        """Run a program at each entry, or return, of the function.

        Raises:
            OSError: The kernel does not allow it.
        """
        # The file that was examined, whatever is at its path now.
        path = f"/proc/self/fd/{self._descriptor}"
        self._probes.append(
            attach_program(
                program, path, function.offset, at_return=at_return, process=self._process
            )
        )

    def close(self) -> None:
        for probe in (*self._probes, self._descriptor):
            os.close(probe)
        self._probes = []
