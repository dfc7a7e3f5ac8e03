"""Which ranks and lanes a picture of before and after shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

FEW_RANKS = 3  # up to here every rank is shown
_HOST_LANES, _DEVICE_LANES = 2, 4  # of a rank
_DEVICE_WORK = (gs.KERNEL, gs.COPY, gs.FILL)


@dataclass(frozen=True, slots=True)
class LanesShown:
    """What is shown.

    Attributes:
        ranks: The ranks in the order they are shown, each with why; "" where all are shown.
        of: How many ranks there are.
        lanes: Rows of the graph's lanes in the order they are shown: lane, rank, kind, name, with the columns `title`.
        left_out: Lanes of these ranks with work that are not shown.
    """

    ranks: dict[int, str]
    of: int
    lanes: pl.DataFrame
    left_out: int

    def sentence(self) -> str:
        """The choice in words; empty where everything is drawn."""
        sentences = []
        if len(self.ranks) < self.of:
            named = "; ".join(f"rank {rank} ({why})" for rank, why in self.ranks.items())
            sentences.append(f"Of {self.of} ranks these are drawn: {named}.")
        if self.left_out:
            omitted = "thread or stream that does" if self.left_out == 1 else "threads and streams that do"
            sentences.append(
                f"Of each rank {_HOST_LANES} threads and {_DEVICE_LANES} streams are drawn: first those that "
                f"communicate or decide how long it takes, then the busiest; {self.left_out} {omitted} less are not."
            )
        return " ".join(sentences)


def choose(graph: Graph, ranks: pl.DataFrame, changed: Bools, paths: Sequence[Ints]) -> LanesShown:
    """The ranks that matter, and their lanes.

    The slowest, the one that gains most, the median one; the one whose work decides how long it takes, before and
    after; and the one that the changes are about, where they are about one.

    Args:
        graph: The graph as measured.
        ranks: rank, before_ns, after_ns, saved_ns of each rank, as `WhatIf.ranks`.
        changed: What the changes are about, shape (nodes,).
        paths: The nodes of the critical path before and after.
    """
    roles = _roles(graph, ranks, changed, paths)
    busy = (
        graph.nodes.lazy()
        .filter(pl.col("lane").is_not_null(), pl.col("duration_ns") > 0, pl.col("rank").is_in(list(roles)))
        .group_by("lane")
        .agg(
            busy=pl.col("duration_ns").filter(~pl.col("kind").is_in([gs.WAIT, gs.THINK])).sum(),
            count=pl.len(),
            talks=pl.col("kind").is_in(list(gs.COMMUNICATION)).any(),
        )
        .collect()
    )
    on_path = graph.nodes.select("lane", "duration_ns")[np.concatenate(paths)].drop_nulls().group_by("lane").agg(
        decides=pl.col("duration_ns").sum()
    )  # fmt: skip
    lanes = graph.lanes.join(busy, on="lane").join(on_path, on="lane", how="left").with_columns(
        pl.col("kind").cast(pl.String), pl.col("decides").fill_null(0)
    )  # fmt: skip
    # the thread that records most, and then those that decide how long it takes or communicate themselves (gloo)
    main = (pl.col("count") == pl.col("count").max().over("rank")).alias("main")
    host = lanes.filter(kind="host").with_columns(main)
    by = ["rank", "main", "decides", "talks", "count", "lane"]
    host = host.sort(by, descending=[False, True, True, True, True, False])
    by = ["rank", "talks", "decides", "busy", "lane"]
    device = lanes.filter(kind="device").sort(by, descending=[False, True, True, True, False])
    kept = pl.concat(
        [
            device.group_by("rank", maintain_order=True).head(_DEVICE_LANES),
            host.drop("main").group_by("rank", maintain_order=True).head(_HOST_LANES),
        ],
        how="diagonal_relaxed",
    )
    several = kept.filter(kind="device")["device"].n_unique() > 1
    title = pl.when(pl.lit(several) & (pl.col("kind") == "device") & pl.col("device").is_not_null()).then(
        pl.format("GPU {} {}", "device", "name")
    )
    position = pl.col("rank").replace_strict({rank: number for number, rank in enumerate(roles)}, return_dtype=pl.Int64)
    shown = kept.with_columns(title=title.otherwise("name")).sort(
        position, pl.col("kind") == "device", "device", "stream", "lane", nulls_last=True
    )
    return LanesShown(roles, max(ranks.height, 1), shown, busy.height - shown.height)


def _roles(graph: Graph, ranks: pl.DataFrame, changed: Bools, paths: Sequence[Ints]) -> dict[int, str]:
    every = ranks["rank"].to_list()
    if len(every) <= FEW_RANKS:
        return dict.fromkeys(every, "")
    work = pl.when(pl.col("kind").is_in(list(_DEVICE_WORK))).then("duration_ns").otherwise(0)
    own = graph.nodes.with_columns(changed=pl.Series(changed)).group_by("rank").agg(
        computes=work.sum(), changes=pl.col("duration_ns").filter("changed").sum()
    )  # fmt: skip
    by_rank = ranks.join(own, on="rank", how="left").fill_null(0)
    # ranks that wait for each other take equally long: of these the one that computes longest is the slowest
    order = by_rank.sort("before_ns", "computes", "rank")["rank"].to_list()
    gains = by_rank.sort("saved_ns", "changes", -pl.col("rank"))["rank"].to_list()
    changes = by_rank.sort("changes", -pl.col("rank"))
    deciding = []  # the rank that most of each path belongs to
    for path in paths:
        spent = graph.nodes.select("rank", "work_ns")[path].drop_nulls().group_by("rank").agg(pl.col("work_ns").sum())
        deciding += spent.sort("work_ns", -pl.col("rank"))["rank"].to_list()[-1:]
    words = ("decides how long it takes",) if len(set(deciding)) == 1 else ("decides it before", "decides it after")
    places = list(zip(deciding, words, strict=False))
    places += [(order[-1], "the slowest"), (gains[-1], "gains most")]
    if changes["changes"].sum() and changes["changes"][-1] > 2 * changes["changes"].median():  # type: ignore[operator]
        places.append((changes["rank"][-1], "changed most"))
    places.append((order[(len(order) - 1) // 2], "the median one"))
    roles: dict[int, str] = {}
    for rank, role in places:
        roles[rank] = f"{roles[rank]}, {role}" if rank in roles else role
    return roles
