"""Ranking: what each fix saves, one after the other, so that the savings never add up to more than the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, MemoryCandidate, Remark, Rule
from traceloom.model.finding import Abstention, Finding, Severity
from traceloom.simulate import Scenario, unrecorded_saving_ns, whatif_many
from traceloom.simulate.lower_bound import saves_more

LEAST = 0.005  # of the step; less is not worth a line
HIGH, MEDIUM = 0.10, 0.03
_COUNTS = 0.01  # of the step: a saving that may be larger by this much is a lower bound
_MOST = 24  # candidates that are evaluated on top of each other


@dataclass(frozen=True, slots=True)
class Ranked:
    """Findings of one run.

    Attributes:
        time: By what they save, the most first; their savings are disjoint. Last, what only has to be known: it saves
            nothing.
        memory: By risk, then bytes.
        abstentions: Rules that could not know, and why.
    """

    time: tuple[Finding, ...]
    memory: tuple[Finding, ...]
    abstentions: tuple[Abstention, ...]


def rank(ground: Ground, rules: Sequence[Rule]) -> Ranked:
    """Ask all rules, and put their candidates in order.

    Greedy: the fix that saves the most is taken, the others are evaluated again on top of it, and so on. What is left
    of a saving is what the fix adds to those above it.
    """
    time: list[tuple[Rule, Candidate]] = []
    memory: list[Finding] = []
    abstained: list[Abstention] = []
    remarks: list[Finding] = []
    for rule in rules:
        for said in rule.look(ground):
            if isinstance(said, Abstention):
                abstained.append(said)
            elif isinstance(said, MemoryCandidate):
                memory.append(_of_memory(rule, said))
            elif isinstance(said, Remark):
                remarks.append(_of_remark(rule, said))
            else:
                time.append((rule, said))
    return Ranked((*_greedy(ground, time), *remarks), tuple(sorted(memory, key=_by_risk)), tuple(abstained))


def _greedy(ground: Ground, candidates: list[tuple[Rule, Candidate]]) -> tuple[Finding, ...]:
    if not candidates or not ground.whole_ns:
        return ()
    least = LEAST * ground.step_ns
    base = Scenario.of(ground.graph)
    now: int | None = None
    alone: dict[int, int] = {}
    left = list(range(len(candidates)))
    found: list[Finding] = []
    while left:
        scenarios = (ground.changed(base, candidates[k][1].changes) for k in left)  # one after the other: each is large
        unchanged = [base] if now is None else []
        *first, rest = np.split(whatif_many(ground.graph, chain(unchanged, scenarios), ground.plan), [len(unchanged)])
        now = int(first[0][0]) if unchanged else now
        assert now is not None
        after = dict(zip(left, rest.tolist(), strict=True))
        saved = {k: _bounded(candidates[k][1], now - time) for k, time in after.items()}
        if not alone:
            alone = saved
            left = sorted((k for k in left if saved[k] >= least), key=lambda k: -saved[k])[:_MOST]
            if not left:
                break
        best = max(left, key=lambda k: (saved[k], -k))
        if saved[best] < least:
            break
        changed = ground.changed(base, candidates[best][1].changes)
        more = saves_more(base, changed, now - after[best], round(_COUNTS * ground.step_ns), ground.plan)
        found.append(replace(_finding(ground, *candidates[best], saved[best], alone[best]), lower_bound=more))
        base, now = changed, after[best]
        left = [k for k in left if k != best and saved[k] >= least]
    # what recording made slower saves less than it looks: that may change the order, and what is worth a line
    kept = [one for one in found if (one.saving_fraction or 0) >= LEAST]
    return tuple(sorted(kept, key=lambda one: -(one.saving_ns or 0)))


def _bounded(candidate: Candidate, saved: int) -> int:
    return max(0, saved if candidate.at_most_ns is None else min(saved, candidate.at_most_ns))


def _finding(ground: Ground, rule: Rule, candidate: Candidate, saved: int, alone: int) -> Finding:
    saved, alone = (_unrecorded(ground, candidate, min(time, ground.step_ns)) for time in (saved, alone))
    fraction = saved / ground.step_ns
    return Finding(
        slug=rule.slug,
        title=candidate.title,
        severity=_severity(fraction),
        confidence=candidate.confidence * (1.0 if ground.law.holds else 0.5),
        advice=candidate.advice,
        saving_ns=saved,
        saving_fraction=fraction,
        alone_ns=alone,
        evidence=candidate.evidence,
        learn_more=_page(rule),
        change="; ".join(str(change) for change in candidate.changes),
    )


def _unrecorded(ground: Ground, candidate: Candidate, saved: int) -> int:
    """What a fix saves when nobody records."""
    return unrecorded_saving_ns(
        ground.graph, candidate.changes, saved, whole_ns=ground.step_ns, ratio=ground.host_ratio
    )


def _severity(fraction: float) -> Severity:
    return "high" if fraction >= HIGH else "medium" if fraction >= MEDIUM else "low"


def _of_remark(rule: Rule, said: Remark) -> Finding:
    return Finding(
        slug=rule.slug,
        title=said.title,
        severity="low",
        confidence=said.confidence,
        advice=said.advice,
        saving_ns=0,
        saving_fraction=0.0,
        alone_ns=0,
        evidence=said.evidence,
        learn_more=_page(rule),
    )


def _of_memory(rule: Rule, said: MemoryCandidate) -> Finding:
    return Finding(
        slug=rule.slug,
        title=said.title,
        severity="high" if said.severe else "medium" if said.risk else "low",
        confidence=said.confidence,
        advice=said.advice,
        saving_bytes=said.saving_bytes,
        risk=said.risk,
        evidence=said.evidence,
        learn_more=_page(rule),
    )


def _by_risk(finding: Finding) -> tuple[int, int]:
    return ("high", "medium", "low").index(finding.severity), -(finding.saving_bytes or 0)


def _page(rule: Rule) -> str:
    return f"docs/findings/{rule.slug}.md"
