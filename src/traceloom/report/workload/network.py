"""Graphs and sets of Chakra files in one shape, for who looks at nodes and dependencies."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.chakra.node_table import NodeTable
from traceloom.chakra.schema import CollectiveCommType, NodeType
from traceloom.chakra.validation.waiting import resolve
from traceloom.chakra.workload import Workload
from traceloom.model.graph import Graph
from traceloom.model.notice import Notice

_TYPES = {
    NodeType.INVALID_NODE: "invalid",
    NodeType.METADATA_NODE: "metadata",
    NodeType.MEM_LOAD_NODE: "load",
    NodeType.MEM_STORE_NODE: "store",
    NodeType.COMM_SEND_NODE: "send",
    NodeType.COMM_RECV_NODE: "receive",
    NodeType.COMM_COLL_NODE: "collective",
}
COMMUNICATION = ("collective", "send", "receive")


@dataclass(frozen=True)
class NodeNetwork:
    """Nodes and what they wait for.

    Attributes:
        name: What the user gave.
        form: `graph` or `chakra`.
        nodes: `id` (as the user knows it: in the file, or row of the graph), `rank`, `kind`, `name`, `time_ns`,
            `start_ns` (null where the file has no times), `bytes` (of communication and copies); rows are nodes.
        edges: `source`, `target` (rows), `kind`, `evidence` (null in Chakra files).
        communication: `node` (row), `what` (all_reduce, ...), `group`.
        dangling: Dependencies on nodes that do not exist.
        facts: More to say in the head, in words.
        notices: What is wrong with the files.
        details: Files to read one node's attributes from, by rank.
    """

    name: str
    form: str
    nodes: pl.DataFrame
    edges: pl.DataFrame
    communication: pl.DataFrame
    dangling: int = 0
    facts: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    details: dict[int, Path] = field(default_factory=dict)


def of_graph(graph: Graph) -> NodeNetwork:
    """A graph as it is: all kinds of nodes and edges."""
    nodes = graph.nodes.select(
        pl.col("node").cast(pl.Int64).alias("id"),
        pl.col("rank").cast(pl.Int64),
        pl.col("kind").cast(pl.String),
        "name",
        pl.col("duration_ns").alias("time_ns"),
        "start_ns",
        "bytes",
    )
    edges = graph.edges.select(
        pl.col("source").cast(pl.Int64),
        pl.col("target").cast(pl.Int64),
        pl.col("kind").cast(pl.String),
        pl.col("evidence").cast(pl.String),
    )
    communication = graph.communication.select(
        pl.col("node").cast(pl.Int64), pl.col("kind").fill_null("unknown").alias("what"), "group"
    )
    return NodeNetwork(graph.name, "graph", nodes, edges, communication, facts=(graph.stage,), notices=graph.notices)


def of_workload(workload: Workload) -> NodeNetwork:
    """Chakra files of all ranks; times are whole microseconds, as files have them."""
    first = np.cumsum([0, *(len(table) for table in workload.tables)])
    nodes, edges, dangling = [], [], 0
    for at, rank, table in zip(first.tolist(), workload.ranks, workload.tables, strict=False):
        nodes.append(_nodes(table, rank))
        resolved = resolve(table)
        dangling += len(resolved.dangling[0]) + len(resolved.dangling_control[0])
        for kind, arcs in (("data", resolved.data), ("control", resolved.control)):
            edges.append(
                pl.DataFrame({"source": arcs.source + at, "target": arcs.target + at}).with_columns(
                    pl.lit(kind).alias("kind"), pl.lit(None, dtype=pl.String).alias("evidence")
                )
            )
    whole = pl.concat(nodes)
    communication = (
        whole.with_row_index("node")
        .filter(pl.col("kind").is_in(COMMUNICATION))
        .select(pl.col("node").cast(pl.Int64), pl.coalesce("what", "kind").alias("what"), "group")
    )
    files = {rank or 0: Path(table.path) for rank, table in zip(workload.ranks, workload.tables, strict=True)}
    return NodeNetwork(
        workload.place.name,
        "chakra",
        whole.drop("what", "group"),
        pl.concat(edges),
        communication,
        dangling,
        notices=tuple(notice for table in workload.tables for notice in table.notices),
        details=files,
    )


def _nodes(table: NodeTable, rank: int | None) -> pl.DataFrame:
    names = {CollectiveCommType.Value(name): name.lower() for name in CollectiveCommType.keys()}  # noqa: SIM118
    kind = (
        pl.when(pl.col("type") == NodeType.COMP_NODE)
        .then(pl.when(pl.col("is_cpu_op").fill_null(value=False)).then(pl.lit("host")).otherwise(pl.lit("compute")))
        .otherwise(pl.col("type").replace_strict(_TYPES, default=pl.format("type {}", "type"), return_dtype=pl.String))
    )
    timed = (pl.col("start_us") > 0).any()
    collective_name = pl.col("comm_type").replace_strict(names, default="unknown", return_dtype=pl.String)
    return table.nodes.select(
        pl.col("id").cast(pl.Int64, strict=False),
        pl.lit(rank or 0, dtype=pl.Int64).alias("rank"),
        kind.alias("kind"),
        "name",
        (pl.col("duration_us").cast(pl.Int64, strict=False) * 1000).alias("time_ns"),
        pl.when(timed).then(pl.col("start_us").cast(pl.Int64, strict=False) * 1000).alias("start_ns"),
        pl.coalesce("comm_size", "tensor_size").alias("bytes"),
        pl.when(pl.col("type") == NodeType.COMM_COLL_NODE).then(collective_name).alias("what"),
        pl.col("pg_name").alias("group"),
    )


def row_of(network: NodeNetwork, identity: int, rank: int | None) -> list[int]:
    """Rows of the nodes with an id, on one rank or on all."""
    condition = pl.col("id") == identity
    if rank is not None:
        condition &= pl.col("rank") == rank
    rows: list[int] = network.nodes.with_row_index("row").filter(condition)["row"].to_list()
    return rows
