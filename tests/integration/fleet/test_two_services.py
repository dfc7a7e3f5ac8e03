"""Two services of one PostgreSQL and S3 are killed, frozen and started again while captures arrive: each is analysed
once, none is lost, doubled or put into quarantine, and pages are answered or refused in a sentence."""

from __future__ import annotations

import http.client
import random
import signal
import threading
import time
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn", "htpy"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import opened, places, trace_bytes  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.cli.upload import FleetClient, upload  # noqa: E402
from traceloom.errors import InputError  # noqa: E402

PAGES = ("/", "/hosts", "/requests", "/captures")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_captures_arrive_once_whoever_is_killed_or_frozen(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = random.Random(seed)
    where = places("shared", tmp_path, monkeypatch)
    arguments = ("--store", where.store, "--state", where.state, "--workers", "1", "--lease", "2")
    services = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        services.append(RunningService(tmp_path / name, *arguments))
    until(lambda: services[1].ask("GET", "/api/v1/hosts")[0] == 200)
    tokens = [service.token for service in services]
    cookie = services[0].signed_in()
    over = threading.Event()
    frozen: set[int] = set()
    answers: list[int] = []

    def make_faults() -> None:
        while not over.wait(order.uniform(1.0, 3.0)):
            number = order.randrange(2)
            service = services[number]
            if order.random() < 0.5:
                service.end(signal.SIGKILL)
                service.start()
                continue
            frozen.add(number)
            service.process.send_signal(signal.SIGSTOP)
            over.wait(order.uniform(1.0, 5.0))  # longer than a lease, at times
            service.process.send_signal(signal.SIGCONT)
            frozen.discard(number)

    def read() -> None:
        while not over.wait(0.2):
            number = random.randrange(2)
            if number in frozen:
                continue
            try:
                seen = services[number].browse(random.choice(PAGES), cookie)
            except (OSError, http.client.HTTPException):  # it was killed just then
                continue
            answers.append(seen.status)
            assert "Traceback" not in seen.text

    threads = [threading.Thread(target=each) for each in (make_faults, read)]
    for thread in threads:
        thread.start()
    names = []
    try:
        for number in range(12):
            path = tmp_path / f"{number}.json"
            path.write_bytes(trace_bytes(number + 1))
            for turn in range(40):
                which = (number + turn) % 2
                client = FleetClient(services[which].url, tokens[which], 10.0, persistent=True)
                try:
                    names.append(upload(client, path, f"job{number}")["id"])
                    break
                except InputError:  # as behind a round robin, another one may answer
                    time.sleep(0.5)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    try:
        assert len(set(names)) == 12
        stores = opened(where)
        until(lambda: stores.state.counts()["committed"] == 12, 120)
        counts = {state: number for state, number in stores.state.counts().items() if number}
        assert counts == {"committed": 12}
        held = stores.tables.scan("captures").select("capture").collect()["capture"]
        assert sorted(held) == sorted(names)
        assert set(answers) <= {200, 202, 503}
        assert 200 in answers
        assert "Traceback" not in "".join(service.log.read_text() for service in services)
        stores.state.close()
    finally:
        for service in services:
            service.end(signal.SIGKILL)
