"""HTTP handlers for agents (enrolment, heartbeats, work, reports, files), trace requests, and job
statements.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from heapq import nlargest
from operator import attrgetter
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from traceloom.agent.fleet_link.protocol import (
    Enrolment,
    Heartbeat,
    HeartbeatResponse,
    HostCredentials,
    HostProcess,
    HostReport,
    ReportResponse,
    StartBy,
    WorkResponse,
    decode_heartbeat,
)
from traceloom.agent.traces.requests import TraceSpec, TriggerCause
from traceloom.fleet.handlers.captures import (
    FleetRequestContext,
    FleetRoute,
    check_own_job,
    get_bearer,
    has_role,
    send_events,
)
from traceloom.fleet.service.request_plan import FleetRequest, FleetState
from traceloom.fleet.service.requests import MAX_WAIT_S, Choice, HostRegistry
from traceloom.fleet.store.hosts import JobFacts
from traceloom.server.problem import HttpError, HttpResponseBody
from traceloom.server.routing import make_truncated_error
from traceloom.system.text import ONE_LINE, OPTIONAL_HOST


class HostResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A host and what it said last. `heard_ns`: when; null: not since the service started."""

    host: str
    heard_ns: int | None = None
    lost: bool = True
    version: str = ""
    clock_offset_ns: int | None = None
    clock_error_ns: int | None = None
    devices: int = 0
    stale_devices: int = 0
    processes: int = 0
    jobs: list[str] = []
    collector_errors: dict[str, str] = {}


class HostsResponse(HttpResponseBody, frozen=True):
    """All hosts of the fleet, by name."""

    hosts: list[HostResponse]


class FleetJobResponse(HttpResponseBody, frozen=True):
    """A job that runs. `traceable`: how many of its processes are prepared for traces on demand.

    `hung`: on a host of it processes make no steps any more.
    """

    job: str
    name: str
    scheduler: str
    user: str
    framework: str
    hosts: list[str]
    processes: int
    traceable: int
    ranks: int
    world_size: int | None
    devices: int
    steps_per_second: float | None
    hung: bool


class FleetJobsResponse(HttpResponseBody, frozen=True):
    """Jobs that run now, by name."""

    jobs: list[FleetJobResponse]


class RequestBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """A trace that is wanted of a job. `choose`: all that match, or only the slowest rank and one
    in the middle.

    `start`: all begin at one instant, in `after_s` seconds at the earliest, or with one step, where
    the steps of all processes are known and agree, `at_step` at the earliest. `mark`: the same
    within an hour is the same request.
    """

    spec: TraceSpec
    choose: Choice = ""
    start: StartBy = "instant"
    at_step: Annotated[int, Meta(ge=0, le=2**53)] = 0
    after_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    mark: Annotated[str, Meta(max_length=100)] = ""


class RequestHost(msgspec.Struct, frozen=True, kw_only=True):
    """How far a host is; `ranks`: of its processes."""

    host: str
    state: str
    since_ns: int
    reason: str = ""
    detail: str = ""
    ranks: list[int] = []
    targets: list[str] = []  # rank and profiler, and how far each is


class FleetRequestResponse(HttpResponseBody, frozen=True):
    """A request and how far it is. `start_ns`: the common instant, 0 before it is set; `capture`:
    the result.

    `start_step`: the step that all begin with, 0 where they begin at an instant; `start_detail`:
    why that is so, why it is a later one, or which hosts began late. `trigger`: the rule that
    asked, null where somebody did.
    """

    id: str
    who: str
    asked_ns: int
    spec: TraceSpec
    state: FleetState
    since_ns: int
    start_ns: int
    start_step: int
    start_detail: str
    reason: str
    detail: str
    capture: str
    trigger: TriggerCause | None
    hosts: list[RequestHost]


class FleetRequestsResponse(HttpResponseBody, frozen=True):
    """Requests, newest first."""

    requests: list[FleetRequestResponse]


class RequestsParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """At most so many."""

    most: Annotated[int, Meta(ge=1, le=1000)] = 50


def build_request_answer(request: FleetRequest) -> FleetRequestResponse:
    """Builds the answer about a request."""
    hosts = []
    for host, progress in request.hosts.items():
        armed = {process.rank for process in progress.processes if process.rank is not None}
        ranks = sorted(armed or progress.ranks)
        targets = [
            f"{f'process {target.pid}' if target.rank is None else f'rank {target.rank}'} {target.profiler}: "
            f"{target.state}" + (f" ({target.detail or target.reason})" if target.reason else "")
            for target in progress.targets
        ]
        hosts.append(
            RequestHost(
                host=host,
                state=progress.state or "asked",
                since_ns=progress.since_ns,
                reason=progress.reason,
                detail=progress.detail,
                ranks=ranks,
                targets=targets,
            )
        )
    return FleetRequestResponse(
        id=request.id,
        who=request.who,
        asked_ns=request.asked_ns,
        spec=request.spec,
        state=request.state,
        since_ns=request.since_ns,
        start_ns=request.start_ns,
        start_step=request.start_step,
        start_detail=request.start_detail,
        reason=request.reason,
        detail=request.detail,
        capture=request.capture,
        trigger=request.trigger,
        hosts=hosts,
    )


def build_host_answer(registry: HostRegistry, name: str) -> HostResponse:
    """Builds the answer about a host."""
    last = registry.now.get(name)
    if last is None:
        return HostResponse(host=name)
    heartbeat = last.heartbeat
    return HostResponse(
        host=name,
        heard_ns=last.received_ns,
        lost=not registry.is_fresh(last),
        version=heartbeat.version,
        clock_offset_ns=None if heartbeat.clock is None else heartbeat.clock.offset_ns,
        clock_error_ns=None if heartbeat.clock is None else heartbeat.clock.error_ns,
        devices=len(heartbeat.devices),
        stale_devices=sum(bool(device.stale) for device in heartbeat.devices),
        processes=len(heartbeat.processes),
        jobs=sorted({process.job for process in heartbeat.processes if process.job}),
        collector_errors=heartbeat.collector_errors,
    )


class RemovedHostResponse(HttpResponseBody, frozen=True):
    """A host that belongs to the fleet no more."""

    host: str


async def _remove_host(context: FleetRequestContext) -> RemovedHostResponse:
    host = context.request.path_params["host"]
    await context.hosts().remove(host)
    await context.note(host=host)
    return RemovedHostResponse(host=host)


def _list_jobs(context: FleetRequestContext) -> FleetJobsResponse:
    members: dict[str, list[tuple[str, HostProcess]]] = defaultdict(list)
    for host, last in context.hosts().fresh().items():
        for process in last.heartbeat.processes:
            if process.job:
                members[process.job].append((host, process))
    return FleetJobsResponse(jobs=[build_job_answer(job, members[job]) for job in sorted(members)])


def build_job_answer(job: str, members: Sequence[tuple[str, HostProcess]]) -> FleetJobResponse:
    """Builds the answer about a job from its processes and their hosts."""
    processes = [process for _, process in members]
    rates = [
        process.steps_per_second for process in processes if process.steps_per_second is not None
    ]
    sizes = [process.world_size for process in processes if process.world_size is not None]

    def first(name: str) -> str:
        return next((text for process in processes if (text := getattr(process, name))), "")

    return FleetJobResponse(
        job=job,
        name=first("job_name"),
        scheduler=first("scheduler"),
        user=first("user"),
        framework=first("framework"),
        hosts=sorted({host for host, _ in members}),
        processes=len(processes),
        traceable=sum(process.polls for process in processes),
        ranks=len({process.rank for process in processes if process.rank is not None}),
        world_size=max(sizes, default=None),
        devices=len({(host, device) for host, process in members for device in process.devices}),
        steps_per_second=min(rates, default=None),
        hung=any(process.hung for process in processes),
    )


async def _submit_request(context: FleetRequestContext) -> FleetRequestResponse:
    body = await context.body(RequestBody)
    registry = context.hosts()
    await check_own_job(context, body.spec.job)
    request = await registry.submit(
        body.spec,
        context.token.name,
        body.choose,
        start=body.start,
        at_step=body.at_step,
        after_s=body.after_s,
        mark=f"{context.token.name} {body.mark}" if body.mark else "",
    )
    await context.note(request=request.id, job=body.spec.job)
    return build_request_answer(request)


async def _cancel_request(context: FleetRequestContext) -> FleetRequestResponse:
    request = context.fleet_request()
    if request.who != context.token.name and not has_role(context.token, "operator"):
        raise HttpError(403, "another one asked for it", slug="not-allowed")
    await context.hosts().cancel(request.id)
    await context.note(request=request.id)
    return build_request_answer(context.fleet_request())


async def _watch_request(context: FleetRequestContext) -> Response:
    request = context.fleet_request()

    async def events() -> AsyncGenerator[bytes, None]:
        async for current in context.hosts().changes(request.id):
            yield b"data: " + msgspec.json.encode(build_request_answer(current)) + b"\n\n"

    async def may_read() -> bool:
        secret = get_bearer(context.request.headers)
        return await asyncio.to_thread(context.service.state.token, secret) is not None

    return StreamingResponse(
        send_events(events(), may_read),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


REQUEST_ROUTES = (
    FleetRoute(
        path="/api/v1/hosts",
        summary="Hosts and how they are",
        answer=HostsResponse,
        answers=lambda asked: HostsResponse(
            hosts=[build_host_answer(asked.hosts(), name) for name in sorted(asked.hosts().members)]
        ),
    ),
    FleetRoute(
        path="/api/v1/hosts/{host}",
        summary="Let a host belong to the fleet no more",
        answers=_remove_host,
        answer=RemovedHostResponse,
        method="DELETE",
        role="operator",
        refuses=(403, 404, 503),
    ),
    FleetRoute(
        path="/api/v1/jobs",
        summary="Jobs that run now",
        answers=_list_jobs,
        answer=FleetJobsResponse,
    ),
    FleetRoute(
        path="/api/v1/requests",
        summary="Requests for traces, newest first",
        answer=FleetRequestsResponse,
        parameters=RequestsParameters,
        refuses=(400, 503),
        answers=lambda asked: FleetRequestsResponse(
            requests=[
                build_request_answer(request)
                for request in nlargest(
                    asked.parameters(RequestsParameters).most,
                    asked.hosts().requests.values(),
                    key=attrgetter("asked_ns"),
                )
            ]
        ),
    ),
    FleetRoute(
        path="/api/v1/requests",
        summary="Ask for a trace of a job on all of its hosts",
        answers=_submit_request,
        answer=FleetRequestResponse,
        method="POST",
        body=RequestBody,
        role="requester",
        refuses=(400, 403, 404, 503),
    ),
    FleetRoute(
        path="/api/v1/requests/{id}",
        summary="A request and how far it is",
        answer=FleetRequestResponse,
        refuses=(404, 503),
        answers=lambda asked: build_request_answer(asked.fleet_request()),
    ),
    FleetRoute(
        path="/api/v1/requests/{id}",
        summary="Cancel a request",
        answers=_cancel_request,
        answer=FleetRequestResponse,
        method="DELETE",
        role="requester",
        refuses=(403, 404, 503),
    ),
    FleetRoute(
        path="/api/v1/requests/{id}/events",
        summary="A request after each change, until it has ended",
        answers=_watch_request,
        content="text/event-stream",
        refuses=(404, 503),
    ),
)

AGENTS_PATH = "/api/v1/agents/"
_ENROLMENT_BYTES = 64 << 10  # of somebody of whom nothing is known yet


class WorkParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the host knows already, and for how many seconds it waits for something else."""

    version: str = ""
    wait: float = MAX_WAIT_S


def _require_own_host(
    answer: Callable[
        [FleetRequestContext, HostRegistry, str], Awaitable[msgspec.Struct | Response]
    ],
) -> Callable[[FleetRequestContext], Awaitable[msgspec.Struct | Response]]:
    """Wraps a handler so that only the host named in the path may call it."""

    async def respond(context: FleetRequestContext) -> msgspec.Struct | Response:
        registry, host = context.hosts(), context.request.path_params["host"]
        _check_host(context, registry, host)
        response = await answer(context, registry, host)
        _check_host(context, registry, host)  # it may have been removed while it waited
        return response

    return respond


def _check_host(context: FleetRequestContext, registry: HostRegistry, host: str) -> None:
    registry.check_host(host, get_bearer(context.request.headers))


async def _enrol(context: FleetRequestContext) -> HostCredentials:
    return await context.hosts().enrol(await context.body(Enrolment, _ENROLMENT_BYTES))


async def _receive_heartbeat(
    context: FleetRequestContext, registry: HostRegistry, host: str
) -> HeartbeatResponse:
    heartbeat, refused = await context.body(decode_heartbeat)
    # Checked again: it may have been removed during the upload of its body.
    _check_host(context, registry, host)
    return await registry.heartbeat(host, heartbeat, refused)


async def _receive_report(
    context: FleetRequestContext, registry: HostRegistry, host: str
) -> ReportResponse:
    return await registry.report(
        host, context.request.path_params["id"], await context.body(HostReport)
    )


async def _receive_file(
    context: FleetRequestContext, registry: HostRegistry, host: str
) -> Response:
    path = context.request.path_params
    try:
        await registry.take_file(host, path["id"], path["name"], context.request.stream())
    except ClientDisconnect as error:  # the host sends it again
        raise make_truncated_error() from error
    return Response(status_code=204)


class EnrolmentBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """A token by which a host may join, once: the host of this name, or any.

    `days`: how long it may be used.
    """

    host: Annotated[str, Meta(max_length=253, pattern=OPTIONAL_HOST)] = ""
    days: Annotated[float, Meta(gt=0, le=365)] = 1.0


class EnrolmentResponse(HttpResponseBody, frozen=True):
    """A new token of enrolment; nobody can be told `token` again."""

    host: str
    token: str


async def _add_enrolment(context: FleetRequestContext) -> EnrolmentResponse:
    body = await context.body(EnrolmentBody)
    token = await asyncio.to_thread(context.service.state.add_enrolment, body.host, body.days)
    await context.note(host=body.host)
    return EnrolmentResponse(host=body.host, token=token)


HOST_ROUTES = (
    FleetRoute(
        path=AGENTS_PATH.rstrip("/"),
        summary="Make a token by which a host joins the fleet, once",
        answers=_add_enrolment,
        answer=EnrolmentResponse,
        method="POST",
        body=EnrolmentBody,
        role="operator",
        refuses=(400, 403),
    ),
    FleetRoute(
        path=f"{AGENTS_PATH}enrol",
        summary="Let a host belong to the fleet, by a token that works once",
        answers=_enrol,
        answer=HostCredentials,
        method="POST",
        body=Enrolment,
        role=None,
        refuses=(400, 409, 413, 503),
    ),
    FleetRoute(
        path=f"{AGENTS_PATH}{{host}}/heartbeat",
        summary="Take how a host is, and what its devices did",
        answers=_require_own_host(_receive_heartbeat),
        answer=HeartbeatResponse,
        method="POST",
        body=Heartbeat,
        role=None,
        refuses=(400, 503),
    ),
    FleetRoute(
        path=f"{AGENTS_PATH}{{host}}/work",
        summary="What a host is to do; waits for something new",
        answers=_require_own_host(
            lambda asked, registry, host: registry.work(
                host, *msgspec.structs.astuple(asked.parameters(WorkParameters))
            )
        ),
        answer=WorkResponse,
        parameters=WorkParameters,
        role=None,
        refuses=(400, 503),
    ),
    FleetRoute(
        path=f"{AGENTS_PATH}{{host}}/requests/{{id}}",
        summary="How far a host is with a request",
        answers=_require_own_host(_receive_report),
        answer=ReportResponse,
        method="POST",
        body=HostReport,
        role=None,
        refuses=(400, 404, 503),
    ),
    FleetRoute(
        path=f"{AGENTS_PATH}{{host}}/requests/{{id}}/files/{{name}}",
        summary="Send a file that the host has said",
        answers=_require_own_host(_receive_file),
        method="PUT",
        role=None,
        refuses=(400, 404, 503),
    ),
)

Message: TypeAlias = Annotated[str, Meta(max_length=256, pattern=ONE_LINE)]


class JobStatementBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """What a job is; "": it does not say it."""

    model: Message = ""
    framework: Message = ""
    product: Message = ""
    division: Message = ""
    application: Message = ""


class JobStatementResponse(HttpResponseBody, frozen=True):
    """Of which job it was taken, and whether it differs from what the job said before."""

    job: str
    changed: bool


async def _store_job_statement(context: FleetRequestContext) -> JobStatementResponse:
    job, body = context.request.path_params["job"], await context.body(JobStatementBody)
    users = context.hosts().users_of(job)
    if not users:
        raise HttpError(
            404,
            f"no host of late has processes of `{job[:256]}`",
            slug="no-such-job",
            hint="`traceloom fleet jobs`",
        )
    await check_own_job(context, job)
    stated_facts = {name: value for name, value in msgspec.structs.asdict(body).items() if value}
    facts = JobFacts(**stated_facts, user=min(users))
    changed = bool(
        await asyncio.to_thread(context.service.state.say_of_jobs, {job: facts}, time.time_ns())
    )
    if changed:
        context.service.pipeline.wake()
        await context.note(job=job)
    return JobStatementResponse(job=job, changed=changed)


STATEMENT_ROUTES = (
    FleetRoute(
        path="/api/v1/jobs/{job:path}",
        summary="Take what a job says of itself",
        answers=_store_job_statement,
        answer=JobStatementResponse,
        method="PUT",
        body=JobStatementBody,
        role="requester",
        refuses=(400, 403, 404, 503),
    ),
)
