"""HTTP handlers for the current state of fleet, hosts and jobs, recent findings and usage, and live
queries.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from typing import Annotated, Literal

import msgspec
import polars as pl
from msgspec import Meta

from traceloom.agent.fleet_link.protocol import HostDevice, HostProcess
from traceloom.fleet.analyses.attribution import compute_ownership_periods
from traceloom.fleet.analyses.efficiency import METRICS, compute_fleet_topline
from traceloom.fleet.analyses.regressions import MIX_CAUSES, find_regressions
from traceloom.fleet.api import Job
from traceloom.fleet.handlers.captures import FleetRequestContext, FleetRoute
from traceloom.fleet.handlers.hosts import (
    FleetJobResponse,
    HostResponse,
    build_host_answer,
    build_job_answer,
)
from traceloom.fleet.questions.answering import AnswerCache
from traceloom.fleet.questions.catalogue import ALL_CHANGES_QUERY, QUESTION
from traceloom.fleet.service.requests import LastHeartbeat
from traceloom.fleet.store.captures import TaskState
from traceloom.fleet.store.schema import get_utc_day
from traceloom.fleet.store.tables import Tables
from traceloom.server.problem import HttpError, HttpResponseBody

DeviceState = Literal["busy", "idle-allocated", "unallocated", "unreachable"]
"""As in the tables of usage, but current."""

_TOPLINE_CACHE_S = 60.0  # it covers a whole day
_SLOWER_DAYS = 30
_USAGE_CACHE_S = 15.0  # usage is measured by the minute
_MAX_CACHED = 256  # entries of each cache
_MINUTE_NS, _HOUR_NS = 60 * 10**9, 3600 * 10**9
_MAX_ROWS = 10_000
BUSY_METRIC = "gpu_busy_ratio"


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device: what it is in, for which jobs, and what was measured last, by metric.

    `stale`: why it is silent.
    """

    host: str
    device: str
    index: str
    model: str
    state: DeviceState
    jobs: list[str]
    values: dict[str, float]
    stale: str = ""


class FleetFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of a capture, as in the table of that name.

    null: it saves no time, or is about no single rank.
    """

    capture: str
    slug: str
    saving_ns: int | None
    saving_fraction: float | None
    confidence: float | None
    rank: int | None


class CaptureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A capture as it was analysed last; the table of captures says what each is.

    null: not known.
    """

    start_ns: int
    window_ns: int
    ranks: int
    hosts: int | None
    device_model: str | None
    torch: str | None
    code: str | None
    step_ns: int | None
    mfu: float | None
    roofline_fraction: float | None
    notices: list[str] | None
    version: str


class HostTelemetryInCapture(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent of a host measured in the minutes of a capture: device time of its job by
    state, and energy.

    `energy_mj`: null where no device measures it.
    """

    host: str
    devices: int
    busy_ms: int
    idle_ms: int
    energy_mj: int | None
    flops_low: float | None


class UsagePeriod(msgspec.Struct, frozen=True, kw_only=True):
    """Device time of a minute or hour in a state, of a job or of none; `energy_mj`: null where
    nothing measures it.
    """

    time_ns: int
    job: str | None
    state: DeviceState
    device_ms: int
    energy_mj: int | None


class DailyTopline(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet got out of its devices in the last 24 hours; null: not measured.

    As `traceloom.fleet.analyses.efficiency`.
    """

    device_hours: float | None
    device_use: float | None
    flop_rate: float | None
    flop_rate_high: float | None
    compute_use: float | None
    power_w: float | None
    roofline_fraction: float | None
    mfu: float | None


class LiveQueries:
    """Queries the tables for pages, with caches. Its methods block.

    Args:
        tables: Of the fleet.
        clock: Unix time in ns.
    """

    def __init__(self, tables: Tables, clock: Callable[[], int] = time.time_ns) -> None:
        self.tables, self.clock = tables, clock
        self._toplines = AnswerCache[DailyTopline](1)
        self._usage = AnswerCache[list[UsagePeriod]](_MAX_CACHED)
        self._findings = AnswerCache[list[FleetFinding]](_MAX_CACHED)

    def topline(self) -> DailyTopline:
        """Returns the topline of the last 24 hours, at most a minute old."""
        return self._toplines.get("", self._topline, seconds=_TOPLINE_CACHE_S)

    def findings(self, captures: Sequence[str]) -> list[FleetFinding]:
        """Returns findings of captures (by name), largest saving first."""
        rows = (
            self.tables.scan("findings")
            .filter(pl.col("capture").is_in(captures))
            .select("capture", "slug", "saving_ns", "saving_fraction", "confidence", "rank")
        )
        ranked = (
            rows.sort("saving_fraction", descending=True, nulls_last=True).head(_MAX_ROWS).collect()
        )
        return msgspec.convert(ranked.to_dicts(), list[FleetFinding])

    def facts(self, capture: str) -> CaptureFacts | None:
        """Returns the latest analysis of a capture; None if it is not in the tables."""
        rows = (
            self.tables.scan("captures").filter(pl.col("capture") == capture).collect().to_dicts()
        )
        return msgspec.convert(rows[-1], CaptureFacts) if rows else None

    def beside(self, job: str, start_ns: int, end_ns: int) -> list[HostTelemetryInCapture]:
        """Returns what agents measured of a job from `start_ns` to `end_ns`, by host."""
        rows = self.tables.scan("usage_minute", get_utc_day(start_ns), get_utc_day(end_ns)).filter(
            pl.col("job") == job,
            pl.col("time_ns") > start_ns - _MINUTE_NS,
            pl.col("time_ns") < end_ns,
        )
        time_in = {
            state: pl.col("device_ms").filter(pl.col("state") == state).sum()
            for state in ("busy", "idle-allocated")
        }
        summed = rows.group_by("host").agg(
            devices=pl.col("device").n_unique(),
            busy_ms=time_in["busy"],
            idle_ms=time_in["idle-allocated"],
            energy_mj=_add_up_known("energy_mj"),
            flops_low=_add_up_known("flops_low"),
        )
        return msgspec.convert(
            summed.sort("host").collect().to_dicts(), list[HostTelemetryInCapture]
        )

    def usage(self, *, host: str = "", job: str = "", hours: float) -> list[UsagePeriod]:
        """Returns device time of a host or job, latest first, at most 15 s old.

        By minutes up to six hours, else by hours.
        """
        return self._usage.get(
            (host, job, hours), lambda: self._used(host, job, hours), seconds=_USAGE_CACHE_S
        )

    def findings_of_job(
        self, job: str, captures: Callable[[], Sequence[str]]
    ) -> list[FleetFinding]:
        """Returns findings of the captures of a job, at most 15 s old."""
        return self._findings.get(job, lambda: self.findings(captures()), seconds=_USAGE_CACHE_S)

    def _used(self, host: str, job: str, hours: float) -> list[UsagePeriod]:
        since = self.clock() - int(hours * _HOUR_NS)
        rows = self.tables.scan(
            "usage_minute" if hours <= 6 else "usage_hour", first=get_utc_day(since)
        )
        rows = rows.filter(pl.col("time_ns") >= since - (_MINUTE_NS if hours <= 6 else _HOUR_NS))
        for name, value in (("host", host), ("job", job)):
            if value:
                rows = rows.filter(pl.col(name) == value)
        last = (
            rows.group_by("time_ns", "job", "state")
            .agg(pl.col("device_ms").sum(), _add_up_known("energy_mj"))
            .sort("time_ns", "state", "job", descending=[True, False, False])
            .head(_MAX_ROWS)
            .collect()
        )
        return msgspec.convert(last.to_dicts(), list[UsagePeriod])

    def _topline(self) -> DailyTopline:
        since = self.clock() - 24 * _HOUR_NS
        first = get_utc_day(since)
        usage = self.tables.scan("usage_hour", first=first).filter(
            pl.col("time_ns") > since - _HOUR_NS
        )
        [row] = compute_fleet_topline(
            usage,
            compute_ownership_periods(self.tables.scan("jobs"), self.tables.scan("owners")),
            self.tables.scan("captures", first=first).filter(pl.col("start_ns") > since),
        ).rows.to_dicts()
        names = ("device_hours", "flop_rate_high", *METRICS)
        return msgspec.convert({name: row[name] for name in names}, DailyTopline)


def find_slower_kernels(tables: Tables, now_ns: int) -> pl.DataFrame:
    """Returns kernels that became slower in the last 30 days, as rows of `Regressions.changes`.

    Changes of the mix are excluded.
    """
    first = get_utc_day(now_ns - _SLOWER_DAYS * 24 * _HOUR_NS)
    return find_regressions(
        *(tables.scan(name, first) for name in ("kernels", "captures", "devices"))
    ).slower.filter(~pl.col("cause").is_in(MIX_CAUSES))


def list_devices(
    now: Mapping[str, LastHeartbeat], fresh: Mapping[str, LastHeartbeat]
) -> list[DeviceStatus]:
    """Returns all devices by host; those of silent hosts are unreachable."""
    devices = []
    for host in sorted(now):
        jobs: dict[str, set[str]] = defaultdict(set)
        for process in now[host].heartbeat.processes:
            for uuid in process.devices:
                if process.job:
                    jobs[uuid].add(process.job)
        for device in now[host].heartbeat.devices:
            holding_jobs = sorted(jobs[device.uuid])
            state: DeviceState
            if host not in fresh or device.stale:
                state = "unreachable"
            elif not holding_jobs:
                state = "unallocated"
            else:
                state = "busy" if device.values.get(BUSY_METRIC, 1.0) > 0 else "idle-allocated"
            devices.append(
                DeviceStatus(
                    host=host,
                    device=device.uuid,
                    index=device.index,
                    model=device.model,
                    jobs=holding_jobs,
                    state=state,
                    values=device.values,
                    stale=device.stale,
                )
            )
    return devices


def count_states(devices: list[DeviceStatus]) -> dict[DeviceState, int]:
    """Counts devices by state."""
    return dict(Counter(device.state for device in devices))


def list_job_processes(now: Mapping[str, LastHeartbeat], job: str) -> list[tuple[str, HostProcess]]:
    """Returns host and process of all processes of a job, by rank."""
    return sorted(
        (
            (host, process)
            for host, last_heartbeat in now.items()
            for process in last_heartbeat.heartbeat.processes
            if process.job == job
        ),
        key=lambda member: (member[1].rank is None, member[1].rank or 0, member[0], member[1].pid),
    )


def _add_up_known(name: str) -> pl.Expr:
    return pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name)


_MAX_CAPTURES = 200  # of a job whose findings are shown
# Max age, as they are the most expensive to compute; max number.
_SLOWER_S, _MOST_SLOWER = 300.0, 100
_MAX_WINDOW_NS = 3600 * 10**9  # of a capture, for which usage is looked up


class FleetStatusResponse(HttpResponseBody, frozen=True):
    """The fleet now: hosts that are silent, devices by state, tasks of the pipeline by state, the
    last day's topline.

    `topline`: null where no device was held in that time.
    """

    hosts: int
    lost: list[str]
    devices: dict[DeviceState, int]
    tasks: dict[TaskState, int]
    topline: DailyTopline | None


class QuarantinedCapture(msgspec.Struct, frozen=True, kw_only=True):
    """A capture that could not be analysed, and why."""

    capture: str
    error: str


class SlowerKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that became slower, as the question about regressions tells of it.

    null: not recorded.
    """

    kernel: str
    shapes: str | None
    device_model: str | None
    since_ns: int
    change: float
    extra_ns: int
    jobs_after: int


class FleetProblemsResponse(HttpResponseBody, frozen=True):
    """What is wrong with what was captured: kernels that became slower, what costs most first;
    analyses that failed.
    """

    slower: list[SlowerKernel]
    quarantined: list[QuarantinedCapture]


class HostDetailResponse(HttpResponseBody, frozen=True):
    """A host, its devices, and its processes with what their agent says of them."""

    host: HostResponse
    devices: list[DeviceStatus]
    processes: list[HostProcess]


class JobProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a job, and where it runs."""

    host: str
    process: HostProcess


class JobDetailResponse(HttpResponseBody, frozen=True):
    """A job that runs now, its processes by rank; `job`: null where it does not run, as far as
    hosts say.
    """

    job: FleetJobResponse | None
    processes: list[JobProcess]


class FindingsParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Of which capture, or of the last captures of which job."""

    capture: Annotated[str, Meta(max_length=200)] = ""
    job: Job = ""


class FindingsResponse(HttpResponseBody, frozen=True):
    """Findings, what saves most first."""

    findings: list[FleetFinding]


class CaptureFactsResponse(HttpResponseBody, frozen=True):
    """What the tables say of a capture, and what agents measured of its job meanwhile; null: not in
    the tables yet.
    """

    facts: CaptureFacts | None
    beside: list[HostTelemetryInCapture]


class UsageParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Of which host or job, and of how many hours back."""

    host: Annotated[str, Meta(max_length=256)] = ""
    job: Job = ""
    hours: Annotated[float, Meta(gt=0, le=24 * 92)] = 6.0


class UsageResponse(HttpResponseBody, frozen=True):
    """Device time, the last first; by minutes up to six hours, by hours beyond."""

    usage: list[UsagePeriod]


async def _get_fleet_now(context: FleetRequestContext) -> FleetStatusResponse:
    hosts = context.hosts()
    fresh = hosts.fresh()
    tasks, topline = await asyncio.gather(
        asyncio.to_thread(context.service.state.counts),
        asyncio.to_thread(context.service.live_queries.topline),
    )
    return FleetStatusResponse(
        hosts=len(hosts.members),
        lost=sorted(hosts.members.keys() - fresh.keys()),
        devices=count_states(list_devices(hosts.now, fresh)),
        tasks=tasks,
        topline=topline if topline.device_hours else None,
    )


async def _get_fleet_problems(context: FleetRequestContext) -> FleetProblemsResponse:
    regressions, tasks = await asyncio.gather(
        context.service.questions.ask(
            QUESTION["regressions"], ALL_CHANGES_QUERY, seconds=_SLOWER_S
        ),
        asyncio.to_thread(context.service.state.quarantined),
    )
    slower = (row for row in regressions.changes if row.change > 0 and row.cause not in MIX_CAUSES)  # type: ignore[attr-defined]
    return FleetProblemsResponse(
        slower=[
            msgspec.convert(row, SlowerKernel, from_attributes=True)
            for row in islice(slower, _MOST_SLOWER)
        ],
        quarantined=[QuarantinedCapture(capture=task.capture, error=task.error) for task in tasks],
    )


async def _get_host(context: FleetRequestContext) -> HostDetailResponse:
    hosts, name = context.hosts(), context.request.path_params["host"]
    if name not in hosts.members:
        raise HttpError(
            404, f"there is no host `{name}`", slug="no-such-host", hint="`traceloom fleet hosts`"
        )
    last, fresh = hosts.now.get(name), hosts.fresh()
    return HostDetailResponse(
        host=build_host_answer(hosts, name),
        devices=[] if last is None else list_devices({name: last}, fresh),
        processes=[] if last is None else last.heartbeat.processes,
    )


async def _get_job(context: FleetRequestContext) -> JobDetailResponse:
    job = context.request.path_params["job"]
    members = list_job_processes(context.hosts().fresh(), job)
    return JobDetailResponse(
        job=build_job_answer(job, members) if members else None,
        processes=[JobProcess(host=host, process=process) for host, process in members],
    )


async def _list_findings(context: FleetRequestContext) -> FindingsResponse:
    parameters, service = context.parameters(FindingsParameters), context.service

    def rows() -> list[FleetFinding]:
        if not parameters.job:
            return service.live_queries.findings([parameters.capture])
        return service.live_queries.findings_of_job(
            parameters.job,
            lambda: [
                capture_record.id
                for capture_record in service.state.captures(
                    job=parameters.job, limit=_MAX_CAPTURES
                )
            ],
        )

    return FindingsResponse(findings=await asyncio.to_thread(rows))


async def _get_capture_facts(context: FleetRequestContext) -> CaptureFactsResponse:
    capture, watching = await context.capture(), context.service.live_queries

    def answer() -> CaptureFactsResponse:
        facts = watching.facts(capture.id)
        if facts is None or not capture.job:
            return CaptureFactsResponse(facts=facts, beside=[])
        end_ns = min(facts.start_ns + facts.window_ns, facts.start_ns + _MAX_WINDOW_NS)
        return CaptureFactsResponse(
            facts=facts, beside=watching.beside(capture.job, facts.start_ns, end_ns)
        )

    return await asyncio.to_thread(answer)


async def _list_usage(context: FleetRequestContext) -> UsageResponse:
    parameters = context.parameters(UsageParameters)
    rows = await asyncio.to_thread(
        context.service.live_queries.usage,
        host=parameters.host,
        job=parameters.job,
        hours=parameters.hours,
    )
    return UsageResponse(usage=rows)


WATCH_ROUTES = (
    FleetRoute(
        path="/api/v1/now",
        summary="The fleet at this moment, and the last day's topline",
        answers=_get_fleet_now,
        answer=FleetStatusResponse,
        refuses=(503,),
    ),
    FleetRoute(
        path="/api/v1/problems",
        summary="Kernels that became slower, and captures that could not be analysed",
        answers=_get_fleet_problems,
        answer=FleetProblemsResponse,
        refuses=(503,),
    ),
    FleetRoute(
        path="/api/v1/hosts/{host}",
        summary="A host, its devices and processes",
        answers=_get_host,
        answer=HostDetailResponse,
        refuses=(404, 503),
    ),
    FleetRoute(
        path="/api/v1/jobs/{job:path}",
        summary="A job that runs now, and its processes",
        answers=_get_job,
        answer=JobDetailResponse,
        refuses=(404, 503),
    ),
    FleetRoute(
        path="/api/v1/findings/latest",
        summary="Findings of a capture, or of the last captures of a job",
        answers=_list_findings,
        answer=FindingsResponse,
        parameters=FindingsParameters,
        refuses=(400,),
    ),
    FleetRoute(
        path="/api/v1/captures/{id}/facts",
        summary="What the tables say of a capture, and what agents measured beside",
        answers=_get_capture_facts,
        answer=CaptureFactsResponse,
        refuses=(404,),
    ),
    FleetRoute(
        path="/api/v1/usage",
        summary="Device time of a host or job",
        answers=_list_usage,
        answer=UsageResponse,
        parameters=UsageParameters,
        refuses=(400,),
    ),
)

By = Literal["job", "host", "device"]


class LiveParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """What a row is of, and which jobs and hosts; `*` and `?` stand for any signs."""

    by: Annotated[By, Meta(description="what a row is of: job, host or device")] = "job"
    job: Annotated[
        str, Meta(max_length=500, description="only these jobs; `*` and `?` stand for any signs")
    ] = ""
    host: Annotated[
        str, Meta(max_length=500, description="only these hosts; `*` and `?` stand for any signs")
    ] = ""
    top: Annotated[int, Meta(ge=1, le=10_000, description="so many rows")] = 1_000


class LiveRow(HttpResponseBody, frozen=True):
    """What is measured now; null: not by all devices, and for `busy` and steps: by none.

    `busy`: share of time in which a kernel runs, mean over devices; power and memory are sums over
    devices; `steps_per_second`: of the slowest rank, `step_s`: how long its steps are; `heard_ns`:
    the oldest heartbeat in it. A device that several jobs share counts for each of them.
    """

    job: str
    host: str
    device: str
    heard_ns: int
    devices: int
    busy: float | None
    power_w: float | None
    memory_bytes: float | None
    memory_limit_bytes: float | None
    steps_per_second: float | None
    step_s: float | None


class LiveResponse(HttpResponseBody, frozen=True):
    """What there is now, by name; `more`: there are rows after these."""

    at_ns: int
    rows: list[LiveRow]
    more: bool


class _LiveGroup:
    """Devices and processes of a row."""

    def __init__(self) -> None:
        self.devices: dict[tuple[str, str], HostDevice] = {}
        self.jobs: set[str] = set()
        self.rates: list[float] = []
        self.heard_ns: list[int] = []

    def add(
        self, host: str, now: LastHeartbeat, device: HostDevice | None, process: HostProcess | None
    ) -> None:
        self.heard_ns.append(now.received_ns)
        if device is not None:
            self.devices[host, device.uuid] = device
        if process is not None and process.job:
            self.jobs.add(process.job)
        if process is not None and process.steps_per_second is not None:
            self.rates.append(process.steps_per_second)

    def values(self, metric: str) -> list[float]:
        """Returns the values of the devices that measure it now."""
        return [
            d.values[metric] for d in self.devices.values() if metric in d.values and not d.stale
        ]

    def total(self, metric: str) -> float | None:
        values = self.values(metric)
        return sum(values) if values and len(values) == len(self.devices) else None


def build_live_answer(
    hosts: Mapping[str, LastHeartbeat], parameters: LiveParameters, now_ns: int
) -> LiveResponse:
    """Builds the answer to a live query.

    Args:
        hosts: Host -> its last heartbeat.
        parameters: Grouping and filters.
        now_ns: Now, Unix time.
    """
    groups: dict[tuple[str, str, str], _LiveGroup] = defaultdict(_LiveGroup)
    job_pattern, host_pattern = (
        pattern.replace("[", "[[]") or "*" for pattern in (parameters.job, parameters.host)
    )
    for host, last in hosts.items():
        if not fnmatchcase(host, host_pattern):
            continue
        devices = {device.uuid: device for device in last.heartbeat.devices}
        pairs: list[tuple[HostDevice | None, HostProcess | None]] = [
            (devices.get(uuid), process)
            for process in last.heartbeat.processes
            if fnmatchcase(process.job, job_pattern)
            for uuid in process.devices or ("",)
        ]
        if not parameters.job:
            pairs += [(device, None) for device in devices.values()]
        for device, process in pairs:
            if parameters.by == "host":
                groups["", host, ""].add(host, last, device, process)
            elif parameters.by == "device" and device is not None:
                groups["", host, device.uuid].add(host, last, device, process)
            elif parameters.by == "job" and process is not None and process.job:
                groups[process.job, "", ""].add(host, last, device, process)
    rows = []
    for job, host_name, uuid in sorted(groups)[: parameters.top]:
        group = groups[job, host_name, uuid]
        busy, rate = group.values("gpu_busy_ratio"), min(group.rates, default=None)
        rows.append(
            LiveRow(
                job=job or ", ".join(sorted(group.jobs)),
                host=host_name or ", ".join(sorted({host for host, _ in group.devices})),
                device=uuid,
                heard_ns=min(group.heard_ns),
                devices=len(group.devices),
                busy=sum(busy) / len(busy) if busy else None,
                power_w=group.total("gpu_power_watts"),
                memory_bytes=group.total("gpu_memory_used_bytes"),
                memory_limit_bytes=group.total("gpu_memory_limit_bytes"),
                steps_per_second=rate,
                step_s=1 / rate if rate else None,
            )
        )
    return LiveResponse(at_ns=now_ns, rows=rows, more=len(groups) > parameters.top)


LIVE_ROUTES = (
    FleetRoute(
        path="/api/v1/query",
        summary="What jobs, hosts and devices do now",
        answer=LiveResponse,
        answers=lambda asked: build_live_answer(
            asked.hosts().fresh(), asked.parameters(LiveParameters), asked.hosts().clock()
        ),
        parameters=LiveParameters,
        refuses=(400, 503),
    ),
)
