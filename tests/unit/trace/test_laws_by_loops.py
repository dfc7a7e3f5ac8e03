"""The laws of traces and graphs, each looked at row by row, against what `check` says of the same rows, changed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from support.odd_traces import SEEDS, odd_trace
from support.small_graph import small_graph
from traceloom.errors import InvariantError
from traceloom.graph.graph import Graph
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

CHANGES = 40  # of each trace and graph


def slug_of(checked: Trace | Graph) -> str | None:
    """Which law `check` says is broken; None for none."""
    try:
        checked.check()
    except InvariantError as error:
        return error.slug
    return None


def broken_laws_of_trace(trace: Trace) -> set[str]:
    """All laws that are broken, by looking at every event alone."""
    rows, laws = trace.events.to_dicts(), set()
    busy = dict.fromkeys(range(trace.lanes.height), 0)
    for at, row in enumerate(rows):
        if row["event"] != at:
            laws.add("broken-ids")
        if at and row["start_ns"] < rows[at - 1]["start_ns"]:
            laws.add("broken-order")
        long = row["nested_end_ns"] - row["start_ns"]
        inside = sum(
            each["nested_end_ns"] - each["start_ns"] for each in rows if each["parent"] == at
        )
        busy[row["lane"]] += long - inside
        if long < 0:
            laws.add("broken-nesting")
        if long < inside:
            laws.add("broken-self-time")
        around = None if row["parent"] is None else rows[row["parent"]]
        if row["depth"] != (0 if around is None else around["depth"] + 1):
            laws.add("broken-nesting")
        if around is not None and not (
            around["start_ns"] <= row["start_ns"]
            and row["nested_end_ns"] <= around["nested_end_ns"]
            and row["lane"] == around["lane"]
        ):
            laws.add("broken-nesting")
        for column, kinds in (("op", ("op",)), ("launch", ("runtime", "driver"))):
            if row[column] is not None and rows[row[column]]["category"] not in kinds:
                laws.add("broken-references")
    host = (
        trace.lanes.filter(pl.col("kind").is_in(["host", "other"]))
        .select("lane", "busy_ns")
        .iter_rows()
    )
    if any(busy[lane] != total for lane, total in host):
        laws.add("broken-self-time")
    return laws


def changed(frame: pl.DataFrame, chance: random.Random, columns: dict[str, Any]) -> pl.DataFrame:
    """The frame with one value of one column replaced by what the column's function makes of it."""
    rows = frame.to_dicts()
    column = chance.choice(list(columns))
    row = chance.choice(rows)
    row[column] = columns[column](row[column], chance, len(rows))
    return pl.DataFrame(rows, schema=frame.schema)


def moved(value: int, chance: random.Random, _: int) -> int:
    return value + chance.choice([-70_000, -900, -1, 1, 900, 70_000])


def another_row(_: int | None, chance: random.Random, rows: int) -> int:
    return chance.randrange(rows)


EVENT_CHANGES: dict[str, Any] = {
    "event": another_row,
    "start_ns": moved,
    "nested_end_ns": moved,
    "parent": another_row,
    "op": another_row,
    "launch": another_row,
    "depth": lambda value, chance, _: max(value + chance.choice([-1, 0, 1]), 0),
    "lane": lambda value, chance, _: max(value + chance.choice([-1, 0]), 0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS[:4])
def test_a_trace_is_wrong_exactly_where_a_row_breaks_a_law(seed: int) -> None:
    whole, chance, broken = odd_trace(seed), random.Random(seed), set()
    # a part that holds all of some threads' first events keeps the loops short
    events = whole.events.head(90)
    inside = {
        name: frame.clear()
        for name, frame in whole.frames().items()
        if name not in ("events", "lanes")
    }
    events = events.with_columns(
        pl.when(pl.col(name) < events.height).then(pl.col(name)).alias(name)
        for name in ("parent", "op", "launch")
    )
    busy = dict.fromkeys(range(whole.lanes.height), 0)
    for row in events.filter(pl.col("parent").is_null()).to_dicts():
        busy[row["lane"]] += row["nested_end_ns"] - row["start_ns"]
    lanes = whole.lanes.with_columns(pl.Series("busy_ns", list(busy.values()), dtype=pl.Int64))
    part = replace(whole, events=events, lanes=lanes, **inside)
    assert broken_laws_of_trace(part) == set()
    assert slug_of(part) is None
    for _ in range(CHANGES):
        other = replace(part, events=changed(events, chance, EVENT_CHANGES))
        expected, slug = broken_laws_of_trace(other), slug_of(other)
        assert (slug is None) == (not expected)
        assert slug is None or slug in expected
        broken.add(slug)
    assert len(broken) > 3, "the changes break several laws, and some of them none"


def broken_laws_of_graph(graph: Graph) -> set[str]:
    """All laws that are broken, by looking at every node and edge alone, and by walking along the edges."""
    nodes, edges, laws = graph.nodes.to_dicts(), graph.edges.to_dicts(), set()
    for at, row in enumerate(nodes):
        if row["node"] != at:
            laws.add("broken-ids")
        work, residual = row["work_ns"], row["residual_ns"]
        if min(row["duration_ns"], work, residual) < 0 or work + residual > row["duration_ns"]:
            laws.add("broken-times")
        if row["lane"] is not None and row["lane"] >= graph.lanes.height:
            laws.add("broken-references")
    if any(max(edge["source"], edge["target"]) >= len(nodes) for edge in edges):
        return laws | {"broken-references"}
    follow: dict[tuple[int, bool], list[tuple[int, bool]]] = {
        (at, False): [(at, True)] for at in range(len(nodes))
    }
    for edge in edges:
        source, target = nodes[edge["source"]], nodes[edge["target"]]
        reached = source["start_ns"] + edge["from_end"] * source["duration_ns"]
        held = target["start_ns"] + edge["to_end"] * target["duration_ns"]
        if held < reached + edge["delay_ns"] + edge["residual_ns"]:
            laws.add("broken-times")
        follow.setdefault((edge["source"], edge["from_end"]), []).append(
            (edge["target"], edge["to_end"])
        )
    for point in list(follow):
        ahead, seen = list(follow[point]), set()
        while ahead:
            reached_point = ahead.pop()
            if reached_point not in seen:
                seen.add(reached_point)
                ahead += follow.get(reached_point, [])
        if point in seen:
            laws.add("broken-cycle")
    return laws


NODE_CHANGES: dict[str, Any] = {
    "node": another_row,
    "start_ns": lambda value, chance, _: max(value + chance.choice([-90, -1, 1, 90]), 0),
    "duration_ns": lambda value, chance, _: value + chance.choice([-500, -1, 1, 500]),
    "work_ns": lambda value, chance, _: value + chance.choice([-500, -1, 1]),
    "residual_ns": lambda value, chance, _: value + chance.choice([-1, 1]),
    "lane": lambda _value, chance, _rows: chance.randrange(12),
}
EDGE_CHANGES: dict[str, Any] = {
    "source": lambda _, chance, rows: chance.randrange(rows + 3),
    "target": lambda _, chance, rows: chance.randrange(rows + 3),
    "from_end": lambda value, *_: not value,
    "to_end": lambda value, *_: not value,
    "delay_ns": lambda value, chance, _: value + chance.choice([-500, -1, 1, 500]),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_graph_is_wrong_exactly_where_a_node_or_edge_breaks_a_law(ranks: int) -> None:
    graph, chance, broken = small_graph(ranks), random.Random(ranks), set()
    assert broken_laws_of_graph(graph) == set()
    for number in range(3 * CHANGES):
        if number % 3:
            # with room in every delay, so that edges may lead anywhere and circles may close
            edges = (
                graph.edges.with_columns(pl.lit(-5_000, pl.Int64).alias("delay_ns"))
                if number % 3 == 2
                else None
            )
            other = replace(
                graph, edges=changed(graph.edges if edges is None else edges, chance, EDGE_CHANGES)
            )
        else:
            other = replace(graph, nodes=changed(graph.nodes, chance, NODE_CHANGES))
        expected, slug = broken_laws_of_graph(other), slug_of(other)
        assert (slug is None) == (not expected), (expected, slug)
        assert slug is None or slug in expected
        broken.add(slug)
    assert broken >= {None, "broken-ids", "broken-times", "broken-references", "broken-cycle"}


@pytest.mark.parametrize(
    "frame", ["nodes", "edges", "lanes", "communication", "transfers", "host_ops", "coverage"]
)
def test_a_graph_has_the_columns_that_are_declared(frame: str) -> None:
    graph = small_graph()
    columns = graph.frames()[frame]
    for other in (columns.drop(columns.columns[-1]), columns.select(reversed(columns.columns))):
        assert slug_of(replace(graph, **{frame: other})) == "broken-columns"


def test_frames_beside_the_traces_of_a_session_are_checked_too() -> None:
    session = Session((odd_trace(0),), "run")
    session.check()
    backwards = (
        pl.DataFrame({"rank": [0], "period_ns": [-1]}).cast(pl.Int64).cast({"rank": pl.Int32})
    )
    samples = pl.concat([session.samples, backwards], how="diagonal_relaxed").cast(
        session.samples.schema
    )
    for wrong, slug in (
        (samples, "broken-order"),
        (session.samples.drop("stack"), "broken-columns"),
    ):
        with pytest.raises(InvariantError) as caught:
            replace(session, samples=wrong).check()
        assert caught.value.slug == slug


def test_sessions_find_their_times_and_how_much_recording_cost() -> None:
    traces = [odd_trace(seed, shift_us=1_000_000 + 50 * seed) for seed in range(3)]
    starts = [min(row["start_ns"] for row in trace.events.to_dicts()) for trace in traces]
    ends = [
        max(row["start_ns"] + max(row["duration_ns"], 0) for row in trace.events.to_dicts())
        for trace in traces
    ]
    session = Session(tuple(traces), "run")
    assert session.epoch_ns == min(starts)
    assert [trace.end_ns for trace in traces] == ends
    assert session.event_count == sum(len(trace.events.to_dicts()) for trace in traces)
    assert session.recording_overhead_ratio is None
    parts = [{"overhead": {"ratio": 1.25}}, {"overhead": {"ratio": 1.5}}, {"overhead": None}]
    measured = [
        replace(trace, meta=replace(trace.meta, capture=part))
        for trace, part in zip(traces, parts, strict=True)
    ]
    assert replace(session, traces=tuple(measured)).recording_overhead_ratio == 1.5


def test_a_session_tells_what_only_its_traces_have() -> None:
    session = Session((odd_trace(1),), "<run>")
    with pytest.raises(
        AttributeError,
        match=r"a Session has no `events`; its traces have: session\.traces\[0\]\.event",
    ):
        _ = session.events
    with pytest.raises(AttributeError, match=r"a Session has no `colour`$"):
        _ = session.colour
    with pytest.raises(AttributeError, match="a trace has no `colour`"):
        _ = session.traces[0].colour
    many = replace(session, traces=session.traces * 23)
    page = many._repr_html_()
    assert page.count("<tr>") == 21
    assert "… and 3 more" in page
    assert "&lt;run&gt;" in page
    assert "<run>" not in page
    assert repr(session).startswith("<Session <run>: 1 traces, ")
