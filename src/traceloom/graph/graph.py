"""The graph: its nodes, edges and schemas, the order of its points, the cache of its last values,
and `.graph` files.

Times are int64 nanoseconds since the graph's `epoch_ns` on the clock of the job (a rank's clock
plus its offset), byte counts int64. `node`, `source`, `target` are row numbers of `nodes`; `event`
and `op` are rows of the rank's trace.

What is computed from arrays of `traceloom.trace.mapped_arrays` is stored in files too, so that a
pass over a large graph does not take more memory the more ranks it has.
"""

from __future__ import annotations

import weakref
from array import array as array_array
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.errors import InvariantError, broken
from traceloom.trace import mapped_arrays
from traceloom.trace.array_types import Array, Bools, Ints
from traceloom.trace.frames import build_schema
from traceloom.trace.notice import Notice
from traceloom.trace.storage import ArchiveFormat
from traceloom.trace.trace import HOST_OPS, CategoryType

Node = pl.UInt32

# Kinds of nodes; the kind determines what makes a node's end move.
ORIGIN = "origin"  # the start of a rank's window; zero length, no predecessors
# Self time of an op, annotation or runtime call on a host thread, before, between or after its
# children
HOST = "host"
THINK = "think"  # a host thread outside every recorded event, at work that nothing names
WAIT = "wait"  # a host thread that waits for another thread, process or peer: ends when that comes
LAUNCH = "launch"  # a runtime or driver call that submits GPU work
BLOCK = "block"  # a call that returns only when GPU work is done: synchronisations, blocking copies
KERNEL = "kernel"
COPY = "copy"
FILL = "fill"
COLLECTIVE = "collective"  # one rank's part of a collective, on the device or (gloo) on the host
SEND = "send"
RECEIVE = "receive"
RENDEZVOUS = "rendezvous"  # where the ranks of a collective meet; zero length
ARRIVAL = "arrival"  # the assumed arrival of peers that were not recorded; zero length
NODE_KINDS = (
    ORIGIN,
    HOST,
    THINK,
    WAIT,
    LAUNCH,
    BLOCK,
    KERNEL,
    COPY,
    FILL,
    COLLECTIVE,
    SEND,
    RECEIVE,
    RENDEZVOUS,
    ARRIVAL,
)
COMMUNICATION = (COLLECTIVE, SEND, RECEIVE)

# Why one node waits for another.
EDGE_KINDS = (
    "origin",  # first node of a lane that nothing else explains
    "call",  # into a call or out of it, on one thread
    "thread",  # the next thing on the same thread
    "launch",  # from the call that submitted GPU work to that work
    "stream",  # stream order
    "wait",  # a stream that waits for an event of another stream
    "synchronize",  # a host call that waits for GPU work
    "queue",  # a launch that found the queue full, freed by an earlier kernel
    "occupancy",  # GPU work that found the device full, freed by work of another stream
    "forward-backward",  # an op and its backward op
    "cross-thread",  # another thread handed over work or woke us
    "data",  # a tensor's storage: written by one, read by the other
    "rendezvous",  # into and out of the meeting of a collective's ranks; a send and its receive
    "simulation",  # order added only for a target
)
# How an edge is known: the file states it by id or arrow; two records share an id; a rule inferred
# it; a convention.
EVIDENCE = ("measured", "correlated", "inferred", "assumed")

NodeKind = pl.Enum(list(NODE_KINDS))
EdgeKind = pl.Enum(list(EDGE_KINDS))
Evidence = pl.Enum(list(EVIDENCE))

GRAPH_SCHEMAS: dict[str, pl.Schema] = {
    # `node` is the row number. The category is that of the event it is from; null for think, wait,
    # origin, rendezvous and arrival. The rank of a rendezvous or an arrival is one of those that
    # meet there; its lane (a row of `lanes`) is null, as that of an origin. The duration is as
    # measured, >= 0; of it `work_ns` is what it takes when nothing is awaited, and `residual_ns`
    # what neither the work nor an awaited node explains. `event` and `op` (the innermost framework
    # op) are rows of the rank's trace, `host_op` the id in the host trace, where linked. The bytes
    # are of copies, fills and communication (what this rank puts in).
    "nodes": build_schema(
        "node kind name category rank lane start_ns duration_ns work_ns residual_ns event op host_op step correlation",
        "bytes",
        {"kind": NodeKind, "category": CategoryType, "op": pl.UInt32, "host_op": pl.Int64},
    ),
    # `from_end`: it holds from the end of the source, else from its start; `to_end`: it holds back
    # the end of the target, else its start. The delay is the calibrated one of the edge's class, at
    # most the observed slack, and may be negative; the residual is more than 0 only on the last
    # satisfied edge into a point.
    "edges": build_schema(
        "source target kind evidence from_end to_end delay_ns residual_ns",
        {"source": Node, "target": Node, "kind": EdgeKind, "evidence": Evidence},
    ),
    "lanes": build_schema(
        "lane rank kind process thread device stream name", {"kind": pl.Enum(["host", "device"])}
    ),
    # `instance` is equal for the parts of one operation on all ranks, null where not joined; kind:
    # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive, ...; ranks are
    # the members, ascending, null where unknown; `peer` is the global rank of the root, source or
    # destination.
    "communication": build_schema(
        "node instance kind group group_size ranks sequence element_type in_bytes out_bytes peer tag in_splits",
        "out_splits",
        {
            "ranks": pl.List(pl.Int32),
            "in_splits": pl.List(pl.Int64),
            "out_splits": pl.List(pl.Int64),
        },
    ),
    # kind: HtoD, DtoH, DtoD, PtoP, HtoH, fill, unknown
    "transfers": build_schema("node kind source_memory target_memory"),
    # Nodes of another writer's file: id and type there, and the tensors and attributes that nothing else
    # here holds, as encoded; null where there are none.
    "foreign": pl.Schema(
        {"node": Node, "id": pl.UInt64, "type": pl.Int32, "attributes": pl.Binary}
    ),
    "host_ops": pl.Schema({**build_schema("rank"), **HOST_OPS}),
    # Traces are paths. The offset is added to this rank's times, 0 where nothing was fitted; the
    # drift is in ns per ns; the residual is what the fit leaves, null where nothing was fitted.
    "ranks": build_schema(
        "rank host process device_trace host_trace window_start_ns window_end_ns clock_offset_ns clock_drift",
        "clock_residual_ns",
        {"process": pl.Int64},
    ),
    # `place` distinguishes the classes of a kind: device, vendor, call name.
    "delays": build_schema("kind place count median_ns", {"kind": EdgeKind, "place": pl.String}),
    # subject: host-ops, gpu-work, collectives, time, ...; outcome: matched, attached, orphan:
    # launch before the window, ...; the time is null where it has no meaning for the subject.
    "coverage": build_schema("rank subject outcome count time_ns"),
}


@cache
def build_empty_frame(name: str) -> pl.DataFrame:
    """Returns the graph frame `name` without rows."""
    return pl.DataFrame(schema=GRAPH_SCHEMAS[name])


_MAX_LISTED = 200_000  # runs; a list takes four times the room of an array


class PointOrder(Struct, frozen=True):
    """Items in runs, and an order in which the runs can be evaluated.

    A run is a series of neighbouring items, each of which waits for the one before it and for
    nothing else.

    Attributes:
        run: Number of the run of each item.
        rank: Position of each run in an order in which each comes after what it waits for.
        layer: For each run the largest number of links, not counting those between neighbours, on
            any way that leads to it.
    """

    run: Ints
    rank: Ints
    layer: Ints


def sort_into_layers(chained: Bools, source: Ints, target: Ints) -> PointOrder | None:
    """Orders items that wait for each other; None if there is a cycle.

    The work outside NumPy is one step per run and link, so that long chains cost almost nothing.

    Args:
        chained: Whether each item waits for the one before it; shape (items,).
        source: Item of every other link that is waited for.
        target: Item that waits.
    """
    heads = ~chained
    heads[target] = True
    run = np.cumsum(heads) - 1
    first = np.flatnonzero(heads)
    count = first.size
    from_run, to_run = run[source], run[target]
    follows = chained[first]
    use_arrays = count > _MAX_LISTED
    waits = _convert_to_sequence(np.bincount(to_run, minlength=count) + follows, use_arrays)
    source_order = np.argsort(from_run, kind="stable")
    reached = _convert_to_sequence(to_run[source_order], use_arrays)
    bounds = _convert_to_sequence(
        np.searchsorted(from_run[source_order], np.arange(count + 1)), use_arrays
    )
    next_follows = _convert_to_sequence(np.append(follows[1:], False), use_arrays)
    run_layers = np.zeros(count, dtype=np.int64, like=chained)
    layer = _convert_to_sequence(run_layers, use_arrays)
    ready = [index for index, remaining in enumerate(waits) if not remaining]
    order = array_array("q")
    while ready:
        index = ready.pop()
        while True:
            order.append(index)
            current = layer[index]
            low, high = bounds[index], bounds[index + 1]
            if low < high:
                for follower in reached[low:high]:
                    if layer[follower] <= current:
                        layer[follower] = current + 1
                    remaining = waits[follower] - 1
                    waits[follower] = remaining
                    if not remaining:
                        ready.append(follower)
            if not next_follows[index]:
                break
            index += 1
            if layer[index] < current:  # noqa: PLR1730  (max() takes three times as long)
                layer[index] = current
            remaining = waits[index] - 1
            waits[index] = remaining
            if remaining:
                break
    if len(order) < count:
        return None
    rank = np.empty(count, dtype=np.int64, like=chained)
    rank[np.frombuffer(order, dtype=np.int64)] = np.arange(count)
    if not use_arrays:
        run_layers[:] = layer
    return PointOrder(run, rank, run_layers)


def _convert_to_sequence(values: NDArray[Any], use_arrays: bool) -> Any:
    """Returns the values as a list, or as a view of the array, which is slower but takes no object
    for each.
    """
    return values.data if use_arrays else values.tolist()


def sort_topologically(nodes: int, source: Ints, target: Ints) -> Ints:
    """Returns all 2 x `nodes` points in topological order.

    Args:
        nodes: Number of nodes; point 2i is the start of node i, 2i + 1 its end, and an end comes
            after its start.
        source: Point of each edge that is waited for.
        target: Point of each edge that waits.

    Raises:
        InvariantError: `broken-cycle`: there is no such order.
    """
    layering = _sort_points(nodes, source, target)
    if layering is None:
        raise build_cycle_error(nodes, source, target)
    return np.argsort(layering.rank[layering.run], kind="stable")


def is_acyclic(nodes: int, source: Ints, target: Ints) -> bool:
    """Whether the points have a topological order; arguments as for `sort_topologically`."""
    return _sort_points(nodes, source, target) is not None


def _sort_points(nodes: int, source: Ints, target: Ints) -> PointOrder | None:
    chained = np.zeros(2 * nodes, dtype=np.bool_, like=source)
    chained[1::2] = True
    neighbours = (target == source + 1) & (source % 2 == 1)
    chained[target[neighbours]] = True
    return sort_into_layers(chained, source[~neighbours], target[~neighbours])


def build_cycle_error(nodes: int, source: Ints, target: Ints) -> InvariantError:
    """Returns the error that names the points which wait for each other."""
    starts = np.arange(nodes, dtype=np.int64) * 2
    from_point, to_point = np.concatenate([source, starts]), np.concatenate([target, starts + 1])
    source_order = np.argsort(from_point, kind="stable")
    next_of: Any = to_point[source_order].tolist()
    first: Any = np.searchsorted(from_point[source_order], np.arange(2 * nodes + 1)).tolist()
    waits: Any = np.bincount(to_point, minlength=2 * nodes).tolist()
    ready = [point for point in range(2 * nodes) if not waits[point]]
    while ready:
        point = ready.pop()
        for follower in next_of[first[point] : first[point + 1]]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.append(follower)
    stuck = np.flatnonzero(waits)  # points that are in a cycle or behind one
    return InvariantError(
        f"{stuck.size} points wait for each other, one of them is of node {int(stuck[0]) // 2}",
        slug="broken-cycle",
    )


# As Chakra distinguishes: the model as written; after compilers changed it; as it was executed on a
# platform.
Stage = Literal["pre-transformed", "post-transformed", "profiled"]
_NO_EVENT = 2**32 - 1
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Graph:
    """Nodes and typed edges in columns (see `traceloom.graph.graph`).

    A node has two points, its start and its end; an edge holds one point back until another is
    reached: `time(target point) >= time(source point) + delay`. A node's end is never before its
    start plus its work.

    Attributes:
        nodes: Everything that takes time.
        edges: Which point waits for which, how that is known, and how long it takes.
        lanes: Host threads and device streams of all ranks.
        communication: What is known of each communication node.
        transfers: Kinds of memory of copies and fills.
        foreign: What files of other writers say beside the rest.
        host_ops: The ops of the host traces, for writers of other formats.
        ranks: The recorded ranks and their clocks.
        delays: The calibrated delays of the edge classes.
        coverage: What was matched, attached and left over, and why.
        name: Name of what the user gave.
        epoch_ns: Unix time of time 0 in ns, where the traces know it.
        world_size: Ranks of the job, where known; not the number of recorded ranks.
        stage: Which of Chakra's kinds of graph this is.
        notices: Notices about the data.
    """

    nodes: pl.DataFrame
    edges: pl.DataFrame
    lanes: pl.DataFrame = field(default_factory=lambda: build_empty_frame("lanes"))
    communication: pl.DataFrame = field(default_factory=lambda: build_empty_frame("communication"))
    transfers: pl.DataFrame = field(default_factory=lambda: build_empty_frame("transfers"))
    foreign: pl.DataFrame = field(default_factory=lambda: build_empty_frame("foreign"))
    host_ops: pl.DataFrame = field(default_factory=lambda: build_empty_frame("host_ops"))
    ranks: pl.DataFrame = field(default_factory=lambda: build_empty_frame("ranks"))
    delays: pl.DataFrame = field(default_factory=lambda: build_empty_frame("delays"))
    coverage: pl.DataFrame = field(default_factory=lambda: build_empty_frame("coverage"))
    name: str = ""
    epoch_ns: int = 0
    world_size: int | None = None
    stage: Stage = "profiled"
    notices: tuple[Notice, ...] = ()

    def frames(self) -> dict[str, pl.DataFrame]:
        """Returns all frames by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in GRAPH_SCHEMAS}

    def node_mask(self, *kinds: str) -> Bools:
        """Returns which nodes are of these kinds, shape (nodes,)."""
        return np.isin(NODE_KINDS, kinds)[self._node_kinds]

    def edge_mask(self, *kinds: str) -> Bools:
        """Returns which edges are of these kinds, shape (edges,)."""
        return np.isin(EDGE_KINDS, kinds)[self._edge_kinds]

    @cached_property
    def names(self) -> pl.Series:
        """The different names of nodes, in no order."""
        return self.nodes["name"].unique().drop_nulls()

    @cached_property
    def events(self) -> Array:
        """The row of its trace that each node represents, shape (nodes,); a number larger than any
        row where it represents none.
        """
        return self.nodes["event"].fill_null(_NO_EVENT).to_numpy()

    @cached_property
    def name_numbers(self) -> Array:
        """The index of each node's name in `names`, shape (nodes,); the length of `names` for nodes
        without a name.
        """
        numbers = self.nodes["name"].cast(pl.Enum(self.names)).to_physical()
        return numbers.fill_null(self.names.len()).to_numpy()

    @cached_property
    def node_ranks(self) -> Array:
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
        node_ends = self.nodes["start_ns"] + self.nodes["duration_ns"]
        return int(node_ends.max()) if self.nodes.height else 0  # type: ignore[arg-type]

    @property
    def job_size(self) -> int:
        """The number of ranks of the job, recorded or not: the largest that is stated, or that
        nodes, groups and peers need.
        """
        members = self.communication["ranks"].explode().max()
        highest = (self.nodes["rank"].max(), members, self.communication["peer"].max())
        return max([self.world_size or 1, *(rank + 1 for rank in highest if isinstance(rank, int))])

    def save(self, path: str | Path, *, force: bool = False) -> int:
        """Writes the graph as `NAME.graph`; returns the size of the file in bytes.

        See `traceloom.graph.graph.save`.
        """
        return save(self, path, force=force)

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Reads a graph that was saved; see `traceloom.graph.graph.load`."""
        return load(path)

    def __repr__(self) -> str:
        ranks = self.ranks.height or self.nodes["rank"].n_unique()
        return f"<Graph {self.name}: {self.nodes.height:,} nodes, {self.edges.height:,} edges, {ranks} ranks>"

    def check(self) -> None:
        """Raises InvariantError where the graph breaks its invariants.

        Columns are as declared; ids are row numbers; references point to rows; no time is negative;
        work and residual of a node are within its duration; no edge requires more than the measured
        times show; there is no cycle.
        """
        self.check_columns()
        wrong = self.nodes.filter(
            (pl.col("duration_ns") < 0)
            | (pl.col("work_ns") < 0)
            | (pl.col("residual_ns") < 0)
            | (pl.col("work_ns") + pl.col("residual_ns") > pl.col("duration_ns"))
        )
        if wrong.height:
            raise broken(
                "times",
                f"{wrong.height} nodes have times that cannot be, the first is {wrong['node'][0]}",
            )
        source, target = self.points()
        times = self.point_times()
        required = self.edges["delay_ns"].to_numpy() + self.edges["residual_ns"].to_numpy()
        late = times[target] < times[source] + required
        if late.any():
            first = self.edges.row(int(np.flatnonzero(late)[0]), named=True)
            raise broken(
                "times",
                f"{int(late.sum())} edges ask for more than was measured, the first is {first}",
            )
        sort_topologically(self.nodes.height, source, target)

    def check_columns(self) -> None:
        """Runs the cheap part of `check`: columns as declared, ids that are row numbers, references
        to rows.
        """
        for name, frame in self.frames().items():
            if frame.schema != GRAPH_SCHEMAS[name]:
                raise broken(
                    "columns", f"frame {name} has {frame.schema}, expected {GRAPH_SCHEMAS[name]}"
                )
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
            ("foreign", "node", "nodes"),
        ):
            highest = getattr(self, name)[column].max()
            if isinstance(highest, int) and highest >= getattr(self, target).height:
                raise broken(
                    "references", f"`{column}` of {name} points past the last row of {target}"
                )

    def points(self) -> tuple[Ints, Ints]:
        """Returns the source and target point of each edge: 2 x node for its start, 2 x node + 1
        for its end.

        Read-only.
        """
        return self._points

    def point_times(self) -> Ints:
        """Returns the measured time of every point (see `points`). Read-only."""
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


# Nodes and edges of a graph from which on its arrays lie in files: about twelve ranks of 20 MB
MIN_LARGE_ELEMENTS = 500_000


def is_large(graph: Graph) -> bool:
    """Whether the graph's arrays are stored in files."""
    return graph.nodes.height + graph.edges.height >= MIN_LARGE_ELEMENTS


def get_edge_points(graph: Graph) -> tuple[Ints, Ints]:
    """Returns the source and target point of each edge; see `Graph.points`."""
    if not is_large(graph):
        return graph.points()
    source, target = (
        get_column_array(graph, graph.edges[node]).astype(np.int64) * 2
        + graph.edges[end].to_numpy()
        for node, end in (("source", "from_end"), ("target", "to_end"))
    )
    return source, target


def get_point_times(graph: Graph) -> Ints:
    """Returns the measured time of every point; see `Graph.point_times`."""
    if not is_large(graph):
        return graph.point_times()
    start, duration = (
        get_column_array(graph, graph.nodes[name]) for name in ("start_ns", "duration_ns")
    )
    times: Ints = mapped_arrays.allocate_array(2 * len(start), np.int64)
    times[0::2], times[1::2] = start, start + duration
    return times


def get_column_array(graph: Graph, column: pl.Series) -> Array:
    """Returns a column of the graph without nulls, kinds as their numbers; a mapped array where the
    graph's arrays are mapped.
    """
    values: Array = (
        column.to_physical() if isinstance(column.dtype, pl.Enum) else column
    ).to_numpy()
    return values.view(mapped_arrays.MappedArray) if is_large(graph) else values


def unwrap_array(values: Array) -> Array:
    """Returns the same array as a plain one; what is computed from it is in memory."""
    return values.view(np.ndarray)


def allocate_matrix(rows: int, columns: int, *, large: bool) -> Ints:
    """Returns an uninitialized plain array, backed by a file where it is large.

    Shape (rows, columns).
    """
    if not large:
        return np.empty((rows, columns), dtype=np.int64)
    return unwrap_array(mapped_arrays.allocate_array(rows * columns, np.int64)).reshape(
        rows, columns
    )


GRAPH_SUFFIX = ".graph"
_FORMAT = ArchiveFormat(
    "graph",
    another_slug="not-a-graph",
    damaged_slug="graph-damaged",
    version=1,
    schemas=GRAPH_SCHEMAS,
    never_null={
        "nodes": (
            "node",
            "kind",
            "name",
            "rank",
            "start_ns",
            "duration_ns",
            "work_ns",
            "residual_ns",
        ),
        "edges": tuple(GRAPH_SCHEMAS["edges"]),
        "lanes": ("lane", "rank", "kind"),
        "communication": ("node",),
        "transfers": ("node",),
        "foreign": ("node", "id", "type"),
        "ranks": ("rank",),
    },
    hint="write it again with `traceloom link`",
)
is_graph = _FORMAT.holds


def save(graph: Graph, path: str | Path, *, force: bool = False) -> int:
    """Writes a graph, whole or not at all; returns the size of the file in bytes.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    header = {
        "name": graph.name,
        "epoch_ns": graph.epoch_ns,
        "world_size": graph.world_size,
        "stage": graph.stage,
        "notices": [asdict(notice) for notice in graph.notices],
    }
    return _FORMAT.save(path, header, graph.frames(), force=force)


def load(path: str | Path) -> Graph:
    """Reads a graph that `save` wrote. `Graph.check` is not run, but columns, ids and references
    are checked.

    Raises:
        InputError: `unreadable`; `not-a-graph`: another kind of file; `graph-damaged`: truncated,
            or not as its header says; `other-version`.
    """
    return _FORMAT.load(path, _build_graph)


def _build_graph(header: dict[str, Any], frames: dict[str, pl.DataFrame]) -> Graph:
    name, stage, epoch, world = (header[key] for key in ("name", "stage", "epoch_ns", "world_size"))
    if stage not in get_args(Stage):
        raise ValueError(f"`{stage}` is no stage of a graph")
    if not (world is None or isinstance(world, int)) or not isinstance(epoch, int):
        raise TypeError("its header has no whole numbers where they belong")
    notices = msgspec.convert(header["notices"], tuple[Notice, ...])
    graph = Graph(
        **frames, name=str(name), epoch_ns=epoch, world_size=world, stage=stage, notices=notices
    )
    graph.check_columns()
    return graph


T = TypeVar("T")


class LastGraphCache(Generic[T]):
    """A value of one graph, keyed by the identity of its nodes and edges alone.

    It is dropped with these frames, and when another graph's value is stored. Several steps of one
    analysis share it, and none may change it.
    """

    def __init__(self) -> None:
        self._kept: tuple[weakref.ref[pl.DataFrame], weakref.ref[pl.DataFrame], T] | None = None

    def of(self, graph: Graph) -> T | None:
        """Returns the value of this graph; None where it is not cached."""
        cached = self._kept
        return (
            cached[2]
            if cached and cached[0]() is graph.nodes and cached[1]() is graph.edges
            else None
        )

    def put(self, graph: Graph, value: T) -> T:
        self._kept = (
            weakref.ref(graph.nodes, self._forget),
            weakref.ref(graph.edges, self._forget),
            value,
        )
        return value

    def _forget(self, reference: weakref.ref[pl.DataFrame]) -> None:
        cached = self._kept
        if cached is not None and (cached[0] is reference or cached[1] is reference):
            self._kept = None
