"""A PyTorch program that nobody prepared, which does what it is told meanwhile and says what has become of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from traceloom.agent.kineto import read_parent_and_start
from traceloom.agent.ownership.model import Owner, Process

# It trains until it is told otherwise. What is there before the first step is there after every trace.
PROGRAM = """
import json, os, select, sys, threading, time
import torch, torch.profiler
import torch.optim.optimizer as optimizers, torch.autograd.profiler as profiler
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
steps, sleep_s = 0, 0.02
torch.set_num_threads(1)

def step():
    global steps
    optimizer.zero_grad()
    loss = model(torch.ones(4, 16)).square().sum()
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    steps += 1
    time.sleep(sleep_s)

def state():
    return {
        "fds": sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
        "threads": sorted(thread.name for thread in threading.enumerate()), "tasks": len(os.listdir("/proc/self/task")),
        "path": sys.path, "hooks": len(optimizers._global_optimizer_post_hooks),
        "profiler": [profiler._prepare_profiler.__module__, profiler._enable_profiler.__module__],
        "modules": [name for name in sys.modules if "traceloom" in name], "names": sorted(globals()),
    }

def own(steps):
    with torch.profiler.profile() as profile:
        for _ in range(steps): step()
    return sum(event.name().startswith("aten::") for event in profile.profiler.kineto_results.events())

def cuda(has_history):
    "A device that plays the part of one: its snapshots are as PyTorch pickles them."
    import pickle
    played = {"history": has_history, "calls": []}
    def record(enabled="all", context="all", stacks="all", max_entries=sys.maxsize):
        played["calls"].append([enabled, context, stacks])
        played["history"] = enabled is not None
    def dump(path):
        frames = [{"filename": "/u/model.py", "line": 7, "name": "forward"}]
        entry = {"action": "alloc", "addr": 512, "size": 1000, "stream": 0, "time_us": time.time_ns() // 1000, "frames": frames}
        document = {"segments": [], "device_traces": [[entry] if played["history"] else []]}
        with open(path, "wb") as file:
            pickle.dump(print if played.get("hostile") else document, file, protocol=4)
    torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
    torch.profiler.ProfilerActivity = type("Played", (), {"CPU": torch.profiler.ProfilerActivity.CPU})
    torch.cuda.memory._record_memory_history, torch.cuda.memory._dump_snapshot = record, dump
    torch._C._cuda_isHistoryEnabled = lambda: played["history"]
    return played

for _ in range(5): step()
own(1)  # whatever PyTorch begins with its first profile
print("up", flush=True)
while True:
    step()
    while select.select([sys.stdin], [], [], 0)[0]:
        line = sys.stdin.readline()
        if not line: sys.exit(0)
        print(json.dumps(eval(line)), flush=True)
"""


class UnpreparedProgram:
    """It runs until it is closed; `ask` has an expression evaluated in it, between two of its steps.

    Args:
        environment: More variables of it.
    """

    def __init__(self, **environment: str) -> None:
        plain = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KINETO", "TRACELOOM"))
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**plain, **environment},
        )
        self.pid = self.process.pid
        assert self._line() == "up\n"

    def ask(self, expression: str) -> Any:
        self.say(expression)
        return json.loads(self._line())

    def say(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).startswith(
            "USDT:"
        ):  # PyTorch says so of each profile
            pass
        return line

    def close(self) -> int:
        """End it in order; its exit code."""
        try:
            self.process.communicate(timeout=120)
        finally:
            self.process.kill()
            self.process.wait()
        return self.process.returncode

    def described(self, rank: int | None = None) -> Process:
        """As the agent's collector has it."""
        return described(self.pid, rank)


def described(pid: int, rank: int | None = None) -> Process:
    """A process as the agent's collector has it."""
    parent, ticks = read_parent_and_start("/proc", pid)
    return Process(
        key=f"{pid}@{ticks}",
        pid=pid,
        start_ticks=ticks,
        started_ns=1,
        parent_pid=parent,
        uid=Path(f"/proc/{pid}").stat().st_uid,
        command="",
        owner=Owner(rank=rank),
    )


def tracer_of(pid: int) -> int:
    """Who traces a process; 0 for nobody."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("TracerPid:"))
