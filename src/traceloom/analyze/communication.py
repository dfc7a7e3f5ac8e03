"""Which collectives ran, over which groups, how long, and how much of it was not hidden behind compute?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.classify import Rule, gpu_work
from traceloom.analyze.collective.calls import WhereType, communication_calls
from traceloom.analyze.intervals import Spans, coverage, union
from traceloom.model import Trace
from traceloom.model.result import Result

KEYS = ("kind", "group", "group_description", "group_size", "element_type", "where")
COLLECTIVE_SCHEMA = pl.Schema(
    {
        "kind": pl.String(),
        "group": pl.String(),
        "group_description": pl.String(),
        "group_size": pl.Int32(),
        "element_type": pl.String(),
        "where": WhereType,
        "count": pl.Int64(),
        "bytes": pl.Int64(),
        "total_ns": pl.Int64(),
        "mean_ns": pl.Int64(),
        "min_ns": pl.Int64(),
        "max_ns": pl.Int64(),
        "exposed_ns": pl.Int64(),
    }
)
DEVICE_SCHEMA = pl.Schema(
    {
        "device": pl.Int32(),
        "count": pl.Int64(),
        "total_ns": pl.Int64(),
        "union_ns": pl.Int64(),
        "exposed_ns": pl.Int64(),
    }
)


@dataclass(frozen=True)
class Communication(Result):
    """Communication of one trace. What the numbers mean, and that none of them is bandwidth: see
    docs/concepts/communication.md.

    Attributes:
        collectives: One row per kind, group, element type and place, largest total first: kind (all_reduce, ...;
            null where neither arguments nor name tell), group, group_description, group_size, element_type (null
            where the file does not say), where (device: kernels; host: calls that run on the host), count, bytes (sum
            of message sizes; null where one of them is unknown), total_ns (sum of durations), mean_ns (rounded down),
            min_ns, max_ns, exposed_ns (device time in which such a kernel runs and no compute does, summed over
            devices; null on the host).
        devices: device, count (kernels), total_ns (sum), union_ns and exposed_ns (`communication_ns` and
            `exposed_communication_ns` of gpu_time).
    """

    collectives: pl.DataFrame
    devices: pl.DataFrame


def communication(trace: Trace, rules: Iterable[Rule] = ()) -> Communication:
    """Add up communication kernels, and collectives that run on the host, by what they did."""
    rules = tuple(rules)
    work = gpu_work(trace, rules)
    calls = communication_calls(trace, rules)
    if not calls.height:
        return Communication(pl.DataFrame(schema=COLLECTIVE_SCHEMA), pl.DataFrame(schema=DEVICE_SCHEMA))
    kernels, calls = (calls.filter(pl.col("where") == where) for where in ("device", "host"))
    on_host = _grouped(trace, calls, "host")
    on_device = _grouped(trace, kernels, "device")
    computing = work.filter(pl.col("category") == "compute")
    compute = {device: _union(part) for (device,), part in computing.group_by("device")}
    exposed = _exposed(kernels, compute)
    if exposed.height:
        on_device = on_device.drop("exposed_ns").join(
            exposed, on=list(_ROW_KEYS), how="left", nulls_equal=True, maintain_order="left"
        )
    table = pl.concat([_finished(on_device), _finished(on_host)])
    return Communication(
        table.sort("total_ns", *KEYS, descending=[True] + [False] * len(KEYS), nulls_last=True),
        _devices(kernels, compute),
    )


_ROW_KEYS = ("kind", "group", "group_size", "element_type")


def _union(part: pl.DataFrame) -> Spans:
    return union(part["start_ns"].to_numpy(), part["end_ns"].to_numpy())


def _grouped(trace: Trace, calls: pl.DataFrame, where: str) -> pl.DataFrame:
    duration = pl.col("end_ns") - pl.col("start_ns")
    size = pl.col("bytes")
    described = trace.groups.select("group", pl.col("description").alias("group_description"))
    return (
        calls.group_by(_ROW_KEYS)
        .agg(
            pl.len().alias("count"),
            pl.when(size.is_not_null().all()).then(size.sum()).alias("bytes"),
            duration.sum().alias("total_ns"),
            (duration.sum() // pl.len()).alias("mean_ns"),
            duration.min().alias("min_ns"),
            duration.max().alias("max_ns"),
        )
        .join(described.unique("group", keep="first"), on="group", how="left")
        .with_columns(pl.lit(where).alias("where"), pl.lit(None, pl.Int64).alias("exposed_ns"))
    )


def _exposed(kernels: pl.DataFrame, compute: dict[object, Spans]) -> pl.DataFrame:
    """Per row of the table: time in which such a kernel runs and no compute does, over all devices."""
    rows = []
    for (*keys, device), part in kernels.group_by(*_ROW_KEYS, "device"):
        rows.append((*keys, _uncovered(_union(part), compute.get(device))))
    schema = {**{key: COLLECTIVE_SCHEMA[key] for key in _ROW_KEYS}, "exposed_ns": pl.Int64()}
    return pl.DataFrame(rows, schema=schema, orient="row").group_by(_ROW_KEYS).agg(pl.col("exposed_ns").sum())


def _uncovered(spans: Spans, cover: Spans | None) -> int:
    return spans.total - (int(coverage(cover, *spans).sum()) if cover is not None else 0)


def _finished(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select(list(COLLECTIVE_SCHEMA)).cast(COLLECTIVE_SCHEMA)


def _devices(kernels: pl.DataFrame, compute: dict[object, Spans]) -> pl.DataFrame:
    rows = []
    for (device,), part in kernels.group_by("device"):
        spans = _union(part)
        total = int((part["end_ns"] - part["start_ns"]).sum())
        rows.append((device, part.height, total, spans.total, _uncovered(spans, compute.get(device))))
    return pl.DataFrame(rows, schema=DEVICE_SCHEMA, orient="row").sort("device")
