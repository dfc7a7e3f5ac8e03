"""Conversion of other writers' `.et` files to graphs: durations in microseconds and dependencies,
mostly without start times.

Every edge is `assumed`: the file does not say how it is known. A node starts when all its
dependencies have ended, and not before its start time in the file, if any. A node without
dependencies is attached to the origin of its rank. A control dependency on work of the host is an
op's place in the call stack: the op starts after the start of its caller, not after its end.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import polars as pl

from traceloom.errors import InputError, InvariantError
from traceloom.formats.chakra.decode import DamageError, Decoder
from traceloom.formats.chakra.et_pb2 import CollectiveCommType, NodeType
from traceloom.formats.chakra.files import Block
from traceloom.formats.chakra.nodes import ADDED
from traceloom.graph.graph import (
    COLLECTIVE,
    COMMUNICATION,
    COPY,
    GRAPH_SCHEMAS,
    HOST,
    KERNEL,
    ORIGIN,
    RECEIVE,
    SEND,
    Graph,
    sort_topologically,
)
from traceloom.trace.array_types import Ints
from traceloom.trace.notice import Notice
from traceloom.workload.chakra.graph_layout import collect_others

_NUMBERS = (
    "is_cpu_op",
    "comm_type",
    "comm_size",
    "comm_src",
    "comm_dst",
    "comm_tag",
    "comm_group",
    "tensor_size",
    "stream",
    "tid",
)
ATTRIBUTES = (*_NUMBERS, "pg_name", ADDED)
_COLUMNS = pl.Schema(
    {name: pl.Int64() for name in ("id", "type", "start_us", "duration_us")}
    | {"name": pl.String()}
    | {name: pl.Int64() for name in _NUMBERS}
    | {"pg_name": pl.String(), "attributes": pl.Binary()}
)
_KINDS = {
    int(NodeType.COMM_SEND_NODE): SEND,
    int(NodeType.COMM_RECV_NODE): RECEIVE,
    int(NodeType.COMM_COLL_NODE): COLLECTIVE,
    int(NodeType.MEM_LOAD_NODE): COPY,
    int(NodeType.MEM_STORE_NODE): COPY,
    int(NodeType.METADATA_NODE): HOST,
}
_COLLECTIVES = {int(number): name.lower() for name, number in CollectiveCommType.items()} | {
    int(CollectiveCommType.REDUCE_SCATTER_BLOCK): "reduce_scatter"
}
_MAX_BATCH_BYTES = 1 << 20  # bytes of files that are decoded together
_MAX_DURATION_US = 2**60 // 1000  # 36 years


@dataclass(frozen=True, slots=True)
class RankFile:
    """The nodes of one file.

    Attributes:
        blocks: The nodes.
        rank: The rank of the file.
        where: Its name in messages.
    """

    blocks: Iterable[Block]
    rank: int
    where: str


def build_graphs(files: Iterable[RankFile]) -> Iterator[Graph]:
    """Yields the graphs of files, in order; adjacent small files become one graph, which costs a
    tenth.

    Raises:
        InputError: As `build_graph` raises.
    """
    small_files: list[RankFile] = []
    size = 0
    for file in files:
        blocks = iter(file.blocks)
        first = list(islice(blocks, 2))
        complete_file = RankFile(chain(first, blocks), file.rank, file.where)
        head_bytes = sum(len(block.data) for block in first)
        if len(first) > 1 or head_bytes > _MAX_BATCH_BYTES:
            yield from _build_merged_graphs(small_files)
            yield build_graph(complete_file)
            small_files, size = [], 0
            continue
        if size + head_bytes > _MAX_BATCH_BYTES:
            yield from _build_merged_graphs(small_files)
            small_files, size = [], 0
        small_files.append(RankFile(first, file.rank, file.where))
        size += head_bytes
    yield from _build_merged_graphs(small_files)


def _build_merged_graphs(files: list[RankFile]) -> Iterator[Graph]:
    """Yields one graph of small files; if one of them is invalid, one graph per file, so that the
    error names the file.
    """
    if len(files) > 1:
        blocks = [block for file in files for block in file.blocks]
        block_offsets = [0, *accumulate(len(block.data) for block in blocks)]
        joined = Block(
            b"".join(block.data for block in blocks),
            [
                start + base
                for block, base in zip(blocks, block_offsets, strict=False)
                for start in block.starts
            ],
            [
                stop + base
                for block, base in zip(blocks, block_offsets, strict=False)
                for stop in block.stops
            ],
            0,
            0,
        )
        counts = [sum(map(len, file.blocks)) for file in files]
        try:
            graph = _decode_graph([joined], counts, [file.rank for file in files], "")
        except InputError:
            pass
        else:
            if not graph.notices:
                yield graph
                return
    yield from map(build_graph, files)


def build_graph(file: RankFile) -> Graph:
    """Returns the graph of one file.

    Raises:
        InputError: `chakra-damaged`; `chakra-circle`: nodes wait for each other; `chakra-times`:
            longer than 36 years.
    """
    return replace(_decode_graph(file.blocks, None, [file.rank], file.where), name=file.where)


def _decode_graph(
    blocks: Iterable[Block], counts: Sequence[int] | None, ranks: Sequence[int], location: str
) -> Graph:
    """Returns the graph of files with `counts` nodes each; of a single file if None."""
    rank = ranks[0]  # only a single file gets notices
    frames = [pl.DataFrame(schema=_COLUMNS)]
    # Pairs of row and id; `added` are those of the data dependencies that only a target needed.
    pairs: dict[str, list[pl.DataFrame]] = {"call": [], "data": [], "added": []}
    count = 0
    try:
        for columns in Decoder(ATTRIBUTES, location).columns(blocks):
            base_columns = {
                name: getattr(columns, name) for name in ("id", "type", "start_us", "duration_us")
            }
            frame = pl.DataFrame({**base_columns, "name": columns.names}).with_columns(
                *(columns.numbers(name) for name in _NUMBERS),
                columns.strings("pg_name"),
                collect_others(columns, ATTRIBUTES, ours=False),
            )
            frames.append(frame.select(_COLUMNS.names()).cast(_COLUMNS))
            for kind, lists in (
                ("call", columns.control),
                ("data", columns.data),
                ("added", columns.lists(ADDED, "uint64_list")),
            ):
                rows = np.repeat(lists.row, lists.count) + count
                pairs[kind].append(pl.DataFrame({"target": rows, "id": lists.values}))
            count += len(columns)
    except DamageError as error:
        raise InputError(
            "an attribute of a node breaks the encoding", slug="chakra-damaged", where=location
        ) from error
    nodes = pl.concat(frames)
    is_valid = nodes["start_us"].is_between(0, _MAX_DURATION_US) & nodes["duration_us"].is_between(
        0, _MAX_DURATION_US
    )
    if not is_valid.all():
        raise InputError(
            f"{(~is_valid).sum()} nodes have times of over 36 years",
            slug="chakra-times",
            where=location,
        )
    latest_us = (nodes["start_us"].max() or 0) + nodes["duration_us"].cast(pl.Float64).sum()  # type: ignore[operator]
    if latest_us > 4 * _MAX_DURATION_US:
        raise InputError(
            "the times of the nodes add up to over 146 years", slug="chakra-times", where=location
        )
    notices: list[Notice] = []
    none = pl.DataFrame(schema={"target": pl.Int64, "id": pl.Int64})
    dependencies = {
        kind: pl.concat([none, *frames_of], rechunk=True) for kind, frames_of in pairs.items()
    }
    file = np.repeat(np.arange(len(ranks)), [nodes.height] if counts is None else counts)
    edges, simulated = _build_edges(
        nodes.select("id", pl.col("is_cpu_op") == 1, file=pl.Series(file)),
        dependencies,
        notices,
        rank,
        location,
    )
    try:
        start = _compute_starts(nodes, edges)
    except InvariantError:
        data = edges.filter(kind="data")
        try:
            start = _compute_starts(nodes, data)
        except InvariantError as error:
            raise InputError(
                "nodes wait for each other in a circle",
                slug="chakra-circle",
                where=location,
                hint=f"traceloom validate {location} says which",
            ) from error
        dropped = edges.height - data.height
        message = (
            f"{dropped:,} control dependencies go against the data dependencies, and are left out"
        )
        notices.append(Notice("chakra-control-circle", "warning", message, dropped, rank, location))
        edges = data
    # Dependencies that only a target needed become edges of kind `simulation`.
    edges = edges.join(simulated, on=["source", "target"], how="left", maintain_order="left")
    only = pl.col("only") & (pl.col("kind") == "data")
    edges = edges.with_columns(
        kind=pl.when(only).then(pl.lit("simulation")).otherwise("kind")
    ).drop("only")
    return replace(_assemble_graph(nodes, edges, start, file, ranks), notices=tuple(notices))


def _build_edges(
    ids: pl.DataFrame,
    dependencies: dict[str, pl.DataFrame],
    notices: list[Notice],
    rank: int,
    location: str,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Returns edges between rows of the nodes, and which of them only a target needed; dependencies
    on missing ids are counted in a notice.
    """
    rows_by_id = ids.with_columns(source=pl.int_range(pl.len(), dtype=pl.Int64))
    dependencies = {
        kind: frame.with_columns(ids["file"].gather(frame["target"]))
        for kind, frame in dependencies.items()
    }
    if twice := ids.height - ids.n_unique(["file", "id"]):
        message = f"{twice:,} nodes have the id of an earlier node; what depends on it waits for the earlier one"
        notices.append(Notice("chakra-duplicate-ids", "error", message, twice, rank, location))
        rows_by_id = rows_by_id.unique(["file", "id"], keep="first", maintain_order=True)
    edges = pl.concat(
        [
            dependencies[kind]
            .join(rows_by_id, on=["file", "id"], how="left", maintain_order="left")
            .select(
                "source",
                "target",
                kind=pl.lit(kind),
                from_end=pl.lit(kind == "data") | ~pl.col("is_cpu_op").fill_null(value=False),
            )
            for kind in ("call", "data")
        ]
    )
    if dangling := edges["source"].null_count():
        message = (
            f"{dangling:,} dependencies name nodes that the file does not have, and are left out"
        )
        notices.append(Notice("chakra-dangling", "warning", message, dangling, rank, location))
    added = (
        dependencies["added"]
        .join(rows_by_id, on=["file", "id"])
        .select("source", "target", only=True)
        .unique()
    )
    return edges.drop_nulls().filter(pl.col("source") != pl.col("target")).unique(
        maintain_order=True
    ), added


def _compute_starts(nodes: pl.DataFrame, edges: pl.DataFrame) -> Ints:
    source, target = edges["source"].to_numpy(), edges["target"].to_numpy()
    from_point = source * 2 + edges["from_end"].to_numpy()
    order = sort_topologically(nodes.height, from_point, target * 2)
    followers = target[np.argsort(from_point, kind="stable")].tolist()
    counts = np.bincount(from_point, minlength=2 * nodes.height)
    first: Any = np.concatenate([[0], np.cumsum(counts)]).tolist()
    duration: Any = (nodes["duration_us"].to_numpy() * 1000).tolist()
    start: Any = (nodes["start_us"].to_numpy() * 1000).tolist()
    for point in order.tolist():
        node, is_end = point >> 1, point & 1
        time = start[node] + (duration[node] if is_end else 0)
        for follower in followers[first[point] : first[point + 1]]:
            start[follower] = max(start[follower], time)
    return np.array(start, np.int64)


def _assemble_graph(
    decoded: pl.DataFrame, edges: pl.DataFrame, start: Ints, file: Ints, ranks: Sequence[int]
) -> Graph:
    """Builds the frames of the graph.

    An origin is inserted before the first row of each file, so all rows of the k-th file shift by k
    + 1.
    """
    rank = pl.Series(np.asarray(ranks)[file])
    on_host = (decoded["is_cpu_op"] == 1).fill_null(value=False)
    nodes = decoded.select(
        "name",
        kind=pl.col("type").replace_strict(
            _KINDS,
            default=pl.when(pl.lit(on_host)).then(pl.lit(HOST)).otherwise(pl.lit(KERNEL)),
            return_dtype=pl.String,
        ),
        rank=rank,
        start_ns=pl.lit(pl.Series(start)),
        duration_ns=pl.col("duration_us") * 1000,
        work_ns=pl.col("duration_us") * 1000,
        bytes=pl.coalesce(
            pl.when(pl.col("type").is_in([5, 6, 7])).then("comm_size"), "tensor_size"
        ),
    ).with_columns(residual_ns=pl.lit(0))
    lane, lanes = _assign_lanes(nodes["kind"], decoded, rank)
    moved = np.arange(len(start)) + file + 1
    count = np.bincount(file, minlength=len(ranks))
    origin_row = np.cumsum(count) - count + np.arange(len(ranks))
    origins = pl.DataFrame({"node": origin_row, "rank": ranks}).with_columns(
        *(pl.lit(0).alias(name) for name in ("start_ns", "duration_ns", "work_ns", "residual_ns")),
        name=pl.lit(""),
        kind=pl.lit(ORIGIN),
    )
    nodes = pl.concat(
        [origins, nodes.with_columns(lane=lane, node=pl.Series(moved))], how="diagonal_relaxed"
    )
    nodes = nodes.sort("node")
    rank_ends = nodes.group_by("rank").agg(
        (pl.col("start_ns") + pl.col("duration_ns")).max().alias("window_end_ns")
    )
    windows = origins.select(
        "rank", window_start_ns="start_ns", clock_offset_ns="start_ns", clock_drift=pl.lit(0.0)
    )
    windows = windows.join(rank_ends, on="rank", how="left", maintain_order="left")
    # Nodes without edges wait for the origin, until their start in the file.
    has_no_edge = np.ones(len(start), np.bool_)
    has_no_edge[edges["target"].to_numpy()] = False
    edges = edges.with_columns(
        pl.Series("source", moved[edges["source"].to_numpy()]),
        pl.Series("target", moved[edges["target"].to_numpy()]),
        residual_ns=pl.lit(0),
    )
    first = pl.DataFrame(
        {"source": origin_row[file[has_no_edge]], "target": moved[has_no_edge]}
    ).with_columns(
        kind=pl.lit("origin"),
        from_end=pl.lit(value=True),
        residual_ns=pl.Series(start[has_no_edge]),
    )
    edges = pl.concat([edges, first.select(edges.columns)], how="vertical_relaxed").with_columns(
        evidence=pl.lit("assumed"),
        delay_ns=pl.lit(0),
        to_end=pl.lit(value=False),
    )
    schema = GRAPH_SCHEMAS["edges"]
    missing = [name for name in GRAPH_SCHEMAS["nodes"] if name not in nodes.columns]
    nodes = nodes.with_columns(pl.lit(None).alias(name) for name in missing)
    part = nodes["kind"].cast(pl.String).gather(moved)
    frame = decoded.with_columns(node=pl.Series(moved), part=part).filter(
        part.is_in(list(COMMUNICATION))
    )
    sends, receives = pl.col("part") == SEND, pl.col("part") == RECEIVE
    rows = frame.select(
        "node",
        instance=pl.lit(None),
        kind=pl.when(sends | receives)
        .then("part")
        .otherwise(
            pl.col("comm_type").replace_strict(_COLLECTIVES, default=None, return_dtype=pl.String)
        ),
        group=pl.coalesce("pg_name", pl.col("comm_group").cast(pl.String)),
        group_size=pl.lit(None),
        ranks=pl.lit(None),
        sequence=pl.lit(None),
        element_type=pl.lit(None),
        in_bytes=pl.when(~receives).then("comm_size"),
        out_bytes=pl.when(receives).then("comm_size"),
        peer=pl.when(sends).then("comm_dst").when(receives).then("comm_src"),
        tag=pl.when(sends | receives).then("comm_tag"),
        in_splits=pl.lit(None),
        out_splits=pl.lit(None),
    )
    communication = rows.cast(
        GRAPH_SCHEMAS["communication"], strict=False
    )  # a peer that is not a rank is unknown
    foreign = decoded.select(
        pl.Series("node", moved), pl.col("id").reinterpret(signed=False), "type", "attributes"
    )
    return Graph(
        foreign=foreign.cast(GRAPH_SCHEMAS["foreign"]),
        nodes=nodes.select(GRAPH_SCHEMAS["nodes"].names()).cast(GRAPH_SCHEMAS["nodes"]),
        edges=edges.select(schema.names()).cast(schema).sort("target", maintain_order=True),
        lanes=lanes,
        communication=communication,
        ranks=windows.with_columns(
            pl.lit(None).alias(name)
            for name in GRAPH_SCHEMAS["ranks"]
            if name not in windows.columns
        )
        .select(GRAPH_SCHEMAS["ranks"].names())
        .cast(GRAPH_SCHEMAS["ranks"]),
    )


def _assign_lanes(
    kind: pl.Series, decoded: pl.DataFrame, rank: pl.Series
) -> tuple[pl.Series, pl.DataFrame]:
    """Assigns threads of the host and streams of the device to lanes; device work without a stream
    gets a lane each.
    """
    host = kind == HOST
    lane_keys = decoded.select(
        rank=rank,
        place=pl.when(host).then(pl.lit("host")).otherwise(pl.lit("device")),
        number=pl.when(host).then(pl.col("tid").fill_null(0)).otherwise("stream"),
        what=pl.when(host | decoded["stream"].is_not_null())
        .then(pl.lit(""))
        .when(kind.is_in(list(COMMUNICATION)))
        .then(pl.lit("communication"))
        .when(kind == COPY)
        .then(pl.lit("memory"))
        .otherwise(pl.lit("compute")),
    )
    keys = ["rank", "place", "number", "what"]
    lanes = (
        lane_keys.unique(keys)
        .sort(keys, descending=[False, True, False, False])
        .with_row_index("lane")
    )
    number = pl.col("number").cast(pl.String)
    at_host = pl.col("place") == "host"
    rows = lanes.select(
        "lane",
        "rank",
        kind="place",
        process=pl.lit(None),
        thread=pl.when(at_host).then(number),
        device=pl.lit(None),
        stream=pl.when(~at_host).then("number"),
        name=pl.when(at_host)
        .then("thread " + number)
        .otherwise(pl.coalesce("stream " + number, "what")),
    )
    lane = lane_keys.join(lanes, on=keys, how="left", nulls_equal=True, maintain_order="left")[
        "lane"
    ]
    return lane, rows.cast(GRAPH_SCHEMAS["lanes"])
