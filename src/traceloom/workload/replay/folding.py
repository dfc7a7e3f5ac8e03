"""Repeats: stretches of a program that do the same to other registers, distinct once and called
many times.

Two stretches are the same where they do the same things in the same order and their registers are
equal up to renaming. The best repeat (the one that saves most lines) becomes a block, its places
become calls of it, and so on, in the rest and in the blocks themselves: layers within batches
within steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_MIN_LINES = 5  # lines of a block
_MIN_SAVED_LINES = 12  # lines that a block must save at least
_LENGTHS, _GROUPS, _TRIED = 40, 4, 30  # candidates: lengths, stretches of each, and of all
_PARAMETERS_PER_LINE = 8  # parameters of a call


class ProgramLine(NamedTuple):
    """One line of a program.

    Attributes:
        what: What is done: a number that the caller gives; -1 - n calls the n-th block.
        reads: Registers that it takes.
        writes: Registers that it makes.
        source: Where it comes from, that of its first place in a block; not looked at.
    """

    what: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    source: int


class Renamed(NamedTuple):
    """A stretch with its registers numbered by their first use: `form` is equal for stretches that
    are the same.
    """

    form: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    parameters: tuple[int, ...]
    made: tuple[int, ...]


class _Repeat(NamedTuple):
    score: float
    length: int
    places: list[tuple[int, int]]  # body, line


@dataclass(frozen=True)
class FoldedProgram:
    """A program and its blocks.

    Attributes:
        bodies: Lines of the program, then those of each block: block n is `bodies[n]`. The registers of a block are its
            own: its parameters 0, 1, ... first, in the order in which its calls read them, then what it makes, in the
            order in which they write it.
        parameters: How many parameters each has.
    """

    bodies: list[list[ProgramLine]]
    parameters: list[int]

    def calls(self) -> list[int]:
        """How many times each body runs in one run of the program."""
        counts = [0] * len(self.bodies)
        counts[0] = 1
        for body in self.outermost_first():
            for line in self.bodies[body]:
                if line.what < 0:
                    counts[-1 - line.what] += counts[body]
        return counts

    def outermost_first(self) -> list[int]:
        """The bodies, each before those that it calls."""
        order: list[int] = []

        def visit(body: int) -> None:
            if body not in order:
                for inner in sorted(
                    {-1 - line.what for line in self.bodies[body] if line.what < 0}
                ):
                    visit(inner)
                order.append(body)

        visit(0)
        return order[::-1]


def find_repeats(
    lines: Sequence[ProgramLine], starts: frozenset[int] = frozenset(), max_blocks: int = 60
) -> FoldedProgram:
    """Find the blocks of a program.

    Args:
        lines: The program.
        starts: Sources at which a block had best begin (a scope does), of stretches that are as good.
        max_blocks: How many blocks.
    """
    bodies, parameters = [list(lines)], [0]
    while len(bodies) <= max_blocks and (best := _find_best_repeat(bodies, starts)):
        number = len(bodies)
        body, offset = best.places[0]
        segment = bodies[body][offset : offset + best.length]
        renamed = rename(segment)
        bodies.append(
            [
                ProgramLine(*line_form, line.source)
                for line_form, line in zip(renamed.form, segment, strict=True)
            ]
        )
        parameters.append(len(renamed.parameters))
        for body, offset in sorted(best.places, reverse=True):
            segment = bodies[body][offset : offset + best.length]
            _, reads, writes = rename(segment)
            bodies[body][offset : offset + best.length] = [
                ProgramLine(-1 - number, reads, writes, segment[0].source)
            ]
    return FoldedProgram(bodies, parameters)


def rename(segment: Sequence[ProgramLine]) -> Renamed:
    """A stretch by registers of its own: what it reads first as 0, 1, ..., then what it makes."""
    parameters: dict[int, int] = {}
    created: dict[int, int] = {}
    for line in segment:
        for register in line.reads:
            if register not in created:
                parameters.setdefault(register, len(parameters))
        for register in line.writes:
            if register not in parameters:
                created.setdefault(register, len(created))
    numbers = {
        **parameters,
        **{register: len(parameters) + number for register, number in created.items()},
    }
    canonical_lines = tuple(
        (line.what, tuple(numbers[r] for r in line.reads), tuple(numbers[r] for r in line.writes))
        for line in segment
    )
    return Renamed(canonical_lines, tuple(parameters), tuple(created))


def _find_best_repeat(
    bodies: Sequence[Sequence[ProgramLine]], starts: frozenset[int]
) -> _Repeat | None:
    """The repeat that saves most lines."""
    line_positions = [
        (body, token_indices)
        for body, lines in enumerate(bodies)
        for token_indices in range(len(lines) + 1)
    ]
    separators = iter(
        range(2**62, 2**62 + len(bodies))
    )  # between bodies, so that no stretch goes over
    tokens = np.array(
        [token for lines in bodies for token in (*(line.what for line in lines), next(separators))]
    )
    best: _Repeat | None = None
    for bound, length, token_indices in sorted(
        _find_candidates(tokens), key=lambda c: (-c[0], c[1], c[2][0])
    )[:_TRIED]:
        if best and best.score >= bound + 1:
            break
        alike: dict[Renamed, list[tuple[int, int]]] = {}
        for body, line in (line_positions[k] for k in token_indices):
            renamed = rename(bodies[body][line : line + length])
            alike.setdefault(Renamed(renamed.form, (), ()), []).append((body, line))
        for canonical_form, group in alike.items():
            body, line = group[0]
            parameters = 1 + max(
                (r for _, reads, _ in canonical_form.form for r in reads), default=0
            )
            score = _count_saved_lines(length, len(group), parameters) + 0.5 * (
                bodies[body][line].source in starts
            )
            if (
                len(group) > 1
                and score >= _MIN_SAVED_LINES
                and (best is None or score > best.score)
            ):
                best = _Repeat(score, length, group)
    return best


def _count_saved_lines(length: int, count: int, parameters: int = 0) -> float:
    """Lines that a block of this length spares at so many places."""
    return (count - 1) * length - count * (1 + parameters / _PARAMETERS_PER_LINE)


def _find_candidates(tokens: Ints) -> Iterator[tuple[float, int, list[int]]]:
    """Stretches of equal tokens: what they save at most, their length, and where they begin, none
    over another.
    """
    n = tokens.size
    levels = [np.append(np.unique(tokens, return_inverse=True)[1].reshape(-1), n)]
    while (
        width := 1 << (len(levels) - 1)
    ) * 2 <= n:  # classes of the stretches of 2, 4, 8, ... tokens at each place
        last = levels[-1]
        following = np.minimum(np.arange(n) + width, n)
        key = last[:-1] * (2 * n + 1) + np.where(following < n, last[following], n + np.arange(n))
        classes = np.unique(key, return_inverse=True)[1].reshape(-1)
        levels.append(np.append(classes, n))
        if classes.max() == n - 1:
            break
    if len(levels) < 3:
        return
    order = np.argsort(levels[2][:-1], kind="stable")
    same = levels[2][order[1:]] == levels[2][order[:-1]]
    i, j = order[:-1][same], order[1:][same]
    common = np.zeros(i.size, dtype=np.int64)
    for k in range(len(levels) - 1, -1, -1):
        a, b = np.minimum(i + common, n), np.minimum(j + common, n)
        common += np.where((levels[k][a] == levels[k][b]) & (b < n), 1 << k, 0)
    before = np.where(i > 0, tokens[i - 1] == tokens[j - 1], False)
    lengths = np.minimum(common, j - i)
    lengths = lengths[(lengths >= _MIN_LINES) & (~before | (common >= j - i))]
    distinct, count = np.unique(lengths, return_counts=True)
    for length in distinct[np.argsort(-distinct * count, kind="stable")][:_LENGTHS].tolist():
        yield from _find_frequent(levels, length)


def _find_frequent(levels: Sequence[Ints], length: int) -> Iterator[tuple[float, int, list[int]]]:
    """Of one length: the stretches that come most often."""
    k = min(length.bit_length() - 1, len(levels) - 1)
    n = levels[0].size - 1
    offsets = np.arange(n - length + 1)
    key = levels[k][offsets] * (n + 1) + levels[k][offsets + length - (1 << k)]
    if length > 2 << k:  # the highest level tells every place from every other
        return
    order = np.argsort(key, kind="stable")
    heads = np.flatnonzero(np.diff(key[order], prepend=-1))
    sizes = np.diff(np.append(heads, order.size))
    for group in np.argsort(-sizes, kind="stable")[: _GROUPS * 16]:
        positions: list[int] = []
        for start in order[heads[group] : heads[group] + sizes[group]].tolist():
            if not positions or start >= positions[-1] + length:
                positions.append(start)
        if len(positions) > 1:
            yield _count_saved_lines(length, len(positions)), length, positions
