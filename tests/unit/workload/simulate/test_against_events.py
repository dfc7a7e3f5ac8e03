"""Random workloads in files against a plain event-driven simulation: who starts when, who waits, what a rank's time is."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pytest

from support.workload import collective, node, receive, send, write_set
from traceloom.formats.chakra.et_pb2 import Node
from traceloom.workload.collective_algorithms import KINDS_BY_ALGORITHM
from traceloom.workload.simulate.machine import AlgorithmRule, Dimension, Machine
from traceloom.workload.simulate.native import run
from traceloom.workload.simulate.result import Simulation

RATE, LATENCY = 8, 500  # B/ns and ns: of sizes that they divide every time is whole
RULES = tuple(AlgorithmRule(kind, "direct") for kind in KINDS_BY_ALGORITHM["direct"])  # type: ignore[arg-type]


@dataclass
class Made:
    """One node of a rank: what it waits for, and how long it computes or how much it moves."""

    number: int
    us: int = 0
    kind: str = ""  # of a collective
    size: int = 0
    group: str = ""
    deps: list[int] = field(default_factory=list)

    def node(self) -> Node:
        if self.kind:
            named = {"pg_name": self.group} if self.group else {}
            return collective(self.number, self.kind.upper(), self.size, self.deps, us=3, **named)
        return node(self.number, us=self.us, deps=self.deps)


def transfer(made: Made, ranks: int) -> int:
    """Messages between all pairs at once, each over a link of its own."""
    part = made.size if made.kind == "all_gather" else made.size // ranks
    return (2 if made.kind == "all_reduce" else 1) * (LATENCY + part // RATE)


def workload(seed: int, ranks: int, groups: dict[str, list[int]]) -> list[list[Made]]:
    """Computation that waits for some of what came before; collectives one after the other, in the order of all."""
    chance = random.Random(seed)
    plan = []
    for _ in range(chance.randint(2, 6)):
        kind = chance.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
        size = 48 * RATE * chance.randint(0, 125)
        plan.append((kind, size, chance.choice(["", *groups])))
    jobs = []
    for rank in range(ranks):
        own: list[Made] = []
        last = 0  # the collective before
        for kind, size, group in [*plan, ("", 0, "")]:
            for _ in range(chance.randint(0, 4)):
                deps = sorted(
                    chance.sample(range(1, len(own) + 1), min(len(own), chance.randint(0, 2)))
                )
                own.append(Made(len(own) + 1, us=chance.randint(0, 9), deps=deps))
            if kind and (not group or rank in groups[group]):
                deps = {last, *chance.sample(range(1, len(own) + 1), min(len(own), 1))} - {0}
                own.append(Made(len(own) + 1, kind=kind, size=size, group=group, deps=sorted(deps)))
                last = own[-1].number
        jobs.append(own or [Made(1, us=1)])
    return jobs


@dataclass
class Events:
    """What became of a workload."""

    start: dict[tuple[int, int], int] = field(default_factory=dict)
    end: dict[tuple[int, int], int] = field(default_factory=dict)
    meetings: list[tuple[str, int, int, int]] = field(
        default_factory=list
    )  # kind, first and last arrival, end


def simulated(
    jobs: list[list[Made]], groups: dict[str, list[int]], only: str | None = None
) -> Events:
    """A device computes one node at a time, what is ready first; collectives begin with their last member.

    With `only` one side, what the other does takes no time.
    """
    out = Events()
    waits = {(rank, made.number): len(made.deps) for rank, own in enumerate(jobs) for made in own}
    ready = dict.fromkeys(waits, 0)
    free = [0] * len(jobs)
    come: dict[tuple[str, int], dict[tuple[int, int], int]] = {}
    turn: dict[tuple[int, str], int] = {}
    queue: list[tuple[int, bool, int, int]] = []  # of equal times communications come first

    def push(key: tuple[int, int]) -> None:
        heapq.heappush(queue, (ready[key], not jobs[key[0]][key[1] - 1].kind, *key))

    for key, count in waits.items():
        if not count:
            push(key)

    def over(key: tuple[int, int], at: int) -> None:
        out.end[key] = at
        rank, number = key
        for made in jobs[rank]:
            if number in made.deps:
                follower = (rank, made.number)
                ready[follower] = max(ready[follower], at)
                waits[follower] -= 1
                if not waits[follower]:
                    push(follower)

    while queue:
        now, _, rank, number = heapq.heappop(queue)
        key = rank, number
        made = jobs[rank][number - 1]
        if not made.kind:
            out.start[key] = max(now, free[rank])
            free[rank] = out.start[key] + (0 if only == "communication" else 1000 * made.us)
            over(key, free[rank])
            continue
        out.start[key] = now
        turn[rank, made.group] = turn.get((rank, made.group), 0) + 1
        arrivals = come.setdefault((made.group, turn[rank, made.group]), {})
        arrivals[key] = now
        members = groups.get(made.group, range(len(jobs)))
        if len(arrivals) == len(members):
            end = max(arrivals.values()) + (
                0 if only == "compute" else transfer(made, len(members))
            )
            out.meetings.append((made.kind, min(arrivals.values()), max(arrivals.values()), end))
            for each in arrivals:
                over(each, end)
    return out


def covered(spans: list[tuple[int, int]]) -> set[int]:
    """What spans cover, in pieces of 4 ns: all times are multiples of that."""
    return {at for start, end in spans for at in range(start // 4, end // 4)}


def answer_of(
    home: Path, jobs: list[list[Made]], groups: dict[str, list[int]], only: str | None = None
) -> Simulation:
    machine = Machine((Dimension("fully-connected", len(jobs), RATE, LATENCY),), algorithms=RULES)
    home = write_set(home, *([made.node() for made in own] for own in jobs), groups=groups)
    return run(home, machine, only=only)


GROUPS: dict[int, dict[str, list[int]]] = {
    2: {},
    3: {"5": [0, 2]},
    4: {"5": [0, 1], "6": [1, 2, 3]},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(9))
def test_everything_happens_when_the_events_say(seed: int, tmp_path: Path) -> None:
    ranks = 2 + seed % 3
    groups = GROUPS[ranks]
    jobs = workload(seed, ranks, groups)
    expected = simulated(jobs, groups)
    answer = answer_of(tmp_path / "set", jobs, groups)
    names = [(row["rank"], int(row["name"][1:])) for row in answer.nodes.iter_rows(named=True)]
    assert dict(zip(names, answer.nodes["end_ns"], strict=True)) == expected.end
    assert dict(zip(names, answer.nodes["start_ns"], strict=True)) == expected.start
    assert answer.after_ns == max(expected.end.values())
    calls = answer.collectives.filter(pl.col("ranks") > 1)
    assert sorted(
        zip(
            calls["kind"],
            calls["start_ns"],
            calls["start_ns"] + calls["waiting_ns"],
            calls["end_ns"],
            strict=True,
        )
    ) == sorted(expected.meetings)


@pytest.mark.parametrize("only", ["compute", "communication"])
@pytest.mark.parametrize("seed", range(3))
def test_of_one_side_the_other_takes_no_time_on_any_machine(
    seed: int, only: str, tmp_path: Path
) -> None:
    ranks = 2 + seed % 3
    jobs = workload(300 + seed, ranks, GROUPS[ranks])
    expected = simulated(jobs, GROUPS[ranks], only)
    answer = answer_of(tmp_path / "set", jobs, GROUPS[ranks], only)
    assert answer.after_ns == max(expected.end.values())
    names = [(row["rank"], int(row["name"][1:])) for row in answer.nodes.iter_rows(named=True)]
    assert dict(zip(names, answer.nodes["end_ns"], strict=True)) == expected.end
    assert (answer.links.height > 0) == (only == "communication")
    assert f"{only} alone" in answer.identity


@pytest.mark.parametrize("seed", range(3))
def test_the_time_of_a_rank_is_divided_as_its_spans_lie(seed: int, tmp_path: Path) -> None:
    ranks = 2 + seed % 3
    groups = GROUPS[ranks]
    jobs = workload(100 + seed, ranks, groups)
    events = simulated(jobs, groups)
    answer = answer_of(tmp_path / "set", jobs, groups)
    for row in answer.ranks.iter_rows(named=True):
        rank = row["rank"]
        spans: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for made in jobs[rank]:
            key = (rank, made.number)
            spans[bool(made.kind)].append((events.start[key], events.end[key]))
        computing, communicating = covered(spans[False]), covered(spans[True])
        assert row["compute_ns"] == 4 * len(computing)
        assert row["communication_ns"] == 4 * len(communicating)
        assert row["exposed_communication_ns"] == 4 * len(communicating - computing)
        assert row["end_ns"] == max(end for _, end in spans[True] + spans[False])
        assert row["other_ns"] == row["end_ns"] - 4 * len(communicating | computing)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_ids_and_the_order_of_independent_files_do_not_matter(seed: int, tmp_path: Path) -> None:
    """Ranks exchanged are ranks exchanged in the answer; ids far apart are ids all the same."""
    jobs = workload(200 + seed, 3, {})
    answer = answer_of(tmp_path / "set", jobs, {})
    mirrored = answer_of(tmp_path / "mirrored", jobs[::-1], {})
    assert mirrored.after_ns == answer.after_ns
    swapped = mirrored.ranks.sort("rank", descending=True)
    assert swapped.drop("rank").equals(answer.ranks.drop("rank"))
    apart = [
        [
            Made(
                7 * made.number,
                made.us,
                made.kind,
                made.size,
                made.group,
                [7 * dep for dep in made.deps],
            )
            for made in own
        ]
        for own in jobs
    ]
    other = answer_of(tmp_path / "apart", apart, {})
    assert other.after_ns == answer.after_ns
    assert other.nodes["end_ns"].to_list() == answer.nodes["end_ns"].to_list()


@pytest.mark.parametrize("seed", range(3))
def test_messages_arrive_when_both_ends_are_there(seed: int, tmp_path: Path) -> None:
    """Pairs of ranks of their own, so that no link is shared: the k-th send of a tag is the k-th receive."""
    chance = random.Random(seed)
    sender: list[Node] = []
    receiver: list[Node] = []
    clock = [0, 0]
    ends = []
    for number in range(1, 6):
        size = RATE * chance.randint(0, 3000)
        works = [chance.randint(0, 12), chance.randint(0, 12)]
        before = [] if number == 1 else [2 * number - 2]
        sender += [
            node(2 * number - 1, us=works[0], deps=before),
            send(2 * number, 1, deps=[2 * number - 1], comm_size=size, comm_tag=number % 2, us=1),
        ]
        receiver += [
            node(2 * number - 1, us=works[1], deps=before),
            receive(
                2 * number, 0, deps=[2 * number - 1], comm_size=size, comm_tag=number % 2, us=1
            ),
        ]
        clock = [at + 1000 * us for at, us in zip(clock, works, strict=True)]
        end = max(clock) + LATENCY + size // RATE
        ends.append(end)
        clock = [end, end]
    machine = Machine((Dimension("fully-connected", 2, RATE, LATENCY),))
    answer = run(write_set(tmp_path / "set", sender, receiver), machine)
    received = answer.nodes.filter(pl.col("kind") == "receive").sort("end_ns")
    assert received["end_ns"].to_list() == ends
    assert answer.collectives["kind"].unique().to_list() == ["send"]
    assert answer.after_ns == ends[-1]
