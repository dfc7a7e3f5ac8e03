"""How often something is measured until its median is known."""

from __future__ import annotations

import math

import numpy as np

from traceloom.array_types import Floats

FEWEST = 8
"""Times before anything is known of a median."""
MOST = 400
LONGEST_NS = 3e8
"""Of all times of one thing together."""
_SIGMAS = 1.96  # 95 of 100 intervals hold the median


def half_width(times: Floats) -> float:
    """Half the width of the interval that holds the median (95 %), as a part of it; from `FEWEST` times on.

    The interval ends at times of the sample itself, so it assumes nothing of how they scatter.

    Example:
        >>> half_width(np.array([9.0, 10, 10, 10, 10, 10, 10, 10, 10, 11]))
        0.0
    """
    ordered = np.sort(times)
    inside = math.floor(times.size / 2 - _SIGMAS * math.sqrt(times.size) / 2)
    low, high = ordered[max(inside, 0)], ordered[-1 - max(inside, 0)]
    return float((high - low) / 2 / np.median(times))


def enough(times: Floats, precision: float) -> bool:
    """Whether the median is known, or no more time is to be spent on it. Times of all ranks: all decide alike."""
    if times.size < FEWEST:
        return False
    return times.size >= MOST or times.sum() >= LONGEST_NS or half_width(times) <= precision
