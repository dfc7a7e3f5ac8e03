"""`.et` to Graph, for files that a Graph was written to: everything comes back from the attributes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.array_types import Ints
from traceloom.chakra import graph_layout as layout
from traceloom.chakra.columns import Decoder, NodeColumns
from traceloom.chakra.framing import Block
from traceloom.chakra.graph_metadata import Header
from traceloom.errors import InputError
from traceloom.model.frames import schema
from traceloom.model.graph import Graph
from traceloom.model.graph_schema import GRAPH_SCHEMAS
from traceloom.model.notice import Notice

ATTRIBUTES = (
    *layout.NODE_NUMBERS,
    *layout.NODE_TEXTS,
    *layout.COMMUNICATION_NUMBERS,
    *layout.COMMUNICATION_TEXTS,
    *layout.COMMUNICATION_LISTS,
    *layout.TRANSFER_TEXTS,
    *layout.HOST_NUMBERS,
    *layout.HOST_TEXTS,
    layout.EDGES,
    layout.EDGES_OUT,
    layout.CARRIED_NODES,
)
_WIDE_EDGES = schema("source target code delay_ns residual_ns", {"source": pl.Int64, "target": pl.Int64})
_HOST_OPS = schema("row", GRAPH_SCHEMAS["host_ops"])


@dataclass(frozen=True)
class GraphPart:
    """What one file holds, with the ids of the whole graph."""

    header: Header
    nodes: pl.DataFrame
    carried: pl.DataFrame
    edges: pl.DataFrame
    communication: pl.DataFrame
    transfers: pl.DataFrame
    host_ops: pl.DataFrame


def part(header: Header, blocks: Iterable[Block], where: str) -> GraphPart:
    """Decode one file.

    Raises:
        InputError: `chakra-damaged`.
    """
    collected: dict[str, list[pl.DataFrame]] = {name: [] for name in GraphPart.__annotations__ if name != "header"}
    try:
        for columns in Decoder(ATTRIBUTES, where).columns(blocks):
            for name, frame in _frames(columns, header).items():
                collected[name].append(frame)
        more = {"carried": GRAPH_SCHEMAS["nodes"], "edges": _WIDE_EDGES, "host_ops": _HOST_OPS}
        empty = GRAPH_SCHEMAS | more
        return GraphPart(
            header,
            **{name: pl.concat([pl.DataFrame(schema=empty[name]), *frames]) for name, frames in collected.items()},
        )
    except (pl.exceptions.PolarsError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        message = f"its nodes are not those of a graph: {str(error).splitlines()[0]}"
        raise InputError(message, slug="chakra-damaged", where=where) from error


def _frames(columns: NodeColumns, header: Header) -> dict[str, pl.DataFrame]:
    """What a block holds, by the fields of `GraphPart`."""
    nodes = (
        pl.DataFrame({"node": columns.id, "name": columns.names})
        .with_columns(_attributes(columns, layout.NODE_NUMBERS, layout.NODE_TEXTS), rank=pl.lit(header.rank))
        .with_columns(pl.col("work_ns").fill_null(pl.col("duration_ns")), pl.col("residual_ns").fill_null(0))
        .select(GRAPH_SCHEMAS["nodes"].names())
        .cast(GRAPH_SCHEMAS["nodes"])
        .filter(pl.Series(columns.id < header.node_count))
    )
    if missing := next((name for name in ("kind", "start_ns", "duration_ns") if nodes[name].null_count()), None):
        raise ValueError(f"one has no `{missing}`")
    carried_texts = columns.strings(layout.CARRIED_NODES).drop_nulls().to_list()
    carried = [row for text in carried_texts for row in json.loads(text)]
    edges = []
    for name, own_end, other_end in ((layout.EDGES, "target", "source"), (layout.EDGES_OUT, "source", "target")):
        lists = columns.lists(name, "sint64_list")
        numbers = lists.values.reshape(-1, layout.PER_EDGE)
        values = {
            other_end: numbers[:, 0],
            "code": numbers[:, 1],
            "delay_ns": numbers[:, 2],
            "residual_ns": numbers[:, 3],
            own_end: np.repeat(columns.id[lists.row], lists.count // layout.PER_EDGE),
        }
        edges.append(pl.DataFrame(values, schema=_WIDE_EDGES))
    frames = {
        "nodes": nodes,
        "carried": pl.DataFrame(carried, schema=GRAPH_SCHEMAS["nodes"], orient="row"),
        "edges": pl.concat(edges),
    }
    for name, row_of, numbers_of, texts_of, lists_of in (
        (
            "communication", layout.ROW_OF_COMMUNICATION, layout.COMMUNICATION_NUMBERS, layout.COMMUNICATION_TEXTS,
            layout.COMMUNICATION_LISTS,
        ),
        ("transfers", layout.ROW_OF_TRANSFER, {}, layout.TRANSFER_TEXTS, {}),
    ):  # fmt: skip
        schema, present = GRAPH_SCHEMAS[name], columns.has(row_of)
        frames[name] = pl.DataFrame(schema=schema)
        if present.any():
            frame = pl.DataFrame({"node": columns.id}).with_columns(_attributes(columns, numbers_of, texts_of))
            for key, column in lists_of.items():
                lists = columns.lists(key, "int64_list")
                ends = np.cumsum(lists.count)
                of_nodes: list[list[int] | None] = [None] * len(columns)
                whole = lists.values.tolist()
                for row, end, count in zip(lists.row.tolist(), ends.tolist(), lists.count.tolist(), strict=True):
                    of_nodes[row] = whole[end - count : end]
                frame = frame.with_columns(pl.Series(column, of_nodes, dtype=pl.List(pl.Int64)))
            frames[name] = frame.filter(pl.Series(present)).select(schema.names()).cast(schema)
    texts: dict[str, list[str | None]] = {}
    for names, tensors in ((layout.HOST_INPUTS, columns.inputs), (layout.HOST_OUTPUTS, columns.outputs)):
        for name, number in zip(names, (1, 2, 3), strict=True):
            texts[name] = [None] * len(columns)
            for row, text in zip(tensors[number][0].tolist(), tensors[number][1], strict=True):
                texts[name][row] = text
    host_ops = pl.DataFrame(texts, schema=dict.fromkeys(texts, pl.String)).with_columns(
        _attributes(columns, layout.HOST_NUMBERS, layout.HOST_TEXTS), rank=pl.lit(header.rank, pl.Int32)
    )
    host_ops = host_ops.with_columns(pl.coalesce("name", pl.Series(columns.names)).alias("name"))
    host_ops = host_ops.filter(pl.Series(columns.has(layout.ROW_OF_HOST_OP)))
    return frames | {"host_ops": host_ops.select(_HOST_OPS.names()).cast(_HOST_OPS)}


def _attributes(columns: NodeColumns, numbers: dict[str, str], texts: dict[str, str]) -> list[pl.Series]:
    """Columns of whole numbers and of texts, each from the attribute that holds it."""
    return [columns.numbers(name).alias(column) for name, column in numbers.items()] + [
        columns.strings(name).alias(column) for name, column in texts.items()
    ]


def together(parts: Sequence[GraphPart], where: str) -> Graph:
    """The graph of all files. Where ranks are missing, rows are numbered anew and what points to them is left out.

    Raises:
        InputError: `chakra-mixed`: the files are of several graphs, or one is there twice; `chakra-damaged`.
    """
    heads = [part.header for part in parts]
    first = heads[0]
    for head in heads[1:]:
        if (head.epoch_ns, head.node_count, head.name) != (first.epoch_ns, first.node_count, first.name):
            raise _mixed(f"ranks {first.rank} and {head.rank} are of different graphs", where)
    if len({head.rank for head in heads}) < len(heads):
        raise _mixed("a rank is there twice", where)
    carried = pl.concat([part.carried for part in parts] + [head.loose_nodes for head in heads])
    nodes = pl.concat([*(part.nodes for part in parts), carried.unique("node", keep="first")]).sort("node")
    if nodes["node"].is_duplicated().any():
        raise _mixed("a node is there twice", where)
    lanes = pl.concat([head.frames["lanes"] for head in heads]).sort("lane")
    nodes = nodes.with_columns(lane=_renumbered(nodes["lane"], lanes["lane"]))
    ids = nodes["node"]
    schema = GRAPH_SCHEMAS["edges"]
    worded = []
    for part in parts:  # the code of an edge is kind, evidence and ends, as the header's words
        code = part.edges["code"]
        frame = part.edges.with_columns(
            kind=pl.Series(part.header.edge_kinds).gather(code // 16),
            evidence=pl.Series(part.header.evidence_kinds).gather(code // 4 % 4),
            from_end=code // 2 % 2 == 1,
            to_end=code % 2 == 1,
        )
        numbers = ("source", "target")  # they get their type with their new numbers
        worded.append(frame.select(schema.names()).cast({n: kind for n, kind in schema.items() if n not in numbers}))
    loose = [head.loose_edges.cast({"source": pl.Int64, "target": pl.Int64}) for head in heads]
    edges = pl.concat([*worded, *loose])
    edges = edges.with_columns(source=_renumbered(edges["source"], ids), target=_renumbered(edges["target"], ids))
    complete = edges.drop_nulls(["source", "target"])
    notices = first.notices
    if lost := edges.height - complete.height:
        message = f"{lost:,} edges lead to or from ranks that are not among the files, and are left out"
        notices = (*notices, Notice("chakra-missing-ranks", "warning", message, lost))
    beside = {name: pl.concat([getattr(part, name) for part in parts]) for name in ("communication", "transfers")}
    of_ranks = {name: pl.concat([head.frames[name] for head in heads]) for name in ("ranks", "coverage")}
    return Graph(
        nodes=nodes.with_columns(node=pl.int_range(pl.len())).cast(GRAPH_SCHEMAS["nodes"]),
        edges=complete.select(schema.names()).cast(schema).sort("target", maintain_order=True),
        lanes=lanes.drop("row").with_columns(lane=pl.int_range(pl.len())).cast(GRAPH_SCHEMAS["lanes"]),
        **{
            name: frame.with_columns(node=_renumbered(frame["node"], ids).cast(pl.UInt32)).sort("node")
            for name, frame in beside.items()
        },
        **{name: frame.unique("row", keep="first").sort("row").drop("row") for name, frame in of_ranks.items()},
        host_ops=pl.concat([part.host_ops for part in parts]).sort("row").drop("row"),
        delays=first.frames["delays"],
        name=first.name,
        epoch_ns=first.epoch_ns,
        world_size=first.world_size,
        stage=first.stage,
        notices=notices,
    )


def _renumbered(values: pl.Series, ids: pl.Series) -> pl.Series:
    """The row of each value in `ids` (ascending); null where it is not among them."""
    if ids.null_count():
        raise ValueError(f"a row has no {ids.name}")
    id_array = ids.to_numpy().astype(np.int64)
    queries = values.cast(pl.Int64).fill_null(-1).to_numpy()
    at: Ints = np.searchsorted(id_array, queries)
    matches = (
        (at < len(id_array)) & (id_array[np.minimum(at, len(id_array) - 1)] == queries) if len(id_array) else at < 0
    )
    return pl.Series(values.name, at).set(pl.Series(~matches), None)


def _mixed(why: str, where: str) -> InputError:
    return InputError(
        f"these files are not one graph: {why}", slug="chakra-mixed", where=where, hint="give the files of one graph"
    )
