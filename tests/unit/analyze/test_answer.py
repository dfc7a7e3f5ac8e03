"""The answer: one sentence, parts that add up to the whole."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import polars as pl
import pytest

from support.odd_traces import odd_trace
from traceloom.analyze import answer, gpu_time, host, idle
from traceloom.analyze.answer import _REASONS
from traceloom.analyze.gpu_time import build_device_account
from traceloom.analyze.idle import CAUSES
from traceloom.system.units import format_share
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace


def session(*traces: Trace) -> Session:
    return Session(traces, "run")


def gpu(rank: int = 0, world_size: int = 1) -> Trace:
    builder = TraceBuilder(rank=rank, world_size=world_size)
    for step in range(2):
        at = 100_000 * step
        builder.step(step, at, 100_000).python("train.py(1): f", at, 99_000)
        for index, start in enumerate((10_000, 60_000)):
            number = 10 * step + index + 1
            builder.launch("cudaLaunchKernel", at + start, 10, correlation=number)
            builder.kernel("gemm", at + start + 15, 30_000, correlation=number)
    return builder.build()


def cpu() -> Trace:
    return (
        TraceBuilder(device_name=None)
        .step(1, 0, 1000)
        .annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 100)
        .op("aten::mm", 100, 600)
        .op("aten::relu", 700, 200)
        .build()
    )


def test_gpu_parts_add_up_to_the_steps_of_all_devices() -> None:
    result = answer(session(gpu(0, 2), gpu(1, 2)))
    assert result.whole_ns == result.parts["ns"].sum() == 2 * 200_000_000
    assert dict(result.parts.group_by("kind").agg(result.parts["ns"].sum()).rows()).keys() == {
        "compute",
        "idle",
    }
    assert result.sentence.startswith(
        "Ranks 0–1, 2 steps of 100 ms: the 2 GPUs are computing 60.0 % of the time"
    )


def test_the_gpu_sentence_names_the_main_cause_of_idle_time() -> None:
    sentence = answer(session(gpu())).sentence
    assert sentence.startswith(
        "2 steps of 100 ms: GPU 0 is computing 60.0 % of the time and idle 40.0 %; the main cause"
    )


def test_a_run_on_the_cpu_tells_what_the_main_thread_did() -> None:
    result = answer(session(cpu()))
    assert result.whole_ns == result.parts["ns"].sum() == 1_000_000
    assert result.parts.select("label", "kind", "ns").rows() == [
        ("forward: operators", "op", 800_000),
        ("loading: nothing recorded", "unobserved", 100_000),
        ("other: nothing recorded", "unobserved", 100_000),
    ]
    assert result.sentence == (
        "1 step of 1.00 ms: 80.0 % of the time the CPU runs operators, mostly in the forward phase; "
        "the largest is aten::mm (75.0 % of that); 10.0 % is spent waiting on the DataLoader."
    )


def test_without_steps_the_whole_is_the_window() -> None:
    trace = TraceBuilder(device_name=None).op("aten::mm", 0, 300).build()
    result = answer(session(trace))
    assert result.whole_ns == 300_000
    assert result.sentence.startswith(
        "A window of 300 µs: 100 % of the time the CPU runs operators"
    )


def test_gpu_work_without_steps_is_told_from_first_to_last_work() -> None:
    trace = TraceBuilder().op("aten::mm", 0, 1000).kernel("k", 100, 30).kernel("k", 170, 30).build()
    assert answer(session(trace)).whole_ns == 100_000


def test_nothing_recorded_is_said() -> None:
    result = answer(session(TraceBuilder().build()))
    assert (result.whole_ns, result.parts.height) == (0, 0)
    assert "no timed events" in result.sentence
    assert result.parts.schema == answer(session(cpu())).parts.schema


def test_ranks_with_gaps_are_named_as_such() -> None:
    traces = [
        replace(cpu(), meta=replace(cpu().meta, rank=rank, world_size=8)) for rank in (0, 3, 7)
    ]
    assert answer(session(*traces)).sentence.startswith("3 ranks (0 to 7), 1 step of")


def test_every_cause_of_idle_time_has_its_reason() -> None:
    assert set(_REASONS) == set(CAUSES)


def test_a_step_mark_that_lost_its_duration_leaves_the_window_to_account_for() -> None:
    trace = gpu()
    damaged = replace(trace, steps=trace.steps.with_columns(end_ns=trace.steps["start_ns"]))
    result = answer(session(damaged))
    assert result.whole_ns == result.parts["ns"].sum() == 180_000_000
    assert "Nothing to account for" not in result.sentence


def test_without_steps_the_sentence_names_the_time_that_its_shares_are_of() -> None:
    trace = gpu()
    result = answer(session(replace(trace, steps=trace.steps.clear())))
    busy_from = 10_015_000
    busy_until = 190_015_000
    assert result.whole_ns == busy_until - busy_from
    assert result.sentence.startswith(
        "From first to last GPU work, 180 ms of a window of 200 ms: GPU 0 is computing"
    )


def test_steps_of_unlike_length_are_told_with_the_shortest_and_the_longest() -> None:
    builder = TraceBuilder()
    for step, (start, length) in enumerate(((0, 2_000), (2_000, 9_000), (11_000, 8_000))):
        builder.step(step, start, length).launch(
            "cudaLaunchKernel", start + 10, 10, correlation=step + 1
        )
        builder.kernel("gemm", start + 30, 100, correlation=step + 1)
    told = answer(session(builder.build())).sentence
    assert "3 steps of 8.00 ms (2.00 ms to 9.00 ms, 6.33 ms on average): " in told
    builder.step(3, 19_000, 8_000)
    assert "4 steps of 8.00 ms (2.00 ms to 9.00 ms): " in answer(session(builder.build())).sentence


def test_a_file_of_which_operators_were_left_out_names_no_cause_of_idle_time() -> None:
    def tell(every: int) -> str:
        builder = TraceBuilder()
        for number in range(600):
            at = 20 * number
            builder.op("aten::mm", at, 5, external_id=1 + every * number)
            builder.launch("cudaLaunchKernel", at + 1, 1, correlation=number + 1)
            builder.kernel("gemm", at + 4, 3, correlation=number + 1)
        return answer(session(builder.build())).sentence

    assert "the main cause of the idle time" in tell(1)
    assert "cannot be told: most operators were left out of the file" in tell(100)
    assert "the main cause of the idle time" not in tell(100)


# -- against the accounts of devices and threads ------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [(0,), (1,), (2,), (3,), (1, 2, 5), (0, 4)])
def test_parts_are_the_accounts_of_all_devices_added_up(seeds: tuple[int, ...]) -> None:
    session = Session(tuple(odd_trace(seed) for seed in seeds), "made")
    found = answer(session)
    wanted: dict[str, int] = defaultdict(int)
    for trace in session.traces:
        account = build_device_account(trace, gpu_time(trace), idle(trace))
        for kind, column in (
            ("compute", "compute_ns"),
            ("communication", "exposed_communication_ns"),
            ("memory", "exposed_memory_ns"),
            ("idle", "idle_ns"),
        ):
            wanted[kind] += int(account.devices[column].sum())
    got = dict(found.parts.group_by("kind").agg(pl.col("ns").sum()).rows())
    assert got == {kind: ns for kind, ns in wanted.items() if ns}
    assert found.whole_ns == sum(wanted.values())
    assert found.parts["fraction"].sum() == pytest.approx(1)
    assert found.parts["ns"].is_sorted(descending=True)
    assert (found.parts["fraction"] * found.whole_ns).to_list() == pytest.approx(
        found.parts["ns"].to_list()
    )
    for kind, ns in wanted.items():  # what takes a share worth saying is said with it
        if ns >= 0.1 * found.whole_ns:
            assert format_share(ns, found.whole_ns) in found.sentence, (kind, found.sentence)


def test_without_gpu_work_the_parts_are_what_the_main_thread_did_in_the_steps() -> None:
    trace = odd_trace(7)
    found = answer(Session((trace,), "made"))
    main = host(trace).threads.filter("main")["lane"].item()
    account = host(trace).account.filter(pl.col("lane") == main, pl.col("step").is_not_null())
    assert found.whole_ns == account["ns"].sum()
    sums = dict(account.group_by(pl.col("activity").cast(pl.String)).agg(pl.col("ns").sum()).rows())
    assert dict(found.parts.group_by("kind").agg(pl.col("ns").sum()).rows()) == sums


@pytest.mark.parametrize("seed", range(8))
def test_the_usual_step_is_the_middle_one_of_the_whole_ones(seed: int) -> None:
    trace = odd_trace(seed)
    lengths = sorted(
        (
            trace.steps.filter("complete")["end_ns"] - trace.steps.filter("complete")["start_ns"]
        ).to_list()
    )
    middle = (
        (lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) // 2 if lengths else None
    )
    assert answer(Session((trace,), "made")).step_ns == middle


def test_ranks_in_another_order_give_the_same_answer() -> None:
    traces = tuple(
        TraceBuilder(rank, 3)
        .step(0, 0, 100)
        .op("aten::mm", 1, 9)
        .kernel("k", 20 + rank, 30)
        .build()
        for rank in range(3)
    )
    one, other = answer(Session(traces, "made")), answer(Session(traces[::-1], "made"))
    assert one.sentence == other.sentence
    assert one.parts.equals(other.parts)
