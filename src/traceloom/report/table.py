"""Tables as they are declared, once for every view: the terminal, the page and Markdown draw them from this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traceloom.harmless import harmless
from traceloom.model import units
from traceloom.model.columns import UNITS

Cells = Mapping[str, Any]
"""A row as views see it: values by the keys of columns, whatever results they are of."""
PICTURES = ("bar", "spark")
KINDS = (*UNITS, "grade", "delta", *PICTURES)
"""Kinds of a column: what its values are, so that every view writes them with a unit."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One stretch of time as a stacked bar.

    Attributes:
        parts: (label, colour group, nanoseconds), from left to right.
        whole: What the parts are shares of.
        longest: The stretch that is as long as the column; None where every bar is.
    """

    parts: Sequence[tuple[str, str, int]]
    whole: int
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class Col:
    """One column of a table.

    Attributes:
        key: Key of the row, and the name of the column in the page's address.
        title: Heading.
        kind: One of `KINDS`: text; name (long, may be cut); grade (how bad a notice is); time in ns; bytes;
            count; share from 0 to 1; number; flops; flop_rate in FLOP/s; byte_rate in B/s; bar (a `Bar`); spark (a
            list of numbers, drawn on terminals only); delta (a difference in ns, drawn from the middle).
        hint: What is counted; shown on hover.
        narrow: Whether it also stands on a terminal of 80 columns.
        swatch: Colour group shown before the title.
        scale: Columns with the same scale share one unit, so that they can be compared.
        kept: Whether it stands on terminals of any width, as what is compared does: texts wrap instead.
    """

    key: str
    title: str
    kind: str = "text"
    hint: str = ""
    narrow: bool = True
    swatch: str = ""
    scale: str = ""
    kept: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is no kind of column")

    @property
    def numeric(self) -> bool:
        """Whether cells are aligned on the decimal and sorted as numbers."""
        return self.kind in units.NUMBERS


@dataclass(frozen=True, slots=True)
class Table:
    """One table, drawn by every view: all rows in the page, the first `--top` of them on a terminal.

    Attributes:
        key: Its id, unique in the report: `copies-kinds`.
        title: Heading; the first letter is a capital.
        columns: In the order of the page. The last column of kind `name`, `bar` or `spark` takes what room is left on a
            terminal.
        rows: Dicts in the order to be shown; a missing or null value shows as unknown.
        path: Where the rows stand in the document (`copies.kinds`), so that unknown values can say why.
        note: One sentence below the heading.
        unknown: Why values are unknown, by column, beside what `path` says.
        position: Place in the document's `ranks` of the rank that it is about; the page shows that of the chosen rank.
        picture: SVG or HTML above it in the page; names from traces escaped.
        weight: Where not all rows are shown: the column whose largest rows are, in their order.
        brief: Whether it stands in the short report on a terminal, if its section is of the core.
    """

    key: str
    title: str
    columns: Sequence[Col]
    rows: Sequence[Cells]
    path: str = ""
    note: str = ""
    unknown: Mapping[str, str] | None = None
    position: int | None = None
    picture: str = ""
    weight: str = ""
    brief: bool = True


def yes_or_no(value: bool | None) -> str | None:
    """A cell that answers a question; None stays unknown."""
    return None if value is None else "yes" if value else "no"


def written(column: Col, value: Any) -> str:
    """A cell as text, with its unit; `-` for what is unknown."""
    if column.numeric or value is None:
        return units.written(value, column.kind)
    return harmless(str(value))
