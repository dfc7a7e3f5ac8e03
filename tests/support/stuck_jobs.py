"""Jobs that stand still, with the dumps of their flight recorders and the rank that is to blame.

Ranks form a grid. Each computes with its row, sends messages down its column, and meets its column and
at times all others in collectives. The host of a rank queues calls ahead of its device; the device takes
them in their order, and a call ends when all that take part have come to it.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, NamedTuple

KINDS = ("stopped", "dead", "failed", "held", "other call", "other size", "silent", "network")
Row = dict[str, Any]


class Call(NamedTuple):
    """A collective, or a message between two ranks of a group (`pair`), of all that take part."""

    group: str
    operation: str
    ranks: tuple[int, ...]
    pair: tuple[int, int] | None = None


class StuckJob(NamedTuple):
    """Rank -> its dump, the ranks that left none, and who is to blame (None: nobody can tell)."""

    dumps: dict[int, Row]
    absent: tuple[int, ...]
    culprit: int | None


def list_calls(
    rows: int, columns: int, iterations: int
) -> tuple[list[Call], dict[str, tuple[int, ...]]]:
    """Returns all calls in an order that is that of each rank, and the members of each group."""
    groups = {"0": tuple(range(rows * columns))}
    groups |= {f"row{row}": tuple(range(row * columns, (row + 1) * columns)) for row in range(rows)}
    groups |= {f"column{at}": tuple(range(at, rows * columns, columns)) for at in range(columns)}
    calls: list[Call] = []
    for iteration in range(iterations):
        for row in range(rows):
            name = f"row{row}"
            calls += [Call(name, kind, groups[name]) for kind in ("all_reduce", "reduce_scatter")]
            if row + 1 < rows:
                for column in range(columns):
                    pair = (row * columns + column, (row + 1) * columns + column)
                    calls.append(Call(f"column{column}", "message", pair, (row, row + 1)))
        calls += [Call(f"column{at}", "all_gather", groups[f"column{at}"]) for at in range(columns)]
        if iteration % 2:
            calls.append(Call("0", "all_reduce", groups["0"]))
    return calls, groups


def make_stuck_job(kind: str, rows: int, columns: int, seed: int) -> StuckJob:
    """Returns a job in which one rank is to blame for what `kind` says, from its middle on."""
    chance = Random(seed)
    calls, groups = list_calls(rows, columns, 6)
    calls_by_rank: dict[int, list[int]] = {rank: [] for rank in groups["0"]}
    for number, call in enumerate(calls):
        for rank in call.ranks:
            calls_by_rank[rank].append(number)
    culprit = chance.choice(groups["0"][columns:] if kind == "silent" else groups["0"])
    if kind == "silent":
        culprit -= columns  # it has somebody to send to

    def is_wanted(call: Call) -> bool:
        if kind == "silent":
            return call.pair is not None and call.ranks[0] == culprit
        if kind == "other size" and call.operation != "all_reduce":
            return False
        return call.pair is None and (len(call.ranks) > 2 or not kind.startswith("other"))

    own = calls_by_rank[culprit]
    middle = range(len(own) // 3, 2 * len(own) // 3)
    at = chance.choice([place for place in middle if is_wanted(calls[own[place]])])
    ahead = chance.randint(0, 12)
    limits = {rank: len(numbers) for rank, numbers in calls_by_rank.items()}
    blocked = -1  # a call that does not end
    if kind in {"stopped", "dead", "silent"}:
        limits[culprit] = at
    elif kind == "failed":
        limits[culprit] = at + chance.randint(1, 8)
    else:
        blocked = own[at]
    done = play(calls, calls_by_rank, limits, ahead, blocked)
    queued = {rank: min(limits[rank], done[rank] + 1 + ahead) for rank in done}
    if kind == "failed":  # the device has taken part, and nobody on its host learns of it
        done[culprit] = at
    dumps = {}
    for rank in groups["0"]:
        held = rank == culprit and kind == "held"
        dumps[rank] = write_dump(
            [calls[number] for number in calls_by_rank[rank][: queued[rank]]],
            {name: members for name, members in groups.items() if rank in members},
            rank,
            done[rank],
            started=not held and not (rank == culprit and kind == "failed"),
            clock_ns=chance.randint(0, 2_000_000),
        )
    if kind in {"other call", "other size"}:
        change: Row = {"profiling_name": "nccl:broadcast"}
        if kind == "other size":
            change = {"input_sizes": [[7]]}
        dumps[culprit]["entries"][at] |= change
    absent = (culprit,) if kind == "dead" else ()
    for rank in absent:
        del dumps[rank]
    return StuckJob(dumps, absent, None if kind == "network" else culprit)


def play(
    calls: list[Call],
    calls_by_rank: dict[int, list[int]],
    limits: dict[int, int],
    ahead: int,
    blocked: int,
) -> dict[int, int]:
    """Returns how many calls the device of each rank has ended when nothing goes on any more."""
    done = dict.fromkeys(calls_by_rank, 0)
    waiting: Counter[int] = Counter()
    reached = list(calls_by_rank)
    while reached:
        rank = reached.pop()
        if done[rank] >= limits[rank]:
            continue
        number = calls_by_rank[rank][done[rank]]
        waiting[number] += 1
        if waiting[number] == len(calls[number].ranks) and number != blocked:
            for member in calls[number].ranks:
                done[member] += 1
                reached.append(member)
    return done


def write_dump(
    calls: list[Call],
    groups: dict[str, tuple[int, ...]],
    rank: int,
    done: int,
    *,
    started: bool,
    clock_ns: int,
) -> Row:
    """Returns what the flight recorder of a rank holds, as NCCL's of torch 2.9 writes it."""
    numbers: Counter[Any] = Counter()
    entries: list[Row] = []
    for place, call in enumerate(calls):
        key = call.pair or call.group
        numbers[key] += 1
        name = call.operation
        if call.pair:
            sender, receiver = call.pair
            name = f"send {sender}->{receiver}"
            if rank == call.ranks[1]:
                name = f"recv {receiver}<-{sender}"
        state = (
            "completed" if place < done else "started" if place == done and started else "scheduled"
        )
        entries.append(
            {
                "record_id": place,
                "process_group": [call.group, "default_pg" if call.group == "0" else call.group],
                "pg_id": call.group,
                "collective_seq_id": 0 if call.pair else numbers[key],
                "p2p_seq_id": numbers[key] if call.pair else 0,
                "is_p2p": call.pair is not None,
                "profiling_name": f"nccl:{name}",
                "input_sizes": [[4]],
                "time_created_ns": 10**18 + place * 1_000_000 + clock_ns,
                "state": state,
                "time_discovered_started_ns": None if state == "scheduled" else 1,
                "retired": place < done,
            }
        )
    return {
        "version": "2.9",
        "entries": entries,
        "pg_config": {name: {"ranks": str(list(members))} for name, members in groups.items()},
        "pg_status": {
            str(name): {"last_enqueued_collective": number}
            for name, number in numbers.items()
            if isinstance(name, str)
        },
    }
