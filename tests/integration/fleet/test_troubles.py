"""Stores that are slow, fail or are full, and hosts that lie: what was begun goes on, and nothing stands twice."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake", "prometheus_client"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.bad_network import bad_network  # noqa: E402
from support.fleet import Stores, add_capture, opened, places  # noqa: E402
from support.killed_pipeline import Here  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.simulated_hosts import SimulatedHost, ranked_process  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.agent.fleet_link.client import ServiceError  # noqa: E402
from traceloom.cli.upload import upload  # noqa: E402
from traceloom.errors import TraceloomError  # noqa: E402
from traceloom.fleet.service.pipeline import CapturePipeline  # noqa: E402
from traceloom.fleet.store.schema import SCHEMAS  # noqa: E402
from traceloom.fleet.store.tables import Tables  # noqa: E402
from traceloom.testing import TraceBuilder  # noqa: E402

DAY = date(2026, 11, 2)


@pytest.mark.thorough
def test_an_object_store_behind_a_bad_network_has_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceloom.fleet.service.pipeline._ERROR_PAUSE_S", 0.05)
    where = places("shared", tmp_path, monkeypatch)
    names = ["c1", "c2", "c3"]
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert server is not None
    with bad_network(server, seed=2) as network:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")

        def begun() -> Stores | None:
            try:
                return opened(where)
            except (
                TraceloomError
            ):  # with which the service ends, and whoever runs it starts it again
                return None

        stores = until(begun, 300)
        assert stores is not None
        for name in names:
            add_capture(stores, name)
        pipeline = CapturePipeline(*stores, Here(), commit_s=0.1)
        pipeline.start()
        try:
            until(lambda: stores.state.counts()["committed"] == 3, 300)
        finally:
            pipeline.stop()
        assert set(network.dealt) == {"none", "late", "refused", "reset", "lost", "cut"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
    kernels = stores.tables.scan("kernels").collect()
    assert dict(kernels.group_by("capture").agg(pl.col("count").sum()).rows()) == dict.fromkeys(
        names, 4
    )
    assert sorted(stores.tables.scan("captures").collect()["capture"]) == names
    stores.state.close()


@pytest.mark.thorough
def test_rows_that_are_replaced_and_compacted_behind_a_bad_network_stand_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are tried until they go in, as the service does; each of the later ones replaces a capture."""
    where = places("shared", tmp_path, monkeypatch)
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert server is not None
    tables = Tables(where.store)
    tables.create()
    hour_ns = int(datetime(2026, 11, 2, 1, tzinfo=timezone.utc).timestamp()) * 10**9
    part = {
        "day": DAY,
        "time_ns": hour_ns,
        "host": "n",
        "device": "d",
        "job": "j",
        "state": "busy",
        "device_ms": 60_000,
    }
    with bad_network(server, seed=0) as network:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{network.port}")

        def done(work: Callable[[], object]) -> bool:
            try:
                work()
            except TraceloomError:
                return False
            return True

        for number in range(1, 7):
            capture = f"c{number % 3}"
            kernels = {
                "day": [DAY] * 2,
                "capture": [capture] * 2,
                "kernel": ["a", "b"],
                "count": [number, 100 + number],
            }
            rows = {"kernels": SCHEMAS["kernels"].complete(pl.DataFrame(kernels))}
            until(lambda: done(lambda: tables.commit("captures", number, rows, [capture])), 300)  # noqa: B023
            hour = {"usage_hour": SCHEMAS["usage_hour"].complete(pl.DataFrame([part]))}
            until(lambda: done(lambda: tables.commit("usage", number, hour)), 300)  # noqa: B023
        until(lambda: done(lambda: tables.compact(DAY + timedelta(days=1))), 300)
    assert {"refused", "reset", "lost"} <= set(network.dealt)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
    kernels_now = (
        tables.scan("kernels")
        .select("capture", "kernel", "count")
        .sort("capture", "kernel")
        .collect()
        .rows()
    )
    assert kernels_now == [
        (f"c{at}", kernel, more + last)
        for at, last in ((0, 6), (1, 4), (2, 5))
        for kernel, more in (("a", 0), ("b", 100))
    ]
    assert tables.scan("usage_hour").select("time_ns", "device_ms").collect().rows() == [
        (hour_ns, 6 * 60_000)
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.thorough
def test_a_full_disk_takes_nothing_says_so_and_goes_on_with_room(
    small_disk: Path, tmp_path: Path
) -> None:
    service = RunningService(
        tmp_path,
        "--store",
        str(small_disk),
        "--state",
        str(tmp_path / "state.db"),
        "--workers",
        "1",
    )
    filling = small_disk / "filling"
    trace = tmp_path / "t.json"
    TraceBuilder(0).op("aten::mm", 1, 5).kernel("gemm", 2, 3).write(trace)
    host = None
    try:
        until(lambda: service.ask("GET", "/api/v1/hosts")[0] == 200)
        token = service.client().post("agents", {"host": "node1"})["token"]
        host = SimulatedHost([service.url], "node1", token, [ranked_process(0, "job")], tmp_path)
        host.beat()
        name = service.ask("POST", "/api/v1/requests", body={"spec": {"job": "job", "steps": 2}})[
            1
        ]["id"]
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
        checks = {
            check["name"]: check["works"] for check in service.client().get("check")["checks"]
        }
        assert checks == {"state": True, "files": False, "tables": True, "engine": True}
        assert [
            path
            for path in small_disk.rglob("*")
            if ".incoming" in path.name or path.name.startswith(".rank")
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
        for number, rank in enumerate(
            (0, 1, 1)
        ):  # the last one says that it has the rank of another
            token = service.client().post("agents", {"host": f"node{number}"})["token"]
            hosts.append(
                SimulatedHost(
                    [service.url], f"node{number}", token, [ranked_process(rank, "job")], tmp_path
                )
            )
            hosts[-1].beat()
        liar = hosts[2]
        with pytest.raises(ServiceError) as error:  # in the name of another host
            liar.ask(lambda client: client.get("agents/node0/work?wait=0", object))
        assert error.value.slug == "unknown-host"
        name = service.ask("POST", "/api/v1/requests", body={"spec": {"job": "job", "steps": 2}})[
            1
        ]["id"]
        for host in hosts:
            host.report(name, "armed")
        for host in hosts[:2]:
            host.upload(name)
        said = liar.files
        liar.files = [
            type(file)(name=file.name, bytes=file.bytes + 1, sha256=file.sha256) for file in said
        ]
        with pytest.raises(ServiceError):  # other sizes than it said
            liar.upload(name)
        assert liar.report(name, "uploaded").missing == [
            file.name for file in said
        ]  # saying it does not make it so
        liar.files = said
        liar.upload(name)
        request = until(
            lambda: (
                (now := service.ask("GET", f"/api/v1/requests/{name}")[1])["state"]
                in {"done", "partial", "failed"}
                and now
            )
        )
        assert request["capture"]
        [capture] = [
            c for c in service.client().get("captures")["captures"] if c["id"] == request["capture"]
        ]
        assert capture["state"] == ("committed" if request["state"] == "done" else "quarantined"), (
            request
        )
        if request["state"] == "partial":
            assert request["reason"] == "analysis-failed"
    finally:
        for host in hosts:
            host.close()
        assert service.end() == 0, service.log.read_text()
