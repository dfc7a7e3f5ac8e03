"""Writing the files of an anonymised run: all of them beside their place first, then all in place, or none."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from isal import igzip

from traceloom import files
from traceloom.errors import OutputError
from traceloom.leaving import undone_on_leaving

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
        self.folder = files.beside_of(target)
        self._until_done = contextlib.ExitStack()

    def __enter__(self) -> Staging:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        self._until_done.enter_context(undone_on_leaving(partial(shutil.rmtree, self.folder, ignore_errors=True)))
        with files.reported(self.target):
            self.folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._until_done.close()
        if isinstance(error, OSError):
            with files.reported(self.target):
                raise error

    def path(self, name: str) -> Path:
        """Where a file is made."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, name: str | None = None) -> None:
        """Put everything in its place."""
        if self._single and name is not None:
            files.keep_mode(self.target, self.folder / name)
            (self.folder / name).replace(self.target)
            return
        files.keep_mode(self.target, self.folder)
        files.replace_directory(self.folder, self.target)


def check_free(target: Path, *, single: bool, force: bool) -> None:
    """Refuse a place that is taken, before any work is done."""
    if single:
        files.check_free(target, force=force)
        return
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        kind = "symbolic link" if target.is_symlink() else "file"
        raise OutputError(f"`{target}` is a {kind}", slug="cannot-write", hint="several files need a directory")
    files.check_no_input(target)
    existing = [path for path in target.rglob("*") if not path.is_dir()]
    if existing and not force:
        raise OutputError(f"`{target}` is not empty", slug="file-exists", hint="use --force to replace what is in it")
    foreign = next((path for path in existing if not _OURS.fullmatch(path.name)), None)
    if foreign is not None:
        raise OutputError(
            f"`{target}` holds `{foreign.name}`, which is no file that this verb writes, and would be lost",
            slug="cannot-write",
            hint="give a directory of its own with -o",
        )


def joined(parts: list[Path], target: Path) -> None:
    """One file of several, which are removed; members of gzip may stand one behind the other."""
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, _PIECE)
            part.unlink()
