"""The agent's main object: builds the parts, starts and stops them in order, and handles ticks and
signals.

Collectors, including those of accelerators and owners, deliver readings to the snapshot
(snapshot.py), the latest value of everything. Publishers and HTTP handlers read it, and the history
(history.py) keeps its values over time.

One asyncio loop answers from memory. Whatever waits for a device or a disk runs in a thread; long
computations run in a process (`worker.py`). Nothing in the loop imports NumPy, Polars or torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from traceloom import __version__
from traceloom.agent import doctor as checks, history, worker
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.api import (
    Check,
    CollectorResponse,
    HistoryQuery,
    SeriesResponse,
    StatusResponse,
    StepsBody,
)
from traceloom.agent.audit import AuditLog
from traceloom.agent.collectors.collector import Collector
from traceloom.agent.collectors.host import Cgroups, create_host_collectors
from traceloom.agent.collectors.scheduler import Scheduler
from traceloom.agent.config import AgentPaths, Config
from traceloom.agent.database import RequestStore
from traceloom.agent.fleet_link.link import FleetConnection
from traceloom.agent.guard import SocketGuard
from traceloom.agent.handlers.app import build_app
from traceloom.agent.hangs.bundle import find_collective_waits
from traceloom.agent.hangs.service import HangService
from traceloom.agent.hangs.stacks import GroupedStacks, collect_stacks, group_stacks
from traceloom.agent.history import History, Points, merge_series
from traceloom.agent.kineto import KinetoSockets, ProfilerClient, ProfilerRegistry
from traceloom.agent.metrics import HistogramReading, Reading
from traceloom.agent.ownership.environment import get_job_variables
from traceloom.agent.ownership.model import Process
from traceloom.agent.ownership.resolver import OwnedProcessCollector, collect_jobs
from traceloom.agent.profilers.telemetry import TelemetryProfiler
from traceloom.agent.publishers import OtlpPublisher
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.steps import ProbedStepClock, StepCounter
from traceloom.agent.topline import JobAccounting, TracedFacts, collect_matrix_types
from traceloom.agent.traces.files import TraceDirectories
from traceloom.agent.traces.runner import TraceService
from traceloom.agent.triggers.adapter import TriggerEngine
from traceloom.agent.triggers.store import TriggerStore
from traceloom.agent.triggers.watches import HangWatch
from traceloom.errors import InputError, OutputError, TraceloomError, nearest
from traceloom.server.access import RateLimiter, RefusalCounter
from traceloom.server.listener import serve
from traceloom.server.problem import HttpError

LOG = logging.getLogger("traceloom.agent")
_FORGET_AFTER_S = 600.0
_TRIGGER_INTERVAL_S = 1.0  # between evaluations of the rules
_AFTER_DEFECT_S = 60.0
_LAST_TICK_S = 5.0  # time-out of the last write when the agent ends
_MAX_READING_S = 300.0  # time-out for reading the facts of a trace
_MAX_JOBS = 1024  # jobs whose traced facts are kept
_MAX_STACK_REQUESTS = 8  # about a user; each examines every process of a job
_AUDITED_AT_ONCE, _AUDITED_PER_S = 100.0, 1.0  # lines in full of each user or token
_MAX_REPORTING_PROCESSES = 4096  # processes examined because they report steps


class Agent:
    """The agent of a host, or of a user. Runs in one asyncio loop; all its methods are called
    there.

    Args:
        config: The configuration.
        locations: Locations of its files.

    Raises:
        InputError: `other-version`: a database has another schema; `wrong-config`: it names an
            unknown collector.
    """

    def __init__(self, config: Config, locations: AgentPaths) -> None:
        self.config: Config = config
        self.locations = locations
        self.host_snapshot: Snapshot = Snapshot()
        self.history = History(locations.history, config.history)
        self.audit = AuditLog(locations.audit)
        self._refusals = RefusalCounter()
        self._audited = RateLimiter(_AUDITED_PER_S, burst=_AUDITED_AT_ONCE)
        self.accelerators = AcceleratorCollector(config)
        self.processes = OwnedProcessCollector(config, self.accelerators)
        self.step_clock = ProbedStepClock(config, lambda: list(self.processes.owned.values()))
        self.cgroups = Cgroups(config, lambda: self.processes.owned)
        collectors: list[Collector] = [
            *create_host_collectors(config),
            self.accelerators,
            *self.processes.collectors,
            self.cgroups,
            self.step_clock,
        ]
        names = {collector.name for collector in collectors}
        for key, configured in (
            ("periods", config.collect.periods),
            ("timeouts", config.collect.timeouts),
            ("off", config.collect.off),
        ):
            for name in set(configured) - names:
                raise InputError(
                    f"there is no collector `{name}`",
                    slug="wrong-config",
                    where=f"collect.{key}",
                    hint=nearest(name, names) + f"there are {', '.join(sorted(names))}",
                )
        enabled = [
            collector for collector in collectors if collector.name not in config.collect.off
        ]
        self.scheduler = Scheduler(self.host_snapshot, enabled, self._delivered)
        self.topline = JobAccounting(config.accelerators.reference)
        self.step_counts = StepCounter()
        self.otlp = OtlpPublisher(config) if config.otlp.endpoint else None
        self.boot_id = ""
        with contextlib.suppress(OSError):
            path = Path(config.collect.proc, "sys/kernel/random/boot_id")
            self.boot_id = path.read_text(encoding="ascii").strip()
        self.registry = ProfilerRegistry(config.collect.proc)
        self.registry.listeners.append(self._polled)
        self.trace_service: TraceService = TraceService(
            config,
            self.registry,
            lambda: self.host_snapshot.processes,
            self.step_counts,
            RequestStore(locations.requests),
            TraceDirectories(locations.traces),
            self.boot_id,
            {
                "telemetry": partial(
                    TelemetryProfiler, self.host_snapshot, self.scheduler, config.host_name
                )
            },
        )
        self.uplink: FleetConnection | None = None
        if config.fleet.server:
            self.uplink = FleetConnection(
                config,
                locations.history.parent,
                self.host_snapshot,
                self.trace_service,
                self.topline,
                self.boot_id,
            )
        self.hangs: HangService = HangService(
            config,
            self.host_snapshot,
            self.history,
            self.step_counts,
            places=self.trace_service.places,
            path=locations.hangs,
            boot_id=self.boot_id,
            note=lambda what, details: self.acts(
                "agent", os.getpid(), what, allowed=True, **details
            ),
        )
        self.kineto: KinetoSockets | None = None  # while it runs
        self.job_facts: dict[str, TracedFacts] = {}  # facts of the last trace of each job
        self._requests: Counter[tuple[str, str]] = Counter()
        self._writing = ThreadPoolExecutor(1, "history")
        # Boot time of the host.
        self._started_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self.triggers: TriggerEngine = TriggerEngine(
            config,
            self.host_snapshot,
            self.trace_service,
            TriggerStore(locations.triggers if config.triggers else None),
            self._writing,
            self.audit,
            self._steady_ns(),
            {"hang": lambda _: HangWatch(self.hangs)},
        )
        self._reading = ThreadPoolExecutor(2, "query")
        # Users whose traces are read, and whose processes are looked at: one for each at a time, so
        # that those of one delay nobody else.
        self._analysing: set[int] = set()
        self._looking: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stack_questions: Counter[int] = Counter()  # in progress or waiting
        self._stop = asyncio.Event()
        self._ticked = time.monotonic()

    async def run(self, ready: Callable[[], Awaitable[None] | None] = lambda: None) -> None:
        """Run until `stop` or a signal; `ready` is called when all sockets listen.

        Raises:
            TraceloomError: An address or a socket is unavailable, or the configuration is not safe.
        """
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        async with contextlib.AsyncExitStack() as stack:
            guard = SocketGuard()
            stack.callback(guard.close)
            server = await serve(
                build_app(self), self.config.tcp, self.config.access, self.locations.socket
            )
            stack.push_async_callback(server.close)
            guard.watch(self.locations.socket)
            self.kineto = KinetoSockets(
                self.locations.kineto,
                self.registry,
                abstract=self.config.traces.abstract,
                interval_s=self.config.traces.poll,
                bound=guard.watch,
            )
            self.kineto.start()
            stack.callback(self.kineto.close)
            await self.trace_service.start()
            stack.push_async_callback(self.trace_service.close)
            if self.uplink is not None:
                self.uplink.start()
                stack.push_async_callback(self.uplink.close)
            await self.hangs.start()
            stack.push_async_callback(self.hangs.close)
            if self.otlp is not None:
                self.otlp.start()
                publishing = asyncio.create_task(self._publish(self.otlp), name="otlp")
                stack.callback(self.otlp.close)
                stack.callback(publishing.cancel)
            stack.callback(self.accelerators.close)
            stack.callback(self.step_clock.close)
            stack.callback(self.history.close)
            stack.callback(self._writing.shutdown)
            self.scheduler.start()
            stack.push_async_callback(self.scheduler.stop)
            if self.triggers.rules:
                trigger_task = asyncio.create_task(self._check_rules(), name="triggers")
                stack.push_async_callback(
                    lambda: asyncio.gather(trigger_task, return_exceptions=True)
                )
                stack.callback(trigger_task.cancel)
            LOG.info("listens at %s", self.locations.socket)
            waiting = ready()
            if waiting is not None:
                await waiting
            await self._tick_until_stopped(guard)

    def stop(self) -> None:
        """Shut down in order."""
        self._stop.set()

    # Used by the HTTP handlers.

    def status(self) -> StatusResponse:
        return StatusResponse(
            version=__version__,
            host=self.config.host_name,
            boot_id=self.boot_id,
            pid=os.getpid(),
            uid=os.geteuid(),
            started_ns=self.host_snapshot.started_ns,
            now_ns=time.time_ns(),
            series=self.host_snapshot.series(),
            devices=len(self.host_snapshot.devices),
            stale_devices=len(
                [uuid for uuid, device in self.host_snapshot.devices.items() if device.stale]
            ),
            processes=len(self.host_snapshot.processes),
            collectors=[
                CollectorResponse(
                    name=state.name,
                    period_seconds=state.period_s,
                    ran_ns=state.ran_ns or None,
                    seconds=state.seconds,
                    runs=state.runs,
                    failures=dict(state.failures),
                    last_error=state.last_error,
                )
                for state in self.host_snapshot.collectors.values()
            ],
            history={
                "bytes": float(self.history.bytes()),
                "lost_ticks": float(sum(self.history.lost.values())),
            },
            history_error=self.history.last_error,
            publishers=({"otlp": self.otlp.last_error} if self.otlp is not None else {})
            | (
                {f"fleet {self.uplink.config.fleet.server}": self.uplink.last_error}
                if self.uplink is not None
                else {}
            ),
        )

    async def doctor(self) -> list[Check]:
        idle = self.triggers.list_problems()  # must be called in the loop
        return await asyncio.get_running_loop().run_in_executor(
            self._reading, lambda: checks.examine_agent(self, idle)
        )

    async def query(self, question: HistoryQuery) -> Sequence[SeriesResponse]:
        """Returns the history of a metric.

        Raises:
            HttpError: The metric has no such label.
        """

        def seen(name: str, points: list[Points]) -> list[Points]:
            pairs = ((series, question.seen_as((name, series.labels))) for series in points)
            return [
                series._replace(labels=labels[1]) for series, labels in pairs if labels is not None
            ]

        metric = history.resolve_metric_name(question.metric)
        histories: dict[str, list[Points]] = {}
        for name in {metric, *history.ATTRIBUTION_METRICS}:
            points = self.history.recent(name, question.since_ns, question.until_ns)
            histories[name] = seen(name, points)
        loop = asyncio.get_running_loop()
        if question.since_ns < self.history.recent_from_ns():
            for name in history.list_needed_metrics(metric, (*question.by, *question.where)):
                older = await loop.run_in_executor(
                    self._reading, self.history.query, name, question.since_ns, question.until_ns
                )
                histories[name] = merge_series(seen(name, older), histories[name])
        try:
            curves = history.evaluate_query(
                metric,
                lambda name: histories[name],
                by=question.by,
                where=question.where,
                raw=question.raw,
            )
        except TraceloomError as error:
            raise HttpError(400, error.message, slug=error.slug, hint=error.hint) from error
        return [
            SeriesResponse(labels=labels, times_ns=times_ns, values=values)
            for labels, times_ns, values in curves
        ]

    async def pause(self, seconds: float) -> list[str]:
        """Release the hardware counters for `seconds`; returns the back ends that did."""
        loop = asyncio.get_running_loop()
        paused = await loop.run_in_executor(None, self.accelerators.pause, seconds)
        return [back_end.name for back_end in self.accelerators.back_ends] if paused else []

    async def learn(self, job: str, path: str, user: int) -> TracedFacts:
        """Read facts about a job from a trace of it; `user` must be able to read the file.

        Raises:
            HttpError: It cannot be read, or another one is being read.
        """
        if user in self._analysing:
            raise HttpError(429, "another trace is being read", slug="busy", retry_s=5)
        self._analysing.add(user)
        reader = user if os.geteuid() == 0 and user != 0 else None
        task = partial(worker.run, "job-facts", timeout_s=_MAX_READING_S, user=reader, path=path)
        try:
            facts = msgspec.convert(await asyncio.to_thread(task), TracedFacts)
        except TraceloomError as error:
            raise HttpError(400, error.message, slug=error.slug, hint=error.hint) from error
        finally:
            self._analysing.discard(user)
        self.job_facts = dict([*self.job_facts.items(), (job, facts)][-_MAX_JOBS:])
        return facts

    async def stacks(self, processes: Sequence[Process], *, native: bool) -> GroupedStacks:
        """Returns the current stacks of processes grouped as in `group_stacks`; one request about a
        user at a time.

        Raises:
            HttpError: `busy`: several requests wait already.
        """
        user = processes[0].uid
        if self._stack_questions[user] >= _MAX_STACK_REQUESTS:
            raise HttpError(429, "others are looked at", slug="busy", retry_s=5)
        self._stack_questions[user] += 1
        try:
            async with self._looking[user]:
                stack_dumps = await collect_stacks(processes, native=native)
                # Python stacks do not show a wait inside C++; the flight recorder does, if it is
                # on.
                waits = await find_collective_waits(processes)
        finally:
            self._stack_questions[user] -= 1
        return await asyncio.to_thread(
            group_stacks, processes, stack_dumps.dumps, stack_dumps.reasons, waits=waits
        )

    def steps(self, pid: int, uid: int, body: StepsBody) -> None:
        """Count steps that a process reports."""
        process = next(
            (row for row in self.host_snapshot.processes.values() if row.pid == pid), None
        )
        if process is None:  # started after the last scan of processes; its next report counts
            if len(self.processes.reporting) < _MAX_REPORTING_PROCESSES:
                self.processes.reporting = self.processes.reporting | {pid}
            return
        if process.uid != uid:
            raise HttpError(403, "this process is another user's", slug="not-allowed")
        owner = process.owner
        rank = owner.rank
        if rank is None:
            rank = self.step_counts.settle_rank(process.key, body.rank)
        self.step_counts.report(
            process.key, owner.job, rank, body.steps, body.loader_wait_seconds, body.total
        )

    def environment(self, uid: int) -> dict[str, str]:
        """Returns the variables that prepare a job of a user.

        Raises:
            HttpError: `socket-unusable`: its directory cannot be created.
        """
        if self.kineto is None or self.kineto.last_error:
            reason = self.kineto.last_error if self.kineto is not None else "it begins only now"
            raise HttpError(
                503, f"PyTorch's profiler cannot be listened to: {reason}", slug="socket-unusable"
            )
        try:
            self.kineto.prepare(uid)
        except OutputError as error:
            raise HttpError(503, str(error), slug=error.slug, hint=error.hint) from error
        return get_job_variables(self.locations, uid)

    def acts(
        self, actor: str, pid: int | None, route: str, *, allowed: bool, **details: object
    ) -> None:
        """Write an action or a refusal to the audit log."""
        result = "done" if allowed else "not-allowed"
        # Who does much in little time would push out what others did; root and the agent itself may.
        may_write = actor in ("agent", "uid 0") or self._audited.has_room(actor)
        if not (allowed and may_write):
            times = self._refusals.count(actor, route)
            if not times:
                return
            details |= {"times": times} if times > 1 else {}
        self._writing.submit(self.audit.write, actor, route, result, pid=pid, **details)

    def asked(self, route: str, code: int) -> None:
        self._requests[route, str(code)] += 1

    # Internal.

    def _polled(self, client: ProfilerClient) -> None:
        """Mark a polling process as relevant, even if no framework was detected in it."""
        if client.key in self.host_snapshot.processes or client.pid in self.processes.reporting:
            return
        if len(self.processes.reporting) < _MAX_REPORTING_PROCESSES:
            self.processes.reporting = self.processes.reporting | {client.pid}

    def _delivered(self, collector: Collector) -> None:
        if collector is self.accelerators:
            self.host_snapshot.devices = self.accelerators.devices
            self.host_snapshot.device_processes = self.accelerators.device_processes
            self.host_snapshot.events = list(self.accelerators.events)
        elif collector is self.processes:
            self.step_counts.forget(set(self.processes.owned))
            self.host_snapshot.processes = {
                key: msgspec.structs.replace(
                    process, steps_per_second=self.step_counts.per_second(key)
                )
                for key, process in self.processes.owned.items()
            }
        elif collector is self.cgroups:
            self.host_snapshot.oom_kills = list(self.cgroups.kills)
        elif collector is self.step_clock:
            for steps_taken in self.step_clock.taken:
                if steps_taken.process in self.host_snapshot.processes:
                    owner = self.host_snapshot.processes[steps_taken.process].owner
                    self.step_counts.count(steps_taken, owner.job, owner.rank)
        # At the period of the collectors, even while they are fast.
        self.history.keep(self.host_snapshot, time.time_ns())

    async def _tick_until_stopped(self, guard: SocketGuard) -> None:
        loop = asyncio.get_running_loop()
        interval = self.config.history.interval
        next_tick = time.monotonic() + interval
        next_forget = time.monotonic() + _FORGET_AFTER_S
        busy: asyncio.Future[None] | None = None
        while not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1.0)
            self.history.keep(self.host_snapshot, time.time_ns())
            self.hangs.check()
            now = time.monotonic()
            if now < next_tick and not self._stop.is_set():
                continue
            next_tick = max(next_tick + interval, now)
            self._sum_up()
            if not guard.check():
                LOG.warning("the guard had ended; another one watches the socket")
            at_ns, values = (
                time.time_ns(),
                [(series, value) for series, value, _ in self.host_snapshot.values()],
            )
            if busy is None or busy.done():
                busy = loop.run_in_executor(self._writing, self.history.write, at_ns, values)
            else:
                self.history.lost["slow-disk"] = self.history.lost.get("slow-disk", 0) + 1
            if now >= next_forget:
                next_forget = now + _FORGET_AFTER_S
                loop.run_in_executor(self._writing, self.history.forget, time.time_ns())
                self.registry.forget()
                self.trace_service.delete_expired()
                if self.kineto is not None:
                    loop.run_in_executor(self._reading, self.kineto.sweep)
        if busy is not None:
            try:
                await asyncio.wait_for(asyncio.shield(busy), _LAST_TICK_S)
            except (asyncio.TimeoutError, TimeoutError):
                LOG.warning(
                    "the last tick of history is not written: the disk took longer than %g s",
                    _LAST_TICK_S,
                )

    async def _check_rules(self) -> None:
        await self.triggers.start(self._steady_ns())
        while True:
            await asyncio.sleep(_TRIGGER_INTERVAL_S)
            try:
                await self.triggers.tick(self._steady_ns())
            except Exception:
                LOG.exception("triggers have a defect: they are looked at again in a minute")
                await asyncio.sleep(_AFTER_DEFECT_S)

    def _steady_ns(self) -> int:
        """Returns ns since the epoch, of a clock that is set when the agent starts and never
        jumps.
        """
        return self._started_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    async def _publish(self, otlp: OtlpPublisher) -> None:
        """Send a copy of the snapshot every `otlp.period`; a slow receiver delays nothing else."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "otlp")
        try:
            while True:
                await asyncio.sleep(self.config.otlp.period)
                await loop.run_in_executor(thread, otlp.put, self.host_snapshot.copy())
        finally:
            thread.shutdown(wait=False)

    def _sum_up(self) -> None:
        """Update the metrics derived from the whole snapshot: jobs, steps, the agent itself."""
        now_ns, now = time.time_ns(), time.monotonic()
        interval_s, self._ticked = (
            now - self._ticked,
            now,
        )  # a clock jump adds no device time to jobs
        # Zeros as well: Prometheus misses the first increment of a counter that starts at 1.
        lost = {"slow-disk": 0, **self.history.lost}
        self.host_snapshot.put("steps", self.step_counts.readings(), now_ns)
        self.host_snapshot.put("hangs", self.hangs.readings(), now_ns)
        jobs = collect_jobs(self.host_snapshot.processes.values(), self.step_counts, self.job_facts)
        self.accelerators.element_types = collect_matrix_types(jobs)
        self.host_snapshot.put(
            "jobs",
            self.topline.readings(self.host_snapshot, interval_s, self.processes.shares, jobs),
            now_ns,
        )
        if self.uplink is not None and (ended := self.uplink.tick()):
            self._writing.submit(self.uplink.backlog.put, ended)
        self.host_snapshot.put("triggers", self.triggers.readings(), now_ns)
        used, system = resource.getrusage(resource.RUSAGE_SELF), os.uname()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        readings: list[Reading | HistogramReading] = [
            Reading(
                "host_info",
                (self.config.host_name, self.boot_id, system.release, system.machine, __version__),
                1.0,
            ),
            Reading("agent_cpu_seconds_total", (), used.ru_utime + used.ru_stime),
            Reading("agent_memory_bytes", (), float(pages * resource.getpagesize())),
            Reading("agent_series", (), float(self.host_snapshot.series())),
            *self.scheduler.readings(),
            *(self.uplink.readings() if self.uplink is not None else ()),
            *(
                Reading("agent_history_lost_total", (reason,), float(ticks))
                for reason, ticks in lost.items()
            ),
            *(
                Reading("agent_requests_total", labels, float(number))
                for labels, number in self._requests.items()
            ),
        ]
        if self.otlp is not None:
            readings.append(Reading("agent_export_failures_total", (), float(self.otlp.failures)))
        if self.history.path is not None:
            readings.append(Reading("agent_history_bytes", (), float(self.history.bytes())))
        self.host_snapshot.put("agent", readings, now_ns)


def notify_ready() -> None:
    """Notify systemd that the agent is ready, if systemd has requested it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.connect("\0" + address[1:] if address.startswith("@") else address)
        datagrams.send(b"READY=1")
