"""The text of an input: plain or gzip, file or standard input, whole or cut, in pieces."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from traceloom.packed import Step, UnpackedFile, open_file
from traceloom.read.damage import Damage

_BATCH = 1 << 20  # bytes of text decompressed ahead

Look = Callable[[bytes], None]


class _TraceFile(UnpackedFile):
    """The unpacked bytes of a trace."""

    READ = 1 << 16
    PIECE = 1 << 19  # what fits the processor's caches is decoded fastest
    MOST_EXPANSION = 250  # real traces stay below 60
    BOMB_BYTES = 1 << 28


def open_input(path: str | Path) -> BinaryIO:
    """The bytes of a file, or of standard input for `-`.

    Raises:
        InputError: `unreadable` (missing, forbidden, no file).
    """
    return sys.stdin.buffer if str(path) == "-" else open_file(path)


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
    file = _TraceFile(stream, step)
    chunks = _unpacked(file, damage)
    if not file.packed:
        yield from _looked_at(_transcoded(_gathered(chunks, file.PIECE)), look)
        return
    batches = _looked_at(_transcoded(_gathered(chunks, _BATCH)), look)
    with ThreadPoolExecutor(1, thread_name_prefix="traceloom-text") as pool:
        ahead = pool.submit(next, batches, None)
        while (batch := ahead.result()) is not None:
            ahead = pool.submit(next, batches, None)
            for at in range(0, len(batch), file.PIECE):
                yield batch[at : at + file.PIECE]


def first_pieces(stream: BinaryIO, damage: Damage, look: Look | None = None) -> Iterator[bytes]:
    """As `text_pieces`, for who wants the beginning only: no more is decompressed than is asked for."""
    yield from _looked_at(_transcoded(_unpacked(_TraceFile(stream), damage)), look)


def _looked_at(pieces: Iterator[bytes], look: Look | None) -> Iterator[bytes]:
    for piece in pieces:
        if look:
            look(piece)
        yield piece


def _unpacked(file: UnpackedFile, damage: Damage) -> Iterator[bytes]:
    yield from file
    if file.damage:
        text = "" if file.damage == "trailing-bytes" else f", {file.given} of the text"
        damage.note(file.damage, f"byte {file.read} of the compressed file{text}")


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
