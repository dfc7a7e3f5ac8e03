"""Graph to Chakra execution traces and back.

A Graph that goes out comes back as it was, but for the order of its edges. `traceloom.chakra.graph_layout` says
what lies where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import polars as pl

from traceloom import files
from traceloom.chakra import graph_foreign, graph_in
from traceloom.chakra.framing import Block, Cut, blocks
from traceloom.chakra.graph_metadata import Header, is_ours
from traceloom.chakra.graph_out import WINDOW, Outgoing
from traceloom.chakra.group_file import FILES_OF_RANKS, GROUP_FILES
from traceloom.chakra.schema import GlobalMetadata, Node
from traceloom.chakra.stream import EtReader, EtWriter, write_with
from traceloom.errors import InputError, InvariantError, UsageError
from traceloom.model.graph import STAGES, Graph, Stage
from traceloom.plain_text import encoded

Step = Callable[[int], None]
_SHIFTED = {
    "nodes": {"node": "nodes", "lane": "lanes"},
    "edges": {"source": "nodes", "target": "nodes"},
    "lanes": {"lane": "lanes"},
    "communication": {"node": "nodes"},
    "transfers": {"node": "nodes"},
}


def to_messages(graph: Graph | Outgoing, rank: int) -> tuple[GlobalMetadata, Iterator[Node]]:
    """The messages of the file of one rank; the nodes ascend by id, which is their row in the graph.

    Ids above the number of the graph's nodes are METADATA nodes: host ops that no node stands for.

    Args:
        graph: The graph; as `Outgoing(graph)` where several ranks are asked for, so that what concerns all of them is
            worked out once.
        rank: Which rank.
    """
    outgoing = graph if isinstance(graph, Outgoing) else Outgoing(graph)
    windows = (data for _, data in outgoing.windows(rank))
    nodes = (Node.FromString(message) for block in blocks(windows, Cut()) for message in block.messages())
    return outgoing.metadata(rank), nodes


def write_rank(
    graph: Graph | Outgoing, path: str | Path, *, rank: int | None = None, force: bool = False, step: Step | None = None
) -> int:
    """Write one rank as `.et`, or `.et.gz` where the name ends so; returns the size of the file in bytes.

    Args:
        graph: The graph; as for `to_messages`.
        path: The file.
        rank: Which rank; None for the only one.
        force: Overwrite an existing file.
        step: Called with the number of nodes written so far.

    Raises:
        UsageError: `several-ranks`: a file holds one rank, the graph has more.
        OutputError: `file-exists`, `cannot-write`.
    """
    outgoing = graph if isinstance(graph, Outgoing) else Outgoing(graph)
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
    """Write all ranks as simulators expect them: `workload.<rank>.et`, and `comm_groups.json` with the groups' members.

    The directory appears when all of it is written. An existing directory is replaced with `force`, if it holds nothing
    but such files.

    Returns:
        The files.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    outgoing = Outgoing(graph)

    def produce(folder: Path) -> None:
        for rank in outgoing.ranks:
            write_rank(outgoing, folder / f"workload.{rank}.et", rank=rank)
        (folder / GROUP_FILES[0]).write_bytes(group_file(graph))

    return files.write_directory(Path(directory), produce, FILES_OF_RANKS, force=force)


def groups(graph: Graph) -> dict[str, list[int]]:
    """The members of every group whose members are known, by the group's name."""
    with_members = graph.communication.filter(pl.col("group").is_not_null() & pl.col("ranks").is_not_null())
    first = with_members.unique("group", keep="first", maintain_order=True).sort("group")
    return dict(zip(first["group"].to_list(), first["ranks"].to_list(), strict=True))


def group_file(graph: Graph) -> bytes:
    """The group file: `groups` as JSON."""
    return encoded(json.dumps(groups(graph), indent=1, ensure_ascii=False))


def from_messages(
    files_of_ranks: Sequence[tuple[GlobalMetadata, Iterable[Node]]], ranks: Sequence[int] | None = None, where: str = ""
) -> Graph:
    """The graph of the messages of one file per rank.

    Args:
        files_of_ranks: Metadata and nodes of each file.
        ranks: The rank of each, where the files are of other writers, which do not say it; None for 0, 1, 2, ...
        where: What the messages are called in errors.

    Raises:
        InputError: As for `read_graph`.
    """
    numbers = range(len(files_of_ranks)) if ranks is None else ranks
    sources = [
        _Source(metadata, blocks_of(nodes), rank, where)
        for (metadata, nodes), rank in zip(files_of_ranks, numbers, strict=True)
    ]
    return _graph(sources, where)


def read_graph(paths: Sequence[str | Path], *, ranks: Sequence[int] | None = None, strict: bool = False) -> Graph:
    """The graph of the `.et` files of one job, one file per rank.

    Files that a Graph was written to give it back. Those of other writers become nodes in nanoseconds with `assumed`
    edges; their ranks are not joined.

    Args:
        paths: The files.
        ranks: The rank of each, for files of other writers; None for 0, 1, 2, ...
        strict: Refuse files that are cut.

    Raises:
        InputError: As `EtReader`; `chakra-mixed`: files of several graphs; `chakra-circle`: nodes wait for each
            other; `chakra-times`: times that no clock has; `other-version`.
    """
    numbers = range(len(paths)) if ranks is None else ranks
    readers: list[EtReader] = []
    sources = []
    try:
        for path, rank in zip(paths, numbers, strict=True):
            readers.append(EtReader(path, strict=strict))
            sources.append(_Source(readers[-1].metadata, readers[-1].blocks(), rank, str(path)))
        graph = _graph(sources, str(paths[0]) if len(paths) == 1 else str(Path(paths[0]).parent))
    finally:
        for reader in readers:
            reader.__exit__(None, None, None)
    notices = [notice for reader in readers for notice in reader.notices]
    return replace(graph, notices=(*graph.notices, *notices)) if notices else graph


@dataclass(frozen=True, slots=True)
class _Source:
    """One file's messages."""

    metadata: GlobalMetadata
    blocks: Iterable[Block]
    rank: int
    where: str


def _graph(sources: Sequence[_Source], where: str) -> Graph:
    from_graph = [is_ours(source.metadata) for source in sources]
    if all(from_graph) and from_graph:
        parts = [graph_in.part(Header(s.metadata, s.where), s.blocks, s.where) for s in sources]
        try:
            graph = graph_in.together(parts, where)
            graph.check_columns()
        except (pl.exceptions.PolarsError, InvariantError, ValueError, LookupError, TypeError, OverflowError) as error:
            message = f"its nodes are not those of a graph: {str(error).splitlines()[0]}"
            raise InputError(message, slug="chakra-damaged", where=where) from error
        return graph
    if any(from_graph):
        raise InputError(
            "some of the files were written from a graph, others not",
            slug="chakra-mixed",
            where=where,
            hint="give the files of one job",
        )
    foreign = list(graph_foreign.graphs_of(graph_foreign.RankFile(s.blocks, s.rank, s.where) for s in sources))
    # Most writers state no stage, and convert what was recorded.
    stated = {attr.string_val for source in sources for attr in source.metadata.attr if attr.name == "stage"}
    stage: Stage = next((name for name in STAGES if stated == {name}), "profiled")
    return replace(concatenated(foreign, where), stage=stage)


def blocks_of(nodes: Iterable[Node]) -> Iterator[Block]:
    """Blocks of messages that are objects."""
    first = 0
    everything = iter(nodes)
    while window := [node.SerializeToString() for node in islice(everything, WINDOW)]:
        stops = list(accumulate(map(len, window)))
        yield Block(b"".join(window), [0, *stops[:-1]], stops, 0, first)
        first += len(window)


def concatenated(graphs: Sequence[Graph], name: str) -> Graph:
    """One graph with the rows of all; what belongs to the whole (epoch, stage, delays) is taken from the first.

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
            frames[frame].append(rows_of_it.with_columns(pl.col(column) + rows[of] for column, of in shifts.items()))
        rows = {of: count + getattr(graph, of).height for of, count in rows.items()}
    whole: dict[str, Any] = {frame: pl.concat(parts) for frame, parts in frames.items() if frame != "delays"}
    notices = tuple(notice for graph in graphs for notice in graph.notices)
    return replace(graphs[0], name=name, notices=notices, **whole)
