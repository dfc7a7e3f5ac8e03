"""Lines through times of transfers: latency and time per byte, and the ranges of sizes that one line covers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from traceloom.array_types import Floats, Ints

LATENCY_BOUND = 1 << 16
"""Bytes: of a single size below this the latency is fitted, of one above it the bandwidth."""

APART = 2.0
"""Sizes within this factor of each other are one: a line through them would tell no latency."""

FITS = 0.05
"""A line covers sizes whose usual time it misses by no more than this part, or by what their scatter explains."""

FEWEST_SIZES = 3
"""Distinct sizes of a range with a line of its own."""

_MOST_SIZES = 64
_FLOOR = 0.02  # of the time: below this a smaller deviation makes no size count more
_HUBER = 1.5  # deviations beyond which a size counts less
_TURNS = 20
_LIMIT = 5.0  # deviations that one size adds to those of a line at most
_EXCEPTIONS = 0.2  # of the sizes: so many a line may miss


class LinearFit(NamedTuple):
    """Time = alpha_ns + bytes x ns_per_byte.

    Attributes:
        form: `line`; `latency`: bytes make no difference, or are too few; `bandwidth`: one size, or no latency to see.
        alpha_ns: At no bytes.
        ns_per_byte: Of each byte on the bus.
    """

    form: str
    alpha_ns: float
    ns_per_byte: float

    def times(self, size: Floats) -> Floats:
        """Fitted times of so many bytes, ns; same shape."""
        return self.alpha_ns + size * self.ns_per_byte


class _Sizes(NamedTuple):
    """Samples by size, ascending; shape (sizes,) each: size, mean of the middle half of times, its relative error."""

    size: Floats
    time: Floats
    deviation: Floats


def fits(size: Floats, time: Floats, error: Floats | None = None) -> Iterator[tuple[Ints, LinearFit]]:
    """Fit as many lines as the times need, each to a range of sizes; the ranges follow each other.

    Robust: of each size only the middle half of its times counts, and a size far off its line counts less.

    Args:
        size: Bytes of each sample, shape (samples,); at least one.
        time: Its time, above 0, ns.
        error: By which part of it each time may be wrong, where that is known better than the scatter of times tells.

    Yields:
        The samples of a range, as places in the arguments, and their line.
    """
    number = np.unique(size, return_inverse=True)[1]
    if number.size and number.max() >= _MOST_SIZES:  # of uneven sizes those within a few per cent are one
        number = np.unique(np.rint(np.log2(np.maximum(size, 1)) * 8), return_inverse=True)[1]
    count = np.bincount(number)
    order = np.lexsort((time, number))
    turn = np.arange(number.size) - np.repeat(np.cumsum(count) - count, count)  # within its size, by time
    quarter = np.repeat(count // 4, count)
    inner = order[(turn >= quarter) & (turn < np.repeat(count, count) - quarter)]
    usual = np.bincount(number[inner], time[inner]) / np.bincount(number[inner])
    off = np.abs(time / usual[number] - 1)
    several = count[number] > 1
    # medians of few deviations are too small, since their centre was fitted to them
    scatter = (
        1.4826 * float(np.median((off * count[number] / (count[number] - 0.8))[several])) if several.any() else 0.0
    )
    deviation = 1.1 * scatter / np.sqrt(count) if error is None else np.bincount(number, error) / count
    sizes = _Sizes(np.bincount(number, size) / count, usual, np.maximum(deviation, _FLOOR))
    for low, high in _ranges(sizes, 0, count.size):
        yield np.flatnonzero((number >= low) & (number < high)), _line(sizes, low, high)


def _ranges(sizes: _Sizes, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Ranges of sizes that one line each covers."""
    cost, covered = _cost(sizes, low, high)
    breaks = range(low + FEWEST_SIZES, high - FEWEST_SIZES + 1)
    if not covered and breaks:
        costs = [_cost(sizes, low, at)[0] + _cost(sizes, at, high)[0] for at in breaks]
        best = int(np.argmin(costs))
        if costs[best] < cost / 2:  # else no break is better than chance
            yield from _ranges(sizes, low, breaks[best])
            yield from _ranges(sizes, breaks[best], high)
            return
    yield low, high


def _cost(sizes: _Sizes, low: int, high: int) -> tuple[float, bool]:
    """Squared deviations of some sizes from their line, single ones limited, and whether it covers them."""
    part = _Sizes(*(values[low:high] for values in sizes))
    missed = np.abs(part.time / _line(sizes, low, high).times(part.size) - 1)
    far = missed > np.maximum(FITS, 3 * part.deviation)
    return float((np.minimum(missed / part.deviation, _LIMIT) ** 2).sum()), bool(far.mean() <= _EXCEPTIONS)


def _line(sizes: _Sizes, low: int, high: int) -> LinearFit:
    """The line through some sizes, by least squares of the relative deviations; latency and time per byte are >= 0."""
    size, time, deviation = (values[low:high] for values in sizes)
    if size[-1] < APART * size[0] or not size[-1]:
        usual = float(np.median(time))
        if size[-1] < LATENCY_BOUND:
            return LinearFit("latency", usual, 0.0)
        return LinearFit("bandwidth", 0.0, float(np.median(time / size)))
    constant, linear = 1 / time, size / time
    base = 1 / deviation**2
    weight = base
    alpha = slope = 0.0
    for _ in range(_TURNS):
        a, b, c = ((weight * product).sum() for product in (constant**2, constant * linear, linear**2))
        u, v = ((weight * column).sum() for column in (constant, linear))
        determinant = a * c - b * b
        alpha, slope = (u * c - v * b) / determinant, (v * a - u * b) / determinant
        if alpha < 0:
            alpha, slope = 0.0, v / c
        elif slope < 0:
            alpha, slope = u / a, 0.0
        off = np.abs(constant * alpha + linear * slope - 1) / deviation
        weight = base * np.minimum(1.0, _HUBER / np.maximum(off, 1e-12))
    form = "line" if alpha > 0 and slope > 0 else "latency" if slope <= 0 else "bandwidth"
    return LinearFit(form, float(alpha), float(slope))
