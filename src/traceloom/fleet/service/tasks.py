"""Tasks on captures (check, analyse, render, compare) and the engine interface that runs them.

A task is a function of files in a scratch directory. It runs in a process of its own, as the files
are untrusted.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import stat
import tempfile
import time
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
"""Folders of the two captures of a comparison."""

MAX_TEXT_BYTES = 64 << 30
"""Max bytes of an unpacked capture; archives with an excessive ratio are refused earlier."""


def check(*, folder: str, files: list[dict[str, Any]]) -> None:
    """Checks that a folder holds exactly the announced files, and that they unpack within limits.

    Args:
        folder: Folder of the files.
        files: `name`, `size` and `sha256` of each.

    Raises:
        InputError: `upload-differs`: a file differs from the announced one; `gzip-bomb`;
            `unreadable`.
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
    """Writes the rows of a capture to a new file, in the format of `pack_rows`.

    Args:
        folder: Folder of its files.
        out: The file.
        capture: Name of the capture.
        received_ns: When it arrived, Unix time.
        job: Its job; "" if unknown.

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
    """Writes the timeline of a capture to a new compressed file for Perfetto; arguments as of
    `render`.

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
    """Writes the report of a capture to a new HTML file.

    Args:
        folder: Folder of its files.
        out: The HTML file.
        name: Title of the run in the report.

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
    """Writes the comparison of two captures to a new HTML file.

    Args:
        folder: Has the files of the captures in `BASE` and `NEW`.
        out: The HTML file.
        base_name: Title of the base.
        new_name: Title of the other.

    Raises:
        InputError: One of them cannot be read.
        UsageError: They cannot be compared.
    """
    from traceloom import analyze
    from traceloom.formats import load
    from traceloom.report import comparison
    from traceloom.report.comparison import render as page_of

    sides = [
        replace(load(str(Path(folder, side)), cache=False), name=name)
        for side, name in {BASE: base_name, NEW: new_name}.items()
    ]
    with Path(out).open("x", encoding="utf-8") as file:
        file.write(page_of(comparison.build(analyze.compare(*sides), *sides)))


TaskName = Literal["check", "analyse", "render", "render_timeline", "compare"]

MEMORY_BYTES = 8 << 30
MAX_RESULT_BYTES = 256 << 20
"""Max bytes of a task's result: rows of a capture, or a page."""


class TaskFile(msgspec.Struct, frozen=True):
    """A file that a task works on.

    Attributes:
        name: In its capture.
        size: Bytes.
        sha256: In hexadecimal.
        at: Path, or signed temporary URL, from which a process without credentials reads it.
    """

    name: str
    size: int
    sha256: str
    at: str


class EngineTask(msgspec.Struct, frozen=True):
    """A task: a function of `traceloom.fleet.service.tasks`, its files and arguments.

    Attributes:
        name: The function.
        files: Files it works on.
        arguments: Its other keywords.
        seconds: Max duration, including the download of its files.
    """

    name: TaskName
    files: tuple[TaskFile, ...]
    arguments: dict[str, str | int]
    seconds: float


class TaskError(TraceloomError):
    """A task failed.

    `final`: a retry would fail too, as the files are refused.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message, slug="task-failed")
        self.final = final


class Engine(Protocol):
    """Runs tasks, at most `slots` at once."""

    slots: int

    def submit(self, task: EngineTask) -> Future[bytes]:
        """Starts a task; returns a future of its result.

        It fails with `TaskError`, which counts as an attempt, or with another `TraceloomError` or
        an `OSError` if the engine or a store does not respond, which says nothing about the task.
        """

    def check(self) -> str:
        """Checks that the engine works, and describes it.

        Raises:
            InputError: It does not work.
        """

    def close(self) -> None:
        """Stops all running tasks."""


_CHUNK_BYTES = 1 << 20
_SCRATCH_PREFIX = "traceloom-task-"
_STALE_AFTER_S = 86_400.0  # longer than any task
_READ_TIMEOUT_S = 60.0  # a store that sends nothing for this long is given up


def sweep_scratch(temporary: Path | None = None) -> None:
    """Deletes the folders of this user's tasks that a killed service left."""
    for folder in (temporary or Path(tempfile.gettempdir())).glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.geteuid() and status.st_mtime < time.time() - _STALE_AFTER_S:
                shutil.rmtree(folder)


def run_in_scratch(
    task: EngineTask,
    work: Callable[[dict[str, Any]], None],
    go_on: Callable[[], None],
    temporary: Path | None = None,
) -> bytes:
    """Runs a task on its files in a temporary folder; returns its result.

    Args:
        task: The task.
        work: Function that performs it, called with its keywords.
        go_on: Called repeatedly during downloads; raises to abort.
        temporary: Parent of the folder; None: the system's temporary directory.

    Raises:
        TaskError: A file differs from the announced one, or is gone; the result is too large.
        InputError: `unreadable`: a file cannot be read from here.
        OSError: The disk is full.
    """
    home = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=temporary))
    directory, out = home / "files", home / "result"

    def do(arguments: dict[str, Any]) -> None:
        try:
            work({"folder": str(directory), **arguments})
        except TaskError as error:
            # The reader of the error knows names of files, not this folder.
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
    """Brings a file to a new path: hard-linked on the same disk, else copied and verified."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_address(file.at):
        # On another disk; or missing, which opening it reports.
        with suppress(OSError):
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
    if getattr(source, "length", None):  # bytes of the response that are still missing
        raise unreadable(name, ValueError("the connection ended before the file"))


def _hide_address(error: Exception) -> ValueError:
    """Returns the error without the signed URL that some errors quote."""
    return ValueError(str(getattr(error, "reason", "")) or type(error).__name__)
