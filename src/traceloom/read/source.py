"""The text of an input: plain or gzip, file or standard input, whole or cut, in pieces."""

from __future__ import annotations

import codecs
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib
from isal.igzip_lib import IsalError

from traceloom import files
from traceloom.errors import InputError
from traceloom.read.damage import Damage

PIECE = 1 << 19  # bytes of text per piece; what fits the processor's caches is decoded fastest
_BATCH = 1 << 20  # bytes of text decompressed at once
_PACKED = 1 << 16  # compressed bytes fed at a time
_GZIP = b"\x1f\x8b"
# Deflate can expand 1032 times; real traces stay below 60.
_MOST_EXPANSION = 250
_BOMB_BYTES = 1 << 28
_FAULT: Any = IsalError  # its type stubs call it a value

Step = Callable[[int, int], None]
Look = Callable[[bytes], None]


def open_input(path: str | Path) -> BinaryIO:
    """The bytes of a file, or of standard input for `-`.

    Raises:
        InputError: `unreadable` (missing, forbidden, no file).
    """
    if str(path) == "-":
        return sys.stdin.buffer
    try:
        return files.open_input(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"the file cannot be read: {reason.lower()}", slug="unreadable", where=str(path)) from error


def text_pieces(
    stream: BinaryIO, damage: Damage, step: Step | None = None, look: Look | None = None
) -> Iterator[bytes]:
    """The decompressed text in pieces; decompression runs one batch ahead in a thread, beside the decoding.

    Args:
        stream: The file.
        damage: Told about a cut or corrupt gzip; what came before the fault is given all the same.
        step: Called with (bytes read from the file, bytes of text so far).
        look: Called with all text in order, some of it long before it is given here; in that thread if there is one.

    Raises:
        InputError: `gzip-bomb`, where the text grows out of all proportion.
    """
    head = stream.read(_PACKED)
    chunks = _unpacked(stream, head, damage, step)
    if not head.startswith(_GZIP):
        yield from _looked_at(_transcoded(_gathered(chunks, PIECE)), look)
        return
    batches = _looked_at(_transcoded(_gathered(chunks, _BATCH)), look)
    with ThreadPoolExecutor(1, thread_name_prefix="traceloom-text") as pool:
        ahead = pool.submit(next, batches, None)
        while (batch := ahead.result()) is not None:
            ahead = pool.submit(next, batches, None)
            for at in range(0, len(batch), PIECE):
                yield batch[at : at + PIECE]


def first_pieces(stream: BinaryIO, damage: Damage, look: Look | None = None) -> Iterator[bytes]:
    """As `text_pieces`, for who wants the beginning only: no more is decompressed than is asked for."""
    yield from _looked_at(_transcoded(_unpacked(stream, stream.read(_PACKED), damage, None)), look)


def _looked_at(pieces: Iterator[bytes], look: Look | None) -> Iterator[bytes]:
    for piece in pieces:
        if look:
            look(piece)
        yield piece


def _unpacked(stream: BinaryIO, packed: bytes, damage: Damage, step: Step | None) -> Iterator[bytes]:
    """Plain text as it is; gzip members one after the other, as far as they can be read."""
    read = text = 0
    if not packed.startswith(_GZIP):
        while packed:
            read += len(packed)
            yield packed
            if step:
                step(read, read)
            packed = stream.read(PIECE)
        return
    inflate = isal_zlib.decompressobj(31)
    member = 0  # where the current member begins
    while packed:
        try:
            out = inflate.decompress(packed)
        except _FAULT:
            rest = list(_slowly(stream, member, read + len(packed), text))
            text += sum(map(len, rest))
            damage.note("corrupt-gzip", f"byte {read} of the compressed file, {text} of the text")
            yield from rest
            return
        read += len(packed)
        text += len(out)
        if text > _BOMB_BYTES and text > read * _MOST_EXPANSION:
            raise InputError(
                f"the compressed file expands more than {_MOST_EXPANSION} times, which no trace does",
                slug="gzip-bomb",
                hint="decompress it yourself and give the plain file if you trust it",
            )
        yield out
        if step:
            step(read, text)
        packed = b""
        if inflate.eof:
            packed = inflate.unused_data.lstrip(b"\0")
            member, text_of_member = read - len(packed), 0
            if packed and not packed.startswith(_GZIP):
                damage.note("trailing-bytes", f"byte {member} of the compressed file")
                return
            text -= text_of_member
            inflate = isal_zlib.decompressobj(31)
            fresh = not packed
        else:
            fresh = False
        packed = packed or stream.read(_PACKED)
        if not packed and not fresh:
            damage.note("cut-gzip", f"byte {read} of the compressed file, {text} of the text")


def _slowly(stream: BinaryIO, member: int, until: int, delivered: int) -> Iterator[bytes]:
    """The text of a corrupt member beyond the first `delivered` bytes, byte by byte up to the fault.

    The fast decoder gives nothing of the piece in which it fails; zlib, fed byte by byte, gives all before the fault.
    """
    if not stream.seekable():
        return
    stream.seek(member)
    inflate = zlib.decompressobj(31)
    got = 0
    for at in range(member, until, _PACKED):
        packed = stream.read(min(_PACKED, until - at))
        last = at + _PACKED >= until
        for start in range(0, len(packed), 1 if last else _PACKED):
            try:
                out = inflate.decompress(packed[start : start + (1 if last else _PACKED)])
            except zlib.error:
                return
            got += len(out)
            if got > delivered:
                yield out[max(0, len(out) - (got - delivered)) :]


def _gathered(chunks: Iterator[bytes], least: int) -> Iterator[bytes]:
    """Chunks of any size joined to pieces of at least so many bytes."""
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= least:
            yield b"".join(waiting)
            waiting, size = [], 0
    if size:
        yield b"".join(waiting)


def _transcoded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """UTF-8 without a byte order mark, from UTF-8 or UTF-16 with one."""
    first = next(pieces, b"")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder: Any = codecs.getincrementaldecoder("utf-16")(errors="replace")
        yield decoder.decode(first).encode("utf-8", "replace")
        for piece in pieces:
            yield decoder.decode(piece).encode("utf-8", "replace")
        return
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from pieces
