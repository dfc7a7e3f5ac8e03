"""How kernels were launched."""

from __future__ import annotations

from pathlib import Path

import traceloom
from traceloom.analyze import kernel_launches
from traceloom.testing import TraceBuilder

ARGUMENTS = {
    "grid": [7, 16, 32],
    "block": [256, 1, 1],
    "registers per thread": 32,
    "shared memory": 4224,
    "blocks per SM": 33.2,
    "warps per SM": 265.5,
    "est. achieved occupancy %": 75,
}


def made() -> TraceBuilder:
    builder = TraceBuilder()
    builder.op("aten::mm", 0, 20)
    builder.launch("cudaLaunchKernel", 5, 5, correlation=1)
    builder.kernel("gemm", 30, 10, correlation=1, **ARGUMENTS)
    return builder.kernel("bare", 50, 10, correlation=2)


def test_each_kernel_has_what_was_recorded_of_its_launch(tmp_path: Path) -> None:
    (trace,) = traceloom.load(made().write(tmp_path / "trace.json")).traces
    launches = kernel_launches(trace)
    gemm, bare = launches.rows.drop("event").rows()
    assert gemm == (7, 16, 32, 256, 1, 1, 32, 4224, 33.2, 265.5, 0.75)
    assert bare == (None,) * 11
    assert trace.events["name"].gather(launches.rows["event"]).to_list() == ["gemm", "bare"]
    assert launches.absent is None


def test_what_is_not_there_is_said() -> None:
    assert kernel_launches(made().build()).absent == "no-file"


def test_nothing_recorded(tmp_path: Path) -> None:
    bare = TraceBuilder()
    bare.kernel("bare", 50, 10, correlation=2)
    (trace,) = traceloom.load(bare.write(tmp_path / "trace.json")).traces
    assert kernel_launches(trace).absent == "not-recorded"
