"""A what-if in every view: what would be saved, by whom, on which path, and how far it can be trusted."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from copy import deepcopy
from functools import cache
from html import unescape
from typing import Any

import polars as pl
import pytest
from hypothesis import given, strategies as st

from support.figures import figure
from support.pages import Elements, islands, of_markdown, tables
from support.sessions import EVIL, made, training
from traceloom.changes.changes import parse
from traceloom.changes.whatif import Sweep, changed_graph, scenario_of, sweep, whatif
from traceloom.graph import Plan, law, link_session
from traceloom.graph.graph import Graph
from traceloom.report import whatif as report
from traceloom.report.before_after import build as before_after
from traceloom.report.exports.perfetto import write_graph
from traceloom.report.views.files import encode
from traceloom.report.views.markdown import format_code_span
from traceloom.report.whatif import picture, render_before_after_page as page, render_markdown
from traceloom.system import units
from traceloom.system.sanitize import sanitize

Document = dict[str, Any]
CHANGES = {
    "faster kernels": ["kernels * 0.5"],
    "slower kernels": ["kernels * 4"],
    "no waiting": ["syncs remove", "loading remove"],
    "no late rank": ["rank 3 delay remove"],
    "nothing": ["kernels * 1"],
}
every_change = pytest.mark.parametrize("name", CHANGES)


@cache
def graph() -> Graph:
    return link_session(made(training)[0])


@cache
def answered(name: str) -> tuple[Any, Document]:
    changes = [parse(text) for text in CHANGES[name]]
    plan = Plan(graph())
    kept = law(graph(), plan)
    answer = whatif(graph(), changes, plan=plan, kept=kept)
    return answer, report.build("a run", None, changes, answer, kept)


@every_change
def test_the_document_adds_up(name: str) -> None:
    answer, document = answered(name)
    assert document["saved_ns"] == document["before_ns"] - document["after_ns"]
    assert document["saved_fraction"] == pytest.approx(document["saved_ns"] / document["before_ns"])
    for row in document["ranks"]:
        assert row["saved_ns"] == row["before_ns"] - row["after_ns"]
    for side in ("before_ns", "after_ns"):
        assert sum(row[side] for row in document["path"]) == document[side]
        assert max(row[side] for row in document["ranks"]) <= document[side]
    assert [row["change"] for row in document["changes"]] == [
        str(parse(text)) for text in CHANGES[name]
    ]
    assert all(row["assumes"] for row in document["changes"])
    assert json.loads(encode(document)) == json.loads(json.dumps(document))
    assert answer.saved_ns == document["saved_ns"]


@pytest.mark.parametrize(
    ("name", "word"),
    [("faster kernels", "would save"), ("slower kernels", "would cost"), ("nothing", "as before")],
)
def test_the_sentence_says_which_way_it_goes(name: str, word: str) -> None:
    document = answered(name)[1]
    assert word in document["sentence"]
    assert (
        units.format_duration(document["before_ns"]) in document["sentence"] or word == "as before"
    )
    assert units.format_duration(document["after_ns"]) in document["sentence"]


@every_change
def test_before_after_and_saved_are_the_same_on_the_terminal_in_markdown_and_in_the_page(
    name: str,
) -> None:
    document = answered(name)[1]
    lines = [line.plain for line in report.render(document, 100)]
    rows = [line.split() for line in lines if re.match(r" rank \d  ", line)]
    head, *cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in render_markdown(document).splitlines()
        if "|" in line
    ]
    assert head == ["rank", "before", "after", "saved"]
    drawn = ranks_of(page(document), len(document["ranks"]))
    for number, row in enumerate(document["ranks"]):
        times = re.findall(r"-?[\d.\u202f]+ (?:ns|µs|ms|s)\b", " ".join(rows[number]))
        texts = [unescape(cell) for cell in cells[number + 1][1:]]
        for key, text, other in zip(
            ("before_ns", "after_ns", "saved_ns"), times, texts, strict=True
        ):
            assert figure(text).holds(row[key])
            assert text == other
        assert [drawn[number].get(key, 0) for key in ("before_ns", "after_ns", "saved_ns")] == [
            row[key] for key in ("before_ns", "after_ns", "saved_ns")
        ]


def ranks_of(shown: str, count: int) -> list[dict[str, Any]]:
    """The rows of the page's table that has one for each rank."""
    return next(rows for rows in tables(shown, by="key").values() if len(rows) == count)


def test_a_change_that_changes_nothing_moves_nothing() -> None:
    answer, document = answered("nothing")
    assert document["saved_ns"] == 0
    assert answer.times.size == 2 * graph().nodes.height


@every_change
def test_the_timeline_after_the_change_lasts_as_long_as_is_said(name: str) -> None:
    answer, document = answered(name)
    changed = changed_graph(
        graph(), scenario_of(graph(), [parse(text) for text in CHANGES[name]]), answer.times
    )
    handle = io.BytesIO()
    write_graph(changed, handle)
    slices = [event for event in json.loads(handle.getvalue())["traceEvents"] if event["ph"] == "X"]
    low = min(event["ts"] for event in slices)
    high = max(event["ts"] + event["dur"] for event in slices)
    assert low >= 0
    assert (high - low) * 1000 <= document["after_ns"] + 1
    assert len(slices) == graph().nodes.drop_nulls("lane").height


def test_the_page_says_the_sentence_and_holds_both_timelines() -> None:
    changes = [parse(text) for text in CHANGES["faster kernels"]]
    answer, document = answered("faster kernels")
    shown = page(document, before_after(graph(), scenario_of(graph(), changes), answer))
    found = Elements(shown)
    assert document["sentence"] in found.shown
    widths = [
        value
        for _, name, value in found.attributes
        if name == "width" and re.fullmatch(r"\d+\.\d\d", value or "")
    ]
    assert [float(width or 0) for width in widths[:2]] == [
        100.0,
        pytest.approx(100 * document["after_ns"] / document["before_ns"], abs=0.006),
    ]
    assert islands(shown)


def test_a_host_that_recording_made_slower_is_told_apart() -> None:
    document = deepcopy(answered("faster kernels")[1])
    assert "without the profiler" not in document["sentence"]
    answer = answered("faster kernels")[0]
    slower = type(answer)(
        **{**vars(answer), "host_ratio": 1.5, "rescaled_saved_ns": answer.saved_ns // 2}
    )
    said = report.describe_whatif(slower, 3)
    assert "of step 3" in said
    assert "1.50 × as long" in said
    assert units.format_duration(answer.saved_ns // 2) in said


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"what": "before", "kind": ""}, "before the path begins"),
        ({"what": "work", "kind": "kernel"}, "kernels"),
        ({"what": "work", "kind": "a later kind"}, "a later kind"),
        ({"what": "delay", "kind": "launch"}, "delay: from launch to start"),
        ({"what": "residual", "kind": "stream"}, "unexplained: between pieces of work of a stream"),
        ({"what": "residual", "kind": ""}, "residual"),
    ],
)
def test_parts_of_the_path_are_named_in_words(part: dict[str, str], words: str) -> None:
    assert report.describe_path_part(part) == words


def hostile() -> Document:
    document = deepcopy(answered("faster kernels")[1]) | {
        "name": EVIL,
        "sentence": f"It saves {EVIL}.",
    }
    document["changes"] = [{"change": f"kernels ~ {EVIL} * 0.5", "assumes": "half"}]
    document["path"][0] |= {"what": "work", "kind": EVIL}
    return document


def test_names_are_text_in_every_view() -> None:
    document = hostile()
    text, shown = render_markdown(document), page(document)
    for found in (of_markdown(text), Elements(shown)):
        assert found.tags["img"] == 0
        assert sanitize(EVIL) in found.shown
    lines = [line.plain for line in report.render(document, 80)]
    for line in (*lines, text, shown):
        assert not re.search("[\x1b\u202e\u2028]", line)


@pytest.mark.parametrize(
    "change",
    ["kernels ~ a|b * 0.5", "kernels ~ a<b> * 0.5", "kernels ~ `x` remove", "ops ~ *_* * 2"],
)
def test_a_change_reads_in_markdown_as_it_was_written(change: str) -> None:
    document = deepcopy(answered("faster kernels")[1])
    document["changes"] = [{"change": change, "assumes": "nothing_else *changes*"}]
    found = of_markdown(render_markdown(document))
    assert change in found.shown
    assert "nothing_else *changes*" in found.shown
    assert "em" not in found.tags


@given(st.text(min_size=1, max_size=60))
def test_a_code_span_outside_a_table_shows_the_name_itself(name: str) -> None:
    shown = of_markdown(f"before {format_code_span(name, 4_000, cell=False)} after").shown
    assert (
        shown.strip() == f"before {sanitize(name)} after"
        or not name.strip()
        or "  " in name
        or name != name.strip()
    )


# -- sweeps -------------------------------------------------------------------------------------------------------


def test_a_sweep_says_the_same_as_single_changes() -> None:
    rows = sweep(graph(), "kernels * {}", [0.25, 0.5, 1, 2]).table
    assert rows["factor"].to_list() == [0.25, 0.5, 1, 2]
    times = dict(zip(rows["factor"].to_list(), rows["time_ns"].to_list(), strict=True))
    assert times[1] == answered("nothing")[1]["before_ns"]
    assert times[0.5] == answered("faster kernels")[1]["after_ns"]
    assert rows["time_ns"].is_sorted()
    assert (rows["saved_ns"] + rows["time_ns"]).n_unique() == 1


@given(
    st.lists(
        st.tuples(st.floats(0.01, 64), st.integers(0, 10**12)),
        max_size=12,
        unique_by=lambda row: row[0],
    )
)
def test_the_picture_of_a_sweep_has_a_point_for_every_factor_where_its_time_is(
    rows: list[tuple[float, int]],
) -> None:
    table = pl.DataFrame(rows, schema={"factor": pl.Float64, "time_ns": pl.Int64}, orient="row")
    root = ET.fromstring(picture(Sweep(f"kernels ~ {sanitize(EVIL)} * {{}}", table)))
    space = "{http://www.w3.org/2000/svg}"
    dots = root.findall(f".//{space}circle")
    assert len(dots) == len(rows)
    most = max((time for _, time in rows), default=1) or 1
    for dot, (factor, time) in zip(dots, sorted(rows), strict=True):
        assert 0 <= float(dot.attrib["cx"]) <= 640
        assert float(dot.attrib["cy"]) == pytest.approx(12 + 208 * (1 - time / most), abs=0.06)
        assert dot.findtext(f"{space}title") == f"{factor:g}: {units.format_duration(time)}"
    assert sanitize(EVIL) in (root.findtext(f"{space}title") or "")
