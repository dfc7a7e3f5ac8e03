"""The same value reads the same in every view: terminal, page, Markdown and files of tables, read back as figures."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import cache
from html import unescape
from typing import Any

import polars as pl
import pytest

from support.figures import figure
from support.pages import tables as tables_of_page
from support.sessions import SORTS, made, page
from traceloom.report import ReportOptions
from traceloom.report.document import PICTURES, Col, Table
from traceloom.report.sections import load_core_sections, select_visible_sections
from traceloom.report.views.files import build_table_frames, write
from traceloom.report.views.markdown import render as markdown
from traceloom.report.views.terminal import render_declared_table
from traceloom.system import units
from traceloom.trace.session import Session

Sort = Callable[[], Session]
EVERY_ROW = ReportOptions(top=1_000_000)
every_sort = pytest.mark.parametrize("sort", SORTS, ids=lambda sort: sort.__name__)


def declared(sort: Sort) -> Iterator[tuple[Any, Table]]:
    """Every table of a report, with its section."""
    _, document = made(sort)
    for section in (*load_core_sections(), *select_visible_sections(document)):
        if value := section.value(document):
            for table in section.tables(value):
                if table.rows:
                    yield section, table


@cache
def rows_of_page(sort: Sort) -> dict[str, list[dict[str, Any]]]:
    """The rows of the page's tables by the keys of their columns."""
    return tables_of_page(page(sort), by="key")


def cells(line: str) -> list[str]:
    """The cells of a line on a terminal: what stands at least two blanks apart."""
    return re.split(r"  +", line.strip())


def reads_as(column: Col, text: str, value: Any) -> bool:
    """Whether a cell of a numeric column says this value; counts are exact."""
    if value is None:
        return text == "–"
    if column.kind == "count" and isinstance(value, int):
        return text.replace("\u202f", "") == str(value)
    return figure(text).holds(float(value))


@pytest.mark.sampled(2)
@every_sort
def test_numbers_on_a_terminal_are_those_of_the_document(sort: Sort) -> None:
    compared = rows = 0
    for _, table in declared(sort):
        last = next(
            (column for column in reversed(table.columns) if column.kind in ("name", *PICTURES)),
            None,
        )
        if last is not None and last.kind in PICTURES:
            continue
        columns = [column for column in table.columns if column is not last] + [last] * (
            last is not None
        )
        lines = [line.plain for line in render_declared_table(table, EVERY_ROW, 1_000)]
        titles = [column.title for column in columns]
        head = next(number for number, line in enumerate(lines) if cells(line) == titles)
        for line, row in zip(lines[head + 1 :], table.rows, strict=True):
            texts = cells(line)
            rows += 1
            if len(texts) != len(columns):  # a text is empty, or holds two blanks
                continue
            compared += 1
            for column, text in zip(columns, texts, strict=True):
                if column.numeric:
                    assert reads_as(column, text, row.get(column.key)), (
                        table.key,
                        column.key,
                        text,
                        row,
                    )
    assert compared >= 0.9 * rows


@pytest.mark.sampled(2)
@every_sort
def test_the_page_has_the_rows_and_numbers_of_the_document_as_they_are(sort: Sort) -> None:
    drawn = rows_of_page(sort)
    for _, table in declared(sort):
        rows = drawn[table.key]
        assert len(rows) == min(len(table.rows), 2_000)
        for column in table.columns:
            values = [row.get(column.key) for row in table.rows[: len(rows)]]
            if column.key not in rows[0]:  # 0 or unknown everywhere, or drawn on terminals only
                assert column.kind == "spark" or not any(values), (table.key, column.key)
            elif column.numeric:
                assert [row[column.key] for row in rows] == values, (table.key, column.key)


@every_sort
def test_markdown_has_the_rows_of_the_core_with_the_same_figures(sort: Sort) -> None:
    _, document = made(sort)
    lines = iter(markdown(document, ReportOptions(top=5)).splitlines())
    found: dict[str, list[list[str]]] = {}
    for line in lines:
        if line.startswith("| ") and next(lines, "").startswith("|---"):
            head = [cell.strip() for cell in line.strip("|").split("|")]
            rows = found.setdefault(head[0], [head])
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(
                    [unescape(cell.strip()) for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
                )
    for section, table in declared(sort):
        if table.title not in found or not section.in_markdown:
            continue
        (head, *rows) = found[table.title]
        columns = {column.title: column for column in table.columns}
        for texts, row in zip(rows, table.rows, strict=False):
            if texts[0].startswith("… and "):
                break
            for title, text in zip(head[1:], texts[1:], strict=True):
                if columns[title].numeric:
                    assert reads_as(columns[title], text, row.get(columns[title].key)), (
                        table.key,
                        title,
                        text,
                    )


def plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, str, bool))


@pytest.mark.sampled(10)
@every_sort
@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_every_table_comes_back_from_its_file_as_it_is(sort: Sort, ending: str) -> None:
    _, document = made(sort)
    rows_of: dict[str, Table] = {}
    for section in (*load_core_sections(), *select_visible_sections(document)):
        tables = [table for own, table in declared(sort) if own is section]
        rows_of |= {section.key if len(tables) == 1 else table.key: table for table in tables}
    written = dict(build_table_frames(document))
    assert set(written) == set(rows_of)
    for key, frame in written.items():
        handle = io.BytesIO()
        write(frame, ending, handle)
        handle.seek(0)
        types = {
            name: pl.String if kind == pl.Null else kind for name, kind in frame.schema.items()
        }
        again = (
            pl.read_parquet(handle) if ending == ".parquet" else pl.read_csv(handle, schema=types)
        )
        rows = rows_of[key].rows
        assert again.height == len(rows)
        for column in frame.columns:
            values = [row.get(column) for row in rows]
            assert all(map(plain, values)), (key, column)
            assert again[column].to_list() == values, (key, column)
        omitted = {name for row in rows for name in row} - set(frame.columns)
        assert all(any(not plain(row.get(name)) for row in rows) for name in omitted)


@every_sort
def test_tables_have_keys_of_their_own_and_columns_whose_values_are_what_they_say(
    sort: Sort,
) -> None:
    keys = [table.key for _, table in declared(sort)]
    assert len(set(keys)) == len(keys)
    for _, table in declared(sort):
        assert len({(column.key, column.kind) for column in table.columns}) == len(table.columns), (
            table.key
        )
        texts = [column.title for column in table.columns if column.kind in ("text", "name")]
        assert len(set(texts)) == len(texts), (table.key, texts)
        for column in table.columns:
            values = [row[column.key] for row in table.rows if row.get(column.key) is not None]
            assert column.title, (table.key, column.key)
            assert not column.numeric or all(isinstance(value, (int, float)) for value in values)
            # made kernels and links can be faster than any device
            if column.kind == "share" and not column.key.endswith(
                ("roofline_fraction", "link_fraction")
            ):
                assert all(0 <= share <= 1 + 1e-9 for share in values), (table.key, column.key)


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        ("time", [0.4, 155.333, 999.7, 2.5]),
        ("bytes", [0.4, 155.333, 999.7]),
        (
            "time",
            [
                0,
                1,
                999,
                1_000,
                999_499,
                999_500,
                1_234_567,
                59_999_999_999,
                3_600_000_000_000,
                -1_500,
            ],
        ),
        ("bytes", [0, 1, 999, 1_000, 1_048_576, 2**40, 2**61, -4_096]),
        ("share", [0.0, 1e-9, 0.0005, 0.001, 0.1234, 0.5, 0.99899, 0.9991, 1.0]),
        ("count", [0, 7, 999, 1_000, 123_456_789]),
        ("number", [0.0, 3.0, 0.001234, 1.005, 99.96, 12_345.6]),
        ("change", [0.0, 0.261, -0.5, 0.0004, -1.0, 9.99]),
        ("flops", [1.0, 1.5e12, 9.9951e14]),
        ("flop_rate", [1.5e12]),
        ("byte_rate", [3.35e12, 999.0]),
    ],
)
def test_a_written_number_is_read_back_as_one_that_it_can_stand_for(
    unit: str, values: list[float]
) -> None:
    for value in values:
        assert figure(units.format_value(value, unit)).holds(value), (
            value,
            units.format_value(value, unit),
        )
