"""The first message of a Graph's file: what the graph says beside its nodes, as attributes of the metadata."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import msgspec
import polars as pl

from traceloom import __version__
from traceloom.chakra.graph_layout import CARRIED_COLUMNS, CHAKRA_VERSION, SCHEMA, SCHEMA_VERSION, words
from traceloom.chakra.schema import AttributeProto, GlobalMetadata
from traceloom.errors import InputError, other_version
from traceloom.model.graph import Graph, Stage
from traceloom.model.graph_schema import GRAPH_SCHEMAS
from traceloom.model.notice import Notice
from traceloom.plain_text import clean_json

_DAMAGE = (
    LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, msgspec.ValidationError,
    pl.exceptions.PolarsError,
)  # fmt: skip
_OF_A_RANK = ("lanes", "ranks", "coverage")  # frames whose rows belong to one rank, or (rank null) to all


def metadata_of(graph: Graph, rank: int, loose_nodes: pl.DataFrame, loose_edges: pl.DataFrame) -> GlobalMetadata:
    """The metadata of the file of one rank.

    Args:
        graph: The graph.
        rank: The rank of the file.
        loose_nodes: Nodes that are not written and that no written neighbour of the rank carries.
        loose_edges: Edges between nodes that are not written.
    """
    numbers = {
        "schema_version": SCHEMA_VERSION,
        "rank": rank,
        "epoch_ns": graph.epoch_ns,
        "node_count": graph.nodes.height,
        "host_op_count": graph.host_ops.height,
        **({} if graph.world_size is None else {"world_size": graph.world_size}),
    }
    of_rank = (pl.col("rank") == rank) | pl.col("rank").is_null()
    texts = {
        "schema": SCHEMA,
        "traceloom": __version__,
        "name": graph.name,
        "stage": graph.stage,
        "notices": json.dumps([asdict(notice) for notice in graph.notices]),
        "delays": _rows(graph.delays),
        **{name: _rows(getattr(graph, name).with_row_index("row").filter(of_rank)) for name in _OF_A_RANK},
        "loose_nodes": _rows(loose_nodes),
        "loose_edges": _rows(loose_edges),
    }
    message = GlobalMetadata(version=CHAKRA_VERSION)
    message.attr.extend(AttributeProto(name=name, string_val=text) for name, text in texts.items())
    message.attr.extend(AttributeProto(name=name, int64_val=number) for name, number in numbers.items())
    for name, values in words().items():
        message.attr.add(name=name).string_list.values.extend(values)
    return message


def _rows(frame: pl.DataFrame) -> str:
    return json.dumps(frame.to_dicts())


def is_ours(metadata: GlobalMetadata) -> bool:
    """Whether the file is one that a Graph was written to."""
    return any(attribute.name == "schema" and attribute.string_val == SCHEMA for attribute in metadata.attr)


class Header:
    """The metadata of a file that a Graph was written to, decoded.

    Raises:
        InputError: `other-version`, `chakra-damaged`.
    """

    def __init__(self, metadata: GlobalMetadata, where: str) -> None:
        values: dict[str, Any] = {}
        for attribute in metadata.attr:
            kind = attribute.WhichOneof("value")
            values[attribute.name] = list(attribute.string_list.values) if kind == "string_list" else None
            if kind in {"int64_val", "string_val"}:
                values[attribute.name] = getattr(attribute, kind)
        if values.get("schema_version") != SCHEMA_VERSION:
            raise other_version("graph", values.get("schema_version"), SCHEMA_VERSION, where)
        try:
            self.rank = int(values["rank"])
            self.name = msgspec.convert(values["name"], str)
            self.epoch_ns = int(values["epoch_ns"])
            self.world_size = msgspec.convert(values.get("world_size"), int | None)
            self.stage = msgspec.convert(values["stage"], Stage)
            self.node_count = int(values["node_count"])
            self.host_op_count = int(values["host_op_count"])
            self.edge_kinds = msgspec.convert(values["edge_kinds"], list[str])
            self.evidence_kinds = msgspec.convert(values["evidence_kinds"], list[str])
            self.notices = msgspec.convert(clean_json(json.loads(values["notices"]))[0], tuple[Notice, ...])
            self.frames = {name: _frame(values[name], name, "row") for name in _OF_A_RANK}
            self.frames["delays"] = _frame(values["delays"], "delays")
            self.loose_nodes = _frame(values["loose_nodes"], "nodes").select(CARRIED_COLUMNS)
            self.loose_edges = _frame(values["loose_edges"], "edges")
        except _DAMAGE as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            message = f"its metadata is not that of a graph: {reason}"
            raise InputError(message, slug="chakra-damaged", where=where) from error


def _frame(text: str, name: str, *more: str) -> pl.DataFrame:
    schema = pl.Schema({**dict.fromkeys(more, pl.UInt32()), **GRAPH_SCHEMAS[name]})
    return pl.DataFrame(json.loads(text), schema=schema, orient="row")
