"""The ASGI application of the service: routes, authentication, authorization and rate limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Endpoint

from traceloom.errors import TraceloomError
from traceloom.fleet.handlers.admin import RULE_ROUTES, TRIGGER_ROUTES, WEBHOOK_ROUTES
from traceloom.fleet.handlers.captures import (
    COMPACTION_ROUTES,
    COMPARE_ROUTES,
    FLEET_ROUTES,
    FleetRequestContext,
    FleetRoute,
    get_bearer,
    has_role,
    name_client,
)
from traceloom.fleet.handlers.hosts import (
    AGENTS_PATH,
    HOST_ROUTES,
    REQUEST_ROUTES,
    STATEMENT_ROUTES,
)
from traceloom.fleet.handlers.now import LIVE_ROUTES, WATCH_ROUTES
from traceloom.fleet.questions.catalogue import QUESTION_ROUTES
from traceloom.fleet.store.captures import Role, TokenRecord
from traceloom.server.access import RateLimiter
from traceloom.server.problem import (
    DOCUMENT_PATH,
    HttpError,
    build_error_response,
    build_exception_handlers,
    other_api_version,
)
from traceloom.server.routing import build_openapi_document
from traceloom.system.text import hide_paths

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from traceloom.fleet.service.service import FleetService

ROUTES = (
    *FLEET_ROUTES,
    *COMPARE_ROUTES,
    *REQUEST_ROUTES,
    *WATCH_ROUTES,
    *HOST_ROUTES,
    *STATEMENT_ROUTES,
    *TRIGGER_ROUTES,
    *WEBHOOK_ROUTES,
    *QUESTION_ROUTES,
    *RULE_ROUTES,
    *LIVE_ROUTES,
    *COMPACTION_ROUTES,
)
_PUBLIC_PATHS = {"/healthz", "/readyz"}
ANONYMOUS_TOKEN = TokenRecord(name="", role="viewer", created_ns=0, expires_ns=0, revoked_ns=0)
RETRY_HINT = "come again later, or less often"


class FleetAuthenticationMiddleware:
    """Middleware that identifies the client by its token and limits its request rate."""

    def __init__(self, app: ASGIApp, service: FleetService) -> None:
        self.app, self.service = app, service
        self.rates = RateLimiter(service.limits.requests_per_second, hint=RETRY_HINT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request and counts it."""
        code = 500

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            scope["state"]["token"] = await self._token(scope, Headers(scope=scope))
            await self.app(scope, receive, counted)
        except HttpError as refusal:
            await build_error_response(refusal)(scope, receive, counted)
        except TraceloomError as error:
            await build_error_response(convert_to_unavailable(error))(scope, receive, counted)
        finally:
            self.service.requests.labels(scope["state"].get("route", "other"), code).inc()

    async def _token(self, scope: Scope, headers: Headers) -> TokenRecord:
        if scope["path"] in _PUBLIC_PATHS:  # who watches it is not limited by what others do
            return ANONYMOUS_TOKEN
        address = name_client(scope)
        if version_error := other_api_version(scope["path"], "the service"):
            self.rates.take(address)
            raise version_error
        # Hosts show their own credential, which their routes check.
        if scope["path"].startswith(AGENTS_PATH):
            host = scope["path"].removeprefix(AGENTS_PATH).partition("/")[0]
            if registry := self.service.hosts:  # else the service that leads counts it
                is_host = registry.is_host(host, get_bearer(headers))
                self.rates.take(f"host {host}" if is_host else address)
            return ANONYMOUS_TOKEN
        secret = get_bearer(headers)
        token = await asyncio.to_thread(self.service.state.token, secret) if secret else None
        if token is None:
            self.rates.take(address)
            raise HttpError(
                401,
                "this token is none of ours, has expired or was revoked"
                if secret
                else "a token is needed",
                slug="unknown-token",
                hint="commands take it from --token-file or TRACELOOM_TOKEN, programs send "
                "`Authorization: Bearer TOKEN`; `traceloom fleet token add` makes one",
            )
        self.rates.take(f"token {token.name}")
        return token


def convert_to_unavailable(error: TraceloomError) -> HttpError:
    """Returns the 503 response for an error of the state or a store, without details for the
    client.
    """
    return HttpError(
        503,
        hide_paths(error.message),
        slug=error.slug,
        hint="its administrator sees more",
        retry_s=5,
    )


async def call_route(route: FleetRoute, context: FleetRequestContext) -> msgspec.Struct | Response:
    """Returns a route's response if the client may call it.

    The audit log names the action as in `context.request.state.what`.

    Raises:
        HttpError: `not-allowed` for a token with another role, `no-such-route` for names that no
            database can store.
    """
    if any("\0" in str(name) for name in context.request.path_params.values()):
        raise HttpError(404, "nothing has a name with a NUL", slug="no-such-route")
    await check_role(context, route.role)
    try:
        answer = route.answers(context)
        return await answer if isinstance(answer, Awaitable) else answer
    except HttpError:
        raise
    except TraceloomError as error:
        raise convert_to_unavailable(error) from error


async def check_role(context: FleetRequestContext, role: Role | None) -> None:
    """Refuses a client whose token lacks a role, and records that in the audit log.

    Raises:
        HttpError: `not-allowed`.
    """
    if role is not None and not has_role(context.token, role):
        what = context.request.state.what
        route = getattr(context.request.state, "route", what)
        if times := context.service.refusals.count(context.token.name, route):
            details = {"times": str(times)} if times > 1 else {}
            note = context.service.state.note
            await asyncio.to_thread(note, context.token.name, what, "not-allowed", details)
        raise HttpError(
            403,
            f"this needs the role {role}, and the token has {context.token.role}",
            slug="not-allowed",
        )


def build_fleet_app(service: FleetService) -> ASGIApp:
    def endpoint(route: FleetRoute) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            request.state.route, request.state.what = (
                route.path,
                f"{route.method} {request.scope['path']}",
            )
            answer = await call_route(route, FleetRequestContext(service, request))
            return (
                answer
                if isinstance(answer, Response)
                else Response(msgspec.json.encode(answer), media_type="application/json")
            )

        return respond

    described = msgspec.json.encode(
        build_openapi_document(
            ROUTES, "Traceloom fleet", "Captures of whole jobs, analysed by themselves."
        )
    )

    async def openapi(_request: Request) -> Response:
        return Response(described, media_type="application/json")

    paths = [DOCUMENT_PATH, *(route.path for route in ROUTES)]
    app = Starlette(
        routes=[
            Endpoint(DOCUMENT_PATH, openapi),
            *(Endpoint(route.path, endpoint(route), methods=[route.method]) for route in ROUTES),
        ],
        exception_handlers=build_exception_handlers(paths, "the service"),
    )
    app.router.redirect_slashes = False  # API clients do not expect redirects
    return FleetAuthenticationMiddleware(app, service)
