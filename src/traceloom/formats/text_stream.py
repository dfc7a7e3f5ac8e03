"""Reads the text of an input in pieces: encodings, gzip, windows."""

import codecs
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from traceloom.formats.resync import DamageLog
from traceloom.system.gzip_stream import GzipStream, ProgressCallback, open_file

_BATCH_BYTES = 1 << 20  # bytes of text decompressed ahead

TextObserver = Callable[[bytes], None]


class _TraceFile(GzipStream):
    READ = 1 << 16
    PIECE = 1 << 19  # the size that fits the processor's caches decodes fastest
    MOST_EXPANSION = 250  # real traces stay below 60
    BOMB_BYTES = 1 << 28


def open_input(path: str | Path) -> BinaryIO:
    """Opens a file, or standard input for `-`.

    Raises:
        InputError: `unreadable` (missing, forbidden, not a file).
    """
    return sys.stdin.buffer if str(path) == "-" else open_file(path)


def read_text_pieces(
    stream: BinaryIO,
    damage: DamageLog,
    step: ProgressCallback | None = None,
    observer: TextObserver | None = None,
) -> Iterator[bytes]:
    """Yields the decompressed text in pieces; decompression runs one batch ahead in a thread, in
    parallel with decoding.

    Args:
        stream: The file.
        damage: Records a cut or corrupt gzip; the text before the fault is yielded nevertheless.
        step: Called with (bytes read from the file, bytes of text so far).
        observer: Called with all text in order, some of it long before it is yielded; in that
            thread if there is one.

    Raises:
        InputError: `gzip-bomb`, where the text is disproportionately large.
    """
    file = _TraceFile(stream, step)
    chunks = _decompress(file, damage)
    if not file.packed:
        yield from _observe_pieces(_convert_to_utf8(_join_chunks(chunks, file.PIECE)), observer)
        return
    batches = _observe_pieces(_convert_to_utf8(_join_chunks(chunks, _BATCH_BYTES)), observer)
    with ThreadPoolExecutor(1, thread_name_prefix="traceloom-text") as pool:
        ahead = pool.submit(next, batches, None)
        while (batch := ahead.result()) is not None:
            ahead = pool.submit(next, batches, None)
            for offset in range(0, len(batch), file.PIECE):
                yield batch[offset : offset + file.PIECE]


def read_first_pieces(
    stream: BinaryIO, damage: DamageLog, observer: TextObserver | None = None
) -> Iterator[bytes]:
    """As `read_text_pieces`, for reading only the beginning: no more is decompressed than
    requested.
    """
    yield from _observe_pieces(_convert_to_utf8(_decompress(_TraceFile(stream), damage)), observer)


def _observe_pieces(chunks: Iterator[bytes], observer: TextObserver | None) -> Iterator[bytes]:
    for chunk in chunks:
        if observer:
            observer(chunk)
        yield chunk


def _decompress(file: GzipStream, damage: DamageLog) -> Iterator[bytes]:
    yield from file
    if file.damage:
        text = "" if file.damage == "trailing-bytes" else f", {file.given} of the text"
        damage.note(file.damage, f"byte {file.read} of the compressed file{text}")


def _join_chunks(chunks: Iterator[bytes], min_bytes: int) -> Iterator[bytes]:
    """Joins chunks of any size to pieces of at least `min_bytes`."""
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= min_bytes:
            yield b"".join(waiting)
            waiting, size = [], 0
    if size:
        yield b"".join(waiting)


def _convert_to_utf8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields UTF-8 without a byte order mark, from UTF-8 or UTF-16 with one."""
    first = next(chunks, b"")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder: Any = codecs.getincrementaldecoder("utf-16")(errors="replace")
        yield decoder.decode(first).encode("utf-8", "replace")
        for chunk in chunks:
            yield decoder.decode(chunk).encode("utf-8", "replace")
        return
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from chunks


_BLANK = re.compile(rb"[\s,]*")


class TextBuffer:
    """Buffer and position of readers of large texts.

    Attributes:
        size: Bytes of text read so far.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.size = 0
        self._pieces = chunks
        self._text = b""  # text that is read and not yet consumed
        self._base = 0  # offset of `_text` in the whole text
        self._ended = False

    def _fill(self, count: int) -> bool:
        """Buffers at least `count` bytes, unless the text ends before; False at its end."""
        parts, have = [self._text] if self._text else [], len(self._text)
        while have < count and not self._ended:
            chunk = next(self._pieces, None)
            if chunk is None:
                self._ended = True
                break
            parts.append(chunk)
            have += len(chunk)
            self.size += len(chunk)
        self._text = parts[0] if len(parts) == 1 else b"".join(parts)
        return have >= count

    def _skip(self, count: int) -> None:
        self._text = self._text[count:]
        self._base += count

    def _skip_blank(self) -> None:
        if blank := _BLANK.match(self._text):
            self._skip(blank.end())

    def _last_boundary(self, between: re.Pattern[bytes], ahead: int) -> int | None:
        """Returns the end of the last whole entry in the buffer, after its bracket.

        Args:
            between: Matches between two entries, from the bracket of the first.
            ahead: Max bytes of a match.
        """
        low = len(self._text)
        while low > 0:
            high, low = low, max(0, low - (1 << 14))
            last = None
            for last in between.finditer(self._text, low, min(len(self._text), high + ahead)):  # noqa: B007
                pass
            if last is not None and last.start() > 0:
                return last.start() + 1
        return None


Places = NDArray[np.int64]

_BRACE = ord("}")
_WHITE = np.isin(np.arange(256), list(b" \t\r\n"))
_MAX_BLANKS = 64  # max white space between two entries; beyond it, the decoder locates entries


class BraceIndex:
    """Positions of closing braces in a text, found as it is read; those before `start` are not
    needed.
    """

    def __init__(self, start: int = 0) -> None:
        self._begin = start
        self._seen = 0
        self._found: deque[Places] = deque()

    def scan(self, text: bytes) -> None:
        if self._seen + len(text) > self._begin:
            self._found.append(
                np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == _BRACE) + self._seen
            )
        self._seen += len(text)

    def between(self, low: int, high: int) -> Places:
        """Returns the positions from `low` up to `high`, relative to `low`; earlier ones are
        forgotten.
        """
        while self._found and (not self._found[0].size or self._found[0][-1] < low):
            self._found.popleft()
        parts = list(
            takewhile(lambda places: not places.size or places[0] < high, tuple(self._found))
        )
        if not parts:
            return np.zeros(0, dtype=np.int64)
        positions = parts[0] if len(parts) == 1 else np.concatenate(parts)
        first, end = np.searchsorted(positions, (low, high))
        return positions[first:end] - low


def locate_entries(text: bytes, count: int, braces: Places) -> tuple[Places, Places]:
    """Returns where each of the `count` entries begins in the text, and their lengths.

    All boundaries are among the apparent ones, so if their number is equal they are the boundaries.

    Args:
        text: Decodable entries separated by commas; it begins with the first.
        count: Number of entries.
        braces: Positions of `}` in the text.
    """
    if not count:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    # A bracket closes and, after a comma, the next one opens.
    characters, size = np.frombuffer(text, dtype=np.uint8), len(text.rstrip())
    entry_ends = starts = braces[braces < size - 1]
    for sign in b",{":
        starts = starts + 1
        for _ in range(
            _MAX_BLANKS
        ):  # skip to the next character that is not white space; there is one
            white = _WHITE[characters[starts]]
            if not white.any():
                break
            starts = starts + white
        else:
            return _locate_by_decoding(text)
        fits = characters[starts] == sign
        entry_ends, starts = entry_ends[fits], starts[fits]
    if len(entry_ends) != count - 1:
        return _locate_by_decoding(text)
    starts, entry_ends = np.concatenate([[0], starts]), np.concatenate([entry_ends + 1, [size]])
    return starts, entry_ends - starts


def _locate_by_decoding(text: bytes) -> tuple[Places, Places]:
    """As `locate_entries`, by decoding each entry's raw bytes: slow, but correct for any content of
    entries.
    """
    raws = msgspec.json.decode(b"[" + text + b"]", type=list[msgspec.Raw])
    starts, lengths, position = [], [], 0
    for raw in raws:
        entry = bytes(raw)
        position = text.index(entry, position)
        starts.append(position)
        lengths.append(len(entry))
        position += len(entry)
    return np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)
