"""Tasks in a cluster: what is refused before anything is sent, and what an answer means."""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path
from tempfile import gettempdir

import pytest

from support.dask_cluster import certificates
from support.prometheus import free_port
from traceloom import __version__
from traceloom.errors import InputError, TraceloomError, UsageError
from traceloom.fleet.service.executors import (
    ClusterResponse,
    ClusterSettings,
    DaskEngine,
    EngineTls,
    create_engine,
    run_in_worker,
)
from traceloom.fleet.service.tasks import EngineTask, TaskError, TaskFile

CONTENT = b"content"


class ThisProcess(DaskEngine):
    """A cluster whose worker is this process. `lost`: it answers something else."""

    lost = False

    def _request(self, name: str, task: bytes) -> bytes:
        assert name.startswith("traceloom-check-")
        return b"lost" if self.lost else run_in_worker(task, self._settings, 1, gettempdir())

    def _versions(self) -> list[str]:
        return [__version__, "0.0.1"] if self.lost else [__version__]


def check(tmp_path: Path, *, sha256: str = "", name: str = "a") -> EngineTask:
    (tmp_path / "a").write_bytes(CONTENT)
    digest = sha256 or hashlib.sha256(CONTENT).hexdigest()
    return EngineTask("check", (TaskFile("a", len(CONTENT), digest, str(tmp_path / name)),), {}, 60)


def test_an_answer_says_whose_fault_it_was(tmp_path: Path) -> None:
    cluster = ThisProcess("127.0.0.1:1", settings=ClusterSettings(memory_bytes=1 << 30))
    other = ThisProcess("127.0.0.1:1", settings=ClusterSettings(version="99"))
    try:
        assert cluster.submit(check(tmp_path)).result(60) == b""
        with pytest.raises(TaskError, match="upload-differs") as raised:
            cluster.submit(check(tmp_path, sha256="0" * 64)).result(60)
        assert raised.value.final
        late = EngineTask("check", check(tmp_path).files, {}, 0)
        with pytest.raises(TaskError, match="took longer") as raised:
            cluster.submit(late).result(60)
        assert not raised.value.final
        with pytest.raises(InputError, match="elsewhere") as nowhere:
            cluster.submit(check(tmp_path, name="elsewhere")).result(60)
        with pytest.raises(InputError, match="the service 99") as differs:
            other.submit(check(tmp_path)).result(60)
        cluster.lost = True
        with pytest.raises(InputError, match="something else") as garbled:
            cluster.submit(check(tmp_path)).result(60)
        assert {nowhere.value.slug, differs.value.slug, garbled.value.slug} == {"no-engine"}
        with pytest.raises(InputError, match="1 of 2 workers have Traceloom"):
            cluster.check()
        assert other.check() == "dask://127.0.0.1:1, workers: 1"
    finally:
        cluster.close()
        other.close()


class LeftBehind(DaskEngine):
    """A cluster that answers nothing until the service leaves it."""

    waits = threading.Event()

    def _request(self, name: str, task: bytes) -> bytes:
        self.waits.set()
        self._closed.wait(60)
        raise InputError("the connection is closed", slug="no-engine")


def test_a_task_that_runs_when_the_service_ends_is_given_up(tmp_path: Path) -> None:
    cluster = LeftBehind("127.0.0.1:1", slots=1)
    running = cluster.submit(check(tmp_path))
    assert cluster.waits.wait(60)
    cluster.close()
    with pytest.raises(TaskError, match="the service ends"):
        running.result(60)


def test_whatever_a_worker_is_sent_it_answers() -> None:
    answer = run_in_worker(b"\xc1", b"\xc1", 1, gettempdir())
    assert ClusterResponse.__name__.encode() not in answer  # plain data
    assert b"worker" in answer


@pytest.mark.parametrize(
    "where", ["10.0.0.1:8786", "[2001:db8::1]:8786", "0.0.0.0:8786", "nowhere.invalid:8786"]
)
def test_a_cluster_beyond_this_host_needs_tls(where: str) -> None:
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    with pytest.raises(UsageError) as raised:
        create_engine(f"dask://{where}")
    assert raised.value.slug == "engine-without-tls"


@pytest.mark.parametrize(
    "where", ["", "node", "node:", ":1", "node:x", "node:99999", "a@node:1", "node:1/x"]
)
def test_what_is_no_address_is_refused(where: str) -> None:
    with pytest.raises(UsageError) as raised:
        ThisProcess(where)
    assert raised.value.slug == "wrong-usage"


def test_certificates_are_looked_at_before_anything_is_sent(tmp_path: Path) -> None:
    tls = certificates(tmp_path)
    cluster = ThisProcess("10.0.0.1:1", tls=tls)
    cluster.close()
    wrong: list[tuple[EngineTls, type[TraceloomError], str]] = [
        (EngineTls(tls.ca, tls.certificate), UsageError, "wrong-usage"),
        (EngineTls(tls.ca, tls.certificate, str(tmp_path / "none")), InputError, "tls-unusable"),
        (EngineTls(tls.key, tls.certificate, tls.key), InputError, "tls-unusable"),
    ]
    for files, kind, slug in wrong:
        with pytest.raises(kind) as raised:
            ThisProcess("10.0.0.1:1", tls=files)
        assert raised.value.slug == slug


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError) as raised:
        create_engine("dask://127.0.0.1:1")
    assert raised.value.slug == "no-extra"
    assert "traceloom[fleet,dask]" in raised.value.hint


def test_an_engine_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError) as raised:
        create_engine("ray://127.0.0.1:10001")
    assert raised.value.slug == "unknown-engine"


def test_a_cluster_that_is_away_costs_a_task_no_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    monkeypatch.setattr("traceloom.fleet.service.executors._CONNECT_S", 0.5)
    engine = create_engine(f"dask://127.0.0.1:{free_port()}", 1)
    try:
        for ask in (engine.check, engine.submit(check(tmp_path)).result):
            with pytest.raises(InputError) as raised:
                ask()
            assert raised.value.slug == "no-engine"
    finally:
        engine.close()
