"""What of one rank is needed to compare it with the others: small frames, so that ranks can be read one by one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.across.ledger import CLASSES, ClassType, Ledger, ledgers
from traceloom.analyze.across.load import load_per_step
from traceloom.analyze.classify import gpu_work
from traceloom.analyze.collective.bandwidth import DeviceLink, link_of
from traceloom.analyze.collective.collectives import collectives
from traceloom.analyze.collective.groups import declared_groups
from traceloom.analyze.intervals import coverage, difference, union
from traceloom.analyze.remembered import of_each
from traceloom.analyze.stacked import stacked, unstacked
from traceloom.model import Trace
from traceloom.model.frames import schema

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
    for trace, calls, account, load in zip(traces, all_calls, ledgers(traces, calls_of_all), loads, strict=True):
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
