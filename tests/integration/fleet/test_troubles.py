"""Stores that are slow, fail or are full, and hosts that lie: what was begun goes on, and nothing stands twice."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.bad_network import Fault, bad_network  # noqa: E402
from support.fleet import Stores, add_capture, opened, places  # noqa: E402
from support.killed_pipeline import Here  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.simulated_hosts import SimulatedHost  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.agent.uplink.client import ServiceError  # noqa: E402
from traceloom.collect.client import upload  # noqa: E402
from traceloom.collect.pipeline import Pipeline  # noqa: E402
from traceloom.errors import TraceloomError  # noqa: E402
from traceloom.testing import TraceBuilder  # noqa: E402


def test_an_object_store_behind_a_bad_network_has_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = places("shared", tmp_path, monkeypatch)
    stores = opened(where)
    for name in ("c1", "c2", "c3"):
        add_capture(stores, name)
    stores.state.close()
    real = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    assert real.port is not None
    faults: tuple[Fault, ...] = ("late", "refused", "lost", "reset", "cut")
    with bad_network(real.port, tuple(each for fault in faults for each in (fault, "", "", ""))) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")

        def begun() -> Stores | None:
            try:
                return opened(where)
            except TraceloomError:  # which the service ends with, and whoever runs it starts it again
                return None

        bad = until(begun, 120)
        assert bad is not None
        pipeline = Pipeline(*bad, Here())
        pipeline.lead()

        def all_done() -> bool:
            with bad.state._transaction() as connection:  # as if the pause after a trouble had gone by
                bad.state._change(connection, "UPDATE tasks SET free_at_ns = 0 WHERE holder = ''")
            try:
                while pipeline.work():
                    pass
                pipeline.commit()
            except TraceloomError:  # which the service logs, and tries again
                return False
            return bad.state.counts()["committed"] == 3

        until(all_done, 120)
        kernels = bad.tables.scan("kernels").collect()
        assert dict(kernels.group_by("capture").agg(pl.col("count").sum()).rows()) == {"c1": 4, "c2": 4, "c3": 4}
        assert sorted(bad.tables.scan("captures").collect()["capture"]) == ["c1", "c2", "c3"]
        bad.state.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_takes_nothing_says_so_and_goes_on_with_room(small_disk: Path, tmp_path: Path) -> None:
    service = RunningService(
        tmp_path, "--store", str(small_disk), "--state", str(tmp_path / "state.db"), "--workers", "1"
    )
    filling = small_disk / "filling"
    trace = tmp_path / "t.json"
    TraceBuilder(0).op("aten::mm", 1, 5).kernel("gemm", 2, 3).write(trace)
    host = None
    try:
        until(lambda: service.ask("GET", "/api/v1/hosts")[0] == 200)
        token = service.client().post("agents", {"host": "node1"})["token"]
        host = SimulatedHost([service.url], "node1", token, "job", 0, tmp_path)
        host.beat()
        name = service.ask("POST", "/api/v1/requests", body={"wanted": {"job": "job", "steps": 2}})[1]["id"]
        host.report(name, "armed")
        host.report(name, "running")
        missing = host.report(name, "uploading").missing
        with filling.open("wb") as file, pytest.raises(OSError, match="space"):  # noqa: PT012
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        with pytest.raises(TraceloomError) as refused:
            upload(service.client(), trace)
        assert refused.value.slug == "cannot-write"
        with pytest.raises(ServiceError) as error:
            host.send(name, missing)
        assert (error.value.slug, error.value.status) == ("cannot-write", 503)
        checks = {check["name"]: check["works"] for check in service.client().get("check")["checks"]}
        assert checks == {"state": True, "files": False, "tables": True}
        assert [
            path for path in small_disk.rglob("*") if ".incoming" in path.name or path.name.startswith(".rank")
        ] == []

        filling.unlink()
        capture = upload(service.client(), trace)["id"]
        host.go_on()
        until(lambda: service.client().get(f"captures/{capture}")["state"] == "committed")
        until(lambda: service.ask("GET", f"/api/v1/requests/{name}")[1]["state"] == "done")
    finally:
        if host is not None:
            host.close()
        assert service.end() == 0, service.log.read_text()


def test_hosts_that_lie_harm_nobody_and_are_named(tmp_path: Path) -> None:
    service = RunningService(tmp_path, "--store", str(tmp_path / "store"), "--workers", "1")
    hosts: list[SimulatedHost] = []
    try:
        until(lambda: service.ask("GET", "/api/v1/hosts")[0] == 200)
        for number, rank in enumerate((0, 1, 1)):  # the last one says that it has the rank of another
            token = service.client().post("agents", {"host": f"node{number}"})["token"]
            hosts.append(SimulatedHost([service.url], f"node{number}", token, "job", rank, tmp_path))
            hosts[-1].beat()
        liar = hosts[2]
        with pytest.raises(ServiceError) as error:  # in the name of another host
            liar.ask(lambda client: client.get("agents/node0/work?wait=0", object))
        assert error.value.slug == "unknown-host"
        name = service.ask("POST", "/api/v1/requests", body={"wanted": {"job": "job", "steps": 2}})[1]["id"]
        for host in hosts:
            host.report(name, "armed")
        for host in hosts[:2]:
            host.upload(name)
        said = liar.files
        liar.files = [type(file)(name=file.name, bytes=file.bytes + 1, sha256=file.sha256) for file in said]
        with pytest.raises(ServiceError):  # other sizes than it said
            liar.upload(name)
        assert liar.report(name, "uploaded").missing == [file.name for file in said]  # saying it does not make it so
        liar.files = said
        liar.upload(name)
        request = until(
            lambda: (
                (now := service.ask("GET", f"/api/v1/requests/{name}")[1])["state"] in {"done", "partial", "failed"}
                and now
            )
        )
        assert request["capture"]
        [capture] = [c for c in service.client().get("captures")["captures"] if c["id"] == request["capture"]]
        assert capture["state"] == ("committed" if request["state"] == "done" else "quarantined"), request
        if request["state"] == "partial":
            assert request["reason"] == "analysis-failed"
    finally:
        for host in hosts:
            host.close()
        assert service.end() == 0, service.log.read_text()
