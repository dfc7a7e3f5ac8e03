"""Sessions too large for memory: columns of their traces and graphs lie in files that are mapped, many in one file.

The files have no name any more, so they vanish with the process, however that ends; the system takes the pages back
whenever it needs room. See `traceloom.model.arrays` for single traces that are too large.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from traceloom.array_types import Array
from traceloom.model import Graph, Trace
from traceloom.model.arrays import is_large
from traceloom.storage import mapped, ondisk

SESSION_BYTES = 100 * 10**6  # of JSON, of all traces of a session, from which on the next ones lie in files
_BLOCK = 64 << 20
_ALIGNED = 64
_LEAST_ROWS = 1024  # of a frame; smaller ones stay in memory


def many(traces: Iterable[Trace]) -> bool:
    """Whether traces together are so large that what is made of each is kept in files."""
    return sum(trace.meta.file_bytes for trace in traces) > SESSION_BYTES


class ColumnFiles:
    """Places for columns in mapped files; a file vanishes with the last column in it. Threads may share them."""

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._used = 0
        self._text = 0
        self._lock = threading.Lock()

    def kept(self, trace: Trace) -> Trace:
        """The trace of one more rank: as it is while the session is small, else with its columns in files.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        with self._lock:
            self._text += trace.meta.file_bytes
            if self._text <= SESSION_BYTES or is_large(trace):
                return trace
            return self.park(trace)

    def park(self, trace: Trace) -> Trace:
        """The same trace with its columns in files.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        frames: dict[str, Any] = {name: self.frame(frame) for name, frame in trace.frames().items()}
        self._given_back()
        return replace(trace, **frames)

    def graph(self, graph: Graph) -> Graph:
        """The same graph with its columns in files.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        frames: dict[str, Any] = {name: self.frame(frame) for name, frame in graph.frames().items()}
        self._given_back()
        return replace(graph, **frames)

    def frame(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The same frame with its columns of numbers and texts in files; a small one as it is.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        if frame.height < _LEAST_ROWS:
            return frame
        return pl.DataFrame([self._column(frame[column]) for column in frame.columns])

    def _given_back(self) -> None:
        """Unmap the pages that were written: they stay in the system's file cache until they are read."""
        if self._block is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._block.madvise(mmap.MADV_DONTNEED)

    def _column(self, series: pl.Series) -> pl.Series:
        if series.dtype == pl.String:
            distinct = series.drop_nulls().unique(maintain_order=True)
            codes = series.cast(pl.Enum(distinct)).to_physical().cast(pl.Int32).fill_null(-1).to_numpy()
            table = mapped.TextTable(distinct.to_list())
            return table.column(codes, self._kept).alias(series.name) if table.fits else series
        kind = mapped.arrow_name(series.dtype)
        if kind is None:
            return series
        present = series.is_not_null()
        data = self._kept(series.fill_null(0).to_numpy().astype(kind, copy=False))
        if present.all():
            return pl.Series(series.name, data)
        bits = self._kept(np.packbits(present.to_numpy(), bitorder="little"))
        return mapped.series(kind, len(data), [bits, data]).alias(series.name)

    def _kept(self, values: Array) -> Array:
        """A copy of the values in a file."""
        size = values.nbytes
        if not size:
            return values
        if self._block is None or self._used + size > len(self._block):
            self._block = ondisk.new_block(max(_BLOCK, size))
            self._used = 0
        copy = np.frombuffer(self._block, dtype=values.dtype, count=len(values), offset=self._used)
        copy[:] = values
        self._used += -(-size // _ALIGNED) * _ALIGNED
        return copy
