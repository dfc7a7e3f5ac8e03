"""Simulate a workload: read it, change it, evaluate it, and say what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from traceloom.errors import UsageError
from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.model.frames import as_declared
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import point_times
from traceloom.retime import Plan, law
from traceloom.retime.critical_path import critical_path, parts
from traceloom.simulate.native.account import rank_account
from traceloom.simulate.native.inputs import AnyWorkload, open_input
from traceloom.simulate.simulation import NODES, PATH, RANKS, Simulation

Say = Callable[[str], None]


def run(
    workload: AnyWorkload,
    machine: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    groups: str | Path | None = None,
    only: str | None = None,
    step: int | None = None,
    cache: bool = True,
    progress: Say | None = None,
) -> Simulation:
    """Simulate a workload on a machine.

    Args:
        workload: A recorded run, a `.graph`, a directory of `.et` files, or what was read of one.
        machine: A `machine.toml` or the name of a preset; the recorded machine where None.
        overrides: What to change in the machine, as `network.0.bandwidth=100`.
        groups: Who is in which group, of `.et` files; where None the file beside them.
        only: `communication` or `compute`: the other side takes no time.
        step: One step of a recorded run.
        cache: Look into the cache of read traces, and fill it.
        progress: Told in words what is being done.

    Raises:
        UsageError, InputError: As `open_input`.

    Example:
        >>> from traceloom.simulate import run
        >>> run("run").identity_error  # doctest: +SKIP
    """
    if machine is not None or overrides:
        raise UsageError("no machine can be simulated yet", slug="wrong-usage")
    say: Say = progress or (lambda _: None)
    say("reading")
    source = open_input(workload, groups=groups, only=only, step=step, cache=cache)
    say("evaluating")
    graph = source.graph
    plan = Plan(graph)
    checked: dict[str, Any] = {"measured_ns": None, "identity_ns": None, "identity_error": None}
    if source.measured:
        kept = law(graph, plan)
        checked = {
            "measured_ns": kept.window_ns,
            "identity_ns": kept.window_ns + kept.honest_error_ns,
            "identity_error": kept.honest_error,
            "trusted": kept.holds,
        }
        checked["identity"] = (
            f"Simulated on the recorded machine, the measured {units.duration(kept.window_ns)} come back as "
            f"{units.duration(checked['identity_ns'])} ({kept.honest_error * 100:+.2f} %)."
        )
    else:
        checked["identity"] = "Nothing here was measured: the times follow from the durations in the files."
    return _answer(graph, graph, name=source.name, machine="", step=step, notices=graph.notices, **checked)


def _answer(recorded: Graph, simulated: Graph, **more: Any) -> Simulation:
    """The tables, from the workload before and after."""
    before, after = point_times(recorded), point_times(simulated)
    begin = int(before.min()) if before.size else 0
    own_ends = rank_account(recorded, begin).select("rank", before_ns="end_ns")
    ranks = rank_account(simulated, begin).join(own_ends, on="rank", maintain_order="left").pipe(as_declared, RANKS)
    inner = ~pl.col("kind").cast(pl.String).is_in([gs.ORIGIN, gs.RENDEZVOUS, gs.ARRIVAL])
    nodes = simulated.nodes.with_columns(
        start_ns=pl.Series(after[0::2] - begin),
        end_ns=pl.Series(after[1::2] - begin),
        before_start_ns=pl.Series(before[0::2] - begin),
        before_end_ns=pl.Series(before[1::2] - begin),
    )
    consists = [
        parts(graph, critical_path(graph), begin).select("what", "kind", pl.col("time_ns").alias(name))
        for graph, name in ((recorded, "before_ns"), (simulated, "after_ns"))
        if before.size
    ]
    path = PATH.to_frame()
    if consists:
        path = consists[0].join(consists[1], on=["what", "kind"], how="full", coalesce=True).fill_null(0)
        path = path.sort("after_ns", "before_ns", descending=True).pipe(as_declared, PATH)
    answer = Simulation(
        mode="native",
        before_ns=int(before.max()) - begin if before.size else 0,
        after_ns=int(after.max()) - begin if after.size else 0,
        ranks=ranks,
        nodes=nodes.filter(inner).pipe(as_declared, NODES),
        path=path,
        graph=simulated,
        recorded=recorded,
        **more,
    )
    answer.check()
    return answer
