"""Device time as a tree: each part of each part, the small ones together, and all levels with the same sum."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.errors import UsageError
from traceloom.fleet.attribution import Attribution
from traceloom.model.result import Result

OTHERS = "(others)"
"""The value of the parts that are too small to stand alone."""

MOST_ROWS = 5_000
"""Of a tree; parts stand together until there are no more."""


@dataclass(frozen=True)
class AttributionTree(Result):
    """Device time and what it cost, as a tree.

    Attributes:
        by: The dimensions, outermost first.
        currency: Of the cost; None without prices.
        rows: Each part before its parts, the largest first: time_ns (of the stretch of time, null where all is in one),
            values (of the dimensions, outermost first; none for everything), and the columns of `Attribution.leaves`.
    """

    by: tuple[str, ...]
    currency: str | None
    rows: pl.DataFrame


def tree(divided: Attribution, top: int) -> AttributionTree:
    """Arrange device time as a tree.

    Args:
        divided: Its leaves.
        top: So many parts of each part stand alone, the largest over all time; fewer where there are too many rows.

    Raises:
        UsageError: `too-many-rows`: there are too many stretches of time.
    """
    while True:
        rows = _rows(divided, top)
        if rows.height <= MOST_ROWS:
            return AttributionTree(divided.by, divided.currency, rows)
        if top == 1:
            raise UsageError(
                f"the answer has {rows.height:,} rows, more than {MOST_ROWS:,}", slug="too-many-rows",
                hint="ask for less time, longer stretches or fewer dimensions",
            )  # fmt: skip
        top //= 2


def _rows(divided: Attribution, top: int) -> pl.DataFrame:
    by, leaves = divided.by, divided.leaves
    orders = [f"order {name}" for name in by]
    for depth, (name, order) in enumerate(zip(by, orders, strict=True)):
        number = pl.int_range(1, pl.len() + 1)
        ranked = (
            leaves.group_by(by[: depth + 1])
            .agg(pl.col("device_ms").sum())
            .sort(pl.col(name) == OTHERS, "device_ms", name, descending=[False, True, False])
            .with_columns((number.over(by[:depth]) if depth else number).clip(upper_bound=top + 1).alias(order))
        )
        leaves = leaves.join(ranked.drop("device_ms"), on=by[: depth + 1], nulls_equal=True).with_columns(
            pl.when(pl.col(order) > top).then(pl.lit(OTHERS)).otherwise(inner).alias(inner) for inner in by[depth:]
        )
    times = [key for key in ("time_ns",) if key in leaves.columns]
    levels = []
    for depth in range(len(by) + 1):
        keys = (*orders[:depth], *by[:depth])
        level = Attribution(keys, divided.currency, leaves).level(len(keys))
        values = pl.concat_list(by[:depth]) if depth else pl.lit([], pl.List(pl.String))
        levels.append(level.with_columns(values.alias("values")).drop(by[:depth]))
    every = pl.concat(levels, how="diagonal").with_columns(pl.col(orders).fill_null(0))
    if not times:
        every = every.with_columns(time_ns=pl.lit(None, pl.Int64))
    return every.sort("time_ns", *orders).drop(orders).select("time_ns", "values", pl.exclude("time_ns", "values"))
