"""Sends and receives against those of the other pipelines: what is the order of a pipeline, and what is late."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.across.matched import Matched

Ints = NDArray[np.int64]


def pair_excess(matched: Matched, stages: pl.DataFrame, spent: Ints, base: Ints, last: Ints) -> tuple[Ints, Ints, Ints]:
    """What the last arrivers of pairs spent more than the same stage of the other pipelines in the same step.

    In a pipeline one stage computes while the next waits for it: comparing the two says nothing. The counterpart of a
    pair is the pair of another pipeline between the same stages, as many pairs into the same step.

    Args:
        matched: The collectives.
        stages: rank, pipeline, stage (of `pipeline`).
        spent: What each row of `parts` spent since counting began; shape (parts, classes).
        base: Where counting began for each row; -1 where that is not known.
        last: The row of the last arriver of each instance.

    Returns:
        The numbers of the instances that have a counterpart, their excess by class against the median, and how late
        the last arrivers of the counterparts came (median).
    """
    nothing = np.zeros(0, dtype=np.int64)
    none = nothing, np.zeros((0, spent.shape[1]), dtype=np.int64), nothing
    pairs = matched.instances.with_row_index("number").filter(
        (pl.col("kind") == "send_recv") & (pl.col("recorded") == 2)
    )
    if not pairs.height or not stages.height:
        return none
    rows = _keyed(matched, pairs, stages)
    rows = rows.filter(pl.Series(base[rows["row"].to_numpy()] >= 0))
    last_rows = rows.filter(pl.col("row").is_in(pl.Series(last).implode()))
    both = last_rows.join(rows, on=_KEY, how="inner", suffix="_other").filter(
        pl.col("number") != pl.col("number_other")
    )
    if not both.height:
        return none
    columns = [f"c{number}" for number in range(spent.shape[1])]
    counterparts = pl.DataFrame(spent[both["row_other"].to_numpy()], schema=columns).with_columns(
        both["number"], both["row"], late=matched.parts["late_ns"].gather(both["row_other"])
    )
    middle = counterparts.group_by("number", "row", maintain_order=True).agg(
        pl.col(*columns, "late").median().round().cast(pl.Int64)
    )
    excess = spent[middle["row"].to_numpy()] - middle.select(columns).to_numpy()
    return middle["number"].to_numpy().astype(np.int64), excess, middle["late"].to_numpy()


_KEY = ["step", "side", "from", "to", "nth"]


def _keyed(matched: Matched, pairs: pl.DataFrame, stages: pl.DataFrame) -> pl.DataFrame:
    """Rows of parts of pairs: number (of the instance), row, and what counterparts have in common."""
    parts = matched.parts.with_row_index("row").select("row", "instance", "rank", "sends")
    pair_times = pairs.select("number", "instance", "step", "met_ns")
    staged = parts.join(pair_times, on="instance", how="inner", maintain_order="left").join(
        stages.select("rank", "pipeline", "stage"), on="rank", how="inner", maintain_order="left"
    )
    ends = staged.select("number", "sends", "stage")
    for word, sends in (("from", True), ("to", False)):
        side = ends.filter(pl.col("sends") == sends).select("number", pl.col("stage").alias(word))
        staged = staged.join(side, on="number", how="inner", maintain_order="left")
    ordered = staged.sort("met_ns", "number").with_columns(
        pl.int_range(pl.len()).over("step", "rank", "sends", "from", "to").alias("nth"),
        pl.col("sends").alias("side"),
    )
    return ordered.select("number", pl.col("row").cast(pl.Int64), *_KEY)
