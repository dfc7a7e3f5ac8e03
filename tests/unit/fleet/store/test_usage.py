"""Device time in whole milliseconds: of each device and minute they add up to 60,000, and nobody gets a ms too many."""

from __future__ import annotations

from collections import defaultdict
from datetime import date

import polars as pl
import pytest
from hypothesis import given, strategies as st

from traceloom.fleet.store.schema import (
    MINUTE_MS,
    SCHEMAS,
    compute_usage_hours,
    compute_usage_minutes,
)
from traceloom.testing.fleet_weeks import Weeks, WeeksRecipe, build_weeks

MINUTE_NS = 60_000_000_000
SEEN = {name: kind for name, kind in SCHEMAS["usage_minute"].types.items() if name != "day"} | {
    "device_ms": pl.Float64,
    "busy_ms": pl.Float64,
    "energy_mj": pl.Float64,
    "input_bytes": pl.Float64,
}


def seen(*rows: tuple[str, str, str | None, float], minute: int = 0) -> pl.DataFrame:
    """Device, state, job, ms of a minute."""
    return pl.DataFrame(
        [
            {
                **dict.fromkeys(SEEN),
                "time_ns": minute * MINUTE_NS,
                "host": "h",
                "device": device,
                "state": state,
                "job": job,
                "device_ms": ms,
            }
            for device, state, job, ms in rows
        ],
        schema=SEEN,
    )


def shares(frame: pl.DataFrame) -> list[tuple[str, str | None, int]]:
    return frame.select("state", "job", "device_ms").rows()


@pytest.fixture(scope="module")
def weeks() -> Weeks:
    return build_weeks(WeeksRecipe(days=1, usage_days=1, captures=1))


def test_every_minute_of_every_device_of_made_days_adds_up(weeks: Weeks) -> None:
    rows = compute_usage_minutes(weeks.observed)
    assert rows.schema == SCHEMAS["usage_minute"].types
    of_minute = rows.group_by("time_ns", "host", "device").agg(pl.col("device_ms").sum())
    assert set(of_minute["device_ms"]) == {MINUTE_MS}
    lost = rows.filter(pl.col("state") == "unreachable")["device_ms"].sum()
    # a host that is out of reach from its first to its last millisecond of a minute is not heard of at all in it
    whole = weeks.lost_ms - lost
    assert whole % (4 * MINUTE_MS) == 0
    assert whole > 0


def test_devices_that_are_due_and_silent_are_out_of_reach(weeks: Weeks) -> None:
    every = weeks.observed.select("host", "device", "device_model").unique()
    times = weeks.observed.select("time_ns").unique()
    rows = compute_usage_minutes(weeks.observed, every.join(times, how="cross"))
    by_state = dict(rows.group_by("state").agg(pl.col("device_ms").sum()).rows())
    assert by_state["unreachable"] == weeks.lost_ms
    assert by_state["unallocated"] == weeks.free_ms
    assert sum(by_state.values()) == every.height * 1440 * MINUTE_MS
    # whole milliseconds of jobs, whose shares had fractions
    of_job = (
        rows.filter(pl.col("job").is_not_null())
        .group_by("job")
        .agg(pl.col("device_ms").sum(), pl.len())
    )
    for job, ms, count in of_job.rows():
        assert ms == pytest.approx(weeks.held_ms[job], abs=0.5 * count)
    assert sum(weeks.held_ms.values()) == pytest.approx(of_job["device_ms"].sum(), abs=1e-3)


def test_hours_add_up_the_minutes(weeks: Weeks) -> None:
    rows = compute_usage_minutes(weeks.observed)
    summed = compute_usage_hours(rows)
    assert summed.schema == SCHEMAS["usage_hour"].types
    for name in ("device_ms", "busy_ms", "energy_mj", "flops_low", "input_bytes"):
        assert summed[name].sum() == pytest.approx(rows[name].sum())
    assert set((summed["time_ns"] % (60 * MINUTE_NS)).to_list()) == {0}


def test_what_rounding_leaves_goes_to_the_largest_remainders() -> None:
    thirds = [
        ("d", "busy", job, MINUTE_MS / 3 + more)
        for job, more in (("a", 0.0), ("b", 0.4), ("c", -0.4))
    ]
    assert shares(compute_usage_minutes(seen(*thirds))) == [
        ("busy", "a", 20_000),
        ("busy", "b", 20_000),
        ("busy", "c", 20_000),
    ]
    parts = [
        ("d", "busy", "a", 10_000.6),
        ("d", "busy", "b", 10_000.7),
        ("d", "idle-allocated", "a", 39_998.7),
    ]
    assert shares(compute_usage_minutes(seen(*parts))) == [
        ("busy", "a", 10_000),
        ("busy", "b", 10_001),
        ("idle-allocated", "a", 39_999),
    ]


@pytest.mark.parametrize(
    "ms", [[0.0], [-5.0], [float("nan")], [float("inf")], [-1e9, float("nan")]]
)
def test_nonsense_of_an_agent_is_no_time(ms: list[float]) -> None:
    rows = [("d", "busy", f"liar{at}", value) for at, value in enumerate(ms)]
    assert shares(compute_usage_minutes(seen(("d", "busy", "a", 30_000.0), *rows))) == [
        ("busy", "a", 30_000),
        ("unreachable", None, 30_000),
    ]


@pytest.mark.parametrize("energy", [float("nan"), float("inf"), -1.0, 1e300])
def test_amounts_that_are_none_are_not_known(energy: float) -> None:
    row = compute_usage_minutes(
        seen(("d", "busy", "a", 60_000.0)).with_columns(energy_mj=pl.lit(energy))
    )
    assert row.select("device_ms", "energy_mj").rows() == [(MINUTE_MS, None)]


def test_a_minute_that_was_sent_twice_is_one_minute() -> None:
    twice = [("d", "busy", "a", 45_000.0), ("d", "idle-allocated", "a", 15_000.0)] * 2
    assert shares(compute_usage_minutes(seen(*twice))) == [
        ("busy", "a", 45_000),
        ("idle-allocated", "a", 15_000),
    ]


def test_unknown_amounts_stay_unknown() -> None:
    rows = seen(("d", "busy", "a", 30_000.0), ("e", "busy", "a", 30_000.0))
    known = rows.with_columns(energy_mj=pl.when(pl.col("device") == "d").then(5.0))
    energy = (
        compute_usage_minutes(known).filter(pl.col("state") == "busy").select("device", "energy_mj")
    )
    assert energy.rows() == [("d", 5), ("e", None)]
    assert compute_usage_hours(compute_usage_minutes(known)).filter(pl.col("device") == "e")[
        "energy_mj"
    ].to_list() == [
        None,
        None,
    ]


def test_a_time_inside_a_minute_counts_for_it() -> None:
    late = seen(("d", "busy", "a", 1.0)).with_columns(time_ns=pl.lit(MINUTE_NS * 7 - 1))
    row = compute_usage_minutes(late)
    assert set(row["time_ns"]) == {6 * MINUTE_NS}
    assert set(row["day"]) == {date(1970, 1, 1)}


part = st.tuples(
    st.sampled_from(["d", "e"]),
    st.sampled_from(["busy", "idle-allocated", "unallocated"]),
    st.sampled_from(["a", "b", "c", None]),
    st.floats(0, 90_000),
)


@given(st.lists(part, max_size=12))
def test_any_parts_add_up_and_are_off_by_less_than_a_millisecond(
    parts: list[tuple[str, str, str | None, float]],
) -> None:
    rows = compute_usage_minutes(seen(*parts))
    exact: dict[tuple[str, str, str | None], float] = defaultdict(float)
    for device, state, job, ms in parts:
        exact[device, state, job] += ms
    for device in {device for device, _, _, ms in parts if ms > 0}:
        of_device = rows.filter(pl.col("device") == device)
        assert of_device["device_ms"].sum() == MINUTE_MS
        whole = sum(ms for (other, _, _), ms in exact.items() if other == device)
        scale = min(1.0, MINUTE_MS / whole)
        for (other, state, job), ms in exact.items():
            if other == device:
                own = of_device.filter(
                    (pl.col("state") == state) & pl.col("job").eq_missing(pl.lit(job))
                )
                assert own["device_ms"].sum() == pytest.approx(ms * scale, abs=1.0 + 1e-6)
