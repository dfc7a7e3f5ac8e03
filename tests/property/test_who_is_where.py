"""Whom the ranks of a job wait for by their stacks: beside a second reading of what the documentation says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, strategies as st

from traceloom.agent.hangs.stacks import GroupedStacks, group_stacks
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.profilers.py_spy import StackDump, ThreadStack
from traceloom.system.python_frames import Frame
from traceloom.system.units import format_ranges

C10D = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"
TRAIN = Frame("train", "/job/train.py", 20)
# Where a rank may be -> its stack, innermost last. What is no place of the program's own is a wait.
WAITS = {
    "all_reduce": (TRAIN, Frame("all_reduce", C10D, 9)),
    "barrier": (TRAIN, Frame("step", "/job/train.py", 31), Frame("barrier", C10D, 40)),
    "cudaDeviceSynchronize": (TRAIN, Frame("cudaDeviceSynchronize", "libcudart.so", 0)),
}
PLACES = {
    "load": (
        TRAIN,
        Frame("load", "/job/data.py", 31),
        Frame("get", "/usr/lib/python3.11/queue.py", 171),
    ),
    "forward": (TRAIN, Frame("forward", "/job/model.py", 7)),
    "save": (
        TRAIN,
        Frame("save", "/job/train.py", 90),
        Frame("write", "/usr/lib/python3/dist-packages/x.py", 3),
    ),
}
SPOTS = st.lists(st.sampled_from([*WAITS, *PLACES]), min_size=1, max_size=9)


def job(
    spots: Sequence[str], pids: Sequence[int], order: Sequence[int], blind: int | None = None
) -> GroupedStacks:
    """The stacks of a job of which rank N is at `spots[N]`; its processes are listed in some order.

    Of the rank `blind` there is no stack.
    """
    processes = [
        Process(
            key=f"{pids[rank]}@1",
            pid=pids[rank],
            start_ticks=1,
            started_ns=1,
            parent_pid=1,
            uid=1,
            command="",
            owner=Owner(job="run1", rank=rank),
        )
        for rank in order
    ]
    dumps = {
        pids[rank]: StackDump(
            time_ns=1,
            pid=pids[rank],
            rank=rank,
            native=True,
            threads=(
                ThreadStack(
                    id=pids[rank],
                    name="MainThread",
                    active=False,
                    frames=(WAITS | PLACES)[spots[rank]],
                ),
                ThreadStack(id=9_000_000 + rank, name="pin", active=True, frames=PLACES["load"]),
            ),
        )
        for rank in order
        if rank != blind
    }
    return group_stacks(
        processes, dumps, {} if blind is None else {pids[blind]: "permission denied"}
    )


def elsewhere(spots: Sequence[str]) -> set[int]:
    """As the documentation says it: who does not wait, else who is in the minority; what is even is not decided."""
    idle = {rank for rank, spot in enumerate(spots) if spot in PLACES}
    if 0 < len(idle) < len(spots):
        return idle
    (first, most), *others = Counter(spots).most_common()
    if not others or others[0][1] == most:
        return set()
    return {rank for rank, spot in enumerate(spots) if spot != first}


@given(SPOTS, st.data())
def test_who_is_elsewhere_is_who_the_others_wait_for(spots: list[str], data: st.DataObject) -> None:
    ranks = range(len(spots))
    pids = [100 + 7 * rank for rank in ranks]
    stacks = job(spots, pids, ranks)
    mains = [group for group in stacks.groups if group.role == "rank"]
    assert {rank for group in mains if group.elsewhere for rank in group.ranks} == elsewhere(spots)
    # Each rank stands in one group, with those that are where it is, and nobody else.
    assert sorted(rank for group in mains for rank in group.ranks) == list(ranks)
    for group in mains:
        assert len({spots[rank] for rank in group.ranks}) == 1
        assert group.waits_in == (spots[group.ranks[0]] if spots[group.ranks[0]] in WAITS else "")
    assert len(mains) == len(set(spots))
    # Those elsewhere come first, also in the sentence, and everybody is in it.
    flags = [group.elsewhere for group in mains]
    assert flags == sorted(flags, reverse=True)
    told = re.findall(r"ranks? ([\d, -]+) (?:is|are|waits|wait) in", stacks.sentence)
    assert sorted(rank for part in told for rank in listed(part)) == list(ranks)
    # Nothing of it depends on pids, or on the order in which processes are listed.
    moved = job(spots, data.draw(st.permutations(pids)), data.draw(st.permutations(list(ranks))))
    assert moved.sentence == stacks.sentence
    assert [(group.role, group.ranks, group.frames, group.elsewhere) for group in moved.groups] == [
        (group.role, group.ranks, group.frames, group.elsewhere) for group in stacks.groups
    ]


def listed(text: str) -> list[int]:
    """The numbers that a text like `0-3, 5` means."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(", ")]
    return [number for part in ends for number in range(part[0], part[-1] + 1)]


@given(st.sets(st.integers(0, 60)))
def test_numbers_are_told_as_they_are(values: set[int]) -> None:
    text = format_ranges(values)
    assert (listed(text) if text else []) == sorted(values)
    assert all(later - earlier > 1 for earlier, later in ends_of_ranges(text))


def ends_of_ranges(text: str) -> list[tuple[int, int]]:
    """First and last of each range, which has three numbers at least."""
    return [(int(first), int(last)) for first, last in re.findall(r"(\d+)-(\d+)", text)]


@given(SPOTS, st.data())
def test_a_rank_that_is_not_seen_changes_nothing_of_what_is_said_of_the_others(
    spots: list[str], data: st.DataObject
) -> None:
    ranks = list(range(len(spots)))
    blind = data.draw(st.sampled_from(ranks))
    others = [rank for rank in ranks if rank != blind]
    pids = [100 + rank for rank in ranks]
    stacks = job(spots, pids, ranks, blind)
    assert [(each.pid, each.rank, each.reason) for each in stacks.unseen] == [
        (pids[blind], blind, "permission denied")
    ]
    assert stacks.sentence.endswith(f"rank {blind} is not seen: permission denied")
    told = {rank for group in stacks.groups if group.elsewhere for rank in group.ranks}
    left = [spots[rank] for rank in others]
    assert told == ({others[at] for at in elsewhere(left)} if left else set())
