"""What is said of jobs, by agents and captures, until it is in the tables; a row for each change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from traceloom.store.database import StateDatabase

_KEPT_NS = 90 * 86_400 * 10**9  # how long the last thing that was said of a job is remembered here
_MOST_LABELS = 100


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
        news = {name: value for name, value in msgspec.structs.asdict(later).items() if value and name != "labels"}
        labels = dict(sorted((self.labels | later.labels).items())[:_MOST_LABELS])
        return msgspec.structs.replace(self, **news, labels=labels)


class WaitingFacts(NamedTuple):
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
                before = msgspec.json.decode(rows[0]["document"], type=JobFacts) if rows else JobFacts()
                now = before.with_more(facts)
                if rows and now == before:
                    continue
                since_ns = max(at_ns, rows[0]["since_ns"] + 1) if rows else at_ns
                changes += self._change(
                    connection,
                    "INSERT INTO job_facts (job, since_ns, batch, document) VALUES (:job, :since, NULL, :document)",
                    job=job, since=since_ns, document=msgspec.json.encode(now).decode(),
                )  # fmt: skip
        return changes

    def open_job_facts(self, most: int, term: str) -> tuple[int, list[WaitingFacts]] | None:
        """The number of a batch that is to be put into the tables, and it; None where nothing waits.

        The batch that was begun and not ended comes first.

        Raises:
            OutputError: `not-leading`: it is not `term` that leads.
        """
        rows = self._open_rows("job_facts", ("since_ns", "job"), "jobs", most, term)
        waiting = [
            WaitingFacts(row["job"], row["since_ns"], msgspec.json.decode(row["document"], type=JobFacts))
            for row in rows
        ]
        return (rows[0]["batch"], waiting) if rows else None

    def close_job_facts(self, number: int, term: str) -> None:
        """The tables hold the batch; of each job what was said last is remembered. Errors as of `open_job_facts`."""
        with self._transaction() as connection:
            self._check_leader(connection, term)
            self._change(connection, "UPDATE job_facts SET batch = 0 WHERE batch = :number", number=number)
            self._change(
                connection,
                "DELETE FROM job_facts WHERE batch = 0 AND (since_ns < :old OR EXISTS (SELECT 1 FROM job_facts later "
                "WHERE later.job = job_facts.job AND later.since_ns > job_facts.since_ns))",
                old=self._now_ns(connection) - _KEPT_NS,
            )
