"""Frames shared by all threads and ranks, as both formats need them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

Key = tuple[str, str | None, int | None]
NO_LAUNCH: Key = ("(launch not recorded)", None, None)


@dataclass(slots=True)
class Frames:
    """Distinct frames in the order in which they are first asked for: name, file, line."""

    keys: list[Key] = field(default_factory=list)
    _number: dict[Key, int] = field(default_factory=dict)

    def number(self, key: Key) -> int:
        """The frame's number, from 0."""
        index = self._number.get(key)
        if index is None:
            index = self._number[key] = len(self.keys)
            self.keys.append(key)
        return index

    def numbers(self, table: pl.DataFrame) -> list[int]:
        """The numbers of rows with the columns name, file, line."""
        return [self.number(key) for key in table.select("name", "file", "line").iter_rows()]


def place(rank: int | None, several: bool) -> str:
    """What to put before the name of a thread: its rank, where there are several."""
    return "" if not several else "rank ?: " if rank is None else f"rank {rank}: "


def first_of(session: Any) -> int:
    """Start of the earliest event of a session, from which times are counted; 0 without events."""
    return min((trace.start_ns for trace in session.traces if trace.events.height), default=0)
