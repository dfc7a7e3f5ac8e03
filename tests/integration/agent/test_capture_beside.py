"""A real PyTorch process, traced by its own profiler while its stacks are sampled from outside: one time axis."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from traceloom.agent.ownership.model import Owner, Process
from traceloom.agent.profilers.base import Window
from traceloom.agent.profilers.py_spy import StacksProfiler
from traceloom.formats import load
from traceloom.report.views.timeline import add_overlay

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="the agent is for Linux"),
]
# Phases of some tenths of a second each; a stack in `slow_part` must lie in the range of that name, and so on.
PROGRAM = """
import sys, time, torch
from torch.profiler import ProfilerActivity, profile, record_function

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)

def slow_part(): spin(0.4)
def quick_part(): spin(0.25)

torch.set_num_threads(1)
print("up", flush=True)
sys.stdin.readline()
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for _ in range(4):
        for part in (slow_part, quick_part):
            with record_function(part.__name__):
                part()
profiler.export_chrome_trace(sys.argv[1])
print("written", flush=True)
sys.stdin.readline()
"""
# A tick of the clock of files, and what a loaded machine does between two calls; phases last ten times as long.
TOLERANCE_NS = 25_000_000
WINDOW_NS = 6_000_000_000


@pytest.mark.thorough  # a busy machine keeps py-spy from looking when it should; test_stacks.py tells phases by steps
def test_a_sample_taken_in_a_range_lies_in_it(tmp_path: Path) -> None:
    path = tmp_path / "rank0.kineto.json.gz"
    command = [sys.executable, "-c", PROGRAM, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdin is not None
            assert program.stdout is not None
            assert program.stdout.readline() == "up\n"
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
                parent_pid=1,
                uid=0,
                command="",
                owner=Owner(rank=0),
            )

            window = Window(time.time_ns() + 600_000_000, WINDOW_NS / 1e9, None)

            async def recorded() -> None:
                recording = asyncio.create_task(
                    StacksProfiler().record(process, window, tmp_path, "rank0")
                )
                await asyncio.sleep(0.6)
                assert program.stdin is not None
                program.stdin.write("\n")
                program.stdin.flush()
                assert await recording == [tmp_path / "rank0.stacks.json.gz"]

            asyncio.run(recorded())
            assert program.stdout.readline() == "written\n"
        finally:
            program.kill()
    session = load(tmp_path, cache=False)
    session.check()
    assert session.notices == ()
    (trace,) = session.traces
    assert trace.meta.process == program.pid
    ranges_seen = ranges_in_window = 0
    right: list[bool] = []
    for name in ("slow_part", "quick_part"):
        ranges = trace.events.filter(pl.col("name") == name)
        ranges = ranges.select("start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
        assert ranges.height == 4
        inside = session.samples.filter(
            pl.col("stack").list.join("\n").str.contains(rf"\): {name}\n?"),
            pl.col("time_ns").is_between(trace.start_ns, trace.end_ns),
        )
        spans = [(start - TOLERANCE_NS, end + TOLERANCE_NS) for start, end in ranges.iter_rows()]
        right += [any(start <= at <= end for start, end in spans) for at in inside["time_ns"]]
        # And the other way round: of each range that was wholly within the window something was seen.
        within = ranges.filter(
            pl.col("start_ns") > window.start_ns, pl.col("end_ns") < window.start_ns + WINDOW_NS
        )
        ranges_in_window += within.height
        ranges_seen += sum(
            bool(inside.filter(pl.col("time_ns").is_between(start - TOLERANCE_NS, end)).height)
            for start, end in within.iter_rows()
        )
    assert (
        sum(right) >= 0.8 * len(right) > 0
    )  # some come late where py-spy is not let run between look and note
    assert (
        ranges_seen >= 0.5 * ranges_in_window > 0
    )  # all 8, unless the machine is too busy for py-spy to get on
    add_overlay(session).traces[0].check()
