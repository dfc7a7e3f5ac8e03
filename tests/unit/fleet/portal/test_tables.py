"""Tables of pages: what their address asks for, also where it is nonsense, and what is downloaded."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest

pytest.importorskip("htpy", reason="the extra `fleet` is not installed")

from support.pages import Elements
from traceloom.fleet.portal.page import format_value
from traceloom.fleet.portal.page_request import PageUrl
from traceloom.fleet.portal.tables import ROWS_PER_PAGE, PageColumn, PageTable

EVIL = "<script>alert(1)</script>\u202e"
COLUMNS = (
    PageColumn("name", "Name", "name", link=lambda row: f"/x/{row['size']}"),
    PageColumn("size", "Size", "bytes", unknown="nobody knows"),
    PageColumn("at", "At", "instant"),
    PageColumn("state", "State", "state"),
)
ROWS = [
    {"name": "Beta 10", "size": 2_000_000, "at": 1_790_000_000 * 10**9, "state": "done"},
    {"name": "alpha 9", "size": None, "at": 1, "state": "failed"},
    {"name": EVIL, "size": 7, "at": 2**62, "state": "=1+1"},
]
TABLE = PageTable("t", "Things", COLUMNS, ROWS, "Make one.")


def names(table: PageTable, query: str) -> list[str]:
    return [str(row["name"]) for row in table.chosen(PageUrl("/p", query))]


def test_rows_are_sorted_and_filtered_as_the_address_says() -> None:
    assert names(TABLE, "") == ["Beta 10", "alpha 9", EVIL]
    assert names(TABLE, "t.sort=size") == [EVIL, "Beta 10", "alpha 9"], (
        "what is unknown stands last"
    )
    assert names(TABLE, "t.sort=-size") == ["Beta 10", EVIL, "alpha 9"]
    assert names(TABLE, "t.sort=name") == [EVIL, "alpha 9", "Beta 10"], "case does not count"
    assert names(TABLE, "t.q=ALPHA+failed") == ["alpha 9"]
    assert names(TABLE, "t.sort=__class__&other.q=x&t.leaf=-9") == ["Beta 10", "alpha 9", EVIL]


def test_texts_of_strangers_are_text_and_nothing_invisible_is_left() -> None:
    page = format_value(TABLE.render(PageUrl("/p", "")))
    elements = Elements(page)
    assert elements.tags["script"] == 0
    assert "<script>alert(1)</script>\\u202e" in elements.shown
    assert "2.00 MB" in elements.shown
    assert ("span", "title", "nobody knows") in elements.attributes
    assert ("time", "datetime", "2026-09-21T14:13:20.000+00:00") in elements.attributes
    assert "Make one." in format_value(
        PageTable("t", "Things", COLUMNS, [], "Make one.").render(PageUrl("/p", ""))
    )


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("", 0, 49), ("2", 50, 99), ("3", 100, 119), ("99", 100, 119), ("x", 0, 49)],
)
def test_a_long_table_has_leaves(asked: str, first: int, last: int) -> None:
    table = PageTable(
        "t", "Things", COLUMNS[:1], [{"name": f"n{k}", "size": k} for k in range(120)]
    )
    elements = Elements(
        format_value(table.render(PageUrl("/p", f"t.leaf={asked}&t.sort=&u.q=kept")))
    )
    assert elements.tags["tr"] == 1 + last - first + 1 <= 1 + ROWS_PER_PAGE
    assert f"n{first}" in elements.shown
    assert f"{first + 1} to {last + 1} of 120" in elements.shown
    links = [
        parse_qs(urlsplit(value or "").query)
        for tag, name, value in elements.attributes
        if (tag, name) == ("a", "href")
    ]
    assert all(link.get("u.q", ["kept"]) == ["kept"] for link in links), (
        "what other tables show stays"
    )


def test_downloads_are_exact_and_no_formulas() -> None:
    address = PageUrl("/p", "t.sort=-size")
    rows = list(csv.DictReader(io.StringIO(TABLE.to_csv(address))))
    assert [row["size"] for row in rows] == ["2000000", "7", ""]
    assert rows[1]["state"] == "'=1+1"
    texts = [f"{sign}1" for sign in "=+-@\t\r\n＝＋－＠ 1"]
    table = replace(TABLE, rows=[{"state": text} for text in texts])
    told = [row["state"] for row in csv.DictReader(io.StringIO(table.to_csv(address), newline=""))]
    assert told == [*(f"'{text}" for text in texts[:-2]), " 1", "11"]
    assert json.loads(TABLE.json(address))[0] == ROWS[0]


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ("9" * 5000, 101),
        ("000000000000002", 1),
        ("-1", 1),
        ("0", 1),
        ("²", 1),
        ("٢", 51),
        (" 2", 1),
        ("2.0", 1),
    ],
    ids=["huge", "many zeros", "negative", "zero", "superscript", "arabic", "space", "fraction"],
)
def test_an_odd_number_of_a_leaf_is_never_a_defect(asked: str, first: int) -> None:
    table = PageTable(
        "t", "Things", COLUMNS[:1], [{"name": f"n{k}", "size": k} for k in range(120)]
    )
    shown = Elements(format_value(table.render(PageUrl("/p", urlencode({"t.leaf": asked})))))
    assert f"{first} to {min(first + 49, 120)} of 120" in shown.shown
