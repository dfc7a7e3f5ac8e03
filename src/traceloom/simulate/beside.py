"""Work that runs beside all else of its device: what came behind it waits for what came before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, coverage, difference, union
from traceloom.array_types import Bools, Ints
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import array

_ORDER = ("stream", "wait", "occupancy")
_DEVICE = (gs.KERNEL, gs.COPY, gs.FILL)


def set_beside(graph: Graph, hidden: Bools, work_ns: Ints, delay_ns: Ints) -> tuple[Graph, Ints]:
    """The graph with some work of the device out of the order of its streams.

    Who waited for the end of hidden work waits for its start, and for as long as other work of the device covered it:
    only what was exposed is saved. Hidden work stays in its own order; the host, other communication and the optimizer
    of its step wait for its end as before.

    Args:
        graph: The graph.
        hidden: Which work, shape (nodes,).
        work_ns: Work of each node, shape (nodes,).
        delay_ns: Delay of each edge, shape (edges,).

    Returns:
        The graph with other edges, the first of them in their old order, and their delays.
    """
    source, target = (array(graph, graph.edges[end]).astype(np.int64) for end in ("source", "target"))
    from_end, to_end = (graph.edges[end].to_numpy() for end in ("from_end", "to_end"))
    optimizer = of_optimizer(graph)
    moved = graph.edges_of(*_ORDER) & from_end & ~to_end & hidden[source]
    moved &= hidden[target] | (graph.nodes_of(*_DEVICE)[target] & ~optimizer[target])
    delay = delay_ns.copy()
    delay[moved] += covered_ns(graph, hidden)[source[moved]]
    edges = graph.edges.with_columns(
        from_end=pl.Series(from_end & ~moved),
        # between starts `stream` means a part of the work before: see retime/running.py
        kind=pl.when(pl.Series(moved)).then(pl.lit("wait", dtype=gs.EdgeKind)).otherwise(pl.col("kind")),
    )
    within = np.flatnonzero(moved & hidden[target])
    # An optimizer's first work waits for the last hidden work of each stream before it.
    start, ranks = graph.nodes["start_ns"].to_numpy(), graph.rank_numbers
    end = start + graph.nodes["duration_ns"].to_numpy()
    firsts = np.flatnonzero(optimizer & graph.nodes_of(*_DEVICE) & ~hidden)
    firsts = firsts[np.argsort(start[firsts], kind="stable")]
    firsts = firsts[np.sort(np.unique(steps_of_ranks(graph)[firsts], return_index=True)[1])]
    last = np.flatnonzero(hidden)
    last = last[np.argsort(end[last], kind="stable")]
    first = np.full(last.size, -1)
    for rank in np.unique(ranks[firsts]):
        of_rank, own = firsts[ranks[firsts] == rank], np.flatnonzero(ranks[last] == rank)
        first[own] = np.append(of_rank, -1)[np.searchsorted(start[of_rank], end[last[own]])]
    last, first = last[first >= 0], first[first >= 0]
    lane = graph.nodes["lane"][last].cast(pl.Int64).fill_null(-1).to_numpy()
    pairs = lane * graph.nodes.height + first
    kept = np.sort(last.size - 1 - np.unique(pairs[::-1], return_index=True)[1])
    last, first = last[kept], first[kept]
    # What each node takes itself: its work, or the transfer of its communication.
    own_ns = work_ns.copy()
    transfers = graph.edges_of("rendezvous") & to_end
    np.maximum.at(own_ns, target[transfers], delay_ns[transfers])
    more = pl.DataFrame(
        {
            "source": np.concatenate([source[within], last]),
            "target": np.concatenate([target[within], first]),
            "to_end": np.repeat([True, False], [within.size, last.size]),
            "delay_ns": np.concatenate([own_ns[target[within]], np.zeros_like(last)]),
        }
    ).select(
        pl.col("source", "target").cast(gs.Node),
        pl.lit("wait", dtype=gs.EdgeKind).alias("kind"),
        pl.lit("assumed", dtype=gs.Evidence).alias("evidence"),
        pl.lit(value=True).alias("from_end"),
        "to_end",
        "delay_ns",
        pl.lit(0, pl.Int64).alias("residual_ns"),
    )
    both = pl.concat([edges, more.select(edges.columns)])
    return replace(graph, edges=both), np.concatenate([delay, more["delay_ns"].to_numpy()])


def exposed(graph: Graph, nodes: Bools) -> list[Spans]:
    """The time in which some work runs on a device and no other kernel of its rank does, for each of its ranks."""
    out: list[Spans] = []
    if not nodes.any():
        return out
    start, end, rank = _times(graph)
    kernels = graph.nodes_of(gs.KERNEL) & ~nodes
    for rank_id in np.unique(rank[nodes]):
        chosen, others = nodes & (rank == rank_id), kernels & (rank == rank_id)
        out.append(difference(union(start[chosen], end[chosen]), union(start[others], end[others])))
    return out


def covered_ns(graph: Graph, nodes: Bools) -> Ints:
    """How long another kernel of its rank runs during each chosen work, shape (nodes,); 0 for all others."""
    start, end, rank = _times(graph)
    kernels = graph.nodes_of(gs.KERNEL) & ~nodes
    out = np.zeros(nodes.size, dtype=np.int64)
    for rank_id in np.unique(rank[nodes]):
        chosen, others = nodes & (rank == rank_id), kernels & (rank == rank_id)
        out[chosen] = coverage(union(start[others], end[others]), start[chosen], end[chosen])
    return out


def _times(graph: Graph) -> tuple[Ints, Ints, Ints]:
    start, duration = (array(graph, graph.nodes[name]) for name in ("start_ns", "duration_ns"))
    return start, start + duration, graph.rank_numbers


def steps_of_ranks(graph: Graph) -> Ints:
    """For each node a number that only nodes of its step on its rank have, shape (nodes,)."""
    numbers: Ints = graph.rank_numbers.astype(np.int64) * 2**32 + graph.nodes["step"].fill_null(-1).to_numpy()
    return numbers


def of_optimizer(graph: Graph) -> Bools:
    """Work that is launched in a step from the beginning of its optimizer on, shape (nodes,)."""
    of = np.zeros(graph.nodes.height, dtype=np.bool_)
    optimizers = np.append(graph.names.str.starts_with("Optimizer.step#").to_numpy(), False)[graph.name_numbers]
    if not optimizers.any():
        return of
    launches = graph.edges_of("launch")
    call, work = (graph.edges[end].to_numpy()[launches] for end in ("source", "target"))
    start = graph.nodes["start_ns"].to_numpy()
    step = steps_of_ranks(graph)
    steps, step_of = np.unique(step[optimizers], return_inverse=True)
    begins = np.full(steps.size, np.iinfo(np.int64).max)
    np.minimum.at(begins, step_of, start[optimizers])
    at = np.minimum(np.searchsorted(steps, step[call]), steps.size - 1)
    of[work] = (steps[at] == step[call]) & (start[call] >= begins[at])
    return of
