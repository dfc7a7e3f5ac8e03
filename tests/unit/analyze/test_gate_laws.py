"""Laws of verdicts: what scaling, exchanging and adding runs must do to changes, intervals and outcomes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from support import runs as made
from traceloom.analyze import gate
from traceloom.analyze.gate import arrange_in_pairs, compute_runs_needed, find_causes
from traceloom.analyze.gate_statistics import (
    choose_block_length,
    compute_interval,
    compute_student_t_quantile,
    estimate_within_runs,
    get_statistic,
)
from traceloom.analyze.gate_summary import Baseline, RunSummary, decode, encode
from traceloom.errors import InputError

CONDITION = gate.parse("step_time > 3%")


def row(
    base: list[RunSummary], new: list[RunSummary], text: str = "step_time > 3%"
) -> dict[str, Any]:
    return gate.judge(base, new, [gate.parse(text)]).checks.row(0, named=True)


def side(seed: int, mean: float, runs: int = 3) -> list[RunSummary]:
    chance = np.random.default_rng(seed)
    return [made.run(chance, mean, of_runs=0.01, count=30) for _ in range(runs)]


def scaled(runs: list[RunSummary], factor: float) -> list[RunSummary]:
    return [made.summary([factor * ns for ns in run.wall_ns or ()]) for run in runs]


@pytest.mark.parametrize("factor", [1e-3, 7.0, 1e6])
@pytest.mark.parametrize("runs", [1, 3])
def test_the_unit_of_time_changes_no_relative_verdict(runs: int, factor: float) -> None:
    base, new = side(1, 1e7, runs), side(2, 1.04e7, runs)
    one, other = row(base, new), row(scaled(base, factor), scaled(new, factor))
    assert one["verdict"] == other["verdict"]
    for name in ("change", "low", "high", "effect_size"):
        assert other[name] == pytest.approx(one[name])
    assert (other["base"], other["new"]) == pytest.approx(
        (factor * one["base"], factor * one["new"])
    )


@pytest.mark.parametrize("runs", [1, 3])
def test_an_interval_holds_its_change_and_the_verdict_is_where_it_lies(runs: int) -> None:
    for seed, slower in enumerate((0.9, 1.0, 1.03, 1.2)):
        found = row(side(seed, 1e7, runs), side(seed + 50, slower * 1e7, runs))
        assert found["low"] <= found["change"] <= found["high"]
        assert found["change"] == pytest.approx(found["new"] / found["base"] - 1)
        wanted = (
            "fail" if found["low"] > 0.03 else "pass" if found["high"] <= 0.03 else "inconclusive"
        )
        assert found["verdict"] == wanted


def test_a_stricter_limit_never_turns_a_fail_into_a_pass() -> None:
    order = {"pass": 0, "inconclusive": 1, "fail": 2}
    base, new = side(3, 1e7), side(4, 1.05e7)
    verdicts = [
        order[row(base, new, f"step_time > {limit}%")["verdict"]]
        for limit in (20, 10, 6, 5, 4, 2, 0, -5)
    ]
    assert verdicts == sorted(verdicts)
    assert (verdicts[0], verdicts[-1]) == (0, 2)


def test_above_and_below_are_each_others_mirror() -> None:
    base, new = side(3, 1e7), side(4, 1.2e7)
    up, down = row(base, new, "step_time > 3%"), row(base, new, "step_time < 3%")
    assert (up["low"], up["high"], up["change"]) == (down["low"], down["high"], down["change"])
    assert (up["verdict"], down["verdict"]) == ("fail", "pass")


def test_an_absolute_limit_is_the_relative_one_times_the_base() -> None:
    base, new = side(3, 1e7), side(4, 1.05e7)
    relative, absolute = row(base, new, "step_time > 3%"), row(base, new, "step_time > 300us")
    assert absolute["change"] == pytest.approx(absolute["new"] - absolute["base"])
    assert absolute["change"] / absolute["base"] == pytest.approx(relative["change"])
    assert absolute["limit"] == 300_000


@given(
    st.lists(st.floats(1, 100), min_size=5, max_size=40),
    st.sampled_from(["mean", "median", "p10", "p95"]),
)
def test_one_run_against_itself_never_fails_at_any_statistic(
    steps: list[float], statistic: str
) -> None:
    run = made.summary(steps)
    found = row(
        [run], [run], f"{statistic}(step_time) > 0%" if statistic != "mean" else "step_time > 0%"
    )
    assert found["change"] == 0
    assert found["verdict"] != "fail"
    assert found["low"] <= 0 <= found["high"]
    wanted = (
        np.mean(steps)
        if statistic == "mean"
        else np.percentile(steps, {"median": 50, "p10": 10, "p95": 95}[statistic])
    )
    assert found["base"] == pytest.approx(wanted)


@pytest.mark.parametrize("name", ["mean", "median", "p1", "p50", "p99"])
def test_statistics_go_along_the_last_axis(name: str) -> None:
    values = np.random.default_rng(1).random((4, 9))
    rows = [float(get_statistic(name)(one)) for one in values]
    assert get_statistic(name)(values).tolist() == pytest.approx(rows)


def test_students_quantile_falls_to_the_normal_one() -> None:
    values = [
        compute_student_t_quantile(freedom)
        for freedom in (0.5, 1, 1.5, 2, 3.3, 7, 11, 40, 500, 1e9)
    ]
    assert values == sorted(values, reverse=True)
    assert values[0] == values[1] == pytest.approx(12.7062, rel=1e-4)
    assert values[-1] == pytest.approx(1.95996, rel=1e-3)


def test_few_samples_have_wider_intervals_than_many_of_the_same_scatter() -> None:
    draws = np.random.default_rng(2).normal(10, 1, 4000)
    widths = [
        high - low
        for low, high in (compute_interval(draws, 10, freedom) for freedom in (1, 2, 5, 30, 1e9))
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx(2 * 1.96, rel=0.05)
    assert compute_interval(np.full(10, 5.0), 5.0, 3) == (5.0, 5.0)


@pytest.mark.parametrize("steps", [[1.0] * 50, [1.0, 2.0], list(range(1, 8)), [1.0, 9.0] * 40])
def test_blocks_are_at_least_one_step_and_at_most_a_quarter_of_all(steps: list[float]) -> None:
    length = choose_block_length(np.array(steps, dtype=np.float64))
    assert 1 <= length <= max(len(steps) // 4, 1)


def test_without_noise_nothing_is_uncertain() -> None:
    drawn = estimate_within_runs(np.full(20, 5.0), np.full(20, 6.0), get_statistic("mean"))
    assert (set(drawn.base), set(drawn.new), drawn.effect) == ({5.0}, {6.0}, None)
    found = row([made.summary([10.0] * 20)], [made.summary([11.0] * 20)])
    assert (found["verdict"], found["low"], found["high"]) == (
        "fail",
        pytest.approx(0.1),
        pytest.approx(0.1),
    )


@pytest.mark.parametrize("scatter", [0.001, 0.01, 0.05])
def test_the_runs_that_are_needed_are_the_fewest(scatter: float) -> None:
    for paired in (False, True):
        runs = compute_runs_needed(scatter, 0.02, paired=paired)
        assert runs is not None
        sides = 1 if paired else 2

        def reach(count: int, sides: int = sides) -> float:
            return (
                (compute_student_t_quantile((count - 1) * sides) + 0.8416)
                * scatter
                * math.sqrt(sides / count)
            )

        assert reach(runs) <= 0.02
        assert runs == 2 or reach(runs - 1) > 0.02


# -- pairs --------------------------------------------------------------------------------------------------------


def at(run: RunSummary, time: int, name: str) -> RunSummary:
    return RunSummary(
        name, run.stated, run.program, run.wall_ns, run.steps, run.scalars, run.tables, time
    )


def test_pairs_come_in_the_order_of_the_day_whatever_the_order_of_the_files() -> None:
    base = [at(run, 100 * number, f"b{number}") for number, run in enumerate(side(1, 1e7, 4))]
    new = [
        at(run, 100 * number + (10 if number % 2 else -10), f"n{number}")
        for number, run in enumerate(side(2, 1e7, 4))
    ]
    left, right, paired = arrange_in_pairs(base[::-1], [new[2], new[0], new[3], new[1]])
    assert paired
    assert [run.name for run in left] == ["b0", "b1", "b2", "b3"]
    assert [run.name for run in right] == ["n0", "n1", "n2", "n3"]
    assert gate.judge(base, new, [CONDITION]).checks["sample"].to_list() == ["pairs of runs"]
    assert not arrange_in_pairs(base, new[:3])[2]
    assert not arrange_in_pairs(base, [at(run, 1000 + n, "x") for n, run in enumerate(new)])[2], (
        "all of one side came first"
    )


# -- what changed -------------------------------------------------------------------------------------------------


def with_kernels(table: dict[str, list[float]], **scalars: list[float]) -> RunSummary:
    run = made.summary(None, step_time=[10.0] * len(next(iter(table.values()))))
    return RunSummary(
        run.name,
        run.stated,
        run.program,
        None,
        run.steps,
        run.scalars | scalars,
        {"kernel": table},
        None,
    )


def test_causes_are_the_differences_of_the_means_the_largest_first() -> None:
    base = [with_kernels({"a": [10, 20], "b": [5, 5], "gone": [7, 9]}, idle=[100, 100])]
    new = [
        with_kernels({"a": [30, 30], "b": [5, 5], "new": [2, 2]}, idle=[90, 90]),
        with_kernels({"a": [30, 30]}, idle=[90, 90]),
    ]
    found = find_causes(base, new).rows()
    assert found == [
        ("kernel", "a", 15, 30, 15),
        ("part", "idle time of the GPUs", 100, 90, -10),
        ("kernel", "gone", 8, 0, -8),
        ("kernel", "b", 5, 2, -3),
        ("kernel", "new", 0, 1, 1),
    ]


def test_at_most_twenty_causes_are_told() -> None:
    base = [with_kernels({f"k{n}": [0.0] for n in range(40)})]
    new = [with_kernels({f"k{n}": [100.0 * n] for n in range(40)})]
    found = find_causes(base, new)
    assert found.height == 20
    assert found["name"][0] == "k39"


# -- kept ---------------------------------------------------------------------------------------------------------


def test_a_baseline_comes_back_as_it_was_and_its_bytes_depend_on_its_content_alone() -> None:
    runs = [*side(1, 1e7), with_kernels({'<b>"\u202e\x1b[31m日本': [1.0, 2.0]})]
    kept = Baseline("traceloom-baseline", 1, "0.2.0", "main", 5, runs)
    assert decode(encode(kept), "x") == kept
    assert encode(kept) == encode(decode(encode(kept), "x"))


@pytest.mark.parametrize("cut", [0, 1, 10, 100, -1])
def test_a_baseline_cut_short_or_longer_is_refused(cut: int) -> None:
    whole = encode(Baseline("traceloom-baseline", 1, "0.2.0", "main", 5, side(1, 1e7)))
    with pytest.raises(InputError) as error:
        decode(whole[:cut], "x")
    assert error.value.slug == "damaged-baseline"


@pytest.mark.parametrize("steps", [[], [0], [0, 1, 2]])
def test_a_baseline_with_columns_of_several_lengths_is_refused(steps: list[int]) -> None:
    run = with_kernels({"a": [1.0, 2.0]})
    odd = RunSummary(run.name, run.stated, run.program, None, steps, run.scalars, run.tables, None)
    with pytest.raises(InputError):
        decode(encode(Baseline("traceloom-baseline", 1, "0.2.0", "main", 5, [odd])), "x")
    with pytest.raises(InputError):
        decode(encode(Baseline("traceloom-baseline", 1, "0.2.0", "main", 5, [])), "x")
    nothing = RunSummary(run.name, run.stated, run.program, None, [], {}, {}, None)
    with pytest.raises(InputError):
        decode(encode(Baseline("traceloom-baseline", 1, "0.2.0", "main", 5, [nothing])), "x")
