"""The part of a text that is at hand: filled from pieces as it is wanted, given up as it is used."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BLANK = re.compile(rb"[\s,]*")


class TextWindow:
    """What readers of large texts share.

    Attributes:
        size: Bytes of text read so far.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.size = 0
        self._pieces = pieces
        self._text = b""  # what is read and not yet used up
        self._base = 0  # byte of the text at which it begins
        self._ended = False

    def _fill(self, count: int) -> bool:
        """Have `count` bytes at hand, unless the text ends before; False at its end."""
        parts, have = [self._text] if self._text else [], len(self._text)
        while have < count and not self._ended:
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
                break
            parts.append(piece)
            have += len(piece)
            self.size += len(piece)
        self._text = parts[0] if len(parts) == 1 else b"".join(parts)
        return have >= count

    def _skip(self, count: int) -> None:
        self._text = self._text[count:]
        self._base += count

    def _skip_blank(self) -> None:
        """Go behind white space and commas."""
        if blank := _BLANK.match(self._text):
            self._skip(blank.end())

    def _last_boundary(self, between: re.Pattern[bytes], ahead: int) -> int | None:
        """The end of the last whole entry at hand, behind its bracket.

        Args:
            between: Matches between two entries, from the bracket of the first.
            ahead: Bytes that a match may be long.
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
