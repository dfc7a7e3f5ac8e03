"""Runs of every sort (no device, no steps, no events, many ranks, names of strangers) hold their laws in every view."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from support.pages import Elements, of_markdown, words
from support.reports import check_perfetto, check_report, check_sums_of_sections
from support.sessions import (
    EVIL,
    SORTS,
    empty,
    enormous,
    hostile,
    made,
    page,
    session_of,
    several_devices,
    with_memory,
)
from traceloom.report import SORT_KEYS, ReportOptions, build
from traceloom.report.exports import speedscope
from traceloom.report.exports.perfetto import write as write_perfetto
from traceloom.report.sections import CORE, CORE_KEYS, EXTRA_KEYS, FINDINGS, SECTION_NAMES
from traceloom.report.views import terminal
from traceloom.report.views.files import encode
from traceloom.report.views.markdown import DisplayedReport, render as markdown
from traceloom.report.views.page import render_report_page as html
from traceloom.report.views.terminal import render
from traceloom.system.sanitize import sanitize
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

Sort = Callable[[], Session]
STEERS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
)
LOOSE = re.compile(r"<(?![a-zA-Z/!])")
SCRIPTS = re.compile(r"<(script|style).*?</\1>", re.DOTALL)
FULL = ReportOptions(only=SECTION_NAMES, top=1_000)
TABLES = (
    "kernels",
    "operators",
    "modules",
    "communication",
    "copies",
    "launches",
    "kinds",
    "threads",
    "per_step",
)
every_sort = pytest.mark.parametrize("sort", SORTS, ids=lambda sort: sort.__name__)


def lines(sort: Sort, options: ReportOptions, width: int) -> list[Any]:
    return list(render(made(sort)[1], options, width))


def written(write: Any, *arguments: Any) -> bytes:
    handle = io.BytesIO()
    write(*arguments, handle)
    return handle.getvalue()


@pytest.mark.sampled(3)
@every_sort
def test_the_document_is_as_its_schema_says_adds_up_and_explains_every_null(sort: Sort) -> None:
    document = json.loads(encode(made(sort)[1]))
    check_report(document)
    check_sums_of_sections(document)
    assert len({entry["path"] for entry in document["absent"]}) == len(document["absent"])
    assert all(entry["reason"].strip() for entry in document["absent"])


@pytest.mark.sampled(5)
@every_sort
@pytest.mark.parametrize(
    "options", [ReportOptions(), ReportOptions(full=True), FULL], ids=["brief", "full", "only"]
)
def test_no_line_is_wider_than_the_terminal_or_steers_it(
    sort: Sort, options: ReportOptions
) -> None:
    for width in (60, 80, 99, 140) if options is not FULL else (60, 100):
        for line in lines(sort, options, width):
            assert line.cell_len <= width, (width, line.plain)
            assert "\n" not in line.plain
            assert not STEERS.search(line.plain), line.plain


@every_sort
def test_the_brief_report_fits_a_screen_and_begins_with_the_answer(sort: Sort) -> None:
    document = made(sort)[1]
    shown = [line.plain for line in lines(sort, ReportOptions(), 80)]
    assert len(shown) <= 30
    joined = " ".join(" ".join(shown[2:]).split())
    assert joined.startswith(" ".join(sanitize(document["answer"]["sentence"]).split()))


@every_sort
def test_a_section_that_is_asked_for_shows_something_or_says_why_not(sort: Sort) -> None:
    document = made(sort)[1]
    for key in (*CORE_KEYS, *EXTRA_KEYS):
        shown = [line.plain for line in render(document, ReportOptions(only=(key,)), 80)]
        body = " ".join(shown[4:])
        assert len(body.strip()) > 20, key
        if "Nothing to show" in body:
            assert re.search(r"Nothing to show: \S.*\S\.", body), key
            assert "Nothing to show: not recorded" not in body, key


@pytest.mark.sampled(5)
@every_sort
def test_every_order_of_tables_shows_the_same_rows(sort: Sort) -> None:
    def rows(key: str | None) -> Counter[str]:
        return Counter(
            line.plain.strip()
            for line in lines(sort, ReportOptions(only=TABLES, top=1_000, sort=key), 140)
        )

    whole = rows(None)
    for key in SORT_KEYS:
        assert rows(key) == whole, key


@every_sort
def test_fewer_rows_are_rows_of_the_longer_table_and_the_rest_is_counted(sort: Sort) -> None:
    document = made(sort)[1]
    for key in ("kernels", "operators"):
        count = len(document[key])
        shown = [line.plain for line in render(document, ReportOptions(only=(key,), top=1), 120)]
        note = [line for line in shown if re.search(r"\b1 of \d", line)]
        assert bool(note) == (count > 1)
        assert all(f"1 of {count}" in line for line in note)


@cache
def elements(sort: Sort) -> Elements:
    return Elements(page(sort))


@every_sort
def test_the_page_is_well_formed_and_holds_no_element_of_a_stranger(sort: Sort) -> None:
    found = elements(sort)
    assert found.open in ([], ["html"], ["body", "html"][::-1])
    assert found.tags["img"] == found.tags["iframe"] == found.tags["object"] == 0
    assert found.tags["script"] - page(sort).count('type="application/json"') == 2 + page(
        sort
    ).count('type="text/plain"')
    assert not [name for _, name, _ in found.attributes if name.startswith("on") or name == "style"]
    assert not STEERS.search(words(page(sort)).replace("\t", ""))
    assert not LOOSE.search(SCRIPTS.sub("", page(sort))), (
        "a sign that begins no element is spelled as an entity"
    )
    ids = Counter(value for _, name, value in found.attributes if name == "id")
    assert [name for name, count in ids.items() if count > 1] == []


@every_sort
def test_pictures_have_sizes_that_are_numbers_and_lie_in_their_frame(sort: Sort) -> None:
    for _, name, value in elements(sort).attributes:
        if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height"):
            assert re.fullmatch(r"-?\d+(\.\d+)?%?", value or ""), (name, value)
        if name in ("d", "points", "transform", "viewbox"):
            assert not re.search("nan|inf|None|e[+-]", value or "", re.IGNORECASE), (name, value)
        if name in ("width", "height", "r"):
            assert float((value or "").rstrip("%")) >= 0, (name, value)


@every_sort
def test_markdown_is_at_most_sixty_lines_of_text_without_markup_of_strangers(sort: Sort) -> None:
    text = markdown(made(sort)[1], ReportOptions())
    assert text.count("\n") <= 60
    assert text.endswith("</sub>\n")
    found = of_markdown(text)
    assert set(found.tags) <= {
        "h3",
        "p",
        "strong",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "code",
        "ul",
        "li",
        "sub",
    }
    assert found.tags["sub"] == 1
    assert not STEERS.search(text)


@every_sort
def test_the_sentence_of_the_answer_is_the_same_in_every_view(sort: Sort) -> None:
    document = made(sort)[1]
    sentence = sanitize(document["answer"]["sentence"])
    assert sentence in elements(sort).shown.replace("\u202f%", " %")
    assert sentence in of_markdown(markdown(document, ReportOptions())).shown
    assert sentence in Elements(DisplayedReport(document, ReportOptions())._repr_html_()).shown


@every_sort
def test_every_event_stands_in_the_trace_for_perfetto_exactly_once(sort: Sort) -> None:
    session, document = made(sort)
    raw = written(
        lambda handle: write_perfetto(
            session, int(document["epoch_ns"]), handle, document["critical_path"]
        )
    )
    check_perfetto(raw, document)
    assert not STEERS.search(raw.decode("utf-8").replace("\n", ""))


@every_sort
def test_profiles_hold_the_time_of_all_threads_whatever_their_names(sort: Sort) -> None:
    session = made(sort)[0]
    text = json.loads(written(speedscope.write, session))
    assert text["name"] == session.name
    frames = text["shared"]["frames"]
    for profile in text["profiles"]:
        assert profile["startValue"] <= profile["endValue"]
        if profile["type"] == "sampled":
            assert sum(profile["weights"]) == profile["endValue"]
            assert all(0 <= frame < len(frames) for stack in profile["samples"] for frame in stack)
        else:
            opened = Counter(event["type"] for event in profile["events"])
            assert opened["O"] == opened["C"]
            times = [event["at"] for event in profile["events"]]
            assert times == sorted(times)
    gpu = sum(trace.gpu_work()["duration_ns"].sum() for trace in session.traces)
    sampled = sum(
        profile["endValue"] for profile in text["profiles"] if profile["type"] == "sampled"
    )
    assert sampled == gpu


@every_sort
def test_json_is_one_line_of_utf8_that_says_the_same_again(sort: Sort) -> None:
    raw = encode(made(sort)[1])
    assert raw.endswith(b"\n")
    assert raw.count(b"\n") == 1
    assert encode(json.loads(raw.decode("utf-8"))) == raw


def test_two_reports_of_one_run_are_equal_bytes() -> None:
    for sort in (with_memory, hostile):
        session, document = made(sort)
        assert encode(build(session)) == encode(document)


def test_names_of_strangers_are_spelled_in_the_page_and_on_the_terminal() -> None:
    shown = words(page(hostile))
    assert sanitize(EVIL) in Elements(page(hostile)).shown
    assert "<img" not in page(hostile)
    assert sanitize(EVIL).replace('"', '\\"').replace("\\x", "\\\\x")[:40] in shown
    text = "\n".join(line.plain for line in lines(hostile, FULL, 140))
    assert r"\x1b[31m" in text


def test_the_notebook_shows_names_as_text_and_bars_that_fill_their_row() -> None:
    document = made(several_devices)[1]
    found = Elements(DisplayedReport(document, ReportOptions(top=2))._repr_html_())
    widths = [
        float(value or 0)
        for tag, name, value in found.attributes
        if tag == "rect" and name == "width"
    ]
    count = len(document["answer"]["parts"])
    assert sum(widths[:count]) == pytest.approx(640, abs=1)
    assert found.tags["svg"] == 3, "the bar, the steps and the largest kernels"
    assert len(widths) > count
    for finding in document["findings"][:2]:
        assert sanitize(finding["title"]) in found.shown
    rows = found.tags["tr"] - 2  # two tables with a heading each
    assert rows == 4
    evil = Elements(DisplayedReport(made(hostile)[1], ReportOptions())._repr_html_())
    assert evil.tags["img"] == evil.tags["script"] == 0
    assert not STEERS.search(evil.shown)


@pytest.mark.parametrize("columns", [20, 40, 59, 60, 100, 200])
def test_a_report_at_a_prompt_says_that_a_narrow_terminal_is_too_narrow(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = repr(DisplayedReport(made(several_devices)[1], ReportOptions())).splitlines()
    assert ("This needs 60" in " ".join(shown)) == (columns < 60)
    assert max(map(len, shown)) <= max(60, min(columns, 140))


def test_letters_that_the_terminal_lacks_become_question_marks_of_the_same_width() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    terminal.show(made(hostile)[1], FULL, stream)
    stream.flush()
    shown = stream.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "?" in shown
    assert max(map(len, shown.splitlines())) <= 140


def test_an_empty_run_says_so_in_every_view() -> None:
    session, document = made(empty)
    for text in (
        "\n".join(line.plain for line in lines(empty, ReportOptions(), 80)),
        markdown(document, ReportOptions()),
        Elements(page(empty)).shown,
    ):
        assert "the traces hold no timed events" in text
    assert document["answer"]["whole_ns"] == 0
    assert session.traces[0].events.height == 0


def test_hours_and_exabytes_are_written_with_the_largest_unit() -> None:
    document = made(enormous)[1]
    assert document["answer"]["step_ns"] == 3_600_000_000_000
    text = "\n".join(line.plain for line in lines(enormous, FULL, 140))
    assert "3\u202f600 s" in text
    assert "EB" not in text
    assert document["copies"]["kinds"][0]["bytes"] == 3 * 2**61
    assert "6\u202f917\u202f529 TB" in text


def test_parts_that_are_left_out_say_so_and_only_these() -> None:
    document = build(made(several_devices)[0], ReportOptions(only=(CORE, FINDINGS, "copies")))
    omitted = {
        entry["path"] for entry in document["absent"] if entry["reason"].startswith("not asked for")
    }
    assert omitted == set(EXTRA_KEYS) - {"copies"}
    whole = made(several_devices)[1]
    same = [key for key in document if key not in omitted and key != "absent"]
    assert {key: document[key] for key in same} == {key: whole[key] for key in same}


def test_a_name_in_letters_of_two_cells_keeps_to_the_width() -> None:
    wide = "名前" * 40
    made_up = TraceBuilder(device_name=wide, host=wide)
    for step in range(3):
        made_up.step(step, 1000 * step, 1000).op(wide, 1000 * step + 5, 500)
        made_up.launch("cudaLaunchKernel", 1000 * step + 10, 5, correlation=step + 1)
        made_up.kernel(wide, 1000 * step + 20, 300, correlation=step + 1)
    document = build(session_of(wide, made_up))
    for width in (60, 80, 100, 140):
        for options in (ReportOptions(), ReportOptions(full=True), FULL):
            assert all(line.cell_len <= width for line in render(document, options, width))


def test_parts_that_are_almost_nothing_are_text_in_every_view() -> None:
    made_up = TraceBuilder().step(0, 0, 10_000).op("aten::mm", 5, 9_000)
    made_up.launch("cudaLaunchKernel", 10, 5, correlation=1).kernel(
        "gemm", 20, 9_900, correlation=1
    )
    made_up.launch("cudaMemcpyAsync", 20, 5, correlation=2)
    made_up.copy("Memcpy HtoD (Pageable -> Device)", 9_930, 1, bytes=8, correlation=2)
    session = session_of("almost nothing", made_up)
    document = build(session)
    shown = html(document, session)
    notebook = DisplayedReport(document, ReportOptions())._repr_html_()
    for text in (
        SCRIPTS.sub("", shown),
        notebook,
        markdown(document, ReportOptions()).replace("<sub>", ""),
    ):
        assert not LOOSE.search(text)
        assert "&lt;0.1" in text
    assert "<0.1 %" in Elements(notebook).shown


@every_sort
def test_what_is_unknown_is_never_called_by_a_word_of_the_program(sort: Sort) -> None:
    document = made(sort)[1]
    for text in (
        "\n".join(line.plain for line in lines(sort, FULL, 140)),
        markdown(document, ReportOptions()),
        elements(sort).shown.replace("None of the known", "").replace("none of", ""),
        DisplayedReport(document, ReportOptions())._repr_html_(),
    ):
        found = re.search(r".{0,40}\b(None|nan|null|inf)\b.{0,40}", text)
        assert found is None, found and found[0]
