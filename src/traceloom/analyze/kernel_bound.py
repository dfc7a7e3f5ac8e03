"""What holds each piece of GPU work back: calculating, moving bytes, or merely being short?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.classify import stepped_work
from traceloom.analyze.exclusive import SHARES, shares
from traceloom.analyze.kernel_kinds import kinds
from traceloom.analyze.kind_rules import KindOfWork
from traceloom.analyze.per_step import per_step, whole_steps
from traceloom.analyze.remembered import of_each
from traceloom.analyze.roofline import Given, modelled
from traceloom.analyze.stacked import TRACE, stacked, unstacked
from traceloom.model import Trace
from traceloom.model.frames import schema
from traceloom.model.result import Result

BOUNDS = ("compute", "memory", "latency", "unknown")
BoundType = pl.Enum(BOUNDS)

SHORT_NS = 10_000
"""Work shorter than this can be bound by latency: starting and ending a kernel takes some microseconds by itself."""

FAR = 0.25
"""... where it would need less than this share of its time at the nearer of the two ceilings."""

VERY_FAR = 0.05
"""Work of any length that would need less than this is bound by neither: too little runs at once, or in turn."""

BOUND_SCHEMA = schema("device bound count sum_ns exclusive_ns fraction", {"bound": BoundType})
KIND_SCHEMA = schema("kind bound count sum_ns roofline_ns", {"kind": KindOfWork, "bound": BoundType})


@dataclass(frozen=True)
class KernelBounds(Result):
    """GPU time by what bounds it. Definitions: docs/concepts/kernel-kinds.md.

    Attributes:
        bounds: One row per device and bound, also where it is 0: device, bound (compute, memory, latency, unknown),
            count, sum_ns, exclusive_ns, fraction (of the sum; null without any). Sums add up to all GPU work, exclusive
            times to the device's busy time.
        kinds: The same sums per kind, all devices together: kind, bound, count, sum_ns, roofline_ns (time at the nearer
            ceiling; null where unknown).
        per_step: Per device and bound the mean, least and most over whole steps of count, sum_ns and exclusive_ns.
        known_fraction: Share of the summed time whose bound is known; None without GPU work.
    """

    bounds: pl.DataFrame
    kinds: pl.DataFrame
    per_step: pl.DataFrame
    known_fraction: float | None


def kernel_bounds(trace: Trace, peak: Given = None, capture: Trace | None = None) -> KernelBounds:
    """Account for the time of each GPU by what bounds it.

    Args:
        trace: The trace.
        peak: The device's peak where the trace does not name a known one, as for `roofline`.
        capture: The recording of the capture of its graphs, as for `roofline`.
    """
    return _kernel_bounds(trace, peak, capture)


@of_each
def _kernel_bounds(traces: Sequence[Trace], peak: Given, capture: Trace | None) -> Iterable[KernelBounds]:
    work = _bounds(traces, peak, capture)
    bound_shares = shares(traces, work, "bound", BOUNDS)
    by_kind = (
        work.group_by(TRACE, "kind", "bound")
        .agg(
            pl.len().alias("count"),
            pl.col("ns").sum().alias("sum_ns"),
            pl.when(pl.col("roofline_ns").is_not_null().all()).then(pl.col("roofline_ns").sum()).alias("roofline_ns"),
        )
        .sort(TRACE, "kind", "bound")
    )
    steps = stacked(map(whole_steps, traces))
    spread = per_step(bound_shares.steps, [TRACE, "device", "bound"], list(SHARES), steps)
    for parts, of_kinds, usual in zip(
        unstacked(bound_shares.parts, traces, BOUND_SCHEMA),
        unstacked(by_kind, traces, KIND_SCHEMA),
        unstacked(spread, traces),
        strict=True,
    ):
        whole = int(of_kinds["sum_ns"].sum())
        known_ns = int(of_kinds.filter(pl.col("bound") != "unknown")["sum_ns"].sum())
        yield KernelBounds(parts, of_kinds, usual, known_ns / whole if whole else None)


def bounds(trace: Trace, peak: Given = None, capture: Trace | None = None) -> pl.DataFrame:
    """The bound of every piece of GPU work: event, device, start_ns, end_ns, ns, kind, roofline_ns, bound."""
    return _bounds([trace], peak, capture).drop(TRACE)


def _bounds(traces: Sequence[Trace], peak: Given, capture: Trace | None) -> pl.DataFrame:
    columns = (TRACE, "event", "device", "start_ns", "end_ns", "ns")
    work = stepped_work(traces)[columns].hstack([stacked(map(kinds, traces))["kind"]])
    models = stacked(modelled(trace, peak, capture) for trace in traces)
    model = models.select(TRACE, "event", "roofline_ns", modelled=pl.col("bound").cast(pl.String))
    ceiling = pl.col("roofline_ns")
    ns = pl.col("ns")
    latency = ((ns < SHORT_NS) & (ceiling < FAR * ns)) | (ceiling < VERY_FAR * ns)
    bound = pl.when(ceiling.is_null() | pl.col("modelled").is_null()).then(pl.lit("unknown"))
    return (
        work.join(model, on=[TRACE, "event"], how="left", maintain_order="left")
        .with_columns(bound.when(latency).then(pl.lit("latency")).otherwise("modelled").cast(BoundType).alias("bound"))
        .drop("modelled")
    )
