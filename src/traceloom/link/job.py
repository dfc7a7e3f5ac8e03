"""One graph of a job from the graphs of its ranks: one clock, collectives that meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from traceloom.link.clocks import ENDS_TOGETHER, HostClock, fit_clocks
from traceloom.link.collectives import JoinedParts, join_parts
from traceloom.link.meeting import meet
from traceloom.model.graph import Graph
from traceloom.model.graph_arrays import points
from traceloom.model.graph_schema import GRAPH_SCHEMAS
from traceloom.model.notice import Notice
from traceloom.model.points import acyclic

# Frames whose rows point to nodes, and with which columns.
_POINTING = {"edges": ("source", "target"), "communication": ("node",), "transfers": ("node",)}


def join(parts: Sequence[Graph], name: str = "") -> Graph:
    """Join the graphs of single ranks.

    Times become those of one clock, starting at 0. Parts of a collective on several ranks get one `instance` and meet
    in a `rendezvous` node; peers that were not recorded are an `arrival`, assumed.

    Args:
        parts: One uncalibrated graph per rank, at least one.
        name: What to call the result.

    Returns:
        The uncalibrated graph of the job.
    """
    own_ranks = [part.ranks["rank"][0] if part.ranks.height else None for part in parts]
    free = iter(number for number in range(2 * len(parts)) if number not in own_ranks)
    # a part that does not state its rank gets the lowest free one
    ranks = [next(free) if rank is None else rank for rank in own_ranks]
    parts = [_ranked(part, rank) for part, rank in zip(parts, ranks, strict=True)]
    first_epoch = min(part.epoch_ns for part in parts)
    # a rank that does not state its host may have a clock of its own
    hosts = [part.ranks["host"][0] or f"rank {number}" for number, part in enumerate(parts)]
    # the communication of all ranks in one frame, in the order of the parts, on a common epoch
    frames = []
    for number, (part, host) in enumerate(zip(parts, hosts, strict=True)):
        nodes = part.nodes[["rank", "start_ns", "duration_ns"]][part.communication["node"]]
        start = nodes["start_ns"] + (part.epoch_ns - first_epoch)
        frames.append(
            part.communication.with_columns(
                nodes["rank"],
                start,
                pl.lit(number).alias("part"),
                (start + nodes["duration_ns"]).alias("end_ns"),
                pl.lit(host).alias("host"),
            )
        )
    communication = pl.concat(frames)
    joined = join_parts(communication)
    ends = communication.with_columns(pl.Series("instance", joined.instance)).filter(
        (pl.col("instance") >= 0) & pl.col("kind").is_in(ENDS_TOGETHER)
    )
    fitted = fit_clocks(ends.select("instance", "host", "end_ns"), list(dict.fromkeys(hosts)))
    clocks = [fitted[host] for host in hosts]
    merged = _merged(parts, first_epoch, clocks, name)
    together, doubts = _met(merged, joined)
    notices = [*merged.notices, *joined.notices, *doubts]
    moved = [clock for clock in clocks if clock.offset_ns or clock.drift]
    if moved:
        worst = max(abs(clock.offset_ns) for clock in moved)
        left = max(clock.residual_ns or 0 for clock in moved)
        text = (
            f"the clocks of {len(moved)} ranks were corrected by up to {worst / 1e6:.3f} ms, fitted on the ends of "
            f"collectives; {left / 1e3:.1f} us remain"
        )
        notices.append(Notice("clocks-corrected", "info", text, len(moved)))
    return replace(together, notices=tuple(notices))


def _ranked(part: Graph, rank: int) -> Graph:
    """A part with its rank; the given one, with a notice, where it has none."""
    if part.ranks.height and part.ranks["rank"][0] is not None:
        return part
    named = pl.lit(rank, dtype=pl.Int32).alias("rank")
    ranks = part.ranks
    if not ranks.height:
        values = {"window_start_ns": 0, "window_end_ns": part.end_ns, "clock_offset_ns": 0, "clock_drift": 0.0}
        schema = GRAPH_SCHEMAS["ranks"]
        ranks = pl.DataFrame([{column: values.get(column) for column in schema}], schema=schema)
    notice = Notice("rank-assumed", "info", f"the trace does not say its rank; it is taken as rank {rank}")
    return replace(
        part,
        ranks=ranks.with_columns(named),
        notices=(*part.notices, notice),
        **{name: getattr(part, name).with_columns(named) for name in ("nodes", "lanes", "host_ops", "coverage")},
    )


def _met(merged: Graph, joined: JoinedParts) -> tuple[Graph, list[Notice]]:
    """The graph with its meetings; wrongly joined ones show in ranks that wait for each other in a circle.

    Then what was joined by the order of names is not, and in the end nothing is: what does not meet is ordered as each
    rank is.
    """
    by_number = np.array([basis == "measured" for basis in joined.evidence], dtype=np.bool_)
    for kept in (np.ones_like(by_number), by_number, np.zeros_like(by_number)):
        instance = np.where(kept, joined.instance, -1)
        numbers = pl.Series("instance", instance).replace(-1, None).cast(pl.Int64)
        communication = merged.communication.with_columns(numbers)
        graph = meet(replace(merged, communication=communication), joined.evidence)
        if not (instance >= 0).any() or acyclic(graph.nodes.height, *points(graph)):
            break
    dropped = int((joined.instance >= 0).sum() - (instance >= 0).sum())
    if not dropped:
        return graph, []
    text = (
        f"{dropped} parts of communications, joined between ranks, would wait for each other in a circle; "
        "they are not joined (the traces do not show one and the same run, or their order cannot be determined)"
    )
    return graph, [Notice("collectives-circle", "warning", text, dropped)]


def _merged(parts: Sequence[Graph], epoch: int, clocks: list[HostClock], name: str) -> Graph:
    """All ranks in one graph, on one clock."""
    frames: dict[str, list[pl.DataFrame]] = {key: [] for key in GRAPH_SCHEMAS}
    nodes = lanes = 0
    notices: list[Notice] = []
    for part, clock in zip(parts, clocks, strict=True):
        for key, frame in part.frames().items():
            frames[key].append(_moved(key, frame, (nodes, lanes), part.epoch_ns - epoch, clock))
        nodes += part.nodes.height
        lanes += part.lanes.height
        notices += [notice.of_rank(part.ranks["rank"][0]) for notice in part.notices]
    whole = {key: pl.concat(several) for key, several in frames.items()}
    worlds = [part.world_size for part in parts if part.world_size is not None]
    merged = Graph(
        **whole,
        name=name or parts[0].name,
        epoch_ns=epoch,
        world_size=max(worlds, default=None),
        stage=parts[0].stage,
        notices=tuple(notices),
    )
    # A correction may have moved the first node away from 0.
    first = int(merged.nodes["start_ns"].min()) if merged.nodes.height else 0  # type: ignore[arg-type]
    if not first:
        return merged
    return replace(
        merged,
        nodes=merged.nodes.with_columns(pl.col("start_ns") - first),
        ranks=merged.ranks.with_columns(pl.col("window_start_ns") - first, pl.col("window_end_ns") - first),
        epoch_ns=merged.epoch_ns + first,
    )


def _moved(key: str, frame: pl.DataFrame, before: tuple[int, int], shift: int, clock: HostClock) -> pl.DataFrame:
    """A frame of one rank with the numbers and times of the job; `before`: nodes and lanes of the ranks before it."""
    nodes, lanes = before
    if not frame.height or (key != "ranks" and not (nodes or lanes or shift or clock.offset_ns or clock.drift)):
        return frame
    lane = (pl.col("lane") + lanes).cast(pl.UInt32)
    if key == "nodes":
        start = frame["start_ns"].to_numpy() + shift
        end = clock.corrected(start + frame["duration_ns"].to_numpy())
        start = clock.corrected(start)
        # The work is measured on the rank's clock; a drift of the clock must not make it longer than the node.
        work = np.minimum(frame["work_ns"].to_numpy(), end - start)
        return frame.with_columns(
            pl.Series("start_ns", start),
            pl.Series("duration_ns", end - start),
            pl.Series("work_ns", work),
            (pl.col("node") + nodes).cast(pl.UInt32),
            lane,
        )
    if key == "lanes":
        return frame.with_columns(lane)
    if key == "ranks":
        window = [
            pl.Series(column, clock.corrected(frame[column].to_numpy() + shift))
            for column in ("window_start_ns", "window_end_ns")
        ]
        return frame.with_columns(
            *window,
            pl.lit(clock.offset_ns, dtype=pl.Int64).alias("clock_offset_ns"),
            pl.lit(clock.drift, dtype=pl.Float64).alias("clock_drift"),
            pl.lit(clock.residual_ns, dtype=pl.Int64).alias("clock_residual_ns"),
        )
    columns = _POINTING.get(key, ())
    return frame.with_columns((pl.col(column) + nodes).cast(pl.UInt32) for column in columns) if columns else frame
