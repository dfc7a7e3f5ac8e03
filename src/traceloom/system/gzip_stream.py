"""The bytes of a file, plain or gzip (told by content), in pieces; what is cut or corrupt ends them
with a fault.
"""

from __future__ import annotations

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
_GzipError: Any = IsalError  # its type stubs call it a value

ProgressCallback = Callable[[int, int], None]


class GzipStream:
    """Iterates the unpacked bytes of a file.

    Args:
        stream: The file.
        step: Called with (bytes read from the file, bytes of text so far).

    Attributes:
        packed: Whether the file is gzip.
        read: Bytes read from the file; at a fault, those before it.
        given: Bytes of text so far.
        damage: After the last piece: what is wrong with the compressed data; empty when nothing is.
    """

    READ = 1 << 20  # compressed bytes that are read at once
    PIECE = 1 << 22  # most bytes of text at once; less makes decoding in columns slower
    # Deflate can expand 1032 times; made workloads of nearly equal nodes come near 200.
    MOST_EXPANSION = 500
    BOMB_BYTES = 1 << 26  # of text; less is no bomb

    def __init__(self, stream: BinaryIO, step: ProgressCallback | None = None) -> None:
        self._stream = stream
        self._step = step
        self._head = stream.read(self.READ)
        self.packed = self._head.startswith(_GZIP_MAGIC)
        self.read = self.given = 0
        self.damage: Literal["", "cut-gzip", "corrupt-gzip", "trailing-bytes"] = ""

    @property
    def fault(self) -> str:
        """What is wrong with the compressed data, in words; empty when nothing is."""
        if not self.damage:
            return ""
        if self.damage == "cut-gzip":
            return f"the gzip data ends at byte {self.read} of the compressed file, before its end mark"
        return f"the gzip data is corrupt near byte {self.read} of the compressed file"

    def whole(self, max_bytes: int, file_kind: str, path: str | Path) -> bytes:
        """All of the text up to `damage`; `file_kind` and `path` name the file in errors.

        Raises:
            InputError: `gzip-bomb`: it has more bytes than that; `unreadable`.
        """
        chunks = []
        try:
            for chunk in self:
                chunks.append(chunk)
                if self.given > max_bytes:
                    message = f"the {file_kind} has more than {max_bytes / 1e9:.1f} GB of text"
                    raise InputError(message, slug="gzip-bomb", where=str(path))
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
        member = before = (
            0  # where in the file the current member begins, and how much text came before it
        )
        for stored in self._stored(self.READ):
            remaining = stored
            while remaining:
                if inflate.eof:  # another member, or zeros that fill up a block
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
        """The text of a corrupt member beyond its first `decoded` bytes, up to the fault.

        The fast decoder gives nothing of the piece in which it fails; zlib, fed byte by byte, gives
        all before that.
        """
        if not self._stream.seekable():
            return
        self._stream.seek(member)
        inflate = zlib.decompressobj(31)
        got = 0
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
                got += len(text)
                if text and got > decoded:
                    text = text[max(0, len(text) - (got - decoded)) :]
                    self.given += len(text)
                    yield text


def open_file(path: str | Path) -> BinaryIO:
    """A file to read.

    Raises:
        InputError: `unreadable` (missing, forbidden, a directory, a device).
    """
    try:
        return files.open_input(path)
    except OSError as error:
        raise unreadable(path, error) from error


def compress_output(produce: Callable[[BinaryIO], object]) -> Callable[[BinaryIO], None]:
    """Writes the same content as `produce`, compressed; the same content gives the same bytes."""

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
    """Write a file, whole or not at all; returns its size in bytes. The same content gives the same
    file.

    Args:
        path: The file.
        produce: Writes its content.
        force: Overwrite an existing file.
        gzip: Compress or not; None where the name ends in `.gz`.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """
    packs = path.name.lower().endswith(".gz") if gzip is None else gzip
    return files.write(path, compress_output(produce) if packs else produce, force=force)
