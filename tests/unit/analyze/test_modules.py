"""The module tree: paths, self times, backward joined by sequence numbers."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache
from typing import Any

import polars as pl
import pytest

from support.odd_traces import Row, above, gpu_rows_of, rows_of
from traceloom.analyze import modules
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace


def tree(builder: TraceBuilder) -> dict[str, dict[str, Any]]:
    return {row["path"]: row for row in modules(builder.build()).tree.to_dicts()}


def nested() -> TraceBuilder:
    builder = TraceBuilder()
    for start in (0, 100):
        builder.python("nn.Module: GPT_0", start, 50)
        builder.python("model.py(3): forward", start + 1, 48)
        builder.python("nn.Module: Linear_0", start + 10, 20)
        builder.op("aten::linear", start + 12, 10, sequence=start + 1)
        builder.launch("cudaLaunchKernel", start + 13, 2, correlation=start + 1)
        builder.kernel("gemm", start + 60, 7, correlation=start + 1)
    return builder


def test_calls_of_one_path_are_one_row_and_self_times_add_up() -> None:
    found = tree(nested())
    assert list(found) == ["GPT_0", "GPT_0/Linear_0"]
    assert (found["GPT_0"]["count"], found["GPT_0"]["host_ns"], found["GPT_0"]["self_host_ns"]) == (
        2,
        100_000,
        60_000,
    )
    assert found["GPT_0/Linear_0"]["self_host_ns"] == 40_000
    assert (found["GPT_0"]["device_ns"], found["GPT_0"]["self_device_ns"]) == (14_000, 0)
    assert (found["GPT_0/Linear_0"]["self_device_ns"], found["GPT_0"]["kernel_count"]) == (
        14_000,
        2,
    )
    assert found["GPT_0/Linear_0"]["parent"] == found["GPT_0"]["node"]


def test_annotations_stand_in_where_no_module_was_recorded_and_steps_are_left_out() -> None:
    builder = (
        TraceBuilder()
        .step(1, 0, 100)
        .annotation("## forward ##", 10, 20)
        .annotation("inner", 15, 5)
    )
    result = modules(builder.build())
    assert result.evidence == "annotations"
    assert result.tree.select("path", "kind", "self_host_ns").rows() == [
        ("## forward ##", "annotation", 15_000),
        ("## forward ##/inner", "annotation", 5000),
    ]


def test_modules_annotations_and_scopes_stand_in_one_tree() -> None:
    builder = (
        nested().annotation("Optimizer.step#SGD.step", 200, 10).op("traceloom.scope:loss", 220, 5)
    )
    builder.annotation("attention", 12, 6)
    result = modules(builder.build())
    assert result.evidence == "python-modules"
    found = {row["path"]: row["kind"] for row in result.tree.to_dicts()}
    assert found == {
        "GPT_0": "module",
        "GPT_0/Linear_0": "module",
        "GPT_0/Linear_0/attention": "annotation",
        "Optimizer.step#SGD.step": "annotation",
        "loss": "scope",
    }


def test_a_scope_inside_a_scope_shows_its_own_part_of_the_dotted_name() -> None:
    builder = (
        TraceBuilder()
        .op("traceloom.scope:block", 0, 20)
        .op("traceloom.scope:block.attention", 5, 10)
    )
    found = tree(builder)
    assert list(found) == ["block", "block/attention"]
    assert found["block/attention"]["name"] == "attention"


def test_backward_time_goes_to_the_module_of_the_op_that_made_the_node() -> None:
    builder = (
        TraceBuilder()
        .op("aten::arange", 5, 1, sequence=7)
        .python("nn.Module: Linear_0", 10, 20)
        .op("aten::linear", 12, 10, sequence=7)
        .op("aten::addmm", 13, 8, sequence=7)
        .op(
            "autograd::engine::evaluate_function: AddmmBackward0",
            50,
            30,
            sequence=7,
            forward_thread=1,
            thread=2,
        )
        .op("AddmmBackward0", 52, 20, sequence=7, forward_thread=1, thread=2)
        .launch("cudaLaunchKernel", 55, 2, correlation=1, thread=2)
        .kernel("gemm", 90, 6, correlation=1)
    )
    found = tree(builder)["Linear_0"]
    assert (found["backward_host_ns"], found["backward_device_ns"]) == (30_000, 6000)
    assert found["device_ns"] == 0


def two_forward_threads(numbers: dict[int, int]) -> TraceBuilder:
    """Threads 1 and 2 run forward, thread 9 the backward of both; `numbers`: first sequence number by thread."""
    builder = TraceBuilder()
    for thread, first in numbers.items():
        builder.python(f"nn.Module: M_{thread}", 0, 50, thread=thread)
        for k in range(3):
            builder.op("aten::mm", 1 + 10 * k, 5, sequence=first + k, thread=thread)
            name = "autograd::engine::evaluate_function: MmBackward0"
            at = 100 + 30 * thread + 10 * k
            builder.op(
                name, at, thread + 1, sequence=first + k, forward_thread=thread + 10, thread=9
            )
    return builder


def test_forward_threads_are_told_apart_by_their_sequence_numbers() -> None:
    found = tree(two_forward_threads({1: 10, 2: 500}))
    assert {path: row["backward_host_ns"] for path, row in found.items()} == {
        "M_1": 6000,
        "M_2": 9000,
    }


def test_backward_joins_nothing_where_two_threads_hold_the_same_numbers_and_no_arrow_tells() -> (
    None
):
    result = modules(two_forward_threads({1: 10, 2: 10}).build())
    assert result.tree.select("path", "backward_host_ns").rows() == [("M_1", None), ("M_2", None)]
    assert (result.outside_host_ns, result.unjoined_host_ns) == (15_000, 15_000)


def test_backward_launches_of_the_autograd_thread_count_to_annotations_too() -> None:
    builder = (
        TraceBuilder()
        .annotation("block", 10, 20)
        .op("aten::mm", 12, 10, sequence=7)
        .op(
            "autograd::engine::evaluate_function: MmBackward0",
            50,
            30,
            sequence=7,
            forward_thread=1,
            thread=2,
        )
        .launch("cudaLaunchKernel", 55, 2, correlation=1, thread=2)
        .kernel("gemm", 90, 6, correlation=1)
    )
    result = modules(builder.build())
    assert result.evidence == "annotations"
    assert result.tree.select(
        "path", "backward_host_ns", "backward_device_ns", "device_ns"
    ).rows() == [("block", 30_000, 6000, 0)]


def checkpointed(frames: bool) -> TraceBuilder:
    """Two modules; the first is checkpointed and repeated inside the backward node of its last op, on thread 2."""
    builder = TraceBuilder().python("nn.Module: Net_0", 0, 60)
    for k, name in enumerate(("A_0", "B_0")):
        builder.python(f"nn.Module: {name}", 5 + 20 * k, 15).op(
            "aten::mm", 6 + 20 * k, 10, sequence=k
        )
    node = "autograd::engine::evaluate_function: MmBackward0"
    builder.op(node, 100, 10, sequence=1, forward_thread=1, thread=2)
    builder.op(node, 120, 40, sequence=0, forward_thread=1, thread=2)
    builder.op(
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 170, 5, thread=2
    )
    if frames:
        builder.python("torch/utils/checkpoint.py(1657): recompute_fn", 125, 20, thread=2)
        builder.python("nn.Module: A_0", 128, 15, thread=2)
    builder.op("aten::mm", 130, 10, sequence=2, thread=2)
    return builder.launch("cudaLaunchKernel", 132, 2, correlation=4, thread=2).kernel(
        "gemm", 140, 7, correlation=4
    )


def test_repeated_forward_work_is_told_apart_by_the_frame_of_the_checkpoint() -> None:
    result = modules(checkpointed(frames=True).build())
    rows = {row["path"]: row for row in result.tree.to_dicts()}
    assert (result.recompute_evidence, set(rows)) == ("frames", {"Net_0", "Net_0/A_0", "Net_0/B_0"})
    again = rows["Net_0/A_0"]
    assert (again["recompute_count"], again["recompute_host_ns"], again["recompute_device_ns"]) == (
        1,
        15_000,
        7000,
    )
    assert (again["count"], again["host_ns"], again["backward_host_ns"]) == (1, 15_000, 20_000)
    # what the checkpoint does around the module belongs to what stands around the module
    assert (rows["Net_0"]["recompute_self_host_ns"], rows["Net_0"]["recompute_host_ns"]) == (
        5000,
        20_000,
    )
    assert rows["Net_0/B_0"]["recompute_host_ns"] == 0
    assert rows["Net_0/B_0"]["backward_host_ns"] == 10_000


def test_without_frames_ops_recorded_inside_the_backward_tell_of_repetition() -> None:
    result = modules(checkpointed(frames=False).build())
    rows = {row["path"]: row for row in result.tree.to_dicts()}
    assert result.recompute_evidence == "operators"
    assert (rows["Net_0/A_0"]["recompute_host_ns"], rows["Net_0/A_0"]["recompute_device_ns"]) == (
        10_000,
        7000,
    )
    assert rows["Net_0/A_0"]["backward_host_ns"] == 30_000


def test_a_backward_that_is_to_be_differentiated_again_is_no_repetition() -> None:
    builder = TraceBuilder().python("nn.Module: Net_0", 0, 60)
    node = "autograd::engine::evaluate_function: MmBackward0"
    for k in range(4):
        builder.op("aten::mm", 5 + 10 * k, 5, sequence=k)
        builder.op(node, 100 + 20 * k, 10, sequence=k, forward_thread=1)
        builder.op("aten::mm", 102 + 20 * k, 5, sequence=10 + k)
    result = modules(builder.build())
    assert (result.recompute_evidence, result.tree["recompute_host_ns"].sum()) == ("none", 0)


def test_self_times_of_all_parts_and_what_is_outside_add_up_to_the_busy_time() -> None:
    trace = checkpointed(frames=True).build()
    result = modules(trace)
    parts = (
        result.tree.select("self_host_ns", "backward_self_host_ns", "recompute_self_host_ns")
        .sum()
        .row(0)
    )
    busy = int(trace.lanes["busy_ns"].sum()) - 7000  # the kernel's lane
    assert sum(parts) + result.outside_host_ns == busy
    assert result.outside_device_ns == 0


def test_a_usual_step_is_told_with_its_spread() -> None:
    builder = TraceBuilder()
    for number, length in ((1, 10), (2, 30), (3, 20)):
        builder.step(number, 100 * number, 100).annotation("block", 100 * number + 5, length)
    row = modules(builder.build()).tree.to_dicts()[0]
    assert (row["mean_all_host_ns"], row["min_all_host_ns"], row["max_all_host_ns"]) == (
        20_000.0,
        10_000,
        30_000,
    )
    assert row["step_count"] == 3


def test_very_deep_nesting_counts_to_the_deepest_level_kept() -> None:
    builder = TraceBuilder()
    for level in range(300):
        builder.python(f"nn.Module: M_{level}", level, 1000 - 2 * level)
    result = modules(builder.build()).tree
    assert result["self_host_ns"].sum() == 1_000_000
    assert result["depth"].max() == 256


def test_columns_do_not_depend_on_the_trace() -> None:
    some = modules(nested().build())
    for builder in (
        TraceBuilder(),
        TraceBuilder().kernel("k", 0, 5),
        TraceBuilder(device_name=None),
    ):
        result = modules(builder.build())
        assert (result.tree.schema, result.evidence) == (some.tree.schema, "none")


def test_a_module_that_memory_marks_and_stacks_name_is_one() -> None:
    def marked(builder: TraceBuilder) -> TraceBuilder:
        for start in (0, 100):
            builder.annotation("traceloom.module:GPT", start + 2, 46).annotation(
                "traceloom.module:Linear", start + 11, 18
            )
        return builder

    plain, both = tree(nested()), tree(marked(nested()))
    assert list(both) == list(plain)
    assert [row["self_host_ns"] for row in both.values()] == [
        row["self_host_ns"] for row in plain.values()
    ]
    alone = tree(marked(TraceBuilder()))
    assert {path: row["kind"] for path, row in alone.items()} == {
        "GPT": "module",
        "GPT/Linear": "module",
    }


# -- against walking up from every event --------------------------------------------------------------------------

NAMES = ("nn.Module: Block_0", "nn.Module: Linear_1", "nn.Module: Block_0", "train.py(3): step")


@cache
def layered(seed: int) -> Trace:
    """Two threads of modules, scopes, annotations and operators in each other, their kernels, and steps."""
    chance, builder = random.Random(seed), TraceBuilder()
    launched: list[int] = []

    def fill(thread: int, low: int, high: int, depth: int) -> None:
        at = low + chance.randrange(5)
        while at < high - 12:
            long = min(chance.randrange(10, 10 + (high - low) // 2), high - at)
            kind = chance.choice(["module", "module", "scope", "annotation", "op", "launch"])
            if kind == "module":
                builder.python(chance.choice(NAMES), at, long, thread=thread)
            elif kind == "scope":
                builder.annotation(
                    f"traceloom.scope:{chance.choice(['a', 'b'])}", at, long, thread=thread
                )
            elif kind == "annotation":
                builder.annotation(chance.choice(["region", "other <b>"]), at, long, thread=thread)
            elif kind == "op":
                builder.op("aten::mm", at, long, thread=thread)
            else:
                launched.append(len(launched) + 1)
                builder.launch(
                    "cudaLaunchKernel", at, long, correlation=launched[-1], thread=thread
                )
                builder.kernel(
                    "k", chance.randrange(900), chance.randrange(30), correlation=launched[-1]
                )
            if kind != "launch" and depth < 4:
                fill(thread, at, at + long, depth + 1)
            at += long + chance.randrange(20)

    for thread in (1, 2):
        fill(thread, chance.randrange(30), 900, 0)
    for step, low in enumerate((100, 400, 650)):
        builder.mark(step, low, thread=5)
    return builder.kernel("orphan", 5, 11).build()


def is_region(row: Row) -> bool:
    module = row["category"] == "python" and row["name"].startswith("nn.Module: ")
    return module or (
        row["category"] == "annotation" and not row["name"].startswith("traceloom.step")
    )


def label(row: Row) -> str:
    return str(row["name"]).removeprefix("nn.Module: ").removeprefix("traceloom.scope:")


@pytest.mark.parametrize("seed", range(6))
def test_every_path_is_what_walking_up_from_each_event_gives(seed: int) -> None:
    trace = layered(seed)
    events = rows_of(trace)
    wanted: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    outside: dict[str, int] = defaultdict(int)

    def credit(row: Row, ns: int, what: str) -> None:
        regions = [label(part) for part in (row, *above(events, row)) if is_region(part)][::-1]
        if not regions:
            outside[what] += ns
            return
        wanted["/".join(regions)][f"self_{what}"] += ns
        for depth in range(1, len(regions) + 1):
            wanted["/".join(regions[:depth])][what] += ns

    children: dict[int, int] = defaultdict(int)
    for row in events:
        if row["device"] is None and row["parent"] is not None:
            children[row["parent"]] += row["ns"]
    for row in events:
        if row["device"] is None:
            credit(row, row["ns"] - children[row["event"]], "host_ns")
            if is_region(row):
                wanted[
                    "/".join([label(r) for r in (row, *above(events, row)) if is_region(r)][::-1])
                ]["count"] += 1
    for work in gpu_rows_of(trace):
        if work["launch"] is None:
            outside["device_ns"] += work["ns"]
        else:
            credit(events[work["launch"]], work["ns"], "device_ns")
    found = modules(trace)
    rows = {row["path"]: row for row in found.tree.to_dicts()}
    assert rows.keys() == wanted.keys()
    for path, columns in wanted.items():
        for name in ("count", "host_ns", "self_host_ns", "device_ns", "self_device_ns"):
            assert rows[path][name] == columns[name], (path, name)
    assert (found.outside_host_ns, found.outside_device_ns) == (
        outside["host_ns"],
        outside["device_ns"],
    )
    assert found.evidence == "python-modules"
    assert found.tree["backward_host_ns"].null_count() == found.tree.height


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_a_path_add_up_to_it_and_siblings_come_by_their_time(seed: int) -> None:
    found = modules(layered(seed))
    sums = found.steps.group_by("node").agg(pl.col("all_host_ns", "all_device_ns").sum())
    rows = found.tree.join(sums, on="node", how="left").with_columns(
        pl.col("all_host_ns", "all_device_ns").fill_null(0)
    )
    assert rows["all_host_ns"].to_list() == rows["host_ns"].to_list()
    assert rows["all_device_ns"].to_list() == rows["device_ns"].to_list()
    for _, part in found.tree.group_by("parent", maintain_order=True):
        assert part["host_ns"].is_sorted(descending=True)
    whole = modules(layered(seed)).steps.drop_nulls("step")
    for node, part in whole.group_by("node"):
        row = found.tree.row(node[0], named=True)  # type: ignore[arg-type]
        in_steps = part.filter(pl.col("step").is_in([0, 1]))  # the last mark closes the last step
        assert row["max_all_host_ns"] == (
            in_steps["all_host_ns"].max() if in_steps.height else None
        )
