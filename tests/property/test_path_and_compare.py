"""Whatever a trace holds: its critical path tiles the step, and it is equal to itself."""

from __future__ import annotations

import polars as pl
from hypothesis import HealthCheck, assume, given, settings

from support.strategies import builders
from traceloom.analyze import compare, critical_path
from traceloom.report import ReportOptions, build
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(builders())
def test_the_path_of_any_trace_tiles_its_window(builder: TraceBuilder) -> None:
    trace = builder.build()
    value = build(Session((trace,), "made"), ReportOptions(only=("critical_path",)))[
        "critical_path"
    ]
    if value is None:  # nothing that takes part in a graph
        return
    found = critical_path(trace)
    found.check()
    assert (
        sum(row["duration_ns"] for row in value["classes"]) == value["window_ns"] == found.window_ns
    )
    for step in trace.steps.filter(pl.col("end_ns") > pl.col("start_ns"))["step"].to_list():
        critical_path(trace, step).check()


@unhurried
@given(builders())
def test_any_trace_is_equal_to_itself(builder: TraceBuilder) -> None:
    trace = builder.build()
    assume(trace.end_ns > trace.start_ns)
    found = compare(trace, trace)
    found.check()
    assert found.difference_ns == 0
    assert found.comparable
    for frame in (found.kernels, found.operators):
        assert set(frame["status"].cast(pl.String)) <= {"same"}


@unhurried
@given(builders(), builders())
def test_any_two_traces_add_up(one: TraceBuilder, other: TraceBuilder) -> None:
    base, new = one.build(), other.build()
    assume(base.end_ns > base.start_ns and new.end_ns > new.start_ns)
    forth, back = compare(base, new), compare(new, base)
    forth.check()
    back.check()
    assert forth.difference_ns == -back.difference_ns
