"""From units and communication to the nodes of each file: durations, dependencies, order, ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from traceloom.array_types import Bools, Ints
from traceloom.chakra.astra_sim.communication import communication_of
from traceloom.chakra.astra_sim.order import awaited, last_before, order_of_job
from traceloom.chakra.astra_sim.said import Changes, notices_of
from traceloom.chakra.astra_sim.units import Units, units_of
from traceloom.chakra.plain import PLAIN, Pairs, PlainNodes
from traceloom.chakra.schema import NodeType
from traceloom.model.graph import Graph
from traceloom.model.notice import Notice

_IN_TURN = (int(NodeType.COMM_COLL_NODE), int(NodeType.COMM_SEND_NODE))  # one of them at a time
_US = 1000
_LEAST_UNEXPLAINED_NS = 10_000  # shorter ones are left to the notice about delays


@dataclass(frozen=True)
class _Nodes:
    """The nodes of all files, and pairs (target, source) of row numbers."""

    frame: pl.DataFrame
    pairs: Ints
    added: Ints


def lay_out(
    graph: Graph, ranks: list[int], *, gpu_only: bool
) -> tuple[list[PlainNodes], dict[str, list[int]], list[Notice]]:
    """The nodes of every rank's file, the groups, and what was changed."""
    units = units_of(graph)
    communication = communication_of(graph, {rank: number for number, rank in enumerate(ranks)})
    frame = units.frame.join(communication.rows, on="node", how="left", maintain_order="left", suffix="_of")
    # Whole microseconds: what a chain of nodes loses in one, the next one gets.
    total = pl.col("work_ns").cum_sum().over("lane")
    chain = total // _US - (total - pl.col("work_ns")) // _US
    transfers = pl.col("transfer_ns").is_not_null() & ~pl.col("on_host")
    frame = frame.with_columns(
        pl.when(transfers).then((pl.col("transfer_ns") + _US // 2) // _US).otherwise(chain).alias("duration_us"),
        pl.col("type").fill_null(int(NodeType.COMP_NODE)),
    )
    leading = _leads_to_work(units, frame)
    works = ~frame["on_host"].to_numpy()
    kept = works | ((frame["duration_us"].to_numpy() > 0) & leading & (not gpu_only))
    waits = awaited(units, kept)
    pairs = np.stack([waits.target, waits.source], axis=1)
    nodes = _Nodes(frame, pairs, np.zeros((0, 2), np.int64))
    begin = int(graph.nodes["start_ns"].min() or 0)  # type: ignore[arg-type]
    # Long times before GPU work that nothing explains, of each node: traces without host events have them, and devices
    # that were busy with something else before the window.
    from_origin = pl.when(pl.col("kind") == "origin").then("delay_ns").otherwise(0)
    late = graph.edges.filter(~pl.col("to_end")).select("target", (pl.col("residual_ns") + from_origin).alias("late"))
    late = late.filter(pl.col("late") >= _LEAST_UNEXPLAINED_NS)
    unexplained = late.group_by(pl.col("target").alias("node")).agg(pl.col("late").max().alias("residual_ns"))
    nodes, kept = _with_delays(nodes, kept, begin, None if gpu_only else unexplained)
    delays = nodes.frame[frame.height :]
    if not gpu_only:
        nodes, kept = _with_starts(nodes, kept, begin)
    # The communication of every rank in one order, so that all ranks agree; what waits in a circle fits none.
    position = order_of_job(nodes.frame, nodes.pairs)
    in_turn = nodes.frame["type"].is_in(_IN_TURN)
    turn = nodes.frame.with_columns(pl.Series("place", position)).with_row_index("row").filter(in_turn)
    loose = turn.filter(pl.col("place") < 0).height
    rows = (
        turn.filter(pl.col("place") >= 0)
        .sort("rank", "place", "row")
        .select(pl.col("row").cast(pl.Int64), pl.col("row").shift(1).over("rank").cast(pl.Int64).alias("before"))
        .drop_nulls()
        .to_numpy()
    )
    last = last_before(position, in_turn.to_numpy(), nodes.pairs)
    added = rows[last[rows[:, 0]] < position[rows[:, 1]]]  # else a path leads there already
    nodes = _Nodes(nodes.frame, np.concatenate([nodes.pairs, added]), np.concatenate([nodes.added, added]))
    files = [_file(nodes, kept, rank) for rank in ranks]
    changes = Changes(
        graph, frame, kept[: frame.height], leading, int(waits.queued.sum()), loose, communication.by_order, delays
    )
    empty = [rank for rank, file in zip(ranks, files, strict=True) if not file.nodes.height]
    return files, communication.groups, list(notices_of(changes, ranks, empty, len(nodes.added), gpu_only=gpu_only))


def _leads_to_work(units: Units, frame: pl.DataFrame) -> Bools:
    """Units of threads that GPU work or communication waits for, over other threads too; all where there is none."""
    lane = frame["lane"].fill_null(2**31).cast(pl.Int64).to_numpy()
    works = ~frame["on_host"].to_numpy()
    if not works.any():
        return np.ones(frame.height, np.bool_)
    between = np.unique(np.stack([lane[units.source], lane[units.target]], axis=1), axis=0)
    reached = set(lane[works].tolist())
    before: dict[int, list[int]] = {}
    for source, target in between.tolist():
        before.setdefault(target, []).append(source)
    ahead = list(reached)
    while ahead:
        for source in before.get(ahead.pop(), []):
            if source not in reached:
                reached.add(source)
                ahead.append(source)
    return np.isin(lane, list(reached))


def _with_starts(nodes: _Nodes, kept: Bools, begin: int) -> tuple[_Nodes, Bools]:
    """With a node before everything else of each rank that began later than the first: ASTRA-sim starts all at 0."""
    chosen = nodes.frame.with_row_index("row").filter(pl.Series(kept))
    begins = chosen.group_by("rank").agg(pl.col("start_ns").min()).sort("rank")
    starts = begins.select(
        pl.lit("start").alias("name"),
        "rank",
        pl.lit(begin, dtype=pl.Int64).alias("start_ns"),
        pl.col("start_ns").alias("end_ns"),
        pl.lit(value=True).alias("on_host"),
        ((pl.col("start_ns") - begin) // _US).alias("duration_us"),
        pl.lit(int(NodeType.COMP_NODE), dtype=nodes.frame.schema["type"]).alias("type"),
    ).filter(pl.col("duration_us") > 0)
    first = nodes.frame.height
    roots = np.setdiff1d(chosen["row"].to_numpy(), nodes.pairs[:, 0])
    of_rank = pl.DataFrame({"rank": starts["rank"], "start": np.arange(starts.height) + first})
    added = (
        pl.DataFrame({"row": roots, "rank": nodes.frame["rank"].gather(roots)})
        .join(of_rank, on="rank", maintain_order="left")
        .select(pl.col("row").cast(pl.Int64), "start")
        .to_numpy()
    )
    frame = pl.concat([nodes.frame, starts], how="diagonal_relaxed")
    everything = np.concatenate([kept, np.ones(starts.height, np.bool_)])
    return _Nodes(frame, np.concatenate([nodes.pairs, added]), np.concatenate([nodes.added, added])), everything


def _with_delays(nodes: _Nodes, kept: Bools, begin: int, unexplained: pl.DataFrame | None) -> tuple[_Nodes, Bools]:
    """With a node for times in which a rank's GPU had nothing to do, before the work that ended them.

    It waits for what that work waits for, and for the work that ended last before it.

    Args:
        nodes: The nodes so far.
        kept: Which of them are kept.
        begin: Start of the job, ns: who begins later, does so here too.
        unexplained: `node`, `residual_ns`: where host work is there, only this much of such a time is a node: what
            neither the host nor anything else explains. None where host work is left out: then all of it is.
    """
    work = (
        nodes.frame.with_row_index("row")
        .filter(pl.Series(kept) & ~pl.col("on_host"))
        .sort("rank", "start_ns", "row")
        .with_columns(pl.col("end_ns").cum_max().shift(1).over("rank").alias("free"))
        .with_columns((pl.col("start_ns") - pl.col("free").fill_null(begin)).clip(lower_bound=0).alias("gap"))
    )
    if unexplained is not None:
        work = work.join(unexplained, on="node", how="left", maintain_order="left").with_columns(
            pl.min_horizontal("gap", pl.col("residual_ns").fill_null(0)).alias("gap")
        )
    total = pl.col("gap").cum_sum().over("rank")
    work = work.with_columns((total // _US - (total - pl.col("gap")) // _US).alias("gap_us"))
    delayed = work.filter(pl.col("gap_us") > 0)
    delays = delayed.select(
        pl.lit("host" if unexplained is None else "unexplained").alias("name"),
        pl.col("rank"),
        (pl.col("start_ns") - pl.col("gap")).alias("start_ns"),
        pl.col("start_ns").alias("end_ns"),
        pl.lit(False).alias("on_host"),
        pl.col("gap_us").alias("duration_us"),
        pl.lit(int(NodeType.COMP_NODE), dtype=pl.Int64).alias("type"),
    )
    first = nodes.frame.height
    frame = pl.concat([nodes.frame, delays.cast({"type": nodes.frame.schema["type"]})], how="diagonal_relaxed")
    rows, new = delayed["row"].to_numpy().astype(np.int64), np.arange(delayed.height) + first
    delay_of = np.full(frame.height, -1, np.int64)
    delay_of[rows] = new
    target, source = nodes.pairs[:, 0], nodes.pairs[:, 1]
    moved = np.stack([np.where(delay_of[target] >= 0, delay_of[target], target), source], axis=1)
    # The row of the work that ended last, of all that started before on the same rank.
    record = pl.when(pl.col("end_ns") > pl.col("free").fill_null(-(2**62))).then("row").forward_fill().over("rank")
    work = work.with_columns(record.alias("record")).with_columns(pl.col("record").shift(1).over("rank").alias("last"))
    last = work.filter(pl.col("gap_us") > 0)["last"]
    added = np.stack([new, last.fill_null(-1).to_numpy()], axis=1)
    added = added[added[:, 1] >= 0]
    if len(added):  # only pairs that are not there already
        width = 1 + max(int(added.max()), int(moved.max(initial=0)))
        added = added[~np.isin(added[:, 0] * width + added[:, 1], moved[:, 0] * width + moved[:, 1])]
    pairs = np.concatenate([moved, np.stack([rows, new], axis=1), added])
    return _Nodes(frame, pairs, added), np.concatenate([kept, np.ones(len(new), np.bool_)])


def _file(nodes: _Nodes, kept: Bools, rank: int) -> PlainNodes:
    """The nodes of one rank, numbered from 1 in the order of their starts."""
    of_rank = kept & (nodes.frame["rank"] == rank).fill_null(value=False).to_numpy()
    rows = np.flatnonzero(of_rank)
    rows = rows[np.argsort(nodes.frame["start_ns"].to_numpy()[rows], kind="stable")]
    row_in_file = np.full(nodes.frame.height, -1, np.int64)
    row_in_file[rows] = np.arange(len(rows))
    chosen = nodes.frame[rows]
    moves = pl.col("kind").is_in(["copy", "fill"])
    plain = chosen.with_columns(
        pl.Series("id", np.arange(1, len(rows) + 1)),
        pl.col("name").fill_null(""),
        (pl.col("on_host") & (pl.col("type") == int(NodeType.COMP_NODE))).alias("is_cpu_op"),
        pl.lit(None, dtype=pl.Int64).alias("num_ops"),
        pl.when(moves).then("bytes").alias("tensor_size"),
        pl.col("duration_us").clip(lower_bound=0),
    ).select(list(PLAIN))
    dependencies = []
    for pairs in (nodes.pairs, nodes.added):
        row, awaited_row = row_in_file[pairs[:, 0]], row_in_file[pairs[:, 1]]
        in_file = (row >= 0) & (awaited_row >= 0)
        row, awaited_row = row[in_file], awaited_row[in_file]
        order = np.lexsort((awaited_row, row))
        dependencies.append(Pairs(row[order], awaited_row[order] + 1))
    return PlainNodes(plain.cast(PLAIN), *dependencies)
