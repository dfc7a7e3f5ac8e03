"""From the text of a Kineto file to columns: all that can be done before Polars is loaded."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from traceloom.read.columns import Columns
from traceloom.read.damage import Damage
from traceloom.read.document import WHOLE, Document, TextPart
from traceloom.read.source import open_input, text_pieces
from traceloom.storage import spill

_LARGE = 4 << 20
Step = Callable[[int, int], None]


class Decoded(Struct):
    """What a file holds, or a part of it.

    Attributes:
        columns: All entries of `traceEvents`; to be closed.
        metadata: Top-level entries other than that.
        damage: What was repaired or lost.
        size: Bytes of text.
        began: Byte of the text at which the part begins; None where it has no beginning.
        left_at: Byte of the text at which it ends; None where it goes to the end.
    """

    columns: Columns
    metadata: dict[str, Any]
    damage: Damage
    size: int
    began: int | None
    left_at: int | None


def decode(
    path: str | Path,
    step: Step | None = None,
    part: TextPart = WHOLE,
    taken_over: Callable[[int], bool] = lambda _: True,
) -> Decoded:
    """Decode a file in this process; gzip or not, whole or damaged.

    Args:
        path: The file; `-` is standard input.
        step: Called now and then with (bytes read from the file, bytes of text).
        part: Which part of it.
        taken_over: See `Document`.

    Raises:
        InputError: The file cannot be read or is no Kineto trace at all.
    """
    damage = Damage()
    columns = Columns(damage)
    # Until glibc has seen a large block freed, it hands memory back at once, and every slice faults its pages in again.
    bytes(_LARGE)
    try:
        with open_input(path) as stream:
            with contextlib.suppress(OSError):  # what is no file has no size
                status = os.fstat(stream.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_size >= spill.SPILL_BYTES:
                    columns.spill = spill.Spill()
            document = Document(partial(text_pieces, stream, damage, step), damage, str(path), part, taken_over)
            for chunk in document.slices():
                columns.add(chunk)
                if columns.spill is None and document.size >= spill.SPILL_BYTES:
                    columns.spill = spill.Spill()
    except BaseException:
        columns.close()
        raise
    return Decoded(columns, document.metadata, damage, document.size, document.began, document.left_at)
