"""A small step on two ranks, from trace to ASTRA-sim's files: what usual converters lose of it, and we must not.

Two matrix products on one stream, an all-reduce on another that waits for the second one, a fill, a synchronisation of the
device, a graph launch with two kernels. A converter that only knows which call launched what lets the all-reduce start
beside the first product, and drops the fill, the synchronisation and the kernels of the graph.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from traceloom.formats.chakra.et_pb2 import NodeType
from traceloom.formats.chakra.nodes import NodeFrame, read_table
from traceloom.graph.job import join_ranks
from traceloom.graph.rank import link_rank
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace
from traceloom.workload.chakra.astra_sim import to_astra_sim
from traceloom.workload.chakra.validate import validate

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def trace(rank: int) -> Trace:
    made = TraceBuilder(rank=rank, world_size=2)
    made.group("0", [0, 1])
    made.op("aten::mm", 0, 12).launch("cudaLaunchKernel", 2, 5, correlation=1)
    made.kernel("sgemm_1", 10, 50, correlation=1)
    made.op("aten::mm", 14, 12).launch("cudaLaunchKernel", 16, 5, correlation=2)
    made.kernel("sgemm_2", 60, 100.7, correlation=2)
    made.launch("cudaEventRecord", 28, 1, correlation=3, flow=False)
    made.launch("cudaStreamWaitEvent", 30, 1, correlation=4, flow=False)
    made.sync(
        "Stream Wait Event",
        30,
        1,
        stream=20,
        correlation=4,
        wait_on_stream=7,
        wait_on_cuda_event_record_corr_id=3,
        wait_on_cuda_event_id=1,
    )
    made.op("c10d::allreduce_", 32, 14)
    made.collective("allreduce", 33, 12, elements=1 << 18)
    made.launch("cudaLaunchKernelExC", 35, 5, correlation=5)
    made.kernel(
        NCCL,
        162 + rank,
        40 - rank,
        stream=20,
        correlation=5,
        **made.collective_args("allreduce", "0", 2, 1 << 18, "Float"),
    )
    made.op("aten::zero_", 48, 8).launch("cudaMemsetAsync", 50, 4, correlation=6)
    made.fill(164, 0.9, bytes=4096, correlation=6)
    made.op("aten::item", 60, 146).launch(
        "cudaDeviceSynchronize", 62, 142, correlation=7, flow=False
    )
    made.sync("Context Sync", 62, 140, stream=-1, correlation=7)
    made.launch("cudaGraphLaunch", 208, 10, correlation=8)
    made.kernel("graph_1", 214, 20, correlation=8).kernel("graph_2", 234, 30, correlation=8)
    made.op("aten::add_", 220, 60)
    return made.build()


@pytest.fixture(scope="module", params=[False, True], ids=["with-host", "gpu-only"])
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NodeFrame:
    home: Path = tmp_path_factory.mktemp("example") / "set"
    graph = join_ranks([link_rank(trace(rank), None) for rank in range(2)])
    files = to_astra_sim(graph, gpu_only=request.param).write(home)
    assert validate(home, target="astra-sim").errors == 0
    return read_table(files[1])


def node_of(table: NodeFrame, name: str) -> int:
    return int(table.nodes.filter(pl.col("name").str.contains(name, literal=True))["id"].item())


def waits_for(table: NodeFrame, later: str, earlier: str) -> bool:
    """Whether one node cannot start before another has ended, over any number of others."""
    wanted, found, ahead = node_of(table, earlier), set(), [node_of(table, later)]
    row_of = {number: row for row, number in enumerate(table.nodes["id"].to_list())}
    while ahead:
        for awaited in table.data.id[table.data.row == row_of[ahead.pop()]].tolist():
            if awaited not in found:
                found.add(awaited)
                ahead.append(awaited)
    return wanted in found


def test_the_all_reduce_waits_for_the_product_that_makes_its_input(table: NodeFrame) -> None:
    assert waits_for(table, "ncclDevKernel", "sgemm_2")
    assert waits_for(table, "sgemm_2", "sgemm_1")


def test_nothing_that_ran_on_the_gpu_is_missing(table: NodeFrame) -> None:
    on_gpu = table.nodes.filter(~pl.col("is_cpu_op") & (pl.col("name") != "host"))
    assert on_gpu.height == 6
    assert on_gpu.filter(pl.col("tensor_size") == 4096).height == 1
    (nccl,) = on_gpu.filter(pl.col("type") == NodeType.COMM_COLL_NODE).rows(named=True)
    assert (nccl["comm_type"], nccl["comm_size"], nccl["pg_name"]) == (0, 4 << 18, None)


def test_the_synchronisation_holds(table: NodeFrame) -> None:
    for earlier in ("sgemm_2", "ncclDevKernel", "Memset"):
        assert waits_for(table, "graph_1", earlier)
    assert waits_for(table, "graph_2", "graph_1")


def test_durations_are_whole_microseconds_that_lose_none(table: NodeFrame) -> None:
    on_stream = table.nodes.filter(pl.col("name").str.contains("sgemm|graph|Memset"))
    assert abs(on_stream["duration_us"].cast(pl.Int64).sum() - (50 + 100.7 + 0.9 + 20 + 30)) < 1


def test_the_longest_path_is_the_measured_time(table: NodeFrame) -> None:
    ends = np.zeros(len(table), np.int64)
    row_of = {number: row for row, number in enumerate(table.nodes["id"].to_list())}
    for row in range(len(table)):  # ids ascend with time, and so do dependencies here
        before = [
            ends[row_of[awaited]] for awaited in table.data.id[table.data.row == row].tolist()
        ]
        ends[row] = max(before, default=0) + int(table.nodes["duration_us"][row])
    measured = 264  # end of the last kernel
    assert abs(ends[row_of[node_of(table, "graph_2")]] - measured) <= 0.1 * measured
