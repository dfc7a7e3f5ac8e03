"""A read trace on disk: one Arrow file per frame, and a JSON head; used by the cache and between processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import polars as pl
from isal.isal_zlib import crc32
from msgspec import Struct

from traceloom.files import open_regular
from traceloom.model import Meta, Notice, Trace
from traceloom.model.schema import SCHEMAS
from traceloom.storage import mapped, spill

_HEAD = "trace.json"
_FORMAT = 2
_PIECE = 1 << 20
PART = 1 << 20  # rows of a very large frame that are read at once


class _Head(Struct):
    """What `trace.json` holds; `files` are bytes and checksum of each frame's file."""

    version: int
    meta: Meta
    notices: list[Notice]
    rows: dict[str, int]
    files: dict[str, tuple[int, int]]


def save(trace: Trace, folder: Path, *, kept: bool = True) -> None:
    """Write a trace into an existing folder; the head comes last, so that a folder with a head is whole.

    Args:
        trace: The trace.
        folder: Where to.
        kept: It is compressed, and has checksums; else it is read back at once, and gone.
    """
    rows = {name: frame.height for name, frame in trace.frames().items()}
    files = {}
    for name, frame in trace.frames().items():
        if frame.height:
            file = folder / f"{name}.arrow"
            frame.write_ipc(file, compression="lz4" if kept else "uncompressed")
            if kept:
                files[name] = _checksum(file)
    head = {
        "version": _FORMAT,
        "meta": asdict(trace.meta),
        "notices": [asdict(notice) for notice in trace.notices],
        "rows": rows,
        "files": files,
    }
    text = json.dumps(head).encode()
    (folder / _HEAD).write_bytes(text + b"\n%08x" % crc32(text))


def saved(folder: Path, *, kept: bool = True) -> Trace:
    """Read a trace back.

    Args:
        folder: Where it is.
        kept: Anything may have happened to it since it was written: look at all checksums.

    Raises:
        Exception: The folder is not whole, or damaged.
    """
    with open_regular(folder / _HEAD) as file:
        text, _, checksum = file.read().rpartition(b"\n")
    if checksum != b"%08x" % crc32(text):
        raise ValueError("the head is not as it was written")
    values = json.loads(text)
    if kept:
        head = msgspec.convert(values, _Head)
        for name in head.rows.keys() & SCHEMAS.keys():
            if head.rows[name] and _checksum(folder / f"{name}.arrow") != head.files[name]:
                raise ValueError(f"frame {name} is not as it was written")
    else:
        notices = [Notice(**notice) for notice in values["notices"]]
        head = _Head(values["version"], Meta(**values["meta"]), notices, values["rows"], {})
    if head.version != _FORMAT:
        raise ValueError(f"format {head.version} is not {_FORMAT}")
    rows = {name: count for name, count in head.rows.items() if count and name in SCHEMAS}
    if head.meta.file_bytes >= spill.SPILL_BYTES:
        frames = {name: _frame_on_disk(folder, name, count) for name, count in rows.items()}
    else:  # all at once, which takes half as long as one after the other
        read = pl.collect_all([pl.scan_ipc(folder / f"{name}.arrow") for name in rows])
        frames = dict(zip(rows, read, strict=True))
        for name, frame in frames.items():
            if frame.height != rows[name] or frame.schema != SCHEMAS[name]:
                raise ValueError(f"frame {name} is not as its head says")
    empty = {name: pl.DataFrame(schema=SCHEMAS[name]) for name in SCHEMAS}
    return Trace(meta=head.meta, notices=tuple(head.notices), **(empty | frames))


def _checksum(path: Path) -> tuple[int, int]:
    """Bytes of a file, and a checksum of them."""
    size = checksum = 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE):
            size, checksum = size + len(piece), crc32(piece, checksum)
    return size, checksum


def _frame_on_disk(folder: Path, name: str, rows: int) -> pl.DataFrame:
    """One frame, column by column and part by part into files of this process."""
    stored = pl.scan_ipc(folder / f"{name}.arrow")
    schema = stored.collect_schema()
    if schema != SCHEMAS[name] or stored.select(pl.len()).collect().item() != rows:
        raise ValueError(f"frame {name} is not as its head says")

    def parts(column: str) -> Iterator[pl.Series]:
        for low in range(0, rows, PART):
            yield stored.select(column).slice(low, PART).collect()[column]

    columns = [mapped.gathered(schema[column], rows, partial(parts, column)).alias(column) for column in schema]
    return pl.DataFrame(columns)
