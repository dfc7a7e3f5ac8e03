"""Stacks of all processes of a job at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

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
