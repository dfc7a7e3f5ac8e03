"""Change detection in series of jobs; causes.

The job is the sample: its captures are no independent witnesses of each other. Exact definitions in
docs/concepts/fleet.md.

A series is of a kernel, the shapes of its inputs and a model of device; its samples are jobs in the order in which
they were first captured. Where a kernel as a whole changed although no piece of work takes longer than before, the mix
of its shapes or of the devices did. Exact definitions: docs/concepts/fleet.md.
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

from traceloom.analyze.gate_statistics import DRAWS, SEED, interval
from traceloom.trace.array_types import Floats, Ints
from traceloom.trace.frames import Result

LEAST_JOBS = 5
"""On each side of a change."""

LEAST_STRETCH = 2 * LEAST_JOBS
"""Jobs of a stretch between two changes back and forth: some odd jobs stand side by side often enough."""

LEAST_CHANGE = 0.05
"""Changes of the median smaller than this are none."""

ALARM = 0.001
"""How likely it may be that all series, none of which changed, give an alarm at all: one looks every day."""

_LIKELY = 1e-3  # by chance: not worth to look for where exactly
_MOST_BOUNDS = 200  # between which stretches are looked for; of longer series every n-th


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A change of level.

    Attributes:
        first: Position of the stretch before in the series, half-open ...
        at: ... where the new level begins ...
        end: ... and where it ends: at the next change, or with the series.
        before: Median before.
        after: Median after.
        low, high: 95 % interval of after / before - 1, from drawing jobs of both sides again.
    """

    first: int
    at: int
    end: int
    before: float
    after: float
    low: float
    high: float


class Levels(NamedTuple):
    """How unlikely by chance a change must be, so that all series together give a false alarm at most so often.

    Half of `ALARM` goes to cuts in two, half to stretches in between, each divided by how many there are.
    """

    cut: float
    stretch: float


def levels(counts: Iterable[int]) -> Levels:
    """For series of so many jobs each."""
    cuts = stretches = 0
    for count in counts:
        cuts += max(count - 2 * LEAST_JOBS + 1, 0)
        inner = max(count - 2 * LEAST_JOBS - LEAST_STRETCH + 1, 0)
        stretches += inner * (inner + 1) // 2
    return Levels(ALARM / 2 / max(cuts, 1), ALARM / 2 / max(stretches, 1))


def changes(values: Floats, level: Levels) -> list[LevelChange]:
    """The changes of a series.

    Args:
        values: Of jobs in the order of time, positive; shape (jobs,).
        level: Of all series that are looked at together.
    """
    log = np.log(values)
    cuts = [0, *_cuts(log, 0, level), log.size]
    judged = []
    for first, at, end in zip(cuts, cuts[1:], cuts[2:], strict=False):
        before, after = values[first:at], values[at:end]
        old, now = float(np.median(before)), float(np.median(after))
        ratio = now / old - 1
        if abs(ratio) < LEAST_CHANGE:
            continue
        generator = np.random.default_rng(SEED)
        drawn = [_drawn_medians(side, generator) for side in (before, after)]
        low, high = interval(drawn[1] / drawn[0] - 1, ratio, before.size + after.size - 2)
        if low > 0 or high < 0:
            judged.append(LevelChange(first, at, end, old, now, max(low, -1.0), high))
    return judged


def _drawn_medians(values: Floats, generator: np.random.Generator) -> Floats:
    """Medians of samples drawn again from values, as many as values each; shape (DRAWS,).

    What stands in the middle of uniform numbers has a beta distribution, so that no sample has to be drawn.
    """
    ordered, count = np.sort(values), values.size
    middle = (count + 1) // 2
    place = generator.beta(middle, count + 1 - middle, DRAWS)
    drawn = ordered[np.minimum((place * count).astype(np.int64), count - 1)]
    if count % 2:
        return drawn
    place += (1 - place) * generator.beta(1, count - middle, DRAWS)
    return (drawn + ordered[np.minimum((place * count).astype(np.int64), count - 1)]) / 2


def _cuts(log: Floats, offset: int, level: Levels) -> Iterator[int]:
    """Positions at which the level of a series changes, in order: the clearest first, then in the parts around it."""
    inside: list[int] = []
    if (at := _clearest(log)) is not None and chance(log[:at], log[at:]) <= level.cut:
        inside = [at]
    elif (stretch := _stretch(log)) is not None:
        within = slice(*stretch)
        if chance(np.delete(log, within), log[within]) <= level.stretch:
            inside = [*stretch]
    if inside:
        bounds = [0, *inside, log.size]
        for start, end in pairwise(bounds):
            if start:
                yield offset + start
            yield from _cuts(log[start:end], offset + start, level)


def _clearest(log: Floats) -> int | None:
    """Where to cut a series so that its values are nearest to the medians of both parts; None where nothing changes.

    Whether anything does is first looked at by ranks, which takes no time.
    """
    count = log.size
    cuts = np.arange(LEAST_JOBS, count - LEAST_JOBS + 1)
    if not cuts.size:
        return None
    shift = np.abs(_ranks(log)[cuts]) / np.sqrt(cuts * (count - cuts))
    at = int(cuts[np.argmax(shift)])
    return _nearest(log, cuts) if chance(log[:at], log[at:]) <= _LIKELY else None


def _stretch(log: Floats) -> tuple[int, int] | None:
    """The stretch in the middle of a series whose ranks differ most from the others'; None where nothing changes."""
    count = log.size
    first, last = LEAST_JOBS, count - LEAST_JOBS
    if last - first < LEAST_STRETCH:
        return None
    bounds = np.arange(first, last + 1, -(-count // _MOST_BOUNDS))
    size = (bounds[None, :] - bounds[:, None]).astype(np.float64)
    ranks = _ranks(log)[bounds]
    usable = size >= LEAST_STRETCH
    weight = np.sqrt(np.where(usable, size * (count - size), 1))
    shift = np.where(usable, np.abs(ranks[None, :] - ranks[:, None]) / weight, -1.0)
    start, end = (int(bounds[at]) for at in np.unravel_index(np.argmax(shift), shift.shape))
    if end - start < LEAST_STRETCH or chance(np.delete(log, slice(start, end)), log[start:end]) > _LIKELY:
        return None
    start = _nearest(log[:end], np.arange(LEAST_JOBS, end - LEAST_STRETCH + 1))
    return start, start + _nearest(log[start:], np.arange(LEAST_STRETCH, count - start - LEAST_JOBS + 1))


def _ranks(log: Floats) -> Floats:
    """Summed ranks of the values before each position, less what they would be without any order; shape (jobs + 1,)."""
    rank = np.empty(log.size)
    rank[np.argsort(log, kind="stable")] = np.arange(1, log.size + 1)
    return np.concatenate([[0.0], np.cumsum(rank - (log.size + 1) / 2)])


def _nearest(log: Floats, cuts: Ints) -> int:
    """The cut with the least sum of distances to the medians of both parts."""
    return int(cuts[np.argmin(_scatter(log)[cuts] + _scatter(log[::-1])[log.size - cuts])])


def _scatter(log: Floats) -> Floats:
    """Sum of the distances of the first values to their median, for each number of them; shape (jobs + 1,)."""
    ordered: list[float] = []
    total = lower = 0.0  # of all values, and of the lower half of them, rounded down
    sums = [0.0]
    for value in log.tolist():
        half = len(ordered) // 2
        at = bisect_right(ordered, value)
        ordered.insert(at, value)
        total += value
        grows = len(ordered) // 2 > half
        if at < half:
            lower += value if grows else value - ordered[half]
        elif grows:
            lower += ordered[half]
        middle = ordered[half] if not grows else 0.0
        sums.append(total - middle - 2 * lower)
    return np.array(sums)


def chance(before: Floats, after: Floats) -> float:
    """How likely sides of one series are to differ as much as these do: Student's test of their logarithms.

    The smaller one of the differences of means and of medians counts, so that one odd job is no change. The tail is by
    Wallace's approximation (1959), good to 0.1 % where it matters.
    """
    freedom = before.size + after.size - 2
    squares = float(((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum())
    apart = min(abs(float(after.mean() - before.mean())), abs(float(np.median(after) - np.median(before))))
    error = math.sqrt(squares / freedom * (1 / before.size + 1 / after.size))
    if error <= apart * 1e-12:
        return 0.0 if apart > 0 else 1.0
    t = apart / error
    normal = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.erfc(normal / math.sqrt(2))


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
