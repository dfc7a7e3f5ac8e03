"""Conversion between all forms of Chakra files, and separation of the host or device side.

When one side is removed, a kept node that waited for a removed one waits for that one's
dependencies instead. Done naively this multiplies dependencies: a removed node with many
predecessors and many successors would connect each to each. Such a node is kept with zero duration,
and implied dependencies are omitted, so that the work is linear in nodes and dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import polars as pl

from traceloom.errors import InputError, UsageError
from traceloom.formats.chakra.decode import Decoder
from traceloom.formats.chakra.et_pb2 import GlobalMetadata, Node, NodeType
from traceloom.formats.chakra.files import (
    GROUP_FILES,
    MAX_GROUP_BYTES,
    Block,
    EtReader,
    EtWriter,
    find_group_file,
    read_groups,
)
from traceloom.formats.chakra.json import JsonReader, write_json, write_lines
from traceloom.graph import graph
from traceloom.graph.graph import Graph
from traceloom.system import files
from traceloom.system.gzip_stream import GzipStream, open_file, write_gzip
from traceloom.trace.notice import Notice
from traceloom.workload.chakra.check_files import Arcs, sort_topologically
from traceloom.workload.chakra.graph_layout import (
    CARRIED_NODES,
    COMMUNICATION_TYPES,
    EDGES,
    EDGES_OUT,
    SCHEMA,
)
from traceloom.workload.chakra.graph_read import (
    build_blocks,
    convert_from_messages,
    convert_to_messages,
    encode_groups,
    list_groups,
    read_graph,
    write_rank,
)
from traceloom.workload.chakra.graph_write import GraphWriter

Side = Literal["communication", "compute"]
_GRAPH_ATTRIBUTES = frozenset(
    {EDGES, EDGES_OUT, CARRIED_NODES}
)  # attributes that refer to removed nodes
_MAX_PASSED = 64  # length of a list that grows along a chain of removed nodes


@dataclass(frozen=True)
class DependencyShape:
    """Ids, types and dependencies of all nodes of a file, without the nodes themselves.

    Attributes:
        ids: Id of each node.
        types: Type of each node.
        control: Rows of each node's control dependencies.
        data: Rows of each node's data dependencies.
        dangling: Number of dependencies on missing nodes.
    """

    ids: list[int]
    types: list[int]
    control: list[list[int]]
    data: list[list[int]]
    dangling: int


def read_shape(blocks: Iterator[Block], location: str) -> DependencyShape:
    """Reads the shape of a file in one pass.

    Raises:
        InputError: `chakra-damaged`.
    """
    ids: list[int] = []
    types: list[int] = []
    dependencies: tuple[list[list[int]], list[list[int]]] = ([], [])
    for columns in Decoder(("is_cpu_op",), location).columns(blocks):
        ids.extend(columns.id.view(np.uint64).tolist())
        types.extend(columns.type.tolist())
        for lists, out in ((columns.control, dependencies[0]), (columns.data, dependencies[1])):
            per_node: list[list[int]] = [[] for _ in range(len(columns))]
            values = lists.values.view(np.uint64).tolist()
            for row, end, count in zip(
                lists.row.tolist(),
                np.cumsum(lists.count).tolist(),
                lists.count.tolist(),
                strict=True,
            ):
                per_node[row] = values[end - count : end]
            out.extend(per_node)
    row_of = {number: row for row, number in reversed(list(enumerate(ids)))}
    dangling = 0
    for lists_of in dependencies:
        for row, needed in enumerate(lists_of):
            existing = [row_of[number] for number in needed if number in row_of]
            dangling += len(needed) - len(existing)
            lists_of[row] = [other for other in existing if other != row]
    return DependencyShape(ids, types, *dependencies, dangling)


@dataclass(frozen=True)
class SeparatedSide:
    """The remaining nodes of a file.

    Attributes:
        kept: Whether each node is kept unchanged.
        joints: Nodes that are kept with zero duration, since many nodes wait through them for many.
        control: Ids of the control dependencies of each remaining node.
        data: Ids of the data dependencies of each remaining node.
        notices: What was left out.
    """

    kept: list[bool]
    joints: frozenset[int]
    control: dict[int, list[int]]
    data: dict[int, list[int]]
    notices: tuple[Notice, ...]


def separate_side(file: DependencyShape, side: Side, location: str) -> SeparatedSide:
    """Returns the nodes and dependencies that remain when only one side is kept.

    Raises:
        InputError: `chakra-circle`: nodes wait for each other.
    """
    communicates = {int(kind) for kind in COMMUNICATION_TYPES}
    keeps_communication = side == "communication"
    is_kept_row = [
        (kind in communicates) == keeps_communication and kind != NodeType.METADATA_NODE
        for kind in file.types
    ]
    stays = list(is_kept_row)
    notices: list[Notice] = []
    if file.dangling:
        message = f"{file.dangling:,} dependencies name nodes that the file does not have, and are left out"
        notices.append(Notice("chakra-dangling", "warning", message, file.dangling, where=location))
    control_waits = file.control
    try:
        _iterate_in_order(file.control, location)
    except InputError:
        dropped = sum(map(len, file.control))
        message = f"the {dropped:,} control dependencies lead in a circle, and are left out"
        notices.append(Notice("chakra-control-circle", "warning", message, dropped, where=location))
        control_waits = [[] for _ in file.ids]
    while True:
        (control, control_joints), (data, data_joints) = (
            _collapse_removed_nodes(waits, stays, location) for waits in (control_waits, file.data)
        )
        if not control_joints and not data_joints:
            break
        # Both kinds of dependencies pass through the same joints, so both are bridged again; two
        # rounds are nearly always enough.
        for joint in (*control_joints, *data_joints):
            stays[joint] = True
    joints = frozenset(
        row
        for row, (is_kept, is_there) in enumerate(zip(is_kept_row, stays, strict=True))
        if is_there > is_kept
    )

    def named(waits: dict[int, list[int]]) -> dict[int, list[int]]:
        return {
            row: sorted({file.ids[other] for other in data_joints})
            for row, data_joints in waits.items()
        }

    return SeparatedSide(is_kept_row, joints, named(control), named(data), tuple(notices))


def _collapse_removed_nodes(
    waits: Sequence[list[int]], stays: Sequence[bool], location: str
) -> tuple[dict[int, list[int]], list[int]]:
    """Returns the direct and indirect (through removed nodes) dependencies of each remaining node,
    and the removed nodes that must stay as joints.
    """
    followers = [0] * len(waits)
    for needed in waits:
        for other in needed:
            followers[other] += 1
    chains = _Chains()
    bridged: dict[int, list[int]] = {}
    passed: dict[int, list[int]] = {}  # removed node -> the dependencies of its successors
    joints: list[int] = []
    for row in _iterate_in_order(waits, location):
        needed = waits[row]
        direct = [other for other in needed if stays[other]]
        lists = [passed[other] for other in needed if not stays[other]]
        if len(lists) == 1 and not direct:
            through = lists[0]
        else:
            through = chains.latest(
                [*direct, *(other for passed_on in lists for other in passed_on)]
            )
        is_joint = len(through) > 1 and (followers[row] > 1 or len(through) > _MAX_PASSED)
        if stays[row]:
            bridged[row] = list(dict.fromkeys([*direct, *through]))
            chains.add(row, bridged[row])
        elif is_joint:
            joints.append(row)
            bridged[row], passed[row] = through, [row]
            chains.add(row, through)
        else:
            passed[row] = through
    return bridged, joints


class _Chains:
    """Nodes in chains, in which each waits for the previous one, so that a dependency on a node
    implies the chain before it.
    """

    def __init__(self) -> None:
        self._place: dict[int, tuple[int, int]] = {}
        self._last: list[int] = []

    def add(self, row: int, needed: Sequence[int]) -> None:
        """Adds a node with its dependencies: it extends the chain of one of them, or starts a new
        one.
        """
        for other in needed:
            chain, position = self._place[other]
            if self._last[chain] == other:
                self._last[chain] = row
                self._place[row] = chain, position + 1
                return
        self._place[row] = len(self._last), 0
        self._last.append(row)

    def latest(self, rows: Sequence[int]) -> list[int]:
        """Returns the last of these nodes in each chain, which imply the others."""
        if len(rows) < 2:
            return list(rows)
        best: dict[int, tuple[int, int]] = {}
        for row in rows:
            chain, position = self._place[row]
            if chain not in best or best[chain][0] < position:
                best[chain] = position, row
        return [row for _, row in best.values()]


def _iterate_in_order(waits: Sequence[list[int]], location: str) -> list[int]:
    target = np.repeat(np.arange(len(waits)), list(map(len, waits)))
    source = np.fromiter(chain.from_iterable(waits), np.int64, len(target))
    settled = sort_topologically(len(waits), Arcs(source, target), np.arange(len(waits)))
    if count := int(settled.stuck.sum()):
        raise InputError(
            f"{count:,} nodes wait for each other in a circle, or for such nodes",
            slug="chakra-circle",
            where=location,
            hint=f"traceloom validate {location} says which",
        )
    order: list[int] = settled.order.tolist()
    return order


def select_remaining(
    nodes: Iterator[Node], result: SeparatedSide, progress: Callable[[int], None] | None = None
) -> Iterator[Node]:
    for row, node in enumerate(nodes):
        if progress and not row % 4096:
            progress(row)
        if not result.kept[row] and row not in result.joints:
            continue
        for name, waits in (("ctrl_deps", result.control), ("data_deps", result.data)):
            node.ClearField(name)
            getattr(node, name).extend(waits.get(row, ()))
        stay = [attribute for attribute in node.attr if attribute.name not in _GRAPH_ATTRIBUTES]
        if len(stay) < len(node.attr):
            copies = Node(attr=stay)
            node.ClearField("attr")
            node.attr.extend(copies.attr)
        if not result.kept[row]:
            node.type = NodeType.COMP_NODE
            node.duration_micros = 0
        yield node


def build_side_metadata(metadata: GlobalMetadata, side: Side) -> GlobalMetadata:
    """Returns the metadata with the side as an attribute; a file of a graph is no longer marked as
    such.
    """
    out = GlobalMetadata()
    out.CopyFrom(metadata)
    del out.attr[:]
    out.attr.extend(a for a in metadata.attr if not (a.name == "schema" and a.string_val == SCHEMA))
    out.attr.add(name="only", string_val=side)
    return out


_RANK = re.compile(
    r"(?:^|\.)(\d{1,7})\.(?:et|jsonl?)(?:\.gz)?$", re.IGNORECASE
)  # larger numbers in a file's name are dates or job ids
Messages = tuple[GlobalMetadata, Iterator[Node]]
# The only files that a replaced directory may contain.
DIRECTORY_FILES = r"[^/]*\.et(\.gz)?|comm_groups?\.json"
StatusCallback = Callable[[str], None]
Form = Literal["et", "json", "jsonl"]
FORMS: dict[str, Form] = {".et": "et", ".json": "json", ".jsonl": "jsonl"}
_WRITERS: dict[Form, Callable[[BinaryIO, GlobalMetadata, Iterable[Node]], None]] = {
    "et": lambda handle, metadata, nodes: EtWriter(handle).messages(metadata, nodes),
    "json": write_json,
    "jsonl": write_lines,
}

_ENDINGS = (".et", ".et.gz")


@dataclass
class ConversionInput:
    """Something to convert; a context manager, which closes open files on errors.

    Attributes:
        path: The path that the user gave.
        groups: The file with the ranks of each group, for `.et` files; None for the one beside
            them.
        strict: Refuse truncated files.
        on_status: Called with a status message.
        notices: What was found wrong so far.
        nodes: Number of nodes written.
    """

    path: Path
    groups: Path | None = None
    strict: bool = False
    on_status: StatusCallback = lambda _: None
    notices: list[Notice] = field(default_factory=list)
    nodes: int = 0

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise UsageError(f"there is no `{self.path}`", slug="no-file", hint="check the path")
        self._graph: Graph | None = None
        self._outgoing: GraphWriter | None = None
        self._files: list[tuple[int, Path]] = []
        self._readers: list[EtReader | JsonReader] = []
        if self.path.is_dir():
            self._files = find_rank_files(self.path)
            for _, name in self._files:
                files.remember_input(name)
            self.groups = self.groups or find_group_file(self.path)
        elif self.path.name.endswith(graph.GRAPH_SUFFIX) or graph.is_graph(self.path):
            if self.groups is not None:
                raise UsageError(
                    "--groups is of .et files",
                    slug="wrong-usage",
                    hint="leave it out: a graph knows its groups",
                )
            self.on_status(f"reading {self.path}")
            self._graph = graph.load(self.path)
        else:
            number = _RANK.search(self.path.name)
            self._files = [(int(number[1]) if number else 0, self.path)]
            if detect_form(self.path) == "et":
                self.groups = self.groups or find_group_file(self.path.parent)
        if self.groups is not None:
            files.remember_input(self.groups)

    def __enter__(self) -> ConversionInput:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.__exit__(None, None, None)

    @property
    def ranks(self) -> list[int]:
        return (
            [rank for rank, _ in self._files]
            if self._graph is None
            else self._leaving(self._graph).ranks
        )

    def graph(self) -> Graph:
        """Returns all of it as a graph.

        Raises:
            InputError: As `traceloom.workload.chakra.graph_read.read_graph`.
        """
        if self._graph is not None:
            return self._graph
        ranks, paths = self.ranks, [path for _, path in self._files]
        self.on_status(f"reading {self.path}")
        if all(detect_form(path) in {"et", None} for path in paths):
            graph = read_graph(paths, ranks=ranks, strict=self.strict)
        else:
            graph = convert_from_messages(
                [self.messages(rank) for rank in ranks], ranks, str(self.path)
            )
        self.notices.extend(graph.notices)
        if self.groups is None or not graph.foreign.height:
            return graph
        group_file = read_groups(self.groups)
        if group_file.faults:
            raise InputError(group_file.faults[0], slug="not-a-group-file", where=str(self.groups))
        members = pl.col("group").replace_strict(
            group_file.members, default=None, return_dtype=pl.List(pl.Int32)
        )
        communication = graph.communication.with_columns(ranks=members).with_columns(
            group_size=pl.col("ranks").list.len().cast(pl.Int32)
        )
        return replace(graph, communication=communication)

    def messages(self, rank: int) -> Messages:
        if self._graph is not None:
            return convert_to_messages(self._leaving(self._graph), rank)
        path = dict(self._files)[rank]
        self.on_status(f"reading {path}")
        reader = open_messages(path, strict=self.strict)
        self._readers.append(reader)

        def nodes() -> Iterator[Node]:
            for number, node in enumerate(reader, 1):
                if not number % 65536:
                    self.on_status(f"{path}: {number:,} nodes")
                yield node
            reader.__exit__(None, None, None)
            self.notices.extend(reader.notices)

        return reader.metadata, nodes()

    def _leaving(self, graph: Graph) -> GraphWriter:
        if self._outgoing is None:
            self._outgoing = GraphWriter(graph)
        return self._outgoing

    def one_side(self, rank: int, side: Side) -> Messages:
        """Returns the messages of one rank, reduced to one side."""
        before = list(self.notices)
        metadata, nodes = self.messages(rank)
        location = str(self.path)
        blocks: Iterator[Block] = build_blocks(nodes)
        result = separate_side(read_shape(blocks, location), side, location)
        self.notices = [
            *before,
            *result.notices,
        ]  # the second pass finds errors of the file again
        metadata, nodes = self.messages(rank)
        return build_side_metadata(metadata, side), select_remaining(nodes, result)

    def group_file(self) -> bytes | None:
        """Returns the content of the group file next to the ranks' files; None if there is none."""
        if self._graph is not None:
            return encode_groups(self._graph) if list_groups(self._graph) else None
        if self.groups is None or not self.path.is_dir():
            return None
        return files.read_small(self.groups, MAX_GROUP_BYTES)

    def write_file(self, path: Path, side: Side | None, *, force: bool) -> int:
        """Write the only rank as one file; returns its size in bytes.

        Raises:
            UsageError: `several-ranks`.
            OutputError: `file-exists`, `cannot-write`.
            InputError: As the readers raise; no partial file is left.
        """
        if len(self.ranks) != 1:
            raise UsageError(
                f"one file holds one rank, and `{self.path}` has {len(self.ranks)}",
                slug="several-ranks",
                hint="give a directory, which gets one file per rank",
            )
        return self._write(self.ranks[0], path, side, force=force)

    def write_directory(self, path: Path, side: Side | None, *, force: bool) -> list[Path]:
        """Write `workload.<rank>.et` for all ranks, and the group file; returns the files."""

        def produce(directory: Path) -> None:
            for rank in self.ranks:
                self._write(rank, directory / f"workload.{rank}.et", side, force=False)
            if (members := self.group_file()) is not None:
                (directory / GROUP_FILES[0]).write_bytes(members)

        return files.write_directory(path, produce, DIRECTORY_FILES, force=force)

    def _write(self, rank: int, path: Path, side: Side | None, *, force: bool) -> int:
        self.on_status(f"writing rank {rank}")
        file_format: Form | None = detect_form(path)
        if (
            self._graph is not None and side is None and file_format == "et"
        ):  # the fast path, without an object per node
            before = self.nodes

            def tell(count: int) -> None:
                self.nodes = before + count
                self.on_status(f"writing rank {rank}: {count:,} nodes")

            return write_rank(self._leaving(self._graph), path, rank=rank, force=force, step=tell)
        metadata, nodes = self.messages(rank) if side is None else self.one_side(rank, side)

        def counted() -> Iterator[Node]:
            for node in nodes:
                self.nodes += 1
                yield node

        return write_messages(path, metadata, counted(), file_format=file_format, force=force)


def detect_form(path: Path) -> Form | None:
    """Returns the form that a file's name implies; None for another kind of file."""
    name = path.name.lower().removesuffix(".gz")
    return next(
        (file_format for ending, file_format in FORMS.items() if name.endswith(ending)), None
    )


def open_messages(path: str | Path, *, strict: bool = False) -> EtReader | JsonReader:
    """Returns a reader of Chakra messages: for `.et` by name, else by content.

    Raises:
        InputError: As the readers raise.
    """
    path = Path(path)
    file_format = detect_form(path)
    if file_format is None:
        with open_file(path) as handle:
            head = next(iter(GzipStream(handle)), b"")[:64]
        file_format = (
            "json" if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")) else "et"
        )
    return EtReader(path, strict=strict) if file_format == "et" else JsonReader(path, strict=strict)


def write_messages(
    path: str | Path,
    metadata: GlobalMetadata,
    nodes: Iterable[Node],
    *,
    file_format: Form | None = None,
    force: bool = False,
) -> int:
    """Write messages atomically in the form that the name implies; returns the size of the file in
    bytes.

    Args:
        path: The file; gzip where the name ends in `.gz`.
        metadata: The first message.
        nodes: The others, in order.
        file_format: The form, if the name does not imply one; default `.et`.
        force: Overwrite an existing file.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    path = Path(path)
    produce = _WRITERS[file_format or detect_form(path) or "et"]
    return write_gzip(path, lambda handle: produce(handle, metadata, nodes), force=force)


def is_chakra(path: Path) -> bool:
    """Returns whether it is an `.et` file or a directory of them, by name."""
    if path.is_dir():
        return any(member.name.lower().endswith(_ENDINGS) for member in path.iterdir())
    return path.name.lower().endswith(_ENDINGS)


def find_rank_files(directory: Path) -> list[tuple[int, Path]]:
    """Returns the files of the ranks in a directory (`PREFIX.RANK.et`, also as JSON or gzip), by
    rank.

    Raises:
        InputError: `no-traces`: there are none; `chakra-mixed`: a rank has several.
    """
    path_by_rank: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        number = _RANK.search(path.name)
        if number is None or not path.is_file():
            continue
        rank = int(number[1])
        if rank in path_by_rank:
            raise InputError(
                f"rank {rank} has several files, {path_by_rank[rank].name} and {path.name}",
                slug="chakra-mixed",
                where=str(directory),
                hint="name the files of one job",
            )
        path_by_rank[rank] = path
    if not path_by_rank:
        raise InputError(
            "the directory holds no files like PREFIX.RANK.et",
            slug="no-traces",
            where=str(directory),
            hint="name a file",
        )
    return sorted(path_by_rank.items())
