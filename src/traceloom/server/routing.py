"""Decoding of request bodies, queries and times, and the OpenAPI 3.1 document of the routes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from traceloom import __version__
from traceloom.server.access import AGENT_HINT, read_limited_body
from traceloom.server.problem import HttpError, ProblemResponse, make_bad_request

Form = TypeVar("Form", bound=msgspec.Struct)
T = TypeVar("T")


async def decode_body(
    request: Request,
    kind: type[T] | Callable[[bytes], T],
    max_bytes: int,
    hint: str = AGENT_HINT,
) -> T:
    """Returns the body of a request of at most `max_bytes` bytes, decoded as a type or by a function;
    `hint` is for the error of a larger one.

    Raises:
        HttpError: `too-large`, `wrong-request`; `too-slow`: the client disconnected before it was
            complete.
    """
    try:
        body = await read_limited_body(
            request.stream(), request.headers.get("content-length", ""), max_bytes, hint
        )
    except ClientDisconnect as error:
        raise make_truncated_error() from error
    try:
        return msgspec.json.decode(body, type=kind) if isinstance(kind, type) else kind(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise make_bad_request(str(error)) from error


def decode_query(request: Request, kind: type[Form]) -> Form:
    """Returns the decoded query string.

    Raises:
        HttpError: `wrong-request`.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise make_bad_request(str(error)) from error


def make_truncated_error() -> HttpError:
    """Returns the error of a request whose connection ended before it was complete."""
    return HttpError(408, "the connection ended before the request did", slug="too-slow")


class DescribedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A route as the OpenAPI document describes it.

    `path` has its parameters in braces; `answer` is None if the response is not JSON but of the
    media type `content`; `refuses`: error statuses in addition to those of all routes.
    """

    path: str
    summary: str
    answer: type[msgspec.Struct] | None = None
    content: str = "application/json"
    method: str = "GET"
    body: type[msgspec.Struct] | None = None
    parameters: type[msgspec.Struct] | None = None
    refuses: tuple[int, ...] = ()


STATUS_DESCRIPTIONS = {
    400: "The request is wrong",
    401: "A token is needed, or it is none of ours",
    403: "Not for the one who asks",
    404: "There is no such thing",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when to come again",
    409: "It is not ready for that, or was done in another way",
    503: "It cannot be answered now",
}
COMMON_STATUSES = (401, 429)


def build_openapi_document(
    routes: Sequence[DescribedRoute],
    title: str = "Traceloom agent",
    description: str = "What devices and processes of a host do, and whose they are.",
) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document of the routes."""
    kinds = {kind for route in routes for kind in (route.answer, route.body) if kind} | {
        ProblemResponse
    }
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    references = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {
        "/metrics": {
            "get": {
                "summary": "All series as OpenMetrics 1.0, or as plain text where Accept prefers it",
                "operationId": "metrics",
                "responses": {
                    "200": {
                        "description": "The series",
                        "content": {"application/openmetrics-text": {}, "text/plain": {}},
                    }
                },
            }
        }
    }
    for route in routes:
        # The operation id is the path, with the method if that is not the usual one.
        path_parts = [
            part.strip("{}").partition(":")[0]
            for part in route.path.split("/")
            if part not in ("", "api", "v1")
        ]
        operation: dict[str, Any] = {
            "summary": route.summary,
            "operationId": "_".join(
                [*([] if route.method == "GET" else [route.method.lower()]), *path_parts]
            ),
            "description": ((route.answer and route.answer.__doc__) or "").strip(),
            "responses": {
                "200": _describe_content(route.summary, references[route.answer])
                if route.answer
                else {"description": route.summary, "content": {route.content: {}}},
                **{
                    str(code): _describe_content(
                        STATUS_DESCRIPTIONS[code], references[ProblemResponse]
                    )
                    for code in sorted({*COMMON_STATUSES, *route.refuses})
                },
            },
        }
        if route.body:
            operation["requestBody"] = {
                "required": True,
                **_describe_content("", references[route.body]),
            }
            del operation["requestBody"]["description"]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"\{(\w+)[^}]*\}", route.path)
        ]
        if route.parameters:
            operation["description"] = (route.parameters.__doc__ or "").strip()
            operation["parameters"] += [
                {
                    "name": field.name,
                    "in": "query",
                    "required": field.required,
                    "schema": msgspec.json.schema(field.type)
                    | ({} if field.required else {"default": field.default}),
                }
                for field in msgspec.structs.fields(route.parameters)
            ]
        paths.setdefault(re.sub(r":\w+}", "}", route.path), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": __version__,
            "description": description,
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_content(description: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE]\+?\d+)?")
_MAX_TIME_NS = 2**62
"""Later times are clamped to this, and times before 1970 to 0: databases hold no others."""


def parse_time(text: str, now_ns: int) -> int:
    """Parses a time in ns since the epoch: `10m` (ago), seconds since the epoch, or ISO 8601 (UTC
    without a zone).

    Raises:
        HttpError: `wrong-request`.
    """
    try:
        if match := _AGO.fullmatch(text):
            at_ns = now_ns - int(min(float(match[1]) * _UNITS_S[match[2]] * 1e9, _MAX_TIME_NS))
        elif _NUMBER.fullmatch(text):
            at_ns = int(float(text) * 1e9)
        else:
            parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
            at_ns = int(
                (parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)).timestamp() * 1e9
            )
    except (ValueError, OverflowError) as error:
        raise make_bad_request(
            f"`{text}` is no time, as 10m, 1700000000 or 2026-01-31T12:00"
        ) from error
    return min(max(at_ns, 0), _MAX_TIME_NS)
