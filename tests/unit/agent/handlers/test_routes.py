"""The routes: each answer is as the OpenAPI document has it, and what is refused says why."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from starlette.requests import Request

from support.agent_server import ANNA, BERT, SmallAgent, ask, full_board, listening
from traceloom.agent.config import Config, MetricRule
from traceloom.agent.handlers.telemetry import ROUTES, AgentRequest, read_boot_id
from traceloom.agent.handlers.traces import build_triggers_answer
from traceloom.agent.hangs.detector import Hang, HungProcess
from traceloom.agent.hangs.service import HangRecord
from traceloom.agent.ownership.model import Owner
from traceloom.agent.snapshot import Snapshot
from traceloom.agent.traces.requests import TraceSpec
from traceloom.agent.triggers.store import LastFiring, LastRefusal
from traceloom.server.access import Caller
from traceloom.server.problem import HttpError
from traceloom.server.routing import build_openapi_document, parse_time
from traceloom.server.settings import Access, Tcp, Token

DOCUMENT = build_openapi_document(ROUTES)
BODIES = {
    "/api/v1/counters/pause": {"seconds": 5},
    "/api/v1/steps": {"steps": [0.1, 0.2], "rank": 3},
    "/api/v1/traces": {"path": "/tmp/run1", "job": "slurm-7"},
}
QUERIES = {"/api/v1/query": "?metric=gpu_busy_ratio", "/api/v1/stacks": "?job=slurm-7"}


class Running:
    """An agent with its socket."""

    def __init__(self, agent: SmallAgent, socket: Path) -> None:
        self.agent, self.socket = agent, socket

    def refused(self, path: str, status: int, **more: Any) -> dict[str, str]:
        reply = ask(self.socket, path, **more)
        assert reply.status == status, reply.body
        _check(reply.json(), "ProblemResponse")
        return reply.json()["error"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    agent = SmallAgent(Config(access=Access(request_bytes=1000)))
    with listening(agent, tmp_path_factory.mktemp("agent")) as listeners:
        yield Running(agent, listeners.socket_path)


def _check(answer: Any, schema: str) -> None:
    whole = {"$ref": f"#/components/schemas/{schema}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(whole).validate(answer)


def test_the_document_is_one_of_openapi(running: Running) -> None:
    served = ask(running.socket, "/api/v1/openapi.json").json()
    assert served == msgspec.json.decode(msgspec.json.encode(DOCUMENT))
    assert served["openapi"] == "3.1.0"
    for schema in served["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert set(served["paths"]) == {"/metrics", *(route.path for route in ROUTES)}
    operations = [operation for path in served["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(ROUTES) + 1
    for operation in operations:
        assert operation["summary"]
        assert operation["responses"]["200"]["description"]


ANSWERED = [
    route for route in ROUTES if "{" not in route.path and route.body is not TraceSpec
]  # tests/unit/agent/traces


@pytest.mark.parametrize("route", ANSWERED, ids=[route.path for route in ANSWERED])
def test_an_answer_is_as_documented(running: Running, route: Any) -> None:
    body = msgspec.json.encode(BODIES[route.path]) if route.body else b""
    reply = ask(
        running.socket, route.path + QUERIES.get(route.path, ""), method=route.method, body=body
    )
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "application/json"
    _check(reply.json(), route.answer.__name__)
    assert running.agent.requests[-1] == (route.path, 200)
    strict = DOCUMENT["components"]["schemas"][route.answer.__name__]
    assert set(reply.json()) == set(strict["properties"])


def test_a_document_that_lies_is_noticed(running: Running) -> None:
    with pytest.raises(jsonschema.ValidationError):
        _check({**ask(running.socket, "/api/v1/status").json(), "pid": "many"}, "StatusResponse")


def test_devices_with_their_values_and_who_is_on_them(running: Running) -> None:
    devices = {row["uuid"]: row for row in ask(running.socket, "/api/v1/devices").json()["devices"]}
    assert set(devices) == {"GPU-0", "GPU-1", "MIG-1"}
    assert (devices["GPU-0"]["processes"], devices["GPU-0"]["jobs"]) == (["11@100"], ["slurm-7"])
    values = {
        (row["metric"], row["labels"].get("pipe")): row["value"]
        for row in devices["GPU-0"]["values"]
    }
    stored = {series: value for series, value, _ in running.agent.host_snapshot.values()}
    assert values["traceloom_gpu_busy_ratio", None] == stored["gpu_busy_ratio", ("GPU-0",)]
    assert (
        values["traceloom_gpu_pipe_active_ratio", "tensor"]
        == stored["gpu_pipe_active_ratio", ("GPU-0", "tensor")]
    )
    assert not any(metric.endswith("_info") for metric, _ in values)


def test_processes_and_jobs(running: Running) -> None:
    processes = ask(running.socket, "/api/v1/processes").json()
    assert [row["command"] for row in processes["processes"]] == [
        "python train.py --job slurm-7",
        "python train.py --job slurm-8",
    ]
    assert processes["hidden"] == 0
    assert processes["processes"][0]["owner"]["rank"] == 0
    jobs = ask(running.socket, "/api/v1/jobs").json()["jobs"]
    assert [
        (job["job"], job["user"], job["ranks"], job["world_size"], job["devices"]) for job in jobs
    ] == [
        ("slurm-7", "user4001", [0], 2, ["GPU-0"]),
        ("slurm-8", "user4002", [1], 2, ["GPU-1"]),
    ]
    assert [job["steps_per_second"] for job in jobs] == [None, 2.0]


def test_what_happened_in_order_of_time(running: Running) -> None:
    events = ask(running.socket, "/api/v1/events").json()["events"]
    assert [
        (event["kind"], event["device"] or event["cgroup"], event["code"], event["count"])
        for event in events
    ] == [
        ("xid", "GPU-0", 79, None),
        ("oom-kill", "/slurm-7", None, 2),
        ("oom-kill", "/shared", None, 1),
    ]
    assert (
        events[1]["text"]
        == "2 processes killed for want of memory in /slurm-7, which may have 1.00 GB"
    )
    assert ask(running.socket, f"/api/v1/events?since={time.time() + 60}").json()["events"] == []
    assert "yesterday" in running.refused("/api/v1/events?since=yesterday", 400)["message"]
    running.refused("/api/v1/events?until=1h", 400)


def test_a_query_reaches_the_history_as_it_was_meant(running: Running) -> None:
    before = time.time_ns()
    path = "/api/v1/query?metric=traceloom_gpu_busy_ratio&since=2h&until=1m&by=job,rank&where=device=GPU-0,pipe=a=b"
    answer = ask(running.socket, path).json()
    assert (answer["metric"], answer["kind"], answer["unit"]) == (
        "traceloom_gpu_busy_ratio",
        "gauge",
        "ratio",
    )
    question = running.agent.questions[-1]
    assert (question.metric, question.by, question.where) == (
        "gpu_busy_ratio",
        ("job", "rank"),
        {"device": "GPU-0", "pipe": "a=b"},
    )
    assert question.until_ns - question.since_ns == 119 * 60 * 10**9
    assert question.until_ns >= before - 60 * 10**9
    ask(running.socket, "/api/v1/query?metric=gpu_busy_ratio")
    question = running.agent.questions[-1]
    assert question.until_ns - question.since_ns == 600 * 10**9


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("30s", 970),
        ("1.5m", 910),
        ("0.25", 0.25),
        ("100", 100),
        ("1970-01-01T00:10:00Z", 600),
        ("1970-01-01T00:10:00", 600),
        ("1970-01-01T01:10:00+01:00", 600),
    ],
)
def test_times(text: str, at_s: float) -> None:
    assert parse_time(text, 1000 * 10**9) == at_s * 10**9


@pytest.mark.parametrize("text", ["yesterday", "", "10 m", "nan", "inf", "1e999", "2026-13-01"])
def test_no_times(text: str) -> None:
    with pytest.raises(HttpError, match="is no time"):
        parse_time(text, 10**18)


@pytest.mark.parametrize(
    ("path", "status", "slug", "words"),
    [
        ("/api/v1/proceses", 404, "no-such-route", "did you mean `/api/v1/processes`"),
        ("/", 404, "no-such-route", "openapi.json"),
        (
            "/api/v2/status",
            404,
            "other-version",
            "version 2, and the agent answers those of version 1",
        ),
        (
            "/api/v1/query?metric=gpu_bussy_ratio",
            404,
            "no-such-metric",
            "did you mean `gpu_busy_ratio`",
        ),
        ("/api/v1/query", 400, "wrong-request", "missing required field `metric`"),
        (
            "/api/v1/query?metric=gpu_busy_ratio&form=1",
            400,
            "wrong-request",
            "unknown field `form`",
        ),
        (
            "/api/v1/query?metric=gpu_busy_ratio&since=soon",
            400,
            "wrong-request",
            "`soon` is no time",
        ),
        ("/api/v1/query?metric=gpu_busy_ratio&where=GPU-0", 400, "wrong-request", "GPU-0"),
        ("/api/v1/steps", 405, "wrong-method", "GET"),
    ],
)
def test_what_is_asked_wrongly_is_refused(
    running: Running, path: str, status: int, slug: str, words: str
) -> None:
    problem = running.refused(path, status)
    assert problem["slug"] == slug
    assert words in problem["message"] + problem["hint"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "truncated"),
        (b"\xff", "wrong"),
        (b'{"steps": ["a"]}', "expected `float`"),
        (b'{"steps": [-1]}', ">= 0"),
        (b'{"steps": [1e300]}', "<= 1000000"),
        (b'{"stepz": [1]}', "unknown field `stepz`"),
        (b"[]", "expected `object`"),
    ],
)
def test_bodies_that_are_wrong(running: Running, body: bytes, words: str) -> None:
    problem = running.refused("/api/v1/steps", 400, method="POST", body=body)
    assert problem["slug"] == "wrong-request"
    assert words in problem["message"]


def test_a_body_that_is_too_large(running: Running) -> None:
    assert (
        running.refused("/api/v1/steps", 413, method="POST", body=b" " * 1001)["slug"]
        == "too-large"
    )
    chunked = b"3e9\r\n" + b" " * 1001 + b"\r\n0\r\n\r\n"
    with_chunks = running.refused(
        "/api/v1/steps",
        413,
        method="POST",
        Transfer_Encoding="chunked",
        body=chunked,
        Content_Length="",
    )
    assert with_chunks["slug"] == "too-large"


def test_steps_come_with_the_process_that_tells_them(running: Running) -> None:
    import os

    for text, waited in (
        (b'{"steps": [0.5], "loader_wait_seconds": 0.1}', 0.1),
        (b'{"steps": [0.5]}', None),
    ):
        ask(running.socket, "/api/v1/steps", method="POST", body=text)
        pid, uid, body = running.agent.told[-1]
        assert (pid, uid) == (os.getpid(), os.getuid())
        assert (body.steps, body.loader_wait_seconds) == (
            [0.5],
            waited,
        )  # what is not known is not 0


def test_a_trace_is_read_as_the_user_who_asks(running: Running) -> None:
    import os

    body = b'{"path": "/tmp/run1", "job": "slurm-7"}'
    reply = ask(running.socket, "/api/v1/traces", method="POST", body=body)
    assert reply.json()["flops_per_step"] == 2e9
    assert running.agent.learned[-1] == ("slurm-7", "/tmp/run1", os.getuid())


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        (b'{"path": "/tmp/run1", "job": "slurm-9"}', 404, "no-such-job"),
        (b'{"path": "/tmp/run1", "job": ""}', 404, "no-such-job"),
        (b'{"path": "run1", "job": "slurm-7"}', 400, "wrong-request"),
    ],
)
def test_traces_that_are_not_taken(running: Running, body: bytes, status: int, slug: str) -> None:
    before = len(running.agent.learned)
    assert running.refused("/api/v1/traces", status, method="POST", body=body)["slug"] == slug
    assert len(running.agent.learned) == before


def test_stacks_are_those_of_a_job_or_a_process(running: Running) -> None:
    reply = ask(running.socket, "/api/v1/stacks?job=slurm-8&native=true").json()
    assert running.agent.looked_at[-1] == ([22], True)
    assert [(group["ranks"], group["frames"]) for group in reply["groups"]] == [
        ([1], [["main", "/a/train.py", 3]])
    ]
    assert ask(running.socket, "/api/v1/stacks?pid=11").status == 200
    assert running.agent.looked_at[-1] == ([11], False)
    assert running.agent.acted[-1][2:] == ("/api/v1/stacks", True)


@pytest.mark.parametrize(
    ("query", "status", "slug"),
    [
        ("", 400, "wrong-request"),
        ("?job=slurm-7&pid=11", 400, "wrong-request"),
        ("?pid=-1", 400, "wrong-request"),
        ("?job=slurm-9", 404, "no-such-job"),
        ("?pid=1", 404, "no-such-process"),
    ],
)
def test_stacks_that_are_not_looked_at(
    running: Running, query: str, status: int, slug: str
) -> None:
    before = len(running.agent.looked_at)
    assert running.refused(f"/api/v1/stacks{query}", status)["slug"] == slug
    assert len(running.agent.looked_at) == before


def test_processes_of_no_job_are_not_those_of_a_pid(tmp_path: Path) -> None:
    host_snapshot = full_board()
    host_snapshot.processes = {
        key: msgspec.structs.replace(process, owner=Owner())
        for key, process in host_snapshot.processes.items()
    }
    agent = SmallAgent(host_snapshot=host_snapshot)
    with listening(agent, tmp_path) as listeners:
        assert ask(listeners.socket_path, "/api/v1/stacks?pid=11").status == 200
    assert agent.looked_at == [([11], False)]


def test_who_only_reads_sees_no_stacks(tmp_path: Path) -> None:
    digests = [hashlib.sha256(secret).hexdigest() for secret in (b"reads", b"acts")]
    tokens = (
        Token(sha256=digests[0], name="reads"),
        Token(sha256=digests[1], name="acts", may="all"),
    )
    agent = SmallAgent(Config(tcp=Tcp(address="127.0.0.1:0", tokens=tokens)))
    with listening(agent, tmp_path) as listeners:
        assert listeners.tcp_address is not None
        replies = [
            ask(
                listeners.tcp_address,
                "/api/v1/stacks?job=slurm-7",
                Authorization=f"Bearer {secret}",
            )
            for secret in ("reads", "acts")
        ]
        assert (
            ask(listeners.tcp_address, "/api/v1/stacks?job=slurm-7").status == 404
        )  # it sees no jobs at all
    assert [reply.status for reply in replies] == [403, 200]
    assert replies[0].json()["error"]["slug"] == "not-allowed"
    assert agent.looked_at == [([11], False)]
    assert [allowed for *_, allowed in agent.acted] == [False, True]


def test_hangs_are_those_of_the_own_jobs_and_who_only_reads_sees_no_stacks_of_them(
    tmp_path: Path,
) -> None:
    digests = [hashlib.sha256(secret).hexdigest() for secret in (b"reads", b"acts")]
    tokens = (
        Token(sha256=digests[0], name="reads"),
        Token(sha256=digests[1], name="acts", may="all"),
    )
    agent = SmallAgent(Config(tcp=Tcp(address="127.0.0.1:0", tokens=tokens)))
    for uid, job, pid in ((ANNA, "slurm-7", 11), (BERT, "slurm-8", 22)):
        member = HungProcess(key=f"{pid}@100", pid=pid, rank=0, steps=9)
        hang = Hang(job=job, uid=uid, processes=(member,), since_ns=1, seen_ns=61, median_s=0.5)
        agent.hangs.records.append(
            HangRecord(
                id=f"of-{uid}",
                hang=hang,
                sentence="rank 0 is in `f`",
                directory="/t/1",
                files=("hang.md",),
            )
        )
    agent.hangs.watch.hangs[hang.key] = hang
    agent.hangs._open[hang.key] = f"of-{BERT}"
    with listening(agent, tmp_path) as listeners:
        address = listeners.tcp_address
        assert address is not None
        read, act = (
            ask(address, "/api/v1/hangs", Authorization=f"Bearer {secret}").json()["hangs"]
            for secret in ("reads", "acts")
        )
        (of_job,) = ask(address, "/api/v1/hangs?job=slurm-8", Authorization="Bearer acts").json()[
            "hangs"
        ]
        assert ask(address, "/api/v1/hangs").json() == {
            "hangs": [],
            "watched": [],
        }  # it sees the host alone
        rows = ask(address, "/api/v1/processes", Authorization="Bearer acts").json()["processes"]
    _check(act[0], "HangResponse")
    assert [(row["id"], row["sentence"], row["directory"], row["files"]) for row in act] == [
        (f"of-{uid}", "rank 0 is in `f`", "/t/1", ["hang.md"]) for uid in (ANNA, BERT)
    ]
    assert [(row["id"], row["sentence"], row["directory"], row["files"]) for row in read] == [
        (f"of-{uid}", "", "", []) for uid in (ANNA, BERT)
    ]
    assert of_job["pids"] == [22]
    assert [row["hung_since_ns"] for row in rows] == [None, 1]


def test_a_user_sees_the_own_hangs_alone() -> None:
    agent = SmallAgent()
    for uid in (ANNA, BERT):
        hang = Hang(job="j", uid=uid, processes=(), since_ns=1, seen_ns=61, median_s=0.5)
        agent.hangs.records.append(HangRecord(id=f"of-{uid}", hang=hang))
    peer = Caller(name=f"uid {ANNA}", uid=ANNA, sees="own")
    request = Request({"type": "http", "query_string": b"", "state": {"peer": peer}})
    (route,) = (route for route in ROUTES if route.path == "/api/v1/hangs")
    answer = route.answers(AgentRequest(agent, request))
    assert [row.id for row in answer.hangs] == [f"of-{ANNA}"]


def test_the_clock(running: Running) -> None:
    before, answer, after = (
        time.monotonic_ns(),
        ask(running.socket, "/api/v1/clock").json(),
        time.monotonic_ns(),
    )
    assert before < answer["monotonic_ns"] < after
    assert (
        answer["boot_id"]
        == read_boot_id()
        == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    )


def test_an_agent_whose_collectors_stopped_is_not_healthy(tmp_path: Path) -> None:
    agent = SmallAgent(host_snapshot=Snapshot())
    with listening(agent, tmp_path) as listeners:
        assert ask(listeners.socket_path, "/healthz").status == 200
        agent.host_snapshot.started_ns -= 3600 * 10**9
        reply = ask(listeners.socket_path, "/healthz")
        assert (reply.status, reply.json()["error"]["slug"]) == (503, "not-healthy")


def test_a_defect_is_an_answer_too(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running.agent, "status", lambda: 1 / 0)
    assert running.refused("/api/v1/status", 500)["slug"] == "internal-error"
    assert "ZeroDivisionError" in caplog.text


def test_a_query_with_too_large_an_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.agent.handlers.telemetry._MAX_QUERY_POINTS", 1)
    assert running.refused("/api/v1/query?metric=gpu_busy_ratio", 400)["slug"] == "too-many-values"


def test_several_requests_over_a_connection(running: Running) -> None:
    from support.agent_server import connect

    with connect(running.socket) as connection:
        for _ in range(3):
            connection.sendall(b"GET /api/v1/clock HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
            received = b""
            while received.count(b'"boot_id"') < 2:
                received += connection.recv(65_536)
            assert received.count(b"HTTP/1.1 200 OK") == 2


def test_rules_are_told_as_documented_and_what_they_did_to_whose_processes_it_was() -> None:
    rule = MetricRule(name="hot", metric="gpu_power_watts", above=5.0, where={"job": "slurm-7"})
    agent = SmallAgent(Config(triggers=(rule,)))
    counts = agent.triggers.counts["hot"]
    counts.fired, counts.refusals = 1, {"cooldown": 2}
    counts.last = LastFiring(at_ns=1, request="0a", target="slurm-7", what="it is hot", uid=ANNA)
    counts.last_refusal = LastRefusal(
        at_ns=2,
        target="slurm-8",
        what="it is hot",
        uid=BERT,
        reason="cooldown",
        detail="not for 5 s",
    )

    def told(peer: Caller) -> tuple[bool, bool, bool]:
        answer = msgspec.json.decode(
            msgspec.json.encode(
                build_triggers_answer(agent.triggers, agent.config.trigger_budget, peer)
            )
        )
        _check(answer, "TriggersResponse")
        (rule,) = answer["rules"]
        assert (rule["name"], rule["fired"], rule["refusals"]) == ("hot", 1, {"cooldown": 2})
        return rule["rule"] is not None, rule["last"] is not None, rule["last_refusal"] is not None

    assert told(Caller(name="root", uid=0, sees="all")) == (True, True, True)
    assert told(Caller(name="anna", uid=ANNA, sees="own")) == (False, True, False)
    assert told(Caller(name="bert", uid=BERT, sees="own")) == (False, False, True)
    assert told(Caller(name="tcp", sees="host")) == (False, False, False)
