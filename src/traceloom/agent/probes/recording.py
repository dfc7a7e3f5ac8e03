"""Allocations and launches of one process, recorded by probes into a file; runs in a worker."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from traceloom.agent.probes.call_stacks import CallStacks
from traceloom.agent.probes.calls import RECORD, CallProbes, ProbedCall, Value, unsupported
from traceloom.agent.probes.elf import Mapping, mappings, open_mapped
from traceloom.agent.probes.python_frames import PythonFrames
from traceloom.agent.probes.steps import LOADER, StepProbes
from traceloom.agent.probes.symbols import Symbols

_PAUSE_S = 0.02  # the ring holds what comes in it
_LOOK_S = 1.0
_MOST_RECORDS = 3_000_000
_MOST_S = 3600.0
_ROWS_AT_ONCE = 10_000
_LARGEST = 1 << 62  # bytes and addresses
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


_RUNTIME, _CUDA_DRIVER, _HIP = "libcudart.so", "libcuda.so", "libamdhip64.so"
_DRIVERS = (_RUNTIME, _CUDA_DRIVER, _HIP)  # what they call of each other, nobody else has called


def _allocates(library: str, device: str, *names: str) -> Iterator[_Memory]:
    for name in names:
        call = ProbedCall(f"{name}\0", _SIZE_SECOND, pointer=0, stacks=True, own=True)
        yield _Memory(library, device, False, call)


def _frees(library: str, device: str, *names: str) -> Iterator[_Memory]:
    for name in names:
        yield _Memory(library, device, True, ProbedCall(f"{name}\0", _ADDRESS_FIRST, own=True))


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
    *_allocates(_RUNTIME, _DRIVER, "cudaMalloc", "cudaMallocAsync", "cudaMallocFromPoolAsync", "cudaMallocManaged"),
    *_frees(_RUNTIME, _DRIVER, "cudaFree", "cudaFreeAsync"),
    *_allocates(_RUNTIME, _PINNED, "cudaHostAlloc", "cudaMallocHost"), *_frees(_RUNTIME, _PINNED, "cudaFreeHost"),
    *_allocates(
        _CUDA_DRIVER, _DRIVER,
        "cuMemAlloc_v2", "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemAllocManaged", "cuMemCreate",
    ),
    *_frees(_CUDA_DRIVER, _DRIVER, "cuMemFree_v2", "cuMemFreeAsync", "cuMemRelease"),
    *_allocates(_CUDA_DRIVER, _PINNED, "cuMemHostAlloc", "cuMemAllocHost_v2"),
    *_frees(_CUDA_DRIVER, _PINNED, "cuMemFreeHost"),
    *_allocates(_HIP, "hip", "hipMalloc", "hipMallocAsync"), *_frees(_HIP, "hip", "hipFree", "hipFreeAsync"),
)  # fmt: skip

# Values of a launch: the function, or the graph; x and y of the grid, z; x and y of the block, z; the stream.
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
_ONE_BY_ONE = (
    Value(argument=0), Value(argument=1, size=4), Value(argument=2, size=4, upper=True), Value(argument=3, size=4),
    Value(argument=4, size=4), Value(argument=5, size=4, upper=True),
)  # fmt: skip
_DRIVERS_OWN = {
    "x86_64": (*_ONE_BY_ONE, Value(above=8, size=4), Value(above=24)),
    "aarch64": (*_ONE_BY_ONE, Value(argument=6, size=4), Value(above=0)),
}
_LAUNCH_OF_CONFIG = (
    Value(argument=1), Value(argument=0, behind=0), Value(argument=0, behind=8, size=4), Value(argument=0, behind=12),
    Value(argument=0, behind=20, size=4), Value(argument=0, behind=32),
)  # fmt: skip
_GRAPH = (Value(argument=0), Value(argument=1))
_WAITS = {
    _RUNTIME: ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    _CUDA_DRIVER: (
        "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2",
    ),
}  # fmt: skip


class _Launch(NamedTuple):
    """A function that launches, or waits.

    `kind`: `function` has an address in value 0, `handle` one of the driver's, `graph` has none and its stream next.
    """

    library: str
    kind: str
    call: ProbedCall


def _launch(library: str, kind: str, name: str, values: tuple[Value, ...]) -> _Launch:
    return _Launch(library, kind, ProbedCall(f"{name}\0", values, timed=kind == "wait", stacks=True, own=True))


def _launches() -> tuple[_Launch, ...]:
    machine = os.uname().machine
    return (
        _launch(_RUNTIME, "function", "cudaLaunchKernel", _BY_VALUE[machine]),
        _launch(_RUNTIME, "function", "cudaLaunchKernelExC", _LAUNCH_OF_CONFIG),
        _launch(_RUNTIME, "function", "cudaLaunchCooperativeKernel", _BY_VALUE[machine]),
        _launch(_RUNTIME, "graph", "cudaGraphLaunch", _GRAPH),
        _launch(_CUDA_DRIVER, "handle", "cuLaunchKernel", _DRIVERS_OWN[machine]),
        _launch(_CUDA_DRIVER, "handle", "cuLaunchCooperativeKernel", _DRIVERS_OWN[machine]),
        _launch(_CUDA_DRIVER, "handle", "cuLaunchKernelEx", _LAUNCH_OF_CONFIG),
        _launch(_CUDA_DRIVER, "graph", "cuGraphLaunch", _GRAPH),
        _launch(_HIP, "function", "hipLaunchKernel", _BY_VALUE[machine]),
        *(_launch(library, "wait", name, _ADDRESS_FIRST) for library, names in _WAITS.items() for name in names),
    )


class _Recorded(NamedTuple):
    """Records by time, and what is needed to read them. `offset_ns`: wall clock - monotonic clock."""

    records: Iterable[tuple[int, ...]]
    offset_ns: int
    symbols: Symbols
    stacks: CallStacks
    python: PythonFrames | None
    counts: dict[str, Any]
    """How many calls were lost, how many have no stack as they came too quickly; why no frame of Python is in them."""


def allocations(order: dict[str, Any]) -> list[str]:
    """Record who allocates and frees, with stacks: `traceloom-allocations`.

    Raises:
        OSError: The process has ended, has no such functions, or the kernel does not let us.
    """
    watched = [(memory.library, memory.call) for memory in _MEMORY]
    wanted = msgspec.convert(order, Order)
    recorded = _recorded(watched, wanted)
    stacks = _Stacks(recorded, [call for _, call in watched])
    live: dict[tuple[str, int], int] = {}

    def events() -> Iterator[tuple[Any, ...]]:
        for time_ns, thread, number, stack, *values in recorded.records:
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
            if address >= _LARGEST or size >= _LARGEST:
                continue  # no allocator gives these: the process made them up
            row = stacks.number(number, stack) if size > 0 else -1
            yield time_ns + recorded.offset_ns, thread & 0xFFFFFFFF, address, size, device, row, *totals

    _write(
        wanted, "traceloom-allocations",
        {"events": events(), "frames": stacks.frames, "stacks": stacks.stacks}, recorded.counts,
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
    recorded = _recorded(watched, wanted)
    stacks = _Stacks(recorded, [call for _, call in watched])
    durations = []

    def events() -> Iterator[tuple[Any, ...]]:
        for time_ns, thread, number, stack, *values in recorded.records:
            launch, thread_id, row = table[number], thread & 0xFFFFFFFF, stacks.number(number, stack)
            own = (launch.call.beginning.rstrip("\0"), launch.library, 0)
            if launch.kind == "wait":
                began = values[5]
                durations.append((began + recorded.offset_ns, thread_id, stacks.frame(own), time_ns - began, row))
                continue
            if launch.kind == "graph":
                grid, block, stream = [0, 0, 0], [0, 0, 0], values[1]
            else:
                own = (*recorded.symbols.name(values[0]), 0) if launch.kind == "function" else own
                grid = [values[1] & 0xFFFFFFFF, values[1] >> 32, values[2]]
                block = [values[3] & 0xFFFFFFFF, values[3] >> 32, values[4]]
                stream = values[5]
            yield time_ns + recorded.offset_ns, thread_id, stacks.frame(own), grid, block, stream, row

    _write(
        wanted, "traceloom-launches",
        {"events": events(), "durations": durations, "frames": stacks.frames, "stacks": stacks.stacks},
        recorded.counts,
    )  # fmt: skip
    return [wanted.path]


def _recorded(watched: Sequence[tuple[str, ProbedCall]], order: Order) -> _Recorded:
    """Probe the process for as long as is asked.

    Nothing is closed here: the worker ends after its task, and the kernel takes each probe away. That waits for all
    processors, a tenth of a second and more for each of some thirty probes, and the result need not wait for it.
    """
    why, helps = unsupported()
    if why:
        raise OSError(errno.EPERM, f"{why}; {helps}" if helps else why)
    pid, steps = order.pid, order.steps
    image = _image(pid)
    if image is None or image[0] != order.start_ticks:
        raise OSError(errno.ESRCH, "the process has ended")
    symbols = Symbols(pid)
    symbols.look()
    python, without_python = None, None
    try:
        python = PythonFrames(pid)
    except OSError as error:
        without_python = None if error.errno == errno.ENOENT else error.strerror
    stacks = CallStacks(pid, symbols, python)
    stacks.look()
    probes = CallProbes(pid, stacks)
    steps_taken = _steps(pid) if steps is not None else None
    offset_ns = time.time_ns() - time.monotonic_ns()
    libraries = _Libraries(probes, pid, watched)
    if not libraries.attach():
        names = ", ".join(dict.fromkeys(library for library, _ in watched))
        raise OSError(errno.ENOENT, f"the process has none of the functions that are watched (of {names})")
    begins = max(order.start_ns - offset_ns, time.monotonic_ns())  # when all of them are watched
    pieces: list[bytes] = []
    held, beyond, looked = 0, 0, time.monotonic()
    lost, refused = probes.lost(), stacks.refused()
    steps_before = steps_taken() if steps_taken is not None else 0
    seconds = min(order.duration_s or _MOST_S, _MOST_S)
    ends = begins + round(seconds * 1e9)
    while (now := time.monotonic_ns()) < ends and _image(pid) == image:
        time.sleep(min(_PAUSE_S, (ends - now) / 1e9))
        piece = probes.ring.take()
        stacks.take()
        stacks.look()
        if now < begins:
            steps_before = steps_taken() if steps_taken is not None else 0
            lost, refused = probes.lost(), stacks.refused()
            continue
        if held >= _MOST_RECORDS * RECORD.size:
            beyond += len(piece) // RECORD.size
        else:
            pieces.append(piece)
            held += len(piece)
        # The step that runs when it begins is none of them.
        if steps is not None and steps_taken is not None and steps_taken() - steps_before > steps:
            ends = time.monotonic_ns()
            break
        if time.monotonic() - looked > _LOOK_S and _image(pid) == image:
            looked = time.monotonic()
            with contextlib.suppress(OSError):  # it has ended, which is seen above
                symbols.look()
                libraries.attach()
    counts = {
        "lost": beyond + probes.lost() - lost, "without_stack": stacks.refused() - refused,
        "without_python": without_python,
    }  # fmt: skip
    pieces.append(probes.ring.take())
    if _image(pid) == image:
        with contextlib.suppress(OSError):
            symbols.look()
    stacks.take()
    return _Recorded(_by_time(pieces, begins, ends), offset_ns, symbols, stacks, python, counts)


def _by_time(pieces: list[bytes], begins: int, ends: int) -> Iterator[tuple[int, ...]]:
    """The records of a window by time; few of them are ever unpacked at once."""
    import numpy as np

    content = b"".join(pieces)
    pieces.clear()
    table = np.frombuffer(content, np.dtype([("time", "<u8"), ("rest", f"V{RECORD.size - 8}")]))
    order = np.argsort(table["time"], kind="stable")
    times = table["time"][order]
    order = order[np.searchsorted(times, begins) : np.searchsorted(times, ends, "right")]
    for start in range(0, order.size, _ROWS_AT_ONCE):
        yield from RECORD.iter_unpack(table[order[start : start + _ROWS_AT_ONCE]].tobytes())


class _Libraries:
    """The libraries of the process whose functions are watched, once per file; also those that it loads later."""

    def __init__(self, probes: CallProbes, pid: int, watched: Sequence[tuple[str, ProbedCall]]) -> None:
        self._probes, self._pid, self._watched = probes, pid, watched
        self._looked: set[tuple[int, str]] = set()

    def attach(self) -> list[int]:
        """Watch what is new.

        Raises:
            OSError: The process has ended, or the kernel does not let us.
        """
        attached: list[int] = []
        new: dict[tuple[int, str], Mapping] = {}
        drivers: list[tuple[int, int]] = []
        for mapping in mappings(self._pid):
            new.setdefault((mapping.inode, mapping.path), mapping)
            if mapping.executable and mapping.path.rpartition("/")[2].startswith(_DRIVERS):
                drivers.append((mapping.start, mapping.end))
        self._probes.drivers(drivers)
        for file in new.keys() - self._looked:
            self._looked.add(file)
            name = file[1].rpartition("/")[2]
            calls = [(number, call) for number, (library, call) in enumerate(self._watched) if name.startswith(library)]
            if calls:
                attached += self._probes.attach(open_mapped(self._pid, new[file]), calls)
        return attached


def _steps(pid: int) -> Callable[[], int]:
    """A function that gives how many steps the process has taken."""
    library = next((mapping for mapping in mappings(pid) if mapping.path.endswith("/libtorch_cpu.so")), None)
    if library is None:
        raise OSError(errno.ENOENT, "a process without PyTorch has no steps that can be counted: ask for a duration")
    counting = StepProbes()
    counting.attach(open_mapped(pid, library), pid)

    def taken() -> int:
        marks = counting.marks().get(pid, {})
        return max((mark.number for (kind, _), mark in marks.items() if kind != LOADER), default=0)

    return taken


_Frame = tuple[str, str, int]


class _Stacks:
    """Stacks as numbers of frames, each once. A frame: function, file, line; 0: of a library."""

    def __init__(self, recorded: _Recorded, calls: Sequence[ProbedCall]) -> None:
        self.frames: dict[_Frame, int] = {}
        self.stacks: list[list[int]] = []
        self._recorded, self._calls = recorded, calls
        self._numbers: dict[tuple[int, ...], int] = {}
        self._known: dict[tuple[int, int], int] = {}

    def number(self, call: int, stack: int) -> int:
        """The number of the stack of a call; -1 where none was taken."""
        key = (call, stack)
        if key in self._known:
            return self._known[key]
        taken = self._recorded.stacks.stacks.get(stack)
        if taken is None:
            self._known[key] = -1
            return -1
        symbols, python = self._recorded.symbols, self._recorded.python
        frames: list[_Frame] = [(symbols.plain(self._calls[call].beginning.rstrip("\0")), "", 0)]
        for address in taken.native:
            if python is not None and taken.python and symbols.lies_in(address, python.file):
                break  # its functions stand for those of Python, which follow
            frames.append((*symbols.name(address - 1), 0))  # the call is before the address that it returns to
        if python is not None:
            frames += [frame for seen in taken.python if (frame := python.describe(*seen)) is not None]
        row = tuple(self.frame(frame) for frame in frames)
        if row not in self._numbers:
            self._numbers[row] = len(self.stacks)
            self.stacks.append(list(row))
        self._known[key] = self._numbers[row]
        return self._known[key]

    def frame(self, frame: _Frame) -> int:
        """The number of a frame."""
        return self.frames.setdefault(frame, len(self.frames))


def _image(pid: int) -> tuple[int, int] | None:
    """When a process began, in ticks since boot, and where its stack does, which is elsewhere in each program that it
    executes; None of one that has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else (int(fields[19]), int(fields[25]))


def _write(order: Order, kind: str, lists: dict[str, Iterable[Any]], counts: dict[str, Any]) -> None:
    """Write a document, list by list and row by row, so that it is never held as a whole."""
    from isal import igzip

    document = {"format": kind, "version": 1, "pid": order.pid, "rank": order.rank}
    written = Path(f"{order.path}.tmp")
    with igzip.open(written, "wb", compresslevel=1) as file:
        file.write(msgspec.json.encode(document)[:-1])
        for name, rows in lists.items():
            file.write(b',"%b":[' % name.encode())
            several, remaining = b"", iter(rows)
            while part := list(itertools.islice(remaining, _ROWS_AT_ONCE)):
                file.write(several + msgspec.json.encode(part)[1:-1])
                several = b","
            file.write(b"]")
        file.write(b"," + msgspec.json.encode(counts)[1:])
    written.replace(order.path)
