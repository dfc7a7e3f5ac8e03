"""The document as JSON text."""

from __future__ import annotations

from typing import Any

from traceloom.plain_text import json_line


def encode(document: dict[str, Any]) -> bytes:
    """One line of UTF-8 JSON with a line end; integers stay integers."""
    return json_line(document) + b"\n"
