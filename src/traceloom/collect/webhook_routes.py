"""The routes for webhooks: an administrator names where the fleet's events go."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Annotated

from msgspec import Meta

from traceloom.agent.http.answers import HttpAnswer, RequestError
from traceloom.allowed_texts import NAME
from traceloom.collect.routes import FleetAsked, FleetRoute
from traceloom.collect.telling import WebhookSender, fleet_event
from traceloom.errors import InputError, UsageError
from traceloom.store.webhook_state import EVENTS, Delivery, EventName, WebhookRecord


class WebhookBody(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """A webhook: what it is called, where it leads, and what it is told (all, where nothing is named)."""

    name: Annotated[str, Meta(pattern=NAME)]
    url: Annotated[str, Meta(min_length=8, max_length=2000)]
    events: Annotated[tuple[EventName, ...], Meta(max_length=16)] = EVENTS


class NewWebhookAnswer(HttpAnswer, frozen=True):
    """A new webhook; nobody can be told `secret` again."""

    name: str
    secret: str


class WebhooksAnswer(HttpAnswer, frozen=True):
    """All webhooks, by name."""

    webhooks: list[WebhookRecord]


class RemovedWebhookAnswer(HttpAnswer, frozen=True):
    """A webhook that is told nothing any more."""

    name: str


class WebhookTestAnswer(HttpAnswer, frozen=True):
    """Whether an event for a test arrived; `error`: why not."""

    name: str
    arrived: bool
    error: str


async def _add(asked: FleetAsked) -> NewWebhookAnswer:
    body = await asked.body(WebhookBody)
    try:
        await asked.service.webhook_targets.resolve(body.url)
        secret = await asyncio.to_thread(
            asked.service.state.add_webhook, body.name, body.url, frozenset(body.events or EVENTS)
        )
    except InputError as error:
        raise RequestError(400, error.message, slug=error.slug, hint=error.hint) from error
    except UsageError as error:
        raise RequestError(409, error.message, slug=error.slug, hint=error.hint) from error
    await asked.note(webhook=body.name)
    return NewWebhookAnswer(name=body.name, secret=secret)


def _no_such(name: str) -> RequestError:
    return RequestError(404, f"there is no webhook `{name}`", slug="no-such-webhook", hint="`traceloom fleet webhooks`")


async def _remove(asked: FleetAsked) -> RemovedWebhookAnswer:
    name = asked.request.path_params["name"]
    if not await asyncio.to_thread(asked.service.state.remove_webhook, name):
        raise _no_such(name)
    await asked.note(webhook=name)
    return RemovedWebhookAnswer(name=name)


async def _test(asked: FleetAsked) -> WebhookTestAnswer:
    name, state = asked.request.path_params["name"], asked.service.state
    url = next((webhook.url for webhook in await asyncio.to_thread(state.webhooks) if webhook.name == name), "")
    secret = await asyncio.to_thread(state.webhook_secret, name)
    if secret is None:
        raise _no_such(name)
    now_ns = time.time_ns()
    event = fleet_event("test", "test", secrets.token_hex(8), {"webhook": name}, now_ns)
    delivery = Delivery(
        webhook=name, url=url, secret=secret, id=event.id, event=event.event, document=event.document,
        created_ns=now_ns, attempts=0,
    )  # fmt: skip
    error = await WebhookSender(state, asked.service.webhook_targets).send(delivery)
    await asked.note(webhook=name, error=error)
    return WebhookTestAnswer(name=name, arrived=not error, error=error)


WEBHOOK_ROUTES = (
    FleetRoute(
        path="/api/v1/webhooks", summary="Webhooks, and how they do", answer=WebhooksAnswer,
        answers=lambda asked: asyncio.to_thread(lambda: WebhooksAnswer(webhooks=asked.service.state.webhooks())),
        role="admin", refuses=(403,),
    ),
    FleetRoute(
        path="/api/v1/webhooks", summary="Have the fleet's events sent to an address", answers=_add,
        answer=NewWebhookAnswer, method="POST", body=WebhookBody, role="admin", refuses=(400, 403, 409),
    ),
    FleetRoute(
        path="/api/v1/webhooks/{name}", summary="Tell a webhook nothing any more", answers=_remove,
        answer=RemovedWebhookAnswer, method="DELETE", role="admin", refuses=(403, 404),
    ),
    FleetRoute(
        path="/api/v1/webhooks/{name}/test", summary="Send a webhook an event now, and say whether it arrived",
        answers=_test, answer=WebhookTestAnswer, method="POST", role="admin", refuses=(403, 404),
    ),
)  # fmt: skip
