"""The profiler `timeline`: requests a trace from PyTorch's profiler in a process that polls,
without changing the process.

libkineto reports little of its progress, so each state has its evidence: the configuration answered
a poll (delivered), the mask of a later poll is busy or the file was started (accepted), it has its
final name (written), it has the requested content (verified), it is compressed and hashed (kept).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from traceloom.agent import worker
from traceloom.agent.kineto import (
    PendingConfiguration,
    ProfilerClient,
    ProfilerRegistry,
    TraceConfiguration,
    read_process_state,
)
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import ProfilerError, Window
from traceloom.agent.traces.files import delete_output
from traceloom.agent.traces.requests import State
from traceloom.errors import TraceloomError

# libkineto checks a start time a second or two after it gets it, and drops one that has passed. A
# dropped request stays half done, which can kill the process at its end.
START_LEAD_S = 3.0
_TYPICAL_LEAD_S = 2.0  # libkineto's own, without a start time
_GRACE_S = 3.0  # for a busy machine
_SLOW_STEP_S = 30.0  # a trace starts with a step, and steps may be slow
_FALLBACK_MS = 100  # duration of a trace by steps in a process that has not stepped yet
# Duration of a trace by steps: the profiler starts slowly and slows steps down. A process that
# misses its steps is traced again later, alone.
_SHORTEST_S, _MARGIN = 0.5, 3.0
_FIRST_GUESS_S = 1.0  # assumed duration of the steps of several ranks
_DRAIN_S = 120.0  # from the end of the window until the file has its name
_POLL_S = 0.1
_STORE_TIMEOUT_S = 600.0
_IMPORT_S = 20.0  # a process already polls while it imports PyTorch
_BACK_OFF_S = 3.0  # between attempts on a process that does not step yet


class StatusReporter(Protocol):
    """Receives the states of a target."""

    def __call__(
        self, state: State, reason: str = "", detail: str = "", **facts: Any
    ) -> Awaitable[None]:
        """Report its state, a reason or what it waits for, and known fields of `TraceTarget`.

        Need not be awaited; awaiting it waits until it is on disk.
        """


class TimelineOrder(msgspec.Struct, kw_only=True):
    """A trace to take. `steps_per_second` returns the step rate of a process, None if unknown.

    `resumed`: the state in which an earlier agent left it, with the start time `start_ns` that it
    had set. `start`: provides the common start time, once all processes are ready; None for a
    single process. `at_step`: the first step to trace, as PyTorch counts them; 0: the next one;
    `steps_made` returns how many a process has made.
    """

    trace_id: str
    group_id: str
    incoming: Path
    stem: str
    shapes: bool = False
    stacks: bool = False
    flops: bool = False
    modules: bool = False
    wait_s: float = 120.0
    max_seconds: float = 60.0
    max_bytes: int = 1 << 30
    max_kept_bytes: int = 10 << 30
    max_result_bytes: int | None = None
    resumed: State = "queued"
    start_ns: int | None = None
    attempt: int = 1
    steps_per_second: Callable[[str], float | None] = lambda _: None
    start: StartBarrier | None = None
    at_step: int = 0
    steps_made: Callable[[str], int | None] = lambda _: None

    def name(self, attempt: int) -> str:
        return f"{self.trace_id}.{attempt}.trace"


class StartBarrier:
    """The common start time of all processes of a request: set once all are ready that can be.

    Processes that have to start again meet again: each round has a start time of its own.

    Args:
        members: The processes to wait for.
        at_ns: The earliest start of the first round, on the wall clock; 0: as soon as possible.
    """

    def __init__(self, members: Iterable[str], at_ns: int = 0) -> None:
        self._members = set(members)
        self._at_ns = at_ns
        self._ready: dict[str, float] = {}
        self._round: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.first = self._round  # for profilers that record at the same time

    async def ready(self, member: str, ahead_s: float) -> int:
        """Wait for the others; returns the start time in ns on the wall clock, at least `ahead_s`
        from then.
        """
        self._ready[member] = ahead_s
        current = self._round
        self._name_if_all_are_ready()
        return await asyncio.shield(current)

    def leave(self, member: str) -> None:
        """Remove a member that does not take part, or is done."""
        self._members.discard(member)
        self._ready.pop(member, None)
        self._name_if_all_are_ready()

    def _name_if_all_are_ready(self) -> None:
        if self._members - self._ready.keys():
            return
        earliest_ns = time.time_ns() + int(max(self._ready.values(), default=0.0) * 1e9)
        if not self._round.done():
            self._round.set_result(max(self._at_ns, earliest_ns))
        if self._members:
            self._round = asyncio.get_running_loop().create_future()
            self._ready.clear()


class TimelineProfiler:
    """Traces one process.

    Args:
        registry: Delivers configurations to processes.
        order: The trace to take.
        tell: Called with each state.
    """

    name = "timeline"

    def __init__(
        self, registry: ProfilerRegistry, order: TimelineOrder, report_status: StatusReporter
    ) -> None:
        self.registry, self.order, self.tell = registry, order, report_status

    def resources(self, process: Process) -> frozenset[str]:
        """PyTorch's profiler handles one request at a time."""
        return frozenset({f"kineto:{process.pid}"})

    async def record(
        self, process: Process, window: Window, directory: Path, stem: str
    ) -> list[Path]:
        """Write `directory/STEM.kineto.json.gz`.

        Raises:
            ProfilerError: `not-registered`, `expired`, `exited`, `rejected`,
                `cancelled-by-program`, `deadline`, `damaged`, `empty`, `not-stepping`,
                `foreign-file`, `disk-full`, `quota`, `cannot-write`.
        """
        path = directory / f"{stem}.kineto.json.gz"
        order = self.order
        waited_until = time.monotonic() + order.wait_s
        is_timed = window.steps is None or order.start is not None
        seconds = window.duration_s
        if is_timed and window.steps is not None:
            rate = order.steps_per_second(process.key)
            seconds = (
                max(_MARGIN * (window.steps + 1) / rate, _SHORTEST_S) if rate else _FIRST_GUESS_S
            )
            seconds = min(order.max_seconds, seconds)
        retried: set[str] = set()
        resumed, attempt = order.resumed, order.attempt
        if (
            resumed in ("written", "verified")
            and not _TraceFileWatch(order.incoming, self.order.name(attempt)).written()
        ):
            resumed, order.start_ns = (
                "queued",
                None,
            )  # it was discarded, and the agent killed before it reported why
        try:
            while True:
                try:
                    written_ns = await self._write(
                        process,
                        window,
                        seconds if is_timed else None,
                        attempt,
                        resumed,
                        waited_until,
                    )
                    facts = await store_trace(
                        order,
                        process.uid,
                        window,
                        seconds if is_timed else None,
                        attempt,
                        path,
                        written_ns,
                    )
                    if written_ns is not None:
                        facts["skew_ns"] = facts["window_start_ns"] - written_ns
                    self.tell("verified", **facts)
                except ProfilerError as error:  # noqa: PERF203  (it is tried again)
                    delete_output(self.order.incoming, self.order.name(attempt))
                    if error.slug == "not-stepping":
                        if time.monotonic() + _BACK_OFF_S > waited_until:
                            raise
                        if is_timed and seconds is not None:
                            seconds = min(order.max_seconds, 2 * seconds)
                    elif error.slug not in retried and (
                        error.slug in ("cancelled-by-program", "empty")
                        or (error.slug == "rejected" and order.start_ns is not None)
                    ):
                        retried.add(error.slug)
                    else:
                        raise
                    attempt, resumed, order.start_ns = attempt + 1, "queued", None
                    self.tell(
                        "queued",
                        error.slug,
                        f"once more, as {error.message}",
                        attempt=attempt,
                        start_ns=None,
                    )
                    pause_s = 0.0
                    # No profile of the program interfered: PyTorch may still be being imported.
                    if error.slug != "cancelled-by-program":
                        client = self.registry.clients.get(process.key)
                        polled_s = (
                            (time.time_ns() - client.first_ns) / 1e9 if client is not None else 0.0
                        )
                        pause_s = max(_BACK_OFF_S, min(_IMPORT_S - polled_s, _IMPORT_S))
                    waited_until = max(waited_until, time.monotonic() + pause_s + _BACK_OFF_S)
                    await asyncio.sleep(pause_s)
                else:
                    # If the agent is killed before this is on disk, the next one verifies the file
                    # again.
                    await self.tell("kept", **facts, file=path.name)
                    delete_output(self.order.incoming, self.order.name(attempt))
                    return [path]
        finally:
            self.registry.offers.pop(process.key, None)
            if order.start is not None:
                order.start.leave(process.key)

    async def _write(  # noqa: PLR0917  (of one try)
        self,
        process: Process,
        window: Window,
        seconds: float | None,
        attempt: int,
        resumed: State,
        until: float,
    ) -> int | None:
        """Wait until the file has its name; returns the start time if one was set."""
        order = self.order
        name = order.name(attempt)
        start_ns = order.start_ns
        watch = _TraceFileWatch(self.order.incoming, name)
        if watch.written():
            return start_ns
        # With a start time it may have been delivered although a killed agent did not record that.
        if resumed == "queued" and start_ns is None:
            client = await self._ready(process, window, until)
            if self.order.start is not None:
                self.tell(
                    "queued", "not-all-ready", "waits until all processes of the request are ready"
                )
                start_ns = await self.order.start.ready(
                    process.key, START_LEAD_S + client.interval_s + 1.0
                )
                self.tell("queued", start_ns=start_ns)
            configuration = TraceConfiguration(
                path=str(order.incoming / order.name(attempt)),
                trace_id=order.trace_id,
                group_id=order.group_id,
                duration_ms=0 if seconds is None else max(1, round(seconds * 1000)),
                steps=(window.steps or 0) if seconds is None else 0,
                fallback_ms=_FALLBACK_MS if seconds is None else 0,
                start_ms=0 if start_ns is None or seconds is None else start_ns // 1_000_000,
                start_step=order.at_step if seconds is None else 0,
                shapes=order.shapes,
                stacks=order.stacks,
                flops=order.flops,
                modules=order.modules,
            )
            await self._deliver(process, window, configuration, start_ns, until)
        begin_s = max(0.0, (start_ns or 0) / 1e9 - time.time()) if start_ns else _TYPICAL_LEAD_S
        if seconds is None:
            steps_made, rate = order.steps_made(process.key), order.steps_per_second(process.key)
            ahead = max(order.at_step - steps_made, 0) if steps_made is not None else 0
            begin_s = _SLOW_STEP_S + (ahead / rate if rate else 0.0)
        await self._collected(process, watch, begin_s, seconds or self.order.max_seconds)
        return start_ns

    async def _ready(self, process: Process, window: Window, until: float) -> ProfilerClient:
        """Wait until the process polls, is idle, and, for a trace by steps, steps if that is
        known.
        """
        last_reason = ""
        while True:
            reason, detail = self._hindrance(process, window)
            if not reason:
                return self.registry.clients[process.key]
            if reason != last_reason:
                self.tell("queued", reason, detail)
                last_reason = reason
            self._check_alive(process)
            if time.monotonic() > until:
                raise ProfilerError(
                    detail, slug="not-registered" if reason == "not-registered" else "expired"
                )
            await asyncio.sleep(_POLL_S)

    def _hindrance(self, process: Process, window: Window) -> tuple[str, str]:
        """Returns what a process still waits for, as a slug and a sentence; "" if it is ready."""
        client, reason, detail = self.registry.clients.get(process.key), "", ""
        if client is None:
            reason, detail = "not-registered", "its PyTorch does not ask for traces"
        elif client.busy:
            reason, detail = "own-profiler", "its own profiler runs"
        elif time.monotonic() - client.polled > 2 * client.interval_s + _GRACE_S:
            reason, detail = "silent", "it has not polled of late: it is stopped, or very busy"
        elif window.steps is not None and self.order.steps_per_second(process.key) == 0:
            reason, detail = "not-stepping", "it does not step"
        return reason, detail

    async def _deliver(
        self,
        process: Process,
        window: Window,
        configuration: TraceConfiguration,
        start_ns: int | None,
        until: float,
    ) -> None:
        """Deliver the configuration with the reply to the next poll of an idle process."""
        text = configuration.text()
        delivered = asyncio.Event()

        def offered(_client: ProfilerClient) -> str:
            late = start_ns is not None and time.time_ns() + int(START_LEAD_S * 1e9) > start_ns
            return "" if late else text

        self.registry.offers[process.key] = PendingConfiguration(
            text=offered, delivered=delivered.set
        )
        last_reason = ""
        while not delivered.is_set():
            reason, detail = self._hindrance(process, window)
            if reason != last_reason:
                self.tell("queued", reason, detail)
                last_reason = reason
            if start_ns is not None and time.time_ns() + int(START_LEAD_S * 1e9) > start_ns:
                raise ProfilerError(
                    "it did not poll early enough before the common start", slug="expired"
                )
            if start_ns is None and time.monotonic() > until:
                raise ProfilerError(detail or "it did not become ready in time", slug="expired")
            self._check_alive(process)
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(delivered.wait(), _POLL_S)
        self.tell("delivered")

    async def _collected(
        self, process: Process, watch: _TraceFileWatch, begin_s: float, seconds: float
    ) -> None:
        began = time.monotonic()
        quiet_until, deadline = began + begin_s + _GRACE_S, began + begin_s + seconds + _DRAIN_S
        polls = _PollTracker(process.key, quiet_until)
        self.registry.listeners.append(polls)
        accepted = False
        try:
            while not watch.written():
                if not accepted and (polls.was_busy or watch.begun()):
                    accepted = True
                    self.tell("accepted")
                if polls.idle >= 2 and not watch.written():
                    if polls.was_busy:
                        raise ProfilerError(
                            "the program started a profile of its own and so cancelled it",
                            slug="cancelled-by-program",
                        )
                    raise ProfilerError("PyTorch's profiler did not take it", slug="rejected")
                if time.monotonic() > deadline:
                    raise ProfilerError("no whole trace was written in time", slug="deadline")
                self._check_alive(process, watch)
                await asyncio.sleep(_POLL_S)
        finally:
            self.registry.listeners.remove(polls)
        self.tell("written")

    def _check_alive(self, process: Process, watch: _TraceFileWatch | None = None) -> None:
        if read_process_state(process.pid, process.start_ticks, self.registry.proc) or (
            watch is not None and watch.written()
        ):
            return
        raise ProfilerError("the process has ended", slug="exited")


async def store_trace(  # noqa: PLR0917  (of one try)
    order: TimelineOrder,
    uid: int,
    window: Window,
    seconds: float | None,
    attempt: int,
    path: Path,
    start_ns: int | None,
) -> dict[str, Any]:
    """Verify and compress a trace of a user's process in a worker process; returns the facts of the
    kept file.

    Raises:
        ProfilerError: `damaged`, `empty`, `not-stepping`, `foreign-file`, `disk-full`, `quota`,
            `cannot-write`, `task-failed`.
    """
    task = partial(
        worker.run,
        "keep-trace",
        timeout_s=_STORE_TIMEOUT_S,
        folder=str(order.incoming),
        name=order.name(attempt),
        uid=uid,
        to=str(path),
        max_bytes=order.max_bytes,
        max_kept_bytes=order.max_kept_bytes,
        max_result_bytes=order.max_result_bytes,
        trace_id=order.trace_id,
        start_ns=start_ns,
        duration_s=seconds,
        steps=window.steps,
    )
    return await run_store_task(task)


async def run_store_task(task: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a storing task in a thread; returns the facts of the kept file, or raises the fault."""
    try:
        facts = await asyncio.to_thread(task)
    except TraceloomError as error:
        raise ProfilerError(error.message, slug="task-failed") from error
    if "fault" in facts:
        raise ProfilerError(facts["detail"], slug=facts["fault"])
    return facts


class _TraceFileWatch:
    """The file that libkineto writes, which has another name until it is complete."""

    def __init__(self, directory: Path, name: str) -> None:
        self._whole, self._part = directory / name, directory / f"{name}.tmp"

    def begun(self) -> bool:
        return os.path.lexists(self._part)

    def written(self) -> bool:
        return os.path.lexists(self._whole)


class _PollTracker:
    """Interprets the polls of a process after delivery: busy or idle; idle ones count from an
    instant on.
    """

    def __init__(self, key: str, quiet_until: float) -> None:
        self._key, self._quiet_until = key, quiet_until
        self.was_busy = False
        self.idle = 0

    def __call__(self, client: ProfilerClient) -> None:
        if client.key != self._key:
            return
        if client.busy:
            self.was_busy, self.idle = True, 0
        elif self.was_busy or client.polled > self._quiet_until:
            self.idle += 1
