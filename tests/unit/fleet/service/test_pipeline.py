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

from support.fleet import Stores, add_capture, opened, places, trace_bytes  # noqa: E402
from support.waiting import until  # noqa: E402
from traceloom.errors import InputError, UsageError  # noqa: E402
from traceloom.fleet.service.executors import ProcessEngine, create_engine  # noqa: E402
from traceloom.fleet.service.pipeline import CapturePipeline  # noqa: E402
from traceloom.fleet.service.tasks import (  # noqa: E402
    EngineTask,
    TaskError,
    check,
)
from traceloom.fleet.store.captures import CaptureFile, CaptureRecord  # noqa: E402


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    monkeypatch.setattr("traceloom.fleet.store.captures._RETRY_DELAY_NS", 10**7)
    made = opened(places("alone", tmp_path, monkeypatch))
    yield made
    made.state.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[ProcessEngine]:
    made = ProcessEngine(1)
    yield made
    made.close()


def counts(stores: Stores) -> dict[str, int]:
    return {state: count for state, count in stores.state.counts().items() if count}


def rows(stores: Stores) -> dict[str, list[str]]:
    """Of each table the captures of its rows."""
    names = ("captures", "devices", "kernels", "findings")
    return {
        name: sorted(stores.tables.scan(name).select("capture").collect()["capture"].to_list())
        for name in names
    }


def test_threads_do_all_of_it_and_a_second_service_helps(alone: Stores) -> None:
    for at in range(4):
        add_capture(alone, f"c{at}")
    pipelines = [
        CapturePipeline(*alone, ProcessEngine(1), lease_s=3, commit_s=0.2) for _ in range(2)
    ]
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


def test_a_pickle_that_would_run_something_runs_nothing(
    alone: Stores, engine: ProcessEngine, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {marker}",)

    content = {"memory.pickle": pickle.dumps({"segments": Evil()}), "trace.json": trace_bytes()}
    files = tuple(
        CaptureFile(name, len(data), hashlib.sha256(data).hexdigest())
        for name, data in content.items()
    )
    record = CaptureRecord(
        id="evil",
        day="2026-11-26",
        job="",
        uploader="eve",
        received_ns=1,
        complete=False,
        bytes=1,
        files=files,
    )
    alone.state.add_capture(record)
    for name, data in content.items():
        alone.objects.put(f"captures/2026-11-26/evil/{name}", data)
    alone.state.complete_capture("evil", "1")
    pipeline = CapturePipeline(*alone, engine)
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
    alone: Stores, engine: ProcessEngine, content: bytes
) -> None:
    add_capture(alone, "c1", content)
    pipeline = CapturePipeline(*alone, engine)
    while pipeline.work():
        pass
    [task] = alone.state.tasks("c1")
    assert task.state in {"quarantined", "analysed"}
    if task.state == "quarantined":
        assert task.error
        assert task.attempts == 1


def test_a_bomb_is_refused_before_anything_reads_it(alone: Stores, engine: ProcessEngine) -> None:
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (200 << 20), 9)
    assert len(bomb) < 1 << 20
    add_capture(alone, "bomb", bomb)
    assert CapturePipeline(*alone, engine).work()
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


def test_a_capture_whose_files_are_gone_is_quarantined(
    alone: Stores, engine: ProcessEngine
) -> None:
    add_capture(alone, "c1")
    alone.objects.delete("captures/2026-11-26/c1/trace.json")
    assert CapturePipeline(*alone, engine).work()
    [task] = alone.state.tasks("c1")
    assert task.state == "quarantined"
    assert "no longer" in task.error


def test_a_store_that_fails_costs_a_capture_no_try(alone: Stores, engine: ProcessEngine) -> None:
    add_capture(alone, "c1")
    directory = alone.objects.directory
    assert directory is not None
    (directory / "analysed").write_text("in the way")
    assert CapturePipeline(*alone, engine).work()
    [task] = alone.state.tasks("c1")
    assert (task.state, task.attempts) == ("checked", 0)


def test_a_process_knows_nothing_of_the_services_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    engine = ProcessEngine(1)
    try:
        engine.submit(EngineTask("check", (), {}, 60)).result()
        [pid] = [worker._process.pid for worker, _ in engine._idle]
        assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        engine.close()
    with pytest.raises((TaskError, RuntimeError)):
        engine.submit(EngineTask("check", (), {}, 60)).result()


def test_an_engine_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError) as raised:
        create_engine("magic")
    assert raised.value.slug == "unknown-engine"


def test_minutes_wait_for_their_turn_and_captures_do_not(
    alone: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "traceloom.fleet.service.pipeline._ROUNDS", 10**9
    )  # the second turn never comes
    alone.state.put_host("n", "secret")
    alone.state.add_usage("n", {5: "[]"})
    pipeline = CapturePipeline(*alone, ProcessEngine(1), commit_s=0.1)
    pipeline.start()
    try:
        until(lambda: not alone.state.has_rows_to_commit(minutes=True))  # the first is at once
        until(lambda: pipeline._next_usage_commit_s > 0)  # and its round is over
        alone.state.add_usage("n", {6: "[]"})
        add_capture(alone, "c1")
        pipeline.wake()
        until(lambda: counts(alone) == {"committed": 1})
        assert alone.state.waiting_minutes() == 1
    finally:
        pipeline.stop()
