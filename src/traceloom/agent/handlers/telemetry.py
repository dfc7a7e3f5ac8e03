"""The routes with JSON: a table of what there is, and what answers it, from memory."""

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

from traceloom.agent import api as forms
from traceloom.agent import history
from traceloom.agent.api import Answers, ValueAnswer
from traceloom.agent.handlers.traces import hangs_answer, triggers_answer
from traceloom.agent.metrics import METRICS, PREFIX
from traceloom.agent.ownership.model import Process
from traceloom.agent.snapshot import View
from traceloom.agent.traces.requests import TraceRequest, Wanted
from traceloom.errors import nearest
from traceloom.server.access import Peer
from traceloom.server.problem import HttpAnswer, RequestError, wrong_request
from traceloom.server.routing import body_as, moment, parameters_as
from traceloom.system import units

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request


Body = TypeVar("Body", bound=msgspec.Struct)
_MOST_POINTS = 500_000  # of an answer: about 10 MB of JSON


class Asked:
    """A request: who asks, what they may see, and the agent that knows."""

    def __init__(self, agent: Answers, request: Request) -> None:
        self.agent, self.request = agent, request
        self.peer: Peer = request.state.peer
        self.view = View(agent.board, self.peer)

    async def body(self, kind: type[Body]) -> Body:
        """The body of the request.

        Raises:
            RequestError: `too-large`, `wrong-request`; `too-slow`: the client went before it was whole.
        """
        return await body_as(self.request, kind, self.agent.config.access.request_bytes)

    def parameters(self, kind: type[Body]) -> Body:
        """What stands behind the question mark.

        Raises:
            RequestError: `wrong-request`.
        """
        return parameters_as(self.request, kind)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A route: what it is for, what it takes, what it gives. Those with `acts` need a peer that may act.

    `answer` is None where it is no JSON.
    """

    path: str
    summary: str
    answers: Callable[[Asked], Awaitable[HttpAnswer | Response] | HttpAnswer | Response]
    answer: type[HttpAnswer] | None = None
    content: str = "application/json"  # of an answer that is no structure
    method: str = "GET"
    body: type[msgspec.Struct] | None = None
    parameters: type[HttpAnswer] | None = None
    refuses: tuple[int, ...] = ()
    acts: bool = False


async def _healthz(asked: Asked) -> forms.Health:
    states = asked.agent.board.collectors.values()
    now_ns, young_ns = time.time_ns(), 60 * 10**9
    alive = [state for state in states if now_ns - state.ran_ns < 3 * state.period_s * 10**9 + young_ns]
    if alive or now_ns - asked.agent.board.started_ns < young_ns:
        return forms.Health(healthy=True)
    raise RequestError(503, "no collector ran of late", slug="not-healthy", hint="`traceloom agent status` says why")


async def _doctor(asked: Asked) -> forms.DoctorAnswer:
    checks = await asked.agent.doctor()
    if asked.peer.sees != "all":  # they name processes, whosever
        checks = [check for check in checks if check.area != "jobs"]
    return forms.DoctorAnswer(checks=checks)


def _values_by(view: View, label: str) -> dict[str, list[ValueAnswer]]:
    """The series that a peer may see by the value of one of their labels; those that only describe are left out."""
    out: dict[str, list[ValueAnswer]] = defaultdict(list)
    for (name, values), value, at_ns in view.values():
        metric = METRICS[name]
        if metric.kind != "info" and label in metric.labels:
            labels = {key: text for key, text in zip(metric.labels, values, strict=True) if text}
            out[labels.get(label, "")].append(
                ValueAnswer(metric=metric.full_name, labels=labels, value=value, at_ns=at_ns)
            )
    return out


async def _devices(asked: Asked) -> forms.DevicesAnswer:
    view, values = asked.view, _values_by(asked.view, "device")
    return forms.DevicesAnswer(
        devices=[
            forms.DeviceAnswer(
                **msgspec.structs.asdict(device) | ({} if asked.peer.sees == "all" else {"owner": {}}),
                values=values[uuid],
                processes=[key for key, process in view.processes.items() if uuid in process.devices],
                jobs=sorted({p.owner.job for p in view.processes.values() if uuid in p.devices and p.owner.job}),
            )
            for uuid, device in view.devices.items()
        ]
    )


async def _processes(asked: Asked) -> forms.ProcessesAnswer:
    view, values = asked.view, _values_by(asked.view, "process")
    rows = [
        forms.ProcessAnswer(
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
            hung_since_ns=asked.agent.hangs.hung_since_ns(key),
            unreadable=p.unreadable,
            owner=forms.OwnerAnswer(**msgspec.structs.asdict(p.owner)),
            values=values[key],
        )
        for key, p in view.processes.items()
    ]
    return forms.ProcessesAnswer(processes=rows, hidden=len(asked.agent.board.processes) - len(rows))


async def _jobs(asked: Asked) -> forms.JobsAnswer:
    view, values = asked.view, _values_by(asked.view, "job")
    members: dict[str, list[Process]] = defaultdict(list)
    for process in view.processes.values():
        if process.owner.job:
            members[process.owner.job].append(process)
    rows = []
    for job, processes in sorted(members.items()):
        owners = [process.owner for process in processes]
        rates = [process.steps_per_second for process in processes if process.steps_per_second is not None]
        named = {
            field: next(filter(None, (getattr(owner, field) for owner in owners)), "")
            for field in ("name", "scheduler", "user", "account", "partition", "namespace", "framework")
        }
        rows.append(
            forms.JobAnswer(
                job=job,
                **named,
                values=values[job],
                processes=[process.key for process in processes],
                world_size=max((owner.world_size for owner in owners if owner.world_size is not None), default=None),
                ranks=sorted({owner.rank for owner in owners if owner.rank is not None}),
                devices=sorted({device for process in processes for device in process.devices}),
                steps_per_second=min(rates, default=None),
            )
        )
    everybody = {p.owner.job for p in asked.agent.board.processes.values() if p.owner.job}
    return forms.JobsAnswer(jobs=rows, hidden=len(everybody) - len(rows))


async def _query(asked: Asked) -> forms.QueryAnswer:
    wanted = asked.parameters(forms.QueryParameters)
    name = wanted.metric.removeprefix(PREFIX)
    metric = METRICS.get(name)
    if metric is None:
        raise RequestError(
            404,
            f"there is no metric `{wanted.metric}`",
            slug="no-such-metric",
            hint=nearest(name, METRICS) + "docs/reference/agent-metrics.md lists them",
        )
    now_ns = time.time_ns()
    pairs = [pair.partition("=") for pair in wanted.where.split(",") if pair]
    if wrong := [label for label, equals, _ in pairs if not equals]:
        raise wrong_request(f"`where` has `{wrong[0]}`, which is no label=value")
    question = forms.HistoryQuestion(
        metric=name,
        since_ns=moment(wanted.since, now_ns),
        until_ns=moment(wanted.until, now_ns) if wanted.until else now_ns,
        by=tuple(filter(None, wanted.by.split(","))),
        where={label: value for label, _, value in pairs},
        seen_as=asked.view.seen_as,
        raw=wanted.raw,
    )
    if question.since_ns > question.until_ns:
        raise wrong_request("`until` is before `since`")
    series = list(await asked.agent.query(question))
    points = sum(len(one_series.values) for one_series in series)
    if points > _MOST_POINTS:
        raise RequestError(
            400,
            f"the answer would have {points:,} values",
            slug="too-many-values",
            hint="take a shorter time, `by` or `where`",
        )
    return forms.QueryAnswer(
        metric=metric.full_name,
        kind=metric.kind,
        unit=history.unit(name, raw=wanted.raw),
        since_ns=question.since_ns,
        until_ns=question.until_ns,
        series=series,
    )


async def _events(asked: Asked) -> forms.EventsAnswer:
    try:
        wanted = msgspec.convert(dict(asked.request.query_params), forms.EventParameters)
    except msgspec.ValidationError as error:
        raise wrong_request(str(error)) from error
    since_ns = moment(wanted.since, time.time_ns())
    events = [
        forms.EventAnswer(at_ns=event.at_ns, kind=event.kind, text=event.text, device=event.device, code=event.code)
        for event in asked.view.board.events
    ]
    for kill in asked.view.oom_kills:
        limit = "" if kill.limit_bytes is None else f", which may have {units.size(kill.limit_bytes)}"
        events.append(
            forms.EventAnswer(
                at_ns=kill.at_ns, kind="oom-kill", cgroup=kill.cgroup, job=kill.job, count=kill.kills,
                text=f"{units.count_of(kill.kills, 'process')} killed for want of memory in {kill.cgroup}{limit}",
            )
        )  # fmt: skip
    return forms.EventsAnswer(
        events=sorted((event for event in events if event.at_ns >= since_ns), key=attrgetter("at_ns"))
    )


@cache
def boot_id() -> str:
    """What the kernel calls this start of the host; "" where it does not say."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


async def _pause(asked: Asked) -> forms.PauseAnswer:
    body = await asked.body(forms.PauseBody)
    until_ns = time.time_ns() + int(body.seconds * 1e9)
    return forms.PauseAnswer(paused=await asked.agent.pause(body.seconds), until_ns=until_ns)


async def _steps(asked: Asked) -> forms.StepsAnswer:
    if asked.peer.pid is None or asked.peer.uid is None:
        raise RequestError(
            403,
            "steps are taken over the unix socket alone",
            slug="not-allowed",
            hint="there the kernel says which process tells them",
        )
    body = await asked.body(forms.StepsBody)
    asked.agent.steps(asked.peer.pid, asked.peer.uid, body)
    return forms.StepsAnswer(steps=len(body.steps))


async def _trace(asked: Asked) -> forms.TraceAnswer:
    if asked.peer.uid is None:
        raise RequestError(
            403, "traces are taken over the unix socket alone", slug="not-allowed",
            hint="there the kernel says who asks, and so whose files are read",
        )  # fmt: skip
    body = await asked.body(forms.TraceBody)
    if body.job not in asked.view.jobs:
        raise RequestError(
            404, f"there is no job `{body.job}` of yours on this host", slug="no-such-job",
            hint=nearest(body.job, asked.view.jobs) + "`traceloom agent ps` lists them",
        )  # fmt: skip
    if not Path(body.path).is_absolute():
        raise wrong_request("`path` is not absolute")
    facts = await asked.agent.learn(body.job, body.path, asked.peer.uid)
    return forms.TraceAnswer(job=body.job, **msgspec.structs.asdict(facts))


def _may_trace(asked: Asked) -> Callable[[int], bool]:
    """Whether the one who asks may trace processes of a user: the own ones; who may act, all.

    Raises:
        RequestError: `not-allowed`: nobody knows who it is, or it may only read.
    """
    peer = asked.peer
    if peer.uid is None and not peer.acts:
        raise RequestError(
            403, "traces are for users of this host, over the unix socket, and for tokens that may do all",
            slug="not-allowed", hint="over the unix socket the kernel says who asks",
        )  # fmt: skip
    return lambda uid: peer.acts or peer.uid == uid


def _own_request(asked: Asked) -> TraceRequest:
    """The request that the path names.

    Raises:
        RequestError: `no-such-request`: there is none, or it is about another user's processes.
    """
    may_trace = _may_trace(asked)
    request = asked.agent.desk.requests.get(asked.request.path_params["id"])
    if request is None or not may_trace(request.uid):
        raise RequestError(404, "there is no such request of yours", slug="no-such-request")
    return request


async def _requests(asked: Asked) -> forms.RequestsAnswer:
    may_trace = _may_trace(asked)
    own = [request for request in asked.agent.desk.requests.values() if may_trace(request.uid)]
    return forms.RequestsAnswer(requests=[forms.RequestAnswer(**msgspec.structs.asdict(request)) for request in own])


async def _request_trace(asked: Asked) -> forms.RequestAnswer:
    may_trace = _may_trace(asked)
    wanted = await asked.body(Wanted)
    asks = msgspec.to_builtins(wanted)
    try:
        request = await asked.agent.desk.submit(wanted, asked.peer.name, may_trace)
    except RequestError as refusal:
        asked.agent.acts(
            asked.peer.name, asked.peer.pid, "/api/v1/requests", allowed=False, why=refusal.slug, wanted=asks
        )
        raise
    pids = sorted({target.pid for target in request.targets})
    asked.agent.acts(
        asked.peer.name, asked.peer.pid, "/api/v1/requests", allowed=True, request=request.id, of=request.uid,
        pids=pids, wanted=asks,
    )  # fmt: skip
    return forms.RequestAnswer(**msgspec.structs.asdict(request))


async def _cancel(asked: Asked) -> forms.RequestAnswer:
    request = _own_request(asked)
    asked.agent.desk.cancel(request)
    asked.agent.acts(
        asked.peer.name, asked.peer.pid, "/api/v1/requests/{id}", allowed=True, request=request.id, cancels=True
    )
    return forms.RequestAnswer(**msgspec.structs.asdict(request))


async def _request_events(asked: Asked) -> Response:
    request = _own_request(asked)

    async def events() -> AsyncIterator[bytes]:
        async for changed in asked.agent.desk.changes(request):
            yield b"event: request\ndata: " + msgspec.json.encode(changed) + b"\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _environment(asked: Asked) -> forms.EnvironmentAnswer:
    if asked.peer.uid is None:
        raise RequestError(403, "this is told over the unix socket alone", slug="not-allowed")
    return forms.EnvironmentAnswer(variables=asked.agent.environment(asked.peer.uid))


async def _stacks(asked: Asked) -> forms.StacksAnswer:
    wanted = asked.parameters(forms.StacksParameters)
    if bool(wanted.job) == bool(wanted.pid):
        raise wrong_request("it takes either `job` or `pid`")
    view = asked.view
    processes = [
        process
        for process in view.processes.values()
        if (process.owner.job == wanted.job if wanted.job else process.pid == wanted.pid)
    ]
    if not processes:
        what = f"job `{wanted.job}`" if wanted.job else f"process {wanted.pid} that matters"
        raise RequestError(
            404, f"there is no {what} of yours on this host", slug="no-such-job" if wanted.job else "no-such-process",
            hint=nearest(wanted.job, view.jobs) + "`traceloom agent ps` lists them",
        )  # fmt: skip
    # A token that only reads sees no command lines of others: where their programs are, it sees even less.
    allowed = asked.peer.acts or all(process.uid == asked.peer.uid for process in processes)
    asked.agent.acts(asked.peer.name, asked.peer.pid, "/api/v1/stacks", allowed=allowed)
    if not allowed:
        raise RequestError(403, "stacks are for whose the processes are, and for root", slug="not-allowed")
    stacks = await asked.agent.stacks(processes, native=wanted.native)
    return forms.StacksAnswer(
        at_ns=time.time_ns(), sentence=stacks.sentence, groups=stacks.groups, unseen=stacks.unseen
    )


ROUTES = (
    Route(path="/healthz", summary="Whether the agent lives", answers=_healthz, answer=forms.Health, refuses=(503,)),
    Route(
        path="/api/v1/status",
        summary="The agent and how it fares",
        answers=lambda asked: msgspec.structs.replace(asked.agent.status(), you=asked.peer.sees),
        answer=forms.StatusAnswer,
    ),
    Route(
        path="/api/v1/doctor",
        summary="What works on this host, what not, and what would help",
        answers=_doctor,
        answer=forms.DoctorAnswer,
    ),
    Route(
        path="/api/v1/devices",
        summary="Devices, what is measured of them now, and who is on them",
        answers=_devices,
        answer=forms.DevicesAnswer,
    ),
    Route(
        path="/api/v1/processes",
        summary="Processes that matter, and whose they are",
        answers=_processes,
        answer=forms.ProcessesAnswer,
    ),
    Route(path="/api/v1/jobs", summary="Jobs, as far as they are on this host", answers=_jobs, answer=forms.JobsAnswer),
    Route(
        path="/api/v1/query",
        summary="What a metric was",
        answers=_query,
        answer=forms.QueryAnswer,
        parameters=forms.QueryParameters,
        refuses=(400, 404),
    ),
    Route(
        path="/api/v1/events",
        summary="What happened: errors of devices, processes killed for want of memory",
        answers=_events,
        answer=forms.EventsAnswer,
        parameters=forms.EventParameters,
        refuses=(400,),
    ),
    Route(
        path="/api/v1/stacks",
        summary="What all threads of a process or a job do now, equal stacks together",
        answers=_stacks,
        answer=forms.StacksAnswer,
        parameters=forms.StacksParameters,
        refuses=(400, 403, 404, 429),
    ),
    Route(
        path="/api/v1/hangs",
        summary="Jobs that hang or hung, and the rank that the others wait for",
        answers=lambda asked: hangs_answer(
            asked.agent.hangs, asked.parameters(forms.HangParameters).job, asked.peer, asked.view.jobs
        ),
        answer=forms.HangsAnswer,
        parameters=forms.HangParameters,
        refuses=(400,),
    ),
    Route(
        path="/api/v1/clock",
        summary="The clocks of this host",
        answers=lambda _: forms.ClockAnswer(
            wall_ns=time.time_ns(), monotonic_ns=time.monotonic_ns(), boot_id=boot_id()
        ),
        answer=forms.ClockAnswer,
    ),
    Route(
        path="/api/v1/counters/pause",
        summary="Let go of hardware counters for another profiler",
        answers=_pause,
        answer=forms.PauseAnswer,
        method="POST",
        body=forms.PauseBody,
        refuses=(400, 403, 413),
        acts=True,
    ),
    Route(
        path="/api/v1/steps",
        summary="Tell the steps that this process finished",
        answers=_steps,
        answer=forms.StepsAnswer,
        method="POST",
        body=forms.StepsBody,
        refuses=(400, 403, 413),
    ),
    Route(
        path="/api/v1/traces",
        summary="Judge a job by a trace of it: FLOPs per step, element types, roofline, bytes copied",
        answers=_trace,
        answer=forms.TraceAnswer,
        method="POST",
        body=forms.TraceBody,
        refuses=(400, 403, 404, 413, 429),
    ),
    Route(
        path="/api/v1/environment",
        summary="The variables that prepare a job for traces on demand",
        answers=_environment,
        answer=forms.EnvironmentAnswer,
        refuses=(403, 503),
    ),
    Route(
        path="/api/v1/triggers",
        summary="Rules by which traces are taken that nobody asked for, and what they may still cost",
        answers=lambda asked: triggers_answer(asked.agent.triggers, asked.agent.config.trigger_budget, asked.peer),
        answer=forms.TriggersAnswer,
    ),
    Route(
        path="/api/v1/requests",
        summary="Requests for traces of your processes",
        answers=_requests,
        answer=forms.RequestsAnswer,
        refuses=(403,),
    ),
    Route(
        path="/api/v1/requests",
        summary="Ask for a trace",
        answers=_request_trace,
        answer=forms.RequestAnswer,
        method="POST",
        body=Wanted,
        refuses=(400, 403, 404, 413, 503),
    ),
    Route(
        path="/api/v1/requests/{id}",
        summary="How far a request is",
        answers=lambda asked: forms.RequestAnswer(**msgspec.structs.asdict(_own_request(asked))),
        answer=forms.RequestAnswer,
        refuses=(403, 404),
    ),
    Route(
        path="/api/v1/requests/{id}",
        summary="Cancel a request",
        answers=_cancel,
        answer=forms.RequestAnswer,
        method="DELETE",
        refuses=(403, 404),
    ),
    Route(
        path="/api/v1/requests/{id}/events",
        summary="A request at each change until it has ended, as server-sent events",
        answers=_request_events,
        content="text/event-stream",
        refuses=(403, 404),
    ),
    Route(
        path="/api/v1/requests/{id}/files/{name}",
        summary="A file of a request",
        answers=lambda asked: FileResponse(
            asked.agent.desk.file(_own_request(asked), asked.request.path_params["name"]),
            media_type="application/octet-stream",
        ),
        content="application/octet-stream",
        refuses=(403, 404),
    ),
)
