"""Edges on their way into a graph: their order, and one of a kind between two points."""

from __future__ import annotations

import numpy as np
import pytest

from traceloom.graph import edges as module
from traceloom.graph.edges import Edges


@pytest.mark.parametrize("keys", ["one", "several"])
def test_edges_stand_by_target_and_source_and_none_of_a_kind_twice(
    keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if keys == "several":  # as for graphs whose points do not fit into one number with the kind
        monkeypatch.setattr(module, "_MAX_PACKED_POINTS", 0)
    edges = Edges()
    sources, targets = np.array([2, 0, 0, 1, 0]), np.array([3, 2, 1, 2, 2])
    edges.add("call", "measured", sources, targets, from_end=True, to_end=False, firm=True)
    edges.add("thread", "inferred", sources[::-1], targets[::-1], from_end=True, to_end=False)
    edges.add("call", "assumed", np.array([0]), np.array([2]), from_end=True, to_end=False)
    frame, refused = edges.frame(np.arange(8) * 10)
    rows = frame.select("target", "source", "kind", "evidence").rows()
    pairs = [(1, 0), (2, 0), (2, 1), (3, 2)]
    assert rows == [
        (target, source, kind, evidence)
        for target, source in pairs
        for kind, evidence in (("call", "measured"), ("thread", "inferred"))
    ]
    assert not refused.height


def test_what_nothing_holds_back_is_held_by_the_origin() -> None:
    frame, refused = Edges().frame(np.arange(4))
    assert frame.select("source", "target", "kind", "evidence", "from_end", "to_end").rows() == [
        (0, 1, "origin", "assumed", True, False)
    ]
    assert not refused.height
    frame, refused = Edges().frame(np.zeros(0, dtype=np.int64))
    assert not frame.height
    assert not refused.height


def test_what_only_a_refused_edge_holds_back_is_held_by_the_origin() -> None:
    edges = Edges()
    edges.add(
        "thread", "measured", np.array([1]), np.array([2]), from_end=True, to_end=False, firm=True
    )
    edges.add("cross-thread", "inferred", np.array([2]), np.array([1]), from_end=True, to_end=False)
    frame, refused = edges.frame(np.array([0, 0, 5, 9, 9, 5]))  # by its clock, 2 ends when 1 begins
    assert refused.rows() == [("cross-thread", 1)]
    assert frame.select("source", "target", "kind").rows() == [(0, 1, "origin"), (1, 2, "thread")]
