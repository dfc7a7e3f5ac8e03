"""What probes cost: a hit, a stack, a step with the step clock and without, an allocation; how long
attaching takes.

    python benchmarks/probes.py [--pairs 16] [--steps 200]

Needs root (or CAP_SYS_ADMIN), PyTorch and a C compiler. One training loop runs all the while;
blocks of its steps with and without probes take turns. Times are processor time of the loop, which
uses one thread and waits for
nothing: what else the machine does counts little, what the kernel does for the probes counts in full. Blocks are long,
since the loop pays some 2 ms once whenever probes are attached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gzip
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from traceloom.agent.ownership.model import Process
from traceloom.agent.probes.calls import (
    MOST_IN_WINDOW,
    CallProbes,
    CallStacks,
    ProbedCall,
    explain_unsupported,
)
from traceloom.agent.probes.steps import StepProbes
from traceloom.agent.probes.symbols import Symbols
from traceloom.agent.profilers.base import AllocationsProfiler, Window
from traceloom.system.elf import open_mapped, read_mappings
from traceloom.system.python_frames import PythonFrames

LIMIT = 0.01  # of a step
JOB = """
import json, sys, time
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
batches = iter(torch.utils.data.DataLoader(torch.randn(10**6, 256), batch_size=64))
def step():
    loss = model(next(batches)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
def allocation():
    torch.empty(1000)
print("ready", flush=True)
for line in sys.stdin:
    what, number = json.loads(line)
    call = {"step": step, "allocation": allocation}[what]
    start = time.process_time()
    for _ in range(number):
        call()
    print((time.process_time() - start) / number, flush=True)
"""


# The functions that the step clock probes, with nothing in them. They begin as PyTorch's do, which
# counts: the kernel does some instructions itself where a probe lies, as a push, and has the
# processor make a single step for others.
STAND_IN = """
struct text { const char *letters; unsigned long length; };
void nothing(const void *value) { __asm__ volatile("" : : "r"(value)); }
void *_ZN5torch8autograd8profiler25record_function_enter_newE(void *result, const struct text *name) {
    nothing(name); return result;
}
#ifdef __x86_64__
void _ZN5torch8autograd8profilerL24record_function_exit_newE(void *record);
__asm__(".text\\n.globl _ZN5torch8autograd8profilerL24record_function_exit_newE\\n"
        ".type _ZN5torch8autograd8profilerL24record_function_exit_newE, @function\\n"
        "_ZN5torch8autograd8profilerL24record_function_exit_newE:\\n"
        "mov (%rdi),%rdi\\n add $16,%rdi\\n jmp nothing@PLT\\n");
#else
void _ZN5torch8autograd8profilerL24record_function_exit_newE(void *record) { nothing(record); nothing(record); }
#endif
void enter(const char *name, int number) {
    struct text text = {name, 0};
    for (int i = 0; i < number; i++) _ZN5torch8autograd8profiler25record_function_enter_newE(&text, &text);
}
void leave(const char *name, int number) {
    for (int i = 0; i < number; i++) _ZN5torch8autograd8profilerL24record_function_exit_newE(&name);
}
"""
# A function at the end of a chain of so many.
CHAIN = """
int calls;
void nothing(const void *value) { __asm__ volatile("" : : "r"(value)); }
void watched(int *value) { nothing(value); calls++; nothing(value); }
int deep(int depth) { if (depth) deep(depth - 1); else watched(&depth); return ++calls; }
void burst(int depth, int number) { for (int i = 0; i < number; i++) deep(depth); }
"""


def stacks(depth: int = 20, bursts: int = 60) -> dict[str, float]:
    """Seconds that a probe adds to a call: that records it alone, and with its stack of C and of
    Python.
    """
    # No burst has more calls than stacks are taken in a window; between them lies one.
    number = MOST_IN_WINDOW - 50
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chain.so")
        options = ["-O1", "-fomit-frame-pointer", "-fno-inline", "-shared", "-fPIC"]
        subprocess.run(
            ["cc", "-x", "c", "-", "-o", str(path), *options], input=CHAIN, text=True, check=True
        )
        burst = ctypes.CDLL(str(path)).burst

        def seconds() -> float:
            results = []
            for _ in range(bursts):
                time.sleep(0.012)
                start = time.process_time()
                burst(depth, number)
                results.append((time.process_time() - start) / number)
            return statistics.median(results)

        result = {"plain": seconds()}
        symbols = Symbols(os.getpid())
        symbols.refresh()
        for name, interpreter, with_stack in (
            ("recorded", None, False),
            ("with a stack of C", None, True),
            ("with a stack of C and Python", PythonFrames(os.getpid()), True),
        ):
            taken = CallStacks(os.getpid(), symbols, interpreter)
            taken.refresh()
            probes = CallProbes(os.getpid(), taken)
            probes.attach(
                os.open(path, os.O_RDONLY), [(0, ProbedCall("watched\0", (), stacks=with_stack))]
            )
            for _ in range(3):  # rules are learned
                burst(depth, 1)
                taken.take()
            result[name] = seconds() - result["plain"]
            assert not taken.refused()
            if with_stack:
                longest = max(
                    taken.stacks.values(), key=lambda stack: len(stack.native) + len(stack.python)
                )
                frames = f"{len(longest.native)} + {len(longest.python)} frames"
                result[f"{name} ({frames})"] = result.pop(name)
            probes.close()
            taken.close()
    del result["plain"]
    return result


def hits(calls: int = 100_000, times: int = 7) -> dict[str, float]:
    """Seconds that a probe adds to a call: medians of the processor time of a loop in C."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "standin.so")
        command = [
            "cc",
            "-x",
            "c",
            "-",
            "-o",
            str(path),
            "-O1",
            "-fcf-protection=none",
            "-fno-inline",
            "-shared",
            "-fPIC",
        ]
        subprocess.run(command, input=STAND_IN, text=True, check=True)
        library = ctypes.CDLL(str(path))

        def seconds(call: str, name: bytes) -> float:
            function = getattr(library, call)
            results = []
            for _ in range(times):
                start = time.process_time()
                function(name, calls)
                results.append((time.process_time() - start) / calls)
            return statistics.median(results)

        cases = {
            "a range begins": ("enter", b"forward"),
            "a step": ("enter", b"Optimizer.step#AdamW.step"),
            "a range ends": ("leave", b""),
        }
        before = {name: seconds(*case) for name, case in cases.items()}
        probes = StepProbes()
        attached, _ = probes.attach(os.open(path, os.O_RDONLY))
        after = {name: seconds(*case) for name, case in cases.items()}
        attached.close()
        probes.close()
    return {name: after[name] - before[name] for name in cases}


class Job:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def seconds(self, what: str, number: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, number]) + "\n")
        self.process.stdin.flush()
        return float(self.line())


@contextlib.contextmanager
def step_clock(pid: int, times: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    probes = StepProbes()
    library = next(
        mapping for mapping in read_mappings(pid) if mapping.path.endswith("/libtorch_cpu.so")
    )
    attached, lacks = probes.attach(open_mapped(pid, library))
    times.append(time.perf_counter() - start)
    assert not lacks, lacks
    yield
    attached.close()
    probes.close()


def paired(
    job: Job, what: str, number: int, pairs: int, attaching: list[float]
) -> tuple[float, float, list[float]]:
    """Seconds per call without and with probes, of the quickest tenth of the blocks, and the
    differences of the pairs.

    What else the machine does makes blocks slower, by its caches, and never quicker; the order in a
    pair is random.
    """
    job.seconds(what, number)
    without, with_probes = [], []
    for _ in range(pairs):
        for probed in random.sample((False, True), 2):
            if probed:
                with step_clock(job.process.pid, attaching):
                    with_probes.append(job.seconds(what, number))
            else:
                without.append(job.seconds(what, number))
    differences = [after - before for before, after in zip(without, with_probes, strict=True)]
    return (
        statistics.quantiles(without, n=10)[0],
        statistics.quantiles(with_probes, n=10)[0],
        differences,
    )


async def allocations(job: Job, start_ticks: int, directory: Path) -> tuple[float, Path]:
    """Seconds per allocation and its free while they are recorded, and what was recorded."""
    process = Process(
        key="job",
        pid=job.process.pid,
        start_ticks=start_ticks,
        started_ns=0,
        parent_pid=0,
        uid=0,
        command="",
    )
    recording = asyncio.create_task(
        AllocationsProfiler().record(process, Window(0, 3.0, None), directory, "rank0")
    )
    before = await asyncio.to_thread(job.seconds, "allocation", 2000)
    slowest = before
    while not recording.done():
        slowest = max(slowest, await asyncio.to_thread(job.seconds, "allocation", 2000))
    (path,) = await recording
    return slowest, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if why := explain_unsupported()[0]:
        sys.exit(f"no probes here: {why}")
    job = Job()
    attaching: list[float] = []
    try:
        hit_s = hits()
        for name, seconds in hit_s.items():
            print(f"a hit, {name}: {seconds * 1e9:.0f} ns")
        for name, seconds in stacks().items():
            print(f"a call, {name}: {seconds * 1e9:.0f} ns")
        without, with_probes, differences = paired(job, "step", args.steps, args.pairs, attaching)
        share = (with_probes - without) / without
        spread = statistics.quantiles([difference / without for difference in differences], n=4)
        verdict = "within" if share <= LIMIT else "ABOVE"
        print(
            f"a step: {without * 1e3:.3f} -> {with_probes * 1e3:.3f} ms (quickest tenth of {args.pairs} blocks each)"
        )
        print(
            f"the step clock costs {share:+.2%} of a step (quartiles of pairs {spread[0]:+.2%} to {spread[2]:+.2%}), "
            f"{verdict} the limit of {LIMIT:.0%}"
        )
        # A step has three ranges: of the loader, of the optimizer, of zero_grad.
        of_step = 2 * hit_s["a range begins"] + hit_s["a step"] + 3 * hit_s["a range ends"]
        print(f"by its six hits: {of_step * 1e6:.2f} us = {of_step / without:.3%} of a step")
        median = statistics.median(attaching)
        print(f"load and attach: median {median * 1e3:.1f} ms, most {max(attaching) * 1e3:.1f} ms")
        plain = job.seconds("allocation", 50_000)
        with tempfile.TemporaryDirectory() as folder:
            stat = Path(f"/proc/{job.process.pid}/stat").read_text()
            recorded, path = asyncio.run(
                allocations(job, int(stat.rpartition(")")[2].split()[19]), Path(folder))
            )
            document = json.loads(gzip.decompress(path.read_bytes()))
        print(
            f"an allocation and its free: {plain * 1e6:.2f} -> {recorded * 1e6:.2f} us with stacks"
        )
        print(
            f"recorded {len(document['events']):,} in 3 s, lost {document['lost']:,}, "
            f"without a stack {document['without_stack']:,}"
        )
    finally:
        job.process.kill()
        job.process.communicate()


if __name__ == "__main__":
    main()
