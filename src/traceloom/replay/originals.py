"""How long each op took when it was recorded: in the timed steps, not in the slower step of the host trace."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.compilations import COMPILED, marks
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Bools, Ints
from traceloom.link.matching import Matching
from traceloom.model import Graph, Trace
from traceloom.model.arrays import lookup, nearest
from traceloom.model.category import GPU_WORK
from traceloom.model.frames import schema

STEPS = schema("step duration_ns cpu_ns")
HOLES = schema("name count duration_ns")
_FOR_GPU = r"^triton_"  # kernels that a compiled graph launches


@dataclass(frozen=True)
class Originals:
    """What was measured of the nodes of a host trace; by id there.

    Attributes:
        durations_ns: Durations of each node's events, in order of time.
        gap_ns: Host time between the end of the op before it on its thread and its start, the median.
        stream: Stream of the first GPU work below it.
        gpu_ns: GPU time of the work that it launched, the median over its events; those without work have none.
        steps: The timed steps: step, duration_ns, cpu_ns.
        holes: Compiled graphs that spend time outside of ops: see `holes_of`.
    """

    durations_ns: dict[int, list[int]] = field(default_factory=dict)
    gap_ns: dict[int, int] = field(default_factory=dict)
    stream: dict[int, int] = field(default_factory=dict)
    gpu_ns: dict[int, int] = field(default_factory=dict)
    steps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=STEPS))
    holes: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=HOLES))


def originals_of(trace: Trace, matching: Matching, chosen: Ints) -> Originals:
    """What a device trace says of the ops of a host trace.

    Args:
        trace: The device trace.
        matching: The host trace joined to it.
        chosen: Ids of the nodes that are run; shape (ops,).
    """
    events = trace.events
    host_op = matching.host_op
    runs = np.isin(host_op, chosen)
    rows = np.flatnonzero(runs)
    start = events["start_ns"].to_numpy()[rows]
    duration = events["duration_ns"].to_numpy()[rows]
    table = pl.DataFrame(
        {"node": host_op[rows], "lane": events["lane"].to_numpy()[rows], "start": start, "duration": duration}
    ).sort("lane", "start")
    before = (pl.col("start") + pl.col("duration")).cum_max().shift(1).over("lane")
    by_node = (
        table.with_columns((pl.col("start") - before).clip(lower_bound=0).alias("gap"))
        .sort("start")
        .group_by("node", maintain_order=True)
        .agg(pl.col("duration"), pl.col("gap").median().cast(pl.Int64))
    )
    nodes = by_node["node"].to_list()
    gaps = dict(zip(nodes, by_node["gap"].to_list(), strict=True))
    work = work_below(trace, runs)
    work = work.with_columns(pl.Series("node", host_op[work["event"].to_numpy()]))
    of_events = work.group_by("event", "node").agg(pl.sum("duration_ns")).group_by("node").agg(pl.median("duration_ns"))
    return Originals(
        dict(zip(nodes, by_node["duration"].to_list(), strict=True)),
        {node: gap for node, gap in gaps.items() if gap is not None},
        dict(work.drop_nulls("stream").group_by("node").agg(pl.col("stream").first()).iter_rows()),
        dict(of_events.with_columns(pl.col("duration_ns").round().cast(pl.Int64)).iter_rows()),
        _steps(trace),
        holes_of(trace, runs),
    )


def holes_of(trace: Trace, runs: Bools) -> pl.DataFrame:
    """Host time in compiled graphs that no op explains: kernels for the CPU are no ops, so no host trace has them.

    Kernels for GPUs are, so that the time between the ops of a graph that has any is Python's.

    Args:
        trace: The device trace.
        runs: Events that are ops which run; shape (events,).

    Returns:
        By name of the graph: count, and duration_ns of all of them without the ops inside, both of a mean step where
        there are whole ones.
    """
    if not vocabulary(trace).matching(COMPILED).any() or not (graphs := marks(trace).graph).any():
        return pl.DataFrame(schema=HOLES)
    tree = forest(trace)
    in_ops = tree.topmost(runs[tree.row])
    length = tree.end_ns - tree.start_ns
    spent = np.append(0, np.cumsum(np.where(in_ops, length, 0)))
    for_gpu = lookup(vocabulary(trace).matching(_FOR_GPU), vocabulary(trace).code[tree.row])
    at = np.flatnonzero(graphs & (tree.subtree_sums(for_gpu.astype(np.int64)) == 0))
    steps = max(int(trace.steps["complete"].sum()), 1)
    empty = length[at] - (spent[tree.stop[at]] - spent[at])
    return (
        pl.DataFrame({"name": trace.events["name"].gather(tree.row[at]), "empty": empty})
        .filter(pl.col("empty") > 0)
        .group_by("name", maintain_order=True)
        .agg((pl.len() / steps).ceil().alias("count"), (pl.sum("empty") / steps).round().alias("duration_ns"))
        .cast(HOLES)
    )


def _steps(trace: Trace) -> pl.DataFrame:
    """The steps of a window that were recorded whole, with the processor time that a capture knows of them."""
    steps = trace.steps.filter(pl.col("complete")).select(
        "step", (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
    )
    listed = (trace.meta.capture or {}).get("steps")
    spent = listed.get("cpu_ns") if isinstance(listed, dict) else None
    cpu = pl.DataFrame(
        {"step": range(len(spent or ())), "cpu_ns": spent or []}, schema={"step": STEPS["step"], "cpu_ns": pl.Int64}
    )
    return steps.join(cpu, on="step", how="left", maintain_order="left").select(STEPS.names()).cast(STEPS)


def work_below(trace: Trace, among: Bools) -> pl.DataFrame:
    """The GPU work that some host events launched, in the order of the trace.

    Args:
        trace: The device trace.
        among: The events that are asked for; shape (events,). Work goes to the innermost of them around its launch.

    Returns:
        A row for each piece of work: event (its row in `events`), stream, duration_ns.
    """
    work = trace.events.filter(pl.col("category").is_in(GPU_WORK)).drop_nulls("launch")
    parent = trace.events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    launch = work["launch"].cast(pl.Int64).to_numpy()
    event = np.where(among[launch], launch, nearest(parent, among)[launch])
    return work.select(
        pl.Series("event", event, dtype=pl.Int64), pl.col("stream").cast(pl.Int64), "duration_ns"
    ).filter(pl.col("event") >= 0)


def originals_of_graph(graph: Graph, rank: int, _chosen: Ints) -> Originals:
    """What a saved graph says: of each op the span of its nodes, in every step that it holds."""
    nodes = graph.nodes.filter((pl.col("rank") == rank) & pl.col("host_op").is_not_null() & pl.col("op").is_not_null())
    spans = (
        nodes.group_by("host_op", "op")
        .agg(pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns"))
        .sort("start_ns")
        .group_by("host_op", maintain_order=True)
        .agg(pl.col("end_ns") - pl.col("start_ns"))
    )
    return Originals(dict(spans.iter_rows()))
