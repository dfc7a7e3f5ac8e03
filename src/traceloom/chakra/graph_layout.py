"""How a Graph lies in `.et` files: which node types, which attributes, which words. Both directions follow this.

Nodes that take no time and belong to no lane (origin, rendezvous, arrival) are no work, so they are not written as
nodes: a neighbour on the same rank carries them in an attribute. The edges of a node are in its attribute `edges`, four
numbers each (source, code, delay, residual); `ctrl_deps` and `data_deps` tell other tools as much of it as they can.
"""

from __future__ import annotations

import polars as pl

from traceloom.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.model.graph_schema import (
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
)

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

# Attribute -> column of `nodes`, whole numbers (`int64_val`).
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
TRANSFER_TEXTS = {"copy_kind": "kind", "source_memory": "source_memory", "target_memory": "target_memory"}
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

# Which attributes mean a row of a side frame; an attribute without a value stands for a row whose first column is null.
ROW_OF_COMMUNICATION, ROW_OF_TRANSFER, ROW_OF_HOST_OP = "comm_kind", "copy_kind", "host_row"


def edge_code(edges: pl.DataFrame) -> pl.Series:
    """Kind, evidence and ends of each edge as one number: kind * 16 + evidence * 4 + from_end * 2 + to_end."""
    return edges.select(
        pl.col("kind").to_physical().cast(pl.Int64) * 16
        + pl.col("evidence").to_physical().cast(pl.Int64) * 4
        + pl.col("from_end").cast(pl.Int64) * 2
        + pl.col("to_end").cast(pl.Int64)
    ).to_series()


def words() -> dict[str, list[str]]:
    """What the numbers in an edge's code stand for, as the metadata says it."""
    return {"edge_kinds": list(EDGE_KINDS), "evidence_kinds": list(EVIDENCE)}
