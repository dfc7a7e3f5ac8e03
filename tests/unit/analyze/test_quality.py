"""Capture quality: each check finds what it is for, and nothing in a sound trace."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import polars as pl
import pytest

from support.sessions import sound
from traceloom.analyze import quality
from traceloom.analyze.quality import EFFECTS
from traceloom.report import build
from traceloom.testing import TraceBuilder
from traceloom.trace.notice import Notice
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace


def sampled(every: int) -> TraceBuilder:
    """One of so many operators."""
    builder = TraceBuilder()
    for number in range(500):
        builder.op(
            "aten::mm", 10 * number, 5, shapes=[[2, 2], [2, 2]], external_id=1 + every * number
        )
    return builder


@lru_cache(maxsize=1)
def sound_report() -> dict[str, Any]:
    return build(Session((sound().build(),), "made"))


def found(trace: Trace) -> dict[str, int]:
    checks = quality(trace).checks.filter(pl.col("affected_count") > 0)
    return dict(checks.select("check", "affected_count").rows())


def test_a_sound_capture_has_no_notices_but_a_list_of_checks_made() -> None:
    result = quality(sound().build())
    assert result.notices == ()
    assert set(result.checks["severity"]) == {"ok"}
    assert result.checks.height >= 14


def test_a_gpu_that_was_busy_before_the_window_is_told_and_one_that_begins_at_once_is_not() -> None:
    def begun(at: float) -> dict[str, int]:
        builder = (
            TraceBuilder().op("aten::mm", 0, 10).launch("cudaLaunchKernel", 2, 4, correlation=1)
        )
        builder.kernel("gemm", at, 100, correlation=1).op("aten::mm", 9_000, 1_000)
        return found(builder.build())

    assert begun(2_000)["busy-before-window"] == 1
    assert "busy-before-window" not in begun(50)
    # a stream may be behind what was launched before while another one has begun
    other = TraceBuilder().op("aten::mm", 0, 10).launch("cudaLaunchKernel", 2, 4, correlation=1)
    other.kernel("gemm", 10, 100, correlation=1).launch("cudaLaunchKernel", 8, 2, correlation=2)
    other.kernel("gemm", 4_000, 100, correlation=2, stream=8).op("aten::mm", 9_000, 1_000)
    assert found(other.build())["busy-before-window"] == 1
    # who is launched late is not behind what was there before
    late = TraceBuilder().op("aten::mm", 0, 10).op("aten::mm", 5_000, 10)
    late.launch("cudaLaunchKernel", 5_002, 4, correlation=1).kernel(
        "gemm", 8_000, 100, correlation=1
    )
    assert "busy-before-window" not in found(late.build())


def test_what_the_reader_has_said_is_not_said_again() -> None:
    trace = sound().kernel("early", 1, 20).build()
    said = replace(trace, notices=(Notice("orphan-work", "info", "1 of 5 has no launch"),))
    unsaid = replace(trace, notices=())
    assert [notice.slug for notice in quality(said).notices] == []
    assert [notice.slug for notice in quality(unsaid).notices] == ["orphan-work"]


def test_notices_name_the_rank_and_come_worst_first() -> None:
    builder = sound().kernel("early", 1, 2, stream=9).kernel("negative", 80, -5, correlation=1)
    trace = replace(builder.build(), notices=())
    notices = quality(trace).notices
    assert {notice.rank for notice in notices} == {0}
    assert [notice.severity for notice in notices] == sorted(
        (n.severity for n in notices), reverse=True
    )


CASES: list[tuple[str, int, TraceBuilder]] = [
    ("orphan-work", 1, sound().kernel("early", 1, 2)),
    (
        "gpu-work-missing",
        1,
        TraceBuilder().op("a", 0, 9, shapes=[[1]]).launch("cudaLaunchKernel", 1, 2, correlation=1),
    ),
    ("gpu-not-used", 2, TraceBuilder(devices=2).op("a", 0, 9, shapes=[[1]])),
    ("launches-without-work", 1, sound().launch("cudaLaunchKernel", 395, 2, correlation=77)),
    (
        "gpu-work-before-launch",
        1,
        sound().launch("cudaLaunchKernel", 70, 5, correlation=9).kernel("k", 68, 3, correlation=9),
    ),
    (
        "overlapping-gpu-work",
        1,
        sound().launch("cudaLaunchKernel", 32, 2, correlation=9).kernel("k", 45, 9, correlation=9),
    ),
    (
        "instant-gpu-work",
        2,
        sound().kernel("k", 60, 0, correlation=1).fill(62, 0, bytes=4, correlation=2),
    ),
    (
        "waits-without-record",
        1,
        sound()
        .sync("Stream Wait Event", 60, 1, wait_on_cuda_event_record_corr_id=-1)
        .launch("cudaEventRecord", 61, 1, correlation=50)
        .sync("Event Sync", 63, 1, wait_on_cuda_event_record_corr_id=50),
    ),
    ("syncs-while-running", 1, sound().sync("Stream Sync", 45, 9).sync("Stream Sync", 55, 9)),
    (
        "waits-for-unknown-record",
        2,  # one record is not in the file, the other comes later
        sound()
        .launch("cudaEventRecord", 70, 1, correlation=50)
        .launch("cudaEventRecord", 30, 1, correlation=51)
        .sync("Stream Wait Event", 60, 1, wait_on_cuda_event_record_corr_id=99)
        .sync("Stream Wait Event", 62, 1, wait_on_cuda_event_record_corr_id=50)
        .sync("Stream Wait Event", 64, 1, wait_on_cuda_event_record_corr_id=51),
    ),
    (
        "coarse-clock",
        1,
        TraceBuilder(generation="2022").op("aten::mm", 0, 3).op("aten::mm", 100, 300),
    ),
    ("no-steps", 1, TraceBuilder().python("f.py(1): f", 0, 9).op("aten::mm", 1, 2, shapes=[[1]])),
    (
        "warm-up-step",
        1,
        TraceBuilder().mark(1, 0).mark(2, 300).mark(3, 400).mark(4, 500).mark(5, 600),
    ),
    (
        "uneven-steps",
        1,
        TraceBuilder().mark(1, 0).mark(2, 100).mark(3, 200).mark(4, 500).mark(5, 600),
    ),
    ("missing-shapes", 1, TraceBuilder().python("f.py(1): f", 0, 9).op("aten::mm", 1, 2)),
    ("missing-stacks", 1, TraceBuilder().op("aten::mm", 1, 2, shapes=[[1]])),
    (
        "no-operators",
        2,
        TraceBuilder()
        .launch("cudaLaunchKernel", 0, 2, correlation=1)
        .kernel("k", 5, 2, correlation=1),
    ),
    ("operators-left-out", 500 * 50 - 49 - 500, sampled(50)),
    ("rank-unknown", 1, TraceBuilder(rank=None).collective("allreduce", 0, 5)),
    ("rank-outside-world", 1, TraceBuilder(rank=8, world_size=8).op("aten::mm", 0, 5)),
    ("collectives-without-details", 1, TraceBuilder().op("record_param_comms", 0, 5)),
    (
        "ambiguous-backward",
        1,
        TraceBuilder()
        .op("autograd::engine::evaluate_function: A", 0, 5, sequence=3, forward_thread=1)
        .op("autograd::engine::evaluate_function: B", 9, 5, sequence=3, forward_thread=1),
    ),
]


@pytest.mark.parametrize(("slug", "affected", "builder"), CASES, ids=[case[0] for case in CASES])
def test_a_check_finds_what_it_is_for(slug: str, affected: int, builder: TraceBuilder) -> None:
    assert found(builder.build()).get(slug) == affected


@pytest.mark.parametrize("slug", [case[0] for case in CASES])
def test_no_check_objects_to_a_sound_trace(slug: str) -> None:
    checks = quality(sound().build()).checks
    assert checks.filter((checks["check"] == slug) & (checks["affected_count"] > 0)).height == 0


def test_a_fill_of_nothing_is_no_lost_launch() -> None:
    trace = sound().launch("cudaMemsetAsync", 330, 2, correlation=50).build()
    assert "launches-without-work" not in found(trace)


def test_a_driver_call_inside_a_runtime_call_is_no_lost_launch() -> None:
    trace = sound().launch("cuLaunchKernel", 13, 2, correlation=1, driver=True, flow=False).build()
    assert "launches-without-work" not in found(trace)


@pytest.mark.parametrize(("ratio", "severity"), [(1.02, None), (1.08, "info"), (1.5, "warning")])
def test_the_cost_of_recording_is_said_where_it_was_measured(
    ratio: float, severity: str | None
) -> None:
    trace = sound().build()
    capture: dict[str, Any] = {"overhead": {"ratio": ratio}}
    notices = quality(replace(trace, meta=replace(trace.meta, capture=capture))).notices
    assert [notice.severity for notice in notices] == ([severity] if severity else [])


def test_damage_in_capture_json_is_no_crash() -> None:
    trace = sound().build()
    for capture in ({"overhead": None}, {"overhead": {"ratio": "fast"}}, {"overhead": []}):
        assert quality(replace(trace, meta=replace(trace.meta, capture=capture))).notices == ()


def test_a_finding_says_which_results_are_weaker_for_it() -> None:
    checks = {
        row["check"]: row
        for row in quality(sound().kernel("early", 1, 2).build()).checks.to_dicts()
    }
    assert (
        "operators: device time of operators is too small by this work"
        in checks["orphan-work"]["affects"]
    )
    assert checks["no-steps"]["affects"] == []  # nothing was found


@pytest.mark.parametrize(
    "slug", sorted({row for case in CASES for row in (case[0],)} | set(EFFECTS))
)
def test_every_finding_has_effects_on_parts_of_the_report(slug: str) -> None:
    document = sound_report()
    assert EFFECTS[slug]
    for part in EFFECTS[slug]:
        first, _, field = part.partition("[*].")
        assert first in document
        assert not field or field in document[first][0]


def test_the_report_tells_what_a_notice_weakens() -> None:
    document = build(Session((sound().kernel("early", 1, 2).build(),), "made"))
    told = {
        notice["slug"]: {one["part"] for one in notice["affects"]} for notice in document["notices"]
    }
    assert {"operators", "launches", "ranks[*].idle"} <= told["orphan-work"]
