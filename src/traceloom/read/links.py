"""Joins inside one trace: GPU work to its launch, launches to their op, flows to their ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model.schema import SCHEMAS
from traceloom.read.fields import NULL
from traceloom.read.order import NO_ROW, Order, Texts, nullable, row_numbers

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Array = NDArray[Any]

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


def first_by_key(keys: Ints, rows: Ints, wanted: Ints) -> Ints:
    """The first row that has each wanted key; -1 where none has, and for NULL."""
    known = keys != NULL
    keys, rows = keys[known], rows[known]
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
    out = np.full(len(correlation), NO_ROW, dtype=np.int64)
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
        known = np.flatnonzero(is_op)
        out[rest] = first_by_key(external[known], known, external[rest])
    return out


def repeats_correlation(external: Ints, correlation: Ints, is_work: Bools) -> bool:
    """Whether the external ids of GPU work only repeat its correlations (older writers): then they name no op."""
    both = is_work & (external != NULL) & (correlation != NULL)
    return bool(both.any()) and bool((external[both] == correlation[both]).all())


def flow_frame(columns: dict[str, Array], texts: Texts, events: pl.DataFrame, place: Array) -> pl.DataFrame:
    """The `flows` frame: starts and ends joined by kind and id, each resolved to the event at its place and time.

    Args:
        columns: `phase` (True = start), `flow`, `kind` (number of a text), `place`, `start` of all arrow ends.
        texts: What the numbers of `kind` stand for.
        events: The events in time order.
        place: Their places.
    """
    if not len(columns["flow"]):
        return pl.DataFrame(schema=SCHEMAS["flows"])
    kinds = pl.Series([_FLOW_KIND.get(text, "other") for text in texts.values], dtype=pl.String)
    ends = pl.DataFrame(
        {
            "begins": columns["phase"],
            "flow": nullable(columns["flow"]),
            "kind": kinds.gather(pl.Series(columns["kind"].astype(np.uint32))),
            "place": columns["place"],
            "start_ns": columns["start"],
        }
    )
    found = _at(ends, events, place)
    both = ends.with_columns(event=found).unique(["begins", "kind", "flow"], keep="last", maintain_order=True)
    begins = both.filter(pl.col("begins")).select("kind", "flow", source="event")
    arrives = both.filter(~pl.col("begins")).select("kind", "flow", target="event")
    joined = begins.join(arrives, on=["kind", "flow"], how="full", coalesce=True, maintain_order="left_right")
    return joined.select(list(SCHEMAS["flows"])).cast(SCHEMAS["flows"])


def _at(ends: pl.DataFrame, events: pl.DataFrame, place: Array) -> pl.Series:
    """The event that starts where and when each arrow end stands: the innermost one of the kind that arrows bind to."""
    category = pl.col("category").cast(pl.String)
    binds = (
        pl.when(category.is_in(["op", "annotation"]))
        .then(pl.lit("forward-backward"))
        .when(category.is_in(["runtime", "driver", "kernel", "copy", "fill", "sync", "command"]))
        .then(pl.lit("launch"))
        .otherwise(pl.lit("other"))
    )
    known = events.lazy().select("event", "start_ns", kind=binds, place=pl.Series(place))
    exact = known.unique(["kind", "place", "start_ns"], keep="last", maintain_order=True).collect()
    any_kind = exact.lazy().unique(["place", "start_ns"], keep="last", maintain_order=True).drop("kind").collect()
    by_kind = ends.join(exact, on=["kind", "place", "start_ns"], how="left", maintain_order="left")["event"]
    by_place = ends.join(any_kind, on=["place", "start_ns"], how="left", maintain_order="left")["event"]
    return by_kind.fill_null(by_place)


def source_frame(offset: Array, length: Array, order: Order) -> pl.DataFrame:
    """Where each event stands in the text of the file."""
    return pl.DataFrame(
        {
            "event": pl.Series(np.arange(len(offset)), dtype=pl.UInt32),
            "offset": offset[order.rows],
            "length": length[order.rows],
        },
        schema=SCHEMAS["sources"],
    )


__all__ = ["flow_frame", "launches", "ops", "repeats_correlation", "row_numbers", "source_frame"]
