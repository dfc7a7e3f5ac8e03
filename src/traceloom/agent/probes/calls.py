"""Probes that record calls and the call stacks under them.

those of Python.

Libraries are built without frame pointers, and the kernel cannot read their unwind tables. So the
eBPF program has rules for single addresses: how to get from there to the caller. Initially there
are none. If one is missing, the program passes on a piece of the process's stack, too; that is
unwound here, and what was needed for it becomes rules. From then on the kernel unwinds alone. It
passes on each stack once and refers to it by a number.

Frames of Python are a linked list in the process's memory, which the program follows from the
thread's newest one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from traceloom.agent.probes.ebpf import (
    R0,
    R1,
    R2,
    R3,
    R4,
    R6,
    R7,
    R8,
    R9,
    R10,
    UPROBE_TYPE,
    Helper,
    Map,
    MapKind,
    ProbeProgram,
    Register,
    Ring,
    Uprobes,
    attach_program,
    get_architecture,
    load_program,
)
from traceloom.agent.probes.symbols import END_RULE, FrameOrigin, Symbols, UnwindRule
from traceloom.system.elf import Elf
from traceloom.system.python_frames import FRAME_BYTES, PythonFrames, PythonThread

MOST_NATIVE, MOST_PYTHON = 48, 32
# Max stacks per window (ns); further calls have none. At 5 us each, that is a tenth of a CPU.
_WINDOW_NS, MOST_IN_WINDOW = 10_000_000, 200

_MOST_THREADS, _MOST_RULES, _MOST_STACKS = 16384, 1 << 16, 1 << 16
_RULE = struct.Struct("<4q")
_THREAD = struct.Struct("<QQ")
# Number, address without a rule, stack register, frame register, bytes of the piece.
_HEAD = struct.Struct("<5Q")
_FRAMES_BYTES = 8 * MOST_NATIVE + 16 * MOST_PYTHON
_RECORD_BYTES = 8184  # two pages, including the ring's header of eight bytes
_PIECE_AT = _HEAD.size + _FRAMES_BYTES
_PIECES = (
    _RECORD_BYTES - _PIECE_AT,
    2048,
    512,
)  # tried in turn, as near its end a stack has fewer bytes
_RING_BYTES = 1 << 23
_HASH_FACTOR = 0x5BD1E995  # odd, 31 bits
# Offsets on the program's stack, below those of its caller
_STACK_AT, _FRAME_AT, _ADDRESS_AT, _NUMBER_AT, _CONTEXT_AT, _THREAD_AT, _MISSING_AT = range(
    -184, -128, 8
)
_READ_AT = _STACK_AT - FRAME_BYTES
_ZERO_AT = _READ_AT - 8
LOWEST_OFFSET = _MISSING_AT + 8

_Held = TypeVar("_Held", Map, Ring)


class CallStack(NamedTuple):
    """Return addresses, innermost first; and (code, instruction) of Python frames."""

    native: tuple[int, ...]
    python: tuple[tuple[int, int], ...]


class CallStacks:
    """Stacks of one process.

    Args:
        process: Its pid.
        symbols: Its symbols.
        python: Its interpreter; None: without Python frames.

    Raises:
        OSError: The kernel does not allow it.
    """

    def __init__(self, process: int, symbols: Symbols, python: PythonFrames | None) -> None:
        self._process, self._symbols, self._python = process, symbols, python
        self.stacks: dict[int, CallStack] = {}
        self._rules: dict[int, UnwindRule] = {}
        self._python_threads: dict[int, PythonThread] = {}
        self._held: list[Map | Ring] = []
        self._ring = self._keep(Ring(_RECORD_BYTES, _RING_BYTES))
        self._rules_map = self._keep(Map(MapKind.HASH, 8, _RULE.size, _MOST_RULES))
        self._threads = self._keep(Map(MapKind.HASH, 8, _THREAD.size, _MOST_THREADS))
        self._frames = self._keep(Map(MapKind.LRU_HASH, 8, _FRAMES_BYTES, _MOST_THREADS // 4))
        self._empty = self._keep(Map(MapKind.ARRAY, 4, _FRAMES_BYTES, 1))
        self._seen = self._keep(Map(MapKind.HASH, 8, 8, _MOST_STACKS))
        self._budget = self._keep(Map(MapKind.ARRAY, 4, 24, 1))

    def refresh(self) -> None:
        """Update the Python threads; the process may have ended."""
        if self._python is None:
            return
        with contextlib.suppress(OSError):
            now = self._python.threads()
            for number in self._python_threads.keys() - now.keys():
                self._threads.remove(struct.pack("<Q", self._process << 32 | number))
                del self._python_threads[number]
            for number, thread in now.items():
                if thread is not None and self._python_threads.get(number) != thread:
                    self._threads.put(
                        struct.pack("<Q", self._process << 32 | number), _THREAD.pack(*thread)
                    )
                    self._python_threads[number] = thread

    def take(self) -> None:
        """Fetch the new stacks, and add the rules that the kernel lacked."""
        content = self._ring.take()
        for start in range(0, len(content), _RECORD_BYTES):
            number, missing, stack, frame, size = _HEAD.unpack_from(content, start)
            values = struct.unpack_from(f"<{MOST_NATIVE}Q", content, start + _HEAD.size)
            native = values[
                : next((row for row, word in enumerate(values) if not word), len(values))
            ]
            values = struct.unpack_from(
                f"<{2 * MOST_PYTHON}Q", content, start + _HEAD.size + 8 * MOST_NATIVE
            )
            python = tuple(
                (code, code_offset)
                for code, code_offset in zip(values[::2], values[1::2], strict=True)
            )
            python = python[
                : next((row for row, (code, _) in enumerate(python) if not code), MOST_PYTHON)
            ]
            if missing:
                stack_bytes = content[start + _PIECE_AT : start + _PIECE_AT + size]
                native += self._unwound(missing, stack, frame, stack_bytes)[
                    : MOST_NATIVE - len(native)
                ]
            self.stacks[number] = CallStack(native, python)
            if self._python is not None:  # describe frames while the process and its code exist
                for code, instruction in python:
                    self._python.describe(code, instruction)

    def refused(self) -> int:
        """Returns the number of calls without a stack because of the rate limit."""
        _, _, number = struct.unpack("<3Q", self._budget.get(bytes(4)) or bytes(24))
        return int(number)

    def close(self) -> None:
        for resource in self._held:
            resource.close()

    def write(self, program: ProbeProgram, to: int) -> None:
        """Write the instructions that take the stack of a function at its entry; its number, or 0,
        is stored at `to`.

        The context is in R6, process and thread in R7, the time in R8. R6 and R7 are preserved.
        """
        program.store(R10, to, 0)
        program.store(R10, _THREAD_AT, R7)
        program.store(R10, _ZERO_AT, 0)
        program.on_map(Helper.MAP_LOOKUP, self._budget.descriptor, _ZERO_AT)
        program.jump_if(R0, "==", 0, "no stack")
        program.load(R1, R0, 0)
        program.do(R2, "=", R8)
        program.do(R2, "-=", R1)
        program.jump_if(R2, "<", _WINDOW_NS, "same window")
        program.store(R0, 0, R8)
        program.store(R0, 8, 0)
        program.label("same window")
        program.do(R1, "=", 1)
        program.load(R2, R0, 8)
        program.jump_if(R2, "<", MOST_IN_WINDOW, "within the budget")
        program.add_at(R0, 16, R1)
        program.jump("no stack")
        program.label("within the budget")
        program.add_at(R0, 8, R1)
        # R0 = a buffer for frames per thread: another thread may run on this CPU at any time.
        program.on_map(Helper.MAP_LOOKUP, self._frames.descriptor, _THREAD_AT)
        program.jump_if(R0, "!=", 0, "room")
        program.on_map(Helper.MAP_LOOKUP, self._empty.descriptor, _ZERO_AT)
        program.jump_if(R0, "==", 0, "no stack")
        program.do(R3, "=", R0)
        program.map(R1, self._frames.descriptor)
        program.address(R2, _THREAD_AT)
        program.do(R4, "=", 0)
        program.call(Helper.MAP_UPDATE)
        program.on_map(Helper.MAP_LOOKUP, self._frames.descriptor, _THREAD_AT)
        program.jump_if(R0, "==", 0, "no stack")
        program.label("room")
        program.do(R9, "=", R0)
        program.store(R10, _CONTEXT_AT, R6)
        program.store(R10, _MISSING_AT, 0)
        self._write_native(program)
        self._write_python(program)
        self._write_handing_over(program)
        program.label("stack is known")
        program.load(R1, R10, _NUMBER_AT)
        program.store(R10, to, R1)
        program.label("stack is out of reach")
        program.load(R6, R10, _CONTEXT_AT)
        program.load(R7, R10, _THREAD_AT)
        program.label("no stack")

    def _write_native(self, program: ProbeProgram) -> None:
        architecture = get_architecture()
        program.load(R3, R6, architecture.stack)
        program.load(R1, R6, architecture.frame)
        program.store(R10, _FRAME_AT, R1)
        if architecture.returns_to is not None:
            program.store(R10, _STACK_AT, R3)
            program.load(R1, R6, architecture.returns_to)
            program.store(R10, _ADDRESS_AT, R1)
        else:
            program.do(R1, "=", R3)
            program.do(R1, "+=", 8)
            program.store(R10, _STACK_AT, R1)
            program.read_user(_ADDRESS_AT, 8)
            program.jump_if(R0, "!=", 0, "stack is out of reach")
        program.load(R1, R10, _ADDRESS_AT)
        program.store(R10, _NUMBER_AT, R1)
        program.store(R9, 0, R1)
        for depth in range(1, MOST_NATIVE):
            slot_offset = 8 * depth
            program.store(R9, slot_offset, 0)
            program.on_map(Helper.MAP_LOOKUP, self._rules_map.descriptor, _ADDRESS_AT)
            program.jump_if(R0, "==", 0, "no rule")
            program.load(R1, R0, 0)
            program.jump_if(R1, "==", FrameOrigin.END, "unwound")
            program.load(R2, R0, 8)
            program.load(R7, R0, 16)
            program.load(R8, R0, 24)
            program.load(R3, R10, _STACK_AT)
            program.jump_if(R1, "==", FrameOrigin.STACK, f"from here {depth}")
            program.load(R3, R10, _FRAME_AT)
            program.jump_if(R1, "==", FrameOrigin.FRAME, f"from here {depth}")
            program.do(R3, "+=", R2)
            program.read_user(_READ_AT, 8)
            program.jump_if(R0, "!=", 0, "unwound")
            program.load(R3, R10, _FRAME_AT)
            program.read_user(_FRAME_AT, 8)
            program.load(R3, R10, _READ_AT)
            program.do(R2, "=", 0)
            program.label(f"from here {depth}")
            program.do(R3, "+=", R2)
            program.load(R1, R10, _STACK_AT)
            program.jump_if(R3, "<=", R1, "unwound")
            program.store(R10, _STACK_AT, R3)
            program.do(R3, "+=", R8)
            program.read_user(_ADDRESS_AT, 8)
            program.jump_if(R0, "!=", 0, "unwound")
            program.jump_if(R7, "==", 0, f"frame is kept {depth}")
            program.load(R3, R10, _STACK_AT)
            program.do(R3, "+=", R7)
            program.read_user(_FRAME_AT, 8)
            program.label(f"frame is kept {depth}")
            program.load(R1, R10, _ADDRESS_AT)
            program.jump_if(R1, "==", 0, "unwound")
            program.store(R9, slot_offset, R1)
            _hash_into_number(program)
        program.jump("unwound")
        program.label("no rule")
        program.load(R1, R10, _ADDRESS_AT)
        program.store(R10, _MISSING_AT, R1)
        program.load(R1, R10, _STACK_AT)  # the rest of the stack may differ
        _hash_into_number(program)
        program.label("unwound")

    def _write_python(self, program: ProbeProgram) -> None:
        start = 8 * MOST_NATIVE
        program.store(R9, start, 0)
        if self._python is None:
            return
        layout = self._python.layout
        program.on_map(Helper.MAP_LOOKUP, self._threads.descriptor, _THREAD_AT)
        program.jump_if(R0, "==", 0, "no python")
        program.load(R7, R0, 0)
        program.load(R8, R0, 8)
        # The thread may have ended, and its state been reused by another one.
        _read(program, R7, layout.thread_id)
        program.load(R1, R10, _READ_AT)
        program.jump_if(R1, "!=", R8, "no python")
        _read(program, R7, layout.newest)
        program.load(R8, R10, _READ_AT)
        if layout.newest_behind is not None:
            _read(program, R8, layout.newest_behind)
            program.load(R8, R10, _READ_AT)
        for depth in range(MOST_PYTHON):
            slot_offset = start + 16 * depth
            program.store(R9, slot_offset, 0)
            program.jump_if(R8, "==", 0, "no python")
            _read(program, R8, 0, FRAME_BYTES)
            for offset, field in ((0, layout.code), (8, layout.instruction)):
                program.load(R1, R10, _READ_AT + field)
                program.store(R9, slot_offset + offset, R1)
                _hash_into_number(program)
            program.load(R8, R10, _READ_AT + layout.previous)
        program.label("no python")

    def _write_handing_over(self, program: ProbeProgram) -> None:
        program.on_map(Helper.MAP_LOOKUP, self._seen.descriptor, _NUMBER_AT)
        program.jump_if(R0, "!=", 0, "stack is known")
        program.on_map(Helper.MAP_UPDATE, self._seen.descriptor, _NUMBER_AT, _NUMBER_AT)
        program.jump_if(R0, "!=", 0, "stack is known")  # the map is full: it will have no frames
        program.map(R1, self._ring.map.descriptor)
        program.do(R2, "=", _RECORD_BYTES)
        program.do(R3, "=", 0)
        program.call(Helper.RING_RESERVE)
        program.jump_if(R0, "!=", 0, "handed over")
        program.on_map(Helper.MAP_DELETE, self._seen.descriptor, _NUMBER_AT)
        program.jump("stack is known")
        program.label("handed over")
        program.do(R8, "=", R0)
        for offset, stack_offset in enumerate((_NUMBER_AT, _MISSING_AT, _STACK_AT, _FRAME_AT)):
            program.load(R1, R10, stack_offset)
            program.store(R8, 8 * offset, R1)
        program.store(R8, 8 * 4, 0)
        # Word by word, as the helper that copies is forbidden under kernel lockdown.
        for offset in range(0, _FRAMES_BYTES, 8):
            program.load(R1, R9, offset)
            program.store(R8, _HEAD.size + offset, R1)
        program.load(R1, R10, _MISSING_AT)
        program.jump_if(R1, "==", 0, "submit")
        for size in _PIECES:
            program.do(R1, "=", R8)
            program.do(R1, "+=", _PIECE_AT)
            program.do(R2, "=", size)
            program.load(R3, R10, _STACK_AT)
            program.call(Helper.READ_USER)
            program.jump_if(R0, "!=", 0, f"not {size}")
            program.store(R8, 8 * 4, size)
            program.jump("submit")
            program.label(f"not {size}")
        program.label("submit")
        program.do(R1, "=", R8)
        program.do(R2, "=", 1)  # BPF_RB_NO_WAKEUP
        program.call(Helper.RING_SUBMIT)

    def _unwound(self, address: int, stack: int, frame: int, stack_bytes: bytes) -> tuple[int, ...]:
        """Returns the return addresses beyond `address`, from a piece of the stack."""
        base = stack

        def read(position: int) -> int | None:
            is_inside = 0 <= position - base <= len(stack_bytes) - 8
            return (
                int.from_bytes(stack_bytes[position - base : position - base + 8], "little")
                if is_inside
                else None
            )

        result: list[int] = []
        while len(result) < MOST_NATIVE:
            # The rule of a return address, which is passed to the kernel, too.
            if address not in self._rules:
                # The call is before the return address. The interpreter's own functions are of no
                # interest.
                is_python = self._python is not None and self._symbols.lies_in(
                    address, self._python.file
                )
                self._rules[address] = END_RULE if is_python else self._symbols.rule(address - 1)
                with contextlib.suppress(OSError):  # the map is full: these stacks will be shorter
                    self._rules_map.put(
                        struct.pack("<Q", address), _RULE.pack(*self._rules[address])
                    )
            rule = self._rules[address]
            end: int | None = None
            if rule.base == FrameOrigin.BEHIND_FRAME:
                end, frame = read(frame + rule.offset), read(frame) or 0
            elif rule.base != FrameOrigin.END:
                end = (stack if rule.base == FrameOrigin.STACK else frame) + rule.offset
            if end is None or end <= stack:
                break
            following = read(end + rule.returns_to)
            if not following:
                break
            if rule.frame:
                frame = read(end + rule.frame) or 0
            stack, address = end, following
            result.append(address)
        return tuple(result)

    def _keep(self, resource: _Held) -> _Held:
        self._held.append(resource)
        return resource


def _hash_into_number(program: ProbeProgram) -> None:
    """Add R1 to the hash that becomes the stack's number; R2 is overwritten."""
    program.load(R2, R10, _NUMBER_AT)
    program.do(R2, "*=", _HASH_FACTOR)
    program.do(R2, "+=", R1)
    program.store(R10, _NUMBER_AT, R2)


def _read(program: ProbeProgram, base: Register, offset: int, size: int = 8) -> None:
    """Read a field of Python's structures onto the stack."""
    program.do(R3, "=", base)
    program.do(R3, "+=", offset)
    program.read_user(_READ_AT, size)
    program.jump_if(R0, "!=", 0, "no python")


# A record: time (monotonic clock, ns), process << 32 | thread, number of the function, number of
# its stack (0: none), and six values, which depend on the function.
RECORD = struct.Struct("<4Q6Q")
_MAX_OPEN_CALLS = 4096  # calls that have started and not ended
_RECORD_AT = -RECORD.size
_FUNCTION_AT, _CALL_STACK_AT, _VALUES_AT = (_RECORD_AT + offset for offset in (16, 24, 32))
_KEY_AT, _CALL_ZERO_AT = _RECORD_AT - 16, _RECORD_AT - 24
assert _CALL_ZERO_AT >= LOWEST_OFFSET
_MAX_DRIVERS = 4  # ranges of addresses


class CallValue(NamedTuple):
    """Location of a value of a call: an argument, an offset `above` the stack's end, or memory
    `behind` the address in it.

    `size` bytes are read; the value is shifted right by `shift`. `upper`: it becomes the upper half
    of the previous value.
    """

    argument: int | None = None
    above: int | None = None
    behind: int | None = None
    size: int = 8
    shift: int = 0
    upper: bool = False


class ProbedCall(NamedTuple):
    """A probed function.

    Attributes:
        beginning: Prefix of its symbol.
        values: Values of a call at its entry.
        pointer: Argument with the address at which the function stores its result; -1: it returns
            the result. None: nothing is done at its return.
        timed: Its return is recorded: value 5 is the time of its entry.
        stacks: Whether the stack is recorded.
        own: A library also calls this function internally, its own or that of another probed
            library, as CUDA's runtime calls the driver: calls from the ranges of
            `set_internal_ranges` are not recorded.
    """

    beginning: str
    values: tuple[CallValue, ...]
    pointer: int | None = None
    timed: bool = False
    stacks: bool = False
    own: bool = False

    @property
    def ends(self) -> bool:
        """Whether it is recorded at its return, not at its entry."""
        return self.pointer is not None or self.timed


class CallProbes:
    """Probes of calls in one process, and their records.

    A record of a function that `ends` is made after its return; value 4 is its result, or what it
    stored at the pointer. If it should have stored something and returned an error, there is no
    record.

    Raises:
        OSError: The kernel does not support it, or does not allow it.
    """

    def __init__(self, process: int, stacks: CallStacks) -> None:
        self._process = process
        self.ring = Ring(RECORD.size, _RING_BYTES)
        self._stacks = stacks
        self._drivers = Map(MapKind.ARRAY, 4, 16 * _MAX_DRIVERS, 1)
        self._inside = Map(MapKind.LRU_HASH, 16, RECORD.size, _MAX_OPEN_CALLS)
        self._lost = Map(MapKind.ARRAY, 4, 8, 1)
        self._programs: list[int] = []
        self._probes: list[Uprobes] = []

    def attach(self, descriptor: int, calls: Iterable[tuple[int, ProbedCall]]) -> list[int]:
        """Probe functions of a library; returns the numbers of those that it has.

        Raises:
            OSError: The file is not a library, or the kernel does not allow it.
        """
        probes = Uprobes(descriptor, self._process)
        self._probes.append(probes)
        attached = []
        # Functions that free come first, so that nothing allocated meanwhile seems to be kept.
        for number, call in sorted(calls, key=lambda numbered: numbered[1].ends):
            function = probes.elf.find(call.beginning)
            if function is None:
                continue
            if call.ends:
                probes.attach(function, self._load(self._leaving(number, call)), at_return=True)
                probes.attach(function, self._load(self._entering(number, call)))
            else:
                probes.attach(function, self._load(self._entering(number, call)))
            attached.append(number)
        return attached

    def set_internal_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Set the address ranges (first, one beyond) of the libraries whose calls of each other are
        internal.
        """
        addresses = [address for pair in ranges[:_MAX_DRIVERS] for address in pair]
        self._drivers.put(
            bytes(4),
            struct.pack(
                f"<{2 * _MAX_DRIVERS}Q", *addresses, *[0] * (2 * _MAX_DRIVERS - len(addresses))
            ),
        )

    def lost(self) -> int:
        """Returns the number of calls whose record did not fit into the ring."""
        (number,) = struct.unpack("<Q", self._lost.get(bytes(4)) or bytes(8))
        return int(number)

    def detach(self) -> None:
        """Remove the probes; their records are kept."""
        for probes in self._probes:
            probes.close()
        self._probes = []

    def close(self) -> None:
        self.detach()
        for program in self._programs:
            os.close(program)
        for resource in (self.ring, self._drivers, self._inside, self._lost):
            resource.close()

    def _load(self, write: Callable[[ProbeProgram], None]) -> int:
        program = ProbeProgram()
        program.do(R6, "=", R1)
        for offset in range(_RECORD_AT, 0, 8):
            program.store(R10, offset, 0)
        program.call(Helper.TIME_NS)
        program.store(R10, _RECORD_AT, R0)
        program.do(R8, "=", R0)
        program.call(Helper.PROCESS_AND_THREAD)
        program.store(R10, _RECORD_AT + 8, R0)
        program.do(R7, "=", R0)
        write(program)
        program.label("end")
        program.exit()
        self._programs.append(load_program(program.encoded(), "call"))
        return self._programs[-1]

    def _entering(self, number: int, call: ProbedCall) -> Callable[[ProbeProgram], None]:
        def write(program: ProbeProgram) -> None:
            program.store(R10, _FUNCTION_AT, number)
            if call.own:
                self._unless_own(program)
            position = _VALUES_AT
            for value in call.values:
                if value.upper:
                    _read_value(program, value, position - 4)
                else:
                    _read_value(program, value, position)
                    position += 8
            if call.stacks:
                self._stacks.write(program, _CALL_STACK_AT)
            if not call.ends:
                self._put(program)
                return
            if call.pointer is not None and call.pointer >= 0:
                program.load(R1, R6, get_architecture().arguments[call.pointer])
                program.store(R10, _VALUES_AT + 8 * 4, R1)
            # A call that has begun is known by its thread and its function
            program.store(R10, _KEY_AT, R7)
            program.store(R10, _KEY_AT + 8, number)
            program.on_map(Helper.MAP_UPDATE, self._inside.descriptor, _KEY_AT, _RECORD_AT)

        return write

    def _unless_own(self, program: ProbeProgram) -> None:
        """Exit if the call comes from a driver's library."""
        returns_to = get_architecture().returns_to
        if returns_to is not None:
            program.load(R1, R6, returns_to)
            program.store(R10, _KEY_AT, R1)
        else:
            program.load(R3, R6, get_architecture().stack)
            program.read_user(_KEY_AT, 8)
        program.store(R10, _CALL_ZERO_AT, 0)
        program.on_map(Helper.MAP_LOOKUP, self._drivers.descriptor, _CALL_ZERO_AT)
        program.jump_if(R0, "==", 0, "end")
        program.load(R1, R10, _KEY_AT)
        for row in range(_MAX_DRIVERS):
            program.load(R2, R0, 16 * row)
            program.jump_if(R1, "<", R2, f"not from {row}")
            program.load(R2, R0, 16 * row + 8)
            program.jump_if(R1, "<", R2, "end")
            program.label(f"not from {row}")

    def _leaving(self, number: int, call: ProbedCall) -> Callable[[ProbeProgram], None]:
        def write(program: ProbeProgram) -> None:
            # A call that has begun is known by its thread and its function
            program.store(R10, _KEY_AT, R7)
            program.store(R10, _KEY_AT + 8, number)
            program.on_map(Helper.MAP_LOOKUP, self._inside.descriptor, _KEY_AT)
            program.jump_if(R0, "==", 0, "end")
            for offset in range(16, RECORD.size, 8):
                program.load(R1, R0, offset)
                program.store(R10, _RECORD_AT + offset, R1)
            program.load(R1, R0, 0)
            program.store(R10, _VALUES_AT + 8 * 5, R1)
            program.on_map(Helper.MAP_DELETE, self._inside.descriptor, _KEY_AT)
            program.load(R1, R6, get_architecture().result)
            if call.pointer is not None and call.pointer >= 0:
                program.do(R1, "<<=", 32)  # the result is an int; the upper bits are undefined
                program.jump_if(R1, "!=", 0, "end")
                program.load(R3, R10, _VALUES_AT + 8 * 4)
                program.read_user(_VALUES_AT + 8 * 4, 8)
                program.jump_if(R0, "!=", 0, "end")
            elif call.pointer is not None:
                program.jump_if(R1, "==", 0, "end")
                program.store(R10, _VALUES_AT + 8 * 4, R1)
            self._put(program)

        return write

    def _put(self, program: ProbeProgram) -> None:
        program.map(R1, self.ring.map.descriptor)
        program.address(R2, _RECORD_AT)
        program.do(R3, "=", RECORD.size)
        program.do(R4, "=", 1)  # BPF_RB_NO_WAKEUP: the reader polls
        program.call(Helper.RING_OUTPUT)
        program.jump_if(R0, "==", 0, "end")
        program.store(R10, _CALL_ZERO_AT, 0)
        program.on_map(Helper.MAP_LOOKUP, self._lost.descriptor, _CALL_ZERO_AT)
        program.jump_if(R0, "==", 0, "end")
        program.do(R1, "=", 1)
        program.add_at(R0, 0, R1)


def _read_value(program: ProbeProgram, value: CallValue, to: int) -> None:
    """Read a value of the call onto the stack, at its entry."""
    if value.argument is not None:
        program.load(R1, R6, get_architecture().arguments[value.argument])
        if value.behind is None:
            if value.shift:
                program.do(R1, ">>=", 8 * value.shift)
            program.store(R10, to, R1, value.size)
            return
        program.do(R3, "=", R1)
        program.do(R3, "+=", value.behind)
    else:
        assert value.above is not None
        program.load(R3, R6, get_architecture().stack)
        program.do(R3, "+=", value.above)
    program.read_user(to, value.size)


# The initial namespace, whose pids the kernel passes to programs.
_HOST_PROCESSES = "pid:[4026531836]"
_CAP_SYS_PTRACE = 19  # CAP_SYS_PTRACE
_RIGHTS_HINT = (
    "run the agent as root, or with CAP_SYS_ADMIN, which the kernel demands for probes of programs"
)


def explain_unsupported() -> tuple[str, str]:
    """Returns why probes do not work here, and what would help; both "" if they work."""
    try:
        get_architecture()
        if not UPROBE_TYPE.exists():
            if not UPROBE_TYPE.parent.parent.exists():
                return (
                    f"{UPROBE_TYPE.parent.parent} is not there",
                    "mount sysfs where the agent runs",
                )
            return "the kernel has no probes of functions of programs (CONFIG_UPROBE_EVENTS)", ""
        if Path("/proc/self/ns/pid").readlink().name != _HOST_PROCESSES:
            return (
                "the agent knows processes by other numbers than the kernel does",
                "start it in the host's pid namespace (docker --pid=host, Kubernetes hostPID: true)",
            )
    except OSError as error:
        return str(error.strerror), ""
    try:
        Map(MapKind.HASH, 8, 8, 1).close()
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return "the kernel has no bpf(2) (CONFIG_BPF_SYSCALL)", ""
        return f"bpf(2) is refused: {_describe_error(error)}", _RIGHTS_HINT
    try:
        Map(MapKind.RING, 0, 0, os.sysconf("SC_PAGE_SIZE")).close()
    except OSError as error:
        return (
            f"the kernel has no ring buffers for programs: {_describe_error(error)}",
            "a kernel of 5.8 or later",
        )
    program = ProbeProgram()
    program.exit()
    try:
        loaded = load_program(program.encoded(), "support")
    except OSError as error:
        return f"the kernel loads no programs for probes: {_describe_error(error)}", _RIGHTS_HINT
    try:
        with Path("/proc/self/exe").open("rb") as executable:
            elf = Elf(executable.fileno())
            # At the entry point, which this program never executes again, so it is not slowed down.
            position = elf.offset_of(elf.entry) or 0
            os.close(attach_program(loaded, "/proc/self/exe", position, process=os.getpid()))
    except OSError as error:
        return f"perf_event_open(2) is refused: {_describe_error(error)}", _RIGHTS_HINT
    finally:
        os.close(loaded)
    return "", ""


def can_trace_others() -> bool:
    """Whether mappings and memory of other users' processes may be read (CAP_SYS_PTRACE)."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = status.partition("\nCapEff:")[2].split(maxsplit=1)
    return bool(effective and int(effective[0], 16) >> _CAP_SYS_PTRACE & 1)


def _describe_error(error: OSError) -> str:
    return (error.strerror or "").lower()
