"""Circles of waiting over several ranks: joined collectives are one node, a receive waits for its send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from traceloom.chakra.validation.communication import COLLECTIVE, SEND, rows_of
from traceloom.chakra.validation.matching import Joined, Ordered
from traceloom.chakra.validation.nodes import label
from traceloom.chakra.validation.problem import Findings, Severity
from traceloom.chakra.validation.waiting import Arcs, Ints, circles, settle

_LONGEST = 8


@dataclass(frozen=True, slots=True)
class _Job:
    """All ranks' nodes under one numbering; `meets` says which are one operation: the lowest number of its parts."""

    first: Ints  # number of each file's first node
    count: int
    meets: Ints
    arcs: Arcs
    queue: Arcs  # the order in which a rank issues its communication
    queued: bool = False  # whether that order is among the arcs


def check_deadlock(parts: Sequence[Ordered], dependencies: Sequence[Arcs], joined: Joined, findings: Findings) -> None:
    """Name circles in which ranks wait for each other.

    A circle of dependencies is one for every reader. Where there is none, but the order in which ranks issue their
    communication makes one, those that do one thing after the other (ASTRA-sim does) hang.
    """
    if joined.meetings.is_empty() and joined.messages.is_empty():
        return
    job = _job(parts, dependencies, joined)
    rings = _rings(job)
    if rings:
        _report(parts, job, rings, findings)
        return
    job = replace(job, arcs=job.arcs + job.queue, queued=True)
    _report(parts, job, _rings(job), findings)


def _job(parts: Sequence[Ordered], dependencies: Sequence[Arcs], joined: Joined) -> _Job:
    sizes = [len(part.table) for part in parts]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    arcs = Arcs(
        np.concatenate([a.source + first[k] for k, a in enumerate(dependencies)]),
        np.concatenate([a.target + first[k] for k, a in enumerate(dependencies)]),
    )
    messages = joined.messages
    arcs += Arcs(
        first[messages["file"].to_numpy()] + messages["row"].to_numpy(),
        first[messages["file_right"].to_numpy()] + messages["row_right"].to_numpy(),
    )
    meets = np.arange(first[-1], dtype=np.int64)
    meeting = joined.meetings["meeting"].to_numpy()
    number = first[joined.meetings["file"].to_numpy()] + joined.meetings["row"].to_numpy()
    _, which = np.unique(meeting, return_inverse=True)
    lowest = np.full(which.max() + 1 if len(which) else 0, first[-1], dtype=np.int64)
    np.minimum.at(lowest, which, number)
    meets[number] = lowest[which]
    return _Job(first, int(first[-1]), meets, arcs, _queue(parts, first))


def _queue(parts: Sequence[Ordered], first: Ints) -> Arcs:
    """From each collective or send of a rank to the next one that it issues."""
    sources, targets = [], []
    for number, part in enumerate(parts):
        rows = rows_of(part.table, COLLECTIVE, SEND)
        rows = rows[part.position[rows] >= 0]
        rows = rows[np.argsort(part.position[rows])] + first[number]
        sources.append(rows[:-1])
        targets.append(rows[1:])
    return Arcs(np.concatenate(sources), np.concatenate(targets))


def _rings(job: _Job) -> list[list[int]]:
    merged = Arcs(job.meets[job.arcs.source], job.meets[job.arcs.target])
    ends = settle(job.count, merged, np.arange(job.count))
    own = merged.source == merged.target
    return circles(Arcs(merged.source[~own], merged.target[~own]), ends.stuck) if ends.stuck.any() else []


def _report(parts: Sequence[Ordered], job: _Job, rings: list[list[int]], findings: Findings) -> None:
    several = [ring for ring in rings if len(ring) > 1]
    if not several:
        return
    file, row = _where(job, several[0][0])
    nodes = [parts[file].table.nodes["id"][row]]
    examples = [(nodes[0], _circle(parts, job, ring)) for ring in several[:5]]
    rule = "collective-order" if job.queued else "deadlock"
    severity: Severity | None = "warning" if job.queued and findings.target == "chakra" else None
    place = (parts[file].table.path, parts[file].rank)
    findings.add(rule, place, examples, nodes, count=len(several), severity=severity)


def _circle(parts: Sequence[Ordered], job: _Job, ring: list[int]) -> str:
    """Who waits for whom: on each rank of the circle, the node that waits and the one before it."""
    said, arcs = [], job.arcs
    for waits, awaited in list(zip(ring, [*ring[1:], ring[0]], strict=True))[:_LONGEST]:
        mine = np.flatnonzero((job.meets[arcs.target] == waits) & (job.meets[arcs.source] == awaited))
        target, source = int(arcs.target[mine[0]]), int(arcs.source[mine[0]])
        (here, row), (there, before) = _where(job, target), _where(job, source)
        elsewhere = f" of rank {parts[there].rank}" if there != here else ""
        said.append(
            f"rank {parts[here].rank}: {label(parts[here].table, row)} waits for "
            f"{label(parts[there].table, before)}{elsewhere}"
        )
    more = [f"and {len(ring) - _LONGEST} more"] if len(ring) > _LONGEST else []
    return "; ".join([*said, *more])


def _where(job: _Job, number: int) -> tuple[int, int]:
    file = int(np.searchsorted(job.first, number, side="right")) - 1
    return file, number - int(job.first[file])
