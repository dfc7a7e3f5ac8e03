"""Requests for pages: the reader, the URL, and in-process calls of the API's routes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qs, parse_qsl, urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from traceloom.fleet.handlers.captures import FleetRequestContext, has_role
from traceloom.fleet.questions.declaration import Question
from traceloom.fleet.service.service import ROUTES, call_route
from traceloom.fleet.store.captures import Role, TokenRecord
from traceloom.server.access import read_limited_body
from traceloom.server.problem import make_bad_request
from traceloom.server.routing import decode_query

if TYPE_CHECKING:
    from starlette.types import Message

    from traceloom.fleet.service.service import FleetService

AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)
MAX_FORM_BYTES = 64 << 10
_ROUTES_BY_METHOD_AND_PATH = {(route.method, route.path): route for route in ROUTES}


class PageUrl:
    """URL of a page: its path, and query parameters without repetition."""

    def __init__(self, path: str, query: str) -> None:
        self.path = path
        self.query = dict(parse_qsl(query))

    def changed(self, changes: Mapping[str, str]) -> str:
        """Returns the URL with changed parameters; "" removes one."""
        query = {name: value for name, value in {**self.query, **changes}.items() if value}
        return f"{self.path}?{urlencode(query)}" if query else self.path

    @property
    def canonical_url(self) -> str:
        """The URL with sorted parameters, for comparison."""
        return f"{self.path}?{urlencode(sorted(self.query.items()))}"


class PageRequest:
    """A request for a page.

    Args:
        service: The service.
        token: Token of the reader.
        url: URL of the page.
        path_params: Parameters in its path.
        form: Submitted form.

    Attributes:
        max_wait_s: Max seconds to wait for answers to questions; None: as long as API clients wait.
    """

    max_wait_s: float | None = None

    def __init__(
        self,
        service: FleetService,
        token: TokenRecord,
        url: PageUrl,
        path_params: Mapping[str, str],
        form: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.service, self.token, self.address, self.names = service, token, url, path_params
        self.form = form or {}

    def may(self, role: Role) -> bool:
        return has_role(self.token, role)

    def field(self, name: str) -> str:
        """Returns a field of the form without surrounding white space; "" if it is empty or
        missing.
        """
        return self.form.get(name, [""])[0].strip()

    async def answer(
        self,
        answer_type: type[AnswerT],
        path: str,
        *,
        method: str = "GET",
        body: object = None,
        query: Mapping[str, str] | None = None,
        **path_params: str,
    ) -> AnswerT:
        """Calls a route of the API as this reader.

        Args:
            answer_type: Type of the answer.
            path: The pattern of the route, as `/api/v1/captures/{id}`.
            method: HTTP method.
            body: JSON body.
            query: Its parameters.
            path_params: The parts of its path.

        Raises:
            HttpError: It refuses.
        """
        answer = await self._call_route(path, method, body, query or {}, path_params)
        assert isinstance(answer, answer_type)
        return answer

    async def question(self, question: Question, query: Mapping[str, str]) -> msgspec.Struct:
        """Returns the answer to a question that every reader may ask.

        Args:
            question: The question.
            query: Its parameters.

        Raises:
            HttpError: It refuses.
            AnswerPendingError: The answer takes longer than the page waits.
        """
        if self.max_wait_s is None:
            return await self.answer(question.answer, question.path, query=query)
        scope = {"type": "http", "headers": [], "query_string": urlencode(query).encode()}
        parameters = decode_query(Request(scope), question.parameters)
        started_s = time.monotonic()
        try:
            return await self.service.questions.ask_again(question, parameters, self.max_wait_s)
        finally:
            self.max_wait_s = max(0.0, self.max_wait_s - (time.monotonic() - started_s))

    async def fetch_response(self, path: str, **path_params: str) -> Response:
        """Calls a route that responds with a file or a page.

        Raises:
            HttpError: It refuses.
        """
        answer = await self._call_route(path, "GET", None, {}, path_params)
        assert isinstance(answer, Response)
        return answer

    async def _call_route(
        self,
        path: str,
        method: str,
        body: object,
        query: Mapping[str, str],
        path_params: Mapping[str, str],
    ) -> msgspec.Struct | Response:
        body_bytes = b"" if body is None else msgspec.json.encode(body)

        async def receive() -> Message:
            return {"type": "http.request", "body": body_bytes, "more_body": False}

        url_path = path.replace(":path}", "}").format(**path_params)
        scope = {
            "type": "http",
            "method": method,
            "path": url_path,
            "headers": [],
            "path_params": dict(path_params),
            "query_string": urlencode(query).encode(),
            "state": {"token": self.token, "what": f"{method} {url_path}"},
        }
        return await call_route(
            _ROUTES_BY_METHOD_AND_PATH[method, path],
            FleetRequestContext(self.service, Request(scope, receive)),
        )


async def read_form(request: Request) -> dict[str, list[str]]:
    """Returns the fields of a submitted form.

    Raises:
        HttpError: `too-large`, `wrong-request`.
    """
    body = await read_limited_body(
        request.stream(), request.headers.get("content-length", ""), MAX_FORM_BYTES, "send less"
    )
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=1000)
    except ValueError as error:
        raise make_bad_request(f"no form: {error}") from error
