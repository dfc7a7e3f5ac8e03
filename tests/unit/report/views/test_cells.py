"""Tables as the page carries them: each text once, names first, columns that say nothing only named."""

from __future__ import annotations

from typing import Any

from support.pages import tables
from traceloom.report.document import Bar, Col
from traceloom.report.figure import escape_html
from traceloom.report.views.page_table import pack_column, render_html_table


def drawn(columns: list[Col], rows: list[dict[str, Any]], **reasons: str) -> str:
    return render_html_table("t", columns, rows, reasons, "Made")


def test_numbers_are_exact_and_each_text_stands_once() -> None:
    assert pack_column(Col("t", "T", "time"), [1_234_567, None], "not told") == {
        "key": "t",
        "title": "T",
        "kind": "time",
        "why": "not told",
        "values": [1_234_567, None],
    }
    column = pack_column(Col("s", "S"), ["a", "b", None, "a"], "")
    assert (column["texts"], column["at"]) == (["a", "b"], [0, 1, -1, 0])


def test_a_long_name_is_cut_and_whole() -> None:
    name = "void " + "kernel_" * 20 + "<float>"
    shown, whole = pack_column(Col("n", "N", "name"), [name], "")["texts"][0]
    assert len(shown) <= 64
    assert whole == name


def test_a_bar_has_its_parts_that_take_time() -> None:
    bar = Bar([("compute", "compute", 3), ("idle", "idle", 0)], 4, 8)
    assert pack_column(Col("b", "B", "bar"), [bar], "")["values"] == [
        [4, 8, [["compute", "compute", 3]]]
    ]


def test_the_name_comes_first() -> None:
    page = drawn(
        [Col("rank", "Rank", "count"), Col("name", "Name", "name")], [{"rank": 0, "name": "mm"}]
    )
    assert [list(row) for row in tables(page)["t"]] == [["Name", "Rank"]]


def test_columns_of_zeros_and_unknowns_are_named_not_shown() -> None:
    columns = [
        Col("name", "Name"),
        Col("rank", "Rank", "count"),
        Col("a", "A", "time"),
        Col("b", "B", "bytes"),
    ]
    page = drawn(
        columns,
        [{"name": "x", "rank": 0, "a": 0}, {"name": "y", "rank": 0, "a": 0}],
        b="nobody <wrote> it",
    )
    assert [list(row) for row in tables(page)["t"]] == [["Name", "Rank"]] * 2  # rank 0 is a rank
    assert "Not shown: A: 0 in all rows; B (nobody &lt;wrote&gt; it): unknown." in page


def test_no_more_rows_than_asked_for() -> None:
    page = render_html_table(
        "t", [Col("a", "A", "count")], [{"a": k + 1} for k in range(9)], {}, "Made", max_rows=4
    )
    assert len(tables(page)["t"]) == 4
    assert "The first 4 of 9 rows" in page


def test_texts_are_escaped_and_control_characters_spelled_out() -> None:
    assert escape_html("<b>&\"'\x1b\u202e") == "&lt;b&gt;&amp;&quot;&#x27;\\x1b\\u202e"
