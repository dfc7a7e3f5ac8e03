"""A read trace on disk: one Arrow file per frame, and a JSON head; used by the cache and between processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from traceloom.model import Meta, Notice, Trace
from traceloom.model.schema import SCHEMAS
from traceloom.read import mapped, spill

_HEAD = "trace.json"
_FORMAT = 1
PART = 1 << 20  # rows of a very large frame that are read at once


def save(trace: Trace, folder: Path, *, compressed: bool = True) -> None:
    """Write a trace into an existing folder; the head comes last, so that a folder with a head is whole."""
    for name, frame in trace.frames().items():
        if frame.height:
            frame.write_ipc(folder / f"{name}.arrow", compression="lz4" if compressed else "uncompressed")
    head = {
        "format": "traceloom-trace",
        "version": _FORMAT,
        "meta": asdict(trace.meta),
        "notices": [asdict(notice) for notice in trace.notices],
        "rows": {name: frame.height for name, frame in trace.frames().items()},
    }
    (folder / _HEAD).write_text(json.dumps(head), encoding="utf-8")


def saved(folder: Path) -> Trace:
    """Read a trace back.

    Raises:
        ValueError, OSError, polars.exceptions.PolarsError: The folder is not whole, or damaged.
    """
    head = json.loads((folder / _HEAD).read_text(encoding="utf-8"))
    if head.get("version") != _FORMAT:
        raise ValueError(f"format {head.get('version')} is not {_FORMAT}")
    meta = _meta(head["meta"])
    read = _frames_on_disk if meta.file_bytes >= spill.SPILL_BYTES else _frames
    empty = {name: pl.DataFrame(schema=SCHEMAS[name]) for name in SCHEMAS}
    frames = empty | read(folder, {name: rows for name, rows in head["rows"].items() if rows and name in SCHEMAS})
    notices = tuple(Notice(**notice) for notice in head["notices"])
    return Trace(meta=meta, notices=notices, **frames)


def _frames(folder: Path, rows: dict[str, int]) -> dict[str, pl.DataFrame]:
    """All frames at once, which takes half as long as one after the other."""
    read = pl.collect_all([pl.scan_ipc(folder / f"{name}.arrow") for name in rows])
    frames = dict(zip(rows, read, strict=True))
    for name, frame in frames.items():
        if frame.height != rows[name] or frame.schema != SCHEMAS[name]:
            raise ValueError(f"frame {name} is not as its head says")
    return frames


def _frames_on_disk(folder: Path, rows: dict[str, int]) -> dict[str, pl.DataFrame]:
    return {name: _frame_on_disk(folder, name, count) for name, count in rows.items()}


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


def _meta(values: dict[str, Any]) -> Meta:
    known = {field.name for field in fields(Meta)}
    return Meta(**{key: value for key, value in values.items() if key in known})
