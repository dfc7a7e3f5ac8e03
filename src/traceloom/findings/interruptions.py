"""What interrupts the step, or distorts what is seen of it: collections, compilation, graph breaks, recording."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import polars as pl

from traceloom import analyze
from traceloom.analyze.across_ranks import LEAST_STEPS, SlowSteps
from traceloom.analyze.idle import COLLECTIONS
from traceloom.analyze.names import vocabulary
from traceloom.changes.changes import Change, Chosen, named
from traceloom.findings.context import Context, shorten_name
from traceloom.findings.rule import Candidate, FindingRule, Message, Remark
from traceloom.graph import graph as gs
from traceloom.system import units
from traceloom.trace.arrays import gather_rows
from traceloom.trace.batch import stacked
from traceloom.trace.notice import Abstention, Evidence
from traceloom.trace.session import Session

_AUTOTUNING = r"autotune|do_bench|benchmark_all_configs|benchmark_gpu|cudnnFind|find_algorithm"
_HOST = (gs.HOST, gs.THINK, gs.LAUNCH)
_COSTLY = 1.05  # recording that makes steps this many times longer is told


def collections(context: Context) -> Iterator[Message]:
    """Python collects garbage in the step."""
    mask = named(context.graph, COLLECTIONS) & context.of_kind(gs.HOST, gs.THINK)
    nodes = context.graph.nodes
    # frames and annotations that the graph knows only as time of something else
    pauses = context.gaps.filter(pl.col("cause") == "host_garbage_collection")
    for trace, gaps in context.by_trace(pauses):
        if mask.any():
            break
        # host nodes that hold such a pause of the device
        start = nodes["start_ns"].to_numpy() + context.graph.epoch_ns
        end = start + nodes["duration_ns"].to_numpy()
        for low, length in gaps.select("start_ns", "duration_ns").iter_rows():
            mask |= (start <= low) & (end >= low + length)
        if len(context.traces) > 1:
            mask &= nodes["rank"].eq_missing(pl.Series([trace.rank], dtype=pl.Int32)[0]).to_numpy()
        mask &= context.of_kind(gs.HOST, gs.THINK)
    if not mask.any():
        yield from _without_host(context, "garbage-collection")
        return
    yield Candidate(
        title=f"Python collects garbage for {units.duration(context.work_ns(mask))} in {context.where}"
        f"{context.over_ranks}",
        changes=(Change("remove", Chosen("garbage collection", mask, "host")),),
        confidence=0.8,
        advice="gc.freeze() after set-up and a higher threshold (gc.set_threshold), or gc.disable() with gc.collect() "
        "every N steps, on all ranks in the same step.",
        evidence=context.evidence(mask),
    )


def _without_host(context: Context, slug: str) -> Iterator[Abstention]:
    """What the host did not do cannot be determined where nothing of it was recorded."""
    if not context.of_kind(gs.HOST).any():
        yield Abstention(slug, "nothing was recorded of the host")


def compiling(context: Context) -> Iterator[Message]:
    """torch.compile compiles in the step."""
    mask = np.zeros(context.graph.nodes.height, dtype=np.bool_)
    compilations = (context.ask(trace, analyze.compiled).compilations for trace in context.traces)
    compilations_in_step = context.in_step(stacked(compilations))
    for trace, rows in context.by_trace(compilations_in_step):
        mask |= context.below(trace, rows["event"])
    count, recompiled = compilations_in_step.height, int(compilations_in_step["recompile"].sum())
    if not mask.any():
        yield from _without_host(context, "compiling")
        return
    again = f", {units.count(recompiled)} of them again" if recompiled else ""
    yield Candidate(
        title=f"torch.compile compiles {units.count(count)} times in {context.where}{again}: "
        f"{units.duration(context.work_ns(mask))}{context.over_ranks}",
        changes=(Change("remove", Chosen("compilation", mask, "host")),),
        confidence=0.8 if context.steps is not None else 0.5,
        advice="Compile before the part that is measured (warm up); avoid recompilations: mark sizes that change with "
        "mark_dynamic, keep Python numbers out of guards.",
        evidence=context.evidence(mask),
    )


def autotuning(context: Context) -> Iterator[Message]:
    """Kernels are tried out in the step."""
    mask = named(context.graph, _AUTOTUNING) & context.of_kind(*_HOST, gs.KERNEL)
    for trace in context.traces:
        words = vocabulary(trace)
        fitting = words.matching(f"(?i){_AUTOTUNING}")
        if fitting.any():
            rows = context.in_step(trace.events[np.flatnonzero(gather_rows(fitting, words.code))])
            host = rows.filter(pl.col("launch").is_null())
            mask |= context.below(trace, host["event"])
    if not mask.any():
        yield from _without_host(context, "autotuning")
        return
    yield Candidate(
        title=f"kernels are tried out (autotuning) in {context.where}: {units.duration(context.work_ns(mask))}"
        f"{context.over_ranks}",
        changes=(Change("remove", Chosen("autotuning", mask, "host")),),
        confidence=0.7,
        advice="Warm up with every shape first, and keep what was found: TORCHINDUCTOR_CACHE_DIR, Triton's cache; "
        "torch.backends.cudnn.benchmark=False where shapes change all the time.",
        evidence=context.evidence(mask),
    )


def graph_breaks(context: Context) -> Iterator[Message]:
    """Compiled regions fall apart."""
    seen, between, count = False, 0.0, 0
    evidence: list[Evidence] = []
    for trace in context.traces:
        compiled = context.ask(trace, analyze.compiled)
        seen |= compiled.seen
        share = 1.0 if context.steps is None else context.step_count / max(trace.steps.height, 1)
        for row in compiled.breaks.to_dicts():
            between += row["between_ns"] * share
            count += row["count"]
            line = shorten_name(row["place"] or row["resumed"] or "an unknown line")
            evidence.append(Evidence(f"break at {line}", trace.rank, count=row["count"], total_ns=row["between_ns"]))
    if not seen:
        yield Abstention("graph-breaks", "torch.compile was not seen")
        return
    host = context.of_kind(*_HOST)
    whole = context.work_ns(host)
    if not count or not whole or not between:
        return
    left = 1 - min(between / whole, 0.9)
    yield Candidate(
        title=f"{units.count(len(evidence))} graph breaks cost the host {units.duration(round(between))} of "
        f"{context.where}{context.over_ranks}",
        changes=(Change("scale", Chosen("the host, by what it spends at graph breaks", host, "host"), left),),
        confidence=0.4,
        advice="See them with TORCH_LOGS=graph_breaks; take prints, `.item()` and data-dependent branches out of the "
        "compiled function; compile with fullgraph=True to be told.",
        evidence=tuple(sorted(evidence, key=lambda graph_break: -(graph_break.total_ns or 0))[:4]),
        at_most_ns=round(between),
        host=partial(context.stretches, np.zeros_like(host)),  # which part of the host's time these are is not known
    )


def recording(context: Context) -> Iterator[Message]:
    """Recording makes steps longer: what it shows of the host is too long."""
    ratio = context.host_ratio
    if ratio is None:
        yield Abstention("profiler-overhead", "unrecorded steps were not measured (traceloom record does)")
        return
    if ratio < _COSTLY:
        return
    yield Remark(
        title=f"recording makes steps {ratio:.2f} × as long: host savings exclude that",
        confidence=0.9,
        advice="Record without stacks, shapes and memory, or fewer steps; trust the savings of the device more.",
    )


def _slow_steps(session: Session) -> SlowSteps | None:
    whole = {number for trace in session.traces for number in trace.steps.filter("complete")["step"]}
    if len(whole) < LEAST_STEPS:
        return None
    return analyze.slow_steps([analyze.rank_part(trace) for trace in session.traces])


def slow_steps(context: Context) -> Iterator[Message]:
    """Steps beyond the spread of the others: savings are not estimated on them."""
    slow = context.ask(context.session, _slow_steps) if context.across is None else context.across.slow
    if slow is None or slow.steps["limit_ns"].null_count() == slow.steps.height:
        yield Abstention("slow-steps", "fewer than four whole steps were recorded")
        return
    for row in slow.steps.filter("slow").sort("over_ns", descending=True).head(2).to_dicts():
        why = slow.differences.filter(pl.col("step") == row["step"], pl.col("more_ns") > 0).sort(
            "more_ns", descending=True
        )
        increases = [
            f"{difference['class'].replace('_', ' ')} {units.duration(difference['more_ns'])}"
            for difference in why.head(2).to_dicts()
        ]
        rank = why["rank"][0] if why.height else row["rank"]
        where = f" on rank {rank}" if increases and row["rank_count"] > 1 else ""
        trace = context.trace_of(rank)
        span = (None, row["duration_ns"])
        if trace is not None:
            bounds = pl.col("start_ns"), pl.col("end_ns") - pl.col("start_ns")
            span = trace.steps.filter(pl.col("step") == row["step"]).select(bounds).row(0)
        yield Remark(
            title=f"{context.unit} {row['step']} takes {units.duration(row['over_ns'])} longer than the median one "
            f"({units.duration(row['median_ns'])}): more {', '.join(increases) or 'of unknown origin'}{where}",
            confidence=0.7,
            advice="Look at this step alone (--steps): validation, checkpoints, collections and recompilations come "
            "every so many steps.",
            evidence=(Evidence(f"step {row['step']}", rank, *span),),
        )


RULES = (
    FindingRule("garbage-collection", "Python collects garbage in the step", collections),
    FindingRule("compiling", "compilation in the step", compiling),
    FindingRule("autotuning", "kernels are tried out in the step", autotuning),
    FindingRule("graph-breaks", "compiled regions fall apart", graph_breaks),
    FindingRule("profiler-overhead", "recording distorts what it shows", recording),
    FindingRule("slow-steps", "steps beyond the spread of the others", slow_steps),
)
