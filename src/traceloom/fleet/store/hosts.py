"""State of hosts: enrolment, trace requests, and usage minutes and job facts that wait for the
tables.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from traceloom.fleet.store.database import StateDatabase, hash_secret
from traceloom.fleet.store.rules import FleetEvent, TriggerState


class PendingMinute(NamedTuple):
    """Usage of a host in a minute (counted from 1970), as text.

    Minutes from `since` up to this one have no data.
    """

    host: str
    minute: int
    since: int
    document: str


class HostState(TriggerState):
    """Hosts, their trace requests, and their usage minutes until these are in the tables."""

    def add_enrolment(self, host: str, days: float) -> str:
        """Creates a single-use token with which `host` joins the fleet (any host if it is "")."""
        secret = f"tle_{secrets.token_urlsafe(32)}"
        with self._transaction() as connection:
            self._change(
                connection,
                "INSERT INTO enrolments (sha256, host, expires_ns) VALUES (:sha256, :host, :expires)",
                sha256=hash_secret(secret),
                host=host,
                expires=time.time_ns() + int(days * 86_400e9),
            )
        return secret

    def take_enrolment(self, secret: str, host: str) -> str | None:
        """Uses up an enrolment token; returns the host it is for ("" is any).

        Returns None if the token is unknown or has expired. A token for a different host is not
        used up.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT * FROM enrolments WHERE sha256 = :sha256",
                sha256=hash_secret(secret),
            )
            for_another = bool(rows) and rows[0]["host"] not in {"", host}
            if not for_another and not self._change(
                connection,
                "DELETE FROM enrolments WHERE sha256 = :sha256",
                sha256=hash_secret(secret),
            ):
                return None
            return str(rows[0]["host"]) if rows[0]["expires_ns"] > time.time_ns() else None

    def put_host(self, host: str, secret: str) -> None:
        """Enrols a host, or replaces the secret of one that is already enrolled."""
        with self._transaction() as connection:
            self._change(
                connection,
                "INSERT INTO hosts (host, sha256, enrolled_ns, usage_through) VALUES (:host, :sha256, :now, 0) "
                "ON CONFLICT (host) DO UPDATE SET sha256 = :sha256, enrolled_ns = :now",
                host=host,
                sha256=hash_secret(secret),
                now=time.time_ns(),
            )

    def remove_host(self, host: str) -> bool:
        """Removes a host from the fleet; returns False if it was not enrolled."""
        with self._transaction() as connection:
            return bool(self._change(connection, "DELETE FROM hosts WHERE host = :host", host=host))

    def hosts(self) -> dict[str, str]:
        """Returns the SHA-256 of each host's secret, by host."""
        with self._transaction() as connection:
            return {
                row["host"]: row["sha256"] for row in self._rows(connection, "SELECT * FROM hosts")
            }

    # requests for traces

    def put_request(
        self,
        name: str,
        requested_ns: int,
        document: str,
        term: str,
        *,
        ended: bool,
        events: Sequence[FleetEvent] = (),
    ) -> None:
        """Stores the progress of a request; if this ends the request, queues `events` for webhooks.

        Raises:
            OutputError: `not-leading`: `term` does not lead.
        """
        with self._transaction() as connection:
            self._check_leader(connection, term)
            before = self._rows(connection, "SELECT ended FROM requests WHERE id = :id", id=name)
            self._change(
                connection,
                "INSERT INTO requests (id, asked_ns, ended, document) VALUES (:id, :asked, :ended, :document) "
                "ON CONFLICT (id) DO UPDATE SET ended = :ended, document = :document",
                id=name,
                asked=requested_ns,
                ended=int(ended),
                document=document,
            )
            if ended and not (before and before[0]["ended"]):
                self._tell(connection, events)

    def requests(self, *, limit: int = 100) -> list[str]:
        """Returns documents of requests: all that have not ended, then the others, newest first."""
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT document FROM requests ORDER BY ended, asked_ns DESC LIMIT :most",
                most=limit,
            )
            return [row["document"] for row in rows]

    # usage that waits to be put into the tables

    def add_usage(self, host: str, minutes: Mapping[int, str]) -> None:
        """Keeps a host's minutes until they are in the tables.

        Minutes arrive in order, so that all earlier ones have been received.

        Args:
            host: Nothing is kept for a host that is not enrolled.
            minutes: Minute since 1970 -> its rows, as text.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection, "SELECT usage_through FROM hosts WHERE host = :host", host=host
            )
            if not rows:  # the host was removed in the meantime
                return
            through = rows[0]["usage_through"]
            for minute in sorted(minutes):
                if minute <= through:
                    continue
                self._change(
                    connection,
                    "INSERT INTO usage_waiting (host, minute, since, document) "
                    "VALUES (:host, :minute, :since, :document)",
                    host=host,
                    minute=minute,
                    since=through + 1 if through else minute,
                    document=minutes[minute],
                )
                through = minute
            self._change(
                connection,
                "UPDATE hosts SET usage_through = :through WHERE host = :host",
                host=host,
                through=through,
            )

    def waiting_minutes(self) -> int:
        """Returns the number of host minutes that are not in the tables yet."""
        with self._transaction() as connection:
            [row] = self._rows(connection, "SELECT COUNT(*) AS waiting FROM usage_waiting")
            return int(row["waiting"])

    def skip_usage(self, through: Mapping[str, int]) -> None:
        """Takes the minutes of hosts up to these, which the tables hold, as received."""
        with self._transaction() as connection:
            for host, minute in through.items():
                for statement in (
                    "UPDATE hosts SET usage_through = :minute WHERE host = :host AND usage_through < :minute",
                    "DELETE FROM usage_waiting WHERE host = :host AND minute <= :minute",
                    "UPDATE usage_waiting SET since = :minute + 1 WHERE host = :host AND since <= :minute",
                ):
                    self._change(connection, statement, host=host, minute=minute)

    def open_usage(
        self, limit: int, term: str, above: int = 0
    ) -> tuple[int, list[PendingMinute]] | None:
        """Returns the number and the minutes of the batch to put into the tables; None if none
        wait.

        A batch that was begun but not finished comes first; a new one has a number above that
        given, the last in the tables.

        Raises:
            OutputError: `not-leading`: `term` does not lead.
        """
        rows = self._open_rows(
            "usage_waiting", ("minute", "host"), "usage", limit, term=term, above=above
        )
        waiting = [
            PendingMinute(row["host"], row["minute"], row["since"], row["document"]) for row in rows
        ]
        return (rows[0]["batch"], waiting) if rows else None

    def close_usage(self, number: int, term: str) -> None:
        """Marks the batch as stored in the tables. Errors as for `open_usage`."""
        with self._transaction() as connection:
            self._check_leader(connection, term)
            self._change(
                connection, "DELETE FROM usage_waiting WHERE batch = :number", number=number
            )


# How long the latest facts of a job are remembered here.
_RETENTION_NS = 90 * 86_400 * 10**9
_MAX_LABELS = 100


class JobFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that a job states about itself; "" is unknown."""

    scheduler: str = ""
    user: str = ""
    model: str = ""
    product: str = ""
    division: str = ""
    application: str = ""
    framework: str = ""
    labels: dict[str, str] = {}

    def with_more(self, later: JobFacts) -> JobFacts:
        """Returns these facts updated with later ones, which take precedence; no known fact is
        dropped.
        """
        updates = {
            name: value
            for name, value in msgspec.structs.asdict(later).items()
            if value and name != "labels"
        }
        labels = dict(sorted((self.labels | later.labels).items())[:_MAX_LABELS])
        return msgspec.structs.replace(self, **updates, labels=labels)


class PendingFacts(NamedTuple):
    """Facts of a job that hold from an instant on."""

    job: str
    since_ns: int
    facts: JobFacts


class JobFactState(StateDatabase):
    """The latest facts of each job, and the facts that are not in the tables yet."""

    def say_of_jobs(self, statements: Mapping[str, JobFacts], at_ns: int) -> int:
        """Records facts of jobs stated at an instant; returns how many jobs have changed facts."""
        changes = 0
        with self._transaction() as connection:
            for job, facts in statements.items():
                rows = self._rows(
                    connection,
                    "SELECT since_ns, document FROM job_facts WHERE job = :job ORDER BY since_ns DESC LIMIT 1",
                    job=job,
                )
                before = (
                    msgspec.json.decode(rows[0]["document"], type=JobFacts) if rows else JobFacts()
                )
                merged = before.with_more(facts)
                if rows and merged == before:
                    continue
                changes += self._change(
                    connection,
                    "INSERT INTO job_facts (job, since_ns, batch, document) VALUES (:job, :since, NULL, :document)",
                    job=job,
                    since=max(at_ns, rows[0]["since_ns"] + 1) if rows else at_ns,
                    document=msgspec.json.encode(merged).decode(),
                )
        return changes

    def job_owners(self, job: str) -> set[str]:
        """Returns whose a job is: the user of whom hosts told last, else who uploaded its first
        capture.
        """
        latest = "SELECT document FROM job_facts WHERE job = :job ORDER BY since_ns DESC LIMIT 1"
        first = "SELECT uploader FROM captures WHERE job = :job ORDER BY received_ns LIMIT 1"
        with self._transaction() as connection:
            for row in self._rows(connection, latest, job=job):
                if user := msgspec.json.decode(row["document"], type=JobFacts).user:
                    return {user}
            return {row["uploader"] for row in self._rows(connection, first, job=job)}

    def open_job_facts(
        self, limit: int, term: str, above: int = 0
    ) -> tuple[int, list[PendingFacts]] | None:
        """Returns the number and the facts of the batch to put into the tables; None if none wait.

        Batches and `above` are as for `open_usage`.

        Raises:
            OutputError: `not-leading`: `term` does not lead.
        """
        rows = self._open_rows(
            "job_facts", ("since_ns", "job"), "jobs", limit, term=term, above=above
        )
        waiting = [
            PendingFacts(
                row["job"], row["since_ns"], msgspec.json.decode(row["document"], type=JobFacts)
            )
            for row in rows
        ]
        return (rows[0]["batch"], waiting) if rows else None

    def close_job_facts(self, number: int, term: str) -> None:
        """Marks the batch as stored in the tables; keeps the latest facts of each job.

        Errors as for `open_job_facts`.
        """
        with self._transaction() as connection:
            self._check_leader(connection, term)
            self._change(
                connection, "UPDATE job_facts SET batch = 0 WHERE batch = :number", number=number
            )
            self._change(
                connection,
                "DELETE FROM job_facts WHERE batch = 0 AND (since_ns < :old OR EXISTS (SELECT 1 FROM job_facts later "
                "WHERE later.job = job_facts.job AND later.since_ns > job_facts.since_ns))",
                old=self._now_ns(connection) - _RETENTION_NS,
            )
