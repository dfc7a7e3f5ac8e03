"""What must not matter to any analysis: when the program ran, how fast the clock goes, what devices are called."""

from __future__ import annotations

import polars as pl
import pytest

from support.analyses import ALL, PROPORTIONAL, parts_of
from support.odd_traces import odd_trace

MOMENTS = {"start_ns", "time_ns", "first_ns", "last_ns", "peak_time_ns"}
"""Columns that tell when something was, not how long it took."""

RATES = {"copies": ("bytes_per_s", "min_bytes_per_s", "max_bytes_per_s")}


def moved(frame: pl.DataFrame, ns: int) -> pl.DataFrame:
    """The frame of a program that ran so much earlier."""
    if (
        "bus_factor" in frame.columns
    ):  # of collectives: when each was launched; of threads: how long they launch
        frame = frame.with_columns(pl.col("launch_ns") - ns)
    return frame.with_columns(
        pl.col(name) - ns
        for name in frame.columns
        if name in MOMENTS and frame[name].dtype == pl.Int64
    )


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (0, 6))]
)
@pytest.mark.parametrize("name", ALL)
def test_a_program_that_ran_later_has_the_same_results_later(name: str, seed: int) -> None:
    shift_us = 3.0e9  # about an hour
    one, other = (parts_of(ALL[name](odd_trace(seed, shift_us=shift))) for shift in (0.0, shift_us))
    assert one.keys() == other.keys()
    for part, value in one.items():
        if isinstance(value, pl.DataFrame):
            assert value.equals(moved(other[part], int(shift_us * 1000))), part
        else:
            assert value == other[part], part


def scaled(frame: pl.DataFrame, factor: int, rates: tuple[str, ...]) -> pl.DataFrame:
    """The frame of a program that took so many times as long."""
    times = [name for name in frame.columns if name.endswith("_ns") or name == "ns"]
    longer = frame.with_columns((pl.col(name) * factor).cast(frame.schema[name]) for name in times)
    return longer.with_columns(pl.col(name) / factor for name in rates if name in frame.columns)


def check_close(one: pl.DataFrame, other: pl.DataFrame, *, rounding: int) -> None:
    """Equal but for means and medians that were rounded, by at most `rounding`."""
    assert one.schema == other.schema
    assert one.height == other.height
    for name, kind in one.schema.items():
        if kind.is_numeric() and (
            kind.is_float() or any(word in name for word in ("mean", "median", "excess"))
        ):
            pairs = zip(one[name].to_list(), other[name].to_list(), strict=True)
            assert all(
                a == b
                or (
                    a is not None
                    and b is not None
                    and a == pytest.approx(b, rel=1e-9, abs=rounding)
                )
                for a, b in pairs
            ), name
        else:
            assert one[name].equals(other[name], null_equal=True), name


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", PROPORTIONAL)
def test_a_clock_that_goes_three_times_as_fast_makes_every_time_three_times_as_long(
    name: str, seed: int
) -> None:
    one, other = (parts_of(PROPORTIONAL[name](odd_trace(seed, scale=scale))) for scale in (1, 3))
    for part, value in one.items():
        if part == "curve":  # drawn over equal parts of the window, whose bounds are rounded
            continue
        if isinstance(value, pl.DataFrame):
            check_close(scaled(value, 3, RATES.get(name, ())), other[part], rounding=4)
        elif part.endswith("_ns") and value is not None:
            assert other[part] == pytest.approx(3 * value, abs=2), part
        elif not isinstance(value, float):
            assert other[part] == value, part


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "name",
    [
        "gpu_time",
        "kernel_kinds",
        "copies",
        "communication",
        "idle",
        "launches",
        "kernels",
        "operators",
        "modules",
    ],
)
def test_devices_exchanged_exchange_their_rows_and_nothing_else(name: str, seed: int) -> None:
    one, other = (
        parts_of(ALL[name](odd_trace(seed, exchanged=exchanged))) for exchanged in (False, True)
    )
    for part, value in one.items():
        if not isinstance(value, pl.DataFrame):
            assert value == other[part], part
            continue
        rows = other[part]
        if "device" in rows.columns:
            rows = rows.with_columns(device=1 - pl.col("device"))
        drop = (
            {"gap", "name", "before", "after", "launch", "work", "host_event"}
            if "device" in rows.columns
            else set()
        )
        kept = [column for column in rows.columns if column not in drop]
        assert (
            value.select(kept)
            .sort(kept, nulls_last=True)
            .equals(rows.select(kept).sort(kept, nulls_last=True))
        ), part
