"""A folder of its own for each task: its files are brought there and checked, and its result is taken from there."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from traceloom.collect.engine import RESULT_BYTES, EngineTask, TaskError, TaskFile
from traceloom.errors import unreadable
from traceloom.files import is_address, open_regular
from traceloom.store.objects import checked_name

_PIECE = 1 << 20
_SILENCE_S = 60.0  # after which a store that sends nothing is given up


def in_scratch(
    task: EngineTask, work: Callable[[dict[str, Any]], None], go_on: Callable[[], None], temporary: Path | None = None
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
    folder, out = home / "files", home / "result"

    def do(arguments: dict[str, Any]) -> None:
        try:
            work({"folder": str(folder), **arguments})
        except TaskError as error:  # whoever reads it knows the names of files, and nothing of this folder
            text = error.message.replace(f"{folder}{os.sep}", "").replace(str(folder), "the capture")
            raise TaskError(text, final=error.final) from error

    try:
        for file in task.files:
            go_on()
            _fetch(file, folder / checked_name(file.name), go_on)
        if task.name == "check":
            announced = [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in task.files]
            do({"files": announced})
            return b""
        do({"out": str(out), **task.arguments})
        with open_regular(out) as result:
            content = result.read(RESULT_BYTES + 1)
        if len(content) > RESULT_BYTES:
            raise TaskError(f"the result of `{task.name}` has more than {RESULT_BYTES >> 20} MiB")
        return content
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _fetch(file: TaskFile, path: Path, go_on: Callable[[], None]) -> None:
    """Bring a file to a new path: linked where it lies on the same disk, else copied and compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_address(file.at):
        with suppress(OSError):  # on another disk; or it is not there, which is seen when it is opened
            os.link(file.at, path)
            return
    digest, size = hashlib.sha256(), 0
    with _opened(file) as source, path.open("xb") as out:
        for piece in _pieces(source, file.name):
            go_on()
            size += len(piece)
            if size > file.size:
                break
            digest.update(piece)
            out.write(piece)
    if size != file.size or digest.hexdigest() != file.sha256:
        raise TaskError(f"the file is another than announced ({file.name}) [upload-differs]", final=True)


def _opened(file: TaskFile) -> BinaryIO:
    if not is_address(file.at):
        try:
            return open_regular(Path(file.at))
        except OSError as error:
            raise unreadable(file.at, error, "file of a shared directory") from error
    try:
        stream: BinaryIO = urllib.request.urlopen(file.at, timeout=_SILENCE_S)  # noqa: S310  (it is of our service)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.NOT_FOUND:
            raise TaskError(f"{file.name} is no longer in the store", final=True) from error
        raise unreadable(file.name, ValueError(f"its store answers with HTTP status {error.code}")) from error
    except (OSError, http.client.HTTPException) as error:
        raise unreadable(file.name, _reason(error)) from error
    return stream


def _pieces(source: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        while piece := source.read(_PIECE):
            yield piece
    except (OSError, http.client.HTTPException) as error:
        raise unreadable(name, _reason(error)) from error
    if getattr(source, "length", None):  # bytes that an answer still owes
        raise unreadable(name, ValueError("the connection ended before the file"))


def _reason(error: Exception) -> ValueError:
    """What went wrong, without the signed address that some errors quote."""
    return ValueError(str(getattr(error, "reason", "")) or type(error).__name__)
