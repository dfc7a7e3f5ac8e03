"""Copies and fills of GPU memory: amounts, directions, bandwidth, and the operators that launch
them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.intervals import merge_intervals
from traceloom.analyze.kernel_rules import select_gpu_work_with_steps
from traceloom.analyze.steps import select_whole_steps, summarize_per_step
from traceloom.trace.batch import (
    TRACE_COLUMN,
    concatenate_by_trace,
    gather_event_column,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import copy_kind

KEYS = ("device", "kind", "source_memory", "target_memory", "by_kernel")
KIND_SCHEMA = build_schema(
    "device kind source_memory target_memory by_kernel pageable count bytes unsized_count",
    "total_ns union_ns instant_count instant_bytes bytes_per_s min_bytes_per_s max_bytes_per_s",
)
OP_SCHEMA = build_schema("op kind pageable count bytes total_ns")
CURVE_SCHEMA = build_schema("device kind time_ns bytes_per_s")


@dataclass(frozen=True)
class Copies(Result):
    """Copies and fills of GPU memory. Definitions: docs/concepts/copies.md.

    Attributes:
        kinds: One row per device, direction and kinds of memory, the longest total first: device,
            kind (HtoD, DtoH, DtoD, PtoP, HtoH, fill, unknown), source_memory and target_memory
            (pageable, pinned, device ...; null where not recorded), by_kernel (done by a kernel, as
            on ROCm 7; its bytes are not recorded), pageable (null where the host's memory is not
            described), count, bytes (of those whose size is recorded; null where none is),
            unsized_count (the others), total_ns (sum), union_ns (time in which at least one such
            copy runs), instant_count and instant_bytes (of duration 0: too short for the clock; in
            no bandwidth), bytes_per_s (bytes of the sized, timed copies over their summed time),
            min_bytes_per_s, max_bytes_per_s (of single ones). Null where nothing is timed and
            sized. 1 GB/s is 10^9 bytes per second.
        ops: The same by the operator that launched it: op (null for none), kind, pageable, count,
            bytes, total_ns.
        per_step: Per device and kind the mean, min and max over whole steps of call_count,
            copied_bytes (null where not all sizes are recorded) and total_ns.
        curve: Bandwidth over time, per device and kind: from time_ns until the next row,
            bytes_per_s flow, the sum over the copies that run. The area below it is the bytes of
            the timed copies.
    """

    kinds: pl.DataFrame
    ops: pl.DataFrame
    per_step: pl.DataFrame
    curve: pl.DataFrame


_HAS_BANDWIDTH = (pl.col("ns") > 0) & pl.col("bytes").is_not_null()
_TOTAL_BYTES = (
    pl.when(pl.col("bytes").is_not_null().any()).then(pl.col("bytes").sum()).alias("bytes")
)


def copies(trace: Trace) -> Copies:
    """Summarizes copies and fills."""
    return _summarize_copies(trace)


@run_in_batches
def _summarize_copies(traces: Sequence[Trace]) -> Iterable[Copies]:
    rows = _collect_copies(traces)
    ops = (
        rows.group_by(
            TRACE_COLUMN,
            gather_event_column(traces, rows, "op", "name").alias("op"),
            "kind",
            "pageable",
        )
        .agg(pl.len().alias("count"), _TOTAL_BYTES, pl.col("ns").sum().alias("total_ns"))
        .sort(
            [TRACE_COLUMN, "total_ns", "op", "kind", "pageable"],
            descending=[False, True] + [False] * 3,
            nulls_last=True,
        )
    )
    keys = [TRACE_COLUMN, "device", "kind"]
    counted = rows.with_columns(
        call_count=pl.lit(1, pl.Int64), copied_bytes=pl.col("bytes").fill_null(0), total_ns="ns"
    )
    steps = concatenate_by_trace(map(select_whole_steps, traces))
    spread = summarize_per_step(counted, keys, ["call_count", "copied_bytes", "total_ns"], steps)
    unsized = rows.filter(pl.col("bytes").is_null())[keys].unique()
    if unsized.height:
        spread = (
            spread.join(
                unsized.with_columns(unsized=True),
                on=keys,
                how="left",
                nulls_equal=True,
                maintain_order="left",
            )
            .with_columns(
                pl.when(pl.col("unsized").is_null())
                .then(f"{statistic}_copied_bytes")
                .alias(f"{statistic}_copied_bytes")
                for statistic in ("mean", "min", "max")
            )
            .drop("unsized")
        )
    unions = [
        merge_intervals(part["start_ns"].to_numpy(), part["end_ns"].to_numpy()).total
        for part in rows.partition_by(TRACE_COLUMN, *KEYS)
    ]
    instant = pl.col("ns") == 0
    rate = (pl.col("bytes") / pl.col("ns") * 1e9).filter(_HAS_BANDWIDTH)
    table = rows.group_by(TRACE_COLUMN, *KEYS, maintain_order=True).agg(
        pl.col("pageable").first(),
        pl.len().alias("count"),
        _TOTAL_BYTES,
        pl.col("bytes").null_count().alias("unsized_count"),
        pl.col("ns").sum().alias("total_ns"),
        instant.sum().alias("instant_count"),
        pl.col("bytes").filter(instant).sum().alias("instant_bytes"),
        (
            pl.col("bytes").filter(_HAS_BANDWIDTH).sum()
            / pl.col("ns").filter(_HAS_BANDWIDTH).sum()
            * 1e9
        )
        .fill_nan(None)
        .alias("bytes_per_s"),
        rate.min().alias("min_bytes_per_s"),
        rate.max().alias("max_bytes_per_s"),
    )
    # Up by the copy's own bandwidth where it begins, down where it ends.
    curves: list[list[pl.DataFrame]] = [[CURVE_SCHEMA.to_frame()] for _ in traces]
    for part in rows.filter(_HAS_BANDWIDTH).partition_by(keys):
        number, device, kind = part[keys].row(0)
        start, end = part["start_ns"].to_numpy(), part["end_ns"].to_numpy()
        rate = part["bytes"].to_numpy() / (end - start) * 1e9
        time, index = np.unique(np.concatenate([start, end]), return_inverse=True)
        running = np.cumsum(
            np.bincount(
                index,
                weights=np.concatenate([np.ones(start.size), -np.ones(end.size)]),
                minlength=time.size,
            )
        )
        flow = np.cumsum(
            np.bincount(index, weights=np.concatenate([rate, -rate]), minlength=time.size)
        )
        # A remainder of a sum of floats while nothing runs is not a flow.
        flow = np.where(running > 0.5, np.maximum(flow, 0.0), 0.0)
        curves[number].append(
            pl.DataFrame(
                {
                    "device": [device] * time.size,
                    "kind": [kind] * time.size,
                    "time_ns": time,
                    "bytes_per_s": flow,
                },
                schema=CURVE_SCHEMA,
            )
        )
    table = table.hstack([pl.Series("union_ns", unions, dtype=pl.Int64)]).sort(
        [TRACE_COLUMN, "total_ns", *KEYS],
        descending=[False, True] + [False] * len(KEYS),
        nulls_last=True,
    )
    kind_tables, op_tables = (
        split_by_trace(table, traces, KIND_SCHEMA),
        split_by_trace(ops, traces, OP_SCHEMA),
    )
    return map(
        Copies, kind_tables, op_tables, split_by_trace(spread, traces), map(pl.concat, curves)
    )


def _collect_copies(traces: Sequence[Trace]) -> pl.DataFrame:
    """Returns one row per copy or fill: trace, the keys, bytes, start_ns, end_ns, op, ns, step,
    pageable.
    """
    work = select_gpu_work_with_steps(traces).filter(pl.col("category") == "memory")
    recorded = concatenate_by_trace(trace.copies for trace in traces).rename({"kind": "direction"})
    kernel_names = work.filter(pl.col("kind") == "kernel")[["name"]].unique()
    name_kinds = pl.DataFrame(
        {
            "name": kernel_names["name"],
            "named": [copy_kind(name) for name in kernel_names["name"].to_list()],
        },
        schema={"name": pl.String, "named": pl.String},
    )
    memory = (pl.col("source_memory"), pl.col("target_memory"))
    host = [pl.col(side).is_in(["host", "memory"]) for side in ("source_memory", "target_memory")]
    kind = pl.coalesce("direction", "named", pl.lit("unknown"))
    return (
        work.join(recorded, on=[TRACE_COLUMN, "event"], how="left", maintain_order="left")
        .join(name_kinds, on="name", how="left", maintain_order="left")
        .select(
            TRACE_COLUMN,
            "event",
            "device",
            kind.alias("kind"),
            *memory,
            (pl.col("kind") == "kernel").alias("by_kernel"),
            pl.when(pl.col("bytes") >= 0).then("bytes").alias("bytes"),
            "start_ns",
            "end_ns",
            "op",
            "ns",
            "step",
            pageable=pl.when(~kind.is_in(["HtoD", "DtoH", "HtoH"]))
            .then(False)
            .when(memory[0].is_null() | memory[1].is_null() | host[0] | host[1])
            .then(None)
            .otherwise((memory[0] == "pageable") | (memory[1] == "pageable")),
        )
    )
