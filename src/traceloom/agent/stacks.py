"""Stacks of all processes of a job at one moment, and what is kept of a job that hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from traceloom.agent.grouping import GroupedStacks, grouped
from traceloom.agent.owners import Process
from traceloom.agent.profilers import ProfilerError, dump
from traceloom.agent.profilers.dump import StackDump

MOST_PROCESSES = 256
_AT_ONCE = 8  # py-spy waits for the disk first (symbols), computes later; ranks of a host are about as many
_NATIVE_AT_ONCE = 2  # each holds the symbols of torch: 105 MB of its build for processors, more of that for CUDA


class StackDumps(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks by pid, and why there are none."""

    dumps: dict[int, StackDump]
    reasons: dict[int, str]


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a job that hangs: files of its directory, and where its ranks are."""

    files: tuple[Path, ...]
    stacks: GroupedStacks

    @property
    def sentence(self) -> str:
        """Names the rank that is elsewhere than the others."""
        return self.stacks.sentence


async def look(processes: Sequence[Process], *, native: bool = False) -> StackDumps:
    """Look at processes, some at once; one that cannot be looked at has a reason, and costs the others nothing."""
    dumps: dict[int, StackDump] = {}
    reasons = {process.pid: f"beyond {MOST_PROCESSES} processes" for process in processes[MOST_PROCESSES:]}
    turns = asyncio.Semaphore(_NATIVE_AT_ONCE if native else _AT_ONCE)

    async def take(process: Process) -> None:
        async with turns:
            try:
                dumps[process.pid] = await dump.take(process, native=native)
            except ProfilerError as error:
                reasons[process.pid] = str(error)

    await asyncio.gather(*(take(process) for process in processes[:MOST_PROCESSES]))
    return StackDumps(dumps=dumps, reasons=reasons)


async def hang_bundle(processes: Sequence[Process], directory: Path, steps: Mapping[int, int] | None = None) -> Bundle:
    """Keep what all processes of a job that makes no steps do, native calls included, and say who is elsewhere.

    Writes `rank<N>.dump.json` or `pid<PID>.dump.json` of each process, and `stacks.json`: the groups and the sentence.

    Args:
        processes: All of the job on this host.
        directory: A new or empty one.
        steps: Steps that each has finished, by pid, where that is known.

    Raises:
        ProfilerError: `cannot-write`.
    """
    looked = await look(processes, native=True)
    # A debugger may hold a process, or native calls may not be had here: then Python's alone.
    again = await look([process for process in processes if process.pid in looked.reasons])
    dumps = looked.dumps | again.dumps
    stacks = grouped(processes, dumps, again.reasons, steps)
    return await asyncio.to_thread(_written, directory, processes, dumps, stacks)


def _written(
    directory: Path, processes: Sequence[Process], dumps: Mapping[int, StackDump], stacks: GroupedStacks
) -> Bundle:
    files: list[Path] = []
    ranks: set[int] = set()
    for process in processes:
        rank = process.owner.rank
        if process.pid in dumps:
            is_first = rank is not None and rank not in ranks  # what a rank starts has its number too
            stem = f"rank{rank}" if is_first else f"pid{process.pid}"
            ranks |= {rank} if rank is not None else set()
            files.append(dump.write(dumps[process.pid], directory, stem))
    document = {"format": "traceloom-stack-groups", "version": 1, "time_ns": time.time_ns()}
    document |= msgspec.to_builtins(stacks)
    files.append(dump.new_file(directory / "stacks.json", msgspec.json.encode(document)))
    return Bundle(files=tuple(files), stacks=stacks)
