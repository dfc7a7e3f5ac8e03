"""Both sides laid on one tree: how often each place was reached, and what it cost on the host and on the devices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.analyze.attribution import launched_work
from traceloom.analyze.classify import gpu_work
from traceloom.analyze.compare.samples import KIND_OF, ComparedSteps, DeviceTime, device_time, samples
from traceloom.analyze.compare.tree import Trees, Words, trees, work_names
from traceloom.analyze.compare.union import Union
from traceloom.model import Session
from traceloom.model.category import GPU_WORK
from traceloom.model.frames import as_declared, schema

Ints = NDArray[np.int64]

KERNELS = schema("place name nth kind count ns sum_ns", {"place": pl.Int64, "name": pl.Int64})
STEPS = schema("rank step duration_ns")


@dataclass(slots=True)
class Side:
    """One side of a comparison, summed over its compared steps.

    Attributes:
        steps: `rank`, `step` (null without steps), `duration_ns` of every compared step of every trace.
        device_steps: Number of pairs of a device and a step; 0 without GPU work.
        device_ns: Time of all devices in all compared steps.
        kernels: GPU work by place, name, and how many of that name come before it at the place in its step: `count`
            (launched in the steps), `ns` (time in the steps that counts to it, whenever it was launched), `sum_ns`
            (durations of what was launched in the steps, whenever it ran). Place -1: launched by no operator of a step.
        waiting: `cause`, `ns`: idle time of the devices.
        count: How often each place was reached.
        host_ns: Time of the steps' own threads at each place itself, not below it.
        outside_ns: Time of the steps' own threads outside all operators.
    """

    steps: pl.DataFrame
    device_steps: int = 0
    device_ns: int = 0
    kernels: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=KERNELS))
    waiting: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema={"cause": pl.String, "ns": pl.Int64}))
    count: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    host_ns: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    outside_ns: int = 0


def side(session: Session, number: int, union: Union, words: Words, *, is_sequence: bool = False) -> Side:
    """Lay the steps of a run on the union.

    Args:
        session: The run.
        number: 0 for base, 1 for new.
        union: Gets the places that it does not have.
        words: Gets the names and shapes that it does not have.
        is_sequence: Whether only the operators themselves are compared, as of a run and its replay; see `trees`.
    """
    steps, kernels, waiting = [], [], []
    reached: list[Ints] = []
    spent: list[tuple[Ints, Ints]] = []
    out = Side(pl.DataFrame(schema=STEPS))
    for of in (samples(trace) for trace in session.traces if trace.events.height):
        call_trees = trees(of, words, is_sequence=is_sequence)
        # the place of each host event that is an operator of a step; -1 of the others
        event_places = np.full(call_trees.node.size, -1, dtype=np.int64)
        for sample, tree in enumerate(call_trees.trees):
            of_step = np.flatnonzero((call_trees.node >= 0) & (call_trees.sample == sample))
            event_places[of_step] = np.array(union.add(tree, number), dtype=np.int64)[call_trees.node[of_step]]
        rank = pl.lit(of.trace.rank, dtype=pl.Int32).alias("rank")
        steps.append(pl.DataFrame({"step": of.step, "duration_ns": of.durations}).select(rank, "step", "duration_ns"))
        at = np.flatnonzero(call_trees.node >= 0)
        reached.append(event_places[at])
        main = np.flatnonzero(call_trees.main)
        spent.append((event_places[main], call_trees.self_ns[main]))
        out.outside_ns += int(of.durations.sum()) - int(call_trees.self_ns[main].sum())
        devices = device_time(of)
        if devices.devices:
            out.device_steps += devices.devices * of.spans.start.size
            out.device_ns += devices.devices * int(of.durations.sum())
            kernels.append(_work(of, devices, call_trees, event_places, words))
            waiting.append(devices.waiting)
    size = len(union.parent)
    out.steps = pl.concat(steps).cast(STEPS) if steps else out.steps
    out.count = np.bincount(np.concatenate([*reached, np.zeros(0, dtype=np.int64)]), minlength=size)
    out.host_ns = np.zeros(size, dtype=np.int64)
    for places, ns in spent:
        np.add.at(out.host_ns, places, ns)
    if kernels:
        keys = ["place", "name", "nth", "kind"]
        sums = pl.concat(kernels).group_by(keys).agg(pl.col("count", "ns", "sum_ns").sum())
        out.kernels = sums.pipe(as_declared, KERNELS)
        out.waiting = pl.concat(waiting).group_by("cause").agg(pl.col("ns").sum()).sort("cause")
    return out


def _work(of: ComparedSteps, devices: DeviceTime, call_trees: Trees, event_places: Ints, words: Words) -> pl.DataFrame:
    """GPU work that was launched in the steps, or counts to them, by place."""
    trace = of.trace
    origin = launched_work(trace).origin
    owner = np.append(call_trees.above, -1)[origin]
    work = trace.events.filter(pl.col("category").is_in(GPU_WORK)).select("event", "start_ns", "duration_ns")
    start = work["start_ns"].to_numpy()
    began = np.searchsorted(of.spans.start, start, side="right") - 1
    began = np.where((began >= 0) & (start < np.append(of.spans.end, 0)[began]), began, -1)
    # Work belongs to the step that launched it; what no operator of a step launched, to that in which it began.
    owning_step = np.where(owner >= 0, np.append(call_trees.sample, -1)[owner], began)
    spent = devices.work.group_by("event").agg(pl.col("ns").sum())
    kind = gpu_work(trace).select("event", pl.col("category").cast(pl.String).replace(KIND_OF).alias("kind"))
    rows = work.with_columns(
        pl.Series("place", np.append(event_places, -1)[owner]),
        pl.Series("name", work_names(trace, words)),
        pl.Series("asked", owning_step),
        pl.Series("count", (owning_step >= 0).astype(np.int64)),
        pl.col("duration_ns").clip(lower_bound=0),
    ).join(kind, on="event", how="left", maintain_order="left")
    rows = rows.join(spent, on="event", how="left", maintain_order="left")
    rows = rows.filter((pl.col("count") > 0) | pl.col("ns").is_not_null())
    nth = pl.int_range(pl.len()).over("place", "name", "asked").alias("nth")
    return rows.with_columns(nth, pl.col("ns").fill_null(0)).select(
        "place", "name", "nth", "kind", "count", "ns", (pl.col("duration_ns") * pl.col("count")).alias("sum_ns")
    )
