"""The tables of a simulation, from how a workload went before and after."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from traceloom.analyze.intervals import union
from traceloom.array_types import Ints
from traceloom.model import graph_schema as gs
from traceloom.model.frames import as_declared
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import point_times
from traceloom.retime.critical_path import Path, critical_path, parts
from traceloom.simulate.native.account import rank_account
from traceloom.simulate.native.evaluation import Course
from traceloom.simulate.native.operations import Operations, transfers_ns
from traceloom.simulate.simulation import BECAME, COLLECTIVES, LINKS, LOAD, NODES, PATH, RANKS, Simulation

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
        ranks=ranks.pipe(as_declared, RANKS),
        nodes=nodes.pipe(as_declared, NODES),
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
    return path.pipe(as_declared, PATH), _became(after, first, second)


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
    return order.pipe(as_declared, BECAME)


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
    return table.pipe(as_declared, COLLECTIVES)


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
        table.with_columns(pl.col("bytes", "busy_ns", "waiting_ns").fill_null(0)).sort("link").pipe(as_declared, LINKS)
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
    return pl.concat([frame.pipe(as_declared, LOAD) for frame in frames])
