"""Communication that the step waits for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom.findings.context import Context
from traceloom.findings.links import slow_links
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.model.finding import Abstention
from traceloom.simulate import Scenario, whatif_many
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

_SMALL_BYTES = 256 * 1024
_MANY = 8
_UNEVEN = 1.5  # times the mean: the largest part of an exchange
# What the next operation does not need at once; the results of the others are used right behind them.
_MESSAGES = ("send", "receive")
_HAS_SPLITS = (pl.col("in_splits").list.len() > 1) & (pl.col("in_splits").list.sum() > 0)
_MOVABLE = ("all_reduce", "reduce_scatter", "all_gather")


def exposed(context: Context) -> Iterator[Said]:
    """Communication that no computing hides, by kind."""
    if not context.of_kind(*gs.COMMUNICATION).any():
        yield Abstention("exposed-communication", "no communication was recorded")
        return
    if not context.on_device:
        yield Abstention("exposed-communication", "no GPU work was recorded that could overlap it")
        return
    rows = context.graph.communication
    links = [change for slow in slow_links(context) for change in slow.changes]
    # what a stage waits for is the schedule's: see pipeline-bubbles
    for kind in rows["kind"].drop_nulls().unique().sort().to_list():
        mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
        mask[rows.filter(pl.col("kind") == kind)["node"].to_numpy()] = True
        mask &= context.of_kind(*gs.COMMUNICATION)
        alone = context.exposed_ns(mask)
        if not alone or (kind in _MESSAGES and context.piped):
            continue
        own = context.own(mask)
        time = int(context.graph.nodes["duration_ns"].to_numpy()[own].sum())
        movable = kind in _MOVABLE
        change = Change("overlap", Chosen(f"{kind}, beside computing", mask, "collectives"))
        at_most_ns = alone
        if links:  # what it saves when slow links are as fast as they should be: what these cost is theirs
            fixed = context.changed(Scenario.of(context.graph), links)
            times = whatif_many(context.graph, (fixed, context.changed(fixed, [change])), context.plan)
            at_most_ns = min(max(int(times[0] - times[1]), 0), alone)
        yield Candidate(
            title=f"{context.in_words(context.exposed_ns(own))} of {context.in_words(time)} of {kind} not overlapped "
            f"({context.many(int(own.sum()), 'call')}{context.over_ranks})",
            changes=(change,),
            confidence=0.5 if movable else 0.3,
            advice="Start it earlier and wait for it later: gradient buckets in DDP, prefetching in FSDP "
            "(forward_prefetch, backward_prefetch), asynchronous handles, a stream of its own."
            if movable
            else "What comes next needs its result: split the batch in two and compute one half while the other "
            "communicates, or run work that does not depend on it meanwhile (a shared expert, the dense layers).",
            evidence=context.evidence(mask & ~context.of_kind(gs.KERNEL)),
            at_most_ns=at_most_ns,
            seen_ns=alone // max(context.rank_count, 1),
        )


def small_messages(context: Context) -> Iterator[Said]:
    """Many small collectives that could be one."""
    rows = context.graph.communication.filter(
        pl.col("in_bytes").is_not_null(), pl.col("in_bytes") > 0, pl.col("in_bytes") < _SMALL_BYTES
    )
    if not context.of_kind(*gs.COMMUNICATION).any():
        yield Abstention("small-collectives", "no communication was recorded")
        return
    for (kind,), messages in rows.group_by("kind", maintain_order=True):
        if messages.height < _MANY * max(context.rank_count, 1) * context.step_count or kind in _MESSAGES:
            continue
        mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
        mask[messages["node"].to_numpy()] = True
        yield Candidate(
            title=f"{units.count(messages.height)} calls of {kind} send less than {units.size(_SMALL_BYTES)} each"
            f"{context.over_ranks}",
            changes=(Change("scale", Chosen(f"small {kind}", mask, "collectives"), 1 / _MANY),),
            confidence=0.5,
            advice="Put them together: larger buckets (bucket_cap_mb), flattened tensors, coalesced calls.",
            evidence=context.evidence(mask),
        )


def uneven_exchange(context: Context) -> Iterator[Said]:
    """All-to-alls in which one peer gets far more than the others."""
    rows = context.graph.communication.filter(pl.col("kind") == "all_to_all")
    if not rows.height:
        return
    if not rows.filter(_HAS_SPLITS).height:
        yield Abstention("uneven-exchange", "the split sizes of all_to_all were not recorded")
        return
    change = evened(context)
    if change is None:
        return
    mask = change.selection.nodes(context.graph)
    yield Candidate(
        title=f"{units.count(int(mask.sum()))} all_to_alls are uneven{context.over_ranks}: one part is "
        f"{1 / change.factor:.1f} × the mean",
        changes=(change,),
        confidence=0.4,
        advice="Balance what is exchanged: capacity factor or auxiliary loss of the router, another placement of "
        "experts or embedding tables.",
        evidence=context.evidence(mask),
    )


def evened(context: Context) -> Change | None:
    """Uneven all-to-alls, as fast as they would be with equal parts; None where none is uneven."""
    split = context.graph.communication.filter(pl.col("kind") == "all_to_all", _HAS_SPLITS)
    ratios = split.with_columns(
        given=pl.col("in_splits").list.max() / pl.col("in_splits").list.mean(),
        got=pl.col("out_splits").list.max() / pl.col("out_splits").list.mean(),
    )
    # one part is sent by one rank and received by another; the slowest of both decides
    worst = ratios.with_columns(worst=pl.max_horizontal("given", "got").fill_nan(1.0).fill_null(1.0))
    bad = worst.filter(pl.col("worst") > _UNEVEN)
    if not bad.height:
        return None
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    mask[bad["node"].to_numpy()] = True
    return Change("scale", Chosen("uneven all_to_all", mask, "collectives"), 1 / float(bad["worst"].median()))  # type: ignore[arg-type]


RULES = (
    FindingRule("exposed-communication", "exposed communication", exposed),
    FindingRule("small-collectives", "many small collectives", small_messages),
    FindingRule("uneven-exchange", "all-to-alls whose parts are uneven", uneven_exchange),
)
