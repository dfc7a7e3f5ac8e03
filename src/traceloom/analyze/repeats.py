"""Repeated sequences in an array of numbers, found in n log n time.

A *maximal repeat* is a sequence with at least two occurrences that cannot be extended on either
side without losing one. All of them follow from the sorted suffixes: by prefix doubling the
suffixes are sorted, then their common prefixes and the intervals of equal prefixes are computed,
all with array operations and no step per element.
"""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.trace.array_types import Bools, Ints

_MAX_CANDIDATES = 200  # repeats that are evaluated in detail, by their approximate coverage


class Repeats(Struct, frozen=True):
    """Maximal repeats; arrays of shape (repeats,).

    Attributes:
        order: Positions of the suffixes, sorted; shape (n,).
        low: First index in `order` of the occurrences of each repeat.
        count: Number of occurrences; they may overlap.
        length: Length.
    """

    order: Ints
    low: Ints
    count: Ints
    length: Ints

    def occurrences(self, repeat: int) -> Ints:
        low = int(self.low[repeat])
        return np.sort(self.order[low : low + int(self.count[repeat])])


def find_maximal_repeats(codes: Ints, shortest: int, longest: int) -> Repeats:
    """Returns all maximal repeats of an array of numbers with `shortest <= length <= longest`.

    Args:
        codes: Numbers >= 0; negative numbers are borders: no repeat crosses one, and no two borders
            are equal.
        shortest: At least 1.
        longest: At least `shortest`.
    """
    size = codes.size
    nothing = np.zeros(0, dtype=np.int64)
    if size < 2:
        return Repeats(np.arange(size), nothing, nothing, nothing)
    numbers = codes.astype(np.int64)
    border = np.flatnonzero(numbers < 0)
    numbers[border] = numbers.max(initial=0) + 1 + np.arange(border.size)
    # Ranks of the sequences of length 1, 2, 4, ... from every position, until all differ.
    levels = [np.unique(numbers, return_inverse=True)[1].astype(np.int64)]
    reach = 1
    while reach < size and int(levels[-1].max()) < size - 1:
        rank, following = levels[-1], np.zeros(size, dtype=np.int64)
        following[:-reach] = rank[reach:] + 1
        levels.append(
            np.unique(rank * (size + 1) + following, return_inverse=True)[1].astype(np.int64)
        )
        reach *= 2
    order = np.argsort(levels[-1], kind="stable")
    # Length of the common prefix of each suffix with the one sorted before it; shape (n,), 0 for
    # the first.
    suffix, following = order[:-1].copy(), order[1:].copy()
    for level in range(len(levels) - 1, -1, -1):
        in_text = (suffix < size) & (following < size)
        same = np.zeros(suffix.size, dtype=np.bool_)
        same[in_text] = levels[level][suffix[in_text]] == levels[level][following[in_text]]
        suffix[same] += 1 << level
        following[same] += 1 << level
    common = np.concatenate([[0], suffix - order[:-1]])
    low, high, length = _find_intervals(common, shortest, longest)
    before = np.where(order > 0, numbers[order - 1], -1)
    changes = np.concatenate([[0], np.cumsum(before[1:] != before[:-1])])
    left_differs = changes[high] > changes[low]  # not always the same number before it
    at_border = (order[low] == 0) | np.isin(before[low], numbers[border])
    is_maximal = left_differs | at_border
    return Repeats(order, low[is_maximal], (high - low + 1)[is_maximal], length[is_maximal])


def _find_intervals(common: Ints, shortest: int, longest: int) -> tuple[Ints, Ints, Ints]:
    """Returns intervals in the order that share a prefix which no neighbour shares: first, last,
    its length.
    """
    rows = np.flatnonzero((common >= shortest) & (common <= longest))
    if not rows.size:
        return rows, rows, rows
    length = common[rows]
    first, last = rows.copy(), rows.copy()
    tables = [common]
    while (1 << len(tables)) <= common.size:
        half = 1 << (len(tables) - 1)
        tables.append(np.minimum(tables[-1][:-half], tables[-1][half:]))
    for level in range(len(tables) - 1, -1, -1):
        width, table = 1 << level, tables[level]
        # While a block of this width next to the interval shares the prefix, include it.
        start = first - width
        can_extend = start >= 1
        can_extend[can_extend] = table[start[can_extend]] >= length[can_extend]
        first[can_extend] -= width
        start = last + 1
        can_extend = start + width <= common.size
        can_extend[can_extend] = table[start[can_extend]] >= length[can_extend]
        last[can_extend] += width
    _, unique = np.unique(first * (common.size + 1) + last, return_index=True)
    return first[unique] - 1, last[unique], length[unique]


def drop_overlapping(start: Ints, length: int) -> Ints:
    """Drops each occurrence, from the first on, that overlaps the last kept one."""
    if start.size < 2 or int((start[1:] - start[:-1]).min()) >= length:
        return start
    successor = np.append(np.searchsorted(start, start + length), start.size)
    retained = np.zeros(1, dtype=np.int64)
    # Each round doubles the number of kept ones: those of the rounds before, then theirs
    while retained[-1] < start.size:
        retained = np.concatenate([retained, successor[retained]])
        successor = successor[successor]
    return start[retained[retained < start.size]]


def is_periodic(codes: Ints) -> bool:
    """Whether a sequence is a shorter one, two times or more (the last time possibly in part)."""
    size = codes.size
    return any(
        (codes[period:] == codes[: size - period]).all() for period in range(1, size // 2 + 1)
    )


def select_repeats(
    codes: Ints, repeats: Repeats, weight: Ints, min_count: int, limit: int, *, shortest: int = 2
) -> list[tuple[Ints, int]]:
    """Selects the most informative repeats, none of which only repeats others.

    They are taken in order of the weight they cover, less the share of one of each (so that a long
    sequence comes before a frequent pair in it; of equals the shorter first), as long as they occur
    `min_count` times without overlap, are not periodic, and at least half of what they cover is
    new. A repeat whose occurrences overlap (the last kernels of a layer are the first of the next)
    is cut to the distance of its occurrences, where it then covers more.

    Args:
        codes: The array of numbers.
        repeats: Its repeats.
        weight: Weight of each number (time), shape (n,).
        min_count: Minimum number of occurrences that do not overlap.
        limit: Maximum number of repeats.
        shortest: Minimum length of one that is cut.

    Returns:
        Starts of the occurrences, ascending and without overlap, and the length of each repeat.
    """
    sums = np.concatenate([[0], np.cumsum(weight)])
    first = repeats.order[repeats.low]
    often = np.minimum(repeats.count, np.maximum(codes.size // np.maximum(repeats.length, 1), 1))
    guess = (sums[first + repeats.length] - sums[first]) * often * (1 - 1 / repeats.length)
    order = np.lexsort((repeats.length, -guess))
    order = order[repeats.count[order] >= min_count][:_MAX_CANDIDATES]
    candidates = []
    for index in order.tolist():
        start, length = repeats.occurrences(index), int(repeats.length[index])
        starts = drop_overlapping(start, length)
        # They overlap: the whole length, or cut to their distance, whichever covers more
        if starts.size < start.size:
            distance = int(np.diff(start).min())
            short = drop_overlapping(start, distance)
            if distance >= shortest and short.size * distance > starts.size * length:
                starts, length = short, distance
        candidates.append((starts, length))
    covers = [
        int((sums[start + length] - sums[start]).sum()) * (length - 1) / length
        for start, length in candidates
    ]
    used: Bools = np.zeros(codes.size, dtype=np.bool_)
    selected: list[tuple[Ints, int]] = []
    for index in sorted(
        range(len(candidates)), key=lambda index: (-covers[index], candidates[index][1])
    ):
        start, length = candidates[index]
        if start.size < min_count or is_periodic(codes[start[0] : start[0] + length]):
            continue
        covered = (start[:, None] + np.arange(length)).ravel()
        if 2 * int(used[covered].sum()) > covered.size:
            continue
        used[covered] = True
        selected.append((start, length))
        if len(selected) == limit:
            break
    return selected


_HASH_FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


class StretchNumbers:
    """Hashes of sub-sequences of an array of numbers: equal ones have equal hashes, others almost
    surely not.
    """

    def __init__(self, codes: Ints) -> None:
        size = codes.size + 1
        with np.errstate(over="ignore"):  # all is modulo 2^64
            power, back = np.full((2, size), _HASH_FACTOR, dtype=np.uint64)
            back[:] = np.uint64(pow(_HASH_FACTOR, -1, 1 << 64))
            power[0] = back[0] = 1
            mixed = (codes.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
            mixed ^= mixed >> np.uint64(32)
            sums = np.cumsum(mixed * np.cumprod(power)[:-1], dtype=np.uint64)
            self._back = np.cumprod(back)
        self._sums = np.append(np.zeros(1, dtype=np.uint64), sums)

    def number(self, start: Ints, length: Ints | int) -> NDArray[np.uint64]:
        """Returns the hash of each sub-sequence, independent of its position and of its
        surroundings.
        """
        with np.errstate(over="ignore"):
            numbers: NDArray[np.uint64] = (
                self._sums[start + length] - self._sums[start]
            ) * self._back[start]
        return numbers


def find_occurrences(pattern: Ints, codes: Ints) -> Ints:
    """Returns where the whole of one array occurs in another, ascending, in linear time."""
    last = codes.size - pattern.size
    if not pattern.size or last < 0:
        return np.zeros(0, dtype=np.int64)
    number = StretchNumbers(pattern).number(np.zeros(1, dtype=np.int64), pattern.size)
    start = np.arange(last + 1)
    matches: Ints = start[StretchNumbers(codes).number(start, pattern.size) == number]
    same = not matches.size or bool(
        (codes[matches[0] : matches[0] + pattern.size] == pattern).all()
    )
    return matches if same else matches[:0]
