"""Kineto traces of any version and vendor: one file to one Trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceloom.model import Trace
from traceloom.read import ahead
from traceloom.read.assemble import File, assemble
from traceloom.read.decoding import decode


def read_kineto(
    path: str | Path, *, capture: dict[str, Any] | None = None, step: Callable[[int, int], None] | None = None
) -> Trace:
    """Read one Kineto trace; gzip or not, whole or damaged.

    Args:
        path: The file; `-` is standard input.
        capture: This rank's part of capture.json, where there is one.
        step: Called now and then with (bytes read from the file, bytes of text).

    Returns:
        The trace; what was repaired or lost stands in its notices.

    Raises:
        InputError: The file cannot be read or is no Kineto trace at all.
    """
    found = ahead.taken(path) or decode(path, step)
    try:
        return assemble(found.columns, File(str(path), found.metadata, found.size, found.notices, capture))
    finally:
        found.columns.close()
