"""The summary of a workload, and of one node with its neighbours, as JSON objects."""

from __future__ import annotations

import polars as pl

from traceloom.report.table import Row
from traceloom.report.workload.network import NodeNetwork

_NAMES = 12
_KNOWN_BYTES = pl.when(pl.col("bytes").count() > 0).then(pl.col("bytes").sum()).alias("bytes")


def summarise(network: NodeNetwork) -> Row:
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
        "kinds": _totals(nodes, ["kind"]).to_dicts(),
        "communication": communication.to_dicts(),
        "dependencies": edges.group_by("kind", "evidence")
        .agg(pl.len().alias("count"))
        .sort("count", "kind", "evidence", descending=[True, False, False])
        .to_dicts(),
        "names": _totals(nodes, ["kind", "name"]).head(_NAMES).to_dicts(),
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


def _ranks(network: NodeNetwork) -> list[Row]:
    sent = pl.col("bytes").filter(pl.col("kind").is_in(["collective", "send"]))
    waiting = network.edges.group_by(pl.col("target").alias("row")).agg(pl.len().alias("waits"))
    nodes = network.nodes.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    return (
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
        .to_dicts()
    )


def neighbours(network: NodeNetwork, row: int) -> Row:
    """One node, what it waits for, and what waits for it."""
    communication = network.communication.filter(pl.col("node") == row).select("what", "group").to_dicts()
    beside = {}
    for key, own, other in (("before", "target", "source"), ("after", "source", "target")):
        edges = network.edges.filter(pl.col(own) == row)
        nodes = network.nodes[edges[other]].with_columns(edges["kind"].alias("edge"), edges["evidence"])
        beside[key] = nodes.sort("rank", "id").to_dicts()
    return {
        "format": "traceloom-node",
        "version": 1,
        "node": {**network.nodes.row(row, named=True), **(communication[0] if communication else {})},
        **beside,
    }
