"""Scenarios: works and delays with changes applied, including work that overlaps its stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, compute_coverage, merge_intervals, subtract_spans
from traceloom.changes.changes import Change, Selection, locate_regions
from traceloom.errors import UsageError
from traceloom.graph import ABSENT, Plan, graph as graph_schema
from traceloom.graph.calibrate import find_overlapping_edges
from traceloom.graph.graph import Graph, get_column_array
from traceloom.trace.array_types import Bools, Ints

_ORDERING_KINDS = ("stream", "wait", "occupancy")
_DEVICE_KINDS = (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)


def set_beside(graph: Graph, hidden: Bools, work_ns: Ints, delay_ns: Ints) -> tuple[Graph, Ints]:
    """Returns the graph with some device work taken out of the order of its streams.

    Waits for the end of hidden work become waits for its start, and for as long as other work of
    the device covered it: only what was exposed is saved. Hidden work stays in its own order; the
    host, other communication and the optimizer of its step wait for its end as before.

    Args:
        graph: The graph.
        hidden: The work to take out, shape (nodes,).
        work_ns: Work of each node, shape (nodes,).
        delay_ns: Delay of each edge, shape (edges,).

    Returns:
        The graph with other edges, the first of them in their old order, and their delays.
    """
    source, target = (
        get_column_array(graph, graph.edges[end]).astype(np.int64) for end in ("source", "target")
    )
    from_end, to_end = (graph.edges[end].to_numpy() for end in ("from_end", "to_end"))
    optimizer = find_optimizer_work(graph)
    moved = graph.edge_mask(*_ORDERING_KINDS) & from_end & ~to_end & hidden[source]
    moved &= hidden[target] | (graph.node_mask(*_DEVICE_KINDS)[target] & ~optimizer[target])
    delay = delay_ns.copy()
    delay[moved] += compute_covered_ns(graph, hidden)[source[moved]]
    edges = graph.edges.with_columns(
        from_end=pl.Series(from_end & ~moved),
        # Between starts `stream` means a fraction of the work before: see
        # `traceloom.graph.calibrate`.
        kind=pl.when(pl.Series(moved))
        .then(pl.lit("wait", dtype=graph_schema.EdgeKind))
        .otherwise(pl.col("kind")),
    )
    within = np.flatnonzero(moved & hidden[target])
    # An optimizer's first work waits for the last hidden work of each stream before it.
    start, ranks = graph.nodes["start_ns"].to_numpy(), graph.node_ranks
    end = start + graph.nodes["duration_ns"].to_numpy()
    firsts = np.flatnonzero(optimizer & graph.node_mask(*_DEVICE_KINDS) & ~hidden)
    firsts = firsts[np.argsort(start[firsts], kind="stable")]
    firsts = firsts[np.sort(np.unique(compute_rank_step_keys(graph)[firsts], return_index=True)[1])]
    last = np.flatnonzero(hidden)
    last = last[np.argsort(end[last], kind="stable")]
    first = np.full(last.size, -1)
    for rank in np.unique(ranks[firsts]):
        rank_firsts, rank_rows = firsts[ranks[firsts] == rank], np.flatnonzero(ranks[last] == rank)
        first[rank_rows] = np.append(rank_firsts, -1)[
            np.searchsorted(start[rank_firsts], end[last[rank_rows]])
        ]
    last, first = last[first >= 0], first[first >= 0]
    lane = graph.nodes["lane"][last].cast(pl.Int64).fill_null(-1).to_numpy()
    pairs = lane * graph.nodes.height + first
    retained = np.sort(last.size - 1 - np.unique(pairs[::-1], return_index=True)[1])
    last, first = last[retained], first[retained]
    # The own time of each node: its work, or the transfer of its communication.
    own_ns = work_ns.copy()
    transfers = graph.edge_mask("rendezvous") & to_end
    np.maximum.at(own_ns, target[transfers], delay_ns[transfers])
    extra_edges = pl.DataFrame(
        {
            "source": np.concatenate([source[within], last]),
            "target": np.concatenate([target[within], first]),
            "to_end": np.repeat([True, False], [within.size, last.size]),
            "delay_ns": np.concatenate([own_ns[target[within]], np.zeros_like(last)]),
        }
    )
    return add_waits(replace(graph, edges=edges), delay, extra_edges)


def add_waits(graph: Graph, delay_ns: Ints, waits: pl.DataFrame) -> tuple[Graph, Ints]:
    """Returns the graph with some assumed waits for the end of a node, and the delays of all edges.

    Args:
        graph: The graph.
        delay_ns: Delay of each of its edges, shape (edges,).
        waits: source, target, to_end, delay_ns.
    """
    extra_edges = waits.select(
        pl.col("source", "target").cast(graph_schema.Node),
        pl.lit("wait", dtype=graph_schema.EdgeKind).alias("kind"),
        pl.lit("assumed", dtype=graph_schema.Evidence).alias("evidence"),
        pl.lit(value=True).alias("from_end"),
        "to_end",
        "delay_ns",
        pl.lit(0, pl.Int64).alias("residual_ns"),
    )
    both = pl.concat([graph.edges, extra_edges.select(graph.edges.columns)])
    return replace(graph, edges=both), np.concatenate([delay_ns, waits["delay_ns"].to_numpy()])


def find_exposed_time(graph: Graph, nodes: Bools) -> list[Spans]:
    """Returns for each rank the time in which some work runs on a device and no other kernel of the
    rank does.
    """
    out: list[Spans] = []
    if not nodes.any():
        return out
    start, end, rank = _get_node_times(graph)
    kernels = graph.node_mask(graph_schema.KERNEL) & ~nodes
    for rank_id in np.unique(rank[nodes]):
        selected, other_kernels = nodes & (rank == rank_id), kernels & (rank == rank_id)
        out.append(
            subtract_spans(
                merge_intervals(start[selected], end[selected]),
                merge_intervals(start[other_kernels], end[other_kernels]),
            )
        )
    return out


def compute_covered_ns(graph: Graph, nodes: Bools) -> Ints:
    """Returns how long another kernel of its rank runs during each chosen work, shape (nodes,); 0
    for all others.
    """
    start, end, rank = _get_node_times(graph)
    kernels = graph.node_mask(graph_schema.KERNEL) & ~nodes
    out = np.zeros(nodes.size, dtype=np.int64)
    for rank_id in np.unique(rank[nodes]):
        selected, other_kernels = nodes & (rank == rank_id), kernels & (rank == rank_id)
        out[selected] = compute_coverage(
            merge_intervals(start[other_kernels], end[other_kernels]),
            start[selected],
            end[selected],
        )
    return out


def _get_node_times(graph: Graph) -> tuple[Ints, Ints, Ints]:
    start, duration = (
        get_column_array(graph, graph.nodes[name]) for name in ("start_ns", "duration_ns")
    )
    return start, start + duration, graph.node_ranks


def compute_rank_step_keys(graph: Graph) -> Ints:
    """Returns for each node a number that only nodes of its step on its rank have, shape
    (nodes,).
    """
    numbers: Ints = (
        graph.node_ranks.astype(np.int64) * 2**32 + graph.nodes["step"].fill_null(-1).to_numpy()
    )
    return numbers


def find_optimizer_work(graph: Graph) -> Bools:
    """Returns work that is launched in a step from the beginning of its optimizer on, shape
    (nodes,).
    """
    in_optimizer = np.zeros(graph.nodes.height, dtype=np.bool_)
    optimizers = np.append(graph.names.str.starts_with("Optimizer.step#").to_numpy(), False)[
        graph.name_numbers
    ]
    if not optimizers.any():
        return in_optimizer
    launches = graph.edge_mask("launch")
    call, work = (graph.edges[end].to_numpy()[launches] for end in ("source", "target"))
    start = graph.nodes["start_ns"].to_numpy()
    step = compute_rank_step_keys(graph)
    steps, step_of = np.unique(step[optimizers], return_inverse=True)
    optimizer_start = np.full(steps.size, np.iinfo(np.int64).max)
    np.minimum.at(optimizer_start, step_of, start[optimizers])
    index = np.minimum(np.searchsorted(steps, step[call]), steps.size - 1)
    in_optimizer[work] = (steps[index] == step[call]) & (start[call] >= optimizer_start[index])
    return in_optimizer


_NORMAL_DEVIATIONS = 1.4826  # standard deviations of normal values in a median absolute deviation
_MAX_NAME_CHARS = 80  # characters of a name


@dataclass(slots=True)
class Scenario:
    """Works and delays to evaluate a graph with; changes are applied one after the other.

    Attributes:
        graph: The graph; its edges differ from the measured ones where work runs beside its stream.
        work_ns: Work of each node, residual included, shape (nodes,).
        delay_ns: Delay of each edge, residual included, shape (edges,); `ABSENT` where it does not
            hold.
        beside: Nodes that are out of the order of their streams, shape (nodes,).
        chance_ns: One standard deviation of what was taken away, where it was estimated.
    """

    graph: Graph
    work_ns: Ints
    delay_ns: Ints
    beside: Bools
    chance_ns: float = 0.0

    @classmethod
    def of(cls, graph: Graph) -> Scenario:
        work, delay = (
            get_column_array(graph, frame[own]) + get_column_array(graph, frame["residual_ns"])
            for frame, own in ((graph.nodes, "work_ns"), (graph.edges, "delay_ns"))
        )
        return cls(graph, work, delay, np.zeros(graph.nodes.height, dtype=np.bool_))

    def copy(self) -> Scenario:
        return replace(self, work_ns=self.work_ns.copy(), delay_ns=self.delay_ns.copy())

    def times(self, plan: Plan) -> Ints:
        """Returns the times of all points, shape (2 x nodes,); `plan` is that of the measured
        graph, or of the scenario's own graph.
        """
        return self.own_plan(plan).evaluate(self.work_ns, self.delay_ns, residuals=False)

    def own_plan(self, plan: Plan) -> Plan:
        """Returns the plan of its graph: this one, or where work runs beside its stream a new
        one.
        """
        return plan if plan.graph is self.graph else Plan(self.graph)

    def apply(self, change: Change, within: Bools | None = None) -> Scenario:
        """Returns a copy with one more change applied.

        Args:
            change: What changes.
            within: Apply the change only to these nodes, shape (nodes,); to all where None.

        Raises:
            UsageError: slug `nothing-chosen`: the graph has nothing to apply the change to.
        """
        selected = change.selection.nodes(self.graph)
        if not selected.any():
            hint = ""
            if isinstance(change.selection, Selection):
                names = [
                    f"`{name[:_MAX_NAME_CHARS]}`" for name in change.selection.nearest(self.graph)
                ]
                hint = f"the run has no {change.selection.target} at all"
                hint = f"there are, for example: {', '.join(names)}" if names else hint
            raise UsageError(
                f"`{change}` is about nothing in this run", slug="nothing-chosen", hint=hint
            )
        out = self.copy()
        selected = selected if within is None else selected & within
        # Waits for the chosen work become waits for what came before it
        if change.action == "overlap":
            on_device = selected & self.nodes(
                graph_schema.KERNEL,
                graph_schema.COPY,
                graph_schema.FILL,
                *graph_schema.COMMUNICATION,
            )
            out.graph, out.delay_ns = set_beside(out.graph, on_device, out.work_ns, out.delay_ns)
            out.beside = out.beside | on_device
        else:
            _ACTION_FUNCTIONS[change.action](out, change, selected)
        return out

    def edges(self, *kinds: str) -> Bools:
        return self.graph.edge_mask(*kinds)

    def ends(self) -> tuple[Ints, Ints]:
        """Returns source and target of each edge, shape (edges,) each."""
        source, target = (
            get_column_array(self.graph, self.graph.edges[end]).astype(np.int64)
            for end in ("source", "target")
        )
        return source, target

    def nodes(self, *kinds: str) -> Bools:
        return self.graph.node_mask(*kinds)

    def batches(self) -> Ints:
        """Returns the edges that hold a call for a batch until the batch is ready; shape (waits,)."""
        edges = self.graph.edges
        inferred = (edges["evidence"] == "inferred").to_numpy()
        return np.flatnonzero(self.edges("origin") & edges["to_end"].to_numpy() & inferred)

    def overlapping(self) -> Bools:
        """Returns the edges whose delay is not a pause, since the work before them runs; shape
        (edges,).
        """
        mask = np.zeros(self.graph.edges.height, dtype=np.bool_)
        mask[find_overlapping_edges(self.graph)] = True
        return mask


def scale(out: Scenario, change: Change, selected: Bools) -> None:
    """Multiplies the chosen work by the factor; of communication its transfer."""
    factor = (
        0.0
        if change.action == "remove"
        else 1 / change.factor
        if change.action == "network"
        else change.factor
    )
    out.work_ns[selected] = np.rint(out.work_ns[selected] * factor).astype(np.int64)
    # Edges out of a meeting to the end of a part hold that communication's transfer.
    _, target = out.ends()
    transfer = out.edges("rendezvous") & out.graph.edges["to_end"].to_numpy() & selected[target]
    transfer &= out.delay_ns > ABSENT // 2
    out.delay_ns[transfer] = np.rint(out.delay_ns[transfer] * factor).astype(np.int64)
    # Batches are ready at times that their workers set, however early they are asked for.
    if change.selection.target == "loading":
        ready = out.batches()
        ready = ready[selected[target[ready]]]
        out.delay_ns[ready] = np.rint(out.delay_ns[ready] * factor).astype(np.int64)


def stop_waiting(out: Scenario, change: Change, selected: Bools) -> None:
    """Removes waits. `drop`: the chosen calls wait for nothing; `async`: no call waits for the
    chosen copies alone.
    """
    source, target = out.ends()
    waits = out.edges("synchronize")
    waits &= (
        selected[target]
        if change.action == "drop"
        else selected[source] & out.nodes(graph_schema.BLOCK)[target]
    )
    out.delay_ns[waits] = ABSENT


def reduce_to_median_rank(out: Scenario, change: Change, _selected: Bools) -> None:
    """Reduces the chosen ranks' work of each name to at most that of the median rank.

    What a rank does more in some steps and less in others is chance: of each name, all steps
    together lose what they exceed the median by together, and so do all names.
    """
    ranks = np.unique(out.graph.node_ranks)
    late = np.isin(ranks, change.selection.ranks)
    other_ranks = ranks[~late & (ranks >= 0)].tolist()
    if not other_ranks:
        raise UsageError(f"`{change}` needs other ranks to compare with", slug="nothing-chosen")
    rows = np.flatnonzero(
        out.nodes(
            graph_schema.HOST,
            graph_schema.THINK,
            graph_schema.LAUNCH,
            graph_schema.KERNEL,
            graph_schema.COPY,
            graph_schema.FILL,
        )
    )
    nodes = out.graph.nodes.select(
        pl.col("step").cast(pl.Int64).fill_null(-1), pl.col("kind").to_physical()
    )[rows]
    keys = (
        nodes["kind"].to_numpy().astype(np.int64) * (out.graph.names.len() + 1)
        + out.graph.name_numbers[rows]
    )
    names, name = np.unique(keys, return_inverse=True)
    pairs, alike = np.unique(nodes["step"].to_numpy() * names.size + name, return_inverse=True)
    rank_index = np.searchsorted(ranks, out.graph.node_ranks[rows])
    # A batch that is awaited is work of its rank, as far as the others do not wait, too.
    ready = out.batches()
    awaiting = out.ends()[1][ready]
    work = out.work_ns.copy()
    work[awaiting] = out.graph.nodes["duration_ns"].to_numpy()[awaiting]
    late_ready = np.isin(out.graph.node_ranks[awaiting], change.selection.ranks)
    out.delay_ns[ready[late_ready]] = ABSENT
    # Ranks without such work count as 0.
    sums = np.zeros((int(alike.max(initial=-1)) + 1, ranks.size), dtype=np.int64)
    np.add.at(sums, (alike, rank_index), work[rows])
    typical = np.median(sums[:, np.isin(ranks, other_ranks)], axis=1)
    device = np.isin(out.graph.nodes["kind"].cast(pl.String)[rows], _DEVICE_KINDS)
    on_device = np.zeros(pairs.size, dtype=np.bool_)
    on_device[alike] = device
    excess, net = pl.col("excess"), pl.col("excess").sum().over("name")
    over = excess.clip(lower_bound=0)
    deviation = (excess - excess.median()).abs().median() * _NORMAL_DEVIATIONS
    for column in np.flatnonzero(late):
        table = pl.DataFrame(
            {"name": pairs % names.size, "excess": sums[:, column] - typical, "side": on_device}
        ).with_columns(
            less=over * (net.clip(lower_bound=0) / over.sum().over("name")).fill_nan(0.0),
            chance=(deviation * pl.len().sqrt()).over("name"),
        )
        # Of host and device each no more than they exceed the others by in total
        total = (excess.sum() / pl.col("less").sum()).over("side").fill_nan(0.0).clip(0.0, 1.0)
        less = table.select(pl.col("less") * total).to_series().to_numpy()
        factor = 1 - less / np.maximum(sums[:, column], 1)
        own = rank_index == column
        out.work_ns[rows[own]] = np.rint(work[rows[own]] * factor[alike[own]]).astype(np.int64)
        out.chance_ns += float(np.sqrt((table.unique("name")["chance"].to_numpy() ** 2).sum()))
    # Ranks that begin later than the median of the others begin when that does.
    first_starts = find_first_starts(
        out.graph, graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH
    )
    middle = float(
        np.median([first_starts[rank] for rank in other_ranks if rank in first_starts] or [0])
    )
    source, _ = out.ends()
    rank_of = out.graph.node_ranks[source]
    for rank in change.selection.ranks:
        later_ns = round(first_starts.get(rank, middle) - middle)
        if later_ns > 0:
            origin = out.edges("origin") & (rank_of == rank) & (out.delay_ns > ABSENT // 2)
            delay, start = out.delay_ns[origin], out.graph.nodes["start_ns"].to_numpy()
            # Nothing of the rank begins before the job
            earliest = start.min() - start[source[origin]]
            out.delay_ns[origin] = np.maximum(delay - later_ns, np.minimum(delay, earliest))


def find_first_starts(graph: Graph, *kinds: str) -> dict[int, int]:
    """Returns the start of the first node of some kinds on each rank that has one, ns."""
    nodes = graph.nodes.filter(pl.Series(graph.node_mask(*kinds)), pl.col("rank").is_not_null())
    return dict(nodes.group_by("rank").agg(pl.col("start_ns").min()).iter_rows())


def remove_launch_delays(out: Scenario, change: Change, selected: Bools) -> None:
    """Makes host work cost nothing, and lets nothing that launches or waits be late."""
    out.work_ns[selected] = 0
    delayed = out.edges("launch", "synchronize", "stream", "queue") & ~out.overlapping()
    if change.selection.ranks:
        delayed &= np.isin(out.graph.node_ranks, change.selection.ranks)[out.ends()[1]]
    out.delay_ns[delayed & (out.delay_ns > 0)] = 0


def merge_neighbours(out: Scenario, _change: Change, selected: Bools) -> None:
    """Merges neighbours on a stream: no pause between them; only the first of a run is launched."""
    source, target = out.ends()
    between = out.edges("stream") & selected[source] & selected[target]
    out.delay_ns[between & (out.delay_ns > 0) & ~out.overlapping()] = 0
    calls = source[out.edges("launch") & np.isin(target, target[between])]
    out.work_ns[calls[out.nodes(graph_schema.LAUNCH)[calls]]] = 0


def merge_launches(out: Scenario, _change: Change, selected: Bools) -> None:
    """Lets the launches of the chosen work, and the operators that made them, cost nothing except
    the first.
    """
    source, target = out.ends()
    nodes = out.graph.nodes.select("node", "rank", "step", "start_ns")
    calls = nodes[np.unique(source[out.edges("launch") & selected[target]])].sort(
        "start_ns", "node"
    )
    first = calls.unique(["rank", "step"], keep="first", maintain_order=True)
    other_calls = calls.join(first, on="node", how="anti")
    operators = out.nodes(graph_schema.HOST)
    operators &= (out.graph.nodes["category"].cast(pl.String).fill_null("") == "op").to_numpy()
    position, begin, end = locate_regions(out.graph, operators)
    around_first, around_others = (
        np.diff(np.searchsorted(np.sort(position[some["node"].to_numpy()]), [begin, end]), axis=0)[
            0
        ]
        for some in (first, other_calls)
    )
    out.work_ns[other_calls["node"].to_numpy()] = 0
    out.work_ns[np.flatnonzero(operators)[(around_others > 0) & (around_first == 0)]] = 0
    pauses = out.edges("stream") & selected[source] & selected[target] & ~out.overlapping()
    out.delay_ns[pauses & (out.delay_ns > 0)] = np.minimum(
        out.delay_ns[pauses & (out.delay_ns > 0)], 1_000
    )


def assign_even_work(out: Scenario, _change: Change, selected: Bools) -> None:
    """Makes kernels of one name take equally long on every rank that has them, since uneven work is
    often in one kernel.
    """
    rows = np.flatnonzero(selected)
    work = out.work_ns[rows]
    frame = out.graph.nodes.select("rank", "step", "name")[rows].with_columns(
        pl.col("step").fill_null(-1), pl.Series("work", work)
    )
    keys = ["step", "name"]
    sums = frame.group_by("rank", *keys).agg(pl.col("work").sum())
    mean = sums.group_by(keys).agg(pl.col("work").mean().alias("mean"))
    factors = sums.join(mean, on=keys, nulls_equal=True).select(
        "rank", *keys, factor=pl.col("mean") / pl.max_horizontal("work", 1)
    )
    row_factors = frame.join(
        factors, on=["rank", *keys], how="left", maintain_order="left", nulls_equal=True
    )["factor"]
    out.work_ns[rows] = np.rint(work * row_factors.fill_null(1.0).to_numpy()).astype(np.int64)


def load_beside(out: Scenario, change: Change, selected: Bools) -> None:
    """Loads data with N processes beside the step: a batch is taken no earlier than an N-th of what
    making one takes after the one before it.
    """
    if selected[out.ends()[1][out.batches()]].any():
        raise UsageError(
            f"`{change}`: processes make the batches already, and their number was not recorded",
            slug="nothing-chosen",
            hint="twice as many make them in half the time: `loading * 0.5`",
        )
    nodes = out.graph.nodes.select(
        "node", "rank", "step", "start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    # Batches come at the pace of the processes; before the first one they had the rest of a step
    loads = (
        nodes.with_columns(
            pl.Series("work", out.work_ns), last_ns=pl.col("end_ns").max().over("rank", "step")
        )
        .filter(pl.Series(selected))
        .sort("end_ns", "node")
        .group_by("rank", "step", maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("node", "last_ns").last(), pl.col("work").sum())
        .sort("rank", "start_ns")
        .select(
            pl.col("node").shift(1).over("rank").alias("source"),
            pl.col("node").alias("target"),
            pl.lit(value=True).alias("to_end"),
            (pl.col("work").mean().over("rank") / max(change.factor, 1.0)).alias("delay_ns"),
            rest=pl.col("start_ns").shift(-1).over("rank").fill_null(pl.col("last_ns"))
            - pl.col("start_ns")
            - pl.col("work"),
        )
    )
    first = loads.filter(pl.col("source").is_null())
    out.work_ns[selected] = 0
    out.work_ns[first["target"].to_numpy()] = np.rint(
        (first["delay_ns"] - first["rest"]).clip(0).to_numpy()
    )
    out.graph, out.delay_ns = add_waits(
        out.graph,
        out.delay_ns,
        loads.drop_nulls("source").with_columns(pl.col("delay_ns").round().cast(pl.Int64)),
    )


_ACTION_FUNCTIONS: dict[str, Callable[[Scenario, Change, Bools], None]] = {
    "scale": scale,
    "remove": scale,
    "network": scale,
    "drop": stop_waiting,
    "async": stop_waiting,
    "delay": reduce_to_median_rank,
    "idle": remove_launch_delays,
    "fuse": merge_neighbours,
    "graph": merge_launches,
    "balance": assign_even_work,
    "workers": load_beside,
}
