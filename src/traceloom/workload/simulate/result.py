"""`Simulation`, the result of every engine, with its tables and how they are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, merge_intervals, merge_spans, subtract_spans
from traceloom.errors import broken
from traceloom.graph import graph as graph_schema
from traceloom.graph.critical_path import Path, find_critical_path, summarize_path
from traceloom.graph.graph import Graph, get_point_times
from traceloom.trace.array_types import Ints
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.workload.simulate.evaluation import Evaluation
from traceloom.workload.simulate.transfers import Operations, compute_recorded_transfers

if TYPE_CHECKING:
    from traceloom.workload.simulate.device import DeviceChange


Mode = Literal["native", "astra-sim"]

_PARTS = ("compute_ns", "exposed_communication_ns", "memory_ns", "host_ns", "other_ns")
RANKS = build_schema(
    "rank before_ns end_ns compute_ns communication_ns exposed_communication_ns memory_ns host_ns other_ns"
)
NODES = build_schema("node rank name kind start_ns end_ns before_start_ns before_end_ns")
COLLECTIVES = build_schema(
    "instance kind group ranks bytes start_ns end_ns transfer_ns waiting_ns bandwidth algorithm flags before_ns",
    "card_ns",
    {"bandwidth": pl.Float64, "flags": pl.String},
)
LINKS = build_schema(
    "link name source target bytes busy_ns waiting_ns",
    {"link": pl.Int64, "source": pl.String, "target": pl.String},
)
LOAD = build_schema("link time_ns share", {"link": pl.Int64, "share": pl.Float64})
PATH = build_schema("what kind before_ns after_ns")
BECAME = build_schema("what kind rank name count time_ns")


@dataclass(frozen=True)
class Simulation(Result):
    """The times of a workload on a machine.

    Times are ns; those named `start_ns` and `end_ns` count from the beginning of the workload.
    "Before" is the recorded machine: as measured, or by the durations in the files if nothing was
    measured.

    Attributes:
        mode: `native`, or `astra-sim`, which reproduces that simulator.
        name: The workload, as the user named it.
        machine: Name of the machine; "" for the recorded one.
        step: The simulated step; None for the whole recording.
        measured_ns: Measured duration; None if the workload has no measured times.
        identity_ns: Duration when simulated on the recorded machine using only the typical delays
            of each kind of edge; None if nothing was measured.
        identity_error: Its difference from the measurement, as a fraction of that: the error of the
            graph.
        before_ns: From the first start to the last end, before; None in the mode `astra-sim`.
        after_ns: The same on the machine.
        low_ns: With all work of the device as short as its rules allow; None on the recorded
            device.
        high_ns: As long as they allow.
        ranks: rank; before_ns, end_ns (of its last node); communication_ns (overlapped or not);
            compute_ns, exposed_communication_ns (not overlapped by computation), memory_ns (copies
            and fills outside both), host_ns (host work outside all of them) and other_ns, which add
            up to end_ns.
        nodes: node (row of the graph), rank, name, kind, start_ns, end_ns, before_start_ns,
            before_end_ns.
        collectives: instance, kind, group, ranks (number), bytes (of the whole buffer of a rank),
            start_ns (first arrival), end_ns, transfer_ns (from the last arrival), waiting_ns (from
            the first to the last arrival), bandwidth (10^9 B/s on the bus), algorithm (null if a
            measured transfer was used), flags, before_ns (transfer before), card_ns (lower bound
            for its bytes on the network cards).
        links: link, name, source, target (ranks and switches), bytes, busy_ns, waiting_ns (extra
            time of transfers because it was full).
        load: Share of a link's bandwidth in use from a time on: link, time_ns, share. Only for the
            busiest links.
        path: Composition of the critical path: what, kind, before_ns, after_ns.
        became_critical: What is newly on the critical path: what (work or delay), kind, rank, name
            (of the node that works, or that waited), count, time_ns.
        notices: Assumptions, and properties outside the measurements.
        identity: The identity check in words.
        trusted: Whether the graph explains the measurement well enough; None if nothing was
            measured.
        device: The effect of another device; None on the recorded one.
        graph: The workload as if recorded on the machine; only in the mode `native`.
        recorded: The workload as recorded; only in the mode `native`.
    """

    mode: Mode
    name: str
    machine: str
    step: int | None
    measured_ns: int | None
    identity_ns: int | None
    identity_error: float | None
    before_ns: int | None
    after_ns: int
    ranks: pl.DataFrame
    low_ns: int | None = None
    high_ns: int | None = None
    nodes: pl.DataFrame = field(default_factory=NODES.to_frame)
    collectives: pl.DataFrame = field(default_factory=COLLECTIVES.to_frame)
    links: pl.DataFrame = field(default_factory=LINKS.to_frame)
    load: pl.DataFrame = field(default_factory=LOAD.to_frame)
    path: pl.DataFrame = field(default_factory=PATH.to_frame)
    became_critical: pl.DataFrame = field(default_factory=BECAME.to_frame)
    notices: tuple[Notice, ...] = ()
    identity: str = ""
    trusted: bool | None = None
    device: DeviceChange | None = None
    graph: Graph | None = None
    recorded: Graph | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values, without the graphs."""
        return {
            key: value
            for key, value in super().to_dict().items()
            if key not in {"graph", "recorded", "load"}
        }

    def check(self) -> None:
        """Raise InvariantError if the result is inconsistent.

        Parts of a rank's time are not negative and add up to it exactly; nothing ends before it
        starts; the parts of the critical path add up to the whole; no transfer is faster than its
        bytes over the network cards.
        """
        parts = self.ranks.select(_PARTS)
        if self.ranks.height:
            if (parts.min_horizontal() < 0).any():
                raise broken("account", "a part of a rank's time is negative")
            if (parts.sum_horizontal() != self.ranks["end_ns"]).any():
                raise broken("account", "the parts of a rank's time do not add up to it")
        for name in ("nodes", "collectives"):
            frame = getattr(self, name)
            if (frame["end_ns"] < frame["start_ns"]).any():
                raise broken("times", f"something among the {name} ends before it starts")
        if (self.collectives["transfer_ns"] < self.collectives["card_ns"]).any():
            raise broken("network", "a transfer is faster than the network cards of its ranks")
        if self.path.height and int(self.path["after_ns"].sum()) != self.after_ns:
            raise broken(
                "path", "what the critical path consists of does not add up to the whole time"
            )


# Overlapping activities count as the first of these.
_KINDS = {
    "compute_ns": (graph_schema.KERNEL,),
    "exposed_communication_ns": graph_schema.COMMUNICATION,
    "memory_ns": (graph_schema.COPY, graph_schema.FILL),
    "host_ns": (graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH),
}


def build_rank_account(graph: Graph, begin_ns: int) -> pl.DataFrame:
    """Returns the time of each rank from the beginning to the end of its last node, by activity.

    Args:
        graph: The evaluated graph.
        begin_ns: The beginning.

    Returns:
        Columns of `Simulation.ranks` without `before_ns`.
    """
    spans = graph.nodes.select(
        "rank",
        pl.col("kind").to_physical(),
        low=(pl.col("start_ns") - begin_ns).clip(
            lower_bound=0
        ),  # by clock error, work may precede its launch
        high=(pl.col("start_ns") + pl.col("duration_ns") - begin_ns).clip(lower_bound=0),
    ).drop_nulls("rank")
    ranks, number = np.unique(spans["rank"].to_numpy(), return_inverse=True)
    kind, low, high = (spans[name].to_numpy() for name in ("kind", "low", "high"))
    end = np.zeros(ranks.size, dtype=np.int64)
    np.maximum.at(end, number, high)
    # Place the ranks one after the other on one time line, so that one set of spans covers all.
    rank_offset = int(end.max(initial=0)) + 1
    low, high = low + number * rank_offset, high + number * rank_offset

    def of_ranks(busy: Spans) -> Ints:
        total = np.zeros(ranks.size, dtype=np.int64)
        np.add.at(total, busy.start // rank_offset, busy.end - busy.start)
        return total

    account = {"rank": ranks, "end_ns": end}
    before: list[Spans] = []
    for column, kinds in _KINDS.items():
        selected = np.isin(kind, [graph_schema.NODE_KINDS.index(name) for name in kinds])
        busy = merge_intervals(low[selected], high[selected])
        if column == "exposed_communication_ns":
            account["communication_ns"] = of_ranks(busy)
        account[column] = of_ranks(subtract_spans(busy, merge_spans(*before)) if before else busy)
        before.append(busy)
    account["other_ns"] = end - np.sum([account[column] for column in _KINDS], axis=0)
    return pl.DataFrame(account).pipe(
        cast_to_schema, {name: RANKS[name] for name in RANKS if name != "before_ns"}
    )


_MAX_LOADS = 32  # number of links whose load over time is kept
_HIDDEN_KINDS = (graph_schema.ORIGIN, graph_schema.RENDEZVOUS, graph_schema.ARRIVAL)


def assemble_simulation(
    name: str,
    before: Evaluation,
    after: Evaluation,
    operations: Operations,
    interval: Sequence[Evaluation] = (),
    **known_fields: Any,
) -> Simulation:
    """Builds the result of a simulation.

    Args:
        name: Name of the workload.
        before: On the recorded machine.
        after: On the machine.
        operations: The communications of the workload.
        interval: With all uncertain durations as short, and as long, as possible.
        known_fields: Other fields of `Simulation`.

    Raises:
        InvariantError: The result is inconsistent; see `Simulation.check`.
    """
    times_before, times = get_point_times(before.graph), get_point_times(after.graph)
    begin_ns = int(times_before.min()) if times.size else 0
    ranks = build_rank_account(after.graph, begin_ns).join(
        build_rank_account(before.graph, begin_ns).select("rank", before_ns="end_ns"),
        on="rank",
        maintain_order="left",
    )
    nodes = after.graph.nodes.with_columns(
        start_ns=pl.Series(times[0::2] - begin_ns),
        end_ns=pl.Series(times[1::2] - begin_ns),
        before_start_ns=pl.Series(times_before[0::2] - begin_ns),
        before_end_ns=pl.Series(times_before[1::2] - begin_ns),
    ).filter(~pl.col("kind").cast(pl.String).is_in(_HIDDEN_KINDS))
    bound_ends = [
        int(get_point_times(bound.graph).max(initial=begin_ns)) - begin_ns for bound in interval
    ]
    path, became = _compare_paths(before.graph, after.graph, begin_ns)
    result = Simulation(
        mode="native",
        name=name,
        before_ns=int(times_before.max()) - begin_ns if times.size else 0,
        after_ns=int(times.max()) - begin_ns if times.size else 0,
        low_ns=bound_ends[0] if bound_ends else None,
        high_ns=bound_ends[-1] if bound_ends else None,
        ranks=ranks.pipe(cast_to_schema, RANKS),
        nodes=nodes.pipe(cast_to_schema, NODES),
        collectives=_build_collectives(before, after, operations, begin_ns),
        links=(links := _build_links(after, operations)),
        load=_load(after, operations, links, begin_ns),
        path=path,
        became_critical=became,
        graph=after.graph,
        recorded=before.graph,
        **known_fields,
    )
    result.check()
    return result


def _compare_paths(before: Graph, after: Graph, begin_ns: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Returns the composition of both critical paths, and what is newly on the second."""
    if not after.nodes.height:
        return PATH.to_frame(), BECAME.to_frame()
    first, second = find_critical_path(before), find_critical_path(after)
    consists = [
        summarize_path(graph, path, begin_ns).select(
            "what", "kind", pl.col("time_ns").alias(column)
        )
        for graph, path, column in ((before, first, "before_ns"), (after, second, "after_ns"))
    ]
    path = (
        consists[0]
        .join(consists[1], on=["what", "kind"], how="full", coalesce=True, nulls_equal=True)
        .fill_null(0)
        .sort("after_ns", "before_ns", "what", "kind", descending=[True, True, False, False])
        .pipe(cast_to_schema, PATH)
    )
    return path, _find_new_critical(after, first, second)


def _find_new_critical(after: Graph, first: Path, second: Path) -> pl.DataFrame:
    """See `Simulation.became_critical`."""
    node_facts = after.nodes.select(pl.col("kind").cast(pl.String), "rank", "name")
    # Edges between consecutive works of a lane exist only where they were needed to serialize it.
    edge_count = max(after.edges.height, int(first.edges.max(initial=-1)) + 1)
    old_nodes, old_edges = np.zeros(after.nodes.height, np.bool_), np.zeros(edge_count, np.bool_)
    old_nodes[first.nodes], old_edges[first.edges] = True, True
    new_nodes, new_edges = (
        second.nodes[~old_nodes[second.nodes]],
        second.edges[~old_edges[second.edges]],
    )
    edges = after.edges[new_edges]
    rows = pl.concat(
        [
            node_facts[new_nodes].with_columns(
                what=pl.lit("work"), time_ns=after.nodes["work_ns"].gather(new_nodes)
            ),
            node_facts[edges["target"]].with_columns(
                edges["kind"].cast(pl.String), what=pl.lit("delay"), time_ns=edges["delay_ns"]
            ),
        ]
    )
    keys = ["what", "kind", "rank", "name"]
    return (
        rows.filter(pl.col("time_ns") != 0)
        .group_by(keys)
        .agg(pl.len().alias("count"), pl.col("time_ns").sum())
        .sort("time_ns", "count", *keys, descending=[True, True, False, False, False, False])
        .pipe(cast_to_schema, BECAME)
    )


def _build_collectives(
    before: Evaluation, after: Evaluation, operations: Operations, begin_ns: int
) -> pl.DataFrame:
    """See `Simulation.collectives`."""
    times = get_point_times(after.graph)
    first, last, end = (np.zeros(len(operations), dtype=np.int64) for _ in range(3))
    first[:] = np.iinfo(np.int64).max
    starts, part_ends = times[2 * operations.part], times[2 * operations.part + 1]
    np.minimum.at(first, operations.operation_of_part, starts)
    np.maximum.at(end, operations.operation_of_part, part_ends)
    last = times[2 * operations.table["meeting"].to_numpy().astype(np.int64)]
    transfer = end - last
    modelled = after.transfers
    none: list[str | None] = [None] * len(operations)
    table = operations.table.with_columns(
        ranks=pl.col("group_size"),
        bytes=pl.col("size_bytes"),
        start_ns=pl.Series(first - begin_ns),
        end_ns=pl.Series(end - begin_ns),
        transfer_ns=pl.Series(np.maximum(transfer, 0)),
        waiting_ns=pl.Series(np.maximum(last - first, 0)),
        algorithm=pl.Series(none if modelled is None else modelled.algorithm, dtype=pl.String),
        flags=pl.Series(
            [""] * len(operations) if modelled is None else modelled.flags, dtype=pl.String
        ),
        before_ns=pl.Series(compute_recorded_transfers(before.graph, operations)),
        card_ns=pl.Series(
            np.zeros(len(operations), np.int64)
            if modelled is None
            else np.where(modelled.replaced, modelled.card_ns, 0)
        ),
    ).with_columns(
        bandwidth=pl.when(pl.col("transfer_ns") > 0).then(
            pl.col("bytes") * pl.col("bus_factor") / pl.col("transfer_ns")
        )
    )
    return table.pipe(cast_to_schema, COLLECTIVES)


def _build_links(after: Evaluation, operations: Operations) -> pl.DataFrame:
    """See `Simulation.links`."""
    modelled, bundles = after.transfers, after.bundles
    if modelled is None or bundles is None or not modelled.share.height:
        return LINKS.to_frame()
    times = get_point_times(after.graph)
    meeting_times = times[2 * operations.table["meeting"].to_numpy().astype(np.int64)]
    end = np.zeros(len(operations), dtype=np.int64)
    np.maximum.at(end, operations.operation_of_part, times[2 * operations.part + 1])
    class_by_operation = np.where(modelled.replaced, modelled.class_of_operation, -1)
    row, bundle, _ = bundles.uses(class_by_operation)
    busy: Ints = np.zeros(bundles.count, dtype=np.int64)
    order = np.argsort(bundle, kind="stable")
    row, bounds = row[order], np.searchsorted(bundle[order], np.arange(bundles.count + 1)).tolist()
    for number, (low, high) in enumerate(pairwise(bounds)):
        busy[number] = merge_intervals(meeting_times[row[low:high]], end[row[low:high]]).total
    count = np.bincount(
        class_by_operation[class_by_operation >= 0], minlength=bundles.first.size - 1
    )
    bytes_of = (
        modelled.share.with_columns(
            count=pl.Series(count).gather(modelled.share["class_of_operation"])
        )
        .group_by("link")
        .agg((pl.col("bytes") * pl.col("count")).sum().alias("bytes"))
    )
    bundle_rows = pl.DataFrame(
        {
            "link": bundles.link,
            "busy_ns": busy[bundles.of_link],
            "waiting_ns": np.rint(after.evaluated.waiting_ns).astype(np.int64)[bundles.of_link],
        }
    )
    return (
        modelled.links.join(bytes_of, on="link", how="left")
        .join(bundle_rows, on="link", how="left")
        .with_columns(pl.col("bytes", "busy_ns", "waiting_ns").fill_null(0))
        .sort("link")
        .pipe(cast_to_schema, LINKS)
    )


def _load(
    after: Evaluation, operations: Operations, links: pl.DataFrame, begin_ns: int
) -> pl.DataFrame:
    """See `Simulation.load`: transfers that share a full link count with their mean rate on it."""
    modelled, bundles = after.transfers, after.bundles
    if modelled is None or bundles is None or not links.height:
        return LOAD.to_frame()
    times = get_point_times(after.graph)
    meeting_times = times[2 * operations.table["meeting"].to_numpy().astype(np.int64)]
    end = np.zeros(len(operations), dtype=np.int64)
    np.maximum.at(end, operations.operation_of_part, times[2 * operations.part + 1])
    stretched = np.clip(
        modelled.time_ns / np.maximum(end - meeting_times, 1), 0.0, 1.0
    )  # slowed by contention
    row, used, part = bundles.uses(np.where(modelled.replaced, modelled.class_of_operation, -1))
    bundle_by_link = dict(zip(bundles.link.tolist(), bundles.of_link.tolist(), strict=True))
    steps: dict[int, pl.DataFrame] = {}
    frames = [LOAD.to_frame()]
    for link in (
        links.sort("busy_ns", "link", descending=[True, False])["link"].head(_MAX_LOADS).to_list()
    ):
        bundle = bundle_by_link.get(link)
        if bundle is None:
            continue
        if bundle not in steps:
            on_bundle = np.flatnonzero(used == bundle)
            operation_rows, share = row[on_bundle], part[on_bundle] * stretched[row[on_bundle]]
            change = pl.DataFrame(
                {
                    "time_ns": np.concatenate([meeting_times[operation_rows], end[operation_rows]])
                    - begin_ns,
                    "share": np.concatenate([share, -share]),
                }
            )
            steps[bundle] = (
                change.group_by("time_ns")
                .agg(pl.col("share").sum())
                .sort("time_ns")
                .with_columns(pl.col("share").cum_sum().clip(0.0, 1.0))
            )
        frames.append(steps[bundle].select(pl.lit(link).alias("link"), "time_ns", "share"))
    return pl.concat([frame.pipe(cast_to_schema, LOAD) for frame in frames])
