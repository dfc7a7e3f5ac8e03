"""Who made whom wait: by rank, by host, by step, and by reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.across.lateness import CAUSE_NAMES, NOT_EXPLAINED, PEER, SCHEDULE, CauseType, Lateness, roots
from traceloom.analyze.across.matched import INSTANCE_SCHEMA, Matched
from traceloom.model.frames import as_declared, schema

COLLECTIVE_SCHEMA = schema(
    INSTANCE_SCHEMA,
    "late_ns cause cause_ns explained_ns unexplained_ns schedule_ns root_instance root_rank root_cause",
    {"cause": CauseType, "root_cause": CauseType},
)
RANK_SCHEMA = schema("rank host collective_count last_count wait_ns blame_ns root_ns alone_ns")
HOST_SCHEMA = schema("host collective_count last_count wait_ns blame_ns root_ns alone_ns")
HEAT_SCHEMA = schema("step rank wait_ns blame_ns root_ns")
REASON_SCHEMA = schema("rank cause collective_count waited_ns late_ns most_late_ns", {"cause": CauseType})

_BEYOND = pl.col("wait_ns") - pl.col("schedule_ns")  # what the order of a pipeline does not ask for


def with_causes(matched: Matched, lateness: Lateness) -> pl.DataFrame:
    """The instances with why their last rank was late and where the chain of causes ends."""
    frame = matched.instances
    rows = np.arange(frame.height)
    root, root_cause = roots(lateness, frame["met_ns"].to_numpy())
    names = pl.Series(list(CAUSE_NAMES), dtype=CauseType)
    nameless = [CAUSE_NAMES.index(name) for name in NOT_EXPLAINED]
    usual, peer = (lateness.excess_ns[:, CAUSE_NAMES.index(name)] for name in (SCHEDULE, PEER))
    lost = lateness.excess_ns[:, nameless].sum(axis=1)
    return frame.with_columns(
        pl.Series("late_ns", lateness.late_ns),
        names[lateness.cause].alias("cause"),
        pl.Series("cause_ns", lateness.excess_ns[rows, lateness.cause] if rows.size else rows),
        pl.Series("explained_ns", lateness.late_ns - lost),
        pl.Series("unexplained_ns", lost),
        # who waits longer only because it came earlier waits for the order, too
        pl.min_horizontal(pl.Series("schedule_ns", usual + np.maximum(peer, 0)), "wait_ns").alias("schedule_ns"),
        frame["instance"][root].alias("root_instance"),
        frame["last_rank"][root].alias("root_rank"),
        names[root_cause].alias("root_cause"),
    ).pipe(as_declared, COLLECTIVE_SCHEMA)


def by_rank(matched: Matched, collectives: pl.DataFrame) -> pl.DataFrame:
    """How long each rank waited, and how long the others waited for it."""
    schema = {"rank": pl.Int32(), "host": pl.String()}
    hosts = pl.DataFrame({"rank": matched.ranks, "host": matched.hosts}, schema=schema)
    waits = matched.parts.group_by("rank").agg(
        pl.len().alias("collective_count"), pl.col("last").sum().alias("last_count"), pl.col("wait_ns").sum()
    )
    blame = collectives.group_by(rank="last_rank").agg(
        pl.col("wait_ns").sum().alias("blame_ns"), pl.col("alone_ns").sum()
    )
    root = collectives.group_by(rank="root_rank").agg(_BEYOND.sum().alias("root_ns"))
    out = hosts.unique("rank", keep="first", maintain_order=True)
    for part in (waits, blame, root):
        out = out.join(part, on="rank", how="left", maintain_order="left")
    filled = out.with_columns(pl.col(name).fill_null(0) for name in RANK_SCHEMA if name not in ("rank", "host"))
    return filled.pipe(as_declared, RANK_SCHEMA).sort("rank")


def by_host(ranks: pl.DataFrame) -> pl.DataFrame:
    """The same, added over the ranks of each host."""
    sums = ranks.group_by("host", maintain_order=True).agg(pl.col(name).sum() for name in HOST_SCHEMA if name != "host")
    return sums.sort("root_ns", "host", descending=[True, False])


def heat(matched: Matched, collectives: pl.DataFrame) -> pl.DataFrame:
    """Steps × ranks: how long each rank waited in a step, and how long it kept others waiting."""
    waits = matched.parts.group_by("step", "rank").agg(pl.col("wait_ns").sum())
    blame = collectives.group_by("step", rank="last_rank").agg(pl.col("wait_ns").sum().alias("blame_ns"))
    root = collectives.group_by("step", rank="root_rank").agg(_BEYOND.sum().alias("root_ns"))
    keys = pl.concat([part.select("step", "rank") for part in (waits, blame, root)]).unique()
    for part in (waits, blame, root):
        keys = keys.join(part, on=["step", "rank"], how="left", nulls_equal=True)
    filled = keys.with_columns(pl.col(name).fill_null(0) for name in ("wait_ns", "blame_ns", "root_ns"))
    ordered = filled.pipe(as_declared, HEAT_SCHEMA)
    return ordered.sort("step", "rank", nulls_last=True)


@dataclass(frozen=True)
class SlowRank:
    """A rank that waiting goes back to.

    Attributes:
        rank: Which one.
        waited_ns: How long others waited for it, added up over them, beyond what the order of a pipeline asks for.
        fraction: Of all such waiting.
        collective_count: At how many collectives.
        cause: What most of it is there for, one of CAUSE_NAMES.
    """

    rank: int
    waited_ns: int
    fraction: float
    collective_count: int
    cause: str


def slow_ranks(collectives: pl.DataFrame) -> list[SlowRank]:
    """The ranks where the chains of these collectives end, the one with the most waiting first."""
    waits = collectives.filter(_BEYOND > 0, pl.col("root_rank").is_not_null())
    whole = int(waits.select(_BEYOND.sum()).item())
    causes = (
        waits.group_by("root_rank", "root_cause")
        .agg(_BEYOND.sum().alias("ns"), count=pl.len())
        .sort("ns", "root_cause", descending=[True, False])
    )
    ranks = (
        causes.group_by("root_rank", maintain_order=True)
        .agg(pl.col("ns", "count").sum(), pl.col("root_cause").first().cast(pl.String))
        .sort("ns", "root_rank", descending=[True, False])
    )
    return [SlowRank(rank, ns, ns / whole, count, cause) for rank, ns, count, cause in ranks.rows()]


def reasons(collectives: pl.DataFrame) -> pl.DataFrame:
    """By the rank and the cause where chains end: how long others waited for that, the largest first.

    The part of a wait that is the order of a pipeline is told apart, with the rank that was awaited.
    """
    beyond = pl.col("late_ns") - pl.col("schedule_ns")
    chained = collectives.select(rank="root_rank", cause="root_cause", waited_ns=_BEYOND, late_ns=beyond)
    schedule = pl.lit(SCHEDULE, CauseType)
    ordered = collectives.select(rank="last_rank", cause=schedule, waited_ns="schedule_ns", late_ns="schedule_ns")
    return (
        pl.concat([chained, ordered])
        .filter(pl.col("waited_ns") > 0)
        .group_by("rank", "cause")
        .agg(
            pl.len().alias("collective_count"),
            pl.col("waited_ns").sum(),
            pl.col("late_ns").sum(),
            pl.col("late_ns").max().alias("most_late_ns"),
        )
        .pipe(as_declared, REASON_SCHEMA)
        .sort("waited_ns", "rank", "cause", descending=[True, False, False])
    )
