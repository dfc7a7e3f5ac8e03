"""Selects the view of a file by its name, and writes any document as JSON, CSV or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import polars as pl

from traceloom.errors import UsageError, nearest
from traceloom.report.document import Bar, ReportOptions
from traceloom.report.sections import load_core_sections, select_visible_sections
from traceloom.system.files import write_directory
from traceloom.system.text import encode_json, encode_utf8

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.trace.session import Session


@dataclass(frozen=True)
class Report:
    """The input of a format.

    Attributes:
        document: The document of the run.
        load: Returns the part of the session that the document covers; called only by formats that
            need it.
        options: The options of the user.
    """

    document: ReportDocument
    load: Callable[[], Session]
    options: ReportOptions

    @cached_property
    def session(self) -> Session:
        """The part of the session that the document covers."""
        return self.load()


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: its endings, its writer, and what to do with the file afterwards."""

    endings: tuple[str, ...]
    write: Callable[..., None]  # (report, handle)
    next_step: str
    of_runs: bool = False  # also supports documents of several runs

    def writer(self, path: Path) -> Callable[[Report, BinaryIO], None]:
        """Returns the writer of a file; the name of a table file selects the table."""
        return partial(self.write, name=path.name) if self.write is write_table_file else self.write


@dataclass(frozen=True, slots=True)
class Directory:
    fill: Callable[[Report, Path], None]
    ours: str  # its files, as a regular expression
    next_step: str = "read them with Polars, pandas or a spreadsheet"
    of_runs: bool = False


def build_table_directory(ending: str) -> Directory:
    """Returns a directory with a file per table, in the format of the ending: `.csv` or
    `.parquet`.
    """

    def fill(report: Report, path: Path) -> None:
        write_tables(report.document, ending, path)

    return Directory(fill, TABLE_FILE_PATTERN)


def write_html(report: Report, handle: BinaryIO) -> None:
    from traceloom.report.views import page

    handle.write(encode_utf8(page.render_report_page(report.document, report.session)))


def write_json(report: Report, handle: BinaryIO) -> None:
    handle.write(encode(report.document))


def write_markdown(report: Report, handle: BinaryIO) -> None:
    """Writes the answer and its tables for a pull request."""
    from traceloom.report.views.markdown import render

    handle.write(encode_utf8(render(report.document, report.options)))


def write_table_file(report: Report, handle: BinaryIO, name: str = "") -> None:
    write_table(report.document, name, report.options.only, handle)


def write_perfetto(report: Report, handle: BinaryIO) -> None:
    from traceloom.report.exports.perfetto import write

    write(
        report.session,
        int(report.document["epoch_ns"]),
        handle,
        report.document.get("critical_path"),
    )


def write_perfetto_gz(report: Report, handle: BinaryIO) -> None:
    from traceloom.system.gzip_stream import compress_output

    compress_output(partial(write_perfetto, report))(handle)


def write_speedscope(report: Report, handle: BinaryIO) -> None:
    from traceloom.report.exports.speedscope import write

    write(report.session, handle)


def encode(document: Mapping[str, object]) -> bytes:
    """Encodes a document as one line of UTF-8 JSON with a newline; integers stay integers."""
    return encode_json(document) + b"\n"


def build_table_frames(document: ReportDocument) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yields every table of the report: its name (`kernels`, `idle-gaps-longest`), and all its rows
    in plain columns.

    Times are integer nanoseconds, sizes bytes, shares from 0 to 1; null is unknown. Lists and
    figures are omitted.
    """
    for section in (*load_core_sections(), *select_visible_sections(document)):
        if value := section.value(document):
            tables = [table for table in section.tables(value) if table.rows]
            for table in tables:
                nested = {
                    key
                    for row in table.rows
                    for key, value in row.items()
                    if isinstance(value, (list, dict, Bar))
                }
                frame = pl.DataFrame(
                    [
                        {key: value for key, value in row.items() if key not in nested}
                        for row in table.rows
                    ],
                    infer_schema_length=None,
                )
                yield section.key if len(tables) == 1 else table.key, frame


def write_table(
    document: ReportDocument, name: str, only: Sequence[str] | None, handle: BinaryIO
) -> None:
    """Writes one table to a file: that of the file's name, or the only one of the requested
    section.

    Raises:
        UsageError: slug `no-such-table`.
    """
    tables = dict(build_table_frames(document))
    key = Path(name).stem
    if key not in tables and only and len(tables) == 1:
        key = next(iter(tables))
    if key not in tables:
        hint = (
            nearest(key, tables)
            + f"name the file after one of {', '.join(tables)}; or write all with -o DIR/"
        )
        raise UsageError(f"the report has no table `{key}`", slug="no-such-table", hint=hint)
    write(tables[key], Path(name).suffix, handle)


def write(frame: pl.DataFrame, ending: str, handle: BinaryIO) -> None:
    """Writes a frame in the format of the ending, in letters of any case."""
    frame.write_parquet(handle) if ending.lower() == ".parquet" else frame.write_csv(handle)


FORMATS = (
    Format((".perfetto.json.gz",), write_perfetto_gz, "open it at ui.perfetto.dev"),
    Format((".perfetto.json",), write_perfetto, "open it at ui.perfetto.dev"),
    Format((".speedscope.json",), write_speedscope, "open it at www.speedscope.app"),
    Format((".html", ".htm"), write_html, "open it in a browser"),
    Format(
        (".json",),
        write_json,
        "its keys are described in docs/reference/report-json.md",
        of_runs=True,
    ),
    Format((".md",), write_markdown, "paste it into a pull request", of_runs=True),
    Format((".csv", ".parquet"), write_table_file, "read it with Polars, pandas or a spreadsheet"),
)

TABLE_FILE_PATTERN = r"[^/]*\.(csv|parquet)"
"""The files of a directory of tables."""

_TABLE_ENDINGS = (".csv", ".parquet")
ResultWriter = Callable[[Any, BinaryIO], object]


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """The output formats of a result: documents, pages, and its frames as tables in files with
    their names.

    Attributes:
        what: Name of the result.
        tables: Names of its attributes that are frames.
        writers: Writers of the other formats, by ending.
    """

    what: str
    tables: tuple[str, ...]
    writers: Mapping[str, ResultWriter]

    @property
    def endings(self) -> tuple[str, ...]:
        return (*self.writers, *_TABLE_ENDINGS)

    def writer(self, path: Path, ending: str) -> ResultWriter:
        """Returns the writer of a file; a table file has the name of its table.

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
            hint = (
                nearest(name, self.tables) + f"name the file after one of {', '.join(self.tables)}"
            )
            hint += "; or write all with -o DIR/"
            raise UsageError(
                f"a {self.what} has no table `{path.stem}`", slug="no-such-table", hint=hint
            )
        return lambda answer, handle: write(getattr(answer, name), ending, handle)

    def write_directory(self, answer: object, path: Path, *, force: bool) -> int:
        """Writes all frames as CSV into a directory, as `files.write_directory` does; returns the
        size of its files in bytes.
        """

        def fill(directory: Path) -> None:
            for name in self.tables:
                with (directory / f"{name}.csv").open("wb") as handle:
                    write(getattr(answer, name), ".csv", handle)

        return sum(
            file.stat().st_size
            for file in write_directory(path, fill, TABLE_FILE_PATTERN, force=force)
        )


def write_tables(document: ReportDocument, ending: str, directory: Path) -> None:
    """Writes a file per table into an existing directory; `ending` is `.csv` or `.parquet`."""
    for key, frame in build_table_frames(document):
        with (directory / f"{key}{ending}").open("wb") as handle:
            write(frame, ending, handle)
