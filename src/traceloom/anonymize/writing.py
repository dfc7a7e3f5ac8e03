"""Writing the files of an anonymised run: all of them beside their place first, then all in place, or none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

from isal import igzip

from traceloom import files
from traceloom.leaving import undone_on_leaving

ENDINGS = (".json", ".json.gz", ".et", ".et.gz")
"""Of a single file; other names are those of directories."""
OURS = r"(capture-\d+/)?(rank\d+|trace-\d+|workload\.\d+|capture|comm_groups)[\w.-]*\.(json|et)(\.gz)?"
"""What a directory of ours holds, as a regular expression."""
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
        if single:
            files.check_free(target, force=force)
        else:
            files.check_directory(target, OURS, force=force)
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


def joined(parts: list[Path], target: Path) -> None:
    """One file of several, which are removed; members of gzip may stand one behind the other."""
    with target.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, _PIECE)
            part.unlink()
