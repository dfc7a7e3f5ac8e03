"""Tables of pages: sorted, filtered and paginated by the URL, so that they work without scripts.

A table named `hosts` takes `hosts.sort=-devices`, `hosts.q=node7` and `hosts.leaf=2`;
`?table=hosts&as=csv` (or `json`) returns all filtered rows with exact values.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from operator import itemgetter

import msgspec
from htpy import (
    Node,
    a,
    button,
    caption,
    div,
    figure,
    form,
    input as input_,
    nav,
    p,
    span,
    table as table_,
    tbody,
    td,
    th,
    thead,
    time as time_,
    tr,
)

from traceloom.fleet.portal.page_request import PageUrl
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.columns.declare import Column

Cell = str | int | float | bool | None
PageRow = Mapping[str, Cell]

MAX_NOWRAP_CHARS = 36
"""Max characters of a text that never wraps."""
ROWS_PER_PAGE = 50
"""Rows that are shown at once."""
MIN_ROWS_FOR_FILTER = 9
"""Min rows of a table with a filter."""

_STATES_BY_CSS_CLASS = {
    "good": (
        "here",
        "done",
        "committed",
        "kept",
        "uploaded",
        "busy",
        "ready",
        "active",
        "fired",
        "like its peers",
    ),
    "bad": ("lost", "failed", "quarantined", "silent", "not-allowed", "revoked", "expired", "slow"),
    "warn": ("partial", "unreachable", "never", "refused"),
    "still": ("cancelled", "free", "unallocated", "incomplete"),
}
_CSS_CLASS_BY_STATE = {
    state: look for look, states in _STATES_BY_CSS_CLASS.items() for state in states
}


_FORMULA_SIGNS = frozenset("=+-@\t\r\n＝＋－＠")  # also as wide as a Chinese character


@dataclass(frozen=True)
class PageColumn:
    """A column of a table.

    Attributes:
        key: Key in the row.
        title: Heading.
        kind: A unit of `model.columns`; `instant`: Unix time in ns; `state`: a progress or a
            condition.
        hint: Meaning, shown on hover.
        unknown: Why a value may be missing.
        link: Link of a row's cell; "", None: no link.
    """

    key: str
    title: str
    kind: str = "text"
    hint: str = ""
    unknown: str = ""
    link: Callable[[PageRow], str] | None = None

    @property
    def numeric(self) -> bool:
        """Whether it is right-aligned, and sorted in descending order first."""
        return self.kind in units.NUMERIC_UNITS


def convert_column(
    key: str, column: Column, link: Callable[[PageRow], str] | None = None
) -> PageColumn:
    """Converts a declared column of the fleet's tables or of a report."""
    return PageColumn(key, column.title, column.unit, column.meaning, column.unknown, link)


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes:
        key: Unique on its page.
        label: Description for screen readers.
        columns: In order.
        rows: In default order.
        empty: What to do if there are no rows.
    """

    key: str
    label: str
    columns: Sequence[PageColumn]
    rows: Sequence[PageRow]
    empty: Node = "There is nothing here."

    def chosen(self, url: PageUrl) -> list[PageRow]:
        """Returns the filtered and sorted rows; missing values come last."""
        words = url.query.get(f"{self.key}.q", "").casefold().split()
        rows = list(self.rows)
        if words:
            texts = [
                " ".join(
                    str(cell)
                    for column in self.columns
                    if (cell := row.get(column.key)) is not None
                ).casefold()
                for row in rows
            ]
            rows = [
                row
                for row, text in zip(rows, texts, strict=True)
                if all(word in text for word in words)
            ]
        sort_key = url.query.get(f"{self.key}.sort", "")
        column = next(
            (column for column in self.columns if column.key == sort_key.removeprefix("-")), None
        )
        if column is None:
            return rows
        present: list[tuple[tuple[bool, float, str], PageRow]] = []
        absent: list[PageRow] = []
        for row in rows:
            value = row.get(column.key)
            if value is None or value == "":
                absent.append(row)
            elif isinstance(value, str):  # after numbers, case-insensitive
                present.append(((True, 0.0, value.casefold()), row))
            else:
                present.append(((False, float(value), ""), row))
        present.sort(key=itemgetter(0), reverse=sort_key.startswith("-"))
        return [row for _, row in present] + absent

    def to_csv(self, url: PageUrl) -> str:
        """Returns the chosen rows as CSV with exact values.

        Cells that a spreadsheet would take for a formula are prefixed with an apostrophe.
        """
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow([column.key for column in self.columns])
        for row in self.chosen(url):
            cells = [row.get(column.key) for column in self.columns]
            writer.writerow(
                [f"'{c}" if isinstance(c, str) and c[:1] in _FORMULA_SIGNS else c for c in cells]
            )
        return out.getvalue()

    def json(self, url: PageUrl) -> bytes:
        keys = [column.key for column in self.columns]
        return msgspec.json.encode(
            [{key: row.get(key) for key in keys} for row in self.chosen(url)]
        )

    def render(self, url: PageUrl) -> Node:
        """Renders the table with filter, sort links and pagination."""
        if not self.rows:
            return div(".empty", id=self.key)[self.empty]
        rows = self.chosen(url)
        page_count = max(1, -(-len(rows) // ROWS_PER_PAGE))
        requested_page = url.query.get(f"{self.key}.leaf", "")
        # The page number may have thousands of digits.
        page_number = (
            max(1, min(int(requested_page[:9]), page_count)) if requested_page.isdecimal() else 1
        )
        page_rows = rows[(page_number - 1) * ROWS_PER_PAGE : page_number * ROWS_PER_PAGE]
        return figure(
            class_=["table", "narrow" if len(self._visible_columns) <= 4 else ""], id=self.key
        )[
            self._render_filter(url, len(rows)),
            self._rows(
                page_rows, [self._render_header(url, column) for column in self._visible_columns]
            ),
            None if rows else p(".quiet")["No row has these words."],
            div(".foot")[
                self._render_pagination(url, page_number, page_count, len(rows))
                if page_count > 1
                else None,
                span(".downloads")[
                    (
                        a(
                            href=url.changed({"table": self.key, "as": file_format}),
                            download=f"{self.key}.{file_format}",
                            title="all rows that the filter leaves, exact",
                        )[file_format.upper()]
                        for file_format in ("csv", "json")
                    )
                ],
            ],
        ]

    def render_static(self) -> Node:
        """Renders all rows without sorting, filter or download, for content without a URL of its
        own.
        """
        if not self.rows:
            return p(".quiet")[self.empty]
        headers = [
            th(class_="n" if c.numeric else None, scope="col", title=c.hint or None)[c.title]
            for c in self._visible_columns
        ]
        return figure(
            class_=["table", "narrow" if len(self._visible_columns) <= 4 else ""], id=self.key
        )[self._rows(self.rows, headers)]

    @property
    def _visible_columns(self) -> list[PageColumn]:
        """Columns with a value in any row; downloads have all columns."""
        return [
            c
            for k, c in enumerate(self.columns)
            if not k or any(r.get(c.key) not in (None, "") for r in self.rows)
        ]

    def _rows(self, rows: Sequence[PageRow], headers: Sequence[Node]) -> Node:
        return div(".scroll", tabindex="0", role="region", aria_label=f"Table: {self.label}")[
            table_[
                caption(".unseen")[self.label],
                thead[tr[headers]],
                tbody[
                    (
                        tr[(_render_cell(column, row) for column in self._visible_columns)]
                        for row in rows
                    )
                ],
            ]
        ]

    def _render_filter(self, url: PageUrl, match_count: int) -> Node:
        filter_text = url.query.get(f"{self.key}.q", "")
        if len(self.rows) < MIN_ROWS_FOR_FILTER and not filter_text:
            return None
        other_parameters = {
            name: value
            for name, value in url.query.items()
            if name not in {f"{self.key}.q", f"{self.key}.leaf"}
        }
        return form(
            ".filter",
            role="search",
            method="get",
            action=url.path,
            aria_label=f"Filter: {self.label}",
        )[
            (
                input_(type="hidden", name=name, value=value)
                for name, value in other_parameters.items()
            ),
            input_(
                type="search",
                name=f"{self.key}.q",
                value=filter_text,
                id=f"{self.key}-q",
                autocomplete="off",
                placeholder=f"Filter {units.format_count(len(self.rows))} rows",
                aria_label=f"Filter: {self.label}",
                spellcheck="false",
            ),
            button(".unseen", type="submit")["Filter"],
            span(".count", role="status")[
                f"{units.format_count(match_count)} of {units.format_count(len(self.rows))}"
                if filter_text
                else ""
            ],
        ]

    def _render_header(self, url: PageUrl, column: PageColumn) -> Node:
        current_order = url.query.get(f"{self.key}.sort", "")
        default_order = (
            f"-{column.key}" if column.numeric or column.kind == "instant" else column.key
        )
        reverse_order = column.key if default_order.startswith("-") else f"-{column.key}"
        # The third click restores the default order.
        next_order = {default_order: reverse_order, reverse_order: ""}.get(
            current_order, default_order
        )
        direction = {column.key: "ascending", f"-{column.key}": "descending"}.get(current_order)
        href = url.changed({f"{self.key}.sort": next_order, f"{self.key}.leaf": ""})
        return th(
            class_="n" if column.numeric else None,
            scope="col",
            aria_sort=direction,
            title=column.hint or None,
        )[a(href=href, rel="nofollow")[column.title]]

    def _render_pagination(
        self, url: PageUrl, page_number: int, page_count: int, row_count: int
    ) -> Node:
        def to(other: int, link_text: str) -> Node:
            if not 1 <= other <= page_count:
                return span(".quiet", aria_disabled="true")[link_text]
            return a(href=url.changed({f"{self.key}.leaf": str(other)}))[link_text]

        return nav(".leaves", aria_label=f"Leaves: {self.label}")[
            to(page_number - 1, "Previous"),
            span[
                f"{units.format_count((page_number - 1) * ROWS_PER_PAGE + 1)} to {units.format_count(min(page_number * ROWS_PER_PAGE, row_count))} of {units.format_count(row_count)}"
            ],
            to(page_number + 1, "Next"),
        ]


def render_time(time_ns: int) -> Node:
    """Renders a Unix time in ns; a script converts it to the reader's time zone."""
    try:
        when = datetime.fromtimestamp(time_ns / 1e9, timezone.utc)
    except (ValueError, OverflowError, OSError):  # of an untrusted clock
        return f"{time_ns} ns"
    return time_(
        datetime=when.isoformat(timespec="milliseconds"), title=f"{when:%Y-%m-%d %H:%M:%S} UTC"
    )[f"{when:%Y-%m-%d %H:%M:%S} UTC"]


def render_state(state: str) -> Node:
    """Renders a state as a coloured dot and a word."""
    return span(class_=["state", _CSS_CLASS_BY_STATE.get(state, "")])[state]


def render_missing_value(reason: str) -> Node:
    """Renders a missing value, with the reason on hover."""
    return span(".none", title=reason or "not known")["–"]


def _render_cell(column: PageColumn, row: PageRow) -> Node:
    value = row.get(column.key)
    if value is None or value == "":
        return td(class_="n" if column.numeric else "s")[render_missing_value(column.unknown)]
    content: Node
    title = None
    if column.kind == "instant":
        content = render_time(int(value))
    elif column.kind == "state":
        content = render_state(str(value))
    elif column.numeric:
        content, title = units.format_value(value, column.kind), str(value)
    else:
        content = sanitize(str(value))
    if column.link is not None and (href := column.link(row)):
        content = a(href=href)[content]
    css_class = (
        "n"
        if column.numeric
        else "name"
        if column.kind == "name"
        else "s"
        if len(str(value)) <= MAX_NOWRAP_CHARS
        else None
    )
    return td(class_=css_class, title=title)[content]
