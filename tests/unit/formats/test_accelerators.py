"""Accelerators that are no GPUs: what their command processors run on streams is work of the device."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import traceloom
from traceloom.analyze import gpu_time
from traceloom.trace.trace import Trace


def event(name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "mtia_ccp_events",
        "name": name,
        "pid": 17,
        "tid": 3536,
        "ts": start,
        "dur": duration,
        "args": args,
    }


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    call = {
        "ph": "X",
        "cat": "mtia_runtime",
        "name": "runFunction",
        "pid": 1,
        "tid": 1,
        "ts": 5,
        "dur": 4,
        "args": {"correlation": 7},
    }
    events = [
        call,
        event("event_wait", 0, 10, stream=101, wait_on_stream=102),
        event("dma_request", 10, 20, stream=101, direction="HOST_TO_DEVICE", size=1024),
        event("merge", 30, 40, stream=101, correlation=7),
        event("event_record", 70, 0.5, stream=101),
    ]
    path = tmp_path / "mtia.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return traceloom.load(path).traces[0]


def test_what_runs_on_a_stream_is_what_its_name_says(trace: Trace) -> None:
    told = dict(trace.events.select("name", "category").rows())
    assert told == {
        "runFunction": "runtime",
        "event_wait": "command",
        "dma_request": "copy",
        "merge": "kernel",
        "event_record": "command",
    }
    assert trace.copies.select("kind", "bytes").rows() == [("HtoD", 1024)]
    kernel = trace.events.filter(pl.col("name") == "merge").row(0, named=True)
    assert trace.events["name"][kernel["launch"]] == "runFunction"


def test_a_public_trace_has_all_its_work_in_the_accounts(shared_data: Path) -> None:
    path = shared_data / "kineto" / "mtia_inference.json.gz"
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for entry in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if entry.get("cat") == "mtia_ccp_events" and not entry["name"].startswith("event_"):
            spans[entry["name"] == "dma_request"].append((entry["ts"], entry["ts"] + entry["dur"]))
    device = gpu_time(traceloom.load(path).traces[0]).devices.row(0, named=True)
    assert device["compute_ns"] == pytest.approx(1e3 * covered(spans[False]), abs=1e4)
    assert device["busy_ns"] == pytest.approx(1e3 * covered(spans[False] + spans[True]), abs=1e4)


def covered(spans: list[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    total = reached = 0.0
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total
