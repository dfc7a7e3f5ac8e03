"""What the model works out by array, against plain loops over made values."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from support.small_graph import small_graph
from traceloom.trace.arrays import (
    build_event_column,
    extract_column,
    find_longest_increasing_subsequence,
    to_nullable_series,
)
from traceloom.trace.frames import Result, contains, contains_any
from traceloom.trace.notice import Notice, sort_by_severity
from traceloom.trace.session import ThreadClock, parse_thread_clocks
from traceloom.trace.vocabulary import copy_kind, parse_memory_kinds

SEEDS = range(12)


def rising(values: list[int]) -> int:
    """The length of a longest strictly ascending subsequence, by trying every end."""
    best: list[int] = []
    for at, value in enumerate(values):
        best.append(
            1 + max((best[before] for before in range(at) if values[before] < value), default=0)
        )
    return max(best, default=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_longest_rise_is_as_long_as_any_and_rises(seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.randrange(12) for _ in range(chance.randrange(30))]
    places = find_longest_increasing_subsequence(np.array(values, dtype=np.int64)).tolist()
    assert len(places) == rising(values)
    assert places == sorted(set(places))
    assert [values[at] for at in places] == sorted({values[at] for at in places})


@pytest.mark.parametrize("seed", SEEDS)
def test_columns_with_nulls_are_arrays_and_back(seed: int) -> None:
    chance = random.Random(seed)
    share = (0.0, 0.3, 1.0)[seed % 3]
    values = [None if chance.random() < share else chance.randrange(1000) for _ in range(seed * 3)]
    column = build_event_column(
        np.array([-1 if value is None else value for value in values], dtype=np.int64)
    )
    assert (column.dtype, column.to_list()) == (pl.UInt32(), values)
    again = extract_column(pl.DataFrame({"launch": column}), "launch", absent=-1, large=False)
    assert (again.dtype, again.tolist()) == (
        np.int64,
        [-1 if value is None else value for value in values],
    )


@pytest.mark.parametrize("dtype", [pl.Int8(), pl.UInt32(), pl.Float64(), pl.Int64()], ids=str)
def test_a_column_of_nothing_but_nulls_has_its_type(dtype: pl.DataType) -> None:
    for length in (0, 1, 5):
        column = to_nullable_series(np.full(length, -7), dtype, absent=-7)
        assert (column.dtype, column.to_list()) == (dtype, [None] * length)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_numbers_of_nodes_are_those_of_their_columns(ranks: int) -> None:
    graph = small_graph(ranks)
    rows, edges = graph.nodes.to_dicts(), graph.edges.to_dicts()
    names = [*graph.names.to_list(), None]
    assert sorted(names[:-1]) == sorted({row["name"] for row in rows if row["name"] is not None})
    assert [names[number] for number in graph.name_numbers.tolist()] == [
        row["name"] for row in rows
    ]
    assert graph.node_ranks.tolist() == [-1 if row["rank"] is None else row["rank"] for row in rows]
    source, target = graph.points()
    assert source.tolist() == [2 * edge["source"] + edge["from_end"] for edge in edges]
    assert target.tolist() == [2 * edge["target"] + edge["to_end"] for edge in edges]
    ends = [(row["start_ns"], row["start_ns"] + row["duration_ns"]) for row in rows]
    assert graph.point_times().tolist() == [time for pair in ends for time in pair]


def test_nobody_changes_what_a_graph_keeps() -> None:
    graph = small_graph()
    for array in (*graph.points(), graph.point_times()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_names_are_matched_whichever_were_before() -> None:
    """What is remembered of other names, in whatever order they come, is never taken for these."""
    lists = [["aten::mm", "MEMCPY DtoH"], ["aten::mm", "Memset"], ["MEMCPY DtoH", "aten::mm"], []]
    patterns = ["(?i)memcpy", "^aten::", "(?i)set$"]
    chance = random.Random(3)
    for _ in range(40):
        names = chance.choice(lists)
        series = pl.Series(names, dtype=pl.String)
        expected = [[bool(re.search(pattern, name)) for name in names] for pattern in patterns]
        assert [column.to_list() for column in contains_any(series, patterns)] == expected
        assert contains(series, patterns[0]).to_list() == expected[0]


@pytest.mark.parametrize(
    ("name", "argument", "kind"),
    [
        ("Memcpy HtoD (Pageable -> Device)", None, "HtoD"),
        ("Memcpy DtoH (Device -> Pinned)", None, "DtoH"),
        ("CopyHostToDevice", None, "HtoD"),
        ("copy device_to_host", None, "DtoH"),
        ("zeMemory D2M", None, "DtoH"),
        ("Memcpy PtoP", None, "PtoP"),
        ("hipMemcpy", "DeviceToDevice", "DtoD"),
        ("Memcpy", "1", "HtoD"),
        ("Memcpy", "2", "DtoH"),
        ("Memcpy", "9", "HtoH"),
        ("Memcpy", "10", "PtoP"),
        ("Memcpy HtoD", "7", "HtoD"),  # a number that means nothing leaves it to the name
        ("Memset (Device)", None, "fill"),
        ("FillBuffer", None, "fill"),
        ("__amd_rocclr_copyBuffer.kd", None, "DtoD"),
        ("memcpy_wodtod", None, "unknown"),
        ("", "", "unknown"),
    ],
)
def test_which_way_a_copy_goes(name: str, argument: str | None, kind: str) -> None:
    assert copy_kind(name, argument) == kind


@pytest.mark.parametrize(
    ("name", "source", "target", "kinds"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "1", "3", ("pinned", "device")),  # the name comes first
        ("Memcpy", "1", "3", ("pageable", "device")),
        ("Memcpy", "Pageable", "Managed", ("pageable", "managed")),
        ("Memcpy", "77", None, (None, None)),
        ("Memcpy", None, "5", (None, "managed")),
    ],
)
def test_between_which_memories_a_copy_goes(
    name: str, source: str | None, target: str | None, kinds: tuple[str | None, str | None]
) -> None:
    assert parse_memory_kinds(name, source, target) == kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_how_long_a_thread_ran_lies_between_what_its_samples_tell(seed: int) -> None:
    """A thread that runs or does not, nanosecond by nanosecond, and is looked at now and then."""
    chance = random.Random(seed)
    length = 120
    ran = [0]
    while len(ran) <= length:
        running, stretch = chance.random() < 0.5, chance.randrange(1, 15)
        ran += [ran[-1] + running * (at + 1) for at in range(stretch)]
    looks = sorted(chance.sample(range(length), chance.randrange(2, 12)))
    clock = ThreadClock(np.array(looks), np.array([ran[look] for look in looks]))
    spans = [sorted((chance.randrange(length), chance.randrange(length))) for _ in range(30)]
    low, high = (np.array(ends) for ends in zip(*spans, strict=True))
    least, most = (found.tolist() for found in clock.bound_cpu_time(low, high))
    for (begin, end), at_least, at_most in zip(spans, least, most, strict=True):
        assert 0 <= at_least <= ran[end] - ran[begin] <= at_most <= end - begin
        inside = [look for look in looks if begin <= look <= end]
        if inside:  # no less is known than the samples say
            assert at_least >= ran[inside[-1]] - ran[inside[0]]
        before = [look for look in looks if look <= begin]
        behind = [look for look in looks if look >= end]
        if before and behind:
            assert at_most <= ran[behind[0]] - ran[before[-1]]


GOOD = {"thread": [7, 8, 7, 7], "time_ns": [30, 5, 10, 20], "cpu_ns": [9, 1, 2, 4]}


def test_samples_of_threads_are_in_order_and_of_two_at_least() -> None:
    samples = parse_thread_clocks({"thread_cpu": GOOD}, "rank0.json")
    assert list(samples) == ["7"]
    assert (samples["7"].time_ns.tolist(), samples["7"].ran_ns.tolist()) == (
        [10, 20, 30],
        [2, 4, 9],
    )


@pytest.mark.parametrize(
    "table",
    [
        GOOD | {"cpu_ns": [1, 2]},
        GOOD | {"cpu_ns": None},
        GOOD | {"time_ns": [30, 5, 10, -1]},
        GOOD | {"cpu_ns": [1, 2, 3, 1 << 62]},
        GOOD | {"thread": ["7", "8", "7", "7"]},
        {"thread": [7, 7]},
        {},
    ],
    ids=["shorter", "none", "negative", "huge", "texts", "lacking", "empty"],
)
def test_samples_that_cannot_be_are_none(table: dict[str, object]) -> None:
    assert parse_thread_clocks({"thread_cpu": table}, "rank0.json") == {}


def test_the_worst_notices_come_first_and_equals_stay() -> None:
    notices = (
        Notice("a", "info", "m", 9),
        Notice("b", "warning", "m", 1),
        Notice("c", "error", "m", 1),
        Notice("d", "warning", "m", 5),
        Notice("e", "error", "m", 1, rank=3),
    )
    assert "".join(notice.slug for notice in sort_by_severity(notices)) == "cedba"
    assert notices[0].of_rank(4).to_dict() | {"message": ""} == {
        "slug": "a",
        "severity": "info",
        "count": 9,
        "message": "",
        "rank": 4,
        "where": "",
    }


@dataclass(frozen=True)
class InnerResult(Result):
    """A part of another."""

    rates: tuple[float, ...]


@dataclass(frozen=True)
class OuterResult(Result):
    """One of each sort of value."""

    title: str
    rows: pl.DataFrame
    array: np.ndarray
    number: np.int64
    inner: InnerResult
    named: dict[int, list[InnerResult]]


def test_a_result_is_plain_data_and_harmless_in_a_notebook() -> None:
    inner = InnerResult((0.5, 2.0))
    rows = pl.DataFrame({"name": ["<b>"], "ns": [None]}, schema={"name": pl.String, "ns": pl.Int64})
    result = OuterResult("<script>", rows, np.array([[1], [2]]), np.int64(3), inner, {4: [inner]})
    plain = result.to_dict()
    assert plain == {
        "title": "<script>",
        "rows": [{"name": "<b>", "ns": None}],
        "array": [[1], [2]],
        "number": 3,
        "inner": {"rates": [0.5, 2.0]},
        "named": {"4": [{"rates": [0.5, 2.0]}]},
    }
    assert type(plain["number"]) is int
    shown = result._repr_html_()
    assert "<script>" not in shown
    assert "<b>title</b> &lt;script&gt;" in shown
    assert "&lt;b&gt;" in shown
