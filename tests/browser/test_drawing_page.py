"""The drawing of a workload in a real browser: no errors, hostile names harmless, boxes can be found and chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.workload import node, write_set
from traceloom.cli import main

pytestmark = pytest.mark.browser
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Any:
    nodes = [
        node(0, name=EVIL),
        *(node(i, deps=[i - 1], name=f"{'abcdefgh'[i % 8]} op") for i in range(1, 40)),
    ]
    home = write_set(tmp_path / "w", nodes)
    assert main(["show", str(home), "-o", str(tmp_path / "x.html"), "--quiet"]) == 0
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    opened.problems = []
    opened.on("console", lambda message: opened.problems.append(message.text))
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("dialog", lambda dialog: opened.problems.append(dialog.message))
    opened.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:")) or opened.problems.append(request.url)
        ),
    )
    opened.goto((tmp_path / "x.html").as_uri())
    yield opened
    assert opened.problems == []
    opened.close()


def test_the_drawing_has_the_width_of_the_window(page: Any) -> None:
    assert page.locator("#drawing").bounding_box()["width"] > 0.9 * 1200


def test_a_box_shows_its_neighbours(page: Any) -> None:
    page.click('.box[data-name="d op"]')
    assert page.locator(".box.selected").count() == 1
    assert page.locator(".box.near").count() == 2  # what it waits for, and what waits for it
    assert "waits for" in page.inner_text("#description")
    page.keyboard.press("Escape")
    assert page.locator(".box.near").count() == 0


def test_names_are_found_and_the_keyboard_is_enough(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("C OP")
    assert page.locator(".box.match").count() == 1
    assert page.inner_text("#found") == "1 of 9 boxes"
    page.locator('.box[data-name="c op"]').focus()
    page.keyboard.press("Enter")
    assert page.get_attribute(".box.selected", "data-name") == "c op"


def test_the_drawing_zooms_and_the_theme_changes(page: Any) -> None:
    before = page.get_attribute("#drawing", "viewBox")
    page.click('[data-zoom="1.25"]')
    assert page.get_attribute("#drawing", "viewBox") != before
    page.click('[data-zoom="0"]')
    assert (
        page.get_attribute("#drawing", "viewBox").split()[2]
        == f"{float(page.get_attribute('#drawing', 'data-view').split()[2]):.1f}"
    )
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.keyboard.press("t")
    assert page.evaluate(colour) != light
