"""The bytes of a file, plain or gzip (told by content), in pieces; what is cut or corrupt ends them with a fault."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from isal import igzip, isal_zlib
from isal.igzip_lib import IsalError

from traceloom import files
from traceloom.errors import InputError

PIECE = 1 << 22  # bytes that are looked at together; less makes decoding in columns slower
_READ = 1 << 20
_SLOW = 1 << 16
_GZIP = b"\x1f\x8b"
# Deflate can expand 1032 times; made workloads of nearly equal nodes come near 200.
_MOST_EXPANSION = 500
_BOMB_BYTES = 1 << 26
_FAULT: Any = IsalError  # its type stubs call it a value

Step = Callable[[int], None]


class UnpackedFile:
    """Iterates the unpacked bytes of a file.

    Attributes:
        packed: Whether the file is gzip.
        fault: After the last piece: what is wrong with the compressed data, in words; empty when nothing is.
    """

    def __init__(self, handle: BinaryIO, step: Step | None = None) -> None:
        self._handle = handle
        self._step = step
        self._head = handle.read(_READ)
        self.packed = self._head.startswith(_GZIP)
        self.fault = ""

    def __iter__(self) -> Iterator[bytes]:
        if not self.packed:
            waiting: list[bytes] = []
            for piece in self._read():
                waiting.append(piece)
                if len(waiting) * _READ >= PIECE:
                    yield b"".join(waiting)
                    waiting = []
            if waiting:
                yield b"".join(waiting)
            return
        inflate = isal_zlib.decompressobj(31)
        read = text = 0
        member = before = 0  # where in the file the current member begins, and how much text came before it
        for packed in self._read():
            read += len(packed)
            rest = packed
            while rest:
                if inflate.eof:  # another member, or zeros that fill up a block
                    rest = rest.lstrip(b"\0")
                    if not rest:
                        break
                    inflate = isal_zlib.decompressobj(31)
                    member, before = read - len(rest), text
                try:
                    out = inflate.decompress(rest, PIECE)
                except _FAULT:
                    self.fault = f"the gzip data is corrupt near byte {read - len(rest)} of the compressed file"
                    yield from self._slowly(member, read, text - before)
                    return
                text += len(out)
                if text > _BOMB_BYTES and text > read * _MOST_EXPANSION:
                    raise InputError(
                        f"the compressed file expands more than {_MOST_EXPANSION} times, which no trace does",
                        slug="gzip-bomb",
                        hint="decompress it yourself and give the plain file if you trust it",
                    )
                yield out
                rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        if not inflate.eof:
            self.fault = f"the gzip data ends at byte {read} of the compressed file, before its end mark"

    def _read(self) -> Iterator[bytes]:
        piece, total = self._head, 0
        while piece:
            total += len(piece)
            yield piece
            if self._step:
                self._step(total)
            piece = self._handle.read(_READ)

    def _slowly(self, member: int, until: int, decoded: int) -> Iterator[bytes]:
        """The text of a corrupt member beyond its first `decoded` bytes, up to the fault.

        The fast decoder gives nothing of the piece in which it fails; zlib, fed byte by byte, gives all before that.
        """
        if not self._handle.seekable():
            return
        self._handle.seek(member)
        inflate = zlib.decompressobj(31)
        got = 0
        for at in range(member, until, _SLOW):
            packed = self._handle.read(min(_SLOW, until - at))
            size = 1 if at + _READ + _SLOW >= until else _SLOW
            for start in range(0, len(packed), size):
                try:
                    out = inflate.decompress(packed[start : start + size])
                except zlib.error:
                    return
                got += len(out)
                if got > decoded and out:
                    yield out[max(0, len(out) - (got - decoded)) :]


def open_file(path: Path) -> BinaryIO:
    """A file to read.

    Raises:
        InputError: `unreadable` (missing, forbidden, a directory).
    """
    try:
        return files.open_input(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"the file cannot be read: {reason}", slug="unreadable", where=str(path)) from error


def write_packed(
    path: Path, produce: Callable[[BinaryIO], object], *, force: bool = False, gzip: bool | None = None
) -> int:
    """Write a file, whole or not at all; returns its size in bytes. The same content gives the same file.

    Args:
        path: The file.
        produce: Writes its content.
        force: Overwrite an existing file.
        gzip: Compress or not; None where the name ends in `.gz`.

    Raises:
        OutputError: `file-exists`, `cannot-write`.
    """

    def pack(handle: BinaryIO) -> None:
        packed: Any = igzip.IGzipFile(filename="", fileobj=handle, mode="wb", compresslevel=2, mtime=0)
        with packed:
            produce(packed)

    packs = path.name.lower().endswith(".gz") if gzip is None else gzip
    return files.write(path, pack if packs else produce, force=force)
