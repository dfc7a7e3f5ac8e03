"""A real browser, and pages of small made runs in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.beside import put, series, stacks, telemetry
from support.once import alone, shared_folder
from traceloom import load
from traceloom.report import run
from traceloom.report.document import Col
from traceloom.report.views.page import list_sections, render_page, render_report_page
from traceloom.report.views.page_table import render_html_table
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a window. While Playwright runs, no other loop can: it ends with the module."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_uri(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page by its URI; after the test, nothing may have gone wrong in it, nor may it have asked for other files."""
    contexts: list[Any] = []
    uris: set[str] = set()
    requests: list[str] = []
    problems: list[str] = []

    def opened(uri: str, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        uris.add(uri.partition("#")[0])
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "dialog", lambda dialog: (problems.append(f"dialog {dialog.message}"), dialog.dismiss())
        )
        page.on("request", lambda request: requests.append(request.url))
        page.goto(uri)
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
    assert [
        url for url in requests if url not in uris and not url.startswith("data:image/svg")
    ] == []


def trace(rank: int, kernels: tuple[str, ...]) -> Any:
    """Four steps; each kernel has its operator, its launch, and a Python frame around them."""
    builder = TraceBuilder(rank=rank, world_size=2)
    correlation = 0
    for step in range(4):
        at = step * 1000.0
        builder.step(step, at, 1000)
        builder.python("train.py(7): step", at + 1, 990)
        builder.python("nn.Module: Net_0", at + 10, 900, module_id=1)
        for k, name in enumerate(kernels):
            correlation += 1
            start = at + 20 + 90 * k
            builder.python(f"nn.Module: Linear_{k}", start - 2, 84, module_id=2 + k)
            builder.op(f"aten::op{k}", start, 80, shapes=[[2, 3 + k]])
            builder.launch("cudaLaunchKernel", start + 10, 8, correlation=correlation)
            builder.kernel(name, start + 40, 30 + 2 * k, correlation=correlation)
        builder.allocation(
            at + 5, 1000, address=step, total_allocated=1000 * (step + 1), total_reserved=8000
        )
    return builder.build()


def run_of(*kernels: str, name: str = "made") -> Session:
    return Session(tuple(trace(rank, kernels) for rank in (0, 1)), name)


def run_with_stacks(folder: Path) -> Session:
    """An operator with its kernel, and beside it what an agent saw: stacks of a thread, power of the device."""
    folder.mkdir()
    base = 1_700_000_000_000_000_000
    builder = TraceBuilder(0, 1, host="node1", base_ns=base).op("aten::mm", 100, 400)
    builder.launch("cudaLaunchKernel", 200, 10, correlation=1).kernel(
        "gemm", 300, 50, correlation=1
    )
    builder.write(folder / "rank0.kineto.json.gz")
    seen = [[base + 110_000, 0, 190_000, [0, 1]], [base + 300_000, 0, 50_000, [0, 1, 2]]]
    put(folder / "rank0.stacks.json.gz", stacks(seen))
    power = series("gpu_power_watts", [base + 150_000, base + 250_000], [100, 400], device="GPU-0")
    put(folder / "node1.telemetry.json.gz", telemetry(power))
    return load(folder, cache=False)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files of pages by their names, of which `plain` and `hostile` are the usual ones."""
    folder = shared_folder(tmp_path_factory) / "pages"
    with alone(folder):
        if not (folder / "whole").exists():
            folder.mkdir()
            make_pages(folder)
            (folder / "whole").touch()
    return {path.stem: path for path in folder.glob("*.html")}


def make_pages(folder: Path) -> None:
    names = [f"kernel_{k:02d}_gemm" if k % 2 else f"kernel_{k:02d}_copy" for k in range(9)]
    runs = {
        "plain": run_of(*names, *(f"rare_{k}" for k in range(1))),
        "hostile": run_of(EVIL, "kind", name=EVIL),
    }
    many = TraceBuilder()
    for k in range(400):
        many.launch("cudaLaunchKernel", 10.0 * k, 4, correlation=k + 1)
        many.kernel(f"kernel_{k:03d}", 10.0 * k + 5, 3, correlation=k + 1)
    runs["long"] = Session((many.build(),), "long")
    rooted = TraceBuilder()
    for k in range(4):
        rooted.python(f"runpy.py({k}): root", k, 1000 - 2 * k)
    rooted.python("train.py(3): main", 5, 985)
    for k in range(3):
        rooted.python(f"train.py(9): step {k}", 10 + 300.0 * k, 290)
        rooted.op("aten::add", 20 + 300.0 * k, 100)
    rooted.launch("cudaLaunchKernel", 630, 5, correlation=1)
    rooted.kernel(
        "gemm",
        650,
        20,
        correlation=1,
        grid=[7, 16, 32],
        block=[256, 1, 1],
        **{"shared memory": 4096},
    )
    runs["rooted"] = load(rooted.write(folder / "rooted.json"))
    runs["beside"] = run_with_stacks(folder / "beside")
    (folder / "numbers.html").write_text(
        render_page(**NUMBERS, **list_sections([("s", "S", "", numbers())])), encoding="utf-8"
    )
    for name, session in runs.items():
        page = render_report_page(run.build(session), session)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")


NUMBERS = {"title": "Numbers", "name": "Numbers", "headline": "<h1>Numbers</h1>", "footer": ""}


def numbers() -> str:
    """A table of numbers of all sizes."""
    columns = [
        Col("wide", "Wide", "time"),
        Col("time", "Time", "time"),
        Col("share", "Share", "share"),
        Col("rate", "Rate", "flop_rate"),
        Col("number", "Number", "number"),
    ]
    values = [
        (3_400_000_000, 1_230_000, 0.0, 1.2e13, 0.0002),
        (12, 123_000_000, 0.0001, 1.5e12, 1234),
        (None, 4_000, 1.0, 7e10, 0.5),
    ]
    rows = [
        dict(zip(("wide", "time", "share", "rate", "number"), row, strict=True)) for row in values
    ]
    return render_html_table("made", columns, rows, {}, "Made")


class Tab:
    """A page in the browser, with what went wrong in it."""

    def __init__(self, page: Any, uri: str) -> None:
        self.page = page
        self.uri = uri
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on(
            "dialog",
            lambda dialog: (self.problems.append(f"dialog {dialog.message}"), dialog.dismiss()),
        )
        page.on("request", lambda request: self.requests.append(request.url))

    def go(self, hash_: str = "") -> Tab:
        """(Re)load the page with this hash and wait until the view stands."""
        self.page.goto("about:blank")
        self.requests.clear()
        self.page.goto(self.uri + hash_)
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")
        return self

    def timeline(self, expression: str) -> Any:
        """A JavaScript expression about `t`, the timeline."""
        return self.page.evaluate(
            f"(() => {{ const t = document.getElementById('timeline-view').timeline; return {expression}; }})()"
        )

    def event_named(self, name: str) -> tuple[int, float, float]:
        """(event, x, y) of the first drawn event of a name; x and y on the screen."""
        self.page.locator("#timeline").scroll_into_view_if_needed()
        found = self.page.evaluate(
            """(name) => {
              const t = document.getElementById("timeline-view").timeline;
              const { events } = t;
              let event = -1;
              for (let i = 0; i < events.count && event < 0; i++)
                if (events.name(i) === name && t.rows.topOf(i) !== null) event = i;
              const box = t.canvas.getBoundingClientRect();
              const x = t.painter.x((events.start[event] + events.end[event]) / 2);
              return [event, box.left + x, box.top + t.rows.topOf(event) - t.scroller.scrollTop + 8];
            }""",
            name,
        )
        return tuple(found)


@pytest.fixture
def open_page(browser: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Tab]]:
    """Open one of the pages; after the test, nothing may have gone wrong in it."""
    contexts, tabs = [], []

    def opened(
        name: str = "plain", hash_: str = "#timeline", script: str = "", **options: Any
    ) -> Tab:
        options.setdefault("viewport", {"width": 1440, "height": 1000})
        context = browser.new_context(**options)
        page = context.new_page()
        if script:
            page.add_init_script(script)
        tab = Tab(page, pages[name].as_uri())
        contexts.append(context)
        tabs.append(tab)
        return tab.go(hash_)

    yield opened
    problems = [problem for tab in tabs for problem in tab.problems]
    for context in contexts:
        context.close()
    assert problems == []
