"""The recorded time of the host threads in pieces of one innermost event and one step, for all who add it up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceloom.analyze.ancestry import host_segments
from traceloom.analyze.intervals import Ints
from traceloom.analyze.remembered import per_trace
from traceloom.analyze.splitting import split_at_steps
from traceloom.model import Trace


@dataclass(frozen=True, slots=True)
class HostPieces:
    """Pieces of time in which something is recorded; together they are the busy time of all threads.

    Attributes:
        owner: Position (in the forest) of the innermost event.
        lane: Lane of each piece.
        ns: Lengths, > 0.
        step: Number of the step; `splitting.NO_STEP` outside all steps.
    """

    owner: Ints
    lane: Ints
    ns: Ints
    step: Ints


@per_trace
def host_pieces(trace: Trace) -> HostPieces:
    """Cut the recorded stretches of the host threads at the bounds of steps."""
    segments = host_segments(trace)
    rows = np.flatnonzero(segments.owner >= 0)
    pieces, step = split_at_steps(trace, segments.start_ns[rows], segments.end_ns[rows])
    source = rows[pieces.source]
    return HostPieces(segments.owner[source], segments.lane[source], pieces.end_ns - pieces.start_ns, step)
