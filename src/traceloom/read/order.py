"""Rows in time order: the permutation of the file's complete events, and arrays in the new order."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Order(Struct, frozen=True):
    """The permutation that sorts events by (start, longer first, place in the file).

    Attributes:
        rows: `column[rows]` is in time order.
        event: Event number of each row of the file.
    """

    rows: Ints
    event: Ints


def time_order(start: Ints, duration: Ints) -> Order:
    """Sort by start; only where starts are equal are durations looked at."""
    rows = np.argsort(start, kind="stable")
    sorted_start = start[rows]
    equal = sorted_start[1:] == sorted_start[:-1]
    if equal.any():
        tied = np.zeros(len(rows), dtype=np.bool_, like=start)
        tied[1:] |= equal
        tied[:-1] |= equal
        places = np.flatnonzero(tied)
        among = rows[places]
        rows[places] = among[np.lexsort((-duration[among], start[among]))]
    event = np.empty(len(rows), dtype=np.int64, like=start)
    event[rows] = np.arange(len(rows), like=start)
    return Order(rows, event)
