"""Two services of one state behind one address: each answers everything, and one takes over from the other."""

from __future__ import annotations

import http.client
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client", "uvicorn", "htpy"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import KINDS, Kind, places  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402

PAGES = ("/", "/hosts", "/jobs", "/requests", "/triggers", "/captures", "/kernels")
ROUTES = ("hosts", "jobs", "requests", "triggers", "captures", "check", "now")


@pytest.fixture(params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RunningService, RunningService]]:
    """The service that leads, and another one of the same state."""
    kind: Kind = request.param
    where = places(kind, tmp_path, monkeypatch)
    arguments = ("--store", where.store, "--state", where.state, "--workers", "1", "--lease", "3")
    first = RunningService(tmp_path, *arguments)
    try:
        until(lambda: first.ask("GET", "/api/v1/hosts")[0] == 200)
        second = RunningService(tmp_path, *arguments)
        try:
            yield first, second
        finally:
            second.end(signal.SIGKILL)
    finally:
        first.end(signal.SIGKILL)


def test_both_answer_everything_and_the_other_one_takes_over(
    pair: tuple[RunningService, RunningService],
) -> None:
    first, second = pair
    assert [second.ask("GET", f"/api/v1/{route}")[0] for route in ROUTES[:-1]] == [200] * 6
    cookie = first.signed_in()
    assert [second.browse(page, cookie).status for page in PAGES] == [200] * len(PAGES)
    code, answer = second.ask("POST", "/api/v1/agents", body={"host": "n1"})
    assert code == 200, answer
    code, credentials = second.ask(
        "POST", "/api/v1/agents/enrol", token="none", body={"host": "n1", "token": answer["token"]}
    )
    assert code == 200, credentials
    seen = [host["host"] for host in first.ask("GET", "/api/v1/hosts")[1]["hosts"]]
    assert seen == ["n1"] == [host["host"] for host in second.client().get("hosts")["hosts"]]
    # a page that is kept up to date
    connection = http.client.HTTPConnection("127.0.0.1", second.port, timeout=20)
    headers = {"Cookie": cookie, "Accept": "text/event-stream"}
    connection.request("GET", "/hosts", headers=headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline()
    connection.close()
    # what only a leader can do, and who says so wrongly
    assert second.ask("POST", "/api/v1/compact")[0] == 200
    refused, text = second.ask("GET", "/api/v1/hosts", **{"X-Traceloom-Handed-On": "term 1.2.3.4"})
    assert (refused, text["error"]["slug"]) == (503, "not-leading")
    first.end(signal.SIGKILL)
    code, text = second.ask("GET", "/api/v1/hosts")
    assert code in {200, 503}
    until(lambda: second.ask("GET", "/api/v1/hosts")[0] == 200)
    for page in PAGES:  # a page whose answer takes long is refused with 202 until it is there
        until(lambda page=page: second.browse(page, cookie).status == 200)
