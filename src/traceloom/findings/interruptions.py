"""Rules about what interrupts the step or distorts its recording: garbage collection, compilation,
autotuning, graph breaks, recording overhead, slow steps.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import polars as pl

from traceloom import analyze
from traceloom.analyze.across_ranks import MIN_STEPS, SlowSteps
from traceloom.analyze.idle import GARBAGE_COLLECTION_PATTERN
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import find_step_spans
from traceloom.changes.changes import Change, NodeSelection, match_node_names
from traceloom.findings.context import Context, shorten_name
from traceloom.findings.rule import NO_HOST, Candidate, FindingRule, Message, Remark
from traceloom.graph import graph as graph_schema
from traceloom.system import units
from traceloom.trace.arrays import gather_rows
from traceloom.trace.batch import concatenate_by_trace
from traceloom.trace.notice import Abstention, Evidence
from traceloom.trace.session import Session, measure_processor_wait

_AUTOTUNING_PATTERN = (
    r"autotune|do_bench|benchmark_all_configs|benchmark_gpu|cudnnFind|find_algorithm"
)
_HOST_WORK_KINDS = (graph_schema.HOST, graph_schema.THINK, graph_schema.LAUNCH)
# Recording is reported from this ratio of recorded to unrecorded steps on
_MIN_OVERHEAD_RATIO = 1.05
_MIN_SLOW_SHARE = 0.05  # of the median step: less is no other kind of step
_MIN_WAITING_SHARE = 0.2  # of the time in which threads could run


def find_garbage_collections(context: Context) -> Iterator[Message]:
    """Reports garbage collections of Python in the step."""
    mask = match_node_names(context.graph, GARBAGE_COLLECTION_PATTERN) & context.select_kinds(
        graph_schema.HOST, graph_schema.THINK
    )
    nodes = context.graph.nodes
    # Frames and annotations that the graph only has as time of other nodes.
    pauses = context.gaps.filter(pl.col("cause") == "host_garbage_collection")
    on_host = context.select_kinds(graph_schema.HOST, graph_schema.THINK)
    start = nodes["start_ns"].to_numpy() + context.graph.epoch_ns
    end = start + nodes["duration_ns"].to_numpy()
    for trace, gaps in context.split_by_trace(pauses if not mask.any() else pauses.clear()):
        # Host nodes of the rank that hold such a pause of the device.
        is_rank = (
            nodes["rank"].eq_missing(pl.Series([trace.rank], dtype=pl.Int32)[0]).to_numpy()
            if len(context.traces) > 1
            else True
        )
        shifted = pl.col("start_ns") + context.rank_clock_offsets.get(trace.rank, 0)
        for gap_start_ns, gap_ns in gaps.select(shifted, "duration_ns").iter_rows():
            mask |= on_host & is_rank & (start <= gap_start_ns) & (end >= gap_start_ns + gap_ns)
    if not mask.any():
        return
    yield Candidate(
        title=f"Python collects garbage for {units.format_duration(context.work_ns(mask))} in {context.where}"
        f"{context.rank_sum_suffix}",
        changes=(Change("remove", NodeSelection("garbage collection", mask, "host")),),
        confidence=0.8,
        advice="gc.freeze() after set-up and a higher threshold (gc.set_threshold), or gc.disable() with gc.collect() "
        "every N steps, on all ranks in the same step.",
        evidence=context.evidence(mask),
    )


def find_compilations(context: Context) -> Iterator[Message]:
    """Reports compilations of torch.compile in the step."""
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    compilations = (context.ask(trace, analyze.compiled).compilations for trace in context.traces)
    compilations_in_step = context.in_step(concatenate_by_trace(compilations))
    for trace, rows in context.split_by_trace(compilations_in_step):
        mask |= context.below(trace, rows["event"])
    compilation_count, recompilation_count = (
        compilations_in_step.height,
        int(compilations_in_step["recompile"].sum()),
    )
    if not mask.any():
        return
    recompiled_text = (
        f", {units.format_count(recompilation_count)} of them again" if recompilation_count else ""
    )
    yield Candidate(
        title=f"torch.compile compiles {units.format_count(compilation_count)} times in {context.where}{recompiled_text}: "
        f"{units.format_duration(context.work_ns(mask))}{context.rank_sum_suffix}",
        changes=(Change("remove", NodeSelection("compilation", mask, "host")),),
        confidence=0.8 if context.steps is not None else 0.5,
        advice="Compile before the part that is measured (warm up); avoid recompilations: mark sizes that change with "
        "mark_dynamic, keep Python numbers out of guards.",
        evidence=context.evidence(mask),
    )


def find_autotuning(context: Context) -> Iterator[Message]:
    """Reports autotuning of kernels in the step."""
    mask = match_node_names(context.graph, _AUTOTUNING_PATTERN) & context.select_kinds(
        *_HOST_WORK_KINDS, graph_schema.KERNEL
    )
    for trace in context.traces:
        vocabulary = build_vocabulary(trace)
        is_autotuning_name = vocabulary.matching(f"(?i){_AUTOTUNING_PATTERN}")
        if is_autotuning_name.any():
            rows = context.in_step(
                trace.events[np.flatnonzero(gather_rows(is_autotuning_name, vocabulary.code))]
            )
            mask |= context.below(trace, rows.filter(pl.col("launch").is_null())["event"])
    if not mask.any():
        return
    yield Candidate(
        title=f"kernels are tried out (autotuning) in {context.where}: {units.format_duration(context.work_ns(mask))}"
        f"{context.rank_sum_suffix}",
        changes=(Change("remove", NodeSelection("autotuning", mask, "host")),),
        confidence=0.7,
        advice="Warm up with every shape first, and keep what was found: TORCHINDUCTOR_CACHE_DIR, Triton's cache; "
        "torch.backends.cudnn.benchmark=False where shapes change all the time.",
        evidence=context.evidence(mask),
    )


def find_graph_breaks(context: Context) -> Iterator[Message]:
    """Reports graph breaks of compiled regions."""
    uses_compile, break_ns, break_count = False, 0.0, 0
    evidence: list[Evidence] = []
    for trace in context.traces:
        compiled = context.ask(trace, analyze.compiled)
        uses_compile |= compiled.seen
        step_share = (
            1.0 if context.steps is None else context.step_count / max(trace.steps.height, 1)
        )
        for row in compiled.breaks.to_dicts():
            break_ns += row["between_ns"] * step_share
            break_count += row["count"]
            line = shorten_name(row["place"] or row["resumed"] or "an unknown line")
            evidence.append(
                Evidence(
                    f"break at {line}", trace.rank, count=row["count"], total_ns=row["between_ns"]
                )
            )
    if not uses_compile:
        yield Abstention("graph-breaks", "torch.compile was not seen")
        return
    host = context.select_kinds(*_HOST_WORK_KINDS)
    host_ns = context.work_ns(host)
    if not break_count or not host_ns or not break_ns:
        return
    remaining_share = 1 - min(break_ns / host_ns, 0.9)
    yield Candidate(
        title=f"{units.format_count(len(evidence))} graph breaks cost the host {units.format_duration(round(break_ns))} of "
        f"{context.where}{context.rank_sum_suffix}",
        changes=(
            Change(
                "scale",
                NodeSelection("the host, by what it spends at graph breaks", host, "host"),
                remaining_share,
            ),
        ),
        confidence=0.4,
        advice="See them with TORCH_LOGS=graph_breaks; take prints, `.item()` and data-dependent branches out of the "
        "compiled function; compile with fullgraph=True to be told.",
        evidence=tuple(sorted(evidence, key=lambda graph_break: -(graph_break.total_ns or 0))[:4]),
        at_most_ns=round(break_ns),
        host=partial(
            context.stretches, np.zeros_like(host)
        ),  # it is unknown which part of the host's time these are
    )


def check_processors(context: Context) -> Iterator[Message]:
    """Reports that other programs had the processors while threads of this one could have run."""
    spent = [measure_processor_wait(trace.meta) for trace in context.traces]
    waited, ran = (sum(times) for times in zip(*spent, strict=True))
    if not waited + ran:
        yield Abstention("overloaded-host", "how long threads waited for a processor is unknown")
        return
    if waited >= _MIN_WAITING_SHARE * (waited + ran):
        yield Remark(
            title=f"the program's threads waited for a processor {units.format_share(waited, waited + ran)} of the time that "
            "they could have run: these times are not the program's own",
            confidence=0.9,
            advice="Record again on a machine where nothing else runs, or with fewer threads (OMP_NUM_THREADS) than it "
            "has processors.",
            first=True,
        )


def check_recording_overhead(context: Context) -> Iterator[Message]:
    """Reports recording that makes steps longer, so that host times in the trace are too long."""
    ratio = context.host_ratio or 1.0
    if ratio < _MIN_OVERHEAD_RATIO:
        return
    yield Remark(
        title=f"recording makes steps {ratio:.2f} × as long: host savings exclude that",
        confidence=0.9,
        advice="Record without stacks and memory, or fewer steps; trust the savings of the device more.",
    )


def _compute_slow_steps(session: Session) -> SlowSteps | None:
    complete_steps = {
        number for trace in session.traces for number in trace.steps.filter("complete")["step"]
    }
    if len(complete_steps) < MIN_STEPS:
        return None
    return analyze.slow_steps([analyze.summarize_rank(trace) for trace in session.traces])


def find_slow_steps(context: Context) -> Iterator[Message]:
    """Reports steps beyond the spread of the others, which savings are not estimated on."""
    slow_steps = (
        context.ask(context.session, _compute_slow_steps)
        if context.rank_comparison is None
        else context.rank_comparison.slow
    )
    if slow_steps is None or slow_steps.steps["limit_ns"].null_count() == slow_steps.steps.height:
        yield Abstention("slow-steps", "fewer than four whole steps were recorded")
        return
    slow = pl.col("slow") & (pl.col("over_ns") >= _MIN_SLOW_SHARE * pl.col("median_ns"))
    for row in slow_steps.steps.filter(slow).sort("over_ns", descending=True).head(2).to_dicts():
        differences = slow_steps.differences.filter(
            pl.col("step") == row["step"], pl.col("more_ns") > 0
        ).sort("more_ns", descending=True)
        increases = [
            f"{difference['class'].replace('_', ' ')} {units.format_duration(difference['more_ns'])}"
            for difference in differences.head(2).to_dicts()
        ]
        rank = differences["rank"][0] if differences.height else row["rank"]
        rank_text = f" on rank {rank}" if increases and row["rank_count"] > 1 else ""
        trace = context.find_trace(rank)
        span = (None, row["duration_ns"])
        if trace is not None:
            bounds = pl.col("start_ns"), pl.col("end_ns") - pl.col("start_ns")
            span = (
                find_step_spans(trace).filter(pl.col("step") == row["step"]).select(bounds).row(0)
            )
        yield Remark(
            title=f"{context.unit} {row['step']} takes {units.format_duration(row['over_ns'])} longer than the median one "
            f"({units.format_duration(row['median_ns'])}): more {', '.join(increases) or 'of unknown origin'}{rank_text}",
            confidence=0.7,
            advice="Look at this step alone (--steps): validation, checkpoints, collections and recompilations come "
            "every so many steps.",
            evidence=(Evidence(f"step {row['step']}", rank, *span),),
        )


RULES = (
    FindingRule(
        "garbage-collection",
        "Python collects garbage in the step",
        find_garbage_collections,
        (NO_HOST,),
    ),
    FindingRule("compiling", "compilation in the step", find_compilations, (NO_HOST,)),
    FindingRule("autotuning", "kernels are tried out in the step", find_autotuning, (NO_HOST,)),
    FindingRule("graph-breaks", "compiled regions fall apart", find_graph_breaks),
    FindingRule("overloaded-host", "other programs had the processors", check_processors),
    FindingRule(
        "profiler-overhead",
        "recording distorts what it shows",
        check_recording_overhead,
        (
            (
                lambda context: context.host_ratio is None,
                "unrecorded steps were not measured (traceloom record does)",
            ),
        ),
    ),
    FindingRule("slow-steps", "steps beyond the spread of the others", find_slow_steps),
)
