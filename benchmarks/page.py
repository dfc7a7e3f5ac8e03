"""How heavy is the page? Bytes, elements and time to DOMContentLoaded of reports in a real browser.

    python benchmarks/page.py [INPUT ...] [--keep FOLDER]

Each INPUT is what `traceloom report` takes. Printed per page: bytes, of these the timeline and the
tables, bytes of the rest with 5 per event of the timeline taken off, elements at first paint and in
the largest view, milliseconds to DOMContentLoaded, to the first view and to the longest view,
pixels of the first and of the longest view. Times are the median of three loads. Chromium draws in
software.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

import traceloom
from traceloom.report import run
from traceloom.report.views.page import render_report_page

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LOADS = 3
OPEN = """
async (name) => {
  const before = performance.now();
  document.querySelector(`nav [data-view="${name}"]`).click();
  await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return [document.querySelectorAll("*").length, performance.now() - before, document.documentElement.scrollHeight];
}
"""
LOADED = """
() => [performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd, performance.now(),
       document.querySelectorAll("*").length, document.documentElement.scrollHeight]
"""


def measure(browser: Browser, path: Path) -> dict[str, Any]:
    """Load a page some times, and open each of its views once."""
    loads = []
    for _ in range(LOADS):
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached", timeout=60_000)
        loads.append(page.evaluate(LOADED))
        names = [
            link.get_attribute("data-view") for link in page.query_selector_all("nav [data-view]")
        ]
        views = [page.evaluate(OPEN, name) for name in names] if len(loads) == LOADS else []
        page.close()
    loaded, ready, nodes, height = (
        statistics.median(values) for values in zip(*loads, strict=True)
    )
    return {
        "nodes": int(nodes),
        "most": max(view[0] for view in views),
        "loaded": loaded,
        "ready": ready,
        "slowest": max(view[1] for view in views),
        "height": int(height),
        "longest": max(view[2] for view in views),
    }


def main() -> None:
    """Make the pages and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="*", default=[str(DATA / "kineto" / "h100_owlv2.json.gz")])
    parser.add_argument("--keep", type=Path, help="folder for the pages")
    asked = parser.parse_args()
    folder = asked.keep or Path(tempfile.mkdtemp())
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    )
    print(
        f"{'input':28} {'events':>8} {'bytes':>9} {'timeline':>9} {'tables':>8} {'rest':>8} {'nodes':>6} "
        f"{'most':>6} {'DCL ms':>7} {'ready':>6} {'slowest':>7} {'px':>6} {'longest':>7} {'made s':>7}"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for given in asked.inputs:
            session = traceloom.load(given)
            made = run.build(session)
            began = time.perf_counter()
            text = render_report_page(made, session)
            took = time.perf_counter() - began
            path = folder / f"{Path(given).name}.html"
            path.write_text(text, encoding="utf-8")
            size = path.stat().st_size
            payload = len(text.partition('id="timeline-data">')[2].partition("</script>")[0])
            tables = sum(
                map(
                    len,
                    re.findall(r'<script type="application/json">.*?</script>', text, re.DOTALL),
                )
            )
            events = sum(trace.events.height for trace in session.traces)
            found = measure(browser, path)
            print(
                f"{Path(given).name[:28]:28} {events:8} {size:9} {payload:9} {tables:8} {size - payload - tables:8} "
                f"{found['nodes']:6} {found['most']:6} {found['loaded']:7.0f} {found['ready']:6.0f} "
                f"{found['slowest']:7.0f} {found['height']:6} {found['longest']:7} {took:7.2f}",
                flush=True,
            )
        browser.close()


if __name__ == "__main__":
    main()
