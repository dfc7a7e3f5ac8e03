"""Damage makers: what happens to trace files in the wild, done on purpose."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

from traceloom.testing.trace_builder import TraceBuilder


def truncated(text: str | bytes, byte: int) -> bytes:
    """The first bytes of a file, as a killed job or a full disk leaves it."""
    return _bytes(text)[:byte]


def cut_gzip(text: str | bytes, share: float = 0.5) -> bytes:
    """A gzip file of which only a share is there."""
    packed = gzip.compress(_bytes(text), 6, mtime=0)
    return packed[: int(len(packed) * share)]


def corrupt_gzip(text: str | bytes, share: float = 0.5) -> bytes:
    """A gzip file with a few wrong bytes in the middle."""
    packed = bytearray(gzip.compress(_bytes(text), 6, mtime=0))
    middle = int(len(packed) * share)
    packed[middle : middle + 8] = b"\xff" * 8
    return bytes(packed)


def in_name(builder: TraceBuilder, event: int, raw: str) -> str:
    """The file with raw text, unescaped, in the name of one entry: quotes, backslashes, control characters."""
    events = builder.events()
    events[event] = re.sub(
        r'("name": ")', lambda match: match.group(1) + raw, events[event], count=1
    )
    return assembled(builder, events)


def with_argument(builder: TraceBuilder, event: int, raw: str) -> str:
    """The file with a bare word (NaN, N/A, Infinity) as the value of an argument of one entry."""
    events = builder.events()
    events[event] = events[event].replace('"args": {', f'"args": {{"blocks per SM": {raw}, ', 1)
    return assembled(builder, events)


def with_duplicate_key(builder: TraceBuilder, event: int) -> str:
    """The file with the name of one entry standing twice; the second counts."""
    events = builder.events()
    events[event] = events[event].replace('"name": ', '"name": "first", "name": ', 1)
    return assembled(builder, events)


def as_list(builder: TraceBuilder) -> str:
    """The file as a bare list of events."""
    return "[\n" + ",\n".join(builder.events()) + "\n]\n"


def metadata_after(builder: TraceBuilder) -> str:
    """The file with all metadata behind `traceEvents`, lists of objects included."""
    tail = "".join(
        f",\n  {json.dumps(key)}: {json.dumps(value)}" for key, value in builder.header().items()
    )
    body = ",\n  ".join(builder.events())
    return f'{{\n  "traceEvents": [\n  {body}\n  ]{tail}\n}}\n'


def assembled(builder: TraceBuilder, events: list[str]) -> str:
    """A file of the builder's metadata and of these entries, as text."""
    head = "".join(
        f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in builder.header().items()
    )
    return "{\n" + head + '  "traceEvents": [\n  ' + ",\n  ".join(events) + "\n  ]\n}\n"


def _bytes(text: Any) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
