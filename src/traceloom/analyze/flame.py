"""Where does the host spend its time, frame by frame, and which frames feed the GPU?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest, host_pieces
from traceloom.analyze.attribution import launched_work
from traceloom.analyze.call_tree import KINDS, THREAD, CallTree, call_tree
from traceloom.analyze.frames import places
from traceloom.analyze.gaps import gpu_rows
from traceloom.analyze.per_step import per_step, whole_steps
from traceloom.analyze.splitting import NO_STEP
from traceloom.array_types import Bools, Ints
from traceloom.model import Session, Trace
from traceloom.model.arrays import column
from traceloom.model.frames import as_declared, schema
from traceloom.model.result import Result

_TIMES = ("calls", "self_ns", "total_ns", "self_device_ns", "device_ns")
FRAMES = schema("rank node parent depth lane kind name file line", *_TIMES, {"kind": pl.Enum(KINDS)})
FUNCTIONS = schema(
    "rank kind name file line", *_TIMES, "mean_self_ns min_self_ns max_self_ns step_count", {"kind": pl.Enum(KINDS)}
)


@dataclass(frozen=True)
class Flame(Result):
    """The folded call stacks of host threads.

    Attributes:
        frames: One row per path; parents before their children, a thread is the root of its calls. `calls` counts the
            events of the path, `self_ns` the time in which one of them is innermost, `total_ns` that of the path and
            all below. `self_device_ns` is the summed duration of the GPU work launched right there, `device_ns` there
            and below. `name` of a Python frame is the function, with `file` and `line`; null for others.
        functions: The same summed by name wherever it is called from; `total_ns` and `device_ns` count a function that
            calls itself once. `mean_self_ns`, `min_self_ns`, `max_self_ns` are per whole step; null without steps.
        busy_ns: Sum of all `self_ns`: the time in which anything is recorded on the threads.
        gpu_work_ns: Summed duration of the GPU work of the chosen steps.
        unattributed_device_ns: The part of it that no host event is known to have launched; with all
            `self_device_ns` it is `gpu_work_ns`.
    """

    frames: pl.DataFrame
    functions: pl.DataFrame
    busy_ns: int
    gpu_work_ns: int
    unattributed_device_ns: int


def flame(run: Trace | Session, steps: tuple[int, int] | None = None, lane: int | None = None) -> Flame:
    """Fold the call stacks: Python frames, modules, operators, annotations and runtime calls in one tree.

    Args:
        run: One process's trace, or a session (its ranks stand one after the other, nodes numbered on).
        steps: First and last step to count, both included; None for all time. Host time is cut at the steps' bounds,
            calls count where they start, GPU work where it was launched.
        lane: Only this thread; None for all.
    """
    if isinstance(run, Trace):
        return _of_trace(run, steps, lane)
    parts = [_of_trace(trace, steps, lane) for trace in run.traces]
    first = 0
    frames = []
    for part in parts:
        frames.append(part.frames.with_columns(pl.col("node", "parent") + first))
        first += part.frames.height
    return Flame(
        pl.concat([FRAMES.to_frame(), *frames]),
        pl.concat([FUNCTIONS.to_frame(), *(part.functions for part in parts)]),
        sum(part.busy_ns for part in parts),
        sum(part.gpu_work_ns for part in parts),
        sum(part.unattributed_device_ns for part in parts),
    )


def _of_trace(trace: Trace, steps: tuple[int, int] | None, lane: int | None) -> Flame:
    tree, pieces, folded, work = forest(trace), host_pieces(trace), call_tree(trace), launched_work(trace)
    called, launched = np.arange(tree.row.size), work.origin >= 0
    counted = np.ones(pieces.ns.size, dtype=np.bool_)
    chosen = np.ones(work.origin.size, dtype=np.bool_)
    if steps is not None:
        low, high = steps
        step_of = column(trace, "step", int(NO_STEP))
        of_work, of_event = step_of[gpu_rows(trace)], step_of[tree.row]
        counted &= (pieces.step >= low) & (pieces.step <= high)
        called = called[(of_event >= low) & (of_event <= high)]
        chosen = (of_work >= low) & (of_work <= high)
    if lane is not None:
        counted &= pieces.lane == lane
        called = called[tree.lane[called] == lane]
        launched &= np.append(tree.lane, -1)[work.origin] == lane
    rows, work_rows = np.flatnonzero(counted), np.flatnonzero(launched & chosen)
    owner, ns, step = pieces.owner[rows], pieces.ns[rows], pieces.step[rows]
    own = _added(folded.parent.size, folded.node[owner], ns)
    device = _added(folded.parent.size, folded.node[work.origin[work_rows]], work.duration_ns[work_rows])
    calls = np.bincount(folded.node[called], minlength=folded.parent.size)
    total, device_total = folded.totals(own), folded.totals(device)
    values = dict(zip(_TIMES, (calls, own, total, device, device_total), strict=True))
    used = (folded.totals(calls) > 0) | (total > 0) | (device_total > 0)
    named = places(pl.concat([folded.names.cast(pl.String), pl.Series([""])]))  # the last is that of threads
    gpu_work = int(work.duration_ns[chosen].sum())
    # Own time of each name in a usual step
    rows = np.flatnonzero(step != NO_STEP)
    numbers = np.sort(trace.steps["step"].cast(pl.Int64).to_numpy())
    step_index = np.searchsorted(numbers, step[rows]) if numbers.size > 1 else np.zeros(rows.size, dtype=np.int64)
    width = max(numbers.size, 1)
    size = len(folded.names) * width
    key = folded.name_of[owner[rows]] * width + step_index
    sums, seen = _added(size, key, ns[rows]), np.flatnonzero(np.bincount(key, minlength=size))
    number = numbers[seen % width] if numbers.size else seen
    frame = pl.DataFrame({"label": seen // width, "step": number, "self_ns": sums[seen]})
    usual = per_step(frame.cast({"step": pl.Int32, "label": pl.Int64}), ["label"], ["self_ns"], whole_steps(trace))
    return Flame(
        _frames(trace, folded, used, values, named),
        _functions(trace, folded, values, named, usual),
        int(own.sum()),
        gpu_work,
        gpu_work - int(device.sum()),
    )


def _added(size: int, index: Ints, values: Ints) -> Ints:
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, values)
    return total


def thread_names(trace: Trace) -> pl.Series:
    """What to call each lane: its name, with process and thread where several have one name; shape (lanes,)."""
    qualified = pl.format("{} ({}, {})", "name", "process", "thread")
    return trace.lanes.select(
        pl.when(pl.len().over("name", "kind") > 1).then(qualified).otherwise("name").alias("name")
    )["name"]


def _frames(trace: Trace, folded: CallTree, used: Bools, values: dict[str, Ints], places: pl.DataFrame) -> pl.DataFrame:
    rows = np.flatnonzero(used)
    number = np.cumsum(used) - 1
    parent = folded.parent[rows]
    depth = np.searchsorted(np.array(folded.level), rows, side="right") - 1
    named = places[pl.Series(folded.label[rows] % places.height, dtype=pl.UInt32)]
    threads = thread_names(trace)[pl.Series(folded.lane[rows], dtype=pl.UInt32)]
    is_thread = pl.Series(folded.kind[rows] == THREAD)
    return pl.DataFrame(
        {
            "rank": pl.Series([trace.rank] * rows.size, dtype=pl.Int32),
            "node": np.arange(rows.size),
            "parent": pl.Series(np.where(parent >= 0, number[np.maximum(parent, 0)], -1)).replace(-1, None),
            "depth": depth,
            "lane": folded.lane[rows],
            "kind": pl.Series(KINDS)[folded.kind[rows]],
            "name": threads.zip_with(is_thread, named["name"]),
            "file": named["file"],
            "line": named["line"],
            **{name: column[rows] for name, column in values.items()},
        }
    ).pipe(as_declared, FRAMES)


def _functions(
    trace: Trace, folded: CallTree, values: dict[str, Ints], places: pl.DataFrame, usual: pl.DataFrame
) -> pl.DataFrame:
    """Sums by name; of nested calls of one name only the outermost counts to the totals."""
    top = np.zeros(folded.parent.size, dtype=np.bool_)
    if folded.node.size:
        top[folded.node] = forest(trace).topmost_of_kind(folded.name_of)
    events = folded.label >= 0
    nodes = pl.DataFrame({"label": folded.label, "top": top, "kind": folded.kind, **values}).filter(pl.Series(events))
    once = [pl.col(name).filter("top").sum() for name in ("total_ns", "device_ns")]
    summed = (
        nodes.lazy()
        .group_by("label")
        .agg(pl.col("kind").first(), pl.col("calls", "self_ns", "self_device_ns").sum(), *once)
        .filter((pl.col("calls") > 0) | (pl.col("self_ns") > 0) | (pl.col("device_ns") > 0))
        .collect()
    )
    named = places[summed["label"].cast(pl.UInt32)]
    return (
        pl.concat([summed, named], how="horizontal")
        .join(usual, on="label", how="left")
        .with_columns(pl.lit(trace.rank, dtype=pl.Int32).alias("rank"), kind=pl.Series(KINDS)[summed["kind"]])
        .pipe(as_declared, FUNCTIONS)
        .sort(["self_ns", "total_ns", "name", "file", "line"], descending=[True, True, False, False, False])
    )
