"""Rules about communication: slow links, exposed and small collectives, uneven exchanges."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.bandwidth import add_sizes, find_device_link
from traceloom.changes.changes import Change, NodeSelection
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import whatif_many
from traceloom.findings.context import Context
from traceloom.findings.rule import NO_COMMUNICATION, Candidate, FindingRule, Message
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace.notice import Abstention

_SLOW_FACTOR = 1.5  # times as long as in the other groups
# Times as long as the link needs for it: less may be other traffic, or kernels beside it
_SLOW_LINK_FACTOR = 3.0
_MIN_LARGE_BYTES = 4 * 2**20  # bytes, from which on the link decides and not the start-up time
_MIN_TRANSFERS = 2  # transfers of a group that are required
# NCCL's own model of a ring of large messages adds to the time of the bytes: a start-up time, and a
# time per step over NVLink (src/graph/tuning.cc: baseLat and hwLat of ring/simple). Its protocol
# reaches four fifths of the line rate, as its maintainers state (nccl-tests, issue 212).
_STARTUP_NS, _STEP_NS, _REACHED_RATE = 8_400, 3_400, 0.8
_RING_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times (members - 1)
# Every device of these is linked to every other: older ones may be linked to a few only
_SWITCHED_LINKS = (
    "NVLink 4",
    "NVLink 5",
)


class SlowTransfers(Struct, frozen=True):
    """Transfers of one kind and size that take too long.

    Attributes:
        kind: Kind of the communication.
        size_bytes: Size of each message.
        ranks: The slow groups, each by its members.
        times: How many times as long as it should take, the median over groups.
        against: The comparison, in words.
        certain: Whether the comparison is with other groups of the run.
        changes: One change per group to the time that it should take.
        nodes: All slow transfers, shape (nodes,).
    """

    kind: str
    size_bytes: int
    ranks: tuple[tuple[int, ...], ...]
    times: float
    against: str
    certain: bool
    changes: tuple[Change, ...]
    nodes: np.ndarray[Any, np.dtype[np.bool_]]


def find_slow_links(context: Context) -> list[SlowTransfers]:
    """Returns transfers that take too long, by kind and size, those that lose the most time
    first.
    """
    # Communication whose transfer is known.
    edges = context.graph.edges
    is_transfer = pl.Series(context.graph.edge_mask("rendezvous")) & edges["to_end"]
    transfers = edges.filter(is_transfer).select(
        node="target", transfer_ns=pl.col("delay_ns") + pl.col("residual_ns")
    )
    transfers = transfers.filter(pl.col("transfer_ns") > 0)
    calls = context.graph.communication.join(transfers, on="node").filter(
        pl.col("kind").is_in(list(_RING_STEPS))
    )
    sized = add_sizes(calls).with_columns(wire_bytes=pl.col("size_bytes") * pl.col("bus_factor"))
    rows = sized.drop_nulls(["ranks", "group_size", "wire_bytes"]).filter(
        pl.col("size_bytes") >= _MIN_LARGE_BYTES
    )
    if not rows.height:
        return []
    keys = ["kind", "size_bytes", "group_size"]
    groups = rows.group_by(*keys, "ranks", maintain_order=True).agg(
        "node",
        pl.col("transfer_ns").median().alias("takes_ns"),
        pl.col("wire_bytes").first(),
        pl.len().alias("count"),
    )
    candidates = []
    for _, peers in groups.filter(pl.col("count") >= _MIN_TRANSFERS).group_by(
        keys, maintain_order=True
    ):
        for certain in (True, False):
            targets = [
                target
                for row in peers.to_dicts()
                if (target := _compute_target(context, row, peers, certain=certain)) is not None
            ]
            if targets:
                lost_ns = sum(
                    (target["takes_ns"] - target["should_ns"]) * target["count"]
                    for target in targets
                )
                candidates.append(
                    (_build_slow_transfers(context, targets, certain=certain), float(lost_ns))
                )
                break
    return [slow for slow, _ in sorted(candidates, key=lambda candidate: -candidate[1])]


def _compute_target(
    context: Context, row: dict[str, Any], peers: pl.DataFrame, *, certain: bool
) -> dict[str, Any] | None:
    """Returns the group with `should_ns` and `against` where it takes far longer; else None."""
    if certain:
        other_times = [
            peer["takes_ns"] for peer in peers.to_dicts() if peer["ranks"] != row["ranks"]
        ]
        should, against = (
            float(np.median(other_times or [row["takes_ns"]])),
            "in the other groups of this run",
        )
        return (
            {**row, "should_ns": should, "against": against}
            if row["takes_ns"] > _SLOW_FACTOR * should
            else None
        )
    # The link between ranks that are known to be on one host, where it is known and switched.
    members = [context.find_trace(rank) for rank in row["ranks"]]
    hosts = {trace.meta.host if trace is not None else None for trace in members}
    if len(hosts) != 1 or None in hosts or len(context.traces) < 2:
        return None
    used = [trace.devices.filter(pl.col("used"))["name"] for trace in members if trace is not None]
    names = {name for device_names in used for name in device_names.to_list()}
    links = {find_device_link(name) for name in names}
    link = links.pop() if len(links) == 1 else None
    if link is None or link.name not in _SWITCHED_LINKS:
        return None
    steps = _RING_STEPS[row["kind"]] * (row["group_size"] - 1)
    should = (
        _STARTUP_NS + steps * _STEP_NS + row["wire_bytes"] / (link.peak_gb_per_s * _REACHED_RATE)
    )
    against = f"over {link.name} ({link.peak_gb_per_s:.0f} GB/s)"
    return (
        {**row, "should_ns": should, "against": against}
        if row["takes_ns"] > _SLOW_LINK_FACTOR * should
        else None
    )


def _build_slow_transfers(
    context: Context, targets: list[dict[str, Any]], *, certain: bool
) -> SlowTransfers:
    """Returns the slow transfers of one kind and size, with a change for each group."""
    all_nodes = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    changes = []
    for target in targets:
        mask = np.zeros(all_nodes.size, dtype=np.bool_)
        mask[target["node"]] = True
        all_nodes |= mask
        label = f"{target['kind']} of ranks {', '.join(map(str, target['ranks']))}"
        changes.append(
            Change(
                "scale",
                NodeSelection(label, mask, "collectives"),
                target["should_ns"] / target["takes_ns"],
            )
        )
    times = float(np.median([target["takes_ns"] / target["should_ns"] for target in targets]))
    ranks = tuple(tuple(target["ranks"]) for target in targets)
    first = targets[0]
    return SlowTransfers(
        first["kind"],
        first["size_bytes"],
        ranks,
        times,
        first["against"],
        certain,
        tuple(changes),
        all_nodes,
    )


def check_slow_links(context: Context) -> Iterator[Message]:
    """Reports transfers that take longer than elsewhere in the run, or than the link between the
    devices needs.
    """
    for slow in find_slow_links(context):
        rank_list = "; ".join(", ".join(map(str, ranks)) for ranks in slow.ranks[:3])
        rank_list += "; …" if len(slow.ranks) > 3 else ""
        yield Candidate(
            title=f"{slow.kind} of {units.format_size(slow.size_bytes)} between ranks {rank_list} takes {slow.times:.1f} × as long "
            f"as {slow.against}",
            changes=slow.changes,
            confidence=0.6 if slow.certain else 0.4,
            advice="Look at the link between these devices (nvidia-smi topo -m, nvidia-smi nvlink -s, errors and "
            "retries of the network), at which way NCCL takes (NCCL_DEBUG=INFO), and at what else uses it.",
            evidence=context.evidence(
                slow.nodes & context.select_kinds(*graph_schema.COMMUNICATION)
            ),
        )


_ONE_SIDE = "only one rank was recorded: what is transfer and what is waiting is not known"
RULES = (
    FindingRule(
        "slow-link",
        "a link slower than it should be",
        check_slow_links,
        ((lambda context: context.rank_count < 2, _ONE_SIDE),),
    ),
)

_MAX_SMALL_BYTES = 256 * 1024
_MIN_CALLS_PER_STEP = 8
_MAX_IMBALANCE = 1.5  # times the mean: the largest part of an exchange
# Results of these are not needed at once by the next operation; results of the others are.
_POINT_TO_POINT_KINDS = ("send", "receive")
_HAS_SPLITS = (pl.col("in_splits").list.len() > 1) & (pl.col("in_splits").list.sum() > 0)
_MIN_HIDDEN_SHARE = 0.5  # of what the communication costs: overlap helps
_OVERLAPPABLE_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def find_exposed_communication(context: Context) -> Iterator[Message]:
    """Reports communication that no compute hides, by kind."""
    rows = context.graph.communication
    links = [change for slow in find_slow_links(context) for change in slow.changes]
    # The waits of a pipeline stage belong to the schedule: see pipeline-bubbles.
    for kind in rows["kind"].drop_nulls().unique().sort().to_list():
        mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
        mask[rows.filter(pl.col("kind") == kind)["node"].to_numpy()] = True
        mask &= context.select_kinds(*graph_schema.COMMUNICATION)
        exposed_ns = context.compute_exposed_ns(mask)
        if not exposed_ns or (kind in _POINT_TO_POINT_KINDS and context.is_pipeline):
            continue
        in_steps = context.own(mask)
        time = int(context.graph.nodes["duration_ns"].to_numpy()[in_steps].sum())
        movable = kind in _OVERLAPPABLE_KINDS
        change = Change("overlap", NodeSelection(f"{kind}, beside computing", mask, "collectives"))
        at_most_ns = exposed_ns
        # Its saving when slow links are as fast as they should be: their cost belongs to
        # `slow-link`
        fixed = context.changed(Scenario.of(context.graph), links)
        gone = Change("remove", NodeSelection(f"{kind}, which nothing hides", mask, "collectives"))
        scenarios = (fixed, *(context.changed(fixed, [one]) for one in (change, gone)))
        times = whatif_many(context.graph, scenarios, context.plan)
        hidden_ns, gone_ns = (max(int(times[0] - after), 0) for after in times[1:])
        if links:
            at_most_ns = min(hidden_ns, exposed_ns)
        if hidden_ns < _MIN_HIDDEN_SHARE * gone_ns:  # nothing is left to run beside it
            yield Candidate(
                title=f"{context.format_time_per_step(gone_ns)} of {kind} end the step, with nothing left to overlap"
                f"{context.rank_sum_suffix and f', on each of {context.rank_count} ranks'}",
                changes=(gone,),
                confidence=0.3,
                advice="Send less at the end: a smaller last bucket (bucket_cap_mb, the largest layers first), bf16 or "
                "compressed gradients (a communication hook), or fewer exchanges (gradient accumulation, no_sync).",
                evidence=context.evidence(mask & ~context.select_kinds(graph_schema.KERNEL)),
                at_most_ns=exposed_ns // max(context.rank_count, 1),
            )
            continue
        yield Candidate(
            title=f"{context.format_time_per_step(context.compute_exposed_ns(in_steps))} of {context.format_time_per_step(time)} of {kind} not overlapped "
            f"({context.many(int(in_steps.sum()), 'call')}{context.rank_sum_suffix})",
            changes=(change,),
            confidence=0.5 if movable else 0.3,
            advice="Start it earlier and wait for it later: gradient buckets in DDP, prefetching in FSDP "
            "(forward_prefetch, backward_prefetch), asynchronous handles, a stream of its own."
            if movable
            else "What comes next needs its result: split the batch in two and compute one half while the other "
            "communicates, or run work that does not depend on it meanwhile (a shared expert, the dense layers).",
            evidence=context.evidence(mask & ~context.select_kinds(graph_schema.KERNEL)),
            at_most_ns=at_most_ns,
        )


def find_small_collectives(context: Context) -> Iterator[Message]:
    """Reports many small collectives that could be one."""
    rows = context.graph.communication.filter(
        pl.col("in_bytes").is_not_null(),
        pl.col("in_bytes") > 0,
        pl.col("in_bytes") < _MAX_SMALL_BYTES,
    )
    for (kind,), messages in rows.group_by("kind", maintain_order=True):
        if (
            messages.height < _MIN_CALLS_PER_STEP * max(context.rank_count, 1) * context.step_count
            or kind in _POINT_TO_POINT_KINDS
        ):
            continue
        mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
        mask[messages["node"].to_numpy()] = True
        yield Candidate(
            title=f"{context.many(int(context.own(mask).sum()))} calls of {kind} send less than {units.format_size(_MAX_SMALL_BYTES)} each"
            f"{context.rank_sum_suffix}",
            changes=(
                Change(
                    "scale",
                    NodeSelection(f"small {kind}", mask, "collectives"),
                    1 / _MIN_CALLS_PER_STEP,
                ),
            ),
            confidence=0.5,
            advice="Put them together: larger buckets (bucket_cap_mb), flattened tensors, coalesced calls.",
            evidence=context.evidence(mask),
        )


def find_uneven_exchanges(context: Context) -> Iterator[Message]:
    """Reports all-to-alls in which one peer gets far more than the others."""
    rows = context.graph.communication.filter(pl.col("kind") == "all_to_all")
    if not rows.height:
        return
    if not rows.filter(_HAS_SPLITS).height:
        yield Abstention("uneven-exchange", "the split sizes of all_to_all were not recorded")
        return
    change = build_balanced_exchange(context)
    if change is None:
        return
    mask = change.selection.nodes(context.graph)
    yield Candidate(
        title=f"{context.many(int(context.own(mask).sum()))} all_to_alls are uneven{context.rank_sum_suffix}: one part is "
        f"{1 / change.factor:.1f} × the mean",
        changes=(change,),
        confidence=0.4,
        advice="Balance what is exchanged: capacity factor or auxiliary loss of the router, another placement of "
        "experts or embedding tables.",
        evidence=context.evidence(mask),
    )


def build_balanced_exchange(context: Context) -> Change | None:
    """Returns a change that makes uneven all-to-alls as fast as with equal parts; None where none
    is uneven.
    """
    split = context.graph.communication.filter(pl.col("kind") == "all_to_all", _HAS_SPLITS)
    ratios = split.with_columns(
        given=pl.col("in_splits").list.max() / pl.col("in_splits").list.mean(),
        got=pl.col("out_splits").list.max() / pl.col("out_splits").list.mean(),
    )
    # One rank sends a part and another receives it; the slower of both decides.
    worst = ratios.with_columns(
        worst=pl.max_horizontal("given", "got").fill_nan(1.0).fill_null(1.0)
    )
    uneven = worst.filter(pl.col("worst") > _MAX_IMBALANCE)
    if not uneven.height:
        return None
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    mask[uneven["node"].to_numpy()] = True
    return Change(
        "scale",
        NodeSelection("uneven all_to_all", mask, "collectives"),
        1 / float(uneven["worst"].median()),  # type: ignore[arg-type]
    )


COMMUNICATION_RULES = (
    FindingRule(
        "exposed-communication",
        "exposed communication",
        find_exposed_communication,
        (
            NO_COMMUNICATION,
            (
                lambda context: not context.has_gpu_work,
                "no GPU work was recorded that could overlap it",
            ),
        ),
    ),
    FindingRule(
        "small-collectives", "many small collectives", find_small_collectives, (NO_COMMUNICATION,)
    ),
    FindingRule("uneven-exchange", "all-to-alls whose parts are uneven", find_uneven_exchanges),
)
