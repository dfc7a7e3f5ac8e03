"""Two runs against each other: what is planted is found, what is equal is equal, and every sum comes out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from support.jobs import Change, Recipe, training_job
from traceloom.analyze import compare
from traceloom.analyze.compare_tables import compute_rounded_mean, round_to_sum
from traceloom.analyze.compare_tree import ListItems, match_items
from traceloom.errors import UsageError
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

US = 1_000


@dataclass(frozen=True)
class Op:
    """An operator of the made program: its launch stands 2 us after its start, its kernel runs one after the other."""

    name: str
    kernel: str | None
    kernel_us: float = 10
    shapes: str = "[[4, 4]]"
    host_us: float = 10


PROGRAM = (
    Op("aten::linear", "gemm", 20),
    Op("aten::relu", "relu"),
    Op("aten::linear", "gemm", 20),
    Op("aten::relu", "relu"),
    Op("aten::sum", "reduce", 5),
)


def built(
    program: tuple[Op, ...], *, steps: int = 3, module: str = "block", **kwargs: Any
) -> Trace:
    """Steps of 300 us; the ops stand one after the other in an annotation, kernels on one stream right behind."""
    builder = TraceBuilder(**kwargs)
    correlation = 0
    for step in range(steps):
        at = 300.0 * step
        builder.step(step, at, 300).annotation(module, at + 5, 200)
        host, device = at + 10, at + 20
        for op in program:
            correlation += 1
            builder.op(op.name, host, op.host_us, shapes=eval(op.shapes))
            if op.kernel is not None:
                builder.launch("cudaLaunchKernel", host + 2, 3, correlation=correlation)
                builder.kernel(op.kernel, device, op.kernel_us, correlation=correlation)
                device += op.kernel_us
            host += op.host_us
    return builder.build()


def changed(frame: pl.DataFrame) -> list[dict[str, Any]]:
    return frame.filter(pl.col("status").cast(pl.String) != "same").to_dicts()


def test_a_run_against_itself_has_no_difference() -> None:
    found = compare(built(PROGRAM), built(PROGRAM))
    found.check()
    assert (found.difference_ns, found.comparable) == (0, True)
    assert set(found.breakdown["difference_ns"]) == {0}
    assert changed(found.kernels) == changed(found.operators) == []
    assert found.conditions["same"].all()
    assert "No difference" in found.sentence


def test_one_slower_operator_is_found_with_what_it_costs() -> None:
    slower = (*PROGRAM[:2], replace(PROGRAM[2], kernel_us=35), *PROGRAM[3:])
    found = compare(built(PROGRAM), built(slower))
    found.check()
    (kernel,) = changed(found.kernels)
    assert (kernel["status"], kernel["operator"], kernel["base_kernel"]) == (
        "slower",
        "aten::linear",
        "gemm",
    )
    # Both linears stand at places of one path and one shape: they are one row.
    assert (kernel["base_ns"], kernel["new_ns"], kernel["difference_ns"]) == (
        40 * US,
        55 * US,
        15 * US,
    )
    parts = dict(found.breakdown.select("part", "difference_ns").rows())
    assert parts["compute"] == 15 * US
    idle = sum(ns for part, ns in parts.items() if part.startswith("idle"))
    assert idle == -15 * US, "the step is as long as before: the device is less idle"
    assert found.difference_ns == 0


def test_one_added_and_one_removed_kernel_are_found_and_nothing_else() -> None:
    new = (*PROGRAM[:1], Op("aten::dropout", "dropout", 7), *PROGRAM[1:4])
    found = compare(built(PROGRAM), built(new))
    found.check()
    rows = {(row["status"], row["operator"]): row for row in changed(found.kernels)}
    assert set(rows) == {("added", "aten::dropout"), ("removed", "aten::sum")}
    assert rows["added", "aten::dropout"]["difference_ns"] == 7 * US
    assert rows["removed", "aten::sum"]["difference_ns"] == -5 * US
    operators = {(row["status"], row["operator"]) for row in changed(found.operators)}
    assert operators == {("added", "aten::dropout"), ("removed", "aten::sum")}


def test_operators_are_told_apart_by_their_place_and_not_only_by_name() -> None:
    """The same operator in another module is another one, be it as often."""
    found = compare(built(PROGRAM, module="encoder"), built(PROGRAM, module="decoder"))
    found.check()
    statuses = {row["path"].split(" > ")[1]: row["status"] for row in changed(found.operators)}
    assert statuses == {"encoder": "removed", "decoder": "added"}


def test_numbers_in_annotations_count_and_do_not_name() -> None:
    found = compare(built(PROGRAM, module="batch 17"), built(PROGRAM, module="batch 2048"))
    found.check()
    assert changed(found.operators) == []


def test_an_operator_in_the_middle_does_not_shift_those_behind_it() -> None:
    layers = tuple(Op("aten::linear", f"gemm_{k}", 10 + k) for k in range(8))
    more = (*layers[:3], Op("aten::linear", "gemm_new", 4), *layers[3:])
    found = compare(built(layers), built(more))
    (row,) = changed(found.kernels)
    assert (row["status"], row["new_kernel"], row["difference_ns"]) == ("added", "gemm_new", 4 * US)


def test_other_kernels_at_the_same_place_are_a_replacement() -> None:
    """Vendors name their kernels as they like: the operator tells what is what."""
    amd = tuple(
        replace(op, kernel=f"Cijk_{op.kernel}", kernel_us=op.kernel_us * 2) for op in PROGRAM
    )
    found = compare(
        built(PROGRAM), built(amd, device_name="AMD Instinct MI300X", generation="rocm")
    )
    found.check()
    rows = {row["base_kernel"]: row for row in changed(found.kernels)}
    assert {name: (row["status"], row["new_kernel"]) for name, row in rows.items()} == {
        "gemm": ("replaced", "Cijk_gemm"),
        "relu": ("replaced", "Cijk_relu"),
        "reduce": ("replaced", "Cijk_reduce"),
    }
    assert rows["relu"]["difference_ns"] == 20 * US
    assert not found.comparable
    assert found.sentence.startswith("The conditions differ")
    assert "MI300X" in found.sentence


@pytest.mark.parametrize("factor", [0.5, 2, 3])
def test_time_per_sample_is_told_where_batches_are_of_another_size(factor: float) -> None:
    """The kernels take twice as long with `factor` times as many samples."""
    batch = tuple(replace(op, shapes=f"[[{int(32 * factor)}, 4], [4, 4]]") for op in PROGRAM)
    larger = tuple(replace(op, host_us=op.host_us * 1.5) for op in batch)
    base = tuple(replace(op, shapes="[[32, 4], [4, 4]]") for op in PROGRAM)
    found = compare(host_only(base), host_only(larger))
    found.check()
    assert found.comparable
    change = 100 * (1.5 / factor - 1)
    sign = "+" if change >= 0 else "-"
    expected = f"{factor:g} times as many samples: {sign}{abs(change):.1f} % per sample"
    assert (expected in found.sentence) == (abs(change) >= 0.05), found.sentence


def host_only(program: tuple[Op, ...], *, lengths: tuple[float, ...] = (1.0,) * 3) -> Trace:
    """Steps that hold nothing but the operators, each `lengths[step]` times as long."""
    builder, at = TraceBuilder(), 0.0
    for step, scale in enumerate(lengths):
        total = scale * sum(op.host_us for op in program)
        builder.step(step, at, total)
        for op in program:
            builder.op(op.name, at, scale * op.host_us, shapes=eval(op.shapes))
            at += scale * op.host_us
    return builder.build()


def test_another_width_of_the_model_is_not_another_batch() -> None:
    base = tuple(replace(op, shapes="[[32, 4], [4, 4]]") for op in PROGRAM)
    wider = tuple(replace(op, shapes="[[32, 8], [8, 8]]", host_us=20) for op in PROGRAM)
    found = compare(host_only(base), host_only(wider))
    assert found.comparable
    assert "sample" not in found.sentence


def test_a_loop_that_is_removed_is_the_result_and_no_condition() -> None:
    loop = (*PROGRAM, *[Op("aten::item", None, host_us=1)] * 100)
    found = compare(host_only(loop), host_only(PROGRAM))
    found.check()
    assert found.comparable
    assert found.sentence.startswith("The step takes 50.0 µs instead of 150 µs (-66.7 %)")


def test_another_program_altogether_is_no_comparison() -> None:
    other = tuple(replace(op, name=f"other{number}") for number, op in enumerate(PROGRAM))
    found = compare(host_only(PROGRAM), host_only(other))
    assert not found.comparable
    assert "operators at the same place (0 of 5" in found.sentence


def test_a_change_within_the_spread_of_the_steps_may_be_chance() -> None:
    noisy, noisier = (1.0, 1.2, 0.9, 1.1), (1.0, 1.3, 0.95, 1.1)
    found = compare(host_only(PROGRAM, lengths=noisy), host_only(PROGRAM, lengths=noisier))
    assert "It may be chance: half of the steps take" in found.sentence
    slower = tuple(2 * length for length in noisy)
    found = compare(host_only(PROGRAM, lengths=noisy), host_only(PROGRAM, lengths=slower))
    assert "chance" not in found.sentence


def test_other_shapes_are_told_and_are_no_reason_to_refuse() -> None:
    larger = tuple(replace(op, shapes="[[8, 8]]") for op in PROGRAM)
    found = compare(built(PROGRAM), built(larger))
    found.check()
    assert found.comparable
    stated = {row["condition"]: row for row in found.conditions.to_dicts()}
    assert stated["shapes of inputs"]["same"] is False
    assert stated["operators at the same place"]["same"] is True
    assert {
        row["base_shapes"] for row in found.operators.to_dicts() if row["operator"] == "aten::relu"
    } == {"[[4,4]]"}
    assert {
        row["new_shapes"] for row in found.operators.to_dicts() if row["operator"] == "aten::relu"
    } == {"[[8,8]]"}


def test_a_slower_host_shows_in_the_account_of_the_thread() -> None:
    slower = (*PROGRAM[:4], replace(PROGRAM[4], host_us=25))
    found = compare(built(PROGRAM), built(slower))
    found.check()
    row = next(row for row in found.operators.to_dicts() if row["operator"] == "aten::sum")
    assert (row["base_host_ns"], row["new_host_ns"], row["host_difference_ns"]) == (
        10 * US,
        25 * US,
        15 * US,
    )


def test_without_gpu_work_the_host_is_the_account() -> None:
    base = tuple(replace(op, kernel=None) for op in PROGRAM)
    new = (*base[:1], replace(base[1], host_us=18), *base[2:])
    found = compare(built(base, device_name=None), built(new, device_name=None))
    found.check()
    assert found.account == "host"
    assert found.kernels.height == 0
    (row,) = [row for row in changed(found.operators) if row["operator"].startswith("aten")]
    assert (row["status"], row["operator"], row["host_difference_ns"]) == (
        "slower",
        "aten::relu",
        8 * US,
    )


def test_more_steps_and_ranks_are_means() -> None:
    def job(ranks: int, steps: int) -> Session:
        traces = [built(PROGRAM, rank=rank, world_size=ranks, steps=steps) for rank in range(ranks)]
        return Session(tuple(traces), "made")

    found = compare(job(2, 3), job(2, 5))
    found.check()
    assert found.difference_ns == 0
    assert changed(found.kernels) == []
    assert found.steps.filter(pl.col("side") == "new").height == 10
    other = compare(job(2, 3), job(4, 3))
    assert [row["condition"] for row in other.conditions.filter(~pl.col("same")).to_dicts()] == [
        "ranks of the job",
        "ranks recorded",
    ]


def test_traces_without_steps_are_compared_over_their_windows() -> None:
    def once(kernel_us: float) -> Trace:
        builder = (
            TraceBuilder().op("aten::mm", 0, 20).launch("cudaLaunchKernel", 5, 3, correlation=1)
        )
        return builder.kernel("gemm", 12, kernel_us, correlation=1).build()

    found = compare(once(30), once(50))
    found.check()
    assert (found.base_ns, found.new_ns) == (42 * US, 62 * US)
    assert dict(found.breakdown.select("part", "difference_ns").rows())["compute"] == 20 * US


def test_nothing_cannot_be_compared() -> None:
    with pytest.raises(UsageError, match="the new run holds no timed events") as caught:
        compare(built(PROGRAM), TraceBuilder().build())
    assert caught.value.slug == "nothing-to-compare"


@pytest.mark.parametrize("change", [Change(kernels=2.0), Change(host=1.5)], ids=["kernels", "host"])
def test_made_jobs_with_a_change_add_up(change: Change) -> None:
    recipe = Recipe(steps=4, layers=4, ranks=2, autograd=True, side_stream=True, item=True)
    job = training_job(recipe)
    runs = [
        Session(tuple(trace.build() for trace in job.run(one).traces()), "made")
        for one in (Change(), change)
    ]
    found = compare(*runs)
    found.check()
    assert found.comparable
    assert found.difference_ns > 0
    assert {row["status"] for row in changed(found.operators)} <= {"slower", "faster"}
    back = compare(runs[1], runs[0])
    assert back.difference_ns == -found.difference_ns
    assert back.kernels["difference_ns"].sum() == -found.kernels["difference_ns"].sum()


def test_doubled_kernels_show_as_twice_the_time_of_each() -> None:
    job = training_job(Recipe(steps=3, layers=3, spread=0))
    base, new = (job.run(one).traces()[0].build() for one in (Change(), Change(kernels=2.0)))
    found = compare(base, new)
    rows = found.kernels.filter(pl.col("kind") == "compute").to_dicts()
    assert rows
    for row in rows:
        assert row["status"] == "slower"
        assert row["new_duration_ns"] == pytest.approx(2 * row["base_duration_ns"], abs=2), row


@given(st.lists(st.integers(0, 10**6), max_size=20), st.integers(1, 9))
def test_rounded_parts_add_up_to_the_rounded_whole(totals: list[int], count: int) -> None:
    parts = round_to_sum(np.array(totals, dtype=np.int64), count)
    assert int(parts.sum()) == compute_rounded_mean(sum(totals), count)
    assert all(
        abs(part - total / count) < 1 for part, total in zip(parts.tolist(), totals, strict=True)
    )


def items(text: str, sizes: dict[str, int] | None = None) -> ListItems:
    codes = np.array([ord(letter) for letter in text.lower()], dtype=np.int64)
    size = np.array([(sizes or {}).get(letter, 1) for letter in text], dtype=np.int64)
    return ListItems(
        codes,
        codes * 0,
        codes * 0,
        np.array([ord(letter) for letter in text], dtype=np.int64),
        size,
    )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("abc", "abc", "abc"),
        ("abc", "abxc", "abc"),
        ("aabaa", "aacaa", "aaaa"),
        ("", "abc", ""),
        ("abcabc", "abc", "abc"),
    ],
)
def test_lists_are_paired_in_order(one: str, other: str, expected: str) -> None:
    found = match_items(items(one), items(other))
    assert "".join(one[at] for at, _ in found) == expected
    assert all(one[at] == other[to] for at, to in found)
    assert found == sorted(found)
    assert len({to for _, to in found}) == len(found)


def test_a_large_subtree_is_rather_the_same_than_many_small_ones() -> None:
    found = match_items(items("zMzz", {"M": 500}), items("zzzm", {"m": 400}))
    assert (1, 3) in found


def test_long_lists_are_paired_too() -> None:
    long = np.arange(5_000) % 1_000
    one = ListItems(long, long * 0, long * 0, long, np.ones(long.size, dtype=np.int64))
    cut = np.delete(long, [10, 2_500])
    other = ListItems(cut, cut * 0, cut * 0, cut, np.ones(cut.size, dtype=np.int64))
    assert len(match_items(one, other)) == cut.size


def test_operators_are_compared_by_what_they_launched_whenever_it_ran() -> None:
    late = Op("aten::mm", "gemm", 200), Op("aten::add", "add", 100)
    slower = late[0], replace(late[1], kernel_us=200)
    found = compare(
        built(late, steps=1), built(slower, steps=1)
    )  # a step of 300 us: most of the slower `add` runs behind it, and so the step takes 400
    found.check()
    row = found.operators.row(by_predicate=pl.col("operator") == "aten::add", named=True)
    assert (row["base_duration_ns"], row["new_duration_ns"], row["duration_difference_ns"]) == (
        100 * US,
        200 * US,
        100 * US,
    )
    assert row["device_difference_ns"] == 120 * US
    assert (found.base_ns, found.new_ns) == (300 * US, 400 * US)
    assert (row["status"], found.operators["operator"][0]) == ("slower", "aten::add")


@pytest.mark.parametrize("device", [True, False])
def test_what_is_called_in_fewer_steps_is_no_longer_the_same(device: bool) -> None:
    def run(*steps: bool) -> Trace:
        builder = TraceBuilder()
        for step, there in enumerate(steps):
            at = 300.0 * step
            builder.step(step, at, 300).op("aten::mm", at + 10, 20)
            if there:
                builder.op("c10d::allreduce_", at + 40, 0.5)
            if there and device:
                builder.launch("cudaLaunchKernel", at + 40.1, 0.3, correlation=step + 1)
                builder.kernel("ncclDevKernel_AllReduce", at + 50, 0.5, correlation=step + 1)
        return builder.build()

    for sides, status in (
        ((run(True, True), run(True, False)), "fewer"),
        ((run(False, True), run(True, True)), "more"),
    ):
        found = compare(*sides)
        found.check()
        row = found.operators.row(by_predicate=pl.col("operator") == "c10d::allreduce_", named=True)
        assert (row["status"], {row["base_count"], row["new_count"]}) == (status, {1.0, 0.5})
        assert [row["status"] for row in changed(found.kernels)] == ([status] if device else [])
        assert "No difference" not in found.sentence


def recorded_pass(*, is_replay: bool, host: float = 10, slower: str = "") -> Trace:
    """Two steps of six operators: a program with modules, a backward pass on its own thread, and an operator around
    one that a replay calls by itself; or its replay, which has none of these.
    """
    builder = TraceBuilder()
    forward = ("aten::native_layer_norm", "aten::addmm", "aten::gelu")
    backward = ("aten::gelu_backward", "aten::mm", "aten::native_layer_norm_backward")
    correlation = 0
    for step in range(2):
        start = 1000.0 * step
        builder.step(step, start, 1000)
        at, device = start + 20, start + 40
        if not is_replay:
            builder.annotation("traceloom.module:GPT", at - 5, 200).op(
                "aten::layer_norm", at - 2, host + 4
            )
            builder.op(
                "autograd::engine::evaluate_function: GeluBackward0", at + 250, 300, thread=2
            )
        for name in (*forward, *backward):
            correlation += 1
            is_elsewhere = name in backward and not is_replay
            begins = at + (250 if is_elsewhere else 0)
            thread = 2 if is_elsewhere else 1
            builder.op(name, begins, host, thread=thread, shapes=[[4, 4]])
            builder.launch(
                "cudaLaunchKernel", begins + 2, 3, thread=thread, correlation=correlation
            )
            builder.kernel(
                f"kernel of {name}", device, 40 if name == slower else 30, correlation=correlation
            )
            at, device = at + host + 5, device + 50
    trace = builder.build()
    entry = {"replay_of": "run"} if is_replay else {}
    return replace(trace, meta=replace(trace.meta, capture=entry))


def test_a_run_and_its_replay_are_held_together_by_the_order_of_their_operators() -> None:
    base, again = (
        recorded_pass(is_replay=False),
        recorded_pass(is_replay=True, host=5, slower="aten::mm"),
    )
    comparison = compare(base, again)
    comparison.check()
    assert comparison.comparable
    statuses = dict(comparison.operators.select("operator", "status").iter_rows())
    assert statuses.pop("(outside operators)") == "slower"  # what the operators take less
    assert statuses.pop("aten::layer_norm") == "removed"  # the replay called what it calls
    assert statuses.pop("aten::mm") == "slower"
    assert statuses == dict.fromkeys(
        (
            "aten::native_layer_norm",
            "aten::addmm",
            "aten::gelu",
            "aten::gelu_backward",
            "aten::native_layer_norm_backward",
        ),
        "same",
    )
    assert [(row["base_kernel"], row["status"]) for row in changed(comparison.kernels)] == [
        ("kernel of aten::mm", "slower")
    ]
    # The recorded backward pass ran on a thread of its own, while that of the step did nothing: its operators have time.
    times = comparison.operators.select("operator", "base_host_ns", "new_host_ns").rows()
    assert ("aten::mm", 10 * US, 5 * US) in times
    assert ("aten::layer_norm", 4 * US, 0) in times


def test_two_runs_of_which_none_is_a_replay_are_aligned_by_place() -> None:
    base, again = recorded_pass(is_replay=False), recorded_pass(is_replay=True)
    comparison = compare(
        base, replace(again, meta=replace(again.meta, capture={"replay_of": None}))
    )
    assert not comparison.comparable
    assert {"added", "removed"} <= {row["status"] for row in changed(comparison.kernels)}


def test_the_time_of_operators_on_several_threads_is_counted_once() -> None:
    builder = TraceBuilder().step(0, 0, 1000)
    builder.op("aten::mm", 100, 200).op("aten::add", 150, 50)
    builder.op("aten::mul", 250, 150, thread=2).op(
        "aten::sub", 260, 100, thread=2
    )  # 50 of it beside aten::mm
    builder.op("aten::div", 350, 100, thread=3)  # 50 of it beside aten::mul
    base = builder.build()
    comparison = compare(base, replace(base, meta=replace(base.meta, capture={"replay_of": "run"})))
    comparison.check()
    times = dict(comparison.operators.select("operator", "base_host_ns").iter_rows())
    assert times == {
        "aten::mm": 150 * US,
        "aten::add": 50 * US,
        "aten::mul": 40 * US,
        "aten::sub": 60 * US,
        "aten::div": 50 * US,
        "(outside operators)": 650 * US,
    }


def test_a_window_is_no_step() -> None:
    stepped = built(PROGRAM)
    unstepped = TraceBuilder().op("aten::linear", 10, 50).op("aten::sum", 900, 50).build()
    both = compare(unstepped, unstepped).sentence
    assert "the window takes 940 µs on both sides" in both
    mixed = compare(stepped, unstepped)
    mixed.check()
    assert not mixed.comparable
    assert mixed.sentence.startswith(
        "The step of the base takes 300 µs, the window of the new run 940 µs"
    )
    assert "the new run has no steps" in mixed.sentence
    assert "%" not in mixed.sentence
