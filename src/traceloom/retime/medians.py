"""Medians of many classes at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def medians(of: NDArray[np.signedinteger[Any]], values: Ints, classes: int) -> tuple[Ints, Ints]:
    """The lower median of the values of each class, and how many there are; 0 for a class without values.

    Args:
        of: Class of each value, 0 <= class < `classes`; shape (values,).
        values: Anything; shape (values,).
        classes: Number of classes.

    Returns:
        Medians and counts; shape (classes,).
    """
    order = np.lexsort((values, of))
    count = np.bincount(of, minlength=classes)
    first = np.cumsum(count) - count
    median = np.zeros(classes, dtype=np.int64)
    nonempty = count > 0
    median[nonempty] = values[order[(first + (count - 1) // 2)[nonempty]]]
    return median, count.astype(np.int64)
