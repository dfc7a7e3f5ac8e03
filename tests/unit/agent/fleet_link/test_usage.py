"""Minutes of devices, against plain sums over random ticks: every millisecond is somebody's, once."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from traceloom.agent.fleet_link.protocol import UsageRow
from traceloom.agent.fleet_link.usage import MINUTE_MS, UsageAccumulator, UsageOutbox
from traceloom.agent.ownership.model import split_by_weights
from traceloom.agent.topline import JobDeviceTime
from traceloom.errors import InputError

MS = 1_000_000
FIRST = 28_333_333  # a minute of 2023
TICK = st.tuples(
    st.integers(1, 200_000),  # ms
    st.lists(
        st.tuples(st.sampled_from(["a", "b", None]), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=3,
    ),
)


def times(device: str, ms: int, shares: list[tuple[str | None, int, int]]) -> list[JobDeviceTime]:
    """What jobs had of a device in a tick, by weights (busy, idle); they add up to it."""
    parts = split_by_weights(ms, [weight for _, *weights in shares for weight in weights])
    return [
        JobDeviceTime(device, job, busy, idle, 0, 100.0, (1e6, 2e6))
        for (job, *_), busy, idle in zip(shares, parts[0::2], parts[1::2], strict=True)
    ]


@given(st.lists(TICK, min_size=1, max_size=20), st.integers(0, MINUTE_MS))
def test_the_rows_are_the_ticks(
    ticks: list[tuple[int, list[tuple[str | None, int, int]]]], begin: int
) -> None:
    usage, end = UsageAccumulator(), FIRST * MINUTE_MS + begin
    expected: Counter[tuple[str, str]] = Counter()
    for ms, shares in ticks:
        end += ms
        of_tick = times("g", ms, shares)
        usage.add(end * MS, of_tick, {"a": 1000.0})
        for time in of_tick:
            expected[time.job or "", "busy"] += time.busy_ms
            expected[time.job or "", "unallocated" if time.job is None else "idle-allocated"] += (
                time.idle_ms
            )
    minutes = usage.take((end + MINUTE_MS) * MS, {"g": "H100"})
    assert usage.dropped_ms == 0
    spent: Counter[tuple[str, str]] = Counter()
    for minute, rows in minutes.items():
        begins, ends = minute * MINUTE_MS, (minute + 1) * MINUTE_MS
        covered = min(end, ends) - max(FIRST * MINUTE_MS + begin, begins)
        assert sum(row.device_ms for row in rows) == covered
        for row in rows:
            assert row.busy_ms == (row.device_ms if row.state == "busy" else 0)
            spent[row.job, row.state] += row.device_ms
    assert spent == +expected
    if any(row.job == "a" for rows in minutes.values() for row in rows):
        read = sum(
            row.input_bytes or 0 for rows in minutes.values() for row in rows if row.job == "a"
        )
        assert read <= 1000 * len(ticks) + len(minutes)


def test_a_tick_is_cut_at_the_minute_and_its_energy_with_it() -> None:
    usage = UsageAccumulator()
    tick = [JobDeviceTime("g", "a", 5000, 5000, 0, 3000.0, (1e12, 4e12))]
    usage.add(
        (FIRST * MINUTE_MS + 4000) * MS, tick, {"a": 900.0}
    )  # 6 s before the minute, 4 s in it
    minutes = usage.take((FIRST + 1) * MINUTE_MS * MS, {"g": "H100"})
    assert {
        minute: [(row.state, row.device_ms, row.energy_mj, row.input_bytes) for row in rows]
        for minute, rows in minutes.items()
    } == {
        FIRST - 1: [("busy", 3000, 900_000, 270), ("idle-allocated", 3000, 900_000, 270)],
        FIRST: [("busy", 2000, 600_000, 180), ("idle-allocated", 2000, 600_000, 180)],
    }
    assert sum(row.flops_low or 0 for rows in minutes.values() for row in rows) == pytest.approx(
        1e12
    )


def test_no_minute_gets_more_than_it_has_and_none_is_given_twice() -> None:
    usage, now = UsageAccumulator(), (FIRST + 1) * MINUTE_MS * MS
    whole = [JobDeviceTime("g", "a", MINUTE_MS, 0, 0, None, None)]
    usage.add(now, whole, {})
    usage.add(now, whole, {})  # the service's clock was set back
    assert usage.dropped_ms == MINUTE_MS
    assert [row.device_ms for row in usage.take(now, {})[FIRST]] == [MINUTE_MS]
    usage.add(now, whole, {})
    assert usage.dropped_ms == 2 * MINUTE_MS
    assert usage.take(now + MINUTE_MS * MS, {}) == {}


def test_the_backlog_keeps_minutes_until_they_are_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "state" / "usage.db"
    backlog = UsageOutbox(path)
    assert backlog.oldest() == []
    backlog.acknowledge(5)
    row = UsageRow(minute=FIRST, device="g", state="busy", device_ms=1, energy_mj=7)
    backlog.put({FIRST: [row], FIRST + 1: []})
    assert UsageOutbox(path).oldest() == [row]
    UsageOutbox(path).acknowledge(FIRST)
    assert UsageOutbox(path).oldest() == []


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    backlog = UsageOutbox(tmp_path / "file" / "usage.db")
    backlog.put({FIRST: []})
    assert backlog.lost == 1
    assert "file" in backlog.last_error


def damage_by_row(path: Path, content: bytes) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE minutes SET rows = ?", (content,))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(b"no database" * 1000), id="no database"),
        pytest.param(lambda path: damage_by_row(path, b"\xc1"), id="a row that is none"),
        pytest.param(
            lambda path: damage_by_row(path, b"\x91\x81\xa6minute\xa1\xff"), id="a row without text"
        ),
        pytest.param(lambda path: damage_by_row(path, b"\x91" * 5000), id="a row of depth"),
    ],
)
def test_a_damaged_file_is_put_aside_and_new_minutes_are_kept(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """Else the host would say nothing to its fleet any more: each heartbeat begins with what lies there."""
    path = tmp_path / "usage.db"
    row = UsageRow(minute=FIRST, device="g", state="busy", device_ms=1)
    UsageOutbox(path).put({FIRST: [row]})
    damage(path)
    damaged = path.read_bytes()
    backlog = UsageOutbox(path)
    with pytest.raises(sqlite3.DatabaseError):
        backlog.oldest()
    (aside,) = tmp_path.glob("usage.db.damaged-*")
    assert aside.read_bytes() == damaged
    assert backlog.oldest() == []
    backlog.put({FIRST + 1: [row]})
    assert (backlog.oldest(), backlog.last_error) == ([row], "")


def test_a_file_of_another_version_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 2")
    before, backlog = path.read_bytes(), UsageOutbox(path)
    with pytest.raises(InputError) as refused:
        backlog.oldest()
    assert refused.value.slug == "other-version"
    backlog.put({FIRST: []})
    assert (backlog.lost, path.read_bytes()) == (1, before)
    assert "has format version 2" in backlog.last_error


@pytest.mark.thorough
def test_a_file_that_another_has_locked_is_not_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    backlog = UsageOutbox(path)
    backlog.put({FIRST: []})
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        backlog.put({FIRST + 1: []})
        assert "locked" in backlog.last_error
        other.rollback()
    assert list(tmp_path.glob("*.damaged-*")) == []
    assert backlog.lost == 1


@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_a_job_reads_are_split_over_its_devices_however_many_rows_these_have(
    seed: int,
) -> None:
    order, usage = random.Random(seed), UsageAccumulator()
    devices = [f"g{number}" for number in range(order.randrange(1, 6))]
    ticks = []
    for device in devices:  # of some all is busy, others are idle and unknown too
        idle, unknown = (order.choice((0, 7_000)) for _ in range(2))
        busy = MINUTE_MS - idle - unknown
        ticks.append(JobDeviceTime(device, "a", busy, idle, unknown, None, None))
    usage.add((FIRST + 1) * MINUTE_MS * MS, ticks, {"a": 60_000.0})
    rows = usage.take((FIRST + 1) * MINUTE_MS * MS, {})[FIRST]
    assert sum(row.input_bytes or 0 for row in rows) == 60_000
    for device in devices:
        read = sum(row.input_bytes or 0 for row in rows if row.device == device)
        assert read == pytest.approx(60_000 / len(devices), abs=3)
