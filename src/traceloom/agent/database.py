"""The agent's SQLite files: opening, schema versions, damaged files; and the store of trace
requests.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from traceloom.agent.traces.requests import TraceRequest, TraceTarget
from traceloom.errors import InputError, OutputError, other_version
from traceloom.system.files import prepare_private_file

LOG = logging.getLogger("traceloom.agent")


def open_database(path: Path | None, schema: str, version: int, label: str) -> sqlite3.Connection:
    """Open a database and create its tables, in a file that only the agent's user can read; None:
    in memory.

    Args:
        path: The file; its directory is created.
        schema: SQL that creates the tables of a new file.
        version: Version of the schema, stored in the file.
        label: Its name in errors.

    Raises:
        InputError: `other-version`: the file has another schema.
        OSError, sqlite3.Error: It cannot be opened.
    """
    if path is not None:
        prepare_private_file(path)
    database = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=2.0)
    try:
        stored_version = database.execute("PRAGMA user_version").fetchone()[0]
        if stored_version not in {0, version}:  # a new file has 0
            raise other_version(label, stored_version, version, path)
        if not stored_version:
            database.executescript(schema)
            database.execute(f"PRAGMA user_version = {version}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
    except (sqlite3.Error, InputError):
        database.close()
        raise
    return database


def is_corruption(error: Exception) -> bool:
    """Whether the error means a damaged file. Its subclasses mean that a disk or a lock is in the
    way.
    """
    return type(error) is sqlite3.DatabaseError


def move_damaged_file(path: Path) -> str:
    """Rename a damaged file, which has to be closed; returns the new name.

    Raises:
        OSError: It cannot be renamed.
    """
    damaged_path = f"{path}.damaged-{time.time_ns()}"
    path.rename(damaged_path)
    for end in ("-wal", "-shm"):  # they belong to the damaged file
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{end}").rename(f"{damaged_path}{end}")
    return damaged_path


@contextlib.contextmanager
def lend_database(
    path: Path | None, schema: str, version: int, label: str
) -> Iterator[sqlite3.Connection]:
    """Lends a database for one transaction; arguments and errors as of `open_database`.

    A damaged file is put aside, and the next call creates a new one.
    """
    try:
        connection = open_database(path, schema, version, label)
        with contextlib.closing(connection) as database, database:
            yield database
    except sqlite3.DatabaseError as error:
        if is_corruption(error) and path is not None:
            LOG.warning("the %s is damaged and put aside as %s", label, move_damaged_file(path))
        raise


VERSION = 2
_COLUMNS = msgspec.structs.fields(TraceTarget)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, asked_ns INTEGER NOT NULL, document BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS targets (
    {", ".join(field.name for field in _COLUMNS)}, PRIMARY KEY (request, process, profiler)
) WITHOUT ROWID;
"""
_NAMES, _MARKS = ", ".join(field.name for field in _COLUMNS), ", ".join("?" * len(_COLUMNS))
_PUT_TARGET = f"INSERT OR REPLACE INTO targets ({_NAMES}) VALUES ({_MARKS})"  # noqa: S608  (our own names)


class RequestStore:
    """Trace requests on disk. Blocks, so it is called in threads, one at a time.

    Args:
        path: The file; its directory is created. None: in memory only.

    Raises:
        InputError: `other-version`: the file has another schema.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.last_error = ""  # why the last change is not on disk; then requests are refused
        self._lend = partial(lend_database, path, _SCHEMA, VERSION, "database of requests")
        self.load()

    def load(self) -> list[TraceRequest]:
        """Returns all requests, oldest first, without rows that cannot be read."""
        requests: dict[str, TraceRequest] = {}
        names = [field.name for field in _COLUMNS]
        try:
            with self._lend() as database:
                for (document,) in database.execute(
                    "SELECT document FROM requests ORDER BY asked_ns"
                ):
                    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                        request = msgspec.json.decode(document, type=TraceRequest)
                        requests[request.id] = request
                for row in database.execute(f"SELECT {', '.join(names)} FROM targets"):  # noqa: S608  (our own names)
                    with contextlib.suppress(msgspec.ValidationError):
                        target = msgspec.convert(dict(zip(names, row, strict=True)), TraceTarget)
                        if target.request in requests:
                            requests[target.request].targets.append(target)
        except (OSError, sqlite3.Error) as error:  # the agent continues with what could be read
            self.last_error = str(error)
        return list(requests.values())

    def put(self, request: TraceRequest) -> None:
        """Write a request with all its targets.

        Raises:
            OutputError: `cannot-write`.
        """
        request_row = msgspec.structs.replace(request, targets=[])
        self._write(
            (
                "INSERT OR REPLACE INTO requests VALUES (?, ?, ?)",
                (request.id, request.asked_ns, msgspec.json.encode(request_row)),
            ),
            *((_PUT_TARGET, msgspec.structs.astuple(target)) for target in request.targets),
        )

    def put_target(self, target: TraceTarget) -> None:
        """Write the state of a target; raises the errors of `put`."""
        self._write((_PUT_TARGET, msgspec.structs.astuple(target)))

    def delete(self, request: str) -> None:
        """Delete a request; raises the errors of `put`."""
        self._write(
            ("DELETE FROM targets WHERE request = ?", (request,)),
            ("DELETE FROM requests WHERE id = ?", (request,)),
        )

    def _write(self, *statements: tuple[str, tuple[object, ...]]) -> None:
        try:
            with self._lend() as database:
                for statement, values in statements:
                    database.execute(statement, values)
        except (OSError, sqlite3.Error) as error:
            self.last_error = str(error)
            raise OutputError(
                f"the request cannot be written down: {error}",
                slug="cannot-write",
                where=str(self.path),
            ) from error
        self.last_error = ""
