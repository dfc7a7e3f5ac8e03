"""Topline, outliers and savings of made days, whose hours, operations, bytes, slow hosts and findings were planted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from traceloom.errors import UsageError
from traceloom.fleet.analyses.anomalies import find_outliers
from traceloom.fleet.analyses.attribution import compute_ownership_periods
from traceloom.fleet.analyses.efficiency import (
    INVESTMENT_DIMENSIONS,
    METRICS,
    MIN_JOBS,
    compute_fleet_topline,
    compute_savings,
)
from traceloom.fleet.store.schema import SCHEMAS, compute_usage_minutes
from traceloom.testing.fleet_weeks import TEAMS, Team, Weeks, WeeksRecipe, build_weeks

RECIPE = WeeksRecipe(days=2, usage_days=2, changes=())
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


class MadeDays:
    """Rows of made days, and whose the jobs are."""

    def __init__(self, recipe: WeeksRecipe = RECIPE) -> None:
        self.weeks: Weeks = build_weeks(recipe)
        self.frames = {
            name: SCHEMAS[name].complete(frame).lazy() for name, frame in self.weeks.tables.items()
        }
        self.owned = compute_ownership_periods(
            self.frames["jobs"], SCHEMAS["owners"].empty().lazy()
        )
        self.usage = (
            compute_usage_minutes(self.weeks.observed).lazy()
            if recipe.usage_days
            else pl.LazyFrame()
        )


@pytest.fixture(scope="module")
def days() -> MadeDays:
    return MadeDays()


def test_the_topline_of_models_is_what_was_planted(days: MadeDays) -> None:
    rows = {
        row["model"]: row
        for row in compute_fleet_topline(
            days.usage, days.owned, days.frames["captures"], "model"
        ).rows.to_dicts()
    }
    for team in TEAMS:
        row = rows[team.model]
        jobs = [
            job
            for job in days.weeks.held_ms
            if job.startswith(team.model) and not job.endswith("notebook")
        ]
        held_s = sum(days.weeks.held_ms[job] for job in jobs) / 1e3
        busy_s = sum(days.weeks.busy_ms[job] for job in jobs) / 1e3
        assert row["device_hours"] == pytest.approx(held_s / 3600, rel=1e-4)
        assert row["device_use"] == pytest.approx(busy_s / held_s, rel=1e-4)
        assert row["flop_rate"] == pytest.approx(3e14 * busy_s / held_s, rel=1e-4)
        assert row["flop_rate_high"] == pytest.approx(2 * row["flop_rate"])
        assert row["compute_use"] == pytest.approx(row["flop_rate"] / 989.4e12, rel=1e-4)
        assert row["power_w"] == pytest.approx(
            (busy_s * 400 + (held_s - busy_s) * 120) / held_s, rel=1e-4
        )
        assert row["reference_hours_per_byte"] == pytest.approx(
            held_s / 3600 * (989.4 / 312) / (busy_s * 1e6), rel=1e-4
        )
        assert (row["mfu"], row["roofline_fraction"]) == pytest.approx((0.4, 0.5))


def test_the_fleet_is_the_sum_of_its_models(days: MadeDays) -> None:
    whole = compute_fleet_topline(days.usage, days.owned, days.frames["captures"]).rows.row(
        0, named=True
    )
    of_models = compute_fleet_topline(days.usage, days.owned, days.frames["captures"], "model").rows
    assert whole["device_hours"] == pytest.approx(of_models["device_hours"].sum())
    weighted = (of_models["device_use"] * of_models["device_hours"]).sum() / whole["device_hours"]
    assert whole["device_use"] == pytest.approx(weighted)
    of_hosts = compute_fleet_topline(days.usage, days.owned, days.frames["captures"], "host").rows
    assert of_hosts["device_hours"].sum() == pytest.approx(whole["device_hours"])


def test_of_a_fleet_without_devices_nothing_is_known() -> None:
    usage, captures = (SCHEMAS[name].empty().lazy() for name in ("usage_hour", "captures"))
    owned = compute_ownership_periods(
        SCHEMAS["jobs"].empty().lazy(), SCHEMAS["owners"].empty().lazy()
    )
    [row] = compute_fleet_topline(usage, owned, captures).rows.to_dicts()
    assert {row[name] for name in METRICS} == {None}


def test_metrics_that_go_together_do(days: MadeDays) -> None:
    """In made days operations and power follow use; the least use has most reference hours per byte."""
    result = compute_fleet_topline(
        days.usage, days.owned, days.frames["captures"], "job"
    ).correlations
    of_pair = {(a, b): (jobs, value) for a, b, jobs, value in result.rows()}
    assert len(of_pair) == len(METRICS) * (len(METRICS) - 1) // 2
    for second, sign in (("flop_rate", 1), ("power_w", 1), ("reference_hours_per_byte", -1)):
        jobs, value = of_pair["device_use", second]
        assert jobs >= MIN_JOBS
        assert value == pytest.approx(sign, abs=0.1)  # jobs of a team are alike but for rounding
    assert of_pair["roofline_fraction", "mfu"][1] is None  # the same for all jobs


def test_what_goes_together_does_not_depend_on_the_order_of_rows(days: MadeDays) -> None:
    """Jobs of a team are alike but for the last digit of a sum, which the order of its parts decides."""
    usage, captures = days.usage.collect(), days.frames["captures"]
    results = [
        compute_fleet_topline(rows.lazy(), days.owned, captures, "job").correlations.drop_nulls()
        for rows in (
            usage,
            usage.reverse(),
            *(usage.sample(fraction=1, shuffle=True, seed=n) for n in range(3)),
        )
    ]
    first, *others = (result["correlation"].to_list() for result in results)
    for other in others:
        assert other == pytest.approx(first, rel=1e-12)


def test_of_few_jobs_nothing_goes_together(days: MadeDays) -> None:
    few = days.usage.filter(pl.col("job").is_in(sorted(days.weeks.held_ms)[:5]))
    result = compute_fleet_topline(few, days.owned, days.frames["captures"], "job").correlations
    assert result["correlation"].null_count() == result.height


def test_what_a_data_sheet_does_not_say_is_unknown(days: MadeDays) -> None:
    odd = days.usage.with_columns(device_model=pl.lit("Abacus 3000"))
    row = compute_fleet_topline(odd, days.owned, days.frames["captures"]).rows.row(0, named=True)
    assert (row["compute_use"], row["reference_hours_per_byte"]) == (None, None)
    assert row["device_use"] > 0
    with pytest.raises(UsageError) as refusal:
        compute_fleet_topline(
            days.usage, days.owned, days.frames["captures"], reference="Abacus 3000"
        )
    assert refusal.value.slug == "no-such-device"


def test_reference_hours_count_devices_by_their_peaks(days: MadeDays) -> None:
    older = compute_fleet_topline(
        days.usage.with_columns(device_model=pl.lit(A100)), days.owned, days.frames["captures"]
    )
    newer = compute_fleet_topline(days.usage, days.owned, days.frames["captures"])
    ratio = (
        newer.rows["reference_hours_per_byte"].item()
        / older.rows["reference_hours_per_byte"].item()
    )
    assert ratio == pytest.approx(989.4 / 312)


ONE_TEAM = (Team("assistant", "ads", "chat", "bo", "torch 2.13", hosts=8, kernels=20),)


@pytest.mark.parametrize("slow", [None, 0, 5])
def test_the_slow_host_is_found_exactly(slow: int | None) -> None:
    days = MadeDays(
        replace(RECIPE, teams=ONE_TEAM, slow_host=slow, slow_factor=1.2, usage_days=0, days=4)
    )
    hosts = find_outliers(
        days.frames["kernels"], days.frames["captures"], days.frames["devices"]
    ).hosts
    assert hosts.height == 8
    assert hosts.filter("outlier")["host"].to_list() == (
        [] if slow is None else [days.weeks.hosts[slow]]
    )
    if slow is not None:
        assert hosts["ratio"][0] == pytest.approx(1.2, rel=0.03)
        assert hosts["kernels"][0] == 40


def test_hosts_without_peers_are_not_judged() -> None:
    days = MadeDays(replace(RECIPE, teams=TEAMS[:1], slow_host=0, slow_factor=3.0, usage_days=0))
    assert (
        find_outliers(
            days.frames["kernels"], days.frames["captures"], days.frames["devices"]
        ).hosts.height
        == 0
    )


def ranks(compute_ms: list[list[float]], job: str = "a") -> tuple[pl.LazyFrame, pl.LazyFrame]:
    """Captures and devices of a job: time in compute kernels by capture and rank."""
    captures = [
        {"capture": f"{job}{at}", "job": job, "start_ns": at} for at in range(len(compute_ms))
    ]
    devices = [
        {
            "capture": f"{job}{at}",
            "rank": rank,
            "host": f"h{rank // 4}",
            "compute_ns": round(ms * 1e6),
        }
        for at, row in enumerate(compute_ms)
        for rank, ms in enumerate(row)
    ]
    return tuple(
        SCHEMAS[name].complete(pl.DataFrame(rows)).lazy()
        for name, rows in (("captures", captures), ("devices", devices))
    )  # type: ignore[return-value]


def test_a_rank_that_is_slow_in_most_captures_is_an_outlier() -> None:
    scatter = np.random.default_rng(3).normal(1, 0.01, (5, 8))
    slow = scatter.copy()
    slow[:, 6] *= 1.3
    slow[2, 1] *= 5  # once is no habit
    captures, devices = ranks((10 * slow).tolist())
    rows = find_outliers(SCHEMAS["kernels"].empty().lazy(), captures, devices).ranks
    assert rows.filter("outlier").select("job", "rank", "host").rows() == [("a", 6, "h1")]
    assert rows["ratio"][0] == pytest.approx(1.3, rel=0.03)
    captures, devices = ranks((10 * scatter).tolist())
    assert (
        not find_outliers(SCHEMAS["kernels"].empty().lazy(), captures, devices)
        .ranks["outlier"]
        .any()
    )


def test_alike_ranks_and_few_ranks_are_no_outliers() -> None:
    nothing = SCHEMAS["kernels"].empty().lazy()
    captures, devices = ranks([[10.0, 10.0, 10.0, 10.1]])
    assert not find_outliers(nothing, captures, devices).ranks["outlier"].any()
    captures, devices = ranks([[10.0, 10.0, 30.0]])
    assert find_outliers(nothing, captures, devices).ranks.height == 0


def savings(days: MadeDays) -> dict[str, float]:
    """Model -> device ms that fixing its one rule saves; the notebook has no captures."""
    share = {team.model: 0.5 if team.busy < 0.5 else 0.1 for team in TEAMS}
    saved: dict[str, float] = defaultdict(float)
    for job, ms in days.weeks.held_ms.items():
        if not job.endswith("notebook"):
            model = job.partition("-")[0]
            saved[model] += ms * share[model]
    return saved


@pytest.mark.parametrize(
    "by", [("model",), ("framework",), ("rule",), ("division", "rule"), ("rule", "model"), ()]
)
def test_savings_are_device_time_times_what_findings_save(
    days: MadeDays, by: tuple[str, ...]
) -> None:
    result = compute_savings(
        days.usage, days.owned, days.frames["captures"], days.frames["findings"], by
    )
    truth = savings(days)
    assert result.rows["saved_ms"].sum() == pytest.approx(sum(truth.values()), rel=1e-4)
    if by == ("model",):
        assert dict(result.rows.select("model", "saved_ms").rows()) == pytest.approx(
            truth, rel=1e-4
        )
    if by == ("rule",):
        idle = dict(result.rows.select("rule", "saved_ms").rows())
        assert idle["python-bound"] == pytest.approx(truth["vision"], rel=1e-4)
    notebooks = sum(ms for job, ms in days.weeks.held_ms.items() if job.endswith("notebook"))
    assert result.held_ms - result.analysed_ms == pytest.approx(notebooks, abs=700)
    assert result.rows["confidence"].to_list() == pytest.approx([0.8] * result.rows.height)


def test_a_capture_without_the_finding_counts_as_nothing(days: MadeDays) -> None:
    half = days.frames["findings"].filter(pl.col("capture").str.ends_with(".0"))
    whole = compute_savings(
        days.usage, days.owned, days.frames["captures"], days.frames["findings"], ["rule"]
    ).rows
    halved = compute_savings(days.usage, days.owned, days.frames["captures"], half, ["rule"]).rows
    assert halved["saved_ms"].to_list() == pytest.approx((whole["saved_ms"] / 2).to_list())


def test_nothing_is_saved_without_findings_and_odd_divisions_are_refused(days: MadeDays) -> None:
    nothing = SCHEMAS["findings"].empty().lazy()
    for name in INVESTMENT_DIMENSIONS:
        assert (
            compute_savings(
                days.usage, days.owned, days.frames["captures"], nothing, [name]
            ).rows.height
            == 0
        )
    with pytest.raises(UsageError) as refusal:
        compute_savings(days.usage, days.owned, days.frames["captures"], nothing, ["ruel"])
    assert refusal.value.slug == "no-such-dimension"
