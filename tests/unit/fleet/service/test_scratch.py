"""The files of a task: fetched without credentials, no more than announced, and gone afterwards."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from traceloom.errors import InputError, UsageError
from traceloom.fleet.service.executors import ProcessEngine
from traceloom.fleet.service.tasks import EngineTask, TaskError, TaskFile, run_in_scratch

CONTENT = b"content" * 1000


class Store(BaseHTTPRequestHandler):
    """Answers as its path says: a file, one that is cut, one that never ends, a refusal."""

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        if name in {"/gone", "/forbidden"}:
            self.send_error(404 if name == "/gone" else 403)
            return
        self.send_response(200)
        if name != "/endless":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if name == "/cut":
            self.wfile.write(CONTENT[:-1])
            return
        self.wfile.write(CONTENT)
        try:
            while name == "/endless":
                self.wfile.write(bytes(1 << 20))
        except OSError:
            pass

    def log_message(self, *_arguments: object) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def file_at(at: str, **other: Any) -> TaskFile:
    right = TaskFile("folder/a.json", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), at)
    return msgspec.structs.replace(right, **other)


def result_of(home: Path, *files: TaskFile, name: Any = "analyse") -> bytes:
    """What a task gives that writes the content of its first file; nothing is left of it."""

    def work(keywords: dict[str, Any]) -> None:
        assert keywords["capture"] == "c1"
        Path(keywords["out"]).write_bytes((Path(keywords["folder"]) / files[0].name).read_bytes())

    task = EngineTask(name, files, {"capture": "c1"}, 60)
    try:
        return run_in_scratch(task, work, lambda: None, home)
    finally:
        assert list(home.glob("traceloom-*")) == []


def test_a_task_has_its_files_and_leaves_nothing(address: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    assert result_of(tmp_path, file_at(str(tmp_path / "a"))) == CONTENT
    assert result_of(tmp_path, file_at(f"{address}/file?signature=x")) == CONTENT


def test_a_check_is_told_what_was_announced_and_not_where_it_is_kept(
    address: str, tmp_path: Path
) -> None:
    file, seen = file_at(f"{address}/file?signature=secret"), []
    assert (
        run_in_scratch(EngineTask("check", (file,), {}, 60), seen.append, lambda: None, tmp_path)
        == b""
    )
    [keywords] = seen
    assert keywords["files"] == [{"name": file.name, "size": file.size, "sha256": file.sha256}]
    assert "secret" not in str(keywords)


@pytest.mark.parametrize(
    ("path", "other", "reason"),
    [
        ("file", {"size": len(CONTENT) - 1}, "another than announced"),
        ("file", {"size": len(CONTENT) + 1}, "another than announced"),
        ("file", {"sha256": "0" * 64}, "another than announced"),
        ("endless", {}, "another than announced"),
        ("gone", {}, "no longer in the store"),
    ],
)
def test_what_is_no_file_of_the_capture_is_refused_for_good(
    path: str, other: dict[str, Any], reason: str, address: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=reason) as raised:
        result_of(tmp_path, file_at(f"{address}/{path}", **other))
    assert raised.value.final


@pytest.mark.parametrize("path", ["cut", "forbidden"])
def test_a_store_that_does_not_give_it_costs_the_task_no_try(
    path: str, address: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as raised:
        result_of(tmp_path, file_at(f"{address}/{path}?signature=secret"))
    assert raised.value.slug == "unreadable"
    assert "secret" not in str(raised.value)


def test_so_does_a_store_that_is_away_or_a_directory_that_is_not_shared(tmp_path: Path) -> None:
    for at in (
        "http://127.0.0.1:1/x?signature=secret",
        "ftp://host/x",
        str(tmp_path / "elsewhere" / "a"),
    ):
        with pytest.raises(InputError) as raised:
            result_of(tmp_path, file_at(at))
        assert raised.value.slug == "unreadable"
        assert "secret" not in str(raised.value)


def test_a_file_whose_name_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with pytest.raises(UsageError):
        result_of(tmp_path, file_at(str(tmp_path / "a"), name="../../b"))


def test_fetching_ends_when_it_is_to_end(address: str, tmp_path: Path) -> None:
    def go_on() -> None:
        raise TaskError("it is late")

    with pytest.raises(TaskError, match="late"):
        run_in_scratch(
            EngineTask("check", (file_at(f"{address}/endless", size=1 << 40),), {}, 60),
            print,
            go_on,
            tmp_path,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_result_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    monkeypatch.setattr("traceloom.fleet.service.tasks.MAX_RESULT_BYTES", len(CONTENT) - 1)
    with pytest.raises(TaskError, match="MiB"):
        result_of(tmp_path, file_at(str(tmp_path / "a")))


def test_what_went_wrong_names_the_files_of_the_capture_and_not_the_folder(
    address: str, tmp_path: Path
) -> None:
    def refuse(arguments: dict[str, Any]) -> None:
        folder = arguments["folder"]
        raise TaskError(f"no trace in {folder}: {folder}/folder/a.json is none", final=True)

    task = EngineTask("analyse", (file_at(f"{address}/good"),), {}, 60.0)
    with pytest.raises(TaskError) as refused:
        run_in_scratch(task, refuse, lambda: None, tmp_path)
    assert refused.value.message == "no trace in the capture: folder/a.json is none"
    assert refused.value.final
    assert not list(tmp_path.iterdir())


def test_folders_that_a_killed_service_left_go_after_a_day(tmp_path: Path) -> None:
    for name, age_s in (("traceloom-task-old", 2 * 86_400), ("traceloom-task-new", 10)):
        (tmp_path / name / "files").mkdir(parents=True)
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    (tmp_path / "traceloom-0").mkdir()  # an agent's
    os.utime(tmp_path / "traceloom-0", (1, 1))
    ProcessEngine(1, temporary=tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == {"traceloom-task-new", "traceloom-0"}
