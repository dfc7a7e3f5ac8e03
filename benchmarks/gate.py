"""How often the check finds a real slowdown of 5 % in repeated training runs on the CPU, and how
often it errs.

    python benchmarks/gate.py [--runs 12] [--steps 150] [--keep DIR] [--processor-time]

Makes runs of a small training loop whose step is 20 equal batches, and as many with 21, in turns,
as `traceloom record` does by default. Then holds random groups of them against each other: groups
of equal runs, where `fail` is a false alarm, and groups of 20 against groups of 21 batches, where
it is a detection.

With --processor-time runs are forks of one process that nobody records, a step the processor time
that it took: on a machine whose processors others use, wall times say more about the others. With
--keep, runs that are there are read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

import traceloom
from traceloom.analyze import gate, gate_summary
from traceloom.analyze.gate_summary import OperatorCalls
from traceloom.trace.session import WARM_UP_STEPS

BATCHES = 20
Pools = tuple[list[gate_summary.RunSummary], list[gate_summary.RunSummary]]
CONDITIONS = (
    "step_time > 0%",
    "step_time > 2%",
    "median(step_time) > 2%",
    "p10(step_time) > 0%",
    "p10(step_time) > 2%",
)
GROUPS = ((1, 1), (3, 3), (5, 5), (6, 1))


PROGRAM = """\
import json
import os
import sys
import time

import torch
from torch import nn


def train(steps, batches):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(64, 128)
    took = []
    for _ in range(steps):
        began = time.process_time_ns()
        for _ in range(batches):
            (model(data) - data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.process_time_ns() - began)
    return took


steps, batches = int(sys.argv[1]), [int(text) for text in sys.argv[2].split(",")]
if len(sys.argv) == 3:
    train(steps, batches[0])
for number in range(int(sys.argv[3]) if len(sys.argv) > 3 else 0):
    for many in batches:
        child = os.fork()
        if not child:
            with open(f"{sys.argv[4]}/{many}-{number}.json", "w") as file:
                json.dump(train(steps, many), file)
            os._exit(0)
        os.waitpid(child, 0)
"""


def record(folder: Path, steps: int, batches: int) -> gate_summary.RunSummary:
    """Record one run, unless it is there, and take what a check needs of it."""
    if not folder.exists():
        program = [sys.executable, str(folder.parent / "train.py"), str(steps), str(batches)]
        recording = [
            sys.executable,
            "-m",
            "traceloom",
            "record",
            "-q",
            "-o",
            str(folder),
            "--",
        ]
        subprocess.run([*recording, *program], check=True)
    return gate_summary.summarise(traceloom.load(folder, cache=False))


def timed(file: Path) -> gate_summary.RunSummary:
    """The processor times of a run that was not recorded."""
    took = [float(ns) for ns in json.loads(file.read_text(encoding="utf-8"))][WARM_UP_STEPS:]
    return gate_summary.RunSummary(
        file.stem, [], OperatorCalls([], [], []), took, [0], {"step_time": took[:1]}, {}, None
    )


def make(args: argparse.Namespace, folder: Path) -> Pools:
    """All runs, of 20 and of 21 batches in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    counts = (BATCHES, BATCHES + 1)
    if args.processor_time and not (folder / f"{BATCHES}-0.json").exists():
        turns = [str(args.steps), ",".join(map(str, counts)), str(args.runs), str(folder)]
        subprocess.run([sys.executable, str(program), *turns], check=True)
    pools: Pools = ([], [])
    for number in range(args.runs):
        for pool, batches in zip(pools, counts, strict=True):
            place = folder / f"{batches}-{number}"
            pool.append(
                timed(Path(f"{place}.json"))
                if args.processor_time
                else record(place, args.steps, batches)
            )
    return pools


def rates(pools: Pools, draws: int) -> None:
    """Print a row for each size of the groups and each condition."""
    chance = random.Random(1)
    print("| runs a side | fails if | slowdown | pass | inconclusive | fail |")
    print("|--:|---|--:|--:|--:|--:|")
    for base_count, new_count in GROUPS:
        for text in CONDITIONS:
            condition = gate.parse(text)
            for slower in (False, True):
                verdicts: Counter[str] = Counter()
                for _ in range(draws):
                    base = chance.sample(pools[0], base_count)
                    rest = pools[1] if slower else [run for run in pools[0] if run not in base]
                    verdicts[
                        gate.judge(base, chance.sample(rest, new_count), [condition]).verdict
                    ] += 1
                told = " | ".join(
                    f"{verdicts[one] / draws:.0%}"
                    for one in (gate.PASS, gate.INCONCLUSIVE, gate.FAIL)
                )
                print(
                    f"| {base_count} / {new_count} | `{text}` | {'5 %' if slower else 'none'} | {told} |",
                    flush=True,
                )


def noise(pools: Pools) -> None:
    """Print how much runs and steps scatter, and the slowdown over all runs."""
    means = [np.array([np.mean(run.wall_ns) for run in pool]) for pool in pools]
    steps = np.mean([np.std(run.wall_ns) / np.mean(run.wall_ns) for run in pools[0]])
    scatter = [pool.std(ddof=1) / pool.mean() for pool in means]
    count = np.mean([len(run.wall_ns or ()) for run in pools[0]])
    print(f"{len(means[0])} + {len(means[1])} runs, {count:.0f} undisturbed steps each")
    print(
        f"mean step {means[0].mean() / 1e6:.2f} ms; with one batch more {means[1].mean() / means[0].mean() - 1:+.1%}"
    )
    medians = [np.median([np.median(run.wall_ns) for run in pool]) for pool in pools]
    print(f"by medians {medians[1] / medians[0] - 1:+.1%}")
    low = [np.array([np.percentile(run.wall_ns, 10) for run in pool]) for pool in pools]
    apart = [pool.std(ddof=1) / pool.mean() for pool in low]
    slower = low[1].mean() / low[0].mean() - 1
    print(f"by 10th percentiles {slower:+.1%}; runs scatter by {apart[0]:.1%} and {apart[1]:.1%}")
    print(
        f"runs scatter by {scatter[0]:.1%} and {scatter[1]:.1%} (standard deviation), steps in a run by {steps:.1%}"
    )
    print(
        f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n"
    )


def main() -> None:
    """Record, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        pools = make(args, args.keep or Path(temporary))
    noise(pools)
    rates(pools, args.draws)


if __name__ == "__main__":
    main()
