"""What the graph of a rank owes to its trace and nothing else, and what the graph of a job owes to its ranks."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import polars as pl
import pytest

from support.odd_traces import Row, gpu_rows_of, odd_builder, odd_trace
from traceloom.errors import InvariantError
from traceloom.graph.communication import MatchedParts, match_parts
from traceloom.graph.graph import Graph
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank

SEEDS = (0, 1, 2, 3, 6)


@cache
def graph_of(seed: int) -> Graph:
    return link_rank(odd_trace(seed))


def differing(first: Graph, other: Graph) -> list[str]:
    """The frames that are not the same, but for the name of the file."""
    first, other = (
        replace(graph, ranks=graph.ranks.drop("device_trace")) for graph in (first, other)
    )
    return [
        name for name, frame in first.frames().items() if not frame.equals(other.frames()[name])
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_graph_begins_when_its_trace_does_and_is_the_same_later(seed: int) -> None:
    first, other = graph_of(seed), link_rank(odd_trace(seed, shift_us=7.0e9))
    assert differing(first, other) == []
    assert other.epoch_ns - first.epoch_ns == 7 * 10**12
    assert first.nodes["start_ns"].min() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_entries_and_the_numbers_that_join_them_change_no_graph(seed: int) -> None:
    assert differing(graph_of(seed), link_rank(odd_builder(seed).shuffled(seed).build())) == []
    first, other = graph_of(seed), link_rank(odd_builder(seed).renumbered(seed).build())
    numbers = [graph.nodes["correlation"] for graph in (first, other)]
    first, other = (
        replace(graph, nodes=graph.nodes.drop("correlation")) for graph in (first, other)
    )
    assert differing(first, other) == []
    pairs = set(zip(*(column.to_list() for column in numbers), strict=True))
    assert len(pairs) == len({before for before, _ in pairs}) == len({after for _, after in pairs})


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clock_of_twice_the_speed_doubles_all_device_work_and_moves_no_launch(seed: int) -> None:
    """Whether threads and calls waited depends on lengths of time; what was submitted by whom does not."""
    first, other = graph_of(seed), link_rank(odd_trace(seed, scale=2))
    work = [
        graph.nodes.filter(pl.col("kind").is_in(["kernel", "copy", "fill"])).sort("event")
        for graph in (first, other)
    ]
    for column in ("start_ns", "duration_ns", "work_ns"):
        assert (work[0][column] * 2).equals(work[1][column]), column
    launches = [
        {
            (graph.nodes["event"][edge["source"]], graph.nodes["event"][edge["target"]])
            for edge in graph.edges.filter(pl.col("kind") == "launch").to_dicts()
        }
        for graph in (first, other)
    ]
    assert launches[0] == launches[1]


@pytest.mark.parametrize("seed", [*SEEDS, 7])
def test_every_piece_of_device_work_is_one_node_with_its_times_and_its_call(seed: int) -> None:
    trace, graph = odd_trace(seed), graph_of(seed)
    device_lanes = set(graph.lanes.filter(pl.col("kind") == "device")["lane"])
    nodes = {row["event"]: row for row in graph.nodes.to_dicts() if row["lane"] in device_lanes}
    works = gpu_rows_of(trace)
    assert nodes.keys() == {row["event"] for row in works}
    rows = trace.events.to_dicts()
    submitted: dict[int, set[int | None]] = defaultdict(set)
    for edge in graph.edges.filter(pl.col("kind") == "launch").to_dicts():
        source, target = (graph.nodes.row(edge[end], named=True) for end in ("source", "target"))
        submitted[target["event"]].add(source["event"])
    without_call = 0
    for row in works:
        node = nodes[row["event"]]
        assert node["start_ns"] == row["start_ns"] - trace.start_ns
        assert node["duration_ns"] == node["work_ns"] == row["ns"]
        lane = graph.lanes.row(node["lane"], named=True)
        assert (lane["device"], lane["stream"]) == (row["device"], row["stream"])
        assert graph.nodes["name"][node["node"]] == row["name"]
        # a call that began long after its work is not believed to have submitted it
        launch = (
            row["launch"]
            if row["launch"] is None or rows[row["launch"]]["start_ns"] <= row["start_ns"] + 10**6
            else None
        )
        assert submitted[row["event"]] == ({launch} - {None})
        without_call += launch is None
    outcomes = {
        row["outcome"]: row["count"]
        for row in graph.coverage.filter(pl.col("subject") == "gpu-work").to_dicts()
    }
    assert sum(outcomes.values()) == len(works)
    assert (
        sum(count for outcome, count in outcomes.items() if outcome.startswith("orphan"))
        == without_call
    )


# -- jobs -------------------------------------------------------------------------------------------------------------


@cache
def part(seed: int, rank: int, later_us: float) -> Graph:
    return link_rank(odd_builder(seed, rank=rank, shift_us=later_us).build())


PARTS = ((0, 4, 0.0), (2, 1, 250.5), (6, 0, 3.25))  # seed, rank, when it begins


def of_rank(job: Graph, rank: int) -> tuple[list[Row], list[Row]]:
    """Nodes and edges of one rank in a job, numbered from 0; what joins it to others is left out."""
    own = job.nodes.filter(
        (pl.col("rank") == rank) & ~pl.col("kind").is_in(["rendezvous", "arrival"])
    ).to_dicts()
    number = {row["node"]: at for at, row in enumerate(own)}
    lanes = {
        lane: at
        for at, lane in enumerate(sorted({row["lane"] for row in own if row["lane"] is not None}))
    }
    nodes = [row | {"node": number[row["node"]], "lane": lanes.get(row["lane"])} for row in own]
    edges = [
        edge | {"source": number[edge["source"]], "target": number[edge["target"]]}
        for edge in job.edges.to_dicts()
        if edge["source"] in number and edge["target"] in number and edge["kind"] != "rendezvous"
    ]
    return nodes, edges


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (2, 1, 0), (1, 0)], ids=lambda order: "".join(map(str, order))
)
def test_a_job_holds_each_of_its_ranks_as_it_is_alone(order: tuple[int, ...]) -> None:
    parts = [part(*PARTS[at]) for at in order]
    job = join_ranks(parts)
    job.check()
    assert job.epoch_ns == min(each.epoch_ns for each in parts)
    assert job.ranks["rank"].to_list() == [PARTS[at][1] for at in order]
    assert job.lanes.height == sum(each.lanes.height for each in parts)
    for each in parts:
        rank = each.ranks["rank"][0]
        nodes, edges = of_rank(job, rank)
        alone_nodes, alone_edges = of_rank(each, rank)
        late = each.epoch_ns - job.epoch_ns
        for row in alone_nodes:
            row["start_ns"] += late
        assert nodes == alone_nodes
        key = ["source", "target", "kind", "from_end", "to_end"]
        assert sorted(edges, key=lambda edge: [edge[name] for name in key]) == sorted(
            alone_edges, key=lambda edge: [edge[name] for name in key]
        )
    for name in ("communication", "transfers"):
        frame = getattr(job, name)
        names = job.nodes["name"][frame["node"]].to_list()
        assert Counter(names) == Counter(
            each_name
            for each in parts
            for each_name in each.nodes["name"][getattr(each, name)["node"]].to_list()
        )


def test_ranks_that_do_not_say_which_they_are_take_the_free_numbers_in_their_order() -> None:
    unsaid = [
        replace(graph, ranks=graph.ranks.with_columns(rank=pl.lit(None, pl.Int32)))
        for graph in (part(*PARTS[0]), part(*PARTS[2]))
    ]
    job = join_ranks([unsaid[0], part(*PARTS[1]), unsaid[1]])
    job.check()
    assert job.ranks["rank"].to_list() == [0, 1, 2]
    assert [notice.rank for notice in job.notices if notice.slug == "rank-assumed"] == [0, 2]
    assert job.nodes["rank"].drop_nulls().unique().sort().to_list() == [0, 1, 2]


# -- which parts belong together ---------------------------------------------------------------------------------------

COLUMNS: Any = {
    "part": pl.Int32,
    "rank": pl.Int32,
    "kind": pl.String,
    "group": pl.String,
    "group_size": pl.Int32,
    "ranks": pl.List(pl.Int32),
    "sequence": pl.Int64,
    "in_bytes": pl.Int64,
    "in_splits": pl.List(pl.Int64),
    "peer": pl.Int32,
    "tag": pl.Int64,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
}


def calls(rows: list[Row]) -> pl.DataFrame:
    defaults = dict.fromkeys(COLUMNS) | {
        "kind": "all_reduce",
        "group": "dp",
        "group_size": 4,
        "in_bytes": 64,
    }
    return pl.DataFrame([defaults | row for row in rows], schema=COLUMNS)


def random_calls(seed: int) -> list[Row]:
    """Numbered collectives of two groups on four ranks; some ranks lack some, some numbers are shared by two calls."""
    chance = random.Random(seed)
    rows = []
    for group, members in (("dp", [0, 1, 2, 3]), ("tp", [1, 2])):
        for sequence in range(12):
            kind, size = (
                chance.choice(["all_reduce", "all_gather", "broadcast"]),
                chance.choice([8, 64]),
            )
            several = chance.choice([1, 1, 2])
            for rank in members:
                if chance.random() < 0.15:
                    continue
                odd = chance.random() < 0.08
                for nth in range(several):
                    at = 1000 * sequence + 100 * nth + chance.randrange(50)
                    rows.append(
                        {
                            "part": rank,
                            "rank": rank,
                            "group": group,
                            "group_size": len(members),
                            "ranks": members,
                            "sequence": sequence,
                            "in_bytes": size,
                            "start_ns": at,
                            "end_ns": at + 10,
                            "kind": "reduce_scatter" if odd else kind,
                        }
                    )
    return rows


def partners(joined: MatchedParts) -> set[frozenset[int]]:
    """The rows that are joined with each other."""
    together: dict[int, set[int]] = defaultdict(set)
    for row, instance in enumerate(joined.instance.tolist()):
        if instance >= 0:
            together[instance].add(row)
    return {frozenset(rows) for rows in together.values()}


@pytest.mark.parametrize("seed", range(6))
def test_numbered_calls_meet_those_of_their_number_and_turn_where_all_are_of_one_kind(
    seed: int,
) -> None:
    rows = random_calls(seed)
    by_key: dict[Any, list[int]] = defaultdict(list)
    turns: Counter[Any] = Counter()
    for row in sorted(range(len(rows)), key=lambda at: rows[at]["start_ns"]):
        number = (rows[row]["group"], rows[row]["sequence"])
        by_key[(*number, turns[(*number, rows[row]["rank"])])].append(row)
        turns[(*number, rows[row]["rank"])] += 1
    kinds = {key: {rows[row]["kind"] for row in members} for key, members in by_key.items()}
    expected = {
        frozenset(members)
        for key, members in by_key.items()
        if len(kinds[key]) == 1 and len(members) > 1
    }
    joined = match_parts(calls(rows))
    assert partners(joined) == expected
    assert {joined.evidence[row] for members in expected for row in members} == {"measured"}
    mismatched = sum(len(members) for key, members in by_key.items() if len(kinds[key]) > 1)
    mismatches = [notice for notice in joined.notices if notice.slug == "collectives-mismatch"]
    assert sum(notice.count for notice in mismatches) == mismatched
    shuffled = random.Random(seed).sample(range(len(rows)), len(rows))
    moved = match_parts(calls([rows[at] for at in shuffled]))
    assert {frozenset(shuffled[row] for row in members) for members in partners(moved)} == expected


def test_calls_of_one_number_that_differ_in_size_meet_and_it_is_said() -> None:
    rows = [
        {
            "part": rank,
            "rank": rank,
            "sequence": number,
            "in_bytes": size,
            "start_ns": 100 * number,
            "end_ns": 90,
        }
        for number, sizes in enumerate(([64, 64], [64, 128], [8, 8]))
        for rank, size in enumerate(sizes)
    ]
    joined = match_parts(calls(rows))
    assert partners(joined) == {frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})}
    (notice,) = joined.notices
    assert (notice.slug, notice.severity, notice.count) == ("collectives-sizes", "warning", 2)
    assert notice.message.endswith(
        "1 collectives of group dp differ in size between ranks, first: rank 0 64 B; rank 1 128 B"
    )


@pytest.mark.parametrize("seed", range(4))
def test_messages_meet_in_their_order_between_two_ranks_and_one_tag(seed: int) -> None:
    chance, rows = random.Random(seed), []
    for at in range(60):
        rank, peer = chance.sample(range(3), 2)
        kind = chance.choice(["send", "receive"])
        times = {"start_ns": 10 * at, "end_ns": 10 * at + 5}
        rows.append(
            {
                "part": rank,
                "rank": rank,
                "peer": peer,
                "kind": kind,
                "tag": chance.choice([None, 5]),
                "group": None,
            }
            | times
        )
    queues: dict[Any, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for at, row in enumerate(rows):
        sends = row["kind"] == "send"
        way = (row["rank"], row["peer"]) if sends else (row["peer"], row["rank"])
        queues[(*way, row["tag"])][not sends].append(at)
    expected = {frozenset(pair) for both in queues.values() for pair in zip(*both, strict=False)}
    joined = match_parts(calls(rows))
    assert partners(joined) == expected
    assert {joined.evidence[row] for pair in expected for row in pair} == {"inferred"}


def test_a_graph_that_is_not_in_order_is_refused_before_it_is_used() -> None:
    graph = graph_of(0)
    first, last = (graph.edges["target"].min(), graph.edges["target"].max())
    backwards = graph.edges.head(1).with_columns(
        source=pl.lit(last, pl.UInt32),
        target=pl.lit(first, pl.UInt32),
        delay_ns=pl.lit(-(2**40), pl.Int64),
    )
    forwards = backwards.with_columns(
        source=pl.lit(first, pl.UInt32), target=pl.lit(last, pl.UInt32)
    )
    circle = replace(graph, edges=pl.concat([graph.edges, backwards, forwards]))
    with pytest.raises(
        InvariantError, match=r"\d+ points wait for each other, one of them is of node \d+"
    ):
        circle.check()
