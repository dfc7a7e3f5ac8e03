"""Laws of comparing runs: each side against counting its events, both sides exchanged, ranks and steps multiplied."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import polars as pl
import pytest

from support.jobs import Recipe, training_job
from support.odd_traces import Row, above, gpu_rows_of, odd_trace, rows_of
from traceloom.analyze import Comparison, compare
from traceloom.analyze.compare_tree import select_compared_steps
from traceloom.analyze.gate import find_comparison_causes
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

PRIORITY = ("compute", "communication", "copies")
WITH_WORK = range(7)


@cache
def of_odd(base: int, new: int) -> Comparison:
    return compare(odd_trace(base), odd_trace(new))


@cache
def job(seed: int = 0, **more: Any) -> Trace:
    (builder,) = training_job(Recipe(steps=3, layers=2, seed=seed, **more)).run().traces()
    return builder.build()


def windows(trace: Trace) -> list[tuple[int, int]]:
    """From when to when the compared steps last; the whole trace where there are none."""
    steps = trace.steps.filter(pl.col("end_ns") > pl.col("start_ns"))
    whole = steps.filter("complete") if steps["complete"].any() else steps
    return whole.select("start_ns", "end_ns").rows() or [(trace.start_ns, trace.end_ns)]


def kind_of(row: Row) -> str:
    if row["category"] != "kernel":
        return "copies"
    return "communication" if row["name"].startswith("nccl") else "compute"


def busy(trace: Trace) -> dict[str, int]:
    """Exclusive time of each kind on all devices in the compared steps, stretch by stretch."""
    sums = dict.fromkeys(PRIORITY, 0)
    work = gpu_rows_of(trace)
    for device in {row["device"] for row in work}:
        own = [row for row in work if row["device"] == device]
        bounds = {time for row in own for time in (row["start_ns"], row["end_ns"])}
        for low, high in windows(trace):
            for start, end in pairwise(
                sorted({low, high, *(time for time in bounds if low < time < high)})
            ):
                kinds = {
                    kind_of(row) for row in own if row["start_ns"] <= start and row["end_ns"] >= end
                }
                if kinds:
                    sums[min(kinds, key=PRIORITY.index)] += end - start
    return sums


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", WITH_WORK)
def test_busy_parts_are_the_exclusive_time_of_the_devices_in_the_steps(seed: int) -> None:
    trace, found = odd_trace(seed), of_odd(seed, seed)
    spans = windows(trace)
    devices = len({row["device"] for row in gpu_rows_of(trace)})
    length = sum(high - low for low, high in spans)
    assert found.account == "device"
    assert found.base_ns == pytest.approx(length / len(spans), abs=1)
    parts = dict(found.breakdown.select("part", "base_ns").rows())
    for kind, ns in busy(trace).items():
        rows = found.kernels.filter(kind=kind).height + 1
        assert parts.get(kind, 0) == pytest.approx(ns / (devices * len(spans)), abs=rows)
    assert sum(parts.values()) == found.base_ns


@pytest.mark.parametrize("seed", WITH_WORK)
def test_kernels_are_those_that_the_steps_launched_whenever_they_ran(seed: int) -> None:
    trace, found = odd_trace(seed), of_odd(seed, seed)
    spans = windows(trace)
    devices = len({row["device"] for row in gpu_rows_of(trace)})
    events = rows_of(trace)
    counts: dict[str, int] = defaultdict(int)
    for row in gpu_rows_of(trace):
        launch = row["launch"] if row["launch"] is not None else row["op"]
        asked = -1
        if launch is not None:
            around = [e for e in (events[launch], *above(events, events[launch])) if counted(e)]
            owners = [step for e in around if (step := step_of(e["start_ns"], spans)) >= 0]
            asked = (
                owners[0]
                if owners and owners[0] == step_of(events[launch]["start_ns"], spans)
                else -1
            )
        # what no operator of a step launched counts where it begins
        counts[row["name"]] += asked >= 0 or step_of(row["start_ns"], spans) >= 0
    rows: dict[str, float] = defaultdict(float)
    for name, count in found.kernels.select("base_kernel", "base_count").rows():
        rows[name] += count * devices * len(spans)
    assert {name: count for name, count in rows.items() if count} == pytest.approx(
        {name: count for name, count in counts.items() if count}
    )


def counted(row: Row) -> bool:
    op = row["category"] == "op" and not row["name"].startswith("traceloom.")
    return op or (
        row["category"] == "annotation"
        and not row["name"].startswith(("ProfilerStep", "traceloom.step"))
    )


def step_of(time: int, spans: list[tuple[int, int]]) -> int:
    return next((number for number, (low, high) in enumerate(spans) if low <= time < high), -1)


PAIRS = [(1, 5), (2, 6), (0, 3), (4, 1), (7, 5), (7, 3)]


@pytest.mark.parametrize(("base", "new"), PAIRS)
def test_both_sides_exchanged_are_the_same_with_the_other_sign(base: int, new: int) -> None:
    forth, back = of_odd(base, new), of_odd(new, base)
    for found in (forth, back):
        found.check()
    assert (forth.base_ns, forth.new_ns, forth.difference_ns) == (
        back.new_ns,
        back.base_ns,
        -back.difference_ns,
    )
    assert (forth.account, forth.comparable) == (back.account, back.comparable)
    one = {
        part: (old, now)
        for part, old, now in forth.breakdown.select("part", "base_ns", "new_ns").rows()
    }
    other = {
        part: (old, now)
        for part, now, old in back.breakdown.select("part", "base_ns", "new_ns").rows()
    }
    assert one.keys() == other.keys()
    for (
        part,
        values,
    ) in (
        one.items()
    ):  # a nanosecond of a row at most is rounded up on one side and down on the other
        assert values == pytest.approx(other[part], abs=forth.kernels.height)
    assert forth.steps["duration_ns"].sum() == back.steps["duration_ns"].sum()


@pytest.mark.parametrize(("base", "new"), PAIRS)
def test_changes_are_told_against_the_base_and_against_its_step(base: int, new: int) -> None:
    found = of_odd(base, new)
    assert found.change == pytest.approx(found.difference_ns / found.base_ns)
    for frame in (found.breakdown, found.kernels):
        for row in frame.to_dicts():
            assert row["difference_ns"] == row["new_ns"] - row["base_ns"]
            wanted = (
                None if not row["base_ns"] else pytest.approx(row["new_ns"] / row["base_ns"] - 1)
            )
            assert row["change"] == wanted
            assert row["of_step"] == pytest.approx(row["difference_ns"] / found.base_ns)
    assert found.breakdown["of_step"].sum() == pytest.approx(found.change)
    assert found.kernels["difference_ns"].abs().is_sorted(descending=True)


@pytest.mark.parametrize(("base", "new"), PAIRS)
def test_a_node_of_the_tree_holds_itself_and_its_children(base: int, new: int) -> None:
    tree = of_odd(base, new).tree.with_row_index("node")
    assert tree["parent"][0] is None
    assert tree[1:].filter(pl.col("parent") >= pl.col("node")).height == 0
    assert tree[1:]["parent"].null_count() == 0
    for column in ("base_host_ns", "new_host_ns", "base_duration_ns", "new_duration_ns"):
        below = tree.group_by("parent").agg(pl.col(column).sum().alias("below"))
        both = tree.join(below, left_on="node", right_on="parent", how="inner")
        assert (both[column] >= both["below"]).all()


@pytest.mark.parametrize("copies", [2, 3])
def test_the_same_rank_several_times_has_the_means_of_one(copies: int) -> None:
    one = compare(job(1), job(2))
    many = [Session(tuple([trace] * copies), "made") for trace in (job(1), job(2))]
    found = compare(*many)
    assert (found.base_ns, found.new_ns) == (one.base_ns, one.new_ns)
    columns = ["part", "base_ns", "new_ns"]
    assert found.breakdown.select(columns).equals(one.breakdown.select(columns))
    keys = ["path", "base_kernel", "new_kernel"]
    kept = [*keys, "status", "base_count", "new_count", "base_duration_ns", "new_duration_ns"]
    assert found.kernels.select(kept).sort(kept).equals(one.kernels.select(kept).sort(kept))
    assert found.steps.height == copies * one.steps.height


def program(
    scale: float = 1, *, renamed: str = "gemm", extra: bool = False, host: float = 1, steps: int = 4
) -> Trace:
    """Steps of 400 µs with three operators; the kernel of the second is scaled."""
    builder, number = TraceBuilder(), 0
    for step in range(steps):
        at = 400.0 * step
        builder.step(step, at, 400)
        operators = [
            ("aten::linear", "gemm", 20.0),
            ("aten::mm", renamed, 40.0 * scale),
            ("aten::relu", "relu", 10.0),
        ]
        for place, (name, kernel, long) in enumerate(
            [*operators, *([("aten::gelu", "gelu", 5.0)] if extra else [])]
        ):
            start = at + 5 + 30 * place
            builder.op(name, start, 10 * host, shapes=[[4, 4]])
            number += 1
            builder.launch("cudaLaunchKernel", start + 2, 3, correlation=number)
            builder.kernel(kernel, at + 20 + 90 * place, long, correlation=number)
    return builder.build()


@pytest.mark.parametrize(
    ("scale", "status"),
    [(1, "same"), (1.01, "same"), (1.5, "slower"), (0.5, "faster"), (2, "slower")],
)
def test_a_scaled_kernel_is_told_by_its_factor_and_nothing_else_is(
    scale: float, status: str
) -> None:
    found = compare(program(), program(scale))
    rows = {row["operator"]: row for row in found.kernels.to_dicts()}
    assert {name: row["status"] for name, row in rows.items()} == {
        "aten::linear": "same",
        "aten::mm": status,
        "aten::relu": "same",
    }
    assert rows["aten::mm"]["new_duration_ns"] == pytest.approx(40_000 * scale)
    assert rows["aten::mm"]["change"] == pytest.approx(scale - 1)
    assert found.difference_ns == 0, "the step is as long: the device idles less"
    assert found.comparable


def test_another_kernel_of_the_same_operator_is_a_replacement_with_its_cost() -> None:
    found = compare(program(), program(1.5, renamed="gemm_v2"))
    (row,) = found.kernels.filter(pl.col("status").cast(pl.String) != "same").to_dicts()
    assert (row["status"], row["base_kernel"], row["new_kernel"], row["difference_ns"]) == (
        "replaced",
        "gemm",
        "gemm_v2",
        20_000,
    )
    told = find_comparison_causes(found).rows()
    assert ("kernel", "gemm → gemm_v2 in aten::mm", 40_000, 60_000, 20_000) in told


def test_an_added_operator_is_added_and_back_it_is_removed() -> None:
    forth, back = compare(program(), program(extra=True)), compare(program(extra=True), program())
    for found, status in ((forth, "added"), (back, "removed")):
        named = found.operators.filter(pl.col("operator") != "(outside operators)")
        (row,) = named.filter(pl.col("status").cast(pl.String) != "same").to_dicts()
        assert (row["operator"], row["status"]) == ("aten::gelu", status)
        (kernel,) = found.kernels.filter(pl.col("status").cast(pl.String) != "same").to_dicts()
        assert (kernel["status"], abs(kernel["difference_ns"])) == (status, 5000)


def test_a_slower_host_is_told_by_its_operators_with_the_time_between_them() -> None:
    found = compare(program(), program(host=2))
    rows = {row["operator"]: row for row in found.operators.to_dicts()}
    for name in ("aten::linear", "aten::mm", "aten::relu"):
        assert (
            rows[name]["base_host_ns"],
            rows[name]["new_host_ns"],
            rows[name]["host_status"],
        ) == (10_000, 20_000, "slower")
        assert rows[name]["status"] == "same", "its GPU work is as before"
    outside = rows["(outside operators)"]
    assert (outside["base_host_ns"], outside["new_host_ns"]) == (370_000, 340_000)


def test_runs_of_several_lengths_have_the_means_of_their_steps() -> None:
    found = compare(program(steps=4), program(steps=9))
    assert found.difference_ns == 0
    assert set(found.kernels["status"].cast(pl.String)) == {"same"}
    assert found.steps.group_by("side").len().sort("side").rows() == [("base", 4), ("new", 9)]
    assert "No difference" in found.sentence


def test_without_gpu_work_on_one_side_the_host_is_the_account_of_both() -> None:
    found = compare(job(1), odd_trace(7))
    found.check()
    assert found.account == "host"
    assert found.kernels.height == 0
    assert (
        found.operators.select("base_duration_ns", "new_duration_ns", "base_device_ns")
        .to_numpy()
        .sum()
        == 0
    )
    assert set(found.breakdown["part"]) == {"operators", "outside"}
    told = find_comparison_causes(found)
    assert set(told["what"]) == {"operator"}
    assert told.height <= 20
    assert told["difference_ns"].abs().is_sorted(descending=True)


@pytest.mark.parametrize("seed", range(8))
def test_compared_steps_are_the_whole_ones_or_the_window(seed: int) -> None:
    trace = odd_trace(seed)
    of = select_compared_steps(trace)
    spans = list(zip(of.spans.start.tolist(), of.spans.end.tolist(), strict=True))
    assert spans == windows(trace)
    assert of.step.len() == len(spans)
    assert of.durations.tolist() == [high - low for low, high in spans]


@pytest.mark.parametrize("letters", ["<script>", "\x1b[2J", "🔥", "a" * 3000, "a > b"])
def test_names_of_any_letters_stay_as_they_are(letters: str) -> None:
    def made(long: float) -> Trace:
        builder = (
            TraceBuilder()
            .step(0, 0, 100)
            .op(letters, 5, 20)
            .launch("cudaLaunchKernel", 8, 2, correlation=1)
        )
        return builder.kernel(f"k {letters}", 30, long, correlation=1).build()

    found = compare(made(10), made(30))
    (row,) = found.kernels.to_dicts()
    assert (row["operator"], row["base_kernel"], row["status"]) == (
        letters,
        f"k {letters}",
        "slower",
    )
    assert row["path"].endswith(letters)
