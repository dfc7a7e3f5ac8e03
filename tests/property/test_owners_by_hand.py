"""Whose jobs are, and what their device time cost, held against plain loops over every minute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import Any

import polars as pl
import pytest
from hypothesis import given, strategies as st

from traceloom.fleet.analyses.attribution import (
    OTHERS_LABEL,
    build_attribution_tree,
    compute_ownership_periods,
    divide_device_time,
)
from traceloom.fleet.rules import OwnerRule, Prices
from traceloom.fleet.store.schema import SCHEMAS

FIRST = date(2026, 10, 1)
DAY_NS = 86_400 * 10**9
BEGIN_NS = int(datetime(2026, 10, 1, tzinfo=timezone.utc).timestamp()) * 10**9
HALF_DAYS = 8
JOBS, USERS, DIVISIONS = ("llm-a", "llm-b", "vision"), ("ana", "bo"), ("ads", "maps")
HELD, FREE = ("busy", "idle-allocated"), ("unallocated", "unreachable")

instants = st.integers(0, HALF_DAYS).map(lambda half: BEGIN_NS + half * DAY_NS // 2)
some = st.sampled_from


def maybe(values: Sequence[str]) -> st.SearchStrategy[str | None]:
    return st.none() | some(values)


statements = st.lists(
    st.fixed_dictionaries(
        {
            "job": some(JOBS),
            "user": maybe(USERS),
            "division": maybe(DIVISIONS),
            "valid_from_ns": instants,
            "hours": st.none() | st.integers(1, 60),
        }
    ),
    max_size=7,
    unique_by=lambda row: (row["job"], row["valid_from_ns"]),
)
rules_of = st.lists(
    st.builds(
        lambda job, user, division, first, days: OwnerRule(
            set={"division": division},
            match={"job": job} | ({"user": user} if user else {}),
            first=None if first is None else FIRST + timedelta(days=first),
            until=None if first is None or days is None else FIRST + timedelta(days=first + days),
        ),
        some(("*", "llm-*", "?ision", "nobody")),
        maybe(("a*", "bo")),
        some(("by rule", "by another")),
        st.none() | st.integers(0, 3),
        st.none() | st.integers(1, 3),
    ),
    max_size=3,
)
usage_rows = st.lists(
    st.fixed_dictionaries(
        {
            "half": st.integers(0, HALF_DAYS),
            "job": some(JOBS),
            "state": some((*HELD, *FREE)),
            "device": some("xyz"),
            "device_model": maybe(("H100", "MI300")),
            "device_ms": st.integers(1, 60_000),
            "energy_mj": st.none() | st.integers(0, 10**9),
            "flops_low": st.none() | st.integers(0, 10**6),
        }
    ),
    max_size=14,
)


def table(name: str, rows: Sequence[dict[str, Any]]) -> pl.LazyFrame:
    if not rows:
        return SCHEMAS[name].empty().lazy()
    frame = pl.DataFrame([{"day": FIRST, **row} for row in rows], infer_schema_length=None)
    return SCHEMAS[name].complete(frame).lazy()


def said_table(name: str, rows: Sequence[dict[str, Any]]) -> pl.LazyFrame:
    """Statements whose end is hours after their beginning."""
    return table(
        name,
        [
            {
                **{key: value for key, value in row.items() if key != "hours"},
                "valid_to_ns": None
                if row["hours"] is None
                else row["valid_from_ns"] + row["hours"] * 3600 * 10**9,
            }
            for row in rows
        ],
    )


def usage_table(rows: Sequence[dict[str, Any]]) -> pl.LazyFrame:
    return table(
        "usage_minute",
        [
            {
                **{key: value for key, value in row.items() if key != "half"},
                "time_ns": BEGIN_NS + row["half"] * DAY_NS // 2,
                "host": "n",
                "flops_high": row["flops_low"],
                "job": row["job"] if row["state"] in HELD else None,
            }
            for row in rows
        ],
    )


def owner(
    job: str,
    at_ns: int,
    name: str,
    jobs: Sequence[dict[str, Any]],
    people: Sequence[dict[str, Any]],
    rules: Sequence[OwnerRule],
) -> str | None:
    """Who a job belongs to at a time, as docs/concepts/fleet.md says it."""
    valid = [
        row
        for row in people
        if row["job"] == job
        and row["valid_from_ns"] <= at_ns
        and (row["hours"] is None or at_ns < row["valid_from_ns"] + row["hours"] * 3600 * 10**9)
    ]
    if valid:
        by_people: str | None = max(valid, key=lambda row: row["valid_from_ns"])[name]
        if by_people is not None:
            return by_people
    own = sorted((row for row in jobs if row["job"] == job), key=lambda row: row["valid_from_ns"])
    begun = [row for row in own if row["valid_from_ns"] <= at_ns] or own[:1]
    facts = begun[-1] if begun else {}
    day = FIRST + timedelta(days=(at_ns - BEGIN_NS) // DAY_NS)
    for rule in rules:
        is_valid = (rule.first is None or rule.first <= day) and (
            rule.until is None or day < rule.until
        )
        texts = {"job": job, "user": facts.get("user")}
        matches = (
            texts[key] is not None and fnmatchcase(texts[key] or "", like)
            for key, like in rule.match.items()
        )
        if is_valid and name in rule.set and all(matches):
            return rule.set[name]
    return facts.get(name)


@given(jobs=statements, people=statements, rules=rules_of)
def test_a_job_belongs_at_every_time_to_whom_a_plain_loop_says(
    jobs: list[dict[str, Any]], people: list[dict[str, Any]], rules: list[OwnerRule]
) -> None:
    frame = compute_ownership_periods(said_table("jobs", jobs), said_table("owners", people), rules)
    spoken_of = {row["job"] for row in (*jobs, *people)}
    assert set(frame["job"]) == spoken_of
    for job in spoken_of:
        rows = frame.filter(pl.col("job") == job)
        assert rows["from_ns"].is_sorted()
        for quarter in range(4 * HALF_DAYS):
            at_ns = BEGIN_NS + quarter * DAY_NS // 8
            row = rows.filter(pl.col("from_ns") <= at_ns).tail(1).to_dicts()[0]
            for name in ("user", "division"):
                assert row[name] == owner(job, at_ns, name, jobs, people, rules), (
                    job,
                    quarter,
                    name,
                )


def test_what_was_said_for_a_while_hides_nothing_that_holds_on() -> None:
    people = [
        {"job": "a", "division": "ads", "valid_from_ns": BEGIN_NS, "hours": None},
        {"job": "a", "division": "maps", "valid_from_ns": BEGIN_NS + DAY_NS, "hours": 24},
    ]
    frame = compute_ownership_periods(table("jobs", []), said_table("owners", people))
    assert frame.select("from_ns", "division").rows()[1:] == [
        (BEGIN_NS, "ads"),
        (BEGIN_NS + DAY_NS, "maps"),
        (BEGIN_NS + 2 * DAY_NS, "ads"),
    ]


@given(usage=usage_rows, jobs=statements, people=statements)
def test_time_and_energy_of_an_owner_are_the_sum_of_the_rows_that_are_theirs(
    usage: list[dict[str, Any]], jobs: list[dict[str, Any]], people: list[dict[str, Any]]
) -> None:
    owned = compute_ownership_periods(said_table("jobs", jobs), said_table("owners", people))
    result = divide_device_time(usage_table(usage), owned, ["division", "device_model"]).leaves
    sums: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in usage:
        at_ns = BEGIN_NS + row["half"] * DAY_NS // 2
        whose = (
            owner(row["job"], at_ns, "division", jobs, people, ())
            if row["state"] in HELD
            else row["state"]
        )
        total = sums[whose or "unattributed", row["device_model"] or "unattributed"]
        total["device_ms"] += row["device_ms"]
        total[row["state"]] += row["device_ms"]
        for name, of_time in (("energy_mj", "energy_known_ms"), ("flops_low", "flops_known_ms")):
            if row[name] is not None:
                total[name] += row[name]
                total[of_time] += row["device_ms"]
    rows = {(row["division"], row["device_model"]): row for row in result.iter_rows(named=True)}
    assert rows.keys() == sums.keys()
    assert result["device_ms"].is_sorted(descending=True)
    names = {
        "busy_ms": "busy",
        "idle_ms": "idle-allocated",
        "unallocated_ms": "unallocated",
        "unreachable_ms": "unreachable",
        "device_ms": "device_ms",
    }
    for key, total in sums.items():
        assert {name: rows[key][name] for name in names} == {
            name: total[state] for name, state in names.items()
        }
        for name, of_time in (("energy_mj", "energy_known_ms"), ("flops_low", "flops_known_ms")):
            assert rows[key][of_time] == total[of_time]
            assert rows[key][name] == (total[name] if total[of_time] else None)


prices_of = st.builds(
    lambda default, special, per_kwh, co2: Prices(
        currency="EUR",
        per_kwh=per_kwh,
        co2_g_per_kwh=co2,
        device_hour={
            name: price
            for name, price in (("default", default), ("H100", special))
            if price is not None
        },
    ),
    st.none() | st.floats(0, 100),
    st.none() | st.floats(0, 100),
    st.none() | st.floats(0, 10),
    st.none() | st.floats(0, 1000),
)


@given(usage=usage_rows, prices=prices_of, every_half_day=st.booleans())
def test_a_part_costs_its_hours_and_kilowatt_hours_at_their_prices(
    usage: list[dict[str, Any]], prices: Prices, every_half_day: bool
) -> None:
    owned = compute_ownership_periods(table("jobs", []), table("owners", []))
    every_ns = DAY_NS // 2 if every_half_day else None
    rows = divide_device_time(
        usage_table(usage), owned, ["device"], prices, every_ns
    ).leaves.to_dicts()
    sums: dict[tuple[Any, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in usage:
        time_ns = BEGIN_NS + row["half"] * DAY_NS // 2 if every_half_day else None
        total = sums[time_ns, row["device"]]
        hour = prices.device_hour.get(row["device_model"] or "", prices.device_hour.get("default"))
        kwh = (row["energy_mj"] or 0) / 1000 / 3_600_000
        if hour is not None:
            total["cost"] += hour * row["device_ms"] / 3_600_000 + kwh * (prices.per_kwh or 0)
            total["cost_known_ms"] += row["device_ms"]
        if prices.co2_g_per_kwh is not None and row["energy_mj"] is not None:
            total["co2_g"] += kwh * prices.co2_g_per_kwh
            total["co2_known_ms"] += row["device_ms"]
    assert len(rows) == len(sums)
    for leaf in rows:
        total = sums[leaf.get("time_ns"), leaf["device"]]
        for name, of_time in (("cost", "cost_known_ms"), ("co2_g", "co2_known_ms")):
            assert leaf[of_time] == total[of_time]
            assert leaf[name] == (pytest.approx(total[name], abs=1e-9) if total[of_time] else None)


@given(usage=usage_rows, jobs=statements, top=st.integers(1, 3))
def test_each_part_of_a_tree_is_the_sum_of_its_parts_and_the_largest_stand_alone(
    usage: list[dict[str, Any]], jobs: list[dict[str, Any]], top: int
) -> None:
    divided = divide_device_time(
        usage_table(usage),
        compute_ownership_periods(said_table("jobs", jobs), table("owners", [])),
        ["device", "user", "job"],
    )
    rows = build_attribution_tree(divided, top).rows.to_dicts()
    parts = {tuple(row["values"]): row for row in rows}
    assert len(parts) == len(rows)
    assert parts[()]["device_ms"] == sum(row["device_ms"] for row in usage)
    for values, row in parts.items():
        inner = [of for of in parts if of[:-1] == values and len(of) == len(values) + 1]
        if len(values) < 3:
            assert sum(parts[of]["device_ms"] for of in inner) == row["device_ms"]
            alone = [of for of in inner if of[-1] != OTHERS_LABEL]
            assert len(alone) <= top
            times = [parts[of]["device_ms"] for of in alone]
            assert times == sorted(times, reverse=True)  # as they stand: the largest first
            if len(inner) > len(alone) and values[-1:] != (OTHERS_LABEL,):
                assert inner[-1][-1] == OTHERS_LABEL
                assert len(alone) == top
        assert list(parts).index(values) <= min(
            (list(parts).index(of) for of in inner), default=len(parts)
        )
