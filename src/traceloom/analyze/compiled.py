"""Torch.compile in a trace: compiled regions and graphs, graph breaks, lookups and compilations.

Marks classify events as compiling, looking up, running compiled graphs, or wrapping them. Names are
those of torch 2.0 to 2.13, read from recorded runs; docs/concepts/compile.md shows them.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import build_forest, build_host_segments
from traceloom.analyze.autograd import match_backward_ops
from traceloom.analyze.gpu_work import attribute_to_launches
from traceloom.analyze.host_events import classify_events
from traceloom.analyze.host_time import find_main_lane
from traceloom.analyze.intervals import compute_coverage, merge_intervals
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import NO_STEP, select_whole_steps, split_at_steps, summarize_per_step
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, get_event_column, to_nullable_series
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

PARTS = ("compile", "lookup", "graph", "wrapper", "break", "outside", "unobserved")
COMPILE, LOOKUP, GRAPH, WRAPPER, BREAK, OUTSIDE, UNOBSERVED = range(7)

REGION_NAME = r"^Torch-Compiled Region: ([0-9]{1,18})/([0-9]{1,18})(?:[^0-9]|$)"
_NAMES = {
    "region": REGION_NAME,
    "compile": r" \(dynamo_timed\)$"
    r"|^(dynamo|entire_(frame|backward)_compile|backend_compile|inductor_compile|fx_codegen_and_compile)$"
    r"|(^|/)torch/_dynamo/convert_frame\.py\(\d+\): (_compile|compile_inner)$",
    "lookup": r"^TorchDynamo Cache Lookup",
    "graph": r"^CompiledFunction(Backward)?$|^## Call CompiledFxGraph ",
    "wrapper": r"^(Pregraph bytecode|AOTDispatcher Runtime Wrapper Prologue)$",
}
COMPILED = f"{_NAMES['region']}|{_NAMES['graph']}"
"""Events that run something compiled: regions, and graphs without one."""

_BACKWARD = r"^(entire_backward_compile|backward\._backward_impl)"

# Phases by the names that the compiler gives them; code generation is nested in Inductor, Inductor
# in the back end.
_PHASES = {
    "guards": r"^build_guards( |$)",
    "backend": r"^(backend_compile|OutputGraph\.call_user_compiler \(dynamo_timed\)|call_user_compiler)$|"
    + _BACKWARD,
    "inductor": r"^(inductor_compile|compile_fx_inner \(dynamo_timed\))$",
    "code": r"^(GraphLowering\.compile_to_(fn|module)|PyCodeCache\.load_by_key_path|async_compile\.wait)( |$)",
}
STAGES = ("dynamo_ns", "guards_ns", "autograd_ns", "inductor_ns", "code_ns")
_COMPILE_ID = r"compile_id=(?:!\d+/)?([0-9]{1,18})/([0-9]{1,18})(?:[^0-9]|$)"
COMPILATIONS = build_schema(
    "event region number recompile direction step lane start_ns duration_ns",
    *STAGES,
    {"direction": pl.Enum(["forward", "backward"])},
)


class CompiledEvents(Struct, frozen=True):
    """Marks of the host events; arrays of shape (host events,), in the forest's order.

    Attributes:
        region: Events that are compiled regions.
        graph: Outermost events of compiled graphs, forward and backward; or the operators that
            replace them, see `mark_compiled_events`.
        compiling: Outermost events of compilations.
        looking_up: Lookups in the cache of compiled code.
        within: The innermost region around each event (or itself); -1 outside regions.
        part: Index in PARTS.
        any: Whether the trace shows anything of torch.compile.
    """

    region: Bools
    graph: Bools
    compiling: Bools
    looking_up: Bools
    within: Ints
    part: Ints
    any: bool


@cache_per_trace
def mark_compiled_events(trace: Trace) -> CompiledEvents:
    """Marks the host events by their names.

    Time belongs to the nearest mark above it, but all of a compilation is compilation. Operators
    directly in a region run uncompiled, unless the region holds no graph at all: then its back end
    runs graphs operator by operator.
    """
    tree = build_forest(trace)
    vocabulary = build_vocabulary(trace)
    code = vocabulary.code[tree.row]
    matches = vocabulary.matching_each(list(_NAMES.values()))
    masks = {
        name: gather_rows(name_matches, code)
        for name, name_matches in zip(_NAMES, matches, strict=True)
    }
    compiling = tree.topmost(masks["compile"])
    in_compiling = tree.nearest_or_self(compiling) >= 0
    region, graph = masks["region"] & ~in_compiling, tree.topmost(masks["graph"]) & ~in_compiling
    looking_up = masks["lookup"] & ~in_compiling
    within = tree.nearest_or_self(region)
    marked_part = np.full(code.size, -1, like=tree.row)
    for number, mask in (
        (WRAPPER, region | (masks["wrapper"] & ~in_compiling)),
        (GRAPH, graph),
        (LOOKUP, looking_up),
    ):
        marked_part[mask] = number
    nearest = tree.nearest_or_self(marked_part >= 0)
    part = np.append(marked_part, OUTSIDE)[nearest]
    is_op = classify_events(trace).op & (marked_part < 0)
    is_uncompiled = (tree.nearest_or_self(is_op) > nearest) & (part == WRAPPER)
    has_graph = np.zeros(code.size + 1, dtype=np.bool_)
    has_graph[within[graph]] = True
    part = np.where(is_uncompiled, np.where(has_graph[within], BREAK, GRAPH), part)
    graph |= tree.topmost(is_op & is_uncompiled & ~has_graph[within] & ~in_compiling)
    part[in_compiling] = COMPILE
    return CompiledEvents(
        region,
        graph,
        compiling,
        looking_up,
        within,
        part,
        any(bool(mask.any()) for mask in masks.values()),
    )


def list_compilations(trace: Trace, marks: CompiledEvents) -> pl.DataFrame:
    """Returns every compilation, in time order.

    Columns: event; region (`frame/number`, null where the trace does not number compilations: torch
    before 2.6), number, recompile (a number above 0), direction (backward graphs are compiled when
    they are first run), step, lane, start_ns, duration_ns, and its stages, which add up to it:
    dynamo_ns (reading the bytecode, and everything that is not distinguished), guards_ns,
    autograd_ns (the back end before Inductor: tracing forward and backward), inductor_ns (lowering
    and scheduling), code_ns (writing, compiling and loading code).
    """
    tree, vocabulary = build_forest(trace), build_vocabulary(trace)
    rows = np.flatnonzero(marks.compiling)
    rows = rows[np.argsort(tree.row[rows], kind="stable")]
    name_of = vocabulary.code[tree.row]
    # Phases are nested; time of one that is not recorded belongs to the one around it, and time in
    # several to the innermost.
    stage = np.zeros(tree.row.size, dtype=np.int64)
    for number, pattern in enumerate(_PHASES.values(), start=1):
        stage[tree.nearest_or_self(gather_rows(vocabulary.matching(pattern), name_of)) >= 0] = (
            number
        )
    own_ns = tree.self_ns(np.ones(tree.row.size, dtype=np.bool_), tree.parent)
    stages = [
        tree.subtree_sums(np.where(stage == number, own_ns, 0))[rows]
        for number in range(len(_PHASES) + 1)
    ]
    # Region and number by the first note inside the compilation that contains its id.
    notes = np.flatnonzero(
        gather_rows(vocabulary.names.str.contains(_COMPILE_ID).to_numpy(), name_of)
    )
    first = np.searchsorted(notes, rows)
    has = (first < notes.size) & (np.append(notes, tree.row.size)[first] < tree.stop[rows])
    note = np.append(notes, 0)[np.where(has, first, notes.size)]
    note_names = (
        vocabulary.names.gather(name_of[note]) if rows.size else pl.Series([], dtype=pl.String)
    )
    frame = pl.DataFrame(
        {
            "event": tree.row[rows],
            "note": note_names,
            "has_note": has,
            "backward": gather_rows(vocabulary.matching(_BACKWARD), name_of)[rows],
            "step": to_nullable_series(
                get_event_column(trace, "step", int(NO_STEP))[tree.row[rows]], absent=int(NO_STEP)
            ),
            "lane": tree.lane[rows],
            "start_ns": tree.start_ns[rows],
            "duration_ns": tree.span_ns()[rows],
            **dict(zip(STAGES, stages, strict=True)),
        }
    ).with_columns(
        frame=pl.when("has_note").then(pl.col("note").str.extract(_COMPILE_ID, 1)),
        number=pl.when("has_note").then(pl.col("note").str.extract(_COMPILE_ID, 2).cast(pl.Int64)),
        direction=pl.when("backward").then(pl.lit("backward")).otherwise(pl.lit("forward")),
    )
    frame = frame.with_columns(
        region=pl.format("{}/{}", "frame", "number"), recompile=pl.col("number") > 0
    )
    return frame.pipe(cast_to_schema, COMPILATIONS)


TIME = build_schema("lane step part ns", {"part": pl.Enum(PARTS)})
DEVICE = build_schema("part device_ns kernel_count", {"part": pl.Enum(PARTS)})
REGIONS = build_schema(
    "region frame number function count host_ns graph_ns wrapper_ns break_ns graph_break_count",
    "device_ns backward_host_ns backward_device_ns mean_host_ns min_host_ns max_host_ns step_count",
    {"frame": pl.Int64},
)
BREAKS = build_schema(
    "region resumed place count between_ns lookup_ns uncompiled_device_ns", {"place": pl.String}
)
GRAPHS = build_schema("name region count host_ns device_ns")
UNCOMPILED = build_schema("part name count host_ns device_ns", {"part": pl.Enum(PARTS)})
_PLACE = r"^(.*)\((\d+)\): (torch_dynamo_resume_in_.*)$"


@dataclass(frozen=True)
class Compiled(Result):
    """The record of torch.compile in a trace. All frames are empty where there is none.

    Attributes:
        time: Time of the main thread and of every thread that runs compiled code, by lane, step
            (null outside all steps) and part; adds up to the window of the trace on each lane. The
            parts: `compile` (compiling), `lookup` (checking guards), `graph` (compiled graphs,
            forward and backward), `wrapper` (compiled regions outside their graphs: bytecode,
            prologues, Python), `break` (operators in a region that run uncompiled, at graph
            breaks), `outside` (recorded, in no compiled region), `unobserved`.
        device: Summed GPU work by the part that launched it; work of no known launch is `outside`.
        regions: One row per compiled region `frame/number`: a number above 0 is a recompilation of
            that frame. `host_ns` is its time without compilations, lookups and regions inside it,
            in the other three parts. `function` is the Python frame it runs, null without stacks.
            `graph_break_count`: continuations that ran inside its calls. `device_ns` is GPU work
            launched in it; `backward_` that of the backward graphs of its graphs (null where these
            cannot be joined).
        graphs: Compiled graphs by name and region (null outside regions, as backward graphs are):
            calls, host time and GPU work launched in them. Where a back end runs graphs operator by
            operator, its outermost operators.
        breaks: One row per pair of a region and the continuation that ran inside it: a graph break.
            `place` is the line at which it resumes. `between_ns` is the host time from the end of
            the region's graph to the continuation, `lookup_ns` the part of it that looked the
            continuation up, both without compiling; `uncompiled_device_ns` the GPU work launched
            there.
        compilations: One row per compilation in the window; see `compilations`.
        uncompiled: Outermost operators that ran in no compiled graph, by part and name.
        lookup_count: Lookups of compiled code.
        lookup_ns: Host time in them.
        miss_count: Lookups that a compilation followed: the first of a frame, or a guard that
            failed.
        recompile_count: Compilations of a frame that had been compiled before; None where the trace
            does not number them.
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


@cache
def _build_empty_result() -> Compiled:
    return Compiled(
        time=TIME.to_frame(),
        device=DEVICE.to_frame(),
        regions=REGIONS.to_frame(),
        graphs=GRAPHS.to_frame(),
        breaks=BREAKS.to_frame(),
        compilations=COMPILATIONS.to_frame(),
        uncompiled=UNCOMPILED.to_frame(),
        lookup_count=0,
        lookup_ns=0,
        miss_count=0,
        recompile_count=0,
        seen=False,
    )


def compiled(trace: Trace) -> Compiled:
    """Accounts for torch.compile: regions, graph breaks, lookups, compilations, and what ran
    uncompiled.
    """
    event_marks = mark_compiled_events(trace)
    if not event_marks.any:
        return _build_empty_result()
    tree, segments, work = (
        build_forest(trace),
        build_host_segments(trace),
        attribute_to_launches(trace),
    )
    lanes = np.unique(tree.lane[event_marks.part != OUTSIDE])
    main = find_main_lane(trace)
    lanes = lanes if main is None else np.union1d(lanes, [main])
    on_lanes = np.flatnonzero(np.isin(segments.lane, lanes))
    step_spans, step = split_at_steps(trace, segments.start_ns[on_lanes], segments.end_ns[on_lanes])
    rows = on_lanes[step_spans.source]
    part = np.append(event_marks.part, UNOBSERVED)[segments.owner[rows].astype(np.int64)]
    time = pl.DataFrame(
        {
            "lane": segments.lane[rows],
            "step": to_nullable_series(step, absent=int(NO_STEP)),
            "part": pl.Series(PARTS).gather(part),
            "ns": step_spans.end_ns - step_spans.start_ns,
        }
    ).pipe(cast_to_schema, TIME)
    part = np.append(event_marks.part, OUTSIDE)[work.launch_position]
    device = pl.DataFrame(
        {
            "part": pl.Series(PARTS).gather(part),
            "device_ns": work.duration_ns,
            "kernel_count": work.kernel,
        }
    ).pipe(cast_to_schema, DEVICE)
    # Of each host event alone, without what is below it.
    own_ns = tree.self_ns(np.ones(tree.row.size, dtype=np.bool_), tree.parent)
    own_device_ns, _, _ = work.sum_by_owner(np.arange(tree.row.size))
    lookups = np.flatnonzero(event_marks.looking_up)
    after = tree.stop[lookups]
    same = np.append(tree.lane, -1)[after] == tree.lane[lookups]
    missed = same & np.append(event_marks.compiling, False)[after]
    table = list_compilations(trace, event_marks)
    return Compiled(
        time.group_by("lane", "step", "part").agg(pl.col("ns").sum()).sort("lane", "step", "part"),
        device.group_by("part").agg(pl.col("device_ns", "kernel_count").sum()).sort("part"),
        _summarize_regions(trace, event_marks, own_ns, own_device_ns),
        _summarize_graphs(trace, event_marks, own_ns, own_device_ns),
        _find_graph_breaks(trace, event_marks, own_device_ns),
        table,
        _list_uncompiled_ops(trace, event_marks, own_ns, own_device_ns),
        lookup_count=int(lookups.size),
        lookup_ns=int(tree.span_ns()[lookups].sum()),
        miss_count=int(missed.sum()),
        recompile_count=None if table["number"].null_count() else table.filter("recompile").height,
        seen=True,
    )


def _get_event_names(trace: Trace, rows: Ints) -> pl.Series:
    """Returns names of host events, by their positions in the forest; null for -1."""
    vocabulary = build_vocabulary(trace)
    return vocabulary.names.gather(
        pl.Series(vocabulary.code[build_forest(trace).row[rows]]).set(pl.Series(rows < 0), None)
    )


def _find_region_functions(trace: Trace, rows: Ints) -> pl.Series:
    """Returns the Python frame directly inside each region; null without one."""
    tree = build_forest(trace)
    child = np.minimum(rows + 1, tree.row.size - 1)
    python = get_event_column(trace, "category")[tree.row[child]] == vocab.CATEGORIES.index(
        vocab.PYTHON
    )
    return _get_event_names(trace, np.where((tree.parent[child] == rows) & python, child, -1))


def _get_region_ids(trace: Trace, rows: Ints) -> pl.Series:
    """Returns `frame/number` of compiled regions; null for -1."""
    names = _get_event_names(trace, rows)
    return names.str.extract(REGION_NAME, 1) + "/" + names.str.extract(REGION_NAME, 2)


def _summarize_regions(
    trace: Trace, event_marks: CompiledEvents, own_ns: Ints, own_device_ns: Ints
) -> pl.DataFrame:
    tree = build_forest(trace)
    rows = np.flatnonzero(event_marks.region)

    def by_region(region: Ints, values: Ints) -> Ints:
        total = np.zeros(tree.row.size, dtype=np.int64)
        np.add.at(total, region, values)
        return total[rows]

    region_rows = np.flatnonzero(event_marks.within >= 0)
    regions, part, self_ns = (
        event_marks.within[region_rows],
        event_marks.part[region_rows],
        own_ns[region_rows],
    )
    graph_ns = by_region(regions, np.where(part == GRAPH, self_ns, 0))
    break_ns = by_region(regions, np.where(part == BREAK, self_ns, 0))
    host_ns = by_region(regions, np.where((part == COMPILE) | (part == LOOKUP), 0, self_ns))
    outer_region = tree.nearest(event_marks.region)[rows]
    # The backward of each region's graphs, without compiling it; null where unknown.
    backward = dict.fromkeys(
        ("backward_host_ns", "backward_device_ns"), pl.Series([None] * rows.size, dtype=pl.Int64)
    )
    joined = match_backward_ops(trace)
    if joined is not None:
        graphs = event_marks.graph[joined.backward] & (event_marks.within[joined.forward] >= 0)
        region = event_marks.within[joined.forward[graphs]]
        running = np.where(event_marks.part != COMPILE, own_ns, 0)
        for name, values in zip(backward, (running, own_device_ns), strict=True):
            backward[name] = pl.Series(
                by_region(region, tree.subtree_sums(values)[joined.backward[graphs]])
            )
    frame = pl.DataFrame(
        {
            "name": _get_event_names(trace, rows),
            "function": _find_region_functions(trace, rows),
            "step": to_nullable_series(
                get_event_column(trace, "step", int(NO_STEP))[tree.row[rows]], absent=int(NO_STEP)
            ),
            "graph_ns": graph_ns,
            "break_ns": break_ns,
            "host_ns": host_ns,
            "wrapper_ns": host_ns - graph_ns - break_ns,
            "graph_break_count": np.bincount(
                outer_region[outer_region >= 0], minlength=tree.row.size
            )[rows],
            "device_ns": by_region(regions, own_device_ns[region_rows]),
            **backward,
        }
    ).with_columns(
        frame=pl.col("name").str.extract(REGION_NAME, 1).cast(pl.Int64),
        number=pl.col("name").str.extract(REGION_NAME, 2).cast(pl.Int64),
    )
    frame = frame.with_columns(region=pl.format("{}/{}", "frame", "number"))
    back = pl.col(list(backward))
    spread = summarize_per_step(
        frame.cast({"step": pl.Int32}), ["region"], ["host_ns"], select_whole_steps(trace)
    )
    return (
        frame.group_by("region", "frame", "number")
        .agg(
            pl.col("function").drop_nulls().first(),
            pl.len().alias("count"),
            pl.col(
                "graph_ns", "break_ns", "host_ns", "wrapper_ns", "graph_break_count", "device_ns"
            ).sum(),
            pl.when(back.is_not_null().any()).then(back.sum()),
        )
        .join(spread, on="region", how="left")
        .sort("frame", "number")
        .pipe(cast_to_schema, REGIONS)
    )


def _summarize_graphs(
    trace: Trace, event_marks: CompiledEvents, own_ns: Ints, own_device_ns: Ints
) -> pl.DataFrame:
    tree = build_forest(trace)
    rows = np.flatnonzero(event_marks.graph)
    frame = pl.DataFrame(
        {
            "name": _get_event_names(trace, rows),
            "region": _get_region_ids(trace, event_marks.within[rows]),
            "host_ns": tree.subtree_sums(np.where(event_marks.part != COMPILE, own_ns, 0))[rows],
            "device_ns": tree.subtree_sums(own_device_ns)[rows],
        }
    )
    summed = frame.group_by("name", "region", maintain_order=True).agg(
        pl.len().alias("count"), pl.col("host_ns", "device_ns").sum()
    )
    return summed.pipe(cast_to_schema, GRAPHS).sort("host_ns", "name", descending=[True, False])


def _find_graph_breaks(
    trace: Trace, event_marks: CompiledEvents, own_device_ns: Ints
) -> pl.DataFrame:
    tree = build_forest(trace)
    region = np.flatnonzero(event_marks.region)
    outer_region = tree.nearest(event_marks.region)[region]
    child, parent = region[outer_region >= 0], outer_region[outer_region >= 0]
    if not child.size:
        return BREAKS.to_frame()
    last = np.maximum.accumulate(np.where(event_marks.graph, np.arange(tree.row.size), -1))[child]
    own_graph = (
        (last >= 0)
        & (event_marks.within[last] == parent)
        & (np.append(tree.stop, 0)[last] <= child)
    )
    since = np.where(own_graph, tree.end_ns[last], tree.start_ns[parent])
    until = tree.start_ns[child]
    # The part of the time in between that went into compiling and looking up on the lane of each
    # child.
    overhead_ns = np.zeros((2, child.size), dtype=np.int64)
    for values, mask in zip(
        overhead_ns, (event_marks.compiling, event_marks.looking_up), strict=True
    ):
        rows = np.flatnonzero(mask)
        for lane in np.unique(tree.lane[child]).tolist():
            lane_rows, on_lane = rows[tree.lane[rows] == lane], tree.lane[child] == lane
            busy = merge_intervals(tree.start_ns[lane_rows], tree.end_ns[lane_rows])
            values[on_lane] = compute_coverage(busy, since[on_lane], until[on_lane])
    is_uncompiled = (event_marks.part == BREAK) & (event_marks.within >= 0)
    uncompiled_ns = np.append(0, np.cumsum(np.where(is_uncompiled, own_device_ns, 0)))
    first = np.where(own_graph, np.append(tree.stop, 0)[last], parent)
    frame = pl.DataFrame(
        {
            "region": _get_region_ids(trace, parent),
            "resumed": _get_region_ids(trace, child),
            "function": _find_region_functions(trace, child),
            "between_ns": until - since - overhead_ns[0],
            "lookup_ns": overhead_ns[1],
            "uncompiled_device_ns": uncompiled_ns[child] - uncompiled_ns[np.minimum(first, child)],
        }
    )
    location = pl.format(
        "{}:{}",
        pl.col("function").str.extract(_PLACE, 1),
        pl.col("function").str.extract(_PLACE, 2),
    )
    return (
        frame.with_columns(place=location)
        .group_by("region", "resumed", maintain_order=True)
        .agg(
            pl.col("place").drop_nulls().first(),
            pl.len().alias("count"),
            pl.col("between_ns", "lookup_ns", "uncompiled_device_ns").sum(),
        )
        .sort("between_ns", descending=True, maintain_order=True)
        .pipe(cast_to_schema, BREAKS)
    )


def _list_uncompiled_ops(
    trace: Trace, event_marks: CompiledEvents, own_ns: Ints, own_device_ns: Ints
) -> pl.DataFrame:
    """Returns outermost operators outside compiled graphs; the time of compiled work inside them is
    left out.
    """
    tree = build_forest(trace)
    is_uncompiled = (event_marks.part == BREAK) | (event_marks.part == OUTSIDE)
    rows = np.flatnonzero(tree.topmost(classify_events(trace).op & is_uncompiled))
    frame = pl.DataFrame(
        {
            "part": pl.Series(PARTS).gather(event_marks.part[rows]),
            "name": _get_event_names(trace, rows),
            "host_ns": tree.subtree_sums(np.where(is_uncompiled, own_ns, 0))[rows],
            "device_ns": tree.subtree_sums(np.where(is_uncompiled, own_device_ns, 0))[rows],
        }
    )
    return (
        frame.group_by("part", "name", maintain_order=True)
        .agg(pl.len().alias("count"), pl.col("host_ns", "device_ns").sum())
        .filter(pl.col("host_ns") > 0)
        .sort(["host_ns", "name"], descending=[True, False])
        .pipe(cast_to_schema, UNCOMPILED)
    )
