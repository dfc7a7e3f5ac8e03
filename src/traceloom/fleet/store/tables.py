"""Delta tables, rows on their way to them.

Writers of several processes would lose commits of each other, so one writes: a batch of rows for
several tables has a number, and each table notes the number of the last batch it holds (an
application transaction of Delta). A batch that was interrupted is committed again under its number:
tables that hold it already are left as they are, the others take it, so that no row is lost or
stands twice.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING

import polars as pl
from polars.exceptions import PanicException, PolarsError

from traceloom.errors import InputError, OutputError, other_version
from traceloom.fleet.store.schema import SCHEMAS, VERSION, compute_usage_hours

if TYPE_CHECKING:
    from deltalake import DeltaTable


_SCHEMA = "traceloom.schema"  # the transaction whose number is the version of the schema
_CONFIGURATION = {
    "delta.checkpointInterval": "50",  # commits after which the log is summed up: every few minutes at most
    "delta.logRetentionDuration": "interval 7 days",
}
_LATE_DAYS = 3  # minutes wait on a host for two days where it does not reach the service
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # of a capture: it stands in a predicate


class Tables:
    """All tables of a store.

    Args:
        url: Directory, or address as of `s3://bucket/prefix`; the tables lie in `tables/` below it.
        options: What the object store needs (keys, endpoint), by the names of the `object_store` library.

    Raises:
        InputError: `no-extra`: the extra `fleet` is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        if (
            find_spec("deltalake") is None
        ):  # which is loaded where a table is opened: it takes 60 MB
            hint = "pip install 'traceloom[fleet]'"
            raise InputError("the tables of a fleet need deltalake", slug="no-extra", hint=hint)
        self.url = url.rstrip("/")
        self.options = dict(options or {})

    def address(self, name: str) -> str:
        """Where a table lies."""
        return f"{self.url}/tables/{SCHEMAS[name].name}"

    def create(self) -> None:
        """Make the tables that are not there.

        Raises:
            InputError: `other-version`: a table has another schema; `unreadable`.
            OutputError: `cannot-write`.
        """
        from deltalake import CommitProperties, Transaction, write_deltalake
        from deltalake.exceptions import TableNotFoundError

        for name, schema in SCHEMAS.items():
            try:
                self._open(
                    name
                )  # `DeltaTable.is_deltatable` would keep Python's lock while a store is slow
            except InputError as error:  # noqa: PERF203  (a dozen tables)
                if not isinstance(error.__cause__, TableNotFoundError):
                    raise
                with _report_write_errors(self.address(name)):
                    write_deltalake(
                        self.address(name),
                        schema.empty(),
                        mode="ignore",
                        partition_by=["day"],
                        name=name,
                        description=schema.meaning,
                        configuration=_CONFIGURATION,
                        storage_options=self.options,
                        commit_properties=CommitProperties(
                            app_transactions=[Transaction(_SCHEMA, VERSION)]
                        ),
                    )

    def scan(self, name: str, first: date | None = None, last: date | None = None) -> pl.LazyFrame:
        """The rows of a table from the first day to the last, both included, with the columns of
        its schema.

        Raises:
            InputError: `other-version`, `unreadable`.
            KeyError: There is no such table.
        """
        frame = pl.scan_delta(self._open(name))
        if first is not None:
            frame = frame.filter(pl.col("day") >= first)
        if last is not None:
            frame = frame.filter(pl.col("day") <= last)
        return frame.select(list(SCHEMAS[name].types))

    def version(self, name: str) -> int:
        """The number of the last commit to a table; errors as of `scan`."""
        return self._open(name).version()

    def commit(
        self,
        source: str,
        number: int,
        rows: Mapping[str, pl.DataFrame],
        replaced: Iterable[str] = (),
    ) -> dict[str, int]:
        """Add a batch, exactly once however often it is called.

        Args:
            source: Who numbers batches, as `captures` or `usage`; each source counts for itself.
            number: Of the batch, higher than those before. A batch that is committed again has the same rows.
            rows: Rows by table; columns that are missing are null.
            replaced: Captures that were analysed again: in each table the same commit takes their earlier rows away.
                All rows are of these captures then.

        Returns:
            Table -> rows that were added now; tables that held the batch are not in it.

        Raises:
            InputError: `other-version`, `unreadable`.
            OutputError: `cannot-write`: nothing of the table that failed was added; those before hold the batch.
            ValueError: a row is of no day, a column is not of the table, or the name of a capture has other signs than
                letters, digits, `.`, `_`, `-`.
        """
        from deltalake import CommitProperties, Transaction, write_deltalake

        captures = sorted(replaced)
        strange = [name for name in captures if not _NAME.fullmatch(name)]
        if strange:
            raise ValueError(f"no name of a capture: {strange[0][:80]!r}")
        noted = CommitProperties(app_transactions=[Transaction(source, number)])
        added: dict[str, int] = {}
        for name, schema in SCHEMAS.items():
            rewritten = captures if "capture" in schema.types else []
            if name not in rows and not rewritten:
                continue
            frame = schema.complete(rows.get(name, schema.empty()))
            if frame["day"].null_count():
                raise ValueError(f"a row of `{name}` is of no day")
            if not (frame.height or rewritten):
                continue
            table = self._open(name)
            last = table.transaction_version(source)
            if last is not None and last >= number:
                continue
            with _report_write_errors(self.address(name)):
                if rewritten:
                    capture_predicate = "capture IN ({})".format(
                        ", ".join(f"'{capture}'" for capture in rewritten)
                    )
                    write_deltalake(
                        table,
                        frame,
                        mode="overwrite",
                        predicate=capture_predicate,
                        commit_properties=noted,
                    )
                else:
                    write_deltalake(table, frame, mode="append", commit_properties=noted)
            added[name] = frame.height
        return added

    def compact(self, today: date) -> None:
        """What is to be done every night: small files become large ones, old rows and files go,
        logs are summed up.

        Of the last days before today, to which hosts may still have sent minutes, the parts of
        hours that came one after the other become one row.

        Raises:
            InputError: `other-version`, `unreadable`.
            OutputError: `cannot-write`.
        """
        for name, schema in SCHEMAS.items():
            table = self._open(name)
            with _report_write_errors(self.address(name)):
                if schema.keep_days is not None:
                    table.delete(
                        f"day < '{(today - timedelta(days=schema.keep_days)).isoformat()}'"
                    )
                if name == "usage_hour":
                    for ago in range(1, _LATE_DAYS + 1):
                        self._add_up(table, today - timedelta(days=ago))
                table.optimize.compact(
                    max_concurrent_tasks=1
                )  # each takes the memory of a large file
                table.vacuum(dry_run=False)  # files that no version of the last seven days has
                table.create_checkpoint()
                table.cleanup_metadata()

    def _add_up(self, table: DeltaTable, day: date) -> None:
        """Hour by hour: of thousands of devices a whole day of parts is more than fits."""
        from deltalake import write_deltalake

        day_rows = self.scan("usage_hour", day, day)
        for time_ns in day_rows.select(pl.col("time_ns").unique().sort()).collect()["time_ns"]:
            parts = day_rows.filter(pl.col("time_ns") == time_ns).collect()
            hour_rows = compute_usage_hours(parts)
            if hour_rows.height < parts.height:
                write_deltalake(
                    table,
                    hour_rows,
                    mode="overwrite",
                    predicate=f"day = '{day.isoformat()}' AND time_ns = {time_ns}",
                )

    def _open(self, name: str) -> DeltaTable:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            table = DeltaTable(self.address(name), storage_options=self.options)
            version = table.transaction_version(_SCHEMA)
        except (DeltaError, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"the table cannot be read: {reason}", slug="unreadable", where=self.address(name)
            ) from error
        if version != VERSION:
            raise other_version("table", version, VERSION, self.address(name))
        return table


@contextmanager
def _report_write_errors(address: str) -> Iterator[None]:
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise OutputError(
            f"the table cannot be written: {reason}", slug="cannot-write", where=address
        ) from error


MAX_ROWS_BYTES = 1 << 30
"""The most that the rows of a capture may have in memory."""

_SUFFIX = ".arrow"


def pack_rows(rows: Mapping[str, pl.DataFrame]) -> bytes:
    """Rows by table as one file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, frame in rows.items():
            with archive.open(f"{name}{_SUFFIX}", "w") as file:
                frame.write_ipc(
                    file, compression="uncompressed"
                )  # so that the archive says how large it is
    return buffer.getvalue()


def unpack_rows(content: bytes, capture: str) -> dict[str, pl.DataFrame]:
    """What `packed_rows` made, by table, with all columns of each.

    Whoever made it has read files of strangers: it is taken for what the schemas allow, and for
    rows of its capture.

    Raises:
        ValueError: It is anything else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > MAX_ROWS_BYTES:
                raise ValueError(f"they have more than {MAX_ROWS_BYTES >> 20} MiB")
            tables = {}
            for entry in entries:
                name = entry.filename.removesuffix(_SUFFIX)
                if name not in SCHEMAS or "capture" not in SCHEMAS[name].types:
                    raise ValueError(f"captures have no rows in `{name[:80]}`")
                tables[name] = SCHEMAS[name].complete(pl.read_ipc(archive.read(entry)))
    except (
        zipfile.BadZipFile,
        zlib.error,
        PolarsError,
        PanicException,
        RuntimeError,
        EOFError,
        OSError,
    ) as error:
        raise ValueError(f"they cannot be read: {str(error).partition(chr(10))[0]}") from error
    for name, frame in tables.items():
        if frame["day"].null_count() or frame["capture"].unique().to_list() not in ([], [capture]):
            raise ValueError(f"a row of `{name}` is of another capture, or of no day")
    return tables
