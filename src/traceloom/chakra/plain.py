"""Nodes as simulators read them, in columns, and the bytes of their file: generators and targets write these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom import __version__, files
from traceloom.array_types import Ints
from traceloom.chakra import wire
from traceloom.chakra.group_file import FILES_OF_RANKS, GROUP_FILES, group_text
from traceloom.chakra.node_table import ADDED
from traceloom.chakra.schema import GlobalMetadata
from traceloom.chakra.stream import EtWriter, write_with

WINDOW = 1 << 16

PLAIN = pl.Schema(
    {
        "id": pl.Int64,
        "name": pl.String,
        "type": pl.Int64,
        "duration_us": pl.Int64,
        "is_cpu_op": pl.Boolean,
        "comm_type": pl.Int64,
        "comm_size": pl.Int64,  # bytes, with the meaning that the kind of the collective gives it
        "pg_name": pl.String,  # null: all ranks
        "comm_src": pl.Int64,
        "comm_dst": pl.Int64,
        "comm_tag": pl.Int64,
        "num_ops": pl.Int64,  # floating-point operations
        "tensor_size": pl.Int64,  # bytes that the operation moves in memory
    }
)
_MEMBERS = {
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
}


@dataclass(frozen=True, slots=True)
class Pairs:
    """Dependencies: the node of row `row` (ascending) waits for the node with id `id`."""

    row: Ints
    id: Ints


def no_pairs() -> Pairs:
    """No dependencies."""
    return Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True)
class PlainNodes:
    """The file of one rank.

    Attributes:
        nodes: Columns of `PLAIN`; ids ascend.
        dependencies: All data dependencies.
        added: Those of them that were only added for the target.
    """

    nodes: pl.DataFrame
    dependencies: Pairs
    added: Pairs = field(default_factory=no_pairs)

    def windows(self) -> Iterator[bytes]:
        """Messages with their lengths, some ten thousand at a time."""
        for at in range(0, self.nodes.height, WINDOW):
            nodes = self.nodes.slice(at, WINDOW)
            everywhere = np.ones(nodes.height, np.bool_)
            on_host = nodes["is_cpu_op"].fill_null(value=False).cast(pl.Int64).to_numpy()
            counts, ids = _of(self.dependencies, at, nodes.height)
            fields = [
                wire.number_field(b"\x08", nodes["id"].to_numpy()),
                wire.delimited(b"\x12", wire.texts(nodes["name"])),
                wire.number_field(b"\x18", nodes["type"].to_numpy()),
                wire.packed_field(b"\x2a", counts, ids),
                wire.number_field(b"\x38", nodes["duration_us"].to_numpy()),
                *wire.number_attribute("is_cpu_op", "bool_val", on_host, everywhere),
            ]
            for name, member in _MEMBERS.items():
                present = nodes[name].is_not_null().to_numpy()
                fields += wire.number_attribute(name, member, nodes[name].fill_null(0).to_numpy(), present)
            fields += wire.text_attribute("pg_name", nodes["pg_name"])
            counts, ids = _of(self.added, at, nodes.height)
            fields += wire.number_list_attribute(ADDED, "uint64_list", counts, ids, counts > 0)
            yield wire.framed(fields)


def _of(pairs: Pairs, at: int, count: int) -> tuple[Ints, Ints]:
    """How many dependencies each of `count` rows from `at` has, and all of them."""
    first, last = np.searchsorted(pairs.row, [at, at + count])
    return np.bincount(pairs.row[first:last] - at, minlength=count).astype(np.int64), pairs.id[first:last]


def plain_metadata(schema: str, more: Mapping[str, str | int]) -> GlobalMetadata:
    """The first message of a file: which of our schemas it follows, and what else is to be said, by name."""
    message = GlobalMetadata(version="1.0.0")
    values: dict[str, Any] = {"schema": schema, "traceloom": __version__, **more}
    for name, value in values.items():
        if isinstance(value, int):
            message.attr.add(name=name, int64_val=value)
        else:
            message.attr.add(name=name, string_val=value)
    return message


def write_plain(
    directory: Path,
    ranks: Sequence[tuple[GlobalMetadata, PlainNodes]],
    groups: Mapping[str, Sequence[int]],
    *,
    force: bool = False,
) -> list[Path]:
    """Write `workload.<rank>.et` for every rank, from 0, and the group file; all of it, or nothing.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """

    def produce(folder: Path) -> None:
        for rank, (metadata, nodes) in enumerate(ranks):

            def fill(writer: EtWriter, metadata: GlobalMetadata = metadata, nodes: PlainNodes = nodes) -> None:
                writer.message(metadata)
                for window in nodes.windows():
                    writer.framed(window)

            write_with(folder / f"workload.{rank}.et", fill)
        text = group_text(groups).encode()
        files.write(folder / GROUP_FILES[0], lambda handle: handle.write(text), force=False)

    return files.write_directory(directory, produce, FILES_OF_RANKS, force=force)
