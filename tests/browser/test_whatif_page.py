"""The page of a what-if in a real browser: before over after, on one axis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceloom.changes.changes import parse
from traceloom.changes.whatif import scenario_of, whatif
from traceloom.graph import calibrate
from traceloom.graph.job import join_ranks
from traceloom.graph.law import law
from traceloom.graph.rank import link_rank
from traceloom.report import before_after, whatif as report, whatif as report_whatif
from traceloom.testing import TraceBuilder

pytestmark = pytest.mark.browser

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
TIMELINE = "const t = document.getElementById('timeline-view').timeline;"


def trace(rank: int) -> TraceBuilder:
    """Ten ops with a kernel each; the host is busy all the time, and waits for the device at the end."""
    made = TraceBuilder(rank=rank, world_size=4)
    for k in range(10):
        at = 100.0 * k
        made.op(f"aten::op{k}" if k else EVIL, at, 90)
        made.launch("cudaLaunchKernel", at + 10, 8, correlation=k + 1)
        made.kernel(f"gemm_{k}" if k else EVIL, at + 30, 60 + rank, correlation=k + 1)
    return made.launch("cudaDeviceSynchronize", 1000, 20 + rank, correlation=99)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    graph = calibrate(join_ranks([link_rank(trace(rank).build()) for rank in range(4)]))
    changes = [parse("kernels ~ gemm * 0.5"), parse("ops ~ op9 remove")]
    found = whatif(graph, changes)
    view = before_after.build(graph, scenario_of(graph, changes), found)
    path: Path = tmp_path_factory.mktemp("whatif") / "page.html"
    document = report.build(EVIL, None, changes, found, law(graph))
    path.write_text(report_whatif.render_before_after_page(document, view), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(
    params=[pytest.param((1440, "light"), marks=pytest.mark.thorough), (800, "dark")], ids=str
)
def tab(open_uri: Callable[..., Any], uri: str, request: pytest.FixtureRequest) -> Any:
    width, scheme = request.param
    return open_uri(uri, viewport={"width": width, "height": 1000}, color_scheme=scheme)


def asked(page: Any, expression: str) -> Any:
    return page.evaluate(f"(() => {{ {TIMELINE} return {expression}; }})()")


def event(page: Any, name: str, side: str) -> int:
    found = asked(
        page,
        f"[...Array(t.events.count).keys()].find((i) => t.events.name(i) === '{name}'"
        f" && t.events.laneOf(i).side === '{side}')",
    )
    assert found is not None
    return int(found)


def pixel(page: Any, event: int, down: int) -> list[int]:
    """The colour in the middle of an event, so many pixels below its upper edge."""
    found: list[int] = asked(
        page,
        f"""(() => {{ const e = {event}, s = t.painter.scale; t.draw();
          const x = t.painter.x((t.events.start[e] + t.events.end[e]) / 2);
          const y = t.rows.topOf(e) - t.scroller.scrollTop + {down};
          return [...t.painter.context.getImageData(Math.round(x * s), Math.round(y * s), 1, 1).data]; }})()""",
    )
    return found


def test_every_lane_is_drawn_before_over_after_and_nothing_is_wider_than_the_page(tab: Any) -> None:
    lanes = asked(tab, "t.events.lanes.map((lane) => [lane.name, lane.side, lane.top])")
    for above, below in zip(lanes[::2], lanes[1::2], strict=True):
        assert (above[1], below[1]) == ("before", "after")
        assert above[0].replace(", before", ", after") == below[0]
        assert 0 < below[2] - above[2] < 30
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.locator(".tl-label", has_text="after").count() == len(lanes) // 2


def test_all_ranks_that_matter_are_open_and_say_what_they_gain(tab: Any) -> None:
    assert asked(tab, "[...t.rows.folded].filter((key) => !key.startsWith('p'))") == []
    said = asked(tab, "t.events.ranks.map((rank) => rank.description)")
    assert len(said) >= 2
    assert all("before," in text for text in said)


def test_the_keyboard_finds_times_on_both_sides(tab: Any) -> None:
    tab.locator("[data-part=scroll]").focus()
    tab.keyboard.press("Enter")
    first = asked(tab, "t.selected")
    tab.keyboard.press(".")
    assert asked(tab, "t.selected") != first
    tab.keyboard.press(",")
    tab.keyboard.press("l")  # to the other side
    assert asked(tab, "t.events.laneOf(t.selected).side") == "after"
    told = tab.locator("[data-part=details]").inner_text()
    assert EVIL in told or "aten::op" in told or "cuda" in told
    facts = dict(
        zip(
            *(tab.locator(f".tl-facts {part}").all_inner_texts() for part in ("dt", "dd")),
            strict=True,
        )
    )
    assert " from " in facts["before"]
    assert " from " in facts["after"]


def test_a_click_and_the_pointer_tell_name_and_times(tab: Any) -> None:
    kernel = event(tab, "gemm_5", "before")
    tab.locator("#timeline").scroll_into_view_if_needed()
    asked(tab, f"(t.scroller.scrollTop = t.rows.topOf({kernel}) - 60, 0)")
    box = tab.locator("canvas[data-part=canvas]").bounding_box()
    x = box["x"] + asked(
        tab, f"t.painter.x((t.events.start[{kernel}] + t.events.end[{kernel}]) / 2)"
    )
    y = box["y"] + asked(tab, f"t.rows.topOf({kernel}) - t.scroller.scrollTop + 8")
    tab.mouse.move(x, y)
    tip = tab.locator("[data-part=tip]").inner_text()
    assert "gemm_5" in tip
    assert "before 6" in tip
    assert "after 3" in tip
    tab.mouse.click(x, y)
    told = tab.locator("[data-part=details]").inner_text()
    assert "shorter by" in told
    assert asked(tab, f"t.events.twin[t.selected] === {event(tab, 'gemm_5', 'after')}")


def test_what_is_gone_says_so(tab: Any) -> None:
    asked(tab, f"t.select({event(tab, 'aten::op9', 'before')}, true)")
    assert "takes no time" in tab.locator("[data-part=details]").inner_text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "marked"), [("gemm_5", True), ("aten::op5", False)])
def test_what_is_changed_has_a_mark_and_the_rest_has_none(
    tab: Any, name: str, *, marked: bool
) -> None:
    ink = asked(tab, "[1, 3, 5].map((at) => parseInt(t.palette.ink.slice(at, at + 2), 16))")
    at = event(tab, name, "before")
    asked(tab, f"(t.scroller.scrollTop = Math.max(t.rows.topOf({at}) - 80, 0), 0)")
    assert (pixel(tab, at, 15)[:3] == ink) is marked
    assert tab.locator("[data-part=changed-legend]").is_visible()


def test_both_critical_paths_are_drawn_until_they_are_hidden(tab: Any) -> None:
    assert tab.locator("[data-part=path]").is_checked()
    assert asked(tab, "t.path.path.stretches.length") > 0
    assert asked(tab, "t.path.path.after.length") > 0
    tab.locator("[data-part=scroll]").focus()
    tab.keyboard.press("c")
    assert not tab.locator("[data-part=path]").is_checked()
    tab.wait_for_function("() => location.hash.includes('path=0')")  # a moment later


def test_names_are_text(tab: Any) -> None:
    asked(tab, f"t.select(t.events.label.indexOf(t.events.names.indexOf({EVIL!r})), true)")
    assert EVIL in tab.locator("[data-part=details]").inner_text()
    assert EVIL in tab.locator(".eyebrow").inner_text()
    assert tab.locator("main img").count() == 0
