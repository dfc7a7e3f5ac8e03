"""Names of blocks: the scope and op that allocated each, found from the host events."""

import re
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import Forest, build_forest
from traceloom.analyze.autograd import match_backward_ops
from traceloom.analyze.host_events import (
    MODULE_PREFIX,
    SCOPE_PREFIX,
    STEP_MARK_PATTERN,
    classify_events,
)
from traceloom.analyze.memory_blocks import Blocks, build_blocks
from traceloom.analyze.names import build_vocabulary
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, get_event_column
from traceloom.trace.batch import cache_per_trace
from traceloom.trace.trace import Trace

NO_OP = "none"
UNKNOWN_BACKWARD = "backward.unknown"
PYTHON_MODULE = "nn.Module: "
_WRAPPER = r"^nn\.Module: (?:(?:Distributed|FullySharded)?DataParallel|CheckpointWrapper|OffloadWrapper)_\d+$"
# Their annotation of the whole call
_WRAPPER_ANNOTATION = r"^(?:Distributed|FullySharded)?DataParallel\.forward$"
_PREFIXES = (SCOPE_PREFIX, MODULE_PREFIX)
_EVALUATE_PREFIX = "autograd::engine::evaluate_function: "
_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
_OPTIMIZER_PATTERN = re.compile(r"^Optimizer\.\w+#(?=.)")
_COMPILED_PATTERN = r"^(Torch-Compiled Region|CompiledFunction|## Call CompiledFxGraph)"
_MAX_DEPTH = 256


class EventScopes(Struct, frozen=True):
    """Scope and op of every host event; arrays of shape (host events,), in the forest's order.

    Attributes:
        paths: Distinct scope paths, dotted; number 0 is the empty one.
        modules: For each of them the path of its innermost module; empty outside modules.
        path: Number of the path of the innermost scope at or above each event (of its forward op,
            in a backward node that is known).
        labels: Distinct names of ops, without namespace; number 0 is `none`.
        label: Number of the outermost op inside that scope, at or above each event.
        op: Position of that op; -1 for none.
        backward: Whether the event is part of the backward pass.
        compiled: Whether the event is part of compiled code, where no modules and scopes open.
        unknown_backward: How many backward nodes belong to no known forward op.
    """

    paths: list[str]
    modules: list[str]
    path: Ints
    labels: list[str]
    label: Ints
    op: Ints
    backward: Bools
    compiled: Bools
    unknown_backward: int


def find_scopes(trace: Trace, tree: Forest, *, full_op_names: bool = False) -> EventScopes:
    vocabulary, is_op = build_vocabulary(trace), classify_events(trace).op
    code = vocabulary.code[tree.row]
    # Scopes: Traceloom's own, modules, and regions that the user or PyTorch annotates.
    no_scope = gather_rows(
        vocabulary.matching(STEP_MARK_PATTERN) | vocabulary.matching(_WRAPPER_ANNOTATION), code
    )
    annotation = get_event_column(trace, "category")[tree.row] == vocab.CATEGORIES.index(
        vocab.ANNOTATION
    )
    is_own_scope = gather_rows(vocabulary.names.str.starts_with(SCOPE_PREFIX).to_numpy(), code)
    is_scope = is_own_scope | find_module_calls(trace, tree) | (annotation & ~no_scope)
    scope = tree.nearest_or_self(is_scope)
    paths, modules, path_of = _build_paths(trace, tree, is_scope)
    path = np.append(path_of, 0)[scope]
    is_node = gather_rows(vocabulary.names.str.starts_with(_EVALUATE_PREFIX).to_numpy(), code)
    # A kind of its own for each event that is not an op
    own_kinds = np.arange(is_op.size) + is_op.size + 1
    # No other op between them and the scope
    top_ops = is_op & tree.topmost_of_kind(np.where(is_op, scope + 1, own_kinds))
    top = top_ops | is_node  # a backward pass may run inside a node of another
    op = tree.nearest_or_self(top)
    op = np.where((op >= 0) & (scope[op] == scope), op, -1)
    # Names of ops as they are in identifiers.
    base_names = vocabulary.names.str.strip_prefix(_EVALUATE_PREFIX)
    if not full_op_names:
        base_names = base_names.str.replace(r"^(?:[A-Za-z_]\w*::)+", "")
    distinct = base_names.unique(maintain_order=True)
    number = base_names.replace_strict(
        distinct, pl.int_range(1, distinct.len() + 1, eager=True)
    ).to_numpy()
    label = np.where(op >= 0, number.astype(np.int64)[code][op], 0)
    node, home, unknown = _find_backward_nodes(trace, tree, is_node)
    backward = node >= 0
    has_home = home >= 0
    inner = has_home & (scope > node)  # a scope opened inside the backward node: it is recomputed
    paths, modules, path = _merge_recomputed_paths(
        paths, modules, path, np.where(inner, path[home], -1)
    )
    source = np.where(has_home & ~inner, home, np.arange(home.size))
    # The forward op may itself be one that a checkpoint has run again
    for _ in range(_MAX_DEPTH.bit_length()):
        source = source[source]
    path = path[source]
    if unknown:
        paths, modules = [*paths, UNKNOWN_BACKWARD], [*modules, ""]
        path = np.where(backward & ~has_home, len(paths) - 1, path)
    compiled = tree.nearest_or_self(gather_rows(vocabulary.matching(_COMPILED_PATTERN), code)) >= 0
    labels = [NO_OP, *distinct.to_list()]
    return EventScopes(paths, modules, path, labels, label, op, backward, compiled, unknown)


def find_module_calls(trace: Trace, tree: Forest) -> Bools:
    """Returns which events are calls of modules: the scopes that `record --memory` opens, else
    Python frames.

    Frames of wrappers that only pass calls on (`DistributedDataParallel`) do not count.
    """
    vocabulary = build_vocabulary(trace)
    code = vocabulary.code[tree.row]
    annotated: Bools = gather_rows(vocabulary.names.str.starts_with(MODULE_PREFIX).to_numpy(), code)
    if annotated.any():
        return annotated
    python = get_event_column(trace, "category")[tree.row] == vocab.CATEGORIES.index(vocab.PYTHON)
    framed = vocabulary.names.str.starts_with(PYTHON_MODULE).to_numpy() & ~vocabulary.matching(
        _WRAPPER
    )
    frames: Bools = python & gather_rows(framed, code)
    return frames


def _build_paths(trace: Trace, tree: Forest, is_scope: Bools) -> tuple[list[str], list[str], Ints]:
    """Returns the distinct dotted paths, the path of the innermost module of each, and the number
    of each scope's path.

    0 means no scope.
    """
    vocabulary = build_vocabulary(trace)
    code = vocabulary.code[tree.row].astype(np.int64)
    outer_scope = tree.nearest(is_scope)
    out = np.zeros(is_scope.size, dtype=np.int64)
    # Own: the recorded name of the path's last scope
    paths, modules, recorded_names = (
        [""],
        [""],
        [""],
    )
    path_numbers: dict[tuple[int, int], int] = {}
    level = np.flatnonzero(is_scope & (outer_scope < 0))
    for _ in range(_MAX_DEPTH):
        if not level.size:
            break
        outer = np.where(outer_scope[level] >= 0, out[outer_scope[level]], 0)
        pair, number = np.unique(np.stack([outer, code[level]]), axis=1, return_inverse=True)
        pair_paths = np.empty(pair.shape[1], dtype=np.int64)
        for k, (outer_path, name) in enumerate(pair.T.tolist()):
            if (outer_path, name) not in path_numbers:
                recorded = str(vocabulary.names[name])
                path_numbers[outer_path, name] = len(paths)
                # One of Traceloom's own scopes already has the names of its enclosing own scopes.
                dotted, outer_name = (
                    next(
                        (text[len(prefix) :] for prefix in _PREFIXES if text.startswith(prefix)),
                        None,
                    )
                    for text in (recorded, recorded_names[outer_path])
                )
                if dotted is None:  # `Optimizer.step#Adam.step` becomes `Adam.step`
                    last = _OPTIMIZER_PATTERN.sub("", recorded.removeprefix(PYTHON_MODULE))
                else:
                    last = (
                        dotted.removeprefix(f"{outer_name}.") if outer_name is not None else dotted
                    )
                # Of the innermost module: without the scopes between them
                module = modules[outer_path]
                if recorded.startswith((MODULE_PREFIX, PYTHON_MODULE)):
                    module = f"{module}.{last}" if module else last
                modules.append(module)
                paths.append(f"{paths[outer_path]}.{last}" if paths[outer_path] else last)
                recorded_names.append(recorded)
            pair_paths[k] = path_numbers[outer_path, name]
        out[level] = pair_paths[number.reshape(-1)]
        in_level = np.zeros(is_scope.size + 1, dtype=np.bool_)
        in_level[level] = True
        level = np.flatnonzero(is_scope & in_level[outer_scope])
    return paths, modules, out


def _merge_recomputed_paths(
    paths: list[str], modules: list[str], path: Ints, home: Ints
) -> tuple[list[str], list[str], Ints]:
    """Returns the paths of recomputation in backward nodes, as they are in the forward pass.

    In the backward node only modules enclose it. The path of the node's forward op gives what
    enclosed these in the forward pass: up to where it names the same outermost module.
    """
    rows = np.flatnonzero(home >= 0)
    if not rows.size:
        return paths, modules, path
    pairs, number = np.unique(np.stack([home[rows], path[rows]]), axis=1, return_inverse=True)
    paths, modules = list(paths), list(modules)
    path_numbers = {text: k for k, text in reversed(list(enumerate(paths)))}
    new = []
    for outer, inner in pairs.T.tolist():
        outer_parts, parts = paths[outer].split("."), paths[inner].split(".")
        index = outer_parts.index(parts[0]) if parts[0] in outer_parts else 0
        text = ".".join([*outer_parts[:index], *parts])
        if text not in path_numbers:
            path_numbers[text] = len(paths)
            paths.append(text)
            modules.append(modules[inner])
        new.append(path_numbers[text])
    out = path.copy()
    out[rows] = np.array(new)[number.reshape(-1)]
    return paths, modules, out


def _find_backward_nodes(trace: Trace, tree: Forest, node: Bools) -> tuple[Ints, Ints, int]:
    """Returns the backward node (position) that each event is part of, -1 for none; its forward op;
    and how many nodes lack one.

    A node that only adds to a gradient inherits from the node before it on its thread, which made
    that gradient: autograd runs it at once.
    """
    vocabulary = build_vocabulary(trace)
    code = vocabulary.code[tree.row]
    joined = match_backward_ops(trace)
    home = np.full(node.size, -1, dtype=np.int64)
    if joined is not None:
        home[joined.backward] = joined.forward
        # A node with hooks (as FSDP's) does not carry the number itself, but the call of the
        # function in it does.
        inner = np.flatnonzero((home >= 0) & ~node & (tree.parent >= 0))[::-1]
        inner = inner[node[tree.parent[inner]] & (home[tree.parent[inner]] < 0)]
        home[tree.parent[inner]] = home[inner]
        home = _match_nested_nodes(trace, tree, node, home)
    first = tree.nearest_or_self(node)
    nodes = np.flatnonzero(node)
    accumulates = gather_rows(vocabulary.names.str.ends_with(_ACCUMULATE_GRAD).to_numpy(), code)[
        nodes
    ]
    inherits = accumulates & (home[nodes] < 0)
    source = np.where(inherits, -1, np.arange(nodes.size))
    source = np.maximum.accumulate(source)
    same = (source >= 0) & (tree.lane[nodes[np.maximum(source, 0)]] == tree.lane[nodes])
    home[nodes] = np.where(inherits & same, home[nodes[np.maximum(source, 0)]], home[nodes])
    backward = first >= 0
    # A backward op may be recorded without the engine's span around it.
    is_standalone = (home >= 0) & ~backward
    owner = tree.nearest_or_self(node | is_standalone)
    return owner, np.where(owner >= 0, np.append(home, -1)[owner], -1), int((home[nodes] < 0).sum())


def _match_nested_nodes(trace: Trace, tree: Forest, node: Bools, home: Ints) -> Ints:
    """Returns forward ops of nodes inside other nodes: by sequence number, among the ops that the
    outer node has run again.

    A backward pass runs inside a node of another one where checkpointing is reentrant.
    """
    nested = np.flatnonzero(node & (home < 0) & (tree.nearest(node) >= 0))
    sequence = trace.events["sequence"].fill_null(-1).to_numpy()[tree.row]
    nested = nested[sequence[nested] >= 0]
    if not nested.size:
        return home
    reruns = np.flatnonzero((sequence >= 0) & ~node & (tree.nearest(node) >= 0))
    forward = trace.events["forward_thread"].fill_null(0).to_numpy()[tree.row[reruns]] == 0
    reruns = reruns[forward]
    if not reruns.size:
        return home
    # The last before the node: threads count separately, and come one after the other in the
    # forest.
    numbers, code = np.unique(sequence[reruns], return_inverse=True)
    number_index = np.minimum(np.searchsorted(numbers, sequence[nested]), numbers.size - 1)
    keys = np.sort(code * node.size + reruns)
    last = np.searchsorted(keys, number_index * node.size + nested) - 1
    matched = (
        (numbers[number_index] == sequence[nested])
        & (last >= 0)
        & (keys[last] // node.size == number_index)
    )
    out = home.copy()
    out[nested[matched]] = keys[last[matched]] % node.size
    return out


_PIECE_ROWS = 1 << 20
_POSITION_TYPE: Any = np.int32  # of positions that are kept: half of the memory


def find_innermost_events(trace: Trace, tree: Forest, rows: pl.DataFrame) -> Ints:
    """Returns the position (in the forest) of the innermost host event open at each row's time on
    its thread; -1 for none.

    Args:
        trace: The trace.
        tree: Its forest.
        rows: time_ns, process, thread.

    Returns:
        Short integers, shape (rows,); found piece by piece, because there may be many times more
        rows than events.
    """
    out = np.empty(rows.height, dtype=_POSITION_TYPE)
    for low in range(0, rows.height, _PIECE_ROWS):
        batch = rows.slice(low, _PIECE_ROWS)
        lane, time = _find_lanes(trace, batch), batch["time_ns"].to_numpy()
        position = np.full(time.size, -1, dtype=np.int64)
        for number in np.unique(lane[lane >= 0]).tolist():
            first, last = np.searchsorted(tree.lane, [number, number + 1])
            on_lane = np.flatnonzero(lane == number)
            candidates = (
                first + np.searchsorted(tree.start_ns[first:last], time[on_lane], side="right") - 1
            )
            position[on_lane] = np.where(candidates >= first, candidates, -1)
        todo = np.flatnonzero(position >= 0)
        while todo.size:
            todo = todo[tree.end_ns[position[todo]] <= time[todo]]
            position[todo] = tree.parent[position[todo]]
            todo = todo[position[todo] >= 0]
        out[low : low + _PIECE_ROWS] = position
    return out


def _find_lanes(trace: Trace, rows: pl.DataFrame) -> Ints:
    """Returns the host lane of each row's thread; -1 where nothing of that thread was recorded."""
    lanes = trace.lanes.filter(pl.col("kind") == "host").select(
        pl.col("process", "thread").cast(pl.Int64, strict=False), "lane"
    )
    threads = rows.select("process", "thread").unique()
    thread_lanes = threads.join(lanes, on=["process", "thread"], how="left", nulls_equal=True)
    if thread_lanes.height == 1:
        lane = thread_lanes["lane"][0]
        return np.full(rows.height, -1 if lane is None else lane, dtype=np.int64)
    joined = rows.select("process", "thread").join(
        lanes.unique(["process", "thread"]),
        on=["process", "thread"],
        how="left",
        maintain_order="left",
        nulls_equal=True,
    )
    return joined["lane"].cast(pl.Int64).fill_null(-1).to_numpy()


MAX_CACHED_ALLOCATIONS = 200_000
"""Names are cached up to this number of allocations: the section and the findings of one report
both need them.
"""


class NamedBlocks(Struct, frozen=True):
    """Blocks with their names; arrays of shape (blocks,).

    Attributes:
        blocks: The blocks.
        places: Scopes and ops of the host events.
        position: Innermost host event (in the forest) at the allocation; -1 for none or unknown.
        path: Number of the scope path (`places.paths`).
        label: Number of the op's name (`places.labels`).
        counter: Index of the invocation of that op in that scope path, from 1; 0 for blocks from
            before.
        in_step: The same count, restarting with every step (events outside all steps count
            together).
        extra: Index of the allocation within that invocation, from 1.
        backward: Whether the backward pass made it.
        freed: Innermost host event at the free; -1 for none or unknown.
    """

    blocks: Blocks
    places: EventScopes
    position: Ints
    path: Ints
    label: Ints
    counter: Ints
    in_step: Ints
    extra: Ints
    backward: Bools
    freed: Ints

    def names(self, rows: Ints | None = None, *, sites: bool = False) -> pl.Series:
        """Returns the identifiers `scope.op.counter` (`#2`, `#3` for further allocations of one
        invocation) of some blocks.

        With `sites` the counter restarts with every step, so that the same line of code has the
        same name in each.
        """
        rows = np.arange(self.path.size) if rows is None else rows
        paths, labels = (
            pl.Series(self.places.paths, dtype=pl.String),
            pl.Series(self.places.labels, dtype=pl.String),
        )
        frame = pl.DataFrame(
            {
                "path": paths.gather(self.path[rows]),
                "label": labels.gather(self.label[rows]),
                "counter": (self.in_step if sites else self.counter)[rows],
                "extra": self.extra[rows],
            }
        )
        dotted = pl.when(pl.col("path") == "").then(pl.lit("")).otherwise(pl.col("path") + ".")
        suffix = pl.when(pl.col("extra") > 1).then(pl.format("#{}", "extra")).otherwise(pl.lit(""))
        return frame.select(
            pl.concat_str(dotted, "label", pl.lit("."), pl.col("counter").cast(pl.String), suffix)
        ).to_series()


def name_blocks(trace: Trace, *, full_op_names: bool = False) -> NamedBlocks:
    """Names every block of the trace.

    The counter counts invocations of an op in a scope path over the whole recording, including
    those that allocate nothing; allocations outside of any op count one by one.
    """
    if full_op_names or trace.allocations.height > MAX_CACHED_ALLOCATIONS:
        return _build_named_blocks(trace, full_op_names=full_op_names)
    return _cached_named_blocks(trace)


def _build_named_blocks(trace: Trace, *, full_op_names: bool = False) -> NamedBlocks:
    tree = build_forest(trace)
    all_blocks = build_blocks(trace)
    host_places = find_scopes(trace, tree, full_op_names=full_op_names)
    positions = find_innermost_events(
        trace, tree, trace.allocations.select("time_ns", "process", "thread")
    )
    # Blocks from before have -1; where nothing ends a block, it takes the entry after the last row.
    positions = np.append(positions, _POSITION_TYPE(-1))
    position, freed = positions[all_blocks.made], positions[all_blocks.ended]
    del positions
    path = np.append(host_places.path, 0).astype(_POSITION_TYPE)[position]
    label = np.append(host_places.label, 0).astype(_POSITION_TYPE)[position]
    op = np.append(host_places.op, -1).astype(_POSITION_TYPE)[position]
    extra = np.ones(path.size, dtype=_POSITION_TYPE)
    in_op = np.flatnonzero(op >= 0)
    extra[in_op] = count_occurrences(op[in_op])
    del in_op
    without_op = np.flatnonzero((op < 0) & (all_blocks.made >= 0))
    step = (
        trace.allocations["step"]
        .gather(all_blocks.made[without_op])
        .fill_null(-1)
        .cast(pl.Int64)
        .to_numpy()
    )
    # The index of each counted op among those of its label in its path, by start.
    ops = np.flatnonzero(host_places.op == np.arange(host_places.op.size))
    ops = ops[np.argsort(tree.start_ns[ops], kind="stable")]
    keys = host_places.path[ops] * len(host_places.labels) + host_places.label[ops]
    op_step = trace.events["step"].fill_null(-1).cast(pl.Int64).to_numpy()[tree.row[ops]]
    different = len(host_places.labels) * len(host_places.paths)
    counters = []
    for restarts in (False, True):
        # The last is that of no op
        invocation = np.zeros(host_places.op.size + 1, dtype=_POSITION_TYPE)
        invocation[ops] = count_occurrences(keys + (op_step + 1) * different * restarts)
        counter = invocation[op]
        counter[without_op] = count_occurrences(
            path[without_op] + (step + 1) * len(host_places.paths) * restarts
        )
        counter[all_blocks.made < 0] = 0
        counters.append(counter)
    backward = np.append(host_places.backward, False)[position]
    return NamedBlocks(
        all_blocks,
        host_places,
        position,
        path,
        label,
        counters[0],
        counters[1],
        extra,
        backward,
        freed,
    )


def count_occurrences(keys: Ints) -> Ints:
    """Returns 1, 2, 3, ... for the occurrences of each key, in order."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: keys.size])
    out = np.empty(keys.size, dtype=np.int64)
    out[order] = np.arange(keys.size) - np.repeat(first, np.diff(np.append(first, keys.size))) + 1
    return out


_cached_named_blocks = cache_per_trace(_build_named_blocks)
