"""What is told of triggers, and to whom: a rule can name jobs, and what it did is about some user's processes."""

from __future__ import annotations

from typing import Any

import msgspec

from traceloom.agent.config import TriggerBudget
from traceloom.agent.http.answers import FiredAnswer, RefusedAnswer, TriggerAnswer, TriggersAnswer
from traceloom.agent.http.peers import Peer
from traceloom.agent.triggers.engine import Triggers, on
from traceloom.agent.triggers.store import Fired, Refused


def triggers_answer(triggers: Triggers, budget: TriggerBudget, peer: Peer) -> TriggersAnswer:
    """All rules; those parts of them that the one who asks may see."""

    def own(last: Fired | Refused | None) -> dict[str, Any] | None:
        if last is None or not (peer.sees == "all" or (peer.sees == "own" and last.uid == peer.uid)):
            return None
        return {name: value for name, value in msgspec.structs.asdict(last).items() if name != "uid"}

    troubles, rules = triggers.trouble(), []
    for name, rule in triggers.rules.items():
        counts = triggers.counts[name]
        last, refusal = own(counts.last), own(counts.last_refusal)
        rules.append(
            TriggerAnswer(
                name=name, on=on(rule), target=rule.target, cooldown_seconds=rule.cooldown, fired=counts.fired,
                refusals=dict(counts.refusals), traced_seconds=counts.traced_seconds, kept_bytes=counts.kept_bytes,
                last=FiredAnswer(**last) if last else None, last_refusal=RefusedAnswer(**refusal) if refusal else None,
                trouble=troubles.get(name, ""), rule=rule if peer.sees == "all" else None,
            )
        )  # fmt: skip
    return TriggersAnswer(
        rules=rules, share=budget.share, bytes_per_day=int(budget.mb_per_day * 1e6),
        bytes_left=max(triggers.ledger.bytes_left(triggers.now_ns), 0), trouble=triggers.store.trouble,
    )  # fmt: skip
