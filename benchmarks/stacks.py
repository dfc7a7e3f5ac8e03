"""What it costs to look at a process from outside: its steps alone, under sampling, under dumps;
and py-spy's own time.

    python benchmarks/stacks.py [--seconds 4] [--turns 3]

The program computes in steps of some 150 us, half Python and half PyTorch, on one thread; steps of
each kind are taken in turns, so that a machine that becomes busier is no cost of looking.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from traceloom.agent.ownership.model import Process
from traceloom.agent.profilers.base import Window
from traceloom.agent.profilers.py_spy import StacksProfiler, dump_stacks

PROGRAM = """
import time, torch
torch.set_num_threads(1)
layer = torch.nn.Linear(256, 256)
rows = torch.ones(32, 256)
print("up", flush=True)
last = time.monotonic_ns()
while True:
    sum(number * number for number in range(1000))
    layer(rows).sum()
    now = time.monotonic_ns()
    print(now, now - last)
    last = now
"""
DUMPS = 50


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kind in each turn")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        log = directory / "steps"
        with log.open("w") as file:
            program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=file)
        while "up" not in log.read_text(encoding="ascii"):
            time.sleep(0.1)
        ticks = int(
            Path(f"/proc/{program.pid}/stat")
            .read_text(encoding="ascii")
            .rpartition(")")[2]
            .split()[19]
        )
        process = Process(
            key=f"{program.pid}@{ticks}",
            pid=program.pid,
            start_ticks=ticks,
            started_ns=0,
            parent_pid=os.getpid(),
            uid=os.getuid(),
            command="",
        )
        spans: dict[str, list[tuple[int, int]]] = {}
        cost: dict[str, float] = {}

        def during(kind: str, looking: Callable[[], Awaitable[object]]) -> None:
            began, before = time.monotonic_ns(), children_s()

            async def look() -> None:
                await looking()

            asyncio.run(look())
            spans.setdefault(kind, []).append((began, time.monotonic_ns()))
            cost[kind] = cost.get(kind, 0.0) + children_s() - before

        async def dumps() -> None:
            for _ in range(DUMPS):
                await dump_stacks(process)

        for turn in range(args.turns):
            window = Window(0, args.seconds, None)
            during("alone", lambda: asyncio.sleep(args.seconds))
            during(
                "sampled",
                lambda: StacksProfiler().record(process, window, directory, f"turn{turn}"),  # noqa: B023
            )
            during("dumps", dumps)
            during("native dump", lambda: dump_stacks(process, native=True))
        program.kill()
        program.wait()
        lines = [line.split() for line in log.read_text(encoding="ascii").splitlines()[1:-1]]
    steps = [(int(at), int(took)) for at, took in lines]
    for kind, parts in spans.items():
        took = [took for at, took in steps if any(began <= at <= end for began, end in parts)]
        seconds = sum(end - began for began, end in parts) / 1e9
        print(
            f"{kind:12} {len(took):7,} steps, median {statistics.median(took) / 1e3:7.1f} us, longest "
            f"{max(took) / 1e6:8.1f} ms; py-spy and what reads it {cost[kind]:.2f} s of processor in {seconds:.1f} s"
        )
    each = [(end - began) / DUMPS / 1e6 for began, end in spans["dumps"]]
    print(f"a dump takes {min(each):.0f} ms; load of the machine {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
