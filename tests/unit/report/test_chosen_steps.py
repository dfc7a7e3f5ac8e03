"""A report of some steps or ranks: what it counts is the work of these, nothing is lost between them, times stay."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from support.reports import check_report
from traceloom.errors import UsageError
from traceloom.report import ReportOptions, build, selected
from traceloom.testing import TraceBuilder
from traceloom.trace.batch import cut_trace_to_steps
from traceloom.trace.session import Session

STEPS = 5
Document = dict[str, Any]


@cache
def made(seed: int) -> tuple[Session, dict[str, list[dict[str, Any]]]]:
    """One rank of steps with operators that nest, launches whose kernels run late, copies, allocations; and the same
    as plain rows with the step each belongs to."""
    chance = random.Random(seed)
    builder = TraceBuilder()
    rows: dict[str, list[dict[str, Any]]] = {"kernel": [], "op": [], "allocation": []}
    free = 0.0
    builder.op("aten::before", 0, 50)
    rows["op"].append({"name": "aten::before", "ns": 50_000, "step": None})
    at = 100.0
    for step in range(STEPS):
        length = chance.randrange(400, 900)
        builder.step(step, at, length)
        for number in range(chance.randrange(1, 4)):
            start = at + 10 + 120 * number
            name = f"aten::op{chance.randrange(3)}"
            builder.op(name, start, 100).op("aten::inner", start + 5, 40)
            rows["op"] += [
                {"name": name, "ns": 100_000, "step": step},
                {"name": "aten::inner", "ns": 40_000, "step": step},
            ]
            correlation = 100 * step + number
            builder.launch("cudaLaunchKernel", start + 50, 8, correlation=correlation)
            began, took = max(free, start + 60) + chance.randrange(0, 300), chance.randrange(5, 200)
            kernel = f"kernel{chance.randrange(2)}"
            builder.kernel(kernel, began, took, correlation=correlation)
            free = began + took
            rows["kernel"].append({"name": kernel, "ns": 1000 * took, "step": step})
            builder.allocation(start + 20, 512 * (number + 1), address=correlation + 1)
            rows["allocation"].append({"name": "", "ns": 0, "step": step})
        at += length
    builder.op("aten::after", at + 10, 50)
    rows["op"].append({"name": "aten::after", "ns": 50_000, "step": None})
    return Session((builder.build(),), "steps"), rows


@cache
def of_steps(seed: int, first: int, last: int) -> Document:
    return build(
        made(seed)[0], ReportOptions(steps=(first, last), only=("core", "copies", "launches"))
    )


def counted(rows: list[dict[str, Any]], first: int, last: int) -> dict[str, tuple[int, int]]:
    """Count and summed time by name of what belongs to these steps."""
    chosen = [row for row in rows if row["step"] is not None and first <= row["step"] <= last]
    names = Counter(row["name"] for row in chosen)
    return {
        name: (names[name], sum(row["ns"] for row in chosen if row["name"] == name))
        for name in names
    }


def told(rows: list[Document]) -> dict[str, tuple[int, int]]:
    return {row["name"]: (row["count"], row["total_ns"]) for row in rows}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chosen", [(0, 0), (2, 2), (1, 3), (0, STEPS - 1), (3, 99), (-5, 0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_kernels_and_operators_are_those_that_the_steps_launched(
    seed: int, chosen: tuple[int, int]
) -> None:
    rows = made(seed)[1]
    document = of_steps(seed, *chosen)
    assert told(document["kernels"]) == counted(rows["kernel"], *chosen)
    assert told(document["operators"]) == counted(rows["op"], *chosen)
    steps = [step["step"] for step in document["ranks"][0]["steps"]]
    assert steps == [step for step in range(STEPS) if chosen[0] <= step <= chosen[1]]


@pytest.mark.parametrize("seed", [0, 1])
def test_single_steps_add_up_to_all_steps(seed: int) -> None:
    whole = of_steps(seed, 0, STEPS - 1)
    parts = [of_steps(seed, step, step) for step in range(STEPS)]
    for key in ("kernels", "operators"):
        added: Counter[tuple[str, str]] = Counter()
        for part in parts:
            for row in part[key]:
                added[row["name"], "count"] += row["count"]
                added[row["name"], "total_ns"] += row["total_ns"]
        assert added == Counter(
            {(row["name"], name): row[name] for row in whole[key] for name in ("count", "total_ns")}
        )
    for field in ("window_ns", "busy_ns", "idle_ns", "compute_ns", "kernel_ns", "gpu_work_count"):
        of_parts = [
            part["ranks"][0]["devices"][0][field] for part in parts if part["ranks"][0]["devices"]
        ]
        assert sum(of_parts) == whole["ranks"][0]["devices"][0][field], field
    assert sum(part["answer"]["whole_ns"] for part in parts) == whole["answer"]["whole_ns"]


@pytest.mark.parametrize("step", range(STEPS))
def test_a_step_has_the_same_figures_alone_and_in_the_whole(step: int) -> None:
    whole, alone = of_steps(0, 0, STEPS - 1), of_steps(0, step, step)
    check_report(alone)
    (own,) = alone["ranks"][0]["steps"]
    same = next(row for row in whole["ranks"][0]["steps"] if row["step"] == step)
    # What ran on the device before the chosen step is not known of the part.
    unlike = {"start_ns": 0, "device_period_ns": None}
    assert own | unlike == same | unlike
    assert int(alone["epoch_ns"]) + own["start_ns"] == int(whole["epoch_ns"]) + same["start_ns"]


@pytest.mark.parametrize("chosen", [(0, 0), (1, 3), (4, 4)])
def test_a_cut_trace_is_a_whole_trace_of_its_own(chosen: tuple[int, int]) -> None:
    session, rows = made(1)
    part = cut_trace_to_steps(session.traces[0], chosen)
    part.check()
    assert part.events["event"].to_list() == list(range(part.events.height))
    assert sum(part.lanes["events"]) == part.events.height
    for name, frame in part.frames().items():
        if "event" in frame.columns and name != "events":
            assert frame["event"].is_between(0, part.events.height - 1).all()
    launched = part.gpu_work().drop_nulls("launch")
    assert launched.height == sum(count for count, _ in counted(rows["kernel"], *chosen).values())
    assert part.allocations.height == sum(
        count for count, _ in counted(rows["allocation"], *chosen).values()
    )
    parents = part.events.drop_nulls("parent")
    above = part.events["start_ns"].gather(parents["parent"])
    assert (above <= parents["start_ns"]).all()


def test_ranks_can_be_chosen_one_by_one_and_are_what_they_are_in_the_whole() -> None:
    builders = []
    for rank in range(3):
        builder = TraceBuilder(rank=rank, world_size=3)
        for step in range(2):
            builder.step(step, 1000 * step, 1000).op("aten::mm", 1000 * step + 10, 100 + rank)
            builder.launch("cudaLaunchKernel", 1000 * step + 20, 5, correlation=step)
            builder.kernel("gemm", 1000 * step + 40, 100 * (rank + 1), correlation=step)
        builders.append(builder.build())
    session = Session(tuple(builders), "three")
    whole = build(session, ReportOptions(only=("core",)))
    for chosen in ((0,), (2,), (0, 2)):
        document = build(session, ReportOptions(ranks=chosen, only=("core",)))
        assert document["ranks"] == [whole["ranks"][rank] for rank in chosen]
        total = sum(200_000 * (rank + 1) for rank in chosen)
        assert [(row["name"], row["total_ns"]) for row in document["kernels"]] == [("gemm", total)]
        assert document["kernels"][0]["fraction"] == 1


@pytest.mark.parametrize(
    ("options", "slug", "said"),
    [
        (ReportOptions(steps=(7, 7)), "no-such-step", "step 7 is not in this run; it has 0 to 4"),
        (
            ReportOptions(steps=(7, 9)),
            "no-such-step",
            "steps 7 to 9 are not in this run; it has 0 to 4",
        ),
        (ReportOptions(ranks=(3,)), "no-such-rank", "rank 3 is not in this run"),
        (
            ReportOptions(only=("kernelz",)),
            "no-such-section",
            "`kernelz` is no section of the report",
        ),
    ],
)
def test_what_is_not_there_cannot_be_chosen(options: ReportOptions, slug: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(made(0)[0], options)
    assert caught.value.slug == slug
    assert said in caught.value.message


def test_without_steps_there_is_none_to_choose() -> None:
    session = Session((TraceBuilder().op("aten::mm", 0, 10).build(),), "no steps")
    with pytest.raises(UsageError, match="it has no steps"):
        selected(session, ReportOptions(steps=(0, 3)))


def test_a_rank_that_lacks_the_step_has_no_events_and_is_no_error() -> None:
    short = TraceBuilder(rank=0, world_size=2).step(0, 0, 100).op("aten::mm", 10, 50)
    long = TraceBuilder(rank=1, world_size=2)
    for step in range(3):
        long.step(step, 100 * step, 100).op("aten::mm", 100 * step + 10, 50)
    document = build(Session((short.build(), long.build()), "uneven"), ReportOptions(steps=(2, 2)))
    check_report(document)
    assert [rank["event_count"] for rank in document["ranks"]] == [0, 2]
    assert [len(rank["steps"]) for rank in document["ranks"]] == [0, 1]
    assert told(document["operators"]) == {"aten::mm": (1, 50_000)}


@pytest.mark.parametrize("by_shape", [False, True])
def test_operators_by_shape_add_up_to_operators(by_shape: bool) -> None:
    builder = TraceBuilder()
    for number, size in enumerate((4, 4, 8, 16, 8)):
        builder.op("aten::mm", 100 * number, 50 + number, shapes=[[size, size]])
    document = build(
        Session((builder.build(),), "shapes"), ReportOptions(by_shape=by_shape, only=("core",))
    )
    rows = document["operators"]
    assert len(rows) == (3 if by_shape else 1)
    assert sum(row["count"] for row in rows) == 5
    assert sum(row["total_ns"] for row in rows) == 1000 * sum(50 + number for number in range(5))
    assert {row["shapes"] for row in rows} == (
        {"[[4,4]]", "[[8,8]]", "[[16,16]]"} if by_shape else {None}
    )
