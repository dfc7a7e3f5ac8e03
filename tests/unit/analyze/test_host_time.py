"""The host account: phases by the outermost event, activities by the innermost, sums exact."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from traceloom.analyze import host
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def account(trace: Trace, *, main: bool = True) -> dict[tuple[Any, ...], int]:
    """Nanoseconds of the main thread (or of the others) by step, phase and activity."""
    result = host(trace)
    lanes = result.threads.filter(pl.col("main") == main).select("lane")
    rows = result.account.join(lanes, on="lane", how="semi")
    return {(step, phase, activity): ns for step, phase, activity, ns in rows.drop("lane").rows()}


def cpu() -> TraceBuilder:
    return TraceBuilder(device_name=None)


def test_an_op_inside_an_optimizer_step_is_optimizer_time_spent_in_ops() -> None:
    trace = cpu().annotation("Optimizer.step#SGD.step", 0, 10).op("aten::add_", 2, 3).build()
    assert account(trace) == {
        (None, "optimizer", "op"): 3000,
        (None, "optimizer", "unobserved"): 7000,
    }


def test_the_outermost_phase_counts() -> None:
    trace = (
        cpu()
        .python("torch/_tensor.py(500): backward", 0, 10)
        .op("autograd::engine::evaluate_function: MmBackward0", 1, 8, sequence=1, forward_thread=1)
        .annotation("nccl:all_reduce", 2, 3)
        .build()
    )
    assert account(trace) == {(None, "backward", "python"): 2000, (None, "backward", "op"): 8000}


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "loading"),
        ("Optimizer.zero_grad#AdamW.zero_grad", "optimizer"),
        ("DistributedDataParallel.forward", "forward"),
        ("gloo:all_reduce", "communication"),
        ("## backward ##", "backward"),
        ("my forward pass", "forward"),
        ("forward-backward", "other"),
        ("evaluation", "other"),
    ],
)
def test_annotations_say_their_phase(name: str, phase: str) -> None:
    result = account(cpu().annotation(name, 0, 10).op("aten::mm", 4, 2).build())
    assert {key[1] for key in result} == {phase}
    assert sum(result.values()) == 10_000


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("torch/utils/data/dataloader.py(700): __next__", "loading"),
        ("/usr/lib/python3/site-packages/torch/optim/adamw.py(200): step", "optimizer"),
        ("torch/autograd/__init__.py(300): backward", "backward"),
        ("nn.Module: Linear_0", "forward"),
        ("train.py(3): main", "other"),
        ("mytorch/optimal.py(1): f", "other"),
    ],
)
def test_python_frames_say_their_phase(name: str, phase: str) -> None:
    assert account(cpu().python(name, 0, 10).build()) == {(None, phase, "python"): 10_000}


def test_calls_are_launches_unless_they_block() -> None:
    trace = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 5, correlation=1)
        .kernel("k", 6, 10, correlation=1)
        .launch("cudaStreamSynchronize", 5, 15, correlation=2, flow=False)
        .build()
    )
    assert account(trace) == {
        (None, "other", "launch"): 5000,
        (None, "other", "blocking_call"): 15_000,
    }


def test_an_asynchronous_copy_blocks_where_it_returns_after_its_copy() -> None:
    def copied(call_us: float) -> dict[tuple[Any, ...], int]:
        name = "Memcpy DtoH (Device -> Pageable)"
        builder = TraceBuilder().launch("cudaMemcpyAsync", 0, call_us, correlation=1)
        return account(
            builder.copy(name, 5, 10, bytes=4, correlation=1).op("aten::end", 30, 1).build()
        )

    assert copied(16)[None, "other", "blocking_call"] == 16_000
    assert copied(3)[None, "other", "launch"] == 3000


def test_waiting_in_python_is_a_blocking_call() -> None:
    trace = (
        cpu()
        .python("train.py(1): f", 0, 10)
        .python("<built-in method poll of select.poll object at 0x7f>", 2, 5)
    )
    assert account(trace.build()) == {
        (None, "other", "python"): 5000,
        (None, "other", "blocking_call"): 5000,
    }


def test_a_region_takes_the_activity_around_it() -> None:
    trace = cpu().python("train.py(1): f", 0, 10).annotation("my region", 2, 6).op("aten::mm", 3, 1)
    assert account(trace.build()) == {(None, "other", "python"): 9000, (None, "other", "op"): 1000}


def test_scopes_are_regions_not_operators() -> None:
    trace = cpu().op("traceloom.scope:block", 0, 10).op("aten::mm", 2, 3).build()
    assert account(trace) == {(None, "other", "unobserved"): 7000, (None, "other", "op"): 3000}


def test_time_is_cut_at_the_bounds_of_steps() -> None:
    trace = (
        cpu().op("before", 0, 2).mark(1, 10).op("aten::mm", 15, 10).mark(2, 20).mark(3, 30).build()
    )
    result = account(trace)
    assert result[1, "forward", "op"] == 5000
    assert result[2, "forward", "op"] == 5000
    assert result[None, "other", "op"] == 2000
    assert [sum(ns for key, ns in result.items() if key[0] == step) for step in (1, 2)] == [
        10_000,
        10_000,
    ]
    assert sum(result.values()) == 30_001


def test_ops_with_a_sequence_number_are_forward_and_others_of_a_training_step_are_not() -> None:
    trace = (
        cpu()
        .step(1, 0, 100)
        .op("aten::mm", 0, 10, sequence=1)
        .op("aten::item", 20, 10)
        .op(
            "autograd::engine::evaluate_function: MmBackward0", 40, 10, sequence=1, forward_thread=1
        )
        .op("aten::_foreach_norm", 60, 10)
        .annotation("Optimizer.step#SGD.step", 80, 10)
        .build()
    )
    result = account(trace)
    assert result[1, "forward", "op"] == 10_000
    assert result[1, "backward", "op"] == 10_000
    assert result[1, "other", "op"] == 20_000


def test_time_between_two_stretches_of_one_phase_belongs_to_it() -> None:
    trace = (
        cpu()
        .step(1, 0, 100)
        .op("aten::mm", 0, 10, sequence=1)
        .op("aten::arange", 12, 3)
        .op("aten::mm", 20, 10, sequence=2)
        .op(
            "autograd::engine::evaluate_function: MmBackward0", 50, 10, sequence=2, forward_thread=1
        )
        .op(
            "autograd::engine::evaluate_function: MmBackward0", 70, 10, sequence=1, forward_thread=1
        )
        .build()
    )
    assert account(trace) == {
        (1, "forward", "op"): 23_000,
        (1, "forward", "unobserved"): 7000,
        (1, "backward", "op"): 20_000,
        (1, "backward", "unobserved"): 10_000,
        (1, "other", "unobserved"): 40_000,
    }


def test_the_main_thread_is_in_the_backward_phase_while_the_autograd_thread_runs_it() -> None:
    trace = (
        cpu()
        .step(1, 0, 100)
        .op("aten::mm", 0, 10, sequence=1)
        .op(
            "autograd::engine::evaluate_function: MmBackward0",
            30,
            40,
            sequence=1,
            forward_thread=1,
            thread=2,
        )
        .build()
    )
    assert account(trace)[1, "backward", "unobserved"] == 40_000
    assert account(trace, main=False)[1, "backward", "op"] == 40_000


def test_unrecorded_time_while_a_helper_thread_communicates_is_communication() -> None:
    trace = (
        cpu()
        .step(1, 0, 100)
        .op("aten::mm", 0, 10)
        .annotation("gloo:all_reduce", 20, 30, thread=9)
        .build()
    )
    assert account(trace)[1, "communication", "unobserved"] == 30_000


def test_another_process_does_not_lend_its_phases() -> None:
    trace = cpu().step(1, 0, 100).op("aten::mm", 0, 10).build()
    assert (1, "communication", "unobserved") not in account(trace)


def test_an_autograd_thread_with_more_ops_is_not_the_main_thread() -> None:
    builder = cpu().op("aten::mm", 0, 10, sequence=1, thread=5)
    for index in range(4):
        name = "autograd::engine::evaluate_function: MmBackward0"
        builder.op(name, 20 + 10 * index, 5, sequence=1, forward_thread=1, thread=6)
    threads = host(builder.build()).threads
    assert threads.filter("main")["thread"].to_list() == ["5"]


def test_gpu_only_and_empty_traces_have_the_same_columns() -> None:
    gpu = host(TraceBuilder().kernel("k", 0, 5).build())
    none = host(TraceBuilder().build())
    some = host(cpu().op("aten::mm", 0, 1).build())
    assert gpu.threads.schema == none.threads.schema == some.threads.schema
    assert gpu.account.schema == none.account.schema == some.account.schema
    assert gpu.account.height == none.account.height == 0


def test_a_frame_around_the_whole_loop_opens_no_phase() -> None:
    trace = cpu().python("torch/optim/optimizer.py(514): wrapper", 0, 40)
    for number in range(3):
        trace.step(number, 10 * number, 10).annotation(
            "Optimizer.step#SGD.step", 10 * number + 6, 3
        )
    phases = {(step, phase) for step, phase, _ in account(trace.build())}
    assert phases == {(step, phase) for step in range(3) for phase in ("other", "optimizer")} | {
        (None, "other")
    }


def test_a_closure_inside_the_optimizer_is_forward_and_backward() -> None:
    built = cpu().step(1, 0, 100).annotation("Optimizer.step#LBFGS.step", 0, 100)
    built.op("aten::linear", 5, 20, sequence=3)
    built.op(
        "autograd::engine::evaluate_function: AddmmBackward0", 30, 40, sequence=3, forward_thread=1
    )
    built.op("aten::add_", 80, 10)
    account = host(built.build()).account
    by_phase = dict(
        account.group_by(pl.col("phase").cast(pl.String)).agg(pl.col("ns").sum()).rows()
    )
    assert by_phase == {"forward": 20_000, "backward": 40_000, "optimizer": 40_000}


def test_the_main_thread_waits_in_the_optimizer_for_the_backward_pass_of_another_thread() -> None:
    built = cpu().step(1, 0, 100).annotation("Optimizer.step#LBFGS.step", 0, 100)
    built.op("aten::linear", 5, 20, sequence=3).op("aten::add_", 80, 10)
    built.op(
        "autograd::engine::evaluate_function: MmBackward0",
        30,
        40,
        sequence=3,
        forward_thread=1,
        thread=2,
    )
    trace = built.build()
    told = host(trace)
    main = told.account.join(told.threads.filter("main").select("lane"), on="lane", how="semi")
    by_phase = dict(main.group_by(pl.col("phase").cast(pl.String)).agg(pl.col("ns").sum()).rows())
    assert by_phase == {"forward": 20_000, "backward": 40_000, "optimizer": 40_000}


def test_a_trace_without_a_backward_pass_keeps_its_optimizer() -> None:
    built = (
        cpu().step(1, 0, 100).annotation("Optimizer.step#SGD.step", 0, 100).op("aten::add_", 5, 20)
    )
    account = host(built.build()).account
    assert set(account["phase"].cast(pl.String)) == {"optimizer"}
