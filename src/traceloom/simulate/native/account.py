"""What the ranks do with their time: compute, communicate, copy, work on the host, or none of these."""

from __future__ import annotations

import polars as pl

from traceloom.analyze.intervals import Spans, difference, merge, union
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
        "kind",
        low=(pl.col("start_ns") - begin_ns).clip(lower_bound=0),  # by its clock, work may precede its launch
        high=pl.col("start_ns") + pl.col("duration_ns") - begin_ns,
    ).drop_nulls("rank")
    rows = []
    for (rank,), own in spans.group_by("rank", maintain_order=True):
        end = int(own["high"].max())  # type: ignore[arg-type]
        row: dict[str, int] = {"rank": int(rank), "end_ns": end}
        before: list[Spans] = []
        for column, kinds in _KINDS.items():
            chosen = own.filter(pl.col("kind").cast(pl.String).is_in(kinds))
            busy = union(chosen["low"].to_numpy(), chosen["high"].to_numpy())
            if column == "exposed_communication_ns":
                row["communication_ns"] = busy.total
            row[column] = (difference(busy, merge(*before)) if before else busy).total
            before.append(busy)
        row["other_ns"] = end - sum(row[column] for column in _KINDS)
        rows.append(row)
    columns = [name for name in RANKS if name != "before_ns"]
    account = pl.DataFrame(
        rows, schema=dict.fromkeys(["rank", "end_ns", "compute_ns", "communication_ns", *columns], pl.Int64)
    )
    return account.select(columns).pipe(as_declared, pl.Schema({name: RANKS[name] for name in columns})).sort("rank")
