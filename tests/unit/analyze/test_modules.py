"""The module tree: paths, self times, backward joined by sequence numbers."""

from __future__ import annotations

from typing import Any

from traceloom.analyze import modules
from traceloom.testing import TraceBuilder


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
    assert (found["GPT_0"]["count"], found["GPT_0"]["host_ns"], found["GPT_0"]["self_host_ns"]) == (2, 100_000, 60_000)
    assert found["GPT_0/Linear_0"]["self_host_ns"] == 40_000
    assert (found["GPT_0"]["device_ns"], found["GPT_0"]["self_device_ns"]) == (14_000, 0)
    assert (found["GPT_0/Linear_0"]["self_device_ns"], found["GPT_0"]["kernel_count"]) == (14_000, 2)
    assert found["GPT_0/Linear_0"]["parent"] == found["GPT_0"]["node"]


def test_annotations_stand_in_where_no_module_was_recorded_and_steps_are_left_out() -> None:
    builder = TraceBuilder().step(1, 0, 100).annotation("## forward ##", 10, 20).annotation("inner", 15, 5)
    result = modules(builder.build())
    assert result.evidence == "annotations"
    assert result.tree.select("path", "kind", "self_host_ns").rows() == [
        ("## forward ##", "annotation", 15_000),
        ("## forward ##/inner", "annotation", 5000),
    ]


def test_modules_annotations_and_scopes_stand_in_one_tree() -> None:
    builder = nested().annotation("Optimizer.step#SGD.step", 200, 10).op("traceloom.scope:loss", 220, 5)
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
    builder = TraceBuilder().op("traceloom.scope:block", 0, 20).op("traceloom.scope:block.attention", 5, 10)
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
        .op("autograd::engine::evaluate_function: AddmmBackward0", 50, 30, sequence=7, forward_thread=1, thread=2)
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
            builder.op(name, at, thread + 1, sequence=first + k, forward_thread=thread + 10, thread=9)
    return builder


def test_forward_threads_are_told_apart_by_their_sequence_numbers() -> None:
    found = tree(two_forward_threads({1: 10, 2: 500}))
    assert {path: row["backward_host_ns"] for path, row in found.items()} == {"M_1": 6000, "M_2": 9000}


def test_backward_joins_nothing_where_two_threads_hold_the_same_numbers_and_no_arrow_tells() -> None:
    result = modules(two_forward_threads({1: 10, 2: 10}).build())
    assert result.tree.select("path", "backward_host_ns").rows() == [("M_1", None), ("M_2", None)]
    assert (result.outside_host_ns, result.unjoined_host_ns) == (15_000, 15_000)


def test_backward_launches_of_the_autograd_thread_count_to_annotations_too() -> None:
    builder = (
        TraceBuilder()
        .annotation("block", 10, 20)
        .op("aten::mm", 12, 10, sequence=7)
        .op("autograd::engine::evaluate_function: MmBackward0", 50, 30, sequence=7, forward_thread=1, thread=2)
        .launch("cudaLaunchKernel", 55, 2, correlation=1, thread=2)
        .kernel("gemm", 90, 6, correlation=1)
    )
    result = modules(builder.build())
    assert result.evidence == "annotations"
    assert result.tree.select("path", "backward_host_ns", "backward_device_ns", "device_ns").rows() == [
        ("block", 30_000, 6000, 0)
    ]


def checkpointed(frames: bool) -> TraceBuilder:
    """Two modules; the first is checkpointed and repeated inside the backward node of its last op, on thread 2."""
    builder = TraceBuilder().python("nn.Module: Net_0", 0, 60)
    for k, name in enumerate(("A_0", "B_0")):
        builder.python(f"nn.Module: {name}", 5 + 20 * k, 15).op("aten::mm", 6 + 20 * k, 10, sequence=k)
    node = "autograd::engine::evaluate_function: MmBackward0"
    builder.op(node, 100, 10, sequence=1, forward_thread=1, thread=2)
    builder.op(node, 120, 40, sequence=0, forward_thread=1, thread=2)
    builder.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 170, 5, thread=2)
    if frames:
        builder.python("torch/utils/checkpoint.py(1657): recompute_fn", 125, 20, thread=2)
        builder.python("nn.Module: A_0", 128, 15, thread=2)
    builder.op("aten::mm", 130, 10, sequence=2, thread=2)
    return builder.launch("cudaLaunchKernel", 132, 2, correlation=4, thread=2).kernel("gemm", 140, 7, correlation=4)


def test_repeated_forward_work_is_told_apart_by_the_frame_of_the_checkpoint() -> None:
    result = modules(checkpointed(frames=True).build())
    rows = {row["path"]: row for row in result.tree.to_dicts()}
    assert (result.recompute_evidence, set(rows)) == ("frames", {"Net_0", "Net_0/A_0", "Net_0/B_0"})
    again = rows["Net_0/A_0"]
    assert (again["recompute_count"], again["recompute_host_ns"], again["recompute_device_ns"]) == (1, 15_000, 7000)
    assert (again["count"], again["host_ns"], again["backward_host_ns"]) == (1, 15_000, 20_000)
    # what the checkpoint does around the module belongs to what stands around the module
    assert (rows["Net_0"]["recompute_self_host_ns"], rows["Net_0"]["recompute_host_ns"]) == (5000, 20_000)
    assert rows["Net_0/B_0"]["recompute_host_ns"] == 0
    assert rows["Net_0/B_0"]["backward_host_ns"] == 10_000


def test_without_frames_ops_recorded_inside_the_backward_tell_of_repetition() -> None:
    result = modules(checkpointed(frames=False).build())
    rows = {row["path"]: row for row in result.tree.to_dicts()}
    assert result.recompute_evidence == "operators"
    assert (rows["Net_0/A_0"]["recompute_host_ns"], rows["Net_0/A_0"]["recompute_device_ns"]) == (10_000, 7000)
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
    parts = result.tree.select("self_host_ns", "backward_self_host_ns", "recompute_self_host_ns").sum().row(0)
    busy = int(trace.lanes["busy_ns"].sum()) - 7000  # the kernel's lane
    assert sum(parts) + result.outside_host_ns == busy
    assert result.outside_device_ns == 0


def test_a_usual_step_is_told_with_its_spread() -> None:
    builder = TraceBuilder()
    for number, length in ((1, 10), (2, 30), (3, 20)):
        builder.step(number, 100 * number, 100).annotation("block", 100 * number + 5, length)
    row = modules(builder.build()).tree.to_dicts()[0]
    assert (row["mean_all_host_ns"], row["min_all_host_ns"], row["max_all_host_ns"]) == (20_000.0, 10_000, 30_000)
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
    for builder in (TraceBuilder(), TraceBuilder().kernel("k", 0, 5), TraceBuilder(device_name=None)):
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
    assert [row["self_host_ns"] for row in both.values()] == [row["self_host_ns"] for row in plain.values()]
    alone = tree(marked(TraceBuilder()))
    assert {path: row["kind"] for path, row in alone.items()} == {"GPT": "module", "GPT/Linear": "module"}
