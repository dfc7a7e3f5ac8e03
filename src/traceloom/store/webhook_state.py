"""What the state knows of webhooks: where they go, and what waits to be told until it has arrived."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

from traceloom.errors import UsageError
from traceloom.store.database import StateDatabase

if TYPE_CHECKING:
    from sqlalchemy import Connection

EventName = Literal["request.done", "request.partial", "request.failed", "regression.new"]
EVENTS: tuple[EventName, ...] = get_args(EventName)
MOST_WEBHOOKS = 32
MOST_WAITING = 1000
"""Deliveries of one webhook that wait; what comes beyond is dropped, and counted."""


class FleetEvent(NamedTuple):
    """Something that webhooks are told. `id` is the same however often it is told; `document`: the body, JSON."""

    id: str
    event: str
    document: str


class WebhookRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook, without its secret. `failed`: given up after a day; `dropped`: too many waited; `error`: the last."""

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
    """An event that a webhook is to be told, with all that it takes."""

    webhook: str
    url: str
    secret: str
    id: str
    event: str
    document: str
    created_ns: int
    attempts: int


class WebhookState(StateDatabase):
    """Webhooks and their deliveries."""

    def add_webhook(self, name: str, url: str, events: Collection[EventName]) -> str:
        """Make a webhook; its secret, which nobody is told again.

        Raises:
            UsageError: `webhook-exists`; `too-many-webhooks`.
        """
        secret = f"tlw_{secrets.token_urlsafe(32)}"
        with self._transaction() as connection:
            [row] = self._rows(connection, "SELECT COUNT(*) AS number FROM webhooks")
            if row["number"] >= MOST_WEBHOOKS:
                raise UsageError(f"there are {MOST_WEBHOOKS} webhooks", slug="too-many-webhooks", hint="remove some")
            added = self._change(
                connection,
                "INSERT INTO webhooks (name, url, secret, events, created_ns, delivered, failed, dropped, error) "
                "VALUES (:name, :url, :secret, :events, :now, 0, 0, 0, '') ON CONFLICT (name) DO NOTHING",
                name=name, url=url, secret=secret, events=json.dumps(sorted(events)), now=time.time_ns(),
            )  # fmt: skip
        if not added:
            raise UsageError(
                f"there is a webhook `{name}`", slug="webhook-exists", hint="remove it, or take another name"
            )
        return secret

    def remove_webhook(self, name: str) -> bool:
        """Tell it nothing any more; False where there is none."""
        with self._transaction() as connection:
            self._change(connection, "DELETE FROM deliveries WHERE webhook = :name", name=name)
            return bool(self._change(connection, "DELETE FROM webhooks WHERE name = :name", name=name))

    def webhooks(self) -> list[WebhookRecord]:
        """All webhooks, by name."""
        with self._transaction() as connection:
            rows = self._rows(
                connection,
                "SELECT name, url, events, created_ns, delivered, failed, dropped, error, (SELECT COUNT(*) FROM "
                "deliveries WHERE webhook = webhooks.name) AS waiting FROM webhooks ORDER BY name",
            )
            return [msgspec.convert({**row, "events": json.loads(row["events"])}, WebhookRecord) for row in rows]

    def webhook_secret(self, name: str) -> str | None:
        """What a webhook's deliveries are signed with; None where there is none of that name."""
        with self._transaction() as connection:
            rows = self._rows(connection, "SELECT secret FROM webhooks WHERE name = :name", name=name)
            return str(rows[0]["secret"]) if rows else None

    def due_deliveries(self, now_ns: int, busy: Collection[str] = ()) -> list[Delivery]:
        """Of each webhook the oldest delivery that is due; none of those that are `busy`."""
        with self._transaction() as connection:
            names = self._rows(connection, "SELECT DISTINCT webhook FROM deliveries WHERE due_ns <= :now", now=now_ns)
            rows = [
                self._rows(
                    connection,
                    "SELECT d.webhook, w.url, w.secret, d.id, d.event, d.document, d.created_ns, d.attempts "
                    "FROM deliveries d JOIN webhooks w ON w.name = d.webhook WHERE d.webhook = :name "
                    "AND d.due_ns <= :now ORDER BY d.due_ns, d.created_ns, d.id LIMIT 1",
                    now=now_ns, name=row["webhook"],
                )
                for row in names if row["webhook"] not in busy
            ]  # fmt: skip
            return [msgspec.convert(dict(row), Delivery) for (row,) in filter(None, rows)]

    def close_delivery(self, delivery: Delivery, error: str = "", due_ns: int | None = None) -> None:
        """It arrived; or it did not, and is tried again at `due_ns`, or never."""
        whose = {"name": delivery.webhook, "id": delivery.id}
        with self._transaction() as connection:
            self._change(
                connection, "UPDATE webhooks SET error = :error WHERE name = :name", error=error, name=delivery.webhook
            )
            if due_ns is not None:
                self._change(
                    connection,
                    "UPDATE deliveries SET due_ns = :due, attempts = attempts + 1 WHERE webhook = :name AND id = :id",
                    due=due_ns, **whose,
                )  # fmt: skip
                return
            self._change(connection, "DELETE FROM deliveries WHERE webhook = :name AND id = :id", **whose)
            counted = "failed = failed + 1" if error else "delivered = delivered + 1"
            self._change(connection, f"UPDATE webhooks SET {counted} WHERE name = :name", name=delivery.webhook)  # noqa: S608

    def _tell(self, connection: Connection, events: Sequence[FleetEvent]) -> None:
        """Have events told to every webhook that wants them, as part of the change that they are about."""
        if not events:
            return
        now = time.time_ns()
        waiting = (
            "SELECT name, events, (SELECT COUNT(*) FROM deliveries WHERE webhook = webhooks.name) AS n FROM webhooks"
        )
        for row in self._rows(connection, waiting):
            wanted = [event for event in events if event.event in json.loads(row["events"])]
            room = max(MOST_WAITING - row["n"], 0)
            for event in wanted[:room]:
                self._change(
                    connection,
                    "INSERT INTO deliveries (webhook, id, event, created_ns, due_ns, attempts, document) "
                    "VALUES (:webhook, :id, :event, :now, :now, 0, :document) ON CONFLICT DO NOTHING",
                    webhook=row["name"], id=event.id, event=event.event, now=now, document=event.document,
                )  # fmt: skip
            if dropped := len(wanted[room:]):
                statement = "UPDATE webhooks SET dropped = dropped + :more WHERE name = :name"
                self._change(connection, statement, more=dropped, name=row["name"])
