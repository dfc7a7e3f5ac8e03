"""What every thread of a process does at one moment, seen from outside by py-spy."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from traceloom.agent.owners import Process
from traceloom.agent.profilers import ProfilerError, Window, py_spy

VERSION = 1
_MOST_BYTES = 32 << 20  # 1,000 threads with 100 frames each
_PYTHON_S, _NATIVE_S = 10.0, 60.0  # how long it may take; native symbols of torch are hundreds of MB


class Frame(NamedTuple):
    """A call: of Python, or native with the library as its file and line 0."""

    function: str
    file: str
    line: int


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """What a thread does; `frames` begin with the outermost call. `id`: as the kernel numbers it."""

    id: int
    name: str
    active: bool  # it runs, or waits for the interpreter
    frames: tuple[Frame, ...]


class StackDump(msgspec.Struct, frozen=True, kw_only=True):
    """All threads of a process at one moment: the content of `rank<N>.dump.json`."""

    format: str = "traceloom-dump"
    version: int = VERSION
    time_ns: int
    pid: int
    rank: int | None
    native: bool
    threads: tuple[ThreadStack, ...]


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int


class _DumpedThread(msgspec.Struct):
    thread_id: int
    active: bool
    frames: list[_Frame]
    thread_name: str | None = None
    os_thread_id: int | None = None


_THREADS = msgspec.json.Decoder(list[_DumpedThread])


async def take(process: Process, *, native: bool = False) -> StackDump:
    """Look at a process once. Python alone does not stop it; `native` does, for as long as the look takes.

    Raises:
        ProfilerError: `no-py-spy`, `not-permitted`, `not-python`, `exited`, `py-spy-failed`.
    """
    how = "--native" if native else "--nonblocking"
    limit_s = _NATIVE_S if native else _PYTHON_S
    text = await py_spy.said(
        process, "dump", "--json", "--full-filenames", how, seconds=limit_s, most_bytes=_MOST_BYTES
    )
    at_ns = time.time_ns()
    try:
        threads = await asyncio.to_thread(_THREADS.decode, text)
    except msgspec.DecodeError as error:
        raise ProfilerError(f"what py-spy says is not understood: {error}", slug="py-spy-failed") from error
    return StackDump(
        time_ns=at_ns, pid=process.pid, rank=process.owner.rank, native=native,
        threads=tuple(
            ThreadStack(
                id=thread.os_thread_id or thread.thread_id, name=thread.thread_name or "", active=thread.active,
                frames=tuple(Frame(frame.name, frame.filename, frame.line) for frame in reversed(thread.frames)),
            )
            for thread in threads
        ),
    )  # fmt: skip


class DumpProfiler:
    """The profiler `dump`: the stacks of the moment at which the window begins.

    Args:
        native: C and C++ too; the process stands still meanwhile.
    """

    name = "dump"

    def __init__(self, *, native: bool = False) -> None:
        self.native = native

    def resources(self, process: Process) -> frozenset[str]:
        """It traces the process where native calls are wanted."""
        return frozenset({f"ptrace:{process.pid}"} if self.native else ())

    async def record(self, process: Process, window: Window, directory: Path, stem: str) -> list[Path]:
        """Writes `STEM.dump.json`.

        Raises:
            ProfilerError: As `take`.
        """
        await asyncio.sleep(max(0.0, (window.start_ns - time.time_ns()) / 1e9))
        return [await asyncio.to_thread(write, await take(process, native=self.native), directory, stem)]


def write(dump: StackDump, directory: Path, stem: str) -> Path:
    """Put a dump into a new file `STEM.dump.json` of a directory; errors as of `new_file`."""
    return new_file(directory / f"{stem}.dump.json", msgspec.json.encode(dump))


def new_file(path: Path, content: bytes) -> Path:
    """Write a file that is not there yet.

    Raises:
        ProfilerError: `cannot-write`.
    """
    try:
        with path.open("xb") as file:
            file.write(content)
    except OSError as error:
        raise ProfilerError(
            f"the file cannot be written: {(error.strerror or str(error)).lower()}",
            slug="cannot-write",
            where=str(path),
        ) from error
    return path
