"""What is done with a capture, as functions of files: check it, take its rows, render its report.

They run in processes of their own, on files of strangers.
"""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceloom.errors import InputError
from traceloom.files import open_regular, sha256_of
from traceloom.packed import UnpackedFile

BASE, NEW = "base", "new"
"""Folders of two captures that are compared."""

MOST_TEXT = 64 << 30
"""Bytes of a capture when it is unpacked; one that expands beyond all measure is refused by its ratio before."""


def check(*, folder: str, files: list[dict[str, Any]]) -> None:
    """See that a folder holds just the files that were announced, and that they can be unpacked within bounds.

    Args:
        folder: Where they lie.
        files: Of each its `name`, `size` and `sha256`.

    Raises:
        InputError: `upload-differs`: a file is another than the announced one; `gzip-bomb`; `unreadable`.
    """
    text = 0
    for entry in files:
        path = Path(folder) / entry["name"]
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size != entry["size"]:
            raise InputError("the file has another size than announced", slug="upload-differs", where=entry["name"])
        with open_regular(path) as stream:
            if sha256_of(stream) != entry["sha256"]:
                raise InputError("the file is another than announced", slug="upload-differs", where=entry["name"])
            stream.seek(0)
            unpacked = UnpackedFile(stream)
            if not unpacked.packed:
                text += entry["size"]
                continue
            before = text
            for _ in unpacked:
                text = before + unpacked.given
                if text > MOST_TEXT:
                    message = f"its files have more than {MOST_TEXT / 1e9:.0f} GB of text"
                    raise InputError(message, slug="gzip-bomb", where=entry["name"])


def analyse(*, folder: str, out: str, capture: str, received_ns: int, job: str) -> None:
    """Write the rows of a capture to a new file, as of `packed_rows`.

    Args:
        folder: Where its files lie.
        out: The file.
        capture: Its name.
        received_ns: When it arrived, Unix time.
        job: Its job; "" where nobody says it.

    Raises:
        InputError: It cannot be read.
    """
    from traceloom.read import load
    from traceloom.store.captured import CaptureOrigin, rows
    from traceloom.store.row_files import packed_rows

    tables = rows(load(folder, cache=False), CaptureOrigin(capture, received_ns, job=job or None))
    with Path(out).open("xb") as file:
        file.write(packed_rows(tables))


def render_timeline(*, folder: str, out: str, name: str) -> None:
    """Write the timeline of a capture to a new file for Perfetto, packed; arguments as of `render`.

    Raises:
        InputError: It cannot be read.
    """
    from traceloom import report
    from traceloom.read import load
    from traceloom.report.formats import Report, write_perfetto_gz
    from traceloom.report.options import ReportOptions

    session = replace(load(folder, cache=False), name=name)
    whole = Report(report.build(session), lambda: session, ReportOptions())
    with Path(out).open("xb") as file:
        write_perfetto_gz(whole, file)


def render(*, folder: str, out: str, name: str) -> None:
    """Write the report of a capture to a new HTML file.

    Args:
        folder: Where its files lie.
        out: The HTML file.
        name: What the run is called in there.

    Raises:
        InputError: It cannot be read.
    """
    from traceloom import report
    from traceloom.read import load
    from traceloom.report.views.html import render as page_of

    session = replace(load(folder, cache=False), name=name)
    with Path(out).open("x", encoding="utf-8") as file:
        file.write(page_of(report.build(session), session))


def compare(*, folder: str, out: str, base_name: str, new_name: str) -> None:
    """Write the comparison of two captures to a new HTML file.

    Args:
        folder: Where the files of one lie in `BASE`, those of the other in `NEW`.
        out: The HTML file.
        base_name: What one is called.
        new_name: What the other is called.

    Raises:
        InputError: One of them cannot be read.
        UsageError: They cannot be compared.
    """
    from traceloom import analyze
    from traceloom.read import load
    from traceloom.report import comparison
    from traceloom.report.comparison.page import render as page_of

    names = {BASE: base_name, NEW: new_name}
    sides = [replace(load(str(Path(folder, side)), cache=False), name=name) for side, name in names.items()]
    with Path(out).open("x", encoding="utf-8") as file:
        file.write(page_of(comparison.build(analyze.compare(*sides), *sides)))
