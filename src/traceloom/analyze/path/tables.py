"""The tables of a critical path."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.path.pieces import (
    CLASSES,
    COMMUNICATION,
    COMPUTE,
    COPIES,
    DATA,
    HOST,
    LAUNCH,
    RESIDUAL,
    SYNCHRONISATION,
    ClassType,
    PathPieces,
)
from traceloom.analyze.path.window import PathWindow
from traceloom.array_types import Ints
from traceloom.model import graph_schema as gs
from traceloom.model.frames import as_declared, schema
from traceloom.model.graph import Graph

PATH = schema(
    "start_ns duration_ns class node kind name rank lane thread event edge along_edge evidence",
    {"class": ClassType, "kind": gs.NodeKind, "edge": gs.EdgeKind, "evidence": gs.Evidence},
)
CLASS_ROWS = schema("class duration_ns fraction piece_count", {"class": ClassType})
RANKS = schema("rank class duration_ns fraction", {"class": ClassType})
NAMES = schema(
    "class name count duration_ns path_ns path_fraction least_slack_ns near_count near_ns", {"class": ClassType}
)
STRETCHES = schema(
    "start_ns duration_ns rank where kind process thread device stream class",
    "class_ns name name_ns piece_count first_event last_event edge evidence",
    {"where": pl.String, "class": ClassType, "edge": gs.EdgeKind, "evidence": gs.Evidence},
)
_WORK = {
    gs.KERNEL: COMPUTE,
    gs.COLLECTIVE: COMMUNICATION,
    gs.SEND: COMMUNICATION,
    gs.RECEIVE: COMMUNICATION,
    gs.COPY: COPIES,
    gs.FILL: COPIES,
    gs.HOST: HOST,
    gs.THINK: HOST,
    gs.LAUNCH: LAUNCH,
    gs.BLOCK: SYNCHRONISATION,
}


_WORK_OF = np.array([list(CLASSES).index(_WORK[kind]) if kind in _WORK else -1 for kind in gs.NODE_KINDS])


def path(graph: Graph, pieces: PathPieces) -> pl.DataFrame:
    """The pieces with what they are of."""
    node, edge = pl.Series(pieces.node).replace(-1, None), pl.Series(pieces.edge).replace(-1, None)
    columns = ("node", "kind", "name", "rank", "lane", "event")
    of_node = pl.DataFrame([graph.nodes[column][node.cast(pl.UInt32)] for column in columns])
    of_edge = pl.DataFrame([graph.edges[column][edge.cast(pl.UInt32)] for column in ("kind", "evidence")])
    threads = graph.lanes["name"][of_node["lane"]] if graph.lanes.height else pl.Series([None] * node.len())
    return of_node.with_columns(
        # What comes before the path begins is waiting for the rank that it begins on.
        pl.col("rank").fill_null(strategy="backward"),
        pl.Series("start_ns", pieces.start + graph.epoch_ns),
        pl.Series("duration_ns", pieces.end - pieces.start),
        pl.Series(list(CLASSES), dtype=ClassType)[pieces.kind].alias("class"),
        threads.alias("thread"),
        of_edge["kind"].alias("edge"),
        of_edge["evidence"],
        pl.Series("along_edge", pieces.along),
    ).pipe(as_declared, PATH)


def stretches(graph: Graph, rows: pl.DataFrame) -> pl.DataFrame:
    """The path lane by lane: neighbouring pieces of one lane as one."""
    run = (pl.col("lane").is_null() | (pl.col("lane") != pl.col("lane").shift(1)).fill_null(value=True)).cum_sum()
    placed = rows.lazy().with_columns(run.alias("run"))
    length = pl.col("duration_ns").sum()
    whole = placed.group_by("run", maintain_order=True).agg(
        pl.col("start_ns", "rank", "lane", "edge", "evidence").first(),
        length,
        pl.len().alias("piece_count"),
        pl.col("event").drop_nulls().first().alias("first_event"),
        pl.col("event").drop_nulls().last().alias("last_event"),
    )
    most = [
        placed.group_by("run", key, maintain_order=True)
        .agg(length.alias(f"{key}_ns"))
        .sort("run", f"{key}_ns", descending=[False, True], maintain_order=True)
        .group_by("run", maintain_order=True)
        .agg(pl.col(key, f"{key}_ns").first())
        for key in ("class", "name")
    ]
    lanes = graph.lanes.lazy().select(
        "lane", "kind", "process", "thread", "device", "stream", pl.col("name").alias("where")
    )
    for frame in most:
        whole = whole.join(frame, on="run", how="left", maintain_order="left")
    collected = whole.join(lanes, on="lane", how="left", maintain_order="left").collect()
    return collected.with_columns(pl.col("kind").cast(pl.String)).pipe(as_declared, STRETCHES)


def classes(rows: pl.DataFrame, length: int) -> pl.DataFrame:
    """Time by class; every class has a row."""
    summed = rows.group_by("class").agg(pl.col("duration_ns").sum(), pl.len().alias("piece_count"))
    every = pl.DataFrame({"class": list(CLASSES)}, schema={"class": ClassType})
    filled = every.join(summed, on="class", how="left", maintain_order="left").with_columns(
        pl.col("duration_ns", "piece_count").fill_null(0)
    )
    return filled.with_columns((pl.col("duration_ns") / max(length, 1)).alias("fraction")).pipe(as_declared, CLASS_ROWS)


def ranks(rows: pl.DataFrame, length: int) -> pl.DataFrame:
    """Time by rank and class, the ranks with the most of the path first."""
    summed = rows.group_by("rank", "class").agg(pl.col("duration_ns").sum())
    whole = pl.col("duration_ns").sum().over("rank")
    ordered = summed.sort([whole, "rank", "duration_ns", "class"], descending=[True, False, True, False])
    return ordered.with_columns((pl.col("duration_ns") / max(length, 1)).alias("fraction")).pipe(as_declared, RANKS)


def names(graph: Graph, window: PathWindow, rows: pl.DataFrame, slack: Ints, near: int) -> pl.DataFrame:
    """Work of the window by name, with its part of the path and the slack of what is not on it."""
    # Of the way along edges only the transfer of a communication is its own time; the rest is between things.
    own = rows.filter(~pl.col("along_edge") | (pl.col("class") == COMMUNICATION), pl.col("class") != RESIDUAL)
    loading = pl.col("duration_ns").filter(pl.col("class") == DATA).sum().alias("data_ns")
    on_path = own.drop_nulls("node").group_by("node").agg(pl.col("duration_ns").sum().alias("path_ns"), loading)
    start, duration = (graph.nodes[column].to_numpy() for column in ("start_ns", "duration_ns"))
    kind = _WORK_OF[graph.nodes["kind"].to_physical().to_numpy()]
    at = np.flatnonzero((kind >= 0) & (start < window.high) & (start + duration >= window.low))
    shares = np.zeros((2, graph.nodes.height), dtype=np.int64)
    shares[:, on_path["node"].to_numpy()] = on_path["path_ns"].to_numpy(), on_path["data_ns"].to_numpy()
    slack = slack[at]
    work = pl.LazyFrame(
        {
            "class": pl.Series(list(CLASSES), dtype=ClassType)[kind[at].astype(np.uint32)],
            "name": graph.nodes["name"][at],
            "duration_ns": duration[at],
            "path_ns": shares[0, at],
            "data_ns": shares[1, at],
            "slack_ns": slack,
            "off": slack > 0,
            "near": (slack > 0) & (slack <= near),
        }
    )
    summed = work.group_by("class", "name").agg(
        pl.len().alias("count"),
        pl.col("duration_ns").sum(),
        pl.col("path_ns", "data_ns").sum(),
        pl.col("slack_ns").filter("off").min().alias("least_slack_ns"),
        pl.col("near").sum().alias("near_count"),
        pl.col("duration_ns").filter("near").sum().alias("near_ns"),
    )
    length = max(window.high - window.low, 1)
    return (
        summed.with_columns(
            (pl.col("path_ns") / length).alias("path_fraction"),
            # What the loop waits for its data in is mostly one name: it is told as that.
            pl.when(2 * pl.col("data_ns") > pl.col("path_ns"))
            .then(pl.lit(DATA, ClassType))
            .otherwise("class")
            .alias("class"),
        )
        .sort("path_ns", "near_ns", "duration_ns", "name", "class", descending=[True, True, True, False, False])
        .collect()
        .pipe(as_declared, NAMES)
    )
