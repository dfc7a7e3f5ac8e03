"""Curves under the lanes of the timeline: busy time, launches waiting, bandwidth of copies, recorded counters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceloom.harmless import harmless
from traceloom.model import Trace
from traceloom.report.exports.perfetto.counters import beside_memory

MOST_CURVES = 24  # of a rank; the file for Perfetto has all of them
_POINTS = 600  # of a curve

Floats = NDArray[np.float64]


def tracks(trace: Trace, epoch_ns: int) -> list[dict[str, Any]]:
    """The curves of one rank: name, time_ns (relative to the epoch), values; each at most about 600 points.

    A value holds from its time to the next. Curves that are 0 all the time are left out.
    """
    out = []
    curves = beside_memory(trace).sort("time_ns", maintain_order=True)
    for (name,), curve in sorted(curves.group_by("name"), key=lambda item: str(item[0][0])):
        time, value = curve["time_ns"].to_numpy() - epoch_ns, curve["value"].to_numpy()
        if not value.size or not value.any():
            continue
        at = kept(value, _POINTS)
        shown = [float(f"{number:.4g}") for number in value[at].tolist()]
        out.append({"name": harmless(str(name)).strip(), "time_ns": time[at].tolist(), "values": shown})
    return out[:MOST_CURVES]


def kept(value: Floats, most: int) -> NDArray[np.int64]:
    """Positions of the first, last, lowest and highest of equal stretches, ascending: at most about `most`."""
    if value.size <= most:
        return np.arange(value.size)
    width = -(-value.size * 4 // most)
    rows = -(-value.size // width)
    padded = np.concatenate([value, np.full(rows * width - value.size, value[-1])]).reshape(rows, width)
    base = np.arange(rows) * width
    places = [base, base + width - 1, base + padded.argmin(axis=1), base + padded.argmax(axis=1)]
    return np.unique(np.minimum(np.concatenate(places), value.size - 1))
