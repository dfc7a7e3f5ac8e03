"""How much of each kernel and operator does a step hold, and how far do steps lie apart?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.classify import gpu_work
from traceloom.analyze.per_step import per_step, spread_schema, whole_steps
from traceloom.analyze.phases import meaning
from traceloom.model import Trace
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

KERNELS, OPERATORS = (schema("name", spread_schema(time, "call_count")) for time in ("total_ns", "self_ns"))


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
    every = gpu_work(trace)
    work = every.select(
        "name",
        trace.events["step"].gather(every["event"]),
        total_ns=pl.col("end_ns") - pl.col("start_ns"),
        call_count=pl.lit(1, pl.Int64),
    )
    tree = forest(trace)
    is_op = meaning(trace).op
    ops = np.flatnonzero(is_op)
    self_ns = tree.self_ns(is_op, tree.nearest(is_op))[ops]
    op_rows = trace.events[["name", "step"]][tree.row[ops]].with_columns(
        pl.Series("self_ns", self_ns), pl.lit(1, pl.Int64).alias("call_count")
    )
    kernels, operators = (
        per_step(rows, ["name"], [time, "call_count"], steps)
        .pipe(as_declared, schema)
        .sort(f"mean_{time}", "name", descending=[True, False])
        for rows, time, schema in ((work, "total_ns", KERNELS), (op_rows, "self_ns", OPERATORS))
    )
    return WorkPerStep(steps.height, kernels, operators)
