"""The process of tasks and the process of readers: whatever they are sent they answer, and go on."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

for package in ("sqlalchemy", "obstore", "deltalake"):
    pytest.importorskip(package, reason="the extra `fleet` is not installed")

from support.fleet import trace_bytes  # noqa: E402
from support.sessions import busy_step  # noqa: E402
from traceloom.errors import InputError  # noqa: E402
from traceloom.fleet.store.tables import unpack_rows  # noqa: E402
from traceloom.formats import read_kineto  # noqa: E402
from traceloom.system.processes import WorkerProcess  # noqa: E402
from traceloom.testing import TraceBuilder  # noqa: E402
from traceloom.trace import storage  # noqa: E402

MEMORY = 8 << 30


class Asked:
    """A process and its answers."""

    def __init__(self, main: str) -> None:
        self.worker = WorkerProcess(main, quiet=True)
        self._answers = self.worker.answers()

    def ask(self, **job: Any) -> dict[str, Any]:
        """The next answer."""
        self.worker.send(job)
        return next(self._answers)

    def end(self) -> int:
        """Its exit code when it has killed."""
        self.worker.kill()
        return self.worker.ended()


@pytest.fixture(scope="module")
def tasks() -> Iterator[Asked]:
    process = Asked("traceloom.fleet.service.worker")
    process.worker.send({"memory_bytes": MEMORY})
    yield process
    process.end()


@pytest.fixture(scope="module")
def reader() -> Iterator[Asked]:
    process = Asked("traceloom.formats.loading")
    yield process
    process.end()


def entry(path: Path, name: str) -> dict[str, Any]:
    content = path.read_bytes()
    return {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_files_are_checked_and_what_is_wrong_is_said_for_good(tasks: Asked, tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(trace_bytes()))
    (tmp_path / "b.json").write_bytes(b"abc")
    files = [entry(tmp_path / name, name) for name in ("a.json.gz", "b.json")]
    arguments = {"folder": str(tmp_path), "files": files}
    assert tasks.ask(task="check", arguments=arguments) == {}
    (tmp_path / "b.json").write_bytes(b"abd")
    answer = tasks.ask(task="check", arguments=arguments)
    assert answer["final"] is True
    assert "[upload-differs]" in answer["error"]
    (tmp_path / "b.json").unlink()
    assert "FileNotFoundError" in tasks.ask(task="check", arguments=arguments)["error"]
    (tmp_path / "b.json").symlink_to("/etc/passwd")
    size = Path("/etc/passwd").stat().st_size
    linked = {**entry(Path("/etc/passwd"), "b.json"), "size": size}
    answer = tasks.ask(task="check", arguments={**arguments, "files": [linked]})
    assert answer["final"] is True  # though what the link names is as announced


@pytest.mark.parametrize(
    "job",
    [
        {"task": "nothing", "arguments": {}},
        {"task": "check"},
        {"arguments": {}},
        {},
        {"task": "check", "arguments": {"folder": "/nowhere", "files": [{}]}},
        {"task": "check", "arguments": {"strange": 1}},
        {"task": "analyse", "arguments": []},
    ],
    ids=range(7),
)
def test_what_is_no_task_is_answered_with_an_error(
    tasks: Asked, tmp_path: Path, job: dict[str, Any]
) -> None:
    answer = tasks.ask(**job)
    assert answer["error"]
    assert answer["final"] is False
    assert tasks.ask(task="check", arguments={"folder": str(tmp_path), "files": []}) == {}


def test_rows_and_pages_are_made_of_a_folder(tasks: Asked, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "trace.json").write_bytes(trace_bytes())
    more = {"capture": "c1", "received_ns": 1_790_000_000 * 10**9, "job": ""}
    assert (
        tasks.ask(
            task="analyse", arguments={"folder": str(folder), "out": str(tmp_path / "rows"), **more}
        )
        == {}
    )
    tables = unpack_rows((tmp_path / "rows").read_bytes(), "c1")
    kernels = [
        e for e in json.loads(trace_bytes())["traceEvents"] if e.get("cat", "").lower() == "kernel"
    ]
    assert tables["kernels"].filter(pl.col("kind") != "copy")["total_ns"].sum() == sum(
        round(e["dur"] * 1000) for e in kernels
    )
    assert tables["captures"]["job"].to_list() == [None]
    page = tmp_path / "page.html"
    assert (
        tasks.ask(
            task="render", arguments={"folder": str(folder), "out": str(page), "name": "<b>x"}
        )
        == {}
    )
    assert "&lt;b&gt;x" in page.read_text()
    assert "<b>x" not in page.read_text()
    again = tasks.ask(
        task="render", arguments={"folder": str(folder), "out": str(page), "name": "x"}
    )
    assert "FileExistsError" in again["error"]  # nothing is written over


def test_a_folder_that_holds_no_trace_is_refused_for_good(tasks: Asked, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    more = {
        "folder": str(folder),
        "out": str(tmp_path / "rows"),
        "capture": "c",
        "received_ns": 1,
        "job": "",
    }
    for content in (None, b"", b"{", b"<html>", b"\x80\x04.", b"\x1f\x8b\x08"):
        if content is not None:
            (folder / "trace.json").write_bytes(content)
        answer = tasks.ask(task="analyse", arguments=more)
        assert answer["error"]
        assert answer["final"] is True, content
        assert not (tmp_path / "rows").exists()


def test_a_reader_hands_over_what_this_process_would_read(reader: Asked, tmp_path: Path) -> None:
    made = TraceBuilder(rank=3, world_size=4)
    for number in range(3):
        busy_step(made, number, 1000 * number)
    path = made.write(tmp_path / "rank3.json.gz")
    (tmp_path / "out").mkdir()
    job = {"path": str(path), "capture": None, "folder": str(tmp_path / "out"), "processes": 1}
    assert reader.ask(**job) == {"done": True}
    trace, here = storage.load_trace(tmp_path / "out", permanent=False), read_kineto(path)
    assert trace is not None
    for name in ("events", "steps", "lanes", "flows", "kernels", "tensors"):
        assert getattr(trace, name).equals(getattr(here, name)), name
    assert trace.meta == here.meta
    assert trace.notices == here.notices


def expected(path: Path) -> dict[str, Any]:
    """What a reader answers, if it does as this process."""
    try:
        read_kineto(path)
    except InputError as error:
        return {"refused": error.to_dict()}
    return {"done": True}


@pytest.mark.parametrize(
    "content", [None, b"", b"\x00" * 99, b'{"nodes": []}', b"[1, 2"], ids=range(5)
)
def test_a_reader_refuses_as_this_process_would_and_reads_the_next(
    reader: Asked, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "trace.json"
    if content is not None:
        path.write_bytes(content)
    (tmp_path / "out").mkdir()
    answer = reader.ask(path=str(path), capture=None, folder=str(tmp_path / "out"), processes=1)
    assert answer == expected(path)
    test_path = tmp_path / "next.json"
    test_path.write_bytes(trace_bytes(1))
    (tmp_path / "next").mkdir()
    assert reader.ask(
        path=str(test_path), capture=None, folder=str(tmp_path / "next"), processes=1
    ) == {"done": True}


@pytest.mark.parametrize(
    ("main", "first"),
    [
        ("traceloom.fleet.service.worker", {"memory_bytes": MEMORY}),
        ("traceloom.formats.loading", None),
    ],
)
def test_a_process_ends_with_who_sends_it_jobs(main: str, first: dict[str, Any] | None) -> None:
    process = Asked(main)
    if first is not None:
        process.worker.send(first)
    inside = process.worker._process
    assert inside.stdin is not None
    inside.stdin.close()
    assert process.worker.ended() == 0
