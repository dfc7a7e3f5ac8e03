"""The agent's connection to the fleet: enrolment, heartbeats, work and uploads, with retries and
clock offset.

A message that leaves at `sent` by the host's clock, arrives at `received` and is answered at
`answered` by the service's clock, and is back at `returned`, bounds the offset: it is `((received -
sent) + (answered - returned)) / 2`, with an error of at most half of the time in transit (RFC 5905,
section 8).

Requests run in threads; everything else in the agent's loop. Whatever fails is retried with
backoff; the agent itself never waits for the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from traceloom import __version__
from traceloom.agent.collectors.processes import order_by_turns
from traceloom.agent.config import Config
from traceloom.agent.fleet_link.client import ServiceClient, ServiceError
from traceloom.agent.fleet_link.protocol import (
    ENDED_HOST_STATES,
    MAX_NAME_CHARS,
    ArmedProcess,
    ClockOffset,
    Enrolment,
    Heartbeat,
    HeartbeatResponse,
    HostCredentials,
    HostDevice,
    HostFile,
    HostProcess,
    HostReport,
    HostWork,
    ReportResponse,
    UsageRow,
    WorkResponse,
    keep_valid_rows,
)
from traceloom.agent.fleet_link.usage import UsageAccumulator, UsageOutbox
from traceloom.agent.metrics import Reading
from traceloom.agent.ownership.environment import parse_cgroup_paths
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.topline import JobAccounting
from traceloom.agent.traces.requests import TraceRequest
from traceloom.agent.traces.runner import TraceService
from traceloom.errors import InputError, OutputError, other_version, unreadable
from traceloom.server.problem import HttpError
from traceloom.system.files import compute_sha256, write
from traceloom.system.text import replace_surrogates

MAX_ROUND_TRIPS = 16
# Max drift between two clocks since a round trip; NTP assumes 15 ppm, undisciplined quartz has up
# to 50.
MAX_CLOCK_DRIFT = 50e-6
_CLOCK_JUMP_NS = 5_000_000  # a larger difference means that the clock was set; slewing stays below


class RoundTrip(Struct, frozen=True):
    """One exchange: times in ns of the host's clock (`sent`, `returned`, `monotonic`) and the
    service's.
    """

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int
    monotonic_ns: int  # at its return

    @property
    def offset_ns(self) -> int:
        """What is added to the host's time to get the service's."""
        return ((self.received_ns - self.sent_ns) + (self.answered_ns - self.returned_ns)) // 2

    @property
    def error_ns(self) -> int:
        """Max error of the offset: half of the time in transit."""
        return ((self.returned_ns - self.sent_ns) - (self.answered_ns - self.received_ns) + 1) // 2


class ServiceClock:
    """Keeps the last round trips; those before the host's clock was set are dropped."""

    def __init__(self) -> None:
        self._kept: deque[RoundTrip] = deque(maxlen=MAX_ROUND_TRIPS)

    def add(self, trip: RoundTrip) -> bool:
        """Add a round trip; False if it is invalid: a clock was set during it."""
        if trip.error_ns < 0 or trip.answered_ns < trip.received_ns:
            self._kept.clear()
            return False
        if self._kept:
            last = self._kept[-1]
            wall_elapsed_ns, monotonic_elapsed_ns = (
                trip.returned_ns - last.returned_ns,
                trip.monotonic_ns - last.monotonic_ns,
            )
            if (
                abs(wall_elapsed_ns - monotonic_elapsed_ns)
                > _CLOCK_JUMP_NS + MAX_CLOCK_DRIFT * monotonic_elapsed_ns
            ):
                self._kept.clear()
        self._kept.append(trip)
        return True

    def offset(self, monotonic_ns: int) -> ClockOffset | None:
        """Returns the offset with the smallest error now; None before the first round trip."""
        if not self._kept:
            return None

        def error(trip: RoundTrip) -> int:
            return trip.error_ns + int(MAX_CLOCK_DRIFT * max(monotonic_ns - trip.monotonic_ns, 0))

        best = min(self._kept, key=error)
        return ClockOffset(
            offset_ns=best.offset_ns, error_ns=error(best), round_trips=len(self._kept)
        )


LOG = logging.getLogger("traceloom.agent")
T = TypeVar("T")
VERSION = 1  # of the file `Membership`
TOKEN_VARIABLE = "TRACELOOM_FLEET_TOKEN"  # noqa: S105  (its name)
_WAIT_S = 30.0  # duration of a long poll for work
_POLL_S = 0.5
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
_MAX_UPLOADS = 3  # attempts per request, before the host gives up
# After its first poll: PyTorch is imported by then, even if no steps are seen.
_IMPORTED_NS = 15_000_000_000
_STEP_REPORT_S = 2.0  # period of reports while the service chooses a common step
_ARM_TIMEOUT_S = 20.0  # for a process to appear that the service expects on this host


class FleetConnection:
    """The agent's side of the fleet protocol.

    Args:
        config: The agent's; `fleet.server` is set.
        state: The directory of its files.
        host_snapshot: The snapshot of the host.
        trace_service: Takes requests for traces.
        topline: Device time of jobs in the last tick.
        boot_id: Boot id of this host.

    Raises:
        InputError: `wrong-config`: the address, or its certificates.
    """

    def __init__(  # noqa: PLR0917  (the parts of the agent)
        self,
        config: Config,
        state: Path,
        host_snapshot: Snapshot,
        trace_service: TraceService,
        topline: JobAccounting,
        boot_id: str,
    ) -> None:
        self.config, self.host_snapshot, self.trace_service, self.topline, self.boot_id = (
            config,
            host_snapshot,
            trace_service,
            topline,
            boot_id,
        )
        self.membership = state / "fleet.json"
        self.backlog = UsageOutbox(state / "usage.db")
        self.minutes = UsageAccumulator()
        self.clock = ServiceClock()
        self.last_error = ""  # why the last request failed
        self.refused: Counter[str] = Counter()  # rows left out of the last heartbeat, by reason
        self.refused_usage: Counter[str] = Counter()  # rows of usage, since the start
        self.host = ""  # its name in the fleet, after enrolment
        # One connection each: a heartbeat waits neither for a long poll nor for an upload.
        self._beats, self._polls, self._uploads = (
            ServiceClient(config.fleet.server, ca=config.fleet.ca, timeout_s=timeout_s)
            for timeout_s in (10.0, _WAIT_S + 15.0, 60.0)
        )
        self._uploading = asyncio.Lock()
        self._loops: list[asyncio.Task[None]] = []
        self._work: dict[str, HostWork] = {}  # by request
        self._carried: dict[str, asyncio.Task[None]] = {}  # request -> its task
        self._version = ""  # version of `_work`

    def start(self) -> None:
        """Start the tasks that talk to the service."""
        self._loops = [asyncio.create_task(self._belong(), name="fleet")]

    async def close(self) -> None:
        """Stop; the service offers unfinished work again to the next agent."""
        tasks = [*self._loops, *self._carried.values()]
        for task in tasks:
            task.cancel()
        for client in (self._beats, self._polls, self._uploads):
            client.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in (self._beats, self._polls, self._uploads):
            client.close()

    def now_ns(self) -> int:
        """Returns the current time on the service's clock, as far as its offset is known."""
        offset = self.clock.offset(time.monotonic_ns())
        return time.time_ns() + (offset.offset_ns if offset is not None else 0)

    def tick(self) -> dict[int, list[UsageRow]]:
        """Add the last tick of device time; returns the completed minutes, for the outbox."""
        now_ns = self.now_ns()
        self.minutes.add(now_ns, self.topline.device_times, self.topline.input_bytes)
        minutes = self.minutes.take(
            now_ns, {uuid: device.model for uuid, device in self.host_snapshot.devices.items()}
        )
        return {
            minute: keep_valid_rows("usage", rows, self.refused_usage)
            for minute, rows in minutes.items()
        }

    def readings(self) -> list[Reading]:
        """Returns the minutes of device use that the fleet will never get."""
        return [
            Reading("agent_usage_dropped_seconds_total", (), self.minutes.dropped_ms / 1000),
            Reading("agent_usage_lost_total", (), float(self.backlog.lost)),
        ]

    # Enrolment and heartbeats.

    async def _belong(self) -> None:
        await self._until_done(partial(asyncio.to_thread, self._enrol))
        self._loops += [
            asyncio.create_task(
                self._forever(self._beat, self.config.fleet.heartbeat), name="fleet heartbeat"
            ),
            asyncio.create_task(self._forever(self._take_work, 0.0), name="fleet work"),
        ]

    async def _forever(self, act: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            await self._until_done(act)
            await asyncio.sleep(pause_s)

    async def _until_done(self, act: Callable[[], Awaitable[T]]) -> T:
        """Retry an action until it succeeds and return its result; an error is logged if it differs
        from the previous one.
        """
        wait_s = _FIRST_RETRY_S
        while True:
            try:
                result = await act()
            except (
                ServiceError,
                InputError,
                OutputError,
                sqlite3.Error,
                OSError,
                msgspec.MsgspecError,
            ) as error:
                if str(error) != self.last_error:
                    LOG.warning("fleet: %s", error)
                self.last_error = str(error)
            else:
                self.last_error = ""
                return result
            # Jitter, so that a thousand hosts do not reconnect at once after a restart of the
            # service.
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    def _enrol(self) -> None:
        """Become a host of the fleet: by the stored credential, else by the token; blocks."""
        fleet = self.config.fleet
        try:
            member = msgspec.json.decode(self.membership.read_bytes(), type=Membership)
        except FileNotFoundError:
            member = None
        if member is not None and member.version != VERSION:
            raise other_version("membership of the fleet", member.version, VERSION, self.membership)
        if member is None or member.server != fleet.server:
            token = os.environ.get(TOKEN_VARIABLE, "")
            if fleet.token_file:
                try:
                    token = Path(fleet.token_file).read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise unreadable(fleet.token_file, error, "token of enrolment") from error
            if not token.strip():
                raise InputError(
                    "this host does not belong to the fleet yet, and there is no token",
                    slug="no-token",
                    where="fleet.token_file",
                    hint=f"`traceloom fleet token enrol` on the service makes one; {TOKEN_VARIABLE} holds it, too",
                )
            enrolment = Enrolment(
                token=token.strip(),
                host=self.config.host_name,
                boot_id=self.boot_id,
                version=__version__,
            )
            enrolled = self._beats.post("agents/enrol", enrolment, HostCredentials)
            member = Membership(
                version=VERSION,
                server=fleet.server,
                host=enrolled.host,
                credential=enrolled.credential,
            )
            document = msgspec.json.encode(member)
            write(self.membership, lambda file: file.write(document), force=True, private=True)
        self.host = member.host
        for client in (self._beats, self._polls, self._uploads):
            client.credential = member.credential

    async def _beat(self) -> None:
        """Send a heartbeat, and measure the clock offset from the response."""
        usage = await asyncio.to_thread(self.backlog.oldest)
        answer, trip = await asyncio.to_thread(self._exchange, self._heartbeat(usage))
        self.clock.add(trip)
        self.refused.update(answer.refused)
        if usage and answer.usage_through:
            await asyncio.to_thread(self.backlog.acknowledge, answer.usage_through)

    def _exchange(self, heartbeat: Heartbeat) -> tuple[HeartbeatResponse, RoundTrip]:
        sent_ns = time.time_ns()
        answer = self._beats.post(f"agents/{self.host}/heartbeat", heartbeat, HeartbeatResponse)
        returned_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
        return answer, RoundTrip(
            sent_ns, answer.received_ns, answer.answered_ns, returned_ns, monotonic_ns
        )

    def _heartbeat(self, usage: list[UsageRow]) -> Heartbeat:
        values: dict[str, dict[str, float]] = {uuid: {} for uuid in self.host_snapshot.devices}
        hung: set[str] = set()
        for (metric, labels), value, _ in self.host_snapshot.values():
            if len(labels) == 1 and labels[0] in values:
                values[labels[0]][metric] = value
            elif metric == "job_hung" and value:
                hung.add(labels[0])
        self.refused = Counter()
        return Heartbeat(
            sent_ns=time.time_ns(),
            boot_id=self.boot_id,
            version=__version__,
            clock=self.clock.offset(time.monotonic_ns()),
            devices=keep_valid_rows(
                "devices",
                [
                    HostDevice(
                        uuid=uuid,
                        index=device.index,
                        model=device.model,
                        stale=device.stale[:MAX_NAME_CHARS],
                        values={
                            name: value for name, value in values[uuid].items() if isfinite(value)
                        },
                    )
                    for uuid, device in self.host_snapshot.devices.items()
                ],
                self.refused,
            ),
            processes=keep_valid_rows(
                "processes",
                [
                    HostProcess(
                        key=process.key,
                        pid=process.pid,
                        uid=process.uid,
                        job=process.owner.job,
                        job_name=process.owner.name[:MAX_NAME_CHARS],
                        scheduler=process.owner.scheduler[:MAX_NAME_CHARS],
                        scheduled=parse_cgroup_paths([process.cgroup]).get("job")
                        == process.owner.job,
                        rank=process.owner.rank,
                        world_size=process.owner.world_size,
                        user=process.owner.user,
                        account=process.owner.account[:MAX_NAME_CHARS],
                        framework=process.owner.framework[:MAX_NAME_CHARS],
                        labels={
                            name[:MAX_NAME_CHARS]: text[:MAX_NAME_CHARS]
                            for name, text in process.owner.labels.items()
                        },
                        devices=process.devices,
                        steps_per_second=process.steps_per_second,
                        steps=None
                        if (pace := self.trace_service.steps.pace(process.key)) is None
                        else pace.steps,
                        polls=process.key in self.trace_service.registry.clients,
                        hung=process.owner.job in hung,
                    )
                    for process in order_by_turns(self.host_snapshot.processes.values())
                ],
                self.refused,
            ),
            usage=usage,
            collector_errors={
                name: replace_surrogates(state.last_error)[:MAX_NAME_CHARS]
                for name, state in self.host_snapshot.collectors.items()
                if state.last_error
            },
        )

    # Work.

    async def _take_work(self) -> None:
        """Poll for changed work, and start a task for each request in it."""
        route = f"agents/{self.host}/work?version={self._version}&wait={_WAIT_S:g}"
        answer = await asyncio.to_thread(self._polls.get, route, WorkResponse)
        self._work = {work.request: work for work in answer.work}
        self._version = answer.version
        for request in self._carried:
            if request not in self._work:
                traced = self._of_desk(request)
                if traced is not None and not traced.ended:
                    self.trace_service.cancel(traced)
        for request in self._work:
            if request not in self._carried:
                task = asyncio.create_task(
                    self._carry_out(request), name=f"fleet request {request}"
                )
                self._carried[request] = task
                task.add_done_callback(lambda _, request=request: self._carried.pop(request, None))  # type: ignore[misc]

    async def _carry_out(self, request: str) -> None:
        """Process a request until it has ended here, or the service withdraws it."""
        try:
            report = await self._until_started(request)
            if report is None:
                report = await self._run_and_upload(request)
        except HttpError as error:
            report = HostReport(state="failed", reason=error.slug, detail=str(error)[:2000])
        if report.state in ENDED_HOST_STATES:
            with contextlib.suppress(HttpError):  # the service has withdrawn it
                await self._report(request, report)

    async def _until_started(self, request: str) -> HostReport | None:
        """Report the processes and which are ready, until the start; returns a report if it never
        starts.
        """
        before: HostReport | None = None
        reported, until = 0.0, time.monotonic() + _ARM_TIMEOUT_S
        while (work := self._work.get(request)) is not None:
            if work.step == "start" or self._of_desk(request) is not None:
                return None
            try:
                matching = self.trace_service.matching(work.spec, self._may_trace)
            except HttpError:
                if time.monotonic() > until:
                    raise
                matching = []
            clients = self.trace_service.registry.clients
            armed = HostReport(
                state="armed",
                processes=[
                    ArmedProcess(
                        key=process.key,
                        pid=process.pid,
                        job=process.owner.job,
                        rank=process.owner.rank,
                        # It already polls while it imports PyTorch, and a trace would be empty.
                        ready=(client := clients.get(process.key)) is not None
                        and not client.busy
                        and (
                            process.steps_per_second is not None
                            or time.time_ns() - client.first_ns > _IMPORTED_NS
                        ),
                        steps_per_second=process.steps_per_second,
                        steps=self.trace_service.steps.total(process.key),
                    )
                    for process in matching
                ],
                clock=self.clock.offset(time.monotonic_ns()),
            )
            changed = before is None or [
                (target.key, target.ready) for target in armed.processes
            ] != [(target.key, target.ready) for target in before.processes]
            old = work.start == "step" and time.monotonic() > reported + _STEP_REPORT_S
            if matching and (changed or old):
                await self._report(request, armed)
                before, reported = armed, time.monotonic()
            await asyncio.sleep(_POLL_S)
        return HostReport(
            state="cancelled", reason="cancelled", detail="the service wants it no more"
        )

    async def _run_and_upload(self, request: str) -> HostReport:
        """Trace, report progress, and upload the kept files."""
        traced = self._of_desk(request)
        if traced is None:
            work = self._work[request]
            spec = msgspec.structs.replace(work.spec, at_ns=0 if work.at_step else work.at_ns)
            traced = await self.trace_service.submit(
                spec, f"fleet request {request}", self._may_trace, at_step=work.at_step
            )
        async for now in self.trace_service.changes(traced):
            await self._report(request, HostReport(state="running", targets=now.targets))
        if not any(target.state == "kept" for target in traced.targets):
            cancelled = all(target.state == "cancelled" for target in traced.targets)
            first = traced.targets[0]
            return HostReport(
                state="cancelled" if cancelled else "failed",
                reason=first.reason,
                detail=first.detail[:2000],
                targets=traced.targets,
            )
        directory = self.trace_service.places.of_request(traced.uid, traced.id)
        files = await asyncio.to_thread(_list_host_files, directory, traced.files)
        report = HostReport(state="uploading", targets=traced.targets, files=files)
        for _ in range(_MAX_UPLOADS):
            missing = set((await self._report(request, report)).missing)
            if not missing:
                return msgspec.structs.replace(report, state="uploaded")
            for file in files:
                if file.name in missing:
                    route = f"agents/{self.host}/requests/{request}/files/{file.name}"
                    try:
                        async with self._uploading:
                            await asyncio.to_thread(
                                self._uploads.put_file, route, directory / file.name, file.bytes
                            )
                    except (
                        ServiceError,
                        OSError,
                    ) as error:  # the service lists it as missing in its next answer
                        self.last_error = str(error)
                        await asyncio.sleep(_FIRST_RETRY_S)
        reason = "files did not arrive whole, though they were sent several times"
        return msgspec.structs.replace(
            report, state="failed", reason="upload-failed", detail=reason
        )

    def _of_desk(self, request: str) -> TraceRequest | None:
        """Returns the request that the trace service already has for it, from before a restart of
        the agent.
        """
        return next(
            (
                trace_request
                for trace_request in self.trace_service.requests.values()
                if trace_request.who == f"fleet request {request}"
            ),
            None,
        )

    async def _report(self, request: str, report: HostReport) -> ReportResponse:
        """Send a report, with retries until the service is reached; a permanent refusal is an
        error.
        """

        async def tell() -> ReportResponse:
            route = f"agents/{self.host}/requests/{request}"
            try:
                async with self._uploading:
                    return await asyncio.to_thread(
                        self._uploads.post, route, report, ReportResponse
                    )
            except ServiceError as error:
                if 400 <= error.status < 500 and error.status != 429:
                    raise HttpError(error.status, str(error), slug=error.slug) from error
                raise

        return await self._until_done(tell)

    @staticmethod
    def _may_trace(uid: int) -> bool:
        return os.geteuid() in {0, uid}


class Membership(msgspec.Struct, frozen=True):
    """The stored identity of a host in a fleet; only the agent's user can read the file."""

    version: int
    server: str
    host: str
    credential: str


def _list_host_files(directory: Path, names: list[str]) -> list[HostFile]:
    files = []
    for name in names:
        with (directory / name).open("rb") as file:
            files.append(
                HostFile(
                    name=name, bytes=os.fstat(file.fileno()).st_size, sha256=compute_sha256(file)
                )
            )
    return files
