"""Host time and GPU work by call path: the folded call stacks of host threads."""

from dataclasses import dataclass

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import build_forest, build_host_pieces
from traceloom.analyze.gpu_work import attribute_to_launches, find_gpu_event_rows
from traceloom.analyze.host_events import ADDRESS_PATTERN, parse_frame_places
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import NO_STEP, select_whole_steps, summarize_per_step
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import get_event_column
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace

KINDS = ("thread", "python", "module", "op", "annotation", "launch", "other")
THREAD = 0
MODULE = "nn.Module: "
MAX_DEPTH = 1024  # levels; deeper frames count to the level above

# Varies from call to call and identifies no other place.
_STEP_PATTERN = r"^(ProfilerStep|traceloom\.step)#.*$"


class CallTree(Struct, frozen=True):
    """Paths of calls, level by level: parents come before their children.

    Attributes:
        node: For each host event (in the forest's order) its node; shape (host events,).
        parent: For each node its parent; -1 for threads. Shape (nodes,).
        label: For each node the index of its name in `names`; -1 for threads.
        kind: For each node its index in KINDS.
        lane: For each node its lane.
        level: First node of each level, and the number of nodes at the end; level 0 are the
            threads.
        names: The distinct names, without addresses and step numbers.
        name_of: For each host event the index of its name.
    """

    node: Ints
    parent: Ints
    label: Ints
    kind: Ints
    lane: Ints
    level: tuple[int, ...]
    names: pl.Series
    name_of: Ints

    def sums(self, values: Ints) -> Ints:
        """Returns per node the sum of `values`, given per host event."""
        total = np.zeros(self.parent.size, dtype=np.int64)
        np.add.at(total, self.node, values)
        return total

    def totals(self, self_values: Ints) -> Ints:
        """Returns per node its own value and those of all nodes below it."""
        total = self_values.copy()
        for low, high in reversed(list(zip(self.level[1:-1], self.level[2:], strict=True))):
            np.add.at(total, self.parent[low:high], total[low:high])
        return total

    def paths(self, nodes: Ints) -> list[list[int]]:
        """Returns for each of `nodes` the path from its thread down to the node itself; for a few
        nodes, since it walks up.
        """
        paths = []
        for node in nodes.tolist():
            path = []
            ancestor = node
            while ancestor >= 0:
                path.append(ancestor)
                ancestor = int(self.parent[ancestor])
            paths.append(path[::-1])
        return paths


_KIND_BY_CATEGORY = {
    vocab.PYTHON: "python",
    vocab.OP: "op",
    vocab.ANNOTATION: "annotation",
    vocab.RUNTIME: "launch",
    vocab.DRIVER: "launch",
}
_KIND_BY_CATEGORY_CODE = np.array(
    [KINDS.index(_KIND_BY_CATEGORY.get(name, "other")) for name in vocab.CATEGORIES], dtype=np.int64
)


@cache_per_trace
def call_tree(trace: Trace) -> CallTree:
    """Folds the host events of a trace.

    Goes down level by level, where a path is known by its parent's node and its own name; the cost
    is that of sorting the events once.
    """
    tree, vocabulary = build_forest(trace), build_vocabulary(trace)
    # Names without what varies from call to call, and for each name of the vocabulary the index of
    # its plain one.
    text = (
        pl.col("name")
        .fill_null("")
        .str.replace_all(ADDRESS_PATTERN, "")
        .str.replace(_STEP_PATTERN, "${1}#")
    )
    normalized = vocabulary.names.to_frame("name").select(text)
    names = normalized["name"].unique(maintain_order=True)
    index = names.to_frame().with_row_index("number")
    code = normalized.join(index, on="name", how="left", maintain_order="left")["number"]
    name_of = code.cast(pl.Int64).to_numpy()[vocabulary.code[tree.row]]
    width = max(len(names), 1)
    depth = np.minimum(get_event_column(trace, "depth")[tree.row].astype(np.int64), MAX_DEPTH)
    lanes = int(tree.lane.max(initial=-1)) + 1
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max(initial=-1)) + 2))
    node = np.full(tree.row.size, -1, dtype=np.int64, like=tree.row)
    parents, labels, examples = [np.full(lanes, -1)], [np.full(lanes, -1)], []
    starts, count = [0], lanes
    parent = np.where(tree.parent >= 0, tree.parent, 0)
    for level, (low, high) in enumerate(
        zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ):
        if level == MAX_DEPTH:
            break
        events = order[low:high]
        up = tree.lane[events] if level == 0 else node[parent[events]]
        distinct, first, number = np.unique(
            up * width + name_of[events], return_index=True, return_inverse=True
        )
        # Nodes are numbered in the order in which they are first called
        call_order = np.argsort(first, kind="stable")
        position = np.empty_like(call_order)
        position[call_order] = np.arange(call_order.size)
        node[events] = count + position[number]
        parents.append(distinct[call_order] // width)
        labels.append(distinct[call_order] % width)
        examples.append(events[first[call_order]])
        starts.append(count)
        count += distinct.size
    if bounds.size > MAX_DEPTH:
        node = node[tree.nearest_or_self(depth < MAX_DEPTH)]
    # Kind and lane of a node are those of its first event; threads have none.
    example = np.concatenate([np.zeros(0, dtype=np.int64), *examples])
    kind = _KIND_BY_CATEGORY_CODE[get_event_column(trace, "category")[tree.row[example]]]
    if example.size:
        kind[names.str.starts_with(MODULE).to_numpy()[name_of[example]]] = KINDS.index("module")
    return CallTree(
        node,
        np.concatenate(parents),
        np.concatenate(labels),
        np.concatenate([np.full(lanes, THREAD), kind]),
        np.concatenate([np.arange(lanes), tree.lane[example]]),
        (*starts, count),
        names,
        name_of,
    )


_TIMES = ("calls", "self_ns", "total_ns", "self_device_ns", "device_ns")
FRAMES = build_schema(
    "rank node parent depth lane kind name file line", *_TIMES, {"kind": pl.Enum(KINDS)}
)
FUNCTIONS = build_schema(
    "rank kind name file line",
    *_TIMES,
    "mean_self_ns min_self_ns max_self_ns step_count",
    {"kind": pl.Enum(KINDS)},
)


@dataclass(frozen=True)
class Flame(Result):
    """The folded call stacks of host threads.

    Attributes:
        frames: One row per path; parents before their children, a thread is the root of its calls.
            `calls` counts the events of the path, `self_ns` the time in which one of them is
            innermost, `total_ns` that of the path and all below. `self_device_ns` is the summed
            duration of the GPU work launched right there, `device_ns` there and below. `name` of a
            Python frame is the function, with `file` and `line`; null for others.
        functions: The same summed by name wherever it is called from; `total_ns` and `device_ns`
            count a function that calls itself once. `mean_self_ns`, `min_self_ns`, `max_self_ns`
            are per whole step; null without steps.
        busy_ns: Sum of all `self_ns`: the time in which anything is recorded on the threads.
        gpu_work_ns: Summed duration of the GPU work of the chosen steps.
        unattributed_device_ns: The part of it that no host event is known to have launched; with
            all `self_device_ns` it is `gpu_work_ns`.
    """

    frames: pl.DataFrame
    functions: pl.DataFrame
    busy_ns: int
    gpu_work_ns: int
    unattributed_device_ns: int


def flame(
    run: Trace | Session, steps: tuple[int, int] | None = None, lane: int | None = None
) -> Flame:
    """Folds the call stacks: Python frames, modules, operators, annotations and runtime calls in
    one tree.

    Args:
        run: One process's trace, or a session (its ranks come one after the other, with consecutive
            node numbers).
        steps: First and last step to count, both included; None for all time. Host time is cut at
            the steps' bounds, calls count where they start, GPU work where it was launched.
        lane: Only this thread; None for all.
    """
    if isinstance(run, Trace):
        return _build_trace_flame(run, steps, lane)
    parts = [_build_trace_flame(trace, steps, lane) for trace in run.traces]
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


def _build_trace_flame(trace: Trace, steps: tuple[int, int] | None, lane: int | None) -> Flame:
    tree, host_pieces, folded, work = (
        build_forest(trace),
        build_host_pieces(trace),
        call_tree(trace),
        attribute_to_launches(trace),
    )
    called, launched = np.arange(tree.row.size), work.launch_position >= 0
    counted = np.ones(host_pieces.ns.size, dtype=np.bool_)
    selected_work = np.ones(work.launch_position.size, dtype=np.bool_)
    if steps is not None:
        low, high = steps
        step_of = get_event_column(trace, "step", int(NO_STEP))
        work_step, event_step = step_of[find_gpu_event_rows(trace)], step_of[tree.row]
        counted &= (host_pieces.step >= low) & (host_pieces.step <= high)
        called = called[(event_step >= low) & (event_step <= high)]
        selected_work = (work_step >= low) & (work_step <= high)
    if lane is not None:
        counted &= host_pieces.lane == lane
        called = called[tree.lane[called] == lane]
        launched &= np.append(tree.lane, -1)[work.launch_position] == lane
    rows, work_rows = np.flatnonzero(counted), np.flatnonzero(launched & selected_work)
    owner, ns, step = host_pieces.owner[rows], host_pieces.ns[rows], host_pieces.step[rows]
    self_ns = _add_at_index(folded.parent.size, folded.node[owner], ns)
    device = _add_at_index(
        folded.parent.size,
        folded.node[work.launch_position[work_rows]],
        work.duration_ns[work_rows],
    )
    calls = np.bincount(folded.node[called], minlength=folded.parent.size)
    total, device_total = folded.totals(self_ns), folded.totals(device)
    values = dict(zip(_TIMES, (calls, self_ns, total, device, device_total), strict=True))
    used = (folded.totals(calls) > 0) | (total > 0) | (device_total > 0)
    # The last is that of threads
    frame_places = parse_frame_places(pl.concat([folded.names.cast(pl.String), pl.Series([""])]))
    gpu_work = int(work.duration_ns[selected_work].sum())
    # Own time of each name in a usual step.
    rows = np.flatnonzero(step != NO_STEP)
    numbers = np.sort(trace.steps["step"].cast(pl.Int64).to_numpy())
    step_index = (
        np.searchsorted(numbers, step[rows])
        if numbers.size > 1
        else np.zeros(rows.size, dtype=np.int64)
    )
    width = max(numbers.size, 1)
    size = len(folded.names) * width
    key = folded.name_of[owner[rows]] * width + step_index
    sums, used_keys = (
        _add_at_index(size, key, ns[rows]),
        np.flatnonzero(np.bincount(key, minlength=size)),
    )
    number = numbers[used_keys % width] if numbers.size else used_keys
    frame = pl.DataFrame({"label": used_keys // width, "step": number, "self_ns": sums[used_keys]})
    typical = summarize_per_step(
        frame.cast({"step": pl.Int32, "label": pl.Int64}),
        ["label"],
        ["self_ns"],
        select_whole_steps(trace),
    )
    return Flame(
        _build_frames(trace, folded, used, values, frame_places),
        _summarize_functions(trace, folded, values, frame_places, typical),
        int(self_ns.sum()),
        gpu_work,
        gpu_work - int(device.sum()),
    )


def _add_at_index(size: int, index: Ints, values: Ints) -> Ints:
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, values)
    return total


def list_thread_names(trace: Trace) -> pl.Series:
    """Returns the label of each lane: its name, with process and thread where several have one
    name; shape (lanes,).
    """
    qualified = pl.format("{} ({}, {})", "name", "process", "thread")
    return trace.lanes.select(
        pl.when(pl.len().over("name", "kind") > 1).then(qualified).otherwise("name").alias("name")
    )["name"]


def _build_frames(
    trace: Trace, folded: CallTree, used: Bools, values: dict[str, Ints], frame_places: pl.DataFrame
) -> pl.DataFrame:
    rows = np.flatnonzero(used)
    number = np.cumsum(used) - 1
    parent = folded.parent[rows]
    depth = np.searchsorted(np.array(folded.level), rows, side="right") - 1
    row_places = frame_places[pl.Series(folded.label[rows] % frame_places.height, dtype=pl.UInt32)]
    threads = list_thread_names(trace)[pl.Series(folded.lane[rows], dtype=pl.UInt32)]
    is_thread = pl.Series(folded.kind[rows] == THREAD)
    return pl.DataFrame(
        {
            "rank": pl.Series([trace.rank] * rows.size, dtype=pl.Int32),
            "node": np.arange(rows.size),
            "parent": pl.Series(np.where(parent >= 0, number[np.maximum(parent, 0)], -1)).replace(
                -1, None
            ),
            "depth": depth,
            "lane": folded.lane[rows],
            "kind": pl.Series(KINDS)[folded.kind[rows]],
            "name": threads.zip_with(is_thread, row_places["name"]),
            "file": row_places["file"],
            "line": row_places["line"],
            **{name: column[rows] for name, column in values.items()},
        }
    ).pipe(cast_to_schema, FRAMES)


def _summarize_functions(
    trace: Trace,
    folded: CallTree,
    values: dict[str, Ints],
    frame_places: pl.DataFrame,
    typical: pl.DataFrame,
) -> pl.DataFrame:
    """Returns sums by name; of nested calls of one name only the outermost counts to the totals."""
    top = np.zeros(folded.parent.size, dtype=np.bool_)
    if folded.node.size:
        top[folded.node] = build_forest(trace).topmost_of_kind(folded.name_of)
    events = folded.label >= 0
    nodes = pl.DataFrame({"label": folded.label, "top": top, "kind": folded.kind, **values}).filter(
        pl.Series(events)
    )
    once = [pl.col(name).filter("top").sum() for name in ("total_ns", "device_ns")]
    summed = (
        nodes.lazy()
        .group_by("label")
        .agg(pl.col("kind").first(), pl.col("calls", "self_ns", "self_device_ns").sum(), *once)
        .filter((pl.col("calls") > 0) | (pl.col("self_ns") > 0) | (pl.col("device_ns") > 0))
        .collect()
    )
    label_places = frame_places[summed["label"].cast(pl.UInt32)]
    return (
        pl.concat([summed, label_places], how="horizontal")
        .join(typical, on="label", how="left")
        .with_columns(
            pl.lit(trace.rank, dtype=pl.Int32).alias("rank"), kind=pl.Series(KINDS)[summed["kind"]]
        )
        .pipe(cast_to_schema, FUNCTIONS)
        .sort(
            ["self_ns", "total_ns", "name", "file", "line"],
            descending=[True, True, False, False, False],
        )
    )
