"""How evenly work is spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.across.load import MEASURES
from traceloom.analyze.across.matched import numbered
from traceloom.analyze.across.rank_part import RankPart
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

BALANCE_SCHEMA = schema(
    "measure step_count rank_count mean max max_rank min min_rank",
    "max_over_mean worst_step worst_max_over_mean worst_rank",
)
LOAD_SCHEMA = schema("rank host", *MEASURES, dict.fromkeys(MEASURES, pl.Float64()))


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
    schema = {"rank": pl.Int32(), "host": pl.String()}
    hosts = pl.DataFrame({"rank": numbered(parts), "host": [part.host for part in parts]}, schema=schema)
    means = loads.group_by("rank").agg(pl.col(name).mean() for name in MEASURES)
    ranks = hosts.unique("rank", keep="first", maintain_order=True).join(means, on="rank", how="left")
    rows = []
    for name in MEASURES:
        measured = loads.select("rank", "step", pl.col(name).cast(pl.Float64).alias("value")).drop_nulls("value")
        many = measured["rank"].n_unique()
        common = measured.filter(pl.col("rank").n_unique().over("step") == many)
        common = common if common.height else measured
        by_rank = common.group_by("rank").agg(pl.col("value").mean()).sort("value", "rank", descending=[True, False])
        mean = by_rank["value"].mean()
        if many < 2 or not isinstance(mean, float) or mean <= 0:  # below 0 are totals of a damaged file
            continue
        steps = (
            common.sort("value", "rank", descending=[True, False])
            .group_by("step", maintain_order=True)
            .agg(pl.col("value").first().alias("most"), pl.col("value").mean().alias("even"), pl.col("rank").first())
            .filter(pl.col("even") > 0)
            .with_columns((pl.col("most") / pl.col("even")).alias("ratio"))
            .sort("ratio", "step", descending=[True, False])
        )
        if not steps.height:
            continue
        (max_rank, most), (min_rank, least) = by_rank.row(0), by_rank.row(-1)
        figures = name, common["step"].n_unique(), many, mean, most, max_rank, least, min_rank, most / mean
        rows.append((*figures, steps["step"][0], steps["ratio"][0], steps["rank"][0]))
    return Imbalance(
        pl.DataFrame(rows, schema=BALANCE_SCHEMA, orient="row"), ranks.pipe(as_declared, LOAD_SCHEMA).sort("rank")
    )
