"""A replay as files: the document, the page, and its tables as data."""

from __future__ import annotations

from typing import BinaryIO

from traceloom.plain_text import encoded
from traceloom.replay.comparison import TABLES, ReplayComparison
from traceloom.report.exports.tables import ResultFiles
from traceloom.report.replayed import build, write_json


def _html(comparison: ReplayComparison, handle: BinaryIO) -> None:
    from traceloom.report.replayed import page

    handle.write(encoded(page.render(build(comparison), comparison)))


REPLAY = ResultFiles("replay", TABLES, {".json": write_json, ".html": _html, ".htm": _html})
