"""What of one rank is needed to compare it with the others: small frames, so that ranks can be read one by one."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.across.ledger import CLASSES, ClassType, Ledger, ledger
from traceloom.analyze.across.load import load_per_step
from traceloom.analyze.across.stage import stage_times
from traceloom.analyze.collective.bandwidth import Link, link_of
from traceloom.analyze.collective.collectives import collectives
from traceloom.analyze.collective.groups import declared_groups
from traceloom.model import Trace


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
    link: Link | None
    stages: pl.DataFrame


def rank_part(trace: Trace) -> RankPart:
    """Take from a trace what a comparison of ranks needs; remembered as long as the trace lives, since it is small."""
    kept = _KEPT.get(id(trace))
    if kept is not None and kept[0]() is trace:
        return kept[1]
    part = _rank_part(trace)
    number = id(trace)
    _KEPT[number] = (weakref.ref(trace, lambda _gone: _KEPT.pop(number, None)), part)
    return part


_KEPT: dict[int, tuple[weakref.ref[Trace], RankPart]] = {}


def _rank_part(trace: Trace) -> RankPart:
    calls = collectives(trace).calls
    used = set(calls["device"].drop_nulls())
    names = [row["name"] for row in trace.devices.to_dicts() if row["device"] in used]
    return RankPart(
        trace.rank,
        trace.meta.host,
        trace.meta.world_size,
        calls,
        declared_groups(trace),
        trace.steps.select("step", "name", "start_ns", "end_ns", "complete"),
        ledger(trace, calls),
        load_per_step(trace, calls),
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
