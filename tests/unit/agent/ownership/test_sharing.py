"""The time of a shared device is split by what processes used, and the parts add up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from traceloom.agent.accelerators.backend import DeviceProcess
from traceloom.agent.ownership.model import Share, compute_shares, split_by_weights

KEYS = {1: "1@10", 2: "2@20", 3: "3@30"}


def _on(device: str, pid: int, busy: float | None) -> DeviceProcess:
    return DeviceProcess(device=device, pid=pid, busy_ratio=busy)


def test_two_processes_on_the_first_device_do_not_move_those_of_the_second() -> None:
    """The line number of a list of processes is no device: dynolog's attribution shifts here."""
    divided = compute_shares([_on("a", 1, 0.6), _on("a", 2, 0.2), _on("b", 3, 0.1)], KEYS)
    assert divided["a", "1@10"].part == pytest.approx(0.75)
    assert divided["a", "2@20"].part == pytest.approx(0.25)
    assert divided["b", "3@30"] == Share(1.0, assumed=False)


def test_what_is_not_measured_shares_the_rest_and_says_so() -> None:
    divided = compute_shares(
        [_on("a", 1, 0.3), _on("a", 2, None), _on("a", 3, None)], KEYS, {"a": 0.5}
    )
    assert divided["a", "1@10"] == Share(pytest.approx(0.6), assumed=False)
    assert divided["a", "2@20"] == divided["a", "3@30"] == Share(pytest.approx(0.2), assumed=True)


def test_without_the_device_the_rest_is_up_to_one() -> None:
    divided = compute_shares([_on("a", 1, 0.75), _on("a", 2, None)], KEYS)
    assert divided == {
        ("a", "1@10"): Share(0.75, assumed=False),
        ("a", "2@20"): Share(0.25, assumed=True),
    }


def test_an_idle_device_is_held_in_equal_parts() -> None:
    divided = compute_shares([_on("a", 1, 0.0), _on("a", 2, 0.0)], KEYS)
    assert set(divided.values()) == {Share(0.5, assumed=True)}


def test_a_process_with_two_contexts_counts_once() -> None:
    divided = compute_shares([_on("a", 1, 0.2), _on("a", 1, 0.1), _on("a", 2, 0.1)], KEYS)
    assert divided["a", "1@10"].part == pytest.approx(0.75)


def test_what_nobody_can_see_keeps_its_part() -> None:
    assert compute_shares([_on("a", 1, 0.5), _on("a", 99, 0.5)], KEYS)["a", "99@"].part == 0.5


ratios = st.one_of(st.none(), st.floats(0, 1))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12), ratios), max_size=40),
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 1)),
)
def test_shares_add_up_to_one(
    rows: list[tuple[str, int, float | None]], busy: dict[str, float]
) -> None:
    divided = compute_shares(
        [_on(*row) for row in rows], {pid: f"{pid}@0" for pid in range(6)}, busy
    )
    for device in {row[0] for row in rows}:
        parts = [share.part for (uuid, _), share in divided.items() if uuid == device]
        assert sum(parts) == sum(reversed(parts)) == 1.0
        assert min(parts) >= 0


@given(st.integers(0, 10**12), st.lists(st.floats(0, 1e6), max_size=30))
def test_whole_parts_add_up_and_are_at_most_one_off(total: int, weights: list[float]) -> None:
    parts = split_by_weights(total, weights)
    assert sum(parts) == (total if weights else 0)
    if any(weights):
        whole = sum(weights)
        assert all(
            abs(part - total * weight / whole) <= 1 + 1e-9 * total
            for part, weight in zip(parts, weights, strict=True)
        )


def test_the_largest_remainder_gets_what_is_left() -> None:
    assert split_by_weights(10, [1, 1, 1]) == [4, 3, 3]
    assert split_by_weights(100, [0.555, 0.445]) == [56, 44]
    assert split_by_weights(3, [0, 0]) == [2, 1]


@pytest.mark.parametrize("weights", [[-1.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_mean_nothing(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        split_by_weights(1, weights)
