"""Joining host and device traces: by ids, by names, and refusing what is not of one run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.trace_pairs import NestedOp, build_trace_pair
from traceloom.errors import InputError
from traceloom.formats import read_kineto
from traceloom.formats.host_trace import read_host_trace
from traceloom.graph import host_match as ms
from traceloom.graph.graph import GRAPH_SCHEMAS
from traceloom.graph.host_match import Matching, match
from traceloom.testing import HostTraceBuilder, TraceBuilder
from traceloom.testing.host_trace_builder import HOST_SCHEMAS
from traceloom.trace.trace import HostTrace, Trace

LAYER = (
    NestedOp(
        "aten::linear",
        (NestedOp("aten::t", (NestedOp("aten::transpose"),)), NestedOp("aten::addmm")),
    ),
    NestedOp("aten::relu", (NestedOp("aten::clamp_min"),)),
)
STEP = [
    NestedOp("forward", LAYER * 3),
    *[
        NestedOp("AddmmBackward0", (NestedOp("aten::mm"), NestedOp("aten::t")), thread=2)
        for _ in range(3)
    ],
    NestedOp("AccumulateGrad", (NestedOp("aten::detach"),), thread=2),
    NestedOp("Optimizer.step#SGD.step", (NestedOp("aten::add_"), NestedOp("aten::add_"))),
]
OPS = 33


def check(found: Matching, trace: Trace, host: HostTrace) -> None:
    """What holds for every join: equal names, each host op at most once, on one lane per thread, in order."""
    event = np.flatnonzero(found.host_op >= 0)
    ops = host.ops.select("id", "name", "thread").unique("id", keep="first")
    joined = pl.DataFrame({"event": event, "id": found.host_op[event]}).join(
        ops, on="id", how="left"
    )
    names = trace.events["name"].gather(event)
    assert joined["name"].to_list() == names.to_list()
    assert joined["id"].n_unique() == event.size
    assert found.matched == event.size
    assert found.outcome.len() == host.ops.height
    coverage = found.coverage()
    assert coverage.schema == GRAPH_SCHEMAS["coverage"]
    assert coverage.filter(pl.col("subject") == "host-ops")["count"].sum() == host.ops.height


def true_events(trace: Trace, iteration: int) -> set[int]:
    """Ops of one iteration of a made pair."""
    step = trace.steps.row(iteration, named=True)
    inside = pl.col("start_ns").is_between(step["start_ns"], step["end_ns"] - 1)
    own = pl.col("category").is_in(["op", "annotation"]) & ~pl.col("name").str.starts_with(
        "ProfilerStep"
    )
    chosen = trace.events.filter(inside & own)
    return set(chosen["event"].to_list())


def refused(trace: Trace, host: HostTrace) -> InputError:
    with pytest.raises(InputError) as error:
        match(trace, host)
    assert "\n" not in str(error.value)
    return error.value


# -- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", HOST_SCHEMAS)
@pytest.mark.parametrize("keys", ["record function id", "external id"])
def test_ids_find_the_very_iteration(schema, keys):
    device, host = (
        one.build()
        for one in build_trace_pair([STEP] * 4, recorded=range(2, 3), keys=keys, schema=schema)
    )
    found = match(device, host)
    check(found, device, host)
    if schema == "1.0.0":  # has no ids
        assert not found.exact
        return
    assert (found.exact, found.evidence, found.iterations) == (True, "correlated", 1)
    assert (found.matched, found.ops) == (OPS, OPS)
    assert set(np.flatnonzero(found.host_op >= 0).tolist()) == true_events(device, 2)
    said = ms.BY_RECORD_ID if keys == "record function id" else ms.BY_EXTERNAL_ID
    assert dict(found.coverage().select("outcome", "count").iter_rows()) == {said: OPS, ms.ROOT: 3}


def test_a_record_function_id_of_0_joins_nothing():
    device = TraceBuilder(device_name=None).op("aten::mm", 0, 1, **{"Record function id": 0})
    device.op("aten::add", 2, 1, **{"Record function id": 0})
    host = HostTraceBuilder()
    host.op("aten::mm", record_id=0)
    host.op("aten::add", record_id=0)
    found = match(device.build(), host.build())
    assert not found.exact
    assert found.matched == 2


def test_an_id_joins_whatever_the_spelling_of_the_name():
    device, host = build_trace_pair([STEP])
    nodes = [node.replace("Optimizer.step#SGD.step", "Optimizer.step") for node in host.nodes()]
    found, trace = _matched(device, host, nodes)
    assert found.exact
    assert (
        dict(found.coverage().select("outcome", "count").iter_rows())[ms.BY_RECORD_ID_RENAMED] == 1
    )
    assert found.matched == OPS
    assert trace.events.filter(pl.Series(found.host_op >= 0)).height == OPS


def test_ids_that_point_to_other_names_are_not_believed():
    made = build_trace_pair([STEP] * 3, recorded=range(1, 2))
    device, host = made[0].build(), made[1].build()
    ids = host.ops["record_function_id"]
    shifted = replace(host, ops=host.ops.with_columns((ids + 1).alias("record_function_id")))
    found = match(device, shifted)
    assert not found.exact
    assert (found.matched, found.iterations) == (OPS, 3)


def test_ops_before_the_profiler_began_are_said_to_be_outside():
    device, host = build_trace_pair([STEP])
    early = HostTraceBuilder(process=4242)
    early.op("aten::empty", record_id=3)
    nodes = [json.loads(node) for node in host.nodes()]
    extra = next(json.loads(node) for node in early.nodes() if "aten::empty" in node) | {"id": 5000}
    found, _ = _matched(device, host, [json.dumps(node) for node in [*nodes, extra]])
    assert dict(found.coverage().select("outcome", "count").iter_rows())[ms.OUTSIDE] == 1


def test_a_cut_device_trace_is_joined_by_ids_with_a_warning():
    device, host = build_trace_pair([STEP])
    trace = device.build()
    half = replace(trace, events=trace.events.head(trace.events.height * 2 // 3))
    found = match(half, host.build())
    assert found.exact
    assert "host-ops-missing" in {notice.slug for notice in found.notices}


def _matched(
    device: TraceBuilder, host: HostTraceBuilder, nodes: list[str]
) -> tuple[Matching, Trace]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.json"
        path.write_text(host.text(nodes))
        trace = device.build()
        return match(trace, read_host_trace(path)), trace


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", HOST_SCHEMAS)
def test_several_iterations_that_fit_are_counted_and_the_first_is_taken(schema):
    device, host = (
        one.build()
        for one in build_trace_pair([STEP] * 6, recorded=range(4, 5), keys="none", schema=schema)
    )
    found = match(device, host)
    check(found, device, host)
    assert (found.exact, found.evidence, found.iterations, found.matched) == (
        False,
        "inferred",
        6,
        OPS,
    )
    assert set(np.flatnonzero(found.host_op >= 0).tolist()) == true_events(device, 0)
    said = next(notice for notice in found.notices if notice.slug == "several-iterations")
    assert said.count == 6
    assert "6 iterations" in said.message


def test_all_threads_are_of_the_same_iteration():
    # The backward thread's block fits in every iteration, the forward thread's only in the fourth.
    odd = [NestedOp("forward", (*LAYER, NestedOp("aten::dropout"))), *STEP[1:]]
    steps = [STEP, STEP, STEP, odd, STEP, STEP]
    device, host = (
        one.build() for one in build_trace_pair(steps, recorded=range(3, 4), keys="none")
    )
    found = match(device, host)
    check(found, device, host)
    assert found.iterations == 1
    assert set(np.flatnonzero(found.host_op >= 0).tolist()) == true_events(device, 3)


def test_threads_with_equal_ops_are_told_apart_by_when_they_began():
    loader = NestedOp("load", (NestedOp("aten::stack"),))
    step = [replace(loader, thread=3), NestedOp("forward", LAYER * 4), replace(loader, thread=2)]
    device, host = (one.build() for one in build_trace_pair([step] * 3, keys="none"))
    found = match(device, host)
    check(found, device, host)
    assert found.matched == found.ops
    lanes = dict(found.threads.select("thread", "lane").iter_rows())
    threads = {thread: device.lanes["thread"][int(lane)] for thread, lane in lanes.items()}
    assert threads == {1: "4242", 2: "7002", 3: "7003"}


def test_ops_on_one_side_only_do_not_disturb_the_order():
    device, host = build_trace_pair([STEP * 4], keys="none")
    for time in (3.25, 40.25, 70.25, 91.25):
        device.op("profiler::noise", time, 0.125, thread=4242)
    device.op("aten::add_", 55.25, 0.125, thread=4242)
    host.op("aten::only_here")
    trace, one = device.build(), host.build()
    found = match(trace, one)
    check(found, trace, one)
    assert (found.matched, found.ops) == (4 * OPS, 4 * OPS + 1)
    assert dict(found.coverage().select("outcome", "count").iter_rows())[ms.NO_NAME] == 1


def test_a_truncated_host_trace_is_matched_as_far_as_it_goes(tmp_path):
    device, host = build_trace_pair([STEP] * 5, recorded=range(1), keys="none")
    nodes = host.nodes()
    path = tmp_path / "host.json"
    path.write_text(host.text(nodes[: len(nodes) // 2]).replace("]\n", "")[:-40])
    trace, cut = device.build(), read_host_trace(path)
    assert any(notice.slug == "cut-file" for notice in cut.notices)
    found = match(trace, cut)
    check(found, trace, cut)
    assert found.matched == found.ops


def test_events_of_one_microsecond_are_ordered_by_their_ids():
    device = TraceBuilder(device_name=None, process=9, generation="2023", rank=None)
    host = HostTraceBuilder("1.0.1", process=9)
    names = [f"aten::op{number % 7}" for number in range(60)]
    for number, name in enumerate(names):
        longer = 2 if number % 2 else 0  # the later of two that begin together encloses the earlier
        device.op(name, number // 2 * 3, longer, thread=9, external_id=1000 + number)
        host.op(name)
    trace, one = device.build(), host.build()
    found = match(trace, one)
    assert found.matched == 60
    order = found.host_op[found.host_op >= 0]
    by_id = (
        trace.events.filter(pl.Series(found.host_op >= 0)).sort("external_id")["event"].to_numpy()
    )
    assert (np.diff(found.host_op[by_id]) > 0).all()
    assert order.size == 60


# -- what is not of one run -------------------------------------------------------------------------------------------


def test_another_model_is_refused_with_the_numbers():
    device = build_trace_pair([STEP], keys="none")[0].build()
    host = build_trace_pair(
        [[NestedOp(f"aten::other{number}") for number in range(9)] + [NestedOp("aten::t")]]
    )[1].build()
    error = refused(device, host)
    assert error.slug == "host-mismatch"
    assert "1 of 10 host ops (10.0 %)" in error.message
    assert "90 %" in error.message


def test_the_same_names_in_another_order_are_refused():
    names = [f"aten::op{number}" for number in range(40)]
    device = build_trace_pair([[NestedOp(name) for name in names]], keys="none")[0].build()
    host = build_trace_pair([[NestedOp(name) for name in reversed(names)]], keys="none")[1].build()
    error = refused(device, host)
    assert error.slug == "host-mismatch"
    assert "in the same order" in error.message


def test_another_process_of_the_same_program_is_refused():
    device, host = (
        build_trace_pair([STEP], process=number)[side].build()
        for side, number in ((0, 11), (1, 12))
    )
    error = refused(device, host)
    assert error.slug == "host-mismatch"
    assert "process 12" in error.message
    assert "process 11" in error.message


def test_a_device_trace_without_ops_is_refused():
    device = TraceBuilder().kernel("k", 0, 1, stream=7, correlation=1).build()
    error = refused(device, build_trace_pair([STEP])[1].build())
    assert error.slug == "host-mismatch"
    assert f"0 of {OPS}" in error.message


def test_a_host_trace_without_ops_is_refused():
    host = HostTraceBuilder()
    host.groups([])
    assert refused(build_trace_pair([STEP])[0].build(), host.build()).slug == "empty-host-trace"


# -- real pairs -------------------------------------------------------------------------------------------------------


def _pair(shared_data: Path, name: str) -> tuple[Trace, HostTrace]:
    device = read_kineto(shared_data / f"{name}.kineto.json.gz")
    return device, read_host_trace(shared_data / f"{name}.host.json.gz")


@pytest.mark.parametrize("rank", range(8))
def test_every_op_of_the_dlrm_ranks_is_matched_by_order(shared_data, rank):
    device, host = _pair(shared_data, f"multirank/dlrm_rank{rank}")
    found = match(device, host)
    check(found, device, host)
    assert (found.matched, found.ops, found.exact, found.iterations, found.rank) == (
        1672,
        1672,
        False,
        1,
        rank,
    )
    ordered = device.events.filter(pl.Series(found.host_op >= 0)).sort(
        "lane", "start_ns", "external_id"
    )
    ids = pl.Series(found.host_op).gather(ordered["event"])
    assert (np.diff(ids.filter(ordered["lane"] == ordered["lane"][0]).to_numpy()) > 0).all()


def test_simple_add_is_matched_by_its_older_ids(shared_data):
    device, host = _pair(shared_data, "pairs/simple_add")
    found = match(device, host)
    check(found, device, host)
    assert (found.matched, found.ops, found.exact) == (36, 36, True)


def test_linear_fits_39_iterations(shared_data):
    device, host = _pair(shared_data, "pairs/linear")
    found = match(device, host)
    check(found, device, host)
    assert (found.matched, found.ops, found.exact, found.iterations) == (928, 928, False, 39)
    assert found.threads.select("thread", "ops", "matched").rows() == [(1, 311, 311), (2, 617, 617)]


def test_the_mismatched_resnet_is_refused_with_the_numbers(shared_data):
    error = refused(*_pair(shared_data, "pairs/mismatched_resnet"))
    assert error.slug == "host-mismatch"
    assert error.exit_code == 3
    assert "10,138 of 14,388 host ops (70.5 %)" in error.message


def test_a_host_trace_of_another_rank_is_refused(shared_data):
    device = read_kineto(shared_data / "multirank/dlrm_rank2.kineto.json.gz")
    host = read_host_trace(shared_data / "multirank/dlrm_rank5.host.json.gz")
    assert refused(device, host).slug == "host-mismatch"
