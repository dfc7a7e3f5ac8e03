"""A what-if as files, and a sweep as a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import polars as pl
import pytest

from support.pages import of_markdown
from traceloom.changes.whatif import Sweep
from traceloom.report.whatif import picture, render_before_after_page, render_markdown

HOSTILE = "<script>alert(1)</script>\x1b[31m|`"
DOCUMENT = {
    "name": HOSTILE,
    "sentence": "This would save 2 ms.",
    "before_ns": 10_000_000,
    "after_ns": 8_000_000,
    "traceloom": "0.0.0",
    "saved_ns": 2_000_000,
    "rescaled_saved_ns": 1_500_000,
    "changes": [{"change": f"kernels ~ {HOSTILE} * 0.5", "assumes": "half"}],
    "ranks": [{"rank": rank, "before_ns": 10, "after_ns": 8, "saved_ns": 2} for rank in (0, 1)],
    "path": [{"what": "kernel", "kind": HOSTILE, "before_ns": 10, "after_ns": 8}],
    "trusted": False,
    "upper_bound": False,
    "law": {"sentence": "The law holds.", "honest_error": 0.01},
}


def test_names_are_text_in_both_files() -> None:
    assert of_markdown(render_markdown(DOCUMENT)).tags["script"] == 0
    assert "<script>alert" not in render_before_after_page(DOCUMENT)
    for text in (render_markdown(DOCUMENT), render_before_after_page(DOCUMENT)):
        assert "\x1b" not in text
        assert "This would save 2 ms." in text
        assert "take it as a hint" in text


def test_ranks_are_named_in_markdown() -> None:
    assert "| rank 1 |" in render_markdown(DOCUMENT)


def test_rows_of_markdown_tables_have_as_many_cells_as_their_heads() -> None:
    rows = [
        line.replace("\\|", "")
        for line in render_markdown(DOCUMENT).splitlines()
        if line.startswith("|")
    ]
    assert {row.count("|") for row in rows} == {4, 5}


def test_bars_are_as_long_as_the_times() -> None:
    assert 'class="before" x="0" y="0" width="100.00"' in render_before_after_page(DOCUMENT)
    assert 'class="after" x="0" y="14" width="80.00"' in render_before_after_page(DOCUMENT)


def test_a_picture_of_a_sweep_falls_where_the_time_falls() -> None:
    table = pl.DataFrame({"factor": [1.0, 2.0, 4.0], "time_ns": [100, 60, 40]})
    root = ET.fromstring(picture(Sweep("network * {}", table)))
    dots = root.findall(".//{http://www.w3.org/2000/svg}circle")
    heights = [float(dot.attrib["cy"]) for dot in dots]
    assert heights == sorted(heights)
    assert len(set(heights)) == 3
    places = [float(dot.attrib["cx"]) for dot in dots]
    assert places[2] - places[1] == pytest.approx(2 * (places[1] - places[0]), abs=0.5)


def test_a_bound_is_told_as_one() -> None:
    text = render_markdown({**DOCUMENT, "upper_bound": True})
    assert "It is a bound." in text
    assert "take it as a hint" not in text
