"""All arguments of one event, read again from the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from traceloom.errors import InputError, UsageError
from traceloom.model import Trace
from traceloom.read.damage import Damage
from traceloom.read.repair import mended
from traceloom.read.source import open_input, text_pieces


def arguments(trace: Trace, event: int) -> dict[str, Any]:
    """The `args` of one event as they stand in the file; empty where it has none.

    The file is decompressed up to the event: milliseconds for small files, seconds for gigabytes.

    Args:
        trace: The trace; its file must still be there.
        event: Row of `trace.events`.

    Raises:
        UsageError: `no-such-event`; `no-file` for a trace from standard input.
        InputError: `unreadable`: the file is gone; `changed-file`: it is not what it was when it was read.
    """
    if not 0 <= event < trace.events.height:
        raise UsageError(f"expected an event below {trace.events.height}, got {event}", slug="no-such-event")
    if trace.meta.path == "-":
        raise UsageError("the trace came from standard input, which cannot be read again", slug="no-file")
    offset, length = trace.sources.row(event)[1:]
    text = _stretch(trace.meta.path, offset, length)
    entries = parsed(text)
    name = trace.events["name"][event]
    for entry in entries:
        if str(entry.get("name", "")) == name:
            args = entry.get("args")
            return args if isinstance(args, dict) else {}
    raise InputError(
        f"the file is not what it was when it was read: no `{name[:60]}` at byte {offset}",
        slug="changed-file",
        where=trace.meta.path,
        hint="load it again",
    )


def _stretch(path: str, offset: int, length: int) -> bytes:
    parts, at = [], 0
    with open_input(Path(path)) as stream:
        pieces = text_pieces(stream, Damage())
        for piece in pieces:
            if at + len(piece) > offset:
                parts.append(piece[max(0, offset - at) : offset + length - at])
            at += len(piece)
            if at >= offset + length:
                break
        pieces.close()  # type: ignore[attr-defined]
    return b"".join(parts)


def parsed(text: bytes) -> list[dict[str, Any]]:
    """The entries in a stretch of a file, mended where it is damaged."""
    try:
        entries = json.loads(b"[" + text + b"]", strict=False, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        entries = mended(text)
    return [entry for entry in entries if isinstance(entry, dict)]
