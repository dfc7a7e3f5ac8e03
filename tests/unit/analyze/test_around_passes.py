"""Regions that are named communication and hold parts of the step: only what is left of them communicates."""

from __future__ import annotations

import polars as pl
import pytest

from traceloom.analyze import collectives, host
from traceloom.testing.trace_builder import TraceBuilder
from traceloom.trace.trace import Trace


def steps() -> Trace:
    """Four steps of 15 ms: a region of 9 ms holds a forward pass of 8; a backward pass of 5 ms follows."""
    made = TraceBuilder(rank=0)
    for number in range(4):
        at = 15_000 * number
        made.mark(number, at).annotation("hccl:all_to_all", at + 10, 9000).annotation(
            "## forward ##", at + 100, 8000
        )
        made.annotation("## backward ##", at + 9100, 5000)
        for op in range(10):
            made.op("aten::mm", at + 200 + 700 * op, 690)
        for op in range(6):
            made.op("aten::mm", at + 9200 + 700 * op, 690)
    return made.mark(4, 60_000).build()


def test_phases_inside_are_what_they_say() -> None:
    phases = dict(
        host(steps())
        .account.group_by(pl.col("phase").cast(pl.String))
        .agg(pl.col("ns").sum())
        .rows()
    )
    assert phases["forward"] == 4 * 8_000_000
    assert phases["backward"] == 4 * 5_000_000
    assert phases["communication"] == 4 * 1_000_000


def test_the_call_takes_what_is_left_of_it() -> None:
    (row,) = collectives(steps()).summary.to_dicts()
    assert (row["count"], row["total_ns"]) == (4, 4 * 1_000_000)


@pytest.mark.parametrize("name", ["gloo:all_gather", "c10d::allgather_"])
def test_a_call_with_copies_inside_is_a_call(name: str) -> None:
    made = TraceBuilder(rank=0).mark(0, 0).annotation("forward", 0, 900).annotation(name, 100, 500)
    trace = made.op("aten::copy_", 200, 300).mark(1, 1000).build()
    phases = dict(
        host(trace).account.group_by(pl.col("phase").cast(pl.String)).agg(pl.col("ns").sum()).rows()
    )
    assert "communication" not in phases  # it is part of the forward pass
    calls = collectives(trace).summary["total_ns"].to_list()
    assert calls in ([500_000], [])
