"""Time by module, scope or annotation, as a tree: forward, backward and recomputation."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from traceloom.analyze.ancestry import Forest, build_forest, build_host_pieces
from traceloom.analyze.autograd import (
    ENGINE_NODE_PATTERN,
    BackwardMatches,
    find_recomputed_work,
    match_backward_ops,
)
from traceloom.analyze.gpu_work import attribute_to_launches, find_gpu_event_rows
from traceloom.analyze.host_events import MODULE_PREFIX, SCOPE_PREFIX, STEP_MARK_PATTERN
from traceloom.analyze.names import build_vocabulary
from traceloom.analyze.steps import (
    NO_STEP,
    build_spread_schema,
    select_whole_steps,
    summarize_per_step,
)
from traceloom.trace import vocabulary as vocab
from traceloom.trace.array_types import Bools, Ints
from traceloom.trace.arrays import gather_rows, get_event_column, to_nullable_series
from traceloom.trace.frames import Result, build_schema, cast_to_schema
from traceloom.trace.trace import Trace

REGION_KINDS = ("module", "scope", "annotation")
PHASES = ("forward", "backward", "recompute")
FORWARD, BACKWARD, RECOMPUTE = range(3)
MODULE_FRAME_PREFIX = "nn.Module: "
MAX_DEPTH = 256  # levels of nested regions; deeper events count to the region above

# The compiler's notes on its own phases (torch.compile); see `compiled`.
_COMPILER_ANNOTATION = r"_data: (fn_name=.*, )?compile_id="
_RUN_BACKWARD = r"^<built-in method run_backward "


class EventRegions(Struct, frozen=True):
    """The region and part of each host event, in the forest's order; shape (host events,). Regions
    are named by the position of their event.

    Attributes:
        evidence: `python-modules`, `annotations` or `none`.
        kind: Index in KINDS; -1 for events that are not regions.
        region: The region of each event; -1 for none. A region is its own.
        above: For regions the enclosing region; -1 for roots and for other events.
        part: Index in PARTS.
        backward: Whether any backward op could be joined to its forward op.
        recompute: The evidence for repeated work: `frames`, `operators`, `none`.
    """

    evidence: str
    kind: Ints
    region: Ints
    above: Ints
    part: Ints
    backward: bool
    recompute_evidence: str


_TIME_COLUMNS = ("host_ns", "self_host_ns", "device_ns", "self_device_ns", "kernel_count")
TREE_SCHEMA = build_schema(
    "node parent depth path name kind count",
    *_TIME_COLUMNS,
    *(f"backward_{name}" for name in _TIME_COLUMNS),
    "recompute_count",
    *(f"recompute_{name}" for name in _TIME_COLUMNS),
    build_spread_schema("all_host_ns", "all_device_ns"),
    {"kind": pl.Enum(REGION_KINDS)},
)
STEP_SCHEMA = build_schema("node step all_host_ns all_device_ns")


@dataclass(frozen=True)
class Modules(Result):
    """The tree of regions; parents come before their children, siblings are sorted by all their
    time.

    Attributes:
        tree: One row per path; calls of one path are one row. `host_ns` is the time its threads
            spend in the region outside the backward pass, `device_ns` the summed duration of the
            GPU work launched in that time, `self_` the part outside child rows. `backward_` is the
            same of the backward pass: of the nodes that the region's forward ops made, on whatever
            thread they run. `recompute_` is the same of forward work repeated inside the backward
            pass by activation checkpointing. In each of the three the self times of a row and of
            all rows below it add up to its total. `backward_` and `recompute_` are null where no
            backward op could be joined to the forward op it belongs to. `mean_all_host_ns` and so
            on: all three parts together, per whole step.
        steps: All three parts together by node and step (null outside all steps); rows without time
            are left out.
        outside_host_ns: Time of the threads in which something is recorded, in no region; with the
            `self_` columns of all rows it is the busy time of the threads.
        outside_device_ns: GPU work launched in no region, or not known to be launched; with the
            `self_` columns it is all GPU work.
        unjoined_host_ns: The part of `outside_host_ns` in the backward pass: of forward ops in no
            region, of gradients being accumulated, or of ops that could not be joined.
        unjoined_device_ns: The same of `outside_device_ns`.
        evidence: `python-modules` (module calls, with annotations and scopes), `annotations`
            (annotations and scopes) or `none`.
        recompute_evidence: `frames`, `operators` or `none`; see `find_recomputed_work`.
    """

    tree: pl.DataFrame
    steps: pl.DataFrame
    outside_host_ns: int
    outside_device_ns: int
    unjoined_host_ns: int
    unjoined_device_ns: int
    evidence: str
    recompute_evidence: str


# Of one value per segment of host time: short numbers take at most half of the memory
_NODE_DTYPE: Any = np.int32
_PHASE_DTYPE: Any = np.int8


class _AttributedValues(Struct, frozen=True):
    """Values to sum, with numbers of nodes, parts (of PARTS) and steps (NO_STEP outside) of one
    length.
    """

    node: Ints
    part: Ints
    step: Ints
    value: Ints

    def by(self, node_count: int, width: int, column_index: Any) -> Ints:
        """Returns the values summed by node and column (below `width`), shape (nodes, width); nodes
        of -1 are left out.
        """
        key = self.node.astype(np.int64)
        key *= width
        key += column_index
        self_values = np.zeros((node_count + 1) * width, dtype=np.int64)
        # -1 counts from the end, where there is one more row
        np.add.at(self_values, key, self.value)
        return self_values.reshape(node_count + 1, width)[:-1]


def modules(trace: Trace) -> Modules:
    """Builds the tree from `nn.Module` calls where Python frames were recorded, from annotations
    and from scopes.
    """
    tree = build_forest(trace)
    all_regions = _assign_regions(trace)
    has_no_regions = all_regions.evidence == "none"
    node, table = (
        (all_regions.region, STEP_SCHEMA.to_frame())
        if has_no_regions
        else _build_paths(trace, tree, all_regions)
    )
    node_of_event = np.append(np.append(node, -1)[all_regions.region], -1).astype(_NODE_DTYPE)
    # Every segment in which something is recorded belongs to its innermost event.
    host_pieces, phase_of_event = build_host_pieces(trace), all_regions.part.astype(_PHASE_DTYPE)
    host = _AttributedValues(
        node_of_event[host_pieces.owner],
        phase_of_event[host_pieces.owner],
        host_pieces.step,
        host_pieces.ns,
    )
    # GPU work belongs to the host event that launched it.
    work = attribute_to_launches(trace)
    work_step = get_event_column(trace, "step", int(NO_STEP))[find_gpu_event_rows(trace)]
    work_node, work_phase = (
        node_of_event[work.launch_position],
        np.append(phase_of_event, _PHASE_DTYPE(FORWARD))[work.launch_position],
    )
    device = _AttributedValues(work_node, work_phase, work_step, work.duration_ns)
    kernels = _AttributedValues(work_node, work_phase, work_step, work.kernel.astype(np.int64))
    outside_sums = {}
    for name, sums in (("host_ns", host), ("device_ns", device)):
        is_outside = sums.node < 0
        outside_sums[f"outside_{name}"] = int(sums.value[is_outside].sum())
        outside_sums[f"unjoined_{name}"] = int(
            sums.value[is_outside & (sums.part == BACKWARD)].sum()
        )
    if has_no_regions:
        return Modules(
            TREE_SCHEMA.to_frame(),
            STEP_SCHEMA.to_frame(),
            **outside_sums,
            evidence="none",
            recompute_evidence="none",
        )

    numbers: dict[str, Ints] = {}  # columns of the tree
    for name, sums in (("host_ns", host), ("device_ns", device), ("kernel_count", kernels)):
        self_values = sums.by(table.height, len(PHASES), sums.part)
        subtree_values = _add_up_descendants(table, self_values)
        for part, prefix in enumerate(("", "backward_", "recompute_")):
            numbers[f"{prefix}{name}"] = subtree_values[:, part]
            if name != "kernel_count":
                numbers[f"{prefix}self_{name}"] = self_values[:, part]
    calls = all_regions.kind >= 0
    for name, is_in_phase in (
        ("count", all_regions.part != RECOMPUTE),
        ("recompute_count", all_regions.part == RECOMPUTE),
    ):
        numbers[name] = np.bincount(node[calls & is_in_phase], minlength=table.height)
    if not all_regions.backward:
        numbers = {
            name: column
            for name, column in numbers.items()
            if not name.startswith(("backward_", "recompute_"))
        }
    # Totals of all parts by node and step, in columns node, step, all_host_ns, all_device_ns.
    all_steps = np.unique(np.concatenate([trace.steps["step"].to_numpy(), device.step, [NO_STEP]]))
    totals = []
    for sums in (host, device):
        self_values = sums.by(table.height, all_steps.size, np.searchsorted(all_steps, sums.step))
        totals.append(_add_up_descendants(table, self_values))
    node, step_index = np.nonzero((totals[0] > 0) | (totals[1] > 0))
    frame = {
        "node": node,
        "step": to_nullable_series(all_steps[step_index], absent=int(NO_STEP)),
        "all_host_ns": totals[0][node, step_index],
        "all_device_ns": totals[1][node, step_index],
    }
    steps = pl.DataFrame(frame, schema_overrides={"step": pl.Int64}).pipe(
        cast_to_schema, STEP_SCHEMA
    )
    per_step = summarize_per_step(
        steps, ["node"], ["all_host_ns", "all_device_ns"], select_whole_steps(trace)
    )
    full_table = table.with_columns(**{name: pl.Series(column) for name, column in numbers.items()})
    full_table = full_table.join(per_step, on="node", how="left", maintain_order="left")
    missing = [
        pl.lit(None).alias(name)
        for name in TREE_SCHEMA
        if name not in {*full_table.columns, "path"}
    ]
    ordered, new_number = _sort_tree(full_table.with_columns(missing))
    return Modules(
        ordered,
        steps.with_columns(pl.Series(new_number)[steps["node"]].alias("node"))
        .sort("step", "node")
        .pipe(cast_to_schema, STEP_SCHEMA),
        **outside_sums,
        evidence=all_regions.evidence,
        recompute_evidence=all_regions.recompute_evidence,
    )


def _add_up_descendants(table: pl.DataFrame, self_values: Ints) -> Ints:
    """Returns values of the nodes with those of all nodes below; nodes are numbered level by
    level.
    """
    totals = self_values.copy()
    parent, depth = table["parent"].to_numpy(), table["depth"].to_numpy()
    for level in range(int(depth.max(initial=0)), 0, -1):
        at_level = np.flatnonzero(depth == level)
        np.add.at(totals, parent[at_level], totals[at_level])
    return totals


def _build_paths(
    trace: Trace, tree: Forest, all_regions: EventRegions
) -> tuple[Ints, pl.DataFrame]:
    """Returns for each host event the number of its path, and the paths: node, parent, depth, name,
    kind.

    Goes down level by level: a path is identified by its parent's number and its own name, and
    nesting is shallow.
    """
    vocabulary = build_vocabulary(trace)
    kind, parent_region = all_regions.kind, all_regions.above
    level = _compute_region_depths(parent_region, kind >= 0)
    node = np.full(kind.size + 1, -1, like=kind)  # one more at the end, for those without a parent
    label = vocabulary.code[tree.row].astype(np.int64) * len(REGION_KINDS) + kind
    label_count = len(vocabulary.names) * len(REGION_KINDS)
    rows: list[pl.DataFrame] = []
    count = 0
    for depth in range(int(level.max()) + 1):
        at_depth = np.flatnonzero(level == depth)
        path = (node[parent_region[at_depth]] + 1) * label_count + label[at_depth]
        distinct, first, number = np.unique(path, return_index=True, return_inverse=True)
        # Nodes are numbered in the order in which they are first called
        call_order = np.empty_like(first)
        call_order[np.argsort(first)] = np.arange(first.size)
        node[at_depth] = count + call_order[number]
        first_event = at_depth[np.sort(first)]
        rows.append(
            pl.DataFrame(
                {
                    "node": count + np.arange(distinct.size),
                    "parent": node[parent_region[first_event]],
                    "name": vocabulary.names[vocabulary.code[tree.row[first_event]]],
                    "kind": kind[first_event],
                    "depth": np.full(distinct.size, depth),
                }
            )
        )
        count += distinct.size
    return node[:-1], pl.concat(rows).with_columns(pl.col("node").cast(pl.UInt32))


def _sort_tree(table: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    """Names the paths and numbers the rows so that parents come before their children, the largest
    child first.

    Returns the rows and, for each node of `table`, its new number.
    """
    total_host_ns = pl.sum_horizontal(f"{part}host_ns" for part in ("", "backward_", "recompute_"))
    rows = table.sort(
        [pl.col("depth"), total_host_ns, pl.col("node")], descending=[False, True, False]
    ).to_dicts()
    children: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        children.setdefault(row["parent"], []).append(index)
    ordered: list[dict[str, object]] = []
    new_number = np.zeros(len(rows), dtype=np.int64)
    stack: list[tuple[int, int | None, str, str]] = [
        (index, None, "", "") for index in reversed(children.get(-1, []))
    ]
    while stack:
        index, parent, path, parent_name = stack.pop()
        row = rows[index]
        # The name without the prefix of its kind, and without the dotted name of the scope around
        # it.
        name = row["name"]
        if name.startswith(SCOPE_PREFIX):
            name = name.removeprefix(
                f"{parent_name}." if name.startswith(f"{parent_name}.") else SCOPE_PREFIX
            )
        else:
            name = name.removeprefix(
                MODULE_FRAME_PREFIX if name.startswith(MODULE_FRAME_PREFIX) else MODULE_PREFIX
            )
        path = f"{path}/{name}" if path else name
        number = len(ordered)
        new_number[row["node"]] = number
        fields = {
            "node": number,
            "parent": parent,
            "name": name,
            "path": path,
            "kind": REGION_KINDS[row["kind"]],
        }
        ordered.append({**row, **fields})
        stack.extend(
            (child, number, path, row["name"]) for child in reversed(children.get(row["node"], []))
        )
    return pl.DataFrame(ordered, schema_overrides=dict(TREE_SCHEMA)).pipe(
        cast_to_schema, TREE_SCHEMA
    ), new_number


def _assign_regions(trace: Trace) -> EventRegions:
    """Returns the region and the part of every host event.

    Forward work belongs to the innermost region around it; backward work to the region of the op
    that made its autograd node, wherever it runs; repeated work to the regions it repeats.
    """
    tree, vocabulary = build_forest(trace), build_vocabulary(trace)
    code = vocabulary.code[tree.row]
    category = get_event_column(trace, "category")[tree.row]
    python, op, annotation = (
        category == vocab.CATEGORIES.index(name)
        for name in (vocab.PYTHON, vocab.OP, vocab.ANNOTATION)
    )
    prefix_patterns = [
        f"^{re.escape(prefix)}" for prefix in (SCOPE_PREFIX, MODULE_FRAME_PREFIX, MODULE_PREFIX)
    ]
    is_scope_name, is_module_frame_name, is_module_mark_name, step_mark, is_compiler_note = (
        vocabulary.matching_each([*prefix_patterns, STEP_MARK_PATTERN, _COMPILER_ANNOTATION])
    )
    scope = gather_rows(is_scope_name, code)
    module = python & gather_rows(is_module_frame_name, code)
    is_excluded = gather_rows(step_mark | is_compiler_note, code)
    kind = np.full(tree.row.size, -1, like=tree.row)
    kind[module] = REGION_KINDS.index("module")
    kind[scope & (op | annotation)] = REGION_KINDS.index("scope")
    kind[annotation & ~scope & ~is_excluded] = REGION_KINDS.index("annotation")
    # A module call has one of Traceloom's marks, a Python frame, or both: then it counts once.
    is_module_mark = (op | annotation) & gather_rows(is_module_mark_name, code)
    kind[is_module_mark] = -1 if module.any() else REGION_KINDS.index("module")
    evidence = "python-modules" if module.any() else "annotations" if (kind >= 0).any() else "none"

    # The part of each event is that of the nearest event (itself or above) with its own part, else
    # forward.
    backward_ops, recomputed = match_backward_ops(trace), find_recomputed_work(trace)
    phase = np.full(tree.row.size, FORWARD, like=tree.row)
    if backward_ops is not None:
        phase[backward_ops.backward] = BACKWARD
    phase[gather_rows(vocabulary.matching(ENGINE_NODE_PATTERN), code)] = BACKWARD
    phase[recomputed.root] = RECOMPUTE
    # The older way of checkpointing runs a backward pass of its own inside
    if recomputed.root.any():
        inner = np.flatnonzero(gather_rows(vocabulary.matching(_RUN_BACKWARD), code))
        ancestor = tree.nearest(phase != FORWARD)[inner]
        phase[inner[(ancestor >= 0) & (phase[ancestor] == RECOMPUTE)]] = BACKWARD
    phase = np.append(phase, FORWARD)[tree.nearest_or_self(phase != FORWARD)]

    while True:
        region, ancestor = _resolve_regions(trace, tree, kind, backward_ops, recomputed.root, phase)
        level = _compute_region_depths(ancestor, kind >= 0)
        if not (level > MAX_DEPTH).any():
            break
        kind[level > MAX_DEPTH] = -1
    if backward_ops is None:  # then nothing inside regions can be distinguished
        phase = np.where(region >= 0, FORWARD, phase)
    return EventRegions(
        evidence, kind, region, ancestor, phase, backward_ops is not None, recomputed.evidence
    )


def _compute_region_depths(parent: Ints, is_region: Bools) -> Ints:
    """Returns how many regions are above each region, at most one more than the deepest level; -1
    for other events.
    """
    depths = np.where(is_region, 0, -1)
    rows = np.flatnonzero(is_region & (parent >= 0))
    ancestor = parent[rows]
    for depth in range(1, MAX_DEPTH + 2):
        if not rows.size:
            break
        depths[rows] = depth
        ancestor = parent[ancestor]
        rows, ancestor = rows[ancestor >= 0], ancestor[ancestor >= 0]
    return depths


def _resolve_regions(  # noqa: PLR0917
    trace: Trace,
    tree: Forest,
    kind: Ints,
    backward_ops: BackwardMatches | None,
    is_recompute_root: Bools,
    phase: Ints,
) -> tuple[Ints, Ints]:
    """Returns the region of each event, and that above each region.

    Marks are regions, joined backward ops and the roots of repetitions; each event takes the region
    of the nearest one. A region is its own, a backward op has that of its forward op, a repetition
    that around the work it repeats.
    """
    size = tree.row.size
    is_region = kind >= 0
    is_mark = is_region | is_recompute_root
    forward_op = np.full(size, -1, like=tree.row)
    if backward_ops is not None:
        forward_op[backward_ops.backward] = backward_ops.forward
        is_mark = is_mark | (forward_op >= 0)
    nearest_mark_above = tree.nearest(is_mark)
    nearest_mark = tree.nearest_or_self(is_mark, nearest_mark_above)
    source = np.full(size, -1, like=tree.row)  # the mark whose region another mark takes
    unmarked_backward = np.flatnonzero((forward_op >= 0) & ~is_region)
    source[unmarked_backward] = nearest_mark[forward_op[unmarked_backward]]
    parent_mark = nearest_mark_above.copy()  # the mark above each region
    recompute_roots = np.flatnonzero(is_recompute_root & ~is_region)
    if recompute_roots.size:
        enclosing = nearest_mark_above[recompute_roots]
        source[recompute_roots] = np.where(
            forward_op[recompute_roots] >= 0, source[recompute_roots], enclosing
        )
        inner = np.flatnonzero(
            is_region
            & (nearest_mark_above >= 0)
            & np.append(is_recompute_root & ~is_region, False)[nearest_mark_above]
        )
        # For regions that repeat one: the latest earlier region of the same name in the forward
        # pass; -1 for none.
        code = build_vocabulary(trace).code[tree.row].astype(np.int64)
        first = np.flatnonzero((kind >= 0) & (phase == FORWARD))
        if not first.size or not inner.size:
            original = np.full(inner.size, -1)
        else:
            key = code * trace.events.height + tree.row  # rows are in the order of starts
            order = first[np.argsort(key[first], kind="stable")]
            match_index = np.searchsorted(key[order], key[inner], side="left") - 1
            matches = (match_index >= 0) & (code[order[np.maximum(match_index, 0)]] == code[inner])
            original = np.where(matches, order[np.maximum(match_index, 0)], -1)
        has_original = original >= 0
        inner, original = inner[has_original], original[has_original]
        parent_mark[inner] = nearest_mark_above[original]
        # The first region inside shows where the repetition belongs
        source[nearest_mark_above[inner][::-1]] = nearest_mark_above[original][::-1]
    # Follow `source` from every mark to a region; -1 where it ends without one.
    resolved = np.where(is_region, np.arange(size, like=source), source)
    unresolved = np.flatnonzero((resolved >= 0) & ~is_region[resolved]) if size else resolved
    # Terminates, since each source began earlier than the mark that refers to it
    while unresolved.size:
        resolved[unresolved] = source[resolved[unresolved]]
        unresolved = unresolved[resolved[unresolved] >= 0]
        unresolved = unresolved[~is_region[resolved[unresolved]]]
    region = np.append(resolved, -1)[nearest_mark]
    return region, np.where(is_region, np.append(resolved, -1)[parent_mark], -1)
