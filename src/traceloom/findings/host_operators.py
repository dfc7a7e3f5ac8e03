"""Operators of a run on the host that need not be, or not one by one: extra copies, many tiny operators."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.data_loading import loader_calls
from traceloom.findings.context import Bools, Context
from traceloom.findings.host_bound import looped
from traceloom.findings.pauses import between_operators
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.findings.wording import brief
from traceloom.model import Trace, units
from traceloom.model import category as cat
from traceloom.model import graph_schema as gs
from traceloom.model.finding import Abstention
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

Ints = NDArray[np.int64]

_COPIES = r"^aten::(?:clone|contiguous|to|_to_copy|copy_|reshape|flatten|repeat)$"
_COPIES_BACK = r"^autograd::engine::evaluate_function: (?:CloneBackward|ToCopyBackward|CopyBackwards|CopySlices)"
_COPYING = r"^aten::(?:copy_|clone|_to_copy)$"
# Copies that these make are theirs: the bytes have to get from one place to another.
_OWN = r"^(?:Optimizer\.|FSDP::|gloo:|enumerate\(DataLoader\))"
_LEAST_SHARE = 0.02
_SHORT_NS = 100_000  # Python behind an operator that takes no longer is part of calling it
_NO_LANE = 2**32 - 1
_PERIOD = 6  # operators at most of which a stretch of tiny ones is made
_TIMES = 24  # at least that these come one after the other
_TINY_NS = 40_000  # most of them take no longer, recorded
_LEAST_TINY = 0.05  # of the step
_HOST = (gs.HOST, gs.THINK)


def extra_copies(context: Context) -> Iterator[Said]:
    """Copies that the program asks for itself."""
    if context.on_device:
        yield Abstention("host-copies", "the device computes: see device-copies and needless-copies")
        return
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    count, by_name = 0, pl.DataFrame()
    for trace in context.traces:
        rows = context.in_step(context.ask(trace, _copies))
        count += rows.height
        by_name = pl.concat([by_name, rows.select("name", "duration_ns")])
        if rows.height:
            mask |= context.below(trace, rows["event"])
    # the short stretch of Python behind each: it calls the next one, and gives the memory back
    nodes = context.graph.nodes
    order = nodes.select("rank", "lane", "start_ns", "node").with_row_index("at")
    order = order.sort("rank", "lane", "start_ns", "node")
    at, lane = order["at"].to_numpy(), order["lane"].fill_null(_NO_LANE).to_numpy()
    follows = np.zeros(at.size, dtype=np.bool_)
    follows[at[1:]] = mask[at[:-1]] & (lane[1:] == lane[:-1])
    mask |= follows & between_operators(context) & (nodes["work_ns"].to_numpy() <= _SHORT_NS)
    time = context.work_ns(mask & context.of_kind(*_HOST))
    if not count or time < _LEAST_SHARE * context.whole_ns * max(context.rank_count, 1):
        return
    sums = by_name.group_by("name").agg(pl.col("duration_ns").sum())
    sums = sums.sort("duration_ns", "name", descending=[True, False])
    yield Candidate(
        title=f"{units.count(count)} copies of tensors on the host take {units.duration(time)} of {context.where}"
        f"{context.over_ranks}, most of it in {brief(sums['name'][0])}",
        changes=(Change("remove", Chosen("copies of tensors on the host", mask, "ops")),),
        confidence=0.4,
        advice="Leave out unneeded clones and conversions; keep one layout and one type: each "
        "`.contiguous()`, `.to()` and `reshape` of a transposed tensor writes all of it anew, and its gradient, too.",
        evidence=context.evidence(mask),
    )


def _copies(trace: Trace) -> pl.DataFrame:
    """Outermost operators that copy, without those of the optimizer, of FSDP and of the loader."""
    events = trace.events
    names, parent = events["name"], events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    is_op = (events["category"] == cat.OP).to_numpy()
    copying = names.str.contains(_COPYING).to_numpy() & is_op
    back = names.str.contains(_COPIES_BACK).to_numpy()
    candidate = np.flatnonzero((names.str.contains(_COPIES).to_numpy() & is_op) | back)
    outer = candidate[(parent[candidate] < 0) | ~is_op[np.maximum(parent[candidate], 0)]]
    has_copying = np.zeros(parent.size, dtype=np.bool_)  # inside
    above = parent[np.flatnonzero(copying)]
    while (above := above[above >= 0]).size:  # one turn per level of nesting
        has_copying[above] = True
        above = parent[above]
    inside = has_copying[outer] | copying[outer] | back[outer]
    own = _below(parent, names.str.contains(_OWN).to_numpy(), outer)
    kept = outer[inside & ~own]
    rows: pl.DataFrame = events.select("event", pl.col("name").cast(pl.String), "duration_ns", "step")[kept]
    return rows


def _below(parent: Ints, marked: Bools, events: Ints) -> Bools:
    """Which of some events lie inside a marked one."""
    inside = np.zeros(events.size, dtype=np.bool_)
    above = parent[events]
    while (above >= 0).any():
        inside |= (above >= 0) & marked[np.maximum(above, 0)]
        above = np.where(above >= 0, parent[np.maximum(above, 0)], -1)
    return inside


def tiny_operators(context: Context) -> Iterator[Said]:
    """The same few small operators again and again."""
    if context.on_device:
        yield Abstention("tiny-operators", "the device computes: see launch-bound and small-kernels")
        return
    in_loops, _ = looped(context)
    nodes = context.graph.nodes
    start, lane = nodes["start_ns"].to_numpy(), nodes["lane"].fill_null(-1).to_numpy()
    host = context.of_kind(*_HOST) & ~in_loops
    mask, left = np.zeros(nodes.height, dtype=np.bool_), np.ones(nodes.height)
    calls = 0
    for trace in context.traces:
        for row in context.in_step(context.ask(trace, _stretches)).to_dicts():
            ends = [np.flatnonzero(context.nodes_of(trace, pl.Series([row[end]]))) for end in ("first", "last")]
            if not ends[0].size or not ends[1].size:
                continue
            stretch = (
                host & (lane == lane[ends[0][0]]) & (start >= start[ends[0]].min()) & (start <= start[ends[1]].max())
            )
            mask |= stretch
            left[stretch] = 1 / row["times"]
            calls += row["calls"]
    work = nodes["work_ns"].to_numpy()
    time = int(work[mask].sum())
    if time < _LEAST_TINY * context.whole_ns * max(context.rank_count, 1):
        return
    remains = float((work[mask] * left[mask]).sum() / max(time, 1))
    yield Candidate(
        title=f"{units.count(calls)} tiny operators, the same few again and again, take {units.duration(time)} of "
        f"{context.where}{context.over_ranks}",
        changes=(Change("scale", Chosen("tiny operators, each kind once", mask, "host"), remains),),
        confidence=0.5,
        advice="Do it for all elements at once: stack the tensors and call each operator once, use the `_foreach_` or "
        "fused variant, or compile the function (torch.compile).",
        evidence=context.evidence(mask),
    )


def _stretches(trace: Trace) -> pl.DataFrame:
    """Stretches in which a few outermost operators repeat: first and last (events), step, calls, times.

    Those that make a batch are the loader's: `data-starved` has them.
    """
    schema = {"first": pl.UInt32, "last": pl.UInt32, "step": pl.Int32, "calls": pl.Int64, "times": pl.Int64}
    events = trace.events
    above = events["parent"].fill_null(0)
    is_op = events["category"] == cat.OP
    inner = events["parent"].is_not_null() & is_op.gather(above)
    loading = np.zeros(events.height, dtype=np.bool_)
    loading[loader_calls(trace)] = True
    parent = events["parent"].cast(pl.Int64).fill_null(-1).to_numpy()
    makes_batch = pl.Series(_below(parent, loading, np.arange(events.height)))
    ops = (
        events.filter(is_op & ~inner & ~makes_batch)
        .select("event", "name", "lane", "parent", "step", "start_ns", "duration_ns")
        .sort("lane", "start_ns")
        .with_columns(key=pl.struct("name", "lane", "parent", "step").rank("dense"))
    )
    key, took = ops["key"].to_numpy(), ops["duration_ns"].to_numpy()
    taken = np.zeros(key.size, dtype=np.bool_)
    stretches: list[tuple[int, int, int | None, int, int]] = []
    for period in range(1, min(_PERIOD, key.size - 1) + 1):
        same = np.flatnonzero(
            np.diff(np.concatenate([[False], key[period:] == key[:-period], [False]]).astype(np.int8))
        )
        for low, high in same.reshape(-1, 2).tolist():
            last = high + period - 1
            times = (last + 1 - low) // period
            if times < _TIMES or taken[low : last + 1].any() or np.median(took[low : last + 1]) > _TINY_NS:
                continue
            taken[low : last + 1] = True
            stretches.append((ops["event"][low], ops["event"][last], ops["step"][low], last + 1 - low, times))
    return pl.DataFrame(stretches, schema=schema, orient="row")


RULES = (
    FindingRule("host-copies", "copies of tensors on the host", extra_copies),
    FindingRule("tiny-operators", "many tiny operators on the host", tiny_operators),
)
