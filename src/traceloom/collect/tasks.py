"""What is done with a capture, as functions of files: check it, take its rows, render its report.

They run in processes of their own, on files of strangers.
"""

from __future__ import annotations

import stat
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceloom.errors import InputError
from traceloom.files import open_regular, sha256_of
from traceloom.packed import UnpackedFile

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
    """Write the rows of a capture to a new zip file, a Parquet file for each table.

    Args:
        folder: Where its files lie.
        out: The zip file.
        capture: Its name.
        received_ns: When it arrived, Unix time.
        job: Its job; "" where nobody says it.

    Raises:
        InputError: It cannot be read.
    """
    from traceloom.read import load
    from traceloom.store.captured import CaptureOrigin, rows

    tables = rows(load(folder, cache=False), CaptureOrigin(capture, received_ns, job=job or None))
    with zipfile.ZipFile(out, "x") as whole:  # Parquet is compressed itself
        for name, frame in tables.items():
            with whole.open(f"{name}.parquet", "w") as file:
                frame.write_parquet(file)


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


def compare(*, base: str, base_name: str, new: str, new_name: str, out: str) -> None:
    """Write the comparison of two captures to a new HTML file.

    Args:
        base: The folder with the files of one.
        base_name: What it is called.
        new: The folder of the other.
        new_name: What that is called.
        out: The file.

    Raises:
        InputError: One of them cannot be read.
        UsageError: They cannot be compared.
    """
    from dataclasses import replace

    from traceloom import analyze
    from traceloom.read import load
    from traceloom.report import comparison
    from traceloom.report.comparison.page import render as page_of

    sides = [replace(load(path, cache=False), name=name) for path, name in ((base, base_name), (new, new_name))]
    with Path(out).open("x", encoding="utf-8") as file:
        file.write(page_of(comparison.build(analyze.compare(*sides), *sides)))
