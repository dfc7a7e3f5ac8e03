"""Files that tell of memory alone: which kind each is, by its content, and which lie beside a recorded trace."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

from traceloom.errors import InputError, other_version, unreadable
from traceloom.files import read_small
from traceloom.model import Trace
from traceloom.read.allocations_file import FORMAT as ALLOCATIONS_FORMAT
from traceloom.read.sources import head_of

SNAPSHOT, TIMELINE, OUT_OF_MEMORY, ALLOCATIONS = "snapshot", "timeline", "out of memory", "allocations"
OOM_FORMAT = "traceloom-out-of-memory"
MOST_OOM_BYTES = 1 << 26
_ROWS = re.compile(rb"\[\s*\[\s*-?\d+\s*,\s*-?\d+")
_STEM = re.compile(r"(rank\d+(?:-pid\d+)?|pid\d+)")


def kind_of(path: Path) -> str | None:
    """`SNAPSHOT`, `TIMELINE`, `OUT_OF_MEMORY` or `ALLOCATIONS`; None for anything else (a trace, no file)."""
    head = head_of(path)
    if head is None:
        return None
    if head.startswith(b"\x80"):
        return SNAPSHOT
    if _ROWS.match(head.lstrip()):
        return TIMELINE
    if head.lstrip().startswith(b"{") and OOM_FORMAT.encode() in head[:200]:
        return OUT_OF_MEMORY
    if head.lstrip().startswith(b"{") and ALLOCATIONS_FORMAT.encode() in head[:200]:
        return ALLOCATIONS
    return None


def read_out_of_memory(path: Path) -> dict[str, Any]:
    """The document that a run leaves when memory runs out.

    Raises:
        InputError: `unreadable`; `damaged-memory-report`: it is cut, too large, or something else;
            `other-version`.
    """
    try:
        text = read_small(path, MOST_OOM_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _damaged(path, f"it has more than {MOST_OOM_BYTES // 10**6} MB") from error
        raise unreadable(path, error) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "it is cut, or no JSON") from error
    if not isinstance(document, dict) or document.get("format") != OOM_FORMAT:
        raise _damaged(path, f"its format is not `{OOM_FORMAT}`")
    version = document.get("version")
    if version != 1:
        raise other_version("report on memory", version, 1, path)
    return document


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"the report on memory cannot be read: {why}", slug="damaged-memory-report", where=str(path))


def whole(value: Any) -> int | None:
    """An integer that a column can hold; None for anything else."""
    return value if type(value) is int and abs(value) < 1 << 62 else None


def rank_of(path: Path) -> int | None:
    """The rank in a file's name, as the recorder writes it."""
    match = re.match(r"rank(\d+)", path.name)
    return int(match[1]) if match else None


def beside(trace: Trace, ending: str) -> Path | None:
    """The file of the same process with this ending (`.memory.pickle`, `.oom.json`) in the trace's capture."""
    entry = trace.meta.capture
    if entry is None or trace.meta.path in ("", "-"):
        return None
    trace_path = Path(trace.meta.path)
    name = entry.get("name")
    stem = name if isinstance(name, str) and _STEM.fullmatch(name) else None
    if stem is None:
        match = _STEM.match(trace_path.name)
        stem = match[1] if match else None
    path = trace_path.parent / f"{stem}{ending}" if stem else None
    return path if path is not None and path.is_file() else None
