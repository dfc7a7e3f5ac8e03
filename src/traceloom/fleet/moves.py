"""What other rules would change: device time that would move from whom to whom."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from traceloom.fleet.attribution import UNATTRIBUTED
from traceloom.fleet.documents import LATEST
from traceloom.model.result import Result
from traceloom.store.schemas import DIMENSIONS


@dataclass(frozen=True)
class Moves(Result):
    """Device time that changes hands.

    Attributes:
        rows: The most time first: dimension, before and after (its values), jobs, device_ms.
    """

    rows: pl.DataFrame


def moves(usage: pl.LazyFrame, before: pl.DataFrame, after: pl.DataFrame) -> Moves:
    """Compare two answers to whose jobs are.

    Args:
        usage: Rows of `usage_minute` or `usage_hour`.
        before: Of `owners.periods`, by the rules as they are.
        after: The same, by other rules.
    """
    times = pl.concat([before.select("job", "from_ns"), after.select("job", "from_ns")]).unique().sort("job", "from_ns")
    both = times
    for name, owned in (("before", before), ("after", after)):
        facts = owned.select("job", "from_ns", *(pl.col(key).alias(f"{key} {name}") for key in DIMENSIONS))
        both = both.join_asof(facts.sort("job", "from_ns"), on="from_ns", by="job", check_sortedness=False)
    until = pl.col("from_ns").shift(-1).over("job").fill_null(LATEST)
    moved = pl.any_horizontal(pl.col(f"{key} before").ne_missing(pl.col(f"{key} after")) for key in DIMENSIONS)
    stretches = both.with_columns(until_ns=until).filter(moved).lazy()
    times_of = (
        usage.select("job", "time_ns", "device_ms")
        .join(stretches, on="job")
        .filter(pl.col("time_ns").is_between("from_ns", "until_ns", closed="left"))
        .group_by("job", *(f"{key} {name}" for key in DIMENSIONS for name in ("before", "after")))
        .agg(pl.col("device_ms").sum())
        .collect()
    )
    parts = [
        times_of.select(
            "job", "device_ms", dimension=pl.lit(key), before=pl.col(f"{key} before").fill_null(UNATTRIBUTED),
            after=pl.col(f"{key} after").fill_null(UNATTRIBUTED),
        )
        for key in DIMENSIONS
    ]  # fmt: skip
    keys = ("dimension", "before", "after")
    rows = (
        pl.concat(parts)
        .filter(pl.col("before") != pl.col("after"))
        .group_by(keys)
        .agg(jobs=pl.col("job").n_unique(), device_ms=pl.col("device_ms").sum())
        .sort("device_ms", *keys, descending=[True, False, False, False])
    )
    return Moves(rows)
