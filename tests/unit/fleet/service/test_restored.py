"""A state or tables that went back, as from a backup or by a failover, lose and double nothing."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import KINDS, Kind, Places, Stores, opened, places, trace_bytes  # noqa: E402
from support.killed_pipeline import Here  # noqa: E402
from support.postgres import copied  # noqa: E402
from traceloom.agent.fleet_link.protocol import UsageRow  # noqa: E402
from traceloom.fleet.service.committer import commit_usage, get_rows_name  # noqa: E402
from traceloom.fleet.service.pipeline import CapturePipeline, get_capture_directory  # noqa: E402
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord  # noqa: E402
from traceloom.system.files import compute_sha256  # noqa: E402

DAY = "2026-11-26"


class Service:
    """A service whose state can be copied and put back."""

    def __init__(self, where: Places) -> None:
        self.where = where
        self.stores: Stores = opened(where)
        self.pipeline = CapturePipeline(*self.stores, Here())
        self.pipeline.lead()

    def arrive(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / "trace.json"
        path.write_bytes(trace_bytes())
        with path.open("rb") as file:
            sha256 = compute_sha256(file)
        record = CaptureRecord(
            id=name,
            day=DAY,
            job="job",
            uploader="anna",
            received_ns=1_790_000_000 * 10**9,
            complete=False,
            bytes=path.stat().st_size,
            files=(CaptureFile("trace.json", path.stat().st_size, sha256),),
        )
        self.stores.state.add_capture(record)
        self.stores.objects.put_file(f"{get_capture_directory(record)}/trace.json", path)
        self.pipeline.accept(record)

    def copy(self, to: Path) -> str:
        """A backup of the state, as an address."""
        self.stores.state.close()  # which it opens again
        if "://" in self.where.state:
            return copied(self.where.state)
        with closing(sqlite3.connect(self.where.state)) as connection:
            connection.execute(f"VACUUM INTO '{to}'")
        return str(to)

    def restart(self, state: str) -> Service:
        self.close()
        made = Service(Places(state, self.where.store))
        made.pipeline.state.resign(self.pipeline.term)
        made.pipeline.lead()
        return made

    def close(self) -> None:
        self.stores.state.close()

    def settle(self) -> list[str]:
        """Does all that a service does; the captures in the tables, each as often as it is there."""
        self.pipeline.reconcile()
        while self.pipeline.work() or self.stores.state.has_rows_to_commit(minutes=False):
            self.pipeline.commit(minutes=False)
        assert self.stores.objects.sizes("analysed") == {}
        kernels = self.stores.tables.scan("kernels").group_by("capture").agg(pl.len()).collect()
        captures = self.stores.tables.scan("captures").select("capture").collect()["capture"]
        assert kernels["len"].n_unique() <= 1, "the same trace each: no rows lacking or double"
        assert sorted(kernels["capture"]) == sorted(captures)
        return sorted(captures)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_a_backup_has_all_captures_once(
    kind: Kind, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup is taken at any point of the way of captures, and others come before it is put back."""
    order = random.Random(seed)
    service = Service(places(kind, tmp_path, monkeypatch))
    names = [f"c{number}" for number in range(4)]
    backup, backup_at = "", order.randrange(1, 13)
    steps = 0

    def step(action: Callable[[], object]) -> None:
        nonlocal backup, steps
        steps += 1
        action()
        if steps == backup_at:
            backup = service.copy(tmp_path / "backup.db")

    for name in names:
        step(partial(service.arrive, name, tmp_path))
        if order.random() < 0.8:
            step(service.pipeline.work)
        if order.random() < 0.3:  # a batch is begun, and its service killed before it ends
            step(lambda: service.stores.state.open_batch(9, service.pipeline.term))
        if order.random() < 0.6:
            step(lambda: service.pipeline.commit(minutes=False))
    backup = backup or service.copy(tmp_path / "backup.db")
    service = service.restart(backup)
    service.arrive("new", tmp_path)
    assert service.settle() == sorted([*names, "new"])
    service.arrive("c1", tmp_path)  # who lost the answer sends it again
    assert service.settle() == sorted([*names, "new"])
    assert {task.state for task in service.stores.state.tasks(*names)} == {"committed"}
    service.close()


@pytest.mark.parametrize("kind", KINDS)
def test_captures_come_back_to_a_new_state_beside_old_files(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(places(kind, tmp_path, monkeypatch))
    service.arrive("c1", tmp_path)
    assert service.settle() == ["c1"]
    other = places(kind, tmp_path / "other", monkeypatch).state
    service = service.restart(other)
    assert service.settle() == ["c1"]
    [capture] = service.stores.state.captures()
    assert (capture.uploader, capture.job) == ("anna", "job")
    service.close()


def test_tables_from_a_backup_get_what_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = places("alone", tmp_path, monkeypatch)
    service = Service(where)
    service.arrive("c1", tmp_path)
    assert service.settle() == ["c1"]
    tables = Path(where.store) / "tables"
    shutil.copytree(tables, tmp_path / "tables")
    service.arrive("c2", tmp_path)
    assert service.settle() == ["c1", "c2"]
    shutil.rmtree(tables)
    shutil.copytree(tmp_path / "tables", tables)
    service = service.restart(where.state)
    assert service.settle() == ["c1", "c2"]
    service.close()


def test_rows_that_are_gone_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(places("alone", tmp_path, monkeypatch))
    service.arrive("c1", tmp_path)
    assert service.pipeline.work()
    [task] = service.stores.state.tasks("c1")
    service.stores.objects.delete(get_rows_name(task))
    assert service.settle() == ["c1"]
    service.close()


@pytest.mark.parametrize("kind", KINDS)
def test_minutes_are_in_the_tables_once_after_the_state_went_back(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(places(kind, tmp_path, monkeypatch))
    service.stores.state.put_host("n1", "secret")
    first = 29_000_000

    def said(minutes: range) -> None:
        row = UsageRow(
            minute=0, device="d", device_model="m", job="j", state="busy", device_ms=60_000
        )
        document = msgspec.json.encode([row]).decode()
        service.stores.state.add_usage("n1", dict.fromkeys(minutes, document))

    def commit() -> None:
        while commit_usage(service.stores.state, service.stores.tables, service.pipeline.term):
            pass

    said(range(first, first + 3))
    commit()
    backup = service.copy(tmp_path / "backup.db")
    said(range(first + 3, first + 7))
    commit()
    service = service.restart(backup)
    said(range(first + 7, first + 9))  # the host knows that the others were taken
    service.pipeline.reconcile()
    commit()
    rows = service.stores.tables.scan("usage_minute").collect().sort("time_ns")
    assert rows["time_ns"].to_list() == [minute * 60 * 10**9 for minute in range(first, first + 9)]
    assert set(rows["state"]) == {"busy"}
    assert set(rows["device_ms"]) == {60_000}
    service.close()
