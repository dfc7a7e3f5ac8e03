"""Ranking: what each fix saves, one after the other, so that the savings never add up to more than the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, MemoryCandidate, Remark, Rule
from traceloom.findings.steady import MOST_STEPS, Key, Steady, interval, keyed, middle, steady
from traceloom.model.finding import Abstention, Alternative, Finding
from traceloom.simulate.lower_bound import saves_more

Ints = NDArray[np.int64]

LEAST = 0.005  # of the step; less is not worth a line
HIGH, MEDIUM = 0.10, 0.03
_COUNTS = 0.01  # of the step: a saving that may be larger by this much is a lower bound
_SAME = 0.98  # of the largest saving: as large, for all that steps differ; then causes come before symptoms
_NEARLY = 0.7  # of the largest saving: a cause comes before a symptom that is about the same time, too
_LIMIT = "one step was evaluated: what a fix saves because the next step begins earlier is not in it"
_SHARED = 0.5  # of a saving that another fix has as well: they are about the same time
_MOST = 24  # candidates that are evaluated on top of each other


@dataclass(frozen=True, slots=True)
class Ranked:
    """Findings of one run.

    Attributes:
        time: By what they save, the most first; their savings are disjoint. Last, what only has to be known: it saves
            nothing.
        memory: By risk, then bytes.
        abstentions: Rules that could not know, and why.
        limit: What the savings leave out; empty where they leave out nothing.
    """

    time: tuple[Finding, ...]
    memory: tuple[Finding, ...]
    abstentions: tuple[Abstention, ...]
    limit: str = ""


def rank(context: Context, rules: Sequence[Rule], *, steps: int = MOST_STEPS) -> Ranked:
    """Ask all rules, and put their candidates in order.

    Greedy: the fix that saves the most is taken, the others are evaluated again on top of it, and so on. What is left
    of a saving is what the fix adds to those above it. All is evaluated over steps that follow each other, and the
    middle one of them counts.

    Args:
        context: The usual step.
        rules: Who is asked.
        steps: Steps to evaluate at most; 1 for the usual one alone.
    """
    time: list[tuple[Rule, Candidate]] = []
    memory: list[Finding] = []
    abstained: list[Abstention] = []
    remarks: list[Finding] = []
    for rule in rules:
        for outcome in rule.look(context):
            if isinstance(outcome, Abstention):
                abstained.append(outcome)
            elif isinstance(outcome, MemoryCandidate):
                memory.append(_of_memory(rule, outcome))
            elif isinstance(outcome, Remark):
                remarks.append(_of_remark(rule, outcome))
            else:
                time.append((rule, outcome))
    findings, limit = _greedy(context, keyed(time), rules, steps) if context.whole_ns else ((), "")
    abstained += _untold(context, [(rule.slug, candidate) for rule, candidate in time], findings)
    return Ranked((*findings, *remarks), tuple(sorted(memory, key=_by_risk)), tuple(abstained), limit)


def _greedy(
    context: Context, usual: dict[Key, Candidate], rules: Sequence[Rule], most: int
) -> tuple[tuple[Finding, ...], str]:
    """Fix what saves most in the middle one of the steps, then what saves most on top of that, and so on."""
    steps = steady(context, usual, rules, most)
    order = {rule.slug: number for number, rule in enumerate(rules)}
    left = sorted(steps.candidates, key=lambda key: order[key[0]])
    position = {key: number for number, key in enumerate(left)}
    least = LEAST * context.step_ns
    alone: dict[Key, Ints] = {}
    before: dict[Key, Ints] = {}
    ranked: list[Finding] = []
    room = context.step_ns
    while left:
        after = steps.after(left)
        saved = {key: steps.saved_ns(key, after.get(key)) for key in left}
        if not alone:
            alone = saved
        else:
            # what saves next to nothing now that the last fix is made, but saved more before, is about the same time
            same = [key for key in left if middle(saved[key]) < min(least, _SHARED * middle(before[key]))]
            others = tuple(
                Alternative(
                    key[0],
                    (usual.get(key) or steps.candidates[key]).title,
                    steps.unrecorded_ns(key, middle(alone[key])),
                )
                for key in same
            )
            ranked[-1] = replace(ranked[-1], alternatives=others)
        left = sorted((key for key in left if middle(saved[key]) >= least), key=lambda key: -middle(saved[key]))[:_MOST]
        if not left:
            break
        best = _first(steps, {key: middle(saved[key]) for key in sorted(left, key=position.__getitem__)})
        finding = _finding(steps, best, (usual.get(best), context), (saved[best], alone[best]), room)
        room -= finding.saving_ns or 0
        ranked.append(replace(finding, lower_bound=_held(steps, best)))
        steps.fix(best, after.get(best))
        before = saved
        left.remove(best)
    # what recording made slower saves less than it looks: that may change the order, and what is worth a line
    kept = [fix for fix in ranked if (fix.saving_fraction or 0) >= LEAST]
    alone_in_time = (
        context.steps is not None and steps.count == steps.context.step_count == 1 and context.unit == "step"
    )
    return tuple(sorted(kept, key=lambda fix: -(fix.saving_ns or 0))), _LIMIT if alone_in_time else ""


def _untold(context: Context, seen: list[tuple[str, Candidate]], findings: tuple[Finding, ...]) -> Iterator[Abstention]:
    """Why something that looks large is no finding: without it the step would take as long."""
    slugs = {finding.slug for finding in findings} | {
        alternative.slug for finding in findings for alternative in finding.alternatives
    }
    for slug, candidate in seen:
        if slug not in slugs and (candidate.seen_ns or 0) >= HIGH * context.step_ns:
            yield Abstention(
                slug, f"{candidate.title}: hiding it saves nothing, what comes behind waits for more than that"
            )


def _first(steps: Steady, saved: dict[Key, int]) -> Key:
    """What to fix first: what saves most, or a cause of it that saves nearly as much of the same time.

    Args:
        steps: With what is fixed so far.
        saved: What each fix saves on top of that, ns; causes before symptoms.
    """
    largest = max(saved.values())
    most = next(key for key, saving in saved.items() if saving >= _SAME * largest)
    for key, saving in saved.items():
        if key == most:
            break
        if saving < _NEARLY * largest:
            continue
        together = middle(steps.now_ns - steps.after_both(key, most))
        if saving + saved[most] - together >= _SHARED * saving:
            return key
    return most


def _held(steps: Steady, key: Key) -> bool:
    """Whether threads whose waker is unknown hold the saving back."""
    context = steps.context
    fixed = context.changed(steps.base, steps.candidates[key].changes)
    saved = int(np.ptp(steps.base.times(steps.plan)) - np.ptp(fixed.times(steps.plan)))
    return saves_more(steps.base, fixed, saved, round(_COUNTS * context.step_ns * context.step_count), steps.plan)


def _finding(
    steps: Steady, key: Key, usual: tuple[Candidate | None, Context], savings: tuple[Ints, Ints], room: int
) -> Finding:
    """A finding from what it saves in each step: the middle one, and between which values that lies.

    Its words are those of the usual step, else of all that were evaluated. Together no more is saved than the usual
    step takes.

    Args:
        steps: What was evaluated.
        key: What is to be fixed.
        usual: The same in the usual step, and that step.
        savings: On top of what is above it, and alone; ns, shape (counted steps,).
        room: What is left of the usual step, ns.
    """
    on_top, first = ([steps.unrecorded_ns(key, max(value, 0)) for value in values.tolist()] for values in savings)
    low, high = interval(on_top)
    saving = min(middle(on_top), room)
    in_usual, context = usual
    candidate = steps.candidates[key] if in_usual is None else in_usual
    fraction = saving / context.step_ns
    return Finding(
        slug=key[0],
        title=candidate.title,
        severity="high" if fraction >= HIGH else "medium" if fraction >= MEDIUM else "low",
        confidence=candidate.confidence * (1.0 if context.law.holds and context.law.points_hold else 0.5),
        advice=candidate.advice,
        saving_ns=saving,
        saving_fraction=fraction,
        alone_ns=min(middle(first), context.step_ns),
        saving_low_ns=min(low, saving) if steps.count > 1 else None,
        saving_high_ns=min(max(high, saving), context.step_ns) if steps.count > 1 else None,
        step_count=steps.count,
        evidence=candidate.evidence,
        learn_more=_page(key[0]),
        change="; ".join(str(change) for change in candidate.changes),
    )


def _of_remark(rule: Rule, remark: Remark) -> Finding:
    return Finding(
        slug=rule.slug,
        title=remark.title,
        severity="low",
        confidence=remark.confidence,
        advice=remark.advice,
        saving_ns=0,
        saving_fraction=0.0,
        alone_ns=0,
        evidence=remark.evidence,
        learn_more=_page(rule.slug),
    )


def _of_memory(rule: Rule, candidate: MemoryCandidate) -> Finding:
    return Finding(
        slug=rule.slug,
        title=candidate.title,
        severity="high" if candidate.severe else "medium" if candidate.risk else "low",
        confidence=candidate.confidence,
        advice=candidate.advice,
        saving_bytes=candidate.saving_bytes,
        risk=candidate.risk,
        evidence=candidate.evidence,
        learn_more=_page(rule.slug),
    )


def _by_risk(finding: Finding) -> tuple[int, int]:
    return ("high", "medium", "low").index(finding.severity), -(finding.saving_bytes or 0)


def _page(slug: str) -> str:
    return f"docs/findings/{slug}.md"
