"""The steps that are compared, and the alignment of the call trees of both sides.

Two operators are the same where they are at the same place: under the same parents, with the same
name and shapes, in the same order among their siblings. Lists of children are aligned as sequences,
so that one more operator does not shift all that follow it.

A replay runs the operators of a run without the events around them: no modules, no annotations, no
backward pass, often one thread. Of a run and its replay only the operators themselves are compared,
by name, shapes and order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.ancestry import build_forest
from traceloom.analyze.gpu_work import attribute_to_launches
from traceloom.analyze.host_events import classify_events
from traceloom.analyze.idle import CAUSES, idle
from traceloom.analyze.intervals import (
    EMPTY_SPANS,
    Spans,
    compute_coverage,
    find_overlaps,
    merge_intervals,
    merge_spans,
)
from traceloom.analyze.kernel_rules import select_gpu_work
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import build_device_tiles, build_tiles
from traceloom.trace import vocabulary as vocab
from traceloom.trace.arrays import gather_rows, get_event_column
from traceloom.trace.frames import build_schema, cast_to_schema
from traceloom.trace.session import Session
from traceloom.trace.trace import Trace
from traceloom.trace.vocabulary import GPU_WORK

Ints = NDArray[np.int64]

COMPUTE, COMMUNICATION, COPIES = "compute", "communication", "copies"
BUSY = (COMPUTE, COMMUNICATION, COPIES)
"""Kinds of busy time, in the order in which a nanosecond with several of them is assigned."""
KIND_BY_CATEGORY = {
    "compute": COMPUTE,
    "communication": COMMUNICATION,
    "memory": COPIES,
}  # by category of the work
EDGE = "edge"
_EDGE_MEANING = "before the first and after the last GPU work"


class ComparedSteps(Struct, frozen=True):
    """The steps of one trace that are compared.

    Attributes:
        trace: The trace.
        step: Number of each step; the one row of a trace without steps has none (null).
        spans: Start and end of each, as its devices go through it: ascending, disjoint; neighbours
            may touch.
        host_spans: The same on the host, which may run ahead of its devices.
    """

    trace: Trace
    step: pl.Series
    spans: Spans
    host_spans: Spans

    @property
    def durations(self) -> Ints:
        """Lengths of the steps, ns."""
        return self.spans.end - self.spans.start

    @property
    def host_durations(self) -> Ints:
        """Lengths of the steps on the host, ns."""
        return self.host_spans.end - self.host_spans.start


def select_compared_steps(trace: Trace) -> ComparedSteps:
    """Returns the whole steps of a trace; where none is whole all that take time, and without steps
    its window.
    """
    cut, host_cut = build_device_tiles(trace), build_tiles(trace)
    complete = trace.steps["complete"].to_numpy()
    stepped = cut.row >= 0
    stepped &= np.isin(cut.row, host_cut.row)
    selected = stepped & np.append(complete, False)[cut.row]
    selected = selected if selected.any() else stepped
    if not selected.any():
        none = pl.Series("step", [None], dtype=pl.Int32)
        window = Spans(cut.spans.start[:1], cut.spans.end[-1:])
        return ComparedSteps(trace, none, window, window)
    spans, host_spans = (
        Spans(tiles.spans.start[rows], tiles.spans.end[rows])
        for tiles in (cut, host_cut)
        for rows in [np.flatnonzero(np.isin(tiles.row, cut.row[selected]))]
    )
    return ComparedSteps(trace, trace.steps["step"].gather(cut.row[selected]), spans, host_spans)


WORK = build_schema("event sample ns", {"sample": pl.Int64})
WAITING = build_schema("cause ns")


class DeviceTime(Struct, frozen=True):
    """How the devices of a trace spend the compared steps.

    Attributes:
        devices: Number of devices with GPU work.
        work: `event`, `sample` (row of the step), `ns`: time in the step that counts to this piece
            of GPU work. A nanosecond in which several run counts to one of them: compute before
            communication before copies, and among these to the one that began first.
        waiting: `cause`, `ns`: idle time by cause; `edge` is before the first and after the last
            GPU work. Together with `work` it is the number of devices times the length of the
            steps.
    """

    devices: int
    work: pl.DataFrame
    waiting: pl.DataFrame


def measure_device_time(compared_steps: ComparedSteps) -> DeviceTime:
    work = select_gpu_work(compared_steps.trace)
    columns = work.select(
        "event", "device", "start_ns", "end_ns", pl.col("category").cast(pl.String)
    )
    work_parts, edge_ns, devices = [], [], 0
    for _, rows in columns.sort("device", "start_ns", "event").group_by(
        "device", maintain_order=True
    ):
        devices += 1
        covered = EMPTY_SPANS
        for category in KIND_BY_CATEGORY:
            category_rows = rows.filter(pl.col("category") == category)
            start, end = category_rows["start_ns"].to_numpy(), category_rows["end_ns"].to_numpy()
            # The time of each piece, without what earlier ones and other categories take.
            reach = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end))[: end.size]
            shared = find_overlaps(np.maximum(start, reach), end, compared_steps.spans)
            ns = shared.end - shared.start - compute_coverage(covered, shared.start, shared.end)
            event = category_rows["event"].to_numpy()[shared.left]
            exclusive = pl.DataFrame({"event": event, "sample": shared.right, "ns": ns}).filter(
                pl.col("ns") > 0
            )
            work_parts.append(exclusive.cast(WORK))
            covered = merge_spans(covered, merge_intervals(start, end))
        first, last = int(rows["start_ns"].min()), int(rows["end_ns"].max())  # type: ignore[arg-type]
        before = np.minimum(compared_steps.spans.end, first) - compared_steps.spans.start
        after = compared_steps.spans.end - np.maximum(compared_steps.spans.start, last)
        edge_ns.append(int(np.maximum(before, 0).sum() + np.maximum(after, 0).sum()))
    if not devices:
        return DeviceTime(0, pl.DataFrame(schema=WORK), pl.DataFrame(schema=WAITING))
    idle_time = idle(compared_steps.trace)
    in_steps = pl.col("step").is_in(compared_steps.step.implode())
    causes = (
        idle_time.totals if compared_steps.step.null_count() else idle_time.causes.filter(in_steps)
    )
    summed = causes.group_by(pl.col("cause").cast(pl.String)).agg(
        pl.col("idle_ns").sum().alias("ns")
    )
    waiting = pl.DataFrame(
        [*summed.sort("cause").rows(), (EDGE, sum(edge_ns))], schema=WAITING, orient="row"
    )
    return DeviceTime(devices, pl.concat(work_parts), waiting.filter(pl.col("ns") > 0))


def describe_idle_cause(cause: str) -> str:
    """Returns the meaning of a cause of idle time in a few words."""
    return _EDGE_MEANING if cause == EDGE else CAUSES.get(cause, cause)


Bools = NDArray[np.bool_]

# Operators of the dispatcher and compiled kernels; not the nodes of autograd and compiled graphs
# that hold them.
_REPLAYABLE_OPS = r"^\w+::|^triton_"
_CONTAINER_OPS = r"^(torch::)?(autograd|distributed)::"
_HASH_MODULUS = (1 << 61) - 1
_HASH_BASE = 1_000_003
_MAX_BLOCK = 2_048  # elements of each of two lists in one dynamic programming table


@dataclass(slots=True)
class NameCodes:
    """Names and shapes of both sides as numbers."""

    names: dict[str, int] = field(default_factory=dict)
    shapes: dict[str | None, int] = field(default_factory=lambda: {None: 0})

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def shape(self, text: str | None) -> int:
        """Returns the number of the shapes of an operator's inputs; 0 where they are not
        recorded.
        """
        return self.shapes.setdefault(text, len(self.shapes))


class ListItems(Struct, frozen=True):
    """The elements of a list; arrays of one length.

    Attributes:
        name: Only elements of one name can be the same.
        shape: Elements of one shape are preferred to others.
        work: Elements that launch the same GPU work are preferred, too.
        mark: Equal where the subtrees of the elements are equal.
        size: The number of nodes below them.
    """

    name: Ints
    shape: Ints
    work: Ints
    mark: Ints
    size: Ints

    def part(self, low: int, high: int) -> ListItems:
        return ListItems(*(getattr(self, name)[low:high] for name in self.__struct_fields__))


class StepTree(Struct, frozen=True):
    """The call tree of one step in preorder: the root, below it a node per thread, below these the
    operators.

    Attributes:
        name: Number of each node's name.
        shape: Number of its shapes.
        work: Equal where the node itself launches GPU work of equal names.
        parent: Its parent; -1 of the root.
        stop: Node after its last descendant.
        mark: A number that is equal for equal subtrees.
        event: Row of `trace.events`; -1 of the root and of threads.
    """

    name: list[int]
    shape: list[int]
    work: list[int]
    parent: list[int]
    stop: list[int]
    mark: list[int]
    event: Ints

    def items(self, nodes: list[int]) -> ListItems:
        name, shape, work, mark = (
            np.array([column[node] for node in nodes], dtype=np.int64)
            for column in (self.name, self.shape, self.work, self.mark)
        )
        return ListItems(
            name,
            shape,
            work,
            mark,
            np.array([self.stop[node] - node for node in nodes], dtype=np.int64),
        )

    def children(self, node: int) -> list[int]:
        nodes, child, last = [], node + 1, self.stop[node]
        while child < last:
            nodes.append(child)
            child = self.stop[child]
        return nodes


class CallTrees(Struct, frozen=True):
    """The call trees of the compared steps of one trace.

    Attributes:
        trees: One per step.
        node: For each host event (position in the forest) its node in the tree of its step; -1
            outside all.
        above: For each host event the position of the nearest operator around it, itself included;
            -1 for none.
        self_ns: Time of each host event, within its step, in which it is the innermost operator of
            its thread (in one sequence: also without the time in which an operator runs on a thread
            before its own).
        sample: For each host event the row of the step in which it begins; -1 outside the compared
            steps.
        main: Operators on the thread of their step; all where they are one sequence.
    """

    trees: list[StepTree]
    node: Ints
    above: Ints
    self_ns: Ints
    sample: Ints
    main: Bools


def build_trees(
    compared_steps: ComparedSteps, name_codes: NameCodes, *, is_sequence: bool = False
) -> CallTrees:
    """Builds the call trees of a trace, step by step.

    Args:
        compared_steps: The steps.
        name_codes: Names and shapes that are missing are added to it.
        is_sequence: Use only operators that a replay can run, one after the other by start, on
            whichever thread and without the events around them.
    """
    tree, roles = build_forest(compared_steps.trace), classify_events(compared_steps.trace)
    annotation = get_event_column(compared_steps.trace, "category")[
        tree.row
    ] == vocab.CATEGORIES.index(vocab.ANNOTATION)
    step_ends = np.append(compared_steps.host_spans.end, 0)
    sample = np.searchsorted(compared_steps.host_spans.start, tree.start_ns, side="right") - 1
    sample = np.where((sample >= 0) & (tree.start_ns < step_ends[sample]), sample, -1)
    in_tree = (roles.op | (annotation & ~roles.mark)) & (sample >= 0)
    if is_sequence:
        matcher = build_vocabulary(compared_steps.trace)
        runs_again = matcher.matching(_REPLAYABLE_OPS) & ~matcher.matching(_CONTAINER_OPS)
        in_tree &= roles.op & gather_rows(runs_again, matcher.code[tree.row])
    ancestor = tree.nearest(in_tree)
    parent = np.where((ancestor >= 0) & (sample[ancestor] == sample), ancestor, -1)
    # An event that continues into the next step counts up to the end of its own step.
    end = np.minimum(tree.end_ns, step_ends[sample])
    span = np.where(in_tree, np.maximum(end - tree.start_ns, 0), 0)
    # A number for each thread (0 for that of the steps, then by the number of events), and its
    # label.
    trace = compared_steps.trace
    host = trace.events.filter(
        pl.col("lane").is_in(trace.lanes.filter(pl.col("kind") == "host")["lane"].implode())
    ).select("start_ns", "name", "lane", "category")
    marks = host.join(trace.steps.select("start_ns", "name"), on=["start_ns", "name"], how="semi")
    lanes = marks["lane"] if marks.height else host.filter(pl.col("category") == vocab.OP)["lane"]
    main = int(lanes.mode().sort()[0]) if lanes.len() else None
    numbers, counts = np.unique(tree.lane, return_counts=True)
    order = np.lexsort((numbers, -counts, numbers != main))
    ordinal = np.empty(numbers.size, dtype=np.int64)
    ordinal[order] = np.arange(numbers.size)
    names = dict(trace.lanes.select("lane", "name").rows())
    labels = ["main thread"]
    for number in numbers[order][1:].tolist():
        base_name = "".join(
            letter for letter in str(names.get(number) or "") if not letter.isdigit()
        ).strip()
        labels.append(base_name or "thread")
    thread: Ints = ordinal[np.searchsorted(numbers, tree.lane)] if numbers.size else tree.lane
    start = np.zeros_like(tree.start_ns)
    if is_sequence:
        covered = EMPTY_SPANS
        for number in range(numbers.size):
            rows = np.flatnonzero(in_tree & (thread == number))
            low, high = tree.start_ns[rows], end[rows]
            span[rows] -= compute_coverage(covered, low, high)
            covered = merge_spans(covered, merge_intervals(low, high))
    self_ns = span.copy()
    child = np.flatnonzero(in_tree & (parent >= 0))
    np.subtract.at(self_ns, parent[child], span[child])
    if is_sequence:
        thread, parent, start = np.zeros_like(thread), np.full_like(parent, -1), tree.start_ns
    name = _encode_event_names(compared_steps.trace, tree.row, in_tree, annotation, name_codes)
    tensors = compared_steps.trace.tensors.select("event", "shapes").drop_nulls()
    shape_numbers = np.zeros(compared_steps.trace.events.height + 1, dtype=np.int64)
    if tensors.height:
        distinct = tensors["shapes"].unique()
        numbered = pl.DataFrame(
            {"shapes": distinct, "number": [name_codes.shape(text) for text in distinct.to_list()]}
        )
        coded = tensors.join(numbered, on="shapes", how="left", maintain_order="left")
        shape_numbers[coded["event"].to_numpy()] = coded["number"].to_numpy()
    owner = tree.nearest_or_self(in_tree, ancestor)
    owner = np.where((owner >= 0) & (np.append(sample, -2)[owner] == sample), owner, -1)
    # A number for the names of the GPU work that each event launched itself, in any order; 0 for
    # none. Squares, so that two names together are not confused with two others with the same sum.
    work = np.zeros(owner.size + 1, dtype=np.int64)
    launched = np.append(owner, -1)[attribute_to_launches(compared_steps.trace).launch_position]
    np.add.at(
        work, launched, (encode_work_names(compared_steps.trace, name_codes) + 1) ** 2 * _HASH_BASE
    )
    order = np.flatnonzero(in_tree)
    order = order[np.lexsort((order, start[order], thread[order], sample[order]))]
    bounds = np.searchsorted(sample[order], np.arange(compared_steps.spans.start.size + 1)).tolist()
    node = np.full(tree.row.size, -1, dtype=np.int64)
    labelled = [name_codes.name(label) for label in labels]
    columns = (name, shape_numbers[tree.row], work[:-1], parent, thread, tree.row)
    step_trees = [
        _build_tree(order[low:high], columns, labelled, node) for low, high in pairwise(bounds)
    ]
    return CallTrees(step_trees, node, owner, self_ns, sample, in_tree & (thread == 0))


def encode_work_names(trace: Trace, name_codes: NameCodes) -> Ints:
    """Returns the number of the name of each kernel, copy and fill, in the order of events."""
    matcher = build_vocabulary(trace)
    category = get_event_column(trace, "category")
    code = matcher.code[
        np.flatnonzero(np.isin(category, [vocab.CATEGORIES.index(kind) for kind in vocab.GPU_WORK]))
    ]
    used, number = np.unique(code, return_inverse=True)
    names = [name_codes.name(text) for text in matcher.names.gather(used).to_list()]
    return np.array(names, dtype=np.int64)[number] if used.size else number


def _encode_event_names(
    trace: Trace, row: Ints, in_tree: Bools, annotation: Bools, name_codes: NameCodes
) -> Ints:
    """Returns the number of each event's name; numbers in the names of annotations count steps or
    calls, and are left out.
    """
    matcher = build_vocabulary(trace)
    code = np.where(in_tree, matcher.code[row].astype(np.int64) * 2 + annotation, -1)
    used, number = np.unique(code, return_inverse=True)
    texts: list[str] = (
        matcher.names.gather(np.maximum(used // 2, 0)).to_list() if matcher.names.len() else []
    )
    numbers = [
        -1 if value < 0 else name_codes.name(re.sub(r"[0-9]+", "#", text) if value % 2 else text)
        for text, value in zip(texts, used.tolist(), strict=True)
    ]
    return np.array(numbers, dtype=np.int64)[number] if used.size else code


def _build_tree(
    rows: Ints, event_columns: tuple[Ints, ...], labels: list[int], node: Ints
) -> StepTree:
    """Builds the tree of one step; fills in the `node` of each of its events.

    Args:
        rows: Its operators, thread after thread, parents before their children.
        event_columns: Name, shape, work, parent, thread and row of `trace.events` of each host
            event.
        labels: Number of the name of each thread.
        node: Of each host event its node.
    """
    names, shapes, works, parents, events = [-1], [0], [0], [-1], [-1]
    open_thread, root = -1, 0
    node_numbers: dict[int, int] = {}
    columns = (column_of[rows].tolist() for column_of in event_columns)
    for position, name, shape, work, parent, thread, event in zip(
        rows.tolist(), *columns, strict=True
    ):
        if thread != open_thread:
            open_thread, root = thread, len(names)
            names.append(labels[thread])
            shapes.append(0)
            works.append(0)
            parents.append(0)
            events.append(-1)
        node_numbers[position] = len(names)
        names.append(name)
        shapes.append(shape)
        works.append(work)
        parents.append(root if parent < 0 else node_numbers[parent])
        events.append(event)
    node[rows] = np.fromiter(node_numbers.values(), dtype=np.int64, count=len(node_numbers))
    # The end of each subtree, and its mark: from the last node to the first, so that children come
    # before parents.
    size = len(names)
    stop, inner, mark = [0] * size, [7] * size, [0] * size
    for index in range(size - 1, -1, -1):
        stop[index] = max(stop[index], index + 1)
        content = (shapes[index] * 31 + works[index]) * 131_071
        mark[index] = (
            inner[index] * _HASH_BASE + names[index] * 8_191 + content + 5
        ) % _HASH_MODULUS
        up = parents[index]
        if up >= 0:
            stop[up] = max(stop[up], stop[index])
            inner[up] = (inner[up] * _HASH_BASE * _HASH_BASE + mark[index] * 31 + 3) % _HASH_MODULUS
    return StepTree(names, shapes, works, parents, stop, mark, np.array(events, dtype=np.int64))


def align_trees(base: StepTree, new: StepTree) -> list[int]:
    """Returns for each node of `new` the node of `base` at the same place; -1 where there is
    none.
    """
    nodes = [-1] * len(new.name)
    if not new.name or not base.name:
        return nodes
    waiting = [(0, 0)]
    while waiting:
        left, right = waiting.pop()
        if base.mark[left] == new.mark[right] and base.stop[left] - left == new.stop[right] - right:
            nodes[right : new.stop[right]] = range(left, base.stop[left])
            continue
        nodes[right] = left
        left_children, right_children = base.children(left), new.children(right)
        if left_children and right_children:
            waiting += [
                (left_children[base_index], right_children[to])
                for base_index, to in match_items(
                    base.items(left_children), new.items(right_children)
                )
            ]
    return nodes


def match_items(base: ListItems, new: ListItems) -> list[tuple[int, int]]:
    """Returns the indices of elements that are the same in both lists, both ascending.

    Equal ends are matched as they are. Between them, of all ways to pair elements of one name in
    order, the one with the largest sum of weights is taken: large subtrees count more than small
    ones; equal shapes, equal GPU work and equal subtrees more than others. (Wagner and Fischer's
    table, a row at a time.)
    """
    short = min(base.mark.size, new.mark.size)
    equal = base.mark[:short] == new.mark[:short]
    low = short if equal.all() else int(np.argmin(equal))
    back = short - low
    equal = base.mark[base.mark.size - back :][::-1] == new.mark[new.mark.size - back :][::-1]
    high = back if equal.all() else int(np.argmin(equal))
    matched = [(index, index) for index in range(low)]
    # Lists of any length are matched block by block; of the pairs of each block only those in its
    # first half are kept.
    left_position = to = low
    left_end, right_end = base.mark.size - high, new.mark.size - high
    while left_position < left_end and to < right_end:
        left_stop, right_stop = (
            min(left_position + _MAX_BLOCK, left_end),
            min(to + _MAX_BLOCK, right_end),
        )
        ahead = _find_best_matching(base.part(left_position, left_stop), new.part(to, right_stop))
        last = left_position + _MAX_BLOCK >= left_end and to + _MAX_BLOCK >= right_end
        accepted = ahead if last else [pair for pair in ahead if max(pair) < _MAX_BLOCK // 2]
        matched += [(left_position + row, to + column) for row, column in accepted]
        if last:
            break
        row, column = accepted[-1] if accepted else (_MAX_BLOCK // 2, _MAX_BLOCK // 2)
        left_position, to = left_position + row + 1, to + column + 1
    return matched + [(base.mark.size - k, new.mark.size - k) for k in range(high, 0, -1)]


def _find_best_matching(left: ListItems, right: ListItems) -> list[tuple[int, int]]:
    """Returns the pairing with the largest sum of weights, as early in both as possible."""
    rows, columns = left.name.size, right.name.size
    best = np.zeros((rows + 1, columns + 1), dtype=np.int32)
    for row in range(rows - 1, -1, -1):
        # The weight of pairing element `row` with each on the right; 0 where the names differ.
        weight = 8 + 4 * np.log2(np.minimum(left.size[row], right.size)).astype(np.int32)
        weight += 4 * (left.shape[row] == right.shape)
        weight += 3 * (left.work[row] == right.work) + 3 * (left.mark[row] == right.mark)
        weight = np.where(left.name[row] == right.name, weight, 0).astype(np.int32)
        gains = np.maximum(best[row + 1, :-1], np.where(weight > 0, best[row + 1, 1:] + weight, 0))
        best[row, :-1] = np.maximum.accumulate(gains[::-1])[::-1]
    matched: list[tuple[int, int]] = []
    row = column = 0
    while row < rows and column < columns and best[row, column]:
        if best[row, column] == best[row + 1, column]:
            row += 1
        elif best[row, column] == best[row, column + 1]:
            column += 1
        else:
            matched.append((row, column))
            row, column = row + 1, column + 1
    return matched


@dataclass(slots=True)
class TreeUnion:
    """Places of both sides, parents before their children.

    The first tree that is added is the reference of its side; the reference of the second side is
    aligned with that of the first, all other trees with that of their side. Nodes without a place
    there get a new one, which later trees find by the same parent, name, shapes and order, so that
    the common nodes of several steps share one place.

    Attributes:
        parent: Parent of each place; -1 of the root.
        name: Number of its name on each side (base, new); -1 where that side does not have it.
        shape: Number of its shapes on each side.
    """

    parent: list[int] = field(default_factory=list)
    name: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    shape: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    _reference: list[tuple[StepTree, list[int]] | None] = field(
        default_factory=lambda: [None, None]
    )
    _known: dict[tuple[int, int], tuple[StepTree, list[int]]] = field(default_factory=dict)
    _more: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def add(self, tree: StepTree, side: int) -> list[int]:
        """Returns the place of each node of a tree, adding missing ones.

        Args:
            tree: The call tree of one step.
            side: 0 for base, 1 for new.
        """
        stored = self._known.get((side, tree.mark[0]))
        if stored is not None and len(stored[1]) == len(tree.name):
            return stored[1]
        reference = self._reference[side] or self._reference[0]
        union_nodes = [-1] * len(tree.name)
        if reference is not None:
            union_nodes = [
                reference[1][base_node] if base_node >= 0 else -1
                for base_node in align_trees(reference[0], tree)
            ]
        self._fill(tree, side, union_nodes)
        if self._reference[side] is None:
            self._reference[side] = (tree, union_nodes)
        self._known[side, tree.mark[0]] = (tree, union_nodes)
        return union_nodes

    def _fill(self, tree: StepTree, side: int, union_nodes: list[int]) -> None:
        count: dict[tuple[int, int, int], int] = {}
        used_nodes = set(union_nodes)
        for node, name in enumerate(tree.name):
            if union_nodes[node] < 0:
                up = union_nodes[tree.parent[node]] if tree.parent[node] >= 0 else -1
                shape = tree.shape[node]
                while True:
                    nth = count.get((up, name, shape), 0)
                    count[up, name, shape] = nth + 1
                    index = self._more.get((up, name, shape, nth))
                    if index is None:
                        index = len(self.parent)
                        self.parent.append(up)
                        for side_index in (0, 1):
                            self.name[side_index].append(-1)
                            self.shape[side_index].append(0)
                        self._more[up, name, shape, nth] = index
                    if index not in used_nodes:
                        break
                union_nodes[node] = index
            index = union_nodes[node]
            if self.name[side][index] < 0:
                self.name[side][index] = name
                self.shape[side][index] = tree.shape[node]


KERNELS = build_schema("place name nth kind count ns sum_ns", {"place": pl.Int64, "name": pl.Int64})
STEPS = build_schema("rank step duration_ns host_ns")


@dataclass(slots=True)
class ComparedSide:
    """One side of a comparison, summed over its compared steps.

    Attributes:
        steps: `rank`, `step` (null without steps), `duration_ns` of every compared step of every
            trace.
        device_steps: Number of pairs of a device and a step; 0 without GPU work.
        device_ns: Time of all devices in all compared steps.
        kernels: GPU work by place, name, and how many of that name come before it at the place in
            its step: `count` (launched in the steps), `ns` (time in the steps that counts to it,
            whenever it was launched), `sum_ns` (durations of what was launched in the steps,
            whenever it ran). Place -1: launched by no operator of a step.
        waiting: `cause`, `ns`: idle time of the devices.
        count: How often each place was reached.
        host_ns: Time of the steps' own threads at each place itself, not below it.
        outside_ns: Time of the steps' own threads outside all operators.
    """

    steps: pl.DataFrame
    device_steps: int = 0
    device_ns: int = 0
    kernels: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=KERNELS))
    waiting: pl.DataFrame = field(
        default_factory=lambda: pl.DataFrame(schema={"cause": pl.String, "ns": pl.Int64})
    )
    count: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    host_ns: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    outside_ns: int = 0


def build_side(
    session: Session,
    number: int,
    union: TreeUnion,
    name_codes: NameCodes,
    *,
    is_sequence: bool = False,
) -> ComparedSide:
    """Aligns the steps of a run with the union.

    Args:
        session: The run.
        number: 0 for base, 1 for new.
        union: Missing places are added to it.
        name_codes: Missing names and shapes are added to it.
        is_sequence: Whether only the operators themselves are compared, as for a run and its
            replay; see `build_trees`.
    """
    steps, kernels, waiting = [], [], []
    reached: list[Ints] = []
    host_times: list[tuple[Ints, Ints]] = []
    out = ComparedSide(pl.DataFrame(schema=STEPS))
    for compared_steps in (
        select_compared_steps(trace) for trace in session.traces if trace.events.height
    ):
        call_trees = build_trees(compared_steps, name_codes, is_sequence=is_sequence)
        # The place of each host event that is an operator of a step; -1 for the others.
        event_places = np.full(call_trees.node.size, -1, dtype=np.int64)
        for sample, tree in enumerate(call_trees.trees):
            step_rows = np.flatnonzero((call_trees.node >= 0) & (call_trees.sample == sample))
            event_places[step_rows] = np.array(union.add(tree, number), dtype=np.int64)[
                call_trees.node[step_rows]
            ]
        rank = pl.lit(compared_steps.trace.rank, dtype=pl.Int32).alias("rank")
        steps.append(
            pl.DataFrame(
                {
                    "step": compared_steps.step,
                    "duration_ns": compared_steps.durations,
                    "host_ns": compared_steps.host_durations,
                }
            ).select(rank, "step", "duration_ns", "host_ns")
        )
        reached.append(event_places[np.flatnonzero(call_trees.node >= 0)])
        main = np.flatnonzero(call_trees.main)
        host_times.append((event_places[main], call_trees.self_ns[main]))
        out.outside_ns += int(compared_steps.host_durations.sum() - call_trees.self_ns[main].sum())
        devices = measure_device_time(compared_steps)
        if devices.devices:
            out.device_steps += devices.devices * compared_steps.spans.start.size
            out.device_ns += devices.devices * int(compared_steps.durations.sum())
            kernels.append(
                _assign_work_to_places(
                    compared_steps, devices, call_trees, event_places, name_codes
                )
            )
            waiting.append(devices.waiting)
    size = len(union.parent)
    out.steps = pl.concat(steps).cast(STEPS) if steps else out.steps
    out.count = np.bincount(np.concatenate([*reached, np.zeros(0, dtype=np.int64)]), minlength=size)
    out.host_ns = np.zeros(size, dtype=np.int64)
    for place_index, ns in host_times:
        np.add.at(out.host_ns, place_index, ns)
    if kernels:
        keys = ["place", "name", "nth", "kind"]
        sums = pl.concat(kernels).group_by(keys).agg(pl.col("count", "ns", "sum_ns").sum())
        out.kernels = sums.pipe(cast_to_schema, KERNELS)
        out.waiting = pl.concat(waiting).group_by("cause").agg(pl.col("ns").sum()).sort("cause")
    return out


def _assign_work_to_places(
    compared_steps: ComparedSteps,
    devices: DeviceTime,
    call_trees: CallTrees,
    event_places: Ints,
    name_codes: NameCodes,
) -> pl.DataFrame:
    """Returns GPU work that was launched in the steps, or counts to them, by place."""
    trace = compared_steps.trace
    owner = np.append(call_trees.above, -1)[attribute_to_launches(trace).launch_position]
    work = trace.events.filter(pl.col("category").is_in(GPU_WORK)).select(
        "event", "start_ns", "duration_ns"
    )
    start = work["start_ns"].to_numpy()
    began = np.searchsorted(compared_steps.spans.start, start, side="right") - 1
    began = np.where(
        (began >= 0) & (start < np.append(compared_steps.spans.end, 0)[began]), began, -1
    )
    # Work belongs to the step that launched it; work that no operator of a step launched, to the
    # step in which it began.
    owning_step = np.where(owner >= 0, np.append(call_trees.sample, -1)[owner], began)
    spent = devices.work.group_by("event").agg(pl.col("ns").sum())
    kind = select_gpu_work(trace).select(
        "event", pl.col("category").cast(pl.String).replace(KIND_BY_CATEGORY).alias("kind")
    )
    rows = work.with_columns(
        pl.Series("place", np.append(event_places, -1)[owner]),
        pl.Series("name", encode_work_names(trace, name_codes)),
        pl.Series("asked", owning_step),
        pl.Series("count", (owning_step >= 0).astype(np.int64)),
        pl.col("duration_ns").clip(lower_bound=0),
    ).join(kind, on="event", how="left", maintain_order="left")
    rows = rows.join(spent, on="event", how="left", maintain_order="left")
    rows = rows.filter((pl.col("count") > 0) | pl.col("ns").is_not_null())
    nth = pl.int_range(pl.len()).over("place", "name", "asked").alias("nth")
    return rows.with_columns(nth, pl.col("ns").fill_null(0)).select(
        "place",
        "name",
        "nth",
        "kind",
        "count",
        "ns",
        (pl.col("duration_ns") * pl.col("count")).alias("sum_ns"),
    )
