"""What the graph step knows of the timed steps of its capture: the same ops, recorded with all that is costly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from traceloom.array_types import Bools, Ints
from traceloom.errors import InputError
from traceloom.model import Trace
from traceloom.model.deferred import Deferred
from traceloom.model.frames import as_declared
from traceloom.model.schema import SCHEMAS
from traceloom.read.alignment import align, device_lines, device_lines_by_step, is_op, name_codes

OWN = r"^traceloom\.(?:step#|scope:)"  # annotations of the recorder itself


def timed_ops(timed: Trace) -> Bools:
    """Which events of a timed window are ops or annotations of the program, on any thread, in any step or outside."""
    own: Bools = timed.events["name"].str.contains(OWN).fill_null(value=False).to_numpy()
    return is_op(timed) & ~own


def same_ops(timed: Trace, graph: Trace, recorded: Bools) -> Ints:
    """The event of the graph step that is the same op as each event of the timed steps; -1 where none is.

    The graph step and each timed step are compared by the order of names on each thread of the process; what is left by
    its turn among ops of the same name, since ops of a pool of threads run now here, now there.

    Args:
        timed: The trace of the timed window.
        graph: The trace of the graph step, of the same process.
        recorded: Which events of the graph step may be named.
    """
    graph_code, timed_code = name_codes(graph.events["name"], timed.events["name"])
    threads, timed_threads = (trace.lanes.select("process", "thread").rows() for trace in (graph, timed))
    pattern = {threads[line.key]: line for line in device_lines(graph, graph_code, recorded)}
    step = timed.events["step"].fill_null(-1).cast(pl.Int64).to_numpy()
    inside = timed_ops(timed) & (step >= 0)
    same = np.full(timed.events.height, -1, dtype=np.int64)
    for _, line in device_lines_by_step(timed, timed_code, inside, np.maximum(step, 0)):
        like = pattern.get(timed_threads[line.key])
        if like is not None:
            if like.size == line.size and np.array_equal(like.names.tokens, line.names.tokens):
                in_graph = in_step = np.arange(like.size)
            else:
                in_graph, in_step = align(like.names, line.names)
            same[line.row[in_step]] = like.row[in_graph]
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(step[rows], kind="stable")]
    for of_step in np.split(rows, np.flatnonzero(np.diff(step[rows])) + 1):
        left = recorded.copy()
        left[same[of_step][same[of_step] >= 0]] = False
        sources, targets = np.flatnonzero(left), of_step[same[of_step] < 0]
        if sources.size and targets.size:
            turns = []
            for events, codes, of_names in ((graph.events, graph_code, sources), (timed.events, timed_code, targets)):
                ordered = of_names[np.argsort(events["start_ns"].to_numpy()[of_names], kind="stable")]
                turns.append(
                    pl.DataFrame({"row": ordered, "code": codes[ordered]}).with_columns(
                        pl.int_range(pl.len()).over("code").alias("turn"), pl.len().over("code").alias("count")
                    )
                )
            both = turns[0].join(turns[1], on=["code", "turn", "count"])
            same[both["row_right"].to_numpy()] = both["row"].to_numpy()
    return same


def with_shapes(trace: Trace, folder: Path | None, read: Callable[[Path, dict[str, Any]], Trace | InputError]) -> Trace:
    """The trace with the inputs of its ops as the graph step saw them, where the window was recorded without.

    Nothing is read before somebody asks for `tensors`.

    Args:
        trace: A timed window.
        folder: Its capture; None where it belongs to none.
        read: Reads a trace of that capture.
    """
    entry = trace.meta.capture or {}
    settings, step = entry.get("settings"), entry.get("graph_step")
    name = step.get("file") if isinstance(step, dict) else None
    if folder is None or not isinstance(name, str) or Path(name).name != name:
        return trace
    if not isinstance(settings, dict) or settings.get("shapes") is not False or not (folder / name).is_file():
        return trace

    def tensors() -> pl.DataFrame:
        graph = read(folder / name, entry)
        own = trace.tensors
        if isinstance(graph, InputError):
            return own
        shaped = np.zeros(graph.events.height, dtype=np.bool_)
        shaped[graph.tensors["event"].to_numpy()] = True
        same = same_ops(trace, graph, is_op(graph) & shaped)
        events = np.setdiff1d(np.flatnonzero(same >= 0), own["event"].to_numpy())
        pairs = pl.DataFrame(
            {"event": events, "source": same[events]}, schema={"event": pl.UInt32, "source": pl.UInt32}
        )
        seen = pairs.join(graph.tensors.rename({"event": "source"}), on="source", how="left").drop("source")
        return pl.concat([own, seen.pipe(as_declared, SCHEMAS["tensors"])]).sort("event")

    return trace.with_deferred("tensors", Deferred(tensors))
