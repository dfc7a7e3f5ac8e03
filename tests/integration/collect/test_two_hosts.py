"""Two hosts whose clocks are three seconds apart, each with an agent and a rank of stock PyTorch: one trace of both."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse

from support.waiting import until
from traceloom.agent.client import AgentClient
from traceloom.agent.http.answers import RequestError
from traceloom.agent.requests.model import Wanted
from traceloom.agent.uplink.messages import UsageRow
from traceloom.collect.host_routes import host_routes
from traceloom.collect.hosts import HostDesk, HostRecord
from traceloom.collect.plan import FleetRequest
from traceloom.collect.stitch import HostPart, stitch
from traceloom.errors import TraceloomError
from traceloom.link import link
from traceloom.read import load

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's"),
    pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (Debian: faketime)"),
]
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_gpt.py"
SMALL = [
    "--layers",
    "1",
    "--width",
    "32",
    "--heads",
    "2",
    "--batch",
    "2",
    "--context",
    "32",
    "--workers",
    "0",
    "--accumulate",
    "1",
    "--steps",
    "1000000",
]
JOB = f"two-hosts-{os.getpid()}"


class Records:
    """What a service writes down, in memory."""

    def __init__(self) -> None:
        self.members: dict[str, HostRecord] = {}
        self.requests: dict[str, FleetRequest] = {}
        self.tokens = {"first", "second"}

    def take_enrolment(self, token_sha256: str, now_ns: int) -> str | None:
        import hashlib

        matching = {token for token in self.tokens if hashlib.sha256(token.encode()).hexdigest() == token_sha256}
        self.tokens -= matching
        return "" if matching else None

    def hosts(self) -> Sequence[HostRecord]:
        return list(self.members.values())

    def put_host(self, record: HostRecord) -> None:
        self.members[record.host] = record

    def open_requests(self) -> Sequence[FleetRequest]:
        return [request for request in self.requests.values() if not request.ended]

    def put_request(self, request: FleetRequest) -> None:
        self.requests[request.id] = request


class Service:
    """The hosts' routes on loopback."""

    def __init__(self, folder: Path) -> None:
        self.records, self.stitching = Records(), threading.Event()
        self.rows: list[tuple[str, UsageRow]] = []
        self.desk = HostDesk(self.records, folder / "incoming", self._keep, lambda _: self.stitching.set())

        def refuse(_request: Request, error: Exception) -> JSONResponse:
            assert isinstance(error, RequestError)
            return JSONResponse({"error": {"slug": error.slug, "message": error.message}}, error.status)

        app = Starlette(routes=host_routes(self.desk), exception_handlers={RequestError: refuse})
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._serve()))
        self.thread.start()

    def _keep(self, host: str, rows: Sequence[UsageRow]) -> None:
        self.rows += [(host, row) for row in rows]

    async def _serve(self) -> None:
        await self.desk.start()
        await self.server.serve([self.socket])

    def submit(self, wanted: Wanted) -> FleetRequest:
        return asyncio.run_coroutine_threadsafe(self.desk.submit(wanted, "ada"), self.loop).result(30)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.desk.close(), self.loop).result(30)
        self.server.should_exit = True
        self.thread.join(30)


class Host:
    """An agent and a rank of the job, whose clock is `ahead` seconds ahead."""

    def __init__(self, folder: Path, url: str, name: str, token: str, ahead: int) -> None:
        self.folder = folder
        folder.mkdir()
        self.short = Path(tempfile.mkdtemp(prefix="tl"))  # names of sockets are short
        (folder / "agent.toml").write_text(
            f'host = "{name}"\n[paths]\nsocket = "{folder}/socket"\nhistory = "{folder}/agent.db"\n'
            f'audit = "{folder}/audit"\nkineto = "{self.short}/k"\n[collect]\nperiod = 1.0\n'
            f'[history]\ninterval = 1.0\n[fleet]\nserver = "{url}"\nheartbeat = 0.5\n'
        )
        self.environment = {
            **os.environ, "TRACELOOM_FLEET_TOKEN": token, "LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{ahead:+d}s",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "TRACELOOM_JOB": JOB,
        }  # fmt: skip
        self.log = (folder / "log").open("w")
        command = [sys.executable, "-m", "traceloom", "agent", "run", "--config", str(folder / "agent.toml")]
        self.agent = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=self.environment)
        self.rank: subprocess.Popen[bytes] | None = None
        self.client = AgentClient(folder / "socket", 30)
        until(self._answers)

    def _answers(self) -> bool:
        assert self.agent.poll() is None, (self.folder / "log").read_text()
        try:
            return bool(self.client.get("status"))
        except TraceloomError:
            return False

    def train(self, rank: int, port: int) -> None:
        variables = self.client.get("environment")["variables"]
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**self.environment, **variables, **{name: str(value) for name, value in place.items()}}
        self.rank = subprocess.Popen(
            [sys.executable, str(EXAMPLE), *SMALL], stdout=self.log, stderr=self.log, env=environment
        )

    def close(self) -> None:
        for process in (self.rank, self.agent):
            if process is not None:
                process.send_signal(signal.SIGKILL)  # an end in order needs sleeps, which fail under libfaketime
                process.wait(60)
        self.log.close()
        shutil.rmtree(self.short, ignore_errors=True)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, list[Host]]]:
    folder = tmp_path_factory.mktemp("fleet")
    service = Service(folder)
    hosts: list[Host] = []
    try:
        hosts += [
            Host(folder / name, service.url, name, token, ahead)
            for name, token, ahead in (("node1", "first", 0), ("node2", "second", 3))
        ]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank, host in enumerate(hosts):
            host.train(rank, port)
        until(lambda: all("step   9" in (host.folder / "log").read_text() for host in hosts), 180)
        until(lambda: _polling(service) == {"node1", "node2"}, 60)
        yield service, hosts
    finally:
        for host in hosts:
            host.close()
        service.close()


def _polling(service: Service) -> set[str]:
    """Hosts on which a process of the job polls."""
    return {
        host
        for host, now in service.desk.now.items()
        if any(process.job == JOB and process.polls and process.rank is not None for process in now.heartbeat.processes)
    }


def test_one_trace_of_both(fleet: tuple[Service, list[Host]], tmp_path: Path) -> None:
    service, hosts = fleet
    clocks = {host: now.heartbeat.clock for host, now in service.desk.now.items()}
    for host, ahead_ns in (("node1", 0), ("node2", 3_000_000_000)):
        clock = clocks[host]
        assert clock is not None
        assert abs(clock.offset_ns + ahead_ns) <= clock.error_ns + 1_000_000  # both ends are this machine
    request = service.submit(Wanted(job=JOB, steps=3, profilers=("timeline", "telemetry")))
    until(lambda: service.desk.requests[request.id].ended or service.stitching.is_set(), 180)
    now = service.desk.requests[request.id]
    assert now.state == "stitching", now.detail
    assert {host: (of.state, of.detail) for host, of in now.hosts.items()} == {
        "node1": ("uploaded", ""), "node2": ("uploaded", "")
    }  # fmt: skip
    parts = [
        HostPart(host=host, folder=service.desk.incoming / request.id / host, clock=progress.clock)
        for host, progress in now.hosts.items()
    ]
    assert stitch(parts, tmp_path / "job", {"id": request.id, "who": now.who}) == []
    session = load(tmp_path / "job", cache=False)
    session.check()
    assert session.ranks == (0, 1)
    assert {trace.meta.host for trace in session.traces} == {"node1", "node2"}
    starts = [trace.start_ns for trace in session.traces]
    assert abs(starts[0] - starts[1]) < 1_000_000_000, "each began by its own clock, three seconds apart"
    # Gradients are exchanged in every step and end together: what is left between the clocks is far below 50 ms.
    offsets = link(session).graph.ranks["clock_offset_ns"].to_list()
    print("offsets", offsets, starts)
    assert max(map(abs, offsets)) < 50_000_000, offsets
    assert set(session.telemetry["host"].unique()) == {"node1", "node2"}


def test_who_does_not_belong_is_refused(fleet: tuple[Service, list[Host]], tmp_path: Path) -> None:
    from traceloom.agent.uplink.client import ServiceClient, ServiceError
    from traceloom.agent.uplink.messages import Enrolled, Enrolment, WorkAnswer

    service, _ = fleet
    stranger = ServiceClient(service.url, credential="nothing")
    for token in ("first", "unknown"):  # used up, and none
        with pytest.raises(ServiceError) as error:
            stranger.post("agents/enrol", Enrolment(token=token, host="node3"), Enrolled)
        assert (error.value.slug, error.value.status) == ("unknown-token", 401)
    with pytest.raises(ServiceError) as error:
        stranger.get("agents/node1/work?wait=0", WorkAnswer)
    assert error.value.slug == "unknown-host"
