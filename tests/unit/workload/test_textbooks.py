"""Schedules against textbook algorithms that are carried out here on buffers, byte by byte.

Each textbook moves real values: rank r's bytes are 16^r, so that a sum tells whose bytes are in it and how often. It is
right where every rank ends with what the collective promises; a schedule is right where it has the same messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import pairwise

import numpy as np
import pytest

from traceloom.workload.collective_algorithms import (
    Schedule,
    build_schedule,
    build_single_tree,
    compute_depths,
    compute_parents,
)

RANKS = [2, 3, 4, 5, 8]
SIZES = [1, 7, 64, 101]
Message = tuple[int, int, int, bool]  # source, target, bytes, reduced


def borders(size: int, count: int) -> list[int]:
    """Where pieces begin that differ by one byte at most, and the end."""
    return [k * size // count for k in range(count + 1)]


class Textbook:
    """Buffers of all ranks, and the messages that were sent between them round by round."""

    def __init__(self, ranks: int, size: int) -> None:
        self.ranks, self.size = ranks, size
        self.buffers = [[16**rank] * size for rank in range(ranks)]
        self.rounds: list[list[Message]] = []

    def round(self, messages: list[tuple[int, int, list[int], bool]]) -> None:
        """Send bytes at positions, all as they were before the round."""
        before = [list(buffer) for buffer in self.buffers]
        for source, target, positions, reduced in messages:
            for at in positions:
                self.buffers[target][at] = before[source][at] + (
                    self.buffers[target][at] if reduced else 0
                )
        self.rounds.append(
            [(source, target, len(at), reduced) for source, target, at, reduced in messages]
        )

    def piece(self, number: int) -> list[int]:
        """Positions of one of as many pieces as there are ranks."""
        at = borders(self.size, self.ranks)
        return list(range(at[number % self.ranks], at[number % self.ranks + 1]))

    @property
    def total(self) -> int:
        return sum(16**rank for rank in range(self.ranks))

    def holds_sum(self, rank: int, positions: list[int]) -> bool:
        return all(self.buffers[rank][at] == self.total for at in positions)


def messages_of(made: Schedule) -> list[list[Message]]:
    """The messages of a schedule, round by round, each rank's in its order."""
    rounds = []
    for part in made.rounds:
        columns = (part.source, part.target, part.bytes, part.reduced)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        assert all(reduced in {0, size} for _, _, size, reduced in rows)
        rounds.append(
            [(source, target, size, reduced > 0) for source, target, size, reduced in rows]
        )
    return rounds


def same(made: Schedule, book: Textbook, *, reduces: bool = True) -> None:
    """The schedule has the messages of the textbook in the same rounds; what is empty is reduced or not."""
    expected = [
        sorted(
            (source, target, size, reduced and size > 0 and reduces)
            for source, target, size, reduced in messages
        )
        for messages in book.rounds
    ]
    assert [sorted(messages) for messages in messages_of(made)] == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
def test_rings_move_the_pieces_of_the_textbook(ranks: int, size: int) -> None:
    scatter = Textbook(ranks, size)
    for step in range(ranks - 1):
        scatter.round(
            [(r, (r + 1) % ranks, scatter.piece(r - 1 - step), True) for r in range(ranks)]
        )
    assert all(scatter.holds_sum(rank, scatter.piece(rank)) for rank in range(ranks))
    same(build_schedule("reduce_scatter", "ring", ranks, size), scatter)

    book = Textbook(ranks, size)
    for step in range(ranks - 1):
        book.round([(r, (r + 1) % ranks, book.piece(r - step), True) for r in range(ranks)])
    for step in range(ranks - 1):
        book.round([(r, (r + 1) % ranks, book.piece(r + 1 - step), False) for r in range(ranks)])
    assert all(book.holds_sum(rank, list(range(size))) for rank in range(ranks))
    same(build_schedule("all_reduce", "ring", ranks, size), book)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_halving_gives_away_what_the_partner_keeps(ranks: int, size: int) -> None:
    halving = Textbook(ranks, size)
    keeps = [set(range(ranks)) for _ in range(ranks)]
    gifts: list[list[tuple[int, int, list[int]]]] = []
    bit = 1
    while bit < ranks:
        gifts.append([])
        for rank in range(ranks):
            away = sorted(piece for piece in keeps[rank] if piece & bit != rank & bit)
            keeps[rank] -= set(away)
            gifts[-1].append(
                (rank, rank ^ bit, [at for piece in away for at in halving.piece(piece)])
            )
        halving.round([(*gift, True) for gift in gifts[-1]])
        bit *= 2
    assert keeps == [{rank} for rank in range(ranks)]
    assert all(halving.holds_sum(rank, halving.piece(rank)) for rank in range(ranks))
    same(build_schedule("reduce_scatter", "halving-doubling", ranks, size), halving)
    for gift in reversed(gifts):  # who got something to reduce gives the sum of it back
        halving.round([(target, source, positions, False) for source, target, positions in gift])
    assert all(halving.holds_sum(rank, list(range(size))) for rank in range(ranks))
    same(build_schedule("all_reduce", "halving-doubling", ranks, size), halving)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "halving-doubling", "two-level"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_parts_are_gathered_whole(algorithm: str, ranks: int) -> None:
    """Who sends what is not said, so each message carries the parts that its target lacks, up to its bytes."""
    part = 13
    made = build_schedule("all_gather", algorithm, ranks, part, local=2)
    has = [{rank} for rank in range(ranks)]
    for messages in messages_of(made):
        before = [set(parts) for parts in has]
        for source, target, size, reduced in messages:
            assert not reduced
            assert size % part == 0
            lacking = sorted(before[source] - has[target])
            assert len(lacking) >= size // part  # no part goes anywhere twice
            newest = sorted(
                lacking, key=lambda k, at=source: (k - at) % ranks
            )  # as rings do: what came last goes on
            has[target] |= set(lacking if size // part == len(lacking) else newest[: size // part])
    assert has == [set(range(ranks))] * ranks
    received = Counter[int]()
    for messages in messages_of(made):
        for _, target, size, _ in messages:
            received[target] += size
    assert set(received.values()) == {(ranks - 1) * part}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", RANKS)
def test_direct_messages_carry_the_piece_of_their_target(ranks: int, size: int) -> None:
    book = Textbook(ranks, size)
    others = [(r, (r + away) % ranks) for away in range(1, ranks) for r in range(ranks)]
    book.round([(source, target, book.piece(target), True) for source, target in others])
    assert all(book.holds_sum(rank, book.piece(rank)) for rank in range(ranks))
    same(build_schedule("reduce_scatter", "direct", ranks, size), book)
    book.round([(source, target, book.piece(source), False) for source, target in others])
    assert all(book.holds_sum(rank, list(range(size))) for rank in range(ranks))
    same(build_schedule("all_reduce", "direct", ranks, size), book)
    ((*messages,),) = messages_of(build_schedule("all_to_all", "direct", ranks, size))
    assert messages == [
        (source, target, len(book.piece(target)), False) for source, target in others
    ]
    for source in range(ranks):  # nearest first, upwards
        assert [t for s, t, *_ in messages if s == source] == [
            (source + k) % ranks for k in range(1, ranks)
        ]


@pytest.mark.parametrize("ranks", RANKS)
def test_direct_roots_give_and_take(ranks: int) -> None:
    size = 10 * ranks + 3
    at = borders(size, ranks)
    lengths = [end - begin for begin, end in pairwise(at)]
    for kind, expected in {
        "broadcast": [(0, k, size, False) for k in range(1, ranks)],
        "scatter": [(0, k, lengths[k], False) for k in range(1, ranks)],
        "gather": [(k, 0, lengths[k], False) for k in range(1, ranks)],
        "reduce": [(k, 0, size, True) for k in range(1, ranks)],
    }.items():
        assert messages_of(build_schedule(kind, "direct", ranks, size)) == [expected]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_blocks_handed_round_a_ring_all_get_home(ranks: int) -> None:
    """Every rank hands on one block in each round, the one with the longest way first, until none is left."""
    block = 9
    rounds = messages_of(build_schedule("all_to_all", "ring", ranks, block * ranks))
    queues = [
        deque(range(ranks - 1, 0, -1)) for _ in range(ranks)
    ]  # how far each block has to go yet
    for messages in rounds:
        assert sorted(messages) == [(r, (r + 1) % ranks, block, False) for r in range(ranks)]
        moved = [queue.popleft() for queue in queues]
        for rank, left in enumerate(moved):
            if left > 1:
                queues[(rank + 1) % ranks].append(left - 1)
    assert not any(queues)


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 9])
def test_broadcasts_and_reductions_arrive_chunk_by_chunk(
    algorithm: str, ranks: int, chunks: int
) -> None:
    """The n-th message from one rank to another is chunk n; a rank can only hand on what it has by then."""
    size = 23
    at = borders(size, chunks if algorithm == "ring" else 1)
    for kind in ("broadcast", "reduce"):
        book = Textbook(ranks, size)
        made = messages_of(build_schedule(kind, algorithm, ranks, size, chunks=chunks))
        turn = Counter[tuple[int, int]]()
        for messages in made:
            planned = []
            for source, target, length, reduced in messages:
                number = turn[source, target]
                turn[source, target] += 1
                planned.append((source, target, list(range(at[number], at[number + 1])), reduced))
                assert length == len(planned[-1][2])
                assert reduced == (kind == "reduce" and length > 0)
            book.round(planned)
        if kind == "broadcast":
            assert book.buffers == [[1] * size] * ranks
        else:
            assert book.holds_sum(0, list(range(size)))
        lasts = {"ring": ranks - 1 + len(at) - 2, "tree": (ranks - 1).bit_length()}
        assert len(made) == lasts[algorithm]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 13, 16, 31])
def test_both_trees_are_balanced_search_trees(ranks: int) -> None:
    for root in (0, ranks - 1):
        parent = compute_parents(ranks, root).tolist()
        depth = compute_depths(compute_parents(ranks, root)).tolist()
        assert [rank for rank, above in enumerate(parent) if above < 0] == [root]
        children = defaultdict(list)
        for rank, above in enumerate(parent):
            up, steps = rank, 0
            while parent[up] >= 0:
                up, steps = parent[up], steps + 1
            assert (up, steps) == (root, depth[rank])
            if above >= 0:
                children[above].append(rank)
        # Below the root's only child all is balanced: no deeper than the logarithm of the rest.
        assert len(children[root]) == 1
        assert max(depth) == (ranks - 1).bit_length()

        def below(rank: int, tree: dict[int, list[int]] = children) -> list[int]:
            return [rank, *(each for child in tree[rank] for each in below(child))]

        for rank in set(range(ranks)) - {root}:
            assert len(children[rank]) <= 2
            for child in children[rank]:  # who is below on one side is on that side in numbers, too
                assert {each < rank for each in below(child)} == {child < rank}


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 12])
def test_double_trees_sum_both_halves(ranks: int) -> None:
    """Of an odd size the halves differ by a byte, so that a message tells which tree it is of."""
    size = 2 * ranks + 1
    half = size // 2
    book = Textbook(ranks, size)
    for messages in messages_of(build_schedule("all_reduce", "double-tree", ranks, size)):
        parts = []
        for source, target, length, reduced in messages:
            assert length in {half, size - half}
            parts.append(
                (
                    source,
                    target,
                    list(range(half) if length == half else range(half, size)),
                    reduced,
                )
            )
        book.round(parts)
    assert all(book.holds_sum(rank, list(range(size))) for rank in range(ranks))


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "reduce"])
@pytest.mark.parametrize("ranks", [3, 4, 9])
def test_chunks_of_double_trees_change_when_bytes_go_and_not_which(kind: str, ranks: int) -> None:
    size = 97

    def between(chunks: int) -> dict[tuple[int, int, bool], int]:
        sums: Counter[tuple[int, int, bool]] = Counter()
        for messages in messages_of(
            build_schedule(kind, "double-tree", ranks, size, chunks=chunks)
        ):
            for source, target, length, reduced in messages:
                sums[source, target, reduced] += length
        return dict(sums)

    levels = (ranks - 1).bit_length() * (2 if kind == "all_reduce" else 1)
    for chunks in (1, 2, 6):
        assert between(chunks) == between(1)
        assert (
            len(build_schedule(kind, "double-tree", ranks, size, chunks=chunks).rounds)
            == levels + chunks - 1
        )


@pytest.mark.parametrize(
    "parent", [[-1, 0, 1, 2], [1, 3, 3, -1], [2, 2, -1, 2, 2], [-1, 0, 0, 1, 1, 2, 2]]
)
def test_one_tree_sums_up_and_tells_down(parent: list[int]) -> None:
    ranks, size = len(parent), 5
    book = Textbook(ranks, size)
    for messages in messages_of(build_single_tree(np.array(parent), size)):
        for source, target, length, reduced in messages:
            assert length == size
            assert (target == parent[source]) if reduced else (source == parent[target])
        book.round(
            [
                (source, target, list(range(size)), reduced)
                for source, target, _, reduced in messages
            ]
        )
    assert all(book.holds_sum(rank, list(range(size))) for rank in range(ranks))


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (2, 3), (3, 2), (4, 4), (1, 4), (4, 1)])
def test_two_levels_reduce_inside_and_then_between_hosts(hosts: int, local: int) -> None:
    ranks = hosts * local
    each = 6
    size = each * ranks

    def at(first: int, length: int) -> list[int]:
        return list(range(first, first + length))

    book = Textbook(ranks, size)
    inside, between = size // local, each
    neighbours = [
        (h * local + k, h * local + (k + 1) % local, k) for h in range(hosts) for k in range(local)
    ]
    across = [
        (h * local + k, (h + 1) % hosts * local + k, h, k)
        for h in range(hosts)
        for k in range(local)
    ]
    for step in range(local - 1):
        pieces_of = [
            (s, t, at((k - 1 - step) % local * inside, inside), True) for s, t, k in neighbours
        ]
        book.round(pieces_of)
    scatter = Textbook(ranks, size)
    scatter.buffers, scatter.rounds = [list(buffer) for buffer in book.buffers], list(book.rounds)
    for step in range(hosts - 1):
        scatter.round(
            [
                (s, t, at(k * inside + (h - 1 - step) % hosts * between, between), True)
                for s, t, h, k in across
            ]
        )
    for h in range(hosts):
        for k in range(local):
            assert scatter.holds_sum(h * local + k, at(k * inside + h * between, between))
    same(build_schedule("reduce_scatter", "two-level", ranks, size, local=local), scatter)

    for step in range(hosts - 1):
        book.round(
            [
                (s, t, at(k * inside + (h - step) % hosts * between, between), True)
                for s, t, h, k in across
            ]
        )
    for step in range(hosts - 1):
        book.round(
            [
                (s, t, at(k * inside + (h + 1 - step) % hosts * between, between), False)
                for s, t, h, k in across
            ]
        )
    for step in range(local - 1):
        book.round(
            [(s, t, at((k - step) % local * inside, inside), False) for s, t, k in neighbours]
        )
    assert all(book.holds_sum(rank, list(range(size))) for rank in range(ranks))
    same(build_schedule("all_reduce", "two-level", ranks, size, local=local), book)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree", "double-tree", "halving-doubling"])
def test_a_barrier_is_a_small_all_reduce(algorithm: str) -> None:
    assert messages_of(build_schedule("barrier", algorithm, 8, 12345)) == messages_of(
        build_schedule("all_reduce", algorithm, 8, 64)
    )
