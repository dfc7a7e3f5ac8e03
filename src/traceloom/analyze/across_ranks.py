"""Comparison of ranks: stragglers, imbalance of load, slow steps and pipeline bubbles."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze import lateness
from traceloom.analyze.lateness import build_chains, compute_lateness as lateness_lateness
from traceloom.analyze.matched_collectives import (
    MatchedCollectives,
    assign_rank_numbers,
    match_collectives,
)
from traceloom.analyze.rank_summary import (
    COMMUNICATION,
    LOAD_MEASURES,
    RankSummary,
    TimeClassType,
    compute_step_breakdown,
    summarize_rank,
)
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session

BALANCE_SCHEMA = build_schema(
    "measure step_count rank_count mean max max_rank min min_rank",
    "max_over_mean worst_step worst_max_over_mean worst_rank",
)
LOAD_SCHEMA = build_schema("rank host", *LOAD_MEASURES, dict.fromkeys(LOAD_MEASURES, pl.Float64()))


@dataclass(frozen=True)
class Imbalance(Result):
    """Balance of a job. Measures: docs/concepts/imbalance.md.

    Attributes:
        measures: One row per measure (compute_ns, embedding_ns, exchanged_bytes, tokens,
            memory_bytes) that at least two ranks have: mean, max, min per rank (means over the
            steps that all of them hold), max_over_mean (1 is even), and the step that is worst with
            its ratio and rank.
        ranks: Mean per step of each measure, per rank; null where it is not known.
    """

    measures: pl.DataFrame
    ranks: pl.DataFrame


def imbalance(parts: Sequence[RankSummary]) -> Imbalance:
    """Compares the load of ranks, in the mean and step by step."""
    loads = pl.concat(
        part.load.select(pl.lit(rank, pl.Int32).alias("rank"), pl.all())
        for part, rank in zip(parts, assign_rank_numbers(parts), strict=True)
    )
    schema = {"rank": pl.Int32(), "host": pl.String()}
    hosts = pl.DataFrame(
        {"rank": assign_rank_numbers(parts), "host": [part.host for part in parts]}, schema=schema
    )
    means = loads.group_by("rank").agg(pl.col(name).mean() for name in LOAD_MEASURES)
    ranks = hosts.unique("rank", keep="first", maintain_order=True).join(
        means, on="rank", how="left"
    )
    rows = []
    for name in LOAD_MEASURES:
        measured = loads.select(
            "rank", "step", pl.col(name).cast(pl.Float64).alias("value")
        ).drop_nulls("value")
        rank_count = measured["rank"].n_unique()
        common = measured.filter(pl.col("rank").n_unique().over("step") == rank_count)
        common = common if common.height else measured
        rank_means = (
            common.group_by("rank")
            .agg(pl.col("value").mean())
            .sort("value", "rank", descending=[True, False])
        )
        mean = rank_means["value"].mean()
        # Totals below 0 are of a damaged file
        if rank_count < 2 or not isinstance(mean, float) or mean <= 0:
            continue
        steps = (
            common.sort("value", "rank", descending=[True, False])
            .group_by("step", maintain_order=True)
            .agg(
                pl.col("value").first().alias("most"),
                pl.col("value").mean().alias("even"),
                pl.col("rank").first(),
            )
            .filter(pl.col("even") > 0)
            .with_columns((pl.col("most") / pl.col("even")).alias("ratio"))
            .sort("ratio", "step", descending=[True, False])
        )
        if not steps.height:
            continue
        (max_rank, max_value), (min_rank, min_value) = rank_means.row(0), rank_means.row(-1)
        figures = (
            name,
            common["step"].n_unique(),
            rank_count,
            mean,
            max_value,
            max_rank,
            min_value,
            min_rank,
            max_value / mean,
        )
        rows.append((*figures, steps["step"][0], steps["ratio"][0], steps["rank"][0]))
    return Imbalance(
        pl.DataFrame(rows, schema=BALANCE_SCHEMA, orient="row"),
        ranks.pipe(cast_to_schema, LOAD_SCHEMA).sort("rank"),
    )


STAGE_SCHEMA = build_schema(
    "rank pipeline stage stage_count step_count mean_window_ns mean_compute_ns",
    "mean_bubble_ns min_bubble_ns max_bubble_ns bubble_fraction",
)
STEP_SCHEMA = build_schema(
    "step rank pipeline stage window_ns compute_ns other_ns warm_up_ns steady_ns drain_ns bubble_ns in_pairs_ns",
)


@dataclass(frozen=True)
class Pipeline(Result):
    """Stages and bubbles. Definitions: docs/concepts/pipeline.md.

    Attributes:
        stages: One row per rank of a pipeline: pipeline (number), stage (0 first), stage_count, and
            over the steps the window, compute, bubble (mean, least, most) and bubble_fraction
            (bubble / window).
        steps: One row per step and rank: window_ns (first start to last end of compute over the
            ranks of the pipeline), compute_ns, other_ns (other communication between the rank's
            computes), warm_up_ns (before its first compute), steady_ns (between, neither computing
            nor in other communication), drain_ns (after its last), and bubble_ns = warm_up_ns +
            steady_ns + drain_ns; all but in_pairs_ns (the part of the bubble spent in sends and
            receives, not hidden) add up: compute + other + bubble = window.
    """

    stages: pl.DataFrame
    steps: pl.DataFrame


def find_pipelines(parts: Sequence[RankSummary], matched: MatchedCollectives) -> Pipeline:
    """Finds pipelines by which rank sends to which first, and their bubbles, on the job's clock."""
    frames = []
    for number, part in enumerate(parts):
        clock = matched.clock_of[number]
        moved = [
            pl.Series(name, clock.corrected(part.stages[name].to_numpy()))
            for name in ("first_ns", "last_ns")
        ]
        frames.append(
            part.stages.with_columns(*moved, pl.lit(matched.ranks[number], pl.Int32).alias("rank"))
        )
    rows = pl.concat(frames)
    positions = _assign_stages(rows)
    if not positions:
        return Pipeline(pl.DataFrame(schema=STAGE_SCHEMA), pl.DataFrame(schema=STEP_SCHEMA))
    stage_rows = pl.DataFrame(
        [(rank, *position) for rank, position in positions.items()],
        schema={"rank": pl.Int32(), "pipeline": pl.Int32(), "stage": pl.Int32()},
        orient="row",
    )
    rows = rows.join(stage_rows, on="rank", how="inner", maintain_order="left")
    start, end = (
        pl.col("first_ns").min().over("pipeline", "step"),
        pl.col("last_ns").max().over("pipeline", "step"),
    )
    bubbles = rows.with_columns(
        (end - start).alias("window_ns"),
        (pl.col("first_ns") - start).alias("warm_up_ns"),
        (end - pl.col("last_ns")).alias("drain_ns"),
        (pl.col("last_ns") - pl.col("first_ns") - pl.col("compute_ns") - pl.col("other_ns")).alias(
            "steady_ns"
        ),
    ).with_columns(
        (pl.col("warm_up_ns") + pl.col("steady_ns") + pl.col("drain_ns")).alias("bubble_ns"),
        (
            pl.min_horizontal("pair_before_ns", "warm_up_ns")
            + pl.min_horizontal("pair_inside_ns", "steady_ns")
            + pl.min_horizontal("pair_after_ns", "drain_ns")
        ).alias("in_pairs_ns"),
    )
    steps = bubbles.pipe(cast_to_schema, STEP_SCHEMA)
    steps = steps.sort("step", "pipeline", "stage", "rank", nulls_last=True)
    sums = steps.group_by("rank", "pipeline", "stage").agg(
        pl.len().alias("step_count"),
        pl.col("window_ns").mean().alias("mean_window_ns"),
        pl.col("compute_ns").mean().alias("mean_compute_ns"),
        pl.col("bubble_ns").mean().alias("mean_bubble_ns"),
        pl.col("bubble_ns").min().alias("min_bubble_ns"),
        pl.col("bubble_ns").max().alias("max_bubble_ns"),
        (pl.col("bubble_ns").sum() / pl.max_horizontal(pl.col("window_ns").sum(), 1)).alias(
            "bubble_fraction"
        ),
    )
    count = (pl.col("stage").max().over("pipeline") + 1).alias("stage_count")
    stages = sums.with_columns(count).pipe(cast_to_schema, STAGE_SCHEMA)
    return Pipeline(stages.sort("pipeline", "stage", "rank"), steps)


def _assign_stages(rows: pl.DataFrame) -> dict[int, tuple[int, int]]:
    """Returns rank -> pipeline and stage: a rank comes after the one that it first receives from.

    The first receive of a step brings activations, which come from the stage before. The first
    stage sends before it receives: what it then gets are gradients.
    """
    first = rows.sort("rank", "step", nulls_last=True).group_by("rank", maintain_order=True).first()
    receivers = first.filter(
        pl.col("receives_from").is_not_null(),
        pl.col("first_send_ns").is_null() | (pl.col("first_receive_ns") <= pl.col("first_send_ns")),
    )
    before = dict(receivers.select("rank", "receives_from").rows())
    ranks = {rank for pair in before.items() for rank in pair}
    starts = [rank for rank in sorted(ranks) if rank not in before]
    after: dict[int, list[int]] = {}
    for rank, source in before.items():
        after.setdefault(source, []).append(rank)
    positions: dict[int, tuple[int, int]] = {}
    for number, first in enumerate(starts):
        todo = [(first, 0)]
        while todo:
            rank, stage = todo.pop()
            if rank not in positions:
                positions[rank] = (number, stage)
                todo += [(other, stage + 1) for other in after.get(rank, [])]
    return positions


# A step is slow where it is longer than the median by more than this many standard deviations,
# which are estimated by 1.4826 × the median absolute deviation, and by more than 2 % of the median:
# with few equal steps the deviation is 0.
MAX_DEVIATIONS = 3.5
MIN_SHARE = 0.02
MIN_STEPS = 4

SLOW_STEP_SCHEMA = build_schema(
    "step duration_ns rank rank_count median_ns limit_ns slow over_ns", {"rank_count": pl.Int32}
)
DIFFERENCE_SCHEMA = build_schema("step rank class ns usual_ns more_ns", {"class": TimeClassType})


@dataclass(frozen=True)
class SlowSteps(Result):
    """Slow steps of a run. The rule: docs/concepts/slow-steps.md.

    Attributes:
        steps: One row per step that every recorded rank holds completely: duration_ns (of the rank
            that took longest), rank (that one), rank_count, median_ns (over the steps), limit_ns
            (the longest that is not slow; null where there are fewer than four steps), slow,
            over_ns (beyond the median).
        differences: For each slow step the account of the rank whose time without waiting in
            communication grew the most; of the rank that took longest, where that explains less
            than half of over_ns. class, ns, usual_ns (median of the same class over the steps that
            are not slow, on that rank), more_ns; the largest difference first. Classes that are 0
            in both are left out.
    """

    steps: pl.DataFrame
    differences: pl.DataFrame


def slow_steps(parts: Sequence[RankSummary]) -> SlowSteps:
    """Finds slow steps of a run of any number of ranks."""
    ranks = assign_rank_numbers(parts)
    rank_rows = pl.concat(
        part.steps.filter("complete").select(
            "step",
            pl.lit(rank, pl.Int32).alias("rank"),
            (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"),
        )
        for part, rank in zip(parts, ranks, strict=True)
    )
    steps = (
        rank_rows.sort("duration_ns", descending=True)
        .group_by("step", maintain_order=True)
        .agg(pl.col("duration_ns").first(), pl.col("rank").first(), pl.len().alias("rank_count"))
        .sort("step")
    )
    complete_steps = (
        steps.filter(pl.col("rank_count") == pl.col("rank_count").max()) if steps.height else steps
    )
    median, limit = compute_step_limit(complete_steps["duration_ns"].to_numpy())
    rated = complete_steps.with_columns(
        pl.lit(median, pl.Int64).alias("median_ns"),
        pl.lit(limit, pl.Int64).alias("limit_ns"),
        (pl.col("duration_ns") > pl.lit(limit, pl.Int64)).fill_null(value=False).alias("slow"),
        (pl.col("duration_ns") - pl.lit(median, pl.Int64)).alias("over_ns"),
    )
    rated = rated.pipe(cast_to_schema, SLOW_STEP_SCHEMA)
    slow = rated.filter("slow")
    normal_steps = rated.filter(~pl.col("slow"))["step"].implode()
    differences = [pl.DataFrame(schema=DIFFERENCE_SCHEMA)]
    for part, rank in zip(parts, ranks, strict=True) if slow.height else ():
        breakdown = compute_step_breakdown(part)
        normal = (
            breakdown.filter(pl.col("step").is_in(normal_steps))
            .group_by("class")
            .agg(pl.col("ns").median().alias("usual_ns"))
        )
        rows = breakdown.filter(pl.col("step").is_in(slow["step"].implode())).join(
            normal, on="class", how="left"
        )
        rows = rows.with_columns(
            pl.col("usual_ns").fill_null(0).cast(pl.Int64), pl.lit(rank, pl.Int32).alias("rank")
        ).with_columns((pl.col("ns") - pl.col("usual_ns")).alias("more_ns"))
        rows = rows.filter((pl.col("ns") != 0) | (pl.col("usual_ns") != 0))
        differences.append(rows.pipe(cast_to_schema, DIFFERENCE_SCHEMA))
    every_rank = pl.concat(differences).sort(
        "step", "more_ns", "class", "rank", descending=[False, True, False, False]
    )
    # A rank that waits for a late rank is as late: the account is that of the rank whose other time
    # grew the most, if that explains half.
    busy = every_rank.filter(pl.col("class") != COMMUNICATION).unique(
        "step", keep="first", maintain_order=True
    )
    both = slow.join(busy, on="step", how="left", suffix="_busy", maintain_order="left")
    explains = (2 * pl.col("more_ns") >= pl.col("over_ns")).fill_null(value=False)
    selected = both.select("step", rank=pl.when(explains).then("rank_busy").otherwise("rank"))
    largest_first = every_rank.join(
        selected, on=["step", "rank"], how="semi", maintain_order="left"
    )
    return SlowSteps(rated, largest_first)


def compute_step_limit(lengths: np.ndarray) -> tuple[int | None, int | None]:
    """Returns the median of step lengths, and the longest that is not slow; None with fewer than
    four steps.
    """
    if not lengths.size:
        return None, None
    median = float(np.median(lengths))
    if lengths.size < MIN_STEPS:
        return int(median), None
    deviation = 1.4826 * float(np.median(np.abs(lengths - median)))
    return int(median), int(median + max(MAX_DEVIATIONS * deviation, MIN_SHARE * median))


CHAIN_COUNT = 20


@dataclass(frozen=True)
class AcrossRanks(Result):
    """The comparison of the ranks of a job. Definitions: docs/concepts/across-ranks.md.

    Attributes:
        collectives: One row per collective that at least two ranks hold, by order: which rank came
            first and last, how long the others waited (wait_ns = launch_skew_ns + arrival_wait_ns),
            the transfer, how late the last one was (late_ns = explained_ns + unexplained_ns), its
            main cause, and the rank and cause where the chain ends.
        parts: One row per rank of each: wait_ns + transfer_ns = duration_ns.
        chains: The links of the longest waits, see `traceloom.analyze.lateness`.
        ranks: Per rank: own waits, waits of others for it (blame_ns), those that chains end at
            (root_ns).
        hosts: The same per host.
        reasons: By rank and cause at the ends of the chains.
        heat: Steps × ranks.
        clocks: How clocks were corrected, with the residual.
        unmatched: Calls without a partner on another recorded rank.
        slow: Slow steps.
        balance: Imbalance of load.
        pipeline: Stages and bubbles.
        notices: Mismatches, and limits of the result.
    """

    collectives: pl.DataFrame
    parts: pl.DataFrame
    chains: pl.DataFrame
    ranks: pl.DataFrame
    hosts: pl.DataFrame
    reasons: pl.DataFrame
    heat: pl.DataFrame
    clocks: pl.DataFrame
    unmatched: pl.DataFrame
    slow: SlowSteps
    balance: Imbalance
    pipeline: Pipeline
    notices: tuple[Notice, ...] = ()

    @property
    def collective_ns(self) -> int:
        """Time in matched collectives, summed over ranks."""
        return int(self.parts["duration_ns"].sum())

    @property
    def slowest(self) -> lateness.SlowRank | None:
        """The rank that most of the waiting goes back to; None where no rank waits for another."""
        return next(iter(lateness.find_slow_ranks(self.collectives)), None)

    @property
    def wait_ns(self) -> int:
        """The part of `collective_ns` that was waiting."""
        return int(self.parts["wait_ns"].sum())


def across_ranks(
    session: Session | Sequence[RankSummary], *, chain_count: int = CHAIN_COUNT
) -> AcrossRanks:
    """Compares the ranks of a job; the last comparison is cached as long as the parts of its ranks
    live.

    Args:
        session: The run; or the result of `summarize_rank` for each of its traces, so that ranks can be
            read one by one.
        chain_count: The number of longest waits whose chain of causes is written out.
    """
    global _last_comparison
    all_parts = (
        [summarize_rank(trace) for trace in session.traces]
        if isinstance(session, Session)
        else list(session)
    )
    if (
        _last_comparison is not None
        and (chain_count, len(all_parts)) == (_last_comparison[0], len(_last_comparison[1]))
        and all(ref() is part for ref, part in zip(_last_comparison[1], all_parts, strict=True))
    ):
        return _last_comparison[2]
    best: dict[
        object, RankSummary
    ] = {}  # of several windows of a rank the one with the most communication
    for number, part in enumerate(all_parts):
        key: object = part.rank if part.rank is not None else f"unknown {number}"
        if key not in best or part.calls.height > best[key].calls.height:
            best[key] = part
    parts = list(best.values())
    matched = match_collectives(parts)
    piped = find_pipelines(parts, matched)
    late = lateness_lateness(parts, matched, piped.stages)
    collectives = lateness.add_causes(matched, late)
    ranks = lateness.summarize_by_rank(matched, collectives)
    notices = list(matched.notices)
    world = max((part.world_size for part in parts if part.world_size is not None), default=0)
    if 2 <= len(parts) < world and any(part.calls.height for part in parts):
        cut = matched.instances.filter(~pl.col("whole").fill_null(value=False)).height
        text = (
            f"{len(parts)} of {world} ranks are recorded: the last to arrive at a collective may be one that is not, "
            f"and waits are at least what is shown; {cut} of {matched.instances.height} joined collectives miss ranks"
        )
        notices.append(Notice("ranks-missing", "warning", text, world - len(parts)))
    compared = AcrossRanks(
        collectives,
        matched.parts,
        build_chains(parts, matched, collectives, late, chain_count),
        ranks,
        lateness.summarize_by_host(ranks),
        lateness.summarize_reasons(collectives),
        lateness.wait_heat_map(matched, collectives),
        matched.clocks,
        matched.unmatched,
        slow_steps(parts),
        imbalance(parts),
        piped,
        tuple(notices),
    )
    _last_comparison = chain_count, [weakref.ref(part) for part in all_parts], compared
    return compared


_last_comparison: tuple[int, list[weakref.ref[RankSummary]], AcrossRanks] | None = None
