"""Whose the time of the devices was: hours, energy, cost and CO2, by any dimensions nested in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from traceloom.errors import UsageError, nearest
from traceloom.fleet.documents import Prices
from traceloom.model.result import Result
from traceloom.store.schemas import ALLOCATED, BUSY, DIMENSIONS, UNALLOCATED, UNREACHABLE

UNATTRIBUTED = "unattributed"
"""The value of a dimension that nobody says."""

OF_JOBS = ("job", "scheduler", *DIMENSIONS)
OF_DEVICES = ("host", "device_model", "device")
BY = (*OF_JOBS, *OF_DEVICES)
"""What time can be divided by."""

_STATES = {"busy_ms": BUSY, "idle_ms": ALLOCATED, "unallocated_ms": UNALLOCATED, "unreachable_ms": UNREACHABLE}
_WHOLE = ("device_ms", *_STATES)
_MEASURED = {
    "energy_mj": "energy_known_ms",
    "flops_low": "flops_known_ms",
    "flops_high": "flops_known_ms",
    "input_bytes": "input_known_ms",
}
_PRICED = {"cost": "cost_known_ms", "co2_g": "co2_known_ms"}
_AMOUNTS = _MEASURED | _PRICED
"""Amount -> the device time of which it is known."""


@dataclass(frozen=True)
class Attribution(Result):
    """Device time and what it cost, divided.

    Attributes:
        by: The dimensions, outermost first.
        currency: Of the cost; None without prices.
        leaves: One row per combination of values of `by` (and per stretch of time, `time_ns`, where that is asked for):
            device_ms, which is busy_ms + idle_ms (a job held the device, and it did nothing) + unallocated_ms +
            unreachable_ms; then energy_mj, flops_low, flops_high, input_bytes, cost and co2_g, each null where it is
            known of no device time, and the device time of which it is known: energy_known_ms, flops_known_ms,
            input_known_ms, cost_known_ms, co2_known_ms. Energy that is not measured costs nothing beside its device
            hour. Time that no job held has the name of its state as the value of all dimensions of jobs; what nobody
            says of a job is `unattributed`. Largest time first.
    """

    by: tuple[str, ...]
    currency: str | None
    leaves: pl.DataFrame

    def level(self, depth: int) -> pl.DataFrame:
        """The same by the first dimensions only: 0 is everything in one row. All levels add up to the same."""
        times = [name for name in ("time_ns",) if name in self.leaves.columns]
        return _summed(self.leaves.lazy(), [*times, *self.by[:depth]]).collect()


def attribution(
    usage: pl.LazyFrame,
    owned: pl.DataFrame,
    by: Sequence[str],
    prices: Prices | None = None,
    every_ns: int | None = None,
) -> Attribution:
    """Divide the device time of the rows.

    Args:
        usage: Rows of `usage_minute` or `usage_hour`.
        owned: Whose each job is, of `owners.periods`. A row counts for whom its job belongs to at its beginning.
        by: Dimensions, outermost first, of `BY`.
        prices: What hours and energy cost.
        every_ns: Length of the stretches of time to tell apart; None: all in one.

    Raises:
        UsageError: `no-such-dimension`.
    """
    for name in by:
        if name not in BY:
            hint = nearest(name, BY) + f"there are {', '.join(BY)}"
            raise UsageError(f"device time is not divided by `{name}`", slug="no-such-dimension", hint=hint)
    by = tuple(dict.fromkeys(by))
    times, stretches = ([], []) if every_ns is None else (["time_ns"], ["stretch_ns"])
    devices = [name for name in by if name in OF_DEVICES]
    if prices is not None and prices.of_models and "device_model" not in devices:
        devices.append("device_model")
    measured = [
        pl.when(pl.col(amount).is_not_null()).then("device_ms").otherwise(0).alias(of_time)
        for of_time, amount in {of_time: amount for amount, of_time in _MEASURED.items()}.items()
    ]
    rows = usage.with_columns(measured)
    if every_ns is not None:
        rows = rows.with_columns(stretch_ns=pl.col("time_ns") // every_ns * every_ns)
    held = _with_owners(rows, owned, ["state", *devices, *stretches], [name for name in by if name in OF_JOBS])
    nobody = pl.when(pl.col("state").is_in((UNALLOCATED, UNREACHABLE))).then("state")
    values = [
        (nobody.otherwise(name) if name in OF_JOBS else pl.col(name)).fill_null(UNATTRIBUTED).alias(name) for name in by
    ]
    states = [
        pl.when(pl.col("state") == state).then("device_ms").otherwise(0).alias(name) for name, state in _STATES.items()
    ]
    priced = held.with_columns(*states, *_priced(prices)).with_columns(values)
    if every_ns is not None:
        priced = priced.with_columns(time_ns="stretch_ns")
    leaves = _summed(priced, [*times, *by]).collect()
    return Attribution(by, None if prices is None else prices.currency, leaves)


def _with_owners(rows: pl.LazyFrame, owned: pl.DataFrame, keys: Sequence[str], of_jobs: Sequence[str]) -> pl.LazyFrame:
    """Usage added up by job and keys, with what these people say of the job at the time.

    Jobs that belong to the same people all the time, nearly all, need no times: a month of them is added up at once.
    """
    sums = tuple(dict.fromkeys(("device_ms", *_MEASURED, *_MEASURED.values())))
    facts_of = [name for name in of_jobs if name != "job"]
    facts = owned.lazy().select("job", "from_ns", *facts_of)
    columns = ("job", *keys, *facts_of, *sums)
    changing = owned.group_by("job").len().filter(pl.col("len") > 1)["job"]
    if not changing.len():
        return rows.group_by("job", *keys).agg(pl.col(sums).sum()).join(facts, on="job", how="left").select(columns)
    moves = pl.col("job").is_in(changing.implode())
    fixed = rows.filter(~moves.fill_null(False)).group_by("job", *keys).agg(pl.col(sums).sum())
    once = fixed.join(facts.filter(~moves), on="job", how="left")
    moved = rows.filter(moves).group_by("job", *keys, "time_ns").agg(pl.col(sums).sum()).sort("time_ns")
    dated = moved.join_asof(
        facts.sort("from_ns"), left_on="time_ns", right_on="from_ns", by="job", check_sortedness=False
    )
    return pl.concat([frame.select(columns) for frame in (once, dated)])


def _priced(prices: Prices | None) -> list[pl.Expr]:
    """Cost and CO2 of each row, and the device time of which they are known."""
    if prices is None:
        nothing = [pl.lit(None, pl.Float64).alias(name) for name in _PRICED]
        return [*nothing, *(pl.lit(0, pl.Int64).alias(name) for name in _PRICED.values())]
    default = prices.device_hour.get("default")
    hour = pl.lit(default, pl.Float64)
    if prices.of_models:
        hour = pl.col("device_model").replace_strict(prices.of_models, default=default, return_dtype=pl.Float64)
    kwh = pl.col("energy_mj") / 3.6e9
    priced = {
        "cost": hour * pl.col("device_ms") / 3.6e6 + kwh.fill_null(0.0) * (prices.per_kwh or 0.0),
        "co2_g": kwh * pl.lit(prices.co2_g_per_kwh, pl.Float64),
    }
    has_price = {"cost": hour.is_not_null(), "co2_g": pl.lit(prices.co2_g_per_kwh is not None)}
    of_time = {"cost": "device_ms", "co2_g": "energy_known_ms"}
    return [
        *(amount.alias(name) for name, amount in priced.items()),
        *(pl.when(has_price[name]).then(of_time[name]).otherwise(0).alias(_PRICED[name]) for name in _PRICED),
    ]


def _summed(frame: pl.LazyFrame, keys: Sequence[str]) -> pl.LazyFrame:
    sums = [pl.col(name).sum() for name in dict.fromkeys((*_WHOLE, *_AMOUNTS, *_AMOUNTS.values()))]
    grouped = frame.group_by(keys).agg(sums) if keys else frame.select(sums)
    return grouped.with_columns(
        pl.when(pl.col(of_time) > 0).then(amount).alias(amount) for amount, of_time in _AMOUNTS.items()
    ).sort("device_ms", *keys, descending=[True, *(False for _ in keys)])
