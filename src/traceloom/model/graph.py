"""Graph: what happened, and what each thing waited for, over all ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import polars as pl

from traceloom.array_types import Array, Bools, Ints
from traceloom.errors import broken
from traceloom.model.graph_schema import EDGE_KINDS, GRAPH_SCHEMAS, NODE_KINDS, empty_frame
from traceloom.model.notice import Notice
from traceloom.model.points import topological

# As Chakra distinguishes: the model as written; after compilers changed it; as it was executed on a platform.
Stage = Literal["pre-transformed", "post-transformed", "profiled"]
_NO_EVENT = 2**32 - 1
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Graph:
    """Nodes and typed edges in columns (see `traceloom.model.graph_schema`).

    A node has two points, its start and its end; an edge holds one point back until another is reached:
    `time(target point) >= time(source point) + delay`. A node's end is never before its start plus its work.

    Attributes:
        nodes: What takes time.
        edges: What waits for what, how that is known, and how long it takes.
        lanes: Host threads and device streams of all ranks.
        communication: What is known of each communication node.
        transfers: Kinds of memory of copies and fills.
        host_ops: What the host traces say of the ops, for writers of other formats.
        ranks: The recorded ranks and their clocks.
        delays: The calibrated delays of the edge classes.
        coverage: What was matched, attached and left over, and why.
        name: What the user gave.
        epoch_ns: Unix time of time 0 in ns, where the traces know it.
        world_size: Ranks of the job, where known; not the number of recorded ranks.
        stage: Which of Chakra's kinds of graph this is.
        notices: What must be known about the data.
    """

    nodes: pl.DataFrame
    edges: pl.DataFrame
    lanes: pl.DataFrame = field(default_factory=lambda: empty_frame("lanes"))
    communication: pl.DataFrame = field(default_factory=lambda: empty_frame("communication"))
    transfers: pl.DataFrame = field(default_factory=lambda: empty_frame("transfers"))
    host_ops: pl.DataFrame = field(default_factory=lambda: empty_frame("host_ops"))
    ranks: pl.DataFrame = field(default_factory=lambda: empty_frame("ranks"))
    delays: pl.DataFrame = field(default_factory=lambda: empty_frame("delays"))
    coverage: pl.DataFrame = field(default_factory=lambda: empty_frame("coverage"))
    name: str = ""
    epoch_ns: int = 0
    world_size: int | None = None
    stage: Stage = "profiled"
    notices: tuple[Notice, ...] = ()

    def frames(self) -> dict[str, pl.DataFrame]:
        """All frames by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in GRAPH_SCHEMAS}

    def nodes_of(self, *kinds: str) -> Bools:
        """Which nodes are of these kinds, shape (nodes,)."""
        chosen: Bools = np.isin(NODE_KINDS, kinds)[self._node_kinds]
        return chosen

    def edges_of(self, *kinds: str) -> Bools:
        """Which edges are of these kinds, shape (edges,)."""
        chosen: Bools = np.isin(EDGE_KINDS, kinds)[self._edge_kinds]
        return chosen

    @cached_property
    def names(self) -> pl.Series:
        """The different names of nodes, in no order."""
        return self.nodes["name"].unique().drop_nulls()

    @cached_property
    def events(self) -> Array:
        """The row of its trace that each node stands for, shape (nodes,); for others more than any row."""
        return self.nodes["event"].fill_null(_NO_EVENT).to_numpy()

    @cached_property
    def name_numbers(self) -> Array:
        """The number of each node's name in `names`, shape (nodes,); as many as there are for nodes without a name."""
        numbers = self.nodes["name"].cast(pl.Enum(self.names)).to_physical()
        return numbers.fill_null(self.names.len()).to_numpy()

    @cached_property
    def rank_numbers(self) -> Array:
        """The rank of each node, shape (nodes,); -1 where there is none."""
        return self.nodes["rank"].fill_null(-1).to_numpy()

    @cached_property
    def _node_kinds(self) -> Array:
        return self.nodes["kind"].to_physical().to_numpy()

    @cached_property
    def _edge_kinds(self) -> Array:
        return self.edges["kind"].to_physical().to_numpy()

    @property
    def end_ns(self) -> int:
        """End of the last node; 0 for a graph without nodes."""
        ends = self.nodes["start_ns"] + self.nodes["duration_ns"]
        return int(ends.max()) if self.nodes.height else 0  # type: ignore[arg-type]

    @property
    def job_ranks(self) -> int:
        """How many ranks the job has, recorded or not: as many as are stated, or as nodes, groups and peers need."""
        members = self.communication["ranks"].explode().max()
        highest = (self.nodes["rank"].max(), members, self.communication["peer"].max())
        return max([self.world_size or 1, *(rank + 1 for rank in highest if isinstance(rank, int))])

    def save(self, path: str | Path, *, force: bool = False) -> int:
        """Write the graph as `NAME.graph`; returns the size of the file in bytes. See `traceloom.model.graph_store`."""
        from traceloom.model import graph_store

        return graph_store.save(self, path, force=force)

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Read a graph that was saved. See `traceloom.model.graph_store`."""
        from traceloom.model import graph_store

        return graph_store.load(path)

    def __repr__(self) -> str:
        ranks = self.ranks.height or self.nodes["rank"].n_unique()
        return f"<Graph {self.name}: {self.nodes.height:,} nodes, {self.edges.height:,} edges, {ranks} ranks>"

    def check(self) -> None:
        """Raise InvariantError where the graph breaks its own laws.

        Columns are as declared; ids are row numbers; references point to rows; no time is negative; work and residual
        of a node are within its duration; no edge asks for more than the measured times show; there is no cycle.
        """
        self.check_columns()
        wrong = self.nodes.filter(
            (pl.col("duration_ns") < 0)
            | (pl.col("work_ns") < 0)
            | (pl.col("residual_ns") < 0)
            | (pl.col("work_ns") + pl.col("residual_ns") > pl.col("duration_ns"))
        )
        if wrong.height:
            raise broken("times", f"{wrong.height} nodes have times that cannot be, the first is {wrong['node'][0]}")
        source, target = self.points()
        times = self.point_times()
        required = self.edges["delay_ns"].to_numpy() + self.edges["residual_ns"].to_numpy()
        late = times[target] < times[source] + required
        if late.any():
            first = self.edges.row(int(np.flatnonzero(late)[0]), named=True)
            raise broken("times", f"{int(late.sum())} edges ask for more than was measured, the first is {first}")
        topological(self.nodes.height, source, target)

    def check_columns(self) -> None:
        """The part of `check` that costs little: columns as declared, ids that are row numbers, references to rows."""
        for name, frame in self.frames().items():
            if frame.schema != GRAPH_SCHEMAS[name]:
                raise broken("columns", f"frame {name} has {frame.schema}, expected {GRAPH_SCHEMAS[name]}")
        for name, column in (("nodes", "node"), ("lanes", "lane")):
            frame = getattr(self, name)
            if not (frame[column].to_numpy() == np.arange(frame.height)).all():
                raise broken("ids", f"ids of {name} are not the row numbers")
        for name, column, target in (
            ("edges", "source", "nodes"),
            ("edges", "target", "nodes"),
            ("nodes", "lane", "lanes"),
            ("communication", "node", "nodes"),
            ("transfers", "node", "nodes"),
        ):
            highest = getattr(self, name)[column].max()
            if isinstance(highest, int) and highest >= getattr(self, target).height:
                raise broken("references", f"`{column}` of {name} points past the last row of {target}")

    def points(self) -> tuple[Ints, Ints]:
        """Source and target point of each edge: 2 x node for its start, 2 x node + 1 for its end. Read-only."""
        return self._points

    def point_times(self) -> Ints:
        """The measured time of every point (see `points`). Read-only."""
        return self._point_times

    @cached_property
    def _points(self) -> tuple[Ints, Ints]:
        edge_points = []
        for node, end in (("source", "from_end"), ("target", "to_end")):
            points = self.edges[node].to_numpy().astype(np.int64)
            points *= 2
            points += self.edges[end].to_numpy()
            points.flags.writeable = False
            edge_points.append(points)
        return edge_points[0], edge_points[1]

    @cached_property
    def _point_times(self) -> Ints:
        start, duration = self.nodes["start_ns"].to_numpy(), self.nodes["duration_ns"].to_numpy()
        times = np.empty(2 * len(start), dtype=np.int64)
        times[0::2], times[1::2] = start, start + duration
        times.flags.writeable = False
        return times
