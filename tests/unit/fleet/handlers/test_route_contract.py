"""Every route of the service, as its OpenAPI document describes it, held against what it answers to everybody.

Whoever has no token hears 401, whoever has a lesser role 403, whoever names what is not there 404, whoever sends
nonsense 400; nobody hears 500, and no route answers with a code that the document does not name.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.answering import AnsweringService, answering  # noqa: E402
from support.postgres import database  # noqa: E402
from support.simulated_hosts import SimulatedHost, ranked_process  # noqa: E402
from traceloom.agent.fleet_link.protocol import (  # noqa: E402
    ArmedProcess,
    ClockOffset,
    Heartbeat,
    HostDevice,
    HostFile,
    HostReport,
    UsageRow,
)
from traceloom.agent.traces.requests import TraceSpec, TraceTarget  # noqa: E402
from traceloom.fleet.handlers.captures import FleetRoute  # noqa: E402
from traceloom.fleet.handlers.hosts import RequestBody  # noqa: E402
from traceloom.fleet.service.service import (  # noqa: E402
    ROUTES,
    ServiceLimits,
)
from traceloom.fleet.store.captures import ROLES  # noqa: E402

MESSAGES = Path(__file__).resolve().parents[4] / "docs" / "reference" / "messages.md"
EXPLAINED = set(re.findall(r"^### ([\w-]+)$", MESSAGES.read_text(), re.MULTILINE))
NAMES = [f"{route.method} {route.path}" for route in ROUTES]
AGENTS = "/api/v1/agents/"
CONTENT = b"{}"
NUL = "a\x00b"
# What stands where a client should have put something else.
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**63,
    2**70,
    1e308,
    "",
    NUL,
    "../../etc/passwd",
    "\ud800",
    "x" * 5000,
    [],
    [None],
    {},
    {"a": {}},
    [[[]]],
)
ODD_IN_ADDRESS = (
    "",
    "-1",
    "nan",
    "1e400",
    "99999999999999999999",
    NUL,
    "../..",
    "x" * 5000,
    "\u202e",
    "0x10",
    " ",
    "true",
)


class Answer(NamedTuple):
    """What a route answered."""

    status: int
    text: bytes
    headers: http.client.HTTPMessage

    @property
    def slug(self) -> str:
        """Why it refused."""
        return str(json.loads(self.text)["error"]["slug"])


class Fleet:
    """A service with one of each thing that a route may name, and who asks it."""

    def __init__(self, service: AnsweringService, folder: Path) -> None:
        self.service = service
        self.connection = http.client.HTTPConnection(
            service.url.removeprefix("http://"), timeout=60
        )
        self.tokens = {role: service.token(role, f"of-{role}") for role in ROLES}
        self.document = json.loads(self.ask("GET", "/api/v1/openapi.json", "admin").text)
        file = {
            "name": "a.json",
            "size": len(CONTENT),
            "sha256": hashlib.sha256(CONTENT).hexdigest(),
        }
        capture = self.made("captures", {"files": [file], "job": "job"})["id"]
        self.host = SimulatedHost(
            [service.url],
            "node0",
            self.made("agents", {"host": "node0"})["token"],
            [ranked_process(0, "job")],
            folder,
        )
        self.host.beat()
        request = self.made("requests", {"spec": {"job": "job", "steps": 2}})["id"]
        self.made("tokens", {"name": "known", "role": "viewer"})
        self.made("webhooks", {"name": "known", "url": "https://93.184.216.34/hook"})
        self.there = {
            "captures": capture,
            "hosts": "node0",
            "requests": request,
            "jobs": "job",
            "agents": "node0",
        }
        self.there |= {
            "files": "a.json",
            "tokens": "known",
            "webhooks": "known",
            "against": capture,
        }

    def made(self, route: str, body: Any) -> Any:
        answer = self.ask("POST", f"/api/v1/{route}", "admin", body)
        assert answer.status == 200, answer.text
        return json.loads(answer.text)

    def ask(self, method: str, path: str, token: str = "", body: Any = None) -> Answer:
        """Ask; `token` is a role, or what is shown itself."""
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        shown = self.tokens.get(token, token)
        self.connection.request(
            method, path, content, {"Authorization": f"Bearer {shown}"} if shown else {}
        )
        response = self.connection.getresponse()
        return Answer(response.status, response.read(), response.headers)

    def operation(self, route: FleetRoute) -> dict[str, Any]:
        """What the document says of a route."""
        described: dict[str, Any] = self.document["paths"][re.sub(r":\w+}", "}", route.path)][
            route.method.lower()
        ]
        return described

    def token_for(self, route: FleetRoute) -> str:
        """Of who may ask it, and everything."""
        return self.host.clients[0].credential if route.path.startswith(AGENTS) else "admin"

    def address(self, route: FleetRoute, *, there: bool) -> str:
        """With names of what is there, or of what is not."""

        def name(match: re.Match[str]) -> str:
            kind = route.path[: match.start()].rstrip("/").rpartition("/")[2]
            return self.there[kind] if there else "nothing"

        return re.sub(r"\{[^}]+\}", name, route.path)

    def check(self, route: FleetRoute, answer: Answer, what: str) -> None:
        """No defect, a code that the document names, and a reason that one can look up."""
        assert answer.status < 500, f"{what}: {answer.text[:300]!r}"
        assert str(answer.status) in self.operation(route)["responses"], (
            f"{what}: {answer.status} {answer.text[:300]!r}"
        )
        if answer.status >= 400:
            problem = json.loads(answer.text)["error"]
            assert set(problem) == {"slug", "message", "hint"}, what
            assert problem["slug"] in EXPLAINED, f"{what}: {problem['slug']} is in no reference"
            assert (answer.headers["Retry-After"] is not None) == (problem["slug"] in WAITS), (
                problem
            )


WAITS = {"not-leading", "too-many-requests"}


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.thorough)]
)
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    state = database() if request.param == "postgresql" else ""
    with answering(folder, limits=ServiceLimits(requests_per_second=1e9), state=state) as service:
        made = Fleet(service, folder)
        yield made
        made.host.close()
        made.connection.close()


def test_the_document_has_each_route_with_what_it_takes(fleet: Fleet) -> None:
    described = {
        (method.upper(), path)
        for path, methods in fleet.document["paths"].items()
        for method in methods
    }
    assert described == {(route.method, re.sub(r":\w+}", "}", route.path)) for route in ROUTES}
    names = [
        operation["operationId"]
        for methods in fleet.document["paths"].values()
        for operation in methods.values()
    ]
    assert len(set(names)) == len(names)
    for route in ROUTES:
        operation = fleet.operation(route)
        parameters = {(of["name"], of["in"]) for of in operation.get("parameters", ())}
        wanted = {(name, "path") for name in re.findall(r"\{(\w+)", route.path)}
        wanted |= {(name, "query") for name in getattr(route.parameters, "__struct_fields__", ())}
        assert parameters == wanted, route.path
        assert ("requestBody" in operation) == (route.body is not None)


@pytest.mark.parametrize("route", ROUTES, ids=NAMES)
def test_who_shows_nothing_or_too_little_is_refused(fleet: Fleet, route: FleetRoute) -> None:
    path = fleet.address(route, there=True)
    if path in {"/healthz", "/readyz"}:
        assert fleet.ask("GET", path).status == 200
        return
    if path == f"{AGENTS}enrol":  # what is shown is in the body
        answer = fleet.ask("POST", path, body={"token": "nonsense", "host": "node9"})
        assert (answer.status, answer.slug) == (401, "unknown-token")
        return
    for token in ("", "nonsense", "\xe9", fleet.tokens["admin"][:-1], fleet.tokens["admin"] + "x"):
        answer = fleet.ask(route.method, path, token, {})
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), token
        fleet.check(route, answer, f"{path} shown {token!r}")
    if path.startswith(AGENTS):
        answer = fleet.ask(route.method, path, "admin", {})  # who may do everything is no host
        assert (answer.status, answer.slug) == (401, "unknown-host")
        return
    assert route.role is not None
    for role in ROLES[: ROLES.index(route.role)]:
        answer = fleet.ask(route.method, path, role, {})
        assert (answer.status, answer.slug) == (403, "not-allowed"), role
        fleet.check(route, answer, f"{path} as {role}")


@pytest.mark.parametrize(
    "route",
    [route for route in ROUTES if "{" in route.path and not route.body],
    ids=lambda route: f"{route.method} {route.path}",
)
def test_what_is_not_there_is_not_found(fleet: Fleet, route: FleetRoute) -> None:
    path = fleet.address(route, there=False).replace(f"{AGENTS}nothing", f"{AGENTS}node0")
    answer = fleet.ask(route.method, path, fleet.token_for(route))
    always = {
        f"{AGENTS}node0/work",
        "/api/v1/jobs/nothing",
    }  # a job that does not run now may have run before
    assert answer.status == (200 if path in always else 404), answer.text
    fleet.check(route, answer, path)
    for name in (NUL, "..", "%2e%2e", "x" * 3000, "\u202e"):
        odd = re.sub("nothing", lambda _, name=name: quote(name, safe=""), path)  # type: ignore[misc]
        if odd != path:
            answer = fleet.ask(route.method, odd, fleet.token_for(route))
            assert answer.status == (200 if path in always and name != NUL else 404), (
                odd,
                answer.text,
            )
            fleet.check(route, answer, odd)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.body], ids=lambda route: route.path
)
def test_bodies_that_are_none_are_refused(fleet: Fleet, route: FleetRoute) -> None:
    assert route.body is not None
    path, token = fleet.address(route, there=True), fleet.token_for(route)
    for content in (
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 20_000,
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
    ):
        answer = fleet.ask(route.method, path, token, content)
        fleet.check(route, answer, f"{path} sent {content[:20]!r}")
        if not content.startswith(b"{"):
            assert (answer.status, answer.slug) == (400, "wrong-request"), content[:20]
    for field in route.body.__struct_fields__:
        for odd in ODD:
            answer = fleet.ask(
                route.method, path, token, {**SENT.get(route.body.__name__, {}), field: odd}
            )
            fleet.check(route, answer, f"{path} sent {field} = {str(odd)[:40]!r}")


SENT: dict[str, dict[str, Any]] = {
    "AnnounceBody": {"files": [{"name": "b.json", "size": 2, "sha256": "0" * 64}]},
    "TokenBody": {"name": "other", "role": "viewer"},
    "RequestBody": {"spec": {"job": "job", "steps": 1}},
    "WebhookBody": {"name": "other", "url": "https://93.184.216.34/hook"},
    "Enrolment": {"token": "nonsense", "host": "node9"},
    "Heartbeat": {"sent_ns": 1, "boot_id": "b", "version": "1"},
    "HostReport": {"state": "armed"},
    "FleetTriggersBody": {"toml": "", "dry_run": True},
}
"""What is else in a body, so that the one odd field is what it is refused for."""


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.parameters], ids=lambda route: route.path
)
def test_parameters_that_are_none_are_refused(
    fleet: Fleet, route: FleetRoute, thorough: bool
) -> None:
    assert route.parameters is not None
    path, token = fleet.address(route, there=True), fleet.token_for(route)
    answer = fleet.ask(route.method, f"{path}?no_such_parameter=1&wait=0", token)
    assert (answer.status, answer.slug) == (400, "wrong-request")
    for field in msgspec.structs.fields(route.parameters):
        if FIRST[field.name, str(field.type)] is not route:
            continue  # it is read alike
        # Parameters of a type are read alike: each gets every third of the odd values, beginning with another one.
        for odd in ODD_IN_ADDRESS if thorough else ODD_IN_ADDRESS[len(field.name) % 3 :: 3]:
            more = {"wait": "0", "version": "other"} if path.endswith("/work") else {}
            answer = fleet.ask(
                route.method, f"{path}?{urlencode({**more, field.name: odd})}", token
            )
            fleet.check(route, answer, f"{path}?{field.name}={odd[:40]!r}")


FIRST = {
    (field.name, str(field.type)): route
    for route in reversed(ROUTES)
    for field in (msgspec.structs.fields(route.parameters) if route.parameters else ())
}
"""Of each parameter the first route that takes it."""


PROCESS = ranked_process(0, "job")
TARGET = TraceTarget(
    request="r",
    process=PROCESS.key,
    profiler="timeline",
    pid=1,
    uid=0,
    rank=0,
    stem="rank0",
    state="kept",
)
WHOLE = {
    "requests": RequestBody(spec=TraceSpec(job="job", steps=2, ranks=(0,)), mark="m"),
    "agents/node0/heartbeat": Heartbeat(
        sent_ns=1,
        boot_id="b",
        version="1",
        processes=[PROCESS],
        collector_errors={"gpu": "gone"},
        clock=ClockOffset(offset_ns=0, error_ns=1, round_trips=8),
        devices=[HostDevice(uuid="GPU-0", values={"a": 1.0})],
        usage=[UsageRow(minute=1, device="GPU-0", state="busy", device_ms=5)],
    ),
    "agents/node0/requests/ID": HostReport(
        state="uploading",
        processes=[ArmedProcess(key=PROCESS.key, pid=1, rank=0)],
        targets=[TARGET],
        files=[HostFile(name="a.json", bytes=2, sha256="0" * 64)],
        clock=ClockOffset(offset_ns=0, error_ns=1, round_trips=8),
    ),
}
"""Bodies with something in each field."""


def changed(value: object) -> Iterator[object]:
    """A document with one value in it after the other in the place of which something odd stands."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inside in items:
        for other in (*ODD, *changed(inside)):
            copied: Any = value.copy()  # type: ignore[attr-defined]
            copied[key] = other
            yield copied


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", WHOLE)
def test_whatever_stands_inside_a_body_is_no_defect(fleet: Fleet, path: str) -> None:
    route = next(of for of in ROUTES if of.body is type(WHOLE[path]) and of.method == "POST")
    address = f"/api/v1/{path.replace('ID', fleet.there['requests'])}"
    fleet.host.beat()  # what was sent before may have said that it has no processes
    statuses = set()
    for body in changed(msgspec.to_builtins(WHOLE[path])):
        answer = fleet.ask("POST", address, fleet.token_for(route), body)
        fleet.check(route, answer, f"{address} sent {str(body)[:500]}")
        statuses.add(answer.status)
    assert {200, 400} <= statuses
    # And what was taken breaks nothing that is told of it.
    for told in (
        "hosts",
        "hosts/node0",
        "jobs",
        "jobs/job",
        "requests",
        "now",
        "query?by=host",
        "query?by=job",
    ):
        assert fleet.ask("GET", f"/api/v1/{told}", "admin").status == 200, told
    assert fleet.ask("GET", "/metrics", "admin").status == 200
    fleet.host.beat()


def test_no_route_takes_another_method(fleet: Fleet) -> None:
    methods: dict[str, set[str]] = {}
    for route in ROUTES:
        methods.setdefault(fleet.address(route, there=True), set()).add(route.method)
    for path, taken in methods.items():
        for method in {"GET", "POST", "PUT", "DELETE", "PATCH"} - taken:
            token = fleet.host.clients[0].credential if path.startswith(AGENTS) else "admin"
            answer = fleet.ask(method, path, token)
            assert answer.status in {404, 405}, (method, path)
            assert answer.slug in {"wrong-method", "no-such-route", "not-found"}, answer.slug
