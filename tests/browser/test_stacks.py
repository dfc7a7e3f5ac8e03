"""The flame graph in a real browser: boxes of call stacks, as wide as host or GPU time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Open = Callable[..., Any]


def test_call_stacks_are_drawn_by_host_time_and_by_gpu_time(open_page: Open) -> None:
    tab = open_page(hash_="#host")
    stacks = tab.page.locator("#flame .stacks")
    texts = stacks.locator("[role=treeitem]").evaluate_all(
        "boxes => boxes.map((box) => box.getAttribute('aria-label'))"
    )
    assert texts[0].startswith("main thread, ")
    assert texts[0].endswith("100 %")
    assert any(text.startswith("Net_0") for text in texts)
    assert stacks.locator("svg").get_attribute("aria-label") == "Call stacks by time"
    wide = "boxes => boxes.map((box) => Number(box.querySelector('rect').getAttribute('width')))"
    by_host = stacks.locator("[role=treeitem]").evaluate_all(wide)
    stacks.locator("[data-measure-as=device]").click()
    by_gpu = stacks.locator("[role=treeitem]").evaluate_all(wide)
    assert by_host[0] == by_gpu[0]  # the only thread
    assert by_host != by_gpu


def test_a_box_zooms_and_says_its_times(open_page: Open) -> None:
    tab = open_page(hash_="#host")
    stacks = tab.page.locator("#flame .stacks")
    stacks.locator("[tabindex='0']").first.focus()
    tab.page.keyboard.press("ArrowDown")
    said = stacks.locator(".icicle-says").inner_text()
    assert "on the host" in said
    assert "on the GPU" in said
    tab.page.keyboard.press("Enter")
    assert stacks.locator("[role=treeitem].faded").count() == 1
    tab.page.keyboard.press("Escape")
    assert stacks.locator("[role=treeitem].faded").count() == 0


def test_hostile_names_are_text_in_stacks_too(open_page: Open) -> None:
    tab = open_page("hostile", "#host")
    assert tab.page.locator("#flame svg").count() >= 1
    assert tab.page.locator("#flame img").count() == 0
