"""Which runtime calls make their thread wait."""

from __future__ import annotations

import pytest

from traceloom.analyze.host_events import mark_blocking_calls, mark_device_setup_calls
from traceloom.testing import TraceBuilder


def blocks(name: str) -> bool:
    trace = TraceBuilder().launch(name, 0, 5, correlation=1, flow=False).build()
    return bool(mark_blocking_calls(trace)[0])


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
    [
        "cudaLaunchKernel",
        "cudaMemcpyAsync",
        "cudaMemsetAsync",
        "cudaMallocAsync",
        "cudaEventQuery",
        "cudaGraphLaunch",
    ],
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
    calls = trace.events.filter(mark_blocking_calls(trace))
    assert calls["start_ns"].to_list() == [0]


def test_only_runtime_and_driver_calls_block() -> None:
    trace = TraceBuilder().op("my::Synchronize", 0, 5).kernel("Memcpy", 0, 5).build()
    assert not mark_blocking_calls(trace).any()


def slow(
    *names: str, ms: float = 20, op: str | None = "aten::conv2d", busy: bool = False
) -> list[str]:
    """The calls, each of `ms` milliseconds inside an operator, that start the device; its first work is before them."""
    builder = TraceBuilder().launch("cudaLaunchKernel", 0, 5, correlation=1)
    builder.kernel("work", 6, 1000 * ms * len(names) if busy else 10, correlation=1)
    if op is not None:
        builder.op(op, 20, 1000 * ms * len(names) + 10)
    for at, name in enumerate(names):
        builder.launch(name, 21 + 1000 * ms * at, 1000 * ms - 1, correlation=at + 2, flow=False)
    trace = builder.build()
    return trace.events.filter(mark_device_setup_calls(trace))["name"].to_list()


def test_a_call_that_is_slow_while_the_device_is_idle_starts_it_or_loads_code() -> None:
    for name in (
        "cudaLaunchKernel",
        "cudaDeviceGetStreamPriorityRange",
        "hipExtModuleLaunchKernel",
        "cudaMemsetAsync",
    ):
        assert slow(name) == [name]
        assert slow(name, op=None) == [name]
        assert slow(name, busy=True) == slow(name, ms=4) == []


@pytest.mark.parametrize(
    "name", ["cudaDeviceSynchronize", "cudaMalloc", "cudaMemcpy", "concatInputs"]
)
def test_a_call_that_waits_or_is_none_of_the_driver_starts_nothing(name: str) -> None:
    assert slow(name) == []


def test_libraries_start_with_a_free_and_the_allocator_frees_after_it_asked() -> None:
    assert slow("cudaGetSymbolAddress", "cudaFree", "cudaFree") == [
        "cudaGetSymbolAddress",
        "cudaFree",
        "cudaFree",
    ]
    assert (
        slow("cudaMalloc", "cudaFree", "cudaFree") == slow("cudaEventQuery", "cudaFree", ms=4) == []
    )
    assert slow("cudaFree", op=None) == []  # somebody empties the cache


def test_a_cache_that_is_emptied_at_the_end_does_not_hide_that_libraries_start() -> None:
    builder = TraceBuilder().launch("cudaLaunchKernel", 0, 5, correlation=1)
    builder.kernel("work", 6, 10, correlation=1).op("aten::conv2d", 20, 90_000)
    builder.launch("cudaGetSymbolAddress", 21, 1, correlation=2)
    builder.launch("cudaFree", 30, 80_000, correlation=3)
    for number in range(12):
        builder.launch("cudaFree", 100_000 + 10_000 * number, 9_000, correlation=4 + number)
    trace = builder.build()
    found = trace.events.filter(mark_device_setup_calls(trace))["duration_ns"].to_list()
    assert found == [80_000_000]


def test_what_the_device_does_meanwhile_is_unknown_without_its_work() -> None:
    trace = TraceBuilder().launch("cudaLaunchKernel", 0, 20_000, correlation=1).build()
    assert not mark_device_setup_calls(trace).any()
