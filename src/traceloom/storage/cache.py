"""The cache of what was read: by content and reader version, bounded, safe among processes.

An entry is a folder named by the digest of the file's content, of the reader's own code and of this rank's part of
capture.json. An index by path, size and times saves reading the content again. Entries are made beside and renamed; one
that cannot be read is thrown away and made again. A trace is kept under the content that was there before it was
decoded, and only where the file is still the same afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from traceloom.files import open_regular
from traceloom.leaving import undone_on_leaving

T = TypeVar("T")
CAP_BYTES = 10 * 10**9
_READER = ("read", "model", "storage")  # packages of which the code decides what an entry holds
_PIECE = 1 << 22
# A file that is written twice within one tick of its file system's clock has the same times after both. Ticks are up to
# two seconds long; younger files are known by their content alone.
_TICK_NS = 2 * 10**9


def root() -> Path:
    """The cache directory: `TRACELOOM_CACHE_DIR`, else the user's cache directory."""
    override = os.environ.get("TRACELOOM_CACHE_DIR")
    if override:
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("traceloom", appauthor=False))


class Seen(NamedTuple):
    """A file as it was at a moment.

    Attributes:
        stamp: Where it lies, its size and its times.
        settled: Whether every change after that moment changes its stamp.
    """

    stamp: tuple[int, ...]
    settled: bool

    @classmethod
    def now(cls, path: Path) -> Seen:
        """The file as it is now.

        Raises:
            OSError: It is not there, or it is a pipe or a device, which can be read but once.
        """
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        about = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return cls(about, max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - _TICK_NS)


class Cache:
    """The cache of read traces.

    Args:
        folder: Where it lies; made when first needed.
        cap_bytes: Its size is kept below; the entries unused for longest go first.
    """

    def __init__(self, folder: Path | None = None, cap_bytes: int = CAP_BYTES) -> None:
        self._folder = folder or root()
        self._cap_bytes = cap_bytes

    def entry(self, path: Path, capture: dict[str, Any] | None) -> Entry | None:
        """The place of a file's trace; None of a file that cannot be read, or that changes while it is.

        Args:
            path: The file.
            capture: This rank's part of capture.json, which is read with it.
        """
        try:
            seen = Seen.now(path)
            # The digest of the content, from the index if the file is listed there.
            listed = json.dumps([str(path.resolve()), *seen.stamp]).encode()
            noted = self._folder / "index" / hashlib.blake2b(listed, digest_size=20).hexdigest()
            content = ""
            if seen.settled:
                with contextlib.suppress(OSError, ValueError), open_regular(noted) as file:
                    content = file.read(41).decode("ascii")
            if len(content) != 40:
                content = digest(path)
                if Seen.now(path).stamp != seen.stamp:
                    return None
                if seen.settled:
                    with contextlib.suppress(OSError):
                        noted.parent.mkdir(parents=True, exist_ok=True)
                        written = noted.with_name(f".{noted.name}-{os.getpid()}")
                        written.write_text(content, encoding="ascii")
                        written.replace(noted)
        except OSError:
            return None
        about = hashlib.blake2b(digest_size=20)
        about.update(content.encode())
        about.update(reader_version().encode())
        about.update(json.dumps(capture, sort_keys=True).encode())
        return Entry(self._folder / "traces" / about.hexdigest(), path, seen, content)

    def prune(self) -> None:
        """Drop the entries unused for longest until the rest fits."""
        prune(self._folder / "traces", self._cap_bytes)


class Entry:
    """The place of one file's trace.

    Attributes:
        damaged: What was there could not be used, and has been thrown away.
    """

    def __init__(self, folder: Path, path: Path, seen: Seen, content: str) -> None:
        self._folder = folder
        self._path = path
        self._seen = seen
        self._content = content
        self.damaged = False

    @property
    def settled(self) -> bool:
        """Whether every change of the file will be seen from its times and its size."""
        return self._seen.settled

    def exists(self) -> bool:
        """Whether the file was read before."""
        return self._folder.is_dir()

    def get(self, read: Callable[[Path], T]) -> T | None:
        """What `read` makes of the entry's folder, if the file was read before."""
        import polars as pl

        if not os.path.lexists(self._folder):
            return None
        try:
            content = read(self._folder)
        # Whatever is wrong with it, it can be made again; on damaged columns Polars panics, which is no `Exception`.
        except (Exception, pl.exceptions.PanicException):  # noqa: BLE001
            self.damaged = True
            _remove(self._folder)
            return None
        with contextlib.suppress(OSError):
            os.utime(self._folder)
        return content

    def put(self, write: Callable[[Path], object]) -> None:
        """Keep what `write` puts into a folder, if the file is still what it was; write errors are ignored."""
        import polars as pl

        with contextlib.suppress(OSError, ValueError, pl.exceptions.PolarsError):
            if not self.unchanged():
                return
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            made = self._folder.with_name(f".making-{os.urandom(8).hex()}")
            with undone_on_leaving(partial(_remove, made)):
                try:
                    made.mkdir(mode=0o700)
                    write(made)
                    made.rename(self._folder)  # fails where another process was faster, whose entry is as good
                finally:
                    _remove(made)

    def unchanged(self) -> bool:
        """Whether the file is what it was when the entry was asked for.

        Raises:
            OSError: It cannot be read any more.
        """
        if Seen.now(self._path).stamp != self._seen.stamp:
            return False
        return self._seen.settled or digest(self._path) == self._content


def prune(folder: Path, cap_bytes: int) -> None:
    """Drop the entries of a folder unused for longest until the rest fits; and what a killed process left half made."""
    entries = []
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                size = sum(file.lstat().st_size for file in entry.rglob("*"))
                entries.append((entry.stat().st_mtime, size, entry))
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= cap_bytes:
            return
        _remove(entry)
        total -= size


def digest(path: Path) -> str:
    """Digest of a file's content, 40 hexadecimal digits."""
    content = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            content.update(piece)
    return content.hexdigest()


@once
def reader_version() -> str:
    """Changes with the reader's code, so that no entry of another version is ever used."""
    about = hashlib.blake2b(digest_size=20)
    package = Path(__file__).parents[1]
    for file in sorted(file for part in _READER for file in (package / part).rglob("*.py")):
        about.update(str(file.relative_to(package)).encode())
        about.update(file.read_bytes())
    return about.hexdigest()


def _remove(entry: Path) -> None:
    """Throw away whatever lies there."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()
