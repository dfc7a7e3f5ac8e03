"""Pictures whose axes are both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence


class LogPlane:
    """Where values lie on a picture; whole decades are shown.

    Args:
        x: All values to the right, above 0.
        y: All values upwards.
        edges: Of the plane in the picture: left, right, top, bottom.
    """

    def __init__(self, x: Sequence[float], y: Sequence[float], edges: tuple[float, float, float, float]) -> None:
        self._left, self._right, self._top, self._bottom = edges
        self.x_low, self.x_high = _decades(x)
        self.y_low, self.y_high = _decades(y)

    def x(self, value: float) -> float:
        """How far to the right a value lies."""
        return self._left + (self._right - self._left) * (math.log10(value) - self.x_low) / (self.x_high - self.x_low)

    def y(self, value: float) -> float:
        """How far down a value lies."""
        return self._top + (self._bottom - self._top) * (self.y_high - math.log10(value)) / (self.y_high - self.y_low)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)
