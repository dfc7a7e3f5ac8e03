"""Made jobs: the simulation follows its rules, worked out by hand, and its traces show what happened."""

from __future__ import annotations

import pytest

from support.jobs import Change, Clock, Job, Rank, Recipe, Span, program as do, training_job
from support.jobs.training import DELAY, SYNC

LAUNCH = {"cost": 5, "latency": 7, "gap": 1, "back": 3}


def kernel(name: str, duration: int, stream: int = 7, **more) -> do.Submit:
    return do.Submit(name, "kernel", stream, duration, **(LAUNCH | more))


def spans_of(*threads: list, change: Change | None = None, limit: int = 1022) -> dict[str, Span]:
    run = Job([Rank(0, [list(thread) for thread in threads], queue_limit=limit)]).run(change)
    return {span.name: span for span in run.spans}


def test_a_kernel_waits_for_its_launch_then_for_its_stream():
    found = spans_of([kernel("a", 100), kernel("b", 50)])
    assert (found["a"].start, found["a"].end) == (7, 107)
    assert (found["b"].start, found["b"].end) == (108, 158)  # after a, and the gap
    assert found["cudaLaunchKernel"].end == 10


def test_a_synchronisation_returns_after_what_it_awaits_or_after_its_own_cost():
    late = spans_of([kernel("a", 100), do.Synchronize(do.DEVICE, 4, 6)])
    assert late["cudaDeviceSynchronize"].end == 107 + 6
    early = spans_of([kernel("a", 1), do.Work(100), do.Synchronize(do.STREAM, 4, 6)])
    assert (early["cudaStreamSynchronize"].start, early["cudaStreamSynchronize"].end) == (105, 109)


def test_a_synchronisation_that_is_left_out_does_not_wait():
    wait = do.Synchronize(do.DEVICE, 4, 6, label="x")
    found = spans_of([kernel("a", 100), wait], change=Change(without=frozenset({"x"})))
    assert found["cudaDeviceSynchronize"].end == 9


def test_an_event_holds_back_another_stream_and_a_thread():
    program = [
        kernel("a", 100),
        do.Record("e", 7, 2),
        do.StreamWait("e", 9, 2, 4),
        kernel("b", 10, stream=9),
    ]
    found = spans_of([*program, do.Synchronize(do.EVENT, 1, 6, event="e")])
    assert found["b"].start == 107 + 4
    assert found["cudaEventSynchronize"].end == 107 + 6


def test_a_launch_waits_for_room_in_its_queue():
    found = spans_of([kernel("a", 100), kernel("b", 100), kernel("c", 100)], limit=2)
    assert found["cudaLaunchKernel"].end == 107 + 3  # the third: until a is done, and its way back
    assert found["c"].start == found["b"].end + 1


def test_a_copy_that_blocks_holds_its_call():
    copy = do.Submit(
        "Memcpy DtoH (Device -> Pageable)", "copy", 7, 30, **LAUNCH, blocking=True, size=4
    )
    assert spans_of([copy])["cudaMemcpyAsync"].end == 7 + 30 + 3


def test_threads_hand_over():
    main = [
        do.Work(20),
        do.Post("go"),
        do.Await("done", 5),
        do.Begin("after"),
        do.Work(1),
        do.End(),
    ]
    other = [do.Await("go", 3), do.Begin("work"), do.Work(40), do.End(), do.Post("done")]
    found = spans_of(main, other)
    assert (found["work"].start, found["work"].end) == (23, 63)
    assert found["after"].start == 68


def test_a_collective_ends_a_transfer_after_the_last_has_come():
    def part(rank: int, before: int) -> Rank:
        meeting = do.Meeting("allreduce", "0", (0, 1), 0, 1, 25)
        return Rank(rank, [[do.Work(before), kernel("nccl", 0, meeting=meeting)]])

    run = Job([part(0, 0), part(1, 100)]).run()
    kernels = [span for span in run.spans if span.kind == "kernel"]
    assert {(span.rank, span.start, span.end) for span in kernels} == {(0, 7, 132), (1, 107, 132)}
    faster = Job([part(0, 0), part(1, 100)]).run(Change(collectives=0.2))
    assert faster.window_ns == 112


def test_threads_that_wait_for_ever_are_an_error():
    with pytest.raises(ValueError, match="wait for what never comes"):
        spans_of([do.Await("never", 1)])


def test_changes_apply_to_their_own_things():
    program = [do.Work(10, "slow"), do.Work(30), kernel("a", 100)]
    assert spans_of(program, change=Change(kernels=0.5))["a"].end == 40 + 7 + 50
    assert spans_of(program, change=Change(host=0.5))["a"].start == 20 + 7
    assert spans_of(program, change=Change(without=frozenset({"slow"})))["a"].start == 30 + 7


def test_the_same_recipe_makes_the_same_job_and_another_seed_another():
    one, again, other = (training_job(Recipe(seed=seed)).run().window_ns for seed in (1, 1, 2))
    assert one == again != other


def test_traces_show_the_spans_on_each_ranks_clock():
    recipe = Recipe(
        steps=1, layers=2, ranks=2, item=True, clocks={1: Clock("host1", 5_000_000, 1e-5)}
    )
    run = training_job(recipe).run()
    traces = [builder.build() for builder in run.traces(sync_records=True)]
    for rank, trace in enumerate(traces):
        trace.check()
        work = [span for span in run.spans if span.rank == rank and span.stream is not None]
        assert trace.gpu_work().height == len(work)
        assert trace.gpu_work()["launch"].null_count() == 0
        assert trace.meta.rank == rank
        assert trace.meta.world_size == 2
    first = [
        min(s.start for s in run.spans if s.rank == rank and s.stream is not None)
        for rank in (0, 1)
    ]
    shown = [int(trace.gpu_work()["start_ns"].min()) for trace in traces]
    assert shown[1] - shown[0] == first[1] - first[0] + 5_000_000 + round(1e-5 * first[1])
    assert traces[0].steps.height == 1
    assert set(traces[1].collectives["kind"]) == {"all_reduce"}
    assert traces[0].syncs.height > 0


@pytest.mark.parametrize("label", [SYNC, DELAY])
def test_recipes_label_what_can_be_left_out(label: str):
    job = training_job(Recipe(sync="device", delay_us={0: 900}, kernel_us=100))
    assert job.run(Change(without=frozenset({label}))).window_ns < job.run().window_ns
