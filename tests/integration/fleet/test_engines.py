"""One suite for both ways to run the service: SQLite, a directory and processes; PostgreSQL, S3 and Dask over TLS."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.dask_cluster import certificates, dask_cluster, running_cluster  # noqa: E402
from support.fleet import KINDS, Kind, Stores, add_capture, opened, places, trace_bytes  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.errors import InputError  # noqa: E402
from traceloom.fleet.service.executors import (  # noqa: E402
    ClusterSettings,
    DaskEngine,
    ProcessEngine,
)
from traceloom.fleet.service.pipeline import CapturePipeline  # noqa: E402
from traceloom.fleet.service.tasks import Engine, EngineTask, TaskError, TaskFile  # noqa: E402
from traceloom.fleet.store.captures import TaskRecord  # noqa: E402

MEMORY, HOSTILE = 2 << 30, "support.hostile_worker"
PATIENCE_S = 600  # each task starts a process, on a machine that may be busy


class Setting(NamedTuple):
    """What a service stands on. `worker`: which of the numbers of processes that a task notes is its engine's."""

    stores: Stores
    engine: Engine
    worker: int


@pytest.fixture(params=KINDS)
def setting(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setting]:
    kind: Kind = request.param
    monkeypatch.setattr("traceloom.fleet.store.captures._RETRY_DELAY_NS", 10**7)
    engine: Engine
    if kind == "alone":
        engine, worker = ProcessEngine(2, memory_bytes=MEMORY, main=HOSTILE), 0
    else:
        cluster = running_cluster()
        engine = DaskEngine(
            cluster.address, 2, cluster.tls, ClusterSettings(memory_bytes=MEMORY, main=HOSTILE)
        )
        worker = 1
    stores = opened(places(kind, tmp_path, monkeypatch))
    yield Setting(stores, engine, worker)
    engine.close()
    stores.state.close()


def task_of(stores: Stores, capture: str) -> TaskRecord:
    [task] = stores.state.tasks(capture)
    return task


def counts(stores: Stores) -> dict[str, int]:
    return {state: count for state, count in stores.state.counts().items() if count}


def worked(pipeline: CapturePipeline) -> None:
    """Work until nothing waits, neither now nor for a next try."""

    def nothing_waits() -> bool:
        return not pipeline.work() and not any(
            pipeline.state.counts()[state] for state in ("received", "checked")
        )

    until(nothing_waits, PATIENCE_S)


def rows(stores: Stores) -> dict[str, list[str]]:
    """Of each table the captures of its rows."""
    names = ("captures", "devices", "kernels", "findings")
    return {
        name: sorted(stores.tables.scan(name).select("capture").collect()["capture"].to_list())
        for name in names
    }


def waiting_capture(noted: Path) -> bytes:
    """A trace whose first analysis waits, and notes the numbers of its process and of that one's parent."""
    return b'{"wait once": ' + json.dumps(str(noted)).encode() + b"," + trace_bytes().lstrip()[1:]


def pids_of(noted: Path) -> list[int]:
    """What it noted."""
    until(lambda: noted.exists() and noted.read_text().endswith("\n"), PATIENCE_S)
    return [int(word) for word in noted.read_text().split()]


@pytest.mark.sampled(1)
def test_captures_become_rows_once_and_a_report(setting: Setting) -> None:
    stores, engine, _ = setting
    assert engine.check()
    names = ["c1", "c2", "c3"]
    records = [add_capture(stores, name) for name in [*names, "c1"]]  # the last is there
    pipeline = CapturePipeline(*stores, engine)
    worked(pipeline)
    assert counts(stores) == {"analysed": 3}
    pipeline.lead()
    assert pipeline.commit() == 3
    assert counts(stores) == {"committed": 3}
    pipeline.lead()
    assert pipeline.commit() == 0
    in_tables = rows(stores)
    assert in_tables["captures"] == names
    assert {table: in_tables[table].count("c1") for table in in_tables} == {
        table: in_tables[table].count("c3") for table in in_tables
    }
    kernels = stores.tables.scan("kernels").collect()
    assert set(kernels["kernel"]) >= {"gemm"}
    assert kernels["count"].sum() == 3 * 4  # each capture has two steps of a kernel and a copy
    assert stores.objects.sizes("analysed") == {}

    page = pipeline.rendered(records[0], "render")
    content = b"".join(stores.objects.chunks(page))
    assert b"<html" in content
    assert pipeline.rendered(records[0], "render") == page

    # A newer version analyses them again: its rows replace the others.
    assert stores.state.backfill("99") == 3
    worked(pipeline)
    pipeline.lead()
    assert pipeline.commit() == 3
    assert rows(stores) == in_tables


@pytest.mark.parametrize(
    "setting", ["alone", pytest.param("shared", marks=pytest.mark.thorough)], indirect=True
)
def test_what_crashes_hangs_or_swells_is_quarantined_and_the_others_go_on(
    setting: Setting, tmp_path: Path
) -> None:
    stores, engine, _ = setting
    disasters = {
        "crash": "SIGSEGV",
        "exit": "exit code 7",
        "hang": "took longer than 1 s",
        "swell": "more than 2.1 GB of memory",
    }
    for name, reason in disasters.items():
        add_capture(stores, name, name.encode())
        worked(CapturePipeline(*stores, engine, task_s=1 if name == "hang" else 600))
        task = task_of(stores, name)
        assert (task.state, task.attempts) == ("quarantined", 3)
        assert reason in task.error
    content, path, noted = (
        waiting_capture(tmp_path / "noted"),
        tmp_path / "trace.json",
        tmp_path / "noted",
    )
    path.write_bytes(content)
    file = TaskFile("trace.json", len(content), hashlib.sha256(content).hexdigest(), str(path))
    hanging = engine.submit(EngineTask("analyse", (file,), {}, 600))
    try:
        [pid, _] = pids_of(noted)
        add_capture(stores, "healthy")
        pipeline = CapturePipeline(*stores, engine)
        worked(pipeline)
        pipeline.lead()
        assert pipeline.commit() == 1
        assert rows(stores)["captures"] == ["healthy"]
        assert not hanging.done()
    finally:
        engine.close()
    with pytest.raises(TaskError):
        hanging.result(PATIENCE_S)
    with suppress(ProcessLookupError):  # in a cluster it runs on
        os.kill(pid, signal.SIGKILL)


@pytest.mark.sampled(1)
def test_a_worker_that_is_killed_costs_a_try_and_the_next_one_does_it(
    setting: Setting, tmp_path: Path
) -> None:
    stores, engine, worker = setting
    noted = tmp_path / "noted"
    add_capture(stores, "c1", waiting_capture(noted))
    pipeline = CapturePipeline(*stores, engine)
    thread = threading.Thread(target=pipeline.work)
    thread.start()
    pids = pids_of(noted)
    os.kill(pids[worker], signal.SIGKILL)
    thread.join(PATIENCE_S)
    task = task_of(stores, "c1")
    assert (task.state, task.attempts) == ("checked", 1)
    assert "SIGKILL" in task.error or "were killed" in task.error
    until(lambda: not Path(f"/proc/{pids[0]}").exists())  # what worked for a worker ends with it
    worked(pipeline)
    assert task_of(stores, "c1").state == "analysed"
    pipeline.lead()
    assert pipeline.commit() == 1
    assert rows(stores)["captures"] == ["c1"]


def test_who_has_no_certificate_of_the_cluster_does_not_get_in(tmp_path: Path) -> None:
    cluster = running_cluster()
    for tls in (certificates(tmp_path), None):
        engine = DaskEngine(cluster.address, 1, tls)
        with pytest.raises(InputError) as raised:
            engine.check()
        assert raised.value.slug == "no-engine"
        engine.close()


@pytest.mark.thorough
def test_a_scheduler_that_dies_costs_a_task_no_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler: list[int] = []
    stores = opened(places("alone", tmp_path, monkeypatch))
    (tmp_path / "dask").mkdir()
    with dask_cluster(tmp_path / "dask", 1, None, scheduler=scheduler) as address:
        engine = DaskEngine(address, 1, None, ClusterSettings(main=HOSTILE))
        add_capture(stores, "c1", waiting_capture(tmp_path / "noted"))
        thread = threading.Thread(target=CapturePipeline(*stores, engine).work)
        thread.start()
        pids_of(tmp_path / "noted")
        os.kill(scheduler[0], signal.SIGKILL)
        thread.join(PATIENCE_S)
        task = task_of(stores, "c1")
        assert (task.state, task.attempts, task.error) == ("checked", 0, "")
        engine.close()
    stores.state.close()
