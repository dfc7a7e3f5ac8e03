"""Memory snapshots of PyTorch's caching allocators, as columns; `traceloom.read.snapshot` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from traceloom.model.frames import schema
from traceloom.model.notice import Notice

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot", "user_defined",
)  # fmt: skip
ENTRIES = schema("device action address bytes time_us stack", {"action": pl.Enum(ACTIONS), "stack": pl.Int32})
"""`address` of an oom: the bytes that were free on the device; `time_us`: Unix time, null in snapshots of older
versions; `stack`: of `stacks`, 0 is none."""
SEGMENTS = schema("device address bytes stream")
BLOCKS = schema("device segment address bytes requested_bytes state stack", {"stack": pl.Int32})
"""`segment`: row of `segments`; `state`: active_allocated, active_pending_free (or active_awaiting_free), inactive."""
_BETWEEN = " < "

Frame = tuple[str, int, str]
"""File, line, function."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot.

    Attributes:
        path: The file.
        entries: `ENTRIES`: the history by device, in the order in which it happened.
        segments: `SEGMENTS`.
        blocks: `BLOCKS`, in the order of addresses within their segment.
        stacks: Call stacks, the innermost frame first; the first one is empty.
        notices: What was left out.
        device_type: What its devices are, as `cuda`, `cpu`.
    """

    path: str
    entries: pl.DataFrame
    segments: pl.DataFrame
    blocks: pl.DataFrame
    stacks: tuple[tuple[Frame, ...], ...]
    notices: tuple[Notice, ...] = ()
    device_type: str = "cuda"


def frame_text(frame: Sequence[Any]) -> str:
    """`file(line): function`, as frames read in traces."""
    file, line, name = frame
    return f"{file}({line}): {name}" if file and file != "??" else str(name)


def is_python(frame: Frame) -> bool:
    """Whether a frame is one of Python, not of C++."""
    return frame[0].endswith((".py", ".pyx")) or frame[0].startswith("<")


def stack_texts(snapshot: Snapshot) -> pl.Series:
    """Each stack as text, the innermost frame first: those of Python, where it has any; null for none."""
    texts = []
    for stack in snapshot.stacks:
        shown = [frame_text(frame) for frame in stack if is_python(frame)] or [frame_text(frame) for frame in stack]
        texts.append(_BETWEEN.join(shown) or None)
    return pl.Series(texts, dtype=pl.String)
