"""Writing the files of an anonymised run: all of them beside their place first, then all in place, or none."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from isal import igzip

from traceloom.errors import OutputError

_OURS = re.compile(r"(rank\d+|trace-\d+|workload\.\d+|capture|comm_groups)[\w.-]*\.(json|json\.gz|et|et\.gz)")
_LEVEL = 1
_PIECE = 1 << 20


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to write, compressed where its name ends in .gz; without the time and the name that gzip would add."""
    with path.open("wb") as plain:
        if path.name.endswith(".gz"):
            with igzip.IGzipFile("", "wb", compresslevel=_LEVEL, fileobj=plain, mtime=0) as packed:
                yield cast("BinaryIO", packed)
        else:
            yield plain


class Staging:
    """Files made beside the place where they will stand.

    Args:
        target: A directory, or a single file where `single`.
        single: The target is one file.
        force: What we wrote there before may be replaced.

    Raises:
        OutputError: slug `file-exists`: something is there; slug `cannot-write`: the place is forbidden.
    """

    def __init__(self, target: Path, *, single: bool, force: bool) -> None:
        self.target = target
        self._single = single
        check_free(target, single=single, force=force)
        self.folder = target.with_name(f".{target.name}.{os.getpid()}.partial")

    def __enter__(self) -> Staging:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise _failed(self.target, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise _failed(self.target, error) from error

    def path(self, name: str) -> Path:
        """Where a file is made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, name: str | None = None) -> None:
        """Put everything in its place."""
        if self._single and name is not None:
            (self.folder / name).replace(self.target)
            return
        aside = self.target.with_name(f".{self.target.name}.{os.getpid()}.old")
        if self.target.exists():
            self.target.rename(aside)
        try:
            self.folder.rename(self.target)
        except OSError:
            if aside.exists():
                aside.rename(self.target)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def check_free(target: Path, *, single: bool, force: bool) -> None:
    """Refuse a place that is taken, before any work is done."""
    if not target.exists():
        return
    if single:
        if target.is_dir():
            raise OutputError(f"`{target}` is a directory", slug="cannot-write", hint="give the name of a file in it")
        if not force:
            raise OutputError(f"`{target}` exists already", slug="file-exists", hint="use --force to overwrite it")
        return
    if not target.is_dir():
        raise OutputError(f"`{target}` is a file", slug="cannot-write", hint="several files need a directory")
    there = [path for path in target.rglob("*") if not path.is_dir()]
    if there and not force:
        raise OutputError(f"`{target}` is not empty", slug="file-exists", hint="use --force to replace what is in it")
    foreign = next((path for path in there if not _OURS.fullmatch(path.name)), None)
    if foreign is not None:
        raise OutputError(
            f"`{target}` holds `{foreign.name}`, which is no file that this verb writes, and would be lost",
            slug="cannot-write",
            hint="give a directory of its own with -o",
        )


def private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _failed(path, error) from error


def joined(parts: list[Path], target: Path) -> None:
    """One file of several, which are removed; members of gzip may stand one behind the other."""
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, _PIECE)
            part.unlink()


def _failed(path: Path, error: OSError) -> OutputError:
    reason = (error.strerror or str(error)).lower()
    return OutputError(
        f"`{path}` cannot be written: {reason}", slug="cannot-write", hint="choose another place with -o"
    )
