"""The page's timeline: sampled stacks have lanes, telemetry has curves, on the time axis of the events."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.beside import put, series, stacks, telemetry
from traceloom.formats import load
from traceloom.report import run
from traceloom.report.views import timeline
from traceloom.report.views.page import render_report_page
from traceloom.report.views.timeline import add_overlay
from traceloom.testing import TraceBuilder

BASE = 1_700_000_000_000_000_000


def test_lanes_and_curves(
    tmp_path: Path, unpacked: Callable[[str], tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    TraceBuilder(0, 1, host="node1", base_ns=BASE).op("aten::mm", 100, 400).write(
        tmp_path / "rank0.kineto.json.gz"
    )
    put(tmp_path / "rank0.stacks.json.gz", stacks([[BASE + 310_000, 0, 20_000, [0, 1]]]))
    power = series("gpu_power_watts", [BASE + 150_000], [100], device="GPU-0")
    put(tmp_path / "node1.telemetry.json.gz", telemetry(power))
    session = load(tmp_path, cache=False)
    whole = run.build(session)
    assert "train.py" not in json.dumps(whole, default=str)  # no analysis takes samples for events
    header, events = unpacked(timeline.build(add_overlay(session), set(), []).payload)
    lanes = [lane["name"] for lane in header["lanes"]]
    assert lanes == ["main thread", "stacks · MainThread"]
    labels = [header["labels"][label][0] for label in events["label"]]
    starts = dict(zip(labels, map(int, events["start"]), strict=True))
    assert starts["step (train.py:20)"] == 210_000  # the trace begins at 100 us
    (curve,) = [curve for curve in header["ranks"][0]["curves"] if "power" in curve["name"]]
    assert (curve["name"], curve["time_ns"], curve["values"]) == (
        "gpu_power_watts GPU-0",
        [50_000],
        [100],
    )
    (payload,) = re.findall(r"eJ[A-Za-z0-9+/]{100,}={0,2}", render_report_page(whole, session))
    assert [lane["name"] for lane in unpacked(payload)[0]["lanes"]] == lanes
