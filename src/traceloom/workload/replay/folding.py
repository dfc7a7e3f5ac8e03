"""Folding repeated stretches of a program into blocks that are written once and called many times.

Two stretches are equal if they perform the same operations in the same order and their registers
are equal up to renaming. The best repeat (which saves most lines) becomes a block, its occurrences
become calls of it, and so on, in the rest and in the blocks themselves: layers within batches
within steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_MIN_LINES = 5  # min lines of a block
_MIN_SAVED_LINES = 12  # min lines that a block must save
_LENGTHS, _GROUPS, _TRIED = 40, 4, 30  # candidates: lengths, stretches per length, in total
_PARAMETERS_PER_LINE = 8  # parameters that fit a line of a call


class ProgramLine(NamedTuple):
    """One line of a program.

    Attributes:
        what: Number of the operation, chosen by the caller; -1 - n calls the n-th block.
        reads: Registers that it reads.
        writes: Registers that it writes.
        source: Its origin; in a block, that of the first occurrence. Not compared.
    """

    what: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    source: int


class Renamed(NamedTuple):
    """A stretch with its registers numbered by their first use; equal stretches have equal
    `form`.
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
        bodies: Lines of the program, then those of each block: block n is `bodies[n]`. The
            registers of a block are its own: its parameters 0, 1, ... first, in the order in which
            its calls read them, then its results, in the order in which they are written.
        parameters: Number of parameters of each.
    """

    bodies: list[list[ProgramLine]]
    parameters: list[int]

    def calls(self) -> list[int]:
        """Returns how many times each body runs in one run of the program."""
        counts = [0] * len(self.bodies)
        counts[0] = 1
        for body in self.outermost_first():
            for line in self.bodies[body]:
                if line.what < 0:
                    counts[-1 - line.what] += counts[body]
        return counts

    def outermost_first(self) -> list[int]:
        """Returns the bodies, each before those that it calls."""
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
    """Finds the blocks of a program.

    Args:
        lines: The program.
        starts: Sources at which a block preferably begins, such as a scope, among equally good
            stretches.
        max_blocks: Max number of blocks.
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
    """Numbers the registers of a stretch: inputs first as 0, 1, ..., then results."""
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
    line_positions = [
        (body, token_indices)
        for body, lines in enumerate(bodies)
        for token_indices in range(len(lines) + 1)
    ]
    separators = iter(
        range(2**62, 2**62 + len(bodies))
    )  # separators between bodies, which no stretch crosses
    tokens = np.array(
        [token for lines in bodies for token in (*(line.what for line in lines), next(separators))]
    )
    best: _Repeat | None = None
    for bound, length, token_indices in sorted(
        _find_candidates(tokens), key=lambda c: (-c[0], c[1], c[2][0])
    )[:_TRIED]:
        if best and best.score >= bound + 1:
            break
        places_by_form: dict[Renamed, list[tuple[int, int]]] = {}
        for body, line in (line_positions[k] for k in token_indices):
            renamed = rename(bodies[body][line : line + length])
            places_by_form.setdefault(Renamed(renamed.form, (), ()), []).append((body, line))
        for canonical_form, group in places_by_form.items():
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
    """Returns the lines that a block of this length saves when called `count` times."""
    return (count - 1) * length - count * (1 + parameters / _PARAMETERS_PER_LINE)


def _find_candidates(tokens: Ints) -> Iterator[tuple[float, int, list[int]]]:
    """Yields stretches of equal tokens: max saving, length, and non-overlapping start positions.

    Method: prefix doubling, as for suffix arrays. `levels[k]` numbers the distinct stretches of
    2**k tokens; from these, the common length of pairs of equal positions is found by binary
    descent.
    """
    n = tokens.size
    levels = [np.append(np.unique(tokens, return_inverse=True)[1].reshape(-1), n)]
    while (
        width := 1 << (len(levels) - 1)
    ) * 2 <= n:  # equivalence classes of the stretches of 2, 4, 8, ... tokens at each position
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
    k = min(length.bit_length() - 1, len(levels) - 1)
    n = levels[0].size - 1
    offsets = np.arange(n - length + 1)
    key = levels[k][offsets] * (n + 1) + levels[k][offsets + length - (1 << k)]
    if length > 2 << k:  # at the highest level all positions are distinct
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
