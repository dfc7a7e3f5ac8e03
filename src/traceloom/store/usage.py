"""From what agents saw of devices to whole milliseconds that add up: 60,000 of each device and minute."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.array_types import Floats, Ints
from traceloom.store.schemas import MINUTE_MS, SCHEMAS, UNREACHABLE

_OF_DEVICE = ("time_ns", "host", "device")
_MINUTE_NS = MINUTE_MS * 1_000_000
_HOUR_NS = 60 * _MINUTE_NS
_MOST = 1e18  # of an amount: more is none, and no 64 bits hold a sum of many
_TEXTS = ("host", "device", "device_model", "job", "state")
_AMOUNTS = ("busy_ms", "energy_mj", "flops_low", "flops_high", "input_bytes")
# Amounts added up; null where none is known.
_SUMS = [pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name) for name in _AMOUNTS]


def minutes(seen: pl.DataFrame, due: pl.DataFrame | None = None) -> pl.DataFrame:
    """Rows of `usage_minute` from what was seen.

    The parts of a device's minute become whole milliseconds; what rounding leaves goes to the largest remainders, in
    the order of state and job where these are equal. What is missing to a minute is `unreachable`. Parts of more than a
    minute, as of an agent that was asked twice or whose clock jumped, are scaled down to one.

    Args:
        seen: Columns of `usage_minute` but `day`; `device_ms` and the amounts may have fractions. Rows of one device,
            minute, job and state are added up. A time inside a minute counts for that minute; parts that are not
            positive are left out, amounts that are negative or not finite are not known.
        due: `time_ns` (start of a minute), `host`, `device`, `device_model` of devices that are to be heard of: those
            of which nothing was seen in the minute are unreachable for all of it.
    """
    amounts = {name: pl.col(name).cast(pl.Float64) for name in ("device_ms", *_AMOUNTS)}
    parts = seen.select(
        pl.col("time_ns") // _MINUTE_NS * _MINUTE_NS,
        *(pl.col(name).cast(pl.String) for name in _TEXTS),
        *(pl.when(amount.is_between(0.0, _MOST)).then(amount).alias(name) for name, amount in amounts.items()),
    ).filter(pl.col("device_ms") > 0)
    if due is not None:
        silent = due.select(*_OF_DEVICE, "device_model").join(parts, on=_OF_DEVICE, how="anti")
        parts = pl.concat([parts, silent.with_columns(state=pl.lit(UNREACHABLE), device_ms=0.0)], how="diagonal")
    # Texts as numbers in their order are grouped and sorted in a fraction of the time.
    values = {name: parts[name].drop_nulls().unique() for name in _TEXTS}
    values["state"] = pl.concat([values["state"], pl.Series([UNREACHABLE])]).unique()
    orders = pl.Schema({name: pl.Enum(texts.sort()) for name, texts in values.items()})
    summed = (
        parts.cast(orders)
        .group_by(*_OF_DEVICE, "state", "job")
        .agg(pl.col("device_ms").sum(), *_SUMS, pl.col("device_model").drop_nulls().first())
    )
    lost = (
        summed.group_by(_OF_DEVICE)
        .agg(pl.col("device_model").drop_nulls().first(), device_ms=MINUTE_MS - pl.col("device_ms").sum())
        .filter(pl.col("device_ms") > 0)
        .with_columns(state=pl.lit(UNREACHABLE, orders["state"]))
    )
    rows = pl.concat([summed, lost], how="diagonal").sort(*_OF_DEVICE, "state", "job")
    rows = rows.with_columns(device_ms=_whole(rows["device_ms"].to_numpy(), rows.select(_OF_DEVICE)))
    return rows.filter(pl.col("device_ms") > 0).lazy().pipe(_declared, "usage_minute").collect()


def _whole(parts: Floats, of_device: pl.DataFrame) -> Ints:
    """Parts as whole milliseconds of which those of a device and minute, which stand together, add up to 60,000."""
    if not parts.size:
        return np.empty(0, dtype=np.int64)
    group = of_device.select(pl.struct(pl.all()).rle_id()).to_series().to_numpy().astype(np.int64)
    first = np.flatnonzero(np.diff(group, prepend=-1))
    exact = parts * (MINUTE_MS / np.add.reduceat(parts, first))[group]
    floor = np.floor(exact)
    left = MINUTE_MS - np.add.reduceat(floor, first)
    # by remainder in each group, which ends before the next begins; equal remainders stay in their order
    by_remainder = np.argsort(group + (floor - exact), kind="stable")
    turn = np.empty(parts.size, dtype=np.int64)
    turn[by_remainder] = np.arange(parts.size) - first[group]
    return np.asarray(floor + (turn < left[group]), dtype=np.int64)


def hours(usage_minute: pl.DataFrame) -> pl.DataFrame:
    """Rows of `usage_hour` from those of `usage_minute`, or of `usage_hour`; parts of hours are added up to parts."""
    rows = (
        usage_minute.with_columns(pl.col("time_ns") // _HOUR_NS * _HOUR_NS)
        .group_by(*_OF_DEVICE, "state", "job")
        .agg(pl.col("device_ms").sum(), *_SUMS, pl.col("device_model").drop_nulls().first())
        .sort(*_OF_DEVICE, "state", "job")
    )
    return rows.lazy().pipe(_declared, "usage_hour").collect()


def _declared(frame: pl.LazyFrame, table: str) -> pl.LazyFrame:
    types = SCHEMAS[table].types
    whole = [pl.col(name).round() for name in ("busy_ms", "energy_mj", "input_bytes")]
    day = pl.from_epoch(pl.col("time_ns"), "ns").dt.date()
    return frame.with_columns(*whole, day=day).select(pl.col(name).cast(kind) for name, kind in types.items())
