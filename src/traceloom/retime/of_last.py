"""What was found of the graph asked for last, as long as it lives."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import polars as pl

from traceloom.model.graph import Graph

T = TypeVar("T")


class OfLast(Generic[T]):
    """A value of one graph, by the identity of its nodes and edges, whatever else is said of it.

    Forgotten with them, and when another graph's value is put. Several steps of one analysis need it, and nobody may
    change it.
    """

    def __init__(self) -> None:
        self._kept: tuple[weakref.ref[pl.DataFrame], weakref.ref[pl.DataFrame], T] | None = None

    def of(self, graph: Graph) -> T | None:
        """The value of this graph; None where it is not there."""
        kept = self._kept
        return kept[2] if kept and kept[0]() is graph.nodes and kept[1]() is graph.edges else None

    def put(self, graph: Graph, value: T) -> T:
        """Remember the value of a graph, and give it back."""
        self._kept = weakref.ref(graph.nodes, self._forget), weakref.ref(graph.edges, self._forget), value
        return value

    def _forget(self, reference: weakref.ref[pl.DataFrame]) -> None:
        kept = self._kept
        if kept is not None and (kept[0] is reference or kept[1] is reference):
            self._kept = None
