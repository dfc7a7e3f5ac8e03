"""What the state knows of triggers: the rules, what they did and cost; and which regressions are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from traceloom.store.webhook_state import FleetEvent, WebhookState

if TYPE_CHECKING:
    from sqlalchemy import Connection

_RULES, _LOOKED, _BATCH = "triggers", "regressions looked for", "batch that rules have seen"


class CommittedCapture(NamedTuple):
    """A capture whose rows came into the tables, and its job."""

    capture: str
    job: str


class JobStatement(NamedTuple):
    """What a job said of itself, JSON, and when, ns since the epoch."""

    job: str
    said_ns: int
    document: str


class TriggerState(WebhookState):
    """Rules, charges and counts, as documents of their owner."""

    def trigger_rules(self) -> str:
        """The rules as they were set, TOML; "" where nobody has."""
        with self._transaction() as connection:
            rows = self._rows(connection, "SELECT document FROM settings WHERE name = :name", name=_RULES)
            return str(rows[0]["document"]) if rows else ""

    def set_trigger_rules(self, text: str) -> None:
        """Put rules in the place of those before."""
        with self._transaction() as connection:
            self._set(connection, "settings", _RULES, text)

    def trigger_documents(self) -> tuple[list[str], dict[str, str]]:
        """Charges, and rule -> what it did."""
        with self._transaction() as connection:
            charges = self._rows(connection, "SELECT document FROM trigger_charges")
            counts = self._rows(connection, "SELECT name, document FROM trigger_counts")
            return [row["document"] for row in charges], {row["name"]: row["document"] for row in counts}

    def put_trigger_documents(
        self, charges: Mapping[str, str], counts: Mapping[str, str], gone: Sequence[str] = ()
    ) -> None:
        """Write charges (by request) and counts (by rule) that have changed, and forget others."""
        with self._transaction() as connection:
            for request, document in charges.items():
                self._change(
                    connection,
                    "INSERT INTO trigger_charges (request, document) VALUES (:request, :document) "
                    "ON CONFLICT (request) DO UPDATE SET document = :document",
                    request=request, document=document,
                )  # fmt: skip
            for request in gone:
                self._change(connection, "DELETE FROM trigger_charges WHERE request = :request", request=request)
            for name, document in counts.items():
                self._set(connection, "trigger_counts", name, document)

    def newly_committed(self, most: int = 1000) -> tuple[int, list[CommittedCapture]]:
        """The last batch, and captures that were first analysed in it or since the one that was noted last.

        None are new before one was noted.
        """
        with self._transaction() as connection:
            rows = self._rows(connection, "SELECT document FROM settings WHERE name = :name", name=_BATCH)
            [last] = self._rows(connection, "SELECT COALESCE(MAX(batch), 0) AS n FROM tasks WHERE state = 'committed'")
            through = last["n"]
            new = [] if not rows else self._rows(
                connection,
                "SELECT t.capture, c.job FROM tasks t JOIN captures c ON c.id = t.capture WHERE t.state = 'committed' "
                "AND t.again = 0 AND t.batch > :after AND t.batch <= :through ORDER BY t.batch DESC, t.capture "
                "LIMIT :most",
                after=int(rows[0]["document"]), through=through, most=most,
            )  # fmt: skip
            return through, [CommittedCapture(row["capture"], row["job"]) for row in new]

    def note_committed(self, through: int) -> None:
        """Captures up to this batch are new no more."""
        with self._transaction() as connection:
            self._set(connection, "settings", _BATCH, str(through))

    def state_job(self, job: str, document: str) -> bool:
        """Take what a job says of itself, to be put into the tables; False where it said that before."""
        with self._transaction() as connection:
            rows = self._rows(connection, "SELECT document FROM job_statements WHERE job = :job", job=job)
            if rows and rows[0]["document"] == document:
                return False
            self._change(
                connection,
                "INSERT INTO job_statements (job, said_ns, batch, document) VALUES (:job, :now, 0, :document) "
                "ON CONFLICT (job) DO UPDATE SET said_ns = :now, batch = 0, document = :document",
                job=job, now=self._now_ns(connection), document=document,
            )  # fmt: skip
            return True

    def open_statements(self, term: str, most: int = 10_000) -> tuple[int, list[JobStatement]] | None:
        """The number of a batch of statements that is to be put into the tables, and them; None where none waits.

        The batch that was begun and not ended comes first.

        Raises:
            OutputError: `not-leading`: it is not `term` that leads.
        """
        begun = "SELECT job, said_ns, document, batch FROM job_statements WHERE batch > 0"
        with self._transaction() as connection:
            self._check_leader(connection, term)
            rows = self._rows(connection, begun)
            if not rows:
                waiting = self._rows(
                    connection, "SELECT job FROM job_statements WHERE batch = 0 ORDER BY said_ns, job LIMIT :most",
                    most=most,
                )  # fmt: skip
                if not waiting:
                    return None
                self._change(
                    connection,
                    "INSERT INTO numbers (name, value) VALUES ('statements', 1) "
                    "ON CONFLICT (name) DO UPDATE SET value = numbers.value + 1",
                )
                [number] = self._rows(connection, "SELECT value FROM numbers WHERE name = 'statements'")
                for row in waiting:
                    statement = "UPDATE job_statements SET batch = :number WHERE job = :job"
                    self._change(connection, statement, number=number["value"], job=row["job"])
                rows = self._rows(connection, begun)
            return rows[0]["batch"], [JobStatement(row["job"], row["said_ns"], row["document"]) for row in rows]

    def close_statements(self, number: int, term: str) -> None:
        """The tables hold the batch. Errors as of `open_statements`."""
        with self._transaction() as connection:
            self._check_leader(connection, term)
            self._change(connection, "UPDATE job_statements SET batch = NULL WHERE batch = :number", number=number)

    def add_regressions(
        self, since_ns: Mapping[str, int], apart_ns: int, event: Callable[[str], FleetEvent]
    ) -> list[str]:
        """Know of regressions, and tell webhooks of those that are new; these.

        Args:
            since_ns: Series -> when it became slower, in ns since the epoch.
            apart_ns: How much later a series must have become slower for that to be another regression: more jobs move
                the place of a change a little.
            event: What webhooks are told of a series.

        At the very first look all are known, and none is new.
        """
        with self._transaction() as connection:
            first = not self._rows(connection, "SELECT document FROM settings WHERE name = :name", name=_LOOKED)
            self._set(connection, "settings", _LOOKED, "")
            rows = self._rows(connection, "SELECT series, since_ns FROM regressions_seen")
            seen = {row["series"]: row["since_ns"] for row in rows}
            new = [name for name, at_ns in since_ns.items() if name not in seen or at_ns > seen[name] + apart_ns]
            for name in new:
                self._change(
                    connection,
                    "INSERT INTO regressions_seen (series, since_ns) VALUES (:series, :since) "
                    "ON CONFLICT (series) DO UPDATE SET since_ns = :since",
                    series=name, since=since_ns[name],
                )  # fmt: skip
            if first:
                return []
            self._tell(connection, [event(name) for name in new])
            return new

    def _set(self, connection: Connection, table: str, name: str, document: str) -> None:
        """Put a document under a name into a table of such, which is one of ours."""
        self._change(
            connection,
            f"INSERT INTO {table} (name, document) VALUES (:name, :document) "  # noqa: S608
            "ON CONFLICT (name) DO UPDATE SET document = :document",
            name=name, document=document,
        )  # fmt: skip
