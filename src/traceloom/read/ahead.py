"""A file is decoded on other cores while this process loads its libraries, which takes as long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from traceloom.read.together import Helpers, helpers

if TYPE_CHECKING:
    from traceloom.read.cache import Cache

_LEAST = 1 << 17  # bytes of a file: less is decoded at once
_LEAD = 29_000_000  # bytes of text that are decoded until the libraries are loaded

_running: dict[Path, Helpers] = {}


@contextlib.contextmanager
def decoding(paths: Sequence[str | Path], cache: Cache | None) -> Iterator[None]:
    """Decode the largest of these files beside what is done inside; `taken` has it then.

    Args:
        paths: What the user gave. Whether it is a trace at all is for the reader to say.
        cache: What it holds is not decoded.
    """
    path = max(map(Path, paths), key=_size, default=Path())
    if _size(path) < _LEAST or "polars" in sys.modules or (cache and cache.holds(path)):
        yield
        return
    with contextlib.suppress(OSError):  # the reader will say why it cannot be read
        if helping := helpers(path, lead=_LEAD):
            _running[path] = helping
    try:
        yield
    finally:
        if unwanted := _running.pop(path, None):
            unwanted.stop()


def taken(path: str | Path) -> Helpers | None:
    """Who decodes a file, if that began ahead and nobody took it yet."""
    return _running.pop(Path(path), None)


def _size(path: Path) -> int:
    """Bytes of a file; 0 of what is none."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
