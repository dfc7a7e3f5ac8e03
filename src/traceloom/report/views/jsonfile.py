"""The document as JSON text."""

from __future__ import annotations

from collections.abc import Mapping

from traceloom.plain_text import json_line


def encode(document: Mapping[str, object]) -> bytes:
    """One line of UTF-8 JSON with a line end; integers stay integers."""
    return json_line(document) + b"\n"
