"""What may happen to a process while its functions are probed: it never harms the process, and nothing wrong is told."""

from __future__ import annotations

import asyncio
import ctypes
import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.probes import compiled, needs_compiler, needs_probes
from support.waiting import until
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.probes.calls import RECORD, CallProbes, CallStacks, CallValue, ProbedCall
from traceloom.agent.probes.symbols import Symbols
from traceloom.agent.profilers.base import AllocationsProfiler, Window
from traceloom.system.elf import Elf, read_mappings

pytestmark = [needs_probes, needs_compiler]

RUNTIME = """
#include <stdlib.h>
int cudaMalloc(void **pointer, size_t size) { *pointer = malloc(size); return 0; }
int cudaFree(void *pointer) { free(pointer); return 0; }
"""
# Loads the library that it is given and does what each line says, with sizes that count up.
PROGRAM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
static int (*allocate)(void **, size_t);
static void *library;
static int calls;
static void load(const char *path) {
    library = dlopen(path, RTLD_NOW);
    allocate = library ? (int (*)(void **, size_t))dlsym(library, "cudaMalloc") : 0;
}
int leaky_layer(int size) { void *kept; allocate(&kept, size); return ++calls; }
int main(int number, char **arguments) {
    char line[200]; int size = 1000;
    load(arguments[1]);
    puts("ready"); fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "allocate", 8)) for (int i = 0; i < 10; i++) leaky_layer(size++);
        if (!strncmp(line, "reload", 6)) { dlclose(library); load(arguments[1]); }
        if (!strncmp(line, "driver", 6)) {
            library = dlopen(arguments[2], RTLD_NOW);
            allocate = (int (*)(void **, size_t))dlsym(library, "cuMemAlloc_v2");
        }
        if (!strncmp(line, "fork", 4)) {
            pid_t child = fork();
            if (!child) { for (int i = 0; i < 10; i++) leaky_layer(900000); _exit(0); }
            int status; waitpid(child, &status, 0); if (status) puts("the child failed");
        }
        if (!strncmp(line, "execute", 7)) execv(arguments[0], arguments);
        puts("done"); fflush(stdout);
    }
    return 0;
}
"""


class Told:
    """A program that does what it is told."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        assert self.line() == ("ready" if what == "execute" else "done")

    def end(self) -> None:
        if self.pid != self.process.pid:
            os.kill(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

    @property
    def facts(self) -> Process:
        start_ticks = int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[19])
        return Process(
            key=f"{self.pid}@{start_ticks}",
            pid=self.pid,
            start_ticks=start_ticks,
            started_ns=0,
            parent_pid=0,
            uid=0,
            command="",
            owner=Owner(rank=0),
        )


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return compiled(RUNTIME, tmp_path / "libcudart.so.12", "-shared", "-fPIC")


@pytest.fixture
def job(library: Path, tmp_path: Path) -> Iterator[Told]:
    driver = compiled(
        RUNTIME.replace("cudaMalloc", "cuMemAlloc_v2"),
        tmp_path / "libcuda.so.1",
        "-shared",
        "-fPIC",
    )
    program = compiled(PROGRAM, tmp_path / "job", "-ldl")
    started = Told(str(program), str(library), str(driver))
    yield started
    started.end()


def probed(pid: int, library: Path) -> bool:
    """Whether the kernel's breakpoint stands where cudaMalloc begins in the memory of a process."""
    descriptor = os.open(library, os.O_RDONLY)
    function = Elf(descriptor).find("cudaMalloc\0")
    os.close(descriptor)
    assert function is not None
    for mapping in read_mappings(pid):
        if mapping.executable and "libcudart" in mapping.path:
            with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                memory.seek(mapping.start + function.offset - mapping.offset)
                return memory.read(1) != library.read_bytes()[function.offset : function.offset + 1]
    return False


def recorded(job: Told, directory: Path, *things: str) -> dict[str, Any]:
    """What is recorded in a second of a program that does these things in turn."""

    async def record() -> list[Path]:
        recording = asyncio.create_task(
            AllocationsProfiler().record(job.facts, Window(0, 1.0, None), directory, "r")
        )
        for what in itertools.cycle(things):
            if recording.done():
                break
            await asyncio.to_thread(job.do, what)
        return await recording

    directory.mkdir()
    (path,) = asyncio.run(record())
    return json.loads(gzip.decompress(path.read_bytes()))


def sizes(document: dict[str, Any]) -> list[int]:
    return [event[3] for event in document["events"]]


def counts_up(numbers: list[int]) -> bool:
    """Each call once, and none left out."""
    return len(numbers) >= 20 and numbers == list(range(numbers[0], numbers[-1] + 1))


def named(document: dict[str, Any], event: list[Any]) -> list[str]:
    return [document["frames"][frame][0] for frame in document["stacks"][event[5]]]


@pytest.mark.thorough
def test_a_library_that_is_unloaded_and_loaded_again(job: Told, tmp_path: Path) -> None:
    assert counts_up(sizes(recorded(job, tmp_path / "out", "allocate", "reload")))


@pytest.mark.thorough
def test_a_library_that_is_loaded_later(job: Told, library: Path, tmp_path: Path) -> None:
    async def record() -> list[Path]:
        recording = asyncio.create_task(
            AllocationsProfiler().record(job.facts, Window(0, 4.0, None), tmp_path, "r")
        )
        while not await asyncio.to_thread(probed, job.pid, library):
            assert not recording.done()
        await asyncio.to_thread(job.do, "driver")
        while not recording.done():
            await asyncio.to_thread(job.do, "allocate")
        return await recording

    (path,) = asyncio.run(record())
    document = json.loads(gzip.decompress(path.read_bytes()))
    assert counts_up(sizes(document))
    assert {named(document, event)[0] for event in document["events"] if event[5] >= 0} == {
        "cuMemAlloc_v2"
    }


@pytest.mark.thorough
def test_a_library_that_was_replaced_on_disk(job: Told, library: Path, tmp_path: Path) -> None:
    """As an upgrade does it: the process has the old one, which lies nowhere any more."""
    other = compiled(
        "int cudaMalloc(void **p, unsigned long n) { return 2; }",
        tmp_path / "other",
        "-shared",
        "-fPIC",
    )
    other.rename(library)
    document = recorded(job, tmp_path / "out", "allocate")
    assert counts_up(sizes(document))
    assert {tuple(named(document, event)[:3]) for event in document["events"] if event[5] >= 0} == {
        ("cudaMalloc", "leaky_layer", "main")
    }


def test_a_child_is_not_recorded_and_not_harmed(job: Told, tmp_path: Path) -> None:
    document = recorded(job, tmp_path / "out", "allocate", "fork")
    assert counts_up(sizes(document))
    assert {event[1] for event in document["events"]} == {job.pid}


@pytest.mark.thorough
def test_another_program_in_the_same_process_ends_the_recording(
    job: Told, library: Path, tmp_path: Path
) -> None:
    async def record() -> list[Path]:
        recording = asyncio.create_task(
            AllocationsProfiler().record(job.facts, Window(0, 600.0, None), tmp_path, "r")
        )
        while not await asyncio.to_thread(probed, job.pid, library):
            assert not recording.done()
        for _ in range(50):  # the window begins when the last probe is there, which is soon
            await asyncio.to_thread(job.do, "allocate")
            await asyncio.sleep(0.01)
        await asyncio.to_thread(job.do, "execute")
        return await asyncio.wait_for(recording, 120)

    (path,) = asyncio.run(record())
    document = json.loads(gzip.decompress(path.read_bytes()))
    assert counts_up(sizes(document))
    assert sizes(document)[-1] == 1499
    assert {tuple(named(document, event)[:3]) for event in document["events"]} == {
        ("cudaMalloc", "leaky_layer", "main")
    }


@pytest.mark.thorough
def test_two_recordings_at_once_see_the_same(job: Told, library: Path, tmp_path: Path) -> None:
    async def both() -> list[list[Path]]:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        recordings = [
            asyncio.create_task(
                AllocationsProfiler().record(job.facts, Window(0, 1.5, None), tmp_path / name, "r")
            )
            for name in ("a", "b")
        ]
        while not all(recording.done() for recording in recordings):
            await asyncio.to_thread(job.do, "allocate")
            await asyncio.sleep(0.01)
        return [await recording for recording in recordings]

    first, second = (
        dict(zip(sizes(document), document["events"], strict=True))
        for (path,) in asyncio.run(both())
        for document in [json.loads(gzip.decompress(path.read_bytes()))]
    )
    assert list(first) == list(range(min(first), max(first) + 1))
    common = first.keys() & second.keys()
    assert list(second) == list(range(min(second), max(second) + 1))
    assert len(common) >= 10
    assert all(first[size][1:4] == second[size][1:4] for size in common)
    until(lambda: not probed(job.pid, library))


def test_one_that_is_killed_leaves_nothing_behind(job: Told, library: Path, tmp_path: Path) -> None:
    order = {
        "pid": job.pid,
        "start_ticks": job.facts.start_ticks,
        "rank": 0,
        "path": str(tmp_path / "x.json.gz"),
        "start_ns": 0,
        "duration_s": 600.0,
        "steps": None,
    }
    code = f"from traceloom.agent.probes.recording import record_allocations as allocations; allocations({order!r})"
    recorder = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: probed(job.pid, library))
    job.do("allocate")
    recorder.send_signal(signal.SIGKILL)
    recorder.wait()
    until(lambda: not probed(job.pid, library))
    job.do("allocate")
    assert not list(tmp_path.glob("x.json*"))


@pytest.mark.thorough
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_process_in_a_container_of_its_own(library: Path, tmp_path: Path) -> None:
    """Its files lie where nobody else sees them, and it knows its threads by other numbers: lines of Python are right."""
    inside = tmp_path / "inside"
    inside.mkdir()
    script = (
        "import ctypes, sys\nruntime = ctypes.CDLL(sys.argv[1])\nprint('ready', flush=True)\n"
        "for line in sys.stdin:\n    kept = ctypes.c_void_p()\n"
        "    for _ in range(10):\n        runtime.cudaMalloc(ctypes.byref(kept), ctypes.c_size_t(777))\n"
        "    print('done', flush=True)\n"
    )
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    command = (
        f"mount -t tmpfs none {inside} && cp {library} {inside}/libcudart.so.12 && "
        f'exec "{sys.executable}" {tmp_path}/script.py {inside}/libcudart.so.12'
    )
    starter = Told("unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-c", command)
    try:
        children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
        starter.pid = int(children[0])
        document = recorded(starter, tmp_path / "out", "allocate")
    finally:
        starter.end()
    assert not list(inside.iterdir())
    assert set(sizes(document)) == {777}
    assert {event[1] for event in document["events"]} == {starter.pid}
    row = next(event[5] for event in document["events"] if event[5] >= 0)
    frames = [tuple(document["frames"][frame]) for frame in document["stacks"][row]]
    if sys.version_info[:2] in {(3, 11), (3, 12), (3, 13)}:
        assert frames[-1] == ("<module>", str(tmp_path / "script.py"), 7)


def test_calls_that_come_too_quickly_are_counted(library: Path) -> None:
    """Nobody fetches them meanwhile: the buffer holds what it holds, and each other call is counted as lost."""
    symbols = Symbols(os.getpid())
    stacks = CallStacks(os.getpid(), symbols, None)
    probes = CallProbes(os.getpid(), stacks)
    free = ctypes.CDLL(str(library)).cudaFree
    free.argtypes = [ctypes.c_void_p]
    probes.attach(
        os.open(library, os.O_RDONLY),
        [(3, ProbedCall("cudaFree\0", (CallValue(argument=0),), stacks=False))],
    )
    for _ in range(120_000):
        free(None)
    kept = [record[2] for record in RECORD.iter_unpack(probes.ring.take())]
    assert set(kept) == {3}
    assert len(kept) < 120_000
    assert len(kept) + probes.lost() == 120_000
    free(None)
    assert len(probes.ring.take()) == RECORD.size  # and it goes on
    probes.close()
    stacks.close()
