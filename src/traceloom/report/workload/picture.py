"""What is drawn: few boxes for many nodes, or the neighbourhood of one node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.report.workload.network import NodeNetwork

MOST_BOXES = 48
MOST_NEIGHBOURS = 160
_FOLDED = r"\d+"  # numbers in names tell repetitions apart, which are drawn as one


@dataclass(frozen=True, slots=True)
class Box:
    """One box: a node, or all nodes of one kind and name.

    Attributes:
        title: Its name.
        kind: Kind of its nodes.
        note: What else is known, in words.
        count: Nodes in it.
        time_ns: Their time.
        bytes: Their bytes; None where none are known.
        place: Where it stands in the order, 0 to 1: the mean of its nodes.
        chosen: Whether it is what was asked for.
    """

    title: str
    kind: str
    note: str
    count: int
    time_ns: int
    bytes: int | None
    place: float
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """`count` dependencies of one kind: box `target` waits for box `source`."""

    source: int
    target: int
    kind: str
    count: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes and links; `left_out` says what is not shown, in words; empty where everything is."""

    title: str
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    left_out: str = ""


def collapsed(network: NodeNetwork, most: int = MOST_BOXES) -> Picture:
    """All nodes, those of one kind and name as one box.

    Numbers in names are ignored where that is needed to get few boxes; what has least time shares a box per kind.
    """
    nodes = network.nodes.select(
        "kind", "name", "time_ns", "bytes", "start_ns", pl.int_range(pl.len()).alias("row")
    ).with_columns(pl.col("name").alias("group"))
    if nodes.select("kind", "group").n_unique() > most:
        nodes = nodes.with_columns(pl.col("name").str.replace_all(_FOLDED, "#").alias("group"))
    moment = pl.coalesce("start_ns", "row").rank("ordinal") / max(nodes.height, 1)
    groups = (
        nodes.with_columns(moment.alias("place"))
        .group_by("kind", "group")
        .agg(
            pl.len().alias("count"),
            pl.col("time_ns").sum(),
            pl.when(pl.col("bytes").count() > 0).then(pl.col("bytes").sum()).alias("bytes"),
            pl.col("place").mean(),
        )
        .sort("time_ns", "count", "kind", "group", descending=[True, True, False, False])
        .with_row_index("rank_of_time")
    )
    kept = pl.col("rank_of_time") < most
    groups = groups.with_columns(pl.when(kept).then(pl.col("rank_of_time").cast(pl.Int64)).alias("box"))
    rest = groups.filter(~kept)["kind"].unique(maintain_order=True).sort().to_list()
    other = {kind: min(most, groups.height) + number for number, kind in enumerate(rest)}
    groups = groups.with_columns(
        pl.coalesce("box", pl.col("kind").replace_strict(other, default=None, return_dtype=pl.Int64)).alias("box")
    )
    # One box per group, or for several small groups of a kind
    merged = (
        groups.group_by("box")
        .agg(
            pl.col("group").first(),
            pl.col("kind").first(),
            pl.len().alias("names"),
            pl.col("count").sum(),
            pl.col("time_ns").sum(),
            pl.when(pl.col("bytes").count() > 0).then(pl.col("bytes").sum()).alias("bytes"),
            (pl.col("place") * pl.col("count")).sum() / pl.col("count").sum(),
        )
        .sort("box")
    )
    boxes = tuple(
        Box(
            row["group"] if row["names"] == 1 else f"{row['names']} other names",
            row["kind"],
            "",
            row["count"],
            row["time_ns"],
            row["bytes"],
            row["place"],
        )
        for row in merged.iter_rows(named=True)
    )
    box_of = nodes.join(groups.select("kind", "group", "box"), on=["kind", "group"], how="left", maintain_order="left")
    box = box_of["box"].to_numpy()
    edges = network.edges.select(
        pl.Series("source", box[network.edges["source"].to_numpy()]),
        pl.Series("target", box[network.edges["target"].to_numpy()]),
        "kind",
    )
    counted = edges.group_by("source", "target", "kind").len().sort("len", "source", "target", "kind", descending=True)
    links = tuple(Link(*row) for row in counted.iter_rows())
    hidden = int(groups.filter(~kept).height)
    left_out = f"{hidden} names with the least time share a box per kind" if hidden else ""
    return Picture("All nodes, by kind and name", boxes, links, left_out)


def neighbourhood(network: NodeNetwork, row: int, depth: int, most: int = MOST_NEIGHBOURS) -> Picture:
    """One node with everything up to `depth` dependencies away, on both sides; the nearest where that is too much."""
    source, target = network.edges["source"].to_numpy(), network.edges["target"].to_numpy()
    distance = {row: 0}
    cut = 0
    for ends, others, sign in ((target, source, -1), (source, target, 1)):
        front = np.array([row])
        for step in range(1, depth + 1):
            reached = np.unique(others[np.isin(ends, front)])
            fresh = [number for number in reached.tolist() if number not in distance]
            room = max(most - len(distance), 0)
            cut += max(len(fresh) - room, 0)
            fresh = fresh[:room]
            distance.update(dict.fromkeys(fresh, sign * step))
            front = np.array(fresh, dtype=np.int64)
            if not fresh:
                break
    rows = sorted(distance, key=lambda number: (distance[number], number))
    number_of = {each: number for number, each in enumerate(rows)}
    span = 2 * depth + 1
    boxes = []
    for number, each in enumerate(rows):
        node = network.nodes.row(each, named=True)
        note = f"node {node['id']}" + (f", rank {node['rank']}" if node["rank"] is not None else "")
        order = (distance[each] + depth) / span + number / (1000 * span * len(rows))
        box = Box(node["name"], node["kind"], note, 1, node["time_ns"], node["bytes"], order, chosen=each == row)
        boxes.append(box)
    inside = np.flatnonzero(np.isin(source, rows) & np.isin(target, rows))
    links = tuple(
        Link(number_of[int(source[k])], number_of[int(target[k])], network.edges["kind"][int(k)], 1) for k in inside
    )
    left_out = f"{cut} more nodes are as near" if cut else ""
    node = network.nodes.row(row, named=True)
    return Picture(f"Node {node['id']} and what is up to {depth} dependencies away", tuple(boxes), links, left_out)
