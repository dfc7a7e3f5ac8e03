"""Regressions over made weeks: what was planted is found, with its day, size and cause, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import date, datetime, time, timedelta, timezone

import numpy as np
import polars as pl
import pytest

from traceloom.fleet.analyses.regressions import (
    Regressions,
    compute_significance_levels,
    find_change_points,
    find_regressions,
)
from traceloom.fleet.store.schema import SCHEMAS
from traceloom.testing.fleet_weeks import KernelChange, Weeks, WeeksRecipe, build_weeks

RECIPE = WeeksRecipe(usage_days=0)
DAY = date(2026, 10, 5)
LEVEL = compute_significance_levels([40])


def looked_at(tables: dict[str, pl.DataFrame]) -> Regressions:
    frames = {name: SCHEMAS[name].complete(frame).lazy() for name, frame in tables.items()}
    return find_regressions(frames["kernels"], frames["captures"], frames["devices"])


def fleet(
    rows: Iterable[tuple[str, float, str | None, str, str, str]], captures: int = 1
) -> dict[str, pl.DataFrame]:
    """A kernel in jobs of successive hours: job, duration in ns, code, host, shapes, model of the device."""
    tables: dict[str, list[dict[str, object]]] = {"captures": [], "kernels": [], "devices": []}
    for hour, (job, ns, code, host, shapes, model) in enumerate(rows):
        for number in range(captures):
            about = {"day": DAY, "capture": f"{job}.{hour}.{number}"}
            start = hour * 3_600_000_000_000 + number
            tables["captures"].append({**about, "job": job, "start_ns": start, "code": code})
            tables["devices"].append({**about, "rank": 0, "host": host})
            work = {
                "kernel": "k",
                "shapes": shapes,
                "device_model": model,
                "count": 100,
                "total_ns": round(100 * ns),
            }
            tables["kernels"].append({**about, "rank": 0, **work})
    return {name: pl.DataFrame(rows, infer_schema_length=None) for name, rows in tables.items()}


def plain(durations: Iterable[float]) -> list[tuple[str, float, str | None, str, str, str]]:
    return [(f"job{at}", ns, "c", "h", "[[8]]", "H100") for at, ns in enumerate(durations)]


def noisy(count: int, level: float = 1000.0, seed: int = 0) -> list[float]:
    return (level * np.exp(np.random.default_rng(seed).normal(0, 0.03, count))).tolist()


@pytest.fixture(scope="module")
def weeks() -> Weeks:
    return build_weeks(RECIPE)


@pytest.fixture(scope="module")
def result(weeks: Weeks) -> Regressions:
    return looked_at(weeks.tables)


def test_the_planted_tenfold_embedding_kernel_comes_first(
    weeks: Weeks, result: Regressions
) -> None:
    assert "embedding" in weeks.kernel(weeks.recipe.changes[0])
    assert result.slower["kernel"].to_list()[:2] == [weeks.kernel(weeks.recipe.changes[0])] * 2


def test_what_was_planted_is_found_with_its_size_and_day_and_nothing_else(
    weeks: Weeks, result: Regressions
) -> None:
    causes = {"code": ("code", "possible"), "": ("unknown", "none"), "shapes": ("shapes", "shown")}
    expected = {(weeks.kernel(change), *causes[change.cause]) for change in weeks.recipe.changes}
    assert set(result.changes.select("kernel", "cause", "evidence").rows()) == expected
    starts = weeks.tables["captures"].group_by("job").agg(pl.col("start_ns").min())
    for change in weeks.recipe.changes:
        rows = result.changes.filter(pl.col("kernel") == weeks.kernel(change))
        assert rows.height == (
            1 if change.cause == "shapes" else 2
        )  # of each shape, unless these did not change
        midnight = datetime.combine(RECIPE.start + timedelta(days=change.day), time(), timezone.utc)
        of_model = starts.filter(pl.col("job").str.starts_with(change.model))
        # a job that began before midnight has the old kernel, though its captures may be after it
        began = weeks.tables["jobs"].filter(
            pl.col("valid_from_ns") >= int(midnight.timestamp()) * 10**9
        )["job"]
        after = of_model.filter(pl.col("job").is_in(began.implode()))
        for row in rows.to_dicts():
            # jobs of some hosts begin between others, so that one or two may stand on the other side of the cut
            assert abs(row["jobs_after"] - after.height) <= 2
            assert set(row["jobs"]) <= set(after["job"])
            if change.cause != "shapes":
                assert row["low"] - 0.02 < change.factor - 1 < row["high"] + 0.02
                assert row["change"] == pytest.approx(change.factor - 1, rel=0.05)


def test_a_change_names_a_capture_of_both_sides(weeks: Weeks, result: Regressions) -> None:
    row = result.slower.row(0, named=True)
    means = {}
    for side in ("capture", "healthy_capture"):
        of_capture = weeks.tables["kernels"].filter(
            (pl.col("capture") == row[side])
            & (pl.col("kernel") == row["kernel"])
            & (pl.col("shapes") == row["shapes"])
        )
        means[side] = of_capture["total_ns"].sum() / of_capture["count"].sum()
    assert means["capture"] / means["healthy_capture"] == pytest.approx(10, rel=0.1)


def test_extra_time_is_what_jobs_after_it_spent_beyond_before(
    weeks: Weeks, result: Regressions
) -> None:
    row = result.slower.row(0, named=True)
    kernel = (
        weeks.tables["kernels"]
        .filter((pl.col("kernel") == row["kernel"]) & (pl.col("shapes") == row["shapes"]))
        .join(weeks.tables["captures"].select("capture", "start_ns"), on="capture")
    )
    after = kernel.filter(pl.col("start_ns") >= row["since_ns"])
    assert row["extra_ns"] == pytest.approx(after["total_ns"].sum() * 0.9, rel=0.05)


@pytest.mark.parametrize(
    "seed", [2, 3, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(4, 24))]
)
def test_series_that_do_not_change_give_no_alarm(seed: int) -> None:
    quiet = looked_at(
        build_weeks(replace(RECIPE, days=14, changes=(), seed=seed, captures=1)).tables
    )
    assert quiet.series >= 200
    assert quiet.changes.height == 0


def test_a_slow_host_is_no_change() -> None:
    quiet = looked_at(
        build_weeks(replace(RECIPE, days=10, changes=(), slow_host=1, seed=5, captures=1)).tables
    )
    assert quiet.changes.height == 0


def test_new_hosts_that_are_slow_are_named() -> None:
    change = KernelChange("assistant", 3, 8, 2.0, "host")
    weeks = build_weeks(replace(RECIPE, days=14, changes=(change,), captures=1))
    rows = looked_at(weeks.tables).changes
    assert set(rows.select("kernel", "cause", "evidence").rows()) == {
        (weeks.kernel(change), "host", "possible")
    }


def test_captures_of_one_job_are_one_sample() -> None:
    """A hundred captures of two slow jobs say no more than two jobs."""
    rows = plain([*noisy(20), 2000.0, 2000.0])
    assert looked_at(fleet(rows, captures=50)).changes.height == 0


def test_fewer_than_ten_jobs_are_no_series() -> None:
    few = looked_at(fleet(plain([*noisy(4), *noisy(5, 10_000, 1)])))
    assert (few.changes.height, few.series, few.short) == (0, 1, 1)
    enough = looked_at(fleet(plain([*noisy(5), *noisy(5, 10_000, 1)])))
    assert (enough.changes.height, enough.short) == (1, 0)


def test_a_kernel_that_is_mended_changes_twice() -> None:
    rows = looked_at(
        fleet(plain([*noisy(12), *noisy(10, 3000, 1), *noisy(10, 1000, 2)]))
    ).changes.sort("since_ns")
    assert rows["since_ns"].to_list() == [12 * 3_600_000_000_000, 22 * 3_600_000_000_000]
    assert rows["change"].to_list() == pytest.approx([2.0, -2 / 3], rel=0.05)
    assert rows.select("jobs_before", "jobs_after").rows() == [(12, 10), (10, 10)]


@pytest.mark.parametrize("odd", [[12], [3, 14, 22]])
def test_odd_jobs_are_no_change(odd: list[int]) -> None:
    durations = noisy(30)
    for at in odd:
        durations[at] *= 40
    assert looked_at(fleet(plain(durations))).changes.height == 0


@pytest.mark.parametrize(("fact", "cause"), [("code", "code"), ("host", "host")])
def test_jobs_that_still_have_the_old_code_or_host_show_the_cause(fact: str, cause: str) -> None:
    rows = []
    for at, ns in enumerate(noisy(40)):
        new = at >= 20 and at % 5 != 4  # some jobs after it are as before
        slow = ns * 2 if new else ns
        code, host = (
            ("new" if new and fact == "code" else "old"),
            ("h1" if new and fact == "host" else "h0"),
        )
        rows.append((f"job{at}", slow, code, host, "[[8]]", "H100"))
    row = looked_at(fleet(rows)).changes.row(0, named=True)
    assert (row["cause"], row["evidence"]) == (cause, "shown")


def test_jobs_on_old_hosts_that_are_slow_too_clear_the_hosts() -> None:
    """Code and some hosts change at once; jobs on the old hosts are slow as well, so it is the code."""
    rows = [
        (
            f"job{at}",
            ns * (2 if at >= 20 else 1),
            "new" if at >= 20 else "old",
            f"h{at % 2 if at >= 20 else 0}",
            "[[8]]",
            "H100",
        )
        for at, ns in enumerate(noisy(40))
    ]
    row = looked_at(fleet(rows)).changes.row(0, named=True)
    assert (row["cause"], row["evidence"]) == ("code", "possible")


def test_nothing_is_said_of_a_cause_that_is_not_known() -> None:
    rows = [
        (job, ns, None, host, shapes, model)
        for job, ns, _, host, shapes, model in plain([*noisy(9), *noisy(9, 2000, 1)])
    ]
    row = looked_at(fleet(rows)).changes.row(0, named=True)
    assert (row["cause"], row["evidence"]) == ("unknown", "none")


@pytest.mark.parametrize(("column", "cause"), [("shapes", "shapes"), ("model", "device")])
def test_a_mix_that_changes_is_told_from_work_that_takes_longer(column: str, cause: str) -> None:
    rows = []
    for at, ns in enumerate(noisy(40)):
        for part, longer in enumerate((1, 5)):
            pieces = 1 if (at >= 20) == (part == 1) else 0  # short work before, long work after
            shapes = f"[[{part}]]" if column == "shapes" else "[[8]]"
            model = f"model{part}" if column == "model" else "H100"
            if pieces or at % 4 == 0:
                rows.append((f"job{at}", ns * longer, "c", "h", shapes, model))
    found = looked_at(fleet(rows)).changes
    assert found.select("cause", "shapes", "device_model").rows() == [(cause, None, None)]


@pytest.mark.parametrize("scale", [1e-3, 1e6])
def test_changes_do_not_depend_on_the_unit(scale: float) -> None:
    values = np.array([*noisy(20), *noisy(20, 1300, 1)])
    (first,), (second,) = (
        find_change_points(values, LEVEL),
        find_change_points(values * scale, LEVEL),
    )
    assert (first.at, second.at) == (20, 20)
    assert (first.low, first.high) == pytest.approx((second.low, second.high))


@pytest.mark.parametrize(
    ("counts", "cuts", "stretches"),
    [
        ((), 1, 1),
        ((9,), 1, 1),
        ((10,), 1, 1),
        ((11,), 2, 1),
        ((30,), 21, 11 * 12 / 2),
        ((30, 11, 3), 23, 11 * 12 / 2),
    ],
)
def test_alarms_are_divided_over_all_that_is_looked_at(
    counts: tuple[int, ...], cuts: int, stretches: int
) -> None:
    assert compute_significance_levels(counts) == pytest.approx((0.0005 / cuts, 0.0005 / stretches))


def test_constant_series_and_exact_steps() -> None:
    assert find_change_points(np.full(30, 5.0), LEVEL) == []
    step = find_change_points(np.array([5.0] * 10 + [10.0] * 10), LEVEL)
    assert [(c.at, c.before, c.after, c.low, c.high) for c in step] == [(10, 5.0, 10.0, 1.0, 1.0)]


def test_empty_tables_have_no_series() -> None:
    empty = find_regressions(
        *(SCHEMAS[name].empty().lazy() for name in ("kernels", "captures", "devices"))
    )
    assert (empty.changes.height, empty.series, empty.short) == (0, 0, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("jobs", [(6, 9), (25, 40), (41, 30)], ids=["few", "odd-and-even", "odd"])
def test_intervals_are_those_of_samples_that_are_drawn_one_by_one(jobs: tuple[int, int]) -> None:
    chance = np.random.default_rng(sum(jobs))
    before, after = (
        level * np.exp(chance.normal(0, 0.1, count))
        for level, count in zip((1.0, 2.0), jobs, strict=True)
    )
    [change] = find_change_points(
        np.concatenate([before, after]), compute_significance_levels([sum(jobs)])
    )
    assert (change.at, change.before, change.after) == (
        jobs[0],
        np.median(before),
        np.median(after),
    )
    drawn = [
        np.median(chance.choice(after, after.size)) / np.median(chance.choice(before, before.size))
        - 1
        for _ in range(20_000)
    ]
    # the interval of the gate is a little wider than the quantiles, for few jobs
    low, high = np.quantile(drawn, [0.025, 0.975])
    width = high - low
    assert change.low == pytest.approx(low, abs=0.35 * width)
    assert change.high == pytest.approx(high, abs=0.35 * width)
    assert change.low <= low + 0.05 * width
    assert change.high >= high - 0.05 * width


def test_a_cut_is_where_the_distances_to_both_medians_are_least() -> None:
    chance = np.random.default_rng(5)
    for at in (7, 20, 33):
        values = np.exp(
            np.concatenate([chance.normal(0, 0.2, at), chance.normal(1.5, 0.2, 40 - at)])
        )
        log = np.log(values)
        spread = {
            cut: sum(float(np.abs(side - np.median(side)).sum()) for side in (log[:cut], log[cut:]))
            for cut in range(5, 36)
        }
        [change] = find_change_points(values, compute_significance_levels([40]))
        assert change.at == min(spread, key=spread.__getitem__)
