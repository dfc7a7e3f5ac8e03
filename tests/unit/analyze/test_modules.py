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


def test_modules_push_annotations_out_but_not_scopes() -> None:
    builder = nested().annotation("Optimizer.step#SGD.step", 200, 10).op("traceloom.scope:loss", 220, 5)
    result = modules(builder.build())
    assert result.evidence == "python-modules"
    assert set(result.tree["path"]) == {"GPT_0", "GPT_0/Linear_0", "loss"}


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


def test_backward_is_unknown_where_two_threads_ran_forward() -> None:
    builder = TraceBuilder().python("nn.Module: A_0", 0, 20)
    for thread in (1, 2):
        builder.op("aten::mm", 1, 5, sequence=1, thread=thread)
        name = "autograd::engine::evaluate_function: MmBackward0"
        builder.op(name, 30 + thread * 10, 5, sequence=1, forward_thread=thread, thread=9)
    assert tree(builder)["A_0"]["backward_host_ns"] is None


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
