"""The routes of what operators write: rules of owners and prices, and what a change of them would do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from traceloom.agent.http.answers import HttpAnswer, RequestError
from traceloom.collect.questions.asking import Asking
from traceloom.collect.routes import FleetAsked, FleetRoute
from traceloom.errors import InputError
from traceloom.fleet.attribution import attribution
from traceloom.fleet.documents import MOST_BYTES, prices_of, rules_of
from traceloom.fleet.moves import moves
from traceloom.store.kept_documents import DocumentName

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
