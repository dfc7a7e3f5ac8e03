"""The stack of a call, taken in the kernel when a probe is hit: frames of native libraries, then
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
import struct
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
    Helper,
    Map,
    MapKind,
    ProbeProgram,
    Register,
    Ring,
    get_architecture,
)
from traceloom.agent.probes.symbols import Symbols
from traceloom.agent.probes.unwinding import END_RULE, FrameOrigin, UnwindRule
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
