"""Joins inside one trace: GPU work to its launch, launches to their op, flows to their ends."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.array_types import Array, Bools, Ints
from traceloom.model import category as cat
from traceloom.model.arrays import NO_ROW, Texts, chosen, column_of, lookup, nullable, plain, row_numbers
from traceloom.model.schema import SCHEMAS
from traceloom.read.fields import NULL
from traceloom.storage.ondisk import OnDisk

_FLOW_KINDS = ("launch", "forward-backward", "other")
# Names of the three generations, as category or name of the arrow.
_FLOW_KIND = {
    "ac2g": "launch",
    "async_cpu_to_gpu": "launch",
    "async_gpu": "launch",
    "async": "launch",
    "launch": "launch",
    "fwdbwd": "forward-backward",
    "forward_backward": "forward-backward",
}
_BOUND_BY = {
    **dict.fromkeys((cat.RUNTIME, cat.DRIVER, *cat.GPU_WORK, cat.SYNC, cat.COMMAND), 0),
    **dict.fromkeys((cat.OP, cat.ANNOTATION), 1),
}
_BINDS = np.array([_BOUND_BY.get(name, 2) for name in cat.CATEGORIES])
_MOST_TIES = 200  # events looked at that start at one time


def first_by_key(keys: Ints, rows: Ints, wanted: Ints) -> Ints:
    """The first row that has each wanted key; -1 where none has, and for NULL."""
    has_key = keys != NULL
    keys, rows = keys[has_key], rows[has_key]
    if not len(keys):
        return np.full(len(wanted), NO_ROW, dtype=np.int64)
    order = np.lexsort((rows, keys))
    keys, rows = keys[order], rows[order]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((keys[at] == wanted) & (wanted != NULL), rows[at], NO_ROW)


def launches(correlation: Ints, is_launch: Bools, is_work: Bools) -> Ints:
    """The runtime or driver row of each GPU work, by correlation; -1 elsewhere.

    Where several rows have one correlation (a runtime call and the driver call inside it) the outermost is taken: it
    starts first and, starting together, is longer. One graph launch owns all kernels of its graph.
    """
    calls = np.flatnonzero(is_launch)
    work = np.flatnonzero(is_work)
    out = np.full(len(correlation), NO_ROW, dtype=np.int64, like=correlation)
    out[work] = first_by_key(correlation[calls], calls, correlation[work])
    return out


def ops(  # noqa: PLR0917  (columns of events)
    parent_op: Ints, launch: Ints, is_launch: Bools, is_op: Bools, is_work: Bools, external: Ints
) -> Ints:
    """The innermost op around each launch; for GPU work around its launch, else the op its external id names."""
    out = np.where(is_launch, parent_op, NO_ROW)
    launched = launch >= 0
    out[launched] = parent_op[launch[launched]]
    rest = np.flatnonzero(is_work & ~launched & (external != NULL))
    if rest.size:
        op_rows = np.flatnonzero(is_op)
        out[rest] = first_by_key(external[op_rows], op_rows, external[rest])
    return out


def repeats_correlation(external: Ints, correlation: Ints, is_work: Bools) -> bool:
    """Whether the external ids of GPU work only repeat its correlations (older writers): then they name no op."""
    both = is_work & (external != NULL) & (correlation != NULL)
    return bool(both.any()) and bool((external[both] == correlation[both]).all())


def flow_frame(columns: dict[str, Array], texts: Texts, events: pl.DataFrame, thread: Array) -> pl.DataFrame:
    """The `flows` frame: starts and ends joined by kind and id, each resolved to the event at its place and time.

    Args:
        columns: `phase` (True = start), `flow`, `kind` (number of a text), `thread`, `start` of all arrow ends.
        texts: What the numbers of `kind` stand for.
        events: The `events` frame.
        thread: The place of each event.
    """
    if not len(columns["flow"]):
        return pl.DataFrame(schema=SCHEMAS["flows"])
    kinds = np.array([_FLOW_KINDS.index(_FLOW_KIND.get(text, "other")) for text in texts.names])
    kind = lookup(kinds, columns["kind"])
    begins, flow = columns["phase"], columns["flow"]
    # Of several starts or ends with one kind and id the last counts; without an id nothing is joined.
    flow_ids, number = np.unique(flow, return_inverse=True)
    keys = len(flow_ids) * len(_FLOW_KINDS)
    key = number * len(_FLOW_KINDS) + kind
    slot = np.where(begins, keys, 0) + key
    indices = np.arange(len(flow), like=flow)
    last = np.full(2 * keys, NO_ROW, dtype=np.int64, like=flow)
    last[slot] = indices  # of equal slots the last one wins
    kept = last[slot] == indices
    other = np.where(flow == NULL, NO_ROW, last[np.where(begins, 0, keys) + key])
    # The arrows, starts first, and their other ends; -1 where there is none.
    row = np.concatenate([np.flatnonzero(kept & begins), np.flatnonzero(kept & ~begins & (other < 0))])
    other = other[row]
    large = isinstance(thread, OnDisk)
    start, category = column_of(events, "start_ns", large=large), column_of(events, "category", large=large)
    correlation = column_of(events, "correlation", NULL, large=large)
    event = _at(columns, kind, (start, category, thread, correlation))
    ends = event[row], np.where(other >= 0, event[other], NO_ROW)
    begins = begins[row]
    return pl.DataFrame(
        {
            "flow": nullable(flow[row]),
            "kind": chosen(pl.Series(_FLOW_KINDS, dtype=SCHEMAS["flows"]["kind"]), kind[row]),
            "source": row_numbers(np.where(begins, *ends)),
            "target": row_numbers(np.where(begins, *ends[::-1])),
        },
        schema=SCHEMAS["flows"],
    )


def _at(ends: dict[str, Array], kind: Array, events: tuple[Ints, Array, Array, Ints]) -> Ints:
    """The event that starts at the time and place of each arrow end; -1 where none does.

    Of several, the one whose correlation is the arrow's id, else the innermost of the kind that such arrows bind to,
    else the innermost of any kind.
    """
    start, category, pair_number, correlation = events
    low = np.searchsorted(start, ends["start"], "left")
    high = np.searchsorted(start, ends["start"], "right")
    event_rows = np.full(len(low), NO_ROW, dtype=np.int64, like=low)
    for choice in ("correlation", "kind", "any"):
        rows = np.flatnonzero((event_rows < 0) & (low < high))
        at = high[rows] - 1
        for _ in range(_MOST_TIES):
            hit = pair_number[at] == ends["place"][rows]
            if choice == "correlation":
                hit &= (correlation[at] == ends["flow"][rows]) & (kind[rows] == 0) & (lookup(_BINDS, category[at]) == 0)
            elif choice == "kind":
                hit &= lookup(_BINDS, category[at]) == kind[rows]
            event_rows[rows[hit]] = at[hit]
            on = ~hit & (at > low[rows])
            rows, at = rows[on], at[on] - 1
            if not rows.size:
                break
    return event_rows


def source_frame(offset: Array, length: Array, rows: Ints) -> pl.DataFrame:
    """Where each event stands in the text of the file; `rows` puts the columns of the file in time order."""
    return pl.DataFrame(
        {
            "event": plain(np.arange(len(offset), dtype=np.uint32, like=offset), pl.UInt32),
            "offset": plain(offset[rows], pl.Int64),
            "length": plain(length[rows], pl.Int32),
        },
        schema=SCHEMAS["sources"],
    )
