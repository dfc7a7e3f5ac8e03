"""Files of stacks and telemetry as the agent writes them, by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

FRAMES = [
    ["main", "/a/train.py", 30],
    ["step", "/a/train.py", 20],
    ["load", "/a/data.py", 5],
    ["c10d::wait", "libc10.so", 0],
]


def stacks(samples: list[list[Any]], **more: Any) -> dict[str, Any]:
    """A stacks file with two threads; frames are those of `FRAMES`."""
    return {
        "format": "traceloom-stacks",
        "version": 1,
        "pid": 77,
        "rank": 0,
        "threads": [{"id": 77, "name": "MainThread"}, {"id": 78, "name": "loader"}],
        "frames": FRAMES,
        "samples": samples,
    } | more


def telemetry(*series: dict[str, Any], host: str = "node1", **more: Any) -> dict[str, Any]:
    """A telemetry file."""
    return {
        "format": "traceloom-telemetry",
        "version": 1,
        "host": host,
        "series": list(series),
    } | more


def series(
    metric: str, times_ns: list[int], values: list[float], kind: str = "gauge", **labels: str
) -> dict[str, Any]:
    """One of its series."""
    return {
        "metric": f"traceloom_{metric}",
        "unit": "",
        "kind": kind,
        "labels": labels,
        "times_ns": times_ns,
        "values": values,
    }


def put(path: Path, document: dict[str, Any]) -> Path:
    """Write it, compressed."""
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def allocations(events: list[list[Any]], **more: Any) -> dict[str, Any]:
    """An allocations file."""
    return {
        "format": "traceloom-allocations",
        "version": 1,
        "pid": 77,
        "rank": 0,
        "frames": [["f+0x1", "libc10.so"]],
        "stacks": [[0]],
        "events": events,
        "lost": 0,
    } | more
