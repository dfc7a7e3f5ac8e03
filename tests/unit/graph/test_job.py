"""Joining ranks: which collectives belong together, whose clock is wrong, who waits for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from support.rank_graphs import US, checked, instances, part
from traceloom.graph.graph import Graph
from traceloom.graph.job import fit_clocks


def test_parts_with_sequence_numbers_are_joined_by_them_whatever_their_order() -> None:
    a = part(0, [{"start": 0, "end": 20, "sequence": 4}, {"start": 30, "end": 50, "sequence": 5}])
    b = part(1, [{"start": 31, "end": 50, "sequence": 5}])
    graph = checked([a, b])
    assert instances(graph, 0)[1] == instances(graph, 1)[0]
    assert instances(graph, 0)[0] is None


def test_parts_without_numbers_are_joined_by_order_even_where_windows_begin_apart() -> None:
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "all_reduce"]
    a = part(
        0, [{"start": 10 * i, "end": 10 * i + 5, "kind": kind} for i, kind in enumerate(kinds)]
    )
    b = part(
        1,
        [
            {"start": 10 * i, "end": 10 * i + 5, "kind": kind}
            for i, kind in enumerate(kinds)
            if i >= 1
        ],
    )
    c = part(
        2,
        [
            {"start": 10 * i, "end": 10 * i + 5, "kind": kind}
            for i, kind in enumerate(kinds)
            if i < 3
        ],
    )
    graph = checked([a, b, c])
    assert instances(graph, 0)[1:] == instances(graph, 1)
    assert instances(graph, 0)[:3] == instances(graph, 2)


def test_windows_of_equal_length_that_are_cut_one_operation_apart_are_joined_where_the_ends_meet() -> (
    None
):
    ends = [100, 250, 330, 480, 700]
    a = part(0, [{"start": e - 20, "end": e} for e in ends[:4]])
    b = part(1, [{"start": e - 10, "end": e} for e in ends[1:]])
    graph = checked([a, b])
    assert instances(graph, 0)[1:] == instances(graph, 1)[:3]
    assert instances(graph, 0)[0] is None
    assert instances(graph, 1)[3] is None


def test_an_order_that_differs_is_said_and_not_joined_from_there() -> None:
    a = part(
        0,
        [
            {"start": 0, "end": 5, "kind": "all_reduce"},
            {"start": 10, "end": 15, "kind": "all_gather"},
        ],
    )
    b = part(
        1,
        [
            {"start": 0, "end": 5, "kind": "all_reduce"},
            {"start": 10, "end": 15, "kind": "broadcast"},
        ],
    )
    graph = checked([a, b])
    assert instances(graph, 0)[0] == instances(graph, 1)[0] is not None
    assert instances(graph, 0)[1] is None
    [notice] = [n for n in graph.notices if n.slug == "collectives-mismatch"]
    assert "number 2 of rank 1 is broadcast, where rank 0 has all_gather" in notice.message


def test_kinds_and_sizes_that_disagree_under_one_number_are_said() -> None:
    a = part(
        0,
        [
            {"start": 0, "end": 5, "sequence": 1},
            {"start": 6, "end": 9, "sequence": 2, "in_bytes": 8},
        ],
    )
    b = part(
        1,
        [
            {"start": 0, "end": 5, "sequence": 1, "kind": "barrier"},
            {"start": 6, "end": 9, "sequence": 2, "in_bytes": 16},
        ],
    )
    graph = checked([a, b])
    assert instances(graph, 0)[0] is None
    assert instances(graph, 0)[1] == instances(graph, 1)[1] is not None
    assert {n.slug for n in graph.notices} == {"collectives-mismatch", "collectives-sizes"}


@pytest.mark.parametrize("numbered", [True, False])
def test_an_exchange_of_uneven_parts_is_joined_without_a_word(numbered: bool) -> None:
    def rank(number: int, splits: list[int]) -> Graph:
        size = {"in_bytes": 4 * sum(splits), "in_splits": splits} | (
            {"sequence": 1} if numbered else {}
        )
        return part(number, [{"start": 0, "end": 5, "kind": "all_to_all", **size}])

    graph = checked([rank(0, [1, 2]), rank(1, [5, 7])])
    assert instances(graph, 0)[0] == instances(graph, 1)[0] is not None
    assert not {n.slug for n in graph.notices} & {"collectives-mismatch", "collectives-sizes"}


def test_all_parts_wait_for_the_last_one() -> None:
    graph = checked([part(0, [{"start": 0, "end": 50}]), part(1, [{"start": 40, "end": 50}])])
    [met] = graph.nodes.filter(pl.col("kind") == "rendezvous").to_dicts()
    assert met["start_ns"] == 40 * US
    edges = graph.edges.filter(pl.col("kind") == "rendezvous")
    into = edges.filter(pl.col("target") == met["node"])
    out = edges.filter(pl.col("source") == met["node"])
    assert into["from_end"].to_list() == [False, False]
    assert out["to_end"].to_list() == [True, True]


def test_receivers_of_a_broadcast_wait_for_the_root_and_the_root_for_nobody() -> None:
    graph = checked(
        [
            part(0, [{"start": 20, "end": 30, "kind": "broadcast", "peer": 0}]),
            part(1, [{"start": 0, "end": 30, "kind": "broadcast", "peer": 0}]),
            part(2, [{"start": 25, "end": 31, "kind": "broadcast", "peer": 0}]),
        ]
    )
    [met] = graph.nodes.filter(pl.col("kind") == "rendezvous").to_dicts()
    assert met["start_ns"] == 20 * US
    rank_of = graph.nodes["rank"]
    into = graph.edges.filter(pl.col("target") == met["node"])["source"]
    out = graph.edges.filter(pl.col("source") == met["node"])["target"]
    assert rank_of.gather(into).to_list() == [0]
    assert rank_of.gather(out).to_list() == [1, 2]


def test_sends_and_receives_are_paired_by_ranks_tag_and_order() -> None:
    def send(start: int, to: int, tag: int) -> dict[str, Any]:
        return {"start": start, "end": start + 9, "kind": "send", "peer": to, "tag": tag}

    def receive(start: int, source: int, tag: int) -> dict[str, Any]:
        return {"start": start, "end": start + 9, "kind": "receive", "peer": source, "tag": tag}

    graph = checked(
        [
            part(0, [send(0, 2, 1), send(10, 2, 2), send(20, 2, 1), send(30, 1, 1)]),
            part(1, [receive(30, 0, 1)]),
            part(2, [receive(0, 0, 1), receive(10, 0, 2), receive(20, 0, 1), receive(40, 1, 1)]),
        ]
    )
    first, second, third, other = instances(graph, 0)
    assert instances(graph, 2) == [first, second, third, None]
    assert instances(graph, 1) == [other]
    assert len({first, second, third, other}) == 4


def test_operations_that_would_wait_for_each_other_in_a_circle_are_not_joined() -> None:
    # Rank 0 sends 1 before 2 on one stream, rank 1 receives 2 before 1: joined, nobody could ever end.
    a = part(
        0,
        [
            {"start": 0, "end": 9, "kind": "send", "peer": 1, "tag": 1},
            {"start": 10, "end": 19, "kind": "send", "peer": 1, "tag": 2},
        ],
    )
    b = part(
        1,
        [
            {"start": 0, "end": 9, "kind": "receive", "peer": 0, "tag": 2},
            {"start": 10, "end": 19, "kind": "receive", "peer": 0, "tag": 1},
        ],
    )
    graph = checked([a, b])
    assert instances(graph, 0) == [None, None]
    assert [n.slug for n in graph.notices] == ["collectives-circle"]


def test_peers_that_were_not_recorded_arrive_by_assumption() -> None:
    lone = part(
        0,
        [
            {"start": 0, "end": 10, "group_size": 4, "in_bytes": 8},
            {"start": 20, "end": 70, "group_size": 4, "in_bytes": 8},
        ],
    )
    graph = checked([lone])
    arrivals = graph.nodes.filter(pl.col("kind") == "arrival")
    # The shorter of two equal operations took 10 us: the peers of the longer one came 10 us before its end.
    assert arrivals["start_ns"].to_list() == [0, 60 * US]
    edges = graph.edges.filter(pl.col("target").is_in(arrivals["node"].to_list()))
    assert set(edges["evidence"].to_list()) == {"assumed"}
    assert edges["source"].to_list() == [1, 2]  # they come as long after us as they did
    assert edges["from_end"].to_list() == [False, False]


def test_one_rank_of_a_group_of_one_waits_for_nobody() -> None:
    graph = checked([part(0, [{"start": 0, "end": 10, "group_size": 1}])])
    assert graph.nodes.height == 2
    assert graph.coverage["outcome"].to_list() == ["alone in its group"]


def test_a_clock_that_is_wrong_is_corrected_and_ranks_of_one_host_move_together() -> None:
    starts = [100, 300, 700, 1500]
    wrong = 5_000
    ranks = []
    for rank, host in enumerate("aabb"):
        shift = wrong if host == "b" else 0
        ranks.append(
            part(
                rank,
                [
                    {"start": s + rank + shift, "end": s + 50 + rank + shift, "sequence": i}
                    for i, s in enumerate(starts)
                ],
                host=host,
            )
        )
    graph = checked(ranks)
    offsets = graph.ranks["clock_offset_ns"].to_list()
    assert offsets[0] == offsets[1] == 0
    assert offsets[2] == offsets[3] == pytest.approx(-wrong * US, abs=4 * US)
    assert max(graph.ranks["clock_residual_ns"].to_list()) <= 4 * US
    assert [n.slug for n in graph.notices] == ["clocks-corrected"]


def test_ranks_that_agree_within_the_noise_are_left_alone() -> None:
    late = [0, 3, 1, 2]
    a = part(
        0, [{"start": 100 * i, "end": 100 * i + 50, "sequence": i} for i in range(4)], host=None
    )
    b = part(
        1,
        [{"start": 100 * i, "end": 100 * i + 50 + late[i], "sequence": i} for i in range(4)],
        host=None,
    )
    graph = checked([a, b])
    assert graph.ranks["clock_offset_ns"].to_list() == [0, 0]


def test_a_drift_is_found_and_one_late_end_does_not_move_it() -> None:
    truth = np.arange(40, dtype=np.int64) * 25_000_000
    drifting = truth + 1_000_000 + truth // 20_000  # 50 parts per million
    drifting[7] += 900_000
    frame = pl.concat(
        [
            pl.DataFrame({"instance": range(40), "host": ["a"] * 40, "end_ns": truth}),
            pl.DataFrame({"instance": range(40), "host": ["b"] * 40, "end_ns": drifting}),
        ]
    )
    clock = fit_clocks(frame, ["a", "b"])["b"]
    assert clock.drift == pytest.approx(-50e-6, rel=0.01)
    left = np.abs(clock.corrected(drifting) - truth)
    left[7] = 0
    assert left.max() < 2_000


def test_hosts_that_share_no_collective_with_the_first_are_reached_over_others() -> None:
    rows = [(0, "a", 100), (0, "b", 1100), (1, "b", 2000), (1, "c", 5000)]
    frame = pl.DataFrame(
        rows, schema={"instance": pl.Int64, "host": pl.String, "end_ns": pl.Int64}, orient="row"
    )
    clocks = fit_clocks(frame, ["a", "b", "c", "d"])
    assert clocks["b"].offset_ns == -1000
    assert clocks["c"].offset_ns == -4000
    assert clocks["d"].offset_ns == 0
    assert clocks["d"].residual_ns is None
