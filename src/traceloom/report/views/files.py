"""File name -> view; JSON, CSV, Parquet of any document."""

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
    """All that a format may draw from.

    Attributes:
        document: What is known about the run.
        load: Gives the part of the session that the document is about; called where a format draws from it, too.
        options: The choices of the user.
    """

    document: ReportDocument
    load: Callable[[], Session]
    options: ReportOptions

    @cached_property
    def session(self) -> Session:
        """The part of the session that the document is about."""
        return self.load()


@dataclass(frozen=True, slots=True)
class Format:
    """One format: its endings, how it is written, and what to do with the file then."""

    endings: tuple[str, ...]
    write: Callable[..., None]  # (report, handle)
    next_step: str
    of_runs: bool = False  # can also tell several runs apart

    def writer(self, path: Path) -> Callable[[Report, BinaryIO], None]:
        """How a file is written; the name of one that holds a table says which."""
        return partial(self.write, name=path.name) if self.write is write_table_file else self.write


@dataclass(frozen=True, slots=True)
class Directory:
    """What a directory is filled with."""

    fill: Callable[[Report, Path], None]
    ours: str  # the files in it, as a regular expression
    next_step: str = "read them with Polars, pandas or a spreadsheet"
    of_runs: bool = False


def build_table_directory(ending: str) -> Directory:
    """A file per table, in the format of the ending: `.csv` or `.parquet`."""

    def fill(report: Report, path: Path) -> None:
        write_tables(report.document, ending, path)

    return Directory(fill, TABLE_FILE_PATTERN)


def write_html(report: Report, handle: BinaryIO) -> None:
    """The page."""
    from traceloom.report.views import page

    handle.write(encode_utf8(page.render_report_page(report.document, report.session)))


def write_json(report: Report, handle: BinaryIO) -> None:
    """The document."""
    handle.write(encode(report.document))


def write_markdown(report: Report, handle: BinaryIO) -> None:
    """The answer and its tables for a pull request."""
    from traceloom.report.views.markdown import render

    handle.write(encode_utf8(render(report.document, report.options)))


def write_table_file(report: Report, handle: BinaryIO, name: str = "") -> None:
    """The table of the file's name."""
    write_table(report.document, name, report.options.only, handle)


def write_perfetto(report: Report, handle: BinaryIO) -> None:
    """The timeline for Perfetto."""
    from traceloom.report.exports.perfetto import write

    write(
        report.session,
        int(report.document["epoch_ns"]),
        handle,
        report.document.get("critical_path"),
    )


def write_perfetto_gz(report: Report, handle: BinaryIO) -> None:
    """The timeline for Perfetto, packed."""
    from traceloom.system.gzip_stream import compress_output

    compress_output(partial(write_perfetto, report))(handle)


def write_speedscope(report: Report, handle: BinaryIO) -> None:
    """The stacks for speedscope."""
    from traceloom.report.exports.speedscope import write

    write(report.session, handle)


def encode(document: Mapping[str, object]) -> bytes:
    """One line of UTF-8 JSON with a line end; integers stay integers."""
    return encode_json(document) + b"\n"


def build_table_frames(document: ReportDocument) -> Iterator[tuple[str, pl.DataFrame]]:
    """Every table that the report shows: its name (`kernels`, `idle-gaps-longest`), and all its
    rows in plain columns.

    Times are integer nanoseconds, sizes bytes, shares from 0 to 1; null is unknown. Lists and
    pictures are left out.
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
    """Write one table to a file: that of the file's name, or the only one of the section that was
    asked for.

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
    """Write a frame in the format of the ending, in letters of any case."""
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
"""What a directory of tables holds."""

_TABLE_ENDINGS = (".csv", ".parquet")
ResultWriter = Callable[[Any, BinaryIO], object]


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """What a result can be written as: documents, pages, and its frames as tables in files that are
    named after them.

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
            hint = (
                nearest(name, self.tables) + f"name the file after one of {', '.join(self.tables)}"
            )
            hint += "; or write all with -o DIR/"
            raise UsageError(
                f"a {self.what} has no table `{path.stem}`", slug="no-such-table", hint=hint
            )
        return lambda answer, handle: write(getattr(answer, name), ending, handle)

    def write_directory(self, answer: object, path: Path, *, force: bool) -> int:
        """Write all frames as CSV into a directory, as `files.write_directory` does; the size of
        its files in bytes.
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
    """Write a file per table into a directory that is there; `ending` is `.csv` or `.parquet`."""
    for key, frame in build_table_frames(document):
        with (directory / f"{key}{ending}").open("wb") as handle:
            write(frame, ending, handle)
