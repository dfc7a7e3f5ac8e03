"""The same quantity in every step: what is usual, and how far do steps lie apart?"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from traceloom.analyze.remembered import per_trace
from traceloom.model import Trace
from traceloom.model.frames import schema


@per_trace
def whole_steps(trace: Trace) -> pl.DataFrame:
    """The steps that a spread is taken over: step (Int32), duration_ns; all that the recording holds completely."""
    return trace.steps.filter("complete").select("step", duration_ns=pl.col("end_ns") - pl.col("start_ns"))


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
        steps: Of `whole_steps`. A step in which a key does not occur counts as 0, because there it was not done.

    Returns:
        The keys, then for every value `mean_<value>` (Float64), `min_<value>` and `max_<value>` (Int64), and
        `step_count` (steps in which the key occurs). Without whole steps: no rows.
    """
    many = steps.height
    if not many:
        return pl.DataFrame(schema={**{key: frame.schema[key] for key in keys}, **spread_schema(*values)})
    inside = frame.filter(pl.col("step").is_in(pl.lit(steps["step"]).implode()))
    sums = inside.group_by(*keys, "step", maintain_order=True).agg(pl.col(values).sum().cast(pl.Int64))
    everywhere = pl.col("step").len() == many
    return sums.group_by(*keys, maintain_order=True).agg(
        *(
            statistic
            for v in values
            for statistic in (
                (pl.col(v).sum() / many).alias(f"mean_{v}"),
                pl.when(everywhere).then(pl.col(v).min()).otherwise(0).cast(pl.Int64).alias(f"min_{v}"),
                pl.col(v).max().alias(f"max_{v}"),
            )
        ),
        step_count=pl.len().cast(pl.Int64),
    )
