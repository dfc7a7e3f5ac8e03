"""Quality of a capture: its checks as a whole (steps, ranks, recording cost), and which results
each fault weakens.
"""

from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import polars as pl

from traceloom.analyze.quality_checks import EVENT_CHECKS, GPU_CHECKS, QualityCheck
from traceloom.analyze.steps import find_step_spans
from traceloom.system.units import format_count, format_duration
from traceloom.trace import vocabulary as vocab
from traceloom.trace.arrays import get_event_column
from traceloom.trace.frames import Result, build_schema
from traceloom.trace.notice import Notice, NoticeSeverity, sort_by_severity
from traceloom.trace.trace import Trace

_LAUNCHES_WEAKENED = "delays and queue depths leave such work out"
_DEVICE_TIME_WEAKENED = "device time of operators is too small by this work"
_NO_OWNER = "rows without operator"

EFFECTS: dict[str, dict[str, str]] = {
    "orphan-work": {
        "ranks[*].idle": "gaps before such work have no launch to explain them",
        "operators": _DEVICE_TIME_WEAKENED,
        "modules": "device time of modules is too small by this work",
        "kernel_shapes": _NO_OWNER,
        "kinds": "where a name alone is ambiguous the kind is a guess: optimizer work counts as elementwise",
        "roofline": "such work has no model",
        "launches": _LAUNCHES_WEAKENED,
        "per_step": "such work belongs to no step",
        "critical_path": "nothing on the host leads to such work",
    },
    "gpu-work-missing": {
        "ranks[*].devices": "GPU time is unknown, not zero",
        "kernels": "there is none to show",
        "operators": "device time is unknown",
        "answer": "it can only speak of the host",
    },
    "gpu-not-used": {"answer": "it speaks of the host alone"},
    "impossible-duration": {
        "answer": "such events count as long as most of their name",
        "ranks[*].devices": "busy time is a guess for such work",
        "kernels": "sums hold a guess for such work",
    },
    "busy-before-window": {
        "ranks[*].idle": "what the GPU did there is unknown, not idle",
        "answer": "the GPU was busier than it says",
        "findings": "no fix saves that time",
        "critical_path": "that time is taken as given",
    },
    "launches-without-work": {
        "ranks[*].devices": "busy time is too small, idle time too large",
        "ranks[*].idle": "gaps may hold work that was not recorded",
        "kernels": "counts and sums are too small",
        "kinds": "sums are too small",
        "operators": _DEVICE_TIME_WEAKENED,
        "launches": "queues seem to empty too late: such work never starts",
    },
    "gpu-work-before-launch": {
        "ranks[*].idle": "causes compare the clocks of host and GPU: off by as much",
        "launches": "delays are off by as much; negative ones count as 0",
        "critical_path": "edges between host and GPU are off by as much",
    },
    "waits-contradict-work": {
        "answer": "idle time, and what the host did meanwhile, are off by as much",
        "ranks[*].idle": "causes compare the clocks of host and GPU: off by as much",
        "findings": "savings of waits and of idle time are off by as much",
        "critical_path": "edges between host and GPU are off by as much",
    },
    "overlapping-gpu-work": {
        "kernels": "sums exceed the time that passed",
        "kinds": "sums exceed exclusive times, which are right",
        "operators": "device times exceed the time that passed",
        "roofline": "kernels that share the GPU seem slower than they are",
    },
    "instant-gpu-work": {
        "kernels": "counts hold such work, sums do not",
        "copies": "such copies are in no bandwidth",
        "roofline": "such work seems free",
    },
    "unpaired-counters": {"counters": "operators of the counters are unknown"},
    "waits-without-record": {
        "critical_path": "dependencies between streams are guessed from order",
        "ranks[*].idle": "waits for another stream may have another cause",
    },
    "syncs-while-running": {"critical_path": "what the host waited for there is uncertain"},
    "waits-for-unknown-record": {
        "critical_path": "dependencies between streams are incomplete",
        "ranks[*].idle": "waits for another stream may have another cause",
    },
    "no-operators": {
        "operators": "there are none",
        "modules": "there are none",
        "kernel_shapes": _NO_OWNER,
        "kinds": "names alone decide",
        "roofline": "nothing has a model",
        "ranks[*].host": "phases and activities are unknown",
    },
    "missing-shapes": {
        "kernel_shapes": "all shapes of an operator share a row",
        "kinds": "bounds are unknown",
        "roofline": "nothing has a model",
        "operators": "not distinguished by size",
    },
    "operators-left-out": {
        "operators": "most are missing",
        "ranks[*].host": "time between operators may be that of operators that are not in the file",
        "ranks[*].idle": "idle time may be that of work that is not in the file",
    },
    "missing-stacks": {
        "modules": "only annotations name modules",
        "ranks[*].host": "time between operators is unobserved",
        "ranks[*].idle": "gaps that Python causes show as unobserved",
    },
    "crossing-spans": {
        "operators": "host times of cut events are too small",
        "ranks[*].host": "the cut time counts for whoever follows",
    },
    "negative-duration": {
        "kernels": "such events count as 0",
        "operators": "such events count as 0",
    },
    "absurd-duration": {
        "answer": "the window is wrong, and so is every share of it",
        "ranks[*].devices": "the window is wrong, and so is every share of it",
        "kernels": "totals are wrong",
        "operators": "totals are wrong",
    },
    "unknown-category": {"answer": "such events are counted nowhere"},
    "profiler-overhead": {
        "ranks[*].host": "this time is the profiler's",
        "ranks[*].idle": "some idle time is the profiler's",
        "ranks[*].step_times": "steps in which it falls are too long",
    },
    "collectives-without-details": {"communication": "bytes, groups and bandwidths are unknown"},
    "ambiguous-backward": {
        "modules": "the backward time of such operators may stand with another module"
    },
    "no-steps": {
        "ranks[*].steps": "there are none",
        "per_step": "there is no usual step",
        "kinds": "no spread over steps",
        "critical_path": "the whole recording is one step",
    },
    "warm-up-step": {
        "ranks[*].step_times": "means are too large; medians are right",
        "per_step": "means and maxima are too large",
    },
    "uneven-steps": {
        "per_step": "the mean step stands for none",
        "ranks[*].step_times": "the spread is wide",
    },
    "cut-steps": {
        "ranks[*].step_times": "cut steps are left out",
        "per_step": "cut steps are left out",
    },
    "rank-unknown": {
        "communication": "ranks cannot be compared",
        "critical_path": "other ranks are unseen",
    },
    "rank-outside-world": {
        "communication": "ranks cannot be matched",
        "critical_path": "ranks cannot be matched",
    },
    "recording-cost": {
        "ranks[*].step_times": "steps are too long by that",
        "ranks[*].idle": "some idle time is the recording's",
        "ranks[*].host": "times are too long by that",
    },
    "coarse-clock": {
        "kernels": "times of short kernels are rounded",
        "operators": "times of short operators are rounded",
        "copies": "bandwidths of short copies are rounded, or missing where the duration is 0",
        "ranks[*].idle": "short gaps are rounded",
    },
    "cut-file": {
        "ranks[*].devices": "the end of the recording is missing",
        "ranks[*].steps": "the last steps may be missing",
    },
    "cut-gzip": {
        "ranks[*].devices": "the end of the recording is missing",
        "ranks[*].steps": "the last steps may be missing",
    },
    "corrupt-gzip": {"ranks[*].devices": "what follows the damage is missing"},
    "lost-events": {
        "kernels": "counts and sums may be too small",
        "operators": "counts and sums may be too small",
    },
    "missing-ranks": {
        "communication": "what the missing ranks did is unseen",
        "critical_path": "other ranks are unseen",
    },
    "duplicate-rank": {"communication": "ranks cannot be matched"},
}
"""Slug of a notice -> part of the report -> how it is weakened."""


class Effect(TypedDict):
    """The effect of a notice: a part of the document, and how it is weakened."""

    part: str
    how: str


def list_affected(slug: str) -> list[Effect]:
    """Returns the effects of a notice, as in report JSON: `part` of the document and `how`; empty
    for none.
    """
    return [{"part": part, "how": effect} for part, effect in EFFECTS.get(slug, {}).items()]


CHECKS = build_schema(
    "check affected_count total_count severity message affects",
    {"severity": pl.Enum(["ok", "info", "warning", "error"]), "affects": pl.List(pl.String())},
)

UNEVEN_FACTOR = 1.5
"""A step is uneven where it is this many times longer or shorter than the median."""

MIN_OVERHEAD_RATIO = 1.05
"""Recording that makes steps this many times longer is reported; twice that excess is a warning."""


@dataclass(frozen=True)
class Quality(Result):
    """The checks of a capture, and the notices for the user.

    Attributes:
        notices: One for each check that found something and that the reader has not reported
            (`trace.notices`), the worst first.
        checks: Every check that applies to this trace, with how many of how many events it found;
            severity `ok` where it found none. A check that cannot be made here (no GPU work, no
            collectives) has no row. `affects` states which parts of the report are weaker for what
            it found, and how; empty where it found nothing.
    """

    notices: tuple[Notice, ...]
    checks: pl.DataFrame


def quality(trace: Trace) -> Quality:
    """Checks the capture. The checks and their limits: docs/concepts/capture-quality.md."""
    results = (rule(trace) for rule in (*GPU_CHECKS, *EVENT_CHECKS, *_RUN_CHECKS))
    done: list[QualityCheck] = [check for check in results if check is not None]
    rows = [
        {
            "check": check.slug,
            "affected_count": check.affected,
            "total_count": check.total,
            "severity": check.severity if check.affected else "ok",
            "message": check.message if check.affected else "",
            "affects": [f"{part}: {effect}" for part, effect in EFFECTS[check.slug].items()]
            if check.affected
            else [],
        }
        for check in done
    ]
    reported = {notice.slug for notice in trace.notices}
    notices = tuple(
        Notice(check.slug, check.severity, check.message, count=check.affected, rank=trace.rank)
        for check in done
        if check.affected and check.slug not in reported
    )
    return Quality(sort_by_severity(notices), pl.DataFrame(rows, schema=CHECKS))


def check_missing_steps(trace: Trace) -> QualityCheck | None:
    """Reports a trace without steps, which allows no results per step."""
    if not trace.events.height:
        return None
    message = (
        "no steps are marked: figures are for the whole window, with whatever ran before and after the steady state; "
        "`traceloom record` marks steps, and so does `prof.step()` of PyTorch's profiler"
    )
    return QualityCheck(0 if trace.steps.height else 1, 1, "info", message, slug="no-steps")


def check_warm_up_step(trace: Trace) -> QualityCheck | None:
    """Reports a first step that is much longer than the others."""
    lengths = _compute_step_lengths(trace)
    if len(lengths) < 3:
        return None
    median_ns = lengths[1:].median()
    assert isinstance(median_ns, float)
    slow = lengths[0] > UNEVEN_FACTOR * median_ns
    message = (
        f"the first step took {format_duration(int(lengths[0]))}, the others {format_duration(int(median_ns))} (median): it looks like a "
        "warm-up and raises the averages; leave it out with `--steps`"
    )
    return QualityCheck(int(slow), 1, "warning", message, slug="warm-up-step")


def check_uneven_steps(trace: Trace) -> QualityCheck | None:
    """Reports steps far from the median, without the first one, which `check_warm_up_step`
    covers.
    """
    lengths = _compute_step_lengths(trace)
    if len(lengths) < 3:
        return None
    later = lengths[1:]
    median = lengths.median()
    assert isinstance(median, float)
    affected = int(((later > UNEVEN_FACTOR * median) | (later * UNEVEN_FACTOR < median)).sum())
    message = (
        f"{format_count(affected)} of {format_count(len(later))} later steps differ from the median step ({format_duration(int(median))}) "
        f"by more than a factor of {UNEVEN_FACTOR:g}: an average step stands for none of them"
    )
    return QualityCheck(affected, len(later), "warning", message, slug="uneven-steps")


def cut_steps(trace: Trace) -> QualityCheck | None:
    """Reports steps that the recording cuts off."""
    if not trace.steps.height:
        return None
    affected = int((~trace.steps["complete"]).sum())
    message = f"{format_count(affected)} of {format_count(trace.steps.height)} steps are cut off by the edge of the recording"
    return QualityCheck(affected, trace.steps.height, "info", message, slug="cut-steps")


def check_unknown_rank(trace: Trace) -> QualityCheck | None:
    """Reports a trace of a distributed job that does not state its rank."""
    distributed = (trace.meta.world_size or 1) > 1 or trace.collectives.height > 0
    if not distributed:
        return None
    message = (
        "the file belongs to a distributed job but does not say its rank: ranks cannot be compared; the rank may stand "
        "in the file name"
    )
    return QualityCheck(int(trace.rank is None), 1, "warning", message, slug="rank-unknown")


def check_rank_outside_world(trace: Trace) -> QualityCheck | None:
    """Reports a rank that the job cannot have."""
    size = trace.meta.world_size
    if trace.rank is None or size is None:
        return None
    message = (
        f"the file says rank {trace.rank} of {size} ranks, which cannot be: one of the two is wrong"
    )
    return QualityCheck(
        int(not 0 <= trace.rank < size), 1, "warning", message, slug="rank-outside-world"
    )


def check_recording_cost(trace: Trace) -> QualityCheck | None:
    """Reports the cost of recording, as `traceloom record` measured it against unrecorded steps."""
    overhead = (trace.meta.capture or {}).get("overhead")
    ratio = overhead.get("ratio") if isinstance(overhead, dict) else None
    if not isinstance(ratio, (int, float)):
        return None
    message = f"recorded steps took {ratio:.2f} times as long as unrecorded ones: absolute times are too long by that"
    severity: NoticeSeverity = "warning" if ratio > 1 + 2 * (MIN_OVERHEAD_RATIO - 1) else "info"
    return QualityCheck(
        int(ratio > MIN_OVERHEAD_RATIO), 1, severity, message, slug="recording-cost"
    )


def check_coarse_clock(trace: Trace) -> QualityCheck | None:
    """Reports times in whole microseconds, which round short events."""
    if trace.meta.unit_ns <= 1:
        return None
    has_times = np.isin(
        get_event_column(trace, "category"),
        [vocab.CATEGORIES.index(name) for name in (*vocab.GPU_WORK, vocab.OP)],
    )
    lengths = get_event_column(trace, "duration_ns")[has_times]
    short = int((lengths < 10 * trace.meta.unit_ns).sum())
    message = (
        f"times are whole microseconds (a PyTorch before 2024): {format_count(short)} of {format_count(lengths.size)} operators and "
        "pieces of GPU work are shorter than 10 µs, so that theirs are off by 5 % and more"
    )
    return QualityCheck(short, lengths.size, "info", message, slug="coarse-clock")


def _compute_step_lengths(trace: Trace) -> pl.Series:
    steps = find_step_spans(trace).filter("complete")
    start, end = steps["start_ns"], steps["end_ns"]
    return (end - start)[np.argsort(start.to_numpy(), kind="stable")]


_RUN_CHECKS = (
    check_missing_steps,
    check_warm_up_step,
    check_uneven_steps,
    cut_steps,
    check_unknown_rank,
    check_rank_outside_world,
    check_recording_cost,
    check_coarse_clock,
)
