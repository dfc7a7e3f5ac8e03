"""Two hosts whose clocks are three seconds apart, each with an agent and a rank of stock PyTorch: one trace of both."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.faketime import ahead_by, needs_faketime
from support.small_example import ENDLESS, PACED
from support.two_hosts import check_trace_of_both
from support.waiting import until
from traceloom.agent.fleet_link.client import ServiceClient, ServiceError
from traceloom.agent.fleet_link.protocol import Enrolment, HostCredentials, WorkResponse
from traceloom.cli.upload import FleetClient
from traceloom.errors import TraceloomError
from traceloom.server.client import AgentClient

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's"),
    needs_faketime,
]
JOB = f"two-hosts-{os.getpid()}"


class Service:
    """`traceloom serve` on loopback, with its files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config")}
        self.log = (folder / "serve.log").open("w")
        command = [sys.executable, "-m", "traceloom", "serve", "--store", str(folder / "store")]
        self.process = subprocess.Popen(
            [*command, "--address", "127.0.0.1:0"],
            stdout=self.log,
            stderr=self.log,
            env=self.environment,
        )
        match = until(lambda: re.search(r"answers at (\S+),", (folder / "serve.log").read_text()))
        self.url = match[1]

    def run(self, *words: str, code: int = 0) -> str:
        """A command of ours; what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "traceloom", *words, "--server", self.url],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    def ask(self, *words: str) -> Any:
        return json.loads(self.run("fleet", *words, "--json"))

    def client(self) -> FleetClient:
        """Who asks it without a process of its own."""
        token = (
            Path(self.environment["XDG_CONFIG_HOME"])
            / "traceloom"
            / f"fleet-token-{self.url.rpartition(':')[2]}"
        )
        return FleetClient(self.url, token.read_text().strip())

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
        self.log.close()


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
        (folder / "train.py").write_text(PACED, encoding="utf-8")
        self.environment = {
            **os.environ,
            **ahead_by(ahead),
            "TRACELOOM_FLEET_TOKEN": token,
            "TRACELOOM_JOB": JOB,
        }
        self.log = (folder / "log").open("w")
        command = [
            sys.executable,
            "-m",
            "traceloom",
            "agent",
            "run",
            "--config",
            str(folder / "agent.toml"),
        ]
        self.agent = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=self.environment
        )
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
        place = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = {
            **self.environment,
            **variables,
            **{name: str(value) for name, value in place.items()},
        }
        self.rank = subprocess.Popen(
            [sys.executable, str(self.folder / "train.py"), *ENDLESS],
            stdout=self.log,
            stderr=self.log,
            env=environment,
        )

    def close(self) -> None:
        for process in (self.rank, self.agent):
            if process is not None:
                process.send_signal(
                    signal.SIGKILL
                )  # an end in order needs sleeps, which fail under libfaketime
                process.wait(60)
        self.log.close()
        shutil.rmtree(self.short, ignore_errors=True)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("fleet")
    service = Service(folder)
    hosts: list[Host] = []
    try:
        for name, ahead in (("node1", 0), ("node2", 3)):
            token = service.run("fleet", "token", "enrol", name).strip()
            hosts.append(Host(folder / name, service.url, name, token, ahead))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        for rank, host in enumerate(hosts):
            host.train(rank, port)
        until(lambda: "step   9" in (hosts[0].folder / "log").read_text(), 180)  # what rank 0 says
        until(
            lambda: (
                [
                    job["traceable"] >= 2
                    for job in service.client().get("jobs")["jobs"]
                    if job["job"] == JOB
                ]
                == [True]
            )
        )
        yield service
    finally:
        for host in hosts:
            host.close()
        service.close()


def test_one_trace_of_both(fleet: Service, tmp_path: Path) -> None:
    for host in fleet.ask("hosts")["hosts"]:
        ahead_ns = 3_000_000_000 if host["host"] == "node2" else 0
        # Service and hosts are this machine: what is left is what the error says, and what libfaketime rounds.
        assert abs(host["clock_offset_ns"] + ahead_ns) <= host["clock_error_ns"] + 1_000_000
    # Where a machine is so busy that a rank misses the instant it is traced later, alone: that is tried again here.
    for number in range(4):
        output = tmp_path / f"job{number}"
        words = [
            "trace",
            "--job",
            JOB,
            "--steps",
            "3",
            "--profilers",
            "timeline,telemetry",
            "-o",
            str(output),
        ]
        request = json.loads(fleet.run(*words, "--json"))
        targets = json.loads((output / "capture.json").read_text())["request"]["targets"]
        if all(target["attempt"] == 1 for target in targets):
            break
    assert (request["state"], request["detail"]) == ("done", "")
    assert {host["host"]: host["state"] for host in request["hosts"]} == {
        "node1": "uploaded",
        "node2": "uploaded",
    }

    check_trace_of_both(output)
    [capture] = [
        capture
        for capture in fleet.ask("captures")["captures"]
        if capture["id"] == request["capture"]
    ]
    assert (capture["job"], capture["state"]) == (JOB, "committed")
    fleet.run("fleet", "report", capture["id"], "-o", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert "node1" in page
    assert "node2" in page


def test_who_does_not_belong_is_refused(fleet: Service, request: pytest.FixtureRequest) -> None:
    stranger = ServiceClient(fleet.url, credential="nothing")
    request.addfinalizer(stranger.close)
    with pytest.raises(ServiceError) as error:
        stranger.post("agents/enrol", Enrolment(token="unknown", host="node3"), HostCredentials)
    assert (error.value.slug, error.value.status) == ("unknown-token", 401)
    token = fleet.run("fleet", "token", "enrol").strip()
    with pytest.raises(ServiceError) as error:
        stranger.post("agents/enrol", Enrolment(token=token, host="node1"), HostCredentials)
    assert error.value.slug == "host-exists"
    with pytest.raises(ServiceError) as error:
        stranger.get("agents/node1/work?wait=0", WorkResponse)
    assert error.value.slug == "unknown-host"
