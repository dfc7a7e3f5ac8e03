"""What of a rank is needed to compare it: calls, ledger, load, stages."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.ancestry import forest
from traceloom.analyze.bandwidth import DeviceLink, link_of
from traceloom.analyze.collectives import collectives, sum_or_null
from traceloom.analyze.groups import declared_groups
from traceloom.analyze.host_time import main_lane
from traceloom.analyze.idle import CAUSES, HOST_CAUSES, GapIntervals, idle, split_by_activity
from traceloom.analyze.intervals import coverage, difference, merge, union
from traceloom.analyze.kernel_rules import gpu_work, stepped_work
from traceloom.analyze.names import Vocabulary, vocabulary
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Ints
from traceloom.trace.arrays import column
from traceloom.trace.batch import TRACE, of_each, stacked, unstacked
from traceloom.trace.frames import cast_to_schema, schema
from traceloom.trace.trace import Trace

COMPUTE = "compute"
COMMUNICATION = "communication"
MEMORY = "copies"
CLASSES = (COMPUTE, COMMUNICATION, MEMORY, *CAUSES)
"""What the time of a rank is split into: its device's busy time, then its idle time by cause."""

ClassType = pl.Enum(CLASSES)
DETAIL_SCHEMA = schema("stretch class name ns", {"class": ClassType})
_HOST_NAMES = list(HOST_CAUSES)
_MOST_NAMES = 6  # per stretch and class: what else ran there is in the sums


@dataclass(frozen=True)
class Ledger:
    """The account of one rank between its first and its last event.

    Attributes:
        time_ns: Moments, ascending: starts and ends of communication and of steps; shape (moments,).
        sums: Nanoseconds of each of `CLASSES` from the first moment to each; shape (moments, classes). The sums of a
            row add up to the time since the first moment.
        details: stretch (from that moment to the next), class, name (kernel, copy or what the host did), ns: the
            largest of each stretch and class. Kernels count where they start. Empty without communication, where
            there is nothing to compare.
        device: The device it is about; None for a rank without GPU work, whose main thread it is then about.
    """

    time_ns: Ints
    sums: Ints
    details: pl.DataFrame
    device: int | None

    def at(self, time_ns: Ints) -> Ints:
        """Place of each time, which must be one of the moments."""
        return np.searchsorted(self.time_ns, time_ns)


def account_ranks(traces: Sequence[Trace], calls: pl.DataFrame) -> list[Ledger]:
    """Account for the time of each rank.

    Args:
        traces: Their traces.
        calls: Their communication, of `collectives(...).calls` (`stacked`).
    """
    work = stepped_work(traces)
    # the device that communicates most, else the one that works most; one whose work takes no time is none
    keys = [TRACE, "device"]
    timed = work.filter(pl.col("ns") > 0).drop_nulls("device")
    talking = calls.join(timed[keys].unique(), on=keys, how="semi")
    of = pl.concat(
        [talking.select(*keys, talks=True, ns="duration_ns"), timed.select(*keys, pl.lit(False).alias("talks"), "ns")]
    )
    most = (
        of.group_by(*keys, "talks")
        .agg(pl.col("ns").sum())
        .sort(TRACE, "talks", "ns", "device", descending=[False, True, True, False])
    )
    devices = dict(reversed(most[keys].rows()))  # the first of each trace
    by_device = work.partition_by(keys, as_dict=True)
    accounts = []
    for number, (trace, own) in enumerate(zip(traces, unstacked(calls, traces), strict=True)):
        device = devices.get(number)
        of_device = None if device is None else by_device[number, device]
        accounts.append(_account(trace, own, of_device))
    named = stacked(details for *_, details in accounts).filter(pl.col("name").is_not_null())
    summed = named.group_by(TRACE, "stretch", "class", "name").agg(pl.col("ns").sum())
    largest = (
        summed.sort(TRACE, "stretch", "class", "ns", "name", descending=[False, False, False, True, False])
        .group_by(TRACE, "stretch", "class", maintain_order=True)
        .head(_MOST_NAMES)
    )
    of_each = zip(accounts, unstacked(largest, traces, DETAIL_SCHEMA), strict=True)
    return [
        Ledger(moments, sums, details, devices.get(number))
        for number, ((moments, sums, _), details) in enumerate(of_each)
    ]


def _account(trace: Trace, calls: pl.DataFrame, work: pl.DataFrame | None) -> tuple[Ints, Ints, pl.DataFrame]:
    """The moments and sums of a `Ledger`, and all that ran in its stretches: stretch, class, name, ns.

    Args:
        trace: The trace.
        calls: Its communication.
        work: The work of the device that the account is about; None for that of the main thread.
    """
    device = None if work is None else work["device"][0]
    own_calls = calls.filter(pl.col("where") == "host" if device is None else pl.col("device") == device)
    starts = own_calls["start_ns"].to_numpy()
    ends = starts + own_calls["duration_ns"].to_numpy()
    edges = np.array([trace.start_ns, trace.end_ns], dtype=np.int64)
    steps = [trace.steps[name].to_numpy() for name in ("start_ns", "end_ns")]
    moments = np.unique(np.concatenate([starts, ends, edges, *steps]))
    sums = np.zeros((moments.size, len(CLASSES)), dtype=np.int64)
    details = []
    if work is None:  # the main thread's time
        waits = _main_thread(trace, moments[:-1], moments[1:])
    else:
        sums[:, :3], ran = _busy(work, moments)
        details.append(ran)
        gaps = idle(trace).gaps.filter(pl.col("device") == device)
        idling = gaps.select("start_ns", "duration_ns", pl.col("cause").cast(pl.String), name="host_activity")
        # before the first and after the last GPU work: what the main thread did, cut at the moments
        first, last = work["start_ns"].to_numpy().min(), work["end_ns"].to_numpy().max()
        before, after = moments[:-1] < first, moments[1:] > last
        start = np.concatenate([moments[:-1][before], np.maximum(moments[:-1][after], last)])
        end = np.concatenate([np.minimum(moments[1:][before], first), moments[1:][after]])
        waits = pl.concat([idling, _main_thread(trace, start[end > start], end[end > start])])
    stretch = np.searchsorted(moments, waits["start_ns"].to_numpy(), side="right") - 1
    if work is None:  # where it waits while another thread communicates, that is communication
        talks = coverage(union(starts, ends), moments[:-1], moments[1:]) > 0
        waiting = waits["cause"].is_in(["host_unobserved", "host_blocking_call", "host_lock"]).to_numpy()
        meant = pl.Series(talks[np.minimum(stretch, max(talks.size - 1, 0))] & waiting if talks.size else waiting)
        waits = waits.with_columns(pl.when(meant).then(pl.lit(COMMUNICATION)).otherwise("cause").alias("cause"))
    cause = waits["cause"].cast(ClassType).to_physical().to_numpy()
    waited = np.zeros_like(sums)  # a wait counts from the end of its stretch on
    np.add.at(waited, (np.minimum(stretch + 1, moments.size - 1), cause), waits["duration_ns"].to_numpy())
    sums += np.cumsum(waited, axis=0)
    in_stretch = pl.Series("stretch", stretch, dtype=pl.Int64)
    details.append(waits.select(in_stretch, pl.col("cause").alias("class"), "name", ns="duration_ns"))
    every = pl.concat(details)
    return moments, sums, every if calls.height else every.clear()


def _busy(work: pl.DataFrame, moments: Ints) -> tuple[Ints, pl.DataFrame]:
    """What a device does: the sums of its three busy classes at each moment, and its work as details."""
    start, end = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    category = work["category"].to_physical().to_numpy()
    compute, communication, memory = (union(start[category == code], end[category == code]) for code in range(3))
    visible = merge(compute, communication)
    busy = merge(visible, memory)
    low = np.full(moments.size, moments[0])
    computed, seen, worked = (coverage(spans, low, moments) for spans in (compute, visible, busy))
    ran = work.select(
        pl.Series("stretch", np.searchsorted(moments, start, side="right") - 1, dtype=pl.Int64),
        pl.Series("class", np.array(CLASSES[:3])[category]),
        "name",
        "ns",
    )
    return np.stack([computed, seen - computed, worked - seen], axis=1), ran


def _main_thread(trace: Trace, start: Ints, end: Ints) -> pl.DataFrame:
    """start_ns (of the stretch), duration_ns, cause, name: what the main thread did in each stretch."""
    lane = main_lane(trace)
    if lane is None or not start.size:
        plain = {"start_ns": start, "duration_ns": end - start}
        return pl.DataFrame(plain).select(
            pl.all().cast(pl.Int64), pl.lit("host_unobserved").alias("cause"), pl.lit(None, pl.String).alias("name")
        )
    number = np.arange(start.size)
    waiting = GapIntervals(number, np.full(start.size, -1), start, end)
    parts = split_by_activity(trace, waiting, np.full(start.size, lane), np.zeros(start.size, dtype=np.int64))
    activity = parts["activity"].to_numpy()
    names = trace.events["name"][np.maximum(activity, 0)]
    return parts.select(
        pl.Series("start_ns", start[parts["gap"].to_numpy()], dtype=pl.Int64),
        pl.col("duration_ns").cast(pl.Int64),
        pl.Series("cause", _HOST_NAMES)[parts["cause"].to_numpy()].alias("cause"),
        names.set(pl.Series(activity < 0), None).cast(pl.String).alias("name"),
    )


MEASURES = ("compute_ns", "embedding_ns", "exchanged_bytes", "tokens", "memory_bytes")
LOAD_SCHEMA = schema("step", *MEASURES)

# Kernels of embedding tables: PyTorch's, FBGEMM's table-batched ones, and TorchRec's by their op.
EMBEDDING = r"(?i)embedding|split_?emb|_tbe_|\btbe\b"
NO_TABLE = r"(?i)rotary|rope|position"


def load_per_step(traces: Sequence[Trace], calls: pl.DataFrame) -> pl.DataFrame:
    """The load of each step of each trace; one row with step null for a trace without steps.

    Args:
        traces: Traces.
        calls: Their communication, of `collectives(...).calls` (`stacked`).

    Returns:
        trace, step, compute_ns (sum of compute kernels launched in the step), embedding_ns (of them, those of embedding
        tables by name or by the op around their launch; null where none ran in the whole trace), exchanged_bytes
        (sent in all-to-alls; null where unknown), tokens (indices looked up in the largest table of
        `aten::embedding`; null where shapes are not recorded), memory_bytes (most that was allocated on a device;
        null where allocations are not recorded).
    """
    none = pl.DataFrame({"step": [None]}, schema={"step": pl.Int32()})
    out = stacked(trace.steps[["step"]] if trace.steps.height else none for trace in traces)
    unstepped = pl.Series([not trace.steps.height for trace in traces])
    exchanged = calls.filter(pl.col("kind") == "all_to_all").select(TRACE, "step", exchanged_bytes="in_bytes")
    allocations = stacked(trace.allocations[["device_type", "step", "allocated_bytes"]] for trace in traces)
    on_device = allocations.filter(~pl.col("device_type").str.starts_with("cpu"))
    memory = on_device.select(TRACE, "step", memory_bytes="allocated_bytes")
    work = stepped_work(traces).filter(pl.col("category") == "compute")
    of_table = [_is_embedding_work(trace, own) for trace, own in zip(traces, unstacked(work, traces), strict=True)]
    of_table_ns = pl.when(pl.Series(np.concatenate(of_table))).then("ns").otherwise(0)
    compute = work.select(TRACE, "step", compute_ns="ns", embedding_ns=of_table_ns)
    for part in (compute, exchanged, stacked(map(_tokens, traces)), memory):
        rows = part
        if unstepped.any():
            rows = part.with_columns(pl.when(~unstepped[part[TRACE]]).then("step").alias("step"))
        values = [name for name in rows.columns if name not in {TRACE, "step"}]
        # a sum that lacks a value is not known
        whole = [sum_or_null(name) for name in values]
        sums = rows.group_by(TRACE, "step").agg([pl.col("memory_bytes").max()] if part is memory else whole)
        out = out.join(sums, on=[TRACE, "step"], how="left", nulls_equal=True, maintain_order="left")
    embeds = (pl.col("embedding_ns") > 0).any().over(TRACE)
    embedding = pl.when(embeds).then(pl.col("embedding_ns").fill_null(0))
    return out.select(
        TRACE, "step", pl.col("compute_ns").fill_null(0), embedding.alias("embedding_ns"), *MEASURES[2:]
    ).pipe(cast_to_schema, {TRACE: pl.UInt32(), **LOAD_SCHEMA})


def _tables(words: Vocabulary) -> NDArray[np.bool_]:
    return words.matching(EMBEDDING) & ~words.matching(NO_TABLE)


def _is_embedding_work(trace: Trace, work: pl.DataFrame) -> NDArray[np.bool_]:
    """Which pieces of work are of embedding tables, by name or because the op that launched them lies inside one."""
    words = vocabulary(trace)
    by_name: NDArray[np.bool_] = _tables(words)[words.code[work["event"].to_numpy()]]
    return by_name | _below_tables(trace, work["op"])


def _below_tables(trace: Trace, op: pl.Series) -> NDArray[np.bool_]:
    """Whether the op that launched each piece of work lies inside an op of embedding tables (index_select does)."""
    tree, words = forest(trace), vocabulary(trace)
    is_table = _tables(words)
    none = np.zeros(op.len(), dtype=np.bool_)
    if not tree.row.size or not is_table.any():
        return none
    is_op = np.isin(
        column(trace, "category"), [cat.CATEGORIES.index(category) for category in (cat.OP, cat.ANNOTATION)]
    )
    table_ops = (is_table[words.code] & is_op)[tree.row]
    if not table_ops.any():
        return none
    above = tree.nearest_or_self(table_ops)
    at = tree.position[op.fill_null(0).to_numpy()]
    below: NDArray[np.bool_] = (at >= 0) & op.is_not_null().to_numpy() & (above[np.maximum(at, 0)] >= 0)
    return below


def _tokens(trace: Trace) -> pl.DataFrame:
    """step, tokens: how many indices each lookup in the largest table of `aten::embedding` takes."""
    is_op = column(trace, "category") == cat.CATEGORIES.index(cat.OP)
    looks_up = np.flatnonzero(is_op & vocabulary(trace).events(r"^aten::embedding$"))
    if not looks_up.size:
        return schema("step tokens").to_frame()
    ops = trace.events[["event", "step"]][looks_up]
    shaped = ops.join(trace.tensors[["event", "shapes"]], on="event", how="inner", maintain_order="left")
    table: dict[str | None, tuple[int, int]] = {}  # shapes: rows of the table, indices
    for text in shaped["shapes"].unique().to_list():
        try:
            dims = json.loads(text or "[]")
        except ValueError:
            continue
        if not isinstance(dims, list) or len(dims) < 2 or not all(isinstance(dim, list) for dim in dims[:2]):
            continue
        if dims[0] and dims[1] and all(isinstance(n, int) and 0 <= n < 2**40 for n in (*dims[0], *dims[1])):
            table[text] = dims[0][0], min(math.prod(dims[1]), 2**62)
    rows = [(step, *table[text]) for step, text in shaped[["step", "shapes"]].iter_rows() if text in table]
    lookups = pl.DataFrame(rows, {"step": pl.Int32(), "rows": pl.Int64(), "tokens": pl.Int64()}, orient="row")
    return lookups.filter(pl.col("rows") == pl.col("rows").max())[["step", "tokens"]]


_PAIRS = ("send", "recv", "send_recv")
STAGE_TIMES_SCHEMA = schema(
    "step first_ns last_ns compute_ns pair_before_ns pair_inside_ns pair_after_ns other_ns",
    "receives_from sends_to first_receive_ns first_send_ns send_count receive_count",
)


@dataclass(frozen=True)
class RankPart:
    """One rank of a job; everything else of its trace may be forgotten.

    Attributes:
        rank: Its rank; None where the file does not say.
        host: Its host; None where the file does not say.
        world_size: Ranks of the job, where known.
        calls: Its communication, of `collectives(...).calls`.
        groups: The groups that its file lists.
        steps: step, name, start_ns, end_ns, complete.
        ledger: What it did up to each of its communications.
        load: What it had to do, per step (`load_per_step`).
        link: What joins its device with others of its host, by the device's name; None where it is not known.
        stages: When it computed, sent and received, per step (`stage_times`).
    """

    rank: int | None
    host: str | None
    world_size: int | None
    calls: pl.DataFrame
    groups: pl.DataFrame
    steps: pl.DataFrame
    ledger: Ledger
    load: pl.DataFrame
    link: DeviceLink | None
    stages: pl.DataFrame


def rank_part(trace: Trace) -> RankPart:
    """Take from a trace what a comparison of ranks needs; remembered as long as the trace lives, since it is small."""
    number = id(trace)
    kept = _KEPT.get(number)
    if kept is not None and kept[0]() is trace:
        return kept[1]
    part = _of_each(trace)
    _KEPT[number] = (weakref.ref(trace, lambda _gone: _KEPT.pop(number, None)), part)
    return part


_KEPT: dict[int, tuple[weakref.ref[Trace], RankPart]] = {}


@of_each
def _of_each(traces: Sequence[Trace]) -> Iterable[RankPart]:
    all_calls = [collectives(trace).calls for trace in traces]
    calls_of_all = stacked(all_calls)
    loads = unstacked(load_per_step(traces, calls_of_all), traces)
    for trace, calls, account, load in zip(traces, all_calls, account_ranks(traces, calls_of_all), loads, strict=True):
        used = set(calls["device"].drop_nulls())
        names = [row["name"] for row in trace.devices.to_dicts() if row["device"] in used]
        yield RankPart(
            trace.rank,
            trace.meta.host,
            trace.meta.world_size,
            calls,
            declared_groups(trace),
            trace.steps[["step", "name", "start_ns", "end_ns", "complete"]],
            account,
            load,
            link_of(names[0]) if names else None,
            stage_times(trace, calls),
        )


def breakdown_per_step(part: RankPart) -> pl.DataFrame:
    """step, class, ns: the account of each step of a rank; the classes of a step add up to its length."""
    steps = part.steps.filter(pl.col("end_ns") > pl.col("start_ns"))
    first, last = (part.ledger.at(steps[name].to_numpy()) for name in ("start_ns", "end_ns"))
    spent = part.ledger.sums[last] - part.ledger.sums[first]
    number = steps["step"].to_numpy()
    return pl.DataFrame(
        {
            "step": np.repeat(number, len(CLASSES)),
            "class": pl.Series(list(CLASSES) * steps.height, dtype=ClassType),
            "ns": spent.ravel(),
        },
        schema_overrides={"step": pl.Int32()},
    )


def stage_times(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """When a rank computed in each step in which it sends or receives (step null for a trace without steps).

    Returns:
        step, first_ns and last_ns (first start and last end of compute launched in the step), compute_ns (union),
        pair_before_ns, pair_inside_ns, pair_after_ns (time in sends and receives that compute does not hide, before,
        between and after those), other_ns (other communication between them that compute does not hide),
        receives_from and sends_to (peer of the first receive and of the first send; null without one or where unknown),
        first_receive_ns and first_send_ns (their launches, in the order of the program; their starts where those are
        not recorded), send_count, receive_count.
    """
    is_pair = pl.col("kind").is_in(_PAIRS)
    of_pairs = calls.filter(is_pair)
    if not of_pairs.height:
        return pl.DataFrame(schema=STAGE_TIMES_SCHEMA)
    stepped = trace.steps.height > 0
    work = gpu_work(trace).filter(pl.col("category") == "compute")
    all_compute = work[["start_ns", "end_ns"]].with_columns(trace.events["step"].gather(work["event"]))
    all_communication = calls.with_columns(
        (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"), called_ns=pl.coalesce("launch_ns", "start_ns")
    )
    rows: list[dict[str, int | None]] = []
    for step in of_pairs["step"].unique().sort().to_list() if stepped else [None]:
        in_step = pl.col("step").eq_missing(step) if stepped else pl.lit(value=True)
        compute, communication = all_compute.filter(in_step), all_communication.filter(in_step)
        busy = union(compute["start_ns"].to_numpy(), compute["end_ns"].to_numpy())
        if not busy.start.size:
            continue
        pairs, others = communication.filter(is_pair), communication.filter(~is_pair | pl.col("kind").is_null())
        first, last = int(busy.start[0]), int(busy.end[-1])
        alone = difference(union(pairs["start_ns"].to_numpy(), pairs["end_ns"].to_numpy()), busy)
        rest = difference(difference(union(others["start_ns"].to_numpy(), others["end_ns"].to_numpy()), busy), alone)
        low, high = min(first, *pairs["start_ns"].to_list()), max(last, *pairs["end_ns"].to_list())
        before, inside, after = coverage(alone, np.array([low, first, last]), np.array([first, last, high])).tolist()
        times = {
            "step": step,
            "first_ns": first,
            "last_ns": last,
            "compute_ns": busy.total,
            "pair_before_ns": before,
            "pair_inside_ns": inside,
            "pair_after_ns": after,
            "other_ns": int(coverage(rest, np.array([first]), np.array([last]))[0]),
        }
        for kind, word, peer in (("recv", "receive", "receives_from"), ("send", "send", "sends_to")):
            of_kind = pairs.filter(pl.col("kind") == kind).sort("called_ns")
            times[peer] = of_kind["peer"][0] if of_kind.height else None
            times[f"first_{word}_ns"] = of_kind["called_ns"][0] if of_kind.height else None
            times[f"{word}_count"] = of_kind.height
        rows.append(times)
    return pl.DataFrame(rows, schema=STAGE_TIMES_SCHEMA)
