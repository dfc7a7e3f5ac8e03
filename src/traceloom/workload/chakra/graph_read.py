"""Reading graphs from `.et` files, and writing them.

A Graph that is written and read again is unchanged, except for the order of its edges.
`traceloom.workload.chakra.graph_layout` defines the layout.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom.errors import InputError, InvariantError, UsageError
from traceloom.formats.chakra.decode import Decoder, NodeColumns
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node
from traceloom.formats.chakra.files import (
    GROUP_FILES,
    RANK_FILES_PATTERN,
    Block,
    EtReader,
    EtWriter,
    IncompleteTail,
    read_blocks,
    write_with,
)
from traceloom.graph.graph import GRAPH_SCHEMAS, STAGES, Graph, Stage
from traceloom.system import files
from traceloom.system.text import encode_utf8
from traceloom.trace.array_types import Ints
from traceloom.trace.frames import build_schema
from traceloom.trace.notice import Notice
from traceloom.workload.chakra import graph_foreign, graph_layout as layout
from traceloom.workload.chakra.graph_layout import Header, is_ours
from traceloom.workload.chakra.graph_write import WINDOW, GraphWriter

_WIDE_EDGES = build_schema(
    "source target code delay_ns residual_ns", {"source": pl.Int64, "target": pl.Int64}
)
_HOST_OPS = build_schema("row", GRAPH_SCHEMAS["host_ops"])


@dataclass(frozen=True)
class GraphPart:
    """The content of one file, with the ids of the whole graph."""

    header: Header
    nodes: pl.DataFrame
    carried: pl.DataFrame
    edges: pl.DataFrame
    communication: pl.DataFrame
    transfers: pl.DataFrame
    foreign: pl.DataFrame
    host_ops: pl.DataFrame


def read_part(header: Header, blocks: Iterable[Block], location: str) -> GraphPart:
    """Decode one file.

    Raises:
        InputError: `chakra-damaged`.
    """
    collected: dict[str, list[pl.DataFrame]] = {
        name: [] for name in GraphPart.__annotations__ if name != "header"
    }
    try:
        for columns in Decoder(layout.ATTRIBUTES, location).columns(blocks):
            for name, frame in _decode_frames(columns, header).items():
                collected[name].append(frame)
        part_schemas = {
            "carried": GRAPH_SCHEMAS["nodes"],
            "edges": _WIDE_EDGES,
            "host_ops": _HOST_OPS,
        }
        empty = GRAPH_SCHEMAS | part_schemas
        return GraphPart(
            header,
            **{
                name: pl.concat([pl.DataFrame(schema=empty[name]), *frames])
                for name, frames in collected.items()
            },
        )
    except (
        pl.exceptions.PolarsError,
        ValueError,
        LookupError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise InputError(
            f"its nodes are not those of a graph: {str(error).splitlines()[0]}",
            slug="chakra-damaged",
            where=location,
        ) from error


def _decode_frames(columns: NodeColumns, header: Header) -> dict[str, pl.DataFrame]:
    """Returns the content of a block, by the fields of `GraphPart`."""
    nodes = (
        pl.DataFrame({"node": columns.id, "name": columns.names})
        .with_columns(
            _collect_attributes(columns, layout.NODE_NUMBERS, layout.NODE_TEXTS),
            rank=pl.lit(header.rank),
        )
        .with_columns(
            pl.col("work_ns").fill_null(pl.col("duration_ns")), pl.col("residual_ns").fill_null(0)
        )
        .select(GRAPH_SCHEMAS["nodes"].names())
        .cast(GRAPH_SCHEMAS["nodes"])
        .filter(pl.Series(columns.id < header.node_count))
    )
    if missing := next(
        (name for name in ("kind", "start_ns", "duration_ns") if nodes[name].null_count()), None
    ):
        raise ValueError(f"one has no `{missing}`")
    carried_texts = columns.strings(layout.CARRIED_NODES).drop_nulls().to_list()
    carried = [row for text in carried_texts for row in json.loads(text)]
    edges = []
    for name, own_end, other_end in (
        (layout.EDGES, "target", "source"),
        (layout.EDGES_OUT, "source", "target"),
    ):
        lists = columns.lists(name, "sint64_list")
        numbers = lists.values.reshape(-1, layout.PER_EDGE)
        values = {
            other_end: numbers[:, 0],
            "code": numbers[:, 1],
            "delay_ns": numbers[:, 2],
            "residual_ns": numbers[:, 3],
            own_end: np.repeat(columns.id[lists.row], lists.count // layout.PER_EDGE),
        }
        edges.append(pl.DataFrame(values, schema=_WIDE_EDGES))
    frames = {
        "nodes": nodes,
        "carried": pl.DataFrame(carried, schema=GRAPH_SCHEMAS["nodes"], orient="row"),
        "edges": pl.concat(edges),
    }
    for name, row_of, numbers_of, texts_of, lists_of in (
        (
            "communication",
            layout.COMMUNICATION_MARKER,
            layout.COMMUNICATION_NUMBERS,
            layout.COMMUNICATION_TEXTS,
            layout.COMMUNICATION_LISTS,
        ),
        ("transfers", layout.TRANSFER_MARKER, {}, layout.TRANSFER_TEXTS, {}),
    ):
        schema, present = GRAPH_SCHEMAS[name], columns.has(row_of)
        frames[name] = pl.DataFrame(schema=schema)
        if present.any():
            frame = pl.DataFrame({"node": columns.id}).with_columns(
                _collect_attributes(columns, numbers_of, texts_of)
            )
            for key, column in lists_of.items():
                lists = columns.lists(key, "int64_list")
                list_ends = np.cumsum(lists.count)
                values_by_row: list[list[int] | None] = [None] * len(columns)
                all_values = lists.values.tolist()
                for row, end, count in zip(
                    lists.row.tolist(), list_ends.tolist(), lists.count.tolist(), strict=True
                ):
                    values_by_row[row] = all_values[end - count : end]
                frame = frame.with_columns(
                    pl.Series(column, values_by_row, dtype=pl.List(pl.Int64))
                )
            frames[name] = frame.filter(pl.Series(present)).select(schema.names()).cast(schema)
    texts: dict[str, list[str | None]] = {}
    for names, tensors in (
        (layout.HOST_INPUTS, columns.inputs),
        (layout.HOST_OUTPUTS, columns.outputs),
    ):
        for name, number in zip(names, (1, 2, 3), strict=True):
            texts[name] = [None] * len(columns)
            for row, text in zip(tensors[number][0].tolist(), tensors[number][1], strict=True):
                texts[name][row] = text
    host_ops = pl.DataFrame(texts, schema=dict.fromkeys(texts, pl.String)).with_columns(
        _collect_attributes(columns, layout.HOST_NUMBERS, layout.HOST_TEXTS),
        rank=pl.lit(header.rank, pl.Int32),
    )
    host_ops = host_ops.with_columns(pl.coalesce("name", pl.Series(columns.names)).alias("name"))
    host_ops = host_ops.filter(pl.Series(columns.has(layout.HOST_OP_MARKER)))
    frames["foreign"] = (
        pl.DataFrame(
            {
                "node": columns.id,
                "id": columns.numbers(layout.FOREIGN_ID).cast(pl.Int64).reinterpret(signed=False),
                "type": columns.type,
                "attributes": layout.collect_others(columns, layout.ATTRIBUTES, ours=True),
            }
        )
        .drop_nulls("id")
        .cast(GRAPH_SCHEMAS["foreign"])
    )
    return frames | {"host_ops": host_ops.select(_HOST_OPS.names()).cast(_HOST_OPS)}


def _collect_attributes(
    columns: NodeColumns, numbers: dict[str, str], texts: dict[str, str]
) -> list[pl.Series]:
    """Returns integer and text columns, each from the attribute with its values."""
    return [columns.numbers(name).alias(column) for name, column in numbers.items()] + [
        columns.strings(name).alias(column) for name, column in texts.items()
    ]


def merge_parts(parts: Sequence[GraphPart], location: str) -> Graph:
    """Returns the graph of all files. If ranks are missing, rows are renumbered and references to
    missing rows are dropped.

    Raises:
        InputError: `chakra-mixed`: the files are of several graphs, or one occurs twice;
            `chakra-damaged`.
    """
    heads = [part.header for part in parts]
    first = heads[0]
    for head in heads[1:]:
        if (head.epoch_ns, head.node_count, head.name) != (
            first.epoch_ns,
            first.node_count,
            first.name,
        ):
            raise _make_mixed_error(
                f"ranks {first.rank} and {head.rank} are of different graphs", location
            )
    if len({head.rank for head in heads}) < len(heads):
        raise _make_mixed_error("a rank is there twice", location)
    carried = pl.concat([part.carried for part in parts] + [head.loose_nodes for head in heads])
    nodes = pl.concat([*(part.nodes for part in parts), carried.unique("node", keep="first")]).sort(
        "node"
    )
    if nodes["node"].is_duplicated().any():
        raise _make_mixed_error("a node is there twice", location)
    lanes = pl.concat([head.frames["lanes"] for head in heads]).sort("lane")
    nodes = nodes.with_columns(lane=_map_to_rows(nodes["lane"], lanes["lane"]))
    ids = nodes["node"]
    schema = GRAPH_SCHEMAS["edges"]
    decoded_edges = []
    for part in parts:  # the code of an edge: kind, evidence and ends, numbered as in the header
        code = part.edges["code"]
        frame = part.edges.with_columns(
            kind=pl.Series(part.header.edge_kinds).gather(code // 16),
            evidence=pl.Series(part.header.evidence_kinds).gather(code // 4 % 4),
            from_end=code // 2 % 2 == 1,
            to_end=code % 2 == 1,
        )
        numbers = ("source", "target")  # they are cast when they are renumbered
        decoded_edges.append(
            frame.select(schema.names()).cast(
                {n: kind for n, kind in schema.items() if n not in numbers}
            )
        )
    loose = [head.loose_edges.cast({"source": pl.Int64, "target": pl.Int64}) for head in heads]
    edges = pl.concat([*decoded_edges, *loose])
    edges = edges.with_columns(
        source=_map_to_rows(edges["source"], ids), target=_map_to_rows(edges["target"], ids)
    )
    complete = edges.drop_nulls(["source", "target"])
    notices = first.notices
    if lost := edges.height - complete.height:
        message = (
            f"{lost:,} edges lead to or from ranks that are not among the files, and are left out"
        )
        notices = (*notices, Notice("chakra-missing-ranks", "warning", message, lost))
    node_frames = {
        name: pl.concat([getattr(part, name) for part in parts])
        for name in ("communication", "transfers", "foreign")
    }
    rank_frames = {
        name: pl.concat([head.frames[name] for head in heads]) for name in ("ranks", "coverage")
    }
    return Graph(
        nodes=nodes.with_columns(node=pl.int_range(pl.len())).cast(GRAPH_SCHEMAS["nodes"]),
        edges=complete.select(schema.names()).cast(schema).sort("target", maintain_order=True),
        lanes=lanes.drop("row")
        .with_columns(lane=pl.int_range(pl.len()))
        .cast(GRAPH_SCHEMAS["lanes"]),
        **{
            name: frame.with_columns(node=_map_to_rows(frame["node"], ids).cast(pl.UInt32)).sort(
                "node"
            )
            for name, frame in node_frames.items()
        },
        **{
            name: frame.unique("row", keep="first").sort("row").drop("row")
            for name, frame in rank_frames.items()
        },
        host_ops=pl.concat([part.host_ops for part in parts]).sort("row").drop("row"),
        delays=first.frames["delays"],
        name=first.name,
        epoch_ns=first.epoch_ns,
        world_size=first.world_size,
        stage=first.stage,
        notices=notices,
    )


def _map_to_rows(values: pl.Series, ids: pl.Series) -> pl.Series:
    """Returns the row of each value in `ids` (ascending); null if it is not among them."""
    if ids.null_count():
        raise ValueError(f"a row has no {ids.name}")
    id_array = ids.to_numpy().astype(np.int64)
    queries = values.cast(pl.Int64).fill_null(-1).to_numpy()
    positions: Ints = np.searchsorted(id_array, queries)
    matches = (
        (positions < len(id_array))
        & (id_array[np.minimum(positions, len(id_array) - 1)] == queries)
        if len(id_array)
        else positions < 0
    )
    return pl.Series(values.name, positions).set(pl.Series(~matches), None)


def _make_mixed_error(reason: str, location: str) -> InputError:
    return InputError(
        f"these files are not one graph: {reason}",
        slug="chakra-mixed",
        where=location,
        hint="give the files of one graph",
    )


Step = Callable[[int], None]
_SHIFTED = {
    "nodes": {"node": "nodes", "lane": "lanes"},
    "edges": {"source": "nodes", "target": "nodes"},
    "lanes": {"lane": "lanes"},
    "communication": {"node": "nodes"},
    "transfers": {"node": "nodes"},
    "foreign": {"node": "nodes"},
}


def convert_to_messages(
    graph: Graph | GraphWriter, rank: int
) -> tuple[GlobalMetadata, Iterator[Node]]:
    """Returns the messages of the file of one rank; the nodes ascend by id, which is their row in
    the graph.

    Ids above the number of the graph's nodes are METADATA nodes: host ops without a node.

    Args:
        graph: The graph; for several ranks a `GraphWriter`, so that shared data are computed only
            once.
        rank: The rank.
    """
    outgoing = graph if isinstance(graph, GraphWriter) else GraphWriter(graph)
    nodes = (
        Node.FromString(message)
        for block in read_blocks((data for _, data in outgoing.windows(rank)), IncompleteTail())
        for message in block.messages()
    )
    return outgoing.metadata(rank), nodes


def write_rank(
    graph: Graph | GraphWriter,
    path: str | Path,
    *,
    rank: int | None = None,
    force: bool = False,
    step: Step | None = None,
) -> int:
    """Write one rank as `.et` or `.et.gz`, by the path's suffix; returns the size of the file in
    bytes.

    Args:
        graph: The graph, or a `GraphWriter`.
        path: The file.
        rank: The rank; None for the only one.
        force: Overwrite an existing file.
        step: Called with the number of nodes written so far.

    Raises:
        UsageError: `several-ranks`: a file holds one rank, the graph has more.
        OutputError: `file-exists`, `cannot-write`.
    """
    outgoing = graph if isinstance(graph, GraphWriter) else GraphWriter(graph)
    if rank is None:
        if len(outgoing.ranks) != 1:
            raise UsageError(
                f"an .et file holds one rank, the graph has {len(outgoing.ranks)}",
                slug="several-ranks",
                hint="give a directory, which gets one file per rank",
            )
        rank = outgoing.ranks[0]
    metadata = outgoing.metadata(rank)
    done = 0

    def produce(writer: EtWriter) -> None:
        nonlocal done
        writer.message(metadata)
        for count, window in outgoing.windows(rank):
            writer.framed(window)
            done += count
            if step:
                step(done)

    return write_with(path, produce, force=force)


def write_ranks(graph: Graph, directory: str | Path, *, force: bool = False) -> list[Path]:
    """Write all ranks as simulators expect them: `workload.<rank>.et`, and `comm_groups.json` with
    the groups' members.

    The directory is created atomically. An existing directory is replaced with `force`, if it
    contains only such files.

    Returns:
        The files.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    outgoing = GraphWriter(graph)

    def produce(target_directory: Path) -> None:
        for rank in outgoing.ranks:
            write_rank(outgoing, target_directory / f"workload.{rank}.et", rank=rank)
        (target_directory / GROUP_FILES[0]).write_bytes(encode_groups(graph))

    return files.write_directory(Path(directory), produce, RANK_FILES_PATTERN, force=force)


def list_groups(graph: Graph) -> dict[str, list[int]]:
    """Returns the members of every group whose members are known, by the group's name."""
    first = (
        graph.communication.filter(pl.col("group").is_not_null() & pl.col("ranks").is_not_null())
        .unique("group", keep="first", maintain_order=True)
        .sort("group")
    )
    return dict(zip(first["group"].to_list(), first["ranks"].to_list(), strict=True))


def encode_groups(graph: Graph) -> bytes:
    """Returns the group file: `groups` as JSON."""
    return encode_utf8(json.dumps(list_groups(graph), indent=1, ensure_ascii=False))


def convert_from_messages(
    files_of_ranks: Sequence[tuple[GlobalMetadata, Iterable[Node]]],
    ranks: Sequence[int] | None = None,
    location: str = "",
) -> Graph:
    """Returns the graph of the messages of one file per rank.

    Args:
        files_of_ranks: Metadata and nodes of each file.
        ranks: The rank of each, for files of other writers, which do not state it; None for 0, 1,
            2, ...
        location: Name of the messages in errors.

    Raises:
        InputError: As `read_graph` raises.
    """
    numbers = range(len(files_of_ranks)) if ranks is None else ranks
    sources = [
        _Source(metadata, build_blocks(nodes), rank, location)
        for (metadata, nodes), rank in zip(files_of_ranks, numbers, strict=True)
    ]
    return _build_graph(sources, location)


def read_graph(
    paths: Sequence[str | Path], *, ranks: Sequence[int] | None = None, strict: bool = False
) -> Graph:
    """Returns the graph of the `.et` files of one job, one file per rank.

    Files that were written from a Graph restore it. Those of other writers become nodes in
    nanoseconds with `assumed` edges; their ranks are not joined.

    Args:
        paths: The files.
        ranks: The rank of each, for files of other writers; None for 0, 1, 2, ...
        strict: Refuse truncated files.

    Raises:
        InputError: As `EtReader` raises; `chakra-mixed`: files of several graphs; `chakra-circle`:
            nodes wait for each other; `chakra-times`: impossible times; `other-version`.
    """
    numbers = range(len(paths)) if ranks is None else ranks
    readers: list[EtReader] = []
    sources = []
    try:
        for path, rank in zip(paths, numbers, strict=True):
            readers.append(EtReader(path, strict=strict))
            sources.append(_Source(readers[-1].metadata, readers[-1].blocks(), rank, str(path)))
        graph = _build_graph(
            sources, str(paths[0]) if len(paths) == 1 else str(Path(paths[0]).parent)
        )
    finally:
        for reader in readers:
            reader.__exit__(None, None, None)
    notices = [notice for reader in readers for notice in reader.notices]
    return replace(graph, notices=(*graph.notices, *notices)) if notices else graph


@dataclass(frozen=True, slots=True)
class _Source:
    metadata: GlobalMetadata
    blocks: Iterable[Block]
    rank: int
    where: str


def _build_graph(sources: Sequence[_Source], location: str) -> Graph:
    from_graph = [is_ours(source.metadata) for source in sources]
    if all(from_graph) and from_graph:
        parts = [read_part(Header(s.metadata, s.where), s.blocks, s.where) for s in sources]
        try:
            graph = merge_parts(parts, location)
            graph.check_columns()
        except (
            pl.exceptions.PolarsError,
            InvariantError,
            ValueError,
            LookupError,
            TypeError,
            OverflowError,
        ) as error:
            raise InputError(
                f"its nodes are not those of a graph: {str(error).splitlines()[0]}",
                slug="chakra-damaged",
                where=location,
            ) from error
        return graph
    if any(from_graph):
        raise InputError(
            "some of the files were written from a graph, others not",
            slug="chakra-mixed",
            where=location,
            hint="give the files of one job",
        )
    foreign = list(
        graph_foreign.build_graphs(
            graph_foreign.RankFile(s.blocks, s.rank, s.where) for s in sources
        )
    )
    # Most writers state no stage; they convert recorded traces.
    stated = {
        attr.string_val
        for source in sources
        for attr in source.metadata.attr
        if attr.name == "stage"
    }
    stage: Stage = next((name for name in STAGES if stated == {name}), "profiled")
    return replace(concatenate_graphs(foreign, location), stage=stage)


def build_blocks(nodes: Iterable[Node]) -> Iterator[Block]:
    first = 0
    everything = iter(nodes)
    while window := [node.SerializeToString() for node in islice(everything, WINDOW)]:
        stops = list(accumulate(map(len, window)))
        yield Block(b"".join(window), [0, *stops[:-1]], stops, 0, first)
        first += len(window)


def concatenate_graphs(graphs: Sequence[Graph], name: str) -> Graph:
    """Returns one graph with the rows of all; properties of the whole (epoch, stage, delays) are
    taken from the first.

    Args:
        graphs: At least one; their ranks differ.
        name: The name of the new graph.
    """
    if len(graphs) == 1:
        return replace(graphs[0], name=name)
    frames: dict[str, list[pl.DataFrame]] = {frame: [] for frame in graphs[0].frames()}
    rows = {"nodes": 0, "lanes": 0}
    for graph in graphs:
        for frame, rows_of_it in graph.frames().items():
            shifts = _SHIFTED.get(frame, {})
            frames[frame].append(
                rows_of_it.with_columns(
                    pl.col(column) + rows[frame_name] for column, frame_name in shifts.items()
                )
            )
        rows = {
            frame_name: count + getattr(graph, frame_name).height
            for frame_name, count in rows.items()
        }
    merged: dict[str, Any] = {
        frame: pl.concat(parts) for frame, parts in frames.items() if frame != "delays"
    }
    return replace(
        graphs[0],
        name=name,
        notices=tuple(notice for graph in graphs for notice in graph.notices),
        **merged,
    )
