"""The same quantity in every step: what is usual, and how far do steps lie apart?"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from traceloom.analyze.remembered import per_trace
from traceloom.analyze.stacked import TRACE, quotient
from traceloom.model import Trace
from traceloom.model.frames import schema


@per_trace
def whole_steps(trace: Trace) -> pl.DataFrame:
    """The steps that a spread is taken over: step (Int32), how `many` there are; all that are recorded completely."""
    return trace.steps.filter("complete").select("step", many=pl.len())


def durations(ns: pl.Expr) -> list[pl.Expr]:
    """Number, sum, mean (rounded down), least and most of the durations in a group."""
    values = {"total": ns.sum(), "mean": ns.sum() // pl.len(), "min": ns.min(), "max": ns.max()}
    return [pl.len().alias("count"), *(value.alias(f"{name}_ns") for name, value in values.items())]


def spread_schema(*values: str) -> pl.Schema:
    """The columns that `per_step` gives for these values, without the keys."""
    return schema(*(f"{how}_{value}" for value in values for how in ("mean", "min", "max")), "step_count")


def per_step(frame: pl.DataFrame, keys: Sequence[str], values: Sequence[str], steps: pl.DataFrame) -> pl.DataFrame:
    """Sums per key and step, told as mean, least and most over the steps.

    Args:
        frame: Rows with the `keys`, a column `step` (null outside all steps; such rows are left out) and `values`.
        keys: What a row of the answer stands for.
        values: Integer columns to add up, each named `something_ns`, `something_bytes` or `something_count`.
        steps: Of `whole_steps`. A step in which a key does not occur counts as 0, because there it was not done. Of
            several traces (`stacked`) the frame has the column `trace`, too, which is one of the keys.

    Returns:
        The keys, then for every value `mean_<value>` (Float64), `min_<value>` and `max_<value>` (Int64), and
        `step_count` (steps in which the key occurs). Without whole steps: no rows.
    """
    if not steps.height:
        return pl.DataFrame(schema={**{key: frame.schema[key] for key in keys}, **spread_schema(*values)})
    inside = frame.join(steps, on=steps.columns[:-1], how="inner", maintain_order="left")
    many = pl.col("many").first()
    sums = inside.group_by(*keys, "step", maintain_order=True).agg(pl.col(values).sum().cast(pl.Int64), many)
    everywhere = pl.len() == many
    spread = sums.group_by(*keys, maintain_order=True).agg(
        *(
            statistic
            for v in values
            for statistic in (
                pl.col(v).sum().alias(f"mean_{v}"),
                pl.when(everywhere).then(pl.col(v).min()).otherwise(0).cast(pl.Int64).alias(f"min_{v}"),
                pl.col(v).max().alias(f"max_{v}"),
            )
        ),
        many,
        step_count=pl.len().cast(pl.Int64),
    )
    by: int = steps["many"][0]
    totals = [pl.col(f"mean_{v}") for v in values]
    means = [quotient(total, pl.col("many")) if TRACE in keys else total / by for total in totals]
    spread = spread.with_columns(means)
    spread.drop_in_place("many")
    return spread
