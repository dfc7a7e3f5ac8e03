"""Delta tables of a fleet, and the packed rows that wait to be committed to them.

Concurrent writers of several processes would lose each other's commits, so a single process writes:
a batch of rows for several tables has a number, and each table records the number of the last batch
it holds (a Delta application transaction). An interrupted batch is committed again under its
number: tables that already hold it are left unchanged and the others take it, so that no row is
lost or duplicated. A state that went back, as from a backup, counts on from the last number that
the tables hold (`last_number`), so that a number never stands for two batches.
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
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
from polars.exceptions import PanicException, PolarsError

from traceloom.errors import InputError, OutputError, TraceloomError, other_version
from traceloom.fleet.store.objects import ObjectStore, describe_store_error
from traceloom.fleet.store.schema import SCHEMAS, VERSION, compute_usage_hours

if TYPE_CHECKING:
    from deltalake import DeltaTable


_SCHEMA = "traceloom.schema"  # application transaction that holds the schema's version
_CONFIGURATION = {
    "delta.checkpointInterval": "50",  # commits between checkpoints: at most every few minutes
    "delta.logRetentionDuration": "interval 7 days",
}
_LATE_DAYS = 3  # a host keeps minutes for two days while it cannot reach the service
_LOG_ENTRY = re.compile(r"[0-9]{20}\.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # of a capture; used in a predicate


class Tables:
    """All tables of a store.

    Args:
        url: Directory, or address as `s3://bucket/prefix`; the tables are in `tables/` below it.
        options: What the object store needs (keys, endpoint), by the names of the `object_store`
            library.

    Raises:
        InputError: `no-extra`: the extra `fleet` is not installed.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        # `deltalake` is loaded only when a table is opened: it takes 60 MB.
        if find_spec("deltalake") is None:
            hint = "pip install 'traceloom[fleet]'"
            raise InputError("the tables of a fleet need deltalake", slug="no-extra", hint=hint)
        self.url = url.rstrip("/")
        self.options = dict(options or {})

    def address(self, name: str) -> str:
        return f"{self.url}/tables/{SCHEMAS[name].name}"

    def create(self) -> None:
        """Creates the tables that do not exist yet.

        Raises:
            InputError: `other-version`: a table has another schema; `unreadable`.
            OutputError: `cannot-write`.
        """
        from deltalake import CommitProperties, Transaction, write_deltalake
        from deltalake.exceptions import TableNotFoundError

        for name, schema in SCHEMAS.items():
            try:
                # `DeltaTable.is_deltatable` would hold the GIL while a store is slow.
                self._open(name)
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
        """Returns the rows of a table from the first day to the last, both inclusive, with the
        columns of its schema.

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
        """Returns the version of the last commit to a table; errors as for `scan`."""
        return self._open(name).version()

    def last_number(self, name: str, source: str) -> int:
        """Returns the number of the last batch that a table holds, 0 if none; errors as for `scan`.

        `name`: The first table that such batches have rows of, which they are committed to first.
        """
        return self._open(name).transaction_version(source) or 0

    def commit(
        self,
        source: str,
        number: int,
        rows: Mapping[str, pl.DataFrame],
        replaced: Iterable[str] = (),
    ) -> dict[str, int]:
        """Adds a batch exactly once, however often it is called.

        Args:
            source: Namespace of the batch numbers, such as `captures` or `usage`.
            number: Number of the batch, higher than all before. A batch that is committed again has
                the same rows.
            rows: Rows by table; missing columns are null.
            replaced: Captures that were analysed again: the same commit removes their earlier rows
                from each table. All rows must then belong to these captures.

        Returns:
            Table -> number of rows added now; tables that already held the batch are left out.

        Raises:
            InputError: `other-version`, `unreadable`.
            OutputError: `cannot-write`: nothing was added to the failed table; earlier tables hold
                the batch.
            ValueError: A row has no day, a column does not belong to the table, or a capture's name
                has characters other than letters, digits, `.`, `_` and `-`.
        """
        from deltalake import CommitProperties, Transaction, write_deltalake

        captures = sorted(replaced)
        unsafe = [name for name in captures if not _NAME.fullmatch(name)]
        if unsafe:
            raise ValueError(f"no name of a capture: {unsafe[0][:80]!r}")
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
                    write_deltalake(
                        table,
                        frame,
                        mode="overwrite",
                        predicate="capture IN ({})".format(
                            ", ".join(f"'{capture}'" for capture in rewritten)
                        ),
                        commit_properties=noted,
                    )
                else:
                    write_deltalake(table, frame, mode="append", commit_properties=noted)
            added[name] = frame.height
        return added

    def compact(self, today: date) -> None:
        """Runs the nightly maintenance: compacts small files, deletes old rows and files, and
        checkpoints logs.

        For the last days before today, for which hosts may have sent late minutes, the partial rows
        of an hour are merged into one row.

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
                # Each one needs the memory of a large file.
                table.optimize.compact(max_concurrent_tasks=1)
                table.vacuum(dry_run=False)  # files that no version of the last seven days uses
                table.create_checkpoint()
                table.cleanup_metadata()

    def _add_up(self, table: DeltaTable, day: date) -> None:
        """Merges the partial rows of a day hour by hour.

        A whole day of partial rows of thousands of devices does not fit into memory.
        """
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
            reason, lost = describe_store_error(error), self._find_lost_entries(name)
            if lost:
                reason = (
                    f"{', '.join(lost[:5])} of its log {'is' if len(lost) == 1 else 'are'} lost"
                )
            raise InputError(
                f"the table cannot be read: {reason}", slug="unreadable", where=self.address(name)
            ) from error
        if version != VERSION:
            raise other_version("table", version, VERSION, self.address(name))
        return table

    def _find_lost_entries(self, name: str) -> list[str]:
        """Returns the files that the log of a table lacks: entries have consecutive numbers, and
        begin at 0 where there is no checkpoint.
        """
        log = f"tables/{SCHEMAS[name].name}/_delta_log"
        try:
            paths = [Path(path) for path in ObjectStore(self.url, self.options).sizes(log)]
        except TraceloomError:  # the reason of the table says more
            return []
        held = {int(path.stem) for path in paths if _LOG_ENTRY.fullmatch(path.name)}
        first = (
            0 if held and all(path.suffix == ".json" for path in paths) else min(held, default=0)
        )
        return [
            f"{number:020}.json"
            for number in range(first, max(held, default=0))
            if number not in held
        ]


@contextmanager
def _report_write_errors(address: str) -> Iterator[None]:
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, OSError) as error:
        raise OutputError(
            f"the table cannot be written: {describe_store_error(error)}",
            slug="cannot-write",
            where=address,
        ) from error


MAX_ROWS_BYTES = 1 << 30
"""Max bytes of a capture's rows in memory."""

_SUFFIX = ".arrow"


def pack_rows(rows: Mapping[str, pl.DataFrame]) -> bytes:
    """Packs rows by table into a zip archive of Arrow IPC files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, frame in rows.items():
            with archive.open(f"{name}{_SUFFIX}", "w") as file:
                # So that the archive states the uncompressed size.
                frame.write_ipc(file, compression="uncompressed")
    return buffer.getvalue()


def unpack_rows(content: bytes, capture: str) -> dict[str, pl.DataFrame]:
    """Unpacks an archive of `pack_rows` into rows by table, with all columns of each.

    The writer has processed untrusted files, so only rows of this capture that fit the schemas are
    accepted.

    Raises:
        ValueError: The archive is anything else.
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
