"""Who sends how much to whom: rank × rank, and how even all-to-alls are."""

from __future__ import annotations

import polars as pl

from traceloom.analyze.collective.calls import sum_or_null
from traceloom.model.frames import as_declared, schema

MATRIX_SCHEMA = schema("source target bytes exact_bytes duration_ns count", {"source": pl.Int32, "target": pl.Int32})
EXCHANGE_SCHEMA = schema("group rank count sent_bytes received_bytes peer_max_over_mean split_count")
_EVEN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
_ONCE = pl.lit(1, pl.Int64).alias("count")
# all-to-alls that say how many rows of the first dimension each member gets
_WITH_SPLITS = (
    (pl.col("kind") == "all_to_all")
    & pl.col("members").is_not_null()
    & pl.col("in_bytes").is_not_null()
    & (pl.col("in_splits").list.len() == pl.col("members").list.len())
    & (pl.col("in_splits").list.sum() > 0)
).fill_null(value=False)


def matrix(calls: pl.DataFrame) -> pl.DataFrame:
    """Bytes from rank to rank.

    Sends, receives and all-to-alls with recorded splits say exactly who got what. Of every other collective the ring or
    tree that ran is not in the trace: what a rank sends (`bus_factor` × `size_bytes`) is shared evenly among the other
    members; a root that is known sends to (or gets from) each of them. Time is shared like bytes.

    Args:
        calls: Rows of `collectives(...).calls`, of any number of ranks.

    Returns:
        source, target (global ranks), bytes, exact_bytes (the part that is recorded), duration_ns (of the calls
        of the source, waiting included), count; by source, then target. Calls without members, bytes or rank are not
        in it.
    """
    rank, peer, member = pl.col("rank"), pl.col("peer"), pl.col("members")
    size, time = pl.col("size_bytes"), pl.col("duration_ns")
    sent = calls.filter(pl.col("kind") == "send").drop_nulls(["rank", "peer", "size_bytes"])
    received = calls.filter(pl.col("kind") == "recv").drop_nulls(["rank", "peer", "size_bytes"])
    # receives count where their sender is not recorded
    only_received = received.join(
        sent.select("rank", "peer").unique(),
        left_on=["peer", "rank"],
        right_on=["rank", "peer"],
        how="anti",
        maintain_order="left",
    )
    whole = pl.col("in_splits").list.sum().alias("whole")
    split = calls.filter(_WITH_SPLITS, rank.is_not_null()).with_columns(whole).explode("members", "in_splits")
    share = pl.col("in_splits") / pl.col("whole")
    parts = [
        sent.select(*_row(rank, peer, size, time, exact=True), _ONCE),
        only_received.select(*_row(peer, rank, size, time, exact=True), _ONCE),
        split.filter(member != rank).select(
            *_row(rank, member, pl.col("in_bytes") * share, time * share, exact=True), _ONCE
        ),
        _shared(calls),
    ]
    return (
        pl.concat(parts)
        .group_by("source", "target")
        .agg(
            pl.col("bytes").sum(),
            pl.when("exact").then("bytes").otherwise(0).sum().alias("exact_bytes"),
            pl.col("duration_ns").sum(),
            pl.col("count").sum(),
        )
        .sort("source", "target")
        .pipe(as_declared, MATRIX_SCHEMA)
    )


def _row(source: pl.Expr, target: pl.Expr, size: pl.Expr, time: pl.Expr, *, exact: bool) -> list[pl.Expr]:
    return [
        source.cast(pl.Int32).alias("source"),
        target.cast(pl.Int32).alias("target"),
        size.round().cast(pl.Int64).alias("bytes"),
        time.round().cast(pl.Int64).alias("duration_ns"),
        pl.lit(exact).alias("exact"),
    ]


def _shared(calls: pl.DataFrame) -> pl.DataFrame:
    """Collectives whose way through the ranks is not recorded; those with a known root go from or to it."""
    shared = calls.filter(
        pl.col("kind").is_in([*_EVEN, *_FROM_ROOT, *_TO_ROOT]),
        ~_WITH_SPLITS,
        pl.col("rank").is_not_null(),
        pl.col("members").list.len() > 1,
        pl.col("size_bytes").is_not_null(),
    )
    ranks = pl.col("members").list.len()
    rooted = pl.col("kind").is_in([*_FROM_ROOT, *_TO_ROOT])
    one_way = pl.when(pl.col("kind").is_in(["gather", "scatter"])).then(pl.col("size_bytes") / ranks)
    to_each = (
        # without a root every rank stands for its share of the one way through all
        pl.when(rooted & pl.col("peer").is_null()).then(one_way.otherwise("size_bytes") / ranks)
        .when(rooted).then(one_way.otherwise("size_bytes"))
        .otherwise(pl.col("size_bytes") * pl.col("bus_factor") / (ranks - 1))
    )  # fmt: skip
    # calls of one group and size fill the same cells
    member_list = pl.col("members").cast(pl.List(pl.String)).list.join(",").alias("whom")
    alike = shared.group_by("rank", "peer", member_list, "kind", "size_bytes", maintain_order=True).agg(
        pl.col("members").first(), to_each.sum().alias("moved"), pl.col("duration_ns").sum(), pl.len().alias("count")
    )
    to_root = pl.col("kind").is_in(_TO_ROOT) & pl.col("peer").is_not_null()
    from_other = pl.col("kind").is_in(_FROM_ROOT) & (pl.col("peer") != pl.col("rank")).fill_null(value=False)
    each = (
        alike.filter(~from_other)
        .with_columns((pl.col("duration_ns") / pl.when(to_root).then(1).otherwise(ranks - 1)).alias("took"))
        .explode("members")
        .filter(pl.col("members") != pl.col("rank"), ~to_root | (pl.col("members") == pl.col("peer")))
    )
    return each.select(
        *_row(pl.col("rank"), pl.col("members"), pl.col("moved"), pl.col("took"), exact=False),
        pl.col("count").cast(pl.Int64),
    )


def exchanges(calls: pl.DataFrame) -> pl.DataFrame:
    """How much each rank sends and receives in all-to-alls, and how unevenly over its peers.

    Returns:
        group, rank, count, sent_bytes, received_bytes (null where unknown), peer_max_over_mean (of the bytes to each
        peer, summed over the calls; null without splits), split_count (calls with recorded splits).
    """
    all_to_alls = calls.filter(pl.col("kind") == "all_to_all")
    marked = all_to_alls.with_columns(_WITH_SPLITS.alias("split"))
    sums = marked.group_by("group", "rank", maintain_order=True).agg(
        pl.len().alias("count"),
        sum_or_null("in_bytes").alias("sent_bytes"),
        sum_or_null("out_bytes").alias("received_bytes"),
        pl.col("split").sum().alias("split_count"),
    )
    peers = (
        marked.filter("split")
        .with_columns((pl.col("in_bytes") / pl.col("in_splits").list.sum()).alias("each"))
        .explode("members", "in_splits")
        .group_by("group", "rank", "members")
        .agg((pl.col("in_splits") * pl.col("each")).sum().alias("sent"))
        .group_by("group", "rank")
        .agg((pl.col("sent").max() / pl.col("sent").mean()).alias("peer_max_over_mean"))
    )
    return (
        sums.join(peers, on=["group", "rank"], how="left", nulls_equal=True, maintain_order="left")
        .pipe(as_declared, EXCHANGE_SCHEMA)
        .sort("group", "rank", nulls_last=True)
    )
