"""Why a GPU was idle: one small trace per cause; times in microseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from traceloom.analyze import idle
from traceloom.analyze.idle import CAUSES, longest_gaps
from traceloom.testing import TraceBuilder


def first() -> TraceBuilder:
    """A kernel from 10 to 20 whose launch is known, on a thread whose whole time is an annotation."""
    return (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 4, correlation=1)
        .kernel("one", 10, 10, correlation=1)
    )


def causes(builder: TraceBuilder) -> dict[str, int]:
    """Idle microseconds by cause."""
    return {row["cause"]: row["idle_ns"] / 1000 for row in idle(builder.build()).totals.to_dicts()}


def parts(builder: TraceBuilder) -> list[dict[str, Any]]:
    return idle(builder.build()).gaps.to_dicts()


def test_a_late_launch_splits_the_gap_into_the_host_and_the_launch() -> None:
    builder = (
        first().launch("cudaLaunchKernel", 50, 4, correlation=2).kernel("two", 57, 5, correlation=2)
    )
    assert causes(builder) == {"host_unobserved": 30, "launch_latency": 7}


def test_a_launch_call_that_takes_long_is_the_hosts() -> None:
    builder = (
        first()
        .launch("cudaLaunchKernel", 50, 400, correlation=2)
        .kernel("two", 457, 5, correlation=2)
    )
    assert causes(builder) == {"host_unobserved": 30, "host_launch": 400, "launch_latency": 7}
    loads = (
        first()
        .launch("cudaLaunchKernel", 50, 6_000, correlation=2)
        .kernel("two", 6_057, 5, correlation=2)
    )
    assert causes(loads) == {
        "host_unobserved": 30,
        "host_setup": 6_000,
        "launch_latency": 7,
    }


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaFree", "hipFree", "cuMemMap"])
def test_memory_that_is_taken_or_given_back_is_no_wait(call: str) -> None:
    builder = first().op("aten::empty", 21, 90)
    builder.launch(call, 30, 60, correlation=9, flow=False)
    builder.launch("cudaLaunchKernel", 120, 4, correlation=2).kernel("two", 127, 5, correlation=2)
    assert causes(builder) == {
        "host_unobserved": 10,
        "host_op": 30,
        "host_allocation": 60,
        "launch_latency": 7,
    }


def test_work_behind_what_was_launched_before_the_recording_has_no_cause_in_it() -> None:
    def wait(stream: int, launched: float) -> dict[str, int]:
        builder = first().launch("cudaLaunchKernel", launched, 4, correlation=2)
        builder.kernel("two", 5_000, 10, correlation=2, stream=stream)
        return causes(builder.op("aten::mm", 9_000, 10))

    assert wait(8, 14)["launch_not_recorded"] == 4_980
    assert "launch_not_recorded" not in wait(7, 14)  # the stream had ended what was before
    assert "launch_not_recorded" not in wait(8, 2_000)


def test_the_host_part_is_split_by_the_innermost_activity_of_the_launching_thread() -> None:
    builder = first().python("train.py(3): main", 0, 100).op("aten::mm", 30, 40)
    builder.launch("cudaMemGetInfo", 24, 2, correlation=8, flow=False)
    builder.launch("cudaStreamSynchronize", 26, 3, correlation=9, flow=False)
    builder.launch("cudaLaunchKernel", 50, 4, correlation=2).kernel("two", 57, 5, correlation=2)
    assert causes(builder) == {
        "host_op": 20,
        "host_python": 5,  # 20-24 and 29-30
        "host_blocking_call": 3,
        "host_launch": 2,
        "launch_latency": 7,
    }
    named = {
        row["cause"]: (row["host_activity"], row["start_ns"] // 1000, row["evidence"])
        for row in parts(builder)
    }
    assert named["host_python"] == ("train.py(3): main", 20, "correlated")
    assert named["host_op"] == ("aten::mm", 30, "correlated")
    assert named["host_blocking_call"] == ("cudaStreamSynchronize", 26, "correlated")
    assert named["launch_latency"] == (None, 50, "correlated")


def test_everything_inside_the_loading_of_a_batch_is_data_loading() -> None:
    builder = first().annotation(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 22, 20
    )
    builder.op("aten::stack", 25, 10)
    builder.launch("cudaLaunchKernel", 45, 4, correlation=2).kernel("two", 50, 5, correlation=2)
    assert causes(builder) == {"host_data_loading": 20, "host_unobserved": 5, "launch_latency": 5}


def test_a_garbage_collection_in_sight_is_named() -> None:
    builder = first().python("train.py(3): main", 0, 100).python("Python GC", 25, 15)
    builder.launch("cudaLaunchKernel", 45, 4, correlation=2).kernel("two", 50, 5, correlation=2)
    assert causes(builder) == {
        "host_garbage_collection": 15,
        "host_python": 10,
        "launch_latency": 5,
    }


def test_what_the_collector_calls_is_garbage_collection_too() -> None:
    builder = (
        first()
        .python("<built-in function collect>", 20, 20)
        .python("cache.py(3): _finalize", 25, 10)
    )
    builder.launch("cudaLaunchKernel", 45, 4, correlation=2).kernel("two", 50, 5, correlation=2)
    assert causes(builder) == {
        "host_garbage_collection": 20,
        "host_unobserved": 5,
        "launch_latency": 5,
    }


@pytest.mark.parametrize(
    "frame",
    [
        "<built-in method acquire of _thread.lock object at 0x7f00>",
        "<built-in method acquire of _thread.RLock object at 0x7f00>",
        "threading.py(324): wait",
        "python3.12/multiprocessing/synchronize.py(95): __enter__",
        "queue.py(154): get",
        "Lock.acquire",
        "futex_wait",
    ],
)
def test_a_lock_in_sight_is_named(frame: str) -> None:
    builder = (
        first()
        .python("train.py(3): main", 0, 100)
        .python(frame, 25, 15)
        .python("inner.py(1): spin", 30, 5)
    )
    builder.launch("cudaLaunchKernel", 45, 4, correlation=2).kernel("two", 50, 5, correlation=2)
    assert causes(builder) == {"host_lock": 15, "host_python": 10, "launch_latency": 5}
    assert (
        next(row for row in parts(builder) if row["cause"] == "host_lock")["host_activity"] == frame
    )


@pytest.mark.parametrize(
    "frame", ["locking.py(3): unlock", "<built-in method release of _thread.lock object>", "blocks"]
)
def test_what_only_sounds_like_a_lock_is_none(frame: str) -> None:
    builder = first().python(frame, 20, 25)
    builder.launch("cudaLaunchKernel", 45, 4, correlation=2).kernel("two", 50, 5, correlation=2)
    assert causes(builder) == {"host_python": 25, "launch_latency": 5}


def test_an_annotation_alone_is_unobserved_but_named() -> None:
    builder = first().annotation("my region", 0, 100)
    builder.launch("cudaLaunchKernel", 45, 4, correlation=2).kernel("two", 50, 5, correlation=2)
    row = parts(builder)[0]
    assert (row["cause"], row["host_activity"], row["evidence"]) == (
        "host_unobserved",
        "my region",
        "inferred",
    )


def test_where_the_launching_thread_shows_nothing_the_main_thread_is_asked() -> None:
    builder = first().python("train.py(3): main", 0, 40)
    builder.op("autograd::engine::evaluate_function: Mm", 35, 20, thread=2)
    builder.launch("cudaLaunchKernel", 45, 4, correlation=2, thread=2).kernel(
        "two", 50, 5, correlation=2
    )
    found = {row["cause"]: (row["duration_ns"] // 1000, row["evidence"]) for row in parts(builder)}
    assert found == {
        "host_python": (15, "inferred"),
        "host_op": (10, "correlated"),
        "launch_latency": (5, "correlated"),
    }


def test_that_the_main_thread_waits_for_autograd_explains_nothing() -> None:
    builder = first().python("<built-in method run_backward of torch._C._EngineBase object>", 0, 90)
    builder.launch("cudaLaunchKernel", 45, 4, correlation=2, thread=2).kernel(
        "two", 50, 5, correlation=2
    )
    assert causes(builder) == {"host_unobserved": 25, "launch_latency": 5}


def test_a_launch_under_way_when_the_gap_began_is_launch_latency() -> None:
    builder = (
        first().launch("cudaLaunchKernel", 18, 5, correlation=2).kernel("two", 26, 5, correlation=2)
    )
    assert causes(builder) == {"launch_latency": 6}


def test_work_that_starts_long_after_its_launch_returned_is_unexplained_from_there() -> None:
    builder = (
        first()
        .launch("cudaLaunchKernel", 30, 5, correlation=2)
        .kernel("two", 235, 5, correlation=2)
    )
    assert causes(builder) == {"unexplained": 200, "host_unobserved": 10, "launch_latency": 5}


def test_queued_work_follows_kernel_to_kernel_when_the_pause_is_short() -> None:
    builder = (
        first().launch("cudaLaunchKernel", 5, 4, correlation=2).kernel("two", 22, 5, correlation=2)
    )
    assert causes(builder) == {"kernel_to_kernel": 2}
    assert parts(builder)[0]["evidence"] == "inferred"


def test_queued_work_that_is_late_for_no_known_reason_is_unexplained() -> None:
    builder = (
        first().launch("cudaLaunchKernel", 5, 4, correlation=2).kernel("two", 60, 5, correlation=2)
    )
    assert causes(builder) == {"unexplained": 40}
    assert parts(builder)[0]["evidence"] == "assumed"


def test_a_wait_for_the_stream_that_ran_before_is_a_dependency() -> None:
    builder = (
        first()
        .launch("cudaLaunchKernel", 4, 1, correlation=5)
        .kernel("zero", 6, 2, correlation=5, stream=9)
    )
    builder.launch("cudaStreamWaitEvent", 6, 1, correlation=6, flow=False)
    builder.launch("cudaLaunchKernel", 8, 2, correlation=2).kernel(
        "two", 24, 5, correlation=2, stream=9
    )
    found = parts(builder)
    assert [(row["cause"], row["evidence"]) for row in found if row["start_ns"] == 20_000] == [
        ("dependency", "inferred")
    ]


def test_a_recorded_wait_makes_the_dependency_measured() -> None:
    builder = (
        first()
        .launch("cudaLaunchKernel", 4, 1, correlation=5)
        .kernel("zero", 6, 2, correlation=5, stream=9)
    )
    builder.launch("cudaStreamWaitEvent", 6, 1, correlation=6, flow=False)
    builder.sync("Stream Wait Event", 6, 1, stream=9, correlation=6)
    builder.launch("cudaLaunchKernel", 8, 2, correlation=2).kernel(
        "two", 24, 5, correlation=2, stream=9
    )
    found = parts(builder)
    assert [(row["cause"], row["evidence"]) for row in found if row["start_ns"] == 20_000] == [
        ("dependency", "measured")
    ]


def test_the_recorded_wait_names_its_producer() -> None:
    builder = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 1, correlation=5)
        .kernel("own", 6, 2, correlation=5, stream=9)
    )
    builder.launch("cudaLaunchKernel", 1, 1, correlation=1).kernel(
        "awaited", 10, 50, correlation=1, stream=7
    )
    builder.launch("cudaEventRecord", 3, 1, correlation=3, flow=False)
    builder.launch("cudaLaunchKernel", 4, 1, correlation=4).kernel(
        "not awaited", 10, 52, correlation=4, stream=8
    )
    builder.launch("cudaStreamWaitEvent", 6, 1, correlation=6, flow=False)
    builder.sync(
        "Stream Wait Event",
        6,
        1,
        stream=9,
        correlation=6,
        wait_on_stream=7,
        wait_on_cuda_event_record_corr_id=3,
    )
    builder.launch("cudaLaunchKernel", 8, 2, correlation=2).kernel(
        "two", 70, 5, correlation=2, stream=9
    )
    trace = builder.build()
    name = trace.events["name"]
    row = idle(trace).gaps.filter(start_ns=62_000).to_dicts()[0]
    assert (row["cause"], row["evidence"], name[row["producer"]]) == (
        "dependency",
        "measured",
        "awaited",
    )
    assert name[row["wait"]] == "Stream Wait Event"


def test_without_a_record_the_producer_is_the_other_streams_work_that_ended_last() -> None:
    builder = (
        first()
        .launch("cudaLaunchKernel", 4, 1, correlation=5)
        .kernel("zero", 6, 2, correlation=5, stream=9)
    )
    builder.launch("cudaStreamWaitEvent", 6, 1, correlation=6, flow=False)
    builder.launch("cudaLaunchKernel", 8, 2, correlation=2).kernel(
        "two", 24, 5, correlation=2, stream=9
    )
    trace = builder.build()
    name = trace.events["name"]
    row = longest_gaps(trace, idle(trace), 1).to_dicts()[0]
    assert (row["cause"], row["evidence"], row["producer_name"]) == (
        "dependency",
        "inferred",
        "one",
    )
    assert (row["wait_name"], row["launch_name"]) == ("cudaStreamWaitEvent", "cudaLaunchKernel")
    assert (row["before_name"], row["after_name"]) == ("one", "two")
    assert name[row["producer"]] == "one"


def test_the_longest_gaps_come_first_with_their_main_cause_and_its_stack() -> None:
    builder = first().python("train.py(3): main", 0, 300).op("aten::mm", 30, 40)
    builder.launch("cudaLaunchKernel", 75, 4, correlation=2).kernel("two", 82, 5, correlation=2)
    builder.op("aten::item", 90, 100).launch(
        "cudaStreamSynchronize", 95, 90, correlation=9, flow=False
    )
    builder.launch("cudaLaunchKernel", 200, 4, correlation=3).kernel("three", 207, 5, correlation=3)
    trace = builder.build()
    rows = longest_gaps(trace, idle(trace)).to_dicts()
    assert [(row["start_ns"] // 1000, row["duration_ns"] // 1000) for row in rows] == [
        (87, 120),
        (20, 62),
    ]
    assert [(row["cause"], row["cause_ns"] // 1000) for row in rows] == [
        ("host_blocking_call", 90),
        ("host_op", 40),
    ]
    assert [row["host_activity"] for row in rows] == ["cudaStreamSynchronize", "aten::mm"]
    assert [row["stack"] for row in rows] == [
        ["train.py(3): main", "aten::item"],
        ["train.py(3): main"],
    ]
    assert longest_gaps(trace, idle(trace), 1).height == 1


def test_a_wait_that_a_call_of_another_stream_made_does_not_count_where_waits_are_recorded() -> (
    None
):
    builder = (
        first()
        .launch("cudaLaunchKernel", 4, 1, correlation=5)
        .kernel("zero", 6, 2, correlation=5, stream=9)
    )
    builder.launch("cudaStreamWaitEvent", 6, 1, correlation=6, flow=False)
    builder.sync("Stream Wait Event", 6, 1, stream=30, correlation=6)
    builder.launch("cudaLaunchKernel", 8, 2, correlation=2).kernel(
        "two", 24, 5, correlation=2, stream=9
    )
    assert [row["cause"] for row in parts(builder) if row["start_ns"] == 20_000] == [
        "kernel_to_kernel"
    ]


def test_a_long_wait_needs_something_that_ended_when_it_did() -> None:
    def waiting() -> TraceBuilder:
        builder = first().launch("cudaStreamWaitEvent", 5, 1, correlation=6, flow=False)
        return builder.launch("cudaLaunchKernel", 7, 2, correlation=2).kernel(
            "two", 90, 5, correlation=2
        )

    assert causes(waiting()) == {"unexplained": 70}
    other = waiting().kernel("elsewhere", 15, 70, device=1)
    assert causes(other) == {"dependency": 70}


def test_inner_gaps_of_a_graph_are_its_own() -> None:
    builder = first().launch("cudaGraphLaunch", 40, 4, correlation=2)
    builder.kernel("two", 50, 5, correlation=2).kernel("three", 60, 5, correlation=2).kernel(
        "four", 200, 5, correlation=2
    )
    assert causes(builder) == {
        "graph_internal": 5 + 135,
        "host_unobserved": 20,
        "launch_latency": 10,
    }


def test_orphans_say_that_their_launch_is_not_recorded() -> None:
    builder = TraceBuilder().kernel("one", 10, 10).kernel("two", 30, 10)
    assert causes(builder) == {"launch_not_recorded": 10}
    row = parts(builder)[0]
    assert (row["evidence"], row["launch"]) == (None, None)


def test_a_copy_that_blocks_its_caller_was_submitted_when_the_call_began() -> None:
    builder = first().launch("cudaMemcpyAsync", 15, 40, correlation=2)
    builder.copy("Memcpy DtoH (Device -> Pageable)", 25, 20, bytes=1, correlation=2)
    assert causes(builder) == {"kernel_to_kernel": 5}


def test_a_kernel_before_its_own_launch_is_clipped_not_counted_twice() -> None:
    builder = (
        first()
        .launch("cudaLaunchKernel", 50, 4, correlation=2)
        .kernel("two", 40, 30, correlation=2)
    )
    assert causes(builder) == {"host_unobserved": 20}


def test_a_gap_across_a_step_border_is_cut_there() -> None:
    builder = first().step(1, 0, 30).step(2, 30, 70)
    builder.launch("cudaLaunchKernel", 50, 4, correlation=2).kernel("two", 57, 5, correlation=2)
    result = idle(builder.build())
    rows = [
        (r["step"], r["cause"], r["idle_ns"] // 1000, r["gap_count"])
        for r in result.causes.to_dicts()
    ]
    assert rows == [
        (1, "host_unobserved", 10, 1),
        (2, "host_unobserved", 20, 1),
        (2, "launch_latency", 7, 1),
    ]
    assert result.gaps["gap"].n_unique() == 1


def test_gaps_name_the_work_around_them() -> None:
    trace = (
        first()
        .launch("cudaLaunchKernel", 50, 4, correlation=2)
        .kernel("two", 57, 5, correlation=2)
        .build()
    )
    row = idle(trace).gaps.to_dicts()[0]
    names = trace.events["name"]
    assert (names[row["before"]], names[row["after"]]) == ("one", "two")
    assert trace.events["start_ns"][row["launch"]] == 50_000


@pytest.mark.parametrize(
    "builder", [TraceBuilder(), TraceBuilder(device_name=None).op("aten::mm", 0, 10), first()]
)
def test_a_trace_without_gaps_has_frames_without_rows(builder: TraceBuilder) -> None:
    result = idle(builder.build())
    assert result.gaps.height == result.causes.height == result.totals.height == 0


def test_every_cause_has_a_meaning_and_stands_in_the_documentation() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "concepts" / "idle-time.md").read_text(
        encoding="utf-8"
    )
    assert all(CAUSES.values())
    assert [cause for cause in CAUSES if f"`{cause}`" not in page] == []
