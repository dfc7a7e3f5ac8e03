"""Who means harm to a fleet: other users of the host of its service, tokens that end, and whoever reaches its port."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import msgspec
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import places  # noqa: E402
from support.prometheus import free_port  # noqa: E402
from support.running_agent import running_agent  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.sessions import busy_step  # noqa: E402
from support.simulated_hosts import SimulatedHost, ranked_process  # noqa: E402
from support.users import (  # noqa: E402
    ANNA,
    BERT,
    build_command,
    lend_shared_directory,
    needs_users,
    start_python,
)
from support.waiting import until  # noqa: E402
from traceloom.cli.upload import upload  # noqa: E402
from traceloom.fleet.store.objects import ObjectStore  # noqa: E402
from traceloom.testing import TraceBuilder  # noqa: E402

LOCK = """
import fcntl, os, sys, time
handles = [os.open(name, os.O_RDONLY) for name in sys.argv[1:]]
for handle in handles:
    fcntl.lockf(handle, fcntl.LOCK_SH)
print("locked", flush=True)
time.sleep(600)
"""


def _list_what_a_user_reads(uid: int, directory: Path) -> set[str]:
    done = subprocess.run(
        build_command(uid, "find", str(directory), "-type", "f", "-readable"),
        capture_output=True,
        text=True,
        check=False,
    )
    return {Path(line).name for line in done.stdout.splitlines()}


@needs_users
def test_a_store_in_a_directory_that_all_may_enter_is_for_nobody_else() -> None:
    with lend_shared_directory(0o755) as directory:
        store = directory / "store"
        store.mkdir(mode=0o755)
        store.chmod(0o755)
        before = os.umask(0o022)
        try:
            service = RunningService(directory)
        finally:
            os.umask(before)
        try:
            until(lambda: (store / "state.db-wal").exists() and (store / "tables").exists())
            assert service.ask("GET", "/api/v1/captures")[0] == 200
            assert _list_what_a_user_reads(ANNA, directory) <= {"serve.log"}
            service.process.kill()
            service.process.wait()
            # A store of a time when nobody cared: another user has locked what could be read.
            paths = [store / f"state.db{end}" for end in ("", "-wal", "-shm")]
            for path in (*paths, store / "tables"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            with start_python(ANNA, "-c", LOCK, *map(str, paths)):
                service.start()
                assert (
                    service.ask("POST", "/api/v1/tokens", body={"name": "x", "role": "viewer"})[0]
                    == 200
                )
                assert _list_what_a_user_reads(ANNA, directory) <= {"serve.log"}
                assert "others could use" in service.log.read_text(encoding="utf-8")
        finally:
            service.end()


def _host(service: RunningService, folder: Path, name: str = "node0") -> SimulatedHost:
    until(lambda: service.ask("GET", "/api/v1/hosts")[0] == 200)
    token = service.client().post("agents", {"host": name})["token"]
    return SimulatedHost([service.url], name, token, [ranked_process(0, "job")], folder)


def test_what_programs_say_of_themselves_takes_no_host_out_of_the_fleet(tmp_path: Path) -> None:
    service = RunningService(tmp_path)
    host = _host(service, tmp_path)
    try:
        credential = host.clients[0].credential
        good = {"key": "1@1", "pid": 1, "uid": 0, "job": "run"}
        bad = [
            {**good, "rank": 99999999999999999999999},
            {**good, "job": "j" * 257},
            {**good, "labels": {"x": "y" * 257}},
            {**good, "surprise": 1},
            {"key": "2@1"},
            None,
        ]
        heartbeat = {
            "sent_ns": 1,
            "boot_id": "b",
            "version": "0",
            "clock": {"offset_ns": 10**30, "error_ns": 0, "round_trips": 1},
            "devices": [{"uuid": "GPU-0"}, {"uuid": "GPU-1", "values": {"power": None}}],
            "processes": [*bad, good],
            "collector_errors": {"cpu": "t" * 300},
        }
        code, answer = service.ask(
            "POST", f"/api/v1/agents/{host.name}/heartbeat", credential, heartbeat
        )
        assert code == 200, answer
        assert sum(answer["refused"].values()) == len(bad) + 3, answer
        assert answer["refused"]["processes: `job`: expected a text of at most 256 signs"] == 1
        [row] = service.ask("GET", "/api/v1/hosts")[1]["hosts"]
        assert (row["lost"], row["devices"], row["processes"], row["jobs"]) == (
            False,
            1,
            1,
            ["run"],
        )
        metrics = service.ask("GET", "/metrics")[1].decode()
        assert 'usage_refused_rows_total{host="node0"} 9.0' in metrics
    finally:
        host.close()
        service.end()


@pytest.mark.skipif(sys.platform != "linux", reason="the agent looks at Linux hosts")
def test_an_agent_of_a_host_with_impossible_programs_is_heard_and_says_so(tmp_path: Path) -> None:
    service = RunningService(tmp_path)
    until(lambda: service.ask("GET", "/api/v1/hosts")[0] == 200)
    token = service.client().post("agents", {})["token"]
    variables = [
        {"RANK": "99999999999999999999999", "WORLD_SIZE": "2", "TRACELOOM_JOB": "huge"},
        {"RANK": "9" * 5000, "WORLD_SIZE": "2", "TRACELOOM_JOB": "digits"},
        {"TRACELOOM_JOB": "j" * 257},
        {"TRACELOOM_JOB": "kept", "TRACELOOM_LABEL_TEAM": "t" * 300, "SLURM_JOB_NAME": "n" * 300},
    ]
    programs = [
        subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"], **more})
        for more in variables
    ]
    folder = tmp_path / "agent"
    settings = f'[fleet]\nserver = "{service.url}"\nheartbeat = 0.3\n'
    try:
        (folder.parent / "token").write_text(token)
        settings += f'token_file = "{folder.parent}/token"\n'
        with running_agent(folder, settings) as agent:
            jobs = until(
                lambda: (
                    (names := {job["job"] for job in service.ask("GET", "/api/v1/jobs")[1]["jobs"]})
                    >= {"huge", "digits", "kept"}
                    and names
                )
            )
            assert not any(len(job) > 256 for job in jobs)
            checks = until(
                lambda: (
                    (
                        found := [
                            check["why"]
                            for check in agent.get("doctor")["checks"]
                            if check["area"] in {"fleet", "owners"} and check["works"] != "yes"
                        ]
                    )
                    and found
                )
            )
            assert (
                "the fleet is not told of 1 rows: processes: `job`: expected a text of at most 256 signs"
                in checks
            )
            assert any(why.startswith("2 processes say that they are ranks") for why in checks)
            assert agent.get("processes")["processes"], "the others are seen"
    finally:
        for program in programs:
            program.kill()
            program.wait()
        service.end()


def _status(
    service: RunningService, path: str, authorization: str = "", method: str = "GET"
) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request(
        method, path, headers={"Authorization": authorization} if authorization else {}
    )
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_who_has_no_token_silences_no_host_no_probe_and_no_sign_in(tmp_path: Path) -> None:
    service = RunningService(tmp_path)
    host = _host(service, tmp_path)
    ended = threading.Event()
    codes: Counter[int] = Counter()

    def flood() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        while not ended.is_set():
            for path in (f"/api/v1/agents/{host.name}/work?wait=0", "/api/v1/captures"):
                connection.request("GET", path, headers={"Authorization": "Bearer guess"})
                response = connection.getresponse()
                response.read()
                codes[response.status] += 1
        connection.close()

    guesser = threading.Thread(target=flood)
    guesser.start()
    try:
        until(lambda: codes[429] > 100)
        for _ in range(30):
            host.beat()
            assert _status(service, "/healthz") == 200
            assert service.ask("GET", "/api/v1/captures")[0] == 200
        for _ in range(40):
            service.browse("/sign-in", form={"token": "guess", "next": "/"})
        assert service.browse("/sign-in", form={"token": "guess", "next": "/"}).status == 429
        assert service.browse("/", service.signed_in()).status == 200
    finally:
        ended.set()
        guesser.join()
        host.close()
        service.end()


CONNECT = """
import socket, sys
import encodings.idna
held = []
for _ in range(int(sys.argv[2])):
    try:
        held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5))
        held[-1].sendall(b"GET /metr")
    except OSError:
        break
print("connected", flush=True)
sys.stdin.read()
"""


@needs_users
def test_users_of_a_host_shut_nobody_out_who_reads_metrics(tmp_path: Path) -> None:
    """Each of two has as many connections as it gets, over loopback, where all have one address."""
    port = free_port()
    settings = f'[tcp]\naddress = "127.0.0.1:{port}"\n[access]\nseconds = 60\n'

    def read_metrics(uid: int) -> str:
        words = ("curl", "-sS", "-m", "20", f"http://127.0.0.1:{port}/metrics")
        return subprocess.run(
            build_command(uid, *words), capture_output=True, text=True, check=True
        ).stdout

    with (
        running_agent(tmp_path / "agent", settings),
        start_python(ANNA, "-c", CONNECT, str(port), "300", stdin=subprocess.PIPE),
        start_python(BERT, "-c", CONNECT, str(port), "300", stdin=subprocess.PIPE),
    ):
        assert "too many connections" in read_metrics(ANNA)
        for uid in (0, 65534):
            assert "traceloom_host_cpu_seconds_total{" in read_metrics(uid)


def _open_stream(service: RunningService, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    connection.request("GET", path, headers={"Accept": "text/event-stream", **headers})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.connection = connection  # type: ignore[attr-defined]
    return response


def test_streams_end_with_the_token_or_the_session_of_their_reader(tmp_path: Path) -> None:
    """Each reads to its end: the connection's time-out fails the test where there is none."""
    service = RunningService(tmp_path)
    host = _host(service, tmp_path)
    try:
        host.beat()
        request = service.ask(
            "POST", "/api/v1/requests", body={"spec": {"job": "job", "steps": 2}}
        )[1]
        path = f"/api/v1/requests/{request['id']}/events"
        tokens = [
            service.ask("POST", "/api/v1/tokens", body={"name": f"t{n}", "role": "viewer", **more})[
                1
            ]["token"]
            for n, more in enumerate(({}, {"days": 4 / 86_400}, {}))
        ]
        cookie = service.signed_in(tokens[2])
        streams = [
            *(_open_stream(service, path, Authorization=f"Bearer {token}") for token in tokens[:2]),
            _open_stream(service, f"/requests/{request['id']}", Cookie=cookie),
        ]
        for name in ("t0", "t2"):
            assert service.ask("DELETE", f"/api/v1/tokens/{name}")[0] == 200
        for stream in streams:
            stream.read()
            stream.connection.close()  # type: ignore[attr-defined]
        assert service.ask("GET", path.removesuffix("/events"))[1]["state"] not in {
            "done",
            "failed",
        }
    finally:
        host.close()
        service.end()


def test_details_name_no_place_of_the_server_to_who_does_not_run_it(tmp_path: Path) -> None:
    service = RunningService(tmp_path)
    try:
        broken = tmp_path / "rank0.json"
        broken.write_text("no trace")
        capture = upload(service.client(), broken)["id"]
        until(lambda: service.client().get(f"captures/{capture}")["state"] == "quarantined")
        viewer = service.ask("POST", "/api/v1/tokens", body={"name": "v", "role": "viewer"})[1][
            "token"
        ]
        texts = [
            json.dumps(service.ask("GET", path, viewer)[1])
            for path in (
                "/api/v1/check",
                f"/api/v1/captures/{capture}",
                f"/api/v1/captures/{capture}/report",
            )
        ]
        shutil.rmtree(tmp_path / "store" / "captures")
        texts.append(
            json.dumps(
                service.ask("GET", f"/api/v1/captures/{capture}/files/rank0.json", viewer)[1]
            )
        )
        for text in texts:
            assert "Errno" not in text
            assert str(tmp_path) not in text
            assert "/tmp/" not in text
        assert "rank0.json" in texts[1], "what is wrong is said all the same"
        assert str(tmp_path) in json.dumps(service.ask("GET", "/api/v1/check")[1])
    finally:
        service.end()


def test_browsers_are_told_to_come_by_tls_alone(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    done = subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("openssl makes no certificate here")
    service = RunningService(tmp_path, "--certificate", str(certificate), "--key", str(key))
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        for path in ("/sign-in", "/healthz", "/api/v1/captures"):
            connection = http.client.HTTPSConnection("127.0.0.1", service.port, context=context)
            connection.request("GET", path)
            assert (
                connection.getresponse().headers["Strict-Transport-Security"] == "max-age=31536000"
            )
            connection.close()
    finally:
        service.end()


def test_files_of_an_object_store_stay_as_they_were_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = places("shared", tmp_path, monkeypatch)
    service = RunningService(tmp_path, "--store", where.store, "--state", where.state)
    try:
        trace = tmp_path / "rank0.json"
        made = TraceBuilder(0)
        busy_step(made, 0, 0)
        made.write(trace)
        content = trace.read_bytes()
        announced = [
            {
                "name": trace.name,
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
        ]
        answer = service.ask("POST", "/api/v1/captures", body={"files": announced, "job": ""})[1]
        url, route = answer["uploads"][0]["url"], f"/api/v1/captures/{answer['id']}"

        def send(body: bytes) -> None:
            urllib.request.urlopen(
                urllib.request.Request(
                    url, body, {"Content-Type": "application/octet-stream"}, method="PUT"
                )
            ).close()

        send(content)
        assert (
            service.ask("POST", "/api/v1/captures", body={"files": announced, "job": ""})[1][
                "uploads"
            ]
            == []
        )
        code, capture = service.ask("POST", f"{route}/complete")
        assert (code, capture["digests"]) == (200, {trace.name: announced[0]["sha256"]})
        send(bytes(len(content)))  # whoever has the signed address still may
        until(lambda: service.ask("GET", route)[1]["state"] == "committed")
        assert service.ask("GET", f"{route}/files/{trace.name}") == (200, content)
        service.run("fleet", "fetch", answer["id"], "-o", str(tmp_path / "fetched"))
        assert (tmp_path / "fetched" / trace.name).read_bytes() == content
        # Somebody who may write to the store changes it there.
        objects = ObjectStore(where.store)
        objects.copy(
            f"incoming/{capture['day']}/{answer['id']}/{trace.name}",
            f"captures/{capture['day']}/{answer['id']}/{trace.name}",
        )
        code, refused = service.ask("GET", f"{route}/files/{trace.name}")
        assert (code, refused["error"]["slug"]) == (503, "upload-differs")
        service.run("fleet", "fetch", answer["id"], "-o", str(tmp_path / "again"), code=3)
        assert not (tmp_path / "again").exists()
    finally:
        service.end()


def test_nobody_uploads_into_the_job_of_another(tmp_path: Path) -> None:
    service = RunningService(tmp_path)
    host = _host(service, tmp_path)  # its process is Ada's
    try:
        host.beat()

        def make(name: str, role: str = "requester") -> str:
            body = {"name": name, "role": role}
            return str(service.ask("POST", "/api/v1/tokens", body=body)[1]["token"])

        ada, bert, operator = make("ada@laptop"), make("bert"), make("ops", "operator")

        def announce(token: str, job: str, content: bytes = b"x") -> int:
            sha256 = hashlib.sha256(content + token.encode()).hexdigest()
            body = {"files": [{"name": "a.json", "size": 1, "sha256": sha256}], "job": job}
            return service.ask("POST", "/api/v1/captures", token, body)[0]

        assert [announce(token, "job") for token in (ada, bert, operator)] == [200, 403, 200]
        until(lambda: service.ask("GET", "/api/v1/jobs")[1]["jobs"])
        time.sleep(6)  # facts of jobs are written down every few seconds
        host.processes = []
        host.beat()
        assert service.ask("GET", "/api/v1/jobs")[1]["jobs"] == [], "the job has ended"
        assert [announce(token, "job", b"y") for token in (ada, bert, operator)] == [200, 403, 200]
        # Of whom no host knows it is whose capture came first.
        assert [announce(token, "mine") for token in (bert, ada, bert)] == [200, 403, 200]
        assert announce(bert, "") == 200
    finally:
        host.close()
        service.end()


def test_a_job_of_the_same_name_on_another_host_is_another_users(tmp_path: Path) -> None:
    service = RunningService(tmp_path)
    hosts = [_host(service, tmp_path, f"node{number}") for number in range(3)]
    try:
        hosts[0].processes = [ranked_process(0, "slurm-7", "ada")]
        hosts[1].processes = [ranked_process(1, "slurm-7", "bert")]
        hosts[2].processes = [ranked_process(1, "slurm-7", "ada")]
        for host in (*hosts, *reversed(hosts)):
            host.beat()
        jobs = {
            row["job"]: (row["user"], row["hosts"], row["ranks"])
            for row in service.ask("GET", "/api/v1/jobs")[1]["jobs"]
        }
        assert jobs == {
            "slurm-7": ("ada", ["node0", "node2"], 2),
            "slurm-7@bert": ("bert", ["node1"], 1),
        }
        tokens = {
            name: service.ask("POST", "/api/v1/tokens", body={"name": name, "role": "requester"})[
                1
            ]["token"]
            for name in ("ada", "bert")
        }
        for name, codes in (("ada", [200, 403]), ("bert", [403, 200])):
            asked = [
                service.ask(
                    "POST", "/api/v1/requests", tokens[name], {"spec": {"job": job, "steps": 2}}
                )[0]
                for job in jobs
            ]
            assert asked == codes, name
        # The scheduler's own word takes the name from who only says it.
        hosts[1].processes = [msgspec.structs.replace(hosts[1].processes[0], scheduled=True)]
        for host in (*hosts, *hosts):
            host.beat()
        assert {
            row["job"]: row["user"] for row in service.ask("GET", "/api/v1/jobs")[1]["jobs"]
        } == {
            "slurm-7": "bert",
            "slurm-7@ada": "ada",
        }
    finally:
        for host in hosts:
            host.close()
        service.end()
