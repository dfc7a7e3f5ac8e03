"""Graph to Chakra execution traces and back.

A Graph that goes out comes back as it was, but for the order of its edges. `traceloom.chakra.graph_layout` says
what lies where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import polars as pl

from traceloom import files
from traceloom.chakra.framing import Cut, blocks
from traceloom.chakra.graph_out import Outgoing
from traceloom.chakra.schema import GlobalMetadata, Node
from traceloom.chakra.stream import EtWriter, write_with
from traceloom.errors import UsageError
from traceloom.model.graph import Graph

GROUPS_FILE = "comm_groups.json"

Step = Callable[[int], None]


def to_messages(graph: Graph, rank: int) -> tuple[GlobalMetadata, Iterator[Node]]:
    """The messages of the file of one rank; the nodes ascend by id, which is their row in the graph.

    Ids above the number of the graph's nodes are METADATA nodes: host ops that no node stands for.
    """
    outgoing = Outgoing(graph)
    return outgoing.metadata(rank), _decoded(outgoing.windows(rank))


def _decoded(windows: Iterator[tuple[int, bytes]]) -> Iterator[Node]:
    for block in blocks((data for _, data in windows), Cut()):
        for message in block.messages():
            yield Node.FromString(message)


def write_rank(
    graph: Graph, path: str | Path, *, rank: int | None = None, force: bool = False, step: Step | None = None
) -> int:
    """Write one rank as `.et`, or `.et.gz` where the name ends so; returns the size of the file in bytes.

    Args:
        graph: The graph.
        path: The file.
        rank: Which rank; None for the only one.
        force: Overwrite an existing file.
        step: Called with the number of nodes written so far.

    Raises:
        UsageError: `several-ranks`: a file holds one rank, the graph has more.
        OutputError: `file-exists`, `cannot-write`.
    """
    outgoing = Outgoing(graph)
    if rank is None:
        if len(outgoing.ranks) != 1:
            raise UsageError(
                f"an .et file holds one rank, the graph has {len(outgoing.ranks)}",
                slug="several-ranks",
                hint="give a directory, which gets one file per rank",
            )
        rank = outgoing.ranks[0]
    _write(outgoing, rank, Path(path), step, force=force)
    return Path(path).stat().st_size


def write_ranks(graph: Graph, directory: str | Path, *, force: bool = False, step: Step | None = None) -> list[Path]:
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
        done = 0

        def tell(nodes: int) -> None:
            if step:
                step(done + nodes)

        for rank in outgoing.ranks:
            done += _write(outgoing, rank, folder / f"workload.{rank}.et", tell)
        files.write(folder / GROUPS_FILE, lambda handle: _write_groups(graph, handle), force=False)

    return files.write_directory(
        Path(directory), produce, ("workload.*.et", "workload.*.et.gz", GROUPS_FILE), force=force
    )


def _write(outgoing: Outgoing, rank: int, path: Path, step: Step | None, *, force: bool = False) -> int:
    """Write the file of a rank; returns its number of nodes."""
    done = 0

    def produce(writer: EtWriter) -> None:
        nonlocal done
        writer.message(outgoing.metadata(rank))
        for count, window in outgoing.windows(rank):
            writer.framed(window)
            done += count
            if step:
                step(done)

    write_with(path, produce, force=force)
    return done


def groups(graph: Graph) -> dict[str, list[int]]:
    """The members of every group whose members are known, by the group's name."""
    known = graph.communication.filter(pl.col("group").is_not_null() & pl.col("ranks").is_not_null())
    first = known.unique("group", keep="first", maintain_order=True).sort("group")
    return dict(zip(first["group"].to_list(), first["ranks"].to_list(), strict=True))


def _write_groups(graph: Graph, handle: BinaryIO) -> None:
    handle.write(json.dumps(groups(graph), indent=1, ensure_ascii=False).encode())
