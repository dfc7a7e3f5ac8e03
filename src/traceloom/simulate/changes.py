"""Changes that a graph can be asked about: what each makes of works and delays.

A change is written as `[rank N[,M]] TARGET [~ REGEX] ACTION`, for example `kernels ~ gemm * 0.5`, `copies async`,
`syncs ~ cudaDeviceSynchronize remove`, `rank 7 delay remove`, `network * 2`, `idle remove`. What each assumes is said
in `ASSUMES`, and in docs/concepts/what-if.md.
"""

from __future__ import annotations

import re
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
from traceloom.simulate.beside import set_beside
from traceloom.simulate.selection import DEVICE_TARGETS, TARGETS, Chosen, Selection, among

ASSUMES = {
    "scale": "the work chosen takes so many times as long; everything else as long as it took",
    "remove": "the work chosen takes no time; what waited for it waits for nothing longer",
    "async": "the calls of these copies return at once; what uses the data is ordered on the device as before",
    "drop": "these calls no longer wait for the device; what they themselves cost stays",
    "overlap": "this runs beside what comes behind it: nothing before the optimizer needs its result, and it slows no "
    "kernel down; what other kernels covered already is not saved again",
    "network": "the transfer of every communication is so many times as fast; waiting for late ranks stays",
    "delay": "this rank begins no later and works no slower than the middle one of the others, step by step and name "
    "by name; what most others do not do takes no time",
    "idle": "work is always launched in time: host and launches cost nothing, what the device does stays in order",
    "fuse": "kernels that follow each other on a stream become one: their pauses and all launches but the first go, "
    "their work stays",
    "graph": "one launch submits all that a rank does in a step: the calls that launch and the operators around them "
    "cost nothing but the first",
    "balance": "kernels of each name take as long on every rank as on the mean one, step by step",
    "workers": "so many processes make batches beside the step; the step waits only for what they cannot keep up with",
}
_ACTIONS = ("remove", "async", "overlap", "fuse", "graph", "balance")  # without a number
_OF_DEVICE = ("async", "overlap", "fuse", "graph")  # of what the device does
_TEXT = re.compile(
    r"^\s*(?:ranks?\s+(?P<ranks>\d+(?:\s*,\s*\d+)*)\s+)?(?P<target>[a-z]+)(?:\s*~\s*(?P<pattern>.+?))?"
    r"\s+(?:(?P<sign>[*x×])\s*(?P<factor>\d+(?:\.\d+)?)|(?P<action>[a-z]+)(?:\s+(?P<number>\d+))?)\s*$"
)
_SHOWN = 80  # characters of a name
EXAMPLES = "`kernels ~ gemm * 0.5`, `copies async`, `rank 7 delay remove`, `network * 2`, `loading workers 4`"


@dataclass(frozen=True, slots=True)
class Change:
    """One change.

    Attributes:
        action: A key of `ASSUMES`.
        selection: What it is about.
        factor: Of `scale` (times as long), `network` (times as fast) and `workers` (how many); 1 else.
    """

    action: str
    selection: Selection | Chosen
    factor: float = 1.0

    def __str__(self) -> str:
        number = plain_number(self.factor)
        words = {
            "scale": f"{self.selection} * {number}",
            "network": f"{self.selection} * {number}",
            "workers": f"{self.selection} workers {number}",
            "delay": f"{self.selection} remove",
            "idle": f"{self.selection} remove",
            "drop": f"{self.selection} remove",
        }
        special = {"network": "network", "delay": "delay", "idle": "idle"}.get(self.action)
        text = words.get(self.action, f"{self.selection} {self.action}")
        return text.replace(self.selection.target, special, 1) if special else text


def plain_number(factor: float) -> str:
    """A factor as a change is written with it: all its digits, no exponent."""
    return np.format_float_positional(factor, trim="-")


def parse(text: str) -> Change:
    """Read a change.

    Raises:
        UsageError: slug `bad-change`, with what is understood.
    """
    match = _TEXT.match(text)
    if match is None:
        raise _bad(text, "write it as TARGET [~ REGEX] ACTION")
    ranks = tuple(int(part) for part in (match["ranks"] or "").split(",") if part.strip())
    target, pattern, action = match["target"], match["pattern"] or "", match["action"]
    factor = float(match["factor"]) if match["factor"] else 1.0
    scaled = match["sign"] is not None
    if match["number"] and action != "workers":
        raise _bad(text, f"`{action}` takes no number")
    if target == "network" and scaled and factor > 0:
        return Change("network", Selection("collectives", pattern, ranks), factor)
    if target in {"delay", "idle"} and pattern:
        raise _bad(text, f"`{target}` takes no `~`: it is of all that the host does")
    if target == "delay" and action == "remove":
        if not ranks:
            raise _bad(text, "say whose delay, as in `rank 7 delay remove`")
        return Change("delay", Selection("host", pattern, ranks))
    if target == "idle" and action == "remove":
        return Change("idle", Selection("host", pattern, ranks))
    if target not in TARGETS:
        raise _bad(text, f"`{target}` is none of {', '.join([*TARGETS, 'network', 'delay', 'idle'])}")
    chosen = Selection(target, pattern, ranks)
    if scaled:
        return Change("scale", chosen, factor)
    if action == "workers" and target == "loading" and int(match["number"] or 0):
        return Change("workers", chosen, float(match["number"]))
    if action in {"remove", "drop"} and target == "syncs":
        return Change("drop", chosen)
    if action not in _ACTIONS:
        raise _bad(text, f"`{action}` is none of * FACTOR, {', '.join(_ACTIONS)}, workers N")
    if action in _OF_DEVICE and target not in DEVICE_TARGETS:
        raise _bad(text, f"`{action}` is of what the device does: {', '.join(DEVICE_TARGETS)}")
    return Change(action, chosen)


def _bad(text: str, why: str) -> UsageError:
    return UsageError(f"`{text}` is no change: {why}", slug="bad-change", hint=f"examples: {EXAMPLES}")


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
        own = plan if plan.graph is self.graph else Plan(self.graph)
        return own.evaluate(self.work_ns, self.delay_ns, residuals=False)

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
            on_device = chosen & _kind(self.graph, gs.KERNEL, gs.COPY, gs.FILL, *gs.COMMUNICATION)
            out.graph, out.delay_ns = set_beside(out.graph, on_device, out.work_ns, out.delay_ns)
            out.beside = out.beside | on_device
        else:
            _APPLY[change.action](out, change, chosen)
        return out


def _edges(graph: Graph, *kinds: str) -> Bools:
    return among(graph.edges["kind"], gs.EDGE_KINDS, kinds)


def _ends(graph: Graph) -> tuple[Ints, Ints]:
    source, target = (array(graph, graph.edges[end]).astype(np.int64) for end in ("source", "target"))
    return source, target


def _kind(graph: Graph, *kinds: str) -> Bools:
    return among(graph.nodes["kind"], gs.NODE_KINDS, kinds)


def _scale(out: Scenario, change: Change, chosen: Bools) -> None:
    factor = 0.0 if change.action == "remove" else 1 / change.factor if change.action == "network" else change.factor
    out.work_ns[chosen] = np.rint(out.work_ns[chosen] * factor).astype(np.int64)
    # What leads out of a meeting to the end of a part is that communication's transfer.
    _, target = _ends(out.graph)
    transfer = _edges(out.graph, "rendezvous") & out.graph.edges["to_end"].to_numpy() & chosen[target]
    transfer &= out.delay_ns > ABSENT // 2
    out.delay_ns[transfer] = np.rint(out.delay_ns[transfer] * factor).astype(np.int64)


def _stop_waiting(out: Scenario, change: Change, chosen: Bools) -> None:
    """`drop`: the chosen calls wait for nothing; `async`: no call waits for the chosen copies alone."""
    source, target = _ends(out.graph)
    waits = _edges(out.graph, "synchronize")
    waits &= chosen[target] if change.action == "drop" else chosen[source] & _kind(out.graph, gs.BLOCK)[target]
    out.delay_ns[waits] = ABSENT


def _delay(out: Scenario, change: Change, _chosen: Bools) -> None:
    """The chosen ranks' work of each name in each step, at most that of the median rank."""
    ranks = np.unique(out.graph.nodes["rank"].drop_nulls().to_numpy())
    others = [rank for rank in ranks.tolist() if rank not in change.selection.ranks]
    if not others:
        raise UsageError(f"`{change}` needs other ranks to compare with", slug="nothing-chosen")
    keys = ["step", "kind", "name"]
    frame = out.graph.nodes.select(
        "rank", pl.col("step").fill_null(-1), "kind", pl.col("name").fill_null("")
    ).with_columns(pl.Series("work", out.work_ns), pl.int_range(pl.len()).alias("row"))
    kinds = [gs.HOST, gs.THINK, gs.LAUNCH, gs.KERNEL, gs.COPY, gs.FILL]
    sums = frame.filter(pl.col("kind").is_in(kinds)).group_by("rank", *keys).agg(pl.col("work").sum())
    peer_sums = sums.filter(pl.col("rank").is_in(others)).group_by(keys).agg("work")
    # who does not do it at all does it in no time
    usual = peer_sums.with_columns(
        usual=pl.col("work").list.concat(pl.lit(0).repeat_by(len(others) - pl.col("work").list.len())).list.median()
    ).drop("work")
    of_late = pl.col("rank").is_in(list(change.selection.ranks))
    factors = (
        sums.filter(of_late)
        .join(usual, on=keys, how="left")
        .with_columns(factor=(pl.col("usual").fill_null(0) / pl.max_horizontal("work", 1)).clip(upper_bound=1.0))
    )
    rows = frame.filter(of_late).join(factors.select("rank", *keys, "factor"), on=["rank", *keys])
    at = rows["row"].to_numpy()
    out.work_ns[at] = np.rint(out.work_ns[at] * rows["factor"].to_numpy()).astype(np.int64)
    # who begins later than the middle one of the others begins when that does
    hosts = out.graph.nodes.filter(pl.col("kind").is_in([gs.HOST, gs.THINK, gs.LAUNCH]))
    begins = dict(hosts.group_by("rank").agg(pl.col("start_ns").min()).rows())
    middle = float(np.median([begins[rank] for rank in others if rank in begins] or [0]))
    source, _ = _ends(out.graph)
    rank_of = out.graph.nodes["rank"].fill_null(-1).to_numpy()[source]
    for rank in change.selection.ranks:
        later_ns = round(begins.get(rank, middle) - middle)
        if later_ns > 0:
            out.delay_ns[_edges(out.graph, "origin") & (rank_of == rank)] -= later_ns


def _idle(out: Scenario, change: Change, chosen: Bools) -> None:
    out.work_ns[chosen] = 0
    timed = _edges(out.graph, "launch", "synchronize", "stream", "queue") & ~_overlapping(out.graph)
    if change.selection.ranks:
        of_ranks = out.graph.nodes["rank"].is_in(list(change.selection.ranks)).fill_null(value=False).to_numpy()
        timed &= of_ranks[_ends(out.graph)[1]]
    out.delay_ns[timed & (out.delay_ns > 0)] = 0


def _fuse(out: Scenario, _change: Change, chosen: Bools) -> None:
    """Neighbours on a stream: no pause between them; only the first of a run is launched."""
    source, target = _ends(out.graph)
    between = _edges(out.graph, "stream") & chosen[source] & chosen[target]
    out.delay_ns[between & (out.delay_ns > 0) & ~_overlapping(out.graph)] = 0
    inner = np.zeros(chosen.size, dtype=np.bool_)
    inner[target[between]] = True
    launches = _edges(out.graph, "launch") & inner[target]
    kinds = _kind(out.graph, gs.LAUNCH)
    calls = source[launches]
    out.work_ns[calls[kinds[calls]]] = 0


def _graph(out: Scenario, _change: Change, chosen: Bools) -> None:
    """The launches of the chosen work, and the operators that made them, cost nothing but the first."""
    source, target = _ends(out.graph)
    launches = _edges(out.graph, "launch") & chosen[target]
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
    pauses = _edges(out.graph, "stream") & chosen[source] & chosen[target] & ~_overlapping(out.graph)
    out.delay_ns[pauses & (out.delay_ns > 0)] = np.minimum(out.delay_ns[pauses & (out.delay_ns > 0)], 1_000)


def _overlapping(graph: Graph) -> Bools:
    """Edges whose delay is no pause: the work before them runs."""
    mask = np.zeros(graph.edges.height, dtype=np.bool_)
    mask[running(graph)] = True
    return mask


def _balance(out: Scenario, _change: Change, chosen: Bools) -> None:
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


def _workers(out: Scenario, change: Change, chosen: Bools) -> None:
    """N processes load beside the step: what remains is what they cannot finish in the rest of it."""
    frame = out.graph.nodes.select("rank", "start_ns", "duration_ns", "step").with_columns(
        pl.Series("loading", np.where(chosen, out.work_ns, 0))
    )
    ends = pl.col("start_ns") + pl.col("duration_ns")
    keys = ["rank", pl.col("step").fill_null(-1)]
    steps = frame.group_by(keys).agg(pl.col("loading").sum(), window=ends.max() - pl.col("start_ns").min())
    left = pl.max_horizontal(pl.col("loading") / max(change.factor, 1.0) - (pl.col("window") - pl.col("loading")), 0)
    factors = steps.with_columns(factor=(left / pl.max_horizontal("loading", 1)).clip(upper_bound=1.0))
    by_row = frame.with_columns(pl.col("step").fill_null(-1)).join(
        factors, on=["rank", "step"], how="left", maintain_order="left", nulls_equal=True
    )
    row_factors = by_row["factor"].fill_null(1.0).to_numpy()
    out.work_ns[chosen] = np.rint(out.work_ns[chosen] * row_factors[chosen]).astype(np.int64)


_APPLY: dict[str, Callable[[Scenario, Change, Bools], None]] = {
    "scale": _scale,
    "remove": _scale,
    "network": _scale,
    "drop": _stop_waiting,
    "async": _stop_waiting,
    "delay": _delay,
    "idle": _idle,
    "fuse": _fuse,
    "graph": _graph,
    "balance": _balance,
    "workers": _workers,
}
