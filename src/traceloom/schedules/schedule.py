"""A schedule: the messages with which ranks carry out one collective, round by round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from traceloom.array_types import Ints
from traceloom.errors import UsageError, broken


@dataclass(frozen=True, eq=False, slots=True)
class Round:
    """Messages that ranks send in one go, in the order in which each rank sends its own.

    Attributes:
        source: Who sends, as a position in the group; shape (messages,).
        target: Who receives.
        bytes: How much.
        reduced: Bytes that the target reduces once the message is there; 0 where it only stores them.
    """

    source: Ints
    target: Ints
    bytes: Ints
    reduced: Ints


@dataclass(frozen=True, eq=False, slots=True)
class Schedule:
    """The messages of one collective.

    A rank goes through the rounds in order. It sends its messages of a round at once, as soon as all messages that
    earlier rounds sent it have arrived and are reduced; it does not wait for rounds in which it has no part, nor for
    other ranks. Equal rounds are one object, so that a schedule stays small.

    Attributes:
        ranks: How many ranks take part: positions 0 to ranks - 1 of the group.
        rounds: The rounds.
    """

    ranks: int
    rounds: tuple[Round, ...]

    @property
    def messages(self) -> int:
        """How many messages there are."""
        return sum(len(part.source) for part in self.rounds)

    def sent_bytes(self) -> Ints:
        """Bytes that each rank sends; shape (ranks,)."""
        sent = np.zeros(self.ranks, np.int64)
        for part in self.rounds:
            np.add.at(sent, part.source, part.bytes)
        return sent

    def check(self) -> None:
        """Raise InvariantError where a message leaves the group, goes nowhere, or reduces more than it brings."""
        for part in self.rounds:
            ends = np.concatenate([part.source, part.target])
            if ends.size and (ends.min() < 0 or ends.max() >= self.ranks):
                raise broken("schedule", f"a message leaves the group of {self.ranks} ranks")
            if (part.source == part.target).any():
                raise broken("schedule", "a rank sends itself a message")
            if (part.bytes < 0).any() or (part.reduced < 0).any():
                raise broken("schedule", "a message has less than no bytes")


def round_of(source: ArrayLike, target: ArrayLike, size: ArrayLike, *, reduce: bool = False) -> Round:
    """A round whose messages are all reduced, or none of them; scalars hold for all messages."""
    ends = np.broadcast_arrays(np.asarray(source, np.int64), np.asarray(target, np.int64), np.asarray(size, np.int64))
    first, second, sizes = (np.atleast_1d(values) for values in ends)
    return Round(first, second, sizes, sizes if reduce else np.broadcast_to(np.int64(0), sizes.shape))


def pieces(size: int, count: int) -> Ints:
    """`size` bytes in `count` pieces that differ by one byte at most and add up to it; shape (count,)."""
    return np.diff(size * np.arange(count + 1, dtype=object) // count).astype(np.int64)


def side_by_side(parts: Sequence[tuple[Schedule, Ints]]) -> tuple[Round, ...]:
    """Rounds of schedules that run at the same time in groups of their own.

    Args:
        parts: Each schedule, and the positions that its positions have in the whole.
    """
    rounds: dict[tuple[int, ...], Round] = {}  # equal rounds of all parts stay one
    together = []
    for k in range(max(len(schedule.rounds) for schedule, _ in parts)):
        own = [(s.rounds[k], positions) for s, positions in parts if k < len(s.rounds)]
        key = tuple(id(part) for part, _ in own)
        if key not in rounds:
            rounds[key] = merged(
                Round(positions[part.source], positions[part.target], part.bytes, part.reduced)
                for part, positions in own
            )
        together.append(rounds[key])
    return tuple(together)


def merged(parts: Iterable[Round]) -> Round:
    """One round of the messages of several."""
    several = list(parts)
    return Round(
        np.concatenate([part.source for part in several]),
        np.concatenate([part.target for part in several]),
        np.concatenate([part.bytes for part in several]),
        np.concatenate([part.reduced for part in several]),
    )


def power_of_two(ranks: int, algorithm: str) -> int:
    """The logarithm of a number of ranks.

    Raises:
        UsageError: `no-such-schedule`: it is no power of two.
    """
    if ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        raise UsageError(
            f"{algorithm} needs a power of two ranks, not {ranks}",
            slug="no-such-schedule",
            hint=f"take {below} or {2 * below} ranks, or another algorithm",
        )
    return ranks.bit_length() - 1
