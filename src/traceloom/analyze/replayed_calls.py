"""Modelled calls behind the kernels of graph replays, from a second recording that knows their operators and shapes.

Each replay of a graph makes the calls of the capture anew: the operator's FLOPs and bytes count once per replay, of
attention those of the batch that is replayed: the annotation around the launch tells it, the capture has none. Where
both recordings tell the grid of a kernel they must agree: other grids mean other shapes, as in the capture of the same
graph for another batch size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from traceloom.analyze.ancestry import forest
from traceloom.analyze.flops import MODELS
from traceloom.analyze.flops.attention import PAGED
from traceloom.analyze.graph_capture import mapped_nodes
from traceloom.analyze.graph_launches import graph_launches, replayed_work
from traceloom.analyze.intervals import Ints
from traceloom.analyze.modelled_calls import ModelledCalls, batches, calls_around, modelled_calls, remodelled
from traceloom.model import Trace
from traceloom.model.category import GPU_WORK
from traceloom.read.again import readable, whole

_OTHER_GRID = "the capture ran this kernel with another grid, so with other shapes"
_NO_CALL = "the capture knows its operator, but not the shapes of its inputs, or there is no model of it"


def with_replays(trace: Trace, capture: Trace) -> ModelledCalls:
    """The modelled calls of a trace and those that its graph replays make, by the operators of the capture.

    The calls of replays follow those of the forest: `above` is the graph launch that made them, `unmapped` says of the
    rest of the replayed work why it has none.
    """
    base = modelled_calls(trace)
    work = replayed_work(trace).with_columns(pl.col("graph", "node").cast(pl.UInt32))
    if not work.height:
        return base
    nodes = _operators(trace, capture)
    launches = work["launch"].unique().sort()
    batch_of = pl.DataFrame({"launch": launches, "batch": batches(trace, launches)})
    batch_names = [batch for batch in batch_of["batch"].unique(maintain_order=True) if batch]
    below = calls_around(capture, nodes["position"].drop_nulls().to_numpy(), batch_names[0] if batch_names else "")
    position = nodes["position"].fill_null(-1).to_numpy()
    capture_call = np.append(below.owner, -1)[position]
    nodes = nodes.with_columns(
        pl.Series("theirs", capture_call),
        pl.when(pl.col("reason").is_null() & pl.Series(capture_call < 0)).then(pl.lit(_NO_CALL)).otherwise("reason")
        .alias("reason"),
    )  # fmt: skip
    work = work.join(nodes, on=["graph", "node"], how="left", maintain_order="left")
    events = trace.events.lazy().filter(pl.col("category").is_in(GPU_WORK)).select("event").collect()["event"]
    at = np.searchsorted(events.to_numpy(), work["event"].to_numpy())
    free = (base.work_owner[at] < 0) & ~base.link[at]
    made = work.with_columns(pl.Series("at", at)).filter(pl.Series(free), pl.col("theirs") >= 0)
    calls = made.select("launch", "theirs").unique(maintain_order=True).with_row_index("call")
    made = made.join(calls, on=["launch", "theirs"], how="left", maintain_order="left")
    first = base.group.size
    work_owner = base.work_owner.copy()
    work_owner[made["at"].to_numpy()] = first + made["call"].to_numpy().astype(np.int64)
    numbers = np.arange(first, first + calls.height, dtype=np.int64)
    groups, group = _of_batches(
        below, calls.join(batch_of, on="launch", how="left", maintain_order="left"), batch_names
    )
    offset = base.groups.height
    return replace(
        base,
        groups=pl.concat([base.groups, groups.with_columns(pl.col("group") + offset)]),
        group=np.append(base.group, group + offset),
        owner=np.append(base.owner, numbers),
        above=np.append(base.above, forest(trace).position[calls["launch"].to_numpy()]),
        work_owner=work_owner,
        unmapped=work.filter(pl.col("reason").is_not_null()).select("event", "reason"),
    )


def _of_batches(below: ModelledCalls, calls: pl.DataFrame, batch_names: list[str]) -> tuple[pl.DataFrame, Ints]:
    """The groups of the calls that launches made (`theirs`, `batch`): of attention one for each batch.

    Args:
        below: The calls of the capture, attention as it is with the first batch.
        calls: One row per call.
        batch_names: The batches.

    Returns:
        All groups, and the number of the group of each call.
    """
    group = below.group[calls["theirs"].to_numpy()]
    names = [name for name in below.groups["name"].unique().to_list() if MODELS.family(name) == PAGED]
    paged = below.groups.filter(pl.col("name").is_in(names))["group"].to_numpy()
    groups, height = [below.groups], below.groups.height
    for batch in batch_names[1:] if paged.size else []:
        of_batch = np.isin(group, paged) & (calls["batch"] == batch).to_numpy()
        if of_batch.any():
            used, index = np.unique(group[of_batch], return_inverse=True)
            group[of_batch] = height + index
            batch_groups = remodelled(below, used, batch)
            groups.append(batch_groups.with_columns(pl.int_range(pl.len(), dtype=pl.UInt32).alias("group") + height))
            height += batch_groups.height
    return pl.concat(groups), group


def _operators(trace: Trace, capture: Trace) -> pl.DataFrame:
    """graph, node, position (of the operator in the capture's forest; null for none), reason (why there is none)."""
    replays = graph_launches(trace)
    mapped = mapped_nodes(replays, capture, launches=True)
    grids = _grids(capture, mapped["kernel"]), _grids(trace, replays.nodes["example"])
    comparable = grids[0].is_not_null() & grids[1].is_not_null()
    other = comparable & (grids[0] != grids[1]).fill_null(value=False)
    op = mapped["op"].fill_null(0).to_numpy()
    places = forest(capture).position
    position = pl.Series("position", places[op] if places.size else np.full(op.size, -1, dtype=np.int64))
    has_position = mapped["op"].is_not_null() & ~other & (position >= 0)
    return mapped.select(
        "graph",
        "node",
        pl.when(has_position).then(position).alias("position"),
        pl.when(other).then(pl.lit(_OTHER_GRID)).otherwise("reason").alias("reason"),
    )


def _grids(trace: Trace, rows: pl.Series) -> pl.Series:
    """The grid of each of these events as text; null where it is not recorded."""
    none = pl.Series("grid", [None], dtype=pl.String).new_from_index(0, rows.len())
    distinct = rows.drop_nulls().unique().sort()
    if not distinct.len() or not readable(trace):
        return none
    events: Ints = distinct.to_numpy().astype(np.int64)
    grids = [args.get("grid") for args in whole(trace, events)]
    grid_by_row = pl.DataFrame({"row": distinct, "grid": [None if grid is None else str(grid) for grid in grids]})
    grid_by_row = grid_by_row.with_columns(pl.col("grid").cast(pl.String))
    return rows.alias("row").to_frame().join(grid_by_row, on="row", how="left", maintain_order="left")["grid"]
