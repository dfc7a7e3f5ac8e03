"""What a change saves when nobody records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traceloom.model import graph_schema as gs
from traceloom.model.graph import Graph
from traceloom.simulate.changes import Change

_HOST = (gs.HOST, gs.THINK, gs.LAUNCH, gs.BLOCK)
_MOST = 2 / 3  # of a saving: a loop of `item`, the cheapest there is, takes three times as long when it is recorded
_FEWER_EVENTS = ("scale", "remove", "workers")  # what is recorded becomes less with the work
_HOST_WAITS_NO_MORE = ("graph", "idle")  # the step is the host's no longer, so neither is what recording made it wait


def unrecorded_saving_ns(
    graph: Graph, changes: Sequence[Change], saved_ns: int, *, whole_ns: int, ratio: float | None
) -> int:
    """A saving of a recorded run, as it is when nobody records.

    Recording lengthens a step by the time it takes to write down each host event, so a saving loses what it cost to
    write down the events of the work that is taken away. Work in which little is recorded, such as a pause,
    loses little; work of the device nothing. The ratio is of few steps, and of early ones: where nearly all events are
    those of the work that goes, as in a loop over the elements of a tensor, all of it would seem to be recording.

    Ranks record side by side: the one that loses most events counts. The delay of a rank is no more recorded than what
    it does more than the others.

    Args:
        graph: What the saving was evaluated on.
        changes: What saves.
        saved_ns: What they save on the graph, ns; negative where they cost time.
        whole_ns: The recorded step or window that the saving is of, ns.
        ratio: Recorded step / unrecorded step, as measured; None where nobody measured it.

    Returns:
        ns, between a third of `saved_ns` and all of it; `saved_ns` where the ratio is unknown or at most 1.
    """
    if ratio is None or ratio <= 1:
        return saved_ns
    of_recording = 1 - 1 / ratio
    host = graph.nodes_of(*_HOST)
    rank = graph.nodes["rank"].rank("dense").fill_null(0).to_numpy()[host]
    recorded = np.bincount(rank)
    left = np.ones(graph.nodes.height)
    less = 0.0
    for change in changes:
        if change.action in _HOST_WAITS_NO_MORE:
            less = saved_ns * of_recording
        elif change.action in _FEWER_EVENTS:
            left[change.selection.nodes(graph)] *= change.factor if change.action == "scale" else 0.0
        elif change.action == "delay":
            late = np.bincount(rank, change.selection.nodes(graph)[host], recorded.size) > 0
            others = recorded[(recorded > 0) & ~late]
            usual = np.median(others) if others.size else np.inf
            left[host] *= np.where(late, np.minimum(usual / np.maximum(recorded, 1), 1.0), 1.0)[rank]
    recording_ns = whole_ns * of_recording * np.bincount(rank, 1 - left[host]) / np.maximum(recorded, 1)
    if recording_ns.size:
        less = max(less, float(recording_ns.max())) if saved_ns >= 0 else min(less, float(recording_ns.min()))
    return saved_ns - round(min(max(less, min(_MOST * saved_ns, 0)), max(_MOST * saved_ns, 0)))
