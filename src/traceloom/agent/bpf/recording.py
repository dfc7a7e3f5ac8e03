"""Allocations and launches of one process, recorded by probes into a file; runs in a worker."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from traceloom.agent.bpf.call_probes import RECORD, CallProbes, ProbedCall, Value
from traceloom.agent.bpf.mappings import Mapping, mappings, open_mapped
from traceloom.agent.bpf.step_probes import LOADER, StepProbes
from traceloom.agent.bpf.support import unsupported
from traceloom.agent.bpf.symbols import Symbols
from traceloom.agent.bpf.uprobes import Uprobes

_PAUSE_S = 0.02  # the ring holds what comes in it
_LOOK_S = 1.0
_MOST_RECORDS = 3_000_000
_MOST_S = 3600.0
_ROWS_AT_ONCE = 10_000
# c10::DeviceType by number
_DEVICES = {
    0: "cpu", 1: "cuda", 2: "mkldnn", 3: "opengl", 4: "opencl", 5: "ideep", 6: "hip", 7: "fpga", 8: "maia", 9: "xla",
    10: "vulkan", 11: "metal", 12: "xpu", 13: "mps", 14: "meta", 15: "hpu", 16: "ve", 17: "lazy", 18: "ipu",
    19: "mtia", 20: "privateuseone",
}  # fmt: skip

_SIZE_SECOND = (Value(argument=1),)
_ADDRESS_FIRST = (Value(argument=0),)
_REPORT, _ALLOCATE_CPU, _FREE_CPU = range(3)
_DRIVER, _PINNED = "cuda", "pinned"


class Order(msgspec.Struct, frozen=True):
    """What is to be recorded: of which process (as it began), when (`Window`), into which file."""

    pid: int
    start_ticks: int
    rank: int | None
    start_ns: int
    duration_s: float | None
    steps: int | None
    path: str


class _Memory(NamedTuple):
    """A function that allocates or frees: of which library (how its file's name begins), and on what."""

    library: str
    device: str
    frees: bool
    call: ProbedCall


def _allocates(name: str, library: str = "libcudart.so", device: str = _DRIVER) -> _Memory:
    return _Memory(library, device, False, ProbedCall(f"{name}\0", _SIZE_SECOND, pointer=0, stacks=True))


def _frees(name: str, library: str = "libcudart.so", device: str = _DRIVER) -> _Memory:
    return _Memory(library, device, True, ProbedCall(f"{name}\0", _ADDRESS_FIRST))


# Of a C++ function the name tells its arguments' types: another signature is another name, and is not found.
_MEMORY = (
    _Memory(
        "libc10.so", "", False,
        ProbedCall(
            "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE\0",
            (*(Value(argument=index) for index in range(4)), Value(argument=4, size=2)), stacks=True,
        ),
    ),
    _Memory("libc10.so", "cpu", False, ProbedCall("_ZN3c109alloc_cpuEm\0", _ADDRESS_FIRST, pointer=-1, stacks=True)),
    _Memory("libc10.so", "cpu", True, ProbedCall("_ZN3c108free_cpuEPv\0", _ADDRESS_FIRST)),
    _allocates("cudaMalloc"), _allocates("cudaMallocAsync"), _allocates("cudaMallocManaged"),
    _frees("cudaFree"), _frees("cudaFreeAsync"),
    _allocates("cudaHostAlloc", device=_PINNED), _allocates("cudaMallocHost", device=_PINNED),
    _frees("cudaFreeHost", device=_PINNED),
    _allocates("cuMemCreate", "libcuda.so"), _frees("cuMemRelease", "libcuda.so"),
    _allocates("hipMalloc", "libamdhip64.so", "hip"), _frees("hipFree", "libamdhip64.so", "hip"),
)  # fmt: skip

_BY_VALUE = {  # dim3 in two registers: x and y, then z
    "x86_64": (
        Value(argument=0), Value(argument=1), Value(argument=2, size=4), Value(argument=3), Value(argument=4, size=4),
        Value(above=16),
    ),
    "aarch64": (
        Value(argument=0), Value(argument=1), Value(argument=2, size=4), Value(argument=3), Value(argument=4, size=4),
        Value(argument=7),
    ),
}  # fmt: skip
_LAUNCH_OF_CONFIG = (
    Value(argument=1), Value(argument=0, behind=0), Value(argument=0, behind=8, size=4), Value(argument=0, behind=12),
    Value(argument=0, behind=20, size=4), Value(argument=0, behind=32),
)  # fmt: skip


class _Launch(NamedTuple):
    """A function that launches, or waits. `kind`: `function` has an address in value 0, `graph` has none."""

    library: str
    kind: str
    call: ProbedCall


def _waits(name: str) -> _Launch:
    return _Launch("libcudart.so", "wait", ProbedCall(f"{name}\0", _ADDRESS_FIRST, timed=True))


def _launches() -> tuple[_Launch, ...]:
    by_value = _BY_VALUE[os.uname().machine]
    return (
        _Launch("libcudart.so", "function", ProbedCall("cudaLaunchKernel\0", by_value)),
        _Launch("libcudart.so", "function", ProbedCall("cudaLaunchKernelExC\0", _LAUNCH_OF_CONFIG)),
        _Launch("libamdhip64.so", "function", ProbedCall("hipLaunchKernel\0", by_value)),
        # Its stream is its second argument: the sixth value.
        _Launch("libcudart.so", "graph", ProbedCall("cudaGraphLaunch\0", (Value(argument=0), Value(argument=1)))),
        _waits("cudaStreamSynchronize"), _waits("cudaDeviceSynchronize"), _waits("cudaEventSynchronize"),
        _waits("cudaMemcpy"),
    )  # fmt: skip


class _Recorded(NamedTuple):
    """Records by time, and what is needed to read them. `offset_ns`: wall clock - monotonic clock."""

    records: Sequence[tuple[int, ...]]
    offset_ns: int
    lost: int
    probes: CallProbes
    symbols: Symbols


def allocations(order: dict[str, Any]) -> list[str]:
    """Record who allocates and frees, with stacks: `traceloom-allocations`.

    Raises:
        OSError: The process has ended, has no such functions, or the kernel does not let us.
    """
    watched = [(memory.library, memory.call) for memory in _MEMORY]
    wanted = msgspec.convert(order, Order)
    with _recorded(watched, wanted) as recorded:
        stacks = _Stacks(recorded, [call for _, call in watched])
        live: dict[tuple[str, int], int] = {}
        events = []
        for time_ns, thread, number, returns_to, stack, *values in recorded.records:
            device = _MEMORY[number].device
            totals: tuple[int | None, int | None] = (None, None)
            if number == _REPORT:
                address, size, allocated, reserved, kind, _ = values
                size -= (size >> 63) << 64
                if kind & 0xFF == 0:
                    continue  # seen where it is allocated
                device = f"{_DEVICES.get(kind & 0xFF, 'other')}:{kind >> 8 & 0x7F}"
                totals = (allocated, reserved)
            elif _MEMORY[number].frees:
                address = values[0]
                size = -live.pop((device, address), 0)
                if not size:
                    continue  # allocated before, or by a function that is not watched
            else:
                size, address = values[0], values[4]
                live[device, address] = size
            row = stacks.number(number, stack, returns_to) if size > 0 else -1
            events.append((time_ns + recorded.offset_ns, thread & 0xFFFFFFFF, address, size, device, row, *totals))
        _write(
            wanted, "traceloom-allocations",
            {"frames": stacks.frames, "stacks": stacks.stacks, "events": events}, recorded.lost,
        )  # fmt: skip
    return [wanted.path]


def launches(order: dict[str, Any]) -> list[str]:
    """Record launches of kernels and graphs, and how long the host waited for devices: `traceloom-launches`.

    Raises:
        OSError: The process has ended, has no such functions, or the kernel does not let us.
    """
    table = _launches()
    watched = [(launch.library, launch.call) for launch in table]
    wanted = msgspec.convert(order, Order)
    with _recorded(watched, wanted) as recorded:
        frames: dict[tuple[str, str], int] = {}
        events, durations = [], []
        for time_ns, thread, number, _, _, *values in recorded.records:
            launch, thread_id = table[number], thread & 0xFFFFFFFF
            own = (launch.call.beginning.rstrip("\0"), launch.library)
            if launch.kind == "wait":
                began = values[5]
                row = frames.setdefault(own, len(frames))
                durations.append((began + recorded.offset_ns, thread_id, row, time_ns - began))
                continue
            if launch.kind == "graph":
                grid, block, stream = [0, 0, 0], [0, 0, 0], values[1]
            else:
                own = recorded.symbols.name(values[0])
                grid = [values[1] & 0xFFFFFFFF, values[1] >> 32, values[2]]
                block = [values[3] & 0xFFFFFFFF, values[3] >> 32, values[4]]
                stream = values[5]
            row = frames.setdefault(own, len(frames))
            events.append((time_ns + recorded.offset_ns, thread_id, row, grid, block, stream))
        _write(
            wanted, "traceloom-launches",
            {"frames": list(frames), "events": events, "durations": durations}, recorded.lost,
        )  # fmt: skip
    return [wanted.path]


@contextlib.contextmanager
def _recorded(watched: Sequence[tuple[str, ProbedCall]], order: Order) -> Iterator[_Recorded]:
    """Probe the process for as long as is asked."""
    why, helps = unsupported()
    if why:
        raise OSError(errno.EPERM, f"{why}; {helps}" if helps else why)
    pid, steps = order.pid, order.steps
    if _started(pid) != order.start_ticks:
        raise OSError(errno.ESRCH, "the process has ended")
    with contextlib.ExitStack() as stack:
        symbols = Symbols(pid)
        symbols.look()
        probes = CallProbes(pid)
        stack.callback(probes.close)
        steps_taken = stack.enter_context(_steps(pid)) if steps is not None else None
        offset_ns = time.time_ns() - time.monotonic_ns()
        begins = max(order.start_ns - offset_ns, time.monotonic_ns())
        attached = _attach(probes, pid, watched)
        if not attached:
            libraries = ", ".join(dict.fromkeys(library for library, _ in watched))
            raise OSError(errno.ENOENT, f"the process has none of the functions that are watched (of {libraries})")
        pieces: list[bytes] = []
        held, lost, steps_before, looked = 0, 0, 0, time.monotonic()
        seconds = min(order.duration_s or _MOST_S, _MOST_S)
        ends = max(begins, time.monotonic_ns()) + round(seconds * 1e9)
        while (now := time.monotonic_ns()) < ends and _started(pid) == order.start_ticks:
            time.sleep(min(_PAUSE_S, (ends - now) / 1e9))
            piece = probes.ring.take()
            if now < begins:
                steps_before = steps_taken() if steps_taken is not None else 0
                continue
            if held >= _MOST_RECORDS * RECORD.size:
                lost += len(piece) // RECORD.size
            else:
                pieces.append(piece)
                held += len(piece)
            if steps is not None and steps_taken is not None and steps_taken() - steps_before >= steps:
                break
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                with contextlib.suppress(OSError):  # it has ended, which is seen above
                    symbols.look()
        probes.detach()
        pieces.append(probes.ring.take())
        with contextlib.suppress(OSError):
            symbols.look()
        records = [record for piece in pieces for record in RECORD.iter_unpack(piece) if begins <= record[0] <= ends]
        records.sort(key=lambda record: record[0])
        yield _Recorded(records, offset_ns, lost + probes.lost(), probes, symbols)


def _attach(probes: CallProbes, pid: int, watched: Sequence[tuple[str, ProbedCall]]) -> list[int]:
    """Watch what the libraries of the process have; once per file."""
    attached: list[int] = []
    files: dict[int, Mapping] = {}
    for mapping in mappings(pid):
        files.setdefault(mapping.inode, mapping)
    for mapping in files.values():
        name = mapping.path.rpartition("/")[2]
        calls = [(number, call) for number, (library, call) in enumerate(watched) if name.startswith(library)]
        if calls:
            attached += probes.attach(open_mapped(pid, mapping), calls)
    return attached


@contextlib.contextmanager
def _steps(pid: int) -> Iterator[Any]:
    """A function that gives how many steps the process has taken."""
    counting, attached = StepProbes(), None
    try:
        for mapping in mappings(pid):
            if mapping.path.endswith("/libtorch_cpu.so"):
                attached, _ = counting.attach(open_mapped(pid, mapping), pid)
                break
        if attached is None:
            raise OSError(
                errno.ENOENT, "a process without PyTorch has no steps that can be counted: ask for a duration"
            )

        def taken() -> int:
            marks = counting.marks().get(pid, {})
            return max((mark.number for (kind, _), mark in marks.items() if kind != LOADER), default=0)

        yield taken
    finally:
        if isinstance(attached, Uprobes):
            attached.close()
        counting.close()


class _Stacks:
    """Stacks as numbers of frames, each once."""

    def __init__(self, recorded: _Recorded, calls: Sequence[ProbedCall]) -> None:
        self.frames: list[tuple[str, str]] = []
        self.stacks: list[list[int]] = []
        self._recorded, self._calls = recorded, calls
        self._frame_numbers: dict[tuple[str, str], int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._known: dict[tuple[int, int, int], int] = {}

    def number(self, call: int, stack: int, returns_to: int) -> int:
        """The number of the stack of a call; -1 where the kernel had no room for it."""
        key = (call, stack, returns_to)
        if key not in self._known:
            self._known[key] = self._add(self._calls[call], stack, returns_to)
        return self._known[key]

    def _add(self, call: ProbedCall, stack: int, returns_to: int) -> int:
        addresses = list(self._recorded.probes.stack(stack)) if stack >= 0 else []
        name = self._recorded.symbols.name
        if call.ends:  # the stack begins where the call returned to
            names = [(self._recorded.symbols.plain(call.beginning.rstrip("\0")), "")]
        else:
            names = [name(addresses[0])] if addresses else []
            addresses = addresses[1:]
            if returns_to and addresses[:1] != [returns_to]:
                addresses.insert(0, returns_to)
        names += [name(address - 1) for address in addresses]  # the call is before the address that it returns to
        if not addresses:
            return -1
        row = tuple(self._frame_numbers.setdefault(frame, len(self._frame_numbers)) for frame in names)
        self.frames = list(self._frame_numbers)
        if row not in self._numbers:
            self._numbers[row] = len(self.stacks)
            self.stacks.append(list(row))
        return self._numbers[row]


def _started(pid: int) -> int | None:
    """When a process began, in ticks since boot; None of one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else int(fields[19])


def _write(order: Order, kind: str, lists: dict[str, Sequence[Any]], lost: int) -> None:
    """Write a document, row by row, so that its text is never held as a whole."""
    from isal import igzip

    document = {"format": kind, "version": 1, "pid": order.pid, "rank": order.rank}
    written = Path(f"{order.path}.tmp")
    with igzip.open(written, "wb", compresslevel=1) as file:
        file.write(msgspec.json.encode(document)[:-1])
        for name, rows in lists.items():
            file.write(b',"%b":[' % name.encode())
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                text = msgspec.json.encode(rows[start : start + _ROWS_AT_ONCE])
                file.write(b"," * (start > 0) + text[1:-1])
            file.write(b"]")
        file.write(b',"lost":%d}' % lost)
    written.replace(order.path)
