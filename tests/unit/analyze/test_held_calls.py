"""Launch calls that a full queue held up: just so, and just not; times in µs."""

from __future__ import annotations

import pytest

from traceloom.analyze import launches
from traceloom.analyze.launches import MIN_QUEUE_DEPTH
from traceloom.testing import TraceBuilder


def queued(before: int, *, length: float, after: float = 3, usual: float = 2) -> TraceBuilder:
    """`before` calls of `usual` µs, then one of `length` that returns `after` the end of the first kernel, of 10 µs.

    The other kernels run one after the other from then on.
    """
    builder = TraceBuilder()
    for number in range(before):
        builder.launch(
            "cudaLaunchKernel", usual * number, usual, correlation=number + 1, flow=False
        )
    at = usual * before
    returned = at + length
    builder.launch("cudaLaunchKernel", at, length, correlation=before + 1, flow=False)
    builder.kernel("work", returned - after - 10, 10, correlation=1)
    for number in range(1, before + 1):
        builder.kernel("work", returned + 20 * number, 10, correlation=number + 1)
    return builder


@pytest.mark.parametrize(
    ("before", "length", "after", "usual", "held"),
    [
        (MIN_QUEUE_DEPTH, 100, 3, 2, True),  # one of 901 has ended
        (MIN_QUEUE_DEPTH - 1, 100, 3, 2, False),
        (MIN_QUEUE_DEPTH, 10, 3, 2, True),  # 8 µs longer than usual, and 5 times as long
        (MIN_QUEUE_DEPTH, 9.999, 3, 2, False),
        (MIN_QUEUE_DEPTH, 19.9, 3, 8, False),  # 2.5 times as long as usual is 20
        (MIN_QUEUE_DEPTH, 20, 3, 8, True),
        (MIN_QUEUE_DEPTH, 500, 100, 2, True),
        (MIN_QUEUE_DEPTH, 500, 100.001, 2, False),  # too long after the end: nobody made room
        (MIN_QUEUE_DEPTH, 100, 100, 2, False),  # the room was there before the call
        (MIN_QUEUE_DEPTH, 100, 99.999, 2, True),
    ],
)
def test_a_call_was_held_up_where_the_queue_was_full_and_room_was_made(
    before: int, length: float, after: float, usual: float, held: bool
) -> None:
    queue = launches(queued(before, length=length, after=after, usual=usual).build()).queues.row(
        0, named=True
    )
    assert (queue["held_count"], queue["capacity"]) == ((1, before) if held else (0, None))
    assert queue["held_ns"] == (round(1000 * (length - usual)) if held else 0)


def test_a_held_call_is_an_outlier_with_its_time_beyond_the_usual() -> None:
    found = launches(queued(MIN_QUEUE_DEPTH, length=100).build())
    rows = found.outliers.filter(found.outliers["kind"] == "full queue").to_dicts()
    assert [(row["launch_name"], row["start_ns"]) for row in rows] == [
        ("cudaLaunchKernel", 2_000 * MIN_QUEUE_DEPTH)
    ]
    assert "long call" not in found.outliers["kind"].to_list()


def test_time_with_a_deep_queue_is_the_time_with_900_launches_pending() -> None:
    """The 900th call begins at 1798, one more at 1800; the first kernel starts at 1887, the second at 1920."""
    queue = launches(queued(MIN_QUEUE_DEPTH, length=100).build()).queues.row(0, named=True)
    assert (queue["max_launches"], queue["deep_ns"]) == (
        MIN_QUEUE_DEPTH + 1,
        1000 * (1900 + 20 - 1798),
    )
    assert (queue["launch_count"], queue["work_count"], queue["unknown_count"]) == (
        MIN_QUEUE_DEPTH + 1,
        MIN_QUEUE_DEPTH + 1,
        0,
    )
    end = 1900 + 20 * MIN_QUEUE_DEPTH + 10
    assert (queue["window_ns"], queue["empty_ns"]) == (
        1000 * end,
        10_000,
    )  # nothing is pending while the last runs
