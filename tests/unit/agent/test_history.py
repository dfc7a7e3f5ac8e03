"""History: what was is found again, by time and series; disks and clocks may fail."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from array import array
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from traceloom.agent.config import HistorySettings
from traceloom.agent.history import History, Points, merge_series
from traceloom.agent.metrics import Reading, SeriesKey
from traceloom.agent.snapshot import Snapshot
from traceloom.errors import InputError

S = 10**9
T0 = 1_700_000_000 * S


def _power(device: str) -> SeriesKey:
    return ("gpu_power_watts", (device,))


def _pairs(points: list[Points]) -> dict[tuple[str, ...], list[tuple[int, float]]]:
    return {one.labels: list(zip(one.times_ns, one.values, strict=True)) for one in points}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    history = History(tmp_path / "deep" / "agent.db", HistorySettings())
    for tick in range(5):
        values = [(_power("a"), 100.0 + tick), (("gpu_busy_ratio", ("a",)), tick / 10)]
        history.write(T0 + tick * S, values + ([(_power("b"), 7.5)] if tick == 2 else []))
    assert _pairs(history.query("gpu_power_watts", T0 + S, T0 + 3 * S)) == {
        ("a",): [(T0 + tick * S, 100.0 + tick) for tick in (1, 2, 3)],
        ("b",): [(T0 + 2 * S, 7.5)],
    }
    assert history.query("gpu_clock_hertz", T0, T0 + 9 * S) == []
    assert history.lost == {}


def test_a_restart_keeps_it(tmp_path: Path) -> None:
    first = History(tmp_path / "agent.db", HistorySettings())
    first.write(T0, [(_power("a"), 1.0)])
    first.close()
    first.write(T0 + S, [(_power("a"), 9.0)])  # after its end: nothing
    second = History(tmp_path / "agent.db", HistorySettings())
    second.write(T0 + 2 * S, [(_power("a"), 2.0)])
    assert _pairs(second.query("gpu_power_watts", T0, T0 + 9 * S)) == {
        ("a",): [(T0, 1.0), (T0 + 2 * S, 2.0)]
    }


@given(
    st.lists(
        st.tuples(
            st.integers(-100, 100),
            st.dictionaries(st.sampled_from("abcd"), st.floats(-1e9, 1e9), max_size=4),
        ),
        max_size=12,
        unique_by=lambda tick: tick[0],
    )
)
def test_any_ticks_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, ticks: list[tuple[int, dict[str, float]]]
) -> None:
    """Clocks jump, devices come and go: every value is there once, in order of time."""
    history = History(tmp_path_factory.mktemp("history") / "agent.db", HistorySettings())
    expected: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    for second, values in ticks:
        history.write(
            T0 + second * S, [(_power(device), value) for device, value in values.items()]
        )
        for device, value in values.items():
            expected.setdefault((device,), []).append((T0 + second * S, value))
    assert _pairs(history.query("gpu_power_watts", T0 - 200 * S, T0 + 200 * S)) == {
        labels: sorted(values) for labels, values in expected.items()
    }


def test_memory_keeps_the_pace_of_the_collectors() -> None:
    history, host_snapshot = History(None, HistorySettings(recent_seconds=10)), Snapshot()
    for second in range(30):
        host_snapshot.put(
            "devices", [Reading("gpu_power_watts", ("a",), float(second))], T0 + second * S
        )
        if second % 10 == 0:
            host_snapshot.put(
                "cpu",
                [Reading("host_cpu_seconds_total", ("user",), float(second))],
                T0 + second * S,
            )
        history.keep(host_snapshot, T0 + second * S)
        history.keep(host_snapshot, T0 + second * S)  # nothing new: nothing kept
    assert _pairs(history.recent("gpu_power_watts", T0, T0 + 99 * S)) == {
        ("a",): [(T0 + second * S, float(second)) for second in range(19, 30)]
    }
    assert _pairs(history.recent("host_cpu_seconds_total", T0, T0 + 99 * S)) == {
        ("user",): [(T0 + 20 * S, 20.0)]
    }


def test_memory_is_bounded_when_the_clock_jumps_back() -> None:
    history, host_snapshot = History(None, HistorySettings(recent_seconds=10)), Snapshot()
    for second in range(1000):
        host_snapshot.put("devices", [Reading("gpu_power_watts", ("a",), 1.0)], T0 - second * S)
        history.keep(host_snapshot, T0 - second * S)
    assert len(history.recent("gpu_power_watts", 0, 2 * T0)[0].values) <= 10


def test_old_ticks_are_forgotten(tmp_path: Path) -> None:
    history = History(tmp_path / "agent.db", HistorySettings(hours=1))
    for hour in range(4):
        history.write(T0 + hour * 3600 * S, [(_power(f"gpu{hour}"), float(hour))])
    history.forget(T0 + 3 * 3600 * S)
    assert _pairs(history.query("gpu_power_watts", 0, 2 * T0)) == {
        ("gpu2",): [(T0 + 2 * 3600 * S, 2.0)],
        ("gpu3",): [(T0 + 3 * 3600 * S, 3.0)],
    }
    with sqlite3.connect(tmp_path / "agent.db") as database:
        assert database.execute("SELECT count(*) FROM layouts").fetchone() == (2,)
    history.write(T0 + 4 * 3600 * S, [(_power("gpu0"), 4.0)])  # whose layout has just been dropped
    assert _pairs(history.query("gpu_power_watts", T0 + 4 * 3600 * S, 2 * T0)) == {
        ("gpu0",): [(T0 + 4 * 3600 * S, 4.0)]
    }


def test_the_size_is_bounded(tmp_path: Path) -> None:
    history = History(tmp_path / "agent.db", HistorySettings(max_mb=0.5))
    for tick in range(1500):
        history.write(T0 + tick * S, [(_power(str(device)), float(tick)) for device in range(100)])
        if tick % 100 == 0:
            history.forget(T0 + tick * S)
    history.forget(T0 + 1500 * S)
    assert 100_000 < (tmp_path / "agent.db").stat().st_size < 1_000_000
    kept = history.query("gpu_power_watts", 0, 2 * T0)
    assert len(kept) == 100
    assert kept[0].values[-1] == 1499.0


def test_a_damaged_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    path.write_bytes(b"this is no database" * 1000)
    history = History(path, HistorySettings())
    history.write(T0, [(_power("a"), 1.0)])
    assert len(history.query("gpu_power_watts", T0, T0)) == 1
    aside = [file for file in tmp_path.iterdir() if ".damaged-" in file.name]
    assert aside[0].read_bytes().startswith(b"this is no database")
    assert history.lost == {"damaged-file": 1}


def _written(path: Path, ticks: int = 200) -> History:
    history = History(path, HistorySettings())
    for tick in range(ticks):
        history.write(
            T0 + tick * S, [(_power(f"device {device}"), float(tick)) for device in range(30)]
        )
    return history


def test_a_file_that_is_damaged_while_it_is_used_is_put_aside(tmp_path: Path) -> None:
    """Its first pages are whole, so that it opens; ticks are not."""
    path = tmp_path / "agent.db"
    _written(path).close()
    content = bytearray(path.read_bytes())
    content[4096 * 4 :] = b"\xa5" * (len(content) - 4096 * 4)
    path.write_bytes(content)
    history = History(path, HistorySettings())
    assert history.last_error == ""
    assert history.query("gpu_power_watts", 0, 2 * T0) == []
    assert history.lost == {"damaged-file": 1}
    for tick in range(3):
        history.write(T0 + tick * S, [(_power("a"), 1.0)])
    assert _pairs(history.query("gpu_power_watts", 0, 2 * T0)) == {
        ("a",): [(T0 + tick * S, 1.0) for tick in range(3)]
    }
    assert history.last_error == ""
    (aside,) = (
        file
        for file in tmp_path.iterdir()
        if ".damaged-" in file.name and not file.name.endswith(("-wal", "-shm"))
    )
    assert aside.read_bytes()[4096 * 4 :] == content[4096 * 4 :]


def test_damage_that_a_write_meets(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    history = _written(path)
    assert history._database is not None
    history._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))
    history._database.execute("PRAGMA shrink_memory")  # nor does the cache help
    for tick in range(5):
        history.write(2 * T0 + tick * S, [(_power(f"other {tick}"), 1.0)])
    assert history.lost["damaged-file"] == 1
    assert len(history.query("gpu_power_watts", 2 * T0, 3 * T0)) >= 3
    assert history.last_error == ""


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE layouts SET labels = x'00'",
        "UPDATE layouts SET labels = 7",
        "DELETE FROM layouts",
        "UPDATE ticks SET numbers = x'0102'",
        "UPDATE ticks SET numbers = zeroblob(8)",
        "UPDATE ticks SET numbers = 'text'",
    ],
)
def test_contents_that_mean_nothing(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "agent.db"
    _written(path, ticks=3).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(damage)
        database.commit()
    history = History(path, HistorySettings())
    assert history.query("gpu_power_watts", 0, 2 * T0) == []
    assert history.lost == {"damaged-file": 1}
    history.write(T0, [(_power("a"), 1.0)])
    assert _pairs(history.query("gpu_power_watts", 0, 2 * T0)) == {("a",): [(T0, 1.0)]}


@pytest.mark.parametrize("version", [99, -1])
def test_another_version_is_refused_and_kept(tmp_path: Path, version: int) -> None:
    with sqlite3.connect(tmp_path / "agent.db") as database:
        database.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(InputError) as raised:
        History(tmp_path / "agent.db", HistorySettings())
    assert raised.value.slug == "other-version"


def test_a_disk_that_cannot_be_written_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no directory", encoding="utf-8")
    history = History(tmp_path / "file" / "agent.db", HistorySettings())
    history.write(T0, [(_power("a"), 1.0)])
    history.write(T0 + S, [(_power("a"), 2.0)])
    assert sum(history.lost.values()) == 2
    assert history.last_error
    (tmp_path / "file").unlink()
    history.write(T0 + 2 * S, [(_power("a"), 3.0)])  # not tried again at once
    assert sum(history.lost.values()) == 3
    monkeypatch.setattr("traceloom.agent.history.time.monotonic", lambda: 1e12)
    history.write(T0 + 3 * S, [(_power("a"), 4.0)])
    assert history.last_error == ""
    assert _pairs(history.query("gpu_power_watts", 0, 2 * T0)) == {("a",): [(T0 + 3 * S, 4.0)]}


def test_a_full_disk_loses_ticks_but_nothing_before(tmp_path: Path) -> None:
    """SQLite is told that its file may not grow: as a full disk, it refuses to write."""
    history = History(tmp_path / "agent.db", HistorySettings())
    history.write(T0, [(_power("a"), 1.0)])
    assert history._database is not None
    history._database.execute("PRAGMA max_page_count = 1")
    for tick in range(1, 4):
        history.write(T0 + tick * S, [(_power(str(device)), 1.0) for device in range(3000)])
    assert sum(history.lost.values()) == 3
    assert "full" in history.last_error
    assert _pairs(history.query("gpu_power_watts", 0, 2 * T0)) == {("a",): [(T0, 1.0)]}


def test_questions_while_it_writes(tmp_path: Path) -> None:
    history = History(tmp_path / "agent.db", HistorySettings())
    ended = threading.Event()

    def write() -> None:
        for tick in range(300):
            history.write(
                T0 + tick * S, [(_power(str(device)), float(tick)) for device in range(20)]
            )
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not ended.is_set():
        for points in history.query("gpu_power_watts", T0, T0 + 999 * S):
            assert list(points.values) == [float(tick) for tick in range(len(points.values))]
    thread.join()
    assert len(history.query("gpu_power_watts", T0, T0 + 999 * S)[0].values) == 300


def test_a_day_of_400_series_fits(tmp_path: Path) -> None:
    """An hour of it, times 24: at most 200 MB."""
    history = History(tmp_path / "agent.db", HistorySettings())
    values = [
        *((_power(f"GPU-{device:036}"), 312.5) for device in range(100)),
        *(
            (("gpu_pipe_active_ratio", (f"GPU-{device:036}", pipe)), 0.123)
            for device in range(100)
            for pipe in ("a", "b", "c")
        ),
    ]
    for tick in range(360):
        history.write(T0 + tick * 10 * S, values)
    history.close()
    assert (tmp_path / "agent.db").stat().st_size * 24 < 200e6


def test_disk_and_memory_are_one_line() -> None:
    disk = [
        Points(("a",), array("q", [1, 11, 21]), array("d", [1, 2, 3])),
        Points(("b",), array("q", [1]), array("d", [9])),
    ]
    memory = [
        Points(("a",), array("q", [20, 21, 22]), array("d", [5, 6, 7])),
        Points(("c",), array("q", [22]), array("d", [4])),
    ]
    assert _pairs(merge_series(disk, memory)) == {
        ("a",): [(1, 1), (11, 2), (20, 5), (21, 6), (22, 7)],
        ("b",): [(1, 9)],
        ("c",): [(22, 4)],
    }


def test_what_memory_lacks_because_a_clock_jumped_comes_from_disk() -> None:
    """An hour ahead, then two back: memory has forgotten what was before the first jump."""
    hour = 3600 * S
    times = [second * S for second in range(0, 60, 10)]
    disk = [
        Points(
            ("a",),
            array("q", [at + jump for jump in (-hour, 0, hour) for at in times]),
            array("d", [1.0] * 18),
        )
    ]
    memory = [
        Points(
            ("a",),
            array("q", [at + jump for jump in (-hour, hour) for at in times]),
            array("d", [2.0] * 12),
        )
    ]
    assert _pairs(merge_series(disk, memory)) == {
        ("a",): [
            (at + jump, 1.0 if jump == 0 else 2.0) for jump in (-hour, 0, hour) for at in times
        ]
    }
