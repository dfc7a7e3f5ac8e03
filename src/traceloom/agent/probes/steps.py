"""Steps and loader waits of every PyTorch process, counted in the kernel.

PyTorch calls `record_function_enter_new(name)` around an optimizer's step, around a data loader's
next batch and at `profiler.step()`, whether a profiler runs or not. The time between two such calls
of a process, and the duration of a loader's call, are counted here. The processes themselves are
not changed.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from traceloom.agent.metrics import METRICS
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
    Uprobes,
    get_architecture,
    load_program,
)

BOUNDS = METRICS["step_seconds"].bounds
PROFILER_STEP, OPTIMIZER_STEP, LOADER = range(3)

_ENTER = "_ZN5torch8autograd8profiler25record_function_enter_newE"
_EXIT = "_ZN5torch8autograd8profilerL24record_function_exit_newE"  # not exported
# Its first instructions in PyTorch's own builds, two instructions and a jump. The kernel emulates
# the jump under a probe; other instructions are single-stepped, which takes thirty times as long in
# a virtual machine.
_BEFORE_JUMP, _JUMP = bytes.fromhex("48 8b 3f 48 83 c7 10"), b"\xe9"
_MAX_MARKS = 4096
_MAX_WAITING = 16384  # threads that wait for a loader
_NAME_BYTES = 64
# Two containers with the same image may show one library as two files, each with probes, so that
# the same call is seen twice.
_DUPLICATE_NS = 20_000
_KEY = struct.Struct("<IIQ")  # process, kind of mark, id within its kind
_COUNTED = struct.Struct(f"<QQQQ{len(BOUNDS) + 1}Q")
_NUMBER, _TOTAL, _FIRST, _LAST, _BUCKETS = 0, 8, 16, 24, 32
_WAIT = struct.Struct("<QQ")  # start time, depth of nested calls


class StepMark(NamedTuple):
    """Calls of one name in one process. Times: monotonic clock of the host, ns.

    `number` durations took `total_ns`; `buckets` has the number at most each bound of
    `step_seconds`, not cumulative, the last those beyond. A duration of steps is from one call to
    the next, of a loader the length of the call.
    """

    number: int
    total_ns: int
    first_ns: int
    last_ns: int
    buckets: tuple[int, ...]


class StepProbes:
    """The eBPF programs, and their counts.

    Raises:
        OSError: The kernel does not support it, or does not allow it.
    """

    def __init__(self) -> None:
        self._marks = Map(MapKind.HASH, _KEY.size, _COUNTED.size, _MAX_MARKS)
        self._waiting = Map(MapKind.LRU_HASH, 8, _WAIT.size, _MAX_WAITING)
        self._lost = Map(MapKind.ARRAY, 4, 8, 1)
        self._enter = load_program(self._entering().encoded(), "step_enter")
        self._exit = load_program(self._leaving().encoded(), "step_exit")

    def attach(self, descriptor: int, process: int | None = None) -> tuple[Uprobes, str]:
        """Count in all processes that map this library, or in one.

        Returns:
            The probes, and why loader waits are not measured, "" if they are.

        Raises:
            OSError: It has no such function, or the kernel does not allow it.
        """
        probes = Uprobes(descriptor, process)
        try:
            probes.attach(probes.find(_ENTER), self._enter)
            exit_symbol = probes.elf.find(_EXIT)
            if exit_symbol is None:
                return (
                    probes,
                    "it is stripped of the symbol table that names the function at the end of a wait",
                )
            if probes.elf.at(exit_symbol.address, len(_BEFORE_JUMP) + 1) == _BEFORE_JUMP + _JUMP:
                exit_symbol = exit_symbol._replace(offset=exit_symbol.offset + len(_BEFORE_JUMP))
            probes.attach(exit_symbol, self._exit)
        except OSError:
            probes.close()
            raise
        return probes, ""

    def marks(self) -> dict[int, dict[tuple[int, int], StepMark]]:
        """Returns the counts by process: (kind, id within its kind) -> mark."""
        result: dict[int, dict[tuple[int, int], StepMark]] = {}
        for key in self._marks.keys():  # noqa: SIM118  (it is no dict)
            value = self._marks.get(key)
            if value is not None:
                process, kind, mark_id = _KEY.unpack(key)
                number, total, first, last, *buckets = _COUNTED.unpack(value)
                result.setdefault(process, {})[kind, mark_id] = StepMark(
                    number, total, first, last, tuple(buckets)
                )
        return result

    def forget(self, process: int) -> None:
        for key in list(self._marks.keys()):
            if _KEY.unpack(key)[0] == process:
                self._marks.remove(key)

    def lost(self) -> int:
        """Returns the number of calls that were not counted, because too many processes have
        marks.
        """
        (number,) = struct.unpack("<Q", self._lost.get(bytes(4)) or bytes(8))
        return int(number)

    def close(self) -> None:
        """Close everything but attached probes, which the caller closes."""
        for resource in (self._marks, self._waiting, self._lost):
            resource.close()
        os.close(self._enter)
        os.close(self._exit)

    def _entering(self) -> ProbeProgram:
        """The program for the entry of record_function_enter_new(const std::string& name, ...)."""
        name, pointer, thread, wait = -_NAME_BYTES, -72, -80, -96
        program = ProbeProgram()
        program.do(R6, "=", R1)
        # A std::string starts with the address of its null-terminated text in both ABIs of
        # libstdc++.
        program.load(R3, R6, get_architecture().arguments[get_architecture().hidden_result])
        program.read_user(pointer, 8)
        program.jump_if(R0, "!=", 0, "end")
        for position in range(name, 0, 8):
            program.store(R10, position, 0)
        program.load(R3, R10, pointer)
        program.read_user(name, _NAME_BYTES, Helper.READ_USER_TEXT)
        program.jump_if(R0, "signed<", 0, "end")
        program.call(Helper.PROCESS_AND_THREAD)
        program.do(R7, "=", R0)
        program.store(R10, thread, R7)
        program.call(Helper.TIME_NS)
        program.do(R8, "=", R0)
        _skip_unless_prefix(program, name, b"enumerate(DataLoader)#"[:16], "no loader")
        program.store(R10, wait, R8)
        program.store(R10, wait + 8, 1)
        program.on_map(Helper.MAP_UPDATE, self._waiting.descriptor, thread, wait)
        program.jump("end")
        program.label("no loader")
        program.on_map(Helper.MAP_LOOKUP, self._waiting.descriptor, thread)
        program.jump_if(R0, "==", 0, "not waiting")
        program.load(R1, R0, 8)  # a range nested in the loader's: count the depth
        program.do(R1, "+=", 1)
        program.store(R0, 8, R1)
        program.label("not waiting")
        _skip_unless_prefix(program, name, b"Optimizer.step#", "no optimizer")
        program.do(R9, "=", 0)  # id of the optimizer: a checksum of its name
        for position in range(name + 8, 0, 8):
            program.load(R1, R10, position)
            program.do(R9, "*=", 31)
            program.do(R9, "+=", R1)
        program.do(R2, "=", OPTIMIZER_STEP)
        program.jump("mark")
        program.label("no optimizer")
        _skip_unless_prefix(program, name, b"ProfilerStep#", "end")
        program.do(R9, "=", 0)
        program.do(R2, "=", PROFILER_STEP)
        program.label("mark")
        self._count(program, since_last=True)
        program.label("end")
        program.exit()
        return program

    def _leaving(self) -> ProbeProgram:
        thread = -80
        program = ProbeProgram()
        program.call(Helper.PROCESS_AND_THREAD)
        program.do(R7, "=", R0)
        program.store(R10, thread, R7)
        program.on_map(Helper.MAP_LOOKUP, self._waiting.descriptor, thread)
        program.jump_if(R0, "==", 0, "end")
        program.load(R1, R0, 8)
        program.do(R1, "-=", 1)
        program.store(R0, 8, R1)
        program.jump_if(R1, "!=", 0, "end")
        program.load(R6, R0)
        program.call(Helper.TIME_NS)
        program.do(R8, "=", R0)
        program.on_map(Helper.MAP_DELETE, self._waiting.descriptor, thread)
        program.do(R9, "=", 0)
        program.do(R2, "=", LOADER)
        self._count(program, since_last=False)
        program.label("end")
        program.exit()
        return program

    def _count(self, program: ProbeProgram, *, since_last: bool) -> None:
        """Count for the mark (process of R7, kind R2, id R9) at time R8: the duration since the
        last one, or since R6.
        """
        key, fresh, zero = -112, -112 - _COUNTED.size, -120 - _COUNTED.size
        program.do(R7, ">>=", 32)
        program.store(R10, key, R7, 4)
        program.store(R10, key + 4, R2, 4)
        program.store(R10, key + 8, R9)
        program.on_map(Helper.MAP_LOOKUP, self._marks.descriptor, key)
        program.jump_if(R0, "!=", 0, "known")
        for position in range(fresh, fresh + _COUNTED.size, 8):
            program.store(R10, position, 0)
        program.store(R10, fresh + _FIRST, R8)
        program.store(R10, fresh + _LAST, R8)
        program.on_map(Helper.MAP_UPDATE, self._marks.descriptor, key, fresh)
        if since_last:
            program.jump_if(R0, "==", 0, "end")
        else:
            program.jump_if(R0, "!=", 0, "full")
            program.on_map(Helper.MAP_LOOKUP, self._marks.descriptor, key)
            program.jump_if(R0, "!=", 0, "known")
            program.label("full")
        program.store(R10, zero, 0)
        program.on_map(Helper.MAP_LOOKUP, self._lost.descriptor, zero)
        program.jump_if(R0, "==", 0, "end")
        program.do(R1, "=", 1)
        program.add_at(R0, 0, R1)
        program.jump("end")
        program.label("known")
        program.do(R1, "=", R8)
        if since_last:
            program.load(R2, R0, _LAST)
            program.do(R1, "-=", R2)
            program.jump_if(R1, "signed<", _DUPLICATE_NS, "end")
        else:
            program.do(R1, "-=", R6)
        program.store(R0, _LAST, R8)
        program.add_at(R0, _TOTAL, R1)
        program.do(R2, "=", 1)
        program.add_at(R0, _NUMBER, R2)
        program.do(R3, "=", R0)
        for bound in BOUNDS:
            program.wide(R4, round(bound * 1e9))
            program.jump_if(R1, "<=", R4, "bucket")
            program.do(R3, "+=", 8)
        program.label("bucket")
        program.add_at(R3, _BUCKETS, R2)


def _skip_unless_prefix(program: ProbeProgram, position: int, word: bytes, to: str) -> None:
    """Jump to the label unless the text on the stack starts with a word of 9 to 16 bytes."""
    for start in (0, 8):
        part = word[start : start + 8]
        program.load(R1, R10, position + start)
        program.wide(R2, (1 << 8 * len(part)) - 1)
        program.do(R1, "&=", R2)
        program.wide(R2, int.from_bytes(part, "little"))
        program.jump_if(R1, "!=", R2, to)
