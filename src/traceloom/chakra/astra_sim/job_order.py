"""One order of the nodes of all ranks that honours every dependency, every meeting and every message."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.chakra.schema import NodeType

Ints = NDArray[np.int64]


def order_of_job(frame: pl.DataFrame, pairs: Ints) -> Ints:
    """The position of every node; the parts of one collective share one; -1 for nodes that wait in a circle.

    Among the ready nodes, the earliest by recorded time comes next; a collective counts from when its last part came.

    Args:
        frame: Columns type, rank, start_ns, instance, comm_src, comm_dst, comm_tag.
        pairs: (row, row that it waits for).
    """
    meets = _meets(frame)
    messages = _messages(frame)
    target = meets[np.concatenate([pairs[:, 0], messages[:, 1]])]
    source = meets[np.concatenate([pairs[:, 1], messages[:, 0]])]
    time = np.zeros(frame.height, np.int64)
    np.maximum.at(time, meets, frame["start_ns"].to_numpy())
    by_source = np.argsort(source, kind="stable")
    behind = target[by_source].tolist()
    first: Any = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=frame.height))]).tolist()
    waits: Any = np.bincount(target, minlength=frame.height).tolist()
    when: Any = time.tolist()
    ready = [(when[row], row) for row in range(frame.height) if not waits[row]]
    heapq.heapify(ready)
    position = np.full(frame.height, -1, np.int64)
    count = 0
    while ready:
        _, row = heapq.heappop(ready)
        position[row] = count
        count += 1
        for follower in behind[first[row] : first[row + 1]]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(ready, (when[follower], follower))
    positions: Ints = position[meets]
    return positions


def last_before(order: Ints, counts: NDArray[np.bool_], pairs: Ints) -> Ints:
    """For every node: the highest place of a node that counts, among all that it waits for directly or over others.

    Args:
        order: As `order_of_job` gives it.
        counts: Which nodes count.
        pairs: (row, row that it waits for); the second one has the lower place, or neither has any.

    Returns:
        -1 where there is none.
    """
    last: list[int] = [-1] * len(order)
    own = np.where(counts, order, -1).tolist()
    for row, awaited in pairs[np.argsort(order[pairs[:, 0]], kind="stable")].tolist():
        last[row] = max(last[row], own[awaited], last[awaited])
    return np.array(last, np.int64)


def _meets(frame: pl.DataFrame) -> Ints:
    """The row that stands for each row: the first part of its collective, itself elsewhere."""
    parts = frame.with_row_index("row").filter(
        (pl.col("type") == int(NodeType.COMM_COLL_NODE)) & pl.col("instance").is_not_null() & pl.col("why").is_null()
    )
    together = parts.select(
        pl.col("row").cast(pl.Int64), pl.col("row").min().over("instance").cast(pl.Int64).alias("first")
    )
    meets = np.arange(frame.height, dtype=np.int64)
    meets[together["row"].to_numpy()] = together["first"].to_numpy()
    return meets


def _messages(frame: pl.DataFrame) -> Ints:
    """(row of a send, row of its receive): the k-th of one sender, receiver and tag."""
    keys = ["comm_src", "comm_dst", "comm_tag"]
    rows = frame.with_row_index("row").sort("start_ns", "row").select(pl.col("row").cast(pl.Int64), "type", *keys)
    rows = rows.with_columns(pl.int_range(pl.len()).over("type", *keys).alias("turn"))
    sends = rows.filter(pl.col("type") == int(NodeType.COMM_SEND_NODE))
    receives = rows.filter(pl.col("type") == int(NodeType.COMM_RECV_NODE))
    return sends.join(receives, on=[*keys, "turn"]).select("row", "row_right").to_numpy()
