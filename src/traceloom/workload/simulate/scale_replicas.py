"""Extracting one copy of a job from a graph, measuring its variation, and expanding it to many
copies.

Ranks are numbered in mixed radix: `rank = inner + stride x (copy + copies x outer)`. Data
parallelism counts the middle digit; tensor, context and pipeline parallelism count the others. A
rank's position is its number without the copy: ranks of one position run the same program.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from traceloom.errors import UsageError
from traceloom.graph import Plan, graph as graph_schema
from traceloom.graph.calibrate import class_delays, classify_edges
from traceloom.graph.graph import (
    GRAPH_SCHEMAS,
    Graph,
    build_empty_frame,
    get_edge_points,
    get_point_times,
)
from traceloom.trace.array_types import Bools, Floats, Ints
from traceloom.trace.frames import cast_to_schema
from traceloom.workload.simulate.evaluation import check_memory

# Groups of these roles keep their size, even if they contain a rank of every copy.
_KEEP = ("tensor", "pipeline", "expert", "context", "embedding")
PAIRS = ("send", "receive")
ALL = 0  # span of a group with ranks of every copy
_JOINTS = (graph_schema.RENDEZVOUS, graph_schema.ARRIVAL)


@dataclass(frozen=True, slots=True)
class RankNumbering:
    """The numbering of ranks.

    Attributes:
        stride: Distance between neighbors in a data-parallel group.
        copies: Ranks of such a group.
        world: Ranks of the job.
    """

    stride: int
    copies: int
    world: int

    @property
    def positions(self) -> int:
        return self.world // self.copies

    def position(self, rank: int) -> int:
        return rank % self.stride + rank // (self.stride * self.copies) * self.stride

    def copy(self, rank: int) -> int:
        return rank // self.stride % self.copies

    def rank(self, position: int, copy: int) -> int:
        """Returns the rank at a position of a copy."""
        return position % self.stride + self.stride * (
            copy + self.copies * (position // self.stride)
        )


@dataclass(frozen=True)
class Replica:
    """One copy of the job.

    Attributes:
        graph: One rank per position, numbered by position; its meetings have no members in other
            copies.
        axis: The numbering of ranks in the recorded job.
        node: The recorded node of each node, shape (nodes,); -1 for meetings.
        edge: The recorded edge of each edge, shape (edges,); -1 for edges into and out of meetings.
        parts: The columns of `add_keys` for each row of the graph's `communication`, with the row
            of its meeting (`meeting`, null if the rank meets nobody).
        meetings: One row per meeting: `node`, `key`, `span`, `members`, `positions`, `kind`,
            `in_bytes`, `out_bytes`, `step`, `nth`.
        copied: Positions without a recorded rank, with the rank that they are copied from.
    """

    graph: Graph
    axis: RankNumbering
    node: Ints
    edge: Ints
    parts: pl.DataFrame
    meetings: pl.DataFrame
    copied: Mapping[int, int]


def find_rank_numbering(graph: Graph, roles: Mapping[str, str]) -> RankNumbering:
    """Determines the numbering of ranks from the members of the data-parallel groups.

    Args:
        graph: The recorded ranks.
        roles: Role of each group by name, from `analyze.collective.groups`. Groups without a role
            that do more than send and receive must all agree.

    Raises:
        UsageError: `no-data-parallel`: the run has no such group; `unknown-roles`: it cannot be
            identified; `uneven-groups`: its members are not evenly spaced.
    """
    used = graph.communication.filter(~pl.col("kind").is_in(PAIRS)).unique(
        ["group", "ranks"], maintain_order=True
    )
    world = graph.job_size
    shapes: dict[str, set[tuple[int, int]]] = {}
    for group, members, size in used.select("group", "ranks", "group_size").iter_rows():
        steps = set(np.diff(members or ()).tolist())
        shape = (steps.pop() if len(steps) == 1 else 0, len(members or ()))
        if not members and (size or world) == world > 1:
            shape = (1, world)
        if shape[1] > 1:
            shapes.setdefault(roles.get(group or "", ""), set()).add(shape)
    role = next((name for name in ("data", "sharded data") if name in shapes), None)
    other_shapes = [shape for name, shape in shapes.items() if name not in _KEEP]
    selected = shapes[role] if role else set().union(*other_shapes)
    if not selected:
        raise UsageError(
            "no group of this run is data parallel: nothing tells what more ranks would exchange",
            slug="no-data-parallel",
            hint="record a job of two data parallel ranks or more, with its distributed information",
        )
    if len(selected) > 1:
        sizes = ", ".join(f"{size} ranks {stride} apart" for stride, size in sorted(selected))
        raise UsageError(
            f"nothing tells which groups are data parallel: there are such of {sizes}",
            slug="unknown-roles",
            hint="name one with --role GROUP=data",
        )
    ((stride, copies),) = selected
    if stride < 1 or world % (stride * copies):
        raise UsageError(
            f"the {copies} ranks of a data parallel group are not evenly spaced over the {world} of the job",
            slug="uneven-groups",
            hint="only jobs whose copies are numbered alike can be scaled",
        )
    return RankNumbering(int(stride), copies, world)


def add_keys(
    graph: Graph, axis: RankNumbering, roles: Mapping[str, str], positions: pl.DataFrame
) -> pl.DataFrame:
    """Returns the communication of some ranks, each at some positions, with keys shared by the
    parts of one operation.

    Args:
        graph: The recorded ranks.
        axis: The numbering of ranks.
        roles: Role of each group by name.
        positions: `rank` and `position` (Int32); a rank may represent several positions.

    Returns:
        The rows of `communication` with `rank`, `position`, `copy`, `step`, `from_ns`, `to_ns`,
        `key` (of the group, the same at all positions and in all copies that meet; null if the rank
        meets nobody), `span` (number of neighboring copies that meet; `ALL`), `members` (of the
        group), `positions` (of one copy in it, the sender first), `nth` in the step of that key,
        and `peer_position` (of the other side of a message, or of a root).

    Raises:
        UsageError: `uneven-groups`: a group consists neither of ranks of one copy, nor of
            neighboring copies, nor of all.
    """
    nodes = graph.nodes.select(
        "node", "rank", "step", from_ns="start_ns", to_ns=pl.col("start_ns") + pl.col("duration_ns")
    )
    rows = graph.communication.join(nodes, on="node").join(positions, on="rank")
    key_columns = [
        "rank",
        "position",
        "group",
        "ranks",
        "group_size",
        "peer",
        "kind_of_pair",
        "pair",
    ]
    rows = rows.with_columns(pair=pl.col("kind").is_in(PAIRS).fill_null(value=False)).with_columns(
        peer=pl.when("pair").then("peer"),
        kind_of_pair=pl.when("pair").then("kind"),
        copy=pl.col("rank").map_elements(axis.copy, pl.Int64),
        root_position=pl.when(~pl.col("kind").is_in(PAIRS)).then(
            pl.col("peer").map_elements(axis.position, pl.Int64)
        ),
    )
    distinct = rows.unique(key_columns, maintain_order=True).select(key_columns)
    names: dict[object, list[str]] = {}
    keys = [_build_key(row, axis, roles, names) for row in distinct.iter_rows(named=True)]
    schema: dict[str, Any] = {
        "key": pl.String,
        "span": pl.Int64,
        "members": pl.Int64,
        "positions": pl.List(pl.Int64),
    }
    rows = rows.join(
        distinct.hstack(pl.DataFrame(keys, schema, orient="row")),
        on=key_columns,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    # A message has its own key for each direction, with the same count on both sides.
    direction = (
        pl.when(pl.col("kind") == "send")
        .then(pl.format("{}>{}", "position", "key"))
        .otherwise(pl.format("{}>{}", "key", "position"))
    )
    rows = rows.with_columns(
        key=pl.when("pair").then(direction).otherwise("key"),
        peer_position=pl.when("pair")
        .then(pl.col("key").cast(pl.Int64, strict=False))
        .otherwise("root_position"),
    ).sort("position", "rank", "from_ns", "node")
    return rows.with_columns(
        nth=pl.int_range(pl.len()).over("position", "rank", "step", "key", "kind_of_pair")
    )


def _build_key(
    row: Mapping[str, object],
    axis: RankNumbering,
    roles: Mapping[str, str],
    names: dict[object, list[str]],
) -> tuple[str | None, int, int, list[int]]:
    """Returns key, span, members and positions of a group or message: columns of `add_keys`."""
    rank, position, group, members, peer = (
        row[name] for name in ("rank", "position", "group", "ranks", "peer")
    )
    assert isinstance(rank, int)
    assert isinstance(position, int)
    moved = position - axis.position(rank)
    if row["pair"]:
        same_copy = isinstance(peer, int) and axis.copy(peer) == axis.copy(rank)
        if not same_copy or not isinstance(peer, int):
            return None, 1, 1, [position]
        other = axis.position(peer) + moved
        return (
            str(other),
            1,
            2,
            [position, other] if row["kind_of_pair"] == "send" else [other, position],
        )
    size = axis.world if row["group_size"] is None else row["group_size"]
    ranks = (
        list(members)
        if isinstance(members, list)
        else [*range(axis.world)]
        if size == axis.world
        else [rank]
    )
    if ranks == [rank] and size != 1:
        raise UsageError(
            f"no trace says which {size} ranks are in group {group}",
            slug="uneven-groups",
            hint="record with distributed information, or simulate a run whose groups are described",
        )
    if len(ranks) < 2:
        return None, 1, 1, [position]
    own_positions = {axis.position(member) for member in ranks}
    group_positions = tuple(
        sorted(
            own_positions
            if position in own_positions
            else {other + moved for other in own_positions}
        )
    )
    copies = sorted({axis.copy(member) for member in ranks})
    span = copies[-1] - copies[0] + 1
    if span != len(copies) or copies[0] % span or len(ranks) != span * len(own_positions):
        raise UsageError(
            f"group {group} holds ranks of {len(copies)} copies of the model in no regular way",
            slug="uneven-groups",
            hint="only groups of one copy, of neighbouring copies, or of all can be scaled",
        )
    if span == axis.copies and (span == 1 or roles.get(str(group), "") not in _KEEP):
        span = ALL
    same = names.setdefault((rank, span, group_positions), [])
    if str(group) not in same:
        same.append(str(group))
    return (
        f"{span} {group_positions} {same.index(str(group))}",
        span,
        len(ranks),
        list(group_positions),
    )


def extract_replica(graph: Graph, axis: RankNumbering, roles: Mapping[str, str]) -> Replica:
    """Cuts one copy of the job out of a graph.

    Each position is taken from the lowest recorded copy. An unrecorded position is copied from one
    with the same outer digit: a tensor-parallel neighbor runs the same program with other weights.

    Raises:
        UsageError: `unrecorded-role`: no rank of some stage was recorded; `uneven-groups`.
    """
    rank_by_position: dict[int, int] = {}
    for rank in sorted(
        (int(rank) for rank in graph.nodes["rank"].drop_nulls().unique()), key=axis.copy
    ):
        rank_by_position.setdefault(axis.position(rank), rank)
    copied = {}
    for position in sorted(set(range(axis.positions)) - set(rank_by_position)):
        same_stage_ranks = [
            rank
            for other, rank in rank_by_position.items()
            if other // axis.stride == position // axis.stride
        ]
        if not same_stage_ranks:
            raise UsageError(
                f"no recorded rank does what rank {axis.rank(position, 0)} does",
                slug="unrecorded-role",
                hint=f"record a rank of each of the {axis.positions // axis.stride} stages",
            )
        copied[position] = same_stage_ranks[0]
    positions = pl.DataFrame(
        sorted({**rank_by_position, **copied}.items()),
        {"position": pl.Int32, "rank": pl.Int32},
        orient="row",
    )

    nodes = (
        graph.nodes.filter(~pl.col("kind").is_in(_JOINTS))
        .join(positions, on="rank")
        .sort("position", "node")
    )
    lanes = (
        graph.lanes.join(positions, on="rank").sort("position", "lane").with_row_index("new_lane")
    )
    nodes = nodes.with_row_index("new").join(
        lanes.select("lane", "position", "new_lane"),
        on=["lane", "position"],
        how="left",
        maintain_order="left",
    )
    number = nodes.select("node", "position", "new")
    edges = (
        graph.edges.with_row_index("edge")
        .join(number.select("position", source="node", new_source="new"), on="source")
        .join(number.select("position", target="node", new_target="new"), on=["target", "position"])
        .sort("new_target", "edge")
    )
    parts = (
        add_keys(graph, axis, roles, positions).join(number, on=["node", "position"]).sort("new")
    )
    meeting_keys = ["key", "step", "nth"]
    meetings = (
        parts.drop_nulls("key")
        .group_by(meeting_keys, maintain_order=True)
        .agg(
            pl.col("span", "members", "positions", "kind", "in_bytes", "out_bytes").first(),
            pl.col("from_ns").max(),
            pl.col("position").first(),
        )
        .with_row_index("meeting", offset=0)
    )
    parts = parts.join(
        meetings.select(*meeting_keys, "meeting"),
        on=meeting_keys,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    joint = meetings.select(
        pl.lit(graph_schema.RENDEZVOUS).alias("kind"),
        pl.col("position").alias("rank"),
        pl.col("from_ns").alias("start_ns"),
        "step",
        *(pl.lit(0, pl.Int64).alias(name) for name in ("duration_ns", "work_ns", "residual_ns")),
    )
    replica_nodes = nodes.with_columns(
        pl.col("new_lane").alias("lane"), pl.col("position").alias("rank")
    ).select(*GRAPH_SCHEMAS["nodes"])
    all_nodes = pl.concat(
        [replica_nodes, joint.cast({"kind": graph_schema.NodeKind})], how="diagonal_relaxed"
    ).with_columns(node=pl.int_range(pl.len()))
    meets = parts.drop_nulls("meeting").select(
        "new", at=pl.col("meeting").cast(pl.Int64) + nodes.height
    )
    assumed = pl.DataFrame(
        {"kind": "rendezvous", "evidence": "assumed", "delay_ns": 0, "residual_ns": 0}
    )
    entering = meets.select(source="new", target="at", from_end=False, to_end=False)
    out_of = meets.select(source="at", target="new", from_end=True, to_end=True)
    rendezvous = pl.concat(
        [entering.cast(pl.Int64, strict=False), out_of.cast(pl.Int64, strict=False)]
    ).join(assumed, how="cross")
    inner = edges.with_columns(source="new_source", target="new_target")
    frames = {
        "nodes": all_nodes,
        "edges": pl.concat(
            [cast_to_schema(frame, GRAPH_SCHEMAS["edges"]) for frame in (inner, rendezvous)]
        ),
        "lanes": lanes.with_columns(lane="new_lane", rank="position"),
        "communication": parts.with_columns(node="new", instance=pl.col("meeting").cast(pl.Int64)),
        "transfers": graph.transfers.join(number, on="node").sort("new").with_columns(node="new"),
    }
    declared: dict[str, Any] = {
        name: cast_to_schema(frame, GRAPH_SCHEMAS[name]) for name, frame in frames.items()
    }
    declared |= {name: build_empty_frame(name) for name in ("host_ops", "ranks", "coverage")}
    return Replica(
        graph=replace(graph, **declared, world_size=axis.positions),
        axis=axis,
        node=np.append(nodes["node"].to_numpy().astype(np.int64), np.full(meetings.height, -1)),
        edge=np.append(edges["edge"].to_numpy().astype(np.int64), np.full(rendezvous.height, -1)),
        parts=parts,
        meetings=meetings.with_columns(node=pl.col("meeting").cast(pl.Int64) + nodes.height),
        copied=copied,
    )


QUANTILES = 1024  # per distribution
_MIN_SAMPLES = 24  # samples of a name; with fewer, the variation of its kind is used
_DEVICE = (graph_schema.KERNEL, graph_schema.COPY, graph_schema.FILL)
_SIDES = 2  # host, device


@dataclass(frozen=True)
class Variation:
    """Distributions from which the works, delays and transfers of one copy are drawn.

    Shapes: N nodes, E edges and M meetings of the replica; R recorded ranks of a stage, S recorded
    steps.

    Attributes:
        work_ns: Mean work of each node over steps and equal ranks, (N,).
        work_pool: Row of `pools` with the factors on it, (N,); -1 if it never varies.
        work_samples: Number of works in each mean, (N,), which limits its accuracy.
        side: 0 for host work, 1 for device work, (N,); -1 if ranks and steps do not differ as a
            whole.
        delay_ns: Delay of each edge, (E,).
        delay_pool: Row of `pools` with the ns added to it, (E,); or -1.
        part: Delay of an edge as a fraction of the source's work, (E,); NaN if it is an independent
            time.
        transfer_pool: Row of `pools` with the factors on the transfer of each meeting, (M,); or -1.
        transfer_samples: Number of transfers in each median, (M,), which limits its accuracy.
        pools: Quantiles, each row ascending, (pools, `QUANTILES`).
        effects: By stage: factor on all host work (0) or device work (1) of a rank in a step, (2,
            R, S).
        starts_ns: By stage: start of the recording of each rank, from the first, (R,).
        steps: The recorded steps.
        seen: Number of recorded copies of each part of a meeting, by row of the replica's `parts`.
        apparent_ns: From the arrival of the last recorded part to the end, median over steps, (M,).
    """

    work_ns: Floats
    work_pool: Ints
    work_samples: Ints
    side: Ints
    delay_ns: Floats
    delay_pool: Ints
    part: Floats
    transfer_pool: Ints
    transfer_samples: Ints
    pools: Floats
    effects: Mapping[int, Floats]
    starts_ns: Mapping[int, Ints]
    steps: Ints
    seen: Ints
    apparent_ns: Floats


class _Pools:
    def __init__(self) -> None:
        self.rows: list[Floats] = []

    def add(self, samples: Floats) -> int:
        """Returns the number of the pool with these samples; -1 if they are all equal."""
        if samples.size < 2 or np.ptp(samples) < 1e-9:
            return -1
        quantile_points = (np.arange(QUANTILES) + 0.5) / QUANTILES
        # Interpolate linearly between the samples, each at the middle of its share.
        positions = (np.arange(samples.size) + 0.5) / samples.size
        self.rows.append(np.interp(quantile_points, positions, np.sort(samples)))
        return len(self.rows) - 1

    def table(self) -> Floats:
        return np.array(self.rows).reshape(len(self.rows), QUANTILES)


def measure_variation(graph: Graph, replica: Replica, roles: Mapping[str, str]) -> Variation:
    """Measures the variation of a calibrated graph.

    Works are equal if they have the same name, kind and position in their step, on ranks of one
    stage. The effect of a rank's whole step (the median factor of all its works) is separated from
    the variation of single works; factors of few samples are corrected for being compared with a
    mean that includes them.
    """
    axis, pools = replica.axis, _Pools()
    nodes = _add_work_numbers(graph, axis)
    works, side, effects, steps = _measure_works(nodes, pools)
    delay, delay_pool, part = _measure_delays(graph, nodes, pools)
    node_rows, edge_rows = replica.node, replica.edge
    inner, is_recorded_edge = node_rows >= 0, edge_rows >= 0

    apparent, transfer_pool, transfer_samples, seen_copies = _measure_transfers(
        graph, replica, roles, pools
    )
    first = (
        nodes.drop_nulls("rank")
        .group_by("stage", "rank")
        .agg(pl.col("start_ns").min())
        .sort("stage", "rank")
    )
    first = first.with_columns(pl.col("start_ns") - pl.col("start_ns").min())
    return Variation(
        work_ns=np.where(inner, works["work"].to_numpy()[node_rows], 0.0),
        work_pool=np.where(inner, works["pool"].to_numpy()[node_rows], -1),
        work_samples=np.where(inner, works["samples"].to_numpy()[node_rows], 1),
        side=np.where(inner, side[node_rows], -1),
        delay_ns=np.where(is_recorded_edge, delay[edge_rows], 0.0),
        delay_pool=np.where(is_recorded_edge, delay_pool[edge_rows], -1),
        part=np.where(is_recorded_edge, part[edge_rows], np.nan),
        transfer_pool=transfer_pool,
        transfer_samples=transfer_samples,
        pools=pools.table(),
        effects=effects,
        starts_ns={
            int(str(stage)): rows["start_ns"].to_numpy().astype(np.int64)
            for (stage,), rows in first.group_by("stage", maintain_order=True)
        },
        steps=steps,
        seen=seen_copies,
        apparent_ns=apparent,
    )


def _add_work_numbers(graph: Graph, axis: RankNumbering) -> pl.DataFrame:
    """Returns all nodes with their stage and `same`, a number shared by equal works."""
    nodes = graph.nodes.select(
        "node",
        "rank",
        (pl.col("rank").fill_null(0) // (axis.stride * axis.copies)).alias("stage"),
        pl.col("step").fill_null(-1),
        "kind",
        pl.col("name").fill_null(""),
        (pl.col("work_ns") + pl.col("residual_ns")).cast(pl.Float64).alias("measured"),
        "start_ns",
    ).sort("start_ns", "node")
    nodes = nodes.with_columns(nth=pl.int_range(pl.len()).over("rank", "step", "kind", "name"))
    key = ["stage", "kind", "name", "nth"]
    numbers = nodes.unique(key, maintain_order=True).select(key).with_row_index("same")
    return nodes.join(numbers, on=key, how="left", maintain_order="left").sort("node")


def _measure_works(
    nodes: pl.DataFrame, pools: _Pools
) -> tuple[pl.DataFrame, Ints, dict[int, Floats], Ints]:
    """Returns mean work and pool of every recorded node, its side, and the effects common to steps
    and ranks.
    """
    device = pl.col("kind").is_in(_DEVICE)
    joint = pl.col("kind").is_in(
        [
            graph_schema.RENDEZVOUS,
            graph_schema.ARRIVAL,
            graph_schema.ORIGIN,
            *graph_schema.COMMUNICATION,
        ]
    )
    works = nodes.with_columns(
        work=pl.col("measured").mean().over("same"),
        samples=pl.len().over("same"),
        side=pl.when(joint).then(-1).otherwise(device.cast(pl.Int64)),
    ).with_columns(ratio=pl.col("measured") / pl.col("work"))
    usable = (pl.col("samples") > 1) & (pl.col("work") > 0) & (pl.col("side") >= 0)
    cells = works.filter(usable, pl.col("step") >= 0)
    cells = (
        cells.with_columns(scatter=cells.select(pl.col("ratio").std().over("side")).to_series())
        .group_by("stage", "side", "rank", "step")
        .agg(
            pl.col("ratio").median(),
            noise=(1.5 * pl.col("scatter").first() ** 2 / pl.len()).fill_null(0.0),
        )
    )
    # Subtract the random variation expected of medians of so many works.
    cells = cells.with_columns(
        effect=pl.col("ratio") / pl.col("ratio").mean().over("stage", "side")
    )
    variance = pl.col("effect").var().over("stage", "side").fill_null(0.0)
    real = (
        1 - pl.col("noise").mean().over("stage", "side") / pl.max_horizontal(variance, 1e-12)
    ).clip(lower_bound=0)
    cells = cells.with_columns(effect=1 + (pl.col("effect") - 1) * real.sqrt())
    works = works.join(
        cells.select("stage", "side", "rank", "step", "effect"),
        on=["stage", "side", "rank", "step"],
        how="left",
        maintain_order="left",
        nulls_equal=True,
    ).with_columns(pl.col("effect").fill_null(1.0))
    count = pl.col("samples")
    residuals = works.filter(usable).with_columns(
        left=(1 + (pl.col("ratio") / pl.col("effect") - 1) * (count / (count - 1)).sqrt()).clip(
            lower_bound=0
        )
    )
    numbers, pool_by_kind = [], {}
    for (kind,), rows in residuals.group_by("kind", maintain_order=True):
        pool_by_kind[kind] = pools.add(rows["left"].to_numpy())
        for (name,), same in rows.group_by("name", maintain_order=True):
            number = (
                pools.add(same["left"].to_numpy())
                if same.height >= _MIN_SAMPLES
                else pool_by_kind[kind]
            )
            numbers.append((kind, name, number))
    pool_by_name = pl.DataFrame(
        numbers, {"kind": graph_schema.NodeKind, "name": pl.String, "pool": pl.Int64}, orient="row"
    )
    works = works.join(pool_by_name, on=["kind", "name"], how="left", maintain_order="left")
    kind_pool = (
        pl.col("kind")
        .cast(pl.String)
        .replace_strict(pool_by_kind, default=-1, return_dtype=pl.Int64)
    )
    works = works.with_columns(
        pool=pl.when(pl.col("side") >= 0).then(pl.coalesce("pool", kind_pool)).otherwise(-1)
    )
    steps = np.unique(cells["step"].to_numpy()).astype(np.int64)
    effects = {}
    for (stage,), rows in cells.group_by("stage", maintain_order=True):
        ranks = np.unique(rows["rank"].to_numpy())
        table = np.ones((_SIDES, ranks.size, steps.size))
        position = (
            np.searchsorted(ranks, rows["rank"].to_numpy()),
            np.searchsorted(steps, rows["step"].to_numpy()),
        )
        table[rows["side"].to_numpy(), position[0], position[1]] = rows["effect"].to_numpy()
        effects[int(str(stage))] = table
    return works, works["side"].to_numpy().astype(np.int64), effects, steps


def _measure_delays(
    graph: Graph, nodes: pl.DataFrame, pools: _Pools
) -> tuple[Floats, Ints, Floats]:
    """Returns delay, pool and fraction of the source's work of every recorded edge.

    The delay of an edge is visible only if no other edge delayed its target more. If it is visible
    in most steps and ranks, the edge gets their mean; else that of its class.
    """
    edge_classes = classify_edges(graph)
    constant = class_delays(graph).astype(np.float64)
    source_point, target_point = get_edge_points(graph)
    times = get_point_times(graph)
    edge_ns = (graph.edges["delay_ns"] + graph.edges["residual_ns"]).to_numpy()
    binding: Bools = times[source_point] + edge_ns == times[target_point]
    part = np.full(constant.size, np.nan)
    work = nodes["measured"].to_numpy()
    source = graph.edges["source"].to_numpy().astype(np.int64)
    running = edge_classes.running
    part[running] = constant[running] / np.maximum(work[source[running]], 1)
    fixed = edge_classes.given | edge_classes.transfer
    fixed[running] = True
    same = nodes["same"]
    edges = graph.edges.select("kind", "from_end", "to_end").with_columns(
        same[source].alias("from"),
        same[graph.edges["target"]].alias("to"),
        pl.Series("of", edge_classes.of),
        pl.Series("constant", constant),
        pl.Series("took", edge_ns).cast(pl.Float64),
        pl.Series("binding", binding & ~fixed),
    )
    class_columns = ["kind", "from", "to", "from_end", "to_end"]
    edges = edges.with_columns(
        mean=pl.col("took").filter("binding").mean().over(class_columns),
        often=pl.col("binding").mean().over(class_columns) >= 0.5,
    ).with_columns(delay=pl.when("often").then("mean").otherwise("constant"))
    delay = np.where(fixed, constant, edges["delay"].to_numpy())
    pool = np.full(delay.size, -1, dtype=np.int64)
    for (_, edge_class), rows in (
        edges.with_row_index("row")
        .filter("binding")
        .with_columns(off=pl.col("took") - pl.col("delay"))
        .group_by("kind", "of", maintain_order=True)
    ):
        number = pools.add(rows["off"].to_numpy())
        if number >= 0:
            same_class = (edges["of"] == edge_class).to_numpy() & (
                edges["kind"] == rows["kind"][0]
            ).to_numpy()
            pool[same_class & ~fixed] = number
    return delay, pool, part


def _measure_transfers(
    graph: Graph, replica: Replica, roles: Mapping[str, str], pools: _Pools
) -> tuple[Floats, Ints, Ints, Ints]:
    """Returns apparent transfer of each meeting, its pool and samples, and the number of recorded
    copies of each part.
    """
    axis = replica.axis
    positions = (
        graph.nodes.select("rank")
        .drop_nulls()
        .unique("rank")
        .sort("rank")
        .with_columns(position=pl.col("rank").map_elements(axis.position, pl.Int32))
    )
    parts = add_keys(graph, axis, roles, positions)
    seen_copies = replica.parts.select("key", "position").join(
        parts.group_by("key", "position").agg(seen=pl.col("rank").n_unique()),
        on=["key", "position"],
        how="left",
        maintain_order="left",
    )
    block = (
        pl.when(pl.col("span") == ALL)
        .then(0)
        .otherwise(pl.col("copy") // pl.max_horizontal("span", 1))
    )
    operation = (
        parts.drop_nulls("key")
        .with_columns(block=block)
        .group_by("key", "block", "step", "nth")
        .agg(
            pl.col("kind").first(),
            pl.col("span").first(),
            pl.col("in_bytes").first(),
            pl.col("members").first(),
            present=pl.len(),
            apparent=(pl.col("to_ns").median() - pl.col("from_ns").max()).clip(lower_bound=0),
        )
        .with_columns(whole=pl.col("present") >= pl.col("members"))
    )
    class_columns = ["kind", "span", "in_bytes", "members"]
    # Fully recorded meetings show the transfer itself.
    visible = operation.filter(pl.col("whole").any().over(class_columns) == pl.col("whole"))
    means = visible.group_by("key", "nth").agg(own=pl.col("apparent").median(), samples=pl.len())
    fallback = visible.group_by(class_columns).agg(usual=pl.col("apparent").median())
    rows = (
        replica.meetings.join(means, on=["key", "nth"], how="left", maintain_order="left")
        .join(fallback, on=class_columns, how="left", maintain_order="left", nulls_equal=True)
        .with_columns(
            pl.col("samples").fill_null(1), apparent=pl.coalesce("own", "usual", pl.lit(0.0))
        )
    )
    visible = visible.join(
        means, on=["key", "nth"], how="left", maintain_order="left"
    ).with_columns(count=pl.len().over("key", "nth"))
    numbers = {}
    for kind, alike_rows in visible.group_by(class_columns, maintain_order=True):
        repeated_rows = alike_rows.filter(pl.col("count") > 1, pl.col("own") > 0)
        factor = (
            1
            + (repeated_rows["apparent"] / repeated_rows["own"] - 1)
            * (repeated_rows["count"] / (repeated_rows["count"] - 1)).sqrt()
        )
        numbers[kind] = pools.add(factor.clip(lower_bound=0).to_numpy())
    pool = np.array(
        [numbers.get(row, -1) for row in rows.select(class_columns).iter_rows()], dtype=np.int64
    )
    apparent = rows["apparent"].to_numpy().astype(np.float64)
    samples = rows["samples"].to_numpy().astype(np.int64)
    return apparent, pool, samples, seen_copies["seen"].fill_null(0).to_numpy().astype(np.int64)


def expand_replica(
    replica: Replica,
    variation: Variation,
    meetings: pl.DataFrame,
    copies: int,
    *,
    transfer_ns: Floats,
    seed: int | None = None,
) -> Graph:
    """Returns the graph of all ranks, with the times that follow from its works.

    Args:
        replica: One copy.
        variation: Its works and delays.
        meetings: As `replica.meetings`, with the members and bytes of the scaled job.
        copies: Number of copies.
        transfer_ns: Of each meeting, shape (meetings,).
        seed: Random seed of each rank's works; None if all ranks take the mean.

    Returns:
        A graph without notices of its own; its communication has an `instance` and no list of
        ranks.
    """
    single = replica.graph
    check_memory(single, copies)
    axis = RankNumbering(replica.axis.stride, copies, replica.axis.positions * copies)
    inner = single.nodes.height - meetings.height
    lanes = single.lanes.height
    copy = np.arange(copies)
    rank_of = np.array(
        [
            [axis.rank(position, number) for position in range(axis.positions)]
            for number in range(copies)
        ]
    )
    # Meetings of all copies occur once, of neighbors once per block, of one copy once per copy.
    span = meetings["span"].to_numpy().astype(np.int64)
    instances = np.where(span == ALL, 1, copies // np.maximum(span, 1))
    first = inner * copies + np.cumsum(instances) - instances

    def moved(node: Ints) -> Ints:
        """Returns the numbers of nodes in every copy, (copies, nodes) flattened."""
        meeting = np.maximum(node - inner, 0)
        block = np.where(
            span[meeting] == ALL, 0, copy[:, np.newaxis] // np.maximum(span[meeting], 1)
        )
        numbers: Ints = np.where(
            node < inner, node + copy[:, np.newaxis] * inner, first[meeting] + block
        ).ravel()
        return numbers

    def tiled(frame: pl.DataFrame) -> pl.DataFrame:
        return frame[np.tile(np.arange(frame.height), copies)]

    work = np.broadcast_to(variation.work_ns[:inner], (copies, inner)).copy()
    if seed is not None:
        random = np.random.default_rng(seed)
        pool = variation.work_pool[:inner]
        varied = np.flatnonzero(pool >= 0)
        work[:, varied] *= variation.pools[
            pool[varied], random.integers(0, QUANTILES, (copies, varied.size))
        ]
    nodes = tiled(single.nodes[:inner])
    position = nodes["rank"].fill_null(0).to_numpy()
    nodes = nodes.with_columns(
        rank=pl.Series(rank_of[np.repeat(copy, inner), position]),
        lane=pl.col("lane").cast(pl.Int64) + pl.Series(np.repeat(copy * lanes, inner)),
        work_ns=pl.Series(np.rint(work.ravel()).astype(np.int64)),
        residual_ns=pl.lit(0, pl.Int64),
    )
    joints = single.nodes[inner:][np.repeat(np.arange(meetings.height), instances)]
    block = np.arange(instances.sum()) - np.repeat(np.cumsum(instances) - instances, instances)
    joints = joints.with_columns(
        rank=pl.Series(
            rank_of[
                block * np.maximum(np.repeat(span, instances), 1),
                joints["rank"].fill_null(0).to_numpy(),
            ]
            if joints.height
            else block
        )
    )
    all_nodes = pl.concat([nodes, joints], how="diagonal_relaxed").with_columns(
        node=pl.int_range(pl.len())
    )
    source, target = (single.edges[end].to_numpy().astype(np.int64) for end in ("source", "target"))
    out_of = source >= inner
    delay = variation.delay_ns.copy()
    delay[out_of] = transfer_ns[source[out_of] - inner]
    running = np.isfinite(variation.part)
    delays = np.broadcast_to(delay, (copies, delay.size)).copy()
    delays[:, running] = variation.part[running] * work[:, source[running]]
    edges = tiled(single.edges).with_columns(
        source=pl.Series(moved(source)),
        target=pl.Series(moved(target)),
        delay_ns=pl.Series(np.rint(delays.ravel()).astype(np.int64)),
        residual_ns=pl.lit(0, pl.Int64),
    )
    # Edges of copies that share a meeting occur once for each part, as in a recorded graph.
    communication = single.communication
    part_meeting = replica.parts["meeting"].cast(pl.Int64)
    meets = pl.col("instance").is_not_null()
    grown = (
        meetings.select("members", "in_bytes", "out_bytes")[part_meeting.fill_null(0)]
        if meetings.height
        else None
    )
    if grown is not None:
        growing = meets & pl.Series((span == ALL)[part_meeting.fill_null(0).to_numpy()])
        communication = communication.with_columns(
            group_size=pl.when(meets).then(grown["members"]).otherwise("group_size"),
            in_bytes=pl.when(growing).then(grown["in_bytes"]).otherwise("in_bytes"),
            out_bytes=pl.when(growing).then(grown["out_bytes"]).otherwise("out_bytes"),
        )
    communication = tiled(communication)
    instance = moved(part_meeting.fill_null(0).to_numpy() + inner)
    # The peer of a message is in its own copy, the root of a larger group is in the first one.
    peer_position = replica.parts["peer_position"].fill_null(0).to_numpy().astype(np.int64)
    within_copy = (
        replica.parts.select(pl.col("pair") | (pl.col("span") == 1)).to_series().to_numpy()
    )
    has_peer = replica.parts["peer_position"].is_not_null().to_numpy()
    peer = rank_of[
        np.where(within_copy, copy[:, np.newaxis], 0).ravel(), np.tile(peer_position, copies)
    ]
    communication = communication.with_columns(
        node=pl.Series(moved(single.communication["node"].to_numpy().astype(np.int64))),
        instance=pl.when(pl.col("instance").is_not_null()).then(
            pl.Series(instance - inner * copies)
        ),
        peer=pl.when(pl.Series(np.tile(has_peer, copies))).then(pl.Series(peer)),
    )
    frames: dict[str, Any] = {
        "nodes": all_nodes,
        "edges": edges,
        "lanes": tiled(single.lanes).with_columns(
            lane=pl.int_range(pl.len()),
            rank=pl.Series(
                rank_of[np.repeat(copy, lanes), np.tile(single.lanes["rank"].to_numpy(), copies)]
            ),
        ),
        "communication": communication,
        "transfers": tiled(single.transfers).with_columns(
            node=pl.Series(moved(single.transfers["node"].to_numpy().astype(np.int64)))
        ),
    }
    declared: dict[str, Any] = {
        name: cast_to_schema(frame, GRAPH_SCHEMAS[name]) for name, frame in frames.items()
    }
    graph = replace(single, **declared, delays=build_empty_frame("delays"), world_size=axis.world)
    times = Plan(graph).evaluate()
    start, end = times[0::2], times[1::2]
    return replace(
        graph,
        nodes=graph.nodes.with_columns(
            pl.Series("start_ns", start), pl.Series("duration_ns", end - start)
        ),
    )
