"""What each change makes of the works and delays of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.array_types import Bools, Ints
from traceloom.errors import UsageError
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import array
from traceloom.retime import ABSENT, Plan
from traceloom.retime.running import running
from traceloom.simulate.beside import set_beside, steps_of_ranks
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Selection

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
        mask[running(self.graph)] = True
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
