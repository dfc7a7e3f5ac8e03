"""Probes that record calls of functions, and the check whether probes work on this host."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from traceloom.agent.probes.call_stacks import LOWEST_OFFSET, CallStacks
from traceloom.agent.probes.ebpf import (
    R0,
    R1,
    R2,
    R3,
    R4,
    R6,
    R7,
    R8,
    R10,
    UPROBE_TYPE,
    Helper,
    Map,
    MapKind,
    ProbeProgram,
    Ring,
    Uprobes,
    attach_program,
    get_architecture,
    load_program,
)
from traceloom.system.elf import Elf

# A record: time (monotonic clock, ns), process << 32 | thread, number of the function, number of
# its stack (0: none), and six values, which depend on the function.
RECORD = struct.Struct("<4Q6Q")

_RING_BYTES = 1 << 23
_MAX_OPEN_CALLS = 4096  # calls that have started and not ended
_RECORD_AT = -RECORD.size
_FUNCTION_AT, _STACK_AT, _VALUES_AT = (_RECORD_AT + offset for offset in (16, 24, 32))
_KEY_AT, _ZERO_AT = _RECORD_AT - 16, _RECORD_AT - 24
assert _ZERO_AT >= LOWEST_OFFSET
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
                    _read(program, value, position - 4)
                else:
                    _read(program, value, position)
                    position += 8
            if call.stacks:
                self._stacks.write(program, _STACK_AT)
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
        program.store(R10, _ZERO_AT, 0)
        program.on_map(Helper.MAP_LOOKUP, self._drivers.descriptor, _ZERO_AT)
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
        program.store(R10, _ZERO_AT, 0)
        program.on_map(Helper.MAP_LOOKUP, self._lost.descriptor, _ZERO_AT)
        program.jump_if(R0, "==", 0, "end")
        program.do(R1, "=", 1)
        program.add_at(R0, 0, R1)


def _read(program: ProbeProgram, value: CallValue, to: int) -> None:
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
