"""The report page in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
Open = Callable[..., Any]


def names_of(tab: Any, table: str) -> list[str]:
    """The names that a table shows, from top to bottom."""
    return tab.page.locator(f"#{table} tbody tr:visible td.name").all_inner_texts()


def colours(tab: Any) -> int:
    """How many different colours the canvas of the timeline shows."""
    return tab.page.evaluate(
        """() => {
          const canvas = document.querySelector("canvas[data-part=canvas]");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4) seen.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
          return seen.size;
        }"""
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_it_opens_without_a_request_or_a_complaint(open_page: Open, name: str) -> None:
    tab = open_page(name)
    assert [
        url for url in tab.requests if url != tab.uri and not url.startswith("data:image/svg")
    ] == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [1440, 800, 480])
def test_nothing_makes_the_page_scroll_sideways(open_page: Open, width: int) -> None:
    tab = open_page(viewport={"width": width, "height": 900})
    assert tab.page.evaluate("document.documentElement.scrollWidth") == width


def test_hostile_names_are_text_in_tables_timeline_tooltip_and_title(open_page: Open) -> None:
    tab = open_page("hostile")
    assert EVIL in tab.page.title()
    event, x, y = tab.event_named(EVIL)
    tab.page.mouse.move(x, y)
    assert EVIL[:30] in tab.page.locator("[data-part=tip]").inner_text()
    tab.page.mouse.click(x, y)
    assert tab.timeline("t.selected") == event
    assert tab.page.locator("[data-part=details] h3").inner_text() == EVIL
    tab.go("#gpu")
    assert EVIL in tab.page.locator("#kernel-table").inner_text()
    assert tab.page.locator("img").count() == 0
    assert tab.page.locator("script").count() == 2 + tab.page.locator("script[type]").count()


def test_headers_sort_and_the_address_remembers(open_page: Open) -> None:
    tab = open_page(hash_="#gpu")
    header = tab.page.locator("#kernel-table th[data-key=name] button")
    header.click()
    first = names_of(tab, "kernel-table")
    assert first == sorted(first)
    assert (
        tab.page.locator("#kernel-table th[data-key=name]").get_attribute("aria-sort")
        == "ascending"
    )
    header.click()
    assert names_of(tab, "kernel-table") == sorted(first, reverse=True)
    tab.page.wait_for_timeout(250)
    hash_ = tab.page.evaluate("location.hash")
    assert "kernel-table.sort=name%3Adown" in hash_
    assert names_of(tab.go(hash_), "kernel-table") == sorted(first, reverse=True)


def test_numbers_sort_by_their_exact_value(open_page: Open) -> None:
    tab = open_page(hash_="#gpu&kernel-table.sort=mean_ns:up")
    values = tab.page.locator("#kernel-table tbody tr td:nth-child(5)").evaluate_all(
        "cells => cells.map((cell) => Number(cell.dataset.v))"
    )
    assert len(values) == 10
    assert values == sorted(values)


def test_long_tables_filter_and_unfold(open_page: Open) -> None:
    tab = open_page("long", "#gpu/kernels")
    figure = tab.page.locator("#kernel-table")
    rows = figure.locator("tbody tr")
    assert rows.count() == 12
    figure.get_by_role("button", name="Show all 400").click()
    assert 12 < rows.count() < 400
    for _ in range(9):  # more come as the reader comes to them
        figure.locator(".more").scroll_into_view_if_needed()
        tab.page.wait_for_timeout(120)
    assert rows.count() == 400
    figure.get_by_role("searchbox").fill("KERNEL_017")
    assert names_of(tab, "kernel-table") == ["kernel_017"]
    assert figure.locator(".count").inner_text() == "1 of 400"
    tab.page.wait_for_timeout(250)
    tab.go(tab.page.evaluate("location.hash"))
    assert names_of(tab, "kernel-table") == ["kernel_017"]


def test_the_exact_value_shows_on_hover(open_page: Open) -> None:
    tab = open_page(hash_="#gpu")
    cell = tab.page.locator("#kernel-table tbody tr td[data-v]").first
    cell.scroll_into_view_if_needed()
    cell.hover()
    exact = tab.page.locator("#kernel-table tbody tr td[title][data-v]").first.get_attribute(
        "title"
    )
    assert exact.replace("\u202f", "").split() == [cell.get_attribute("data-v"), "ns"]


def test_the_chosen_rank_is_shown_and_remembered(open_page: Open) -> None:
    tab = open_page()
    assert [tab.page.locator(f"#steps-{k}").is_visible() for k in (0, 1)] == [True, False]
    tab.page.select_option("#rank", "1")
    assert [tab.page.locator(f"#steps-{k}").is_visible() for k in (0, 1)] == [False, True]
    tab.page.wait_for_timeout(250)
    assert "rank=1" in tab.page.evaluate("location.hash")


def test_the_timeline_draws(open_page: Open) -> None:
    assert colours(open_page()) > 20


def test_it_draws_without_decompression_stream_too(open_page: Open) -> None:
    tab = open_page(script="delete window.DecompressionStream; delete Uint8Array.fromBase64;")
    reference = open_page()
    assert tab.page.evaluate("typeof DecompressionStream") == "undefined"
    sums = "[t.events.count, t.events.start.reduce((a, b) => a + b), t.events.duration.reduce((a, b) => a + b)]"
    assert tab.timeline(sums) == reference.timeline(sums)
    assert colours(tab) > 20


def test_search_finds_counts_and_steps_through(open_page: Open) -> None:
    tab = open_page()
    tab.page.fill("[data-part=search]", "KERNEL_03")
    assert tab.page.locator("[data-part=count]").inner_text().startswith("8 found: ")
    tab.page.keyboard.press("Enter")
    assert tab.page.locator("[data-part=count]").inner_text().startswith("1 of 8: ")
    assert tab.page.locator("[data-part=details] h3").inner_text() == "kernel_03_gemm"
    first = tab.timeline("t.events.start[t.selected]")
    tab.page.click("[data-part=next]")
    assert tab.timeline("t.events.start[t.selected]") >= first
    tab.page.click("[data-part=previous]")
    assert tab.page.locator("[data-part=count]").inner_text().startswith("1 of 8: ")
    tab.page.fill("[data-part=search]", "no such event")
    assert tab.page.locator("[data-part=count]").inner_text() == "nothing found"
    assert tab.page.locator("[data-part=next]").is_disabled()


def test_a_search_tells_how_long_its_matches_take_and_leaves_them_their_names(
    open_page: Open,
) -> None:
    tab = open_page()
    tab.page.fill("[data-part=search]", "kernel_03")
    count = tab.page.locator("[data-part=count]")
    assert (
        count.inner_text() == "8 found: 288\u202fµs in sum, 36.0\u202fµs each, longest 36.0\u202fµs"
    )
    tab.page.keyboard.press("Enter")
    assert count.inner_text() == "1 of 8: 36.0\u202fµs"
    drawn = """(() => {
      const names = new Set(), { context } = t.painter, write = context.fillText;
      context.fillText = (text, ...at) => { names.add(text); write.call(context, text, ...at); };
      t.draw();
      context.fillText = write;
      return [...names].filter((name) => t.events.shortNames.includes(name));
    })()"""
    tab.timeline("t.zoomTo(t.selected)")
    assert tab.timeline(drawn) == ["kernel_03_gemm"]


def test_a_kernel_tells_how_it_was_launched(open_page: Open) -> None:
    tab = open_page("rooted")
    _, x, y = tab.event_named("gemm")
    tab.page.mouse.click(x, y)
    panel = tab.page.locator("[data-part=details]")
    facts = dict(
        zip(
            panel.locator("dt").all_inner_texts(),
            panel.locator("dd").all_inner_texts(),
            strict=True,
        )
    )
    sizes = {
        "grid": "7 × 16 × 32",
        "block": "256 × 1 × 1",
        "shared memory": "4.10\u202fkB",
        "operator": "aten::add",
    }
    assert sizes.items() <= facts.items()
    panel.get_by_role("button", name="Operator").click()
    assert panel.locator("h3").inner_text() == "aten::add"


def test_the_tooltip_goes_when_its_event_goes(open_page: Open) -> None:
    tab = open_page()
    _, x, y = tab.event_named("kernel_04_copy")
    tab.page.mouse.move(x, y)
    tip = tab.page.locator("[data-part=tip]")
    assert "kernel_04_copy" in tip.inner_text()
    tab.timeline("(t.setView(0, 50), t.draw())")  # the pointer stays, the event does not
    assert tip.is_hidden()
    assert tab.timeline("t.hovered") == -1


def test_lanes_are_filtered_by_name(open_page: Open) -> None:
    tab = open_page()
    shown = "t.rows.lines.map((line) => line.lane?.name ?? line.kind)"
    everything = tab.timeline(shown)
    tab.page.fill("[data-part=filter]", "RANK 1 · stream")
    assert set(tab.timeline(shown)) == {
        "rank",
        *(name for name in everything if name.startswith("stream")),
    }
    assert tab.timeline("t.rows.lines.filter((line) => line.kind === 'rank').length") == 1
    tab.page.wait_for_timeout(250)
    tab.go(tab.page.evaluate("location.hash"))
    assert tab.timeline("t.rows.lines.filter((line) => line.kind === 'rank').length") == 1
    tab.timeline("t.select(0, true)")  # what is asked for is shown, filtered or not
    assert tab.page.locator("[data-part=filter]").input_value() == ""
    assert tab.timeline("t.rows.lines.length") >= len(everything)


def test_pinned_lanes_stay_in_view(open_page: Open) -> None:
    tab = open_page()
    top = "t.rows.topOf(t.events.lanes.find((lane) => lane.trace === 1 && lane.gpu).first)"
    unpinned = tab.timeline(top)
    lane = tab.timeline("t.events.lanes.findIndex((lane) => lane.trace === 1 && lane.gpu)")
    pin = tab.page.locator(f".tl-pin[data-pin=l{lane}]")
    pin.focus()
    tab.page.keyboard.press("Enter")
    assert pin.get_attribute("aria-pressed") == "true"
    assert "rank 1 · " in pin.get_attribute("aria-label")
    assert tab.timeline(top) == 0 < unpinned
    tab.timeline(
        "(t.scroller.style.height = '120px', t.resize(), t.scroller.scrollTop = 60, t.draw(), 0)"
    )
    assert tab.timeline("t.scroller.scrollTop") == 60
    event = tab.timeline(f"t.events.lanes[{lane}].first")
    assert tab.timeline(f"t.eventAt(t.painter.x(t.events.start[{event}] + 5), 8)") == event
    tab.page.wait_for_timeout(250)
    tab.go(tab.page.evaluate("location.hash"))
    assert tab.timeline(top) == 0
    tab.page.locator(f".tl-pin[data-pin=l{lane}]").click()
    assert tab.timeline(top) == unpinned


def test_python_frames_around_all_others_fold(open_page: Open) -> None:
    tab = open_page("rooted")
    tab.page.check("[data-part=python]")
    first = "t.events.name(t.rows.lines.find((line) => line.lane?.kind === 'host').row.indices[0])"
    assert tab.timeline(first) == "train.py(3): main"
    label = tab.page.locator("button.tl-roots")
    assert label.inner_text() == "4 Python frames around all"
    label.click()
    assert tab.timeline(first) == "runpy.py(0): root"
    tab.page.locator("button.tl-roots").click()
    root = "[...t.events.names.keys()].find((k) => t.events.names[k] === 'runpy.py(2): root')"
    tab.timeline(f"t.select([...t.events.label].indexOf({root}), true)")
    assert tab.timeline("t.rows.topOf(t.selected)") is not None


def test_a_click_shows_what_is_known_and_leads_to_the_launch(open_page: Open) -> None:
    tab = open_page()
    _, x, y = tab.event_named("kernel_04_copy")
    tab.page.mouse.click(x, y)
    panel = tab.page.locator("[data-part=details]")
    facts = dict(
        zip(
            panel.locator("dt").all_inner_texts(),
            panel.locator("dd").all_inner_texts(),
            strict=True,
        )
    )
    assert facts["kind"] == "kernel · compute"
    assert facts["duration"] == "38.0\u202fµs"
    assert facts["step"] == "ProfilerStep#0"
    assert (facts["operator"], facts["shapes"]) == ("aten::op4", "[[2,7]]")
    assert facts["where"] == "rank 0 · stream 7 · GPU 0"
    assert facts["correlation"] == "5"
    assert facts["after its launch"] == "30.0\u202fµs"
    panel.get_by_role("button", name="Launch").click()
    assert panel.locator("h3").inner_text() == "cudaLaunchKernel"
    panel.get_by_role("button", name="Parent").click()
    assert panel.locator("h3").inner_text() == "aten::op4"
    assert "[[2,7]]" in panel.inner_text().replace(" ", "")
    panel.get_by_role("button", name="GPU work").click()
    assert panel.locator("h3").inner_text() == "kernel_04_copy"


def test_the_keyboard_alone_zooms_moves_and_selects(open_page: Open) -> None:
    tab = open_page()
    tab.page.locator("[data-part=scroll]").focus()
    whole = tab.timeline("t.view.to - t.view.from")
    tab.page.keyboard.press("w")
    tab.page.keyboard.press("w")
    assert tab.timeline("t.view.to - t.view.from") == pytest.approx(whole * 0.49)
    start = tab.timeline("t.view.from")
    tab.page.keyboard.press("d")
    assert tab.timeline("t.view.from") > start
    tab.page.keyboard.press("f")
    assert tab.timeline("t.view.to - t.view.from") == pytest.approx(whole)
    tab.page.keyboard.press("Enter")
    first = tab.timeline("t.selected")
    assert first >= 0
    tab.page.keyboard.press(".")
    assert tab.timeline("t.selected") == first + 1
    tab.page.keyboard.press("l")
    assert tab.timeline("t.events.category(t.selected)") == "runtime"
    tab.page.keyboard.press("Escape")
    assert tab.timeline("t.selected") == -1


def test_the_time_range_stands_in_the_address(open_page: Open) -> None:
    tab = open_page(hash_="#timeline&t=1000000-1500000")
    assert tab.timeline("[t.view.from, t.view.to]") == [1_000_000, 1_500_000]
    tab.page.click("[data-part=in]")
    tab.page.wait_for_timeout(250)
    assert tab.page.evaluate("location.hash") == "#timeline&t=1100000-1400000"


def test_the_wheel_scrolls_the_page_until_the_timeline_has_the_focus(open_page: Open) -> None:
    tab = open_page()
    _, x, y = tab.event_named("kernel_00_copy")
    tab.page.mouse.move(x, y)
    span = tab.timeline("t.view.to - t.view.from")
    tab.page.mouse.wheel(0, 60)
    tab.page.wait_for_timeout(200)
    assert tab.timeline("t.view.to - t.view.from") == span
    _, x, y = tab.event_named("kernel_00_copy")
    tab.page.mouse.click(x, y)
    tab.page.mouse.wheel(0, -200)
    tab.page.wait_for_timeout(200)
    assert tab.timeline("t.view.to - t.view.from") < span


def test_a_drag_moves_and_a_drag_with_shift_measures(open_page: Open) -> None:
    tab = open_page()
    tab.page.click("[data-part=in]")
    tab.page.locator("canvas[data-part=canvas]").scroll_into_view_if_needed()
    box = tab.page.locator("canvas[data-part=canvas]").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 40
    before = tab.timeline("t.view.from")
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(x - 100, y, steps=4)
    tab.page.mouse.up()
    assert tab.timeline("t.view.from") > before
    tab.page.keyboard.down("Shift")
    tab.page.mouse.down()
    tab.page.mouse.move(x + 200, y, steps=4)
    tab.page.mouse.up()
    tab.page.keyboard.up("Shift")
    panel = tab.page.locator("[data-part=details]")
    assert "selected" in panel.locator("h3").inner_text()
    assert "GPU compute" in panel.inner_text()


def test_sums_of_a_range_are_the_time_inside_it(open_page: Open) -> None:
    tab = open_page()
    tab.timeline("t.setRange({from: 0, to: t.events.span})")
    panel = tab.page.locator("[data-part=details]")
    facts = dict(
        zip(
            panel.locator("dt").all_inner_texts(),
            panel.locator("dd").all_inner_texts(),
            strict=True,
        )
    )
    kernels = 2 * 4 * sum(30 + 2 * k for k in range(10))  # µs: two ranks, four steps
    assert facts["GPU compute"].startswith(f"{kernels / 1000:.2f}\u202fms")


def test_ranks_and_lanes_fold(open_page: Open) -> None:
    tab = open_page()
    label = tab.page.locator("button.tl-label", has_text="rank 0")
    rows = tab.timeline("t.rows.lines.length")
    label.click()
    assert tab.timeline("t.rows.lines.length") < rows
    assert (
        tab.page.locator("button.tl-label", has_text="rank 0").get_attribute("aria-expanded")
        == "false"
    )


def test_python_frames_can_be_shown(open_page: Open) -> None:
    tab = open_page()
    height = tab.timeline("t.rows.height")
    assert not tab.page.locator("[data-part=python]").is_checked()
    tab.page.locator("[data-part=python]").check()
    assert tab.timeline("t.rows.height") > height
    tab.event_named("train.py(7): step")


def test_levels_of_detail_keep_all_the_time(open_page: Open) -> None:
    tab = open_page()
    equal = tab.page.evaluate(
        """() => {
          const t = document.getElementById("timeline-view").timeline;
          const { events } = t;
          const Row = t.rows.lines.find((line) => line.kind === "row").row.constructor;
          const many = { start: new Float64Array(5000), end: new Float64Array(5000), label: new Uint32Array(5000) };
          for (let i = 0; i < 5000; i++) { many.start[i] = i * 10; many.end[i] = i * 10 + 1 + (i % 9); }
          const row = new Row(many, Int32Array.from({ length: 5000 }, (_, i) => i));
          const busy = (level) => level.busy.reduce((a, b) => a + b);
          const fine = row.level(0);
          const coarse = row.level(400);
          return [busy(fine) === busy(coarse), fine.start.length, coarse.start.length, coarse.width <= 400,
                  coarse.start.every((start, k) => !k || start >= coarse.end[k - 1])];
        }"""
    )
    assert equal[:2] == [True, 5000]
    assert equal[2] < 5000 / 10
    assert equal[3:] == [True, True]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_and_can_be_changed(open_page: Open, scheme: str) -> None:
    tab = open_page(color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = "rgb(18, 22, 29)"
    assert (tab.page.evaluate(paper) == dark) == (scheme == "dark")
    tab.page.click("#theme")
    assert (tab.page.evaluate(paper) == dark) == (scheme == "light")
    assert tab.timeline("t.palette.background") == ("#12161d" if scheme == "light" else "#ffffff")
    other = "dark" if scheme == "light" else "light"
    tab.page.reload()  # remembered
    tab.page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == other


def test_the_address_decides_the_theme_before_all(open_page: Open) -> None:
    tab = open_page(hash_="#theme=dark")
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)"


def test_on_paper_it_is_light_and_without_controls(open_page: Open) -> None:
    tab = open_page(color_scheme="dark")
    tab.page.emulate_media(media="print")
    assert (
        tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    for _ in range(100):  # the page hears of the medium when it has time
        if tab.timeline("t.palette.background") == "#ffffff":
            break
        tab.page.wait_for_timeout(50)
    assert tab.timeline("t.palette.background") == "#ffffff"
    for hidden in ("nav", ".tl-tools", "#help-button"):
        assert not tab.page.locator(hidden).first.is_visible()
    assert tab.page.locator("canvas[data-part=canvas]").is_visible()
    assert len(tab.page.pdf(format="A4")) > 10_000


def test_the_help_opens_with_a_question_mark(open_page: Open) -> None:
    tab = open_page()
    tab.page.keyboard.press("?")
    assert tab.page.locator("#help").is_visible()
    tab.page.keyboard.press("Escape")
    assert not tab.page.locator("#help").is_visible()


def test_a_question_mark_in_the_search_is_only_text(open_page: Open) -> None:
    tab = open_page()
    tab.page.locator("[data-part=search]").focus()
    tab.page.keyboard.type("a?w")
    assert not tab.page.locator("#help").is_visible()
    assert tab.page.locator("[data-part=search]").input_value() == "a?w"


def test_the_memory_curve_tells_values_by_keyboard(open_page: Open) -> None:
    tab = open_page(hash_="#memory")
    curve = tab.page.locator(".curve:visible").first
    rest = curve.locator(".curve-says").inner_text()
    curve.locator("svg").focus()
    tab.page.keyboard.press("ArrowRight")
    assert "allocated" in curve.locator(".curve-says").inner_text()
    assert curve.locator(".curve-says").inner_text() != rest


def test_the_module_tree_zooms_by_keyboard(open_page: Open) -> None:
    tab = open_page(hash_="#host")
    tree = tab.page.locator(".modules:visible")
    boxes = tree.locator("[role=treeitem]")
    assert boxes.count() == 11
    tree.locator("[tabindex='0']").first.focus()
    assert tree.locator(".icicle-says b").inner_text() == "Net_0"
    tab.page.keyboard.press("ArrowDown")
    assert tree.locator(".icicle-says b").inner_text() == "Linear_9"  # the longest kernel
    tab.page.keyboard.press("Enter")
    assert boxes.count() == 2
    assert tree.locator("[role=treeitem].faded").count() == 1
    tab.page.keyboard.press("Escape")
    assert boxes.count() == 11


@pytest.mark.sampled(3)
@pytest.mark.parametrize("view", ["overview", "timeline", "gpu", "host", "memory", "ranks", "data"])
def test_everything_that_acts_can_be_reached_and_has_a_name(open_page: Open, view: str) -> None:
    tab = open_page(hash_=f"#{view}")
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, [role=application], [role=region], canvas")]
          .filter((e) => e.getClientRects().length && !e.closest("[aria-hidden]") && e.tagName !== "CANVAS")
          .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.title || e.labels?.length))
          .map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert nameless == []


def test_it_reads_without_scripts(browser: Any, pages: dict[str, Any]) -> None:
    context = browser.new_context(
        java_script_enabled=False, viewport={"width": 1440, "height": 1000}
    )
    page = context.new_page()
    page.goto(pages["plain"].as_uri())
    assert "Without JavaScript only the answer" in page.locator("main").inner_text()
    assert page.locator(".finding").count() > 0
    assert page.locator(".short li").count() > 5
    assert not page.locator("nav").is_visible()
    context.close()


@pytest.mark.data
@pytest.mark.parametrize(
    "file",
    [
        "kineto/h100_qwen_0.5b",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("kineto/a100_ddp_nccl", "diff/v100_test")
        ),
    ],
)
def test_rows_and_steps_of_the_page_are_those_of_the_trace(
    browser: Any, shared_data: Any, tmp_path: Any, file: str
) -> None:
    """The script derives nesting and steps again; they must come out as the reader's."""
    from traceloom.formats import load
    from traceloom.report import run
    from traceloom.report.views.page import render_report_page

    session = load(str(shared_data / f"{file}.json.gz"))
    path = tmp_path / "page.html"
    path.write_text(render_report_page(run.build(session), session), encoding="utf-8")
    page = browser.new_page()
    page.goto(f"{path.as_uri()}#timeline")
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    found = page.evaluate(
        """() => {
          const { events } = document.getElementById("timeline-view").timeline;
          const out = {};
          for (const lane of events.lanes) {
            events.layOut(lane, false);
            for (let i = lane.first; i < lane.first + lane.count; i++) {
              const key = `${events.stepOf(i)?.[0] ?? null} ${lane.nests ? events.row[i] : "-"}`;
              out[key] = (out[key] ?? 0) + 1;
            }
          }
          return out;
        }"""
    )
    page.close()
    trace = session.traces[0]
    nesting = set(
        trace.lanes.filter(trace.lanes["kind"].is_in(["host", "other"]))["lane"].to_list()
    )
    expected: dict[str, int] = {}
    for step, depth, lane in trace.events.select("step", "depth", "lane").iter_rows():
        key = f"{'null' if step is None else step} {depth if lane in nesting else '-'}"
        expected[key] = expected.get(key, 0) + 1
    assert found == expected


def test_a_kernel_of_the_table_is_found_in_the_timeline(open_page: Open) -> None:
    tab = open_page(hash_="#gpu")
    row = tab.page.locator("#kernel-table tbody tr", has_text="kernel_03_gemm")
    row.get_by_role("button", name="Find it in the timeline").click()
    tab.page.locator("[data-part=count]", has_text="8 found").wait_for()
    assert tab.page.locator("[data-part=search]").input_value() == "kernel_03_gemm"
    tab.page.keyboard.press("Enter")
    assert tab.page.locator("[data-part=details] h3").inner_text() == "kernel_03_gemm"


def test_a_step_of_the_table_is_shown_in_the_timeline(open_page: Open) -> None:
    tab = open_page()
    tab.page.locator("#steps-0 tbody tr").nth(2).get_by_role(
        "button", name="Show it in the timeline"
    ).click()
    tab.page.wait_for_timeout(50)
    step = tab.timeline("t.events.ranks[0].steps[2]")
    span = step[3] - step[2]
    assert tab.timeline("[t.view.from, t.view.to]") == pytest.approx(
        [step[2] - 0.02 * span, step[3] + 0.02 * span]
    )


def test_a_drag_on_the_ruler_measures_and_enter_zooms_to_it(open_page: Open) -> None:
    tab = open_page()
    ruler = tab.page.locator("canvas[data-part=ruler]")
    ruler.scroll_into_view_if_needed()
    box = ruler.bounding_box()
    tab.page.mouse.move(box["x"] + 100, box["y"] + 10)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 300, box["y"] + 10, steps=3)
    tab.page.mouse.up()
    span = tab.timeline("[t.range.from, t.range.to]")
    expected = tab.timeline("[t.timeAt(100), t.timeAt(300)]")
    assert span == pytest.approx(expected)
    tab.page.locator("[data-part=scroll]").focus()
    tab.page.keyboard.press("Enter")
    assert tab.timeline("[t.view.from, t.view.to]") == pytest.approx(span)


def test_two_fingers_zoom(open_page: Open) -> None:
    tab = open_page(has_touch=True)
    _, x, y = tab.event_named("kernel_05_gemm")
    whole = tab.timeline("t.view.to - t.view.from")
    touch = tab.page.context.new_cdp_session(tab.page)

    def fingers(kind: str, *places: float) -> None:
        points = [{"x": place, "y": y, "id": number} for number, place in enumerate(places)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    fingers("touchStart", x - 20, x + 20)
    for spread in (40, 60, 80):
        fingers("touchMove", x - spread, x + spread)
    fingers("touchEnd")
    assert tab.timeline("t.view.to - t.view.from") == pytest.approx(whole / 4, rel=0.05)


def test_the_side_bar_opens_views_and_keeps_the_place(open_page: Open) -> None:
    tab = open_page(hash_="")
    nav = tab.page.locator("nav")
    assert tab.page.locator("h1:visible").inner_text().startswith("Ranks 0")
    nav.get_by_role("link", name="GPU", exact=True).click()
    assert tab.page.locator("h1:visible").inner_text() == "GPU"
    nav.get_by_role("link", name="Launches").click()
    top = "document.getElementById('launches').getBoundingClientRect().top"
    assert 0 <= tab.page.evaluate(top) < 200
    assert tab.page.evaluate("location.hash") == "#gpu/launches"
    tab.page.wait_for_selector("nav [aria-current][href='#gpu/launches']", state="attached")
    place = tab.page.evaluate("scrollY")
    nav.get_by_role("link", name="Host", exact=True).click()
    nav.get_by_role("link", name="GPU", exact=True).click()
    assert tab.page.evaluate("scrollY") == place
    tab.page.go_back()
    tab.page.wait_for_function(
        "document.querySelector('main > .view:not([hidden])').dataset.view === 'host'"
    )


def test_little_is_drawn_until_a_view_is_opened(open_page: Open) -> None:
    tab = open_page("long", "")
    assert tab.page.evaluate("document.querySelectorAll('*').length") < 900
    assert tab.page.locator("#kernel-table").count() == 0
    tab.page.locator("nav").get_by_role("link", name="GPU", exact=True).click()
    assert tab.page.locator("#kernel-table tbody tr").count() == 12


def test_the_search_finds_sections_and_rows_of_any_view(open_page: Open) -> None:
    tab = open_page("long", "")
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("roofl")
    assert "Roofline" in tab.page.locator("#results button").first.inner_text()
    tab.page.locator("#lookup").fill("kernel_017")
    tab.page.locator("#results button", has_text="Kernels").first.click()
    tab.page.wait_for_selector("#kernel-table tbody tr")
    assert names_of(tab, "kernel-table") == ["kernel_017"]
    assert not tab.page.locator("#results").is_visible()
    tab.page.locator("#lookup").fill("no such thing")
    assert "Nothing" in tab.page.locator("#results").inner_text()


def test_further_tables_of_a_section_unfold(open_page: Open) -> None:
    tab = open_page(hash_="#gpu")
    fold = tab.page.locator("#launches .fold").first
    assert not fold.locator("table").is_visible()
    fold.locator("summary").click()
    fold.locator("tbody tr").first.wait_for()


def test_an_address_of_a_section_alone_opens_its_view_and_unfolds_it(open_page: Open) -> None:
    tab = open_page(hash_="#graph-launches")
    assert tab.page.locator("#graph-launches").is_visible()


def test_numbers_read_as_those_of_the_terminal(open_page: Open) -> None:
    """One unit per column, in which the largest is at least 1 and the smallest can still be read."""
    tab = open_page("numbers", "#overview")
    cells = "[...document.querySelectorAll('#made tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    heads = tab.page.locator("#made thead th").all_inner_texts()
    assert heads == ["Wide µs", "Time ms", "Share %", "Rate TFLOP/s", "Number"]
    assert tab.page.evaluate(cells) == [
        ["3\u202f400\u202f000", "1.23", "0", "12", "0.00020"],
        ["0.012", "123", "<0.1", "1.50", "1\u202f234"],
        ["–", "0.004", "100", "0.070", "0.500"],
    ]


CONTRAST = """() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((value, k) => value * a + under[k] * (1 - a));
  const linear = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (e) => !e ? [255, 255, 255]
    : over(parse(getComputedStyle(e).backgroundColor), parse(getComputedStyle(e).backgroundColor)[3] === 1 ? [0, 0, 0] : ground(e.parentElement));
  const opacity = (e) => e ? Number(getComputedStyle(e).opacity) * opacity(e.parentElement) : 1;
  const bad = new Set();
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !e.checkVisibility({ opacityProperty: true }) || e.disabled || e.closest("svg, .unseen, option")) continue;
    const [r, g, b, a = 1] = parse(getComputedStyle(e).color);
    const under = ground(e);
    const [bright, dim] = [light(over([r, g, b, a * opacity(e)], under)), light(under)].sort((x, y) => y - x);
    if ((bright + 0.05) / (dim + 0.05) < 4.5) bad.add(`${e.className || e.tagName}: ${e.textContent.slice(0, 30)}`);
  }
  return [...bad];
}"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_of_every_view_have_contrast(open_page: Open, scheme: str) -> None:
    tab = open_page(hash_="", color_scheme=scheme)
    for link in tab.page.locator("nav [data-view]").all():
        link.click()
        tab.page.wait_for_timeout(50)
        assert tab.page.evaluate(CONTRAST) == []
