"""The hosts of the fleet: who belongs, how each is, what it is to do, and what it sends.

What hosts say is kept in memory as long as it is fresh; who belongs, requests and usage are in the state, so that a
service that starts again goes on. Everything here runs in the service's loop; the state and files are used in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import logging
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Literal

import msgspec

from traceloom.agent.http.answers import RequestError
from traceloom.agent.requests.model import Cause, Wanted
from traceloom.agent.uplink.messages import (
    Enrolled,
    Enrolment,
    Heartbeat,
    HeartbeatAnswer,
    HostFile,
    HostProcess,
    HostReport,
    ReportAnswer,
    StartBy,
    UsageRow,
    WorkAnswer,
)
from traceloom.collect.job_rows import said_of_jobs
from traceloom.collect.plan import (
    FleetRequest,
    HostProgress,
    advanced,
    believed_pace,
    cancelled,
    planned,
    reported,
    sent_again,
    work_of,
)
from traceloom.collect.telling import fleet_event
from traceloom.errors import OutputError, TraceloomError
from traceloom.store.database import secret_hash
from traceloom.store.job_facts import JobFacts
from traceloom.store.state import State

LOG = logging.getLogger("traceloom.collect")
FRESH_NS = 60_000_000_000  # a host that was silent for longer is lost
LONGEST_WAIT_S = 30.0
_MOST_FILE = 4 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_LOOK_S = 1.0
_SAME_NS = 3600 * 10**9  # that a mark of a request is good for
_LOOKS_AT_JOBS = 5  # every so many looks at requests
_MOST_ENDED = 1000  # requests that are remembered here; the state has all
Choice = Literal["", "slowest-and-median"]


class HostNow(msgspec.Struct, frozen=True, kw_only=True):
    """What a host said last, and when, by the service's clock."""

    heartbeat: Heartbeat
    received_ns: int


class HostDesk:
    """Talks to hosts.

    Args:
        state: Where hosts and requests are written down.
        incoming: The directory for what hosts send: `incoming/REQUEST/HOST/`.
        term: By which this service leads; once another one does, nothing is written down any more.
        clock: Now, in ns since the epoch.

    Attributes:
        on_stitching: Called with a request whose parts are all there; the parts are joined and analysed by it.
        on_usage: Called with a host and rows of minutes that it told of, perhaps not for the first time.
    """

    def __init__(
        self, state: State, incoming: Path, term: str, clock: Callable[[], int] = time.time_ns
    ) -> None:  # fmt: skip
        self.state, self.incoming, self.term, self.clock = state, incoming, term, clock
        self.on_stitching: Callable[[FleetRequest], None] = lambda _: None
        self.on_usage: Callable[[str, list[UsageRow]], None] = lambda _host, _rows: None
        self.members: dict[str, str] = {}  # host -> SHA-256 of its credential
        self.now: dict[str, HostNow] = {}
        self.requests: dict[str, FleetRequest] = {}  # that have not ended, and those that ended since the start
        self._open: dict[str, FleetRequest] = {}  # of these: each host that waits looks through them at every change
        self._written: dict[str, FleetRequest] = {}  # what the state has of those that are open
        self._unwritten: set[str] = set()  # requests that are further than the state says, as it did not answer
        self.refused_rows: dict[str, int] = defaultdict(int)  # host -> rows of usage that cannot be
        self._said: dict[str, JobFacts] = {}  # job -> what hosts said of it last
        self._changed = asyncio.Condition()  # a request
        self._call = asyncio.Event()  # set, and replaced, when hosts have something else to do
        self._writing = asyncio.Lock()
        self._closing = False
        self._advancing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on with what is on record."""
        self._closing = False
        self.members, documents = await asyncio.to_thread(lambda: (self.state.hosts(), self.state.requests()))
        requests = [msgspec.json.decode(document, type=FleetRequest) for document in reversed(documents)]
        self.requests = {request.id: request for request in requests}
        self._open = {request.id: request for request in requests if not request.ended}
        for request in list(self._open.values()):
            # What hosts sent to another service, which has ended, they are to send here.
            if request.state in {"running", "collecting", "stitching"}:
                lost = {
                    host
                    for host, progress in request.hosts.items()
                    if progress.state == "uploaded"
                    and not all(_is_there(self.incoming / request.id / host, file) for file in progress.files)
                }
                if lost:
                    await self.put(sent_again(request, lost, self.clock()))
                    continue
            if request.state in {"stitching", "analysing"}:
                self.on_stitching(request)
        self._advancing = asyncio.create_task(self._advance_for_ever(), name="requests of the fleet")

    async def close(self) -> None:
        """Stop; requests stay as they are. Hosts that wait for work are answered."""
        self._closing = True
        self._call_hosts()
        if self._advancing is not None:
            self._advancing.cancel()
            await asyncio.gather(self._advancing, return_exceptions=True)

    # Who belongs.

    async def enrol(self, enrolment: Enrolment) -> Enrolled:
        """Take a host into the fleet.

        Raises:
            RequestError: `unknown-token`; `host-exists`: another host has the name.
        """
        host = await asyncio.to_thread(self.state.take_enrolment, enrolment.token, enrolment.host)
        if host is None:
            raise RequestError(
                401, "this token is none of ours, was used, or has expired", slug="unknown-token",
                hint="`traceloom fleet token enrol` makes one",
            )  # fmt: skip
        if host not in {"", enrolment.host}:
            raise RequestError(
                401, f"this token lets the host `{host}` join, and not `{enrolment.host}`", slug="unknown-token",
                hint="`traceloom fleet token enrol` with the name of the host, or with none, makes another one",
            )  # fmt: skip
        if not host and enrolment.host in self.members:
            raise RequestError(
                409, f"there is a host `{enrolment.host}` already", slug="host-exists",
                hint="a token for this host replaces it: `traceloom fleet token enrol NAME`",
            )  # fmt: skip
        credential = secrets.token_urlsafe(32)
        await asyncio.to_thread(self.state.put_host, enrolment.host, credential)
        self.members[enrolment.host] = secret_hash(credential)
        return Enrolled(host=enrolment.host, credential=credential)

    def check_host(self, host: str, credential: str) -> None:
        """Check that the one who asks is this host.

        Raises:
            RequestError: `unknown-host`.
        """
        if not hmac.compare_digest(self.members.get(host, ""), secret_hash(credential)):
            raise RequestError(
                401, "this host does not belong to the fleet", slug="unknown-host",
                hint="enrol it with a new token, and remove fleet.json beside the agent's history",
            )  # fmt: skip

    async def remove(self, host: str) -> None:
        """Let a host belong to the fleet no more.

        Raises:
            RequestError: `no-such-host`.
        """
        if not await asyncio.to_thread(self.state.remove_host, host):
            raise RequestError(404, f"there is no host `{host}`", slug="no-such-host", hint="`traceloom fleet hosts`")
        self.members.pop(host, None)
        self.now.pop(host, None)

    # How hosts are.

    async def heartbeat(self, host: str, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Take how a host is, and its usage; what was sent before is acknowledged again."""
        received_ns = self.clock()
        believed = [
            msgspec.structs.replace(process, steps_per_second=believed_pace(process.steps_per_second))
            for process in heartbeat.processes
        ]
        # Without usage, which the state keeps.
        said = msgspec.structs.replace(heartbeat, usage=[], processes=believed)
        self.now[host] = HostNow(heartbeat=said, received_ns=received_ns)
        through = 0
        if heartbeat.usage:
            possible = possible_rows(heartbeat.usage, received_ns)
            self.on_usage(host, possible)
            self.refused_rows[host] += len(heartbeat.usage) - len(possible)
            # A minute that has not been would pass for the last that the host sent, and what comes before it for old.
            last = last_minute(received_ns)
            minutes: dict[int, list[UsageRow]] = {row.minute: [] for row in heartbeat.usage if row.minute <= last}
            for row in possible:
                minutes[row.minute].append(row)
            documents = {minute: msgspec.json.encode(rows).decode() for minute, rows in minutes.items()}
            await asyncio.to_thread(self.state.add_usage, host, documents)
            through = max(row.minute for row in heartbeat.usage)
        return HeartbeatAnswer(received_ns=received_ns, answered_ns=self.clock(), usage_through=through)

    def fresh(self) -> dict[str, HostNow]:
        """Hosts that spoke of late."""
        return {host: now for host, now in list(self.now.items()) if self.is_fresh(now)}

    def is_fresh(self, now: HostNow) -> bool:
        """Whether what a host said last is of late: else it is lost."""
        return self.clock() - now.received_ns < FRESH_NS

    def users_of(self, job: str) -> set[str]:
        """Users whose processes a job has, as far as hosts say."""
        processes = (process for now in self.fresh().values() for process in now.heartbeat.processes)
        return {process.user for process in processes if process.job == job}

    # Requests.

    async def submit(
        self, wanted: Wanted, who: str, choice: Choice = "", *, hosts: Collection[str] = (),
        trigger: Cause | None = None, start: StartBy = "instant", at_step: int = 0, after_s: float = 0.0,
        mark: str = "",
    ) -> FleetRequest:  # fmt: skip
        """Take a request for a trace of the processes of a job, on all hosts that have some.

        Args:
            wanted: What is asked for.
            who: By whom.
            choice: Of the processes that match, whom.
            hosts: Of these hosts alone, where some are named.
            trigger: The rule that asks, where nobody does.
            start: By what all begin.
            at_step: With which step at the earliest, where they begin with one.
            after_s: In how many seconds at the earliest, where they begin at an instant.
            mark: Whoever asked for this job with the same one in the last hour gets that request; "": a new one.

        Raises:
            RequestError: `wrong-request`; `no-such-job`: no host of late has such processes.
        """
        if not wanted.job:
            raise RequestError(400, "of which job?", slug="wrong-request", hint="name a job")
        if (wanted.steps is None) == (wanted.duration_s is None):
            raise RequestError(400, "either steps or a duration", slug="wrong-request")
        fresh = {host: now for host, now in self.fresh().items() if not hosts or host in hosts}
        matching = matching_processes(fresh, wanted)
        if choice == "slowest-and-median":
            matching = slowest_and_median(matching)
            ranks = sorted({process.rank for of in matching.values() for process in of if process.rank is not None})
            wanted = msgspec.structs.replace(wanted, ranks=tuple(ranks))
        if not matching:
            raise RequestError(
                404, f"no host of late has such processes of `{wanted.job}`", slug="no-such-job",
                hint="`traceloom fleet jobs` lists jobs",
            )  # fmt: skip
        now_ns = self.clock()
        for same in self.requests.values() if mark else ():
            if (same.mark, same.wanted.job) == (mark, wanted.job) and now_ns - same.asked_ns < _SAME_NS:
                return same
        request = FleetRequest(
            id=secrets.token_hex(8), who=who, asked_ns=now_ns, wanted=wanted, trigger=trigger, start=start,
            at_step=at_step, earliest_ns=now_ns + int(after_s * 1e9) if after_s else 0, mark=mark,
        )  # fmt: skip
        of_hosts = {host: {of.rank for of in processes if of.rank is not None} for host, processes in matching.items()}
        request = planned(request, of_hosts, now_ns)
        try:
            await self.put(request)
        except TraceloomError:  # who asks hears so, and asks again
            for requests in (self.requests, self._open):
                requests.pop(request.id, None)
            self._unwritten.discard(request.id)
            raise
        return request

    async def cancel(self, request: str) -> None:
        """Stop a request; hosts hear of it with their next question for work."""
        await self.put(cancelled(self.requests[request], self.clock()))

    async def put(self, request: FleetRequest, *, calls: bool = True) -> None:
        """Set how far a request is, write it down, and tell everybody who waits for it.

        Args:
            request: As it is now.
            calls: Whether hosts have something else to do now. Where a thousand report how far they are, each of them
                would else ask anew a thousand times.
        """
        self.requests[request.id] = request
        if request.ended:
            self._open.pop(request.id, None)
        else:
            self._open[request.id] = request
        async with self._writing:  # in order; what has changed again meanwhile is written as it is now
            now = self.requests[request.id]
            if self._written.get(now.id) is not now:
                self._unwritten.add(now.id)
                document, events = msgspec.json.encode(now).decode(), []
                if now.state in {"done", "partial", "failed"}:
                    content = {
                        "id": now.id, "job": now.wanted.job, "who": now.who, "state": now.state,
                        "reason": now.reason, "detail": now.detail, "capture": now.capture,
                        "asked_ns": now.asked_ns, "start_ns": now.start_ns,
                    }  # fmt: skip
                    events = [fleet_event(f"request.{now.state}", "request", now.id, content, now.since_ns)]
                await asyncio.to_thread(
                    self.state.put_request, now.id, now.asked_ns, document, self.term, ended=now.ended, events=events
                )
                self._unwritten.discard(now.id)
                self._written[now.id] = now
                if now.ended:
                    del self._written[now.id]
        if request.ended:
            await asyncio.to_thread(shutil.rmtree, self.incoming / request.id, ignore_errors=True)
            ended = [of.id for of in self.requests.values() if of.ended and of.id not in self._unwritten]
            for old in ended[: max(len(ended) - _MOST_ENDED, 0)]:
                del self.requests[old]
        if request.state == "stitching":
            self.on_stitching(request)
        async with self._changed:
            self._changed.notify_all()
        if calls:
            self._call_hosts()

    async def changes(self, request: str) -> AsyncIterator[FleetRequest]:
        """The request now, and again after each change, until it has ended."""
        while True:
            now = self.requests[request]
            yield now
            if now.ended:
                return
            async with self._changed:
                await self._changed.wait_for(lambda: self.requests[request] is not now)  # noqa: B023

    # Work.

    async def work(self, host: str, version: str, wait_s: float) -> WorkAnswer:
        """What a host is to do; waits while that is what the host knows (`version`) already."""
        until = time.monotonic() + min(max(0.0, wait_s), LONGEST_WAIT_S)  # in this order nan is 0
        while True:
            call = self._call  # before the look: what changes after it is not missed
            offers = (work_of(request, host) for request in self._open.values())
            work = [offer for offer in offers if offer is not None]
            now = hashlib.sha256(msgspec.json.encode(work)).hexdigest()[:16]
            left = until - time.monotonic()
            if now != version or left <= 0 or self._closing:
                return WorkAnswer(version=now, work=work)
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(call.wait(), left)

    async def report(self, host: str, request: str, report: HostReport) -> ReportAnswer:
        """Take how far a host is; the files of it that are missing.

        Raises:
            RequestError: `no-such-request`: it has none such, or it has ended.
        """
        progress = self._progress(host, request)
        missing: list[str] = []
        if report.state in {"uploading", "uploaded"}:
            files = report.files or progress.files
            names = set()
            for file in files:
                if not _FILE_NAME.fullmatch(file.name) or file.name in names or file.bytes > _MOST_FILE:
                    raise RequestError(400, f"a capture has no file `{file.name[:80]}`", slug="wrong-request")
                names.add(file.name)
            folder = self.incoming / request / host
            missing = await asyncio.to_thread(lambda: [file.name for file in files if not _is_there(folder, file)])
            if missing:
                report = msgspec.structs.replace(report, state="uploading")
        await self._advance(reported(self.requests[request], host, report, self.clock()))
        return ReportAnswer(missing=missing)

    async def take_file(self, host: str, request: str, name: str, content: AsyncIterator[bytes]) -> None:
        """Take a file that a host has said; it counts only whole.

        Raises:
            OutputError: `cannot-write`: there is no room for it.
            RequestError: `no-such-request`; `no-such-file`: it was not said; `wrong-file`: it is another than was said.
        """
        files = {file.name: file for file in self._progress(host, request).files}
        if name not in files:
            raise RequestError(404, f"the host did not say that it has a file `{name}`", slug="no-such-file")
        file = files[name]
        folder = self.incoming / request / host
        part = folder / f".{name}.{secrets.token_hex(4)}"
        digest, size = hashlib.sha256(), 0
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            with part.open("xb") as target:
                async for piece in content:
                    size += len(piece)
                    if size > file.bytes:
                        break
                    digest.update(piece)
                    await asyncio.to_thread(target.write, piece)
            if size != file.bytes or digest.hexdigest() != file.sha256:
                raise RequestError(400, f"`{name}` is not what the host said that it is", slug="wrong-file")
            await asyncio.to_thread(part.replace, folder / name)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(f"the file cannot be kept: {reason}", slug="cannot-write", where=name) from error
        finally:
            part.unlink(missing_ok=True)

    # Inside.

    def _progress(self, host: str, request: str) -> HostProgress:
        now = self.requests.get(request)
        if now is None or now.ended or host not in now.hosts:
            raise RequestError(404, "this host has nothing to do for that request", slug="no-such-request")
        return now.hosts[host]

    async def _advance(self, request: FleetRequest) -> None:
        """Write it down as far as it has come by now."""
        now_ns, before = self.clock(), request
        while (further := advanced(request, now_ns)) is not request:
            request = further
        if request is not self.requests.get(request.id):
            await self.put(request, calls=request is not before)

    def _call_hosts(self) -> None:
        self._call.set()
        self._call = asyncio.Event()

    async def _say_of_jobs(self) -> None:
        """Write down what hosts say of jobs, where it is new."""
        statements = said_of_jobs({host: now.heartbeat.processes for host, now in self.fresh().items()})
        news = {job: facts for job, facts in statements.items() if self._said.get(job) != facts}
        if news:
            await asyncio.to_thread(self.state.say_of_jobs, news, self.clock())
        self._said = statements

    async def _advance_for_ever(self) -> None:
        for count in itertools.count():
            if count % _LOOKS_AT_JOBS == 0:
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
                except TraceloomError as error:  # noqa: PERF203  (one that cannot be written down stops no other)
                    LOG.warning("request %s: %s", name, error)
                except Exception:
                    LOG.exception("request %s", name)
            await asyncio.sleep(_LOOK_S)


def matching_processes(hosts: Mapping[str, HostNow], wanted: Wanted) -> dict[str, list[HostProcess]]:
    """Host -> its processes that a request is about: of the job, of the ranks, on the host that it names."""
    matching = {
        host: [
            process
            for process in now.heartbeat.processes
            if process.job == wanted.job and (not wanted.ranks or process.rank in wanted.ranks)
        ]
        for host, now in hosts.items()
        if wanted.host in {"", host}
    }
    return {host: processes for host, processes in matching.items() if processes}


def slowest_and_median(matching: Mapping[str, list[HostProcess]]) -> dict[str, list[HostProcess]]:
    """Of all ranks the one that steps slowest and one in the middle; those whose pace nobody knows do not count."""
    paced = [
        (process.steps_per_second, process.rank, host, process)
        for host, processes in matching.items()
        for process in processes
        if process.steps_per_second is not None and process.rank is not None
    ]
    paced.sort(key=itemgetter(0, 1))
    chosen: dict[str, list[HostProcess]] = defaultdict(list)
    for at in sorted({0, len(paced) // 2} if paced else ()):
        *_, host, process = paced[at]
        chosen[host].append(process)
    return dict(chosen)


def possible_rows(rows: Sequence[UsageRow], now_ns: int) -> list[UsageRow]:
    """Without minutes that have not been, or in which a device has more than 60,000 ms."""
    spent: dict[tuple[int, str], int] = defaultdict(int)
    for row in rows:
        spent[row.minute, row.device] += row.device_ms
    last = last_minute(now_ns)
    return [row for row in rows if row.minute <= last and spent[row.minute, row.device] <= 60_000]


def last_minute(now_ns: int) -> int:
    """The last minute since 1970 that may have been by the clock of a host."""
    return now_ns // 60_000_000_000 + 1


def _is_there(folder: Path, file: HostFile) -> bool:
    """Whether a file came; its content was checked when it did."""
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.bytes
