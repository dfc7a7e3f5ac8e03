"""Work that starts while the one before it on its stream still runs: after so much of that work, not so much time."""

from __future__ import annotations

import numpy as np

from traceloom.array_types import Ints
from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.retime.of_last import OfLast

RUNNING = "while running"  # place of these edges in `delays`
_EARLY = 0.1  # of a name's fractions: a launch that came late only makes them larger
_NO_TIME = 2**60  # a delay beyond this says that the edge does not hold
_KNOWN: OfLast[Ints] = OfLast()


def running(graph: Graph) -> Ints:
    """Rows of the edges from the start of a work to the start of the next one on its stream."""
    remembered = _KNOWN.of(graph)
    if remembered is not None:
        return remembered
    kind = graph.edges["kind"].to_physical().to_numpy() == gs.EDGE_KINDS.index("stream")
    started = ~graph.edges["from_end"].to_numpy() & ~graph.edges["to_end"].to_numpy()
    return _KNOWN.put(graph, np.flatnonzero(kind & started))


def usual_parts(graph: Graph) -> Ints:
    """After how much of the source's work the target usually starts, for each edge of `running`; ns, never negative.

    What lets the next work begin is a place in the program of the kernel before: the same part of all kernels of one
    name. Late launches make it look later, so a low one of the measured parts is taken.
    """
    at = running(graph)
    if not at.size:
        return at
    source, target = graph.edges["source"].to_numpy()[at], graph.edges["target"].to_numpy()[at]
    start = graph.nodes["start_ns"].to_numpy()
    duration = graph.nodes["duration_ns"].to_numpy()[source]
    part = np.clip(start[target] - start[source], 0, None) / np.maximum(duration, 1)
    name = graph.nodes["name"].gather(source).rank("dense").to_numpy().astype(np.int64)
    order = np.lexsort((part, name))
    opens = np.flatnonzero(np.append(True, np.diff(name[order]) != 0))
    size = np.diff(np.append(opens, at.size))
    low = part[order][opens + ((size - 1) * _EARLY).astype(np.int64)]
    usual = np.empty(at.size)
    usual[order] = np.repeat(low, size)
    parts: Ints = np.rint(usual * duration).astype(np.int64)
    return parts


def in_proportion(graph: Graph, work: Ints, delay: Ints) -> Ints:
    """Delays with other works: those of `running` are the part of the source's work that they were.

    Args:
        graph: The graph.
        work: Work of each node, residual included; (N,) or (S, N).
        delay: Delay of each edge, residual included; (E,) or (S, E).

    Returns:
        The same array where no delay changes, else a new one, with scenarios where an argument has them.
    """
    at = running(graph)
    if not at.size:
        return delay
    source = graph.edges["source"].to_numpy()[at]
    measured = (graph.nodes["work_ns"].gather(source) + graph.nodes["residual_ns"].gather(source)).to_numpy()
    # What is no work of its own, as one rank's part of a communication, has no parts.
    changed = (np.atleast_2d(work)[:, source] != measured).any(axis=0) & (measured > 0)
    if not changed.any():
        return delay
    at, source, measured = at[changed], source[changed], measured[changed]
    shape = np.broadcast_shapes((*work.shape[:-1], 1), (*delay.shape[:-1], 1))[:-1]
    scaled = np.broadcast_to(delay, (*shape, delay.shape[-1])).copy()
    held = scaled[..., at]
    is_delay = np.abs(held) < _NO_TIME
    parts = np.where(is_delay, held, 0) * (work[..., source] / measured)
    scaled[..., at] = np.where(is_delay, np.rint(parts).astype(np.int64), held)
    return scaled
