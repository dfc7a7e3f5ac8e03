"""What can be converted: Chakra files (`.et`, JSON, JSON lines, plain or gzip), directories of ranks, saved graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from traceloom import files
from traceloom.chakra.framing import Block
from traceloom.chakra.graph import blocks_of, from_messages, group_file, groups, read_graph, to_messages, write_rank
from traceloom.chakra.graph_out import Outgoing
from traceloom.chakra.group_file import GROUP_FILES, MOST_GROUP_BYTES
from traceloom.chakra.isolation import Side, isolate, metadata_of_side, remaining, shape
from traceloom.chakra.json_stream import JsonReader, write_json, write_lines
from traceloom.chakra.schema import GlobalMetadata, Node
from traceloom.chakra.stream import EtReader, EtWriter
from traceloom.errors import InputError, UsageError
from traceloom.model import graph_store
from traceloom.model.graph import Graph
from traceloom.model.notice import Notice
from traceloom.packed import UnpackedFile, open_file, write_packed

_RANK = re.compile(r"(?:^|\.)(\d{1,7})\.(?:et|jsonl?)(?:\.gz)?$", re.IGNORECASE)  # larger numbers are dates or job ids
Messages = tuple[GlobalMetadata, Iterator[Node]]
# What a directory may hold that is replaced.
DIRECTORY_FILES = r"[^/]*\.et(\.gz)?|comm_groups?\.json"
Say = Callable[[str], None]
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
    """Something to convert; a context, which closes what is still open behind an error.

    Attributes:
        path: What the user named.
        strict: Refuse files that are cut.
        say: Told what is being done.
        notices: What was found wrong on the way.
        nodes: How many nodes were written.
    """

    path: Path
    strict: bool = False
    say: Say = lambda _: None
    notices: list[Notice] = field(default_factory=list)
    nodes: int = 0

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise UsageError(f"there is no `{self.path}`", slug="no-file", hint="check the path")
        self._graph: Graph | None = None
        self._outgoing: Outgoing | None = None
        self._files: list[tuple[int, Path]] = []
        self._readers: list[EtReader | JsonReader] = []
        if self.path.is_dir():
            self._files = rank_files(self.path)
            for name in (*(path for _, path in self._files), *(self.path / name for name in GROUP_FILES)):
                files.note_input(name)
        elif self.path.name.endswith(graph_store.ENDING) or graph_store.is_graph(self.path):
            self.say(f"reading {self.path}")
            self._graph = graph_store.load(self.path)
        else:
            number = _RANK.search(self.path.name)
            self._files = [(int(number[1]) if number else 0, self.path)]

    def __enter__(self) -> ConversionInput:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.__exit__(None, None, None)

    @property
    def ranks(self) -> list[int]:
        """The ranks that there are."""
        return [rank for rank, _ in self._files] if self._graph is None else self._leaving(self._graph).ranks

    def graph(self) -> Graph:
        """All of it as a graph.

        Raises:
            InputError: As `traceloom.chakra.graph.read_graph`.
        """
        if self._graph is not None:
            return self._graph
        ranks, paths = self.ranks, [path for _, path in self._files]
        self.say(f"reading {self.path}")
        if all(form_of(path) in {"et", None} for path in paths):
            graph = read_graph(paths, ranks=ranks, strict=self.strict)
        else:
            graph = from_messages([self.messages(rank) for rank in ranks], ranks, str(self.path))
        self.notices.extend(graph.notices)
        return graph

    def messages(self, rank: int) -> Messages:
        """The messages of one rank."""
        if self._graph is not None:
            return to_messages(self._leaving(self._graph), rank)
        path = dict(self._files)[rank]
        self.say(f"reading {path}")
        reader = open_messages(path, strict=self.strict)
        self._readers.append(reader)

        def nodes() -> Iterator[Node]:
            for number, node in enumerate(reader, 1):
                if not number % 65536:
                    self.say(f"{path}: {number:,} nodes")
                yield node
            reader.__exit__(None, None, None)
            self.notices.extend(reader.notices)

        return reader.metadata, nodes()

    def _leaving(self, graph: Graph) -> Outgoing:
        if self._outgoing is None:
            self._outgoing = Outgoing(graph)
        return self._outgoing

    def one_side(self, rank: int, side: Side) -> Messages:
        """The messages of one rank that are left of it with only one side."""
        before = list(self.notices)
        metadata, nodes = self.messages(rank)
        where = str(self.path)
        blocks: Iterator[Block] = blocks_of(nodes)
        result = isolate(shape(blocks, where), side, where)
        self.notices = [*before, *result.notices]  # what is wrong with the file is found again by the second pass
        metadata, nodes = self.messages(rank)
        return metadata_of_side(metadata, side), remaining(nodes, result)

    def group_file(self) -> bytes | None:
        """The members of groups, as a file beside the ranks' files has them."""
        if self._graph is not None:
            return group_file(self._graph) if groups(self._graph) else None
        if not self.path.is_dir():
            return None
        group_path = next((self.path / name for name in GROUP_FILES if (self.path / name).is_file()), None)
        return files.read_small(group_path, MOST_GROUP_BYTES) if group_path else None

    def write_file(self, path: Path, side: Side | None, *, force: bool) -> int:
        """Write the only rank as one file; returns its size in bytes.

        Raises:
            UsageError: `several-ranks`.
            OutputError: `file-exists`, `cannot-write`.
            InputError: As the readers; nothing is left behind.
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

        def produce(folder: Path) -> None:
            for rank in self.ranks:
                self._write(rank, folder / f"workload.{rank}.et", side, force=False)
            if (members := self.group_file()) is not None:
                (folder / GROUP_FILES[0]).write_bytes(members)

        return files.write_directory(path, produce, DIRECTORY_FILES, force=force)

    def _write(self, rank: int, path: Path, side: Side | None, *, force: bool) -> int:
        self.say(f"writing rank {rank}")
        form: Form | None = form_of(path)
        if self._graph is not None and side is None and form == "et":  # the short way, without an object per node
            before = self.nodes

            def tell(count: int) -> None:
                self.nodes = before + count
                self.say(f"writing rank {rank}: {count:,} nodes")

            return write_rank(self._leaving(self._graph), path, rank=rank, force=force, step=tell)
        metadata, nodes = self.messages(rank) if side is None else self.one_side(rank, side)

        def counted() -> Iterator[Node]:
            for node in nodes:
                self.nodes += 1
                yield node

        return write_messages(path, metadata, counted(), form=form, force=force)


def form_of(path: Path) -> Form | None:
    """The form that a file's name tells; None for another kind of file."""
    name = path.name.lower().removesuffix(".gz")
    return next((form for ending, form in FORMS.items() if name.endswith(ending)), None)


def open_messages(path: str | Path, *, strict: bool = False) -> EtReader | JsonReader:
    """A reader of Chakra messages: of `.et` where the file is named so, else told by content.

    Raises:
        InputError: As the readers.
    """
    path = Path(path)
    form = form_of(path)
    if form is None:
        with open_file(path) as handle:
            head = next(iter(UnpackedFile(handle)), b"")[:64]
        form = "json" if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")) else "et"
    if form == "et":
        return EtReader(path, strict=strict)
    return JsonReader(path, strict=strict)


def write_messages(
    path: str | Path,
    metadata: GlobalMetadata,
    nodes: Iterable[Node],
    *,
    form: Form | None = None,
    force: bool = False,
) -> int:
    """Write messages in the form that the name tells, whole or not at all; returns the size of the file in bytes.

    Args:
        path: The file; gzip where the name ends in `.gz`.
        metadata: The first message.
        nodes: The others, in order.
        form: The form, where the name does not say; `.et` otherwise.
        force: Overwrite an existing file.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    path = Path(path)
    produce = _WRITERS[form or form_of(path) or "et"]
    return write_packed(path, lambda handle: produce(handle, metadata, nodes), force=force)


def is_chakra(path: Path) -> bool:
    """Whether it is an `.et` file or a directory of them, by name."""
    if path.is_dir():
        return any(member.name.lower().endswith(_ENDINGS) for member in path.iterdir())
    return path.name.lower().endswith(_ENDINGS)


def rank_files(directory: Path) -> list[tuple[int, Path]]:
    """The files of the ranks in a directory (`PREFIX.RANK.et`, also as JSON or gzip), by rank.

    Raises:
        InputError: `no-traces`: there is none; `chakra-mixed`: a rank has several.
    """
    by_rank: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        number = _RANK.search(path.name)
        if number is None or not path.is_file():
            continue
        rank = int(number[1])
        if rank in by_rank:
            raise InputError(
                f"rank {rank} has several files, {by_rank[rank].name} and {path.name}",
                slug="chakra-mixed",
                where=str(directory),
                hint="name the files of one job",
            )
        by_rank[rank] = path
    if not by_rank:
        raise InputError(
            "the directory holds no files like PREFIX.RANK.et",
            slug="no-traces",
            where=str(directory),
            hint="name a file",
        )
    return sorted(by_rank.items())
