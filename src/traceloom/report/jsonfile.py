"""The document as JSON text."""

from __future__ import annotations

from typing import Any

import msgspec


def encode(document: dict[str, Any]) -> bytes:
    """One line of UTF-8 JSON with a line end; integers stay integers."""
    return msgspec.json.encode(document) + b"\n"
