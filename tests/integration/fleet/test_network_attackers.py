"""Whoever reaches a port of the fleet's service, with a token or without one, and means harm."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn", "htpy"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from starlette.requests import Request  # noqa: E402

from support.fleet import places  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.simulated_hosts import SimulatedHost, ranked_process  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.fleet.portal.app import SessionAuthentication  # noqa: E402
from traceloom.fleet.store.captures import ServiceState  # noqa: E402
from traceloom.server.problem import HttpError  # noqa: E402


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    running = RunningService(tmp_path_factory.mktemp("alone"))
    until(lambda: running.ask("GET", "/api/v1/hosts")[0] == 200)
    yield running
    running.end()


@pytest.fixture(scope="module")
def services(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RunningService, RunningService]]:
    """The service that leads, and another one of the same state."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("two")
        where = places("shared", folder, patch)
        arguments = ("--store", where.store, "--state", where.state, "--workers", "1")
        running = []
        for name in ("leader", "other"):
            (folder / name).mkdir()
            running.append(RunningService(folder / name, *arguments))
            until(lambda: running[0].ask("GET", "/api/v1/hosts")[0] == 200)
        yield running[0], running[1]
        for each in running:
            each.end()


def _make_token(service: RunningService, name: str, role: str) -> str:
    body = {"name": name, "role": role}
    return str(service.ask("POST", "/api/v1/tokens", body=body)[1]["token"])


def _announce(
    service: RunningService, token: str, job: str, content: bytes = b"x"
) -> tuple[int, Any]:
    sha256 = hashlib.sha256(content).hexdigest()
    file = {"name": "a.json", "size": len(content), "sha256": sha256}
    return service.ask("POST", "/api/v1/captures", token, {"files": [file], "job": job})


def _send_raw(port: int, request: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(request.encode())
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_whose_job_it_is_counts_when_an_upload_ends_not_when_it_was_announced(
    service: RunningService, tmp_path: Path
) -> None:
    """Numbers of a scheduler's jobs can be guessed: Bert announces before Ada's job begins."""
    bert, ada = (_make_token(service, name, "requester") for name in ("bert", "ada"))
    captures = [_announce(service, token, "slurm-4243")[1]["id"] for token in (bert,)]
    assert service.ask("PUT", f"/api/v1/captures/{captures[0]}/files/a.json", bert, b"x")[0] == 200
    token = service.client().post("agents", {"host": "node0"})["token"]
    host = SimulatedHost(
        [service.url], "node0", token, [ranked_process(0, "slurm-4243", "ada")], tmp_path
    )
    try:
        host.beat()
        code, answer = service.ask("POST", f"/api/v1/captures/{captures[0]}/complete", bert)
        assert (code, answer["error"]["slug"]) == (403, "not-allowed")
        mine = _announce(service, ada, "slurm-4243", b"y")[1]["id"]
        assert service.ask("PUT", f"/api/v1/captures/{mine}/files/a.json", ada, b"y")[0] == 200
        for _ in range(2):  # also when it is asked again
            assert service.ask("POST", f"/api/v1/captures/{mine}/complete", ada)[0] == 200
    finally:
        host.close()


def test_a_user_of_the_host_is_one_at_all_addresses_of_loopback(service: RunningService) -> None:
    form = {"token": "guess", "next": "/"}
    codes = [
        service.browse("/sign-in", form=form, address=f"127.0.7.{number}").status
        for number in range(1, 41)
    ]
    assert codes[-1] == 429, codes


def test_who_has_gone_before_being_heard_leaves_nothing_in_the_log(service: RunningService) -> None:
    for _ in range(50):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.connect(("127.0.0.1", service.port))
    assert service.ask("GET", "/healthz")[0] == 200
    assert "Traceback" not in service.log.read_text()


def test_a_reader_leaves_live_pages_for_others(service: RunningService) -> None:
    cookies = [service.signed_in(_make_token(service, name, "viewer")) for name in ("eva", "tom")]

    def follow(cookie: str, path: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        connection.request("GET", path, headers={"Accept": "text/event-stream", "Cookie": cookie})
        return connection

    greedy = [follow(cookies[0], f"/hosts?x={number}") for number in range(70)]
    other = follow(cookies[1], "/hosts?x=of-another")
    try:
        answers = [connection.getresponse() for connection in greedy]
        assert {answer.status for answer in answers} <= {200, 503}
        followed = [answer for answer in answers if answer.status == 200 and answer.readline()]
        assert len(followed) == 64, "those beyond end at once where they come at the same moment"
        assert other.getresponse().status == 200
    finally:
        for connection in (*greedy, other):
            connection.close()


def test_a_host_with_minutes_of_all_days_costs_nothing(service: RunningService) -> None:
    """Each day of usage is a file of its own: of old days there are none."""
    token = service.client().post("agents", {"host": "old"})["token"]
    body = {"token": token, "host": "old"}
    credential = service.ask("POST", "/api/v1/agents/enrol", body=body)[1]["credential"]
    now = time.time_ns() // 60_000_000_000
    rows = [
        {"minute": minute, "device": "d", "job": "j", "state": "busy", "device_ms": 60_000}
        for minute in (*range(1, now - 20 * 1440, 1440), now - 2 * 1440, now)
    ]
    beat = {"sent_ns": 1, "boot_id": "b", "version": "0", "usage": rows}
    assert service.ask("POST", "/api/v1/agents/old/heartbeat", credential, beat)[0] == 200
    metrics = service.ask("GET", "/metrics")[1].decode()
    assert f'usage_refused_rows_total{{host="old"}} {len(rows) - 2}.0' in metrics
    assert "traceloom_fleet_usage_waiting 2.0" in metrics


def test_who_has_a_token_opens_no_sessions_without_end(tmp_path: Path) -> None:
    """Each is kept for half a day, and in the audit for ever."""
    state = ServiceState(str(tmp_path / "state.db"))
    secrets = [state.add_token(name, "viewer") for name in ("greedy", "other")]
    readers = SessionAuthentication(state, None)
    readers.sign_ins.clock = lambda: 0.0
    request = Request({"type": "http", "headers": [], "client": ("192.0.2.1", 1)})

    async def sign_in() -> None:
        for _ in range(20):
            await readers.sign_in(request, secrets[0])
        with pytest.raises(HttpError) as refused:
            await readers.sign_in(request, secrets[0])
        assert refused.value.slug == "too-many-requests"
        assert await readers.sign_in(request, secrets[1]), "of another token at the same address"

    asyncio.run(sign_in())
    assert len(state.audit(1000, 2**62)) == 21
    state.close()


def test_who_is_not_known_yet_sends_no_large_body(service: RunningService) -> None:
    code, answer = service.ask("POST", "/api/v1/agents/enrol", "guess", b" " * 70_000)
    assert (code, answer["error"]["slug"]) == (413, "too-large")


@pytest.mark.parametrize(
    ("job", "path"),
    [
        ("a?since=1", "/jobs/a%3Fsince%3D1"),
        ("€ b", "/jobs/%E2%82%AC%20b"),
        ("50%25", "/jobs/50%2525"),
    ],
)
def test_pages_of_strange_names_lead_to_themselves(
    job: str, path: str, service: RunningService, tmp_path: Path
) -> None:
    site = "cross-site"
    again = service.browse(path, sec_fetch_site=site)
    assert (again.status, again.headers["Refresh"]) == (200, f"0; url={path}")
    name = f"n{abs(hash(job))}"
    token = service.client().post("agents", {"host": name})["token"]
    host = SimulatedHost([service.url], name, token, [ranked_process(0, job)], tmp_path)
    try:
        host.beat()
        text = service.browse(path, service.signed_in()).text
        links = set(re.findall(r'href="(/jobs/[^"?]*)\?', text))
        assert links == {path}
    finally:
        host.close()


def test_what_a_client_says_of_its_address_is_in_no_audit(service: RunningService) -> None:
    operator = _make_token(service, "liar", "operator")
    answer = _send_raw(
        service.port,
        "POST /api/v1/backfill HTTP/1.1\r\nHost: x/api/v1/harmless?\r\nConnection: close\r\n"
        f"Authorization: Bearer {operator}\r\nContent-Length: 2\r\n\r\n{{}}",
    )
    assert answer.startswith(b"HTTP/1.1 200")
    [entry] = [
        entry
        for entry in service.ask("GET", "/api/v1/audit")[1]["entries"]
        if entry["who"] == "liar"
    ]
    assert (entry["what"], entry["result"]) == ("POST /api/v1/backfill", "done")


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "other"])
def test_every_service_takes_what_http_allows(
    leads: bool, services: tuple[RunningService, RunningService]
) -> None:
    service = services[not leads]
    old = f"GET /api/v1/hosts HTTP/1.0\r\nAuthorization: Bearer {service.token}\r\n\r\n"
    assert _send_raw(service.port, old).startswith(b"HTTP/1.1 200")
    body = '{"spec":{"job":"none","steps":1}}'
    head = (
        f"POST /api/v1/requests HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Authorization: Bearer {service.token}\r\n"
    )
    chunks = f"{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    for length in ("", "Content-Length: 3\r\n"):  # which chunks go before
        request = f"{head}{length}Transfer-Encoding: chunked\r\n\r\n{chunks}"
        answer = _send_raw(service.port, request)
        assert b"no-such-job" in answer, answer


def test_a_service_that_does_not_lead_silences_no_host_either(
    services: tuple[RunningService, RunningService], tmp_path: Path
) -> None:
    leader, other = services
    token = leader.client().post("agents", {"host": "node9"})["token"]
    host = SimulatedHost([other.url], "node9", token, [ranked_process(0, "job")], tmp_path)
    ended, codes = threading.Event(), Counter[bytes]()

    def flood() -> None:
        request = b"GET /api/v1/captures HTTP/1.1\r\nHost: x\r\n\r\n" * 50
        with socket.create_connection(("127.0.0.1", other.port), 60) as connection:
            while not ended.is_set():
                connection.sendall(request)
                codes.update(re.findall(rb"HTTP/1.1 (\d+)", connection.recv(1 << 20)))

    guesser = threading.Thread(target=flood)
    guesser.start()
    try:
        until(lambda: codes[b"429"] > 100)
        for _ in range(20):
            host.beat()
    finally:
        ended.set()
        guesser.join()
        host.close()


@pytest.mark.thorough
def test_uploads_that_wait_for_a_slow_store_keep_nobody_else_waiting(
    services: tuple[RunningService, RunningService],
) -> None:
    """More of them than a service has threads, while the store is silent."""
    leader, _ = services
    requester = _make_token(leader, "hasty", "requester")
    [store] = [child for child in psutil.Process().children() if "moto.server" in child.cmdline()]
    with ThreadPoolExecutor(60) as pool:
        store.send_signal(signal.SIGSTOP)
        try:
            announced = [
                pool.submit(_announce, leader, requester, f"job{number}", bytes([number]))
                for number in range(60)
            ]
            for _ in range(30):
                assert leader.ask("GET", "/api/v1/captures")[0] == 200
        finally:
            store.send_signal(signal.SIGCONT)
        assert {done.result()[0] for done in announced} == {200}
