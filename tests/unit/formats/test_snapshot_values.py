"""Memory snapshots by value: every column of entries, segments, blocks and stacks, against a plain allocator."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.snapshots import SnapshotBuilder
from traceloom.errors import InputError
from traceloom.formats.memory_files import parse_snapshot, read_snapshot
from traceloom.trace.session import (
    SNAPSHOT_ACTIONS,
    SNAPSHOT_BLOCKS_SCHEMA,
    SNAPSHOT_ENTRIES_SCHEMA,
    SNAPSHOT_SEGMENTS_SCHEMA,
    format_frame,
    format_stacks,
    is_python_frame,
)

FRAMES = [(f"/u/f{number}.py", number, f"call{number}") for number in range(5)]
START = 1_700_000_000_000_000
LARGEST = 1 << 62


class Played:
    """An allocator played at random, with what is alive in plain Python."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.builder = SnapshotBuilder()
        self.alive: dict[int, tuple[int, tuple[Any, ...]]] = {}
        self.calls: list[tuple[str, int, int]] = []
        for _ in range(80):
            if self.alive and chance.random() < 0.45:
                address = chance.choice(sorted(self.alive))
                size, _ = self.alive.pop(address)
                self.builder.free(address)
                self.calls += [("free_requested", address, size), ("free_completed", address, size)]
            else:
                size, stack = (
                    chance.randrange(1, 300_000),
                    tuple(chance.sample(FRAMES, chance.randrange(4))),
                )
                address = self.builder.alloc(size, *stack)
                self.alive[address] = size, stack
                self.calls.append(("alloc", address, size))


@pytest.fixture(scope="module", params=range(3))
def played(request: pytest.FixtureRequest) -> Played:
    return Played(request.param)


def test_entries_are_the_calls_in_their_order(played: Played) -> None:
    snapshot = parse_snapshot(played.builder.build(), "x")
    assert snapshot.entries.schema == SNAPSHOT_ENTRIES_SCHEMA
    calls = snapshot.entries.filter(~pl.col("action").is_in(["segment_alloc"]))
    assert calls.select("action", "address", "bytes").rows() == played.calls
    assert snapshot.entries["time_us"].to_list() == list(
        range(START + 1, START + 1 + snapshot.entries.height)
    )
    assert snapshot.entries["device"].unique().to_list() == [0]
    assert snapshot.notices == ()


def test_active_blocks_are_what_is_alive_with_the_stack_that_made_it(played: Played) -> None:
    snapshot = parse_snapshot(played.builder.build(), "x")
    assert snapshot.blocks.schema == SNAPSHOT_BLOCKS_SCHEMA
    active = snapshot.blocks.filter(state="active_allocated")
    blocks = {
        row["address"]: (row["requested_bytes"], snapshot.stacks[row["stack"]])
        for row in active.to_dicts()
    }
    assert blocks == played.alive
    assert (active["bytes"] == (active["requested_bytes"] + 511) // 512 * 512).all()


def test_blocks_fill_their_segments_without_gaps(played: Played) -> None:
    snapshot = parse_snapshot(played.builder.build(), "x")
    assert snapshot.segments.schema == SNAPSHOT_SEGMENTS_SCHEMA
    for number, segment in enumerate(snapshot.segments.to_dicts()):
        blocks = snapshot.blocks.filter(segment=number)
        at = segment["address"]
        for block in blocks.to_dicts():
            assert block["address"] == at
            at += block["bytes"]
        assert at == segment["address"] + segment["bytes"]
    assert snapshot.blocks["segment"].is_sorted()


def test_history_and_blocks_agree(played: Played) -> None:
    entries = parse_snapshot(played.builder.build(), "x").entries
    counts = Counter(entries["action"].to_list())
    assert counts["alloc"] - counts["free_completed"] == len(played.alive)
    allocated = (
        entries.filter(action="alloc")["bytes"].sum()
        - entries.filter(action="free_completed")["bytes"].sum()
    )
    assert allocated == sum(size for size, _ in played.alive.values())


def test_the_file_says_what_the_data_say(played: Played, tmp_path: Path) -> None:
    read = read_snapshot(played.builder.write(tmp_path / "s.pickle"))
    made = parse_snapshot(played.builder.build(), str(tmp_path / "s.pickle"))
    assert read.path == made.path
    assert read.stacks == made.stacks
    for name in ("entries", "segments", "blocks"):
        assert getattr(read, name).equals(getattr(made, name)), name


def test_equal_stacks_are_one_whether_or_not_their_objects_are() -> None:
    def frames() -> list[dict[str, Any]]:
        return [{"filename": file, "line": line, "name": name} for file, line, name in FRAMES[:2]]

    trace = [{"action": "alloc", "addr": n, "size": 1, "frames": frames()} for n in range(3)]
    shared = frames()
    trace += [{"action": "alloc", "addr": n, "size": 1, "frames": shared} for n in range(2)]
    trace.append({"action": "alloc", "addr": 9, "size": 1, "frames": shared[::-1]})
    snapshot = parse_snapshot({"device_traces": [trace]}, "x")
    assert snapshot.entries["stack"].to_list() == [1] * 5 + [2]
    assert snapshot.stacks == ((), tuple(FRAMES[:2]), tuple(FRAMES[1::-1]))


@pytest.mark.parametrize(
    ("frame", "seen"),
    [
        ({"filename": "a.py", "line": 3, "name": "f"}, ("a.py", 3, "f")),
        ({}, ("", 0, "?")),
        ({"filename": None, "line": None, "name": None}, ("", 0, "?")),
        ({"filename": 7, "line": "3", "name": ["f"]}, ("", 0, "?")),
        ({"filename": "a.py", "line": -1, "name": ""}, ("a.py", 0, "?")),
        ({"filename": "a.py", "line": True, "name": "f"}, ("a.py", 0, "f")),
        ({"filename": "x" * 5000, "line": 1, "name": "y" * 5000}, ("x" * 1000, 1, "y" * 1000)),
        ("text", ("", 0, "?")),
    ],
)
def test_a_frame_says_what_it_can(frame: Any, seen: tuple[str, int, str]) -> None:
    trace = [{"action": "alloc", "addr": 1, "size": 1, "frames": [frame]}]
    assert parse_snapshot({"device_traces": [trace]}, "x").stacks == ((), (seen,))


@pytest.mark.parametrize("frames", [None, [], {}, "text", 7])
def test_without_frames_there_is_no_stack(frames: Any) -> None:
    trace = [{"action": "alloc", "addr": 1, "size": 1, "frames": frames}]
    snapshot = parse_snapshot({"device_traces": [trace]}, "x")
    assert (snapshot.entries["stack"].to_list(), snapshot.stacks) == ([0], ((),))


def test_very_deep_stacks_keep_their_innermost_frames() -> None:
    frames = [{"filename": "a.py", "line": line, "name": "f"} for line in range(2000)]
    trace = [{"action": "alloc", "addr": 1, "size": 1, "frames": frames}]
    (_, stack) = parse_snapshot({"device_traces": [trace]}, "x").stacks
    assert [line for _, line, _ in stack] == list(range(512))


@pytest.mark.parametrize("action", SNAPSHOT_ACTIONS)
def test_every_action_is_kept_and_of_running_out_what_was_free(action: str) -> None:
    entry = {
        "action": action,
        "addr": 11,
        "device_free": 22,
        "size": 33,
        "time_us": 44,
        "frames": [],
    }
    snapshot = parse_snapshot({"device_traces": [[], [entry]]}, "x")
    assert snapshot.entries.rows() == [(1, action, 22 if action == "oom" else 11, 33, 44, 0)]


@pytest.mark.parametrize(
    "entry",
    [
        {"action": "alloc", "addr": 1, "size": -1},
        {"action": "alloc", "addr": 1, "size": LARGEST},
        {"action": "alloc", "addr": LARGEST, "size": 1},
        {"action": "alloc", "addr": True, "size": 1},
        {"action": "alloc", "addr": 1, "size": 1.5},
        {"action": "alloc", "addr": 1, "size": 1, "time_us": -1},
        {"action": "alloc", "addr": 1, "size": 1, "time_us": LARGEST // 1000},
        {"action": "alloc", "addr": 1, "size": 1, "time_us": "now"},
        {"action": ["alloc"], "addr": 1, "size": 1},
        {"action": "Alloc", "addr": 1, "size": 1},
        {"addr": 1, "size": 1},
        None,
        [],
    ],
)
def test_an_entry_that_cannot_be_is_left_out_and_counted(entry: Any) -> None:
    good = {"action": "alloc", "addr": 5, "size": 6}
    snapshot = parse_snapshot({"device_traces": [[good, entry, good]]}, "x")
    assert snapshot.entries["address"].to_list() == [5, 5]
    assert snapshot.entries["time_us"].to_list() == [None, None]
    assert [(notice.slug, notice.count) for notice in snapshot.notices] == [
        ("odd-snapshot-entries", 1)
    ]


def test_all_sizes_together_have_to_be_a_size() -> None:
    trace = [{"action": "alloc", "addr": 1, "size": 1 << 60} for _ in range(6)]
    snapshot = parse_snapshot({"device_traces": [trace]}, "x")
    assert snapshot.entries.height == 3  # 4 * 2^60 are 2^62, as much as 64 bits may hold
    assert snapshot.notices[0].count == 3


def test_segments_of_several_devices_and_streams_keep_theirs() -> None:
    segments = [
        {
            "device": device,
            "address": 1000 * device,
            "total_size": 100,
            "stream": stream,
            "blocks": [{"address": 1000 * device, "size": 100, "state": "inactive"}],
        }
        for device, stream in ((0, 0), (3, 7), (1, "x"), (2, -5))
    ]
    snapshot = parse_snapshot({"segments": segments}, "x")
    assert snapshot.segments.rows() == [
        (0, 0, 100, 0),
        (3, 3000, 100, 7),
        (1, 1000, 100, 0),
        (2, 2000, 100, 0),
    ]
    assert snapshot.blocks.select("device", "segment").rows() == [(0, 0), (3, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    "changes",
    [
        {"device": 1 << 31},
        {"device": -1},
        {"device": None},
        {"address": -1},
        {"address": None},
        {"total_size": None},
        {"blocks": None},
        {"blocks": {}},
    ],
)
def test_a_segment_that_cannot_be_is_left_out_with_its_blocks(changes: dict[str, Any]) -> None:
    good = {
        "device": 0,
        "address": 10,
        "total_size": 4,
        "blocks": [{"size": 4, "state": "inactive"}],
    }
    snapshot = parse_snapshot({"segments": [{**good, **changes}, good]}, "x")
    assert snapshot.segments.height == snapshot.blocks.height == 1
    assert snapshot.blocks["segment"].to_list() == [0]
    assert snapshot.notices[0].count == 1


def test_older_blocks_follow_one_another_and_fall_back_to_their_size() -> None:
    blocks = [
        {"size": 100, "state": "active_allocated"},
        {"size": 50, "state": "inactive", "address": "?"},
        {"size": 30, "state": "active_pending_free", "requested_size": "?"},
        {
            "size": 20,
            "state": "active_allocated",
            "history": [{"real_size": 13}, {"real_size": 99}],
        },
        {"size": 10, "state": "active_allocated", "history": []},
    ]
    snapshot = parse_snapshot([{"address": 7000, "total_size": 210, "blocks": blocks}], "x")
    assert snapshot.blocks.select("address", "bytes", "requested_bytes").rows() == [
        (7000, 100, 100),
        (7100, 50, 50),
        (7150, 30, 30),
        (7180, 20, 13),
        (7200, 10, 10),
    ]


def test_objects_that_are_the_same_again_and_again_are_limited_by_the_size_of_the_file() -> None:
    entry = {"action": "alloc", "addr": 1, "size": 1}
    trace = [entry] * 100_001
    assert parse_snapshot({"device_traces": [trace]}, "x", size=16).entries.height == 100_001
    with pytest.raises(InputError) as caught:
        parse_snapshot({"device_traces": [trace]}, "x", size=15)
    assert (caught.value.slug, caught.value.where) == ("pickle-damaged", "x")


def test_replaced_texts_are_said_beside_odd_entries() -> None:
    snapshot = parse_snapshot({"device_traces": [[7, 8]]}, "x", replaced=3)
    assert [(notice.slug, notice.severity) for notice in snapshot.notices] == [
        ("odd-snapshot-entries", "warning"),
        ("replaced-text", "warning"),
    ]
    assert snapshot.notices[1].count == 3


@pytest.mark.parametrize(
    ("frame", "text", "python"),
    [
        (("/u/a.py", 3, "f"), "/u/a.py(3): f", True),
        (("k.pyx", 3, "f"), "k.pyx(3): f", True),
        (("<string>", 1, "<module>"), "<string>(1): <module>", True),
        (("a.cpp", 9, "at::mm"), "a.cpp(9): at::mm", False),
        (("??", 0, "_start"), "_start", False),
        (("", 0, "?"), "?", False),
    ],
)
def test_frames_read_as_they_do_in_traces(frame: Any, text: str, python: bool) -> None:
    assert format_frame(frame) == text
    assert is_python_frame(frame) is python


def test_the_text_of_a_stack_is_its_python_where_it_has_any() -> None:
    native, python = (
        {"filename": "a.cpp", "line": 9, "name": "mm"},
        {"filename": "t.py", "line": 3, "name": "f"},
    )
    stacks = [[], [native], [native, python, native], [python, python]]
    trace = [{"action": "alloc", "addr": 1, "size": 1, "frames": frames} for frames in stacks]
    texts = format_stacks(parse_snapshot({"device_traces": [trace]}, "x"))
    assert texts.to_list() == [None, "a.cpp(9): mm", "t.py(3): f", "t.py(3): f < t.py(3): f"]
    assert texts.dtype == pl.String
