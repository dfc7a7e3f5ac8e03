"""Each collective: size, rates, link, names of kernels, exposed and blocking time; groups and matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from traceloom import analyze
from traceloom.analyze.bandwidth import correct_links_by_host, find_device_link
from traceloom.analyze.collective_names import add_algorithms
from traceloom.formats import load
from traceloom.testing import TraceBuilder

ARGS = TraceBuilder.collective_args


def calls(builder: TraceBuilder, **options: Any) -> list[dict[str, Any]]:
    return analyze.collectives(builder.build(), **options).calls.to_dicts()


@pytest.mark.parametrize(
    ("name", "goes_in", "comes_out", "size", "factor"),
    [
        ("allreduce", 1000, 1000, 4000, 1.5),
        ("_allgather_base", 1000, 4000, 16_000, 0.75),
        ("_reduce_scatter_base", 4000, 1000, 16_000, 0.75),
        ("all_to_all", 4000, 4000, 16_000, 0.75),
        ("broadcast", 1000, 1000, 4000, 1.0),
        ("reduce", 1000, 1000, 4000, 1.0),
        ("send", 1000, 1000, 4000, 1.0),
        ("recv", 1000, 1000, 4000, 1.0),
    ],
)
def test_bandwidth_of_every_kind_by_hand(
    name: str, goes_in: int, comes_out: int, size: int, factor: float
) -> None:
    args = ARGS(name, "0", 4, 1000, "Float") | {
        "In msg nelems": goes_in,
        "Out msg nelems": comes_out,
    }
    (row,) = calls(TraceBuilder().kernel("ncclDevKernel_X", 0, 10, **args))
    assert row["size_bytes"] == size
    assert row["algorithm_gb_per_s"] == pytest.approx(
        size / 10_000
    )  # bytes per ns are 10^9 bytes per second
    assert row["bus_gb_per_s"] == pytest.approx(factor * size / 10_000)


def test_no_bandwidth_without_size_group_or_time() -> None:
    builder = TraceBuilder().kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 10)
    builder.kernel("ncclDevKernel_AllReduce", 20, 0, **ARGS("allreduce", "0", 2, 10, "Float"))
    builder.kernel("ncclDevKernel_AllReduce", 30, 5, **ARGS("allreduce", "0", 2, 10, "Strange"))
    assert [row["bus_gb_per_s"] for row in calls(builder)] == [None, None, None]


@pytest.mark.parametrize(
    ("device", "link", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "NVLink 4", 450),
        ("NVIDIA H100 PCIe", "PCIe 5", 64),
        ("NVIDIA H800", "NVLink 4", 200),
        ("NVIDIA A100-PG509-200", "NVLink 3", 300),
        ("NVIDIA A100-PCIE-40GB", "PCIe 4", 32),
        ("Tesla V100-SXM2-32GB", "NVLink 2", 150),
        ("NVIDIA B200", "NVLink 5", 900),
        ("AMD Instinct MI300X VF", "xGMI", 448),
        ("NVIDIA L4", "PCIe 4", 32),
        ("Tesla T4", "PCIe 3", 16),
        ("ARTEMIS", None, None),
        ("", None, None),
        (None, None, None),
    ],
)
def test_links_by_device_names(device: str | None, link: str | None, peak: float | None) -> None:
    found = find_device_link(device)
    assert (found.name if found else None, found.peak_gb_per_s if found else None) == (link, peak)


def test_the_links_peak_is_told_only_inside_a_host() -> None:
    def fraction(members: list[int], world: int, **options: Any) -> Any:
        builder = TraceBuilder(members[0], world, devices=8)
        args = ARGS("allreduce", "0", len(members), 1_000_000, "Float") | {
            "Process Group Ranks": str(members)
        }
        return calls(builder.kernel("ncclDevKernel_AllReduce", 0, 100, **args), **options)[0][
            "link_fraction"
        ]

    bus = 4_000_000 / 100_000
    assert fraction([0, 1], 2) == pytest.approx(bus / 450)
    assert fraction([8, 9], 64) == pytest.approx(bus / 450)
    assert fraction([0, 8], 64) is None
    assert fraction([0, 8], 64, peak_gb_per_s=50) == pytest.approx(bus / 50)


def test_hosts_that_are_known_decide_about_the_link() -> None:
    frames = []
    for rank in range(4):
        builder = TraceBuilder(rank, 64, devices=1)
        for place, members in enumerate(([0, 1], [0, 1, 2, 3], [rank, 9])):
            args = ARGS("allreduce", str(place), len(members), 1_000_000, "Float")
            told = args | {"Process Group Ranks": str(members)}
            builder.kernel("ncclDevKernel_AllReduce", 200 * place, 100, stream=20, **told)
        frames.append(analyze.collectives(builder.build()).calls)
    before = pl.concat(frames)
    assert before["link"].null_count() == before.height, "one visible device does not tell"
    links = {rank: find_device_link("NVIDIA H100 80GB HBM3") for rank in range(4)}
    after = correct_links_by_host(
        before, {0: "a", 1: "a", 2: "b", 3: "b"}, {k: v for k, v in links.items() if v}
    )
    told = dict(after.group_by("group").agg(pl.col("link").drop_nulls().unique()).rows())
    assert told == {"0": ["NVLink 4"], "1": [], "2": []}
    assert after.columns == before.columns
    row = after.filter(pl.col("group") == "0").row(0, named=True)
    assert row["link_fraction"] == pytest.approx(row["bus_gb_per_s"] / 450)


@pytest.mark.parametrize(
    ("name", "algorithm", "protocol", "certain"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "RING",
            "LL",
            False,
        ),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)",
            "TREE",
            "LL",
            False,
        ),
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
            "RING",
            "LL",
            False,
        ),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "RING", "SIMPLE", False),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "RING", "LL", False),
        ("ncclAllReduceTreeLL128Kernel_sum_f16(ncclColl)", "TREE", "LL128", False),
        ("ncclAllReduceRingKernel_sum_f32(ncclColl)", "RING", "SIMPLE", False),
        (
            "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs)",
            "NVLS",
            None,
            True,
        ),
        ("ncclDevFunc_AllReduce_Sum_f32_NVLS_TREE_SIMPLE", "NVLS_TREE", "SIMPLE", True),
        ("ncclDevFunc_AllReduce_Sum_f32_COLLNET_CHAIN_SIMPLE", "COLLNET_CHAIN", "SIMPLE", True),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", None, None, None),
        ("rcclGenericKernel_4", None, None, None),
        (
            "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
            "ONE_SHOT",
            None,
            True,
        ),
        (
            "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
            "NVLS",
            None,
            True,
        ),
        ("allreduce_fusion_kernel_oneshot_lamport<8>()", "ONE_SHOT", "LAMPORT", True),
        ("gemm_of_a_tree_named_thing(RING)", "TREE", None, True),
    ],
)
def test_algorithm_and_protocol_by_name(
    name: str, algorithm: str, protocol: str, certain: bool | None
) -> None:
    (row,) = add_algorithms(pl.DataFrame({"name": [name]})).to_dicts()
    assert (row["algorithm"], row["protocol"], row["name_certain"]) == (
        algorithm,
        protocol,
        certain,
    )


def test_kinds_and_back_ends_beyond_nccl() -> None:
    builder = TraceBuilder()
    names = {
        "void deep_ep::internode_ll::dispatch<true>(void*)": ("dispatch", "deep_ep"),
        "void deep_ep::intranode::combine<__nv_bfloat16>(void*)": ("combine", "deep_ep"),
        "void c10d::symmetric_memory::multimem_all_reduce_kernel<float>(float*)": (
            "all_reduce",
            "symmetric memory",
        ),
        "void vllm::cross_device_reduce_2stage<half, 4>(vllm::RankData*)": (
            "all_reduce",
            "custom all-reduce",
        ),
        "nvshmemi_put_signal_block_kernel": ("put", "nvshmem"),
        "hccl::AllReduceKernel": ("all_reduce", "hccl"),
    }
    for place, name in enumerate(names):
        builder.kernel(name, 20 * place, 10)
    found = {row["name"]: (row["kind"], row["backend"]) for row in calls(builder)}
    assert found == names
    amd = TraceBuilder(device_name="AMD Instinct MI300X VF", generation="rocm")
    (row,) = calls(amd.kernel("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", 0, 5))
    assert (row["backend"], row["kind"]) == ("rccl", None)


def test_channels_are_read_from_the_file_and_unknown_without_it(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for place in range(3):
        builder.kernel("ncclDevKernel_AllReduce", 20 * place, 10, grid=[place + 2, 1, 1])
    builder.kernel("gemm", 80, 10, grid=[99, 1, 1])
    for name in ("plain.json", "packed.json.gz"):
        trace = load(builder.write(tmp_path / name), cache=False).traces[0]
        assert analyze.collectives(trace).calls["channels"].to_list() == [2, 3, 4]
    assert analyze.collectives(builder.build()).calls["channels"].to_list() == [None] * 3


# -- exposed and blocking -------------------------------------------------------------------------------------------


def _reduce(
    builder: TraceBuilder, launch_us: float, start_us: float, length_us: float
) -> TraceBuilder:
    builder.launch("cudaLaunchKernel", launch_us, 2, correlation=1)
    return builder.kernel("ncclDevKernel_AllReduce", start_us, length_us, stream=20, correlation=1)


def _compute(
    builder: TraceBuilder, number: int, launch_us: float, start_us: float, length_us: float
) -> TraceBuilder:
    builder.launch("cudaLaunchKernel", launch_us, 2, correlation=number)
    return builder.kernel("gemm", start_us, length_us, correlation=number)


def one(builder: TraceBuilder) -> tuple[int, int | None]:
    (row,) = calls(builder)
    return row["exposed_ns"], row["blocking_ns"]


def test_compute_that_was_told_to_wait_is_held_up_from_the_end_of_the_compute_before() -> None:
    builder = _compute(TraceBuilder(), 2, 0, 10, 30)  # runs to 40
    builder = _reduce(builder, 5, 20, 80)  # 20 to 100
    builder.launch("cudaStreamWaitEvent", 12, 1, correlation=7)
    assert one(_compute(builder, 3, 15, 102, 10)) == (60_000, 60_000)


def test_compute_that_was_launched_late_is_held_up_from_its_launch_only() -> None:
    builder = _reduce(_compute(TraceBuilder(), 2, 0, 10, 30), 5, 20, 80)
    builder.launch("cudaStreamWaitEvent", 88, 1, correlation=7)
    assert one(_compute(builder, 3, 90, 102, 10)) == (60_000, 10_000)


def test_compute_that_needs_nothing_of_it_is_not_blocked() -> None:
    builder = _reduce(_compute(TraceBuilder(), 2, 0, 10, 30), 5, 20, 80)
    assert one(_compute(builder, 3, 95, 101, 10)) == (60_000, 0)


def test_compute_that_comes_long_after_is_not_blocked() -> None:
    builder = _reduce(_compute(TraceBuilder(), 2, 0, 10, 30), 5, 20, 80)
    builder.launch("cudaStreamWaitEvent", 12, 1, correlation=7)
    assert one(_compute(builder, 3, 400, 420, 10)) == (60_000, 0)


def test_compute_beside_it_hides_it() -> None:
    builder = _reduce(_compute(TraceBuilder(), 2, 0, 10, 200), 5, 20, 80)
    assert one(builder) == (0, 0)


def test_a_host_that_waits_for_it_is_held_up() -> None:
    builder = _reduce(_compute(TraceBuilder(), 2, 0, 10, 30), 5, 20, 80)
    builder.launch("cudaStreamSynchronize", 50, 55, correlation=8)  # returns at 105
    assert one(_compute(builder, 3, 110, 120, 10)) == (60_000, 50_000)


def test_blocking_is_unknown_where_the_next_launch_is_not_recorded() -> None:
    builder = _reduce(_compute(TraceBuilder(), 2, 0, 10, 30), 5, 20, 80).kernel("gemm", 101, 10)
    assert one(builder) == (60_000, None)


def test_same_stream_is_order_enough() -> None:
    builder = _reduce(TraceBuilder(), 0, 10, 40)
    builder.launch("cudaLaunchKernel", 4, 2, correlation=3)
    builder.kernel("gemm", 51, 10, stream=20, correlation=3)
    assert one(builder) == (40_000, 40_000)


def test_compute_of_no_time_hides_nothing() -> None:
    builder = _reduce(TraceBuilder(), 0, 10, 40)
    assert one(_compute(builder, 3, 4, 20, 0)) == (40_000, 0)


# -- groups and matrix ----------------------------------------------------------------------------------------------


def _groups(builder: TraceBuilder, world: int = 8) -> dict[str, tuple[str, str]]:
    trace = builder.build()
    found = analyze.groups(
        analyze.collectives(trace).calls, analyze.declared_groups(trace), world
    ).groups
    return {row["group"]: (row["role"], row["evidence"]) for row in found.to_dicts()}


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("CONTEXT_PARALLEL_GROUP", "context"),
        ("mesh_tp", "tensor"),
        ("mesh_dp_shard", "sharded data"),
        ("mesh_dp_replicate", "data"),
        ("mesh_fsdp", "sharded data"),
        ("tp:0", "tensor"),
        ("pp:0", "pipeline"),
        ("ep_size_8", "expert"),
        ("EMBEDDING_GROUP", "embedding"),
    ],
)
def test_roles_by_description(description: str, role: str) -> None:
    builder = TraceBuilder().group("3", [0, 1], description=description)
    builder.kernel("ncclDevKernel_AllReduce", 0, 10, **ARGS("allreduce", "3", 2, 8, "Float"))
    found, evidence = _groups(builder)["3"]
    assert found == role
    assert "description" in evidence


def test_roles_by_what_is_called() -> None:
    builder = TraceBuilder()
    at = 0.0

    def call(kind: str, group: str, around: str = "", size: int = 2, **args: Any) -> None:
        nonlocal at
        if around:
            builder.op(around, at, 20)
        builder.launch("cudaLaunchKernel", at + 1, 2, correlation=int(at) + 1)
        told = ARGS(kind, group, size, 8, "Float") | args
        builder.kernel("ncclDevKernel_X", at + 5, 5, stream=20, correlation=int(at) + 1, **told)
        at += 30

    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    for _ in range(4):
        call("allreduce", "grads", backward, 2, **{"Process Group Ranks": "[0, 4]"})
        call("send", "pairs", "", 2, **{"Dst Rank": 1})
        call("_allgather_base", "shards", "", 8)
        call("_reduce_scatter_base", "shards", backward, 8)
        call("all_to_all", "rows", "", 8)
        call("allreduce", "plain", "", 3, **{"Process Group Ranks": "[0, 1, 4]"})
    roles = {group: role for group, (role, _) in _groups(builder).items()}
    assert roles == {
        "grads": "data",
        "pairs": "pipeline",
        "shards": "sharded data",
        "rows": "unknown",
        "plain": "unknown",
    }


def test_calls_on_threads_of_their_own_belong_to_the_backward_pass_that_runs_meanwhile() -> None:
    builder = TraceBuilder(0, 2, None)
    builder.op("autograd::engine::evaluate_function: AddmmBackward0", 100, 50, thread=2)
    builder.annotation("gloo:all_reduce", 120, 60, thread=3).annotation(
        "gloo:all_reduce", 300, 60, thread=3
    )
    builder.annotation("gloo:all_reduce", 130, 60, thread=4)
    assert [row["phase"] for row in calls(builder)] == ["backward", "backward", None]


def test_messages_and_splits_fill_the_matrix_exactly_and_the_rest_is_shared() -> None:
    builder = TraceBuilder(0, 4)
    builder.kernel("k_nccl", 0, 10, **ARGS("send", "0", 4, 1000, "Float") | {"Dst Rank": 2})
    builder.kernel("k_nccl", 20, 10, **ARGS("recv", "0", 4, 500, "Float") | {"Src Rank": 3})
    splits = {"In split size": "[1, 2, 3, 4]", "Out split size": "[1, 1, 1, 1]"}
    builder.kernel("k_nccl", 40, 10, **ARGS("all_to_allv", "0", 4, 1000, "Float") | splits)
    builder.kernel("k_nccl", 60, 9, **ARGS("allreduce", "0", 4, 3000, "Float"))
    found = analyze.collectives(builder.build()).calls
    cells = {(row["source"], row["target"]): row for row in analyze.matrix(found).to_dicts()}
    share = 2 * 12_000 // 4  # 2 (n - 1) / n of the size, over n - 1 peers
    assert cells[0, 2]["bytes"] == 4000 + 1200 + share
    assert cells[0, 2]["exact_bytes"] == 4000 + 1200
    assert (cells[0, 1]["bytes"], cells[0, 3]["bytes"]) == (800 + share, 1600 + share)
    assert (cells[3, 0]["bytes"], cells[3, 0]["exact_bytes"]) == (2000, 2000)
    assert set(cells) == {(0, 1), (0, 2), (0, 3), (3, 0)}
    (row,) = analyze.exchanges(found).to_dicts()
    assert (row["sent_bytes"], row["split_count"], row["peer_max_over_mean"]) == (4000, 1, 1.6)


def test_a_recorded_senders_message_is_not_counted_twice() -> None:
    sender = TraceBuilder(0, 2).kernel(
        "k_nccl", 0, 10, **ARGS("send", "0", 2, 1000, "Float") | {"Dst Rank": 1}
    )
    receiver = TraceBuilder(1, 2).kernel(
        "k_nccl", 0, 10, **ARGS("recv", "0", 2, 1000, "Float") | {"Src Rank": 0}
    )
    both = pl.concat([analyze.collectives(one.build()).calls for one in (sender, receiver)])
    assert analyze.matrix(both).select("source", "target", "bytes", "count").rows() == [
        (0, 1, 4000, 1)
    ]


def test_a_known_root_sends_to_each() -> None:
    builder = TraceBuilder(1, 3).kernel(
        "k_nccl", 0, 10, **ARGS("broadcast", "0", 3, 1000, "Float") | {"Root": 1}
    )
    cells = analyze.matrix(analyze.collectives(builder.build()).calls)
    assert cells.select("source", "target", "bytes").rows() == [(1, 0, 4000), (1, 2, 4000)]


def test_nothing_is_nothing() -> None:
    trace = TraceBuilder().op("aten::mm", 0, 5).build()
    found = analyze.collectives(trace)
    assert (found.calls.height, found.summary.height) == (0, 0)
    assert analyze.matrix(found.calls).height == analyze.exchanges(found.calls).height == 0
    assert analyze.groups(found.calls, analyze.declared_groups(trace), None).groups.height == 0


def test_the_summary_tells_the_spread_over_steps() -> None:
    builder = TraceBuilder()
    for step, length in enumerate((10, 20, 60)):
        builder.step(step, 100 * step, 100)
        builder.launch("cudaLaunchKernel", 100 * step + 5, 2, correlation=step + 1)
        args = ARGS("allreduce", "0", 2, 1000, "Float")
        builder.kernel(
            "ncclDevKernel_AllReduce", 100 * step + 10, length, correlation=step + 1, **args
        )
    (row,) = analyze.collectives(builder.build()).summary.to_dicts()
    assert (row["count"], row["total_ns"], row["min_ns"], row["median_ns"], row["max_ns"]) == (
        3,
        90_000,
        10_000,
        20_000,
        60_000,
    )
    assert (row["mean_total_ns"], row["min_total_ns"], row["max_total_ns"]) == (
        30_000,
        10_000,
        60_000,
    )
    assert (row["mean_call_count"], row["step_count"]) == (1, 3)


# -- what groups are for, from what is called over them -----------------------------------------------------------

FORWARD, BACKWARD = "nn.Module: Block_0", "autograd::engine::evaluate_function: AddmmBackward0"


def called(
    calls: list[tuple[str, str]], members: list[int], world: int, **more: Any
) -> tuple[str, str]:
    """Role and evidence of a group with these calls: kind, and the pass around each."""
    builder = TraceBuilder(members[0], world)
    for number, (kind, around) in enumerate(calls):
        at = 40 * number
        if around == FORWARD:
            builder.python(around, at, 30)
        elif around:
            builder.op(around, at, 30)
        builder.launch("cudaLaunchKernel", at + 2, 2, correlation=number + 1)
        told = (
            ARGS(kind, "7", len(members), 8, "Float") | {"Process Group Ranks": str(members)} | more
        )
        builder.kernel("ncclDevKernel_X", at + 5, 5, stream=20, correlation=number + 1, **told)
    return _groups(builder, world)["7"]


@pytest.mark.parametrize(
    ("calls", "members", "world", "role"),
    [
        ([("allreduce", FORWARD), ("allreduce", BACKWARD)] * 4, [0, 1], 8, "tensor"),
        ([("allreduce", FORWARD), ("allreduce", BACKWARD)] * 4, [0, 4], 8, "unknown"),
        ([("allreduce", BACKWARD)] * 4, [0, 4], 8, "data"),
        ([("allreduce", "")] * 4, list(range(8)), 8, "world"),
        (
            [("_allgather_base", FORWARD), ("_reduce_scatter_base", BACKWARD)] * 3,
            list(range(8)),
            8,
            "sharded data",
        ),
        (
            [
                ("_allgather_base", FORWARD),
                ("_allgather_base", BACKWARD),
                ("_reduce_scatter_base", FORWARD),
                ("_reduce_scatter_base", BACKWARD),
            ]
            * 2,
            [0, 1],
            8,
            "unknown",
        ),
        ([("send", ""), ("recv", "")] * 3, [0, 1], 2, "pipeline"),
        ([("all_to_all", FORWARD)] * 3, [0, 1, 2, 3], 8, "unknown"),
        ([("broadcast", "")] * 2, [0, 3], 8, "unknown"),
    ],
)
def test_roles_follow_from_what_is_called_in_which_pass_over_whom(
    calls: list[tuple[str, str]], members: list[int], world: int, role: str
) -> None:
    found, evidence = called(calls, members, world)
    assert found == role
    assert evidence.startswith("calls: ")


def test_hosts_decide_only_about_groups_whose_hosts_are_all_known() -> None:
    frames = []
    for rank in range(2):
        told = ARGS("allreduce", "0", 2, 4096, "Float") | {"Process Group Ranks": "[0, 1]"}
        trace = (
            TraceBuilder(rank, 2)
            .kernel("ncclDevKernel_AllReduce", 0, 10, stream=20, **told)
            .build()
        )
        frames.append(analyze.collectives(trace).calls)
    both, link = pl.concat(frames), find_device_link("NVIDIA H100 80GB HBM3")
    assert link is not None
    links = {0: link, 1: link}
    known = correct_links_by_host(both, {0: "a", 1: "a"}, links)
    assert set(known["link"]) == {link.name}
    assert known["link_fraction"].to_list() == pytest.approx(
        [rate / 450 for rate in both["bus_gb_per_s"]]
    )
    assert set(correct_links_by_host(both, {0: "a", 1: "b"}, links)["link"]) == {None}
    assert correct_links_by_host(both, {0: "a"}, links)["link"].equals(both["link"])
