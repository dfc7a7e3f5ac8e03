"""The table of JSON routes, and the handlers of telemetry, from memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.responses import FileResponse, Response, StreamingResponse

from traceloom.agent import api as forms, history
from traceloom.agent.api import ValueResponse
from traceloom.agent.handlers.traces import build_hangs_answer, build_triggers_answer
from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.agent.ownership.model import Process
from traceloom.agent.snapshot import VisibleSnapshot
from traceloom.agent.traces.requests import TraceRequest, TraceSpec
from traceloom.errors import nearest
from traceloom.server.access import Caller
from traceloom.server.problem import HttpError, HttpResponseBody, make_bad_request
from traceloom.server.routing import DescribedRoute, decode_body, decode_query, parse_time
from traceloom.system import units

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from traceloom.agent.daemon import Agent


RequestForm = TypeVar("RequestForm", bound=msgspec.Struct)
_MAX_QUERY_POINTS = 500_000  # per response: about 10 MB of JSON


class AgentRequest:
    """A request with its caller, the snapshot visible to the caller, and the agent."""

    def __init__(self, agent: Agent, request: Request) -> None:
        self.agent, self.request = agent, request
        self.peer: Caller = request.state.peer
        self.view: VisibleSnapshot = VisibleSnapshot(agent.host_snapshot, self.peer)

    async def body(self, form_type: type[RequestForm]) -> RequestForm:
        """Returns the decoded body.

        Raises:
            HttpError: `too-large`, `wrong-request`; `too-slow`: the client disconnected before it
                was complete.
        """
        return await decode_body(self.request, form_type, self.agent.config.access.request_bytes)

    def parameters(self, form_type: type[RequestForm]) -> RequestForm:
        """Returns the decoded query string.

        Raises:
            HttpError: `wrong-request`.
        """
        return decode_query(self.request, form_type)


class Route(DescribedRoute, frozen=True, kw_only=True):
    """A route with its handler. Those with `acts` need a caller with that permission."""

    answers: Callable[
        [AgentRequest], Awaitable[HttpResponseBody | Response] | HttpResponseBody | Response
    ]
    acts: bool = False


async def _get_health(agent_request: AgentRequest) -> forms.Health:
    states = agent_request.agent.host_snapshot.collectors.values()
    now_ns, grace_period_ns = time.time_ns(), 60 * 10**9
    alive = [
        state
        for state in states
        if now_ns - state.ran_ns < 3 * state.period_s * 10**9 + grace_period_ns
    ]
    if alive or now_ns - agent_request.agent.host_snapshot.started_ns < grace_period_ns:
        return forms.Health(healthy=True)
    raise HttpError(
        503,
        "no collector ran of late",
        slug="not-healthy",
        hint="`traceloom agent status` says why",
    )


async def _get_doctor_report(agent_request: AgentRequest) -> forms.DoctorResponse:
    checks = await agent_request.agent.doctor()
    if agent_request.peer.sees != "all":  # they may name processes of any user
        checks = [check for check in checks if check.area != "jobs"]
    return forms.DoctorResponse(checks=checks)


def _group_values_by_label(view: VisibleSnapshot, label: str) -> dict[str, list[ValueResponse]]:
    """Returns the visible series by the value of one of their labels, without those that are only
    descriptive.
    """
    values_by_label: dict[str, list[ValueResponse]] = defaultdict(list)
    for (name, values), value, at_ns in view.values():
        metric = METRICS[name]
        if metric.kind != "info" and label in metric.labels:
            labels = {key: text for key, text in zip(metric.labels, values, strict=True) if text}
            values_by_label[labels.get(label, "")].append(
                ValueResponse(metric=metric.full_name, labels=labels, value=value, at_ns=at_ns)
            )
    return values_by_label


async def _list_devices(agent_request: AgentRequest) -> forms.DevicesResponse:
    view, values = agent_request.view, _group_values_by_label(agent_request.view, "device")
    return forms.DevicesResponse(
        devices=[
            forms.DeviceResponse(
                **msgspec.structs.asdict(device)
                | ({} if agent_request.peer.sees == "all" else {"owner": {}}),
                values=values[uuid],
                processes=[
                    key for key, process in view.processes.items() if uuid in process.devices
                ],
                jobs=sorted(
                    {
                        p.owner.job
                        for p in view.processes.values()
                        if uuid in p.devices and p.owner.job
                    }
                ),
            )
            for uuid, device in view.devices.items()
        ]
    )


async def _list_processes(agent_request: AgentRequest) -> forms.ProcessesResponse:
    view, values = agent_request.view, _group_values_by_label(agent_request.view, "process")
    rows = [
        forms.ProcessResponse(
            key=key,
            pid=p.pid,
            parent_pid=p.parent_pid,
            uid=p.uid,
            started_ns=p.started_ns,
            state=p.state,
            command=p.command,
            cgroup=p.cgroup,
            devices=p.devices,
            steps_per_second=p.steps_per_second,
            hung_since_ns=agent_request.agent.hangs.hung_since_ns(key),
            unreadable=p.unreadable,
            owner=forms.OwnerResponse(**msgspec.structs.asdict(p.owner)),
            values=values[key],
        )
        for key, p in view.processes.items()
    ]
    return forms.ProcessesResponse(
        processes=rows, hidden=len(agent_request.agent.host_snapshot.processes) - len(rows)
    )


async def _list_jobs(agent_request: AgentRequest) -> forms.JobsResponse:
    view, values = agent_request.view, _group_values_by_label(agent_request.view, "job")
    processes_by_job: dict[str, list[Process]] = defaultdict(list)
    for process in view.processes.values():
        if process.owner.job:
            processes_by_job[process.owner.job].append(process)
    rows = []
    for job, processes in sorted(processes_by_job.items()):
        owners = [process.owner for process in processes]
        rates = [
            process.steps_per_second
            for process in processes
            if process.steps_per_second is not None
        ]
        job_fields = {
            field: next(filter(None, (getattr(owner, field) for owner in owners)), "")
            for field in (
                "name",
                "scheduler",
                "user",
                "account",
                "partition",
                "namespace",
                "framework",
            )
        }
        rows.append(
            forms.JobResponse(
                job=job,
                **job_fields,
                values=values[job],
                processes=[process.key for process in processes],
                world_size=max(
                    (owner.world_size for owner in owners if owner.world_size is not None),
                    default=None,
                ),
                ranks=sorted({owner.rank for owner in owners if owner.rank is not None}),
                devices=sorted({device for process in processes for device in process.devices}),
                steps_per_second=min(rates, default=None),
            )
        )
    all_jobs = {
        p.owner.job for p in agent_request.agent.host_snapshot.processes.values() if p.owner.job
    }
    return forms.JobsResponse(jobs=rows, hidden=len(all_jobs) - len(rows))


async def _query_metric_history(agent_request: AgentRequest) -> forms.QueryResponse:
    parameters = agent_request.parameters(forms.QueryParameters)
    name = parameters.metric.removeprefix(PREFIX)
    metric = METRICS.get(name)
    if metric is None:
        raise HttpError(
            404,
            f"there is no metric `{parameters.metric}`",
            slug="no-such-metric",
            hint=nearest(name, METRICS) + "docs/reference/agent-metrics.md lists them",
        )
    now_ns = time.time_ns()
    conditions = [pair.partition("=") for pair in parameters.where.split(",") if pair]
    if invalid := [label for label, equals, _ in conditions if not equals]:
        raise make_bad_request(f"`where` has `{invalid[0]}`, which is no label=value")
    since_ns = parse_time(parameters.since, now_ns)
    if agent_request.peer.sees != "all" and {"job", "cgroup"} & set(metric.labels):
        # Whose jobs and groups were of such names before the agent began is not known any more.
        since_ns = max(since_ns, agent_request.agent.host_snapshot.started_ns)
    query = forms.HistoryQuery(
        metric=name,
        since_ns=since_ns,
        until_ns=parse_time(parameters.until, now_ns) if parameters.until else now_ns,
        by=tuple(filter(None, parameters.by.split(","))),
        where={label: value for label, _, value in conditions},
        seen_as=agent_request.view.seen_as,
        raw=parameters.raw,
    )
    if query.since_ns > query.until_ns:
        raise make_bad_request("`until` is before `since`")
    series = list(await agent_request.agent.query(query))
    points = sum(len(one_series.values) for one_series in series)
    if points > _MAX_QUERY_POINTS:
        raise HttpError(
            400,
            f"the answer would have {points:,} values",
            slug="too-many-values",
            hint="take a shorter time, `by` or `where`",
        )
    return forms.QueryResponse(
        metric=metric.full_name,
        kind=metric.kind,
        unit=history.get_unit(name, raw=parameters.raw),
        since_ns=query.since_ns,
        until_ns=query.until_ns,
        series=series,
    )


async def _list_events(agent_request: AgentRequest) -> forms.EventsResponse:
    try:
        parameters = msgspec.convert(
            dict(agent_request.request.query_params), forms.EventParameters
        )
    except msgspec.ValidationError as error:
        raise make_bad_request(str(error)) from error
    since_ns = parse_time(parameters.since, time.time_ns())
    events = [
        forms.EventResponse(
            at_ns=event.at_ns,
            kind=event.kind,
            text=event.text,
            device=event.device,
            code=event.code,
        )
        for event in agent_request.view.host_snapshot.events
    ]
    for kill in agent_request.view.oom_kills:
        limit = (
            ""
            if kill.limit_bytes is None
            else f", which may have {units.format_size(kill.limit_bytes)}"
        )
        events.append(
            forms.EventResponse(
                at_ns=kill.at_ns,
                kind="oom-kill",
                cgroup=kill.cgroup,
                job=kill.job,
                count=kill.kills,
                text=f"{units.format_quantity(kill.kills, 'process')} killed for want of memory in {kill.cgroup}{limit}",
            )
        )
    return forms.EventsResponse(
        events=sorted(
            (event for event in events if event.at_ns >= since_ns), key=attrgetter("at_ns")
        )
    )


@cache
def read_boot_id() -> str:
    """Returns the kernel's id of the current boot; "" if unavailable."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


async def _pause_counters(agent_request: AgentRequest) -> forms.PauseResponse:
    body = await agent_request.body(forms.PauseBody)
    until_ns = time.time_ns() + int(body.seconds * 1e9)
    return forms.PauseResponse(
        paused=await agent_request.agent.pause(body.seconds), until_ns=until_ns
    )


async def _receive_steps(agent_request: AgentRequest) -> forms.StepsResponse:
    if agent_request.peer.pid is None or agent_request.peer.uid is None:
        raise HttpError(
            403,
            "steps are taken over the unix socket alone",
            slug="not-allowed",
            hint="there the kernel says which process tells them",
        )
    body = await agent_request.body(forms.StepsBody)
    agent_request.agent.steps(agent_request.peer.pid, agent_request.peer.uid, body)
    return forms.StepsResponse(steps=len(body.steps))


async def _analyze_job_trace(agent_request: AgentRequest) -> forms.TraceResponse:
    if agent_request.peer.uid is None:
        raise HttpError(
            403,
            "traces are taken over the unix socket alone",
            slug="not-allowed",
            hint="there the kernel says who asks, and so whose files are read",
        )
    form = await agent_request.body(forms.TraceBody)
    if form.job not in agent_request.view.jobs:
        raise HttpError(
            404,
            f"there is no job `{form.job}` of yours on this host",
            slug="no-such-job",
            hint=nearest(form.job, agent_request.view.jobs) + "`traceloom agent ps` lists them",
        )
    if not Path(form.path).is_absolute():
        raise make_bad_request("`path` is not absolute")
    facts = await agent_request.agent.learn(form.job, form.path, agent_request.peer.uid)
    return forms.TraceResponse(job=form.job, **msgspec.structs.asdict(facts))


def _build_trace_permission_check(agent_request: AgentRequest) -> Callable[[int], bool]:
    """Returns whether the caller may trace processes of a user: their own; with `acts` those of
    all.

    Raises:
        HttpError: `not-allowed`: the caller is unknown, or may only read.
    """
    peer = agent_request.peer
    if peer.uid is None and not peer.acts:
        raise HttpError(
            403,
            "traces are for users of this host, over the unix socket, and for tokens that may do all",
            slug="not-allowed",
            hint="over the unix socket the kernel says who asks",
        )
    return lambda uid: peer.acts or peer.uid == uid


def _find_own_request(agent_request: AgentRequest) -> TraceRequest:
    """Returns the request that the path names.

    Raises:
        HttpError: `no-such-request`: there is none, or it is about another user's processes.
    """
    may_trace = _build_trace_permission_check(agent_request)
    request = agent_request.agent.trace_service.requests.get(
        agent_request.request.path_params["id"]
    )
    if request is None or not may_trace(request.uid):
        raise HttpError(404, "there is no such request of yours", slug="no-such-request")
    return request


async def _list_requests(agent_request: AgentRequest) -> forms.RequestsResponse:
    may_trace = _build_trace_permission_check(agent_request)
    own_requests = [
        request
        for request in agent_request.agent.trace_service.requests.values()
        if may_trace(request.uid)
    ]
    return forms.RequestsResponse(
        requests=[
            forms.RequestResponse(**msgspec.structs.asdict(request)) for request in own_requests
        ]
    )


async def _submit_request(agent_request: AgentRequest) -> forms.RequestResponse:
    may_trace = _build_trace_permission_check(agent_request)
    spec = await agent_request.body(TraceSpec)
    spec_fields = msgspec.to_builtins(spec)
    try:
        request = await agent_request.agent.trace_service.submit(
            spec, agent_request.peer.name, may_trace
        )
    except HttpError as refusal:
        agent_request.agent.acts(
            agent_request.peer.name,
            agent_request.peer.pid,
            "/api/v1/requests",
            allowed=False,
            why=refusal.slug,
            spec=spec_fields,
        )
        raise
    agent_request.agent.acts(
        agent_request.peer.name,
        agent_request.peer.pid,
        "/api/v1/requests",
        allowed=True,
        request=request.id,
        of=request.uid,
        pids=sorted({target.pid for target in request.targets}),
        spec=spec_fields,
    )
    return forms.RequestResponse(**msgspec.structs.asdict(request))


async def _cancel_request(agent_request: AgentRequest) -> forms.RequestResponse:
    request = _find_own_request(agent_request)
    agent_request.agent.trace_service.cancel(request)
    agent_request.agent.acts(
        agent_request.peer.name,
        agent_request.peer.pid,
        "/api/v1/requests/{id}",
        allowed=True,
        request=request.id,
        cancels=True,
    )
    return forms.RequestResponse(**msgspec.structs.asdict(request))


async def _watch_request(agent_request: AgentRequest) -> Response:
    request = _find_own_request(agent_request)

    async def events() -> AsyncIterator[bytes]:
        async for updated_request in agent_request.agent.trace_service.changes(request):
            yield b"event: request\ndata: " + msgspec.json.encode(updated_request) + b"\n\n"

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def _get_environment(agent_request: AgentRequest) -> forms.EnvironmentResponse:
    if agent_request.peer.uid is None:
        raise HttpError(403, "this is told over the unix socket alone", slug="not-allowed")
    return forms.EnvironmentResponse(
        variables=agent_request.agent.environment(agent_request.peer.uid)
    )


async def _collect_stacks(agent_request: AgentRequest) -> forms.StacksResponse:
    parameters = agent_request.parameters(forms.StacksParameters)
    if bool(parameters.job) == bool(parameters.pid):
        raise make_bad_request("it takes either `job` or `pid`")
    view = agent_request.view
    processes = [
        process
        for process in view.processes.values()
        if (
            process.owner.job == parameters.job if parameters.job else process.pid == parameters.pid
        )
    ]
    if not processes:
        subject = (
            f"job `{parameters.job}`"
            if parameters.job
            else f"process {parameters.pid} that matters"
        )
        raise HttpError(
            404,
            f"there is no {subject} of yours on this host",
            slug="no-such-job" if parameters.job else "no-such-process",
            hint=nearest(parameters.job, view.jobs) + "`traceloom agent ps` lists them",
        )
    # A token that only reads does not see command lines of others, and stacks reveal more than
    # these.
    allowed = agent_request.peer.acts or all(
        process.uid == agent_request.peer.uid for process in processes
    )
    agent_request.agent.acts(
        agent_request.peer.name, agent_request.peer.pid, "/api/v1/stacks", allowed=allowed
    )
    if not allowed:
        raise HttpError(
            403, "stacks are for whose the processes are, and for root", slug="not-allowed"
        )
    stacks = await agent_request.agent.stacks(processes, native=parameters.native)
    return forms.StacksResponse(
        at_ns=time.time_ns(), sentence=stacks.sentence, groups=stacks.groups, unseen=stacks.unseen
    )


ROUTES = (
    Route(
        path="/healthz",
        summary="Whether the agent lives",
        answers=_get_health,
        answer=forms.Health,
        refuses=(503,),
    ),
    Route(
        path="/api/v1/status",
        summary="The agent and how it fares",
        answers=lambda asked: msgspec.structs.replace(asked.agent.status(), you=asked.peer.sees),
        answer=forms.StatusResponse,
    ),
    Route(
        path="/api/v1/doctor",
        summary="What works on this host, what not, and what would help",
        answers=_get_doctor_report,
        answer=forms.DoctorResponse,
    ),
    Route(
        path="/api/v1/devices",
        summary="Devices, what is measured of them now, and who is on them",
        answers=_list_devices,
        answer=forms.DevicesResponse,
    ),
    Route(
        path="/api/v1/processes",
        summary="Processes that matter, and whose they are",
        answers=_list_processes,
        answer=forms.ProcessesResponse,
    ),
    Route(
        path="/api/v1/jobs",
        summary="Jobs, as far as they are on this host",
        answers=_list_jobs,
        answer=forms.JobsResponse,
    ),
    Route(
        path="/api/v1/query",
        summary="What a metric was",
        answers=_query_metric_history,
        answer=forms.QueryResponse,
        parameters=forms.QueryParameters,
        refuses=(400, 404),
    ),
    Route(
        path="/api/v1/events",
        summary="What happened: errors of devices, processes killed for want of memory",
        answers=_list_events,
        answer=forms.EventsResponse,
        parameters=forms.EventParameters,
        refuses=(400,),
    ),
    Route(
        path="/api/v1/stacks",
        summary="What all threads of a process or a job do now, equal stacks together",
        answers=_collect_stacks,
        answer=forms.StacksResponse,
        parameters=forms.StacksParameters,
        refuses=(400, 403, 404, 429),
    ),
    Route(
        path="/api/v1/hangs",
        summary="Jobs that hang or hung, and the rank that the others wait for",
        answers=lambda asked: build_hangs_answer(
            asked.agent.hangs,
            asked.parameters(forms.HangParameters).job,
            asked.peer,
            asked.view.jobs,
        ),
        answer=forms.HangsResponse,
        parameters=forms.HangParameters,
        refuses=(400,),
    ),
    Route(
        path="/api/v1/clock",
        summary="The clocks of this host",
        answers=lambda _: forms.ClockResponse(
            wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns(), boot_id=read_boot_id()
        ),
        answer=forms.ClockResponse,
    ),
    Route(
        path="/api/v1/counters/pause",
        summary="Let go of hardware counters for another profiler",
        answers=_pause_counters,
        answer=forms.PauseResponse,
        method="POST",
        body=forms.PauseBody,
        refuses=(400, 403, 413),
        acts=True,
    ),
    Route(
        path="/api/v1/steps",
        summary="Tell the steps that this process finished",
        answers=_receive_steps,
        answer=forms.StepsResponse,
        method="POST",
        body=forms.StepsBody,
        refuses=(400, 403, 413),
    ),
    Route(
        path="/api/v1/traces",
        summary="Judge a job by a trace of it: FLOPs per step, element types, roofline, bytes copied",
        answers=_analyze_job_trace,
        answer=forms.TraceResponse,
        method="POST",
        body=forms.TraceBody,
        refuses=(400, 403, 404, 413, 429),
    ),
    Route(
        path="/api/v1/environment",
        summary="The variables that prepare a job for traces on demand",
        answers=_get_environment,
        answer=forms.EnvironmentResponse,
        refuses=(403, 503),
    ),
    Route(
        path="/api/v1/triggers",
        summary="Rules by which traces are taken that nobody asked for, and what they may still cost",
        answers=lambda asked: build_triggers_answer(
            asked.agent.triggers, asked.agent.config.trigger_budget, asked.peer
        ),
        answer=forms.TriggersResponse,
    ),
    Route(
        path="/api/v1/requests",
        summary="Requests for traces of your processes",
        answers=_list_requests,
        answer=forms.RequestsResponse,
        refuses=(403,),
    ),
    Route(
        path="/api/v1/requests",
        summary="Ask for a trace",
        answers=_submit_request,
        answer=forms.RequestResponse,
        method="POST",
        body=TraceSpec,
        refuses=(400, 403, 404, 413, 503),
    ),
    Route(
        path="/api/v1/requests/{id}",
        summary="How far a request is",
        answers=lambda asked: forms.RequestResponse(
            **msgspec.structs.asdict(_find_own_request(asked))
        ),
        answer=forms.RequestResponse,
        refuses=(403, 404),
    ),
    Route(
        path="/api/v1/requests/{id}",
        summary="Cancel a request",
        answers=_cancel_request,
        answer=forms.RequestResponse,
        method="DELETE",
        refuses=(403, 404),
    ),
    Route(
        path="/api/v1/requests/{id}/events",
        summary="A request at each change until it has ended, as server-sent events",
        answers=_watch_request,
        content="text/event-stream",
        refuses=(403, 404),
    ),
    Route(
        path="/api/v1/requests/{id}/files/{name}",
        summary="A file of a request",
        answers=lambda asked: FileResponse(
            asked.agent.trace_service.file(
                _find_own_request(asked), asked.request.path_params["name"]
            ),
            media_type="application/octet-stream",
        ),
        content="application/octet-stream",
        refuses=(403, 404),
    ),
)
