"""The tables of a report as data: a file each, CSV or Parquet, with the values as they stand in the JSON report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import polars as pl

from traceloom.errors import UsageError, nearest
from traceloom.files import write_directory
from traceloom.report.sections import core, shown
from traceloom.report.table import Bar

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument

OURS = r"[^/]*\.(csv|parquet)"
"""What a directory of tables holds."""

_TABLE_ENDINGS = (".csv", ".parquet")
ResultWriter = Callable[[Any, BinaryIO], object]


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """What a result can be written as: documents, pages, and its frames as tables in files that are named after them.

    Attributes:
        what: The result, in a word.
        tables: The frames, attributes of it.
        writers: What writes all else, by ending.
    """

    what: str
    tables: tuple[str, ...]
    writers: Mapping[str, ResultWriter]

    @property
    def endings(self) -> tuple[str, ...]:
        """All endings of files."""
        return (*self.writers, *_TABLE_ENDINGS)

    def writer(self, path: Path, ending: str) -> ResultWriter:
        """What writes a file; that of a table is named after it.

        Args:
            path: Its name.
            ending: One of `endings`.

        Raises:
            UsageError: slug `no-such-table`.
        """
        if ending in self.writers:
            return self.writers[ending]
        name = path.stem.replace("-", "_")
        if name not in self.tables:
            hint = nearest(name, self.tables) + f"name the file after one of {', '.join(self.tables)}"
            hint += "; or write all with -o DIR/"
            raise UsageError(f"a {self.what} has no table `{path.stem}`", slug="no-such-table", hint=hint)
        return lambda answer, handle: write(getattr(answer, name), ending, handle)

    def write_directory(self, answer: object, path: Path, *, force: bool) -> int:
        """Write all frames as CSV into a directory, as `files.write_directory` does; the size of its files in bytes."""

        def fill(directory: Path) -> None:
            for name in self.tables:
                with (directory / f"{name}.csv").open("wb") as handle:
                    write(getattr(answer, name), ".csv", handle)

        return sum(file.stat().st_size for file in write_directory(path, fill, OURS, force=force))


def frames(document: ReportDocument) -> Iterator[tuple[str, pl.DataFrame]]:
    """Every table that the report shows: its name (`kernels`, `idle-gaps-longest`), and all its rows in plain columns.

    Times are integer nanoseconds, sizes bytes, shares from 0 to 1; null is unknown. Lists and pictures are left out.
    """
    for section in (*core(), *shown(document)):
        if value := section.value(document):
            tables = [table for table in section.tables(value) if table.rows]
            for table in tables:
                nested = {
                    key for row in table.rows for key, value in row.items() if isinstance(value, (list, dict, Bar))
                }
                frame = pl.DataFrame(
                    [{key: value for key, value in row.items() if key not in nested} for row in table.rows],
                    infer_schema_length=None,
                )
                yield section.key if len(tables) == 1 else table.key, frame


def write_table(document: ReportDocument, name: str, only: Sequence[str] | None, handle: BinaryIO) -> None:
    """Write one table to a file: that of the file's name, or the only one of the section that was asked for.

    Raises:
        UsageError: slug `no-such-table`.
    """
    tables = dict(frames(document))
    key = Path(name).stem
    if key not in tables and only and len(tables) == 1:
        key = next(iter(tables))
    if key not in tables:
        hint = nearest(key, tables) + f"name the file after one of {', '.join(tables)}; or write all with -o DIR/"
        raise UsageError(f"the report has no table `{key}`", slug="no-such-table", hint=hint)
    write(tables[key], Path(name).suffix, handle)


def write_tables(document: ReportDocument, ending: str, directory: Path) -> None:
    """Write a file per table into a directory that is there; `ending` is `.csv` or `.parquet`."""
    for key, frame in frames(document):
        with (directory / f"{key}{ending}").open("wb") as handle:
            write(frame, ending, handle)


def write(frame: pl.DataFrame, ending: str, handle: BinaryIO) -> None:
    """Write a frame in the format of the ending, in letters of any case."""
    frame.write_parquet(handle) if ending.lower() == ".parquet" else frame.write_csv(handle)
