"""How evenly work is spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.across.load import MEASURES
from traceloom.analyze.across.matched import numbered
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model.result import Result

BALANCE_SCHEMA = pl.Schema(
    {
        "measure": pl.String(),
        "step_count": pl.Int64(),
        "rank_count": pl.Int64(),
        "mean": pl.Float64(),
        "max": pl.Float64(),
        "max_rank": pl.Int32(),
        "min": pl.Float64(),
        "min_rank": pl.Int32(),
        "max_over_mean": pl.Float64(),
        "worst_step": pl.Int32(),
        "worst_max_over_mean": pl.Float64(),
        "worst_rank": pl.Int32(),
    }
)
LOAD_SCHEMA = pl.Schema({"rank": pl.Int32(), "host": pl.String(), **{name: pl.Float64() for name in MEASURES}})


@dataclass(frozen=True)
class Imbalance(Result):
    """Balance of a job. Measures: docs/concepts/imbalance.md.

    Attributes:
        measures: One row per measure (compute_ns, embedding_ns, exchanged_bytes, tokens, memory_bytes) that at least
            two ranks have: mean, max, min per rank (means over the steps that all of them hold), max_over_mean (1 is
            even), and the step that is worst with its ratio and rank.
        ranks: Mean per step of each measure, per rank; null where it is not known.
    """

    measures: pl.DataFrame
    ranks: pl.DataFrame


def imbalance(parts: Sequence[RankPart]) -> Imbalance:
    """Compare the load of ranks, in the mean and step by step."""
    loads = pl.concat(
        part.load.select(pl.lit(rank, pl.Int32).alias("rank"), pl.all())
        for part, rank in zip(parts, numbered(parts), strict=True)
    )
    hosts = pl.DataFrame(
        {"rank": numbered(parts), "host": [part.host for part in parts]},
        schema={"rank": pl.Int32(), "host": pl.String()},
    )
    means = loads.group_by("rank").agg(pl.col(name).mean() for name in MEASURES)
    ranks = hosts.unique("rank", keep="first", maintain_order=True).join(means, on="rank", how="left")
    rows = [row for name in MEASURES if (row := _measure(loads, name)) is not None]
    return Imbalance(
        pl.DataFrame(rows, schema=BALANCE_SCHEMA),
        ranks.select(list(LOAD_SCHEMA)).cast(dict(LOAD_SCHEMA)).sort("rank"),  # type: ignore[arg-type]
    )


def _measure(loads: pl.DataFrame, name: str) -> dict[str, object] | None:
    measured = loads.filter(pl.col(name).is_not_null()).select(
        "rank", "step", pl.col(name).cast(pl.Float64).alias("value")
    )
    many = measured["rank"].n_unique()
    if many < 2:
        return None
    common = measured.filter(pl.col("rank").n_unique().over("step") == many)
    common = common if common.height else measured
    by_rank = common.group_by("rank").agg(pl.col("value").mean()).sort("value", "rank", descending=[True, False])
    mean = float(str(by_rank["value"].mean()))
    if not mean:
        return None
    steps = (
        common.sort("value", "rank", descending=[True, False])
        .group_by("step", maintain_order=True)
        .agg(pl.col("value").first().alias("most"), pl.col("value").mean().alias("even"), pl.col("rank").first())
        .filter(pl.col("even") > 0)
        .with_columns((pl.col("most") / pl.col("even")).alias("ratio"))
        .sort("ratio", "step", descending=[True, False])
    )
    return {
        "measure": name,
        "step_count": common["step"].n_unique(),
        "rank_count": many,
        "mean": mean,
        "max": by_rank["value"][0],
        "max_rank": by_rank["rank"][0],
        "min": by_rank["value"][-1],
        "min_rank": by_rank["rank"][-1],
        "max_over_mean": by_rank["value"][0] / mean,
        "worst_step": steps["step"][0],
        "worst_max_over_mean": steps["ratio"][0],
        "worst_rank": steps["rank"][0],
    }
