"""The portal: its routes, how a page is made for a reader, and pages that are kept up to date.

headers.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from htpy import Node
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route as Endpoint

from traceloom.errors import TraceloomError
from traceloom.fleet.api import TokenName
from traceloom.fleet.handlers.captures import FleetRequestContext, name_client, send_events
from traceloom.fleet.portal import page as layout
from traceloom.fleet.portal.page import Page, load_assets
from traceloom.fleet.portal.page_request import PageRequest, PageUrl, read_form
from traceloom.fleet.portal.pages import admin, capture, captures, job, overview
from traceloom.fleet.portal.question_pages import QUESTION_PAGES
from traceloom.fleet.portal.tables import PageTable
from traceloom.fleet.questions.answering import AnswerPendingError
from traceloom.fleet.service.service import (
    ANONYMOUS_TOKEN,
    RETRY_HINT,
    build_fleet_app,
    check_role,
    convert_to_unavailable,
)
from traceloom.fleet.store.captures import Role, ServiceState, TokenRecord
from traceloom.server.access import RateLimiter
from traceloom.server.problem import HttpError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from traceloom.fleet.service.service import FleetService


_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_MAX_STREAMS = 256
_MAX_STREAMS_OF_READER = 64
NOT_LEADING = 503


class LiveContent(NamedTuple):
    """Content of a page as HTML, and whether it is final."""

    head: str
    parts: str
    ended: bool


class LiveEvent(NamedTuple):
    """Content of a page as it is sent; `name` identifies its version."""

    name: str
    sent: bytes


class LivePage:
    """A page that is polled for all of its readers.

    Args:
        poll: Renders its content.
        look_s: Seconds between polls.
    """

    def __init__(
        self, poll: Callable[[], Coroutine[object, object, LiveContent]], look_s: float
    ) -> None:
        self.readers = 0
        self.now: LiveEvent | None = None
        self.gone = False  # the page no longer exists
        self._look, self._look_s = poll, look_s
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._follow(), name="live page")

    async def next(self, name: str) -> LiveEvent | None:
        """Returns the content as soon as its version is not `name`; None if it changes no more."""
        if self.now is None or (self.now.name == name and not self.gone):
            await self._changed.wait()
        return self.now if self.now is not None and self.now.name != name else None

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while not self.gone:
            try:
                content = await self._look()
            except HttpError as error:  # a temporary failure, which may pass
                self.gone = error.status != NOT_LEADING
            except Exception:  # noqa: BLE001  (readers get an end event, and the log the reason)
                _LOG.exception("a live page")
                self.gone = True
            else:
                body = msgspec.json.encode({"head": content.head, "parts": content.parts})
                name = hashlib.sha256(body).hexdigest()[:16]
                if self.now is None or name != self.now.name:
                    self.now = LiveEvent(
                        name, b"id: " + name.encode() + b"\ndata: " + body + b"\n\n"
                    )
                    self._tell()
                self.gone = content.ended
            if not self.gone:
                await asyncio.sleep(self._look_s)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LivePages:
    """All live pages that currently have readers.

    Args:
        look_s: Seconds between polls of each page.
    """

    def __init__(self, look_s: float = _POLL_S) -> None:
        self.look_s = look_s
        self.streams: dict[str, LivePage] = {}
        self.open_by_reader: Counter[str] = Counter()

    async def events(
        self,
        key: str,
        poll: Callable[[], Coroutine[object, object, LiveContent]],
        name: str,
        reader: str = "",
    ) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events: each changed version of the page, the first one other than
        `name`.

        Args:
            key: Page and parameters: readers with the same key share the content.
            poll: Renders the content.
            name: Version that the reader has.
            reader: Who reads.
        """
        if self.open_by_reader[reader] >= _MAX_STREAMS_OF_READER:  # others began just now
            return
        stream = self.streams.get(key)
        if stream is None or stream.gone:
            stream = self.streams[key] = LivePage(poll, self.look_s)
        stream.readers += 1
        self.open_by_reader[reader] += 1
        try:
            yield b"retry: 1000\n\n"
            while True:
                event = await stream.next(name)
                if event is not None:
                    name = event.name
                    yield event.sent
                if stream.gone:
                    yield b"event: ended\ndata: {}\n\n"
                    return
        finally:
            stream.readers -= 1
            self.open_by_reader -= Counter([reader])
            if not stream.readers:
                if self.streams.get(key) is stream:
                    del self.streams[key]
                await stream.close()

    def check_room(self, key: str, reader: str) -> None:
        """Checks that a reader can follow another page.

        Raises:
            HttpError: `busy`.
        """
        if self.open_by_reader[reader] >= _MAX_STREAMS_OF_READER or (
            key not in self.streams and len(self.streams) >= _MAX_STREAMS
        ):
            raise HttpError(503, "too many pages are read now", slug="busy", retry_s=10)


PAGES: tuple[Page[Any], ...] = (
    overview.OVERVIEW_PAGE,
    overview.JOBS_PAGE,
    job.JOB_PAGE,
    overview.HOSTS_PAGE,
    overview.HOST_PAGE,
    job.REQUESTS_PAGE,
    job.REQUEST_PAGE,
    captures.CAPTURES_PAGE,
    capture.CAPTURE_PAGE,
    admin.TRIGGERS_PAGE,
    *QUESTION_PAGES,
    admin.TOKENS_PAGE,
    admin.WEBHOOKS_PAGE,
    admin.AUDIT_PAGE,
)
"""All pages in the order of the menu; pages of one menu group are adjacent."""

SESSION_S = 12 * 3600.0
_TRIES_PER_S = 0.5  # sign-in attempts of an address after the initial burst
_SIGN_INS_PER_S = 10.0  # with a token: each is kept
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,100}")


class ProxyUsers(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy that authenticates users and names them in a header. `source`: its address, or a
    network.

    `role`: of users of whom no token says another.
    """

    header: str
    source: str
    role: Role = "requester"

    def __post_init__(self) -> None:
        if not _HEADER_NAME.fullmatch(self.header):
            raise ValueError(f"`{self.header[:80]}` is no name of a header")
        ipaddress.ip_network(self.source, strict=False)

    def name_of(self, request: Request) -> str | None:
        """Returns the user named by the proxy; None if the request is not from the proxy, or does
        not have exactly one name.
        """
        try:
            address = ipaddress.ip_address(request.client.host if request.client else "")
        except ValueError:
            return None
        names = request.headers.getlist(self.header)
        if address not in ipaddress.ip_network(self.source, strict=False) or len(names) != 1:
            return None
        try:
            return msgspec.convert(names[0], TokenName)
        except msgspec.ValidationError:
            return None


class SessionAuthentication:
    """Authenticates readers by session, or by an authenticating proxy.

    Args:
        state: Holds tokens and sessions.
        proxy: The authenticating proxy, if any.
    """

    def __init__(self, state: ServiceState, proxy: ProxyUsers | None) -> None:
        self.state, self.proxy = state, proxy
        self.tries = RateLimiter(_TRIES_PER_S, hint=RETRY_HINT)
        self.tries.burst = 20.0
        self.sign_ins = RateLimiter(_SIGN_INS_PER_S, hint=RETRY_HINT)

    async def reader(self, request: Request) -> TokenRecord | None:
        """Returns the reader's token; None if nobody is signed in, or the session has ended."""
        user = self.proxy.name_of(request) if self.proxy else None
        if user is not None:
            return await asyncio.to_thread(self._of_user, user)
        secret = _read_cookie(request)
        return await asyncio.to_thread(self._of_session, secret) if secret else None

    async def sign_in(self, request: Request, token_text: str) -> str:
        """Opens a session for a token; returns its secret.

        Raises:
            HttpError: `too-many-requests`; `unknown-token`, for any invalid token.
        """
        token = await asyncio.to_thread(self.state.token, token_text)
        if token is None:  # who has one is not kept out by who guesses at the same address
            self.tries.take(name_client(request.scope))
            await asyncio.to_thread(self.state.note, "", "POST /sign-in", "unknown-token")
            raise HttpError(401, "this token does not open anything", slug="unknown-token")
        self.sign_ins.take(token.name)
        await asyncio.to_thread(self.state.note, token.name, "POST /sign-in", "done")
        return await asyncio.to_thread(self.state.open_session, token_text, SESSION_S)

    async def sign_out(self, request: Request) -> None:
        await asyncio.to_thread(self.state.close_session, _read_cookie(request))

    def set_cookie(self, request: Request, response: Response, secret: str) -> None:
        """Sets the session cookie, or deletes it if `secret` is ""."""
        response.set_cookie(
            _get_cookie_name(request),
            secret,
            max_age=int(SESSION_S) if secret else 0,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )

    def _of_session(self, secret: str) -> TokenRecord | None:
        sha256 = self.state.session(secret)
        return None if sha256 is None else self.state.find_token_by_hash(sha256)

    def _of_user(self, user: str) -> TokenRecord | None:
        assert self.proxy is not None
        token = next((token for token in self.state.tokens() if token.name == user), None)
        if token is not None and token.revoked_ns:
            return None
        return TokenRecord(
            name=user,
            role=token.role if token is not None and token.opens else self.proxy.role,
            created_ns=0,
            expires_ns=0,
            revoked_ns=0,
        )


def check_csrf(request: Request) -> None:
    """Refuses cross-site requests (CSRF).

    Raises:
        HttpError: `wrong-origin`.
    """
    origin = request.headers.get("origin", "")
    if (
        not origin
        or urlsplit(origin).netloc != request.headers.get("host", "")
        or request.headers.get("sec-fetch-site", "same-origin") != "same-origin"
    ):
        raise HttpError(
            403,
            "this was sent from another page",
            slug="wrong-origin",
            hint="a proxy in front of the service has to leave `Host` as it is",
        )


def _get_url(request: Request) -> PageUrl:
    # Not `request.url`, of which clients say a part in `Host`.
    return PageUrl(quote(request.scope["path"]), request.scope["query_string"].decode("latin-1"))


def _get_cookie_name(request: Request) -> str:
    # Browsers accept this prefix only from this very host, over TLS.
    return "__Host-traceloom" if request.url.scheme == "https" else "traceloom"


def _read_cookie(request: Request) -> str:
    try:
        cookies = SimpleCookie(request.headers.get("cookie", ""))
    except CookieError:
        return ""
    morsel = cookies.get(_get_cookie_name(request))
    return morsel.value if morsel else ""


API_PREFIXES = ("/api/", "/metrics", "/healthz", "/readyz")
UNTRUSTED_PATHS = (
    "/captures/{id}/report",
    "/captures/{id}/against/{base}",
    "/captures/{id}/timeline",
    "/captures/{id}/files/{name:path}",
)
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_PER_SECOND = 50.0  # requests of a reader
PAGE_WAIT_S = 0.8
"""Max wait of a page for answers; after that it shows that they are pending, and reloads."""
_RETRY_AFTER_S = 2
# All resources of a page come from this service; it runs only script files of this service, and
# cannot be framed.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "same-origin",  # no referrer at all would also suppress the Origin of forms
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Reports and files are untrusted: they may run their own scripts, but are isolated from this
# service.
_UNTRUSTED_POLICY = "sandbox allow-scripts allow-downloads; frame-ancestors 'self'"


class Portal:
    """Pages, files of captures for browsers, and sign-in.

    Args:
        service: The service.
        pages: All pages, in the order of the menu.
        proxy: The authenticating proxy, if any.
    """

    def __init__(
        self, service: FleetService, pages: Sequence[Page[object]], proxy: ProxyUsers | None
    ) -> None:
        self.service, self.pages = service, pages
        self.readers = SessionAuthentication(service.state, proxy)
        self.rates = RateLimiter(_PER_SECOND, hint=RETRY_HINT)
        self.live = LivePages()

    def app(self) -> ASGIApp:
        return Starlette(
            routes=[
                Endpoint("/static/{digest}/{name}", self.static),
                Endpoint("/sign-in", self.sign_in, methods=["GET", "POST"]),
                Endpoint("/sign-out", self.sign_out, methods=["POST"]),
                *(Endpoint(path, self._strangers(f"/api/v1{path}")) for path in UNTRUSTED_PATHS),
                *(
                    Endpoint(page.path, self._page(page), methods=["GET", "POST"])
                    for page in self.pages
                ),
            ],
            exception_handlers={
                HTTPException: self.no_page,
                HttpError: self.refused,
                Exception: self.failed,
            },
        )

    # Static files.

    async def static(self, request: Request) -> Response:
        """Serves a style sheet or a script."""
        asset = load_assets().get(request.path_params["name"])
        if asset is None:
            raise HttpError(404, "there is no such file", slug="no-such-file")
        return Response(
            asset.content,
            media_type=asset.kind,
            headers={"Cache-Control": "public, max-age=31536000, immutable"},
        )

    def _strangers(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """Wraps a route whose response comes from an untrusted capture, isolated from the
        portal.
        """

        async def respond(request: Request) -> Response:
            request.state.route = request.scope["route"].path
            response = await (await self._visit(request)).fetch_response(
                path, **request.path_params
            )
            response.headers["Content-Security-Policy"] = _UNTRUSTED_POLICY
            response.headers["X-Frame-Options"] = "SAMEORIGIN"
            return response

        return respond

    # Signing in and out.

    async def sign_in(self, request: Request) -> Response:
        """Shows the sign-in form, or handles its submission."""
        request.state.route = "/sign-in"
        if request.method != "POST":
            next_path = layout.restrict_to_local_path(request.query_params.get("next", "/"))
            content = layout.build_sign_in_form(
                next_path, None, expired="ended" in request.query_params
            )
            return HTMLResponse(layout.render_document(title="Sign in", content=content))
        form = await read_form(request)
        next_path = layout.restrict_to_local_path(form.get("next", ["/"])[0])
        try:
            secret = await self.readers.sign_in(request, form.get("token", [""])[0].strip())
        except HttpError as error:
            content = layout.build_sign_in_form(next_path, error, expired=False)
            return HTMLResponse(
                layout.render_document(title="Sign in", content=content),
                error.status,
                {"Retry-After": str(error.retry_s)} if error.retry_s else {},
            )
        response = RedirectResponse(next_path, 303)
        self.readers.set_cookie(request, response, secret)
        return response

    async def sign_out(self, request: Request) -> Response:
        """Ends the session, and deletes its cookie."""
        request.state.route = "/sign-out"
        await self.readers.sign_out(request)
        response = RedirectResponse("/sign-in", 303)
        self.readers.set_cookie(request, response, "")
        return response

    # Pages.

    def _page(self, page: Page[object]) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            request.state.route = page.path
            visit = await self._visit(request)
            await check_role(FleetRequestContext(self.service, request), page.role)
            try:
                if request.method == "POST":
                    return await self._acted(page, visit)
                if page.live and "text/event-stream" in request.headers.get("accept", ""):
                    return await self._events(page, visit, request)
                if name := request.query_params.get("table"):
                    return await _download(page, visit, name, request.query_params.get("as", "csv"))
                visit.max_wait_s = PAGE_WAIT_S
                return await self._shown(page, visit)
            except AnswerPendingError as working:
                content = layout.build_pending_page(page.title, working.seconds)
                path, title = visit.address.path, page.title
                text = layout.render_document(
                    title=title, content=content, token=visit.token, pages=self.pages, path=path
                )
                return HTMLResponse(text, 202, {"Refresh": str(_RETRY_AFTER_S)})
            except HttpError:
                raise
            except TraceloomError as error:
                raise convert_to_unavailable(error) from error

        return respond

    async def _visit(self, request: Request) -> PageRequest:
        token = await self.readers.reader(request)
        if token is None:
            self.rates.take(name_client(request.scope))
            raise HttpError(401, "nobody is signed in", slug="unknown-token")
        self.rates.take(token.name)
        request.state.token = token
        request.state.what = f"{request.method} {request.scope['path']}"
        form = await read_form(request) if request.method == "POST" else None
        return PageRequest(self.service, token, _get_url(request), request.path_params, form)

    async def _shown(
        self, page: Page[object], visit: PageRequest, notice: Node = None, status: int = 200
    ) -> Response:
        data = await page.compute(visit)
        page_content = layout.build_main(
            page.content(data), visit.address, page.controls(visit, data), notice, live=page.live
        )
        path = visit.address.path
        text = layout.render_document(
            title=page.title, content=page_content, token=visit.token, pages=self.pages, path=path
        )
        return HTMLResponse(text, status)

    async def _acted(self, page: Page[object], visit: PageRequest) -> Response:
        if page.act is None:
            raise HttpError(405, "this page takes nothing", slug="wrong-method")
        try:
            after = await page.act(visit)
        except HttpError as error:
            if error.status == 404:
                raise
            return await self._shown(page, visit, layout.build_problem_notice(error), error.status)
        return (
            RedirectResponse(after, 303)
            if isinstance(after, str)
            else await self._shown(page, visit, after)
        )

    async def _events(self, page: Page[object], visit: PageRequest, request: Request) -> Response:
        last = request.headers.get("last-event-id", "")
        everybody = PageRequest(self.service, ANONYMOUS_TOKEN, visit.address, visit.names)
        key = visit.address.canonical_url

        async def look() -> LiveContent:
            content = await page.shown(everybody)
            head, parts = (
                layout.build_head(content),
                layout.build_sections(content, everybody.address),
            )
            return LiveContent(layout.format_value(head), layout.format_value(parts), content.ended)

        self.live.check_room(key, visit.token.name)
        if self.service.hosts is None:
            await look()  # hands it on, where it needs the leader

        async def may_read() -> bool:
            return await self.readers.reader(request) is not None

        events = send_events(self.live.events(key, look, last, visit.token.name), may_read)
        return StreamingResponse(events, media_type="text/event-stream")

    # Refusals.

    async def no_page(self, request: Request, error: Exception) -> Response:
        """Handles an unknown path."""
        assert isinstance(error, HTTPException)
        request.state.token = token = await self.readers.reader(request)
        hint = "" if token is None else "the menu leads on"
        refusal = HttpError(
            error.status_code, "there is no such page", slug="no-such-page", hint=hint
        )
        return await self.refused(request, refusal)

    async def refused(self, request: Request, error: Exception) -> Response:
        """Shows why a request is refused, and where possible what to do."""
        assert isinstance(error, HttpError)
        if error.status == 401 and "text/event-stream" not in request.headers.get("accept", ""):
            return_path = layout.restrict_to_local_path(_get_url(request).changed({}))
            if request.method == "GET" and request.headers.get("sec-fetch-site") == "cross-site":
                # The cookie (SameSite) is missing if a reader follows a link from another site; a
                # reload sends it.
                return HTMLResponse("", headers={"Refresh": f"0; url={return_path}"})
            query = {} if request.method != "GET" or return_path == "/" else {"next": return_path}
            if "traceloom" in request.headers.get("cookie", ""):
                query["ended"] = "yes"
            return RedirectResponse(f"/sign-in?{urlencode(query)}" if query else "/sign-in", 303)
        token: TokenRecord | None = getattr(request.state, "token", None)
        headers = (
            {"Retry-After": str(error.retry_s), "Refresh": str(error.retry_s)}
            if error.retry_s
            else {}
        )
        content, path = layout.build_error_page(error), request.scope["path"]
        document = layout.render_document(
            title="Refused", content=content, token=token, pages=self.pages, path=path
        )
        return HTMLResponse(document, error.status, headers)

    async def failed(self, request: Request, _error: Exception) -> Response:
        """Handles a defect of this service."""
        return await self.refused(
            request,
            HttpError(
                500, "a defect of the service", slug="internal-error", hint="its log says more"
            ),
        )


class PortalMiddleware:
    """Routes requests to the portal or the API, sets security headers, and refuses cross-site
    requests.
    """

    def __init__(self, portal: Portal, api: ASGIApp) -> None:
        self.portal, self.api, self.app = portal, api, portal.app()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request, and counts it."""
        if scope["path"].startswith(API_PREFIXES):
            await self.api(scope, receive, send)
            return
        code = 500

        async def guarded(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                present_names = {name.lower() for name, _ in message["headers"]}
                default_headers = (
                    (name.lower().encode(), value.encode()) for name, value in _HEADERS.items()
                )
                message["headers"] = [
                    *message["headers"],
                    *(
                        (name, value)
                        for name, value in default_headers
                        if name not in present_names
                    ),
                ]
            await send(message)

        request = Request(scope, receive)
        try:
            if scope["method"] not in _SAFE_METHODS:
                try:
                    check_csrf(request)
                except HttpError as error:
                    await (await self.portal.refused(request, error))(scope, receive, guarded)
                    return
            await self.app(scope, receive, guarded)
        finally:
            route = scope["state"].get("route", "page") if scope.get("state") else "page"
            self.portal.service.requests.labels(route, code).inc()


def build_portal(
    service: FleetService, proxy: ProxyUsers | None = None, pages: Sequence[Page[object]] = PAGES
) -> ASGIApp:
    return PortalMiddleware(Portal(service, pages, proxy), build_fleet_app(service))


async def _download(
    page: Page[object], visit: PageRequest, name: str, file_format: str
) -> Response:
    content = await page.shown(visit)
    tables = [part.content for part in content.sections if isinstance(part.content, PageTable)]
    table = next((table for table in tables if table.key == name), None)
    if table is None or file_format not in {"csv", "json"}:
        raise HttpError(404, "there is no such table", slug="no-such-table")
    headers = {"Content-Disposition": f'attachment; filename="{table.key}.{file_format}"'}
    if file_format == "json":
        return Response(table.json(visit.address), media_type="application/json", headers=headers)
    return Response(
        table.to_csv(visit.address), media_type="text/csv; charset=utf-8", headers=headers
    )
