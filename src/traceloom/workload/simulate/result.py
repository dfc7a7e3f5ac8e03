"""`Engine` protocol, `Simulation` and its tables; public face.

Names are loaded when they are first used: what-ifs need no machine, and ASTRA-sim's mode no graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, difference, merge, union
from traceloom.errors import broken
from traceloom.graph import graph as gs
from traceloom.graph.critical_path import Path, critical_path, parts
from traceloom.graph.graph import Graph, point_times
from traceloom.trace.array_types import Ints
from traceloom.trace.frames import Result, cast_to_schema, schema
from traceloom.trace.notice import Notice
from traceloom.workload.simulate.evaluation import Course
from traceloom.workload.simulate.transfers import Operations, transfers_ns

if TYPE_CHECKING:
    from traceloom.workload.simulate.device import DeviceChange


Mode = Literal["native", "astra-sim"]

_PARTS = ("compute_ns", "exposed_communication_ns", "memory_ns", "host_ns", "other_ns")
RANKS = schema("rank before_ns end_ns compute_ns communication_ns exposed_communication_ns memory_ns host_ns other_ns")
NODES = schema("node rank name kind start_ns end_ns before_start_ns before_end_ns")
COLLECTIVES = schema(
    "instance kind group ranks bytes start_ns end_ns transfer_ns waiting_ns bandwidth algorithm flags before_ns",
    "card_ns",
    {"bandwidth": pl.Float64, "flags": pl.String},
)
LINKS = schema(
    "link name source target bytes busy_ns waiting_ns",
    {"link": pl.Int64, "source": pl.String, "target": pl.String},
)
LOAD = schema("link time_ns share", {"link": pl.Int64, "share": pl.Float64})
PATH = schema("what kind before_ns after_ns")
BECAME = schema("what kind rank name count time_ns")


@dataclass(frozen=True)
class Simulation(Result):
    """When everything of a workload happens on a machine.

    Times are ns; those named `start_ns` and `end_ns` count from the beginning of the workload. "Before" is the recorded
    machine: as measured, or as the durations in the files say where nothing was measured.

    Attributes:
        mode: `native`, or `astra-sim`, which gives what that simulator gives.
        name: The workload, as the user named it.
        machine: Name of the machine; "" for the recorded one.
        step: The step that was simulated; None for all that was recorded.
        measured_ns: How long it took; None where the workload holds no measured times.
        identity_ns: How long it takes when simulated on the recorded machine with the usual delays of its kinds of
            edges alone; None where nothing was measured.
        identity_error: Its difference from the measurement, as a fraction of that: the error of the graph.
        before_ns: From the first start to the last end, before; None in the mode `astra-sim`.
        after_ns: The same on the machine.
        low_ns: With all work of the device as short as the rules for it allow; None on the recorded device.
        high_ns: As long as they allow.
        ranks: rank; before_ns, end_ns (of its last node); communication_ns (whatever else runs meanwhile); compute_ns,
            exposed_communication_ns (while nothing computes), memory_ns (copies and fills beside neither), host_ns
            (host work beside none of them) and other_ns, which add up to end_ns.
        nodes: node (row of the graph), rank, name, kind, start_ns, end_ns, before_start_ns, before_end_ns.
        collectives: instance, kind, group, ranks (how many), bytes (of the whole buffer of a rank), start_ns (first
            arrival), end_ns, transfer_ns (from the last arrival), waiting_ns (from the first to the last arrival),
            bandwidth (10^9 B/s on the bus), algorithm (None where a measured transfer was taken), flags, before_ns
            (transfer before), card_ns (what its bytes take over the network cards at least).
        links: link, name, source, target (ranks and switches), bytes, busy_ns, waiting_ns (by which transfers that
            needed it took longer because it was full).
        load: How much of its bandwidth a link gives from a time on: link, time_ns, share. Of the busiest links.
        path: What the critical path consists of: what, kind, before_ns, after_ns.
        became_critical: What is on the critical path now and was not before: what (work or delay), kind, rank, name (of
            the node that works, or that waited), count, time_ns.
        notices: What is assumed, and what lies outside of what was measured.
        identity: The check in words.
        trusted: Whether the graph explains the measurement well enough; None where nothing was measured.
        device: What another device makes of the work; None on the recorded one.
        graph: The workload as if it had been recorded on the machine; None in other modes than `native`.
        recorded: The workload as it was recorded; None in other modes than `native`.
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
        """As every result, without the graphs."""
        return {key: value for key, value in super().to_dict().items() if key not in {"graph", "recorded", "load"}}

    def check(self) -> None:
        """Raise InvariantError where the answer breaks its own laws.

        Parts of a rank's time are not negative and add up to it exactly; nothing ends before it starts; what the
        critical path consists of adds up to the whole; no transfer takes less than its bytes take over the network
        cards.
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
            raise broken("path", "what the critical path consists of does not add up to the whole time")


# A moment in which several things go on counts for the first of them.
_KINDS = {
    "compute_ns": (gs.KERNEL,),
    "exposed_communication_ns": gs.COMMUNICATION,
    "memory_ns": (gs.COPY, gs.FILL),
    "host_ns": (gs.HOST, gs.THINK, gs.LAUNCH),
}


def rank_account(graph: Graph, begin_ns: int) -> pl.DataFrame:
    """The time of each rank from the beginning to the end of its last node, by what goes on.

    Args:
        graph: With the times in question.
        begin_ns: The beginning.

    Returns:
        Columns of `Simulation.ranks` without `before_ns`.
    """
    spans = graph.nodes.select(
        "rank",
        pl.col("kind").to_physical(),
        low=(pl.col("start_ns") - begin_ns).clip(lower_bound=0),  # by its clock, work may precede its launch
        high=(pl.col("start_ns") + pl.col("duration_ns") - begin_ns).clip(lower_bound=0),
    ).drop_nulls("rank")
    ranks, number = np.unique(spans["rank"].to_numpy(), return_inverse=True)
    kind, low, high = (spans[name].to_numpy() for name in ("kind", "low", "high"))
    end = np.zeros(ranks.size, dtype=np.int64)
    np.maximum.at(end, number, high)
    # The ranks one after the other on one line of time, so that one set of spans is that of all of them.
    far = int(end.max(initial=0)) + 1
    low, high = low + number * far, high + number * far

    def of_ranks(busy: Spans) -> Ints:
        total = np.zeros(ranks.size, dtype=np.int64)
        np.add.at(total, busy.start // far, busy.end - busy.start)
        return total

    account = {"rank": ranks, "end_ns": end}
    before: list[Spans] = []
    for column, kinds in _KINDS.items():
        chosen = np.isin(kind, [gs.NODE_KINDS.index(name) for name in kinds])
        busy = union(low[chosen], high[chosen])
        if column == "exposed_communication_ns":
            account["communication_ns"] = of_ranks(busy)
        account[column] = of_ranks(difference(busy, merge(*before)) if before else busy)
        before.append(busy)
    account["other_ns"] = end - np.sum([account[column] for column in _KINDS], axis=0)
    columns = {name: RANKS[name] for name in RANKS if name != "before_ns"}
    return pl.DataFrame(account).pipe(cast_to_schema, columns)


_MOST_LOADS = 32  # links whose load over time is kept
_NOT_SHOWN = (gs.ORIGIN, gs.RENDEZVOUS, gs.ARRIVAL)


def answer(
    name: str, before: Course, after: Course, of: Operations, interval: Sequence[Course] = (), **more: Any
) -> Simulation:
    """Put together what came of a simulation.

    Args:
        name: Of the workload.
        before: On the recorded machine.
        after: On the machine.
        of: The communications of the workload.
        interval: With all that is uncertain as short, and as long, as it can be.
        more: Fields of `Simulation` that are known already.

    Raises:
        InvariantError: The answer breaks its own laws; see `Simulation.check`.
    """
    times_before, times = point_times(before.graph), point_times(after.graph)
    begin = int(times_before.min()) if times.size else 0
    own_ends = rank_account(before.graph, begin).select("rank", before_ns="end_ns")
    ranks = rank_account(after.graph, begin).join(own_ends, on="rank", maintain_order="left")
    nodes = after.graph.nodes.with_columns(
        start_ns=pl.Series(times[0::2] - begin),
        end_ns=pl.Series(times[1::2] - begin),
        before_start_ns=pl.Series(times_before[0::2] - begin),
        before_end_ns=pl.Series(times_before[1::2] - begin),
    ).filter(~pl.col("kind").cast(pl.String).is_in(_NOT_SHOWN))
    ends = [int(point_times(each.graph).max(initial=begin)) - begin for each in interval]
    path, became = _paths(before.graph, after.graph, begin)
    result = Simulation(
        mode="native",
        name=name,
        before_ns=int(times_before.max()) - begin if times.size else 0,
        after_ns=int(times.max()) - begin if times.size else 0,
        low_ns=ends[0] if ends else None,
        high_ns=ends[-1] if ends else None,
        ranks=ranks.pipe(cast_to_schema, RANKS),
        nodes=nodes.pipe(cast_to_schema, NODES),
        collectives=_collectives(before, after, of, begin),
        links=(links := _links(after, of)),
        load=_load(after, of, links, begin),
        path=path,
        became_critical=became,
        graph=after.graph,
        recorded=before.graph,
        **more,
    )
    result.check()
    return result


def _paths(before: Graph, after: Graph, begin: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What both critical paths consist of, and what is on the second alone."""
    if not after.nodes.height:
        return PATH.to_frame(), BECAME.to_frame()
    first, second = critical_path(before), critical_path(after)
    consists = [
        parts(graph, path, begin).select("what", "kind", pl.col("time_ns").alias(column))
        for graph, path, column in ((before, first, "before_ns"), (after, second, "after_ns"))
    ]
    both = consists[0].join(consists[1], on=["what", "kind"], how="full", coalesce=True, nulls_equal=True).fill_null(0)
    path = both.sort("after_ns", "before_ns", "what", "kind", descending=[True, True, False, False])
    return path.pipe(cast_to_schema, PATH), _became(after, first, second)


def _became(after: Graph, first: Path, second: Path) -> pl.DataFrame:
    """See `Simulation.became_critical`."""
    about = after.nodes.select(pl.col("kind").cast(pl.String), "rank", "name")
    # Edges between works that a lane did in turn are only there where it had to.
    edge_count = max(after.edges.height, int(first.edges.max(initial=-1)) + 1)
    old_nodes, old_edges = np.zeros(after.nodes.height, np.bool_), np.zeros(edge_count, np.bool_)
    old_nodes[first.nodes], old_edges[first.edges] = True, True
    new_nodes, new_edges = second.nodes[~old_nodes[second.nodes]], second.edges[~old_edges[second.edges]]
    edges = after.edges[new_edges]
    rows = pl.concat(
        [
            about[new_nodes].with_columns(what=pl.lit("work"), time_ns=after.nodes["work_ns"].gather(new_nodes)),
            about[edges["target"]].with_columns(
                edges["kind"].cast(pl.String), what=pl.lit("delay"), time_ns=edges["delay_ns"]
            ),
        ]
    )
    keys = ["what", "kind", "rank", "name"]
    counted = rows.filter(pl.col("time_ns") != 0).group_by(keys).agg(pl.len().alias("count"), pl.col("time_ns").sum())
    order = counted.sort("time_ns", "count", *keys, descending=[True, True, False, False, False, False])
    return order.pipe(cast_to_schema, BECAME)


def _collectives(before: Course, after: Course, of: Operations, begin: int) -> pl.DataFrame:
    """See `Simulation.collectives`."""
    times = point_times(after.graph)
    first, last, end = (np.zeros(len(of), dtype=np.int64) for _ in range(3))
    first[:] = np.iinfo(np.int64).max
    starts, ends = times[2 * of.part], times[2 * of.part + 1]
    np.minimum.at(first, of.of_part, starts)
    np.maximum.at(end, of.of_part, ends)
    last = times[2 * of.table["meeting"].to_numpy().astype(np.int64)]
    transfer = end - last
    asked = after.transfers
    none: list[str | None] = [None] * len(of)
    table = of.table.with_columns(
        ranks=pl.col("group_size"),
        bytes=pl.col("size_bytes"),
        start_ns=pl.Series(first - begin),
        end_ns=pl.Series(end - begin),
        transfer_ns=pl.Series(np.maximum(transfer, 0)),
        waiting_ns=pl.Series(np.maximum(last - first, 0)),
        algorithm=pl.Series(none if asked is None else asked.algorithm, dtype=pl.String),
        flags=pl.Series([""] * len(of) if asked is None else asked.flags, dtype=pl.String),
        before_ns=pl.Series(transfers_ns(before.graph, of)),
        card_ns=pl.Series(np.zeros(len(of), np.int64) if asked is None else np.where(asked.replaced, asked.card_ns, 0)),
    ).with_columns(
        bandwidth=pl.when(pl.col("transfer_ns") > 0).then(
            pl.col("bytes") * pl.col("bus_factor") / pl.col("transfer_ns")
        )
    )
    return table.pipe(cast_to_schema, COLLECTIVES)


def _links(after: Course, of: Operations) -> pl.DataFrame:
    """See `Simulation.links`."""
    asked, bundles = after.transfers, after.bundles
    if asked is None or bundles is None or not asked.share.height:
        return LINKS.to_frame()
    times = point_times(after.graph)
    met = times[2 * of.table["meeting"].to_numpy().astype(np.int64)]
    end = np.zeros(len(of), dtype=np.int64)
    np.maximum.at(end, of.of_part, times[2 * of.part + 1])
    of_class = np.where(asked.replaced, asked.of_class, -1)
    row, bundle, _ = bundles.uses(of_class)
    busy: Ints = np.zeros(bundles.count, dtype=np.int64)
    order = np.argsort(bundle, kind="stable")
    row, bounds = row[order], np.searchsorted(bundle[order], np.arange(bundles.count + 1)).tolist()
    for number, (low, high) in enumerate(pairwise(bounds)):
        busy[number] = union(met[row[low:high]], end[row[low:high]]).total
    count = np.bincount(of_class[of_class >= 0], minlength=bundles.first.size - 1)
    bytes_of = (
        asked.share.with_columns(count=pl.Series(count).gather(asked.share["of_class"]))
        .group_by("link")
        .agg((pl.col("bytes") * pl.col("count")).sum().alias("bytes"))
    )
    of_bundle = pl.DataFrame(
        {
            "link": bundles.link,
            "busy_ns": busy[bundles.of_link],
            "waiting_ns": np.rint(after.evaluated.waiting_ns).astype(np.int64)[bundles.of_link],
        }
    )
    table = asked.links.join(bytes_of, on="link", how="left").join(of_bundle, on="link", how="left")
    return (
        table.with_columns(pl.col("bytes", "busy_ns", "waiting_ns").fill_null(0))
        .sort("link")
        .pipe(cast_to_schema, LINKS)
    )


def _load(after: Course, of: Operations, links: pl.DataFrame, begin: int) -> pl.DataFrame:
    """See `Simulation.load`: transfers that share a full link count with what it gives them on the mean."""
    asked, bundles = after.transfers, after.bundles
    if asked is None or bundles is None or not links.height:
        return LOAD.to_frame()
    times = point_times(after.graph)
    met = times[2 * of.table["meeting"].to_numpy().astype(np.int64)]
    end = np.zeros(len(of), dtype=np.int64)
    np.maximum.at(end, of.of_part, times[2 * of.part + 1])
    stretched = np.clip(asked.time_ns / np.maximum(end - met, 1), 0.0, 1.0)  # by waiting for others
    of_class = np.where(asked.replaced, asked.of_class, -1)
    row, used, part = bundles.uses(of_class)
    of_bundle = dict(zip(bundles.link.tolist(), bundles.of_link.tolist(), strict=True))
    steps: dict[int, pl.DataFrame] = {}
    frames = [LOAD.to_frame()]
    for link in links.sort("busy_ns", "link", descending=[True, False])["link"].head(_MOST_LOADS).to_list():
        bundle = of_bundle.get(link)
        if bundle is None:
            continue
        if bundle not in steps:
            inside = np.flatnonzero(used == bundle)
            at, share = row[inside], part[inside] * stretched[row[inside]]
            change = pl.DataFrame(
                {
                    "time_ns": np.concatenate([met[at], end[at]]) - begin,
                    "share": np.concatenate([share, -share]),
                }
            )
            steps[bundle] = (
                change.group_by("time_ns").agg(pl.col("share").sum()).sort("time_ns")
                .with_columns(pl.col("share").cum_sum().clip(0.0, 1.0))
            )  # fmt: skip
        frames.append(steps[bundle].select(pl.lit(link).alias("link"), "time_ns", "share"))
    return pl.concat([frame.pipe(cast_to_schema, LOAD) for frame in frames])
