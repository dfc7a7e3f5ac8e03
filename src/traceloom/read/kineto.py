"""Kineto traces of any version and vendor: one file to one Trace."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from traceloom.model import Trace
from traceloom.read import spill
from traceloom.read.assemble import File, assemble
from traceloom.read.columns import Columns
from traceloom.read.damage import Damage
from traceloom.read.document import Document
from traceloom.read.ondisk import SCRATCH
from traceloom.read.source import open_input, text_pieces

_LARGE = 4 << 20


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
    damage = Damage()
    columns = Columns(damage)
    # Until glibc has seen a large block freed, it hands memory back at once, and every slice faults its pages in again.
    bytes(_LARGE)
    try:
        with open_input(path) as stream:
            if _size(stream) >= spill.SPILL_BYTES:
                columns.spill = spill.Spill()
            document = Document(partial(text_pieces, stream, damage, step), damage, str(path))
            part = None
            for part in document.slices():
                columns.add(part)
                if columns.spill is None and document.size >= spill.SPILL_BYTES:
                    columns.spill = spill.Spill()
        file = File(str(path), document.metadata, document.size, tuple(damage.notices()), capture)
        del document, part
        return assemble(columns, file)
    finally:
        if columns.spill is not None:
            columns.spill.close()
            SCRATCH.clear()


def _size(stream: BinaryIO) -> int:
    """Bytes of a file as it is on disk; 0 of what is none."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
