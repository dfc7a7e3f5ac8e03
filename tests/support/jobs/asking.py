"""A change of a made job, said of the graph of its traces: what it makes of works and delays."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl
from numpy.typing import NDArray

from support.jobs.simulation import Change
from support.jobs.training import DELAY, DELAY_NAME, SYNC
from traceloom.graph.graph import Graph

Ints = NDArray[np.int64]

_HOST = ("host", "think", "launch", "block", "wait")
_DEVICE = ("kernel", "copy", "fill")
_SYNCHRONISE = r"^cuda(Device|Stream|Event)Synchronize$"


def changed(
    graph: Graph, change: Change, absent_ns: int, without: Collection[str] = ()
) -> tuple[Ints, Ints]:
    """Works and delays to evaluate a graph with, residuals included in the evaluation.

    Args:
        graph: The calibrated graph of the traces of a made training job.
        change: What shall be different.
        absent_ns: The delay that says of an edge that it does not hold.
        without: Kinds of edges that shall not hold either.

    Returns:
        Work of each node, shape (nodes,), and delay of each edge, shape (edges,), ns.
    """
    return _works(graph, change), _delays(graph, change, absent_ns, without)


def _works(graph: Graph, change: Change) -> Ints:
    kind = pl.col("kind").cast(pl.String)
    factor = (
        pl.when(kind.is_in(_HOST))
        .then(change.host)
        .when(kind.is_in(_DEVICE))
        .then(change.kernels)
        .otherwise(1.0)
    )
    if DELAY in change.without:
        factor = pl.when(pl.col("name") == DELAY_NAME).then(0.0).otherwise(factor)
    # What a node takes is its work and what is left over; both change, and the second is added in the evaluation.
    scaled = (pl.col("work_ns") + pl.col("residual_ns")) * factor - pl.col("residual_ns")
    works: Ints = graph.nodes.select(scaled.round().cast(pl.Int64).alias("work"))["work"].to_numpy()
    return works


def _delays(graph: Graph, change: Change, absent_ns: int, without: Collection[str]) -> Ints:
    kind = pl.col("kind").cast(pl.String)
    transfer = (kind == "rendezvous") & pl.col("to_end")
    shorter = (pl.col("delay_ns") + pl.col("residual_ns")) * change.collectives - pl.col(
        "residual_ns"
    )
    delay = pl.when(transfer).then(shorter.round().cast(pl.Int64)).otherwise("delay_ns")
    removed = kind.is_in(list(without))
    if SYNC in change.without:
        # All but the last synchronisation of each rank, which ends the job.
        calls = graph.nodes.filter(pl.col("name").str.contains(_SYNCHRONISE)).sort("start_ns")
        omitted = calls.filter(pl.col("node") != pl.col("node").last().over("rank"))["node"]
        removed |= (kind == "synchronize") & pl.col("target").is_in(omitted.implode())
    delays = graph.edges.select(pl.when(removed).then(absent_ns).otherwise(delay).alias("delay"))
    delay_ns: Ints = delays["delay"].to_numpy()
    return delay_ns
