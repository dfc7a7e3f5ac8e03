"""Requests for traces over HTTP: whose they are, which files may be fetched, and what is asked wrongly."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from support.agent_server import SmallAgent, ask, listening
from traceloom.agent.config import Config
from traceloom.agent.traces.files import TraceDirectories
from traceloom.agent.traces.requests import TraceRequest, TraceSpec, TraceTarget
from traceloom.server.problem import HttpError
from traceloom.server.routing import parse_time
from traceloom.server.settings import Access

CONTENT = bytes(range(256)) * 40
OTHER = 4_000_000  # a user that nobody is


def request(number: str, uid: int, files: list[str], *, done: bool = True) -> TraceRequest:
    target = TraceTarget(
        request=number,
        process="7@1",
        profiler="timeline",
        pid=7,
        uid=uid,
        stem="rank0",
        state="kept" if done else "queued",
    )
    return TraceRequest(
        id=number,
        who=f"uid {uid}",
        uid=uid,
        asked_ns=1,
        boot_id="",
        spec=TraceSpec(pids=(7,), steps=3),
        targets=[target],
        files=files,
        done=done,
    )


class Served:
    """An agent with requests of two users; what it keeps of them lies in a directory."""

    def __init__(self, agent: SmallAgent, socket: Path, root: Path) -> None:
        self.agent, self.socket, self.root = agent, socket, root

    def refused(self, path: str, status: int, slug: str, **more: str) -> str:
        reply = ask(self.socket, path, **more)
        problem = reply.json()["error"]
        assert (reply.status, problem["slug"]) == (status, slug), reply.body
        return str(problem["message"])


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tmp_path = tmp_path_factory.mktemp("served")
    agent, root = SmallAgent(Config(access=Access(request_bytes=5000))), tmp_path / "traces"
    agent.trace_service.places = TraceDirectories(root)
    for made in (
        request("own", os.geteuid(), ["capture.json", "rank0.kineto.json.gz"]),
        request("other", OTHER, ["capture.json"]),
        request("open", os.geteuid(), [], done=False),
    ):
        agent.trace_service.requests[made.id] = made
        folder = root / str(made.uid) / made.id
        folder.mkdir(parents=True)
        for name in made.files:
            (folder / name).write_bytes(CONTENT)
    (root / str(os.geteuid()) / "own" / "secret").write_bytes(b"not listed")
    with listening(agent, tmp_path / "agent") as listeners:
        yield Served(agent, listeners.socket_path, root)


@pytest.fixture
def served(serving: Served) -> Served:
    serving.agent.acted.clear()
    return serving


@pytest.mark.skipif(os.geteuid() != 0, reason="root may act for all")
def test_root_sees_the_requests_of_all(served: Served) -> None:
    answer = ask(served.socket, "/api/v1/requests").json()
    assert [each["id"] for each in answer["requests"]] == ["own", "other", "open"]
    assert ask(served.socket, "/api/v1/requests/other").json()["uid"] == OTHER


def test_a_file_is_fetched_as_it_is(served: Served) -> None:
    reply = ask(served.socket, "/api/v1/requests/own/files/rank0.kineto.json.gz")
    assert (reply.status, reply.body) == (200, CONTENT)
    assert reply.headers["content-type"] == "application/octet-stream"
    assert ask(served.socket, "/api/v1/requests/own").json()["files"] == [
        "capture.json",
        "rank0.kineto.json.gz",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "secret",
        "rank1.kineto.json.gz",
        "..",
        ".",
        "%2e%2e",
        "..%2fopen",
        "%2fetc%2fpasswd",
        "capture.json%00",
        "CAPTURE.JSON",
        "capture.json%20",
    ],
)
def test_a_file_that_is_not_listed_is_none(served: Served, name: str) -> None:
    reply = ask(served.socket, f"/api/v1/requests/own/files/{name}")
    assert reply.status == 404
    assert reply.json()["error"]["slug"] in {"no-such-file", "no-such-route"}
    assert b"not listed" not in reply.body
    assert b"root:" not in reply.body


def test_the_nearest_name_is_said(served: Served) -> None:
    reply = ask(served.socket, "/api/v1/requests/own/files/rank0.kineto.json")
    assert "rank0.kineto.json.gz" in reply.json()["error"]["hint"]


@pytest.mark.parametrize(
    "number", ["nobody", "own2", "%00", "a" * 3000, "..", "own%20", quote("ö"), "1e9", "null"]
)
@pytest.mark.parametrize(
    ("method", "more"),
    [("GET", ""), ("GET", "/events"), ("GET", "/files/capture.json"), ("DELETE", "")],
)
def test_a_request_that_there_is_not(served: Served, number: str, method: str, more: str) -> None:
    reply = ask(served.socket, f"/api/v1/requests/{number}{more}", method=method)
    assert reply.status in {404, 405}  # a name with a dot is another path
    assert reply.json()["error"]["slug"] in {"no-such-request", "no-such-route", "wrong-method"}
    assert not any(allowed for *_, allowed in served.agent.acted)


def test_events_of_a_request_that_has_ended_are_one(served: Served) -> None:
    reply = ask(served.socket, "/api/v1/requests/own/events")
    assert reply.headers["content-type"].startswith("text/event-stream")
    # In chunks, as it is not known how long it will be.
    lines = [
        line
        for line in reply.body.decode().replace("\r\n", "\n").split("\n")
        if line.startswith(("event:", "data:"))
    ]
    assert lines[0] == "event: request"
    (data,) = [line.removeprefix("data: ") for line in lines if line.startswith("data:")]
    assert (
        msgspec.convert(json.loads(data), TraceRequest)
        == served.agent.trace_service.requests["own"]
    )


def test_cancelling_is_noted(served: Served) -> None:
    reply = ask(served.socket, "/api/v1/requests/open", method="DELETE")
    assert (reply.status, reply.json()["id"]) == (200, "open")
    assert [route for _, _, route, allowed in served.agent.acted if allowed] == [
        "/api/v1/requests/{id}"
    ]


@pytest.mark.parametrize(
    ("body", "slug"),
    [
        (b"", "wrong-request"),
        (b"null", "wrong-request"),
        (b"[]", "wrong-request"),
        (b"{}", "wrong-request"),
        (b'{"steps": 3}', "wrong-request"),
        (b'{"pids": [7], "steps": 3, "duration_s": 1}', "wrong-request"),
        (b'{"pids": [7]}', "wrong-request"),
        (b'{"pids": [0], "steps": 3}', "wrong-request"),
        (b'{"pids": [-1], "steps": 3}', "wrong-request"),
        (b'{"pids": [7.5], "steps": 3}', "wrong-request"),
        (b'{"pids": ["7"], "steps": 3}', "wrong-request"),
        (b'{"pids": [99999999999], "steps": 3}', "wrong-request"),
        (b'{"pids": [7], "steps": 0}', "wrong-request"),
        (b'{"pids": [7], "steps": -3}', "wrong-request"),
        (b'{"pids": [7], "steps": 1e99}', "wrong-request"),
        (b'{"pids": [7], "duration_s": 0}', "wrong-request"),
        (b'{"pids": [7], "duration_s": 1e9}', "too-much"),
        (b'{"pids": [7], "duration_s": NaN}', "wrong-request"),
        (b'{"pids": [7], "steps": 1000000}', "too-much"),
        (b'{"pids": [7], "steps": 3, "profilers": []}', "wrong-request"),
        (b'{"pids": [7], "steps": 3, "profilers": ["everything"]}', "wrong-request"),
        (b'{"pids": [7], "steps": 3, "profilers": ["memory"]}', "wrong-request"),
        (b'{"pids": [7], "steps": 3, "at_ns": 1}', "wrong-request"),
        (b'{"pids": [7], "steps": 3, "at_ns": -1}', "wrong-request"),
        (b'{"pids": [7], "steps": 3, "at_ns": 9223372036854775807}', "wrong-request"),
        (b'{"pids": [7], "steps": 3, "uid": 0}', "wrong-request"),
        (b'{"ranks": [-1], "steps": 3}', "wrong-request"),
        (b'{"pids": [7], "steps": 3, "max_processes": 0}', "wrong-request"),
        (b'{"job": "' + b"x" * 300 + b'", "steps": 3}', "wrong-request"),
        (b'{"pids": [7], "steps": 3', "wrong-request"),
        (b'{"pids": [7], "steps": true}', "wrong-request"),
        (b"\xff\xfe", "wrong-request"),
        (b"[" * 4000, "wrong-request"),
        (b'{"job": "\\ud800", "steps": 3}', "wrong-request"),
        (b'{"host": "elsewhere", "steps": 3}', "no-such-process"),
        (b'{"job": "no-such-job", "steps": 3}', "no-such-process"),
        (b'{"pids": [4194303], "steps": 3}', "no-such-process"),
        (b" " * 6000, "too-large"),
    ],
)
def test_what_is_asked_wrongly_is_refused_and_noted(served: Served, body: bytes, slug: str) -> None:
    before = list(served.agent.trace_service.requests)
    reply = ask(served.socket, "/api/v1/requests", method="POST", body=body)
    problem = reply.json()["error"]
    assert (reply.status // 100, problem["slug"]) == (4, slug), problem
    assert problem["message"]
    assert list(served.agent.trace_service.requests) == before
    assert not any(allowed for *_, allowed in served.agent.acted)
    assert not (served.root / str(os.geteuid()) / "incoming").exists()  # nothing is made for it


@pytest.mark.parametrize(
    "query",
    [
        "since=" + "9" * 400 + "d",
        "since=99999999999999999999d",
        "since=1e18",
        "since=-1e18",
        "since=0001-01-01",
        "since=9999-12-31",
        "since=0s",
    ],
)
def test_times_beyond_all_times_are_no_defect(served: Served, query: str) -> None:
    events = ask(served.socket, f"/api/v1/events?{query}")
    assert events.status == 200
    answer = ask(served.socket, f"/api/v1/query?metric=gpu_busy_ratio&{query}")
    assert answer.status in {200, 400}
    if answer.status == 200:
        question = served.agent.questions[-1]
        assert 0 <= question.since_ns <= question.until_ns < 2**63  # as databases hold them
    else:
        assert "`until` is before `since`" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        "9" * 400,
        "1e400",
        "-",
        "m",
        "10 m",
        "1m1m",
        "١٠x",
        "2026-02-30",
        "2026-01-31T25:00",
        "T",
        "1__0",
        "0x10",
        "\0",
    ],
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(HttpError) as refusal:
        parse_time(text, 10**18)
    assert refusal.value.slug == "wrong-request"


@pytest.mark.parametrize("now_ns", [0, 10**18, 2**62])
@pytest.mark.parametrize(
    "text",
    ["1s", "0.001s", "36500d", "0", "-5", "1e9", "1970-01-01", "2026-01-31T12:00+14:00", "5."],
)
def test_every_time_fits(text: str, now_ns: int) -> None:
    assert 0 <= parse_time(text, now_ns) <= 2**62


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/query?metric=gpu_busy_ratio&where=a=b=c", 200),
        ("/api/v1/query?metric=gpu_busy_ratio&where==", 200),
        ("/api/v1/query?metric=gpu_busy_ratio&where=,,", 200),
        ("/api/v1/query?metric=gpu_busy_ratio&by=,,job,", 200),
        ("/api/v1/query?metric=gpu_busy_ratio&raw=maybe", 400),
        ("/api/v1/query?metric=" + "x" * 2000, 404),
        ("/api/v1/query?metric=%00", 404),
        ("/api/v1/query?metric=gpu_busy_ratio&since=10m&since=1h", 200),
        ("/api/v1/stacks", 400),
        ("/api/v1/stacks?pid=0", 400),
        ("/api/v1/stacks?pid=x", 400),
        ("/api/v1/stacks?job=a&pid=3", 400),
        ("/api/v1/stacks?pid=99999999999999999999", 404),
        ("/api/v1/stacks?job=%F0%9F", 404),
        ("/api/v1/hangs?job=" + "j" * 1000, 200),
        ("/api/v1/hangs?jobs=a", 400),
        ("/api/v1/events?since=", 400),
        ("/api/v1/events?until=now", 400),
        ("/api/v1//jobs", 404),
        ("/API/V1/JOBS", 404),
    ],
)
def test_no_question_is_a_defect(served: Served, path: str, status: int) -> None:
    reply = ask(served.socket, path)
    assert reply.status == status, reply.body
    if status != 200:
        assert set(reply.json()["error"]) >= {"slug", "message"}
