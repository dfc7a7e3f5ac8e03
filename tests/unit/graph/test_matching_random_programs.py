"""Random programs recorded on both sides: which event is which op, however they are joined, named and timed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.trace_pairs import NestedOp, build_trace_pair
from traceloom.errors import InputError
from traceloom.formats import read_kineto
from traceloom.formats.host_trace import read_host_trace
from traceloom.graph import link
from traceloom.graph.host_match import match
from traceloom.trace.trace import HostTrace, Trace
from traceloom.workload.anonymize.policy import Key, Policy
from traceloom.workload.anonymize.run import anonymize

KEYS = ("record function id", "external id", "none")


def random_ops(
    chance: random.Random, names: list[str], depth: int = 0, *, outer: int = 8
) -> tuple[NestedOp, ...]:
    count = chance.randrange(2 if depth == 0 else 0, outer if depth == 0 else 4)
    return tuple(
        NestedOp(
            chance.choice(names),
            random_ops(chance, names, depth + 1) if depth < 3 and chance.random() < 0.6 else (),
            thread=chance.choice([1, 1, 2]) if depth == 0 else 1,
        )
        for _ in range(count)
    )


def program(seed: int, prefix: str = "") -> list[tuple[NestedOp, ...]]:
    """Four iterations, each with an op of its own so that they are told apart; private names begin with the prefix."""
    chance = random.Random(seed)
    names = ["aten::mm", "aten::add", f"{prefix}acme::f", f"{prefix}acme::g", "aten::to"]
    return [
        (
            *random_ops(chance, names),
            NestedOp(f"{prefix}acme::only{number}"),
            *random_ops(chance, names),
        )
        for number in range(4)
    ]


def truth(trace: Trace, host: HostTrace, iteration: int) -> dict[int, int]:
    """Event -> host op: both sides wrote the ops of the iteration in the order in which they began."""
    events = trace.events.filter((pl.col("category") == "op") & (pl.col("step") == iteration)).sort(
        "start_ns"
    )["event"]
    ops = host.ops.filter(~host.roots())["id"].sort()
    return dict(zip(events.to_list(), ops.to_list(), strict=True))


def joined(trace: Trace, host: HostTrace) -> dict[int, int]:
    host_op = match(trace, host).host_op
    return {event: int(host_op[event]) for event in np.flatnonzero(host_op >= 0).tolist()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("seed", range(6))
def test_every_op_is_its_event_whichever_way_they_are_joined(seed: int, keys: str) -> None:
    for iteration in (0, 2):
        built = build_trace_pair(program(seed), recorded=range(iteration, iteration + 1), keys=keys)
        trace, host = built[0].build(), built[1].build()
        assert joined(trace, host) == truth(trace, host, iteration)
        matching = match(trace, host)
        assert matching.exact == (keys != "none")
        assert matching.matched == matching.ops == len(truth(trace, host, iteration))
        assert matching.iterations == 1
        counted = matching.coverage()
        assert counted["count"].sum() == host.ops.height


@pytest.mark.parametrize("keys", KEYS)
def test_names_that_are_others_on_both_sides_join_the_same_ops(keys: str) -> None:
    results = []
    for prefix in ("", "zebra_"):
        device, host = build_trace_pair(program(3, prefix), recorded=range(1, 2), keys=keys)
        results.append(joined(device.build(), host.build()))
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_program_with_one_op_less_is_joined_by_ids_and_never_wrongly(seed: int) -> None:
    device, host = build_trace_pair(program(seed), recorded=range(1, 2))
    trace, whole = device.build(), host.build()
    expected = truth(trace, whole, 1)
    chance = random.Random(seed)
    lost = chance.choice(list(expected.values()))
    # those that it calls are then called by the one around it
    above = dict(whole.ops.select("id", "parent").iter_rows())
    ops = whole.ops.filter(pl.col("id") != lost).with_columns(
        pl.col("parent").replace({lost: above[lost]})
    )
    part = HostTrace(path=whole.path, ops=ops, schema=whole.schema, process=whole.process)
    assert joined(trace, part) == {event: op for event, op in expected.items() if op != lost}


def test_the_ops_of_another_program_are_refused() -> None:
    device, _ = build_trace_pair(program(1), keys="none")
    _, host = build_trace_pair([(NestedOp("other::x", (NestedOp("other::y"),)),) * 9], keys="none")
    with pytest.raises(InputError) as caught:
        match(device.build(), host.build())
    assert caught.value.slug == "host-mismatch"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keys", ["record function id", "none"])
def test_what_is_shared_is_linked_as_what_is_kept(keys: str, tmp_path: Path) -> None:
    """The two sides are rewritten apart from each other, and still are of one process, with one name for each thing."""
    folder = tmp_path / "in"
    folder.mkdir()
    device, host = build_trace_pair(program(2), recorded=range(1, 2), keys=keys)
    device.write(folder / "rank0.kineto.json")
    host.write(folder / "rank0.host.json")
    policy = Policy(shapes="keep", scalars="keep")
    output = anonymize([folder], tmp_path / "out", policy, Key(b"a key of tests alone")).output
    first = joined(
        read_kineto(folder / "rank0.kineto.json"), read_host_trace(folder / "rank0.host.json")
    )
    other = joined(
        read_kineto(output / "rank0.kineto.json"), read_host_trace(output / "rank0.host.json")
    )
    assert list(first) == list(other)
    assert [sorted(first.values()).index(op) for op in first.values()] == [
        sorted(other.values()).index(op) for op in other.values()
    ]
    graphs = [link(source, cache=False).graph for source in (folder, output)]
    for name in ("kind", "start_ns", "duration_ns", "step"):
        assert graphs[0].nodes[name].equals(graphs[1].nodes[name]), name
    for name in ("source", "target", "kind", "evidence", "delay_ns"):
        assert graphs[0].edges[name].equals(graphs[1].edges[name]), name
    assert graphs[0].coverage.equals(graphs[1].coverage)
    assert b"acme" not in b"".join(path.read_bytes() for path in output.iterdir())
