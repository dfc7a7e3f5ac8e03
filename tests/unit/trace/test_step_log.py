"""All steps of a recorded run, from its part of capture.json: valid tables by value, others as unknown."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from traceloom.trace.session import (
    WARM_UP_STEPS,
    find_unrecorded_steps,
    read_capture_table,
    read_run_steps,
)
from traceloom.trace.trace import Meta

TABLE: dict[str, Any] = {
    "duration_ns": [50, 40, 30, 20, 10, 0],
    "state": ["unrecorded", "recorded", "graph", "unrecorded", "x", "early"],
    "cpu_ns": [49, None, 7, -1, 1 << 53, 3.5],
}


def meta(steps: Any, folder: Path | None = None) -> Meta:
    return Meta(str((folder or Path("nowhere")) / "rank0.kineto.json.gz"), capture={"steps": steps})


def test_every_step_is_there_with_its_time_and_its_state() -> None:
    steps = read_run_steps(meta(TABLE))
    assert steps is not None
    assert steps.duration_ns.tolist() == TABLE["duration_ns"]
    assert str(steps.duration_ns.dtype) == "int64"
    assert steps.state == TABLE["state"]
    assert steps.ran_ns == [49, None, 7, None, None, None]


@pytest.mark.parametrize("ran", [None, [], [1, 2], "x", {"a": 1}, 7])
def test_a_column_of_cpu_times_that_does_not_fit_is_unknown_for_all_steps(ran: Any) -> None:
    steps = read_run_steps(meta({**TABLE, "cpu_ns": ran}))
    assert steps is not None
    assert steps.ran_ns == [None] * 6


@pytest.mark.parametrize(
    "changes",
    [
        {"duration_ns": None},
        {"duration_ns": [1, 2]},
        {"duration_ns": {}},
        {"state": None},
        {"state": ["x"]},
        {"duration_ns": [1, 2, 3, 4, 5, -1]},
        {"duration_ns": [1, 2, 3, 4, 5, None]},
        {"duration_ns": [1, 2, 3, 4, 5, 1 << 53]},
        {"duration_ns": [1, 2, 3, 4, 5, 6.5]},
    ],
)
def test_a_table_with_an_impossible_time_or_of_uneven_length_is_none(
    changes: dict[str, Any],
) -> None:
    assert read_run_steps(meta({**TABLE, **changes})) is None


def test_the_longest_time_that_is_one() -> None:
    steps = read_run_steps(meta({"duration_ns": [(1 << 53) - 1], "state": ["graph"]}))
    assert steps is not None
    assert (steps.duration_ns.tolist(), steps.state) == ([(1 << 53) - 1], ["graph"])


def test_a_run_without_steps_has_none_but_has_a_table() -> None:
    steps = read_run_steps(meta({"duration_ns": [], "state": []}))
    assert steps is not None
    assert (steps.duration_ns.tolist(), steps.state, steps.ran_ns) == ([], [], [])
    undisturbed = find_unrecorded_steps(meta({"duration_ns": [], "state": []}))
    assert undisturbed is not None
    assert [column.tolist() for column in undisturbed] == [[], []]


@pytest.mark.parametrize("count", range(6))
def test_undisturbed_steps_are_those_of_all_steps_after_the_warm_up(count: int) -> None:
    table = {"duration_ns": list(range(100, 100 + count)), "state": ["unrecorded"] * count}
    steps = find_unrecorded_steps(meta(table))
    assert steps is not None
    assert steps[0].tolist() == list(range(WARM_UP_STEPS, count))
    assert steps[1].tolist() == table["duration_ns"][WARM_UP_STEPS:]


@pytest.mark.parametrize("impossible", ["x", -4, 1 << 62, None])
def test_a_table_with_an_impossible_time_has_no_undisturbed_steps(impossible: object) -> None:
    table = {"duration_ns": [1, 2, 3, impossible, 5], "state": ["unrecorded"] * 5}
    assert find_unrecorded_steps(meta(table)) is None


@pytest.mark.parametrize("capture", [None, {}, {"steps": None}, {"steps": [1]}, {"steps": "file"}])
def test_without_a_table_there_is_none(capture: Any) -> None:
    assert read_capture_table(capture, "a/rank0.json", "steps") is None
    assert read_run_steps(Meta("a", capture=capture)) is None
    assert find_unrecorded_steps(Meta("a", capture=capture)) is None


@pytest.mark.parametrize("name", [3, None, ["x"]])
def test_a_table_whose_file_is_no_name_is_the_table_itself(name: Any) -> None:
    table = {"file": name, "rows": 2}
    assert read_capture_table({"other": table}, "a", "other") == table


@pytest.mark.parametrize("packed", [False, True])
def test_a_table_beside_the_trace_is_read_under_any_key(packed: bool, tmp_path: Path) -> None:
    data = json.dumps(TABLE).encode()
    (tmp_path / "t").write_bytes(gzip.compress(data) if packed else data)
    assert (
        read_capture_table({"gaps": {"file": "t"}}, str(tmp_path / "rank0.json"), "gaps") == TABLE
    )
    steps = read_run_steps(meta({"file": "t"}, tmp_path))
    assert steps is not None
    assert steps.duration_ns.tolist() == TABLE["duration_ns"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"7",
        b"\x1f\x8b",
        b"\x1f\x8bxxxxxxxxxxxxxxx",
        b'{"a": "\xff"}',
        b'{"a": NaN}',
        b"null",
        gzip.compress(json.dumps(TABLE).encode())[:-30],
        b'{"a":' * 20_000,
    ],
)
def test_a_file_that_is_no_table_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    assert (
        read_capture_table({"steps": {"file": "t"}}, str(tmp_path / "rank0.json"), "steps") is None
    )
    assert read_run_steps(meta({"file": "t"}, tmp_path)) is None


def test_a_file_that_expands_without_end_is_cut_and_so_no_table(tmp_path: Path) -> None:
    text = b'{"duration_ns": [1], "state": ["unrecorded"]' + b" " * (1 << 25) + b"}"
    (tmp_path / "t").write_bytes(gzip.compress(text, 1))
    assert (
        read_capture_table({"steps": {"file": "t"}}, str(tmp_path / "rank0.json"), "steps") is None
    )


@pytest.mark.parametrize("name", ["../t", "/etc/hostname", "sub/t", "..", ""])
def test_a_name_never_leaves_the_folder_of_the_trace(name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for path in (tmp_path / "t", tmp_path / "sub" / "t"):
        path.write_text(json.dumps(TABLE))
    assert (
        read_capture_table({"steps": {"file": name}}, str(tmp_path / "sub" / "rank0.json"), "steps")
        is None
    )
