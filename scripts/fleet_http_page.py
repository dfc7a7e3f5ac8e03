"""Writes docs/reference/fleet-http.md from the routes of the fleet's service; with --check, whether
it is current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from made_page import write_or_check

from traceloom.fleet.service.service import ROUTES
from traceloom.server.routing import build_openapi_document

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "fleet-http.md"
_INTRODUCTION = """\
# HTTP interface of the fleet's service

<!-- Written by scripts/fleet_http_page.py from the OpenAPI document of the service; do not edit. -->

Answers are JSON; `/api/v1/openapi.json` describes them as OpenAPI 3.1. A refusal is
`{"error": {"slug": ..., "message": ..., "hint": ...}}`. Times end in `_ns`: nanoseconds since the epoch; what is not
known is null. Who may ask what: [Keep captures of a fleet](../how-to/serve.md#who-may-what).

```bash
curl -H "Authorization: Bearer $TRACELOOM_TOKEN" 'http://127.0.0.1:9466/api/v1/kernels?since=7d&top=10'
```
"""


def page() -> str:
    """The whole page."""
    described = msgspec.json.decode(msgspec.json.encode(build_openapi_document(ROUTES)))
    roles = {(route.method, route.path): route.role for route in ROUTES}
    parts = [_INTRODUCTION]
    for route in ROUTES:
        path = described["paths"][route.path.replace(":path}", "}")]
        parts += _operation(path[route.method.lower()], described, f"{route.method} {route.path}")
        role = roles[route.method, route.path]
        parts.append(
            f"*who*: {f'role `{role}`' if role else 'everybody; hosts show their credential'}.\n"
        )
    return "\n".join(parts)


def _operation(operation: dict[str, Any], described: dict[str, Any], title: str) -> Iterator[str]:
    yield f"## {title.replace(':path}', '}')}\n"
    yield f"{operation['summary']}.\n"
    in_query = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
    if in_query:
        yield "| parameter | default | |\n|---|---|---|"
        for each in in_query:
            schema = each["schema"]
            default = (
                ""
                if each["required"]
                else f"`{schema.get('default')}`"
                if schema.get("default")
                else "–"
            )
            choices = ", ".join(f"`{choice}`" for choice in schema.get("enum", ()) if choice)
            text = "; ".join(
                filter(None, (schema.get("description", "").replace("|", "\\|"), choices))
            )
            yield f"| `{each['name']}` | {default or 'needed'} | {text} |"
        yield ""
    body = operation.get("requestBody")
    if body:
        yield from _fields("body", body["content"]["application/json"]["schema"], described)
    content = operation["responses"]["200"]["content"]
    schema = content.get("application/json", {}).get("schema")
    if schema is None:
        yield f"*answer*: {', '.join(content)}.\n"
    else:
        yield from _fields("answer", schema, described)


def _fields(what: str, schema: dict[str, Any], described: dict[str, Any]) -> Iterator[str]:
    """A structure: what it is, its fields, and those of the rows of its tables."""
    form = _of(schema, described)
    names = ", ".join(f"`{name}`" for name in form.get("properties", ()))
    yield f"*{what}*: {names}. {' '.join(form.get('description', '').split())}\n"
    for name, field in form.get("properties", {}).items():
        rows = _of(field.get("items", {}), described)
        if rows.get("properties") and any(
            "description" in column for column in rows["properties"].values()
        ):
            yield f"`{name}`: {field.get('description', '')}\n\n| column | |\n|---|---|"
            for column, declared in rows["properties"].items():
                yield f"| `{column}` | {declared.get('description', '').replace('|', chr(92) + '|')} |"
            yield ""


def _of(schema: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return described["components"]["schemas"][name] if name else schema


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
