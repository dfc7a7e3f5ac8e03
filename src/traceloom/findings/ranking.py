"""Ranking: what each fix saves, one after the other, so that the savings never add up to more than the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from traceloom.findings.ground import Ground
from traceloom.findings.over_steps import MOST_STEPS, Key, Step, interval, keyed, middle, others
from traceloom.findings.rule import Candidate, MemoryCandidate, Remark, Rule
from traceloom.model.finding import Abstention, Finding, Severity
from traceloom.simulate.lower_bound import saves_more

LEAST = 0.005  # of the step; less is not worth a line
HIGH, MEDIUM = 0.10, 0.03
_COUNTS = 0.01  # of the step: a saving that may be larger by this much is a lower bound
_SAME = 0.98  # of the largest saving: as large, for all that steps differ; then causes come before symptoms
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


def rank(ground: Ground, rules: Sequence[Rule], *, steps: int = MOST_STEPS) -> Ranked:
    """Ask all rules, and put their candidates in order.

    Greedy: the fix that saves the most is taken, the others are evaluated again on top of it, and so on. What is left
    of a saving is what the fix adds to those above it. All is evaluated in several steps of the window, and the middle
    one of them counts.

    Args:
        ground: The usual step.
        rules: Who is asked.
        steps: Steps to evaluate at most; 1 for the usual one alone.
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
    found = _greedy(ground, keyed(time), rules, steps) if ground.whole_ns else ()
    return Ranked((*found, *remarks), tuple(sorted(memory, key=_by_risk)), tuple(abstained))


def _greedy(ground: Ground, usual: dict[Key, Candidate], rules: Sequence[Rule], most: int) -> tuple[Finding, ...]:
    """Fix what saves most in the middle one of the steps, then what saves most on top of that, and so on."""
    steps = [Step(ground, usual), *others(ground, rules, most)]
    order = {rule.slug: number for number, rule in enumerate(rules)}
    left = sorted(dict.fromkeys(key for step in steps for key in step.candidates), key=lambda key: order[key[0]])
    place = {key: number for number, key in enumerate(left)}
    least = LEAST * ground.step_ns
    alone: dict[Key, list[int]] = {}
    found: list[Finding] = []
    room = ground.step_ns
    while left:
        after = [step.after(left) for step in steps]
        saved = {
            key: [step.saved_ns(key, times.get(key)) for step, times in zip(steps, after, strict=True)] for key in left
        }
        if not alone:
            alone = saved
            left = sorted((key for key in left if middle(saved[key]) >= least), key=lambda key: -middle(saved[key]))
            left = left[:_MOST]
            if not left:
                break
        largest = max(middle(saved[key]) for key in left)
        best = min((key for key in left if middle(saved[key]) >= _SAME * largest), key=place.__getitem__)
        if middle(saved[best]) < least:
            break
        finding = _finding(steps, best, saved[best], alone[best], room)
        room -= finding.saving_ns or 0
        found.append(replace(finding, lower_bound=_held(steps, best, saved[best], after)))
        for step, times in zip(steps, after, strict=True):
            step.fix(best, times.get(best))
        left = [key for key in left if key != best and middle(saved[key]) >= least]
    # what recording made slower saves less than it looks: that may change the order, and what is worth a line
    kept = [one for one in found if (one.saving_fraction or 0) >= LEAST]
    return tuple(sorted(kept, key=lambda one: -(one.saving_ns or 0)))


def _held(steps: list[Step], key: Key, saved: list[int], after: list[dict[Key, int]]) -> bool:
    """Whether in any of the steps threads whose waker is unknown hold the saving back."""
    return any(
        saves_more(
            step.base, step.ground.changed(step.base, step.candidates[key].changes),
            step.now_ns - times[key], round(_COUNTS * step.ground.step_ns), step.plan,
        )
        for step, times, mine in zip(steps, after, saved, strict=True) if key in times and mine
    )  # fmt: skip


def _finding(steps: list[Step], key: Key, saved: list[int], alone: list[int], room: int) -> Finding:
    """A finding from what it saves in each step: the middle one, and between which values that lies.

    It is told in the words of the usual step, else of the step in which it saves most nearly that. Together no more is
    told than the usual step takes.
    """
    usual = steps[0].ground
    told = [step.unrecorded_ns(key, one) for step, one in zip(steps, saved, strict=True)]
    first = [step.unrecorded_ns(key, one) for step, one in zip(steps, alone, strict=True)]
    low, high = interval(told)
    saving = min(middle(told), room)
    having = [number for number, step in enumerate(steps) if key in step.candidates]
    near = min(having, key=lambda number: abs(told[number] - saving))
    step = steps[0 if 0 in having and low <= told[0] <= high else near]
    candidate = step.candidates[key]
    fraction = saving / usual.step_ns
    return Finding(
        slug=key[0],
        title=candidate.title,
        severity=_severity(fraction),
        confidence=candidate.confidence * (1.0 if usual.law.holds else 0.5),
        advice=candidate.advice,
        saving_ns=saving,
        saving_fraction=fraction,
        alone_ns=min(middle(first), usual.step_ns),
        saving_low_ns=min(low, saving) if len(steps) > 1 else None,
        saving_high_ns=min(max(high, saving), usual.step_ns) if len(steps) > 1 else None,
        step_count=len(steps),
        evidence=candidate.evidence,
        learn_more=_page(key[0]),
        change="; ".join(str(change) for change in candidate.changes),
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
        learn_more=_page(rule.slug),
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
        learn_more=_page(rule.slug),
    )


def _by_risk(finding: Finding) -> tuple[int, int]:
    return ("high", "medium", "low").index(finding.severity), -(finding.saving_bytes or 0)


def _page(slug: str) -> str:
    return f"docs/findings/{slug}.md"
