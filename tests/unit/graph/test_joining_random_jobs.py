"""Random jobs whose truth is known: which parts are one operation, who waits for whom, whose clock is wrong."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pytest

from support.rank_graphs import US, checked, part
from traceloom.graph import Plan, calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.job import fit_clocks, join_ranks

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "broadcast",
    "reduce",
    "gather",
)
FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
SEEDS = range(15)


class TrueJob:
    """Operations of random kinds and sizes; each ends some time after those it waits for have come.

    Args:
        seed: Of all that is drawn.
        sizes: How many different sizes there are: with one, only kinds and ends tell operations apart.
    """

    def __init__(self, seed: int, *, ranks: int | None = None, sizes: int = 4) -> None:
        draw = random.Random(seed)
        self.ranks = ranks or draw.randint(2, 4)
        self.parts: list[list[dict[str, Any]]] = [[] for _ in range(self.ranks)]
        self.starts: list[list[int]] = []
        now = [0] * self.ranks
        for number in range(draw.randint(4, 9)):
            kind, root = draw.choice(KINDS), draw.randrange(self.ranks)
            size = 64 * draw.randint(1, sizes)
            begin = [time + draw.randint(1, 90) for time in now]
            self.starts.append(begin)
            transfer = draw.randint(5, 30)
            for rank in range(self.ranks):
                if kind in FROM_ROOT:
                    waits_for = [root, rank]
                elif kind in TO_ROOT:
                    waits_for = list(range(self.ranks)) if rank == root else [rank]
                else:
                    waits_for = list(range(self.ranks))
                now[rank] = max(begin[other] for other in waits_for) + transfer
                self.parts[rank].append(
                    {
                        "start": begin[rank],
                        "end": now[rank],
                        "kind": kind,
                        "in_bytes": size,
                        "truth": number,
                        "group_size": self.ranks,
                        "sequence": number,
                        "peer": root if kind in (*FROM_ROOT, *TO_ROOT) else None,
                    }
                )

    def graph(
        self, *, numbered: bool, cut: dict[int, tuple[int, int]] | None = None, order: Any = None
    ) -> Graph:
        """The joined ranks, some of them without their first and last operations."""
        graphs = []
        for rank in order or range(self.ranks):
            low, high = (cut or {}).get(rank, (0, 0))
            rows = self.parts[rank][low : len(self.parts[rank]) - high]
            graphs.append(
                part(
                    rank,
                    [
                        {
                            key: value
                            for key, value in row.items()
                            if key != "truth" and (numbered or key != "sequence")
                        }
                        for row in rows
                    ],
                )
            )
        return checked(graphs)

    def truth_of(
        self, graph: Graph, cut: dict[int, tuple[int, int]] | None = None
    ) -> dict[int, int]:
        """The number of the operation that each communication node is a part of."""
        truth = {}
        for rank in range(self.ranks):
            nodes = graph.nodes.filter(pl.col("rank") == rank, pl.col("kind") == "collective").sort(
                "start_ns"
            )["node"]
            low = (cut or {}).get(rank, (0, 0))[0]
            truth |= {node: low + place for place, node in enumerate(nodes)}
        return truth


def joined(graph: Graph) -> dict[int, set[int]]:
    """The nodes of each operation."""
    groups: dict[int, set[int]] = {}
    for node, instance in graph.communication.select("node", "instance").iter_rows():
        if instance is not None:
            groups.setdefault(instance, set()).add(node)
    return groups


def true_groups(truth: dict[int, int]) -> set[frozenset[int]]:
    """The nodes of each operation of which several ranks have a part."""
    groups: dict[int, set[int]] = {}
    for node, number in truth.items():
        groups.setdefault(number, set()).add(node)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


@pytest.mark.parametrize("numbered", [True, False], ids=["by number", "by order"])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_operation_is_joined_over_all_ranks(seed: int, numbered: bool) -> None:
    job = TrueJob(seed)
    graph = job.graph(numbered=numbered)
    assert {frozenset(group) for group in joined(graph).values()} == true_groups(
        job.truth_of(graph)
    )
    assert [notice.slug for notice in graph.notices] == []


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_join_what_is_left_of_windows_that_were_cut_anywhere(seed: int) -> None:
    job, draw = TrueJob(seed), random.Random(seed)
    length = len(job.parts[0])
    cut = {
        rank: (draw.randint(0, length // 2), draw.randint(0, length // 3))
        for rank in range(job.ranks)
    }
    graph = job.graph(numbered=True, cut=cut)
    assert {frozenset(group) for group in joined(graph).values()} == true_groups(
        job.truth_of(graph, cut)
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_order_joins_a_window_that_was_cut_at_one_end_and_never_joins_wrongly(seed: int) -> None:
    job = TrueJob(seed, sizes=40)
    for cut in ({1: (1, 0)}, {1: (0, 2)}, {0: (2, 0)}):
        graph = job.graph(numbered=False, cut=cut)
        truth = job.truth_of(graph, cut)
        found = {frozenset(group) for group in joined(graph).values()}
        assert found == true_groups(truth), cut


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_operation_in_the_middle_is_said_and_joined_no_further(seed: int) -> None:
    job = TrueJob(seed, ranks=2, sizes=40)
    gone = 1 + seed % (len(job.parts[1]) - 2)
    kept, missing = job.parts[1][gone + 1 :], job.parts[1][gone]
    if {(row["kind"], row["in_bytes"]) for row in kept} & {(missing["kind"], missing["in_bytes"])}:
        pytest.skip("what follows is of the same kind and size")
    del job.parts[1][gone]
    graph = job.graph(numbered=False)
    numbers = job.truth_of(graph)
    first = graph.nodes.filter(pl.col("rank") == 1)["node"].min()
    assert first is not None
    for group in joined(graph).values():
        low, high = sorted(group)
        place = numbers[high]
        assert numbers[low] == place + (place >= gone), "only true parts are joined"
    assert "collectives-mismatch" in {notice.slug for notice in graph.notices}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_may_be_given_in_any_order(seed: int) -> None:
    job = TrueJob(seed)
    there = job.graph(numbered=True)
    back = job.graph(numbered=True, order=list(reversed(range(job.ranks))))

    def meetings(graph: Graph) -> set[Any]:
        rank, start = graph.nodes["rank"], graph.nodes["start_ns"]
        return {
            frozenset((rank[node], start[node]) for node in group)
            for group in joined(graph).values()
        }

    assert meetings(there) == meetings(back)
    assert sorted(calibrate(there).edges["delay_ns"]) == sorted(calibrate(back).edges["delay_ns"])


@cache
def met(seed: int) -> tuple[TrueJob, Graph]:
    job = TrueJob(seed)
    return job, job.graph(numbered=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_waits_for_whom_is_as_its_kind_says(seed: int) -> None:
    job, graph = met(seed)
    rank = graph.nodes["rank"]
    truth = job.truth_of(graph)
    edges = graph.edges.filter(pl.col("kind") == "rendezvous")
    for meeting in graph.nodes.filter(pl.col("kind") == "rendezvous")["node"]:
        into = edges.filter(pl.col("target") == meeting)
        out = edges.filter(pl.col("source") == meeting)
        number = {truth[node] for node in [*into["source"], *out["target"]]}
        assert len(number) == 1
        row = job.parts[0][number.pop()]
        everyone, root = set(range(job.ranks)), row["peer"]
        gives = {root} if row["kind"] in FROM_ROOT else everyone
        takes = (
            {root}
            if row["kind"] in TO_ROOT
            else everyone - {root}
            if row["kind"] in FROM_ROOT
            else everyone
        )
        assert {rank[node] for node in into["source"]} == gives
        assert {rank[node] for node in out["target"]} == takes
        begins = job.starts[truth[into["source"][0]]]
        earliest = graph.nodes["start_ns"][meeting] - graph.nodes["start_ns"][into["source"][0]]
        came = max(begins[giver] for giver in gives) - begins[rank[into["source"][0]]]
        assert earliest == came * US, "it meets when the last of those that give has come"
        assert set(into["from_end"]) == {False}
        assert set(out["to_end"]) == {True}
        assert set(into["evidence"]) == {"measured"}


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_came_last_decides_when_an_operation_begins_to_transfer(seed: int) -> None:
    _, graph = met(seed)
    ready = calibrate(graph)
    plan, times = Plan(ready), ready.point_times()
    into = ready.edges.filter(pl.col("kind") == "rendezvous", ~pl.col("to_end"))
    for meeting, sources in into.group_by("target"):
        node = int(meeting[0])
        came = [times[2 * source] for source in sources["source"]]
        assert times[2 * node] == max(came)
        assert plan.evaluate()[2 * node] == max(came)


# -- what was not recorded ------------------------------------------------------------------------------------------------


def lone(
    *ends: tuple[int, int], size: int = 64, kind: str = "all_reduce", members: int = 4
) -> Graph:
    """One rank of several: operations of one size as (start, end)."""
    rows = [
        {"start": low, "end": high, "kind": kind, "in_bytes": size, "group_size": members}
        for low, high in ends
    ]
    return checked([part(0, rows)])


def arrivals(graph: Graph) -> list[int]:
    return (
        graph.nodes.filter(pl.col("kind") == "arrival").sort("node")["start_ns"] // US
    ).to_list()


def test_unrecorded_peers_came_so_that_the_usual_transfer_is_left() -> None:
    # the lower quartile of 10, 10, 12, 40 and 90 us is 10: those of 10 and 12 waited for nobody
    graph = lone((0, 10), (100, 110), (200, 212), (300, 340), (400, 490))
    assert arrivals(graph) == [0, 100, 200, 330, 480]


def test_a_wait_of_half_a_transfer_is_jitter() -> None:
    # 15 us are one and a half times 10, and 16 more
    assert arrivals(lone((0, 10), (100, 115), (200, 216), (300, 310))) == [0, 100, 206, 300]


def test_a_group_that_was_recorded_whole_has_nobody_to_assume() -> None:
    graph = checked(
        [
            part(rank, [{"start": 10 * rank, "end": 40, "sequence": 1, "group_size": 2}])
            for rank in (0, 1)
        ]
    )
    assert arrivals(graph) == []
    assert graph.nodes.filter(pl.col("kind") == "rendezvous").height == 1


def test_peers_that_are_missing_beside_recorded_ones_are_assumed_with_them() -> None:
    rows = [
        {"start": 10 * rank, "end": 140, "sequence": 1, "group_size": 3, "in_bytes": 8}
        for rank in (0, 1)
    ]
    graph = checked([part(rank, [row]) for rank, row in enumerate(rows)])
    meeting = graph.nodes.filter(pl.col("kind") == "rendezvous")
    assert meeting.height == 1
    (arrival,) = graph.nodes.filter(pl.col("kind") == "arrival")["node"]
    into = graph.edges.filter(pl.col("target") == meeting["node"][0])
    assert arrival in into["source"].to_list()
    assert into.height == 3, "two that were recorded, and one arrival for all others"
    # they come as long after the last recorded one as they did
    (cause,) = graph.edges.filter(pl.col("target") == arrival)["source"]
    assert graph.nodes["rank"][cause] == 1


def test_a_larger_transfer_says_that_a_smaller_one_waited() -> None:
    rows = [
        {"start": 100 * at, "end": 100 * at + 20, "in_bytes": 1000, "group_size": 2}
        for at in range(4)
    ]
    rows += [
        {"start": 1000 + 100 * at, "end": 1000 + 100 * at + 70, "in_bytes": 100, "group_size": 2}
        for at in range(4)
    ]
    graph = checked([part(0, rows)])
    # ten times the bytes take 20 us: so does the smaller one at most
    assert arrivals(graph) == [0, 100, 200, 300, 1050, 1150, 1250, 1350]


@pytest.mark.parametrize(
    ("kind", "peer", "waits"),
    [("broadcast", 0, 0), ("broadcast", 1, 1), ("reduce", 0, 1), ("reduce", 1, 0)],
)
def test_a_lone_part_of_a_rooted_operation_waits_as_its_root_says(
    kind: str, peer: int, waits: int
) -> None:
    graph = checked(
        [
            part(
                0,
                [
                    {
                        "start": 0,
                        "end": 50,
                        "kind": kind,
                        "peer": peer,
                        "group_size": 2,
                        "in_bytes": 8,
                    }
                ],
            )
        ]
    )
    (node,) = graph.communication["node"]
    into = graph.edges.filter(pl.col("target") == node, pl.col("kind") == "rendezvous")
    assert into.height == waits


@pytest.mark.parametrize("other", ["none", "peer", "tag", "kind"])
def test_a_message_without_its_other_end_awaits_an_assumed_peer(other: str) -> None:
    send = {"start": 0, "end": 40, "kind": "send", "peer": 1, "tag": 3}
    receive = {"start": 10, "end": 40, "kind": "receive", "peer": 0, "tag": 3}
    receive |= {"peer": {"peer": 2}, "tag": {"tag": 4}, "kind": {"kind": "send"}}.get(other, {})
    graph = checked([part(0, [send]), part(1, [receive])])
    alone = other != "none"
    assert joined(graph) == ({} if alone else joined(graph))
    assert len(arrivals(graph)) == 2 * alone
    assert graph.nodes.filter(pl.col("kind") == "rendezvous").height == (2 if alone else 1)


def test_a_rank_that_stands_twice_in_a_group_is_no_partner_of_itself() -> None:
    rows = [{"start": 0, "end": 10, "sequence": 1}, {"start": 20, "end": 30, "sequence": 1}]
    graph = checked([part(0, rows), part(1, [dict(row) for row in rows])])
    groups = {frozenset(group) for group in joined(graph).values()}
    rank = graph.nodes["rank"]
    assert all({rank[node] for node in group} == {0, 1} for group in groups)
    assert len(groups) == 2


def test_groups_of_the_same_name_and_other_members_are_not_joined() -> None:
    a = part(0, [{"start": 0, "end": 10, "sequence": 1, "ranks": [0, 1], "group_size": 2}])
    b = part(1, [{"start": 0, "end": 10, "sequence": 1, "ranks": [1, 2], "group_size": 2}])
    assert joined(checked([a, b])) == {}


# -- clocks ---------------------------------------------------------------------------------------------------------------


def ends(
    seed: int, hosts: int, *, meetings: int = 30, jitter: int = 400, drift: float = 0.0
) -> tuple[pl.DataFrame, list[int]]:
    """Ends of operations on the clocks of some hosts, each off by so much, and read with jitter."""
    draw = np.random.default_rng(seed)
    truth = np.cumsum(draw.integers(1_000_000, 5_000_000, meetings))
    offsets = [0, *draw.integers(-(10**9), 10**9, hosts - 1).tolist()]
    frames = []
    for host, offset in enumerate(offsets):
        times = truth + offset + draw.integers(-jitter, jitter + 1, meetings)
        times += np.floor(drift * host * truth).astype(np.int64)
        frames.append(
            pl.DataFrame(
                {"instance": range(meetings), "host": [f"h{host}"] * meetings, "end_ns": times}
            )
        )
    return pl.concat(frames), offsets


@pytest.mark.parametrize("seed", SEEDS)
def test_offsets_are_found_within_the_jitter_of_the_ends(seed: int) -> None:
    frame, offsets = ends(seed, 4)
    clocks = fit_clocks(frame, [f"h{host}" for host in range(4)])
    for host, offset in enumerate(offsets):
        clock = clocks[f"h{host}"]
        assert clock.offset_ns == pytest.approx(-offset, abs=400)
        assert clock.meetings == 30
        if host:
            assert clock.residual_ns is not None
            assert clock.residual_ns <= 1600


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_meetings_and_the_names_of_hosts_say_nothing(seed: int) -> None:
    frame, _ = ends(seed, 3)
    names = ["h0", "h1", "h2"]
    clocks = fit_clocks(frame, names)
    assert fit_clocks(frame.sample(fraction=1, shuffle=True, seed=seed), names) == clocks
    renamed = frame.with_columns(pl.col("host").str.replace("h", "machine of rank "))
    again = fit_clocks(renamed, [name.replace("h", "machine of rank ") for name in names])
    assert list(again.values()) == list(clocks.values())


@pytest.mark.parametrize("seed", range(5))
def test_a_later_start_of_the_job_changes_no_correction(seed: int) -> None:
    frame, _ = ends(seed, 3, drift=20e-6)
    clocks = fit_clocks(frame, ["h0", "h1", "h2"])
    later = fit_clocks(frame.with_columns(pl.col("end_ns") + 10**17), ["h0", "h1", "h2"])
    for name, clock in clocks.items():
        assert later[name].offset_ns == clock.offset_ns
        assert later[name].drift == pytest.approx(clock.drift, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drift", [-30e-6, 30e-6])
def test_a_drift_is_found_and_the_corrected_ends_meet(seed: int, drift: float) -> None:
    frame, _ = ends(seed, 2, meetings=60, drift=drift)
    clocks = fit_clocks(frame, ["h0", "h1"])
    assert clocks["h1"].drift == pytest.approx(-drift, rel=0.05)
    own, job = (frame.filter(pl.col("host") == name)["end_ns"].to_numpy() for name in ("h1", "h0"))
    corrected = clocks["h1"].corrected(own)
    assert np.abs(corrected - job).max() <= 4_000
    assert (np.diff(clocks["h1"].corrected(np.sort(own))) >= 0).all(), "the order of times stays"


def test_few_meetings_give_no_drift_and_one_none_at_all() -> None:
    frame, offsets = ends(3, 2, meetings=7, drift=50e-6, jitter=0)
    assert fit_clocks(frame, ["h0", "h1"])["h1"].drift == 0.0
    one = frame.filter(pl.col("instance") == 0)
    clock = fit_clocks(one, ["h0", "h1"])["h1"]
    assert clock.meetings == 1
    assert clock.residual_ns == 0
    nothing = fit_clocks(frame.clear(), ["h0", "h1"])
    assert [clock.offset_ns for clock in nothing.values()] == [0, 0]
    assert all(clock.residual_ns is None for clock in nothing.values())
    assert offsets[0] == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_job_on_wrong_clocks_is_the_job_on_right_ones(seed: int) -> None:
    job = TrueJob(seed, ranks=3, sizes=40)
    graphs = []
    for rank, shift in enumerate((0, 7_000, 3_000)):
        rows = [
            row | {"start": row["start"] + shift, "end": row["end"] + shift, "kind": "all_reduce"}
            for row in job.parts[rank]
        ]
        graphs.append(
            part(
                rank,
                [{k: v for k, v in row.items() if k not in ("truth", "peer")} for row in rows],
                host=f"h{rank}",
            )
        )
    graph = join_ranks(graphs)
    graph.check()
    spread = graph.nodes.filter(pl.col("kind") == "collective").with_columns(
        end=pl.col("start_ns") + pl.col("duration_ns")
    )
    true_ends = [row["end"] for row in job.parts[0]]
    fitted = spread.filter(pl.col("rank") == 0).sort("start_ns")["end"]
    assert ((fitted - fitted[0]) // US).to_list() == [end - true_ends[0] for end in true_ends]
    offsets = graph.ranks["clock_offset_ns"].to_list()
    apart = [
        [job.parts[rank][at]["end"] - job.parts[0][at]["end"] for at in range(len(true_ends))]
        for rank in range(3)
    ]
    for rank, shift in enumerate((0, 7_000, 3_000)):
        # kinds in which some go ahead end apart: the middle of all of them is what is taken off
        assert offsets[rank] == pytest.approx(
            -(shift + float(np.median(apart[rank]))) * US, abs=60 * US
        )
