"""The formats a report can be written in, chosen by the ending of the file's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from traceloom.plain_text import encoded
from traceloom.report.options import ReportOptions

if TYPE_CHECKING:
    from traceloom.model import Session
    from traceloom.report.documents import ReportDocument


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
        return partial(self.write, name=path.name) if self.write is write_table else self.write


@dataclass(frozen=True, slots=True)
class Directory:
    """What a directory is filled with."""

    fill: Callable[[Report, Path], None]
    ours: str  # the files in it, as a regular expression
    next_step: str = "read them with Polars, pandas or a spreadsheet"
    of_runs: bool = False


def directory(ending: str) -> Directory:
    """A file per table, in the format of the ending: `.csv` or `.parquet`."""
    from traceloom.report.exports import tables

    def fill(report: Report, path: Path) -> None:
        tables.write_tables(report.document, ending, path)

    return Directory(fill, tables.OURS)


def write_html(report: Report, handle: BinaryIO) -> None:
    """The page."""
    from traceloom.report.views import html

    handle.write(encoded(html.render(report.document, report.session)))


def write_json(report: Report, handle: BinaryIO) -> None:
    """The document."""
    from traceloom.report.views.jsonfile import encode

    handle.write(encode(report.document))


def write_markdown(report: Report, handle: BinaryIO) -> None:
    """The answer and its tables for a pull request."""
    from traceloom.report.views.markdown import render

    handle.write(encoded(render(report.document, report.options)))


def write_table(report: Report, handle: BinaryIO, name: str = "") -> None:
    """The table of the file's name."""
    from traceloom.report.exports import tables

    tables.write_table(report.document, name, report.options.only, handle)


def write_perfetto(report: Report, handle: BinaryIO) -> None:
    """The timeline for Perfetto."""
    from traceloom.report.exports.perfetto import write

    write(report.session, int(report.document["epoch_ns"]), handle, report.document.get("critical_path"))


def write_perfetto_gz(report: Report, handle: BinaryIO) -> None:
    """The timeline for Perfetto, packed."""
    from traceloom.packed import gzipped

    gzipped(partial(write_perfetto, report))(handle)


def write_speedscope(report: Report, handle: BinaryIO) -> None:
    """The stacks for speedscope."""
    from traceloom.report.exports.speedscope import write

    write(report.session, handle)


FORMATS = (
    Format((".perfetto.json.gz",), write_perfetto_gz, "open it at ui.perfetto.dev"),
    Format((".perfetto.json",), write_perfetto, "open it at ui.perfetto.dev"),
    Format((".speedscope.json",), write_speedscope, "open it at www.speedscope.app"),
    Format((".html", ".htm"), write_html, "open it in a browser"),
    Format((".json",), write_json, "its keys are described in docs/reference/report-json.md", of_runs=True),
    Format((".md",), write_markdown, "paste it into a pull request", of_runs=True),
    Format((".csv", ".parquet"), write_table, "read it with Polars, pandas or a spreadsheet"),
)
