"""Makes untrusted text (names in traces, paths, hosts) safe to print: nothing in it controls a
terminal.
"""

import io
import re
import sys
from typing import TextIO

# Control characters, and the invisible ones that reorder or hide text.
_INVISIBLE = "\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
UNSAFE = re.compile("[\x00-\x1f" + _INVISIBLE)
"""Matches one character that is escaped."""
_UNSAFE_IN_LINES = re.compile("[\x00-\x08\x0b-\x1f" + _INVISIBLE)  # without tabs and newlines


def sanitize(text: str) -> str:
    r"""Returns the text in one line, with every control or invisible character escaped (`\x1b`)."""
    return UNSAFE.sub(_escape_character, text)


def _escape_character(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class SanitizedStream(io.TextIOWrapper):
    """A standard stream that escapes all characters that could control a terminal, whoever writes
    them.

    Args:
        stream: The stream as Python created it.

    Attributes:
        steering: That stream, for intended control sequences: colours, a line that is rewritten.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        # Characters that the terminal's encoding lacks, and undecodable bytes of file names, are
        # escaped instead of raising.
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
        """Write the sanitized text; returns the number of characters before sanitizing."""
        super().write(_UNSAFE_IN_LINES.sub(_escape_character, text))
        return len(text)


def unwrap_stream(stream: TextIO) -> TextIO:
    """Returns the stream under a `SanitizedStream`, or the stream itself."""
    return stream.steering if isinstance(stream, SanitizedStream) else stream


def sanitize_standard_streams() -> None:
    """Wrap stdout and stderr, so that only writes to their `steering` can control a terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, SanitizedStream(stream))
