"""How long are kernels, and which are shorter than the call that launched them?"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.submissions import Submissions, plain
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace

_FIRST_EDGE_NS = 1_000
_EDGES = 15  # 1 µs, 2 µs, ... 16.4 ms

BINS = pl.Schema(
    {
        "low_ns": pl.Int64(),
        "high_ns": pl.Int64(),
        "kernel_count": pl.Int64(),
        "total_ns": pl.Int64(),
        "short_count": pl.Int64(),
    }
)
"""Kernels with low_ns <= duration < high_ns (null: no upper bound), their summed time, and how many of them are shorter
than their launch call. The bounds double from 1 µs on; the counts add up to all kernels of the trace."""
SHORT = pl.Schema(
    {
        "name": pl.String(),
        "short_count": pl.Int64(),
        "kernel_count": pl.Int64(),
        "short_ns": pl.Int64(),
        "call_ns": pl.Int64(),
        "kernel_ns": pl.Int64(),
    }
)
"""Kernels by name: how many are shorter than their launch call, of how many that were launched one by one; time of the
short ones, time of their calls, time of all. Graph launches are not in it: their call submits many kernels."""


def histogram(made: Submissions) -> pl.DataFrame:
    """Durations of kernels in bins that double: `BINS`."""
    length = (made.end - made.start)[made.kernel]
    call = (made.call_end - made.call_start)[made.kernel]
    alone = (made.first & ~made.many)[made.kernel]
    short = alone & (length < call)  # than a launch call of its own
    edges = _FIRST_EDGE_NS << np.arange(_EDGES)
    bin_index = np.searchsorted(edges, length, side="right")
    order = np.argsort(bin_index, kind="stable")
    at = np.searchsorted(bin_index[order], np.arange(edges.size + 2))
    total = np.concatenate([[0], np.cumsum(length[order])])
    return pl.DataFrame(
        {
            "low_ns": [0, *edges.tolist()],
            "high_ns": [*edges.tolist(), None],
            "kernel_count": np.diff(at),
            "total_ns": np.diff(total[at]),
            "short_count": np.bincount(bin_index[short], minlength=edges.size + 1),
        }
    ).cast(BINS)


def short_by_name(trace: Trace, made: Submissions) -> pl.DataFrame:
    """Kernels shorter than their launch, by name, the most time in calls first: `SHORT`."""
    at = np.flatnonzero(made.kernel & made.first & ~made.many)
    length, call = (made.end - made.start)[at], (made.call_end - made.call_start)[at]
    short = pl.col("length") < pl.col("call")
    words = vocabulary(trace)
    by_code = (
        pl.DataFrame({"code": plain(words.code)[made.row[at]], "length": length, "call": call})
        .group_by("code")
        .agg(
            short.sum().alias("short_count"),
            pl.len().alias("kernel_count"),
            pl.col("length").filter(short).sum().alias("short_ns"),
            pl.col("call").filter(short).sum().alias("call_ns"),
            pl.col("length").sum().alias("kernel_ns"),
        )
        .filter(pl.col("short_count") > 0)
    )
    return (
        by_code.with_columns(words.names.gather(by_code["code"]).alias("name"))
        .sort("call_ns", "name", descending=[True, False])
        .select(list(SHORT))
        .cast(SHORT)
    )
