"""Users of one host who do not trust each other: what one of them does to the other's agent, files and jobs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.memory_group import limited_group
from support.running_agent import Running
from support.users import (
    ANNA,
    BERT,
    build_command,
    lend_shared_directory,
    needs_users,
    run_python,
    start_python,
)
from support.waiting import until

pytestmark = needs_users

FAKE_AGENT = """
import json, os, socket, sys
os.makedirs(os.path.dirname(sys.argv[1]), mode=0o755, exist_ok=True)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen()
print("up", flush=True)
while True:
    peer, _ = listener.accept()
    asked = peer.recv(65536)
    if asked:
        open(sys.argv[1] + ".asked", "wb").write(asked)
    body = json.dumps({"variables": json.loads(sys.argv[2])}).encode()
    try:
        peer.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
    except OSError:
        pass
    peer.close()
"""
EVIL = (
    '{"LD_PRELOAD": "/tmp/evil.so", "A=1; touch /tmp/never; B": "x", "KINETO_USE_DAEMON": "$(id)"}'
)


def _print_environment(uid: int, temporary: Path) -> subprocess.CompletedProcess[str]:
    environment = {"TMPDIR": str(temporary), "HOME": str(temporary / f"home{uid}")}
    missing = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME"), "")
    return run_python(
        uid, "-m", "traceloom", "agent", "env", environment={**missing, **environment}
    )


def test_a_false_agent_in_the_shared_temporary_directory_is_asked_nothing() -> None:
    with lend_shared_directory() as temporary:
        socket = temporary / f"traceloom-{ANNA}" / "agent.sock"
        with start_python(BERT, "-c", FAKE_AGENT, str(socket), EVIL):
            done = _print_environment(ANNA, temporary)
            assert (done.returncode, done.stdout) == (3, ""), done
            assert f"{socket.parent} belongs to another user" in done.stderr
            # Not even where the way to it is root's: who listens is another user.
            again = run_python(
                ANNA, "-m", "traceloom", "agent", "status", "--socket", f"/proc/self/root{socket}"
            )
            assert again.returncode == 3
            assert not Path(f"{socket}.asked").exists(), "a byte was sent"


def test_a_false_agent_in_a_place_of_root_is_asked_nothing() -> None:
    with lend_shared_directory() as temporary:
        socket = temporary / "agent.sock"
        with start_python(BERT, "-c", FAKE_AGENT, str(socket), EVIL):
            os.chown(socket, 0, 0)
            words = ("-m", "traceloom", "agent", "env", "--socket", str(socket))
            done = run_python(ANNA, *words)
            assert (done.returncode, done.stdout) == (3, ""), done
            assert f"user {BERT} listens there" in done.stderr
            assert not Path(f"{socket}.asked").exists(), "a byte was sent"


def test_only_variables_that_prepare_a_job_are_printed_for_the_shell() -> None:
    """The user's own agent, or root's, says more than it should."""
    with lend_shared_directory() as temporary:
        socket = temporary / "agent.sock"
        with start_python(ANNA, "-c", FAKE_AGENT, str(socket), EVIL):
            words = ("-m", "traceloom", "agent", "env", "--socket", str(socket))
            done = run_python(ANNA, *words)
            assert done.stdout == "export KINETO_USE_DAEMON='$(id)'\n", done


def test_without_an_agent_the_place_of_its_sockets_is_made_before_others_can() -> None:
    with lend_shared_directory() as temporary:
        done = _print_environment(ANNA, temporary)
        assert done.returncode == 0, done
        printed = dict(
            word.split("=", 1) for word in shlex.split(done.stdout, comments=False) if "=" in word
        )
        directory = Path(printed["KINETO_IPC_SOCKET_DIR"]).parent
        assert directory.is_relative_to(temporary)
        assert directory.stat().st_uid == directory.parent.stat().st_uid == ANNA
        assert not directory.parent.stat().st_mode & 0o022


@pytest.mark.parametrize("owner", [BERT, ANNA])
def test_an_agent_puts_no_socket_where_others_can_write(owner: int) -> None:
    with lend_shared_directory() as temporary:
        directory = temporary / f"traceloom-{ANNA}"
        directory.mkdir()
        directory.chmod(0o777)
        os.chown(directory, owner, owner)
        environment = {"TMPDIR": str(temporary), "HOME": str(temporary), "XDG_RUNTIME_DIR": ""}
        done = run_python(ANNA, "-m", "traceloom", "agent", "run", environment=environment)
        assert done.returncode == 3, done
        assert "socket-unusable" in done.stderr or "cannot listen there" in done.stderr
        assert list(directory.iterdir()) == []


LOCK = """
import fcntl, os, sys, time
handles = [os.open(name, os.O_RDONLY) for name in sys.argv[1:]]
for handle in handles:
    fcntl.lockf(handle, fcntl.LOCK_SH)
print("locked", flush=True)
time.sleep(600)
"""


def _read_as(uid: int, path: Path) -> bytes:
    return subprocess.run(
        build_command(uid, "cat", str(path)), capture_output=True, check=False
    ).stdout


def test_no_file_of_the_agent_is_for_other_users() -> None:
    """Whatever mask of modes it is started with."""
    with lend_shared_directory(0o755) as directory:
        disk = directory / "new" / "state"
        before = os.umask(0)
        try:
            agent = Running(directory, disk=disk)
        finally:
            os.umask(before)
        try:
            until(lambda: agent.client.get("status")["history"]["bytes"] > 4096)
            agent.client.post("counters/pause", {"seconds": 1})
            until((disk / "audit.jsonl").exists)
            files = {path.name: path for path in (*directory.iterdir(), *disk.iterdir())}
            assert {"agent.db", "agent.db-wal", "agent.db-shm", "requests.db"} <= files.keys()
            opened = {name for name, path in files.items() if _read_as(ANNA, path)}
            assert opened <= {"agent.toml", "log"}, "what this test itself has written"
            writable = {
                path.name
                for path in directory.rglob("*")
                if path.stat().st_mode & 0o022 and not path.is_socket()
            }
            assert writable <= {"agent.toml", "log"}
        finally:
            assert agent.end() == 0


def test_a_lock_of_a_reader_stops_no_writer_of_a_history_that_all_could_read() -> None:
    with lend_shared_directory(0o755) as directory:
        agent = Running(directory)
        rows = until(lambda: agent.client.get("query", metric="gpu_power_watts")["series"])
        agent.process.kill()  # the log of writes stays
        agent.process.wait()
        paths = [directory / f"agent.db{end}" for end in ("", "-wal", "-shm")]
        for path in paths:
            path.chmod(0o644)
        with start_python(ANNA, "-c", LOCK, *map(str, paths)):
            try:
                agent.start()
                history = agent.client.get("status")
                until(lambda: agent.client.get("status")["history"]["bytes"] > 4096)
                assert (history["history_error"], history["history"]["lost_ticks"]) == ("", 0)
                assert agent.client.get("query", metric="gpu_power_watts", since="1h")["series"]
            finally:
                agent.end()
        assert rows
        assert "others could use" in (directory / "log").read_text(encoding="utf-8")
        assert all(not path.stat().st_mode & 0o077 for path in directory.glob("agent.db*"))


ASK = """
import json, os, sys
from pathlib import Path
from traceloom.server.client import AgentClient
client = AgentClient(Path(sys.argv[1]), 30)
asked = {
    "jobs": client.get("jobs"),
    "processes": client.get("query", metric="job_processes", since="1d"),
    "memory": client.get("query", metric="process_memory_bytes", by="job", since="1d"),
}
print(json.dumps(asked))
"""


def _start_sleeper(uid: int, **variables: str) -> subprocess.Popen[bytes]:
    environment = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.Popen(["sleep", "600"], user=uid, group=uid, cwd="/", env=environment)


def test_a_name_of_a_job_makes_nobody_a_part_of_it() -> None:
    with lend_shared_directory(0o755) as directory:
        agent = Running(directory)
        sleepers = [_start_sleeper(ANNA, SLURM_JOB_ID="4242", SLURM_JOB_NAME="secret")]

        def read_jobs() -> dict[str, list[str]]:
            rows = agent.client.get("jobs")["jobs"]
            return {row["job"]: sorted(row["processes"]) for row in rows}

        def ask(uid: int) -> dict[str, Any]:
            done = run_python(uid, "-c", ASK, str(agent.socket))
            return dict(json.loads(done.stdout))

        try:
            until(lambda: "slurm-4242" in read_jobs())
            until(lambda: agent.client.get("query", metric="job_processes")["series"])
            sleepers.append(
                _start_sleeper(BERT, TRACELOOM_JOB="slurm-4242", RANK="0", WORLD_SIZE="1")
            )
            theirs = f"slurm-4242@{BERT}"
            jobs = until(lambda: (jobs := read_jobs()).keys() >= {theirs} and jobs)
            assert [key.split("@")[0] for key in jobs["slurm-4242"]] == [str(sleepers[0].pid)]
            assert [key.split("@")[0] for key in jobs[theirs]] == [str(sleepers[1].pid)]
            until(lambda: ask(BERT)["processes"]["series"])
            for number, (uid, own) in enumerate(((ANNA, "slurm-4242"), (BERT, theirs))):
                answers = ask(uid)
                assert [row["job"] for row in answers["jobs"]["jobs"]] == [own]
                for name in ("processes", "memory"):
                    assert {row["labels"]["job"] for row in answers[name]["series"]} == {own}
                assert all(row["values"][-1] == 1 for row in answers["processes"]["series"]), number
            # The job ends; its name and what is known of it are nobody else's all the same.
            sleepers[0].kill()
            sleepers[0].wait()
            until(lambda: "slurm-4242" not in read_jobs())
            sleepers.append(_start_sleeper(BERT, TRACELOOM_JOB="slurm-4242"))
            until(lambda: len(read_jobs()[theirs]) == 2)
            assert {row["labels"]["job"] for row in ask(BERT)["processes"]["series"]} == {theirs}
            # Nor after the agent has begun anew, and nobody is first any more.
            for sleeper in sleepers[1:]:
                sleeper.kill()
                sleeper.wait()
            agent.process.terminate()
            agent.process.wait()
            agent.start()
            began = agent.client.get("status")["started_ns"]
            sleepers.append(_start_sleeper(BERT, TRACELOOM_JOB="slurm-4242"))
            series = until(lambda: ask(BERT)["processes"]["series"])
            assert all(row["times_ns"][0] >= began for row in series), series
            before = agent.client.get("query", metric="job_processes", since="1d")["series"]
            assert any(row["times_ns"][0] < began for row in before)
        finally:
            for sleeper in sleepers:
                sleeper.kill()
                sleeper.wait()
            agent.end()


REPORT = """
import sys, time
from pathlib import Path
from traceloom.errors import TraceloomError
from traceloom.server.client import AgentClient
client = AgentClient(Path(sys.argv[1]), 30)
print("up", flush=True)
rank = 0
while True:
    rank += 1
    try:
        client.post("steps", {"steps": [0.01], "rank": rank})
    except TraceloomError:
        time.sleep(0.1)
"""


def test_who_says_another_rank_each_time_is_one_rank() -> None:
    with lend_shared_directory(0o755) as directory:
        agent = Running(directory)
        try:
            environment = {**os.environ, "TRACELOOM_JOB": "many"}
            with start_python(BERT, "-c", REPORT, str(agent.socket), env=environment):

                def read_counts() -> list[float]:
                    command = [
                        "curl",
                        "-sS",
                        "--unix-socket",
                        str(agent.socket),
                        "http://agent/metrics",
                    ]
                    text = subprocess.run(
                        command, capture_output=True, text=True, check=True
                    ).stdout
                    return [
                        float(line.split()[-1])
                        for line in text.splitlines()
                        if "step_seconds_count" in line and 'job="many"' in line
                    ]

                counts = until(lambda: sum(counts := read_counts()) > 50 and counts)
                assert len(counts) == 1, counts
        finally:
            agent.end()


def test_memory_of_a_group_that_users_share_is_not_told_of_one_of_their_jobs() -> None:
    with lend_shared_directory(0o755) as directory, limited_group() as group:
        agent = Running(directory)
        anna = _start_sleeper(ANNA, TRACELOOM_JOB="shared")
        bert = _start_sleeper(BERT)  # of no job, so that it does not matter elsewhere

        def read_jobs() -> set[str]:
            series = agent.client.get("query", metric="cgroup_memory_bytes", since="2s")["series"]
            return {row["labels"]["job"] for row in series if group.name in row["labels"]["cgroup"]}

        try:
            (group / "cgroup.procs").write_text(str(anna.pid), encoding="ascii")
            until(lambda: read_jobs() == {"shared"})
            (group / "cgroup.procs").write_text(str(bert.pid), encoding="ascii")
            until(lambda: read_jobs() == {""})
        finally:
            for sleeper in (anna, bert):
                sleeper.kill()
                sleeper.wait()
            agent.end()
