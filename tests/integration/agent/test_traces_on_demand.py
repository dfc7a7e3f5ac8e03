"""Traces of a real job that `agent env` alone prepared: by rank, by job, across a kill of the agent."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.small_example import ENDLESS, PACED
from traceloom.cli import main
from traceloom.errors import TraceloomError
from traceloom.formats import load
from traceloom.server.client import AgentClient

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is Linux's"),
]
ANNA, BERT = 40_001, 40_002
WAIT_S = 180.0


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.1)
    return value


class Host:
    """An agent and a job of two ranks that goes on until the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "agent.toml").write_text(
            "[paths]\n"
            + "".join(
                f'{name} = "{folder}/{name}"\n'
                for name in ("socket", "history", "audit", "kineto", "requests", "traces")
            )
            + "[collect]\nperiod = 1.0\n",
            encoding="utf-8",
        )
        self.client = AgentClient(folder / "socket", 60)
        self.log = (folder / "log").open("a", encoding="utf-8")
        self.agent = self.start()
        variables = self.client.get("environment")["variables"]
        self.job_name = f"traced-{os.getpid()}"  # other tests run jobs on this host, too
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        (folder / "train.py").write_text(PACED, encoding="utf-8")
        command = [sys.executable, "-m", *torchrun, str(folder / "train.py")]
        self.job_log = folder / "job"
        with self.job_log.open("w", encoding="utf-8") as out:
            self.job = subprocess.Popen(
                [*command, *ENDLESS],
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    **variables,
                    "TRACELOOM_JOB": self.job_name,
                    "TORCHELASTIC_ERROR_FILE": str(folder / "error"),
                },
            )
        try:
            until(self._steps, "the job steps")
            until(self._named, "the agent knows both ranks")
        except BaseException:
            self.close()
            raise

    def start(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "traceloom",
            "agent",
            "run",
            "--config",
            str(self.folder / "agent.toml"),
        ]
        agent = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        until(self._answers, "the agent answers")
        return agent

    def _answers(self) -> bool:
        try:
            return bool(self.client.get("status"))
        except TraceloomError:
            return False

    def _steps(self) -> bool:
        text = self.job_log.read_text(encoding="utf-8")
        assert self.job.poll() is None, text
        return "step   9" in text

    def _named(self) -> bool:
        owners = [row["owner"] for row in self.client.get("processes")["processes"]]
        return {0, 1} <= {owner["rank"] for owner in owners if owner["job"] == self.job_name}

    def pid_of_rank(self, rank: int) -> int:
        """Of this job: others run beside it."""
        rows = [
            row
            for row in self.client.get("processes")["processes"]
            if row["owner"]["job"] == self.job_name
        ]
        pid: int = next(row["pid"] for row in rows if row["owner"]["rank"] == rank)
        return pid

    def trace(self, *words: str) -> int:
        return main(["trace", "--config", str(self.folder / "agent.toml"), *words])

    def ended(self, request: str) -> dict[str, Any]:
        def done() -> dict[str, Any] | None:
            answer: dict[str, Any] = self.client.get(f"requests/{request}")
            return answer if answer["done"] else None

        answer: dict[str, Any] = until(done, f"request {request} ends")
        return answer

    def close(self) -> None:
        for process in (self.job, self.agent):
            process.send_signal(signal.SIGTERM)
        for process in (self.job, self.agent):
            process.wait(60)
        self.log.close()


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="tl"))  # a short name: sockets lie in it
    folder.chmod(0o755)
    running = Host(folder)
    yield running
    running.close()
    assert "Traceback" not in (folder / "log").read_text(encoding="utf-8")
    shutil.rmtree(folder)


def _steps_in(path: Path) -> int:
    import gzip

    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(
        event["name"].startswith("Optimizer.step#") and event.get("ph") == "X" for event in events
    )


@pytest.mark.thorough
def test_the_doctor_says_that_traces_can_be_taken(host: Host) -> None:
    checks = {
        (check["area"], check["name"]): check["works"]
        for check in host.client.get("doctor")["checks"]
    }
    assert checks["traces", "sockets"] == checks["traces", "requests"] == "yes"


def test_a_rank_by_steps(host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run"
    assert (
        host.trace(
            "--job", host.job_name, "--rank", "1", "--steps", "3", "--shapes", "-o", str(output)
        )
        == 0
    )
    printed = capsys.readouterr()
    assert "traceloom report" in printed.out
    states = [line.split()[4] for line in printed.err.splitlines()]
    assert states[0] == "queued"
    assert states[-1] == "kept"
    steps = _steps_in(output / "rank1.kineto.json.gz")
    assert 3 <= steps < 30, "as many, or more where the profiler was told between two steps"
    (target,) = json.loads((output / "capture.json").read_text(encoding="utf-8"))["request"][
        "targets"
    ]
    data = (output / "rank1.kineto.json.gz").read_bytes()
    assert (target["sha256"], target["bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
    assert (target["rank"], target["steps"], target["skew_ns"]) == (1, steps, None)
    session = load(output)
    assert [trace.rank for trace in session.traces] == [1]
    assert not list((host.folder / "traces" / str(os.geteuid()) / "incoming").iterdir())


def test_a_job_by_time_begins_at_one_instant(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert (
        host.trace("--job", host.job_name, "--duration", "300ms", "--json", "-o", str(output)) == 0
    )
    request = json.loads(capsys.readouterr().out)
    assert sorted(target["rank"] for target in request["targets"]) == [0, 1]
    starts = {target["start_ns"] for target in request["targets"]}
    assert len(starts) == 1
    for target in request["targets"]:
        assert target["skew_ns"] == target["window_start_ns"] - target["start_ns"]
        assert target["operators"] > 0
    assert sorted(path.name for path in output.iterdir()) == [
        "capture.json",
        "rank0.kineto.json.gz",
        "rank1.kineto.json.gz",
    ]
    assert sorted(trace.rank for trace in load(output).traces) == [0, 1]
    assert main(["report", str(output), "--quiet"]) == 0
    assert "ranks of 2" in capsys.readouterr().out


def test_events_tell_every_state_and_files_are_those_of_the_request(host: Host) -> None:
    pid = host.pid_of_rank(0)
    request = host.client.post("requests", {"pids": [pid], "steps": 2})
    seen: list[dict[str, Any]] = []

    def listen() -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_S)
            connection.connect(str(host.folder / "socket"))
            path = f"/api/v1/requests/{request['id']}/events"
            connection.sendall(
                f"GET {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n".encode()
            )
            text = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
        seen.extend(json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: "))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join(WAIT_S)
    states = list(dict.fromkeys(answer["targets"][0]["state"] for answer in seen))
    assert states[0] == "queued"
    assert states[-1] == "kept"
    assert {"delivered", "written"} <= set(states)
    assert seen[-1]["done"]
    with pytest.raises(TraceloomError) as refusal:
        host.client.get(f"requests/{request['id']}/files/..%2Fcapture.json")
    assert refusal.value.slug in {"no-such-file", "no-such-route"}


@pytest.mark.thorough
def test_a_request_outlives_a_kill_of_the_agent(host: Host) -> None:
    request = host.client.post("requests", {"job": host.job_name, "duration_s": 0.3})

    def delivered() -> bool:
        targets = host.client.get(f"requests/{request['id']}")["targets"]
        return all(target["state"] not in {"queued", "failed"} for target in targets)

    until(delivered, "both ranks are told")
    host.agent.kill()
    host.agent.wait()
    socket_of_user = host.folder / "kineto" / str(os.geteuid()) / "dynolog"
    until(lambda: not socket_of_user.exists(), "the guard removes the socket")
    host.agent = host.start()
    ended = host.ended(request["id"])
    assert [target["state"] for target in ended["targets"]] == ["kept", "kept"], ended
    assert ended["files"] == ["capture.json", "rank0.kineto.json.gz", "rank1.kineto.json.gz"]


AS_BERT = """
import os, sys
from pathlib import Path
from traceloom.server.client import AgentClient
from traceloom.errors import TraceloomError
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
client = AgentClient(Path(sys.argv[1]), 60)
def asked(call, *words):
    try:
        print(call(*words))
    except TraceloomError as error:
        print(error.slug)
asked(client.post, "requests", {"pids": [int(sys.argv[3])], "steps": 1})
asked(client.post, "requests", {"job": sys.argv[4], "steps": 1})
asked(client.get, "requests")
asked(client.get, "requests/" + sys.argv[5])
asked(client.get, "requests/" + sys.argv[5] + "/files/capture.json")
asked(client.delete, "requests/" + sys.argv[5])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_nobody_traces_another_users_process(host: Host) -> None:
    pid = host.pid_of_rank(0)
    mine = host.client.get("requests")["requests"]
    request = (
        mine[-1]["id"] if mine else host.client.post("requests", {"pids": [pid], "steps": 1})["id"]
    )
    host.ended(request)
    command = [
        sys.executable,
        "-c",
        AS_BERT,
        str(host.folder / "socket"),
        str(BERT),
        str(pid),
        host.job_name,
        request,
    ]
    answers = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert answers == ["no-such-process"] * 2 + ["{'requests': []}"] + ["no-such-request"] * 3
    lines = [
        json.loads(line)
        for line in (host.folder / "audit").read_text(encoding="utf-8").splitlines()
    ]
    refused = [line for line in lines if line["who"] == f"uid {BERT}"]
    # What is refused again within a minute is counted, and written once.
    assert [(line["result"], line["why"]) for line in refused] == [
        ("not-allowed", "no-such-process")
    ]


AS_ANNA = """
import json, os, sys, time
from pathlib import Path
from traceloom.server.client import AgentClient
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
client = AgentClient(Path(sys.argv[1]), 60)
if len(sys.argv) == 3:
    print(json.dumps(client.get("environment")["variables"]))
else:
    request = client.post("requests", {"pids": [int(sys.argv[3])], "duration_s": 0.3})
    while not request["done"]:
        time.sleep(0.1)
        request = client.get("requests/" + request["id"])
    name = request["files"][1]
    client.fetch(f"requests/{request['id']}/files/{name}", Path(sys.argv[4], name))
    print(json.dumps(request))
"""
WORKS = """
import torch
print("up", flush=True)
while True:
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)
def test_a_user_traces_the_own_process_through_the_agent_of_root(host: Host) -> None:
    def as_anna(*arguments: str) -> Any:
        command = [
            sys.executable,
            "-c",
            AS_ANNA,
            str(host.folder / "socket"),
            str(ANNA),
            *arguments,
        ]
        return json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )

    variables = as_anna()
    assert variables["KINETO_IPC_SOCKET_DIR"] == str(host.folder / "kineto" / str(ANNA))
    received = Path(tempfile.mkdtemp(prefix="tl"))
    os.chown(received, ANNA, ANNA)
    # The right to read lets it run an interpreter that may lie where only root reads; its files are its own.
    command = [
        "setpriv",
        f"--reuid={ANNA}",
        f"--regid={ANNA}",
        "--clear-groups",
        "--inh-caps=+dac_read_search",
        "--ambient-caps=+dac_read_search",
        sys.executable,
        "-c",
        WORKS,
    ]
    environment = {**os.environ, **variables, "HOME": str(received)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd="/") as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            request = as_anna(str(process.pid), str(received))
        finally:
            process.kill()
    assert [(target["state"], target["uid"]) for target in request["targets"]] == [
        ("kept", ANNA)
    ], request
    (file,) = received.iterdir()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == request["targets"][0]["sha256"]
    kept = host.folder / "traces" / str(ANNA) / request["id"]
    assert (kept.stat().st_uid, kept.stat().st_mode & 0o777) == (0, 0o700)
    incoming = kept.parent / "incoming"
    assert (incoming.stat().st_uid, incoming.stat().st_mode & 0o777) == (ANNA, 0o700)
    shutil.rmtree(received)


@pytest.mark.thorough
def test_a_process_that_ends_while_it_is_traced(host: Host) -> None:
    variables = host.client.get("environment")["variables"]
    code = "import torch, sys; print('up', flush=True); sys.stdin.readline()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        request = host.client.post("requests", {"pids": [process.pid], "duration_s": 20.0})

        def told() -> bool:
            return bool(
                host.client.get(f"requests/{request['id']}")["targets"][0]["state"]
                in {"delivered", "accepted"}
            )

        until(told, "it is told")
        process.kill()
    (target,) = host.ended(request["id"])["targets"]
    assert (target["state"], target["reason"]) == ("failed", "exited")


def test_wrong_requests_say_what_is_wrong(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, slug in (
        (["--pid", "1"], "wrong-usage"),
        (["--steps", "1", "-o", str(tmp_path / "a")], "wrong-usage"),
        (["--job", "none", "--steps", "1", "-o", str(tmp_path / "a")], "no-such-process"),
        (["--host", "elsewhere", "--steps", "1", "-o", str(tmp_path / "a")], "no-such-process"),
        (["--job", host.job_name, "--duration", "3000s", "-o", str(tmp_path / "a")], "too-much"),
        (
            [
                "--job",
                host.job_name,
                "--steps",
                "1",
                "--profilers",
                "magic",
                "-o",
                str(tmp_path / "a"),
            ],
            "wrong-request",
        ),
        (["--job", host.job_name, "--steps", "1", "-o", str(tmp_path)], "file-exists"),
        (
            ["--job", host.job_name, "--steps", "1", "--at", "never", "-o", str(tmp_path / "a")],
            "bad-time",
        ),
        (["--cancel", "0" * 12], "no-such-request"),
    ):
        assert host.trace(*words) in {2, 3}
        assert f"explain {slug}" in capsys.readouterr().err, words
    assert not (tmp_path / "a").exists()


SPAWNED = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
    torch.set_num_threads(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.utils.data.DataLoader(torch.ones(1_000_000, 32), batch_size=8, num_workers=1 if rank == 1 else 0)
    child = 0
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if step == 20 and rank == 0:
            child = os.fork()  # after it has polled: the profiler does not survive that
            if not child:
                time.sleep(3600)
            open(f"{folder}/child", "w").write(str(child))
        if step >= 20 and not os.path.exists(f"{folder}/stepping{rank}"):
            open(f"{folder}/stepping{rank}", "w").close()

if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1],), nprocs=4)
"""


@pytest.mark.thorough
def test_four_spawned_ranks_one_of_which_forked(host: Host, tmp_path: Path) -> None:
    script, output = tmp_path / "spawned.py", tmp_path / "run"
    script.write_text(SPAWNED, encoding="utf-8")
    variables = host.client.get("environment")["variables"]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, **variables, "TRACELOOM_JOB": "spawned"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until(
            lambda: all((tmp_path / f"stepping{rank}").exists() for rank in range(4)),
            "all ranks step",
        )
        child = int((tmp_path / "child").read_text())

        def known() -> bool:
            rows = [
                row
                for row in host.client.get("processes")["processes"]
                if row["owner"]["job"] == "spawned"
            ]
            return sum(row["steps_per_second"] is not None for row in rows) == 4

        until(known, "the agent knows who steps")
        assert (
            host.trace("--pid", str(job.pid), "--duration", "500ms", "-o", str(output), "-q") == 0
        )
        request = json.loads((output / "capture.json").read_text())["request"]
        traced = [target for target in request["targets"] if target["state"] == "kept"]
        assert (
            len(traced) == len(request["targets"]) == 4
        )  # neither the launcher nor the loader's worker
        assert child not in {target["pid"] for target in traced}
        assert all(target["operators"] > 0 for target in traced)
        assert job.poll() is None
        os.kill(child, 0)  # both go on
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait(60)
