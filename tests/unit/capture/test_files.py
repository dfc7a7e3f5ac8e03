"""Claims, atomic files, merging, and what the closing lines say."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from traceloom.capture import manifest, writing
from traceloom.capture.launch import describe
from traceloom.capture.scope import scope
from traceloom.capture.silence import _THEIRS
from traceloom.capture.steps import Mark, StepLog
from traceloom.errors import UsageError


def test_no_two_processes_get_one_name(tmp_path: Path) -> None:
    (tmp_path / writing.NOTES).mkdir()
    pid = os.getpid()
    assert [writing.claim(tmp_path, rank) for rank in (0, 1, None, 1)] == [
        "rank0", "rank1", f"pid{pid}", f"rank1-pid{pid}",
    ]  # fmt: skip


def test_the_parts_of_all_ranks_are_merged_in_order_and_what_is_known_of_the_run_stays(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        writing.write_json(tmp_path / f"rank{rank}.capture.json", {"rank": rank})
    writing.write_json(tmp_path / "rankx.capture.json", {"rank": "no part"})
    manifest.merge(tmp_path, {"command": ["a"]})
    capture = manifest.merge(tmp_path)
    assert [part["rank"] for part in capture["ranks"]] == [0, 2, 10]
    assert (capture["format"], capture["version"], capture["run"]) == ("traceloom-capture", 1, {"command": ["a"]})
    assert capture["stage"] == "profiled"
    assert json.loads((tmp_path / "capture.json").read_text()) == capture


def test_parts_that_are_written_at_once_are_all_in_the_merged_file(tmp_path: Path) -> None:
    def one(rank: int) -> None:
        writing.write_json(tmp_path / f"rank{rank}.capture.json", {"rank": rank})
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"from traceloom.capture import manifest; from pathlib import Path; manifest.merge(Path({str(tmp_path)!r}))",
            ],
            check=True,
        )

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks = json.loads((tmp_path / "capture.json").read_text())["ranks"]
    assert [part["rank"] for part in ranks] == list(range(6))


def test_force_removes_an_earlier_capture_and_nothing_else(tmp_path: Path) -> None:
    ours = [
        "capture.json",
        "rank0.capture.json",
        "rank12.kineto.json.gz",
        "rank0.graph.kineto.json",
        "pid7.host.json.gz",
    ]
    mine = ["rank0.txt", "notes.json", "rank0.kineto.json.gz.bak"]
    for name in ours + mine:
        (tmp_path / name).write_text("x")
    (tmp_path / writing.NOTES).mkdir()
    (tmp_path / writing.NOTES / "rank0").write_text("")
    manifest.remove(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(mine)


def test_a_file_is_compressed_whole_and_the_plain_one_goes(tmp_path: Path) -> None:
    plain = tmp_path / "x.json"
    plain.write_bytes(b'{"a": 1}' * 300_000)
    target = writing.Places(tmp_path).compress(plain)
    assert target == tmp_path / "x.json.gz"
    assert gzip.decompress(target.read_bytes()) == b'{"a": 1}' * 300_000
    assert [path.name for path in tmp_path.iterdir()] == ["x.json.gz"]


def test_a_directory_that_is_gone_sends_files_to_a_refuge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "file").write_text("")
    places = writing.Places(tmp_path / "file" / "run")
    place = places.choose(10)
    assert place.parent == tmp_path / "tmp"
    (place / "x.json").write_text("{}")
    assert places.compress(place / "x.json") == place / "x.json.gz"
    assert "[capture-moved]" in capsys.readouterr().err
    places.leave()
    assert place.exists(), "a refuge that holds something stays"


def test_the_overhead_compares_medians_and_does_not_invent_any() -> None:
    log = StepLog(0, 0)
    clock = 0
    for duration, mark in [
        (900, Mark.PLAIN), (100, Mark.PLAIN), (500, Mark.DISTURBED), (120, Mark.RECORDED), (110, Mark.RECORDED),
        (130, Mark.RECORDED), (300, Mark.GRAPH), (100, Mark.PLAIN), (90, Mark.PLAIN), (110, Mark.PLAIN),
    ]:  # fmt: skip
        clock += duration
        log.end(clock, mark)
        log.begin(clock, clock)
    figures = manifest.overhead(log, 300, warm_up=1)
    assert figures["unrecorded_median_ns"] == 100
    assert figures["recorded_median_ns"] == 120
    assert (figures["ratio"], figures["graph_step_ratio"]) == (1.2, 3.0)
    empty = manifest.overhead(StepLog(0, 0), None, warm_up=1)
    assert (empty["ratio"], empty["graph_step_ratio"], empty["unrecorded_median_ns"]) == (None, None, None)


def test_the_closing_line_tells_what_was_recorded() -> None:
    rank = {
        "window": {"first_step": 3, "step_count": 5, "start_ns": 0, "end_ns": 1},
        "steps": {"start_ns": [0] * 12},
        "overhead": {"ratio": 1.034, "graph_step_ratio": 1.9},
        "graph_step": {"step": 8},
    }
    assert describe([rank, rank]) == (
        "recorded steps 3 to 7 of 12 on 2 ranks; a recorded step took 1.03 x an unrecorded one; graph step 8 took 1.90 x"
    )


@pytest.mark.parametrize(
    ("line", "theirs"),
    [
        (b"USDT:2026-11-20 17:49:50 5048:5048 SyncActivityProfilerHandler.cpp:52] profiler_start\n", True),
        (b"STAGE:2024-05-01 10:00:00 12:12 ActivityProfilerController.cpp:314] Completed Stage: Warm Up\n", True),
        (b"[I1120 execution_trace_observer.cpp:800] Enabling Execution Trace Observer\n", True),
        (b"[W1120 19:07:00.8 CPUAllocator.cpp:245] Memory block of unknown size was allocated before the\n", True),
        (b"my own line about a profiler_result\n", False),
        (b"Traceback (most recent call last):\n", False),
        (b"W1120 torch/distributed/run.py:874] Setting OMP_NUM_THREADS\n", False),
    ],
)
def test_only_the_recorders_own_lines_are_kept_from_the_user(line: bytes, theirs: bool) -> None:
    assert bool(_THEIRS.match(line)) == theirs


def test_scopes_join_their_names_escape_what_breaks_json_and_refuse_what_cannot_be() -> None:
    with scope("a") as outer, scope('b"c\\d\n\x7f') as inner:
        assert (outer.path, inner.path) == ("a", "a.b%22c%5Cd%0A%7F")
        with pytest.raises(UsageError):
            outer.__enter__()
    with outer, scope("é" * 300) as long:
        assert long.path == "a." + "é" * 198
    with pytest.raises(UsageError) as caught:
        scope(3)
    assert caught.value.slug == "bad-scope"


def test_capture_imports_nothing_but_the_standard_library() -> None:
    code = """
import sys
import traceloom
traceloom.record, traceloom.step, traceloom.scope, traceloom.CaptureError
import traceloom.capture.launch, traceloom.cli.record
outside = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(sorted(name for name in outside if not name.startswith("_") and name != "sitecustomize"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['traceloom']\n"
