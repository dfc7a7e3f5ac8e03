"""How long each kind of edge usually takes, what a waiting node takes itself, and what neither explains.

Definitions:
- *slack* of an edge: measured time of its target point less that of its source point.
- An edge *binds* where its source was reached last of all that its target waited for.
- The *class delay* is the median slack of the binding edges of a class (kind of edge, and what tells places apart).
  An order without a mechanism that takes time (the next thing on a thread, data, forward before backward) has delay 0.
- The *delay* of an edge is its class delay, at most its slack. Where a time is given from outside (origin of a lane,
  what we waited for peers that were not recorded) it is the whole slack: the assumption is that it stays.
- A node that waits (an edge holds back its end) has the *work* that the same call takes where it does not wait.
- The *residual* is what is left between the latest source plus its delay and the measured time; it belongs to that
  source's edge, or to the node itself where its own work ended last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_ORDERS = ("call", "thread", "data", "forward-backward", "simulation")
_ROUNDS = 3  # which edges bind depends on the delays, which depend on which edges bind; this settles at once


@dataclass(frozen=True)
class Classes:
    """Edges and nodes by class.

    Attributes:
        edge: Class of each edge.
        kind, place: Of each class.
        timed: Whether edges of a class take time of their own; per edge.
        given: Whether the time of an edge is given from outside; per edge.
    """

    edge: Ints
    kind: list[str]
    place: list[str]
    timed: Flags
    given: Flags


def calibrate(graph: Graph) -> Graph:
    """The graph with delays, works of waiting nodes, residuals and the table of delays filled in.

    Evaluating it with residuals gives back the measured times to the nanosecond.
    """
    if not graph.nodes.height:
        return graph
    times = graph.point_times()
    source, target = graph.points()
    slack = times[target] - times[source]
    classes = _classes(graph)
    measured_work = graph.nodes["duration_ns"].to_numpy()
    work = _own_work(graph, source, target, times)
    constant = np.zeros(len(classes.kind), dtype=np.int64)
    counts = np.zeros(len(classes.kind), dtype=np.int64)
    for _ in range(_ROUNDS):
        delay = _delays(classes, constant, slack)
        binding = _binding(source, target, times, delay, work)
        before = constant
        constant, counts = _medians(classes, slack, binding)
        if np.array_equal(before, constant):
            break
    delay = _delays(classes, constant, slack)
    node_residual, edge_residual = _residuals(source, target, times, delay, work)
    work = np.minimum(work, measured_work)
    table = pl.DataFrame(
        {"kind": classes.kind, "place": classes.place, "count": counts, "median_ns": constant},
        schema=gs.GRAPH_SCHEMAS["delays"],
    )
    return replace(
        graph,
        nodes=graph.nodes.with_columns(pl.Series("work_ns", work), pl.Series("residual_ns", node_residual)),
        edges=graph.edges.with_columns(pl.Series("delay_ns", delay), pl.Series("residual_ns", edge_residual)),
        delays=table.filter(pl.col("count") > 0).sort("kind", "place"),
    )


def class_delays(graph: Graph) -> Ints:
    """Of every edge of a calibrated graph: the delay of its class alone, whatever was measured at this edge."""
    classes = _classes(graph)
    known = {(row["kind"], row["place"]): row["median_ns"] for row in graph.delays.to_dicts()}
    constant = np.array([known.get(key, 0) for key in zip(classes.kind, classes.place, strict=True)], dtype=np.int64)
    delay = graph.edges["delay_ns"].to_numpy()
    return np.where(classes.timed, constant[classes.edge] if len(constant) else 0, delay)


def _classes(graph: Graph) -> Classes:
    """What tells edges of a kind apart: the call that launches or waits, the device, the operation and its size."""
    source, target = graph.edges["source"], graph.edges["target"]
    nodes = graph.nodes.with_columns(
        pl.col("lane")
        .replace_strict(graph.lanes["lane"], graph.lanes["device"], default=None, return_dtype=pl.Int32)
        .alias("device")
    )
    at_source = nodes.select("name", "kind", "device")[source.to_numpy()]
    at_target = nodes.select("name", "kind", "device", "bytes")[target.to_numpy()]
    frame = pl.DataFrame(
        {
            "kind": graph.edges["kind"].cast(pl.String),
            "source_name": at_source["name"],
            "target_name": at_target["name"],
            "source_kind": at_source["kind"].cast(pl.String),
            "target_kind": at_target["kind"].cast(pl.String),
            "device": at_target["device"],
            "bytes": at_target["bytes"],
            "to_end": graph.edges["to_end"],
        }
    )
    device = pl.format("device {}", pl.col("device").fill_null(-1))
    size = pl.format("{} of {} B", "target_name", pl.col("bytes").fill_null(-1))
    place = (
        pl.when(pl.col("kind") == "launch")
        .then(pl.format("{} on {}", "source_name", device))
        .when(pl.col("kind").is_in(["stream", "wait"]))
        .then(device)
        .when(pl.col("kind").is_in(["synchronize", "queue"]))
        .then("target_name")
        .when((pl.col("kind") == "rendezvous") & pl.col("to_end"))
        .then(size)
        .when(pl.col("kind") == "cross-thread")
        .then(pl.format("{} to {}", "source_kind", "target_kind"))
        .otherwise(pl.lit(""))
    )
    keyed = frame.select("kind", place.alias("place"), "to_end")
    numbered = keyed.with_columns(pl.struct("kind", "place").rank("dense").cast(pl.Int64).alias("class") - 1)
    table = numbered.unique("class").sort("class")
    kind = pl.col("kind")
    meets = (kind == "rendezvous") & ~pl.col("to_end")
    given = (kind == "origin") | (frame["target_kind"] == gs.ARRIVAL)
    flags = numbered.select((~kind.is_in(list(_ORDERS)) & ~given & ~meets).alias("timed"), given.alias("given"))
    return Classes(
        numbered["class"].to_numpy(),
        table["kind"].to_list(),
        table["place"].to_list(),
        flags["timed"].to_numpy(),
        flags["given"].to_numpy(),
    )


def _own_work(graph: Graph, source: Ints, target: Ints, times: Ints) -> Ints:
    """Work of every node: its duration, or for a waiting one what the same call takes where nothing held it back."""
    duration = graph.nodes["duration_ns"].to_numpy()
    waits = np.zeros(len(duration), dtype=np.bool_)
    into_end = target & 1 == 1
    waits[target[into_end] >> 1] = True
    if not waits.any():
        return duration
    latest = np.full(len(duration), np.iinfo(np.int64).min)
    np.maximum.at(latest, target[into_end] >> 1, times[source[into_end]])
    held = waits & (latest > times[0::2])
    frame = graph.nodes.select("name", "kind").with_columns(
        pl.Series("duration", duration), pl.Series("held", held), pl.Series("waits", waits)
    )
    # Communication and threads that wait have no work but that: what they take is the transfer, the edge's delay.
    frame = frame.with_columns(
        pl.col("duration").filter(~pl.col("held")).median().over("name", "kind").alias("free"),
        pl.col("duration").filter(~pl.col("held")).median().over("kind").alias("usual"),
        pl.col("kind").is_in([*gs.COMMUNICATION, gs.WAIT]).alias("idle"),
    )
    own = frame.select(
        pl.when(~pl.col("waits"))
        .then("duration")
        .when(pl.col("idle"))
        .then(0)
        .otherwise(pl.min_horizontal(pl.coalesce("free", "usual", pl.lit(0)), "duration"))
        .cast(pl.Int64)
        .alias("work")
    )
    return own["work"].to_numpy()


def _delays(classes: Classes, constant: Ints, slack: Ints) -> Ints:
    delay = np.where(classes.timed, constant[classes.edge], 0)
    return np.where(classes.given, slack, np.minimum(delay, slack))


def _arrivals(source: Ints, target: Ints, times: Ints, delay: Ints, work: Ints) -> tuple[Ints, Ints, Ints]:
    """When each point could have been reached at the latest source; that of the node itself counts for ends."""
    by_edge = times[source] + delay
    latest = np.full(len(times), np.iinfo(np.int64).min)
    np.maximum.at(latest, target, by_edge)
    own = np.full(len(times), np.iinfo(np.int64).min)
    own[1::2] = times[0::2] + work
    return by_edge, latest, own


def _binding(source: Ints, target: Ints, times: Ints, delay: Ints, work: Ints) -> Flags:
    """Edges whose source, without the delay, came after everything else that the target waited for (with delays)."""
    by_edge, latest, own = _arrivals(source, target, times, delay, work)
    order = np.lexsort((by_edge, target))
    sorted_target = target[order]
    last = np.append(sorted_target[1:] != sorted_target[:-1], True)
    # The best of the others: for the winner the runner-up, for all others the winner.
    runner_up = np.full(len(times), np.iinfo(np.int64).min)
    second = np.flatnonzero(~last & np.append(last[1:], False))
    runner_up[sorted_target[second]] = by_edge[order][second]
    wins = np.zeros(len(source), dtype=np.bool_)
    wins[order[last]] = True
    others = np.where(wins, runner_up[target], latest[target])
    return times[source] >= np.maximum(others, own[target])


def _medians(classes: Classes, slack: Ints, binding: Flags) -> tuple[Ints, Ints]:
    """Median slack of the binding edges of each class, and their number.

    A class of which no edge binds takes the median of its kind, as far as its own slacks allow it.
    """
    kinds = pl.Series(classes.kind).rank("dense").to_numpy()
    frame = pl.DataFrame(
        {"class": classes.edge, "kind": kinds[classes.edge], "slack": slack, "binding": binding & classes.timed}
    )
    bound = pl.col("slack").filter("binding")
    of_kind = frame.group_by("kind").agg(bound.median().alias("usual"))
    found = (
        frame.group_by("class")
        .agg(
            pl.col("kind").first(),
            bound.median().alias("median"),
            pl.col("slack").min().alias("least"),
            pl.col("binding").sum().alias("count"),
        )
        .join(of_kind, on="kind", how="left")
    )
    value = pl.coalesce("median", pl.min_horizontal("usual", "least")).round().cast(pl.Int64)
    constant = np.zeros(len(classes.kind), dtype=np.int64)
    counts = np.zeros(len(classes.kind), dtype=np.int64)
    constant[found["class"].to_numpy()] = found.select(value.alias("value"))["value"].to_numpy()
    counts[found["class"].to_numpy()] = found["count"].to_numpy()
    return constant, counts


def _residuals(source: Ints, target: Ints, times: Ints, delay: Ints, work: Ints) -> tuple[Ints, Ints]:
    by_edge, latest, own = _arrivals(source, target, times, delay, work)
    left = times - np.maximum(latest, own)
    node_residual = np.where(own[1::2] >= latest[1::2], left[1::2], 0)
    edge_residual = np.zeros(len(source), dtype=np.int64)
    order = np.lexsort((by_edge, target))
    last = order[np.append(target[order][1:] != target[order][:-1], True)] if len(order) else order
    carries = by_edge[last] > own[target[last]]
    edge_residual[last[carries]] = left[target[last[carries]]]
    return node_residual, edge_residual
