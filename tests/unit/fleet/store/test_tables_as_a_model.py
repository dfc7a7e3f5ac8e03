"""Tables after many commits, replacements and nights hold what a plain list holds."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import date, datetime, timedelta, timezone
from fractions import Fraction
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("deltalake", reason="the extra `fleet` is not installed")

from traceloom.fleet.store.schema import (
    SCHEMAS,
    UNREACHABLE,
    compute_usage_hours,
    compute_usage_minutes,
)
from traceloom.fleet.store.tables import Tables

TODAY = date(2026, 11, 26)
MINUTE_NS = 60 * 10**9


def start_ns(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=timezone.utc).timestamp()) * 10**9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_captures_come_again_and_days_pass(tmp_path: Path, seed: int) -> None:
    order, tables = random.Random(seed), Tables(str(tmp_path))
    tables.create()
    model: dict[str, list[tuple[str, str, int]]] = {}  # capture -> its rows
    last: tuple[int, dict[str, pl.DataFrame], list[str]] | None = None
    for number in range(1, 13):
        names = sorted({f"c{order.randrange(5)}" for _ in range(2)})
        again = [name for name in names if name in model]
        names = again or [name for name in names if name not in model]
        rows = [
            (name, f"k{at}", number * 100 + at)
            for name in names
            for at in range(order.randrange(3))
        ]
        days = [TODAY - timedelta(days=int(name[1:])) for name, *_ in rows]
        frame = pl.DataFrame(
            rows,
            schema={"capture": pl.String, "kernel": pl.String, "count": pl.Int64},
            orient="row",
        )
        kernels = {"kernels": frame.with_columns(pl.Series("day", days, pl.Date))}
        tables.commit("captures", number, kernels, again)
        if last is not None:
            assert tables.commit("captures", *last) == {}  # an earlier one, whose answer was lost
        last = number, kernels, again
        for name in names:
            model[name] = [row for row in rows if row[0] == name]
        if number in {5, 9}:
            tables.compact(TODAY)
    whole = tables.scan("kernels").select("capture", "kernel", "count").collect().rows()
    assert sorted(whole) == sorted(row for rows_of in model.values() for row in rows_of)
    for name, rows_of in model.items():
        day = TODAY - timedelta(days=int(name[1:]))
        of_day = tables.scan("kernels", day, day).filter(pl.col("capture") == name).collect()
        assert sorted(of_day["count"]) == sorted(count for *_, count in rows_of)


def test_hours_that_came_in_parts_are_one_row_each_after_the_night(tmp_path: Path) -> None:
    """Parts of two hours share a commit, and a late host adds to one that was whole."""
    tables = Tables(str(tmp_path))
    tables.create()
    order = random.Random(7)
    day = TODAY - timedelta(days=1)
    begin = start_ns(day)
    exact: dict[tuple[int, str, str | None], int] = defaultdict(int)
    number = 0

    def commit(first: int, count: int) -> None:
        nonlocal number
        number += 1
        seen = [
            {
                "time_ns": begin + minute * MINUTE_NS,
                "host": "n",
                "device": device,
                "device_model": "m",
                "job": job,
                "state": "busy" if job else "unallocated",
                "device_ms": 60_000.0,
                "busy_ms": None,
                "energy_mj": 3.0,
                "flops_low": 1.0,
                "flops_high": None,
                "input_bytes": None,
            }
            for minute in range(first, first + count)
            for device, job in (("d", order.choice(["a", "b"])), ("e", None))
        ]
        rows = compute_usage_minutes(pl.DataFrame(seen, infer_schema_length=None))
        tables.commit(
            "usage", number, {"usage_minute": rows, "usage_hour": compute_usage_hours(rows)}
        )
        for row in seen:
            exact[int(str(row["time_ns"])) // (60 * MINUTE_NS), str(row["device"]), row["job"]] += (
                60_000  # type: ignore[index]
            )

    for first in range(0, 180, 25):
        commit(first, 25)
    before = tables.scan("usage_hour").collect()
    tables.compact(TODAY)
    for _ in range(2):
        now = tables.scan("usage_hour").collect()
        assert now.height == len(exact) < before.height
        assert {
            (time_ns // (60 * MINUTE_NS), device, job): ms
            for time_ns, device, job, ms in now.select(
                "time_ns", "device", "job", "device_ms"
            ).iter_rows()
        } == exact
        assert now["energy_mj"].sum() == 3 * tables.scan("usage_minute").collect().height
        assert now["flops_high"].null_count() == now.height  # what nobody measured is not 0
        version = tables.version("usage_hour")
        commit(2 * 60 + 40, 5)  # of a host that was away
        before = tables.scan("usage_hour").collect()
        tables.compact(TODAY)
        assert tables.version("usage_hour") > version


@pytest.mark.parametrize("seed", range(6))
def test_minutes_are_what_a_plain_loop_with_fractions_gives(seed: int) -> None:
    order = random.Random(seed)
    parts: dict[tuple[int, str, str], dict[tuple[str, str | None], Fraction]] = defaultdict(
        lambda: defaultdict(Fraction)
    )
    rows = []
    for _ in range(order.randrange(30)):
        minute, host, device = order.randrange(3), order.choice("nm"), order.choice("de")
        state, job = order.choice(
            [("busy", "a"), ("busy", "b"), ("idle-allocated", "a"), ("unallocated", None)]
        )
        ms = order.choice([0.0, 0.5, 1.25, 7_000.0, 20_000.375, 45_000.0])
        rows.append(
            {
                "time_ns": minute * MINUTE_NS,
                "host": host,
                "device": device,
                "state": state,
                "job": job,
                "device_ms": ms,
            }
        )
        if ms:
            parts[minute, host, device][state, job] += Fraction(ms)
    due = [(minute, host, device) for minute in range(3) for host in "nm" for device in "de"]
    expected = {}
    for key in due:
        of_minute = dict(parts.get(key, {}))
        missing = 60_000 - sum(of_minute.values(), Fraction())
        if missing > 0:
            of_minute[UNREACHABLE, None] = missing
        total = sum(of_minute.values())
        scaled = {part: ms * 60_000 / total for part, ms in of_minute.items()}
        whole = {part: int(ms) for part, ms in scaled.items()}
        # Whoever lost most gets what is left; of two that lost the same the first by state, and by job with none first.
        losers = sorted(
            scaled, key=lambda part: (whole[part] - scaled[part], part[0], part[1] or "")
        )
        for part in losers[: 60_000 - sum(whole.values())]:
            whole[part] += 1
        expected |= {(*key, *part): ms for part, ms in whole.items() if ms}
    types = SCHEMAS["usage_minute"].types
    frame = pl.DataFrame(
        [dict.fromkeys(name for name in types if name != "day") | row for row in rows],
        schema={name: kind for name, kind in types.items() if name != "day"}
        | {"device_ms": pl.Float64},
    )
    places = [(minute * MINUTE_NS, host, device, None) for minute, host, device in due]
    schema = {
        "time_ns": pl.Int64,
        "host": pl.String,
        "device": pl.String,
        "device_model": pl.String,
    }
    table = compute_usage_minutes(frame, pl.DataFrame(places, schema=schema, orient="row"))
    assert {
        (time_ns // MINUTE_NS, *rest): ms
        for time_ns, *rest, ms in table.select(
            "time_ns", "host", "device", "state", "job", "device_ms"
        ).iter_rows()
    } == expected
