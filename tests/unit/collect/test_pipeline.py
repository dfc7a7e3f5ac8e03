"""The way of a capture: committed once, whatever happens on the way; what is hostile stops nobody else."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import KINDS, Kind, Stores, add_capture, opened, places, trace_bytes  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.collect.executors import EngineTask, Processes, TaskError, engine_of  # noqa: E402
from traceloom.collect.pipeline import Pipeline  # noqa: E402
from traceloom.collect.tasks import check  # noqa: E402
from traceloom.errors import InputError, UsageError  # noqa: E402
from traceloom.store.state import CaptureRecord, FileOfCapture  # noqa: E402


@pytest.fixture(params=KINDS)
def stores(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    kind: Kind = request.param
    made = opened(places(kind, tmp_path, monkeypatch))
    yield made
    made.state.close()


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    monkeypatch.setattr("traceloom.store.state._WAIT_NS", 10**7)
    made = opened(places("alone", tmp_path, monkeypatch))
    yield made
    made.state.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Processes]:
    made = Processes(1)
    yield made
    made.close()


def counts(stores: Stores) -> dict[str, int]:
    return {state: count for state, count in stores.state.counts().items() if count}


def rows(stores: Stores) -> dict[str, list[str]]:
    """Of each table the captures of its rows."""
    names = ("captures", "devices", "kernels", "findings")
    return {name: sorted(stores.tables.scan(name).select("capture").collect()["capture"].to_list()) for name in names}


def test_captures_become_rows_and_a_report(stores: Stores, engine: Processes) -> None:
    names = ["c1", "c2", "c3"]
    records = [add_capture(stores, name) for name in names]
    pipeline = Pipeline(*stores, engine)
    pipeline.lead()
    while pipeline.work():
        pass
    assert counts(stores) == {"analysed": 3}
    assert pipeline.commit() == 3
    assert counts(stores) == {"committed": 3}
    assert pipeline.commit() == 0
    in_tables = rows(stores)
    assert in_tables["captures"] == names
    assert {table: in_tables[table].count("c1") for table in in_tables} == {
        table: in_tables[table].count("c3") for table in in_tables
    }
    kernels = stores.tables.scan("kernels").collect()
    assert set(kernels["kernel"]) >= {"gemm"}
    assert kernels["count"].sum() == 3 * 4  # each capture has two steps of a kernel and a copy
    assert stores.objects.names("analysed") == []

    page = pipeline.report(records[0])
    content = b"".join(stores.objects.chunks(page))
    assert b"<html" in content
    assert pipeline.report(records[0]) == page

    # A newer version analyses them again: its rows replace the others.
    assert stores.state.backfill("99") == 3
    while pipeline.work():
        pass
    assert pipeline.commit() == 3
    assert rows(stores) == in_tables


def test_threads_do_all_of_it_and_a_second_service_helps(alone: Stores) -> None:
    for at in range(4):
        add_capture(alone, f"c{at}")
    pipelines = [Pipeline(*alone, Processes(1), lease_s=3, commit_s=0.2) for _ in range(2)]
    for pipeline in pipelines:
        pipeline.start()
    try:
        until(lambda: counts(alone) == {"committed": 4})
        assert sum(pipeline.leads for pipeline in pipelines) == 1
    finally:
        for pipeline in pipelines:
            pipeline.stop()
    assert rows(alone)["captures"] == ["c0", "c1", "c2", "c3"]
    assert alone.state.lead("committer", "another", 1)  # they resigned


def test_what_crashes_hangs_or_swells_is_quarantined_and_the_others_go_on(alone: Stores, tmp_path: Path) -> None:
    disasters = {
        "crash": "SIGSEGV", "exit": "exit code 7", "hang": "took longer than 1 s", "swell": "more than 2.1 GB of memory",
    }  # fmt: skip
    engine = Processes(2, memory_bytes=2 << 30, main="support.hostile_worker")
    try:
        for names, pipeline in (
            (["hang"], Pipeline(*alone, engine, task_s=1)),
            (["crash", "exit", "swell"], Pipeline(*alone, engine)),
        ):
            for name in names:
                add_capture(alone, name, name.encode())
            until(lambda pipeline=pipeline: not pipeline.work() and not {"received", "checked"} & counts(alone).keys())  # type: ignore[misc]
        folder = tmp_path / "files"
        folder.mkdir()
        (folder / "trace.json").write_bytes(b"hang")
        hanging = engine.submit(EngineTask("analyse", {"folder": str(folder)}, 600))
        add_capture(alone, "healthy")
        assert pipeline.work()
        assert not hanging.done()
    finally:
        engine.close()
    with pytest.raises(TaskError):
        hanging.result()
    pipeline.lead()
    pipeline.commit()
    assert counts(alone) == {"quarantined": 4, "committed": 1}
    for name, reason in disasters.items():
        [task] = alone.state.tasks(name)
        assert reason in task.error
        assert task.attempts == 3
    assert rows(alone)["captures"] == ["healthy"]


def test_a_pickle_that_would_run_something_runs_nothing(alone: Stores, engine: Processes, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {marker}",)

    content = {"memory.pickle": pickle.dumps({"segments": Evil()}), "trace.json": trace_bytes()}
    files = tuple(FileOfCapture(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in content.items())
    record = CaptureRecord(
        id="evil", day="2026-11-26", job="", uploader="eve", received_ns=1, complete=False, bytes=1, files=files
    )
    alone.state.add_capture(record)
    for name, data in content.items():
        alone.objects.put(f"captures/2026-11-26/evil/{name}", data)
    alone.state.complete_capture("evil", "1")
    pipeline = Pipeline(*alone, engine)
    while pipeline.work():
        pass
    [task] = alone.state.tasks("evil")
    assert task.state in {"analysed", "quarantined"}
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"no trace", b'{"traceEvents": [', gzip.compress(b"{" * 100)[:-9], b"\x80\x04}."],
    ids=["empty", "no trace", "cut", "cut gzip", "pickle"],
)
def test_what_is_no_trace_is_quarantined_at_its_first_try_or_analysed(
    alone: Stores, engine: Processes, content: bytes
) -> None:
    add_capture(alone, "c1", content)
    pipeline = Pipeline(*alone, engine)
    while pipeline.work():
        pass
    [task] = alone.state.tasks("c1")
    assert task.state in {"quarantined", "analysed"}
    if task.state == "quarantined":
        assert task.error
        assert task.attempts == 1


def test_a_bomb_is_refused_before_anything_reads_it(alone: Stores, engine: Processes) -> None:
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (200 << 20), 9)
    assert len(bomb) < 1 << 20
    add_capture(alone, "bomb", bomb)
    assert Pipeline(*alone, engine).work()
    [task] = alone.state.tasks("bomb")
    assert task.state == "quarantined"
    assert "gzip-bomb" in task.error


def test_files_that_are_others_than_announced_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    right = {"name": "a", "size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    check(folder=str(tmp_path), files=[right])
    for wrong in ({**right, "size": 4}, {**right, "sha256": "0" * 64}):
        with pytest.raises(InputError) as raised:
            check(folder=str(tmp_path), files=[wrong])
        assert raised.value.slug == "upload-differs"
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(InputError):
        check(folder=str(tmp_path), files=[{**right, "name": "link"}])


def test_a_capture_whose_files_are_gone_is_quarantined(alone: Stores, engine: Processes) -> None:
    add_capture(alone, "c1")
    alone.objects.delete("captures/2026-11-26/c1/trace.json")
    assert Pipeline(*alone, engine).work()
    [task] = alone.state.tasks("c1")
    assert task.state == "quarantined"
    assert "no longer" in task.error


def test_a_store_that_fails_costs_a_capture_no_try(alone: Stores, engine: Processes) -> None:
    add_capture(alone, "c1")
    directory = alone.objects.directory
    assert directory is not None
    (directory / "analysed").write_text("in the way")
    assert Pipeline(*alone, engine).work()
    [task] = alone.state.tasks("c1")
    assert (task.state, task.attempts) == ("checked", 0)


def test_a_process_knows_nothing_of_the_services_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    engine = Processes(1)
    try:
        engine.submit(EngineTask("check", {"folder": str(tmp_path), "files": []}, 60)).result()
        [pid] = [worker._process.pid for worker, _ in engine._idle]
        assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        engine.close()
    with pytest.raises((TaskError, RuntimeError)):
        engine.submit(EngineTask("check", {"folder": str(tmp_path), "files": []}, 60)).result()


def test_an_engine_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError) as raised:
        engine_of("magic")
    assert raised.value.slug == "unknown-engine"
