"""Responses about hangs and triggers, limited to what the caller may see."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from traceloom.agent.api import (
    HangResponse,
    HangsResponse,
    LastFiringResponse,
    LastRefusalResponse,
    TriggerResponse,
    TriggersResponse,
)
from traceloom.agent.config import TriggerBudget
from traceloom.agent.hangs.service import HangRecord, HangService
from traceloom.agent.triggers.adapter import TriggerEngine, get_rule_kind
from traceloom.agent.triggers.store import LastFiring, LastRefusal
from traceloom.server.access import Caller


def build_hangs_answer(
    hangs: HangService, job: str, peer: Caller, jobs: Collection[str]
) -> HangsResponse:
    """Returns the visible hangs of one job or ("") of all, and which of their jobs are watched."""

    def shown(record: HangRecord) -> HangResponse:
        # As for stacks: a token that only reads does not see those of others.
        full = peer.acts or peer.uid == record.hang.uid
        return HangResponse(
            id=record.id,
            job=record.hang.job,
            uid=record.hang.uid,
            state=record.state,
            since_ns=record.hang.since_ns,
            seen_ns=record.hang.seen_ns,
            over_ns=record.over_ns,
            median_step_seconds=record.hang.median_s,
            pids=[member.pid for member in record.hang.processes],
            sentence=record.sentence if full else "",
            ranks=record.ranks,
            directory=record.directory if full else "",
            files=record.files if full else (),
            no_bundle=record.no_bundle,
        )

    return HangsResponse(
        watched=sorted({key.job for key in hangs.watch.stepping if key.job in jobs}),
        hangs=[
            shown(record)
            for record in hangs.records
            if (peer.sees == "all" or (peer.sees == "own" and peer.uid == record.hang.uid))
            and job in ("", record.hang.job)
        ],
    )


def build_triggers_answer(
    triggers: TriggerEngine, budget: TriggerBudget, peer: Caller
) -> TriggersResponse:
    """Returns all rules, with the details that the caller may see."""

    def own(last: LastFiring | LastRefusal | None) -> dict[str, Any] | None:
        if last is None or not (
            peer.sees == "all" or (peer.sees == "own" and last.uid == peer.uid)
        ):
            return None
        return {
            name: value for name, value in msgspec.structs.asdict(last).items() if name != "uid"
        }

    problems, rules = triggers.list_problems(), []
    for name, rule in triggers.rules.items():
        counts = triggers.counts[name]
        last, refusal = own(counts.last), own(counts.last_refusal)
        rules.append(
            TriggerResponse(
                name=name,
                on=get_rule_kind(rule),
                target=rule.target,
                cooldown_seconds=rule.cooldown,
                fired=counts.fired,
                refusals=dict(counts.refusals),
                traced_seconds=counts.traced_seconds,
                kept_bytes=counts.kept_bytes,
                last=LastFiringResponse(**last) if last else None,
                last_refusal=LastRefusalResponse(**refusal) if refusal else None,
                problem=problems.get(name, ""),
                rule=rule if peer.sees == "all" else None,
            )
        )
    return TriggersResponse(
        rules=rules,
        share=budget.share,
        bytes_per_day=int(budget.mb_per_day * 1e6),
        bytes_left=max(triggers.ledger.bytes_left(triggers.now_ns), 0),
        last_error=triggers.store.last_error,
    )
