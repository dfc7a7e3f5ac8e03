"""The forest of events on a lane: laws that hold for any spans."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from traceloom.trace.arrays import Nesting, build_nesting

spans = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 20)), max_size=40)


def nested(rows: list[tuple[int, int, int]]) -> tuple[Nesting, np.ndarray, np.ndarray, np.ndarray]:
    rows = sorted(rows, key=lambda row: (row[1], -row[2]))
    lane, start, length = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    return (
        build_nesting(lane, start, start + length, np.ones(len(rows), dtype=bool)),
        lane,
        start,
        start + length,
    )


@given(spans)
def test_every_parent_encloses_its_children_on_one_lane(rows: list[tuple[int, int, int]]) -> None:
    forest, lane, start, _ = nested(rows)
    for row, parent in enumerate(forest.parent):
        if parent < 0:
            assert forest.depth[row] == 0
            continue
        assert parent < row
        assert lane[parent] == lane[row]
        assert start[parent] <= start[row] < forest.nested_end_ns[parent]
        assert forest.nested_end_ns[row] <= forest.nested_end_ns[parent]
        assert forest.depth[row] == forest.depth[parent] + 1


@given(spans)
def test_nothing_that_is_open_is_passed_over(rows: list[tuple[int, int, int]]) -> None:
    forest, lane, start, _ = nested(rows)
    for row, parent in enumerate(forest.parent):
        for between in range(int(parent) + 1, row):
            assert lane[between] != lane[row] or forest.nested_end_ns[between] <= start[row]


@given(spans)
def test_ends_are_only_shortened_and_every_shortening_is_counted(
    rows: list[tuple[int, int, int]],
) -> None:
    forest, _, start, end = nested(rows)
    assert (forest.nested_end_ns <= end).all()
    assert (forest.nested_end_ns >= start).all()
    assert list(forest.clipped) == list(np.flatnonzero(forest.nested_end_ns < end))


@given(st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=30))
def test_spans_that_nest_are_left_as_they_are(tree: list) -> None:
    rows: list[tuple[int, int, int]] = []
    depths: list[int] = []

    def lay(node: list, start: int, depth: int) -> int:
        at = len(rows)
        rows.append((0, start, 0))
        depths.append(depth)
        end = start
        for child in node:
            end = lay(child, end, depth + 1)
        end += 1
        rows[at] = (0, start, end - start)
        return end

    lay(tree, 0, 0)
    forest, *_ = nested(rows)
    assert not forest.clipped.size
    assert list(forest.depth) == depths


def one(*rows: tuple[int, int]) -> Nesting:
    return nested([(0, start, end - start) for start, end in rows])[0]


def test_a_child_that_overruns_by_a_little_is_clipped() -> None:
    forest = one((0, 100), (10, 101))
    assert list(forest.nested_end_ns) == [100, 100]
    assert list(forest.parent) == [-1, 0]


def test_a_frame_that_opens_a_long_annotation_ends_where_that_begins() -> None:
    enter, annotation, op = (0, 10), (8, 1000), (9, 20)
    forest = one(enter, annotation, op)
    assert list(forest.nested_end_ns) == [8, 1000, 20]
    assert list(forest.parent) == [-1, -1, 1]


def test_the_wrappers_of_such_a_frame_are_cut_with_it() -> None:
    forest = one((0, 12), (1, 10), (8, 1000))
    assert list(forest.nested_end_ns) == [8, 8, 1000]
    assert list(forest.parent) == [-1, 0, -1]


def test_equal_spans_stand_in_each_other() -> None:
    forest = one((5, 10), (5, 10))
    assert list(forest.parent) == [-1, 0]
