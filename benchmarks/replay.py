"""Replay: how fast plans are made, what a pass costs beside its ops, and how near it comes to what
was recorded.

    python benchmarks/replay.py [INPUT] [--rounds 20] [--et-replay DIR]

- **Planning**: nodes of host traces per second, of INPUT if one is given, else of a step of a model of 24 layers that
  this script records, so that what every plan costs does not rule; how long a plan of one op takes
  is shown beside it.
- **Cost per op**: a pass over many small ops against the same calls in a plain loop, in turns.
- **Fidelity**: a training step of the example's model is recorded; then the step and its replay run in turns in one
  process. Compared are processor times of whole steps, times of the ops above 50 µs that both
  profilers of the ops show (the original under `torch.profiler`, which takes turns, too), and the
  most memory that tensors took, as PyTorch's allocator says.

With `--et-replay DIR` (a checkout of `et_replay`, which needs CUDA) its preparation of the same
host trace is timed. Missed limits make the exit code 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

import traceloom
from traceloom.testing.host_trace_builder import HostTraceBuilder
from traceloom.workload.replay.plan import RankPlan
from traceloom.workload.replay.planning import make_plan
from traceloom.workload.replay.running import PlanRunner, RunOptions

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "examples"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from record import workload  # noqa: E402  (the benchmark beside this file)

from support.plans import PlanBuilder  # noqa: E402

SLOW_OP_NS = 50_000
LIMIT_NODES_PER_S, LIMIT_OP_NS = 100_000, 2_000
LIMIT_STEP, LIMIT_MEDIAN, LIMIT_SPREAD, LIMIT_MEMORY = (0.95, 1.10), (0.9, 1.1), (0.75, 1.35), 1.2
ADD = "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"


def processor_time(run: Callable[[], object]) -> int:
    started = time.process_time_ns()
    run()
    return time.process_time_ns() - started


def planning(source: str) -> float:
    """Nodes planned per second of processor time, of all threads: the least of seven, in one
    process.

    Reading is not in it. The first plan of a process is shown too: it parses every schema, which
    the later ones have.
    """
    reads, plans = zip(*(timed_plan(source) for _ in range(7)), strict=True)
    nodes = host_nodes(source)
    wall, spent = (min(column) for column in zip(*plans, strict=True))
    with tempfile.TemporaryDirectory() as directory:
        small = Path(directory) / "one.host.json"
        build = HostTraceBuilder()
        tensor = ([1, 2, 0, 4, 4, "cpu"], [4], "Tensor(float)")
        build.op(
            "aten::relu",
            schema="aten::relu(Tensor self) -> Tensor",
            inputs=[tensor],
            outputs=[tensor],
        )
        small.write_text(build.text(), encoding="utf-8")
        fixed = min(timed_plan(str(small))[1][1] for _ in range(7))
    print(
        f"planning: {nodes:,} nodes in {spent:.3f} s of processor time, {nodes / spent:,.0f} nodes/s; {wall:.3f} s on "
        f"the clock, {nodes / wall:,.0f} nodes/s; the first plan took {plans[0][1]:.3f} s; of one op it takes "
        f"{fixed * 1e3:.1f} ms; read in {min(reads):.2f} s"
    )
    return nodes / spent


def timed_plan(source: str) -> tuple[float, tuple[float, float]]:
    """Seconds of reading; those of planning on the clock, and of processors."""
    begins = [(time.perf_counter(), time.process_time())]

    def say(what: str) -> None:
        if what.startswith("planning"):
            begins.append((time.perf_counter(), time.process_time()))

    make_plan(source, cache=False, progress=say)
    started, (wall, spent) = begins[0][0], begins[1]
    return wall - started, (time.perf_counter() - wall, time.process_time() - spent)


def planning_of_a_deep_model() -> float:
    """Nodes planned per second of a step that is large enough that what every plan costs does not
    rule.
    """
    step = workload(layers=24)
    with tempfile.TemporaryDirectory() as directory:
        with traceloom.record(Path(directory) / "run", steps=1, graph_step=True, quiet=True):
            for _ in range(6):
                step()
        return planning(str(Path(directory) / "run"))


def host_nodes(source: str) -> int:
    files = sorted(Path(source).glob("*.host.json*")) if Path(source).is_dir() else [Path(source)]
    texts = (
        gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for file in files
    )
    return sum(len(json.loads(text)["nodes"]) for text in texts)


def small_ops(count: int) -> RankPlan:
    build = PlanBuilder()
    last, other = build.tensor(4, external=True), build.tensor(4, external=True)
    for _ in range(count):
        this = build.tensor(4)
        build.run(ADD, [{"tensor": 0}, {"tensor": 1}, 1], [last, other], [this])
        last = this
    return build.build()


def cost_per_op(rounds: int, count: int = 5000) -> float:
    """What a pass takes longer per op than a loop that calls the same function, ns."""
    execution = PlanRunner(small_ops(count), torch.device("cpu"), RunOptions())
    add = torch.ops.aten.add.Tensor._op  # noqa: SLF001
    one, other = torch.ones(4), torch.ones(4)

    def plain() -> None:
        tensor = one
        for _ in range(count):
            tensor = add(tensor, other)

    passes, loops = [], []
    with torch.no_grad():
        for _ in range(rounds):
            passes.append(processor_time(execution.program.run_once))
            loops.append(processor_time(plain))
    cost = (min(passes) - min(loops)) / count
    print(
        f"cost per op: {cost:.0f} ns above the plain call, which takes {min(loops) / count:.0f} ns"
    )
    return cost


def op_times(step: Callable[[], None], names: list[str]) -> list[int]:
    """How long each of these ops took in a step, which runs them in this order, ns."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        step()
    durations: list[int] = []
    end = 0
    for event in sorted(
        profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        inside = event.start_ns() < end  # of an op that was counted
        if len(durations) < len(names) and event.name() == names[len(durations)] and not inside:
            durations.append(event.duration_ns())
            end = event.start_ns() + event.duration_ns()
    assert len(durations) == len(names), f"{names[len(durations)]} did not run"
    return durations


def max_bytes(step: Callable[[], object]) -> int:
    """The highest sum of what a step allocated and did not free yet."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profiler:
        step()
    alive = most = 0
    for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most


def storages_bytes(values: Iterable[Any]) -> int:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(
        {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors
        }.values()
    )


def tensors_of(step: Callable[[], None]) -> Iterator[torch.Tensor]:
    """What lives between the steps of the workload."""
    for cell in step.__closure__ or ():
        held = cell.cell_contents
        if isinstance(held, torch.nn.Module):
            yield from held.parameters()
        elif isinstance(held, torch.optim.Optimizer):
            yield from (value for state in held.state.values() for value in state.values())
        elif isinstance(held, torch.Tensor):
            yield held


def fidelity(rounds: int) -> Iterator[tuple[str, bool]]:
    """The step and its replay in turns; what was to be reached, and whether it was."""
    torch.set_num_threads(1)
    step = workload()
    for _ in range(3):
        step()
    with tempfile.TemporaryDirectory() as directory:
        with traceloom.record(Path(directory) / "run", steps=3, graph_step=True, quiet=True):
            for _ in range(10):
                step()
        capture = str(Path(directory) / "run")
        (plan,) = make_plan(capture)
    torch.set_flush_denormal(True)
    execution = PlanRunner(plan, torch.device("cpu"), RunOptions())
    program = execution.program
    print(
        f"fidelity: {plan.ops.height:,} instructions, {len(program.failures)} failed, {len(program.replaced)} of "
        f"another shape, {execution.stand_ins.height} stand-ins"
    )
    runs = plan.ops.filter(pl.col("action") == "run")
    names, rows = runs["name"].to_list(), runs["op"].to_numpy()
    wholes: list[tuple[int, int]] = []
    parts: list[tuple[list[int], np.ndarray]] = []
    for _ in range(rounds):
        wholes.append((processor_time(step), execution.run_pass()[1]))
        original = op_times(step, names)
        execution.run_pass(with_timer=True)
        parts.append((original, program.times()["duration_ns"].to_numpy()[rows]))
    original_ns, replayed_ns = (statistics.median(column) for column in zip(*wholes, strict=True))
    ratio = replayed_ns / original_ns
    neighbors = statistics.median(replayed / original for original, replayed in wholes)
    print(
        f"  whole step, processor time: {original_ns / 1e6:.1f} ms, replayed {replayed_ns / 1e6:.1f} ms, "
        f"ratio {ratio:.3f}, median of neighbors {neighbors:.3f}"
    )
    yield "whole step", LIMIT_STEP[0] <= ratio <= LIMIT_STEP[1]
    original_op, replayed_op = (
        np.median(np.array(column), axis=0) for column in zip(*parts, strict=True)
    )
    table = pl.DataFrame(
        {"name": names, "original": original_op, "replayed": replayed_op}
    ).with_columns((pl.col("replayed") / pl.col("original")).alias("ratio"))
    slow = table.filter(pl.col("original") > SLOW_OP_NS)
    low, middle, high = (float(slow["ratio"].quantile(at, "linear")) for at in (0.1, 0.5, 0.9))  # type: ignore[arg-type]
    print(
        f"  {slow.height} ops above 50 µs: ratio {middle:.3f}, P10 to P90 {low:.3f} to {high:.3f}; by name:"
    )
    by_name = table.group_by("name").agg(
        pl.len(), pl.col("original", "replayed").sum(), pl.col("ratio").median()
    )
    for name, count, first, second, median in (
        by_name.sort("original", descending=True).head(12).iter_rows()
    ):
        print(
            f"    {name:55} {count:5} {first / 1e6:8.2f} ms {second / 1e6:8.2f} ms  median {median:.2f}"
        )
    print(
        f"    {'all':55} {table.height:5} {original_op.sum() / 1e6:8.2f} ms {replayed_op.sum() / 1e6:8.2f} ms"
    )
    yield "median of ops", LIMIT_MEDIAN[0] <= middle <= LIMIT_MEDIAN[1]
    yield "spread of ops", LIMIT_SPREAD[0] <= low <= high <= LIMIT_SPREAD[1]
    before = storages_bytes(tensors_of(step)) + max_bytes(step)
    after = storages_bytes(program.registers) + max_bytes(execution.run_pass)
    print(
        f"  most memory of tensors: {before / 1e6:.1f} MB, replayed {after / 1e6:.1f} MB, ratio {after / before:.3f}"
    )
    yield "memory", after <= LIMIT_MEMORY * before


def peer(directory: Path, source: str) -> None:
    """How long the peer takes to prepare the host trace of a rank."""
    if not torch.cuda.is_available():
        print("et_replay: not timed, because it needs CUDA and there is no CUDA device here")
        return
    if not (directory / "et_replay").is_dir():
        print(
            f"et_replay: not timed, because {directory} is no checkout of it: it has no directory et_replay"
        )
        return
    host_trace = Path(source)
    if host_trace.is_dir():
        (host_trace, *_) = sorted(host_trace.glob("*.host.json*"))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "rank-0.json"
        data = host_trace.read_bytes()
        trace.write_bytes(gzip.decompress(data) if host_trace.suffix == ".gz" else data)
        command = [
            sys.executable,
            "-m",
            "et_replay.tools.et_replay",
            "--input",
            str(trace),
            "--warmup-iter",
            "0",
        ]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--iter", "1"], cwd=directory, capture_output=True, text=True, check=False
        )
        took = time.perf_counter() - started
    read, (planned, _) = timed_plan(source)
    ours = read + planned
    print(
        f"et_replay: {took:.2f} s with exit code {done.returncode}, ours {ours:.2f} s, ratio {took / ours:.1f}"
    )
    if done.returncode:
        print(done.stderr[-500:])


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure planning, the cost per op, and fidelity.")
    parser.add_argument("input", nargs="?", help="a capture or host trace to plan")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--et-replay", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    reached = []
    if arguments.input:
        reached.append(
            ("nodes per second of the input", planning(arguments.input) >= LIMIT_NODES_PER_S)
        )
    else:
        reached.append(("nodes per second", planning_of_a_deep_model() >= LIMIT_NODES_PER_S))
    reached.append(("cost per op", cost_per_op(arguments.rounds) <= LIMIT_OP_NS))
    reached += fidelity(arguments.rounds)
    if arguments.et_replay and not arguments.input:
        print("et_replay: not timed, because it takes a host trace: name one as INPUT")
    elif arguments.et_replay:
        peer(arguments.et_replay, arguments.input)
    missed = [what for what, is_reached in reached if not is_reached]
    print(f"missed: {', '.join(missed)}" if missed else "all limits kept")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
