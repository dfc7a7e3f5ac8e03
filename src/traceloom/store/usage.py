"""From what agents saw of devices to whole milliseconds that add up: 60,000 of each device and minute."""

from __future__ import annotations

import polars as pl

from traceloom.store.schemas import MINUTE_MS, SCHEMAS, UNREACHABLE

_OF_DEVICE = ("time_ns", "host", "device")
_MINUTE_NS = MINUTE_MS * 1_000_000
_HOUR_NS = 60 * _MINUTE_NS
_AMOUNTS = ("busy_ms", "energy_mj", "flops_low", "flops_high", "input_bytes")


def minutes(seen: pl.LazyFrame, due: pl.LazyFrame | None = None) -> pl.LazyFrame:
    """Rows of `usage_minute` from what was seen.

    The parts of a device's minute become whole milliseconds; what rounding leaves goes to the largest remainders, in
    the order of state and job where these are equal. What is missing to a minute is `unreachable`. Parts of more than a
    minute, as of an agent that was asked twice or whose clock jumped, are scaled down to one.

    Args:
        seen: Columns of `usage_minute` but `day`; `device_ms` and the amounts may have fractions. Rows of one device,
            minute, job and state are added up. A time inside a minute counts for that minute; parts that are not
            positive or not finite are left out.
        due: `time_ns` (start of a minute), `host`, `device`, `device_model` of devices that are to be heard of: those
            of which nothing was seen in the minute are unreachable for all of it.
    """
    summed = (
        seen.with_columns(pl.col("time_ns") // _MINUTE_NS * _MINUTE_NS, pl.col("device_ms").cast(pl.Float64))
        .filter(pl.col("device_ms").is_finite() & (pl.col("device_ms") > 0))
        .group_by(*_OF_DEVICE, "state", "job")
        .agg(pl.col("device_ms").sum(), *_sums(), pl.col("device_model").drop_nulls().first())
    )
    devices = summed.group_by(_OF_DEVICE).agg(pl.col("device_ms").sum(), pl.col("device_model").drop_nulls().first())
    if due is not None:
        silent = due.select(*_OF_DEVICE, "device_model").unique(_OF_DEVICE).join(devices, on=_OF_DEVICE, how="anti")
        devices = pl.concat([devices, silent.with_columns(device_ms=pl.lit(0.0))], how="diagonal")
    lost = devices.select(
        *_OF_DEVICE, "device_model", device_ms=MINUTE_MS - pl.col("device_ms"), state=pl.lit(UNREACHABLE)
    ).filter(pl.col("device_ms") > 0)
    exact = pl.col("device_ms") * (MINUTE_MS / pl.col("device_ms").sum().over(_OF_DEVICE))
    floor = pl.col("exact").floor()
    left = MINUTE_MS - floor.sum().over(_OF_DEVICE)
    turn = (pl.col("exact") - floor).rank("ordinal", descending=True).over(_OF_DEVICE)
    return (
        pl.concat([summed, lost], how="diagonal")
        .sort(*_OF_DEVICE, "state", "job")
        .with_columns(exact=exact)
        .with_columns(device_ms=floor + (turn <= left))
        .filter(pl.col("device_ms") > 0)
        .pipe(_declared, "usage_minute")
    )


def hours(usage_minute: pl.LazyFrame) -> pl.LazyFrame:
    """Rows of `usage_hour` from those of `usage_minute`; hours that are not whole are added up as far as they go."""
    return (
        usage_minute.with_columns(pl.col("time_ns") // _HOUR_NS * _HOUR_NS)
        .group_by(*_OF_DEVICE, "state", "job")
        .agg(pl.col("device_ms").sum(), *_sums(), pl.col("device_model").drop_nulls().first())
        .sort(*_OF_DEVICE, "state", "job")
        .pipe(_declared, "usage_hour")
    )


def _sums() -> list[pl.Expr]:
    """Amounts added up; null where none is known."""
    return [pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum()).alias(name) for name in _AMOUNTS]


def _declared(frame: pl.LazyFrame, table: str) -> pl.LazyFrame:
    types = SCHEMAS[table].types
    whole = [pl.col(name).round() for name in ("busy_ms", "energy_mj", "input_bytes")]
    day = pl.from_epoch(pl.col("time_ns"), "ns").dt.date()
    return frame.with_columns(*whole, day=day).select(pl.col(name).cast(kind) for name, kind in types.items())
