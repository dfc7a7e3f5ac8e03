"""Stacks and telemetry beside a trace: what is right is read, what is damaged is left out and counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from support.beside import allocations, put, series, stacks, telemetry
from traceloom.errors import InvariantError
from traceloom.formats import load
from traceloom.testing import TraceBuilder
from traceloom.trace.session import ALLOCATIONS_SCHEMA, SAMPLES_SCHEMA, TELEMETRY_SCHEMA, Session

BASE = 1_700_000_000_000_000_000
SAMPLES_OF_TWO = [
    [BASE + 1000, 0, 500, [0, 1]],
    [BASE + 1500, 0, 250, [0, 1, 3]],
    [BASE + 1000, 1, 900, [2]],
]


def _trace(directory: Path, rank: int = 0, base_ns: int = BASE) -> Path:
    builder = TraceBuilder(rank, 2, host="node1", base_ns=base_ns).op("aten::mm", 1, 5)
    return builder.write(directory / f"rank{rank}.kineto.json.gz")


def _load(directory: Path) -> Session:
    session = load(directory, cache=False)
    session.check()
    return session


def test_samples_are_those_of_the_rank_whose_trace_they_lie_beside(tmp_path: Path) -> None:
    for rank in (0, 1):
        _trace(tmp_path, rank)
    put(tmp_path / "rank1.stacks.json.gz", stacks(SAMPLES_OF_TWO))
    session = _load(tmp_path)
    assert session.samples.schema == SAMPLES_SCHEMA
    assert session.samples.rows() == [
        (
            1,
            77,
            77,
            "MainThread",
            BASE + 1000,
            500,
            ["/a/train.py(30): main", "/a/train.py(20): step"],
        ),
        (
            1,
            77,
            77,
            "MainThread",
            BASE + 1500,
            250,
            ["/a/train.py(30): main", "/a/train.py(20): step", "c10d::wait"],
        ),
        (1, 77, 78, "loader", BASE + 1000, 900, ["/a/data.py(5): load"]),
    ]
    assert session.notices == ()
    assert session.of_rank(0).samples.height == 0
    assert session.of_rank(1).samples.height == 3


def test_telemetry_is_that_of_the_hosts(tmp_path: Path) -> None:
    _trace(tmp_path)
    power = series("gpu_power_watts", [BASE + 100, BASE + 200], [300.5, 400.0], device="GPU-0")
    put(
        tmp_path / "node1.telemetry.json.gz",
        telemetry(power, series("host_load_ratio", [BASE], [0.5])),
    )
    put(
        tmp_path / "node2.telemetry.json.gz",
        telemetry(series("host_load_ratio", [BASE], [0.25]), host="node2"),
    )
    session = _load(tmp_path)
    assert session.telemetry.schema == TELEMETRY_SCHEMA
    assert session.telemetry.rows() == [
        (
            "node1",
            BASE + 100,
            "traceloom_gpu_power_watts",
            '{"device":"GPU-0"}',
            300.5,
            "",
            "gauge",
        ),
        (
            "node1",
            BASE + 200,
            "traceloom_gpu_power_watts",
            '{"device":"GPU-0"}',
            400.0,
            "",
            "gauge",
        ),
        ("node1", BASE, "traceloom_host_load_ratio", "{}", 0.5, "", "gauge"),
        ("node2", BASE, "traceloom_host_load_ratio", "{}", 0.25, "", "gauge"),
    ]


def test_allocations_are_those_of_the_rank(tmp_path: Path) -> None:
    _trace(tmp_path)
    given = [BASE + 20, 78, 2**63 + 5, 512, "cuda:0", 0, 512, 2048]
    taken = [BASE + 30, 78, 2**63 + 5, -512, "cuda:0", -1, None, None]
    wrong = [BASE + 40, 78, 2**64, 512, "cuda:0", 0, 512, 2048]
    put(tmp_path / "rank0.allocations.json.gz", allocations([taken, given, wrong]))
    session = _load(tmp_path)
    assert session.allocations.schema == ALLOCATIONS_SCHEMA
    assert session.allocations.rows() == [
        (0, 77, 78, BASE + 20, 2**63 + 5, 512, "cuda:0", 512, 2048),
        (0, 77, 78, BASE + 30, 2**63 + 5, -512, "cuda:0", None, None),
    ]
    assert [(notice.slug, notice.count) for notice in session.notices] == [
        ("damaged-allocations", 1)
    ]


def test_a_run_without_either_has_empty_frames(tmp_path: Path) -> None:
    session = load(_trace(tmp_path), cache=False)
    assert (session.samples.schema, session.samples.height) == (SAMPLES_SCHEMA, 0)
    assert (session.telemetry.schema, session.telemetry.height) == (TELEMETRY_SCHEMA, 0)


@pytest.mark.parametrize(
    "bad",
    [
        [BASE, 7, 10, [0]],  # no such thread
        [BASE, 0, 10, [0, 9]],  # no such frame
        [BASE, 0, -1, [0]],
    ],
)
def test_samples_that_cannot_be_right_are_left_out_and_counted(
    tmp_path: Path, bad: list[Any]
) -> None:
    _trace(tmp_path)
    put(tmp_path / "rank0.stacks.json.gz", stacks([*SAMPLES_OF_TWO, bad]))
    session = _load(tmp_path)
    assert session.samples.height == 3
    assert [(n.slug, n.count, n.rank) for n in session.notices] == [("damaged-stacks", 1, 0)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        gzip.compress(b"{")[:-5],
        gzip.compress(json.dumps(stacks([])).encode())[:40],
        json.dumps(stacks([], version=2)).encode(),
        json.dumps(stacks([], format="other")).encode(),
        json.dumps(stacks([[BASE, 0, 10, ["0"]]])).encode(),
        json.dumps(stacks([[2**70, 0, 10, [0]]])).encode(),
        json.dumps(stacks([[BASE, -1, 10, [0]]])).encode(),
        json.dumps([1]).encode(),
    ],
    ids=[
        "empty",
        "no JSON",
        "cut",
        "cut later",
        "version",
        "format",
        "no frame",
        "overflow",
        "negative",
        "a list",
    ],
)
def test_a_file_of_stacks_that_cannot_be_read_is_a_notice(tmp_path: Path, content: bytes) -> None:
    _trace(tmp_path)
    (tmp_path / "rank0.stacks.json.gz").write_bytes(content)
    session = _load(tmp_path)
    assert session.samples.height == 0
    assert [notice.slug for notice in session.notices] == ["damaged-stacks"]
    assert str(tmp_path) in session.notices[0].where


@pytest.mark.parametrize("version", [0, 2])
def test_another_version_is_said_in_the_notice(tmp_path: Path, version: int) -> None:
    _trace(tmp_path)
    put(tmp_path / "rank0.stacks.json.gz", stacks([], version=version))
    (notice,) = _load(tmp_path).notices
    assert (
        f"the file has format version {version}, this Traceloom reads version 1" in notice.message
    )


def test_damaged_telemetry_is_a_notice_and_costs_the_other_hosts_nothing(tmp_path: Path) -> None:
    _trace(tmp_path)
    uneven = series("gpu_busy_ratio", [BASE, BASE + 1], [0.5])
    put(
        tmp_path / "node1.telemetry.json.gz",
        telemetry(uneven, series("host_load_ratio", [BASE], [0.5])),
    )
    (tmp_path / "node0.telemetry.json.gz").write_bytes(b"\x1f\x8b broken")
    session = _load(tmp_path)
    assert session.telemetry["metric"].to_list() == ["traceloom_host_load_ratio"]
    assert [notice.slug for notice in session.notices] == ["damaged-telemetry"] * 2


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    directory = tmp_path / "capture"
    directory.mkdir()
    _trace(directory)
    (directory / "rank0.stacks.json.gz").symlink_to(
        put(tmp_path / "elsewhere", stacks(SAMPLES_OF_TWO))
    )
    session = _load(directory)
    assert session.samples.height == 0
    assert [notice.slug for notice in session.notices] == ["damaged-stacks"]


def test_a_trace_of_another_clock_has_no_samples(tmp_path: Path) -> None:
    _trace(tmp_path, base_ns=0)
    put(tmp_path / "rank0.stacks.json.gz", stacks(SAMPLES_OF_TWO))
    session = _load(tmp_path)
    assert session.samples.height == 0
    assert "another clock" in session.notices[0].message


def test_frames_of_other_columns_break_the_law(tmp_path: Path) -> None:
    session = load(_trace(tmp_path), cache=False)
    with pytest.raises(InvariantError):
        Session(session.traces, "", samples=session.samples.drop("stack")).check()
