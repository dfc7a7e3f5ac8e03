"""What does `torch.compile` do in this run: what runs compiled, what does not, and what does compiling cost?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest, forest, host_segments
from traceloom.analyze.attribution import launched_work
from traceloom.analyze.autograd import backward_of
from traceloom.analyze.compilations import COMPILATIONS, compilations
from traceloom.analyze.compile_marks import (
    BREAK,
    COMPILE,
    GRAPH,
    LOOKUP,
    OUTSIDE,
    PARTS,
    REGION_NAME,
    Marks,
    marks,
    part_of,
)
from traceloom.analyze.host import main_lane
from traceloom.analyze.intervals import Ints, coverage, union
from traceloom.analyze.per_step import per_step, whole_steps
from traceloom.analyze.phases import meaning
from traceloom.analyze.splitting import NO_STEP, split_at_steps
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column
from traceloom.model.result import Result

TIME = pl.Schema({"lane": pl.UInt32(), "step": pl.Int32(), "part": pl.Enum(PARTS), "ns": pl.Int64()})
DEVICE = pl.Schema({"part": pl.Enum(PARTS), "device_ns": pl.Int64(), "kernel_count": pl.Int64()})
REGIONS = pl.Schema(
    {
        "region": pl.String(),
        "frame": pl.Int64(),
        "number": pl.Int64(),
        "function": pl.String(),
        "count": pl.Int64(),
        "host_ns": pl.Int64(),
        "graph_ns": pl.Int64(),
        "wrapper_ns": pl.Int64(),
        "break_ns": pl.Int64(),
        "graph_break_count": pl.Int64(),
        "device_ns": pl.Int64(),
        "backward_host_ns": pl.Int64(),
        "backward_device_ns": pl.Int64(),
        "mean_host_ns": pl.Float64(),
        "min_host_ns": pl.Int64(),
        "max_host_ns": pl.Int64(),
        "step_count": pl.Int64(),
    }
)
BREAKS = pl.Schema(
    {
        "region": pl.String(),
        "resumed": pl.String(),
        "place": pl.String(),
        "count": pl.Int64(),
        "between_ns": pl.Int64(),
        "lookup_ns": pl.Int64(),
        "uncompiled_device_ns": pl.Int64(),
    }
)
GRAPHS = pl.Schema(
    {
        "name": pl.String(),
        "region": pl.String(),
        "count": pl.Int64(),
        "host_ns": pl.Int64(),
        "device_ns": pl.Int64(),
    }
)
UNCOMPILED = pl.Schema(
    {
        "part": pl.Enum(PARTS),
        "name": pl.String(),
        "count": pl.Int64(),
        "host_ns": pl.Int64(),
        "device_ns": pl.Int64(),
    }
)
_PLACE = r"^(.*)\((\d+)\): (torch_dynamo_resume_in_.*)$"


@dataclass(frozen=True)
class Compiled(Result):
    """What a trace shows of torch.compile. All frames are empty where it shows nothing.

    Attributes:
        time: Time of the main thread and of every thread that runs compiled code, by lane, step (null outside all
            steps) and part; adds up to the window of the trace on each lane. The parts: `compile` (compiling), `lookup`
            (checking guards), `graph` (compiled graphs, forward and backward), `wrapper` (compiled regions outside
            their graphs: bytecode, prologues, Python), `break` (operators in a region that run uncompiled, at graph
            breaks), `outside` (recorded, in no compiled region), `unobserved`.
        device: Summed GPU work by the part that launched it; work of no known launch is `outside`.
        regions: One row per compiled region `frame/number`: a number above 0 is a recompilation of that frame.
            `host_ns` is its time without compilations, lookups and regions inside it, in the other three parts.
            `function` is the Python frame it runs, null without stacks. `graph_break_count`: continuations that ran
            inside its calls.
            `device_ns` is GPU work launched in it; `backward_` that of the backward graphs of its graphs (null where
            these cannot be joined).
        graphs: Compiled graphs by name and region (null outside regions, as backward graphs are): calls, host time and
            GPU work launched in them. Where a back end runs graphs operator by operator, its outermost operators.
        breaks: One row per pair of a region and the continuation that ran inside it: a graph break. `place` is the line
            at which it resumes. `between_ns` is the host time from the end of the region's graph to the continuation,
            `lookup_ns` the part of it that looked the continuation up, both without compiling;
            `uncompiled_device_ns` the GPU work launched there.
        compilations: One row per compilation in the window; see `compilations`.
        uncompiled: Outermost operators that ran in no compiled graph, by part and name.
        lookup_count: Lookups of compiled code.
        lookup_ns: Host time in them.
        miss_count: Lookups that a compilation followed: the first of a frame, or a guard that failed.
        recompile_count: Compilations of a frame that had been compiled before; None where the trace does not number
            them.
        seen: Whether the trace shows anything of torch.compile.
    """

    time: pl.DataFrame
    device: pl.DataFrame
    regions: pl.DataFrame
    graphs: pl.DataFrame
    breaks: pl.DataFrame
    compilations: pl.DataFrame
    uncompiled: pl.DataFrame
    lookup_count: int
    lookup_ns: int
    miss_count: int
    recompile_count: int | None
    seen: bool


def compiled(trace: Trace) -> Compiled:
    """Account for torch.compile: regions, graph breaks, lookups, compilations, and what ran uncompiled."""
    event_marks = marks(trace)
    if not event_marks.any:
        empty = [schema.to_frame() for schema in (TIME, DEVICE, REGIONS, GRAPHS, BREAKS, COMPILATIONS, UNCOMPILED)]
        return Compiled(empty[0], empty[1], empty[2], empty[3], empty[4], empty[5], empty[6], 0, 0, 0, 0, seen=False)
    tree = forest(trace)
    lookups = np.flatnonzero(event_marks.looking_up)
    after = tree.stop[lookups]
    same = np.append(tree.lane, -1)[after] == tree.lane[lookups]
    missed = same & np.append(event_marks.compiling, False)[after]
    table = compilations(trace, event_marks)
    return Compiled(
        _time(trace, event_marks),
        _device(trace, event_marks),
        _regions(trace, tree, event_marks),
        _graphs(trace, tree, event_marks),
        _breaks(trace, tree, event_marks),
        table,
        _uncompiled(trace, tree, event_marks),
        lookup_count=int(lookups.size),
        lookup_ns=int(tree.span_ns()[lookups].sum()),
        miss_count=int(missed.sum()),
        recompile_count=None if table["number"].null_count() else table.filter("recompile").height,
        seen=True,
    )


def _time(trace: Trace, event_marks: Marks) -> pl.DataFrame:
    tree, segments = forest(trace), host_segments(trace)
    lanes = np.unique(tree.lane[event_marks.part != OUTSIDE])
    main = main_lane(trace)
    lanes = lanes if main is None else np.union1d(lanes, [main])
    on_lanes = np.flatnonzero(np.isin(segments.lane, lanes))
    pieces, step = split_at_steps(trace, segments.start_ns[on_lanes], segments.end_ns[on_lanes])
    rows = on_lanes[pieces.source]
    part = part_of(event_marks, segments.owner[rows].astype(np.int64))
    frame = pl.DataFrame(
        {
            "lane": segments.lane[rows],
            "step": pl.Series(step).replace(int(NO_STEP), None),
            "part": pl.Series(PARTS).gather(part),
            "ns": pieces.end_ns - pieces.start_ns,
        }
    )
    return frame.cast(TIME).group_by("lane", "step", "part").agg(pl.col("ns").sum()).sort("lane", "step", "part")


def _device(trace: Trace, event_marks: Marks) -> pl.DataFrame:
    work = launched_work(trace)
    part = np.append(event_marks.part, OUTSIDE)[work.origin]
    frame = pl.DataFrame(
        {"part": pl.Series(PARTS).gather(part), "device_ns": work.duration_ns, "kernel_count": work.kernel}
    )
    return frame.cast(DEVICE).group_by("part").agg(pl.col("device_ns", "kernel_count").sum()).sort("part")


def _own(trace: Trace, tree: Forest) -> tuple[Ints, Ints]:
    """Time and GPU work of each host event alone, without what lies below it."""
    everything = np.ones(tree.row.size, dtype=np.bool_)
    device, _, _ = launched_work(trace).by_owner(np.arange(tree.row.size))
    return tree.self_ns(everything, tree.parent), device


def _function(trace: Trace, tree: Forest, rows: Ints) -> pl.Series:
    """The Python frame right inside each region; null without one."""
    child = np.minimum(rows + 1, tree.row.size - 1)
    python = column(trace, "category")[tree.row[child]] == cat.CATEGORIES.index(cat.PYTHON)
    inside = pl.Series((tree.parent[child] == rows) & python)
    names = vocabulary(trace).names.gather(vocabulary(trace).code[tree.row[child]])
    return pl.select(pl.when(inside).then(names)).to_series()


def _regions(trace: Trace, tree: Forest, event_marks: Marks) -> pl.DataFrame:
    rows = np.flatnonzero(event_marks.region)
    own, device = _own(trace, tree)
    inside = np.flatnonzero(event_marks.within >= 0)
    at = event_marks.within[inside]
    times = {}
    for name, parts in (("graph_ns", (GRAPH,)), ("break_ns", (BREAK,)), ("host_ns", ())):
        counted = (
            np.isin(event_marks.part[inside], parts) if parts else ~np.isin(event_marks.part[inside], (COMPILE, LOOKUP))
        )
        times[name] = np.zeros(tree.row.size, dtype=np.int64)
        np.add.at(times[name], at[counted], own[inside][counted])
    launched = np.zeros(tree.row.size, dtype=np.int64)
    np.add.at(launched, at, device[inside])
    above = tree.nearest(event_marks.region)[rows]
    breaks = np.bincount(above[above >= 0], minlength=tree.row.size)
    frame = pl.DataFrame(
        {
            "name": vocabulary(trace).names.gather(vocabulary(trace).code[tree.row[rows]]),
            "function": _function(trace, tree, rows),
            "step": pl.Series(column(trace, "step", int(NO_STEP))[tree.row[rows]]).replace(int(NO_STEP), None),
            **{name: values[rows] for name, values in times.items()},
            "wrapper_ns": (times["host_ns"] - times["graph_ns"] - times["break_ns"])[rows],
            "graph_break_count": breaks[rows],
            "device_ns": launched[rows],
            **_backward(trace, tree, event_marks, rows, own, device),
        }
    ).with_columns(
        frame=pl.col("name").str.extract(REGION_NAME, 1).cast(pl.Int64),
        number=pl.col("name").str.extract(REGION_NAME, 2).cast(pl.Int64),
    )
    frame = frame.with_columns(region=pl.format("{}/{}", "frame", "number"))
    summed = ["graph_ns", "break_ns", "host_ns", "wrapper_ns", "graph_break_count", "device_ns"]
    back = pl.col("backward_host_ns", "backward_device_ns")
    spread = per_step(frame.cast({"step": pl.Int32}), ["region"], ["host_ns"], whole_steps(trace))
    return (
        frame.group_by("region", "frame", "number")
        .agg(
            pl.col("function").drop_nulls().first(),
            pl.len().alias("count"),
            pl.col(summed).sum(),
            pl.when(back.is_not_null().any()).then(back.sum()),
        )
        .join(spread, on="region", how="left")
        .sort("frame", "number")
        .select(list(REGIONS))
        .cast(REGIONS)
    )


def _backward(  # noqa: PLR0917
    trace: Trace, tree: Forest, event_marks: Marks, rows: Ints, own: Ints, device: Ints
) -> dict[str, pl.Series]:
    """Host time and GPU work of the backward of each region's graphs, without compiling it; null where unknown."""
    joined = backward_of(trace)
    nothing = pl.Series([None] * rows.size, dtype=pl.Int64)
    if joined is None:
        return {"backward_host_ns": nothing, "backward_device_ns": nothing}
    graphs = event_marks.graph[joined.backward] & (event_marks.within[joined.forward] >= 0)
    backward, region = joined.backward[graphs], event_marks.within[joined.forward[graphs]]
    running = np.where(event_marks.part != COMPILE, own, 0)
    out = {}
    for name, values in (("backward_host_ns", running), ("backward_device_ns", device)):
        total = np.zeros(tree.row.size, dtype=np.int64)
        np.add.at(total, region, tree.subtree_sums(values)[backward])
        out[name] = pl.Series(total[rows])
    return out


def _graphs(trace: Trace, tree: Forest, event_marks: Marks) -> pl.DataFrame:
    rows = np.flatnonzero(event_marks.graph)
    own, device = _own(trace, tree)
    running = tree.subtree_sums(np.where(event_marks.part != COMPILE, own, 0))
    words = vocabulary(trace)
    names = words.names.gather(words.code[tree.row])
    number = names.str.extract(REGION_NAME, 1) + "/" + names.str.extract(REGION_NAME, 2)
    frame = pl.DataFrame(
        {
            "name": names.gather(rows),
            "region": number.gather(pl.Series(event_marks.within[rows]).replace(-1, None)),
            "host_ns": running[rows],
            "device_ns": tree.subtree_sums(device)[rows],
        }
    )
    summed = frame.group_by("name", "region", maintain_order=True).agg(
        pl.len().alias("count"), pl.col("host_ns", "device_ns").sum()
    )
    return summed.select(list(GRAPHS)).cast(GRAPHS).sort("host_ns", "name", descending=[True, False])


def _breaks(trace: Trace, tree: Forest, event_marks: Marks) -> pl.DataFrame:
    region = np.flatnonzero(event_marks.region)
    above = tree.nearest(event_marks.region)[region]
    child, parent = region[above >= 0], above[above >= 0]
    if not child.size:
        return BREAKS.to_frame()
    positions = np.arange(tree.row.size)
    last = np.maximum.accumulate(np.where(event_marks.graph, positions, -1))[child]
    own_graph = (last >= 0) & (event_marks.within[last] == parent)
    since = np.where(own_graph, tree.end_ns[last], tree.start_ns[parent])
    until = tree.start_ns[child]
    spent = {}
    for name, mask in (("compile", event_marks.compiling), ("lookup", event_marks.looking_up)):
        rows = np.flatnonzero(mask)
        spent[name] = _covered(tree, rows, child, since, until)
    device = _own(trace, tree)[1]
    loose = np.append(0, np.cumsum(np.where((event_marks.part == BREAK) & (event_marks.within >= 0), device, 0)))
    first = np.where(own_graph, np.append(tree.stop, 0)[last], parent)
    words = vocabulary(trace)
    names = words.names.gather(words.code[tree.row])
    number = names.str.extract(REGION_NAME, 1) + "/" + names.str.extract(REGION_NAME, 2)
    function = _function(trace, tree, child)
    frame = pl.DataFrame(
        {
            "region": number.gather(parent),
            "resumed": number.gather(child),
            "function": function,
            "between_ns": until - since - spent["compile"],
            "lookup_ns": spent["lookup"],
            "uncompiled_device_ns": loose[child] - loose[np.minimum(first, child)],
        }
    )
    location = pl.format("{}:{}", pl.col("function").str.extract(_PLACE, 1), pl.col("function").str.extract(_PLACE, 2))
    return (
        frame.with_columns(place=location)
        .group_by("region", "resumed", maintain_order=True)
        .agg(
            pl.col("place").drop_nulls().first(),
            pl.len().alias("count"),
            pl.col("between_ns", "lookup_ns", "uncompiled_device_ns").sum(),
        )
        .sort("between_ns", descending=True, maintain_order=True)
        .select(list(BREAKS))
        .cast(BREAKS)
    )


def _covered(tree: Forest, rows: Ints, child: Ints, since: Ints, until: Ints) -> Ints:
    """Time of the events `rows` in each stretch, on the lane of each child."""
    out = np.zeros(child.size, dtype=np.int64)
    for lane in np.unique(tree.lane[child]).tolist():
        lane_rows, on_lane = rows[tree.lane[rows] == lane], tree.lane[child] == lane
        busy = union(tree.start_ns[lane_rows], tree.end_ns[lane_rows])
        out[on_lane] = coverage(busy, since[on_lane], until[on_lane])
    return out


def _uncompiled(trace: Trace, tree: Forest, event_marks: Marks) -> pl.DataFrame:
    """Outermost operators outside compiled graphs; the time of compiled work inside them is left out."""
    loose = (event_marks.part == BREAK) | (event_marks.part == OUTSIDE)
    rows = np.flatnonzero(tree.topmost(meaning(trace).op & loose))
    own, device = _own(trace, tree)
    inside = tree.subtree_sums(np.where(loose, own, 0)), tree.subtree_sums(np.where(loose, device, 0))
    words = vocabulary(trace)
    frame = pl.DataFrame(
        {
            "part": pl.Series(PARTS).gather(event_marks.part[rows]),
            "name": words.names.gather(words.code[tree.row[rows]]),
            "host_ns": inside[0][rows],
            "device_ns": inside[1][rows],
        }
    )
    return (
        frame.group_by("part", "name", maintain_order=True)
        .agg(pl.len().alias("count"), pl.col("host_ns", "device_ns").sum())
        .filter(pl.col("host_ns") > 0)
        .sort(["host_ns", "name"], descending=[True, False])
        .select(list(UNCOMPILED))
        .cast(UNCOMPILED)
    )
