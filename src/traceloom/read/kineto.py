"""Kineto traces of any version and vendor: one file to one Trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceloom.model import Trace
from traceloom.read import ahead
from traceloom.read.assemble import File, assemble
from traceloom.read.decoding import decode
from traceloom.read.together import decode_with, helpers


def read_kineto(
    path: str | Path,
    *,
    capture: dict[str, Any] | None = None,
    step: Callable[[int, int], None] | None = None,
    processes: int | None = None,
) -> Trace:
    """Read one Kineto trace; gzip or not, whole or damaged.

    Args:
        path: The file; `-` is standard input.
        capture: This rank's part of capture.json, where there is one.
        step: Called now and then with (bytes read from the file, bytes of text).
        processes: How many may decode it at once; all cores if None, where it is worth that.

    Returns:
        The trace; what was repaired or lost is in its notices.

    Raises:
        InputError: The file cannot be read or is no Kineto trace at all.
    """
    helping = ahead.taken(path)
    if helping is None and processes != 1 and Path(path).is_file():
        with contextlib.suppress(OSError):  # `decode` says why it cannot be read
            helping = helpers(Path(path), processes)
    decoded = decode(path, step) if helping is None else decode_with(helping, path, step)
    try:
        notices = tuple(decoded.damage.notices())
        return assemble(decoded.columns, File(str(path), decoded.metadata, decoded.size, notices, capture))
    finally:
        decoded.columns.close()
