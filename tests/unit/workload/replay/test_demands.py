"""Demands on integers: what meets two of them is allowed by both, and by brute force nothing else is lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from traceloom.workload.replay.contents import Constraint

VALUES = range(-3, 8)
BOUNDS = [Constraint("integers", low, high) for low in (0, 1, 3) for high in (None, 0, 2, 5)]


def allowed(demand: Constraint) -> set[int]:
    return {value for value in VALUES if demand.allows(np.array([value]))}


@pytest.mark.parametrize(
    "demand", [*BOUNDS, Constraint("integers", 0, 4, -1), Constraint("integers", 0, 4, -100)]
)
def test_a_demand_allows_what_lies_within_its_bounds_or_stands_for_no_class(
    demand: Constraint,
) -> None:
    high = max(VALUES) if demand.high is None else demand.high
    assert allowed(demand) == {
        value for value in VALUES if demand.low <= value <= high or value == demand.besides
    }
    assert demand.allows(np.array([], dtype=np.int64))
    inside, outside = sorted(allowed(demand)), sorted(set(VALUES) - allowed(demand))
    assert all(not demand.allows(np.array([*inside, value])) for value in outside)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(BOUNDS, BOUNDS)))
def test_both_demands_hold_where_both_can(first: Constraint, second: Constraint) -> None:
    both = first.and_also(second)
    assert allowed(both) == allowed(first) & allowed(second)
    assert both == second.and_also(first)
    assert first.and_also(first) == first.and_also(None) == first


@pytest.mark.parametrize(
    ("contents", "strictest"),
    [
        (("integers", "positive"), "integers"),
        (("offsets", "integers"), "offsets"),
        (("zeros", "positive"), "zeros"),
        (("probability", "positive"), "probability"),
        (("lengths", "integers"), "lengths"),
        (("lengths", "offsets"), "lengths"),
    ],
)
def test_of_two_kinds_the_stricter_one_is_held(contents: tuple[str, str], strictest: str) -> None:
    for first, second in (contents, contents[::-1]):
        assert Constraint(first, 0, 9).and_also(Constraint(second, 0, 9)).content == strictest


def test_an_index_that_must_be_positive_begins_at_one() -> None:
    assert Constraint("integers", 0, 9).and_also(Constraint("positive")) == Constraint(
        "integers", 1, 9
    )


def test_what_stands_for_no_class_is_kept_only_where_all_agree() -> None:
    ignoring, strict = Constraint("integers", 0, 9, -100), Constraint("integers", 0, 4)
    assert ignoring.and_also(Constraint("integers", 0, 4, -100)) == Constraint(
        "integers", 0, 4, -100
    )
    assert ignoring.and_also(strict) == strict.and_also(ignoring) == Constraint("integers", 0, 4)
    assert not ignoring.and_also(strict).allows(np.array([-100]))


@pytest.mark.parametrize("values", [[3, 2, 1], [1, 1], [6]])
def test_lengths_are_any_numbers_from_nothing_on(values: list[int]) -> None:
    lengths = Constraint("lengths", 3, 6)  # the longest of 3 steps, 6 in all
    assert lengths.allows(np.array(values))
    assert not lengths.allows(np.array([*values, -1]))
