"""Repeats in rows of numbers, against a search by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from traceloom.analyze.repeats import (
    drop_overlapping,
    find_maximal_repeats,
    is_periodic,
    select_repeats,
)


def by_hand(codes: list[int], shortest: int, longest: int) -> set[tuple[int, ...]]:
    """Maximal repeats: two occurrences or more, with different neighbours on both sides."""
    found = set()
    for length in range(shortest, longest + 1):
        places: dict[tuple[int, ...], list[int]] = {}
        for at in range(len(codes) - length + 1):
            if min(codes[at : at + length]) >= 0:
                places.setdefault(tuple(codes[at : at + length]), []).append(at)
        for text, at in places.items():
            # borders and both ends differ from everything, also from each other
            before = {codes[a - 1] if a and codes[a - 1] >= 0 else -1 - a for a in at}
            after = {
                codes[a + length] if a + length < len(codes) and codes[a + length] >= 0 else -1 - a
                for a in at
            }
            if len(at) > 1 and len(before) > 1 and len(after) > 1:
                found.add(text)
    return found


rows = st.lists(st.integers(-1, 3), max_size=40)


@given(rows, st.integers(1, 3), st.integers(3, 12))
def test_maximal_repeats_are_those_found_by_hand(
    codes: list[int], shortest: int, longest: int
) -> None:
    found = find_maximal_repeats(np.array(codes, dtype=np.int64), shortest, longest)
    texts = []
    for repeat in range(found.low.size):
        places, length = found.occurrences(repeat).tolist(), int(found.length[repeat])
        text = tuple(codes[places[0] : places[0] + length])
        assert all(tuple(codes[at : at + length]) == text for at in places)
        everywhere = [at for at in range(len(codes)) if tuple(codes[at : at + length]) == text]
        assert places == everywhere
        texts.append(text)
    assert len(texts) == len(set(texts))
    assert set(texts) == by_hand(codes, shortest, longest)


@given(st.sets(st.integers(0, 60), max_size=30), st.integers(1, 9))
def test_occurrences_are_kept_from_the_first_on(starts: set[int], length: int) -> None:
    kept: list[int] = []
    for at in sorted(starts):
        if not kept or at >= kept[-1] + length:
            kept.append(at)
    assert drop_overlapping(np.array(sorted(starts), dtype=np.int64), length).tolist() == kept


@given(st.lists(st.integers(0, 1), max_size=12))
def test_a_sequence_is_periodic_when_it_repeats_a_shorter_one(codes: list[int]) -> None:
    size = len(codes)
    repeats = any(codes == (codes[:p] * size)[:size] for p in range(1, size // 2 + 1))
    assert is_periodic(np.array(codes, dtype=np.int64)) == repeats


def _chosen(text: str, least: int = 3) -> list[tuple[str, int]]:
    codes = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    codes[codes == ord("|")] = -1
    taken = select_repeats(
        codes, find_maximal_repeats(codes, 2, 64), np.ones(codes.size, dtype=np.int64), least, 25
    )
    return [(text[start[0] : start[0] + length], start.size) for start, length in taken]


def test_a_layer_that_repeats_is_found_once_not_with_its_multiples_and_rotations() -> None:
    assert _chosen("xy" + "abcdef" * 10 + "z") == [("abcdef", 10)]


def test_layers_whose_neighbours_begin_and_end_like_them_are_found_in_full() -> None:
    assert _chosen("f" + "abcdef" * 10 + "a") == [("fabcde", 10)]


def test_a_frequent_part_of_a_layer_is_told_only_where_it_stands_elsewhere_as_well() -> None:
    assert _chosen("x" + "abcabd" * 5 + "y") == [("abcabd", 5)]
    outside = "x" + "abcabd" * 5 + "y" + "".join(f"ab{c}" for c in "klmnopqrstuvw")
    assert _chosen(outside) == [("abcabd", 5), ("ab", 23)]


def test_nothing_crosses_a_border() -> None:
    assert _chosen("ab|ab|ab") == [("ab", 3)]
    assert _chosen("a|ba|ba|b") == []


def test_rare_sequences_are_left_out() -> None:
    assert _chosen("abcXabcY") == []
    assert _chosen("abcXabcY", least=2) == [("abc", 2)]
