"""Cutting stretches of time at given instants and at the bounds of steps."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.intervals import Spans, overlaps
from traceloom.analyze.steps import tiles
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model.arrays import lookup

NO_STEP = np.int64(-(2**31))


class CutStretches(Struct, frozen=True):
    """Stretches cut into pieces; `source` is the index of the stretch each piece comes from."""

    source: Ints
    start_ns: Ints
    end_ns: Ints


def cut(start_ns: Ints, end_ns: Ints, at_ns: Ints) -> CutStretches:
    """Cut every stretch [start, end) at the sorted instants `at_ns` that lie strictly inside it."""
    first = np.searchsorted(at_ns, start_ns, side="right")
    last = np.searchsorted(at_ns, end_ns, side="left")
    inside = np.maximum(last - first, 0)
    if not inside.any():
        return CutStretches(np.arange(start_ns.size, like=start_ns), start_ns, end_ns)
    count = inside + 1
    source = np.repeat(np.arange(start_ns.size, like=start_ns), count)
    begin = np.cumsum(count) - count
    turn = np.arange(source.size, like=source) - begin[source]
    cuts = first[source] + turn
    low, high = start_ns[source], end_ns[source]
    low = np.where(turn > 0, lookup(at_ns, np.clip(cuts - 1, 0, at_ns.size - 1)), low)
    high = np.where(turn < inside[source], lookup(at_ns, np.clip(cuts, 0, at_ns.size - 1)), high)
    return CutStretches(source, low, high)


def split_at_steps(trace: Trace, start_ns: Ints, end_ns: Ints) -> tuple[CutStretches, Ints]:
    """Cut every stretch at the bounds of steps; the pieces, and the step of each (NO_STEP outside all steps).

    The stretches lie in the trace's window and are not empty; whole ones come first, in their order.
    """
    plan = tiles(trace)
    steps = np.append(trace.steps["step"].cast(pl.Int64).to_numpy(), NO_STEP)[plan.row]
    if not steps.size:
        return CutStretches(np.zeros(0, dtype=np.int64), start_ns[:0], end_ns[:0]), steps
    first = np.searchsorted(plan.spans.start, start_ns, side="right") - 1
    crossing = end_ns > lookup(plan.spans.end, first)
    rows = np.flatnonzero(crossing)
    if not rows.size:
        return CutStretches(np.arange(start_ns.size, like=start_ns), start_ns, end_ns), lookup(steps, first)
    whole = np.flatnonzero(~crossing)
    shared = overlaps(start_ns[rows], end_ns[rows], plan.spans)
    pieces = CutStretches(
        np.concatenate([whole, rows[shared.left]]),
        np.concatenate([start_ns[whole], shared.start]),
        np.concatenate([end_ns[whole], shared.end]),
    )
    return pieces, np.concatenate([lookup(steps, first[whole]), lookup(steps, shared.right)])


def contains(spans: Spans, time_ns: Ints) -> Bools:
    """Which instants lie in a set of time."""
    if not spans.start.size:
        return np.zeros(time_ns.size, dtype=np.bool_)
    at = np.searchsorted(spans.start, time_ns, side="right") - 1
    return (at >= 0) & (time_ns < lookup(spans.end, np.maximum(at, 0)))
