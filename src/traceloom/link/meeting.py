"""Where the parts of a communication wait for each other: rendezvous nodes, and the arrivals of unrecorded peers.

Rules (a part ends once those it waits for have begun, plus the transfer):
- all_reduce, all_gather, reduce_scatter, all_to_all, barrier, and kinds that are not known: every part waits for all;
- broadcast, scatter: the others wait for the root; reduce, gather: the root waits for the others;
- send and receive: each waits for the other (both occupy their device until the data has passed).
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from traceloom.model import graph_schema as gs
from traceloom.model.frames import as_declared
from traceloom.model.graph import Graph

FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")
_JITTER = 1.5  # of what a transfer usually takes: one that takes no longer has waited for nobody
_ALIKE = ["kind", "in_bytes", "group", "group_size", "name"]  # operations that should take equally long
_LINKS = ["pattern", "group", "group_size"]  # those that go the same way


def meet(graph: Graph, evidence: list[str | None]) -> Graph:
    """Add the nodes and edges by which communications wait for their peers.

    Args:
        graph: All ranks, with `instance` set in `communication` where parts were joined.
        evidence: Of the join, per row of `communication`.
    """
    if not graph.communication.height:
        return graph
    parts = _parts(graph, evidence)
    # one row per operation that has, or must have had, several parts
    sender_start = pl.col("from").filter(pl.col("gives"))
    meetings = (
        parts.group_by("key", maintain_order=True)
        .agg(
            sender_start.max().fill_null(pl.col("from").min()).alias("start"),
            (pl.col("expected").max() - pl.len()).clip(lower_bound=0).alias("missing"),
            pl.len().alias("parts"),
            pl.col("kind", "group", "in_bytes", "group_size", "rank", "evidence", "name").first(),
            pl.col("to").min().alias("earliest_end"),
        )
        .filter((pl.col("parts") > 1) | (pl.col("missing") > 0))
    )
    if not meetings.height:
        return replace(graph, coverage=_coverage(graph, parts))
    first = graph.nodes.height
    meetings = meetings.with_columns((pl.int_range(pl.len(), dtype=pl.Int64) + first).alias("meeting"))
    parts = parts.join(
        meetings.select("key", "meeting", "start", "missing"), on="key", how="left", maintain_order="left"
    )
    arrivals = meetings.filter(pl.col("missing") > 0).with_columns(
        (pl.int_range(pl.len(), dtype=pl.Int64) + first + meetings.height).alias("arrival")
    )
    arrivals = _arrival_times(arrivals, parts)
    # Into an arrival from the start of the last recorded part, and on to the meeting. Peers of which nothing is known
    # are taken to do as we do: if we come earlier, so do they, and what we waited for them stays. The other assumption,
    # that they keep their pace, would nail a graph of few ranks to measured times.
    last = parts.sort("from", descending=True, maintain_order=True).group_by("key").agg(pl.col("node").first())
    assumed, no_slack = pl.lit("assumed").alias("evidence"), pl.lit(0).alias("slack")
    arrival = arrivals.join(last, on="key", how="left", maintain_order="left")
    arrive = arrival.select(pl.col("node").alias("source"), pl.col("arrival").alias("target"), assumed, no_slack)
    onward = arrival.select(pl.col("arrival").alias("source"), pl.col("meeting").alias("target"), assumed, no_slack)
    timed = meetings.join(arrivals.select("key", "at"), on="key", how="left", maintain_order="left")
    timed = timed.with_columns(pl.max_horizontal("start", "at").alias("met"))
    met = _points(gs.RENDEZVOUS, timed, "meeting", "met")
    nodes = pl.concat([graph.nodes, met, _points(gs.ARRIVAL, arrivals, "arrival", "at")])
    into = parts.filter(pl.col("meeting").is_not_null() & pl.col("gives")).select(
        pl.col("node").alias("source"), pl.col("meeting").alias("target"), "evidence", pl.lit(0).alias("slack")
    )
    when = met.select(pl.col("node").cast(pl.Int64).alias("meeting"), "start_ns")
    out_of = (
        parts.filter(pl.col("meeting").is_not_null() & pl.col("takes"))
        .join(when, on="meeting", how="left", maintain_order="left")
        .select(
            pl.col("meeting").alias("source"),
            pl.col("node").alias("target"),
            "evidence",
            (pl.col("to") - pl.col("start_ns")).alias("slack"),
        )
    )
    edges = pl.concat(
        [
            graph.edges,
            _edges(into, from_end=False, to_end=False),
            _edges(out_of, from_end=True, to_end=True),
            _edges(arrive, from_end=False, to_end=False),
            _edges(onward, from_end=True, to_end=False),
        ]
    )
    return replace(graph, nodes=nodes, edges=edges, coverage=_coverage(graph, parts))


def _parts(graph: Graph, evidence: list[str | None]) -> pl.DataFrame:
    """One row per communication node: times, which operation, whom it waits for, whether others wait for it."""
    nodes = graph.nodes.select("rank", "name", "start_ns", "duration_ns")[graph.communication["node"]]
    parts = graph.communication.with_columns(
        pl.Series("evidence", evidence, dtype=pl.String),
        *nodes.select(
            "rank", "name", pl.col("start_ns").alias("from"), (pl.col("start_ns") + pl.col("duration_ns")).alias("to")
        ),
    )
    alone = pl.col("instance").is_null()
    own = pl.int_range(pl.len(), dtype=pl.Int64)
    root = pl.col("peer").is_not_null() & (pl.col("peer") == pl.col("rank"))
    gives = ~pl.col("kind").fill_null("").is_in(FROM_ROOT) | root | pl.col("peer").is_null()
    takes = ~pl.col("kind").fill_null("").is_in(TO_ROOT) | root | pl.col("peer").is_null()
    return parts.with_columns(
        pl.when(alone).then(-1 - own).otherwise("instance").alias("key"),
        pl.when(alone).then(1).otherwise(pl.len().over("instance")).alias("present"),
        gives.alias("gives"),
        # The root of a broadcast goes ahead; a member of a reduce hands in its part and goes on.
        (takes & ~(pl.col("kind").fill_null("").is_in(FROM_ROOT) & root)).alias("takes"),
    ).with_columns(
        pl.when(pl.col("kind").is_in(["send", "receive"]))
        .then(2)
        .otherwise(pl.max_horizontal(pl.coalesce("group_size", pl.lit(graph.world_size), "present"), "present"))
        .alias("expected")
    )


def _arrival_times(arrivals: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    """When the unrecorded peers must have come: the end, less the time that such an operation takes alone.

    That is the lower quartile of what operations of its kind, size, group and name took after the last recorded part
    came: some of them waited for nobody. The shortest one would take every jitter of the transfer for waiting. Where
    all of them waited, as at the first communication of a step for a peer that always begins late, other sizes in the
    same group know better: a transfer takes no longer than a larger one, nor longer per byte than a smaller one.
    """
    took = pl.col("to") - pl.max_horizontal("from", "start")
    size = pl.max_horizontal("in_bytes", "out_bytes").max().alias("size")
    usual = parts.group_by(_ALIKE).agg(took.quantile(0.25, "lower").cast(pl.Int64).alias("transfer"), size)
    pattern = pl.col("kind").replace({"reduce_scatter": "all_gather"})  # the same ring, with and without arithmetic
    sized = (
        usual.filter(pl.col("size") > 0, pl.col("transfer") >= 0)
        .with_columns(pattern.alias("pattern"))
        .sort("size")
        .with_columns(
            (pl.col("transfer") / pl.col("size")).cum_min().over(_LINKS).alias("per_byte"),
            pl.col("transfer").cum_min(reverse=True).over(_LINKS).alias("larger"),
        )
    )
    least = pl.min_horizontal("larger", (pl.col("per_byte") * pl.col("size")).ceil().cast(pl.Int64))
    unsized = usual.filter(~((pl.col("size") > 0) & (pl.col("transfer") >= 0)).fill_null(value=False))
    columns = [*_ALIKE, "transfer"]
    transfers = pl.concat([sized.with_columns(least.alias("transfer")).select(columns), unsized.select(columns)])
    timed = arrivals.join(transfers, on=_ALIKE, how="left", nulls_equal=True, maintain_order="left")
    # Never before the last recorded part: what came earlier held nothing back.
    latest = parts.group_by("key").agg(pl.col("from").max().alias("latest"))
    last = pl.max_horizontal("start", "latest")
    waited = pl.col("earliest_end") - last > _JITTER * pl.col("transfer")
    at = pl.max_horizontal(pl.col("earliest_end") - pl.col("transfer").clip(lower_bound=0), last)
    return timed.join(latest, on="key", how="left", maintain_order="left").with_columns(
        pl.when(waited).then(at).otherwise(last).alias("at")
    )


def _filled(name: str, frame: pl.DataFrame) -> pl.DataFrame:
    schema = gs.GRAPH_SCHEMAS[name]
    missing = [pl.lit(None).alias(column) for column in schema if column not in frame.columns]
    return frame.with_columns(missing).pipe(as_declared, schema)


def _points(kind: str, frame: pl.DataFrame, number: str, time: str) -> pl.DataFrame:
    return _filled(
        "nodes",
        frame.select(
            pl.col(number).alias("node"),
            pl.lit(kind).alias("kind"),
            "rank",
            (pl.col("kind").fill_null("communication") + pl.lit(" ") + pl.col("group").fill_null(""))
            .str.strip_chars()
            .alias("name"),
            pl.col(time).alias("start_ns"),
            pl.lit(0).alias("duration_ns"),
            pl.lit(0).alias("work_ns"),
            pl.lit(0).alias("residual_ns"),
            pl.col("in_bytes").alias("bytes"),
        ),
    )


def _edges(frame: pl.DataFrame, *, from_end: bool, to_end: bool) -> pl.DataFrame:
    """Edges from `source`, `target`, `slack`, `evidence`; until it is calibrated, none asks for more than it got."""
    return _filled(
        "edges",
        frame.select(
            "source",
            "target",
            pl.lit("rendezvous").alias("kind"),
            pl.col("evidence").fill_null("assumed"),
            pl.lit(from_end).alias("from_end"),
            pl.lit(to_end).alias("to_end"),
            pl.min_horizontal(pl.lit(0), "slack").alias("delay_ns"),
            pl.lit(0).alias("residual_ns"),
        ),
    )


def _coverage(graph: Graph, parts: pl.DataFrame) -> pl.DataFrame:
    """What became of the communication of each rank."""
    joined = pl.format("joined over {} ranks", pl.col("present"))
    unrecorded = (
        pl.when(pl.col("expected") > 1)
        .then(pl.lit("peers not recorded or not joined"))
        .otherwise(pl.lit("alone in its group"))
    )
    outcome = pl.when(pl.col("present") > 1).then(joined).otherwise(unrecorded)
    counted = (
        parts.with_columns(outcome.alias("outcome"))
        .group_by("rank", "outcome", maintain_order=True)
        .agg(pl.len().alias("count"), (pl.col("to") - pl.col("from")).sum().alias("time_ns"))
        .with_columns(pl.lit("collectives").alias("subject"))
    )
    return pl.concat([graph.coverage, _filled("coverage", counted)])
