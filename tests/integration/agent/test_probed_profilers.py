"""Allocations and launches of programs that nobody prepared, against what they do."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.probes import compiled, needs_compiler, needs_probes
from traceloom.agent.bpf.elf import Elf
from traceloom.agent.bpf.mappings import mappings
from traceloom.agent.owners import Owner, Process
from traceloom.agent.profilers import ProfilerError, Window
from traceloom.agent.profilers.probed import AllocationsProfiler, LaunchesProfiler
from traceloom.cli import main

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


REPORTING = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
report = library["_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"]
report.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_uint16]
print("ready", flush=True)
for line in sys.stdin:
    report(0x7F0000007000, 4096, 5000, 9000, 0x0101)
    report(0x7F0000007000, -4096, 904, 9000, 0x0101)
    report(0x7F0000009000, 64, 64, 64, 0xFF00)  # of the host: it is seen where it is allocated
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
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        pid, start_ticks = self.process.pid, int(fields[19])
        self.facts = Process(
            key=f"{pid}@{start_ticks}", pid=pid, start_ticks=start_ticks, started_ns=0, parent_pid=0, uid=0, command="",
            owner=Owner(rank=3),
        )  # fmt: skip

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
    for mapping in mappings(pid):
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
    assert {(thread, device) for _, thread, _, _, device, *_ in events} == {(program.process.pid, "cuda")}
    last = max(size for _, _, _, size, *_ in events if size < 5000) - 1000  # the number of the last round
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
        LaunchesProfiler(), program, tmp_path, "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaGraphLaunch",
        "cudaStreamSynchronize",
    )  # fmt: skip
    frames = [tuple(frame) for frame in document["frames"]]
    launched = Counter(
        (frames[frame], tuple(grid[1:]), tuple(block), stream)
        for _, _, frame, grid, block, stream, _ in document["events"]
    )
    assert set(launched) == {
        (("softmax_kernel", "job", None), (2, 3), (32, 4, 5), 0x51),
        (("gemm_kernel", "job", None), (12, 13), (14, 15, 16), 0x52),
        (("cudaGraphLaunch", "libcudart.so", None), (0, 0), (0, 0, 0), 0x53),
    }
    assert min(launched.values()) >= 5
    numbers = [grid[0] for _, _, frame, grid, *_ in document["events"] if frames[frame][0] == "softmax_kernel"]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    for *_, stack in document["events"] + document["durations"]:
        names = [document["frames"][frame][0] for frame in document["stacks"][stack]]
        assert names[1:3] == ["one_round", "main"]
    waits = [(frames[frame][0], duration) for _, _, frame, duration, _ in document["durations"]]
    assert len(waits) >= 5
    assert all(name == "cudaStreamSynchronize" and duration >= 30_000_000 for name, duration in waits)


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
        python = [(name, file, line) for name, file, line in frames if line is not None]
        assert python == [
            ("leaky", str(script), lines.index("        torch.zeros(1000, 7)") + 1), ("<module>", str(script), main_line),
        ]  # fmt: skip
    backward = [frames for frames in stacks[12_000] if any("ExpBackward0::apply" in name for name, *_ in frames)]
    assert len(backward) >= 5
    assert all(any(name == "leaky_backward" for name, *_ in frames) for frames in backward)
    # A thread that began some milliseconds ago is not known yet as one of Python; what it called is.
    assert all(any(name.startswith("at::_ops::zeros::call") for name, *_ in frames) for frames in stacks[44_000])
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
def test_what_pytorchs_device_allocator_reports(tmp_path: Path) -> None:
    """Its function is called as the allocator of CUDA does for each block: on device 1 (type 1), then on the host."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    job = Talking(sys.executable, "-c", REPORTING, str(Path(torch.origin).parent / "lib" / "libc10.so"))
    try:
        assert job.line() == "ready\n"
        document = record(AllocationsProfiler(), job, tmp_path, "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE")
    finally:
        job.end()
    events = [(address, size, device, *totals) for _, _, address, size, device, _, *totals in document["events"]]
    made = (0x7F0000007000, 4096, "cuda:1", 5000, 9000)
    freed = (0x7F0000007000, -4096, "cuda:1", 904, 9000)
    assert len(events) >= 10
    assert events == ([made, freed] * len(events))[: len(events)]
    names = {
        document["frames"][document["stacks"][stack][0]][0] for *_, stack, _, _ in document["events"] if stack >= 0
    }
    assert {name.partition("(")[0] for name in names} == {"c10::reportMemoryUsageToProfiler"}


@pytest.mark.torch
@needs_probes
def test_a_window_of_steps_ends_with_them(tmp_path: Path) -> None:
    """Each step allocates a size of its own: those between are whole, and few come after the last."""
    job = Talking(sys.executable, "-c", STEPPING)
    try:
        assert job.line() == "ready\n"
        (path,) = asyncio.run(AllocationsProfiler().record(job.facts, Window(0, None, 4), tmp_path, "pid1"))
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
            asyncio.run(AllocationsProfiler().record(job.facts, Window(0, None, None), tmp_path, "rank0"))
    finally:
        job.end()
    with pytest.raises(ProfilerError, match="has ended"):
        asyncio.run(AllocationsProfiler().record(job.facts, Window(0, 1.0, None), tmp_path, "rank0"))
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
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert children == [str(program.process.pid)]
