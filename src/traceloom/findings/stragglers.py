"""Rules about differences between ranks: stragglers, uneven work and shards, pipeline bubbles."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import polars as pl

from traceloom.analyze.idle import HOST_CAUSES
from traceloom.analyze.kernel_kinds import classify_kinds
from traceloom.analyze.lateness import CAUSE_LABELS, find_slow_ranks
from traceloom.changes.changes import Change, NodeSelection, Selection
from traceloom.changes.scenario import Scenario, find_first_starts
from traceloom.changes.whatif import whatif_many
from traceloom.findings.communication import build_balanced_exchange
from traceloom.findings.context import Bools, Context
from traceloom.findings.rule import NEVER_MEET, ONE_RANK, Candidate, FindingRule, Message
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace.batch import concatenate_by_trace
from traceloom.trace.notice import Abstention, Evidence

_MAX_RANKS = 4
_MIN_IMBALANCE = 1.05
_WORK_KINDS = (
    graph_schema.HOST,
    graph_schema.THINK,
    graph_schema.LAUNCH,
    graph_schema.KERNEL,
    graph_schema.COPY,
    graph_schema.FILL,
)
_MIN_BLAME_SHARE = 0.1  # of all waiting: the least share that is due to a rank that is called slow
_ADVICE = {
    "compute": "its share of the work, its clocks and power, what else runs on its device.",
    "host_data_loading": "its data: more workers, its storage, the size of its files.",
    "host_garbage_collection": "collect on all ranks at the same step: gc.disable() and gc.collect() every N steps.",
}
_DEFAULT_ADVICE = (
    "its host (processes beside it, its CPU's clock), its data, its share of the work."
)
_MEASURES = {
    "tokens": "tokens",
    "exchanged_bytes": "exchanged bytes",
    "embedding_ns": "time in embedding tables",
}


def find_stragglers(context: Context) -> Iterator[Message]:
    """Reports ranks that begin late or work longer than the median."""
    assert context.rank_comparison is not None
    # Collectives of the step at which others waited, with the rank and cause at the end of the
    # chain of reasons.
    roots = context.rank_comparison.collectives.filter(
        pl.col("wait_ns") > 0, pl.col("root_rank").is_not_null()
    )
    roots = context.in_step(roots) if "step" in roots.columns else roots
    slow = {
        slow_rank.rank: slow_rank
        for slow_rank in find_slow_ranks(context.rank_comparison.collectives)
        if slow_rank.fraction >= _MIN_BLAME_SHARE
    }
    # Else those whose work, from when they begin, ends last.
    works = context.compute_work_by_rank(context.select_kinds(*_WORK_KINDS))
    first_starts = find_first_starts(context.graph, *_WORK_KINDS)
    latest = slow or sorted(works, key=lambda rank: -(works[rank] + first_starts[rank]))
    ranks = [rank for rank in latest if rank in context.meeting][:_MAX_RANKS]
    # Ranks that were given more to do, by more than their compute takes longer in total.
    kernels = context.select_kinds(graph_schema.KERNEL)
    worst = _find_busiest_rank(context, kernels) if kernels.any() else None
    measures = _select_uneven_measures(context)
    if worst is not None:
        measures = measures.filter(
            (pl.col("measure") != "embedding_ns")
            | (pl.col("max_over_mean") > _MIN_IMBALANCE * worst[1])
        )
    uneven = measures["max_rank"].to_list()
    for rank in ranks:
        cause = slow[rank].cause if rank in slow else None
        # A rank with more to do is not slow: see compute-imbalance and shard-imbalance.
        if not (rank in uneven and cause == "compute"):
            yield _build_straggler(
                context, (rank,), f"rank {rank}", roots.filter(pl.col("root_rank") == rank), cause
            )
    # Hosts with several ranks of which more than one is late, where there are other hosts.
    hosts = {trace.rank: trace.meta.host for trace in context.traces if trace.rank is not None}
    for host in dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts):
        members = tuple(sorted(rank for rank, name in hosts.items() if name == host))
        if (
            host is None
            or len(set(hosts.values())) < 2
            or sum(rank in ranks for rank in members) < 2
        ):
            continue
        slow_members = [slow[rank] for rank in members if rank in slow]
        # The cause of most of the waiting for these ranks.
        cause = max(slow_members, key=lambda slow_rank: slow_rank.waited_ns).cause if slow else None
        yield _build_straggler(
            context,
            members,
            f"host {host} (ranks {', '.join(map(str, members))})",
            roots.filter(pl.col("root_rank").is_in(list(members))),
            cause,
        )


def _build_straggler(
    context: Context, ranks: tuple[int, ...], subject: str, roots: pl.DataFrame, cause: str | None
) -> Candidate:
    """Returns the candidate for ranks that begin late or work longer, with the collectives at which
    others waited for them.
    """
    cause_note = "" if cause is None else f": {CAUSE_LABELS[cause]}"
    assert context.rank_comparison is not None
    # The waits of the ranks that waited longest, on their own clocks.
    waits = []
    for row in roots.sort("wait_ns", descending=True).head(3).to_dicts():
        parts = context.rank_comparison.parts.filter(pl.col("instance") == row["instance"]).sort(
            "wait_ns", descending=True
        )
        waiting = parts["rank"][0] if parts.height else None
        trace = context.find_trace(waiting)
        if parts.height and trace is not None:
            event = trace.events.row(parts["event"][0], named=True)
            label = f"rank {waiting} waits in {row['kind']}"
            waits.append(
                Evidence(label, waiting, event["start_ns"], event["duration_ns"], event["lane"])
            )
    waited = units.format_duration(int(roots["wait_ns"].sum()))
    meetings = units.format_quantity(roots.height, "collective")
    wait_summary = (
        Evidence(
            f"waits that end at {subject}",
            ranks[0],
            count=roots.height,
            total_ns=int(roots["wait_ns"].sum()),
        ),
    )
    return Candidate(
        title=f"{subject} makes the others wait{cause_note}"
        + (f" ({waited} at {meetings})" if roots.height else ""),
        changes=(Change("delay", Selection("host", "", ranks)),),
        confidence=0.7 if roots.height else 0.4,
        advice=f"See what {subject} does at that time: {_ADVICE.get(cause or '', _DEFAULT_ADVICE)}",
        evidence=(*waits, *(wait_summary if roots.height else ())),
        at_most_ns=_compute_lag_ns(context, ranks),
        host=partial(_select_host_stretches, context, host=cause is None or cause in HOST_CAUSES),
    )


def _select_host_stretches(context: Context, *, host: bool) -> pl.DataFrame:
    """Returns what the hosts of all ranks do, to compare late ones with the others; empty where the
    host is not the cause.
    """
    work = context.select_kinds(graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH)
    return context.stretches(work if host else np.zeros_like(work))


def _compute_lag_ns(context: Context, ranks: tuple[int, ...]) -> int:
    """Returns by how much these ranks together work more than the median of the others, a bound on
    what they cost; ns.

    Work of each name differs from rank to rank by chance, as often upwards as downwards.
    """
    in_step = True if context.elsewhere is None else ~context.elsewhere
    lag_ns = 0
    for node_kinds in (
        (graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH),
        (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL),
    ):
        works = context.compute_work_by_rank(context.select_kinds(*node_kinds) & in_step)
        other_works = [work for rank, work in works.items() if rank not in ranks]
        max_work = max((works.get(rank, 0) for rank in ranks), default=0)
        lag_ns += max(max_work - round(float(np.median(other_works or [max_work]))), 0)
    if context.is_pipeline:  # when a stage begins its step is up to the schedule
        return lag_ns
    first_starts = find_first_starts(
        context.graph, graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH
    )
    typical = float(
        np.median([start for rank, start in first_starts.items() if rank not in ranks] or [0])
    )
    return lag_ns + max(
        round(max((first_starts.get(rank, typical) for rank in ranks), default=typical) - typical),
        0,
    )


def find_compute_imbalance(context: Context) -> Iterator[Message]:
    """Reports ranks that compute for different lengths of time."""
    selection = Selection("kernels")
    mask = selection.nodes(context.graph)
    worst = _find_busiest_rank(context, mask)
    if worst is None:
        return
    largest, ratio, rank = worst
    measures, also = _select_uneven_measures(context), ""
    if measures.height:  # measures other than time that are uneven: tokens, bytes, tables
        row = measures.row(0, named=True)
        also = f"; so are {_MEASURES[row['measure']]} (rank {row['max_rank']}: {row['max_over_mean']:.2f} ×)"
    yield Candidate(
        title=f"rank {rank} computes {ratio:.2f} × as long as the mean ({units.format_duration(largest)}){also}",
        changes=(
            Change("balance", selection),
            *((even,) if (even := build_balanced_exchange(context)) is not None else ()),
        ),
        confidence=0.5,
        advice="Give every rank the same amount of work: sequence lengths, tokens per expert, table shards.",
        evidence=(
            Evidence(f"kernels of rank {rank}", rank, total_ns=largest),
            *context.evidence(mask & (context.graph.node_ranks == rank), 2),
        ),
    )


def _find_busiest_rank(context: Context, mask: Bools) -> tuple[int, float, int] | None:
    """Returns the work of the rank that works longest, its ratio to the mean, and the rank; None
    where all are about even.
    """
    works = context.compute_work_by_rank(mask)
    rank = max(works, key=lambda rank: works[rank])
    ratio = works[rank] / max(float(sum(works.values())) / max(context.rank_count, 1), 1.0)
    return None if ratio < _MIN_IMBALANCE else (works[rank], ratio, rank)


def _select_uneven_measures(context: Context) -> pl.DataFrame:
    """Returns measures of what ranks were given that differ, the most uneven first."""
    assert context.rank_comparison is not None
    return context.rank_comparison.balance.measures.filter(
        pl.col("measure").is_in(list(_MEASURES)), pl.col("max_over_mean") > _MIN_IMBALANCE
    ).sort("max_over_mean", descending=True)


def find_shard_imbalance(context: Context) -> Iterator[Message]:
    """Reports embedding tables that are spread unevenly."""
    work = concatenate_by_trace(classify_kinds(trace) for trace in context.traces)
    mask = context.select_nodes_of_stacked_events(
        work.filter(pl.col("kind") == "embedding")
    ) & context.select_kinds(graph_schema.KERNEL)
    worst = _find_busiest_rank(context, mask) if mask.any() else None
    if worst is None:
        return
    largest, ratio, rank = worst
    yield Candidate(
        title=f"rank {rank} spends {ratio:.2f} × the mean in embedding tables ({units.format_duration(largest)})",
        changes=(Change("balance", NodeSelection("embedding kernels", mask, "kernels")),),
        confidence=0.5,
        advice="Plan the shards by measured cost: split large tables by row or column, move tables between ranks.",
        evidence=context.evidence(mask & (context.graph.node_ranks == rank)),
    )


RULES = (
    FindingRule(
        "straggler", "a rank or host makes the others wait", find_stragglers, (ONE_RANK, NEVER_MEET)
    ),
    FindingRule(
        "compute-imbalance",
        "ranks compute for different lengths of time",
        find_compute_imbalance,
        (
            (
                lambda context: (
                    context.rank_count < 2 or not Selection("kernels").nodes(context.graph).any()
                ),
                "it takes at least two ranks with GPU work",
            ),
            (
                lambda context: context.is_pipeline,
                "stages of a pipeline do different work: see pipeline-bubbles",
            ),
            NEVER_MEET,
        ),
    ),
    FindingRule(
        "shard-imbalance",
        "embedding tables are spread unevenly",
        find_shard_imbalance,
        (ONE_RANK, NEVER_MEET),
    ),
)

_MIN_BUBBLE_SHARE = 0.05  # of a stage's window
_BUBBLES_LEFT = 0.5  # of the bubbles, with two chunks per stage
# Iterations until the step is shorter by what the schedule saves, and the tolerance
_MAX_TRIES, _TOLERANCE = (
    6,
    0.01,
)
# Microbatches, from which on bubbles hardly matter (Huang et al., GPipe, 2019, section 2)
_MICROBATCHES_PER_STAGE = 4


def find_pipeline_bubbles(context: Context) -> Iterator[Message]:
    """Reports stages that wait for each other at the beginning and end of each step."""
    assert context.rank_comparison is not None
    rows = context.in_step(context.rank_comparison.pipeline.steps)
    if not rows.height:
        messages = pl.col("kind").is_in(["send", "receive"])
        if context.graph.communication.select(messages.any()).item():
            yield Abstention(
                "pipeline-bubbles", "ranks send to each other, but the order of stages is not known"
            )
        return
    window, bubble = float(rows["window_ns"].sum()), float(rows["bubble_ns"].sum())
    if bubble < _MIN_BUBBLE_SHARE * window:
        return
    share = bubble / max(window, 1.0)
    mean_ns, left_ns, assumption = _estimate_better_schedule(context, rows)
    worst = rows.sort("bubble_ns", descending=True).head(3)
    stages = rows["stage"].n_unique()
    yield Candidate(
        title=f"pipeline bubbles take {units.format_share(share, 1)} of {stages} stages' time",
        changes=(_build_shorter_step(context, share, mean_ns, mean_ns - left_ns),),
        confidence=0.4,
        advice=f"More microbatches per step, or an interleaved or zero-bubble schedule: the saving assumes {assumption}.",
        evidence=tuple(
            Evidence(f"bubbles of stage {row['stage']}", row["rank"], total_ns=row["bubble_ns"])
            for row in worst.to_dicts()
        ),
        at_most_ns=round((mean_ns - left_ns) * context.step_count),
    )


def _build_shorter_step(
    context: Context, share: float, bubble_ns: float, target_ns: float
) -> Change:
    """Returns a change that shortens everything, so that the step gets as much shorter as the
    removed bubbles are long.

    All stages wait in turn, so that a shorter bubble shortens the whole step evenly. Stages are in
    different steps at the same time: where the graph of one step also holds a part of others, which
    the change leaves as they are, a smaller factor is needed for the same time.
    """
    everything = np.ones(context.graph.nodes.height, dtype=np.bool_)
    base = Scenario.of(context.graph)

    def change(fraction: float) -> Change:
        return Change(
            "scale", NodeSelection("everything, by the bubbles that go", everything), 1 - fraction
        )

    removed_share = share * target_ns / max(bubble_ns, 1.0)
    for _ in range(_MAX_TRIES):
        times = whatif_many(
            context.graph, (base, context.changed(base, [change(removed_share)])), context.plan
        )
        saved = float(times[0] - times[1]) / context.step_count
        if saved <= 0 or saved >= (1 - _TOLERANCE) * target_ns:
            break
        removed_share = min(removed_share * target_ns / saved, 1.0)
    return change(removed_share)


def _estimate_better_schedule(context: Context, rows: pl.DataFrame) -> tuple[float, float, str]:
    """Estimates a better schedule: four microbatches per stage where there are fewer; else two
    chunks per stage.

    With m microbatches each stage waits (stages - 1) / m of the time it computes for the pipeline
    to fill and to drain; smaller ones fill it sooner. The least wait of any stage between two
    microbatches is for messages, and occurs once for each microbatch, however small.

    Source: Huang et al., GPipe (2019), and Narayanan et al., Megatron-LM (2021), section 2.2.

    Returns:
        Bubbles of a stage, the mean over stages; what is left of them, ns; and the schedule, in
        words.
    """
    # The number of activations that each rank of the last stages gets in the step, where it is
    # unique.
    now = None
    if context.steps is not None:
        last = rows.filter(pl.col("stage") == pl.col("stage").max().over("pipeline"))["rank"]
        received = context.graph.nodes.filter(
            pl.Series(context.select_kinds(graph_schema.RECEIVE)),
            pl.col("rank").is_in(last.implode()),
            pl.col("step").is_in(list(context.steps)),
        )
        counts = received.group_by("rank", "step").len()["len"].unique().to_list()
        now = int(counts[0]) if len(counts) == 1 else None
    bubble = float(rows["bubble_ns"].mean() or 0)  # type: ignore[arg-type]
    target_count = _MICROBATCHES_PER_STAGE * rows["stage"].n_unique()
    if now is None:
        return bubble, bubble * _BUBBLES_LEFT, "two chunks per stage, which halve the bubbles"
    waits = min(float(rows["steady_ns"].min() or 0), bubble)  # type: ignore[arg-type]
    message, filling = waits / max(now - 1, 1), bubble - waits
    if now < target_count:
        remaining_ns = filling * now / target_count + message * (target_count - 1)
        return (
            bubble,
            min(remaining_ns, bubble),
            f"{target_count} microbatches, four per stage, in place of {now}",
        )
    remaining_ns = filling * _BUBBLES_LEFT + 2 * waits  # each chunk has messages of its own
    return (
        bubble,
        min(remaining_ns, bubble),
        "two chunks per stage, which halve the time until all are busy",
    )


PIPELINE_RULES = (
    FindingRule(
        "pipeline-bubbles",
        "stages of a pipeline wait for each other",
        find_pipeline_bubbles,
        (ONE_RANK,),
    ),
)
