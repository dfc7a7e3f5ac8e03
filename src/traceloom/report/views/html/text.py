"""Texts of strangers in the page."""

from __future__ import annotations

from html import escape

from traceloom.harmless import harmless


def text(value: object) -> str:
    """Any text as HTML: escaped, control characters spelled out."""
    return escape(harmless(str(value)))
