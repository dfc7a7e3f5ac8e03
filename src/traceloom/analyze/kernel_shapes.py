"""Which operators, with which input shapes, launch which kernels, and what does each combination cost?"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.analyze.classify import gpu_work
from traceloom.analyze.kernel_kinds import kinds
from traceloom.analyze.kind_rules import KindOfWork
from traceloom.analyze.per_step import durations, per_step, whole_steps
from traceloom.model import Trace
from traceloom.model.frames import as_declared, schema
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
    work = shaped_work(trace)
    step = trace.events["step"][work["event"]]
    work = work.with_columns(step.alias("step")).with_columns(row=pl.struct(KEYS).rank("dense"))
    ns = pl.col("ns")
    whole = int(work["ns"].sum())
    table = work.group_by("row").agg(pl.col(KEYS).first(), *durations(ns), (ns.sum() / max(whole, 1)).alias("fraction"))
    usual = per_step(work.select("row", "step", total_ns="ns"), ["row"], ["total_ns"], whole_steps(trace))
    rows = (
        table.join(usual, on="row", how="left")
        .sort(
            ["total_ns", "op", "kernel", "shapes", "types"],
            descending=[True, False, False, False, False],
            nulls_last=True,
        )
        .pipe(as_declared, SHAPES_SCHEMA)
    )
    return KernelShapes(rows, whole)


def shaped_work(trace: Trace) -> pl.DataFrame:
    """Every piece of GPU work with the operator around its launch: event, op, kernel, ns, shapes, types, kind."""
    work = gpu_work(trace).select("event", "op", kernel="name", ns=pl.col("end_ns") - pl.col("start_ns"))
    inputs = work.select(event="op").join(
        trace.tensors[["event", "shapes", "types"]], on="event", how="left", maintain_order="left"
    )
    operator = trace.events["name"][work["op"]].alias("op")
    return work.with_columns(operator, inputs["shapes"], inputs["types"], kinds(trace)["kind"])
