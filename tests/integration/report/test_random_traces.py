"""Reports of random traces hold their laws in every view, whatever the trace."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings, strategies as st

from support.strategies import builders
from traceloom.report import ReportOptions, build, selected
from traceloom.report.exports.perfetto import write
from traceloom.report.views.files import encode
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.terminal import render as terminal
from traceloom.trace.session import Session

Check = Callable[..., Any]
# Builders do not shrink to anything simpler to read, and shrinking them takes minutes.
QUICKLY = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@QUICKLY
@given(
    traces=st.lists(builders(), min_size=1, max_size=2),
    by_shape=st.booleans(),
    width=st.integers(60, 130),
)
def test_every_view_of_a_random_trace_holds_its_laws(
    traces: list[Any], by_shape: bool, width: int, check_document: Check, check_perfetto: Check
) -> None:
    session = Session(tuple(builder.build() for builder in traces), name="random")
    options = ReportOptions(by_shape=by_shape)
    document = json.loads(encode(build(session, options)))
    check_document(document)
    for line in terminal(document, options, width):
        assert line.cell_len <= width, line.plain
        assert not {letter for letter in line.plain if ord(letter) < 32}
    assert markdown(document, options).count("\n") <= 60
    out = io.BytesIO()
    write(session, session.epoch_ns, out, document["critical_path"])
    check_perfetto(out.getvalue(), document)


@pytest.mark.thorough
@QUICKLY
@given(builder=builders(max_events=20), data=st.data())
def test_a_random_step_is_the_same_alone_and_in_the_whole(
    builder: Any, data: st.DataObject, check_document: Check
) -> None:
    session = Session((builder.build(),), name="random")
    steps = session.traces[0].steps["step"].to_list()
    if not steps:
        return
    number = data.draw(st.sampled_from(steps))
    options = ReportOptions(steps=(number, number))
    part = selected(session, options)
    part.check()
    document = json.loads(encode(build(session, options)))
    check_document(document)
    whole = build(session)["ranks"][0]
    mine = next(step for step in whole["steps"] if step["step"] == number)
    (alone,) = document["ranks"][0]["steps"]
    assert {**alone, "start_ns": None} == {**json.loads(encode(mine)), "start_ns": None}
    assert int(document["epoch_ns"]) + alone["start_ns"] == session.epoch_ns + mine["start_ns"]


def test_a_session_without_events_is_reported_too(check_document: Check) -> None:
    from traceloom.testing import TraceBuilder

    session = Session((TraceBuilder().build(),), name="empty")
    document = json.loads(encode(build(session)))
    check_document(document)
    assert {"kernels", "operators", "memory.devices"} <= {
        entry["path"] for entry in document["absent"]
    }
    assert list(terminal(document, ReportOptions(full=True), 80))


@pytest.mark.parametrize("steps", [(1, 1), (0, 5)])
def test_work_launched_in_a_step_stays_with_it(steps: tuple[int, int]) -> None:
    from traceloom.testing import TraceBuilder

    builder = TraceBuilder().step(0, 0, 100).step(1, 100, 100)
    builder.launch("cudaLaunchKernel", 10, 5, correlation=1).kernel("late", 120, 10, correlation=1)
    builder.launch("cudaLaunchKernel", 110, 5, correlation=2).kernel("own", 140, 10, correlation=2)
    session = Session((builder.build(),), name="two steps")
    names = [kernel["name"] for kernel in build(session, ReportOptions(steps=steps))["kernels"]]
    assert names == (["own"] if steps == (1, 1) else ["late", "own"])
