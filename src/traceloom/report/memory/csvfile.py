"""Allocations as a CSV file, slice by slice."""

from __future__ import annotations

from typing import BinaryIO

import polars as pl

from traceloom.analyze.allocations.table import LONG, SHORT, slices
from traceloom.report.memory.options import MemoryOptions
from traceloom.report.memory.sources import Sources


def write(sources: Sources, options: MemoryOptions, handle: BinaryIO, *, whole: bool) -> None:
    """All allocations in the order they were made: `name,bytes`, and with `whole` all that is known of each.

    With several ranks a column `rank` stands first. Times are relative to the start of the run. Memory timelines tell
    of no single allocations.
    """
    part = sources.of_ranks(options.ranks)
    several = part.several
    names = [*(["rank"] if several else []), *(LONG if whole else SHORT)]
    handle.write((",".join(names) + "\n").encode())
    epoch_ns = part.epoch_ns
    for explained in part.explained(full_op_names=options.full_op_names):
        stacks = explained.stack_reader() if whole else None
        for rows in slices(explained.trace, explained.named, explained.kinds, explained.whose, stacks, whole=whole):
            rank = pl.lit(explained.trace.rank, dtype=pl.Int32)
            frame = rows.with_columns(rank=rank) if several else rows
            if whole:
                frame = frame.with_columns(pl.col("time_ns") - epoch_ns)
            frame.select(names).write_csv(handle, include_header=False)
