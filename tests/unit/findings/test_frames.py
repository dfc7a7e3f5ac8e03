"""Findings about the host name the Python frames that hold its time."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from traceloom.changes.changes import parse
from traceloom.findings import RULES, Context, findings, rank
from traceloom.findings.host_bound import _select_host_work_during_gaps
from traceloom.findings.rule import MIN_FRAME_SHARE, Candidate, add_frames
from traceloom.findings.stragglers import _select_host_stretches
from traceloom.report.document import ReportOptions
from traceloom.report.run import build
from traceloom.testing import TraceBuilder
from traceloom.trace.notice import Finding, HotFrame
from traceloom.trace.session import Session

IN_THE_LOOP = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
BY_WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
MS = 1_000_000


def starved(
    number: int = 0,
    *,
    ranks: int = 1,
    wait: str = IN_THE_LOOP,
    slow: float = 1,
    stacks: bool = True,
) -> Any:
    """A step that waits for its batch, most of it in a function that a transform of the user's calls."""
    builder = TraceBuilder(rank=number, world_size=ranks)
    end = 1000 + 3000 * slow
    builder.annotation(wait, 1000, end - 1000)
    if stacks:
        builder.python("train.py(12): main", 5, end + 1500)
        builder.python("torch/utils/data/dataloader.py(703): __next__", 990, end - 980)
        builder.python("data.py(31): zoomed", 1100, end - 1200)
        builder.python("numpy/lib/function_base.py(1): interp", 1200, 2500 * slow - 100)
        builder.python("<built-in function compiled_interp>", 1250, 2500 * slow - 200)
        builder.python("other.py(1): loop", 0, end + 1500, thread=2)
    for k in range(20):
        at = end + 50 + 20 * k
        builder.op("aten::mm", at, 15).launch("cudaLaunchKernel", at + 2, 4, correlation=k + 1)
        builder.kernel("gemm", at + 10 + 5 * k, 20, correlation=k + 1)
    return builder.step(1, 0, end + 1600).build()


def about_data(*traces: Any) -> Finding:
    return next(
        finding
        for finding in findings(Session(traces, "made")).time
        if finding.slug == "data-starved"
    )


def test_a_step_that_makes_its_batches_is_told_where() -> None:
    finding = about_data(starved())
    zoomed, main = finding.frames
    assert (zoomed.name, zoomed.file, zoomed.line, zoomed.time_ns) == (
        "zoomed",
        "data.py",
        31,
        round(2.8 * MS),
    )
    assert (zoomed.inside, zoomed.inside_ns) == ("compiled_interp", round(2.3 * MS))
    assert (main.name, main.time_ns, main.inside) == (
        "main",
        round(0.2 * MS),
        IN_THE_LOOP,
    )  # PyTorch's is main's
    assert finding.host_ns == 3 * MS
    assert zoomed.share == pytest.approx(2.8 / 3)
    assert finding.advice.startswith(
        "2.80 ms of 3.00 ms are zoomed (data.py:31), mostly compiled_interp: make it faster, or make batches beside"
    )


def test_workers_that_make_them_are_no_frame_of_the_step() -> None:
    assert about_data(starved(wait=BY_WORKERS)).advice.startswith(
        "Make batches faster or further ahead"
    )


def test_frames_of_ranks_are_added_up() -> None:
    hottest = about_data(starved(0, ranks=2), starved(1, ranks=2, slow=2)).frames[0]
    assert hottest.time_ns == round((2.8 + 5.8) * MS)
    assert (hottest.rank, hottest.rank_count) == (1, 2)
    assert str(hottest) == "zoomed (data.py:31), mostly compiled_interp, on 2 ranks, most on 1"
    alone = HotFrame("save", "ckpt.py", 3, 10, 0.5, rank=7)
    assert str(alone) == "save (ckpt.py:3), on rank 7"


def test_without_frames_the_reason_is_given_once() -> None:
    session = Session((starved(stacks=False),), "made")
    finding = about_data(*session.traces)
    assert (finding.frames, finding.host_ns) == ((), 3 * MS)
    document = build(session, ReportOptions(only=("findings",)))
    (reason,) = [
        entry["reason"] for entry in document["absent"] if entry["path"] == "findings[*].frames"
    ]
    assert "--stacks" in reason
    assert document["findings_ground"]["stacks"] is False


def test_a_late_rank_is_told_what_it_does_beyond_the_others() -> None:
    traces = []
    for number in range(3):
        builder = (
            TraceBuilder(rank=number, world_size=3)
            .step(1, 0, 1000)
            .python("train.py(1): main", 1, 990)
        )
        builder.op("aten::mm", 10, 50)
        builder.python("loss.py(2): loss", 100, 100 + number)
        if number == 1:
            builder.python("ckpt.py(3): save", 300, 400).python(
                "<built-in method write of file object at 0x1>", 310, 380
            )
        traces.append(builder.build())
    context = Context.of(Session(tuple(traces), "made"))
    finding = Finding("straggler", "rank 1 makes the others wait", "high", 0.5, "see", saving_ns=1)
    delay = (parse("rank 1 delay remove"),)
    candidate = Candidate(
        "rank 1", delay, 0.5, "see", host=partial(_select_host_stretches, context, host=True)
    )
    (straggler,) = add_frames([(finding, candidate, context)])
    (save,) = straggler.frames  # not main, nor the loss: the others have these as well
    assert (save.name, save.time_ns, save.inside, save.rank, save.rank_count) == (
        "save",
        400_000,
        "write",
        1,
        1,
    )
    assert straggler.host_ns is not None
    assert save.share == pytest.approx(400_000 / straggler.host_ns)
    on_device = msgspec.structs.replace(
        candidate, host=partial(_select_host_stretches, context, host=False)
    )
    assert add_frames([(finding, on_device, context)]) == (finding,)


def test_late_launches_are_told_what_the_host_does_while_the_device_waits() -> None:
    builder = TraceBuilder().step(1, 0, 2100).python("train.py(1): main", 1, 2090)
    for k in range(20):
        at = 10 + 100 * k
        builder.python("model.py(5): slow", at, 70)
        builder.op("aten::add", at + 75, 15).launch(
            "cudaLaunchKernel", at + 80, 5, correlation=k + 1
        )
        builder.kernel("add", at + 87, 10, correlation=k + 1)
    context = Context.of(Session((builder.build(),), "made"))
    finding = next(
        finding for finding in rank(context, RULES).time if finding.slug == "launch-bound"
    )
    late = _select_host_work_during_gaps(context)
    assert finding.host_ns == int((late["end_ns"] - late["start_ns"]).sum())
    assert f"idle for {finding.host_ns / MS:.2f} ms" in finding.title
    # of each gap (90 us until the next kernel) the 83 before the launch: 70 in slow
    slow, main = finding.frames
    assert (slow.name, slow.time_ns) == ("slow", 19 * 70_000)
    assert (main.name, main.time_ns) == ("main", 19 * 13_000)


def test_what_is_about_the_device_alone_has_no_host_time() -> None:
    context = Context.of(Session((starved(),), "made"))
    kernels = Candidate("kernels", (parse("kernels * 0.5"),), 0.5, "do")
    (finding,) = add_frames([(Finding("slow", "slow", "low", 0.5, "do"), kernels, context)])
    assert (finding.host_ns, finding.frames) == (None, ())


def test_small_shares_are_left_out() -> None:
    builder = TraceBuilder().step(1, 0, 1000).python("train.py(1): main", 1, 998)
    for k in range(30):
        builder.python(f"part.py({k}): part{k}", 20 + 30 * k, 25 if k else 29)
    context = Context.of(Session((builder.op("aten::mm", 2, 5).build(),), "made"))
    host = Candidate("host", (parse("host * 0.5"),), 0.5, "do")
    (finding,) = add_frames([(Finding("slow", "slow", "low", 0.5, "do"), host, context)])
    assert [frame.name for frame in finding.frames] == ["main"]
    assert all(frame.share >= MIN_FRAME_SHARE for frame in finding.frames)
