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
