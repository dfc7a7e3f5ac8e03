"""Python stacks by py-spy: at one moment, or sampled over a window."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import shutil
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from traceloom.agent import worker
from traceloom.agent.collectors.processes import read_user
from traceloom.agent.kineto import read_process_state
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.errors import InputError, TraceloomError
from traceloom.system.gzip_stream import write_gzip
from traceloom.system.python_frames import Frame

_HINT_RIGHTS = "run the agent as root, or set kernel.yama.ptrace_scope to 0"
_ERROR_BYTES = 1 << 16


def find_py_spy() -> str:
    """Returns the path of py-spy: on PATH, or next to this Python; "" if it is not installed."""
    sibling = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(sibling) if sibling.exists() else "")


class PySpy:
    """A context that runs py-spy, and kills it if the context ends early.

    Args:
        process: The process to inspect. As pids are reused, output is valid only while `check`
            passes.
        arguments: The subcommand and its options.

    Raises:
        ProfilerError: `no-py-spy`, `exited`.
    """

    def __init__(self, process: Process, *arguments: str) -> None:
        self.process = process
        self.arguments = (*arguments, "--pid", str(process.pid))
        self._running: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> asyncio.subprocess.Process:
        """Start it."""
        program = find_py_spy()
        if not program:
            raise ProfilerError(
                "py-spy is not installed beside the agent",
                slug="no-py-spy",
                hint="pip install 'traceloom[agent]'",
            )
        self.check()
        pipe = asyncio.subprocess.PIPE
        self._running = await asyncio.create_subprocess_exec(
            program, *self.arguments, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        return self._running

    async def __aexit__(self, *_: object) -> None:
        """Kill it if it still runs."""
        assert self._running is not None
        with contextlib.suppress(ProcessLookupError):
            self._running.kill()
        await self._running.wait()

    def check(self) -> None:
        """Check that the pid still belongs to the process.

        Raises:
            ProfilerError: `exited`; `not-permitted`: it runs a program with other rights.
        """
        if not read_process_state(self.process.pid, self.process.start_ticks):
            raise ProfilerError(f"the process {self.process.pid} has ended", slug="exited")
        if read_user(f"/proc/{self.process.pid}") != self.process.uid:
            raise ProfilerError("it has more rights than its user", slug="not-permitted")

    def failure(self, errors: bytes) -> ProfilerError:
        text = errors.decode(errors="replace").strip()
        first = (
            text.splitlines()[0].removeprefix("Error: ") if text else "py-spy ended without a word"
        )
        if "Permission Denied" in text or "Operation not permitted" in text:
            return ProfilerError(
                f"the kernel does not let the agent look into process {self.process.pid}",
                slug="not-permitted",
                hint=_HINT_RIGHTS,
            )
        if "python version" in text:
            return ProfilerError(
                f"process {self.process.pid} runs no Python that py-spy knows", slug="not-python"
            )
        return ProfilerError(f"py-spy failed: {first[:300]}", slug="py-spy-failed")


async def run_py_spy(process: Process, *arguments: str, seconds: float, max_bytes: int) -> bytes:
    """Returns the output of py-spy about a process.

    Raises:
        ProfilerError: It is missing, may not inspect the process, took longer than `seconds`, or
            printed more than `max_bytes`.
    """
    spy = PySpy(process, *arguments)
    try:
        async with spy as running:
            assert running.stdout is not None
            assert running.stderr is not None
            text, errors = await asyncio.wait_for(
                asyncio.gather(
                    read_limited(running.stdout, max_bytes),
                    read_limited(running.stderr, _ERROR_BYTES),
                ),
                seconds,
            )
            code = await asyncio.wait_for(running.wait(), seconds)
    except (asyncio.TimeoutError, TimeoutError) as error:
        raise ProfilerError(
            f"py-spy had not looked at process {process.pid} after {seconds:g} s",
            slug="py-spy-failed",
        ) from error
    spy.check()
    if code:
        raise spy.failure(errors)
    if len(text) > max_bytes:
        raise ProfilerError(
            f"the stacks of process {process.pid} are larger than anybody reads",
            slug="py-spy-failed",
        )
    return text


async def read_limited(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Returns all of a stream; if it is longer than `max_bytes`, one byte more than that, and the
    rest is dropped.
    """
    text = b""
    while chunk := await stream.read(1 << 16):
        if len(text) <= max_bytes:
            text = (text + chunk)[: max_bytes + 1]
    return text


VERSION = 1
_MAX_DUMP_BYTES = 32 << 20  # 1,000 threads with 100 frames each
_PYTHON_S, _NATIVE_S = (
    10.0,
    60.0,
)  # time-outs; native symbols of torch are hundreds of MB


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """The stack of a thread; `frames` start with the outermost call.

    `id`: the kernel's thread id.
    """

    id: int
    name: str
    active: bool  # it runs, or waits for the GIL
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


_THREADS_DECODER = msgspec.json.Decoder(list[_DumpedThread])


async def dump_stacks(process: Process, *, native: bool = False) -> StackDump:
    """Dump the stacks of a process once. Python stacks do not stop it; with `native` it is stopped
    during the dump.

    Raises:
        ProfilerError: `no-py-spy`, `not-permitted`, `not-python`, `exited`, `py-spy-failed`.
    """
    mode = "--native" if native else "--nonblocking"
    text = await run_py_spy(
        process,
        "dump",
        "--json",
        "--full-filenames",
        mode,
        seconds=_NATIVE_S if native else _PYTHON_S,
        max_bytes=_MAX_DUMP_BYTES,
    )
    at_ns = time.time_ns()
    try:
        threads = await asyncio.to_thread(_THREADS_DECODER.decode, text)
    except msgspec.DecodeError as error:
        raise ProfilerError(
            f"what py-spy says is not understood: {error}", slug="py-spy-failed"
        ) from error
    return StackDump(
        time_ns=at_ns,
        pid=process.pid,
        rank=process.owner.rank,
        native=native,
        threads=tuple(
            ThreadStack(
                id=thread.os_thread_id or thread.thread_id,
                name=thread.thread_name or "",
                active=thread.active,
                frames=tuple(
                    Frame(frame.name, frame.filename, frame.line)
                    for frame in reversed(thread.frames)
                ),
            )
            for thread in threads
        ),
    )


class DumpProfiler:
    """The profiler `dump`: the stacks at the start of the window.

    Args:
        native: Include C and C++; the process is stopped meanwhile.
    """

    name = "dump"

    def __init__(self, *, native: bool = False) -> None:
        self.native = native

    def resources(self, process: Process) -> frozenset[str]:
        """Native stacks need ptrace."""
        return frozenset({f"ptrace:{process.pid}"} if self.native else ())

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        """Write `STEM.dump.json`.

        Raises:
            ProfilerError: See `dump_stacks`.
        """
        await asyncio.sleep(max(0.0, (window.start_ns - time.time_ns()) / 1e9))
        return [
            await asyncio.to_thread(
                write_dump, await dump_stacks(process, native=self.native), directory, stem
            )
        ]


def write_dump(dump: StackDump, directory: Path, stem: str) -> Path:
    """Write a dump to a new file `STEM.dump.json` of a directory; raises the errors of
    `write_new_file`.
    """
    return write_new_file(directory / f"{stem}.dump.json", msgspec.json.encode(dump))


def write_new_file(path: Path, content: bytes) -> Path:
    """Write a file that must not exist yet.

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


_LEAD_S = 0.5  # py-spy starts so long before the window, as it first reads the process's libraries
_READY_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 60.0
_MAX_WINDOW_S = 600.0  # for steps of unknown duration
# Resolution of CLOCK_REALTIME_COARSE, the clock of file times.
_TICK_NS = int(time.clock_getres(5) * 1e9)


class _SamplingRun(NamedTuple):
    """The data that maps py-spy's file to the wall clock, and the threads that existed at its end
    (see `convert_stacks`).
    """

    began_ns: int
    opened_ns: int
    threads: list[int]


class StacksProfiler:
    """The profiler `stacks`.

    A sample is a stack and the time for which it was seen repeatedly; between two samples nothing
    is known. Times are those of py-spy's own clock, which is mapped to the wall clock by the time
    at which it opened its file.

    Args:
        rate: Samples per second.
        native: Include C and C++; the process is stopped for every sample.
    """

    name = "stacks"

    def __init__(self, *, rate: int = 100, native: bool = False) -> None:
        self.rate = rate
        self.native = native

    def resources(self, process: Process) -> frozenset[str]:
        """Native stacks need ptrace; otherwise it only reads the process's memory."""
        return frozenset({f"ptrace:{process.pid}"} if self.native else ())

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        """Write `STEM.stacks.json.gz`; if the process ends in the window, up to then.

        Raises:
            ProfilerError: `no-duration`; see `run_py_spy`; `cannot-write`, `task-failed`.
        """
        window_end, start_ns = window.over(), max(window.start_ns, time.time_ns())
        with tempfile.TemporaryDirectory(prefix="traceloom-stacks-") as name:
            try:
                await asyncio.sleep(max(0.0, (window.start_ns - time.time_ns()) / 1e9 - _LEAD_S))
                clock = await self._sample(process, window_end, window.duration_s, Path(name))
                end_ns = time.time_ns()
                if window.measured is not None or window_end.done():  # else the process has ended
                    start_ns, end_ns = await window_end
            finally:
                window_end.cancel()
            convert = partial(
                worker.run,
                "stacks",
                source=f"{name}/samples",
                target=f"{name}/stacks",
                pid=process.pid,
                rank=process.owner.rank,
                start_ns=start_ns,
                end_ns=end_ns,
                rate=self.rate,
                began_ns=clock.began_ns,
                opened_ns=clock.opened_ns,
                threads=clock.threads,
            )
            try:
                await asyncio.to_thread(convert)
            except TraceloomError as error:
                raise ProfilerError(error.message, slug=error.slug) from error
            content = await asyncio.to_thread(Path(name, "stacks").read_bytes)
        return [
            await asyncio.to_thread(write_new_file, directory / f"{stem}.stacks.json.gz", content)
        ]

    async def _sample(
        self,
        process: Process,
        window_end: asyncio.Future[tuple[int, int]],
        seconds: float | None,
        directory: Path,
    ) -> _SamplingRun:
        """Have py-spy write its samples until the end of the window; returns what maps its clock to
        the wall clock.
        """
        # The limit ends it if the agent is killed meanwhile.
        longest_s = math.ceil(
            _LEAD_S + (_MAX_WINDOW_S if seconds is None else seconds) + _READY_TIMEOUT_S
        )
        spy = PySpy(
            process,
            "record",
            "--format",
            "chrometrace",
            "--threads",
            "--idle",
            "--full-filenames",
            "--native" if self.native else "--nonblocking",
            "--rate",
            str(self.rate),
            "--duration",
            str(longest_s),
            "--output",
            str(directory / "samples"),
        )
        # Since Linux 6.13 this makes the next change get an exact time.
        await asyncio.to_thread(directory.stat)
        began_ns = time.time_ns()
        async with spy as running:
            assert running.stdout is not None
            assert running.stderr is not None
            errors = asyncio.create_task(read_limited(running.stderr, 1 << 16))
            try:
                # py-spy reports that it samples now.
                if await asyncio.wait_for(running.stdout.readline(), _READY_TIMEOUT_S):
                    spy.check()
                endings: list[asyncio.Future[int] | asyncio.Future[tuple[int, int]]]
                endings = [window_end, asyncio.ensure_future(running.wait())]
                await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
                endings[1].cancel()
                threads = await asyncio.to_thread(_list_threads, process.pid)
                with contextlib.suppress(ProcessLookupError):
                    running.send_signal(signal.SIGINT)  # makes it write its samples
                await asyncio.wait_for(running.wait(), _END_TIMEOUT_S)
                text = await errors
            except (asyncio.TimeoutError, TimeoutError) as error:
                raise ProfilerError(
                    f"py-spy did not end its look at process {process.pid}", slug="py-spy-failed"
                ) from error
            finally:
                errors.cancel()
        if running.returncode:
            raise spy.failure(text)
        opened_ns = (await asyncio.to_thread(directory.stat)).st_mtime_ns + _TICK_NS // 2
        return _SamplingRun(began_ns, opened_ns, threads)


def _list_threads(pid: int) -> list[int]:
    """Returns the ids of a process's threads; empty if it has ended."""
    try:
        return [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


_MAX_BYTES = 256 << 20
_THREAD_NAME = re.compile(
    r"thread \((?:0x([0-9A-Fa-f]{1,16})|([0-9]{1,19}))\)(?:: (.*))?", re.DOTALL
)


class _SourceLocation(msgspec.Struct):
    filename: str = ""
    line: int = 0


class _Event(msgspec.Struct):
    name: str
    ph: str
    tid: int
    ts: int  # us since py-spy's start
    args: _SourceLocation


class _StackRun(NamedTuple):
    """A stack that was seen repeatedly: ns since py-spy's start, the thread's id, frames by
    number.
    """

    start: int
    end: int
    thread: int
    frames: tuple[int, ...]


def convert_stacks(
    source: str,
    target: str,
    *,
    pid: int,
    rank: int | None,
    start_ns: int,
    end_ns: int,
    rate: int,
    began_ns: int,
    opened_ns: int,
    threads: list[int],
) -> None:
    """Write the stacks file of a window.

    py-spy closes open intervals when it opens its file, which is the last time in it; so the
    creation time of the file on the wall clock gives the start of its clock, independent of delays.

    Args:
        source: py-spy's file.
        target: The file to write.
        pid: Of the process.
        rank: Of the process.
        start_ns: Start of the window, wall clock.
        end_ns: Its end.
        rate: Samples per second.
        began_ns: Wall clock before py-spy was started, a lower bound of its clock's start.
        opened_ns: Wall clock when it opened its file.
        threads: Those that existed at the end. The end of other threads is unknown: their last
            stack counts for one sample.

    Raises:
        InputError: `py-spy-failed`: it is not such a file, or too large.
    """
    if Path(source).stat().st_size > _MAX_BYTES:
        raise InputError("the recorded stacks are larger than anybody reads", slug="py-spy-failed")
    try:
        events = msgspec.json.decode(Path(source).read_bytes(), type=list[_Event])
    except msgspec.DecodeError as error:
        raise InputError(
            f"what py-spy wrote is not understood: {error}", slug="py-spy-failed"
        ) from error
    base_ns = max(began_ns, opened_ns - max((event.ts for event in events), default=0) * 1000)
    thread_names, frames, runs = _extract_runs(events)
    last = {run.thread: run for run in runs}
    period_ns = 10**9 // rate
    samples = []
    for run in sorted(runs):
        ended = run is last[run.thread] and thread_names[run.thread][0] not in threads
        first = max(base_ns + run.start, start_ns)
        length = min(base_ns + (run.start + period_ns if ended else run.end), end_ns) - first
        if length > 0:
            samples.append([first, run.thread, length, run.frames])
    document = {
        "format": "traceloom-stacks",
        "version": VERSION,
        "pid": pid,
        "rank": rank,
        "rate": rate,
        "threads": [
            {"id": number, "name": name or ("MainThread" if number == pid else "")}
            for number, name in thread_names
        ],
        "frames": frames,
        "samples": samples,
    }
    content = msgspec.json.encode(document)
    write_gzip(Path(target), lambda file: file.write(content), gzip=True)


def _extract_runs(
    events: list[_Event],
) -> tuple[list[tuple[int, str]], list[Frame], list[_StackRun]]:
    """Returns threads (kernel id, name), frames, and the stack runs of each thread."""
    threads: dict[int, int] = {}
    thread_names: list[tuple[int, str]] = []
    numbers: dict[Frame, int] = {}
    runs: list[_StackRun] = []
    stacks: dict[int, list[int]] = {}
    since: dict[int, int] = {}
    for event in events:
        at_ns = event.ts * 1000
        stack = stacks.setdefault(event.tid, [])
        thread = threads.get(event.tid)
        if stack and thread is not None and at_ns > since[event.tid]:
            runs.append(_StackRun(since[event.tid], at_ns, thread, tuple(stack)))
        since[event.tid] = at_ns
        if event.ph == "B":
            if match := _THREAD_NAME.fullmatch(event.name) if not event.args.filename else None:
                if event.tid not in threads:
                    threads[event.tid] = len(thread_names)
                    thread_names.append(
                        (int(match[1], 16) if match[1] else int(match[2]), match[3] or "")
                    )
            else:
                frame = Frame(event.name, event.args.filename, event.args.line)
                stack.append(numbers.setdefault(frame, len(numbers)))
        else:
            del stack[-1:]  # a slice, as the end of the thread itself comes with an empty stack
    return thread_names, list(numbers), runs
