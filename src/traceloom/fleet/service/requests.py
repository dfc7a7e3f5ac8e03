"""Executes trace requests: distributes them to hosts, receives files and merges them into a
capture.

Heartbeats are kept in memory while they are fresh; enrolled hosts, requests and usage are in the
state, so that a restarted service resumes. Everything here runs in the service's event loop; the
state and files are used in threads.

Files are stored unchanged. `capture.json` has the clock offset of each host, which readers of the
capture add; `link` refines it by collectives.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import msgspec

from traceloom import __version__
from traceloom.agent.fleet_link.protocol import (
    ClockOffset,
    Enrolment,
    Heartbeat,
    HeartbeatResponse,
    HostCredentials,
    HostFile,
    HostProcess,
    HostReport,
    ReportResponse,
    StartBy,
    UsageRow,
    WorkResponse,
)
from traceloom.agent.ownership.model import JobNames
from traceloom.agent.traces.requests import TraceSpec, TriggerCause
from traceloom.errors import InputError, OutputError, TraceloomError
from traceloom.fleet.service.committer import collect_job_facts
from traceloom.fleet.service.pipeline import CapturePipeline, get_capture_directory
from traceloom.fleet.service.request_plan import (
    FleetRequest,
    HostStatus,
    advance_request,
    apply_report,
    assign_hosts,
    cancel_request,
    finish_analysis,
    finish_stitching,
    get_host_work,
    repeat_upload,
    validate_step_rate,
)
from traceloom.fleet.service.webhooks import build_fleet_event
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord, ServiceState
from traceloom.fleet.store.database import hash_secret
from traceloom.fleet.store.hosts import JobFacts
from traceloom.formats import capture_document
from traceloom.server.problem import HttpError
from traceloom.system.files import compute_sha256
from traceloom.system.text import hide_paths

LOG = logging.getLogger("traceloom.collect")
FRESHNESS_NS = 60_000_000_000  # a host that was silent for longer is lost
MAX_WAIT_S = 30.0
_MAX_FILE_BYTES = 4 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_OLDEST_MINUTES = 14 * 1440  # clocks may be off
_POLL_S = 1.0
_SAME_NS = 3600 * 10**9  # validity of a request's mark
_POLLS_PER_JOB_SCAN = 5  # polls of requests between scans of jobs
_MAX_ENDED = 1000  # requests that are kept in memory; the state has all
Choice = Literal["", "slowest-and-median"]


class LastHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The last heartbeat of a host, and when it came, by the service's clock."""

    heartbeat: Heartbeat
    received_ns: int


class HostRegistry:
    """Talks to hosts: enrolment, heartbeats, requests and uploads.

    Args:
        state: Stores hosts and requests.
        incoming: The directory for uploads of hosts: `incoming/REQUEST/HOST/`.
        term: Term by which this service leads; nothing is stored any more once another one leads.
        clock: Now, in ns since the epoch.

    Attributes:
        on_stitching: Called with a request whose parts have all arrived; it merges and analyses
            them.
        on_usage: Called with a host and its rows of usage minutes, possibly repeated.
    """

    def __init__(
        self,
        state: ServiceState,
        incoming: Path,
        term: str,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.state, self.incoming, self.term, self.clock = state, incoming, term, clock
        self.on_stitching: Callable[[FleetRequest], None] = lambda _: None
        self.on_usage: Callable[[str, list[UsageRow]], None] = lambda _host, _rows: None
        self.members: dict[str, str] = {}  # host -> SHA-256 of its credential
        self.now: dict[str, LastHeartbeat] = {}
        # Open requests, and those that ended since the start.
        self.requests: dict[str, FleetRequest] = {}
        # The open ones: every waiting host scans them at every change.
        self._open: dict[str, FleetRequest] = {}
        self._written: dict[str, FleetRequest] = {}  # open requests as the state has them
        # Requests whose progress could not be stored, as the state did not respond.
        self._unwritten: set[str] = set()
        self.refused_rows: dict[str, int] = defaultdict(int)  # host -> impossible rows
        self._said: dict[str, JobFacts] = {}  # job -> its latest facts from hosts
        self._names_of_jobs = JobNames(262_144)
        # Host -> job of its rows of usage -> what the job is called here.
        self._called: dict[str, dict[str, str]] = defaultdict(dict)
        self._changed = asyncio.Condition()  # notified when a request changes
        self._call = asyncio.Event()  # set, and replaced, when hosts have new work
        self._writing = asyncio.Lock()
        self._closing = False
        self._advancing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._closing = False
        self.members, documents = await asyncio.to_thread(
            lambda: (self.state.hosts(), self.state.requests())
        )
        requests = [
            msgspec.json.decode(document, type=FleetRequest) for document in reversed(documents)
        ]
        self.requests = {request.id: request for request in requests}
        self._open = {request.id: request for request in requests if not request.ended}
        for request in list(self._open.values()):
            # Files that hosts sent to a previous service must be sent here again.
            if request.state in {"running", "collecting", "stitching"}:
                lost = {
                    host
                    for host, progress in request.hosts.items()
                    if progress.state == "uploaded"
                    and not all(
                        _has_arrived(self.incoming / request.id / host, file)
                        for file in progress.files
                    )
                }
                if lost:
                    await self.put(repeat_upload(request, lost, self.clock()))
                    continue
            if request.state in {"stitching", "analysing"}:
                self.on_stitching(request)
        self._advancing = asyncio.create_task(
            self._advance_for_ever(), name="requests of the fleet"
        )

    async def close(self) -> None:
        """Stops; requests keep their state. Hosts that wait for work are answered."""
        self._closing = True
        self._call_hosts()
        if self._advancing is not None:
            self._advancing.cancel()
            await asyncio.gather(self._advancing, return_exceptions=True)

    # Membership.

    async def enrol(self, enrolment: Enrolment) -> HostCredentials:
        """Enrols a host.

        Raises:
            HttpError: `unknown-token`; `host-exists`: another host has the name.
        """
        host = await asyncio.to_thread(self.state.take_enrolment, enrolment.token, enrolment.host)
        if host is None:
            raise HttpError(
                401,
                "this token is none of ours, was used, or has expired",
                slug="unknown-token",
                hint="`traceloom fleet token enrol` makes one",
            )
        if host not in {"", enrolment.host}:
            raise HttpError(
                401,
                f"this token lets the host `{host}` join, and not `{enrolment.host}`",
                slug="unknown-token",
                hint="`traceloom fleet token enrol` with the name of the host, or with none, makes another one",
            )
        if not host and enrolment.host in self.members:
            raise HttpError(
                409,
                f"there is a host `{enrolment.host}` already",
                slug="host-exists",
                hint="a token for this host replaces it: `traceloom fleet token enrol NAME`",
            )
        credential = secrets.token_urlsafe(32)
        await asyncio.to_thread(self.state.put_host, enrolment.host, credential)
        self.members[enrolment.host] = hash_secret(credential)
        return HostCredentials(host=enrolment.host, credential=credential)

    def is_host(self, host: str, credential: str) -> bool:
        return hmac.compare_digest(self.members.get(host, ""), hash_secret(credential))

    def check_host(self, host: str, credential: str) -> None:
        """Checks the credential of a host.

        Raises:
            HttpError: `unknown-host`.
        """
        if not self.is_host(host, credential):
            raise HttpError(
                401,
                "this host does not belong to the fleet",
                slug="unknown-host",
                hint="enrol it with a new token, and remove fleet.json beside the agent's history",
            )

    async def remove(self, host: str) -> None:
        """Removes a host from the fleet.

        Raises:
            HttpError: `no-such-host`.
        """
        if not await asyncio.to_thread(self.state.remove_host, host):
            raise HttpError(
                404,
                f"there is no host `{host}`",
                slug="no-such-host",
                hint="`traceloom fleet hosts`",
            )
        self.members.pop(host, None)
        self.now.pop(host, None)

    # Heartbeats.

    async def heartbeat(
        self, host: str, heartbeat: Heartbeat, refused: Mapping[str, int] | None = None
    ) -> HeartbeatResponse:
        """Processes a heartbeat and its usage; repeated usage is acknowledged again. `refused`: rows
        that were left out of it, by reason.
        """
        refused = refused or {}
        self.refused_rows[host] += sum(refused.values())
        received_ns = self.clock()
        names = {}
        for process in sorted(heartbeat.processes, key=lambda process: not process.scheduled):
            if process.job:
                owner = process.user or process.uid
                names[process.job, process.user, process.uid] = self._names_of_jobs.claim(
                    process.job, owner, owner, process.uid, is_scheduled=process.scheduled
                )
        believed = [
            msgspec.structs.replace(
                process,
                job=names.get((process.job, process.user, process.uid), ""),
                steps_per_second=validate_step_rate(process.steps_per_second),
            )
            for process in heartbeat.processes
        ]
        called = self._called[host]
        called.update({job: name for (job, _, _), name in names.items() if job != name})
        for job in {job for (job, _, _), name in names.items() if job == name}:
            called.pop(job, None)
        usage = [
            msgspec.structs.replace(row, job=called[row.job]) if row.job in called else row
            for row in heartbeat.usage
        ]
        heartbeat = msgspec.structs.replace(heartbeat, usage=usage)
        # Without usage, which the state stores.
        stored_heartbeat = msgspec.structs.replace(heartbeat, usage=[], processes=believed)
        self.now[host] = LastHeartbeat(heartbeat=stored_heartbeat, received_ns=received_ns)
        through = 0
        if heartbeat.usage:
            possible = drop_impossible_rows(heartbeat.usage, received_ns)
            self.on_usage(host, possible)
            self.refused_rows[host] += len(heartbeat.usage) - len(possible)
            # A minute in the future would count as the host's last, and all earlier ones as
            # outdated.
            plausible = compute_plausible_minutes(received_ns)
            minutes: dict[int, list[UsageRow]] = {
                row.minute: [] for row in heartbeat.usage if row.minute in plausible
            }
            for row in possible:
                minutes[row.minute].append(row)
            documents = {
                minute: msgspec.json.encode(rows).decode() for minute, rows in minutes.items()
            }
            await asyncio.to_thread(self.state.add_usage, host, documents)
            through = max(row.minute for row in heartbeat.usage)
        return HeartbeatResponse(
            received_ns=received_ns,
            answered_ns=self.clock(),
            usage_through=through,
            refused=dict(refused),
        )

    def fresh(self) -> dict[str, LastHeartbeat]:
        return {host: last for host, last in list(self.now.items()) if self.is_fresh(last)}

    def is_fresh(self, now: LastHeartbeat) -> bool:
        """Returns whether a heartbeat is recent; if not, the host is lost."""
        return self.clock() - now.received_ns < FRESHNESS_NS

    def users_of(self, job: str) -> set[str]:
        """Returns the users of a job's processes, as reported by hosts."""
        processes = (
            process for last in self.fresh().values() for process in last.heartbeat.processes
        )
        return {process.user for process in processes if process.job == job}

    # Requests.

    async def submit(
        self,
        spec: TraceSpec,
        requester: str,
        choice: Choice = "",
        *,
        hosts: Collection[str] = (),
        trigger: TriggerCause | None = None,
        start: StartBy = "instant",
        at_step: int = 0,
        after_s: float = 0.0,
        mark: str = "",
    ) -> FleetRequest:
        """Creates a request to trace the processes of a job on all hosts that run it.

        Args:
            spec: What to trace.
            requester: Who requests it.
            choice: Which of the matching processes.
            hosts: Only these hosts, if any are given.
            trigger: The rule that requests it, if no person does.
            start: Whether all start at an instant or at a step.
            at_step: Earliest step, if they start at a step.
            after_s: Min seconds until the start, if they start at an instant.
            mark: Idempotency key: a request of this job with the same key in the last hour is
                returned instead; "": always a new one.

        Raises:
            HttpError: `wrong-request`; `no-such-job`: no recently active host has such
                processes.
        """
        if not spec.job:
            raise HttpError(400, "of which job?", slug="wrong-request", hint="name a job")
        if (spec.steps is None) == (spec.duration_s is None):
            raise HttpError(400, "either steps or a duration", slug="wrong-request")
        fresh = {host: last for host, last in self.fresh().items() if not hosts or host in hosts}
        matching = select_processes(fresh, spec)
        if choice == "slowest-and-median":
            matching = select_slowest_and_median(matching)
            ranks = sorted(
                {
                    process.rank
                    for matched in matching.values()
                    for process in matched
                    if process.rank is not None
                }
            )
            spec = msgspec.structs.replace(spec, ranks=tuple(ranks))
        if not matching:
            raise HttpError(
                404,
                f"no host of late has such processes of `{spec.job}`",
                slug="no-such-job",
                hint="`traceloom fleet jobs` lists jobs",
            )
        now_ns = self.clock()
        for same in self.requests.values() if mark else ():
            if (same.mark, same.spec.job) == (
                mark,
                spec.job,
            ) and now_ns - same.asked_ns < _SAME_NS:
                return same
        request = FleetRequest(
            id=secrets.token_hex(8),
            who=requester,
            asked_ns=now_ns,
            spec=spec,
            trigger=trigger,
            start=start,
            at_step=at_step,
            earliest_ns=now_ns + int(after_s * 1e9) if after_s else 0,
            mark=mark,
        )
        host_ranks = {
            host: {matched.rank for matched in processes if matched.rank is not None}
            for host, processes in matching.items()
        }
        request = assign_hosts(request, host_ranks, now_ns)
        try:
            await self.put(request)
        except TraceloomError:  # the client gets the error, and retries
            for requests in (self.requests, self._open):
                requests.pop(request.id, None)
            self._unwritten.discard(request.id)
            raise
        return request

    async def cancel(self, request: str) -> None:
        """Cancels a request; hosts learn of it when they poll for work."""
        await self.put(cancel_request(self.requests[request], self.clock()))

    async def put(self, request: FleetRequest, *, calls: bool = True) -> None:
        """Sets and stores the progress of a request, and notifies all waiters.

        Args:
            request: Its new state.
            calls: Whether hosts have new work now. Otherwise each of a thousand reporting hosts
                would poll again a thousand times.
        """
        self.requests[request.id] = request
        if request.ended:
            self._open.pop(request.id, None)
        else:
            self._open[request.id] = request
        # In order; a request that changed again meanwhile is stored in its latest state.
        async with self._writing:
            current = self.requests[request.id]
            if self._written.get(current.id) is not current:
                self._unwritten.add(current.id)
                document, events = msgspec.json.encode(current).decode(), []
                if current.state in {"done", "partial", "failed"}:
                    events = [
                        build_fleet_event(
                            f"request.{current.state}",
                            "request",
                            current.id,
                            {
                                "id": current.id,
                                "job": current.spec.job,
                                "who": current.who,
                                "state": current.state,
                                "reason": current.reason,
                                "detail": current.detail,
                                "capture": current.capture,
                                "asked_ns": current.asked_ns,
                                "start_ns": current.start_ns,
                            },
                            current.since_ns,
                        )
                    ]
                await asyncio.to_thread(
                    self.state.put_request,
                    current.id,
                    current.asked_ns,
                    document,
                    self.term,
                    ended=current.ended,
                    events=events,
                )
                self._unwritten.discard(current.id)
                self._written[current.id] = current
                if current.ended:
                    del self._written[current.id]
        if request.ended:
            await asyncio.to_thread(shutil.rmtree, self.incoming / request.id, ignore_errors=True)
            ended = [
                candidate.id
                for candidate in self.requests.values()
                if candidate.ended and candidate.id not in self._unwritten
            ]
            for old in ended[: max(len(ended) - _MAX_ENDED, 0)]:
                del self.requests[old]
        if request.state == "stitching":
            self.on_stitching(request)
        async with self._changed:
            self._changed.notify_all()
        if calls:
            self._call_hosts()

    async def changes(self, request: str) -> AsyncIterator[FleetRequest]:
        """Yields the request now, and again after each change, until it has ended."""
        while True:
            current = self.requests[request]
            yield current
            if current.ended:
                return
            async with self._changed:
                await self._changed.wait_for(lambda: self.requests[request] is not current)  # noqa: B023

    # Work.

    async def work(self, host: str, version: str, wait_s: float) -> WorkResponse:
        """Returns the work of a host; waits while the host already has that `version`."""
        until = time.monotonic() + min(max(0.0, wait_s), MAX_WAIT_S)  # in this order NaN becomes 0
        while True:
            call = self._call  # taken before the check, so that no later change is missed
            offers = (get_host_work(request, host) for request in self._open.values())
            work = [offer for offer in offers if offer is not None]
            current_version = hashlib.sha256(msgspec.json.encode(work)).hexdigest()[:16]
            remaining_s = until - time.monotonic()
            if current_version != version or remaining_s <= 0 or self._closing:
                return WorkResponse(version=current_version, work=work)
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(call.wait(), remaining_s)

    async def report(self, host: str, request: str, report: HostReport) -> ReportResponse:
        """Processes a host's report; returns its files that are missing.

        Raises:
            HttpError: `no-such-request`: the host has no such request, or it has ended.
        """
        progress = self._progress(host, request)
        missing: list[str] = []
        if report.state in {"uploading", "uploaded"}:
            files = report.files or progress.files
            names = set()
            for file in files:
                if (
                    not _FILE_NAME.fullmatch(file.name)
                    or file.name in names
                    or file.bytes > _MAX_FILE_BYTES
                ):
                    raise HttpError(
                        400, f"a capture has no file `{file.name[:80]}`", slug="wrong-request"
                    )
                names.add(file.name)
            directory = self.incoming / request / host
            missing = await asyncio.to_thread(
                lambda: [file.name for file in files if not _has_arrived(directory, file)]
            )
            if missing:
                report = msgspec.structs.replace(report, state="uploading")
        await self._advance(apply_report(self.requests[request], host, report, self.clock()))
        return ReportResponse(missing=missing)

    async def take_file(
        self, host: str, request: str, name: str, content: AsyncIterator[bytes]
    ) -> None:
        """Receives a file that a host has reported; partial files are discarded.

        Raises:
            OutputError: `cannot-write`: the disk is full.
            HttpError: `no-such-request`; `no-such-file`: it was not reported; `wrong-file`: it
                differs from the report.
        """
        files = {file.name: file for file in self._progress(host, request).files}
        if name not in files:
            raise HttpError(
                404, f"the host did not say that it has a file `{name}`", slug="no-such-file"
            )
        file = files[name]
        directory = self.incoming / request / host
        part = directory / f".{name}.{secrets.token_hex(4)}"
        digest, size = hashlib.sha256(), 0
        try:
            await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            with part.open("xb") as target:
                async for chunk in content:
                    size += len(chunk)
                    if size > file.bytes:
                        break
                    digest.update(chunk)
                    await asyncio.to_thread(target.write, chunk)
            if size != file.bytes or digest.hexdigest() != file.sha256:
                raise HttpError(
                    400, f"`{name}` is not what the host said that it is", slug="wrong-file"
                )
            await asyncio.to_thread(part.replace, directory / name)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(
                f"the file cannot be kept: {reason}", slug="cannot-write", where=name
            ) from error
        finally:
            part.unlink(missing_ok=True)

    # Private.

    def _progress(self, host: str, request: str) -> HostStatus:
        current = self.requests.get(request)
        if current is None or current.ended or host not in current.hosts:
            raise HttpError(
                404, "this host has nothing to do for that request", slug="no-such-request"
            )
        return current.hosts[host]

    async def _advance(self, request: FleetRequest) -> None:
        """Advances a request as far as possible by now, and stores it."""
        now_ns, before = self.clock(), request
        while (advanced := advance_request(request, now_ns)) is not request:
            request = advanced
        if request is not self.requests.get(request.id):
            await self.put(request, calls=request is not before)

    def _call_hosts(self) -> None:
        self._call.set()
        self._call = asyncio.Event()

    async def _say_of_jobs(self) -> None:
        statements = collect_job_facts(
            {host: last.heartbeat.processes for host, last in self.fresh().items()}
        )
        changed = {job: facts for job, facts in statements.items() if self._said.get(job) != facts}
        if changed:
            await asyncio.to_thread(self.state.say_of_jobs, changed, self.clock())
        self._said = statements

    async def _advance_for_ever(self) -> None:
        for count in itertools.count():
            if count % _POLLS_PER_JOB_SCAN == 0:
                try:
                    await self._say_of_jobs()
                except TraceloomError as error:
                    LOG.warning("what hosts say of jobs: %s", error)
                except Exception:
                    LOG.exception("what hosts say of jobs")
            for name in {*self._open, *self._unwritten}:
                try:
                    await self._advance(self.requests[name])
                    if name in self._unwritten:
                        await self.put(self.requests[name])
                except TraceloomError as error:  # noqa: PERF203  (one that cannot be stored must not block the others)
                    LOG.warning("request %s: %s", name, error)
                except Exception:
                    LOG.exception("request %s", name)
            await asyncio.sleep(_POLL_S)


def select_processes(
    hosts: Mapping[str, LastHeartbeat], spec: TraceSpec
) -> dict[str, list[HostProcess]]:
    """Returns the processes by host that match a request's job, ranks and host."""
    matching = {
        host: [
            process
            for process in last.heartbeat.processes
            if process.job == spec.job and (not spec.ranks or process.rank in spec.ranks)
        ]
        for host, last in hosts.items()
        if spec.host in {"", host}
    }
    return {host: processes for host, processes in matching.items() if processes}


def select_slowest_and_median(
    matching: Mapping[str, list[HostProcess]],
) -> dict[str, list[HostProcess]]:
    """Selects the slowest rank by step rate and a median one; ranks without a known rate are
    ignored.
    """
    paced = [
        (process.steps_per_second, process.rank, host, process)
        for host, processes in matching.items()
        for process in processes
        if process.steps_per_second is not None and process.rank is not None
    ]
    paced.sort(key=itemgetter(0, 1))
    selected: dict[str, list[HostProcess]] = defaultdict(list)
    for index in sorted({0, len(paced) // 2} if paced else ()):
        *_, host, process = paced[index]
        selected[host].append(process)
    return dict(selected)


def drop_impossible_rows(rows: Sequence[UsageRow], now_ns: int) -> list[UsageRow]:
    """Drops minutes in the future or long ago, and those in which a device has more than 60,000 ms."""
    spent: dict[tuple[int, str], int] = defaultdict(int)
    for row in rows:
        spent[row.minute, row.device] += row.device_ms
    minutes = compute_plausible_minutes(now_ns)
    return [
        row for row in rows if row.minute in minutes and spent[row.minute, row.device] <= 60_000
    ]


def compute_plausible_minutes(now_ns: int) -> range:
    """Returns the minutes since 1970 that a host may tell of: it keeps them for two days, and each
    day is a file of its own in the tables.
    """
    last = now_ns // 60_000_000_000 + 1
    return range(last - _OLDEST_MINUTES, last + 1)


def _has_arrived(directory: Path, file: HostFile) -> bool:
    """Returns whether a file has arrived; its content was verified then."""
    path = directory / file.name
    return path.is_file() and path.stat().st_size == file.bytes


CAPTURE_FILE = "capture.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_TIMES_OF_WINDOW, _TIMES_OF_RANK = ("start_ns", "end_ns"), ("created_ns", "written_ns")


class HostPart(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a host for a request. `clock` None: the offset of its clock is unknown."""

    host: str
    folder: Path
    clock: ClockOffset | None = None


def merge_host_parts(
    parts: Sequence[HostPart], directory: Path, request: Mapping[str, Any]
) -> list[str]:
    """Merges the parts of hosts in a new directory, by hard links where the file system has them.

    Args:
        parts: Of each host, at least one.
        directory: Created here; must not exist.
        request: The request; `hosts` and `targets` are added to it.

    Returns:
        Faults of parts, a sentence each.

    Raises:
        InputError: `no-capture`: no part holds a readable capture.
        OSError: It cannot be written; the directory may be incomplete then.
    """
    directory.mkdir()
    faults: list[str] = []
    used_names: set[str] = {CAPTURE_FILE}
    ranks: list[dict[str, Any]] = []
    hosts: list[dict[str, Any]] = []
    targets: list[dict[str, Any]] = []
    sidecars: dict[str, list[str]] = {}
    for part in parts:
        clock = (
            None
            if part.clock is None
            else {"offset_ns": part.clock.offset_ns, "error_ns": part.clock.error_ns}
        )
        hosts.append({"host": part.host, "clock": clock})
        try:
            decoded = capture_document.decode(
                (part.folder / CAPTURE_FILE).read_bytes(), CAPTURE_FILE
            )
        except InputError as error:
            faults.append(f"{part.host}: {error.message}")
            continue
        except OSError:  # it did not arrive
            decoded = None
        if decoded is None:
            faults.append(f"{part.host}: its capture.json cannot be read")
            continue
        document, notices = decoded
        faults += [f"{part.host}: {notice.message}" for notice in notices]
        if not document["ranks"]:
            faults.append(f"{part.host}: its capture.json names no rank")
        names = _rename_files(
            sorted(path.name for path in part.folder.iterdir()), used_names, part.host
        )
        names = {name: new for name, new in names.items() if new not in used_names}
        used_names |= set(names.values())
        for name, new in names.items():
            source = part.folder / name
            if source.is_symlink() or not source.is_file():
                continue
            try:
                os.link(source, directory / new)
            except OSError:  # the file system has no hard links
                shutil.copyfile(source, directory / new)
        names = {name: new for name, new in names.items() if (directory / new).exists()}
        for entry in document["ranks"]:
            window = entry.get("window") or {}
            if names.get(str(window.get("file"))) is None:
                faults.append(
                    f"{part.host}: rank {entry.get('rank')} names a file that did not come"
                )
                continue
            ranks.append(_shift_to_capture_clock(entry, names, part.host, clock))
        host_request = document.get("request")
        listed = host_request.get("targets") if isinstance(host_request, dict) else None
        for target in listed if isinstance(listed, list) else ():
            if not isinstance(target, dict):
                continue
            file = target.get("file")
            targets.append(
                {
                    **target,
                    "host": part.host,
                    "file": names.get(file, "") if isinstance(file, str) else "",
                }
            )
        for kind in ("stacks", "telemetry"):
            listed = document.get(kind)
            sent = (
                [name for name in listed if isinstance(name, str)]
                if isinstance(listed, list)
                else []
            )
            files = [names[name] for name in sent if name in names]
            sidecars.setdefault(kind, []).extend(files)
    if not ranks:
        raise InputError(
            "no host sent a trace that can be read", slug="no-capture", hint="; ".join(faults)[:500]
        )
    ranks.sort(
        key=lambda entry: (
            entry.get("rank") is None,
            entry.get("rank") or 0,
            str(entry.get("host")),
        )
    )
    merged = {
        "format": capture_document.FORMAT,
        "version": capture_document.VERSION,
        "traceloom": __version__,
        "stage": "profiled",
        "run": {},
        "ranks": ranks,
        "request": {**request, "hosts": hosts, "targets": targets},
        **{kind: files for kind, files in sidecars.items() if files},
    }
    (directory / CAPTURE_FILE).write_text(json.dumps(merged, indent=1), encoding="utf-8")
    return faults


def _rename_files(names: Iterable[str], used_names: set[str], host: str) -> dict[str, str]:
    """Returns the new name of each file.

    All names of a process are prefixed with the host if one of them is taken.
    """
    usable = [name for name in names if _NAME.fullmatch(name) and name != CAPTURE_FILE]
    clashes = {name.partition(".")[0] for name in usable if name in used_names}
    before = re.sub(r"[^A-Za-z0-9_-]", "_", host)
    return {
        name: f"{before}-{name}" if name.partition(".")[0] in clashes else name for name in usable
    }


def _shift_to_capture_clock(
    entry: dict[str, Any], names: Mapping[str, str], host: str, clock: dict[str, int] | None
) -> dict[str, Any]:
    """Returns a rank's entry with its new file names, and times on the capture's clock."""
    offset = clock["offset_ns"] if clock is not None else 0
    window = {**entry["window"], "file": names[entry["window"]["file"]]}
    moved = dict(entry)
    for section, keys in ((window, _TIMES_OF_WINDOW), (moved, _TIMES_OF_RANK)):
        for key in keys:
            if isinstance(section.get(key), int):
                section[key] += offset
    stem = window["file"].partition(".")[0]
    return {**moved, "name": stem, "host": host, "clock": clock, "window": window}


_JOIN_POLL_S = 0.5
# Between retries, and in total, while the state or a store does not respond.
_PAUSE_S, _TROUBLE_S = (
    5.0,
    900.0,
)
_FINAL_FAULTS = {"no-capture", "unsafe-name"}  # faults of the parts themselves


class RequestCompletion:
    """Merges the parts of requests, one request at a time, and waits for their analysis.

    Args:
        registry: Holds requests and the directory of their parts.
        pipeline: Analyses captures.
    """

    def __init__(self, registry: HostRegistry, pipeline: CapturePipeline) -> None:
        self.registry, self.pipeline = registry, pipeline
        self._one = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def take(self, request: FleetRequest) -> None:
        """Processes a request that is `stitching` or `analysing`."""
        if request.id not in self._tasks:
            task = asyncio.create_task(self._through(request), name=f"join {request.id}")
            self._tasks[request.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    async def close(self) -> None:
        """Stops; requests resume when the service starts again."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _through(self, request: FleetRequest) -> None:
        """Completes a request; retries for a while if the state or a store does not respond."""
        until = time.monotonic() + _TROUBLE_S
        while True:
            try:
                if request.state == "stitching":
                    async with self._one:
                        capture, faults = await asyncio.to_thread(self._join, request)
                    request = finish_stitching(request, capture, self.registry.clock(), faults)
                    await self.registry.put(request)
                fault = await self._analysed(request.capture)
                break
            except (TraceloomError, OSError) as error:
                slug = error.slug if isinstance(error, TraceloomError) else ""
                if slug == "not-leading":
                    return  # another service owns it now
                LOG.warning("request %s: %s", request.id, error)
                fault = hide_paths(str(error))
                if slug in _FINAL_FAULTS or time.monotonic() > until:
                    break
            except Exception as error:
                # A defect here must not leave the request hanging.
                LOG.exception("request %s cannot be joined", request.id)
                fault = f"a defect of the service: {type(error).__name__}: {hide_paths(str(error))}"
                break
            await asyncio.sleep(_PAUSE_S)
        with contextlib.suppress(TraceloomError):  # the registry stores it as soon as it can
            await self.registry.put(finish_analysis(request, self.registry.clock(), fault))

    async def _analysed(self, capture: str) -> str:
        """Waits for an analysis; returns why it failed for good, "" once its rows are in the
        tables.
        """
        while True:
            tasks = await asyncio.to_thread(self.pipeline.state.tasks, capture)
            if tasks and tasks[-1].state == "committed":
                return ""
            if tasks and tasks[-1].state == "quarantined":
                return tasks[-1].error or "it could not be analysed"
            await asyncio.sleep(_JOIN_POLL_S)

    def _join(self, request: FleetRequest) -> tuple[str, list[str]]:
        """Merges parts and stores the capture; returns its name and the faults of parts.

        Idempotent.
        """
        parts = [
            HostPart(
                host=host,
                folder=self.registry.incoming / request.id / host,
                clock=progress.clock,
            )
            for host, progress in request.hosts.items()
            if progress.state == "uploaded"
        ]
        day = datetime.fromtimestamp(request.asked_ns / 1e9, timezone.utc).date().isoformat()
        request_fields = {
            "id": request.id,
            "who": request.who,
            "asked_ns": request.asked_ns,
            "spec": msgspec.to_builtins(request.spec),
        }
        with tempfile.TemporaryDirectory(
            prefix="traceloom-", dir=self.registry.incoming
        ) as temporary:
            merged_directory = Path(temporary, "capture")
            faults = merge_host_parts(parts, merged_directory, request_fields)
            for fault in faults:
                LOG.warning("request %s: %s", request.id, fault)
            paths, announced = sorted(merged_directory.iterdir()), []
            for path in paths:
                with path.open("rb") as file:
                    digest = compute_sha256(file)  # reads to the end of the file
                    announced.append(CaptureFile(path.name, file.tell(), digest))
            files = tuple(announced)
            record = CaptureRecord(
                id=f"c{hashlib.sha256(request.id.encode()).hexdigest()[:20]}",
                day=day,
                job=request.spec.job,
                uploader=request.who,
                received_ns=self.registry.clock(),
                complete=False,
                bytes=sum(file.size for file in files),
                files=files,
            )
            record = self.pipeline.state.add_capture(record)
            if not record.complete:
                for path in paths:
                    self.pipeline.objects.put_file(
                        f"{get_capture_directory(record)}/{path.name}", path
                    )
                self.pipeline.accept(record)
        return record.id, faults
