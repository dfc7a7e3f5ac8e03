"""Equal stacks together, and which rank is elsewhere than the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from support.devices import ByHand
from support.host_tree import HostTree
from traceloom.agent.accelerators.backend import TimeLimitedBackend
from traceloom.agent.accelerators.collector import AcceleratorCollector
from traceloom.agent.hangs.stacks import (
    GroupedStacks,
    find_waiting_call,
    group_stacks,
)
from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.ownership.resolver import OwnedProcessCollector
from traceloom.agent.profilers.py_spy import StackDump, ThreadStack
from traceloom.system.python_frames import Frame
from traceloom.system.units import format_ranges

TORCH = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
TRAIN = Frame("train", "/home/anna/train.py", 20)
REDUCING = (
    TRAIN,
    Frame("wrapper", TORCH.replace("distributed_c10d", "c10d_logger"), 83),
    Frame("all_reduce", TORCH, 9),
)
IN_BARRIER = (TRAIN, Frame("barrier", TORCH, 40))
LOADING = (
    TRAIN,
    Frame("load_batch", "/home/anna/data.py", 31),
    Frame("get", "/usr/lib/python3.11/queue.py", 171),
)
COMPUTING = (TRAIN, Frame("forward", "/home/anna/model.py", 7))
WAITING = (
    TRAIN,
    Frame("c10d::Work::wait", "libtorch_cpu.so", 0),
    Frame("pthread_cond_wait", "libc.so.6", 0),
)


def _process(pid: int, rank: int | None, parent: int = 1, world: int | None = None) -> Process:
    return Process(
        key=f"{pid}@1",
        pid=pid,
        start_ticks=1,
        started_ns=1,
        parent_pid=parent,
        uid=1,
        command="",
        declared={} if world is None else {"LOCAL_WORLD_SIZE": str(world)},
        owner=Owner(job="run1", rank=rank, world_size=world),
    )


def _dump(pid: int, *stacks: Sequence[Frame]) -> StackDump:
    threads = tuple(
        ThreadStack(id=pid + at * 1000, name=f"thread {at}", active=False, frames=tuple(frames))
        for at, frames in enumerate(stacks)
    )
    return StackDump(time_ns=1, pid=pid, rank=None, native=False, threads=threads)


def _job(*stacks: Sequence[Frame]) -> GroupedStacks:
    """One rank for each stack, with pids from 100."""
    dumps = {100 + rank: _dump(100 + rank, frames) for rank, frames in enumerate(stacks)}
    return group_stacks([_process(100 + rank, rank) for rank in range(len(stacks))], dumps, {})


def test_a_rank_that_ended_is_missed_by_what_torchrun_told_the_others(tmp_path: Path) -> None:
    """The last one of a job whose ranks are all on this host: its number lies beyond those that are there."""
    tree = HostTree(tmp_path)
    for rank in range(3):
        torchrun = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "4",
        }
        tree.process(100 + rank, environment={**torchrun, "TRACELOOM_JOB": "run1"})
    accelerators = AcceleratorCollector(tree.config(), [TimeLimitedBackend("by-hand", ByHand)])
    accelerators.close()
    owned = OwnedProcessCollector(tree.config(), accelerators)
    owned.collect()
    stacks = group_stacks(
        list(owned.owned.values()),
        {100 + rank: _dump(100 + rank, REDUCING) for rank in range(3)},
        {},
    )
    assert stacks.sentence.endswith("rank 3 is not seen: it has no process on this host")


def test_the_rank_that_loads_while_others_wait_comes_first() -> None:
    stacks = _job(REDUCING, REDUCING, LOADING, REDUCING)
    assert (
        stacks.sentence
        == "rank 2 is in `load_batch` (data.py:31); ranks 0, 1, 3 wait in `all_reduce`"
    )
    assert [(group.ranks, group.elsewhere, group.waits_in) for group in stacks.groups] == [
        ((2,), True, ""),
        ((0, 1, 3), False, "all_reduce"),
    ]
    assert stacks.groups[0].frames == LOADING


@pytest.mark.parametrize(
    ("stacks", "sentence"),
    [
        (
            [LOADING, REDUCING],
            "rank 0 is in `load_batch` (data.py:31); rank 1 waits in `all_reduce`",
        ),
        ([REDUCING] * 5, "ranks 0-4 wait in `all_reduce`"),
        (
            [REDUCING, IN_BARRIER, REDUCING],
            "rank 1 waits in `barrier`; ranks 0, 2 wait in `all_reduce`",
        ),
        ([REDUCING, IN_BARRIER], "rank 0 waits in `all_reduce`; rank 1 waits in `barrier`"),
        (
            [REDUCING, WAITING, LOADING],
            "rank 2 is in `load_batch` (data.py:31); rank 0 waits in `all_reduce`; rank 1 waits in a collective",
        ),
        (
            [REDUCING, WAITING, REDUCING],
            "rank 1 waits in a collective; ranks 0, 2 wait in `all_reduce`",
        ),
        (
            [COMPUTING, COMPUTING, LOADING],
            "rank 2 is in `load_batch` (data.py:31); ranks 0, 1 are in `forward` (model.py:7)",
        ),
        (
            [COMPUTING, LOADING],
            "rank 0 is in `forward` (model.py:7); rank 1 is in `load_batch` (data.py:31)",
        ),
        ([REDUCING, ()], "rank 1 is in no call that can be seen; rank 0 waits in `all_reduce`"),
    ],
)
def test_who_is_where(stacks: list[Sequence[Frame]], sentence: str) -> None:
    assert sorted(_job(*stacks).sentence.split("; ")) == sorted(sentence.split("; "))


def test_who_waits_in_another_collective_than_most_is_elsewhere() -> None:
    stacks = _job(REDUCING, IN_BARRIER, REDUCING)
    assert [(group.ranks, group.elsewhere) for group in stacks.groups] == [
        ((1,), True),
        ((0, 2), False),
    ]
    assert stacks.sentence.startswith("rank 1 waits in `barrier`")


def test_what_is_even_is_not_decided() -> None:
    for stacks in (
        _job(REDUCING, IN_BARRIER),
        _job(COMPUTING, LOADING),
        _job(REDUCING, WAITING, REDUCING),
    ):
        assert not any(group.elsewhere for group in stacks.groups)


def test_another_line_of_the_same_program_is_elsewhere() -> None:
    later = (TRAIN._replace(line=25), *REDUCING[1:])
    stacks = _job(REDUCING, later, REDUCING)
    assert [group.ranks for group in stacks.groups] == [
        (0, 2),
        (1,),
    ]  # told apart, and all wait for the same kind


def test_a_process_that_loads_data_is_no_rank() -> None:
    processes = [
        _process(100, 0),
        _process(101, 1),
        _process(200, 1, parent=101),
        _process(50, None),
    ]
    dumps = {
        100: _dump(100, REDUCING),
        101: _dump(101, REDUCING),
        200: _dump(200, LOADING),
        50: _dump(50, LOADING),
    }
    stacks = group_stacks(processes, dumps, {})
    assert stacks.sentence == "ranks 0, 1 wait in `all_reduce`"
    assert [(group.role, group.ranks, group.pids) for group in stacks.groups] == [
        ("rank", (0, 1), (100, 101)),
        ("worker", (1,), (50, 200)),
    ]


def test_other_threads_are_grouped_by_name() -> None:
    dumps = {100: _dump(100, REDUCING, COMPUTING), 101: _dump(101, REDUCING, COMPUTING, LOADING)}
    stacks = group_stacks([_process(100, 0), _process(101, 1)], dumps, {})
    assert [(group.role, group.thread, group.ranks) for group in stacks.groups] == [
        ("rank", "", (0, 1)),
        ("thread", "thread 1", (0, 1)),
        ("thread", "thread 2", (1,)),
    ]


def test_addresses_differ_between_processes_and_are_left_out() -> None:
    first, second = ((Frame(f"0x7eff6544524{digit}", "libc.so.6", 0), *WAITING) for digit in "ab")
    assert [group.ranks for group in _job(first, second).groups] == [(0, 1)]


def test_ranks_that_are_not_seen_are_named_with_the_reason() -> None:
    processes = [_process(100 + rank, rank, world=4) for rank in (0, 1, 3)]
    stacks = group_stacks(
        processes, {100: _dump(100, REDUCING), 101: _dump(101, REDUCING)}, {103: "it has ended"}
    )
    assert stacks.sentence == (
        "ranks 0, 1 wait in `all_reduce`; rank 3 is not seen: it has ended; "
        "rank 2 is not seen: it has no process on this host"
    )
    assert [(each.pid, each.rank) for each in stacks.unseen] == [(103, 3), (None, 2)]


def test_steps_tell_how_far_behind_it_is() -> None:
    dumps = {100: _dump(100, REDUCING), 101: _dump(101, LOADING)}
    stacks = group_stacks([_process(100, 0), _process(101, 1)], dumps, {}, {100: 12, 101: 10})
    assert stacks.sentence.startswith(
        "rank 1 is in `load_batch` (data.py:31) after 10 steps, the others after 12;"
    )


@pytest.mark.parametrize(
    ("name", "file", "line", "waits"),
    [
        ("all_gather", TORCH, 3, "all_gather"),
        ("ncclAllReduce", "libnccl.so.2", 0, "AllReduce"),
        ("MPI_Barrier", "libmpi.so.40", 0, "Barrier"),
        ("cudaStreamSynchronize", "libcudart.so.12", 0, "cudaStreamSynchronize"),
        ("cudaLaunchKernel", "libcudart.so.12", 0, ""),
        ("all_reduce", "/home/anna/train.py", 3, ""),
        ("synchronize", "/x/torch/cuda/__init__.py", 900, "cuda.synchronize"),
    ],
)
def test_what_is_waited_in(name: str, file: str, line: int, waits: str) -> None:
    assert find_waiting_call([TRAIN, Frame(name, file, line)]) == waits


def test_runs_of_numbers() -> None:
    assert format_ranges([5, 0, 1, 2, 3]) == "0-3, 5"
    assert format_ranges([1, 0, 3]) == "0, 1, 3"
    assert format_ranges([]) == ""


def test_a_wait_that_is_known_from_elsewhere_counts_where_the_stack_shows_none() -> None:
    stacks = {100: LOADING, 101: COMPUTING, 102: REDUCING}
    dumps = {pid: _dump(pid, frames) for pid, frames in stacks.items()}
    processes = [_process(pid, pid - 100) for pid in stacks]
    alone = group_stacks(processes, dumps, {})
    assert {rank for group in alone.groups if group.elsewhere for rank in group.ranks} == {0, 1}
    # Rank 1 is in `work.wait()`, which Python's calls do not show; rank 2's own stack says what it is in.
    both = group_stacks(processes, dumps, {}, waits={101: "all_reduce", 102: "broadcast"})
    assert [group.ranks for group in both.groups if group.elsewhere] == [(0,)]
    assert (
        both.sentence == "rank 0 is in `load_batch` (data.py:31); ranks 1, 2 wait in `all_reduce`"
    )


def test_ranks_that_ended_have_that_as_their_reason() -> None:
    stacks = group_stacks(
        [_process(100, 0)],
        {100: _dump(100, REDUCING)},
        {},
        ended={3: "its process 7 ended 2 s ago"},
    )
    assert (
        stacks.sentence
        == "rank 0 waits in `all_reduce`; rank 3 is not seen: its process 7 ended 2 s ago"
    )
