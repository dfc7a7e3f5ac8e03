"""When did a series of values of jobs change, by how much, and is it more than chance?

The job is the sample: its captures are no independent witnesses of each other. Exact definitions in
docs/concepts/fleet.md.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from traceloom.analyze.gate.resampling import DRAWS, SEED, interval
from traceloom.array_types import Floats, Ints

LEAST_JOBS = 5
"""On each side of a change."""

LEAST_STRETCH = 2 * LEAST_JOBS
"""Jobs of a stretch between two changes back and forth: some odd jobs stand side by side often enough."""

LEAST_CHANGE = 0.05
"""Changes of the median smaller than this are none."""

ALARM = 0.001
"""How likely it may be that all series, none of which changed, give an alarm at all: one looks every day."""

_LIKELY = 1e-3  # by chance: not worth to look for where exactly
_MOST_BOUNDS = 200  # between which stretches are looked for; of longer series every n-th


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A change of level.

    Attributes:
        first: Position of the stretch before in the series, half-open ...
        at: ... where the new level begins ...
        end: ... and where it ends: at the next change, or with the series.
        before: Median before.
        after: Median after.
        low, high: 95 % interval of after / before - 1, from drawing jobs of both sides again.
    """

    first: int
    at: int
    end: int
    before: float
    after: float
    low: float
    high: float


class Levels(NamedTuple):
    """How unlikely by chance a change must be, so that all series together give a false alarm at most so often.

    Half of `ALARM` goes to cuts in two, half to stretches in between, each divided by how many there are.
    """

    cut: float
    stretch: float


def levels(counts: Iterable[int]) -> Levels:
    """For series of so many jobs each."""
    cuts = stretches = 0
    for count in counts:
        cuts += max(count - 2 * LEAST_JOBS + 1, 0)
        inner = max(count - 2 * LEAST_JOBS - LEAST_STRETCH + 1, 0)
        stretches += inner * (inner + 1) // 2
    return Levels(ALARM / 2 / max(cuts, 1), ALARM / 2 / max(stretches, 1))


def changes(values: Floats, level: Levels) -> list[LevelChange]:
    """The changes of a series.

    Args:
        values: Of jobs in the order of time, positive; shape (jobs,).
        level: Of all series that are looked at together.
    """
    log = np.log(values)
    cuts = [0, *_cuts(log, 0, level), log.size]
    judged = []
    for first, at, end in zip(cuts, cuts[1:], cuts[2:], strict=False):
        before, after = values[first:at], values[at:end]
        old, now = float(np.median(before)), float(np.median(after))
        ratio = now / old - 1
        if abs(ratio) < LEAST_CHANGE:
            continue
        generator = np.random.default_rng(SEED)
        drawn = [_drawn_medians(side, generator) for side in (before, after)]
        low, high = interval(drawn[1] / drawn[0] - 1, ratio, before.size + after.size - 2)
        if low > 0 or high < 0:
            judged.append(LevelChange(first, at, end, old, now, max(low, -1.0), high))
    return judged


def _drawn_medians(values: Floats, generator: np.random.Generator) -> Floats:
    """Medians of samples drawn again from values, as many as values each; shape (DRAWS,).

    What stands in the middle of uniform numbers has a beta distribution, so that no sample has to be drawn.
    """
    ordered, count = np.sort(values), values.size
    middle = (count + 1) // 2
    place = generator.beta(middle, count + 1 - middle, DRAWS)
    drawn = ordered[np.minimum((place * count).astype(np.int64), count - 1)]
    if count % 2:
        return drawn
    place += (1 - place) * generator.beta(1, count - middle, DRAWS)
    return (drawn + ordered[np.minimum((place * count).astype(np.int64), count - 1)]) / 2


def _cuts(log: Floats, offset: int, level: Levels) -> Iterator[int]:
    """Positions at which the level of a series changes, in order: the clearest first, then in the parts around it."""
    inside: list[int] = []
    if (at := _clearest(log)) is not None and chance(log[:at], log[at:]) <= level.cut:
        inside = [at]
    elif (stretch := _stretch(log)) is not None:
        within = slice(*stretch)
        if chance(np.delete(log, within), log[within]) <= level.stretch:
            inside = [*stretch]
    if inside:
        bounds = [0, *inside, log.size]
        for start, end in pairwise(bounds):
            if start:
                yield offset + start
            yield from _cuts(log[start:end], offset + start, level)


def _clearest(log: Floats) -> int | None:
    """Where to cut a series so that its values are nearest to the medians of both parts; None where nothing changes.

    Whether anything does is first looked at by ranks, which takes no time.
    """
    count = log.size
    cuts = np.arange(LEAST_JOBS, count - LEAST_JOBS + 1)
    if not cuts.size:
        return None
    shift = np.abs(_ranks(log)[cuts]) / np.sqrt(cuts * (count - cuts))
    at = int(cuts[np.argmax(shift)])
    return _nearest(log, cuts) if chance(log[:at], log[at:]) <= _LIKELY else None


def _stretch(log: Floats) -> tuple[int, int] | None:
    """The stretch in the middle of a series whose ranks differ most from the others'; None where nothing changes."""
    count = log.size
    first, last = LEAST_JOBS, count - LEAST_JOBS
    if last - first < LEAST_STRETCH:
        return None
    bounds = np.arange(first, last + 1, -(-count // _MOST_BOUNDS))
    size = (bounds[None, :] - bounds[:, None]).astype(np.float64)
    ranks = _ranks(log)[bounds]
    usable = size >= LEAST_STRETCH
    weight = np.sqrt(np.where(usable, size * (count - size), 1))
    shift = np.where(usable, np.abs(ranks[None, :] - ranks[:, None]) / weight, -1.0)
    start, end = (int(bounds[at]) for at in np.unravel_index(np.argmax(shift), shift.shape))
    if end - start < LEAST_STRETCH or chance(np.delete(log, slice(start, end)), log[start:end]) > _LIKELY:
        return None
    start = _nearest(log[:end], np.arange(LEAST_JOBS, end - LEAST_STRETCH + 1))
    return start, start + _nearest(log[start:], np.arange(LEAST_STRETCH, count - start - LEAST_JOBS + 1))


def _ranks(log: Floats) -> Floats:
    """Summed ranks of the values before each position, less what they would be without any order; shape (jobs + 1,)."""
    rank = np.empty(log.size)
    rank[np.argsort(log, kind="stable")] = np.arange(1, log.size + 1)
    return np.concatenate([[0.0], np.cumsum(rank - (log.size + 1) / 2)])


def _nearest(log: Floats, cuts: Ints) -> int:
    """The cut with the least sum of distances to the medians of both parts."""
    return int(cuts[np.argmin(_scatter(log)[cuts] + _scatter(log[::-1])[log.size - cuts])])


def _scatter(log: Floats) -> Floats:
    """Sum of the distances of the first values to their median, for each number of them; shape (jobs + 1,)."""
    ordered: list[float] = []
    total = lower = 0.0  # of all values, and of the lower half of them, rounded down
    sums = [0.0]
    for value in log.tolist():
        half = len(ordered) // 2
        at = bisect_right(ordered, value)
        ordered.insert(at, value)
        total += value
        grows = len(ordered) // 2 > half
        if at < half:
            lower += value if grows else value - ordered[half]
        elif grows:
            lower += ordered[half]
        middle = ordered[half] if not grows else 0.0
        sums.append(total - middle - 2 * lower)
    return np.array(sums)


def chance(before: Floats, after: Floats) -> float:
    """How likely sides of one series are to differ as much as these do: Student's test of their logarithms.

    The smaller one of the differences of means and of medians counts, so that one odd job is no change. The tail is by
    Wallace's approximation (1959), good to 0.1 % where it matters.
    """
    freedom = before.size + after.size - 2
    squares = float(((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum())
    apart = min(abs(float(after.mean() - before.mean())), abs(float(np.median(after) - np.median(before))))
    error = math.sqrt(squares / freedom * (1 / before.size + 1 / after.size))
    if error <= apart * 1e-12:
        return 0.0 if apart > 0 else 1.0
    t = apart / error
    normal = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.erfc(normal / math.sqrt(2))
