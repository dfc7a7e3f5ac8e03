"""Allocations as a CSV file, slice by slice."""

from __future__ import annotations

from typing import BinaryIO

import polars as pl

from traceloom.analyze.allocations.explained import explain
from traceloom.analyze.allocations.table import LONG, SHORT, slices
from traceloom.model import Session
from traceloom.report.memory.options import MemoryOptions


def write(session: Session, options: MemoryOptions, handle: BinaryIO, *, whole: bool) -> None:
    """All allocations in the order they were made: `name,bytes`, and with `whole` all that is known of each.

    With several ranks a column `rank` stands first. Times are relative to the start of the run.
    """
    part = session if options.ranks is None else session.of_ranks(options.ranks)
    several = len(part.traces) > 1
    names = [*(["rank"] if several else []), *(LONG if whole else SHORT)]
    handle.write((",".join(names) + "\n").encode())
    for trace in part.traces:
        if not trace.allocations.height:
            continue
        known = explain(trace, full_op_names=options.full_op_names)
        for rows in slices(
            trace, known.named, known.kinds, known.whose, known.stack_reader() if whole else None, whole=whole
        ):
            frame = rows.with_columns(rank=pl.lit(trace.rank, dtype=pl.Int32)) if several else rows
            if whole:
                frame = frame.with_columns(pl.col("time_ns") - part.epoch_ns)
            frame.select(names).write_csv(handle, include_header=False)
