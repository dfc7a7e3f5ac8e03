"""Detects changes of kernel durations across jobs, and infers their causes.

The sample is the job, as its captures are not independent. A series is a kernel, the shapes of its
inputs and a device model; its samples are jobs in the order of their first captures. If a kernel
changed as a whole although no piece of work takes longer, the mix of its shapes or devices did.
Exact definitions: docs/concepts/fleet.md.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import polars as pl

from traceloom.analyze.gate_statistics import DRAW_COUNT, SEED, compute_interval
from traceloom.trace.array_types import Floats, Ints
from traceloom.trace.frames import Result

MIN_JOBS_PER_SIDE = 5
"""Min jobs on each side of a change."""

MIN_SEGMENT_JOBS = 2 * MIN_JOBS_PER_SIDE
"""Min jobs between two opposite changes: a few odd jobs are often adjacent by chance."""

MIN_RELATIVE_CHANGE = 0.05
"""Min relative change of the median."""

FALSE_ALARM_RATE = 0.001
"""Max probability of any false alarm over all unchanged series: the search runs every day."""

_PRECHECK_P_VALUE = 1e-3  # less significant series are not searched for an exact position
# Candidate bounds of a segment; in longer series only every n-th position is one.
_MAX_CANDIDATE_BOUNDS = 200


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A change of level.

    Attributes:
        first: Position of the segment before in the series, half-open ...
        at: ... where the new level begins ...
        end: ... and where it ends: at the next change, or with the series.
        before: Median before.
        after: Median after.
        low, high: 95 % interval of after / before - 1, by bootstrap over the jobs of both sides.
    """

    first: int
    at: int
    end: int
    before: float
    after: float
    low: float
    high: float


class SignificanceLevels(NamedTuple):
    """Significance levels of a change such that all series together keep `FALSE_ALARM_RATE`.

    Half of it goes to cuts in two, half to segments in between, each divided by their number
    (Bonferroni).
    """

    cut: float
    segment: float


def compute_significance_levels(series_lengths: Iterable[int]) -> SignificanceLevels:
    """Returns the levels for series of these lengths (jobs each)."""
    splits = segments = 0
    for count in series_lengths:
        splits += max(count - 2 * MIN_JOBS_PER_SIDE + 1, 0)
        inner = max(count - 2 * MIN_JOBS_PER_SIDE - MIN_SEGMENT_JOBS + 1, 0)
        segments += inner * (inner + 1) // 2
    return SignificanceLevels(
        FALSE_ALARM_RATE / 2 / max(splits, 1), FALSE_ALARM_RATE / 2 / max(segments, 1)
    )


def find_change_points(values: Floats, levels: SignificanceLevels) -> list[ChangePoint]:
    """Returns the changes of a series.

    Args:
        values: Positive values of jobs in time order; shape (jobs,).
        levels: For all series of the search.
    """
    log_values = np.log(values)
    splits = [0, *_find_splits(log_values, 0, levels), log_values.size]
    changes = []
    for first, cut, end in zip(splits, splits[1:], splits[2:], strict=False):
        before, after = values[first:cut], values[cut:end]
        old, new = float(np.median(before)), float(np.median(after))
        ratio = new / old - 1
        if abs(ratio) < MIN_RELATIVE_CHANGE:
            continue
        generator = np.random.default_rng(SEED)
        resampled_medians = [_draw_bootstrap_medians(side, generator) for side in (before, after)]
        low, high = compute_interval(
            resampled_medians[1] / resampled_medians[0] - 1, ratio, before.size + after.size - 2
        )
        if low > 0 or high < 0:
            changes.append(ChangePoint(first, cut, end, old, new, max(low, -1.0), high))
    return changes


def _draw_bootstrap_medians(values: Floats, generator: np.random.Generator) -> Floats:
    """Draws bootstrap medians: of samples as large as `values`, with replacement; shape (DRAWS,).

    The median of uniform numbers has a beta distribution, so samples need not be drawn.
    """
    ordered, count = np.sort(values), values.size
    middle = (count + 1) // 2
    quantile = generator.beta(middle, count + 1 - middle, DRAW_COUNT)
    medians = ordered[np.minimum((quantile * count).astype(np.int64), count - 1)]
    if count % 2:
        return medians
    quantile += (1 - quantile) * generator.beta(1, count - middle, DRAW_COUNT)
    return (medians + ordered[np.minimum((quantile * count).astype(np.int64), count - 1)]) / 2


def _find_splits(log_values: Floats, offset: int, levels: SignificanceLevels) -> Iterator[int]:
    """Yields positions at which the level of a series changes.

    The most significant change is found first, then the parts around it are searched recursively.
    """
    splits: list[int] = []
    if (split := _find_best_split(log_values)) is not None and compute_p_value(
        log_values[:split], log_values[split:]
    ) <= levels.cut:
        splits = [split]
    elif (segment := _find_shifted_segment(log_values)) is not None:
        segment_slice = slice(*segment)
        if (
            compute_p_value(np.delete(log_values, segment_slice), log_values[segment_slice])
            <= levels.segment
        ):
            splits = [*segment]
    if splits:
        for start, end in pairwise([0, *splits, log_values.size]):
            if start:
                yield offset + start
            yield from _find_splits(log_values[start:end], offset + start, levels)


def _find_best_split(log_values: Floats) -> int | None:
    """Returns the cut that minimises the distances to the medians of both parts; None if no change.

    A cheap rank test decides first whether there is a change.
    """
    count = log_values.size
    candidates = np.arange(MIN_JOBS_PER_SIDE, count - MIN_JOBS_PER_SIDE + 1)
    if not candidates.size:
        return None
    shift = np.abs(_compute_centered_rank_sums(log_values)[candidates]) / np.sqrt(
        candidates * (count - candidates)
    )
    split = int(candidates[np.argmax(shift)])
    return (
        _select_best_split(log_values, candidates)
        if compute_p_value(log_values[:split], log_values[split:]) <= _PRECHECK_P_VALUE
        else None
    )


def _find_shifted_segment(log_values: Floats) -> tuple[int, int] | None:
    """Returns the inner segment of a series whose ranks differ most from the rest; None if no
    change.
    """
    count = log_values.size
    first, last = MIN_JOBS_PER_SIDE, count - MIN_JOBS_PER_SIDE
    if last - first < MIN_SEGMENT_JOBS:
        return None
    bounds = np.arange(first, last + 1, -(-count // _MAX_CANDIDATE_BOUNDS))
    size = (bounds[None, :] - bounds[:, None]).astype(np.float64)
    rank_sums = _compute_centered_rank_sums(log_values)[bounds]
    usable = size >= MIN_SEGMENT_JOBS
    weight = np.sqrt(np.where(usable, size * (count - size), 1))
    shift = np.where(usable, np.abs(rank_sums[None, :] - rank_sums[:, None]) / weight, -1.0)
    start, end = (int(bounds[index]) for index in np.unravel_index(np.argmax(shift), shift.shape))
    if (
        end - start < MIN_SEGMENT_JOBS
        or compute_p_value(np.delete(log_values, slice(start, end)), log_values[start:end])
        > _PRECHECK_P_VALUE
    ):
        return None
    start = _select_best_split(
        log_values[:end], np.arange(MIN_JOBS_PER_SIDE, end - MIN_SEGMENT_JOBS + 1)
    )
    return start, start + _select_best_split(
        log_values[start:], np.arange(MIN_SEGMENT_JOBS, count - start - MIN_JOBS_PER_SIDE + 1)
    )


def _compute_centered_rank_sums(log_values: Floats) -> Floats:
    """Returns sums of the ranks before each position minus their expectation; shape (jobs + 1,)."""
    rank = np.empty(log_values.size)
    rank[np.argsort(log_values, kind="stable")] = np.arange(1, log_values.size + 1)
    return np.concatenate([[0.0], np.cumsum(rank - (log_values.size + 1) / 2)])


def _select_best_split(log_values: Floats, candidates: Ints) -> int:
    """Returns the cut with the least sum of distances to the medians of both parts."""
    return int(
        candidates[
            np.argmin(
                _compute_prefix_deviations(log_values)[candidates]
                + _compute_prefix_deviations(log_values[::-1])[log_values.size - candidates]
            )
        ]
    )


def _compute_prefix_deviations(log_values: Floats) -> Floats:
    """Returns the sum of distances of the first n values to their median, for each n.

    Shape (jobs + 1,).
    """
    ordered: list[float] = []
    total = lower_half_sum = 0.0  # of all values, and of the lower half of them, rounded down
    sums = [0.0]
    for value in log_values.tolist():
        old_half = len(ordered) // 2
        position = bisect_right(ordered, value)
        ordered.insert(position, value)
        total += value
        half_grows = len(ordered) // 2 > old_half
        if position < old_half:
            lower_half_sum += value if half_grows else value - ordered[old_half]
        elif half_grows:
            lower_half_sum += ordered[old_half]
        middle = ordered[old_half] if not half_grows else 0.0
        sums.append(total - middle - 2 * lower_half_sum)
    return np.array(sums)


def compute_p_value(before: Floats, after: Floats) -> float:
    """Returns the p-value of a difference between two sides of a series: Student's t-test of
    logarithms.

    The smaller one of the differences of means and of medians counts, so that a single odd job is
    not a change. The tail uses Wallace's approximation (1959), accurate to 0.1 % where it matters.
    """
    degrees_of_freedom = before.size + after.size - 2
    residual_sum = float(
        ((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum()
    )
    difference = min(
        abs(float(after.mean() - before.mean())), abs(float(np.median(after) - np.median(before)))
    )
    standard_error = math.sqrt(
        residual_sum / degrees_of_freedom * (1 / before.size + 1 / after.size)
    )
    if standard_error <= difference * 1e-12:
        return 0.0 if difference > 0 else 1.0
    t = difference / standard_error
    normal = (
        (8 * degrees_of_freedom + 1)
        / (8 * degrees_of_freedom + 3)
        * math.sqrt(degrees_of_freedom * math.log1p(t * t / degrees_of_freedom))
    )
    return math.erfc(normal / math.sqrt(2))


Cause = Literal["code", "host", "device", "shapes", "unknown"]
Evidence = Literal["shown", "possible", "none"]

MIX_CAUSES: tuple[Cause, ...] = ("device", "shapes")
"""Causes for which no piece of work takes longer."""

MAX_LISTED_JOBS = 20
"""Max jobs listed for a change, those that lose most first."""

_SERIES_KEYS = ("kernel", "shapes", "device_model")
_CHANGE_SCHEMA = pl.Schema(
    {
        "kernel": pl.String(),
        "shapes": pl.String(),
        "device_model": pl.String(),
        "cause": pl.String(),
        "evidence": pl.String(),
        "since_ns": pl.Int64(),
        "last_before_ns": pl.Int64(),
        "before_ns": pl.Float64(),
        "after_ns": pl.Float64(),
        "change": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
        "extra_ns": pl.Int64(),
        "jobs_before": pl.Int64(),
        "jobs_after": pl.Int64(),
        "jobs": pl.List(pl.String()),
        "capture": pl.String(),
        "healthy_capture": pl.String(),
    }
)


class ChangeRow(TypedDict):
    """A row of `Regressions.changes`."""

    kernel: str
    shapes: str | None
    device_model: str | None
    cause: Cause
    evidence: Evidence
    since_ns: int
    last_before_ns: int
    before_ns: float
    after_ns: float
    change: float
    low: float
    high: float
    extra_ns: int
    jobs_before: int
    jobs_after: int
    jobs: list[str]
    capture: str
    healthy_capture: str


@dataclass(frozen=True)
class Regressions(Result):
    """Changes of the mean duration of kernels.

    Attributes:
        changes: One row per change, by GPU time lost, changes of the mix last: kernel, shapes and
            device_model (null if not recorded, and where the mix over them changed), cause (code,
            host, device, shapes, unknown), evidence (`shown`: later jobs with the old code or hosts
            are unchanged; `possible`: it changed with the kernel, and no job can separate them;
            `none`), since_ns (the first job after it), last_before_ns (the last one before),
            before_ns and after_ns (median over jobs of the mean duration of a piece of work),
            change (after / before - 1), low and high (its 95 % interval), extra_ns (GPU time that
            the captures of later jobs lost; negative if they save), jobs_before, jobs_after, jobs
            (the 20 that lose most), capture (of the job nearest to the median after) and
            healthy_capture (before), for comparison.
        series: Number of tested series.
        short: Number of series with fewer than ten jobs, which are not tested.
    """

    changes: pl.DataFrame
    series: int
    short: int

    @property
    def slower(self) -> pl.DataFrame:
        """The rows of `changes` that cost time."""
        return self.changes.filter(pl.col("change") > 0)


@dataclass(frozen=True)
class _JobSeries:
    """A series with one element per job, by the time of its first capture."""

    kernel: str
    shapes: str | None
    device_model: str | None
    job: list[str]
    start: Sequence[int]
    mean: Floats
    count: Floats
    total: Floats
    capture: list[str]


def find_regressions(
    kernels: pl.LazyFrame, captures: pl.LazyFrame, devices: pl.LazyFrame
) -> Regressions:
    """Searches all series for changes.

    Args:
        kernels: Rows of this table, of some days.
        captures: Rows of this table, of the same days; a capture without a job counts as a job of
            its own.
        devices: Rows of this table, of the same days.
    """
    capture_jobs = captures.select(
        "capture", "start_ns", "code", "torch", job=pl.coalesce("job", "capture")
    )
    work_by_capture = collect_by_capture(kernels, capture_jobs)
    kernel_by_capture = work_by_capture.group_by("kernel", "job", "start_ns", "capture").agg(
        pl.col("count", "total_ns").sum()
    )
    work_by_job = collect_by_job(work_by_capture, _SERIES_KEYS)
    shape_series, kernel_series = (
        list(_build_job_series(work_by_job, _SERIES_KEYS)),
        list(
            _build_job_series(collect_by_job(kernel_by_capture, _SERIES_KEYS[:1]), _SERIES_KEYS[:1])
        ),
    )
    series_per_kernel = Counter(series.kernel for series in shape_series)
    kernel_series = [series for series in kernel_series if series_per_kernel[series.kernel] > 1]
    levels = compute_significance_levels(
        series.mean.size for series in (*shape_series, *kernel_series)
    )
    # job -> the code (version of the program and of PyTorch) and the hosts it ran on, if known
    hosts = (
        devices.select("capture", "host")
        .unique()
        .group_by("capture")
        .agg(pl.col("host").drop_nulls())
    )
    job_versions = (
        capture_jobs.join(hosts, on="capture", how="left")
        .group_by("job")
        .agg(
            code=pl.concat_str("code", "torch", separator=" ", ignore_nulls=True).unique(),
            host=pl.col("host").explode().drop_nulls().unique(),
        )
        .collect()
    )
    job_facts: dict[str, dict[Cause, frozenset[str]]] = {
        job: {"code": frozenset(filter(None, code)), "host": frozenset(host)}
        for job, code, host in job_versions.select("job", "code", "host").iter_rows()
    }
    rows: list[ChangeRow] = []
    for series in shape_series:
        rows += [
            _build_change_row(series, change, *_infer_cause(series, change, job_facts))
            for change in find_change_points(series.mean, levels)
        ]
    for series in kernel_series:
        for change in find_change_points(series.mean, levels):
            cause = _infer_mix_cause(
                series, change, work_by_job.filter(pl.col("kernel") == series.kernel)
            )
            if cause is not None:
                rows.append(_build_change_row(series, change, cause, "shown"))
    rows.sort(
        key=lambda row: (
            row["cause"] in MIX_CAUSES,
            -row["extra_ns"],
            row["kernel"],
            row["shapes"] or "",
            row["since_ns"],
        )
    )
    short = sum(series.mean.size < 2 * MIN_JOBS_PER_SIDE for series in shape_series)
    return Regressions(
        pl.DataFrame(rows, schema=_CHANGE_SCHEMA, orient="row"), len(shape_series), short
    )


def collect_by_capture(kernels: pl.LazyFrame, captures: pl.LazyFrame) -> pl.DataFrame:
    """Collects job, start_ns, count and total_ns per kernel, shapes, device_model and capture.

    Names are categoricals.

    Args:
        kernels: Rows of this table.
        captures: capture, start_ns, job.
    """
    capture_jobs = (
        captures.select("capture", "start_ns", "job")
        .unique("capture")
        .sort("start_ns", "capture")
        .collect()
    )
    # Many rows, few names: integer codes make grouping and comparing fast.
    capture_enum = pl.Enum(capture_jobs["capture"])  # in time order
    work = (
        kernels.filter(pl.col("count") > 0)
        .select(
            pl.col(_SERIES_KEYS).cast(pl.Categorical),
            pl.col("capture").cast(capture_enum, strict=False),
            "count",
            "total_ns",
        )
        .drop_nulls("capture")
        .group_by(*_SERIES_KEYS, "capture")
        .agg(pl.col("count", "total_ns").sum())
        .collect()
    )
    capture_index = work["capture"].to_physical()
    jobs = capture_jobs["job"].cast(pl.Enum(capture_jobs["job"].unique().sort()))
    return work.with_columns(
        job=jobs.gather(capture_index), start_ns=capture_jobs["start_ns"].gather(capture_index)
    )


def collect_by_job(work: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Collects per key and job: start_ns, mean (median over captures of the mean duration), count,
    total, capture (the first).

    Args:
        work: Of `collect_by_capture`, one row per key and capture.
        keys: Columns of the key.
    """
    return (
        work.with_columns(mean=pl.col("total_ns") / pl.col("count"))
        .group_by(*keys, "job")
        .agg(
            pl.col("start_ns", "capture").min(),
            pl.col("mean").median(),
            pl.col("count", "total_ns").sum(),
        )
        .filter(pl.col("mean") > 0)
        .sort("start_ns", "job")
        .with_columns(pl.col("job", "capture").cast(pl.String))
    )


def _build_job_series(rows: pl.DataFrame, keys: Sequence[str]) -> Iterator[_JobSeries]:
    for key, jobs in rows.group_by(keys, maintain_order=True):
        key_values = {
            name: None if value is None else str(value)
            for name, value in zip(keys, key, strict=True)
        }
        yield _JobSeries(
            key_values["kernel"] or "",
            key_values.get("shapes"),
            key_values.get("device_model"),
            jobs["job"].to_list(),
            jobs["start_ns"].to_list(),
            jobs["mean"].to_numpy(),
            jobs["count"].to_numpy().astype(np.float64),
            jobs["total_ns"].to_numpy().astype(np.float64),
            jobs["capture"].to_list(),
        )


def _infer_cause(
    series: _JobSeries, change: ChangePoint, job_facts: dict[str, dict[Cause, frozenset[str]]]
) -> tuple[Cause, Evidence]:
    """Infers whether code or hosts caused a change: `shown` if jobs with the old ones are as
    before.
    """
    possible: list[Cause] = []
    middle = (change.before * change.after) ** 0.5
    cause_names: tuple[Cause, ...] = ("code", "host")
    for cause in cause_names:
        facts_before = frozenset().union(
            *(job_facts[job][cause] for job in series.job[change.first : change.at])
        )
        indices_after = range(change.at, change.end)
        if not facts_before or not all(
            job_facts[series.job[index]][cause] for index in indices_after
        ):
            continue  # unknown
        unchanged_means = [
            series.mean[index]
            for index in indices_after
            if job_facts[series.job[index]][cause] <= facts_before
        ]
        if not unchanged_means:
            possible.append(cause)
        elif len(unchanged_means) < len(indices_after) and (
            np.median(unchanged_means) < middle
        ) == (change.before < middle):
            return cause, "shown"
    return (possible[0], "possible") if possible else ("unknown", "none")


def _infer_mix_cause(
    series: _JobSeries, change: ChangePoint, work_by_job: pl.DataFrame
) -> Cause | None:
    """Returns the cause if a kernel changed as a whole due to its mix of shapes or devices; else
    None.

    The change of the mean duration has two parts: the change of shares, at the durations before (or
    after, for new parts), and the change of durations.
    """
    sides = [
        work_by_job.filter(pl.col("job").is_in(series.job[start:end]))
        for start, end in ((change.first, change.at), (change.at, change.end))
    ]
    for cause, keys in zip(MIX_CAUSES, (["device_model"], ["shapes", "device_model"]), strict=True):
        before, after = (
            side.group_by(keys).agg(
                mean=pl.col("total_ns").sum() / pl.col("count").sum(), count=pl.col("count").sum()
            )
            for side in sides
        )
        joined = before.join(after, on=keys, how="full", coalesce=True, nulls_equal=True)
        old, new = (joined[name].fill_null(0).to_numpy() for name in ("count", "count_right"))
        duration = joined.select(pl.coalesce("mean", "mean_right")).to_series().to_numpy()
        mix_effect = float(((new / new.sum() - old / old.sum()) * duration).sum())
        if mix_effect / (change.after - change.before) >= 0.5:
            return cause
    return None


def _build_change_row(
    series: _JobSeries, change: ChangePoint, cause: Cause, evidence: Evidence
) -> ChangeRow:
    indices_after = np.arange(change.at, change.end)
    extra = series.total[indices_after] - change.before * series.count[indices_after]
    nearest = [
        start + int(np.argmin(np.abs(series.mean[start:end] - level)))
        for start, end, level in (
            (change.first, change.at, change.before),
            (change.at, change.end, change.after),
        )
    ]
    costliest = indices_after[
        np.argsort(-extra * np.sign(change.after - change.before), kind="stable")[:MAX_LISTED_JOBS]
    ]
    return {
        "kernel": series.kernel,
        "shapes": series.shapes,
        "device_model": series.device_model,
        "cause": cause,
        "evidence": evidence,
        "since_ns": series.start[change.at],
        "last_before_ns": series.start[change.at - 1],
        "before_ns": change.before,
        "after_ns": change.after,
        "change": change.after / change.before - 1,
        "low": change.low,
        "high": change.high,
        "extra_ns": round(float(extra.sum())),
        "jobs_before": change.at - change.first,
        "jobs_after": change.end - change.at,
        "jobs": [series.job[index] for index in costliest],
        "capture": series.capture[nearest[1]],
        "healthy_capture": series.capture[nearest[0]],
    }
