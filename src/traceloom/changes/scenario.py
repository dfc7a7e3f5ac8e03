"""Works and delays with changes applied; overlapping work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, coverage, difference, union
from traceloom.changes.changes import Change, Selection
from traceloom.errors import UsageError
from traceloom.graph import ABSENT, Plan
from traceloom.graph import graph as gs
from traceloom.graph.calibrate import overlapping_edges
from traceloom.graph.graph import Graph, array
from traceloom.trace.array_types import Bools, Ints

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


_SHOWN = 80  # characters of a name


@dataclass(slots=True)
class Scenario:
    """Works and delays to evaluate a graph with; changes are applied one after the other.

    Attributes:
        graph: The graph; with other edges than the measured one where work runs beside its stream.
        work_ns: Work of each node, residual included, shape (nodes,).
        delay_ns: Delay of each edge, residual included, shape (edges,); `ABSENT` where it does not hold.
        beside: Nodes that are out of the order of their streams, shape (nodes,).
    """

    graph: Graph
    work_ns: Ints
    delay_ns: Ints
    beside: Bools

    @classmethod
    def of(cls, graph: Graph) -> Scenario:
        """The graph as it was measured."""
        nodes, edges = graph.nodes, graph.edges
        work = array(graph, nodes["work_ns"]) + array(graph, nodes["residual_ns"])
        delay = array(graph, edges["delay_ns"]) + array(graph, edges["residual_ns"])
        return cls(graph, work, delay, np.zeros(nodes.height, dtype=np.bool_))

    def copy(self) -> Scenario:
        """One to change further."""
        return Scenario(self.graph, self.work_ns.copy(), self.delay_ns.copy(), self.beside)

    def times(self, plan: Plan) -> Ints:
        """When everything happens, shape (2 x nodes,); `plan` is that of the measured graph, or of its own."""
        return self.own_plan(plan).evaluate(self.work_ns, self.delay_ns, residuals=False)

    def own_plan(self, plan: Plan) -> Plan:
        """The plan of its graph: this one, or where work runs beside its stream a new one."""
        return plan if plan.graph is self.graph else Plan(self.graph)

    def apply(self, change: Change, inside: Bools | None = None) -> Scenario:
        """The same with one more change; this one is left as it is.

        Args:
            change: What changes.
            inside: Of what it is about only these nodes, shape (nodes,); all where None.

        Raises:
            UsageError: slug `nothing-chosen`: the graph has nothing that the change is about.
        """
        chosen = change.selection.nodes(self.graph)
        if not chosen.any():
            hint = ""
            if isinstance(change.selection, Selection):
                names = [f"`{name[:_SHOWN]}`" for name in change.selection.nearest(self.graph)]
                hint = f"the run has no {change.selection.target} at all"
                hint = f"there are, for example: {', '.join(names)}" if names else hint
            raise UsageError(f"`{change}` is about nothing in this run", slug="nothing-chosen", hint=hint)
        out = self.copy()
        chosen = chosen if inside is None else chosen & inside
        if change.action == "overlap":  # what came behind the chosen work waits for what came before it
            on_device = chosen & self.nodes(gs.KERNEL, gs.COPY, gs.FILL, *gs.COMMUNICATION)
            out.graph, out.delay_ns = set_beside(out.graph, on_device, out.work_ns, out.delay_ns)
            out.beside = out.beside | on_device
        else:
            _APPLY[change.action](out, change, chosen)
        return out

    def edges(self, *kinds: str) -> Bools:
        """Which edges are of these kinds, shape (edges,)."""
        return self.graph.edges_of(*kinds)

    def ends(self) -> tuple[Ints, Ints]:
        """Source and target of each edge, shape (edges,) each."""
        source, target = (array(self.graph, self.graph.edges[end]).astype(np.int64) for end in ("source", "target"))
        return source, target

    def nodes(self, *kinds: str) -> Bools:
        """Which nodes are of these kinds, shape (nodes,)."""
        return self.graph.nodes_of(*kinds)

    def overlapping(self) -> Bools:
        """Edges whose delay is no pause, since the work before them runs; shape (edges,)."""
        mask = np.zeros(self.graph.edges.height, dtype=np.bool_)
        mask[overlapping_edges(self.graph)] = True
        return mask


def scale(out: Scenario, change: Change, chosen: Bools) -> None:
    """The chosen work takes so many times as long; of communication its transfer."""
    factor = 0.0 if change.action == "remove" else 1 / change.factor if change.action == "network" else change.factor
    out.work_ns[chosen] = np.rint(out.work_ns[chosen] * factor).astype(np.int64)
    # What leads out of a meeting to the end of a part is that communication's transfer.
    _, target = out.ends()
    transfer = out.edges("rendezvous") & out.graph.edges["to_end"].to_numpy() & chosen[target]
    transfer &= out.delay_ns > ABSENT // 2
    out.delay_ns[transfer] = np.rint(out.delay_ns[transfer] * factor).astype(np.int64)


def stop_waiting(out: Scenario, change: Change, chosen: Bools) -> None:
    """`drop`: the chosen calls wait for nothing; `async`: no call waits for the chosen copies alone."""
    source, target = out.ends()
    waits = out.edges("synchronize")
    waits &= chosen[target] if change.action == "drop" else chosen[source] & out.nodes(gs.BLOCK)[target]
    out.delay_ns[waits] = ABSENT


def catch_up(out: Scenario, change: Change, _chosen: Bools) -> None:
    """The chosen ranks' work of each name in each step, at most that of the median rank."""
    ranks = np.unique(out.graph.rank_numbers)
    late = np.isin(ranks, change.selection.ranks)
    others = ranks[~late & (ranks >= 0)].tolist()
    if not others:
        raise UsageError(f"`{change}` needs other ranks to compare with", slug="nothing-chosen")
    at = np.flatnonzero(out.nodes(gs.HOST, gs.THINK, gs.LAUNCH, gs.KERNEL, gs.COPY, gs.FILL))
    nodes = out.graph.nodes.select(pl.col("step").cast(pl.Int64).fill_null(-1), pl.col("kind").to_physical())[at]
    same = nodes["step"].to_numpy() * len(gs.NODE_KINDS) + nodes["kind"].to_numpy()
    alike = np.unique(same * (out.graph.names.len() + 1) + out.graph.name_numbers[at], return_inverse=True)[1]
    place = np.searchsorted(ranks, out.graph.rank_numbers[at])
    # who does not do it at all does it in no time
    sums = np.zeros((int(alike.max(initial=-1)) + 1, ranks.size), dtype=np.int64)
    np.add.at(sums, (alike, place), out.work_ns[at])
    usual = np.median(sums[:, np.isin(ranks, others)], axis=1, keepdims=True)
    factor = np.minimum(usual / np.maximum(sums, 1), 1.0)[alike, place]
    of_late = late[place]
    out.work_ns[at[of_late]] = np.rint(out.work_ns[at] * factor)[of_late].astype(np.int64)
    # who begins later than the middle one of the others begins when that does
    begins = first_starts(out.graph, gs.HOST, gs.THINK, gs.LAUNCH)
    middle = float(np.median([begins[rank] for rank in others if rank in begins] or [0]))
    source, _ = out.ends()
    rank_of = out.graph.rank_numbers[source]
    for rank in change.selection.ranks:
        later_ns = round(begins.get(rank, middle) - middle)
        if later_ns > 0:
            origin = out.edges("origin") & (rank_of == rank)
            delay, start = out.delay_ns[origin], out.graph.nodes["start_ns"].to_numpy()
            earliest = start.min() - start[source[origin]]  # nothing of the rank begins before the job
            out.delay_ns[origin] = np.maximum(delay - later_ns, np.minimum(delay, earliest))


def first_starts(graph: Graph, *kinds: str) -> dict[int, int]:
    """When the first node of some kinds begins on each rank that has one, ns."""
    nodes = graph.nodes_of(*kinds)
    ranks, of_rank = np.unique(graph.rank_numbers[nodes], return_inverse=True)
    first = np.full(ranks.size, np.iinfo(np.int64).max)
    np.minimum.at(first, of_rank, graph.nodes["start_ns"].to_numpy()[nodes])
    return dict(zip(ranks.tolist(), first.tolist(), strict=True))


def launch_in_time(out: Scenario, change: Change, chosen: Bools) -> None:
    """Host work costs nothing, and what launches or waits is never late."""
    out.work_ns[chosen] = 0
    timed = out.edges("launch", "synchronize", "stream", "queue") & ~out.overlapping()
    if change.selection.ranks:
        of_ranks = np.isin(out.graph.rank_numbers, change.selection.ranks)
        timed &= of_ranks[out.ends()[1]]
    out.delay_ns[timed & (out.delay_ns > 0)] = 0


def fuse(out: Scenario, _change: Change, chosen: Bools) -> None:
    """Neighbours on a stream: no pause between them; only the first of a run is launched."""
    source, target = out.ends()
    between = out.edges("stream") & chosen[source] & chosen[target]
    out.delay_ns[between & (out.delay_ns > 0) & ~out.overlapping()] = 0
    inner = np.zeros(chosen.size, dtype=np.bool_)
    inner[target[between]] = True
    launches = out.edges("launch") & inner[target]
    kinds = out.nodes(gs.LAUNCH)
    calls = source[launches]
    out.work_ns[calls[kinds[calls]]] = 0


def launch_once(out: Scenario, _change: Change, chosen: Bools) -> None:
    """The launches of the chosen work, and the operators that made them, cost nothing but the first."""
    source, target = out.ends()
    launches = out.edges("launch") & chosen[target]
    nodes = out.graph.nodes.select("node", "rank", "step", "op", "start_ns", "kind")
    calls = nodes[np.unique(source[launches])].sort("start_ns", "node")
    first = calls.unique(["rank", "step"], keep="first", maintain_order=True)
    others = calls.join(first, on="node", how="anti")
    host = nodes.filter(pl.col("kind").is_in([gs.HOST, gs.LAUNCH]) & pl.col("op").is_not_null())
    around = host.join(others, on=["rank", "op"], how="semi", nulls_equal=True).join(
        first, on=["rank", "op"], how="anti", nulls_equal=True
    )
    out.work_ns[others["node"].to_numpy()] = 0
    out.work_ns[around["node"].to_numpy()] = 0
    pauses = out.edges("stream") & chosen[source] & chosen[target] & ~out.overlapping()
    out.delay_ns[pauses & (out.delay_ns > 0)] = np.minimum(out.delay_ns[pauses & (out.delay_ns > 0)], 1_000)


def balance(out: Scenario, _change: Change, chosen: Bools) -> None:
    """Kernels of one name take as long on every rank that has them: what is spread unevenly is often one kernel."""
    at = np.flatnonzero(chosen)
    work = out.work_ns[at]
    frame = out.graph.nodes.select("rank", "step", "name")[at].with_columns(
        pl.col("step").fill_null(-1), pl.Series("work", work)
    )
    keys = ["step", "name"]
    sums = frame.group_by("rank", *keys).agg(pl.col("work").sum())
    mean = sums.group_by(keys).agg(pl.col("work").mean().alias("mean"))
    factors = sums.join(mean, on=keys, nulls_equal=True).select(
        "rank", *keys, factor=pl.col("mean") / pl.max_horizontal("work", 1)
    )
    row_factors = frame.join(factors, on=["rank", *keys], how="left", maintain_order="left", nulls_equal=True)["factor"]
    out.work_ns[at] = np.rint(work * row_factors.fill_null(1.0).to_numpy()).astype(np.int64)


def load_beside(out: Scenario, change: Change, chosen: Bools) -> None:
    """N processes load beside the step: what remains is what they cannot finish in the rest of it."""
    steps, step_of = np.unique(steps_of_ranks(out.graph), return_inverse=True)
    loading, end = (np.zeros(steps.size, dtype=np.int64) for _ in range(2))
    start = np.full(steps.size, np.iinfo(np.int64).max)
    begins, durations = (out.graph.nodes[name].to_numpy() for name in ("start_ns", "duration_ns"))
    np.add.at(loading, step_of[chosen], out.work_ns[chosen])
    np.minimum.at(start, step_of, begins)
    np.maximum.at(end, step_of, begins + durations)
    left = np.maximum(loading / max(change.factor, 1.0) - (end - start - loading), 0)
    factor = np.minimum(left / np.maximum(loading, 1), 1.0)
    out.work_ns[chosen] = np.rint(out.work_ns[chosen] * factor[step_of[chosen]]).astype(np.int64)


_APPLY: dict[str, Callable[[Scenario, Change, Bools], None]] = {
    "scale": scale,
    "remove": scale,
    "network": scale,
    "drop": stop_waiting,
    "async": stop_waiting,
    "delay": catch_up,
    "idle": launch_in_time,
    "fuse": fuse,
    "graph": launch_once,
    "balance": balance,
    "workers": load_beside,
}
