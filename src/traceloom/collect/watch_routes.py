"""The routes for who watches: the fleet at this moment, one host, one job, findings, device time."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Annotated

import msgspec
from msgspec import Meta

from traceloom.agent.http.answers import HttpAnswer, RequestError
from traceloom.agent.uplink.messages import HostProcess
from traceloom.collect.answers import Job
from traceloom.collect.questions.catalogue import EVERY_CHANGE, QUESTION
from traceloom.collect.request_routes import FleetJobAnswer, HostAnswer, host_answer, job_answer
from traceloom.collect.routes import FleetAsked, FleetRoute
from traceloom.collect.watching import (
    CaptureFacts,
    DeviceNow,
    DeviceState,
    FleetFinding,
    MeasuredBeside,
    ToplineOfDay,
    UsageOfTime,
    counted_states,
    devices_now,
    processes_of,
)
from traceloom.fleet.regressions import MIX
from traceloom.store.state import TaskState

_MOST_CAPTURES = 200  # of a job whose findings are shown
_SLOWER_S, _MOST_SLOWER = 300.0, 100  # how old they may be, as they take most work; how many
_LONGEST_WINDOW_NS = 3600 * 10**9  # of a capture, of which usage is looked up


class FleetNowAnswer(HttpAnswer, frozen=True):
    """The fleet now: hosts that are silent, devices by state, tasks of the pipeline by state, the last day's topline.

    `topline`: null where no device was held in that time.
    """

    hosts: int
    lost: list[str]
    devices: dict[DeviceState, int]
    tasks: dict[TaskState, int]
    topline: ToplineOfDay | None


class QuarantinedCapture(msgspec.Struct, frozen=True, kw_only=True):
    """A capture that could not be analysed, and why."""

    capture: str
    error: str


class SlowerKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that became slower, as the question about regressions tells of it. null: not recorded."""

    kernel: str
    shapes: str | None
    device_model: str | None
    since_ns: int
    change: float
    extra_ns: int
    jobs_after: int


class FleetTroubleAnswer(HttpAnswer, frozen=True):
    """What is wrong with what was captured: kernels that became slower, what costs most first; analyses that failed."""

    slower: list[SlowerKernel]
    quarantined: list[QuarantinedCapture]


class HostDetailAnswer(HttpAnswer, frozen=True):
    """A host, its devices, and its processes with what their agent says of them."""

    host: HostAnswer
    devices: list[DeviceNow]
    processes: list[HostProcess]


class ProcessOfJob(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a job, and where it runs."""

    host: str
    process: HostProcess


class JobDetailAnswer(HttpAnswer, frozen=True):
    """A job that runs now, its processes by rank; `job`: null where it does not run, as far as hosts say."""

    job: FleetJobAnswer | None
    processes: list[ProcessOfJob]


class FindingsParameters(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """Of which capture, or of the last captures of which job."""

    capture: Annotated[str, Meta(max_length=200)] = ""
    job: Job = ""


class FindingsAnswer(HttpAnswer, frozen=True):
    """Findings, what saves most first."""

    findings: list[FleetFinding]


class CaptureFactsAnswer(HttpAnswer, frozen=True):
    """What the tables say of a capture, and what agents measured of its job meanwhile; null: not in the tables yet."""

    facts: CaptureFacts | None
    beside: list[MeasuredBeside]


class UsageParameters(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """Of which host or job, and of how many hours back."""

    host: Annotated[str, Meta(max_length=256)] = ""
    job: Job = ""
    hours: Annotated[float, Meta(gt=0, le=24 * 92)] = 6.0


class UsageAnswer(HttpAnswer, frozen=True):
    """Device time, the last first; by minutes up to six hours, by hours beyond."""

    usage: list[UsageOfTime]


async def _now(asked: FleetAsked) -> FleetNowAnswer:
    desk = asked.hosts()
    fresh = desk.fresh()
    tasks, topline = await asyncio.gather(
        asyncio.to_thread(asked.service.state.counts), asyncio.to_thread(asked.service.watching.topline)
    )
    return FleetNowAnswer(
        hosts=len(desk.members), lost=sorted(desk.members.keys() - fresh.keys()),
        devices=counted_states(devices_now(desk.now, fresh)), tasks=tasks,
        topline=topline if topline.device_hours else None,
    )  # fmt: skip


async def _trouble(asked: FleetAsked) -> FleetTroubleAnswer:
    regressions, tasks = await asyncio.gather(
        asked.service.questions.ask(QUESTION["regressions"], EVERY_CHANGE, seconds=_SLOWER_S),
        asyncio.to_thread(asked.service.state.quarantined),
    )
    slower = (row for row in regressions.changes if row.change > 0 and row.cause not in MIX)  # type: ignore[attr-defined]
    return FleetTroubleAnswer(
        slower=[msgspec.convert(row, SlowerKernel, from_attributes=True) for row in islice(slower, _MOST_SLOWER)],
        quarantined=[QuarantinedCapture(capture=task.capture, error=task.error) for task in tasks],
    )


async def _host(asked: FleetAsked) -> HostDetailAnswer:
    desk, name = asked.hosts(), asked.request.path_params["host"]
    if name not in desk.members:
        raise RequestError(404, f"there is no host `{name}`", slug="no-such-host", hint="`traceloom fleet hosts`")
    now, fresh = desk.now.get(name), desk.fresh()
    return HostDetailAnswer(
        host=host_answer(desk, name),
        devices=[] if now is None else devices_now({name: now}, fresh),
        processes=[] if now is None else now.heartbeat.processes,
    )


async def _job(asked: FleetAsked) -> JobDetailAnswer:
    job = asked.request.path_params["job"]
    members = processes_of(asked.hosts().fresh(), job)
    return JobDetailAnswer(
        job=job_answer(job, members) if members else None,
        processes=[ProcessOfJob(host=host, process=process) for host, process in members],
    )


async def _findings(asked: FleetAsked) -> FindingsAnswer:
    wanted, service = asked.parameters(FindingsParameters), asked.service

    def rows() -> list[FleetFinding]:
        if not wanted.job:
            return service.watching.findings([wanted.capture])
        return service.watching.findings_of_job(
            wanted.job, lambda: [of.id for of in service.state.captures(job=wanted.job, most=_MOST_CAPTURES)]
        )

    return FindingsAnswer(findings=await asyncio.to_thread(rows))


async def _facts(asked: FleetAsked) -> CaptureFactsAnswer:
    capture, watching = await asked.capture(), asked.service.watching

    def answer() -> CaptureFactsAnswer:
        facts = watching.facts(capture.id)
        if facts is None or not capture.job:
            return CaptureFactsAnswer(facts=facts, beside=[])
        end_ns = min(facts.start_ns + facts.window_ns, facts.start_ns + _LONGEST_WINDOW_NS)
        return CaptureFactsAnswer(facts=facts, beside=watching.beside(capture.job, facts.start_ns, end_ns))

    return await asyncio.to_thread(answer)


async def _usage(asked: FleetAsked) -> UsageAnswer:
    wanted = asked.parameters(UsageParameters)
    rows = await asyncio.to_thread(
        asked.service.watching.usage, host=wanted.host, job=wanted.job, hours=wanted.hours
    )  # fmt: skip
    return UsageAnswer(usage=rows)


WATCH_ROUTES = (
    FleetRoute(
        path="/api/v1/now", summary="The fleet at this moment, and the last day's topline", answers=_now,
        answer=FleetNowAnswer, refuses=(503,),
    ),
    FleetRoute(
        path="/api/v1/trouble", summary="Kernels that became slower, and captures that could not be analysed",
        answers=_trouble, answer=FleetTroubleAnswer, refuses=(503,),
    ),
    FleetRoute(
        path="/api/v1/hosts/{host}", summary="A host, its devices and processes", answers=_host,
        answer=HostDetailAnswer, refuses=(404, 503),
    ),
    FleetRoute(
        path="/api/v1/jobs/{job:path}", summary="A job that runs now, and its processes", answers=_job,
        answer=JobDetailAnswer, refuses=(404, 503),
    ),
    FleetRoute(
        path="/api/v1/findings/latest", summary="Findings of a capture, or of the last captures of a job",
        answers=_findings,
        answer=FindingsAnswer, parameters=FindingsParameters, refuses=(400,),
    ),
    FleetRoute(
        path="/api/v1/captures/{id}/facts", summary="What the tables say of a capture, and what agents measured beside",
        answers=_facts, answer=CaptureFactsAnswer, refuses=(404,),
    ),
    FleetRoute(
        path="/api/v1/usage", summary="Device time of a host or job", answers=_usage, answer=UsageAnswer,
        parameters=UsageParameters, refuses=(400,),
    ),
)  # fmt: skip
