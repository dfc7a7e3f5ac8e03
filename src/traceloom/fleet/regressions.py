"""Which kernels became slower (or faster), since when, by how much, and what changed with them?

A series is of a kernel, the shapes of its inputs and a model of device; its samples are jobs in the order in which
they were first captured. Where a kernel as a whole changed although no piece of work takes longer than before, the mix
of its shapes or of the devices did. Exact definitions: docs/concepts/fleet.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import polars as pl

from traceloom.array_types import Floats
from traceloom.fleet.changes import LEAST_JOBS, LevelChange, changes, levels
from traceloom.model.result import Result

Cause = Literal["code", "host", "device", "shapes", "unknown"]
Evidence = Literal["shown", "possible", "none"]

MIX: tuple[Cause, ...] = ("device", "shapes")
"""Causes where no piece of work takes longer."""

MOST_JOBS = 20
"""Jobs that stand beside a change: those that lose most by it first."""

_KEYS = ("kernel", "shapes", "device_model")
_COLUMNS = pl.Schema(
    {
        "kernel": pl.String(), "shapes": pl.String(), "device_model": pl.String(), "cause": pl.String(),
        "evidence": pl.String(), "since_ns": pl.Int64(), "last_before_ns": pl.Int64(), "before_ns": pl.Float64(),
        "after_ns": pl.Float64(), "change": pl.Float64(), "low": pl.Float64(), "high": pl.Float64(),
        "extra_ns": pl.Int64(), "jobs_before": pl.Int64(), "jobs_after": pl.Int64(), "jobs": pl.List(pl.String()),
        "capture": pl.String(), "healthy_capture": pl.String(),
    }
)  # fmt: skip


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
        changes: One row per change, what costs most GPU time first, changes of the mix behind all others: kernel,
            shapes and device_model (null where they are not recorded, and where the mix over them changed), cause
            (code, host, device, shapes, unknown), evidence (`shown`: jobs after it that have the old code or hosts are
            as before; `possible`: it changed with the kernel, and no job can tell; `none`), since_ns (the first job
            after it), last_before_ns (the last before), before_ns and after_ns (median over jobs of the mean duration
            of a piece of work), change (after / before - 1), low and high (its 95 % interval), extra_ns (GPU time that
            the jobs after it spent in captures beyond what they would have before; negative where they save),
            jobs_before, jobs_after, jobs (the 20 that lose most), capture (of the job nearest to the median after) and
            healthy_capture (before), to be compared.
        series: Series that were looked at.
        short: Series of fewer than ten jobs, of which nothing is said.
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
    """One row per job, by the time of its first capture."""

    kernel: str
    shapes: str | None
    device_model: str | None
    job: list[str]
    start: Sequence[int]
    mean: Floats
    count: Floats
    total: Floats
    capture: list[str]


def regressions(kernels: pl.LazyFrame, captures: pl.LazyFrame, devices: pl.LazyFrame) -> Regressions:
    """Look for changes in all series.

    Args:
        kernels: Rows of this table, of some days.
        captures: The same; a capture of no job is a job of its own.
        devices: The same.
    """
    about = captures.select("capture", "start_ns", "code", "torch", job=pl.coalesce("job", "capture"))
    works = of_captures(kernels, about)
    of_kernel = works.group_by("kernel", "job", "start_ns", "capture").agg(pl.col("count", "total_ns").sum())
    parts = by_job(works, _KEYS)
    by_part, by_kernel = list(_series(parts, _KEYS)), list(_series(by_job(of_kernel, _KEYS[:1]), _KEYS[:1]))
    parts_of = Counter(series.kernel for series in by_part)
    by_kernel = [series for series in by_kernel if parts_of[series.kernel] > 1]
    level = levels(series.mean.size for series in (*by_part, *by_kernel))
    # job -> what it ran: the code (version of the program and of PyTorch) and the hosts, where they are known
    hosts = devices.select("capture", "host").unique().group_by("capture").agg(pl.col("host").drop_nulls())
    of_job = (
        about.join(hosts, on="capture", how="left")
        .group_by("job")
        .agg(
            code=pl.concat_str("code", "torch", separator=" ", ignore_nulls=True).unique(),
            host=pl.col("host").explode().drop_nulls().unique(),
        )
        .collect()
    )
    facts: dict[str, dict[Cause, frozenset[str]]] = {
        job: {"code": frozenset(filter(None, code)), "host": frozenset(host)}
        for job, code, host in of_job.select("job", "code", "host").iter_rows()
    }
    rows: list[ChangeRow] = []
    for series in by_part:
        rows += [_row(series, change, *_cause(series, change, facts)) for change in changes(series.mean, level)]
    for series in by_kernel:
        for change in changes(series.mean, level):
            cause = _mix(series, change, parts.filter(pl.col("kernel") == series.kernel))
            if cause is not None:
                rows.append(_row(series, change, cause, "shown"))
    rows.sort(
        key=lambda row: (row["cause"] in MIX, -row["extra_ns"], row["kernel"], row["shapes"] or "", row["since_ns"])
    )
    short = sum(series.mean.size < 2 * LEAST_JOBS for series in by_part)
    return Regressions(pl.DataFrame(rows, schema=_COLUMNS, orient="row"), len(by_part), short)


def of_captures(kernels: pl.LazyFrame, captures: pl.LazyFrame) -> pl.DataFrame:
    """Per kernel, shapes, device_model and capture: its job and start_ns, count, total_ns. Names are categories.

    Args:
        kernels: Rows of this table.
        captures: capture, start_ns, job.
    """
    about = captures.select("capture", "start_ns", "job").unique("capture").sort("start_ns", "capture").collect()
    # Rows are many and names few: what follows groups and compares numbers.
    numbered = pl.Enum(about["capture"])  # in the order of time
    works = (
        kernels.filter(pl.col("count") > 0)
        .select(pl.col(_KEYS).cast(pl.Categorical), pl.col("capture").cast(numbered, strict=False), "count", "total_ns")
        .drop_nulls("capture")
        .group_by(*_KEYS, "capture")
        .agg(pl.col("count", "total_ns").sum())
        .collect()
    )
    at = works["capture"].to_physical()
    jobs = about["job"].cast(pl.Enum(about["job"].unique().sort()))
    return works.with_columns(job=jobs.gather(at), start_ns=about["start_ns"].gather(at))


def by_job(works: pl.DataFrame, keys: Sequence[str]) -> pl.DataFrame:
    """Per key and job: start_ns, mean (median over captures of the mean duration), count, total, capture (the first).

    Args:
        works: Of `of_captures`, one row per key and capture.
        keys: Which of its columns.
    """
    return (
        works.with_columns(mean=pl.col("total_ns") / pl.col("count"))
        .group_by(*keys, "job")
        .agg(pl.col("start_ns", "capture").min(), pl.col("mean").median(), pl.col("count", "total_ns").sum())
        .filter(pl.col("mean") > 0)
        .sort("start_ns", "job")
        .with_columns(pl.col("job", "capture").cast(pl.String))
    )


def _series(rows: pl.DataFrame, keys: Sequence[str]) -> Iterator[_JobSeries]:
    for key, jobs in rows.group_by(keys, maintain_order=True):
        part = {name: None if value is None else str(value) for name, value in zip(keys, key, strict=True)}
        yield _JobSeries(
            part["kernel"] or "",
            part.get("shapes"),
            part.get("device_model"),
            jobs["job"].to_list(),
            jobs["start_ns"].to_list(),
            jobs["mean"].to_numpy(),
            jobs["count"].to_numpy().astype(np.float64),
            jobs["total_ns"].to_numpy().astype(np.float64),
            jobs["capture"].to_list(),
        )


def _cause(
    series: _JobSeries, change: LevelChange, facts: dict[str, dict[Cause, frozenset[str]]]
) -> tuple[Cause, Evidence]:
    """What changed with the kernel: the code or the hosts, if jobs that still have the old ones are as before."""
    possible: list[Cause] = []
    middle = (change.before * change.after) ** 0.5
    names: tuple[Cause, ...] = ("code", "host")
    for fact in names:
        before = frozenset().union(*(facts[job][fact] for job in series.job[change.first : change.at]))
        after = range(change.at, change.end)
        if not before or not all(facts[series.job[at]][fact] for at in after):
            continue  # not known
        same = [series.mean[at] for at in after if facts[series.job[at]][fact] <= before]
        if not same:
            possible.append(fact)
        elif len(same) < len(after) and (np.median(same) < middle) == (change.before < middle):
            return fact, "shown"
    if not possible:
        return "unknown", "none"
    return possible[0], "possible"


def _mix(series: _JobSeries, change: LevelChange, parts: pl.DataFrame) -> Cause | None:
    """Whether a kernel as a whole changed since other shapes or devices have more of the work; None: it did not.

    The change of the mean duration is what the shares of the parts change it by, at the durations of before (of after,
    for parts that were not there), and what the durations change it by.
    """
    sides = [
        parts.filter(pl.col("job").is_in(series.job[start:end]))
        for start, end in ((change.first, change.at), (change.at, change.end))
    ]
    for cause, keys in zip(MIX, (["device_model"], ["shapes", "device_model"]), strict=True):
        before, after = (
            side.group_by(keys).agg(mean=pl.col("total_ns").sum() / pl.col("count").sum(), count=pl.col("count").sum())
            for side in sides
        )
        both = before.join(after, on=keys, how="full", coalesce=True, nulls_equal=True)
        old, now = (both[name].fill_null(0).to_numpy() for name in ("count", "count_right"))
        duration = both.select(pl.coalesce("mean", "mean_right")).to_series().to_numpy()
        mixed = float(((now / now.sum() - old / old.sum()) * duration).sum())
        whole = change.after - change.before
        if mixed / whole >= 0.5:
            return cause
    return None


def _row(series: _JobSeries, change: LevelChange, cause: Cause, evidence: Evidence) -> ChangeRow:
    after = np.arange(change.at, change.end)
    extra = series.total[after] - change.before * series.count[after]
    nearest = [
        start + int(np.argmin(np.abs(series.mean[start:end] - level)))
        for start, end, level in ((change.first, change.at, change.before), (change.at, change.end, change.after))
    ]
    most = after[np.argsort(-extra * np.sign(change.after - change.before), kind="stable")[:MOST_JOBS]]
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
        "jobs": [series.job[at] for at in most],
        "capture": series.capture[nearest[1]],
        "healthy_capture": series.capture[nearest[0]],
    }
