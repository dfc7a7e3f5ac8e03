"""How many channels a collective ran on: NCCL and RCCL launch one thread block per channel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from traceloom.errors import InputError
from traceloom.model import Trace
from traceloom.read.damage import Damage
from traceloom.read.source import open_input, text_pieces

_GRID = re.compile(rb'"grid"\s*:\s*\[\s*(\d+)')
_BY_CHANNEL = ("nccl", "rccl")
_MOST_BYTES = 256 << 20  # of text: to read more of it a second time is not worth this number


def with_channels(calls: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Add `channels`; null for other back ends, without a grid, and where the file is gone or above 256 MiB.

    The grid is in no column of a trace: it is read again from the file, for the communication kernels alone.
    """
    kernels = calls.filter((pl.col("where") == "device") & pl.col("backend").is_in(_BY_CHANNEL))["event"]
    channels = dict(_grids(trace, kernels.sort()))
    table = pl.DataFrame(
        {"event": list(channels), "channels": list(channels.values())},
        schema={"event": pl.UInt32(), "channels": pl.Int32()},
    )
    return calls.join(table, on="event", how="left", maintain_order="left")


def _grids(trace: Trace, events: pl.Series) -> Iterator[tuple[int, int]]:
    """Event and first number of its grid."""
    if not events.len() or trace.meta.path == "-" or trace.meta.file_bytes > _MOST_BYTES:
        return
    if not Path(trace.meta.path).is_file():
        return
    places = trace.sources.select("offset", "length")[events].with_columns(events.alias("event")).sort("offset")
    try:
        for event, text in _stretches(trace.meta.path, places):
            grid = _GRID.search(text)
            if grid:
                yield event, min(int(grid[1]), np.iinfo(np.int32).max)
    except (InputError, OSError):
        return


def _stretches(path: str, places: pl.DataFrame) -> Iterator[tuple[int, bytes]]:
    """The text of each event, in one pass over the file up to the last of them."""
    rows = places.select("event", "offset", "length").rows()
    at, held, next_row = 0, b"", 0
    with open_input(path) as stream:
        for piece in text_pieces(stream, Damage()):
            held = held + piece if held else piece
            while next_row < len(rows):
                event, offset, length = rows[next_row]
                if offset + length > at + len(held):
                    break
                yield event, held[offset - at : offset - at + length]
                next_row += 1
            if next_row == len(rows):
                return
            keep = min(max(rows[next_row][1] - at, 0), len(held))
            at, held = at + keep, held[keep:]
