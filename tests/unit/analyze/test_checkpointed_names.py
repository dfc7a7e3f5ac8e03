"""Names of what re-entrant checkpointing allocates: a backward pass that runs inside a node of another one."""

from __future__ import annotations

from typing import Any

import pytest

from traceloom.analyze.memory_answers import explain, explain_allocations
from traceloom.testing import TraceBuilder

EVALUATE = "autograd::engine::evaluate_function: "


def forward(layers: int = 1) -> TraceBuilder:
    """Checkpointed layers in `fwd`, each 100 µs; the operators inside run without autograd, so without a number."""
    builder = TraceBuilder().annotation("traceloom.scope:fwd", 0, 100 * layers)
    builder.annotation("traceloom.module:fwd.Net", 0, 100 * layers)
    for layer in range(layers):
        at = 100 * layer
        builder.op("CheckpointFunction", at + 2, 60, sequence=5 + layer)
        builder.annotation(f"traceloom.module:fwd.Net.layer{layer}", at + 3, 50)
        builder.op("aten::linear", at + 4, 20).allocation(at + 5, 100, address=1 + layer)
    return builder


def backward(
    builder: TraceBuilder,
    layer: int,
    at: float,
    number: int,
    *,
    module: bool = True,
    thread: int = 1,
) -> TraceBuilder:
    """The node of a layer's checkpoint: it runs the layer again (as `number`) and its backward pass inside."""
    on: dict[str, Any] = {"thread": thread}
    builder.op(
        f"{EVALUATE}CheckpointFunctionBackward", at, 100, sequence=5 + layer, forward_thread=1, **on
    )
    if module:
        builder.annotation(f"traceloom.module:Net.layer{layer}", at + 2, 20, **on)
    builder.op("aten::linear", at + 3, 10, sequence=number, **on).allocation(
        at + 5, 100, address=10 + layer, **on
    )
    builder.op(
        f"{EVALUATE}AddmmBackward0", at + 30, 30, sequence=number, forward_thread=thread, **on
    )
    builder.op("AddmmBackward0", at + 31, 20, sequence=number, forward_thread=thread, **on)
    builder.allocation(at + 35, 200, address=20 + layer, **on)
    builder.op(f"{EVALUATE}torch::autograd::AccumulateGrad", at + 70, 10, **on).allocation(
        at + 72, 50, address=30 + layer, **on
    )
    return builder


def test_a_backward_pass_inside_a_node_belongs_to_what_that_node_ran_again() -> None:
    named = explain(backward(forward(), 0, 200, 9).build()).named
    layer = "fwd.Net.layer0"
    assert named.names().to_list() == [
        f"{layer}.linear.1",
        f"{layer}.linear.2",
        f"{layer}.AddmmBackward0.1",
        f"{layer}.AccumulateGrad.1",
    ]
    assert named.backward.tolist() == [False, True, True, True]


def test_without_modules_inside_it_belongs_to_the_scope_of_the_checkpoint() -> None:
    names = explain(backward(forward(), 0, 200, 9, module=False).build()).named.names().to_list()
    assert names[0] == "fwd.Net.layer0.linear.1"
    assert names[1:] == [
        "fwd.Net.CheckpointFunctionBackward.1",
        "fwd.Net.AddmmBackward0.1",
        "fwd.Net.AccumulateGrad.1",
    ]


@pytest.mark.parametrize("numbers", [(9, 9), (9, 12)])
@pytest.mark.parametrize("threads", [(1, 1), (2, 3), (3, 2)])
def test_layers_are_told_apart_though_each_counts_anew(
    numbers: tuple[int, int], threads: tuple[int, int]
) -> None:
    """The last layer goes backward first; the threads of two devices count each for itself."""
    builder = forward(2)
    backward(builder, 1, 300, numbers[0], thread=threads[0])
    backward(builder, 0, 500, numbers[1], thread=threads[1])
    names = explain(builder.build()).named.names().to_list()
    assert names[2:] == [
        f"fwd.Net.layer{layer}.{op}"
        for layer in (1, 0)
        for op in ("linear.2", "AddmmBackward0.1", "AccumulateGrad.1")
    ]


def test_no_node_of_a_checkpoint_is_said_to_be_unknown() -> None:
    assert explain_allocations(backward(forward(), 0, 200, 9).build()).notices == ()


def test_a_nested_node_whose_operator_was_not_run_again_is_not_guessed() -> None:
    builder = forward().op(
        f"{EVALUATE}CheckpointFunctionBackward", 200, 100, sequence=5, forward_thread=1
    )
    builder.op("aten::linear", 203, 10, sequence=9)
    builder.op(f"{EVALUATE}AddmmBackward0", 230, 30, sequence=8, forward_thread=1).allocation(
        235, 200, address=3
    )
    found = explain_allocations(builder.build())
    assert [notice.slug for notice in found.notices] == ["backward-without-forward"]
    assert found.largest["name"].to_list()[0] == "backward.unknown.AddmmBackward0.1"
