"""`NAME.graph`: a Graph in one file, a zip of one Parquet file per frame and `header.json`.

The header says format (`traceloom-graph`), version, rows per frame, and what a Graph holds beside its frames. Enum
columns are text in the file, so that any reader of Parquet understands them. Nothing is ever unpacked to the disk.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, get_args

import msgspec
import polars as pl

from traceloom import __version__, files
from traceloom.errors import InputError, InvariantError, newer_format, unreadable
from traceloom.model.graph import Graph, Stage
from traceloom.model.graph_schema import GRAPH_SCHEMAS
from traceloom.model.notice import Notice
from traceloom.plain_text import clean_json

FORMAT = "traceloom-graph"
VERSION = 1
ENDING = ".graph"
_HEADER = "header.json"
_HEADER_BYTES = 1 << 26
# Parquet is compressed already, so a zip makes nothing of ours smaller; whoever zips it anew gains little.
_MOST_UNZIPPED = 20
# A row takes tens of bytes in memory and at least some in the file, even where every column repeats itself.
_MOST_ROWS_PER_BYTE = 50
_FEW_ROWS = 1_000_000
_DAMAGE = (
    OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, OverflowError, zlib.error, InvariantError,
    msgspec.ValidationError,
    # Parquet that was changed can make the reader of Parquet panic, which is no ordinary exception.
    pl.exceptions.PolarsError, pl.exceptions.PanicException,
)  # fmt: skip
_NEVER_NULL = {
    "nodes": ("node", "kind", "name", "rank", "start_ns", "duration_ns", "work_ns", "residual_ns"),
    "edges": tuple(GRAPH_SCHEMAS["edges"]),
    "lanes": ("lane", "rank", "kind"),
    "communication": ("node",),
    "transfers": ("node",),
    "ranks": ("rank",),
}


def save(graph: Graph, path: str | Path, *, force: bool = False) -> int:
    """Write a graph, whole or not at all; returns the size of the file in bytes.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    header = {
        "format": FORMAT,
        "version": VERSION,
        "traceloom": __version__,
        "name": graph.name,
        "epoch_ns": graph.epoch_ns,
        "world_size": graph.world_size,
        "stage": graph.stage,
        "notices": [asdict(notice) for notice in graph.notices],
        "rows": {name: frame.height for name, frame in graph.frames().items()},
    }

    def pack(handle: BinaryIO) -> None:
        with zipfile.ZipFile(handle, "w", zipfile.ZIP_STORED) as archive:
            _add(archive, _HEADER, lambda member: member.write(json.dumps(header, indent=1).encode()))
            for name, frame in graph.frames().items():
                enums = [column for column, kind in frame.schema.items() if isinstance(kind, pl.Enum)]
                plain = frame.with_columns(pl.col(column).cast(pl.String) for column in enums)
                _add(archive, f"{name}.parquet", plain.write_parquet)

    return files.write(Path(path), pack, force=force)


def load(path: str | Path) -> Graph:
    """Read a graph that `save` wrote. `Graph.check` is not run, but columns, ids and references are right.

    Raises:
        InputError: `unreadable`; `not-a-graph`: another kind of file; `graph-damaged`: cut, or not as its header says;
            `newer-format`: written by a later version.
    """
    where = str(path)
    try:
        handle = files.open_input(path)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        with handle, zipfile.ZipFile(handle) as archive:
            members = archive.namelist()
            if _HEADER not in members:
                raise InputError("this is a zip archive, but not a saved graph", slug="not-a-graph", where=where)
            header, _ = clean_json(json.loads(_member(archive, _HEADER, _HEADER_BYTES)))
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise InputError("this is a zip archive, but not a saved graph", slug="not-a-graph", where=where)
            if header.get("version") != VERSION:
                raise newer_format("graph", header.get("version"), VERSION, where)
            expected = {_HEADER, *(f"{name}.parquet" for name in GRAPH_SCHEMAS)}
            if strange := sorted(set(members) - expected):
                raise ValueError(f"it holds `{strange[0]}`, which no graph has")
            if missing := sorted(expected - set(members)):
                raise ValueError(f"it lacks `{missing[0]}`")
            if len(members) > len(expected):
                raise ValueError("it holds a part twice")
            frames = {name: _frame(archive, name, header["rows"][name]) for name in GRAPH_SCHEMAS}
        name, stage, epoch, world = (header[key] for key in ("name", "stage", "epoch_ns", "world_size"))
        if stage not in get_args(Stage):
            raise ValueError(f"`{stage}` is no stage of a graph")
        if not (world is None or isinstance(world, int)) or not isinstance(epoch, int):
            raise TypeError("its header has no whole numbers where they belong")
        notices = msgspec.convert(header["notices"], tuple[Notice, ...])
        graph = Graph(**frames, name=str(name), epoch_ns=epoch, world_size=world, stage=stage, notices=notices)
        graph.check_columns()
    except zipfile.BadZipFile as error:
        with Path(path).open("rb") as opened:
            cut = opened.read(4) == b"PK\x03\x04"
        if cut:
            raise _damaged("its end is missing, or it was changed", where) from error
        raise InputError(
            "this is not a saved graph", slug="not-a-graph", where=where, hint="a graph is a zip archive"
        ) from error
    except _DAMAGE as error:
        raise _damaged(next(iter(str(error).splitlines()), type(error).__name__), where) from error
    return graph


def is_graph(path: Path) -> bool:
    """Whether a file is a saved graph, by its content."""
    try:
        with files.open_input(path) as handle, zipfile.ZipFile(handle) as archive:
            return _HEADER in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _add(archive: zipfile.ZipFile, name: str, produce: Callable[[io.BytesIO], Any]) -> None:
    member = io.BytesIO()
    produce(member)
    # A fixed date: the same graph gives the same file.
    archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), member.getbuffer())


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """A part of the archive, never more bytes than it says and than is credible."""
    info = archive.getinfo(name)
    if info.file_size > min(most, info.compress_size * _MOST_UNZIPPED + _HEADER_BYTES // 64):
        raise ValueError(f"`{name}` claims {info.file_size:,} bytes, made of {info.compress_size:,}")
    return archive.read(info)


def _frame(archive: zipfile.ZipFile, name: str, rows: int) -> pl.DataFrame:
    data = _member(archive, f"{name}.parquet", 1 << 40)
    height = pl.scan_parquet(io.BytesIO(data)).select(pl.len()).collect().item()
    if height != rows:
        raise ValueError(f"`{name}` has {height:,} rows, its header says {rows!r}")
    if height > max(_FEW_ROWS, len(data) * _MOST_ROWS_PER_BYTE):
        raise ValueError(f"`{name}` claims {height:,} rows in {len(data):,} bytes")
    frame = pl.read_parquet(io.BytesIO(data))
    schema = GRAPH_SCHEMAS[name]
    if frame.columns != list(schema):
        raise ValueError(f"`{name}` has the columns {', '.join(frame.columns)}, expected {', '.join(schema)}")
    for column, kind in schema.items():
        actual = frame.schema[column]
        if actual != (pl.String if isinstance(kind, pl.Enum) else kind):
            raise ValueError(f"column `{column}` of `{name}` is {actual}, expected {kind}")
    if empty := next((column for column in _NEVER_NULL.get(name, ()) if frame[column].null_count()), None):
        raise ValueError(f"column `{empty}` of `{name}` has rows without a value")
    return frame.cast(schema)


def _damaged(why: str, where: str) -> InputError:
    return InputError(
        f"the saved graph is damaged: {why}",
        slug="graph-damaged",
        where=where,
        hint="write it again with `traceloom link`",
    )
