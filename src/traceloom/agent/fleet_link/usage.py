"""Device use per job and minute, in whole milliseconds, as the fleet adds it up.

Minutes are of the service's clock. A tick that spans two of them is split; rows of a device and
minute never add up to more than 60,000 ms, and to less only if the agent did not run.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from traceloom.agent.database import lend_database
from traceloom.agent.fleet_link.protocol import (
    MAX_MINUTES,
    MAX_NAME_CHARS,
    UsageRow,
    UsageState,
)
from traceloom.agent.ownership.model import split_by_weights
from traceloom.agent.topline import JobDeviceTime
from traceloom.errors import InputError

LOG = logging.getLogger("traceloom.agent")
MINUTE_MS = 60_000
VERSION = 1
_SCHEMA = "CREATE TABLE IF NOT EXISTS minutes (minute INTEGER PRIMARY KEY, rows BLOB NOT NULL)"
_MAX_SENT_BYTES = 2 << 20  # of minutes in a heartbeat, but at least one minute
_MAX_WAITING_MINUTES = 2 * 24 * 60  # unacknowledged minutes; then the oldest are dropped


class _UsageKey(NamedTuple):
    """The key of a row."""

    device: str
    job: str
    state: UsageState


@dataclass(slots=True)
class _Amounts:
    """The sums of a row; None: a part of it is unknown."""

    ms: int = 0
    joules: float | None = 0.0
    flops_low: float | None = 0.0
    flops_high: float | None = 0.0

    def add(self, ms: int, time: JobDeviceTime) -> None:
        """Add `ms` of a tick, with the corresponding part of its measurements."""
        part = ms / (time.busy_ms + time.idle_ms + time.unknown_ms)
        low, high = time.flops or (None, None)
        self.ms += ms
        self.joules = _add_amount(self.joules, time.joules, part)
        self.flops_low = _add_amount(self.flops_low, low, part)
        self.flops_high = _add_amount(self.flops_high, high, part)


def _add_amount(total: float | None, amount: float | None, part: float) -> float | None:
    return None if total is None or amount is None else total + amount * part


class UsageAccumulator:
    """Adds up ticks into minutes. Used from the agent's loop only."""

    def __init__(self) -> None:
        self._minutes: dict[int, dict[_UsageKey, _Amounts]] = {}
        self._bytes: dict[tuple[int, str], float] = {}  # (minute, job) -> bytes read
        self._first = 0  # first open minute; earlier ones were taken
        self.dropped_ms = 0  # device time in minutes already taken, or beyond their 60,000 ms

    def add(
        self, end_ns: int, times: Iterable[JobDeviceTime], input_bytes: Mapping[str, float]
    ) -> None:
        """Add a tick.

        Args:
            end_ns: Its end, on the service's clock.
            times: Device time of jobs; those of one device add up to the length of the tick.
            input_bytes: Job -> bytes that it read in the tick, if known.
        """
        times_by_device: dict[str, list[JobDeviceTime]] = defaultdict(list)
        for time in times:
            times_by_device[time.device].append(time)
        spans: list[tuple[int, int]] = []
        for device_times in times_by_device.values():
            spent = [
                ms for time in device_times for ms in (time.busy_ms, time.idle_ms, time.unknown_ms)
            ]
            spans = _split_at_minutes(end_ns // 1_000_000, sum(spent))
            for minute, length in spans:
                parts = split_by_weights(length, spent)  # no part exceeds its rest in `spent`
                spent = [ms - part for ms, part in zip(spent, parts, strict=True)]
                self._put(minute, device_times, parts)
        total_ms = sum(length for _, length in spans)
        for job, amount in input_bytes.items():
            for minute, length in spans:
                if minute >= self._first:
                    self._bytes[minute, job] = (
                        self._bytes.get((minute, job), 0.0) + amount * length / total_ms
                    )

    def _put(self, minute: int, times: list[JobDeviceTime], parts: list[int]) -> None:
        """Book parts (busy, idle, unknown of each job) of a device on a minute, up to its 60,000
        ms.
        """
        uses = self._minutes.setdefault(minute, {}) if minute >= self._first else {}
        booked = sum(amounts.ms for use, amounts in uses.items() if use.device == times[0].device)
        free_ms = MINUTE_MS - booked if minute >= self._first else 0
        if sum(parts) > free_ms:
            self.dropped_ms += sum(parts) - free_ms
            parts = split_by_weights(free_ms, parts)
        for time, *state_parts in zip(times, parts[0::3], parts[1::3], parts[2::3], strict=True):
            idle: UsageState = "unallocated" if time.job is None else "idle-allocated"
            states: tuple[UsageState, ...] = ("busy", idle, "unreachable")
            for state, ms in zip(states, state_parts, strict=True):
                if ms:
                    uses.setdefault(_UsageKey(time.device, time.job or "", state), _Amounts()).add(
                        ms, time
                    )

    def take(self, now_ns: int, models: Mapping[str, str]) -> dict[int, list[UsageRow]]:
        """Remove and return the minutes that have ended by the service's clock.

        Args:
            now_ns: Current time.
            models: Device -> its model.
        """
        self._first = max(self._first, now_ns // 1_000_000 // MINUTE_MS)
        ended = sorted(minute for minute in self._minutes if minute < self._first)
        rows = {minute: list(self._rows(minute, models)) for minute in ended}
        self._bytes = {key: amount for key, amount in self._bytes.items() if key[0] >= self._first}
        return rows

    def _rows(self, minute: int, models: Mapping[str, str]) -> Iterator[UsageRow]:
        uses = self._minutes.pop(minute)
        device_ms: dict[tuple[str, str], int] = defaultdict(int)
        weights: dict[str, list[float]] = defaultdict(list)
        for use, amounts in uses.items():
            device_ms[use.job, use.device] += amounts.ms
        for use, amounts in uses.items():
            weights[use.job].append(amounts.ms / device_ms[use.job, use.device])
        read = {  # split equally over the devices, as the actual split is unknown
            job: iter(split_by_weights(round(self._bytes[minute, job]), parts))
            for job, parts in weights.items()
            if (minute, job) in self._bytes
        }
        for use, amounts in uses.items():
            yield UsageRow(
                minute=minute,
                device=use.device,
                device_model=models.get(use.device, ""),
                job=use.job[:MAX_NAME_CHARS],
                state=use.state,
                device_ms=amounts.ms,
                busy_ms=amounts.ms if use.state == "busy" else 0,
                energy_mj=None if amounts.joules is None else round(1000 * amounts.joules),
                flops_low=amounts.flops_low,
                flops_high=amounts.flops_high,
                input_bytes=min(next(read[use.job]), 2**63 - 1) if use.job in read else None,
            )


def _split_at_minutes(end: int, length: int) -> list[tuple[int, int]]:
    """Split a span of milliseconds at minutes: (minute, length) of each piece."""
    spans = []
    start = end - length
    while start < end:
        until = min(end, (start // MINUTE_MS + 1) * MINUTE_MS)
        spans.append((start // MINUTE_MS, until - start))
        start = until
    return spans


class UsageOutbox:
    """Unacknowledged minutes on disk (SQLite); blocks, so it is called in a thread.

    Args:
        path: The file; its directory is created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0  # minutes that expired unacknowledged, or could not be written
        self.last_error = ""  # why the last write failed
        self._lend = partial(lend_database, path, _SCHEMA, VERSION, "database of usage")

    def put(self, minutes: Mapping[int, list[UsageRow]]) -> None:
        """Keep minutes until they are acknowledged."""
        try:
            with self._lend() as database:
                database.executemany(
                    "INSERT OR REPLACE INTO minutes VALUES (?, ?)",
                    [(minute, msgspec.msgpack.encode(rows)) for minute, rows in minutes.items()],
                )
                retained_query = "SELECT minute FROM minutes ORDER BY minute DESC LIMIT ?"
                self.lost += database.execute(
                    f"DELETE FROM minutes WHERE minute NOT IN ({retained_query})",  # noqa: S608
                    (_MAX_WAITING_MINUTES,),
                ).rowcount
            self.last_error = ""
        except (sqlite3.Error, OSError, InputError) as error:
            self.lost += len(minutes)
            self.last_error = f"{self.path}: {error}"

    def oldest(self) -> list[UsageRow]:
        """Returns the rows of the oldest minutes, as many as fit into a heartbeat.

        Raises:
            InputError: `other-version`: the file has another schema.
            sqlite3.Error, OSError: They cannot be read; a damaged file has been moved away.
        """
        if not self.path.exists():
            return []
        with self._lend() as database:
            minutes = database.execute(
                "SELECT rows FROM (SELECT rows, minute, sum(length(rows)) OVER (ORDER BY minute) AS bytes FROM minutes) "
                "WHERE bytes <= max(?, length(rows)) ORDER BY minute LIMIT ?",
                (_MAX_SENT_BYTES, MAX_MINUTES),
            ).fetchall()
            try:
                return [
                    row
                    for (rows,) in minutes
                    for row in msgspec.msgpack.decode(rows, type=list[UsageRow])
                ]
            except (
                msgspec.DecodeError,
                UnicodeDecodeError,
                RecursionError,
            ) as error:  # SQLite checks no contents
                raise sqlite3.DatabaseError(
                    f"a minute for the fleet is damaged: {error}"
                ) from error

    def acknowledge(self, minute: int) -> None:
        """Delete all minutes up to this one, which the service has stored; raises the errors of
        `oldest`.
        """
        if self.path.exists():
            with self._lend() as database:
                database.execute("DELETE FROM minutes WHERE minute <= ?", (minute,))
