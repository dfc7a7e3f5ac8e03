"""What a section of the report is.

A section answers one question. Its module holds everything about it: how one rank is measured, what stands in the
document, why values may be unknown, and which tables show it. The terminal, the page and Markdown draw the same tables
(`report/table.py`).
A new section is one module with a `SECTION`, named in `sections/__init__.py`; its columns are declared in
`traceloom.model.columns`; then `python scripts/report_schema.py` writes its shape into the published schema, and the
type of its value.

    class CopiesSection(Section[Frames, "CopiesValue"]):
        key, title, note = "copies", "Copies", "How much is copied."
        parts = {"kinds": Part(KIND_SCHEMA, "copies by direction", empty="no copies were recorded")}

        def measure(self, trace: Trace, options: ReportOptions) -> Frames:
            return {"kinds": analyze.copies(trace).kinds}

        def build(self, study: Study[Frames], absent: Absent) -> CopiesValue:
            return self.lists(study.frames(self.parts), absent)

        def tables(self, value: CopiesValue) -> Iterator[Table]:
            yield table("copies.kinds", "Copies by direction", ["?rank", "kind", "bytes"], value["kinds"])

    SECTION = CopiesSection()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import polars as pl

from traceloom.model import Session, Trace, units
from traceloom.model.columns import column
from traceloom.report.absent import Absent
from traceloom.report.measure import Measured
from traceloom.report.names import rank_label
from traceloom.report.options import ReportOptions
from traceloom.report.sections.shapes import Part, Shape, or_null, record
from traceloom.report.table import Cells, Col, Table

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

Frames = dict[str, pl.DataFrame]
Columns = list[str | Col]
Listed = tuple[str, str, Sequence[Cells], Sequence[str]]
"""A list of a section's value as a table: its name, the heading, the rows, the columns (see `table`)."""
Result = TypeVar("Result")
Value = TypeVar("Value")


def table(
    path: str,
    title: str,
    columns: Iterable[str | Col],
    rows: Sequence[Cells],
    note: str = "",
    *,
    key: str = "",
    among: Iterable[Cells] | None = None,
) -> Table:
    """A table whose columns are declared in `traceloom.model.columns`.

    Args:
        path: See `Table`.
        title: See `Table`.
        columns: Keys of the rows. A key that begins with `+` stands on wide terminals only; one with `?` (as `?rank`)
            only where not all rows have the same value. A `Col` is what is no column of the document, or has another
            heading or unit than there.
        rows: See `Table`.
        note: See `Table`.
        key: See `Table`; by default the path with dashes.
        among: The rows that decide about the columns with `?`, where these are not the same.
    """
    deciding = rows if among is None else list(among)
    shown = []
    for asked in columns:
        if isinstance(asked, Col):
            shown.append(asked)
            continue
        name = asked.lstrip("+?")
        if not asked.startswith("?") or len({row[name] for row in deciding}) > 1:
            declared = column(name, path)
            shown.append(Col(name, declared.title, declared.unit, declared.meaning, narrow=not asked.startswith("+")))
    return Table(key or path.replace(".", "-").replace("_", "-"), title, shown, rows, path, note)


@dataclass(frozen=True, slots=True)
class Study(Generic[Result]):
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
    results: Sequence[Result]

    def concat(self, frame: Callable[[Result], pl.DataFrame], ranks: Sequence[bool] | None = None) -> pl.DataFrame:
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

    def frames(self, names: Iterable[str]) -> Frames:
        """`concat` of each of these frames, where results are `Frames` or have them as attributes."""
        out = {}
        for name in names:
            out[name] = self.concat(lambda of: of[name] if isinstance(of, dict) else getattr(of, name))  # noqa: B023
        return out


def on_rank(row: Cells, rows: Iterable[Cells]) -> str:
    """` of rank 3` behind a figure of one row, where the rows are of several ranks."""
    return f" of {rank_label(row['rank'])}" if len({other["rank"] for other in rows}) > 1 else ""


def several(document: ReportDocument, column: Col) -> tuple[Col, ...]:
    """The column, where the document is about several ranks."""
    return (column,) if len(document["ranks"]) > 1 else ()


def covering(rows: Sequence[Cells], key: str, what: str) -> str:
    """How much the rows of a table add up to."""
    return f"{units.duration(sum(row[key] for row in rows))} {what}"


def with_shares(frame: pl.DataFrame, by: str) -> pl.DataFrame:
    """Rows by name with their mean, and their `fraction` of the sum of a column; the largest first."""
    whole = frame[by].sum()
    share = pl.col(by) / whole if whole else pl.lit(0.0)
    return frame.with_columns(mean_ns=pl.col("total_ns") // pl.col("count"), fraction=share).sort(
        by, "name", descending=[True, False], maintain_order=True
    )


class Section(Generic[Result, Value]):
    """One question of the report.

    Attributes:
        key: Key in the document, name for `--only`, id in the page: lower case with underscores.
        title: Heading.
        note: What the section tells, in one line.
        what: Description of the value.
        parts: The lists of the value.
        others: JSON Schema of what else the value holds.
        missing: Why the value may be null; empty where it never is.
        shows_only: Whether it has no key of its own, but shows what stands under others.
        path: Where it stands in the document, if not under `key`: why it is missing is looked up there.
        anchor: Its id in the page, if that is not its key.
        nothing: What stands in the page where there is nothing to show and nothing is missing.
        in_markdown: Whether its first table stands in Markdown.
        unknown: Path below `key` (empty: itself) -> why a value there can be null or empty, where `parts` do not say.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    note: ClassVar[str]
    what: ClassVar[str] = ""
    parts: ClassVar[Mapping[str, Part]] = {}
    others: ClassVar[Mapping[str, Shape]] = {}
    missing: ClassVar[str] = ""
    unknown: ClassVar[Mapping[str, str]] = {}
    shows_only: ClassVar[bool] = False
    path: ClassVar[str] = ""
    anchor: ClassVar[str] = ""
    nothing: ClassVar[str] = ""
    in_markdown: ClassVar[bool] = False

    def measure(self, trace: Trace, options: ReportOptions) -> Result:
        """What is known of one rank: small. Runs rank by rank, so that no more than a few ranks are in memory."""
        return None  # type: ignore[return-value]  # of sections that look at the whole session only

    def build(self, study: Study[Result], absent: Absent) -> Any:
        """The JSON value under `key`; None or empty where nothing is known, with the reason said to `absent`."""
        raise NotImplementedError

    def value(self, document: ReportDocument) -> Value | None:
        """What the section is drawn from; None where it is missing."""
        return cast("Value | None", document.get(self.key))

    def tables(self, value: Value) -> Iterable[Table]:
        """The tables of the value; none where there is nothing to show."""
        raise NotImplementedError

    def summary(self, value: Value) -> str | None:
        """One sentence with the main figure, for the short report; None where there is nothing to say."""
        return None

    def picture(self, value: Value) -> str:
        """SVG or HTML above the tables of the page; names from traces escaped. Empty for none."""
        return ""

    def definition(self, value: Value) -> str:
        """HTML of how it is counted, folded below the tables."""
        return ""

    @property
    def schema(self) -> Shape:
        """JSON Schema of the value."""
        properties = {name: part.schema() for name, part in self.parts.items()}
        shape = record({**properties, **self.others}, what=self.what)
        return or_null(shape) if self.missing else shape

    @property
    def reasons(self) -> dict[str, str]:
        """Path in the document -> why a value there can be unknown; `key` itself where all may be missing."""
        out = {self.key: self.missing} if self.missing else {}
        for name, part in self.parts.items():
            out |= part.reasons(f"{self.key}.{name}")
        return out | {f"{self.key}.{path}".rstrip("."): reason for path, reason in self.unknown.items()}

    def filled(self, listed: Iterable[Listed], among: Iterable[Cells]) -> Iterator[Table]:
        """The tables of those lists of the value that have rows; `among` as for `table`."""
        deciding = list(among)
        for name, title, rows, columns in listed:
            if rows:
                yield table(f"{self.key}.{name}", title, columns, rows, among=deciding)

    def lists(self, frames: Mapping[str, pl.DataFrame], absent: Absent) -> Value:
        """The rows of frames as they stand in the document; why there are none, where the part of that name says so."""
        out: dict[str, list[Any]] = {}
        for name, frame in frames.items():
            out[name] = absent.rows(frame, f"{self.key}.{name}")
            if not out[name] and self.parts[name].empty:
                absent.say(f"{self.key}.{name}")
        return cast("Value", out)


class CoreSection(Section[Measured, "ReportDocument"]):
    """A section of the core: all share one measurement, and are drawn from the whole document."""

    def value(self, document: ReportDocument) -> ReportDocument:
        return document
