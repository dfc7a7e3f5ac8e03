"""Traces in which nothing takes time, or the step lies behind everything else: every section has an answer."""

from __future__ import annotations

from typing import Any

import pytest

from traceloom.report import build
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session


def document(*builders: TraceBuilder) -> dict[str, Any]:
    return build(Session(tuple(builder.build() for builder in builders), "made"))


def test_work_that_takes_no_time_is_no_device_of_a_rank() -> None:
    told = document(
        *(TraceBuilder(rank=rank).op("aten::mm", 0, 10).kernel("k", 5, 0) for rank in (0, 1))
    )
    assert [row["rank"] for row in told["ranks"]] == [0, 1]


@pytest.mark.parametrize("host_us", [0, 10])
def test_copies_that_take_no_time_are_no_finding(host_us: int) -> None:
    made = TraceBuilder(rank=0).op("aten::copy_", 0, host_us)
    told = document(made.copy("Memcpy DtoD (Device -> Device)", 0, 0, bytes=4))
    assert told["findings"] == []


def test_a_step_behind_everything_that_was_recorded_is_not_explained() -> None:
    told = document(TraceBuilder(rank=0).step(0, 10, 1).kernel("k", 0, 3))
    path = told["critical_path"]
    assert sum(row["duration_ns"] for row in path["classes"]) == path["window_ns"] == 1000
