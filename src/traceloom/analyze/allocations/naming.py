"""Names of allocations: `{scope}.{op}.{counter}`, where scope, op and counter come from the events around them."""

from __future__ import annotations

import re

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import Forest
from traceloom.analyze.autograd import backward_of
from traceloom.analyze.phases import MODULE_PREFIX, SCOPE_PREFIX, STEP_MARK, meaning
from traceloom.analyze.vocabulary import vocabulary
from traceloom.array_types import Bools, Ints
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, lookup

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
    words, is_op = vocabulary(trace), meaning(trace).op
    code = words.code[tree.row]
    # scopes: ours, modules, and regions that the user or PyTorch annotates
    no_scope = lookup(words.matching(STEP_MARK) | words.matching(_WRAPPERS_OWN), code)
    annotation = column(trace, "category")[tree.row] == cat.CATEGORIES.index(cat.ANNOTATION)
    ours = lookup(words.names.str.starts_with(SCOPE_PREFIX).to_numpy(), code)
    is_scope = ours | module_calls(trace, tree) | (annotation & ~no_scope)
    scope = tree.nearest_or_self(is_scope)
    paths, modules, path_of = _paths(trace, tree, is_scope)
    path = np.append(path_of, 0)[scope]
    is_node = lookup(words.names.str.starts_with(_EVALUATE).to_numpy(), code)
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
    compiled = tree.nearest_or_self(lookup(words.matching(_COMPILED), code)) >= 0
    labels = [NO_OP, *distinct.to_list()]
    return EventScopes(paths, modules, path, labels, label, op, backward, compiled, unknown)


def module_calls(trace: Trace, tree: Forest) -> Bools:
    """Which events are calls of modules: the scopes that `record --memory` opens, else Python frames.

    Frames of wrappers that only pass calls on (`DistributedDataParallel`) do not count.
    """
    words = vocabulary(trace)
    code = words.code[tree.row]
    annotated: Bools = lookup(words.names.str.starts_with(MODULE_PREFIX).to_numpy(), code)
    if annotated.any():
        return annotated
    python = column(trace, "category")[tree.row] == cat.CATEGORIES.index(cat.PYTHON)
    framed = words.names.str.starts_with(PYTHON_MODULE).to_numpy() & ~words.matching(_WRAPPER)
    frames: Bools = python & lookup(framed, code)
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
    accumulates = lookup(words.names.str.ends_with(_ACCUMULATE).to_numpy(), code)[nodes]
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
