"""PyTorch's `memory_timeline` files: how much each category of memory took over time.

Two kinds are written by `torch.profiler.profile.export_memory_timeline`: `*.raw.json.gz`, a row `[time, action, bytes,
category]` per event, where the time in ns is -1 for what was there before; and `*.json`, a pair of times (microseconds)
and levels by category.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from traceloom.array_types import Ints
from traceloom.errors import InputError
from traceloom.packed import UnpackedFile, open_file

CATEGORIES = (
    "parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "autograd_detail", "unknown",
)  # fmt: skip
ACTIONS = {1: "preexisting", 2: "create", 3: "increment_version", 4: "destroy"}
PREEXISTING, CREATE, INCREMENT_VERSION, DESTROY = ACTIONS
MOST_BYTES = 1 << 30  # of text
_LARGEST = 1 << 62


@dataclass(frozen=True)
class MemoryTimeline:
    """Levels of memory by category; not which block they are.

    Attributes:
        path: The file.
        raw: Whether the file tells single events.
        time_ns: Unix time of each row, never decreasing; shape (rows,). What was there before has the time of the first
            event after it.
        levels: Bytes of each category (`CATEGORIES`) after each row, shape (8, rows).
        created: How many allocations were told; 0 where the file tells levels alone.
        destroyed: How many frees.
        before: Rows about what was there before, at the start.
    """

    path: str
    raw: bool
    time_ns: Ints
    levels: Ints
    created: int
    destroyed: int
    before: int


class _TimelineFile(UnpackedFile):
    """The unpacked bytes of a timeline."""

    MOST_EXPANSION = 100  # numbers in text become ten times smaller
    BOMB_BYTES = 1 << 24


def read_timeline(path: str | Path) -> MemoryTimeline:
    """Read either kind, plain or gzip.

    Raises:
        InputError: `unreadable`, `gzip-bomb`; `not-a-memory-timeline`: cut, no JSON, or other rows.
    """
    with open_file(path) as stream:
        file = _TimelineFile(stream)
        text = file.whole(MOST_BYTES, "timeline", path)
    if file.damage:
        raise _bad(path, "its gzip is cut or damaged")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "it is cut, or no JSON") from error
    return timeline_of(document, str(path))


def timeline_of(document: Any, path: str) -> MemoryTimeline:
    """The timeline in a JSON document; see `read_timeline`."""
    if not isinstance(document, list) or not document:
        raise _bad(path, "it holds no list of rows")
    if len(document) == 2 and all(isinstance(part, list) and part for part in document) and _are_rows(document[1], 9):
        times, sizes = document
        if len(times) != len(sizes) or not _are_rows([times], len(times)):
            raise _bad(path, "it has other numbers of times and of levels")
        if max(abs(value) for value in times) > _LARGEST // 1000:
            raise _bad(path, "its times are no microseconds")
        time = np.array(times, dtype=np.int64) * 1000
        levels = np.array(sizes, dtype=np.int64).T[1:]
        order = np.argsort(time, kind="stable")
        return MemoryTimeline(path, False, time[order], levels[:, order], 0, 0, 0)
    if not _are_rows(document, 4):
        raise _bad(path, "expected rows of [time, action, bytes, category]")
    rows = np.array(document, dtype=np.int64)
    time, action, size, category = rows.T
    if (category < 0).any() or (category >= len(CATEGORIES)).any():
        raise _bad(path, f"categories are numbered 0 to {len(CATEGORIES) - 1}, found {int(category.max())}")
    if not np.isin(action, list(ACTIONS)).all():
        raise _bad(path, "actions are numbered 1 to 4")
    if np.abs(size.astype(np.float64)).sum() >= _LARGEST:
        raise _bad(path, "its sizes are larger than any memory")
    change = np.zeros((len(CATEGORIES), rows.shape[0]), dtype=np.int64)
    early = time < 0
    order = np.argsort(np.where(early, -1, time), kind="stable")
    change[category[order], np.arange(order.size)] = size[order]
    first = int(time[~early].min()) if (~early).any() else 0
    return MemoryTimeline(
        path, True, np.where(early, first, time)[order], np.cumsum(change, axis=1),
        int((action == CREATE).sum()), int((action == DESTROY).sum()), int(early.sum()),
    )  # fmt: skip


def _are_rows(rows: Any, width: int) -> bool:
    """Whether these are lists of so many integers."""
    return isinstance(rows, list) and all(
        isinstance(row, list)
        and len(row) == width
        and all(type(value) is int and -_LARGEST < value < _LARGEST for value in row)
        for row in rows
    )


def _bad(path: str | Path, why: str) -> InputError:
    return InputError(
        f"the memory timeline cannot be read: {why}",
        slug="not-a-memory-timeline",
        where=str(path),
        hint="write it with profiler.export_memory_timeline(path) as .raw.json.gz or .json",
    )
