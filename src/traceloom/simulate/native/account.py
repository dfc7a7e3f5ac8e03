"""What the ranks do with their time: compute, communicate, copy, work on the host, or none of these."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.intervals import Spans, difference, merge, union
from traceloom.array_types import Ints
from traceloom.model import graph_schema as gs
from traceloom.model.frames import as_declared
from traceloom.model.graph import Graph
from traceloom.simulate.simulation import RANKS

# A moment in which several things go on counts for the first of them.
_KINDS = {
    "compute_ns": (gs.KERNEL,),
    "exposed_communication_ns": gs.COMMUNICATION,
    "memory_ns": (gs.COPY, gs.FILL),
    "host_ns": (gs.HOST, gs.THINK, gs.LAUNCH),
}


def rank_account(graph: Graph, begin_ns: int) -> pl.DataFrame:
    """The time of each rank from the beginning to the end of its last node, by what goes on.

    Args:
        graph: With the times in question.
        begin_ns: The beginning.

    Returns:
        Columns of `Simulation.ranks` without `before_ns`.
    """
    spans = graph.nodes.select(
        "rank",
        pl.col("kind").to_physical(),
        low=(pl.col("start_ns") - begin_ns).clip(lower_bound=0),  # by its clock, work may precede its launch
        high=(pl.col("start_ns") + pl.col("duration_ns") - begin_ns).clip(lower_bound=0),
    ).drop_nulls("rank")
    ranks, number = np.unique(spans["rank"].to_numpy(), return_inverse=True)
    kind, low, high = (spans[name].to_numpy() for name in ("kind", "low", "high"))
    end = np.zeros(ranks.size, dtype=np.int64)
    np.maximum.at(end, number, high)
    # The ranks one after the other on one line of time, so that one set of spans is that of all of them.
    far = int(end.max(initial=0)) + 1
    low, high = low + number * far, high + number * far

    def of_ranks(busy: Spans) -> Ints:
        total = np.zeros(ranks.size, dtype=np.int64)
        np.add.at(total, busy.start // far, busy.end - busy.start)
        return total

    account = {"rank": ranks, "end_ns": end}
    before: list[Spans] = []
    for column, kinds in _KINDS.items():
        chosen = np.isin(kind, [gs.NODE_KINDS.index(name) for name in kinds])
        busy = union(low[chosen], high[chosen])
        if column == "exposed_communication_ns":
            account["communication_ns"] = of_ranks(busy)
        account[column] = of_ranks(difference(busy, merge(*before)) if before else busy)
        before.append(busy)
    account["other_ns"] = end - np.sum([account[column] for column in _KINDS], axis=0)
    columns = {name: RANKS[name] for name in RANKS if name != "before_ns"}
    return pl.DataFrame(account).pipe(as_declared, columns)
