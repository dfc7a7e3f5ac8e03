"""The summary of a workload, and of one node with its neighbours, as JSON objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from traceloom.model.frames import rows
from traceloom.report.workload.attributes import attributes_of
from traceloom.report.workload.network import NodeNetwork

if TYPE_CHECKING:
    from traceloom.report.documents.workload import (
        NeighbourRow,
        NodeDocument,
        ShownNodeValue,
        WorkloadRankRow,
        WorkloadSummaryDocument,
    )

_NAMES = 12
_KNOWN_BYTES = pl.when(pl.col("bytes").count() > 0).then(pl.col("bytes").sum()).alias("bytes")


def summarise(network: NodeNetwork) -> WorkloadSummaryDocument:
    """What `traceloom show --json` prints.

    Times are sums over nodes, ns; `window_ns` is from the first start to the last end, null where there are no times.
    """
    nodes, edges = network.nodes, network.edges
    timed = nodes.filter(pl.col("start_ns").is_not_null())
    window = None
    if timed.height:
        ends = (timed["start_ns"] + timed["time_ns"]).max()
        window = int(ends) - int(timed["start_ns"].min())  # type: ignore[arg-type]
    communication = (
        network.communication.join(nodes.with_row_index("node").cast({"node": pl.Int64}), on="node")
        .group_by("what", "group")
        .agg(
            pl.len().alias("count"),
            pl.col("rank").n_unique().alias("ranks"),
            _KNOWN_BYTES,
            pl.col("time_ns").sum(),
        )
        .sort("bytes", "count", "what", "group", descending=[True, True, False, False], nulls_last=True)
    )
    waits = nodes.height - edges["target"].n_unique()
    held = nodes.height - edges["source"].n_unique()
    return {
        "format": "traceloom-workload-summary",
        "version": 1,
        "name": network.name,
        "form": network.form,
        "facts": list(network.facts),
        "nodes": nodes.height,
        "edges": edges.height,
        "dangling": network.dangling,
        "first_nodes": waits,
        "last_nodes": held,
        "window_ns": window,
        "ranks": _ranks(network),
        "kinds": rows(_totals(nodes, ["kind"])),
        "communication": rows(communication),
        "dependencies": rows(
            edges.group_by("kind", "evidence")
            .agg(pl.len().alias("count"))
            .sort("count", "kind", "evidence", descending=[True, False, False])
        ),
        "names": rows(_totals(nodes, ["kind", "name"]).head(_NAMES)),
        "notices": [notice.to_dict() for notice in network.notices],
    }


def _totals(nodes: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    return (
        nodes.group_by(by)
        .agg(
            pl.len().alias("count"),
            pl.col("time_ns").sum(),
            pl.col("time_ns").max().alias("longest_ns"),
            _KNOWN_BYTES,
        )
        .sort("time_ns", "count", *by, descending=[True, True, *(False for _ in by)])
    )


def _ranks(network: NodeNetwork) -> list[WorkloadRankRow]:
    sent = pl.col("bytes").filter(pl.col("kind").is_in(["collective", "send"]))
    waiting = network.edges.group_by(pl.col("target").alias("row")).agg(pl.len().alias("waits"))
    nodes = network.nodes.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    return rows(
        nodes.filter(pl.col("rank").is_not_null())
        .join(waiting, on="row", how="left")
        .group_by("rank")
        .agg(
            pl.len().alias("nodes"),
            pl.col("waits").sum().alias("edges"),
            pl.col("time_ns").filter(pl.col("kind").is_in(["compute", "kernel"])).sum().alias("compute_ns"),
            # who sends nothing sends 0; of messages whose sizes no file tells it is unknown
            pl.when((sent.count() > 0) | (sent.len() == 0)).then(sent.sum()).alias("sent_bytes"),
            pl.col("start_ns").min(),
            (pl.col("start_ns") + pl.col("time_ns")).max().alias("end_ns"),
        )
        .sort("rank")
    )


def neighbours(network: NodeNetwork, row: int) -> NodeDocument:
    """One node, what it waits for, what waits for it, and what else its file says of it."""
    node: ShownNodeValue = rows(network.nodes[[row]])[0]
    for communication in rows(network.communication.filter(pl.col("node") == row).select("what", "group").head(1)):
        node |= communication
    path = None if node["rank"] is None else network.details.get(node["rank"])
    return {
        "format": "traceloom-node",
        "version": 1,
        "node": node,
        "before": _across(network, row, "target", "source"),
        "after": _across(network, row, "source", "target"),
        "attributes": {} if path is None or node["id"] is None else dict(attributes_of(path, node["id"])),
    }


def _across(network: NodeNetwork, row: int, own: str, other: str) -> list[NeighbourRow]:
    """The nodes at the other end of the edges of a node."""
    edges = network.edges.filter(pl.col(own) == row)
    nodes = network.nodes[edges[other]].with_columns(edges["kind"].alias("edge"), edges["evidence"])
    return rows(nodes.sort("rank", "id"))
