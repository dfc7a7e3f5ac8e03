"""GPU time of ops: what they launched, as recorded and as replayed; held against each other by it, not by launches."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest

from support.plans import ran, timed_plan
from support.reports import check_schema
from traceloom.report import replay
from traceloom.report.replay import render_terminal
from traceloom.testing import TraceBuilder
from traceloom.workload.replay.comparison import ReplayComparison, compare_replay
from traceloom.workload.replay.execution import MARK, compute_marked_times
from traceloom.workload.replay.inputs import find_launched_work

MS = 1_000_000


def marked_passes(*passes: float) -> TraceBuilder:
    """Passes in which op 4 launches two kernels, op 7 one, op 9 nothing; kernels run long after their launches."""
    build = TraceBuilder()
    number = 1
    for begin, kernel_us in zip(range(0, 10_000, 1000), passes, strict=False):
        build.annotation(f"{MARK}4", begin, 100).op("aten::linear", begin + 5, 90).op(
            "aten::mm", begin + 10, 60
        )
        build.launch("cudaLaunchKernel", begin + 20, 5, correlation=number)
        build.launch("cudaLaunchKernel", begin + 40, 5, correlation=number + 1)
        build.annotation(f"{MARK}7", begin + 200, 50).launch(
            "cudaLaunchKernel", begin + 210, 5, correlation=number + 2
        )
        build.annotation(f"{MARK}9", begin + 300, 50)
        build.kernel("product", begin + 400, kernel_us, correlation=number)
        build.kernel("bias", begin + 600, 10, stream=9, correlation=number + 1)
        build.kernel("other", begin + 700, 3, correlation=number + 2)
        number += 3
    return build


def test_gpu_work_goes_to_the_mark_around_its_launch_whenever_it_ran() -> None:
    trace = marked_passes(100, 120, 400).build()
    assert compute_marked_times(trace).rows() == [(4, 130_000), (7, 3_000)], (
        "medians over three passes"
    )


def test_work_that_nobody_asked_for_is_nobodys() -> None:
    trace = marked_passes(100).build()
    names = trace.events["name"].cast(pl.String)
    below = find_launched_work(trace, (names == "aten::mm").to_numpy())
    assert below["duration_ns"].to_list() == [100_000, 10_000]
    assert below["stream"].to_list() == [7, 9]
    assert set(names.gather(below["event"])) == {"aten::mm"}


@pytest.fixture(scope="module")
def comparison() -> ReplayComparison:
    """The first product did 2 ms of GPU work and does 3; the second 1, and does 1; the relu's replay launched none."""
    plan, result = timed_plan(), ran()
    rank, here = plan.ranks[0], result.ranks[0]
    recorded = pl.Series("gpu_ns", [2 * MS, MS, MS, None, 64_000], dtype=pl.Int64)
    replayed = pl.Series("gpu_ns", [3 * MS, MS, None, None, 32_000], dtype=pl.Int64)
    plan = replace(plan, ranks={0: replace(rank, ops=rank.ops.with_columns(recorded))})
    return compare_replay(
        plan,
        replace(
            result, device="cuda", ranks={0: replace(here, ops=here.ops.with_columns(replayed))}
        ),
    )


def test_ops_are_ranked_by_gpu_time_where_there_is_any(comparison: ReplayComparison) -> None:
    columns = ["name", "recorded_gpu_ns", "replayed_gpu_ns", "gpu_lost_ns", "gpu_ratio", "lost_ns"]
    assert comparison.ops.select(columns).rows() == [
        ("aten::mm", 3 * MS, 4 * MS, MS, pytest.approx(4 / 3), -MS),
        ("c10d::all_reduce", 64_000, 32_000, -32_000, 0.5, 2 * MS),
    ]
    whole = comparison.whole.row(0, named=True)
    assert (whole["recorded_gpu_ns"], whole["replayed_gpu_ns"]) == (
        3 * MS + 64_000,
        4 * MS + 32_000,
    )
    assert (comparison.long_count, comparison.long_ratios) == (
        3,
        (pytest.approx(0.6), 1.0, pytest.approx(1.4)),
    )


def test_coverage_is_of_gpu_work_too(comparison: ReplayComparison) -> None:
    """The relu of 1 ms failed; of the products and the all_reduce, 3.064 ms, all ran."""
    rows = {
        row["outcome"]: (row["recorded_gpu_ns"], row["gpu_share"])
        for row in comparison.coverage.to_dicts()
    }
    assert rows == {
        "run": (3 * MS + 64_000, pytest.approx(3.064 / 4.064)),
        "failed": (MS, pytest.approx(1 / 4.064)),
        "stand-in": (None, None),
        "left-out": (None, None),
    }


def test_what_no_ratio_has_is_said() -> None:
    """The first product's replay shows no GPU work, and of the second none was recorded."""
    plan, result = timed_plan(), ran()
    rank, here = plan.ranks[0], result.ranks[0]
    recorded = pl.Series("gpu_ns", [2 * MS, None, None, None, 64_000], dtype=pl.Int64)
    replayed = pl.Series("gpu_ns", [None, 3 * MS, None, None, 32_000], dtype=pl.Int64)
    plan = replace(plan, ranks={0: replace(rank, ops=rank.ops.with_columns(recorded))})
    result = replace(result, ranks={0: replace(here, ops=here.ops.with_columns(replayed))})
    limits = [
        limit.replace("\N{NARROW NO-BREAK SPACE}", " ")
        for limit in replay.describe_limits(compare_replay(plan, result))
    ]
    assert any(
        "2 ops is known of one side alone (2.00 ms as recorded, 3.00 ms here)" in limit
        for limit in limits
    ), limits


@pytest.mark.parametrize("on_gpu", [True, False])
def test_an_asynchronous_collective_is_compared_by_its_kernel_alone(*, on_gpu: bool) -> None:
    plan, result = timed_plan(), ran()
    rank, here = plan.ranks[0], result.ranks[0]
    work = pl.Series("gpu_ns", [MS, None, None, None, MS if on_gpu else None], dtype=pl.Int64)
    later = rank.collectives.with_columns(pl.lit(value=True).alias("asynchronous"))
    plan = replace(
        plan, ranks={0: replace(rank, ops=rank.ops.with_columns(work), collectives=later)}
    )
    comparison = compare_replay(
        plan, replace(result, ranks={0: replace(here, ops=here.ops.with_columns(work))})
    )
    assert comparison.collectives["on_gpu"].to_list() == [on_gpu]
    assert comparison.collectives["ratio"].to_list() == [1.0 if on_gpu else None]
    document = replay.build(comparison)
    assert any("is not compared" in limit for limit in document["limits"]) != on_gpu
    lines = [line.plain for line in render_terminal(document, 100)]
    assert "Of one each: its GPU work where both" in "\n".join(lines)
    (shown,) = (line.split() for line in lines if line.startswith(" all_reduce"))
    assert ("yes" if on_gpu else "no") in shown


def test_a_collective_on_a_gpu_takes_as_long_as_its_kernel(comparison: ReplayComparison) -> None:
    (row,) = comparison.collectives.to_dicts()
    assert (row["recorded_ns"], row["replayed_ns"], row["ratio"]) == (64_000, 32_000, 0.5)
    assert row["replayed_gb_per_s"] == pytest.approx(128 / 32_000)


def test_every_view_shows_the_gpu_work(comparison: ReplayComparison) -> None:
    document = replay.build(comparison)
    check_schema(document, "replay.schema.json")
    assert "its GPU work took 1.32 times as long as recorded" in document["sentence"]
    assert "70.0 % of the time of its ops and 75.4 % of its GPU work ran" in document["sentence"]
    lines = "\n".join(line.plain for line in render_terminal(document, 100))
    assert "GPU recorded" in lines
    html = replay.render(document, comparison)
    assert "GPU work" in html
    assert html.count("<circle class=") == 2
    assert "GPU work that a call launched." in html
    assert "These are times of the host; GPU work is not drawn." in html


def test_without_gpu_work_nothing_is_said_of_it() -> None:
    comparison = compare_replay(timed_plan(), ran())
    document = replay.build(comparison)
    assert "GPU" not in document["sentence"]
    assert "GPU recorded" not in "\n".join(line.plain for line in render_terminal(document, 100))
    assert "These are times of the host" not in replay.render(document, comparison)
    assert comparison.whole["gpu_ratio"].to_list() == [None]
