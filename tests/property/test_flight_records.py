"""Jobs that are played to where they stand still: the flight records of their ranks name who stopped."""

from __future__ import annotations

import json
from random import Random
from typing import Any, NamedTuple

from hypothesis import assume, given, strategies as st

from traceloom.analyze.stuck_jobs import FlightVerdict, find_late_ranks
from traceloom.formats.flight_recorder import read_flight_record

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter")


class Program(NamedTuple):
    """Groups of ranks (the first is of all), and collectives in their order: (group, operation)."""

    groups: list[tuple[int, ...]]
    collectives: list[tuple[int, str]]

    def of(self, rank: int) -> list[int]:
        """The collectives that a rank takes part in."""
        return [at for at, (group, _) in enumerate(self.collectives) if rank in self.groups[group]]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = range(draw(st.integers(2, 6)))
    several = st.lists(st.sampled_from(list(ranks)), min_size=2, unique=True).map(
        lambda of: tuple(sorted(of))
    )
    groups = [tuple(ranks), *draw(st.lists(several, max_size=3))]
    collective = st.tuples(st.integers(0, len(groups) - 1), st.sampled_from(OPERATIONS))
    return Program(groups, draw(st.lists(collective, min_size=1, max_size=25)))


def played(program: Program, stopped: int, before: int) -> tuple[list[int], dict[int, int]]:
    """Collectives that all went through, and where each rank waits, when one stops before its collective `before`.

    Every rank takes its collectives in their order, and goes on when all of the group are there.
    """
    todo = {rank: program.of(rank) for rank in program.groups[0]}
    done: list[int] = []

    def waits_in(rank: int) -> int | None:
        rest = [at for at in todo[rank] if at not in done]
        has_stopped = rank == stopped and (not rest or len(todo[rank]) - len(rest) >= before)
        return None if has_stopped or not rest else rest[0]

    while True:
        entered = {rank: at for rank in todo if (at := waits_in(rank)) is not None}
        for at in sorted(set(entered.values())):
            if all(entered.get(rank) == at for rank in program.groups[program.collectives[at][0]]):
                done.append(at)
                break
        else:
            return done, entered


def entered_at(
    program: Program, done: list[int], waiting: dict[int, int], chance: Random
) -> dict[tuple[int, int], int]:
    """(rank, collective) -> when it was queued, ns: each rank computes for some time before each."""
    clocks, times = dict.fromkeys(program.groups[0], 0), {}
    for at in done:
        members = program.groups[program.collectives[at][0]]
        for rank in members:
            times[rank, at] = clocks[rank] + chance.randint(1, 10_000)
        clocks |= dict.fromkeys(members, max(times[rank, at] for rank in members))
    return times | {
        (rank, at): clocks[rank] + chance.randint(1, 10_000) for rank, at in waiting.items()
    }


def record(
    program: Program,
    rank: int,
    done: list[int],
    times: dict[tuple[int, int], int],
    most: int = 1000,
) -> dict[str, Any]:
    """As torch 2.13 writes it as JSON; a ring that holds the last `most` entries alone."""
    entries, numbers = [], dict.fromkeys(range(len(program.groups)), 0)
    for at in program.of(rank):
        if (rank, at) not in times:
            break
        group, operation = program.collectives[at]
        numbers[group] += 1
        entries.append(
            {
                "process_group": [str(group), "default_pg" if not group else "undefined"],
                "pg_id": group,
                "collective_seq_id": numbers[group],
                "p2p_seq_id": 0,
                "is_p2p": False,
                "profiling_name": f"nccl:{operation}",
                "time_created_ns": times[rank, at],
                "time_discovered_started_ns": times[rank, at] + 1,
                "time_discovered_completed_ns": times[rank, at] + 2 if at in done else None,
                "retired": at in done,
                "state": "completed" if at in done else "started",
            }
        )
    return {
        "version": "2.10",
        "entries": entries[-most:],
        "pg_status": {
            str(group): {"last_enqueued_collective": number}
            for group, number in numbers.items()
            if number
        },
        "pg_config": {
            str(at): {"ranks": str(list(members))} for at, members in enumerate(program.groups)
        },
    }


def verdict(records: dict[int, dict[str, Any]], order: list[int]) -> FlightVerdict:
    return find_late_ranks(
        [read_flight_record(json.dumps(records[rank]).encode(), rank) for rank in order]
    )


@given(programs(), st.data(), st.randoms(use_true_random=False), st.sampled_from([1000, 12]))
def test_who_stopped_is_named_whoever_waits_for_whom(
    program: Program, data: st.DataObject, chance: Random, most: int
) -> None:
    stopped = data.draw(st.sampled_from(program.groups[0]))
    before = data.draw(st.integers(0, len(program.of(stopped))))
    done, waiting = played(program, stopped, before)
    times = entered_at(program, done, waiting, chance)
    records = {rank: record(program, rank, done, times, most) for rank in program.groups[0]}
    result = verdict(records, data.draw(st.permutations(program.groups[0])))
    assert result.waits == {rank: program.collectives[at][1] for rank, at in waiting.items()}
    if not waiting:
        assert result.kind == "nothing"
        return
    # Also where it has never used a group, so that its own record does not know of it: the others' do.
    assert (result.kind, result.ranks) == ("behind", (stopped,))
    blocked = {
        at for at in waiting.values() if stopped in program.groups[program.collectives[at][0]]
    }
    named = {
        (str(group), operation, sum(of == group for of, _ in program.collectives[: at + 1]))
        for at in blocked
        for group, operation in [program.collectives[at]]
    }
    assert (result.group, result.operation, result.sequence) in named
    # Neither when it was nor in which order the records come matters.
    later = {entering: at_ns + 10**15 for entering, at_ns in times.items()}
    assert (
        verdict({rank: record(program, rank, done, later, most) for rank in records}, list(records))
        == result
    )


@given(st.integers(3, 6), st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=10), st.data())
def test_who_does_another_collective_than_all_others_is_named(
    ranks: int, operations: list[str], data: st.DataObject
) -> None:
    odd, at = data.draw(st.integers(0, ranks - 1)), len(operations) - 1
    other = data.draw(st.sampled_from(OPERATIONS))
    assume(other != operations[at])
    members = tuple(range(ranks))
    usual = Program([members], [(0, operation) for operation in operations])
    strange = Program([members], [*usual.collectives[:at], (0, other)])
    done = list(range(at))
    times = {(rank, number): 1000 * number for rank in members for number in range(at + 1)}
    records = {
        rank: record(strange if rank == odd else usual, rank, done, times) for rank in members
    }
    result = verdict(records, list(data.draw(st.permutations(members))))
    assert (result.kind, result.ranks, result.sequence) == ("mismatch", (odd,), at + 1)
    assert f"`{other}`" in result.sentence
    assert f"`{operations[at]}`" in result.sentence


def test_the_order_of_records_decides_nothing_where_ranks_were_queued_at_different_times() -> None:
    """0 misses in both groups; 1 was queued there before and after the others."""
    program = Program([(0, 1, 2, 3), (0, 1), (0, 2, 3)], [(1, "all_reduce"), (2, "broadcast")])
    times = {(1, 0): 20, (2, 1): 30, (3, 1): 10}
    records = {rank: record(program, rank, [], times) for rank in program.groups[0]}
    results = [verdict(records, order) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1])]
    assert results[0] == results[1] == results[2]
    assert (results[0].ranks, results[0].operation) == (
        (0,),
        "broadcast",
    )  # which was queued first of all
