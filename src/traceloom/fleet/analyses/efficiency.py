"""Computes the efficiency of a fleet (topline), and the savings from fixing findings.

No single metric suffices: a device can be busy without computing, draw power while it waits, or
reach its peak FLOP/s on work that is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import polars as pl

from traceloom.agent.topline import compute_relative_peak, find_device_model
from traceloom.errors import UsageError, nearest
from traceloom.fleet.analyses.attribution import (
    DEVICE_DIMENSIONS,
    JOB_DIMENSIONS,
    UNATTRIBUTED,
    add_owners,
    divide_device_time,
)
from traceloom.fleet.store.schema import UNALLOCATED, UNREACHABLE
from traceloom.trace.frames import Result

REFERENCE_DEVICE = "A100 SXM 80GB"
"""The device that defines reference-device hours."""

MIN_JOBS = 10
"""Min jobs for a correlation of two metrics."""
_RANKED_DIGITS = 12

METRICS = {
    "device_use": "share of the device time that is held in which a job computes",
    "flop_rate": "FLOPs per second of device time that is held, at least",
    "compute_use": "the same as a share of what the matrix units can do at most",
    "power_w": "watts of a device that is held",
    "roofline_fraction": "share of the roofline that steps reach, mean over captures",
    "mfu": "matrix FLOPs of the model at their peak, over the step, mean over captures",
    "reference_hours_per_byte": "device hours, in hours of the reference device, per byte of input",
}
"""Descriptions of metrics, by name."""


@dataclass(frozen=True)
class FleetTopline(Result):
    """Topline metrics of everything with device time.

    Attributes:
        by: Dimension of a row, of `ATTRIBUTION_DIMENSIONS`; "": a single row.
        rows: Most device time first: the value of `by`, device_hours (held), flop_rate_high (max
            FLOP/s), and `METRICS`; null if not measured, or if a device's data sheet is unknown.
        correlations: One row per pair of metrics: first, second, jobs (for which both are known),
            correlation (Spearman's, -1 to 1; null below ten jobs, and if a metric is constant).
        reference: The device that defines reference hours.
    """

    by: str
    rows: pl.DataFrame
    correlations: pl.DataFrame
    reference: str


def compute_fleet_topline(
    usage: pl.LazyFrame,
    owned: pl.DataFrame,
    captures: pl.LazyFrame,
    by: str = "",
    reference: str = REFERENCE_DEVICE,
) -> FleetTopline:
    """Computes the topline.

    Args:
        usage: Rows of `usage_minute` or `usage_hour`.
        owned: Owners of jobs, of `compute_ownership_periods`.
        captures: Rows of this table, of the same days.
        by: Of `ATTRIBUTION_DIMENSIONS`; "": a single row.
        reference: A device with a data sheet.

    Raises:
        UsageError: `no-such-dimension`; `no-such-device`: there is no data sheet of the reference.
    """
    if find_device_model(reference) is None:
        raise UsageError(f"there is no data sheet of `{reference}`", slug="no-such-device")
    rows = _compute_topline_rows(usage, owned, captures, by, reference)
    job_rows = (
        rows if by == "job" else _compute_topline_rows(usage, owned, captures, "job", reference)
    )
    pairs = []
    for first, second in combinations(METRICS, 2):
        known = (
            job_rows.select(first, second)
            .drop_nulls()
            .filter(pl.all_horizontal(pl.all().is_finite()))
            # The last digits of a sum depend on the order of its parts: they must not rank jobs.
            .select(pl.all().round_sig_figs(_RANKED_DIGITS))
        )
        value = (
            known.select(pl.corr(first, second, method="spearman")).item()
            if known.height >= MIN_JOBS
            else None
        )
        pairs.append(
            (first, second, known.height, None if value is None or value != value else value)  # noqa: PLR0124
        )
    columns = {"first": pl.String, "second": pl.String, "jobs": pl.Int64, "correlation": pl.Float64}
    return FleetTopline(by, rows, pl.DataFrame(pairs, schema=columns, orient="row"), reference)


def _compute_topline_rows(
    usage: pl.LazyFrame, owned: pl.DataFrame, captures: pl.LazyFrame, by: str, reference: str
) -> pl.DataFrame:
    keys = [by] if by else []
    held_usage = usage.filter(~pl.col("state").is_in((UNALLOCATED, UNREACHABLE)))
    leaves = divide_device_time(held_usage, owned, [*keys, "device_model"]).leaves
    sheets = {name: find_device_model(name) for name in leaves["device_model"].unique()}
    peaks = pl.DataFrame(
        {
            "device_model": list(sheets),
            "peak": [
                sheet and sheet.flops.get("bf16", sheet.flops.get("fp16"))
                for sheet in sheets.values()
            ],
            "relative": [
                compute_relative_peak(sheet, find_device_model(reference))
                for sheet in sheets.values()
            ],
        },
        schema={"device_model": pl.String, "peak": pl.Float64, "relative": pl.Float64},
    )
    parts = leaves.join(peaks, on="device_model", how="left").with_columns(
        peak_flops=pl.col("flops_known_ms") / 1e3 * pl.col("peak"),
        reference_hours=pl.col("device_ms") / 3.6e6 * pl.col("relative"),
    )
    sums = (
        "device_ms",
        "busy_ms",
        "energy_mj",
        "energy_known_ms",
        "flops_low",
        "flops_high",
        "flops_known_ms",
        "input_bytes",
    )
    complete_sums = [  # a value unknown for one device model makes the sum unknown
        pl.when(pl.col(name).is_not_null().all()).then(pl.col(name).sum()).alias(name)
        for name in ("peak_flops", "reference_hours")
    ]
    aggregates = [*(pl.col(name).sum() for name in sums), *complete_sums]
    summed = parts.group_by(keys).agg(aggregates) if keys else parts.select(aggregates)
    seconds = pl.col("flops_known_ms") / 1e3
    measured = summed.select(
        *keys,
        device_hours=pl.col("device_ms") / 3.6e6,
        device_use=_divide_if_positive(pl.col("busy_ms"), pl.col("device_ms")),
        flop_rate=_divide_if_positive(pl.col("flops_low"), seconds),
        flop_rate_high=_divide_if_positive(pl.col("flops_high"), seconds),
        compute_use=_divide_if_positive(pl.col("flops_low"), pl.col("peak_flops")),
        power_w=_divide_if_positive(pl.col("energy_mj"), pl.col("energy_known_ms")),
        reference_hours_per_byte=_divide_if_positive(
            pl.col("reference_hours"), pl.col("input_bytes")
        ),
    )
    means = [pl.col(name).mean() for name in ("roofline_fraction", "mfu")]
    if not keys:
        return pl.concat([measured, captures.select(means).collect()], how="horizontal")
    if by in DEVICE_DIMENSIONS and by != "device_model":  # a capture may span several hosts
        return measured.with_columns(
            pl.lit(None, pl.Float64).alias(name) for name in ("roofline_fraction", "mfu")
        ).sort("device_hours", by, descending=[True, False])
    owned_captures = add_owners(captures, owned, [by] if by in JOB_DIMENSIONS else [])
    capture_means = owned_captures.group_by(pl.col(by).fill_null(UNATTRIBUTED)).agg(means).collect()
    return measured.join(capture_means, on=by, how="left").sort(
        "device_hours", by, descending=[True, False]
    )


def _divide_if_positive(amount: pl.Expr, total: pl.Expr) -> pl.Expr:
    return pl.when(total > 0).then(amount / total)


RULE_DIMENSION = "rule"
INVESTMENT_DIMENSIONS = (RULE_DIMENSION, *JOB_DIMENSIONS)
"""Dimensions by which savings can be divided."""


@dataclass(frozen=True)
class Investment(Result):
    """Potential savings.

    Attributes:
        by: Dimensions by which they are divided.
        rows: One row per combination of values, largest saving first: saved_ms (device time that a
            fix would save), jobs (with such findings), confidence (mean, weighted by saving),
            example (a capture of the job that would save most).
        held_ms: Device time that jobs held.
        analysed_ms: The part of it of jobs with captures. Nothing is known about the rest, which is
            in no row.
    """

    by: tuple[str, ...]
    rows: pl.DataFrame
    held_ms: int
    analysed_ms: int


def compute_savings(
    usage: pl.LazyFrame,
    owned: pl.DataFrame,
    captures: pl.LazyFrame,
    findings: pl.LazyFrame,
    by: Sequence[str] = (RULE_DIMENSION,),
) -> Investment:
    """Adds up what fixing findings would save.

    A job's saving is its device time times the mean, over its captures, of the share of the step
    that the findings of a rule save there. Findings of a capture are disjoint, so savings of rules
    add up. A capture without a finding of the rule counts as 0.

    Args:
        usage: Rows of `usage_minute` or `usage_hour`.
        owned: Owners of jobs, of `compute_ownership_periods`; if a job changed owners, those at its
            last capture count.
        captures: Rows of this table: of the same days, or all of the jobs.
        findings: Rows of this table, of the same captures.
        by: Of `INVESTMENT_DIMENSIONS`, outermost first.

    Raises:
        UsageError: `no-such-dimension`.
    """
    for name in by:
        if name not in INVESTMENT_DIMENSIONS:
            raise UsageError(
                f"savings are not divided by `{name}`",
                slug="no-such-dimension",
                hint=nearest(name, INVESTMENT_DIMENSIONS)
                + f"there are {', '.join(INVESTMENT_DIMENSIONS)}",
            )
    by = tuple(dict.fromkeys(by))
    held_usage = usage.filter(
        ~pl.col("state").is_in((UNALLOCATED, UNREACHABLE)), pl.col("job").is_not_null()
    )
    job_times = (
        divide_device_time(held_usage, owned, ["job"]).leaves.lazy().select("job", "device_ms")
    )
    owned_captures = add_owners(
        captures.select("capture", "job", "start_ns"),
        owned,
        [name for name in by if name != RULE_DIMENSION],
    )
    people = [name for name in by if name not in (RULE_DIMENSION, "job")]
    jobs = (
        owned_captures.sort("start_ns", "capture")
        .group_by("job")
        .agg(pl.col(people).last(), analysed=pl.len())
        .join(job_times, on="job")
    )
    saving = pl.col("saving_fraction").clip(0.0, 1.0)
    savings = (
        findings.filter(pl.col("saving_fraction") > 0)
        .join(captures.select("capture", "job"), on="capture")
        .group_by("job", rule="slug")
        .agg(
            share=saving.sum(),
            confidence=(saving * pl.col("confidence")).sum() / saving.sum(),
            example=pl.col("capture").sort_by(saving, pl.col("capture")).last(),
        )
        .join(jobs, on="job")
        .with_columns(saved_ms=pl.col("device_ms") * (pl.col("share") / pl.col("analysed")))
        .with_columns(pl.col(name).fill_null(UNATTRIBUTED) for name in people)
    )
    saved = pl.col("saved_ms")
    aggregates = [
        saved.sum(),
        pl.col("job").n_unique().alias("jobs"),
        ((pl.col("confidence") * saved).sum() / saved.sum()).alias("confidence"),
        pl.col("example").sort_by(saved, pl.col("example")).last(),
    ]
    grouped = savings.group_by(by).agg(aggregates) if by else savings.select(aggregates)
    rows, sums = pl.collect_all(
        [
            grouped.sort("saved_ms", *by, descending=[True, *(False for _ in by)]),
            job_times.join(jobs.select("job", "analysed"), on="job", how="left").select(
                pl.col("device_ms").sum(),
                analysed_ms=pl.col("device_ms").filter(pl.col("analysed").is_not_null()).sum(),
            ),
        ]
    )
    return Investment(by, rows, int(sums["device_ms"][0]), int(sums["analysed_ms"][0]))
