"""What a section of the report is.

A section answers one question. Its module holds everything about it: how one rank is measured, what stands in the
document, why values may be unknown, and which tables show it. The terminal, the page and Markdown draw the
same tables (`report/table.py`).
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
from itertools import compress
from typing import Any, Generic, TypeVar

import polars as pl

from traceloom.model import Session, Trace, units
from traceloom.report.absent import Absent
from traceloom.report.options import ReportOptions
from traceloom.report.table import Col, Table

Row = dict[str, Any]
Measured = TypeVar("Measured")


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

    def concat(self, frame: Callable[[Measured], pl.DataFrame], ranks: Sequence[bool] | None = None) -> pl.DataFrame:
        """One frame of all ranks, rank after rank, first the column `rank` (Int32, null where a file does not say).

        Args:
            frame: result of a rank -> its rows.
            ranks: Which of them; None for all.
        """
        frames = []
        pairs = list(zip(self.part.traces, self.results, strict=True))
        for trace, result in pairs if ranks is None else compress(pairs, ranks):
            of_rank = frame(result)
            numbers = pl.Series("rank", [trace.rank], dtype=pl.Int32).new_from_index(0, of_rank.height)
            frames.append(of_rank.clone().insert_column(0, numbers))
        return pl.concat(frames)


def on_rank(row: Row, rows: Iterable[Row]) -> str:
    """` of rank 3` behind a figure of one row, where the rows are of several ranks."""
    return f" of rank {row['rank']}" if len({other["rank"] for other in rows}) > 1 else ""


def several(document: Row, column: Col) -> tuple[Col, ...]:
    """The column, where the document is about several ranks."""
    return (column,) if len(document["ranks"]) > 1 else ()


def covering(rows: Sequence[Row], key: str, what: str) -> str:
    """How much the rows of a table add up to."""
    return f"{units.duration(sum(row[key] for row in rows))} {what}"


def with_shares(frame: pl.DataFrame, by: str) -> pl.DataFrame:
    """Rows by name with their mean, and their `fraction` of the sum of a column; the largest first."""
    whole = frame[by].sum()
    share = pl.col(by) / whole if whole else pl.lit(0.0)
    return frame.with_columns(mean_ns=pl.col("total_ns") // pl.col("count"), fraction=share).sort(
        by, "name", descending=[True, False], maintain_order=True
    )


def whole_document(document: Row) -> Row:
    """`read` of sections that are drawn from several keys of the document."""
    return document


def _nothing(*_: Any) -> None:
    """For sections that look at the whole session only, and those without a sentence."""


def _no_picture(_value: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Section(Generic[Measured]):
    """One question of the report.

    Attributes:
        key: Key in the document, name for `--only`, id in the page: lower case with underscores.
        title: Heading.
        note: What the section tells, in one line.
        tables: value -> its tables; none where there is nothing to show.
        build: (study, absent) -> the JSON value under `key`; None or empty where nothing is known, with the reason
            said to `absent`. Sections that only show what stands under other keys have none.
        summary: value -> one sentence with the main figure, for the short report; None where there is nothing to say.
        schema: JSON Schema of the value (see `shapes`); that of the core is written by hand.
        reasons: Path in the document -> why a value there can be unknown; `key` itself where all may be missing.
        measure: (trace, options) -> what is known of one rank: small, and picklable. Runs rank by rank, so that no
            more than a few ranks are in memory. Sections of the core share one measurement.
        picture: value -> SVG or HTML above the tables of the page; names from traces escaped. Empty for none.
        read: document -> the value; by default what stands under `key`.
        path: Where it stands in the document, if not under `key`: why it is missing is looked up there.
        anchor: Its id in the page, if that is not its key.
        definition: value -> HTML of how it is counted, folded below the tables.
        nothing: What stands in the page where there is nothing to show and nothing is missing.
        in_markdown: Whether its first table stands in Markdown.
    """

    key: str
    title: str
    note: str
    tables: Callable[[Any], Iterable[Table]]
    build: Callable[[Study[Measured], Absent], Any] | None = None
    summary: Callable[[Any], str | None] = _nothing
    schema: Row = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    measure: Callable[[Trace, ReportOptions], Measured] = _nothing  # type: ignore[assignment]
    picture: Callable[[Any], str] = _no_picture
    read: Callable[[Row], Any] | None = None
    path: str = ""
    anchor: str = ""
    definition: Callable[[Any], str] = _no_picture
    nothing: str = ""
    in_markdown: bool = False

    def value(self, document: Row) -> Any:
        """What the section is drawn from; None where it is missing."""
        return self.read(document) if self.read else document.get(self.key)
