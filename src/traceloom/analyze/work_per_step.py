"""How much of each kernel and operator does a step hold, and how far do steps lie apart?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.per_step import per_step, whole_steps
from traceloom.analyze.phases import meaning
from traceloom.model import Trace
from traceloom.model.category import GPU_WORK
from traceloom.model.result import Result

_SPREAD = {"mean_{}": pl.Float64(), "min_{}": pl.Int64(), "max_{}": pl.Int64()}


def _schema(*values: str) -> pl.Schema:
    spread = {how.format(value): kind for value in values for how, kind in _SPREAD.items()}
    return pl.Schema({"name": pl.String(), **spread, "step_count": pl.Int64()})


KERNELS = _schema("total_ns", "call_count")
OPERATORS = _schema("self_ns", "call_count")


@dataclass(frozen=True)
class WorkPerStep(Result):
    """Kernels and operators of a usual step.

    Attributes:
        steps: Number of whole steps that the figures are taken over.
        kernels: name, mean_total_ns, min_total_ns, max_total_ns (summed duration of such GPU work launched in one
            step), mean_call_count, min_call_count, max_call_count, step_count (steps in which it occurs); the largest
            mean first. Over the steps, `mean * steps` is the sum.
        operators: The same with the operators' self time on the host.
    """

    steps: int
    kernels: pl.DataFrame
    operators: pl.DataFrame


def work_per_step(trace: Trace) -> WorkPerStep:
    """Add up kernels and operators per step; work belongs to the step that launched it. Without steps: no rows."""
    steps = whole_steps(trace)
    work = (
        trace.events.lazy()
        .filter(pl.col("category").is_in(GPU_WORK), pl.col("step").is_not_null())
        .select("name", "step", total_ns=pl.col("duration_ns").clip(lower_bound=0), call_count=pl.lit(1, pl.Int64))
        .collect()
    )
    tree = forest(trace)
    is_op = meaning(trace).op
    ops = np.flatnonzero(is_op)
    self_ns = tree.self_ns(is_op, tree.nearest(is_op))[ops]
    op_rows = (
        trace.events.select("name", "step")[tree.row[ops]]
        .with_columns(pl.Series("self_ns", self_ns), pl.lit(1, pl.Int64).alias("call_count"))
        .drop_nulls("step")
    )
    return WorkPerStep(steps.height, _spread(work, KERNELS, steps), _spread(op_rows, OPERATORS, steps))


def _spread(rows: pl.DataFrame, schema: pl.Schema, steps: pl.DataFrame) -> pl.DataFrame:
    values = [name.removeprefix("mean_") for name in schema if name.startswith("mean_")]
    spread = per_step(rows, ["name"], values, steps)
    first = f"mean_{values[0]}"
    return spread.select(list(schema)).cast(schema).sort(first, "name", descending=[True, False])
