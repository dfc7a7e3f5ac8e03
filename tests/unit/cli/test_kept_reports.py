"""A report of inputs that have not changed comes from what was kept, and is the same; of changed ones it is made anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from traceloom.cli import main
from traceloom.testing import TraceBuilder

LONG_AGO = 1_600_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRACELOOM_CACHE_DIR", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def trace(path: Path, *names: str) -> Path:
    """A trace of one step, written long ago."""
    made = TraceBuilder(rank=0, world_size=1)
    for number, name in enumerate(names):
        made.op(name, 10 + number * 100, 50)
        made.launch("cudaLaunchKernel", 15 + number * 100, 5, correlation=number + 1)
        made.kernel(f"{name}_kernel", 30 + number * 100, 60, stream=7, correlation=number + 1)
    made.step(1, 0, 100 * len(names) + 20).write(path)
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on: what was written before this is older than a tick of any file system's clock."""
    now = time.time_ns
    monkeypatch.setattr("traceloom.trace.cache.time.time_ns", lambda: now() + 10 * 10**9)


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "reports").glob("*/*.json"))


def marked(path: Path, word: str) -> None:
    """Write into what was kept, so that a report that is drawn from it tells so."""
    document: dict[str, Any] = json.loads(path.read_bytes())
    document["answer"]["sentence"] = word
    path.write_text(json.dumps(document))


def test_a_kept_report_loads_nothing_that_computes(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trace(tmp_path / "rank0.json", "mm")
    settled(monkeypatch)
    text = shown(capsys, path)
    assert kept(cache)
    program = (
        "import sys, time; now = time.time_ns; time.time_ns = lambda: now() + 10 * 10**9\n"
        "from traceloom.cli import main; main(); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == text
    assert {"polars", "numpy"}.isdisjoint(done.stderr.split())


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--full",),
        ("--json",),
        ("--only", "kernels,core"),
        ("--full", "--top", "1"),
        ("-o", "-"),
    ],
)
def test_the_second_report_is_the_first_one(
    options: tuple[str, ...],
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace(Path("t.json"), "mm", "relu")
    settled(monkeypatch)
    first = shown(capsys, "t.json", *options)
    assert len(kept(cache)) == 1
    assert (
        shown(capsys, "t.json", *options)
        == first
        == shown(capsys, "t.json", *options, "--no-cache")
    )
    marked(kept(cache)[0], "drawn from what was kept")
    assert "drawn from what was kept" in shown(capsys, "t.json", *options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["r.html", "r.md", "r.json", "kernels.csv", "r.perfetto.json", "tables/"]
)
def test_files_of_what_was_kept_are_the_same(
    name: str, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(Path("t.json"), "mm", "relu")
    settled(monkeypatch)
    for folder in ("first", "second"):
        shown(capsys, "t.json", "-o", f"{folder}/{name}")
    assert kept(cache)
    files = [
        sorted(path for path in Path(folder).rglob("*") if path.is_file())
        for folder in ("first", "second")
    ]
    assert files[0]
    for one, other in zip(*files, strict=True):
        contents = [path.read_text().split("page made in")[0] for path in (one, other)]
        assert contents[0] == contents[1]


def test_other_choices_are_another_report(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(Path("t.json"), "mm", "relu")
    settled(monkeypatch)
    for number, options in enumerate(
        [(), ("--full",), ("--json", "--by-shape"), ("--json", "--peak", "bf16=1e12")], 1
    ):
        shown(capsys, "t.json", *options)
        assert len(kept(cache)) == number
    shown(capsys, "t.json", "--json", "--top", "3")  # no choice about the document
    assert len(kept(cache)) == 4


def test_a_changed_trace_is_read(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(Path("t.json"), "mm", "relu")
    settled(monkeypatch)
    assert "relu_kernel" in shown(capsys, "t.json", "--full")
    trace(Path("t.json"), "mm", "gelu")  # as long, and of the same time
    changed = shown(capsys, "t.json", "--full")
    assert "gelu_kernel" in changed
    assert "relu_kernel" not in changed


def test_a_changed_capture_is_read(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run").mkdir()
    trace(Path("run/rank0.trace.json"), "mm")
    capture = {
        "format": "traceloom-capture",
        "version": 1,
        "run": {"command": ["python", "a.py"]},
        "ranks": [{"rank": 0, "world_size": 1, "windows": [{"file": "rank0.trace.json"}]}],
    }
    Path("run/capture.json").write_text(json.dumps(capture))
    settled(monkeypatch)
    assert json.loads(shown(capsys, "run", "--json"))["capture"]["run"]["command"] == [
        "python",
        "a.py",
    ]
    Path("run/capture.json").write_text(
        json.dumps(capture | {"run": {"command": ["python", "b.py"]}})
    )
    settled(monkeypatch)
    assert json.loads(shown(capsys, "run", "--json"))["capture"]["run"]["command"] == [
        "python",
        "b.py",
    ]


def test_nothing_is_kept_of_a_file_whose_change_could_go_unseen(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(Path("t.json"), "mm")  # its inode changed a moment ago
    shown(capsys, "t.json")
    assert kept(cache) == []


def test_no_cache_reads_and_keeps_nothing(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(Path("t.json"), "mm")
    settled(monkeypatch)
    shown(capsys, "t.json", "--no-cache")
    assert kept(cache) == []
    shown(capsys, "t.json")
    marked(kept(cache)[0], "drawn from what was kept")
    assert "drawn from what was kept" not in shown(capsys, "t.json", "--no-cache")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_what_was_kept_and_is_damaged_is_made_again(
    content: bytes, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(Path("t.json"), "mm")
    settled(monkeypatch)
    first = shown(capsys, "t.json")
    kept(cache)[0].write_bytes(content)
    assert shown(capsys, "t.json") == first
    assert json.loads(kept(cache)[0].read_bytes())["name"] == "t.json"


def test_a_report_of_some_of_the_files_is_not_kept(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(Path("t.json"), "mm")
    Path("u.json").write_text('{"traceEvents": 3}')
    os.utime("u.json", (LONG_AGO, LONG_AGO))
    settled(monkeypatch)
    assert main(["report", "t.json", "u.json"]) == 4
    assert main(["report", "t.json", "u.json"]) == 4
    assert kept(cache) == []
