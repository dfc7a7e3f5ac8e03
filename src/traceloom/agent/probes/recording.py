"""Records allocations and launches of one process by probes, into a file; runs in a worker."""

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

from traceloom.agent.probes.calls import (
    RECORD,
    CallProbes,
    CallStacks,
    CallValue,
    ProbedCall,
    explain_unsupported,
)
from traceloom.agent.probes.steps import LOADER, StepProbes
from traceloom.agent.probes.symbols import Symbols
from traceloom.system.elf import Mapping, open_mapped, read_mappings
from traceloom.system.python_frames import PythonFrames

_RING_POLL_S = 0.02  # the ring has room for the records of this time
_LIBRARY_REFRESH_S = 1.0
_MAX_RECORDS = 3_000_000
_MAX_DURATION_S = 3600.0
_BATCH_ROWS = 10_000
_MAX_PLAUSIBLE_VALUE = 1 << 62  # bytes and addresses
# c10::DeviceType by value
_DEVICE_TYPES = {
    0: "cpu",
    1: "cuda",
    2: "mkldnn",
    3: "opengl",
    4: "opencl",
    5: "ideep",
    6: "hip",
    7: "fpga",
    8: "maia",
    9: "xla",
    10: "vulkan",
    11: "metal",
    12: "xpu",
    13: "mps",
    14: "meta",
    15: "hpu",
    16: "ve",
    17: "lazy",
    18: "ipu",
    19: "mtia",
    20: "privateuseone",
}

_SECOND_ARGUMENT = (CallValue(argument=1),)
_FIRST_ARGUMENT = (CallValue(argument=0),)
_REPORT_MEMORY_USAGE, _ALLOCATE_CPU, _FREE_CPU = range(3)
_CUDA_MEMORY, _PINNED_MEMORY = "cuda", "pinned"


class RecordingSpec(msgspec.Struct, frozen=True):
    """The process to record (with its start time), the window (see `Window`), and the file."""

    pid: int
    start_ticks: int
    rank: int | None
    start_ns: int
    duration_s: float | None
    steps: int | None
    path: str


class _MemoryFunction(NamedTuple):
    """A function that allocates or frees: the prefix of its library's file name, and the device."""

    library: str
    device: str
    is_free: bool
    call: ProbedCall


_CUDA_RUNTIME_LIBRARY, _CUDA_DRIVER_LIBRARY, _HIP_LIBRARY = (
    "libcudart.so",
    "libcuda.so",
    "libamdhip64.so",
)
_GPU_LIBRARIES = (
    _CUDA_RUNTIME_LIBRARY,
    _CUDA_DRIVER_LIBRARY,
    _HIP_LIBRARY,
)  # their calls of each other are internal


def _define_allocators(library: str, device: str, *names: str) -> Iterator[_MemoryFunction]:
    for name in names:
        call = ProbedCall(f"{name}\0", _SECOND_ARGUMENT, pointer=0, stacks=True, own=True)
        yield _MemoryFunction(library, device, False, call)


def _define_frees(library: str, device: str, *names: str) -> Iterator[_MemoryFunction]:
    for name in names:
        yield _MemoryFunction(
            library, device, True, ProbedCall(f"{name}\0", _FIRST_ARGUMENT, own=True)
        )


# The symbol of a C++ function includes its arguments' types, so that a changed signature is not
# found instead of being misread.
_MEMORY_FUNCTIONS = (
    _MemoryFunction(
        "libc10.so",
        "",
        False,
        ProbedCall(
            "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE\0",
            (*(CallValue(argument=index) for index in range(4)), CallValue(argument=4, size=2)),
            stacks=True,
        ),
    ),
    _MemoryFunction(
        "libc10.so",
        "cpu",
        False,
        ProbedCall("_ZN3c109alloc_cpuEm\0", _FIRST_ARGUMENT, pointer=-1, stacks=True),
    ),
    _MemoryFunction("libc10.so", "cpu", True, ProbedCall("_ZN3c108free_cpuEPv\0", _FIRST_ARGUMENT)),
    *_define_allocators(
        _CUDA_RUNTIME_LIBRARY,
        _CUDA_MEMORY,
        "cudaMalloc",
        "cudaMallocAsync",
        "cudaMallocFromPoolAsync",
        "cudaMallocManaged",
    ),
    *_define_frees(_CUDA_RUNTIME_LIBRARY, _CUDA_MEMORY, "cudaFree", "cudaFreeAsync"),
    *_define_allocators(_CUDA_RUNTIME_LIBRARY, _PINNED_MEMORY, "cudaHostAlloc", "cudaMallocHost"),
    *_define_frees(_CUDA_RUNTIME_LIBRARY, _PINNED_MEMORY, "cudaFreeHost"),
    *_define_allocators(
        _CUDA_DRIVER_LIBRARY,
        _CUDA_MEMORY,
        "cuMemAlloc_v2",
        "cuMemAllocAsync",
        "cuMemAllocFromPoolAsync",
        "cuMemAllocManaged",
        "cuMemCreate",
    ),
    *_define_frees(
        _CUDA_DRIVER_LIBRARY, _CUDA_MEMORY, "cuMemFree_v2", "cuMemFreeAsync", "cuMemRelease"
    ),
    *_define_allocators(
        _CUDA_DRIVER_LIBRARY, _PINNED_MEMORY, "cuMemHostAlloc", "cuMemAllocHost_v2"
    ),
    *_define_frees(_CUDA_DRIVER_LIBRARY, _PINNED_MEMORY, "cuMemFreeHost"),
    *_define_allocators(_HIP_LIBRARY, "hip", "hipMalloc", "hipMallocAsync"),
    *_define_frees(_HIP_LIBRARY, "hip", "hipFree", "hipFreeAsync"),
)

# Values of a launch: function or graph; x and y of the grid, z; x and y of the block, z; stream.
_RUNTIME_LAUNCH_VALUES = {  # dim3 in two registers: x and y, then z
    "x86_64": (
        CallValue(argument=0),
        CallValue(argument=1),
        CallValue(argument=2, size=4),
        CallValue(argument=3),
        CallValue(argument=4, size=4),
        CallValue(above=16),
    ),
    "aarch64": (
        CallValue(argument=0),
        CallValue(argument=1),
        CallValue(argument=2, size=4),
        CallValue(argument=3),
        CallValue(argument=4, size=4),
        CallValue(argument=7),
    ),
}
_DRIVER_GRID_VALUES = (
    CallValue(argument=0),
    CallValue(argument=1, size=4),
    CallValue(argument=2, size=4, upper=True),
    CallValue(argument=3, size=4),
    CallValue(argument=4, size=4),
    CallValue(argument=5, size=4, upper=True),
)
_DRIVER_LAUNCH_VALUES = {
    "x86_64": (*_DRIVER_GRID_VALUES, CallValue(above=8, size=4), CallValue(above=24)),
    "aarch64": (*_DRIVER_GRID_VALUES, CallValue(argument=6, size=4), CallValue(above=0)),
}
_LAUNCH_CONFIG_VALUES = (
    CallValue(argument=1),
    CallValue(argument=0, behind=0),
    CallValue(argument=0, behind=8, size=4),
    CallValue(argument=0, behind=12),
    CallValue(argument=0, behind=20, size=4),
    CallValue(argument=0, behind=32),
)
_GRAPH_LAUNCH_VALUES = (CallValue(argument=0), CallValue(argument=1))
_WAIT_FUNCTIONS = {
    _CUDA_RUNTIME_LIBRARY: (
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
    ),
    _CUDA_DRIVER_LIBRARY: (
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
        "cuMemcpyDtoH_v2",
        "cuMemcpyHtoD_v2",
    ),
}


class _LaunchFunction(NamedTuple):
    """A function that launches, or waits.

    `kind`: `function` has an address in value 0, `handle` a handle of the driver; `graph` has
    neither, and its stream follows.
    """

    library: str
    kind: str
    call: ProbedCall


def _define_launch(
    library: str, kind: str, name: str, values: tuple[CallValue, ...]
) -> _LaunchFunction:
    return _LaunchFunction(
        library, kind, ProbedCall(f"{name}\0", values, timed=kind == "wait", stacks=True, own=True)
    )


def _list_launches() -> tuple[_LaunchFunction, ...]:
    machine = os.uname().machine
    return (
        _define_launch(
            _CUDA_RUNTIME_LIBRARY, "function", "cudaLaunchKernel", _RUNTIME_LAUNCH_VALUES[machine]
        ),
        _define_launch(
            _CUDA_RUNTIME_LIBRARY, "function", "cudaLaunchKernelExC", _LAUNCH_CONFIG_VALUES
        ),
        _define_launch(
            _CUDA_RUNTIME_LIBRARY,
            "function",
            "cudaLaunchCooperativeKernel",
            _RUNTIME_LAUNCH_VALUES[machine],
        ),
        _define_launch(_CUDA_RUNTIME_LIBRARY, "graph", "cudaGraphLaunch", _GRAPH_LAUNCH_VALUES),
        _define_launch(
            _CUDA_DRIVER_LIBRARY, "handle", "cuLaunchKernel", _DRIVER_LAUNCH_VALUES[machine]
        ),
        _define_launch(
            _CUDA_DRIVER_LIBRARY,
            "handle",
            "cuLaunchCooperativeKernel",
            _DRIVER_LAUNCH_VALUES[machine],
        ),
        _define_launch(_CUDA_DRIVER_LIBRARY, "handle", "cuLaunchKernelEx", _LAUNCH_CONFIG_VALUES),
        _define_launch(_CUDA_DRIVER_LIBRARY, "graph", "cuGraphLaunch", _GRAPH_LAUNCH_VALUES),
        _define_launch(
            _HIP_LIBRARY, "function", "hipLaunchKernel", _RUNTIME_LAUNCH_VALUES[machine]
        ),
        *(
            _define_launch(library, "wait", name, _FIRST_ARGUMENT)
            for library, names in _WAIT_FUNCTIONS.items()
            for name in names
        ),
    )


class _Recording(NamedTuple):
    """Records by time, and the data to interpret them.

    `offset_ns`: wall clock - monotonic clock.
    """

    records: Iterable[tuple[int, ...]]
    offset_ns: int
    symbols: Symbols
    stacks: CallStacks
    python: PythonFrames | None
    counts: dict[str, Any]
    """Number of lost calls, number of calls without a stack because of the rate limit; and why
    there are no Python frames.
    """


def record_allocations(order: dict[str, Any]) -> list[str]:
    """Record allocations and frees with stacks: `traceloom-allocations`.

    Raises:
        OSError: The process has ended, has no such functions, or the kernel does not allow it.
    """
    probed_calls = [(memory.library, memory.call) for memory in _MEMORY_FUNCTIONS]
    spec = msgspec.convert(order, RecordingSpec)
    recording = _record_calls(probed_calls, spec)
    stacks = _StackTable(recording, [call for _, call in probed_calls])
    live_sizes: dict[tuple[str, int], int] = {}

    def events() -> Iterator[tuple[Any, ...]]:
        for time_ns, thread, number, stack, *values in recording.records:
            device = _MEMORY_FUNCTIONS[number].device
            totals: tuple[int | None, int | None] = (None, None)
            if number == _REPORT_MEMORY_USAGE:
                address, size, allocated, reserved, kind, _ = values
                size -= (size >> 63) << 64
                if kind & 0xFF == 0:
                    continue  # recorded at its allocation
                device = f"{_DEVICE_TYPES.get(kind & 0xFF, 'other')}:{kind >> 8 & 0x7F}"
                totals = (allocated, reserved)
            elif _MEMORY_FUNCTIONS[number].is_free:
                address = values[0]
                size = -live_sizes.pop((device, address), 0)
                if not size:
                    continue  # allocated before, or by a function that is not probed
            else:
                size, address = values[0], values[4]
                live_sizes[device, address] = size
            if address >= _MAX_PLAUSIBLE_VALUE or size >= _MAX_PLAUSIBLE_VALUE:
                continue  # no allocator returns these: the process has forged them
            yield (
                time_ns + recording.offset_ns,
                thread & 0xFFFFFFFF,
                address,
                size,
                device,
                stacks.number(number, stack) if size > 0 else -1,
                *totals,
            )

    _write_recording(
        spec,
        "traceloom-allocations",
        {"events": events(), "frames": stacks.frames, "stacks": stacks.stacks},
        recording.counts,
    )
    return [spec.path]


def record_launches(order: dict[str, Any]) -> list[str]:
    """Record launches of kernels and graphs, and the time that the host waited for devices:
    `traceloom-launches`.

    Raises:
        OSError: The process has ended, has no such functions, or the kernel does not allow it.
    """
    launch_functions = _list_launches()
    probed_calls = [(launch.library, launch.call) for launch in launch_functions]
    spec = msgspec.convert(order, RecordingSpec)
    recording = _record_calls(probed_calls, spec)
    stacks = _StackTable(recording, [call for _, call in probed_calls])
    durations = []

    def events() -> Iterator[tuple[Any, ...]]:
        for time_ns, thread, number, stack, *values in recording.records:
            launch, thread_id, row = (
                launch_functions[number],
                thread & 0xFFFFFFFF,
                stacks.number(number, stack),
            )
            launched_frame = (launch.call.beginning.rstrip("\0"), launch.library, 0)
            if launch.kind == "wait":
                start_ns = values[5]
                durations.append(
                    (
                        start_ns + recording.offset_ns,
                        thread_id,
                        stacks.frame(launched_frame),
                        time_ns - start_ns,
                        row,
                    )
                )
                continue
            if launch.kind == "graph":
                grid, block, stream = [0, 0, 0], [0, 0, 0], values[1]
            else:
                launched_frame = (
                    (*recording.symbols.name(values[0]), 0)
                    if launch.kind == "function"
                    else launched_frame
                )
                grid = [values[1] & 0xFFFFFFFF, values[1] >> 32, values[2]]
                block = [values[3] & 0xFFFFFFFF, values[3] >> 32, values[4]]
                stream = values[5]
            yield (
                time_ns + recording.offset_ns,
                thread_id,
                stacks.frame(launched_frame),
                grid,
                block,
                stream,
                row,
            )

    _write_recording(
        spec,
        "traceloom-launches",
        {
            "events": events(),
            "durations": durations,
            "frames": stacks.frames,
            "stacks": stacks.stacks,
        },
        recording.counts,
    )
    return [spec.path]


def _record_calls(
    probed_calls: Sequence[tuple[str, ProbedCall]], spec: RecordingSpec
) -> _Recording:
    """Probe the process for the window.

    Nothing is closed here: the worker ends after its task, and the kernel removes the probes. Each
    of some thirty probes takes a tenth of a second or more, as it waits for all CPUs, and the
    result need not wait for that.
    """
    reason, hint = explain_unsupported()
    if reason:
        raise OSError(errno.EPERM, f"{reason}; {hint}" if hint else reason)
    pid, steps = spec.pid, spec.steps
    identity = _identify_process(pid)
    if identity is None or identity[0] != spec.start_ticks:
        raise OSError(errno.ESRCH, "the process has ended")
    symbols = Symbols(pid)
    symbols.refresh()
    python, without_python = None, None
    try:
        python = PythonFrames(pid)
    except OSError as error:
        without_python = None if error.errno == errno.ENOENT else error.strerror
    stacks = CallStacks(pid, symbols, python)
    stacks.refresh()
    probes = CallProbes(pid, stacks)
    count_steps = _create_step_counter(pid) if steps is not None else None
    offset_ns = time.time_ns() - time.monotonic_ns()
    libraries = _LibraryProbes(probes, pid, probed_calls)
    if not libraries.attach():
        names = ", ".join(dict.fromkeys(library for library, _ in probed_calls))
        raise OSError(
            errno.ENOENT, f"the process has none of the functions that are watched (of {names})"
        )
    start_ns = max(spec.start_ns - offset_ns, time.monotonic_ns())  # when all probes are attached
    chunks: list[bytes] = []
    kept_bytes, dropped_records, refreshed_at = 0, 0, time.monotonic()
    lost_before, stackless_before = probes.lost(), stacks.refused()
    steps_before = count_steps() if count_steps is not None else 0
    end_ns = start_ns + round(min(spec.duration_s or _MAX_DURATION_S, _MAX_DURATION_S) * 1e9)
    while (now := time.monotonic_ns()) < end_ns and _identify_process(pid) == identity:
        time.sleep(min(_RING_POLL_S, (end_ns - now) / 1e9))
        chunk = probes.ring.take()
        stacks.take()
        stacks.refresh()
        if now < start_ns:
            steps_before = count_steps() if count_steps is not None else 0
            lost_before, stackless_before = probes.lost(), stacks.refused()
            continue
        if kept_bytes >= _MAX_RECORDS * RECORD.size:
            dropped_records += len(chunk) // RECORD.size
        else:
            chunks.append(chunk)
            kept_bytes += len(chunk)
        # The step in progress at the start does not count.
        if steps is not None and count_steps is not None and count_steps() - steps_before > steps:
            end_ns = time.monotonic_ns()
            break
        if (
            time.monotonic() - refreshed_at > _LIBRARY_REFRESH_S
            and _identify_process(pid) == identity
        ):
            refreshed_at = time.monotonic()
            with contextlib.suppress(OSError):  # it has ended, which is detected above
                symbols.refresh()
                libraries.attach()
    counts = {
        "lost": dropped_records + probes.lost() - lost_before,
        "without_stack": stacks.refused() - stackless_before,
        "without_python": without_python,
    }
    chunks.append(probes.ring.take())
    if _identify_process(pid) == identity:
        with contextlib.suppress(OSError):
            symbols.refresh()
    stacks.take()
    return _Recording(
        _iterate_records(chunks, start_ns, end_ns), offset_ns, symbols, stacks, python, counts
    )


def _iterate_records(chunks: list[bytes], start_ns: int, end_ns: int) -> Iterator[tuple[int, ...]]:
    """Yields the records of a window by time; few of them are unpacked at once."""
    import numpy as np

    content = b"".join(chunks)
    chunks.clear()
    table = np.frombuffer(content, np.dtype([("time", "<u8"), ("rest", f"V{RECORD.size - 8}")]))
    order = np.argsort(table["time"], kind="stable")
    times = table["time"][order]
    order = order[np.searchsorted(times, start_ns) : np.searchsorted(times, end_ns, "right")]
    for start in range(0, order.size, _BATCH_ROWS):
        yield from RECORD.iter_unpack(table[order[start : start + _BATCH_ROWS]].tobytes())


class _LibraryProbes:
    """Probes of the process's libraries, once per file; also of those loaded later."""

    def __init__(
        self, probes: CallProbes, pid: int, probed_calls: Sequence[tuple[str, ProbedCall]]
    ) -> None:
        self._probes, self._pid, self._probed_calls = probes, pid, probed_calls
        self._seen_files: set[tuple[int, str]] = set()

    def attach(self) -> list[int]:
        """Probe new libraries.

        Raises:
            OSError: The process has ended, or the kernel does not allow it.
        """
        attached: list[int] = []
        new: dict[tuple[int, str], Mapping] = {}
        gpu_library_ranges: list[tuple[int, int]] = []
        for mapping in read_mappings(self._pid):
            new.setdefault((mapping.inode, mapping.path), mapping)
            if mapping.executable and mapping.path.rpartition("/")[2].startswith(_GPU_LIBRARIES):
                gpu_library_ranges.append((mapping.start, mapping.end))
        self._probes.set_internal_ranges(gpu_library_ranges)
        for file in new.keys() - self._seen_files:
            self._seen_files.add(file)
            name = file[1].rpartition("/")[2]
            calls = [
                (number, call)
                for number, (library, call) in enumerate(self._probed_calls)
                if name.startswith(library)
            ]
            if calls:
                attached += self._probes.attach(open_mapped(self._pid, new[file]), calls)
        return attached


def _create_step_counter(pid: int) -> Callable[[], int]:
    library = next(
        (mapping for mapping in read_mappings(pid) if mapping.path.endswith("/libtorch_cpu.so")),
        None,
    )
    if library is None:
        raise OSError(
            errno.ENOENT,
            "a process without PyTorch has no steps that can be counted: ask for a duration",
        )
    step_probes = StepProbes()
    step_probes.attach(open_mapped(pid, library), pid)

    def taken() -> int:
        marks = step_probes.marks().get(pid, {})
        return max((mark.number for (kind, _), mark in marks.items() if kind != LOADER), default=0)

    return taken


_Frame = tuple[str, str, int]


class _StackTable:
    """Deduplicated stacks as numbers of frames. A frame: function, file, line; line 0: of a
    library.
    """

    def __init__(self, recording: _Recording, calls: Sequence[ProbedCall]) -> None:
        self.frames: dict[_Frame, int] = {}
        self.stacks: list[list[int]] = []
        self._recording, self._calls = recording, calls
        self._stack_indices: dict[tuple[int, ...], int] = {}
        self._indices_by_call: dict[tuple[int, int], int] = {}

    def number(self, call: int, stack: int) -> int:
        """Returns the number of the stack of a call; -1 if it has none."""
        key = (call, stack)
        if key in self._indices_by_call:
            return self._indices_by_call[key]
        call_stack = self._recording.stacks.stacks.get(stack)
        if call_stack is None:
            self._indices_by_call[key] = -1
            return -1
        symbols, python = self._recording.symbols, self._recording.python
        frames: list[_Frame] = [(symbols.plain(self._calls[call].beginning.rstrip("\0")), "", 0)]
        for address in call_stack.native:
            if python is not None and call_stack.python and symbols.lies_in(address, python.file):
                break  # the interpreter's functions are replaced by the Python frames that follow
            frames.append((*symbols.name(address - 1), 0))  # the call is before the return address
        if python is not None:
            frames += [
                frame
                for python_frame in call_stack.python
                if (frame := python.describe(*python_frame)) is not None
            ]
        row = tuple(self.frame(frame) for frame in frames)
        if row not in self._stack_indices:
            self._stack_indices[row] = len(self.stacks)
            self.stacks.append(list(row))
        self._indices_by_call[key] = self._stack_indices[row]
        return self._indices_by_call[key]

    def frame(self, frame: _Frame) -> int:
        """Returns the number of a frame."""
        return self.frames.setdefault(frame, len(self.frames))


def _identify_process(pid: int) -> tuple[int, int] | None:
    """Returns a process's start time in ticks since boot, and the start of its stack, which differs
    for each program that it executes; None if it has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {b"Z", b"X"} else (int(fields[19]), int(fields[25]))


def _write_recording(
    spec: RecordingSpec, format_name: str, lists: dict[str, Iterable[Any]], counts: dict[str, Any]
) -> None:
    """Write a document, list by list and row by row, so that it is never in memory as a whole."""
    from isal import igzip

    document = {"format": format_name, "version": 1, "pid": spec.pid, "rank": spec.rank}
    temporary_path = Path(f"{spec.path}.tmp")
    with igzip.open(temporary_path, "wb", compresslevel=1) as file:
        file.write(msgspec.json.encode(document)[:-1])
        for name, rows in lists.items():
            file.write(b',"%b":[' % name.encode())
            separator, remaining = b"", iter(rows)
            while batch := list(itertools.islice(remaining, _BATCH_ROWS)):
                file.write(separator + msgspec.json.encode(batch)[1:-1])
                separator = b","
            file.write(b"]")
        file.write(b"," + msgspec.json.encode(counts)[1:])
    temporary_path.replace(spec.path)
