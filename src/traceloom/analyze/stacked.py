"""Rows of several traces in one frame, so that one query does for all of them what it does for one.

The column `trace` says which of the traces a row is of. What rows of one trace are grouped, joined and sorted by, those
of several are grouped, joined and sorted by together with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import pairwise

import numpy as np
import polars as pl

from traceloom.model import Trace
from traceloom.model.frames import as_declared

TRACE = "trace"


def stacked(frames: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The rows of each trace, one trace after the other, first the column `trace` (UInt32)."""
    parts = []
    for number, frame in enumerate(frames):
        numbers = pl.Series(TRACE, [number], dtype=pl.UInt32).new_from_index(0, frame.height)
        parts.append(frame.clone().insert_column(0, numbers))
    return pl.concat(parts)


def unstacked(
    rows: pl.DataFrame, traces: Sized, columns: Mapping[str, pl.DataType | type[pl.DataType]] | None = None
) -> list[pl.DataFrame]:
    """The rows of each trace without the column `trace`, by which they are sorted.

    Args:
        rows: Of `stacked`, or made from such.
        traces: Whose rows they are.
        columns: Which columns of which types (see `as_declared`); all as they are where none are named.
    """
    bounds = np.searchsorted(rows[TRACE].to_numpy(), np.arange(len(traces) + 1)).tolist()
    others = [name for name in rows.columns if name != TRACE]
    every = rows[others] if columns is None else rows.pipe(as_declared, columns)
    return [every[low:high] for low, high in pairwise(bounds)]


def gathered(columns: Sequence[pl.Series], rows: pl.DataFrame, by: str) -> pl.Series:
    """From the column of each trace the value at the place `by` of each row; null where that is null."""
    parts = unstacked(rows[[TRACE, by]], columns)
    return pl.concat([column[part[by]] for column, part in zip(columns, parts, strict=True)])


def of_events(traces: Sequence[Trace], rows: pl.DataFrame, by: str, name: str) -> pl.Series:
    """A column of the traces' events, for the event in the column `by` of each row; null where that is null."""
    return gathered([trace.events[name] for trace in traces], rows, by)


def quotient(value: pl.Expr, by: pl.Expr) -> pl.Expr:
    """A column divided by what is one number in each trace, with the digits of the rows of that trace alone.

    Polars multiplies a column with the reciprocal of a number, but divides a single row by it.
    """
    return pl.when(pl.len().over(TRACE) == 1).then(value / by).otherwise(value * (1.0 / by))
