"""Stacks that were sampled from outside, and telemetry, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


@pytest.mark.thorough
def test_a_sampled_call_stands_below_the_kernel_that_ran_meanwhile(open_page: Open) -> None:
    tab = open_page("beside")
    lanes = tab.timeline("t.events.lanes.map((lane) => lane.name)")
    assert lanes.index("stacks · MainThread") > lanes.index("main thread")
    tab.timeline("(t.fit(), t.draw(), 0)")
    call, call_x, call_y = tab.event_named("load (data.py:5)")
    _, kernel_x, kernel_y = tab.event_named("gemm")
    assert kernel_y < call_y
    assert abs(kernel_x - call_x) < 2  # both last from 300 to 350 us
    tab.timeline(f"(t.select({call}), 0)")
    assert "load (data.py:5)" in tab.page.locator("#timeline").inner_text()
    assert tab.problems == []


def test_telemetry_has_curves_under_the_lanes(open_page: Open) -> None:
    tab = open_page("beside")
    curve = tab.timeline(
        "t.rows.lines.filter((line) => line.kind === 'track' && line.curve.name === 'gpu_power_watts GPU-0')[0].curve"
    )
    assert (curve["time_ns"], curve["values"]) == ([50_000, 150_000], [100, 400])
    assert tab.problems == []
