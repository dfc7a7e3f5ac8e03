"""State of captures, and of sessions and tokens of those who upload and read them.

expire.

top of hosts, documents, job facts and sessions.

Every method is one transaction, and blocks: call it in a thread. Where several services share a
database, instants come from the database's clock, so that hosts with different clocks agree on
leases.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from traceloom.errors import UsageError
from traceloom.fleet.store.database import LEADER, StateDatabase, hash_secret
from traceloom.fleet.store.hosts import HostState, JobFactState
from traceloom.fleet.store.rules import DocumentState

if TYPE_CHECKING:
    from sqlalchemy import Connection, RowMapping


class SessionState(StateDatabase):
    """Sessions of signed-in people.

    A session ends when it expires, when the person signs out, or when its token is no longer valid.
    """

    def open_session(self, token: str, seconds: float) -> str:
        """Opens a session for the holder of a token; returns the secret for the session's cookie.

        Expired sessions are deleted.
        """
        secret, now = f"tls_{secrets.token_urlsafe(32)}", time.time_ns()
        with self._transaction() as connection:
            self._change(connection, "DELETE FROM sessions WHERE expires_ns <= :now", now=now)
            self._change(
                connection,
                "INSERT INTO sessions (sha256, token, expires_ns) VALUES (:sha256, :token, :expires)",
                sha256=hash_secret(secret),
                token=hash_secret(token),
                expires=now + int(seconds * 1e9),
            )
        return secret

    def session(self, secret: str) -> str | None:
        """Returns the SHA-256 of the token that opened a session; None if the session is unknown or
        has expired.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT token FROM sessions WHERE sha256 = :sha256 AND expires_ns > :now",
                sha256=hash_secret(secret),
                now=time.time_ns(),
            )
        return str(rows[0]["token"]) if rows else None

    def close_session(self, secret: str) -> None:
        """Ends a session, if it exists."""
        with self._transaction() as connection:
            self._change(
                connection,
                "DELETE FROM sessions WHERE sha256 = :sha256",
                sha256=hash_secret(secret),
            )


TaskState = Literal["received", "checked", "analysed", "committed", "quarantined"]
Role = Literal["viewer", "requester", "operator", "admin"]
STATES: tuple[TaskState, ...] = get_args(TaskState)
ROLES: tuple[Role, ...] = get_args(Role)

ATTEMPTS = 3
"""Attempts before a task is quarantined."""

_RETRY_DELAY_NS = 2 * 10**9  # delay before the first retry of a failed task; doubled for the second
_ERROR_CHARACTERS = 2000


class CaptureFile(msgspec.Struct, frozen=True):
    """A file of a capture: its name in the capture, size in bytes, and SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


class CaptureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A capture.

    `day`: UTC day of its arrival; `complete`: all files have been uploaded.
    """

    id: str
    day: str
    job: str
    uploader: str
    received_ns: int
    complete: bool
    bytes: int
    files: tuple[CaptureFile, ...]


class TaskRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The analysis of a capture by one version.

    `again`: rows of an earlier analysis are to be replaced.
    """

    id: str
    capture: str
    version: str
    state: TaskState
    attempts: int
    again: bool
    error: str
    created_ns: int


class Batch(msgspec.Struct, frozen=True):
    """Tasks whose rows are committed together."""

    number: int
    again: bool
    tasks: tuple[TaskRecord, ...]


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A token, without its secret. `expires_ns`, `revoked_ns`: 0 where it does not, or was not."""

    name: str
    role: Role
    created_ns: int
    expires_ns: int
    revoked_ns: int

    @property
    def opens(self) -> bool:
        """Returns whether the token is valid now: neither revoked nor expired."""
        return not self.revoked_ns and not 0 < self.expires_ns <= time.time_ns()


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what, or was refused; `result` is `done` or the slug of the refusal."""

    at_ns: int
    who: str
    what: str
    result: str
    details: dict[str, str]


class ServiceState(HostState, DocumentState, JobFactState, SessionState):
    """The whole state of a service."""

    # captures

    def add_capture(self, record: CaptureRecord) -> CaptureRecord:
        """Adds an announced capture; if the name exists, returns the existing record unchanged."""
        with self._transaction() as connection:
            values = msgspec.structs.asdict(record) | {
                "files": msgspec.json.encode(record.files).decode(),
                "complete": int(record.complete),
            }
            self._change(
                connection,
                "INSERT INTO captures (id, day, job, uploader, received_ns, complete, bytes, files) VALUES "
                "(:id, :day, :job, :uploader, :received_ns, :complete, :bytes, :files) ON CONFLICT DO NOTHING",
                **values,
            )
            [row] = self._rows(connection, "SELECT * FROM captures WHERE id = :id", id=record.id)
            return _build_capture(row)

    def complete_capture(self, capture: str, version: str, *, again: bool = False) -> None:
        """Marks a capture as complete and queues its analysis by `version`; idempotent.

        `again`: The tables may hold rows of it, which are to be replaced.
        """
        with self._transaction() as connection:
            statement = "UPDATE captures SET complete = 1 WHERE id = :id AND complete = 0"
            if self._change(connection, statement, id=capture):
                self._add_task(connection, capture, version, again=again)

    def expire_announcements(self, before_ns: int) -> list[CaptureRecord]:
        """Forgets captures that were announced before an instant and never completed; returns them."""
        with self._transaction() as connection:
            where = "complete = 0 AND received_ns < :before"
            rows = self._rows(
                connection,
                f"SELECT * FROM captures WHERE {where}",  # noqa: S608
                before=before_ns,
            )
            self._change(connection, f"DELETE FROM captures WHERE {where}", before=before_ns)  # noqa: S608
            return [_build_capture(row) for row in rows]

    def capture(self, name: str) -> CaptureRecord | None:
        """Returns a capture; None if it does not exist."""
        with self._transaction() as connection:
            rows = self._rows(connection, "SELECT * FROM captures WHERE id = :id", id=name)
            return _build_capture(rows[0]) if rows else None

    def captures(
        self, *, uploader: str = "", job: str = "", limit: int = 100, before_ns: int = 0
    ) -> list[CaptureRecord]:
        """Returns complete captures, newest first, optionally of one uploader or job or received
        before an instant.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT * FROM captures WHERE complete = 1 AND (:uploader = '' OR uploader = :uploader) "
                "AND (:job = '' OR job = :job) AND (:before = 0 OR received_ns < :before) "
                "ORDER BY received_ns DESC, id LIMIT :most",
                uploader=uploader,
                job=job,
                before=before_ns,
                most=limit,
            )
            return [_build_capture(row) for row in rows]

    def list_unsettled(self) -> tuple[str, set[str]]:
        """Returns the first day of which a state that went back may lack complete captures ("": any
        day), and those from then on that it has.

        Captures that are not complete yet belong to the day of their announcement.
        """
        with self._transaction() as connection:
            [row] = self._rows(
                connection,
                "SELECT MAX(CASE WHEN complete = 1 THEN day END) AS newest, "
                "MIN(CASE WHEN complete = 0 THEN day END) AS open FROM captures",
            )
            first = min(row["newest"] or "", row["open"] or row["newest"] or "")
            rows = self._rows(
                connection,
                "SELECT id FROM captures WHERE complete = 1 AND day >= :first",
                first=first,
            )
            return first, {row["id"] for row in rows}

    # tasks

    def _add_task(self, connection: Connection, capture: str, version: str, *, again: bool) -> int:
        return self._change(
            connection,
            "INSERT INTO tasks (id, capture, version, state, attempts, again, holder, free_at_ns, error, created_ns) "
            "VALUES (:id, :capture, :version, 'received', 0, :again, '', 0, '', :now) ON CONFLICT DO NOTHING",
            id=f"{capture}.{version}",
            capture=capture,
            version=version,
            again=int(again),
            now=self._now_ns(connection),
        )

    def claim(self, holder: str, lease_s: float) -> TaskRecord | None:
        """Leases the longest-waiting task for `lease_s` seconds; returns None if none wait.

        A lease that expired says nothing about the task, as its service may have been killed: it
        is no attempt. Other tasks come first, in case the task was the cause.
        """
        with self._transaction() as connection:
            now = self._now_ns(connection)
            skipping = "" if self._lite else " FOR UPDATE SKIP LOCKED"
            rows = self._rows(
                connection,
                "SELECT id FROM tasks WHERE state IN ('received', 'checked') AND free_at_ns <= :now "  # noqa: S608
                f"ORDER BY CASE WHEN holder = '' THEN 0 ELSE 1 END, created_ns, id LIMIT 1{skipping}",
                now=now,
            )
            if not rows:
                return None
            self._change(
                connection,
                "UPDATE tasks SET holder = :holder, free_at_ns = :until WHERE id = :id",
                holder=holder,
                until=now + int(lease_s * 1e9),
                id=rows[0]["id"],
            )
            [row] = self._rows(connection, "SELECT * FROM tasks WHERE id = :id", id=rows[0]["id"])
            return _build_task(row)

    def renew(self, task: str, holder: str, lease_s: float) -> bool:
        """Extends the lease of a task; returns False if the lease expired and another holder has
        it.
        """
        with self._transaction() as connection:
            until = self._now_ns(connection) + int(lease_s * 1e9)
            return bool(self._held(connection, "free_at_ns = :until", task, holder, until=until))

    def advance(self, task: str, holder: str, state: Literal["checked", "analysed"]) -> bool:
        """Moves a task to a state; returns False and changes nothing if it is no longer held."""
        with self._transaction() as connection:
            release = ", holder = '', error = '', attempts = 0" if state == "analysed" else ""
            return bool(
                self._held(connection, f"state = :state{release}", task, holder, state=state)
            )

    def fail(self, task: str, holder: str, error: str, *, final: bool = False) -> None:
        """Records a failure of a task: it waits for a retry, or is quarantined after the last
        attempt or if `final`.
        """
        # PostgreSQL stores neither zero bytes nor lone surrogates, which errors about malformed
        # files may quote.
        error = error.encode("utf-8", "replace").decode().replace("\0", " ")
        with self._transaction() as connection:
            self._held(
                connection,
                "error = :error, holder = '', attempts = attempts + 1, free_at_ns = :now + :wait * (attempts + 1), "
                "state = CASE WHEN :final = 1 OR attempts + 1 >= :most THEN 'quarantined' ELSE state END",
                task,
                holder,
                error=error[:_ERROR_CHARACTERS],
                now=self._now_ns(connection),
                wait=_RETRY_DELAY_NS,
                final=int(final),
                most=ATTEMPTS,
            )

    def give_back(self, task: str, holder: str, wait_s: float) -> None:
        """Releases a task to other workers after `wait_s` seconds, without counting the attempt."""
        with self._transaction() as connection:
            free_at = self._now_ns(connection) + int(wait_s * 1e9)
            self._held(
                connection, "holder = '', free_at_ns = :free_at", task, holder, free_at=free_at
            )

    def _held(
        self, connection: Connection, change: str, task: str, holder: str, **values: object
    ) -> int:
        """Updates a task that is still held; `change` must be trusted SQL, values are bound."""
        return self._change(
            connection,
            f"UPDATE tasks SET {change} WHERE id = :id AND holder = :holder AND state IN ('received', 'checked')",  # noqa: S608
            id=task,
            holder=holder,
            **values,
        )

    def tasks(self, *captures: str) -> list[TaskRecord]:
        """Returns all tasks of the captures, oldest first."""
        from sqlalchemy import String, bindparam

        # PostgreSQL needs the type of an empty list.
        statement = self._text(
            "SELECT * FROM tasks WHERE capture IN :captures ORDER BY created_ns, id"
        ).bindparams(bindparam("captures", expanding=True, type_=String()))
        with self._transaction() as connection:
            return [
                _build_task(row)
                for row in connection.execute(statement, {"captures": captures}).mappings()
            ]

    def quarantined(self, limit: int = 100) -> list[TaskRecord]:
        """Returns quarantined tasks, newest first."""
        statement = "SELECT * FROM tasks WHERE state = 'quarantined' ORDER BY created_ns DESC, id LIMIT :most"
        with self._transaction() as connection:
            return [_build_task(row) for row in self._rows(connection, statement, most=limit)]

    def counts(self) -> dict[TaskState, int]:
        with self._transaction() as connection:
            rows = self._rows(connection, "SELECT state, COUNT(*) AS n FROM tasks GROUP BY state")
            return dict.fromkeys(STATES, 0) | {row["state"]: row["n"] for row in rows}

    def count_lacking(self) -> int:
        """Returns the number of captures without rows in the tables, which wait or are quarantined."""
        with self._transaction() as connection:
            [row] = self._rows(
                connection,
                "SELECT COUNT(DISTINCT capture) AS n FROM tasks t WHERE state IN ('received', 'checked', 'analysed', "
                "'quarantined') AND NOT EXISTS (SELECT 1 FROM tasks o WHERE o.capture = t.capture "
                "AND o.state = 'committed')",
            )
            return int(row["n"])

    def backfill(self, version: str, *, again: bool = False) -> int:
        """Queues analyses of captures that this version has not analysed yet; returns how many.

        Args:
            version: Version of the analysis.
            again: Also retry captures that this version quarantined.

        Captures with a task in progress are skipped.
        """
        with self._transaction() as connection:
            changed = 0
            if again:
                changed = self._change(
                    connection,
                    "UPDATE tasks SET state = 'received', attempts = 0, free_at_ns = 0, error = '', again = CASE WHEN "
                    "EXISTS (SELECT 1 FROM tasks o WHERE o.capture = tasks.capture AND o.state = 'committed') "
                    "THEN 1 ELSE again END WHERE state = 'quarantined' AND version = :version",
                    version=version,
                )
            return changed + sum(
                self._add_task(connection, row["id"], version, again=row["committed"] > 0)
                for row in self._rows(
                    connection,
                    "SELECT c.id, COUNT(d.id) AS committed FROM captures c LEFT JOIN tasks d ON d.capture = c.id "
                    "AND d.state = 'committed' WHERE c.complete = 1 AND NOT EXISTS (SELECT 1 FROM tasks t WHERE "
                    "t.capture = c.id AND (t.version = :version OR t.state NOT IN ('committed', 'quarantined'))) "
                    "GROUP BY c.id",
                    version=version,
                )
            )

    # batches

    def has_rows_to_commit(self, *, minutes: bool) -> bool:
        """Returns whether captures wait to be put into the tables, or (with `minutes`) usage
        minutes or job facts.
        """
        waiting = ["batches WHERE done = 0", "tasks WHERE state = 'analysed' AND batch IS NULL"]
        if minutes:
            waiting += ["usage_waiting", "job_facts WHERE batch IS NULL OR batch > 0"]
        with self._transaction() as connection:
            return any(self._rows(connection, f"SELECT 1 FROM {rows} LIMIT 1") for rows in waiting)  # noqa: S608

    def committed_tasks(self) -> dict[str, str]:
        """Returns the latest task of each capture whose rows should be in the tables."""
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT capture, id FROM tasks WHERE state = 'committed' ORDER BY created_ns",
            )
            return {row["capture"]: row["id"] for row in rows}

    def analyse_again(self, tasks: Iterable[str], term: str) -> None:
        """Queues tasks once more, whose rows are neither in the tables nor waiting for them.

        Raises:
            OutputError: `not-leading`: `term` does not lead.
        """
        with self._transaction() as connection:
            self._check_leader(connection, term)
            for task in tasks:
                self._change(
                    connection,
                    "UPDATE tasks SET state = 'received', again = 1, batch = NULL, holder = '', free_at_ns = 0 "
                    "WHERE id = :id",
                    id=task,
                )

    def open_batch(self, limit: int, term: str, above: int = 0) -> Batch | None:
        """Returns the batch to commit: one that was begun but not finished, else a new one of
        waiting tasks.

        Either all tasks of a batch replace earlier rows or none do.

        Args:
            limit: Max tasks of a new batch.
            term: Term by which this service leads.
            above: Number of the last batch in the tables. Where it is higher than any that this
                state knows, the state went back: what it has not committed may be in the tables.

        Raises:
            OutputError: `not-leading`: `term` does not lead.
        """
        with self._transaction() as connection:
            self._check_leader(connection, term)
            [row] = self._rows(connection, "SELECT COALESCE(MAX(number), 0) AS last FROM batches")
            if row["last"] < above:
                statement = (
                    "UPDATE tasks SET again = 1 WHERE state <> 'committed' AND batch IS NULL"
                )
                self._change(connection, statement)
            rows = self._rows(connection, "SELECT * FROM batches WHERE done = 0 ORDER BY number")
            if not rows:
                waiting = self._rows(
                    connection,
                    "SELECT id, again FROM tasks WHERE state = 'analysed' AND batch IS NULL ORDER BY created_ns, id "
                    "LIMIT :most",
                    most=limit,
                )
                if not waiting:
                    return None
                again = waiting[0]["again"]
                self._change(
                    connection,
                    "INSERT INTO batches (number, again, done) VALUES (:number, :again, 0)",
                    number=max(row["last"], above) + 1,
                    again=again,
                )
                rows = self._rows(connection, "SELECT * FROM batches WHERE done = 0")
                for row in waiting:
                    if row["again"] == again:
                        statement = "UPDATE tasks SET batch = :number WHERE id = :id"
                        self._change(connection, statement, number=rows[0]["number"], id=row["id"])
            number = rows[0]["number"]
            tasks = self._rows(
                connection, "SELECT * FROM tasks WHERE batch = :number ORDER BY id", number=number
            )
            return Batch(number, bool(rows[0]["again"]), tuple(_build_task(row) for row in tasks))

    def close_batch(self, number: int, term: str) -> None:
        """Marks the batch as committed to all tables. Errors as for `open_batch`."""
        with self._transaction() as connection:
            self._check_leader(connection, term)
            self._change(
                connection,
                "UPDATE tasks SET state = 'committed' WHERE batch = :number",
                number=number,
            )
            self._change(
                connection, "UPDATE batches SET done = 1 WHERE number = :number", number=number
            )

    def number(self, name: str) -> int:
        """Returns a stored number by name; 0 if it does not exist."""
        with self._transaction() as connection:
            rows = self._rows(connection, "SELECT value FROM numbers WHERE name = :name", name=name)
            return int(rows[0]["value"]) if rows else 0

    def put_number(self, name: str, value: int) -> None:
        with self._transaction() as connection:
            self._change(
                connection,
                "INSERT INTO numbers (name, value) VALUES (:name, :value) "
                "ON CONFLICT (name) DO UPDATE SET value = :value",
                name=name,
                value=value,
            )

    # leases

    def lead(self, name: str, holder: str, lease_s: float, url: str = "") -> bool:
        """Acquires or extends the lease `name` for `lease_s` seconds; returns whether `holder`, who
        is reached at `url`, has it.
        """
        with self._transaction() as connection:
            now = self._now_ns(connection)
            return bool(
                self._change(
                    connection,
                    "INSERT INTO leases (name, holder, until_ns, url) VALUES (:name, :holder, :until, :url) "
                    "ON CONFLICT (name) DO UPDATE SET holder = :holder, until_ns = :until, url = :url "
                    "WHERE leases.holder = :holder OR leases.until_ns <= :now",
                    name=name,
                    holder=holder,
                    now=now,
                    until=now + int(lease_s * 1e9),
                    url=url,
                )
            )

    def renew_lease(self, name: str, holder: str, lease_s: float) -> bool:
        """Extends a lease, even an expired one that nobody else took; returns False if another
        holder has led since.
        """
        with self._transaction() as connection:
            until = self._now_ns(connection) + int(lease_s * 1e9)
            statement = (
                "UPDATE leases SET until_ns = :until WHERE name = :name AND holder = :holder"
            )
            return bool(self._change(connection, statement, name=name, holder=holder, until=until))

    def leader(self) -> tuple[str, str] | None:
        """Returns the term of the service that leads now, and the URL at which others reach it; None if
        none does.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT holder, url FROM leases WHERE name = :name AND until_ns > :now",
                name=LEADER,
                now=self._now_ns(connection),
            )
            return (rows[0]["holder"], rows[0]["url"]) if rows else None

    def resign(self, holder: str) -> None:
        """Releases all leases of `holder`."""
        with self._transaction() as connection:
            self._change(connection, "DELETE FROM leases WHERE holder = :holder", holder=holder)

    # tokens

    def add_token(self, name: str, role: Role, *, days: float = 0, secret: str = "") -> str:
        """Adds a token; returns its secret, of which only a hash is stored.

        Args:
            name: Name of the token.
            role: Role that it grants.
            days: Days until it expires; 0: never.
            secret: Secret to use instead of a random one.

        Raises:
            UsageError: `token-exists`: the name is taken by a token that was not revoked.
        """
        secret = secret or f"tl_{secrets.token_urlsafe(32)}"
        with self._transaction() as connection:
            now = time.time_ns()
            self._change(
                connection, "DELETE FROM tokens WHERE name = :name AND revoked_ns > 0", name=name
            )
            added = self._change(
                connection,
                "INSERT INTO tokens (name, role, sha256, created_ns, expires_ns, revoked_ns) VALUES "
                "(:name, :role, :sha256, :now, :expires, 0) ON CONFLICT (name) DO NOTHING",
                name=name,
                role=role,
                sha256=hash_secret(secret),
                now=now,
                expires=now + int(days * 86_400e9) if days else 0,
            )
        if not added:
            raise UsageError(
                f"there is a token `{name}`",
                slug="token-exists",
                hint="revoke it first, or take another name",
            )
        return secret

    def token(self, secret: str) -> TokenRecord | None:
        """Returns the token with this secret; None if it is unknown, expired or revoked."""
        return self.find_token_by_hash(hash_secret(secret))

    def find_token_by_hash(self, sha256: str) -> TokenRecord | None:
        """Returns the token with this SHA-256 of its secret, as `token` does."""
        with self._transaction() as connection:
            rows = self._rows(
                connection, "SELECT * FROM tokens WHERE sha256 = :sha256", sha256=sha256
            )
        token = msgspec.convert(dict(rows[0]), TokenRecord) if rows else None
        return token if token is not None and token.opens else None

    def tokens(self) -> list[TokenRecord]:
        """Returns all tokens, sorted by name."""
        with self._transaction() as connection:
            rows = self._rows(connection, "SELECT * FROM tokens ORDER BY name")
        return [msgspec.convert(dict(row), TokenRecord) for row in rows]

    def revoke_token(self, name: str) -> bool:
        """Revokes a token; returns False if there is no such token that is not revoked."""
        with self._transaction() as connection:
            statement = "UPDATE tokens SET revoked_ns = :now WHERE name = :name AND revoked_ns = 0"
            return bool(self._change(connection, statement, now=time.time_ns(), name=name))

    # audit

    def note(
        self, actor: str, action: str, result: str, details: Mapping[str, str] | None = None
    ) -> None:
        """Appends an entry to the audit log, which database triggers protect from changes."""
        with self._transaction() as connection:
            self._change(
                connection,
                "INSERT INTO audit (id, at_ns, who, what, result, details) "
                "VALUES (:id, :now, :who, :what, :result, :details)",
                id=secrets.token_hex(8),
                now=self._now_ns(connection),
                who=actor,
                what=action,
                result=result,
                details=json.dumps(dict(details or {})),
            )

    def audit(self, limit: int = 1000, before_ns: int = 2**63 - 1) -> list[AuditEntry]:
        """Returns the latest entries of the audit log before an instant, newest first."""
        with self._transaction() as connection:
            return [
                msgspec.convert(
                    {**row, "details": json.loads(row["details"])}, AuditEntry, strict=False
                )
                for row in self._rows(
                    connection,
                    "SELECT * FROM audit WHERE at_ns < :before ORDER BY at_ns DESC, id LIMIT :most",
                    before=before_ns,
                    most=limit,
                )
            ]


def _build_capture(row: RowMapping) -> CaptureRecord:
    return msgspec.convert(
        {**row, "files": msgspec.json.decode(row["files"]), "complete": bool(row["complete"])},
        CaptureRecord,
    )


def _build_task(row: RowMapping) -> TaskRecord:
    return msgspec.convert({**row, "again": bool(row["again"])}, TaskRecord)
