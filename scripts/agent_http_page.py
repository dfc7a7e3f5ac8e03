"""Writes docs/reference/agent-http.md from the agent's routes; with --check, says whether it is up
to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from made_page import write_or_check

from traceloom.agent.handlers.telemetry import ROUTES, Route

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "agent-http.md"
_INTRODUCTION = """\
# HTTP interface of the agent

<!-- Written by scripts/agent_http_page.py from src/traceloom/agent/handlers; do not edit. -->

Over the unix socket, and over TCP where `tcp.address` is set. Answers are JSON; `/api/v1/openapi.json` describes them
as OpenAPI 3.1. A refusal is `{"error": {"slug": ..., "message": ..., "hint": ...}}`. Times end in `_ns`: nanoseconds
since the epoch. Who sees what: [Security of the agent](../concepts/agent-security.md).

```bash
curl --unix-socket /run/traceloom/agent.sock http://agent/api/v1/status
```

`GET /metrics` gives OpenMetrics 1.0 or the plain text of Prometheus, as the `Accept` header asks.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_INTRODUCTION, *(line for route in ROUTES for line in _route(route))])


def _route(route: Route) -> Iterator[str]:
    yield f"## {route.method} {route.path}\n"
    yield f"{route.summary}." + (
        " For who may act: root, the agent's group, tokens `all`." if route.acts else ""
    )
    yield ""
    for what, form in (
        ("parameters", route.parameters),
        ("body", route.body),
        ("answer", route.answer),
    ):
        if form is not None:
            fields = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(form))
            text = " ".join((form.__doc__ or "").split())
            yield f"*{what}*: {fields}. {text}\n"
    if route.answer is None:
        yield f"*answer*: {route.content}.\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
