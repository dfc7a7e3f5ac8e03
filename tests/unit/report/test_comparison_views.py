"""A comparison and a verdict: their documents add up, and every view says the same of them."""

from __future__ import annotations

import itertools
import json
import re
from copy import deepcopy
from functools import cache
from html import unescape
from typing import Any

import pytest
from hypothesis import given, strategies as st

from support.figures import figure
from support.pages import Elements, islands, of_markdown, tables
from support.pairs import compared
from support.sessions import EVIL, session_of
from traceloom.analyze import compare
from traceloom.report import (
    comparison,
    comparison as page,
    comparison as terminal,
    verdict as verdict_markdown,
    verdict as verdict_page,
    verdict as verdict_tables,
    verdict as verdict_terminal,
)
from traceloom.report.comparison import build_tables as declared
from traceloom.report.views import markdown
from traceloom.report.views.files import encode
from traceloom.report.views.terminal_table import draw_signed_bar
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session

Document = dict[str, Any]
NOTHING_DIFFERS = {"difference_ns": 0, "change": 0.0}


def steps_of(
    *kernels: tuple[str, float], rest: float = 50, rank: int = 0, at: float = 0, count: int = 3
) -> TraceBuilder:
    """Steps that are as long as their kernels, one after the other, and `rest` microseconds on the host before them."""
    made = TraceBuilder(rank=rank, world_size=2)
    length = rest + sum(us for _, us in kernels) + 10
    for step in range(count):
        made.step(step, at, length)
        start = at + rest
        for number, (name, us) in enumerate(kernels):
            made.op(f"aten::{name}", at + 10 * number, 8).launch(
                "cudaLaunchKernel", at + 10 * number + 1, 5, correlation=100 * step + number
            )
            made.kernel(name, start, us, correlation=100 * step + number)
            start += us
        at += length
    return made


@cache
def diff(base: tuple[tuple[str, float], ...], new: tuple[tuple[str, float], ...]) -> Document:
    sides = [
        session_of(name, steps_of(*kernels)) for name, kernels in (("base", base), ("new", new))
    ]
    return comparison.build(compare(*sides), *sides)


MIXED = diff((("mm", 100), ("gone", 30), ("add", 10)), (("mm", 140), ("come", 20), ("add", 5)))


@given(
    base=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    new=st.lists(st.integers(1, 200), min_size=1, max_size=4),
)
def test_differences_add_up_and_turn_around_with_the_sides(base: list[int], new: list[int]) -> None:
    sides = [
        session_of(
            name, steps_of(*((f"k{number}", us) for number, us in enumerate(kernels)), count=2)
        )
        for name, kernels in (("base", base), ("new", new))
    ]
    there = comparison.build(compare(*sides), *sides)
    back = comparison.build(compare(*reversed(sides)), *reversed(sides))
    lengths = [60 + sum(kernels) for kernels in (base, new)]
    assert (there["base_ns"], there["new_ns"]) == (1000 * lengths[0], 1000 * lengths[1])
    for document in (there, back):
        for key in ("base_ns", "new_ns", "difference_ns"):
            assert sum(row[key] for row in document["breakdown"]) == document[key]
        assert sum(row["of_step"] for row in document["breakdown"]) == pytest.approx(
            document["change"]
        )
        for row in (*document["breakdown"], *document["kernels"]):
            assert row["difference_ns"] == row["new_ns"] - row["base_ns"]
    assert there["difference_ns"] == -back["difference_ns"]
    parts = [
        {row["part"]: row["difference_ns"] for row in document["breakdown"]}
        for document in (there, back)
    ]
    assert parts[0] == {part: -ns for part, ns in parts[1].items()}
    opposite = {"slower": "faster", "faster": "slower", "added": "removed", "removed": "added"}
    statuses = [sorted(row["status"] for row in document["kernels"]) for document in (there, back)]
    assert statuses[0] == sorted(opposite.get(status, status) for status in statuses[1])


def test_a_run_against_itself_shows_nothing_that_differs() -> None:
    same = diff((("mm", 100),), (("mm", 100),))
    assert {key: same[key] for key in NOTHING_DIFFERS} == NOTHING_DIFFERS
    assert [table.key for table in declared(same)] == ["diff-parts"]
    assert all(row["same"] for row in same["conditions"])
    text = markdown.render_comparison_markdown(same)
    assert "| +" not in text
    assert "Kernels" not in text


def test_names_and_times_of_day_are_no_difference() -> None:
    one = session_of("one", steps_of(("mm", 100)))
    later = session_of("later", steps_of(("mm", 100), at=7_000))
    moved = comparison.build(compare(one, later), one, later)
    assert {key: moved[key] for key in NOTHING_DIFFERS} == NOTHING_DIFFERS
    assert moved["comparable"]


def test_ranks_in_another_order_are_the_same_run() -> None:
    ranks = [steps_of(("mm", 100 + 20 * rank), rank=rank).build() for rank in (0, 1)]
    base = Session(tuple(ranks), "base")
    turned = Session(tuple(reversed(ranks)), "turned")
    document = comparison.build(compare(base, turned), base, turned)
    assert {key: document[key] for key in NOTHING_DIFFERS} == NOTHING_DIFFERS


def test_every_table_says_how_many_of_each_kind_there_are() -> None:
    by_key = {table.key: table for table in declared(MIXED)}
    kernels = by_key["diff-kernels"]
    statuses = [row["status"] for row in kernels.rows]
    assert kernels.note.startswith(f"Of {len(MIXED['kernels'])}: ")
    counted = re.findall(r"(\d+) (\w+)", kernels.note.partition(": ")[2].partition(".")[0])
    assert {word: int(count) for count, word in counted} == {
        word: statuses.count(word) for word in set(statuses)
    }
    assert "same" not in statuses


def test_the_step_stands_last_and_parts_by_the_size_of_their_difference() -> None:
    parts = next(table for table in declared(MIXED) if table.key == "diff-parts")
    assert parts.rows[-1]["name"] == "the step"
    sizes = [abs(row["difference_ns"]) for row in parts.rows[:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(row["difference_ns"] for row in parts.rows[:-1]) == parts.rows[-1]["difference_ns"]


def test_the_page_has_every_row_as_it_is() -> None:
    shown = tables(page.render(MIXED), by="key")
    for table in declared(MIXED):
        rows = shown[table.key]
        assert len(rows) == len(table.rows)
        for column in table.columns:
            if column.key in rows[0] and column.numeric:
                assert [row[column.key] for row in rows] == [
                    row.get(column.key) for row in table.rows
                ]
    assert [row["path"] for row in shown["diff-inputs"]]


def test_boxes_of_the_call_tree_are_as_wide_as_what_they_hold() -> None:
    (tree,) = [island for island in islands(page.render(MIXED)) if "sides" in island]
    nodes = tree["nodes"]
    assert len(nodes) == len(tree["sides"])
    assert nodes[0][0] == -1
    for at, (parent, _, _, host, device) in enumerate(nodes):
        assert parent < at
        inside = [node for node in nodes if node[0] == at]
        assert sum(node[3] for node in inside) <= host
        assert sum(node[4] or 0 for node in inside) <= (device or 0)
    whole = tree["sides"][0]
    assert tuple(whole["device"]) == (
        MIXED["tree"][0]["base_duration_ns"],
        MIXED["tree"][0]["new_duration_ns"],
    )
    assert nodes[0][4] >= max(whole["device"])


def cells_of(text: str, title: str) -> list[list[str]]:
    """The rows of a Markdown table, its heading first."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"| {title}"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    split = [[unescape(cell.strip()) for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    return [split[0], *split[2:]]


def test_markdown_says_both_sides_the_difference_and_both_shares() -> None:
    head, *rows = cells_of(markdown.render_comparison_markdown(MIXED), "Where the difference lies")
    assert head[1:] == ["Base", "New", "Difference", "Change", "Of step"]
    parts = next(table for table in declared(MIXED) if table.key == "diff-parts").rows
    assert len(rows) == len(parts)
    for texts, row in zip(rows, parts, strict=True):
        keys = ("base_ns", "new_ns", "difference_ns", "change", "of_step")
        for key, text in zip(keys, texts[1:], strict=True):
            assert text == "–" if row[key] is None else figure(text).holds(row[key]), (
                key,
                text,
                row,
            )


def test_markdown_and_terminal_count_the_rows_that_they_leave_out() -> None:
    many = diff(
        tuple((f"k{number}", 10) for number in range(14)),
        tuple((f"k{number}", 12 + number) for number in range(14)),
    )
    rows = [row for row in many["kernels"] if row["status"] != "same"]
    assert len(rows) == 14
    assert "| … and 4 more |" in markdown.render_comparison_markdown(many)
    text = "\n".join(line.plain for line in terminal.render_terminal(many, 3, 100))
    assert "3 of 14" in text
    assert "3 of" not in text.partition("Kernels, copies and fills")[0], (
        "parts of the step are never left out"
    )


@pytest.mark.parametrize("width", [60, 100])
def test_the_terminal_begins_with_the_names_and_the_sentence(width: int) -> None:
    lines = [line.plain for line in terminal.render_terminal(MIXED, 10, width)]
    assert [line.split() for line in lines[:2]] == [["base", "base"], ["new", "new"]]
    assert " ".join(" ".join(lines[2:]).split()).startswith(" ".join(MIXED["sentence"].split()))


def test_json_comes_back_as_it_is() -> None:
    raw = encode(MIXED)
    assert encode(json.loads(raw)) == raw
    assert json.loads(raw)["format"] == "traceloom-diff"


def test_names_of_strangers_are_text_in_a_comparison() -> None:
    document = compared(EVIL)[0]
    text, shown = markdown.render_comparison_markdown(document), page.render(document)
    for found in (of_markdown(text), Elements(shown)):
        assert not found.tags.keys() & {"img", "iframe", "object"}
        assert sanitize(EVIL)[:30] in found.shown
    assert not re.search("[\x1b\u202e\u2028]", text + shown)


@given(
    difference=st.integers(-(10**12), 10**12),
    others=st.integers(0, 10**12),
    width=st.integers(3, 60),
)
def test_a_bar_from_the_middle_is_on_its_side_and_no_longer_than_the_longest(
    difference: int, others: int, width: int
) -> None:
    largest = max(abs(difference), others)
    bar = draw_signed_bar(difference, largest, width).plain
    half = (width - 1) // 2
    assert len(bar) == 2 * half + 1
    left, line, right = bar[:half], bar[half], bar[half + 1 :]
    assert line == "│"
    assert bool(left.strip()) <= (difference < 0)
    assert bool(right.strip()) <= (difference > 0)
    if half and difference:
        assert (left if difference < 0 else right).strip(), (
            "a difference is seen however small it is"
        )
        full = (left + right).count("█")
        assert abs(full - half * abs(difference) / max(largest, 1)) <= 0.5


# -- verdicts -----------------------------------------------------------------------------------------------------


def checked(**changes: Any) -> Document:
    """A verdict with one check, changed as a test needs it."""
    made = deepcopy(compared("a run")[1])
    made["checks"] = [made["checks"][0] | changes]
    return made


@pytest.mark.parametrize(
    ("amount", "measure", "relative", "text"),
    [
        (0.0512, "time", True, "+5.12 %"),
        (-0.0512, "time", True, "-5.12 %"),
        (0.0, "time", True, "+0.00 %"),
        (2_000_000.0, "time", False, "+2.00 ms"),
        (-2_000_000.0, "time", False, "-2.00 ms"),
        (1e8, "bytes", False, "+100 MB"),
        (-3.0, "count", False, "-3"),
        (None, "time", True, "–"),
    ],
)
def test_a_change_has_its_sign_and_the_unit_of_its_measure(
    amount: float | None, measure: str, relative: bool, text: str
) -> None:
    assert verdict_tables.format_change(amount, {"relative": relative, "measure": measure}) == text


@pytest.mark.parametrize(
    ("amount", "measure", "text"),
    [
        (None, "time", "–"),
        (1_234_567.0, "time", "1.23 ms"),
        (2e9, "bytes", "2.00 GB"),
        (3.0, "count", "3"),
        (2.5, "count", "2.50"),
    ],
)
def test_an_amount_has_the_unit_of_its_measure(
    amount: float | None, measure: str, text: str
) -> None:
    assert verdict_tables.format_amount(amount, measure) == text


def test_reasons_say_what_a_reader_must_know_about_the_samples() -> None:
    document = compared("a run")[1]
    told = " ".join(verdict_tables.list_reasons(document))
    assert "Within one run only" in told
    assert "not comparable: other device" in told
    assert "step_time is of recorded steps" in told
    assert "how many runs show a change of 5.0 % is not known" in told
    pairs = checked(sample="pairs of runs", reason="", source="wall times")
    pairs["power"] = [{"condition": "x", "effect": 0.05, "runs": 4, "scatter": 0.01, "reason": ""}]
    told = " ".join(verdict_tables.list_reasons(pairs))
    assert "Runs of both sides took turns" in told
    assert "Within one run" not in told
    assert (
        "a change of 5.0 % is found eight times of ten with 4 runs a side (a run scatters by 1.0 %)"
        in told
    )


def test_an_interval_stands_in_every_view_where_it_is_known() -> None:
    known = checked(verdict="fail", change=0.1, low=0.08, high=0.12, effect_size=3.456, reason="")
    row = next(iter(verdict_tables.build_tables(known))).rows[0]
    assert row["interval"] == "+8.00 % to +12.00 %"
    assert row["effect"] == "+3.46"
    for shown in (
        "\n".join(line.plain for line in verdict_terminal.render(known, 10, 140)),
        verdict_markdown.render_verdict_markdown(known),
        json.dumps(islands(verdict_page.render_verdict_page(known)), ensure_ascii=False),
    ):
        assert "+8.00 % to +12.00 %" in shown
        assert "+10.00 %" in shown
    unknown = next(iter(verdict_tables.build_tables(checked()))).rows[0]
    assert (unknown["interval"], unknown["effect"]) == ("–", "–")


@pytest.mark.parametrize(
    ("verdict", "sign"), [("pass", "✅"), ("fail", "❌"), ("inconclusive", "❔")]
)
def test_the_verdict_is_the_first_thing_that_every_view_says(verdict: str, sign: str) -> None:
    document = deepcopy(compared("a run")[1]) | {"verdict": verdict, "sentence": f"It is {verdict}"}
    assert (
        verdict_markdown.render_verdict_markdown(document).splitlines()[2]
        == f"{sign} **It is {verdict}.**"
    )
    lines = [line.plain for line in verdict_terminal.render(document, 10, 100)]
    assert lines[3] == f" It is {verdict}."
    assert f"<h1>It is {verdict}.</h1>" in verdict_page.render_verdict_page(document)


def test_runs_of_both_sides_stand_in_the_page_with_their_steps() -> None:
    document = compared("a run")[1]
    rows = tables(verdict_page.render_verdict_page(document), by="key")["verdict-runs"]
    assert [(row["side"], row["name"], row["recorded_steps"]) for row in rows] == [
        ("base", "a run", 6),
        ("new", "a run", 6),
    ]
    assert "undisturbed_steps" not in rows[0], "unknown of all runs, so it is only named"


def test_several_runs_of_a_side_are_counted_beside_its_name() -> None:
    document = deepcopy(compared("a run")[1])
    document["new"]["runs"] *= 3
    lines = [line.plain for line in verdict_terminal.render(document, 10, 100)]
    assert lines[:2] == ["base a run base", "new  a run new (3 runs)"]


def test_a_comment_leaves_operators_to_the_page() -> None:
    document = compared("a run")[1]
    text, shown = (
        verdict_markdown.render_verdict_markdown(document),
        tables(verdict_page.render_verdict_page(document)),
    )
    assert "Operators by" not in text
    assert {
        "diff-operators",
        "verdict-checks",
        "verdict-conditions",
        "verdict-causes",
        "diff-parts",
    } <= set(shown)
    assert "diff-conditions" not in shown, "the verdict has them already"


def test_names_of_strangers_are_text_in_a_verdict() -> None:
    document = compared(EVIL)[1]
    text, shown = (
        verdict_markdown.render_verdict_markdown(document),
        verdict_page.render_verdict_page(document),
    )
    for found in (of_markdown(text), Elements(shown)):
        assert not found.tags.keys() & {"img", "iframe", "object"}
        assert sanitize(EVIL)[:30] in found.shown
    assert not re.search("[\x1b\u202e\u2028]", text + shown)


@given(st.floats(-20, 20, allow_nan=False))
def test_a_change_is_written_with_its_sign_and_read_back(fraction: float) -> None:
    text = units.format_change(fraction)
    assert (text[0] in "+-") == (fraction != 0)
    if not 0.999 < abs(fraction) < 1:  # which is written as 99.9 %, so that 100 % is exact
        assert figure(text).holds(fraction), text
