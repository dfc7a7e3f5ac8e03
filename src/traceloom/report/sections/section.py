"""What a section of the report is.

A section answers one question. Its module holds everything about it: how one rank is measured, what stands in the
document, why values may be unknown, and which tables show it. The terminal, the page and Markdown draw the same tables.
A new section is one module with a `SECTION`, named in `sections/__init__.py`; then `python scripts/report_schema.py`
writes its shape into the published schema.

    def _measure(trace: Trace, _options: ReportOptions) -> Copies:
        return analyze.copies(trace)

    def _build(study: Study[Copies], absent: Absent) -> dict[str, Any]:
        rows = study.concat(lambda copies: copies.kinds)          # one frame, with a column `rank`
        if not rows.height:
            absent.say("copies")
        return {"kinds": absent.rows(rows, "copies.kinds")}

    SECTION = Section(key="copies", title="Copies", note="...", measure=_measure, build=_build, tables=_tables, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import polars as pl

from traceloom.model import Session, Trace
from traceloom.model.columns import UNITS
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions

Row = dict[str, Any]
Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Col:
    """One column of a table.

    Attributes:
        key: Key of the row.
        title: Heading.
        kind: One of `UNITS`, so that every view writes its numbers with a unit.
        hint: What is counted; shown on hover.
        narrow: Whether it also stands on a terminal of 80 columns.
    """

    key: str
    title: str
    kind: str = "text"
    hint: str = ""
    narrow: bool = True

    def __post_init__(self) -> None:
        if self.kind not in UNITS:
            raise ValueError(f"{self.kind!r} is no kind of column")


@dataclass(frozen=True, slots=True)
class Table:
    """One table, drawn by every view: all rows in the page, the first `--top` of them on a terminal.

    Attributes:
        key: Its id, unique in the report: `copies-kinds`.
        title: Heading; the first letter is a capital.
        columns: In the order of the page. The last column of kind `name` takes what room is left on a terminal.
        rows: Dicts in the order to be shown; a missing or null value shows as unknown.
        path: Where the rows stand in the document (`copies.kinds`), so that unknown values can say why.
        note: One sentence below the heading.
    """

    key: str
    title: str
    columns: Sequence[Col]
    rows: Sequence[Row]
    path: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Study(Generic[Measured]):
    """What `build` may ask.

    Attributes:
        session: The chosen ranks, whole.
        part: The same, cut to the chosen steps; equal to `session` without `--steps`.
        options: The choices of the user.
        results: What `measure` gave for each trace of `part`, in its order.
    """

    session: Session
    part: Session
    options: ReportOptions
    results: Sequence[Measured]

    def concat(self, frame: Callable[[Measured], pl.DataFrame]) -> pl.DataFrame:
        """One frame of all ranks, rank after rank, first the column `rank` (Int32, null where a file does not say)."""
        frames = []
        for trace, result in zip(self.part.traces, self.results, strict=True):
            of_rank = frame(result)
            ranks = pl.Series("rank", [trace.rank], dtype=pl.Int32).new_from_index(0, of_rank.height)
            frames.append(of_rank.clone().insert_column(0, ranks))
        return pl.concat(frames)


def on_rank(row: Row, rows: Iterable[Row]) -> str:
    """` of rank 3` behind a figure of one row, where the rows are of several ranks."""
    return f" of rank {row['rank']}" if len({other["rank"] for other in rows}) > 1 else ""


def _nothing(_trace: Trace, _options: ReportOptions) -> None:
    """For sections that look at the whole session only."""


def _no_picture(_value: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Section(Generic[Measured]):
    """One question of the report.

    Attributes:
        key: Key in the document, name for `--only`, id in the page: lower case with underscores.
        title: Heading.
        note: What the section tells, in one line.
        build: (study, absent) -> the JSON value under `key`; None or empty where nothing is known, with the reason
            said to `absent`.
        tables: value -> its tables; none where there is nothing to show.
        summary: value -> one sentence with the main figure, for the short report; None where there is nothing to say.
        schema: JSON Schema of the value (see `shapes`).
        reasons: Path in the document -> why a value there can be unknown; `key` itself where all may be missing.
        measure: (trace, options) -> what is known of one rank: small, and picklable. Runs rank by rank, so that no
            more than a few ranks are in memory.
        picture: value -> SVG or HTML above the tables of the page; names from traces escaped. Empty for none.
    """

    key: str
    title: str
    note: str
    build: Callable[[Study[Measured], Absent], Any]
    tables: Callable[[Any], Iterable[Table]]
    summary: Callable[[Any], str | None]
    schema: Row
    reasons: Mapping[str, str]
    measure: Callable[[Trace, ReportOptions], Measured] = _nothing  # type: ignore[assignment]
    picture: Callable[[Any], str] = field(default=_no_picture)
