"""Work that need not be done, or not so: recomputation, separate optimizer and normalisation kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.host import of_passes
from traceloom.analyze.recompute import recomputed
from traceloom.findings.context import Bools, Context
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.model import Trace, units
from traceloom.model import category as cat
from traceloom.model import graph_schema as gs
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_OPTIMIZER_LEFT = 0.15  # of the host time of an optimizer that goes tensor by tensor, when it is fused
_NORM_LEFT = 0.35  # of the time of a normalisation made of several operators, when it is one
_SUMS = ("aten::add", "aten::add_")
_BEFORE, _AFTER = 5, 4  # operators around the root of a normalisation that may belong to it
_NORM_OPS = ("aten::pow", "aten::square", "aten::mean", "aten::var", "aten::add", "aten::sub", "aten::mul", "aten::to",
             "aten::rsqrt", "aten::sqrt", "aten::div", "aten::reciprocal", "aten::add_", "aten::mul_")  # fmt: skip


def recomputation(context: Context) -> Iterator[Said]:
    """What activation checkpointing does a second time."""
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    for trace in context.traces:
        repeated = recomputed(trace)
        if repeated.root.any():
            mask |= context.inside(trace, repeated.root | repeated.own) | _around(context, trace, repeated.root)
    if not mask.any():
        return
    on_device = mask & context.of_kind(gs.KERNEL, gs.COPY, gs.FILL)
    time = context.work_ns(context.own(on_device if on_device.any() else mask))
    yield Candidate(
        title=f"activation checkpointing repeats {context.in_words(time)} of forward work{context.over_ranks}",
        changes=(Change("remove", Chosen("recomputation", mask)),),
        confidence=0.6,
        advice="Checkpoint less: only the layers whose activations are large and cheap to repeat, or selective "
        "checkpointing, as far as memory allows.",
        evidence=context.evidence(on_device if on_device.any() else mask),
    )


def _around(context: Context, trace: Trace, roots: Bools) -> Bools:
    """What the autograd nodes that repeat do themselves until the repetition is over: the Python of the checkpoint."""
    tree = forest(trace)
    above = tree.parent[roots]
    root_rows, holder_rows = tree.row[roots][above >= 0], tree.row[above[above >= 0]]
    nodes = context.graph.nodes.with_row_index("at").with_columns(end=pl.col("start_ns") + pl.col("duration_ns"))
    tree_nodes = nodes.filter(
        pl.Series(context.nodes_of(trace, pl.Series([*root_rows, *holder_rows], dtype=pl.UInt32)))
    )
    held = pl.DataFrame({"event": root_rows, "holder": holder_rows}).cast(pl.UInt32)
    until = (
        tree_nodes.with_columns(pl.col("event").cast(pl.UInt32))
        .join(held, on="event")
        .group_by("holder")
        .agg(pl.col("end").max().alias("until"))
    )
    pieces = tree_nodes.with_columns(pl.col("event").cast(pl.UInt32)).join(until, left_on="event", right_on="holder")
    mask = np.zeros(nodes.height, dtype=np.bool_)
    mask[pieces.filter(pl.col("start_ns") <= pl.col("until"))["at"].to_numpy()] = True
    return mask


def unfused_optimizer(context: Context) -> Iterator[Said]:
    """An optimizer that goes through its parameters one by one."""
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    rules, matches = context.anti_pattern("single_tensor_optimizer")
    if not rules["checked"].any():
        yield Abstention("unfused-optimizer", next((reason for reason in reversed(rules["reason"]) if reason), ""))
        return
    matches = context.in_step(matches)
    for trace, rows in context.by_trace(matches):  # a closure makes the passes inside of it
        mask |= context.below(trace, rows["event"]) & ~context.inside(trace, context.ask(trace, of_passes))
    host = mask & context.of_kind(gs.HOST, gs.THINK, gs.LAUNCH)
    if not host.any():
        return
    gpu = mask & context.of_kind(gs.KERNEL, gs.COPY, gs.FILL)
    time = context.work_ns(host)
    yield Candidate(
        title=f"the optimizer steps tensor by tensor: {units.duration(time)} of host time, "
        f"{units.counted(int(gpu.sum()), 'kernel')}{context.over_ranks}",
        changes=(Change("scale", Chosen("optimizer on the host", host, "host"), _OPTIMIZER_LEFT),),
        confidence=0.7,
        advice="Use the fused or foreach implementation: `torch.optim.AdamW(..., fused=True)`.",
        evidence=(Evidence("optimizer steps", count=matches.height, total_ns=time), *context.evidence(host, 2)),
    )


def unfused_norm(context: Context) -> Iterator[Said]:
    """Normalisations made of single operators: a root, and the powers, means and products around it."""
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    count = 0
    for trace in context.traces:
        rows = context.ask(trace, _norms)
        count += context.in_step(rows)["norm"].n_unique()
        if rows.height:
            mask |= context.below(trace, rows["event"])
    if not mask.any():
        return
    kernels = mask & context.of_kind(gs.KERNEL)
    if not kernels.any():
        return
    own = context.own(kernels)
    all_but_waits = mask & context.of_kind(gs.KERNEL, gs.COPY, gs.FILL, gs.HOST, gs.LAUNCH)
    yield Candidate(
        title=f"{units.count(count)} normalisations are made of {context.many(int(own.sum()))} kernels "
        f"({context.in_words(context.work_ns(own))}{context.over_ranks})",
        changes=(Change("scale", Chosen("normalisations, fused", all_but_waits, "gpu"), _NORM_LEFT),),
        confidence=0.6,
        advice="Use torch.nn.RMSNorm or torch.nn.LayerNorm, a fused kernel (Liger, Apex), or torch.compile.",
        evidence=(Evidence("normalisations", count=count, total_ns=context.work_ns(kernels)),
                  *context.evidence(kernels, 3)),
    )  # fmt: skip


def _norms(trace: Trace) -> pl.DataFrame:
    """Operators of normalisations made by hand: norm (number), event, step.

    `aten::rsqrt` after a mean (or a variance) and before a product, with only such operators between them.
    """
    nothing = pl.DataFrame(schema={"norm": pl.Int64(), "event": pl.UInt32(), "step": pl.Int32()})
    events = trace.events[["event", "name", "step", "lane", "parent", "start_ns"]]
    if not (events["name"] == "aten::rsqrt").any():
        return nothing
    is_op = trace.events["category"] == cat.OP
    by_op = events["parent"].is_null() | ~is_op.gather(events["parent"].fill_null(0))
    top = events.filter(is_op & by_op).sort("lane", "start_ns")
    names, lanes, rows = top["name"].to_list(), top["lane"].to_list(), top["event"].to_list()
    steps = top["step"].to_list()
    members: list[tuple[int, int, int | None]] = []
    norm_ops = set(_NORM_OPS)
    for at, name in enumerate(names):
        if name != "aten::rsqrt":
            continue
        low = at
        while low > 0 and at - low < _BEFORE and names[low - 1] in norm_ops and lanes[low - 1] == lanes[at]:
            low -= 1
        while names[low] in _SUMS and low < at:  # a residual connection: the sum that is normalised
            low += 1
        high = at
        while (
            high + 1 < len(names)
            and high - at < _AFTER
            and names[high + 1] in norm_ops
            and lanes[high + 1] == lanes[at]
        ):
            high += 1
        before, after = names[low:at], names[at + 1 : high + 1]
        if ("aten::mean" in before or "aten::var" in before) and ("aten::mul" in after or "aten::mul_" in after):
            members += [(at, rows[k], steps[k]) for k in range(low, high + 1)]
    return pl.DataFrame(members, schema=nothing.schema, orient="row")


RULES = (
    FindingRule("recomputation", "activation checkpointing repeats work", recomputation),
    FindingRule("unfused-optimizer", "an optimizer that steps tensor by tensor", unfused_optimizer),
    FindingRule("unfused-normalisation", "normalisations made of single operators", unfused_norm),
)
