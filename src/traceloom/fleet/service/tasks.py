"""What is done with a capture, as functions of files in a scratch directory.

They run in processes of their own, on files of strangers.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import stat
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import msgspec

from traceloom.errors import InputError, TraceloomError, unreadable
from traceloom.fleet.store.objects import check_object_name
from traceloom.system.files import compute_sha256, is_address, open_regular
from traceloom.system.gzip_stream import GzipStream

BASE, NEW = "base", "new"
"""Folders of two captures that are compared."""

MAX_TEXT_BYTES = 64 << 30
"""Bytes of a capture when it is unpacked; one that expands beyond all measure is refused by its
ratio before.
"""


def check(*, folder: str, files: list[dict[str, Any]]) -> None:
    """See that a folder holds just the files that were announced, and that they can be unpacked
    within bounds.

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
            raise InputError(
                "the file has another size than announced",
                slug="upload-differs",
                where=entry["name"],
            )
        with open_regular(path) as stream:
            if compute_sha256(stream) != entry["sha256"]:
                raise InputError(
                    "the file is another than announced", slug="upload-differs", where=entry["name"]
                )
            stream.seek(0)
            unpacked = GzipStream(stream)
            if not unpacked.packed:
                text += entry["size"]
                continue
            before = text
            for _ in unpacked:
                text = before + unpacked.given
                if text > MAX_TEXT_BYTES:
                    message = f"its files have more than {MAX_TEXT_BYTES / 1e9:.0f} GB of text"
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
    from traceloom.fleet.service.capture_rows import CaptureOrigin, build_capture_rows
    from traceloom.fleet.store.tables import pack_rows
    from traceloom.formats import load

    tables = build_capture_rows(
        load(folder, cache=False), CaptureOrigin(capture, received_ns, job=job or None)
    )
    with Path(out).open("xb") as file:
        file.write(pack_rows(tables))


def render_timeline(*, folder: str, out: str, name: str) -> None:
    """Write the timeline of a capture to a new file for Perfetto, packed; arguments as of `render`.

    Raises:
        InputError: It cannot be read.
    """
    from traceloom import report
    from traceloom.formats import load
    from traceloom.report.document import ReportOptions
    from traceloom.report.views.files import Report, write_perfetto_gz

    session = replace(load(folder, cache=False), name=name)
    full_report = Report(report.build(session), lambda: session, ReportOptions())
    with Path(out).open("xb") as file:
        write_perfetto_gz(full_report, file)


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
    from traceloom.formats import load
    from traceloom.report.views.page import render_report_page as page_of

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
    from traceloom.formats import load
    from traceloom.report import comparison
    from traceloom.report.comparison import render as page_of

    names = {BASE: base_name, NEW: new_name}
    sides = [
        replace(load(str(Path(folder, side)), cache=False), name=name)
        for side, name in names.items()
    ]
    with Path(out).open("x", encoding="utf-8") as file:
        file.write(page_of(comparison.build(analyze.compare(*sides), *sides)))


TaskName = Literal["check", "analyse", "render", "render_timeline", "compare"]

MEMORY_BYTES = 8 << 30
MAX_RESULT_BYTES = 256 << 20
"""The most that a task may give: rows of a capture, or a page."""


class TaskFile(msgspec.Struct, frozen=True):
    """A file that a task works on.

    Attributes:
        name: In its capture.
        size: Bytes.
        sha256: In hexadecimal.
        at: Where a process that has no credentials gets it: a path, or an address that is signed for a while.
    """

    name: str
    size: int
    sha256: str
    at: str


class EngineTask(msgspec.Struct, frozen=True):
    """What is to be done: a function of `traceloom.fleet.service.tasks`, on which files, and with
    what else.

    Attributes:
        name: The function.
        files: What it works on.
        arguments: Its other keywords.
        seconds: How long it may take, fetching its files included.
    """

    name: TaskName
    files: tuple[TaskFile, ...]
    arguments: dict[str, str | int]
    seconds: float


class TaskError(TraceloomError):
    """A task gave no result.

    `final`: it would not at the next try either, as the files are refused.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message, slug="task-failed")
        self.final = final


class Engine(Protocol):
    """Runs tasks; `slots` at once."""

    slots: int

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Begin a task; the future has its result.

        It fails with `TaskError`, which counts as a try of the task, or with another
        `TraceloomError` or an `OSError` where the engine or a store does not answer, which says
        nothing of the task.
        """

    def check(self) -> str:
        """See that it works, and say what it has.

        Raises:
            InputError: It does not work.
        """

    def close(self) -> None:
        """End what runs."""


_CHUNK_BYTES = 1 << 20
_READ_TIMEOUT_S = 60.0  # after which a store that sends nothing is given up


def run_in_scratch(
    task: EngineTask,
    work: Callable[[dict[str, Any]], None],
    go_on: Callable[[], None],
    temporary: Path | None = None,
) -> bytes:
    """Have a task done on its files, in a folder that is gone afterwards; returns its result.

    Args:
        task: What is to be done.
        work: Does it, with these keywords.
        go_on: Called again and again while files are fetched; raises where that is to end.
        temporary: Where the folder is made; None: the system's temporary directory.

    Raises:
        TaskError: A file is another than announced, or is gone; the result is too large.
        InputError: `unreadable`: a file cannot be had from here.
        OSError: There is no room.
    """
    home = Path(tempfile.mkdtemp(prefix="traceloom-", dir=temporary))
    directory, out = home / "files", home / "result"

    def do(arguments: dict[str, Any]) -> None:
        try:
            work({"folder": str(directory), **arguments})
        except (
            TaskError
        ) as error:  # whoever reads it knows the names of files, and nothing of this folder
            text = error.message.replace(f"{directory}{os.sep}", "").replace(
                str(directory), "the capture"
            )
            raise TaskError(text, final=error.final) from error

    try:
        for file in task.files:
            go_on()
            _fetch_file(file, directory / check_object_name(file.name), go_on)
        if task.name == "check":
            announced = [
                {"name": file.name, "size": file.size, "sha256": file.sha256} for file in task.files
            ]
            do({"files": announced})
            return b""
        do({"out": str(out), **task.arguments})
        with open_regular(out) as result:
            content = result.read(MAX_RESULT_BYTES + 1)
        if len(content) > MAX_RESULT_BYTES:
            raise TaskError(
                f"the result of `{task.name}` has more than {MAX_RESULT_BYTES >> 20} MiB"
            )
        return content
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _fetch_file(file: TaskFile, path: Path, go_on: Callable[[], None]) -> None:
    """Bring a file to a new path: linked where it lies on the same disk, else copied and compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_address(file.at):
        with suppress(
            OSError
        ):  # on another disk; or it is not there, which is seen when it is opened
            os.link(file.at, path)
            return
    digest, size = hashlib.sha256(), 0
    with _open_file(file) as source, path.open("xb") as out:
        for chunk in _read_chunks(source, file.name):
            go_on()
            size += len(chunk)
            if size > file.size:
                break
            digest.update(chunk)
            out.write(chunk)
    if size != file.size or digest.hexdigest() != file.sha256:
        raise TaskError(
            f"the file is another than announced ({file.name}) [upload-differs]", final=True
        )


def _open_file(file: TaskFile) -> BinaryIO:
    if not is_address(file.at):
        try:
            return open_regular(Path(file.at))
        except OSError as error:
            raise unreadable(file.at, error, "file of a shared directory") from error
    try:
        stream: BinaryIO = urllib.request.urlopen(file.at, timeout=_READ_TIMEOUT_S)  # noqa: S310  (it is of our service)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.NOT_FOUND:
            raise TaskError(f"{file.name} is no longer in the store", final=True) from error
        raise unreadable(
            file.name, ValueError(f"its store answers with HTTP status {error.code}")
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise unreadable(file.name, _hide_address(error)) from error
    return stream


def _read_chunks(source: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise unreadable(name, _hide_address(error)) from error
    if getattr(source, "length", None):  # bytes that an answer still owes
        raise unreadable(name, ValueError("the connection ended before the file"))


def _hide_address(error: Exception) -> ValueError:
    """What went wrong, without the signed address that some errors quote."""
    return ValueError(str(getattr(error, "reason", "")) or type(error).__name__)
