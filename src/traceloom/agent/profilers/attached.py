"""The profilers `timeline` and `memory` for a process that does not poll: it is attached to and
runs our text.

The order is a file in a directory of the user, who may change anything there. It stands while the
file exists.

Each state has its evidence: our text is scheduled in the process (delivered), it reports that it
records (accepted), the file has its final name (written), and has the requested content (verified).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from traceloom.agent import worker
from traceloom.agent.kineto import read_process_state
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.profilers.timeline import (
    StatusReporter,
    TimelineOrder,
    run_store_task,
    store_trace,
)
from traceloom.agent.traces.files import delete_output
from traceloom.agent.traces.requests import LeaseTable
from traceloom.errors import TraceloomError
from traceloom.system.files import open_own

_MAX_BYTES = 1 << 16
_MAX_DETAIL_CHARS = 300
_LATEST_NS = 2**61


class ProgressUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of an order.

    Times are those reported by the process, ns of the wall clock; 0: not reported.
    """

    state: Literal["", "began", "waiting", "ready", "recording", "written", "failed"] = ""
    slug: str = ""
    detail: str = ""
    start_ns: int = 0
    end_ns: int = 0
    held_ns: int = 0


_UPDATE_DECODER = msgspec.json.Decoder(ProgressUpdate)


class ProgressFile:
    """The file of one order; blocks for as long as a small file takes.

    Args:
        folder: The user's directory.
        name: Name of the result.
        uid: The user.
    """

    def __init__(self, directory: Path, name: str, uid: int) -> None:
        self.folder, self.name, self.uid = directory, name, uid

    def create(self) -> None:
        """Create the order.

        Raises:
            FileExistsError: There is one of this name.
            OSError: It cannot be written.
        """
        self._write(f"{self.name}.order", b"")

    def begin(self, at_ns: int) -> None:
        """Set the start time; raises the errors of `create`."""
        self._write(f"{self.name}.begin", str(at_ns).encode())

    def exists(self) -> bool:
        """Whether the order still stands."""
        return os.path.lexists(self.folder / f"{self.name}.order")

    def news(self) -> ProgressUpdate:
        """Returns the last valid line; an empty update if there is none, or the file is not the
        user's.
        """
        try:
            handle = open_own(self.folder / f"{self.name}.order", self.uid)
        except OSError:
            return ProgressUpdate()
        try:
            lines = os.read(handle, _MAX_BYTES).split(b"\n")
        finally:
            os.close(handle)
        for line in reversed(lines[:-1]):
            try:
                update = _UPDATE_DECODER.decode(line)
            except msgspec.DecodeError:
                continue
            if all(
                0 <= time < _LATEST_NS for time in (update.start_ns, update.end_ns, update.held_ns)
            ):
                return msgspec.structs.replace(update, detail=update.detail[:_MAX_DETAIL_CHARS])
        return ProgressUpdate()

    def drop(self) -> None:
        """Delete the order and everything written for it."""
        for name in (f"{self.name}.order", f"{self.name}.begin", self.name):
            delete_output(self.folder, name)

    def _write(self, name: str, content: bytes) -> None:
        directory = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            handle = os.open(f"{name}.new", flags, 0o600, dir_fd=directory)
            try:
                os.write(handle, content)
                if os.geteuid() != self.uid:
                    os.fchown(handle, self.uid, -1)
            finally:
                os.close(handle)
            os.link(
                f"{name}.new",
                name,
                src_dir_fd=directory,
                dst_dir_fd=directory,
                follow_symlinks=False,
            )
        finally:
            try:
                os.unlink(f"{name}.new", dir_fd=directory)
            except FileNotFoundError:
                pass
            finally:
                os.close(directory)


_POLL_S = 0.1
_START_LEAD_S = 1.0  # a ready process checks every 50 ms for its start time
_DEADLINE_GRACE_S = 5.0  # for the report of a process at its own deadline
_DRAIN_S = 120.0  # from the end of the window until the file has its name
_ATTACH_S = 30.0  # the worker itself detaches after two seconds
_STORE_TIMEOUT_S = 600.0
_REPORTED_FAULTS = frozenset(
    {"no-torch", "old-torch", "no-cuda", "not-stepping", "cancelled-by-program", "exited"}
)


class AttachedProfiler:
    """The common part: from attaching until the file has its name.

    Args:
        order: The trace to take, as for processes that poll.
        tell: Called with each state.
        leases: Ensures that nothing else traces the process meanwhile.
    """

    kind: str

    def __init__(
        self, order: TimelineOrder, report_status: StatusReporter, leases: LeaseTable
    ) -> None:
        self.order, self.tell, self.leases = order, report_status, leases

    async def written(
        self, process: Process, window: Window, attempt: int, resumed: bool
    ) -> ProgressUpdate:
        """Have the process write its file; returns the progress with the times of its window.

        Raises:
            ProfilerError: `exited`, `expired`, `not-python`, `not-permitted`, `traced-already`,
                `not-mounted`, `not-stopped`, `not-reached`, `task-failed`, `cannot-write`,
                `deadline`, and errors reported by the process.
        """
        order = self.order
        file = ProgressFile(order.incoming, order.name(attempt), process.uid)
        ahead_s = max(0.0, (window.start_ns - time.time_ns()) / 1e9)
        until = time.monotonic() + ahead_s + order.wait_s
        if not (resumed and file.exists()):
            await self._attach(process, window, file, until)
        return await self._followed(process, window, file, until)

    async def _attach(
        self, process: Process, window: Window, file: ProgressFile, until: float
    ) -> None:
        holder = f"attaching to process {process.pid} for {file.name}"
        last_reason = ""
        while True:
            if read_process_state(process.pid, process.start_ticks) == "T":
                reason, detail = "stopped", "the process is stopped"
            elif conflict := self.leases.take(holder, [f"ptrace:{process.pid}"]):
                reason, detail = "leased", f"waits: {conflict}"
            else:
                break
            if reason != last_reason:
                self.tell("queued", reason, detail)
                last_reason = reason
            if time.monotonic() > until:
                raise ProfilerError(detail, slug="expired")
            await asyncio.sleep(_POLL_S)
        try:
            await asyncio.to_thread(file.create)
            order = self.order
            seconds = None if window.steps is not None else window.duration_s
            waits = order.start is not None
            # A process that waits for others does so until these have timed out.
            longest_s = until - time.monotonic() + (seconds or 0) + (order.wait_s if waits else 0)
            schedule = partial(
                worker.run,
                "attach",
                timeout_s=_ATTACH_S,
                pid=process.pid,
                start_ticks=process.start_ticks,
                order={
                    "folder": str(file.folder),
                    "name": file.name,
                    "kind": self.kind,
                    "trace_id": order.trace_id,
                    "steps": window.steps,
                    "seconds": seconds,
                    "waits": waits,
                    "begin_ns": 0 if waits else window.start_ns,
                    "until_ns": time.time_ns() + int(longest_s * 1e9),
                    "shapes": order.shapes,
                    "stacks": order.stacks,
                    "flops": order.flops,
                    "modules": order.modules,
                },
            )
            result = await asyncio.to_thread(schedule)
        except OSError as error:
            detail = f"the order cannot be written: {(error.strerror or str(error)).lower()}"
            raise ProfilerError(detail, slug="cannot-write") from error
        except TraceloomError as error:
            raise ProfilerError(error.message, slug="task-failed") from error
        finally:
            self.leases.give_back(holder)
        if "fault" in result:
            raise ProfilerError(result["detail"], slug=result["fault"])
        self.tell("delivered", attached_ns=time.time_ns(), pause_ns=result["pause_ns"])

    async def _followed(
        self, process: Process, window: Window, file: ProgressFile, until: float
    ) -> ProgressUpdate:
        last = ProgressUpdate()
        seconds = window.duration_s or 0.0
        end = until + seconds + _DEADLINE_GRACE_S
        while True:
            update = await asyncio.to_thread(file.news)
            if update.state == "written":
                self.tell("written", held_ns=update.held_ns)
                return update
            if update.state == "failed":
                slug = update.slug if update.slug in _REPORTED_FAULTS else ""
                raise ProfilerError(
                    update.detail or "it says no more", slug=slug or "program-error"
                )
            if update != last:
                last = update
                if update.state == "waiting":
                    self.tell("delivered", "waiting", update.detail)
                elif update.state == "ready" and self.order.start is not None:
                    self.tell(
                        "delivered",
                        "not-all-ready",
                        "waits until all processes of the request are ready",
                    )
                    start_ns = self.order.start_ns or await self.order.start.ready(
                        process.key, _START_LEAD_S
                    )
                    self.tell("delivered", start_ns=start_ns)
                    with contextlib.suppress(FileExistsError):  # an earlier agent has set it
                        await asyncio.to_thread(file.begin, start_ns)
                    self.order.start_ns = start_ns
                    end = max(
                        end,
                        time.monotonic()
                        + (start_ns - time.time_ns()) / 1e9
                        + seconds
                        + _DEADLINE_GRACE_S,
                    )
                elif update.state == "recording":
                    self.tell("accepted")
                    end = max(end, time.monotonic() + seconds + _DRAIN_S)
            if not read_process_state(process.pid, process.start_ticks):
                if (await asyncio.to_thread(file.news)).state == "written":
                    continue
                raise ProfilerError("the process has ended", slug="exited")
            if time.monotonic() > end:
                if not update.state:
                    raise ProfilerError(
                        "its main thread has run no Python since: it waits, or works in native code",
                        slug="not-reached",
                    )
                raise ProfilerError("no whole file was written in time", slug="deadline")
            await asyncio.sleep(_POLL_S)


class AttachedTimelineProfiler(AttachedProfiler):
    """The profiler `timeline` for a process that does not poll: PyTorch's profiler, started in a
    thread of ours there.
    """

    name = "timeline"
    kind = "timeline"

    def resources(self, process: Process) -> frozenset[str]:
        """PyTorch's profiler handles one request at a time."""
        return frozenset({f"kineto:{process.pid}"})

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        """Write `directory/STEM.kineto.json.gz`.

        Raises:
            ProfilerError: See `written`; `damaged`, `empty`, `foreign-file`, `disk-full`, `quota`.
        """
        path = directory / f"{stem}.kineto.json.gz"
        order = self.order
        seconds = None if window.steps is not None else window.duration_s
        attempt, resumed = order.attempt, order.resumed != "queued"
        tried: set[str] = set()
        if not resumed and ProgressFile(order.incoming, order.name(attempt), process.uid).exists():
            # A killed agent may have attached without recording it.
            self._drop(process, attempt)
            attempt += 1
            self.tell("queued", attempt=attempt)
        try:
            while True:
                try:
                    await self.written(process, window, attempt, resumed)
                    facts = await store_trace(
                        order,
                        process.uid,
                        window,
                        seconds,
                        attempt,
                        path,
                        order.start_ns if seconds else None,
                    )
                except ProfilerError as error:  # noqa: PERF203  (it is tried again)
                    self._drop(process, attempt)
                    if error.slug in tried or error.slug not in ("cancelled-by-program", "empty"):
                        raise
                    tried.add(error.slug)
                    attempt, resumed, order.start_ns = attempt + 1, False, None
                    self.tell(
                        "queued",
                        error.slug,
                        f"once more, as {error.message}",
                        attempt=attempt,
                        start_ns=None,
                    )
                else:
                    if order.start_ns is not None:
                        facts["skew_ns"] = facts["window_start_ns"] - order.start_ns
                    self.tell("verified", **facts)
                    self.tell("kept", **facts, file=path.name)
                    return [path]
        finally:
            self._drop(process, attempt)
            if order.start is not None:
                order.start.leave(process.key)

    def _drop(self, process: Process, attempt: int) -> None:
        ProgressFile(self.order.incoming, self.order.name(attempt), process.uid).drop()


class AttachedMemoryProfiler(AttachedProfiler):
    """The profiler `memory`: CUDA's allocator keeps a history during the window, and its snapshot
    is the result.
    """

    name = "memory"
    kind = "memory"

    def resources(self, process: Process) -> frozenset[str]:
        """The allocator keeps only one history."""
        return frozenset({f"allocator:{process.pid}"})

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        """Write `directory/STEM.memory.pickle`, as `traceloom record --memory` does.

        Raises:
            ProfilerError: See `written`; `no-cuda`, `not-a-snapshot`, `pickle-with-code`,
                `pickle-damaged`, `pickle-too-large`, `foreign-file`, `disk-full`, `quota`.
        """
        path = directory / f"{stem}.memory.pickle"
        order = self.order
        file = ProgressFile(order.incoming, order.name(order.attempt), process.uid)
        try:
            update = await self.written(process, window, order.attempt, resumed=False)
            facts: dict[str, Any] = await run_store_task(
                partial(
                    worker.run,
                    "keep-memory",
                    timeout_s=_STORE_TIMEOUT_S,
                    folder=str(order.incoming),
                    name=file.name,
                    uid=process.uid,
                    to=str(path),
                    max_bytes=order.max_bytes,
                    max_kept_bytes=order.max_kept_bytes,
                )
            )
        finally:
            file.drop()
        facts |= {
            "window_start_ns": update.start_ns or None,
            "window_end_ns": update.end_ns or None,
        }
        self.tell("verified", **facts)
        self.tell("kept", **facts, file=path.name)
        return [path]
