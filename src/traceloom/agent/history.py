"""Values over time: ten minutes in memory, a day in SQLite; queries by job, rank, device.

A row on disk is one metric at one instant: the values of all its series as 64-bit floats, NaN for
none, and the id of a layout, which lists the series. Layouts repeat from tick to tick, so a series
costs 8 bytes a tick. Rows are ordered by time; an hour of one metric is one range scan. Clocks that
jump back leave rows among older ones.

A value of a device is attributed to a job by the share that the job's processes had of the device
at that time: values that add up (power, energy, memory, FLOP/s) are split, properties (busy,
clocks, temperatures) are averaged over the job's devices, weighted by its shares. Counters are
returned as rates per second.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import sqlite3
import threading
import time
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise, repeat
from pathlib import Path
from typing import NamedTuple

import msgspec

from traceloom.agent.config import HistorySettings
from traceloom.agent.database import is_corruption, move_damaged_file, open_database
from traceloom.agent.metrics import METRICS, PREFIX, SeriesKey
from traceloom.agent.snapshot import Snapshot
from traceloom.errors import UsageError, nearest

LOG = logging.getLogger("traceloom.agent")
VERSION = 1
_LAYOUTS_IN_MEMORY = 512
_GAP_NS = 60 * 10**9  # values on disk are used only in longer gaps of those in memory
_RETRY_S = 60.0  # after a failed write
_SCHEMA = """
PRAGMA auto_vacuum = INCREMENTAL;
CREATE TABLE IF NOT EXISTS metrics (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS layouts (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, labels BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS ticks (
    at_ns INTEGER NOT NULL, metric INTEGER NOT NULL, layout INTEGER NOT NULL, numbers BLOB NOT NULL,
    PRIMARY KEY (at_ns, metric)
) WITHOUT ROWID;
"""

Labels = tuple[str, ...]


class Points(NamedTuple):
    """A series ordered by time: instants in ns since the epoch, and values."""

    labels: Labels
    times_ns: array[int]
    values: array[float]


class _Recent(NamedTuple):
    at_ns: int
    series: tuple[SeriesKey, ...]
    values: array[float]


class History:
    """Keeps the values of the snapshot.

    `keep` and `recent` belong to the loop; `write` and `query` block and belong to threads.

    Args:
        path: The file; None: in memory only.
        settings: Retention.

    Raises:
        InputError: `other-version`: the file has another schema.
    """

    def __init__(self, path: Path | None, settings: HistorySettings) -> None:
        self.path = path
        self.settings = settings
        self.lost: Counter[str] = Counter()  # reason -> ticks that could not be written
        self.last_error = ""  # why the file cannot be used now
        self._recent: deque[_Recent] = deque()
        self._seen: dict[str, _Recent] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._again = 0.0
        self._metrics: dict[str, int] = {}
        self._layouts: OrderedDict[tuple[Labels, ...], int] = OrderedDict()
        if path is not None:
            self._open()

    def keep(self, host_snapshot: Snapshot, now_ns: int) -> None:
        for name, result in host_snapshot.results.items():
            before = self._seen.get(name)
            if before is not None and before.at_ns == result.at_ns:
                continue
            series = tuple(result.values)
            if before is not None and before.series == series:
                series = before.series  # share one tuple while the series stay the same
            self._seen[name] = _Recent(result.at_ns, series, array("d", result.values.values()))
            self._recent.append(self._seen[name])
        oldest = now_ns - self.settings.recent_seconds * 10**9
        # A clock that jumped ahead and back leaves instants that never expire, so the number is
        # bounded, too.
        max_entries = self.settings.recent_seconds * max(len(self._seen), 1)
        while self._recent and (self._recent[0].at_ns < oldest or len(self._recent) > max_entries):
            self._recent.popleft()

    def recent(self, metric: str, since_ns: int, until_ns: int) -> list[Points]:
        """Returns the series of a metric in memory, with instants from `since_ns` to `until_ns`."""
        series: dict[Labels, tuple[array[int], array[float]]] = {}
        # Tuple of series -> positions of this metric's series.
        columns: dict[int, list[tuple[int, Labels]]] = {}
        for tick in self._recent:
            if since_ns <= tick.at_ns <= until_ns:
                if id(tick.series) not in columns:
                    columns[id(tick.series)] = [
                        (column, labels)
                        for column, (name, labels) in enumerate(tick.series)
                        if name == metric
                    ]
                for column, labels in columns[id(tick.series)]:
                    times, values = series.setdefault(labels, (array("q"), array("d")))
                    times.append(tick.at_ns)
                    values.append(tick.values[column])
        return [sort_by_time(labels, times, values) for labels, (times, values) in series.items()]

    def recent_from_ns(self) -> int:
        """Returns the oldest instant in memory; now if there is none."""
        return min((tick.at_ns for tick in self._recent), default=time.time_ns())

    def write(self, at_ns: int, values: Iterable[tuple[SeriesKey, float]]) -> None:
        """Write one tick to disk.

        Failures are counted in `lost`; the file is retried later.
        """
        with self._lock:
            if self.path is None or self._closed:
                return
            if self._database is None:
                if time.monotonic() < self._again:
                    self.lost[self.last_error] += 1
                    return
                self._open()
                if self._database is None:
                    self.lost[self.last_error] += 1
                    return
            rows_by_metric: dict[str, tuple[list[Labels], list[float]]] = {}
            for (metric, labels), value in values:
                rows, numbers = rows_by_metric.setdefault(metric, ([], []))
                rows.append(labels)
                numbers.append(value)
            try:
                with self._database as database:
                    for metric, (rows, numbers) in rows_by_metric.items():
                        if metric not in self._metrics:
                            database.execute(
                                "INSERT OR IGNORE INTO metrics (name) VALUES (?)", (metric,)
                            )
                            (self._metrics[metric],) = database.execute(
                                "SELECT id FROM metrics WHERE name = ?", (metric,)
                            ).fetchone()
                        content = array("d", numbers).tobytes()
                        database.execute(
                            "INSERT OR REPLACE INTO ticks VALUES (?, ?, ?, ?)",
                            (at_ns, self._metrics[metric], self._layout(tuple(rows)), content),
                        )
                self.last_error = ""
            except sqlite3.Error as error:
                self._fail(error)
                self.lost[self.last_error] += 1
                if is_corruption(error):
                    self._put_aside()

    def query(self, metric: str, since_ns: int, until_ns: int) -> list[Points]:
        """Returns the series of a metric on disk, with instants from `since_ns` to `until_ns`, both
        inclusive.

        Empty if the disk cannot be read, see `last_error`; a damaged file is moved away.
        """
        if self.path is None or not self.path.exists():
            return []
        try:
            return self._read(self.path, metric, since_ns, until_ns)
        except sqlite3.Error as error:
            with self._lock:
                self.last_error = str(error)
                if is_corruption(error) and not self._closed:
                    self._fail(error)
                    self._put_aside()
            return []

    def _read(self, path: Path, metric: str, since_ns: int, until_ns: int) -> list[Points]:
        series: dict[Labels, tuple[array[int], array[float]]] = {}
        layouts: dict[int, list[tuple[array[int], array[float]]]] = {}
        with contextlib.closing(
            sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True)
        ) as database:
            for at_ns, layout, numbers in database.execute(
                "SELECT at_ns, layout, numbers FROM ticks WHERE at_ns BETWEEN ? AND ?"
                " AND metric = (SELECT id FROM metrics WHERE name = ?)",
                (since_ns, until_ns, metric),
            ):
                try:
                    if layout not in layouts:
                        (text,) = database.execute(
                            "SELECT labels FROM layouts WHERE id = ?", (layout,)
                        ).fetchone()
                        layouts[layout] = [
                            series.setdefault(labels, (array("q"), array("d")))
                            for labels in msgspec.msgpack.decode(
                                zlib.decompress(text), type=list[Labels]
                            )
                        ]
                    columns = list(zip(layouts[layout], array("d", numbers), strict=True))
                except (
                    zlib.error,
                    msgspec.DecodeError,
                    ValueError,
                    TypeError,
                ) as error:  # SQLite does not validate contents
                    raise sqlite3.DatabaseError(
                        f"the tick of {at_ns} is damaged: {error}"
                    ) from error
                for (times, values), number in columns:
                    if not math.isnan(number):
                        times.append(at_ns)
                        values.append(number)
        return [
            sort_by_time(labels, times, values)
            for labels, (times, values) in series.items()
            if times
        ]

    def forget(self, now_ns: int) -> None:
        """Delete expired values from disk, and the oldest tenth if the file is too large."""
        with self._lock:
            if self._database is None:
                return
            oldest = now_ns - int(self.settings.hours * 3600e9)
            try:
                with self._database as database:
                    if self.bytes() > self.settings.max_mb * 1e6:
                        first, last = database.execute(
                            "SELECT min(at_ns), max(at_ns) FROM ticks"
                        ).fetchone()
                        oldest = (
                            max(oldest, first + (last - first) // 10)
                            if first is not None
                            else oldest
                        )
                    if database.execute("DELETE FROM ticks WHERE at_ns < ?", (oldest,)).rowcount:
                        database.execute(
                            "DELETE FROM layouts WHERE id NOT IN (SELECT DISTINCT layout FROM ticks)"
                        )
                        self._layouts.clear()
                self._database.execute("PRAGMA incremental_vacuum")
            except sqlite3.Error as error:
                self._fail(error)
                if is_corruption(error):
                    self._put_aside()

    def bytes(self) -> int:
        """The size on disk, including the write-ahead log."""
        if self.path is None:
            return 0
        total = 0
        for name in (self.path, Path(f"{self.path}-wal")):
            with contextlib.suppress(FileNotFoundError):
                total += name.stat().st_size
        return total

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None
            self._closed = True

    def _open(self) -> None:
        """Open or create the file; a damaged one is moved away, never deleted."""
        assert self.path is not None
        try:
            try:
                self._database = self._prepared()
            except sqlite3.DatabaseError as error:
                if not is_corruption(error):
                    raise
                self._put_aside()
                self._database = self._prepared()
        except (sqlite3.Error, OSError) as error:
            self._fail(error)

    def _prepared(self) -> sqlite3.Connection:
        assert self.path is not None
        database = open_database(self.path, _SCHEMA, VERSION, "history")
        try:
            database.execute("PRAGMA cache_size = -1024")
            database.execute("PRAGMA wal_autocheckpoint = 250")
            self._metrics = {
                name: number for number, name in database.execute("SELECT id, name FROM metrics")
            }
        except sqlite3.Error:
            database.close()
            raise
        self._layouts.clear()
        return database

    def _fail(self, error: Exception) -> None:
        self.last_error = str(error)
        self._again = time.monotonic() + _RETRY_S
        self._layouts.clear()  # ids of a failed transaction were rolled back
        self._metrics.clear()
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _put_aside(self) -> None:
        """Rename a damaged file, which has to be closed; the next write creates a new one."""
        assert self.path is not None
        try:
            damaged_path = move_damaged_file(self.path)
        except OSError as error:  # retried by the next write
            self.last_error = str(error)
            return
        LOG.warning("the history is damaged and put aside as %s", damaged_path)
        self._again = 0.0
        self.lost["damaged-file"] += 1

    def _layout(self, rows: tuple[Labels, ...]) -> int:
        assert self._database is not None
        if rows in self._layouts:
            self._layouts.move_to_end(rows)
            return self._layouts[rows]
        text = zlib.compress(msgspec.msgpack.encode(rows), 6)
        digest = hashlib.sha256(text).digest()
        self._database.execute(
            "INSERT OR IGNORE INTO layouts (digest, labels) VALUES (?, ?)", (digest, text)
        )
        number: int = self._database.execute(
            "SELECT id FROM layouts WHERE digest = ?", (digest,)
        ).fetchone()[0]
        self._layouts[rows] = number
        if len(self._layouts) > _LAYOUTS_IN_MEMORY:
            self._layouts.popitem(last=False)
        return number


def sort_by_time(labels: Labels, times: array[int], values: array[float]) -> Points:
    """Returns a series ordered by time, even if clocks jumped."""
    if any(later < earlier for earlier, later in pairwise(times)):
        pairs = sorted(zip(times, values, strict=True))
        times, values = (
            array("q", (at_ns for at_ns, _ in pairs)),
            array("d", (value for _, value in pairs)),
        )
    return Points(labels, times, values)


def merge_series(older: list[Points], newer: list[Points]) -> list[Points]:
    """Merge series of the disk with those in memory, which replace them in the time that they
    cover, except in gaps, as after clock jumps.
    """
    unmerged = {points.labels: points for points in newer}
    result = []
    for points in older:
        after = unmerged.pop(points.labels, None)
        if after is None:
            result.append(points)
            continue
        end = bisect_left(points.times_ns, after.times_ns[0])
        times, values = points.times_ns[:end], points.values[:end]
        for at_ns, value in zip(points.times_ns[end:], points.values[end:], strict=True):
            if at_ns - after.times_ns[bisect_right(after.times_ns, at_ns) - 1] > _GAP_NS:
                times.append(at_ns)
                values.append(value)
        result.append(sort_by_time(points.labels, times + after.times_ns, values + after.values))
    return result + list(unmerged.values())


def get_label_columns(metric: str) -> Mapping[str, int]:
    return {label: column for column, label in enumerate(METRICS[metric].labels)}


_OWNERSHIP_HOLD_NS = 60 * 10**9  # a share or an owner is valid for so long after it was last seen
OWNER_FIELDS = ("job", "rank", "user", "account", "namespace", "pod", "framework", "process", "pid")
GROUPING_FIELDS = (*OWNER_FIELDS, "device")
ATTRIBUTION_METRICS = (
    "process_gpu_share_ratio",
    "process_info",
)  # metrics used to attribute values to jobs
# Returns the series of a metric in a span of time.
Fetch = Callable[[str], list[Points]]


class Curve(NamedTuple):
    """One line of a result: its labels, instants in ns since the epoch, values."""

    of: dict[str, str]
    times_ns: list[int]
    values: list[float]


def get_unit(metric: str, *, raw: bool = False) -> str:
    """Returns the unit of the result of `evaluate_query`: the metric's, per second for a
    counter.
    """
    declared = METRICS[metric]
    return f"{declared.unit or '1'}/s" if declared.kind == "counter" and not raw else declared.unit


def resolve_metric_name(metric: str) -> str:
    """Returns the name of a metric without the prefix.

    Raises:
        UsageError: `no-such-metric`: the message suggests the nearest one.
    """
    name = metric.removeprefix(PREFIX)
    if name not in METRICS:
        raise UsageError(
            f"there is no metric `{metric}`",
            slug="no-such-metric",
            hint=nearest(name, METRICS) + "`traceloom agent query` without a metric lists them",
        )
    return name


def list_needed_metrics(metric: str, parts: Iterable[str]) -> list[str]:
    """Returns the metrics whose history is needed for a result by these labels or owners."""
    foreign = set(parts) - set(METRICS[metric].labels)
    return list(dict.fromkeys([metric, *(ATTRIBUTION_METRICS if foreign else ())]))


def evaluate_query(
    metric: str,
    fetch: Fetch,
    *,
    by: tuple[str, ...] = (),
    where: Mapping[str, str] | None = None,
    raw: bool = False,
) -> list[Curve]:
    """Evaluate a query.

    Args:
        metric: Name without the prefix.
        fetch: Returns the series of a metric in the requested time.
        by: Labels of the metric, or `job`, `rank`, `user`, `account`, `namespace`, `pod`,
            `framework`, `process`, `device`; without any every series is a row.
        where: Label or owner -> the value that rows have.
        raw: Counters as they are, not as rates.

    Raises:
        UsageError: `no-such-label`: the metric has no such label, and its series have no owner.
    """
    declared = METRICS[metric]
    where = dict(where or {})
    columns = get_label_columns(metric)
    foreign = [part for part in (*by, *where) if part not in columns]
    wrong = [
        part
        for part in foreign
        if part not in GROUPING_FIELDS or not ({"device", "process"} & set(columns))
    ]
    if wrong:
        possible = [*columns, *(GROUPING_FIELDS if {"device", "process"} & set(columns) else ())]
        raise UsageError(
            f"`{metric}` has no `{wrong[0]}`",
            slug="no-such-label",
            hint=nearest(wrong[0], possible)
            + f"it has {', '.join(dict.fromkeys(possible)) or 'no labels'}",
        )
    expected = {columns[key]: value for key, value in where.items() if key in columns}
    series = [
        p
        for p in fetch(metric)
        if all(p.labels[column] == value for column, value in expected.items())
    ]
    if declared.kind == "counter" and not raw:
        series = [rates for points in series if (rates := compute_rate(points)).times_ns]
    if not by and not (set(where) - set(columns)):
        return [
            Curve(
                dict(zip(declared.labels, points.labels, strict=True)),
                list(points.times_ns),
                list(points.values),
            )
            for points in series
        ]
    owners = _OwnershipIndex(fetch, foreign, shares="process" not in columns) if foreign else None
    groups: dict[tuple[str, ...], _WeightedSums] = {}
    averaged = declared.aggregation == "mean" or declared.unit == "ratio"
    for points in series:
        series_labels = {label: points.labels[column] for label, column in columns.items()}
        unowned = [(series_labels, 1.0)]
        parts = owners.over_time(series_labels, points.times_ns) if owners else repeat(unowned)
        for at_ns, value, owners_at in zip(points.times_ns, points.values, parts, strict=False):
            for facts, weight in owners_at:
                if all(facts.get(key, "") == expected for key, expected in where.items()):
                    key = tuple(facts.get(part, "") for part in by)
                    groups.setdefault(key, _WeightedSums({}, {})).add(at_ns, value, weight)
    curves = [
        Curve(dict(zip(by, key, strict=True)), *sums.columns(averaged=averaged))
        for key, sums in sorted(groups.items())
    ]
    return [curve for curve in curves if curve.times_ns]


def compute_rate(points: Points) -> Points:
    """Returns the rate per second of a counter between instants; a counter that was reset started
    again at 0.
    """
    times, values = array("q"), array("d")
    for index in range(1, len(points.times_ns)):
        seconds = (points.times_ns[index] - points.times_ns[index - 1]) / 1e9
        increase = points.values[index] - points.values[index - 1]
        if seconds > 0:
            times.append(points.times_ns[index])
            values.append((increase if increase >= 0 else points.values[index]) / seconds)
    return Points(points.labels, times, values)


class _WeightedSums(NamedTuple):
    """Values of a group by instant: their weighted sum, and the weights."""

    totals: dict[int, float]
    weights: dict[int, float]

    def add(self, at_ns: int, value: float, weight: float) -> None:
        self.totals[at_ns] = self.totals.get(at_ns, 0.0) + value * weight
        self.weights[at_ns] = self.weights.get(at_ns, 0.0) + weight

    def columns(self, *, averaged: bool) -> tuple[list[int], list[float]]:
        times = sorted(self.totals)
        if averaged:
            # An average is undefined at total weight 0.
            times = [at_ns for at_ns in times if self.weights[at_ns]]
            return times, [self.totals[at_ns] / self.weights[at_ns] for at_ns in times]
        return times, [self.totals[at_ns] for at_ns in times]


class _OwnershipIndex:
    """Shares of devices and owners of processes over time."""

    def __init__(self, fetch: Fetch, foreign: list[str], *, shares: bool) -> None:
        # device -> (process, its share over time).
        self.shares: dict[str, list[tuple[str, Points]]] = {}
        if shares:
            columns = get_label_columns("process_gpu_share_ratio")
            for points in fetch("process_gpu_share_ratio"):
                device, process = (
                    points.labels[columns["device"]],
                    points.labels[columns["process"]],
                )
                self.shares.setdefault(device, []).append((process, points))
        self.facts: dict[str, dict[str, str]] = {}
        if set(foreign) - {"process", "device"}:
            names = METRICS["process_info"].labels
            for points in fetch("process_info"):  # the last known owner wins
                facts = dict(zip(names, points.labels, strict=True))
                self.facts[facts["process"]] = facts

    def over_time(
        self, series_labels: dict[str, str], times_ns: Iterable[int]
    ) -> list[list[tuple[dict[str, str], float]]]:
        """Returns for each instant the owners of a series, with their weights; without an owner all
        fields are "".
        """
        if "process" in series_labels:
            facts = {**self.facts.get(series_labels["process"], {}), **series_labels}
            return [[(facts, 1.0)] for _ in times_ns]
        owner_points = [
            ({**self.facts.get(process, {}), "process": process, **series_labels}, points)
            for process, points in self.shares.get(series_labels.get("device", ""), [])
        ]
        result = []
        for at_ns in times_ns:
            parts = []
            for facts, points in owner_points:
                index = bisect_right(points.times_ns, at_ns) - 1
                if index >= 0 and at_ns - points.times_ns[index] <= _OWNERSHIP_HOLD_NS:
                    parts.append((facts, points.values[index]))
            result.append(parts or [(series_labels, 1.0)])
        return result
