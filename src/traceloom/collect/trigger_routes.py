"""The routes for triggers: rules of the fleet, what they did, and why they did not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from traceloom.agent.http.answers import HttpAnswer, RequestError
from traceloom.agent.triggers.store import Fired, Refused, RuleCounts
from traceloom.collect.routes import FleetAsked, FleetRoute
from traceloom.collect.trigger_rules import AnyFleetRule, FleetRules, on
from traceloom.collect.triggers import FleetTriggers
from traceloom.errors import InputError


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
