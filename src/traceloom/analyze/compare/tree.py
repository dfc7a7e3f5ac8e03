"""Call trees of operators: one per compared step, and one that all steps of both sides are laid on.

Two operators are the same where they stand at the same place: under the same parents, with the same name and shapes,
in the same order among their neighbours. Lists of children are aligned as sequences, so that one more operator does not
shift all that follow it.

A replay runs the operators of a run without what stood around them: no modules, no annotations, no backward pass, often
one thread. Of these two only the operators themselves are held against each other, by name, shapes and order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import polars as pl
from msgspec import Struct
from numpy.typing import NDArray

from traceloom.analyze.ancestry import forest
from traceloom.analyze.attribution import launched_work
from traceloom.analyze.compare.samples import ComparedSteps
from traceloom.analyze.intervals import EMPTY, coverage, merge, union
from traceloom.analyze.phases import meaning
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import column, lookup

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Operators of the dispatcher and compiled kernels; not the nodes of autograd and compiled graphs that hold them.
_RUNS_AGAIN = r"^\w+::|^triton_"
_HOLDS_OTHERS = r"^(torch::)?(autograd|distributed)::"
_WRAP = (1 << 61) - 1
_BASE = 1_000_003
_BLOCK = 2_048  # elements of each of two lists in one table of all ways to pair them


@dataclass(slots=True)
class Words:
    """Names and shapes of both sides as numbers."""

    names: dict[str, int] = field(default_factory=dict)
    shapes: dict[str | None, int] = field(default_factory=lambda: {None: 0})

    def name(self, text: str) -> int:
        """The number of a name."""
        return self.names.setdefault(text, len(self.names))

    def shape(self, text: str | None) -> int:
        """The number of the shapes of an operator's inputs; 0 where they are not recorded."""
        return self.shapes.setdefault(text, len(self.shapes))


class Items(Struct, frozen=True):
    """The elements of a list; arrays of one length.

    Attributes:
        name: Only elements of one name can be the same.
        shape: Those of one shape are rather the same than others.
        work: So are those that launch the same GPU work.
        mark: Equal where all that is below the elements is equal.
        size: How much is below them.
    """

    name: Ints
    shape: Ints
    work: Ints
    mark: Ints
    size: Ints

    def part(self, low: int, high: int) -> Items:
        """The elements from `low` to `high`."""
        return Items(*(getattr(self, name)[low:high] for name in self.__struct_fields__))


class Tree(Struct, frozen=True):
    """The call tree of one step in preorder: the root, below it a node per thread, below these the operators.

    Attributes:
        name: Number of each node's name.
        shape: Number of its shapes.
        work: Equal where it launches GPU work of equal names itself.
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

    def items(self, nodes: list[int]) -> Items:
        """Some nodes as a list to be aligned."""
        name, shape, work, mark = (
            np.array([of[node] for node in nodes], dtype=np.int64)
            for of in (self.name, self.shape, self.work, self.mark)
        )
        return Items(name, shape, work, mark, np.array([self.stop[node] - node for node in nodes], dtype=np.int64))

    def children(self, node: int) -> list[int]:
        """The children of a node, in order."""
        nodes, at, last = [], node + 1, self.stop[node]
        while at < last:
            nodes.append(at)
            at = self.stop[at]
        return nodes


class Trees(Struct, frozen=True):
    """The call trees of the compared steps of one trace.

    Attributes:
        trees: One per step.
        node: Of each host event (position in the forest) its node in the tree of its step; -1 outside all.
        above: Of each host event the nearest operator around it, itself included, as position; -1 for none.
        self_ns: Time of each host event, within its step, in which it is the innermost operator of its thread (in one
            sequence: also without the time in which an operator runs on a thread before its own).
        sample: Of each host event the row of the step in which it begins; -1 outside the compared steps.
        main: Operators on the thread of their step; all where they are one sequence.
    """

    trees: list[Tree]
    node: Ints
    above: Ints
    self_ns: Ints
    sample: Ints
    main: Bools


def trees(of: ComparedSteps, words: Words, *, is_sequence: bool = False) -> Trees:
    """The call trees of a trace, step by step.

    Args:
        of: The steps.
        words: Gets the names and shapes that it does not have.
        is_sequence: Only operators that a replay can run, one after the other in order of their starts, whatever stood
            around them and on whichever thread.
    """
    tree, roles = forest(of.trace), meaning(of.trace)
    annotation = column(of.trace, "category")[tree.row] == cat.CATEGORIES.index(cat.ANNOTATION)
    ends = np.append(of.spans.end, 0)
    sample = np.searchsorted(of.spans.start, tree.start_ns, side="right") - 1
    sample = np.where((sample >= 0) & (tree.start_ns < ends[sample]), sample, -1)
    kept = (roles.op | (annotation & ~roles.mark)) & (sample >= 0)
    if is_sequence:
        vocab = vocabulary(of.trace)
        runs_again = vocab.matching(_RUNS_AGAIN) & ~vocab.matching(_HOLDS_OTHERS)
        kept &= roles.op & lookup(runs_again, vocab.code[tree.row])
    above = tree.nearest(kept)
    parent = np.where((above >= 0) & (sample[above] == sample), above, -1)
    # An event that runs on into the next step counts up to the end of its own step.
    end = np.minimum(tree.end_ns, ends[sample])
    span = np.where(kept, np.maximum(end - tree.start_ns, 0), 0)
    # A number of each thread (0 for that of the steps, then by the number of events), and what to call each
    trace = of.trace
    host = trace.events.filter(
        pl.col("lane").is_in(trace.lanes.filter(pl.col("kind") == "host")["lane"].implode())
    ).select("start_ns", "name", "lane", "category")
    marks = host.join(trace.steps.select("start_ns", "name"), on=["start_ns", "name"], how="semi")
    lanes = marks["lane"] if marks.height else host.filter(pl.col("category") == cat.OP)["lane"]
    main = int(lanes.mode().sort()[0]) if lanes.len() else None
    numbers, counts = np.unique(tree.lane, return_counts=True)
    order = np.lexsort((numbers, -counts, numbers != main))
    ordinal = np.empty(numbers.size, dtype=np.int64)
    ordinal[order] = np.arange(numbers.size)
    names = dict(trace.lanes.select("lane", "name").rows())
    labels = ["main thread"]
    for number in numbers[order][1:].tolist():
        plain = "".join(letter for letter in str(names.get(number) or "") if not letter.isdigit()).strip()
        labels.append(plain or "thread")
    thread: Ints = ordinal[np.searchsorted(numbers, tree.lane)] if numbers.size else tree.lane
    start = np.zeros_like(tree.start_ns)
    if is_sequence:
        covered = EMPTY
        for number in range(numbers.size):
            rows = np.flatnonzero(kept & (thread == number))
            low, high = tree.start_ns[rows], end[rows]
            span[rows] -= coverage(covered, low, high)
            covered = merge(covered, union(low, high))
    self_ns = span.copy()
    child = np.flatnonzero(kept & (parent >= 0))
    np.subtract.at(self_ns, parent[child], span[child])
    if is_sequence:
        thread, parent, start = np.zeros_like(thread), np.full_like(parent, -1), tree.start_ns
    name = _names(of.trace, tree.row, kept, annotation, words)
    tensors = of.trace.tensors.select("event", "shapes").drop_nulls()
    shape_numbers = np.zeros(of.trace.events.height + 1, dtype=np.int64)
    if tensors.height:
        distinct = tensors["shapes"].unique()
        numbered = pl.DataFrame({"shapes": distinct, "number": [words.shape(text) for text in distinct.to_list()]})
        coded = tensors.join(numbered, on="shapes", how="left", maintain_order="left")
        shape_numbers[coded["event"].to_numpy()] = coded["number"].to_numpy()
    owner = tree.nearest_or_self(kept, above)
    owner = np.where((owner >= 0) & (np.append(sample, -2)[owner] == sample), owner, -1)
    # A number for the names of the GPU work that each event launched itself, in any order; 0 for none. Squares, so that
    # two names together are not taken for two others with the same sum.
    work = np.zeros(owner.size + 1, dtype=np.int64)
    launched = np.append(owner, -1)[launched_work(of.trace).origin]
    np.add.at(work, launched, (work_names(of.trace, words) + 1) ** 2 * _BASE)
    order = np.flatnonzero(kept)
    order = order[np.lexsort((order, start[order], thread[order], sample[order]))]
    bounds = np.searchsorted(sample[order], np.arange(of.spans.start.size + 1)).tolist()
    node = np.full(tree.row.size, -1, dtype=np.int64)
    labelled = [words.name(label) for label in labels]
    columns = (name, shape_numbers[tree.row], work[:-1], parent, thread, tree.row)
    step_trees = [_tree(order[low:high], columns, labelled, node) for low, high in pairwise(bounds)]
    return Trees(step_trees, node, owner, self_ns, sample, kept & (thread == 0))


def work_names(trace: Trace, words: Words) -> Ints:
    """Number of the name of each kernel, copy and fill, in the order of events."""
    vocab = vocabulary(trace)
    category = column(trace, "category")
    code = vocab.code[np.flatnonzero(np.isin(category, [cat.CATEGORIES.index(kind) for kind in cat.GPU_WORK]))]
    used, number = np.unique(code, return_inverse=True)
    names = [words.name(text) for text in vocab.names.gather(used).to_list()]
    name_numbers: Ints = np.array(names, dtype=np.int64)[number] if used.size else number
    return name_numbers


def _names(trace: Trace, row: Ints, kept: Bools, annotation: Bools, words: Words) -> Ints:
    """Number of each event's name; numbers in the names of annotations count steps or calls, and are left out."""
    vocab = vocabulary(trace)
    code = np.where(kept, vocab.code[row].astype(np.int64) * 2 + annotation, -1)
    used, number = np.unique(code, return_inverse=True)
    texts: list[str] = vocab.names.gather(np.maximum(used // 2, 0)).to_list() if vocab.names.len() else []
    numbers = [
        -1 if value < 0 else words.name(re.sub(r"[0-9]+", "#", text) if value % 2 else text)
        for text, value in zip(texts, used.tolist(), strict=True)
    ]
    name_numbers: Ints = np.array(numbers, dtype=np.int64)[number] if used.size else code
    return name_numbers


def _tree(rows: Ints, of_event: tuple[Ints, ...], labels: list[int], node: Ints) -> Tree:
    """The tree of one step; fills in the `node` of each of its events.

    Args:
        rows: Its operators, thread after thread, parents before their children.
        of_event: Of each host event its name, shape, work, parent, thread and row of `trace.events`.
        labels: Number of the name of each thread.
        node: Of each host event its node.
    """
    names, shapes, works, parents, events = [-1], [0], [0], [-1], [-1]
    open_thread, root = -1, 0
    at: dict[int, int] = {}
    columns = (column_of[rows].tolist() for column_of in of_event)
    for position, name, shape, work, parent, thread, event in zip(rows.tolist(), *columns, strict=True):
        if thread != open_thread:
            open_thread, root = thread, len(names)
            names.append(labels[thread])
            shapes.append(0)
            works.append(0)
            parents.append(0)
            events.append(-1)
        at[position] = len(names)
        names.append(name)
        shapes.append(shape)
        works.append(work)
        parents.append(root if parent < 0 else at[parent])
        events.append(event)
    node[rows] = np.fromiter(at.values(), dtype=np.int64, count=len(at))
    # where each subtree ends, and its mark: from the last node to the first, so that children come before parents
    size = len(names)
    stop, inner, mark = [0] * size, [7] * size, [0] * size
    for index in range(size - 1, -1, -1):
        stop[index] = max(stop[index], index + 1)
        content = (shapes[index] * 31 + works[index]) * 131_071
        mark[index] = (inner[index] * _BASE + names[index] * 8_191 + content + 5) % _WRAP
        up = parents[index]
        if up >= 0:
            stop[up] = max(stop[up], stop[index])
            inner[up] = (inner[up] * _BASE * _BASE + mark[index] * 31 + 3) % _WRAP
    return Tree(names, shapes, works, parents, stop, mark, np.array(events, dtype=np.int64))


def laid_on(base: Tree, new: Tree) -> list[int]:
    """For each node of `new` the node of `base` at the same place; -1 where there is none."""
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
                (left_children[at], right_children[to])
                for at, to in pairs(base.items(left_children), new.items(right_children))
            ]
    return nodes


def pairs(base: Items, new: Items) -> list[tuple[int, int]]:
    """Places of elements that are the same in both lists, both ascending.

    Equal ends are taken as they are. Between them, of all ways to pair elements of one name in their order, the one is
    taken that has the largest sum: large subtrees count more than small ones; equal shapes, equal GPU work and equal
    subtrees more than others. (Wagner and Fischer's table, a row at a time.)
    """
    short = min(base.mark.size, new.mark.size)
    equal = base.mark[:short] == new.mark[:short]
    low = short if equal.all() else int(np.argmin(equal))
    back = short - low
    equal = base.mark[base.mark.size - back :][::-1] == new.mark[new.mark.size - back :][::-1]
    high = back if equal.all() else int(np.argmin(equal))
    matched = [(index, index) for index in range(low)]
    # lists of any length block by block; of the pairs of each block only those in its first half are kept
    at = to = low
    left_end, right_end = base.mark.size - high, new.mark.size - high
    while at < left_end and to < right_end:
        left_stop, right_stop = min(at + _BLOCK, left_end), min(to + _BLOCK, right_end)
        ahead = _best(base.part(at, left_stop), new.part(to, right_stop))
        last = at + _BLOCK >= left_end and to + _BLOCK >= right_end
        kept = ahead if last else [pair for pair in ahead if max(pair) < _BLOCK // 2]
        matched += [(at + row, to + column) for row, column in kept]
        if last:
            break
        row, column = kept[-1] if kept else (_BLOCK // 2, _BLOCK // 2)
        at, to = at + row + 1, to + column + 1
    return matched + [(base.mark.size - k, new.mark.size - k) for k in range(high, 0, -1)]


def _best(left: Items, right: Items) -> list[tuple[int, int]]:
    """The pairing with the largest sum of weights, as early in both as possible."""
    rows, columns = left.name.size, right.name.size
    best = np.zeros((rows + 1, columns + 1), dtype=np.int32)
    for row in range(rows - 1, -1, -1):
        # the weight of pairing element `row` with each on the right; 0 where the names differ
        gained = 8 + 4 * np.log2(np.minimum(left.size[row], right.size)).astype(np.int32)
        gained += 4 * (left.shape[row] == right.shape)
        gained += 3 * (left.work[row] == right.work) + 3 * (left.mark[row] == right.mark)
        gained = np.where(left.name[row] == right.name, gained, 0).astype(np.int32)
        gains = np.maximum(best[row + 1, :-1], np.where(gained > 0, best[row + 1, 1:] + gained, 0))
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
