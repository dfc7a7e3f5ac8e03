"""The critical path in the timeline of the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


def painted(tab: Any) -> int:
    """How many pixels of the timeline have the colour of the path.

    Drawn and read in one go, after two frames: rows that were folded change the size of the canvas, which clears it.
    """
    return tab.page.evaluate(
        """async () => {
          for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
          const t = document.getElementById("timeline-view").timeline;
          t.draw();
          const wanted = [1, 3, 5].map((at) => parseInt(t.palette.path.slice(at, at + 2), 16));
          const copy = Object.assign(document.createElement("canvas"), { width: t.canvas.width, height: t.canvas.height });
          const context = copy.getContext("2d", { willReadFrequently: true });
          context.drawImage(t.canvas, 0, 0);
          const { data } = context.getImageData(0, 0, copy.width, copy.height);
          let found = 0;
          for (let i = 0; i < data.length; i += 4)
            if (wanted.every((value, k) => Math.abs(data[i + k] - value) < 3)) found++;
          return found;
        }"""
    )


def test_it_is_switched_on_by_a_box_and_by_a_key(open_page: Open) -> None:
    tab = open_page()
    box = tab.page.get_by_role("checkbox", name="Critical path")
    assert not box.is_checked()
    assert painted(tab) == 0
    box.check()
    assert painted(tab) > 50
    assert tab.page.locator("[data-part=path-legend]").is_visible()
    tab.page.locator("[data-part=scroll]").focus()
    tab.page.keyboard.press("c")
    assert not box.is_checked()
    assert painted(tab) == 0
    tab.page.keyboard.press("c")
    assert painted(tab) > 50


def test_the_address_remembers_it(open_page: Open) -> None:
    tab = open_page(hash_="#timeline&path=1")
    assert tab.page.get_by_role("checkbox", name="Critical path").is_checked()
    assert painted(tab) > 50
    tab.page.get_by_role("checkbox", name="Critical path").uncheck()
    tab.page.wait_for_timeout(250)
    assert "path" not in tab.page.evaluate("location.hash")


def test_its_section_leads_to_it(open_page: Open) -> None:
    tab = open_page()
    tab.page.locator("#critical-path").get_by_role("link", name="Show it in the timeline").click()
    tab.page.wait_for_timeout(250)
    assert tab.page.get_by_role("checkbox", name="Critical path").is_checked()
    assert tab.page.locator("#timeline-view").is_visible()
    # The view went to the step of the path: it fills most of the width.
    span = tab.timeline("(t.path.path.end - t.path.path.start) / (t.view.to - t.view.from)")
    assert span > 0.9


def test_it_shows_on_the_line_of_a_folded_rank(open_page: Open) -> None:
    tab = open_page(hash_="#timeline&path=1")
    for rank in (0, 1):
        tab.timeline(f"t.rows.folded.has('r{rank}') || t.rows.toggle('r{rank}')")
    assert painted(tab) > 20
