"""A file is decoded on other cores while this process loads its libraries, which takes as long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from traceloom.read.together import Helpers, helpers
from traceloom.storage.cache import Cache, Seen

_LEAST = 1 << 17  # bytes of a file: less is decoded at once
_LEAD = 29_000_000  # bytes of text that are decoded until the libraries are loaded

_running: dict[Path, tuple[Helpers, Seen]] = {}


@contextlib.contextmanager
def decoding(paths: Sequence[str | Path], cache: Cache | None) -> Iterator[None]:
    """Decode the largest of these files beside what is done inside; `taken` has it then.

    Args:
        paths: What the user gave. Whether it is a trace at all is for the reader to say.
        cache: What it holds is not decoded.
    """
    path = max(map(Path, paths), key=_size, default=Path())
    if _size(path) < _LEAST or "polars" in sys.modules:
        yield
        return
    if cache:
        entry = cache.entry(path, None)
        # It must not hold the file, and must see it change from now on.
        if entry is None or not entry.settled or entry.exists():
            yield
            return
    with contextlib.suppress(OSError):  # the reader will say why it cannot be read
        seen = Seen.now(path)
        if helping := helpers(path, lead=_LEAD):
            _running[path] = helping, seen
    try:
        yield
    finally:
        if unwanted := _running.pop(path, None):
            unwanted[0].stop()


def taken(path: str | Path) -> Helpers | None:
    """Who decodes a file, if that began ahead, nobody took it yet and the file is still the same."""
    helping, seen = _running.pop(Path(path), (None, None))
    if helping is None or seen is None:
        return None
    with contextlib.suppress(OSError):
        if Seen.now(Path(path)).stamp == seen.stamp:
            return helping
    helping.stop()
    return None


def _size(path: Path) -> int:
    """Bytes of a file; 0 of what is none."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
