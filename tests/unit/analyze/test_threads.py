"""Threads: roles by what they record, time by activity, how many are active at once."""

from __future__ import annotations

import pytest

from traceloom.analyze import threads
from traceloom.testing import TraceBuilder

NODE = "autograd::engine::evaluate_function: MmBackward0"


def test_roles_are_told_by_what_threads_record() -> None:
    builder = (
        TraceBuilder()
        .op("aten::mm", 0, 10, sequence=1)
        .op(NODE, 20, 10, sequence=1, forward_thread=1, thread=2)
        .python("threading.py(1002): _bootstrap", 0, 90, thread=3)
        .python("torch/utils/data/_utils/pin_memory.py(30): _pin_memory_loop", 1, 80, thread=3)
        .python("threading.py(1002): _bootstrap", 0, 90, thread=4)
        .python("tqdm/_monitor.py(60): run", 1, 80, thread=4)
        .annotation("nccl:all_reduce", 5, 5, thread=5)
        .launch("cudaEventQuery", 5, 1, correlation=1, thread=6)
        .op("aten::add", 5, 1, thread=7)
        .op("GraphLowering.codegen (dynamo_timed)", 5, 1, thread=8)
        .python("torch/utils/data/_utils/fetch.py(51): fetch", 5, 1, thread=9)
    )
    found = threads(builder.build()).threads
    assert dict(found.select("thread", "role").rows()) == {
        "1": "main",
        "2": "autograd",
        "3": "pin_memory",
        "4": "python",
        "5": "communication",
        "6": "runtime",
        "7": "operators",
        "8": "compiler",
        "9": "data_loader",
    }
    says = dict(found.select("thread", "says").rows())
    assert (says["1"], says["2"], says["4"]) == (None, NODE, "tqdm/_monitor.py(60): run")
    assert found["role"][0] == "main"


def test_active_threads_are_counted_over_time_and_add_up_to_the_window() -> None:
    builder = (
        TraceBuilder()
        .step(1, 0, 50, thread=9)
        .step(2, 50, 50, thread=9)
        .op("aten::mm", 0, 60)
        .op("aten::mm", 40, 30, thread=2)
        .launch("cudaDeviceSynchronize", 70, 10, correlation=1, thread=2)
    )
    found = threads(builder.build())
    assert found.concurrency.rows() == [(1, 1, 40_000), (1, 2, 10_000), (2, 0, 30_000), (2, 1, 10_000), (2, 2, 10_000)]
    assert (found.most, found.mean) == (2, 0.9)
    assert found.curve.height == 200
    assert found.curve["active"].mean() == pytest.approx(0.9)
    assert found.curve["active"][:2].to_list() == [1.0, 1.0]


def test_activities_of_a_thread_add_up_to_the_window() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 60).launch("cudaMalloc", 10, 20, correlation=1).kernel("k", 80, 20)
    row = threads(builder.build()).threads.row(0, named=True)
    assert (row["op_ns"], row["blocking_call_ns"], row["unobserved_ns"]) == (40_000, 20_000, 40_000)
    assert (row["active_ns"], row["busy_ns"], row["window_ns"], row["launch_count"]) == (40_000, 60_000, 100_000, 1)


@pytest.mark.parametrize("builder", [TraceBuilder(), TraceBuilder().kernel("k", 0, 5), TraceBuilder().op("x", 5, 0)])
def test_columns_do_not_depend_on_the_trace(builder: TraceBuilder) -> None:
    some, none = threads(TraceBuilder().op("aten::mm", 0, 5).build()), threads(builder.build())
    for name in ("threads", "concurrency", "curve"):
        assert getattr(some, name).schema == getattr(none, name).schema
