"""Links slower than they should be: by what other groups of the run reach, or by what the link is made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.collective.bandwidth import link_of, with_sizes
from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.model import graph_schema as gs
from traceloom.model import units
from traceloom.model.finding import Abstention
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen

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


def slow_link(context: Context) -> Iterator[Said]:
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
