"""Which module, scope or annotation the time belongs to, as a tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import Forest, forest
from traceloom.analyze.attribution import launched_work
from traceloom.analyze.autograd import backward_of
from traceloom.analyze.intervals import Bools, Ints
from traceloom.analyze.phases import SCOPE_PREFIX, STEP_MARK
from traceloom.analyze.vocabulary import vocabulary
from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.result import Result
from traceloom.read.large import column, engine
from traceloom.read.ondisk import lookup

KINDS = ("module", "scope", "annotation")
TREE = pl.Schema(
    {
        "node": pl.UInt32(),
        "parent": pl.UInt32(),
        "depth": pl.UInt16(),
        "path": pl.String(),
        "name": pl.String(),
        "kind": pl.Enum(KINDS),
        "count": pl.Int64(),
        "host_ns": pl.Int64(),
        "self_host_ns": pl.Int64(),
        "device_ns": pl.Int64(),
        "self_device_ns": pl.Int64(),
        "kernel_count": pl.Int64(),
        "backward_host_ns": pl.Int64(),
        "backward_device_ns": pl.Int64(),
    }
)
MODULE = "nn.Module: "
_DEEPEST = 256  # levels of nested regions; what lies deeper counts to the region above


@dataclass(frozen=True)
class Modules(Result):
    """The tree of regions; parents stand before their children, siblings by host time.

    Attributes:
        tree: One row per path; calls of one path are one row. `host_ns` is the time of the calls on their threads (of
            a module: its forward), `device_ns` the summed duration of the GPU work launched in it, `self_` the part
            outside child rows; self times of a tree add up to its root's total. `backward_host_ns` and
            `backward_device_ns` are those of the backward ops whose forward op ran in the region; null where the
            recording does not tell.
        evidence: `python-modules` (module calls and scopes), `annotations` (annotations and scopes) or `none`.
    """

    tree: pl.DataFrame
    evidence: str


def modules(trace: Trace) -> Modules:
    """Build the tree from `nn.Module` calls where Python frames were recorded, else from annotations and scopes."""
    tree = forest(trace)
    evidence, kind = _regions(trace, tree)
    if not (kind >= 0).any():
        return Modules(TREE.to_frame(), "none")
    wanted = kind >= 0
    above = tree.nearest(wanted)
    level = _levels(above, wanted)
    if (level > _DEEPEST).any():
        kind[level > _DEEPEST] = level[level > _DEEPEST] = -1
        wanted = kind >= 0
        above = tree.nearest(wanted)
    node, table = _paths(trace, tree, kind, level, above)
    span, own = tree.span_ns(), tree.self_ns(wanted, above)
    owner = tree.nearest_or_self(wanted, above)
    device, kernels, _ = launched_work(trace).by_owner(owner)
    backward = _backward(trace, tree, owner)
    values = {
        "host_ns": span,
        "self_host_ns": own,
        "device_ns": tree.subtree_sums(device),
        "self_device_ns": device,
        "kernel_count": tree.subtree_sums(kernels),
    }
    if backward is not None:
        values |= {f"backward_{name}": tree.subtree_sums(part) for name, part in backward.items()}
    calls = pl.LazyFrame({"node": node, "wanted": wanted, **values}).filter("wanted").group_by("node")
    sums = calls.agg(pl.len().alias("count"), pl.col(list(values)).sum()).collect(engine=engine(trace))
    missing = [pl.lit(None).alias(name) for name in TREE if name not in {*table.columns, *sums.columns}]
    return Modules(_ordered(table.join(sums, on="node").with_columns(missing)), evidence)


def _regions(trace: Trace, tree: Forest) -> tuple[str, Ints]:
    """The evidence, and for each host event its kind of region (index of KINDS); -1 for none."""
    words = vocabulary(trace)
    category = column(trace, "category")[tree.row]
    python, op, annotation = (category == cat.CATEGORIES.index(one) for one in (cat.PYTHON, cat.OP, cat.ANNOTATION))
    code = words.code[tree.row]
    scope = lookup(words.names.str.starts_with(SCOPE_PREFIX).to_numpy(), code)
    module = python & lookup(words.names.str.starts_with(MODULE).to_numpy(), code)
    kind = np.full(tree.row.size, -1, like=tree.row)
    kind[module] = KINDS.index("module")
    kind[scope & (op | annotation)] = KINDS.index("scope")
    if module.any():
        return "python-modules", kind
    kind[annotation & ~scope & ~lookup(words.matching(STEP_MARK), code)] = KINDS.index("annotation")
    return "annotations", kind


def _paths(trace: Trace, tree: Forest, kind: Ints, level: Ints, above: Ints) -> tuple[Ints, pl.DataFrame]:
    """For each host event the number of its path, and the paths: node, parent, depth, name, kind.

    Goes down level by level: a path is known by its parent's number and its own name, and nesting is shallow.
    """
    words = vocabulary(trace)
    node = np.full(kind.size + 1, -1, like=kind)  # one more at the end, for those with nobody above
    label = words.code[tree.row].astype(np.int64) * len(KINDS) + kind
    labels = len(words.names) * len(KINDS)
    rows: list[pl.DataFrame] = []
    count = 0
    for depth in range(int(level.max()) + 1):
        here = np.flatnonzero(level == depth)
        path = (node[above[here]] + 1) * labels + label[here]
        distinct, first, number = np.unique(path, return_index=True, return_inverse=True)
        turn = np.empty_like(first)  # nodes are numbered in the order in which they are first called
        turn[np.argsort(first)] = np.arange(first.size)
        node[here] = count + turn[number]
        example = here[np.sort(first)]
        rows.append(
            pl.DataFrame(
                {
                    "node": count + np.arange(distinct.size),
                    "parent": node[above[example]],
                    "name": words.names.gather(words.code[tree.row[example]]),
                    "kind": kind[example],
                    "depth": np.full(distinct.size, depth),
                }
            )
        )
        count += distinct.size
    return node[:-1], pl.concat(rows)


def _levels(above: Ints, wanted: Bools) -> Ints:
    """How many regions stand above each region, at most one more than the deepest level; -1 for what is none."""
    level = np.where(wanted, 0, -1)
    rows = np.flatnonzero(wanted & (above >= 0))
    up = above[rows]
    for depth in range(1, _DEEPEST + 2):
        level[rows] = depth
        up = above[up]
        rows, up = rows[up >= 0], up[up >= 0]
    return level


def _backward(trace: Trace, tree: Forest, owner: Ints) -> dict[str, Ints] | None:
    """Host and device time of backward ops, added up at the innermost region of their forward ops."""
    joined = backward_of(trace, tree)
    if joined is None:
        return None
    region = owner[joined.forward]
    known = region >= 0
    out = {}
    for name, values in (("host_ns", joined.host_ns), ("device_ns", joined.device_ns)):
        total = np.zeros(owner.size, dtype=np.int64, like=owner)
        np.add.at(total, region[known], values[known])
        out[name] = total
    return out


def _ordered(table: pl.DataFrame) -> pl.DataFrame:
    """Name the paths and number the rows so that parents come before their children, the largest child first."""
    rows = table.sort(["depth", "host_ns", "node"], descending=[False, True, False]).to_dicts()
    children: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        children.setdefault(row["parent"], []).append(index)
    ordered: list[dict[str, object]] = []
    stack: list[tuple[int, int | None, str, str]] = [(index, None, "", "") for index in reversed(children.get(-1, []))]
    while stack:
        index, parent, path, above = stack.pop()
        row = rows[index]
        name = _shown(row["name"], above)
        path = f"{path}/{name}" if path else name
        number = len(ordered)
        place = {"node": number, "parent": parent, "name": name, "path": path, "kind": KINDS[row["kind"]]}
        ordered.append({**row, **place})
        stack.extend((child, number, path, row["name"]) for child in reversed(children.get(row["node"], [])))
    return pl.DataFrame(ordered, schema_overrides=dict(TREE)).select(list(TREE)).cast(TREE)


def _shown(name: str, above: str) -> str:
    """A region's name without the prefix of its kind, and without the dotted name of the scope around it."""
    if name.startswith(MODULE):
        return name[len(MODULE) :]
    if name.startswith(SCOPE_PREFIX):
        return name[len(above) + 1 :] if name.startswith(f"{above}.") else name[len(SCOPE_PREFIX) :]
    return name
