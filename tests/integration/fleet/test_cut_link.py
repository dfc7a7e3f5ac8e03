"""Two hosts whose clocks are three seconds apart, each with an agent and a rank of stock PyTorch: one trace of both.

Hosts are namespaces that are joined by a bridge, on which the service answers with TLS; then the link of one is cut.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.faketime import ahead_by, needs_faketime
from support.namespaces import Namespaces, NamespacesError
from support.small_example import ENDLESS, PACED
from support.two_hosts import check_trace_of_both
from support.waiting import until
from traceloom.errors import TraceloomError
from traceloom.server.client import AgentClient

pytestmark = [
    pytest.mark.torch,
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's"),
    needs_faketime,
    pytest.mark.skipif(
        shutil.which("openssl") is None, reason="openssl is not installed, which makes certificates"
    ),
]
HASTY = Path(__file__).resolve().parents[2] / "support" / "hasty_service.py"
JOB = f"cut-link-{os.getpid()}"
PARTIAL, FAILED = 4, 3  # exit codes


class Service:
    """The service on the hub, with TLS, with its files in a folder; it waits for hosts for half a minute."""

    def __init__(self, folder: Path, network: Namespaces) -> None:
        self.network = network
        self.certificate, key = folder / "fleet.pem", folder / "fleet.key"
        making = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=fleet"
        names = [
            "-addext",
            f"subjectAltName=IP:{network.address}",
            "-out",
            str(self.certificate),
            "-keyout",
            str(key),
        ]
        subprocess.run([*making.split(), *names], check=True, capture_output=True)
        self.environment = {
            **os.environ,
            "XDG_CONFIG_HOME": str(folder / "config"),
            "SSL_CERT_FILE": str(self.certificate),
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        }
        address = f"{network.address}:{network.port}"
        self.url = f"https://{address}"
        self.log = folder / "serve.log"
        words = [
            "--store",
            str(folder / "store"),
            "--certificate",
            str(self.certificate),
            "--key",
            str(key),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                network.on(
                    "hub",
                    [sys.executable, str(HASTY), *words, "--address", address, "--workers", "1"],
                ),
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    def is_ready(self) -> bool:
        """Whether it answers; its own user's commands then have its token."""
        assert self.process.poll() is None, self.log.read_text()
        if f"answers at {self.url}," not in self.log.read_text():
            return False
        token = (
            Path(
                self.environment["XDG_CONFIG_HOME"],
                "traceloom",
                f"fleet-token-{self.url.rpartition(':')[2]}",
            )
            .read_text()
            .strip()
        )
        self.environment |= {"TRACELOOM_TOKEN": token}
        return True

    def command(self, *words: str) -> list[str]:
        """A command of ours, beside the service."""
        return self.network.on(
            "hub", [sys.executable, "-m", "traceloom", *words, "--server", self.url]
        )

    def run(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        """What such a command prints."""
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, env=self.environment
        )
        assert done.returncode in codes, done.stderr
        return done.stdout

    def ask(self, *words: str) -> Any:
        return json.loads(self.run("fleet", *words, "--json"))

    def close(self) -> None:
        self.network.end("hub")
        self.process.wait(60)


class Host:
    """An agent and a rank of the job, whose clock is `ahead` seconds ahead."""

    def __init__(self, folder: Path, service: Service, name: str, ahead: int) -> None:
        self.folder, self.name, self.network = folder, name, service.network
        self.address = self.network.host(name)
        token = service.run("fleet", "token", "enrol", name).strip()
        folder.mkdir()
        self.short = Path(tempfile.mkdtemp(prefix="tl"))  # names of sockets are short
        (folder / "agent.toml").write_text(
            f'host = "{name}"\n[paths]\nsocket = "{folder}/socket"\nhistory = "{folder}/agent.db"\n'
            f'audit = "{folder}/audit"\nkineto = "{self.short}/k"\n[collect]\nperiod = 1.0\n[history]\ninterval = 1.0\n'
            f'[fleet]\nserver = "{service.url}"\nca = "{service.certificate}"\nheartbeat = 0.5\n'
        )
        self.shifted = ahead_by(ahead)
        self.environment = {
            **os.environ,
            "TRACELOOM_FLEET_TOKEN": token,
            "TRACELOOM_JOB": JOB,
            "GLOO_SOCKET_IFNAME": self.network.interface,
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        }
        self.log = folder / "log"
        words = ["agent", "run", "--config", str(folder / "agent.toml")]
        self.processes = [self._begin([sys.executable, "-m", "traceloom", *words], self.shifted)]
        self.client = AgentClient(folder / "socket", 30)

    def is_ready(self) -> bool:
        """Whether its agent answers."""
        assert self.processes[0].poll() is None, self.log.read_text()
        try:
            return bool(self.client.get("status"))
        except TraceloomError:
            return False

    def train(self, number: int, master: str) -> None:
        """Begin its rank, by torchrun, whose sleeps fail where its own clock is shifted."""
        words = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--node-rank",
            str(number),
            "--no-python",
        ]
        words += ["--master-addr", master]
        shifted = ["env", *(f"{name}={value}" for name, value in self.shifted.items())]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words,
            *shifted,
            sys.executable,
            "-c",
            PACED,
        ]
        self.processes.append(
            self._begin([*command, *ENDLESS], self.client.get("environment")["variables"])
        )

    def trains(self) -> bool:
        """True while its rank has not ended."""
        assert self.processes[1].poll() is None, self.log.read_text()
        return True

    def _begin(self, command: list[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.network.on(self.name, command),
                stdout=log,
                stderr=log,
                env={**self.environment, **more},
            )

    def close(self) -> None:
        self.network.end(
            self.name
        )  # with the ranks, which torchrun puts into sessions of their own
        for process in self.processes:
            process.wait(60)
        shutil.rmtree(self.short, ignore_errors=True)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("fleet")
    try:
        network = Namespaces()
    except NamespacesError as error:
        pytest.skip(f"no namespaces can be made here: {error}")
    with ExitStack() as stack:
        stack.callback(network.close)
        service = Service(folder, network)
        stack.callback(service.close)
        until(service.is_ready, 180)
        hosts: list[Host] = []
        for name, ahead in (("node1", 0), ("node2", 3)):
            hosts.append(Host(folder / name, service, name, ahead))
            stack.callback(hosts[-1].close)
        until(lambda: all(host.is_ready() for host in hosts), 180)
        for number, host in enumerate(hosts):
            host.train(number, hosts[0].address)
        until(lambda: "step   9" in hosts[0].log.read_text(), 180)  # what rank 0 says
        until(
            lambda: (
                [job["traceable"] >= 2 for job in service.ask("jobs")["jobs"] if job["job"] == JOB]
                == [True]
            ),
            180,
        )
        yield service


def test_one_trace_of_both(fleet: Service, tmp_path: Path) -> None:
    for host in fleet.ask("hosts")["hosts"]:
        ahead_ns = 3_000_000_000 if host["host"] == "node2" else 0
        # Service and hosts are this machine: what is left is what the error says, and what libfaketime rounds.
        assert abs(host["clock_offset_ns"] + ahead_ns) <= host["clock_error_ns"] + 1_000_000
    # Where a machine is so busy that a rank misses the instant it is traced later, alone, or its host is left out: that
    # is tried again here.
    for number in range(6):
        output = tmp_path / f"job{number}"
        # For a time: where a machine is so busy that nobody sees the steps go on, telemetry is refused for a number of them.
        words = [
            "trace",
            "--job",
            JOB,
            "--duration",
            "4s",
            "--profilers",
            "timeline,telemetry",
            "-o",
            str(output),
        ]
        request = json.loads(fleet.run(*words, "--json", codes=(0, PARTIAL, FAILED)))
        if request["state"] == "done":
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


def test_a_host_whose_link_is_cut_is_missing_by_name_and_comes_back(fleet: Service) -> None:
    words = ["trace", "--job", JOB, "--duration", "2s", "--profilers", "timeline", "--json"]
    for _ in range(3):  # on a machine that is busy the other host may be too late as well
        before = {request["id"] for request in fleet.ask("requests")["requests"]}
        with subprocess.Popen(
            fleet.command(*words), stdout=subprocess.PIPE, env=fleet.environment
        ) as asking:

            def begins_ns(before: set[str] = before) -> int:
                requests = fleet.ask("requests")["requests"]
                return max(
                    (request["start_ns"] for request in requests if request["id"] not in before),
                    default=0,
                )

            start_ns = until(begins_ns, 180)
            until(lambda start_ns=start_ns: time.time_ns() > start_ns + 500_000_000)
            fleet.network.link("node2", "down")
            text, _ = asking.communicate(timeout=300)
        fleet.network.link("node2", "up")
        result = json.loads(text)
        if result["state"] == "partial":
            break
    assert result["detail"] == "node2 (rank 1): it did not end in time"
    assert {host["host"]: host["state"] for host in result["hosts"]} == {
        "node1": "uploaded",
        "node2": "failed",
    }

    mended_ns = time.time_ns()
    until(lambda: all(host["heard_ns"] > mended_ns for host in fleet.ask("hosts")["hosts"]), 180)
    states: list[str] = []
    while "done" not in states and len(states) < 4:
        states.append(json.loads(fleet.run(*words, codes=(0, PARTIAL, FAILED)))["state"])
    assert states[-1] == "done", states
