"""Which runtime calls make their thread wait."""

from __future__ import annotations

import pytest

from traceloom.analyze.blocking import blocking_calls
from traceloom.testing import TraceBuilder


def blocks(name: str) -> bool:
    trace = TraceBuilder().launch(name, 0, 5, correlation=1, flow=False).build()
    return bool(blocking_calls(trace)[0])


@pytest.mark.parametrize(
    "name",
    [
        "cudaDeviceSynchronize",
        "cudaStreamSynchronize",
        "hipEventSynchronize",
        "cuCtxSynchronize",
        "cudaMemcpy",
        "hipMemcpyWithStream",
        "cudaMalloc",
        "cudaFree",
        "cudaHostAlloc",
        "zeEventHostSynchronize",
    ],
)
def test_calls_that_wait_by_their_name(name: str) -> None:
    assert blocks(name)


@pytest.mark.parametrize(
    "name",
    ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaMallocAsync", "cudaEventQuery", "cudaGraphLaunch"],
)
def test_calls_that_return_at_once(name: str) -> None:
    assert not blocks(name)


def test_an_asynchronous_copy_that_returned_after_its_copy_ended_has_waited() -> None:
    builder = TraceBuilder().launch("cudaMemcpyAsync", 0, 20, correlation=1)
    builder.copy("Memcpy DtoH (Device -> Pageable)", 5, 10, bytes=1, correlation=1)
    builder.launch("cudaMemcpyAsync", 30, 2, correlation=2)
    builder.copy("Memcpy DtoH (Device -> Pinned)", 40, 10, bytes=1, correlation=2)
    builder.launch("cudaLaunchKernel", 60, 20, correlation=3).kernel("short", 65, 1, correlation=3)
    trace = builder.build()
    calls = trace.events.filter(blocking_calls(trace))
    assert calls["start_ns"].to_list() == [0]


def test_only_runtime_and_driver_calls_block() -> None:
    trace = TraceBuilder().op("my::Synchronize", 0, 5).kernel("Memcpy", 0, 5).build()
    assert not blocking_calls(trace).any()
