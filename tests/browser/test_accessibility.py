"""Every view of the report for readers who do not see it, or not its colours, and on paper."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
VIEWS = ("overview", "timeline", "gpu", "host", "memory", "ranks", "data")
COLOURS = ("color-contrast", "link-in-text-block")
PAPER = {"width": 718, "height": 1000}  # A4 less margins of 10 mm, in pixels of CSS
MARGINS = dict.fromkeys(("top", "right", "bottom", "left"), "10mm")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.thorough)])
def test_axe_has_nothing_against_any_view(open_page: Open, scheme: str) -> None:
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    tab = open_page(hash_="", color_scheme=scheme)
    # through the debugging protocol: the page itself allows no other scripts
    tab.page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    views = tab.page.evaluate(
        "[...document.querySelectorAll('nav .links a[data-view]')].map((link) => link.dataset.view)"
    )
    assert tuple(views) == VIEWS
    # what stands around the views is the same in all of them, and in the dark only colours differ
    options = {
        "resultTypes": ["violations"],
        **({"runOnly": list(COLOURS)} if scheme == "dark" else {}),
    }
    problems = []
    for view in views:
        tab.page.click(f"nav .links a[data-view={view}]")
        tab.page.wait_for_selector(f"main > .view[data-view={view}]:not([hidden])")
        part = "body" if view == VIEWS[0] else "main"
        result = tab.page.evaluate("([part, options]) => axe.run(part, options)", [part, options])
        for violation in result["violations"]:
            where = [str(node["target"]) for node in violation["nodes"][:3]]
            problems.append(
                f"{view}: {violation['impact']}: {violation['help']}: {', '.join(where)}"
            )
    assert problems == []


def test_on_paper_stand_all_views_and_no_table_is_cut_off(open_page: Open) -> None:
    tab = open_page(hash_="#gpu", viewport=PAPER)
    printed = tab.page.pdf(format="A4", margin=MARGINS, outline=True, tagged=True)
    tab.page.emulate_media(media="print")
    tab.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    headings = tab.page.evaluate(
        "[...document.querySelectorAll('main section > header h2')].filter((h) => h.checkVisibility()).map((h) => h.textContent)"
    )
    assert {
        "What to fix first",
        "Timeline",
        "Steps",
        "Kernels",
        "Operators",
        "Memory",
        "Data",
    } <= set(headings)
    for heading in headings:  # they stand in the outline, as bytes or as UTF-16
        plain = f"/Title ({heading})".encode("latin-1", "replace")
        assert (
            plain in printed
            or f"/Title <FEFF{heading.encode('utf-16-be').hex().upper()}>".encode() in printed
        )
    assert not tab.page.locator("nav").is_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth") == PAPER["width"]
    wide = "(box) => box.scrollWidth > box.clientWidth || box.getBoundingClientRect().right > innerWidth"
    cut = f"[...document.querySelectorAll('.table .scroll')].filter((box) => box.checkVisibility()).filter({wide})"
    assert tab.page.evaluate(f"{cut}.map((box) => box.parentElement.id)") == []
    tab.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert [
        view.get_attribute("data-view") for view in tab.page.locator("main > .view:visible").all()
    ] == ["gpu"]
