"""Output files: never half-written, never overwritten unasked."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
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


def check_directory(path: Path, ours: Sequence[str], *, force: bool) -> None:
    """Refuse a place where a directory of files cannot go before any work is done.

    Args:
        path: The directory.
        ours: Patterns of the names of such files; with `force`, a directory that holds nothing else may be replaced.
        force: Replace.

    Raises:
        OutputError: slug `file-exists` without `force`; slug `cannot-write`: no directory, or it holds other files.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise OutputError(f"`{path}` is a file, not a directory", slug="cannot-write", hint="choose another name")
    there = sorted(path.iterdir())
    if there and not force:
        raise OutputError(f"`{path}` exists already", slug="file-exists", hint="use --force to overwrite it")
    if other := next((file for file in there if file.is_dir() or not any(file.match(kind) for kind in ours)), None):
        raise OutputError(
            f"`{path}` holds other things, as {other.name}, and is not replaced",
            slug="cannot-write",
            hint="choose another directory",
        )


def write_directory(path: Path, produce: Callable[[Path], None], ours: Sequence[str], *, force: bool) -> list[Path]:
    """Let `produce` fill a directory: beside its place first, then renamed, so that it is whole or not there.

    Args:
        path: The directory.
        produce: Writes files into the directory that it is given.
        ours: As for `check_directory`.
        force: Replace a directory that holds nothing but such files.

    Returns:
        The files, sorted by name.

    Raises:
        OutputError: slug `file-exists`; slug `cannot-write`.
    """
    check_directory(path, ours, force=force)
    beside, old = (path.with_name(f".{path.name}.{os.getpid()}.{end}") for end in ("partial", "old"))
    try:
        beside.mkdir(parents=True)
        try:
            produce(beside)
            if path.exists():
                path.rename(old)
            beside.rename(path)
        except BaseException:
            with suppress(OSError):  # what went wrong first is what counts
                if old.exists() and not path.exists():
                    old.rename(path)
            raise
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        said = f"`{path}` cannot be written: {_reason(error)}"
        raise OutputError(said, slug="cannot-write", hint=_hint(error)) from error
    return sorted(path.iterdir())


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _hint(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "make room there, or write somewhere else with -o"
    return "choose another place with -o"
