"""PyTorch's known anti-patterns: one small trace that has each, one that has not, one that cannot tell; times in µs."""

from __future__ import annotations

from typing import Any

import pytest

from traceloom.analyze import anti_patterns
from traceloom.analyze.anti_patterns import RULES
from traceloom.testing import TraceBuilder

HALF, FLOAT = "c10::Half", "float"


def told(builder: TraceBuilder, name: str) -> dict[str, Any]:
    """The row of a pattern, with the details of its matches."""
    found = anti_patterns(builder.build())
    assert found.patterns["pattern"].to_list() == list(RULES)
    row = found.patterns.filter(pattern=name).to_dicts()[0]
    matches = found.matches.filter(pattern=name)
    assert (row["match_count"] or 0) == matches.height
    assert row["checked"] == (row["reason"] is None) == (row["match_count"] is not None)
    return {**row, "details": matches["detail"].to_list(), "matches": matches}


def copied(
    builder: TraceBuilder, at: float, *, kind: str = "HtoD", types: tuple[str, str] = (FLOAT, FLOAT)
) -> TraceBuilder:
    """`.to('cuda')`, from `at` to `at + 20`."""
    builder.op("aten::to", at, 20).op("aten::_to_copy", at + 1, 18)
    builder.op("aten::empty_strided", at + 2, 2)
    builder.op("aten::copy_", at + 5, 12, shapes=[[4], [4]], types=list(types))
    builder.launch("cudaMemcpyAsync", at + 6, 9, correlation=int(at) + 1)
    return builder.copy(
        f"Memcpy {kind} (Pageable -> Device)", at + 8, 4, bytes=16, correlation=int(at) + 1
    )


def test_a_tensor_that_is_filled_and_moved_at_once_is_an_extra_copy() -> None:
    builder = TraceBuilder().op("aten::ones", 0, 10).op("aten::fill_", 5, 4)
    row = told(copied(builder, 20), "extra_cuda_copy")
    assert (row["match_count"], row["details"], row["evidence"]) == (
        1,
        ["filled by aten::fill_"],
        "inferred",
    )
    assert (row["host_ns"], row["gpu_ns"]) == (20_000, 4_000)


def test_with_stacks_both_must_come_from_the_same_code() -> None:
    builder = (
        TraceBuilder()
        .python("train.py(3): step", 0, 60)
        .python("<built-in method ones of type>", 1, 12)
    )
    builder.op("aten::ones", 2, 10).op("aten::fill_", 5, 4).python(
        "<built-in method to of Tensor>", 19, 30
    )
    row = told(copied(builder, 20), "extra_cuda_copy")
    assert (row["match_count"], row["evidence"]) == (1, "correlated")
    apart = TraceBuilder().python("train.py(3): step", 0, 60).python("data.py(9): make", 0, 15)
    apart.python("<built-in method ones of type>", 1, 12).op("aten::ones", 2, 10).op(
        "aten::fill_", 5, 4
    )
    apart.python("<built-in method to of Tensor>", 19, 30)
    assert told(copied(apart, 20), "extra_cuda_copy")["match_count"] == 0


@pytest.mark.parametrize(
    "builder",
    [
        copied(TraceBuilder().op("aten::mm", 0, 10), 20),
        copied(
            TraceBuilder().op("aten::ones", 0, 10).op("aten::fill_", 5, 4).op("aten::mm", 12, 3), 20
        ),
        copied(TraceBuilder().op("aten::ones", 0, 10).op("aten::fill_", 5, 4), 20, kind="DtoH"),
        copied(
            TraceBuilder().op("aten::ones", 0, 10).op("aten::fill_", 5, 4), 20, types=(HALF, FLOAT)
        ),
        copied(
            TraceBuilder().op("aten::ones", 0, 10, thread=2).op("aten::fill_", 5, 4, thread=2), 20
        ),
    ],
    ids=["not filled", "something between", "to the CPU", "converted", "another thread"],
)
def test_other_copies_are_none(builder: TraceBuilder) -> None:
    assert told(builder, "extra_cuda_copy")["match_count"] == 0


def loop(
    times: int, *, between: tuple[str, ...] = ("aten::fill_",), builder: TraceBuilder | None = None
) -> TraceBuilder:
    builder, at = builder or TraceBuilder(), 0.0
    for _ in range(times):
        for name in ("aten::select", *between):
            builder.op(name, at, 2)
            at += 3
    return builder


def test_ten_selects_in_a_row_are_a_loop_over_indices() -> None:
    row = told(loop(12).op("aten::mm", 100, 5), "for_loop_indexing")
    assert row["details"] == ["12 times aten::select, aten::fill_"]
    assert (row["match_count"], row["host_ns"]) == (1, 12 * 6_000 - 1_000)
    assert told(loop(10), "for_loop_indexing")["match_count"] == 1
    assert told(loop(9), "for_loop_indexing")["match_count"] == 0


def test_a_loop_is_broken_by_anything_else() -> None:
    builder = TraceBuilder()
    at = 0.0
    for number in range(20):
        builder.op("aten::select", at, 2).op(
            "aten::fill_" if number != 9 else "aten::copy_", at + 3, 2
        )
        at += 6
    assert told(builder, "for_loop_indexing")["match_count"] == 1  # the second half alone
    assert told(builder, "for_loop_indexing")["details"] == ["10 times aten::select, aten::fill_"]


def test_selects_below_different_operators_are_no_loop() -> None:
    builder, at = TraceBuilder(), 0.0
    for _ in range(12):
        builder.op("aten::embedding", at, 9).op("aten::select", at + 1, 2).op(
            "aten::fill_", at + 4, 2
        )
        at += 10
    assert told(builder, "for_loop_indexing")["match_count"] == 0


def test_built_in_functions_are_no_code_of_their_own() -> None:
    builder = TraceBuilder().python("train.py(3): step", 0, 200)
    for number in range(12):
        builder.python("<built-in method select of Tensor>", 10.0 * number, 8).op(
            "aten::select", 10.0 * number + 1, 2
        )
    row = told(builder, "for_loop_indexing")
    assert (row["match_count"], row["evidence"]) == (1, "correlated")


def product(
    kernel: str,
    *,
    device: str = "NVIDIA A100-SXM4-80GB",
    call: str = "cudaLaunchKernel",
    **more: Any,
) -> TraceBuilder:
    builder = TraceBuilder(device_name=device, **more).op("aten::mm", 0, 20)
    builder.launch(call, 5, 5, correlation=1)
    return builder.kernel(kernel, 12, 9, correlation=1, **{"External id": 1})


def test_a_product_in_plain_fp32_is_told_by_its_kernel() -> None:
    row = told(product("ampere_sgemm_128x64_nn"), "fp32_matmul")
    assert (row["match_count"], row["gpu_ns"], row["details"]) == (
        1,
        9_000,
        ["runs ampere_sgemm_128x64_nn"],
    )
    for kernel in (
        "cutlass_80_tensorop_s1688gemm_128x64_nn_align1",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_nn",
        "ampere_bf16_s16816gemm",
    ):
        assert told(product(kernel), "fp32_matmul")["match_count"] == 0


def test_tf32_is_not_asked_for_where_there_is_none() -> None:
    amd = told(
        product("Cijk_Ailk_Bljk_SB", device="AMD Instinct MI300X", call="hipLaunchKernel"),
        "fp32_matmul",
    )
    assert "no CUDA call" in amd["reason"]
    old = product("volta_sgemm_128x64_nn")
    old.metadata(
        deviceProperties=[{"id": 0, "name": "Tesla V100", "computeMajor": 7, "computeMinor": 0}]
    )
    assert "compute capability 7.0" in told(old, "fp32_matmul")["reason"]
    alone = TraceBuilder().op("aten::mm", 0, 20).launch("cudaLaunchKernel", 30, 5, correlation=1)
    assert (
        "joined to its operator"
        in told(alone.kernel("k", 40, 5, correlation=1), "fp32_matmul")["reason"]
    )


def test_an_optimizer_that_goes_one_by_one_is_told_by_its_code_else_by_its_operators() -> None:
    frame = (
        TraceBuilder()
        .python("torch/optim/adam.py(345): _single_tensor_adam", 0, 50)
        .op("aten::add_", 5, 2)
    )
    row = told(frame, "single_tensor_optimizer")
    assert (row["match_count"], row["evidence"], row["details"]) == (
        1,
        "correlated",
        ["_single_tensor_adam"],
    )
    stacked = TraceBuilder().python("torch/optim/adam.py(600): _multi_tensor_adam", 0, 50)
    assert told(stacked, "single_tensor_optimizer")["match_count"] == 0
    work = (
        TraceBuilder()
        .annotation("Optimizer.step#SGD.step", 0, 50)
        .launch("cudaLaunchKernel", 5, 1, correlation=1)
    )
    work.kernel("k", 8, 2, correlation=1)
    for number in range(4):
        work.op("aten::add_", 10 + 5 * number, 3)
    row = told(work, "single_tensor_optimizer")
    assert (row["match_count"], row["evidence"], row["details"]) == (
        1,
        "inferred",
        ["4 updates one by one"],
    )
    assert (
        told(work.op("aten::_foreach_add_", 40, 3), "single_tensor_optimizer")["match_count"] == 0
    )
    assert (
        "no optimizer step"
        in told(TraceBuilder().op("aten::mm", 0, 5), "single_tensor_optimizer")["reason"]
    )
    on_cpu = (
        TraceBuilder()
        .annotation("Optimizer.step#SGD.step", 0, 50)
        .op("aten::add_", 5, 2)
        .op("aten::add_", 9, 2)
    )
    assert "no GPU work" in told(on_cpu, "single_tensor_optimizer")["reason"]


def test_a_loader_without_workers() -> None:
    span = TraceBuilder().annotation(
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 50
    )
    assert told(span, "synchronous_data_loader")["match_count"] == 1
    workers = TraceBuilder().annotation(
        "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 50
    )
    assert told(workers, "synchronous_data_loader")["match_count"] == 0
    path = "torch/utils/data/dataloader.py"
    frames = (
        TraceBuilder()
        .python(f"{path}(415): __iter__", 0, 50)
        .python(f"{path}(360): _get_iterator", 5, 40)
    )
    assert told(frames, "synchronous_data_loader")["match_count"] == 1
    frames.python(f"{path}(390): check_worker_number_rationality", 10, 5)
    assert told(frames, "synchronous_data_loader")["match_count"] == 0
    assert (
        "no DataLoader"
        in told(TraceBuilder().op("aten::mm", 0, 5), "synchronous_data_loader")["reason"]
    )


def test_gradients_that_are_zeroed() -> None:
    zeroed = TraceBuilder().annotation("Optimizer.zero_grad#SGD.zero_grad", 0, 50)
    zeroed.python("torch/optim/optimizer.py(100): zero_grad", 1, 48).op("aten::zero_", 5, 3).op(
        "aten::zero_", 10, 3
    )
    row = told(zeroed, "gradient_not_set_to_none")
    assert (row["match_count"], row["details"]) == (1, ["2 fills with zero"])
    new = (
        TraceBuilder()
        .annotation("Optimizer.zero_grad#SGD.zero_grad", 0, 50)
        .op("aten::zeros", 5, 9)
    )
    assert told(new.op("aten::zero_", 6, 3), "gradient_not_set_to_none")["match_count"] == 0
    many = (
        TraceBuilder()
        .annotation("Optimizer.zero_grad#SGD.zero_grad", 0, 50)
        .op("aten::_foreach_zero_", 5, 9)
    )
    assert told(many, "gradient_not_set_to_none")["match_count"] == 1
    assert (
        "no zero_grad"
        in told(TraceBuilder().op("aten::zero_", 0, 5), "gradient_not_set_to_none")["reason"]
    )


def convolution(bias: bool, *, norm: str = "aten::batch_norm") -> TraceBuilder:
    shapes = [[1, 3, 8, 8], [4, 3, 3, 3], [4] if bias else []]
    builder = TraceBuilder().op(
        "aten::conv2d", 0, 20, shapes=shapes, types=[FLOAT, FLOAT, FLOAT if bias else ""]
    )
    return builder.op(norm, 25, 10)


def test_a_bias_that_a_normalisation_takes_away() -> None:
    row = told(convolution(True), "conv_bias_before_batch_norm")
    assert (row["match_count"], row["evidence"]) == (1, "inferred")
    assert told(convolution(False), "conv_bias_before_batch_norm")["match_count"] == 0
    assert (
        told(convolution(True, norm="aten::relu"), "conv_bias_before_batch_norm")["match_count"]
        == 0
    )
    by_module = TraceBuilder().python("nn.Module: Conv2d_0", 0, 30)
    by_module.op("aten::conv2d", 5, 20, shapes=[[1], [4], [4]], types=[FLOAT] * 3)
    by_module.python("nn.Module: BatchNorm2d_0", 40, 10)
    row = told(by_module, "conv_bias_before_batch_norm")
    assert (row["match_count"], row["evidence"]) == (1, "correlated")
    between = TraceBuilder().python("nn.Module: Conv2d_0", 0, 30)
    between.op("aten::conv2d", 5, 20, shapes=[[1], [4], [4]], types=[FLOAT] * 3)
    between.python("nn.Module: ReLU_0", 35, 3).python("nn.Module: BatchNorm2d_0", 40, 10)
    assert told(between, "conv_bias_before_batch_norm")["match_count"] == 0


def test_without_shapes_cudnn_shows_its_bias() -> None:
    def bare(*below: str) -> TraceBuilder:
        builder = TraceBuilder().op("aten::conv2d", 0, 20)
        for number, name in enumerate(below):
            builder.op(name, 2 + 5 * number, 4)
        return builder.op("aten::batch_norm", 25, 10)

    assert (
        told(bare("aten::cudnn_convolution", "aten::add_"), "conv_bias_before_batch_norm")[
            "match_count"
        ]
        == 1
    )
    assert told(bare("aten::cudnn_convolution"), "conv_bias_before_batch_norm")["match_count"] == 0
    assert (
        "no shapes"
        in told(bare("aten::miopen_convolution"), "conv_bias_before_batch_norm")["reason"]
    )


def test_half_precision_matrices_want_multiples_of_eight() -> None:
    def mm(left: list[int], right: list[int], kind: str = HALF) -> dict[str, Any]:
        return told(
            TraceBuilder().op("aten::mm", 0, 20, shapes=[left, right], types=[kind, kind]),
            "unaligned_half_matmul",
        )

    assert mm([16, 64], [64, 100])["details"] == ["[16, 64] x [64, 100]"]
    assert mm([16, 64], [64, 128])["match_count"] == 0
    assert mm([16, 64], [64, 100], FLOAT)["match_count"] == 0
    assert mm([16, 64], [64, 100], "c10::BFloat16")["match_count"] == 1
    batched = TraceBuilder().op(
        "aten::bmm", 0, 20, shapes=[[3, 16, 64], [3, 64, 64]], types=[HALF, HALF]
    )
    assert told(batched, "unaligned_half_matmul")["match_count"] == 0, (
        "the batch dimension does not count"
    )
    assert (
        "record_shapes"
        in told(TraceBuilder().op("aten::mm", 0, 20), "unaligned_half_matmul")["reason"]
    )


def test_an_empty_trace_answers_too() -> None:
    found = anti_patterns(TraceBuilder().build())
    assert found.patterns.height == 8
    assert not found.matches.height
