"""The page of a comparison in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceloom.analyze import compare
from traceloom.report import comparison
from traceloom.report.comparison import build
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

pytestmark = pytest.mark.browser

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def run(kernel_us: float, device: str, extra: str) -> Session:
    builder = TraceBuilder(device_name=device)
    correlation = 0
    for step in range(3):
        at = 1000.0 * step
        builder.step(step, at, 1000)
        for k, name in enumerate([*(f"kernel_{k:02d}" for k in range(14)), extra]):
            correlation += 1
            builder.op(f"aten::op{k}", at + 10 + 50 * k, 40, shapes=[[2, k]])
            builder.launch("cudaLaunchKernel", at + 15 + 50 * k, 5, correlation=correlation)
            builder.kernel(name, at + 25 + 50 * k, kernel_us + k, correlation=correlation)
    return Session((builder.build(),), f"run of {extra}")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    base, new = run(10, "NVIDIA H100 80GB HBM3", "last"), run(20, "AMD Instinct MI300X", EVIL)
    path: Path = tmp_path_factory.mktemp("diff") / "diff.html"
    path.write_text(comparison.render(build(compare(base, new), base, new)), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(params=[1440, 800])
def tab(open_uri: Callable[..., Any], uri: str, request: pytest.FixtureRequest) -> Any:
    return open_uri(uri, viewport={"width": request.param, "height": 900})


@pytest.mark.sampled(1)
def test_it_opens_and_never_scrolls_sideways(tab: Any) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.locator("h1").inner_text().startswith("The conditions differ")
    assert (
        EVIL in tab.locator("#diff-kernels").inner_text()
        or EVIL[:30] in tab.locator("#diff-kernels").inner_text()
    )


@pytest.mark.sampled(1)
def test_tables_sort_filter_and_unfold(tab: Any) -> None:
    header = tab.locator("#diff-kernels th[data-key=difference_ns] button")
    header.click()
    header.click()
    cells = tab.locator("#diff-kernels tbody tr:visible td[data-v]").first
    assert cells.is_visible()
    tab.locator("#diff-kernels input[type=search]").fill("kernel_03")
    assert tab.locator("#diff-kernels tbody tr:visible").count() == 1


def test_both_steps_are_bars_of_one_scale(tab: Any) -> None:
    assert tab.locator(".answer-bar svg.stack").count() == 2
    widths = tab.locator(".answer-bar svg.stack").evaluate_all(
        "bars => bars.map((bar) => [...bar.querySelectorAll('rect')].reduce((sum, r) => sum + Number(r.getAttribute('width')), 0))"
    )
    assert widths[0] == pytest.approx(1000, abs=1)
    assert widths[1] == pytest.approx(1000, abs=1)  # the steps are equally long


@pytest.mark.sampled(1)
def test_bars_run_from_the_middle_and_say_which_way(tab: Any) -> None:
    bars = tab.locator("#diff-parts td.delta svg")
    labels = bars.evaluate_all(
        "bars => bars.map((bar) => bar.getAttribute('aria-label').split(' ')[0])"
    )
    lefts = bars.evaluate_all(
        "bars => bars.map((bar) => Number(bar.querySelector('rect')?.getAttribute('x') ?? 0))"
    )
    assert "slower" in labels
    assert "faster" in labels
    assert all((left < 0) == (label == "faster") for left, label in zip(lefts, labels, strict=True))


@pytest.mark.sampled(1)
def test_the_call_tree_is_read_with_the_keyboard(tab: Any) -> None:
    boxes = tab.locator("#diff-tree-section [role=treeitem]")
    assert boxes.first.get_attribute("class") == "slower"
    boxes.first.focus()
    says = tab.locator("#diff-tree-section .icicle-says")
    assert "(all)" in says.inner_text()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowDown")
    assert "1 call per step" in says.inner_text()
    label = tab.locator("#diff-tree-section [role=treeitem]:focus").get_attribute("aria-label")
    assert label.replace("\u202f", " ") == "aten::op14, 24.0 µs → 34.0 µs (+41.7 %)"
    tab.get_by_role("button", name="Host time").click()
    assert (
        tab.locator("#diff-tree-section .same").count() > 0
    )  # the host does the same on both sides
    assert EVIL not in tab.content()
