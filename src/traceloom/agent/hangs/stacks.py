"""Stacks of all ranks, equal ones grouped."""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

import msgspec

from traceloom.agent.ownership.environment import RANKS_HERE
from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers import py_spy
from traceloom.agent.profilers.base import ProfilerError
from traceloom.agent.profilers.py_spy import Frame, StackDump, ThreadStack

MOST_PROCESSES = 256
_AT_ONCE = 8  # py-spy waits for the disk first (symbols), computes later; ranks of a host are about as many
_NATIVE_AT_ONCE = 2  # each holds the symbols of torch: 105 MB of its build for processors, more of that for CUDA


class StackDumps(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks by pid, and why there are none."""

    dumps: dict[int, StackDump]
    reasons: dict[int, str]


async def feed(processes: Sequence[Process], *, native: bool = False) -> StackDumps:
    """Look at processes, some at once; one that cannot be looked at has a reason, and costs the others nothing."""
    dumps: dict[int, StackDump] = {}
    reasons = {process.pid: f"beyond {MOST_PROCESSES} processes" for process in processes[MOST_PROCESSES:]}
    turns = asyncio.Semaphore(_NATIVE_AT_ONCE if native else _AT_ONCE)

    async def take(process: Process) -> None:
        async with turns:
            try:
                dumps[process.pid] = await py_spy.accept_entries(process, native=native)
            except ProfilerError as error:
                reasons[process.pid] = str(error)

    await asyncio.gather(*(take(process) for process in processes[:MOST_PROCESSES]))
    return StackDumps(dumps=dumps, reasons=reasons)


Role = Literal["rank", "thread", "worker"]
ANY_COLLECTIVE = "wait"  # of a collective that was begun earlier: the stack does not say which
_ROLES: tuple[Role, ...] = ("rank", "worker", "thread")
_ADDRESS = re.compile(r"0x[0-9a-f]+$")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib/python3|^<frozen ")
_DISTRIBUTED = re.compile(r"torch/distributed/(?:distributed_c10d|_functional_collectives|rendezvous)\.py$")
_NATIVE_WAIT = re.compile(
    r"^(?:c10d::(?:\w+::)*(?P<torch>\w+)|nccl(?P<nccl>[A-Z]\w+)|P?MPI_(?P<mpi>[A-Z]\w+)"
    r"|(?P<device>cu(?:da)?(?:Device|Stream|Event|Ctx)Synchronize|hip(?:Device|Stream|Event)Synchronize))\b"
)


class StackGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Equal stacks of several threads.

    `role`: the main threads of ranks, other threads of them, or other processes of the job (those that load data, the
    launcher). `frames` begin with the outermost call: function, file, line. `waits_in`: the collective, or the wait for
    a device, that they are in; "" where they do something else. `elsewhere`: the other ranks are at another place.
    """

    role: Role
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    thread: str = ""
    active: bool
    waits_in: str = ""
    elsewhere: bool = False
    frames: tuple[Frame, ...]


class Unseen(msgspec.Struct, frozen=True, kw_only=True):
    """A process, or a rank without one here (pid null), whose stacks are not known, and why."""

    pid: int | None = None
    rank: int | None = None
    reason: str


class GroupedStacks(msgspec.Struct, frozen=True, kw_only=True):
    """What all threads of a job did at one moment, where its ranks are in a sentence; groups elsewhere come first."""

    sentence: str
    groups: tuple[StackGroup, ...]
    unseen: tuple[Unseen, ...]


class _Member(NamedTuple):
    process: Process
    role: Role
    thread: ThreadStack


def grouped(
    processes: Sequence[Process],
    dumps: Mapping[int, StackDump],
    reasons: Mapping[int, str],
    steps: Mapping[int, int] | None = None,
    *,
    waits: Mapping[int, str] | None = None,
    ended: Mapping[int, str] | None = None,
) -> GroupedStacks:
    """Put equal stacks together, and find the ranks that are elsewhere.

    Ranks that wait in a collective, or for a device, are where the others have to come; those that do not are
    elsewhere. Where all wait, those in another collective than most are; where none does, those at another place than
    most. What is even is not decided.

    Args:
        processes: Of one job, or any.
        dumps: Their stacks, by pid.
        reasons: Why there are none, by pid.
        steps: Steps that each process has finished, by pid, where that is known.
        waits: The collective that a process is known to wait in from elsewhere, by pid; it counts for a rank whose own
            stack shows no wait: `work.wait()` is C++, and Python's calls alone look as if the program computed.
        ended: Ranks whose process has ended, and when, in words.
    """
    ranks = main_processes(processes)
    waits = waits or {}
    members: dict[tuple[Role, str, tuple[Frame, ...], str], list[_Member]] = defaultdict(list)
    for process in processes:
        for thread in dumps[process.pid].threads if process.pid in dumps else ():
            is_main = process.pid == thread.id or thread.name == "MainThread"
            role: Role = "worker" if process.pid not in ranks else "rank" if is_main else "thread"
            frames = tuple(frame for frame in thread.frames if not _ADDRESS.match(frame.function))
            waiting = waits_in(frames) or (waits.get(process.pid, "") if role == "rank" else "")
            members[role, "" if is_main else thread.name, frames, waiting].append(_Member(process, role, thread))
    groups = [
        StackGroup(
            role=role, ranks=tuple(sorted({m.process.owner.rank for m in same if m.process.owner.rank is not None})),
            pids=tuple(sorted({m.process.pid for m in same})), thread=name, active=any(m.thread.active for m in same),
            waits_in=waiting, frames=frames,
        )
        for (role, name, frames, waiting), same in members.items()
    ]  # fmt: skip
    mains = [group for group in groups if group.role == "rank"]
    elsewhere = _elsewhere(mains)
    groups = [msgspec.structs.replace(group, elsewhere=group in elsewhere) for group in groups]
    groups.sort(key=lambda group: (_ROLES.index(group.role), not group.elsewhere, group.ranks, group.pids))
    unseen = [
        Unseen(pid=process.pid, rank=process.owner.rank, reason=reasons[process.pid])
        for process in processes
        if process.pid in reasons
    ]
    ended = ended or {}
    # Ranks that are missing among those of this host: of the whole job, or between its lowest and its highest.
    here = {process.owner.rank for process in processes if process.owner.rank is not None}
    worlds = {process.owner.world_size for process in processes if process.owner.world_size is not None}
    sizes = {int(text) for p in processes if (text := p.declared.get(RANKS_HERE, "")).isdecimal()}
    expected = range(0)
    if len(worlds) == 1 and worlds == sizes:  # the whole job is here
        expected = range(min(*worlds, 4096))
    elif here and max(here) - min(here) < 4096:
        expected = range(min(here), max(here))
    absent = set(expected) - here
    unseen += (
        Unseen(rank=rank, reason=ended.get(rank, "it has no process on this host"))
        for rank in sorted({*absent, *ended})
    )
    sentence = _sentence([group for group in groups if group.role == "rank"], unseen, steps or {})
    return GroupedStacks(sentence=sentence, groups=tuple(groups), unseen=tuple(unseen))


def main_processes(processes: Iterable[Process]) -> set[int]:
    """Pids of the ranks: what a rank starts inherits its number, and loads its data. Without ranks, all."""
    ranks = {process.pid: process.owner.rank for process in processes if process.owner.rank is not None}
    mains = {
        process.pid
        for process in processes
        if process.pid in ranks and ranks.get(process.parent_pid) != process.owner.rank
    }
    return mains or {process.pid for process in processes}


def waits_in(frames: Sequence[Frame]) -> str:
    """The collective, or the wait for a device, that a stack is in; "" where it is in none."""
    for frame in frames:
        if _DISTRIBUTED.search(frame.file.replace("\\", "/")):
            return frame.function
        if frame.function == "synchronize" and frame.file.endswith("torch/cuda/__init__.py"):
            return "cuda.synchronize"
        if not frame.line and (match := _NATIVE_WAIT.match(frame.function)):
            return str(next(filter(None, match.groups())))
    return ""


def _elsewhere(groups: Sequence[StackGroup]) -> list[StackGroup]:
    waiting = [group for group in groups if group.waits_in]
    if waiting and len(waiting) < len(groups):
        return [group for group in groups if not group.waits_in]
    if waiting:
        places = [group.waits_in for group in waiting if group.waits_in != ANY_COLLECTIVE]
        judged = [group for group in waiting if group.waits_in != ANY_COLLECTIVE]
    else:
        places = [_place(group.frames) for group in groups]
        judged = list(groups)
    sizes: Counter[str] = Counter()
    for location, group in zip(places, judged, strict=True):
        sizes[location] += len(group.pids)
    most = sizes.most_common(2)
    if len(most) < 2 or most[0][1] == most[1][1]:
        return []
    return [group for location, group in zip(places, judged, strict=True) if location != most[0][0]]


def _place(frames: Sequence[Frame]) -> str:
    """Where a stack is: the innermost call of the program's own code, else the innermost there is."""
    own = [frame for frame in frames if frame.line and not _INSTALLED.search(frame.file)]
    python = [frame for frame in frames if frame.line]
    frame = next(reversed(own or python or list(frames)), None)
    if frame is None:
        return "no call that can be seen"
    where = f"{PurePosixPath(frame.file).name}:{frame.line}" if frame.line else PurePosixPath(frame.file).name
    return f"`{frame.function}` ({where})"


def _sentence(groups: Sequence[StackGroup], unseen: Sequence[Unseen], steps: Mapping[int, int]) -> str:
    """Who is where: those elsewhere first, each with its place and step; who waits together, by what they wait in."""
    parts: list[str] = []
    for is_elsewhere in (True, False):
        places: dict[tuple[str, str], list[StackGroup]] = defaultdict(list)
        for group in groups:
            if group.elsewhere is is_elsewhere:
                in_general = group.waits_in == ANY_COLLECTIVE
                waits = "a collective" if in_general else group.waits_in and f"`{group.waits_in}`"
                places["wait" if waits else "be", waits or _place(group.frames)].append(group)
        for (verb, location), same in places.items():
            who = [member for group in same for member in (group.ranks or group.pids)]
            is_single = len(who) == 1
            does = {"wait": "waits" if is_single else "wait", "be": "is" if is_single else "are"}[verb]
            kind = "rank" if same[0].ranks else "process"
            plural = kind + ("" if is_single else "s" if kind == "rank" else "es")
            own = {steps[pid] for group in same for pid in group.pids if pid in steps}
            latest = max(steps.values(), default=0)
            after = f" after {min(own)} steps, the others after {latest}" if len(own) == 1 and min(own) < latest else ""
            parts.append(f"{plural} {numbers(who)} {does} in {location}{after if is_elsewhere else ''}")
    for each in unseen:
        name = f"process {each.pid}" if each.rank is None else f"rank {each.rank}"
        parts.append(f"{name} is not seen: {each.reason}")
    return "; ".join(parts)


def numbers(values: Iterable[int]) -> str:
    """Numbers with runs of three and more as ranges: `0-3, 5`."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else list(map(str, run)) for run in runs)
    return ", ".join(chain.from_iterable(parts))
