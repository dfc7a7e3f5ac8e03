"""What is written by hand comes back as it was written, in the spelling of every generation of writers."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from support.strategies import GENERATIONS
from support.trace_pairs import NestedOp, build_trace_pair
from traceloom.errors import UsageError
from traceloom.graph.host_match import match
from traceloom.testing import TraceBuilder
from traceloom.testing.host_trace_builder import HOST_SCHEMAS, HostTraceBuilder

OLD = ("2021", "2022", "2023")  # whole microseconds
NAMES = (
    'say "hi"',
    "back\\slash",
    "}, {",
    "日本語",
    "tab\tnew\nline",
    "\u202egnp",
    "",
    "a" * 300,
    "<img src=x>",
    "\x7f",
)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_event_comes_back_with_its_times_and_its_lane(generation: str) -> None:
    draw = random.Random(generation)
    made = TraceBuilder(generation=generation, base_ns=10**18)
    expected: list[tuple[Any, ...]] = []
    for number in range(60):
        start = 200 * number + draw.choice([0.0, 3.0, 17.0])
        length = float(draw.randint(1, 100))
        if generation not in OLD:
            start, length = (
                start + draw.randint(0, 999) / 1000,
                length + draw.randint(0, 999) / 1000,
            )
        name, thread = f"name {number}", draw.choice([1, 2])
        begin, end = round(start * 1000), round((start + length) * 1000)
        match draw.randint(0, 5):
            case 0:
                made.op(name, start, length, thread=thread)
                expected.append((name, "op", begin, end - begin, thread, None))
            case 1:
                made.annotation(name, start, length, thread=thread)
                # in 2021 there was one word for operators and regions
                expected.append(
                    (
                        name,
                        "op" if generation == "2021" else "annotation",
                        begin,
                        end - begin,
                        thread,
                        None,
                    )
                )
            case 2:
                made.python(name, start, length, thread=thread)
                expected.append((name, "python", begin, end - begin, thread, None))
            case 3:
                made.launch(name, start, length, correlation=number, thread=thread)
                expected.append((name, "runtime", begin, end - begin, thread, None))
            case 4:
                made.kernel(name, start, length, stream=7 + thread)
                expected.append((name, "kernel", begin, end - begin, None, 7 + thread))
            case _:
                made.copy(f"Memcpy HtoD ({'Pinned'} -> Device)", start, length, bytes=8, stream=20)
                copied = "Memcpy" if generation == "cuspy" else "Memcpy HtoD (Pinned -> Device)"
                expected.append((copied, "copy", begin, end - begin, None, 20))
    events = made.build().events.with_columns(pl.col("category").cast(pl.String))
    columns = events.select(
        "name", "category", "start_ns", "duration_ns", "thread", "stream"
    ).rows()
    first, written = events["start_ns"][0], expected[0][2]
    found = [(name, kind, start - first, *rest) for name, kind, start, *rest in columns]
    assert found == [(name, kind, start - written, *rest) for name, kind, start, *rest in expected]


@pytest.mark.sampled(25)
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:12])
def test_a_name_of_any_letters_is_json_and_comes_back(generation: str, name: str) -> None:
    made = TraceBuilder(generation=generation).op(name, 0, 5).kernel(name, 10, 5, correlation=1)
    document = json.loads(made.text())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in spans] == [name, name]
    assert made.build().events["name"].to_list() == [name, name]


def test_the_same_file_is_written_plain_and_compressed_and_twice(tmp_path: Path) -> None:
    made = TraceBuilder().op("aten::mm", 0, 5).kernel("k", 10, 5, correlation=1)
    plain, packed = made.write(tmp_path / "a.json"), made.write(tmp_path / "a.json.gz")
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes() == made.text().encode()
    assert made.write(tmp_path / "b.json.gz").read_bytes() == packed.read_bytes(), (
        "no time of day is in it"
    )


def test_an_unknown_generation_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError) as refused:
        TraceBuilder(generation="1999")
    assert refused.value.slug == "unknown-generation"
    assert all(generation in str(refused.value) for generation in GENERATIONS)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rank_groups_and_devices_are_in_the_head(generation: str) -> None:
    made = TraceBuilder(
        3, 8, "Some GPU", devices=2, generation=generation, host="node7", process=77
    )
    trace = (
        made.group("0", list(range(8)))
        .group("tp", [2, 3], description="TP")
        .op("aten::mm", 0, 1)
        .build()
    )
    assert (trace.meta.rank, trace.meta.world_size, trace.meta.host) == (3, 8, "node7")
    assert trace.devices["name"].to_list() == ["Some GPU"] * 2
    assert trace.groups.select("group", "size", "ranks").rows() == [
        ("0", 8, list(range(8))),
        ("tp", 2, [2, 3]),
    ]
    assert trace.groups["description"].to_list() == ["default_pg", "TP"]
    lone = TraceBuilder(None, None, None, generation=generation).op("aten::mm", 0, 1).build()
    assert (lone.meta.rank, lone.devices.height) == (None, 0)


def test_allocations_keep_a_sum_for_each_device() -> None:
    made, draw = TraceBuilder(), random.Random(2)
    sums: dict[tuple[int, int], int] = {}
    expected = []
    for number in range(30):
        kind, device, size = (*draw.choice([(0, -1), (1, 0), (1, 1)]), draw.randint(-500, 1000))
        sums[kind, device] = sums.get((kind, device), 0) + size
        made.allocation(number, size, address=number, device=device, device_type=kind)
        expected.append((size, sums[kind, device]))
    frame = made.op("aten::mm", 0, 1).build().allocations.sort("time_ns")
    assert frame.select("bytes", "allocated_bytes").rows() == expected


def test_times_around_zero_and_far_away_keep_their_nanoseconds() -> None:
    for start in (-5.25, 0.0, 0.001, 1e9 + 0.125):
        made = TraceBuilder().op("a", start, 0.001).op("b", start + 0.5, 0.25)
        events = made.build().events
        assert events["start_ns"].diff().to_list()[1] == 500
        assert events["duration_ns"].to_list() == [1, 250]


# -- host traces ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", HOST_SCHEMAS)
def test_a_host_op_comes_back_with_all_that_its_schema_can_say(schema: str) -> None:
    made = HostTraceBuilder(schema, process=55)
    outer = made.op(
        "aten::linear",
        thread=2,
        sequence=4,
        inputs=[([1, 2, 0, 4, 4, "cuda:0"], [2, 2], "Tensor(float)")],
    )
    inner = made.op("aten::addmm", thread=2, parent=outer, schema="aten::addmm(Tensor self)")
    back = made.op("MmBackward0", thread=3, sequence=4, forward_thread=2, scope=1)
    host = made.build()
    assert (host.schema, host.process) == (schema, 55)
    ops = {row["id"]: row for row in host.ops.filter(~host.roots()).to_dicts()}
    assert list(ops) == [outer, inner, back] == sorted(ops)
    assert ops[inner]["parent"] == outer
    assert (ops[outer]["thread"], ops[back]["thread"], ops[back]["forward_thread"]) == (2, 3, 2)
    assert (ops[outer]["sequence"], ops[inner]["sequence"]) == (4, None)
    assert ops[inner]["schema"] == (None if schema == "1.0.0" else "aten::addmm(Tensor self)")
    # the oldest layout has no record function ids
    assert [row["record_function_id"] for row in ops.values()] == (
        [None] * 3 if schema == "1.0.0" else [1, 2, 3]
    )
    assert json.loads(ops[outer]["input_shapes"]) == [[2, 2]]
    assert json.loads(ops[outer]["input_types"]) == ["Tensor(float)"]
    assert host.roots().sum() == 3, "the process and two threads"


def nested(draw: random.Random, depth: int = 3) -> NestedOp:
    inside = tuple(nested(draw, depth - 1) for _ in range(draw.randint(0, 2))) if depth else ()
    return NestedOp(f"aten::op{draw.randint(0, 5)}", inside)


def count(ops: tuple[NestedOp, ...] | list[NestedOp]) -> int:
    return sum(1 + count(op.inside) for op in ops)


@pytest.mark.parametrize("keys", ["record function id", "external id", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_a_made_pair_is_joined_op_by_op(keys: str, seed: int) -> None:
    draw = random.Random(seed)
    iterations = [[nested(draw) for _ in range(4)] for _ in range(3)]
    device, host = build_trace_pair(iterations, recorded=range(1, 2), keys=keys)
    trace, ops = device.build(), host.build()
    matching = match(trace, ops)
    of_iteration = count(iterations[1])
    assert matching.ops == of_iteration
    assert matching.matched == of_iteration
    names = dict(ops.ops.select("id", "name").iter_rows())
    joined = [
        (event, host_op) for event, host_op in enumerate(matching.host_op.tolist()) if host_op >= 0
    ]
    assert len(joined) == of_iteration
    assert all(trace.events["name"][event] == names[host_op] for event, host_op in joined)
    assert [host_op for _, host_op in joined] == sorted(host_op for _, host_op in joined), (
        "in the order of both"
    )
    if keys != "none":  # by ids it is the very iteration
        assert set(trace.events["step"].gather([event for event, _ in joined])) == {1}
