"""Who holds what at an instant: a tree that adds up to the total."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceloom.analyze.allocations.named import Named
from traceloom.analyze.allocations.owners import BlockOwners
from traceloom.array_types import Bools, Ints
from traceloom.model.frames import schema

BEFORE = "(before the recording)"
OWNED = {
    "parameter": "parameters", "buffer": "buffers", "gradient": "gradients", "optimizer_state": "optimizer state",
    "activation": "activations", "other": "other tensors",
}  # fmt: skip
TREE = schema("node parent depth name path bytes self_bytes block_count fraction")


def scope_tree(named: Named, chosen: Bools, unseen_bytes: int, whose: BlockOwners) -> pl.DataFrame:
    """The chosen blocks by scope, then op, as a tree; parents stand before children, the largest child first.

    Args:
        named: Blocks with names.
        chosen: Which of them.
        whose: BlockOwners: blocks from before that a census knows stand under their owner's name.
        unseen_bytes: What the allocator's total holds beyond all blocks: memory from before the recording.

    Returns:
        `TREE`. The root has depth 0 and everything; `self_bytes` is what no child holds; they add up to the root.
    """
    rows = np.flatnonzero(chosen)
    recorded = rows[named.blocks.made[rows] >= 0]
    pairs = pl.DataFrame(
        {"path": named.path[recorded], "label": named.label[recorded], "bytes": named.blocks.bytes[recorded]}
    )
    sums = pairs.group_by("path", "label").agg(pl.col("bytes").sum(), pl.len().cast(pl.Int64).alias("block_count"))
    scopes = [path.split(".") if path else [] for path in named.places.paths]
    labels = named.places.labels
    leaves = [((*scopes[path], labels[label]), size, count) for path, label, size, count in sums.rows()]
    early = rows[named.blocks.made[rows] < 0]
    counted, nobodys = early[whose.of[early] >= 0], early[whose.of[early] < 0]
    owner_rows = whose.table[whose.of[counted]]
    for kind, name, size in zip(
        owner_rows["owner"], owner_rows["name"], named.blocks.bytes[counted].tolist(), strict=True
    ):
        leaves.append(((BEFORE, OWNED.get(kind, kind), name), size, 1))
    unknown = int(named.blocks.bytes[nobodys].sum()) + unseen_bytes
    if unknown:
        leaves.append(((BEFORE, "unknown"), unknown, nobodys.size))
    return tree_of(leaves)


def tree_of(leaves: list[tuple[tuple[str, ...], int, int]]) -> pl.DataFrame:
    """A tree from (names from the root, bytes, blocks); rows as `TREE`."""
    total: dict[tuple[str, ...], list[int]] = {(): [0, 0, 0]}
    for names, size, count in leaves:
        for depth in range(len(names) + 1):
            entry = total.setdefault(names[:depth], [0, 0, 0])
            entry[0] += size
            entry[2] += count
        total[names][1] += size
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for names in total:
        if names:
            children.setdefault(names[:-1], []).append(names)
    out: list[dict[str, object]] = []
    stack: list[tuple[tuple[str, ...], int | None]] = [((), None)]
    whole = max(total[()][0], 1)
    while stack:
        names, parent = stack.pop()
        size, own, count = total[names]
        out.append(
            {
                "node": len(out), "parent": parent, "depth": len(names), "name": names[-1] if names else "total",
                "path": ".".join(names), "bytes": size, "self_bytes": own, "block_count": count,
                "fraction": size / whole,
            }
        )  # fmt: skip
        node = len(out) - 1
        inside = sorted(children.get(names, []), key=lambda child: (-total[child][0], child), reverse=True)
        stack.extend((child, node) for child in inside)
    return pl.DataFrame(out, schema=TREE)


def sums_by(named: Named, chosen: Bools, key: Ints, names: pl.Series) -> pl.DataFrame:
    """Bytes and blocks of the chosen blocks by any number per block; name, bytes, block_count, fraction."""
    rows = np.flatnonzero(chosen)
    sums = (
        pl.DataFrame({"key": key[rows], "bytes": named.blocks.bytes[rows]})
        .group_by("key")
        .agg(pl.col("bytes").sum(), pl.len().cast(pl.Int64).alias("block_count"))
    )
    whole = max(int(sums["bytes"].sum()), 1)
    return sums.select(
        names.gather(sums["key"].cast(pl.UInt32)).alias("name"),
        "bytes",
        "block_count",
        fraction=pl.col("bytes") / whole,
    ).sort("bytes", "name", descending=[True, False])
