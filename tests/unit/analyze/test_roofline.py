"""Whose FLOPs they are, how they compare with the peaks, and what is left unsaid."""

from __future__ import annotations

import copy
import gc
from typing import Any

import polars as pl
import pytest

from traceloom.analyze import flops, kernel_kinds, roofline
from traceloom.analyze.modelled_calls import find_modelled_calls
from traceloom.analyze.placed_calls import Peak, find, find_peaks, list_known_devices, parse_peak
from traceloom.analyze.roofline import MODELLED, OPERATORS, select_modelled_work
from traceloom.analyze.utilisation import STEPS
from traceloom.errors import UsageError
from traceloom.testing import TraceBuilder
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

BF = "c10::BFloat16"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
PEAK = "bf16=1e12,fp32=1e11,tf32=5e11,memory=1e12"  # 1 FLOP per ps, 1 byte per ps
ENGINE = "autograd::engine::evaluate_function: MmBackward0"


class Writer:
    """One operator after another, each with its launch and kernel."""

    def __init__(self, **options: Any) -> None:
        self.builder = TraceBuilder(**options)
        self.correlation = 0

    def launch(self, at: float, kernel: str, start: float, duration: float, **args: Any) -> Writer:
        self.correlation += 1
        self.builder.launch("cudaLaunchKernel", at, 1, correlation=self.correlation)
        self.builder.kernel(kernel, start, duration, correlation=self.correlation, **args)
        return self

    def op(
        self,
        name: str,
        at: float,
        duration: float,
        shapes: list[Any],
        types: list[str],
        **args: Any,
    ) -> Writer:
        self.builder.op(name, at, duration, shapes=shapes, types=types, **args)
        return self

    def mm(self, at: float, start: float, duration: float, size: int = 100, **args: Any) -> Writer:
        """size³·2 FLOPs, 3·2·size² bytes in bf16."""
        self.op("aten::mm", at, 8, [[size, size], [size, size]], [BF, BF], **args)
        return self.launch(at + 2, GEMM, start, duration)

    def build(self) -> Trace:
        return self.builder.build()


def whole(trace: Trace, peak: Any = PEAK) -> dict[str, Any]:
    return roofline(trace, peak).whole.row(0, named=True)


def test_the_outermost_modelled_operator_owns_the_work_once() -> None:
    writer = Writer()
    writer.op("aten::linear", 0, 20, [[6, 100], [50, 100], [50]], [BF, BF, BF])
    writer.op(
        "aten::addmm", 5, 10, [[50], [6, 100], [100, 50], [], []], [BF, BF, BF, "Scalar", "Scalar"]
    )
    trace = writer.launch(7, GEMM, 30, 50).build()
    work = select_modelled_work(trace, PEAK)
    assert trace.events["name"][work["op"][0]] == "aten::linear"
    assert work["flops"].to_list() == [2 * 6 * 100 * 50]
    assert roofline(trace, PEAK).operators["name"].to_list() == ["aten::linear"]


def test_an_operator_that_cannot_be_modelled_leaves_the_work_to_those_inside() -> None:
    writer = Writer()
    writer.op("aten::linear", 0, 20, [], [])
    writer.op("aten::mm", 5, 10, [[6, 100], [100, 50]], [BF, BF])
    trace = writer.launch(7, GEMM, 30, 50).build()
    assert roofline(trace, PEAK).operators["name"].to_list() == ["aten::mm"]


def test_several_kernels_of_one_call_share_it_by_time_and_add_up() -> None:
    writer = Writer()
    writer.op("aten::mm", 0, 20, [[7, 11], [11, 13]], [BF, BF])
    for at, duration in ((2, 1), (4, 1), (6, 5), (8, 0)):
        writer.launch(at, GEMM, 30 + 10 * at, duration)
    work = select_modelled_work(writer.build(), PEAK)
    assert work["flops"].sum() == 2 * 7 * 11 * 13
    assert work["bytes"].sum() == 2 * (77 + 143 + 91)
    assert work["flops"].to_list() == [286, 286, 1430, 0]


def test_kernels_without_a_recorded_length_share_by_number() -> None:
    writer = Writer()
    writer.op("aten::mm", 0, 20, [[7, 11], [11, 13]], [BF, BF])
    writer.launch(2, GEMM, 30, 0).launch(4, GEMM, 40, 0)
    assert select_modelled_work(writer.build(), PEAK)["flops"].to_list() == [1001, 1001]


def test_roofline_time_is_the_longer_of_computing_and_moving() -> None:
    writer = Writer().mm(0, 30, 50, size=100)
    writer.op("aten::add", 10, 8, [[1000], [1000], []], ["float", "float", "Scalar"]).launch(
        12, "add", 90, 1
    )
    rows = {row["name"]: row for row in roofline(writer.build(), PEAK).operators.to_dicts()}
    product, addition = rows["aten::mm"], rows["aten::add"]
    assert (product["bound"], product["roofline_ns"]) == (
        "compute",
        2_000,
    )  # 2·10⁶ FLOPs at 10¹² per second
    assert product["roofline_fraction"] == pytest.approx(2 / 50)
    assert product["flop_rate"] == pytest.approx(2e6 / 50e-6)
    assert (addition["bound"], addition["roofline_ns"]) == (
        "memory",
        12,
    )  # 1000 FLOPs at 10¹¹, 12 kB at 10¹²
    assert addition["peak_flop_rate"] == 1e11
    assert addition["intensity"] == pytest.approx(1000 / 12_000)


@pytest.mark.parametrize(
    ("kernel", "arithmetic", "evidence", "peak"),
    [
        ("cutlass_80_tensorop_s1688gemm_64x64_32x6_nn_align4", "tf32", "kernel name", 5e11),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16", "tf32", "kernel name", 5e11),
        ("ampere_sgemm_32x128_tn", "fp32", "kernel name", 1e11),
        ("Cijk_Ailk_Bjlk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128", "fp32", "kernel name", 1e11),
        ("somebody_elses_gemm", "fp32", "assumed", 1e11),
    ],
)
def test_tf32_is_told_by_the_kernel(
    kernel: str, arithmetic: str, evidence: str, peak: float
) -> None:
    writer = (
        Writer()
        .op("aten::mm", 0, 8, [[100, 100], [100, 100]], ["float", "float"])
        .launch(2, kernel, 30, 50)
    )
    row = roofline(writer.build(), PEAK).operators.row(0, named=True)
    assert (row["arithmetic"], row["evidence"], row["peak_flop_rate"]) == (
        arithmetic,
        evidence,
        peak,
    )


def test_copies_over_the_link_are_not_compared_with_the_memory_of_the_device() -> None:
    builder = TraceBuilder()
    builder.op("aten::to", 0, 20, shapes=[[100], []], types=["float", "Scalar"])
    builder.op("aten::copy_", 2, 15, shapes=[[100], [100], []], types=["float", "float", "Scalar"])
    builder.launch("cudaMemcpyAsync", 5, 2, correlation=1)
    builder.copy("Memcpy HtoD (Pageable -> Device)", 30, 5, bytes=400, correlation=1)
    trace = builder.build()
    assert select_modelled_work(trace, PEAK).height == 0
    assert roofline(trace, PEAK).unmodelled["reason"].to_list() == [
        "a copy between host and device: the link bounds it"
    ]


def test_what_has_no_model_says_why() -> None:
    writer = Writer()
    writer.op("my::secret", 0, 8, [[3]], ["float"]).launch(2, "secret", 30, 5)
    writer.op("aten::index", 10, 8, [[8, 4], []], ["float", ""]).launch(12, "gather", 40, 4)
    writer.builder.op("aten::mm", 20, 8)
    writer.launch(22, GEMM, 50, 3)
    writer.launch(30, "by hand", 60, 2)
    writer.builder.kernel("orphan", 5, 1)
    found = roofline(writer.build(), PEAK).unmodelled
    assert dict(found.select("name", "reason").rows()) == {
        "my::secret": "no model for this operator",
        "aten::index": "the shapes of the indices are not recorded",
        "aten::mm": "the shapes of the operator's inputs are not recorded",
        "by hand": "launched outside every recorded operator",
        "orphan": "its launch is not in the recording",
    }


def steps(writer: Writer, peak: Any = PEAK) -> pl.DataFrame:
    return roofline(writer.build(), peak).steps


def test_a_step_adds_roofline_times_and_the_rest_as_measured() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    writer.mm(5, 30, 20)  # 2 µs at the peak
    writer.launch(40, "other", 60, 10)  # no operator
    writer.launch(45, "hidden", 35, 5, stream=8)  # while the product runs
    row = steps(writer).row(0, named=True)
    assert (row["roofline_ns"], row["rest_ns"], row["duration_ns"]) == (2_000, 10_000, 100_000)
    assert row["roofline_fraction"] == pytest.approx(0.12)
    assert row["modelled_fraction"] == pytest.approx(20 / 35)
    assert row["mfu"] == row["hfu"] == pytest.approx(0.02)


def test_a_gpu_that_lags_behind_does_not_fill_a_step_with_more_than_its_time() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100).step(3, 200, 100)
    writer.mm(5, 60, 80)  # runs from the first step into the second
    writer.launch(40, "other", 140, 100)  # launched in the first, runs in the second and third
    found = steps(writer)
    assert found["roofline_ns"].to_list() == [
        1_000,
        1_000,
        None,
    ]  # 2 µs at the peak, half of it in each
    assert found["rest_ns"].to_list() == [0, 60_000, None]
    assert found["gpu_ns"].to_list() == [40_000, 100_000, 40_000]
    assert found["flops"].to_list() == [2_000_000, 0, 0]


def test_work_launched_before_the_recording_is_time_of_the_step_but_none_of_its_flops() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    writer.builder.kernel(GEMM, 10, 40)
    row = steps(writer.mm(5, 60, 10)).row(0, named=True)
    assert row["rest_ns"] == 40_000
    assert row["hfu"] == row["mfu"] == pytest.approx(0.02)
    assert row["modelled_fraction"] == pytest.approx(10 / 50)


def test_repeated_forward_work_counts_for_hfu_and_not_for_mfu() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    writer.mm(5, 30, 10, sequence=7)
    writer.builder.op(ENGINE, 40, 40, sequence=7, forward_thread=1)
    writer.builder.python("torch/utils/checkpoint.py(1500): recompute_fn", 42, 14)
    writer.mm(45, 50, 10)
    writer.mm(60, 70, 10).mm(70, 85, 10)
    row = steps(writer).row(0, named=True)
    assert row["hardware_flops"] == 4 * 2_000_000
    assert row["model_flops"] == 3 * 2_000_000
    assert row["hfu"] == pytest.approx(0.08)
    assert row["mfu"] == pytest.approx(0.06)


def test_scores_that_flash_attention_does_again_are_no_work_of_the_model() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    shape = [2, 16, 8, 64]
    values = ["", "", "", "", "", "", "", "", "16", "16", "0.", "False"]
    writer.op(
        "aten::_flash_attention_backward",
        5,
        8,
        [shape] * 5 + [[2, 8, 16]] + [[]] * 6,
        [BF] * 5 + ["float"] + [""] * 2 + ["Scalar"] * 4,
        **{"Concrete Inputs": values},
    )
    writer.launch(7, "flash_bwd", 30, 10)
    row = steps(writer).row(0, named=True)
    one = 2 * 2 * 8 * 16 * 16 * 64
    assert (row["hardware_flops"], row["model_flops"]) == (5 * one, 4 * one)
    assert row["mfu"] == pytest.approx(row["hfu"] * 4 / 5)


def test_without_sequence_numbers_mfu_of_training_is_not_told() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    writer.builder.op(ENGINE, 2, 30)
    row = steps(writer.mm(5, 30, 10)).row(0, named=True)
    assert row["mfu"] is None
    assert row["model_flops"] is None
    assert row["hfu"] == pytest.approx(0.02)
    assert "repeated forward work cannot be determined" in row["reason"]


def test_a_compiled_backward_pass_does_not_tell_what_it_repeats() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    writer.builder.op("CompiledFunctionBackward", 2, 30, sequence=3, forward_thread=1)
    row = steps(writer.mm(5, 30, 10)).row(0, named=True)
    assert (row["mfu"], row["hfu"]) == (None, pytest.approx(0.02))
    assert "compiled" in row["reason"]


def test_matrix_work_without_a_model_leaves_mfu_and_hfu_untold() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    writer.mm(5, 30, 10).launch(40, GEMM, 60, 10)
    row = steps(writer).row(0, named=True)
    assert (row["mfu"], row["hfu"]) == (None, None)
    assert row["reason"] == "more than 5 % of the GPU work is matrix work without a model"
    assert row["roofline_fraction"] == pytest.approx((2 + 10) / 100)


def test_several_devices_of_one_process_share_the_time() -> None:
    writer = Writer(devices=2)
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    writer.mm(5, 30, 10)
    writer.op("aten::mm", 40, 8, [[100, 100], [100, 100]], [BF, BF]).launch(
        42, GEMM, 60, 10, device=1
    )
    assert steps(writer).row(0, named=True)["hfu"] == pytest.approx(4 / 200)


def test_spread_is_over_whole_steps() -> None:
    writer = Writer()
    for number in range(4):
        writer.builder.step(number, 100 * number, 100)
        for k in range(number + 1):
            writer.mm(100 * number + 5 + 10 * k, 100 * number + 40 + 12 * k, 10)
    found = roofline(writer.build(), PEAK)
    spread = {row["quantity"]: row for row in found.spread.to_dicts()}
    whole_steps = found.steps.filter("complete")
    assert spread["hfu"]["step_count"] == whole_steps.height >= 3
    assert spread["hfu"]["min"] == pytest.approx(0.02)
    assert spread["flops"]["max"] == whole_steps["flops"].max()


def test_an_unknown_device_gives_flops_and_no_percentage() -> None:
    writer = Writer(device_name="AMD Radeon Graphics")
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    trace = writer.mm(5, 30, 10).build()
    found = roofline(trace)
    row = found.operators.row(0, named=True)
    assert row["flops"] == 2_000_000
    assert [
        row[key] for key in ("roofline_ns", "roofline_fraction", "bound", "peak_flop_rate")
    ] == [None] * 4
    assert found.devices["reason"].to_list() == ["the peaks of 'AMD Radeon Graphics' are not known"]
    told = found.steps.row(0, named=True)
    assert (told["mfu"], told["roofline_fraction"], told["reason"]) == (
        None,
        None,
        "the peaks of the device are not known",
    )
    assert select_modelled_work(trace)["roofline_ns"].to_list() == [None]
    assert roofline(trace, "H100 SXM").steps["hfu"][0] == pytest.approx(2e6 / 989.4e12 / 100e-6)


def test_an_element_type_without_a_peak_gives_no_percentage() -> None:
    writer = Writer(device_name="Tesla V100-SXM2-16GB")  # has no bf16
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    found = roofline(writer.mm(5, 30, 10).build(), "V100 SXM2")
    assert found.operators["roofline_fraction"].to_list() == [None]
    assert found.steps["reason"][0] == "the peak for this element type is not known"


def test_a_run_without_gpu_is_modelled_in_host_time() -> None:
    builder = TraceBuilder(device_name=None)
    builder.op(
        "aten::linear", 0, 20, shapes=[[6, 100], [50, 100], []], types=["float", "float", ""]
    )
    builder.op("aten::mm", 5, 10, shapes=[[6, 100], [100, 50]], types=["float", "float"])
    found = roofline(builder.build())
    assert found.timed_on == "host"
    assert found.operators.select("name", "total_ns", "flops").rows() == [
        ("aten::linear", 20_000, 60_000)
    ]
    assert found.operators["flop_rate"][0] == pytest.approx(60_000 / 20e-6)
    assert found.operators["roofline_fraction"][0] is None


def test_ranks_of_a_session_stand_one_after_the_other() -> None:
    traces = tuple(
        Writer(rank=rank, world_size=2).mm(0, 30, 10 * (rank + 1)).build() for rank in range(2)
    )
    found = roofline(Session(traces, "run"), PEAK)
    assert found.whole.select("rank", "gpu_ns").rows() == [(0, 10_000), (1, 20_000)]
    assert found.operators["rank"].to_list() == [0, 1]
    assert found.flops == 4_000_000


@pytest.mark.parametrize(
    "trace",
    [TraceBuilder().build(), TraceBuilder().kernel("k", 1, 2).build()],
    ids=["empty", "orphan"],
)
def test_frames_keep_their_columns_without_anything_to_tell(trace: Trace) -> None:
    found = roofline(trace)
    assert select_modelled_work(trace).schema == MODELLED
    assert found.operators.drop("rank").schema == OPERATORS
    assert found.steps.drop("rank").schema == STEPS
    assert found.whole.height == 1


def test_a_model_registered_later_is_used_at_once() -> None:
    trace = Writer().op("my::op", 0, 8, [[100]], ["float"]).launch(2, "mine", 30, 5).build()
    assert roofline(trace, PEAK).operators.height == 0

    @flops.register("my::op")
    def mine(call: flops.Call) -> flops.Work:
        return flops.Work(flops=3 * call.tensor(0).numel, bytes=call.tensor(0).bytes, dtype="fp32")

    try:
        assert roofline(trace, PEAK).operators["flops"].to_list() == [300]
    finally:
        flops.remove("my::op")
    assert roofline(trace, PEAK).operators.height == 0


def test_peaks_without_memory_tell_mfu_and_no_roofline() -> None:
    writer = Writer()
    writer.builder.step(1, 0, 100).step(2, 100, 100)
    row = steps(writer.mm(5, 30, 10), "bf16=1e12").row(0, named=True)
    assert (row["mfu"], row["roofline_fraction"]) == (pytest.approx(0.02), None)


def test_what_is_remembered_goes_with_the_trace_and_not_with_another() -> None:
    first, second = Writer().mm(0, 30, 10).build(), Writer().mm(0, 30, 10, size=50).build()
    select_modelled_work(first)
    kept = find_modelled_calls(second)
    del first
    gc.collect()
    assert find_modelled_calls(second) is kept


def test_kinds_of_work_do_not_depend_on_models() -> None:
    trace = Writer().mm(0, 30, 10).build()
    before = kernel_kinds(trace).kinds
    roofline(trace, PEAK)
    assert kernel_kinds(trace).kinds.equals(before)


@pytest.mark.parametrize(
    ("name", "bf16", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12, 3.35e12),
        ("NVIDIA A100-PG509-200", 312e12, 1.555e12),
        ("AMD Instinct MI300X VF", 1307.4e12, 5.3e12),
        ("AMD Instinct MI300X", 1307.4e12, 5.3e12),
        ("AMD Instinct MI210", 181e12, 1.638e12),
        ("NVIDIA H800", 989.4e12, 3.35e12),
        ("NVIDIA H20", 148e12, 4.0e12),
        ("NVIDIA L4", 121e12, 0.3e12),
        ("NVIDIA A10", 125e12, 0.6e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12),
        ("Tesla T4", None, 0.32e12),
        ("Tesla V100-SXM2-16GB", None, 0.9e12),
        ("NVIDIA GeForce RTX 2080 Ti", None, 0.616e12),
    ],
)
def test_devices_are_known_by_the_names_of_real_traces(
    name: str, bf16: float | None, memory: float
) -> None:
    peak = find(name)
    assert isinstance(peak, Peak)
    assert (peak.rate("bf16", matrix=True), peak.memory) == (bf16, memory)


@pytest.mark.parametrize(
    "name",
    [
        "",
        None,
        "AMD Radeon Graphics",
        "NVIDIA A10G",
        "NVIDIA H100",
        "NVIDIA L40",
        "NVIDIA A100",
        "H100 80GB",
        "T400",
    ],
)
def test_a_name_that_is_only_similar_is_not_taken(name: str | None) -> None:
    assert isinstance(find(name), str)


def test_a_part_of_a_device_is_not_the_device() -> None:
    assert isinstance(find("NVIDIA H100 80GB HBM3", 132), Peak)
    assert "part" in str(find("NVIDIA H100 80GB HBM3", 16))


def test_every_device_has_a_memory_rate_and_rates_that_grow_with_smaller_types() -> None:
    for name in list_known_devices():
        peak = find(name)
        assert isinstance(peak, Peak)
        assert peak.memory is not None
        assert peak.rate("fp32", matrix=False) is not None
        ladder = [
            peak.flops[key] for key in ("fp32", "tf32", "fp16", "fp8", "fp4") if key in peak.flops
        ]
        assert ladder == sorted(ladder), name


def test_a_device_that_the_file_does_not_describe_takes_the_only_name_there_is() -> None:
    trace = (
        Writer(device_name="AMD Instinct MI300X VF")
        .op("aten::mm", 0, 8, [[9, 9], [9, 9]], [BF, BF])
        .launch(2, GEMM, 30, 5, device=2)
        .build()
    )
    described = copy.copy(trace.devices)
    assert described.filter("used")["name"].to_list() == [None]
    found = find_peaks(trace)[2]
    assert "multiprocessors" in str(found)  # the made file says 132


@pytest.mark.parametrize(
    "given",
    ["bf16=0", "bf16=x", "bf16", "speed=3", "bf16=1e12,memory=-1", "bf16=nan", "memory=inf", ""],
)
def test_peaks_that_make_no_sense_are_refused(given: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_peak(given)
    assert refused.value.slug in ("bad-peak", "no-such-device")


def test_peaks_can_be_given_as_numbers_or_by_name() -> None:
    assert parse_peak({"bf16": 2.0, "memory": 3}).rate("bf16", matrix=True) == 2.0
    assert parse_peak("bf16=989e12, memory=3.35e12").memory == 3.35e12
    assert parse_peak("h100 sxm").name == "H100 SXM"
    assert parse_peak(parse_peak("H20")).name == "H20"
