"""Output files: never half-written, never overwritten unasked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from traceloom.errors import OutputError


def check_free(path: Path, *, force: bool) -> None:
    """Refuse a place that cannot be written to before any work is done.

    Raises:
        OutputError: slug `file-exists` without `force`, slug `cannot-write` for a directory.
    """
    if path.is_dir():
        raise OutputError(f"`{path}` is a directory", slug="cannot-write", hint="give the name of a file in it")
    if path.exists() and not force:
        raise OutputError(f"`{path}` exists already", slug="file-exists", hint="use --force to overwrite it")


def write(path: Path, produce: Callable[[BinaryIO], None], *, force: bool) -> int:
    """Let `produce` write a file: beside its place first, then renamed, so that it is whole or not there.

    Returns:
        The size of the file in bytes.

    Raises:
        OutputError: slug `file-exists`; slug `cannot-write`, where the disk is full or the place is forbidden.
    """
    check_free(path, force=force)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as handle:
                produce(handle)
            size = beside.stat().st_size
            beside.replace(path)
        except BaseException:
            with suppress(OSError):  # what went wrong first is what counts
                beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        said = f"`{path}` cannot be written: {_reason(error)}"
        raise OutputError(said, slug="cannot-write", hint=_hint(error)) from error
    return size


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _hint(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "make room there, or write somewhere else with -o"
    return "choose another place with -o"
