"""Frames in one file, as saved graphs and plans are: a zip of one Parquet file per frame and `header.json`.

The header says format, version and rows per frame, and what there is beside the frames. Enum columns are text in the
file, so that any reader of Parquet understands them. Nothing is ever unpacked to the disk.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import polars as pl
from msgspec import Struct

from traceloom import __version__, files
from traceloom.errors import InputError, InvariantError, other_version, unreadable
from traceloom.plain_text import clean_json

T = TypeVar("T")
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


class ArchiveFormat(Struct, frozen=True):
    """What an archive of one kind holds.

    Attributes:
        noun: What it is, as `graph`, whose format is `traceloom-graph`.
        another_slug: Of the error that a file is of another kind.
        damaged_slug: Of the error that a file is cut, or not as its header says.
        version: Version that is written, and the only one that is read.
        schemas: Columns of each frame.
        never_null: Columns, by frame, in which every row has a value.
        hint: How to make it again.
    """

    noun: str
    another_slug: str
    damaged_slug: str
    version: int
    schemas: Mapping[str, pl.Schema]
    never_null: Mapping[str, tuple[str, ...]]
    hint: str

    @property
    def format(self) -> str:
        """The name that the header gives."""
        return f"traceloom-{self.noun}"

    def pack(self, header: Mapping[str, Any], frames: Mapping[str, pl.DataFrame], handle: BinaryIO) -> None:
        """Write an archive into an open file."""
        whole = {
            "format": self.format,
            "version": self.version,
            "traceloom": __version__,
            **header,
            "rows": {name: frame.height for name, frame in frames.items()},
        }
        with zipfile.ZipFile(handle, "w", zipfile.ZIP_STORED) as archive:
            _add(archive, _HEADER, lambda member: member.write(json.dumps(whole, indent=1).encode()))
            for name, frame in frames.items():
                enums = [column for column, kind in frame.schema.items() if isinstance(kind, pl.Enum)]
                plain = frame.with_columns(pl.col(column).cast(pl.String) for column in enums)
                _add(archive, f"{name}.parquet", plain.write_parquet)

    def save(
        self, path: str | Path, header: Mapping[str, Any], frames: Mapping[str, pl.DataFrame], *, force: bool = False
    ) -> int:
        """Write an archive, whole or not at all; returns the size of the file in bytes.

        Raises:
            OutputError: `file-exists`, `cannot-write`.
        """
        return files.write(Path(path), partial(self.pack, header, frames), force=force)

    def load(self, path: str | Path, build: Callable[[dict[str, Any], dict[str, pl.DataFrame]], T]) -> T:
        """Read what `save` wrote.

        Args:
            path: The file.
            build: Makes the whole of the header and the frames; what it raises of damage is said as such.

        Raises:
            InputError: `unreadable`; `other-version`; the slugs of the format.
        """
        where = str(path)
        another = f"this is a zip archive, but not a saved {self.noun}"
        try:
            handle = files.open_input(path)
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            with handle, zipfile.ZipFile(handle) as archive:
                members = archive.namelist()
                if _HEADER not in members:
                    raise InputError(another, slug=self.another_slug, where=where)
                header, _ = clean_json(json.loads(_member(archive, _HEADER, _HEADER_BYTES)))
                if not isinstance(header, dict) or header.get("format") != self.format:
                    raise InputError(another, slug=self.another_slug, where=where)
                if header.get("version") != self.version:
                    raise other_version(self.noun, header.get("version"), self.version, where)
                expected = {_HEADER, *(f"{name}.parquet" for name in self.schemas)}
                if strange := sorted(set(members) - expected):
                    raise ValueError(f"it holds `{strange[0]}`, which no {self.noun} has")
                if missing := sorted(expected - set(members)):
                    raise ValueError(f"it lacks `{missing[0]}`")
                if len(members) > len(expected):
                    raise ValueError("it holds a part twice")
                frames = {name: self._frame(archive, name, header["rows"][name]) for name in self.schemas}
            return build(header, frames)
        except zipfile.BadZipFile as error:
            with Path(path).open("rb") as opened:
                cut = opened.read(4) == b"PK\x03\x04"
            if cut:
                raise self._damaged("its end is missing, or it was changed", where) from error
            text = f"this is not a saved {self.noun}"
            hint = f"a {self.noun} is a zip archive"
            raise InputError(text, slug=self.another_slug, where=where, hint=hint) from error
        except _DAMAGE as error:
            raise self._damaged(next(iter(str(error).splitlines()), type(error).__name__), where) from error

    def holds(self, path: Path) -> bool:
        """Whether a file is such an archive, by its content."""
        try:
            with files.open_input(path) as handle, zipfile.ZipFile(handle) as archive:
                header = json.loads(_member(archive, _HEADER, _HEADER_BYTES))
        except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return False
        return isinstance(header, dict) and header.get("format") == self.format

    def _frame(self, archive: zipfile.ZipFile, name: str, rows: int) -> pl.DataFrame:
        data = _member(archive, f"{name}.parquet", 1 << 40)
        height = pl.scan_parquet(io.BytesIO(data)).select(pl.len()).collect().item()
        if height != rows:
            raise ValueError(f"`{name}` has {height:,} rows, its header says {rows!r}")
        if height > max(_FEW_ROWS, len(data) * _MOST_ROWS_PER_BYTE):
            raise ValueError(f"`{name}` claims {height:,} rows in {len(data):,} bytes")
        frame = pl.read_parquet(io.BytesIO(data))
        schema = self.schemas[name]
        if frame.columns != list(schema):
            raise ValueError(f"`{name}` has the columns {', '.join(frame.columns)}, expected {', '.join(schema)}")
        for column, kind in schema.items():
            actual = frame.schema[column]
            if actual != (pl.String if isinstance(kind, pl.Enum) else kind):
                raise ValueError(f"column `{column}` of `{name}` is {actual}, expected {kind}")
        if empty := next((column for column in self.never_null.get(name, ()) if frame[column].null_count()), None):
            raise ValueError(f"column `{empty}` of `{name}` has rows without a value")
        return frame.cast(schema)

    def _damaged(self, why: str, where: str) -> InputError:
        text = f"the saved {self.noun} is damaged: {why}"
        return InputError(text, slug=self.damaged_slug, where=where, hint=self.hint)


def _add(archive: zipfile.ZipFile, name: str, produce: Callable[[io.BytesIO], Any]) -> None:
    member = io.BytesIO()
    produce(member)
    # A fixed date: the same frames give the same file.
    archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), member.getbuffer())


def _member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """A part of the archive, never more bytes than it says and than is credible."""
    info = archive.getinfo(name)
    if info.file_size > min(most, info.compress_size * _MOST_UNZIPPED + _HEADER_BYTES // 64):
        raise ValueError(f"`{name}` claims {info.file_size:,} bytes, made of {info.compress_size:,}")
    return archive.read(info)
