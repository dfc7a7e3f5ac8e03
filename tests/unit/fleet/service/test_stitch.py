"""Captures of hosts whose clocks differ become one capture, on one clock; what is damaged is said and left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.beside import put, series, stacks, telemetry
from traceloom.agent.fleet_link.protocol import ClockOffset
from traceloom.errors import InputError
from traceloom.fleet.service.requests import HostPart, merge_host_parts
from traceloom.formats import load
from traceloom.testing import TraceBuilder

BASE = 1_700_000_000_000_000_000
LATE = 3_000_000_000  # the second host's clock is so far ahead


def host_part(tmp_path: Path, host: str, rank: int, ahead_ns: int, stem: str = "") -> HostPart:
    """What an agent sends: one rank, with stacks and telemetry, all by a clock that is ahead."""
    folder = tmp_path / host
    folder.mkdir()
    stem = stem or f"rank{rank}"
    base = BASE + ahead_ns
    TraceBuilder(rank, 2, host=host, base_ns=base).op("aten::mm", 1, 5).write(
        folder / f"{stem}.kineto.json.gz"
    )
    put(folder / f"{stem}.stacks.json.gz", stacks([[base + 1000, 0, 500, [0, 1]]], rank=rank))
    put(
        folder / f"{host}.telemetry.json.gz",
        telemetry(series("host_load_ratio", [base], [0.5]), host=host),
    )
    window = {
        "file": f"{stem}.kineto.json.gz",
        "kind": "steps",
        "start_ns": base,
        "end_ns": base + 9,
        "step_count": 3,
    }
    entry = {
        "rank": rank,
        "world_size": 2,
        "job": "j",
        "name": stem,
        "host": host,
        "process": 7,
        "window": window,
    }
    target = {
        "process": "7@1",
        "profiler": "timeline",
        "rank": rank,
        "file": window["file"],
        "state": "kept",
    }
    document = {
        "format": "traceloom-capture",
        "version": 1,
        "ranks": [entry],
        "request": {"id": "r", "targets": [target]},
        "stacks": [f"{stem}.stacks.json.gz"],
        "telemetry": [f"{host}.telemetry.json.gz"],
    }
    (folder / "capture.json").write_text(json.dumps(document))
    return HostPart(
        host=host,
        folder=folder,
        clock=ClockOffset(offset_ns=-ahead_ns, error_ns=500, round_trips=16),
    )


def whole(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "capture.json").read_text())
    return document


def test_everything_of_all_hosts_stands_on_one_clock(tmp_path: Path) -> None:
    parts = [host_part(tmp_path, "node1", 0, 0), host_part(tmp_path, "node2", 1, LATE)]
    faults = merge_host_parts(parts, tmp_path / "job", {"id": "f1", "who": "ada"})
    assert faults == []
    session = load(tmp_path / "job", cache=False)
    session.check()
    assert [(trace.rank, trace.meta.host, trace.start_ns) for trace in session.traces] == [
        (0, "node1", BASE + 1000),
        (1, "node2", BASE + 1000),
    ]
    assert session.samples["time_ns"].to_list() == [BASE + 1000] * 2
    assert session.telemetry.select("host", "time_ns").rows() == [("node1", BASE), ("node2", BASE)]
    document = whole(tmp_path / "job")
    assert [entry["window"]["start_ns"] for entry in document["ranks"]] == [BASE, BASE]
    assert document["request"]["hosts"] == [
        {"host": "node1", "clock": {"offset_ns": 0, "error_ns": 500}},
        {"host": "node2", "clock": {"offset_ns": -LATE, "error_ns": 500}},
    ]
    assert [(target["host"], target["file"]) for target in document["request"]["targets"]] == [
        ("node1", "rank0.kineto.json.gz"),
        ("node2", "rank1.kineto.json.gz"),
    ]
    # The files are those that came, byte for byte.
    name = "rank1.kineto.json.gz"
    assert (tmp_path / "job" / name).read_bytes() == (tmp_path / "node2" / name).read_bytes()


def test_names_that_two_hosts_use_are_told_apart(tmp_path: Path) -> None:
    parts = [host_part(tmp_path, f"node{number}", number, 0, stem="pid7") for number in (0, 1)]
    assert merge_host_parts(parts, tmp_path / "job", {}) == []
    assert {path.name for path in (tmp_path / "job").iterdir()} == {
        "capture.json",
        "pid7.kineto.json.gz",
        "pid7.stacks.json.gz",
        "node1-pid7.kineto.json.gz",
        "node1-pid7.stacks.json.gz",
        "node0.telemetry.json.gz",
        "node1.telemetry.json.gz",
    }
    session = load(tmp_path / "job", cache=False)
    assert session.ranks == (0, 1)
    assert session.samples.height == 2
    assert whole(tmp_path / "job")["stacks"] == ["pid7.stacks.json.gz", "node1-pid7.stacks.json.gz"]


def test_a_host_that_sent_nothing_usable_is_named(tmp_path: Path) -> None:
    good = host_part(tmp_path, "node1", 0, 0)
    torn = host_part(tmp_path, "node2", 1, 0)
    (torn.folder / "capture.json").write_text('{"format": "traceloom-capture", "ranks": [{')
    missing = host_part(tmp_path, "node3", 2, 0)
    (missing.folder / "rank2.kineto.json.gz").unlink()
    faults = merge_host_parts([good, torn, missing], tmp_path / "job", {})
    assert faults == [
        "node2: its capture.json cannot be read",
        "node3: rank 2 names a file that did not come",
    ]
    assert load(tmp_path / "job", cache=False).ranks == (0,)
    with pytest.raises(InputError) as error:
        merge_host_parts([torn, missing], tmp_path / "nothing", {})
    assert error.value.slug == "no-capture"


def test_nothing_of_a_host_leaves_the_capture(tmp_path: Path) -> None:
    part = host_part(tmp_path, "node1", 0, 0)
    secret = tmp_path / "secret"
    secret.write_text("s")
    (part.folder / "rank9.kineto.json.gz").symlink_to(secret)
    document = json.loads((part.folder / "capture.json").read_text())
    outside = [
        {"rank": 5, "window": {"file": "../secret"}},
        {"rank": 9, "window": {"file": "rank9.kineto.json.gz"}},
    ]
    document["ranks"] += [*outside, "no object", {"rank": 4, "window": None}]
    (part.folder / "capture.json").write_text(json.dumps(document))
    faults = merge_host_parts([part], tmp_path / "job", {})
    assert len(faults) == 4
    assert not (tmp_path / "job" / "rank9.kineto.json.gz").exists()
    assert [entry["rank"] for entry in whole(tmp_path / "job")["ranks"]] == [0]
