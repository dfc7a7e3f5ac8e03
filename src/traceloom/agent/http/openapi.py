"""The OpenAPI document, made from the table of routes and the structures of bodies and answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from traceloom import __version__
from traceloom.agent.http.answers import ProblemAnswer


class Described(Protocol):
    """What the document says of a route."""

    @property
    def path(self) -> str:
        """With parts in braces."""

    @property
    def method(self) -> str:
        """Of HTTP."""

    @property
    def summary(self) -> str:
        """What it is for."""

    @property
    def answer(self) -> type[msgspec.Struct] | None:
        """None where it is no JSON, but `content`."""

    @property
    def content(self) -> str:
        """The type of an answer that is no structure."""

    @property
    def body(self) -> type[msgspec.Struct] | None:
        """What it takes."""

    @property
    def parameters(self) -> type[msgspec.Struct] | None:
        """What may stand behind the question mark."""

    @property
    def refuses(self) -> tuple[int, ...]:
        """Codes of its refusals, beside those of all."""


REFUSALS = {
    400: "The request is wrong",
    401: "A token is needed, or it is none of ours",
    403: "Not for the one who asks",
    404: "There is no such thing",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when to come again",
    409: "It is not ready for that, or was done in another way",
    503: "It cannot be answered now",
}
EVERYWHERE = (401, 429)


def document(
    routes: Sequence[Described],
    title: str = "Traceloom agent",
    description: str = "What devices and processes of a host do, and whose they are.",
) -> dict[str, Any]:
    """The document of OpenAPI 3.1 for the routes with JSON, and `/metrics`."""
    kinds = {kind for route in routes for kind in (route.answer, route.body) if kind} | {ProblemAnswer}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    of = dict(zip(ordered, schemas, strict=True))
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
        # Of the operation: its path, and its method where that is not the usual one
        words = [part.strip("{}").partition(":")[0] for part in route.path.split("/") if part not in ("", "api", "v1")]
        operation: dict[str, Any] = {
            "summary": route.summary,
            "operationId": "_".join([*([] if route.method == "GET" else [route.method.lower()]), *words]),
            "description": ((route.answer and route.answer.__doc__) or "").strip(),
            "responses": {
                "200": _content(route.summary, of[route.answer])
                if route.answer
                else {"description": route.summary, "content": {route.content: {}}},
                **{
                    str(code): _content(REFUSALS[code], of[ProblemAnswer])
                    for code in sorted({*EVERYWHERE, *route.refuses})
                },
            },
        }
        if route.body:
            operation["requestBody"] = {"required": True, **_content("", of[route.body])}
            del operation["requestBody"]["description"]
        in_path = re.findall(r"\{(\w+)[^}]*\}", route.path)
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in in_path
        ]
        if route.parameters:
            operation["description"] = (route.parameters.__doc__ or "").strip()
            operation["parameters"] += [
                {
                    "name": field.name,
                    "in": "query",
                    "required": field.required,
                    "schema": msgspec.json.schema(field.type) | ({} if field.required else {"default": field.default}),
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
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _content(description: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
