"""Circles of waiting over several ranks: joined collectives are one node, a receive waits for its send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traceloom.array_types import Ints
from traceloom.chakra.validation.communication import COLLECTIVE, SEND, rows_of
from traceloom.chakra.validation.matching import JoinedOperations, Ordered
from traceloom.chakra.validation.nodes import label
from traceloom.chakra.validation.problem import Findings, Severity
from traceloom.chakra.validation.waiting import Arcs, circles, settle

_LONGEST = 8


@dataclass(frozen=True, slots=True)
class _Job:
    """All ranks' nodes under one numbering; `meets` says which are one operation: the lowest number of its parts."""

    first: Ints  # number of each file's first node
    meets: Ints
    arcs: Arcs

    def where(self, number: int) -> tuple[int, int]:
        """File and row of a node."""
        file = int(np.searchsorted(self.first, number, side="right")) - 1
        return file, number - int(self.first[file])


def check_deadlock(
    parts: Sequence[Ordered], dependencies: Sequence[Arcs], joined: JoinedOperations, findings: Findings
) -> None:
    """Name circles in which ranks wait for each other.

    A circle of dependencies is one for every reader. Where there is none, but the order in which ranks issue their
    communication makes one, those that do one thing after the other (ASTRA-sim does) hang.
    """
    if joined.meetings.is_empty() and joined.messages.is_empty():
        return
    first = np.concatenate([[0], np.cumsum([len(part.table) for part in parts])]).astype(np.int64)
    messages, meetings = joined.messages, joined.meetings
    arcs = Arcs(
        np.concatenate([a.source + first[k] for k, a in enumerate(dependencies)]),
        np.concatenate([a.target + first[k] for k, a in enumerate(dependencies)]),
    ) + Arcs(
        first[messages["file"].to_numpy()] + messages["row"].to_numpy(),
        first[messages["file_right"].to_numpy()] + messages["row_right"].to_numpy(),
    )
    meets = np.arange(first[-1], dtype=np.int64)
    part_of = first[meetings["file"].to_numpy()] + meetings["row"].to_numpy()
    _, index = np.unique(meetings["meeting"].to_numpy(), return_inverse=True)
    lowest = np.full(index.max() + 1 if len(index) else 0, first[-1], dtype=np.int64)
    np.minimum.at(lowest, index, part_of)
    meets[part_of] = lowest[index]
    # From each collective or send of a rank to the next one that it issues. Where the files hold when each began, that
    # is their order for those who take it as recorded.
    sources, targets = [], []
    for number, part in enumerate(parts):
        rows = rows_of(part.table, COLLECTIVE, SEND)
        rows = rows[part.position[rows] >= 0]
        started = part.table.nodes["start_us"].to_numpy()[rows]
        began = started if findings.target == "chakra" else np.zeros(len(rows), np.uint64)
        rows = rows[np.lexsort((part.position[rows], began))] + first[number]
        sources.append(rows[:-1])
        targets.append(rows[1:])
    queue = Arcs(np.concatenate(sources), np.concatenate(targets))
    for rule, job in (("deadlock", _Job(first, meets, arcs)), ("collective-order", _Job(first, meets, arcs + queue))):
        merged = Arcs(meets[job.arcs.source], meets[job.arcs.target])
        stuck = settle(len(meets), merged, np.arange(len(meets))).stuck
        own = merged.source == merged.target
        rings = circles(Arcs(merged.source[~own], merged.target[~own]), stuck) if stuck.any() else []
        several = [ring for ring in rings if len(ring) > 1]
        if several:
            file, row = job.where(several[0][0])
            nodes = [parts[file].table.nodes["id"][row]]
            examples = [(nodes[0], _circle(parts, job, ring)) for ring in several[:5]]
            queued = rule == "collective-order"
            severity: Severity | None = "warning" if queued and findings.target == "chakra" else None
            findings.add(rule, parts[file].location, examples, nodes, count=len(several), severity=severity)
        if rings:
            return


def _circle(parts: Sequence[Ordered], job: _Job, ring: list[int]) -> str:
    """Who waits for whom: on each rank of the circle, what waits there, and for what before it."""
    # For every two neighbours of the circle, the dependency between them: what waits, and for what (file, row).
    inside = np.flatnonzero(np.isin(job.meets[job.arcs.target], ring) & np.isin(job.meets[job.arcs.source], ring))
    source, target = job.arcs.source[inside], job.arcs.target[inside]
    first_arc: dict[tuple[int, int], int] = {}
    for k, pair in enumerate(zip(job.meets[target].tolist(), job.meets[source].tolist(), strict=True)):
        first_arc.setdefault(pair, k)
    arcs = [first_arc[pair] for pair in zip(ring, [*ring[1:], ring[0]], strict=True)]
    steps = [(job.where(int(target[k])), job.where(int(source[k]))) for k in arcs]

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
