"""Each rule by exact figures: what it says and saves, where it begins to speak, and where it has to be silent."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from support.by_hand import BUSY, BY_SLUG, GEMM, HandStep, context_of, ranked, said
from traceloom.findings import RULES, rank
from traceloom.findings.rule import Candidate
from traceloom.trace.notice import Abstention, Finding

US = 1_000


def spoken(slug: str, *steps: HandStep) -> list[str]:
    """The titles of what a rule found; it may not abstain."""
    outcomes = said(slug, *steps)
    assert not [one for one in outcomes if isinstance(one, Abstention)], outcomes
    return [one.title for one in outcomes if not isinstance(one, Abstention)]


def only(slug: str, *steps: HandStep) -> Finding:
    (finding,) = ranked(slug, *steps).time
    return finding


def busy(length_us: float = 10_000, at_us: float = 0) -> HandStep:
    """A step in which the device computes from 20 us on until 20 us before its end, in kernels of 500 us."""
    step, start = HandStep(length_us), at_us + 20.0
    while start < length_us - 20:
        step.launched(GEMM, start - 19, start, min(499, length_us - 20 - start))
        start += 500
    return step


# -- data -----------------------------------------------------------------------------------------------------------

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def loading(us: float, name: str = LOADER, length_us: float = 10_000) -> HandStep:
    """A step that loads first, then launches a kernel for the rest of it."""
    step = HandStep(length_us)
    step.annotation(name, 0, us)
    return step.launched(GEMM, us + 1, us + 10, length_us - us - 20)


@pytest.mark.parametrize(
    ("us", "name", "saves_us"),
    [
        (4_000, LOADER, 4_000),  # four processes make it in 1 ms of the 6 ms that are left
        (
            9_000,
            LOADER,
            9_000 - (9_000 / 4 - 1_000),
        ),  # they cannot: what is more than the 1 ms left stays
        (4_000, WORKERS, 4_000),  # there are workers already: it is waiting alone
    ],
)
def test_a_step_that_loads_saves_what_workers_take_over(
    us: float, name: str, saves_us: float
) -> None:
    finding = only("data-starved", loading(us, name))
    beside = ", which 4 workers would make beside it" if name == LOADER else ""
    assert finding.title == f"the step waits {us / 1000:.2f} ms for data{beside}"
    assert finding.saving_ns == pytest.approx(saves_us * US, abs=10)
    assert "num_workers" in finding.advice
    assert ("beside the step" in finding.advice) == (name == LOADER)
    assert ("assumes 4 workers" in finding.advice) == (name == LOADER)


def test_a_loader_that_is_waited_for_in_another_step_is_none_of_this_one() -> None:
    step = busy().annotation(LOADER, 10_001, 3_000)
    assert spoken("data-starved", step) == []


# -- copies -----------------------------------------------------------------------------------------------------------


def copies(*some: tuple[str, int]) -> HandStep:
    """Copies of 100 us each, one after the other, before a kernel of 5 ms."""
    step = HandStep(10_000)
    for place, (kind, size) in enumerate(some):
        step.copied(kind, 10 * place, 100 + 200 * place, 100, size=size)
    return step.launched(GEMM, 10 * len(some), 100 + 200 * len(some), 5_000)


DOWN, UP, UP_PINNED = (
    "DtoH (Device -> Pageable)",
    "HtoD (Pageable -> Device)",
    "HtoD (Pinned -> Device)",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("some", "pairs"),
    [
        ([(DOWN, 4096), (UP, 4096)], 1),
        ([(DOWN, 4096), (DOWN, 4096), (UP_PINNED, 4096), (UP, 4096)], 2),
        ([(DOWN, 8192), (DOWN, 4096), (UP, 4096), (UP, 8192)], 2),
        ([(DOWN, 4096), (UP, 4096), (UP, 4096)], 1),
        ([(DOWN, 4095), (UP, 4095)], 0),  # a value that is read
        ([(DOWN, 4096), (UP, 4097)], 0),
        ([(UP, 4096), (DOWN, 4096)], 0),  # an input and a result
        ([("DtoD (Device -> Device)", 4096), (UP, 4096)], 0),
    ],
)
def test_what_goes_to_the_host_and_comes_back_is_paired_by_its_size(
    some: list[tuple[str, int]], pairs: int
) -> None:
    titles = spoken("needless-copies", copies(*some))
    expected = f"{pairs} times data goes to the host and as many bytes come back: {2 * pairs * 100} µs of copying"
    assert titles == ([expected] if pairs else [])


def test_what_goes_back_and_forth_saves_what_the_kernel_behind_it_waits() -> None:
    step = HandStep(30)
    step.launched(BUSY, 0, 8, 90, stream=20)
    step.copied(DOWN, 5, 100, 100, size=4096).copied(UP, 10, 202, 100, size=4096)
    step.launched(GEMM, 20, 304, 5_000, stream=20)
    # the copies go, the pauses of 2 us between what is left stay
    assert only("needless-copies", step).saving_ns == 200 * US


@pytest.mark.parametrize(("us", "speaks"), [(201, True), (199, False)])
def test_copies_inside_the_device_count_from_a_fiftieth_of_the_step_on(
    us: float, speaks: bool
) -> None:
    step = HandStep(10_000).launched(GEMM, 0, 10, 9_000 - us)
    step.op("aten::contiguous", 5, 20).op("aten::copy_", 6, 15)
    step.copied("DtoD (Device -> Device)", 8, 9_900 - us, us, size=1 << 20)
    step.launched(GEMM, 30, 9_901, 90)
    titles = spoken("device-copies", step)
    assert titles == (
        [f"1 copies inside the device take {us} µs, most of it in aten::contiguous"]
        if speaks
        else []
    )


@pytest.mark.parametrize(
    ("us", "size", "beside", "speaks"),
    [
        (300, 1 << 20, 0, True),
        (199, 1 << 20, 0, False),  # less than a fiftieth
        (300, 4095, 0, False),  # a value
        (300, 1 << 20, 250, False),  # a kernel runs beside most of it
        (600, 1 << 20, 250, True),
    ],
)
def test_copies_are_exposed_for_as_long_as_nothing_computes(
    us: int, size: int, beside: int, speaks: bool
) -> None:
    step = HandStep(10_000).launched(GEMM, 0, 10, 4_000)
    step.copied(UP_PINNED, 8, 4_011, us, size=size)
    if beside:
        step.launched(BUSY, 12, 4_011, beside, stream=30)
    step.launched(GEMM, 20, 4_012 + us, 5_000)
    titles = spoken("exposed-copies", step)
    words = (
        f"nothing is computed during {us - beside} µs of copying between host and device (1.05 MB)"
    )
    assert titles == ([words] if speaks else [])


# -- the host ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length_us", "pause_us", "speaks"),
    [
        (10_000, 501, True),
        (10_000, 490, False),  # half a millisecond, however short the step
        (100_000, 2_010, True),
        (100_000, 1_950, False),  # a fiftieth of the step, however long
    ],
)
def test_a_pause_is_long_by_time_and_by_its_share_of_the_step(
    length_us: float, pause_us: float, speaks: bool
) -> None:
    step, at = HandStep(length_us), 0.0
    step.python("train.py(3): write_log", 100, pause_us)
    while at < length_us - 60:
        begin = at if at < 100 else at + pause_us
        if begin + 60 > length_us:
            break
        step.op("aten::mm", begin, 59)
        at += 60 if not 40 <= at < 100 else 100 - at
    titles = spoken("host-pause", step)
    assert len(titles) == speaks
    if speaks:
        assert titles[0].endswith("outside of operators: train.py(3): write_log")


def test_a_pause_saves_itself_where_the_device_waits_for_the_host() -> None:
    step = HandStep(10_000).op("aten::mm", 0, 100).op("aten::mm", 5_100, 100)
    step.launched(GEMM, 5, 12, 80).launched(GEMM, 5_105, 5_112, 4_800)
    step.launch("cudaDeviceSynchronize", 5_201, 4_715, correlation=99)
    finding = only("host-pause", step)
    assert finding.saving_ns == pytest.approx(5_000 * US, abs=60 * US)


def test_a_pause_beside_a_busy_device_costs_nothing() -> None:
    step = HandStep(10_000).op("aten::mm", 0, 100).op("aten::mm", 5_100, 100)
    step.launched(GEMM, 5, 12, 9_000).launched(GEMM, 5_105, 9_013, 900)
    step.launch("cudaDeviceSynchronize", 5_201, 4_715, correlation=99)
    assert spoken("host-pause", step), "it is there"
    assert ranked("host-pause", step).time == (), "and saves nothing"


GARBAGE = (
    "<built-in function collect>",
    "<built-in method collect of module 'gc'>",
    "Python GC",
    "GC (generation 2)",
    "gc.collect",
    "gc: full",
    "garbage_collect",
    "lib/gc.py(3): run",
)
NO_GARBAGE = (
    "gcd",
    "gc_stats",
    "mygc.collect",
    "collect",
    "<built-in function collect_all>",
    "lib/pgc.py(3): run",
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", GARBAGE)
def test_a_collection_saves_the_time_it_takes(name: str) -> None:
    step = HandStep(9_100).op("aten::mm", 0, 100).op("aten::mm", 3_100, 6_000)
    finding = only("garbage-collection", step.annotation(name, 100, 3_000))
    assert finding.title == "Python collects garbage for 3.00 ms in the step"
    assert finding.saving_ns == 3_000 * US


@pytest.mark.parametrize("name", NO_GARBAGE)
def test_what_is_only_called_alike_collects_nothing(name: str) -> None:
    step = HandStep(9_100).op("aten::mm", 0, 100).op("aten::mm", 3_100, 6_000)
    assert said("garbage-collection", step.annotation(name, 100, 3_000)) == []


def elementwise(count: int, other: int = 0) -> HandStep:
    """So many elementwise kernels that follow each other, and as many that follow a product."""
    step, at, call = HandStep(5.0 * (count + 2 * other)), 20.0, 0.0
    for _ in range(count):
        step.launched(BUSY, call, at, 30)
        at, call = at + 33, call + 5
    for _ in range(other):
        step.launched(GEMM, call, at, 30).launched(BUSY, call + 5, at + 33, 30)
        at, call = at + 66, call + 10
    return step


@pytest.mark.parametrize(
    ("count", "other", "words"),
    [
        (20, 0, "19 of 20"),
        (19, 0, None),
        (11, 9, "10 of 20"),
        (10, 10, None),  # as many, but few of them follow each other
        (0, 20, None),
    ],
)
def test_elementwise_kernels_have_to_be_many_and_to_follow_each_other(
    count: int, other: int, words: str | None
) -> None:
    titles = spoken("small-kernels", elementwise(count, other))
    assert titles == (
        [f"{words} elementwise kernels follow another one: they could be one"] if words else []
    )


def test_kernels_that_become_one_save_their_pauses_where_the_device_decides() -> None:
    # all are launched long before they run: 29 pauses of 3 us go, nothing else
    finding = only("small-kernels", elementwise(30))
    assert finding.saving_ns == 29 * 3 * US


def late_launches(idle_us: float, length_us: float = 10_000) -> HandStep:
    """Twenty operators with a kernel each, which comes after the device has been idle for that long."""
    step, each = HandStep(length_us), length_us / 20
    for number in range(20):
        begin = number * each
        step.op("aten::add", begin, each - 1)
        step.launched(BUSY, begin + 3, begin + 9, each - idle_us)
    return step


@pytest.mark.parametrize(("idle_us", "speaks"), [(60, True), (40, True), (14, False)])
def test_launches_come_too_late_where_the_device_waits_for_them(
    idle_us: float, speaks: bool
) -> None:
    outcomes = said("launch-bound", late_launches(idle_us))
    assert len(outcomes) == speaks
    if speaks:
        (one,) = outcomes
        assert isinstance(one, Candidate)
        assert one.at_most_ns is not None
        assert one.at_most_ns <= 20 * idle_us * US


@pytest.mark.parametrize(("between_us", "speaks"), [(80, True), (70, False)])
def test_python_between_operators_is_told_from_three_twentieths_of_the_step_on(
    between_us: float, speaks: bool
) -> None:
    step = HandStep(10_000)
    for number in range(20):  # of 500 us each: 75 us are three twentieths
        step.op("aten::mm", 500 * number, 500 - between_us)
    outcomes = said("python-bound", step)
    assert [type(one) for one in outcomes] == [Candidate] * speaks
    if speaks:
        (finding,) = ranked("python-bound", step).time
        assert finding.title.startswith("Python between operators takes 1.60 ms of the step")
        # of many short stretches three tenths stay; the last one ends with the step
        assert finding.saving_ns == pytest.approx(0.7 * 20 * between_us * US, rel=0.06)


# -- calls that wait --------------------------------------------------------------------------------------------------

WAITS = {
    "blocking-sync": ("cudaDeviceSynchronize", None, "synchronising"),
    "blocking-item": ("cudaStreamSynchronize", "aten::item", "reading values"),
    "device-allocation": ("cudaMalloc", "aten::empty", "taking memory from the device"),
    "module-loading": ("cuModuleLoadData", "aten::mm", "loading code onto the device"),
}


def waiting(call: str, op: str | None, *, behind: float) -> HandStep:
    """A kernel of 3 ms that a call waits for, and then one that takes 4 ms; the host launches it `behind` us later."""
    step = HandStep(3_025 + behind).launched(GEMM, 1, 10, 3_000)
    if op:
        step.op(op, 19, 3_001)
    step.number += 1
    step.launch(call, 20, 2_999, correlation=step.number)
    step.op("aten::mm", 3_021, behind)
    step.launched(GEMM, 3_020 + behind, 3_030 + behind, 4_000)
    return step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slug", WAITS)
@pytest.mark.parametrize("behind", [1_000, 2_500])
def test_a_call_that_waits_saves_what_the_host_could_have_done_meanwhile(
    slug: str, behind: float
) -> None:
    call, op, words = WAITS[slug]
    step = waiting(call, op, behind=behind)
    (title,) = spoken(slug, step)
    assert title.startswith(words)
    assert "holds the host 3.00 ms" in title
    (finding,) = ranked(slug, step).time
    # the device goes on a microsecond after its first kernel: it waited from 3 010 until 3 030 us, and for the host
    assert finding.saving_ns == (behind + 20 - 1) * US


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slug", WAITS)
def test_one_kind_of_waiting_is_not_told_as_another(slug: str) -> None:
    call, op, _ = WAITS[slug]
    for other in WAITS:
        assert bool(said(other, waiting(call, op, behind=1_000))) == (other == slug), other


def test_a_call_that_waits_for_what_is_done_holds_nobody() -> None:
    step = HandStep(10_000).launched(GEMM, 1, 10, 3_000)
    step.op("aten::mm", 20, 3_100)
    step.launch("cudaDeviceSynchronize", 3_130, 4, correlation=77)
    step.launched(GEMM, 3_150, 3_160, 4_000)
    assert ranked("blocking-sync", step).time == ()


# -- products -----------------------------------------------------------------------------------------------------------


def product(share: float, kernel: str, device: str = "NVIDIA A100-SXM4-80GB") -> HandStep:
    """A step of 10 ms of which a product takes that share."""
    step = HandStep(75, device_name=device)
    step.metadata(
        deviceProperties=[
            {
                "id": 0,
                "name": device,
                "computeMajor": 8 if "A100" in device else 7,
                "computeMinor": 0,
            }
        ]
    )
    shapes = [[1024, 1024], [1024, 1024]]
    step.op("aten::mm", 0, 30, shapes=shapes, types=["float", "float"])
    step.launched(kernel, 5, 12, 10_000 * share)
    step.op("aten::add", 40, 30)
    return step.launched(BUSY, 45, 13 + 10_000 * share, 9_987 - 10_000 * share)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("share", "kernel", "device", "words"),
    [
        (
            0.3,
            "ampere_sgemm_128x64_nn",
            "NVIDIA A100-SXM4-80GB",
            "3.00 ms of matrix products use no tensor cores: TF32 is off",
        ),
        (
            0.3,
            "volta_sgemm_128x64_nn",
            "Tesla V100-SXM2-16GB",
            "3.00 ms of matrix products use no tensor cores",
        ),
        (
            0.0102,
            "ampere_sgemm_128x64_nn",
            "NVIDIA A100-SXM4-80GB",
            "102 µs of matrix products use no tensor cores: TF32 is off",
        ),
        (0.0098, "ampere_sgemm_128x64_nn", "NVIDIA A100-SXM4-80GB", None),  # less than a hundredth
        (0.3, "ampere_bf16_s16816gemm_bf16_128x128", "NVIDIA A100-SXM4-80GB", None),
        (0.3, "ampere_s1688gemm_128x128_nn", "NVIDIA A100-SXM4-80GB", None),  # TF32
    ],
)
def test_products_without_matrix_units_are_told_from_a_hundredth_on(
    share: float, kernel: str, device: str, words: str | None
) -> None:
    step = product(share, kernel, device)
    assert spoken("matrix-units-unused", step) == ([words] if words else [])
    if words and share > 0.1:
        assert only("matrix-units-unused", step).saving_ns == pytest.approx(
            0.5 * share * 10_000 * US, rel=0.001
        )


# -- communication ------------------------------------------------------------------------------------------------------


def ring(
    kind: str, bytes_each: int, count: int, us: float = 50, members: int = 2, **more: object
) -> HandStep:
    """So many collectives of one kind with nothing beside them, then a kernel."""
    step, at = HandStep(10_000, 0, members), 20.0
    args = HandStep.collective_args(kind, "0", members, bytes_each // 4, "Float") | more
    for number in range(count):
        step.launched(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 6.0 * number, at, us, stream=20, **args
        )
        at += us + 1
    return step.launched(GEMM, 6.0 * count, at + 1, 1_000)


@pytest.mark.parametrize(
    ("size", "count", "speaks"),
    [
        (1024, 8, True),
        (1024, 7, False),
        (256 * 1024 - 4, 8, True),
        (256 * 1024, 8, False),
        (0, 8, False),
    ],
)
def test_small_collectives_are_many_and_small(size: int, count: int, speaks: bool) -> None:
    titles = spoken("small-collectives", ring("allreduce", size, count))
    assert titles == ([f"{count} calls of all_reduce send less than 262 kB each"] if speaks else [])


@pytest.mark.parametrize(("beside_us", "exposed_us"), [(0, 400), (150, 250), (398, 2)])
def test_communication_is_exposed_for_as_long_as_nothing_computes(
    beside_us: float, exposed_us: int
) -> None:
    step = HandStep(10_000, 0, 2).launched(GEMM, 0, 10, 1_000)
    args = HandStep.collective_args("allreduce", "0", 2, 1 << 20, "Float")
    step.launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5, 1_011, 400, stream=20, **args)
    if beside_us:
        step.launched(GEMM, 10, 1_011, beside_us)
    step.launched(GEMM, 15, 1_412, 1_000)
    (title,) = spoken("exposed-communication", step)
    shown = f"{exposed_us} µs" if exposed_us > 9 else f"{exposed_us}.00 µs"
    assert title.startswith(f"{shown} of 400 µs of all_reduce not overlapped (1 call")


def test_communication_that_is_hidden_is_not_told() -> None:
    step = HandStep(10_000, 0, 2).launched(GEMM, 0, 10, 1_000)
    args = HandStep.collective_args("allreduce", "0", 2, 1 << 20, "Float")
    step.launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5, 100, 400, stream=20, **args)
    assert spoken("exposed-communication", step) == []


@pytest.mark.parametrize(
    ("parts", "times"),
    [
        ([301, 100, 100, 100], 2.0),
        ([152, 84, 84, 84], 1.5),
        ([149, 84, 84, 84], None),
        ([0, 0, 0, 0], None),
        ([100], None),
    ],
)
def test_an_exchange_is_uneven_from_one_and_a_half_times_the_mean_on(
    parts: list[int], times: float | None
) -> None:
    more = {"In split size": str(parts), "Out split size": str(parts)}
    step = ring("all_to_allv", 4096, 3, members=4, **more)
    outcomes = said("uneven-exchange", step)
    if times is None:
        assert not [one for one in outcomes if isinstance(one, Candidate)]
        return
    (one,) = outcomes
    assert isinstance(one, Candidate)
    assert one.title == f"3 all_to_alls are uneven: one part is {times} × the mean"
    mean = sum(parts) / len(parts)
    assert one.changes[0].factor == pytest.approx(mean / max(parts))


# -- ranks --------------------------------------------------------------------------------------------------------------


def meeting(*work_us: float, think_us: tuple[float, ...] = ()) -> list[HandStep]:
    """Ranks that compute for so long, then reduce together; the transfer takes 100 us after the last one comes."""
    thinks = think_us or (0.0,) * len(work_us)
    arrive = [think + 20 + us + 1 for us, think in zip(work_us, thinks, strict=True)]
    args = HandStep.collective_args("allreduce", "0", len(work_us), 1 << 20, "Float") | {"Seq": 1}
    steps = []
    for number, (us, think) in enumerate(zip(work_us, thinks, strict=True)):
        step = HandStep(think + 80, number, len(work_us))
        if think:
            step.op("user::prepare", 0, think)
        step.op("aten::mm", think + 1, 40).launched(GEMM, think + 5, think + 20, us)
        begin = arrive[number]
        step.op("record_param_comms", think + 50, 20, **args)
        step.launched(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            think + 55,
            begin,
            max(arrive) + 100 - begin,
            stream=20,
            **args,
        )
        step.group("0", list(range(len(work_us))))
        steps.append(step)
    return steps


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("works", "words"),
    [
        ((2_000, 1_000, 1_000, 1_000), "rank 0 computes 1.60 × as long as the mean (2.00 ms)"),
        ((1_000, 1_000, 1_200), "rank 2 computes 1.12 × as long as the mean (1.20 ms)"),
        ((1_000, 1_090), None),  # 1.043 times
        ((1_000, 1_000), None),
    ],
)
def test_ranks_compute_unevenly_from_a_twentieth_on(
    works: tuple[float, ...], words: str | None
) -> None:
    titles = spoken("compute-imbalance", *meeting(*works))
    assert titles == ([words] if words else [])


def test_even_work_saves_what_the_longest_rank_has_more_than_the_mean() -> None:
    works = (2_000, 1_000, 1_000, 1_000)
    assert only("compute-imbalance", *meeting(*works)).saving_ns == pytest.approx(
        (2_000 - 1_250) * US, rel=0.02
    )


def test_a_rank_that_begins_late_saves_what_it_is_behind_the_middle_one() -> None:
    steps = meeting(1_000, 1_000, 1_000, think_us=(0, 600, 0))
    outcomes = [one for one in said("straggler", *steps) if isinstance(one, Candidate)]
    assert outcomes[0].title.startswith("rank 1 makes the others wait")
    finding = ranked("straggler", *steps).time[0]
    assert finding.saving_ns == 600 * US


def test_ranks_alike_have_no_straggler_that_costs() -> None:
    assert ranked("straggler", *meeting(1_000, 1_000, 1_000)).time == ()


# -- what recording costs, slow steps -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "speaks"), [(1.05, True), (1.049, False), (0.9, False), (3.25, True)]
)
def test_recording_is_told_where_it_costs_a_twentieth(ratio: float, speaks: bool) -> None:
    context = context_of(busy())
    context.__dict__["host_ratio"] = ratio
    titles = [getattr(one, "title", "") for one in BY_SLUG["profiler-overhead"].evaluate(context)]
    assert titles == (
        [f"recording makes steps {ratio:.2f} × as long: host savings exclude that"]
        if speaks
        else []
    )


# -- memory -------------------------------------------------------------------------------------------------------------


def memory(per_step: int, *, steps: int = 8, reserved: int = 0, most: int = 1 << 20) -> HandStep:
    """Steps that each keep some bytes, after a block of `most` bytes that stays."""
    step = HandStep(100)
    step.op("aten::empty", 1, 5).allocation(2, most, address=1 << 30, total_reserved=reserved)
    for number in range(2, steps + 2):
        begin = 110.0 * (number - 1)
        step.step(number, begin, 100).op("aten::mm", begin + 1, 20)
        step.allocation(begin + 3, 4096, address=7, total_reserved=reserved)
        if per_step:
            step.allocation(begin + 5, per_step, address=1000 * number, total_reserved=reserved)
        step.allocation(begin + 15, -4096, address=7, total_reserved=reserved)
    return step


@pytest.mark.parametrize(("per_step", "speaks"), [(10_240, True), (9_728, False), (0, False)])
def test_memory_grows_where_every_step_keeps_ten_thousand_bytes(
    per_step: int, speaks: bool
) -> None:
    findings = ranked("memory-growth", memory(per_step)).memory
    assert len(findings) == speaks
    for finding in findings:
        assert finding.severity == "high"
        assert finding.risk is not None
        assert finding.saving_bytes is not None
        assert finding.saving_bytes % per_step == 0
        assert finding.saving_ns is None


@pytest.mark.parametrize(
    ("reserved", "spare"),
    [(4 << 20, 3 << 20), (1_404_000, 1_404_000 - (1 << 20) - 4096), (1_400_000, 0), (0, 0)],
)
def test_reserved_memory_counts_from_a_quarter_unused_at_the_peak_on(
    reserved: int, spare: int
) -> None:
    findings = ranked("memory-fragmentation", memory(0, reserved=reserved)).memory
    assert len(findings) == bool(spare)
    for finding in findings:
        assert finding.saving_bytes == pytest.approx(spare, abs=4096)
        assert finding.severity == "low"


# -- all of them ----------------------------------------------------------------------------------------------------------

MADE: dict[str, Callable[[], list[HandStep]]] = {
    "loading": lambda: [loading(4_000)],
    "late launches": lambda: [late_launches(60)],
    "waiting": lambda: [waiting("cudaDeviceSynchronize", None, behind=1_000)],
    "uneven ranks": lambda: meeting(2_000, 1_000, 1_000, 1_000),
    "late rank": lambda: meeting(1_000, 1_000, 1_000, think_us=(0, 600, 0)),
}


Ranked = list[tuple[str, str, int | None]]


def in_order(*made: HandStep) -> Ranked:
    return [
        (one.slug, one.title, one.saving_ns) for one in rank(context_of(*made), RULES, steps=1).time
    ]


@cache
def as_made(name: str) -> Ranked:
    return in_order(*MADE[name]())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MADE)
def test_findings_do_not_depend_on_when_it_was_on_which_stream_or_under_which_rank(
    name: str,
) -> None:
    moved = MADE[name]()
    for step in moved:
        for event in step._events:
            event["ts"] += 3_600_000_000_000
            if event["cat"] in ("kernel", "gpu_memcpy", "ac2g") and event["tid"] in (7, 20, 30):
                event["tid"] += 100
                if event["args"]:
                    event["args"]["stream"] += 100
    assert in_order(*moved) == as_made(name)
    assert as_made(name)
    assert sum(saving or 0 for _, _, saving in as_made(name)) <= context_of(*MADE[name]()).step_ns


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name in MADE if "rank" in name])
def test_the_order_in_which_ranks_are_given_says_nothing(name: str) -> None:
    assert in_order(*reversed(MADE[name]())) == as_made(name)
