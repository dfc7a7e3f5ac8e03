"""A process beside the service writes the tables: what it did stands once, and what it cannot do is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import Places, Stores, add_capture, opened, places  # noqa: E402
from support.running_service import RunningService  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.errors import InputError, OutputError  # noqa: E402
from traceloom.fleet.service.committer import WriterProcess  # noqa: E402
from traceloom.fleet.service.executors import ProcessEngine  # noqa: E402
from traceloom.fleet.service.pipeline import CapturePipeline  # noqa: E402
from traceloom.fleet.store.database import LEADER  # noqa: E402
from traceloom.fleet.store.hosts import JobFacts  # noqa: E402
from traceloom.fleet.store.schema import get_utc_day  # noqa: E402


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    return places("alone", tmp_path, monkeypatch)


@pytest.fixture
def stores(where: Places) -> Iterator[Stores]:
    made = opened(where)
    yield made
    made.state.close()


@pytest.fixture
def writer(where: Places) -> Iterator[WriterProcess]:
    made = WriterProcess(where.state, where.store)
    yield made
    made.close()


def writers() -> set[int]:
    """The processes of this one that write tables."""
    return {
        child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    }


def test_it_writes_what_waits_once_and_is_replaced_when_it_is_killed(
    stores: Stores, writer: WriterProcess, where: Places
) -> None:
    for name in ("c1", "c2"):
        add_capture(stores, name)
    engine = ProcessEngine(1)
    pipeline = CapturePipeline(*stores, engine, writer=writer)
    while pipeline.work():
        pass
    engine.close()
    pipeline.lead()
    assert stores.state.has_rows_to_commit(minutes=False)
    before = writers()
    assert pipeline.commit() == 2
    [pid] = writers() - before
    assert pipeline.commit() == 0  # by the same process
    assert writers() - before == {pid}
    assert not stores.state.has_rows_to_commit(minutes=False)
    os.kill(pid, signal.SIGINT)  # Ctrl-C in a terminal reaches it too
    stores.state.say_of_jobs({"job": JobFacts(user="ada")}, 5)
    assert not stores.state.has_rows_to_commit(minutes=False)
    assert stores.state.has_rows_to_commit(minutes=True)
    assert pipeline.commit(minutes=False) == 0
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(OutputError, match="-9") as killed:
        pipeline.commit()
    assert killed.value.slug == "cannot-write"
    assert pipeline.commit() == 1
    assert writers() - before != {pid}
    assert stores.tables.scan("captures").collect()["capture"].sort().to_list() == ["c1", "c2"]
    assert set(stores.tables.scan("jobs").collect()["user"]) >= {"ada"}
    WriterProcess(where.state, where.store).rest()  # which never began
    writer.rest()
    assert len(writers() - before) == 1  # it may be needed soon
    writer.close()
    assert writers() == before


def test_what_it_cannot_do_is_said_as_this_process_would(
    stores: Stores, writer: WriterProcess, where: Places
) -> None:
    stores.state.lead(LEADER, "another", 600)
    with pytest.raises(OutputError) as refused:
        writer.commit("term")
    assert (refused.value.slug, refused.value.where) == ("not-leading", stores.state.where)
    writer.compact(get_utc_day(1_790_000_000 * 10**9))
    log = Path(where.store) / "tables" / "kernels" / "_delta_log"
    for file in log.iterdir():
        file.write_bytes(b"no log")
    with pytest.raises(InputError) as unreadable:
        writer.create()
    assert unreadable.value.slug == "unreadable"
    assert unreadable.value.where.endswith("kernels")
    resting = WriterProcess(where.state, where.store, idle_s=0.0)
    before = writers()
    with pytest.raises(OutputError, match="leads now"):
        resting.commit("term")
    assert len(writers() - before) == 1
    resting.rest()
    assert writers() == before


def test_a_service_that_writes_tables_has_no_library_of_tables(tmp_path: Path) -> None:
    """It makes its tables as it starts and compacts them, and takes a capture; only a question needs the library."""
    service = RunningService(tmp_path)
    try:
        client = service.client()

        def leads() -> bool:
            try:
                return bool(client.get("hosts"))
            except InputError:  # `not-leading`
                return False

        until(leads)
        client.post("compact", {})
        assert "deltalake" not in Path(f"/proc/{service.process.pid}/maps").read_text()
        children = psutil.Process(service.process.pid).children()
        client.get("check")
        assert "deltalake" in Path(f"/proc/{service.process.pid}/maps").read_text()
        assert [
            child
            for child in children
            if "deltalake" in Path(f"/proc/{child.pid}/maps").read_text()
        ]
        service.end(signal.SIGKILL)
        until(lambda: not any(child.is_running() for child in children))  # they end with it
    finally:
        service.process.kill()
        service.process.wait()
