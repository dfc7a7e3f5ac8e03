"""A visit of a page: who reads, what the address says, and the routes of the service, asked as over HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qs, parse_qsl, urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from traceloom.fleet.handlers.captures import FleetAsked, may
from traceloom.fleet.questions.declaration import Question
from traceloom.fleet.service.app import ROUTES, answered
from traceloom.fleet.store.captures import Role, TokenRecord
from traceloom.server.access import body_of
from traceloom.server.problem import wrong_request
from traceloom.server.routing import parameters_as

if TYPE_CHECKING:
    from starlette.types import Message

    from traceloom.fleet.service.service import Service

A = TypeVar("A", bound=msgspec.Struct)
FORM_BYTES = 64 << 10
_ROUTES = {(route.method, route.path): route for route in ROUTES}


class Address:
    """Where a page is: its path, and what stands behind the question mark, each name once."""

    def __init__(self, path: str, query: str) -> None:
        self.path = path
        self.query = dict(parse_qsl(query))

    def changed(self, changes: Mapping[str, str]) -> str:
        """The address with other parameters; "" takes one away."""
        query = {name: value for name, value in {**self.query, **changes}.items() if value}
        return f"{self.path}?{urlencode(query)}" if query else self.path

    @property
    def canonical(self) -> str:
        """The same for all orders of the parameters."""
        return f"{self.path}?{urlencode(sorted(self.query.items()))}"


class Visit:
    """A request for a page.

    Args:
        service: What answers.
        token: Of who reads.
        address: Of the page.
        names: The parts of the path that its pattern names.
        form: What was sent with it.

    Attributes:
        patience_s: How long it waits for all answers to questions; None: as long as programs do.
    """

    patience_s: float | None = None

    def __init__(
        self,
        service: Service,
        token: TokenRecord,
        address: Address,
        names: Mapping[str, str],
        form: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.service, self.token, self.address, self.names = service, token, address, names
        self.form = form or {}

    def may(self, role: Role) -> bool:
        """Whether the reader may do what needs a role."""
        return may(self.token, role)

    def field(self, name: str) -> str:
        """A field of the form, without white space around it; "" where it is empty or not there."""
        return self.form.get(name, [""])[0].strip()

    async def answer(
        self, kind: type[A], path: str, *, method: str = "GET", body: object = None,
        query: Mapping[str, str] | None = None, **names: str,
    ) -> A:  # fmt: skip
        """What a route of the service answers to this reader.

        Args:
            kind: Of the answer.
            path: The pattern of the route, as `/api/v1/captures/{id}`.
            method: Of HTTP.
            body: What is sent with it, as JSON.
            query: Its parameters.
            names: The parts of its path.

        Raises:
            RequestError: It refuses.
        """
        answer = await self._answer(path, method, body, query or {}, names)
        assert isinstance(answer, kind)
        return answer

    async def question(self, question: Question, query: Mapping[str, str]) -> msgspec.Struct:
        """What the tables answer to a question that every reader may ask.

        Args:
            question: The question.
            query: Its parameters.

        Raises:
            RequestError: It refuses.
            StillWorkingError: The answer takes longer than the visit waits.
        """
        if self.patience_s is None:
            return await self.answer(question.answer, question.path, query=query)
        scope = {"type": "http", "headers": [], "query_string": urlencode(query).encode()}
        asked = parameters_as(Request(scope), question.parameters)
        begun_s = time.monotonic()
        try:
            return await self.service.questions.ask_again(question, asked, self.patience_s)
        finally:
            self.patience_s = max(0.0, self.patience_s - (time.monotonic() - begun_s))

    async def response(self, path: str, **names: str) -> Response:
        """The same of a route that answers with a file or a page.

        Raises:
            RequestError: It refuses.
        """
        answer = await self._answer(path, "GET", None, {}, names)
        assert isinstance(answer, Response)
        return answer

    async def _answer(
        self, path: str, method: str, body: object, query: Mapping[str, str], names: Mapping[str, str]
    ) -> msgspec.Struct | Response:
        sent = b"" if body is None else msgspec.json.encode(body)

        async def receive() -> Message:
            return {"type": "http.request", "body": sent, "more_body": False}

        where = path.replace(":path}", "}").format(**names)
        scope = {
            "type": "http", "method": method, "path": where, "headers": [], "path_params": dict(names),
            "query_string": urlencode(query).encode(), "state": {"token": self.token, "what": f"{method} {where}"},
        }  # fmt: skip
        return await answered(_ROUTES[method, path], FleetAsked(self.service, Request(scope, receive)))


async def form_of(request: Request) -> dict[str, list[str]]:
    """The fields of a form that was sent.

    Raises:
        RequestError: `too-large`, `wrong-request`.
    """
    body = await body_of(request.stream(), request.headers.get("content-length", ""), FORM_BYTES, "send less")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=1000)
    except ValueError as error:
        raise wrong_request(f"no form: {error}") from error
