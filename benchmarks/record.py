"""What recording costs: a step recorded by Traceloom, by a bare `torch.profiler`, and by nobody.

    python benchmarks/record.py [--rounds 12] [--stacks] [--memory]

All three run the same model, on one thread, and take turns, five steps each in a fork of one process
(a process can be recorded once); the order changes from round to round. Both profilers have the same
settings, with shapes. Compared is CPU time of the thread: medians over all steps, and the median of the ratios of neighbors, which is what noise
on the machine disturbs least. Then `traceloom record` itself runs the example with many steps and
says what it measured.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import traceloom

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from train_gpt import GPT, Characters, make_text  # noqa: E402  (the example beside this file)

STEPS = 5
LIMIT_BARE, LIMIT_UNRECORDED = 1.05, 1.1


def workload(layers: int = 4) -> Callable[[], None]:
    """One training step of the example's model, with data that is there already."""
    torch.manual_seed(1)
    data = Characters(make_text(400, 1), 128)
    model = GPT(len(data.alphabet), 128, layers=layers, width=192, heads=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pairs = [data[at] for at in range(8)]
    tokens, targets = (
        torch.stack([pair[0] for pair in pairs]),
        torch.stack([pair[1] for pair in pairs]),
    )

    def step() -> None:
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None]) -> int:
    started = time.thread_time_ns()
    step()
    return time.thread_time_ns() - started


def unrecorded(step: Callable[[], None], _: argparse.Namespace) -> list[int]:
    return [timed(step) for _ in range(STEPS)]


def bare(step: Callable[[], None], arguments: argparse.Namespace) -> list[int]:
    with torch.profiler.profile(
        record_shapes=True, with_stack=arguments.stacks, profile_memory=arguments.memory
    ) as profiler:
        times = [timed(step) for _ in range(STEPS)]
    with tempfile.TemporaryDirectory() as directory:
        profiler.export_chrome_trace(str(Path(directory) / "trace.json"))
    return times


def ours(step: Callable[[], None], arguments: argparse.Namespace) -> list[int]:
    with tempfile.TemporaryDirectory() as directory:
        names = ("stacks", "memory")
        options = {name: getattr(arguments, name) for name in names} | {"quiet": True}
        with traceloom.record(Path(directory) / "run", **options):
            return [timed(step) for _ in range(STEPS)]


def in_fork(way: Callable[..., Any], step: Callable[[], None], *more: Any) -> Any:
    """The answer of a fork of this process, after steps in it that make the shared pages its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for _ in range(STEPS):
                step()
            os.write(write, json.dumps(way(step, *more)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def quiet() -> contextlib.AbstractContextManager[object]:
    """Kineto talks on descriptor 2; it is of no interest here."""
    sink = open(os.devnull, "w")  # noqa: PTH123, SIM115
    kept = os.dup(2)
    os.dup2(sink.fileno(), 2)
    stack = contextlib.ExitStack()
    stack.callback(sink.close)
    stack.callback(os.close, kept)
    stack.callback(os.dup2, kept, 2)
    return stack


def ratio(upper: list[int], lower: list[int]) -> float:
    """Median of the ratios of neighboring rounds."""
    rounds = range(0, len(upper), STEPS)
    return statistics.median(
        statistics.median(upper[at : at + STEPS]) / statistics.median(lower[at : at + STEPS])
        for at in rounds
    )


# Every way follows every other one equally often: each leaves caches and memory in another state.
ORDERS = list(itertools.permutations(["unrecorded", "bare", "ours"]))


def take_turns(arguments: argparse.Namespace) -> bool:
    torch.set_num_threads(1)
    step = workload()
    ways = [unrecorded, bare, ours]
    times: dict[str, list[int]] = {way.__name__: [] for way in ways}
    with quiet():
        unrecorded(step, arguments)  # warm-up
        for number in range(arguments.rounds):
            for way in ORDERS[number % len(ORDERS)]:
                times[way] += in_fork(globals()[way], step, arguments)
    print(f"CPU time of one step of the example, {arguments.rounds} rounds of {STEPS} steps")
    print(f"  {'':24}{'median':>10}{'fastest':>10}")
    for name, label in (
        ("unrecorded", "unrecorded"),
        ("bare", "torch.profiler"),
        ("ours", "traceloom"),
    ):
        print(
            f"  {label:24}{statistics.median(times[name]) / 1e6:8.1f} ms{min(times[name]) / 1e6:8.1f} ms"
        )
    against_bare = ratio(times["ours"], times["bare"])
    against_none = ratio(times["ours"], times["unrecorded"])
    print(f"  traceloom / torch.profiler  {against_bare:.3f}   (limit {LIMIT_BARE})")
    print(f"  traceloom / unrecorded      {against_none:.3f}   (limit {LIMIT_UNRECORDED})")
    print(f"  torch.profiler / unrecorded {ratio(times['bare'], times['unrecorded']):.3f}")
    costly = arguments.stacks or arguments.memory
    return against_bare <= LIMIT_BARE and (costly or against_none <= LIMIT_UNRECORDED)


def command_line(arguments: argparse.Namespace) -> None:
    """The same through the command line, against the steps of the same run that nobody recorded."""
    with tempfile.TemporaryDirectory() as directory:
        output = str(Path(directory) / "run")
        example = [
            sys.executable,
            str(ROOT / "examples/train_gpt.py"),
            "--steps",
            "40",
            "--workers",
            "0",
        ]
        shell = "import sys; from traceloom.cli import main; sys.exit(main())"
        options = [word for word in ("stacks", "memory") if getattr(arguments, word)]
        record = [sys.executable, "-c", shell, "record", "-q", "-o", output, "--graph"]
        record += ["--steps", "15..25"]
        subprocess.run(
            [*record, *[f"--{word}" for word in options], "--", *example],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        overhead = json.loads((Path(output) / "capture.json").read_text())["ranks"][0]["overhead"]
    print("traceloom record -- python examples/train_gpt.py --steps 40")
    low, high = overhead["ratio_low"], overhead["ratio_high"]
    print(
        f"  recorded / unrecorded step  {overhead['ratio']:.3f}   "
        f"({low:.3f} to {high:.3f}, {overhead['ratio_of']} time)"
    )
    print(f"  graph step / unrecorded     {overhead['graph_step_ratio']:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--stacks", action="store_true")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    good = take_turns(arguments)
    command_line(arguments)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
