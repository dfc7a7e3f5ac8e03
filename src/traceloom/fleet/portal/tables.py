"""Tables of pages: sorted, filtered and divided into leaves by their address, so that they work without scripts.

A table named `hosts` takes `hosts.sort=-devices`, `hosts.q=node7` and `hosts.leaf=2`; `?table=hosts&as=csv` (or
`json`) gives all rows that the filter leaves, with their exact values.
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
    nav,
    p,
    span,
    tbody,
    td,
    th,
    thead,
    tr,
)
from htpy import (
    input as input_,
)
from htpy import (
    table as table_,
)
from htpy import (
    time as time_,
)

from traceloom.fleet.portal.page_request import Address
from traceloom.system import units
from traceloom.system.sanitize import sanitize
from traceloom.trace.frames import Column

Cell = str | int | float | bool | None
PageRow = Mapping[str, Cell]

ONE_LINE = 36
"""Characters of a text that never wraps."""
LEAF = 50
"""Rows that are shown at once."""
FILTER_FROM = 9
"""Rows from which on there is a filter; one over fewer is clutter."""

_LOOKS = {
    "good": ("here", "done", "committed", "kept", "uploaded", "busy", "ready", "active", "fired", "like its peers"),
    "bad": ("lost", "failed", "quarantined", "silent", "not-allowed", "revoked", "expired", "slow"),
    "warn": ("partial", "unreachable", "never", "refused"),
    "still": ("cancelled", "free", "unallocated", "incomplete"),
}
_LOOK_OF = {state: look for look, states in _LOOKS.items() for state in states}


@dataclass(frozen=True)
class PageColumn:
    """A column of a table.

    Attributes:
        key: Of the row.
        title: Heading.
        kind: A unit of `model.columns`; `instant`: Unix time in ns; `state`: how far something is, or how it is.
        hint: What is counted, shown on hover.
        unknown: Why there can be no value.
        link: Where a row leads from here; "", None: nowhere.
    """

    key: str
    title: str
    kind: str = "text"
    hint: str = ""
    unknown: str = ""
    link: Callable[[PageRow], str] | None = None

    @property
    def numeric(self) -> bool:
        """Whether it stands to the right, and is sorted from the largest first."""
        return self.kind in units.NUMBERS


def declared(key: str, column: Column, link: Callable[[PageRow], str] | None = None) -> PageColumn:
    """A column of the fleet's tables or of a report, as it is declared there."""
    return PageColumn(key, column.title, column.unit, column.meaning, column.unknown, link)


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes:
        key: Unique on its page.
        label: What it is about, for readers who do not see it.
        columns: In order.
        rows: In the order to be shown first.
        empty: What to do where there are no rows.
    """

    key: str
    label: str
    columns: Sequence[PageColumn]
    rows: Sequence[PageRow]
    empty: Node = "There is nothing here."

    def chosen(self, address: Address) -> list[PageRow]:
        """The rows that the filter leaves, as they are to be sorted; what is unknown stands last."""
        wanted = address.query.get(f"{self.key}.q", "").casefold().split()
        rows = list(self.rows)
        if wanted:
            cells = ([row.get(column.key) for column in self.columns] for row in rows)
            texts = [" ".join(str(cell) for cell in of if cell is not None).casefold() for of in cells]
            rows = [row for row, text in zip(rows, texts, strict=True) if all(word in text for word in wanted)]
        order = address.query.get(f"{self.key}.sort", "")
        column = next((column for column in self.columns if column.key == order.removeprefix("-")), None)
        if column is None:
            return rows
        present: list[tuple[tuple[bool, float, str], PageRow]] = []
        absent: list[PageRow] = []
        for row in rows:
            value = row.get(column.key)
            if value is None or value == "":
                absent.append(row)
            elif isinstance(value, str):  # after numbers, without regard to case
                present.append(((True, 0.0, value.casefold()), row))
            else:
                present.append(((False, float(value), ""), row))
        present.sort(key=itemgetter(0), reverse=order.startswith("-"))
        return [row for _, row in present] + absent

    def csv(self, address: Address) -> str:
        """The chosen rows as CSV, exact; what a spreadsheet would take for a formula begins with an apostrophe."""
        out = io.StringIO()
        writer = csv.writer(out)
        writer.writerow([column.key for column in self.columns])
        for row in self.chosen(address):
            cells = [row.get(column.key) for column in self.columns]
            writer.writerow([f"'{c}" if isinstance(c, str) and c[:1] in set("=+-@\t\r") else c for c in cells])
        return out.getvalue()

    def json(self, address: Address) -> bytes:
        """The chosen rows as a list of objects."""
        keys = [column.key for column in self.columns]
        return msgspec.json.encode([{key: row.get(key) for key in keys} for row in self.chosen(address)])

    def render(self, address: Address) -> Node:
        """The table as it stands in the page."""
        if not self.rows:
            return div(".empty", id=self.key)[self.empty]
        rows = self.chosen(address)
        leaves = max(1, -(-len(rows) // LEAF))
        asked = address.query.get(f"{self.key}.leaf", "")
        leaf = max(1, min(int(asked[:9]), leaves)) if asked.isdecimal() else 1  # it may have thousands of digits
        shown = rows[(leaf - 1) * LEAF : leaf * LEAF]
        return figure(class_=["table", "narrow" if len(self._shown) <= 4 else ""], id=self.key)[
            self._filter(address, len(rows)),
            self._rows(shown, [self._head(address, column) for column in self._shown]),
            None if rows else p(".quiet")["No row has these words."],
            div(".foot")[
                self._leaves(address, leaf, leaves, len(rows)) if leaves > 1 else None,
                span(".downloads")[
                    (
                        a(
                            href=address.changed({"table": self.key, "as": form}), download=f"{self.key}.{form}",
                            title="all rows that the filter leaves, exact",
                        )[form.upper()]
                        for form in ("csv", "json")
                    )
                ],
            ],
        ]  # fmt: skip

    def alone(self) -> Node:
        """All rows as they are, of what has no address by which they could be sorted, filtered or downloaded."""
        if not self.rows:
            return p(".quiet")[self.empty]
        heads = [th(class_="n" if c.numeric else None, scope="col", title=c.hint or None)[c.title] for c in self._shown]
        return figure(class_=["table", "narrow" if len(self._shown) <= 4 else ""], id=self.key)[
            self._rows(self.rows, heads)
        ]

    @property
    def _shown(self) -> list[PageColumn]:
        """A column that says nothing of any row is left out; who downloads the table has it."""
        return [
            c for k, c in enumerate(self.columns) if not k or any(r.get(c.key) not in (None, "") for r in self.rows)
        ]

    def _rows(self, rows: Sequence[PageRow], heads: Sequence[Node]) -> Node:
        return div(".scroll", tabindex="0", role="region", aria_label=f"Table: {self.label}")[
            table_[
                caption(".unseen")[self.label],
                thead[tr[heads]],
                tbody[(tr[(_cell(column, row) for column in self._shown)] for row in rows)],
            ]
        ]

    def _filter(self, address: Address, chosen: int) -> Node:
        words = address.query.get(f"{self.key}.q", "")
        if len(self.rows) < FILTER_FROM and not words:
            return None
        kept = {
            name: value for name, value in address.query.items() if name not in {f"{self.key}.q", f"{self.key}.leaf"}
        }
        return form(".filter", role="search", method="get", action=address.path, aria_label=f"Filter: {self.label}")[
            (input_(type="hidden", name=name, value=value) for name, value in kept.items()),
            input_(
                type="search", name=f"{self.key}.q", value=words, id=f"{self.key}-q", autocomplete="off",
                placeholder=f"Filter {units.count(len(self.rows))} rows", aria_label=f"Filter: {self.label}",
                spellcheck="false",
            ),
            button(".unseen", type="submit")["Filter"],
            span(".count", role="status")[f"{units.count(chosen)} of {units.count(len(self.rows))}" if words else ""],
        ]  # fmt: skip

    def _head(self, address: Address, column: PageColumn) -> Node:
        now = address.query.get(f"{self.key}.sort", "")
        first = f"-{column.key}" if column.numeric or column.kind == "instant" else column.key
        other = column.key if first.startswith("-") else f"-{column.key}"
        after = {first: other, other: ""}.get(now, first)  # the third click gives the first order back
        way = {column.key: "ascending", f"-{column.key}": "descending"}.get(now)
        href = address.changed({f"{self.key}.sort": after, f"{self.key}.leaf": ""})
        return th(class_="n" if column.numeric else None, scope="col", aria_sort=way, title=column.hint or None)[
            a(href=href, rel="nofollow")[column.title]
        ]

    def _leaves(self, address: Address, leaf: int, leaves: int, rows: int) -> Node:
        def to(other: int, words: str) -> Node:
            if not 1 <= other <= leaves:
                return span(".quiet", aria_disabled="true")[words]
            return a(href=address.changed({f"{self.key}.leaf": str(other)}))[words]

        return nav(".leaves", aria_label=f"Leaves: {self.label}")[
            to(leaf - 1, "Previous"),
            span[
                f"{units.count((leaf - 1) * LEAF + 1)} to {units.count(min(leaf * LEAF, rows))} of {units.count(rows)}"
            ],
            to(leaf + 1, "Next"),
        ]


def instant(time_ns: int) -> Node:
    """A Unix time in ns; the script writes it in the reader's zone."""
    try:
        when = datetime.fromtimestamp(time_ns / 1e9, timezone.utc)
    except (ValueError, OverflowError, OSError):  # of a stranger's clock
        return f"{time_ns} ns"
    return time_(datetime=when.isoformat(timespec="milliseconds"), title=f"{when:%Y-%m-%d %H:%M:%S} UTC")[
        f"{when:%Y-%m-%d %H:%M:%S} UTC"
    ]


def state_mark(state: str) -> Node:
    """How far something is, as a coloured dot and a word."""
    return span(class_=["state", _LOOK_OF.get(state, "")])[state]


def unknown(reason: str) -> Node:
    """Instead of a value that is not known."""
    return span(".none", title=reason or "not known")["–"]


def _cell(column: PageColumn, row: PageRow) -> Node:
    value = row.get(column.key)
    if value is None or value == "":
        return td(class_="n" if column.numeric else "s")[unknown(column.unknown)]
    shown: Node
    title = None
    if column.kind == "instant":
        shown = instant(int(value))
    elif column.kind == "state":
        shown = state_mark(str(value))
    elif column.numeric:
        shown, title = units.format_value(value, column.kind), str(value)
    else:
        shown = sanitize(str(value))
    if column.link is not None and (href := column.link(row)):
        shown = a(href=href)[shown]
    look = "n" if column.numeric else "name" if column.kind == "name" else "s" if len(str(value)) <= ONE_LINE else None
    return td(class_=look, title=title)[shown]
