"""The routes for agents: enrolling, heartbeats, work, reports, files. A host's credential says who asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from traceloom.agent.http.answers import HttpAnswer
from traceloom.agent.http.reading import cut_off
from traceloom.agent.uplink.messages import (
    Enrolled,
    Enrolment,
    Heartbeat,
    HeartbeatAnswer,
    HostReport,
    ReportAnswer,
    WorkAnswer,
)
from traceloom.allowed_texts import HOST_OR_NONE
from traceloom.collect.hosts import LONGEST_WAIT_S, HostDesk
from traceloom.collect.routes import FleetAsked, FleetRoute

AGENTS = "/api/v1/agents/"


class WorkParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the host knows already, and for how many seconds it waits for something else."""

    version: str = ""
    wait: float = LONGEST_WAIT_S


def _of_host(
    answer: Callable[[FleetAsked, HostDesk, str], Awaitable[msgspec.Struct | Response]],
) -> Callable[[FleetAsked], Awaitable[msgspec.Struct | Response]]:
    """Answer only the host that the path names."""

    async def respond(asked: FleetAsked) -> msgspec.Struct | Response:
        desk, host = asked.hosts(), asked.request.path_params["host"]
        _check_host(asked, desk, host)
        return await answer(asked, desk, host)

    return respond


def _check_host(asked: FleetAsked, desk: HostDesk, host: str) -> None:
    scheme, _, credential = asked.request.headers.get("authorization", "").partition(" ")
    desk.check_host(host, credential.strip() if scheme.lower() == "bearer" else "")


async def _enrol(asked: FleetAsked) -> Enrolled:
    return await asked.hosts().enrol(await asked.body(Enrolment))


async def _heartbeat(asked: FleetAsked, desk: HostDesk, host: str) -> HeartbeatAnswer:
    heartbeat = await asked.body(Heartbeat)
    _check_host(asked, desk, host)  # again: it may have been removed while its body was on its way
    return await desk.heartbeat(host, heartbeat)


async def _report(asked: FleetAsked, desk: HostDesk, host: str) -> ReportAnswer:
    return await desk.report(host, asked.request.path_params["id"], await asked.body(HostReport))


async def _take_file(asked: FleetAsked, desk: HostDesk, host: str) -> Response:
    path = asked.request.path_params
    try:
        await desk.take_file(host, path["id"], path["name"], asked.request.stream())
    except ClientDisconnect as error:  # the host sends it again
        raise cut_off() from error
    return Response(status_code=204)


class EnrolmentBody(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """A token by which a host may join, once: the host of this name, or any. `days`: how long it may be used."""

    host: Annotated[str, Meta(max_length=253, pattern=HOST_OR_NONE)] = ""
    days: Annotated[float, Meta(gt=0, le=365)] = 1.0


class EnrolmentAnswer(HttpAnswer, frozen=True):
    """A new token of enrolment; nobody can be told `token` again."""

    host: str
    token: str


async def _add_enrolment(asked: FleetAsked) -> EnrolmentAnswer:
    body = await asked.body(EnrolmentBody)
    token = await asyncio.to_thread(asked.service.state.add_enrolment, body.host, body.days)
    await asked.note(host=body.host)
    return EnrolmentAnswer(host=body.host, token=token)


HOST_ROUTES = (
    FleetRoute(
        path=AGENTS.rstrip("/"), summary="Make a token by which a host joins the fleet, once", answers=_add_enrolment,
        answer=EnrolmentAnswer, method="POST", body=EnrolmentBody, role="operator", refuses=(400, 403),
    ),
    FleetRoute(
        path=f"{AGENTS}enrol", summary="Let a host belong to the fleet, by a token that works once", answers=_enrol,
        answer=Enrolled, method="POST", body=Enrolment, role=None, refuses=(400, 409, 503),
    ),
    FleetRoute(
        path=f"{AGENTS}{{host}}/heartbeat", summary="Take how a host is, and what its devices did",
        answers=_of_host(_heartbeat), answer=HeartbeatAnswer, method="POST", body=Heartbeat, role=None,
        refuses=(400, 503),
    ),
    FleetRoute(
        path=f"{AGENTS}{{host}}/work", summary="What a host is to do; waits for something new",
        answers=_of_host(
            lambda asked, desk, host: desk.work(host, *msgspec.structs.astuple(asked.parameters(WorkParameters)))
        ),
        answer=WorkAnswer, parameters=WorkParameters, role=None, refuses=(400, 503),
    ),
    FleetRoute(
        path=f"{AGENTS}{{host}}/requests/{{id}}", summary="How far a host is with a request",
        answers=_of_host(_report), answer=ReportAnswer, method="POST", body=HostReport, role=None,
        refuses=(400, 404, 503),
    ),
    FleetRoute(
        path=f"{AGENTS}{{host}}/requests/{{id}}/files/{{name}}", summary="Send a file that the host has said",
        answers=_of_host(_take_file), method="PUT", role=None, refuses=(400, 404, 503),
    ),
)  # fmt: skip
