"""Which files are of one run, told from their first part; and what each run is called."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from traceloom.errors import InputError
from traceloom.formats.inputs import (
    FileHead,
    InputFile,
    choose_run_names,
    is_same_run,
    read_head,
    split_into_runs,
)
from traceloom.testing import TraceBuilder

EPOCH = 1_700_000_000 * 10**9
MINUTE = 60 * 10**9


def file(name: str, **changes: Any) -> FileHead:
    """What is seen of a file that is one of two ranks of a run on one host."""
    values: dict[str, Any] = {
        "source": InputFile(Path(name), given=True),
        "rank": 0,
        "world_size": 2,
        "job": (),
        "part": None,
        "host": "host0",
        "process": 7,
        "start_ns": EPOCH,
        "pattern": "runs/rank#.json",
    }
    return FileHead(**(values | changes))


def captured(name: str, capture: str, part: str | int, **changes: Any) -> FileHead:
    return file(
        name,
        source=InputFile(Path(name), given=False, capture=Path(capture), entry={}),
        part=part,
        **changes,
    )


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({}, True),
        ({"start_ns": EPOCH + 59 * MINUTE}, True),
        ({"start_ns": EPOCH + 60 * MINUTE}, True),
        ({"start_ns": EPOCH + 61 * MINUTE}, False),
        ({"start_ns": EPOCH - 61 * MINUTE}, False),
        ({"pattern": "other/rank#.json", "start_ns": EPOCH + 10 * MINUTE}, True),
        ({"pattern": "other/rank#.json", "start_ns": EPOCH + 11 * MINUTE}, False),
        ({"start_ns": None}, True),
        ({"start_ns": None, "pattern": "other/rank#.json"}, False),
        ({"world_size": 4}, False),
        ({"world_size": None}, True),
        ({"world_size": None, "pattern": "other/rank#.json"}, False),
        ({"host": "host9", "process": 99}, True),
        ({"job": (("job_id", "1"),)}, True),
    ],
)
def test_ranks_of_a_job_are_together_by_size_time_and_name(
    changes: dict[str, Any], together: bool
) -> None:
    first, second = file("runs/rank0.json"), file("runs/rank1.json", rank=1, **changes)
    assert is_same_run(first, second) is together
    assert is_same_run(second, first) is together


@pytest.mark.parametrize(
    ("left", "right", "together"),
    [
        ((("job_id", "1"),), (("job_id", "1"),), True),
        ((("job_id", "1"),), (("job_id", "2"),), False),
        ((("job_id", "1"),), (("mast_job_name", "x"),), True),
        ((("job_id", "1"), ("tw_job", "a")), (("job_id", "1"), ("tw_job", "b")), False),
        ((), (("job_id", "2"),), True),
    ],
)
def test_job_ids_that_both_name_decide(left: Any, right: Any, together: bool) -> None:
    assert is_same_run(file("a", job=left), file("b", rank=1, job=right)) is together


@pytest.mark.parametrize(
    ("changes", "together"),
    [
        ({"start_ns": EPOCH + MINUTE}, True),  # the next window of the same process
        ({"start_ns": EPOCH}, False),  # a copy of the same window
        ({"start_ns": EPOCH + MINUTE, "process": 8}, False),
        ({"start_ns": EPOCH + MINUTE, "host": "host9"}, False),
        ({"start_ns": EPOCH + MINUTE, "pattern": "other/rank#.json"}, False),
        ({"rank": 1, "start_ns": EPOCH + MINUTE}, True),
        ({"rank": 1, "start_ns": EPOCH + 61 * MINUTE}, False),
        ({"rank": 1, "start_ns": None}, True),
        ({"rank": None}, False),
    ],
)
def test_without_a_size_of_the_job_process_and_rank_decide(
    changes: dict[str, Any], together: bool
) -> None:
    first, second = file("a", world_size=1), file("b", world_size=1, **changes)
    assert is_same_run(first, second) is together
    assert is_same_run(second, first) is together


def test_processes_that_are_not_known_are_not_the_same() -> None:
    assert not is_same_run(
        file("a", world_size=1, process=None),
        file("b", world_size=1, process=None, start_ns=EPOCH + 1),
    )


@pytest.mark.parametrize(
    ("other", "together"),
    [
        (captured("cap/rank1.json", "cap", "job"), True),
        (
            captured(
                "cap/rank1.json", "cap", "job", world_size=99, start_ns=0, job=(("job_id", "9"),)
            ),
            True,
        ),
        (captured("cap/rank1.json", "cap", "job 2"), False),
        (captured("cap2/rank1.json", "cap2", "job"), False),
        (file("cap/rank1.json", rank=1), False),
    ],
)
def test_of_captures_their_folder_and_job_alone_decide(other: FileHead, together: bool) -> None:
    first = captured("cap/rank0.json", "cap", "job")
    assert is_same_run(first, other) is together
    assert is_same_run(other, first) is together


def test_whatever_the_order_of_the_files_the_runs_are_the_same() -> None:
    files = [
        file("a0", rank=0),
        file("a1", rank=1),
        file("b0", world_size=4, rank=0),
        file("b1", world_size=4, rank=1),
        captured("c0", "cap", 1),
    ]
    expected = {("a0", "a1"), ("b0", "b1"), ("c0",)}
    for order in itertools.permutations(files):
        runs = split_into_runs(list(order))
        assert {tuple(sorted(str(each.source.path) for each in run)) for run in runs} == expected
        firsts = [order.index(run[0]) for run in runs]
        assert firsts == sorted(firsts)


def test_windows_of_one_process_are_one_run_although_the_first_and_last_lie_far_apart() -> None:
    windows = [file(f"w{number}", start_ns=EPOCH + 40 * number * MINUTE) for number in range(5)]
    assert split_into_runs(windows) == [windows]
    far = [windows[0], file("late", start_ns=EPOCH + 10_000 * MINUTE)]
    assert split_into_runs(far) == [[far[0]], [far[1]]]
    assert split_into_runs([]) == []


def at(*paths: str, capture: str | None = None) -> list[FileHead]:
    return [captured(path, capture, 1) if capture else file(path) for path in paths]


@pytest.mark.parametrize(
    ("runs", "requested", "called"),
    [
        ([at("runs/rank0.json", "runs/rank1.json")], ("runs",), ["runs"]),
        (
            [at("runs/rank0.json", "runs/rank1.json")],
            ("runs/rank0.json", "runs/rank1.json"),
            ["runs/rank*.json"],
        ),
        ([at("a.json"), at("b.json")], (".",), ["a.json", "b.json"]),
        ([at("a/rank0.json", "a/rank12.json"), at("b.json")], (".",), ["a/rank*.json", "b.json"]),
        ([at("a/x0.json", "b/x0.json"), at("c.json")], (".",), ["x0.json", "c.json"]),
        ([at("job/0/t.json", "job/1/t.json"), at("c.json")], (".",), ["job/t.json", "c.json"]),
        ([at("/a/t.json", "/b/u.json"), at("c.json")], (".",), ["/", "c.json"]),
        ([at("a/t.json", "b/u.json"), at("c.json")], (".",), ["a/t.json", "c.json"]),
        ([at("a/first.json", "a/second.json"), at("c.json")], (".",), ["a/first.json", "c.json"]),
        ([at("cap/r0", "cap/r1", capture="cap"), at("c.json")], (".",), ["cap", "c.json"]),
        (
            [at("cap/r0", capture="cap"), at("cap/r1", capture="cap")],
            ("cap",),
            ["cap/r0", "cap/r1"],
        ),
    ],
)
def test_a_run_is_called_what_its_files_have_in_common(
    runs: list[list[FileHead]], requested: tuple[str, ...], called: list[str]
) -> None:
    assert choose_run_names(runs, requested) == called


def seen(builder: TraceBuilder, path: Path, entry: dict[str, Any] | None = None) -> FileHead:
    return read_head(
        InputFile(
            builder.write(path), given=True, capture=path.parent if entry else None, entry=entry
        )
    )


def test_the_first_part_says_rank_size_host_process_and_start(tmp_path: Path) -> None:
    made = TraceBuilder(rank=3, world_size=8, host="node7", process=4242, base_ns=EPOCH)
    made.op("aten::second", 20, 5).op("aten::first", 10.5, 5)
    (tmp_path / "x12").mkdir()
    first_part = seen(made, tmp_path / "x12" / "y3.json")
    assert (first_part.rank, first_part.world_size, first_part.host, first_part.process) == (
        3,
        8,
        "node7",
        4242,
    )
    assert first_part.start_ns == EPOCH + 10_500
    assert first_part.pattern.endswith("/x#/y#.json")
    assert (first_part.job, first_part.part) == ((), None)


def test_capture_json_decides_over_the_file(tmp_path: Path) -> None:
    made = TraceBuilder(rank=3, world_size=8).op("aten::mm", 1, 1)
    first_part = seen(
        made, tmp_path / "rank5.json", {"rank": 1, "world_size": 2, "job": "this one"}
    )
    assert (first_part.rank, first_part.world_size, first_part.part) == (1, 2, "this one")


def test_a_clock_that_is_no_unix_time_gives_no_start_and_a_name_gives_the_rank(
    tmp_path: Path,
) -> None:
    first_part = seen(
        TraceBuilder(rank=None, host="").op("aten::mm", 1, 1), tmp_path / "rank5.json"
    )
    assert (first_part.rank, first_part.world_size, first_part.start_ns, first_part.host) == (
        5,
        None,
        None,
        None,
    )


def test_job_ids_of_all_kinds_are_seen_sorted_as_text(tmp_path: Path) -> None:
    made = TraceBuilder().op("aten::mm", 1, 1)
    made.metadata(
        PT_PROFILER_JOB_VERSION_ID=3, mast_job_name="m", JOB_ID=12, job="other", group_trace_id="g"
    )
    first_part = seen(made, tmp_path / "a.json")
    assert first_part.job == (
        ("JOB_ID", "12"),
        ("PT_PROFILER_JOB_VERSION_ID", "3"),
        ("group_trace_id", "g"),
        ("mast_job_name", "m"),
    )


def test_without_spans_there_is_neither_start_nor_process(tmp_path: Path) -> None:
    first_part = seen(
        TraceBuilder(base_ns=EPOCH).instant("Record Window End", 5), tmp_path / "a.json"
    )
    assert (first_part.start_ns, first_part.process) == (None, None)


@pytest.mark.parametrize("generation", ["2021", "2022", "2023", "2024", "2026", "rocm"])
def test_every_generation_of_writers_says_when_it_begins(generation: str, tmp_path: Path) -> None:
    shift = EPOCH // 1000 if generation in {"2021", "2022", "2023"} else 0
    made = (
        TraceBuilder(generation=generation, base_ns=EPOCH)
        .op("aten::mm", shift + 8, 5)
        .op("aten::mm", shift + 4, 1)
    )
    trace_start = made.build().start_ns
    assert trace_start >= EPOCH
    assert seen(made, tmp_path / "a.json").start_ns == pytest.approx(trace_start, abs=1000)


@pytest.mark.parametrize("text", ["", "<html>", json.dumps({"no": "events"}), json.dumps([1, 2])])
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError):
        read_head(InputFile(path, given=True))
