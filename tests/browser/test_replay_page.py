"""The page of a replay in a real browser: recorded over replayed, and every op as a point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.plans import ran, timed_plan
from traceloom.report import replay
from traceloom.workload.replay.comparison import compare_replay

pytestmark = pytest.mark.browser

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (800, "dark")])
def test_the_page_of_a_replay(
    open_uri: Callable[..., Any], tmp_path: Path, width: int, scheme: str
) -> None:
    plan = timed_plan(EVIL)
    ops = plan.ranks[0].ops.with_columns(pl.col("name").replace({"aten::mm": EVIL}))
    comparison = compare_replay(replace(plan, ranks={0: replace(plan.ranks[0], ops=ops)}), ran())
    path = tmp_path / "page.html"
    path.write_text(replay.render(replay.build(comparison), comparison), encoding="utf-8")
    tab = open_uri(path.as_uri(), viewport={"width": width, "height": 1000}, color_scheme=scheme)
    assert tab.locator("#scatter circle").count() == 2
    events = tab.evaluate(
        "(() => { const e = document.getElementById('timeline-view').timeline.events;"
        " return Array.from(e.start, (s, i) => [s, e.duration[i], e.laneOf(i).side]); })()"
    )
    # 4 ms, a gap of 1 ms, 2 ms and 1 ms of communication; replayed without gaps
    assert sorted(tuple(event) for event in events) == sorted(
        [
            (0, 4_000_000, "before"),
            (5_000_000, 2_000_000, "before"),
            (7_000_000, 1_000_000, "before"),
            (0, 2_000_000, "after"),
            (2_000_000, 3_000_000, "after"),
            (5_000_000, 3_000_000, "after"),
        ]
    )
    assert tab.evaluate("document.documentElement.scrollWidth") == width
