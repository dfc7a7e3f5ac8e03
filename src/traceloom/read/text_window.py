"""The part of a text that is at hand: filled from pieces as it is wanted, given up as it is used."""

from __future__ import annotations

from collections.abc import Iterator


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

    def _leap(self, byte: int) -> None:
        """Go to a byte further on, or to the end, without having all that is before it at hand."""
        while self._base + len(self._text) < byte:
            self._skip(len(self._text))
            if not self._fill(1):
                return
        self._skip(byte - self._base)
