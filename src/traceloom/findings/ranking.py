"""Ranking: what each fix saves, one after the other, so that the savings never add up to more than the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traceloom.findings.ground import Ground
from traceloom.findings.rule import Candidate, MemoryCandidate, Rule
from traceloom.model.finding import Abstention, Finding, Severity
from traceloom.simulate import Scenario, whatif_many
from traceloom.simulate.whatif import HOST_TARGETS

LEAST = 0.005  # of the step; less is not worth a line
HIGH, MEDIUM = 0.10, 0.03
_MOST = 24  # candidates that are evaluated on top of each other


@dataclass(frozen=True, slots=True)
class Ranked:
    """Findings of one run.

    Attributes:
        time: By what they save, the most first; their savings are disjoint.
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
    for rule in rules:
        for said in rule.look(ground):
            if isinstance(said, Abstention):
                abstained.append(said)
            elif isinstance(said, MemoryCandidate):
                memory.append(_of_memory(rule, said))
            else:
                time.append((rule, said))
    return Ranked(_greedy(ground, time), tuple(sorted(memory, key=_by_risk)), tuple(abstained))


def _greedy(ground: Ground, candidates: list[tuple[Rule, Candidate]]) -> tuple[Finding, ...]:
    if not candidates or not ground.whole_ns:
        return ()
    least = LEAST * ground.whole_ns
    base = Scenario.of(ground.graph)
    (now,) = whatif_many(ground.graph, [base], ground.plan).tolist()
    alone: dict[int, int] = {}
    left = list(range(len(candidates)))
    found: list[Finding] = []
    while left:
        scenarios = [_with(base, candidates[k][1]) for k in left]
        times = whatif_many(ground.graph, scenarios, ground.plan).tolist()
        saved = {k: _bounded(candidates[k][1], now - time) for k, time in zip(left, times, strict=True)}
        if not alone:
            alone = saved
            left = sorted((k for k in left if saved[k] >= least), key=lambda k: -saved[k])[:_MOST]
            if not left:
                break
        best = max(left, key=lambda k: (saved[k], -k))
        if saved[best] < least:
            break
        rule, candidate = candidates[best]
        found.append(_finding(ground, rule, candidate, saved[best], alone[best]))
        base = _with(base, candidate)
        (now,) = whatif_many(ground.graph, [base], ground.plan).tolist()
        left = [k for k in left if k != best and saved[k] >= least]
    return tuple(found)


def _with(base: Scenario, candidate: Candidate) -> Scenario:
    for change in candidate.changes:
        base = base.apply(change)
    return base


def _bounded(candidate: Candidate, saved: int) -> int:
    return max(0, saved if candidate.at_most_ns is None else min(saved, candidate.at_most_ns))


def _finding(ground: Ground, rule: Rule, candidate: Candidate, saved: int, alone: int) -> Finding:
    fraction = saved / ground.whole_ns
    ratio = ground.host_ratio
    of_host = any(change.selection.target in HOST_TARGETS for change in candidate.changes)
    if of_host and ratio is not None and ratio > 1:
        saved, alone, fraction = round(saved / ratio), round(alone / ratio), fraction / ratio
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


def _severity(fraction: float) -> Severity:
    return "high" if fraction >= HIGH else "medium" if fraction >= MEDIUM else "low"


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
