"""One copy of a data parallel job, cut out of the graph of the ranks that were recorded.

Ranks are numbered like the digits of a number: `rank = inner + stride x (copy + copies x outer)`. Data parallelism
counts the middle digit; tensor, context and pipeline parallelism count the others. A rank's position is what is left
without the copy: ranks of one position run the same program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from traceloom.array_types import Ints
from traceloom.errors import UsageError
from traceloom.model import graph_schema as gs
from traceloom.model.frames import as_declared
from traceloom.model.graph import Graph
from traceloom.model.graph_schema import GRAPH_SCHEMAS, empty_frame

# Groups of these roles keep their size, even where they hold a rank of every copy.
_KEEP = ("tensor", "pipeline", "expert", "context", "embedding")
PAIRS = ("send", "receive")
ALL = 0  # span of a group that holds ranks of every copy
_JOINTS = (gs.RENDEZVOUS, gs.ARRIVAL)


@dataclass(frozen=True, slots=True)
class DataAxis:
    """How ranks are numbered.

    Attributes:
        stride: Distance of neighbours in a data parallel group.
        copies: Ranks of such a group.
        world: Ranks of the job.
    """

    stride: int
    copies: int
    world: int

    @property
    def positions(self) -> int:
        """Ranks of one copy."""
        return self.world // self.copies

    def position(self, rank: int) -> int:
        """The position of a rank."""
        return rank % self.stride + rank // (self.stride * self.copies) * self.stride

    def copy(self, rank: int) -> int:
        """The copy that a rank belongs to."""
        return rank // self.stride % self.copies

    def rank(self, position: int, copy: int) -> int:
        """The rank at a position of a copy."""
        return position % self.stride + self.stride * (copy + self.copies * (position // self.stride))


@dataclass(frozen=True)
class Replica:
    """One copy of the job.

    Attributes:
        graph: Of one rank per position, numbered by position; its meetings have no members in other copies.
        axis: How the recorded job numbers its ranks.
        node: The recorded node that each node stands for, shape (nodes,); -1 of meetings.
        edge: The recorded edge that each edge stands for, shape (edges,); -1 of edges into and out of meetings.
        parts: What `keyed` says of each row of the graph's `communication`, with the row of its meeting (`meeting`,
            null where the rank meets nobody).
        meetings: One row per meeting: `node`, `key`, `span`, `members`, `positions`, `kind`, `in_bytes`, `out_bytes`,
            `step`, `nth`.
        copied: Places that no recorded rank has, with the rank that they are copied from.
    """

    graph: Graph
    axis: DataAxis
    node: Ints
    edge: Ints
    parts: pl.DataFrame
    meetings: pl.DataFrame
    copied: Mapping[int, int]


def data_axis(graph: Graph, roles: Mapping[str, str]) -> DataAxis:
    """Find out how ranks are numbered, from the members of the data parallel groups.

    Args:
        graph: The recorded ranks.
        roles: Role of each group by name, as `analyze.collective.groups` finds it. Of groups without a role, all that
            do more than send and receive must agree.

    Raises:
        UsageError: `no-data-parallel`: the run has no such group; `unknown-roles`: nothing tells which group it is;
            `uneven-groups`: its members are not evenly spaced.
    """
    used = graph.communication.filter(~pl.col("kind").is_in(PAIRS)).unique(["group", "ranks"], maintain_order=True)
    world = graph.job_ranks
    shapes: dict[str, set[tuple[int, int]]] = {}
    for group, members, size in used.select("group", "ranks", "group_size").iter_rows():
        steps = set(np.diff(members or ()).tolist())
        shape = (steps.pop() if len(steps) == 1 else 0, len(members or ()))
        if not members and (size or world) == world > 1:
            shape = (1, world)
        if shape[1] > 1:
            shapes.setdefault(roles.get(group or "", ""), set()).add(shape)
    role = next((name for name in ("data", "sharded data") if name in shapes), None)
    others = [shape for name, shape in shapes.items() if name not in _KEEP]
    chosen = shapes[role] if role else set().union(*others)
    if not chosen:
        raise UsageError(
            "no group of this run is data parallel: nothing tells what more ranks would exchange",
            slug="no-data-parallel",
            hint="record a job of two data parallel ranks or more, with its distributed information",
        )
    if len(chosen) > 1:
        sizes = ", ".join(f"{size} ranks {stride} apart" for stride, size in sorted(chosen))
        raise UsageError(
            f"nothing tells which groups are data parallel: there are such of {sizes}",
            slug="unknown-roles",
            hint="name one with --role GROUP=data",
        )
    ((stride, copies),) = chosen
    if stride < 1 or world % (stride * copies):
        raise UsageError(
            f"the {copies} ranks of a data parallel group are not evenly spaced over the {world} of the job",
            slug="uneven-groups",
            hint="only jobs whose copies are numbered alike can be scaled",
        )
    return DataAxis(int(stride), copies, world)


def keyed(graph: Graph, axis: DataAxis, roles: Mapping[str, str], positions: pl.DataFrame) -> pl.DataFrame:
    """The communication of some ranks, each at some positions, with what the parts of one operation have in common.

    Args:
        graph: The recorded ranks.
        axis: How ranks are numbered.
        roles: Role of each group by name.
        positions: `rank` and `position` (Int32); a rank may stand for several positions.

    Returns:
        The rows of `communication` with `rank`, `position`, `copy`, `step`, `from_ns`, `to_ns`, `key` (of the group,
        the same at all positions and in all copies that meet; null where the rank meets nobody), `span` (neighbouring
        copies that meet; `ALL`), `members` (of the group), `positions` (of one copy in it, the sender first), `nth` in
        the step of that key, and `peer_position` (of the other side of a message, or of a root).

    Raises:
        UsageError: `uneven-groups`: a group holds neither ranks of one copy, nor of neighbouring copies, nor of all.
    """
    nodes = graph.nodes.select(
        "node", "rank", "step", from_ns="start_ns", to_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    rows = graph.communication.join(nodes, on="node").join(positions, on="rank")
    about = ["rank", "position", "group", "ranks", "group_size", "peer", "kind_of_pair", "pair"]
    rows = rows.with_columns(pair=pl.col("kind").is_in(PAIRS).fill_null(value=False)).with_columns(
        peer=pl.when("pair").then("peer"),
        kind_of_pair=pl.when("pair").then("kind"),
        copy=pl.col("rank").map_elements(axis.copy, pl.Int64),
        root_position=pl.when(~pl.col("kind").is_in(PAIRS)).then(pl.col("peer").map_elements(axis.position, pl.Int64)),
    )
    distinct = rows.unique(about, maintain_order=True).select(about)
    names: dict[object, list[str]] = {}
    keys = [_key(row, axis, roles, names) for row in distinct.iter_rows(named=True)]
    schema: dict[str, Any] = {"key": pl.String, "span": pl.Int64, "members": pl.Int64, "positions": pl.List(pl.Int64)}
    of_groups = distinct.hstack(pl.DataFrame(keys, schema, orient="row"))
    rows = rows.join(of_groups, on=about, how="left", nulls_equal=True, maintain_order="left")
    # A message has its own key for each direction; its two sides count it alike.
    sends = pl.col("kind") == "send"
    ends = pl.when(sends).then(pl.format("{}>{}", "position", "key")).otherwise(pl.format("{}>{}", "key", "position"))
    way = pl.when("pair").then(ends).otherwise("key")
    rows = rows.with_columns(
        key=way,
        peer_position=pl.when("pair").then(pl.col("key").cast(pl.Int64, strict=False)).otherwise("root_position"),
    ).sort("position", "rank", "from_ns", "node")
    return rows.with_columns(nth=pl.int_range(pl.len()).over("position", "rank", "step", "key", "kind_of_pair"))


def _key(
    row: Mapping[str, object], axis: DataAxis, roles: Mapping[str, str], names: dict[object, list[str]]
) -> tuple[str | None, int, int, list[int]]:
    """Key, span, members and positions of a group or message: columns of `keyed`."""
    rank, position, group, members, peer = (row[name] for name in ("rank", "position", "group", "ranks", "peer"))
    assert isinstance(rank, int)
    assert isinstance(position, int)
    moved = position - axis.position(rank)
    if row["pair"]:
        same_copy = isinstance(peer, int) and axis.copy(peer) == axis.copy(rank)
        if not same_copy or not isinstance(peer, int):
            return None, 1, 1, [position]
        other = axis.position(peer) + moved
        return str(other), 1, 2, [position, other] if row["kind_of_pair"] == "send" else [other, position]
    size = axis.world if row["group_size"] is None else row["group_size"]
    ranks = list(members) if isinstance(members, list) else [*range(axis.world)] if size == axis.world else [rank]
    if ranks == [rank] and size != 1:
        raise UsageError(
            f"no trace says which {size} ranks are in group {group}",
            slug="uneven-groups",
            hint="record with distributed information, or simulate a run whose groups are described",
        )
    if len(ranks) < 2:
        return None, 1, 1, [position]
    own = {axis.position(member) for member in ranks}
    at = tuple(sorted(own if position in own else {other + moved for other in own}))
    copies = sorted({axis.copy(member) for member in ranks})
    span = copies[-1] - copies[0] + 1
    if span != len(copies) or copies[0] % span or len(ranks) != span * len(own):
        raise UsageError(
            f"group {group} holds ranks of {len(copies)} copies of the model in no regular way",
            slug="uneven-groups",
            hint="only groups of one copy, of neighbouring copies, or of all can be scaled",
        )
    if span == axis.copies and (span == 1 or roles.get(str(group), "") not in _KEEP):
        span = ALL
    same = names.setdefault((rank, span, at), [])
    if str(group) not in same:
        same.append(str(group))
    return f"{span} {at} {same.index(str(group))}", span, len(ranks), list(at)


def replica_of(graph: Graph, axis: DataAxis, roles: Mapping[str, str]) -> Replica:
    """Cut one copy of the job out of a graph.

    Each position is that of the lowest copy which was recorded. One that was not recorded is copied from one with the
    same outer digit: a tensor parallel neighbour does the same with other weights.

    Raises:
        UsageError: `unrecorded-role`: no rank of some stage was recorded; `uneven-groups`.
    """
    by_position: dict[int, int] = {}
    for rank in sorted((int(rank) for rank in graph.nodes["rank"].drop_nulls().unique()), key=axis.copy):
        by_position.setdefault(axis.position(rank), rank)
    copied = {}
    for position in sorted(set(range(axis.positions)) - set(by_position)):
        alike = [rank for other, rank in by_position.items() if other // axis.stride == position // axis.stride]
        if not alike:
            raise UsageError(
                f"no recorded rank does what rank {axis.rank(position, 0)} does",
                slug="unrecorded-role",
                hint=f"record a rank of each of the {axis.positions // axis.stride} stages",
            )
        copied[position] = alike[0]
    templates = sorted({**by_position, **copied}.items())
    positions = pl.DataFrame(templates, {"position": pl.Int32, "rank": pl.Int32}, orient="row")

    nodes = graph.nodes.filter(~pl.col("kind").is_in(_JOINTS)).join(positions, on="rank").sort("position", "node")
    lanes = graph.lanes.join(positions, on="rank").sort("position", "lane").with_row_index("new_lane")
    nodes = nodes.with_row_index("new").join(
        lanes.select("lane", "position", "new_lane"), on=["lane", "position"], how="left", maintain_order="left"
    )
    number = nodes.select("node", "position", "new")
    edges = (
        graph.edges.with_row_index("edge")
        .join(number.select("position", source="node", new_source="new"), on="source")
        .join(number.select("position", target="node", new_target="new"), on=["target", "position"])
        .sort("new_target", "edge")
    )
    parts = keyed(graph, axis, roles, positions).join(number, on=["node", "position"]).sort("new")
    met = ["key", "step", "nth"]
    meetings = (
        parts.drop_nulls("key")
        .group_by(met, maintain_order=True)
        .agg(pl.col("span", "members", "positions", "kind", "in_bytes", "out_bytes").first(), pl.col("from_ns").max(),
             pl.col("position").first())
        .with_row_index("meeting", offset=0)
    )  # fmt: skip
    parts = parts.join(meetings.select(*met, "meeting"), on=met, how="left", nulls_equal=True, maintain_order="left")
    joint = meetings.select(
        pl.lit(gs.RENDEZVOUS).alias("kind"), pl.col("position").alias("rank"), pl.col("from_ns").alias("start_ns"),
        "step",
        *(pl.lit(0, pl.Int64).alias(name) for name in ("duration_ns", "work_ns", "residual_ns")),
    )  # fmt: skip
    own = nodes.with_columns(pl.col("new_lane").alias("lane"), pl.col("position").alias("rank")).select(
        *GRAPH_SCHEMAS["nodes"]
    )
    whole = pl.concat([own, joint.cast({"kind": gs.NodeKind})], how="diagonal_relaxed").with_columns(
        node=pl.int_range(pl.len())
    )
    meets = parts.drop_nulls("meeting").select("new", at=pl.col("meeting").cast(pl.Int64) + nodes.height)
    assumed = pl.DataFrame({"kind": "rendezvous", "evidence": "assumed", "delay_ns": 0, "residual_ns": 0})
    into = meets.select(source="new", target="at", from_end=False, to_end=False)
    out_of = meets.select(source="at", target="new", from_end=True, to_end=True)
    rendezvous = pl.concat([into.cast(pl.Int64, strict=False), out_of.cast(pl.Int64, strict=False)]).join(
        assumed, how="cross"
    )
    inner = edges.with_columns(source="new_source", target="new_target")
    frames = {
        "nodes": whole,
        "edges": pl.concat([as_declared(frame, GRAPH_SCHEMAS["edges"]) for frame in (inner, rendezvous)]),
        "lanes": lanes.with_columns(lane="new_lane", rank="position"),
        "communication": parts.with_columns(node="new", instance=pl.col("meeting").cast(pl.Int64)),
        "transfers": graph.transfers.join(number, on="node").sort("new").with_columns(node="new"),
    }
    declared: dict[str, Any] = {name: as_declared(frame, GRAPH_SCHEMAS[name]) for name, frame in frames.items()}
    declared |= {name: empty_frame(name) for name in ("host_ops", "ranks", "coverage")}
    return Replica(
        graph=replace(graph, **declared, world_size=axis.positions),
        axis=axis,
        node=np.append(nodes["node"].to_numpy().astype(np.int64), np.full(meetings.height, -1)),
        edge=np.append(edges["edge"].to_numpy().astype(np.int64), np.full(rendezvous.height, -1)),
        parts=parts,
        meetings=meetings.with_columns(node=pl.col("meeting").cast(pl.Int64) + nodes.height),
        copied=copied,
    )
