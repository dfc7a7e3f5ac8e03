"""HTTP: tokens, audit, owners, prices, triggers, webhooks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from traceloom.agent.triggers.store import Fired, Refused, RuleCounts
from traceloom.errors import InputError, UsageError
from traceloom.fleet.analyses.attribution import attribution, moves
from traceloom.fleet.handlers.captures import FleetAsked, FleetRoute
from traceloom.fleet.questions.declaration import Asking
from traceloom.fleet.rules import MOST_BYTES, AnyFleetRule, FleetRules, on, prices_of, rules_of
from traceloom.fleet.service.webhooks import WebhookSender, fleet_event
from traceloom.fleet.store.rules import EVENTS, Delivery, DocumentName, EventName, WebhookRecord
from traceloom.fleet.triggers import FleetTriggers
from traceloom.server.problem import HttpAnswer, RequestError
from traceloom.system.text import NAME

_MOST_MOVES = 1_000
Kind = TypeVar("Kind")


class DocumentBody(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """A new version of a document: its text in TOML. `dry_run`: only what would change.

    `since`, `until`: the time in which what would change is looked at.
    """

    text: Annotated[str, Meta(max_length=MOST_BYTES)]
    dry_run: bool = False
    since: Annotated[str, Meta(max_length=40)] = "30d"
    until: Annotated[str, Meta(max_length=40)] = ""


class DocumentParameters(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """Which version; 0: the last one."""

    version: Annotated[int, Meta(ge=0, le=1 << 62)] = 0


class DocumentVersion(HttpAnswer, frozen=True):
    """A version, since when it counts, and who wrote it."""

    version: int
    at_ns: int
    who: str


class DocumentAnswer(HttpAnswer, frozen=True):
    """A document; version 0 and an empty text where none was written."""

    version: int
    at_ns: int | None
    who: str
    text: str


class DocumentHistoryAnswer(HttpAnswer, frozen=True):
    """All versions of a document, newest first."""

    versions: list[DocumentVersion]


class MoveAnswer(HttpAnswer, frozen=True):
    """Device time of jobs that belonged to `before`, by a dimension, and belongs to `after`, milliseconds."""

    dimension: str
    before: str
    after: str
    jobs: int
    device_ms: int


class OwnersChangeAnswer(HttpAnswer, frozen=True):
    """What other rules change: device time that moves, the most first. `version`: null where nothing was kept."""

    since_ns: int
    until_ns: int
    version: int | None
    moves: list[MoveAnswer]


class CostAnswer(HttpAnswer, frozen=True):
    """What the device time of a model of device costs before and after, in their currencies; null: not known."""

    device_model: str
    device_ms: int
    before: float | None
    after: float | None


class PricesChangeAnswer(HttpAnswer, frozen=True):
    """What other prices change, by model of device. `version`: null where nothing was kept."""

    since_ns: int
    until_ns: int
    version: int | None
    currency_before: str | None
    currency_after: str
    costs: list[CostAnswer]


async def _set_owners(asked: FleetAsked) -> OwnersChangeAnswer:
    body = await asked.body(DocumentBody)
    desk = asked.service.questions
    rules = _parsed(rules_of, body.text)

    def compare() -> OwnersChangeAnswer:
        frames = desk.frames(Asking(since=body.since, until=body.until))
        rows = moves(frames.usage, frames.owned, frames.owned_by(rules)).rows.head(_MOST_MOVES)
        return OwnersChangeAnswer(
            since_ns=frames.period.since_ns, until_ns=frames.period.until_ns, version=None,
            moves=msgspec.convert(rows.to_dicts(), list[MoveAnswer]),
        )  # fmt: skip

    answer = await desk.work(compare)
    return msgspec.structs.replace(answer, version=await _kept(asked, "owners", body))


async def _set_prices(asked: FleetAsked) -> PricesChangeAnswer:
    body = await asked.body(DocumentBody)
    desk = asked.service.questions
    prices = _parsed(prices_of, body.text)

    def compare() -> PricesChangeAnswer:
        frames = desk.frames(Asking(since=body.since, until=body.until))
        before, after = (
            attribution(frames.usage, frames.owned, ["device_model"], each).leaves for each in (frames.prices, prices)
        )
        old = dict(before.select("device_model", "cost").iter_rows())
        return PricesChangeAnswer(
            since_ns=frames.period.since_ns, until_ns=frames.period.until_ns, version=None,
            currency_before=None if frames.prices is None else frames.prices.currency, currency_after=prices.currency,
            costs=[
                CostAnswer(device_model=model, device_ms=ms, before=old.get(model), after=cost)
                for model, ms, cost in after.select("device_model", "device_ms", "cost").iter_rows()
            ],
        )  # fmt: skip

    answer = await desk.work(compare)
    return msgspec.structs.replace(answer, version=await _kept(asked, "prices", body))


async def _kept(asked: FleetAsked, name: DocumentName, body: DocumentBody) -> int | None:
    if body.dry_run:
        return None
    version = await asyncio.to_thread(asked.service.state.put_document, name, asked.token.name, body.text)
    await asked.note(version=str(version))
    return version


def _parsed(parse: Callable[[str], Kind], text: str) -> Kind:
    try:
        return parse(text)
    except InputError as error:
        raise RequestError(400, error.message, slug=error.slug, hint=error.hint) from error


def _document_routes(name: DocumentName, what: str) -> tuple[FleetRoute, ...]:
    async def current(asked: FleetAsked) -> DocumentAnswer:
        version = asked.parameters(DocumentParameters).version
        kept = await asyncio.to_thread(asked.service.state.document, name, version)
        if kept is None and version:
            raise RequestError(404, "there is no such version", slug="no-such-version")
        if kept is None:
            return DocumentAnswer(version=0, at_ns=None, who="", text="")
        return DocumentAnswer(version=kept.version, at_ns=kept.at_ns, who=kept.who, text=kept.document)

    async def history(asked: FleetAsked) -> DocumentHistoryAnswer:
        kept = await asyncio.to_thread(asked.service.state.documents, name)
        return DocumentHistoryAnswer(
            versions=[DocumentVersion(version=each.version, at_ns=each.at_ns, who=each.who) for each in kept]
        )

    return (
        FleetRoute(
            path=f"/api/v1/{name}", summary=what, answers=current, answer=DocumentAnswer,
            parameters=DocumentParameters, refuses=(400, 404),
        ),
        FleetRoute(
            path=f"/api/v1/{name}/history", summary=f"{what}: all versions", answers=history,
            answer=DocumentHistoryAnswer,
        ),
    )  # fmt: skip


RULE_ROUTES = (
    *_document_routes("owners", "Rules that say whose jobs are"),
    FleetRoute(
        path="/api/v1/owners", summary="Change the rules of owners, or see what a change would do", answers=_set_owners,
        answer=OwnersChangeAnswer, method="POST", body=DocumentBody, role="operator", refuses=(400, 403, 503),
    ),
    *_document_routes("prices", "Prices of device hours and energy"),
    FleetRoute(
        path="/api/v1/prices", summary="Change the prices, or see what a change would do", answers=_set_prices,
        answer=PricesChangeAnswer, method="POST", body=DocumentBody, role="operator", refuses=(400, 403, 503),
    ),
)  # fmt: skip


class FleetTriggersBody(HttpAnswer, frozen=True, forbid_unknown_fields=True):
    """All rules, as TOML; they take the place of those before. `dry_run`: they are only checked, and those stay."""

    toml: Annotated[str, Meta(max_length=200_000)]
    dry_run: bool = False


class FleetTriggerAnswer(msgspec.Struct, frozen=True, kw_only=True):
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
    last: Fired | None
    last_refusal: Refused | None


class FleetTriggersAnswer(HttpAnswer, frozen=True):
    """All rules, the text that they were set by, and what may still be spent of the budget of 24 hours."""

    toml: str
    rules: list[FleetTriggerAnswer]
    traces_per_day: int
    traces_left: int
    bytes_per_day: int
    bytes_left: int
    share: float
    trouble: str


def _answer(
    triggers: FleetTriggers, rules: Iterable[AnyFleetRule] | None = None, text: str | None = None
) -> FleetTriggersAnswer:  # fmt: skip
    """The answer about these rules; None: about those that are at work."""
    now_ns, ledger, answers = triggers.desk.clock(), triggers.ledger, []
    for rule in triggers.rules.values() if rules is None else rules:
        counts = triggers.counts.get(rule.name) or RuleCounts()
        answers.append(
            FleetTriggerAnswer(
                name=rule.name, on=on(rule), jobs=len(triggers.jobs_of(rule)), target=rule.target,
                cooldown_seconds=rule.cooldown, fired=counts.fired, refusals=dict(counts.refusals),
                kept_bytes=counts.kept_bytes, last=counts.last, last_refusal=counts.last_refusal,
            )
        )  # fmt: skip
    return FleetTriggersAnswer(
        toml=triggers.text if text is None else text, rules=answers, traces_per_day=ledger.budget.traces_per_day,
        traces_left=ledger.traces_left(now_ns), bytes_per_day=int(ledger.budget.mb_per_day * 1e6),
        bytes_left=max(ledger.bytes_left(now_ns), 0), share=ledger.budget.share,
        trouble="; ".join(filter(None, (triggers.trouble, *triggers.defects.values()))),
    )  # fmt: skip


async def _set(asked: FleetAsked) -> FleetTriggersAnswer:
    body, triggers = await asked.body(FleetTriggersBody), asked.triggers()
    try:
        if body.dry_run:
            return _answer(triggers, FleetRules.of(body.toml).triggers, body.toml)
        await triggers.set_rules(body.toml)
    except InputError as error:
        raise RequestError(400, f"{error.where}: {error.message}", slug=error.slug, hint=error.hint) from error
    await asked.note(rules=", ".join(triggers.rules))
    return _answer(triggers)


TRIGGER_ROUTES = (
    FleetRoute(
        path="/api/v1/triggers", summary="Rules by which jobs are traced though nobody asks, and what they did",
        answers=lambda asked: _answer(asked.triggers()), answer=FleetTriggersAnswer, refuses=(503,),
    ),
    FleetRoute(
        path="/api/v1/triggers", summary="Set all rules, or check them", answers=_set, answer=FleetTriggersAnswer,
        method="PUT", body=FleetTriggersBody, role="operator", refuses=(400, 403, 503),
    ),
)  # fmt: skip


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
