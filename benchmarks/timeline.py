"""How smooth is the timeline? Frames per second with 200,000 events (and any other number) in a
real browser.

    python benchmarks/timeline.py [--events 200000] [--scales 1 2] [--seconds 3] [--keep page.html]

Draws 40 rows of events, in the page and filling the window: full view (every event is in sight),
panning and zooming. Each frame changes the view, so that nothing is drawn from memory. A browser
shows at most 60 frames per second; headless Chromium draws in software.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from playwright.sync_api import Page, sync_playwright

from traceloom.report.views.page import render_report_page
from traceloom.report.views.timeline import build
from traceloom.trace.session import Session
from traceloom.trace.trace import SCHEMAS, Meta, Trace, build_empty_frame

THREADS, DEPTH, STREAMS = 8, 4, 8
SPAN_NS = 2_000_000_000

MEASURE = """
([mode, seconds]) => new Promise((done) => {
  const timeline = document.getElementById("timeline-view").timeline;
  const { span } = timeline.events;
  const views = {
    full: (k) => [-(k % 7) * 1e-4 * span, (1 + (k % 5) * 1e-4) * span],
    pan: (k) => { const from = ((k * 0.004) % 0.8) * span; return [from, from + 0.2 * span]; },
    zoom: (k) => { const wide = span * 0.97 ** (k % 200); return [0.4 * (span - wide), 0.4 * (span - wide) + wide]; },
  };
  const spans = [];
  let before = null;
  let began = 0;
  let frames = 0;
  const frame = (now) => {
    if (before === null) began = now;
    else spans.push(now - before);
    before = now;
    if (now - began >= seconds * 1000) {
      spans.sort((a, b) => a - b);
      done({ fps: (1000 * frames) / (now - began), worst: spans[Math.floor(spans.length * 0.95)] });
      return;
    }
    timeline.setView(...views[mode](frames++)); // drawn in the next frame
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})
"""


def session(count: int) -> Session:
    """A trace of about `count` events on 40 rows: nested operators on host threads, kernels on
    streams.
    """
    random = np.random.default_rng(7)
    frames, lanes = [], []
    each = count // (THREADS * DEPTH + STREAMS)
    for lane in range(THREADS + STREAMS):
        host = lane < THREADS
        for depth in range(DEPTH if host else 1):
            slot = SPAN_NS // each
            start = np.arange(each, dtype=np.int64) * slot + depth * slot // 10
            length = (slot - 2 * depth * slot // 10) * random.uniform(0.3, 0.9, each)
            frames.append(
                pl.DataFrame(
                    {
                        "name": pl.Series(random.integers(0, 40, each)).cast(pl.String) + "::op",
                        "category": pl.Series(["op" if host else "kernel"]).new_from_index(0, each),
                        "start_ns": start,
                        "duration_ns": (length * (0.99**depth)).astype(np.int64),
                        "lane": np.full(each, lane, dtype=np.uint32),
                    }
                )
            )
        lanes.append(
            {
                "lane": lane,
                "kind": "host" if host else "device",
                "process": "1",
                "thread": str(lane + 1),
                "device": None if host else 0,
                "stream": None if host else lane,
                "name": f"lane {lane}",
                "events": each,
                "busy_ns": 0,
            }
        )
    events = pl.concat(frames).sort("start_ns", -pl.col("duration_ns")).with_row_index("event")
    events = events.with_columns(nested_end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    missing = [
        pl.lit(None, dtype=t).alias(n)
        for n, t in SCHEMAS["events"].items()
        if n not in events.columns
    ]
    frames_by_name = {name: build_empty_frame(name) for name in SCHEMAS}
    frames_by_name["events"] = (
        events.with_columns(missing).select(list(SCHEMAS["events"])).cast(SCHEMAS["events"])
    )
    frames_by_name["lanes"] = pl.DataFrame(lanes, schema=SCHEMAS["lanes"])
    return Session((Trace(meta=replace(Meta(path="made"), rank=0), **frames_by_name),), "made")


def page_of(made: Session) -> str:
    """The page with nothing but the timeline."""
    rank = {
        "rank": 0,
        "window_ns": SPAN_NS,
        "event_count": made.traces[0].events.height,
        "devices": [],
        "steps": [],
    }
    return render_report_page(
        {"ranks": [rank], "name": "made", "answer": {"sentence": "A made trace.", "parts": []}},
        made,
    )


def rates(page: Page, seconds: float) -> str:
    """Frames per second and the 95th percentile of the time between two frames, by what is done."""
    page.wait_for_timeout(400)
    found = {mode: page.evaluate(MEASURE, [mode, seconds]) for mode in ("full", "pan", "zoom")}
    return ", ".join(
        f"{mode} {r['fps']:.0f}/s (95 % within {r['worst']:.0f} ms)" for mode, r in found.items()
    )


def main() -> None:
    """Print one line per number of events and device scale."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--events", type=int, nargs="+", default=[200_000])
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--keep", type=Path, help="keep the page here")
    options = parser.parse_args()
    browser_path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser_path is None:
        raise SystemExit("no Chromium on this machine")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        for count in options.events:
            made = session(count)
            began = time.perf_counter()
            text = page_of(made)
            took = time.perf_counter() - began
            path = options.keep or Path(folder) / "page.html"
            path.write_text(text, encoding="utf-8")
            shown = build(made, set(), [])
            print(
                f"{shown.shown:,} events: page {len(text) / 1e6:.2f} MB, made in {took:.2f} s, "
                f"{len(shown.payload) * 0.75 / max(shown.shown, 1):.1f} B/event packed"
            )
            for scale in options.scales:
                page = browser.new_page(
                    viewport={"width": 1440, "height": 1100}, device_scale_factor=scale
                )
                began = time.perf_counter()
                page.goto(path.resolve().as_uri())
                page.wait_for_selector("html[data-ready=yes]", state="attached")
                ready = time.perf_counter() - began
                print(f"  scale {scale}: opens in {ready:.2f} s")
                page.evaluate(
                    "document.getElementById('timeline').scrollIntoView({behavior: 'instant'})"
                )
                print(f"    in the page: {rates(page, options.seconds)}")
                page.evaluate("document.getElementById('timeline-view').timeline.enlarge()")
                print(f"    enlarged:    {rates(page, options.seconds)}")
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
