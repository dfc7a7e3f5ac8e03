"""Which nodes of a graph a change is about.

A selection is written as words: `kernels`, `kernels ~ gemm`, `rank 7 host`, `collectives ~ all_reduce`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np
import polars as pl

from traceloom.analyze.kind_rules import KINDS, Matcher, built_in_kind_rules
from traceloom.array_types import Bools
from traceloom.errors import UsageError
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.model.letter_case import contains

TARGETS: dict[str, tuple[tuple[str, ...], str]] = {
    "kernels": ((gs.KERNEL,), "kernels that compute"),
    "copies": ((gs.COPY, gs.FILL), "copies and fills on the device"),
    "gpu": ((gs.KERNEL, gs.COPY, gs.FILL), "all work of the device but communication"),
    "collectives": ((gs.COLLECTIVE, gs.SEND, gs.RECEIVE), "communication"),
    "host": ((gs.HOST, gs.THINK, gs.LAUNCH, gs.BLOCK), "what host threads do themselves"),
    "ops": ((gs.HOST,), "operators and other recorded regions on the host, by their own time"),
    "think": ((gs.THINK,), "host time outside any recorded event (Python)"),
    "launches": ((gs.LAUNCH,), "calls that submit work"),
    "syncs": ((gs.BLOCK,), "calls that wait for the device"),
    "loading": ((gs.HOST, gs.THINK), "host work inside the data loader"),
}
"""Word -> the kinds of nodes it means, and its meaning."""
DEVICE_TARGETS = ("kernels", "copies", "gpu", "collectives")

LOADING = r"enumerate\(DataLoader\)#|_BaseDataLoaderIter|DataLoader"


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice of nodes.

    Attributes:
        target: A key of `TARGETS`.
        pattern: A regular expression that the name holds somewhere, ignoring case; empty for all.
        ranks: Only these ranks; empty for all.
    """

    target: str
    pattern: str = ""
    ranks: tuple[int, ...] = ()

    def nodes(self, graph: Graph) -> Bools:
        """Which nodes are meant, shape (nodes,).

        Raises:
            UsageError: slug `bad-change`: the pattern is none.
        """
        kinds, _ = TARGETS[self.target]
        chosen = graph.nodes_of(*kinds)
        if self.target == "loading":
            chosen &= named(graph, LOADING)
        if self.pattern:
            chosen &= named(graph, self.pattern)
        if self.ranks:
            chosen &= np.isin(graph.rank_numbers, self.ranks)
        return chosen

    def nearest(self, graph: Graph, most: int = 3) -> list[str]:
        """Names that the selection could mean where it means nothing: the most alike, else those of the most work."""
        everything = pl.Series(Selection(self.target, "", self.ranks).nodes(graph))
        work = graph.nodes.filter(everything).group_by("name").agg(pl.col("work_ns").sum()).drop_nulls()
        names: list[str] = work.sort("work_ns", "name", descending=[True, False])["name"].to_list()
        alike = {name.lower(): name for name in reversed(names)}
        pattern = re.sub(r"[^\w:]+", " ", self.pattern).lower()
        return [alike[name] for name in get_close_matches(pattern, alike, most, 0.4)] or names[:most]

    def __str__(self) -> str:
        ranks = f"rank {','.join(map(str, self.ranks))} " if self.ranks else ""
        return f"{ranks}{self.target}" + (f" ~ {self.pattern}" if self.pattern else "")


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Nodes chosen by a program, with words that say which.

    Attributes:
        words: What they are, as it stands in a sentence.
        mask: Which nodes, shape (nodes,).
        target: The key of `TARGETS` that describes them best.
        ranks: Whose they are; empty for all.
    """

    words: str
    mask: Bools
    target: str = "gpu"
    ranks: tuple[int, ...] = ()

    def nodes(self, graph: Graph) -> Bools:
        """Which nodes are meant, shape (nodes,)."""
        assert self.mask.size == graph.nodes.height
        return self.mask

    def __str__(self) -> str:
        return self.words


def of_events(graph: Graph, rank: int | None, events: pl.Series) -> Bools:
    """The nodes that stand for some events (rows) of one rank's trace, shape (nodes,)."""
    rows = (events.drop_nulls() if events.null_count() else events).to_numpy()
    chosen: Bools = np.zeros(int(rows.max()) + 1 if rows.size else 0, dtype=np.bool_)
    chosen[rows] = True
    within = graph.events < chosen.size
    mask: Bools = within.copy()
    mask[within] = chosen[graph.events[within]]
    if rank is not None:
        mask &= graph.rank_numbers == rank
    return mask


def named(graph: Graph, pattern: str) -> Bools:
    """Which nodes have a name that holds the pattern, or are communication or kernels of that kind; shape (nodes,)."""
    try:
        re.compile(pattern)
        distinct = graph.names
        fits = contains(distinct, f"(?i){pattern}")
    except (re.error, pl.exceptions.ComputeError) as error:
        raise UsageError(f"`{pattern}` is no regular expression: {error}", slug="bad-change") from error
    if pattern.lower() in KINDS and pattern.lower() != "other":  # matrix products are seldom called `gemm`
        matcher = Matcher.of(built_in_kind_rules())
        nothing = np.zeros(distinct.len(), dtype=np.uint64)
        first = matcher.first(distinct, np.arange(distinct.len()), nothing, nothing)
        kind_of = [*(rule.kind for rule in matcher.rules), ""]
        fits = fits | pl.Series([kind_of[rule] == pattern.lower() for rule in first], dtype=pl.Boolean)
    chosen: Bools = np.append(fits.to_numpy(), False)[graph.name_numbers]
    if graph.communication.height:
        kinds = graph.communication["kind"]
        chosen[graph.communication["node"].filter(kinds.str.contains(f"(?i){pattern}")).to_numpy()] = True
    return chosen
