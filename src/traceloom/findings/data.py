"""The step waits for data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import polars as pl

from traceloom import analyze
from traceloom.analyze.stacked import stacked
from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, FindingRule, Said
from traceloom.model import units
from traceloom.model.finding import Abstention, Evidence
from traceloom.simulate.changes import Change
from traceloom.simulate.selection import Chosen, Selection

_WORKERS = 4


def data_starved(context: Context) -> Iterator[Said]:
    """The main thread waits for, or makes, its batches."""
    masks = Selection("loading").nodes(context.graph)
    waits = stacked(context.ask(trace, analyze.data_loading).waits for trace in context.traces)
    if not waits.height:
        yield Abstention("data-starved", "no data loader was recorded")
        return
    waits = context.in_step(waits)
    waited, workers = int(waits["duration_ns"].sum()), bool((waits["maker"] == "workers").any())
    if not waited or not masks.any():
        return
    waiting: list[pl.DataFrame] = []
    for trace, rows in context.by_trace(waits):
        rank = pl.lit(trace.rank, dtype=pl.Int32).alias("rank")
        lane, end = trace.events["lane"][rows["event"]], pl.col("start_ns") + pl.col("duration_ns")
        waiting.append(rows.select(rank, lane, "start_ns", end.alias("end_ns")))
    longest = waits.sort("duration_ns", descending=True, maintain_order=True)
    longest = longest.filter(pl.int_range(pl.len()).over("trace") < 3).head(5)
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
        evidence=tuple(
            Evidence(name, context.traces[number].rank, start_ns, ns)
            for name, number, start_ns, ns in longest[["name", "trace", "start_ns", "duration_ns"]].iter_rows()
        ),
    )


RULES = (FindingRule("data-starved", "the step waits for its data", data_starved),)
