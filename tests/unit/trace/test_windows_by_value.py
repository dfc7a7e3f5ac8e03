"""A trace cut to some of its steps, frame by frame: references lead to the same events, lanes count what is left."""

from __future__ import annotations

from functools import cache

import polars as pl
import pytest

from traceloom.errors import UsageError
from traceloom.testing import TraceBuilder
from traceloom.trace.batch import cut_session_to_steps, cut_trace_to_steps
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

STEPS = 4
LENGTH = 1000
"""Microseconds of a step; the first begins at 1000."""


@cache
def whole() -> Trace:
    """Steps with something for every frame, and an annotation around all of them."""
    made = TraceBuilder().annotation("around everything", 0, 20 * LENGTH)
    for step in range(STEPS):
        at = LENGTH * (step + 1)
        made.step(step, at, LENGTH)
        made.op(f"op{step}", at + 10, 300, shapes=[[step + 1]]).op(
            f"inner{step}", at + 20, 100, shapes=[[9, step]]
        )
        made.op(f"other thread{step}", at + 30, 50 + step, thread=2)
        made.python(f"train.py({step}): f", at + 400, 90)
        made.launch("cudaLaunchKernel", at + 60, 10, correlation=10 * step + 1)
        made.kernel(
            f"kernel{step}",
            at + 900,
            150,
            correlation=10 * step + 1,
            **{"blocks per SM": 1.5 + step},
        )
        made.launch("cudaMemcpyAsync", at + 340, 10, correlation=10 * step + 2)
        made.copy(
            "Memcpy HtoD (Pinned -> Device)",
            at + 370,
            20,
            bytes=64 + step,
            correlation=10 * step + 2,
            stream=8,
        )
        made.collective("allreduce", at + 600, 30, elements=100 + step)
        made.op(f"forward{step}", at + 700, 10, sequence=step).op(
            f"backward{step}", at + 800, 10, sequence=step
        )
        made.forward_backward(100 + step, at + 700, at + 800)
        made.allocation(at + 25, 512, address=step + 1).counter("clock", at + 5, float(step))
        made.out_of_memory(at + 50, 1 << 30)
    made.allocation(LENGTH, 1, address=99).allocation(LENGTH * (STEPS + 1), 2, address=98)
    return made.build()


def names_of(trace: Trace, rows: pl.Series) -> list[str | None]:
    """The names of the events of these numbers."""
    names = trace.events["name"].to_list()
    return [None if row is None else names[row] for row in rows.to_list()]


CHOICES = [(0, 0), (1, 2), (3, 3), (0, STEPS - 1)]


@pytest.fixture(scope="module", params=CHOICES, ids=str)
def chosen(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param  # type: ignore[no-any-return]


def test_events_of_the_steps_stay_as_they_are_and_point_to_the_same_ones(
    chosen: tuple[int, int],
) -> None:
    part, before = (
        cut_trace_to_steps(whole(), chosen),
        whole().events.filter(pl.col("step").is_between(*chosen)),
    )
    for column in ("op", "launch"):
        assert names_of(part, part.events[column]) == names_of(whole(), before[column]), column
    new = ["event", "parent", "depth", "op", "launch"]
    assert part.events.drop(new).equals(before.drop(new))
    part.check()


def test_the_steps_are_roots_and_what_they_enclose_is_as_deep_as_it_is_in_them(
    chosen: tuple[int, int],
) -> None:
    part = cut_trace_to_steps(whole(), chosen)
    around = dict(zip(part.events["name"], names_of(part, part.events["parent"]), strict=True))
    depth = dict(part.events.select("name", "depth").rows())
    for step in range(chosen[0], chosen[1] + 1):
        assert (around[f"ProfilerStep#{step}"], depth[f"ProfilerStep#{step}"]) == (None, 0)
        assert (around[f"op{step}"], depth[f"op{step}"]) == (f"ProfilerStep#{step}", 1)
        assert (around[f"inner{step}"], depth[f"inner{step}"]) == (f"op{step}", 2)
        assert (around[f"other thread{step}"], depth[f"other thread{step}"]) == (None, 0)
        assert (around[f"kernel{step}"], depth[f"kernel{step}"]) == (None, 0)
    assert "around everything" not in around


@pytest.mark.parametrize(
    "frame", ["tensors", "copies", "python", "collectives", "kernels", "sources"]
)
def test_rows_about_events_are_those_of_the_events_left(
    frame: str, chosen: tuple[int, int]
) -> None:
    part, table = cut_trace_to_steps(whole(), chosen), whole().frames()[frame]
    inside = (
        whole().events["step"].is_between(*chosen).fill_null(value=False).gather(table["event"])
    )
    before, after = table.filter(inside), part.frames()[frame]
    assert before.height
    assert names_of(part, after["event"]) == names_of(whole(), before["event"])
    assert after.drop("event").equals(before.drop("event"))


def test_arrows_stay_where_both_ends_do(chosen: tuple[int, int]) -> None:
    part, table = cut_trace_to_steps(whole(), chosen), whole().flows
    steps = whole().events["step"]
    ends = [steps.gather(table[end]).is_between(*chosen).to_list() for end in ("source", "target")]
    before = table.filter([source and target for source, target in zip(*ends, strict=True)])
    assert before.height == 3 * (chosen[1] - chosen[0] + 1)
    for end in ("source", "target"):
        assert names_of(part, part.flows[end]) == names_of(whole(), before[end])
    assert part.flows["flow"].to_list() == before["flow"].to_list()


def test_moments_belong_to_the_steps_they_lie_in_the_end_not_included(
    chosen: tuple[int, int],
) -> None:
    part = cut_trace_to_steps(whole(), chosen)
    low, high = 1000 * LENGTH * (chosen[0] + 1), 1000 * LENGTH * (chosen[1] + 2)
    for frame in ("allocations", "counters", "marks"):
        times = [
            time for time in whole().frames()[frame]["time_ns"].to_list() if low <= time < high
        ]
        assert part.frames()[frame]["time_ns"].to_list() == times, frame
    inside = range(chosen[0], chosen[1] + 1)
    assert part.counters["value"].to_list() == [float(step) for step in inside]
    assert names_of(part, part.allocations.filter(bytes=512)["op"]) == [
        f"inner{step}" for step in inside
    ]
    assert part.allocations["address"].to_list() == [
        *([99] * (chosen[0] == 0)),
        *(step + 1 for step in inside),
    ]


def test_lanes_count_what_is_left_and_how_long_it_ran(chosen: tuple[int, int]) -> None:
    part = cut_trace_to_steps(whole(), chosen)
    events = part.events.select("lane", "start_ns", "nested_end_ns").rows()
    for lane in part.lanes.to_dicts():
        spans = sorted((start, end) for number, start, end in events if number == lane["lane"])
        busy, reached = 0, 0
        for start, end in spans:
            busy += max(0, end - max(start, reached))
            reached = max(reached, end)
        assert (lane["events"], lane["busy_ns"]) == (len(spans), busy), lane["name"]
    count = chosen[1] - chosen[0] + 1
    second_thread = part.lanes.filter(thread="2").to_dicts()[0]
    assert second_thread["busy_ns"] == sum(
        1000 * (50 + step) for step in range(chosen[0], chosen[1] + 1)
    )
    assert part.lanes.filter(thread="1")["busy_ns"].to_list() == [count * LENGTH * 1000]
    assert part.lanes.drop("events", "busy_ns").equals(whole().lanes.drop("events", "busy_ns"))


@pytest.mark.parametrize("first", [(0, STEPS - 1), (-9, 99), (1, 3), (1, 2)])
def test_a_part_of_a_part_is_a_part_of_the_whole(first: tuple[int, int]) -> None:
    twice, once = (
        cut_trace_to_steps(cut_trace_to_steps(whole(), first), (1, 2)),
        cut_trace_to_steps(whole(), (1, 2)),
    )
    for name, frame in once.frames().items():
        assert twice.frames()[name].equals(frame), name


def test_of_no_step_nothing_is_left_but_lanes_and_devices() -> None:
    part = cut_trace_to_steps(whole(), (7, 9))
    part.check()
    kept = {name: frame.height for name, frame in part.frames().items() if frame.height}
    assert kept == {"lanes": whole().lanes.height, "devices": whole().devices.height}
    assert part.lanes["events"].sum() == part.lanes["busy_ns"].sum() == 0
    assert (part.meta, part.notices) == (whole().meta, whole().notices)


def test_the_whole_is_not_changed() -> None:
    before = {name: frame.clone() for name, frame in whole().frames().items()}
    cut_trace_to_steps(whole(), (1, 1))
    assert all(frame.equals(before[name]) for name, frame in whole().frames().items())


@pytest.mark.parametrize(
    ("chosen_steps", "message"),
    [
        ((9, 9), "step 9 is not in this run; it has 3 to 8"),
        ((0, 2), "steps 0 to 2 are not in this run; it has 3 to 8"),
        ((5, 6), "steps 5 to 6 are not in this run; it has 3 to 8"),
        ((4, 3), "steps 4 to 3 are not in this run; it has 3 to 8"),
    ],
)
def test_steps_that_no_rank_has_are_refused_with_those_of_all_ranks(
    chosen_steps: tuple[int, int], message: str
) -> None:
    ranks = [TraceBuilder(rank=rank, world_size=2).op("aten::mm", 0, 5) for rank in range(2)]
    for rank, step in ((0, 7), (0, 8), (1, 3), (1, 4)):
        ranks[rank].step(step, 100 * step, 100)
    session = Session(tuple(made.build() for made in ranks), "two")
    with pytest.raises(UsageError) as caught:
        cut_session_to_steps(session, chosen_steps)
    assert (caught.value.slug, caught.value.message) == ("no-such-step", message)
    assert [
        trace.steps["step"].to_list() for trace in cut_session_to_steps(session, (4, 7)).traces
    ] == [[7], [4]]
