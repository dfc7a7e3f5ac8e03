"""Host trace and device trace as sequences of names, one for each thread, that can be compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.model import Trace
from traceloom.model import category as cat
from traceloom.model.arrays import nearest
from traceloom.model.host_trace import HostTrace
from traceloom.read.alignment import Hashes, hashes, mixed

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Line:
    """The ops of one thread in the order in which they began.

    Attributes:
        key: Thread of the host trace, or lane of the device trace.
        row: Rows of the host trace's ops, or of the trace's events.
        order: Ids of host ops, or start times in ns; ascending.
        names: Hashes of the names.
        nested: Hashes of the names with those of the ops around them.
    """

    key: int
    row: Ints
    order: Ints
    names: Hashes
    nested: Hashes

    @property
    def size(self) -> int:
        """Number of ops."""
        return self.row.size


def name_codes(host: pl.Series, device: pl.Series) -> tuple[Ints, Ints]:
    """Numbers that are equal where names are."""
    both = pl.concat([host.rename("name"), device.rename("name")]).fill_null("")
    code = both.cast(pl.Categorical).to_physical().cast(pl.Int64).to_numpy()
    return code[: host.len()], code[host.len() :]


def is_op(trace: Trace) -> Bools:
    """Which events can be ops of a host trace: ops and annotations on host threads."""
    events = trace.events
    on_host = (trace.lanes["kind"] == "host").to_numpy()[events["lane"].to_numpy()] if events.height else np.zeros(0)
    return events["category"].is_in([cat.OP, cat.ANNOTATION]).to_numpy() & on_host.astype(np.bool_)


def host_lines(host: HostTrace, codes: Ints, chosen: Bools) -> list[Line]:
    """The chosen rows of the host trace by thread, the thread with most ops first."""
    ids = host.ops["id"].to_numpy()
    parent_id = host.ops["parent"].fill_null(-1).to_numpy()
    parent = np.searchsorted(ids, parent_id)
    # An op begins after its parent; a file that says otherwise could send us in circles.
    good = (parent < np.arange(ids.size)) & (ids[np.minimum(parent, ids.size - 1)] == parent_id)
    around = nearest(np.where(good, parent, -1), chosen)
    thread = host.ops["thread"].fill_null(0).to_numpy()
    return _lines(thread, ids, codes, around, chosen)


def device_lines(trace: Trace, codes: Ints, chosen: Bools) -> list[Line]:
    """The chosen events by lane, the lane with most of them first."""
    return [line for _, line in device_lines_by_step(trace, codes, chosen, np.zeros(chosen.size, dtype=np.int64))]


def device_lines_by_step(trace: Trace, codes: Ints, chosen: Bools, step: Ints) -> list[tuple[int, Line]]:
    """The chosen events by step (a number >= 0 for each event) and lane, the longest first.

    Events that begin in the same microsecond are in no certain order in the trace; their external ids count up with
    the ops, whatever their numbers mean.
    """
    events, lanes = trace.events, trace.lanes.height
    around = nearest(events["parent"].cast(pl.Int64).fill_null(-1).to_numpy(), chosen)
    start, lane = events["start_ns"].to_numpy(), events["lane"].to_numpy().astype(np.int64)
    tie = events["external_id"].fill_null(-1).to_numpy()
    lines = _lines(step * lanes + lane, start, codes, around, chosen, tie)
    return [(line.key // lanes, replace(line, key=line.key % lanes)) for line in lines]


def _lines(  # noqa: PLR0917
    key: Ints, order: Ints, codes: Ints, around: Ints, chosen: Bools, tie: Ints | None = None
) -> list[Line]:
    rows = np.flatnonzero(chosen)
    rows = rows[np.lexsort((tie[rows] if tie is not None else rows, order[rows], key[rows]))]
    if not rows.size:
        return []
    bounds = np.flatnonzero(np.diff(key[rows], prepend=key[rows[0]] - 1))
    lines = []
    for row in np.split(rows, bounds[1:]):
        outer = around[row]
        name = mixed(codes[row])
        nested = name + mixed(np.where(outer >= 0, codes[outer] + 1, 0), 2)
        lines.append(Line(int(key[row[0]]), row, order[row], hashes(name), hashes(nested)))
    return sorted(lines, key=lambda line: -line.size)
