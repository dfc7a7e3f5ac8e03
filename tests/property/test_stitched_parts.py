"""Parts of a capture as a hostile or broken host sends them: the others' ranks stand as they were sent, on one clock."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from traceloom.agent.fleet_link.protocol import ClockOffset
from traceloom.fleet.service.requests import HostPart, merge_host_parts
from traceloom.formats import capture_document

BASE_NS = 1_795_000_000 * 10**9
ODD = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        2**63,
        2**70,
        1.5,
        "",
        "x",
        "../up",
        "/etc/passwd",
        "capture.json",
        "rank0.kineto.json",
        [],
        [None],
        {},
        {"file": {}},
        [[]],
        "a" * 3000,
        "\x00",
    ]
)


def document(rank: int, *, start_ns: int = BASE_NS) -> dict[str, Any]:
    """What an agent writes of one rank."""
    file = f"rank{rank}.kineto.json"
    window = {
        "file": file,
        "kind": "steps",
        "start_ns": start_ns,
        "end_ns": start_ns + 10**9,
        "step_count": 3,
    }
    entry = {
        "rank": rank,
        "world_size": 8,
        "job": "j",
        "name": f"rank{rank}",
        "process": 7,
        "window": window,
        "created_ns": start_ns,
        "written_ns": start_ns + 2 * 10**9,
    }
    target = {"process": "7@1", "profiler": "timeline", "rank": rank, "file": file, "state": "kept"}
    return {
        "format": "traceloom-capture",
        "version": 1,
        "ranks": [entry],
        "request": {"id": "r", "targets": [target]},
        "stacks": [f"rank{rank}.stacks.json.gz"],
        "telemetry": ["host.telemetry.json.gz"],
    }


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where each value of a document stands."""
    if path:
        yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


PLACES = sorted(places(document(1)), key=str)


def put(folder: Path, made: object, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    (folder / "capture.json").write_text(json.dumps(made))
    for name in names:
        (folder / name).write_text(f"{folder.name} {name}")
    return folder


@given(
    changes=st.dictionaries(st.sampled_from(PLACES), ODD, min_size=1, max_size=3),
    ahead_ns=st.integers(-(10**15), 10**15),
    known=st.booleans(),
    same_rank=st.booleans(),
)
def test_what_a_host_sends_changes_nothing_of_the_others(
    changes: dict[tuple[str | int, ...], Any],
    ahead_ns: int,
    known: bool,
    same_rank: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    hostile = document(0 if same_rank else 1)
    for path, odd in sorted(changes.items(), key=lambda item: -len(item[0])):
        inside: Any = hostile
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = copy.deepcopy(odd)
    good = document(0, start_ns=BASE_NS + ahead_ns)
    clock = ClockOffset(offset_ns=-ahead_ns, error_ns=500, round_trips=16) if known else None
    names = ["rank0.kineto.json", "rank0.stacks.json.gz", "host.telemetry.json.gz"]
    of_hostile = [name.replace("rank0", f"rank{0 if same_rank else 1}") for name in names]
    parts = [
        HostPart(host="good", folder=put(folder / "good", good, names), clock=clock),
        HostPart(host="evil", folder=put(folder / "evil", hostile, of_hostile), clock=None),
    ]
    whole = folder / "whole"
    faults = merge_host_parts(parts, whole, {"id": "f"})
    read = capture_document.decode((whole / "capture.json").read_bytes(), whole)
    assert read is not None, "a capture that its own reader refuses"
    stood = json.loads((whole / "capture.json").read_text())
    [entry] = [entry for entry in stood["ranks"] if entry["host"] == "good"]
    offset_ns = -ahead_ns if known else 0
    sent = good["ranks"][0]
    assert entry["window"] == {
        **sent["window"],
        "start_ns": sent["window"]["start_ns"] + offset_ns,
        "end_ns": sent["window"]["end_ns"] + offset_ns,
    }
    assert entry["created_ns"] == sent["created_ns"] + offset_ns
    assert entry["clock"] == (None if clock is None else {"offset_ns": offset_ns, "error_ns": 500})
    for name in names:
        assert (whole / name).read_text() == f"good {name}"
    # All files are of one of the two, nothing lies elsewhere, and a rank's file is there.
    for path in whole.iterdir():
        assert path.name == "capture.json" or path.read_text().split()[0] in {"good", "evil"}
    listed = [entry["window"]["file"] for entry in stood["ranks"]]
    listed += [name for kind in ("stacks", "telemetry") for name in stood.get(kind, ())]
    assert all((whole / name).is_file() and "/" not in name for name in listed)
    assert {entry["host"] for entry in stood["ranks"]} == {"good", "evil"} or faults


@given(name=st.sampled_from(["stacks", "telemetry"]), odd=st.lists(ODD, max_size=3))
def test_lists_of_files_may_hold_anything(
    name: str, odd: list[object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    part = put(folder / "evil", {**document(1), name: odd}, ["rank1.kineto.json"])
    assert (
        merge_host_parts([HostPart(host="evil", folder=part, clock=None)], folder / "whole", {})
        == []
    )
    assert name not in json.loads((folder / "whole" / "capture.json").read_text())
