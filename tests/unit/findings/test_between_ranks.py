"""What ranks cost each other, by exact figures: bubbles of a pipeline, late hosts, slow links."""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.by_hand import BY_SLUG, GEMM, HandStep, context_of, ranked, said
from traceloom.findings.rule import Candidate
from traceloom.trace.notice import Abstention, Finding

US = 1_000
MESSAGE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def titles(slug: str, *steps: HandStep) -> list[str]:
    return [one.title for one in said(slug, *steps) if isinstance(one, Candidate)]


def reasons(slug: str, *steps: HandStep) -> list[str]:
    return [one.reason for one in said(slug, *steps) if isinstance(one, Abstention)]


def only(slug: str, *steps: HandStep) -> Finding:
    (finding,) = ranked(slug, *steps).time
    return finding


# -- pipelines ------------------------------------------------------------------------------------------------------------


def stages(
    forward_us: float, backward_us: float, *, count: int = 2, microbatches: int = 1
) -> list[HandStep]:
    """Stages that compute all micro-batches forward, then back; a message takes 10 us and begins when both are there.

    The window is (micro-batches + stages - 1) x (forward + backward), and the messages between.
    """
    steps = [HandStep(200, rank, count) for rank in range(count)]
    free = [20.0] * count
    calls = [0.0] * count
    came: dict[tuple[int, int], float] = {}
    number = [0] * count

    def work(rank: int, name: str, start: float, end: float, stream: int, **args: object) -> None:
        steps[rank].launched(name, calls[rank], start, end - start, stream=stream, **args)
        calls[rank] += 5

    for direction in (1, -1):
        took = forward_us if direction == 1 else backward_us
        for _ in range(microbatches):
            for rank in range(count)[::direction]:
                before, after = rank - direction, rank + direction
                if 0 <= before < count:
                    sent = came[direction, before]
                    for end, kind, peer, key in (
                        (before, "send", rank, "Dst Rank"),
                        (rank, "recv", before, "Src Rank"),
                    ):
                        number[end] += 1
                        args = HandStep.collective_args(kind, "0", count, 4096, "Float") | {
                            key: peer,
                            "Seq": number[end],
                        }
                        stream = 20 if kind == "send" else 21
                        steps[end].op("record_param_comms", calls[end], 4.5, **args)
                        arrived = min(free[rank], sent) if end == rank else sent
                        work(end, MESSAGE, arrived, max(sent, free[rank]) + 10, stream, **args)
                    free[rank] = max(sent, free[rank]) + 10
                work(rank, GEMM, free[rank], free[rank] + took, 7)
                free[rank] += took
                if 0 <= after < count:
                    came[direction, rank] = free[rank]
    for rank, step in enumerate(steps):
        step.group("0", list(range(count)))
        assert calls[rank] < 200
    return steps


def test_bubbles_are_what_stages_do_not_compute_of_their_common_window() -> None:
    context = context_of(*stages(1_000, 2_000))
    # stage 0: 1000, nothing for 10 + 1000 + 2000 + 10, 2000; stage 1: nothing for 1010, 3000, nothing for 2010
    (candidate,) = BY_SLUG["pipeline-bubbles"].evaluate(context)
    assert isinstance(candidate, Candidate)
    assert candidate.title == "pipeline bubbles take 50.2 % of 2 stages' time"
    assert {(one.rank, one.total_ns) for one in candidate.evidence} == {
        (0, 3_020 * US),
        (1, 3_020 * US),
    }
    assert [one.what for one in candidate.evidence] == ["bubbles of stage 0", "bubbles of stage 1"]
    (outcome,) = BY_SLUG["compute-imbalance"].evaluate(context)
    assert isinstance(outcome, Abstention)
    assert outcome.reason == "stages of a pipeline do different work: see pipeline-bubbles"


def test_four_stages_name_the_three_that_wait_longest() -> None:
    (candidate,) = [
        one
        for one in said("pipeline-bubbles", *stages(1_000, 2_000, count=4))
        if isinstance(one, Candidate)
    ]
    # 4 x 3000 and six messages are the window, of which each stage computes 3000
    assert (
        candidate.title
        == f"pipeline bubbles take {9_060 / 12_060:.1%} of 4 stages' time".replace("%", " %")
    )
    assert [one.total_ns for one in candidate.evidence] == [9_060 * US] * 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("microbatches", "count"), [(1, 2), (2, 3)])
def test_more_micro_batches_have_smaller_bubbles(microbatches: int, count: int) -> None:
    few, more = (
        next(
            one
            for one in said("pipeline-bubbles", *stages(900, 1_800, count=count, microbatches=each))
        )
        for each in (microbatches, microbatches + 1)
    )
    assert isinstance(few, Candidate)
    assert isinstance(more, Candidate)
    shares = [float(one.title.split(" take ")[1].split(" %")[0]) for one in (few, more)]
    assert shares[0] > shares[1]
    assert f"{4 * count} microbatches, four per stage, in place of {microbatches}" in few.advice


def test_bubbles_save_at_most_what_more_micro_batches_leave_out() -> None:
    count = 3
    finding = only("pipeline-bubbles", *stages(1_000, 2_000, count=count))
    # a bubble of (stages - 1) x 3000 and the messages, of which with 4 micro-batches per stage a 4 x stages-th is left
    bubble = (count - 1) * 3_020 * US
    assert finding.saving_ns is not None
    assert 0.5 * bubble < finding.saving_ns <= bubble * (1 - 1 / (4 * count)) + 1


def test_ranks_that_send_to_each_other_from_the_start_have_no_order_of_stages() -> None:
    steps = []
    for rank in range(2):
        step = HandStep(100, rank, 2).launched(GEMM, 0, 20, 1_000)
        for at, (kind, key) in enumerate((("send", "Dst Rank"), ("recv", "Src Rank"))):
            args = HandStep.collective_args(kind, "0", 2, 4096, "Float") | {
                key: 1 - rank,
                "Seq": at + 1,
            }
            step.op("record_param_comms", 10 + 10 * at, 8, **args)
            step.launched(MESSAGE, 12 + 10 * at, 1_100 + 100 * at, 50, stream=20 + at, **args)
        steps.append(step.group("0", [0, 1]))
    assert reasons("pipeline-bubbles", *steps) == [
        "ranks send to each other, but the order of stages is not known"
    ]


@pytest.mark.parametrize("slug", ["pipeline-bubbles", "straggler", "slow-link", "shard-imbalance"])
def test_one_rank_alone_waits_for_nobody_that_is_known(slug: str) -> None:
    (outcome,) = said(slug, HandStep(1_000).launched(GEMM, 0, 20, 900))
    assert isinstance(outcome, Abstention)
    assert outcome.reason.startswith("only one rank was recorded")


# -- ranks and hosts that are late -----------------------------------------------------------------------------------------


def reducing(
    begins_us: tuple[float, ...], hosts: tuple[str, ...], work_us: float = 1_000
) -> list[HandStep]:
    """Ranks that prepare for so long, compute, and reduce together, 100 us after the last one has come."""
    count = len(begins_us)
    args = HandStep.collective_args("allreduce", "0", count, 1 << 20, "Float") | {"Seq": 1}
    met = max(begins_us) + 20 + work_us + 1
    steps = []
    for rank, (begin, host) in enumerate(zip(begins_us, hosts, strict=True)):
        step = HandStep(begin + 80, rank, count, host=host)
        if begin:
            step.op("user::prepare", 0, begin)
        step.op("aten::mm", begin + 1, 40).launched(GEMM, begin + 5, begin + 20, work_us)
        came = begin + 21 + work_us
        step.op("record_param_comms", begin + 50, 20, **args)
        step.launched(REDUCE, begin + 55, came, met + 100 - came, stream=20, **args)
        steps.append(step.group("0", list(range(count))))
    return steps


def late_twice(first: int, then: int, hosts: tuple[str, ...]) -> list[HandStep]:
    """Ranks that reduce twice: one comes 500 us late to the first, one 400 us to the second, both by computing longer."""
    args = HandStep.collective_args("allreduce", "0", 4, 1 << 20, "Float")
    steps = []
    for rank, host in enumerate(hosts):
        step = HandStep(100, rank, 4, host=host)
        own = 1_000 + 500 * (rank == first), 1_000 + 400 * (rank == then)
        for place, (begin, met, work) in enumerate(
            zip((20, 1_640), (1_540, 3_060), own, strict=True)
        ):
            call = 40 * place
            step.op("aten::mm", call, 12).launched(GEMM, call + 2, begin, work)
            step.op("record_param_comms", call + 20, 12, **args, Seq=place + 1)
            came = begin + work + 1
            step.launched(
                REDUCE, call + 22, came, met + 90 - came, stream=20, **args, Seq=place + 1
            )
        steps.append(step.group("0", [0, 1, 2, 3]))
    return steps


def test_the_rank_that_comes_last_is_named_with_what_the_others_waited() -> None:
    (title,) = titles("straggler", *reducing((0, 0, 500), ("a", "b", "c")))
    assert title.startswith("rank 2 makes the others wait: ")
    assert title.endswith(" (1.00 ms at 1 collective)")


@pytest.mark.parametrize("by_us", [50, 4_000])
def test_a_rank_saves_by_how_much_it_is_late(by_us: int) -> None:
    assert only("straggler", *reducing((0, 0, by_us), ("a", "b", "c"))).saving_ns == by_us * US


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("first", "then", "hosts", "late"),
    [
        (2, 3, ("a", "a", "b", "b"), "host b (ranks 2, 3) makes the others wait"),
        (0, 3, ("a", "a", "b", "b"), None),  # one of each host
        (2, 3, ("a", "a", "a", "a"), None),  # there is no other host
    ],
)
def test_a_host_of_which_several_ranks_are_late_is_late(
    first: int, then: int, hosts: tuple[str, ...], late: str | None
) -> None:
    shown = titles("straggler", *late_twice(first, then, hosts))
    # each of the three others waited for both
    assert [title.split(":")[0] for title in shown[:2]] == [
        f"rank {rank} makes the others wait" for rank in (first, then)
    ]
    assert [title.split("(")[-1] for title in shown[:2]] == [
        "1.50 ms at 1 collective)",
        "1.20 ms at 1 collective)",
    ]
    assert [title.split(":")[0] for title in shown[2:]] == ([late] if late else [])
    assert all(title.endswith("(2.70 ms at 2 collectives)") for title in shown[2:])


def test_ranks_that_share_no_communication_do_not_wait_for_each_other() -> None:
    context = context_of(
        *(HandStep(1_000, rank, 2).launched(GEMM, 0, 20, 400 + 400 * rank) for rank in range(2))
    )
    for slug in ("straggler", "compute-imbalance", "shard-imbalance"):
        (outcome,) = BY_SLUG[slug].evaluate(context)
        assert isinstance(outcome, Abstention)
        assert outcome.reason == "the ranks share no communication, so none waits for another"


# -- links ------------------------------------------------------------------------------------------------------------------

LARGE = 4 * 2**20 // 4  # elements, from which on the link decides


def reductions(
    *groups_us: tuple[float, ...],
    elements: int = LARGE,
    device: str | None = "NVIDIA H100 80GB HBM3",
    hosts: tuple[str, ...] = ("a",) * 9,
) -> list[HandStep]:
    """Pairs of ranks, each of which reduces one thing after the other; each transfer takes as long as is said."""
    steps = []
    for group, transfers in enumerate(groups_us):
        members = [2 * group, 2 * group + 1]
        for rank in members:
            step = HandStep(100, rank, 2 * len(groups_us), device_name=device, host=hosts[rank])
            step.launched(GEMM, 0, 20, 100)
            begin = 130.0
            for number, us in enumerate(transfers):
                args = HandStep.collective_args("allreduce", f"{group}", 2, elements, "Float")
                args |= {"Seq": number + 1, "Process Group Ranks": str(members)}
                step.op("record_param_comms", 6 + 8 * number, 6, **args)
                step.launched(REDUCE, 7 + 8 * number, begin, us, stream=20, **args)
                begin += us + 10
            steps.append(step.group(f"{group}", members))
    return steps


@pytest.mark.parametrize(
    ("slow_us", "times"),
    [(301.0, "1.5"), (299.0, None)],
)
def test_a_group_is_slow_from_one_and_a_half_times_the_others_on(
    slow_us: float, times: str | None
) -> None:
    shown = f"all_reduce of 4.19 MB between ranks 0, 1 takes {times} × as long as in the other groups of this run"
    steps = reductions((slow_us, slow_us), (200.0, 200.0), device=None)
    assert titles("slow-link", *steps) == ([shown] if times else [])


def test_a_slow_link_saves_what_it_takes_longer() -> None:
    assert (
        only("slow-link", *reductions((600.0, 600.0), (200.0, 200.0), device=None)).saving_ns
        == 2 * 400 * US
    )


def test_what_a_small_message_takes_is_its_beginning() -> None:
    assert (
        titles(
            "slow-link",
            *reductions((600.0, 600.0), (200.0, 200.0), elements=LARGE - 1, device=None),
        )
        == []
    )


# 4 MiB over two ranks of an H100: 8.4 us to begin, twice 3.4 us of steps, 4 MiB at four fifths of 450 GB/s
SHOULD_US = 8.4 + 2 * 3.4 + 2**22 / (450e3 * 0.8)


@pytest.mark.parametrize(("times", "speaks"), [(3.1, True), (2.9, False)])
def test_a_link_is_slow_from_three_times_what_it_is_made_for_on(times: float, speaks: bool) -> None:
    us = round(times * SHOULD_US, 3)
    found = titles("slow-link", *reductions((us, us)))
    assert len(found) == speaks
    for title in found:
        assert title.endswith(
            f"between ranks 0, 1 takes {times:.1f} × as long as over NVLink 4 (450 GB/s)"
        )


@pytest.mark.parametrize(
    "more",
    [
        {"hosts": ("a", "b")},  # nobody knows what is between hosts
        {"device": None},
        {"device": "NVIDIA A100-SXM4-80GB"},  # its links may lead to a few others only
        {"device": "Unknown 9000"},
    ],
    ids=str,
)
def test_nothing_is_measured_against_a_link_that_is_not_known(more: dict) -> None:
    assert titles("slow-link", *reductions((500.0, 500.0), **more)) == []


def test_times_are_kept_and_none_overlaps_in_the_made_traces() -> None:
    for step in stages(1_000, 2_000, count=3, microbatches=2):
        kernels = sorted(
            (e["ts"], e["ts"] + e["dur"])
            for e in step._events
            if e["cat"] == "kernel" and e["tid"] == 7
        )
        assert all(first[1] <= second[0] for first, second in pairwise(kernels))
