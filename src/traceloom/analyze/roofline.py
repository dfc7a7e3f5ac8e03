"""Roofline of a run: FLOPs and bytes of the modelled work against the peaks of its devices, with
MFU and HFU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.graph_launches import select_rank_trace
from traceloom.analyze.kernel_rules import select_gpu_work_with_steps
from traceloom.analyze.placed_calls import (
    BoundType,
    Peak,
    PlacedCalls,
    parse_peak,
    place_on_roofline,
)
from traceloom.analyze.utilisation import compute_utilisation
from traceloom.trace import vocabulary as vocab
from traceloom.trace.arrays import get_event_column
from traceloom.trace.batch import (
    TRACE_COLUMN,
    cache_last_result,
    concatenate_by_trace,
    divide_by_trace_total,
    gather_event_column,
    run_in_batches,
    split_by_trace,
)
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

PeakSpec = Peak | str | Mapping[str, float] | None
MODELLED = build_schema(
    "event op flops bytes roofline_ns bound", {"op": pl.UInt32, "bound": BoundType}
)
OPERATORS = build_schema(
    "name shapes types count total_ns fraction flops bytes intensity flop_rate byte_rate",
    "arithmetic evidence matrix peak_flop_rate peak_byte_rate roofline_ns roofline_fraction bound",
    {"bound": BoundType},
)
UNMODELLED = build_schema("name reason count total_ns fraction")
DEVICES = build_schema("device name peak reason")
SPREAD = build_schema("quantity mean min max step_count")
QUANTITIES = (
    "duration_ns",
    "flops",
    "bytes",
    "model_flops",
    "modelled_fraction",
    "roofline_fraction",
    "mfu",
    "hfu",
)
"""The quantities of `spread`: per step, over the whole steps."""


@dataclass(frozen=True)
class Roofline(Result):
    """FLOPs and bytes of the modelled work against the peaks of the devices. All frames begin with
    `rank`.

    Attributes:
        operators: One row per modelled operator, shapes and types, the longest first. `count`
            calls; `total_ns` is the sum of the GPU work of the calls, `fraction` its share of all
            GPU work. In a trace without a device (`timed_on` is `host`) it is the host time of the
            calls; null where `timed_on` is `nothing`, because the device's work is not recorded.
            `intensity` is FLOPs per byte; `flop_rate` and `byte_rate` are the achieved rates.
            `arithmetic` is the element type whose peak was used, `evidence` how that is known:
            `recorded type`, `kernel name` (tf32 against fp32), `assumed` (fp32 where the kernel's
            name does not show it). `roofline_ns` is the time at the peaks, `roofline_fraction` its
            share of `total_ns` (above 1: the data came from a cache), `bound` what limits it; the
            four are null where the peaks are unknown.
        steps: One row per step: `duration_ns`; `gpu_ns` (sum of the GPU work that runs in it),
            `modelled_ns` and its fraction; `flops` and `bytes` of all modelled work that it
            launched, `hardware_flops` of its matrix work, `model_flops` the same without what
            repeats the forward pass; `roofline_ns` of the work on the roofline that runs in it,
            `rest_ns` the time in which only other GPU work runs, `roofline_fraction` their sum over
            the step, `placed_fraction` the share of GPU work on the roofline; `mfu` and `hfu`: time
            that model and hardware FLOPs need at their peaks, over the step. `reason` states why a
            value is null.
        whole: The same once per trace, over the time from the first to the last GPU work.
        spread: Per step: mean, min and max over the whole steps of each quantity (see
            `QUANTITIES`).
        unmodelled: GPU work without a model by operator (without one, by kernel), with the reason
            and its share; in a trace without GPU work operators by their own host time; the longest
            first.
        devices: The devices with GPU work and the peaks used, or why there are none.
        timed_on: `gpu`, `host`, or `nothing`.
    """

    operators: pl.DataFrame
    steps: pl.DataFrame
    whole: pl.DataFrame
    spread: pl.DataFrame
    unmodelled: pl.DataFrame
    devices: pl.DataFrame
    timed_on: str

    @property
    def flops(self) -> int:
        """FLOPs of all modelled work."""
        return int(self.whole["flops"].sum())


def roofline(
    run: Trace | Session, peak: PeakSpec = None, capture: Session | Trace | None = None
) -> Roofline:
    """Compares the modelled work of a trace, or of all ranks of a session, with the peaks of its
    devices.

    Args:
        run: A checked trace or a session.
        peak: Peaks to use instead of those of the devices' names: a device's name (`H100 SXM`),
            numbers (`bf16=989e12,memory=3.35e12`, or such a mapping), or a `Peak`.
        capture: The recording of the capture of its CUDA or HIP graphs, or of the same model
            without graphs (of a session the trace of the same rank, else the first): it provides
            the operators of the replays, and their inputs.

    Raises:
        UsageError: slugs `no-such-device`, `bad-peak`.
    """
    user_peak = None if peak is None else parse_peak(peak)
    traces = run.traces if isinstance(run, Session) else (run,)
    return merge_ranks(
        [_compute_roofline(trace, user_peak, select_rank_trace(capture, trace)) for trace in traces]
    )


def merge_ranks(parts: Sequence[Roofline]) -> Roofline:
    """Merges the results of several ranks, rank after rank."""
    frames = {
        field.name: pl.concat([getattr(part, field.name) for part in parts])
        for field in fields(Roofline)
        if field.name != "timed_on"
    }
    sources = {part.timed_on for part in parts}
    return Roofline(
        **frames,
        timed_on=next(source for source in ("gpu", "host", "nothing") if source in sources),
    )


@run_in_batches
def _compute_roofline(
    traces: Sequence[Trace], peak: Peak | None, capture: Trace | None
) -> list[Roofline]:
    placements = [place_on_roofline(trace, peak, capture) for trace in traces]
    utilised = compute_utilisation(traces, placements)
    # Over the whole steps in which the quantity is known; no row where none is.
    step_rows = concatenate_by_trace(steps for steps, _ in utilised).filter("complete")
    quantities = split_by_trace(
        step_rows.select(TRACE_COLUMN, pl.col(QUANTITIES).cast(pl.Float64)), traces
    )
    # GPU work that no modelled call owns, with the first reason that holds.
    all_work = select_gpu_work_with_steps(traces).with_columns(
        link=pl.Series(np.concatenate([placed.modelled.link for placed in placements])),
        owner=pl.Series(np.concatenate([placed.modelled.work_owner for placed in placements])),
    )
    columns = [TRACE_COLUMN, "event", "name", "category", "op", "launch", "ns", "link", "owner"]
    all_work = pl.concat(
        [
            all_work.with_columns(pl.col("category", "name").cast(pl.String)).select(columns),
            concatenate_by_trace(map(_list_own_times, traces, placements)).select(columns),
        ],
        how="vertical_relaxed",
    )
    unowned = all_work.filter(pl.col("owner") < 0)
    op_reasons = []
    for trace, placement, trace_rows in zip(
        traces, placements, split_by_trace(unowned, traces), strict=True
    ):
        ops = trace_rows["op"].drop_nulls().unique()
        group = placement.modelled.group[build_forest(trace).position[ops.to_numpy()]]
        reasons = placement.modelled.groups["reason"].to_list()
        op_reasons.append(
            pl.DataFrame(
                {
                    "op": ops,
                    "op_name": trace.events["name"][ops],
                    "failed": pl.Series(
                        [reasons[row] if row >= 0 else None for row in group.tolist()],
                        dtype=pl.String,
                    ),
                    "recorded": np.isin(ops.to_numpy(), trace.tensors["event"].to_numpy()),
                }
            )
        )
    replays = concatenate_by_trace(placed.modelled.unmapped for placed in placements).select(
        TRACE_COLUMN, "event", replay="reason"
    )
    work = (
        unowned.with_columns(gather_event_column(traces, unowned, "launch", "name").alias("call"))
        .join(
            concatenate_by_trace(op_reasons),
            on=[TRACE_COLUMN, "op"],
            how="left",
            maintain_order="left",
        )
        .join(replays, on=[TRACE_COLUMN, "event"], how="left")
    )
    in_graph = pl.col("op").is_null() & pl.col("call").str.contains("GraphLaunch", literal=True)
    conditions = (
        (pl.col("category") == "communication", "communication, which has its own analysis"),
        (pl.col("link"), "a copy between host and device: the link bounds it"),
        (pl.col("launch").is_null(), "its launch is not in the recording"),
        (
            in_graph & pl.col("replay").is_null(),
            "launched by a graph, whose operators are not recorded",
        ),
        (pl.col("op").is_null(), "launched outside every recorded operator"),
        (~pl.col("recorded"), "the shapes of the operator's inputs are not recorded"),
    )
    reason = pl.coalesce(
        pl.when(in_graph).then("replay"),
        *(pl.when(condition).then(pl.lit(gap_reason)) for condition, gap_reason in conditions),
        "failed",
        pl.lit("no model for this operator"),
    )
    whole = all_work.group_by(TRACE_COLUMN).agg(whole=pl.col("ns").sum())
    unmodelled = (
        work.group_by(
            TRACE_COLUMN, pl.coalesce("op_name", "name").alias("name"), reason.alias("reason")
        )
        .agg(pl.len().alias("count"), pl.col("ns").sum().alias("total_ns"))
        .join(whole, on=TRACE_COLUMN)
        .with_columns(fraction=divide_by_trace_total(pl.col("total_ns"), pl.col("whole").clip(1)))
        .sort(TRACE_COLUMN, "total_ns", "name", "reason", descending=[False, True, False, False])
    )
    out = []
    for trace, placement, (steps, trace_share), values, operators, unmodelled_work in zip(
        traces,
        placements,
        utilised,
        quantities,
        split_by_trace(_summarize_operators(placements, whole), traces, OPERATORS),
        split_by_trace(unmodelled, traces, UNMODELLED),
        strict=True,
    ):
        spread = [(v.name, v.mean(), v.min(), v.max(), v.count()) for v in values if v.count()]
        names = dict(trace.devices[["device", "name"]].rows())
        devices = [
            (
                device,
                names.get(device),
                *((peak.name, None) if isinstance(peak, Peak) else (None, peak)),
            )
            for device, peak in sorted(placement.devices.items())
        ]
        tables = {
            "operators": operators,
            "steps": steps,
            "whole": trace_share,
            "spread": pl.DataFrame(spread, schema=SPREAD, orient="row"),
            "unmodelled": unmodelled_work,
            "devices": pl.DataFrame(devices, schema=DEVICES, orient="row"),
        }
        rank = pl.Series("rank", [trace.rank], dtype=pl.Int32)
        for frame in tables.values():
            frame.insert_column(0, rank.new_from_index(0, frame.height))
        timed_on = (
            "gpu"
            if placement.modelled.link.size
            else "host"
            if placement.calls["time_ns"].count()
            else "nothing"
        )
        out.append(Roofline(**tables, timed_on=timed_on))
    return out


def _list_own_times(trace: Trace, placed: PlacedCalls) -> pl.DataFrame:
    """Returns the operators of a trace without GPU work with their own times, in the form of GPU
    work; nothing for others.
    """
    tree = build_forest(trace)
    is_op = get_event_column(trace, "category")[tree.row] == vocab.CATEGORIES.index(vocab.OP)
    own_ns = tree.self_ns(is_op, tree.nearest(is_op))
    listed = np.flatnonzero(is_op & (own_ns > 0) & (placed.modelled.link.size == 0))
    event = pl.Series(tree.row[listed], dtype=pl.UInt32)
    return pl.DataFrame(
        {
            "event": event,
            "name": trace.events["name"][event].cast(pl.String),
            "op": event,
            "launch": event,
            "ns": own_ns[listed],
            "owner": placed.modelled.owner[listed],
        }
    ).with_columns(category=pl.lit(vocab.OP), link=pl.lit(False))


def _summarize_operators(placements: Sequence[PlacedCalls], whole: pl.DataFrame) -> pl.DataFrame:
    keys = [
        TRACE_COLUMN,
        "name",
        "shapes",
        "types",
        "arithmetic",
        "evidence",
        "matrix",
        "rate",
        "memory_rate",
    ]
    groups = concatenate_by_trace(
        placed.modelled.groups[["group", "name", "shapes", "types"]] for placed in placements
    )
    named_calls = concatenate_by_trace(placed.calls for placed in placements).join(
        groups, on=[TRACE_COLUMN, "group"], how="left"
    )
    sums = named_calls.group_by(keys, maintain_order=True).agg(
        pl.len().alias("count"),
        pl.when(pl.col("time_ns").is_not_null().any())
        .then(pl.col("time_ns").sum())
        .alias("total_ns"),
        pl.col("flops", "bytes").sum(),
        pl.col("compute_ns", "memory_ns").sum(),
        roofline=pl.col("roofline_ns").sum(),
        known=pl.col("roofline_ns").is_not_null().all(),
    )
    time, has_time = pl.col("total_ns"), pl.col("total_ns") > 0
    compute_bound = pl.col("compute_ns") > pl.col("memory_ns")
    return (
        sums.join(whole, on=TRACE_COLUMN, how="left", maintain_order="left")
        .with_columns(
            fraction=divide_by_trace_total(time, pl.col("whole").clip(lower_bound=1)),
            intensity=pl.when(pl.col("bytes") > 0).then(pl.col("flops") / pl.col("bytes")),
            flop_rate=pl.when(has_time).then(pl.col("flops") / time * 1e9),
            byte_rate=pl.when(has_time).then(pl.col("bytes") / time * 1e9),
            peak_flop_rate="rate",
            peak_byte_rate="memory_rate",
            roofline_ns=pl.when("known").then(pl.col("roofline").round().cast(pl.Int64)),
            roofline_fraction=pl.when(pl.col("known") & has_time).then(pl.col("roofline") / time),
            bound=pl.when("known").then(
                pl.when(compute_bound).then(pl.lit("compute")).otherwise(pl.lit("memory"))
            ),
        )
        .sort(
            TRACE_COLUMN,
            "total_ns",
            "flops",
            "name",
            "shapes",
            descending=[False, True, True, False, False],
            nulls_last=True,
        )
    )


def select_modelled_work(
    trace: Trace, peak: PeakSpec = None, capture: Trace | None = None
) -> pl.DataFrame:
    """Returns the GPU work that a model of its operator covers, with its share of the operator's
    FLOPs and bytes.

    The FLOPs, bytes and roofline time of an operator that launches several kernels are divided
    among them by their durations; the shares add up to the operator's exactly.

    Args:
        trace: A checked trace.
        peak: Peaks to use instead of those of the device's name: a device's name,
            `bf16=989e12,memory=3.35e12`, a mapping of such numbers, or a `Peak`.
        capture: As for `roofline`.

    Returns:
        Columns event (the GPU work), op (event of the outermost modelled operator around its
        launch; of work that the capture explains, the graph launch), flops, bytes, roofline_ns
        (null where the peaks are unknown), bound (compute or memory; null likewise). No row for
        work without a model, nor for copies between host and device, which the link bounds.
    """
    return _split_over_kernels(
        trace, place_on_roofline(trace, None if peak is None else parse_peak(peak), capture)
    )


@cache_last_result
def _split_over_kernels(trace: Trace, placement: PlacedCalls) -> pl.DataFrame:
    """Returns the shares of the work of each call; another peak, capture or model places the calls
    anew.
    """
    work = placement.work
    position = work["position"].to_numpy()
    order = np.argsort(position, kind="stable")  # the work of a call together, each call's in order
    position, ns = position[order], work["ns"].to_numpy()[order]
    opens = np.flatnonzero(np.append(True, position[1:] != position[:-1])[: position.size])
    # First work of its call
    call_start = np.repeat(opens, np.diff(np.append(opens, position.size)))
    sums = np.cumsum(ns) - ns
    rows = pl.DataFrame(
        {
            "event": work["event"][order],
            "op": build_forest(trace).row[placement.modelled.above[position]],
            "position": position,
            "until_ns": sums + ns - sums[call_start],
            "nth": np.arange(1, position.size + 1) - call_start,
            "opens": call_start == np.arange(call_start.size),
        }
    ).join(
        placement.calls[
            ["position", "flops", "bytes", "roofline_ns", "bound", "gpu_ns", "kernels"]
        ],
        on="position",
        how="left",
        maintain_order="left",
    )
    # The part of its call that is done after each piece of work: by time, by count where no time is
    # recorded.
    has_time = pl.col("gpu_ns") > 0
    part = (
        pl.when(has_time)
        .then(pl.col("until_ns") / pl.col("gpu_ns"))
        .otherwise(pl.col("nth") / pl.col("kernels"))
    )
    shares = pl.col("flops", "bytes", "roofline_ns")
    total, running = (
        shares.round(0).cast(pl.Int64),
        (shares * pl.col("done")).round(0).cast(pl.Int64),
    )
    until = pl.when(pl.col("done") >= 1.0).then(total).otherwise(running)
    # Differences of the rounded running share, so that the sum is exact.
    rows = rows.with_columns(done=part).with_columns(
        until - pl.when("opens").then(0).otherwise(until.shift(1))
    )
    shared = rows.pipe(cast_to_schema, MODELLED)
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return shared[back]
