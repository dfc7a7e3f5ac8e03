"""Native simulation: jobs with planted networks, workloads by hand, and both engines against each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.jobs import Job, ParallelRecipe, TokenImbalance, parallel_job, program as do
from support.workload import collective, node, receive, send, write_set
from traceloom.changes.scenario import Scenario
from traceloom.errors import CheckError, InputError, UsageError
from traceloom.formats import load
from traceloom.formats.chakra.et_pb2 import Node
from traceloom.graph import link_session
from traceloom.graph.calibrate import scale_overlap
from traceloom.graph.graph import Graph
from traceloom.workload.chakra.graph_read import write_ranks
from traceloom.workload.simulate.evaluation import (
    build_plan,
    evaluate_on_network,
    simulate_contention,
)
from traceloom.workload.simulate.inputs import open_input
from traceloom.workload.simulate.machine import (
    Dimension,
    Machine,
    MeasuredTransfer,
    Nic,
    SpeedFactor,
)
from traceloom.workload.simulate.native import run
from traceloom.workload.simulate.transfers import (
    LinkBundles,
    compute_fair_speeds,
    compute_recorded_transfers,
    find_operations,
)

_BYTES = {"BFloat16": 2, "Float": 4}
Time = Callable[[str, int, int], float]  # kind, ranks, bytes of a rank's buffer -> ns


def on_network(job: Job, time_ns: Time) -> Job:
    """The same job on a network on which every communication takes what a formula says."""

    def moved(step: do.Instruction) -> do.Instruction:
        meeting = getattr(step, "meeting", None)
        if not isinstance(step, (do.Submit, do.Meet)) or meeting is None:
            return step
        most = max(meeting.elements, meeting.out_elements or 0)
        took = time_ns(meeting.kind, len(meeting.members), most * _BYTES[meeting.element_type])
        return replace(step, meeting=replace(meeting, transfer=round(took)))

    ranks = [
        replace(rank, threads=[[moved(step) for step in thread] for thread in rank.threads])
        for rank in job.ranks
    ]
    return replace(job, ranks=ranks)


def one_switch(ranks: int, bandwidth: float, latency: float) -> Machine:
    return Machine((Dimension("switch", ranks, bandwidth, latency),), name="a switch")


def ring_on_a_switch(bandwidth: float, latency: float) -> Time:
    """Two links on each way: of rings as many ways as there are steps; a message takes one."""

    def time_ns(kind: str, ranks: int, size: int) -> float:
        steps = {"allreduce": 2 * (ranks - 1), "send": 1, "recv": 1}.get(kind, ranks - 1)
        part = size if kind in {"send", "recv"} else size / ranks
        return steps * (part / bandwidth + 2 * latency)

    return time_ns


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "recipe",
    [
        ParallelRecipe(data=4, steps=2, sharded=True, seed=3),
        ParallelRecipe(tensor=2, pipeline=2, steps=2, microbatches=3, seed=5),
    ],
    ids=["sharded", "pipeline"],
)
def test_a_job_on_one_network_is_answered_on_another(
    recipe: ParallelRecipe, tmp_path: Path
) -> None:
    # Communication of one rank never overlaps in these jobs, so that a formula says what it takes.
    job = parallel_job(recipe)
    world = recipe.layout.world_size
    here, there = ring_on_a_switch(200.0, 1_000), ring_on_a_switch(25.0, 3_000)
    folder = on_network(job, here).run().write(tmp_path / "job")
    truth = on_network(job, there).run().window_ns
    machine = one_switch(world, 25.0, 3_000)
    answer = run(folder, machine)
    assert answer.before_ns == on_network(job, here).run().window_ns == run(folder).after_ns
    assert answer.after_ns == pytest.approx(truth, rel=0.02)
    assert truth > 1.2 * answer.before_ns
    assert answer.identity_error == pytest.approx(0, abs=0.02)
    assert run(folder, one_switch(world, 200.0, 1_000)).after_ns == pytest.approx(
        answer.before_ns, rel=0.005
    )


def test_measured_transfers_count_before_the_network(tmp_path: Path) -> None:
    job = parallel_job(ParallelRecipe(data=4, steps=2, seed=3))

    def fitted(_kind: str, ranks: int, size: int) -> float:
        return 40_000 + size * 2 * (ranks - 1) / ranks / 30.0

    folder = on_network(job, ring_on_a_switch(200.0, 1_000)).run().write(tmp_path / "job")
    measured = MeasuredTransfer("all_reduce", "inside", 4, 1 << 10, 1 << 12, 40_000, 30.0)
    machine = replace(one_switch(4, 200.0, 1_000), transfers=(measured,))
    answer = run(folder, machine)
    assert answer.after_ns == pytest.approx(on_network(job, fitted).run().window_ns, rel=0.02)
    assert set(answer.collectives["flags"]) == {"size not among those measured"}
    assert [notice.slug for notice in answer.notices if notice.slug == "transfer-flag"] == [
        "transfer-flag"
    ]
    # A network with twice the bandwidth: the measured time changes as the modelled one does.
    faster = run(folder, machine, overrides=["network.0.bandwidth=400", "network.0.latency=500"])
    assert faster.collectives["transfer_ns"].to_list() == [
        pytest.approx(took / 2, abs=2) for took in answer.collectives["transfer_ns"]
    ]


def test_no_transfer_beats_the_network_card(tmp_path: Path) -> None:
    folder = parallel_job(ParallelRecipe(data=4, steps=1)).run().write(tmp_path / "job")
    measured = MeasuredTransfer("all_reduce", "inside", 4, 0, 1 << 40, 0, 1_000_000.0)
    machine = replace(one_switch(4, 200.0, 0), nic=Nic(10.0, "all"), transfers=(measured,))
    calls = run(folder, machine).collectives
    sent = 2 * 3 / 4 * calls["bytes"]
    assert (calls["transfer_ns"] >= (sent / 10.0).cast(pl.Int64)).all()
    assert calls["flags"].str.contains("network cards").all()


def test_uneven_all_to_alls_take_what_their_busiest_rank_takes(tmp_path: Path) -> None:
    recipe = ParallelRecipe(
        data=4, expert=4, steps=1, faults=(TokenImbalance((0.5, 0.2, 0.2, 0.1)),), seed=2
    )
    job = parallel_job(recipe)
    sent: dict[tuple[str, int], dict[int, tuple[int, ...]]] = {}
    for rank in job.ranks:
        for step in (step for thread in rank.threads for step in thread):
            meeting = getattr(step, "meeting", None)
            if isinstance(step, do.Submit) and meeting is not None and meeting.in_splits:
                size = _BYTES[meeting.element_type]
                sent.setdefault(meeting.key, {})[rank.rank] = tuple(
                    size * part for part in meeting.in_splits
                )
    assert sent
    answer = run(job.run().write(tmp_path / "job"), one_switch(4, 20.0, 0))
    # All messages go at once: the link that carries most (what a rank keeps for itself goes over none) says how long.
    expected = []
    for rows in sent.values():
        matrix = np.array([rows[rank] for rank in range(4)])
        np.fill_diagonal(matrix, 0)
        expected.append(max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max()) / 20.0)
    calls = answer.collectives.filter(pl.col("kind") == "all_to_all")
    # Two of them share their links with the gradients of another layer.
    assert sorted(calls["transfer_ns"].to_list())[:6] == pytest.approx(
        sorted(expected)[:6], rel=0.02
    )
    even = 3 * np.mean([np.sum(list(rows.values())) for rows in sent.values()]) / 16 / 20.0
    assert min(expected) > 1.2 * even


def test_what_communication_takes_alone(tmp_path: Path) -> None:
    # Two ranks: 5 us of compute, an all_reduce of 1 MB that was recorded with 7 us, 3 us of compute.
    home = write_set(
        tmp_path / "set",
        *(
            [
                node(1, us=5 + r),
                collective(2, size=1_000_000, deps=[1], us=7),
                node(3, deps=[2], us=3),
            ]
            for r in range(2)
        ),
    )
    assert run(home).after_ns == 16_000
    assert run(home, only="communication").after_ns == 7_000
    assert run(home, only="compute").after_ns == 9_000
    on_switch = run(home, one_switch(2, 100.0, 500))
    assert on_switch.after_ns == 6_000 + 2 * (500_000 // 100 + 1_000) + 3_000
    assert on_switch.identity_error is None
    assert on_switch.measured_ns is None
    assert on_switch.ranks["end_ns"].to_list() == [21_000, 21_000]


def test_links_are_shared_fairly(tmp_path: Path) -> None:
    """Rank 0 sends 1 MB to rank 1 at once and, after 4 us, 1 MB to rank 2, over one link of 100 B/ns."""
    home = write_set(
        tmp_path / "set",
        [send(1, 1, comm_size=1_000_000), node(2, us=4), send(3, 2, deps=[2], comm_size=1_000_000)],
        [receive(1, 0, comm_size=1_000_000)],
        [receive(1, 0, comm_size=1_000_000)],
    )
    answer = run(home, one_switch(3, 100.0, 0))
    # Alone until 4 us; then each has half: the first has 600 kB left and ends at 16 us, the second at 20 us.
    ends = dict(
        answer.nodes.filter(pl.col("kind") == "receive").select("rank", "end_ns").iter_rows()
    )
    assert ends == {1: 16_000, 2: 20_000}
    assert answer.after_ns == 20_000
    up = answer.links.filter(pl.col("source") == "rank 0").row(0, named=True)
    assert (up["bytes"], up["busy_ns"], up["waiting_ns"]) == (2_000_000, 20_000, 12_000)


def shared_ends(messages: list[tuple[int, int, int, int]], bandwidth: int) -> list[Fraction]:
    """When messages (source, target, start, bytes) end that share what each rank sends and what it receives, exactly.

    From moment to moment: the rank whose messages get least gives each of them the same, and so on with the rest.
    """
    left = {k: Fraction(message[3]) for k, message in enumerate(messages)}
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while left:
        running = [k for k in left if messages[k][2] <= now]
        rates: dict[int, Fraction] = {}
        room = {(way, rank): Fraction(bandwidth) for way in (0, 1) for rank in range(9)}
        while len(rates) < len(running):
            asking = {
                port: [k for k in running if k not in rates and messages[k][port[0]] == port[1]]
                for port in room
            }
            port = min((room[port] / len(ks), port) for port, ks in asking.items() if ks)[1]
            for k in asking[port]:
                rates[k] = room[port] / len(asking[port])
            for k in asking[port]:
                for way in (0, 1):
                    if (way, messages[k][way]) != port:
                        room[way, messages[k][way]] -= rates[k]
            room[port] = Fraction(0)
        moments = [now + left[k] / rates[k] for k in running]
        moments += [Fraction(messages[k][2]) for k in left if messages[k][2] > now]
        then = min(moments)
        for k in running:
            left[k] -= rates[k] * (then - now)
            if not left[k]:
                ends[k] = then
                del left[k]
        now = then
    return [ends[k] for k in range(len(messages))]


@pytest.mark.parametrize("seed", range(4))
def test_shared_links_against_exact_fractions(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    messages = []
    for source in range(9):
        for _ in range(chance.randint(1, 3)):
            target = chance.choice([rank for rank in range(9) if rank != source])
            messages.append(
                (source, target, 1000 * chance.randint(0, 30), chance.randint(1, 400) * 1000)
            )
    ranks: list[list[Node]] = [[] for _ in range(9)]
    for tag, (source, target, start, size) in enumerate(messages):
        about = {"comm_size": size, "comm_tag": tag}
        # On a thread each, so that nothing but the network makes them wait.
        ranks[source] += [node(2 * tag + 1, us=start // 1000, is_cpu_op=True, tid=tag)]
        ranks[source] += [send(2 * tag + 2, target, deps=[2 * tag + 1], us=0, **about)]
        ranks[target] += [receive(1000 + tag, source, us=0, **about)]
    answer = run(write_set(tmp_path / "set", *ranks), one_switch(9, 10.0, 0))
    sends = answer.nodes.filter(pl.col("kind") == "send").with_columns(
        tag=pl.col("name").str.slice(1).cast(pl.Int64)
    )
    ends = [
        end - row
        for end, row in zip(
            sends.sort("tag")["end_ns"].to_list(), shared_ends(messages, 10), strict=True
        )
    ]
    assert max(abs(float(off)) for off in ends) <= 3


def test_fair_speeds_by_hand() -> None:
    # Three transfers; the first two share link 0, the last two link 1, which the third alone would half fill.
    share = np.array([[1.0, 0.0], [1.0, 0.5], [0.0, 0.5]])
    speed, held_by = compute_fair_speeds(share)
    assert speed.tolist() == [0.5, 0.5, 1.0]
    assert held_by.tolist() == [0, 0, -1]
    speed, held_by = compute_fair_speeds(np.array([[1.0], [0.2]]))
    assert speed.tolist() == pytest.approx([0.8, 1.0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6))
def test_both_engines_agree_where_nothing_contends(seed: int, tmp_path: Path) -> None:
    recipe = ParallelRecipe(
        data=2,
        tensor=1 + seed % 2,
        pipeline=1 + seed // 3,
        steps=1,
        seed=seed,
        programmatic=seed > 3,
    )
    folder = parallel_job(recipe).run().write(tmp_path / "job")
    graph = link_session(load(folder))
    of, plan = find_operations(graph), build_plan(graph)
    scenario = Scenario.of(graph).copy()
    chance = np.random.default_rng(seed)
    scenario.work_ns = scenario.work_ns * chance.integers(0, 4, scenario.work_ns.size)
    time_ns = compute_recorded_transfers(graph, of) * chance.integers(1, 5, len(of))
    scenario.delay_ns[of.edge] = time_ns[of.operation_of_edge]
    expected = scenario.times(plan)
    number = np.arange(len(of))
    delay = scale_overlap(graph, scenario.work_ns, scenario.delay_ns)
    no_lanes = np.full(graph.nodes.height, -1)
    bundles = LinkBundles(
        np.arange(len(of) + 1), number, np.ones(len(of)), number, number
    )  # a link for each
    result = simulate_contention(
        graph, scenario.work_ns, delay, of, time_ns, number, bundles, no_lanes
    )
    assert (result.times == expected).all()
    assert not result.contended
    one_link = LinkBundles(
        np.arange(len(of) + 1), 0 * number, np.ones(len(of)), number[:1], number[:1]
    )
    shared = simulate_contention(
        graph, scenario.work_ns, delay, of, time_ns, number, one_link, no_lanes
    )
    assert (shared.times >= expected).all()


def test_a_row_of_graphs_moved_about_gives_the_same(tmp_path: Path) -> None:
    """Nothing depends on the order in which nodes and edges stand."""
    home = write_set(
        tmp_path / "set",
        *(
            [node(k, us=1 + (7 * k + r) % 5) for k in range(1, 6)]
            + [collective(10 + k, size=100_000 * k, deps=[k]) for k in range(1, 6)]
            for r in range(4)
        ),
    )
    machine = one_switch(4, 20.0, 100)
    assert run(home, machine).to_dict() == run(home, machine).to_dict()
    graph = run(home).recorded
    assert isinstance(graph, Graph)
    mixed = replace(
        graph,
        edges=graph.edges.sample(fraction=1, shuffle=True, seed=4).sort(
            "target", maintain_order=True
        ),
    )
    of = find_operations(graph)
    assert (
        evaluate_on_network(mixed, find_operations(mixed), serial=True).evaluated.times
        == evaluate_on_network(graph, of, serial=True).evaluated.times
    ).all()


def test_files_do_one_thing_at_a_time_on_a_device(tmp_path: Path) -> None:
    # Four independent nodes and one that waits for the second: first ready, first done.
    home = write_set(
        tmp_path / "set",
        [
            node(1, us=5),
            node(2, us=1),
            node(3, us=2),
            node(4, deps=[2], us=4),
        ],
        [node(1, us=1)],
    )
    answer = run(home)
    spans = {
        row["node"]: (row["start_ns"], row["end_ns"])
        for row in answer.nodes.filter(rank=0).iter_rows(named=True)
    }
    assert list(spans.values()) == [(0, 5_000), (5_000, 6_000), (6_000, 8_000), (8_000, 12_000)]
    assert answer.after_ns == 12_000


def test_who_waits_for_whom(tmp_path: Path) -> None:
    crossed = write_set(
        tmp_path / "crossed",
        [collective(1, pg_name="1"), collective(2, pg_name="2", deps=[1])],
        [collective(1, pg_name="2"), collective(2, pg_name="1", deps=[1])],
        groups={"1": [0, 1], "2": [0, 1]},
    )
    with pytest.raises(CheckError, match=r"deadlock: rank \d: .* waits for .* of rank \d") as error:
        run(crossed)
    assert error.value.slug == "deadlock"
    assert error.value.exit_code == 5
    with pytest.raises(CheckError, match="rank 0 waits for rank 1 at communication 2"):
        run(
            write_set(tmp_path / "count", [collective(1), collective(2, deps=[1])], [collective(1)])
        )
    with pytest.raises(CheckError, match="rank 1 waits for a message from rank 0"):
        run(write_set(tmp_path / "message", [node(1)], [receive(1, 0)]))


def test_what_cannot_be_simulated(tmp_path: Path) -> None:
    two = write_set(tmp_path / "two", [collective(1)], [collective(1)])
    with pytest.raises(UsageError) as size:
        run(two, one_switch(3, 1.0, 0))
    assert size.value.slug == "machine-size"
    with pytest.raises(UsageError, match="--set is of a machine"):
        run(two, overrides=["network.0.bandwidth=1"])
    with pytest.raises(InputError, match="names rank 7") as outside:
        run(
            write_set(
                tmp_path / "outside", [collective(1, pg_name="1")], [node(1)], groups={"1": [0, 7]}
            )
        )
    assert outside.value.slug == "group-outside-world"
    with pytest.raises(InputError) as differ:
        run(write_set(tmp_path / "differ", [collective(1)], [collective(1, "ALL_GATHER")]))
    assert differ.value.slug == "collective-mismatch"
    with pytest.raises(UsageError, match="--step is of recorded runs"):
        run(two, step=1)


def test_another_device_leaves_an_interval(tmp_path: Path) -> None:
    folder = parallel_job(ParallelRecipe(data=2, steps=1)).run().write(tmp_path / "job")
    here = run(folder)
    there = run(folder, one_switch(2, 100.0, 1_000), device="A100 SXM 80GB", host_factor=2.0)
    assert there.low_ns is not None
    assert there.high_ns is not None
    assert here.after_ns < there.low_ns <= there.after_ns <= there.high_ns
    assert there.device is not None
    assert there.device.device == "A100 SXM 80GB"
    assert there.machine == "a switch with A100 SXM 80GB"
    same = run(folder, device="H100 SXM")
    assert same.after_ns == here.after_ns
    slow = replace(one_switch(2, 100.0, 1_000), slow=(SpeedFactor((1,), device=0.5),))
    even = run(folder, one_switch(2, 100.0, 1_000))
    uneven = run(folder, slow)
    compute = {row["rank"]: row["compute_ns"] for row in uneven.ranks.to_dicts()}
    assert compute[0] == even.ranks["compute_ns"][0]
    assert compute[1] == pytest.approx(2 * even.ranks["compute_ns"][1], rel=0.001)


def test_works_that_no_longer_wait_for_each_other_leave_no_order(tmp_path: Path) -> None:
    """Before, one work of a rank waits for another; on a slow network they come apart."""
    home = write_set(
        tmp_path / "set",
        [collective(1, size=1_000_000, us=1), node(2, us=50, deps=[1]), node(3, us=20)],
        [collective(1, size=1_000_000, us=1), node(2, us=1, deps=[1])],
    )
    answer = run(home, one_switch(2, 10.0, 0))
    assert answer.before_ns == 20_000 + 50_000
    assert answer.after_ns == 100_000 + 50_000
    assert run(home).became_critical.is_empty()
    names = answer.became_critical.select("what", "name").rows()
    assert ("delay", "n1") in names


def test_a_run_its_graph_and_its_files_are_one_workload(tmp_path: Path) -> None:
    folder = parallel_job(ParallelRecipe(data=2, tensor=2, steps=1)).run().write(tmp_path / "job")
    graph = link_session(load(folder))
    graph.save(tmp_path / "job.graph")
    write_ranks(graph, tmp_path / "files")
    machine = one_switch(4, 20.0, 2_000)
    answers = [
        run(workload, machine)
        for workload in (folder, tmp_path / "job.graph", tmp_path / "files", graph)
    ]
    for answer in answers[1:]:
        assert (answer.before_ns, answer.after_ns) == (answers[0].before_ns, answers[0].after_ns)
        assert answer.identity_error == answers[0].identity_error
        assert answer.ranks.equals(answers[0].ranks)
        assert answer.links.equals(answers[0].links)


@pytest.mark.parametrize("seed", range(20))
def test_one_device_is_busy_for_the_sum_of_its_work_whatever_ids_and_zeros_there_are(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 40)
    ids = chance.sample(range(1, 1000), count)
    work = [chance.choice((0, 0, 1, 7)) for _ in range(count)]
    nodes = [
        node(ids[k], us=work[k], deps=chance.sample(ids[:k], min(k, chance.randint(0, 2))))
        for k in range(count)
    ]
    chance.shuffle(nodes)
    answer = run(write_set(tmp_path / "set", nodes))
    assert answer.after_ns == 1000 * sum(work)


@pytest.mark.parametrize("senders", [1, 2, 3, 7])
def test_messages_to_one_rank_share_its_link_and_not_the_latency(
    tmp_path: Path, senders: int
) -> None:
    size, latency = 1_000_000, 1_000
    messages = [receive(k, k, comm_size=size) for k in range(1, senders + 1)]
    home = write_set(tmp_path / "set", messages, *[[send(1, 0, comm_size=size)]] * senders)
    machine = Machine((Dimension("switch", senders + 1, 1.0, float(latency)),))
    assert run(home, machine).after_ns == senders * size + 2 * latency


def test_a_workload_larger_than_the_free_memory_is_refused_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node and each dependency of the graph counts with 400 bytes."""
    home = write_set(tmp_path / "set", [node(1, us=5), node(2, deps=[1], us=5)])
    graph = open_input(home).graph
    needed = 400 * (graph.nodes.height + graph.edges.height)
    free = {"bytes": needed - 1}
    monkeypatch.setattr("traceloom.system.process.get_free_memory", lambda: free["bytes"])
    with pytest.raises(UsageError, match=r"\d nodes and \d dependencies need .* kB of memory") as e:
        run(home)
    assert e.value.slug == "no-memory-left"
    free["bytes"] = needed
    assert run(home).after_ns == 10_000
