"""Where work on software pays: the device hours of jobs times what fixing their findings saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.errors import UsageError, nearest
from traceloom.fleet.attribution import OF_JOBS, UNATTRIBUTED, attribution
from traceloom.fleet.owners import with_owners
from traceloom.model.result import Result
from traceloom.store.schemas import UNALLOCATED, UNREACHABLE

RULE = "rule"
BY = (RULE, *OF_JOBS)
"""What savings can be divided by."""


@dataclass(frozen=True)
class Investment(Result):
    """What could be saved.

    Attributes:
        by: By what it is divided.
        rows: One row per combination of values, the most first: saved_ms (device time that fixing would save), jobs
            (that have such findings), confidence (mean, weighted by what is saved), example (a capture of the job that
            would save most).
        held_ms: Device time that jobs held.
        analysed_ms: The part of it of jobs that have captures. Of the rest nothing is known, and nothing in the rows.
    """

    by: tuple[str, ...]
    rows: pl.DataFrame
    held_ms: int
    analysed_ms: int


def invest(
    usage: pl.LazyFrame,
    owned: pl.DataFrame,
    captures: pl.LazyFrame,
    findings: pl.LazyFrame,
    by: Sequence[str] = (RULE,),
) -> Investment:
    """Add up what fixing findings would save.

    Of a job it is its device time times the mean over its captures of the share of the step that the findings of a rule
    save there; findings of one capture are disjoint, so that rules add up. A capture without a finding of the rule
    counts as 0.

    Args:
        usage: Rows of `usage_minute` or `usage_hour`.
        owned: Whose each job is, of `owners.periods`; of a job that changed hands, what holds at its last capture.
        captures: Rows of this table: of the same days, or of all in which the jobs ran.
        findings: The same.
        by: Of `BY`, outermost first.

    Raises:
        UsageError: `no-such-dimension`.
    """
    for name in by:
        if name not in BY:
            hint = nearest(name, BY) + f"there are {', '.join(BY)}"
            raise UsageError(f"savings are not divided by `{name}`", slug="no-such-dimension", hint=hint)
    by = tuple(dict.fromkeys(by))
    held = usage.filter(~pl.col("state").is_in((UNALLOCATED, UNREACHABLE)), pl.col("job").is_not_null())
    of_jobs = attribution(held, owned, ["job"]).leaves.lazy().select("job", "device_ms")
    about = with_owners(captures.select("capture", "job", "start_ns"), owned, [name for name in by if name != RULE])
    people = [name for name in by if name not in (RULE, "job")]
    jobs = about.sort("start_ns").group_by("job").agg(pl.col(people).last(), analysed=pl.len()).join(of_jobs, on="job")
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
            of_jobs.join(jobs.select("job", "analysed"), on="job", how="left").select(
                pl.col("device_ms").sum(),
                analysed_ms=pl.col("device_ms").filter(pl.col("analysed").is_not_null()).sum(),
            ),
        ]
    )
    return Investment(by, rows, int(sums["device_ms"][0]), int(sums["analysed_ms"][0]))
