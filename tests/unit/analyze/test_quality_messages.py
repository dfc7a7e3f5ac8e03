"""What each check of a capture says, word for word and number for number, and the nearest trace in which it is silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from support.sessions import sound
from traceloom.analyze import quality
from traceloom.analyze.quality import choose_severity
from traceloom.testing import TraceBuilder
from traceloom.trace.trace import Trace

Made = Callable[[TraceBuilder], TraceBuilder]
LAUNCH = "cudaLaunchKernel"


def check(trace: Trace, slug: str) -> dict[str, Any] | None:
    rows = quality(trace).checks.filter(pl.col("check") == slug)
    return rows.row(0, named=True) if rows.height else None


def launched(
    builder: TraceBuilder, at: float, start: float, length: float, **where: Any
) -> TraceBuilder:
    """One launch and its kernel more."""
    return builder.launch(LAUNCH, at, 4, correlation=9).kernel(
        "k", start, length, correlation=9, **where
    )


def marked(*times: float) -> TraceBuilder:
    builder = TraceBuilder()
    for number, time in enumerate(times):
        builder.mark(number, time)
    return builder


def numbered(count: int, every: int) -> TraceBuilder:
    builder = TraceBuilder()
    for number in range(count):
        builder.op("aten::mm", 10 * number, 5, shapes=[[2, 2]], external_id=1 + every * number)
    return builder


def nodes(*sequences: int) -> TraceBuilder:
    builder = TraceBuilder()
    for place, sequence in enumerate(sequences):
        name = f"autograd::engine::evaluate_function: Node{place}"
        builder.op(name, 10 * place, 5, sequence=sequence, forward_thread=1)
    return builder


def waits(*awaited: int) -> TraceBuilder:
    """Waits of a stream at 60 µs and on; record 50 is made at 30, record 51 at 90."""
    builder = (
        sound()
        .launch("cudaEventRecord", 30, 1, correlation=50)
        .launch("cudaEventRecord", 90, 1, correlation=51)
    )
    for place, correlation in enumerate(awaited):
        builder.sync(
            "Stream Wait Event", 60 + place, 1, wait_on_cuda_event_record_corr_id=correlation
        )
    return builder


def collectives(*omitted: tuple[str, ...]) -> TraceBuilder:
    builder = TraceBuilder()
    for place, names in enumerate(omitted):
        args = TraceBuilder.collective_args("allreduce", "0", 2, 1024, "Float")
        kept = {name: value for name, value in args.items() if name not in names}
        builder.op("record_param_comms", 10 * place, 5, **kept)
    return builder


SIZES = ("In msg nelems", "Out msg nelems")
UNSEEN = "the recording ended first, or events were dropped; GPU time is missing there"
SPEAKING: list[tuple[str, TraceBuilder, int, int, str, str]] = [
    (
        "orphan-work",
        sound().kernel("early", 1, 2),
        1,
        5,
        "warning",
        (
            "the launch of 1 of 5 pieces of GPU work (2.00 µs) is not in the file, mostly because the recording began later: "
            "the time counts, but no operator, module or step can be named for it"
        ),
    ),
    (
        "gpu-work-missing",
        TraceBuilder().op("a", 0, 9).launch(LAUNCH, 1, 2, correlation=1),
        1,
        1,
        "warning",
        (
            "1 launch recorded, but no GPU work: the profiler could not trace the GPU (another profiler held it, or it was not "
            "asked to), so that device times are unknown, not zero"
        ),
    ),
    (
        "gpu-work-missing",
        TraceBuilder().launch(LAUNCH, 1, 2, correlation=1).launch(LAUNCH, 4, 2, correlation=2),
        2,
        2,
        "warning",
        (
            "2 launches recorded, but no GPU work: the profiler could not trace the GPU (another profiler held it, "
            "or it was not asked to), so that device times are unknown, not zero"
        ),
    ),
    (
        "gpu-not-used",
        TraceBuilder(devices=2).op("aten::mm", 0, 5),
        2,
        2,
        "info",
        (
            "no launch and no GPU work is recorded, though the process sees 2 GPUs (NVIDIA H100 80GB HBM3): the model ran on "
            "the CPU, or the recording left the GPU out"
        ),
    ),
    (
        "busy-before-window",
        launched(TraceBuilder().op("aten::mm", 0, 10).op("aten::mm", 9_000, 1_000), 2, 2_000, 100),
        1,
        1,
        "warning",
        (
            "for 1.99 ms (19.9 % of the window) a GPU did nothing that is recorded, though work had been "
            "launched: it was behind what was launched before the recording; that time counts as idle, and no change of "
            "recorded work moves it"
        ),
    ),
    (
        "launches-without-work",
        sound().launch(LAUNCH, 395, 2, correlation=77),
        1,
        5,
        "warning",
        f"the GPU work of 1 of 5 launches is not in the file (1 of them after the last piece of GPU work): {UNSEEN}",
    ),
    (
        "launches-without-work",
        sound().launch(LAUNCH, 150, 2, correlation=77),
        1,
        5,
        "warning",
        f"the GPU work of 1 of 5 launches is not in the file: {UNSEEN}",
    ),
    (
        "gpu-work-before-launch",
        launched(sound(), 70, 68, 3),
        1,
        5,
        "warning",
        (
            "1 piece of GPU work started before the launch, by up to 2.00 µs: the clocks of host and GPU disagree by that "
            "much, and so do launch delays and idle causes"
        ),
    ),
    (
        "overlapping-gpu-work",
        launched(sound(), 32, 45, 9),
        1,
        5,
        "info",
        (
            "1 piece of GPU work overlapped the one before on its own stream (programmatic launches, or several hardware "
            "queues): sums of kernel times exceed the time that passed; unions are right"
        ),
    ),
    (
        "instant-gpu-work",
        launched(sound(), 52, 60, 0),
        1,
        5,
        "warning",
        (
            "1 of 5 pieces of GPU work took no time by the clock of the recording: they are counted, but take no time in any "
            "sum, and have no bandwidth"
        ),
    ),
    (
        "waits-without-record",
        waits(50, -1),
        1,
        2,
        "info",
        "1 of 2 waits for an event do not say which record they await: dependencies between streams are incomplete",
    ),
    (
        "syncs-while-running",
        sound().sync("Stream Sync", 45, 9).sync("Stream Sync", 55, 9),
        1,
        2,
        "info",
        (
            "1 of 2 stream synchronisations are recorded as begun while a kernel of their stream still ran: their times cannot "
            "be trusted"
        ),
    ),
    (
        "waits-for-unknown-record",
        waits(50, 51, 99),
        2,
        3,
        "info",
        (
            "2 of 3 waits between streams await an event record that is not in the file or comes later: dependencies between "
            "streams are incomplete"
        ),
    ),
    (
        "no-operators",
        launched(TraceBuilder(), 0, 5, 2),
        2,
        2,
        "warning",
        (
            "no framework operators were recorded (the profiler's CPU activity was off): operators, modules and phases are "
            "unknown, only calls and GPU work are shown"
        ),
    ),
    (
        "operators-left-out",
        numbered(500, 50),
        24_451,
        24_951,
        "warning",
        (
            "500 operators are in the file, with numbers that are 24\u202f951 apart: the others were left out (a sampled "
            "trace), so that idle time, and time between operators, may be theirs"
        ),
    ),
    (
        "missing-shapes",
        TraceBuilder().op("aten::mm", 0, 5).op("aten::add", 9, 5),
        2,
        2,
        "info",
        "2 of 2 operators have no input shapes: they cannot be distinguished by size; record with shapes to see them",
    ),
    (
        "missing-stacks",
        TraceBuilder().op("aten::mm", 0, 5),
        1,
        1,
        "info",
        (
            "no Python stacks were recorded: host time between operators shows as unobserved, and modules only as far as "
            "annotations go; record with stacks to see them, at some cost"
        ),
    ),
    (
        "collectives-without-details",
        TraceBuilder().op("record_param_comms", 0, 5),
        1,
        1,
        "info",
        (
            "1 of 1 collective calls do not say all that they move (missing: kind, type, size, group in 1; an older PyTorch, "
            "or shapes were off): bytes and bandwidth of these may be unknown"
        ),
    ),
    (
        "collectives-without-details",
        collectives((), ("dtype", *SIZES), SIZES, ()),
        2,
        4,
        "info",
        (
            "2 of 4 collective calls do not say all that they move (missing: size in 2; type in 1; an older PyTorch, or shapes "
            "were off): bytes and bandwidth of these may be unknown"
        ),
    ),
    (
        "ambiguous-backward",
        nodes(3, 3, 4),
        1,
        2,
        "info",
        "1 of 2 autograd sequence numbers belong to several backward operators: the forward operator of these is uncertain",
    ),
    (
        "no-steps",
        TraceBuilder().op("aten::mm", 0, 5),
        1,
        1,
        "info",
        (
            "no steps are marked: figures are for the whole window, with whatever ran before and after the steady state; "
            "`traceloom record` marks steps, and so does `prof.step()` of PyTorch's profiler"
        ),
    ),
    (
        "warm-up-step",
        marked(0, 300, 400, 500, 600),
        1,
        1,
        "warning",
        (
            "the first step took 300 µs, the others 100 µs (median): it looks like a warm-up and raises the averages; leave it "
            "out with `--steps`"
        ),
    ),
    (
        "uneven-steps",
        marked(0, 100, 200, 500, 600),
        1,
        3,
        "warning",
        (
            "1 of 3 later steps differ from the median step (100 µs) by more than a factor of 1.5: an average step stands for "
            "none of them"
        ),
    ),
    (
        "rank-unknown",
        TraceBuilder(rank=None).collective("allreduce", 0, 5),
        1,
        1,
        "warning",
        (
            "the file belongs to a distributed job but does not say its rank: ranks cannot be compared; the rank may stand in "
            "the file name"
        ),
    ),
    (
        "rank-outside-world",
        TraceBuilder(rank=8, world_size=8).op("aten::mm", 0, 5),
        1,
        1,
        "warning",
        "the file says rank 8 of 8 ranks, which cannot be: one of the two is wrong",
    ),
    (
        "coarse-clock",
        TraceBuilder(generation="2022").op("aten::mm", 0, 9).op("aten::mm", 100, 10),
        1,
        2,
        "info",
        (
            "times are whole microseconds (a PyTorch before 2024): 1 of 2 operators and pieces of GPU work are shorter than "
            "10 µs, so that theirs are off by 5 % and more"
        ),
    ),
]


@pytest.mark.parametrize(("slug", "builder", "affected", "total", "severity", "message"), SPEAKING)
def test_a_check_says_how_many_of_how_many(
    slug: str, builder: TraceBuilder, affected: int, total: int, severity: str, message: str
) -> None:
    trace = replace(builder.build(), notices=())
    found = quality(trace)
    row = found.checks.row(by_predicate=pl.col("check") == slug, named=True)
    assert (row["affected_count"], row["total_count"], row["severity"]) == (
        affected,
        total,
        severity,
    )
    assert row["message"] == message
    notice = next(notice for notice in found.notices if notice.slug == slug)
    assert (notice.message, notice.count, notice.severity, notice.rank) == (
        message,
        affected,
        severity,
        trace.rank,
    )


SILENT: list[tuple[str, TraceBuilder]] = [
    ("orphan-work", launched(sound(), 0, 1, 2)),
    ("launches-without-work", launched(sound(), 390, 395, 2)),
    ("launches-without-work", sound().launch("cudaEventRecord", 395, 2, correlation=77)),
    ("launches-without-work", sound().launch("cudaStreamSynchronize", 395, 2, correlation=77)),
    ("gpu-work-before-launch", launched(sound(), 70, 70, 3)),
    ("overlapping-gpu-work", launched(sound(), 32, 45, 9, stream=8)),
    ("overlapping-gpu-work", launched(sound(), 32, 49.1, 9)),  # by 0.9 us: the jitter of the clock
    ("overlapping-gpu-work", launched(sound(), 32, 50, 9)),
    ("instant-gpu-work", launched(sound(), 52, 60, 0.001)),
    ("waits-without-record", waits(50, 50)),
    ("syncs-while-running", sound().sync("Stream Sync", 50, 9)),
    ("syncs-while-running", sound().sync("Stream Sync", 40, 9)),
    ("syncs-while-running", sound().sync("Stream Sync", 45, 9, stream=8)),
    ("waits-for-unknown-record", waits(50, 50)),
    ("no-operators", launched(TraceBuilder().op("aten::mm", 0, 3), 0, 5, 2)),
    ("operators-left-out", numbered(500, 19)),  # 500 of 9 482: more than 5 %
    ("missing-shapes", TraceBuilder().op("aten::mm", 0, 5, shapes=[[2]]).op("aten::add", 9, 5)),
    ("missing-stacks", TraceBuilder().op("aten::mm", 0, 5).python("f.py(1): f", 20, 1)),
    ("collectives-without-details", collectives((), ("Out msg nelems",))),
    ("ambiguous-backward", nodes(3, 4, 5)),
    ("no-steps", TraceBuilder().step(1, 0, 9)),
    ("warm-up-step", marked(0, 150, 250, 350, 450)),
    ("uneven-steps", marked(0, 100, 200, 350, 450)),  # half as long again is no more than that
    ("uneven-steps", marked(0, 100, 200, 267, 367)),
    ("rank-unknown", TraceBuilder(rank=3, world_size=8).collective("allreduce", 0, 5)),
    ("rank-outside-world", TraceBuilder(rank=7, world_size=8).op("aten::mm", 0, 5)),
    ("coarse-clock", TraceBuilder(generation="2022").op("aten::mm", 0, 10)),
]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("slug", "builder"), SILENT)
def test_the_nearest_trace_without_it_passes_the_check(slug: str, builder: TraceBuilder) -> None:
    row = check(replace(builder.build(), notices=()), slug)
    assert row is not None, "the check was made"
    assert (row["affected_count"], row["severity"], row["message"], row["affects"]) == (
        0,
        "ok",
        "",
        [],
    )


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("slug", "builder"),
    [
        ("gpu-work-missing", launched(TraceBuilder(), 0, 5, 2)),
        ("gpu-not-used", launched(TraceBuilder(), 0, 5, 2)),
        ("gpu-not-used", TraceBuilder(device_name=None).op("aten::mm", 0, 5)),
        ("orphan-work", TraceBuilder().op("aten::mm", 0, 5)),
        ("overlapping-gpu-work", TraceBuilder().op("aten::mm", 0, 5)),
        ("instant-gpu-work", TraceBuilder().op("aten::mm", 0, 5)),
        ("no-operators", TraceBuilder().op("aten::mm", 0, 5)),
        ("operators-left-out", numbered(30, 50)),
        ("missing-shapes", launched(TraceBuilder(), 0, 5, 2)),
        ("missing-stacks", launched(TraceBuilder(), 0, 5, 2)),
        ("warm-up-step", marked(0, 300, 400)),  # two steps
        ("uneven-steps", marked(0, 300, 400)),
        ("collectives-without-details", sound()),
        ("ambiguous-backward", sound()),
        ("cut-steps", TraceBuilder().op("aten::mm", 0, 5)),
        ("rank-unknown", TraceBuilder(rank=None).op("aten::mm", 0, 5)),
        ("rank-outside-world", TraceBuilder(rank=None).op("aten::mm", 0, 5)),
        ("recording-cost", sound()),
        ("coarse-clock", sound().op("aten::mm", 380, 0.5)),
        ("waits-without-record", sound()),
        ("waits-for-unknown-record", sound()),
        ("syncs-while-running", sound()),
        ("unpaired-counters", sound()),
    ],
)
def test_a_check_that_cannot_be_made_has_no_row(slug: str, builder: TraceBuilder) -> None:
    assert check(replace(builder.build(), notices=()), slug) is None


@pytest.mark.parametrize(
    ("ratio", "severity", "text"),
    [
        (1.05, "ok", ""),
        (1.06, "info", "1.06"),
        (1.1, "info", "1.10"),
        (1.101, "warning", "1.10"),
        (2, "warning", "2.00"),
    ],
)
def test_the_cost_of_recording_is_said_from_5_per_cent_on(
    ratio: float, severity: str, text: str
) -> None:
    trace = sound().build()
    costly = replace(trace, meta=replace(trace.meta, capture={"overhead": {"ratio": ratio}}))
    row = check(costly, "recording-cost")
    assert row is not None
    assert row["severity"] == severity
    said = f"recorded steps took {text} times as long as unrecorded ones: absolute times are too long by that"
    assert row["message"] == (said if text else "")


@pytest.mark.parametrize(
    ("orphans", "launches", "severity"), [(1, 18, "warning"), (1, 19, "info"), (2, 30, "warning")]
)
def test_a_twentieth_without_launch_is_no_warning_yet(
    orphans: int, launches: int, severity: str
) -> None:
    builder = TraceBuilder().op("aten::mm", 0, 5)
    for number in range(launches):
        builder.launch(LAUNCH, 10 * number, 1, correlation=number + 1)
        builder.kernel("k", 10 * number + 5, 1, correlation=number + 1)
    for number in range(orphans):
        builder.kernel("early", 1 + number, 1)
    row = check(builder.build(), "orphan-work")
    assert row is not None
    assert (row["affected_count"], row["total_count"], row["severity"]) == (
        orphans,
        orphans + launches,
        severity,
    )


def test_nothing_of_nothing_is_no_warning() -> None:
    assert [
        choose_severity(0, 0, 0.1),
        choose_severity(1, 10, 0.1),
        choose_severity(2, 10, 0.1),
    ] == [
        "info",
        "info",
        "warning",
    ]


@pytest.mark.parametrize("shift", [0, 1_000, 10**9])
def test_what_is_said_does_not_depend_on_when_the_recording_began(shift: float) -> None:
    def made(at: float) -> TraceBuilder:
        builder = (
            TraceBuilder()
            .op("aten::mm", at, 10)
            .op("aten::add", at + 8, 4)
            .kernel("early", at + 1, 2)
        )
        return launched(builder, at + 20, at + 18, 0)

    assert quality(made(shift).build()).checks.equals(quality(made(0).build()).checks)
