"""What recording takes of memory and CPU: programs that strain it, unrecorded and recorded.

    python benchmarks/record_budget.py [--operators N] [--only NAME]

Memory is the highest sum of the proportional share of all processes of the program (PSS, sampled
every 50 ms), with the processes that end and write a recording; CPU time is that of all of them.
The programs do a set amount of work, so that both can be compared. The limit of memory is the budget
and a tenth of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

BUDGET = 512 << 20
LIMIT = BUDGET + BUDGET // 10

OPERATORS = """
import sys, torch
torch.set_num_threads(1)
x = torch.ones(4)
for _ in range(int(sys.argv[1])):
    x = x * 1.0
"""
THREADS = """
import sys, threading, torch
torch.set_num_threads(1)
def work():
    x = torch.ones(4)
    for _ in range(int(sys.argv[1]) // 4):
        x = x * 1.0
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
LOADERS = """
import sys, torch
torch.set_num_threads(1)
class Items(torch.utils.data.Dataset):
    def __len__(self): return 64 * 20
    def __getitem__(self, index):
        x = torch.ones(4)
        for _ in range(int(sys.argv[1]) // (64 * 20)): x = x * 1.0
        return x
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=64):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINING = """
import sys, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(200)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for _ in range(int(sys.argv[1]) // 10_000):
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WIDE = """
import sys, torch
torch.set_num_threads(1)
parts = [torch.ones(1) for _ in range(10_000)]
for _ in range(int(sys.argv[1]) // 1_000):
    torch.cat(parts)
"""
ANNOTATED = """
import sys, torch
from torch._C._profiler import _RecordFunctionFast
torch.set_num_threads(1)
x = torch.ones(4)
with _RecordFunctionFast("life"), torch.profiler.record_function("epoch"):
    for _ in range(int(sys.argv[1])):
        x = x * 1.0
"""
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "operators": (OPERATORS, ()),
    "four threads": (THREADS, ()),
    "64 loader workers": (LOADERS, ()),
    "memory and stacks": (TRAINING, ("--memory", "--stacks")),
    "10,000 inputs": (WIDE, ()),
    "annotation for life": (ANNOTATED, ()),
}


@dataclass
class Usage:
    """What a program took."""

    peak_bytes: int
    cpu_s: float
    wall_s: float


def _sum_pss(root: psutil.Process) -> int:
    total = 0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += int(rollup.partition("\nPss:")[2].split()[0]) << 10
    return total


def measure(command: list[str], directory: Path) -> Usage:
    """Runs a program and whatever it leaves to write its recording."""
    # What a double fork leaves behind comes to this process.
    import ctypes

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    started, before = time.monotonic(), os.times()
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
    own, peak = psutil.Process(), 0
    while process.poll() is None or own.children():
        peak = max(peak, _sum_pss(own) - int(own.memory_full_info().pss))
        with contextlib.suppress(ChildProcessError):
            if process.returncode is not None:
                os.waitpid(-1, os.WNOHANG)
        time.sleep(0.05)
    after = os.times()
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return Usage(peak, cpu, time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", type=int, default=5_000_000, help="that each program calls")
    parser.add_argument("--only", choices=PROGRAMS)
    arguments = parser.parse_args()
    good = True
    print(f"  {'':22}{'memory of the recording':>26}{'CPU':>16}{'operators kept':>16}")
    for name, (text, options) in PROGRAMS.items():
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            (directory / "program.py").write_text(text)
            program = [sys.executable, "program.py", str(arguments.operators)]
            record = [sys.executable, "-m", "traceloom", "record", "-q", "-o", "run", *options]
            plain = measure(program, directory)
            recorded = measure([*record, "--", *program], directory)
            capture = json.loads((directory / "run" / "capture.json").read_text())
        kept = max((entry.get("operators") or 0 for entry in capture["ranks"]), default=0)
        more = recorded.peak_bytes - plain.peak_bytes
        good = good and more <= LIMIT
        print(
            f"  {name:22}{more / 2**20:10.0f} of {LIMIT / 2**20:4.0f} MiB"
            f"{recorded.cpu_s:9.1f} / {plain.cpu_s:4.1f} s{kept:16,}"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
