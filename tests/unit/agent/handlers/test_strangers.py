"""Nothing that an agent answers to one user says anything of another one, whichever route is asked and however."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from support.agent_server import ANNA, BERT, SmallAgent, full_board
from traceloom.agent.accelerators.backend import Device
from traceloom.agent.collectors.host import OomKill
from traceloom.agent.config import Config, MetricRule
from traceloom.agent.handlers.telemetry import ROUTES, AgentRequest, Route
from traceloom.agent.hangs.detector import Hang, HungProcess, JobKey
from traceloom.agent.hangs.service import HangRecord
from traceloom.agent.metrics import METRICS
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.publishers import render_openmetrics
from traceloom.agent.snapshot import VisibleSnapshot
from traceloom.agent.traces.requests import TraceRequest, TraceSpec, TraceTarget, TriggerCause
from traceloom.agent.triggers.store import LastFiring, LastRefusal
from traceloom.server.access import Caller
from traceloom.server.problem import HttpError

NEEDLE = "berts"  # stands in every text of Bert's
COMMAND = "with-what"  # stands in every command
PEERS = {
    "anna": Caller(name=f"uid {ANNA}", uid=ANNA, pid=11, sees="own"),
    "loopback": Caller(name="tcp 127.0.0.1", sees="host"),
    "reader": Caller(name="token prometheus", sees="all"),
    "root": Caller(name="uid 0", uid=0, pid=1, sees="all", acts=True, commands=True),
}


def renamed(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Labels with all that is Bert's called so."""
    words = {"slurm-8": f"{NEEDLE}-job", "/slurm-8": f"/{NEEDLE}-job", "22@100": f"{NEEDLE}@100"}
    return tuple(
        words.get(label, label).replace("python b.py", f"{NEEDLE} {COMMAND}") for label in labels
    )


def of_two_users() -> SmallAgent:
    """An agent whose every answer is about Anna and Bert."""
    host_snapshot = full_board()
    for sheet in host_snapshot.results.values():
        sheet.values = {
            (name, renamed(labels)): value for (name, labels), value in sheet.values.items()
        }
        sheet.histograms = {
            (name, renamed(labels)): each._replace(labels=renamed(each.labels))
            for (name, labels), each in sheet.histograms.items()
        }
    words = {
        name: f"{NEEDLE}-{name}"
        for name in ("job", "name", "user", "account", "partition", "namespace", "pod")
    }
    owner = Owner(
        **words, container=f"{NEEDLE}-c", rank=1, labels={NEEDLE: NEEDLE}, sources={"job": NEEDLE}
    )
    of_bert = Process(
        key=f"{NEEDLE}@100",
        pid=22,
        start_ticks=100,
        started_ns=1,
        parent_pid=1,
        uid=BERT,
        owner=owner,
        command=f"{NEEDLE} {COMMAND}",
        cgroup=f"/{NEEDLE}-job",
        declared={"TRACELOOM_X": NEEDLE},
        devices=("GPU-1",),
        unreadable=f"{NEEDLE} cannot be read",
    )
    anna = next(process for process in host_snapshot.processes.values() if process.uid == ANNA)
    anna = msgspec.structs.replace(anna, command=f"{COMMAND} of anna")
    host_snapshot.processes = {anna.key: anna, of_bert.key: of_bert}
    host_snapshot.devices["GPU-1"] = Device(
        uuid="GPU-1", index="1", vendor="nvidia", model="H100", owner={"pod": f"{NEEDLE}-pod"}
    )
    host_snapshot.oom_kills.append(
        OomKill(at_ns=9**17, cgroup=f"/{NEEDLE}-job", job=f"{NEEDLE}-job", uid=BERT, kills=1)
    )
    agent = SmallAgent(
        Config(triggers=(MetricRule(name="hot", metric="gpu_busy_ratio", above=0.5),)),
        host_snapshot,
    )
    counts = agent.triggers.counts["hot"]
    counts.last = LastFiring(at_ns=1, request="r", target=f"{NEEDLE}-job", what=NEEDLE, uid=BERT)
    counts.last_refusal = LastRefusal(
        at_ns=1, target=NEEDLE, what=NEEDLE, uid=BERT, reason="cooldown", detail=NEEDLE
    )
    member = HungProcess(key=of_bert.key, pid=22, rank=1, steps=9)
    hang = Hang(
        job=f"{NEEDLE}-job", uid=BERT, processes=(member,), since_ns=1, seen_ns=61, median_s=0.5
    )
    agent.hangs.records.append(
        HangRecord(id=NEEDLE, hang=hang, sentence=NEEDLE, directory=f"/{NEEDLE}", files=(NEEDLE,))
    )
    agent.hangs.watch.hangs[hang.key] = hang
    agent.hangs.watch.stepping = {JobKey(f"{NEEDLE}-job", BERT)}
    target = TraceTarget(
        request=NEEDLE, process=of_bert.key, profiler="timeline", pid=22, uid=BERT, stem=NEEDLE
    )
    agent.trace_service.requests[NEEDLE] = TraceRequest(
        id=NEEDLE,
        who=NEEDLE,
        uid=BERT,
        asked_ns=1,
        boot_id="",
        spec=TraceSpec(job=NEEDLE, steps=3),
        targets=[target],
        files=[f"{NEEDLE}.json"],
        trigger=TriggerCause(rule="hot", target=NEEDLE, what=NEEDLE),
        done=True,
    )
    return agent


@pytest.fixture(scope="module")
def agent() -> SmallAgent:
    return of_two_users()


def answer(agent: SmallAgent, peer: Caller, route: Route, query: str = "", **path: str) -> str:
    """The answer as text, a refusal too."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def run() -> str:
        scope = {
            "type": "http",
            "query_string": query.encode(),
            "headers": [],
            "path_params": path,
            "state": {"peer": peer},
        }
        try:
            result = route.answers(AgentRequest(agent, Request(scope, receive)))
            if inspect.isawaitable(result):
                result = await result
        except HttpError as error:
            return f"refused: {error.slug} {error.message} {error.hint}"
        if hasattr(result, "body_iterator"):
            return "".join([str(piece) async for piece in result.body_iterator])
        return msgspec.json.encode(result).decode()

    return asyncio.run(run())


def questions() -> Iterator[tuple[Route, str]]:
    """All that can be asked without a body, with what narrows it down; nothing names what is Bert's."""
    for route in ROUTES:
        if route.method != "GET" or "{" in route.path:
            continue
        if route.path.endswith("/query"):
            for metric in METRICS.values():
                yield route, f"metric={metric.name}"
                for label in metric.labels:
                    yield route, f"metric={metric.name}&by={label}"
        elif route.path.endswith("/stacks"):
            yield from (
                (route, query) for query in ("pid=22", "job=slurm-7", "job=nobodys", "pid=11")
            )
        else:
            yield route, ""


@pytest.mark.parametrize("who", ["anna", "loopback"])
def test_no_answer_says_anything_of_another_user(agent: SmallAgent, who: str) -> None:
    texts = {
        (route.path, query): answer(agent, PEERS[who], route, query) for route, query in questions()
    }
    texts["/metrics", ""] = render_openmetrics(
        VisibleSnapshot(agent.host_snapshot, PEERS[who]), Config(compat=("dcgm",))
    )[0].decode()
    assert [asked for asked, text in texts.items() if NEEDLE in text] == []
    if who == "loopback":  # nor of anybody
        assert [
            asked
            for asked, text in texts.items()
            if COMMAND in text or ("slurm-7" in text and not asked[1])
        ] == []


def test_no_answer_to_who_only_reads_has_a_command_or_a_place_in_a_program(
    agent: SmallAgent,
) -> None:
    reader = PEERS["reader"]
    texts = {
        (route.path, query): answer(agent, reader, route, query) for route, query in questions()
    }
    assert [
        asked for asked, text in texts.items() if COMMAND in text or "/a/train.py" in text
    ] == []
    assert (
        COMMAND
        not in render_openmetrics(
            VisibleSnapshot(agent.host_snapshot, reader), Config(compat=("dcgm",))
        )[0].decode()
    )


def test_root_is_told_all_of_it(agent: SmallAgent) -> None:
    """What the others are not told is there."""
    texts = {route.path: answer(agent, PEERS["root"], route, query) for route, query in questions()}
    silent = {path for path, text in texts.items() if NEEDLE not in text}
    assert silent <= {
        "/healthz",
        "/api/v1/status",
        "/api/v1/doctor",
        "/api/v1/query",
        "/api/v1/events",
        "/api/v1/clock",
        "/api/v1/environment",
        "/api/v1/stacks",
    }
    assert COMMAND in texts["/api/v1/processes"]
    assert NEEDLE in answer(
        agent, PEERS["root"], *next(q for q in questions() if q[1] == "metric=job_info")
    )
    assert "/a/train.py" in answer(
        agent, PEERS["root"], *next(q for q in questions() if q[1] == "pid=22")
    )


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("who", ["anna", "loopback", "reader"])
def test_a_request_of_another_is_as_one_that_there_is_not(
    agent: SmallAgent, who: str, method: str
) -> None:
    """Nor can it be cancelled."""
    for route in ROUTES:
        if "{id}" not in route.path or route.method != method:
            continue
        name = {"name": f"{NEEDLE}.json"} if "{name}" in route.path else {}
        of_another, of_nobody = (
            answer(agent, PEERS[who], route, id=number, **name) for number in (NEEDLE, "nobodys")
        )
        assert of_another == of_nobody
        assert of_another.startswith("refused: ")
    assert agent.trace_service.requests[NEEDLE].targets[0].state == "queued"


@pytest.mark.parametrize(
    ("path", "label", "guess", "other"),
    [
        ("/api/v1/stacks", "job", f"{NEEDLE}-job", "nobodys"),
        ("/api/v1/stacks", "pid", "22", "23"),
        ("/api/v1/hangs", "job", f"{NEEDLE}-job", "nobodys"),
    ],
)
def test_what_is_guessed_is_answered_as_what_is_made_up(
    agent: SmallAgent, path: str, label: str, guess: str, other: str
) -> None:
    """Who guesses the name of a job, or a pid, does not learn whether it is there."""
    (route,) = (route for route in ROUTES if route.path == path)
    texts = [answer(agent, PEERS["anna"], route, f"{label}={value}") for value in (guess, other)]
    assert texts[0].replace(guess, other) == texts[1]
