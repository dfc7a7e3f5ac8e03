"""A program that is recorded without options: findings name its slow lines, and nothing of it changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import traceloom
from traceloom.findings import findings

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        sys.platform != "linux" or not (3, 11) <= sys.version_info[:2] <= (3, 13),
        reason="stacks of Python 3.11 to 3.13 are read from outside, on Linux",
    ),
]

# What is slow runs by the processor's clock, so that a busy machine takes nothing of it.
PROGRAM = """
import os, signal, sys, threading, time

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 9
    def __getitem__(self, index):
        end = time.thread_time() + 0.08
        while time.thread_time() < end: pass  # the loader
        return torch.ones(2)

def compute():
    end = time.thread_time() + 0.08
    while time.thread_time() < end: pass  # the loop

def tell_state():
    tasks = os.listdir("/proc/self/task")
    children = [open(f"/proc/self/task/{task}/children").read() for task in tasks]
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    threads = (threading.enumerate(), sys._current_frames())
    print(*map(len, threads), "".join(children), sys.getprofile(), sys.gettrace())
    print(len(os.listdir("/proc/self/fd")))
    print([str(handler).partition(" at ")[0] for handler in handlers], signal.set_wakeup_fd(-1))

for number, _ in enumerate(torch.utils.data.DataLoader(Slow())):
    step()
    compute()
    if 3 < number < 7: tell_state()
"""


def test_findings_name_the_slow_lines_and_the_program_is_as_it_was(recorder: Any) -> None:
    script = recorder.script(PROGRAM)
    code = enumerate(Path(script).read_text().splitlines(), 1)
    slow = {line.rpartition("  # ")[2]: number for number, line in code if "  # " in line}
    command = [sys.executable, script]
    plain = recorder.plain(command)
    run = recorder.record(command, "--max-memory", "4GB")
    assert (run.code, run.out) == (plain.code, plain.out), run.err
    told = run.rank()["stack_samples"]
    assert told == {"file": "rank0.stacks.json.gz", "reason": None}
    session = traceloom.load(run.directory)
    window = run.rank()["window"]
    times_ns = session.samples["time_ns"]
    assert times_ns.is_between(window["start_ns"], window["end_ns"]).all()
    lines = {
        finding.slug: finding.frames[0].line
        for finding in findings(session).time
        if finding.frames and str(finding.frames[0].file).endswith("/script.py")
    }
    assert lines["data-starved"] == slow["the loader"]
    assert slow["the loop"] in lines.values()
