"""Collectives joined over ranks, on one clock, split into waiting and transfer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.collectives import add_up_or_null
from traceloom.analyze.rank_summary import RankSummary
from traceloom.graph.communication import match_parts
from traceloom.graph.job import (
    FROM_ROOT,
    TO_ROOT,
    HostClock,
    choose_meetings,
    fit_clocks,
)
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.notice import Notice

Ints = NDArray[np.int64]

PART_SCHEMA = build_schema(
    "instance part rank event step start_ns duration_ns wait_ns",
    "launch_skew_ns arrival_wait_ns transfer_ns late_ns last sends",
    {"part": pl.Int64, "last": pl.Boolean},
)
INSTANCE_SCHEMA = build_schema(
    "instance step kind group group_size sequence size_bytes recorded whole evidence start_ns met_ns start_skew_ns",
    "end_skew_ns first_rank last_rank alone_ns wait_ns launch_skew_ns arrival_wait_ns transfer_ns transfer_gb_per_s",
)
CLOCK_SCHEMA = build_schema("host ranks offset_ns drift residual_ns meetings")


@dataclass(frozen=True)
class MatchedCollectives:
    """Collectives of several ranks that belong together.

    Attributes:
        parts: One row per rank of each collective, by instance, then arrival (last arriver last):
            times on the job's clock, duration_ns = wait_ns + transfer_ns, wait_ns = launch_skew_ns
            + arrival_wait_ns (both null where the launch of the last arriver is not recorded),
            late_ns (own start - first start), last, sends (for pairs: whether this rank sends; null
            for others); step is this rank's.
        instances: One row per collective. `recorded` ranks of `group_size`; `whole` where all are
            recorded (null where the size of the group is not known). `alone_ns`: how much later the
            last came than the last but one. `transfer_ns`: median over the ranks.
            `transfer_gb_per_s`: bus bandwidth of the transfer alone.
        clocks: One row per host: the offset added to its times, and the residual of the fit.
        ranks: The rank of each part (ranks that the files do not state get free numbers).
        hosts: The host of each part.
        notices: Mismatches.
        unmatched: Calls that found no partner on another recorded rank: rank, kind, group, count.
    """

    parts: pl.DataFrame
    instances: pl.DataFrame
    clocks: pl.DataFrame
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    clock_of: tuple[HostClock, ...]
    notices: tuple[Notice, ...]
    unmatched: pl.DataFrame


def assign_rank_numbers(parts: Sequence[RankSummary]) -> tuple[int, ...]:
    """Returns the rank of each part; a part without one gets the lowest free number."""
    recorded = [part.rank for part in parts]
    free = iter(number for number in range(2 * len(parts) + 1) if number not in recorded)
    return tuple(next(free) if rank is None else rank for rank in recorded)


def match_collectives(parts: Sequence[RankSummary]) -> MatchedCollectives:
    """Joins the collectives of ranks, corrects their clocks by them, and splits each into waiting
    and transfer.
    """
    ranks = assign_rank_numbers(parts)
    hosts = tuple(part.host or f"rank {rank}" for part, rank in zip(parts, ranks, strict=True))
    frames = []
    for number, (part, rank) in enumerate(zip(parts, ranks, strict=True)):
        # For a rank with kernels only the kernels
        where = "device" if part.ledger.device is not None else "host"
        own_calls = part.calls.filter(pl.col("where") == where, pl.col("kind").ne_missing("layout"))
        part_and_rank = pl.lit(number, pl.Int64).alias("part"), pl.lit(rank, pl.Int32).alias("rank")
        end = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
        frames.append(own_calls.select(*part_and_rank, *_COLUMNS, end))
    calls = pl.concat(frames).with_columns(
        pl.col("kind").replace({"recv": "receive"}),
        pl.col("members").alias("ranks"),
        pl.lit(None, pl.Int64).alias("tag"),
    )
    joined = match_parts(calls)
    assigned = calls.with_columns(
        pl.Series("instance", joined.instance),
        pl.Series("evidence", joined.evidence, dtype=pl.String),
    )
    matched_calls = assigned.filter(pl.col("instance") >= 0)
    host_of = dict(enumerate(hosts))
    end_calls = choose_meetings(
        matched_calls.with_columns(
            pl.col("part")
            .replace_strict(host_of, default=None, return_dtype=pl.String)
            .alias("host")
        )
    )
    host_of |= dict(end_calls.select("part", "host").iter_rows())
    hosts = tuple(host_of[number] for number in range(len(parts)))
    fitted = fit_clocks(end_calls.select("instance", "host", "end_ns"), list(dict.fromkeys(hosts)))
    clock_of = tuple(fitted[host] for host in hosts)
    part_of = matched_calls["part"].to_numpy()
    moved = []  # on the job's clock
    for name in ("start_ns", "end_ns", "launch_ns"):
        times = matched_calls[name].fill_null(0).to_numpy().copy()
        for number, clock in enumerate(clock_of):
            times[part_of == number] = clock.corrected(times[part_of == number])
        moved.append(pl.when(pl.col(name).is_not_null()).then(pl.Series(name, times)).alias(name))
    rows = _split(matched_calls.with_columns(moved))
    unmatched = (
        assigned.filter(
            (pl.col("instance") < 0)
            & ((pl.col("group_size") != 1) | pl.col("group_size").is_null())
        )
        .group_by("rank", "kind", "group", maintain_order=True)
        .agg(pl.len().cast(pl.Int64).alias("count"))
        .sort("rank", "kind", "group", nulls_last=True)
    )
    clocks = [
        (host, hosts.count(host), clock.offset_ns, clock.drift, clock.residual_ns, clock.meetings)
        for host, clock in fitted.items()
    ]
    return MatchedCollectives(
        rows.pipe(cast_to_schema, PART_SCHEMA),
        _build_instances(rows),
        pl.DataFrame(clocks, schema=CLOCK_SCHEMA, orient="row"),
        ranks,
        hosts,
        clock_of,
        joined.notices,
        unmatched,
    )


_COLUMNS = (
    "event",
    "step",
    "kind",
    "group",
    "group_size",
    "sequence",
    "in_bytes",
    "in_splits",
    "peer",
    "launch_ns",
    "start_ns",
    "size_bytes",
    "bus_factor",
    "members",
)


def _split(calls: pl.DataFrame) -> pl.DataFrame:
    """Returns waiting and transfer of every part; rows by instance and arrival."""
    kind, is_own_peer = pl.col("kind").fill_null(""), pl.col("peer") == pl.col("rank")
    root, rootless = is_own_peer.fill_null(value=False), pl.col("peer").is_null()
    is_giver = ~kind.is_in(FROM_ROOT) | root | rootless
    is_taker = (~kind.is_in(TO_ROOT) | root | rootless) & ~(kind.is_in(FROM_ROOT) & root)
    rows = calls.with_columns(is_giver.alias("gives"), is_taker.alias("takes"))
    rows = rows.sort("instance", "gives", "start_ns", "rank")
    key = "instance"
    rows = rows.with_columns(
        pl.col("start_ns").filter("gives").max().over(key).alias("met_ns"),
        pl.col("start_ns").min().over(key).alias("first_ns"),
        pl.col("launch_ns").last().over(key).alias("last_launch_ns"),
        (pl.int_range(pl.len()).over(key) == pl.len().over(key) - 1).alias("last"),
    )
    duration = pl.col("end_ns") - pl.col("start_ns")
    until_met = (pl.col("met_ns") - pl.col("start_ns")).clip(0)
    wait = pl.when("takes").then(pl.min_horizontal(until_met, duration)).otherwise(0)
    rows = rows.with_columns(duration.alias("duration_ns"), wait.alias("wait_ns"))
    launched = pl.min_horizontal("last_launch_ns", "met_ns") - pl.col("start_ns")
    skew = pl.when(pl.col("last_launch_ns").is_not_null()).then(
        pl.min_horizontal(launched.clip(0), "wait_ns")
    )
    return rows.with_columns(
        skew.alias("launch_skew_ns"),
        (pl.col("wait_ns") - skew).alias("arrival_wait_ns"),
        (pl.col("duration_ns") - pl.col("wait_ns")).alias("transfer_ns"),
        (pl.col("start_ns") - pl.col("first_ns")).alias("late_ns"),
        pl.when(pl.col("kind").is_in(["send", "receive"]))
        .then(pl.col("kind") == "send")
        .alias("sends"),
    )


def _build_instances(rows: pl.DataFrame) -> pl.DataFrame:
    start = pl.col("start_ns")
    pair = pl.col("kind").first().is_in(["send", "receive"])
    size = pl.when(pair).then(2).otherwise(pl.col("group_size").first())
    frame = rows.group_by("instance", maintain_order=True).agg(
        pl.col("step").last(),
        pl.when(pair).then(pl.lit("send_recv")).otherwise(pl.col("kind").first()).alias("kind"),
        pl.col("group").first(),
        size.alias("group_size"),
        pl.col("sequence").first(),
        pl.col("size_bytes").max(),
        pl.len().alias("recorded"),
        pl.col("evidence").first(),
        start.min(),
        pl.col("met_ns").first(),
        (start.max() - start.min()).alias("start_skew_ns"),
        (pl.col("end_ns").max() - pl.col("end_ns").min()).alias("end_skew_ns"),
        pl.col("rank").sort_by("start_ns").first().alias("first_rank"),
        pl.col("rank").last().alias("last_rank"),
        (start.last() - start.slice(0, pl.len() - 1).max()).clip(0).alias("alone_ns"),
        pl.col("wait_ns").sum(),
        add_up_or_null("launch_skew_ns"),
        add_up_or_null("arrival_wait_ns"),
        pl.col("transfer_ns").median().cast(pl.Int64),
        pl.col("bus_factor").first(),
    )
    rate = pl.when(pl.col("transfer_ns") > 0).then(
        pl.col("size_bytes") * pl.col("bus_factor") / pl.col("transfer_ns")
    )
    return frame.with_columns(
        (pl.col("recorded") >= pl.col("group_size")).alias("whole"), rate.alias("transfer_gb_per_s")
    ).pipe(cast_to_schema, INSTANCE_SCHEMA)
