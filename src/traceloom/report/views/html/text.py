"""Texts of strangers in the page."""

from __future__ import annotations

import re
from html import escape

from traceloom.harmless import harmless


def text(value: object) -> str:
    """Any text as HTML: escaped, control characters spelled out."""
    return escape(harmless(str(value)))


def prose(value: object) -> str:
    """A sentence as HTML: as `text`, with what stands between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text(value))
