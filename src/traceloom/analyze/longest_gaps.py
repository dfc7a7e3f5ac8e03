"""The longest gaps, each with all that is known of it: what the evidence of a cause is, as rows of the trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import polars as pl

from traceloom.analyze.idle import CauseType, EvidenceType, Idle
from traceloom.analyze.stacked import TRACE, of_events, stacked, unstacked
from traceloom.model import Trace
from traceloom.model.frames import as_declared, schema

SCHEMA = schema(
    "gap device step start_ns duration_ns cause cause_ns evidence before before_name after after_name",
    "launch launch_name host_event host_activity stack producer producer_name wait wait_name",
    {"cause": CauseType, "evidence": EvidenceType, "stack": pl.List(pl.String())},
)
_MOST_FRAMES = 64
_NAMED = ("before", "after", "launch", "producer", "wait")


def longest_gaps(trace: Trace, idle_time: Idle, count: int = 20) -> pl.DataFrame:
    """The longest gaps, longest first, with their main cause and what stands for it.

    Args:
        trace: The trace.
        idle_time: What `idle` found in it.
        count: How many.

    Returns:
        One row per gap: gap, device, step (of its main part), start_ns, duration_ns (of the whole gap), cause (the one
        with most of the gap's time), cause_ns (its time in the gap), evidence; then rows of `trace.events` with their
        names: before and after (the GPU work around it), launch (the call that submitted `after`), host_event (the
        longest thing the host did in the cause's time) with host_activity (its name) and stack (names of what it stood
        in, outermost first), producer (the GPU work that a dependency waited for), wait (the record of the wait or the
        call that asked for it). Null where there is none.
    """
    return next(iter(longest_gaps_of([trace], [idle_time], count)))


def longest_gaps_of(traces: Sequence[Trace], idle_times: Iterable[Idle], count: int) -> Iterable[pl.DataFrame]:
    """The same of each of several traces."""
    parts = stacked(idle_time.gaps for idle_time in idle_times)
    keys = [TRACE, "gap"]
    order, falling = [TRACE, "whole_ns", "gap"], [False, True, False]
    whole = (
        parts.group_by(keys)
        .agg(pl.col("duration_ns").sum().alias("whole_ns"), pl.col("start_ns").min().alias("from_ns"))
        .sort(order, descending=falling)
        .group_by(TRACE, maintain_order=True)
        .head(count)
    )
    rows = (
        parts.join(whole, on=keys, how="inner")
        .with_columns(pl.col("duration_ns").sum().over(*keys, "cause").alias("cause_ns"))
        .sort("cause_ns", "duration_ns", "start_ns", descending=[True, True, False])
        .unique(keys, keep="first", maintain_order=True)
        .sort(order, descending=falling)
    )
    described = rows.select(
        TRACE,
        "gap",
        "device",
        "step",
        pl.col("from_ns").alias("start_ns"),
        pl.col("whole_ns").alias("duration_ns"),
        *("cause", "cause_ns", "evidence", "host_event", "host_activity"),
        *_NAMED,
        *(of_events(traces, rows, name, "name").alias(f"{name}_name") for name in _NAMED),
    )  # fmt: skip
    for trace, gaps in zip(traces, unstacked(described, traces), strict=True):
        stacks = [_stack(trace, event) for event in gaps["host_event"].to_list()]
        stack = pl.Series("stack", stacks, dtype=pl.List(pl.String))
        yield gaps.hstack([stack]).pipe(as_declared, SCHEMA)


def _stack(trace: Trace, event: int | None) -> list[str] | None:
    """Names of the events around an event, outermost first; the event itself is not among them."""
    if event is None:
        return None
    parent, name = trace.events["parent"], trace.events["name"]
    rows: list[int] = []
    above = parent[event]
    while above is not None and len(rows) < _MOST_FRAMES:
        rows.append(above)
        above = parent[above]
    return [name[row] for row in reversed(rows)]
