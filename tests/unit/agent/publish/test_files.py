"""Metrics as files: JSON lines and Parquet."""

from __future__ import annotations

import gzip
import json
import resource
import signal
from datetime import datetime, timezone
from pathlib import Path

import polars as pl
import pytest

from support.agent_server import full_board
from traceloom.agent.board import Board
from traceloom.agent.config import Config, Files
from traceloom.agent.metrics import METRICS, Histogram, Reading
from traceloom.agent.publish import publishers
from traceloom.agent.publish.json_lines import JsonLines, append_whole
from traceloom.agent.publish.parquet import ParquetFiles

HOUR = 1_700_000_000 // 3600 * 3600


def _board(value: float, at_s: float) -> Board:
    board = Board()
    board.put("gpu", [Reading("gpu_power_watts", ("GPU-0",), value)], int(at_s * 1e9))
    return board


class Clock:
    """The time of day that the writer of hours sees."""

    now = float(HOUR)

    def __call__(self) -> float:
        return self.now


def test_a_line_for_each_series(tmp_path: Path) -> None:
    path = tmp_path / "new" / "telemetry.jsonl"
    lines = JsonLines(Config(host="node1", files=Files(json_lines=str(path))))
    board = full_board()
    lines.put(board)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    (info,) = [row for row in rows if row["labels"].get("command", "").startswith('python "train"')]
    assert info["labels"]["job"] == "slurm-7"
    values = {(row["metric"], tuple(sorted(row["labels"].items()))): row["value"] for row in rows}
    for (name, labels), value, _ in board.values():
        pairs = [(label, text) for label, text in zip(METRICS[name].labels, labels, strict=True) if text]
        assert values["traceloom_" + name, tuple(sorted(pairs))] == value
    moment = datetime.fromisoformat(rows[0]["time"].replace("Z", "+00:00")).timestamp()
    assert (rows[0]["host"], round(moment * 1000)) == ("node1", board.sheets["all"].at_ns // 10**6)
    buckets = [
        row["value"]
        for row in rows
        if row["metric"] == "traceloom_step_seconds_bucket" and row["labels"]["rank"] == "0"
    ]
    assert (buckets[0], buckets[-1], len(buckets)) == (0, 5, len(METRICS["step_seconds"].bounds) + 1)


def test_a_full_file_makes_way(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    lines = JsonLines(Config(files=Files(json_lines=str(path), json_lines_mb=0.0004)))
    for turn in range(5):
        lines.put(_board(turn, turn))
    now = [json.loads(line)["value"] for line in path.read_text().splitlines()]
    before = [json.loads(line)["value"] for line in Path(f"{path}.1").read_text().splitlines()]
    assert before + now == [0, 1, 2, 3, 4][-len(before + now) :]
    assert sorted(tmp_path.iterdir()) == [path, Path(f"{path}.1")]
    assert max(path.stat().st_size, Path(f"{path}.1").stat().st_size) <= 400


def test_a_full_disk_is_counted_and_said() -> None:
    lines = JsonLines(Config(files=Files(json_lines="/dev/full")))
    lines.put(_board(1, 1))
    lines.put(_board(1, 1))
    assert lines.failures == 2
    assert "no space left" in lines.trouble


def test_a_disk_that_fills_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "a"
    append_whole(path, b"first\n")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            append_whole(path, b"second\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"first\n"


def test_an_hour_becomes_a_file_when_the_next_begins(tmp_path: Path) -> None:
    parquet = ParquetFiles(Config(host="node1", files=Files(parquet=str(tmp_path))), clock := Clock())
    parquet.start()
    board = _board(300.0, HOUR + 1)
    board.put("steps", [Histogram("step_seconds", ("slurm-7", "0"), (0,) * 14 + (2,), 3, 90.0)], (HOUR + 2) * 10**9)
    parquet.put(board)
    assert list(tmp_path.glob("*.parquet")) == []
    clock.now += 3600
    parquet.put(_board(310.0, HOUR + 3601))
    assert (parquet.failures, parquet.trouble) == (0, "")
    (path,) = tmp_path.glob("*.parquet")
    assert path.name == f"telemetry-{datetime.fromtimestamp(HOUR, timezone.utc):%Y-%m-%dT%H}.parquet"
    frame = pl.read_parquet(path)
    assert frame.columns[:3] + frame.columns[-1:] == ["time", "host", "metric", "value"]
    assert frame.schema["time"] == pl.Datetime("ms", "UTC")
    row = frame.row(by_predicate=pl.col("metric") == "traceloom_gpu_power_watts", named=True)
    assert (row["host"], row["device"], row["job"], row["value"]) == ("node1", "GPU-0", None, 300.0)
    assert row["time"].timestamp() == HOUR + 1
    buckets = frame.filter(metric="traceloom_step_seconds_bucket").select("le", "value").rows()
    assert ("60.0", 2.0) in buckets
    assert ("+Inf", 3.0) in buckets
    assert [path.name for path in tmp_path.glob(".*")] == [
        f".telemetry-{datetime.fromtimestamp(HOUR + 3600, timezone.utc):%Y-%m-%dT%H}.jsonl"
    ]


def test_an_agent_that_stops_writes_its_hour_and_the_next_goes_on(tmp_path: Path) -> None:
    config = Config(files=Files(parquet=str(tmp_path)))
    for value in (1.0, 2.0):
        parquet = ParquetFiles(config, Clock())
        parquet.put(_board(value, HOUR + value))
        parquet.close()
    assert pl.read_parquet(next(tmp_path.glob("*.parquet")))["value"].to_list() == [1.0, 2.0]


def test_a_line_that_was_cut_off_costs_itself_alone(tmp_path: Path) -> None:
    parquet = ParquetFiles(Config(files=Files(parquet=str(tmp_path))), Clock())
    parquet.put(_board(1.0, HOUR + 1))
    (spool,) = tmp_path.glob(".*.jsonl")
    spool.write_bytes(spool.read_bytes() + b'{"time":"2026-11-2')
    parquet.put(_board(2.0, HOUR + 2))
    parquet.put(_board(3.0, HOUR + 3))
    parquet.close()
    assert parquet.trouble == ""
    assert pl.read_parquet(next(tmp_path.glob("*.parquet")))["value"].to_list() == [1.0, 3.0]


def test_an_hour_that_cannot_be_written_is_kept_and_counted(tmp_path: Path) -> None:
    parquet = ParquetFiles(Config(files=Files(parquet=str(tmp_path))), Clock())
    spool = tmp_path / f".telemetry-{datetime.fromtimestamp(HOUR - 3600, timezone.utc):%Y-%m-%dT%H}.jsonl"
    spool.write_bytes(b"no JSON at all\n" + gzip.compress(b"x"))
    spool.with_name(spool.stem[1:] + ".parquet").mkdir()
    for _ in range(3):  # it is tried once an hour
        parquet.put(_board(1.0, HOUR))
    assert parquet.failures == 1
    assert spool.exists()


def test_old_hours_are_removed(tmp_path: Path) -> None:
    old, other = tmp_path / "telemetry-2020-01-01T00.parquet", tmp_path / "other-2020-01-01T00.parquet"
    young = tmp_path / f"telemetry-{datetime.now(timezone.utc):%Y-%m-%dT%H}.parquet"
    for path in (old, other, young):
        path.touch()
    ParquetFiles(Config(files=Files(parquet=str(tmp_path), parquet_days=1))).put(Board())
    assert sorted(tmp_path.glob("*.parquet")) == sorted([other, young])


def test_a_directory_that_cannot_be_written_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    parquet = ParquetFiles(Config(files=Files(parquet=str(file / "new"))))
    parquet.put(Board())
    assert (parquet.failures, parquet.trouble) == (1, f"{file / 'new'}: not a directory")


def test_those_that_are_configured(tmp_path: Path) -> None:
    files = Files(json_lines=str(tmp_path / "a"), parquet=str(tmp_path / "b"))
    assert [publisher.name for publisher in publishers(Config(files=files))] == ["json_lines", "parquet"]
    assert publishers(Config()) == []
