"""Columns of a trace as arrays: in memory, or on disk where the trace is very large."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model import Trace
from traceloom.read import mapped, ondisk, spill

Array = NDArray[Any]
Engine = Literal["in-memory", "streaming"]


def is_large(trace: Trace) -> bool:
    """Whether what is computed from the trace goes to disk."""
    return trace.meta.file_bytes >= spill.SPILL_BYTES


def in_memory(trace: Trace) -> Trace:
    """The same trace, of which what is computed stays in memory however large it is."""
    return replace(trace, meta=replace(trace.meta, file_bytes=-1)) if is_large(trace) else trace


def engine(trace: Trace) -> Engine:
    """How Polars should work on columns as long as the trace: whole columns at once, or by pieces."""
    return "streaming" if is_large(trace) else "in-memory"


def column(trace: Trace, name: str, absent: int | None = None) -> Array:
    """A column of `trace.events`, shape (events,); what is computed from it lies where it lies.

    Args:
        trace: The trace.
        name: The column; categories as their numbers.
        absent: What stands for null; the column is int64 then. None for columns without nulls.
    """
    return column_of(trace.events, name, absent, large=is_large(trace))


def column_of(events: pl.DataFrame, name: str, absent: int | None = None, *, large: bool) -> Array:
    """The same of a frame of events, where it is known whether what is computed from it goes to disk."""
    series = events[name]
    if isinstance(series.dtype, pl.Enum):
        series = series.to_physical()
    if not large:
        return _filled(series, absent)
    if absent is None:
        return series.to_numpy().view(ondisk.OnDisk)
    values = ondisk.empty(series.len(), np.int64)
    for piece in ondisk.pieces(series.len()):
        values[piece] = _filled(series[piece], absent)
    return values


def on_disk(trace: Trace, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with its columns on disk, where the trace is very large; for frames that are kept."""
    if not is_large(trace):
        return frame

    def parts(name: str) -> Iterator[pl.Series]:
        return (frame[name][piece] for piece in ondisk.pieces(frame.height))

    columns = [mapped.gathered(dtype, frame.height, partial(parts, name)) for name, dtype in frame.schema.items()]
    return pl.DataFrame([column.alias(name) for name, column in zip(frame.schema, columns, strict=True)])


def _filled(series: pl.Series, absent: int | None) -> Array:
    return (series if absent is None else series.cast(pl.Int64).fill_null(absent)).to_numpy()
