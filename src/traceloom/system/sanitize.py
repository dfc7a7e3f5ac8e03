"""Text of strangers (names in traces, paths, hosts) that can only be read: nothing in it steers a
terminal.
"""

from __future__ import annotations

import io
import re
import sys
from typing import TextIO

# Control characters, and the invisible ones that reorder or hide text.
_INVISIBLE = "\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
UNSAFE = re.compile("[\x00-\x1f" + _INVISIBLE)
"""What is spelled out, one character."""
_UNSAFE_IN_LINES = re.compile("[\x00-\x08\x0b-\x1f" + _INVISIBLE)  # without tabs and ends of lines


def sanitize(text: str) -> str:
    r"""The text in one line, every control or invisible character spelled out (`\x1b`)."""
    return UNSAFE.sub(_escape_character, text)


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class SanitizedStream(io.TextIOWrapper):
    """A standard stream that spells out whatever could steer a terminal, whoever writes it.

    Args:
        stream: The stream as Python made it.

    Attributes:
        steering: That stream, for who means to steer: colours, a line that is written again.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        # A letter that the terminal's encoding lacks, or a file name that is no text, is spelled,
        # not a failure.
        stream.reconfigure(errors="backslashreplace")
        super().__init__(
            stream.buffer,
            stream.encoding,
            "backslashreplace",
            write_through=True,
            line_buffering=stream.line_buffering,
        )
        self.steering = stream

    def write(self, text: str) -> int:
        """Write the text, made harmless; returns the number of characters that were asked for."""
        super().write(_UNSAFE_IN_LINES.sub(_escape_character, text))
        return len(text)


def unwrap_stream(stream: TextIO) -> TextIO:
    """The stream under a `HarmlessStream`, or the stream itself."""
    return stream.steering if isinstance(stream, SanitizedStream) else stream


def sanitize_standard_streams() -> None:
    """From now on, nothing that this process prints steers a terminal unless it asks for
    `steering`.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, SanitizedStream(stream))
