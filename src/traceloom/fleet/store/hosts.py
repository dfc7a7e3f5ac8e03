"""Hosts, requests, usage minutes, job facts until they are in the tables."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from traceloom.fleet.store.database import StateDatabase, hash_secret
from traceloom.fleet.store.rules import FleetEvent, TriggerState


class PendingMinute(NamedTuple):
    """What a host used in a minute since 1970, as text; of the minutes before it, from `since` on,
    it says nothing.
    """

    host: str
    minute: int
    since: int
    document: str


class HostState(TriggerState):
    """Hosts, their requests, and their minutes of usage until these are in the tables."""

    def add_enrolment(self, host: str, days: float) -> str:
        """Make a token by which a host joins the fleet, once: this one, or any where `host` is ""."""
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
        """Use up a token of enrolment: the host that it is for ("" any), None where it is none or
        has expired.

        One that is for another than this host stays.
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
        """A host belongs to the fleet, and shows this secret from now on."""
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
        """Let a host belong to the fleet no more; False where it did not."""
        with self._transaction() as connection:
            return bool(self._change(connection, "DELETE FROM hosts WHERE host = :host", host=host))

    def hosts(self) -> dict[str, str]:
        """Host -> SHA-256 of the secret that it shows."""
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
        """Write down how far a request is; where it ends by this, webhooks are told the events.

        Raises:
            OutputError: `not-leading`: it is not `term` that leads.
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
        """Documents of requests, newest first: all that have not ended, and of the others the last
        ones.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT document FROM requests ORDER BY ended, asked_ns DESC LIMIT :most",
                most=limit,
            )
            return [row["document"] for row in rows]

    # usage that waits to be put into the tables

    def add_usage(self, host: str, minutes: Mapping[int, str]) -> None:
        """Keep a host's minutes until they are in the tables; they come in order, so earlier ones
        are there.

        Args:
            host: Belongs to the fleet; of any other nothing is kept.
            minutes: Minute since 1970 -> its rows, as text.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection, "SELECT usage_through FROM hosts WHERE host = :host", host=host
            )
            if not rows:  # it was removed meanwhile
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
        """How many minutes of hosts are not in the tables yet."""
        with self._transaction() as connection:
            [row] = self._rows(connection, "SELECT COUNT(*) AS waiting FROM usage_waiting")
            return int(row["waiting"])

    def open_usage(self, limit: int, term: str) -> tuple[int, list[PendingMinute]] | None:
        """The number of a batch of minutes that is to be put into the tables, and them; None where
        none waits.

        The batch that was begun and not ended comes first.

        Raises:
            OutputError: `not-leading`: it is not `term` that leads.
        """
        rows = self._open_rows("usage_waiting", ("minute", "host"), "usage", limit, term)
        waiting = [
            PendingMinute(row["host"], row["minute"], row["since"], row["document"]) for row in rows
        ]
        return (rows[0]["batch"], waiting) if rows else None

    def close_usage(self, number: int, term: str) -> None:
        """The tables hold the batch. Errors as of `open_usage`."""
        with self._transaction() as connection:
            self._check_leader(connection, term)
            self._change(
                connection, "DELETE FROM usage_waiting WHERE batch = :number", number=number
            )


_RETENTION_NS = (
    90 * 86_400 * 10**9
)  # how long the last thing that was said of a job is remembered here
_MAX_LABELS = 100


class JobFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job says of itself; "": nothing says it."""

    scheduler: str = ""
    user: str = ""
    model: str = ""
    product: str = ""
    division: str = ""
    application: str = ""
    framework: str = ""
    labels: dict[str, str] = {}

    def with_more(self, later: JobFacts) -> JobFacts:
        """With what is said later, which goes before; nothing that was said is unsaid."""
        news = {
            name: value
            for name, value in msgspec.structs.asdict(later).items()
            if value and name != "labels"
        }
        labels = dict(sorted((self.labels | later.labels).items())[:_MAX_LABELS])
        return msgspec.structs.replace(self, **news, labels=labels)


class PendingFacts(NamedTuple):
    """What is said of a job from an instant on."""

    job: str
    since_ns: int
    facts: JobFacts


class JobFactState(StateDatabase):
    """What was said of jobs last, and what of it is not in the tables yet."""

    def say_of_jobs(self, statements: Mapping[str, JobFacts], at_ns: int) -> int:
        """Take what is said of jobs at an instant; of how many it is new."""
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
                now = before.with_more(facts)
                if rows and now == before:
                    continue
                since_ns = max(at_ns, rows[0]["since_ns"] + 1) if rows else at_ns
                changes += self._change(
                    connection,
                    "INSERT INTO job_facts (job, since_ns, batch, document) VALUES (:job, :since, NULL, :document)",
                    job=job,
                    since=since_ns,
                    document=msgspec.json.encode(now).decode(),
                )
        return changes

    def open_job_facts(self, limit: int, term: str) -> tuple[int, list[PendingFacts]] | None:
        """The number of a batch that is to be put into the tables, and it; None where nothing
        waits.

        The batch that was begun and not ended comes first.

        Raises:
            OutputError: `not-leading`: it is not `term` that leads.
        """
        rows = self._open_rows("job_facts", ("since_ns", "job"), "jobs", limit, term)
        waiting = [
            PendingFacts(
                row["job"], row["since_ns"], msgspec.json.decode(row["document"], type=JobFacts)
            )
            for row in rows
        ]
        return (rows[0]["batch"], waiting) if rows else None

    def close_job_facts(self, number: int, term: str) -> None:
        """The tables hold the batch; of each job what was said last is remembered.

        Errors as of `open_job_facts`.
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
