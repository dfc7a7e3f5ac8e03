"""What a process does over a window, seen from outside by py-spy: a stack of every thread, 100 times a second."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from traceloom.agent import worker
from traceloom.agent.owners import Process
from traceloom.agent.profilers import ProfilerError, Window
from traceloom.agent.profilers.dump import new_file
from traceloom.agent.profilers.py_spy import PySpy, whole
from traceloom.errors import TraceloomError

_LEAD_S = 0.5  # it is started so long before the window, as it first reads the process's libraries
_READY_S = 30.0
_END_S = 60.0
_LONGEST_S = 600.0  # of steps that nobody knows the duration of
_TICK_NS = int(time.clock_getres(5) * 1e9)  # of CLOCK_REALTIME_COARSE, which file systems take their times from


class _Sampled(NamedTuple):
    """What puts py-spy's file onto the wall clock, and the threads that were there at its end (`chrome_stacks`)."""

    began_ns: int
    opened_ns: int
    threads: list[int]


class StacksProfiler:
    """The profiler `stacks`.

    A sample is a stack and the time for which it was seen again and again; between two looks nothing is known. Times
    are those of py-spy's own clock; the instant at which it opened its file puts them onto the wall clock.

    Args:
        rate: Looks per second.
        native: C and C++ too; the process stands still for every look.
    """

    name = "stacks"

    def __init__(self, *, rate: int = 100, native: bool = False) -> None:
        self.rate = rate
        self.native = native

    def resources(self, process: Process) -> frozenset[str]:
        """It traces the process where native calls are wanted; else it only reads its memory."""
        return frozenset({f"ptrace:{process.pid}"} if self.native else ())

    async def record(self, process: Process, window: Window, directory: Path, stem: str) -> list[Path]:
        """Writes `STEM.stacks.json.gz`; of a process that ends in the window, what it did until then.

        Raises:
            ProfilerError: `no-duration`; as of `py_spy`; `cannot-write`, `task-failed`.
        """
        over, start_ns = window.over(), max(window.start_ns, time.time_ns())
        with tempfile.TemporaryDirectory(prefix="traceloom-stacks-") as name:
            try:
                await asyncio.sleep(max(0.0, (window.start_ns - time.time_ns()) / 1e9 - _LEAD_S))
                clock = await self._sample(process, over, window.duration_s, Path(name))
                end_ns = time.time_ns()
                if window.measured is not None or over.done():  # else the process has ended
                    start_ns, end_ns = await over
            finally:
                over.cancel()
            convert = partial(
                worker.run, "stacks", source=f"{name}/samples", target=f"{name}/stacks", pid=process.pid,
                rank=process.owner.rank, start_ns=start_ns, end_ns=end_ns, rate=self.rate,
                began_ns=clock.began_ns, opened_ns=clock.opened_ns, threads=clock.threads,
            )  # fmt: skip
            try:
                await asyncio.to_thread(convert)
            except TraceloomError as error:
                raise ProfilerError(error.message, slug=error.slug) from error
            content = await asyncio.to_thread(Path(name, "stacks").read_bytes)
        return [await asyncio.to_thread(new_file, directory / f"{stem}.stacks.json.gz", content)]

    async def _sample(
        self, process: Process, over: asyncio.Future[tuple[int, int]], seconds: float | None, directory: Path
    ) -> _Sampled:
        """Let py-spy write `samples` until then; what is needed to put its clock onto the wall clock."""
        # It ends by itself should the agent be killed meanwhile.
        longest_s = math.ceil(_LEAD_S + (_LONGEST_S if seconds is None else seconds) + _READY_S)
        spy = PySpy(
            process, "record", "--format", "chrometrace", "--threads", "--idle", "--full-filenames",
            "--native" if self.native else "--nonblocking", "--rate", str(self.rate), "--duration", str(longest_s),
            "--output", str(directory / "samples"),
        )  # fmt: skip
        await asyncio.to_thread(directory.stat)  # kernels since 6.13 give the next change after it its exact time
        began_ns = time.time_ns()
        async with spy as running:
            assert running.stdout is not None
            assert running.stderr is not None
            errors = asyncio.create_task(whole(running.stderr, 1 << 16))
            try:
                if await asyncio.wait_for(running.stdout.readline(), _READY_S):  # it looks at the process now
                    spy.check()
                ends: list[asyncio.Future[int] | asyncio.Future[tuple[int, int]]]
                ends = [over, asyncio.ensure_future(running.wait())]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                ends[1].cancel()
                threads = await asyncio.to_thread(_threads, process.pid)
                with contextlib.suppress(ProcessLookupError):
                    running.send_signal(signal.SIGINT)  # it writes what it has
                await asyncio.wait_for(running.wait(), _END_S)
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
        return _Sampled(began_ns, opened_ns, threads)


def _threads(pid: int) -> list[int]:
    """The threads that a process has now; none where it has ended."""
    try:
        return [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
