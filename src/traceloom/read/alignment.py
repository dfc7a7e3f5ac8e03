"""Where one sequence of names occurs in another, and which elements of two similar sequences are the same.

Sequences are arrays of tokens: uint64, well mixed (see `mixed`), equal where the elements are. Everything is done on
whole arrays with hashes of stretches, so that the cost grows as n log n however often names repeat.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Tokens = NDArray[np.uint64]

_BASE = 0x9E3779B97F4A7C15 | 1
_INVERSE = pow(_BASE, -1, 1 << 64)
_STRETCHES = (64, 16, 4, 1)  # lengths of stretches that must be unique to be trusted, longest first
_ROUNDS = 8  # of the shortest, at most
_MOST_CELLS = 1 << 22  # of the tables for gaps in which everything repeats; larger gaps stay open


def mixed(values: NDArray[Any], salt: int = 0) -> Tokens:
    """Small numbers as tokens: splitmix64, so that hashes of stretches do not collide by their regularity."""
    out = values.astype(np.uint64) + np.uint64((salt * _BASE + 0x632BE59BD9B4E019) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        out ^= out >> np.uint64(shift)
        out *= np.uint64(factor)
    out ^= out >> np.uint64(31)
    return out


class Hashes(Struct, frozen=True):
    """Hashes of all stretches of a sequence, in constant time each.

    Attributes:
        tokens: The sequence, shape (n,).
        sums: Sum of the tokens before each place, each times a power of the base, shape (n + 1,), modulo 2^64.
        inverse: Powers of the base's inverse, shape (n + 1,): they make stretches comparable wherever they begin.
    """

    tokens: Tokens
    sums: Tokens
    inverse: Tokens

    def of(self, start: Ints, length: Ints | int) -> Tokens:
        """Hash of the stretch of each start; starts and lengths must lie inside."""
        between: Tokens = self.sums[start + length] - self.sums[start]
        return between * self.inverse[start]


def hashes(tokens: Tokens) -> Hashes:
    """Prepare a sequence for comparing its stretches."""
    powers = np.full(tokens.size, _BASE, dtype=np.uint64)
    powers[:1] = 1
    inverse = np.full(tokens.size + 1, _INVERSE, dtype=np.uint64)
    inverse[:1] = 1
    sums = np.zeros(tokens.size + 1, dtype=np.uint64)
    np.cumsum(tokens * np.cumprod(powers, dtype=np.uint64), dtype=np.uint64, out=sums[1:])
    return Hashes(tokens, sums, np.cumprod(inverse, dtype=np.uint64))


def occurrences(pattern: Hashes, text: Hashes) -> Ints:
    """All positions where the whole pattern occurs in the text, ascending."""
    length, last = pattern.tokens.size, text.tokens.size - pattern.tokens.size
    if last < 0 or not length:
        return np.empty(0, dtype=np.int64)
    pattern_hash = pattern.of(np.zeros(1, dtype=np.int64), length)[0]
    places: Ints = np.flatnonzero(text.tokens[: last + 1] == pattern.tokens[0])
    places = places[text.of(places, length) == pattern_hash]
    if places.size and not np.array_equal(text.tokens[places[0] : places[0] + length], pattern.tokens):
        equal = [np.array_equal(text.tokens[at : at + length], pattern.tokens) for at in places]  # pragma: no cover
        places = places[equal]  # pragma: no cover - hashes that collide
    return places


class SimilarStretches(Struct, frozen=True):
    """Where something like a pattern stands in a text.

    Attributes:
        start: About where it begins, ascending; may lie a little outside of the text.
        votes: How many of its stretches speak for the place.
        slack: How far off the places may be.
    """

    start: Ints
    votes: Ints
    slack: int


def similar(pattern: Hashes, text: Hashes) -> SimilarStretches:
    """Places where most stretches of the pattern stand in the text at about the right distance from one another."""
    slack = max(4, pattern.tokens.size // 8)
    shift = _shifts(pattern, text, stretch_of(pattern.tokens.size))
    if not shift.size:
        return SimilarStretches(shift, shift, slack)
    shift.sort()
    votes = np.searchsorted(shift, shift + slack, side="right") - np.arange(shift.size)
    good = np.flatnonzero(votes >= 0.8 * votes.max())
    starts, most = [], []
    at = 0
    while at < good.size:
        near = int(np.searchsorted(shift[good], shift[good[at]] + max(slack, pattern.tokens.size // 2), side="right"))
        best = good[at:near][int(np.argmax(votes[good[at:near]]))]
        values, counts = np.unique(shift[best : best + votes[best]], return_counts=True)
        # Of places that as many speak for the one that leaves least of the pattern outside.
        room = text.tokens.size - pattern.tokens.size
        outside = np.maximum(-values, 0) + np.maximum(values - max(room, 0), 0)
        outside[counts < 0.9 * counts.max()] = pattern.tokens.size + text.tokens.size
        starts.append(int(values[np.argmin(outside)]))
        most.append(int(votes[best]))
        at = max(near, at + 1)
    return SimilarStretches(np.array(starts, dtype=np.int64), np.array(most, dtype=np.int64), slack)


def _shifts(pattern: Hashes, text: Hashes, stretch: int) -> Ints:
    """Offsets from pattern to text at which stretches match; the rarest stretches first, bounded in number."""
    if min(pattern.tokens.size, text.tokens.size) < stretch:
        return np.empty(0, dtype=np.int64)
    pattern_hashes = pattern.of(np.arange(pattern.tokens.size - stretch + 1), stretch)
    text_hashes = text.of(np.arange(text.tokens.size - stretch + 1), stretch)
    order = np.argsort(text_hashes, kind="stable")
    text_hashes = text_hashes[order]
    low, high = (
        np.searchsorted(text_hashes, pattern_hashes, side="left"),
        np.searchsorted(text_hashes, pattern_hashes, side="right"),
    )
    # Equally rare ones in random order, so that no part of the pattern is preferred.
    rare = np.lexsort((mixed(np.arange(pattern_hashes.size)), high - low))
    rare = rare[(high - low)[rare] > 0]
    budget = 4096 + 8 * (pattern.tokens.size + text.tokens.size)
    rare = rare[np.cumsum((high - low)[rare]) <= budget]
    starts = order[ranges(low[rare], (high - low)[rare])]
    return starts - np.repeat(rare, (high - low)[rare])


def ranges(start: Ints, length: Ints) -> Ints:
    """The numbers start, start + 1, ... of each range, one after the other."""
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(int(length.sum()))


# -- two similar sequences ------------------------------------------------------------------------------------------


def align(first: Hashes, second: Hashes, shift: int | None = None) -> tuple[Ints, Ints]:
    """Indices of equal elements in both, each strictly ascending; nearly as many as possible.

    Stretches that occur once in both, between existing matches, are anchors; the longest chain of anchors in the
    same order is kept, and everything equal beside them is added; then shorter stretches between them.

    Args:
        first: The first sequence.
        second: The second.
        shift: Offset of most of the first in the second, where that is known; among repetitions only this identifies
            the right ones.
    """
    in_first = in_second = np.empty(0, dtype=np.int64)
    if shift is not None:
        in_first = _along(first, second, shift)
        in_second = in_first + shift
    # What is equal at the ends by chance must not come before anchors inside.
    for outer in (False, True):
        if outer:
            in_first, in_second = _filled(first, second, in_first, in_second, outer=True)
        for stretch in (*_STRETCHES, *([1] * _ROUNDS)):
            left, right = _anchors(first, second, in_first, in_second, stretch)
            if left.size:
                in_first, in_second = _merged(in_first, in_second, left, right)
                in_first, in_second = _filled(first, second, in_first, in_second, outer=outer)
            elif stretch == 1:
                break
    return _merged(in_first, in_second, *_repetitions(first, second, in_first, in_second))


def _along(first: Hashes, second: Hashes, shift: int) -> Ints:
    """Places of the first sequence where stretches of both are equal at exactly this shift."""
    low, high = max(0, -shift), min(first.tokens.size, second.tokens.size - shift)
    if high <= low:
        return np.empty(0, dtype=np.int64)
    equal = np.concatenate([[False], first.tokens[low:high] == second.tokens[low + shift : high + shift], [False]])
    turns = np.flatnonzero(np.diff(equal))
    start, length = turns[::2], turns[1::2] - turns[::2]
    long = length >= stretch_of(first.tokens.size)
    return low + ranges(start[long], length[long])


def stretch_of(size: int) -> int:
    """Length of the stretches of a sequence that say where it stands."""
    return max(1, min(8, size // 4))


def _merged(in_first: Ints, in_second: Ints, left: Ints, right: Ints) -> tuple[Ints, Ints]:
    in_first = np.concatenate([in_first, left])
    order = np.argsort(in_first, kind="stable")
    return in_first[order], np.concatenate([in_second, right])[order]


def _gaps(matched: Ints, size: int) -> tuple[Ints, Ints]:
    """Start and end of the gaps between matched places, the outer ones too; empty ones included."""
    return np.concatenate([[0], matched + 1]), np.concatenate([matched, [size]])


def _anchors(first: Hashes, second: Hashes, in_first: Ints, in_second: Ints, stretch: int) -> tuple[Ints, Ints]:
    left = _free(in_first, first.tokens.size, stretch)
    right = _free(in_second, second.tokens.size, stretch)
    if not left.size or not right.size:
        return left[:0], right[:0]
    # A stretch counts only between the same two matched pairs.
    left_keys = first.of(left, stretch) ^ mixed(np.searchsorted(in_first, left), 1)
    right_keys = second.of(right, stretch) ^ mixed(np.searchsorted(in_second, right), 1)
    left_keys, left = _once(left_keys, left)
    right_keys, right = _once(right_keys, right)
    _, at, to = np.intersect1d(left_keys, right_keys, assume_unique=True, return_indices=True)
    left, right = left[at], right[to]
    order = np.argsort(left)
    chain = _longest_rise(right[order])
    return left[order][chain], right[order][chain]


def _free(matched: Ints, size: int, stretch: int) -> Ints:
    """Places where a stretch begins that touches no matched place."""
    start, end = _gaps(matched, size)
    length = np.maximum(end - start - stretch + 1, 0)
    return ranges(start, length)


def _once(keys: Tokens, places: Ints) -> tuple[Tokens, Ints]:
    """Keys that occur once."""
    values, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return values[counts == 1], places[first[counts == 1]]


def _longest_rise(values: Ints) -> Ints:
    """Places of a longest strictly ascending subsequence: patience."""
    ends: list[int] = []
    last: list[int] = []
    before = np.empty(values.size, dtype=np.int64)
    for at, value in enumerate(values.tolist()):
        pile = bisect_left(ends, value)
        if pile == len(ends):
            ends.append(value)
            last.append(at)
        else:
            ends[pile] = value
            last[pile] = at
        before[at] = last[pile - 1] if pile else -1
    out = np.empty(len(ends), dtype=np.int64)
    at = last[-1] if last else -1
    for index in range(len(ends) - 1, -1, -1):
        out[index] = at
        at = int(before[at])
    return out


def _repetitions(first: Hashes, second: Hashes, in_first: Ints, in_second: Ints) -> tuple[Ints, Ints]:
    """What can still be paired in the gaps, where everything repeats: a longest common subsequence of each."""
    left, left_end = _gaps(in_first, first.tokens.size)
    right, right_end = _gaps(in_second, second.tokens.size)
    cells = (left_end - left) * (right_end - right)
    order = np.argsort(cells, kind="stable")
    order = order[(cells[order] > 0) & (np.cumsum(cells[order]) <= _MOST_CELLS)]
    more: list[tuple[Ints, Ints]] = []
    for gap in order.tolist():
        a, b = first.tokens[left[gap] : left_end[gap]], second.tokens[right[gap] : right_end[gap]]
        at, to = _common(a, b)
        more.append((at + left[gap], to + right[gap]))
    nothing = np.empty(0, dtype=np.int64)
    return tuple(np.concatenate([nothing, *(pair[side] for pair in more)]) for side in (0, 1))  # type: ignore[return-value]


def _common(first: Tokens, second: Tokens) -> tuple[Ints, Ints]:
    """A longest common subsequence, as early in both as it can be."""
    best = np.zeros((first.size + 1, second.size + 1), dtype=np.int32)
    for row in range(first.size - 1, -1, -1):
        lengths = np.where(second == first[row], best[row + 1, 1:] + 1, best[row + 1, :-1])
        best[row, :-1] = np.maximum.accumulate(lengths[::-1])[::-1]
    at, to = [], []
    row = column = 0
    while row < first.size and column < second.size and best[row, column]:
        if first[row] == second[column]:
            at.append(row)
            to.append(column)
            row, column = row + 1, column + 1
        elif best[row + 1, column] > best[row, column + 1]:
            row += 1
        else:
            column += 1
    return np.array(at, dtype=np.int64), np.array(to, dtype=np.int64)


def _filled(first: Hashes, second: Hashes, in_first: Ints, in_second: Ints, *, outer: bool) -> tuple[Ints, Ints]:
    """Add what is equal directly after and before matched pairs; with `outer` also at the ends of both sequences."""
    for backward in (False, True):
        left, left_end = _gaps(in_first, first.tokens.size)
        right, right_end = _gaps(in_second, second.tokens.size)
        room = np.minimum(left_end - left, right_end - right)
        if not outer:
            room[-1 if backward else 0] = 0
        if backward:
            length = _equal(first, second, left_end, right_end, room, backward=True)
            more = ranges(left_end - length, length), ranges(right_end - length, length)
        else:
            length = _equal(first, second, left, right, room, backward=False)
            more = ranges(left, length), ranges(right, length)
        in_first, in_second = _merged(in_first, in_second, *more)
    return in_first, in_second


def _equal(first: Hashes, second: Hashes, left: Ints, right: Ints, room: Ints, *, backward: bool) -> Ints:
    """How many elements after (or before) each pair of places are equal, at most `room`."""
    length = np.zeros(left.size, dtype=np.int64)
    step = 1 << max(0, int(room.max(initial=0)).bit_length() - 1)
    while step:
        longer = length + step
        may = np.flatnonzero(longer <= room)
        start = (left[may] - longer[may], right[may] - longer[may]) if backward else (left[may], right[may])
        same = first.of(start[0], longer[may]) == second.of(start[1], longer[may])
        length[may[same]] = longer[may[same]]
        step >>= 1
    return length
