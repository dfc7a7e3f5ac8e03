"""Text that every file and every library takes.

Names of files and hosts need not be UTF-8, and JSON can hold halves of surrogate pairs. Python keeps both as lone
surrogates, which neither UTF-8 nor Arrow has. Where such text comes in, or goes out, they become U+FFFD.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_LONE = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """The text without lone surrogates."""
    return text if text.isascii() else _LONE.sub("\ufffd", text)


def clean_json(value: Any) -> tuple[Any, int]:
    """A JSON value without lone surrogates, and how many texts had any. Keys that become equal: the last one counts."""
    changed = 0

    def cleaned(inner: Any) -> Any:
        nonlocal changed
        if isinstance(inner, str):
            made = clean(inner)
            changed += made != inner
            return made
        if isinstance(inner, (dict, list, tuple)):
            inner = {cleaned(key): item for key, item in inner.items()} if isinstance(inner, dict) else list(inner)
            waiting.append(inner)
        return inner

    # Files of strangers nest deeper than calls do.
    waiting: list[Any] = []
    whole = cleaned(value)
    while waiting:
        holder = waiting.pop()
        for key, item in holder.items() if isinstance(holder, dict) else enumerate(holder):
            holder[key] = cleaned(item)
    return whole, changed


def encoded(text: str) -> bytes:
    """The text as UTF-8."""
    return clean(text).encode("utf-8")


def json_line(value: Any) -> bytes:
    """The value as JSON in UTF-8; integers stay integers."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(clean_json(msgspec.to_builtins(value))[0])
