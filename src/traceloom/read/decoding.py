"""From the text of a Kineto file to columns: all that can be done before Polars is loaded."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from traceloom.model.notice import Notice
from traceloom.read import spill
from traceloom.read.columns import Columns
from traceloom.read.damage import Damage
from traceloom.read.document import Document
from traceloom.read.source import open_input, text_pieces

_LARGE = 4 << 20


class Decoded(Struct, frozen=True):
    """What a file holds.

    Attributes:
        columns: All entries of `traceEvents`; to be closed.
        metadata: Top-level entries other than that.
        size: Bytes of text.
        notices: What was repaired or lost.
    """

    columns: Columns
    metadata: dict[str, Any]
    size: int
    notices: tuple[Notice, ...]


def decode(path: str | Path, step: Callable[[int, int], None] | None = None) -> Decoded:
    """Decode a file; gzip or not, whole or damaged.

    Args:
        path: The file; `-` is standard input.
        step: Called now and then with (bytes read from the file, bytes of text).

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
            for part in document.slices():
                columns.add(part)
                if columns.spill is None and document.size >= spill.SPILL_BYTES:
                    columns.spill = spill.Spill()
    except BaseException:
        columns.close()
        raise
    return Decoded(columns, document.metadata, document.size, tuple(damage.notices()))


def _size(stream: BinaryIO) -> int:
    """Bytes of a file as it is on disk; 0 of what is none."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
