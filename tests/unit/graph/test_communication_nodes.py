"""Communication of one rank: which nodes it is, and what is known of it."""

from __future__ import annotations

from typing import Any

import polars as pl

from traceloom.graph.graph import Graph
from traceloom.graph.rank import link_rank
from traceloom.testing.trace_builder import TraceBuilder

KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def said(graph: Graph) -> list[dict[str, Any]]:
    graph.check()
    nodes = graph.nodes.select("node", pl.col("kind").cast(pl.String).alias("node_kind"), "bytes")
    return graph.communication.join(nodes, on="node", how="left").to_dicts()


def launched(built: TraceBuilder, name: str, at: float, **args: Any) -> TraceBuilder:
    number = round(at) + 1
    return built.launch("cudaLaunchKernel", at, 4, correlation=number).kernel(
        name, at + 20, 30, correlation=number, **args
    )


def test_a_kernel_tells_by_its_arguments() -> None:
    args = TraceBuilder.collective_args("allreduce", "3", 2, 1024, "BFloat16")
    row = said(
        link_rank(launched(TraceBuilder(), "ncclDevKernel_AllReduce_Sum_bf16", 0, **args).build())
    )[0]
    assert (row["kind"], row["group"], row["group_size"], row["ranks"]) == (
        "all_reduce",
        "3",
        2,
        [0, 1],
    )
    assert (row["in_bytes"], row["out_bytes"], row["bytes"]) == (2048, 2048, 2048)
    assert row["node_kind"] == "collective"
    assert row["instance"] is None


def test_else_the_op_around_its_launch_tells() -> None:
    built = (
        TraceBuilder()
        .op("c10d::allreduce_", 0, 100)
        .collective("allreduce", 5, 50, group="0", elements=10)
    )
    built.annotation("nccl:all_reduce", 8, 30)
    row = said(link_rank(launched(built, "ncclDevKernel_Generic_1", 10).build()))[0]
    assert (row["kind"], row["group"], row["in_bytes"]) == ("all_reduce", "0", 40)


def test_else_its_name() -> None:
    graph = link_rank(
        launched(TraceBuilder(), "ncclKernel_ReduceScatter_RING_LL_Sum_float", 0).build()
    )
    assert [row["kind"] for row in said(graph)] == ["reduce_scatter"]


def test_a_send_and_a_receive_know_their_peer() -> None:
    built = TraceBuilder(rank=1, world_size=4)
    for at, name, key in ((0, "send", "Dst Rank"), (100, "recv", "Src Rank")):
        args = TraceBuilder.collective_args(name, "0", 4, 8, "Float") | {key: 2}
        launched(built, KERNEL, at, **args)
    rows = said(link_rank(built.build()))
    assert [(row["kind"], row["node_kind"], row["peer"]) for row in rows] == [
        ("send", "send", 2),
        ("receive", "receive", 2),
    ]


def test_an_all_to_all_of_unequal_parts_knows_its_splits() -> None:
    args = TraceBuilder.collective_args("all_to_allv", "0", 2, 8, "Float")
    args |= {"In split size": "[2, 6]", "Out split size": "[3, 5]"}
    row = said(link_rank(launched(TraceBuilder(), KERNEL, 0, **args).build()))[0]
    assert (row["kind"], row["in_splits"], row["out_splits"]) == ("all_to_all", [2, 6], [3, 5])


def test_a_list_of_ranks_that_the_file_cut_comes_from_its_groups() -> None:
    args = TraceBuilder.collective_args("allreduce", "7", 4, 8, "Float") | {
        "Process Group Ranks": "[0, 1, ...]"
    }
    built = launched(TraceBuilder(world_size=4), "ncclDevKernel_AllReduce", 0, **args).group(
        "7", [0, 1, 2, 3]
    )
    assert said(link_rank(built.build()))[0]["ranks"] == [0, 1, 2, 3]


def test_gloo_communicates_on_a_thread_of_its_own() -> None:
    built = TraceBuilder().op("c10d::allreduce_", 0, 10)
    built.annotation(
        "gloo:all_reduce", 20, 300, thread=5, **{"Input Dims": [[8]], "Input type": ["float"]}
    )
    graph = link_rank(built.build())
    row = said(graph)[0]
    assert (row["kind"], row["node_kind"], row["bytes"]) == ("all_reduce", "collective", 32)
    assert graph.lanes["kind"][graph.nodes["lane"][row["node"]]] == "host"


def test_waiting_for_a_collective_is_none() -> None:
    built = TraceBuilder().collective("wait", 0, 50)
    assert said(link_rank(launched(built, "elementwise_kernel", 5).build())) == []
