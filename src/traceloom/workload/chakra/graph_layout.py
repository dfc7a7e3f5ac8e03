"""The layout of a graph in `.et` files: names of attributes, metadata.

Nodes without duration and lane (origin, rendezvous, arrival) are not work, so they are not written
as nodes: a neighbor on the same rank carries them in an attribute. The edges of a node are in its
attribute `edges`, four numbers each (source, code, delay, residual); `ctrl_deps` and `data_deps`
express them for other tools as far as possible.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import polars as pl

from traceloom import __version__
from traceloom.errors import InputError, other_version
from traceloom.formats.chakra.decode import NodeColumns
from traceloom.formats.chakra.et_pb2 import (
    AttributeProto,
    CollectiveCommType,
    GlobalMetadata,
    NodeType,
)
from traceloom.formats.chakra.nodes import ADDED
from traceloom.graph.graph import (
    ARRIVAL,
    COLLECTIVE,
    COPY,
    EDGE_KINDS,
    EVIDENCE,
    FILL,
    GRAPH_SCHEMAS,
    ORIGIN,
    RECEIVE,
    RENDEZVOUS,
    SEND,
    Graph,
    Stage,
)
from traceloom.system.text import replace_json_surrogates
from traceloom.trace.notice import Notice

SCHEMA = "traceloom-graph"
SCHEMA_VERSION = 1
CHAKRA_VERSION = "1.0.0"

CARRIED = (ORIGIN, RENDEZVOUS, ARRIVAL)
CARRIED_COLUMNS = tuple(GRAPH_SCHEMAS["nodes"])

NODE_TYPES = {
    SEND: NodeType.COMM_SEND_NODE,
    RECEIVE: NodeType.COMM_RECV_NODE,
    COLLECTIVE: NodeType.COMM_COLL_NODE,
    COPY: NodeType.MEM_LOAD_NODE,
    FILL: NodeType.MEM_STORE_NODE,
}
COMMUNICATION_TYPES = (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE, NodeType.COMM_COLL_NODE)
STORES = ("DtoH",)  # copies that write to memory outside the device; all others load

COMM_TYPES = {
    "all_reduce": CollectiveCommType.ALL_REDUCE,
    "reduce": CollectiveCommType.REDUCE,
    "all_gather": CollectiveCommType.ALL_GATHER,
    "gather": CollectiveCommType.GATHER,
    "scatter": CollectiveCommType.SCATTER,
    "broadcast": CollectiveCommType.BROADCAST,
    "all_to_all": CollectiveCommType.ALL_TO_ALL,
    "reduce_scatter": CollectiveCommType.REDUCE_SCATTER,
    "barrier": CollectiveCommType.BARRIER,
}

# Attribute -> column of `nodes`, integers (`int64_val`).
NODE_NUMBERS = {
    "start_ns": "start_ns",
    "duration_ns": "duration_ns",
    "work_ns": "work_ns",
    "residual_ns": "residual_ns",
    "lane": "lane",
    "event": "event",
    "op": "op",
    "host_op": "host_op",
    "step": "step",
    "correlation": "correlation",
    "bytes": "bytes",
}
NODE_TEXTS = {"kind": "kind", "category": "category"}
COMMUNICATION_NUMBERS = {
    "comm_instance": "instance",
    "pg_size": "group_size",
    "comm_seq": "sequence",
    "in_bytes": "in_bytes",
    "out_bytes": "out_bytes",
    "peer": "peer",
    "tag": "tag",
}
COMMUNICATION_TEXTS = {"comm_kind": "kind", "pg_name": "group", "dtype": "element_type"}
COMMUNICATION_LISTS = {"pg_ranks": "ranks", "in_splits": "in_splits", "out_splits": "out_splits"}
TRANSFER_TEXTS = {
    "copy_kind": "kind",
    "source_memory": "source_memory",
    "target_memory": "target_memory",
}
HOST_NUMBERS = {
    "host_row": "row",
    "host_id": "id",
    "host_parent": "parent",
    "fw_parent": "forward_parent",
    "rf_id": "record_function_id",
    "seq_id": "sequence",
    "scope": "scope",
    "tid": "thread",
    "fw_tid": "forward_thread",
}
HOST_TEXTS = {"op_schema": "schema", "host_name": "name", "host_attributes": "attributes"}
HOST_INPUTS = ("inputs", "input_shapes", "input_types")
HOST_OUTPUTS = ("outputs", "output_shapes", "output_types")

EDGES, EDGES_OUT, CARRIED_NODES = "edges", "edges_out", "carried"
PER_EDGE = 4  # numbers of an edge in `edges`: source, code, delay, residual

# Attributes that other frames of the graph hold, on nodes of these types.
_COLLECTIVE, _MESSAGES = (NodeType.COMM_COLL_NODE,), COMMUNICATION_TYPES[:2]
_HELD_BY_TYPE: dict[str, Sequence[int]] = {
    "is_cpu_op": NodeType.values(),
    ADDED: NodeType.values(),
    "comm_type": _COLLECTIVE,
    "comm_size": COMMUNICATION_TYPES,
    "pg_name": COMMUNICATION_TYPES,
    **dict.fromkeys(("comm_src", "comm_dst", "comm_tag"), _MESSAGES),
    "tensor_size": (NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE),
}
FOREIGN_ID = "foreign_id"
ATTRIBUTES = tuple(
    dict.fromkeys(
        (
            *NODE_NUMBERS,
            *NODE_TEXTS,
            *COMMUNICATION_NUMBERS,
            *COMMUNICATION_TEXTS,
            *COMMUNICATION_LISTS,
            *TRANSFER_TEXTS,
            *HOST_NUMBERS,
            *HOST_TEXTS,
            EDGES,
            EDGES_OUT,
            CARRIED_NODES,
            *_HELD_BY_TYPE,
            "device",
            "stream",
            FOREIGN_ID,
        )
    )
)


def collect_others(columns: NodeColumns, names: Sequence[str], *, ours: bool) -> pl.Series:
    """Returns the tensors and attributes of each node that nothing but `Graph.foreign` holds.

    Args:
        columns: The nodes.
        names: The attributes that were decoded.
        ours: Whether the file was written from a graph.
    """
    held = np.full((len(names) + 2, len(columns)), ours)
    held[-2], held[-1] = columns.has(HOST_OP_MARKER) & ours, False
    for number, name in enumerate(names):
        if name in _HELD_BY_TYPE:
            held[number] = np.isin(columns.type, _HELD_BY_TYPE[name])
        elif name in HOST_NUMBERS or name in HOST_TEXTS:
            held[number] = held[-2]
        elif name == "stream":
            held[number] = (columns.numbers("is_cpu_op") != 1).fill_null(value=True).to_numpy()
    return columns.others(held)


# Attributes that mark a row of a side frame; without a value, the first column of the row is null.
COMMUNICATION_MARKER, TRANSFER_MARKER, HOST_OP_MARKER = "comm_kind", "copy_kind", "host_row"


_DAMAGE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
    msgspec.ValidationError,
    pl.exceptions.PolarsError,
)
_RANK_FRAMES = (
    "lanes",
    "ranks",
    "coverage",
)  # frames whose rows belong to one rank, or (rank null) to all


def build_metadata(
    graph: Graph, rank: int, loose_nodes: pl.DataFrame, loose_edges: pl.DataFrame
) -> GlobalMetadata:
    """Returns the metadata of the file of one rank.

    Args:
        graph: The graph.
        rank: The rank of the file.
        loose_nodes: Unwritten nodes that no written neighbor of the rank carries.
        loose_edges: Edges between unwritten nodes.
    """
    numbers = {
        "schema_version": SCHEMA_VERSION,
        "rank": rank,
        "epoch_ns": graph.epoch_ns,
        "node_count": graph.nodes.height,
        "host_op_count": graph.host_ops.height,
        **({} if graph.world_size is None else {"world_size": graph.world_size}),
    }
    in_rank = (pl.col("rank") == rank) | pl.col("rank").is_null()
    texts = {
        "schema": SCHEMA,
        "traceloom": __version__,
        "name": graph.name,
        "stage": graph.stage,
        "notices": json.dumps([asdict(notice) for notice in graph.notices]),
        "delays": _encode_rows(graph.delays),
        **{
            name: _encode_rows(getattr(graph, name).with_row_index("row").filter(in_rank))
            for name in _RANK_FRAMES
        },
        "loose_nodes": _encode_rows(loose_nodes),
        "loose_edges": _encode_rows(loose_edges),
    }
    message = GlobalMetadata(version=CHAKRA_VERSION)
    message.attr.extend(AttributeProto(name=name, string_val=text) for name, text in texts.items())
    message.attr.extend(
        AttributeProto(name=name, int64_val=number) for name, number in numbers.items()
    )
    # The meaning of the numbers in an edge's code
    for name, values in (("edge_kinds", EDGE_KINDS), ("evidence_kinds", EVIDENCE)):
        message.attr.add(name=name).string_list.values.extend(values)
    return message


def _encode_rows(frame: pl.DataFrame) -> str:
    return json.dumps(frame.to_dicts())


def is_ours(metadata: GlobalMetadata) -> bool:
    """Returns whether the file was written from a Graph."""
    return any(
        attribute.name == "schema" and attribute.string_val == SCHEMA for attribute in metadata.attr
    )


class Header:
    """The decoded metadata of a file that was written from a Graph.

    Raises:
        InputError: `other-version`, `chakra-damaged`.
    """

    def __init__(self, metadata: GlobalMetadata, location: str) -> None:
        values: dict[str, Any] = {}
        for attribute in metadata.attr:
            kind = attribute.WhichOneof("value")
            values[attribute.name] = (
                list(attribute.string_list.values) if kind == "string_list" else None
            )
            if kind in {"int64_val", "string_val"}:
                values[attribute.name] = getattr(attribute, kind)
        if values.get("schema_version") != SCHEMA_VERSION:
            raise other_version("graph", values.get("schema_version"), SCHEMA_VERSION, location)
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
            self.notices = msgspec.convert(
                replace_json_surrogates(json.loads(values["notices"]))[0], tuple[Notice, ...]
            )
            self.frames = {name: _decode_rows(values[name], name, "row") for name in _RANK_FRAMES}
            self.frames["delays"] = _decode_rows(values["delays"], "delays")
            self.loose_nodes = _decode_rows(values["loose_nodes"], "nodes").select(CARRIED_COLUMNS)
            self.loose_edges = _decode_rows(values["loose_edges"], "edges")
        except _DAMAGE as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(
                f"its metadata is not that of a graph: {reason}",
                slug="chakra-damaged",
                where=location,
            ) from error


def _decode_rows(text: str, name: str, *extra_columns: str) -> pl.DataFrame:
    return pl.DataFrame(
        json.loads(text),
        schema=pl.Schema({**dict.fromkeys(extra_columns, pl.UInt32()), **GRAPH_SCHEMAS[name]}),
        orient="row",
    )
