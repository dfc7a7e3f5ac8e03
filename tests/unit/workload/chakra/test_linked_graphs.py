"""Graphs of linked traces as Chakra files: they come back, in whatever form; order, time and sides are kept."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from support.odd_traces import odd_trace
from traceloom.formats.chakra.et_pb2 import Node, NodeType
from traceloom.graph import Plan, calibrate
from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank
from traceloom.workload.chakra.convert import ConversionInput, Side, open_messages
from traceloom.workload.chakra.graph_read import convert_to_messages, read_graph, write_rank
from traceloom.workload.chakra.validate import validate

SEEDS = (0, 3, 6)


@cache
def graph_of(seed: int) -> Graph:
    return calibrate(link_rank(odd_trace(seed)))


def messages(path: Path) -> list[Node]:
    with open_messages(path) as reader:
        return list(reader)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_linked_graph_comes_back_and_takes_as_long_after_any_change(
    seed: int, tmp_path: Path
) -> None:
    graph = graph_of(seed)
    write_rank(graph, tmp_path / "w.0.et", rank=0)
    back = read_graph([tmp_path / "w.0.et"])
    back.check()
    for name in ("nodes", "edges", "lanes", "communication", "transfers", "delays"):
        first, other = (
            sorted(map(str, frame.rows())) for frame in (getattr(graph, name), getattr(back, name))
        )
        assert first == other, name
    assert (back.epoch_ns, back.world_size, back.stage) == (
        graph.epoch_ns,
        graph.world_size,
        graph.stage,
    )
    for factor in (0.0, 0.5, 3.0):
        spans = []
        for each in (graph, back):
            work = each.nodes["work_ns"].to_numpy()
            times = Plan(each).evaluate(
                work_ns=np.where(each.node_mask("kernel"), np.rint(work * factor), work).astype(
                    np.int64
                )
            )
            spans.append(int(times.max() - times.min()))
        assert spans[0] == spans[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_file_that_goes_through_every_form_is_the_same_at_the_end(
    seed: int, tmp_path: Path
) -> None:
    first = tmp_path / "first.0.et"
    write_rank(graph_of(seed), first, rank=0)
    at = first
    for name in ("a.0.json", "b.0.jsonl.gz", "c.0.et.gz", "last.0.et"):
        with ConversionInput(at) as source:
            source.write_file(tmp_path / name, None, force=False)
            assert source.nodes == len(messages(first))
        at = tmp_path / name
    assert at.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_have_the_times_and_kinds_of_the_graph(seed: int) -> None:
    graph = graph_of(seed)
    metadata, nodes = convert_to_messages(graph, 0)
    assert metadata.version
    made = list(nodes)
    lasting = graph.nodes.filter(~pl.col("kind").is_in(["origin", "rendezvous", "arrival"]))
    assert len(made) == lasting.height
    assert len({each.id for each in made}) == len(made)
    assert sorted(each.name for each in made) == sorted(lasting["name"].to_list())
    # each duration is rounded by itself, so all together are off by half a microsecond each at most
    total = sum(each.duration_micros for each in made)
    assert abs(total - lasting["duration_ns"].sum() / 1000) <= 0.5 * len(made) + 1
    of_communication = {NodeType.COMM_COLL_NODE, NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE}
    assert sum(each.type in of_communication for each in made) == graph.communication.height
    ids = {each.id for each in made}
    assert all(dep in ids for each in made for dep in (*each.data_deps, *each.ctrl_deps))


def behind(waits: dict[int, set[int]]) -> dict[int, set[int]]:
    """All that each node waits for, directly or not."""
    all_of: dict[int, set[int]] = {}
    for start in waits:
        trail = [start]
        while trail:
            node = trail[-1]
            missing = [before for before in waits.get(node, ()) if before not in all_of]
            if missing:
                assert not set(missing) & set(trail), "nodes wait for each other"
                trail.append(missing[0])
                continue
            trail.pop()
            all_of[node] = set().union(
                *({before} | all_of[before] for before in waits.get(node, ()))
            )
    return all_of


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_waits_for_an_end_in_the_graph_waits_for_it_in_the_file(seed: int) -> None:
    graph = graph_of(seed)
    _, nodes = convert_to_messages(graph, 0)
    written = {each.id: each for each in nodes}
    in_file = behind({each.id: {*each.data_deps, *each.ctrl_deps} for each in written.values()})
    by_place = sorted(written)
    lasting = graph.nodes.filter(~pl.col("kind").is_in(["origin", "rendezvous", "arrival"]))
    # nodes stand in the file in the order of the graph, and their names agree
    number = dict(zip(lasting["node"].to_list(), by_place, strict=True))
    assert [written[at].name for at in by_place] == lasting["name"].to_list()
    lost = [
        (edge["source"], edge["target"], edge["kind"])
        for edge in graph.edges.to_dicts()
        if edge["from_end"]
        and not edge["to_end"]
        and edge["source"] in number
        and edge["target"] in number
        and number[edge["source"]] not in in_file[number[edge["target"]]]
    ]
    assert lost == []


@pytest.mark.parametrize("side", ["communication", "compute"])
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_one_side_of_a_linked_graph_keeps_its_nodes_and_their_order(
    seed: int, side: Side, tmp_path: Path
) -> None:
    source = tmp_path / "w.0.et"
    write_rank(graph_of(seed), source, rank=0)
    with ConversionInput(source) as given:
        given.write_file(tmp_path / "side.0.et", side, force=False)
    before, after = messages(source), messages(tmp_path / "side.0.et")
    names = {each.id: each.name for each in before}
    kept = [each for each in after if each.id in names and each.duration_micros]
    assert kept, "there is such a side"
    assert all(each.name == names[each.id] for each in kept)
    by_id = {each.id: each for each in before}
    for each in kept:
        assert (each.duration_micros, each.type) == (
            by_id[each.id].duration_micros,
            by_id[each.id].type,
        )
    ids = {each.id for each in kept}
    for kind in ("data_deps", "ctrl_deps"):  # each kind leads through what was removed by itself
        whole, part = (
            behind({each.id: set(getattr(each, kind)) for each in nodes})
            for nodes in (before, after)
        )
        assert {number: part[number] & ids for number in ids} == {
            number: whole[number] & ids for number in ids
        }
    assert validate(tmp_path / "side.0.et").errors <= validate(source).errors
