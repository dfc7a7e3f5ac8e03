"""Chance of made jobs: drawn when a job is made, so that a run with a change meets the same."""

from __future__ import annotations

import random


class Chance:
    """Draws durations around medians.

    Args:
        seed: Of the job.
        number: Of who draws: a rank.
        spread: Width of the distribution (of the logarithm).
    """

    def __init__(self, seed: int, number: int, spread: float) -> None:
        self._random = random.Random(seed * 100_003 + number)
        self._spread = spread

    def draw(self, us: float, spread: float | None = None) -> int:
        """Nanoseconds around a median of microseconds."""
        return round(
            us * 1000 * self._random.lognormvariate(0, self._spread if spread is None else spread)
        )


class Shared:
    """What all ranks must agree about: how long each communication takes."""

    def __init__(self, seed: int, spread: float) -> None:
        self._chance = Chance(seed, 10_000, spread)
        self._drawn: dict[tuple[str, int], int] = {}

    def transfer(self, group: str, sequence: int, us: float) -> int:
        """Of one communication, drawn when the first rank asks."""
        if (group, sequence) not in self._drawn:
            self._drawn[group, sequence] = self._chance.draw(us)
        return self._drawn[group, sequence]
