"""A replay as files: the document, the page, and its tables as data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from traceloom.plain_text import encoded
from traceloom.replay.comparison import TABLES, ReplayComparison
from traceloom.report.exports.tables import OURS, TABLE_ENDINGS, ResultTables
from traceloom.report.replayed import build, write_json

__all__ = ["ENDINGS", "OURS", "fill", "writer"]


def _html(comparison: ReplayComparison, handle: BinaryIO) -> None:
    from traceloom.report.replayed import page

    handle.write(encoded(page.render(build(comparison), comparison)))


_RESULT_TABLES = ResultTables("replay", TABLES)
fill = _RESULT_TABLES.fill
_WRITERS = {".json": write_json, ".html": _html, ".htm": _html}
ENDINGS = (*_WRITERS, *TABLE_ENDINGS)


def writer(path: Path, ending: str) -> Callable[[ReplayComparison, BinaryIO], object]:
    """What writes a file.

    Args:
        path: Its name; that of a table says which.
        ending: One of `ENDINGS`.

    Raises:
        UsageError: slug `no-such-table`.
    """
    return _WRITERS.get(ending) or _RESULT_TABLES.writer(path, ending)
