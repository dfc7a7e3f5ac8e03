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
    job = _job(parts, dependencies, joined, as_recorded=findings.target == "chakra")
    rings = _rings(job)
    if rings:
        _report(parts, job, rings, findings)
        return
    job = replace(job, arcs=job.arcs + job.queue, queued=True)
    _report(parts, job, _rings(job), findings)


def _job(parts: Sequence[Ordered], dependencies: Sequence[Arcs], joined: Joined, *, as_recorded: bool) -> _Job:
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
    _, meeting_index = np.unique(meeting, return_inverse=True)
    lowest = np.full(meeting_index.max() + 1 if len(meeting_index) else 0, first[-1], dtype=np.int64)
    np.minimum.at(lowest, meeting_index, number)
    meets[number] = lowest[meeting_index]
    return _Job(first, int(first[-1]), meets, arcs, _queue(parts, first, as_recorded=as_recorded))


def _queue(parts: Sequence[Ordered], first: Ints, *, as_recorded: bool) -> Arcs:
    """From each collective or send of a rank to the next one that it issues.

    Where the files hold when each began, that is their order for those who take it `as_recorded`.
    """
    sources, targets = [], []
    for number, part in enumerate(parts):
        rows = rows_of(part.table, COLLECTIVE, SEND)
        rows = rows[part.position[rows] >= 0]
        began = part.table.nodes["start_us"].to_numpy()[rows] if as_recorded else np.zeros(len(rows), np.uint64)
        rows = rows[np.lexsort((part.position[rows], began))] + first[number]
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
    location = (parts[file].table.path, parts[file].rank)
    findings.add(rule, location, examples, nodes, count=len(several), severity=severity)


def _circle(parts: Sequence[Ordered], job: _Job, ring: list[int]) -> str:
    """Who waits for whom: on each rank of the circle, what waits there, and for what before it."""
    steps = _steps(job, ring)

    def breaks(k: int) -> bool:  # whether the wait of step k is another one than that of the step before
        (from_file, _), middle = steps[k - 1]
        return middle != steps[k][0] or not from_file == middle[0] == steps[k][1][0]

    first = next((k for k in range(len(steps)) if breaks(k)), 0)
    runs: list[tuple[tuple[int, int], tuple[int, int], int]] = []
    for k in [*range(first, len(steps)), *range(first)]:
        if runs and not breaks(k):
            runs[-1] = (runs[-1][0], steps[k][1], runs[-1][2] + 1)
        else:
            runs.append((*steps[k], 0))
    clauses = []
    for (file, row), (awaited_file, before), between in runs[:_LONGEST]:
        elsewhere = f" of rank {parts[awaited_file].rank}" if awaited_file != file else ""
        over = f" (over {between} node{'s' if between > 1 else ''} between)" if between else ""
        clauses.append(
            f"rank {parts[file].rank}: {label(parts[file].table, row)} waits for "
            f"{label(parts[awaited_file].table, before)}{elsewhere}{over}"
        )
    more = [f"and {len(runs) - _LONGEST} more"] if len(runs) > _LONGEST else []
    return "; ".join([*clauses, *more])


def _steps(job: _Job, ring: list[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """For every two neighbours of a circle, the dependency between them: what waits, and for what (file, row)."""
    inside = np.flatnonzero(np.isin(job.meets[job.arcs.target], ring) & np.isin(job.meets[job.arcs.source], ring))
    source, target = job.arcs.source[inside], job.arcs.target[inside]
    first_arc: dict[tuple[int, int], int] = {}
    for k, pair in enumerate(zip(job.meets[target].tolist(), job.meets[source].tolist(), strict=True)):
        first_arc.setdefault(pair, k)
    steps = []
    for waits, awaited in zip(ring, [*ring[1:], ring[0]], strict=True):
        k = first_arc[waits, awaited]
        steps.append((_where(job, int(target[k])), _where(job, int(source[k]))))
    return steps


def _where(job: _Job, number: int) -> tuple[int, int]:
    file = int(np.searchsorted(job.first, number, side="right")) - 1
    return file, number - int(job.first[file])
