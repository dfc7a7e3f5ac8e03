"""Reads and writes `.et` streams and sets of files, including damaged files and group files.

The messages are defined in `et.proto`, with the field numbers of the MLCommons Chakra schema.

Neither reading nor writing holds more than a window of the file, however large it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from traceloom.errors import InputError
from traceloom.formats.chakra.et_pb2 import (
    GlobalMetadata,
    Node,
)
from traceloom.system.files import read_small
from traceloom.system.gzip_stream import GzipStream, open_file, write_gzip
from traceloom.trace.notice import Notice

# A larger message is damage: the largest real ones hold the whole text of an input in their
# metadata.
MAX_MESSAGE_BYTES = 1 << 28
# A node has a name or a type, an id and a length; messages with fewer bytes per node would create
# objects out of nothing.
_MIN_MESSAGE_BYTES = 6
_FEW_MESSAGES = 100_000
_MAX_SCHEMA_MESSAGES = 1000  # that are looked at for an old schema
_LENGTH_BYTES = 5  # a length has at most 32 bits


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive whole messages.

    Attributes:
        data: The bytes that hold them.
        starts: Where in `data` each message begins, after its length.
        stops: Where each message ends.
        at: Offset of `data` in the unpacked file.
        first: Number of the first message in the file, from 0.
    """

    data: bytes
    starts: list[int]
    stops: list[int]
    at: int
    first: int

    def __len__(self) -> int:
        return len(self.starts)

    def messages(self) -> Iterator[bytes]:
        data = self.data
        for start, stop in zip(self.starts, self.stops, strict=True):
            yield data[start:stop]


@dataclass(slots=True)
class IncompleteTail:
    """The incomplete message at the end of a file.

    Attributes:
        message: Its number.
        at: Where it begins, including its length.
        length: Of the message; -1 where even the length is incomplete, 0 where nothing is cut.
        there: Bytes of it, or of its length, that the file has.
    """

    message: int = 0
    at: int = 0
    length: int = 0
    there: int = 0

    def sentence(self) -> str:
        if self.length < 0:
            return f"the file ends at byte {self.at + self.there}, inside the length of message {self.message}"
        return (
            f"the file ends inside message {self.message}, which begins at byte {self.at} "
            f"and has {self.there:,} of its {self.length:,} bytes"
        )


def read_blocks(chunks: Iterable[bytes], cut: IncompleteTail) -> Iterator[Block]:
    """Yields the messages of a stream, in blocks of about the size of the chunks.

    Args:
        chunks: The unpacked bytes.
        cut: Filled in when the stream ends inside a message.

    Raises:
        InputError: `chakra-damaged`: a message claims more bytes than any valid one has, or there
            are many messages with hardly any content.
    """
    offset = first = 0
    remainder = b""
    waiting: list[bytes] = []
    missing = 0  # bytes known to be needed before the next message is whole
    for chunk in chunks:
        waiting.append(chunk)
        missing -= len(chunk)
        if missing > 0:
            continue
        data = b"".join([remainder, *waiting])
        waiting = []
        starts, stops, end, missing, damage = _find_messages(data, offset, first)
        if first + len(starts) > _FEW_MESSAGES and offset + end < _MIN_MESSAGE_BYTES * (
            first + len(starts)
        ):
            raise _make_damage_error(
                first,
                offset,
                f"nothing, as most of the others: {first + len(starts):,} messages hardly say a thing",
            )
        if starts:
            yield Block(data, starts, stops, offset, first)
            first += len(starts)
        if damage is not None:
            raise damage
        remainder = data[end:]
        offset += end
    remainder = b"".join([remainder, *waiting])
    if remainder:
        head, length = _decode_length(remainder, 0)
        if head < 0:
            cut.message, cut.at, cut.length, cut.there = first, offset, -1, len(remainder)
        else:
            cut.message, cut.at, cut.length, cut.there = (
                first,
                offset,
                length,
                len(remainder) - head,
            )


def _find_messages(
    data: bytes, offset: int, first: int
) -> tuple[list[int], list[int], int, int, InputError | None]:
    """Returns starts and stops of the whole messages, where the rest begins, how many bytes the
    next one lacks, and the error, if any.
    """
    starts: list[int] = []
    stops: list[int] = []
    position, size, missing = 0, len(data), 0
    while position < size:
        length = data[position]
        start = position + 1
        # Most nodes have a length of two bytes.
        if length > 127 and start < size and data[start] < 128:
            length, start = length & 127 | data[start] << 7, start + 1
        elif length > 127:
            start, length = _decode_length(data, position)
            if start < 0 and size - position < _LENGTH_BYTES:
                missing = 1
                break
            if start < 0 or length > MAX_MESSAGE_BYTES:
                claims = (
                    "no length that a message can have"
                    if start < 0
                    else f"{length:,} bytes, more than any message has"
                )
                return (
                    starts,
                    stops,
                    position,
                    0,
                    _make_damage_error(first + len(starts), offset + position, claims),
                )
        stop = start + length
        if stop > size:
            missing = stop - size
            break
        starts.append(start)
        stops.append(stop)
        position = stop
    return starts, stops, position, missing, None


def _decode_length(data: bytes, position: int) -> tuple[int, int]:
    """Decodes the length at `position`: where its message begins, and the length; (-1, 0) where it
    has no end.
    """
    length = shift = 0
    for index in range(position, min(position + _LENGTH_BYTES, len(data))):
        byte = data[index]
        length |= (byte & 127) << shift
        if byte < 128:
            return index + 1, length
        shift += 7
    return -1, 0


def _make_damage_error(message: int, offset: int, claims: str) -> InputError:
    return InputError(
        f"message {message} at byte {offset} claims {claims}",
        slug="chakra-damaged",
        hint="the file is damaged there, or is no Chakra trace",
    )


def encode_length(length: int) -> bytes:
    if length < 128:
        return bytes((length,))
    out = bytearray()
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)


_FIRST_FIELD_VARINT = b"\x08"  # how the message of a node with an id begins
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
    """Reads one `.et` file once, from beginning to end; gzip is detected by content.

    Example:
        with EtReader(path) as reader:
            for node in reader: ...

    Args:
        path: The file.
        strict: Raise where the file is cut, instead of adding a notice.

    Attributes:
        metadata: The first message; empty where the file begins with a node.
        packed: Whether the file is compressed with gzip.
        notices: Problems of the file, complete after the last node.

    Raises:
        InputError: `unreadable`; `empty-file`; `not-chakra`: another kind of file;
            `chakra-damaged`: a message claims more bytes than possible, or is no node;
            `chakra-old-schema`;
            `chakra-cut`: even the metadata is incomplete, or `strict`; `gzip-bomb`.
    """

    def __init__(self, path: str | Path, *, strict: bool = False) -> None:
        self.path = Path(path)
        self.notices: list[Notice] = []
        self._strict = strict
        self._cut = IncompleteTail()
        self._handle = open_file(self.path)
        try:
            self._pieces = GzipStream(self._handle)
            self.packed = self._pieces.packed
            self._blocks = self._placed(read_blocks(self._pieces, self._cut))
            self.metadata, self._rest = self._head()
        except BaseException:
            self._handle.close()
            raise

    def __enter__(self) -> EtReader:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle.close()

    def __iter__(self) -> Iterator[Node]:
        for block in self.blocks():
            yield from self.decoded(block)

    def windows(self, size: int) -> Iterator[list[Node]]:
        """Yields the nodes in lists of `size`; the last one may be shorter."""
        nodes = iter(self)
        while window := list(islice(nodes, size)):
            yield window

    def blocks(self) -> Iterator[Block]:
        """Yields the nodes as undecoded bytes, about 4 MiB at a time, or one large node."""
        if self._rest is not None:
            yield self._rest
            self._rest = None
        yield from self._blocks

    def decoded(self, block: Block) -> Iterator[Node]:
        """Yields the nodes of a block.

        Raises:
            InputError: `chakra-damaged`: a message is not a node.
        """
        parse: Callable[[bytes], Node] = Node.FromString
        number = 0
        try:
            for number, message in enumerate(block.messages()):  # noqa: B007  (the error says the number)
                yield parse(message)
        except DecodeError as error:
            start, end = block.at + block.starts[number], block.at + block.stops[number]
            raise InputError(
                f"message {block.first + number}, bytes {start} to {end}, is no Chakra node",
                slug="chakra-damaged",
                where=str(self.path),
                hint="the file is damaged there",
            ) from error

    def _placed(self, raw_blocks: Iterator[Block]) -> Iterator[Block]:
        """Yields the blocks; errors name the file, and a truncated end becomes a notice."""
        try:
            yield from raw_blocks
        except InputError as error:
            if error.where:
                raise
            raise InputError(
                error.message, slug=error.slug, where=str(self.path), hint=error.hint
            ) from error
        fault = " and ".join(
            filter(None, [self._pieces.fault, self._cut.sentence() if self._cut.length else ""])
        )
        if fault and self._strict:
            raise InputError(
                fault, slug="chakra-cut", where=str(self.path), hint="copy the file again"
            )
        if fault:
            self.notices.append(
                Notice(
                    "chakra-cut",
                    "error",
                    f"{fault}; every whole node before that is read",
                    where=str(self.path),
                )
            )

    def _head(self) -> tuple[GlobalMetadata, Block | None]:
        try:
            block = next(self._blocks, None)
        except InputError as error:
            raise self._refusal(error) from error
        if block is None:
            raise self._refusal(None)
        first = block.data[block.starts[0] : block.stops[0]]
        remaining = Block(block.data, block.starts[1:], block.stops[1:], block.at, 1)
        if first.startswith(_FIRST_FIELD_VARINT):
            with suppress(DecodeError):
                Node.FromString(first)
                self._refuse_old_schema(block)
                message = "the file begins with a node, not with metadata"
                self.notices.append(
                    Notice("chakra-no-metadata", "warning", message, where=str(self.path))
                )
                return GlobalMetadata(), Block(block.data, block.starts, block.stops, block.at, 0)
        try:
            metadata = GlobalMetadata.FromString(first)
        except DecodeError as error:
            raise self._refusal(None) from error
        if first and not metadata.version and not metadata.attr:
            raise self._refusal(None)
        return metadata, remaining

    def _refuse_old_schema(self, block: Block) -> None:
        """Refuses a file without metadata whose nodes have numbers that only an old schema has."""
        nodes: list[Node] = []
        with suppress(DecodeError):  # the first damaged node ends the look
            nodes.extend(map(Node.FromString, islice(block.messages(), _MAX_SCHEMA_MESSAGES)))
        for node in nodes:
            unknown: Any = UnknownFieldSet(node)
            if any(field.wire_type == 0 and field.field_number >= 8 for field in unknown):
                raise InputError(
                    "this is a Chakra file of the schema 0.0.1 (2023), whose fields meant other things: sizes would "
                    "be taken for times",
                    slug="chakra-old-schema",
                    where=str(self.path),
                    hint="write it again with the Chakra schema 0.0.4 or later",
                )

    def _refusal(self, error: InputError | None) -> InputError:
        """Returns the error that explains why nothing of the file can be read."""
        self._handle.seek(0)
        head = next(iter(GzipStream(self._handle)), b"")
        text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        kind = next((kind for magic, kind in _OTHER_KINDS.items() if text.startswith(magic)), "")
        location = str(self.path)
        if not head and not self._pieces.fault:
            return InputError("the file is empty", slug="empty-file", where=location)
        if kind:
            detail = f"this is {kind}, not a Chakra trace in binary form"
            return InputError(detail, slug="not-chakra", where=location, hint=_HINTS.get(kind, ""))
        if error is not None and error.slug == "gzip-bomb":
            return error
        if error is None and (self._cut.length or self._pieces.fault):
            fault = self._pieces.fault or self._cut.sentence()
            return InputError(
                fault, slug="chakra-cut", where=location, hint="nothing before that can be used"
            )
        detail = (
            f": {error.message}"
            if error
            else ": its first message is no metadata of a Chakra trace"
        )
        return InputError(f"this is not a Chakra trace{detail}", slug="not-chakra", where=location)


class EtWriter:
    """Writes messages to an open file, each preceded by its length."""

    def __init__(self, handle: BinaryIO) -> None:
        self._write = handle.write

    def message(self, message: GlobalMetadata | Node) -> None:
        """Writes one message; the first must be the metadata."""
        data = message.SerializeToString()
        self._write(encode_length(len(data)) + data)

    def messages(self, metadata: GlobalMetadata, nodes: Iterable[Node]) -> None:
        self.message(metadata)
        for node in nodes:
            self.message(node)

    def framed(self, data: bytes | memoryview) -> None:
        """Writes messages that already have their lengths."""
        self._write(data)


def write(
    path: str | Path,
    metadata: GlobalMetadata,
    nodes: Iterable[Node],
    *,
    force: bool = False,
    gzip: bool | None = None,
) -> int:
    """Writes a `.et` file atomically: a temporary file beside it is renamed.

    Args:
        path: The file; compressed where it ends in `.gz`, unless `gzip` is given.
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
    path: str | Path,
    produce: Callable[[EtWriter], None],
    *,
    force: bool = False,
    gzip: bool | None = None,
) -> int:
    """As `write`, for messages in another form: `produce` writes them, the metadata first."""
    return write_gzip(Path(path), lambda handle: produce(EtWriter(handle)), force=force, gzip=gzip)


GROUP_FILES = ("comm_groups.json", "comm_group.json")  # the first name is written
RANK_FILES_PATTERN = r"workload\.[^/]*\.et(\.gz)?|comm_groups\.json"
"""What a directory with the files of all ranks holds, as a regular expression."""
MAX_GROUP_BYTES = 1 << 28
_MAX_UNNAMED_GROUP_BYTES = 1 << 24


@dataclass(frozen=True)
class GroupFile:
    """The group file of a set.

    Attributes:
        path: Where it was read from; empty where there is none.
        members: Ranks of each group, by name.
        faults: Descriptions of its problems.
    """

    path: str = ""
    members: dict[str, tuple[int, ...]] | None = None
    faults: tuple[str, ...] = ()


def find_group_file(directory: Path) -> Path | None:
    """Returns the group file of a directory of `.et` files: one of the usual names, else the only other JSON file
    that lists the ranks of groups, such as the `workload.json` of STAGE.
    """
    for name in GROUP_FILES:
        if (directory / name).is_file():
            return directory / name
    if not any(directory.glob("*.et*")):
        return None
    others = [path for path in sorted(directory.glob("*.json")) if _lists_groups(path)]
    return others[0] if len(others) == 1 else None


def _lists_groups(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size > _MAX_UNNAMED_GROUP_BYTES:
        return False
    try:
        file = read_groups(path)
    except InputError:
        return False
    return bool(file.members) and not file.faults


def read_groups(path: Path) -> GroupFile:
    """Reads a group file: a JSON object with the list of ranks of each group by name.

    Raises:
        InputError: `not-a-group-file`: it cannot be read at all.
    """
    try:
        document = json.loads(read_small(path, MAX_GROUP_BYTES))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"the group file cannot be read: {reason}", slug="not-a-group-file", where=str(path)
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"no group file: {error}", slug="not-a-group-file", where=str(path)
        ) from error
    if not isinstance(document, dict):
        raise InputError("a group file is a JSON object", slug="not-a-group-file", where=str(path))
    members: dict[str, tuple[int, ...]] = {}
    faults: list[str] = []
    for name, ranks in document.items():
        is_rank_list = isinstance(ranks, list) and all(
            isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31
            for rank in ranks
        )
        if is_rank_list:
            members[name] = tuple(ranks)
            if len(set(ranks)) < len(ranks):
                faults.append(f"group `{name}` names a rank twice")
        else:
            faults.append(f"group `{name}` is not a list of ranks")
    return GroupFile(str(path), members, tuple(faults))


def format_groups(groups: Mapping[str, Iterable[int]]) -> str:
    """Returns the text of a group file in the form that simulators read."""
    return json.dumps({name: list(ranks) for name, ranks in groups.items()}, indent=1) + "\n"
