"""Files of allocations that the agent's probes recorded: what they say, and that damaged ones are refused."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceloom.analyze.memory_snapshot import explain_snapshot
from traceloom.errors import InputError
from traceloom.formats.memory_files import ALLOCATIONS, detect_kind, read_allocations
from traceloom.report.memory_sources import read_memory_sources

START = 1_700_000_000_000_000_000
DOCUMENT = {
    "format": "traceloom-allocations",
    "version": 1,
    "pid": 7,
    "rank": 3,
    "frames": [
        ["cudaMalloc", "libcudart.so.12", 0],
        ["leaky", "job", 0],
        ["main", "job", 0],
        ["c10::alloc_cpu", "libc10.so", 0],
        ["forward", "/home/u/model.py", 12],
    ],
    "stacks": [[0, 1, 2], [3, 2], [3, 4]],
    "events": [
        [START + 1000, 7, 0x1000, 2000, "cuda", 0, None, None],
        [START + 2000, 7, 0x9000, 300, "cpu", 1, None, None],
        [START + 3000, 7, 0x1000, 500, "cuda:1", 0, 500, 2000],
        [START + 4000, 8, 0x9000, -300, "cpu", -1, None, None],
        [START + 5000, 7, 0x9000, 40, "cpu", 1, None, None],
    ],
    "lost": 0,
    "without_stack": 0,
    "without_python": None,
}


def written(directory: Path, document: Any, name: str = "rank3.allocations.json.gz") -> Path:
    path = directory / name
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def test_devices_are_snapshots_and_what_the_driver_gave_is_segments(tmp_path: Path) -> None:
    path = written(tmp_path, DOCUMENT)
    assert detect_kind(path) == ALLOCATIONS
    rank, snapshots = read_allocations(path)
    assert rank == 3
    by_type = {snapshot.device_type: snapshot for snapshot in snapshots}
    assert by_type["cuda"].entries.select("device", "action", "address", "bytes").rows() == [
        (0, "segment_alloc", 0x1000, 2000),
        (1, "alloc", 0x1000, 500),
    ]
    assert by_type["cpu"].entries["action"].to_list() == ["alloc", "free_completed", "alloc"]
    explained = explain_snapshot(by_type["cpu"], rank)
    allocations = explained.trace.allocations
    assert allocations.select("device_type", "bytes", "allocated_bytes").rows() == [
        ("cpu", 300, 300),
        ("cpu", -300, 0),
        ("cpu", 40, 40),
    ]
    assert allocations["time_ns"].to_list() == [START + 2000, START + 4000, START + 5000]
    stacks = explained.stacks
    assert stacks is not None
    assert set(stacks.to_list()) == {"c10::alloc_cpu < main"}


def test_without_an_allocator_what_the_driver_gave_is_blocks(tmp_path: Path) -> None:
    document = {**DOCUMENT, "events": DOCUMENT["events"][:1], "lost": 12}  # type: ignore[index]
    _, (snapshot,) = read_allocations(written(tmp_path, document))
    assert snapshot.entries["action"].to_list() == ["alloc"]
    (notice,) = snapshot.notices
    assert (notice.slug, notice.count) == ("lost-allocations", 12)


def test_frames_of_python_have_file_and_line(tmp_path: Path) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["events"][4][5] = 2  # type: ignore[index]
    explained = explain_snapshot(read_allocations(written(tmp_path, document))[1][1])
    assert explained.stacks is not None
    assert explained.stacks.to_list() == ["c10::alloc_cpu < main", "/home/u/model.py(12): forward"]


def test_what_stacks_lack_is_said(tmp_path: Path) -> None:
    document = {**DOCUMENT, "without_stack": 7, "without_python": "its Python is 3.9"}
    notices = read_allocations(written(tmp_path, document))[1][0].notices
    assert [(notice.slug, notice.count) for notice in notices] == [
        ("sampled-stacks", 7),
        ("no-python-lines", 1),
    ]
    assert "3.9" in notices[1].message


def test_they_are_read_from_a_capture_too(tmp_path: Path) -> None:
    written(tmp_path, DOCUMENT)
    sources = read_memory_sources([str(tmp_path)])
    assert [(rank, snapshot.device_type) for rank, snapshot in sources.snapshots] == [
        (3, "cuda"),
        (3, "cpu"),
    ]


def _event(index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["events"][0].__setitem__(index, value)


@pytest.mark.parametrize(
    "damage",
    [
        _event(0, -5),
        _event(2, 1 << 63),
        _event(3, 0),
        _event(3, 1 << 62),
        _event(4, "cuda:x"),
        _event(4, "cuda:" + "9" * 90),
        _event(5, 3),
        _event(5, -2),
        _event(3, "many"),
        lambda document: document["stacks"].append([9]),
        lambda document: document["frames"][4].__setitem__(2, -1),
        lambda document: document["stacks"].append([0] * 1000),
        lambda document: document.pop("frames"),
        lambda document: document.update(format="another"),
    ],
)
def test_what_is_not_as_it_should_be_is_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None]
) -> None:
    document = copy.deepcopy(DOCUMENT)
    damage(document)
    with pytest.raises(InputError) as caught:
        read_allocations(written(tmp_path, document))
    assert caught.value.slug == "damaged-allocations"


def test_another_version_a_cut_file_and_a_bomb_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_allocations(written(tmp_path, {**DOCUMENT, "version": 2}))
    assert caught.value.slug == "other-version"
    path = written(tmp_path, DOCUMENT)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError) as caught:
        read_allocations(path)
    assert caught.value.slug == "damaged-allocations"
    path.write_bytes(gzip.compress(b"[" * (1 << 25)))
    with pytest.raises(InputError):
        read_allocations(path)
