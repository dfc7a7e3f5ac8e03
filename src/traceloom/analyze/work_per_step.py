"""How much of each kernel and operator does a step hold, and how far do steps lie apart?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.classify import stepped_work
from traceloom.analyze.per_step import per_step, spread_schema, whole_steps
from traceloom.analyze.phases import meaning
from traceloom.analyze.remembered import of_each
from traceloom.analyze.stacked import TRACE, stacked, unstacked
from traceloom.model import Trace
from traceloom.model.frames import schema
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
    return _of_each(trace)


@of_each
def _of_each(traces: Sequence[Trace]) -> Iterable[WorkPerStep]:
    steps = [whole_steps(trace) for trace in traces]
    kernels, operators = (
        per_step(
            rows.with_columns(call_count=pl.lit(1, pl.Int64)), [TRACE, "name"], [time, "call_count"], stacked(steps)
        ).sort(TRACE, f"mean_{time}", "name", descending=[False, True, False])
        for rows, time in (
            (stepped_work(traces).rename({"ns": "total_ns"}), "total_ns"),
            (stacked(map(_operators, traces)), "self_ns"),
        )
    )
    counts = (whole.height for whole in steps)
    return map(WorkPerStep, counts, unstacked(kernels, traces, KERNELS), unstacked(operators, traces, OPERATORS))


def _operators(trace: Trace) -> pl.DataFrame:
    """Each call of an operator: name, step, self_ns."""
    tree = forest(trace)
    is_op = meaning(trace).op
    ops = np.flatnonzero(is_op)
    self_ns = tree.self_ns(is_op, tree.nearest(is_op))[ops]
    return trace.events[["name", "step"]][tree.row[ops]].hstack([pl.Series("self_ns", self_ns, dtype=pl.Int64)])
