"""The communications of a graph, one row each: who takes part, how many bytes, and which edges are the transfer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.collective.bandwidth import with_sizes
from traceloom.array_types import Ints
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import array, point_times

ROOTED = ("broadcast", "scatter", "reduce", "gather")


@dataclass(frozen=True, slots=True)
class Operations:
    """The communications in which parts meet; M of them, in the order of their meetings.

    Attributes:
        table: meeting (node), instance, kind (`send` for messages), group, group_size, members (ranks, the root or
            sender first; null where unknown), size_bytes and bus_factor as of `analyze.collective`, parts (recorded
            ones), splits (of an all_to_all that is not even: bytes from each member, row by row, to each).
        edge: Edges out of the meetings, to the end of a part each.
        of_edge: Row of `table` of each.
        part: Nodes of all parts.
        of_part: Row of `table` of each.
    """

    table: pl.DataFrame
    edge: Ints
    of_edge: Ints
    part: Ints
    of_part: Ints

    def __len__(self) -> int:
        return self.table.height


def operations(graph: Graph) -> Operations:
    """Find the communications of a graph that has its meetings."""
    kind = array(graph, graph.nodes["kind"])
    meeting = np.flatnonzero(kind == gs.NODE_KINDS.index(gs.RENDEZVOUS))
    number = np.full(graph.nodes.height, -1, dtype=np.int64)
    number[meeting] = np.arange(meeting.size)
    source, target = (array(graph, graph.edges[end]).astype(np.int64) for end in ("source", "target"))
    to_end = graph.edges["to_end"].to_numpy()
    edge = np.flatnonzero((number[source] >= 0) & to_end)
    communicates = np.isin(kind, [gs.NODE_KINDS.index(name) for name in gs.COMMUNICATION])
    into = np.flatnonzero((number[target] >= 0) & communicates[source])
    pairs = np.unique(
        np.concatenate([number[source[edge]], number[target[into]]]) * graph.nodes.height
        + np.concatenate([target[edge], source[into]])
    )
    of_part, part = np.divmod(pairs, max(graph.nodes.height, 1))
    return Operations(_table(graph, meeting, part, of_part), edge, number[source[edge]], part.astype(np.int64), of_part)


def _table(graph: Graph, meeting: Ints, part: Ints, of_part: Ints) -> pl.DataFrame:
    """See `Operations.table`."""
    about = pl.DataFrame({"row": of_part, "node": part.astype(np.uint32)}).join(
        graph.communication, on="node", how="left", maintain_order="left"
    )
    about = about.with_columns(graph.nodes["rank"].gather(part).alias("rank"))
    message = pl.col("kind").is_in(["send", "receive"])
    sender = pl.when(pl.col("kind") == "receive").then("peer").otherwise("rank")
    receiver = pl.when(pl.col("kind") == "receive").then("rank").otherwise("peer")
    split = (pl.col("kind") == "all_to_all") & (pl.col("in_splits").list.sum() > 0) & pl.col("in_bytes").is_not_null()
    table = (
        about.group_by("row")
        .agg(
            pl.col("instance", "kind", "group", "ranks").first(),
            pl.max("in_bytes", "out_bytes", "group_size"),
            pl.col("peer").drop_nulls().first(),
            sender.filter(message).drop_nulls().first().alias("sender"),
            receiver.filter(message).drop_nulls().first().alias("receiver"),
            pl.col("rank").sort().alias("recorded"),
            pl.len().cast(pl.Int64).alias("parts"),
            # The ranks that say what they give to whom, with what they give in all.
            split_ranks=pl.col("rank").filter(split),
            split_lists=pl.col("in_splits").filter(split),
            put_in=pl.col("in_bytes").filter(split),
        )
        .sort("row")
    )
    pair = pl.concat_list("sender", "receiver")
    is_message = pl.col("kind").is_in(["send", "receive"])
    world = pl.lit(graph.world_size, dtype=pl.Int32)
    whole = pl.int_ranges(0, world, dtype=pl.Int32)
    members = (
        pl.when(is_message)
        .then(pl.when(pl.col("sender").is_not_null() & pl.col("receiver").is_not_null()).then(pair))
        .when(pl.col("ranks").is_not_null())
        .then("ranks")
        .when(pl.col("group_size").fill_null(pl.col("parts")) == pl.col("parts"))
        .then("recorded")
        .when(pl.col("group_size") == world)
        .then(whole)
    )
    table = table.with_columns(members.alias("members")).with_columns(
        # Of a message both ends are in it, whatever group they are of.
        pl.coalesce(pl.col("members").list.len().cast(pl.Int32), "group_size").alias("group_size"),
        pl.when(is_message).then(pl.lit("send")).otherwise("kind").alias("kind"),
    )
    root_first = pl.concat_list(
        pl.concat_list("peer"), pl.col("members").list.set_difference(pl.concat_list("peer")).list.sort()
    )
    rooted = pl.col("kind").is_in(ROOTED) & pl.col("members").list.contains(pl.col("peer"))
    table = with_sizes(table).with_columns(
        pl.when(rooted.fill_null(value=False)).then(root_first).otherwise("members").alias("members"),
        meeting=pl.Series(meeting).gather(table["row"]),
        splits=_splits(table),
    )
    return table.select(
        "meeting", "instance", "kind", "group", "group_size", "members", "size_bytes", "bus_factor", "parts", "splits"
    )


def _splits(table: pl.DataFrame) -> pl.Series:
    """See `Operations.table`; what nobody recorded is as even as the mean of the others."""
    matrices: list[list[int] | None] = [None] * table.height
    rows = table.with_row_index("at").filter(pl.col("split_ranks").list.len() > 0).drop_nulls("members")
    columns = ("at", "members", "split_ranks", "split_lists", "put_in")
    for at, members, split_ranks, split_lists, put_in in rows.select(columns).iter_rows():
        even = len({part for split in split_lists for part in split}) == 1
        if even or any(len(split) != len(members) for split in split_lists):
            continue
        matrix = np.full((len(members), len(members)), np.mean(put_in) / len(members))
        for rank, split, whole in zip(split_ranks, split_lists, put_in, strict=True):
            matrix[members.index(rank)] = np.array(split) * whole / sum(split)
        matrices[at] = np.rint(matrix).astype(np.int64).ravel().tolist()
    return pl.Series("splits", matrices, dtype=pl.List(pl.Int64))


def transfers_ns(graph: Graph, of: Operations) -> Ints:
    """How long each communication took from its meeting to the end of its middle part; shape (communications,), ns."""
    times = point_times(graph)
    target = array(graph, graph.edges["target"]).astype(np.int64)[of.edge]
    took = times[2 * target + 1] - times[2 * of.table["meeting"].to_numpy().astype(np.int64)[of.of_edge]]
    rows = pl.DataFrame({"row": of.of_edge, "took": np.maximum(took, 0)})
    middle = rows.group_by("row").agg(pl.col("took").quantile(0.5, "lower").cast(pl.Int64))
    out = np.zeros(len(of), dtype=np.int64)
    out[middle["row"].to_numpy()] = middle["took"].to_numpy()
    return out
