"""The service over HTTP: what it takes from whom, what it refuses, and that nothing of a stranger gets far."""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.dask_cluster import running_cluster  # noqa: E402
from support.fleet import Kind, places, trace_bytes  # noqa: E402
from support.prometheus import free_port  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.cli import main  # noqa: E402
from traceloom.cli.upload import FleetClient, upload  # noqa: E402
from traceloom.errors import InputError  # noqa: E402
from traceloom.fleet.store.captures import ServiceState  # noqa: E402


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("fleet")
    running = RunningService(folder, "--store", str(folder / "store"), "--workers", "1")
    yield running
    assert running.end() == 0, running.log.read_text()


def announced(content: bytes = b"abc", name: str = "a.json", **more: Any) -> dict[str, Any]:
    return {
        "files": [
            {
                "name": name,
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                **more,
            }
        ]
    }


@pytest.mark.parametrize("kind", ["alone", pytest.param("shared", marks=pytest.mark.thorough)])
def test_a_capture_is_uploaded_analysed_and_reported(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = [] if kind == "alone" else running_cluster().options
    where = places(kind, tmp_path, monkeypatch)
    service = RunningService(
        tmp_path, "--store", where.store, "--state", where.state, "--workers", "1", *engine
    )
    monkeypatch.setenv("TRACELOOM_SERVER", service.url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run = tmp_path / "run 1"
    (run / "sources").mkdir(parents=True)
    (run / "rank 0.json").write_bytes(trace_bytes())
    (run / "sources" / "kernel.py").write_text("pass")
    (run / ".hidden").write_text("x")
    (run / "link").symlink_to("/etc/passwd")
    try:
        assert main(["upload", str(run), "--job", "slurm-1", "--wait", "--json"]) == 0
        [answer] = json.loads(capsys.readouterr().out)
        assert answer["state"] == "committed"
        assert answer["files"] == {"rank_0.json": len(trace_bytes()), "sources/kernel.py": 4}
        assert main(["upload", str(run), "--job", "slurm-1", "--json"]) == 0  # again: it is there
        assert [json.loads(capsys.readouterr().out)[0]["id"]] == [answer["id"]]
        assert main(["fleet", "captures", "--job", "slurm-1"]) == 0
        assert answer["id"] in capsys.readouterr().out
        assert main(["fleet", "report", answer["id"], "-o", str(tmp_path / "report.html")]) == 0
        assert "<html" in (tmp_path / "report.html").read_text()
        assert service.ask("GET", f"/api/v1/captures/{answer['id']}/files/sources/kernel.py") == (
            200,
            b"pass",
        )
        assert main(["fleet", "fetch", answer["id"], "-o", str(tmp_path / "again")]) == 0
        fetched = {
            path.relative_to(tmp_path / "again")
            for path in (tmp_path / "again").rglob("*")
            if path.is_file()
        }
        assert fetched == {Path("rank_0.json"), Path("sources/kernel.py")}
        assert (tmp_path / "again" / "sources" / "kernel.py").read_text() == "pass"
        assert main(["fleet", "backfill"]) == 0
        capsys.readouterr()
        assert main(["fleet", "check", "--json"]) == 0
        checks = json.loads(capsys.readouterr().out)
        assert {check["name"]: check["works"] for check in checks["checks"]} == {
            "state": True,
            "files": True,
            "tables": True,
            "engine": True,
        }
        assert checks["tasks"]["committed"] == 1
        assert "password" not in str(checks)
        # an object store takes no more than 5 GB at once
        code, refused = service.ask("POST", "/api/v1/captures", body=announced(size=6_000_000_000))
        assert code == (200 if kind == "alone" else 413)
        assert kind == "alone" or "files of 5.24 GB, 275 GB in all" in refused["error"]["message"]
    finally:
        assert service.end() == 0


def test_the_token_of_this_user_is_in_a_file_that_nobody_else_reads(
    service: RunningService,
) -> None:
    assert stat.S_IMODE(service.token_file.stat().st_mode) == 0o600
    secret = service.token_file.read_text().strip().encode()
    kept = b"".join(path.read_bytes() for path in (service.folder / "store").glob("state.db*"))
    assert secret not in kept


def test_nothing_but_health_is_answered_without_a_token(service: RunningService) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request("GET", "/healthz")
    assert json.loads(connection.getresponse().read()) == {"healthy": True}
    for path in ("/metrics", "/api/v1/captures", "/api/v1/openapi.json", "/api/v1/nothing"):
        connection.request("GET", path)
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["slug"]) == (
            401,
            "unknown-token",
        )
    connection.close()
    assert service.ask("GET", "/api/v1/captures", "wrong")[0] == 401


def test_each_role_may_do_what_it_is_for_and_no_more(service: RunningService) -> None:
    needs = {
        "viewer": ("GET", "/api/v1/captures", None),
        "requester": ("POST", "/api/v1/captures", announced(b"role")),
        "operator": ("POST", "/api/v1/backfill", {}),
        "admin": ("GET", "/api/v1/audit", None),
    }
    roles = list(needs)
    for role in roles:
        secret = service.client().post("tokens", {"name": f"of-{role}", "role": role})["token"]
        for needed, (method, path, body) in needs.items():
            code, answer = service.ask(method, path, secret, body)
            assert code == (200 if roles.index(role) >= roles.index(needed) else 403), (
                role,
                needed,
                answer,
            )
    assert service.ask("DELETE", "/api/v1/tokens/of-admin")[0] == 200
    assert service.ask("GET", "/api/v1/captures", secret)[0] == 401
    assert service.ask("DELETE", "/api/v1/tokens/of-admin")[0] == 404
    entries = service.client().get("audit")["entries"]
    assert ("of-viewer", "POST /api/v1/backfill", "not-allowed") in {
        (e["who"], e["what"], e["result"]) for e in entries
    }
    assert ("of-requester", "POST /api/v1/captures", "done") in {
        (e["who"], e["what"], e["result"]) for e in entries
    }


def test_one_uploader_cannot_write_into_a_capture_of_another(service: RunningService) -> None:
    anna, eve = (
        service.client().post("tokens", {"name": name, "role": "requester"})["token"]
        for name in ("anna", "eve")
    )
    _, capture = service.ask("POST", "/api/v1/captures", anna, announced())
    path = f"/api/v1/captures/{capture['id']}"
    assert service.ask("PUT", f"{path}/files/a.json", eve, b"abc")[0] == 403
    assert service.ask("POST", f"{path}/complete", eve)[0] == 403
    assert service.ask("POST", "/api/v1/captures", eve, announced())[1]["id"] != capture["id"]


@pytest.mark.parametrize(
    ("body", "slug"),
    [
        (announced(name="../../etc/passwd"), "unsafe-name"),
        (announced(name="/etc/passwd"), "unsafe-name"),
        (announced(name=".ssh"), "unsafe-name"),
        (announced(name="a/b/c"), "wrong-request"),
        ({"files": announced()["files"] * 2}, "wrong-request"),
        (
            {"files": [*announced(name="a")["files"], *announced(name="A/b")["files"]]},
            "wrong-request",
        ),
        ({"files": []}, "wrong-request"),
        (announced(size=-1), "wrong-request"),
        (announced(size=1 << 45), "too-large"),
        (announced(sha256="x"), "wrong-request"),
        ({**announced(), "job": "a\u0000b"}, "wrong-request"),
        ({**announced(), "more": 1}, "wrong-request"),
        (b"\xff\x00", "wrong-request"),
        (b"[" * 100_000, "wrong-request"),
        (
            {"files": [{"name": f"f{at}", "size": 0, "sha256": "0" * 64} for at in range(20_001)]},
            "too-large",
        ),
    ],
    ids=range(15),
)
def test_what_cannot_be_a_capture_is_refused(
    service: RunningService, body: object, slug: str
) -> None:
    code, answer = service.ask("POST", "/api/v1/captures", body=body)
    assert (code, answer["error"]["slug"]) == (413 if slug == "too-large" else 400, slug)


def test_a_half_upload_leaves_nothing_and_goes_on(service: RunningService) -> None:
    content = b"x" * 300_000
    _, capture = service.ask("POST", "/api/v1/captures", body=announced(content, "half.json"))
    path = f"/api/v1/captures/{capture['id']}"
    store = service.folder / "store"

    assert service.ask("POST", f"{path}/complete")[1]["error"]["slug"] == "upload-incomplete"
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.putrequest("PUT", f"{path}/files/half.json")
    connection.putheader("Authorization", f"Bearer {service.token_file.read_text().strip()}")
    connection.putheader("Content-Length", str(len(content)))
    connection.endheaders()
    connection.send(content[:100_000])
    until(lambda: list(store.glob(".incoming-*")))
    connection.close()
    until(lambda: not list(store.glob(".incoming-*")))
    assert (
        service.ask("PUT", f"{path}/files/half.json", body=b"y" * 300_000)[1]["error"]["slug"]
        == "upload-differs"
    )
    assert (
        service.ask("PUT", f"{path}/files/half.json", body=content + b"x")[1]["error"]["slug"]
        == "too-large"
    )
    assert (
        service.ask("PUT", f"{path}/files/other.json", body=content)[1]["error"]["slug"]
        == "no-such-file"
    )
    assert service.ask("PUT", f"{path}/files/..%2f..%2fx", body=content)[0] == 404
    assert [
        file for file in store.rglob("*") if "half" in file.name or "incoming" in file.name
    ] == []

    [target] = service.ask("POST", "/api/v1/captures", body=announced(content, "half.json"))[1][
        "uploads"
    ]
    assert service.ask("PUT", target["url"], body=content) == (
        200,
        {"name": "half.json", "size": 300_000},
    )
    assert service.ask("POST", f"{path}/complete")[1]["state"] == "received"
    assert service.ask("PUT", target["url"], body=content)[0] == 409
    until(lambda: service.ask("GET", path)[1]["state"] == "quarantined")  # it is no trace
    code, answer = service.ask("GET", f"{path}/report")
    assert (code, answer["error"]["slug"]) == (409, "not-analysed")


def test_what_is_not_there_is_said_so(service: RunningService) -> None:
    assert service.ask("GET", "/api/v1/captures/c0")[1]["error"]["slug"] == "no-such-capture"
    for path in ("/api/v1/nothing", "/api/v1/tokens/"):
        assert service.ask("GET", path)[1]["error"]["slug"] == "no-such-route"
    for path in (
        "/api/v2/captures",
        "/api/v0/agents/enrol",
        "/api/v12/agents/n1/work",
    ):  # of whomever, with any token
        code, answer = service.ask("GET", path)
        assert (code, answer["error"]["slug"]) == (404, "other-version")
    assert service.ask("PATCH", "/api/v1/captures")[1]["error"]["slug"] == "wrong-method"
    assert service.ask("GET", "/api/v1/captures?most=0")[1]["error"]["slug"] == "wrong-request"


def test_the_document_describes_every_route_and_the_series_count_requests(
    service: RunningService,
) -> None:
    document = service.ask("GET", "/api/v1/openapi.json")[1]
    assert {"/api/v1/captures/{id}/files/{name}", "/api/v1/tokens", "/healthz"} <= set(
        document["paths"]
    )
    names = [op["operationId"] for path in document["paths"].values() for op in path.values()]
    assert len(names) == len(set(names))
    text = service.ask("GET", "/metrics")[1].decode()
    assert 'traceloom_fleet_tasks{state="committed"}' in text
    assert (
        'traceloom_fleet_requests_total{code="200",route="/api/v1/openapi.json"}' in text
        or "openapi" not in text
    )


def test_beyond_this_host_it_starts_only_with_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["serve", "--store", str(tmp_path / "s"), "--address", "0.0.0.0:0"]) == 3
    refusal = capsys.readouterr().err
    assert "tcp-without-tls" in refusal
    assert "--certificate" in refusal


def test_a_service_that_does_not_run_is_said_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("x")
    where = ["--server", f"http://127.0.0.1:{free_port()}", "--token-file", str(tmp_path / "token")]
    assert main(["fleet", "captures", *where]) == 3
    assert "no-service" in capsys.readouterr().err


@pytest.mark.parametrize(
    "moment",
    [
        "uploaded",
        *(pytest.param(moment, marks=pytest.mark.thorough) for moment in ("checked", "committed")),
    ],
)
def test_a_service_that_is_killed_loses_and_doubles_nothing(tmp_path: Path, moment: str) -> None:
    service = RunningService(tmp_path, "--store", str(tmp_path / "store"), "--workers", "1")
    (tmp_path / "t.json").write_bytes(trace_bytes())
    state = ServiceState(str(tmp_path / "store" / "state.db"))
    try:
        capture = upload(service.client(), tmp_path / "t.json")["id"]
        far = {
            "uploaded": {"received", "checked"},
            "checked": {"checked", "analysed"},
            "committed": {"committed"},
        }
        until(lambda: {task.state for task in state.tasks(capture)} & (far[moment] | {"committed"}))
        service.end(signal.SIGKILL)
        with state._transaction() as connection:  # as if the time of its leases had gone by
            state._change(connection, "UPDATE tasks SET free_at_ns = 0")
            state._change(connection, "UPDATE leases SET until_ns = 0")
        service.start()
        until(lambda: service.client().get(f"captures/{capture}")["state"] == "committed")
    finally:
        service.end()
        state.close()
    from traceloom.fleet.store.tables import Tables

    assert Tables(str(tmp_path / "store")).scan("captures").collect()["capture"].to_list() == [
        capture
    ]


def test_too_many_requests_are_told_when_to_come_again(service: RunningService) -> None:
    secret = service.client().post("tokens", {"name": "eager", "role": "viewer"})["token"]
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        connection.request("GET", "/api/v1/nothing", headers={"Authorization": "Bearer wrong"})
        response = connection.getresponse()
        response.read()
        if response.status == 429:
            assert int(response.headers["Retry-After"]) >= 1
            break
    else:
        pytest.skip("this machine is too slow to ask 200 times a second")
    connection.close()
    assert service.ask("GET", "/api/v1/captures", secret)[0] == 200


def test_the_client_refuses_addresses_that_are_none(tmp_path: Path) -> None:
    for url in (
        "ftp://x",
        "http://10.0.0.1:9466",
        "http://fleet.example.org",
        "https://u@x",
        "http://[::1",
    ):
        with pytest.raises(InputError) as refused:
            FleetClient(url, "secret")  # which would go over a network
        assert refused.value.slug == "wrong-address"
    with pytest.raises(InputError) as raised:
        upload(FleetClient("http://127.0.0.1:1", "x"), tmp_path)
    assert raised.value.slug == "no-inputs"
