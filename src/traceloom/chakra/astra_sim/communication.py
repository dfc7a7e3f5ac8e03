"""Communication as ASTRA-sim knows it: what stays, what is written as something else, among whom, how much."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.chakra.schema import CollectiveCommType, NodeType
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph

_KNOWN = {
    "all_reduce": CollectiveCommType.ALL_REDUCE,
    "all_gather": CollectiveCommType.ALL_GATHER,
    "reduce_scatter": CollectiveCommType.REDUCE_SCATTER,
    "all_to_all": CollectiveCommType.ALL_TO_ALL,
    "broadcast": CollectiveCommType.BROADCAST,
    # ASTRA-sim replays a broadcast at its recorded duration: the only stand-in for operations it does not have.
    "reduce": CollectiveCommType.BROADCAST,
    "gather": CollectiveCommType.BROADCAST,
    "scatter": CollectiveCommType.BROADCAST,
    # What NCCL does for a barrier.
    "barrier": CollectiveCommType.ALL_REDUCE,
}
REPLAYED = ("broadcast", "reduce", "gather", "scatter")
_BARRIER_BYTES_PER_RANK = 8
_MOST_TAG = 2**31 - 1

# Why a communication is replayed by its rank alone, at its recorded duration.
ALONE, UNKNOWN_KIND, UNKNOWN_SIZE, UNKNOWN_PEER = "alone", "unknown-kind", "unknown-size", "unknown-peer"


@dataclass(frozen=True)
class WrittenCommunication:
    """What is written for each communication node.

    Attributes:
        rows: `node`, `kind`, `instance`, `type` (of the node to write), `comm_type`, `comm_size`, `pg_name`,
            `comm_src`, `comm_dst`, `comm_tag`, `transfer_ns` (recorded duration once all had come), `met_ns` (when
            that was), `why` (null, or why the rank replays it alone), `uneven` (sizes of the ranks differ),
            `left_out` (peers that were not recorded).
        by_order: How many collectives of a graph whose ranks were not joined were joined here, by their order.
        groups: Members by name, ranks as they are numbered in the files.
    """

    rows: pl.DataFrame
    by_order: int
    groups: dict[str, list[int]]


def communication_of(graph: Graph, numbers: dict[int, int]) -> WrittenCommunication:
    """Map the communication of a graph.

    Args:
        graph: The joined graph.
        numbers: Rank in the graph -> number of its file.
    """
    rows, by_order = _joined(_timed(graph, numbers))
    together = pl.col("instance").is_not_null()
    rows = rows.with_columns(
        pl.when(together).then(pl.len().over("instance")).otherwise(1).alias("parts"),
        pl.when(together)
        .then(pl.col("number").sort().over("instance", mapping_strategy="join").cast(pl.List(pl.String)).list.join(","))
        .alias("members"),
        pl.when(together).then(pl.col("size").max().over("instance")).otherwise("size").alias("comm_size"),
        (together & (pl.col("size").n_unique().over("instance") > 1)).alias("uneven"),
    )
    pair = pl.col("node_kind").is_in([gs.SEND, gs.RECEIVE])
    barrier = pl.col("kind") == "barrier"
    why = (
        pl.when(pair & pl.col("peer_number").is_null())
        .then(pl.lit(UNKNOWN_PEER))
        .when(pair & (pl.col("comm_size").fill_null(0) <= 0))
        .then(pl.lit(UNKNOWN_SIZE))
        .when(pair)
        .then(None)
        .when(~pl.col("kind").fill_null("").is_in(list(_KNOWN)))
        .then(pl.lit(UNKNOWN_KIND))
        .when(pl.col("parts") < 2)
        .then(pl.lit(ALONE))
        .when((pl.col("comm_size").fill_null(0) <= 0) & ~barrier & ~pl.col("kind").is_in(REPLAYED))
        .then(pl.lit(UNKNOWN_SIZE))
    )
    rows = rows.with_columns(why.alias("why")).with_columns(
        pl.when(barrier).then(pl.col("parts") * _BARRIER_BYTES_PER_RANK).otherwise("comm_size").alias("comm_size")
    )
    fine = pl.col("why").is_null()
    rows = rows.with_columns(
        pl.when(fine).then("members").otherwise(pl.col("number").cast(pl.String)).alias("members"),
        pl.when(fine).then("parts").otherwise(1).alias("parts"),
    )
    # Members, as text -> a number, in the order of their first operation; all ranks need none.
    lone = pl.col("why").is_not_null() & (len(numbers) > 1)
    sets = (
        rows.filter(~(pair & fine) & ((pl.col("parts") < len(numbers)) | lone))
        .sort("met_ns", "node")["members"]
        .unique(maintain_order=True)
    )
    groups = {members: str(number) for number, members in enumerate(sets.drop_nulls(), start=1)}
    members = {name: [int(member) for member in member_text.split(",")] for member_text, name in groups.items()}
    return WrittenCommunication(_written(rows, groups), by_order, members)


def _timed(graph: Graph, numbers: dict[int, int]) -> pl.DataFrame:
    """The communication with its bytes, its own and its peer's number, and when all had come."""
    nodes = graph.nodes.select(
        "node",
        pl.col("kind").cast(pl.String).alias("node_kind"),
        "bytes",
        pl.col("rank").cast(pl.Int64),
        "start_ns",
        (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"),
    )
    meeting = nodes.filter(pl.col("node_kind") == gs.RENDEZVOUS).select(meeting="node", met="start_ns")
    into = graph.edges.filter(pl.col("to_end")).select(meeting="source", node="target")
    met = into.join(meeting, on="meeting").group_by("node").agg(pl.col("met").max())
    rows = (
        graph.communication.select(
            "node", "instance", "kind", "group", "group_size", "in_bytes", "out_bytes", "peer", "tag"
        )
        .join(nodes, on="node", how="left", maintain_order="left")
        .join(met, on="node", how="left", maintain_order="left")
    )
    number = {"old": list(numbers), "new": list(numbers.values())}
    renamed = pl.DataFrame(number, schema={"old": pl.Int64, "new": pl.Int64})
    # Bytes with ASTRA-sim's meaning: what a rank puts in, of all_gather its own part.
    kind, out, ranks = pl.col("kind"), pl.col("out_bytes"), pl.col("group_size").cast(pl.Int64)
    scaled = pl.when(kind == "all_gather").then(out // ranks).when(kind == "reduce_scatter").then(out * ranks)
    from_out = scaled.otherwise(out)
    put_in = pl.when(pl.col("node_kind") == gs.RECEIVE).then(None).otherwise("in_bytes")
    size = pl.coalesce(pl.when(put_in > 0).then(put_in), pl.when(from_out > 0).then(from_out), "bytes")
    begun = pl.max_horizontal("start_ns", pl.min_horizontal(pl.col("met"), "end_ns"))
    return (
        rows.with_columns(pl.col("peer").cast(pl.Int64))
        .join(renamed.rename({"old": "rank", "new": "number"}), on="rank", how="left", maintain_order="left")
        .join(renamed.rename({"old": "peer", "new": "peer_number"}), on="peer", how="left", maintain_order="left")
        .with_columns(begun.alias("met_ns"), (pl.col("end_ns") - begun).alias("transfer_ns"), size.alias("size"))
    )


def _joined(rows: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Joins the k-th collectives of a group across ranks, in graphs of several ranks where nothing is joined.

    Such graphs are read from files of other writers. Groups whose ranks differ in number or kinds stay as they are.
    """
    collective = rows.filter(~pl.col("node_kind").is_in([gs.SEND, gs.RECEIVE]) & pl.col("kind").is_not_null())
    if rows["instance"].count() or collective["rank"].n_unique() < 2:
        return rows, 0
    turn = (
        collective.sort("start_ns", "node")
        .with_columns(pl.col("group").fill_null("").alias("name"))
        .with_columns(pl.int_range(pl.len()).over("name", "rank").alias("turn"))
        .with_columns(
            pl.len().over("name", "turn").alias("came"),
            pl.col("rank").n_unique().over("name").alias("members"),
            pl.col("kind").n_unique().over("name", "turn").alias("kinds"),
        )
        .filter(((pl.col("came") == pl.col("members")) & (pl.col("kinds") == 1)).all().over("name"))
        .filter(pl.col("members") > 1)
        .with_columns(
            pl.struct("name", "turn").rank("dense").cast(pl.Int64).alias("order"),
            pl.col("start_ns").max().over("name", "turn").alias("last"),
        )
    )
    joined = rows.join(turn.select("node", "order", "last"), on="node", how="left", maintain_order="left")
    numbered = joined.with_columns(
        pl.coalesce("instance", "order").alias("instance"), pl.coalesce("last", "met_ns").alias("met_ns")
    )
    return numbered.drop("order", "last"), turn["order"].n_unique()


def _written(rows: pl.DataFrame, groups: dict[str, str]) -> pl.DataFrame:
    """The attributes of the nodes."""
    send, receive = pl.col("node_kind") == gs.SEND, pl.col("node_kind") == gs.RECEIVE
    fine = pl.col("why").is_null()
    names = pl.DataFrame(
        {"members": list(groups), "pg_name": list(groups.values())},
        schema={"members": pl.String, "pg_name": pl.String},
    )
    pair = fine & (send | receive)
    tag = pl.when(pl.col("tag").is_between(0, _MOST_TAG)).then("tag").otherwise(0)
    numbers = {name: int(number) for name, number in _KNOWN.items()}
    comm_type = pl.col("kind").replace_strict(numbers, default=None, return_dtype=pl.Int64)
    return rows.join(names, on="members", how="left", maintain_order="left").select(
        "node",
        "kind",
        "instance",
        "why",
        "met_ns",
        "transfer_ns",
        (fine & pl.col("uneven")).alias("uneven"),
        (fine & ~pair & (pl.col("group_size").fill_null(0) > pl.col("parts"))).alias("left_out"),
        pl.when(fine & send)
        .then(int(NodeType.COMM_SEND_NODE))
        .when(fine & receive)
        .then(int(NodeType.COMM_RECV_NODE))
        .otherwise(int(NodeType.COMM_COLL_NODE))
        .alias("type"),
        pl.when(~pair)
        .then(pl.when(fine).then(comm_type).otherwise(int(CollectiveCommType.BROADCAST)))
        .alias("comm_type"),
        pl.max_horizontal(pl.col("comm_size").fill_null(1), 1).alias("comm_size"),
        pl.when(~pair).then("pg_name").alias("pg_name"),
        pl.when(pair).then(pl.when(send).then("number").otherwise("peer_number")).alias("comm_src"),
        pl.when(pair).then(pl.when(send).then("peer_number").otherwise("number")).alias("comm_dst"),
        pl.when(pair).then(tag).alias("comm_tag"),
    )
