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
from traceloom.capture.steps import Instant, Mark, StepLog
from traceloom.errors import UsageError


def test_no_two_processes_get_one_name(tmp_path: Path) -> None:
    (tmp_path / writing.NOTES).mkdir()
    pid = os.getpid()
    assert [writing.reserve_name(tmp_path, rank) for rank in (0, 1, None, 1)] == [
        "rank0",
        "rank1",
        f"pid{pid}",
        f"rank1-pid{pid}",
    ]


def test_the_parts_of_all_ranks_are_merged_in_order_and_what_is_known_of_the_run_stays(
    tmp_path: Path,
) -> None:
    for rank in (10, 2, 0):
        writing.write_json(
            tmp_path / f"rank{rank}.capture.json", manifest.document([{"rank": rank}], {})
        )
    writing.write_json(tmp_path / "rankx.capture.json", {"rank": "no part"})
    manifest.merge(tmp_path, {"command": ["a"]})
    capture = manifest.merge(tmp_path)
    assert [part["rank"] for part in capture["ranks"]] == [0, 2, 10]
    assert (capture["format"], capture["version"], capture["run"]) == (
        "traceloom-capture",
        1,
        {"command": ["a"]},
    )
    assert capture["stage"] == "profiled"
    assert json.loads((tmp_path / "capture.json").read_text()) == capture


def test_parts_that_are_written_at_once_are_all_in_the_merged_file(tmp_path: Path) -> None:
    def one(rank: int) -> None:
        writing.write_json(
            tmp_path / f"rank{rank}.capture.json", manifest.document([{"rank": rank}], {})
        )
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


def test_a_new_capture_takes_the_place_of_an_earlier_one_and_of_nothing_else(
    tmp_path: Path,
) -> None:
    directory, made = tmp_path, tmp_path / writing.NOTES / "new"
    made.mkdir(parents=True)
    ours = [
        "capture.json",
        "rank0.capture.json",
        "rank12.kineto.json.gz",
        "rank0.graph.kineto.json",
        "pid7.host.json.gz",
    ]
    mine = ["rank0.txt", "notes.json", "rank0.kineto.json.gz.bak"]
    for name in ours + mine:
        (directory / name).write_text("old")
    old = manifest.list_files(directory)
    writing.write_json(made / "rank0.capture.json", manifest.document([{"rank": 0}], {}))
    (made / "rank0.kineto.json.gz").write_text("new")
    (made / "rank1.kineto.json").write_text("of a rank that still records")
    manifest.replace_capture(made, directory, old, {"command": ["new"]}, "rank0")
    files = {path.name: path.read_text() for path in directory.iterdir() if path.is_file()}
    assert set(files) == {*mine, "capture.json", "rank0.capture.json", "rank0.kineto.json.gz"}
    assert files["rank0.kineto.json.gz"] == "new"
    assert json.loads(files["capture.json"])["run"] == {"command": ["new"]}
    assert [path.name for path in made.iterdir()] == ["rank1.kineto.json"]
    manifest.clear_notes(directory)
    assert list((directory / writing.NOTES).iterdir()) == []


def test_a_file_is_compressed_whole_and_the_plain_one_goes(tmp_path: Path) -> None:
    plain = tmp_path / "x.json"
    plain.write_bytes(b'{"a": 1}' * 300_000)
    target = writing.CaptureFolders(tmp_path).compress(plain)
    assert target == tmp_path / "x.json.gz"
    assert gzip.decompress(target.read_bytes()) == b'{"a": 1}' * 300_000
    assert [path.name for path in tmp_path.iterdir()] == ["x.json.gz"]


def test_a_directory_that_is_gone_sends_files_to_a_refuge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "file").write_text("")
    places = writing.CaptureFolders(tmp_path / "file" / "run")
    place = places.choose(10)
    assert place.parent == tmp_path / "tmp"
    (place / "x.json").write_text("{}")
    assert places.compress(place / "x.json") == place / "x.json.gz"
    assert "[capture-moved]" in capsys.readouterr().err
    places.leave()
    assert place.exists(), "a refuge that holds something stays"


def log_of(steps: list[tuple[int, int, Mark]]) -> StepLog:
    """A log of steps: how long each took, how long its thread ran, and what became of it."""
    now = Instant(0, 0, thread=1, ran_ns=0)
    log = StepLog(now)
    for took, ran, mark in steps:
        now = Instant(
            now.unix_ns + took,
            now.steady_ns + took,
            thread=1 if ran >= 0 else now.thread + 1,
            ran_ns=now.ran_ns + ran,
        )
        log.end(now, mark)
        log.begin(now)
    return log


def test_the_overhead_compares_medians_of_processor_time_and_does_not_invent_any() -> None:
    before = [(900, 800, Mark.PLAIN), (100, 50, Mark.PLAIN), (500, 400, Mark.DISTURBED)]
    recorded = [
        (120, 54, Mark.RECORDED),
        (990, 55, Mark.RECORDED),
        (130, 56, Mark.RECORDED),
        (300, 150, Mark.GRAPH),
    ]
    after = [(100, 48, Mark.PLAIN), (90, 50, Mark.PLAIN), (110, 52, Mark.PLAIN)]
    log = log_of([*before, *recorded, *after])
    figures = manifest.compute_overhead(log, warm_up=1)
    assert (figures["unrecorded_median_ns"], figures["recorded_median_ns"]) == (100, 130)
    assert (figures["ratio_of"], figures["ratio"], figures["graph_step_ratio"]) == ("cpu", 1.1, 3.0)
    assert figures["ratio_low"] < figures["ratio"] < figures["ratio_high"]
    assert figures["graph_step_ns"] == 300
    empty = manifest.compute_overhead(log_of([]), warm_up=1)
    assert (empty["ratio"], empty["graph_step_ratio"], empty["unrecorded_median_ns"]) == (
        None,
        None,
        None,
    )


def test_the_overhead_compares_steps_that_are_near() -> None:
    far, near = [(100, 100, Mark.PLAIN)] * 50, [(200, 200, Mark.PLAIN)] * 10
    figures = manifest.compute_overhead(
        log_of([*near, *[(220, 220, Mark.RECORDED)] * 5, *far]), warm_up=0
    )
    assert (figures["unrecorded_steps"], figures["unrecorded_median_ns"]) == (10, 150)
    figures = manifest.compute_overhead(
        log_of([*[(220, 220, Mark.RECORDED)] * 5, *near, *far]), warm_up=0
    )
    assert figures["ratio"] == 1.1


def test_the_overhead_of_two_unrecorded_steps_is_unknown_and_without_processor_time_it_is_that_of_the_clock() -> (
    None
):
    recorded = [(120, 60, Mark.RECORDED)] * 5
    assert (
        manifest.compute_overhead(log_of([*recorded, *[(100, 50, Mark.PLAIN)] * 2]), warm_up=0)[
            "ratio"
        ]
        is None
    )
    known = manifest.compute_overhead(log_of([*recorded, *[(100, -1, Mark.PLAIN)] * 3]), warm_up=0)
    assert (known["ratio_of"], known["ratio"]) == ("wall", 1.2)


def test_the_closing_line_tells_what_was_recorded() -> None:
    rank = {
        "name": "rank0",
        "job": "0",
        "window": {"first_step": 3, "step_count": 5, "start_ns": 0, "end_ns": 1},
        "steps": {"start_ns": [0] * 12},
        "overhead": {
            "ratio": 1.034,
            "ratio_low": 1.01,
            "ratio_high": 1.08,
            "ratio_of": "cpu",
            "graph_step_ratio": 1.9,
        },
        "graph_step": {"step": 8},
    }
    assert describe([rank, rank]) == (
        "recorded steps 3 to 7 of 12 on 2 ranks; a recorded step took 1.03 x (1.01 to 1.08) the CPU time of an "
        "unrecorded one; graph step 8 took 1.90 x"
    )


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
