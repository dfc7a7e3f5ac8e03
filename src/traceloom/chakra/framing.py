"""Messages of a `.et` file: each is preceded by its length as a varint. Found in blocks, none of them decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from traceloom.errors import InputError

# A message larger than this is damage: the largest real ones hold the whole text of an input in their metadata.
MOST_BYTES = 1 << 28
# A node has a name or a type, an id and a length; whoever needs fewer bytes makes nodes out of nothing.
_LEAST_BYTES = 6
_FEW = 100_000
_LENGTH_BYTES = 5  # a length has at most 32 bits


@dataclass(frozen=True, slots=True)
class Block:
    """Whole messages that lie one after the other.

    Attributes:
        data: The bytes that hold them.
        starts: Where in `data` each message begins, after its length.
        stops: Where it ends.
        at: Where in the unpacked file `data` begins.
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
        """The bytes of each message."""
        data = self.data
        for start, stop in zip(self.starts, self.stops, strict=True):
            yield data[start:stop]


@dataclass(slots=True)
class Cut:
    """What a file ends with that is no whole message.

    Attributes:
        message: Its number.
        at: Where it begins, with its length.
        length: Of the message; -1 where not even the length is whole, 0 where nothing is cut.
        there: Bytes of it, or of its length, that the file has.
    """

    message: int = 0
    at: int = 0
    length: int = 0
    there: int = 0

    def sentence(self) -> str:
        """Where the file is cut."""
        if self.length < 0:
            return f"the file ends at byte {self.at + self.there}, inside the length of message {self.message}"
        return (
            f"the file ends inside message {self.message}, which begins at byte {self.at} "
            f"and has {self.there:,} of its {self.length:,} bytes"
        )


def blocks(pieces: Iterable[bytes], cut: Cut) -> Iterator[Block]:
    """The messages of a stream, in blocks of about the size of the pieces.

    Args:
        pieces: The unpacked bytes.
        cut: Filled in when the stream ends inside a message.

    Raises:
        InputError: `chakra-damaged`: a message claims more bytes than any has; there are many, and nothing is in them.
    """
    at = first = 0
    rest = b""
    waiting: list[bytes] = []
    missing = 0  # bytes known to be needed before the next message is whole
    for piece in pieces:
        waiting.append(piece)
        missing -= len(piece)
        if missing > 0:
            continue
        data = b"".join([rest, *waiting])
        waiting = []
        starts, stops, end, missing, damage = _messages(data, at, first)
        if first + len(starts) > _FEW and at + end < _LEAST_BYTES * (first + len(starts)):
            raise _damaged(
                first, at, f"nothing, as most of the others: {first + len(starts):,} messages hardly say a thing"
            )
        if starts:
            yield Block(data, starts, stops, at, first)
            first += len(starts)
        if damage is not None:
            raise damage
        rest = data[end:]
        at += end
    rest = b"".join([rest, *waiting])
    if rest:
        head, length = _length(rest, 0)
        if head < 0:
            cut.message, cut.at, cut.length, cut.there = first, at, -1, len(rest)
        else:
            cut.message, cut.at, cut.length, cut.there = first, at, length, len(rest) - head


def _messages(data: bytes, at: int, first: int) -> tuple[list[int], list[int], int, int, InputError | None]:
    """Starts and stops of the whole messages, where the rest begins, how much the next one lacks, and what is wrong."""
    starts: list[int] = []
    stops: list[int] = []
    position, size, missing = 0, len(data), 0
    while position < size:
        length = data[position]
        start = position + 1
        if length > 127 and start < size and data[start] < 128:  # most nodes have two bytes of length
            length, start = length & 127 | data[start] << 7, start + 1
        elif length > 127:
            start, length = _length(data, position)
            if start < 0 and size - position < _LENGTH_BYTES:
                missing = 1
                break
            if start < 0 or length > MOST_BYTES:
                claims = (
                    "no length that a message can have" if start < 0 else f"{length:,} bytes, more than any message has"
                )
                return starts, stops, position, 0, _damaged(first + len(starts), at + position, claims)
        stop = start + length
        if stop > size:
            missing = stop - size
            break
        starts.append(start)
        stops.append(stop)
        position = stop
    return starts, stops, position, missing, None


def _length(data: bytes, position: int) -> tuple[int, int]:
    """Where the message after the length at `position` begins, and the length; (-1, 0) where it has no end."""
    length = shift = 0
    for index in range(position, min(position + _LENGTH_BYTES, len(data))):
        byte = data[index]
        length |= (byte & 127) << shift
        if byte < 128:
            return index + 1, length
        shift += 7
    return -1, 0


def _damaged(message: int, at: int, claims: str) -> InputError:
    return InputError(
        f"message {message} at byte {at} claims {claims}",
        slug="chakra-damaged",
        hint="the file is damaged there, or is no Chakra trace",
    )


def length_prefix(length: int) -> bytes:
    """A length as a varint."""
    if length < 128:
        return bytes((length,))
    out = bytearray()
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)
