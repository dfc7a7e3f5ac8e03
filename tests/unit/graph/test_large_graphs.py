"""A graph whose arrays lie in files gives what it gives in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import traceloom
from support.jobs import ParallelRecipe, parallel_job
from traceloom.analyze.critical_path import CriticalPath
from traceloom.changes.changes import parse
from traceloom.changes.scenario import Scenario
from traceloom.changes.whatif import whatif, whatif_many
from traceloom.graph import Plan, graph, graph as arrays, link_session
from traceloom.graph.graph import Graph
from traceloom.trace import mapped_arrays, storage
from traceloom.trace.session import Session

CHANGES = (
    "kernels * 0.5",
    "collectives overlap",
    "rank 2 delay remove",
    "syncs remove",
    "kernels balance",
    "idle remove",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return (
        parallel_job(ParallelRecipe(data=2, tensor=2, steps=3, layers=2))
        .run()
        .write(tmp_path / "job")
    )


def in_files(patch: pytest.MonkeyPatch) -> None:
    for place, name in (
        (arrays, "MIN_LARGE_ELEMENTS"),
        (mapped_arrays, "MIN_MAPPED_BYTES"),
        (graph, "_MAX_LISTED"),
        (storage, "_MIN_ROWS"),
    ):
        patch.setattr(place, name, 1)
    patch.setattr(storage, "MAX_IN_MEMORY_BYTES", 0)


def told(session: Session) -> dict[str, Any]:
    path: CriticalPath = traceloom.analyze.critical_path(session, 1)
    path.check()
    graph = link_session(session, step=1)
    base, plan = Scenario.of(graph), Plan(graph)
    scenarios = [base, *(base.apply(parse(change)) for change in CHANGES)]
    return {
        "path": path.path.rows(),
        "names": path.names.rows(),
        "slack": path.node_slack.rows(),
        "sentence": path.sentence + path.law.sentence,
        "nodes": graph.nodes.rows(),
        "edges": graph.edges.rows(),
        "alone": [int(whatif_many(graph, [one], plan)[0]) for one in scenarios],
        "together": whatif_many(graph, scenarios, plan).tolist(),
        "saved": whatif(graph, [parse("copies async")], plan=plan).saved_ns
        if graph.transfers.height
        else None,
        "times": plan.evaluate().tolist(),
    }


def test_a_graph_in_files_is_the_graph_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = told(traceloom.load(folder, cache=False))
    in_files(monkeypatch)
    session = traceloom.load(folder, cache=False)
    found = told(session)
    for key, value in known.items():
        assert found[key] == value, key
    graph: Graph = link_session(session, step=1)
    assert all(
        isinstance(one, mapped_arrays.MappedArray)
        for one in (*arrays.get_edge_points(graph), arrays.get_point_times(graph))
    )


def test_small_graphs_stay_in_memory(folder: Path) -> None:
    graph = link_session(traceloom.load(folder, cache=False), step=1)
    assert not any(
        isinstance(one, mapped_arrays.MappedArray)
        for one in (*arrays.get_edge_points(graph), arrays.get_point_times(graph))
    )


def test_circles_are_seen_with_lists_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = np.array([1, 3, 5]), np.array([2, 4, 0])
    for most in (200_000, 0):
        monkeypatch.setattr(graph, "_MAX_LISTED", most)
        assert not graph.is_acyclic(3, source, target)
        assert graph.is_acyclic(3, source[:2], target[:2])
        assert graph.sort_topologically(3, source[:2], target[:2]).tolist() == list(range(6))
