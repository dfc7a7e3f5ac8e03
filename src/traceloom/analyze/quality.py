"""Can the capture be trusted, and what can it not tell?

With the checks of the recording as a whole: steps, ranks, what recording cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.quality_effects import EFFECTS
from traceloom.analyze.quality_events import EVENT_CHECKS
from traceloom.analyze.quality_gpu import GPU_CHECKS
from traceloom.analyze.verdict import QualityCheck
from traceloom.model import Notice, Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column
from traceloom.model.frames import schema
from traceloom.model.notice import Severity, worst_first
from traceloom.model.result import Result
from traceloom.model.units import count, duration

CHECKS = schema(
    "check affected_count total_count severity message affects",
    {"severity": pl.Enum(["ok", "info", "warning", "error"]), "affects": pl.List(pl.String())},
)

UNEVEN = 1.5
"""A step is uneven where it is this many times longer or shorter than the median."""

COSTLY = 1.05
"""Recording that makes steps this many times longer is said; twice that excess is a warning."""


@dataclass(frozen=True)
class Quality(Result):
    """What was checked about a capture, and what the user must know of it.

    Attributes:
        notices: One for each check that found something and that the reader has not said (`trace.notices`), the worst
            first.
        checks: Every check that applies to this trace, with how many of how many events it found; severity `ok` where
            it found none. A check that cannot be made here (no GPU work, no collectives) has no row. `affects` says
            which parts of the report are weaker for what it found, and how; empty where it found nothing.
    """

    notices: tuple[Notice, ...]
    checks: pl.DataFrame


def quality(trace: Trace) -> Quality:
    """Check the capture. The checks and their limits: docs/concepts/capture-quality.md."""
    made = (rule(trace) for rule in (*GPU_CHECKS, *EVENT_CHECKS, *_RUN_CHECKS))
    done: list[QualityCheck] = [check for check in made if check is not None]
    rows = [
        {
            "check": check.slug,
            "affected_count": check.affected,
            "total_count": check.total,
            "severity": check.severity if check.affected else "ok",
            "message": check.message if check.affected else "",
            "affects": [f"{part}: {how}" for part, how in EFFECTS[check.slug].items()] if check.affected else [],
        }
        for check in done
    ]
    reported = {notice.slug for notice in trace.notices}
    notices = tuple(
        Notice(check.slug, check.severity, check.message, count=check.affected, rank=trace.rank)
        for check in done
        if check.affected and check.slug not in reported
    )
    return Quality(worst_first(notices), pl.DataFrame(rows, schema=CHECKS))


def missing_steps(trace: Trace) -> QualityCheck | None:
    """No steps: nothing can be said per step."""
    if not trace.events.height:
        return None
    message = (
        "no steps are marked: figures are for the whole window, with whatever ran before and after the steady state; "
        "`traceloom record` marks steps, and so does `prof.step()` of PyTorch's profiler"
    )
    return QualityCheck(0 if trace.steps.height else 1, 1, "info", message, slug="no-steps")


def warm_up_step(trace: Trace) -> QualityCheck | None:
    """A first step that is much longer than the others."""
    lengths = _lengths(trace)
    if len(lengths) < 3:
        return None
    rest = lengths[1:].median()
    assert isinstance(rest, float)
    slow = lengths[0] > UNEVEN * rest
    message = (
        f"the first step took {duration(int(lengths[0]))}, the others {duration(int(rest))} (median): it looks like a "
        "warm-up and raises the averages; leave it out with `--steps`"
    )
    return QualityCheck(int(slow), 1, "warning", message, slug="warm-up-step")


def uneven_steps(trace: Trace) -> QualityCheck | None:
    """Steps far from the median; the first one is the business of `warm_up_step`."""
    lengths = _lengths(trace)
    if len(lengths) < 3:
        return None
    later = lengths[1:]
    median = lengths.median()
    assert isinstance(median, float)
    affected = int(((later > UNEVEN * median) | (later * UNEVEN < median)).sum())
    message = (
        f"{count(affected)} of {count(len(later))} later steps differ from the median step ({duration(int(median))}) "
        f"by more than a factor of {UNEVEN:g}: an average step stands for none of them"
    )
    return QualityCheck(affected, len(later), "warning", message, slug="uneven-steps")


def cut_steps(trace: Trace) -> QualityCheck | None:
    """Steps that the recording cuts off."""
    if not trace.steps.height:
        return None
    affected = int((~trace.steps["complete"]).sum())
    message = f"{count(affected)} of {count(trace.steps.height)} steps are cut off by the edge of the recording"
    return QualityCheck(affected, trace.steps.height, "info", message, slug="cut-steps")


def rank_unknown(trace: Trace) -> QualityCheck | None:
    """A trace of a distributed job that does not say its rank."""
    distributed = (trace.meta.world_size or 1) > 1 or trace.collectives.height > 0
    if not distributed:
        return None
    message = (
        "the file belongs to a distributed job but does not say its rank: ranks cannot be compared; the rank may stand "
        "in the file name"
    )
    return QualityCheck(int(trace.rank is None), 1, "warning", message, slug="rank-unknown")


def rank_outside_world(trace: Trace) -> QualityCheck | None:
    """A rank that the job cannot have."""
    size = trace.meta.world_size
    if trace.rank is None or size is None:
        return None
    message = f"the file says rank {trace.rank} of {size} ranks, which cannot be: one of the two is wrong"
    return QualityCheck(int(not 0 <= trace.rank < size), 1, "warning", message, slug="rank-outside-world")


def recording_cost(trace: Trace) -> QualityCheck | None:
    """What recording cost, as `traceloom record` measured it against unrecorded steps."""
    overhead = (trace.meta.capture or {}).get("overhead")
    ratio = overhead.get("ratio") if isinstance(overhead, dict) else None
    if not isinstance(ratio, (int, float)):
        return None
    message = f"recorded steps took {ratio:.2f} times as long as unrecorded ones: absolute times are too long by that"
    severity: Severity = "warning" if ratio > 1 + 2 * (COSTLY - 1) else "info"
    return QualityCheck(int(ratio > COSTLY), 1, severity, message, slug="recording-cost")


def coarse_clock(trace: Trace) -> QualityCheck | None:
    """Times in whole microseconds: short events are rounded."""
    if trace.meta.unit_ns <= 1:
        return None
    timed = np.isin(column(trace, "category"), [cat.CATEGORIES.index(name) for name in (*cat.GPU_WORK, cat.OP)])
    lengths = column(trace, "duration_ns")[timed]
    short = int((lengths < 10 * trace.meta.unit_ns).sum())
    message = (
        f"times are whole microseconds (a PyTorch before 2024): {count(short)} of {count(lengths.size)} operators and "
        "pieces of GPU work are shorter than 10 µs, so that theirs are off by 5 % and more"
    )
    return QualityCheck(short, lengths.size, "info", message, slug="coarse-clock")


def _lengths(trace: Trace) -> pl.Series:
    complete = trace.steps["complete"]
    start, end = (trace.steps[name].filter(complete) for name in ("start_ns", "end_ns"))
    return (end - start)[np.argsort(start.to_numpy(), kind="stable")]


_RUN_CHECKS = (
    missing_steps,
    warm_up_step,
    uneven_steps,
    cut_steps,
    rank_unknown,
    rank_outside_world,
    recording_cost,
    coarse_clock,
)
