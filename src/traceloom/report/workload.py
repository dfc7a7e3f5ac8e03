"""Summarizes a graph or a set of Chakra files, or one of its nodes (`traceloom show`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from rich.text import Text

from traceloom.errors import InputError
from traceloom.formats.chakra.decode import Decoder
from traceloom.formats.chakra.et_pb2 import AttributeProto, CollectiveCommType, Node, NodeType
from traceloom.formats.chakra.files import EtReader
from traceloom.formats.chakra.nodes import NodeFrame, Workload
from traceloom.graph.graph import Graph
from traceloom.report.document import Cells, Col, ReportOptions, Table
from traceloom.report.labels import fit_name
from traceloom.report.views.terminal import render_declared_table
from traceloom.report.views.terminal_findings import render_notice_lines
from traceloom.report.views.terminal_table import DIM_STYLE, render_heading, render_paragraph
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import to_rows
from traceloom.trace.notice import Notice
from traceloom.workload.chakra.check_files import resolve

if TYPE_CHECKING:
    from traceloom.report.documents.graph import (
        NeighbourRow,
        NodeDocument,
        ShownNodeValue,
        WorkloadRankRow,
        WorkloadSummaryDocument,
    )


_MAX_TEXT_CHARS = 400
_MAX_VALUES = 12


def read_attributes(path: Path, identity: int) -> list[tuple[str, str]]:
    """Returns every attribute and tensor list of the node with an id: (name, value as text); empty
    if there is no such node.
    """
    node = _find(path, identity)
    if node is None:
        return []
    attributes = [(attribute.name, _format_attribute(attribute)) for attribute in node.attr]
    for name, tensors in (("inputs", node.inputs), ("outputs", node.outputs)):
        attributes += [
            (f"{name}.{part}", _cut(getattr(tensors, part)))
            for part in ("values", "shapes", "types")
            if getattr(tensors, part)
        ]
    return attributes


def _find(path: Path, identity: int) -> Node | None:
    """Returns the decoded node; of the others only the ids are read."""
    with EtReader(path) as reader:
        decoder = Decoder(["is_cpu_op"], str(path))
        try:
            for block in reader.blocks():
                matches = (next(decoder.columns([block])).id == identity).nonzero()[0]
                if len(matches):
                    row = int(matches[0])
                    return Node.FromString(block.data[block.starts[row] : block.stops[row]])
        except InputError:
            return None  # the file is damaged there, which the summary reports
    return None


def _format_attribute(attribute: AttributeProto) -> str:
    kind = attribute.WhichOneof("value")
    if kind is None:
        return "(no value)"
    value: Any = getattr(attribute, kind)
    if kind.endswith("_list"):
        values = value.values
        others_note = f", … {len(values) - _MAX_VALUES} more" if len(values) > _MAX_VALUES else ""
        return _cut(
            "[" + ", ".join(str(element) for element in values[:_MAX_VALUES]) + others_note + "]"
        )
    return _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else text[: _MAX_TEXT_CHARS - 1] + "…"


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
    """Nodes and their dependencies.

    Attributes:
        name: The name that the user gave.
        form: `graph` or `chakra`.
        nodes: `id` (as the user knows it: in the file, or row of the graph), `rank`, `kind`,
            `name`, `time_ns`, `start_ns` (null where the file has no times), `bytes` (of
            communication and copies); rows are nodes.
        edges: `source`, `target` (rows), `kind`, `evidence` (null in Chakra files).
        communication: `node` (row), `what` (all_reduce, ...), `group`.
        dangling: Dependencies on nodes that do not exist.
        facts: Further sentences for the head.
        notices: Problems of the files.
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


def convert_graph(graph: Graph) -> NodeNetwork:
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
    return NodeNetwork(
        graph.name,
        "graph",
        nodes,
        edges,
        communication,
        facts=(graph.stage,),
        notices=graph.notices,
    )


def convert_workload(workload: Workload) -> NodeNetwork:
    """Converts Chakra files of all ranks; times are whole microseconds, as in the files."""
    first = np.cumsum([0, *(len(table) for table in workload.tables)])
    nodes, edges, dangling = [], [], 0
    for offset, rank, table in zip(first.tolist(), workload.ranks, workload.tables, strict=False):
        nodes.append(_build_nodes(table, rank))
        resolved = resolve(table)
        dangling += len(resolved.dangling[0]) + len(resolved.dangling_control[0])
        for kind, arcs in (("data", resolved.data), ("control", resolved.control)):
            edges.append(
                pl.DataFrame(
                    {"source": arcs.source + offset, "target": arcs.target + offset}
                ).with_columns(
                    pl.lit(kind).alias("kind"), pl.lit(None, dtype=pl.String).alias("evidence")
                )
            )
    all_nodes = pl.concat(nodes)
    return NodeNetwork(
        workload.place.name,
        "chakra",
        all_nodes.drop("what", "group"),
        pl.concat(edges),
        all_nodes.with_row_index("node")
        .filter(pl.col("kind").is_in(COMMUNICATION))
        .select(pl.col("node").cast(pl.Int64), pl.coalesce("what", "kind").alias("what"), "group"),
        dangling,
        notices=tuple(notice for table in workload.tables for notice in table.notices),
        details={
            rank or 0: Path(table.path)
            for rank, table in zip(workload.ranks, workload.tables, strict=True)
        },
    )


def _build_nodes(table: NodeFrame, rank: int | None) -> pl.DataFrame:
    names = {CollectiveCommType.Value(name): name.lower() for name in CollectiveCommType.keys()}  # noqa: SIM118
    return table.nodes.select(
        pl.col("id").cast(pl.Int64, strict=False),
        pl.lit(rank or 0, dtype=pl.Int64).alias("rank"),
        pl.when(pl.col("type") == NodeType.COMP_NODE)
        .then(
            pl.when(pl.col("is_cpu_op").fill_null(value=False))
            .then(pl.lit("host"))
            .otherwise(pl.lit("compute"))
        )
        .otherwise(
            pl.col("type").replace_strict(
                _TYPES, default=pl.format("type {}", "type"), return_dtype=pl.String
            )
        )
        .alias("kind"),
        "name",
        (pl.col("duration_us").cast(pl.Int64, strict=False) * 1000).alias("time_ns"),
        pl.when((pl.col("start_us") > 0).any())
        .then(pl.col("start_us").cast(pl.Int64, strict=False) * 1000)
        .alias("start_ns"),
        pl.coalesce("comm_size", "tensor_size").alias("bytes"),
        pl.when(pl.col("type") == NodeType.COMM_COLL_NODE)
        .then(pl.col("comm_type").replace_strict(names, default="unknown", return_dtype=pl.String))
        .alias("what"),
        pl.col("pg_name").alias("group"),
    )


def find_rows(network: NodeNetwork, identity: int, rank: int | None) -> list[int]:
    """Returns rows of the nodes with an id, on one rank or on all."""
    condition = pl.col("id") == identity
    if rank is not None:
        condition &= pl.col("rank") == rank
    rows: list[int] = network.nodes.with_row_index("row").filter(condition)["row"].to_list()
    return rows


_MAX_NAMES = 12
_KNOWN_BYTES = pl.when(pl.col("bytes").count() > 0).then(pl.col("bytes").sum()).alias("bytes")


def summarise(network: NodeNetwork) -> WorkloadSummaryDocument:
    """Builds the document that `traceloom show --json` prints.

    Times are sums over nodes, ns; `window_ns` is from the first start to the last end, null where
    there are no times.
    """
    nodes, edges = network.nodes, network.edges
    timed_nodes = nodes.filter(pl.col("start_ns").is_not_null())
    window = None
    if timed_nodes.height:
        end_ns = (timed_nodes["start_ns"] + timed_nodes["time_ns"]).max()
        window = int(end_ns) - int(timed_nodes["start_ns"].min())  # type: ignore[arg-type]
    communication = (
        network.communication.join(nodes.with_row_index("node").cast({"node": pl.Int64}), on="node")
        .group_by("what", "group")
        .agg(
            pl.len().alias("count"),
            pl.col("rank").n_unique().alias("ranks"),
            _KNOWN_BYTES,
            pl.col("time_ns").sum(),
        )
        .sort(
            "bytes",
            "count",
            "what",
            "group",
            descending=[True, True, False, False],
            nulls_last=True,
        )
    )
    return {
        "format": "traceloom-workload-summary",
        "version": 1,
        "name": network.name,
        "form": network.form,
        "facts": list(network.facts),
        "nodes": nodes.height,
        "edges": edges.height,
        "dangling": network.dangling,
        "first_nodes": nodes.height - edges["target"].n_unique(),
        "last_nodes": nodes.height - edges["source"].n_unique(),
        "window_ns": window,
        "ranks": _summarise_ranks(network),
        "kinds": to_rows(_sum_nodes(nodes, ["kind"])),
        "communication": to_rows(communication),
        "dependencies": to_rows(
            edges.group_by("kind", "evidence")
            .agg(pl.len().alias("count"))
            .sort("count", "kind", "evidence", descending=[True, False, False])
        ),
        "names": to_rows(_sum_nodes(nodes, ["kind", "name"]).head(_MAX_NAMES)),
        "notices": [notice.to_dict() for notice in network.notices],
    }


def _sum_nodes(nodes: pl.DataFrame, group_columns: list[str]) -> pl.DataFrame:
    return (
        nodes.group_by(group_columns)
        .agg(
            pl.len().alias("count"),
            pl.col("time_ns").sum(),
            pl.col("time_ns").max().alias("longest_ns"),
            _KNOWN_BYTES,
        )
        .sort(
            "time_ns",
            "count",
            *group_columns,
            descending=[True, True, *(False for _ in group_columns)],
        )
    )


def _summarise_ranks(network: NodeNetwork) -> list[WorkloadRankRow]:
    sent = pl.col("bytes").filter(pl.col("kind").is_in(["collective", "send"]))
    waiting = network.edges.group_by(pl.col("target").alias("row")).agg(pl.len().alias("waits"))
    nodes = network.nodes.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    return to_rows(
        nodes.filter(pl.col("rank").is_not_null())
        .join(waiting, on="row", how="left")
        .group_by("rank")
        .agg(
            pl.len().alias("nodes"),
            pl.col("waits").sum().alias("edges"),
            pl.col("time_ns")
            .filter(pl.col("kind").is_in(["compute", "kernel"]))
            .sum()
            .alias("compute_ns"),
            # a rank that sends nothing sends 0; for messages without sizes it is unknown
            pl.when((sent.count() > 0) | (sent.len() == 0)).then(sent.sum()).alias("sent_bytes"),
            pl.col("start_ns").min(),
            (pl.col("start_ns") + pl.col("time_ns")).max().alias("end_ns"),
        )
        .sort("rank")
    )


def build_node_document(network: NodeNetwork, row: int) -> NodeDocument:
    """Builds the document of one node, its predecessors, its successors, and further attributes
    from its file.
    """
    node: ShownNodeValue = to_rows(network.nodes[[row]])[0]
    for communication in to_rows(
        network.communication.filter(pl.col("node") == row).select("what", "group").head(1)
    ):
        node |= communication
    path = None if node["rank"] is None else network.details.get(node["rank"])
    return {
        "format": "traceloom-node",
        "version": 1,
        "node": node,
        "before": _list_neighbours(network, row, "target", "source"),
        "after": _list_neighbours(network, row, "source", "target"),
        "attributes": {}
        if path is None or node["id"] is None
        else dict(read_attributes(path, node["id"])),
    }


def _list_neighbours(
    network: NodeNetwork, row: int, own_column: str, other: str
) -> list[NeighbourRow]:
    edges = network.edges.filter(pl.col(own_column) == row)
    nodes = network.nodes[edges[other]].with_columns(edges["kind"].alias("edge"), edges["evidence"])
    return to_rows(nodes.sort("rank", "id"))


_MAX_ROWS = 40  # of a table


def render(summary: WorkloadSummaryDocument, width: int) -> Iterator[Text]:
    facts = [
        "graph" if summary["form"] == "graph" else "Chakra",
        *summary["facts"],
        units.format_quantity(len(summary["ranks"]), "rank"),
        f"{units.format_quantity(summary['nodes'], 'node')}",
        units.format_quantity(summary["edges"], "dependency"),
    ]
    facts += (
        [units.format_duration(summary["window_ns"])]
        if summary["window_ns"] is not None
        else ["no times of day"]
    )
    text = " · ".join(facts)
    yield Text.assemble(
        (fit_name(summary["name"], max(width - len(text) - 3, 16)), "bold"),
        (f"  {text}", DIM_STYLE),
    )
    first, last = summary["first_nodes"], summary["last_nodes"]
    text = f"{units.format_count(first)} node{' waits' if first == 1 else 's wait'} for nothing, "
    text += f"nothing waits for {units.format_count(last)}"
    if dangling := summary["dangling"]:
        text += f"; {units.format_quantity(dangling, 'dependency')} lead{'s' if dangling == 1 else ''} nowhere"
    yield Text(" " + text, DIM_STYLE)
    for table in _build_tables(summary):
        yield from render_declared_table(table, ReportOptions(top=_MAX_ROWS), width)
    yield from render_notice_lines(
        [(row["severity"], f"{row['message']} [{row['slug']}]") for row in summary["notices"]],
        width,
    )


def _build_tables(summary: WorkloadSummaryDocument) -> Iterator[Table]:
    """Yields nodes by kind and by name, communication, dependencies, ranks."""
    base_columns = [
        Col("count", "Count", "count"),
        Col("time_ns", "Time", "time"),
        Col("longest_ns", "Longest", "time"),
        Col("bytes", "Bytes", "bytes"),
    ]
    yield Table(
        "kinds",
        "Nodes",
        [*base_columns, Col("kind", "Kind", "name")],
        summary["kinds"],
        note="by kind",
    )
    name_rows: list[Cells] = [
        {**row, "name": row["name"] or "(no name)"} for row in summary["names"]
    ]
    columns = [*base_columns, Col("kind", "Kind"), Col("name", "Name", "name")]
    yield Table("names", "Names", columns, name_rows, note="the most time")
    columns = [
        *base_columns[:2],
        base_columns[3],
        Col("ranks", "Ranks", "count"),
        Col("group", "Group"),
        Col("what", "What", "name"),
    ]
    yield Table(
        "communication",
        "Communication",
        columns,
        summary["communication"],
        note="by kind and group",
    )
    evidence = any(row["evidence"] for row in summary["dependencies"])
    columns = [
        base_columns[0],
        *([Col("evidence", "Evidence")] if evidence else []),
        Col("kind", "Kind", "name"),
    ]
    note = "by kind" + (" and evidence" if evidence else "")
    yield Table("dependencies", "Dependencies", columns, summary["dependencies"], note=note)
    if len(summary["ranks"]) > 1:
        columns = [
            Col("rank", "Rank", "count"),
            Col("nodes", "Nodes", "count"),
            Col("edges", "Dependencies", "count"),
            Col("compute_ns", "Compute", "time"),
            Col("sent_bytes", "Sent", "bytes"),
        ]
        yield Table("ranks", "Ranks", columns, summary["ranks"])


def render_node(document: NodeDocument, width: int) -> Iterator[Text]:
    """Yields one node: its facts, its attributes, and its neighbours."""
    node = document["node"]
    yield Text.assemble(
        (fit_name(node["name"] or "(no name)", width - 24), "bold"),
        (f"  node {node['id']}", DIM_STYLE),
    )
    facts = [node["kind"], *([f"rank {node['rank']}"] if node["rank"] is not None else [])]
    facts += [description] if (description := node.get("what")) else []
    facts += [f"group {group}"] if (group := node.get("group")) else []
    facts += [units.format_duration(node["time_ns"])]
    facts += (
        [f"starts at {units.format_duration(node['start_ns'])}"]
        if node["start_ns"] is not None
        else []
    )
    facts += [units.format_size(node["bytes"])] if node["bytes"] is not None else []
    yield from render_paragraph(" · ".join(facts), width)
    for name, value in document["attributes"].items():
        yield Text.assemble(
            " ", (sanitize(name), DIM_STYLE), " ", fit_name(value, max(width - len(name) - 3, 16))
        )
    for key, title, nodes in (
        ("before", "Waits for", document["before"]),
        ("after", "Is awaited by", document["after"]),
    ):
        rows: list[Cells] = [
            {
                **row,
                "node": f"{row['id']}"
                + (f" of rank {row['rank']}" if row["rank"] is not None else ""),
                "dependency": row["edge"] + (f", {row['evidence']}" if row["evidence"] else ""),
            }
            for row in nodes
        ]
        columns = [
            Col("node", "Node"),
            Col("dependency", "Dependency"),
            Col("kind", "Kind"),
            Col("time_ns", "Time", "time"),
            Col("name", "Name", "name"),
        ]
        if not rows:
            yield from render_heading(title, "nothing", width)
        yield from render_declared_table(
            Table(key, title, columns, rows), ReportOptions(top=_MAX_ROWS), width
        )
