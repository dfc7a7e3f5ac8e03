"""Whose the time of the devices was: hours of made weeks exactly, in any order of dimensions, and put right afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import date, datetime, timezone
from itertools import permutations
from pathlib import Path

import polars as pl
import pytest

from traceloom.errors import InputError, UsageError
from traceloom.fleet.analyses.attribution import (
    ATTRIBUTION_DIMENSIONS,
    compute_ownership_periods,
    divide_device_time,
)
from traceloom.fleet.rules import OwnerRule, Prices, read_prices, read_rules
from traceloom.fleet.store.schema import (
    MINUTE_MS,
    SCHEMAS,
    compute_usage_hours,
    compute_usage_minutes,
)
from traceloom.testing.fleet_weeks import Weeks, WeeksRecipe, build_weeks

HOUR_NS = 3_600_000_000_000
NOBODY = SCHEMAS["owners"].empty().lazy()


class MadeFleet:
    """Two made days: minutes in whole milliseconds, jobs, and the truth by team."""

    def __init__(self) -> None:
        self.weeks: Weeks = build_weeks(WeeksRecipe(days=2, usage_days=2, captures=1))
        every = self.weeks.observed.select("host", "device", "device_model").unique()
        times = self.weeks.observed.select("time_ns").unique()
        self.minutes = compute_usage_minutes(self.weeks.observed, every.join(times, how="cross"))
        self.jobs = SCHEMAS["jobs"].complete(self.weeks.tables["jobs"])
        self.devices = every.height
        self.teams = {team.model: team for team in self.weeks.recipe.teams}

    def truth(self, value: Callable[[str], str]) -> tuple[dict[str, float], dict[str, float]]:
        """Held and busy ms by a value of jobs; a notebook is nobody's, as nobody said anything of it."""
        held: dict[str, float] = defaultdict(float)
        busy: dict[str, float] = defaultdict(float)
        for job, ms in self.weeks.held_ms.items():
            owner = (
                "unattributed"
                if job.endswith("notebook")
                else value(job.partition("-")[0]) or "unattributed"
            )
            held[owner] += ms
            busy[owner] += self.weeks.busy_ms[job]
        return held, busy


@pytest.fixture(scope="module")
def fleet() -> MadeFleet:
    return MadeFleet()


@pytest.fixture(scope="module")
def owned(fleet: MadeFleet) -> pl.DataFrame:
    return compute_ownership_periods(fleet.jobs.lazy(), NOBODY)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["division", "product", "model", "user", "framework"])
@pytest.mark.parametrize("table", ["usage_minute", "usage_hour"])
def test_hours_of_owners_are_those_that_were_planted(
    fleet: MadeFleet, owned: pl.DataFrame, name: str, table: str
) -> None:
    usage = (
        fleet.minutes.lazy()
        if table == "usage_minute"
        else compute_usage_hours(fleet.minutes).lazy()
    )
    leaves = divide_device_time(usage, owned, [name]).leaves
    rows = {row[name]: row for row in leaves.to_dicts()}
    held, busy = fleet.truth(lambda model: getattr(fleet.teams[model], name))
    assert set(rows) == {*held, "unallocated", "unreachable"}
    for owner, ms in held.items():
        # in minutes of a shared device the parts of its two jobs have fractions
        assert rows[owner]["device_ms"] == pytest.approx(ms, abs=700)
        assert rows[owner]["busy_ms"] == pytest.approx(busy[owner], rel=1e-4)
        assert rows[owner]["busy_ms"] + rows[owner]["idle_ms"] == rows[owner]["device_ms"]
    assert rows["unallocated"]["device_ms"] == fleet.weeks.free_ms
    assert rows["unreachable"]["device_ms"] == fleet.weeks.lost_ms
    assert leaves["device_ms"].sum() == fleet.devices * 2 * 1440 * MINUTE_MS


def test_hours_of_jobs_that_share_nothing_are_exact(fleet: MadeFleet, owned: pl.DataFrame) -> None:
    rows = divide_device_time(fleet.minutes.lazy(), owned, ["job"]).leaves
    measured = dict(rows.select("job", "device_ms").rows())
    shared = {
        job.removesuffix("-notebook") for job in fleet.weeks.held_ms if job.endswith("notebook")
    }
    alone = {
        job: ms
        for job, ms in fleet.weeks.held_ms.items()
        if job.removesuffix("-notebook") not in shared
    }
    assert len(alone) > 20
    assert {job: measured[job] for job in alone} == {job: round(ms) for job, ms in alone.items()}


def test_the_idle_team_stands_out(fleet: MadeFleet, owned: pl.DataFrame) -> None:
    rows = divide_device_time(fleet.minutes.lazy(), owned, ["model"]).leaves.filter(
        pl.col("busy_ms") > 0
    )
    idle = rows.sort(pl.col("idle_ms") / pl.col("device_ms"), descending=True)
    assert idle["model"][0] == "vision"
    assert idle["idle_ms"][0] / idle["device_ms"][0] == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize("by", list(permutations(["division", "model", "host"])), ids="-".join)
def test_levels_add_up_in_any_order(
    fleet: MadeFleet, owned: pl.DataFrame, by: tuple[str, ...]
) -> None:
    prices = Prices(currency="EUR", per_kwh=0.3, co2_g_per_kwh=400, device_hour={"default": 2.5})
    result = divide_device_time(compute_usage_hours(fleet.minutes).lazy(), owned, by, prices)
    whole = result.level(0).row(0, named=True)
    for depth in range(1, 4):
        level = result.level(depth)
        assert level.columns[:depth] == list(by[:depth])
        for name in ("device_ms", "busy_ms", "idle_ms", "energy_mj"):
            assert level[name].sum() == whole[name]
        assert level["cost"].sum() == pytest.approx(whole["cost"], rel=1e-12)
    assert (
        sum(whole[name] for name in ("busy_ms", "idle_ms", "unallocated_ms", "unreachable_ms"))
        == whole["device_ms"]
    )


def test_money_energy_and_co2_are_planted_hours_times_prices(
    fleet: MadeFleet, owned: pl.DataFrame
) -> None:
    prices = Prices(
        currency="EUR", per_kwh=0.3, co2_g_per_kwh=400, device_hour={"NVIDIA H100 80GB HBM3": 2.5}
    )
    row = divide_device_time(fleet.minutes.lazy(), owned, ["model"], prices).leaves.filter(
        pl.col("model") == "assistant"
    )
    held, busy = fleet.truth(lambda model: model)
    kwh = (busy["assistant"] * 400 + (held["assistant"] - busy["assistant"]) * 120) / 3.6e9
    assert row["energy_mj"].item() / 3.6e9 == pytest.approx(kwh, rel=1e-4)
    assert row["cost"].item() == pytest.approx(
        held["assistant"] / 3.6e6 * 2.5 + kwh * 0.3, rel=1e-4
    )
    assert row["co2_g"].item() == pytest.approx(kwh * 400, rel=1e-4)


def test_what_has_no_price_or_no_meter_is_unknown(fleet: MadeFleet, owned: pl.DataFrame) -> None:
    unpriced = divide_device_time(
        fleet.minutes.lazy(), owned, ["model"], Prices(currency="EUR", device_hour={"TPU": 1.0})
    )
    assert unpriced.leaves["cost"].null_count() == unpriced.leaves.height
    assert unpriced.leaves["co2_g"].null_count() == unpriced.leaves.height
    unmetered = fleet.minutes.with_columns(energy_mj=pl.lit(None, pl.Int64)).lazy()
    leaves = divide_device_time(
        unmetered,
        owned,
        ["model"],
        Prices(currency="EUR", per_kwh=1.0, device_hour={"default": 1.0}),
    ).leaves
    assert leaves["energy_mj"].null_count() == leaves.height
    assert leaves["cost"].to_list() == pytest.approx((leaves["device_ms"] / 3.6e6).to_list())
    lost = divide_device_time(fleet.minutes.lazy(), owned, ["model"]).leaves.filter(
        pl.col("model") == "unreachable"
    )
    assert lost["energy_mj"].to_list() == [None]


def test_a_rule_that_is_put_right_puts_the_past_right(fleet: MadeFleet) -> None:
    def divisions(*rules: OwnerRule) -> dict[str, int]:
        owned = compute_ownership_periods(fleet.jobs.lazy(), NOBODY, rules)
        return dict(
            divide_device_time(fleet.minutes.lazy(), owned, ["division"])
            .leaves.select("division", "device_ms")
            .rows()
        )

    before = divisions()
    wrong = divisions(OwnerRule(match={"job": "speech-*"}, set={"division": "ads"}))
    right = divisions(OwnerRule(match={"job": "speech-*"}, set={"division": "research"}))
    speech = sum(round(ms) for job, ms in fleet.weeks.held_ms.items() if job.startswith("speech"))
    assert wrong["ads"] - before["ads"] == speech
    assert right["research"] - before["research"] == speech
    assert right["ads"] == before["ads"]
    assert before["unattributed"] - right.get("unattributed", 0) == speech


def test_dated_rules_divide_a_job_at_midnight(fleet: MadeFleet) -> None:
    second = date(2026, 10, 6)
    rules = (OwnerRule(match={"label.team": "vision"}, set={"division": "ads"}, first=second),)
    leaves = divide_device_time(
        fleet.minutes.lazy(),
        compute_ownership_periods(fleet.jobs.lazy(), NOBODY, rules),
        ["model", "division"],
    ).leaves
    vision = dict(leaves.filter(pl.col("model") == "vision").select("division", "device_ms").rows())
    midnight = int(datetime(2026, 10, 6, tzinfo=timezone.utc).timestamp()) * 10**9
    rows = fleet.minutes.filter(pl.col("job").str.starts_with("vision"))
    assert vision == {
        "research": rows.filter(pl.col("time_ns") < midnight)["device_ms"].sum(),
        "ads": rows.filter(pl.col("time_ns") >= midnight)["device_ms"].sum(),
    }


def test_the_curve_of_a_node_adds_up_to_it(fleet: MadeFleet, owned: pl.DataFrame) -> None:
    whole = divide_device_time(fleet.minutes.lazy(), owned, ["model"]).leaves
    curve = divide_device_time(fleet.minutes.lazy(), owned, ["model"], every_ns=6 * HOUR_NS).leaves
    assert curve.filter(pl.col("model") == "assistant")["time_ns"].n_unique() == 8
    summed = curve.group_by("model").agg(pl.col("device_ms", "energy_mj").sum())
    assert dict(summed.select("model", "device_ms").rows()) == dict(
        whole.select("model", "device_ms").rows()
    )


def owners(*rows: dict[str, object]) -> pl.LazyFrame:
    return (
        SCHEMAS["jobs"]
        .complete(
            pl.DataFrame(
                [{"day": date(2026, 10, 5), **row} for row in rows], infer_schema_length=None
            )
        )
        .lazy()
    )


def at(frame: pl.DataFrame, job: str, time: int, name: str) -> str | None:
    row = frame.filter((pl.col("job") == job) & (pl.col("from_ns") <= time)).tail(1)
    return row[name].item() if row.height else None


def test_people_go_before_rules_and_these_before_jobs_and_their_labels() -> None:
    jobs = owners(
        {
            "job": "a",
            "product": "own",
            "labels": '{"product": "label", "division": "label"}',
            "valid_from_ns": 100,
        }
    )
    rules = (
        OwnerRule(match={"job": "a"}, set={"product": "first"}),
        OwnerRule(match={"job": "?"}, set={"product": "second", "user": "second"}),
    )
    people = owners({"job": "a", "product": "people", "valid_from_ns": 200, "valid_to_ns": 300})
    frame = compute_ownership_periods(jobs, people, rules)
    assert [at(frame, "a", time, "product") for time in (0, 199, 200, 299, 300)] == [
        "first",
        "first",
        "people",
        "people",
        "first",
    ]
    assert at(frame, "a", 0, "division") == "label"
    assert at(frame, "a", 0, "user") == "second"
    assert at(compute_ownership_periods(jobs, NOBODY), "a", 0, "product") == "own"
    assert compute_ownership_periods(jobs, NOBODY).height == 1  # what does not change is one period


def test_the_statement_that_begins_last_counts() -> None:
    jobs = owners(
        {"job": "a", "user": "x", "valid_from_ns": 100},
        {"job": "a", "user": "y", "valid_from_ns": 200},
        {"job": "b", "user": "z", "valid_from_ns": 150},
    )
    frame = compute_ownership_periods(jobs, NOBODY)
    assert [at(frame, "a", time, "user") for time in (0, 100, 199, 200, 10**18)] == [
        "x",
        "x",
        "x",
        "y",
        "y",
    ]
    assert [at(frame, "b", time, "user") for time in (0, 10**18)] == ["z", "z"]
    assert at(compute_ownership_periods(NOBODY, jobs), "b", 149, "user") is None


@pytest.mark.parametrize(
    "labels", ["{bad", "[]", '{"team": {"x": 1}}', "", '"text"', '{"team": "vis"}']
)
def test_labels_of_strangers_match_nothing(labels: str) -> None:
    rules = (OwnerRule(match={"label.team": "vision"}, set={"user": "rule"}),)
    assert (
        at(
            compute_ownership_periods(
                owners({"job": "a", "labels": labels, "valid_from_ns": 1}), NOBODY, rules
            ),
            "a",
            5,
            "user",
        )
        is None
    )


@pytest.mark.parametrize(
    ("pattern", "job", "matches"),
    [
        ("a*", "abc", True),
        ("a*", "ba", False),
        ("?", "a", True),
        ("?", "ab", False),
        ("a.c", "abc", False),
        ("*" * 200 + "b", "a" * 5000, False),
        ("[a]", "a", False),
        ("a\n*", "a\nb", True),
        ("(", "(", True),
    ],
)
def test_patterns_are_plain(pattern: str, job: str, matches: bool) -> None:
    frame = compute_ownership_periods(
        owners({"job": job, "valid_from_ns": 1}),
        NOBODY,
        (OwnerRule(match={"job": pattern}, set={"user": "r"}),),
    )
    assert at(frame, job, 5, "user") == ("r" if matches else None)


def test_what_nothing_is_divided_by_is_refused(owned: pl.DataFrame) -> None:
    with pytest.raises(UsageError) as refusal:
        divide_device_time(SCHEMAS["usage_minute"].empty().lazy(), owned, ["divsion"])
    assert refusal.value.slug == "no-such-dimension"
    assert "did you mean `division`" in refusal.value.hint


@pytest.mark.parametrize("name", ATTRIBUTION_DIMENSIONS)
def test_anything_divides_nothing(owned: pl.DataFrame, name: str) -> None:
    assert (
        divide_device_time(SCHEMAS["usage_hour"].empty().lazy(), owned, [name]).leaves.height == 0
    )


def test_documents_are_read(tmp_path: Path) -> None:
    (tmp_path / "owners.toml").write_text(
        '[[rule]]\nmatch = {job = "a-*", "label.team" = "x"}\nset = {division = "ads"}\nfrom = 2026-10-01\nuntil = 2026-11-01\n'
        '[[rule]]\nset = {product = "all"}\n'
    )
    first, second = read_rules(tmp_path / "owners.toml")
    assert first.match == {"job": "a-*", "label.team": "x"}
    assert first.until_ns - first.from_ns == 31 * 24 * HOUR_NS
    assert second.from_ns < 0 < second.until_ns
    (tmp_path / "prices.toml").write_text(
        'currency = "EUR"\nper_kwh = 0.3\n[device_hour]\ndefault = 2\n"H100" = 3.5\n'
    )
    assert read_prices(tmp_path / "prices.toml").device_hour == {"default": 2, "H100": 3.5}


@pytest.mark.parametrize(
    "text",
    [
        "rule = 3",
        "[[rule]]",
        "[[rule]]\nset = {division = 3}",
        "[[rule]]\nset = {colour = 'a'}",
        "not toml",
        "\xff",
        "[[rule]]\nset = {user = 'a'}\nmatch = {shoe = 'x'}",
        "[[rule]]\nset = {user = 'a'}\nmatch = {\"label.a']\" = 'x'}",
        "[[rule]]\nset = {user = 'a'}\nfrom = 2026-02-01\nuntil = 2026-01-01",
        "[[rule]]\nset = {user = 'a'}\nextra = 1",
        "[[rule]]\nset = {user = ''}",
        "a = " + "[" * 5000,
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "owners.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as refusal:
        read_rules(path)
    assert refusal.value.slug == "bad-owners"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "currency = 3",
        "currency = 'EUR'\nper_kwh = -1",
        "currency = 'EUR'\n[device_hour]\nd = nan",
    ],
)
def test_wrong_prices_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(InputError) as refusal:
        read_prices(path)
    assert refusal.value.slug == "bad-prices"


def test_a_document_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        read_rules(tmp_path / "owners.toml")
    assert refusal.value.slug == "unreadable"
