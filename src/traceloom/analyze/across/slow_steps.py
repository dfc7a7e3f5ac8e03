"""Steps that took longer than the others can explain, and what was different in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.across.ledger import COMMUNICATION, ClassType
from traceloom.analyze.across.matched import numbered
from traceloom.analyze.across.rank_part import RankPart, breakdown_per_step
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

# A step is slow where it is longer than the median by more than this many standard deviations, which are estimated by
# 1.4826 × the median absolute deviation, and by more than 2 % of the median: with few equal steps the deviation is 0.
DEVIATIONS = 3.5
LEAST_SHARE = 0.02
LEAST_STEPS = 4

STEP_SCHEMA = schema("step duration_ns rank rank_count median_ns limit_ns slow over_ns", {"rank_count": pl.Int32})
DIFFERENCE_SCHEMA = schema("step rank class ns usual_ns more_ns", {"class": ClassType})


@dataclass(frozen=True)
class SlowSteps(Result):
    """Which steps were slow. The rule: docs/concepts/slow-steps.md.

    Attributes:
        steps: One row per step that every recorded rank holds completely: duration_ns (of the rank that took longest),
            rank (that one), rank_count, median_ns (over the steps), limit_ns (what is still usual; null where there are
            fewer than four steps), slow, over_ns (beyond the median).
        differences: For each slow step the account of the rank that did most more than usual, waiting in communication
            apart; of the one that took longest, where that explains less than half of over_ns. class, ns, usual_ns
            (median of the same class over the steps that are not slow, on that rank), more_ns; the largest difference
            first. Classes that are 0 in both are left out.
    """

    steps: pl.DataFrame
    differences: pl.DataFrame


def slow_steps(parts: Sequence[RankPart]) -> SlowSteps:
    """Find slow steps of a run of any number of ranks."""
    ranks = numbered(parts)
    every = pl.concat(
        part.steps.filter("complete").select(
            "step", pl.lit(rank, pl.Int32).alias("rank"), (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
        )
        for part, rank in zip(parts, ranks, strict=True)
    )
    steps = (
        every.sort("duration_ns", descending=True)
        .group_by("step", maintain_order=True)
        .agg(pl.col("duration_ns").first(), pl.col("rank").first(), pl.len().alias("rank_count"))
        .sort("step")
    )
    whole = steps.filter(pl.col("rank_count") == pl.col("rank_count").max()) if steps.height else steps
    lengths = whole["duration_ns"].to_numpy()
    median, limit = usual(lengths)
    rated = whole.with_columns(
        pl.lit(median, pl.Int64).alias("median_ns"),
        pl.lit(limit, pl.Int64).alias("limit_ns"),
        (pl.col("duration_ns") > pl.lit(limit, pl.Int64)).fill_null(value=False).alias("slow"),
        (pl.col("duration_ns") - pl.lit(median, pl.Int64)).alias("over_ns"),
    )
    rated = rated.pipe(as_declared, STEP_SCHEMA)
    slow = rated.filter("slow")
    good = rated.filter(~pl.col("slow"))["step"].implode()
    differences = [pl.DataFrame(schema=DIFFERENCE_SCHEMA)]
    for part, rank in zip(parts, ranks, strict=True) if slow.height else ():
        spent = breakdown_per_step(part)
        normal = spent.filter(pl.col("step").is_in(good)).group_by("class").agg(pl.col("ns").median().alias("usual_ns"))
        rows = spent.filter(pl.col("step").is_in(slow["step"].implode())).join(normal, on="class", how="left")
        rows = rows.with_columns(
            pl.col("usual_ns").fill_null(0).cast(pl.Int64), pl.lit(rank, pl.Int32).alias("rank")
        ).with_columns((pl.col("ns") - pl.col("usual_ns")).alias("more_ns"))
        rows = rows.filter((pl.col("ns") != 0) | (pl.col("usual_ns") != 0))
        differences.append(rows.pipe(as_declared, DIFFERENCE_SCHEMA))
    every_rank = pl.concat(differences).sort("step", "more_ns", "class", "rank", descending=[False, True, False, False])
    # who waits for a late rank is as late: the account is that of the rank that did most more, if that explains half
    busy = every_rank.filter(pl.col("class") != COMMUNICATION).unique("step", keep="first", maintain_order=True)
    both = slow.join(busy, on="step", how="left", suffix="_busy", maintain_order="left")
    explains = (2 * pl.col("more_ns") >= pl.col("over_ns")).fill_null(value=False)
    chosen = both.select("step", rank=pl.when(explains).then("rank_busy").otherwise("rank"))
    largest_first = every_rank.join(chosen, on=["step", "rank"], how="semi", maintain_order="left")
    return SlowSteps(rated, largest_first)


def usual(lengths: np.ndarray) -> tuple[int | None, int | None]:
    """Median of step lengths, and the longest that still belongs to it; None with fewer than four steps."""
    if not lengths.size:
        return None, None
    median = float(np.median(lengths))
    if lengths.size < LEAST_STEPS:
        return int(median), None
    deviation = 1.4826 * float(np.median(np.abs(lengths - median)))
    return int(median), int(median + max(DEVIATIONS * deviation, LEAST_SHARE * median))
