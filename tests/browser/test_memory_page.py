"""Whose memory it is, in a real browser: the curve, and who holds what at the instant that is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceloom.report import build as report
from traceloom.report.memory import build
from traceloom.report.views.page import render, render_report_page as report_page
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

pytestmark = pytest.mark.browser

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
OWNERS = "document.querySelector('.owners').owners"
BOXES = """boxes => boxes.map((box) => [box.getAttribute('aria-label'), Number(box.getAttribute('aria-level'))])"""


def trace(rank: int) -> Trace:
    """Four steps; each makes 400 kB in `net`, 100 kB in a hostile scope, and frees them; 50 kB stay each time."""
    builder = TraceBuilder(rank=rank, world_size=2)
    for step in range(4):
        at = 1000.0 * step
        builder.step(step, at, 1000)
        builder.python(f"train.py(7): {EVIL}", at + 1, 900)
        builder.annotation("traceloom.scope:net", at + 10, 300)
        builder.op("aten::relu", at + 20, 80)
        builder.allocation(at + 30, 400_000, address=1)
        builder.op("aten::add", at + 120, 80)
        builder.allocation(at + 130, 50_000, address=100 + step)
        builder.annotation(f"traceloom.scope:{EVIL}", at + 400, 200)
        builder.op("aten::mm", at + 410, 80)
        builder.allocation(at + 420, 100_000, address=2)
        builder.allocation(at + 700, -400_000, address=1)
        builder.allocation(at + 710, -100_000, address=2)
    return builder.build()


@pytest.fixture(scope="module")
def session() -> Session:
    return Session((trace(0), trace(1)), EVIL)


@pytest.fixture(scope="module")
def uris(session: Session, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("memory")
    pages = {"alone": render(build(session)), "report": report_page(report(session), session)}
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in pages}


@pytest.fixture(params=[("alone", 800), ("report", 1440)], ids=lambda at: f"{at[0]}-{at[1]}")
def tab(open_uri: Callable[..., Any], uris: dict[str, str], request: pytest.FixtureRequest) -> Any:
    name, width = request.param
    page = open_uri(f"{uris[name]}#memory", viewport={"width": width, "height": 1000})
    page.locator(".owners .areas").first.scroll_into_view_if_needed()
    return page


def roots(tab: Any) -> int:
    """Bytes of the outermost boxes of the instant."""
    total: int = tab.evaluate(f"{OWNERS}.icicle.roots.reduce((sum, node) => sum + node.bytes, 0)")
    return total


def says(tab: Any) -> str:
    text: str = tab.locator(".owners-says").first.inner_text()
    return text.replace("\u202f", " ")


def click_at(tab: Any, share: float) -> None:
    """Click the curve at a share of its time."""
    box = tab.locator(".owners .areas").first.bounding_box()
    left, right = 66, 10  # of the axis
    tab.mouse.click(
        box["x"] + left + share * (box["width"] - left - right), box["y"] + box["height"] / 2
    )


@pytest.mark.sampled(1)
def test_it_opens_at_the_peak_and_never_scrolls_sideways(tab: Any) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert says(tab).startswith("700 kB at ")
    assert says(tab).endswith("step 3, the peak")
    assert roots(tab) == 700_000


def test_clicking_the_curve_changes_who_holds_what(tab: Any) -> None:
    boxes = tab.locator(".owners").first.locator("[role=treeitem]")
    before = boxes.evaluate_all(BOXES)
    click_at(tab, 0.205)  # step 0 is over: what stayed of it, and nothing else
    after = boxes.evaluate_all(BOXES)
    assert before != after
    assert says(tab).startswith("50.0 kB at ")
    assert roots(tab) == 50_000
    assert [label.split(",")[0] for label, _ in after] == ["net.add"]
    tab.locator("[data-peak]").first.click()
    assert boxes.evaluate_all(BOXES) == before


@pytest.mark.sampled(1)
def test_at_every_instant_boxes_layers_and_total_are_equal(tab: Any) -> None:
    instants = tab.evaluate(f"{OWNERS}.times.length")
    assert instants > 12
    for by in ("scopes", "kinds"):
        tab.locator(f"[data-layers={by}]").first.click()
        for tree in ("scopes", "stacks"):
            tab.locator(f"[data-tree={tree}]").first.click()
            sums = tab.evaluate(
                f"""() => {{ const view = {OWNERS}; const out = [];
                for (let k = 0; k < view.times.length; k++) {{
                  view.choose(k);
                  const boxes = view.icicle.roots.reduce((sum, node) => sum + node.bytes, 0);
                  const layers = view.layers.reduce((sum, layer) => sum + layer.levels[k], 0);
                  out.push([view.totals[k], boxes, layers]);
                }} return out; }}"""
            )
            assert all(total == boxes == layers for total, boxes, layers in sums)
            assert max(total for total, _, _ in sums) == 700_000


def test_the_keyboard_moves_through_time_and_into_boxes(tab: Any) -> None:
    areas = tab.locator(".owners .areas").first
    areas.focus()
    tab.keyboard.press("Home")
    assert areas.get_attribute("aria-valuenow") == "0"
    for _ in range(2):
        tab.keyboard.press("ArrowRight")
    assert areas.get_attribute("aria-valuenow") == "2"
    assert says(tab).startswith("450 kB at 130")
    assert "450" in areas.get_attribute("aria-valuetext")
    tab.keyboard.press("Enter")
    assert says(tab).endswith("the peak")
    tab.locator(".owners").first.locator("[role=treeitem][tabindex='0']").focus()
    said = tab.locator(".owners .icicle-says").first.inner_text()
    assert "of what is shown" in said
    assert " on the host" not in said


@pytest.mark.sampled(1)
def test_a_zoom_stays_while_the_instant_changes(tab: Any) -> None:
    tab.locator(".owners").first.locator("[role=treeitem]", has_text="net").first.click()
    assert tab.evaluate(f"{OWNERS}.icicle.top.key") == "net"
    tab.evaluate(f"{OWNERS}.choose({OWNERS}.peak - 1)")
    assert tab.evaluate(f"{OWNERS}.icicle.top.key") == "net"


@pytest.mark.sampled(1)
def test_hostile_names_are_text(tab: Any) -> None:
    assert tab.locator("main img").count() == 0
    tab.locator(".owners").first.locator("[role=treeitem]").last.focus()
    assert tab.locator(".owners .icicle-says").first.inner_text().startswith(EVIL[:30])
    tab.locator("[data-tree=stacks]").first.click()
    assert "train.py(7): " + EVIL[:10] in str(
        tab.locator(".owners [role=treeitem]").evaluate_all(BOXES)
    )


@pytest.mark.sampled(1)
def test_every_layer_has_its_entry_in_the_legend(tab: Any) -> None:
    for by in ("kinds", "scopes"):
        tab.locator(f"[data-layers={by}]").first.click()
        figure = tab.locator(".owners").first
        names = figure.locator(".legend li > span:first-of-type").all_inner_texts()
        assert len(names) == figure.locator(".areas svg > path").count() > 0
        assert figure.locator(f"[data-layers={by}]").get_attribute("aria-pressed") == "true"


def test_ranks_stand_apart(browser: Any, uris: dict[str, str]) -> None:
    context = browser.new_context()
    shown = context.new_page()
    shown.goto(uris["alone"])
    shown.wait_for_selector("html[data-ready=yes]", state="attached")
    assert shown.locator(".owners:visible").count() == 1
    shown.locator("#rank").select_option("1")
    shown.locator(".owners:visible svg path").first.wait_for(
        state="visible"
    )  # it is drawn in the next frame
    context.close()
