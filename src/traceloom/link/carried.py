"""Carries the host trace of one step over to other steps of the same process, by the order of names on each thread."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.link.alignment import align
from traceloom.link.matching import Matching
from traceloom.link.sequences import Line, device_lines, device_lines_by_step, is_op, name_codes
from traceloom.model import Trace
from traceloom.model.notice import Notice

Ints = NDArray[np.int64]

OWN = r"^traceloom\.(?:step#|scope:)"  # annotations of the recorder, in no host trace
_LEAST = 0.5  # of the ops of the timed steps; below, the graph step is no picture of them


def carry(timed: Trace, graph: Trace, matching: Matching) -> Matching:
    """Give every op of the timed steps the host op that the same op of the graph step has.

    Host ops and the graph step are joined by ids; the graph step and each timed step by the order of names on each
    thread of the process, and what is left by its turn among ops of the same name, since ops of a pool of threads run
    now here, now there.

    Args:
        timed: The trace of the timed window.
        graph: The trace of the graph step, of the same process.
        matching: The host trace joined to the graph step.

    Returns:
        The host trace joined to the timed steps; its outcomes are those of the graph step. Evidence is `inferred`.
    """
    graph_code, timed_code = name_codes(graph.events["name"], timed.events["name"])
    known = matching.host_op >= 0
    pattern = {_thread(graph, line.key): line for line in device_lines(graph, graph_code, known)}
    ours = timed.events["name"].str.contains(OWN).fill_null(value=False).to_numpy()
    wanted = is_op(timed) & ~ours
    step = timed.events["step"].fill_null(-1).cast(pl.Int64).to_numpy()
    inside = wanted & (step >= 0)
    host_op = np.full(timed.events.height, -1, dtype=np.int64)
    for _, line in device_lines_by_step(timed, timed_code, inside, np.maximum(step, 0)):
        like = pattern.get(_thread(timed, line.key))
        if like is not None:
            mine, theirs = _same(like, line)
            host_op[line.row[theirs]] = matching.host_op[like.row[mine]]
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(step[rows], kind="stable")]
    for chosen in np.split(rows, np.flatnonzero(np.diff(step[rows])) + 1):
        _by_turn(graph, timed, matching, host_op, chosen, graph_code, timed_code)
    given, all_ops = int((host_op >= 0).sum()), int(wanted.sum())
    found = replace(
        matching,
        host_op=host_op,
        exact=False,
        carried=(given, all_ops - given),
        rank=timed.rank if timed.rank is not None else matching.rank,
    )
    if given >= _LEAST * all_ops and given:
        return found
    said = (
        f"only {given:,} of {all_ops:,} ops of the timed window are found in the graph step; the rest have no host op"
    )
    return found.with_notices(Notice("unlike-graph-step", "warning", said, all_ops - given, where=timed.meta.path))


def _thread(trace: Trace, lane: int) -> tuple[str | None, str | None]:
    row = trace.lanes.row(lane, named=True)
    return row["process"], row["thread"]


def _same(like: Line, line: Line) -> tuple[Ints, Ints]:
    if like.size == line.size and np.array_equal(like.names.tokens, line.names.tokens):
        every = np.arange(like.size)
        return every, every
    return align(like.names, line.names)


def _by_turn(  # noqa: PLR0917
    graph: Trace,
    timed: Trace,
    matching: Matching,
    host_op: Ints,
    chosen: Ints,
    graph_code: Ints,
    timed_code: Ints,
) -> None:
    """Join what is left of a step, whatever its thread: the k-th of a name to the k-th, where both have as many."""
    given = np.unique(host_op[chosen])
    source = np.flatnonzero((matching.host_op >= 0) & ~np.isin(matching.host_op, given))
    target = chosen[host_op[chosen] < 0]
    if not source.size or not target.size:
        return
    left = _turns(source, graph_code, graph.events["start_ns"].to_numpy())
    right = _turns(target, timed_code, timed.events["start_ns"].to_numpy())
    both = left.join(right, on=["code", "turn", "count"])
    host_op[both["row_right"].to_numpy()] = matching.host_op[both["row"].to_numpy()]


def _turns(rows: Ints, codes: Ints, start: Ints) -> pl.DataFrame:
    rows = rows[np.argsort(start[rows], kind="stable")]
    return pl.DataFrame({"row": rows, "code": codes[rows]}).with_columns(
        pl.int_range(pl.len()).over("code").alias("turn"), pl.len().over("code").alias("count")
    )
