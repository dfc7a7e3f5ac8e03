"""The forest of host events: ancestors, sums, tiling."""

from __future__ import annotations

import numpy as np
import pytest

from traceloom.analyze.ancestry import Forest, build_forest
from traceloom.testing import TraceBuilder


def sample() -> tuple[Forest, list[str]]:
    """a[0,100) { b[10,50) { c[20,30) a[35,45) } d[60,60) } on one thread, e[5,15) on another."""
    trace = (
        TraceBuilder()
        .op("a", 0, 100)
        .op("b", 10, 40)
        .op("c", 20, 10)
        .op("a", 35, 10)
        .op("d", 60, 0)
        .op("e", 5, 10, thread=2)
        .build()
    )
    tree = build_forest(trace)
    return tree, trace.events["name"].gather(tree.row).to_list()


def test_events_stand_in_lane_order_with_descendants_behind() -> None:
    tree, names = sample()
    assert names == ["a", "b", "c", "a", "d", "e"]
    assert tree.parent.tolist() == [-1, 0, 1, 1, 0, -1]
    assert tree.stop.tolist() == [5, 4, 3, 4, 5, 6]


def test_nearest_and_outermost_ancestors() -> None:
    tree, names = sample()
    is_a = np.array([name == "a" for name in names])
    assert tree.nearest(is_a).tolist() == [-1, 0, 0, 0, 0, -1]
    assert tree.nearest_or_self(is_a).tolist() == [0, 0, 0, 3, 0, -1]
    assert tree.outermost_or_self(is_a).tolist() == [0, 0, 0, 0, 0, -1]
    assert tree.topmost(is_a).tolist() == [True, False, False, False, False, False]
    is_leaf = np.array([name in "ce" for name in names])
    assert tree.outermost_or_self(is_leaf).tolist() == [-1, -1, 2, -1, -1, 5]


def test_only_the_outer_one_of_a_kind_is_topmost() -> None:
    tree, names = sample()
    kinds = np.array([ord(name) for name in names])
    assert tree.topmost_of_kind(kinds).tolist() == [True, True, True, False, True, True]


def test_sums_over_subtrees_and_self_times() -> None:
    tree, names = sample()
    assert tree.subtree_sums(np.array([1, 10, 100, 1000, 10_000, 5])).tolist() == [
        11_111,
        1110,
        100,
        1000,
        10_000,
        5,
    ]
    every = np.ones(len(names), dtype=np.bool_)
    assert tree.self_ns(every, tree.nearest(every)).tolist() == [
        60_000,
        20_000,
        10_000,
        10_000,
        0,
        10_000,
    ]


def test_segments_tile_every_lane_also_an_empty_one() -> None:
    tree, names = sample()
    segments = tree.segments(np.array([0, 1, 2]), 0, 120_000)
    parts = sorted(
        zip(
            segments.lane.tolist(),
            segments.start_ns.tolist(),
            segments.end_ns.tolist(),
            segments.owner.tolist(),
            strict=True,
        )
    )
    first = [
        (low // 1000, high // 1000, names[owner] if owner >= 0 else "-")
        for lane, low, high, owner in parts
        if lane == 0
    ]
    assert first == [
        (0, 10, "a"),
        (10, 20, "b"),
        (20, 30, "c"),
        (30, 35, "b"),
        (35, 45, "a"),
        (45, 50, "b"),
        (50, 60, "a"),
        (60, 100, "a"),
        (100, 120, "-"),
    ]
    assert [part for part in parts if part[0] == 2] == [(2, 0, 120_000, -1)]


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_nearest_ancestor_is_the_first_wanted_one_on_the_way_up_however_many_are_wanted(
    seed: int, share: float
) -> None:
    random = np.random.default_rng(seed)
    builder = TraceBuilder()
    for start, length, thread in random.integers((0, 0, 1), (60, 40, 3), size=(300, 3)).tolist():
        builder.op(
            "a", start, length * (start % 7 > 0), thread=thread
        )  # many begin together, some take no time
    tree = build_forest(builder.build())
    wanted = random.random(tree.row.size) < share
    expected = []
    for at in range(tree.row.size):
        up = int(tree.parent[at])
        while up >= 0 and not wanted[up]:
            up = int(tree.parent[up])
        expected.append(up)
    assert tree.nearest(wanted).tolist() == expected
