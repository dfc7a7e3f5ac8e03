"""The cache of read traces: by content and reader version, bounded, safe among processes.

An entry is a folder named by the digest of the file's content, of the reader's own code and of this rank's part of
capture.json. An index by path, size and change time saves reading the content again. Entries are made beside and
renamed; one that cannot be read is thrown away and made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache as once
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traceloom.model import Trace

CAP_BYTES = 10 * 10**9
_PIECE = 1 << 22


def root() -> Path:
    """Where the cache lies: `TRACELOOM_CACHE_DIR`, else the user's cache directory."""
    given = os.environ.get("TRACELOOM_CACHE_DIR")
    if given:
        return Path(given)
    import platformdirs

    return Path(platformdirs.user_cache_dir("traceloom", appauthor=False))


class Cache:
    """The cache of read traces.

    Args:
        folder: Where it lies; made when first needed.
        cap_bytes: Its size is kept below; the entries unused for longest go first.
    """

    def __init__(self, folder: Path | None = None, cap_bytes: int = CAP_BYTES) -> None:
        self._folder = folder or root()
        self._cap_bytes = cap_bytes

    def holds(self, path: Path) -> bool:
        """Whether a file that is part of no capture was read before."""
        entry = self._entry(path, None)
        return entry is not None and entry.is_dir()

    def get(self, path: Path, capture: dict[str, Any] | None) -> Trace | None:
        """The trace of a file, if it was read before."""
        import polars as pl

        from traceloom.read import store

        entry = self._entry(path, capture)
        if entry is None or not entry.is_dir():
            return None
        try:
            trace = store.saved(entry)
        except (ValueError, KeyError, TypeError, OSError, pl.exceptions.PolarsError):
            shutil.rmtree(entry, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(entry)
        return _renamed(trace, path)

    def put(self, trace: Trace, path: Path, capture: dict[str, Any] | None) -> None:
        """Keep the trace of a file; a cache that cannot be written is left alone."""
        import polars as pl

        from traceloom.read import store

        entry = self._entry(path, capture)
        if entry is None:
            return
        with contextlib.suppress(OSError, pl.exceptions.PolarsError), self._beside(entry) as folder:
            store.save(trace, folder)
        self._prune()

    @contextlib.contextmanager
    def _beside(self, entry: Path) -> Iterator[Path]:
        """A new folder that takes the entry's name when it is whole."""
        entry.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=entry.parent))
        try:
            yield made
            made.rename(entry)  # fails where another process was faster, whose entry is as good
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def _entry(self, path: Path, capture: dict[str, Any] | None) -> Path | None:
        try:
            content = self._content(path)
        except OSError:
            return None
        about = hashlib.blake2b(digest_size=20)
        about.update(content.encode())
        about.update(reader_version().encode())
        about.update(json.dumps(capture, sort_keys=True).encode())
        return self._folder / "traces" / about.hexdigest()

    def _content(self, path: Path) -> str:
        """Digest of the content, from the index where size and change time are as they were."""
        status = path.stat()
        stamp = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]
        name = hashlib.blake2b(json.dumps(stamp).encode(), digest_size=20).hexdigest()
        noted = self._folder / "index" / name
        with contextlib.suppress(OSError):
            known = noted.read_text(encoding="ascii")
            if len(known) == 40:
                return known
        found = digest(path)
        with contextlib.suppress(OSError):
            noted.parent.mkdir(parents=True, exist_ok=True)
            written = noted.with_name(f".{name}-{os.getpid()}")
            written.write_text(found, encoding="ascii")
            written.replace(noted)
        return found

    def _prune(self) -> None:
        """Drop the entries unused for longest until the rest fits; and what a killed process left half made."""
        entries = []
        with contextlib.suppress(OSError):
            for entry in (self._folder / "traces").iterdir():
                with contextlib.suppress(OSError):
                    size = sum(file.stat().st_size for file in entry.iterdir())
                    entries.append((entry.stat().st_mtime, size, entry))
        total = sum(size for _, size, _ in entries)
        for _, size, entry in sorted(entries):
            if total <= self._cap_bytes:
                return
            shutil.rmtree(entry, ignore_errors=True)
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
    for file in sorted([*(package / "read").glob("*.py"), *(package / "model").glob("*.py")]):
        about.update(file.name.encode())
        about.update(file.read_bytes())
    return about.hexdigest()


def _renamed(trace: Trace, path: Path) -> Trace:
    """The same content may lie under another name."""
    from dataclasses import replace

    return replace(trace, meta=replace(trace.meta, path=str(path)))
