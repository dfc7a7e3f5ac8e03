"""Caches keyed by the content of the inputs and the code: parsed traces (`Cache`) and report
documents (`DocumentCache`), both with a size cap.

The entry of a trace is a folder named by the digest of the file's content, of the reader's own code
and of this rank's part of capture.json. An index by path, size and times saves reading the content
again. Entries are written next to their final place and renamed; one that cannot be read is deleted
and made again. A trace is stored under the content from before it was decoded, and only if the file
is unchanged afterwards.

The entry of documents is named by the inputs as the user wrote them, the path, size and times of
every file that they stand for (for a capture: of every file in it), the code of the package and the
other choices that determine the result. An input that could change unnoticed (standard input, a
file written a moment ago) has no entry.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cache as once, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from traceloom.errors import InputError, OutputError
from traceloom.system.files import (
    MAX_CACHE_BYTES as FILES_CAP_BYTES,
    discard,
    evict,
    find_cache_directory,
    open_regular,
    write,
)
from traceloom.system.process import clean_up_on_exit

T = TypeVar("T")
_READER_PACKAGES = (
    "formats",
    "system",
    "trace",
)  # packages whose code determines the content of an entry
_CHUNK_BYTES = 1 << 22
# A file that is written twice within one tick of its file system's clock has the same times after
# both writes. Ticks are up to two seconds long; younger files are identified by content alone.
_CLOCK_GRANULARITY_NS = 2 * 10**9


class FileStamp(NamedTuple):
    """The state of a file at one moment.

    Attributes:
        stamp: Device, inode, size and times.
        settled: Whether every change after that moment changes the stamp.
    """

    stamp: tuple[int, ...]
    settled: bool

    @classmethod
    def now(cls, path: Path) -> FileStamp:
        """Returns the current stamp of a file.

        Raises:
            OSError: It does not exist, or it is a pipe or a device, which can be read only once.
        """
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        identity = (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
        return cls(
            identity,
            max(status.st_mtime_ns, status.st_ctime_ns) < time.time_ns() - _CLOCK_GRANULARITY_NS,
        )


class Cache:
    """The cache of parsed traces.

    Args:
        folder: Its folder; created on first use.
        cap_bytes: Max size; least recently used entries are evicted first.
    """

    def __init__(self, folder: Path | None = None, cap_bytes: int = FILES_CAP_BYTES) -> None:
        self._folder = folder or find_cache_directory()
        self._cap_bytes = cap_bytes

    def entry(self, path: Path, capture: dict[str, Any] | None) -> CacheEntry | None:
        """Returns the entry of a file; None if the file cannot be read or changes meanwhile.

        Args:
            path: The file.
            capture: This rank's part of capture.json, which is part of the key.
        """
        try:
            file_stamp = FileStamp.now(path)
            # The digest of the content comes from the index if the file is listed there.
            index_key = json.dumps([str(path.resolve()), *file_stamp.stamp]).encode()
            index_path = (
                self._folder / "index" / hashlib.blake2b(index_key, digest_size=20).hexdigest()
            )
            content = ""
            if file_stamp.settled:
                with contextlib.suppress(OSError, ValueError), open_regular(index_path) as file:
                    content = file.read(41).decode("ascii")
            if len(content) != 40:
                content = compute_digest(path)
                if FileStamp.now(path).stamp != file_stamp.stamp:
                    return None
                if file_stamp.settled:
                    with contextlib.suppress(OSError):
                        index_path.parent.mkdir(parents=True, exist_ok=True)
                        written = index_path.with_name(f".{index_path.name}-{os.getpid()}")
                        written.write_text(content, encoding="ascii")
                        written.replace(index_path)
        except OSError:
            return None
        digest = hashlib.blake2b(digest_size=20)
        digest.update(content.encode())
        digest.update(compute_reader_version().encode())
        digest.update(json.dumps(capture, sort_keys=True).encode())
        return CacheEntry(self._folder / "traces" / digest.hexdigest(), path, file_stamp, content)

    def prune(self) -> None:
        """Evicts the least recently used entries until the rest fits."""
        evict(self._folder / "traces", self._cap_bytes)


class CacheEntry:
    """The entry of one file's trace, which may not exist yet.

    Attributes:
        damaged: Whether an unusable entry was found and deleted.
    """

    def __init__(self, directory: Path, path: Path, file_stamp: FileStamp, content: str) -> None:
        self._folder = directory
        self._path = path
        self._seen = file_stamp
        self._content = content
        self.damaged = False

    @property
    def settled(self) -> bool:
        """Whether every change of the file changes its times or size."""
        return self._seen.settled

    def exists(self) -> bool:
        return self._folder.is_dir()

    def get(self, read: Callable[[Path], T]) -> T | None:
        """Returns the result of `read` on the entry's folder; None if there is no usable entry."""
        import polars as pl

        if not os.path.lexists(self._folder):
            return None
        try:
            content = read(self._folder)
        # Any bad entry can be made again; on damaged columns Polars panics, which is not an
        # `Exception`.
        except (Exception, pl.exceptions.PanicException):  # noqa: BLE001
            self.damaged = True
            discard(self._folder)
            return None
        with contextlib.suppress(OSError):
            os.utime(self._folder)
        return content

    def put(self, write: Callable[[Path], object]) -> None:
        """Stores what `write` puts into a folder, if the file is still unchanged; write errors are
        ignored.
        """
        import polars as pl

        with contextlib.suppress(OSError, ValueError, pl.exceptions.PolarsError):
            if not self.unchanged():
                return
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            temporary_directory = self._folder.with_name(f".making-{os.urandom(8).hex()}")
            with clean_up_on_exit(partial(discard, temporary_directory)):
                try:
                    temporary_directory.mkdir(mode=0o700)
                    write(temporary_directory)
                    temporary_directory.rename(
                        self._folder
                    )  # fails if another process was faster; its entry is as good
                finally:
                    discard(temporary_directory)

    def unchanged(self) -> bool:
        """Returns whether the file is as it was when the entry was looked up.

        Raises:
            OSError: It cannot be read any more.
        """
        if FileStamp.now(self._path).stamp != self._seen.stamp:
            return False
        return self._seen.settled or compute_digest(self._path) == self._content


def compute_digest(path: Path) -> str:
    """Returns the digest of a file's content, 40 hexadecimal digits."""
    content = hashlib.blake2b(digest_size=20)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            content.update(chunk)
    return content.hexdigest()


@once
def compute_reader_version() -> str:
    """Returns a digest of the reader's code, so that no entry of another version is ever used."""
    digest = hashlib.blake2b(digest_size=20)
    package = Path(__file__).parents[1]
    for file in sorted(
        file for part in _READER_PACKAGES for file in (package / part).rglob("*.py")
    ):
        digest.update(str(file.relative_to(package)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


MAX_ENTRY_BYTES = 1 << 26  # of one document
MAX_CACHE_BYTES = 10**9  # of all documents


class DocumentCache:
    """The cached documents of some inputs.

    Args:
        paths: The inputs.
        extra_files: Other files that affect the documents.
        choices: The options that affect them.
        list_files: Returns every file that the inputs stand for.
    """

    def __init__(
        self,
        paths: Iterable[str],
        extra_files: Iterable[str],
        choices: str,
        list_files: Callable[[Sequence[str]], Sequence[Path]],
    ) -> None:
        self._paths, self._beside, self._about = tuple(map(str, paths)), tuple(extra_files), choices
        self._list_files = list_files
        self._key = self._digest()

    def _digest(self) -> str:
        """Returns a digest of the inputs, the code and the choices; empty if the inputs could
        change unnoticed.
        """
        if "-" in self._paths:
            return ""
        try:
            files = self._list_files(self._paths)
            file_stamps = {path: FileStamp.now(path) for path in (*files, *map(Path, self._beside))}
            stamps = [(str(path.resolve()), now.stamp) for path, now in file_stamps.items()]
        except (InputError, OSError, ValueError):  # the reader will report the error
            return ""
        if not all(
            now.settled for now in file_stamps.values()
        ):  # a change within the clock tick would go unnoticed
            return ""
        text = json.dumps([_list_code_files(), self._paths, stamps, self._about])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()

    @property
    def _folder(self) -> Path:
        return find_cache_directory() / "reports" / self._key

    def get(self, name: str) -> Any:
        """Returns a cached document; None if there is none for these inputs or it cannot be
        read.
        """
        if self._key:
            with (
                contextlib.suppress(OSError, ValueError),
                open_regular(self._folder / name) as file,
            ):
                document = json.loads(file.read())
                with contextlib.suppress(OSError):  # a cache that may only be read
                    os.utime(self._folder)
                return document if isinstance(document, dict) else None
        return None

    def put(self, name: str, content: bytes) -> None:
        """Stores a document, as JSON, if the inputs are still unchanged; write errors are
        ignored.
        """
        if not self._key or len(content) > MAX_ENTRY_BYTES or self._digest() != self._key:
            return
        with contextlib.suppress(OSError, OutputError):
            write(self._folder / name, lambda out: out.write(content), force=True, private=True)
            evict(self._folder.parent, MAX_CACHE_BYTES)


@cache
def _list_code_files() -> list[tuple[str, int, int]]:
    """Returns path, size and time of every source file of the package, as its version."""
    package = Path(__file__).parents[1]
    files = sorted(path for path in package.rglob("*") if path.suffix in {".py", ".json"})
    return [
        (str(file.relative_to(package)), (status := file.stat()).st_size, status.st_mtime_ns)
        for file in files
    ]
