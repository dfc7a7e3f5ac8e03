"""Exposed and small transfers, slow links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.bandwidth import link_of, with_sizes
from traceloom.changes.changes import Change, Chosen
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import whatif_many
from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, FindingRule, Message
from traceloom.graph import graph as gs
from traceloom.system import units
from traceloom.trace.notice import Abstention

_SLOWER = 1.5  # times as long as in the other groups
_FAR = 3.0  # times as long as the link takes for it: less may be other traffic, or kernels beside it
_LARGE = 4 * 2**20  # bytes, from which on the link decides and not what it takes to begin
_KNOWN = 2  # transfers of a group that have to be seen
# What NCCL's own model of a ring of large messages takes beside the bytes: at the beginning, and per step over NVLink
# (src/graph/tuning.cc: baseLat and hwLat of ring/simple). Of the line rate its protocol leaves four fifths, as its
# maintainers say (nccl-tests, issue 212).
_BEGIN_NS, _STEP_NS, _OF_THE_RATE = 8_400, 3_400, 0.8
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (members - 1)
_SWITCHED = ("NVLink 4", "NVLink 5")  # all of a device's links lead to every other: older ones may lead to a few only


class SlowTransfers(Struct, frozen=True):
    """Transfers of one kind and size that take too long.

    Attributes:
        kind: Of the communication.
        size_bytes: Of each message.
        ranks: The groups that are slow, each by its members.
        times: How much too long, the median over groups.
        against: With what they are compared, in words.
        certain: Whether that was seen in the run.
        changes: As long as they should take, one change per group.
        nodes: All of them, shape (nodes,).
    """

    kind: str
    size_bytes: int
    ranks: tuple[tuple[int, ...], ...]
    times: float
    against: str
    certain: bool
    changes: tuple[Change, ...]
    nodes: np.ndarray[Any, np.dtype[np.bool_]]


def slow_links(context: Context) -> list[SlowTransfers]:
    """Transfers that take too long, by kind and size, those that lose longest first."""
    # communication whose transfer is known
    edges = context.graph.edges
    ends = pl.Series(context.graph.edges_of("rendezvous")) & edges["to_end"]
    transfers = edges.filter(ends).select(node="target", transfer_ns=pl.col("delay_ns") + pl.col("residual_ns"))
    transfers = transfers.filter(pl.col("transfer_ns") > 0)
    calls = context.graph.communication.join(transfers, on="node").filter(pl.col("kind").is_in(list(_STEPS)))
    sized = with_sizes(calls).with_columns(wire_bytes=pl.col("size_bytes") * pl.col("bus_factor"))
    rows = sized.drop_nulls(["ranks", "group_size", "wire_bytes"]).filter(pl.col("size_bytes") >= _LARGE)
    if not rows.height:
        return []
    keys = ["kind", "size_bytes", "group_size"]
    groups = rows.group_by(*keys, "ranks", maintain_order=True).agg(
        "node", pl.col("transfer_ns").median().alias("takes_ns"), pl.col("wire_bytes").first(), pl.len().alias("count")
    )
    candidates = []
    for _, peers in groups.filter(pl.col("count") >= _KNOWN).group_by(keys, maintain_order=True):
        for certain in (True, False):
            targets = [
                target
                for row in peers.to_dicts()
                if (target := _target(context, row, peers, certain=certain)) is not None
            ]
            if targets:
                lost_ns = sum((target["takes_ns"] - target["should_ns"]) * target["count"] for target in targets)
                candidates.append((_slow(context, targets, certain=certain), float(lost_ns)))
                break
    return [slow for slow, _ in sorted(candidates, key=lambda candidate: -candidate[1])]


def _target(context: Context, row: dict[str, Any], peers: pl.DataFrame, *, certain: bool) -> dict[str, Any] | None:
    """The group with `should_ns` and `against`, where it takes far longer; None where not."""
    if certain:
        others = [peer["takes_ns"] for peer in peers.to_dicts() if peer["ranks"] != row["ranks"]]
        should, against = float(np.median(others or [row["takes_ns"]])), "in the other groups of this run"
        return {**row, "should_ns": should, "against": against} if row["takes_ns"] > _SLOWER * should else None
    # the link between ranks that are known to be on one host, where it is known and switched
    members = [context.trace_of(rank) for rank in row["ranks"]]
    hosts = {trace.meta.host if trace is not None else None for trace in members}
    if len(hosts) != 1 or None in hosts or len(context.traces) < 2:
        return None
    used = [trace.devices.filter(pl.col("used"))["name"] for trace in members if trace is not None]
    names = {name for device_names in used for name in device_names.to_list()}
    links = {link_of(name) for name in names}
    link = links.pop() if len(links) == 1 else None
    if link is None or link.name not in _SWITCHED:
        return None
    steps = _STEPS[row["kind"]] * (row["group_size"] - 1)
    should = _BEGIN_NS + steps * _STEP_NS + row["wire_bytes"] / (link.peak_gb_per_s * _OF_THE_RATE)
    against = f"over {link.name} ({link.peak_gb_per_s:.0f} GB/s)"
    return {**row, "should_ns": should, "against": against} if row["takes_ns"] > _FAR * should else None


def _slow(context: Context, targets: list[dict[str, Any]], *, certain: bool) -> SlowTransfers:
    """What is slow of one kind and size, with a change for each group."""
    whole = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    changes = []
    for target in targets:
        mask = np.zeros(whole.size, dtype=np.bool_)
        mask[target["node"]] = True
        whole |= mask
        who = f"{target['kind']} of ranks {', '.join(map(str, target['ranks']))}"
        changes.append(Change("scale", Chosen(who, mask, "collectives"), target["should_ns"] / target["takes_ns"]))
    times = float(np.median([target["takes_ns"] / target["should_ns"] for target in targets]))
    ranks = tuple(tuple(target["ranks"]) for target in targets)
    first = targets[0]
    return SlowTransfers(
        first["kind"], first["size_bytes"], ranks, times, first["against"], certain, tuple(changes), whole
    )


def slow_link(context: Context) -> Iterator[Message]:
    """Transfers that take longer than elsewhere in the run, or than the link between the devices takes."""
    if context.rank_count < 2:
        yield Abstention("slow-link", "only one rank was recorded: what is transfer and what is waiting is not known")
        return
    for slow in slow_links(context):
        who = "; ".join(", ".join(map(str, ranks)) for ranks in slow.ranks[:3])
        who += "; …" if len(slow.ranks) > 3 else ""
        yield Candidate(
            title=f"{slow.kind} of {units.size(slow.size_bytes)} between ranks {who} takes {slow.times:.1f} × as long "
            f"as {slow.against}",
            changes=slow.changes,
            confidence=0.6 if slow.certain else 0.4,
            advice="Look at the link between these devices (nvidia-smi topo -m, nvidia-smi nvlink -s, errors and "
            "retries of the network), at which way NCCL takes (NCCL_DEBUG=INFO), and at what else uses it.",
            evidence=context.evidence(slow.nodes & context.of_kind(*gs.COMMUNICATION)),
        )


RULES = (FindingRule("slow-link", "a link slower than it should be", slow_link),)

_SMALL_BYTES = 256 * 1024
_MANY = 8
_UNEVEN = 1.5  # times the mean: the largest part of an exchange
# What the next operation does not need at once; the results of the others are used right behind them.
_MESSAGES = ("send", "receive")
_HAS_SPLITS = (pl.col("in_splits").list.len() > 1) & (pl.col("in_splits").list.sum() > 0)
_MOVABLE = ("all_reduce", "reduce_scatter", "all_gather")


def exposed(context: Context) -> Iterator[Message]:
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


def small_messages(context: Context) -> Iterator[Message]:
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


def uneven_exchange(context: Context) -> Iterator[Message]:
    """All-to-alls in which one peer gets far more than the others."""
    rows = context.graph.communication.filter(pl.col("kind") == "all_to_all")
    if not rows.height:
        return
    if not rows.filter(_HAS_SPLITS).height:
        yield Abstention("uneven-exchange", "the split sizes of all_to_all were not recorded")
        return
    change = balance_exchange(context)
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


def balance_exchange(context: Context) -> Change | None:
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


COMMUNICATION_RULES = (
    FindingRule("exposed-communication", "exposed communication", exposed),
    FindingRule("small-collectives", "many small collectives", small_messages),
    FindingRule("uneven-exchange", "all-to-alls whose parts are uneven", uneven_exchange),
)
