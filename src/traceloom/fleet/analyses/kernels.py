"""GPU time by dimension, top kernels, shape coverage, and the history of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from traceloom.errors import UsageError, nearest
from traceloom.fleet.analyses.attribution import UNATTRIBUTED, add_owners
from traceloom.fleet.analyses.regressions import collect_by_capture, collect_by_job
from traceloom.fleet.store.schema import DIMENSIONS
from traceloom.trace.frames import Result

WORK_DIMENSIONS = ("kind", "bound", "device_model", "kernel", "op", "rank")
CAPTURE_DIMENSIONS = ("job", "torch", "code")
GPU_TIME_DIMENSIONS = (*WORK_DIMENSIONS, *CAPTURE_DIMENSIONS, *DIMENSIONS)
"""Dimensions by which GPU time can be divided."""

_SHAPE_KEYS = ("kernel", "op", "shapes", "types", "device_model")


@dataclass(frozen=True)
class GpuTimeBy(Result):
    """GPU time in captures, divided by dimensions.

    Attributes:
        by: The dimensions.
        rows: One row per combination of values (and time interval, `time_ns`), longest first: count
            (pieces of work), total_ns, fraction (of all rows, or of the interval's), captures;
            unknown values are `unattributed`.
    """

    by: tuple[str, ...]
    rows: pl.DataFrame


@dataclass(frozen=True)
class TopKernels(Result):
    """The kernels with the most GPU time or cycles.

    Attributes:
        rows: One row per kernel, most first: kind, count, total_ns, fraction (of all GPU time),
            mean_ns, cycles (of the part with a known clock, null without any), cycles_known_ns (GPU
            time of that part), shapes (number of distinct ones), captures, jobs, roofline_known_ns
            (GPU time with a cost model), roofline_ns (its time at the peaks), example (a capture of
            the job that spends most on it).
        total_ns: All GPU time, including that of kernels that are left out.
    """

    rows: pl.DataFrame
    total_ns: int


@dataclass(frozen=True)
class ShapeCoverage(Result):
    """Coverage of GPU time by the most common shapes, which a specialised kernel could serve.

    Attributes:
        rows: One row per kernel, operator, shapes, types and device model, longest first: number
            (from 1), count, total_ns, fraction (of the GPU time), covered_fraction (cumulative).
        total_ns: GPU time of all given kernels.
        unshaped_ns: The part of it without recorded shapes; it is in no row.
    """

    rows: pl.DataFrame
    total_ns: int
    unshaped_ns: int

    def needed(self, fraction: float) -> int | None:
        """Returns how many rows cover a fraction of the GPU time; None if all together do not."""
        enough = self.rows.filter(pl.col("covered_fraction") >= fraction)
        return None if not enough.height else int(enough["number"][0])


def divide_gpu_time(
    kernels: pl.LazyFrame,
    captures: pl.LazyFrame,
    owned: pl.DataFrame,
    by: Sequence[str],
    every_ns: int | None = None,
) -> GpuTimeBy:
    """Divides GPU time.

    Args:
        kernels: Rows of this table.
        captures: Rows of this table, of the same days.
        owned: Owners of jobs, of `compute_ownership_periods`.
        by: Of `GPU_TIME_DIMENSIONS`, outermost first.
        every_ns: Length of time intervals, by the start of the capture; None: a single one.

    Raises:
        UsageError: `no-such-dimension`.
    """
    for name in by:
        if name not in GPU_TIME_DIMENSIONS:
            hint = (
                nearest(name, GPU_TIME_DIMENSIONS) + f"there are {', '.join(GPU_TIME_DIMENSIONS)}"
            )
            raise UsageError(
                f"GPU time is not divided by `{name}`", slug="no-such-dimension", hint=hint
            )
    by = tuple(dict.fromkeys(by))
    times = [] if every_ns is None else ["time_ns"]
    capture_facts = captures.select("capture", "start_ns", *CAPTURE_DIMENSIONS)
    owner_dimensions = [name for name in by if name in DIMENSIONS]
    if owner_dimensions:
        capture_facts = add_owners(capture_facts, owned, owner_dimensions)
    if every_ns is not None:
        capture_facts = capture_facts.with_columns(
            time_ns=pl.col("start_ns") // every_ns * every_ns
        )
    work_dimensions = [name for name in by if name in WORK_DIMENSIONS]
    capture_dimensions = [name for name in by if name not in WORK_DIMENSIONS]
    # Group by capture first, as captures are few, and then by their attributes.
    rows = (
        kernels.group_by("capture", *work_dimensions)
        .agg(pl.col("count", "total_ns").sum())
        .join(capture_facts.select("capture", *times, *capture_dimensions), on="capture")
        .group_by(*times, *by)
        .agg(pl.col("count", "total_ns").sum(), captures=pl.col("capture").n_unique())
        .with_columns(pl.col(name).cast(pl.String).fill_null(UNATTRIBUTED) for name in by)
        .with_columns(
            whole_ns=pl.col("total_ns").sum().over(times) if times else pl.col("total_ns").sum()
        )
        .with_columns(
            fraction=pl.when(pl.col("whole_ns") > 0).then(pl.col("total_ns") / pl.col("whole_ns"))
        )
        .drop("whole_ns")
        .sort(
            *times,
            "total_ns",
            *by,
            descending=[*(False for _ in times), True, *(False for _ in by)],
        )
    )
    return GpuTimeBy(by, rows.collect())


def list_top_kernels(
    kernels: pl.LazyFrame,
    captures: pl.LazyFrame,
    sort: Literal["time", "cycles"] = "time",
    top: int = 100,
) -> TopKernels:
    """Ranks kernels by GPU time or by device cycles.

    Args:
        kernels: Rows of this table.
        captures: Rows of this table, of the same days.
        sort: Sort key; cycles are GPU time times the device clock, if telemetry was captured.
        top: Max rows.
    """
    has_clock, has_model = pl.col("clock_hz").is_not_null(), pl.col("roofline_ns").is_not_null()
    ns = pl.col("total_ns")
    kind_sums = kernels.group_by("kernel", "kind").agg(
        pl.col("count", "total_ns", "roofline_ns").sum(),
        cycles=(ns * pl.col("clock_hz") / 1e9).sum(),
        cycles_known_ns=ns.filter(has_clock).sum(),
        roofline_known_ns=ns.filter(has_model).sum(),
    )
    # A kernel may be of several kinds, by the operators that launch it: the one with most GPU time.
    kernel_sums = (
        kind_sums.sort("total_ns", "kind", descending=[True, False])
        .group_by("kernel", maintain_order=True)
        .agg(pl.col("kind").first(), pl.exclude("kind").sum())
    )
    kernel_totals = kernel_sums.with_columns(
        fraction=pl.when(ns.sum() > 0).then(ns / ns.sum()),
        total=ns.sum(),
        mean_ns=ns / pl.col("count"),
        cycles=pl.when(pl.col("cycles_known_ns") > 0).then("cycles"),
        roofline_ns=pl.when(pl.col("roofline_known_ns") > 0).then("roofline_ns"),
    )
    order = "cycles" if sort == "cycles" else "total_ns"
    ranked = (
        kernel_totals.sort(order, "kernel", descending=[True, False], nulls_last=True)
        .head(top)
        .collect()
    )
    # Distinct counts are computed only for the rows shown, on integer codes: strings take 50 %
    # longer.
    top_rows = kernels.with_columns(
        pl.col("kernel").cast(pl.Enum(ranked["kernel"].drop_nulls()), strict=False)
    ).drop_nulls("kernel")
    capture_times = top_rows.group_by("kernel", "capture").agg(ns.sum())
    kernel_usage = (
        capture_times.join(captures.select("capture", "job"), on="capture", how="left")
        .sort("total_ns", "capture", descending=[True, False])
        .group_by("kernel")
        .agg(
            captures=pl.len(),
            jobs=pl.col("job").drop_nulls().n_unique(),
            example=pl.col("capture").first(),
        )
    )
    shapes = (
        top_rows.select("kernel", "shapes")
        .drop_nulls()
        .unique()
        .group_by("kernel")
        .agg(shapes=pl.len())
    )
    rows = ranked.drop("total")
    for frame in pl.collect_all([kernel_usage, shapes]):
        rows = rows.join(
            frame.cast({"kernel": pl.String}), on="kernel", how="left", maintain_order="left"
        )
    total = int(ranked["total"][0]) if ranked.height else 0
    return TopKernels(rows.with_columns(pl.col("shapes").fill_null(0)), total)


def compute_shape_coverage(kernels: pl.LazyFrame, top: int = 1_000) -> ShapeCoverage:
    """Computes how much of the GPU time the most common shapes cover.

    Args:
        kernels: Rows of this table, possibly filtered.
        top: Max rows of the curve.
    """
    ns = pl.col("total_ns")
    parts = kernels.group_by(_SHAPE_KEYS).agg(pl.col("count").sum(), ns.sum())
    shaped = pl.col("shapes").is_not_null()
    sums = parts.select(total=ns.sum(), unshaped=ns.filter(~shaped).sum()).collect()
    total, unshaped = int(sums["total"][0]), int(sums["unshaped"][0])
    rows = (
        parts.filter(shaped)
        .sort("total_ns", *_SHAPE_KEYS, descending=[True, *(False for _ in _SHAPE_KEYS)])
        .head(top)
        .with_columns(
            number=pl.int_range(1, pl.len() + 1),
            fraction=ns / max(total, 1),
            covered_fraction=ns.cum_sum() / max(total, 1),
        )
        .collect()
    )
    return ShapeCoverage(rows, total, unshaped)


MAX_JOBS = 2_000


@dataclass(frozen=True)
class KernelHistory(Result):
    """Durations of a kernel by job.

    Attributes:
        rows: One row per job, by the time of its first capture, the last 2,000: start_ns, job,
            mean_ns (median over its captures of the mean duration of a piece of work), count,
            total_ns (of all its captures), capture (the first), code and torch (of that one).
        jobs: Number of jobs that ran it.
    """

    rows: pl.DataFrame
    jobs: int


def build_kernel_history(
    kernels: pl.LazyFrame, captures: pl.LazyFrame, kernel: str, shapes: str | None = None
) -> KernelHistory:
    """Builds the history of a kernel.

    Args:
        kernels: Rows of this table.
        captures: Rows of this table; a capture without a job counts as a job of its own.
        kernel: Its name.
        shapes: Of its inputs, as the rows have them; None: all.
    """
    work_rows = kernels.filter(pl.col("count") > 0, pl.col("kernel") == kernel)
    if shapes is not None:
        work_rows = work_rows.filter(pl.col("shapes") == shapes)
    capture_facts = captures.select(
        "capture", "start_ns", "code", "torch", job=pl.coalesce("job", "capture")
    )
    grouped = collect_by_capture(work_rows, capture_facts).group_by(
        "kernel", "job", "start_ns", "capture"
    )
    jobs = collect_by_job(grouped.agg(pl.col("count", "total_ns").sum()), ("kernel",))
    rows = jobs.tail(MAX_JOBS).join(
        capture_facts.select("capture", "code", "torch").collect(),
        on="capture",
        how="left",
        maintain_order="left",
    )
    history_rows = rows.select(
        "start_ns", "job", "count", "total_ns", "capture", "code", "torch", mean_ns="mean"
    )
    return KernelHistory(history_rows, jobs.height)
