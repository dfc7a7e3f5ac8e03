"""Work that need not be done: recomputation, compilation, graph breaks, separate optimizer kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from traceloom import analyze
from traceloom.analyze.ancestry import forest
from traceloom.analyze.recompute import recomputed
from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, Rule, Said
from traceloom.model import Trace, units
from traceloom.model.finding import Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen


def _under(trace: Trace, roots: np.ndarray) -> pl.Series:
    """Rows of the host events at or below some forest positions, and of the GPU work launched there."""
    tree = forest(trace)
    inside = tree.outermost_or_self(roots) >= 0
    host = pl.Series(tree.row[inside], dtype=pl.UInt32)
    launched = trace.events.select("event", "launch").filter(pl.col("launch").is_in(host.implode()))["event"]
    return pl.concat([host, launched.cast(pl.UInt32)])


def recomputation(ground: Ground) -> Iterator[Said]:
    """What activation checkpointing does a second time."""
    for trace in ground.traces:
        found = recomputed(trace)
        if not found.root.any():
            continue
        rows = _under(trace, found.root)
        mask = ground.nodes_of(trace, rows)
        if not mask.any():
            continue
        time = ground.work_ns(mask)
        yield Candidate(
            title=f"activation checkpointing repeats {units.duration(time)} of work",
            changes=(Change("remove", Chosen("recomputation", mask)),),
            confidence=0.6,
            advice="Checkpoint less: only the layers whose activations are large and cheap to repeat, or selective "
            "checkpointing, as far as memory allows.",
            evidence=(Evidence("repeated forward work", trace.rank, count=int(mask.sum()), total_ns=time),),
        )


def compiling(ground: Ground) -> Iterator[Said]:
    """torch.compile compiles in the step."""
    for trace in ground.traces:
        rows = analyze.compiled(trace).compilations
        if not rows.height:
            continue
        named = "event" in rows.columns
        events = rows["event"] if named else pl.Series([], dtype=pl.UInt32)
        tree = forest(trace)
        roots = np.zeros(tree.row.size, dtype=np.bool_)
        position = tree.position[events.to_numpy().astype(np.int64)] if named else np.zeros(0, dtype=np.int64)
        roots[position[position >= 0]] = True
        mask = ground.nodes_of(trace, _under(trace, roots))
        if not mask.any():
            continue
        time = ground.work_ns(mask)
        yield Candidate(
            title=f"torch.compile compiles in the step: {units.duration(time)}",
            changes=(Change("remove", Chosen("compilation", mask, "host")),),
            confidence=0.8,
            advice="Compile before the step (warm up), avoid recompilations: mark dynamic sizes with "
            "mark_dynamic, keep Python values out of guards.",
            evidence=(Evidence("compilations", trace.rank, count=rows.height, total_ns=time),),
        )


def unfused_optimizer(ground: Ground) -> Iterator[Said]:
    """An optimizer that goes through its parameters one by one."""
    for trace in ground.traces:
        told = analyze.anti_patterns(trace)
        rows = told.matches.filter(pl.col("pattern").cast(pl.String) == "optimizer_single_tensor")
        if not rows.height:
            continue
        tree = forest(trace)
        roots = np.zeros(tree.row.size, dtype=np.bool_)
        position = tree.position[rows["event"].to_numpy().astype(np.int64)]
        roots[position[position >= 0]] = True
        mask = ground.nodes_of(trace, _under(trace, roots))
        host = mask & ground.kinds.is_in(["host", "think", "launch"]).to_numpy()
        if not host.any():
            continue
        time = ground.work_ns(host)
        yield Candidate(
            title=f"the optimizer steps tensor by tensor: {units.duration(time)} of host time",
            changes=(Change("scale", Chosen("optimizer on the host", host, "host"), 0.15),),
            confidence=0.7,
            advice="Use the fused or foreach implementation: `torch.optim.AdamW(..., fused=True)`.",
            evidence=(Evidence("optimizer steps", trace.rank, count=rows.height, total_ns=time),),
        )


RULES = (
    Rule("recomputation", "activation checkpointing repeats work", recomputation),
    Rule("compiling", "compilation in the step", compiling),
    Rule("unfused-optimizer", "an optimizer that steps tensor by tensor", unfused_optimizer),
)
