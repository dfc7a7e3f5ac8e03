"""Allocations and launches of programs that nobody prepared, against what they do."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.probes import compiled, needs_compiler, needs_probes
from support.waiting import until
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.profilers.base import (
    AllocationsProfiler,
    LaunchesProfiler,
    ProfilerError,
    Window,
)
from traceloom.cli import main
from traceloom.system.elf import Elf, read_mappings

RUNTIME = """
#include <stdlib.h>
#include <time.h>
typedef struct { unsigned x, y, z; } dim3;
typedef struct { dim3 grid, block; size_t shared; void *stream; void *attributes; unsigned number; } Config;
int cudaMalloc(void **pointer, size_t size) {
    if (size > 1 << 20) return 2;
    *pointer = malloc(size);
    return 0;
}
int cudaFree(void *pointer) { free(pointer); return 0; }
int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return grid.x + block.x == 0;
}
int cudaLaunchKernelExC(const Config *config, const void *function, void **arguments) { return config->number; }
int cudaGraphLaunch(void *graph, void *stream) { return 0; }
int cudaStreamSynchronize(void *stream) {
    struct timespec wait = {0, 30000000};
    return nanosleep(&wait, 0);
}
"""
# Each line of its input is a round; it says when it has done it.
PROGRAM = """
#include <stdio.h>
typedef struct { unsigned x, y, z; } dim3;
typedef struct { dim3 grid, block; size_t shared; void *stream; void *attributes; unsigned number; } Config;
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *);
int cudaLaunchKernelExC(const Config *, const void *, void **);
int cudaGraphLaunch(void *, void *);
int cudaStreamSynchronize(void *);
static int calls;
int softmax_kernel(void) { return ++calls; }
int gemm_kernel(void) { return --calls; }
int leaky_layer(int round) { void *kept; cudaMalloc(&kept, 1000 + round); return ++calls; }
int sound_layer(void) { void *used; cudaMalloc(&used, 5000); calls++; cudaFree(used); return ++calls; }
int greedy_layer(void) { void *none; cudaMalloc(&none, 1 << 30); return ++calls; }
int one_round(int round) {
    leaky_layer(round); sound_layer(); greedy_layer();
    dim3 grid = {7 + round, 2, 3}, block = {32, 4, 5};
    cudaLaunchKernel(softmax_kernel, grid, block, 0, 64, (void *)0x51);
    Config config = {{11, 12, 13}, {14, 15, 16}, 0, (void *)0x52, 0, 0};
    cudaLaunchKernelExC(&config, gemm_kernel, 0);
    cudaGraphLaunch((void *)0x99, (void *)0x53);
    cudaStreamSynchronize((void *)0x51);
    return ++calls;
}
int main(void) {
    int round = 0;
    while (getchar() != EOF) { one_round(round++); puts("done"); fflush(stdout); }
    return 0;
}
"""
ALLOCATING = """
import os, sys, threading, time, torch
kept = []
weight = torch.ones(1000, 3, requires_grad=True)
def leaky():
    kept.append(
        torch.zeros(1000, 7)
    )
def leaky_backward():
    weight.exp().sum().backward()
    weight.grad = None
print("ready", flush=True)
for line in sys.stdin:
    for number in range(20):
        leaky()
        torch.zeros(333)
    leaky_backward()
    thread = threading.Thread(target=lambda: [torch.zeros(1000, 11) for _ in range(5)])
    thread.start()
    thread.join()
    time.sleep(0.01)  # not more calls at once than stacks are taken
    print("done", flush=True)
os._exit(0)  # nothing is freed
"""


# As CUDA's runtime and its driver: the one calls the other, and so may the program.
DRIVER = """
#include <stdlib.h>
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; void *attributes; unsigned number; } Config;
int cuMemAlloc_v2(unsigned long long *pointer, size_t size) { *pointer = (unsigned long long)malloc(size); return 0; }
int cuMemAllocAsync(unsigned long long *pointer, size_t size, void *stream) { return cuMemAlloc_v2(pointer, size); }
int cuMemFree_v2(unsigned long long pointer) { free((void *)pointer); return 0; }
int cuLaunchKernel(
    void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    void *stream, void **arguments, void **extra
) { return gx + bx == 0; }
int cuLaunchKernelEx(const Config *config, void *function, void **arguments, void **extra) { return config->number; }
int cuStreamSynchronize(void *stream) { return stream == 0; }
int cuCtxSynchronize(void) { return 0; }
"""
RUNTIME_ON_DRIVER = """
#include <stddef.h>
typedef struct { unsigned x, y, z; } dim3;
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemAllocAsync(unsigned long long *, size_t, void *);
int cuMemFree_v2(unsigned long long);
int cuLaunchKernel(
    void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cuStreamSynchronize(void *);
int calls;
int cudaMalloc(void **pointer, size_t size) {
    int result = cuMemAlloc_v2((unsigned long long *)pointer, size); calls++; return result;
}
int cudaMallocAsync(void **pointer, size_t size, void *stream) {
    int result = cuMemAllocAsync((unsigned long long *)pointer, size, stream); calls++; return result;
}
int cudaFree(void *pointer) { int result = cuMemFree_v2((unsigned long long)pointer); calls++; return result; }
int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    int result = cuLaunchKernel((void *)0x77, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, 0, 0);
    calls++; return result;
}
int cudaStreamSynchronize(void *stream) { int result = cuStreamSynchronize(stream); calls++; return result; }
"""
ON_BOTH = """
#include <stddef.h>
#include <stdio.h>
typedef struct { unsigned x, y, z; } dim3;
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; void *attributes; unsigned number; } Config;
int cudaMalloc(void **, size_t); int cudaMallocAsync(void **, size_t, void *); int cudaFree(void *);
int cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, void *); int cudaStreamSynchronize(void *);
int cuMemAlloc_v2(void **, size_t); int cuMemAllocAsync(void **, size_t, void *); int cuMemFree_v2(void *);
int cuLaunchKernel(
    void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cuLaunchKernelEx(const Config *, void *, void **, void **);
int cuStreamSynchronize(void *); int cuCtxSynchronize(void);
int calls;
int kernel(void) { return ++calls; }
int by_runtime(void) {
    void *a, *b; dim3 grid = {2, 3, 4}, block = {5, 6, 7};
    cudaMalloc(&a, 1000); cudaMallocAsync(&b, 2000, (void *)0x51); cudaFree(a);
    cudaLaunchKernel(kernel, grid, block, 0, 0, (void *)0x51);
    cudaStreamSynchronize((void *)0x51);
    return ++calls;
}
int by_driver(void) {
    void *a, *b; Config config = {12, 13, 14, 15, 16, 17, 0, (void *)0x53, 0, 0};
    cuMemAlloc_v2(&a, 4000); cuMemAllocAsync(&b, 8000, (void *)0x52); cuMemFree_v2(a);
    cuLaunchKernel((void *)0x78, 22, 23, 24, 25, 26, 27, 0, (void *)0x52, 0, 0);
    cuLaunchKernelEx(&config, (void *)0x79, 0, 0);
    cuStreamSynchronize((void *)0x52); cuCtxSynchronize();
    return ++calls;
}
int main(void) {
    while (getchar() != EOF) { by_runtime(); by_driver(); puts("done"); fflush(stdout); }
    return 0;
}
"""
# Allocates by the stand-in and says where it does, as Python sees it.
SCRIPTED = """
import ctypes, json, sys, threading, traceback
runtime = ctypes.CDLL(sys.argv[1])
runtime.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
truth = []
def bottom(size):
    pointer = ctypes.c_void_p()
    truth.append([size, [[frame.name, frame.filename, frame.lineno + (not depth)]
                  for depth, frame in enumerate(reversed(traceback.extract_stack()))]])
    assert runtime.cudaMalloc(ctypes.byref(pointer), size) == 0
class Größe:
    def __getitem__(self, size):
        return [bottom(number) for number in range(size, size + 1)]
def by_sorting(size):
    sorted([size], key=lambda number: Größe()[number])  # C between Python and Python
def in_thread():
    while orders.acquire():
        Größe()[
            8000
        ]
        answers.release()
orders, answers = threading.Semaphore(0), threading.Semaphore(0)
threading.Thread(target=in_thread, daemon=True).start()
print("ready", flush=True)
for line in sys.stdin:
    truth.clear()
    by_sorting(5000)
    bottom(6000)
    orders.release(), answers.acquire()
    print(json.dumps(truth), flush=True)
    print("done", flush=True)
"""


REPORTING = """
import ctypes, itertools, sys, time
library = ctypes.CDLL(sys.argv[1])
report = library["_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"]
report.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_uint16]
def leak(number):
    report(0x7F0000100000 + 0x1000 * number, 512, 5000, 9000, 0x0101)
print("ready", flush=True)
for number, line in zip(itertools.count(), sys.stdin):
    report(0x7F0000007000, 4096, 5000, 9000, 0x0101)
    report(0x7F0000007000, -4096, 904, 9000, 0x0101)
    leak(number)
    report(0x7F0000009000, 64, 64, 64, 0xFF00)  # of the host: it is seen where it is allocated
    time.sleep(0.01)
    print("done", flush=True)
"""
STEPPING = """
import itertools, time, torch
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters())
print("ready", flush=True)
for number in itertools.count(1):
    torch.zeros(50_000 + number)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


class Talking:
    """A program that does a round for each line, and says so."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        pid, start_ticks = self.process.pid, int(fields[19])
        self.facts = Process(
            key=f"{pid}@{start_ticks}",
            pid=pid,
            start_ticks=start_ticks,
            started_ns=0,
            parent_pid=0,
            uid=0,
            command="",
            owner=Owner(rank=3),
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def round(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.line() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Talking]:
    library = compiled(RUNTIME, tmp_path / "libcudart.so.12", "-shared", "-fPIC")
    path = compiled(PROGRAM, tmp_path / "job", str(library), f"-Wl,-rpath,{tmp_path}")
    started = Talking(str(path))
    started.round()  # its libraries are loaded
    yield started
    started.end()


def record(
    profiler: Any, job: Talking, directory: Path, *functions: str, seconds: float | None = None
) -> dict[str, Any]:
    """Record five rounds of the job and more, until it ends; they begin when these functions have probes.

    With `seconds`, which begin when all functions have them, it does rounds till then and goes on.
    """

    async def recorded() -> list[Path]:
        window = Window(0, seconds or 600.0, None)
        recording = asyncio.create_task(profiler.record(job.facts, window, directory, "rank3"))
        if seconds is not None:
            while not recording.done():
                await asyncio.to_thread(job.round)
            return await recording
        await until_probed(job, recording, *functions)
        for _ in range(5):
            await asyncio.to_thread(job.round)
        job.process.stdin.close()  # type: ignore[union-attr]
        return await asyncio.wait_for(recording, 120)

    (path,) = asyncio.run(recorded())
    assert [other.name for other in directory.glob("rank3*")] == [path.name]
    document = json.loads(gzip.decompress(path.read_bytes()))
    assert (document["pid"], document["rank"], document["lost"]) == (job.process.pid, 3, 0)
    return document


async def until_probed(job: Talking, recording: asyncio.Task[Any], *functions: str) -> None:
    """Wait until the kernel's breakpoints stand in the memory of the process, where the functions begin."""
    unchanged = set(functions)
    while unchanged:
        assert not recording.done(), recording.exception()
        unchanged = {name for name in unchanged if not breakpoint_at(job.process.pid, name)}
        await asyncio.sleep(0.05)


def breakpoint_at(pid: int, name: str) -> bool:
    for mapping in read_mappings(pid):
        if mapping.executable and re.match(r"libcudart|libc10", Path(mapping.path).name):
            content = Path(mapping.path).read_bytes()
            with Path(mapping.path).open("rb") as file:
                function = Elf(file.fileno()).find(f"{name}\0")
            if function is not None:
                with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                    memory.seek(mapping.start + function.offset - mapping.offset)
                    return memory.read(4) != content[function.offset : function.offset + 4]
    raise AssertionError(f"{name} is nowhere")


@needs_probes
@needs_compiler
def test_a_planted_leak_comes_out_to_the_byte_with_its_stack(
    program: Talking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = time.time_ns()
    document = record(AllocationsProfiler(), program, tmp_path, "cudaMalloc", "cudaFree")
    events = document["events"]
    assert all(before < time_ns < time.time_ns() for time_ns, *_ in events)
    assert {(thread, device) for _, thread, _, _, device, *_ in events} == {
        (program.process.pid, "cuda")
    }
    last = (
        max(size for _, _, _, size, *_ in events if size < 5000) - 1000
    )  # the number of the last round
    held: dict[int, tuple[int, int]] = {}
    for _, _, address, size, _, stack, *_ in events:
        if size > 0:
            assert address not in held
            held[address] = (size, stack)
        else:
            assert held.pop(address)[0] == -size
    # The rounds after all probes were there are whole: each leaks its number beyond 1000, none keeps its 5000.
    sizes = sorted(size for size, _ in held.values())
    assert sizes[-5:] == [1000 + number for number in range(last - 4, last + 1)]
    assert 5000 not in sizes
    assert sum(size == 5000 for _, _, _, size, *_ in events) >= 5
    assert max(size for _, _, _, size, *_ in events) == 5000  # what failed allocated nothing
    for _, stack in held.values():
        names = [document["frames"][frame][0] for frame in document["stacks"][stack]]
        assert names[:4] == ["cudaMalloc", "leaky_layer", "one_round", "main"]
    # And as `traceloom memory` shows it: what is left at the end, by stack.
    path = str(tmp_path / "rank3.allocations.json.gz")
    assert main(["memory", path, "--by", "stack", "--at", "end", "--json", "-q"]) == 0
    (memory,) = json.loads(capsys.readouterr().out)["ranks"][0]["memories"]
    assert (memory["device_type"], memory["end_bytes"]) == ("cuda", sum(sizes))
    (part,) = memory["parts"]
    assert (part["bytes"], part["block_count"]) == (sum(sizes), len(sizes))
    assert part["name"].startswith("cudaMalloc < leaky_layer < one_round < main")
    assert main(["memory", path, "--by", "stack", "--at", "end", "-q"]) == 0
    assert "cudaMalloc < leaky_layer" in capsys.readouterr().out


@needs_probes
@needs_compiler
def test_launches_and_waits_are_those_of_the_program(program: Talking, tmp_path: Path) -> None:
    document = record(
        LaunchesProfiler(),
        program,
        tmp_path,
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cudaGraphLaunch",
        "cudaStreamSynchronize",
    )
    frames = [tuple(frame) for frame in document["frames"]]
    launched = Counter(
        (frames[frame], tuple(grid[1:]), tuple(block), stream)
        for _, _, frame, grid, block, stream, _ in document["events"]
    )
    assert set(launched) == {
        (("softmax_kernel", "job", 0), (2, 3), (32, 4, 5), 0x51),
        (("gemm_kernel", "job", 0), (12, 13), (14, 15, 16), 0x52),
        (("cudaGraphLaunch", "libcudart.so", 0), (0, 0), (0, 0, 0), 0x53),
    }
    assert min(launched.values()) >= 5
    numbers = [
        grid[0]
        for _, _, frame, grid, *_ in document["events"]
        if frames[frame][0] == "softmax_kernel"
    ]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    for *_, stack in document["events"] + document["durations"]:
        names = [document["frames"][frame][0] for frame in document["stacks"][stack]]
        assert names[1:3] == ["one_round", "main"]
    waits = [(frames[frame][0], duration) for _, _, frame, duration, _ in document["durations"]]
    assert len(waits) >= 5
    assert all(
        name == "cudaStreamSynchronize" and duration >= 30_000_000 for name, duration in waits
    )


@pytest.fixture
def on_both(tmp_path: Path) -> Iterator[Talking]:
    driver = compiled(DRIVER, tmp_path / "libcuda.so.1", "-shared", "-fPIC")
    runtime = compiled(
        RUNTIME_ON_DRIVER, tmp_path / "libcudart.so.12", "-shared", "-fPIC", str(driver)
    )
    path = compiled(ON_BOTH, tmp_path / "job", str(runtime), str(driver), f"-Wl,-rpath,{tmp_path}")
    started = Talking(str(path))
    started.round()
    yield started
    started.end()


def rounds(events: list[Any]) -> list[list[Any]]:
    """Events by round, each of which begins with the first of the program's; without the first and the last."""
    starts = [number for number, event in enumerate(events) if event == events[0]]
    return [events[start:end] for start, end in pairwise(starts)][1:]


@needs_probes
@needs_compiler
def test_a_call_by_way_of_the_runtime_counts_once_and_one_of_the_driver_counts(
    on_both: Talking, tmp_path: Path
) -> None:
    document = record(AllocationsProfiler(), on_both, tmp_path, seconds=0.5)
    sizes = [(size, device) for _, _, _, size, device, *_ in document["events"]]
    begins = sizes.index((1000, "cuda"))
    whole = rounds(sizes[begins:])
    assert len(whole) >= 5
    expected = [1000, 2000, -1000, 4000, 8000, -4000]
    assert [events for events in whole if events != [(size, "cuda") for size in expected]] == []
    named = {
        size: [document["frames"][frame][0] for frame in document["stacks"][stack]][:2]
        for _, _, _, size, _, stack, *_ in document["events"]
        if stack >= 0
    }
    assert named == {
        1000: ["cudaMalloc", "by_runtime"],
        2000: ["cudaMallocAsync", "by_runtime"],
        4000: ["cuMemAlloc_v2", "by_driver"],
        8000: ["cuMemAllocAsync", "by_driver"],
    }


@needs_probes
@needs_compiler
def test_launches_of_the_driver_are_seen_beside_those_of_the_runtime(
    on_both: Talking, tmp_path: Path
) -> None:
    document = record(LaunchesProfiler(), on_both, tmp_path, seconds=0.5)
    names = [frame[0] for frame in document["frames"]]
    launched = [
        (names[frame], grid, block, stream)
        for _, _, frame, grid, block, stream, _ in document["events"]
    ]
    first = ("kernel", [2, 3, 4], [5, 6, 7], 0x51)
    whole = rounds(launched[launched.index(first) :])
    assert len(whole) >= 5
    round_of = [
        first,
        ("cuLaunchKernel", [22, 23, 24], [25, 26, 27], 0x52),
        ("cuLaunchKernelEx", [12, 13, 14], [15, 16, 17], 0x53),
    ]
    assert all(events == round_of for events in whole)
    waited = [names[frame] for _, _, frame, *_ in document["durations"]]
    whole = rounds(waited[waited.index("cudaStreamSynchronize") :])
    assert all(
        calls == ["cudaStreamSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"]
        for calls in whole
    )


def interpreter(version: str) -> str:
    """A Python of this version on this machine; "" for none."""
    beside = Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")
    for path in (shutil.which(f"python{version}"), *(str(path) for path in sorted(beside))):
        if path is not None:
            asked = subprocess.run([path, "-c", "import ctypes"], capture_output=True, check=False)
            if asked.returncode == 0:
                return path
    return ""


@pytest.mark.sampled(1)
@needs_probes
@needs_compiler
@pytest.mark.parametrize(
    "version",
    [
        "3.10",
        "3.13",
        *(pytest.param(version, marks=pytest.mark.thorough) for version in ("3.11", "3.12")),
    ],
)
def test_lines_of_python_of_each_version(tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if not python:
        pytest.skip(f"there is no Python {version} here")
    runtime = compiled(RUNTIME, tmp_path / "libcudart.so.12", "-shared", "-fPIC")
    script = tmp_path / "scripted.py"
    script.write_text(SCRIPTED, encoding="utf-8")
    job = Talking(python, str(script), str(runtime))
    truth: list[Any] = []
    try:
        assert job.line() == "ready\n"
        listed = job.line

        def line() -> str:
            if not (text := listed()).startswith("["):
                return text
            truth[:] = json.loads(text)
            return line()

        job.line = line  # type: ignore[method-assign]
        document = record(AllocationsProfiler(), job, tmp_path, seconds=0.5)
    finally:
        job.end()
    frames = [tuple(frame) for frame in document["frames"]]
    by_size: dict[int, set[tuple[Any, ...]]] = {}
    for _, _, _, size, _, stack, *_ in document["events"]:
        if stack >= 0:
            python_frames = tuple(
                frames[frame] for frame in document["stacks"][stack] if frames[frame][2]
            )
            by_size.setdefault(size, set()).add(python_frames)
    if version == "3.10":
        assert document["without_python"] == "its Python is older than 3.11"
        assert by_size == {size: {()} for size in (5000, 6000, 8000)}
        return
    assert document["without_python"] is None
    expected = {size: {tuple(tuple(frame) for frame in stack)} for size, stack in truth}
    assert set(expected) == {5000, 6000, 8000}
    assert by_size == expected


@pytest.mark.torch
@needs_probes
def test_allocations_of_stock_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every byte that is left, the line of Python that left it, and the operators between."""
    script = tmp_path / "leaking.py"
    script.write_text(ALLOCATING, encoding="utf-8")
    job = Talking(sys.executable, str(script))
    try:
        assert job.line() == "ready\n"
        document = record(AllocationsProfiler(), job, tmp_path, seconds=2.0)
    finally:
        job.end()
    assert (document["without_stack"], document["without_python"]) == (0, None)
    kept = 0
    live: dict[int, int] = {}
    stacks: dict[int, list[list[Any]]] = {}
    for _, _, address, size, device, stack, *_ in document["events"]:
        assert device == "cpu"
        if size > 0:
            live[address] = size
            kept += size == 28_000
            frames = [document["frames"][frame] for frame in document["stacks"][stack]]
            assert frames[0][0] == "c10::alloc_cpu(unsigned long)"
            stacks.setdefault(size, []).append(frames)
        else:
            assert live.pop(address) == -size
    assert kept >= 100
    assert sum(size == 28_000 for size in live.values()) == kept
    assert sum(size == 333 * 4 for size in live.values()) <= 1
    lines = ALLOCATING.splitlines()
    main_line = lines.index("        leaky()") + 1
    for frames in stacks[28_000]:
        assert any(name.startswith("at::_ops::zeros::call") for name, *_ in frames)
        python = [(name, file, line) for name, file, line in frames if line]
        assert python == [
            ("leaky", str(script), lines.index("        torch.zeros(1000, 7)") + 1),
            ("<module>", str(script), main_line),
        ]
    backward = [
        frames
        for frames in stacks[12_000]
        if any("ExpBackward0::apply" in name for name, *_ in frames)
    ]
    assert len(backward) >= 5
    assert all(any(name == "leaky_backward" for name, *_ in frames) for frames in backward)
    # A thread that began some milliseconds ago is not known yet as one of Python; what it called is.
    assert all(
        any(name.startswith("at::_ops::zeros::call") for name, *_ in frames)
        for frames in stacks[44_000]
    )
    path = str(tmp_path / "rank3.allocations.json.gz")
    assert main(["memory", path, "--by", "stack", "--at", "end", "--json", "-q"]) == 0
    (memory,) = json.loads(capsys.readouterr().out)["ranks"][0]["memories"]
    leak = next(
        part
        for part in memory["parts"]
        if f"{script}({lines.index('        torch.zeros(1000, 7)') + 1}): leaky" in part["name"]
    )
    assert (leak["bytes"], leak["block_count"]) == (28_000 * kept, kept)


@pytest.mark.torch
@needs_probes
def test_what_pytorchs_device_allocator_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its function is called as the allocator of CUDA does for each block: on device 1 (type 1), then on the host."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    script = tmp_path / "reporting.py"
    script.write_text(REPORTING, encoding="utf-8")
    job = Talking(sys.executable, str(script), str(Path(torch.origin).parent / "lib" / "libc10.so"))
    try:
        assert job.line() == "ready\n"
        document = record(AllocationsProfiler(), job, tmp_path, seconds=1.0)
    finally:
        job.end()
    events = [
        (address, size, device, *totals)
        for _, _, address, size, device, _, *totals in document["events"]
    ]
    made = (0x7F0000007000, 4096, "cuda:1", 5000, 9000)
    freed = (0x7F0000007000, -4096, "cuda:1", 904, 9000)
    whole = rounds(events[events.index(made) :])
    assert len(whole) >= 5
    first = whole[0][2][0]
    for number, (*used, left) in enumerate(whole):
        assert used == [made, freed]
        assert left == (first + 0x1000 * number, 512, "cuda:1", 5000, 9000)
    leaked = sum(size for _, size, *_ in events if size == 512)
    path = str(tmp_path / "rank3.allocations.json.gz")
    assert main(["memory", path, "--by", "stack", "--at", "end", "--json", "-q"]) == 0
    (memory,) = json.loads(capsys.readouterr().out)["ranks"][0]["memories"]
    line = REPORTING.splitlines().index("def leak(number):") + 2
    leak = next(
        part for part in memory["parts"] if part["name"].startswith(f"{script}({line}): leak <")
    )
    assert (leak["bytes"], leak["block_count"]) == (leaked, leaked // 512)


@pytest.mark.torch
@needs_probes
def test_a_window_of_steps_ends_with_them(tmp_path: Path) -> None:
    """Each step allocates a size of its own: those between are whole, and few come after the last."""
    job = Talking(sys.executable, "-c", STEPPING)
    try:
        assert job.line() == "ready\n"
        (path,) = asyncio.run(
            AllocationsProfiler().record(job.facts, Window(0, None, 4), tmp_path, "pid1")
        )
        assert job.process.poll() is None
    finally:
        job.end()
    events = json.loads(gzip.decompress(path.read_bytes()))["events"]
    counted = sorted({size // 4 - 50_000 for _, _, _, size, *_ in events if size > 200_000})
    assert len(counted) >= 4
    assert counted == list(range(counted[0], counted[-1] + 1))


@needs_probes
def test_what_has_none_of_the_functions_says_so(tmp_path: Path) -> None:
    job = Talking("cat")
    try:
        for profiler in (AllocationsProfiler(), LaunchesProfiler()):
            with pytest.raises(ProfilerError, match="none of the functions") as caught:
                asyncio.run(profiler.record(job.facts, Window(0, 1.0, None), tmp_path, "rank0"))
            assert caught.value.slug == "not-recorded"
        with pytest.raises(ProfilerError, match="neither a duration"):
            asyncio.run(
                AllocationsProfiler().record(job.facts, Window(0, None, None), tmp_path, "rank0")
            )
    finally:
        job.end()
    with pytest.raises(ProfilerError, match="has ended"):
        asyncio.run(
            AllocationsProfiler().record(job.facts, Window(0, 1.0, None), tmp_path, "rank0")
        )
    assert list(tmp_path.iterdir()) == []


@needs_probes
@needs_compiler
def test_a_cancelled_recording_leaves_nothing(program: Talking, tmp_path: Path) -> None:
    async def cancelled() -> None:
        recording = asyncio.create_task(
            AllocationsProfiler().record(program.facts, Window(0, 600.0, None), tmp_path, "rank3")
        )
        await until_probed(program, recording, "cudaMalloc")
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording

    asyncio.run(cancelled())
    assert not list(tmp_path.glob("rank3*"))
    # Its process is killed; the kernel takes its probes away before it is gone, and nobody waits for that.
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    until(lambda: children.read_text().split() == [str(program.process.pid)])
