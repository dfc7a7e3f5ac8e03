"""What every script has in it, used on its own: looks at memory, stand-ins, times and the lines that compare them."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import pytest
from hypothesis import given, strategies as st

torch = pytest.importorskip("torch")

from traceloom.workload.replay.script import (  # noqa: E402
    PendingWorks,
    compare_times,
    create_storage_view,
    ensure_recorded_shape,
    flatten_values,
    measure_by_op,
    measure_runs,
    run_stand_in,
    summarize_times,
)

pytestmark = pytest.mark.torch
NESTED = st.recursive(
    st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)


def leaves(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [leaf for part in value for leaf in leaves(part)]


@given(NESTED)
def test_what_an_op_returns_is_taken_apart_in_its_order(value: Any) -> None:
    assert list(flatten_values(value)) == leaves(value)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (4, 6), (6, 1)), (5, (2, 3), (6, 2)), (1, (3,), (0,)), (2, (), ()), (23, (0, 4), (4, 1))],
)
def test_another_look_at_memory_reads_the_elements_that_its_strides_name(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    whole = torch.arange(24, dtype=torch.float32).view(4, 6)
    look = create_storage_view(
        whole[1:], torch.float32, offset, shape, strides
    )  # of the storage, not of the rows
    assert tuple(look.shape) == shape
    for index in itertools.product(*map(range, shape)):
        assert look[index] == offset + sum(
            step * stride for step, stride in zip(index, strides, strict=True)
        )
    if look.numel():
        look.fill_(-1)
        assert (whole == -1).any()  # the same memory
    as_bytes = create_storage_view(torch.tensor([1.0]), torch.uint8, 2, (2,), (1,))
    assert as_bytes.tolist() == [128, 63]  # of 1.0: 00 00 80 3f


def test_a_stand_in_takes_its_time_and_gives_zeros_of_the_geometry() -> None:
    begin = time.perf_counter_ns()
    made = run_stand_in(
        3_000_000, ((2, 3), (1, 2), torch.float64, "cpu"), ((4,), (1,), torch.int8, "cpu")
    )
    assert time.perf_counter_ns() - begin >= 3_000_000
    assert [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in made] == [
        ((2, 3), (1, 2), torch.float64),
        ((4,), (1,), torch.int8),
    ]
    assert not any(tensor.any() for tensor in made)
    assert run_stand_in(0) == []


def test_a_result_of_another_shape_or_type_is_replaced_by_zeros() -> None:
    tensor = torch.ones(2, 3)
    assert ensure_recorded_shape(tensor, (2, 3), (3, 1), torch.float32) is tensor
    assert ensure_recorded_shape(tensor.t(), [3, 2], (9, 9), torch.float32).stride() == (
        1,
        3,
    )  # only its shape counts
    for shape, dtype in (((3, 2), torch.float32), ((2, 3), torch.int64), ((), torch.float32)):
        strides = torch.empty(shape).stride()
        other = ensure_recorded_shape(tensor, shape, strides, dtype)
        assert (tuple(other.shape), other.dtype, bool(other.any())) == (shape, dtype, False)


def test_all_collectives_that_are_one_are_waited_for() -> None:
    class Work:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waited.append(self.number)

    waited: list[int] = []
    PendingWorks([Work(3), Work(1), Work(2)]).wait()
    assert waited == [3, 1, 2]


@pytest.mark.parametrize("runs", [1, 4])
def test_as_many_runs_as_asked_for_are_timed_after_one_that_is_not(runs: int) -> None:
    calls: list[int] = []
    times = measure_runs(lambda: calls.append(time.perf_counter_ns()), runs, "cpu")
    assert len(times) == runs
    assert len(calls) == runs + 1
    assert all(each > 0 for each in times)


def test_without_a_number_of_runs_there_are_at_least_five_and_no_more_than_200() -> None:
    assert len(measure_runs(lambda: time.sleep(0.11), 0, "cpu")) == 5
    assert 5 <= len(measure_runs(lambda: None, 0, "cpu")) <= 200


@pytest.mark.thorough  # a profiler starts
def test_only_ops_that_no_other_op_called_are_counted() -> None:
    x = torch.rand(8, 8)
    times = measure_by_op(lambda: [torch.nn.functional.linear(x, x), torch.relu(x), torch.relu(x)])
    assert {"aten::linear", "aten::relu"} <= times.keys()
    assert (
        not {"aten::t", "aten::addmm", "aten::mm", "aten::clamp_min"} & times.keys()
    )  # within the two
    assert all(ns >= 0 for ns in times.values())


def test_lines_compare_what_both_sides_know() -> None:
    recorded = {"aten::mm": (4, 2_000_000), "aten::add": (1, 0), "mine::op": (3, 500_000)}
    head, *lines = compare_times(
        recorded, {"aten::mm": 3e6, "aten::add": 1000.0, "aten::other": 7.0}
    )
    assert head.split() == [
        "recorded",
        "here",
        "ratio",
        "calls",
        "of",
        "(time",
        "of",
        "the",
        "host)",
    ]
    assert [line.split() for line in lines] == [
        ["2.000", "ms", "3.000", "ms", "1.50", "4", "aten::mm"],
        ["0.000", "ms", "0.001", "ms", "-", "1", "aten::add"],  # nothing is times nothing
        ["0.500", "ms", "-", "-", "3", "mine::op"],
    ]
    starts = [line.index(line.split()[-1]) for line in lines]
    assert len(set(starts)) == 1  # one below the other


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=9), st.none() | st.integers(1, 10**9))
def test_the_summary_says_the_median_beside_what_was_recorded(
    times: list[int], recorded: int | None
) -> None:
    text = summarize_times(times, recorded)
    median = statistics.median(times)
    assert text.startswith(f"median of {len(times)}: {median / 1e6:.3f} ms")
    assert ("recorded" in text) == (recorded is not None)
    if recorded is not None:
        assert text.endswith(f"{median / recorded:.2f} times that")
