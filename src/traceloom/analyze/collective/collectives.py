"""Every collective of a trace: what it moved, how fast, over which link, and how much of it held compute up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

from traceloom.analyze.classify import Rule, gpu_work
from traceloom.analyze.collective.bandwidth import with_bandwidth, with_peaks, with_sizes
from traceloom.analyze.collective.calls import PhaseType, WhereType, communication_calls
from traceloom.analyze.collective.exposure import exposure
from traceloom.analyze.collective.grids import with_channels
from traceloom.analyze.collective.kernel_names import with_names
from traceloom.analyze.per_step import per_step, whole_steps
from traceloom.analyze.remembered import per_trace
from traceloom.model import Session, Trace
from traceloom.model.result import Result

CALL_SCHEMA = pl.Schema(
    {
        "rank": pl.Int32(),
        "event": pl.UInt32(),
        "where": WhereType,
        "device": pl.Int32(),
        "stream": pl.Int64(),
        "step": pl.Int32(),
        "phase": PhaseType,
        "start_ns": pl.Int64(),
        "duration_ns": pl.Int64(),
        "kind": pl.String(),
        "backend": pl.String(),
        "name": pl.String(),
        "group": pl.String(),
        "group_size": pl.Int32(),
        "members": pl.List(pl.Int32()),
        "sequence": pl.Int64(),
        "peer": pl.Int32(),
        "element_type": pl.String(),
        "in_bytes": pl.Int64(),
        "out_bytes": pl.Int64(),
        "in_splits": pl.List(pl.Int64()),
        "out_splits": pl.List(pl.Int64()),
        "size_bytes": pl.Int64(),
        "bus_factor": pl.Float64(),
        "algorithm_gb_per_s": pl.Float64(),
        "bus_gb_per_s": pl.Float64(),
        "link": pl.String(),
        "link_peak_gb_per_s": pl.Float64(),
        "link_fraction": pl.Float64(),
        "algorithm": pl.String(),
        "protocol": pl.String(),
        "name_certain": pl.Boolean(),
        "channels": pl.Int32(),
        "exposed_ns": pl.Int64(),
        "blocking_ns": pl.Int64(),
        "launch": pl.UInt32(),
        "launch_ns": pl.Int64(),
    }
)
SUMMARY_KEYS = ("where", "kind", "group", "group_size", "size_bytes")
SUMMARY_SCHEMA = pl.Schema(
    {
        **{key: CALL_SCHEMA[key] for key in SUMMARY_KEYS},
        "count": pl.Int64(),
        "total_ns": pl.Int64(),
        "min_ns": pl.Int64(),
        "median_ns": pl.Int64(),
        "max_ns": pl.Int64(),
        "bus_gb_per_s": pl.Float64(),
        "best_bus_gb_per_s": pl.Float64(),
        "link_fraction": pl.Float64(),
        "exposed_ns": pl.Int64(),
        "blocking_ns": pl.Int64(),
        "mean_total_ns": pl.Float64(),
        "min_total_ns": pl.Int64(),
        "max_total_ns": pl.Int64(),
        "mean_call_count": pl.Float64(),
        "step_count": pl.Int64(),
    }
)

_SUBMITS = ("nccl", "rccl", "hccl", "xccl", "oneccl")  # back ends whose host calls only submit kernels


@dataclass(frozen=True)
class Collectives(Result):
    """The collectives of one trace. Definitions: docs/concepts/collectives.md.

    Attributes:
        calls: One row per communication kernel, and per collective that runs on a host thread, by start. `size_bytes`
            is the message that bandwidth is defined on; `algorithm_gb_per_s` and `bus_gb_per_s` (10^9 bytes/s) are
            over the whole duration, waiting for other ranks included; `link_fraction` is of the link's peak in one
            direction, null where the group may leave the host; `name_certain` says whether the library launches
            kernels of that name for nothing else; `exposed_ns` and `blocking_ns` are null on the host.
        summary: One row per place, kind, group and size, largest total first, with the spread of single calls
            (min_ns, median_ns, max_ns), the median and best bus bandwidth, and per whole step mean_total_ns,
            min_total_ns, max_total_ns, mean_call_count.
    """

    calls: pl.DataFrame
    summary: pl.DataFrame


def collectives(trace: Trace, rules: Iterable[Rule] = (), *, peak_gb_per_s: float | None = None) -> Collectives:
    """Describe every collective of a trace.

    Args:
        trace: One process's trace.
        rules: Kernel rules of the user's, before the built-in table.
        peak_gb_per_s: Peak of the link of one device in one direction, for groups of which it is not known.
    """
    rows = _plain(trace) if peak_gb_per_s is None and not rules else _rows(trace, tuple(rules), peak_gb_per_s)
    return Collectives(rows, _summary(trace, rows))


@per_trace
def _plain(trace: Trace) -> pl.DataFrame:
    return _rows(trace, (), None)


def collectives_of(session: Session) -> pl.DataFrame:
    """The calls of all traces of a session in one frame, with `trace` (its place in `session.traces`) before them."""
    return pl.concat(
        [
            _plain(trace).select(pl.lit(number, pl.Int64).alias("trace"), pl.all())
            for number, trace in enumerate(session.traces)
        ]
    )


def _rows(trace: Trace, rules: tuple[Rule, ...], peak_gb_per_s: float | None) -> pl.DataFrame:
    calls = communication_calls(trace, rules)
    if (calls["where"] == "device").any():  # then host calls that only submit kernels communicate nothing themselves
        calls = calls.filter((pl.col("where") == "device") | ~pl.col("backend").is_in(_SUBMITS))
    if not calls.height:
        return pl.DataFrame(schema=CALL_SCHEMA)
    calls = with_bandwidth(with_sizes(with_channels(with_names(calls), trace)))
    submits = (pl.col("where") == "host") & pl.col("backend").is_in(_SUBMITS)  # its duration is not the transfer's
    rates = ("algorithm_gb_per_s", "bus_gb_per_s")
    calls = calls.with_columns(pl.when(~submits).then(rate).alias(rate) for rate in rates)
    calls = with_peaks(calls, trace, peak_gb_per_s)
    kernels = calls.filter(pl.col("where") == "device")
    hidden = exposure(trace, kernels, gpu_work(trace, rules))
    times = pl.DataFrame(
        {"event": kernels["event"], "exposed_ns": hidden.exposed_ns, "blocking_ns": hidden.blocking_ns}
    )
    return (
        calls.join(times, on="event", how="left", maintain_order="left")
        .with_columns(
            pl.lit(trace.rank, pl.Int32).alias("rank"),
            (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"),
            pl.col("blocking_ns").replace(-1, None),
            trace.events["start_ns"].gather(calls["launch"]).alias("launch_ns"),
        )
        .select(list(CALL_SCHEMA))
        .cast(dict(CALL_SCHEMA))  # type: ignore[arg-type]
        .sort("start_ns", "event")
    )


def _summary(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    keys = list(SUMMARY_KEYS)
    duration = pl.col("duration_ns")
    sums = rows.group_by(keys, maintain_order=True).agg(
        pl.len().alias("count"),
        duration.sum().alias("total_ns"),
        duration.min().alias("min_ns"),
        duration.median().cast(pl.Int64).alias("median_ns"),
        duration.max().alias("max_ns"),
        pl.col("bus_gb_per_s").median(),
        pl.col("bus_gb_per_s").max().alias("best_bus_gb_per_s"),
        pl.col("link_fraction").median(),
        _sum("exposed_ns"),
        _sum("blocking_ns"),
    )
    counted = rows.select(*keys, "step", duration.alias("total_ns"), pl.lit(1, pl.Int64).alias("call_count"))
    spread = per_step(counted, keys, ["total_ns", "call_count"], whole_steps(trace))
    return (
        sums.join(spread, on=keys, how="left", nulls_equal=True, maintain_order="left")
        .select(list(SUMMARY_SCHEMA))
        .cast(dict(SUMMARY_SCHEMA))  # type: ignore[arg-type]
        .sort("total_ns", "kind", "size_bytes", descending=[True, False, False], nulls_last=True)
    )


def _sum(column: str) -> pl.Expr:
    """The sum; null where a value is unknown."""
    return pl.when(pl.col(column).is_not_null().all()).then(pl.col(column).sum()).alias(column)
