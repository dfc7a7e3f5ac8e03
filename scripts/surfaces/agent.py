"""The agent: its routes for every role, from a snapshot that does not change, and the verbs that call
it.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from answers import Describer
from commands import Caller, lines_of, run_lines
from routes import Answer, Page, Routes, ask_routes
from static import every_parser, sql

from support.agent_server import ANNA, SmallAgent, listening
from support.prometheus import free_port
from support.waiting import until
from traceloom.agent.config import Config
from traceloom.agent.handlers.app import build_app
from traceloom.agent.handlers.telemetry import ROUTES as AGENT_ROUTES
from traceloom.errors import TraceloomError
from traceloom.server.access import Caller as Peer
from traceloom.server.client import AgentClient
from traceloom.server.problem import METRICS_PATH, HttpError

KEYS = frozenset({"pid", "ppid", "monotonic_ns", "seconds", "uptime_seconds"})
MASKS = (
    (re.compile(r"\b\d{1,2} [A-Z][a-z]{2} \d\d:\d\d:\d\d\b|\b\d{1,2}:\d\d:\d\d\b"), "<time>"),
    (re.compile(r"\btraceloom-[0-9a-f]{16}-"), "traceloom-<socket>-"),
    (re.compile(r"\bpid \d{3,}"), "pid <pid>"),
    (re.compile(r'\bUID(=|": "?)\d+'), r"UID\1<uid>"),
)


class _Loop:
    """Asks an application in this process."""

    def __init__(self, app: Any, peers: Mapping[str, Peer | HttpError]) -> None:
        self.app, self.peers, self.loop = app, peers, asyncio.new_event_loop()

    def __call__(self, method: str, path: str, who: str, content: bytes | None) -> Answer:
        return self.loop.run_until_complete(
            asyncio.wait_for(self._answer(method, path, who, content), 60)
        )

    async def _answer(self, method: str, path: str, who: str, content: bytes | None) -> Answer:
        place, _, query = path.partition("?")
        peer = self.peers[who]

        def identify(_headers: object) -> Peer:
            if isinstance(peer, HttpError):
                raise peer
            return peer

        headers = [(b"host", b"agent"), (b"content-length", str(len(content or b"")).encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": place,
            "raw_path": place.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {"identify": identify},
        }
        sent: list[dict[str, Any]] = []
        messages = [{"type": "http.request", "body": content or b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        headers_of = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(
            sent[0]["status"],
            headers_of,
            b"".join(message.get("body", b"") for message in sent[1:]),
        )


def make_peers() -> dict[str, Peer | HttpError]:
    """Everybody who may ask an agent."""
    refused = HttpError(401, "a token is needed", slug="unknown-token", hint="")
    user = Peer(name="uid 4001", uid=ANNA, pid=11, sees="own")
    return {
        "nobody": refused,
        "loopback": Peer(name="tcp 127.0.0.1", sees="host"),
        "user": user,
        "read": Peer(name="token a", sees="all"),
        "all": Peer(name="token b", sees="all", acts=True, commands=True),
        "root": Peer(name="uid 0", uid=0, pid=1, sees="all", acts=True, commands=True),
    }


BASE: dict[str, str] = {
    "top": "--once",
    "query": "gpu_busy_ratio",
    "learn": "run --job slurm-7",
    "stacks": "--job slurm-7",
}
MORE = """
    agent ps --job slurm-7
    agent top --once --interval 0.1 --job slurm-8
    agent query
    agent query gpu_busy_ratio --since 1h --until 1m --by job --where device=0 --raw
    agent query gpu_bussy_ratio
    agent events --job slurm-7 --since 1h
    agent stacks
    agent stacks --pid 11 --native
    agent hangs --job slurm-7
    agent env --flight-recorder
    trace --list
    trace --list --json -q --debug
    trace --cancel 0123456789ab
    trace --job slurm-7
    trace --steps 3
    trace --job none --steps 3 -o out/t
    trace --job slurm-7 --steps 3 --at yesterday -o out/t
    trace --job slurm-7 --duration 500ms -o run
    trace --pid 4711 --attach --steps 3 -o out/t --config agent.toml
    trace --job slurm-7 --rank 7 --steps 3 --profilers timeline,stacks -o out/t
    trace --job slurm-7 --steps 3 --profilers nonsense -o out/t
"""
"""`--socket` is added."""

RUN = """
    agent run --config missing.toml --debug
    agent run --tcp 0.0.0.0:9465 --socket {folder}/a.sock
    agent run --server http://192.0.2.1 --token-file missing --socket {folder}/a.sock
"""


def commands() -> list[str]:
    """Every action of `traceloom agent` but `run`, in words and as JSON, and what else there is to
    say.
    """
    lines = []
    for name in every_parser():
        verb, _, action = name.partition(" ")
        if verb == "agent" and action and action != "run":
            base = f"{name} {BASE.get(action, '')}".strip()
            lines += [
                f"{base} --socket {{socket}}",
                f"{base} --config agent.toml --json -q --debug",
            ]
    lines += [
        line if "--config" in line else f"{line} --socket {{socket}}" for line in lines_of(MORE)
    ]
    return [*lines, *lines_of(RUN)]


def describe(folder: Path, describer: Describer) -> dict[str, list[str]]:
    """The agent: its routes, and the verbs that ask it."""
    agent = SmallAgent(Config(host="made"))
    everybody = make_peers()
    routes = Routes("agent", AGENT_ROUTES, {"requests": "0123456789ab", "files": "a.json"})
    extra = Routes("agent", [Page(METRICS_PATH), Page("/none")], {})
    ask = _Loop(build_app(agent), everybody)
    lines = ask_routes(routes, list(everybody), "root", ask, describer) + ask_routes(
        extra, list(everybody), "root", ask, describer
    )
    with (
        tempfile.TemporaryDirectory(prefix="tl") as short,
        listening(agent, Path(short)) as listeners,
    ):
        places = {"socket": str(listeners.socket_path), "folder": short}
        (folder / "agent.toml").write_text(
            f'[paths]\nsocket = "{listeners.socket_path}"\n', encoding="utf-8"
        )
        called = run_lines(Caller(folder, describer), commands(), places)
        called = [line.replace(short, "$SHORT") for line in called]
    measured = Describer(describer.masker, measured=True)
    run = _real_agent(measured)
    return {
        "routes-agent.txt": [*lines, *describer.shapes.lines()],
        "commands-agent.txt": [*called, *run, *measured.shapes.lines()],
    }


def _real_agent(describer: Describer) -> list[str]:
    """`agent run`: what it prints, which metrics and routes it has with two simulated devices, and
    its databases.
    """
    with tempfile.TemporaryDirectory(prefix="tl") as short:
        home, port = Path(short), free_port()
        names = ("socket", "history", "audit", "kineto", "requests", "hangs", "traces")
        paths = "".join(f'{name} = "{home}/{name}"\n' for name in names)
        (home / "agent.toml").write_text(
            f"[paths]\n{paths}[collect]\nperiod = 0.2\n[history]\ninterval = 0.5\n"
        )
        words = [
            "agent",
            "run",
            "--simulate",
            "2",
            "--tcp",
            f"127.0.0.1:{port}",
            "--compat",
            "dcgm",
            "--config",
            str(home / "agent.toml"),
            "--socket",
            str(home / "socket"),
        ]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "traceloom", *words], stdout=log, stderr=log
            )
        client = AgentClient(home / "socket", 30)

        def answers() -> bool:
            assert process.poll() is None, (home / "log").read_text()
            try:
                state = client.get("status")
            except TraceloomError:
                return False
            return any(state["history"].values()) and all(of["runs"] for of in state["collectors"])

        try:
            until(answers)
            for route in ("status", "devices", "clock", "environment", "triggers", "hangs"):
                describer.shapes.add(
                    f"agent run, {route}", describer.masker.document(client.get(route))
                )
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("GET", "/metrics")
            published = connection.getresponse().read().decode()
            connection.close()
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        said = list(describer.text((home / "log").read_text().replace(short, "$SHORT")))
        series = sorted(set(re.findall(r"(?m)^(\w*(?:gpu|GPU|DCGM)\w*)[{ ]", published)))
        bases = [line for name in ("history", "requests") for line in sql(str(home / name))]
    return [
        "== traceloom agent run --simulate 2 --compat dcgm --tcp ADDRESS --config FILE --socket PATH",
        f"exit code {code}",
        *said,
        f"series over TCP: {' '.join(series)}",
        *bases,
        "",
    ]


def uncovered() -> list[str]:
    """Routes, parameters and fields without a case."""
    return [*Routes("agent", AGENT_ROUTES, {"requests": "", "files": ""}).uncovered()]


def calls() -> list[list[str]]:
    """The words of all calls, and of what runs until it is stopped."""
    return [
        shlex.split(line)
        for line in [
            *commands(),
            "agent run --simulate 2 --tcp X --compat dcgm --config X --socket X --server X --token-file X -q",
        ]
    ]
