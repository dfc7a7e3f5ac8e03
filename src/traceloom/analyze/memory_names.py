"""Scope and op of each block."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.autograd import backward_of
from traceloom.analyze.host_events import MODULE_PREFIX, SCOPE_PREFIX, STEP_MARK, classify_events
from traceloom.analyze.memory_blocks import Blocks, blocks
from traceloom.analyze.names import vocabulary
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import column, gather_rows
from traceloom.trace.batch import per_trace
from traceloom.trace.trace import Trace

NO_OP = "none"
UNKNOWN_BACKWARD = "backward.unknown"
PYTHON_MODULE = "nn.Module: "
_WRAPPER = r"^nn\.Module: (?:(?:Distributed|FullySharded)?DataParallel|CheckpointWrapper|OffloadWrapper)_\d+$"
_WRAPPERS_OWN = r"^(?:Distributed|FullySharded)?DataParallel\.forward$"  # their annotation of the whole call
_PREFIXES = (SCOPE_PREFIX, MODULE_PREFIX)
_EVALUATE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_OPTIMIZER = re.compile(r"^Optimizer\.\w+#(?=.)")
_COMPILED = r"^(Torch-Compiled Region|CompiledFunction|## Call CompiledFxGraph)"
_DEEPEST = 256


class EventScopes(Struct, frozen=True):
    """What every host event is part of; arrays of shape (host events,), in the forest's order.

    Attributes:
        paths: Distinct scope paths, dotted; number 0 is the empty one.
        modules: For each of them the path of its innermost module; empty outside modules.
        path: Number of the path of the innermost scope at or above each event (of its forward op, in a backward node
            that is known).
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


def places(trace: Trace, tree: Forest, *, full_op_names: bool = False) -> EventScopes:
    """Find scope and op of every host event."""
    words, is_op = vocabulary(trace), classify_events(trace).op
    code = words.code[tree.row]
    # scopes: ours, modules, and regions that the user or PyTorch annotates
    no_scope = gather_rows(words.matching(STEP_MARK) | words.matching(_WRAPPERS_OWN), code)
    annotation = column(trace, "category")[tree.row] == cat.CATEGORIES.index(cat.ANNOTATION)
    ours = gather_rows(words.names.str.starts_with(SCOPE_PREFIX).to_numpy(), code)
    is_scope = ours | module_calls(trace, tree) | (annotation & ~no_scope)
    scope = tree.nearest_or_self(is_scope)
    paths, modules, path_of = _paths(trace, tree, is_scope)
    path = np.append(path_of, 0)[scope]
    is_node = gather_rows(words.names.str.starts_with(_EVALUATE).to_numpy(), code)
    alone = np.arange(is_op.size) + is_op.size + 1  # kinds of their own, for what is no op
    top_ops = is_op & tree.topmost_of_kind(np.where(is_op, scope + 1, alone))  # no other op between them and the scope
    top = top_ops | is_node  # a backward pass may run inside a node of another
    op = tree.nearest_or_self(top)
    op = np.where((op >= 0) & (scope[op] == scope), op, -1)
    # names of ops as they are in identifiers
    plain = words.names.str.strip_prefix(_EVALUATE)
    if not full_op_names:
        plain = plain.str.replace(r"^(?:[A-Za-z_]\w*::)+", "")
    distinct = plain.unique(maintain_order=True)
    number = plain.replace_strict(distinct, pl.int_range(1, distinct.len() + 1, eager=True)).to_numpy()
    label = np.where(op >= 0, number.astype(np.int64)[code][op], 0)
    node, home, unknown = _backward(trace, tree, is_node)
    backward = node >= 0
    has_home = home >= 0
    inner = has_home & (scope > node)  # a scope opened inside the backward node: what it recomputes
    paths, modules, path = _merged(paths, modules, path, np.where(inner, path[home], -1))
    source = np.where(has_home & ~inner, home, np.arange(home.size))
    for _ in range(_DEEPEST.bit_length()):  # the forward op may itself be one that a checkpoint has run again
        source = source[source]
    path = path[source]
    if unknown:
        paths, modules = [*paths, UNKNOWN_BACKWARD], [*modules, ""]
        path = np.where(backward & ~has_home, len(paths) - 1, path)
    compiled = tree.nearest_or_self(gather_rows(words.matching(_COMPILED), code)) >= 0
    labels = [NO_OP, *distinct.to_list()]
    return EventScopes(paths, modules, path, labels, label, op, backward, compiled, unknown)


def module_calls(trace: Trace, tree: Forest) -> Bools:
    """Which events are calls of modules: the scopes that `record --memory` opens, else Python frames.

    Frames of wrappers that only pass calls on (`DistributedDataParallel`) do not count.
    """
    words = vocabulary(trace)
    code = words.code[tree.row]
    annotated: Bools = gather_rows(words.names.str.starts_with(MODULE_PREFIX).to_numpy(), code)
    if annotated.any():
        return annotated
    python = column(trace, "category")[tree.row] == cat.CATEGORIES.index(cat.PYTHON)
    framed = words.names.str.starts_with(PYTHON_MODULE).to_numpy() & ~words.matching(_WRAPPER)
    frames: Bools = python & gather_rows(framed, code)
    return frames


def _paths(trace: Trace, tree: Forest, is_scope: Bools) -> tuple[list[str], list[str], Ints]:
    """The distinct dotted paths, the path of the innermost module of each, and the number of each scope's path.

    0 stands where there is no scope.
    """
    words = vocabulary(trace)
    code = words.code[tree.row].astype(np.int64)
    above = tree.nearest(is_scope)
    out = np.zeros(is_scope.size, dtype=np.int64)
    paths, modules, own = [""], [""], [""]  # own: the recorded name of the path's last scope
    path_numbers: dict[tuple[int, int], int] = {}
    level = np.flatnonzero(is_scope & (above < 0))
    for _ in range(_DEEPEST):
        if not level.size:
            break
        outer = np.where(above[level] >= 0, out[above[level]], 0)
        pair, number = np.unique(np.stack([outer, code[level]]), axis=1, return_inverse=True)
        turn = np.empty(pair.shape[1], dtype=np.int64)
        for k, (at, name) in enumerate(pair.T.tolist()):
            if (at, name) not in path_numbers:
                recorded = str(words.names[name])
                path_numbers[at, name] = len(paths)
                # One of Traceloom's own scopes already carries the names of its own scopes around it.
                dotted, around = (
                    next((text[len(prefix) :] for prefix in _PREFIXES if text.startswith(prefix)), None)
                    for text in (recorded, own[at])
                )
                if dotted is None:  # `Optimizer.step#Adam.step` is `Adam.step`
                    last = _OPTIMIZER.sub("", recorded.removeprefix(PYTHON_MODULE))
                else:
                    last = dotted.removeprefix(f"{around}.") if around is not None else dotted
                module = modules[at]  # of the innermost module: without the scopes between them
                if recorded.startswith((MODULE_PREFIX, PYTHON_MODULE)):
                    module = f"{module}.{last}" if module else last
                modules.append(module)
                paths.append(f"{paths[at]}.{last}" if paths[at] else last)
                own.append(recorded)
            turn[k] = path_numbers[at, name]
        out[level] = turn[number.reshape(-1)]
        inside = np.zeros(is_scope.size + 1, dtype=np.bool_)
        inside[level] = True
        level = np.flatnonzero(is_scope & inside[above])
    return paths, modules, out


def _merged(paths: list[str], modules: list[str], path: Ints, home: Ints) -> tuple[list[str], list[str], Ints]:
    """The paths of what a backward node recomputes, as they are in the forward pass.

    There only the modules stand around it. The path of the node's forward op says what stood around these: up to where
    it names the same outermost module.
    """
    rows = np.flatnonzero(home >= 0)
    if not rows.size:
        return paths, modules, path
    pairs, number = np.unique(np.stack([home[rows], path[rows]]), axis=1, return_inverse=True)
    paths, modules = list(paths), list(modules)
    path_numbers = {text: k for k, text in reversed(list(enumerate(paths)))}
    new = []
    for outer, inner in pairs.T.tolist():
        around, parts = paths[outer].split("."), paths[inner].split(".")
        at = around.index(parts[0]) if parts[0] in around else 0
        text = ".".join([*around[:at], *parts])
        if text not in path_numbers:
            path_numbers[text] = len(paths)
            paths.append(text)
            modules.append(modules[inner])
        new.append(path_numbers[text])
    out = path.copy()
    out[rows] = np.array(new)[number.reshape(-1)]
    return paths, modules, out


def _backward(trace: Trace, tree: Forest, node: Bools) -> tuple[Ints, Ints, int]:
    """The backward node (position) each event is part of, -1 for none; its forward op; how many nodes lack one.

    A node that only adds to a gradient inherits from the node before it on its thread, which made that gradient:
    autograd runs it at once.
    """
    words = vocabulary(trace)
    code = words.code[tree.row]
    joined = backward_of(trace)
    home = np.full(node.size, -1, dtype=np.int64)
    if joined is not None:
        home[joined.backward] = joined.forward
        # a node with hooks (as FSDP's) does not carry the number itself, but the call of the function in it does
        inner = np.flatnonzero((home >= 0) & ~node & (tree.parent >= 0))[::-1]
        inner = inner[node[tree.parent[inner]] & (home[tree.parent[inner]] < 0)]
        home[tree.parent[inner]] = home[inner]
        home = _of_nested(trace, tree, node, home)
    first = tree.nearest_or_self(node)
    nodes = np.flatnonzero(node)
    accumulates = gather_rows(words.names.str.ends_with(_ACCUMULATE).to_numpy(), code)[nodes]
    inherits = accumulates & (home[nodes] < 0)
    source = np.where(inherits, -1, np.arange(nodes.size))
    source = np.maximum.accumulate(source)
    same = (source >= 0) & (tree.lane[nodes[np.maximum(source, 0)]] == tree.lane[nodes])
    home[nodes] = np.where(inherits & same, home[nodes[np.maximum(source, 0)]], home[nodes])
    backward = first >= 0
    # a backward op may be recorded without the engine's span around it
    alone = (home >= 0) & ~backward
    owner = tree.nearest_or_self(node | alone)
    return owner, np.where(owner >= 0, np.append(home, -1)[owner], -1), int((home[nodes] < 0).sum())


def _of_nested(trace: Trace, tree: Forest, node: Bools, home: Ints) -> Ints:
    """Forward ops of nodes inside other nodes: by sequence number, among the ops that the outer node has run again.

    A backward pass runs inside a node of another one where checkpointing is reentrant.
    """
    inside = np.flatnonzero(node & (home < 0) & (tree.nearest(node) >= 0))
    sequence = trace.events["sequence"].fill_null(-1).to_numpy()[tree.row]
    inside = inside[sequence[inside] >= 0]
    if not inside.size:
        return home
    again = np.flatnonzero((sequence >= 0) & ~node & (tree.nearest(node) >= 0))
    forward = trace.events["forward_thread"].fill_null(0).to_numpy()[tree.row[again]] == 0
    again = again[forward]
    if not again.size:
        return home
    # the last before the node: threads count each for itself, and come one after the other in the forest
    numbers, code = np.unique(sequence[again], return_inverse=True)
    own = np.minimum(np.searchsorted(numbers, sequence[inside]), numbers.size - 1)
    keys = np.sort(code * node.size + again)
    last = np.searchsorted(keys, own * node.size + inside) - 1
    matched = (numbers[own] == sequence[inside]) & (last >= 0) & (keys[last] // node.size == own)
    out = home.copy()
    out[inside[matched]] = keys[last[matched]] % node.size
    return out


_PIECE = 1 << 20
_SHORT: Any = np.int32  # of positions that are kept: half of the memory


def innermost(trace: Trace, tree: Forest, rows: pl.DataFrame) -> Ints:
    """Position (in the forest) of the innermost host event open at each row's time on its thread; -1 for none.

    Args:
        trace: The trace.
        tree: Its forest.
        rows: time_ns, process, thread.

    Returns:
        Short integers, shape (rows,); found piece by piece, because there may be many times more rows than events.
    """
    out = np.empty(rows.height, dtype=_SHORT)
    for low in range(0, rows.height, _PIECE):
        piece = rows.slice(low, _PIECE)
        lane, time = _lanes(trace, piece), piece["time_ns"].to_numpy()
        position = np.full(time.size, -1, dtype=np.int64)
        for number in np.unique(lane[lane >= 0]).tolist():
            first, last = np.searchsorted(tree.lane, [number, number + 1])
            on_lane = np.flatnonzero(lane == number)
            at = first + np.searchsorted(tree.start_ns[first:last], time[on_lane], side="right") - 1
            position[on_lane] = np.where(at >= first, at, -1)
        todo = np.flatnonzero(position >= 0)
        while todo.size:
            todo = todo[tree.end_ns[position[todo]] <= time[todo]]
            position[todo] = tree.parent[position[todo]]
            todo = todo[position[todo] >= 0]
        out[low : low + _PIECE] = position
    return out


def _lanes(trace: Trace, rows: pl.DataFrame) -> Ints:
    """The host lane of each row's thread; -1 where nothing of that thread was recorded."""
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


MOST_REMEMBERED = 200_000
"""Names of so many allocations are kept for whoever asks again: the section and the findings of one report."""


class NamedBlocks(Struct, frozen=True):
    """Blocks with their names; arrays of shape (blocks,).

    Attributes:
        blocks: The blocks.
        places: Scopes and ops of the host events.
        position: Innermost host event (in the forest) at the allocation; -1 for none or unknown.
        path: Number of the scope path (`places.paths`).
        label: Number of the op's name (`places.labels`).
        counter: Which invocation of that op in that scope path it was, from 1; 0 for blocks from before.
        in_step: The same count, restarting with every step (outside all steps: over all of that).
        extra: Which allocation of that invocation, from 1.
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
        """The identifiers `scope.op.counter` (`#2`, `#3` for further allocations of one invocation) of some blocks.

        With `sites` the counter restarts with every step, so that the same line of code has the same name in each.
        """
        rows = np.arange(self.path.size) if rows is None else rows
        paths, labels = pl.Series(self.places.paths, dtype=pl.String), pl.Series(self.places.labels, dtype=pl.String)
        frame = pl.DataFrame(
            {
                "path": paths.gather(self.path[rows]),
                "label": labels.gather(self.label[rows]),
                "counter": (self.in_step if sites else self.counter)[rows],
                "extra": self.extra[rows],
            }
        )
        dotted = pl.when(pl.col("path") == "").then(pl.lit("")).otherwise(pl.col("path") + ".")
        more = pl.when(pl.col("extra") > 1).then(pl.format("#{}", "extra")).otherwise(pl.lit(""))
        return frame.select(
            pl.concat_str(dotted, "label", pl.lit("."), pl.col("counter").cast(pl.String), more)
        ).to_series()


def name_blocks(trace: Trace, *, full_op_names: bool = False) -> NamedBlocks:
    """Name every block of the trace.

    The counter counts invocations of an op in a scope path over the whole recording, also those that allocate
    nothing; what is allocated outside of any op counts one by one.
    """
    if full_op_names or trace.allocations.height > MOST_REMEMBERED:
        return _named(trace, full_op_names=full_op_names)
    return _remembered(trace)


def _named(trace: Trace, *, full_op_names: bool = False) -> NamedBlocks:
    tree = forest(trace)
    all_blocks = blocks(trace)
    host_places = places(trace, tree, full_op_names=full_op_names)
    where = innermost(trace, tree, trace.allocations.select("time_ns", "process", "thread"))
    # blocks from before have -1, and where nothing ends a block, that is what stands behind the last row
    where = np.append(where, _SHORT(-1))
    position, freed = where[all_blocks.made], where[all_blocks.ended]
    del where
    path = np.append(host_places.path, 0).astype(_SHORT)[position]
    label = np.append(host_places.label, 0).astype(_SHORT)[position]
    op = np.append(host_places.op, -1).astype(_SHORT)[position]
    extra = np.ones(path.size, dtype=_SHORT)
    inside = np.flatnonzero(op >= 0)
    extra[inside] = number_occurrences(op[inside])
    del inside
    outside = np.flatnonzero((op < 0) & (all_blocks.made >= 0))
    step = trace.allocations["step"].gather(all_blocks.made[outside]).fill_null(-1).cast(pl.Int64).to_numpy()
    # which occurrence of its label in its path each counted op is, by start
    ops = np.flatnonzero(host_places.op == np.arange(host_places.op.size))
    ops = ops[np.argsort(tree.start_ns[ops], kind="stable")]
    keys = host_places.path[ops] * len(host_places.labels) + host_places.label[ops]
    op_step = trace.events["step"].fill_null(-1).cast(pl.Int64).to_numpy()[tree.row[ops]]
    different = len(host_places.labels) * len(host_places.paths)
    counters = []
    for restarts in (False, True):
        invocation = np.zeros(host_places.op.size + 1, dtype=_SHORT)  # the last is that of no op
        invocation[ops] = number_occurrences(keys + (op_step + 1) * different * restarts)
        counter = invocation[op]
        counter[outside] = number_occurrences(path[outside] + (step + 1) * len(host_places.paths) * restarts)
        counter[all_blocks.made < 0] = 0
        counters.append(counter)
    backward = np.append(host_places.backward, False)[position]
    return NamedBlocks(all_blocks, host_places, position, path, label, counters[0], counters[1], extra, backward, freed)


def number_occurrences(keys: Ints) -> Ints:
    """1, 2, 3, ... for the occurrences of each key, in order."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: keys.size])
    out = np.empty(keys.size, dtype=np.int64)
    out[order] = np.arange(keys.size) - np.repeat(first, np.diff(np.append(first, keys.size))) + 1
    return out


_remembered = per_trace(_named)
