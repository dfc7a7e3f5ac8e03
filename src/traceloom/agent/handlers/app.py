"""The HTTP application: routes, authentication, and error responses.

Everything is answered from memory; only the text of /metrics is rendered in a thread, so that the
loop is not blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Endpoint

from traceloom.agent.handlers.telemetry import ROUTES, AgentRequest, Route
from traceloom.agent.publishers import render_openmetrics
from traceloom.agent.snapshot import VisibleSnapshot
from traceloom.server.access import Caller, RateLimiter
from traceloom.server.problem import (
    DOCUMENT_PATH,
    METRICS_PATH,
    HttpError,
    build_error_response,
    build_exception_handlers,
)
from traceloom.server.routing import build_openapi_document

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from traceloom.agent.daemon import Agent


class AuthenticationMiddleware:
    """Identifies the caller of each request and applies the rate limit."""

    def __init__(self, app: ASGIApp, agent: Agent) -> None:
        self.app, self.agent = app, agent
        self.rates = RateLimiter(agent.config.access.requests_per_second)
        self.paths = {*(route.path for route in ROUTES), METRICS_PATH, DOCUMENT_PATH}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and count it."""
        path, code = scope["path"], 500

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            identify: Callable[[Headers], Caller] = scope["state"]["identify"]
            try:
                peer = identify(Headers(scope=scope))
            except HttpError:
                address = (scope["client"] or ("",))[0]
                peer = Caller(name=f"stranger {address}", sees="host")
                if path != "/healthz":
                    self.rates.take(peer.name)
                    raise
            if not peer.unlimited:  # whatever else is asked, it is heard that the agent lives
                self.rates.take(f"health {peer.name}" if path == "/healthz" else peer.name)
            scope["state"]["peer"] = peer
            await self.app(scope, receive, counted)
        except HttpError as refusal:
            await build_error_response(refusal)(scope, receive, counted)
        finally:
            self.agent.asked(
                scope["state"].get("route", path if path in self.paths else "other"), code
            )


def build_app(agent: Agent) -> ASGIApp:
    """Returns the ASGI application of an agent.

    The server has to put `identify` into the state of each connection: headers -> Caller.
    """

    def endpoint(route: Route) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            context = AgentRequest(agent, request)
            request.state.route = route.path
            if route.acts:
                agent.acts(
                    context.peer.name, context.peer.pid, route.path, allowed=context.peer.acts
                )
            if route.acts and not context.peer.acts:
                raise HttpError(
                    403,
                    "this is for root, the group of the agent, and tokens that may do all",
                    slug="not-allowed",
                    hint="`access.group`, or `may` of a token in agent.toml",
                )
            answer = route.answers(context)
            if isawaitable(answer):
                answer = await answer
            return (
                answer
                if isinstance(answer, Response)
                else Response(msgspec.json.encode(answer), media_type="application/json")
            )

        return respond

    async def metrics(request: Request) -> Response:
        view = VisibleSnapshot(agent.host_snapshot.copy(), request.state.peer)
        text, kind = await asyncio.to_thread(
            render_openmetrics, view, agent.config, request.headers.get("accept", "")
        )
        return Response(text, headers={"Content-Type": kind})

    described = msgspec.json.encode(build_openapi_document(ROUTES))

    async def openapi(_request: Request) -> Response:
        return Response(described, media_type="application/json")

    app = Starlette(
        routes=[
            Endpoint(METRICS_PATH, metrics),
            Endpoint(DOCUMENT_PATH, openapi),
            *(Endpoint(route.path, endpoint(route), methods=[route.method]) for route in ROUTES),
        ],
        exception_handlers=build_exception_handlers(
            [METRICS_PATH, DOCUMENT_PATH, *(route.path for route in ROUTES)], "the agent"
        ),
    )
    return AuthenticationMiddleware(app, agent)
