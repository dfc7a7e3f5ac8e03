"""The rest of the rules by exact figures: repeated and separate work, odd sizes, slow steps, tables, full devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np
import pytest

from support.by_hand import BUSY, BY_SLUG, GEMM, HandStep, ranked, said
from traceloom.findings import Context
from traceloom.findings.context import get_outermost_operator, shorten_name
from traceloom.findings.ranking import compute_median_floor, compute_median_interval
from traceloom.findings.rule import Candidate, Remark
from traceloom.testing import TraceBuilder
from traceloom.trace.notice import Abstention, Finding
from traceloom.trace.session import Session

US = 1_000


def only(slug: str, *steps: TraceBuilder) -> Finding:
    (finding,) = ranked(slug, *steps).time
    return finding


def candidates(slug: str, *steps: TraceBuilder) -> list[Candidate]:
    return [one for one in said(slug, *steps) if isinstance(one, Candidate)]


# -- work that is done again --------------------------------------------------------------------------------------------

REPEATING = "env/torch/utils/checkpoint.py(1121): recompute_fn"


def backward(name: str, category: str = "python") -> HandStep:
    """A backward pass in which one part of 2 ms repeats a forward kernel of 1.9 ms; it decides how long the step is."""
    step = HandStep(5_030)
    step.op("aten::mm", 0, 30).launched(GEMM, 5, 12, 1_900)
    step.op("autograd::engine::evaluate_function: MmBackward0", 40, 4_980)
    (step.python if category == "python" else step.op)(name, 50, 2_000)
    step.op("aten::linear", 60, 1_980).launched(GEMM, 70, 1_913, 1_900)
    step.launch("cudaStreamSynchronize", 100, 1_900, correlation=50)
    return step.launched(GEMM, 4_000, 4_010, 1_000)


@pytest.mark.parametrize(
    ("name", "category", "speaks"),
    [
        (REPEATING, "python", True),
        ("CheckpointFunctionBackward", "op", True),
        ("train.py(7): recompute_fn", "python", False),
        ("CheckpointFunction", "op", False),
        ("env/torch/utils/checkpoint.py(480): checkpoint", "python", False),
    ],
)
def test_repeated_forward_work_is_what_checkpoints_say_and_no_other(
    name: str, category: str, speaks: bool
) -> None:
    found = candidates("recomputation", backward(name, category))
    assert [one.title for one in found] == [
        "activation checkpointing repeats 1.90 ms of forward work"
    ] * speaks


def test_what_is_not_repeated_saves_the_host_and_the_device_time_of_it() -> None:
    finding = only("recomputation", backward(REPEATING))
    # the host goes through the part of 2 ms no more
    assert finding.saving_ns == pytest.approx(2_000 * US, abs=60 * US)


# -- the optimizer --------------------------------------------------------------------------------------------------------


def optimizer(updates: int, name: str = "aten::addcmul_", frame: str = "") -> HandStep:
    """A step of an optimizer that updates so many parameters one by one, 100 us each on the host."""
    step = HandStep(200 + 100.0 * updates)
    step.op("aten::mm", 0, 90).launched(GEMM, 5, 12, 50)
    step.annotation("Optimizer.step#AdamW.step", 100, 100.0 * updates + 50)
    if frame:
        step.python(frame, 101, 100.0 * updates + 40)
    for number in range(updates):
        begin = 110 + 100.0 * number
        step.op(name, begin, 90).launched(BUSY, begin + 10, begin + 30, 5)
    return step


@pytest.mark.parametrize(
    ("updates", "name", "frame", "speaks"),
    [
        (20, "aten::addcmul_", "", True),
        (2, "aten::addcmul_", "", True),
        (1, "aten::addcmul_", "", False),
        (20, "aten::_foreach_addcmul_", "", False),
        (20, "aten::_fused_adamw_", "", False),
        (20, "aten::relu", "", False),
        (20, "aten::addcmul_", "torch/optim/adamw.py(350): _single_tensor_adamw", True),
        (20, "aten::addcmul_", "torch/optim/adamw.py(500): _multi_tensor_adamw", False),
    ],
)
def test_an_optimizer_goes_tensor_by_tensor_where_its_operators_or_its_code_say_so(
    updates: int, name: str, frame: str, speaks: bool
) -> None:
    assert len(candidates("unfused-optimizer", optimizer(updates, name, frame))) == speaks


def test_an_optimizer_in_one_call_leaves_a_seventh_of_its_host_time() -> None:
    finding = only("unfused-optimizer", optimizer(30))
    assert "30 kernels" in finding.title
    # 3 050 us of the annotation's thread: fifteen hundredths stay
    assert finding.saving_ns == pytest.approx(0.85 * 3_050 * US, rel=0.01)


# -- normalisations -------------------------------------------------------------------------------------------------------

ROOT = ("aten::pow", "aten::mean", "aten::add", "aten::rsqrt", "aten::mul")


def normalising(names: tuple[str, ...], times: int = 4) -> HandStep:
    """Operators of 5 us with kernels of 100 us, then one that is none of a normalisation; so many times."""
    step, call, start = HandStep(6.0 * (len(names) + 1) * times), 0.0, 20.0
    for _ in range(times):
        for name in (*names, "aten::silu"):
            step.op(name, call, 5.5).launched(BUSY, call + 1, start, 100)
            call, start = call + 6, start + 101
    return step


@pytest.mark.parametrize(
    ("names", "kernels"),
    [
        (ROOT, 5),
        ((*ROOT, "aten::mul"), 6),
        (("aten::add", *ROOT), 5),  # the sum before it is the residual connection's
        (("aten::var", "aten::rsqrt", "aten::mul_"), 3),
        (("aten::rsqrt", "aten::mul"), 0),  # of nothing that is a mean
        (("aten::pow", "aten::mean", "aten::rsqrt", "aten::div"), 0),  # and times nothing
        (("aten::mean", "aten::silu", "aten::rsqrt", "aten::mul"), 0),
        (("aten::pow", "aten::mean", "aten::sqrt", "aten::mul"), 0),
    ],
)
def test_a_normalisation_is_a_root_of_a_mean_and_a_product(
    names: tuple[str, ...], kernels: int
) -> None:
    titles = [one.title for one in candidates("unfused-normalisation", normalising(names))]
    words = f"4 normalisations are made of {4 * kernels} kernels ({4 * kernels * 0.1:.2f} ms)"
    assert titles == ([words] if kernels else [])


def test_a_normalisation_in_one_kernel_leaves_a_third_of_its_time() -> None:
    finding = only("unfused-normalisation", normalising(ROOT))
    assert finding.saving_ns == pytest.approx(0.65 * 4 * 5 * 100 * US, rel=0.01)


# -- odd sizes ------------------------------------------------------------------------------------------------------------


def product(shapes: list[list[int]], kind: str = "c10::Half", us: float = 4_000) -> HandStep:
    """A product of these shapes that takes so much of a step of 10 ms, on a device of which no peak is known."""
    step = HandStep(75, device_name="Some Device 9")
    step.op("aten::mm", 0, 30, shapes=shapes, types=[kind, kind]).launched(GEMM, 5, 12, us)
    return step.op("aten::add", 40, 30).launched(BUSY, 45, 13 + us, 9_987 - us)


@pytest.mark.parametrize(
    ("shapes", "kind", "us", "speaks"),
    [
        ([[64, 63], [63, 64]], "c10::Half", 4_000, True),
        ([[64, 63], [63, 64]], "c10::BFloat16", 4_000, True),
        ([[63, 64], [64, 64]], "c10::Half", 4_000, True),
        ([[64, 64], [64, 72]], "c10::Half", 4_000, False),
        ([[64, 63], [63, 64]], "float", 4_000, False),
        ([[64, 63], [63, 64]], "c10::Half", 101, True),
        ([[64, 63], [63, 64]], "c10::Half", 98, False),  # less than a hundredth of the step
    ],
)
def test_odd_sizes_count_in_half_precision_and_from_a_hundredth_on(
    shapes: list[list[int]], kind: str, us: float, speaks: bool
) -> None:
    found = candidates("unaligned-matmul", product(shapes, kind, us))
    shown = "4.00 ms" if us == 4_000 else f"{us:.0f} µs"
    assert [one.title for one in found] == [
        f"{shown} of matrix products have sizes that are no multiples of 8"
    ] * speaks
    if speaks and us == 4_000:
        assert only("unaligned-matmul", product(shapes, kind, us)).saving_ns == 2_000 * US


def test_sizes_that_were_not_recorded_are_not_called_even() -> None:
    step = HandStep(75).op("aten::mm", 0, 30).launched(GEMM, 5, 12, 4_000)
    (one,) = said("unaligned-matmul", step)
    assert isinstance(one, Abstention)


# -- slow steps and slow kernels --------------------------------------------------------------------------------------------


def steps(*lengths_us: float) -> TraceBuilder:
    made, at = TraceBuilder(), 0.0
    for number, length in enumerate(lengths_us):
        made.step(number, at, length).op("aten::mm", at + 1, length - 2)
        at += length
    return made


@pytest.mark.parametrize(
    ("lengths", "slow"),
    [
        ((100, 100, 100, 100, 150), {4: 50}),
        ((100, 100, 100, 100, 104.9), {}),  # less than a twentieth
        ((100, 100, 100, 100, 105.5), {4: 5.5}),
        ((100, 150, 100, 100, 180), {4: 80, 1: 50}),
        ((80, 90, 100, 110, 120, 130), {}),  # all as far apart
        ((100, 150, 100, 160, 100, 100, 100, 170), {7: 70, 3: 60}),  # two at most
    ],
)
def test_slow_steps_are_those_beyond_the_spread_of_the_others(
    lengths: tuple[float, ...], slow: dict[int, float]
) -> None:
    remarks = [one for one in said("slow-steps", steps(*lengths)) if isinstance(one, Remark)]
    assert [one.title.split(" longer")[0] for one in remarks] == [
        f"step {number} takes {over:.1f} µs"
        if over > 9.99
        else f"step {number} takes {over:.2f} µs"
        for number, over in slow.items()
    ]
    for one, number in zip(remarks, slow, strict=True):
        assert one.evidence[0].duration_ns == lengths[number] * US


def test_slow_steps_take_at_least_four() -> None:
    (one,) = said("slow-steps", steps(100, 100, 200))
    assert isinstance(one, Abstention)
    assert said("slow-steps", steps(100, 100, 100, 100)) == []


def alike(took: list[float], names: str = "own_kernel") -> HandStep:
    """Kernels of one name and shape that take so long, launched in time."""
    step, start = HandStep(10.0 * len(took)), 20.0
    for number, us in enumerate(took):
        call = 10.0 * number
        step.op("own::op", call, 9, shapes=[[64, 64]], types=["float"]).launched(
            names, call + 1, start, us
        )
        start += us + 1
    return step


@pytest.mark.parametrize(
    ("took", "lost"),
    [
        ([200, 200, 301, 200, 200], 101),
        ([200, 200, 300, 200, 200], None),  # not more than one and a half times
        ([200, 200, 400, 200], None),  # seen too seldom
        ([200, 200, 400, 200, 500, 200, 200], 500),
        ([200, 200, 100, 200, 200], None),  # faster
    ],
)
def test_kernels_are_slow_from_one_and_a_half_times_the_middle_one_on(
    took: list[float], lost: float | None
) -> None:
    found = candidates("slow-kernels", alike(took))
    assert len(found) == (lost is not None)
    if lost:
        assert f"{lost} µs longer than the same ones" in found[0].title
        assert only("slow-kernels", alike(took)).saving_ns == pytest.approx(
            lost * US, abs=len(took)
        )


# -- tables of embeddings -------------------------------------------------------------------------------------------------

TABLE = "void embedding_bag_kernel<float>(int)"


def lookups(*us: float, name: str = TABLE) -> list[HandStep]:
    """Ranks that spend so long in tables, and then reduce together."""
    args = HandStep.collective_args("allreduce", "0", len(us), 1 << 20, "Float") | {"Seq": 1}
    last = 20 + max(us) + 2
    made = []
    for number, own in enumerate(us):
        step = HandStep(80, number, len(us)).op("aten::embedding_bag", 1, 30)
        step.launched(name, 5, 20, own).op("record_param_comms", 40, 20, **args)
        step.launched(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            45,
            21 + own,
            last + 50 - own - 21,
            stream=20,
            **args,
        )
        made.append(step.group("0", list(range(len(us)))))
    return made


@pytest.mark.parametrize(
    ("us", "words"),
    [
        ((300, 100), "rank 0 spends 1.50 × the mean in embedding tables (300 µs)"),
        ((100, 100, 130), "rank 2 spends 1.18 × the mean in embedding tables (130 µs)"),
        ((100, 110), None),  # 1.048 times
        ((100, 111), "rank 1 spends 1.05 × the mean in embedding tables (111 µs)"),
    ],
)
def test_tables_are_uneven_from_a_twentieth_on(us: tuple[float, ...], words: str | None) -> None:
    assert [one.title for one in candidates("shard-imbalance", *lookups(*us))] == (
        [words] if words else []
    )


def test_kernels_of_no_table_are_none_of_the_shards() -> None:
    assert candidates("shard-imbalance", *lookups(300, 100, name=GEMM)) == []
    assert candidates("compute-imbalance", *lookups(300, 100, name=GEMM))


def test_tables_alike_save_what_the_fullest_has_more_than_the_mean() -> None:
    assert only("shard-imbalance", *lookups(300, 100)).saving_ns == pytest.approx(
        100 * US, rel=0.02
    )


# -- copies that hold the host ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "DtoH (Device -> Pageable)",
            "copying to the host from or to pageable memory holds the host",
        ),
        (
            "HtoD (Pageable -> Device)",
            "copying to the device from or to pageable memory holds the host",
        ),
    ],
)
def test_a_copy_that_holds_the_host_is_told_by_its_way(kind: str, words: str) -> None:
    step = HandStep(4_100).launched(GEMM, 1, 10, 3_000)
    step.op("aten::copy_", 19, 3_110)
    step.number += 1
    step.launch("cudaMemcpyAsync", 20, 3_100, correlation=step.number)
    step.copy(f"Memcpy {kind}", 3_011, 100, bytes=1 << 20, correlation=step.number)
    step.op("aten::mm", 3_131, 900).launched(GEMM, 4_035, 4_045, 500)
    found = candidates("blocking-copy", step)
    assert len(found) == 1
    assert found[0].title.startswith(words)
    assert found[0].title.endswith("at aten::copy_")


# -- full devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "speaks"), [(0.91, True), (0.89, False), (1.0, True)])
def test_a_device_is_nearly_full_from_nine_tenths_on(share: float, speaks: bool) -> None:
    whole = 80 * 10**9
    step = HandStep(100).op("aten::empty", 1, 5)
    used = round(whole * share)
    step.allocation(2, used, address=1 << 30, total_reserved=used)
    trace = step.build()
    known = replace(
        trace, meta=replace(trace.meta, capture={"devices": [{"device": 0, "memory_bytes": whole}]})
    )
    context = Context.of(Session((known,), "by hand"))
    titles = [getattr(one, "title", one) for one in BY_SLUG["memory-nearly-full"].evaluate(context)]
    shown = f"{used / 1e9:.1f} GB of 80.0 GB are taken at the peak"
    assert titles == ([shown] if speaks else [])


# -- the middle of several steps ----------------------------------------------------------------------------------------------


def test_the_middle_one_is_the_median_and_of_two_their_mean_rounded_down() -> None:
    draw = np.random.default_rng(5)
    for size in range(1, 12):
        values = draw.integers(-50, 50, size).tolist()
        ordered = sorted(values)
        low, high = ordered[(size - 1) // 2], ordered[size // 2]
        assert compute_median_floor(values) == int((low + high) / 2)


@pytest.mark.parametrize("size", range(1, 30))
def test_the_interval_of_a_median_is_that_of_a_coin(size: int) -> None:
    """The most values left out at each end so that no more than a twentieth of throws has so few heads."""
    values = list(range(10, 10 + size))
    chance = [comb(size, heads) / 2**size for heads in range(size + 1)]
    left = 0
    while sum(chance[: left + 1]) <= 0.05:
        left += 1
    left = max(left - 1, 0)
    assert compute_median_interval(values) == (values[left], values[size - 1 - left])
    assert compute_median_interval(values[::-1]) == compute_median_interval(values)


def test_the_interval_holds_the_median() -> None:
    for values in combinations(range(0, 50, 7), 5):
        low, high = compute_median_interval(values)
        assert low <= compute_median_floor(values) <= high


# -- names ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "aten::mm"),
        (
            "void at::native::(anonymous namespace)::softmax_kernel<float, 4>(float*)",
            "softmax_kernel<…>",
        ),
        ("void cutlass::Kernel2<cutlass_80_gemm>(Params)", "Kernel2<…>"),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL<…>",
        ),
        ("std::vector<int>::push_back(int)", "vector<…>"),
        ("<built-in method collect of module 'gc'>", "<built-in method collect of module 'gc'>"),
        ("<function step at 0x7f00ab12>", "<function step>"),
        ("", ""),
        ("x" * 61, "x" * 59 + "…"),
        ("x" * 60, "x" * 60),
        ("名" * 100, "名" * 59 + "…"),
    ],
)
def test_a_name_in_a_sentence_is_without_what_only_a_compiler_needs(name: str, short: str) -> None:
    assert shorten_name(name) == short
    assert len(shorten_name(name * 400)) <= 60


def test_the_place_of_nested_operators_is_the_outermost() -> None:
    assert get_outermost_operator("aten::linear > aten::addmm > aten::mm") == "aten::linear"
    assert get_outermost_operator("aten::mm") == "aten::mm"


# -- several ranks ----------------------------------------------------------------------------------------------------------


def of_rank(number: int, made: str) -> HandStep:
    """A step of one of two ranks that meet, with something to be told in it."""
    step = HandStep(9_200, number, 2).op("aten::mm", 0, 100)
    args = HandStep.collective_args("allreduce", "0", 2, 256, "Float") | {"Seq": 1}
    step.launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 10, 50, stream=20, **args).group(
        "0", [0, 1]
    )
    if made == "garbage-collection":
        step.annotation("gc.collect", 200, 3_000)
    elif made == "blocking-sync":
        step.launched(GEMM, 110, 120, 3_000).launch(
            "cudaDeviceSynchronize", 200, 2_930, correlation=77
        )
    elif made == "needless-copies":
        step.copied("DtoH (Device -> Pinned)", 110, 200, 100, size=4096)
        step.copied("HtoD (Pinned -> Device)", 120, 310, 100, size=4096)
    elif made == "small-collectives":
        for more in range(8):
            args |= {"Seq": 2 + more}
            step.launched(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                110 + 8 * more,
                200 + 60 * more,
                50,
                stream=20,
                **args,
            )
    elif made == "unfused-optimizer":
        step.annotation("Optimizer.step#AdamW.step", 4_000, 950)
        for update in range(9):
            begin = 4_010 + 100.0 * update
            step.op("aten::addcmul_", begin, 90).launched(BUSY, begin + 10, begin + 30, 5)
    return step.op("aten::mm", 5_000, 4_200)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("slug", "amount"),
    [
        ("garbage-collection", "6.00 ms"),
        ("blocking-sync", "5.86 ms"),
        ("needless-copies", "400 µs"),
        ("small-collectives", "18 calls"),
        ("unfused-optimizer", "1.90 ms"),
    ],
)
def test_what_is_a_sum_over_ranks_is_called_one(slug: str, amount: str) -> None:
    (title,) = [one.title for one in candidates(slug, of_rank(0, slug), of_rank(1, slug))]
    assert amount in title
    assert "summed over 2 ranks" in title
    alone = of_rank(0, slug)
    assert not any("summed" in one.title for one in candidates(slug, alone))


# -- the roofline -----------------------------------------------------------------------------------------------------------


def on_h100(us: float) -> HandStep:
    """A product of two matrices of 1 024 x 1 024 in bf16, and work behind it that is launched before it ends.

    2 x 1 024^3 operations take 2.1705 us at the 989.4 TFLOP/s of an H100; the three matrices 1.88 us at its 3.35 TB/s.
    """
    step = HandStep(75).op(
        "aten::mm", 0, 30, shapes=[[1024, 1024], [1024, 1024]], types=["c10::BFloat16"] * 2
    )
    step.launched(GEMM, 5, 200, us).op("aten::add", 40, 30)
    return step.launched(BUSY, 45, 201 + us, 500)


@pytest.mark.parametrize(
    ("us", "reached", "left"),
    [
        (100, "2.2 %", 0.05),  # never less than a twentieth stays
        (10, "21.7 %", 0.21705 / 0.7),
        (5.5, "39.5 %", 0.39464 / 0.7),
        (5.4, None, None),  # 40.2 % are no long way
        (3, None, None),
    ],
)
def test_a_product_far_from_the_roofline_is_told_with_what_it_reaches(
    us: float, reached: str | None, left: float | None
) -> None:
    found = candidates("low-roofline", on_h100(us))
    assert len(found) == (reached is not None)
    for one in found:
        assert one.title.startswith(f"aten::mm reaches {reached} of what its arithmetic allows: ")
        assert one.changes[0].factor == pytest.approx(left, rel=1e-3)
    if us == 100:
        assert only("low-roofline", on_h100(us)).saving_ns == 95 * US
