"""A read trace on disk: one Arrow file per frame, and a JSON head; used by the cache and between processes."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import polars as pl

from traceloom.model import Meta, Notice, Trace
from traceloom.model.schema import SCHEMAS

_HEAD = "trace.json"
_FORMAT = 1


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
    frames = {name: _frame(folder, name, head["rows"][name]) for name in SCHEMAS}
    notices = tuple(Notice(**notice) for notice in head["notices"])
    return Trace(meta=_meta(head["meta"]), notices=notices, **frames)


def _frame(folder: Path, name: str, rows: int) -> pl.DataFrame:
    if not rows:
        return pl.DataFrame(schema=SCHEMAS[name])
    frame = pl.read_ipc(folder / f"{name}.arrow")
    if frame.height != rows or frame.schema != SCHEMAS[name]:
        raise ValueError(f"frame {name} is not as its head says")
    return frame


def _meta(values: dict[str, Any]) -> Meta:
    known = {field.name for field in fields(Meta)}
    return Meta(**{key: value for key, value in values.items() if key in known})
