"""What was attached and what was left over: the coverage of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceloom.link.dataflow import DataFlow
from traceloom.link.device_work import BY_OP, ORPHANS
from traceloom.link.full_device import MUCH, Late
from traceloom.model import graph_schema as gs
from traceloom.model.graph_schema import GRAPH_SCHEMAS
from traceloom.model.notice import Notice

if TYPE_CHECKING:
    from traceloom.link.rank import Parts


Ints = NDArray[np.int64]

NOTHING_LATE = Late(0, *(np.zeros(0, dtype=np.int64) for _ in range(4)))
_LONG_NAME = 60


class Found(NamedTuple):
    """Counts of what was seen while edges were made.

    Attributes:
        overlapping: Neighbours on one stream that overlap.
        queued: Launches that found their queue full.
        held: Numbers of commands that hold their stream until another's event.
        unknown: Positions of synchronising calls that took long although nothing is known that they waited for.
        spins: Segments in which the host looks at memory until GPU work is done.
        late: Work that started long after it was ready.
        flow: Who reads what whom wrote; None without a host trace.
    """

    overlapping: int
    queued: int
    held: Ints
    unknown: Ints
    spins: Ints
    late: Late = NOTHING_LATE
    flow: DataFlow | None = None


def coverage_rows(rank: int, parts: Parts, seen: Found, refused: pl.DataFrame) -> pl.DataFrame:
    """The `coverage` rows of a rank, except those of its host trace.

    Args:
        rank: The rank.
        parts: What its nodes are made of.
        seen: What was seen on the way.
        refused: Edges that contradict the order of others: kind, count.
    """
    work, host = parts.work, parts.host
    span = work.end - work.start
    rows: list[tuple[str, str, int, int | None]] = []
    launched = work.call >= 0
    outcomes = (
        ("attached by correlation", launched & work.correlated),
        ("attached by arrow", launched & ~work.correlated),
        ("attached to its op by External id", work.orphans == BY_OP),
        *((reason, work.orphans == code) for code, reason in enumerate(ORPHANS)),
    )
    for subject, of_subject in (("gpu-work", ~work.command), ("device-commands", work.command)):
        for outcome, chosen in outcomes:
            counted = chosen & of_subject
            if counted.any():
                rows.append((subject, outcome, int(counted.sum()), int(span[counted].sum())))
    submitted = np.unique(work.call[launched]).size
    is_launch = parts.kinds == gs.NODE_KINDS.index(gs.LAUNCH)
    rows.append(("launches", "with GPU work", submitted, None))
    silent = int(is_launch.sum()) - int(is_launch[host.first[np.unique(work.call[launched])]].sum())
    if silent:
        rows.append(("launches", "without GPU work in the window", silent, None))
    if seen.overlapping:
        rows.append(("streams", "neighbours that overlap", seen.overlapping, None))
    if seen.queued:
        rows.append(("launches", "held up by a full queue", seen.queued, None))
    if seen.flow is not None:
        rows.append(("data", "edges from the last writer of a storage", seen.flow.source.size, None))
        rows.append(("data", "reads of what was written before the window, or nowhere", seen.flow.unplaced, None))
        rows.append(("data", "reads before their writer had ended: no edge", seen.flow.late, None))
    if seen.late.crowded:
        rows.append(("streams", "work that waited for room on the device", seen.late.crowded, None))
    if seen.late.before.size:
        waited = int(seen.late.before_ns.sum())
        rows.append(("streams", "work behind what was launched before the window", seen.late.before.size, waited))
    if seen.late.unexplained.size:
        waited = int(seen.late.waited_ns.sum())
        rows.append(("streams", "work that waited for nothing recorded", seen.late.unexplained.size, waited))
    if seen.unknown.size:
        took = int(parts.tree.span()[seen.unknown].sum())
        rows.append(("synchronisations", "long, and not known what was awaited", seen.unknown.size, took))
    if seen.spins.size:
        took = int((host.end - host.start)[seen.spins].sum())
        rows.append(("synchronisations", "self time that ends with the work launched before it", seen.spins.size, took))
    lengths = host.end - host.start
    gaps = host.owner < 0
    rows.append(("host-time", "in recorded events", int((~gaps).sum()), int(lengths[~gaps].sum())))
    rows.append(("host-time", "in gaps between them", int(gaps.sum()), int(lengths[gaps].sum())))
    if parts.tree.polling:
        rows.append(("host-time", "left out: threads that only poll", parts.tree.polling, parts.tree.polling_ns))
    rows += [("edges", f"left out: {kind} against the order of others", count, None) for kind, count in refused.rows()]
    return pl.DataFrame([(rank, *row) for row in rows], schema=GRAPH_SCHEMAS["coverage"], orient="row")


def late_notices(names: pl.Series, late: Late, window_ns: int, rank: int) -> list[Notice]:
    """Warn where much of the window is spent before GPU work that nothing recorded holds back.

    Args:
        names: Name of each work.
        late: What waited.
        window_ns: Length of the rank's window.
        rank: The rank.
    """
    least = MUCH * max(window_ns, 1)
    notices = []
    longest = int(late.before_ns.max(initial=0))
    if longest >= least:
        text = (
            f"for {longest / 1e6:.1f} ms ({100 * longest / window_ns:.0f} % of the window) the device did nothing that "
            "is recorded, though work had been launched: it was behind what lies before the window; "
            "that time is taken as given"
        )
        notices.append(Notice("busy-before-window", "warning", text, int(late.before.size), rank))
    total = int(late.waited_ns.sum())
    if total < least:
        return notices
    worst = int(np.argmax(late.waited_ns))
    name, waited = names[int(late.unexplained[worst])][:_LONG_NAME], late.waited_ns[worst] / 1e6
    text = (
        f"{late.unexplained.size} pieces of GPU work started {total / 1e6:.1f} ms in all after everything that is "
        f"known to hold them back ({name}: {waited:.1f} ms); "
        "re-timing from causes alone misses that time"
    )
    return [*notices, Notice("unexplained-starts", "warning", text, int(late.unexplained.size), rank)]
