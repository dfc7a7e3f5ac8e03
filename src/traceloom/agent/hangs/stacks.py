"""Stacks of all ranks, with equal ones grouped."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

import msgspec

from traceloom.agent.ownership.environment import LOCAL_WORLD_SIZE
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers import py_spy
from traceloom.agent.profilers.base import ProfilerError
from traceloom.agent.profilers.py_spy import StackDump, ThreadStack
from traceloom.system.python_frames import Frame
from traceloom.system.units import format_ranges

MAX_DUMPED_PROCESSES = 256
# py-spy waits for the disk first (symbols) and computes later; about the number of ranks of a host.
_MAX_CONCURRENT_DUMPS = 8
# Each holds the symbols of torch: 105 MB for its CPU build, more for CUDA.
_MAX_CONCURRENT_NATIVE_DUMPS = 2


class StackDumps(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks by pid, and the reasons for missing ones."""

    dumps: dict[int, StackDump]
    reasons: dict[int, str]


async def collect_stacks(processes: Sequence[Process], *, native: bool = False) -> StackDumps:
    """Dump the stacks of processes, several at once; a failure gives a reason and does not affect
    the others.
    """
    dumps: dict[int, StackDump] = {}
    reasons = {
        process.pid: f"beyond {MAX_DUMPED_PROCESSES} processes"
        for process in processes[MAX_DUMPED_PROCESSES:]
    }
    semaphore = asyncio.Semaphore(_MAX_CONCURRENT_NATIVE_DUMPS if native else _MAX_CONCURRENT_DUMPS)

    async def take(process: Process) -> None:
        async with semaphore:
            try:
                dumps[process.pid] = await py_spy.dump_stacks(process, native=native)
            except ProfilerError as error:
                reasons[process.pid] = str(error)

    await asyncio.gather(*(take(process) for process in processes[:MAX_DUMPED_PROCESSES]))
    return StackDumps(dumps=dumps, reasons=reasons)


Role = Literal["rank", "thread", "worker"]
# For a collective that was started earlier: the stack does not show which.
UNKNOWN_COLLECTIVE = "wait"
_ROLE_ORDER: tuple[Role, ...] = ("rank", "worker", "thread")
_ADDRESS_PATTERN = re.compile(r"0x[0-9a-f]+$")
_INSTALLED_CODE_PATTERN = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen ")
_DISTRIBUTED_CODE_PATTERN = re.compile(
    r"torch/distributed/(?:distributed_c10d|_functional_collectives|rendezvous)\.py$"
)
_NATIVE_WAIT_PATTERN = re.compile(
    r"^(?:c10d::(?:\w+::)*(?P<torch>\w+)|nccl(?P<nccl>[A-Z]\w+)|P?MPI_(?P<mpi>[A-Z]\w+)"
    r"|(?P<device>cu(?:da)?(?:Device|Stream|Event|Ctx)Synchronize|hip(?:Device|Stream|Event)Synchronize))\b"
)


class StackGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Equal stacks of several threads.

    `role`: the main threads of ranks, other threads of them, or other processes of the job (those
    that load data, the launcher). `frames` begin with the outermost call: function, file, line.
    `waits_in`: the collective, or the wait for a device, that they are in; "" where they do
    something else. `elsewhere`: the other ranks are at another place.
    """

    role: Role
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    thread: str = ""
    active: bool
    waits_in: str = ""
    elsewhere: bool = False
    frames: tuple[Frame, ...]


class MissingStack(msgspec.Struct, frozen=True, kw_only=True):
    """A process, or a rank without one here (pid null), whose stacks are not known, and why."""

    pid: int | None = None
    rank: int | None = None
    reason: str


class GroupedStacks(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks of all threads of a job at one moment, and a sentence about its ranks; groups that are
    elsewhere come first.
    """

    sentence: str
    groups: tuple[StackGroup, ...]
    unseen: tuple[MissingStack, ...]


class _GroupMember(NamedTuple):
    process: Process
    role: Role
    thread: ThreadStack


def group_stacks(
    processes: Sequence[Process],
    dumps: Mapping[int, StackDump],
    reasons: Mapping[int, str],
    steps: Mapping[int, int] | None = None,
    *,
    waits: Mapping[int, str] | None = None,
    ended: Mapping[int, str] | None = None,
) -> GroupedStacks:
    """Group equal stacks, and find the ranks that are elsewhere.

    Ranks that wait in a collective, or for a device, wait for those that do not, which are
    elsewhere. If all wait, those in another collective than the majority are elsewhere; if none
    does, those at another location than the majority. A tie is not decided.

    Args:
        processes: Of one job, or any.
        dumps: Their stacks, by pid.
        reasons: Why stacks are missing, by pid.
        steps: Steps that each process has finished, by pid, if known.
        waits: The collective that a process is known to wait in from another source, by pid; used
            for a rank whose own stack shows no wait: `work.wait()` is C++, and Python's frames
            alone look as if the program computed.
        ended: Ranks whose process has ended, and when, in words.
    """
    rank_pids = find_rank_pids(processes)
    waits = waits or {}
    members: dict[tuple[Role, str, tuple[Frame, ...], str], list[_GroupMember]] = defaultdict(list)
    for process in processes:
        for thread in dumps[process.pid].threads if process.pid in dumps else ():
            is_main = process.pid == thread.id or thread.name == "MainThread"
            role: Role = (
                "worker" if process.pid not in rank_pids else "rank" if is_main else "thread"
            )
            frames = tuple(
                frame for frame in thread.frames if not _ADDRESS_PATTERN.match(frame.function)
            )
            waiting_call = find_waiting_call(frames) or (
                waits.get(process.pid, "") if role == "rank" else ""
            )
            members[role, "" if is_main else thread.name, frames, waiting_call].append(
                _GroupMember(process, role, thread)
            )
    groups = [
        StackGroup(
            role=role,
            ranks=tuple(
                sorted(
                    {
                        m.process.owner.rank
                        for m in group_members
                        if m.process.owner.rank is not None
                    }
                )
            ),
            pids=tuple(sorted({m.process.pid for m in group_members})),
            thread=name,
            active=any(m.thread.active for m in group_members),
            waits_in=waiting_call,
            frames=frames,
        )
        for (role, name, frames, waiting_call), group_members in members.items()
    ]
    diverging_groups = _find_diverging_groups([group for group in groups if group.role == "rank"])
    groups = [
        msgspec.structs.replace(group, elsewhere=group in diverging_groups) for group in groups
    ]
    groups.sort(
        key=lambda group: (
            _ROLE_ORDER.index(group.role),
            not group.elsewhere,
            group.ranks,
            group.pids,
        )
    )
    unseen = [
        MissingStack(pid=process.pid, rank=process.owner.rank, reason=reasons[process.pid])
        for process in processes
        if process.pid in reasons
    ]
    ended = ended or {}
    # Ranks missing on this host: of the whole job if it runs here, else between the lowest and the
    # highest local rank.
    local_ranks = {process.owner.rank for process in processes if process.owner.rank is not None}
    world_sizes = {
        process.owner.world_size for process in processes if process.owner.world_size is not None
    }
    local_world_sizes = {
        int(text) for p in processes if (text := p.declared.get(LOCAL_WORLD_SIZE, "")).isdecimal()
    }
    expected = range(0)
    if len(world_sizes) == 1 and world_sizes == local_world_sizes:  # the whole job is here
        expected = range(min(*world_sizes, 4096))
    elif local_ranks and max(local_ranks) - min(local_ranks) < 4096:
        expected = range(min(local_ranks), max(local_ranks))
    absent_ranks = set(expected) - local_ranks
    unseen += (
        MissingStack(rank=rank, reason=ended.get(rank, "it has no process on this host"))
        for rank in sorted({*absent_ranks, *ended})
    )
    summary = _summarize_groups(
        [group for group in groups if group.role == "rank"], unseen, steps or {}
    )
    return GroupedStacks(sentence=summary, groups=tuple(groups), unseen=tuple(unseen))


def find_rank_pids(processes: Iterable[Process]) -> set[int]:
    """Returns the pids of the ranks, without their children, which inherit the number and load
    data.

    Without ranks, all.
    """
    rank_by_pid = {
        process.pid: process.owner.rank for process in processes if process.owner.rank is not None
    }
    return {
        process.pid
        for process in processes
        if process.pid in rank_by_pid and rank_by_pid.get(process.parent_pid) != process.owner.rank
    } or {process.pid for process in processes}


def find_waiting_call(frames: Sequence[Frame]) -> str:
    """Returns the collective, or the wait for a device, that a stack is in; "" if none."""
    for frame in frames:
        if _DISTRIBUTED_CODE_PATTERN.search(frame.file.replace("\\", "/")):
            return frame.function
        if frame.function == "synchronize" and frame.file.endswith("torch/cuda/__init__.py"):
            return "cuda.synchronize"
        if not frame.line and (match := _NATIVE_WAIT_PATTERN.match(frame.function)):
            return str(next(filter(None, match.groups())))
    return ""


def _find_diverging_groups(groups: Sequence[StackGroup]) -> list[StackGroup]:
    waiting = [group for group in groups if group.waits_in]
    if waiting and len(waiting) < len(groups):
        return [group for group in groups if not group.waits_in]
    if waiting:
        locations = [group.waits_in for group in waiting if group.waits_in != UNKNOWN_COLLECTIVE]
        candidates = [group for group in waiting if group.waits_in != UNKNOWN_COLLECTIVE]
    else:
        locations = [_describe_location(group.frames) for group in groups]
        candidates = list(groups)
    process_counts: Counter[str] = Counter()
    for location, group in zip(locations, candidates, strict=True):
        process_counts[location] += len(group.pids)
    most_common = process_counts.most_common(2)
    if len(most_common) < 2 or most_common[0][1] == most_common[1][1]:
        return []
    return [
        group
        for location, group in zip(locations, candidates, strict=True)
        if location != most_common[0][0]
    ]


def _describe_location(frames: Sequence[Frame]) -> str:
    """Returns the innermost frame of the program's own code, else the innermost frame, as text."""
    own_frames = [
        frame for frame in frames if frame.line and not _INSTALLED_CODE_PATTERN.search(frame.file)
    ]
    python_frames = [frame for frame in frames if frame.line]
    frame = next(reversed(own_frames or python_frames or list(frames)), None)
    if frame is None:
        return "no call that can be seen"
    location = (
        f"{PurePosixPath(frame.file).name}:{frame.line}"
        if frame.line
        else PurePosixPath(frame.file).name
    )
    return f"`{frame.function}` ({location})"


def _summarize_groups(
    groups: Sequence[StackGroup], unseen: Sequence[MissingStack], steps: Mapping[int, int]
) -> str:
    """Returns the sentence: ranks elsewhere first, each with location and step; then those that
    wait, by what they wait in.
    """
    parts: list[str] = []
    for is_elsewhere in (True, False):
        groups_by_location: dict[tuple[str, str], list[StackGroup]] = defaultdict(list)
        for group in groups:
            if group.elsewhere is is_elsewhere:
                in_general = group.waits_in == UNKNOWN_COLLECTIVE
                waits = "a collective" if in_general else group.waits_in and f"`{group.waits_in}`"
                groups_by_location[
                    "wait" if waits else "be", waits or _describe_location(group.frames)
                ].append(group)
        for (verb, location), location_groups in groups_by_location.items():
            numbers = [
                member for group in location_groups for member in (group.ranks or group.pids)
            ]
            is_single = len(numbers) == 1
            verb_form = {
                "wait": "waits" if is_single else "wait",
                "be": "is" if is_single else "are",
            }[verb]
            kind = "rank" if location_groups[0].ranks else "process"
            plural = kind + ("" if is_single else "s" if kind == "rank" else "es")
            own_steps = {
                steps[pid] for group in location_groups for pid in group.pids if pid in steps
            }
            latest = max(steps.values(), default=0)
            after = (
                f" after {min(own_steps)} steps, the others after {latest}"
                if len(own_steps) == 1 and min(own_steps) < latest
                else ""
            )
            parts.append(
                f"{plural} {format_ranges(numbers)} {verb_form} in {location}{after if is_elsewhere else ''}"
            )
    for missing in unseen:
        name = f"process {missing.pid}" if missing.rank is None else f"rank {missing.rank}"
        parts.append(f"{name} is not seen: {missing.reason}")
    return "; ".join(parts)
