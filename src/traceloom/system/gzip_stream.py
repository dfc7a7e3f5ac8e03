"""Reading plain or gzip files (detected by content) in pieces up to the first damage, and writing
them.
"""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from isal import igzip, isal_zlib
from isal.igzip_lib import IsalError

from traceloom.errors import InputError, unreadable
from traceloom.system import files

_RECOVERY_CHUNK_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_GzipError: Any = IsalError  # the type stubs do not declare it as a class

ProgressCallback = Callable[[int, int], None]


class GzipStream:
    """Iterates over the decompressed bytes of a file.

    Args:
        stream: The file.
        step: Called with (bytes read from the file, bytes of text so far).

    Attributes:
        packed: Whether the file is gzip.
        read: Bytes read from the file; after damage, the position of the damage.
        given: Bytes of text so far.
        damage: After the last piece: the kind of damage of the compressed data; empty if there is
            none.
    """

    READ = 1 << 20  # compressed bytes per read
    PIECE = 1 << 22  # max bytes of text per piece; smaller pieces slow down columnar decoding
    # Deflate can expand 1032 times; generated workloads of nearly equal nodes reach about 200.
    MOST_EXPANSION = 500
    BOMB_BYTES = 1 << 26  # text below this size is never treated as a bomb

    def __init__(self, stream: BinaryIO, step: ProgressCallback | None = None) -> None:
        self._stream = stream
        self._step = step
        self._head = stream.read(self.READ)
        self.packed = self._head.startswith(_GZIP_MAGIC)
        self.read = self.given = 0
        self.damage: Literal["", "cut-gzip", "corrupt-gzip", "trailing-bytes"] = ""

    @property
    def fault(self) -> str:
        """A sentence that describes the damage; empty if there is none."""
        if not self.damage:
            return ""
        return (
            f"the gzip data ends at byte {self.read} of the compressed file, before its end mark"
            if self.damage == "cut-gzip"
            else f"the gzip data is corrupt near byte {self.read} of the compressed file"
        )

    def whole(self, max_bytes: int, file_kind: str, path: str | Path) -> bytes:
        """Returns all of the text up to the damage; `file_kind` and `path` name the file in errors.

        Raises:
            InputError: `gzip-bomb`: it has more than `max_bytes` bytes; `unreadable`.
        """
        chunks = []
        try:
            for chunk in self:
                chunks.append(chunk)
                if self.given > max_bytes:
                    raise InputError(
                        f"the {file_kind} has more than {max_bytes / 1e9:.1f} GB of text",
                        slug="gzip-bomb",
                        where=str(path),
                    )
        except OSError as error:
            raise unreadable(path, error) from error
        return b"".join(chunks)

    def __iter__(self) -> Iterator[bytes]:
        if not self.packed:
            for chunk in self._stored(self.PIECE):
                self.given = self.read
                yield chunk
            return
        inflate = isal_zlib.decompressobj(31)
        # Offset of the current member in the file, and bytes of text before it.
        member = before = 0
        for stored in self._stored(self.READ):
            remaining = stored
            while remaining:
                if inflate.eof:  # another member follows, or zeros that pad a block
                    remaining = remaining.lstrip(b"\0")
                    if not remaining:
                        break
                    member, before = self.read - len(remaining), self.given
                    if not _GZIP_MAGIC.startswith(remaining[:2]):
                        self.read, self.damage = member, "trailing-bytes"
                        return
                    inflate = isal_zlib.decompressobj(31)
                try:
                    text = inflate.decompress(remaining, self.PIECE)
                except _GzipError:
                    end, self.read, self.damage = (
                        self.read,
                        self.read - len(remaining),
                        "corrupt-gzip",
                    )
                    yield from self._slowly(member, end, self.given - before)
                    return
                self.given += len(text)
                if self.given > self.BOMB_BYTES and self.given > self.read * self.MOST_EXPANSION:
                    raise InputError(
                        f"the compressed file expands more than {self.MOST_EXPANSION} times, which no trace does",
                        slug="gzip-bomb",
                        where=str(getattr(self._stream, "name", "")),
                        hint="decompress it yourself and give the plain file if you trust it",
                    )
                yield text
                remaining = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        if not inflate.eof:
            self.damage = "cut-gzip"

    def _stored(self, size: int) -> Iterator[bytes]:
        chunk = self._head
        while chunk:
            self.read += len(chunk)
            yield chunk
            if self._step:
                self._step(self.read, self.given)
            chunk = self._stream.read(size)

    def _slowly(self, member: int, end: int, decoded: int) -> Iterator[bytes]:
        """Yields the text of a corrupt member beyond its first `decoded` bytes, up to the damage.

        The fast decoder returns nothing of the piece in which it fails; zlib, fed byte by byte,
        returns everything before that.
        """
        if not self._stream.seekable():
            return
        self._stream.seek(member)
        inflate = zlib.decompressobj(31)
        text_bytes = 0
        for position in range(member, end, _RECOVERY_CHUNK_BYTES):
            packed = self._stream.read(min(_RECOVERY_CHUNK_BYTES, end - position))
            size = (
                1 if position + self.READ + _RECOVERY_CHUNK_BYTES >= end else _RECOVERY_CHUNK_BYTES
            )
            for start in range(0, len(packed), size):
                try:
                    text = inflate.decompress(packed[start : start + size])
                except zlib.error:
                    return
                text_bytes += len(text)
                if text and text_bytes > decoded:
                    text = text[max(0, len(text) - (text_bytes - decoded)) :]
                    self.given += len(text)
                    yield text


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        InputError: `unreadable` (missing, access denied, a directory, a device).
    """
    try:
        return files.open_input(path)
    except OSError as error:
        raise unreadable(path, error) from error


def compress_output(produce: Callable[[BinaryIO], object]) -> Callable[[BinaryIO], None]:
    """Returns a function that writes the output of `produce`, compressed; equal content gives equal
    bytes.
    """

    def pack(handle: BinaryIO) -> None:
        packed: Any = igzip.IGzipFile(
            filename="", fileobj=handle, mode="wb", compresslevel=2, mtime=0
        )
        with packed:
            produce(packed)

    return pack


def write_gzip(
    path: Path,
    produce: Callable[[BinaryIO], object],
    *,
    force: bool = False,
    gzip: bool | None = None,
) -> int:
    """Write a file atomically and return its size in bytes. Equal content gives an equal file.

    Args:
        path: The file.
        produce: Writes its content.
        force: Overwrite an existing file.
        gzip: Whether to compress; None: only if the name ends in `.gz`.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    compresses = path.name.lower().endswith(".gz") if gzip is None else gzip
    return files.write(path, compress_output(produce) if compresses else produce, force=force)
