"""A replay against what was recorded: coverage, ratios, collectives, and the document, page and terminal of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from support.plans import ran, timed_plan as planned
from support.reports import check_schema
from traceloom.errors import UsageError
from traceloom.report import replay
from traceloom.report.replay import REPLAY, render_terminal
from traceloom.testing import TraceBuilder
from traceloom.workload.replay.comparison import TABLES, ReplayComparison, compare_replay
from traceloom.workload.replay.inputs import find_uncovered_time
from traceloom.workload.replay.plan import PLAN_SCHEMAS

MS = 1_000_000


@pytest.fixture(scope="module")
def comparison() -> ReplayComparison:
    return compare_replay(planned(), ran())


def test_the_whole_is_a_step_against_a_pass(comparison: ReplayComparison) -> None:
    row = comparison.whole.row(0, named=True)
    assert (row["recorded_ns"], row["replayed_ns"], row["ratio"]) == (20 * MS, 11 * MS, 0.55)
    assert (row["recorded_cpu_ns"], row["replayed_cpu_ns"], row["cpu_ratio"]) == (
        11 * MS,
        11 * MS,
        1.0,
    )
    assert (row["recorded_ops_ns"], row["replayed_ops_ns"]) == (7 * MS, 8 * MS)
    assert (row["step_count"], row["pass_count"]) == (3, 2)


def test_coverage_is_of_ops_and_of_time(comparison: ReplayComparison) -> None:
    rows = {row["outcome"]: row for row in comparison.coverage.to_dicts()}
    assert {k: (r["reason"], r["count"], r["recorded_ns"]) for k, r in rows.items()} == {
        "run": (None, 3, 7 * MS),
        "failed": ("failed", 1, MS),
        "stand-in": ("custom-op", 1, 2 * MS),
        "left-out": ("refused-op", 1, 0),
    }
    assert rows["run"]["time_share"] == 0.7
    assert rows["run"]["count_share"] == 0.5
    assert [row["name"] for row in comparison.not_run.to_dicts()] == [
        "mine::op",
        "aten::relu",
        "aten::save",
    ]


def test_ops_are_ranked_by_what_was_lost_or_won(comparison: ReplayComparison) -> None:
    rows = comparison.ops.to_dicts()
    assert [(row["name"], row["shapes"], row["calls"], row["lost_ns"]) for row in rows] == [
        ("c10d::all_reduce", "[8, 4]", 1, 2 * MS),
        ("aten::mm", "[8, 4] [4, 4]", 2, -1 * MS),
    ]
    assert rows[1]["ratio"] == pytest.approx(5 / 6)
    assert (rows[1]["p10_ratio"], rows[1]["p50_ratio"]) == pytest.approx((0.6, 1.0))
    assert comparison.long_count == 3
    assert comparison.each["gap_ns"].to_list() == [None, MS, None]


def test_collectives_have_bandwidths_unless_they_are_asynchronous(
    comparison: ReplayComparison,
) -> None:
    (row,) = comparison.collectives.to_dicts()
    # 128 bytes among 2 ranks: as many on the bus
    assert (row["size_bytes"], row["recorded_gb_per_s"]) == (128, pytest.approx(128 / MS))
    assert row["ratio"] == 3.0
    plan = planned()
    later = plan.ranks[0].collectives.with_columns(pl.lit(value=True).alias("asynchronous"))
    (row,) = compare_replay(
        replace(plan, ranks={0: replace(plan.ranks[0], collectives=later)}), ran()
    ).collectives.to_dicts()
    assert row["ratio"] is row["recorded_gb_per_s"] is None


def test_guesses_of_contents_are_counted(comparison: ReplayComparison) -> None:
    assert {
        (row["evidence"], row["count"], row["bytes"]) for row in comparison.contents.to_dicts()
    } == {
        ("guess", 1, 128),
        ("consumer", 1, 64),
    }


def test_the_document_is_as_its_schema_says(comparison: ReplayComparison) -> None:
    document = replay.build(comparison)
    check_schema(document, "replay.schema.json")
    assert document["sentence"] == (
        "The step took 11.0 ms, 0.55 times the recorded 20.0 ms (processor time: 1.00 times). 70.0 % of the time of its "
        "ops ran."
    )
    assert [limit.partition(" ")[0] for limit in document["limits"]] == ["10.0", "What", "It"]


def test_without_recorded_times_nothing_is_compared() -> None:
    plan = planned()
    bare = plan.ranks[0].ops.with_columns(pl.lit([], pl.List(pl.Int64)).alias("durations_ns"))
    plan = replace(
        plan, ranks={0: replace(plan.ranks[0], ops=bare, steps=plan.ranks[0].steps.clear())}
    )
    comparison = compare_replay(plan, ran())
    assert comparison.coverage["time_share"].null_count() == comparison.coverage.height
    assert comparison.long_ratios is None
    document = replay.build(comparison)
    check_schema(document, "replay.schema.json")
    assert document["sentence"] == "A pass took 11.0 ms. 50.0 % of its ops ran."
    replay.render(document, comparison)


def test_every_view_holds_hostile_names_as_text() -> None:
    hostile = '<script>alert(1)</script>\x1b[31m"'
    plan = planned(hostile, hostile)
    ops = plan.ranks[0].ops.with_columns(pl.lit(hostile).alias("name"))
    comparison = compare_replay(replace(plan, ranks={0: replace(plan.ranks[0], ops=ops)}), ran())
    document = replay.build(comparison)
    html = replay.render(document, comparison)
    assert "<script>alert" not in html
    assert "\x1b" not in html
    lines = [line.plain for line in render_terminal(document, 80)]
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_tables_are_files(comparison: ReplayComparison, tmp_path: Path) -> None:
    tables, path = tmp_path / "tables", tmp_path / "each.parquet"
    REPLAY.write_directory(comparison, tables, force=False)
    assert sorted(table.stem for table in tables.iterdir()) == sorted(TABLES)
    with path.open("wb") as handle:
        REPLAY.writer(path, ".parquet")(comparison, handle)
    assert pl.read_parquet(path).equals(comparison.each)
    with pytest.raises(UsageError, match="no table"):
        REPLAY.writer(tmp_path / "links.csv", ".csv")


def test_compiled_graphs_spend_time_that_no_op_explains() -> None:
    trace = (
        TraceBuilder()
        .op("Torch-Compiled Region: 0/0", 0, 100)
        .op("CompiledFunction", 10, 60)
        .annotation("## Call CompiledFxGraph fabc ##", 12, 50)
        .op("aten::mm", 20, 15)
        .op("aten::relu", 80, 5)
        .build()
    )
    runs = trace.events["name"].is_in(["aten::mm", "aten::relu"]).to_numpy()
    assert find_uncovered_time(trace, runs).rows() == [("CompiledFunction", 1, 45_000)]
    # A kernel for a GPU is an op: what is left of its graph is Python.
    for_gpu = (
        TraceBuilder().op("CompiledFunction", 10, 60).op("triton_poi_fused_gelu_0", 20, 15).build()
    )
    assert (
        find_uncovered_time(
            for_gpu, (for_gpu.events["name"] == "triton_poi_fused_gelu_0").to_numpy()
        ).height
        == 0
    )
    plan = planned()
    holes = pl.DataFrame(
        [{"rank": 0, "name": "CompiledFunction", "count": 1, "duration_ns": MS}],
        schema=PLAN_SCHEMAS["holes"],
    )
    comparison = compare_replay(
        replace(plan, ranks={0: replace(plan.ranks[0], holes=holes)}), ran()
    )
    assert comparison.holes["recorded_ns"].to_list() == [MS]
    assert any("compiled kernels" in limit for limit in replay.build(comparison)["limits"])
    assert any(
        "waiting, kernels of compiled code." in limit
        for limit in replay.describe_limits(comparison)
    )
    assert any(
        "loading, waiting. The pace" in limit
        for limit in replay.describe_limits(compare_replay(plan, ran()))
    )
