"""Blocks, their names, categories and owners, on traces written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from traceloom.analyze.memory_answers import MIN_STEPS, explain, explain_allocations
from traceloom.analyze.memory_blocks import EXISTED_BEFORE, build_blocks
from traceloom.analyze.memory_owners import LONG_SCHEMA, iterate_block_tables
from traceloom.findings import Context
from traceloom.findings.rule import MemoryCandidate
from traceloom.findings.transfers import find_memory_growth
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

EVALUATE = "autograd::engine::evaluate_function: "


def _names(trace: Trace, **options: bool) -> list[str]:
    return explain(trace, **options).named.names().to_list()


def _example() -> TraceBuilder:
    """`function1` around two `op1` and, inside `sec1`, one `op2`; the first `op1` calls an inner op."""
    builder = TraceBuilder().annotation("traceloom.scope:function1", 0, 100)
    builder.op("aten::op1", 5, 10).op("aten::inner", 6, 8).allocation(8, 64, address=1)
    builder.op("aten::op1", 20, 10).allocation(25, 64, address=2)
    builder.annotation("traceloom.scope:function1.sec1", 40, 30).op("aten::op2", 45, 10).allocation(
        50, 32, address=3
    )
    return builder


def test_names_are_scope_outermost_op_and_counter() -> None:
    assert _names(_example().build()) == [
        "function1.op1.1",
        "function1.op1.2",
        "function1.sec1.op2.1",
    ]


def test_full_op_names_keep_the_namespace() -> None:
    assert _names(_example().build(), full_op_names=True)[0] == "function1.aten::op1.1"


def test_further_allocations_of_one_invocation_are_numbered_and_no_op_is_none() -> None:
    builder = TraceBuilder().op("aten::op1", 0, 10)
    for number in range(3):
        builder.allocation(1 + number, 8, address=number + 1)
    builder.allocation(20, 8, address=9).allocation(30, 8, address=10)
    assert _names(builder.build()) == ["op1.1", "op1.1#2", "op1.1#3", "none.1", "none.2"]


def test_the_counter_counts_invocations_that_allocate_nothing_and_never_restarts_but_that_of_a_site_does() -> (
    None
):
    builder = TraceBuilder()
    for step in range(2):
        start = 100.0 * step
        builder.step(step, start, 100).op("aten::op1", start + 1, 5)
        builder.op("aten::op1", start + 10, 5).allocation(start + 12, 8, address=step + 1)
    named = explain(builder.build()).named
    assert named.names().to_list() == ["op1.2", "op1.4"]
    assert named.names(sites=True).to_list() == ["op1.2", "op1.2"]


def test_names_are_unique_over_scopes_that_come_again() -> None:
    builder = TraceBuilder()
    for turn in range(4):
        start = 50.0 * turn
        builder.annotation("traceloom.module:Net", start, 40).annotation(
            "traceloom.module:Net.fc", start + 1, 30
        )
        builder.op("aten::linear", start + 2, 10).allocation(start + 3, 8, address=turn + 1)
    names = _names(builder.build())
    assert names == [f"Net.fc.linear.{k}" for k in range(1, 5)]


def _trained(accumulate: bool = True) -> TraceBuilder:
    """A forward op in `fwd`, its backward node with a gradient, and one that only adds to a gradient."""
    builder = TraceBuilder().annotation("traceloom.scope:fwd", 0, 30)
    builder.op("aten::linear", 1, 20, sequence=7).allocation(5, 100, address=1)
    builder.op(f"{EVALUATE}AddmmBackward0", 40, 20, sequence=7, forward_thread=1)
    builder.op("AddmmBackward0", 41, 18, sequence=7, forward_thread=1).allocation(
        45, 200, address=2
    )
    builder.allocation(50, -100, address=1)
    if accumulate:
        builder.op(f"{EVALUATE}torch::autograd::AccumulateGrad", 62, 10).allocation(
            65, 300, address=3
        )
    return builder


def test_backward_allocations_belong_to_the_scope_of_their_forward_op() -> None:
    known = explain(_trained().build())
    assert known.named.names().to_list() == [
        "fwd.linear.1",
        "fwd.AddmmBackward0.1",
        "fwd.AccumulateGrad.1",
    ]
    assert known.named.backward.tolist() == [False, True, True]


def test_a_backward_node_with_hooks_carries_its_number_in_the_call_inside_it() -> None:
    builder = TraceBuilder().annotation("traceloom.scope:fwd", 0, 30)
    builder.op("aten::relu", 1, 20, sequence=7).allocation(5, 100, address=1)
    builder.op(f"{EVALUATE}ReluBackward0", 40, 20)
    builder.op("ReluBackward0", 45, 10, sequence=7, forward_thread=1).allocation(46, 200, address=2)
    assert _names(builder.build()) == ["fwd.relu.1", "fwd.ReluBackward0.1"]


def test_wrappers_are_no_scopes_and_no_modules() -> None:
    builder = TraceBuilder().annotation("DistributedDataParallel.forward", 0, 90)
    builder.python("nn.Module: DistributedDataParallel_0", 1, 80).python("nn.Module: Net_0", 2, 70)
    builder.op("aten::relu", 3, 20).allocation(5, 100, address=1)
    builder.python("nn.Module: MyDataParallel_0", 30, 20)
    builder.op("aten::relu", 31, 10).allocation(35, 10, address=2)
    trace = builder.build()
    assert _names(trace) == ["Net_0.relu.1", "Net_0.MyDataParallel_0.relu.1"]
    assert dict(zip(*_sums(trace, "module"), strict=True))["Net_0"] == 100


def test_a_backward_node_without_forward_op_is_said_to_be_unknown() -> None:
    builder = TraceBuilder().op(f"{EVALUATE}FooBackward0", 0, 20).allocation(5, 8, address=1)
    found = explain_allocations(builder.build())
    assert found.largest["name"].to_list() == ["backward.unknown.FooBackward0.1"]
    assert [notice.slug for notice in found.notices] == ["backward-without-forward"]


def test_what_is_recomputed_is_named_as_in_the_forward_pass() -> None:
    builder = (
        TraceBuilder()
        .annotation("traceloom.scope:fwd", 0, 60)
        .annotation("traceloom.module:fwd.Net", 1, 50)
    )
    builder.annotation("traceloom.module:fwd.Net.fc", 2, 30)
    builder.op("aten::linear", 3, 20, sequence=7).allocation(5, 100, address=1).allocation(
        6, -100, address=1
    )
    builder.op(f"{EVALUATE}AddmmBackward0", 80, 40, sequence=7, forward_thread=1)
    builder.annotation("traceloom.module:Net.fc", 82, 20)
    builder.op("aten::linear", 83, 10, sequence=9).allocation(85, 100, address=2)
    assert _names(builder.build()) == ["fwd.Net.fc.linear.1", "fwd.Net.fc.linear.2"]


def test_categories_follow_from_who_makes_and_who_frees() -> None:
    builder = _trained()
    builder.annotation("Optimizer.step#Adam.step", 100, 50).op(
        "aten::zeros_like", 101, 5
    ).allocation(102, 400, address=4)
    builder.op("aten::sqrt", 110, 5).allocation(111, 16, address=5).allocation(120, -16, address=5)
    known = explain(builder.build())
    from traceloom.analyze.memory_owners import CATEGORIES

    told = dict(
        zip(known.named.names(), [CATEGORIES[k] for k in known.kinds.category], strict=True)
    )
    assert told == {
        "fwd.linear.1": "activation",
        "fwd.AddmmBackward0.1": "gradient",
        "fwd.AccumulateGrad.1": "gradient",
        "Adam.step.zeros_like.1": "optimizer_state",
        "Adam.step.sqrt.1": "temporary",
    }


def _census(trace: Trace, key: str, **columns: list[Any]) -> Trace:
    capture = {**(trace.meta.capture or {}), key: columns}
    return replace(trace, meta=replace(trace.meta, capture=capture))


def test_the_census_opens_the_record_and_names_what_was_there() -> None:
    builder = (
        TraceBuilder().op("aten::mm", 0, 10).allocation(1, 50, address=1, device_type=0, device=-1)
    )
    builder.allocation(2, -30, address=77, device_type=0, device=-1)
    trace = _census(
        builder.build(),
        "live_storages_at_start",
        address=[77, 88],
        bytes=[30, 20],
        device_type=["cpu", "cpu"],
        device=[-1, -1],
        owner=["parameter", "optimizer_state"],
        name=["Net.fc.weight", "Adam.exp_avg of Net.fc.weight"],
    )
    found = explain_allocations(trace)
    assert found.pools.select("peak_bytes", "end_bytes").rows() == [(100, 70)]
    paths = dict(found.peak.select("path", "bytes").rows())
    assert paths["(before the recording).parameters.Net.fc.weight"] == 30
    by_module = dict(zip(*_sums(trace, "module"), strict=True))
    assert by_module["Net.fc"] == 50


_GRAPH = ["kept for backward by ReluBackward0"]


def test_what_a_graph_has_saved_before_the_window_is_an_activation() -> None:
    builder = (
        TraceBuilder().op("aten::mm", 0, 10).allocation(1, 50, address=1, device_type=0, device=-1)
    )
    trace = _census(
        builder.build(),
        "live_storages_at_start",
        address=[77],
        bytes=[30],
        device_type=["cpu"],
        device=[-1],
        owner=["activation"],
        name=_GRAPH,
    )
    found = explain_allocations(trace)
    assert ("activation", "census", 30) in found.categories.select(
        "category", "evidence", "bytes"
    ).rows()
    assert (
        dict(found.peak.select("path", "bytes").rows())[
            "(before the recording).activations." + _GRAPH[0]
        ]
        == 30
    )


def test_inputs_that_a_graph_has_saved_stay_inputs() -> None:
    builder = TraceBuilder().annotation(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 20
    )
    builder.op("aten::stack", 1, 10).allocation(2, 50, address=1, device_type=0, device=-1)
    trace = _census(
        builder.build(),
        "live_storages_at_end",
        address=[1],
        bytes=[50],
        device_type=["cpu"],
        device=[-1],
        owner=["activation"],
        name=_GRAPH,
    )
    assert explain_allocations(trace).categories.select("category", "evidence").rows() == [
        ("input", "inferred")
    ]


def test_storages_that_the_events_do_not_explain_are_counted() -> None:
    builder = (
        TraceBuilder().op("aten::mm", 0, 10).allocation(1, 50, address=1, device_type=0, device=-1)
    )
    start = {"address": [77, 88], "bytes": [30, 7], "device_type": ["cpu"] * 2, "device": [-1] * 2}
    trace = _census(
        builder.build(), "live_storages_at_start", **start, owner=["other"] * 2, name=["a", "b"]
    )
    end = {
        "address": [99, 88, 1],
        "bytes": [400, 7, 50],
        "device_type": ["cpu"] * 3,
        "device": [-1] * 3,
    }
    trace = _census(trace, "live_storages_at_end", **end, owner=["other"] * 3, name=["c", "b", "d"])
    said = {notice.slug: notice for notice in explain_allocations(trace).notices}
    assert set(said) == {"unrecorded-allocations", "unrecorded-frees"}
    assert "1 storages (400 B)" in said["unrecorded-allocations"].message
    assert "1 storages (30 B)" in said["unrecorded-frees"].message


def test_a_closing_census_that_adds_small_storages_up_says_nothing_of_what_is_gone() -> None:
    builder = (
        TraceBuilder().op("aten::mm", 0, 10).allocation(1, 50, address=1, device_type=0, device=-1)
    )
    one = {"device_type": ["cpu"], "device": [-1], "owner": ["other"]}
    trace = _census(
        builder.build(), "live_storages_at_start", address=[77], bytes=[30], **one, name=["a"]
    )
    trace = _census(
        trace, "live_storages_at_end", address=[0], bytes=[80], **one, name=["(2 smaller ones)"]
    )
    assert explain_allocations(trace).notices == ()


def _sums(trace: Trace, by: str) -> tuple[list[str], list[int]]:
    known = explain(trace)
    names, number = known.by(by)
    return names, [int(known.named.blocks.bytes[number == k].sum()) for k in range(len(names))]


@pytest.mark.parametrize("by", ["scope", "module", "category", "op", "stack", "dtype"])
def test_every_division_adds_up(by: str) -> None:
    trace = _trained().build()
    assert sum(_sums(trace, by)[1]) == 600


def test_address_reuse_lost_frees_and_blocks_from_before() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 100)
    builder.allocation(1, 10, address=5).allocation(2, -10, address=5).allocation(3, 20, address=5)
    builder.allocation(4, 30, address=5)  # the free of the 20 went unrecorded
    builder.allocation(5, -7, address=6)  # made before the recording
    found = build_blocks(builder.build())
    found.check()
    assert sorted(zip(found.bytes.tolist(), (found.ended < 5).tolist(), strict=True)) == [
        (7, True),
        (10, True),
        (20, True),
        (30, False),
    ]
    assert found.lost_frees == 1
    assert (found.start_ns == EXISTED_BEFORE).sum() == 1


def test_without_addresses_a_free_ends_the_youngest_block_of_its_size() -> None:
    builder = TraceBuilder().op("aten::mm", 0, 100)
    for time, change in enumerate([-10, 10, 20, 10, -10, -20, 10, -10]):
        builder.allocation(1.0 + time, change, address=0)
    builder.allocation(50, 10, address=0, device=1)  # of another device
    trace = builder.build()
    found = build_blocks(trace)
    found.check()
    pairs = zip(found.made.tolist(), found.ended.tolist(), found.bytes.tolist(), strict=True)
    assert sorted(pairs) == [
        (-1, 0, 10),
        (1, 9, 10),
        (2, 5, 20),
        (3, 4, 10),
        (6, 7, 10),
        (8, 9, 10),
    ]
    assert (found.lost_frees, found.resized) == (0, 0)
    notices = {notice.slug: notice.count for notice in explain_allocations(trace).notices}
    assert notices == {"freed-from-before": 1, "allocations-without-address": 6}


@given(
    st.lists(
        st.tuples(st.sampled_from([8, 16, 24, -8, -16, -24]), st.sampled_from([0, 0, 0, 1])),
        min_size=1,
        max_size=60,
    )
)
def test_without_addresses_the_blocks_add_up_to_the_events_of_every_device(
    events: list[tuple[int, int]],
) -> None:
    builder = TraceBuilder().op("aten::mm", 0, 1000)
    for number, (change, device) in enumerate(events):
        builder.allocation(1.0 + number, change, address=0, device=device)
    found = build_blocks(builder.build())
    found.check()
    for number, pool in enumerate(found.pools):
        changes = np.diff(found.levels(number, len(events))).tolist()
        assert changes == [change if device == pool.device else 0 for change, device in events]
    alive = [(pool, int(size)) for pool, size in zip(found.pool, found.bytes, strict=True)]
    # as many blocks as allocations, and the frees of what was there before: no more than the sums require
    for number, pool in enumerate(found.pools):
        for size in (8, 16, 24):
            level = np.cumsum(
                [np.sign(c) for c, device in events if abs(c) == size and device == pool.device]
            )
            made = sum(c == size and device == pool.device for c, device in events)
            assert alive.count((number, size)) == made - min(0, *level.tolist(), 0)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 1000)), min_size=1, max_size=60),
    st.integers(0, 10_000),
)
def test_the_blocks_add_up_to_the_allocators_total_after_every_event(
    moves: list[tuple[int, int]], before: int
) -> None:
    held: dict[int, int] = {}
    total = before
    builder = TraceBuilder().op("aten::mm", 0, 1000)
    totals = []
    for number, (address, size) in enumerate(moves):
        change = -held.pop(address) if address in held else size
        if change > 0:
            held[address] = change
        total += change
        builder.allocation(1.0 + number, change, address=address, total_allocated=total)
        totals.append(total)
    trace = builder.build()
    found = build_blocks(trace)
    found.check()
    (pool,) = found.pools
    levels = found.levels(0, trace.allocations.height)
    assert (levels + (pool.start_bytes or 0) - levels[0])[1:].tolist() == totals
    names = _names(trace)
    assert len(set(names)) == len(names)
    peak = explain_allocations(trace)
    assert peak.pools["peak_bytes"].to_list() == [max([before, *totals])]
    root = peak.peak.filter(pl.col("depth") == 0)
    assert root["bytes"].to_list() == peak.pools["peak_bytes"].to_list()
    assert peak.peak["self_bytes"].sum() == root["bytes"].sum()


def _leaking(
    leaks: bool,
    steps: int = MIN_STEPS + 2,
    leaking: Callable[[int], bool] = lambda _: True,
    stacks: bool = False,
    size: int = 1000,
) -> Trace:
    builder = TraceBuilder()
    for step in range(steps):
        start = 100.0 * step
        builder.step(step, start, 100).annotation("traceloom.scope:loop", start + 1, 90)
        if stacks:
            builder.python("train.py(14): <module>", start + 1.2, 50)
            builder.python("torch/functional.py(3): add", start + 1.4, 6)
            builder.python(
                f"<built-in method add of Tensor object at 0x7f{step}>", start + 1.6, 5.5
            )
        builder.op("aten::add", start + 2, 5).allocation(start + 3, size, address=10 * step + 1)
        builder.op("aten::mul", start + 10, 5).allocation(start + 12, 50, address=10 * step + 2)
        builder.allocation(start + 20, -50, address=10 * step + 2)
        if not (leaks and leaking(step)):
            builder.allocation(start + 30, -size, address=10 * step + 1)
    return builder.build()


def test_what_every_step_leaves_behind_grows() -> None:
    found = explain_allocations(_leaking(leaks=True)).growth
    assert found.select("site", "bytes_per_step", "step_count").rows() == [
        ("loop.add.1", 1000.0, MIN_STEPS + 1)
    ]


def test_memory_that_grows_is_made_in_the_users_own_code() -> None:
    trace = _leaking(leaks=True, stacks=True, size=20_000)
    assert explain_allocations(trace).growth["frame"].to_list() == ["train.py(14): <module>"]
    (finding,) = find_memory_growth(Context.of(Session((trace,), "made")))
    assert isinstance(finding, MemoryCandidate)
    assert finding.advice.endswith("It is made in train.py(14): <module>.")
    explained = explain(trace)
    stacks, number = explained.by("stack")
    used = {stacks[index] for index in number.tolist()}
    assert len(used) == 2, "the address of an object makes no other stack"
    assert not any("0x7f" in stack for stack in used)


@pytest.mark.parametrize(
    ("leaking", "period"), [(lambda step: step % 2, 2), (lambda step: step % 3 == 1, 3)]
)
def test_what_every_second_or_third_step_leaves_behind_grows(
    leaking: Callable[[int], bool], period: int
) -> None:
    found = explain_allocations(_leaking(leaks=True, steps=12, leaking=leaking)).growth
    assert found.select("period", "bytes_per_step").rows() == [(period, 1000 / period)]


@pytest.mark.parametrize("steps", [{0, 1, 7}, {0, 1, 2, 3}, {2, 10}])
def test_what_a_few_steps_leave_behind_without_any_order_does_not_grow(steps: set[int]) -> None:
    assert (
        explain_allocations(
            _leaking(leaks=True, steps=12, leaking=steps.__contains__)
        ).growth.height
        == 0
    )


def test_what_is_freed_does_not_grow() -> None:
    assert explain_allocations(_leaking(leaks=False)).growth.height == 0


def test_the_table_of_all_allocations() -> None:
    trace = _trained().build()
    known = explain(trace)
    rows = pl.concat(
        iterate_block_tables(trace, known.named, known.kinds, known.whose, full_table=True)
    )
    assert rows.schema == LONG_SCHEMA
    first = rows.row(0, named=True)
    assert (first["name"], first["bytes"], first["lifetime_ns"], first["innermost_op"]) == (
        "fwd.linear.1",
        100,
        45_000,
        "aten::linear",
    )
    assert rows["lifetime_ns"].null_count() == 2


@pytest.mark.parametrize(
    "counted", [{}, {"address": [1], "bytes": [9], "device_type": ["cuda"], "device": [0]}]
)
def test_a_trace_without_allocations_has_no_answers_even_where_a_census_was_taken(
    counted: dict[str, Any],
) -> None:
    trace = _census(
        TraceBuilder().op("aten::mm", 0, 10).build(),
        "live_storages_at_start",
        **counted,
        owner=["parameter"],
        name=["Net.w"],
    )
    found = explain_allocations(trace)
    assert all(
        frame.height == 0
        for frame in (found.pools, found.peak, found.categories, found.largest, found.growth)
    )


def test_an_address_that_a_census_names_twice_counts_once() -> None:
    builder = (
        TraceBuilder()
        .op("aten::mm", 0, 10)
        .allocation(1, -30, address=77, device_type=0, device=-1)
    )
    same = {
        "device_type": ["cpu"] * 4,
        "device": [-1] * 4,
        "owner": ["other"] * 4,
        "name": ["a", "b", "c", "d"],
    }
    trace = _census(
        builder.build(),
        "live_storages_at_start",
        address=[77, 77, 0, 0],
        bytes=[30, 9, 5, 6],
        **same,
    )
    known = explain(trace)
    assert known.named.blocks.bytes.tolist() == [30, 5, 6]
    assert known.named.blocks.ended.tolist() == [0, 1, 1]


def test_a_census_that_is_none_is_left_out() -> None:
    trace = _census(_example().build(), "live_storages_at_start", address=["x"], bytes=[1])
    assert explain_allocations(trace).pools.height == 1
    assert np.all(explain(trace).named.blocks.owner < 0)
