"""`.et` and `.et.gz` files: a stream of messages, the first is the file's metadata, all others are nodes.

Neither reading nor writing holds more than a window of the file, however large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from google.protobuf.message import DecodeError

from traceloom.chakra.framing import Block, Cut, blocks, length_prefix
from traceloom.chakra.schema import GlobalMetadata, Node
from traceloom.errors import InputError
from traceloom.model.notice import Notice
from traceloom.packed import UnpackedFile, open_file, write_packed

_FIRST_FIELD_VARINT = b"\x08"  # how a node's message begins that has an id
_OTHER_KINDS = {
    b"{": "JSON",
    b"[": "JSON",
    b"PK\x03\x04": "a graph or another zip archive",
    b"\x7fELF": "a program",
    b"PAR1": "Parquet",
    b"%PDF": "PDF",
    b"\x89PNG": "an image",
}
_HINTS = {
    "JSON": "traceloom convert makes .et of Chakra nodes in JSON, traceloom link of traces of a profiler",
    "a graph or another zip archive": "traceloom convert makes .et of a graph, where its name ends in .graph",
}


class EtReader:
    """Reads one `.et` file once, from its beginning to its end; gzip is told by content.

    Example:
        with EtReader(path) as reader:
            for node in reader: ...

    Args:
        path: The file.
        strict: Raise where the file is cut, instead of ending there with a notice.

    Attributes:
        metadata: The first message; empty where the file begins with a node.
        packed: Whether the file is gzip.
        notices: What is wrong with the file, complete after the last node.

    Raises:
        InputError: `unreadable`; `empty-file`; `not-chakra`: another kind of file; `chakra-damaged`: a message claims
            more bytes than there can be, or holds something else; `chakra-cut`: not even the metadata is whole, or
            `strict`; `gzip-bomb`.
    """

    def __init__(self, path: str | Path, *, strict: bool = False) -> None:
        self.path = Path(path)
        self.notices: list[Notice] = []
        self._strict = strict
        self._cut = Cut()
        self._handle = open_file(self.path)
        try:
            self._pieces = UnpackedFile(self._handle)
            self.packed = self._pieces.packed
            self._blocks = self._placed(blocks(self._pieces, self._cut))
            self.metadata, self._rest = self._head()
        except BaseException:
            self._handle.close()
            raise

    def __enter__(self) -> EtReader:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._handle.close()

    def __iter__(self) -> Iterator[Node]:
        """The nodes, in the order of the file."""
        for block in self.blocks():
            yield from self.decoded(block)

    def windows(self, size: int) -> Iterator[list[Node]]:
        """The nodes in lists of `size`; the last one may be shorter."""
        nodes = iter(self)
        while window := list(islice(nodes, size)):
            yield window

    def blocks(self) -> Iterator[Block]:
        """The nodes as undecoded bytes, about 4 MiB at a time, or one large node."""
        if self._rest is not None:
            yield self._rest
            self._rest = None
        yield from self._blocks

    def decoded(self, block: Block) -> Iterator[Node]:
        """The nodes of a block.

        Raises:
            InputError: `chakra-damaged`: a message is no node.
        """
        parse: Callable[[bytes], Node] = Node.FromString
        number = 0
        try:
            for number, message in enumerate(block.messages()):  # noqa: B007  (the error says the number)
                yield parse(message)
        except DecodeError as error:
            begin, end = block.at + block.starts[number], block.at + block.stops[number]
            raise InputError(
                f"message {block.first + number}, bytes {begin} to {end}, is no Chakra node",
                slug="chakra-damaged",
                where=str(self.path),
                hint="the file is damaged there",
            ) from error

    def _placed(self, raw_blocks: Iterator[Block]) -> Iterator[Block]:
        """The blocks; errors name the file, and a truncated end becomes a notice."""
        try:
            yield from raw_blocks
        except InputError as error:
            if error.where:
                raise
            raise InputError(error.message, slug=error.slug, where=str(self.path), hint=error.hint) from error
        fault = " and ".join(filter(None, [self._pieces.fault, self._cut.sentence() if self._cut.length else ""]))
        if fault and self._strict:
            raise InputError(fault, slug="chakra-cut", where=str(self.path), hint="copy the file again")
        if fault:
            self.notices.append(
                Notice("chakra-cut", "error", f"{fault}; every whole node before that is read", where=str(self.path))
            )

    def _head(self) -> tuple[GlobalMetadata, Block | None]:
        try:
            block = next(self._blocks, None)
        except InputError as error:
            raise self._refusal(error) from error
        if block is None:
            raise self._refusal(None)
        first = block.data[block.starts[0] : block.stops[0]]
        rest = Block(block.data, block.starts[1:], block.stops[1:], block.at, 1)
        if first.startswith(_FIRST_FIELD_VARINT):
            with suppress(DecodeError):
                Node.FromString(first)
                message = "the file begins with a node, not with metadata"
                self.notices.append(Notice("chakra-no-metadata", "warning", message, where=str(self.path)))
                return GlobalMetadata(), Block(block.data, block.starts, block.stops, block.at, 0)
        try:
            metadata = GlobalMetadata.FromString(first)
        except DecodeError as error:
            raise self._refusal(None) from error
        if first and not metadata.version and not metadata.attr:
            raise self._refusal(None)
        return metadata, rest

    def _refusal(self, error: InputError | None) -> InputError:
        """Why nothing of the file can be read."""
        self._handle.seek(0)
        head = next(iter(UnpackedFile(self._handle)), b"")
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        kind = next((kind for magic, kind in _OTHER_KINDS.items() if text.startswith(magic)), "")
        where = str(self.path)
        if not head and not self._pieces.fault:
            return InputError("the file is empty", slug="empty-file", where=where)
        if kind:
            detail = f"this is {kind}, not a Chakra trace in binary form"
            return InputError(detail, slug="not-chakra", where=where, hint=_HINTS.get(kind, ""))
        if error is not None and error.slug == "gzip-bomb":
            return error
        if error is None and (self._cut.length or self._pieces.fault):
            fault = self._pieces.fault or self._cut.sentence()
            return InputError(fault, slug="chakra-cut", where=where, hint="nothing before that can be used")
        detail = f": {error.message}" if error else ": its first message is no metadata of a Chakra trace"
        return InputError(f"this is not a Chakra trace{detail}", slug="not-chakra", where=where)


class EtWriter:
    """Writes messages to an open file, each after its length."""

    def __init__(self, handle: BinaryIO) -> None:
        self._write = handle.write

    def message(self, message: GlobalMetadata | Node) -> None:
        """Write one message; the first must be the metadata."""
        data = message.SerializeToString()
        self._write(length_prefix(len(data)) + data)

    def messages(self, metadata: GlobalMetadata, nodes: Iterable[Node]) -> None:
        """Write the messages of a file."""
        self.message(metadata)
        for node in nodes:
            self.message(node)

    def framed(self, data: bytes | memoryview) -> None:
        """Write messages that already have their lengths."""
        self._write(data)


def write(
    path: str | Path, metadata: GlobalMetadata, nodes: Iterable[Node], *, force: bool = False, gzip: bool | None = None
) -> int:
    """Write a `.et` file: beside its place first, then renamed, so that it is whole or not there.

    Args:
        path: The file; gzip where it ends in `.gz`, unless `gzip` says otherwise.
        metadata: The first message.
        nodes: The other messages.
        force: Overwrite an existing file.
        gzip: Compress or not.

    Returns:
        The size of the file in bytes.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    return write_with(path, lambda writer: writer.messages(metadata, nodes), force=force, gzip=gzip)


def write_with(
    path: str | Path, produce: Callable[[EtWriter], None], *, force: bool = False, gzip: bool | None = None
) -> int:
    """As `write`, for who has messages in another shape: `produce` writes them, the metadata first."""
    return write_packed(Path(path), lambda handle: produce(EtWriter(handle)), force=force, gzip=gzip)
