"""What the model computes of forests, orders, clocks and numbers, against the plainest way to compute it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from traceloom.errors import InvariantError
from traceloom.graph.graph import is_acyclic, sort_topologically
from traceloom.system import units
from traceloom.trace.arrays import (
    NumberedTexts,
    encode_names_by_piece,
    find_innermost_stretch,
    find_nearest_ancestor,
    find_subtree_stops,
    sort_unique,
)
from traceloom.trace.session import ThreadClock, parse_thread_clocks
from traceloom.trace.vocabulary import copy_kind, parse_memory_kinds

QUICK = settings(deadline=None)


# -- forests ---------------------------------------------------------------------------------------------------------


@st.composite
def forests(draw: st.DrawFn) -> list[int]:
    """Parents of rows in pre-order; -1 for a root."""
    return [draw(st.integers(-1, row - 1)) for row in range(draw(st.integers(0, 15)))]


@QUICK
@given(parents=forests(), data=st.data())
def test_the_nearest_wanted_ancestor_is_found(parents: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.booleans(), min_size=len(parents), max_size=len(parents)))

    def above(row: int) -> int:
        parent = parents[row]
        return parent if parent < 0 or wanted[parent] else above(parent)

    found = find_nearest_ancestor(
        np.array(parents, dtype=np.int64), np.array(wanted, dtype=np.bool_)
    )
    assert found.tolist() == [above(row) for row in range(len(parents))]


SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(1, 12)), max_size=14)


@QUICK
@given(rows=SPANS)
def test_a_subtree_stops_where_the_first_row_begins_after_it(
    rows: list[tuple[int, int, int]],
) -> None:
    rows = sorted(rows, key=lambda row: (row[0], row[1], -row[2]))
    lane, start, length = (np.array([row[at] for row in rows], dtype=np.int64) for at in range(3))
    end = start + length
    expected = []
    for row in range(len(rows)):
        later = [
            at for at in range(row + 1, len(rows)) if lane[at] != lane[row] or start[at] >= end[row]
        ]
        expected.append(min(later, default=len(rows)))
    assert find_subtree_stops(lane, start, end).tolist() == expected


@st.composite
def nested_stretches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Stretches ]here, stop[ of positions, in order, each inside the ones that are open where it begins."""
    size = draw(st.integers(1, 12))
    stretches: list[tuple[int, int]] = []
    for here in range(size):
        if draw(st.booleans()):
            around = [stop for begin, stop in stretches if begin < here < stop]
            stretches.append((here, draw(st.integers(here + 1, min(around, default=size)))))
    return size, stretches


@QUICK
@given(made=nested_stretches())
def test_the_innermost_stretch_around_a_position_is_the_last_that_is_open(
    made: tuple[int, list[tuple[int, int]]],
) -> None:
    size, stretches = made
    here, stop = (np.array([one[at] for one in stretches], dtype=np.int64) for at in range(2))
    expected = [
        max((low for low, high in stretches if low < at < high), default=-1) for at in range(size)
    ]
    assert find_innermost_stretch(here, stop, size).tolist() == expected


# -- orders ----------------------------------------------------------------------------------------------------------

EDGES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=16)


@QUICK
@given(edges=EDGES)
def test_points_stand_behind_all_that_they_wait_for_or_there_is_a_circle(
    edges: list[tuple[int, int]],
) -> None:
    nodes = 6
    source, target = (np.array([edge[at] for edge in edges], dtype=np.int64) for at in range(2))
    every = [*edges, *((2 * node, 2 * node + 1) for node in range(nodes))]
    done: set[int] = set()
    while ready := {
        point
        for point in range(2 * nodes)
        if point not in done and all(a in done for a, b in every if b == point)
    }:
        done |= ready
    assert is_acyclic(nodes, source, target) == (len(done) == 2 * nodes)
    if len(done) < 2 * nodes:
        with pytest.raises(InvariantError) as caught:
            sort_topologically(nodes, source, target)
        assert caught.value.slug == "broken-cycle"
        named = int(re.search(r"of node (\d+)", caught.value.message)[1])  # type: ignore[index]
        assert {2 * named, 2 * named + 1} - done
        return
    place = {
        point: at for at, point in enumerate(sort_topologically(nodes, source, target).tolist())
    }
    assert sorted(place) == list(range(2 * nodes))
    assert all(place[a] < place[b] for a, b in every)


# -- columns ---------------------------------------------------------------------------------------------------------


@QUICK
@given(values=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=20))
def test_different_values_are_sorted_and_stand_once(values: list[int]) -> None:
    assert sort_unique(np.array(values, dtype=np.int64)).tolist() == sorted(set(values))


@QUICK
@given(values=st.lists(st.none() | st.text(max_size=3) | st.sampled_from(["a", "b"]), max_size=20))
def test_texts_and_their_numbers_say_the_same(values: list[str | None]) -> None:
    texts = [value for value in values if value is not None]
    different, numbers = encode_names_by_piece(pl.Series(texts, dtype=pl.String))
    assert [different[int(number)] for number in numbers] == texts
    assert different.n_unique() == different.len()
    codes = np.array(
        [-1 if value is None else int(numbers[texts.index(value)]) for value in values],
        dtype=np.int32,
    )
    assert NumberedTexts(different.to_list()).column(codes).to_list() == values


# -- clocks ----------------------------------------------------------------------------------------------------------


@QUICK
@given(
    runs=st.lists(st.booleans(), min_size=2, max_size=30),
    samples=st.sets(st.integers(0, 30), min_size=2, max_size=6),
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=5),
)
def test_how_long_a_thread_ran_lies_between_its_bounds(
    runs: list[bool], samples: set[int], spans: list[tuple[int, int]]
) -> None:
    """Of a thread that runs or sleeps in each nanosecond, sampled now and then."""
    ran = np.concatenate([[0], np.cumsum(runs)])
    times = np.array(sorted({min(at, len(runs)) for at in samples}), dtype=np.int64)
    clock = ThreadClock(times, ran[times])
    low, high = (
        np.array([min(f(span), len(runs)) for span in spans], dtype=np.int64) for f in (min, max)
    )
    least, most = clock.bound_cpu_time(low, high)
    truth = ran[high] - ran[low]
    assert (least <= truth).all()
    assert (truth <= most).all()
    assert (most <= high - low).all()
    assert (least >= 0).all()
    at_samples = np.isin(low, times) & np.isin(high, times)
    assert (least[at_samples] == truth[at_samples]).all()
    assert (most[at_samples] == truth[at_samples]).all()


@pytest.mark.parametrize(
    "table",
    [
        None,
        [],
        {},
        {"thread": [1, 1]},
        {"thread": [1, 1], "time_ns": [0, 1], "cpu_ns": [0]},
        {"thread": [1, 1], "time_ns": [0, 1], "cpu_ns": [0, "1"]},
        {"thread": [1, 1], "time_ns": [0, -1], "cpu_ns": [0, 1]},
        {"thread": [1, 1], "time_ns": [0, 2**62], "cpu_ns": [0, 1]},
        {"thread": [1, 1], "time_ns": [0, 1.5], "cpu_ns": [0, 1]},
        {"thread": [], "time_ns": [], "cpu_ns": []},
        {"thread": [1, 2], "time_ns": [0, 1], "cpu_ns": [0, 1]},
        {"thread": None, "time_ns": [0, 1], "cpu_ns": [0, 1]},
        {"file": "../x"},
        {"file": "nothing.json"},
        {"file": 5},
    ],
)
def test_samples_that_are_none_tell_of_no_thread(table: Any) -> None:
    assert parse_thread_clocks({"thread_cpu": table}, "rank0.json") == {}


def test_samples_stand_in_the_order_of_time_and_never_fall() -> None:
    table = {"thread": [7, 9, 7, 7], "time_ns": [30, 5, 10, 20], "cpu_ns": [9, 1, 5, 4]}
    (only,) = parse_thread_clocks({"thread_cpu": table}, "x").items()
    assert only[0] == "7"
    assert only[1].time_ns.tolist() == [10, 20, 30]
    assert only[1].ran_ns.tolist() == [5, 5, 9]


# -- numbers for people ----------------------------------------------------------------------------------------------

SCALES = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}
BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def read_back(text: str, scales: dict[str, float]) -> float:
    number, unit = text.replace("\u202f", "").split()
    return float(number) * scales[unit]


@QUICK
@given(value=st.integers(-(2**62), 2**62) | st.integers(-2000, 2000))
def test_a_duration_and_a_size_can_be_read_back_within_half_a_per_cent(value: int) -> None:
    for write, scales in ((units.format_duration, SCALES), (units.format_size, BYTES)):
        assert read_back(write(value), scales) == pytest.approx(value, rel=0.00501, abs=1e-9)


@QUICK
@given(values=st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)))
def test_what_is_longer_is_not_shown_as_shorter(values: tuple[int, int]) -> None:
    low, high = sorted(values)
    assert read_back(units.format_duration(low), SCALES) <= read_back(
        units.format_duration(high), SCALES
    )
    assert read_back(units.format_size(low), BYTES) <= read_back(units.format_size(high), BYTES)


@QUICK
@given(part=st.integers(0, 10**6), whole=st.integers(1, 10**6))
def test_a_share_is_shown_within_its_rounding_and_never_as_all_or_nothing(
    part: int, whole: int
) -> None:
    part = min(part, whole)
    text = units.format_share(part, whole)
    assert (text == "0 %") == (part == 0)
    assert (text == "100 %") == (part == whole)
    number = float(re.sub(r"[<> %]", "", text))
    if text.startswith("<"):
        assert 0 < part / whole < 0.001
    elif text.startswith(">"):
        assert 0.999 < part / whole < 1
    else:
        assert abs(number - 100 * part / whole) <= 0.0501


@QUICK
@given(value=st.integers(-(10**15), 10**15))
def test_counts_have_all_their_digits(value: int) -> None:
    assert int(units.format_count(value).replace("\u202f", "")) == value
    assert int(units.format_number(value).replace("\u202f", "")) == value


@pytest.mark.parametrize(
    ("value", "what", "text"),
    [
        (1, "call", "1 call"),
        (0, "call", "0 calls"),
        (2, "copy", "2 copies"),
        (1, "copy", "1 copy"),
        (3, "key", "3 keys"),
        (2, "class", "2 classes"),
        (2, "box", "2 boxes"),
        (2, "switch", "2 switches"),
        (1234, "rank", "1\u202f234 ranks"),
        (2, "mesh", "2 meshes"),
        (2, "query", "2 queries"),
        (2, "day", "2 days"),
    ],
)
def test_words_are_counted_as_people_do(value: int, what: str, text: str) -> None:
    assert units.format_quantity(value, what) == text


@pytest.mark.parametrize("unit", units.NUMERIC_UNITS)
def test_what_is_unknown_is_a_dash_in_every_unit(unit: str) -> None:
    assert (
        units.UNKNOWN_TEXT in units.format_value(None, unit) or units.format_value(None, unit) == ""
    )


# -- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["H", "D", "P"])
@pytest.mark.parametrize("target", ["H", "D", "P"])
@pytest.mark.parametrize(
    "spelling", ["Memcpy {}to{}", "Memcpy {}to{} (Device -> Device)", "memcpy{}2{}", "x {}to{}"]
)
def test_the_way_of_a_copy_is_read_in_every_spelling(
    source: str, target: str, spelling: str
) -> None:
    words = {"H": "Host", "D": "Device", "P": "Peer"}
    text = spelling.format(source, target)
    if not text.startswith("memcpy"):  # there the letter stands inside a word
        assert copy_kind(text) == f"{source}to{target}"
        assert copy_kind("Memcpy", text) == f"{source}to{target}"
    assert copy_kind(f"hipMemcpy{words[source]}To{words[target]}") == f"{source}to{target}"
    assert copy_kind(f"{words[source].upper()}_TO_{words[target].upper()}") == f"{source}to{target}"


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        (("Memcpy HtoD (Pageable -> Device)",), ("pageable", "device")),
        (("Memcpy", "1", "3"), ("pageable", "device")),
        (("Memcpy", "2", None), ("pinned", None)),
        (("Memcpy", "99", "Managed"), (None, "managed")),
        (("Memcpy",), (None, None)),
        (("Memcpy (A -> B)", "1", "2"), ("a", "b")),
        (("Memcpy ->",), (None, None)),
    ],
)
def test_kinds_of_memory_are_those_of_the_name_or_of_the_numbers(
    arguments: Any, kinds: tuple[Any, Any]
) -> None:
    assert parse_memory_kinds(*arguments) == kinds
