"""The step waits for data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import polars as pl

from traceloom import analyze
from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen, Selection

_WORKERS = 4


def data_starved(context: Context) -> Iterator[Said]:
    """The main thread waits for, or makes, its batches."""
    waited, seen, workers = 0, False, False
    evidence: list[Evidence] = []
    waiting: list[pl.DataFrame] = []
    masks = Selection("loading").nodes(context.graph)
    for trace in context.traces:
        waits = context.ask(trace, analyze.data_loading).waits
        seen |= bool(waits.height)
        waits = context.in_step(waits)
        workers |= bool((waits["maker"].cast(pl.String) == "workers").any())
        waited += int(waits["duration_ns"].sum())
        rank = pl.lit(trace.rank, dtype=pl.Int32).alias("rank")
        lane, end = trace.events["lane"][waits["event"]], pl.col("start_ns") + pl.col("duration_ns")
        waiting.append(waits.select(rank, lane, "start_ns", end.alias("end_ns")))
        longest = waits.sort("duration_ns", descending=True).head(3).to_dicts()
        evidence += [Evidence(r["name"], trace.rank, r["start_ns"], r["duration_ns"]) for r in longest]
    if not seen:
        yield Abstention("data-starved", "no data loader was recorded")
        return
    if not waited or not masks.any():
        return
    chosen = Chosen("loading", masks, "loading")
    change = Change("remove", chosen) if workers else Change("workers", chosen, float(_WORKERS))
    how = "more workers (num_workers), persistent_workers=True, prefetch_factor, pin_memory=True, cheaper transforms"
    advice = f"Make batches faster or further ahead: {how}." if workers else f"Make batches beside the step: {how}."
    yield Candidate(
        title=f"{context.where} waits {units.duration(waited)} for data{context.over_ranks}",
        changes=(change,),
        confidence=0.8,
        advice=advice,
        hot_advice=None if workers else f"{{frame}}: make it faster, or make batches beside the step: {how}.",
        host=partial(pl.concat, waiting),
        evidence=tuple(sorted(evidence, key=lambda wait: -(wait.duration_ns or 0))[:5]),
    )


RULES = (FindingRule("data-starved", "the step waits for its data", data_starved),)
