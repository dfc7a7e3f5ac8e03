"""The ranking of findings: what each fix saves on top of those before it, so that the savings never
add up to more than the step.

The saving of a fix is evaluated per step of a steady run, over consecutive steps. A step that is
evaluated alone ends with everything that it launched. In a run the host begins the next step
meanwhile: what delays the host at the end of a step costs the time by which the next step could
have begun earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from traceloom.changes.bounds import is_lower_bound, max_saved_ns, unrecorded_saving_ns
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import evaluations
from traceloom.errors import DOCUMENTATION
from traceloom.findings.context import Context
from traceloom.findings.rule import Candidate, FindingRule, MemoryCandidate, Remark, add_frames
from traceloom.findings.vendors import translate
from traceloom.graph import Plan
from traceloom.graph.graph import get_point_times
from traceloom.trace.notice import Abstention, Alternative, Finding

Ints = NDArray[np.int64]
Key = tuple[str, tuple[tuple[str, str], ...], int]

MIN_SAVING_SHARE = 0.005  # of the step; less is not reported
HIGH_SHARE, MEDIUM_SHARE = 0.10, 0.03
MAX_STEPS = 5
_MAX_NODES = 150_000  # of all steps together: of larger ones fewer are looked at
_MIN_STEP_LENGTH = 0.5  # of the typical step: shorter steps are of another kind
_MIN_COUNTED_SHARE = 0.01  # of the step: a saving that may be larger by this much is a lower bound
# Of the largest saving: counts as equal, given how steps vary; then causes come before symptoms
_EQUAL_SAVING_SHARE = 0.98
# Of the largest saving: a cause comes before a symptom that is about the same time
_SIMILAR_SAVING_SHARE = 0.7
_ONE_STEP_LIMIT = (
    "one step was evaluated: what a fix saves because the next step begins earlier is not in it"
)
_MIN_SHARED_SAVING = 0.5  # of a saving that another fix has as well: they are about the same time
_MAX_CANDIDATES = 24  # candidates that are evaluated on top of each other


class Ranked(Struct, frozen=True):
    """Findings of one run.

    Attributes:
        time: By their saving, the largest first; their savings are disjoint. Remarks, which save
            nothing, come last, or before all where no figure can be trusted.
        memory: By risk, then bytes.
        abstentions: Rules that could not decide, and why.
        limit: What the savings leave out; empty where they leave out nothing.
    """

    time: tuple[Finding, ...]
    memory: tuple[Finding, ...]
    abstentions: tuple[Abstention, ...]
    limit: str = ""


def rank(context: Context, rules: Sequence[FindingRule], *, steps: int = MAX_STEPS) -> Ranked:
    """Evaluates all rules, and ranks their candidates.

    Greedy: the fix that saves the most is taken, the others are evaluated again on top of it, and
    so on. The remaining saving of a fix is what it adds to those above it. All is evaluated over
    consecutive steps, of which the median counts.

    Args:
        context: The typical step.
        rules: The rules to evaluate.
        steps: Steps to evaluate at most; 1 for the typical one alone.
    """
    time: list[tuple[FindingRule, Candidate]] = []
    memory: list[Finding] = []
    abstained: list[Abstention] = []
    first: list[Finding] = []
    remarks: list[Finding] = []
    for rule in rules:
        for outcome in rule.evaluate(context):
            if isinstance(outcome, Abstention):
                abstained.append(outcome)
            elif isinstance(outcome, Candidate):
                time.append((rule, outcome))
            elif isinstance(outcome, MemoryCandidate):
                severity = "high" if outcome.severe else "medium" if outcome.risk else "low"
                sizes = {"saving_bytes": outcome.saving_bytes, "risk": outcome.risk}
                memory.append(_describe(rule.slug, outcome, context, severity=severity, **sizes))
            else:
                nothing = {"saving_ns": 0, "saving_fraction": 0.0, "alone_ns": 0}
                severity = "high" if outcome.first else "low"
                remark = _describe(rule.slug, outcome, context, severity=severity, **nothing)
                (first if outcome.first else remarks).append(remark)
    ranked, limit = (
        _rank_greedily(context, _collect_by_key(time), rules, steps)
        if context.whole_ns
        else ([], "")
    )
    findings = add_frames(ranked)
    severities = ("high", "medium", "low")
    memory.sort(
        key=lambda finding: (severities.index(finding.severity), -(finding.saving_bytes or 0))
    )
    return Ranked((*first, *findings, *remarks), tuple(memory), tuple(abstained), limit)


def _describe(
    slug: str, message: Candidate | MemoryCandidate | Remark, context: Context, **figures: Any
) -> Finding:
    """Builds a finding from the words of a rule, for the vendor of the devices."""
    return Finding(
        slug=slug,
        title=translate(message.title, context.vendor),
        advice=translate(message.advice, context.vendor),
        evidence=message.evidence,
        learn_more=f"{DOCUMENTATION}/findings/{slug}/",
        **({"confidence": message.confidence} | figures),
    )


def _rank_greedily(
    context: Context, typical: dict[Key, Candidate], rules: Sequence[FindingRule], max_findings: int
) -> tuple[list[tuple[Finding, Candidate, Context]], str]:
    """Fixes what saves the most in the median of the steps, then what saves the most on top of
    that, and so on.

    Returns:
        The findings, each with the candidate that its words are from and the steps that these are
        about; and what the savings leave out.
    """
    # Steps around the typical one, with their candidates; the typical one alone where there are no
    # others.
    fitting = min(max_findings + 1, _MAX_NODES // max(context.graph.nodes.height, 1))
    step_window = context.around(fitting) if max_findings > 1 and fitting > 1 else ()
    steps: _StepCandidates | None = None
    if len(step_window) > 1:
        several = context.over(step_window)
        outcomes = ((rule, outcome) for rule in rules for outcome in rule.evaluate(several))
        steps = _StepCandidates(
            several,
            _collect_by_key(
                (rule, message) for rule, message in outcomes if isinstance(message, Candidate)
            ),
        )
    # In those almost nothing is done
    if steps is None or compute_median_floor(steps.now_ns) < _MIN_STEP_LENGTH * context.step_ns:
        steps = _StepCandidates(context, typical)
    order = {rule.slug: number for number, rule in enumerate(rules)}
    remaining = sorted(steps.candidates, key=lambda key: order[key[0]])
    position = {key: number for number, key in enumerate(remaining)}
    min_saving_ns = MIN_SAVING_SHARE * context.step_ns
    first_saved: dict[Key, Ints] = {}
    before: dict[Key, Ints] = {}
    ranked: list[Finding] = []
    sources: list[tuple[Candidate, Context]] = []
    taken: list[Key] = []
    remaining_ns = context.unrecorded_step_ns
    span_ns = int(np.ptp(steps.base.times(steps.plan))) if remaining else 0
    first_steps = replace(steps)
    while remaining:
        after = steps.after(remaining)
        saved = {key: steps.saved_ns(key, after[key]) for key in remaining}
        if not first_saved:
            first_saved = saved
        else:
            # A candidate that saves almost nothing after the last fix, but saved more before, is
            # about the same time.
            same = [
                key
                for key in remaining
                if compute_median_floor(before.get(key, 0)) >= min_saving_ns
                and compute_median_floor(saved[key])
                < min(min_saving_ns, _MIN_SHARED_SAVING * compute_median_floor(before[key]))
            ]
            alternatives = tuple(
                Alternative(
                    key[0],
                    translate((typical.get(key) or steps.candidates[key]).title, context.vendor),
                    steps.unrecorded_ns(key, compute_median_floor(first_saved[key])),
                )
                for key in same
            )
            ranked[-1] = replace(ranked[-1], alternatives=alternatives)
            remaining = [key for key in remaining if key not in same]
        # What saves too little for a finding may save more once another is fixed.
        remaining = sorted(remaining, key=lambda key: -compute_usual_saving(saved[key]))
        remaining = remaining[:_MAX_CANDIDATES]
        large = {key: compute_usual_saving(saved[key]) for key in remaining}
        large = {
            key: large[key]
            for key in sorted(remaining, key=lambda key: position.get(key, 0))
            if large[key] >= min_saving_ns
        }
        if large:
            best = _choose_next_fix(steps, large)
        else:
            members = _find_joint_fixes(steps, remaining, min_saving_ns)
            if not members:
                break
            best = steps.join(members, typical)
            remaining = [best, *(key for key in remaining if key not in members)]
            after = steps.after([best])
            saved[best] = first_saved[best] = steps.saved_ns(best, after[best])
        finding = _build_finding(
            steps,
            best,
            (typical.get(best), context),
            (saved[best], first_saved[best]),
            remaining_ns,
        )
        remaining_ns -= finding.saving_ns or 0
        # Whether threads whose waker is unknown limit the saving.
        fixed = steps.context.changed(steps.base, steps.candidates[best].changes)
        plan, before_ns = fixed.own_plan(steps.plan), span_ns
        span_ns = int(np.ptp(fixed.times(plan)))
        counts_ns = round(_MIN_COUNTED_SHARE * steps.context.step_ns * steps.context.step_count)
        is_bound = is_lower_bound(
            steps.base, fixed, before_ns - span_ns, counts_ns, steps.plan, plan
        )
        needed = _find_needed_fixes(first_steps, best, taken, finding.saving_ns or 0, first_saved)
        titles = [
            source.title for key, (source, _) in zip(taken, sources, strict=True) if key in needed
        ]
        advice = finding.advice
        if titles:
            others = translate("; ".join(titles), context.vendor)
            advice += f" It saves this only together with: {others}."
        ranked.append(replace(finding, lower_bound=is_bound, advice=advice))
        taken.append(best)
        sources.append(
            (typical[best], context) if best in typical else (steps.candidates[best], steps.context)
        )
        steps.base, steps.plan, steps.now_ns = fixed, plan, after[best]
        before = saved
        remaining.remove(best)
    # Work that recording slowed down saves less than it seems: that may change the order, and which
    # findings are large enough.
    retained = [
        (fix, *source)
        for fix, source in zip(ranked, sources, strict=True)
        if (fix.saving_fraction or 0) >= MIN_SAVING_SHARE
    ]
    alone_in_time = (
        context.steps is not None
        and steps.count == steps.context.step_count == 1
        and context.unit == "step"
    )
    return sorted(
        retained, key=lambda entry: -(entry[0].saving_ns or 0)
    ), _ONE_STEP_LIMIT if alone_in_time else ""


def _choose_next_fix(steps: _StepCandidates, saved: dict[Key, int]) -> Key:
    """Returns the next fix: the one that saves the most, or a cause of it that saves nearly as much
    of the same time.

    Args:
        steps: The steps with the fixes so far.
        saved: The saving of each fix on top of those, ns; causes before symptoms.
    """
    largest = max(saved.values())
    largest_key = next(
        key for key, saving in saved.items() if saving >= _EQUAL_SAVING_SHARE * largest
    )
    for key, saving in saved.items():
        if key == largest_key:
            break
        if saving < _SIMILAR_SAVING_SHARE * largest:
            continue
        both_ns = compute_median_floor(steps.now_ns - steps.after_all([key, largest_key]))
        if saving + saved[largest_key] - both_ns >= _MIN_SHARED_SAVING * saving:
            return key
    return largest_key


def _find_joint_fixes(
    steps: _StepCandidates, keys: Sequence[Key], min_saving_ns: float
) -> list[Key]:
    """Returns fixes of which none saves enough alone but all together do, without those that add
    nothing to the others; empty where there are none.
    """
    needed = list(keys)
    if len(needed) < 2:
        return []
    shortest = compute_median_floor(steps.after_all(needed))
    least = compute_median_floor(steps.now_ns) - shortest
    if least < min_saving_ns:
        return []
    for key in reversed(keys):
        others = [other for other in needed if other != key]
        after_ns = compute_median_floor(steps.after_all(others))
        if after_ns - shortest < min(min_saving_ns, _MIN_SHARED_SAVING * least):
            needed, shortest = others, after_ns
    return needed


def _find_needed_fixes(
    steps: _StepCandidates,
    key: Key,
    taken: Sequence[Key],
    saving_ns: int,
    first_saved: dict[Key, Ints],
) -> list[Key]:
    """Returns the fixes without which one would save less than half; `steps` is without any."""
    if compute_median_floor(first_saved[key]) >= _MIN_SHARED_SAVING * saving_ns:
        return []
    alone_ns = first_saved[key]
    return [
        other
        for other in taken
        if compute_median_floor(
            steps.now_ns - steps.after_all([other, key]) - first_saved[other] - alone_ns
        )
        >= _MIN_SHARED_SAVING * (saving_ns - compute_median_floor(alone_ns))
    ]


def _build_finding(
    steps: _StepCandidates,
    key: Key,
    typical: tuple[Candidate | None, Context],
    savings: tuple[Ints, Ints],
    remaining_ns: int,
) -> Finding:
    """Builds a finding from its savings in each step: the median, and its interval.

    The words are those of the typical step, else of all that were evaluated. The saving is at most
    the time that the words state, and all savings together are at most the typical step, both without
    what recording cost.

    Args:
        steps: The evaluated steps.
        key: The key of the candidate.
        typical: The candidate in the typical step, and that step.
        savings: On top of those above it, and alone; ns, shape (counted steps,).
        remaining_ns: The remaining time of the typical step, ns.
    """
    in_usual, context = typical
    candidate = steps.candidates[key] if in_usual is None else in_usual
    max_saving_ns = context.step_ns
    if in_usual is not None and in_usual.at_most_ns is not None:
        max_saving_ns = min(max_saving_ns, in_usual.at_most_ns // context.step_count)
    on_top, alone = (
        steps.unrecorded_ns(key, min(max(compute_usual_saving(values), 0), max_saving_ns))
        for values in savings
    )
    low, high = (
        steps.unrecorded_ns(key, max(value, 0))
        for value in compute_median_interval(savings[0].tolist())
    )
    saving = min(on_top, remaining_ns)
    fraction = saving / context.unrecorded_step_ns
    return _describe(
        key[0],
        candidate,
        context,
        severity="high"
        if fraction >= HIGH_SHARE
        else "medium"
        if fraction >= MEDIUM_SHARE
        else "low",
        confidence=candidate.confidence
        * (1.0 if context.law.holds and context.law.points_hold else 0.5),
        saving_ns=saving,
        saving_fraction=fraction,
        alone_ns=min(alone, context.unrecorded_step_ns),
        saving_low_ns=min(low, saving) if steps.count > 1 else None,
        saving_high_ns=min(max(high, saving), context.unrecorded_step_ns)
        if steps.count > 1
        else None,
        step_count=steps.count,
        change="; ".join(str(change) for change in candidate.changes),
    )


@dataclass
class _StepCandidates:
    """Steps, and the candidates in them.

    Attributes:
        context: Consecutive steps, or one step.
        candidates: The candidates by key.
        base: The steps with the fixes so far.
        plan: The plan of its graph.
        now_ns: The length of each counted step with these fixes, shape (counted steps,).
    """

    context: Context
    candidates: dict[Key, Candidate]
    base: Scenario = field(init=False)
    plan: Plan = field(init=False)
    now_ns: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.base, self.plan = Scenario.of(self.context.graph), self.context.plan
        self.now_ns = self.lengths(get_point_times(self.context.graph))

    @property
    def count(self) -> int:
        return int(self.now_ns.size)

    def after(self, keys: Sequence[Key]) -> dict[Key, Ints]:
        """Returns the length of each step with each of these fixed, too; ns."""
        graph = self.context.graph
        # One at a time: each scenario is large.
        scenarios = (self.context.changed(self.base, self.candidates[key].changes) for key in keys)
        measured = get_point_times(graph)
        lengths = {}
        for key, (scenario, times) in zip(keys, evaluations(scenarios, self.plan), strict=True):
            lengths[key] = self.lengths(np.maximum(times, measured - max_saved_ns(graph, scenario)))
        return lengths

    def after_all(self, keys: Sequence[Key]) -> Ints:
        """Returns the length of each step with all of these fixed, too; ns."""
        changes = [change for key in keys for change in self.candidates[key].changes]
        fixed = self.context.changed(self.base, changes)
        bound = get_point_times(self.context.graph) - max_saved_ns(self.context.graph, fixed)
        return self.lengths(np.maximum(fixed.times(self.plan), bound))

    def join(self, keys: Sequence[Key], typical: dict[Key, Candidate]) -> Key:
        """Adds several candidates as one, in the words of the typical step; returns its key."""
        members = [self.candidates[key] for key in keys]
        titles = [typical.get(key, self.candidates[key]).title for key in keys]
        joined: Key = (keys[0][0], tuple(change for key in keys for change in key[1]), len(keys))
        self.candidates[joined] = Candidate(
            title=f"only together: {'; '.join(titles)}",
            changes=tuple(change for member in members for change in member.changes),
            confidence=min(member.confidence for member in members),
            advice=" ".join(dict.fromkeys(member.advice for member in members)),
            evidence=tuple(seen for member in members for seen in member.evidence[:2]),
        )
        return joined

    def saved_ns(self, key: Key, after_ns: Ints) -> Ints:
        """Returns the saving of a fix in each step on top of those before it, bounded by what it
        can save in total; ns.
        """
        saved = self.now_ns - after_ns
        max_saving_ns, total_ns = self.candidates[key].at_most_ns, int(saved.sum())
        if (
            max_saving_ns is not None
            and total_ns > max_saving_ns * self.count / self.context.step_count
        ):
            saved = np.floor(
                saved * (max_saving_ns * self.count / self.context.step_count / total_ns)
            ).astype(np.int64)
        return saved

    def unrecorded_ns(self, key: Key, saved_ns: int) -> int:
        """Returns a saving of one step, corrected for the cost of recording."""
        context = self.context
        return unrecorded_saving_ns(
            context.graph,
            self.candidates[key].changes,
            min(saved_ns, context.step_ns),
            total_ns=context.step_ns,
            ratio=context.host_ratio,
        )

    def lengths(self, times: Ints) -> Ints:
        lengths = self.context.compute_step_lengths(times)
        # The first step may begin with leftover work of others: it counts only where there are too
        # few others.
        return lengths[1:] if lengths.size == 2 or lengths.size > MAX_STEPS else lengths


def _collect_by_key(candidates: Iterable[tuple[FindingRule, Candidate]]) -> dict[Key, Candidate]:
    """Returns candidates by rule and what they change, without figures."""
    collected: dict[Key, Candidate] = {}
    for rule, candidate in candidates:
        changes_key = tuple((change.action, str(change.selection)) for change in candidate.changes)
        number = sum(key[:2] == (rule.slug, changes_key) for key in collected)
        collected[rule.slug, changes_key, number] = candidate
    return collected


def compute_median_floor(values: ArrayLike) -> int:
    """Returns the median; of an even number of values the mean of the two in the middle, rounded
    down.
    """
    return int(np.median(np.asarray(values, dtype=np.int64)))


def compute_usual_saving(values: Ints) -> int:
    """Returns the median saving of the steps. Where that is nothing it is the mean without the step
    that gains most: the workers of a loader deliver in bursts, and most steps do not wait.
    """
    return compute_median_floor(values) or int(np.sort(values)[: values.size - 1 or None].mean())


def compute_median_interval(values: Sequence[int]) -> tuple[int, int]:
    """Returns the interval that holds the median of all such steps with a confidence of 90 %, where
    there are at least five.

    Order statistics alone: of fewer than five values it is the smallest and the largest. As many
    values are left out at each end as heads of a fair coin have a probability of at most 1/20.
    """
    ordered = np.sort(np.array(values, dtype=np.int64))
    probabilities = np.ones(1)  # of each number of heads
    for _ in range(ordered.size):
        probabilities = (np.append(probabilities, 0.0) + np.append(0.0, probabilities)) / 2
    low_index = max(int(np.searchsorted(np.cumsum(probabilities), 0.05, side="right")) - 1, 0)
    return int(ordered[low_index]), int(ordered[ordered.size - 1 - low_index])
