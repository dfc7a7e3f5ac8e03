"""A trace cut to some of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.errors import UsageError
from traceloom.model import Session, Trace
from traceloom.model.schema import Event
from traceloom.read.nesting import nest

_REFERENCES = ("parent", "op", "launch")


def of_steps(session: Session, steps: tuple[int, int]) -> Session:
    """The session with only the work of the steps numbered `steps[0]` to `steps[1]`, both included.

    Host events belong to the step they start in, GPU work to the step that launched it, so that launches keep their
    kernels. A rank that has none of these steps has no events left.

    Raises:
        UsageError: slug `no-such-step`, where no rank has any of these steps.
    """
    traces = tuple(cut(trace, steps) for trace in session.traces)
    if not any(trace.steps.height for trace in traces):
        numbers = sorted({number for trace in session.traces for number in trace.steps["step"].to_list()})
        have = f"it has {numbers[0]} to {numbers[-1]}" if numbers else "it has no steps"
        requested = f"step {steps[0]} is" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]} are"
        raise UsageError(f"{requested} not in this run; {have}", slug="no-such-step")
    return replace(session, traces=traces)


def cut(trace: Trace, steps: tuple[int, int]) -> Trace:
    """One rank's part of `of_steps`."""
    chosen = pl.col("step").is_between(*steps)
    kept = trace.events.filter(chosen)
    row = np.full(trace.events.height, -1, dtype=np.int64)
    row[kept["event"].to_numpy()] = np.arange(kept.height)
    events = renumbered(kept.with_row_index("new").drop("event").rename({"new": "event"}), row, _REFERENCES)
    frames: dict[str, Any] = {
        name: renumbered(frame, row, ("event",)).drop_nulls("event")
        for name, frame in trace.frames().items()
        if name != "events" and "event" in frame.columns
    }
    frames["flows"] = renumbered(trace.flows, row, ("source", "target")).drop_nulls(["source", "target"])
    kept_steps = trace.steps.filter(chosen)
    start, end = kept_steps["start_ns"].min(), kept_steps["end_ns"].max()
    inside = pl.col("time_ns").is_between(start, end, closed="left") if kept_steps.height else pl.lit(False)
    for name in ("allocations", "counters", "marks"):
        frames[name] = getattr(trace, name).filter(inside)
    frames["allocations"] = renumbered(frames["allocations"], row, ("op",))
    # Parents and depths anew: an event whose parents began before the first step is a root now.
    nesting_lanes = trace.lanes.filter(pl.col("kind").is_in(["host", "other"]))["lane"]
    nesting = nest(
        events["lane"].to_numpy().astype(np.int64),
        events["start_ns"].to_numpy(),
        events["nested_end_ns"].to_numpy(),
        events["lane"].is_in(nesting_lanes.implode()).to_numpy(),
    )
    events = events.select(trace.events.columns).with_columns(
        pl.Series("parent", nesting.parent).replace(-1, None).cast(Event),
        pl.Series("depth", nesting.depth).cast(pl.UInt16),
    )
    # The lanes with the counts and busy times of the events that are left
    roots = events.select("lane", "start_ns", end_ns="nested_end_ns").sort("lane", "start_ns", maintain_order=True)
    reached = pl.col("end_ns").cum_max().shift(1).over("lane").fill_null(pl.col("start_ns"))
    counted = roots.group_by("lane").agg(pl.len().cast(pl.UInt32).alias("events"))
    busy = (
        roots.with_columns(reached.alias("reached"))
        .with_columns(added=(pl.col("end_ns") - pl.max_horizontal("start_ns", "reached")).clip(lower_bound=0))
        .group_by("lane")
        .agg(busy_ns=pl.col("added").sum())
    )
    return replace(
        trace,
        events=events,
        steps=kept_steps,
        lanes=trace.lanes.drop("events", "busy_ns")
        .join(counted, on="lane", how="left", maintain_order="left")
        .join(busy, on="lane", how="left", maintain_order="left")
        .with_columns(pl.col("events").fill_null(0), pl.col("busy_ns").fill_null(0))
        .select(trace.lanes.columns),
        **frames,
    )


def renumbered(frame: pl.DataFrame, row: NDArray[np.int64], columns: tuple[str, ...]) -> pl.DataFrame:
    """The frame with its references to events pointing to their new rows; null where the event is gone."""
    new = pl.Series(row).replace(-1, None).cast(Event)
    return frame.with_columns(new.gather(frame[column]).alias(column) for column in columns)
