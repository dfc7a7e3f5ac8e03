"""Which module, scope or annotation the time belongs to, as a tree: forward, backward and what is computed again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import Forest, forest, host_pieces
from traceloom.analyze.autograd import ENGINE, Backward, backward_of, recomputed
from traceloom.analyze.gpu_work import attribute_to_launches, gpu_rows
from traceloom.analyze.host_events import MODULE_PREFIX, SCOPE_PREFIX, STEP_MARK
from traceloom.analyze.names import vocabulary
from traceloom.analyze.steps import NO_STEP, per_step, spread_schema, whole_steps
from traceloom.trace import vocabulary as cat
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import column, gather_rows, to_nullable_series
from traceloom.trace.frames import Result, cast_to_schema, schema
from traceloom.trace.trace import Trace

KINDS = ("module", "scope", "annotation")
PARTS = ("forward", "backward", "recompute")
FORWARD, BACKWARD, RECOMPUTE = range(3)
MODULE = "nn.Module: "
DEEPEST = 256  # levels of nested regions; what lies deeper counts to the region above

# The compiler's notes on its own phases (torch.compile); they are told under `compiled`.
_COMPILER_NOTE = r"_data: (fn_name=.*, )?compile_id="
_RUN_BACKWARD = r"^<built-in method run_backward "


class Regions(Struct, frozen=True):
    """Arrays of shape (host events,), in the forest's order; regions are named by the position of their event.

    Attributes:
        evidence: `python-modules`, `annotations` or `none`.
        kind: Index in KINDS; -1 for events that are no region.
        region: The region of each event; -1 for none. A region is its own.
        above: For regions the region they stand in; -1 for roots and for what is none.
        part: Index in PARTS.
        backward: Whether any backward op could be joined to its forward op.
        recompute: How repeated work was recognised: `frames`, `operators`, `none`.
    """

    evidence: str
    kind: Ints
    region: Ints
    above: Ints
    part: Ints
    backward: bool
    recompute: str


_TIMES = ("host_ns", "self_host_ns", "device_ns", "self_device_ns", "kernel_count")
TREE = schema(
    "node parent depth path name kind count",
    *_TIMES,
    *(f"backward_{name}" for name in _TIMES),
    "recompute_count",
    *(f"recompute_{name}" for name in _TIMES),
    spread_schema("all_host_ns", "all_device_ns"),
    {"kind": pl.Enum(KINDS)},
)
STEPS = schema("node step all_host_ns all_device_ns")


@dataclass(frozen=True)
class Modules(Result):
    """The tree of regions; parents stand before their children, siblings by all their time.

    Attributes:
        tree: One row per path; calls of one path are one row. `host_ns` is the time its threads spend in the region
            outside the backward pass, `device_ns` the summed duration of the GPU work launched in that time, `self_`
            the part outside child rows. `backward_` is the same of the backward pass: of the nodes that the region's
            forward ops made, on whatever thread they run. `recompute_` is the same of forward work repeated inside the
            backward pass by activation checkpointing. In each of the three the self times of a row and of all rows
            below it add up to its total. `backward_` and `recompute_` are null where no backward op could be joined
            to the forward op it belongs to. `mean_all_host_ns` and so on: all three parts together, per whole step.
        steps: All three parts together by node and step (null outside all steps); rows without time are left out.
        outside_host_ns: Time of the threads in which something is recorded, in no region; with the `self_` columns of
            all rows it is the busy time of the threads.
        outside_device_ns: GPU work launched in no region, or not known to be launched; with the `self_` columns it is
            all GPU work.
        unjoined_host_ns: The part of `outside_host_ns` in the backward pass: of forward ops in no region, of gradients
            being accumulated, or of ops that could not be joined.
        unjoined_device_ns: The same of `outside_device_ns`.
        evidence: `python-modules` (module calls, with annotations and scopes), `annotations` (annotations and scopes)
            or `none`.
        recompute_evidence: `frames`, `operators` or `none`; see `recompute.recomputed`.
    """

    tree: pl.DataFrame
    steps: pl.DataFrame
    outside_host_ns: int
    outside_device_ns: int
    unjoined_host_ns: int
    unjoined_device_ns: int
    evidence: str
    recompute_evidence: str


_NODE: Any = np.int32  # of one value per stretch of host time: short numbers take half of the memory and less
_PART: Any = np.int8


class _NodeValues(Struct, frozen=True):
    """What is added up; all values are numbers of nodes, parts (of PARTS) and steps (NO_STEP outside) of one length."""

    node: Ints
    part: Ints
    step: Ints
    value: Ints

    def by(self, nodes: int, width: int, column: Any) -> Ints:
        """The values added up by node and place (below `width`), shape (nodes, width); nodes of -1 are left out."""
        key = self.node.astype(np.int64)
        key *= width
        key += column
        own = np.zeros((nodes + 1) * width, dtype=np.int64)
        np.add.at(own, key, self.value)  # -1 counts from the end, where a row more stands
        return own.reshape(nodes + 1, width)[:-1]


def modules(trace: Trace) -> Modules:
    """Build the tree from `nn.Module` calls where Python frames were recorded, from annotations and from scopes."""
    tree = forest(trace)
    all_regions = _regions(trace)
    nothing = all_regions.evidence == "none"
    node, table = (all_regions.region, STEPS.to_frame()) if nothing else _paths(trace, tree, all_regions)
    of_event = np.append(np.append(node, -1)[all_regions.region], -1).astype(_NODE)
    # every stretch in which something is recorded belongs to its innermost event
    pieces, part_of = host_pieces(trace), all_regions.part.astype(_PART)
    host = _NodeValues(of_event[pieces.owner], part_of[pieces.owner], pieces.step, pieces.ns)
    # GPU work belongs to the host event that launched it
    work = attribute_to_launches(trace)
    work_step = column(trace, "step", int(NO_STEP))[gpu_rows(trace)]
    work_node, work_part = of_event[work.origin], np.append(part_of, _PART(FORWARD))[work.origin]
    device = _NodeValues(work_node, work_part, work_step, work.duration_ns)
    kernels = _NodeValues(work_node, work_part, work_step, work.kernel.astype(np.int64))
    outside = {}
    for name, sums in (("host_ns", host), ("device_ns", device)):
        without = sums.node < 0
        outside[f"outside_{name}"] = int(sums.value[without].sum())
        outside[f"unjoined_{name}"] = int(sums.value[without & (sums.part == BACKWARD)].sum())
    if nothing:
        return Modules(TREE.to_frame(), STEPS.to_frame(), **outside, evidence="none", recompute_evidence="none")

    numbers: dict[str, Ints] = {}  # columns of the tree
    for name, sums in (("host_ns", host), ("device_ns", device), ("kernel_count", kernels)):
        own = sums.by(table.height, len(PARTS), sums.part)
        with_below = _summed_up(table, own)
        for part, prefix in enumerate(("", "backward_", "recompute_")):
            numbers[f"{prefix}{name}"] = with_below[:, part]
            if name != "kernel_count":
                numbers[f"{prefix}self_{name}"] = own[:, part]
    calls = all_regions.kind >= 0
    for name, in_part in (("count", all_regions.part != RECOMPUTE), ("recompute_count", all_regions.part == RECOMPUTE)):
        numbers[name] = np.bincount(node[calls & in_part], minlength=table.height)
    if not all_regions.backward:
        numbers = {name: column for name, column in numbers.items() if not name.startswith(("backward_", "recompute_"))}
    # Totals of all parts by node and step, in columns node, step, all_host_ns, all_device_ns
    all_steps = np.unique(np.concatenate([trace.steps["step"].to_numpy(), device.step, [NO_STEP]]))
    out = []
    for sums in (host, device):
        own = sums.by(table.height, all_steps.size, np.searchsorted(all_steps, sums.step))
        out.append(_summed_up(table, own))
    node, step_index = np.nonzero((out[0] > 0) | (out[1] > 0))
    frame = {
        "node": node,
        "step": to_nullable_series(all_steps[step_index], absent=int(NO_STEP)),
        "all_host_ns": out[0][node, step_index],
        "all_device_ns": out[1][node, step_index],
    }
    steps = pl.DataFrame(frame, schema_overrides={"step": pl.Int64}).pipe(cast_to_schema, STEPS)
    spread = per_step(steps, ["node"], ["all_host_ns", "all_device_ns"], whole_steps(trace))
    whole = table.with_columns(**{name: pl.Series(column) for name, column in numbers.items()})
    whole = whole.join(spread, on="node", how="left", maintain_order="left")
    missing = [pl.lit(None).alias(name) for name in TREE if name not in {*whole.columns, "path"}]
    ordered, number = _ordered(whole.with_columns(missing))
    return Modules(
        ordered,
        steps.with_columns(pl.Series(number)[steps["node"]].alias("node"))
        .sort("step", "node")
        .pipe(cast_to_schema, STEPS),
        **outside,
        evidence=all_regions.evidence,
        recompute_evidence=all_regions.recompute,
    )


def _summed_up(table: pl.DataFrame, own: Ints) -> Ints:
    """Values of the nodes with those of all below; nodes are numbered level by level."""
    whole = own.copy()
    parent, depth = table["parent"].to_numpy(), table["depth"].to_numpy()
    for level in range(int(depth.max(initial=0)), 0, -1):
        at_level = np.flatnonzero(depth == level)
        np.add.at(whole, parent[at_level], whole[at_level])
    return whole


def _paths(trace: Trace, tree: Forest, all_regions: Regions) -> tuple[Ints, pl.DataFrame]:
    """For each host event the number of its path, and the paths: node, parent, depth, name, kind.

    Goes down level by level: a path is known by its parent's number and its own name, and nesting is shallow.
    """
    words = vocabulary(trace)
    kind, above = all_regions.kind, all_regions.above
    level = _levels(above, kind >= 0)
    node = np.full(kind.size + 1, -1, like=kind)  # one more at the end, for those without a parent
    label = words.code[tree.row].astype(np.int64) * len(KINDS) + kind
    labels = len(words.names) * len(KINDS)
    rows: list[pl.DataFrame] = []
    count = 0
    for depth in range(int(level.max()) + 1):
        at_depth = np.flatnonzero(level == depth)
        path = (node[above[at_depth]] + 1) * labels + label[at_depth]
        distinct, first, number = np.unique(path, return_index=True, return_inverse=True)
        turn = np.empty_like(first)  # nodes are numbered in the order in which they are first called
        turn[np.argsort(first)] = np.arange(first.size)
        node[at_depth] = count + turn[number]
        example = at_depth[np.sort(first)]
        rows.append(
            pl.DataFrame(
                {
                    "node": count + np.arange(distinct.size),
                    "parent": node[above[example]],
                    "name": words.names[words.code[tree.row[example]]],
                    "kind": kind[example],
                    "depth": np.full(distinct.size, depth),
                }
            )
        )
        count += distinct.size
    return node[:-1], pl.concat(rows).with_columns(pl.col("node").cast(pl.UInt32))


def _ordered(table: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    """Name the paths and number the rows so that parents come before their children, the largest child first.

    Returns the rows and, for each node of `table`, its new number.
    """
    shown = pl.sum_horizontal(f"{part}host_ns" for part in ("", "backward_", "recompute_"))
    rows = table.sort([pl.col("depth"), shown, pl.col("node")], descending=[False, True, False]).to_dicts()
    children: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        children.setdefault(row["parent"], []).append(index)
    ordered: list[dict[str, object]] = []
    number_of = np.zeros(len(rows), dtype=np.int64)
    stack: list[tuple[int, int | None, str, str]] = [(index, None, "", "") for index in reversed(children.get(-1, []))]
    while stack:
        index, parent, path, above = stack.pop()
        row = rows[index]
        # the name without the prefix of its kind, and without the dotted name of the scope around it
        name = row["name"]
        if name.startswith(SCOPE_PREFIX):
            name = name.removeprefix(f"{above}." if name.startswith(f"{above}.") else SCOPE_PREFIX)
        else:
            name = name.removeprefix(MODULE if name.startswith(MODULE) else MODULE_PREFIX)
        path = f"{path}/{name}" if path else name
        number = len(ordered)
        number_of[row["node"]] = number
        fields = {"node": number, "parent": parent, "name": name, "path": path, "kind": KINDS[row["kind"]]}
        ordered.append({**row, **fields})
        stack.extend((child, number, path, row["name"]) for child in reversed(children.get(row["node"], [])))
    return pl.DataFrame(ordered, schema_overrides=dict(TREE)).pipe(cast_to_schema, TREE), number_of


def _regions(trace: Trace) -> Regions:
    """Give every host event its region and its part.

    Forward work belongs to the innermost region around it; backward work to the region of the op that made its autograd
    node, wherever it runs; repeated work to the regions it repeats.
    """
    tree, words = forest(trace), vocabulary(trace)
    code = words.code[tree.row]
    category = column(trace, "category")[tree.row]
    python, op, annotation = (category == cat.CATEGORIES.index(name) for name in (cat.PYTHON, cat.OP, cat.ANNOTATION))
    begins = [f"^{re.escape(prefix)}" for prefix in (SCOPE_PREFIX, MODULE, MODULE_PREFIX)]
    of_scope, of_module, of_mark, step_mark, note = words.matching_each([*begins, STEP_MARK, _COMPILER_NOTE])
    scope = gather_rows(of_scope, code)
    module = python & gather_rows(of_module, code)
    left_out = gather_rows(step_mark | note, code)
    kind = np.full(tree.row.size, -1, like=tree.row)
    kind[module] = KINDS.index("module")
    kind[scope & (op | annotation)] = KINDS.index("scope")
    kind[annotation & ~scope & ~left_out] = KINDS.index("annotation")
    # a module call has a mark of ours, a Python frame, or both: then it counts once
    marked = (op | annotation) & gather_rows(of_mark, code)
    kind[marked] = -1 if module.any() else KINDS.index("module")
    evidence = "python-modules" if module.any() else "annotations" if (kind >= 0).any() else "none"

    # The part of each event is that of the nearest event (itself or above) with its own part, else forward.
    joined, again = backward_of(trace), recomputed(trace)
    part = np.full(tree.row.size, FORWARD, like=tree.row)
    if joined is not None:
        part[joined.backward] = BACKWARD
    part[gather_rows(words.matching(ENGINE), code)] = BACKWARD
    part[again.root] = RECOMPUTE
    if again.root.any():  # the older way of checkpointing runs a backward pass of its own inside
        inner = np.flatnonzero(gather_rows(words.matching(_RUN_BACKWARD), code))
        above = tree.nearest(part != FORWARD)[inner]
        part[inner[(above >= 0) & (part[above] == RECOMPUTE)]] = BACKWARD
    part = np.append(part, FORWARD)[tree.nearest_or_self(part != FORWARD)]

    while True:
        region, above = _resolved(trace, tree, kind, joined, again.root, part)
        level = _levels(above, kind >= 0)
        if not (level > DEEPEST).any():
            break
        kind[level > DEEPEST] = -1
    if joined is None:  # then nothing can be told apart inside regions
        part = np.where(region >= 0, FORWARD, part)
    return Regions(evidence, kind, region, above, part, joined is not None, again.evidence)


def _levels(above: Ints, wanted: Bools) -> Ints:
    """How many regions stand above each region, at most one more than the deepest level; -1 for what is none."""
    level = np.where(wanted, 0, -1)
    rows = np.flatnonzero(wanted & (above >= 0))
    up = above[rows]
    for depth in range(1, DEEPEST + 2):
        if not rows.size:
            break
        level[rows] = depth
        up = above[up]
        rows, up = rows[up >= 0], up[up >= 0]
    return level


def _resolved(  # noqa: PLR0917
    trace: Trace, tree: Forest, kind: Ints, joined: Backward | None, again: Bools, part: Ints
) -> tuple[Ints, Ints]:
    """The region of each event, and that above each region.

    Marks are regions, joined backward ops and the roots of repetitions; each event takes the region of the nearest
    one. A region is its own, a backward op has that of its forward op, a repetition that around the work it repeats.
    """
    size = tree.row.size
    is_region = kind >= 0
    mark = is_region | again
    forward = np.full(size, -1, like=tree.row)
    if joined is not None:
        forward[joined.backward] = joined.forward
        mark = mark | (forward >= 0)
    above = tree.nearest(mark)
    nearest = tree.nearest_or_self(mark, above)
    source = np.full(size, -1, like=tree.row)  # the mark whose region another mark takes
    made = np.flatnonzero((forward >= 0) & ~is_region)
    source[made] = nearest[forward[made]]
    up = above.copy()  # the mark above each region
    repeats = np.flatnonzero(again & ~is_region)
    if repeats.size:
        enclosing = above[repeats]
        source[repeats] = np.where(forward[repeats] >= 0, source[repeats], enclosing)
        inner = np.flatnonzero(is_region & (above >= 0) & np.append(again & ~is_region, False)[above])
        # For regions that repeat one: the latest earlier region of the same name in the forward pass; -1 for none
        code = vocabulary(trace).code[tree.row].astype(np.int64)
        first = np.flatnonzero((kind >= 0) & (part == FORWARD))
        if not first.size or not inner.size:
            original = np.full(inner.size, -1)
        else:
            key = code * trace.events.height + tree.row  # rows are in the order of starts
            order = first[np.argsort(key[first], kind="stable")]
            at = np.searchsorted(key[order], key[inner], side="left") - 1
            matches = (at >= 0) & (code[order[np.maximum(at, 0)]] == code[inner])
            original = np.where(matches, order[np.maximum(at, 0)], -1)
        has_original = original >= 0
        inner, original = inner[has_original], original[has_original]
        up[inner] = above[original]
        source[above[inner][::-1]] = above[original][::-1]  # the first region inside shows where the repetition belongs
    # Follow `source` from every mark to a region; -1 where it ends without one.
    settled = np.where(is_region, np.arange(size, like=source), source)
    open_rows = np.flatnonzero((settled >= 0) & ~is_region[settled]) if size else settled
    while open_rows.size:  # ends: each source began earlier than the mark that refers to it
        settled[open_rows] = source[settled[open_rows]]
        open_rows = open_rows[settled[open_rows] >= 0]
        open_rows = open_rows[~is_region[settled[open_rows]]]
    region = np.append(settled, -1)[nearest]
    parent = np.where(is_region, np.append(settled, -1)[up], -1)
    return region, parent
