"""Where the entries of a list stand in a text that was decoded."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

import msgspec
import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]

_BRACE = ord("}")
_WHITE = np.isin(np.arange(256), list(b" \t\r\n"))
_MOST_BLANKS = 64  # between two entries; with more, the decoder is asked


class Braces:
    """Where closing braces stand in a text, found as it is read; before `begin` nobody asks."""

    def __init__(self, begin: int = 0) -> None:
        self._begin = begin
        self._seen = 0
        self._found: deque[Places] = deque()

    def look(self, text: bytes) -> None:
        """The next part of the text."""
        if self._seen + len(text) > self._begin:
            self._found.append(np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == _BRACE) + self._seen)
        self._seen += len(text)

    def between(self, low: int, high: int) -> Places:
        """The places from `low` up to `high`, counted from `low`; those before are forgotten."""
        while self._found and (not self._found[0].size or self._found[0][-1] < low):
            self._found.popleft()
        parts = list(takewhile(lambda places: not places.size or places[0] < high, tuple(self._found)))
        if not parts:
            return np.zeros(0, dtype=np.int64)
        places = parts[0] if len(parts) == 1 else np.concatenate(parts)
        first, end = np.searchsorted(places, (low, high))
        return places[first:end] - low


def places(text: bytes, count: int, braces: Places) -> tuple[Places, Places]:
    """Where each of the `count` entries begins in the text, and their lengths.

    All boundaries are among the places that look like one, so an equal number of them are the boundaries.

    Args:
        text: Entries between commas, which could be decoded; it begins with the first.
        count: How many there are.
        braces: Where `}` stands in the text.
    """
    if not count:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    # Where a bracket closes and, behind a comma, the next one opens.
    signs, size = np.frombuffer(text, dtype=np.uint8), len(text.rstrip())
    ends = begins = braces[braces < size - 1]
    for sign in b",{":
        begins = begins + 1
        for _ in range(_MOST_BLANKS):  # the next sign that is not white; there is one
            white = _WHITE[signs[begins]]
            if not white.any():
                break
            begins = begins + white
        else:
            return _by_decoding(text)
        fits = signs[begins] == sign
        ends, begins = ends[fits], begins[fits]
    if len(ends) != count - 1:
        return _by_decoding(text)
    begins, ends = np.concatenate([[0], begins]), np.concatenate([ends + 1, [size]])
    return begins, ends - begins


def _by_decoding(text: bytes) -> tuple[Places, Places]:
    """The same by asking the decoder for each entry's own bytes: slow, whatever stands inside the entries."""
    raws = msgspec.json.decode(b"[" + text + b"]", type=list[msgspec.Raw])
    begins, lengths, at = [], [], 0
    for raw in raws:
        piece = bytes(raw)
        at = text.index(piece, at)
        begins.append(at)
        lengths.append(len(piece))
        at += len(piece)
    return np.array(begins, dtype=np.int64), np.array(lengths, dtype=np.int64)
