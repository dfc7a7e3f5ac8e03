"""What a request holds, as structures: its body, and what stands behind the question mark."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from traceloom.agent.http.answers import RequestError, wrong_request
from traceloom.agent.http.limits import AGENT_HINT, body_of

if TYPE_CHECKING:
    from starlette.requests import Request

Form = TypeVar("Form", bound=msgspec.Struct)


async def body_as(request: Request, kind: type[Form], most: int, hint: str = AGENT_HINT) -> Form:
    """The body of a request, of at most so many bytes; `hint`: what to do where it has more.

    Raises:
        RequestError: `too-large`, `wrong-request`; `too-slow`: the client went before it was whole.
    """
    from starlette.requests import ClientDisconnect

    try:
        body = await body_of(request.stream(), request.headers.get("content-length", ""), most, hint)
    except ClientDisconnect as error:
        raise cut_off() from error
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise wrong_request(str(error)) from error


def parameters_as(request: Request, kind: type[Form]) -> Form:
    """What stands behind the question mark.

    Raises:
        RequestError: `wrong-request`.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise wrong_request(str(error)) from error


def cut_off() -> RequestError:
    """The refusal of a request whose connection ended before it was whole."""
    return RequestError(408, "the connection ended before the request did", slug="too-slow")
