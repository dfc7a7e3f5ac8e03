"""Frames on disk: Arrow folders, single-file archives (graphs, plans), and sessions too large for
memory.

The header holds format, version, rows per frame, and everything besides the frames. Enum columns
are stored as text, so that any Parquet reader understands them. Archives are never unpacked to
disk.

The mapped files of large sessions are unlinked as soon as they are created, so they vanish with the
process, however that ends; the system reclaims their pages whenever it needs memory. See
`traceloom.trace.arrays` for single traces that are too large.
"""

import io
import json
import mmap
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import msgspec
import numpy as np
import polars as pl
from isal.isal_zlib import crc32
from msgspec import Struct

from traceloom import __version__
from traceloom.errors import InputError, InvariantError, other_version, unreadable
from traceloom.system import files
from traceloom.system.files import open_regular
from traceloom.system.text import replace_json_surrogates
from traceloom.trace import arrays, mapped_arrays
from traceloom.trace.array_types import Array
from traceloom.trace.arrays import is_large
from traceloom.trace.notice import Notice
from traceloom.trace.trace import SCHEMAS, Meta, Trace

_HEADER_FILE = "trace.json"
_FORMAT_VERSION = 3
_CHUNK_BYTES = 1 << 20
PART_ROWS = 1 << 20  # rows read at once of a very large frame


class _TraceHeader(Struct):
    """Content of `trace.json`; `files` maps each frame to the size in bytes and checksum of its
    file.
    """

    version: int
    meta: Meta
    notices: list[Notice]
    rows: dict[str, int]
    files: dict[str, tuple[int, int]]
    siblings: int


def save(trace: Trace, directory: Path, *, permanent: bool = True) -> None:
    """Write a trace into an existing folder. The header is written last, so a folder with a header
    is complete.

    Args:
        trace: The trace.
        directory: Target folder.
        permanent: Compress the files and store checksums; False for files that are read back at
            once and deleted.
    """
    for number, sibling in enumerate(trace.siblings):
        (directory / str(number)).mkdir()
        save(sibling, directory / str(number), permanent=permanent)
    rows = {name: frame.height for name, frame in trace.frames().items()}
    files = {}
    for name, frame in trace.frames().items():
        if frame.height:
            file = directory / f"{name}.arrow"
            frame.write_ipc(file, compression="lz4" if permanent else "uncompressed")
            if permanent:
                files[name] = _compute_checksum(file)
    head = {
        "version": _FORMAT_VERSION,
        "meta": asdict(trace.meta),
        "notices": [asdict(notice) for notice in trace.notices],
        "rows": rows,
        "files": files,
        "siblings": len(trace.siblings),
    }
    text = json.dumps(head).encode()
    (directory / _HEADER_FILE).write_bytes(text + b"\n%08x" % crc32(text))


def load_trace(directory: Path, *, permanent: bool = True) -> Trace:
    """Read a trace that `save` wrote.

    Args:
        directory: Its folder.
        permanent: Verify all checksums, since the files may have changed after they were written.

    Raises:
        Exception: The folder is incomplete or damaged.
    """
    with open_regular(directory / _HEADER_FILE) as file:
        text, _, checksum = file.read().rpartition(b"\n")
    if checksum != b"%08x" % crc32(text):
        raise ValueError("the head is not as it was written")
    values = json.loads(text)
    if permanent:
        head = msgspec.convert(values, _TraceHeader)
        for name in head.rows.keys() & SCHEMAS.keys():
            if (
                head.rows[name]
                and _compute_checksum(directory / f"{name}.arrow") != head.files[name]
            ):
                raise ValueError(f"frame {name} is not as it was written")
    else:
        notices = [Notice(**notice) for notice in values["notices"]]
        head = _TraceHeader(
            values["version"],
            Meta(**values["meta"]),
            notices,
            values["rows"],
            {},
            values["siblings"],
        )
    if head.version != _FORMAT_VERSION:
        raise ValueError(f"format {head.version} is not {_FORMAT_VERSION}")
    rows = {name: count for name, count in head.rows.items() if count and name in SCHEMAS}
    if head.meta.file_bytes >= mapped_arrays.MIN_SPILL_BYTES:
        frames = {name: _load_mapped_frame(directory, name, count) for name, count in rows.items()}
    else:  # all at once, which takes half as long as one after the other
        read = pl.collect_all([pl.scan_ipc(directory / f"{name}.arrow") for name in rows])
        frames = dict(zip(rows, read, strict=True))
        for name, frame in frames.items():
            if frame.height != rows[name] or frame.schema != SCHEMAS[name]:
                raise ValueError(f"frame {name} is not as its head says")
    empty = {name: pl.DataFrame(schema=SCHEMAS[name]) for name in SCHEMAS}
    siblings = tuple(
        load_trace(directory / str(number), permanent=permanent) for number in range(head.siblings)
    )
    return Trace(meta=head.meta, notices=tuple(head.notices), siblings=siblings, **(empty | frames))


def _compute_checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size, checksum = size + len(chunk), crc32(chunk, checksum)
    return size, checksum


def _load_mapped_frame(directory: Path, name: str, rows: int) -> pl.DataFrame:
    """Copies one frame, column by column and part by part, into mapped files of this process."""
    stored = pl.scan_ipc(directory / f"{name}.arrow")
    schema = stored.collect_schema()
    if schema != SCHEMAS[name] or stored.select(pl.len()).collect().item() != rows:
        raise ValueError(f"frame {name} is not as its head says")

    def parts(column: str) -> Iterator[pl.Series]:
        for low in range(0, rows, PART_ROWS):
            yield stored.select(column).slice(low, PART_ROWS).collect()[column]

    columns = [
        arrays.build_mapped_column(schema[column], rows, partial(parts, column)).alias(column)
        for column in schema
    ]
    return pl.DataFrame(columns)


T = TypeVar("T")
_HEADER = "header.json"
_MAX_HEADER_BYTES = 1 << 26
# Parquet is already compressed, so our archives do not shrink when zipped; zipping one again gains
# little.
_MAX_EXPANSION = 20
# A row takes tens of bytes in memory and some bytes in the file even if every column is constant.
_MAX_ROWS_PER_BYTE = 50
_MAX_SMALL_ROWS = 1_000_000
_DAMAGE_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,
    OverflowError,
    zlib.error,
    InvariantError,
    msgspec.ValidationError,
    # Modified Parquet can make the Parquet reader panic, which is not an `Exception`.
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
)


class ArchiveFormat(Struct, frozen=True):
    """The format of one kind of archive.

    Attributes:
        noun: Its kind, such as `graph`, whose format is `traceloom-graph`.
        another_slug: Slug of the error that a file is of another kind.
        damaged_slug: Slug of the error that a file is truncated or contradicts its header.
        version: Version that is written, and the only one that is read.
        schemas: Columns of each frame.
        never_null: Columns, by frame, in which every row has a value.
        hint: How to create the archive again.
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
        """The name of the format in the header."""
        return f"traceloom-{self.noun}"

    def pack(
        self, header: Mapping[str, Any], frames: Mapping[str, pl.DataFrame], handle: BinaryIO
    ) -> None:
        complete_header = {
            "format": self.format,
            "version": self.version,
            "traceloom": __version__,
            **header,
            "rows": {name: frame.height for name, frame in frames.items()},
        }
        with zipfile.ZipFile(handle, "w", zipfile.ZIP_STORED) as archive:
            _add(
                archive,
                _HEADER,
                lambda member: member.write(json.dumps(complete_header, indent=1).encode()),
            )
            for name, frame in frames.items():
                enums = [
                    column for column, kind in frame.schema.items() if isinstance(kind, pl.Enum)
                ]
                without_enums = frame.with_columns(
                    pl.col(column).cast(pl.String) for column in enums
                )
                _add(archive, f"{name}.parquet", without_enums.write_parquet)

    def save(
        self,
        path: str | Path,
        header: Mapping[str, Any],
        frames: Mapping[str, pl.DataFrame],
        *,
        force: bool = False,
    ) -> int:
        """Write an archive, atomically; returns the size of the file in bytes.

        Raises:
            OutputError: `file-exists`, `cannot-write`.
        """
        return files.write(Path(path), partial(self.pack, header, frames), force=force)

    def load(
        self, path: str | Path, build: Callable[[dict[str, Any], dict[str, pl.DataFrame]], T]
    ) -> T:
        """Read what `save` wrote.

        Args:
            path: The file.
            build: Builds the result from header and frames; its exceptions are reported as damage.

        Raises:
            InputError: `unreadable`; `other-version`; the slugs of the format.
        """
        location = str(path)
        mismatch_message = f"this is a zip archive, but not a saved {self.noun}"
        try:
            handle = files.open_input(path)
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            with handle, zipfile.ZipFile(handle) as archive:
                members = archive.namelist()
                if _HEADER not in members:
                    raise InputError(mismatch_message, slug=self.another_slug, where=location)
                header, _ = replace_json_surrogates(
                    json.loads(_read_member(archive, _HEADER, _MAX_HEADER_BYTES))
                )
                if not isinstance(header, dict) or header.get("format") != self.format:
                    raise InputError(mismatch_message, slug=self.another_slug, where=location)
                if header.get("version") != self.version:
                    raise other_version(self.noun, header.get("version"), self.version, location)
                expected = {_HEADER, *(f"{name}.parquet" for name in self.schemas)}
                if unexpected := sorted(set(members) - expected):
                    raise ValueError(f"it holds `{unexpected[0]}`, which no {self.noun} has")
                if missing := sorted(expected - set(members)):
                    raise ValueError(f"it lacks `{missing[0]}`")
                if len(members) > len(expected):
                    raise ValueError("it holds a part twice")
                frames = {
                    name: self._frame(archive, name, header["rows"][name]) for name in self.schemas
                }
            return build(header, frames)
        except zipfile.BadZipFile as error:
            with Path(path).open("rb") as opened:
                cut = opened.read(4) == b"PK\x03\x04"
            if cut:
                raise self._damaged("its end is missing, or it was changed", location) from error
            text = f"this is not a saved {self.noun}"
            hint = f"a {self.noun} is a zip archive"
            raise InputError(text, slug=self.another_slug, where=location, hint=hint) from error
        except _DAMAGE_ERRORS as error:
            raise self._damaged(
                next(iter(str(error).splitlines()), type(error).__name__), location
            ) from error

    def holds(self, path: Path) -> bool:
        """Returns whether a file is such an archive, by its content."""
        try:
            with files.open_input(path) as handle, zipfile.ZipFile(handle) as archive:
                header = json.loads(_read_member(archive, _HEADER, _MAX_HEADER_BYTES))
        except (OSError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return False
        return isinstance(header, dict) and header.get("format") == self.format

    def _frame(self, archive: zipfile.ZipFile, name: str, rows: int) -> pl.DataFrame:
        data = _read_member(archive, f"{name}.parquet", 1 << 40)
        height = pl.scan_parquet(io.BytesIO(data)).select(pl.len()).collect().item()
        if height != rows:
            raise ValueError(f"`{name}` has {height:,} rows, its header says {rows!r}")
        if height > max(_MAX_SMALL_ROWS, len(data) * _MAX_ROWS_PER_BYTE):
            raise ValueError(f"`{name}` claims {height:,} rows in {len(data):,} bytes")
        frame = pl.read_parquet(io.BytesIO(data))
        schema = self.schemas[name]
        if frame.columns != list(schema):
            raise ValueError(
                f"`{name}` has the columns {', '.join(frame.columns)}, expected {', '.join(schema)}"
            )
        for column, kind in schema.items():
            actual = frame.schema[column]
            if actual != (pl.String if isinstance(kind, pl.Enum) else kind):
                raise ValueError(f"column `{column}` of `{name}` is {actual}, expected {kind}")
        if empty := next(
            (column for column in self.never_null.get(name, ()) if frame[column].null_count()), None
        ):
            raise ValueError(f"column `{empty}` of `{name}` has rows without a value")
        return frame.cast(schema)

    def _damaged(self, reason: str, location: str) -> InputError:
        text = f"the saved {self.noun} is damaged: {reason}"
        return InputError(text, slug=self.damaged_slug, where=location, hint=self.hint)


def _add(archive: zipfile.ZipFile, name: str, produce: Callable[[io.BytesIO], Any]) -> None:
    member = io.BytesIO()
    produce(member)
    # A fixed date, so that equal frames give equal files.
    archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), member.getbuffer())


def _read_member(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Reads a member of the archive, limited to the size in the zip directory and to
    `max_bytes`.
    """
    info = archive.getinfo(name)
    if info.file_size > min(
        max_bytes, info.compress_size * _MAX_EXPANSION + _MAX_HEADER_BYTES // 64
    ):
        raise ValueError(
            f"`{name}` claims {info.file_size:,} bytes, made of {info.compress_size:,}"
        )
    return archive.read(info)


class _HasFrames(Protocol):
    def frames(self) -> dict[str, pl.DataFrame]: ...


F = TypeVar("F", bound=_HasFrames)
MAX_IN_MEMORY_BYTES = (
    100 * 10**6
)  # of JSON, summed over a session; traces after this limit are kept in files
_BLOCK_BYTES = 64 << 20
_ALIGNMENT = 64
_MIN_ROWS = 1024  # smaller frames stay in memory


def is_large_session(traces: Iterable[Trace]) -> bool:
    """Returns whether a session is so large that frames derived from each trace are kept in
    files.
    """
    return sum(trace.meta.file_bytes for trace in traces) > MAX_IN_MEMORY_BYTES


class MappedFiles:
    """Storage for columns in mapped files; a file vanishes with the last column in it.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None
        self._used = 0
        self._text = 0
        self._lock = threading.Lock()

    def kept(self, trace: Trace) -> Trace:
        """Returns a trace unchanged while the session is small, then with its columns in files.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        with self._lock:
            self._text += trace.meta.file_bytes
            if self._text <= MAX_IN_MEMORY_BYTES or is_large(trace):
                return trace
            return self.park(trace)

    def park(self, trace: Trace) -> Trace:
        """Returns the trace with its columns in files.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        frames: dict[str, Any] = {name: self.frame(frame) for name, frame in trace.frames().items()}
        self._given_back()
        return replace(trace, **frames)

    def graph(self, graph: F) -> F:
        """Returns a graph, or any other dataclass with frames, with its columns in files.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        frames: dict[str, Any] = {name: self.frame(frame) for name, frame in graph.frames().items()}
        self._given_back()
        return replace(graph, **frames)  # type: ignore[type-var]

    def frame(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Returns the frame with its numeric and text columns in files; small frames are unchanged.

        Raises:
            InputError: `no-space`: the disk is full.
        """
        if frame.height < _MIN_ROWS:
            return frame
        return pl.DataFrame([self._column(frame[column]) for column in frame.columns])

    def _given_back(self) -> None:
        """Unmaps the written pages; they stay in the system's file cache until they are read."""
        if self._block is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._block.madvise(mmap.MADV_DONTNEED)

    def _column(self, series: pl.Series) -> pl.Series:
        if series.dtype == pl.String:
            distinct = series.drop_nulls().unique(maintain_order=True)
            codes = (
                series.cast(pl.Enum(distinct)).to_physical().cast(pl.Int32).fill_null(-1).to_numpy()
            )
            table = arrays.TextTable(distinct.to_list())
            return table.column(codes, self._kept).alias(series.name) if table.fits else series
        kind = arrays.get_arrow_name(series.dtype)
        if kind is None:
            return series
        present = series.is_not_null()
        data = self._kept(series.fill_null(0).to_numpy().astype(kind, copy=False))
        if present.all():
            return pl.Series(series.name, data)
        validity = self._kept(np.packbits(present.to_numpy(), bitorder="little"))
        return arrays.wrap_arrow_buffers(kind, len(data), [validity, data]).alias(series.name)

    def _kept(self, values: Array) -> Array:
        size = values.nbytes
        if not size:
            return values
        if self._block is None or self._used + size > len(self._block):
            self._block = mapped_arrays.allocate_block(max(_BLOCK_BYTES, size))
            self._used = 0
        copy = np.frombuffer(self._block, dtype=values.dtype, count=len(values), offset=self._used)
        copy[:] = values
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return copy
