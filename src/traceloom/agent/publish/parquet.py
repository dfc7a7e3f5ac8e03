"""Metrics as Parquet: `telemetry-2026-11-24T05.parquet` for each hour of UTC, with a row for each series and time.

Ticks are appended to a hidden file of JSON lines; when its hour is over, and when the agent stops, a process of its own
(`parquet_file.py`) makes the file of it, so that the agent never imports Polars and a `kill -9` loses nothing. A file
appears whole under its name, and is removed after `files.parquet_days`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from traceloom.agent.board import Board
from traceloom.agent.config import Config
from traceloom.agent.publish.json_lines import append_whole, lines

_WRITER = "traceloom.agent.publish.parquet_file"
_HOUR = "%Y-%m-%dT%H"


class ParquetFiles:
    """`files.parquet`: a directory of hours."""

    name = "parquet"

    def __init__(self, config: Config, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.directory = Path(config.files.parquet)
        self.days = config.files.parquet_days
        self.host = config.host_name
        self.period_s = config.collect.period
        self.failures = 0
        self.trouble = ""
        self.tried: dict[Path, str] = {}  # an hour that could not be written -> when it was last tried
        self._encoder = msgspec.json.Encoder()

    def start(self) -> None:
        """Nothing: hours that an earlier agent left are written with the first tick."""

    def put(self, board: Board) -> None:
        """Append a tick; write the hours that are over, and remove those that are too old."""
        now = datetime.fromtimestamp(self.clock(), timezone.utc)
        hour = now.strftime(_HOUR)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            current = self.directory / f".telemetry-{hour}.jsonl"
            append_whole(current, self._encoder.encode_lines(list(lines(board, self.host))))
            self.trouble = ""
            for spool in self.directory.glob(".telemetry-*.jsonl"):
                if spool != current and self.tried.get(spool) != hour:
                    self.tried[spool] = hour
                    if self._write(spool):
                        spool.unlink()
                        del self.tried[spool]
            first = datetime.fromtimestamp(max(0.0, now.timestamp() - 86_400 * self.days), timezone.utc)
            oldest = f"telemetry-{first.strftime(_HOUR)}"
            for path in self.directory.glob("telemetry-*.parquet"):
                if path.stem < oldest:
                    path.unlink()
        except OSError as error:
            self.failures += 1
            self.trouble = f"{self.directory}: {(error.strerror or str(error)).lower()}"

    def close(self) -> None:
        """Write the hour that runs, and keep its ticks for an agent that starts again within it."""
        for spool in self.directory.glob(".telemetry-*.jsonl"):
            self._write(spool)

    def _write(self, spool: Path) -> bool:
        target = spool.with_name(spool.name[1:]).with_suffix(".parquet")
        done = subprocess.run(
            [sys.executable, "-m", _WRITER, spool, target],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            self.failures += 1
            self.trouble = f"{target}: {done.stderr.strip().rpartition(chr(10))[2]}"
        return not done.returncode
