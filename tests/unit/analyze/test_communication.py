"""Communication by collective, on devices and on the host."""

from __future__ import annotations

from typing import Any

from traceloom.analyze import communication
from traceloom.testing import TraceBuilder

ARGS = TraceBuilder.collective_args


def rows(builder: TraceBuilder) -> list[dict[str, Any]]:
    return communication(builder.build()).collectives.to_dicts()


def test_kernels_with_arguments_are_told_apart_by_kind_group_and_type() -> None:
    builder = TraceBuilder().group("0", [0, 1], description="default_pg")
    builder.kernel("ncclDevKernel_AllReduce", 0, 10, stream=20, **ARGS("allreduce", "0", 2, 1000, "Float"))
    builder.kernel("ncclDevKernel_AllReduce", 20, 20, stream=20, **ARGS("allreduce", "0", 2, 500, "Float"))
    builder.kernel("ncclDevKernel_AllGather", 50, 5, stream=20, **ARGS("_allgather_base", "0", 2, 8, "BFloat16"))
    one, other = rows(builder)
    assert (one["kind"], one["group"], one["group_description"], one["group_size"]) == (
        "all_reduce",
        "0",
        "default_pg",
        2,
    )
    assert (one["element_type"], one["where"], one["count"], one["bytes"]) == ("Float", "device", 2, 6000)
    assert (one["total_ns"], one["mean_ns"], one["min_ns"], one["max_ns"]) == (30_000, 15_000, 10_000, 20_000)
    assert (other["kind"], other["element_type"], other["bytes"]) == ("all_gather", "BFloat16", 16)


def test_exposed_is_the_time_that_compute_does_not_cover() -> None:
    builder = TraceBuilder().kernel("gemm", 0, 10).kernel("ncclDevKernel_AllReduce", 4, 10, stream=20)
    result = communication(builder.build())
    assert result.collectives["exposed_ns"].to_list() == [4_000]
    assert result.devices.to_dicts() == [
        {"device": 0, "count": 1, "total_ns": 10_000, "union_ns": 10_000, "exposed_ns": 4_000}
    ]


def test_a_kernel_without_arguments_takes_those_of_the_op_that_launched_it() -> None:
    builder = TraceBuilder().collective("allreduce", 0, 10, elements=100)
    builder.launch("cudaLaunchKernel", 2, 2, correlation=1)
    builder.kernel("ncclDevKernel_Generic", 20, 5, stream=20, correlation=1)
    (row,) = rows(builder)
    assert (row["kind"], row["group_size"], row["bytes"]) == ("all_reduce", 2, 400)


def test_bytes_of_one_op_are_not_counted_for_each_of_its_kernels() -> None:
    builder = TraceBuilder().collective("allreduce", 0, 10, elements=100)
    for correlation in (1, 2):
        builder.launch("cudaLaunchKernel", correlation * 3, 2, correlation=correlation)
        builder.kernel("ncclDevKernel_Generic", 20 * correlation, 5, stream=20, correlation=correlation)
    (row,) = rows(builder)
    assert (row["kind"], row["count"], row["bytes"]) == ("all_reduce", 2, None)


def test_a_kernel_of_an_old_file_is_named_by_the_annotation_around_its_launch() -> None:
    builder = TraceBuilder(generation="2023").annotation("nccl:all_to_all", 0, 10)
    builder.launch("cudaLaunchKernel", 2, 2, correlation=1)
    builder.kernel("ncclKernel_SendRecv_RING", 20, 5, stream=20, correlation=1)
    assert {(r["kind"], r["where"]) for r in rows(builder)} == {("all_to_all", "device"), ("all_to_all", "host")}


def test_a_kernel_alone_is_named_by_its_own_name_and_its_bytes_are_unknown() -> None:
    (row,) = rows(TraceBuilder().kernel("ncclDevKernel_ReduceScatter_Sum_bf16", 0, 5, stream=20))
    assert (row["kind"], row["group"], row["bytes"]) == ("reduce_scatter", None, None)


def test_gloo_calls_of_a_cpu_only_run_are_first_class() -> None:
    builder = TraceBuilder(device_name=None)
    gloo: dict[str, Any] = {"Input Dims": [[1000]], "Input type": ["float"]}
    builder.annotation("gloo:all_reduce", 0, 10, thread=5, **gloo).annotation(
        "gloo:all_reduce", 20, 30, thread=6, **gloo
    )
    builder.annotation("gloo:barrier", 60, 1, thread=5)
    reduce, barrier = rows(builder)
    assert (reduce["kind"], reduce["where"], reduce["count"], reduce["bytes"]) == ("all_reduce", "host", 2, 8000)
    assert (reduce["element_type"], reduce["total_ns"], reduce["exposed_ns"]) == ("Float", 40_000, None)
    assert (barrier["kind"], barrier["bytes"]) == ("barrier", None)


def test_what_an_all_gather_gathers_is_unknown_from_its_input_alone() -> None:
    builder = TraceBuilder(device_name=None)
    builder.annotation("gloo:all_gather", 0, 10, **{"Input Dims": [[10]], "Input type": ["float"]})
    assert [r["bytes"] for r in rows(builder)] == [None]


def test_a_trace_without_communication_has_frames_without_rows() -> None:
    result = communication(TraceBuilder().kernel("gemm", 0, 5).build())
    assert result.collectives.height == result.devices.height == 0
