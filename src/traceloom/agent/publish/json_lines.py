"""Metrics as JSON lines: one line for each series and time, so that `jq 'select(.metric == ...)'` is all it takes.

    {"time":"2026-11-24T05:11:10.000Z","host":"node1","metric":"traceloom_gpu_busy_ratio","labels":{"device":"GPU-0"},"value":0.5}

A histogram is its series `_bucket` (label `le`), `_count` and `_sum`, as Prometheus has it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from traceloom.agent.board import Board
from traceloom.agent.config import Config
from traceloom.agent.metrics import METRICS, PREFIX


class Line(msgspec.Struct, frozen=True):
    """A value of a series. `time` in UTC; `labels` without those that are not known."""

    time: str
    host: str
    metric: str
    labels: dict[str, str]
    value: float


def lines(board: Board, host: str) -> Iterator[Line]:
    """A line for each value on the board; what only describes (`*_info`) too, with value 1."""
    for (name, values), value, at_ns in board.values():
        labels = {label: text for label, text in zip(METRICS[name].labels, values, strict=True) if text}
        moment = datetime.fromtimestamp(at_ns // 10**9, timezone.utc)
        yield Line(f"{moment:%Y-%m-%dT%H:%M:%S}.{at_ns // 10**6 % 1000:03d}Z", host, PREFIX + name, labels, value)
    for histogram, at_ns in board.histograms():
        moment = datetime.fromtimestamp(at_ns // 10**9, timezone.utc)
        metric, time = METRICS[histogram.metric], f"{moment:%Y-%m-%dT%H:%M:%S}.{at_ns // 10**6 % 1000:03d}Z"
        labels = {label: text for label, text in zip(metric.labels, histogram.labels, strict=True) if text}
        bounds = [*map(repr, metric.bounds), "+Inf"]
        for bound, count in zip(bounds, (*histogram.counts, histogram.number), strict=True):
            yield Line(time, host, f"{metric.full_name}_bucket", {**labels, "le": bound}, count)
        yield Line(time, host, f"{metric.full_name}_count", labels, histogram.number)
        yield Line(time, host, f"{metric.full_name}_sum", labels, histogram.total)


def append_whole(path: Path, data: bytes) -> None:
    """Append all of it or nothing: a full disk leaves no half line.

    Raises:
        OSError: It cannot be written.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        size = os.fstat(file).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


class JsonLines:
    """`files.json_lines`: grows every period; beyond `files.json_lines_mb` it becomes `NAME.1` and a new one begins."""

    name = "json_lines"

    def __init__(self, config: Config) -> None:
        self.path = Path(config.files.json_lines)
        self.most_bytes = config.files.json_lines_mb * 1e6
        self.host = config.host_name
        self.period_s = config.collect.period
        self.failures = 0
        self.trouble = ""
        self._encoder = msgspec.json.Encoder()

    def start(self) -> None:
        """Nothing: its directory is made when it is first needed."""

    def put(self, board: Board) -> None:
        """Append a line for each series."""
        data = self._encoder.encode_lines(list(lines(board, self.host)))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_size + len(data) > self.most_bytes:
                    self.path.replace(f"{self.path}.1")
            append_whole(self.path, data)
        except OSError as error:
            self.failures += 1
            self.trouble = f"{self.path}: {(error.strerror or str(error)).lower()}"
        else:
            self.trouble = ""

    def close(self) -> None:
        """Nothing is kept open."""
