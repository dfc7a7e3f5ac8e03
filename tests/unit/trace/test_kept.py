"""What is kept of inputs is given back for the same inputs and choices alone."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from traceloom.formats.inputs import list_files
from traceloom.testing import TraceBuilder
from traceloom.trace import cache as module
from traceloom.trace.cache import DocumentCache

DOCUMENT = {"answer": {"step_ns": 5}}
LATER_NS = 10 * 10**9  # more than a tick of any file system's clock


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, at a time when what the test has written is old."""
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    now = time.time_ns
    monkeypatch.setattr("traceloom.trace.cache.time.time_ns", lambda: now() + LATER_NS)
    return tmp_path / "cache" / "reports"


def trace(name: str) -> str:
    TraceBuilder().op("aten::mm", 0, 5).write(Path(name))
    return name


def put(*paths: str, about: str = "all", beside: tuple[str, ...] = ()) -> None:
    DocumentCache(paths, beside, about, list_files).put(
        "document.json", json.dumps(DOCUMENT).encode()
    )


def get(*paths: str, about: str = "all", beside: tuple[str, ...] = ()) -> object:
    return DocumentCache(paths, beside, about, list_files).get("document.json")


def test_the_same_inputs_and_choices_give_it_back() -> None:
    put(trace("t.json"))
    assert get("t.json") == DOCUMENT
    assert DocumentCache(("t.json",), (), "all", list_files).get("short.json") is None


def test_other_choices_inputs_or_files_beside_do_not() -> None:
    put(trace("t.json"))
    assert get("t.json", about="core") is None
    assert get("./t.json") is None  # the document names its inputs as they were written
    assert get(trace("u.json")) is None
    assert get("t.json", "u.json") is None
    assert get("t.json", beside=("u.json",)) is None


def test_a_file_beside_that_changes_is_another_one() -> None:
    trace("t.json"), trace("capture.json.gz")
    put("t.json", beside=("capture.json.gz",))
    assert get("t.json", beside=("capture.json.gz",)) == DOCUMENT
    TraceBuilder().op("aten::add", 0, 6).write(Path("capture.json.gz"))
    assert get("t.json", beside=("capture.json.gz",)) is None


def test_every_file_of_a_directory_counts() -> None:
    Path("run").mkdir()
    trace("run/a.json"), trace("run/b.json")
    put("run")
    assert get("run") == DOCUMENT
    trace("run/c.json")
    assert get("run") is None
    Path("run/c.json").unlink()
    assert get("run") == DOCUMENT
    os.utime("run/a.json", (1, 1))
    assert get("run") is None


def test_every_file_of_a_capture_counts_traces_or_not() -> None:
    Path("run").mkdir()
    trace("run/rank0.trace.json")
    ranks = [{"rank": 0, "windows": [{"file": "rank0.trace.json"}]}]
    Path("run/capture.json").write_text(
        json.dumps({"format": "traceloom-capture", "version": 1, "ranks": ranks})
    )
    put("run")
    assert get("run") == DOCUMENT
    Path("run/rank0.memory.pickle").write_bytes(b"later")
    assert get("run") is None


def test_inputs_that_change_while_the_report_is_made_are_not_kept(folder: Path) -> None:
    keeper = DocumentCache((trace("t.json"),), (), "all", list_files)
    TraceBuilder().op("aten::add", 0, 6).write(Path("t.json"))
    keeper.put("document.json", b"{}")
    assert not folder.exists()


@pytest.mark.parametrize(
    "paths", [("-",), ("missing.json",), ("t.json", "missing.json"), ("empty",)]
)
def test_what_has_no_stamp_is_not_kept(paths: tuple[str, ...], folder: Path) -> None:
    trace("t.json")
    Path("empty").mkdir()
    put(*paths)
    assert get(*paths) is None
    assert not folder.exists()


def test_what_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(module, "MAX_ENTRY_BYTES", 10)
    put(trace("t.json"))
    assert not folder.exists()


def test_the_entries_unused_for_longest_go_first(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    names = [trace(f"{letter}.json") for letter in "abc"]
    for age, name in enumerate(names):
        put(name)
        for entry in folder.iterdir():
            if entry.stat().st_mtime > 10**9:  # the one just made
                os.utime(entry, (age + 1, age + 1))
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", 2 * len(json.dumps(DOCUMENT)))
    assert get("a.json") == DOCUMENT  # used now
    put("a.json", about="core")
    assert get("a.json", about="core") == DOCUMENT
    assert get("b.json") is None
