"""Which operators, with which input shapes, launch which kernels, and what does each combination cost?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.classify import stepped_work
from traceloom.analyze.kernel_kinds import kinds
from traceloom.analyze.kind_rules import KindOfWork
from traceloom.analyze.per_step import durations, per_step, whole_steps
from traceloom.analyze.remembered import of_each
from traceloom.analyze.stacked import TRACE, of_events, quotient, stacked, unstacked
from traceloom.model import Trace
from traceloom.model.frames import schema
from traceloom.model.result import Result

KEYS = ("op", "shapes", "types", "kernel", "kind")
SHAPES_SCHEMA = schema(
    "op shapes types kernel kind count total_ns mean_ns min_ns max_ns",
    "fraction mean_total_ns min_total_ns max_total_ns step_count",
    {"kind": KindOfWork},
)


@dataclass(frozen=True)
class KernelShapes(Result):
    """GPU work by the operator that launched it and the shapes of its inputs.

    Attributes:
        rows: One row per operator, input shapes, input types and kernel, the largest total first: op (the innermost
            operator around the launch; null where none is recorded), shapes and types (JSON text; null where not
            recorded), kernel, kind, count, total_ns, mean_ns (rounded down), min_ns, max_ns (of single pieces of work),
            fraction (of all GPU work), then per whole step mean_total_ns, min_total_ns, max_total_ns and step_count (in
            how many of them it occurs); null without whole steps.
        total_ns: Summed duration of all GPU work; the rows add up to it.
    """

    rows: pl.DataFrame
    total_ns: int


def kernel_shapes(trace: Trace) -> KernelShapes:
    """Add up GPU work by operator, input shapes and kernel."""
    return _of_each(trace)


@of_each
def _of_each(traces: Sequence[Trace]) -> Iterable[KernelShapes]:
    work = shaped_work(traces).with_columns(row=pl.struct(KEYS).rank("dense"))
    total = pl.col("total_ns")
    table = (
        work.group_by(TRACE, "row")
        .agg(pl.col(KEYS).first(), *durations(pl.col("ns")))
        .with_columns(fraction=quotient(total, total.sum().over(TRACE).clip(lower_bound=1)))
    )
    usual = per_step(
        work.select(TRACE, "row", "step", total_ns="ns"),
        [TRACE, "row"],
        ["total_ns"],
        stacked(map(whole_steps, traces)),
    )
    rows = table.join(usual, on=[TRACE, "row"], how="left").sort(
        [TRACE, "total_ns", "op", "kernel", "shapes", "types"],
        descending=[False, True, False, False, False, False],
        nulls_last=True,
    )
    return (KernelShapes(own, int(own["total_ns"].sum())) for own in unstacked(rows, traces, SHAPES_SCHEMA))


def shaped_work(traces: Sequence[Trace]) -> pl.DataFrame:
    """Every piece of GPU work with the operator around its launch: trace, event, step, op, kernel, ns, shapes, types,
    kind; see `stacked`.
    """
    work = stepped_work(traces).select(TRACE, "event", "step", "op", "ns", kernel="name")
    inputs = work.select(TRACE, event="op").join(
        stacked(trace.tensors[["event", "shapes", "types"]] for trace in traces),
        on=[TRACE, "event"],
        how="left",
        maintain_order="left",
    )
    operator = of_events(traces, work, "op", "name").alias("op")
    return work.with_columns(operator, inputs["shapes"], inputs["types"], stacked(map(kinds, traces))["kind"])
