"""Converts nodes of Chakra files to frames and frames to nodes."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom import __version__
from traceloom.errors import InputError, UsageError
from traceloom.formats.chakra import encode
from traceloom.formats.chakra.decode import Decoder, NodeColumns, RaggedColumn
from traceloom.formats.chakra.et_pb2 import AttributeProto, GlobalMetadata
from traceloom.formats.chakra.files import (
    GROUP_FILES,
    RANK_FILES_PATTERN,
    Block,
    EtReader,
    EtWriter,
    GroupFile,
    IncompleteTail,
    find_group_file,
    format_groups,
    read_blocks,
    read_groups,
    write_with,
)
from traceloom.system import files
from traceloom.system.files import remember_input
from traceloom.trace.array_types import Ints
from traceloom.trace.notice import Notice

# Attributes that readers use, and the member of the value that they expect.
EXPECTED = {
    "is_cpu_op": "bool_val",
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "comm_priority": "int32_val",
    "comm_group": "int32_val",  # of old writers; `pg_name` today
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "pg_name": "string_val",
    "involved_dim": "bool_list",
}
# Number of a collective in its group, as recorded; our own attribute, which no reader expects.
SEQUENCE = "comm_seq"
ADDED = "simulation_deps"  # data dependencies that were only added for a target
NUMBERS = tuple(
    name for name, kind in EXPECTED.items() if kind.endswith("_val") and kind != "string_val"
)
KINDS = {
    field.number: field.name for field in AttributeProto.DESCRIPTOR.oneofs_by_name["value"].fields
}
_MAX_BATCH_BYTES = 1 << 20  # bytes of files that are decoded together
_EXPANSION = 16  # approximate, of gzip
_MEMBER_NUMBERS = {name: number for number, name in KINDS.items()}


@dataclass(frozen=True, slots=True)
class NodeDependencies:
    """The dependencies of all nodes of one kind, in the order of the nodes.

    Attributes:
        row: Row of the node that waits, ascending.
        id: Id of the node it waits for; uint64, as written: such a node need not exist.
    """

    row: Ints
    id: NDArray[np.uint64]


_Part = tuple[pl.DataFrame, pl.DataFrame, list[NodeDependencies]]


@dataclass(frozen=True)
class NodeFrame:
    """One `.et` file.

    Attributes:
        path: Where it was read from.
        nodes: `id` (UInt64), `name`, `type` (Int32, as written), `start_us`, `duration_us`
            (UInt64), and one column per attribute of `NUMBERS`, `comm_seq`, `pg_name`: its value,
            null where it is absent or not an integer; `involved_dim`: a list of flags, null where
            it is absent or empty.
        odd: Known attributes that are not of the expected kind, or repeated: `row`, `attribute`,
            `kind` (member of the value that holds it), `again` (whether the node has had it
            before).
        data: Data dependencies.
        control: Control dependencies.
        added: Those of the data dependencies that were only added for a target.
        metadata: The first message; empty where the file has none.
        notices: Damage of the file.
        packed: Whether the file is compressed with gzip, whatever its name.
    """

    path: str
    nodes: pl.DataFrame
    odd: pl.DataFrame
    data: NodeDependencies
    control: NodeDependencies
    added: NodeDependencies
    metadata: GlobalMetadata
    notices: tuple[Notice, ...] = ()
    packed: bool = False

    def __len__(self) -> int:
        return self.nodes.height


def read_tables(paths: Iterable[str | Path]) -> Iterator[NodeFrame]:
    """Yields the tables of many files, in their order; small files are decoded together, which
    reduces the cost to a third.

    Raises:
        InputError: As for `read_table`.
    """
    batch: list[str | Path] = []
    size = 0
    for path in paths:
        # Something other than a regular file, such as a pipe, can be read only once: damage in it
        # must not cause a second read.
        regular = Path(path).is_file()
        bytes_of = (
            Path(path).stat().st_size * (_EXPANSION if str(path).endswith(".gz") else 1)
            if regular
            else _MAX_BATCH_BYTES
        )
        if batch and size + bytes_of > _MAX_BATCH_BYTES:
            yield from _read_together(batch)
            batch, size = [], 0
        batch.append(path)
        size += bytes_of
    yield from _read_together(batch)


def _read_together(paths: list[str | Path]) -> list[NodeFrame]:
    """Decodes files that are small enough as one."""
    if len(paths) < 2:
        return [read_table(path) for path in paths]
    texts: list[bytes] = []
    starts: list[Ints] = []
    stops: list[Ints] = []
    counts: list[int] = []
    readers: list[EtReader] = []
    offset = 0
    try:
        for path in paths:
            with EtReader(path) as reader:
                blocks = list(reader.blocks())
            for block in blocks:
                texts.append(block.data)
                starts.append(np.array(block.starts, np.int64) + offset)
                stops.append(np.array(block.stops, np.int64) + offset)
                offset += len(block.data)
            counts.append(sum(map(len, blocks)))
            readers.append(reader)
        joined = Block(
            b"".join(texts), np.concatenate(starts).tolist(), np.concatenate(stops).tolist(), 0, 0
        )
        (columns,) = Decoder([*EXPECTED, SEQUENCE, ADDED], "").columns([joined])
    except InputError:  # a file is damaged or no Chakra trace: read separately to find which
        return [read_table(path) for path in paths]
    nodes, unexpected, dependencies = _build_part(columns, 0)
    row_ends = np.cumsum(counts).tolist()
    tables = []
    for reader, first, end in zip(readers, [0, *row_ends], row_ends, strict=False):
        parts = [(pairs, *np.searchsorted(pairs.row, [first, end])) for pairs in dependencies]
        data, control, added = (
            NodeDependencies(pairs.row[low:high] - first, pairs.id[low:high])
            for pairs, low, high in parts
        )
        file_unexpected = unexpected
        if unexpected.height:  # a query costs more than a small file
            file_unexpected = unexpected.filter(
                pl.col("row").is_between(first, end - 1)
            ).with_columns(pl.col("row") - first)
        tables.append(
            NodeFrame(
                str(reader.path),
                nodes.slice(first, end - first),
                file_unexpected,
                data,
                control,
                added,
                metadata=reader.metadata,
                notices=tuple(reader.notices),
                packed=reader.packed,
            )
        )
    return tables


def read_table(path: str | Path) -> NodeFrame:
    """Reads a `.et` or `.et.gz` file up to its first damage.

    Raises:
        InputError: Even its beginning is not a Chakra trace, or it cannot be read.
    """
    with EtReader(path) as reader:
        decoder = Decoder([*EXPECTED, SEQUENCE, ADDED], str(path))
        parts: list[_Part] = []
        row = 0
        damage: list[Notice] = []
        blocks, block = reader.blocks(), None
        try:
            while (block := next(blocks, None)) is not None:
                parts.append(_build_part(next(decoder.columns([block])), row))
                row += parts[-1][0].height
        except InputError as error:
            count = 0
            with suppress(InputError):  # reports where the damage is; the nodes before it are read
                for _ in reader.decoded(block) if block is not None else ():
                    count += 1
            if block is not None and count:
                intact = Block(
                    block.data, block.starts[:count], block.stops[:count], block.at, block.first
                )
                parts.append(_build_part(next(decoder.columns([intact])), row))
            message = f"{error.message}; what comes before it is read, what comes after it is not"
            damage.append(Notice(error.slug, "error", message, where=str(reader.path)))
        return _join_parts(
            str(path), parts, reader.metadata, (*reader.notices, *damage), packed=reader.packed
        )


def _join_parts(
    path: str,
    parts: list[_Part],
    metadata: GlobalMetadata,
    notices: tuple[Notice, ...] = (),
    *,
    packed: bool = False,
) -> NodeFrame:
    data, control, added = (
        NodeDependencies(
            np.concatenate([np.zeros(0, np.int64), *(pairs.row for pairs in pair_lists)]),
            np.concatenate([np.zeros(0, np.uint64), *(pairs.id for pairs in pair_lists)]),
        )
        for pair_lists in ([part[2][kind] for part in parts] for kind in range(3))
    )
    nodes = pl.concat([_NO_NODES, *(part[0] for part in parts)], rechunk=True)
    odd = pl.concat([_NO_UNEXPECTED, *(part[1] for part in parts)])
    return NodeFrame(path, nodes, odd, data, control, added, metadata, notices, packed)


def _build_part(columns: NodeColumns, first: int) -> _Part:
    """Builds the nodes of a block whose first one has the row `first`: nodes, odd attributes,
    dependencies.
    """
    nodes = pl.DataFrame(
        {
            "id": columns.id.view(np.uint64),
            "name": columns.names,
            "type": columns.type.astype(np.int32),
            "start_us": columns.start_us.view(np.uint64),
            "duration_us": columns.duration_us.view(np.uint64),
            **{name: columns.numbers(name) for name in (*NUMBERS, SEQUENCE)},
            "pg_name": columns.strings("pg_name"),
            "involved_dim": _build_flag_lists(
                columns.lists("involved_dim", EXPECTED["involved_dim"]), len(columns)
            ),
        },
        schema_overrides={"name": pl.String},
    ).with_columns(pl.col("is_cpu_op").cast(pl.Boolean))
    unexpected = [_NO_UNEXPECTED]
    for name, attribute in columns.attributes.items():
        if name in EXPECTED:  # where it is not of the expected kind, or is repeated
            repeated = np.zeros(len(attribute.row), np.bool_)
            repeated[1:] = attribute.row[1:] == attribute.row[:-1]
            indices = np.flatnonzero(
                (attribute.member != _MEMBER_NUMBERS[EXPECTED[name]]) | repeated
            )
            kinds = [KINDS.get(number, "no value") for number in attribute.member[indices].tolist()]
            rows = {
                "row": attribute.row[indices] + first,
                "attribute": [name] * len(indices),
                "kind": kinds,
                "again": repeated[indices],
            }
            unexpected.append(pl.DataFrame(rows).cast(_NO_UNEXPECTED.schema))
    dependencies = [
        NodeDependencies(np.repeat(lists.row, lists.count) + first, lists.values.view(np.uint64))
        for lists in (columns.data, columns.control, columns.lists(ADDED, "uint64_list"))
    ]
    return nodes, pl.concat(unexpected), dependencies


def _build_flag_lists(lists: RaggedColumn, count: int) -> pl.Series:
    """Returns one list of flags per node; null where there is none."""
    if not len(lists.values):
        return pl.Series([None], dtype=pl.List(pl.Boolean)).new_from_index(0, count)
    flag_rows = pl.DataFrame({"row": np.repeat(lists.row, lists.count), "flags": lists.values != 0})
    rows = pl.DataFrame({"row": np.arange(count)})
    return rows.join(
        flag_rows.group_by("row").agg("flags"), on="row", how="left", maintain_order="left"
    )["flags"]


_NO_NODES = pl.DataFrame(
    schema={
        "id": pl.UInt64,
        "name": pl.String,
        "type": pl.Int32,
        "start_us": pl.UInt64,
        "duration_us": pl.UInt64,
        **{name: pl.Boolean if name == "is_cpu_op" else pl.Int64 for name in (*NUMBERS, SEQUENCE)},
        "pg_name": pl.String,
        "involved_dim": pl.List(pl.Boolean),
    }
)
_NO_UNEXPECTED = pl.DataFrame(
    schema={
        "row": pl.Int64,
        "attribute": pl.Enum(list(EXPECTED)),
        "kind": pl.String,
        "again": pl.Boolean,
    }
)

# Larger numbers are dates or job ids.
_RANK_FILE_NAME = re.compile(r"^(?P<prefix>.*?)\.(?P<rank>\d{1,7})\.et(?:\.gz)?$", re.IGNORECASE)
_ENDINGS = (".et", ".et.gz")


@dataclass(frozen=True)
class FileSet:
    """The files of a set by rank, None for a file without a number in its name.

    Attributes:
        name: Directory and prefix.
        files: (rank, path), ascending; a rank may be there twice.
        whole: Whether the whole set was given: a directory, not single files of it.
        groups: Its group file, if any.
    """

    name: str
    files: tuple[tuple[int | None, Path], ...]
    whole: bool
    groups: Path | None


@dataclass(frozen=True)
class Workload:
    """The content of a set."""

    place: FileSet
    ranks: tuple[int | None, ...]
    tables: tuple[NodeFrame, ...]
    groups: GroupFile

    @cached_property
    def nodes(self) -> pl.DataFrame:
        """Returns the nodes of all files, concatenated: `file` (its index in `tables`), `row` in
        it, and their columns.
        """
        return self._joined([table.nodes.with_row_index("row") for table in self.tables])

    @cached_property
    def odd(self) -> pl.DataFrame:
        """Returns the odd attributes of all files, with the column `file`."""
        return self._joined([table.odd for table in self.tables])

    def _joined(self, frames: list[pl.DataFrame]) -> pl.DataFrame:
        file = np.repeat(np.arange(len(frames)), [frame.height for frame in frames])
        return pl.concat(frames).select(
            pl.Series("file", file, dtype=pl.Int64),
            pl.all().exclude("row"),
            pl.col("row").cast(pl.Int64),
        )

    def location(self, file: int) -> tuple[str, int | None]:
        return self.tables[file].path, self.ranks[file]


def find_file_sets(inputs: Sequence[str | Path], groups: Path | None = None) -> list[FileSet]:
    """Returns the sets that files and directories belong to, ordered by name.

    Args:
        inputs: `.et` or `.et.gz` files, or directories of them.
        groups: The group file; where not given, the one beside the files.

    Raises:
        UsageError: `no-file`: a path does not exist.
        InputError: `no-traces`: a directory without `.et` files.
    """
    files_of_set: dict[tuple[Path, str], list[tuple[int | None, Path]]] = {}
    from_directory: dict[tuple[Path, str], bool] = {}
    for path in map(Path, inputs):
        if not path.exists():
            raise UsageError(f"there is no `{path}`", slug="no-file", hint="check the path")
        members = (
            sorted(p for p in path.iterdir() if p.name.lower().endswith(_ENDINGS))
            if path.is_dir()
            else [path]
        )
        if not members:
            hint = "of a recorded run: traceloom link RUN -o job.graph, traceloom convert job.graph DIR --target astra-sim"
            raise InputError(
                "the directory holds no .et files", slug="no-traces", where=str(path), hint=hint
            )
        for member in members:
            match = _RANK_FILE_NAME.match(member.name)
            key = (member.parent, match["prefix"] if match else member.name)
            entry = (int(match["rank"]) if match else None, member)
            if entry not in files_of_set.setdefault(key, []):
                files_of_set[key].append(entry)
            from_directory[key] = from_directory.get(key, False) or path.is_dir()
    return [
        FileSet(
            str(home / prefix),
            tuple(sorted(files, key=lambda f: (-1 if f[0] is None else f[0], f[1]))),
            from_directory[home, prefix] or len(files) > 1,
            groups or find_group_file(home),
        )
        for (home, prefix), files in sorted(files_of_set.items())
    ]


def read_workload(location: FileSet, step: Callable[[Path], None] | None = None) -> Workload:
    """Reads all files of a set into columns.

    Args:
        location: The set.
        step: Called before each file is read.

    Raises:
        InputError: A file is not a Chakra trace. The readable part of a damaged file is read, with
            a notice.
    """

    def noted() -> Iterator[Path]:
        for _, path in location.files:
            if step:
                step(path)
            remember_input(path)
            yield path

    tables = tuple(read_tables(noted()))
    ranks = tuple(rank for rank, _ in location.files)
    if location.groups:
        remember_input(location.groups)
    return Workload(
        location, ranks, tables, read_groups(location.groups) if location.groups else GroupFile()
    )


WINDOW = 1 << 16

SIMULATOR_SCHEMA = pl.Schema(
    {
        "id": pl.Int64,
        "name": pl.String,
        "type": pl.Int64,
        "duration_us": pl.Int64,
        "is_cpu_op": pl.Boolean,
        "comm_type": pl.Int64,
        "comm_size": pl.Int64,  # bytes; the meaning depends on the kind of the collective
        "pg_name": pl.String,  # null: all ranks
        "comm_src": pl.Int64,
        "comm_dst": pl.Int64,
        "comm_tag": pl.Int64,
        "num_ops": pl.Int64,  # floating-point operations
        "tensor_size": pl.Int64,  # bytes that the operation moves in memory
        "attributes": pl.Binary,  # others, as encoded
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


def build_empty_pairs() -> Pairs:
    return Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True)
class SimulatorNodes:
    """The nodes of one rank's file.

    Attributes:
        nodes: Columns of `PLAIN`; ids ascend.
        dependencies: All data dependencies.
        added: Those of them that were only added for the target.
    """

    nodes: pl.DataFrame
    dependencies: Pairs
    added: Pairs = field(default_factory=build_empty_pairs)

    def windows(self) -> Iterator[bytes]:
        """Yields messages with their lengths, about ten thousand at a time."""
        for start in range(0, self.nodes.height, WINDOW):
            nodes = self.nodes.slice(start, WINDOW)
            everywhere = np.ones(nodes.height, np.bool_)
            on_host = nodes["is_cpu_op"].fill_null(value=False).cast(pl.Int64).to_numpy()
            counts, ids = _slice_dependencies(self.dependencies, start, nodes.height)
            fields = [
                encode.encode_number_field(b"\x08", nodes["id"].to_numpy()),
                encode.encode_delimited(b"\x12", encode.encode_texts(nodes["name"])),
                encode.encode_number_field(b"\x18", nodes["type"].to_numpy()),
                encode.encode_packed_field(b"\x2a", counts, ids),
                encode.encode_number_field(b"\x38", nodes["duration_us"].to_numpy()),
                *encode.encode_number_attribute("is_cpu_op", "bool_val", on_host, everywhere),
            ]
            for name, member in _MEMBERS.items():
                present = nodes[name].is_not_null().to_numpy()
                fields += encode.encode_number_attribute(
                    name, member, nodes[name].fill_null(0).to_numpy(), present
                )
            fields += encode.encode_text_attribute("pg_name", nodes["pg_name"])
            fields.append(encode.encode_binary(nodes["attributes"]))
            counts, ids = _slice_dependencies(self.added, start, nodes.height)
            fields += encode.encode_number_list_attribute(
                ADDED, "uint64_list", counts, ids, counts > 0
            )
            yield encode.encode_messages(fields)

    def read_back(self, path: str) -> NodeFrame:
        decoder = Decoder([*EXPECTED, SEQUENCE, ADDED], path)
        columns = decoder.columns(read_blocks(self.windows(), IncompleteTail()))
        parts: list[_Part] = []
        for block in columns:
            parts.append(_build_part(block, sum(part[0].height for part in parts)))
        return _join_parts(path, parts, GlobalMetadata())


def _slice_dependencies(pairs: Pairs, start: int, count: int) -> tuple[Ints, Ints]:
    """Returns how many dependencies each of `count` rows from `start` has, and all of them."""
    first, last = np.searchsorted(pairs.row, [start, start + count])
    return np.bincount(pairs.row[first:last] - start, minlength=count).astype(np.int64), pairs.id[
        first:last
    ]


def build_metadata(schema: str, extra: Mapping[str, str | int]) -> GlobalMetadata:
    """Builds the first message of a file: our schema name and further entries by name."""
    message = GlobalMetadata(version="1.0.0")
    for name, value in {"schema": schema, "traceloom": __version__, **extra}.items():
        if isinstance(value, int):
            message.attr.add(name=name, int64_val=value)
        else:
            message.attr.add(name=name, string_val=value)
    return message


def write_simulator_nodes(
    directory: Path,
    ranks: Sequence[tuple[GlobalMetadata, SimulatorNodes]],
    groups: Mapping[str, Sequence[int]],
    *,
    force: bool = False,
) -> list[Path]:
    """Writes `workload.<rank>.et` for every rank, from 0, and the group file; all files or none.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """

    def produce(target_directory: Path) -> None:
        for rank, (metadata, nodes) in enumerate(ranks):

            def fill(
                writer: EtWriter, metadata: GlobalMetadata = metadata, nodes: SimulatorNodes = nodes
            ) -> None:
                writer.message(metadata)
                for window in nodes.windows():
                    writer.framed(window)

            write_with(target_directory / f"workload.{rank}.et", fill)
        text = format_groups(groups).encode()
        files.write(
            target_directory / GROUP_FILES[0], lambda handle: handle.write(text), force=False
        )

    return files.write_directory(directory, produce, RANK_FILES_PATTERN, force=force)
