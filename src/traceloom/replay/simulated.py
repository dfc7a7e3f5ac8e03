"""The steps that a replay runs, simulated on a machine: what the replay is held against beside the recording.

Both sides are of the same ops on the same ranks. At the pace `fast` a replay has nothing of the host between its ops,
so nothing of it is left in the simulated graph either; at the pace `recorded` both have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from traceloom.chakra.conversion import is_chakra
from traceloom.model import graph_schema as gs
from traceloom.model import graph_store
from traceloom.model.frames import as_declared, schema
from traceloom.model.graph import Graph
from traceloom.model.notice import Notice
from traceloom.read import load
from traceloom.replay.inputs import AnyPath
from traceloom.replay.plan import ENDING, ReplayPlan, is_plan
from traceloom.retime import ABSENT
from traceloom.simulate.machine import Machine, read_machine
from traceloom.simulate.native.evaluation import plan_of
from traceloom.simulate.native.inputs import open_input
from traceloom.simulate.native.running import run
from traceloom.simulate.scenario import Scenario
from traceloom.simulate.whatif import changed_graph

RANKS = schema("rank step_count simulated_ns")


@dataclass(frozen=True)
class SimulatedSteps:
    """How long the steps of a replay take on a machine.

    Attributes:
        machine: Its name.
        ranks: rank; step_count (the timed steps that were simulated); simulated_ns, from the beginning of the rank's
            step to its end, the median over the steps. Empty where `absent` says why.
        absent: Why nothing was simulated, in words; "" where it was.
        notices: What is assumed, and what lies outside of what was measured on the machine.
    """

    machine: str
    ranks: pl.DataFrame
    absent: str = ""
    notices: tuple[Notice, ...] = ()


def simulate_steps(
    paths: Sequence[AnyPath],
    plan: ReplayPlan,
    machine: str | Path | Machine,
    *,
    with_gaps: bool,
    cache: bool = True,
    say: Callable[[str], None] | None = None,
) -> SimulatedSteps:
    """Simulate the timed steps of what is replayed, each on its own.

    Args:
        paths: What the plan was made of.
        plan: What is replayed.
        machine: A machine, a `machine.toml` or the name of a preset.
        with_gaps: Whether the host does between the ops what it did; else nothing, as in a replay at the pace `fast`.
        cache: Look into the cache of read traces, and fill it.
        say: Told in words what is being done.

    Raises:
        UsageError: As `read_machine`; slug `machine-size`: the machine has another number of ranks.
        InputError: As `read_machine`.
    """
    described = read_machine(machine) if isinstance(machine, (str, Path)) else machine
    name = described.name or str(machine)
    target = described if isinstance(machine, Machine) else machine  # a preset grows with the workload
    steps = set.intersection(*(set(of_rank.steps["step"].to_list()) for of_rank in plan))
    files = [Path(os.fspath(path)) for path in paths]
    absent = ""
    if any(path.is_file() and (path.suffix == ENDING or is_plan(path) or graph_store.is_graph(path)) for path in files):
        absent = "a plan or a graph does not hold the traces of the steps; name the run"
    elif any(is_chakra(path) for path in files):
        absent = ".et files do not hold the traces of the steps; name the run"
    elif not steps:
        absent = "no timed step was recorded, or a part of one is replayed"
    if absent:
        return SimulatedSteps(name, RANKS.to_frame(), absent)
    session = load(*paths, cache=cache)
    if others := [rank for rank in session.ranks if rank not in plan.ranks]:
        return SimulatedSteps(name, RANKS.to_frame(), f"not all ranks are replayed, as rank {others[0]}")
    rows, notices = [], dict[str, Notice]()
    for step in sorted(steps):
        if say is not None:
            say(f"simulating step {step}")
        source = open_input(session, step=step)
        if not with_gaps:
            source = replace(source, graph=without_gaps(source.graph, plan))
        answer = run(source, target)
        notices |= {notice.slug: notice for notice in answer.notices}
        rows.append(answer.nodes.group_by("rank").agg((pl.max("end_ns") - pl.min("start_ns")).alias("simulated_ns")))
    ranks = pl.concat(rows).filter(pl.col("rank").is_in(list(plan.ranks)))
    medians = ranks.group_by("rank").agg(pl.len().alias("step_count"), pl.median("simulated_ns").round().cast(pl.Int64))
    return SimulatedSteps(name, as_declared(medians.sort("rank"), RANKS), "", tuple(notices.values()))


def without_gaps(graph: Graph, plan: ReplayPlan) -> Graph:
    """The graph with nothing of the host between ops that a replay could call, and without waits for that.

    Left are ops by the name spaces of those that are planned, what they call, and the device. Not left are Python, the
    loader, annotations, and the autograd engine around the ops of the backward pass.

    Args:
        graph: Of recorded steps.
        plan: What is replayed of them.
    """
    spaces = {name.partition("::")[0] for of_rank in plan for name in of_rank.ops["name"].unique() if "::" in name}
    space = pl.col("name").str.extract(r"^(\w+)::")
    is_wrapper = (pl.col("category").cast(pl.String) == "op") & ~space.is_in([*spaces, "aten"]).fill_null(value=False)
    outside = pl.col("op").is_null() | is_wrapper.fill_null(value=False)
    kind = pl.col("kind").cast(pl.String)
    gaps = graph.nodes.select((kind == gs.THINK) | (kind.is_in([gs.HOST, gs.BLOCK]) & outside)).to_series().to_numpy()
    scenario = Scenario.of(graph).copy()
    scenario.work_ns[gaps] = 0
    _, target = scenario.ends()
    scenario.delay_ns[scenario.edges("synchronize") & gaps[target]] = ABSENT
    return changed_graph(graph, scenario, scenario.times(plan_of(graph)))
