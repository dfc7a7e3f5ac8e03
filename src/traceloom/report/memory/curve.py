"""The curve of one memory: levels over time by category, by scope with its op, and by stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from traceloom.analyze.allocations import Explained
from traceloom.analyze.allocations.categories import BEFORE as OF_BEFORE
from traceloom.analyze.allocations.holders import OWNED
from traceloom.analyze.allocations.over_time import INSTANTS, instants, largest_keys, levels_by
from traceloom.analyze.allocations.partitions import BEFORE
from traceloom.array_types import Ints
from traceloom.report.absent import Absent

if TYPE_CHECKING:
    from traceloom.report.documents.memory import MemoryCurveRow, MemoryRankStepsRow, MemorySeriesRow

LEAVES = 120  # scopes that a curve tells apart; the rest is one
STACKS = 60
OTHER = "(other)"


def curve(
    explained: Explained, pool: int, unseen: int, absent: Absent, *, most: int = INSTANTS, leaves: int = LEAVES
) -> MemoryCurveRow:
    """Levels over time at a few hundred instants, the highest among them; each division adds up to the same total.

    Args:
        explained: The blocks.
        pool: Which memory.
        unseen: Bytes that the allocator held before the recording and that nobody saw.
        absent: Times count from its epoch; says why there are no stacks.
        most: About how many instants.
        leaves: Scopes with their op that are told apart; the rest is `(other)`.
    """
    blocks, trace = explained.named.blocks, explained.trace
    rows = instants(blocks.levels(pool, trace.allocations.height), most)
    times = trace.allocations["time_ns"].to_numpy()
    at = np.where(rows < 0, trace.start_ns, times[np.maximum(rows, 0)]) - absent.epoch_ns
    kinds, kind = explained.by("category")
    by_kind = levels_by(blocks, kind, len(kinds), rows, pool)
    by_kind[OF_BEFORE] += unseen
    names, leaf = _leaves(explained)
    stacks = None
    if explained.has_stacks:
        stacks = _told(explained, explained.by("stack"), (pool, rows), unseen, STACKS)
    return {
        "time_ns": at.tolist(),
        "categories": _series(kinds, by_kind),
        "scopes": _told(explained, (names, leaf), (pool, rows), unseen, leaves),
        "stacks": absent.value(stacks, "memories[*].curve.stacks"),
    }


def _leaves(explained: Explained) -> tuple[list[str], Ints]:
    """Scope and op of each block; of blocks from before the recording, what their owner is."""
    named, labels = explained.named, explained.named.places.labels
    scopes, scope = explained.by("scope")
    plain = scope.astype(np.int64) * len(labels) + named.label
    owner = explained.whose.table["owner"].to_list()
    kinds = [*dict.fromkeys(owner), "unknown"]
    number = np.append(np.array([kinds.index(kind) for kind in owner], dtype=np.int64), len(kinds) - 1)
    key = np.where(named.blocks.made < 0, -1 - number[explained.whose.of], plain)
    distinct, leaf = np.unique(key, return_inverse=True)
    names = []
    for code in distinct.tolist():
        if code < 0:
            kind = kinds[-1 - code]
            names.append(f"{BEFORE}.{OWNED.get(kind, kind)}")
        else:
            path, label = scopes[code // len(labels)], labels[code % len(labels)]
            names.append(label if path.startswith("(") else f"{path}.{label}")
    return names, leaf.astype(np.int64)


def _told(
    explained: Explained, parts: tuple[list[str], Ints], at: tuple[int, Ints], unseen: int, most: int
) -> list[MemorySeriesRow]:
    """The largest parts and the rest."""
    (names, number), (pool, rows) = parts, at
    levels = levels_by(explained.named.blocks, number, len(names), rows, pool)
    kept, shown = largest_keys(levels, most)
    series = _series([*(names[k] for k in kept.tolist()), OTHER], shown)
    if not unseen:
        return series
    name = f"{BEFORE}.unknown"
    before = next((entry for entry in series if entry["name"] == name), None)
    if before is None:
        return [*series, {"name": name, "bytes": [unseen] * rows.size}]
    before["bytes"] = [level + unseen for level in before["bytes"]]
    return series


def _series(names: list[str], levels: Ints) -> list[MemorySeriesRow]:
    return [{"name": name, "bytes": row.tolist()} for name, row in zip(names, levels, strict=True) if row.any()]


def steps(explained: Explained, absent: Absent) -> list[MemoryRankStepsRow]:
    """The steps of a trace, to be marked on its curves."""
    rows = explained.trace.steps.select("step", "start_ns", end_ns=pl.col("end_ns") - absent.epoch_ns)
    return absent.rows(rows, "ranks[*].steps")
