"""Rows of one capture on their way to the tables: a zip file with an Arrow IPC file for each table."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping

import polars as pl
from polars.exceptions import PanicException, PolarsError

from traceloom.store.schemas import SCHEMAS

ROWS_BYTES = 1 << 30
"""The most that the rows of a capture may have in memory."""

_SUFFIX = ".arrow"


def packed_rows(rows: Mapping[str, pl.DataFrame]) -> bytes:
    """Rows by table as one file."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, frame in rows.items():
            with archive.open(f"{name}{_SUFFIX}", "w") as file:
                frame.write_ipc(file, compression="uncompressed")  # so that the archive says how large it is
    return whole.getvalue()


def unpacked_rows(content: bytes, capture: str) -> dict[str, pl.DataFrame]:
    """What `packed_rows` made, by table, with all columns of each.

    Whoever made it has read files of strangers: it is taken for what the schemas allow, and for rows of its capture.

    Raises:
        ValueError: It is anything else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > ROWS_BYTES:
                raise ValueError(f"they have more than {ROWS_BYTES >> 20} MiB")
            tables = {}
            for entry in entries:
                name = entry.filename.removesuffix(_SUFFIX)
                if name not in SCHEMAS or "capture" not in SCHEMAS[name].types:
                    raise ValueError(f"captures have no rows in `{name[:80]}`")
                tables[name] = SCHEMAS[name].complete(pl.read_ipc(archive.read(entry)))
    except (zipfile.BadZipFile, zlib.error, PolarsError, PanicException, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"they cannot be read: {str(error).partition(chr(10))[0]}") from error
    for name, frame in tables.items():
        if frame["day"].null_count() or frame["capture"].unique().to_list() not in ([], [capture]):
            raise ValueError(f"a row of `{name}` is of another capture, or of no day")
    return tables
