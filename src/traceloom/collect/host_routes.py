"""The routes for agents: enrolling, heartbeats, work, reports, files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.responses import Response
from starlette.routing import Route as Endpoint

from traceloom.agent.http.answers import RequestError
from traceloom.agent.http.limits import body_of
from traceloom.agent.uplink.messages import Enrolment, Heartbeat, HostReport, UplinkMessage
from traceloom.collect.hosts import LONGEST_WAIT_S, HostDesk

if TYPE_CHECKING:
    from starlette.requests import Request

Body = TypeVar("Body", bound=UplinkMessage)
MOST_BODY = 32 << 20  # of a heartbeat with an hour of usage of many devices


def host_routes(desk: HostDesk) -> list[Endpoint]:
    """The endpoints; errors of requests are raised, for the application to answer."""

    async def enrol(request: Request) -> Response:
        return _answer(await desk.enrol(await _body(request, Enrolment)))

    async def heartbeat(request: Request) -> Response:
        host = _host(desk, request)
        return _answer(await desk.heartbeat(host, await _body(request, Heartbeat)))

    async def work(request: Request) -> Response:
        host = _host(desk, request)
        try:
            wait_s = float(request.query_params.get("wait", LONGEST_WAIT_S))
        except ValueError as error:
            raise RequestError(400, "`wait` is no number of seconds", slug="wrong-request") from error
        return _answer(await desk.work(host, request.query_params.get("version", ""), wait_s))

    async def report(request: Request) -> Response:
        host = _host(desk, request)
        return _answer(await desk.report(host, request.path_params["request"], await _body(request, HostReport)))

    async def take_file(request: Request) -> Response:
        host, path = _host(desk, request), request.path_params

        async def content() -> AsyncIterator[bytes]:
            async for piece in request.stream():
                yield piece

        await desk.take_file(host, path["request"], path["name"], content())
        return Response(status_code=204)

    return [
        Endpoint("/api/v1/agents/enrol", enrol, methods=["POST"]),
        Endpoint("/api/v1/agents/{host}/heartbeat", heartbeat, methods=["POST"]),
        Endpoint("/api/v1/agents/{host}/work", work),
        Endpoint("/api/v1/agents/{host}/requests/{request}", report, methods=["POST"]),
        Endpoint("/api/v1/agents/{host}/requests/{request}/files/{name}", take_file, methods=["PUT"]),
    ]


def _host(desk: HostDesk, request: Request) -> str:
    """The host that asks, which must be the one in the path."""
    host: str = request.path_params["host"]
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    desk.check_host(host, credential.strip() if scheme.lower() == "bearer" else "")
    return host


async def _body(request: Request, kind: type[Body]) -> Body:
    content = await body_of(request.stream(), request.headers.get("content-length", ""), MOST_BODY)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the request is wrong: {error}", slug="wrong-request") from error


def _answer(message: UplinkMessage) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
