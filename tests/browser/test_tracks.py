"""Curves of counters under the lanes, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
FIND = """(name) => t.rows.lines.filter((line) => line.kind === "track" && line.curve.name === name)
    .map((line) => [line.top, line.height, line.curve.time_ns, line.curve.values])[0]"""


def test_curves_stand_under_the_lanes_and_fold_away(open_page: Open) -> None:
    tab = open_page()
    kinds = tab.timeline(
        "t.rows.lines.filter((line) => line.kind !== 'curve').map((line) => line.kind)"
    )
    first = kinds.index("track")
    assert "row" in kinds[:first]  # the lanes of the first rank come before
    tracks = kinds.count("track")
    fold = tab.page.locator(".tl-label", has_text="counters").first
    fold.click()
    assert tab.timeline("t.rows.lines.filter((line) => line.kind === 'track').length") == tracks / 2
    tab.page.locator(".tl-label", has_text="counters").first.click()
    assert tab.timeline("t.rows.lines.filter((line) => line.kind === 'track').length") == tracks


def test_the_value_of_a_curve_stands_under_the_pointer(open_page: Open) -> None:
    tab = open_page()
    top, height, times, values = tab.timeline(f"({FIND})('GPU 0 launches waiting')")
    highest = values.index(max(values))
    x = tab.timeline(f"t.painter.x({times[highest]} + 1)")
    tab.timeline(f"(t.scroller.scrollTop = {top} - 60, 0)")
    tab.page.locator("#timeline").scroll_into_view_if_needed()
    shift = tab.timeline("t.scroller.scrollTop")
    box = tab.page.locator("canvas[data-part=canvas]").bounding_box()
    tab.page.mouse.move(box["x"] + x, box["y"] + top - shift + height / 2)
    said = tab.page.locator("[data-part=tip]").inner_text()
    assert "GPU 0 launches waiting" in said
    assert str(int(max(values))) in said


def test_a_curve_is_drawn(open_page: Open) -> None:
    tab = open_page()
    top, height, _, _ = tab.timeline(f"({FIND})('GPU 0 busy %')")
    tab.timeline(f"(t.scroller.scrollTop = {top} - 60, t.draw(), 0)")
    seen = tab.timeline(
        f"""(() => {{
          const s = t.painter.scale, y = Math.round(({top} - t.scroller.scrollTop) * s);
          const {{ data }} = t.painter.context.getImageData(0, y, t.canvas.width, Math.round({height} * s));
          return new Set(new Uint32Array(data.buffer)).size;
        }})()"""
    )
    assert seen > 2  # the area and its edge, not the background alone
