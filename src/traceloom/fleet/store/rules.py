"""State of versioned documents, trigger rules and charges, webhooks and their deliveries."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

from traceloom.errors import UsageError
from traceloom.fleet.store.database import StateDatabase

if TYPE_CHECKING:
    from sqlalchemy import Connection


DocumentName = Literal["owners", "prices"]


class StoredDocument(NamedTuple):
    """A version (from 1 on) of a document: when it took effect, who wrote it, its text."""

    version: int
    at_ns: int
    who: str
    document: str


class DocumentState(StateDatabase):
    """Versioned documents."""

    def document(self, name: DocumentName, version: int | None = None) -> StoredDocument | None:
        """Returns a version of a document, by default the latest; None if it does not exist."""
        versions = self.documents(name, 1, version)
        return versions[0] if versions else None

    def documents(
        self, name: DocumentName, limit: int = 1000, version: int | None = None
    ) -> list[StoredDocument]:
        """Returns the versions of a document, newest first; only `version` if it is given."""
        with self._transaction() as connection:
            return [
                StoredDocument(row["version"], row["at_ns"], row["who"], row["document"])
                for row in self._rows(
                    connection,
                    "SELECT version, at_ns, who, document FROM documents WHERE name = :name "
                    "AND (:version = 0 OR version = :version) ORDER BY version DESC LIMIT :most",
                    name=name,
                    version=version or 0,
                    most=limit,
                )
            ]

    def put_document(self, name: DocumentName, author: str, document: str) -> int:
        """Stores a new version; returns its number."""
        with self._transaction() as connection:
            # Concurrent writers get different numbers, or the primary key refuses the second.
            [row] = self._rows(
                connection,
                "SELECT COALESCE(MAX(version), 0) + 1 AS version FROM documents WHERE name = :name",
                name=name,
            )
            self._change(
                connection,
                "INSERT INTO documents (name, version, at_ns, who, document) "
                "VALUES (:name, :version, :now, :who, :document)",
                name=name,
                version=row["version"],
                now=self._now_ns(connection),
                who=author,
                document=document,
            )
            return int(row["version"])


EventName = Literal["request.done", "request.partial", "request.failed", "regression.new"]
EVENTS: tuple[EventName, ...] = get_args(EventName)
MAX_WEBHOOKS = 32
MAX_WAITING = 1000
"""Max pending deliveries of a webhook; further ones are dropped and counted."""


class FleetEvent(NamedTuple):
    """An event sent to webhooks.

    `id` is the same on every retry; `document` is the body, JSON.
    """

    id: str
    event: str
    document: str


class WebhookRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook, without its secret.

    `failed`: given up after a day; `dropped`: too many waited; `error`: the last.
    """

    name: str
    url: str
    events: tuple[EventName, ...]
    created_ns: int
    waiting: int = 0
    delivered: int = 0
    failed: int = 0
    dropped: int = 0
    error: str = ""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A pending delivery of an event to a webhook, with everything needed to send it."""

    webhook: str
    url: str
    secret: str
    id: str
    event: str
    document: str
    created_ns: int
    attempts: int


class WebhookState(StateDatabase):
    """Webhooks and their pending deliveries."""

    def add_webhook(self, name: str, url: str, events: Collection[EventName]) -> str:
        """Adds a webhook; returns its secret, which is not returned again.

        Raises:
            UsageError: `webhook-exists`; `too-many-webhooks`.
        """
        secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
        with self._transaction() as connection:
            [row] = self._rows(connection, "SELECT COUNT(*) AS number FROM webhooks")
            if row["number"] >= MAX_WEBHOOKS:
                raise UsageError(
                    f"there are {MAX_WEBHOOKS} webhooks",
                    slug="too-many-webhooks",
                    hint="remove some",
                )
            added = self._change(
                connection,
                "INSERT INTO webhooks (name, url, secret, events, created_ns, delivered, failed, dropped, error) "
                "VALUES (:name, :url, :secret, :events, :now, 0, 0, 0, '') ON CONFLICT (name) DO NOTHING",
                name=name,
                url=url,
                secret=secret,
                events=json.dumps(sorted(events)),
                now=time.time_ns(),
            )
        if not added:
            raise UsageError(
                f"there is a webhook `{name}`",
                slug="webhook-exists",
                hint="remove it, or take another name",
            )
        return secret

    def remove_webhook(self, name: str) -> bool:
        """Removes a webhook and its pending deliveries; returns False if it does not exist."""
        with self._transaction() as connection:
            self._change(connection, "DELETE FROM deliveries WHERE webhook = :name", name=name)
            return bool(
                self._change(connection, "DELETE FROM webhooks WHERE name = :name", name=name)
            )

    def webhooks(self) -> list[WebhookRecord]:
        """Returns all webhooks, sorted by name."""
        with self._transaction() as connection:
            return [
                msgspec.convert({**row, "events": json.loads(row["events"])}, WebhookRecord)
                for row in self._rows(
                    connection,
                    "SELECT name, url, events, created_ns, delivered, failed, dropped, error, (SELECT COUNT(*) FROM "
                    "deliveries WHERE webhook = webhooks.name) AS waiting FROM webhooks ORDER BY name",
                )
            ]

    def webhook_secret(self, name: str) -> str | None:
        """Returns the secret that signs a webhook's deliveries; None if there is no such
        webhook.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection, "SELECT secret FROM webhooks WHERE name = :name", name=name
            )
            return str(rows[0]["secret"]) if rows else None

    def due_deliveries(self, now_ns: int, busy: Collection[str] = ()) -> list[Delivery]:
        """Returns the oldest due delivery of each webhook that is not in `busy`."""
        with self._transaction() as connection:
            rows = [
                self._rows(
                    connection,
                    "SELECT d.webhook, w.url, w.secret, d.id, d.event, d.document, d.created_ns, d.attempts "
                    "FROM deliveries d JOIN webhooks w ON w.name = d.webhook WHERE d.webhook = :name "
                    "AND d.due_ns <= :now ORDER BY d.due_ns, d.created_ns, d.id LIMIT 1",
                    now=now_ns,
                    name=row["webhook"],
                )
                for row in self._rows(
                    connection,
                    "SELECT DISTINCT webhook FROM deliveries WHERE due_ns <= :now",
                    now=now_ns,
                )
                if row["webhook"] not in busy
            ]
            return [msgspec.convert(dict(row), Delivery) for (row,) in filter(None, rows)]

    def close_delivery(
        self, delivery: Delivery, error: str = "", due_ns: int | None = None
    ) -> None:
        """Records the outcome of an attempt: delivered, to be retried at `due_ns`, or given up."""
        delivery_key = {"name": delivery.webhook, "id": delivery.id}
        with self._transaction() as connection:
            self._change(
                connection,
                "UPDATE webhooks SET error = :error WHERE name = :name",
                error=error,
                name=delivery.webhook,
            )
            if due_ns is not None:
                self._change(
                    connection,
                    "UPDATE deliveries SET due_ns = :due, attempts = attempts + 1 WHERE webhook = :name AND id = :id",
                    due=due_ns,
                    **delivery_key,
                )
                return
            self._change(
                connection,
                "DELETE FROM deliveries WHERE webhook = :name AND id = :id",
                **delivery_key,
            )
            counted = "failed = failed + 1" if error else "delivered = delivered + 1"
            self._change(
                connection,
                f"UPDATE webhooks SET {counted} WHERE name = :name",  # noqa: S608
                name=delivery.webhook,
            )

    def _tell(self, connection: Connection, events: Sequence[FleetEvent]) -> None:
        """Queues events for every subscribed webhook, in the transaction of the change they
        report.
        """
        if not events:
            return
        now = time.time_ns()
        waiting = "SELECT name, events, (SELECT COUNT(*) FROM deliveries WHERE webhook = webhooks.name) AS n FROM webhooks"
        for row in self._rows(connection, waiting):
            subscribed = [event for event in events if event.event in json.loads(row["events"])]
            free_slots = max(MAX_WAITING - row["n"], 0)
            for event in subscribed[:free_slots]:
                self._change(
                    connection,
                    "INSERT INTO deliveries (webhook, id, event, created_ns, due_ns, attempts, document) "
                    "VALUES (:webhook, :id, :event, :now, :now, 0, :document) ON CONFLICT DO NOTHING",
                    webhook=row["name"],
                    id=event.id,
                    event=event.event,
                    now=now,
                    document=event.document,
                )
            if dropped := len(subscribed[free_slots:]):
                statement = "UPDATE webhooks SET dropped = dropped + :more WHERE name = :name"
                self._change(connection, statement, more=dropped, name=row["name"])


_RULES, _LOOKED, _BATCH = "triggers", "regressions looked for", "batch that rules have seen"


class CommittedCapture(NamedTuple):
    """A capture whose rows were committed to the tables, and its job."""

    capture: str
    job: str


class TriggerState(WebhookState):
    """Rules, charges and counts, as documents in the format of `fleet.triggers`."""

    def trigger_rules(self) -> str:
        """Returns the rules in TOML; "" if none were set."""
        with self._transaction() as connection:
            rows = self._rows(
                connection, "SELECT document FROM settings WHERE name = :name", name=_RULES
            )
            return str(rows[0]["document"]) if rows else ""

    def set_trigger_rules(self, text: str) -> None:
        with self._transaction() as connection:
            self._set(connection, "settings", _RULES, text)

    def trigger_documents(self) -> tuple[list[str], dict[str, str]]:
        """Returns charges, and counts by rule."""
        with self._transaction() as connection:
            charges = self._rows(connection, "SELECT document FROM trigger_charges")
            counts = self._rows(connection, "SELECT name, document FROM trigger_counts")
            return [row["document"] for row in charges], {
                row["name"]: row["document"] for row in counts
            }

    def put_trigger_documents(
        self, charges: Mapping[str, str], counts: Mapping[str, str], removed: Sequence[str] = ()
    ) -> None:
        """Writes changed charges (by request) and counts (by rule), and deletes the charges of
        `removed`.
        """
        with self._transaction() as connection:
            for request, document in charges.items():
                self._change(
                    connection,
                    "INSERT INTO trigger_charges (request, document) VALUES (:request, :document) "
                    "ON CONFLICT (request) DO UPDATE SET document = :document",
                    request=request,
                    document=document,
                )
            for request in removed:
                self._change(
                    connection,
                    "DELETE FROM trigger_charges WHERE request = :request",
                    request=request,
                )
            for name, document in counts.items():
                self._set(connection, "trigger_counts", name, document)

    def newly_committed(self, limit: int = 1000) -> tuple[int, list[CommittedCapture]]:
        """Returns the last batch, and the captures first analysed since the batch noted last.

        Before a batch was noted, no captures are new.
        """
        with self._transaction() as connection:
            rows = self._rows(
                connection, "SELECT document FROM settings WHERE name = :name", name=_BATCH
            )
            [last] = self._rows(
                connection,
                "SELECT COALESCE(MAX(batch), 0) AS n FROM tasks WHERE state = 'committed'",
            )
            through = last["n"]
            new = (
                []
                if not rows
                else self._rows(
                    connection,
                    "SELECT t.capture, c.job FROM tasks t JOIN captures c ON c.id = t.capture WHERE t.state = 'committed' "
                    "AND t.again = 0 AND t.batch > :after AND t.batch <= :through ORDER BY t.batch DESC, t.capture "
                    "LIMIT :most",
                    after=int(rows[0]["document"]),
                    through=through,
                    most=limit,
                )
            )
            return through, [CommittedCapture(row["capture"], row["job"]) for row in new]

    def note_committed(self, through: int) -> None:
        """Marks captures up to this batch as seen."""
        with self._transaction() as connection:
            self._set(connection, "settings", _BATCH, str(through))

    def add_regressions(
        self, since_ns: Mapping[str, int], apart_ns: int, event: Callable[[str], FleetEvent]
    ) -> list[str]:
        """Records regressions, queues webhook events for the new ones, and returns the new ones.

        Args:
            since_ns: Series -> when it became slower, in ns since the epoch.
            apart_ns: How much later a series must have become slower to count as another
                regression: more jobs shift the time of a change slightly.
            event: Builds the webhook event of a series.

        On the very first call all are recorded and none is new.
        """
        with self._transaction() as connection:
            first = not self._rows(
                connection, "SELECT document FROM settings WHERE name = :name", name=_LOOKED
            )
            self._set(connection, "settings", _LOOKED, "")
            rows = self._rows(connection, "SELECT series, since_ns FROM regressions_seen")
            seen_ns = {row["series"]: row["since_ns"] for row in rows}
            new = [
                name
                for name, at_ns in since_ns.items()
                if name not in seen_ns or at_ns > seen_ns[name] + apart_ns
            ]
            for name in new:
                self._change(
                    connection,
                    "INSERT INTO regressions_seen (series, since_ns) VALUES (:series, :since) "
                    "ON CONFLICT (series) DO UPDATE SET since_ns = :since",
                    series=name,
                    since=since_ns[name],
                )
            if first:
                return []
            self._tell(connection, [event(name) for name in new])
            return new

    def _set(self, connection: Connection, table: str, name: str, document: str) -> None:
        """Inserts or replaces a document in a table of named documents; `table` must be trusted."""
        self._change(
            connection,
            f"INSERT INTO {table} (name, document) VALUES (:name, :document) "  # noqa: S608
            "ON CONFLICT (name) DO UPDATE SET document = :document",
            name=name,
            document=document,
        )
