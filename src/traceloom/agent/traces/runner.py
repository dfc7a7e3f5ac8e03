"""Accepts trace requests, runs them and tracks their progress; resumes them after a restart.

Everything here runs in the agent's loop; disk access in a thread, long work in a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from traceloom import __version__
from traceloom.agent.config import Config
from traceloom.agent.database import RequestStore
from traceloom.agent.kineto import (
    ProfilerClient,
    ProfilerRegistry,
    iterate_ancestors,
    read_process_state,
)
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers import base
from traceloom.agent.profilers.attached import AttachedMemoryProfiler, AttachedTimelineProfiler
from traceloom.agent.profilers.base import Profiler, ProfilerError, Window
from traceloom.agent.profilers.timeline import (
    START_LEAD_S,
    StartBarrier,
    TimelineOrder,
    TimelineProfiler,
)
from traceloom.agent.steps import StepCounter
from traceloom.agent.traces.files import TraceDirectories, write_document
from traceloom.agent.traces.requests import (
    LeaseTable,
    State,
    TraceRequest,
    TraceSpec,
    TraceTarget,
    TriggerCause,
)
from traceloom.errors import OutputError, nearest
from traceloom.server.problem import HttpError

LOG = logging.getLogger("traceloom.agent")
CAPTURE_FILE = "capture.json"  # as docs/reference/capture-json.md describes it
_POLL_S = 0.2
_MAX_TARGETS = 4096  # per request
_MAX_REQUESTS = 500  # of a user that have ended


class TraceService:
    """All requests of this agent.

    Args:
        config: The agent's.
        registry: Processes that poll.
        processes: Returns the relevant processes by key.
        steps: Their step rates.
        store: Persists the requests.
        places: Directories of the results.
        boot_id: Of this host: no process survives a reboot.
        parts: Creates the profilers that need parts of the agent, by name.
    """

    def __init__(  # noqa: PLR0917  (the parts of the agent)
        self,
        config: Config,
        registry: ProfilerRegistry,
        processes: Callable[[], Mapping[str, Process]],
        steps: StepCounter,
        store: RequestStore,
        places: TraceDirectories,
        boot_id: str,
        parts: Mapping[str, Callable[[], Profiler]] | None = None,
    ) -> None:
        self.parts = parts or {}
        self.config, self.registry, self.processes, self.steps = config, registry, processes, steps
        self.store, self.places, self.boot_id = store, places, boot_id
        self.requests: dict[str, TraceRequest] = {}  # oldest first
        self._running: dict[str, asyncio.Task[None]] = {}
        self._targets: dict[str, list[asyncio.Task[None]]] = {}
        self._leases = LeaseTable()
        self._changed = asyncio.Condition()
        self._versions: dict[str, int] = {}
        self._disk = ThreadPoolExecutor(1, "requests")
        self._pending_writes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Resume the requests of an earlier agent."""
        loop = asyncio.get_running_loop()
        for request in await loop.run_in_executor(self._disk, self.store.load):
            self.requests[request.id] = request
            if not request.ended:
                self._run(request)

    async def close(self) -> None:
        """Stop; requests keep their state for the next agent."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*self._pending_writes, return_exceptions=True)
        self._disk.shutdown()

    async def submit(
        self,
        spec: TraceSpec,
        requester: str,
        may_trace: Callable[[int], bool],
        *,
        trigger: TriggerCause | None = None,
        max_bytes: int | None = None,
        at_step: int = 0,
    ) -> TraceRequest:
        """Accept a request, persist it, and start it.

        Args:
            spec: The request.
            requester: Its caller, for the log.
            may_trace: Whether the caller may trace processes of a user.
            trigger: The rule that requests it, if any.
            max_bytes: Max size of each kept file, if less than configured.
            at_step: First step to trace of each process; 0: as `spec` says. Only for timelines by
                steps.

        Raises:
            HttpError: `wrong-request`, `no-such-process`, `several-users`, `no-profiler`, `quota`,
                `too-much`, `cannot-write`.
        """
        self.check(spec)
        matching = self.matching(spec, may_trace)
        users = {process.uid for process in matching}
        if len(users) != 1:
            raise HttpError(
                400,
                f"that matches processes of {len(users)} users",
                slug="several-users",
                hint="name --pid or --job",
            )
        uid = users.pop()
        running = sum(
            request.uid == uid and not request.ended for request in self.requests.values()
        )
        if running >= self.config.traces.max_requests_per_user:
            raise HttpError(
                429,
                "too many requests of this user run already",
                slug="quota",
                retry_s=10,
                hint="`traces.max_requests_per_user` of agent.toml",
            )
        request = TraceRequest(
            id=secrets.token_hex(6),
            who=requester,
            uid=uid,
            asked_ns=time.time_ns(),
            boot_id=self.boot_id,
            spec=spec,
            trigger=trigger,
            max_bytes=max_bytes,
            at_step=at_step,
        )
        request.targets = list(_create_targets(request, matching, self.config.host_name))
        loop = asyncio.get_running_loop()
        self.requests[request.id] = request  # before anything is waited for: it counts at once
        try:
            await loop.run_in_executor(self._disk, self.places.prepare, uid, request.id)
            await loop.run_in_executor(self._disk, self.store.put, request)
        except OutputError as error:
            del self.requests[request.id]
            raise HttpError(503, str(error), slug=error.slug, hint=error.hint) from error
        self._run(request)
        own = [kept for kept in self.requests.values() if kept.uid == uid and kept.ended]
        self._delete(own[:-_MAX_REQUESTS])  # nobody's requests take the place of another user's
        return request

    def cancel(self, request: TraceRequest) -> None:
        """Cancel its unfinished targets; a trace that PyTorch's profiler was already configured for
        is taken but not read.
        """
        for task in self._targets.get(request.id, []):
            task.cancel("cancelled")

    async def end(self, request: TraceRequest, seconds: float) -> None:
        """Cancel a request, and wait for so long at most until it has ended."""
        await asyncio.sleep(0.05)  # tasks of one that was just made begin first
        self.cancel(request)
        if task := self._running.get(request.id):
            await asyncio.wait({task}, timeout=seconds)

    async def changes(self, request: TraceRequest) -> AsyncIterator[TraceRequest]:
        """Yields the request now, and again after each change, until it has ended."""
        while True:
            version = self._versions.get(request.id, 0)
            yield request
            if request.ended:
                return
            async with self._changed:
                await self._changed.wait_for(lambda: self._versions.get(request.id, 0) != version)  # noqa: B023

    def is_traced(self, key: str) -> bool:
        """Whether a request for the timeline of a process is unfinished."""
        return any(
            target.process == key and target.profiler == "timeline" and not target.ended
            for request in self.requests.values()
            if not request.ended
            for target in request.targets
        )

    def file(self, request: TraceRequest, name: str) -> Path:
        """Returns the path of a file of a request.

        Raises:
            HttpError: `no-such-file`.
        """
        if name not in request.files:
            raise HttpError(
                404,
                f"the request has no file `{name}`",
                slug="no-such-file",
                hint=nearest(name, request.files),
            )
        return self.places.of_request(request.uid, request.id) / name

    def delete_expired(self) -> None:
        """Delete expired requests with their files, and leftovers of processes; in the disk's
        thread.
        """
        old = time.time_ns() - int(self.config.traces.keep_days * 86_400 * 1e9)
        self._delete(
            [
                request
                for request in self.requests.values()
                if request.ended and request.asked_ns < old
            ]
        )
        self._disk.submit(self.places.sweep)

    def _delete(self, requests: list[TraceRequest]) -> None:
        for request in requests:
            del self.requests[request.id]
            self._versions.pop(request.id, None)
            self._disk.submit(self.places.remove, request.uid, request.id)
            self._disk.submit(self.store.delete, request.id)

    def matching(self, spec: TraceSpec, may_trace: Callable[[int], bool]) -> list[Process]:
        """Returns the processes that a request selects.

        Raises:
            HttpError: `no-such-process`: there are none, or none that may be traced.
        """
        if spec.host not in ("", self.config.host_name):
            raise HttpError(
                404,
                f"this is {self.config.host_name}, not {spec.host}",
                slug="no-such-process",
                hint="ask the agent of that host",
            )
        candidates = dict(self.processes())
        for client in self.registry.clients.values():
            candidates.setdefault(client.key, _build_minimal_process(client))
        matches: list[Process] = []
        for process in candidates.values():
            if not may_trace(process.uid):
                continue
            polls = self.registry.clients.get(process.key)
            ancestors: Iterable[int] = polls.ancestors if polls is not None else ()
            if polls is None and spec.attach and spec.pids:
                ancestors = iterate_ancestors(self.registry.proc, process.parent_pid)
            if (
                (
                    spec.job in {"", owner.job, f"{owner.job}@{owner.user or process.uid}"}
                    if (owner := process.owner).job
                    else not spec.job
                )
                and (not spec.ranks or process.owner.rank in spec.ranks)
                # A launcher's pid selects its children; without polling only the process itself.
                and (not spec.pids or not {process.pid, *ancestors}.isdisjoint(spec.pids))
                and (spec.pids or polls is not None or spec.attach)
            ):
                matches.append(process)
        # Ended processes are kept for a while, such as the ranks of a job that was restarted.
        matches = self._workers(
            [
                process
                for process in matches
                if read_process_state(process.pid, process.start_ticks, self.registry.proc)
            ]
        )[: spec.max_processes]
        if not matches:
            hint = "`traceloom agent ps` lists processes; others' are not traced"
            raise HttpError(404, "no process of yours matches", slug="no-such-process", hint=hint)
        if len(matches) > _MAX_TARGETS:
            raise HttpError(
                400, f"that matches {len(matches)} processes", slug="too-much", hint="name fewer"
            )
        return matches

    def _workers(self, processes: list[Process]) -> list[Process]:
        """Returns the processes without helpers: launchers of ranks, and children of ranks."""
        if any(process.owner.rank is not None for process in processes):
            processes = [process for process in processes if process.owner.rank is not None]
        commands = {process.pid: process.command for process in processes}
        processes = [  # drop processes that do not poll and were forked from one of the others
            process
            for process in processes
            if process.key in self.registry.clients
            or commands.get(process.parent_pid) != process.command
        ]
        clients = self.registry.clients
        ancestors = {
            process.key: clients[process.key].ancestors
            if process.key in clients
            else tuple(iterate_ancestors(self.registry.proc, process.parent_pid))
            for process in processes
        }
        ranks = {(process.pid, process.owner.job, process.owner.rank) for process in processes}
        steps = {process.key: bool(self.steps.per_second(process.key)) for process in processes}
        stepping = {process.pid for process in processes if steps[process.key]}
        # A process without rank and steps is a helper if it started processes that have them (the
        # launcher of `mp.spawn`) or was started by one (a worker of a data loader).
        launchers = {
            pid for process in processes if steps[process.key] for pid in ancestors[process.key]
        }
        return [
            process
            for process in processes
            if (
                process.owner.rank is None
                and (
                    steps[process.key]
                    or (
                        process.pid not in launchers and stepping.isdisjoint(ancestors[process.key])
                    )
                )
            )
            or (
                process.owner.rank is not None
                and ranks.isdisjoint(
                    (pid, process.owner.job, process.owner.rank) for pid in ancestors[process.key]
                )
            )
        ]

    def check(self, spec: TraceSpec) -> None:
        """Validate a request independent of processes.

        Raises:
            HttpError: `wrong-request`, `too-much`, `no-profiler`.
        """
        limits = self.config.traces
        if not (spec.pids or spec.job or spec.ranks or spec.host):
            raise HttpError(
                400,
                "of which processes?",
                slug="wrong-request",
                hint="name pids, a job, ranks or a host",
            )
        if (spec.steps is None) == (spec.duration_s is None):
            raise HttpError(400, "either steps or a duration", slug="wrong-request")
        if (spec.duration_s or 0) > limits.max_seconds or (spec.steps or 0) > limits.max_steps:
            raise HttpError(
                400,
                f"a trace has at most {limits.max_seconds:g} s or {limits.max_steps} steps",
                slug="too-much",
                hint="`traces.max_seconds` and `traces.max_steps` of agent.toml",
            )
        if spec.at_ns and not 0 < spec.at_ns - time.time_ns() < 86_400 * 10**9:
            raise HttpError(
                400, "it is to begin in the past, or more than a day ahead", slug="wrong-request"
            )
        for name in spec.profilers:
            if not base.has_profiler(name):
                raise HttpError(
                    400, f"there is no profiler `{name}` in this version", slug="no-profiler"
                )
        if spec.attach and not limits.attach:
            raise HttpError(
                403,
                "this agent does not attach to processes",
                slug="attach-off",
                hint="set `attach = true` in the table `traces` of agent.toml, and start the agent again",
            )
        if "memory" in spec.profilers and not spec.attach:
            raise HttpError(
                400, "`memory` attaches to the process", slug="wrong-request", hint="add --attach"
            )

    def _run(self, request: TraceRequest) -> None:
        task = asyncio.create_task(self._request(request), name=f"request {request.id}")
        self._running[request.id] = task
        task.add_done_callback(lambda _: self._running.pop(request.id, None))

    async def _request(self, request: TraceRequest) -> None:
        """Run all targets of a request, and write its capture.json at the end."""
        open_targets = [target for target in request.targets if not target.ended]
        traced = {target.process for target in open_targets if target.profiler == "timeline"}
        # Targets that an earlier agent had delivered already have a start time.
        waiting = {
            target.process
            for target in open_targets
            if target.profiler == "timeline"
            and target.state == "queued"
            and target.start_ns is None
        }
        has_others = any(target.profiler != "timeline" for target in open_targets)
        if waiting == traced and not has_others:
            request.at_step = request.at_step or self._choose_step(request.spec, traced)
        start = None
        if not request.at_step and (len(traced) > 1 or has_others or request.spec.at_ns):
            start = StartBarrier(waiting, request.spec.at_ns)
            if not waiting:
                start.leave("")
        tasks = [
            asyncio.create_task(
                self._target(request, target, start), name=f"{request.id} {target.stem}"
            )
            for target in open_targets
        ]
        self._targets[request.id] = tasks
        try:
            await asyncio.gather(*tasks)
            await self._finish(request)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._targets.pop(request.id, None)

    def _choose_step(self, spec: TraceSpec, processes: Collection[str]) -> int:
        """Returns the step with which several processes begin; 0 where it is not by steps, or not all
        of their steps are known and agree, so that they begin at one instant.
        """
        paces = [(self.steps.total(key), self.steps.per_second(key)) for key in processes]
        known = [(made, rate) for made, rate in paces if made is not None and rate]
        if len(known) < max(len(paces), 2) or spec.steps is None or spec.at_ns:
            return 0
        made, rate = max(number for number, _ in known), max(rate for _, rate in known)
        if made - min(number for number, _ in known) > max(2.0, rate):
            return 0
        intervals_s = (
            self.registry.clients[key].interval_s
            for key in processes
            if key in self.registry.clients
        )
        lead_s = START_LEAD_S + max(intervals_s, default=0.0) + 1.0
        return made + math.ceil(rate * lead_s) + 1

    async def _target(
        self, request: TraceRequest, target: TraceTarget, start: StartBarrier | None
    ) -> None:
        holder = f"{target.profiler} of request {request.id}, process {target.pid}"
        report = partial(self._tell, request, target)
        try:
            if request.boot_id != self.boot_id:
                raise ProfilerError("the host was started again since", slug="exited")  # noqa: TRY301
            process, client = (
                self.processes().get(target.process),
                self.registry.clients.get(target.process),
            )
            if process is None and client is not None:
                process = _build_minimal_process(client)
            elif process is None:  # after a restart of the agent processes are not known yet
                process = Process(
                    key=target.process,
                    pid=target.pid,
                    start_ticks=int(target.process.partition("@")[2]),
                    started_ns=0,
                    parent_pid=0,
                    uid=target.uid,
                    command="",
                )
            profiler = self._profiler(request, target, process, start)
            last_holder = ""
            until = time.monotonic() + self.config.traces.wait
            while conflict := self._leases.take(holder, profiler.resources(process)):
                if conflict != last_holder:
                    report("queued", "leased", f"waits: {conflict}")
                    last_holder = conflict
                if time.monotonic() > until:
                    raise ProfilerError(conflict, slug="expired")  # noqa: TRY301
                await asyncio.sleep(_POLL_S)
            await self._record(request, target, process, profiler, start, report)
        except ProfilerError as error:
            report("failed", error.slug, error.message)
        except asyncio.CancelledError as error:
            if error.args != ("cancelled",):
                raise  # the agent ends; the next one resumes
            report("cancelled", "cancelled", "it was cancelled")
        except Exception as error:  # a bug in a profiler ends its target, not the agent
            LOG.exception("request %s, %s of process %d", request.id, target.profiler, target.pid)
            report("failed", "internal-error", f"{type(error).__name__}: {error}")
        finally:
            self._leases.give_back(holder)
            if start is not None and target.profiler == "timeline":
                start.leave(target.process)

    def _profiler(
        self,
        request: TraceRequest,
        target: TraceTarget,
        process: Process,
        start: StartBarrier | None,
    ) -> Profiler:
        if target.profiler != "timeline":
            if target.state != "queued":
                raise ProfilerError(
                    "the agent was started again while it recorded", slug="agent-restarted"
                )
            if target.profiler != "memory":
                return self.parts.get(
                    target.profiler, partial(base.create_profiler, target.profiler)
                )()
        spec, limits = request.spec, self.config.traces
        order = TimelineOrder(
            trace_id=f"traceloom-{request.id}-{target.stem}"
            + ("" if target.profiler == "timeline" else ".memory"),
            group_id=f"traceloom-{request.id}",
            incoming=self.places.incoming(request.uid),
            stem=target.stem,
            shapes=spec.shapes,
            stacks=spec.stacks,
            flops=spec.flops,
            modules=spec.modules,
            wait_s=limits.wait,
            max_seconds=limits.max_seconds,
            max_bytes=int(limits.max_file_mb * 1e6),
            max_kept_bytes=int(limits.max_mb_per_user * 1e6),
            max_result_bytes=request.max_bytes,
            resumed=target.state,
            start_ns=target.start_ns,
            attempt=target.attempt,
            at_step=request.at_step,
            steps_per_second=self.steps.per_second,
            steps_made=self.steps.total,
            start=start if target.profiler == "timeline" else None,
        )
        report = partial(self._tell, request, target)
        if target.profiler == "memory":
            return AttachedMemoryProfiler(order, report, self._leases)
        # After a restart of the agent a polling process may not have polled yet; it still carries
        # out what was delivered.
        polls = process.key in self.registry.clients or (
            target.state != "queued" and target.attached_ns is None
        )
        if spec.attach and not polls:
            return AttachedTimelineProfiler(order, report, self._leases)
        return TimelineProfiler(self.registry, order, report)

    async def _record(  # noqa: PLR0917  (of one target)
        self,
        request: TraceRequest,
        target: TraceTarget,
        process: Process,
        profiler: Profiler,
        start: StartBarrier | None,
        report: Any,
    ) -> None:
        spec = request.spec
        directory = self.places.of_request(request.uid, request.id)
        if target.profiler == "timeline":
            paths = await profiler.record(
                process, Window(spec.at_ns, spec.duration_s, spec.steps), directory, target.stem
            )
        else:
            assert start is not None
            start_ns = await asyncio.shield(start.first)
            reports_itself = isinstance(profiler, AttachedMemoryProfiler)
            report("queued" if reports_itself else "accepted", start_ns=start_ns)
            window = Window(start_ns, spec.duration_s, spec.steps)
            rate = self.steps.per_second(process.key)
            if rate and spec.steps is not None:
                window = Window(start_ns, spec.steps / rate, spec.steps)
            elif spec.steps is not None and any(
                other.profiler == "timeline" for other in request.targets
            ):
                window = Window(start_ns, None, spec.steps, partial(self.traced, request))
            paths = await profiler.record(process, window, directory, target.stem)
            if not reports_itself:
                report("written")
                size = await asyncio.to_thread(lambda: sum(path.stat().st_size for path in paths))
                if request.max_bytes is not None and size > request.max_bytes:
                    for path in paths:
                        await asyncio.to_thread(path.unlink)
                    raise ProfilerError(
                        f"{size:,} bytes are more than {request.max_bytes:,} that a trigger may take",
                        slug="quota",
                    )
                report("kept", file=paths[0].name if paths else "", bytes=size)
        request.files += sorted({path.name for path in paths} - set(request.files))

    async def traced(self, request: TraceRequest) -> tuple[int, int]:
        """Wait for the timelines of a request; returns the actual start of the first and end of the
        last window, ns.

        Raises:
            ProfilerError: `no-duration`: no timeline was kept, or none has a known window.
        """
        timelines = [target for target in request.targets if target.profiler == "timeline"]
        async with self._changed:
            await self._changed.wait_for(lambda: all(target.ended for target in timelines))
        kept_targets = [target for target in timelines if target.state == "kept"]
        starts = [
            target.window_start_ns for target in kept_targets if target.window_start_ns is not None
        ]
        end_times = [
            target.window_end_ns for target in kept_targets if target.window_end_ns is not None
        ]
        if not starts or not end_times:
            raise ProfilerError(
                "no timeline was kept that says how long the steps took",
                slug="no-duration",
                hint="ask for a duration",
            )
        return min(starts), max(end_times)

    async def _finish(self, request: TraceRequest) -> None:
        kept_targets = [target for target in request.targets if target.state == "kept"]
        if kept_targets:
            document = self._capture(request, kept_targets)
            path = self.places.of_request(request.uid, request.id) / CAPTURE_FILE
            try:
                await asyncio.to_thread(write_document, str(path), document)
                # Include files that an earlier agent kept.
                request.files = sorted(
                    path.name for path in path.parent.iterdir() if not path.name.startswith(".")
                )
            except OSError as error:
                LOG.warning("request %s: capture.json cannot be written: %s", request.id, error)
        request.done = True
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._disk, self.store.put, request)
        except OutputError as error:
            LOG.warning("request %s: %s", request.id, error)
        await self._notify(request.id)

    def _capture(
        self, request: TraceRequest, kept_targets: Iterable[TraceTarget]
    ) -> dict[str, Any]:
        """Returns the content of capture.json: one entry per process with a timeline, and the
        request.
        """
        entries: list[dict[str, Any]] = []
        for target in kept_targets:
            if target.profiler != "timeline":
                continue
            process = self.processes().get(target.process)
            owner = process.owner if process is not None else None
            entries.append(
                {
                    "rank": target.rank,
                    "world_size": owner.world_size if owner else None,
                    "local_rank": owner.local_rank if owner else None,
                    "job": (owner.job or None) if owner else None,
                    "name": target.stem,
                    "host": self.config.host_name,
                    "process": target.pid,
                    "created_ns": request.asked_ns,
                    "written_ns": target.since_ns,
                    "window": {
                        "file": target.file,
                        "kind": "time" if request.spec.steps is None else "steps",
                        "first_step": None,
                        "step_count": target.steps,
                        "start_ns": target.window_start_ns,
                        "end_ns": target.window_end_ns,
                    },
                    "notices": [],
                }
            )
        request_fields = msgspec.to_builtins(msgspec.structs.replace(request, files=[]))
        sidecars: dict[str, list[str]] = {}
        for target in kept_targets:
            if target.profiler in ("stacks", "telemetry"):
                sidecars.setdefault(target.profiler, []).append(target.file)
        return {
            "format": "traceloom-capture",
            "version": 1,
            "traceloom": __version__,
            "stage": "profiled",
            "run": {},
            "ranks": entries,
            "request": request_fields,
            **sidecars,
        }

    def _tell(
        self,
        request: TraceRequest,
        target: TraceTarget,
        state: State,
        reason: str = "",
        detail: str = "",
        **facts: Any,
    ) -> asyncio.Task[None]:
        """Set the state of a target: at once in memory, and on disk and for listeners when the
        returned task ends.
        """
        if state != target.state or reason != target.reason:
            target.since_ns = time.time_ns()
        target.state, target.reason, target.detail = state, reason, detail
        for name, value in facts.items():
            setattr(target, name, value)
        task = asyncio.create_task(self._write(request.id, msgspec.structs.replace(target)))
        self._pending_writes.add(task)
        task.add_done_callback(self._pending_writes.discard)
        return task

    async def _write(self, request: str, target: TraceTarget) -> None:
        await self._notify(request)
        with contextlib.suppress(
            OutputError
        ):  # see the store's `last_error`; the request continues
            await asyncio.get_running_loop().run_in_executor(
                self._disk, self.store.put_target, target
            )

    async def _notify(self, request: str) -> None:
        self._versions[request] = self._versions.get(request, 0) + 1
        async with self._changed:
            self._changed.notify_all()


def _create_targets(
    request: TraceRequest, processes: Iterable[Process], host: str
) -> Iterable[TraceTarget]:
    stems: set[str] = set()
    once: set[str] = set()
    for process in sorted(
        processes, key=lambda process: (process.owner.rank is None, process.owner.rank, process.pid)
    ):
        rank = process.owner.rank
        stem = f"pid{process.pid}" if rank is None or f"rank{rank}" in stems else f"rank{rank}"
        stems.add(stem)
        for profiler in dict.fromkeys(request.spec.profilers):
            is_host_wide = profiler == "telemetry"
            if is_host_wide and profiler in once:
                continue
            once.add(profiler)
            yield TraceTarget(
                request=request.id,
                process=process.key,
                profiler=profiler,
                pid=process.pid,
                uid=process.uid,
                rank=rank,
                stem=re.sub(r"[^\w.-]", "_", host) if is_host_wide else stem,
                since_ns=request.asked_ns,
            )


def _build_minimal_process(client: ProfilerClient) -> Process:
    """Returns a process that polls and has not been examined yet."""
    return Process(
        key=client.key,
        pid=client.pid,
        start_ticks=client.start_ticks,
        started_ns=client.first_ns,
        parent_pid=client.ancestors[0] if client.ancestors else 0,
        uid=client.uid,
        command="",
    )
