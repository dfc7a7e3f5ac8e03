"""What every route of the agent and of the fleet's service is asked, by whom, and what it answers."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from answers import Describer, digest

from traceloom.agent.handlers.telemetry import ROUTES as AGENT_ROUTES
from traceloom.fleet.service.service import ROUTES as FLEET_ROUTES
from traceloom.server.problem import METRICS_PATH

TIME = {
    "since": "2020-10-05",
    "until": "2020-10-28",
}  # long before now, so that nothing of now is in it
JOB, KERNEL = "recommender-0-28", "recommender_sm90_gemm_bf16_1"
SAMPLES: dict[str, str] = {
    **TIME,
    "top": "3",
    "skip": "1",
    "job": JOB,
    "user": "ana",
    "division": "ads",
    "product": "feed",
    "application": "none",
    "model": "recommender",
    "framework": "torch 2.9",
    "host": "host00",
    "device_model": "NVIDIA H100 80GB HBM3",
    "kernel": KERNEL,
    "shapes": "[[16384, 1024], [1024, 16384]]",
    "sort": "time",
    "by": "job",
    "over": "hour",
    "rule": "exposed-communication",
    "most": "1",
    "before_ns": "1900000000000000000",
    "version": "1",
    "hours": "24",
    "capture": "none",
    "wait": "0",
    "metric": "gpu_busy_ratio",
    "where": "device=GPU-0",
    "raw": "true",
    "pid": "11",
    "native": "true",
}
"""Parameter -> what is asked; `OF_ROUTE` says otherwise for one route."""

OF_ROUTE: dict[str, dict[str, str]] = {
    "GET /api/v1/query": {"by": "host"},
    "GET /api/v1/attribution": {"by": "division,product"},
    "GET /api/v1/characterise": {"by": "kind"},
    "GET /api/v1/stacks": {"job": "slurm-7"},
    "GET /api/v1/hangs": {"job": "slurm-7"},
    "agent GET /api/v1/query": {"since": "1h", "until": "1m", "by": "job"},
    "GET /api/v1/events": {"since": "1h"},
    "GET /api/v1/usage": {"job": "job", "host": "node0"},
}
PROCESS = {
    "key": "0@1",
    "pid": 1,
    "uid": 0,
    "job": "job",
    "rank": 0,
    "world_size": 2,
    "user": "ada",
    "polls": True,
}
BODIES: dict[str, list[dict[str, Any]]] = {
    "POST /api/v1/counters/pause": [{"seconds": 5}],
    "POST /api/v1/steps": [
        {"steps": [0.1, 0.2], "rank": 3, "loader_wait_seconds": [0.1, 0.1], "total": 2}
    ],
    "POST /api/v1/traces": [{"path": "/traces/run1", "job": "slurm-7"}],
    "agent POST /api/v1/requests": [
        {
            "job": "slurm-7",
            "ranks": [0],
            "steps": 2,
            "profilers": ["timeline"],
            "shapes": True,
            "stacks": True,
        },
        {
            "pids": [11],
            "duration_s": 1.0,
            "at_ns": 1,
            "flops": True,
            "modules": True,
            "attach": True,
        },
        {"host": "nowhere", "steps": 1, "max_processes": 1},
        {"job": "slurm-7"},
    ],
    "POST /api/v1/captures": [
        {"files": [{"name": "b.json", "size": 2, "sha256": "0" * 64}], "job": "b"}
    ],
    "POST /api/v1/backfill": [{"again": False}],
    "POST /api/v1/tokens": [{"name": "new", "role": "viewer", "days": 1}],
    "POST /api/v1/requests": [
        {
            "spec": {"job": "job", "steps": 2},
            "choose": "slowest-and-median",
            "start": "step",
            "at_step": 5,
        },
        {"spec": {"job": "job", "steps": 2}, "after_s": 3600, "mark": "mine"},
        {"spec": {"job": "none", "steps": 2}},
    ],
    "POST /api/v1/agents": [{"host": "node9", "days": 1}],
    "POST /api/v1/agents/enrol": [
        {"token": "none", "host": "node9", "boot_id": "b", "version": "1"}
    ],
    "POST /api/v1/agents/{host}/heartbeat": [
        {
            "sent_ns": 1,
            "boot_id": "b",
            "version": "1",
            "clock": {"offset_ns": 0, "error_ns": 1, "round_trips": 8},
            "devices": [{"uuid": "GPU-0", "model": "H100"}],
            "processes": [PROCESS],
            "collector_errors": {"gpu": "gone"},
            "usage": [{"minute": 1, "device": "GPU-0", "state": "busy", "device_ms": 5}],
        },
    ],
    "POST /api/v1/agents/{host}/requests/{id}": [
        {
            "state": "armed",
            "reason": "",
            "detail": "",
            "processes": [],
            "targets": [],
            "files": [],
            "clock": None,
        },
    ],
    "PUT /api/v1/jobs/{job:path}": [
        {"model": "m", "framework": "f", "product": "p", "division": "d", "application": "a"},
    ],
    "PUT /api/v1/triggers": [
        {"toml": '[[triggers]]\nname = "daily"\non = "cadence"\nshare = 0.2\n', "dry_run": True},
        {"toml": "x = 1"},
    ],
    "POST /api/v1/webhooks": [
        {
            "name": "new",
            "url": "http://127.0.0.1:9/hook",
            "events": ["request.done", "regression.new"],
        },
    ],
    "POST /api/v1/owners": [
        {"text": '[[rule]]\nset = {division = "x"}\n', "dry_run": True, **TIME}
    ],
    "POST /api/v1/prices": [{"text": 'currency = "EUR"\n', "dry_run": True, **TIME}],
}
"""Route -> bodies; where both services have it, `agent ` stands before the agent's."""

FILTERS = ("job", "user", "division", "product", "model", "framework", "device_model", "host")
"""Parameters that narrow every question about the fleet, and have something in common."""

STAYING = {"POST /api/v1/compact", "POST /api/v1/backfill"}
"""Routes whose answers say how much there was to do."""


Ask = Callable[[str, str, str, "bytes | None"], "Answer"]
"""Asks with a method, for a path, as somebody, with a body."""


class Answer(NamedTuple):
    """What was answered."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class Routes:
    """The routes of a service, and what each is asked."""

    def __init__(self, name: str, routes: Sequence[Any], there: Mapping[str, str]) -> None:
        self.name, self.routes, self.there = name, routes, there

    def keyed(self, table: Mapping[str, Any], route: Any) -> Any:
        """What a table has of a route."""
        key = f"{route.method} {route.path}"
        return table.get(f"{self.name} {key}", table.get(key))

    def address(self, route: Any) -> str:
        """With names of what is there."""

        def name(match: re.Match[str]) -> str:
            kind = route.path[: match.start()].rstrip("/").rpartition("/")[2]
            return quote(self.there.get(f"{route.method} {kind}", self.there[kind]), safe="")

        return re.sub(r"\{[^}]+\}", name, route.path)

    def queries(self, route: Any) -> Iterator[dict[str, str]]:
        """One with what is needed, and one more for each parameter."""
        if route.parameters is None:
            yield {}
            return
        fields = msgspec.structs.fields(route.parameters)
        samples = {**SAMPLES, **(self.keyed(OF_ROUTE, route) or {})}
        names = {field.name for field in fields}
        needed = {field.name for field in fields if field.required} | (names & {"wait"})
        if self.name == "fleet" and "since" in names:
            needed |= {*TIME} | (names & {"kernel"} if "shapes" in names else set())
        least = {name: samples[name] for name in sorted(needed) if name in samples}
        yield least
        together = FILTERS if names >= set(FILTERS) and not route.path.endswith("/kernels") else ()
        if together:  # they are the same for all questions: each alone is asked of kernels
            yield {**least, **{name: samples[name] for name in together}}
        for field in fields:
            if field.name not in least and field.name not in together and field.name in samples:
                yield {**least, field.name: samples[field.name]}

    def uncovered(self) -> Iterator[str]:
        """Parameters and fields of bodies without a case, and cases without a route."""
        known = {f"{route.method} {route.path}" for route in (*AGENT_ROUTES, *FLEET_ROUTES)}
        for table in (OF_ROUTE, BODIES):
            yield from (
                f"no such route any more: {key}"
                for key in table
                if key.removeprefix("agent ") not in known
            )
        for route in self.routes:
            title = f"{self.name} {route.method} {route.path}"
            names = re.findall(r"(\w+)/\{", route.path)
            yield from (f"no case for: {title}, {name}" for name in names if name not in self.there)
            if route.parameters is not None:
                fields = [f.name for f in msgspec.structs.fields(route.parameters)]
                yield from (
                    f"no case for: {title} ?{name}" for name in fields if name not in SAMPLES
                )
            if route.body is not None:
                sent = {name for body in self.keyed(BODIES, route) or () for name in body}
                fields = [f.encode_name for f in msgspec.structs.fields(route.body)]
                yield from (
                    f"no case for: {title}, body.{name}" for name in fields if name not in sent
                )
                yield from (
                    f"no such field any more: {title}, body.{name}"
                    for name in sorted(sent - set(fields))
                )


_ORDER = {"GET": 0, "PUT": 1, "POST": 2, "DELETE": 3}
_IGNORED = {
    "date",
    "server",
    "content-length",
    "connection",
    "transfer-encoding",
    "etag",
    "last-modified",
    "vary",
}


def ask_routes(
    routes: Routes,
    who: Sequence[str],
    fully: str,
    ask: Ask,
    describer: Describer,
    *,
    before: Callable[[], object] = lambda: None,
) -> list[str]:
    """The lines about all routes: what each answers to everybody; to `fully` with each of its
    parameters.

    `before` is called before each route. Refusals and headers are written out where they come
    first.
    """
    lines: list[str] = []
    seen: set[str] = set()
    for route in sorted(routes.routes, key=lambda route: _ORDER[route.method]):
        before()
        bodies: Sequence[dict[str, Any] | None] = routes.keyed(BODIES, route) or [None]
        for at, (query, body) in enumerate((q, b) for q in routes.queries(route) for b in bodies):
            shown = f"?{urlencode(query)}" if query else ""
            lines.append(
                f"== {route.method} {route.path}{shown}" + (f" {json.dumps(body)}" if body else "")
            )
            content = None if body is None else json.dumps(body).encode()
            by_answer: dict[tuple[str, ...], list[str]] = {}
            for name in who if at == 0 or route.method != "GET" else [fully]:
                answer = ask(route.method, routes.address(route) + shown, name, content)
                by_answer.setdefault(
                    tuple(answer_lines(answer, route, describer, routes.name)), []
                ).append(name)
            for (head, *rest), names in by_answer.items():
                short = (
                    head if len(head) < 120 or head not in seen else f"{head[:60]}… {digest(head)}"
                )
                again = head.startswith("4") and len(rest) == 1 and rest[0] in seen
                seen.update([head, *rest])
                lines += [f"{', '.join(names)}: {short}", *(() if again else rest)]
            lines.append("")
    return lines


def answer_lines(answer: Answer, route: Any, describer: Describer, service: str) -> Iterator[str]:
    """An answer: code, headers, content."""
    heads = {
        name.lower(): value
        for name, value in answer.headers.items()
        if name.lower() not in _IGNORED
    }
    kind = heads.pop("content-type", "")
    if "set-cookie" in heads:
        heads["set-cookie"] = re.sub(r"=[\w-]{20,}", "=<secret>", heads["set-cookie"])
    more = describer.masker.text(
        "".join(f"; {name}: {value}" for name, value in sorted(heads.items()))
    )
    title = f"{service} {route.method} {route.path}"
    problem = (
        json.loads(answer.content)["error"] if answer.status >= 400 and "json" in kind else None
    )
    yield f"{answer.status} {problem['slug'] if problem else kind}{more}"
    if problem:
        yield f"  {problem['slug']}: {describer.masker.text(problem['message'])} | {problem['hint']}"
    elif answer.status < 300 and f"{route.method} {route.path}" in STAYING:
        describer.shapes.add(title, describer.masker.document(json.loads(answer.content)))
    elif route.path == METRICS_PATH and answer.status == 200:
        found = re.findall(r"(?m)^(\w+)(?:\{(.*)\})?", answer.content.decode())
        names = {(name, ",".join(re.findall(r'(\w+)="', labels))) for name, labels in found}
        yield from (f"  {name}{{{labels}}}" for name, labels in sorted(names))
    elif answer.content[:2] == b"\x1f\x8b":
        content = describer.content(gzip.decompress(answer.content), "json", title)
        yield from (f"  {line}" for line in content)
    else:
        text = answer.content.decode("utf-8", "replace")
        yield from (f"  {line}" for line in describer.printed(text, title))


class Page(NamedTuple):
    """What is asked for without a declaration."""

    path: str
    method: str = "GET"
    parameters: None = None
    body: None = None
