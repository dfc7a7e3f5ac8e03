"""A rank, or some, make the others wait."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Selection

_MOST_RANKS = 4


def straggler(ground: Ground) -> Iterator[Said]:
    """Ranks that begin late or work longer than the middle one."""
    ranks = ground.graph.nodes["rank"].drop_nulls().unique().sort().to_list()
    if len(ranks) < 2:
        yield Abstention("straggler", "only one rank was recorded")
        return
    work = (
        ground.graph.nodes.filter(ground.kinds.is_in(["host", "think", "launch", "kernel", "copy", "fill"]))
        .group_by("rank")
        .agg(pl.col("work_ns").sum(), first=pl.col("start_ns").min())
        .with_columns(late=pl.col("work_ns") + pl.col("first"))
        .sort("late", "rank", descending=[True, False])
    )
    for row in work.head(_MOST_RANKS).to_dicts():
        rank = row["rank"]
        yield Candidate(
            title=f"rank {rank} makes the others wait",
            changes=(Change("delay", Selection("host", "", (rank,))),),
            confidence=0.7,
            advice=f"See why rank {rank} is late (section across_ranks): its host, its data, its share of the work.",
            evidence=(Evidence(f"work of rank {rank}", rank, total_ns=row["work_ns"]),),
        )


def imbalance(ground: Ground) -> Iterator[Said]:
    """Ranks compute for different lengths of time."""
    ranks = ground.graph.nodes["rank"].drop_nulls().n_unique()
    chosen = Selection("kernels")
    mask = chosen.nodes(ground.graph)
    if ranks < 2 or not mask.any():
        yield Abstention("compute-imbalance", "it takes at least two ranks with GPU work")
        return
    sums = ground.graph.nodes.filter(pl.Series(mask)).group_by("rank").agg(pl.col("work_ns").sum())["work_ns"]
    largest, mean = int(sums.max()), float(sums.mean())  # type: ignore[arg-type]
    if largest < 1.05 * mean:
        return
    yield Candidate(
        title=f"one rank computes {largest / mean:.2f} × as long as the mean ({units.duration(largest)})",
        changes=(Change("balance", chosen),),
        confidence=0.5,
        advice="Give every rank the same amount of work: sequence lengths, experts, table shards, pipeline stages.",
    )


RULES = (
    Rule("straggler", "a rank makes the others wait", straggler),
    Rule("compute-imbalance", "ranks compute for different lengths of time", imbalance),
)
