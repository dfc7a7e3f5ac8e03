"""HTTP handlers for owner rules, prices, triggers and webhooks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from copy import copy
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from traceloom.agent.triggers.store import LastFiring, LastRefusal, RuleCounts
from traceloom.errors import InputError, UsageError
from traceloom.fleet.analyses.attribution import compare_ownership, divide_device_time
from traceloom.fleet.handlers.captures import FleetRequestContext, FleetRoute
from traceloom.fleet.questions.declaration import TimeQuery
from traceloom.fleet.rules import (
    MAX_BYTES,
    FleetRules,
    get_rule_kind,
    parse_prices,
    parse_rules,
)
from traceloom.fleet.service.webhooks import WebhookDispatcher, build_fleet_event
from traceloom.fleet.store.rules import EVENTS, Delivery, DocumentName, EventName, WebhookRecord
from traceloom.fleet.triggers import FleetTriggerEngine
from traceloom.server.problem import HttpError, HttpResponseBody
from traceloom.system.text import NAME

_MAX_MOVES = 1_000
Kind = TypeVar("Kind")


class DocumentBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """A new version of a document: its text in TOML. `dry_run`: only what would change.

    `since`, `until`: the time in which what would change is looked at.
    """

    text: Annotated[str, Meta(max_length=MAX_BYTES)]
    dry_run: bool = False
    since: Annotated[str, Meta(max_length=40)] = "30d"
    until: Annotated[str, Meta(max_length=40)] = ""


class DocumentParameters(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """Which version; 0: the last one."""

    version: Annotated[int, Meta(ge=0, le=1 << 62)] = 0


class DocumentVersion(HttpResponseBody, frozen=True):
    """A version, since when it counts, and who wrote it."""

    version: int
    at_ns: int
    who: str


class DocumentResponse(HttpResponseBody, frozen=True):
    """A document; version 0 and an empty text where none was written."""

    version: int
    at_ns: int | None
    who: str
    text: str


class DocumentHistoryResponse(HttpResponseBody, frozen=True):
    """All versions of a document, newest first."""

    versions: list[DocumentVersion]


class MoveResponse(HttpResponseBody, frozen=True):
    """Device time of jobs that belonged to `before`, by a dimension, and belongs to `after`,
    milliseconds.
    """

    dimension: str
    before: str
    after: str
    jobs: int
    device_ms: int


class OwnersChangeResponse(HttpResponseBody, frozen=True):
    """What other rules change: device time that moves, the most first.

    `version`: null where nothing was kept.
    """

    since_ns: int
    until_ns: int
    version: int | None
    moves: list[MoveResponse]


class CostResponse(HttpResponseBody, frozen=True):
    """What the device time of a model of device costs before and after, in their currencies; null:
    not known.
    """

    device_model: str
    device_ms: int
    before: float | None
    after: float | None


class PricesChangeResponse(HttpResponseBody, frozen=True):
    """What other prices change, by model of device. `version`: null where nothing was kept."""

    since_ns: int
    until_ns: int
    version: int | None
    currency_before: str | None
    currency_after: str
    costs: list[CostResponse]


async def _set_owners(context: FleetRequestContext) -> OwnersChangeResponse:
    body = await context.body(DocumentBody)
    queries = context.service.questions
    rules = _parse_document(parse_rules, body.text)

    def compare() -> OwnersChangeResponse:
        frames = queries.frames(TimeQuery(since=body.since, until=body.until))
        rows = compare_ownership(frames.usage, frames.owned, frames.owned_by(rules)).rows.head(
            _MAX_MOVES
        )
        return OwnersChangeResponse(
            since_ns=frames.period.since_ns,
            until_ns=frames.period.until_ns,
            version=None,
            moves=msgspec.convert(rows.to_dicts(), list[MoveResponse]),
        )

    answer = await queries.work(compare)
    return msgspec.structs.replace(answer, version=await _store_document(context, "owners", body))


async def _set_prices(context: FleetRequestContext) -> PricesChangeResponse:
    body = await context.body(DocumentBody)
    queries = context.service.questions
    prices = _parse_document(parse_prices, body.text)

    def compare() -> PricesChangeResponse:
        frames = queries.frames(TimeQuery(since=body.since, until=body.until))
        before, after = (
            divide_device_time(frames.usage, frames.owned, ["device_model"], price_list).leaves
            for price_list in (frames.prices, prices)
        )
        old = dict(before.select("device_model", "cost").iter_rows())
        return PricesChangeResponse(
            since_ns=frames.period.since_ns,
            until_ns=frames.period.until_ns,
            version=None,
            currency_before=None if frames.prices is None else frames.prices.currency,
            currency_after=prices.currency,
            costs=[
                CostResponse(device_model=model, device_ms=ms, before=old.get(model), after=cost)
                for model, ms, cost in after.select("device_model", "device_ms", "cost").iter_rows()
            ],
        )

    answer = await queries.work(compare)
    return msgspec.structs.replace(answer, version=await _store_document(context, "prices", body))


async def _store_document(
    context: FleetRequestContext, name: DocumentName, body: DocumentBody
) -> int | None:
    if body.dry_run:
        return None
    version = await asyncio.to_thread(
        context.service.state.put_document, name, context.token.name, body.text
    )
    await context.note(version=str(version))
    return version


def _parse_document(parse: Callable[[str], Kind], text: str) -> Kind:
    try:
        return parse(text)
    except InputError as error:
        raise HttpError(400, error.message, slug=error.slug, hint=error.hint) from error


def _build_document_routes(name: DocumentName, summary: str) -> tuple[FleetRoute, ...]:
    async def current(context: FleetRequestContext) -> DocumentResponse:
        version = context.parameters(DocumentParameters).version
        stored = await asyncio.to_thread(context.service.state.document, name, version)
        if stored is None and version:
            raise HttpError(404, "there is no such version", slug="no-such-version")
        if stored is None:
            return DocumentResponse(version=0, at_ns=None, who="", text="")
        return DocumentResponse(
            version=stored.version, at_ns=stored.at_ns, who=stored.who, text=stored.document
        )

    async def history(context: FleetRequestContext) -> DocumentHistoryResponse:
        stored_versions = await asyncio.to_thread(context.service.state.documents, name)
        return DocumentHistoryResponse(
            versions=[
                DocumentVersion(
                    version=stored_version.version,
                    at_ns=stored_version.at_ns,
                    who=stored_version.who,
                )
                for stored_version in stored_versions
            ]
        )

    return (
        FleetRoute(
            path=f"/api/v1/{name}",
            summary=summary,
            answers=current,
            answer=DocumentResponse,
            parameters=DocumentParameters,
            refuses=(400, 404),
        ),
        FleetRoute(
            path=f"/api/v1/{name}/history",
            summary=f"{summary}: all versions",
            answers=history,
            answer=DocumentHistoryResponse,
        ),
    )


RULE_ROUTES = (
    *_build_document_routes("owners", "Rules that say whose jobs are"),
    FleetRoute(
        path="/api/v1/owners",
        summary="Change the rules of owners, or see what a change would do",
        answers=_set_owners,
        answer=OwnersChangeResponse,
        method="POST",
        body=DocumentBody,
        role="operator",
        refuses=(400, 403, 503),
    ),
    *_build_document_routes("prices", "Prices of device hours and energy"),
    FleetRoute(
        path="/api/v1/prices",
        summary="Change the prices, or see what a change would do",
        answers=_set_prices,
        answer=PricesChangeResponse,
        method="POST",
        body=DocumentBody,
        role="operator",
        refuses=(400, 403, 503),
    ),
)


class FleetTriggersBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """All rules, as TOML; they take the place of those before.

    `dry_run`: they are only checked, and those stay.
    """

    toml: Annotated[str, Meta(max_length=200_000)]
    dry_run: bool = False


class FleetTriggerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A rule, what it did since it is there, and why it last did not. null: never.

    `jobs`: that run now and that it is about.
    """

    name: str
    on: str
    jobs: int
    target: str
    cooldown_seconds: float
    fired: int
    refusals: dict[str, int]
    kept_bytes: int
    last: LastFiring | None
    last_refusal: LastRefusal | None


class FleetTriggersResponse(HttpResponseBody, frozen=True):
    """All rules, the text that they were set by, and what may still be spent of the budget of 24
    hours.
    """

    toml: str
    rules: list[FleetTriggerResponse]
    traces_per_day: int
    traces_left: int
    bytes_per_day: int
    bytes_left: int
    share: float
    last_error: str


def _build_triggers_answer(
    triggers: FleetTriggerEngine,
    proposed: FleetRules | None = None,
    text: str | None = None,
) -> FleetTriggersResponse:
    """Builds the answer about these rules and their budget; None: about the active ones."""
    now_ns, ledger, answers = triggers.registry.clock(), copy(triggers.ledger), []
    if proposed is not None:
        ledger.budget = proposed.budget
    for rule in triggers.rules.values() if proposed is None else proposed.triggers:
        counts = triggers.counts.get(rule.name) or RuleCounts()
        answers.append(
            FleetTriggerResponse(
                name=rule.name,
                on=get_rule_kind(rule),
                jobs=len(triggers.jobs_of(rule)),
                target=rule.target,
                cooldown_seconds=rule.cooldown,
                fired=counts.fired,
                refusals=dict(counts.refusals),
                kept_bytes=counts.kept_bytes,
                last=counts.last,
                last_refusal=counts.last_refusal,
            )
        )
    return FleetTriggersResponse(
        toml=triggers.text if text is None else text,
        rules=answers,
        traces_per_day=ledger.budget.traces_per_day,
        traces_left=ledger.traces_left(now_ns),
        bytes_per_day=int(ledger.budget.mb_per_day * 1e6),
        bytes_left=max(ledger.bytes_left(now_ns), 0),
        share=ledger.budget.share,
        last_error="; ".join(filter(None, (triggers.last_error, *triggers.defects.values()))),
    )


async def _set_triggers(context: FleetRequestContext) -> FleetTriggersResponse:
    body, triggers = await context.body(FleetTriggersBody), context.triggers()
    try:
        if body.dry_run:
            return _build_triggers_answer(triggers, FleetRules.of(body.toml), body.toml)
        await triggers.set_rules(body.toml)
    except InputError as error:
        raise HttpError(
            400, f"{error.where}: {error.message}", slug=error.slug, hint=error.hint
        ) from error
    await context.note(rules=", ".join(triggers.rules))
    return _build_triggers_answer(triggers)


TRIGGER_ROUTES = (
    FleetRoute(
        path="/api/v1/triggers",
        summary="Rules by which jobs are traced though nobody asks, and what they did",
        answers=lambda asked: _build_triggers_answer(asked.triggers()),
        answer=FleetTriggersResponse,
        refuses=(503,),
    ),
    FleetRoute(
        path="/api/v1/triggers",
        summary="Set all rules, or check them",
        answers=_set_triggers,
        answer=FleetTriggersResponse,
        method="PUT",
        body=FleetTriggersBody,
        role="operator",
        refuses=(400, 403, 503),
    ),
)


class WebhookBody(HttpResponseBody, frozen=True, forbid_unknown_fields=True):
    """A webhook: what it is called, where it leads, and what it is told (all, where nothing is
    named).
    """

    name: Annotated[str, Meta(pattern=NAME)]
    url: Annotated[str, Meta(min_length=8, max_length=2000)]
    events: Annotated[tuple[EventName, ...], Meta(max_length=16)] = EVENTS


class NewWebhookResponse(HttpResponseBody, frozen=True):
    """A new webhook; nobody can be told `secret` again."""

    name: str
    secret: str


class WebhooksResponse(HttpResponseBody, frozen=True):
    """All webhooks, by name."""

    webhooks: list[WebhookRecord]


class RemovedWebhookResponse(HttpResponseBody, frozen=True):
    """A webhook that is told nothing any more."""

    name: str


class WebhookTestResponse(HttpResponseBody, frozen=True):
    """Whether an event for a test arrived; `error`: why not."""

    name: str
    arrived: bool
    error: str


async def _add_webhook(context: FleetRequestContext) -> NewWebhookResponse:
    body = await context.body(WebhookBody)
    try:
        await context.service.webhook_policy.resolve(body.url)
        secret = await asyncio.to_thread(
            context.service.state.add_webhook, body.name, body.url, frozenset(body.events or EVENTS)
        )
    except InputError as error:
        raise HttpError(400, error.message, slug=error.slug, hint=error.hint) from error
    except UsageError as error:
        raise HttpError(409, error.message, slug=error.slug, hint=error.hint) from error
    await context.note(webhook=body.name)
    return NewWebhookResponse(name=body.name, secret=secret)


def _webhook_not_found(name: str) -> HttpError:
    return HttpError(
        404,
        f"there is no webhook `{name}`",
        slug="no-such-webhook",
        hint="`traceloom fleet webhooks`",
    )


async def _remove_webhook(context: FleetRequestContext) -> RemovedWebhookResponse:
    name = context.request.path_params["name"]
    if not await asyncio.to_thread(context.service.state.remove_webhook, name):
        raise _webhook_not_found(name)
    await context.note(webhook=name)
    return RemovedWebhookResponse(name=name)


async def _send_test_event(context: FleetRequestContext) -> WebhookTestResponse:
    name, state = context.request.path_params["name"], context.service.state
    url = next(
        (
            webhook.url
            for webhook in await asyncio.to_thread(state.webhooks)
            if webhook.name == name
        ),
        "",
    )
    secret = await asyncio.to_thread(state.webhook_secret, name)
    if secret is None:
        raise _webhook_not_found(name)
    now_ns = time.time_ns()
    event = build_fleet_event("test", "test", secrets.token_hex(8), {"webhook": name}, now_ns)
    delivery = Delivery(
        webhook=name,
        url=url,
        secret=secret,
        id=event.id,
        event=event.event,
        document=event.document,
        created_ns=now_ns,
        attempts=0,
    )
    error = await WebhookDispatcher(state, context.service.webhook_policy).send(delivery)
    await context.note(webhook=name, error=error)
    return WebhookTestResponse(name=name, arrived=not error, error=error)


WEBHOOK_ROUTES = (
    FleetRoute(
        path="/api/v1/webhooks",
        summary="Webhooks, and how they do",
        answer=WebhooksResponse,
        answers=lambda asked: asyncio.to_thread(
            lambda: WebhooksResponse(webhooks=asked.service.state.webhooks())
        ),
        role="admin",
        refuses=(403,),
    ),
    FleetRoute(
        path="/api/v1/webhooks",
        summary="Have the fleet's events sent to an address",
        answers=_add_webhook,
        answer=NewWebhookResponse,
        method="POST",
        body=WebhookBody,
        role="admin",
        refuses=(400, 403, 409),
    ),
    FleetRoute(
        path="/api/v1/webhooks/{name}",
        summary="Tell a webhook nothing any more",
        answers=_remove_webhook,
        answer=RemovedWebhookResponse,
        method="DELETE",
        role="admin",
        refuses=(403, 404),
    ),
    FleetRoute(
        path="/api/v1/webhooks/{name}/test",
        summary="Send a webhook an event now, and say whether it arrived",
        answers=_send_test_event,
        answer=WebhookTestResponse,
        method="POST",
        role="admin",
        refuses=(403, 404),
    ),
)
