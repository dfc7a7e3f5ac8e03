"""Summary of a rank for comparisons: communication, time breakdown, load per step, and stage
times.
"""

import json
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.bandwidth import DeviceLink, find_device_link
from traceloom.analyze.collectives import add_up_or_null, collectives
from traceloom.analyze.groups import declared_groups
from traceloom.analyze.host_time import find_main_lane
from traceloom.analyze.idle import CAUSES, HOST_CAUSES, GapIntervals, idle, split_by_activity
from traceloom.analyze.intervals import (
    compute_coverage,
    merge_intervals,
    merge_spans,
    subtract_spans,
)
from traceloom.analyze.kernel_rules import select_gpu_work, select_gpu_work_with_steps
from traceloom.analyze.names import Vocabulary, build_vocabulary
from traceloom.analyze.steps import find_step_spans
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import get_event_column
from traceloom.trace.batch import TRACE_COLUMN, concatenate_by_trace, run_in_batches, split_by_trace
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.trace import Trace

COMPUTE = "compute"
COMMUNICATION = "communication"
COPIES = "copies"
TIME_CLASSES = (COMPUTE, COMMUNICATION, COPIES, *CAUSES)
"""The classes of a rank's time: its device's busy time, then its idle time by cause."""

TimeClassType = pl.Enum(TIME_CLASSES)
DETAIL_SCHEMA = build_schema("stretch class name ns", {"class": TimeClassType})
_HOST_CAUSE_NAMES = list(HOST_CAUSES)
_MAX_NAMES_PER_CLASS = 6  # per interval and class: the sums include the rest


@dataclass(frozen=True)
class TimeBreakdown:
    """The account of one rank between its first and its last event.

    Attributes:
        time_ns: Moments, ascending: starts and ends of communication and of steps; shape
            (moments,).
        sums: Nanoseconds of each of `TIME_CLASSES` from the first moment to each; shape (moments,
            classes). The sums of a row add up to the time since the first moment.
        details: stretch (from that moment to the next), class, name (kernel, copy or host
            activity), ns: the largest of each stretch and class. Kernels count where they start.
            Empty without communication, where there is nothing to compare.
        device: The device of the account; None for a rank without GPU work, whose account is that
            of the main thread.
    """

    time_ns: Ints
    sums: Ints
    details: pl.DataFrame
    device: int | None

    def at(self, time_ns: Ints) -> Ints:
        """Returns the index of each time, which must be one of the moments."""
        return np.searchsorted(self.time_ns, time_ns)


def build_time_breakdowns(traces: Sequence[Trace], calls: pl.DataFrame) -> list[TimeBreakdown]:
    """Accounts for the time of each rank.

    Args:
        traces: The traces of the ranks.
        calls: Their communication, `collectives(...).calls` with `trace` (see
            `traceloom.trace.batch`).
    """
    work = select_gpu_work_with_steps(traces)
    # The device that communicates most, else the one that works most; a device whose work takes no
    # time does not count.
    keys = [TRACE_COLUMN, "device"]
    timed_work = work.filter(pl.col("ns") > 0).drop_nulls("device")
    communicating = calls.join(timed_work[keys].unique(), on=keys, how="semi")
    activity = pl.concat(
        [
            communicating.select(*keys, talks=True, ns="duration_ns"),
            timed_work.select(*keys, pl.lit(False).alias("talks"), "ns"),
        ]
    )
    totals = (
        activity.group_by(*keys, "talks")
        .agg(pl.col("ns").sum())
        .sort(TRACE_COLUMN, "talks", "ns", "device", descending=[False, True, True, False])
    )
    devices = dict(reversed(totals[keys].rows()))  # the first of each trace
    device_parts = work.partition_by(keys, as_dict=True)
    breakdowns = []
    for number, (trace, own_calls) in enumerate(
        zip(traces, split_by_trace(calls, traces), strict=True)
    ):
        device = devices.get(number)
        device_work = None if device is None else device_parts[number, device]
        breakdowns.append(_build_time_breakdown(trace, own_calls, device_work))
    named_details = concatenate_by_trace(details for *_, details in breakdowns).filter(
        pl.col("name").is_not_null()
    )
    summed = named_details.group_by(TRACE_COLUMN, "stretch", "class", "name").agg(
        pl.col("ns").sum()
    )
    largest = (
        summed.sort(
            TRACE_COLUMN,
            "stretch",
            "class",
            "ns",
            "name",
            descending=[False, False, False, True, False],
        )
        .group_by(TRACE_COLUMN, "stretch", "class", maintain_order=True)
        .head(_MAX_NAMES_PER_CLASS)
    )
    breakdowns_with_details = zip(
        breakdowns, split_by_trace(largest, traces, DETAIL_SCHEMA), strict=True
    )
    return [
        TimeBreakdown(boundaries, sums, details, devices.get(number))
        for number, ((boundaries, sums, _), details) in enumerate(breakdowns_with_details)
    ]


def _build_time_breakdown(
    trace: Trace, calls: pl.DataFrame, work: pl.DataFrame | None
) -> tuple[Ints, Ints, pl.DataFrame]:
    """Returns the moments and sums of a `TimeBreakdown`, and everything that ran in its intervals:
    stretch, class, name, ns.

    Args:
        trace: The trace.
        calls: Its communication.
        work: The work of the device that the account is about; None for that of the main thread.
    """
    device = None if work is None else work["device"][0]
    own_calls = calls.filter(
        pl.col("where") == "host" if device is None else pl.col("device") == device
    )
    starts = own_calls["start_ns"].to_numpy()
    call_ends = starts + own_calls["duration_ns"].to_numpy()
    edges = np.array([trace.start_ns, trace.end_ns], dtype=np.int64)
    spans = find_step_spans(trace)
    steps = [spans[name].to_numpy() for name in ("start_ns", "end_ns")]
    boundaries = np.unique(np.concatenate([starts, call_ends, edges, *steps]))
    sums = np.zeros((boundaries.size, len(TIME_CLASSES)), dtype=np.int64)
    details = []
    if work is None:  # the main thread's time
        waits = _classify_main_thread_time(trace, boundaries[:-1], boundaries[1:])
    else:
        sums[:, :3], busy_details = _compute_busy_time(work, boundaries)
        details.append(busy_details)
        gaps = idle(trace).gaps.filter(pl.col("device") == device)
        idling = gaps.select(
            "start_ns", "duration_ns", pl.col("cause").cast(pl.String), name="host_activity"
        )
        # Before the first and after the last GPU work: activity of the main thread, cut at the
        # moments.
        first, last = work["start_ns"].to_numpy().min(), work["end_ns"].to_numpy().max()
        before, after = boundaries[:-1] < first, boundaries[1:] > last
        start = np.concatenate([boundaries[:-1][before], np.maximum(boundaries[:-1][after], last)])
        end = np.concatenate([np.minimum(boundaries[1:][before], first), boundaries[1:][after]])
        waits = pl.concat(
            [idling, _classify_main_thread_time(trace, start[end > start], end[end > start])]
        )
    interval = np.searchsorted(boundaries, waits["start_ns"].to_numpy(), side="right") - 1
    if work is None:  # where it waits while another thread communicates, that is communication
        is_communicating = (
            compute_coverage(merge_intervals(starts, call_ends), boundaries[:-1], boundaries[1:])
            > 0
        )
        waiting = (
            waits["cause"].is_in(["host_unobserved", "host_blocking_call", "host_lock"]).to_numpy()
        )
        is_communication = pl.Series(
            is_communicating[np.minimum(interval, max(is_communicating.size - 1, 0))] & waiting
            if is_communicating.size
            else waiting
        )
        waits = waits.with_columns(
            pl.when(is_communication).then(pl.lit(COMMUNICATION)).otherwise("cause").alias("cause")
        )
    cause = waits["cause"].cast(TimeClassType).to_physical().to_numpy()
    wait_sums = np.zeros_like(sums)  # a wait counts from the end of its interval on
    np.add.at(
        wait_sums,
        (np.minimum(interval + 1, boundaries.size - 1), cause),
        waits["duration_ns"].to_numpy(),
    )
    sums += np.cumsum(wait_sums, axis=0)
    in_stretch = pl.Series("stretch", interval, dtype=pl.Int64)
    details.append(
        waits.select(in_stretch, pl.col("cause").alias("class"), "name", ns="duration_ns")
    )
    all_details = pl.concat(details)
    return boundaries, sums, all_details if calls.height else all_details.clear()


def _compute_busy_time(work: pl.DataFrame, boundaries: Ints) -> tuple[Ints, pl.DataFrame]:
    """Returns the sums of the three busy classes of a device at each moment, and its work as
    details.
    """
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    category = work["category"].to_physical().to_numpy()
    compute, communication, memory = (
        merge_intervals(start[category == code], end[category == code]) for code in range(3)
    )
    visible = merge_spans(compute, communication)
    busy = merge_spans(visible, memory)
    low = np.full(boundaries.size, boundaries[0])
    compute_ns, compute_or_communication_ns, busy_ns = (
        compute_coverage(spans, low, boundaries) for spans in (compute, visible, busy)
    )
    details = work.select(
        pl.Series("stretch", np.searchsorted(boundaries, start, side="right") - 1, dtype=pl.Int64),
        pl.Series("class", np.array(TIME_CLASSES[:3])[category]),
        "name",
        "ns",
    )
    return np.stack(
        [
            compute_ns,
            compute_or_communication_ns - compute_ns,
            busy_ns - compute_or_communication_ns,
        ],
        axis=1,
    ), details


def _classify_main_thread_time(trace: Trace, start: Ints, end: Ints) -> pl.DataFrame:
    """Returns start_ns (of the interval), duration_ns, cause, name: the activity of the main thread
    in each interval.
    """
    lane = find_main_lane(trace)
    if lane is None or not start.size:
        columns = {"start_ns": start, "duration_ns": end - start}
        return pl.DataFrame(columns).select(
            pl.all().cast(pl.Int64),
            pl.lit("host_unobserved").alias("cause"),
            pl.lit(None, pl.String).alias("name"),
        )
    stretches = GapIntervals(np.arange(start.size), np.full(start.size, -1), start, end)
    parts = split_by_activity(
        trace, stretches, np.full(start.size, lane), np.zeros(start.size, dtype=np.int64)
    )
    activity = parts["activity"].to_numpy()
    names = trace.events["name"][np.maximum(activity, 0)]
    return parts.select(
        pl.Series("start_ns", start[parts["gap"].to_numpy()], dtype=pl.Int64),
        pl.col("duration_ns").cast(pl.Int64),
        pl.Series("cause", _HOST_CAUSE_NAMES)[parts["cause"].to_numpy()].alias("cause"),
        names.set(pl.Series(activity < 0), None).cast(pl.String).alias("name"),
    )


LOAD_MEASURES = ("compute_ns", "embedding_ns", "exchanged_bytes", "tokens", "memory_bytes")
STEP_LOAD_SCHEMA = build_schema("step", *LOAD_MEASURES)

# Kernels of embedding tables: PyTorch's, FBGEMM's table-batched ones, and TorchRec's by their op.
EMBEDDING_PATTERN = r"(?i)embedding|split_?emb|_tbe_|\btbe\b"
NON_EMBEDDING_PATTERN = r"(?i)rotary|rope|position"


def compute_step_loads(traces: Sequence[Trace], calls: pl.DataFrame) -> pl.DataFrame:
    """Returns the load of each step of each trace; one row with step null for a trace without
    steps.

    Args:
        traces: The traces.
        calls: Their communication, `collectives(...).calls` with `trace` (see
            `traceloom.trace.batch`).

    Returns:
        trace, step, compute_ns (sum of compute kernels launched in the step), embedding_ns (of
        them, those of embedding tables by name or by the op around their launch; null where none
        ran in the whole trace), exchanged_bytes (sent in all-to-alls; null where unknown), tokens
        (indices looked up in the largest table of `aten::embedding`; null where shapes are not
        recorded), memory_bytes (most that was allocated on a device; null where allocations are not
        recorded).
    """
    no_step = pl.DataFrame({"step": [None]}, schema={"step": pl.Int32()})
    out = concatenate_by_trace(
        trace.steps[["step"]] if trace.steps.height else no_step for trace in traces
    )
    unstepped = pl.Series([not trace.steps.height for trace in traces])
    exchanged = calls.filter(pl.col("kind") == "all_to_all").select(
        TRACE_COLUMN, "step", exchanged_bytes="in_bytes"
    )
    allocations = concatenate_by_trace(
        trace.allocations[["device_type", "step", "allocated_bytes"]] for trace in traces
    )
    on_device = allocations.filter(~pl.col("device_type").str.starts_with("cpu"))
    memory = on_device.select(TRACE_COLUMN, "step", memory_bytes="allocated_bytes")
    work = select_gpu_work_with_steps(traces).filter(pl.col("category") == "compute")
    is_embedding = [
        _mark_embedding_work(trace, trace_work)
        for trace, trace_work in zip(traces, split_by_trace(work, traces), strict=True)
    ]
    embedding_ns = pl.when(pl.Series(np.concatenate(is_embedding))).then("ns").otherwise(0)
    compute = work.select(TRACE_COLUMN, "step", compute_ns="ns", embedding_ns=embedding_ns)
    for part in (compute, exchanged, concatenate_by_trace(map(_count_tokens, traces)), memory):
        rows = part
        if unstepped.any():
            rows = part.with_columns(
                pl.when(~unstepped[part[TRACE_COLUMN]]).then("step").alias("step")
            )
        values = [name for name in rows.columns if name not in {TRACE_COLUMN, "step"}]
        # A sum that lacks a value is unknown.
        null_if_incomplete = [add_up_or_null(name) for name in values]
        sums = rows.group_by(TRACE_COLUMN, "step").agg(
            [pl.col("memory_bytes").max()] if part is memory else null_if_incomplete
        )
        out = out.join(
            sums, on=[TRACE_COLUMN, "step"], how="left", nulls_equal=True, maintain_order="left"
        )
    has_embedding = (pl.col("embedding_ns") > 0).any().over(TRACE_COLUMN)
    embedding = pl.when(has_embedding).then(pl.col("embedding_ns").fill_null(0))
    return out.select(
        TRACE_COLUMN,
        "step",
        pl.col("compute_ns").fill_null(0),
        embedding.alias("embedding_ns"),
        *LOAD_MEASURES[2:],
    ).pipe(cast_to_schema, {TRACE_COLUMN: pl.UInt32(), **STEP_LOAD_SCHEMA})


def _match_embedding_names(vocabulary: Vocabulary) -> NDArray[np.bool_]:
    return vocabulary.matching(EMBEDDING_PATTERN) & ~vocabulary.matching(NON_EMBEDDING_PATTERN)


def _mark_embedding_work(trace: Trace, work: pl.DataFrame) -> NDArray[np.bool_]:
    """Returns which pieces of work are of embedding tables, by name or because the op that launched
    them lies inside one.
    """
    vocabulary = build_vocabulary(trace)
    name_matches: NDArray[np.bool_] = _match_embedding_names(vocabulary)[
        vocabulary.code[work["event"].to_numpy()]
    ]
    return name_matches | _mark_work_inside_embedding_ops(trace, work["op"])


def _mark_work_inside_embedding_ops(trace: Trace, op: pl.Series) -> NDArray[np.bool_]:
    """Returns whether the op that launched each piece of work lies inside an op of embedding tables
    (index_select does).
    """
    tree, vocabulary = build_forest(trace), build_vocabulary(trace)
    is_table = _match_embedding_names(vocabulary)
    none = np.zeros(op.len(), dtype=np.bool_)
    if not tree.row.size or not is_table.any():
        return none
    is_op = np.isin(
        get_event_column(trace, "category"),
        [vocab.CATEGORIES.index(category) for category in (vocab.OP, vocab.ANNOTATION)],
    )
    table_ops = (is_table[vocabulary.code] & is_op)[tree.row]
    if not table_ops.any():
        return none
    nearest_ancestor = tree.nearest_or_self(table_ops)
    position = tree.position[op.fill_null(0).to_numpy()]
    is_inside: NDArray[np.bool_] = (
        (position >= 0)
        & op.is_not_null().to_numpy()
        & (nearest_ancestor[np.maximum(position, 0)] >= 0)
    )
    return is_inside


def _count_tokens(trace: Trace) -> pl.DataFrame:
    """Returns step, tokens: how many indices each lookup in the largest table of `aten::embedding`
    takes.
    """
    is_op = get_event_column(trace, "category") == vocab.CATEGORIES.index(vocab.OP)
    lookup_rows = np.flatnonzero(is_op & build_vocabulary(trace).events(r"^aten::embedding$"))
    if not lookup_rows.size:
        return build_schema("step tokens").to_frame()
    ops = trace.events[["event", "step"]][lookup_rows]
    shaped = ops.join(
        trace.tensors[["event", "shapes"]], on="event", how="inner", maintain_order="left"
    )
    sizes_by_shapes: dict[str | None, tuple[int, int]] = {}  # shapes: rows of the table, indices
    for text in shaped["shapes"].unique().to_list():
        try:
            dims = json.loads(text or "[]")
        except ValueError:
            continue
        if (
            not isinstance(dims, list)
            or len(dims) < 2
            or not all(isinstance(dim, list) for dim in dims[:2])
        ):
            continue
        if (
            dims[0]
            and dims[1]
            and all(isinstance(n, int) and 0 <= n < 2**40 for n in (*dims[0], *dims[1]))
        ):
            sizes_by_shapes[text] = dims[0][0], min(math.prod(dims[1]), 2**62)
    rows = [
        (step, *sizes_by_shapes[text])
        for step, text in shaped[["step", "shapes"]].iter_rows()
        if text in sizes_by_shapes
    ]
    lookups = pl.DataFrame(
        rows, {"step": pl.Int32(), "rows": pl.Int64(), "tokens": pl.Int64()}, orient="row"
    )
    return lookups.filter(pl.col("rows") == pl.col("rows").max())[["step", "tokens"]]


_POINT_TO_POINT_KINDS = ("send", "recv", "send_recv")
STAGE_TIMES_SCHEMA = build_schema(
    "step first_ns last_ns compute_ns pair_before_ns pair_inside_ns pair_after_ns other_ns",
    "receives_from sends_to first_receive_ns first_send_ns send_count receive_count",
)


@dataclass(frozen=True)
class RankSummary:
    """The part of one rank that comparisons need; its trace may be dropped.

    Attributes:
        rank: Its rank; None where the file does not state it.
        host: Its host; None where the file does not state it.
        world_size: Ranks of the job, where known.
        calls: Its communication, `collectives(...).calls`.
        groups: The groups that its file lists.
        steps: step, name, start_ns, end_ns, complete.
        ledger: Its time breakdown up to each of its communications.
        load: Its load per step (`compute_step_loads`).
        link: The link between its device and others of its host, by the device's name; None where
            it is not known.
        stages: When it computed, sent and received, per step (`measure_stage_times`).
    """

    rank: int | None
    host: str | None
    world_size: int | None
    calls: pl.DataFrame
    groups: pl.DataFrame
    steps: pl.DataFrame
    ledger: TimeBreakdown
    load: pl.DataFrame
    link: DeviceLink | None
    stages: pl.DataFrame


def summarize_rank(trace: Trace) -> RankSummary:
    """Extracts from a trace what a comparison of ranks needs; cached as long as the trace lives,
    since it is small.
    """
    number = id(trace)
    cached = _summary_cache.get(number)
    if cached is not None and cached[0]() is trace:
        return cached[1]
    summary = _build_rank_summaries(trace)
    _summary_cache[number] = (
        weakref.ref(trace, lambda _gone: _summary_cache.pop(number, None)),
        summary,
    )
    return summary


_summary_cache: dict[int, tuple[weakref.ref[Trace], RankSummary]] = {}


@run_in_batches
def _build_rank_summaries(traces: Sequence[Trace]) -> Iterable[RankSummary]:
    all_calls = [collectives(trace).calls for trace in traces]
    calls_of_all = concatenate_by_trace(all_calls)
    loads = split_by_trace(compute_step_loads(traces, calls_of_all), traces)
    for trace, calls, breakdown, load in zip(
        traces, all_calls, build_time_breakdowns(traces, calls_of_all), loads, strict=True
    ):
        used = set(calls["device"].drop_nulls())
        names = [row["name"] for row in trace.devices.to_dicts() if row["device"] in used]
        yield RankSummary(
            trace.rank,
            trace.meta.host,
            trace.meta.world_size,
            calls,
            declared_groups(trace),
            find_step_spans(trace)[["step", "name", "start_ns", "end_ns", "complete"]],
            breakdown,
            load,
            find_device_link(names[0]) if names else None,
            measure_stage_times(trace, calls),
        )


def compute_step_breakdown(part: RankSummary) -> pl.DataFrame:
    """Returns step, class, ns: the account of each step of a rank; the classes of a step add up to
    its length.
    """
    steps = part.steps.filter(pl.col("end_ns") > pl.col("start_ns"))
    first, last = (part.ledger.at(steps[name].to_numpy()) for name in ("start_ns", "end_ns"))
    class_ns = part.ledger.sums[last] - part.ledger.sums[first]
    number = steps["step"].to_numpy()
    return pl.DataFrame(
        {
            "step": np.repeat(number, len(TIME_CLASSES)),
            "class": pl.Series(list(TIME_CLASSES) * steps.height, dtype=TimeClassType),
            "ns": class_ns.ravel(),
        },
        schema_overrides={"step": pl.Int32()},
    )


def measure_stage_times(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Measures when a rank computed in each step in which it sends or receives (step null for a
    trace without steps).

    Returns:
        step, first_ns and last_ns (first start and last end of compute launched in the step),
        compute_ns (union), pair_before_ns, pair_inside_ns, pair_after_ns (time in sends and
        receives that compute does not hide, before, between and after those), other_ns (other
        communication between them that compute does not hide), receives_from and sends_to (peer of
        the first receive and of the first send; null without one or where unknown),
        first_receive_ns and first_send_ns (their launches, in the order of the program; their
        starts where those are not recorded), send_count, receive_count.
    """
    is_pair = pl.col("kind").is_in(_POINT_TO_POINT_KINDS)
    point_to_point = calls.filter(is_pair)
    if not point_to_point.height:
        return pl.DataFrame(schema=STAGE_TIMES_SCHEMA)
    stepped = trace.steps.height > 0
    work = select_gpu_work(trace).filter(pl.col("category") == "compute")
    all_compute = work[["start_ns", "end_ns"]].with_columns(
        trace.events["step"].gather(work["event"])
    )
    all_communication = calls.with_columns(
        (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"),
        called_ns=pl.coalesce("launch_ns", "start_ns"),
    )
    rows: list[dict[str, int | None]] = []
    for step in point_to_point["step"].unique().sort().to_list() if stepped else [None]:
        in_step = pl.col("step").eq_missing(step) if stepped else pl.lit(value=True)
        compute, communication = all_compute.filter(in_step), all_communication.filter(in_step)
        busy = merge_intervals(compute["start_ns"].to_numpy(), compute["end_ns"].to_numpy())
        if not busy.start.size:
            continue
        step_point_to_point, other_communication = (
            communication.filter(is_pair),
            communication.filter(~is_pair | pl.col("kind").is_null()),
        )
        first, last = int(busy.start[0]), int(busy.end[-1])
        exposed = subtract_spans(
            merge_intervals(
                step_point_to_point["start_ns"].to_numpy(), step_point_to_point["end_ns"].to_numpy()
            ),
            busy,
        )
        other_exposed = subtract_spans(
            subtract_spans(
                merge_intervals(
                    other_communication["start_ns"].to_numpy(),
                    other_communication["end_ns"].to_numpy(),
                ),
                busy,
            ),
            exposed,
        )
        low, high = (
            min(first, *step_point_to_point["start_ns"].to_list()),
            max(last, *step_point_to_point["end_ns"].to_list()),
        )
        before, within, after = compute_coverage(
            exposed, np.array([low, first, last]), np.array([first, last, high])
        ).tolist()
        times = {
            "step": step,
            "first_ns": first,
            "last_ns": last,
            "compute_ns": busy.total,
            "pair_before_ns": before,
            "pair_inside_ns": within,
            "pair_after_ns": after,
            "other_ns": int(
                compute_coverage(other_exposed, np.array([first]), np.array([last]))[0]
            ),
        }
        for kind, word, peer in (
            ("recv", "receive", "receives_from"),
            ("send", "send", "sends_to"),
        ):
            kind_pairs = step_point_to_point.filter(pl.col("kind") == kind).sort("called_ns")
            times[peer] = kind_pairs["peer"][0] if kind_pairs.height else None
            times[f"first_{word}_ns"] = kind_pairs["called_ns"][0] if kind_pairs.height else None
            times[f"{word}_count"] = kind_pairs.height
        rows.append(times)
    return pl.DataFrame(rows, schema=STAGE_TIMES_SCHEMA)
