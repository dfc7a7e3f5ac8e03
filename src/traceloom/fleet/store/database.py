"""Access of the state to SQLite or PostgreSQL: connection, transactions and schema.

The statements use the SQL that SQLite and PostgreSQL share; only the triggers that protect the
audit log are written for each.

Every method of the state is one transaction, and blocks: call it in a thread. Where several
services share a database, instants come from the database's clock, so that hosts with different
clocks agree on leases.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from traceloom.errors import InputError, OutputError, UsageError, other_version
from traceloom.system.files import prepare_private_file

if TYPE_CHECKING:
    from sqlalchemy import Connection, RowMapping


T = TypeVar("T")

VERSION = 4
"""Version of the schema, stored in the database; a database of another version is refused."""

_TABLES = (
    (
        "CREATE TABLE captures (id TEXT PRIMARY KEY, day TEXT NOT NULL, job TEXT NOT NULL, uploader TEXT NOT NULL, "
        "received_ns BIGINT NOT NULL, complete BIGINT NOT NULL, bytes BIGINT NOT NULL, files TEXT NOT NULL)"
    ),
    "CREATE INDEX captures_received ON captures (received_ns)",
    (
        "CREATE TABLE tasks (id TEXT PRIMARY KEY, capture TEXT NOT NULL REFERENCES captures (id), "
        "version TEXT NOT NULL, state TEXT NOT NULL, attempts BIGINT NOT NULL, again BIGINT NOT NULL, "
        "holder TEXT NOT NULL, free_at_ns BIGINT NOT NULL, error TEXT NOT NULL, batch BIGINT, "
        "created_ns BIGINT NOT NULL)"
    ),
    "CREATE INDEX tasks_state ON tasks (state, free_at_ns)",
    "CREATE INDEX tasks_capture ON tasks (capture)",
    "CREATE TABLE batches (number BIGINT PRIMARY KEY, again BIGINT NOT NULL, done BIGINT NOT NULL)",
    "CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, until_ns BIGINT NOT NULL, url TEXT NOT NULL)",
    (
        "CREATE TABLE tokens (name TEXT PRIMARY KEY, role TEXT NOT NULL, sha256 TEXT NOT NULL UNIQUE, "
        "created_ns BIGINT NOT NULL, expires_ns BIGINT NOT NULL, revoked_ns BIGINT NOT NULL)"
    ),
    (
        "CREATE TABLE audit (id TEXT PRIMARY KEY, at_ns BIGINT NOT NULL, who TEXT NOT NULL, what TEXT NOT NULL, "
        "result TEXT NOT NULL, details TEXT NOT NULL)"
    ),
    "CREATE INDEX audit_time ON audit (at_ns)",
    (
        "CREATE TABLE hosts (host TEXT PRIMARY KEY, sha256 TEXT NOT NULL, enrolled_ns BIGINT NOT NULL, "
        "usage_through BIGINT NOT NULL)"
    ),
    "CREATE TABLE enrolments (sha256 TEXT PRIMARY KEY, host TEXT NOT NULL, expires_ns BIGINT NOT NULL)",
    (
        "CREATE TABLE requests (id TEXT PRIMARY KEY, asked_ns BIGINT NOT NULL, ended BIGINT NOT NULL, "
        "document TEXT NOT NULL)"
    ),
    "CREATE INDEX requests_asked ON requests (asked_ns)",
    (
        "CREATE TABLE usage_waiting (host TEXT NOT NULL, minute BIGINT NOT NULL, since BIGINT NOT NULL, batch BIGINT, "
        "document TEXT NOT NULL, PRIMARY KEY (host, minute))"
    ),
    "CREATE TABLE numbers (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    (
        "CREATE TABLE documents (name TEXT NOT NULL, version BIGINT NOT NULL, at_ns BIGINT NOT NULL, "
        "who TEXT NOT NULL, document TEXT NOT NULL, PRIMARY KEY (name, version))"
    ),
    (
        "CREATE TABLE job_facts (job TEXT NOT NULL, since_ns BIGINT NOT NULL, batch BIGINT, document TEXT NOT NULL, "
        "PRIMARY KEY (job, since_ns))"
    ),
    (
        "CREATE TABLE webhooks (name TEXT PRIMARY KEY, url TEXT NOT NULL, secret TEXT NOT NULL, events TEXT NOT NULL, "
        "created_ns BIGINT NOT NULL, delivered BIGINT NOT NULL, failed BIGINT NOT NULL, dropped BIGINT NOT NULL, "
        "error TEXT NOT NULL)"
    ),
    (
        "CREATE TABLE deliveries (webhook TEXT NOT NULL, id TEXT NOT NULL, event TEXT NOT NULL, "
        "created_ns BIGINT NOT NULL, due_ns BIGINT NOT NULL, attempts BIGINT NOT NULL, document TEXT NOT NULL, "
        "PRIMARY KEY (webhook, id))"
    ),
    "CREATE INDEX deliveries_due ON deliveries (webhook, due_ns)",
    "CREATE TABLE settings (name TEXT PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE trigger_counts (name TEXT PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE trigger_charges (request TEXT PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE regressions_seen (series TEXT PRIMARY KEY, since_ns BIGINT NOT NULL)",
    "CREATE TABLE sessions (sha256 TEXT PRIMARY KEY, token TEXT NOT NULL, expires_ns BIGINT NOT NULL)",
)

_GUARD: Mapping[str, tuple[str, ...]] = {
    "sqlite": tuple(
        f"CREATE TRIGGER audit_no_{verb} BEFORE {verb} ON audit "
        "BEGIN SELECT RAISE(ABORT, 'the audit is only appended to'); END"
        for verb in ("update", "delete")
    ),
    "postgresql": (
        (
            "CREATE FUNCTION audit_guard() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN RAISE EXCEPTION $$the audit is only appended to$$; END'"
        ),
        (
            "CREATE TRIGGER audit_guard BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_guard()"
        ),
    ),
}

SCHEMA: Mapping[str, tuple[str, ...]] = {
    dialect: (*_TABLES, *guard) for dialect, guard in _GUARD.items()
}
"""Dialect -> statements that create the schema."""

LEADER = "committer"  # the lease of the service that talks to hosts and writes the tables
_BUSY_MS = 10_000  # how long SQLite waits for another writer
_ANSWER_S = 10.0  # how long a statement may take, and PostgreSQL may be silent
# What the parameters of the URL do not say.
_POSTGRES_PARAMETERS = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "options": f"-c statement_timeout={_ANSWER_S:.0f}s -c lock_timeout={_ANSWER_S:.0f}s "
    "-c idle_in_transaction_session_timeout=60s",
}
_OUTAGE_SLUGS = {"state-unusable", "state-busy"}

_log = logging.getLogger(__name__)


class StateDatabase:
    """A connection to the database; an empty database gets its tables.

    Args:
        url: SQLAlchemy URL, `sqlite:///PATH` or `postgresql://USER@HOST/DATABASE`; or the path of a
            SQLite file.

    Raises:
        InputError: `no-extra`; `other-version`: it has another schema.
        OutputError: `state-busy`, `state-unusable`.
        UsageError: `wrong-usage`: another kind of database.

    Attributes:
        identity: Distinguishes the batches of this state from those of another in the tables.
        where: Its address, without a password.
    """

    def __init__(self, url: str) -> None:
        try:
            import sqlalchemy
        except ImportError as error:
            hint = "pip install 'traceloom[fleet]'"
            raise InputError(
                "the state of a fleet needs SQLAlchemy", slug="no-extra", hint=hint
            ) from error
        try:
            address = sqlalchemy.make_url(url if "://" in url else f"sqlite:///{url}")
            if address.drivername in {"postgresql", "postgres"}:
                query = {**_POSTGRES_PARAMETERS, **address.query}
                address = address.set(drivername="postgresql+psycopg", query=query)
            if address.get_backend_name() not in SCHEMA:
                raise UsageError(
                    "the state is kept in SQLite or PostgreSQL",
                    slug="wrong-usage",
                    where=address.render_as_string(hide_password=True)[:80],
                    hint="postgresql://USER@HOST/NAME, or a file of SQLite",
                )
            pool = {} if address.get_backend_name() == "sqlite" else {"pool_timeout": _ANSWER_S}
            self._engine = sqlalchemy.create_engine(address, pool_pre_ping=True, **pool)
        except (sqlalchemy.exc.ArgumentError, ImportError) as error:
            raise UsageError(
                f"this is no address of a database here: {error}", slug="wrong-usage"
            ) from error
        self.where = address.render_as_string(hide_password=True)
        self._lite = address.get_backend_name() == "sqlite"
        self._text = sqlalchemy.text
        self._down_since_s = 0.0  # monotonic time; 0 while the database answers
        self._probe = threading.Lock()  # who tries whether it answers again
        if self._lite:
            if address.database and address.database != ":memory:":
                try:
                    prepare_private_file(Path(address.database))
                except OSError as error:
                    raise _build_unusable_error(error.strerror or str(error), self.where) from error
            sqlalchemy.event.listen(self._engine, "connect", _prepare_sqlite)
            sqlalchemy.event.listen(
                self._engine, "begin", lambda connection: connection.exec_driver_sql(_BEGIN)
            )
        else:
            sqlalchemy.event.listen(self._engine, "do_connect", _connect_postgres)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        from sqlalchemy.exc import DBAPIError, OperationalError, TimeoutError  # noqa: A004

        probes = self._down_since_s and not self._lite and self._probe.acquire(blocking=False)
        if self._down_since_s and not self._lite and not probes:
            raise _build_unusable_error("it does not answer", self.where)
        try:
            with self._engine.begin() as connection:
                yield connection
            if down_since_s := self._down_since_s:
                self._down_since_s = 0.0
                _log.warning(
                    "the state answers again, after %.0f s", time.monotonic() - down_since_s
                )
        except TimeoutError as error:  # of the pool
            raise _build_unusable_error("all connections are in use", self.where) from error
        except DBAPIError as error:
            reason = str(error.orig).partition("\n")[0]
            # Without a code, or with one of these classes, the connection is lost.
            code = getattr(error.orig, "sqlstate", None) or "08"
            is_outage = isinstance(error, OperationalError) and code.startswith(("08", "57P"))
            if is_outage and not self._down_since_s:
                self._down_since_s = time.monotonic()
                _log.warning("the state does not answer: %s", reason)
            if "locked" in reason:
                raise OutputError(
                    "another process keeps the database locked",
                    slug="state-busy",
                    where=self.where,
                    hint="try again; a backup or a shell may hold it",
                ) from error
            raise _build_unusable_error(reason, self.where) from error
        finally:
            if probes:
                self._probe.release()

    def _rows(
        self, connection: Connection, statement: str, **values: object
    ) -> Sequence[RowMapping]:
        return connection.execute(self._text(statement), values).mappings().all()

    def _change(self, connection: Connection, statement: str, **values: object) -> int:
        return connection.execute(self._text(statement), values).rowcount

    def _open_rows(
        self, table: str, key: tuple[str, ...], series: str, limit: int, *, term: str, above: int
    ) -> Sequence[RowMapping]:
        """Returns the rows of the batch to put into the tables; empty if none wait.

        A batch that was begun but not finished comes first; else a new batch gets the next number.

        Args:
            table: Has a column `batch`: the batch's number, 0 once it has ended, null before it
                begins.
            key: Columns that identify a row; rows with the lowest values come first.
            series: Namespace of the numbers.
            limit: Max rows of a new batch.
            term: Term by which this service leads.
            above: Last number that the tables hold: a new batch gets a higher one.

        Raises:
            OutputError: `not-leading`.
        """
        columns, same = ", ".join(key), " AND ".join(f"{name} = :{name}" for name in key)
        begun = f"SELECT * FROM {table} WHERE batch > 0 ORDER BY {columns}"  # noqa: S608  (names of ours)
        new = f"SELECT {columns} FROM {table} WHERE batch IS NULL ORDER BY {columns} LIMIT :most"  # noqa: S608
        assign_statement = f"UPDATE {table} SET batch = :number WHERE {same}"  # noqa: S608
        with self._transaction() as connection:
            self._check_leader(connection, term)
            rows = self._rows(connection, begun)
            if not rows and (waiting := self._rows(connection, new, most=limit)):
                self._change(
                    connection,
                    "INSERT INTO numbers (name, value) VALUES (:name, :above + 1) ON CONFLICT (name) DO UPDATE "
                    "SET value = CASE WHEN numbers.value < :above THEN :above ELSE numbers.value END + 1",
                    name=series,
                    above=above,
                )
                [row] = self._rows(
                    connection, "SELECT value FROM numbers WHERE name = :name", name=series
                )
                number = row["value"]
                connection.execute(
                    self._text(assign_statement), [{**row, "number": number} for row in waiting]
                )
                rows = self._rows(connection, begun)
            return rows

    def _now_ns(self, connection: Connection) -> int:
        if self._lite:  # a clock that all processes of one host share
            return time.time_ns()
        [row] = self._rows(
            connection, "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1e9 AS BIGINT) AS now"
        )
        return cast("int", row["now"])

    def _check_leader(self, connection: Connection, term: str) -> None:
        """Refuses changes by a former leader; locks the lease until this transaction ends.

        Raises:
            OutputError: `not-leading`.
        """
        lock = "" if self._lite else " FOR SHARE"  # SQLite has one writer at a time
        statement = f"SELECT 1 FROM leases WHERE name = :name AND holder = :term{lock}"  # noqa: S608
        if not self._rows(connection, statement, name=LEADER, term=term):
            raise OutputError(
                "another service of this state leads now", slug="not-leading", where=self.where
            )

    def _prepare(self) -> None:
        with self._transaction() as connection:
            if not self._lite:  # two services may start at the same time
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(74661020)")
            self._change(
                connection,
                "CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL, identity TEXT NOT NULL)",
            )
            if not self._rows(connection, "SELECT version FROM schema_version"):
                for statement in SCHEMA[self._engine.dialect.name]:
                    connection.exec_driver_sql(statement)
                statement = (
                    "INSERT INTO schema_version (version, identity) VALUES (:version, :identity)"
                )
                self._change(connection, statement, version=VERSION, identity=secrets.token_hex(8))
            [row] = self._rows(connection, "SELECT version, identity FROM schema_version")
            if row["version"] != VERSION:
                raise other_version("database", row["version"], VERSION, self.where)
            self.identity: str = row["identity"]


_BEGIN = "BEGIN IMMEDIATE"  # without it SQLite refuses to upgrade a read to a write


def _prepare_sqlite(connection: object, _record: object) -> None:
    import sqlite3

    assert isinstance(connection, sqlite3.Connection)
    connection.isolation_level = None  # SQLAlchemy begins transactions explicitly
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")


def _connect_postgres(
    _dialect: object, _record: object, arguments: list[Any], keywords: dict[str, Any]
) -> object:
    """Opens a connection that is given up when the server is silent: a frozen one says nothing, and
    its kernel answers for it.
    """
    import psycopg

    class TimedConnection(psycopg.Connection[Any]):
        def wait(self, gen: Generator[Any, Any, T], *more: Any, **options: Any) -> T:
            return super().wait(self._limited(gen), *more, **options)

        def _limited(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
            end_s, ready = time.monotonic() + _ANSWER_S + 1.0, None
            while True:
                try:
                    ready = yield gen.send(ready)
                except StopIteration as stop:
                    return cast("T", stop.value)
                if time.monotonic() > end_s:
                    self.close()
                    raise psycopg.OperationalError(f"no answer for {_ANSWER_S:.0f} s")

    return TimedConnection.connect(*arguments, **keywords)


def is_news(record: logging.LogRecord) -> bool:
    """Returns whether a record says more than that the state does not answer, which is logged once
    when that begins.
    """
    causes = [*(record.args or ()), (record.exc_info or (None, None))[1]]
    return not any(getattr(cause, "slug", "") in _OUTAGE_SLUGS for cause in causes)


def _build_unusable_error(reason: str, location: str) -> OutputError:
    return OutputError(
        f"the state of the service cannot be used: {reason.lower()}",
        slug="state-unusable",
        where=location,
        hint="it needs a disk with room that it may write to, or a PostgreSQL that answers",
    )


def hash_secret(secret: str) -> str:
    """Returns the SHA-256 of a secret in hexadecimal, which is stored instead of the secret."""
    return hashlib.sha256(secret.encode()).hexdigest()
