"""Schedules: who hears from whom, and how many bytes move."""

from __future__ import annotations

import numpy as np
import pytest

from traceloom.errors import UsageError
from traceloom.workload.collective_algorithms import (
    ALGORITHMS,
    KINDS_BY_ALGORITHM,
    Schedule,
    build_schedule,
    compute_parents,
    split_evenly,
)

_MIB = 1 << 20
CASES = [(kind, algorithm) for algorithm in ALGORITHMS for kind in KINDS_BY_ALGORITHM[algorithm]]


def heard(made: Schedule) -> np.ndarray:
    """Whose data each rank has seen (row: rank), by walking through the rounds message by message."""
    knows = np.eye(made.ranks, dtype=bool)
    for part in made.rounds:
        before = knows.copy()
        for source, target in zip(part.source.tolist(), part.target.tolist(), strict=True):
            knows[target] |= before[source]
    return knows


@pytest.mark.parametrize(("kind", "algorithm"), CASES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
def test_everybody_hears_whom_the_collective_says(kind: str, algorithm: str, ranks: int) -> None:
    local = next(n for n in (4, 3, 7, 2) if ranks % n == 0) if algorithm == "two-level" else 1
    if algorithm == "halving-doubling" and ranks & (ranks - 1):
        with pytest.raises(UsageError, match="power of two"):
            build_schedule(kind, algorithm, ranks, 1000)
        return
    for size in (1000, 1024 * ranks):
        made = build_schedule(kind, algorithm, ranks, size, local=local, chunks=3)
        made.check()
        knows = heard(made)
        if kind.startswith("all_") or kind == "reduce_scatter":
            assert knows.all()
        elif kind in {"broadcast", "scatter"}:
            assert knows[:, 0].all()
        else:
            assert knows[0].all()


@pytest.mark.parametrize("size", [_MIB, 1_000_003])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_are_those_of_the_textbook(ranks: int, size: int) -> None:
    """A rank of a bandwidth-optimal all_reduce sends 2 (n - 1) / n of its buffer; half of it for each half."""
    lost = ranks  # pieces differ by a byte
    for algorithm in ("ring", "direct", "halving-doubling"):
        for kind, share in (("all_reduce", 2), ("reduce_scatter", 1)):
            sent = build_schedule(kind, algorithm, ranks, size).sent_bytes()
            assert np.abs(sent - share * size * (ranks - 1) / ranks).max() <= 2 * lost, (
                algorithm,
                kind,
            )
        assert (
            build_schedule("all_gather", algorithm, ranks, size).sent_bytes() == size * (ranks - 1)
        ).all()
    tree = build_schedule("all_reduce", "double-tree", ranks, size, chunks=4)
    assert tree.sent_bytes().sum() == 2 * (ranks - 1) * size
    assert (
        build_schedule("broadcast", "ring", ranks, size, chunks=5).sent_bytes().sum()
        == (ranks - 1) * size
    )
    two = build_schedule("all_reduce", "two-level", ranks, size, local=2).sent_bytes()
    assert np.abs(two - (size + size / 2 * 2 * (ranks / 2 - 1) / (ranks / 2))).max() <= 4 * lost


def test_reductions_take_what_arrives_and_only_on_the_way_to_a_sum() -> None:
    for kind, algorithm in CASES:
        made = build_schedule(kind, algorithm, 8, _MIB, local=4)
        reduced = sum(int(part.reduced.sum()) for part in made.rounds)
        least = {"all_reduce": 7 * _MIB, "reduce_scatter": 7 * _MIB, "reduce": 7 * _MIB}.get(
            kind, 0
        )
        assert reduced == least, (kind, algorithm)


def test_all_to_all_takes_splits() -> None:
    splits = np.array([[0, 10, 20], [3, 0, 4], [50, 60, 0]])
    made = build_schedule("all_to_all", "direct", 3, 0, splits=splits)
    moved = {
        (s, t): b
        for p in made.rounds
        for s, t, b in zip(p.source.tolist(), p.target.tolist(), p.bytes.tolist(), strict=True)
    }
    assert moved == {(s, t): int(splits[s, t]) for s in range(3) for t in range(3) if s != t}


def test_rings_share_their_rounds() -> None:
    made = build_schedule("all_reduce", "ring", 1024, _MIB)
    assert len(made.rounds) == 2 * 1023
    assert len({id(part) for part in made.rounds}) == 2
    made = build_schedule("all_reduce", "two-level", 64, _MIB, local=8)
    assert len({id(part) for part in made.rounds}) == 4


def test_double_trees_swap_leaves() -> None:
    """Of both trees of 8 places: balanced, and a leaf of one is inside the other."""
    low, high = compute_parents(8, 0), compute_parents(8, 7)
    assert low.tolist() == [-1, 2, 4, 2, 0, 6, 4, 6]
    assert high.tolist() == [1, 3, 1, 7, 5, 3, 5, -1]
    leaves = [set(range(8)) - set(tree.tolist()) for tree in (low, high)]
    assert not leaves[0] & leaves[1]


def test_pieces_add_up() -> None:
    for size, count in ((0, 3), (10, 4), (2**62, 7)):
        assert int(split_evenly(size, count).sum()) == size
        assert np.ptp(split_evenly(size, count)) <= 1


def test_what_cannot_be_scheduled_says_what_can() -> None:
    with pytest.raises(UsageError, match="no ring algorithm for gather") as error:
        build_schedule("gather", "ring", 4, 100)
    assert "direct" in (error.value.hint or "")
    with pytest.raises(UsageError, match="no multiple of 3"):
        build_schedule("all_reduce", "two-level", 8, 100, local=3)
    assert build_schedule("all_reduce", "ring", 1, 100).rounds == ()


def test_a_broken_schedule_is_found() -> None:
    from traceloom.errors import InvariantError
    from traceloom.workload.collective_algorithms import build_round

    for part in (build_round(0, 2, 5), build_round(1, 1, 5), build_round(0, 1, -5)):
        with pytest.raises(InvariantError):
            Schedule(2, (part,)).check()
