"""The curves under the lanes of the timeline."""

from __future__ import annotations

import numpy as np
import pytest

from traceloom.report.views.timeline import MAX_CURVES, build_tracks, downsample_extremes
from traceloom.testing import TraceBuilder


def test_curves_of_work_copies_and_recorded_counters() -> None:
    made = (
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 5, correlation=1)
        .kernel("k", 20, 10, correlation=1)
    )
    made = made.copy("Memcpy HtoD (Pinned -> Device)", 40, 10, bytes=30_000)
    made = (
        made.counter("power", 0, 250.0, key="W")
        .counter("power", 30, 300.0, key="W")
        .counter("idle", 5, 0.0)
    )
    trace = made.build()
    found = {track["name"]: track for track in build_tracks(trace, trace.start_ns)}
    assert set(found) == {"GPU 0 busy %", "GPU 0 launches waiting", "GPU 0 HtoD GB/s", "power W"}
    assert (found["GPU 0 HtoD GB/s"]["time_ns"], found["GPU 0 HtoD GB/s"]["values"]) == (
        [40_000, 50_000],
        [3.0, 0.0],
    )
    assert found["power W"]["values"] == [250.0, 300.0]
    assert max(found["GPU 0 launches waiting"]["values"]) == 1.0


def test_names_are_harmless_and_curves_bounded() -> None:
    made = TraceBuilder()
    for number in range(MAX_CURVES + 9):
        made = made.counter(f"c{number}\x1b[31m", number, 1.0)
    found = build_tracks(made.build(), 0)
    assert len(found) == MAX_CURVES
    assert not any("\x1b" in track["name"] for track in found)


@pytest.mark.parametrize("size", [1, 5, 600, 601, 10_000, 12_345])
def test_thinned_curves_keep_their_ends_and_extremes(size: int) -> None:
    value = np.sin(np.arange(size) / 7.0) * np.arange(size)
    at = downsample_extremes(value, 600)
    assert at.size <= 610
    assert (at[0], at[-1]) == (0, size - 1)
    assert (value[at].min(), value[at].max()) == (value.min(), value.max())
    assert (np.diff(at) > 0).all()
