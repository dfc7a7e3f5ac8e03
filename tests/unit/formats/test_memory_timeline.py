"""Memory timelines by value: levels added up row by row in plain Python, times in order, limits kept."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from traceloom.errors import InputError
from traceloom.formats.memory_files import (
    ACTIONS,
    CATEGORIES,
    CREATE,
    DESTROY,
    INCREMENT_VERSION,
    PREEXISTING,
    parse_timeline,
    read_timeline,
)

HUGE = 1 << 62


def drawn(seed: int) -> list[list[int]]:
    """Blocks that are created, move to another category and are freed; a few were there before."""
    chance = random.Random(seed)
    rows: list[list[int]] = [
        [-1, PREEXISTING, 512 * chance.randrange(1, 9), chance.randrange(8)] for _ in range(4)
    ]
    alive: list[tuple[int, int]] = []
    now = 1_700_000_000_000_000_000
    for _ in range(60):
        now += chance.randrange(0, 3)  # several at once, too
        if alive and chance.random() < 0.4:
            size, category = alive.pop(chance.randrange(len(alive)))
            if chance.random() < 0.5:
                rows.append([now, DESTROY, -size, category])
            else:
                other = chance.randrange(8)
                rows += [
                    [now, INCREMENT_VERSION, -size, category],
                    [now, INCREMENT_VERSION, size, other],
                ]
                alive.append((size, other))
        else:
            alive.append((512 * chance.randrange(1, 9), chance.randrange(8)))
            rows.append([now, CREATE, *alive[-1]])
    return rows


def played(rows: list[list[int]]) -> list[list[int]]:
    """The level of each category after each row, by time, what was there before first; shape (rows, 8)."""
    level, levels = [0] * 8, []
    for _, _, size, category in sorted(rows, key=lambda row: max(row[0], -1)):
        level[category] += size
        levels.append(list(level))
    return levels


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shuffled", [False, True])
def test_levels_are_those_of_a_plain_loop(seed: int, shuffled: bool) -> None:
    rows = drawn(seed)
    if shuffled:
        random.Random(seed).shuffle(rows)
    timeline = parse_timeline(rows, "t")
    assert timeline.levels.T.tolist() == played(rows)
    assert timeline.created == sum(row[1] == CREATE for row in rows)
    assert timeline.destroyed == sum(row[1] == DESTROY for row in rows)
    assert (timeline.raw, timeline.before, timeline.path) == (True, 4, "t")
    first = min(row[0] for row in rows if row[0] >= 0)
    assert timeline.time_ns.tolist() == [first] * 4 + sorted(row[0] for row in rows if row[0] >= 0)


def test_what_was_never_freed_is_what_is_left() -> None:
    rows = drawn(9)
    timeline = parse_timeline(rows, "t")
    for number, category in enumerate(CATEGORIES):
        assert timeline.levels[number, -1] == sum(row[2] for row in rows if row[3] == number), (
            category
        )
    assert timeline.levels.shape == (8, len(rows))


def test_a_file_of_what_was_there_before_alone_has_time_zero() -> None:
    timeline = parse_timeline([[-1, PREEXISTING, 100, 0], [-1, PREEXISTING, 50, 7]], "t")
    assert timeline.time_ns.tolist() == [0, 0]
    assert timeline.levels[:, -1].tolist() == [100, 0, 0, 0, 0, 0, 0, 50]
    assert (timeline.created, timeline.before) == (0, 2)


def test_an_event_at_time_zero_is_no_event_before() -> None:
    timeline = parse_timeline([[5, CREATE, 1, 0], [0, CREATE, 2, 1], [-7, PREEXISTING, 4, 2]], "t")
    assert timeline.before == 1
    assert timeline.time_ns.tolist() == [0, 0, 5]
    assert timeline.levels.sum(axis=0).tolist() == [4, 6, 7]


def test_actions_are_numbered_as_torch_numbers_them() -> None:
    assert ACTIONS == {1: "preexisting", 2: "create", 3: "increment_version", 4: "destroy"}
    assert (CATEGORIES.index("parameter"), CATEGORIES.index("unknown"), len(CATEGORIES)) == (
        0,
        7,
        8,
    )


@pytest.mark.parametrize("seed", range(3))
def test_levels_are_sorted_by_time_and_lose_their_first_column(seed: int) -> None:
    chance = random.Random(seed)
    times = [chance.randrange(-50, 50) for _ in range(20)]
    sizes = [[0, *(chance.randrange(1000) for _ in range(8))] for _ in times]
    timeline = parse_timeline([times, sizes], "t")
    order = sorted(range(20), key=lambda row: times[row])  # stable
    assert timeline.time_ns.tolist() == [times[row] * 1000 for row in order]
    assert timeline.levels.T.tolist() == [sizes[row][1:] for row in order]
    assert (timeline.raw, timeline.created, timeline.destroyed, timeline.before) == (False, 0, 0, 0)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.raw.json.gz"])
def test_the_file_may_be_plain_or_packed_whatever_its_name(name: str, tmp_path: Path) -> None:
    rows, path = drawn(1), tmp_path / name
    data = json.dumps(rows).encode()
    for content in (data, gzip.compress(data)):
        path.write_bytes(content)
        timeline = read_timeline(path)
        assert timeline.path == str(path)
        assert timeline.levels.T.tolist() == played(rows)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ([[1, CREATE, 1, 8]], "categories are numbered 0 to 7, found 8"),
        ([[1, CREATE, 1, -1]], "categories are numbered 0 to 7"),
        ([[1, 0, 1, 0]], "actions are numbered 1 to 4"),
        ([[1, 5, 1, 0]], "actions are numbered 1 to 4"),
        ([[1, CREATE, HUGE - 1, 0], [2, DESTROY, 1 - HUGE, 0]], "larger than any memory"),
        ([[HUGE, CREATE, 1, 0]], "expected rows"),
        ([["1", CREATE, 1, 0]], "expected rows"),
        ([[1, CREATE, 1, 0], None], "expected rows"),
        ([[1, 2], [[0] * 9]], "other numbers of times and of levels"),
        ([["a"], [[0] * 9]], "other numbers of times and of levels"),
        ([[HUGE // 1000 + 1], [[0] * 9]], "its times are no microseconds"),
        ({}, "it holds no list of rows"),
        ("rows", "it holds no list of rows"),
    ],
)
def test_why_a_file_is_refused(document: Any, why: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_timeline(document, "some/t.json")
    assert caught.value.slug == "not-a-memory-timeline"
    assert why in caught.value.message
    assert caught.value.where == "some/t.json"


def test_packed_files_that_are_cut_or_expand_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.raw.json.gz"
    path.write_bytes(gzip.compress(json.dumps(drawn(2)).encode())[:-20])
    with pytest.raises(InputError) as caught:
        read_timeline(path)
    assert (caught.value.slug, "gzip" in caught.value.message) == ("not-a-memory-timeline", True)
    path.write_bytes(gzip.compress(b" " * (40 << 20), 1))
    with pytest.raises(InputError) as caught:
        read_timeline(path)
    assert caught.value.slug == "gzip-bomb"
    with pytest.raises(InputError) as caught:
        read_timeline(tmp_path / "gone.json")
    assert caught.value.slug == "unreadable"
